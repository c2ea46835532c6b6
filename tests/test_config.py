"""The command line: what a user types or writes into a JSON file becomes a config, or one clear line and status 2."""
import dataclasses
import importlib
import json
import math
import re
from typing import Literal

import pytest

from common import config


@dataclasses.dataclass(frozen=True)
class Config:
    # Training
    steps: int = 100  # optimizer steps
    lr: float = 1e-3  # learning rate
    cosine: bool = True  # whether the rate falls
    compile: bool = False  # use torch.compile
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of matrix products
    # Data
    data: str = "shapes"  # folder
    widths: tuple[int, ...] = (64, 128)  # of the levels
    scales: tuple[float, ...] = ()  # none at all
    clip: float | None = 1.0  # bound of the norm
    seed: int = 0  # of everything

    def __post_init__(self):
        if self.steps < 1:
            raise config.UserError(f"--steps {self.steps}: expected at least 1")


PRESETS = {"large": {"steps": 7, "lr": 0.5, "widths": (1, 2, 3)}}


def parse(*words):
    return config.parse(Config, words, "usage: try", PRESETS)


@pytest.mark.parametrize("words, expected", [
    ("--steps 5", {"steps": 5}),
    ("--steps=5", {"steps": 5}),
    ("--steps 1e3", {"steps": 1000}),
    ("--seed 9007199254740993", {"seed": 2 ** 53 + 1}),
    ("--seed -3", {"seed": -3}),
    ("--lr 3", {"lr": 3.0}),
    ("--lr 2.5e-4", {"lr": 0.00025}),
    ("--compile", {"compile": True}),
    ("--compile --steps 4", {"compile": True, "steps": 4}),
    ("--compile false", {"compile": False}),
    ("--cosine=false", {"cosine": False}),
    ("--no_cosine", {"cosine": False}),
    ("--no-cosine", {"cosine": False}),
    ("--precision bf16", {"precision": "bf16"}),
    ("--widths 1,2,3", {"widths": (1, 2, 3)}),
    ("--widths=8", {"widths": (8,)}),
    ("--scales 1,.5", {"scales": (1.0, 0.5)}),
    ("--clip none", {"clip": None}),
    ("--clip 0.5", {"clip": 0.5}),
    ("--data=--odd", {"data": "--odd"}),
    ("--steps 5 --steps 6", {"steps": 6}),
    ("--preset large", {"steps": 7, "lr": 0.5, "widths": (1, 2, 3)}),
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
    made = parse("--widths", "3,4", "--clip", "none", "--no_cosine", "--scales", "0.1", "--data", "größe, x",
                 "--lr", "0.1", "--seed", str(2 ** 60 + 1), "--precision", "fp16")
    path.write_text(json.dumps({**dataclasses.asdict(made), "versions": {"torch": "2.13"}}), encoding="utf-8")
    assert parse("--config", str(path)) == made


@pytest.mark.parametrize("words, message", [
    ("--step 5", "--step: no such setting; did you mean --steps?"),
    ("--precison fp16", "did you mean --precision?"),
    ("--no_cosin", "did you mean --no_cosine?"),
    ("--confg x", "did you mean --config?"),
    ("--qqqqqq 1", "--qqqqqq: no such setting; see --help"),
    ("--no_steps", "--no_steps: no such setting"),
    ("--steps five", "--steps: 'five' is not a whole number"),
    ("--steps 1.5", "--steps: '1.5' is not a whole number"),
    ("--steps inf", "--steps: 'inf' is not a whole number"),
    ("--steps nan", "--steps: 'nan' is not a whole number"),
    ("--steps=", "--steps: '' is not a whole number"),
    ("--lr fast", "--lr: 'fast' is not a number"),
    ("--lr nan", "--lr: 'nan' is not a number"),
    ("--lr", "--lr: a value is missing"),
    ("--lr --steps 5", "--lr: a value is missing"),
    ("--cosine=maybe", "--cosine: 'maybe' is neither true nor false"),
    ("--precision fp8", "'fp8' is none of fp32, bf16, fp16"),
    ("--widths 1,x", "--widths: 'x' is not a whole number"),
    ("--clip high", "--clip: 'high' is not a number"),
    ("--preset small", "--preset: 'small' is none of large"),
    ("steps 5", "'steps': expected a flag"),
    ("--compile yes", "'yes': expected a flag"),
    ("--config nowhere.json", "nowhere.json"),
    ("--steps 0", "--steps 0: expected at least 1"),
])
def test_a_mistake_ends_with_status_2_and_one_line_that_names_it(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("text, message", [
    ('{"step": 5}', "step: no such setting; did you mean steps?"),
    ('{"steps": "five"}', "steps: 'five' is not a whole number"),
    ('{"steps": true}', "steps: True is not a whole number"),
    ('{"steps": 1.5}', "steps: 1.5 is not a whole number"),
    ('{"steps": Infinity}', "steps: inf is not a whole number"),
    ('{"steps": null}', "steps: None is not a whole number"),
    ('{"lr": [1]}', "lr: [1] is not a number"),
    pytest.param('{"lr": 1' + "0" * 400 + "}", "is not a number", id="a number beyond all"),
    ('{"cosine": 1}', "cosine: 1 is neither true nor false"),
    ('{"data": 3}', "data: 3 is not a text"),
    ('{"widths": 3}', "widths: 3 is not a list"),
    ('{"widths": [3, "a"]}', "widths: 'a' is not a whole number"),
    ('{"precision": ["fp32"]}', "is none of fp32, bf16, fp16"),
    ("[1, 2]", "expected a JSON object of settings, found list"),
    ('{"steps": 5', "not a JSON file"),
    ("\x00\xff", "not a JSON file"),
])
def test_a_bad_json_file_ends_with_status_2_and_one_line_that_names_file_and_key(text, message, tmp_path, capsys):
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as caught:
        parse("--config", str(path))
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert str(path) in err and message in err and err.count("\n") == 1


def test_json_keeps_whole_numbers_and_infinities_exact(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"seed": 9007199254740993, "clip": Infinity, "lr": 1}')
    found = parse("--config", str(path))
    assert (found.seed, found.clip, found.lr) == (2 ** 53 + 1, math.inf, 1.0)
    assert type(found.lr) is float


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_prints_every_field_with_type_default_and_comment(word, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--steps", "3", word)
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and err == ""
    assert out.startswith("usage: try\n")
    for flag, comment in (("--steps int [100]", "optimizer steps"), ("--lr float [0.001]", "learning rate"),
                          ("--cosine bool [True]", "whether the rate falls"), ("--data str [shapes]", "folder"),
                          ("--compile bool [False]", "use torch.compile"),
                          ("--clip float | None [1.0]", "bound of the norm"),
                          ("--precision fp32|bf16|fp16 [fp32]", "of matrix products"),
                          ("--widths tuple[int, ...] [64,128]", "of the levels"), ("--seed int [0]", "of everything"),
                          ("--scales tuple[float, ...]", "none at all")):
        assert f"  {flag}\n        {comment}\n" in out
    assert out.index("Training:") < out.index("--steps") < out.index("Data:") < out.index("--data")
    assert "--config" in out and "--preset large" in out


@pytest.mark.parametrize("script", ["train_prior", "train_decoder", "train_audio"])
def test_what_heads_a_section_of_help_is_a_title_and_not_the_rest_of_a_comment(script):
    for word, (_, cls) in importlib.import_module(script).COMMANDS.items():
        headings = re.findall(r"^(\S.*):$", config.help_text(cls, "", {}, {}), re.MULTILINE)
        assert all(heading[0].isupper() for heading in headings) and (headings or word != "train")


PROGRAM = """
import dataclasses, sys
from common import config

@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 1  # optimizer steps
    fail: str = ""  # how to end

def main():
    given = config.parse(Config, sys.argv[1:], "usage")
    if given.fail == "user":
        raise config.UserError("no such data")
    if given.fail == "disk":
        raise OSError(28, "No space left on device", "x.pt")
    assert given.fail == "", "a mistake in the program"
    print(given.steps)

config.run(main)
"""


@pytest.mark.parametrize("words, status, last", [
    (["--steps", "3"], 0, ""),
    (["--stesp", "3"], 2, "error: --stesp: no such setting; did you mean --steps?"),
    (["--fail", "user"], 1, "error: no such data"),
    (["--fail", "disk"], 1, "error: [Errno 28] No space left on device: 'x.pt'"),
])
def test_a_program_tells_the_users_mistake_in_one_line_without_a_traceback(words, status, last, script):
    done = script(PROGRAM, *words)
    assert done.returncode == status
    assert done.stderr.count("\n") == (status != 0) and done.stderr.rstrip("\n").endswith(last)
    assert done.stdout == ("3\n" if status == 0 else "")


def test_a_mistake_in_the_program_itself_keeps_its_traceback(script):
    done = script(PROGRAM, "--fail", "else")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "AssertionError: a mistake in the program" in done.stderr


@pytest.mark.parametrize("words, status", [(["--stesp", "3"], 2), (["--help"], 0)])
def test_of_several_ranks_only_the_first_speaks(words, status, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == status
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words, command, steps", [
    ("", "train", 100), ("--steps 3", "train", 3), ("-- --steps 3", "train", 3), ("train --steps 3", "train", 3),
    ("sample --steps 4", "sample", 4), ("-- sample --steps 4", "sample", 4), ("--preset large", "train", 7)])
def test_the_first_word_chooses_the_command(words, command, steps, monkeypatch):
    called = []
    commands = {name: (lambda cfg, name=name: called.append((name, cfg.steps)), Config) for name in ("train", "sample")}
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    config.dispatch(commands, "usage", "train", PRESETS)
    assert called == [(command, steps)]


@pytest.mark.parametrize("words, default, status, message", [
    ("smaple", "train", 2, "x.py: error: 'smaple': expected one of train, sample; did you mean sample?"),
    ("", None, 2, "x.py: error: None: expected one of train, sample"), ("--help", None, 0, "the usage"),
    ("sample --preset large", "train", 2, "'large' is none of (there are none)"),
    ("sample --help", "train", 0, "Settings of sample:")])
def test_a_word_that_is_no_command_is_told_what_there_is(words, default, status, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x.py", *words.split()])
    commands = {name: (lambda cfg: None, Config) for name in ("train", "sample")}
    with pytest.raises(SystemExit) as end:
        config.dispatch(commands, "the usage", default, PRESETS)
    out, err = capsys.readouterr()
    assert end.value.code == status and message in (err if status else out)
