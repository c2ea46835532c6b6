"""The command line: flags and JSON files become a config; a mistake ends in one clear line."""
import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from conftest import GUIDES, ROOT, script
from torch.distributed.run import get_args_parser

from common import config
from common.config import Fraction, PositiveFloat, PositiveInt, UserError, field


@dataclasses.dataclass(frozen=True)
class Shared(config.Settings):
    """Shared settings"""

    stage: Literal["all", "low", "high"] = field("all", "which to train")
    preset: str = field("", "settings by name")
    steps: PositiveInt = field(10, "optimizer steps")
    lr: PositiveFloat = field(1e-3, "learning rate, 100 % of it")
    cosine: bool = field(True, "whether the rate falls")
    data: str = field("shapes", "folder")
    seed: int = field(0, "of everything", fixed=True)


@dataclasses.dataclass(frozen=True)
class Low(Shared):
    """Settings of the script"""

    stage: Literal["low"] = field("low", "this one")
    steps: PositiveInt = field(100, "steps of this stage")
    compile: bool = field(False, "use torch.compile")
    widths: tuple[PositiveInt, ...] = field((64, 128), "of the levels", model=True)
    share: Fraction = field(0.5, "of the data")
    even: Annotated[int, ("an even number", lambda value: value % 2 == 0)] = field(2, "any bound")
    plain: int = 1  # as a fork may write it


@dataclasses.dataclass(frozen=True)
class High(Shared):
    """Settings of the script"""

    stage: Literal["high"] = field("high", "this one")
    scales: tuple[float, ...] = field((), "none at all")


STAGES = {"all": Shared, "low": Low, "high": High}
PRESETS = {"large": {"steps": 7, "lr": 0.5}, "tall": {"stage": "high", "steps": 5}}
COMMANDS = {"train": (lambda cfg: None, STAGES), "sample": (lambda cfg: None, Low)}


def parse(*words, cls=Low):
    return config.parse(cls, words, "how to use it", PRESETS)


@pytest.fixture
def run(monkeypatch):
    """run(words, *arguments): call config.run, which must exit; returns the exit status."""
    def end(words, *arguments):
        monkeypatch.setattr("sys.argv", ["there/x.py", *words.split()])
        with pytest.raises(SystemExit) as caught:
            config.run(*arguments)
        return caught.value.code
    return end


def test_a_home_folder_is_found_and_a_comma_splits_unless_such_a_folder_is_there(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Places(config.Settings):
        """Places"""
        folder: str = config.field("")
        folders: tuple[str, ...] = config.field(())

    home = Path.cwd()
    monkeypatch.setenv("HOME", str(home))
    (home / "lr=1,bs=4").mkdir()
    words = ["--folder=~/a,b", "--folders=~/lr=1,bs=4", "--folders", "~/c,lr=1,d~"]
    cfg = parse(*words, cls=Places)
    assert cfg.folder == f"{home}/a,b"
    assert cfg.folders == (f"{home}/lr=1,bs=4", f"{home}/c", "lr=1", "d~")


@pytest.mark.parametrize("words, expected", {
    "--steps=5 --lr=3": Low(steps=5, lr=3.0),
    "--seed 9007199254740993 --plain -5": Low(seed=2**53 + 1, plain=-5),
    "--lr 2.5e-4 --compile": Low(lr=0.00025, compile=True),
    "--compile FALSE --cosine false": Low(cosine=False),
    "--widths=8, --share 0": Low(widths=(8,), share=0.0),
    "--widths 8,9 --widths 7": Low(widths=(8, 9, 7)),
    "--data=--odd-one": Low(data="--odd-one"),
    "--scales 1,.5": High(scales=(1.0, 0.5)),
    "--preset tall": High(steps=5, preset="tall"),
    "--preset large": Shared(steps=7, lr=0.5, preset="large"),
}.items())
def test_flags_become_values_of_the_types_of_the_stages_class(words, expected):
    found = parse("--stage", expected.stage, *words.split(), cls=STAGES)
    assert repr(found) == repr(expected)  # repr tells 3 from 3.0
    assert parse(*words.split(), cls=type(expected)) == expected
    if expected.preset == "tall":  # this preset names its stage
        assert parse(*words.split(), cls=STAGES) == expected


def test_a_preset_of_several_stages_gives_each_its_own_and_is_named(tmp_path):
    presets = {"wide": {"all": {"steps": 3}, "high": {"steps": 4}}, "old": {"low": {"steps": 5}}}

    def found(*words):
        return config.parse(STAGES, words, presets=presets)

    assert found("--preset=wide") == Shared(steps=3, preset="wide")
    assert found("--stage=high", "--preset=wide") == High(steps=4, preset="wide")
    path = tmp_path / "a.json"
    path.write_text('{"preset": "wide", "lr": 0.5}')
    assert found("--stage=high", f"--config={path}") == High(steps=4, lr=0.5, preset="wide")
    # A command without presets uses the other settings in the file.
    assert config.parse(Low, [f"--config={path}"]) == Low(lr=0.5, preset="wide")
    with pytest.raises(UserError, match="--preset old: also needs --stage low"):
        found("--preset=old")


def test_each_source_wins_over_the_weaker_ones_in_any_order(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"lr": 0.25, "steps": 8, "widths": [1, 2]}')
    words = ["--preset=large", f"--config={path}", "--steps=9"]
    for order in (words, words[::-1]):
        assert parse(*order) == Low(steps=9, lr=0.25, widths=(1, 2), preset="large")


def test_the_config_of_a_run_reads_back_as_it_was_or_with_notes_if_a_script_has_other_settings(
        tmp_path, capsys):
    path = tmp_path / "config.json"
    cfg = Low(widths=(3, 4), cosine=False, lr=1 / 3, data="größe, x", seed=2**60 + 1)
    values = {**config.as_json(cfg), "versions": {"torch": "2.13"}}
    path.write_text(json.dumps(values), encoding="utf-8")
    for cls in (Low, STAGES):  # the file also selects the stage
        assert parse("--config", str(path), cls=cls) == cfg
    assert capsys.readouterr().err == ""

    values["renamed"] = values.pop("seed")
    assert Low(**config.from_json(Low, values, "x.pt")) == dataclasses.replace(cfg, seed=0)
    assert capsys.readouterr().err.splitlines() == [
        "note: x.pt: ignored, because this script has no such setting: renamed",
        "note: x.pt: lacks these settings, which get their defaults: seed",
    ]
    with pytest.raises(UserError, match=r"x.pt: --widths: invalid .*: '1,x'"):
        config.from_json(Low, {**values, "widths": [1, "x"]}, "x.pt")


@pytest.mark.parametrize("words, given", [
    ("", set()),
    ("--preset large", {"preset"}),
    ("--preset=large --lr 0.5 --steps=100", {"preset", "lr", "steps"}),  # 100 is the default
    ("--config a.json --compile", {"lr", "widths", "compile"}),
    ("--config run.json", {"lr", "stage"}),
])
def test_what_the_user_gave_is_known_by_flags_and_files_but_not_by_presets(words, given):
    Path("a.json").write_text('{"lr": 0.25, "widths": [1, 2]}')
    Path("run.json").write_text('{"lr": 0.25, "stage": "low", "versions": {}, "renamed": 1}')
    cfg = parse(*words.split())
    assert set(cfg.given) == given
    changed = config.replace(cfg, seed=7)
    assert changed.given == cfg.given
    assert changed == dataclasses.replace(cfg, seed=7)
    assert Low().given is None  # made in Python


@pytest.mark.parametrize("settings, message", [
    ({"stage": "middle"}, "--stage middle: expected one of low"),
    ({"steps": 0}, "--steps 0: expected a number above 0"),
    ({"widths": (8, -1)}, "--widths -1: expected a number above 0"),
    ({"lr": float("nan")}, "--lr nan: expected a finite number"),
])
def test_a_config_made_in_python_is_checked_as_flags_are(settings, message):
    """Promise 8: a user error prints one line."""
    with pytest.raises(UserError, match=f"^{message}$"):
        Low(**settings)
    with pytest.raises(UserError, match=f"^{message}$"):
        config.replace(Low(), **settings)
    with pytest.raises(UserError, match=r"^--precision fp8: expected one of fp32, bf16, fp16$"):
        config.TrainingRun(precision="fp8")


@pytest.mark.parametrize("words, message", [
    ("--step 5", "--step: no such setting; did you mean --steps?"),
    ("--learning-rate 5 --qqqqqq", "--learning_rate: no such setting; see --help"),
    ("--local-rank=0", "--local_rank: no such setting; start the ranks with torchrun"),
    ("--steps 1.5", "--steps: invalid int value: '1.5'"),
    ("--lr --steps 5", "--lr: expected one argument"),
    ("--cosine maybe", "--cosine: invalid true_or_false value: 'maybe'"),
    ("--stage middle", "--stage middle: expected one of all, low, high"),
    ("--scales 1", "--scales: no such setting; see --help; settings of one stage need --stage"),
    ("--preset tall --stage low", "--preset tall: --stage: invalid choice: 'high'"),
    ("--config nowhere.json", "nowhere.json: expected a JSON object (FileNotFoundError"),
    ("sample --widths 1,x", "--widths: invalid tuple[int, ...] value: '1,x'"),
    ("sample --widths 3,0", "--widths 0: expected a number above 0"),
    ("sample --share 1.5", "--share 1.5: expected a number from 0 to 1"),
    ("sample --even 3", "--even 3: expected an even number"),
    ("--lr nan", "--lr nan: expected a finite number"),
    ("--lr inf", "--lr inf: expected a finite number"),
    ("--preset big", "--preset big: expected one of large, tall"),
    ("sample --preset big --lp 1", "--lp: no such setting"),  # `sample` does not look up presets
    ("smaple", "smaple: expected one of train, sample; COMMAND --help"),
])
def test_a_mistake_on_the_command_line_ends_in_one_line_of_rank_0_and_status_2(
        words, message, run, monkeypatch, capsys):
    assert run(words, COMMANDS, "usage", "train", PRESETS) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("x.py: error: ") and err.count("\n") == 1
    assert message in err
    monkeypatch.setenv("RANK", "1")
    assert run(words, COMMANDS, "usage", "train", PRESETS) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text, message", {
    '{"step": 5}': "--step: no such setting; did you mean --steps?",
    '{"steps": true}': "--steps: invalid int value: 'True'",
    "[1, 2]": "expected a JSON object",
    '{"steps": 5': "expected a JSON object",
    '{"data": ' + '{"a":' * 100_000: "expected a JSON object",
}.items())
def test_a_bad_json_file_is_refused_by_its_name_and_the_key(text, message, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
        parse("--config", str(path))


def test_help_has_each_field_once_with_type_default_and_comment(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        parse("--steps", "3", "--help")
    out = capsys.readouterr().out
    names = [each.name for each in dataclasses.fields(Low)]
    found = re.findall(r"^  --(\w+)", out, re.MULTILINE)
    assert sorted(found) == sorted([*names, "config"])
    # The settings of the script come before the shared ones.
    assert re.search(
        r"^how to use it .*--config FILE.json .*Settings of the script: .*"
        r"--steps int steps of this stage \[100\] .*"
        r"--widths tuple\[int, ...\] of the levels \[64,128\] .*"
        r"Shared settings: .*--lr float learning rate, 100 % of it \[0.001\] "
        r"--cosine \[bool\] whether the rate falls \[True\]",
        " ".join(out.split()),
    )


@pytest.mark.parametrize("words, message", [
    ("sample --help", "the usage\nSettings of sample:"),
    ("--stage high -h", "--scales"),
])
def test_help_is_that_of_the_command_and_stage(words, message, run, capsys):
    assert run(words, COMMANDS, "the usage", "train") == 0
    assert message in capsys.readouterr().out


def failing(error):
    def fail(cfg):
        raise error
    return {"train": (fail, Low)}, "usage", "train"


@pytest.mark.parametrize("error, status, printed", [
    (UserError("no such data"), 1, "x.py: error: no such data\n"),
    (OSError(28, "No space", "x.pt"), 1, "x.py: error: [Errno 28] No space: 'x.pt'\n"),
    (KeyboardInterrupt(), 130, ""),
    (SystemExit(1), 1, ""),  # another rank has printed the error
])
def test_an_error_while_running_ends_in_one_line_of_the_rank_that_met_it(
        error, status, printed, run, monkeypatch, capsys):
    """Promises 6 and 8: all ranks end together; a user error prints one line."""
    monkeypatch.setenv("RANK", "1")
    assert run("", *failing(error)) == status
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError, NameError])
def test_a_fault_of_the_program_keeps_its_traceback(kind, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x.py"])
    with pytest.raises(kind, match=r"^shapes differ$"):
        config.run(*failing(kind("shapes differ")))
    assert capsys.readouterr() == ("", "")


def test_an_error_is_explained_by_a_message_unless_it_explains_itself():
    damaged = pytest.raises(UserError, match=r"^a\.npy: damaged \(KeyError: 'b'\)$")
    with damaged as caught, config.explained("a.npy: damaged"):
        raise KeyError("b")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UserError, match=r"^as it is$"), config.explained("a.npy: damaged"):
        raise UserError("as it is")

    class Missing(UserError):
        """A subclass of UserError."""

    with pytest.raises(Missing, match=r"^b: .*as it is"), config.explained("b:", Missing):
        raise UserError("as it is")
    with pytest.raises(KeyboardInterrupt), config.explained("a.npy: damaged"):
        raise KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class Ruled(config.Settings):
    """One setting for each rule of `field`"""

    plain: int = field(1)
    width: int = config.model_field(2)
    kept: int = field(3, fixed=True)
    samples: int = field(4, affects_val_loss=True)


@pytest.mark.parametrize("rule, settings", [
    ("model", {"width": 2}),
    ("fixed", {"width": 2, "kept": 3}),
    ("affects_val_loss", {"samples": 4}),
])
def test_a_setting_is_under_the_rules_that_its_field_says(rule, settings):
    assert config.settings_with(Ruled(), rule) == settings


def test_a_setting_that_does_nothing_in_a_case_is_refused():
    config.check_unused(Ruled(kept=5), "without a file", "plain", "width")
    with pytest.raises(UserError, match=r"^--width has no effect without a file; leave it out$"):
        config.check_unused(Ruled(width=5), "without a file", "plain", "width")


@dataclasses.dataclass
class Saver:
    repo: str
    kind: str = "model"


@pytest.mark.parametrize("text, found", [
    ("hub repo=a/b", Saver("a/b")),
    ('hub kind=all repo="a = b"', Saver("a = b", "all")),
    (r'hub repo=C:\\a\new#1 kind="D:\b c"', Saver(r"C:\\a\new#1", r"D:\b c")),
    ("hub repo=~/a kind=~", Saver(str(Path.home() / "a"), str(Path.home()))),
    ("hub", None),
    ("hub repo=a more=b", None),
    ("hub repo", None),
    ("hug repo=a", None),
    ("", None),
    ('hub repo="a', None),
])
def test_words_of_a_setting_describe_an_object_or_are_refused(text, found):
    def parsed():
        return config.parse_options("save", text, {"hub": Saver, "disk": Saver})

    if found:
        assert parsed() == found
        return
    message = f"--save {text}: expected one of hub, disk, then OPTION=VALUE …"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        parsed()


def test_fractions_held_out_that_leave_nothing_are_refused():
    with pytest.raises(UserError, match=r"--validation .* and --test .*: expected two fractions"):
        config.TrainingRun(validation=0.5, test=0.5)


def test_a_package_that_is_missing_is_named_with_the_way_to_install_it():
    assert config.need("json", "reading") is json
    with pytest.raises(UserError, match="reading x needs nothing_such: pip install nothing_such"):
        config.need("nothing_such.part", "reading x")
    with pytest.raises(UserError, match="y needs other: pip install other"):
        config.need("nothing_such", "y", "other")


def test_what_a_console_of_ascii_cannot_print_is_escaped(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    found = script(
        'from common import config\n'
        'config.run({"x": (lambda cfg: print("\u00fcber"), config.Settings)}, "usage", "x")'
    )
    assert found == (0, r"\xfcber" + "\n", "")


# The flags of the scripts

def flags_of(commands):
    """Flags of all `commands`, except --config."""
    classes = []
    for _, cls in commands.values():
        classes += cls.values() if isinstance(cls, dict) else [cls]
    return {f"--{each.name}" for cls in classes for each in dataclasses.fields(cls)}


SCRIPTS = ["train_prior", "train_decoder", "train_audio"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrun_hands_on_every_flag_and_none_begins_one_of_its_own(script):
    torchrun = get_args_parser()
    for flag in flags_of(importlib.import_module(script).COMMANDS):
        # On Python 3.11 and older, torchrun would take a prefix of its own flag for that flag.
        assert not [name for name in torchrun._option_string_actions if name.startswith(flag)]
        args = torchrun.parse_args(["--nproc_per_node=2", "script.py", "sample", flag, "x"])
        assert args.training_script_args == ["sample", flag, "x"]


def test_flags_that_messages_and_comments_name_exist(monkeypatch):
    known = {"--config", "--help", "--shm"}  # --shm-size is docker's
    known |= {"--nproc_per_node", "--nnodes", "--rdzv_endpoint"}  # of torchrun

    def run(commands, *more, **named):
        known.update(flags_of(commands))

    monkeypatch.setattr(config, "run", run)
    for name in [*SCRIPTS, "common.data.embed", "common.interop.pretrained"]:
        importlib.import_module(name).main()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py"), *GUIDES]:
        named = set(re.findall(r"(?<![\w-])--[a-z_]\w*", path.read_text()))
        assert not named - known, path.name


@dataclasses.dataclass(frozen=True)
class Stages(config.TrainingRun):
    """Training of one stage, or of all"""

    stage: str = "all"


@pytest.mark.parametrize("words", [
    "--init_from x.pt", "--load x.pt", "--save local", "--logger=wandb id=x"])
def test_what_is_of_one_stage_is_refused_where_all_are_trained(words):
    """Promise 8: a user error prints one line."""
    flag, _, value = words.replace("=", " ", 1).partition(" ")
    with pytest.raises(UserError, match="these are for one stage; give --stage"):
        config.parse(Stages, [flag, value])
    assert config.parse(Stages, [flag, value, "--stage", "low"]).stage == "low"
    assert config.parse(Stages, ["--logger", "wandb project=x"]).stage == "all"


def test_a_programming_error_of_a_logger_is_not_a_mistake_of_its_flag():
    class Broken:
        def __init__(self, place=""):
            raise NameError(place)

    with pytest.raises(NameError, match="here"):
        config.parse_options("logger", "broken place=here", {"broken": Broken})
    with pytest.raises(UserError, match="--logger broken x=1: expected one of broken"):
        config.parse_options("logger", "broken x=1", {"broken": Broken})
