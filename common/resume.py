"""Resume a run: the run folder, the contents of a checkpoint, the checkpoint to resume from.

    RUN/checkpoints/step_N.pt    written first, atomically
    RUN/auto_resume.json         written next; lists the checkpoints, so a run can always resume

Before its loop, a script calls `open_run` (lock the folder, find the checkpoint, choose the chunk
size) and `identify` (refuse to resume a different run), makes its State, and calls `restore` (load
weights and state).
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

import torch

from common import accumulate, adapters, checkpoint, config, dist, optim
from common.config import UserError
from common.ema import EMA

KEEP = 3  # number of checkpoints to keep; --save can keep copies of others elsewhere

# State


def versions(script):
    """{"torch": its version, "code": a hash of the source of `script` and common/}."""
    digest = hashlib.sha256()
    for path in [Path(script), *sorted(Path(__file__).parent.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return {"torch": str(torch.__version__), "code": digest.hexdigest()[:12]}


@dataclasses.dataclass(eq=False)
class State:
    """Everything that a checkpoint contains."""

    cfg: config.TrainingRun
    model: torch.nn.Module  # the trained model, whose weights `ema` averages
    ema: EMA
    optimizers: list
    scaler: torch.amp.GradScaler
    identity: dict  # {name: plain value} that a resumed run must keep
    info: dict  # "kind", and plain values besides the config that are needed to build the model
    others: dict = dataclasses.field(default_factory=dict)  # {name: another trained module}
    step: int = 0

    def __post_init__(self):
        self.versions = versions(inspect.getfile(type(self.cfg)))  # the script that defines it

    def contents(self):
        """The contents of a checkpoint. Tensors are not copied."""
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

    def load(self, contents, path):
        """Load the contents of the checkpoint `path`; notes list changed settings and versions."""
        training = contents["training"]
        checkpoint.load_weights(self.model, contents["model"], path)
        for name, module in self.others.items():
            checkpoint.load_weights(module, training["others"][name], path)
        self.ema.load_state_dict(contents["ema"])
        optim.load(self.optimizers, training["optimizers"], path)
        if training["scaler"]:  # {} if saved without fp16; if fp16 is off now, this is a no-op
            self.scaler.load_state_dict(training["scaler"])
        self.step = contents["step"]
        config.note(f"resuming {path} at step {self.step} of {self.cfg.steps}")
        saved = contents["versions"] | contents["config"]
        present = self.versions | config.as_json(self.cfg)
        for name in saved | present:
            before = saved.get(name, "no setting")
            now = present.get(name, "no setting")
            if now != before:
                config.note(f"{name} changed from {before} to {now}")


# The run folder


class RunFolder:
    """A run folder. Only rank 0 locks it and writes to it. The run can be resumed at any time.

    Other ranks only have folder, resume_from, source, results and val_settings.
    """

    def __init__(self, folder):
        # On every rank. `open_run` sets these, and `identify` sets val_settings.
        self.folder = Path(folder)
        self.resume_from = None  # checkpoint to resume from
        self.source = ""  # file with the model: resume_from, or else --init_from
        self.results = None  # {name: value} of the test, once the run is finished
        self.val_settings = {}  # {name: plain value} that the validation loss depends on
        # On rank 0. These and `results` are in auto_resume.json. The files that it lists contain
        # everything else that is needed to resume.
        self.checkpoints = []  # [{"file", "step", "sha256"}], newest first
        self.loggers = {}  # {kind of logger: its identity, see tracker.Logger.open}
        # On rank 0, not in auto_resume.json.
        self.best = {}  # {"file", "step"} of best.pt, if it exists
        self.best_val_loss = math.inf

    def open(self):
        """Lock the folder, and read auto_resume.json. UserError if another process uses it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / ".lock", "a+")  # noqa: SIM115 (open until the end)
        try:
            checkpoint.lock(file)
        except OSError as error:
            file.seek(0)
            raise UserError(
                f"{self.folder}: in use by another live process ({file.read().strip()}); "
                "wait for it, stop it, or give another --run_dir"
            ) from error
        with contextlib.suppress(OSError):  # full disk: write_record below raises a clear error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        self.lock_file = file
        path = self.folder / "auto_resume.json"
        if path.exists() or any(self.folder.glob("checkpoints/step_*.pt")):
            with config.explained(
                f"{path}: damaged, missing, or from an earlier version; resume one of "
                f"{self.folder}/checkpoints with --load FILE and a new --run_dir"
            ):
                record = json.loads(path.read_text())
                self.checkpoints = [
                    {name: entry[name] for name in ("file", "step", "sha256")}
                    for entry in record["checkpoints"]
                ]
                if self.checkpoints:  # otherwise this is a new run
                    self.loggers = record["loggers"]
                    self.results = record["results"]
                    if self.results:  # a missing step means that the file is damaged
                        self.results = {**self.results, "step": 0 + self.results["step"]}
        # Write it now: a checkpoint without a record would look like a damaged run.
        self.write_record()

    def write_record(self):
        """Write auto_resume.json."""
        record = {
            "checkpoints": self.checkpoints,
            "loggers": self.loggers,
            "results": self.results,
        }
        checkpoint.write_json(record, self.folder / "auto_resume.json")

    def newest_intact(self):
        """The path of the newest intact checkpoint, or None.

        Damaged checkpoints are dropped from the record, with a note. Their steps are repeated.
        """
        while self.checkpoints:
            path = self.folder / self.checkpoints[0]["file"]
            # If the file exists but cannot be read, as on a network disk, an OSError ends the run.
            with contextlib.suppress(FileNotFoundError):
                if checkpoint.checksum(path) == self.checkpoints[0]["sha256"]:
                    return path
            config.note(f"{path}: damaged or missing, trying the one before it")
            del self.checkpoints[0]
        return None

    def read_best(self):
        """Set best and best_val_loss from best.pt, if its validation loss is comparable."""
        path = self.folder / "best.pt"
        if not self.checkpoints or not path.is_file():
            return
        try:
            contents = checkpoint.load(path, "step", "val_loss", "val_settings", mmap=True)
        except UserError:
            config.note(f"{path}: damaged, so it will be replaced")
            return
        if contents["step"] > self.checkpoints[0]["step"]:  # its step will be repeated
            return
        if contents["val_settings"] != self.val_settings:
            config.note(
                f"validation changed from {contents['val_settings']} to {self.val_settings}, so "
                "best.pt will be replaced"
            )
            return
        self.best = {"file": "best.pt", "step": contents["step"]}
        self.best_val_loss = contents["val_loss"]

    def save(self, state):
        """Save a checkpoint, unless the step already has one; keep only the KEEP newest.

        Collective. UserError if the weights are not finite.
        """
        dist.on_main(lambda: self.commit(state))

    def commit(self, state):
        """The work of `save`, on rank 0."""
        newest = self.checkpoints[0]["step"] if self.checkpoints else None
        if newest == state.step:
            return
        contents = state.contents()
        # Even a step with finite gradients may overflow a weight.
        names = checkpoint.not_finite(contents["model"]) + checkpoint.not_finite(contents["ema"])
        if names:
            raise UserError(
                f"{self.folder}: weights are not finite at step {state.step}, such as {names[0]}; "
                "lower --lr, and run the same command again: it resumes from the last checkpoint"
            )
        file = f"checkpoints/step_{state.step:08d}.pt"
        sha256 = checkpoint.save(contents, self.folder / file)
        entry = {"file": file, "step": state.step, "sha256": sha256}
        self.checkpoints = [entry, *self.checkpoints][:KEEP]
        self.write_record()
        kept_paths = [self.folder / entry["file"] for entry in self.checkpoints]
        for path in self.folder.glob("checkpoints/step_*"):
            # A process killed while saving leaves a .tmp file. Other names are the user's copies.
            is_ours = re.fullmatch(r"step_\d+\.pt(\.tmp)?", path.name)
            if is_ours and path not in kept_paths:
                path.unlink()

    def save_best(self, state, val_loss):
        """Write best.pt if `val_loss` is the lowest so far. Collective.

        UserError if it is not finite.
        """
        if not math.isfinite(val_loss):
            self.drop_from(state.step)
            dist.fail(
                f"{self.folder}: the validation loss is {val_loss} at step {state.step}; lower "
                "--lr, or check the validation set. The same command resumes from the last "
                "checkpoint before this step"
            )

        def write():
            if val_loss >= self.best_val_loss:
                return
            self.write_model(state, "best.pt", val_loss=val_loss, val_settings=self.val_settings)
            self.best = {"file": "best.pt", "step": state.step}
            self.best_val_loss = val_loss

        dist.on_main(write)

    def write_model(self, state, file, **entries):
        """Write the averaged weights of `state`, and further `entries`, to `file`."""
        contents = checkpoint.model_contents(state.contents())
        checkpoint.save(contents | entries, self.folder / file)

    def drop_from(self, step):
        """Drop checkpoints of `step` and later from the record, so that no run resumes there."""
        if dist.is_main():
            self.checkpoints = [entry for entry in self.checkpoints if entry["step"] < step]
            self.write_record()


# Start of a run


def open_run(cfg, folder, max_chunk):
    """Lock the run folder and resolve unset settings; returns (RunFolder, cfg). Collective.

    The run resumes from the newest intact checkpoint, or else from --load. run.results is set if
    the run has finished cfg.steps. init_from becomes a local file, and the model settings are taken
    from it. chunk_size is chosen, at most `max_chunk`, if it is not given. UserError if all
    checkpoints are damaged.
    """
    run = RunFolder(folder)

    def open_on_main():
        run.open()
        results = run.results
        if results and (results["step"] < cfg.steps or not (run.folder / "model.pt").is_file()):
            run.results = None
        run.resume_from = find_checkpoint(run, cfg)
        return run.resume_from, run.results, resolve_settings(run, cfg, max_chunk)

    run.resume_from, run.results, cfg = dist.on_main(open_on_main)
    run.source = run.resume_from or cfg.init_from
    return run, cfg


def find_checkpoint(run, cfg):
    """The path of the checkpoint to resume from, or None for a new run."""
    has_begun = bool(run.checkpoints)
    newest = run.newest_intact()
    if not newest and cfg.load:
        newest = local_file(cfg.load, run)
    if has_begun and not newest and not run.results:
        raise UserError(
            f"{run.folder}: all checkpoints are damaged or missing; resume a copy with --load, "
            "or give another --run_dir"
        )
    return newest


def resolve_settings(run, cfg, max_chunk):
    """`cfg` with unset fields resolved; see `open_run`."""
    # A resumed run does not need --init_from, unless it trains adapters: these need their base.
    if cfg.init_from and (not run.resume_from or cfg.lora_rank):
        cfg = config.replace(cfg, init_from=local_file(cfg.init_from, run))
    source = run.resume_from or cfg.init_from
    saved = checkpoint.load(source, "config", mmap=True)["config"] if source else {}
    if cfg.init_from:
        cfg = with_model(cfg, saved, source)
    earlier = saved.get("chunk_size", 0) if run.resume_from else 0
    return config.replace(cfg, chunk_size=choose_chunk_size(cfg, earlier, max_chunk))


def local_file(address, run):
    """The local path of the file that --load or --init_from names, downloaded if needed."""
    if ":" not in address or Path(address).is_file():
        return address
    from common.interop import store

    return store.fetch(address, run.folder.parent / "downloads")


def with_model(cfg, settings, path):
    """`cfg` with model settings taken from `settings`, the config in the model file `path`.

    UserError if the user gave another value, by a flag or --config. In a config made in Python, a
    value counts as given if it is not the default.
    """
    present = config.settings_with(cfg, "model")
    saved = {name: value for name, value in settings.items() if name in present}
    saved = config.typed(type(cfg), saved, path)
    for name, value in saved.items():
        is_given = present[name] != getattr(type(cfg), name)
        if cfg.given is not None:
            is_given = name in cfg.given
        if is_given and present[name] != value:
            raise UserError(
                f"--{name} {config.as_word(present[name])}: the model of {path} has "
                f"{config.as_word(value)}; leave it out"
            )
    return config.replace(cfg, **saved)


def choose_chunk_size(cfg, earlier, most):
    """The chunk (micro-batch) size: the flag, else the resumed run's `earlier` value.

    Without either, or with more ranks than chunks, a size of at most `most` is chosen that gives
    all ranks about equal work. For example, a run with batches of 256 samples that starts on two
    ranks has chunks of 128. Resumed on one rank, it keeps 128; on four ranks, it takes 64. Each
    chunk has its own seed, so another chunk size means different noise.
    """
    size = cfg.chunk_size or earlier
    before = earlier or size  # 0: a new run without the flag needs no note
    if not size or math.ceil(cfg.batch_size / size) < dist.world_size():
        size = accumulate.chunk_size_for(cfg.batch_size, dist.world_size(), size or most)
    if before not in (0, size):
        config.note(f"chunks of {size} samples instead of {before}: the noise changes from now on")
    return size


def identify(run, cfg, splits, **others):
    """The identity of the run: {name: plain value} that a resumed run must keep.

    splits: from `order.splits`. others: more values, such as checksums of other models. If
    validation has changed, best.pt will be replaced. Collective. UserError if the training data
    cannot be used, or if the checkpoint has another identity.
    """
    dataset, _ = splits["train"]
    identity = config.settings_with(cfg, "fixed") | others
    identity["own validation set"] = bool(cfg.val_data)  # the other splits depend on this
    fingerprint = dataset.fingerprint()
    for name, value in fingerprint.items():
        identity[f"data {name}"] = value
    val_settings = config.settings_with(cfg, "affects_val_loss")
    val_fingerprint = splits["validation"][0].fingerprint() if cfg.val_data else {}
    val_settings |= val_fingerprint
    # Plain JSON values: tuples become lists, and NaN becomes None.
    identity, run.val_settings = config.nan_to_none([identity, val_settings])

    def check():
        if val_fingerprint == fingerprint:
            raise UserError(
                f"--val_data {cfg.val_data}: the same samples as --data {cfg.data}; leave it out, "
                "and a fraction of --data is held out"
            )
        unusable, checked, names = dataset.check()
        if unusable:
            config.note(
                f"{unusable} of {checked} checked samples cannot be used, and will be replaced by "
                f"others: {', '.join(names)}"
            )
        if cfg.lora_rank:
            identity["base"] = checkpoint.checksum(cfg.init_from)
        if run.resume_from:
            check_identity(run.resume_from, identity)
        if not run.results or cfg.save:
            run.read_best()
        return identity

    return dist.on_main(check)


def check_identity(path, identity):
    """Raise a UserError unless the checkpoint at `path` has this `identity`.

    None means unknown, and matches any value. Names that only one identity has are ignored, because
    a fork may have added or removed settings.
    """
    contents = checkpoint.load(path, mmap=True)
    if "training" not in contents:
        raise UserError(
            f"{path}: has weights, but not the state of a run; use --init_from instead of --load"
        )
    saved = contents["training"]["identity"]
    changed = [
        f"{name} is {saved[name]!r} there and {value!r} here"
        for name, value in identity.items()
        if None not in (saved.get(name), value) and saved[name] != value
    ]
    if changed:
        raise UserError(
            f"{path}: from a run with another model or other data: {'; '.join(changed)}. Give the "
            "same settings (--config RUN/config.json), or start a new --run_dir from these weights "
            f"with --init_from {path}"
        )


def restore(run, state):
    """Load the checkpoint, or the weights of --init_from, into `state`. Collective.

    Every rank memory-maps the file and copies its tensors, so the host holds no second copy.
    """
    cfg = state.cfg
    if run.resume_from:
        path = run.resume_from
        contents = dist.on_all(lambda: checkpoint.load(path, "ema", "training", mmap=True))
        dist.on_all(lambda: state.load(contents, path))
        return

    def start_from():
        contents = checkpoint.model_contents(checkpoint.load(cfg.init_from, mmap=True))
        contents = adapters.merged(contents, cfg.init_from)
        checkpoint.load_weights(state.model, contents["model"], cfg.init_from)

    if cfg.init_from and not cfg.lora_rank:
        dist.on_all(start_from)
    # As in DistributedDataParallel, all ranks start with rank 0's weights.
    for module in (state.model, *state.others.values()):
        for tensor in module.state_dict().values():
            dist.broadcast_tensor(tensor)
    state.ema.load_state_dict(state.model.state_dict())
