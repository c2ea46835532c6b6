"""Saving as a commit: atomic files, checksums, and a run folder that always holds a complete run.

A file x is written as x.tmp, flushed, synced, and renamed to x; then its folder is synced. First
the checkpoint is written, then auto_resume.json, which names it. Files hold tensors and plain
values only, and every load is `weights_only=True` and compares the checksums that torch wrote.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import re
import time
import zipfile
from pathlib import Path

import torch
from tqdm import tqdm

from common import amp, config, dist, optim
from common.config import UserError
from common.ema import EMA

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

# Files

# What file systems say that have no locks (Lustre, NFS), or cannot sync a folder (CIFS).
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
MAX_STEPS = 2**40  # more than any run takes


def lock(file, wait=False):
    """Lock an open file until it is closed, or on a file system without locks print a note.

    If another process has it: BlockingIOError or PermissionError, or `wait`.
    """
    while True:
        try:
            if fcntl:
                # A record lock: forked workers do not inherit it.
                return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(1 << 30)  # a byte that nobody writes: others cannot read what is locked
            return msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in NO_LOCKS:
                folder = os.path.dirname(file.name)
                return config.note(
                    f"{folder} has no locks; make sure that no other process trains in it"
                )
            if not (wait and isinstance(error, (BlockingIOError, PermissionError))):
                error.filename = file.name
                raise
        time.sleep(0.1)


@contextlib.contextmanager
def atomic_write(path, durable=True):
    """Context that gives a binary file. Left without an error, `path` has what was written.

    durable: it is on the disk before the context ends.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # it must be new: a link of this name is not followed
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch's own error hides that of the disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror}, writing", str(path)) from error
        raise


def sync_folder(folder):
    """Make the names in a folder durable, where the system can: the files themselves are."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def save(state, path, before_replace=None):
    """Write `state` (nested dicts and lists of tensors and plain values); returns its sha256.

    before_replace: function of the sha256, called before the file takes its place.
    """
    with atomic_write(path) as file:
        torch.save(state, file)
        file.flush()
        digest = checksum(file.name)
        if before_replace:
            before_replace(digest)
    return digest


def load(path):
    """The state saved at `path`, on the CPU. UserError if it is missing, damaged, or foreign."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # by CRC-32, which torch writes and does not compare
            # Of what has the mark of a folder torch reads nothing, and leaves tensors as they are.
            damaged = damaged or any(info.external_attr & 0x10 for info in archive.infolist())
    except Exception as error:  # torch raises a dozen types for what it does not know
        # The reason without torch's advice around it, which is to load without weights_only.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        reason = re.split(r"\n|\. ", reason)[0]
        raise UserError(
            f"{path}: not a checkpoint of this program, or damaged ({type(error).__name__}: "
            f"{reason!r:.200})"
        ) from error
    if damaged:
        raise UserError(
            f"{path}: damaged: it is not as it was written; take another copy, or start its run "
            "again, which makes a model.pt anew"
        )
    if not matches(state, {"model": {}}):
        raise UserError(
            f"{path}: not a checkpoint of this program: expected a dict with an entry 'model'"
        )
    with damage_is_named(path):
        if not 0 <= state.get("step", 0) < MAX_STEPS:
            raise ValueError(f"step {state['step']}")
    return state


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
        file.write((json.dumps(finite(values), indent=2) + "\n").encode())


def finite(values):
    """`values`, plain ones, with None for numbers that JSON has no word for."""
    return json.loads(json.dumps(values), parse_constant=lambda word: None)


def damage_is_named(path):
    """Context that turns errors from a damaged or foreign file into a UserError that names it."""
    return config.explained(f"{path}: damaged, or of another program")


def matches(value, example):
    """Recursive type check of a plain value against an example; a tuple lists alternatives."""
    if isinstance(example, tuple):
        return any(matches(value, alternative) for alternative in example)
    if not isinstance(value, type(example)) or isinstance(value, bool) != isinstance(example, bool):
        return False
    if isinstance(example, dict):
        return all(matches(value.get(name), item) for name, item in example.items())
    if isinstance(example, list) and example:
        return all(matches(item, example[0]) for item in value)
    return True


def copy_to_host(state):
    """A copy in host memory of nested dicts and lists of tensors and plain values."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copy_to_host(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(copy_to_host(value) for value in state)
    return state


# Models

# Settings that name files, of all scripts.
PATHS = ("data", "val_data", "embeddings", "clip", "soundstream", "semantic")


def weights_that_fit(module, state, path, strict=True):
    """Entries of `state["model"]` whose name, shape and kind of number are the module's.

    UserError unless all fit (strict), or at least one does.
    """
    expected = module.state_dict()
    weights = state["model"]
    fitting = {}
    for name, value in weights.items():
        if name in expected and kind_of(value) == kind_of(expected[name]):
            fitting[name] = value
    wrong = sorted((expected.keys() | weights.keys()) - fitting.keys(), key=str)
    if wrong and matches(state, {"lora": {"base": ""}}):
        base = state["lora"]["base"]
        raise UserError(f"{path}: LoRA adapters, not a model; give their base, {base}")
    if wrong and (strict or not fitting):
        names = ", ".join(map(str, wrong[:5]))
        raise UserError(
            f"{path}: weights of another model: {len(wrong)} entries differ: {names}; give the "
            "settings it was trained with"
        )
    return fitting


def kind_of(weight):
    """What a weight in a file must have in common with that of the model; False: no tensor."""
    return isinstance(weight, torch.Tensor) and (weight.shape, weight.is_floating_point())


def load_weights(module, state, path, strict=True):
    """Load `state["model"]` into `module`: all of it, or if not `strict` what fits.

    UserError unless it is finite.
    """
    weights = weights_that_fit(module, state, path, strict)
    broken = [name for name, value in weights.items() if not value.float().isfinite().all()]
    if broken:
        raise UserError(
            f"{path}: {len(broken)} weights are not finite: {', '.join(broken[:5])}; take an "
            "earlier checkpoint"
        )
    module.load_state_dict(weights, strict=False)


def peek(path):
    """The contents of a model file, its weights not yet read; {} of another file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state if isinstance(state["config"], dict) else {}
    except Exception:  # of a dozen types; `load` reports them
        return {}


def model_settings(path):
    """{setting: value} of the model in the file `path`; of another file, none."""
    state = peek(path)
    return {**state.get("config", {}), "versions": state.get("versions", True)}


def read_model(kind, cls, path, weights="ema", lora_scale=1.0):
    """(config of the class `cls`, contents) of a model file; contents["model"] are its weights.

    kind: of model, as the file must say. weights: "ema", or "online", which only checkpoints have.
    Adapters are merged into their base. Paths are right even if the run was moved with its files.
    """
    path = Path(path)
    state = load(path)
    if state.get("kind") != kind:
        raise UserError(f"{path}: not a {kind}'s model.pt, best.pt or checkpoint")
    if weights == "online" and "ema" not in state:
        raise UserError(
            f"{path}: has the averaged weights alone; --weights online needs one of RUN/checkpoints"
        )
    with damage_is_named(path):
        folder = path.absolute().parents[path.parent.name == "checkpoints"]
        settings = dict(state["config"])
        old_folder = os.path.join(state["cwd"], settings["run_dir"])

        def resolve(values, name):
            if name in values:
                values[name] = resolve_path(values[name], old_folder, folder, state["cwd"])

        for name in PATHS:
            resolve(settings, name)
        resolve(state, "clip")
        resolve(state.get("lora", {}), "base")
        settings |= {"run_dir": str(folder), "versions": state.get("versions", True)}
        settings = config.from_json(cls, settings, path)
        try:
            cfg = cls(**settings)
        except UserError as error:  # a value out of bounds, which names no file
            raise UserError(f"{path}: {error}") from None

        if weights == "ema":
            state = inference_contents(state)
        if "lora" in state:
            from common import lora

            state = lora.merged(state, path, lora_scale)
    return cfg, state


def build(make, state, path, device="cpu"):
    """The model that `make()` gives, in eval mode, with the weights of the file's contents `state`.

    It is made without memory first: the sizes that a damaged file claims may be any.
    """
    with torch.device("meta"):
        weights_that_fit(make(), state, path)
    model = make()
    load_weights(model, state, path)
    return model.to(device).eval()


def resolve_path(stored, old_folder, folder, cwd=""):
    """A stored path, relative to `cwd`, after the run folder has moved from old_folder to folder.

    Other names, such as open_clip:MODEL/WEIGHTS, are given back.
    """
    if not re.match(r"[^:]*/", stored or ""):
        return stored
    stored = os.path.join(cwd, stored)
    moved = os.path.normpath(os.path.join(folder, os.path.relpath(stored, old_folder)))
    return moved if os.path.exists(moved) else stored


# State of a run


def versions(script):
    """torch's version, and a hash of `script` and common/, which changes with any edit."""
    digest = hashlib.sha256()
    for path in [Path(script), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return {"torch": str(torch.__version__), "code": digest.hexdigest()[:12]}


# What a stop between two log lines leaves for the next line. losses: of each step, over samples.
NOTHING_UNLOGGED = {"losses": [], "others": {}, "grad_norm": 0.0, "unusable": 0, "overflows": 0}

# Entries of a checkpoint that only resuming needs.
FOR_RESUMING = (
    "ema",
    "optimizers",
    "scaler",
    "identity",
    "best_val_loss",
    "discriminators",
    "unlogged",
)


@dataclasses.dataclass(eq=False)
class State:
    """What a checkpoint holds: weights, EMA, optimizers, gradient scaler, step, best loss.

    To make one is collective: UserError if the ranks have other data or other code.
    """

    cfg: config.TrainingRun
    modules: dict  # "model": what is trained and averaged; NAME: another trained module
    ema: EMA
    optimizers: list
    scaler: torch.amp.GradScaler
    identity: dict  # {name: plain value} of what must not change while the run goes on
    model_info: dict  # plain values that building the model takes besides the config
    step: int = 0
    best_val_loss: float = math.inf

    def __post_init__(self):
        self.versions = versions(inspect.getfile(type(self.cfg)))  # the script has the Config
        self.unlogged = dict(NOTHING_UNLOGGED)
        dist.check_alike({**self.identity, "code": self.versions["code"]})

    def contents(self):
        """The contents of a checkpoint, with the tensors themselves, not copies."""
        return {
            **{name: module.state_dict() for name, module in self.modules.items()},
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "best_val_loss": self.best_val_loss,
            "unlogged": self.unlogged,
            "identity": self.identity,
            "config": config.as_json(self.cfg),
            "versions": self.versions,
            "cwd": os.getcwd(),
            **self.model_info,
        }

    @property
    def logged_step(self):
        """The step of the last line in metrics.jsonl that holds for this state."""
        return self.step - len(self.unlogged["losses"])

    def start_from(self, path, strict=True):
        """Take the weights, and nothing else, of a model.pt or a checkpoint."""
        load_weights(self.modules["model"], load(path), path, strict)
        self.ema.load_state_dict(self.modules["model"].state_dict())

    def check(self, state, path):
        """UserError unless the contents of the file `path` have this State's types and shapes."""
        if "identity" not in state:
            raise UserError(
                f"{path}: weights without the state of a run; start from them with --init_from, "
                "not --load"
            )
        scaler = torch.amp.GradScaler("cpu").state_dict() if state.get("scaler") else {}
        example = {
            **{name: {} for name in self.modules},
            "ema": {},
            "optimizers": [{"state": {}, "param_groups": [{"params": [0]}]}],
            "scaler": scaler,
            "step": 0,
            "best_val_loss": 0.0,
            "unlogged": {**NOTHING_UNLOGGED, "losses": [0.0]},
            "identity": {},
            "config": {},
            "versions": {},
        }
        if not matches(state, example):
            raise UserError(
                f"{path}: damaged, or of another program: entries {', '.join(example)} are not as "
                "expected"
            )
        check_identity(state["identity"], self.identity, path, path)
        for name, module in self.modules.items():
            weights_that_fit(module, {"model": state[name]}, path)
        weights_that_fit(self.modules["model"], {"model": state["ema"]}, path)
        with damage_is_named(path):
            if not optim.fit(self.optimizers, state["optimizers"]):
                raise UserError(
                    f"{path}: the state of its optimizer is of another model; "
                    "go on with --init_from"
                )

    def restore(self, path):
        """Resume from the checkpoint `path`; returns notes on what has changed since."""
        state = load(path)
        self.check(state, path)
        for name, module in self.modules.items():
            module.load_state_dict(state[name])
        self.ema.load_state_dict(state["ema"])
        optim.load(self.optimizers, state["optimizers"])  # rates follow from the step
        self.step = state["step"]
        self.unlogged = state["unlogged"]
        best = Path(self.cfg.run_dir) / "best.pt"
        if Path(path).parent.parent == best.parent:
            self.best_val_loss = state["best_val_loss"]
        elif best.is_file():  # the checkpoint is another run's, whose best is not in this folder
            self.best_val_loss = load(best)["val_loss"]

        notes = [f"resuming {path} at step {self.step} of {self.cfg.steps}"]
        notes.append(amp.load_scaler(self.scaler, state["scaler"]))
        saved = {**state["versions"], **state["config"]}
        present = {**self.versions, **config.as_json(self.cfg)}
        for name in {**saved, **present}:
            before = saved.get(name, "no setting")
            now = present.get(name, "no setting")
            if now != before:
                notes.append(f"{name} changed from {before} to {now}")
        return notes


def inference_contents(state):
    """The contents of model.pt from those of a checkpoint: averaged weights, and what they need."""
    contents = {name: value for name, value in state.items() if name not in FOR_RESUMING}
    contents["model"] = state.get("ema", state["model"])
    return contents


def identity(cfg, dataset, clip_model=None):
    """What must not change while a run goes on: {name: plain value} of settings, data and base.

    dataset: the training data. clip_model: the CLIP that conditions the model, or None.
    """
    facts = config.kept(cfg)
    for name, value in dataset.fingerprint().items():
        facts[f"data {name}"] = value
    if clip_model:
        facts["clip"] = clip_model.fingerprint()
    if getattr(cfg, "lora_rank", 0):
        facts["lora_base"] = checksum(cfg.init_from)
    return json.loads(json.dumps(facts))  # lists for tuples, as in files


def check_identity(saved, expected, where, path):
    """UserError unless the saved identity, {name: plain value}, is the expected one.

    A name that only one of them has belongs to a setting that a fork added, removed or renamed.
    path: a checkpoint with the weights, for the message.
    Which chunk_size a run may go on with is decided by loop.with_chunk_size.
    """
    changed = [
        f"{name} is {saved[name]!r} there and {value!r} here"
        for name, value in expected.items()
        if name in saved and saved[name] != value and name != "chunk_size"
    ]
    if changed:
        way = "Give the same settings (--config RUN/config.json has them), or another --run_dir"
        if all(text.startswith("data ") for text in changed) and "lora_base" not in expected:
            way += f", which starts with these weights on the new data by --init_from {path}"
        raise UserError(
            f"{where}: a run of another model or other data: {'; '.join(changed)}. {way}"
        )


# The run folder

SAVED = {"file": "", "step": 0, "values": {}}
RECORD = {
    "checkpoints": [{**SAVED, "sha256": ""}],
    "finished": (None, {"step": 0}),
    "best": (None, SAVED),
    "identity": (None, {}),
    "logger": (None, {"kind": ""}),
}


def record_of(folder):
    """What auto_resume.json of a run folder says, newest checkpoint first; without a run, nothing.

    UserError if it is damaged.
    """
    path = Path(folder) / "auto_resume.json"
    nothing = {"checkpoints": [], "finished": None}
    if not path.exists() and not any(Path(folder).glob("checkpoints/step_*.pt")):
        return nothing
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(path.read_text())
        if matches(record, RECORD):  # null is as if it were left out
            return nothing | {name: value for name, value in record.items() if value is not None}
    raise UserError(
        f"{path}: damaged or missing; go on from one of {folder}/checkpoints with --load FILE "
        "and a new --run_dir, or start over with --resume never"
    )


class RunFolder:
    """A run folder, written by rank 0 alone: locked, and resumable at every instant."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.record = {"checkpoints": [], "finished": None}  # as of `record_of`
        self.thread = concurrent.futures.ThreadPoolExecutor(1)  # writes beside training
        self.writing = None  # Future of the last write
        self.work = None  # the last write, to try again if it failed
        self.is_second_try = False
        # Set by loop.open_run.
        self.identity = {}
        self.resume_from = None
        self.finished = None
        self.notes = []

    def open(self, resume):
        """Lock the folder; returns notes. With `resume` "never" an earlier run is moved aside."""
        self._lock()
        notes = []
        has_run = any(self.folder.glob("checkpoints/step_*.pt"))
        if resume == "never" and (has_run or (self.folder / "auto_resume.json").exists()):
            if Path.cwd().is_relative_to(self.folder.resolve()):
                raise UserError(
                    f"--run_dir {self.folder}: --resume never cannot move aside the folder it is "
                    "started in; start it in another, or give another --run_dir"
                )
            moved = (f"{self.folder}.{number}" for number in itertools.count(1))
            moved = next(path for path in moved if not Path(path).exists())
            self.lock_file.close()
            os.rename(self.folder, moved)
            notes.append(f"the earlier run is now in {moved}")
            self._lock()
        for leftover in self.folder.glob("checkpoints/*.tmp"):  # of a process killed while saving
            leftover.unlink()
        self.record = record_of(self.folder)
        # Written at once: a first save that is cut off before it is recorded is known as such.
        self._write_record()
        return notes

    def _lock(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock_file = open(self.folder / ".lock", "a+")  # noqa: SIM115 (open until the end)
        try:
            lock(self.lock_file)
        except (BlockingIOError, PermissionError) as error:
            self.lock_file.seek(0)
            owner = self.lock_file.read().strip()
            raise UserError(
                f"{self.folder}: in use by another live process ({owner}); wait for it, stop it, "
                "or give another --run_dir"
            ) from error
        self.lock_file.truncate(0)
        self.lock_file.write(f"process {os.getpid()} on {platform.node()}\n")
        self.lock_file.flush()

    def _write_record(self):
        write_json(self.record, self.folder / "auto_resume.json")

    def resume_point(self, cfg, identity):
        """(checkpoint to resume from or None, results if the run is finished or None, notes).

        It is the newest intact checkpoint of the folder, or else cfg.load, a local file. UserError
        if the run is another one, if no checkpoint is intact, or if there are more ranks than
        chunks.
        """
        path, finished, notes = self._newest_intact(cfg, identity)
        if not path:
            if notes and not cfg.load:
                raise UserError(
                    f"{self.folder}: all {len(notes)} checkpoints are damaged or missing; go on "
                    "from a copy with --load, or start over with --resume never"
                )
            path = cfg.load or None
            if path and cfg.load_only_auto_resume and not notes:
                notes = [f"a new run, so --load {path} is not used, with --load_only_auto_resume"]
                path = None
        chunks = math.ceil(cfg.batch_size / cfg.chunk_size)
        if chunks < dist.world_size() and not finished:
            raise UserError(
                f"{path}: its batches have {chunks} chunk(s) of {cfg.chunk_size} samples, so at "
                f"most {chunks} rank(s) can go on with it; these are {dist.world_size()}. Give "
                f"fewer ranks, or a --chunk_size of at most {cfg.batch_size}/{dist.world_size()}, "
                "which changes the noise from here on"
            )
        return path, finished, notes

    def _newest_intact(self, cfg, identity):
        notes = []
        for entry in self.record["checkpoints"]:
            path = self.folder / entry["file"]
            if not path.is_file() or checksum(path) not in entry["sha256"]:
                notes.append(f"{path}: damaged or missing, trying the one before it")
                continue
            check_identity(self.record.get("identity", {}), identity, self.folder, path)
            finished = self.record["finished"] if entry["step"] >= cfg.steps else None
            if finished:
                try:
                    load(self.folder / "model.pt")
                except UserError as error:
                    notes.append(f"{error}; made anew")
                    finished = None
            return str(path), finished, notes
        return None, None, notes

    def drop_from(self, step):
        """Discard checkpoints of `step` or later; returns the newest file before it, or None."""
        self.wait()
        earlier = [entry for entry in self.record["checkpoints"] if entry["step"] < step]
        self.record["checkpoints"] = earlier
        self._write_record()
        return f"{self.folder}/{earlier[0]['file']}" if earlier else None

    def save(self, state, log):
        """Begin to save `state` as the checkpoint of its step, and drop the oldest. Collective.

        log: the Tracker. Its lines are made durable first; after the save it sends copies.
        RuntimeError if the ranks differ.
        """
        dist.check_in_step(state.modules, state.step)
        for module in state.modules.values():
            if not all(parameter.isfinite().all() for parameter in module.parameters()):
                dist.on_main(lambda: self.drop_from(state.step))
                dist.fail(
                    f"{self.folder}: weights are not finite at step {state.step}; lower --lr or "
                    "--max_grad_norm"
                )
        if not dist.is_main():
            return
        log.sync()
        step = state.step
        file = f"checkpoints/step_{step:08d}.pt"
        entry = {"file": file, "step": step, "values": log.values(state)}
        contents = copy_to_host(state.contents())
        keep = state.cfg.keep or None

        def record_hash(digest):
            entry["sha256"] = digest
            for other in self.record["checkpoints"]:
                if other["step"] == step:  # saved again: a kill leaves the file of before or this
                    other["sha256"] += f" {digest}"
                    self._write_record()

        def work():
            save(contents, self.folder / file, record_hash)
            older = [other for other in self.record["checkpoints"] if other["step"] < step]
            kept = [entry, *older][:keep]
            kept_files = [other["file"] for other in kept]
            self.record |= {
                "world_size": dist.world_size(),
                "identity": state.identity,
                "finished": None,
                "checkpoints": kept,
            }
            self._write_record()
            for path in self.folder.glob("checkpoints/step_*.pt"):
                older = path.name < Path(file).name
                if keep and older and f"checkpoints/{path.name}" not in kept_files:
                    path.unlink()
            if not contents["unlogged"]["losses"]:  # else the next save, or the end, sends copies
                log.send()

        self._submit(work)

    def save_best(self, state, val_loss, log):
        """Begin to write best.pt if `val_loss` is the lowest so far; returns whether it is."""
        if not val_loss < state.best_val_loss:
            return False
        state.best_val_loss = val_loss
        if dist.is_main():
            entry = {"file": "best.pt", "step": state.step, "values": log.values(state)}
            contents = inference_contents(state.contents())
            contents = copy_to_host({**contents, "val_loss": val_loss})

            def work():
                save(contents, self.folder / "best.pt")
                self.record["best"] = entry
                self._write_record()
                log.send()

            self._submit(work)
        return True

    def _submit(self, work):
        """Run `work` in the writer thread, first retrying a failed write once."""
        failed_work = None
        try:
            self.wait()
        except OSError as error:
            if self.is_second_try:
                raise
            tqdm.write(f"{error}; the next save tries again")
            failed_work = self.work

        def run_both():
            if failed_work:
                failed_work()
            work()

        self.work = work
        self.is_second_try = failed_work is not None
        self.writing = self.thread.submit(run_both)

    def wait(self):
        """Wait for what is being written; an error that it met is raised here."""
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def save_final(self, state, results):
        """Write model.pt, and record that the run is finished, with its `results`."""
        self.wait()
        save({**inference_contents(state.contents()), **results}, self.folder / "model.pt")
        self.record["finished"] = results
        self._write_record()
