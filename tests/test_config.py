"""The command line: flags or a JSON file become a config, or one clear line and a status."""
import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from conftest import ROOT
from helpers import CONSOLES, start
from torch.distributed.run import get_args_parser

from common import clip, config, pretrained
from common.config import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
    field,
)


@dataclasses.dataclass(frozen=True)
class Base(config.Settings):
    """Shared settings"""

    steps: PositiveInt = field(10, "overridden below")
    lr: PositiveFloat = field(1e-3, "learning rate, 100 % of it", inherit=True)
    cosine: bool = field(True, "whether the rate falls")
    data: str = field("shapes", "folder")


@dataclasses.dataclass(frozen=True)
class Config(Base):
    """Settings of the script"""

    stage: Literal["all", "low", "high"] = field("all", "which to train")
    steps: PositiveInt = field(100, "optimizer steps")
    compile: bool = field(False, "use torch.compile")
    widths: tuple[PositiveInt, ...] = field((64, 128), "of the levels", model=True)
    scales: tuple[float, ...] = field((), "none at all", stages=("high",))
    seed: int = field(0, "of everything", fixed=True)
    workers: NonNegativeInt = field(0, "processes")
    share: Fraction = field(0.5, "of the data", needs="compile")
    decay: Decay = field(0.9, "of the average", needs="data=emb")
    weight: NonNegativeFloat = field(0.0, "of the loss", stages=("low",), fixed=True)
    even: Annotated[int, ("even", lambda value: value % 2 == 0)] = field(2, "any bound")
    init_from: str = field("", "file of a model")
    plain: int = 1  # as a fork may write it


PRESETS = {
    "large": {"steps": 7, "lr": 0.5, "widths": (1, 2, 3)},
    "tall": {"stage": "high", "steps": 5},
}
STAGES = {"low": {}, "high": {"steps": 50, "lr": 0.25}}
COMMANDS = {"train": (lambda cfg: None, Config), "sample": (lambda cfg: None, Config)}


def parse(*words, **more):
    return config.parse(Config, words, "how to use it", PRESETS, **more)


@pytest.fixture
def run(monkeypatch):
    """run(words, *arguments) -> status of config.run, which must end."""
    def end(words, *arguments):
        monkeypatch.setattr("sys.argv", ["there/x.py", *words.split()])
        with pytest.raises(SystemExit) as caught:
            config.run(*arguments)
        return caught.value.code
    return end


@pytest.mark.parametrize("words, expected", [
    ("--steps=5 --lr=3", {"steps": 5, "lr": 3.0}),
    ("--seed 9007199254740993", {"seed": 2**53 + 1}),
    ("--seed 1e6", {"seed": 1_000_000}),
    ("--lr 2.5e-4 --compile", {"lr": 0.00025, "compile": True}),
    ("--compile FALSE --no_cosine", {"compile": False, "cosine": False}),
    ("--widths 1,2,3", {"widths": (1, 2, 3)}),
    ("--widths=8, --scales 1,.5", {"widths": (8,), "scales": (1.0, 0.5)}),
    ("--data=--odd-one", {"data": "--odd-one"}),
    ("--share 0 --compile", {"share": 0.0, "compile": True}),
    ("--decay 0 --data emb", {"decay": 0.0, "data": "emb"}),
    ("--plain 5 --preset tall", {"plain": 5, "stage": "high", "steps": 5}),
])
def test_flags_become_values_of_the_fields_types(words, expected):
    found = parse(*words.split())
    assert found == Config(**expected)
    for name, value in expected.items():
        assert type(getattr(found, name)) is type(value)


def test_each_source_wins_over_the_weaker_ones_in_any_order(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"lr": 0.25, "steps": 8}')
    words = ["--preset=large", f"--config={path}", "--steps=9"]
    for order in (words, reversed(words)):
        assert parse(*order) == Config(steps=9, lr=0.25, widths=(1, 2, 3))


def test_a_written_config_reads_back_as_it_was(tmp_path):
    path = tmp_path / "config.json"
    cfg = Config(widths=(3, 4), cosine=False, scales=(0.1,), data="größe, x", seed=2**60 + 1)
    values = config.as_json(cfg)
    assert values["widths"] == [3, 4]
    path.write_text(json.dumps({**values, "versions": {"torch": "2.13"}}), encoding="utf-8")
    assert parse("--config", str(path)) == cfg == Config(**config.from_json(Config, values, path))


def test_a_file_of_an_earlier_run_may_have_other_settings_which_are_noted(tmp_path, capsys):
    path = tmp_path / "config.json"
    values = config.as_json(Config(steps=3)) | {"renamed": 1, "versions": {"torch": "2.13"}}
    del values["lr"]
    path.write_text(json.dumps(values))
    assert parse("--config", str(path)) == Config(steps=3)
    assert capsys.readouterr().err.splitlines() == [
        f"note: {path}: left out, as this script has no such setting: renamed",
        f"note: {path}: not in it, so by default: lr",
    ]


def test_init_from_takes_the_models_settings_and_refuses_others():
    def init(*words):
        return parse("--init_from=x.pt", *words, model_settings=lambda path: settings)

    settings = {"widths": [8], "lr": 0.5, "steps": 7, "versions": {}}
    cfg = init()
    assert (cfg.widths, cfg.lr, cfg.steps) == ((8,), 0.5, 100)  # steps are not the model's
    assert init("--lr=2").lr == 2
    with pytest.raises(UserError, match=r"--widths 9: x.pt is a model of 8"):
        init("--widths=9")


def test_rules_of_a_setting_stand_with_it():
    assert config.names(Config, "model") == ["widths"]
    high = {"widths": (64, 128), "seed": 0}
    assert config.kept(Config(stage="high")) == high
    assert config.kept(Config(stage="low")) == {**high, "weight": 0.0}


@pytest.mark.parametrize("words, message", [
    ("--step 5", "--step: no such setting; did you mean --steps?"),
    ("--no_cosin", "--no_cosin: no such setting; did you mean --no_cosine?"),
    ("--qqqqqq 1", "--qqqqqq: no such setting; see --help"),
    ("--steps 1.5", "--steps: invalid int value: '1.5'"),
    ("--lr --steps 5", "--lr: expected one argument"),
    ("--stage middle", "--stage: invalid choice: 'middle' (choose from 'all', 'low', 'high')"),
    ("--widths 1,x", "--widths: invalid tuple[int, ...] value: '1,x'"),
    ("--share 0.7", "--share: it has no effect without --compile"),
    ("--decay 0.5", "--decay: it has no effect without --data emb"),
    ("--stage low --scales 1", "--scales: it has no effect on --stage low, only on high"),
    ("--preset tall --stage low", "--stage low: this preset is for --stage high alone"),
    ("--config nowhere.json", "No such file or directory: 'nowhere.json'"),
    ("--widths 3,0", "--widths: (3, 0) is not above 0"),
    ("--weight=-0.5", "--weight: -0.5 is not 0 or more"),
    ("--compile --share 1.5", "--share: 1.5 is not within 0 and 1"),
    ("--decay 1", "--decay: 1.0 is not 0 or more and below 1"),
    ("--even 3", "--even: 3 is not even"),
    ("--lr nan", "--lr: nan is not a finite number"),
    ("--seed 1e30", "--seed: 1000000000000000019884624838656 does not fit into 64 bits"),
    ("--plain -9223372036854775809", "--plain: -9223372036854775809 does not fit into 64 bits"),
    ("--data a\udcff", r"--data: 'a\udcff' has a zero byte, or is not text in UTF-8"),
    ("smaple", "smaple: expected one of train, sample"),
    ("sample --preset large", "--preset: no such setting"),
])
def test_a_mistake_on_the_command_line_ends_in_one_line_of_rank_0_and_status_2(
        words, message, run, monkeypatch, capsys):
    assert run(words, COMMANDS, "usage", "train", PRESETS, STAGES) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("x.py: error: ") and err.count("\n") == 1
    assert message in err
    monkeypatch.setenv("RANK", "1")
    assert run(words, COMMANDS, "usage", "train", PRESETS, STAGES) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text, message", [
    ('{"step": 5}', "--step: no such setting; did you mean --steps?"),
    ('{"steps": true}', "--steps: True is not int"),
    ('{"data": null}', "--data: None is not str"),
    ('{"widths": [1, "2"]}', "--widths: '2' is not int"),
    ("[1, 2]", "expected a JSON object of settings, found list"),
    ('{"steps": 5', "not a JSON file"),
    ('{"steps": 5, "lr": 1, "steps": 6}', "not a JSON file (ValueError('steps is in it twice"),
    ('{"steps": ' + "[" * 100_000, "not a JSON file"),
    ('{"data": ' + '{"a":' * 100_000, "not a JSON file"),
])
def test_a_bad_json_file_is_refused_by_its_name_and_the_key(text, message, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
        parse("--config", str(path))


@dataclasses.dataclass(frozen=True)
class InFolder(config.Settings):
    """Where"""

    run_dir: config.Folder = config.field("runs/x", "folder")


@pytest.mark.parametrize("path", ["", "x/prior.pt", "file"])
def test_what_cannot_be_a_folder_is_refused_with_the_flag(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UserError, match=f"^--run_dir: {path} is not a folder, or a name for one"):
        config.parse(InFolder, ["--run_dir", path])
    Path("old.pt").mkdir()
    for path in (".", "x/y", "old.pt"):
        assert config.parse(InFolder, ["--run_dir", path]).run_dir == path


@pytest.mark.parametrize("name", ["a\\u0000b", "a\\ud800"])
def test_a_text_of_a_file_that_no_file_can_be_named_is_refused(name, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(f'{{"data": "{name}"}}')
    with pytest.raises(UserError, match=r"--data: .* has a zero byte, or is not text in UTF-8"):
        parse("--config", str(path))


def test_stages_have_defaults_of_their_own_and_all_gives_each_in_turn():
    low = Config(stage="low")
    high = Config(stage="high", steps=50, lr=0.25)
    assert parse(stages=STAGES) == [low, high]
    given = parse("--stage=high", "--lr=0.5", stages=STAGES)
    assert given == [dataclasses.replace(high, lr=0.5)]
    assert parse("--preset=tall", stages=STAGES) == [dataclasses.replace(high, steps=5)]
    assert [cfg.steps for cfg in parse("--preset=large", stages=STAGES)] == [7, 7]


def test_help_has_each_field_once_at_the_start_of_a_line_with_type_default_and_comment(
        monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        parse("--steps", "3", "--help", stages=STAGES)
    out = capsys.readouterr().out
    found = re.findall(r"^ *(?:-\w, )?--([\w-]+)", out, re.MULTILINE)
    names = [each.name for each in dataclasses.fields(Config)]
    assert sorted(found) == sorted([*names, "config", "preset", "help"])
    words = " ".join(out.split())
    for text in (
        "how to use it Defaults of --stage low: as below Defaults of --stage high: steps 50, lr",
        "Defaults of --preset large: steps 7",
        "--preset {large,tall}",
        "--steps int optimizer steps [100]",
        "--widths tuple[int, ...] of the levels [64,128]",
    ):
        assert text in words
    # The settings of the script come before the shared ones.
    assert re.search(
        r"Settings of the script: .*--stage \{all,low,high\} which to train \[all\] .*"
        r"Shared settings: .*--lr float learning rate, 100 % of it \[0\.001\] .*"
        r"--cosine \[bool\] whether the rate falls \[True\] \(off: --no_cosine\)",
        words,
    )


@pytest.mark.parametrize("given", [
    dict(validation=0.5, test=0.5),
    dict(validation=0.0),
    dict(test=0.0),
    dict(test=0.0, val_data="x"),
])
def test_fractions_held_out_that_contradict_each_other_are_refused(given):
    with pytest.raises(UserError, match=r"--validation .* and --test .*: expected two fractions"):
        config.TrainingRun(**given)
    config.TrainingRun(validation=0.0, val_data="x")  # which then holds the validation set


def test_a_package_that_is_missing_is_named_with_the_way_to_install_it():
    assert config.need("json", "reading") is json
    with pytest.raises(UserError, match="reading x needs nothing_such: pip install nothing_such"):
        config.need("nothing_such.part", "reading x")
    with pytest.raises(UserError, match="y needs other: pip install other"):
        config.need("nothing_such", "y", "other")


@pytest.mark.parametrize("error, relayed, printed", [
    (UserError("no such data"), False, "x.py: error: no such data\n"),
    (UserError("of rank 1"), True, ""),
    (OSError(28, "No space", "x.pt"), False, "x.py: error: [Errno 28] No space: 'x.pt'\n"),
])
def test_an_error_while_running_ends_in_one_line_and_a_status(
        error, relayed, printed, run, monkeypatch, capsys):
    def fail(cfg):
        raise error

    error.relayed = relayed
    monkeypatch.setenv("RANK", "1")  # whichever rank meets it
    assert run("", {"train": (fail, Config)}, "usage", "train") == 1
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize("words, command, steps", [
    ("", "train", 100),
    ("train --steps 3", "train", 3),
    ("sample --steps 4", "sample", 4),
    ("--preset large", "train", 7),
])
def test_the_first_word_chooses_the_command(words, command, steps, monkeypatch):
    called = []
    commands = {
        "train": (lambda cfg: called.append(("train", cfg.steps)), Config),
        "sample": (lambda cfg: called.append(("sample", cfg.steps)), Config),
    }
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    config.run(commands, "usage", "train", PRESETS)
    assert called == [(command, steps)]


@pytest.mark.parametrize("words, default, message", [
    ("--help", None, "a COMMAND of train, sample"),
    ("sample --help", "train", "the usage\nSettings of sample:"),
    ("--help", "train", "Settings of train:"),
])
def test_help_is_that_of_the_command(words, default, message, run, capsys):
    assert run(words, COMMANDS, "the usage", default) == 0
    assert message in capsys.readouterr().out
    assert run("", COMMANDS, "the usage") == 2  # without a default
    assert "command: expected one of train, sample" in capsys.readouterr().err


# Text files

@pytest.mark.parametrize("encoding", [
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"
])
def test_a_text_is_decoded_by_its_byte_order_mark_or_as_utf_8(encoding):
    text = "ein rotes Dreieck über 빨간 △ 😀"
    mark = "\ufeff" if encoding.endswith("e") else ""  # Python writes it for the others
    assert config.decode_text(f"{mark}{text}".encode(encoding), "x") == text


@pytest.mark.parametrize("content", ["über".encode("cp1252"), "a b".encode("utf-16-le")])
def test_a_text_of_an_unmarked_other_encoding_is_refused_by_name(content, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"texts\.txt: not text in UTF-8.*save it as UTF-8"):
        config.texts_of("", path)


# Consoles

@pytest.mark.parametrize("variables", CONSOLES)
def test_help_is_whole_on_a_console_of_ascii(variables, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    process = start("train_audio", "--help")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "--timeout_minutes" in out and r"\u2026" in out


SPEAK = """
import sys
from common import config
print("before")
config.run({"speak": (lambda cfg: [print("über", "红", i) for i in range(9999)], config.Settings)},
    "usage", "speak")
print("after", file=sys.stderr)
"""


def test_what_is_printed_before_and_after_a_reader_leaves_is_no_error(script):
    whole = script(SPEAK)
    assert whole.stdout.startswith("before\nüber 红 0\n") and whole.stdout.endswith("红 9998\n")
    process = script(SPEAK, wait=False)
    assert process.stdout.readline() == "before\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("after\n", 0)


# The flags of the scripts

SCRIPTS = [importlib.import_module(f"train_{name}") for name in ("prior", "decoder", "audio")]
OTHERS = [clip.Config, clip.EmbedConfig, pretrained.ImportConfig, pretrained.ExportConfig]
SHARED = {"--config", "--preset"}


def flags_of(classes):
    names = {each.name for cls in classes for each in dataclasses.fields(cls)}
    return {f"--{prefix}{name}" for name in names for prefix in ("", "no_")} | SHARED


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_torchrun_hands_on_every_flag_and_none_begins_one_of_its_own(script):
    torchrun = get_args_parser()
    for flag in flags_of(cls for _, cls in script.COMMANDS.values()):
        # On Python 3.11 and older it would be an abbreviation of torchrun's.
        assert not [name for name in torchrun._option_string_actions if name.startswith(flag)]
        args = torchrun.parse_args(["--nproc_per_node=2", "script.py", "sample", flag, "x"])
        assert args.training_script_args == ["sample", flag, "x"]


@pytest.mark.parametrize("flag, nearest", [
    ("--max_train_steps", "--steps?"),
    ("--num_train_epochs", "--steps?"),
    ("--num-epochs", "--steps?"),
    ("--gradient_accumulation_steps", "--chunk_size (samples in one forward pass)?"),
    ("--train_batch_size", "--batch_size (over all ranks)?"),
    ("--batch-size", "--batch_size?"),
    ("--learning-rate", "--lr?"),
    ("--resume_from_checkpoint", "--load (the same command resumes without it)?"),
    ("--output_dir", "--run_dir?"),
    ("--mixed_precision", "--precision?"),
])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_flag_of_another_package_is_answered_with_its_nearest_meaning(flag, nearest, script):
    with pytest.raises(UserError) as caught:
        config.parse(script.COMMANDS["train"][1], [flag, "5"])
    assert str(caught.value) == f"{flag}: no such setting; did you mean {nearest}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_flag_of_another_package_names_one_that_exists(script):
    known = flags_of([script.COMMANDS["train"][1]])
    for flag, nearest in config.SYNONYMS.items():
        assert flag not in known
        if script.__name__ != "train_audio":  # which has no checkpointing
            assert nearest.split()[0] in known


@pytest.mark.parametrize("words", [
    "--width 10000000",
    "--workers 1000000",
    "--timeout_minutes 1e300",
    "--timeout_minutes 0.001",
])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_number_beyond_all_machines_is_refused_with_its_bounds(words, script):
    with pytest.raises(UserError, match=r"--\w+: \S+ is not within .* and "):
        config.parse(script.COMMANDS["train"][1], words.split())


def test_flags_that_messages_and_comments_name_exist():
    classes = [cls for script in SCRIPTS for _, cls in script.COMMANDS.values()]
    known = flags_of(classes + OTHERS) | {"--help", "--nproc_per_node", "--no_", *config.SYNONYMS}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), ROOT / "README.md"]:
        named = set(re.findall(r"(?<![\w-])--[a-z_]\w*", path.read_text()))
        assert not named - known, path.name


def test_torchrun_repeats_a_users_mistake_at_its_end():
    _, err = start("train_prior", "--data", "nowhere", ranks=2).communicate()
    lines = [line for line in err.splitlines() if line.strip("=- ")]
    assert "nowhere/img_emb: no such folder" in lines[-1]
    assert err.count("train_prior.py: error: nowhere/img_emb") == 1
