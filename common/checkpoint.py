"""Model files: atomic writing, safe loading, checksums, models for inference.

A file x is written as x.tmp, flushed, synced, and renamed to x; then its folder is synced. Files
contain only tensors and plain values, and every load is `weights_only=True`.

    model.pt best.pt         {"kind", "model", "config", "versions", "step", …}; "model" is averaged
    checkpoints/step_N.pt    also "ema" and "training" (resume.py); "model" is not averaged
"""

import contextlib
import hashlib
import json
import os
import pickle
from pathlib import Path

import torch

from common import config
from common.config import UserError
from common.ema import shapes

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None

# Types of entries, checked on loading. Otherwise, a wrong type would cause a later error that
# does not name the file.
KINDS = dict.fromkeys(("model", "ema", "training", "config", "lora"), dict) | {"step": int}

# Files


def lock(file, wait=False):
    """Lock an open file until it is closed.

    If another process holds the lock: wait for it if `wait`, else raise BlockingIOError or, on some
    systems, PermissionError. If the file system has no locks, nothing is locked; without `wait`, a
    note says so.
    """
    if not fcntl:
        return
    try:
        # A record lock, because forked workers do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise
    except OSError:  # Lustre and NFS may have no locks
        if not wait:  # with `wait`, the work may safely be done twice
            config.note(
                f"{file.name} cannot be locked; make sure that no other process trains here"
            )


@contextlib.contextmanager
def atomic_write(path):
    """Context that yields a binary file. It replaces `path` at the end, unless an error occurs."""
    path = Path(path)
    if path.exists() and not path.is_file():  # such as /dev/null, which root could replace
        raise FileExistsError(f"{path}: exists, and is not a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # some systems cannot open or sync folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch.save raises a RuntimeError whose context is the error from the disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror}, writing", str(path)) from error
        raise


class Hashing:
    """Wraps a binary file, and computes the sha256 of everything written to it."""

    def __init__(self, file):
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, content):
        self.digest.update(content)
        return self.file.write(content)

    def flush(self):
        self.file.flush()


def save(contents, path):
    """Write nested dicts and lists of tensors and plain values; returns the file's sha256.

    The hash is computed while writing: reading tens of GB again would keep all ranks waiting.
    """
    with atomic_write(path) as file:
        hashing = Hashing(file)  # torch writes from beginning to end, without seeking
        torch.save(contents, hashing)
    return hashing.digest.hexdigest()


def load(path, *entries, mmap=False):
    """Load the contents of `path` to the CPU. UserError if it is missing, damaged, or not ours.

    entries: names that it must contain besides "model". mmap: read tensors only when they are used.
    """
    with config.explained(
        f"{path}: no such checkpoint, or damaged, or from another program or version; train first, "
        "or name another file"
    ):
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:  # its message suggests running code from the file
            raise TypeError("not a file of tensors and plain values") from error
        missing = {
            name
            for name in ("model", *entries, *contents)
            if name not in contents or not isinstance(contents[name], KINDS.get(name, object))
        }
        if missing:
            raise TypeError(f"it has no {', '.join(sorted(missing))}")
        return contents


def checksum(path):
    """The sha256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(values, path):
    """Write `values` as indented JSON, atomically; NaN and infinity become null."""
    with atomic_write(path) as file:
        file.write((json.dumps(config.nan_to_none(values), indent=2) + "\n").encode())


# Models


def not_finite(weights):
    """Names of the tensors in {name: tensor} that contain NaN or infinity."""
    return [
        name
        for name, value in weights.items()
        if torch.is_tensor(value) and not value.isfinite().all()
    ]


def load_weights(module, weights, path):
    """Load {name: tensor} into `module`; a UserError names `path` if names or shapes differ."""
    different = sorted(shapes(weights) ^ shapes(module.state_dict()))
    if different:
        raise UserError(
            f"{path}: weights of another model, which differ in {different[:5]}; use its settings"
        )
    module.load_state_dict(weights)


def read_model(classes, path, weights="ema"):
    """Read (config, contents) from a model file; contents["model"] has the chosen weights.

    classes: {kind of model: its config class}. weights: "ema" (averaged) or "online" (not averaged,
    only in checkpoints).
    """
    contents = load(path, "kind", "config")
    if contents["kind"] not in classes:
        raise UserError(f"{path}: expected a model of the kind {' or '.join(classes)}")
    if weights == "online" and "ema" not in contents:
        raise UserError(
            f"{path}: has only averaged weights; --weights online needs one of RUN/checkpoints"
        )
    cls = classes[contents["kind"]]
    settings = config.from_json(cls, contents["config"], path)
    # The run's logger and savers may need packages that are not installed here.
    settings |= {"logger": "console", "save": ()}
    if weights == "ema":
        contents = model_contents(contents)
    return cls(**settings), contents


def model_file(folder, name="", weights="ema"):
    """The path of the model file `name` in a run folder.

    The default is best.pt, with a note that gives its step, or else model.pt. For "online" weights,
    the default is the newest checkpoint, because other files have only averaged weights.
    """
    if weights == "online":
        name = name or max(Path(folder).absolute().glob("checkpoints/step_*.pt"), default="")
    best = Path(folder, "best.pt")
    if name or not best.is_file():
        return Path(folder, name or "model.pt")
    contents = load(best, "step", "val_loss", mmap=True)
    config.note(
        f"{best}: from step {contents['step']}, which had the lowest validation loss, "
        f"{contents['val_loss']:.4f}"
    )
    return best


def model_contents(contents):
    """Convert the contents of a checkpoint to those of model.pt, with averaged weights."""
    contents = dict(contents)
    contents["model"] = contents.pop("ema", contents["model"])
    contents.pop("training", None)
    return contents
