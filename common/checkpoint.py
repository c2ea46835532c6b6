"""Saving as a commit: atomic files, checksums, a run folder that always holds a complete run, `auto_resume.json`.

Write x.tmp beside x, flush, fsync, replace x, fsync the folder; first the checkpoint, then auto_resume.json. Files
hold tensors and plain values only, and every load is `weights_only=True`.
"""
import concurrent.futures
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import socket
from pathlib import Path

import numpy
import torch

from common.config import UserError, need

ABOUT = "about"  # what the metadata of a safetensors file has besides weights, as JSON


class _Digest:
    """A file opened for writing whose sha256 is taken on the way: the data is read once, from memory."""

    def __init__(self, file):
        self.file, self.sha256, self.error = file, hashlib.sha256(), None

    def write(self, data):
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


@contextlib.contextmanager
def replacing(path, durably=True):
    """Context that gives a binary file; on leaving it without an error, `path` holds what was written.

    durably: also after a loss of power, for which a disk may take a tenth of a second.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror}, writing", str(path)) from error
        raise
    if durably:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save(state, path):
    """Write `state` (nested dicts and lists of tensors and plain values) to `path`; returns its sha256."""
    with replacing(path) as file:
        digest = _Digest(file)
        try:
            torch.save(state, digest)
        except RuntimeError as error:
            raise (digest.error or error) from None  # torch's own, about a position, hides the one of the disk
    return digest.sha256.hexdigest()


def copied(state):
    """A copy in host memory of `state`, nested dicts and lists of tensors and plain values."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state


def load(path, sha256=None):
    """The state saved at `path`, on the CPU. UserError when it is missing, damaged, or not a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    if sha256 and checksum(path) != sha256:
        raise UserError(f"{path}: damaged, its sha256 is not the one in auto_resume.json")
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    with open(path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch meets what it does not know with any of a dozen types
            raise UserError(f"{path}: not a checkpoint of this program, or damaged ({type(error).__name__})") from error
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"{path}: not a checkpoint of this program: expected a dict with an entry 'model'")
    return state


def save_safetensors(state, path):
    """Write the weights of `state` in the format of the safetensors package, all else as JSON in its metadata."""
    weights = {name: tensor.contiguous() for name, tensor in state["model"].items()}
    rest = json.dumps({name: value for name, value in state.items() if name != "model"})
    with replacing(path) as file:
        file.write(need("safetensors.torch", f"{path}").save(weights, {"format": "pt", ABOUT: rest}))


def load_safetensors(path):
    """The state that `save_safetensors` wrote; UserError when it is damaged or of another program."""
    package = need("safetensors", f"{path}")
    try:
        with package.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
            return {"model": {name: file.get_tensor(name) for name in file.keys()}, **about}  # noqa: SIM118 (no dict)
    except KeyError:
        raise UserError(f"{path}: no model of this program: its metadata lacks {ABOUT!r}") from None
    except Exception as error:  # the package's own types, which are not imported here
        raise UserError(f"{path}: not a safetensors file, or damaged ({error})") from error


def checksum(path):
    """sha256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(values, path):
    """Write `values` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def versions(script):
    """What made a run: torch, numpy, and a digest of `script` and of common/, which changes with any edit."""
    digest = hashlib.sha256()
    for path in [Path(script), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return {"torch": str(torch.__version__), "numpy": numpy.__version__, "code": digest.hexdigest()[:12]}


def file_of(step):
    """The checkpoint of a step, within its run folder."""
    return f"checkpoints/step_{step:08d}.pt"


def record_of(folder):
    """What auto_resume.json of a run folder says, newest checkpoint first; of a run that is not there, nothing."""
    path = Path(folder) / "auto_resume.json"
    if not path.exists():
        return {"checkpoints": [], "finished": None}
    try:
        record = json.loads(path.read_text())
        return {**record, "checkpoints": [
            {"file": str(c["file"]), "step": int(c["step"]), "sha256": str(c["sha256"])}
            for c in record["checkpoints"]]}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error!r}); delete it and give one of {folder}/checkpoints with --load and "
                        "a new --run, or start over with --resume never") from error


class Run:
    """A run folder, to be used by rank 0 alone: locked against other processes, resumable at every instant."""

    def __init__(self, folder):
        self.folder, self.lock = Path(folder), None
        self.writer, self.writing = None, {}  # a thread, and the newest work of each kind that it was given
        self.record = {"checkpoints": [], "finished": None}  # as of `record_of`

    def open(self, resume):
        """Hold the folder; with `resume` "never", an earlier run in it is first moved aside, to FOLDER.1, .2, ….

        Returns the folder that it was moved to, or None.
        """
        self._hold()
        moved = None
        if resume == "never" and ((self.folder / "auto_resume.json").exists() or self._files()):
            asides = (self.folder.with_name(f"{self.folder.name}.{i}") for i in itertools.count(1))
            moved = next(path for path in asides if not path.exists())
            os.rename(self.folder, moved)
            self._hold()
        for scrap in (self.folder / "checkpoints").glob("*.tmp"):  # of a process killed while saving
            scrap.unlink()
        path = self.folder / "auto_resume.json"
        if path.exists():
            self.record = record_of(self.folder)
        elif self._files():
            raise UserError(f"{self.folder}: has {len(self._files())} checkpoints but no auto_resume.json; go on from "
                            "one with --load FILE and a new --run, or start over with --resume never")
        else:  # so that a first save that is cut off before it is recorded is known for what it is
            write_json(self.record, path)
        return moved

    def _hold(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / ".lock", "a+")  # noqa: SIM115 (held until the process ends)
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a record lock: forked workers do not inherit it
        except OSError as error:
            self.lock.seek(0)
            raise UserError(f"{self.folder}: in use by another live process ({self.lock.read().strip()}); wait for it, "
                            "stop it, or give another --run") from error
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.lock.flush()

    def _files(self):
        return sorted((self.folder / "checkpoints").glob("step_*.pt"))

    def newest(self, another=False):
        """(newest intact checkpoint {"file", "step", "sha256"} or None, messages on damaged ones passed over).

        UserError if there were some and none is intact, unless there is `another` to go on from.
        """
        notes = []
        for entry in self.record["checkpoints"]:
            path = self.folder / entry["file"]
            if path.is_file() and checksum(path) == entry["sha256"]:
                return entry, notes
            notes.append(f"{path}: {'damaged' if path.is_file() else 'missing'}, trying the one before it")
        if notes and not another:
            raise UserError(f"{self.folder}: all {len(notes)} checkpoints named by auto_resume.json are damaged or "
                            "missing; go on from a copy with --load, or start over with --resume never, which moves "
                            "this folder aside")
        return None, notes

    def commit(self, step, state, keep, **facts):
        """Save `state` as the checkpoint of `step`, note `facts`, drop all but the newest `keep` (0: nothing)."""
        file = file_of(step)
        entry = {"file": file, "step": step, "sha256": save(state, self.folder / file)}
        kept = [entry] + [c for c in self.record["checkpoints"] if c["step"] < step]
        kept = kept[:keep] if keep else kept
        self.record = {**self.record, **facts, "checkpoints": kept, "finished": None}
        write_json(self.record, self.folder / "auto_resume.json")
        names = {Path(c["file"]).name for c in kept}
        for path in self._files() if keep else []:
            if path.name not in names and path.name < Path(file).name:
                path.unlink()

    def begin(self, step, state, keep, **facts):
        """`commit` a copy of `state` from a thread, while training goes on; waits for the commit before this one."""
        self.wait("commit")
        return self.later("commit", self.commit, step, copied(state), keep, **facts)

    def write(self, state, path):
        """`save` a copy of `state` to `path` from that thread; waits for the one before it to the same path."""
        self.wait(str(path))
        return self.later(str(path), save, copied(state), path)

    def later(self, kind, work, *arguments, **named):
        """Have the thread call `work(...)`, after all that it was given before; returns its future."""
        self.writer = self.writer or concurrent.futures.ThreadPoolExecutor(1, "save")  # joined when the process ends
        self.writing[kind] = self.writer.submit(work, *arguments, **named)
        return self.writing[kind]

    def wait(self, kind=None):
        """Wait for the work under way of a `kind`, or for all of it; an error that it met is raised here."""
        for name in [kind] if kind else [*self.writing]:
            if work := self.writing.pop(name, None):
                work.result()

    def finish(self, results):
        """Record that the run is complete, with its closing `results`."""
        self.wait()
        self.record["finished"] = results
        write_json(self.record, self.folder / "auto_resume.json")


def check_identity(found, expected, where):
    """UserError unless the facts that define a run, {name: plain value}, are those of the checkpoint `where`."""
    wrong = [f"{name} is {found.get(name)!r} there and {value!r} here" for name, value in expected.items()
             if found.get(name) != value]
    if wrong:
        raise UserError(f"{where}: a run of another model or other data: {'; '.join(wrong)}. Give the same settings "
                        "(--config RUN/config.json has them), or another --run")
