"""Saving as a commit: atomic files, checksums, and a run folder that always holds a complete run.

A file x is written as x.tmp, flushed, synced, and renamed to x; then its folder is synced. First
the checkpoint is written, then auto_resume.json, which names it. Files hold tensors and plain
values only, and every load is `weights_only=True`.

    checkpoints/step_N.pt    {"kind", "model", "config", "versions", "step", …, "ema", "training"}
    model.pt best.pt         the same without "ema" and "training"; "model" is averaged. model.pt
                             has the results of the test, best.pt its "val_loss" and "measure"
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import math
import os
import platform
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from common import config, dist, optim, schedule
from common.config import UserError
from common.ema import EMA

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None

KEEP = 3  # newest checkpoints that are kept; --save copies others elsewhere

# Files


def lock(file, wait=False):
    """Lock an open file until it is closed; a note on a file system without locks.

    If another process has it, `wait` for that, or raise BlockingIOError.
    """
    if not fcntl:
        return
    try:
        # A record lock: forked workers do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise
    except OSError:  # Lustre and NFS may have none
        if not wait:  # of a run
            config.note(
                f"{file.name} cannot be locked; make sure that no other process trains here"
            )


@contextlib.contextmanager
def atomic_write(path):
    """Context that gives a binary file. Left without an error, `path` has what was written."""
    path = Path(path)
    if path.exists() and not path.is_file():  # such as /dev/null, which root could replace
        raise FileExistsError(f"{path}: is there, and not a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # Windows opens no folders, some systems sync none
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch's own error hides that of the disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror}, writing", str(path)) from error
        raise


def save(contents, path):
    """Write nested dicts and lists of tensors and plain values."""
    with atomic_write(path) as file:
        torch.save(contents, file)


def load(path, mmap=False):
    """The contents saved at `path`, on the CPU. UserError if it is missing, damaged, or foreign.

    mmap: tensors are read from the file only where they are used.
    """
    with config.explained(
        f"{path}: no such checkpoint, or damaged, or of another program; train first, or name "
        "another file"
    ):
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(contents["model"], dict):
            raise TypeError("it has no weights")
        return contents


def checksum(path):
    """sha256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(values, path):
    """Write `values` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(config.finite(values), indent=2) + "\n").encode())


def damaged(path):
    """Context that turns errors from a damaged or foreign file into a UserError that names it."""
    return config.explained(f"{path}: damaged, or of another program")


# Models


def strip_prefixes(weights):
    """{name: tensor} without what torch.compile and DistributedDataParallel put before names."""
    prefixes = r"^(module\.|_orig_mod\.)+|_orig_mod\."
    return {re.sub(prefixes, "", name): value for name, value in weights.items()}


def not_finite(weights):
    """The names of {name: tensor} whose values are not all finite."""
    return [
        name
        for name, value in weights.items()
        if torch.is_tensor(value) and not value.isfinite().all()
    ]


def load_weights(module, weights, path, strict=True):
    """Load {name: tensor} into `module`. UserError, which names `path`, unless all fit.

    strict=False: tensors that do not fit are left out, but half of the numbers must fit.
    """
    own = module.state_dict()
    with config.explained(f"{path}: weights of another model; give its settings"):
        if not weights.keys() <= own.keys():
            weights = strip_prefixes(weights)
        names = not_finite(weights)
        if names:
            raise UserError(
                f"{path}: weights that are not finite, as {names[0]}; take another file (without "
                "this one its run goes on from the checkpoint before it)"
            )
        if not strict:
            fitting = {
                name: value
                for name, value in weights.items()
                if name in own and own[name].shape == value.shape
            }
            share = sum(map(torch.numel, fitting.values())) / sum(map(torch.numel, own.values()))
            config.note(
                f"{path}: {len(fitting)} of {len(own)} weights of the model are in it and fit: "
                f"{share:.1%} of the numbers, of which half must"
            )
            if share >= 0.5:  # else the next line refuses, and names what differs
                weights = own | fitting
        module.load_state_dict(weights)


def read_model(classes, path, weights="ema"):
    """(config, contents) of a model file, with the weights for use as contents["model"].

    classes: {kind of model: its config class}. weights: "ema", or "online", which only checkpoints
    have.
    """
    contents = load(path)
    if contents.get("kind") not in classes:
        raise UserError(f"{path}: expected a model of the kind {' or '.join(classes)}")
    if weights == "online" and "ema" not in contents:
        raise UserError(
            f"{path}: has the averaged weights alone; --weights online needs one of RUN/checkpoints"
        )
    cls = classes[contents["kind"]]
    with damaged(path):
        settings = config.from_json(cls, contents["config"], path)
        # Which this program may not have.
        settings |= {"logger": "console", "save": (), "metadata": ()}
        cfg = cls(**settings)
    if weights == "ema":
        contents = model_contents(contents)
    return cfg, contents


def load_model(make, classes, path, weights="ema"):
    """(model, contents of the file) of a model file, adapters merged: see `read_model`.

    make: function of a config and the file's "widths", which gives the model.
    """
    cfg, contents = read_model(classes, path, weights)
    if "lora" in contents:  # a fork may have no adapters
        from common.models import lora

        contents = lora.merged(contents, path)
    with damaged(path):
        model = make(cfg, *contents["widths"])
        load_weights(model, contents["model"], path)
    return model, contents


def model_file(folder, name="", weights="ema"):
    """The path of a run's file `name`.

    Without a name it is best.pt, with a note, or else model.pt; for "online" weights, which only
    checkpoints have, the newest of these.
    """
    if weights == "online":
        name = name or max(Path(folder).absolute().glob("checkpoints/step_*.pt"), default="")
    best = Path(folder, "best.pt")
    if name or not best.is_file():
        return Path(folder, name or "model.pt")
    contents = load(best, mmap=True)
    with damaged(best):
        config.note(
            f"{best}: of step {contents['step']}, whose validation loss "
            f"{contents['val_loss']:.4f} was the lowest"
        )
    return best


def model_contents(contents):
    """The contents of model.pt from those of a checkpoint: averaged weights, and what they need."""
    contents = dict(contents)
    contents["model"] = contents.pop("ema", contents["model"])
    contents.pop("training", None)
    return contents


# State of a run


def versions(script):
    """torch's version, and a hash of `script` and common/, which changes with any edit."""
    digest = hashlib.sha256()
    for path in [Path(script), *sorted(Path(__file__).parent.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return {"torch": str(torch.__version__), "code": digest.hexdigest()[:12]}


def check_identity(path, identity):
    """UserError unless the checkpoint `path` is of a run with the same identity.

    identity: {name: plain value} of what must not change while a run goes on; None is not known. A
    name that only one of them has belongs to a setting that a fork added or removed.
    """
    contents = load(path, mmap=True)
    if "training" not in contents:
        raise UserError(
            f"{path}: weights without the state of a run; start from them with --init_from, "
            "not --load"
        )
    with damaged(path):
        saved = contents["training"]["identity"]
        changed = [
            f"{name} is {saved[name]!r} there and {value!r} here"
            for name, value in identity.items()
            if None not in (saved.get(name), value) and saved[name] != value
        ]
    if changed:
        raise UserError(
            f"{path}: of a run of another model or other data: {'; '.join(changed)}. Give the same "
            "settings (--config RUN/config.json has them), or another --run_dir, which may start "
            f"with these weights by --init_from {path}"
        )


@dataclasses.dataclass(eq=False)
class State:
    """What a checkpoint holds. To make one is collective: ranks must have equal code and data."""

    cfg: config.TrainingRun
    model: torch.nn.Module  # what is trained and averaged
    ema: EMA
    optimizers: list
    scaler: torch.amp.GradScaler
    identity: dict  # {name: plain value} of what must not change while the run goes on
    info: dict  # "kind", and plain values that building the model takes besides the config
    others: dict = dataclasses.field(default_factory=dict)  # {name: another trained module}
    step: int = 0

    def __post_init__(self):
        self.versions = versions(inspect.getfile(type(self.cfg)))  # the script has the Config
        dist.check_alike(self.versions | self.identity)

    def contents(self):
        """The contents of a checkpoint, with the tensors themselves, not copies."""
        return {
            **self.info,
            "model": self.model.state_dict(),
            "config": config.as_json(self.cfg),
            "versions": self.versions,
            "step": self.step,
            "ema": self.ema.state_dict(),
            "training": {
                "others": {name: module.state_dict() for name, module in self.others.items()},
                "optimizers": optim.state(self.optimizers),
                "scaler": self.scaler.state_dict(),
                "identity": self.identity,
            },
        }

    def restore(self, contents, path):
        """Resume from the contents of the checkpoint `path`; notes say what has changed since."""
        with damaged(path):
            training = contents["training"]
            load_weights(self.model, contents["model"], path)
            for name, module in self.others.items():
                load_weights(module, training["others"][name], path)
            self.ema.load_state_dict(contents["ema"])
            optim.load(self.optimizers, training["optimizers"], path)
            if training["scaler"]:  # {} without fp16; a disabled scaler ignores it
                self.scaler.load_state_dict(training["scaler"])
            self.step = contents["step"]
            saved = contents["versions"] | contents["config"]
        config.note(f"resuming {path} at step {self.step} of {self.cfg.steps}")
        present = self.versions | config.as_json(self.cfg)
        with contextlib.suppress(AttributeError):  # a fork may have a schedule of its own
            rate = "learning rate of the next step"
            now = schedule.of_config(self.step, self.cfg)
            before = schedule.of_config(self.step, SimpleNamespace(**(present | saved)))
            present[rate] = now  # both, or neither if one fails
            saved[rate] = before
        for name in saved | present:
            before = saved.get(name, "no setting")
            now = present.get(name, "no setting")
            if now != before:
                config.note(f"{name} changed from {before} to {now}")


# The run folder


class RunFolder:
    """A run folder, written by rank 0 alone: locked, and resumable at every instant.

    On other ranks only folder, resume_from, source, results and measure are known.
    """

    def __init__(self, folder):
        # On every rank, found by `loop.open_run`; `measure` by `loop.identify`.
        self.folder = Path(folder)
        self.resume_from = None  # checkpoint to resume from
        self.source = ""  # file that the model is from: that, or the one of --init_from
        self.results = None  # {name: value} of the test, once the run is finished
        self.measure = {}  # {name: plain value} of what the validation loss depends on
        # On rank 0. auto_resume.json has these and `results`; all else of a resume is in the files
        # that it names.
        self.checkpoints = []  # {"file", "step", "sha256"} of each, newest first
        self.logger_identity = {}  # {name: plain value}: see tracker.Logger.open
        # On rank 0, found again at every start.
        self.best = {}  # {"file", "step"} of best.pt, once there is one
        self.best_val_loss = math.inf
        self.said_rising = False

    def open(self):
        """Lock the folder, and read its record. UserError if a live process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / ".lock", "a+")  # noqa: SIM115 (open until the end)
        try:
            lock(file)
        except OSError as error:
            file.seek(0)
            raise UserError(
                f"{self.folder}: in use by another live process ({file.read().strip()}); "
                "wait for it, stop it, or give another --run_dir"
            ) from error
        with contextlib.suppress(OSError):  # a full disk: the record below names its file
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        self.lock_file = file
        path = self.folder / "auto_resume.json"
        if path.exists() or any(self.folder.glob("checkpoints/step_*.pt")):
            with config.explained(
                f"{path}: damaged or missing; go on from one of {self.folder}/checkpoints with "
                "--load FILE and a new --run_dir"
            ):
                record = json.loads(path.read_text())
                self.checkpoints = record["checkpoints"]
                if self.checkpoints:  # else it is a new run
                    self.logger_identity = record["logger"]
                    self.results = record["results"]
        # Written at once: a first save that is cut off before it is recorded is known as such.
        self.write_record()

    def write_record(self):
        """Write auto_resume.json."""
        record = {
            "checkpoints": self.checkpoints,
            "logger": self.logger_identity,
            "results": self.results,
        }
        write_json(record, self.folder / "auto_resume.json")

    def newest_intact(self):
        """The path of the newest intact checkpoint, or None.

        The record forgets newer ones, with a note: their steps are taken again.
        """
        while self.checkpoints:
            path = self.folder / self.checkpoints[0]["file"]
            with contextlib.suppress(OSError):
                if checksum(path) == self.checkpoints[0]["sha256"]:
                    return path
            config.note(f"{path}: damaged or missing, trying the one before it")
            del self.checkpoints[0]
        return None

    def read_best(self):
        """Take the loss of best.pt as the best so far, unless it is of another run or measure."""
        path = self.folder / "best.pt"
        if not self.checkpoints or not path.is_file():
            return
        try:
            contents = load(path, mmap=True)
        except UserError:
            config.note(f"{path}: damaged, so best.pt starts anew")
            return
        if contents["step"] > self.checkpoints[0]["step"]:  # its steps are taken again
            return
        before = contents.get("measure")
        if before == self.measure:
            self.best = {"file": "best.pt", "step": contents["step"]}
            self.best_val_loss = contents["val_loss"]
        else:
            config.note(f"validation changed from {before} to {self.measure}: best.pt starts anew")

    def save(self, state, log):
        """Save `state` as the checkpoint of its step, unless it is there, and drop all but KEEP.

        log: the Tracker, which then sends copies.
        """
        newest = self.checkpoints[0]["step"] if self.checkpoints else None
        if not dist.is_main() or newest == state.step:
            return
        self.check_in_place()
        file = f"checkpoints/step_{state.step:08d}.pt"
        save(state.contents(), self.folder / file)
        sha256 = checksum(self.folder / file)
        entry = {"file": file, "step": state.step, "sha256": sha256}
        self.checkpoints = [entry, *self.checkpoints][:KEEP]
        self.write_record()
        kept_paths = [self.folder / entry["file"] for entry in self.checkpoints]
        for path in self.folder.glob("checkpoints/step_*"):
            # Or, as .tmp, of a process killed while saving. Other names are the user's copies.
            is_ours = re.fullmatch(r"step_\d+\.pt(\.tmp)?", path.name)
            if is_ours and path not in kept_paths:
                path.unlink()
        log.send()

    def save_best(self, state, val_loss, log):
        """Write best.pt if `val_loss` is the lowest so far. UserError if it is not finite."""
        if not math.isfinite(val_loss):
            self.drop_from(state.step)
            advice = "lower --lr"
            if not not_finite(state.ema.state_dict()):
                advice = f"the weights are finite: look at the validation set, or {advice}"
            dist.fail(
                f"{self.folder}: the validation loss is {val_loss} at step {state.step}; {advice}. "
                "The same command goes on from an earlier checkpoint"
            )
        if dist.is_main() and val_loss < self.best_val_loss:
            self.write_model(state, "best.pt", val_loss=val_loss, measure=self.measure)
            self.best = {"file": "best.pt", "step": state.step}
            self.best_val_loss = val_loss
            log.send()
        lowest = self.best.get("step", state.step)
        if state.step >= 2 * lowest and not self.said_rising:
            self.said_rising = True
            log.print(
                f"the validation loss was the lowest at step {lowest}, and for half of the run it "
                "has been higher: best.pt is of that step"
            )

    def write_model(self, state, file, **entries):
        """Write the model of `state`, its weights averaged, and more `entries`."""
        self.check_in_place()
        save(model_contents(state.contents()) | entries, self.folder / file)

    def drop_from(self, step):
        """Forget the checkpoints of `step` or later: a run does not go on from them."""
        if dist.is_main():
            self.checkpoints = [entry for entry in self.checkpoints if entry["step"] < step]
            self.write_record()

    def check_in_place(self):
        """OSError if the folder is not there any more: a save would make another one."""
        path = self.folder / ".lock"
        if not (path.exists() and os.path.samefile(path, self.lock_file.fileno())):
            raise OSError(
                f"{self.folder}: renamed or removed while the run was writing to it; the same "
                "command goes on from its last checkpoint once the folder is back"
            )
