"""The command line: what a user types or writes into a JSON file becomes a config, or one clear line and a status."""
import dataclasses
import importlib
import json
import re
from typing import Annotated, Literal

import pytest
from conftest import ROOT
from helpers import start
from torch.distributed.run import get_args_parser

from common import clip, config, pretrained
from common.config import Count, Decay, Natural, NonNegative, Positive, Share, UserError


@dataclasses.dataclass(frozen=True)
class Base(config.Settings):
    # Training
    steps: Count = 10  # overridden below
    lr: Positive = 1e-3  # learning rate, 100 % of it
    cosine: bool = True  # whether the rate falls
    # Data
    data: str = "shapes"  # folder


@dataclasses.dataclass(frozen=True)
class Config(Base):
    # Data
    stage: Literal["all", "low", "high"] = "all"  # which to train
    # Training
    steps: Count = 100  # optimizer steps
    compile: bool = False  # use torch.compile
    widths: tuple[Count, ...] = (64, 128)  # of the levels
    scales: tuple[float, ...] = ()  # none at all
    seed: int = 0  # of everything
    workers: Natural = 0  # processes
    share: Share = 0.5  # of the data
    decay: Decay = 0.9  # of the average
    weight: NonNegative = 0.0  # of the loss
    even: Annotated[int, ("even", lambda value: value % 2 == 0)] = 2  # any bound


PRESETS = {"large": {"steps": 7, "lr": 0.5, "widths": (1, 2, 3)}, "tall": {"stage": "high", "steps": 5}}
STAGES = {"low": {}, "high": {"steps": 50, "lr": 0.25}}


def parse(*words, **more):
    return config.parse(Config, words, "how to use it", PRESETS, **more)


@pytest.mark.parametrize("words, expected", [
    ("", {}),
    ("--steps=5 --lr=3", {"steps": 5, "lr": 3.0}),
    ("--seed 9007199254740993", {"seed": 2 ** 53 + 1}),
    ("--lr 2.5e-4", {"lr": 0.00025}),
    ("--compile", {"compile": True}),
    ("--compile FALSE --no_cosine", {"compile": False, "cosine": False}),
    ("--widths 1,2,3", {"widths": (1, 2, 3)}),
    ("--widths=8,", {"widths": (8,)}),
    ("--scales 1,.5", {"scales": (1.0, 0.5)}),
    ("--data=--odd-one", {"data": "--odd-one"}),
    ("--steps 5 --steps 6", {"steps": 6}),
    ("--share 0 --decay 0 --weight 0 --workers 0 --seed -3", {"share": 0.0, "decay": 0.0, "seed": -3}),
    ("--share 1 --widths 1 --steps 1 --even -4", {"share": 1.0, "widths": (1,), "steps": 1, "even": -4}),
    ("--preset large", {"steps": 7, "lr": 0.5, "widths": (1, 2, 3)}),
    ("--preset tall --stage high", {"stage": "high", "steps": 5}),
])
def test_flags_become_values_of_the_fields_types(words, expected):
    found = parse(*words.split())
    assert found == Config(**expected)
    assert all(type(getattr(found, name)) is type(value) for name, value in expected.items())


def test_each_source_wins_over_the_weaker_ones_in_any_order(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"lr": 0.25, "steps": 8}))
    words = ["--preset", "large", "--config", path, "--steps", "9"]
    for order in (words, words[4:] + words[2:4] + words[:2]):
        assert parse(*map(str, order)) == Config(steps=9, lr=0.25, widths=(1, 2, 3))


def test_a_written_config_reads_back_as_it_was(tmp_path):
    path = tmp_path / "config.json"
    given = parse("--widths", "3,4", "--no_cosine", "--scales", "0.1", "--data", "größe, x", "--lr", "0.1", "--compile",
                  "--seed", str(2 ** 60 + 1), "--stage", "low")
    path.write_text(json.dumps({**config.as_json(given), "versions": {"torch": "2.13"}}), encoding="utf-8")
    assert config.as_json(given)["widths"] == [3, 4] and json.loads(path.read_text())["seed"] == 2 ** 60 + 1
    assert parse("--config", str(path)) == given == Config(**config.from_dict(Config, config.as_json(given), path))


@pytest.mark.parametrize("words, message", [
    ("--step 5", "--step: no such setting; did you mean --steps?"),
    ("--no_cosin", "--no_cosin: no such setting; did you mean --no_cosine?"),
    ("--qqqqqq 1", "--qqqqqq: no such setting; see --help"),
    ("--steps five", "--steps: invalid int value: 'five'"),
    ("--steps 1.5", "--steps: invalid int value: '1.5'"),
    ("--lr --steps 5", "--lr: expected one argument"), ("--lr fast", "--lr: invalid float value: 'fast'"),
    ("--stage middle", "--stage: invalid choice: 'middle' (choose from 'all', 'low', 'high')"),
    ("--widths 1,x", "--widths: invalid tuple[int, ...] value: '1,x'"),
    ("--preset tall --stage low", "--stage low: this preset is for --stage high alone"),
    ("--config nowhere.json", "No such file or directory: 'nowhere.json'"),
    ("--steps 0", "--steps: 0 is not above 0"),
    ("--workers=-1", "--workers: -1 is not 0 or more"),
    ("--weight=-0.5", "--weight: -0.5 is not 0 or more"),
    ("--share 1.5", "--share: 1.5 is not within 0 and 1"),
    ("--decay 1", "--decay: 1.0 is not 0 or more and below 1"),
    ("--widths 3,0", "--widths: (3, 0) is not above 0"),
    ("--even 3", "--even: 3 is not even"),
    ("--lr nan", "--lr: nan is not a finite number"),
    ("--lr inf", "--lr: inf is not a finite number"),
    ("--steps 1.5e0", "--steps: invalid int value: '1.5e0'"),
])
def test_a_mistake_on_the_command_line_ends_in_one_line_of_rank_0_and_status_2(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            config.run({"train": (lambda cfg: None, Config)}, "usage", "train", PRESETS)
        out, err = capsys.readouterr()
        assert caught.value.code == 2 and out == ""
        assert err == "" if rank == "1" else err.startswith("x.py: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("text, message", [
    ('{"step": 5}', "--step: no such setting; did you mean --steps?"),
    ('{"steps": true}', "--steps: invalid int value: 'True'"),
    ('{"cosine": 1}', "--cosine: invalid bool value: '1'"),
    ("[1, 2]", "expected a JSON object of settings, found list"), ('{"steps": 5', "not a JSON file"),
])
def test_a_bad_json_file_is_refused_by_its_name_and_the_key(text, message, tmp_path):
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        parse("--config", str(path))
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_stages_have_defaults_of_their_own_and_all_gives_each_in_turn():
    low, high = parse(stages=STAGES)
    assert (low, high) == (Config(stage="low"), Config(stage="high", steps=50, lr=0.25))
    assert parse("--stage", "high", "--lr", "0.5", stages=STAGES) == [Config(stage="high", steps=50, lr=0.5)]
    assert parse("--preset", "tall", stages=STAGES) == [Config(stage="high", steps=5, lr=0.25)]
    assert [cfg.steps for cfg in parse("--preset", "large", stages=STAGES)] == [7, 7]


def test_help_has_each_field_once_at_the_start_of_a_line_with_type_default_and_comment(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        parse("--steps", "3", "--help", stages=STAGES)
    out, err = capsys.readouterr()
    names = re.findall(r"^ *(?:-\w, )?--([\w-]+)", out, re.MULTILINE)
    assert sorted(names) == sorted([*(field.name for field in dataclasses.fields(Config)), "config", "preset", "help"])
    assert caught.value.code == 0 and err == ""
    words = " ".join(out.split())
    for text in ("how to use it Defaults of --stage low: as below Defaults of --stage high: steps 50, lr 0.25",
                 "Defaults of --preset large: steps 7", "--steps int optimizer steps [100]",
                 "--lr float learning rate, 100 % of it [0.001]", "--stage {all,low,high} which to train [all]",
                 "--cosine [bool] whether the rate falls [True] (off: --no_cosine)",
                 "--widths tuple[int, ...] of the levels [64,128]", "--preset {large,tall}"):
        assert text in words
    places = [out.index(text) for text in ("Data:", "--stage {", "--data", "Training:", "--lr float")]
    assert places == sorted(places) and out.count("Data:") == out.count("Training:") == 1  # as the subclass has them


@pytest.mark.parametrize("given, message", [
    (dict(validation=0.5, test=0.5), "--validation 0.5 and --test 0.5: expected two shares above 0"),
    (dict(validation=0.0), "expected two"), (dict(test=0.0), "two"), (dict(test=0.0, val_data="x"), "two shares"),
    (dict(betas=(0.9,)), "--betas: expected two decays, not 1"), (dict(ema_decay=1.5), "--ema_decay: 1.5 is not with"),
])
def test_settings_of_training_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        config.Training(**given)
    config.Training(validation=0.0, val_data="x")  # which then holds the validation set


def test_a_setting_that_has_no_effect_is_refused_if_it_was_given():
    table = (("lr", False, "--cosine"), ("steps", True, "nothing"))
    config.refuse_unused(Config(steps=5), table)
    with pytest.raises(UserError, match="--lr: it needs --cosine"):
        config.refuse_unused(Config(lr=0.5), table)


def test_a_package_that_is_missing_is_named_with_the_way_to_install_it():
    assert config.need("json", "reading") is json
    with pytest.raises(UserError, match="reading x needs no_such_package: pip install no_such_package"):
        config.need("no_such_package.part", "reading x")
    with pytest.raises(UserError, match="y needs other: pip install other"):
        config.need("no_such_package", "y", "other")


@pytest.mark.parametrize("error, relayed, status, printed", [
    (UserError("no such data"), False, 1, "x.py: error: no such data\n"), (UserError("of rank 1"), True, 1, ""),
    (OSError(28, "No space left", "x.pt"), False, 1, "x.py: error: [Errno 28] No space left: 'x.pt'\n")])
def test_an_error_while_running_ends_in_one_line_and_a_status(error, relayed, status, printed, monkeypatch, capsys):
    def fail(cfg):
        raise error
    error.relayed = relayed
    monkeypatch.setattr("sys.argv", ["there/x.py"])
    monkeypatch.setenv("RANK", "1")  # whichever rank meets it
    with pytest.raises(SystemExit) as caught:
        config.run({"train": (fail, Config)}, "usage", "train")
    assert caught.value.code == status and capsys.readouterr() == ("", printed)
    with pytest.raises(ZeroDivisionError):  # a mistake in the program keeps its traceback
        config.run({"train": (lambda cfg: 1 / 0, Config)}, "usage", "train")


@pytest.mark.parametrize("words, command, steps", [
    ("", "train", 100), ("--steps 3", "train", 3), ("train --steps 3", "train", 3),
    ("sample --steps 4", "sample", 4), ("--preset large", "train", 7)])
def test_the_first_word_chooses_the_command(words, command, steps, monkeypatch):
    called = []
    commands = {name: (lambda cfg, name=name: called.append((name, cfg.steps)), Config) for name in ("train", "sample")}
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    config.run(commands, "usage", "train", PRESETS)
    assert called == [(command, steps)]


@pytest.mark.parametrize("words, default, status, message", [
    ("smaple", "train", 2, "x.py: error: smaple: expected one of train, sample"),
    ("", None, 2, "x.py: error: command: expected one of train, sample"),
    ("--learning_rate 1", "train", 2, "--learning_rate: no such setting; did you mean --lr?"),
    ("sample --preset large", "train", 2, "--preset: no such setting"),
    ("--help", None, 0, "a COMMAND of train, sample"),
    ("sample --help", "train", 0, "the usage\nSettings of sample:"), ("--help", "train", 0, "Settings of train:")])
def test_a_word_that_is_no_command_is_told_what_there_is(words, default, status, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    with pytest.raises(SystemExit) as end:
        config.run({name: (lambda cfg: None, Config) for name in ("train", "sample")}, "the usage", default, PRESETS)
    out, err = capsys.readouterr()
    assert end.value.code == status and message in (err if status else out)


@pytest.mark.parametrize("script", ["train_prior", "train_decoder", "train_audio"])
def test_what_heads_a_section_of_a_scripts_help_is_a_title_and_not_the_rest_of_a_comment(script, capsys):
    for _, cls in importlib.import_module(script).COMMANDS.values():
        config.Parser(cls).print_help()
        headings = re.findall(r"^(\w.*):$", capsys.readouterr().out, re.MULTILINE)
        assert headings and all(heading[0].isupper() or heading == "options" for heading in headings)


# The flags of the scripts

SCRIPTS = [importlib.import_module(name) for name in ("train_prior", "train_decoder", "train_audio")]


def flags_of(script):
    """Every flag of a script's commands."""
    return {f"--{name}" for _, cls in script.COMMANDS.values() for field in dataclasses.fields(cls)
            for name in (field.name, f"no_{field.name}")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_torchrun_hands_on_every_flag_and_none_begins_one_of_its_own(script):
    theirs = get_args_parser()
    for flag in {*flags_of(script), "--config", "--preset"}:  # an abbreviation of theirs on Python 3.11 and older
        assert not [name for name in theirs._option_string_actions if name.startswith(flag)], flag
        args = theirs.parse_args(["--nproc_per_node=2", "script.py", "sample", flag, "x"])
        assert args.training_script_args == ["sample", flag, "x"]


def test_flags_that_messages_and_comments_name_exist():
    modules = clip.Config, clip.EmbedConfig, pretrained.ImportConfig, pretrained.ExportConfig
    known = set().union(*map(flags_of, SCRIPTS), {"--config", "--preset", "--help", "--nproc_per_node"},
                        {f"--{field.name}" for cls in modules for field in dataclasses.fields(cls)})
    for path in [*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), ROOT / "README.md"]:
        named = set(re.findall(r"(?<![\w-])--[a-z_]\w*", path.read_text())) - known - {*config.SYNONYMS, "--no_"}
        assert not named, (path.name, named)


def test_torchrun_repeats_a_users_mistake_at_its_end():
    _, err = start("train_prior", "--data", "nowhere", ranks=2).communicate()
    lines = [line for line in err.splitlines() if line.strip("=- ")]
    assert "nowhere/img_emb: no such folder" in lines[-1] and err.count("train_prior.py: error: nowhere/img_emb") == 1
