"""Settings: a flat frozen dataclass <-> command line (argparse) <-> JSON file.

`field` declares a setting. Flags win over `--config FILE.json`, which wins over `--preset NAME`,
which wins over the defaults. argparse checks all of them: values from files and presets are turned
into flags first.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import math
import os
import re
import shlex
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

# Types with bounds: Annotated[type, (the bound in words, a function that checks it)].
PositiveInt = Annotated[int, ("a number above 0", lambda value: value > 0)]
NonNegativeInt = Annotated[int, ("a number 0 or more", lambda value: value >= 0)]
PositiveFloat = Annotated[float, ("a number above 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, ("a number 0 or more", lambda value: value >= 0)]
Fraction = Annotated[float, ("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Beta = Annotated[float, ("numbers from 0 to below 1", lambda value: 0 <= value < 1)]
Interval = Annotated[
    str, ("steps, or minutes as in 10min", lambda value: re.fullmatch(r"\d+(min)?", str(value)))
]
Device = Literal["auto", "cuda", "mps", "cpu"]


class UserError(ValueError):
    """A mistake that the user can correct. `run` prints its message without a traceback."""


@contextlib.contextmanager
def explained(message, kind=UserError):
    """Context that turns any error into a UserError with `message`, followed by the reason.

    Use it to read users' files, because damaged files raise a dozen types of errors. kind: the
    class to raise, UserError or a subclass; errors of this class are passed on unchanged.
    """
    try:
        yield
    except kind:
        raise
    except Exception as error:
        # Remove memory addresses, so that the same fault always has the same message.
        reason = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
        raise kind(f"{message} ({reason:.300})") from error


def is_main():
    """True on rank 0, and without torchrun. Rank 0 logs, writes files and makes decisions."""
    return os.environ.get("RANK", "0") == "0"


def note(text):
    """Print a note for the user, on rank 0 only, unless `text` is empty."""
    if text and is_main():
        print(f"note: {text}", file=sys.stderr, flush=True)


def need(module, wanted_by, package=None):
    """Import the optional `module`; a UserError says how to install its package.

    Any import error counts, because an installed package may lack a system library. wanted_by:
    what needs the module, for the message.
    """
    package = package or module.partition(".")[0]
    with explained(f"{wanted_by} needs {package}: pip install {package}"):
        return importlib.import_module(module)


# Settings


def field(default, help="", model=False, fixed=False, affects_val_loss=False):
    """A setting of a config class: its default and its line in --help.

    fixed: a resumed run must keep it (such as batch_size). model: it is part of the model (such as
    width), so it is `fixed` too, and --init_from FILE takes it from the file. affects_val_loss: it
    must be the same for validation losses to be comparable (such as eval_samples).
    """
    rules = {
        "help": help,
        "model": model,
        "fixed": model or fixed,
        "affects_val_loss": affects_val_loss,
    }
    return dataclasses.field(default=default, metadata=rules)


def model_field(default, help=""):
    """A setting that is part of the model; see `field`."""
    return field(default, help, model=True)


def settings_with(cfg, rule):
    """{name: value} of the settings that were declared with `rule`, an argument of `field`."""
    return {
        each.name: getattr(cfg, each.name)
        for each in dataclasses.fields(cfg)
        if each.metadata.get(rule)
    }


@dataclass(frozen=True)
class Settings:
    """Base class of configs. Values are checked on creation; a UserError names the invalid flag.

    The first line of a config class's docstring is the heading of its settings in --help.
    """

    # Names of the settings that the user gave by flags or --config, set by `parse`. None if the
    # config was made in Python.
    given: ClassVar[tuple | None] = None

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            if typing.get_origin(kind) is ClassVar:
                continue
            values = getattr(self, name)
            if isinstance(values, tuple):
                kind = typing.get_args(kind)[0]
            else:
                values = [values]
            choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
            for value in values:
                if isinstance(value, float) and not math.isfinite(value):
                    raise UserError(f"--{name} {value}: expected a finite number")
                if choices and value not in choices:
                    names = ", ".join(map(str, choices))
                    raise UserError(f"--{name} {value}: expected one of {names}")
                for words, holds in getattr(kind, "__metadata__", ()):
                    if not holds(value):
                        raise UserError(f"--{name} {value}: expected {words}")


def replace(cfg, **changes):
    """`cfg` with some settings changed. `given` stays the same."""
    changed = dataclasses.replace(cfg, **changes)
    object.__setattr__(changed, "given", cfg.given)
    return changed


@dataclass(frozen=True)
class TrainingRun(Settings):
    """Running, saving, logging: the same in all training scripts

    Code in common/ also reads settings that each script declares: run_dir, data, steps, batch_size,
    eval_every, eval_samples, and for the schedule lr, warmup_steps, cosine, cosine_steps.
    """

    val_data: str = field("", 'folder of the validation set; "": a fraction of --data is held out')
    validation: Fraction = field(0.1, "fraction of the data held out for validation", fixed=True)
    test: Fraction = field(0.1, "fraction of the data held out for the test at the end", fixed=True)
    split_seed: int = field(0, "random seed for the choice of held-out samples", fixed=True)
    init_from: str = field(
        "", "file to take weights and model settings from: path, URL, or wandb:RUN_PATH/FILE"
    )
    chunk_size: NonNegativeInt = field(
        0,
        "samples per forward pass (micro-batch), kept on resume; 0: chosen to fit the ranks",
        affects_val_loss=True,
    )
    precision: Literal["fp32", "bf16", "fp16"] = field(
        "fp32", "precision of matrix products; fp32 is TF32 on GPUs"
    )
    compile: bool = field(False, "compile the model with torch.compile")
    deterministic: bool = field(
        True, "on GPUs, repeat results bit for bit; off: let cuDNN pick its fastest kernels"
    )
    log_every: PositiveInt = field(25, "steps between log lines")
    save_every: Interval = field("200", "steps or time (10min) between checkpoints; 0: at the end")
    load: str = field(
        "", "checkpoint to resume if RUN has none: path, URL[#sha256=HEX], or wandb:RUN_PATH/FILE"
    )
    logger: str = field(
        "console",
        '"console", "tensorboard" or "wandb project=NAME [entity=NAME] [name=NAME] [id=ID]"',
    )
    save: tuple[str, ...] = field(
        (), '"local|wandb|huggingface [kind=model] [repo=NAME] save_latest_to=PATH …", …'
    )
    seed: int = field(0, "random seed", fixed=True)
    device: Device = field("auto", "device to compute on")
    workers: NonNegativeInt = field(0, "processes per rank that prefetch data")
    timeout_minutes: PositiveFloat = field(
        30.0, "how long a rank waits for other ranks or for data before it gives up"
    )

    # Defaults for scripts without stages or adapters; others redefine these as settings.
    stage: ClassVar[str] = ""
    lora_rank: ClassVar[int] = 0

    def __post_init__(self):
        super().__post_init__()
        if self.validation + self.test >= 1:
            raise UserError(
                f"--validation {self.validation} and --test {self.test}: expected two fractions "
                "whose sum is less than 1"
            )
        if self.lora_rank and not self.init_from:
            raise UserError("--lora_rank: adapters need a model: give --init_from")
        of_one = self.init_from or self.load or self.save or " id=" in self.logger
        if self.stage == "all" and of_one:  # each of these refers to a particular stage
            raise UserError(
                "--init_from, --load, --save, id in --logger: these are for one stage; give --stage"
            )


@dataclass(frozen=True)
class Inference(Settings):
    """Running: the same in all commands that use trained models"""

    model: str = field(
        "",
        "file of the run: model.pt (last), best.pt (lowest validation loss), checkpoints/…; "
        '"": best.pt, or else model.pt',
    )
    weights: Literal["ema", "online"] = field(
        "ema", "averaged weights, or the weights before averaging (only in checkpoints)"
    )
    seed: int = field(0, "random seed")
    device: Device = field("auto", "device to compute on")


# JSON files


def read_json(path):
    """The JSON object in the file `path`; a UserError or OSError names the file."""
    with explained(f"{path}: expected a JSON object"):
        return dict(json.loads(Path(path).read_text("utf-8-sig")))


def nan_to_none(values):
    """Plain `values` after a round trip through JSON, with None for numbers that are not finite."""
    return json.loads(json.dumps(values), parse_constant=lambda word: None)


def as_json(cfg):
    """The config as plain JSON values."""
    return nan_to_none(dataclasses.asdict(cfg))


def from_json(cls, values, source):
    """{setting: value} from `values`, an earlier run's config; a UserError names `source`.

    A fork may have added, removed or renamed settings since then. Notes list the differences.
    """
    known = {each.name for each in dataclasses.fields(cls)}
    unknown = sorted(values.keys() - known - {"versions"})
    missing = sorted(known - values.keys())
    if unknown:
        note(f"{source}: ignored, because this script has no such setting: {', '.join(unknown)}")
    if missing:
        note(f"{source}: lacks these settings, which get their defaults: {', '.join(missing)}")
    return typed(cls, {name: values[name] for name in values if name in known}, source)


def typed(cls, values, source):
    """Check plain JSON `values` and convert them to {setting: value}.

    The values are turned into flags, which argparse parses. A UserError begins with `source`.
    """
    words = [f"--{name}={as_word(value)}" for name, value in values.items()]
    return read_words(make_parser(cls), words, f"{source}: ")


def as_word(value):
    """`value` as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


# Command line


def converter(kind):
    """A function that converts the text of a flag to the type `kind`; it may raise ValueError."""

    def tuple_of(word):
        kinds = typing.get_args(kind)
        item = converter(kinds[0])
        word = os.path.expanduser(word)
        words = [word] if os.path.exists(word) else word.split(",")  # a path may contain commas
        items = tuple(item(each.strip()) for each in words if each.strip())
        if kinds[-1] is not Ellipsis and len(items) != len(kinds):
            raise ValueError(word)
        return items

    def true_or_false(word):
        return ("false", "true").index(word.lower()) == 1

    if typing.get_origin(kind) is tuple:
        tuple_of.__name__ = inspect.formatannotation(kind)  # for argparse's error messages
        return tuple_of
    # Shells do not expand the ~ in --data=~/set or in quotes.
    return {bool: true_or_false, str: os.path.expanduser}.get(kind, kind)


def make_parser(cls, usage=""):
    """An argparse parser for the settings of a config class, with the script's own first."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=usage,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = typing.get_type_hints(cls)
    fields = {each.name: each for each in dataclasses.fields(cls)}
    for base in cls.__mro__:
        heading = base.__doc__.splitlines()[0]  # shown if there are settings below it
        group = parser.add_argument_group(heading)
        for name in [name for name in inspect.get_annotations(base) if name in fields]:
            setting = fields.pop(name)
            kind = kinds[name]
            options = {"type": converter(kind), "metavar": inspect.formatannotation(kind)}
            if kind is bool:  # --flip, or --flip false
                options |= {"nargs": "?", "const": True}
            if Ellipsis in typing.get_args(kind):  # a tuple: the flag may be repeated
                options["action"] = "extend"
            if typing.get_origin(kind) is Literal:
                options = {"choices": typing.get_args(kind)}
            text = f"{setting.metadata.get('help', '')} [{as_word(setting.default)}]"
            group.add_argument(f"--{name}", help=text.replace("%", "%%").strip(), **options)
    return parser


def read_words(parser, words, source=""):
    """Parse command-line `words` to {name: value}; a UserError begins with `source`."""
    try:
        settings, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(source + str(error).removeprefix("argument ")) from None
    if not unknown:
        settings = vars(settings)
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
        return settings
    if not unknown[0].startswith("-"):
        raise UserError(
            f"{source}{unknown[0]}: unexpected argument; separate list items with commas and quote "
            "values with spaces"
        )
    flag = unknown[0].partition("=")[0].replace("-", "_").lstrip("_")
    known = [action.dest for action in parser._actions]
    close = difflib.get_close_matches(flag, known)
    hint = f"did you mean --{close[0]}?" if close else "see --help"
    if flag == "local_rank":  # torch.distributed.launch adds it
        hint = "start the ranks with torchrun"
    if "stage" in known:
        hint += "; settings of one stage need --stage NAME"
    raise UserError(f"{source}--{flag}: no such setting; {hint}")


def parse(cls, words, usage="", presets=None):
    """Parse command-line arguments into a config. UserError if they are invalid.

    cls: a config class, or {stage: its class}, whose first stage is the default. presets: {name:
    settings}, which may include "stage"; or {name: {stage: settings}}.
    """
    presets = presets or {}
    # Find --config, --preset and --stage first: they decide which settings exist.
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("config", "preset", "stage"):
        finder.add_argument(f"--{name}", nargs="?")  # a missing value is reported below
    found, _ = finder.parse_known_args(words)
    given = read_json(found.config) if found.config else {}
    preset = ""
    if presets:  # else --preset is handled below, like any unknown setting
        preset = found.preset or str(given.get("preset", ""))
    if preset and preset not in presets:
        raise UserError(f"--preset {preset}: expected one of {', '.join(presets)}")
    settings = presets.get(preset, {})
    if isinstance(cls, dict):
        stage = found.stage or given.get("stage") or settings.get("stage") or next(iter(cls))
        stage = str(stage)  # a file may have any type here
        if stage not in cls:
            raise UserError(f"--stage {stage}: expected one of {', '.join(cls)}")
        cls = cls[stage]
        if any(isinstance(value, dict) for value in settings.values()):  # {stage: settings}
            if stage not in settings:
                raise UserError(f"--preset {preset}: also needs --stage {' or '.join(settings)}")
            settings = settings[stage]

    parser = make_parser(cls, usage)
    parser.add_argument("--config", metavar="FILE.json", help="settings; flags win over the file")
    flags = read_words(parser, words)
    flags.pop("config", None)
    settings = typed(cls, settings, f"--preset {preset}")
    if "versions" in given:  # a run's config.json, possibly from an earlier version
        given = from_json(cls, given, found.config)
    else:
        given = typed(cls, given, found.config)
    cfg = cls(**(settings | given | flags))
    object.__setattr__(cfg, "given", tuple(given | flags))
    return cfg


def run(commands, usage, default=None, presets=None):
    """Run the command named by the first word of the command line, or else `default`.

    commands: {name: (function, cls)}; the function is called with the parsed config. cls: see
    `parse`. presets: see `parse`; only the default command has presets. An invalid command line
    prints one line and exits with status 2; a later UserError or OSError prints one line and exits
    with status 1. Other errors show a traceback, because the program or the machine is at fault.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):  # closed, or not a stream
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    words = sys.argv[1:]
    status = 2
    try:
        name = words.pop(0) if words and not words[0].startswith("-") else default
        if name not in commands:
            names = ", ".join(commands)
            raise UserError(
                f"{name or 'command'}: expected one of {names}; COMMAND --help lists its settings"
            )
        function, cls = commands[name]
        usage = f"{usage}\nSettings of {name}:\n"
        cfg = parse(cls, words, usage, presets if name == default else None)
        status = 1
        function(cfg)
    except (UserError, OSError) as error:
        # All ranks parse the same command line, so only rank 0 reports that it is invalid. A
        # later error is reported by the rank on which it occurs.
        if status == 1 or is_main():
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(status) from None
    except KeyboardInterrupt:  # outside of training, which would save first
        raise SystemExit(130) from None


def check_unused(cfg, case, *names):
    """UserError if any of the settings `names` is set, because it has no effect in this `case`."""
    for name in names:
        if getattr(cfg, name) != getattr(type(cfg), name):  # the default
            raise UserError(f"--{name} has no effect {case}; leave it out")


def parse_options(flag, text, kinds):
    """Make the object that `text` describes, such as "NAME OPTION=VALUE ...".

    kinds: {name: class}; the options are the arguments of the class. flag: its name, for messages.
    UserError if `text` is malformed.
    """
    names = ", ".join(kinds)
    with explained(f"--{flag} {text}: expected one of {names}, then OPTION=VALUE …"):
        # Keep the backslashes of Windows paths.
        name, *pairs = shlex.split(text.replace("\\", r"\\"))
        options = {}
        for pair in pairs:
            option, value = pair.split("=", 1)
            options[option] = os.path.expanduser(value)
        inspect.signature(kinds[name]).bind(**options)
    return kinds[name](**options)
