"""A flat frozen dataclass <-> command line (argparse) <-> JSON file, and the fields that all training scripts share.

A field's type holds its bounds, and its trailing comment is its line in `--help`. Flags win over `--config FILE.json`,
which wins over `--preset NAME`, which wins over the defaults.
"""
import argparse
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import textwrap
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

# Bounds of numbers, in words and as a test. They stand in the types of fields.
Count = Annotated[int, ("above 0", lambda value: value > 0)]
Natural = Annotated[int, ("0 or more", lambda value: value >= 0)]
Positive = Annotated[float, ("above 0", lambda value: value > 0)]
NonNegative = Annotated[float, ("0 or more", lambda value: value >= 0)]
Share = Annotated[float, ("within 0 and 1", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, ("0 or more and below 1", lambda value: 0 <= value < 1)]
FINITE = "a finite number", lambda value: not isinstance(value, float) or math.isfinite(value)
SYNONYMS = {"--learning_rate": "--lr"}  # that difflib would not find


class UserError(ValueError):
    """A mistake that the user can correct. `run` prints its message without a traceback."""


@dataclass(frozen=True)
class Settings:
    """A config whose numbers are finite and within the bounds of their types; UserError otherwise."""

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            values, kind = (value, typing.get_args(kind)[0]) if isinstance(value, tuple) else ((value,), kind)
            for words, holds in (FINITE, *getattr(kind, "__metadata__", ())):
                if not all(map(holds, values)):
                    raise UserError(f"--{name}: {value} is not {words}")


@dataclass(frozen=True)
class Training(Settings):
    """What every script's training can be told; a script names the defaults that differ for it."""
    # Run and data
    run_dir: str = "runs/run"  # folder of this run: config, checkpoints, metrics; started again, it resumes
    data: str = ""  # folder of the data
    val_data: str = ""  # folder of the same kind that is the validation set; "": a share of --data
    validation: Share = 0.1  # share of the data held out for validation
    test: Share = 0.1  # share of the data held out for the test at the end
    split_seed: int = 0  # of which samples are held out
    init_from: str = ""  # file to take weights from (prior, decoder: and settings), URL or wandb:RUN/FILE
    init_strict: bool = True  # refuse weights that do not all fit, else take those that do
    # Optimization
    steps: Count = 1000  # optimizer steps
    batch_size: Count = 64  # samples a step, over all ranks
    chunk_size: Natural = 0  # samples in one forward pass, kept by the run; 0: to fit the ranks
    lr: Positive = 1e-3  # peak learning rate
    warmup_steps: Natural = 50  # steps of linear warm-up
    cosine: bool = True  # after the warm-up, decay to 0 along half a cosine, else stay constant
    cosine_steps: Natural = 0  # step at which the cosine reaches 0; 0: the last
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest
    weight_decay: NonNegative = 0.01  # decoupled, on matrices and kernels only; 0 makes AdamW Adam
    betas: tuple[Decay, ...] = (0.9, 0.99)  # Adam's decays of the mean and of the square
    eps: Positive = 1e-8  # Adam's epsilon
    max_grad_norm: NonNegative = 1.0  # gradients are clipped to this norm, 0 for not at all
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of products; fp32 is TF32 on GPUs
    ema_decay: Share = 0.9999  # decay of the averaged weights, 0 for no averaging
    ema_update_after: Natural = 0  # steps at first in which the average is a copy
    ema_update_every: Count = 1  # steps between updates of the average
    # Evaluation and saving; both happen at the first log line at or after they are due
    log_every: Count = 25  # steps between log lines
    eval_every: Natural = 500  # steps between evaluations, 0 for none but the last
    eval_minutes: NonNegative = 0.0  # minutes between evaluations, besides, 0 for none
    eval_samples: Natural = 192  # most held-out samples an evaluation takes, 0 for all
    save_every: Natural = 200  # steps between checkpoints, 0 for none but the last
    save_minutes: NonNegative = 0.0  # minutes between checkpoints, besides, 0 for none
    keep: Natural = 3  # newest checkpoints that are kept, 0 for all
    resume: Literal["auto", "never"] = "auto"  # never: an earlier run in the folder is moved aside
    # Watching and sharing
    logger: str = "console"  # "console", "tensorboard" or "wandb project=NAME [entity=NAME] [name=NAME] [id=ID]"
    load: str = ""  # checkpoint to go on from if RUN has none: a file, URL[#sha256=HEX] or wandb:RUN/FILE
    load_only_auto_resume: bool = False  # use --load only if this run was begun before and its own checkpoints are lost
    save: tuple[str, ...] = ()  # copies: "local|wandb|huggingface [kind=model] [repo=NAME] save_latest_to=PATH …", …
    metadata: tuple[str, ...] = ()  # NAME=VALUE pairs for every file that the run writes
    # Machine
    seed: int = 0  # of everything random
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute
    compile: bool = False  # torch.compile the model
    workers: Natural = 0  # processes that read data ahead, a rank
    timeout_minutes: Positive = 30.0  # how long a rank waits for another before it gives up

    def __post_init__(self):
        super().__post_init__()
        shares = (self.test,) if self.val_data else (self.validation, self.test)
        if sum(shares) >= 1 or not all(shares):
            raise UserError(f"--validation {self.validation} and --test {self.test}: expected two shares above 0 that "
                            "add up to less than 1")
        if len(self.betas) != 2:
            raise UserError(f"--betas: expected two decays, not {len(self.betas)}")


# What must not change when a run goes on, of the fields that all scripts share; a script adds its own.
FIXED = ("validation", "test", "split_seed", "batch_size", "chunk_size", "optimizer", "seed")


def need(module, wanted_by, package=None):
    """`module` of an optional package, imported; UserError says how to install the package when it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        raise UserError(f"{wanted_by} needs {package}: pip install {package}") from None


def read_json(path):
    """The JSON object in the file `path`; UserError or OSError names the file."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object of settings, found {type(values).__name__}")
    return values


def lines_of(path):
    """The lines of a text file that are not blank; UserError if there are none."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    if not any(lines):
        raise UserError(f"{path}: no text in it")
    return list(filter(None, lines))


def as_json(cfg):
    """The config as plain JSON values, as they come back from a file."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(cfg).items()}


def from_dict(cls, values, source):
    """`values` (JSON object) checked against the fields of `cls`; returns {field: value}. UserError names `source`."""
    words = [f"--{name}={as_word(value)}" for name, value in values.items() if name != "versions"]  # of torch and code
    return Parser(cls, source=f"{source}: ").read(words)


def check_suffixes(cfg, **suffixes):
    """UserError for a file whose name promises another format. suffixes: {field: its suffix}."""
    for name, suffix in suffixes.items():
        if (value := getattr(cfg, name)) and not value.lower().endswith(suffix):
            raise UserError(f"--{name}: {value}: expected a name that ends in {suffix}")


def refuse_unused(cfg, table):
    """UserError for a setting that is given but has no effect. table: [(name, whether it is used, what it needs)]."""
    for name, used, needed in table:
        if getattr(cfg, name) != getattr(type(cfg), name) and not used:
            raise UserError(f"--{name}: it needs {needed}")


# The command line

def as_word(value):
    """A value as a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def convert(kind, text):
    """A word of a command line as the type `kind`; ValueError if it is none."""
    if typing.get_origin(kind) is tuple:
        return tuple(convert(typing.get_args(kind)[0], item.strip()) for item in text.split(",") if item.strip())
    if kind is bool:
        return ("false", "true").index(text.lower()) == 1
    if kind is int and re.fullmatch(r"[\d.]+e\d+", text) and float(text).is_integer():
        return int(float(text))  # such as 1e6
    return kind(text)


class Parser(argparse.ArgumentParser):
    """Flags for the fields of a config class, with types, comments and defaults, in groups by its comment lines."""

    def __init__(self, cls, description=None, source=""):
        super().__init__(usage=argparse.SUPPRESS, description=description, argument_default=argparse.SUPPRESS,
                         allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        kinds, defaults = typing.get_type_hints(cls), {field.name: field.default for field in dataclasses.fields(cls)}
        self.source, group, groups = source, self, {}  # each message starts with `source`
        for base in filter(dataclasses.is_dataclass, cls.__mro__):
            for line in inspect.getsource(base).splitlines():
                if heading := re.match(r"    # (.*)", line):
                    group = groups.setdefault(heading[1], self.add_argument_group(heading[1]))
                elif (field := re.match(r"    (\w+): [^#]*# (.*)", line)) and field[1] in defaults:
                    self.add_field(group, field[1], kinds[field[1]], field[2], defaults.pop(field[1]))

    def add_field(self, group, name, kind, comment, default):
        about = {"help": f"{comment} [{as_word(default)}]".replace("%", "%%")}
        if typing.get_origin(kind) is Literal:
            about["choices"] = typing.get_args(kind)
        else:
            about |= {"type": functools.partial(convert, kind), "metavar": inspect.formatannotation(kind)}
            about["type"].__name__ = about["metavar"]  # for argparse's messages
        if kind is bool:
            about |= {"nargs": "?", "const": True}
            about["help"] += f" (off: --no_{name})"
            group.add_argument(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)
        group.add_argument(f"--{name}", **about)

    def read(self, words):
        """{field: value} of the words of a command line; UserError says what is wrong with the first that is."""
        given, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            close = [*filter(self._option_string_actions.get, [SYNONYMS.get(name)]),
                     *difflib.get_close_matches(name, self._option_string_actions)]
            self.error(f"{name}: no such setting; " + (f"did you mean {close[0]}?" if close else "see --help"))
        return vars(given)

    def error(self, message):
        raise UserError(self.source + message.removeprefix("argument "))

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":  # the other ranks are silent
            super().print_help(file)


def parse(cls, words, usage="", presets=None, stages=None, only=None, model=None):
    """The config `cls` that the words of a command line ask for; UserError, or SystemExit(0) after --help.

    stages: {name: {field: default of that stage}}. With these it is a list of configs, of the stage that the field
    `stage` names or, if that is "all", of each. only: {field: stages that it is for}; a flag of others is refused.
    model: function of the file --init_from that gives ({field: value} of its model, which flags must
    not contradict, {field: value} of other settings that are taken from it unless they are given).
    """
    presets, stages = presets or {}, stages or {}
    for flag, named in ("stage", stages), ("preset", presets):
        for name, values in named.items():
            shown = ", ".join(f"{field} {as_word(value) or 'none'}" for field, value in values.items())
            usage += "\n" + textwrap.fill(f"Defaults of --{flag} {name}: {shown or 'as below'}", 100)
    parser = Parser(cls, usage)
    parser.add_argument("--config", metavar="FILE.json", help="the same settings from a file; flags win over them")
    if presets:
        parser.add_argument("--preset", choices=presets, help="named settings; --config and flags win over them")
    given = parser.read(words)
    preset, file = presets.get(given.pop("preset", None), {}), given.pop("config", None)
    flags, given = given, preset | (from_dict(cls, read_json(file), file) if file else {}) | given
    if model and given.get("init_from") and given.get("init_strict", True):
        path = given["init_from"]
        made, taken = (from_dict(cls, values, path) for values in model(path))
        given = {**taken, **given}
        for name, value in made.items():
            if given.setdefault(name, value) != value:
                raise UserError(
                    f"--{name} {as_word(given[name])}: {path} is a model of {as_word(value)}; "
                    "leave it (or its preset or file) out, or take what fits by --no_init_strict")
    if "stage" in preset and given["stage"] != preset["stage"]:
        raise UserError(f"--stage {given['stage']}: this preset is for --stage {preset['stage']} alone")
    if not stages:
        return cls(**given)
    stage = given.get("stage", cls.stage)
    for name in flags:
        if stage != "all" and stage not in (only or {}).get(name, stage):
            raise UserError(f"--{name}: it has no effect on --stage {stage}, only on {', '.join(only[name])}")
    return [cls(**{**stages[name], **given, "stage": name}) for name in (stages if stage == "all" else [stage])]


def run(commands, usage, default=None, presets=None, stages=None, only=None, model=None):
    """Run the command that the first word of the command line names, or else `default`, on its config.

    commands: {name: (function of a config, config class)}. `presets`, `stages`, `only` and `model`,
    as of `parse`, are the default command's.
    An error on the command line ends with one line and status 2, a later UserError or OSError with status 1.
    """
    words, status = sys.argv[1:], 2
    try:
        if not default and words[:1] in (["--help"], ["-h"]):
            print(f"{usage}\nSettings: COMMAND --help, with a COMMAND of {', '.join(commands)}")
            raise SystemExit(0)
        name = words.pop(0) if words and not words[0].startswith("-") else default
        if name not in commands:
            raise UserError(f"{name or 'command'}: expected one of {', '.join(commands)}")
        function, cls = commands[name]
        more = (presets, stages, only, model) if name == default else ()
        cfg = parse(cls, words, f"{usage}\nSettings of {name}:", *more)
        status = 1
        function(cfg)
    except (UserError, OSError) as error:
        if not getattr(error, "relayed", status == 2 and os.environ.get("RANK", "0") != "0"):  # else another rank does
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun repeats at the end of its report
            about = {"message": f"{error}", "extraInfo": {"timestamp": int(time.time())}}
            Path(file).write_text(json.dumps({"message": about}))
        raise SystemExit(status) from None
    except KeyboardInterrupt:  # before training, which saves first
        raise SystemExit(130) from None
