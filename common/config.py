"""Settings: a flat frozen dataclass <-> command line (argparse) <-> JSON file.

A setting is declared once, by `field`. Its type holds its bounds. Flags win over `--config
FILE.json`, which wins over `--preset NAME`, which wins over the defaults.
"""

import argparse
import codecs
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import json
import math
import os
import re
import sys
import textwrap
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


def is_folder_name(path):
    """Whether a folder has this name, or may get it; x.pt is that of a file, given by mistake."""
    if os.path.isdir(path):
        return True
    return path != "" and not path.endswith(".pt") and not os.path.exists(path)


# Types with bounds: the bound in words, and as a test.


def within(kind, low, high):
    """The type of the numbers (int or float) from `low` to `high`."""
    return Annotated[kind, (f"within {low:,} and {high:,}", lambda value: low <= value <= high)]


PositiveInt = Annotated[int, ("above 0", lambda value: value > 0)]
NonNegativeInt = Annotated[int, ("0 or more", lambda value: value >= 0)]
PositiveFloat = Annotated[float, ("above 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, ("0 or more", lambda value: value >= 0)]
Fraction = within(float, 0, 1)
Decay = Annotated[float, ("0 or more and below 1", lambda value: 0 <= value < 1)]
Folder = Annotated[str, ('a folder, or a name for one; the current one is "."', is_folder_name)]
Device = Literal["auto", "cuda", "mps", "cpu"]
# Typing errors that would take all memory, or fork without end.
Size = within(int, 1, 65_536)  # widths, numbers of layers, lengths: what a model is made of
Layers = within(int, 1, 1000)  # also a damaged file may claim any number
SizeOrZero = within(int, 0, 65_536)
Timesteps = within(int, 1, 100_000)
Seconds = within(float, 0.001, 3600)  # of sound
SampleRate = within(int, 1, 1_000_000)
Workers = within(int, 0, 1024)
Minutes = within(float, 0.1, 7 * 24 * 60)  # of waiting; poll() counts milliseconds in 32 bits

# That of UTF-32 begins as that of UTF-16 does.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Flags of other packages, and what comes nearest here, where difflib would not find it.
SYNONYMS = """
--learning_rate --lr
--lr_scheduler --cosine
--lr_scheduler_type --cosine
--lr_warmup_steps --warmup_steps
--max_steps --steps
--max_train_steps --steps
--max_epochs --steps
--num_epochs --steps
--num_train_epochs --steps
--train_batch_size --batch_size (over all ranks)
--per_device_train_batch_size --batch_size (over all ranks)
--gradient_accumulation_steps --chunk_size (samples in one forward pass)
--gradient_checkpointing --checkpointing
--mixed_precision --precision
--output_dir --run_dir
--resume_from_checkpoint --load (the same command resumes without it)
--checkpointing_steps --save_every
--dataloader_num_workers --workers
--report_to --logger
--train_data_dir --data
"""
SYNONYMS = dict(line.split(" ", 1) for line in SYNONYMS.split("\n")[1:-1])


class UserError(ValueError):
    """A mistake that the user can correct. `run` prints its message without a traceback."""


@contextlib.contextmanager
def explained(message, kind=UserError):
    """Context that makes a `kind` of UserError, the message and the reason, of any error but it.

    For what reads files, and meets a dozen types of errors if they are damaged or foreign.
    """
    try:
        yield
    except kind:
        raise
    except Exception as error:
        # Without addresses in memory, a fault has the same message whenever it is met.
        reason = re.sub(" at 0x[0-9a-f]+", "", repr(error))
        raise kind(f"{message} ({reason:.200})") from error


# Fields


def field(default, help="", stages=(), needs="", model=False, fixed=False, inherit=False):
    """A setting of a config class: its default, its line in --help, and the rules about it.

    stages: the stages that it is for, () for all; a flag of another stage is refused.
    needs: the setting without which it has no effect, "NAME" or "NAME=VALUE"; UserError if it is
        given and that one is off, or has another value.
    Which settings may change:        a resumed run    a run with --init_from FILE
        none of the rules             may change it    has its own
        inherit                       may change it    has the file's, unless it is given
        fixed                         keeps it         has its own
        model                         keeps it         has the file's: it is part of the model
    """
    rules = {
        "help": help,
        "stages": stages,
        "needs": needs,
        "model": model,
        "fixed": model or fixed,
        "inherit": inherit,
    }
    return dataclasses.field(default=default, metadata=rules)


def names(cls, rule):
    """Names of the settings of a config class (or config) of which `rule` of `field` is true."""
    return [each.name for each in dataclasses.fields(cls) if each.metadata.get(rule)]


def is_for(each, stage):
    """Whether the setting `each`, a dataclass field, is for the stage of this name."""
    stages = each.metadata.get("stages")
    return not stages or stage in stages


def kept(cfg):
    """{name: value} of the settings that must not change while a run goes on."""
    stage = getattr(cfg, "stage", "")
    fixed = [each for each in dataclasses.fields(cfg) if each.metadata.get("fixed")]
    return {each.name: getattr(cfg, each.name) for each in fixed if is_for(each, stage)}


@dataclass(frozen=True)
class Settings:
    """A config whose values are checked when it is made; UserError names the flag that is wrong.

    The first line of a config class's docstring is the heading of its settings in --help.
    """

    def __post_init__(self):
        kinds = typing.get_type_hints(type(self), include_extras=True)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            check_bounds(each.name, value, kinds[each.name])
            needs = each.metadata.get("needs")
            if needs and value != each.default and not self.has(needs):
                raise UserError(
                    f"--{each.name}: it has no effect without --{needs.replace('=', ' ')}"
                )

    def has(self, needs):
        """Whether a setting is on, "NAME", or has a value, "NAME=VALUE"."""
        name, _, wanted = needs.partition("=")
        value = getattr(self, name)
        if wanted:
            return as_word(value) == wanted
        return value not in (0, "", (), "none")


def check_bounds(name, value, kind):
    """UserError unless a value, or each of a tuple, is finite and within its type's bounds.

    A text must be one that files of UTF-8 and names of files can hold.
    """
    values = [value]
    if isinstance(value, tuple):
        values = value
        kind = typing.get_args(kind)[0]
    for number in values:
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"--{name}: {value} is not a finite number")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise UserError(f"--{name}: {value} does not fit into 64 bits")
        # What the command line could not decode stands in a text as half a surrogate pair.
        if isinstance(number, str) and re.search("[\0\ud800-\udfff]", number):
            raise UserError(f"--{name}: {value!r} has a zero byte, or is not text in UTF-8")
        for words, holds in getattr(kind, "__metadata__", ()):
            if not holds(number):
                raise UserError(f"--{name}: {value} is not {words}")


@dataclass(frozen=True)
class TrainingRun(Settings):
    """Running, saving, logging: the same in all training scripts"""

    val_data: str = field("", 'folder of the validation set; "": a fraction of --data is held out')
    validation: Fraction = field(0.1, "fraction of the data held out for validation", fixed=True)
    test: Fraction = field(0.1, "fraction of the data held out for the test at the end", fixed=True)
    split_seed: int = field(0, "seed of which samples are held out", fixed=True)
    init_from: str = field(
        "", "file to take weights (and a model's settings) from: path, URL, wandb:RUN_PATH/FILE"
    )
    init_strict: bool = field(True, "refuse weights that do not all fit; off: take those that do")
    chunk_size: NonNegativeInt = field(
        0, "samples in one forward pass, kept by the run; 0: to fit the ranks", fixed=True
    )
    precision: Literal["fp32", "bf16", "fp16"] = field(
        "fp32", "of matrix products; fp32 is TF32 on GPUs"
    )
    compile: bool = field(False, "compile the model with torch.compile")
    log_every: PositiveInt = field(
        25, "steps between log lines; evaluating and saving wait for one"
    )
    eval_minutes: NonNegativeFloat = field(0.0, "also evaluate after so many minutes, 0: no")
    save_every: NonNegativeInt = field(200, "steps between checkpoints, 0: only the last")
    save_minutes: NonNegativeFloat = field(0.0, "also save after so many minutes, 0: no")
    keep: NonNegativeInt = field(3, "newest checkpoints that are kept, 0: all")
    resume: Literal["auto", "never"] = field(
        "auto", "never: an earlier run in the folder is moved aside"
    )
    leave_out: tuple[str, ...] = field(
        (), "names of training samples to leave out, as messages give them"
    )
    load: str = field(
        "", "checkpoint to resume from if RUN has none: path, URL[#sha256=HEX], wandb:RUN_PATH/FILE"
    )
    load_only_auto_resume: bool = field(
        False, "use --load only if RUN was begun and its checkpoints are lost", needs="load"
    )
    logger: str = field(
        "console",
        '"console", "tensorboard" or "wandb project=NAME [entity=NAME] [name=NAME] [id=ID]"',
    )
    save: tuple[str, ...] = field(
        (), '"local|wandb|huggingface [kind=model] [repo=NAME] save_latest_to=PATH …", …'
    )
    metadata: tuple[str, ...] = field((), "NAME=VALUE pairs for every file that the run writes")
    seed: int = field(0, "seed of everything random", fixed=True)
    device: Device = field("auto", "where to compute")
    workers: Workers = field(0, "processes that read data ahead, a rank")
    timeout_minutes: Minutes = field(
        30.0, "how long a rank waits for another, or for its data, before it gives up"
    )

    def __post_init__(self):
        super().__post_init__()
        held_out = [self.test] if self.val_data else [self.validation, self.test]
        if sum(held_out) >= 1 or 0 in held_out:
            raise UserError(
                f"--validation {self.validation} and --test {self.test}: expected two fractions "
                "above 0 that add up to less than 1"
            )


@dataclass(frozen=True)
class Inference(Settings):
    """Running: the same in all commands that use trained models"""

    model: str = field(
        "model.pt",
        "file of the run: model.pt (last), best.pt (lowest validation loss), checkpoints/…",
    )
    weights: Literal["ema", "online"] = field(
        "ema", "of a checkpoint: averaged, or as the optimizer left them"
    )
    seed: int = field(0, "seed of everything random")
    device: Device = field("auto", "where to compute")


# JSON files


def read_json(path):
    """The JSON object in the file `path`; UserError or OSError names the file."""
    text = decode_text(Path(path).read_bytes(), path)

    def unique(pairs):
        values = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"{name} is in it twice")
            values[name] = value
        return values

    with explained(f"{path}: not a JSON file"):
        values = json.loads(text, object_pairs_hook=unique)
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: expected a JSON object of settings, found {type(values).__name__}"
        )
    return values


def as_json(cfg):
    """The config as plain JSON values, as they come back from a file."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def from_json(cls, values, source):
    """{field: value} of a JSON object of settings; UserError names `source` and what is wrong.

    A file of an earlier run, which says "versions", may have other settings than the script has
    now: a fork may add, remove and rename some. That is a note. In a file written by hand it is an
    error.
    """
    kinds = typing.get_type_hints(cls)
    values = dict(values)
    earlier_run = values.pop("versions", None)
    unknown = [name for name in values if name not in kinds]
    if unknown and not earlier_run:
        raise UserError(f"{source}: {no_such_setting('--' + unknown[0], kinds)}")
    if unknown:
        note(f"{source}: left out, as this script has no such setting: {', '.join(unknown)}")
    missing = [name for name in kinds if name not in values]
    if missing and earlier_run:
        note(f"{source}: not in it, so by default: {', '.join(missing)}")
    settings = {}
    for name in values.keys() - unknown:
        try:
            settings[name] = from_plain(kinds[name], values[name])
        except TypeError as error:
            raise UserError(f"{source}: --{name}: {error}") from None
    return settings


def from_plain(kind, value):
    """A value of a JSON file as the type `kind`; TypeError if it is none."""
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(from_plain(typing.get_args(kind)[0], item) for item in value)
    if typing.get_origin(kind) is Literal:
        fits = value in typing.get_args(kind)
    elif kind is float:
        fits = type(value) in (int, float)
    else:
        fits = type(value) is kind
    if not fits:
        raise TypeError(f"{value!r} is not {inspect.formatannotation(kind)}")
    return float(value) if kind is float else value


def note(text):
    """Print a line for the user, by rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)


# Command line


def as_word(value):
    """A value as a flag takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def from_word(kind, text):
    """A word of a command line as the type `kind`; ValueError if it is none."""
    if typing.get_origin(kind) is tuple:
        items = [item.strip() for item in text.split(",")]
        return tuple(from_word(typing.get_args(kind)[0], item) for item in items if item)
    if kind is bool:
        return ("false", "true").index(text.lower()) == 1
    if kind is int and re.fullmatch(r"[\d.]+e\d+", text) and float(text).is_integer():
        return int(float(text))  # such as 1e6
    return kind(text)


def no_such_setting(flag, known):
    """The message about an unknown `flag`, which names the nearest of the `known` names."""
    spelled = "--" + flag.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(spelled, [f"--{name}" for name in known])
    nearest = SYNONYMS.get(spelled, "")
    if nearest.partition(" ")[0].removeprefix("--") not in known:
        nearest = close[0] if close else ""
    return f"{flag}: no such setting; " + (f"did you mean {nearest}?" if nearest else "see --help")


class Parser(argparse.ArgumentParser):
    """Flags for the settings of a config class; those of the script first, then the shared."""

    def __init__(self, cls, description=None):
        super().__init__(
            usage=argparse.SUPPRESS,
            description=description,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.known = ["help"]
        kinds = typing.get_type_hints(cls)
        fields = {each.name: each for each in dataclasses.fields(cls)}
        for base in cls.__mro__:
            declared = [name for name in inspect.get_annotations(base) if name in fields]
            if declared:
                group = self.add_argument_group(base.__doc__.splitlines()[0].rstrip("."))
            for name in declared:
                self.add_field(group, fields.pop(name), kinds[name])

    def add_field(self, group, setting, kind):
        name = setting.name
        text = f"{setting.metadata.get('help', '')} [{as_word(setting.default)}]"
        options = {"help": text.replace("%", "%%").strip()}
        if typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options["type"] = functools.partial(from_word, kind)
            options["metavar"] = inspect.formatannotation(kind)
            options["type"].__name__ = options["metavar"]  # for argparse's messages
        if kind is bool:
            options["nargs"] = "?"
            options["const"] = True
            options["help"] += f" (off: --no_{name})"
            group.add_argument(
                f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS
            )
            self.known.append(f"no_{name}")
        group.add_argument(f"--{name}", **options)
        self.known.append(name)

    def read(self, words):
        """{setting: value} of the words of a command line; UserError says what is wrong."""
        settings, unknown = self.parse_known_args(words)
        if unknown:
            self.error(no_such_setting(unknown[0].partition("=")[0], self.known))
        return vars(settings)

    def error(self, message):
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":  # the other ranks are silent
            super().print_help(file)


def parse(cls, words, usage="", presets=None, stages=None, model_settings=None):
    """The config `cls` for the words of a command line; UserError, or SystemExit(0) after --help.

    presets: {name: {setting: value}}. stages: {name: {setting: default of that stage}}. With
    stages it is a list of configs: of the setting `stage` or, if that is "all", of each stage.
    model_settings: function of the file --init_from that gives {setting: value} of its model.
    """
    presets = presets or {}
    stages = stages or {}
    parser = Parser(cls, usage + defaults_in_words(stage=stages, preset=presets))
    parser.add_argument(
        "--config", metavar="FILE.json", help="settings from a file; flags win over them"
    )
    if presets:
        parser.add_argument(
            "--preset", choices=presets, help="named settings; --config and flags win over them"
        )
    flags = parser.read(words)
    preset = presets.get(flags.pop("preset", None), {})
    path = flags.pop("config", None)
    file = from_json(cls, read_json(path), path) if path else {}
    settings = preset | file | flags
    if model_settings and settings.get("init_from") and settings.get("init_strict", True):
        settings = with_model(cls, settings, model_settings)
    if not stages:
        return cls(**settings)

    stage = settings.get("stage", cls.stage)
    if stage != preset.get("stage", stage):
        raise UserError(f"--stage {stage}: this preset is for --stage {preset['stage']} alone")
    for each in dataclasses.fields(cls):
        if each.name in flags and stage != "all" and not is_for(each, stage):
            raise UserError(
                f"--{each.name}: it has no effect on --stage {stage}, "
                f"only on {', '.join(each.metadata['stages'])}"
            )
    wanted = stages if stage == "all" else [stage]
    return [cls(**{**stages[name], **settings, "stage": name}) for name in wanted]


def defaults_in_words(**tables):
    """Lines for --help about presets and stages, {name of the flag: {name: {setting: value}}}."""
    lines = [""]
    for flag, table in tables.items():
        for name, values in table.items():
            words = [f"{setting} {as_word(value) or 'none'}" for setting, value in values.items()]
            line = f"Defaults of --{flag} {name}: {', '.join(words) or 'as below'}"
            lines.append(textwrap.fill(line, 100))
    return "\n".join(lines)


def with_model(cls, settings, model_settings):
    """Settings, with those of the model in the file --init_from; UserError if they differ."""
    path = settings["init_from"]
    file = from_json(cls, model_settings(path), path)
    inherited = {name: file[name] for name in names(cls, "inherit") if name in file}
    settings = {**inherited, **settings}
    for name in names(cls, "model"):
        if name in file and settings.setdefault(name, file[name]) != file[name]:
            raise UserError(
                f"--{name} {as_word(settings[name])}: {path} is a model of {as_word(file[name])}; "
                "leave it (or its preset or file) out, or take what fits by --no_init_strict"
            )
    return settings


class Pipe(io.FileIO):
    """A standard stream whose reader may leave, such as `| head -n 1`: the rest is dropped."""

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(content)


def open_output(stream):
    """A stream for the standard `stream` to which any character can be written until the end."""
    if stream is None:  # closed before the start, by >&-
        return open(os.devnull, "w")
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Pipe(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def run(commands, usage, default=None, presets=None, stages=None, model_settings=None):
    """Run the command that the first word of the command line names, or `default`.

    commands: {name: (function of a config, config class)}. The other arguments, as of `parse`, are
    the default command's. An error on the command line ends with one line and status 2, a later
    UserError or OSError with status 1.
    """
    sys.stdout = open_output(sys.stdout)
    sys.stderr = open_output(sys.stderr)
    words = sys.argv[1:]
    status = 2
    try:
        if not default and words[:1] in (["--help"], ["-h"]):
            print(f"{usage}\nSettings: COMMAND --help, with a COMMAND of {', '.join(commands)}")
            raise SystemExit(0)
        name = words.pop(0) if words and not words[0].startswith("-") else default
        if name not in commands:
            raise UserError(f"{name or 'command'}: expected one of {', '.join(commands)}")
        function, cls = commands[name]
        usage = f"{usage}\nSettings of {name}:\n"
        if name == default:
            cfg = parse(cls, words, usage, presets, stages, model_settings)
        else:
            cfg = parse(cls, words, usage)
        status = 1
        function(cfg)
    except (UserError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            if "/gloo/" not in str(error):
                raise
            error = UserError(
                "another rank has ended, or did not answer for --timeout_minutes; what it "
                f"printed says why ({str(error).splitlines()[0]})"
            )
        # Of a mistake on the command line rank 0 tells; later, the rank that met the error.
        silent = status == 2 and os.environ.get("RANK", "0") != "0"
        if not getattr(error, "relayed", silent):
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        write_torchrun_error(error)
        raise SystemExit(status) from None
    except KeyboardInterrupt:  # before training, which saves first
        raise SystemExit(130) from None


def write_torchrun_error(error):
    """Tell torchrun the error, which it repeats at the end of its report."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(json.dumps({"message": str(error)}))


# Helpers of commands


def need(module, wanted_by, package=None):
    """The optional `module`, imported; UserError says how to install its package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        raise UserError(f"{wanted_by} needs {package}: pip install {package}") from None


def decode_text(content, name):
    """The text of `content` (bytes): UTF-8, or what its byte order mark says; UserError."""
    encoding = "utf-8-sig"  # with or without a mark
    for mark, marked_encoding in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            encoding = marked_encoding
            break
    with explained(f"{name}: not text in UTF-8, nor marked as UTF-16; save it as UTF-8"):
        text = content.decode(encoding)
        if "\0" in text:  # UTF-16 without a mark
            raise ValueError("it has zero bytes")
        return text


def texts_of(text, path):
    """The text, or the lines of the file `path`, that are not blank; UserError of an empty file."""
    if not path:
        return [text.strip()] if text.strip() else []
    lines = decode_text(Path(path).read_bytes(), path).splitlines()
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise UserError(f"{path}: no text in it")
    return texts


def check_one(cfg, *names):
    """UserError if more than one of the settings `names` is given."""
    flags = [f"--{name}" for name in names if getattr(cfg, name)]
    if len(flags) > 1:
        raise UserError(f"{', '.join(flags)}: give one of them")


def check_suffix(flag, path, suffix):
    """UserError for a file whose name promises another format than `suffix`."""
    if path and not path.lower().endswith(suffix):
        raise UserError(f"--{flag}: {path}: expected a name that ends in {suffix}")
