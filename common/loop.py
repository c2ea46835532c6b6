"""What the training loops share: start and end of a run, log lines, what is not finite.

The loop with its optimizer step stands in each script. A script calls, in this order: `open_run`
(lock, where to resume, chunk size), `identify` (checks), `resume` (weights and state), `batches`,
then `begin`, the context of the loop. It gives the loop's `Progress`, which logs and saves.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import signal
import time
from pathlib import Path

import torch

from common import accumulate, checkpoint, config, dist, tracker
from common.config import UserError
from common.data import order

MAX_TRIES = 64  # of a step that overflows fp16: nearly each halves the scale

# Start of a run


def open_run(cfg, folder, max_chunk):
    """(the RunFolder `folder`, locked; `cfg` with all that it leaves open). Collective.

    It resumes from the newest intact checkpoint, or from that of --load. run.results are those of a
    run that has finished cfg.steps, or None. What `cfg` leaves open: a local file for --init_from,
    the settings of its model, and a chunk size of at most `max_chunk`. UserError if all checkpoints
    are damaged.
    """
    run = checkpoint.RunFolder(folder)

    def open_on_main():
        run.open()
        results = run.results
        if results and (results["step"] < cfg.steps or not (run.folder / "model.pt").is_file()):
            run.results = None
        run.resume_from = find_checkpoint(run, cfg)
        complete = complete_settings(run, cfg, max_chunk)
        return run.resume_from, run.results, complete

    run.resume_from, run.results, cfg = dist.on_main(open_on_main)
    run.source = run.resume_from or cfg.init_from
    return run, cfg


def find_checkpoint(run, cfg):
    """The path of the checkpoint to resume from, or None for a new run."""
    has_begun = bool(run.checkpoints)
    newest = run.newest_intact()
    if not newest and cfg.load and (has_begun or not cfg.load_only_auto_resume):
        newest = local_file(cfg.load, run)
    if has_begun and not newest and not run.results:
        raise UserError(
            f"{run.folder}: all checkpoints are damaged or missing; go on from a copy with --load, "
            "or give another --run_dir"
        )
    return newest


def complete_settings(run, cfg, max_chunk):
    """`cfg` with what it leaves open, see `open_run`."""
    # A run that goes on has its weights, but adapters need their base at every start.
    if cfg.init_from and (not run.resume_from or cfg.lora_rank):
        cfg = dataclasses.replace(cfg, init_from=local_file(cfg.init_from, run))
    source = run.resume_from or cfg.init_from
    saved = {}  # settings of that file
    if source:
        with checkpoint.damaged(source):
            saved = dict(checkpoint.load(source, mmap=True).get("config", {}))
    if cfg.init_from and cfg.init_strict:
        cfg = with_model(cfg, saved, source)
    earlier = saved.get("chunk_size", 0) if run.resume_from else 0
    return dataclasses.replace(cfg, chunk_size=choose_chunk_size(cfg, earlier, max_chunk))


def local_file(address, run):
    """The path of what --load or --init_from names, which is downloaded if it is elsewhere."""
    if ":" not in address or Path(address).is_file():
        return address
    from common.interop import store

    return store.fetch(address, run.folder.parent / "downloads")


def with_model(cfg, settings, path):
    """`cfg` with those `settings` of the file `path` that are of its model, where it has defaults.

    UserError if others are given.
    """
    present = config.settings_with(cfg, "model")
    saved = {name: value for name, value in settings.items() if name in present}
    saved = config.typed(type(cfg), saved, path)
    for name, value in saved.items():
        if present[name] not in (value, getattr(type(cfg), name)):
            raise UserError(
                f"--{name} {config.as_word(present[name])}: {path} has {config.as_word(value)}; "
                "leave it out, or take what fits by --init_strict false"
            )
    return dataclasses.replace(cfg, **saved)


def choose_chunk_size(cfg, earlier, most):
    """Samples of a chunk: those of the flag, else those that the run had `earlier`, if it had any.

    Else, and with more ranks than chunks, as many as give each rank as much, at most `most`. A run
    of 256 samples a batch that begins on two ranks has chunks of 128. Resumed on one rank it keeps
    them; on four it takes 64. A chunk is what is seeded: other chunks have other noise.
    """
    size = cfg.chunk_size or earlier
    before = earlier or size  # 0 of a new run without the flag: nothing to note
    if not size or math.ceil(cfg.batch_size / size) < dist.world_size():
        size = accumulate.chunk_size_for(cfg.batch_size, dist.world_size(), size or most)
    if before not in (0, size):
        config.note(f"chunks of {size} samples, not of {before}: the noise is another from here on")
    return size


def identify(run, cfg, splits, **others):
    """The identity of the run: {name: plain value} of what must not change while it goes on.

    splits: of `order.splits`. others: more such values, as checksums of other models. If validation
    has changed since, the run forgets its best loss. Collective. UserError if the training data
    cannot be used, or if the run is of another model or other data.
    """
    dataset, _ = splits["train"]
    identity = config.settings_with(cfg, "fixed") | others
    identity["own validation set"] = bool(cfg.val_data)  # the other splits depend on it
    if cfg.lora_rank:
        identity["base"] = dist.on_main(lambda: checkpoint.checksum(cfg.init_from))
    for name, value in dataset.fingerprint().items():
        identity[f"data {name}"] = value
    measure = config.settings_with(cfg, "measure")
    if cfg.val_data:
        measure |= splits["validation"][0].fingerprint()
    # Lists for tuples, as in files.
    identity, run.measure = config.finite([identity, measure])

    def check():
        unusable, checked, names = dataset.check()
        if unusable:
            config.note(
                f"{unusable} of {checked} samples looked at cannot be used; others take their "
                f"place: {', '.join(names)}"
            )
        if run.resume_from:
            checkpoint.check_identity(run.resume_from, identity)
        if not run.results:
            run.read_best()

    dist.on_main(check)
    return identity


def resume(run, state):
    """Give `state` what the checkpoint has, or the weights of --init_from. Collective."""
    cfg = state.cfg
    path = run.resume_from
    if path:
        # Rank 0 reads the file. It is sent to the others.
        contents = dist.on_main(lambda: checkpoint.load(path))
        dist.together(lambda: state.restore(contents, path))
        return

    def start_from():
        contents = checkpoint.model_contents(checkpoint.load(cfg.init_from))
        if "lora" in contents:  # adapters: the model with them merged in
            from common.models import lora

            contents = lora.merged(contents, cfg.init_from)
        checkpoint.load_weights(state.model, contents["model"], cfg.init_from, cfg.init_strict)

    if cfg.init_from and not cfg.lora_rank:
        dist.on_main(start_from)
    # As with DistributedDataParallel the ranks start alike, also on unlike machines.
    for module in (state.model, *state.others.values()):
        for tensor in module.state_dict().values():
            dist.broadcast_tensor(tensor)
    state.ema.load_state_dict(state.model.state_dict())


def batches(cfg, dataset, indices, step, device):
    """(this rank's plan of chunks, endless iterator over their batches from `step` on)."""
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = order.training_spans(plan, cfg.batch_size, step)
    chunks = order.ChunkDataset(dataset, indices, cfg.seed)
    pin_memory = device.type == "cuda"
    timeout = 60 * cfg.timeout_minutes  # as long as the other ranks wait for this one
    return plan, order.loader(chunks, spans, cfg.workers, pin_memory, timeout)


# In the loop


class Due:
    """Whether to evaluate, or to save: every so many steps or minutes, and at the last step.

    Minutes count from when it was last due.
    """

    def __init__(self, interval, state):
        """interval: "200" steps, "10min", or "0", which is the last step alone."""
        number, self.is_minutes, _ = str(interval).partition("min")
        self.every = int(number) or math.inf
        self.state = state
        self.started = time.monotonic()

    def __call__(self):
        """Collective if it is by minutes: rank 0's clock decides."""
        step = self.state.step
        if self.is_minutes:
            due = dist.broadcast(time.monotonic() - self.started >= 60 * self.every)
        else:
            due = step % self.every == 0
        if due:
            self.started = time.monotonic()
        return step > 0 and (due or step == self.state.cfg.steps)


class Progress:
    """The progress bar. It collects losses for the next log line; it logs and saves.

    To collect does not wait for the device.
    """

    def __init__(self, run, state, log):
        self.run = run
        self.state = state
        self.log = log
        self.named_unusable = set()
        self.bar = tracker.progress(
            total=state.cfg.steps,
            initial=state.step,
            desc=state.info["kind"],
            unit="step",
            disable=not log.enabled,
        )
        self.restart()

    def restart(self):
        self.started = time.monotonic()
        self.losses = []  # of each step, summed over this rank's samples
        self.norms = []  # of each step
        self.extra_losses = collections.Counter()  # by name, summed over the steps
        self.unusable = []  # names of samples
        self.overflows = []  # steps that were tried again

    def count_overflow(self, stepped):
        """Count an overflow of fp16, if a step was not taken. It is tried again, at a lower scale.

        UserError on every rank if it overflows at any scale.
        """
        if stepped:
            return
        step = self.state.step + 1
        self.overflows.append(step)
        if self.overflows.count(step) == MAX_TRIES:
            self.run.drop_from(step - 1)  # whose weights may be the cause, as in `check_finite`
            dist.fail(
                f"{self.run.folder}: gradients overflow fp16 at any scale, the last at the steps "
                f"{config.as_word(sorted(set(self.overflows)))}; use --precision bf16 or fp32, or "
                "lower --lr"
            )

    def add(self, losses, norm, batches, **others):
        """Count a step.

        losses: of this rank's chunks, each summed over its samples. norm: of the gradients, the
        same on all ranks. batches: the chunks of this rank, which name samples that were unusable.
        others: more losses by name, summed over samples.
        """
        self.bar.update()
        self.losses.append(sum(losses))
        self.norms.append(norm)
        self.extra_losses.update(others)  # a Counter adds
        for batch in batches:
            self.unusable += batch["unusable"]

    @contextlib.contextmanager
    def paused(self):
        """Context of an evaluation, whose time does not count as that of training."""
        before = time.monotonic()
        yield
        self.paused_s = time.monotonic() - before  # of the newest pause
        self.started += self.paused_s

    def check_finite(self, values):
        """UserError on every rank unless `values` of the newest steps are finite, one a step.

        The weights after step N - 1 gave the loss of step N, so the checkpoints of N - 1 and later
        are dropped.
        """
        for number, value in enumerate(values, self.state.step - len(values) + 1):
            if not math.isfinite(value):
                self.run.drop_from(number - 1)
                dist.fail(
                    f"{self.run.folder}: loss or gradient is not finite at step {number}; lower "
                    "--lr or --max_grad_norm: with that the same command goes on from an earlier "
                    "checkpoint"
                )

    def log_line(self):
        """Log the steps since the last line. Collective.

        The ranks meet here, and the host waits for its device. UserError if a loss or gradient is
        not finite.
        """
        losses = dist.total(torch.stack(self.losses).tolist())
        norms = torch.stack(self.norms).tolist()
        self.check_finite([loss + norm for loss, norm in zip(losses, norms)])
        unusable = list(itertools.chain(*dist.gather(self.unusable)))  # of all ranks
        new = sorted(set(unusable) - self.named_unusable)
        if new:
            self.named_unusable.update(new)
            self.log.print(f"unusable, and replaced by the next sample: {', '.join(new[:10])}")
        batch_size = self.state.cfg.batch_size
        samples = len(losses) * batch_size
        loss = sum(losses) / samples
        rate = samples / (time.monotonic() - self.started)
        metrics = {
            "samples_seen": self.state.step * batch_size,
            "loss": loss,
            "lr": self.state.optimizers[0].param_groups[0]["lr"],
            "grad_norm": norms[-1],
            "overflows": len(self.overflows),
            "unusable_rows": len(unusable),
            "samples_per_s": rate,
        }
        for name, value in self.extra_losses.items():
            metrics[name] = sum(dist.gather(value.item())) / samples
        if torch.cuda.is_initialized():
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30  # of rank 0
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)
        self.restart()
        self.log.log(self.state.step, **metrics)

    def log_evaluation(self, metrics, samples=None):
        """Log and print the evaluation that was `paused`, and write best.pt if val_loss is lowest.

        samples: see tracker.Tracker.log. Collective.
        """
        metrics = metrics | {"evaluation_s": self.paused_s}
        self.log.log(self.state.step, samples, **metrics)
        tracker.print_results(f"step {self.state.step}", metrics)
        self.log.write_page()
        self.run.save_best(self.state, metrics["val_loss"], self.log)

    def save(self):
        """Save the state, unless it is not finite: UserError. Collective.

        A loss that is not finite, on any rank, makes the norm of the summed gradients so.
        """
        if self.norms:
            self.check_finite(torch.stack(self.norms).tolist())
        with self.paused():
            self.run.save(self.state, self.log)

    def finish(self, metrics, samples=None):
        """Log the test's `metrics`, and write model.pt and run.results. Collective."""
        run = self.run
        state = self.state
        results = {f"test_{name}": value for name, value in metrics.items()}
        self.log.log(state.step, samples, **results)
        self.log.write_page()
        run.results = {"step": state.step, "best_val_loss": run.best_val_loss, **results}
        self.save()  # nothing, unless --load brought a run that had all its steps
        if dist.is_main():
            run.write_model(state, "model.pt", **run.results)
            run.write_record()
        dist.gather(None)  # a barrier: a next stage reads model.pt
        dist.stop_together()  # after a signal there is no next stage


# The loop's frame


@contextlib.contextmanager
def begin(run, state, about, device):
    """Context of the loop, which gives its Progress. Collective.

    It opens the logger, writes config.json, and prints what the run is, and at the end its results.
    So the loop ends with `progress.finish`. After a signal to any rank it saves, and ends the
    process. about: what is trained on, in words.
    """
    cfg = state.cfg
    # If an evaluation is due at this step, the loop begins with it: its line may be there already,
    # and is dropped. By minutes none is due but at the last step.
    repeats_evaluation = Due(cfg.eval_every, state)()
    log = tracker.Tracker(run, state, repeats_evaluation)
    if dist.is_main():  # after the tracker: if it refuses the logger, config.json stays as it was
        settings = config.as_json(cfg) | {"versions": state.versions}
        path = run.folder / "config.json"
        checkpoint.write_json(settings, path)
        log.call_logger("file", path)
    parameters = sum(p.numel() for p in state.model.parameters())
    log.print(
        f"{about}; {parameters:,} parameters to train, batches of {cfg.batch_size} in chunks of "
        f"{cfg.chunk_size}, {dist.world_size()} rank(s) on {device.type}"
    )
    with log, dist.listening():  # another SIGTERM does not disturb the save
        progress = Progress(run, state, log)
        try:
            yield progress
        except dist.Stopped as stop:
            progress.save()
            dist.gather(None)  # torchrun kills all when one has ended
            name = signal.Signals(stop.code - 128).name
            log.print(
                f"stopped by {name} at step {state.step}, all saved; the same command goes on"
            )
            raise
        finally:
            progress.bar.close()
    announce(run)


def announce(run):
    """Print the results of a finished run."""
    tracker.print_results(
        f"{run.folder} is finished, at step {run.results['step']}; to train on, give more --steps. "
        "See its report.html",
        run.results,
    )
