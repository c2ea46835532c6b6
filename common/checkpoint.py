"""Saving as a commit: atomic files, checksums, a run folder that always holds a complete run, `auto_resume.json`.

Write x.tmp beside x, flush, fsync, replace x, fsync the folder; first the checkpoint, then auto_resume.json. Files
hold tensors and plain values only, and every load is `weights_only=True`.
"""
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import re
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import accumulate, amp, config, dist, optim
from common.config import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

# Files

def lock(file, wait=False):
    """Lock an open file until it is closed. If another process has it: OSError, or `wait` for it."""
    if fcntl:
        # A record lock: forked workers do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    file.seek(1 << 30)  # a byte that nobody writes: on Windows others cannot read what is locked
    while True:
        try:
            return msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            if not wait:
                raise
        time.sleep(1)


@contextlib.contextmanager
def replacing(path, durably=True):
    """Context that gives a binary file; left without an error, `path` holds what was written, `durably` on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # it must be new: a link of this name is not followed
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's own hides that of the disk
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror}, writing", str(path)) from error
        raise
    if durably and os.name == "posix":  # Windows opens no folders
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save(state, path, note=None):
    """Write `state` (nested dicts and lists of tensors and plain values) to `path`; returns its sha256.

    note: function of the sha256 that is called before the file takes its place.
    """
    with replacing(path) as file:
        torch.save(state, file)
        file.flush()
        digest = checksum(file.name)
        if note:
            note(digest)
        return digest


def load(path):
    """The state saved at `path`, on the CPU. UserError when it is missing, damaged, or not a checkpoint."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    known = record_of(Path(path).parent, False).get("sha256", {}).get(Path(path).name)  # of a model.pt or best.pt
    if known and checksum(path) not in known:
        raise UserError(f"{path}: damaged, or not as its run wrote it: its sha256 is not that of auto_resume.json; "
                        "start the run again, which makes it anew, or move the file out of the folder")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch meets what it does not know with any of a dozen types
        raise UserError(f"{path}: not a checkpoint of this program, or damaged ({type(error).__name__})") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError(f"{path}: not a checkpoint of this program: expected a dict with an entry 'model'")
    return state


def checksum(path):
    """sha256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(values, path):
    """Write `values` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


@contextlib.contextmanager
def reading(path):
    """Context in which what a damaged or foreign file leads to is a UserError that names it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged, or of another program: {type(error).__name__}: {error}") from error


def build(make, state, path, device="cpu"):
    """The model that `make()` gives, in eval mode, with the weights of `state`, the contents of the file `path`.

    It is made without memory first, as the sizes that the file claims may be larger than its weights.
    """
    sizes = [state["config"].get(name) for name in ("depth", "blocks", "quantizers", "coarse_quantizers")]
    if any(isinstance(size, int) and size > len(state["model"]) for size in sizes):
        raise UserError(f"{path}: damaged: its settings are of more layers than it has weights")
    with torch.device("meta"):
        check_weights(make(), state, path)
    model = make()
    load_weights(model, state, path)
    return model.to(device).eval()


def located(stored, place, folder, cwd=""):
    """The path `stored`, as seen from `cwd`, noted in a folder `place` that is `folder` now; it may have moved, too.

    None, a file beside it, and names such as open_clip:MODEL/WEIGHTS are no such paths, and are given back.
    """
    if not re.match(r"[^:]*/", stored or ""):
        return stored
    stored = os.path.join(cwd, stored)
    moved = os.path.normpath(os.path.join(folder, os.path.relpath(stored, place)))
    return moved if os.path.exists(moved) else stored


def copied(state):
    """A copy in host memory of `state`, nested dicts and lists of tensors and plain values."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state


# What a run is made of

def versions(script):
    """What made a run: torch's version, and a digest of `script` and of common/, which changes with any edit."""
    digest = hashlib.sha256()
    for path in [Path(script), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return {"torch": str(torch.__version__), "code": digest.hexdigest()[:12]}


# What a stop between two log lines leaves for the next. losses: of each step, summed over samples.
NOTHING_UNLOGGED = {"losses": [], "grad_norm": 0.0, "unusable": 0, "overflows": 0}


class State:
    """What a checkpoint holds: weights, average, optimizers, gradient scaler, step, best validation loss."""

    def __init__(self, cfg, modules, average, optimizers, scaler, identity, facts):
        """modules: {"model": the module that is trained and averaged, NAME: others that are trained}.

        identity: {name: plain value} of what must not change while the run goes on. facts: {name: plain value} for
        every file that it writes, of what it takes to make the model besides the config. Collective: UserError if the
        ranks have other data or other code.
        """
        self.cfg, self.modules, self.average = cfg, modules, average
        self.optimizers, self.scaler, self.identity, self.facts = optimizers, scaler, identity, facts
        self.versions = versions(inspect.getfile(type(cfg)))  # the script is the file that has the Config
        self.step, self.best_val_loss = 0, float("inf")
        self.unlogged = dict(NOTHING_UNLOGGED)
        dist.check_alike({**identity, "code": self.versions["code"]})

    def contents(self):
        """The contents of a checkpoint, with the tensors themselves, not copies."""
        return {**{name: module.state_dict() for name, module in self.modules.items()},
                "ema": self.average.state_dict(), "optimizers": [opt.state_dict() for opt in self.optimizers],
                "scaler": self.scaler.state_dict(), "step": self.step, "best_val_loss": self.best_val_loss,
                "unlogged": self.unlogged,
                "identity": self.identity, "config": config.as_json(self.cfg), "versions": self.versions,
                "cwd": os.getcwd(), **self.facts}

    @property
    def logged_step(self):
        """The step of the last line in metrics.jsonl that holds for this state."""
        return self.step - len(self.unlogged["losses"])

    def start_from(self, path, strict=True):
        """Take the weights, and nothing else, of a model.pt or a checkpoint; not `strict`: those that fit."""
        load_weights(self.modules["model"], load(path), path, strict)
        self.average.load_state_dict(self.modules["model"].state_dict())

    def check(self, state, path):
        """UserError unless the contents `state` of the checkpoint `path` have the types and shapes of this State's."""
        if "identity" not in state:
            raise UserError(f"{path}: weights without the state of a run; start from them with --init_from, not --load")
        scale = torch.amp.GradScaler("cpu").state_dict() if state.get("scaler") else {}
        example = {"ema": {}, "optimizers": [{"state": {}, "param_groups": [{"params": [0]}]}], "best_val_loss": 0.0,
                   "step": 0, "scaler": scale, "identity": {}, "config": {}, "versions": {},
                   "unlogged": {**NOTHING_UNLOGGED, "losses": [0.0]},
                   **{name: {} for name in self.modules}}
        if not like(state, example):
            raise UserError(f"{path}: damaged, or of another program: entries {', '.join(example)} are not as expected")
        check_identity(state["identity"], self.identity, path)
        for name, weights in (*self.modules.items(), ("ema", self.modules["model"])):
            check_weights(weights, {"model": state[name]}, path)
        with reading(path):
            if not optim.fit(self.optimizers, state["optimizers"]):
                raise UserError(f"{path}: the state of its optimizer is of another model; go on with --init_from")

    def restore(self, path):
        """Go on from the checkpoint `path`; returns notes on what has changed since. Rates follow from the step."""
        state, now = load(path), config.as_json(self.cfg)
        self.check(state, path)
        for name, module in self.modules.items():
            module.load_state_dict(state[name])
        self.average.load_state_dict(state["ema"])
        optim.load(self.optimizers, state["optimizers"])
        self.step, best = state["step"], Path(self.cfg.run_dir) / "best.pt"
        self.unlogged = state["unlogged"]
        if Path(path).parent.parent == best.parent:  # another run's best is not in this one's folder
            self.best_val_loss = state["best_val_loss"]
        elif best.is_file():
            self.best_val_loss = load(best)["val_loss"]
        notes = [f"resuming {path} at step {self.step} of {self.cfg.steps}"]
        notes.append(amp.load_scaler(self.scaler, state["scaler"]))
        notes += [f"{path} is of another {name}: {then}, this is {self.versions.get(name)}"
                  for name, then in state["versions"].items() if self.versions.get(name) != then]
        return notes + [f"{name} changed from {then} to {now[name]}" for name, then in state["config"].items()
                        if name in now and now[name] != then]


def averaged(state):
    """The contents of model.pt from those of a checkpoint: averaged weights, and what it takes to use them."""
    resuming = ("ema", "optimizers", "scaler", "identity", "best_val_loss", "discriminators",
                "unlogged")
    rest = {name: value for name, value in state.items() if name not in resuming}
    return {**rest, "model": state.get("ema", state["model"])}


def check_weights(module, state, path, strict=True):
    """Those of `state["model"]` that fit `module`; UserError if they are not all there is in both, or none is."""
    expected, found = module.state_dict(), state["model"]
    fits = {name: value for name, value in found.items()
            if name in expected and getattr(value, "shape", None) == expected[name].shape}
    wrong = sorted((expected.keys() | found.keys()) - fits.keys(), key=str)
    if wrong and "lora" in state:
        raise UserError(f"{path}: LoRA adapters, not a model; give their base, {state['lora']['base']}")
    if wrong and (strict or not fits):
        names = ", ".join(map(str, wrong[:5])) + ", …" * (len(wrong) > 5)
        raise UserError(f"{path}: weights of another model: {len(wrong)} entries differ: {names}; give the settings "
                        "it was trained with")
    return fits


def load_weights(module, state, path, strict=True):
    """Load `state["model"]` into `module`; if it does not fit, UserError, or, not `strict`, what does fit of it."""
    module.load_state_dict(check_weights(module, state, path, strict), strict=False)


def peek(path):
    """The contents of the file `path` of a model, its weights unread.

    {} of another file, which `load` refuses.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state if isinstance(state["config"], dict) else {}
    except Exception:  # of a dozen types, see `load`
        return {}


def settings_in(path, *groups):
    """For each of `groups` of names, {name: value} of the settings in the file `path` of a model.

    Of another file, none.
    """
    settings = peek(path).get("config", {})
    return [{name: settings[name] for name in names if name in settings} for names in groups]


def with_chunk_size(cfg, most):
    """`cfg` with a chunk size: its own, that of the run which goes on, or one that is decided here.

    The one decided gives every rank a chunk, of at most `most` samples. A run keeps its chunk size,
    as a chunk is what is seeded.
    """
    identity = {}
    record = record_of(cfg.run_dir) if cfg.resume == "auto" else {"checkpoints": []}
    if record["checkpoints"]:
        identity = record.get("identity")
    elif cfg.load and not cfg.load_only_auto_resume:
        identity = load(cfg.load).get("identity")
    begun = like(identity, {"chunk_size": 1})
    size = cfg.chunk_size
    if not size and begun:
        size = max(1, identity["chunk_size"])
    if not size:
        size = accumulate.chunk_size_for(cfg.batch_size, dist.world_size(), most)
    chunks = math.ceil(cfg.batch_size / size)
    if chunks < dist.world_size() and not begun:
        raise UserError(
            f"--chunk_size {size}: makes {chunks} chunk(s) of a batch of {cfg.batch_size}, too few for "
            f"{dist.world_size()} ranks; leave it out, or give at most "
            f"{max(1, cfg.batch_size // dist.world_size())}")
    return dataclasses.replace(cfg, chunk_size=size)


def identity(cfg, fixed, source, clip=None):
    """What must not change while a run goes on: {name: plain value} of the fields `fixed`, the data and the base.

    source: the training data. clip: the CLIP that the model is conditioned by, or None.
    """
    facts = {name: getattr(cfg, name) for name in fixed}
    facts |= {f"data {name}": value for name, value in source.fingerprint().items()}
    facts |= {"clip": clip.fingerprint()} if clip else {}
    return facts | ({"lora_base": checksum(cfg.init_from)} if getattr(cfg, "lora_rank", 0) else {})


def check_identity(found, expected, where):
    """UserError unless the facts that define a run, {name: plain value}, are those of the checkpoint `where`."""
    found, expected = (json.loads(json.dumps(facts)) for facts in (found, expected))  # lists for tuples in both
    wrong = [f"{name} is {found.get(name)!r} there and {value!r} here" for name, value in expected.items()
             if found.get(name) != value]
    if wrong:
        raise UserError(f"{where}: a run of another model or other data: {'; '.join(wrong)}. Give the same settings "
                        "(--config RUN/config.json has them), or another --run_dir")


# The run folder

SAVED = {"file": "", "step": 0, "values": {}}
RECORD = {"checkpoints": [{**SAVED, "sha256": ""}], "finished": (None, {}), "best": (None, SAVED),
          "start": (None, SAVED), "identity": (None, {}), "logger": (None, {"kind": ""}), "sha256": (None, {})}


def record_of(folder, strict=True):
    """What auto_resume.json of a run folder says, newest checkpoint first; of a run that is not there, nothing.

    A file that is damaged is a UserError or, not `strict`, says nothing.
    """
    path, empty = Path(folder) / "auto_resume.json", {"checkpoints": [], "finished": None}
    if not path.exists() and not [*Path(folder).glob("checkpoints/step_*.pt")]:
        return empty
    with contextlib.suppress(OSError, ValueError):
        if like(record := json.loads(path.read_text()), RECORD):
            return record
    if not strict:
        return empty
    raise UserError(f"{path}: damaged or missing; go on from one of {folder}/checkpoints with --load FILE and a new "
                    "--run_dir, or start over with --resume never")


def like(value, example):
    """Whether a plain value has the type of `example`, and so has all that is in it; one of several, for a tuple."""
    if isinstance(example, tuple):
        return any(like(value, each) for each in example)
    if not isinstance(value, type(example)) or isinstance(value, bool) != isinstance(example, bool):
        return False
    if isinstance(example, dict):
        return all(like(value.get(name), each) for name, each in example.items())
    return not isinstance(example, list) or all(like(item, each) for each in example for item in value)


class Run:
    """A run folder, to be used by rank 0 alone: locked against other processes, resumable at every instant."""

    def __init__(self, folder):
        self.folder, self.record = Path(folder), {"checkpoints": [], "finished": None}  # as of `record_of`
        self.writer, self.writing = concurrent.futures.ThreadPoolExecutor(1), None  # a thread, and its last work
        self.work, self.tried_again = None, False  # the last work, and whether another came before it that had failed

    def open(self, resume):
        """Hold the folder; returns notes. With `resume` "never" an earlier run in it is moved to FOLDER.1, .2, …."""
        self._hold()
        notes = []
        if resume == "never" and [*self.folder.glob("auto_resume.json"), *self.folder.glob("checkpoints/step_*.pt")]:
            number = next(i for i in itertools.count(1) if not Path(f"{self.folder}.{i}").exists())
            self.lock.close()
            os.rename(self.folder, f"{self.folder}.{number}")
            notes.append(f"the earlier run is now in {self.folder}.{number}")
            self._hold()
        for scrap in self.folder.glob("checkpoints/*.tmp"):  # of a process killed while saving
            scrap.unlink()
        self.record = record_of(self.folder)
        # Written at once, so that a first save that is cut off before it is recorded is known for what it is.
        write_json(self.record, self.folder / "auto_resume.json")
        return notes

    def _hold(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / ".lock", "a+")  # noqa: SIM115 (held until the process ends)
        try:
            lock(self.lock)
        except OSError as error:
            self.lock.seek(0)
            raise UserError(f"{self.folder}: in use by another live process ({self.lock.read().strip()}); wait for it, "
                            "stop it, or give another --run_dir") from error
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {platform.node()}\n")
        self.lock.flush()

    def resume_point(self, cfg, identity):
        """(checkpoint to go on from or None, results of a run that is finished or None, notes).

        UserError if there are more ranks than chunks to go on with.
        """
        path, finished, notes = self._resume_point(cfg, identity)
        chunks = math.ceil(cfg.batch_size / cfg.chunk_size)
        if chunks < dist.world_size() and not finished:
            raise UserError(
                f"{path}: its batches have {chunks} chunk(s) of {cfg.chunk_size} samples, so at "
                f"most {chunks} rank(s) can go on with it; these are {dist.world_size()}. More "
                f"ranks need a new --run_dir; --init_from {path} starts it from these weights")
        return path, finished, notes

    def _resume_point(self, cfg, identity):
        """`resume_point` for any number of ranks.

        It is the newest intact one of the folder, else cfg.load, a local file. UserError if the run is another one, or
        if there were checkpoints, none is intact, and there is no cfg.load.
        """
        notes = []
        for entry in self.record["checkpoints"]:
            path = self.folder / entry["file"]
            if path.is_file() and checksum(path) == entry["sha256"]:
                check_identity(self.record.get("identity", {}), identity, self.folder)
                finished = self.record["finished"] if entry["step"] >= cfg.steps else None
                model, known = self.folder / "model.pt", self.record.get("sha256", {}).get("model.pt", [])
                if finished and not (model.is_file() and checksum(model) in known):
                    notes.append(f"{model}: {'damaged' if model.is_file() else 'missing'}, made anew")
                    finished = None
                return str(path), finished, notes
            notes.append(f"{path}: {'damaged' if path.is_file() else 'missing'}, trying the one before it")
        if notes and not cfg.load:
            raise UserError(f"{self.folder}: all {len(notes)} checkpoints are damaged or missing; go on from a copy "
                            "with --load, or start over with --resume never")
        if cfg.load and cfg.load_only_auto_resume and not notes:
            return None, None, [f"a new run, for which --load {cfg.load} is not used, with --load_only_auto_resume"]
        return cfg.load or None, None, notes

    def forget(self, step):
        """Go on from no checkpoint of `step` or later; returns the file of the newest before it, or None."""
        self.wait()
        self.record["checkpoints"] = [c for c in self.record["checkpoints"] if c["step"] < step]
        write_json(self.record, self.folder / "auto_resume.json")
        return next((f"{self.folder}/{c['file']}" for c in self.record["checkpoints"]), None)

    def commit(self, state, log):
        """Begin to save `state` as the checkpoint of its step, and to drop the oldest; every rank calls it.

        log: the Tracker, whose lines are made durable first, and which then copies. RuntimeError if the ranks differ.
        """
        dist.check_in_step(state.modules, state.step)
        if not all(t.isfinite().all() for m in state.modules.values() for t in m.parameters()):
            dist.on_main(lambda: self.forget(state.step) and None)
            dist.fail(f"{self.folder}: weights are not finite at step {state.step}; lower --lr or --max_grad_norm")
        if not dist.is_main():
            return
        log.sync()
        file, keep, step = f"checkpoints/step_{state.step:08d}.pt", state.cfg.keep, state.step
        values, contents = log.values(state), copied(state.contents())

        def work():
            entry = {"file": file, "step": step, "sha256": save(contents, self.folder / file), "values": values}
            kept = [entry, *(older for older in self.record["checkpoints"] if older["step"] < step)][:keep or None]
            self.record |= {"world_size": dist.world_size(), "identity": state.identity, "finished": None,
                            "checkpoints": kept}
            write_json(self.record, self.folder / "auto_resume.json")
            names = {older["file"] for older in kept}
            for path in self.folder.glob("checkpoints/step_*.pt") if keep else ():
                if f"checkpoints/{path.name}" not in names and path.name < Path(file).name:
                    path.unlink()
            log.send()
        self._submit(work)

    def save_best(self, state, val_loss, log):
        """Begin to write best.pt if `val_loss` is the lowest so far; every rank calls it. Returns whether it is."""
        if not val_loss < state.best_val_loss:
            return False
        state.best_val_loss = val_loss
        if dist.is_main():
            values, contents = log.values(state), copied({**averaged(state.contents()), "val_loss": val_loss})

            def work():
                save(contents, self.folder / "best.pt", lambda digest: self._note("best.pt", digest))
                self.record["best"] = {"file": "best.pt", "step": contents["step"], "values": values}
                write_json(self.record, self.folder / "auto_resume.json")
                log.send()
            self._submit(work)
        return True

    def _submit(self, work):
        """Begin `work`, after what failed the last time, which ends the run if it fails again."""
        again = None
        try:
            self.wait()
        except OSError as error:
            if self.tried_again:
                raise
            tqdm.write(f"{error}; the next save tries again")
            again = self.work
        self.work, self.tried_again = work, bool(again)
        self.writing = self.writer.submit(lambda: [each() for each in (again, work) if each])

    def wait(self):
        """Wait for what is being written; an error that it met is raised here."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def _note(self, name, digest):
        """Record the sha256 of the file `name` that is to be replaced, beside that of the file before it."""
        known = self.record.setdefault("sha256", {})
        known[name] = [*known.get(name, [])[-1:], digest]
        write_json(self.record, self.folder / "auto_resume.json")

    def finish(self, state, results):
        """Write model.pt, and record that the run is complete, with its closing `results`."""
        self.wait()
        save({**averaged(state.contents()), **results}, self.folder / "model.pt",
             lambda digest: self._note("model.pt", digest))
        self.record["finished"] = results
        write_json(self.record, self.folder / "auto_resume.json")
