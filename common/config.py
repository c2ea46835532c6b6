"""A flat frozen dataclass <-> command line <-> JSON file.

A field's type, default and trailing comment are all there is: the comment is its line in `--help`. Values are taken
from, weakest first: the default, `--preset NAME`, `--config FILE.json`, the flags themselves.
"""
import dataclasses
import decimal
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import types
import typing
from pathlib import Path

NOTES = ("versions",)  # keys of a written config.json that describe the run and are not settings


class UserError(ValueError):
    """A mistake that the user can mend. `run` prints its message alone and exits with status 1."""


def need(module, wanted_by, package=None):
    """`module` of an optional package, imported; UserError says how to install the package when it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        raise UserError(f"{wanted_by} needs {package}: pip install {package}") from None


def convert(kind, value, name):
    """`value`, a string of the command line or a JSON value, as the type `kind`; UserError says what was expected."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(kind, types.UnionType):  # `float | None`: "none" or null, or the type itself
        if text is None or (isinstance(text, str) and text.lower() == "none"):
            return None
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise UserError(f"{name}: {value!r} is none of {', '.join(typing.get_args(kind))}")
        return text
    if typing.get_origin(kind) is tuple:
        items = [item for item in text.split(",") if item.strip()] if isinstance(text, str) else text
        if not isinstance(items, (list, tuple)):
            raise UserError(f"{name}: {value!r} is not a list; give values separated by commas")
        return tuple(convert(typing.get_args(kind)[0], item, name) for item in items)
    if kind is bool:
        if isinstance(text, str) and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if not isinstance(text, bool):
            raise UserError(f"{name}: {value!r} is neither true nor false")
        return text
    if kind is str:
        if not isinstance(value, str):
            raise UserError(f"{name}: {value!r} is not a text")
        return value
    try:
        number = float("nan") if isinstance(text, bool) else float(text)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if number != number or (kind is int and not number.is_integer()):
        raise UserError(f"{name}: {value!r} is not {'a whole number' if kind is int else 'a number'}")
    return int(decimal.Decimal(str(text))) if kind is int else number  # a float would round beyond 2**53


def _is_main():
    return os.environ.get("RANK", "0") == "0"  # torchrun's: the process group may not be up yet


def _nearest(name, names, prefix=""):
    close = difflib.get_close_matches(name, names, 1)
    return f"no such setting; did you mean {prefix}{close[0]}?" if close else "no such setting; see --help"


def from_dict(cls, values, source):
    """`values` (JSON object) checked against the fields of `cls`; returns {field: value}. Raises UserError."""
    kinds, checked = typing.get_type_hints(cls), {}
    for name, value in values.items():
        if name in NOTES:
            continue
        if name not in kinds:
            raise UserError(f"{source}: {name}: {_nearest(name, kinds)}")
        checked[name] = convert(kinds[name], value, f"{source}: {name}")
    return checked


def as_json(cfg):
    """The config as plain JSON values, as they come back from a file."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(cfg).items()}


def refuse_unused(cfg, table):
    """UserError for a setting that was given, but has no effect: (name, whether it is used, what it needs) each."""
    for name, used, needed in table:
        if getattr(cfg, name) != getattr(type(cfg), name) and not used:
            raise UserError(f"--{name}: it needs {needed}")


def read_json(path):
    """The JSON object in the file `path`; UserError or OSError names the file."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object of settings, found {type(values).__name__}")
    return values


def from_flags(cls, argv, presets):
    """`--name value`, `--name=value`, `--switch`, `--no_switch` -> {field: value}; dashes and underscores are one."""
    kinds, flags, files = typing.get_type_hints(cls), {}, {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"{word!r}: expected a flag such as --{next(iter(kinds))} VALUE")
        name, given, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in kinds and name.startswith("no_") and kinds.get(name[3:]) is bool and not given:
            flags[name[3:]] = False
            continue
        if name not in kinds and name not in ("config", "preset"):
            negated = [f"no_{known}" for known, kind in kinds.items() if kind is bool]
            raise ValueError(f"--{name}: {_nearest(name, [*kinds, *negated, 'config', 'preset'], '--')}")
        if not given:
            if kinds.get(name) is bool and (not words or words[0].lower() not in ("true", "false")):
                value = "true"
            elif not words or words[0].startswith("--"):
                raise ValueError(f"--{name}: a value is missing")
            else:
                value = words.pop(0)
        if name == "preset":
            if value not in presets:
                raise ValueError(f"--preset: {value!r} is none of {', '.join(presets) or '(there are none)'}")
            files = {**presets[value], **files}
        elif name == "config":
            files = {**files, **from_dict(cls, read_json(value), value)}
        else:
            flags[name] = convert(kinds[name], value, f"--{name}")
    return {**files, **flags}


def help_text(cls, usage, presets, stages):
    """Every field of `cls` with its type, default and trailing comment, under the comment lines that head sections."""
    kinds, lines = typing.get_type_hints(cls), [usage.rstrip(), ""]
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    sources = [inspect.getsource(base) for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    for line in "".join(sources).splitlines():
        if heading := re.match(r"^    # (.*)$", line):
            lines.append(f"\n{heading[1]}:")
        elif (field := re.match(r"^    (\w+): [^#]*#\s*(.*)$", line)) and field[1] in kinds:
            kind, default = kinds[field[1]], defaults[field[1]]
            choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            shown = "|".join(choices) or (kind.__name__ if isinstance(kind, type) and kind is not tuple else str(kind))
            default = ",".join(map(str, default)) if isinstance(default, tuple) else default
            default = f" [{default}]" if default not in ("", None) else ""
            lines.append(f"  --{field[1]} {shown}{default}\n        {field[2]}")
    lines.append("\n  --config FILE.json\n        the same settings from a JSON file; flags win over it")
    for stage, settings in stages.items():
        if settings:
            defaults = ", ".join(f"{name} {value}" for name, value in settings.items())
            lines.append(f"\nDefaults of --stage {stage}: {defaults}")
    if presets:
        lines.append(f"  --preset {'|'.join(presets)}\n        named settings; --config and flags win over them")
    return "\n".join(lines)


def dispatch(commands, usage, default=None, presets=None, stages=None):
    """Run the command that the first word of the command line names, or else `default`, on its own config.

    commands: {name: (function of a config, config class)}. `presets` and `stages` are the default command's.
    """
    argv = [word for word in sys.argv[1:] if word != "--"]  # which torchrun may need before the flags, or pass on
    command = argv.pop(0) if argv and (not argv[0].startswith("-") or default is None) else default
    if command not in commands:
        close = difflib.get_close_matches(command or "", commands, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        asked = command in ("-h", "--help")
        error = f"{Path(sys.argv[0]).name}: error: {command!r}: expected one of {', '.join(commands)}{hint}"
        if _is_main():
            print(usage if asked else error, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    function, cls = commands[command]
    mine = (presets, stages) if command == default else (None, None)
    function(parse(cls, argv, f"{usage}\nSettings of {command}:", *mine))


def parse(cls, argv, usage, presets=None, stages=None):
    """The config `cls` that the command line `argv` asks for. Prints help or one line of error and exits (0 or 2).

    stages: {name: {field: default of that stage}}. With these it is a list of configs, of the stage that the field
    `stage` names or, if that is "all", of each.
    """
    presets, stages = presets or {}, stages or {}
    if {"-h", "--help"} & set(argv):
        if _is_main():
            print(help_text(cls, usage, presets, stages))
        raise SystemExit(0)
    try:
        given = from_flags(cls, argv, presets)
        if not stages:
            return cls(**given)
        asked = given.get("stage", cls.stage)
        return [cls(**{**stages[name], **given, "stage": name}) for name in (stages if asked == "all" else [asked])]
    except (ValueError, OSError) as error:
        if _is_main():
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(main):
    """Run `main()`; a user's mistake or a failing disk ends in one line on standard error and status 1."""
    try:
        main()
    except (UserError, OSError) as error:
        if not getattr(error, "relayed", False):  # by rank 0, which prints it
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # before training, which saves first
        raise SystemExit(130) from None
