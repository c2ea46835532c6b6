"""What the training loops share: the start of a run, what is due when, what is not finite, the end.

The optimizer step itself stands in each script. A script calls, in this order: `prepare_config`
(files from elsewhere, chunk size), `open_run` (checks, lock, where to resume), `resume` (weights
and state), `batches`, `begin` (loggers), then `Progress` around the loop, `finish` after it.
"""

import dataclasses
import math
import os
import shlex
import time
from pathlib import Path

import torch

from common import accumulate, amp, checkpoint, config, data, dist, schedule, store, tracker
from common.config import UserError

# Checks of the settings of diffusion models


def check_diffusion(cfg):
    """UserError for settings of a diffusion model that have no effect together."""
    schedule_given = cfg.noise_schedule != type(cfg).noise_schedule  # not the default
    if cfg.objective == "flow" and schedule_given:
        raise UserError("--noise_schedule: --objective flow has its own noise levels")
    if cfg.objective != "flow" and cfg.loss_weight in ("sigma_sqrt", "cosmap"):
        raise UserError(f"--loss_weight {cfg.loss_weight}: it needs --objective flow")


def check_sampling(cfg, guidance_scale, steps=1, conditional=True):
    """UserError for what a model cannot sample: more steps than timesteps, or without dropping.

    A model that was trained without dropping its conditions has no guidance, and needs conditions.
    """
    if not 1 <= steps <= cfg.timesteps:
        raise UserError(
            f"{steps} sampling steps: expected 1 to {cfg.timesteps}, the --timesteps of "
            f"{cfg.run_dir}"
        )
    for name in ("image_drop", "text_drop"):
        if getattr(cfg, name, 1) == 0 and (guidance_scale != 1 or not conditional):
            raise UserError(
                f"{cfg.run_dir} is trained with --{name} 0, so it needs a text or image, and a "
                "guidance scale of 1"
            )


# Start of a run


def check_shared(run_dir):
    """UserError on every rank unless all see one folder `run_dir`, which is made. Collective."""
    if dist.world_size() == 1:
        return
    # A network file system knows no such name from before, so its caches cannot hide the file.
    probe = Path(run_dir, dist.broadcast(f".shared_{os.urandom(8).hex()}"))
    dist.on_main(lambda: checkpoint.write_json({}, probe))
    seen = dist.gather(os.path.exists(probe))
    dist.on_main(probe.unlink)
    if not all(seen):
        dist.fail(
            f"{run_dir}: this folder of rank 0 is not that of rank {seen.index(False)}; all nodes "
            "must share the run folder: give its absolute path on a file system that all have"
        )


def prepare_config(cfg, most_chunk, builtin_folder, device):
    """`cfg` with local files for what is elsewhere, and with a chunk size of at most `most_chunk`.

    Rank 0 alone calls it. It makes the built-in shapes, in `builtin_folder`.
    """
    cfg = with_chunk_size(store.fetch_files(cfg), most_chunk)
    if cfg.data == "shapes":
        from common import clip

        cfg = dataclasses.replace(cfg, data=clip.builtin_data(builtin_folder, device))
    return cfg


def with_chunk_size(cfg, most):
    """`cfg` with a chunk size: its own, that of the run that is resumed, or a new one.

    The new one gives every rank a chunk, of at most `most` samples. A run keeps its chunk size,
    because the chunk is what is seeded. If there is less memory now, a smaller one may be given.
    """
    identity = {}
    record = checkpoint.record_of(cfg.run_dir) if cfg.resume == "auto" else {"checkpoints": []}
    if record["checkpoints"]:
        identity = record.get("identity")
    elif cfg.load and not cfg.load_only_auto_resume:
        identity = checkpoint.peek(cfg.load).get("identity")
    size = cfg.chunk_size
    if checkpoint.matches(identity, {"chunk_size": 1}):  # it has an int of this name
        earlier = max(1, identity["chunk_size"])
        size = size or earlier
        if size > earlier:
            raise UserError(
                f"--chunk_size {size}: that of {cfg.run_dir} is {earlier}, and a run goes on with "
                "the same or a smaller one; leave it out"
            )
        if size < earlier:
            config.note(
                f"--chunk_size {size}, which was {earlier}: from here on the noise is another "
                "than that of a run with one chunk size"
            )
        return dataclasses.replace(cfg, chunk_size=size)

    if not size:
        size = accumulate.chunk_size_for(cfg.batch_size, dist.world_size(), most)
    chunks = math.ceil(cfg.batch_size / size)
    if chunks < dist.world_size():
        raise UserError(
            f"--chunk_size {size}: makes {chunks} chunk(s) of a batch of {cfg.batch_size}, too few "
            f"for {dist.world_size()} ranks; leave it out, or give at most "
            f"{cfg.batch_size // dist.world_size() or 1}"
        )
    return dataclasses.replace(cfg, chunk_size=size)


def open_run(cfg, dataset, clip_model=None, checksums=None):
    """The run folder, held by this process group, with the checkpoint to resume from. Collective.

    checksums: {name: checksum} of other models that a resumed run must not change.
    Rank 0 checks the training data first: bad data must not move an earlier run aside.
    """
    run = checkpoint.RunFolder(cfg.run_dir)
    run.identity = checkpoint.identity(cfg, dataset, clip_model) | (checksums or {})

    def open_on_main():
        unusable, checked, names = dataset.check()
        notes = run.open(cfg.resume)
        if unusable:
            notes.append(
                f"{unusable} of {checked} samples looked at cannot be used; others take their "
                f"place: {', '.join(names)}"
            )
        if clip_model:
            notes.append(clip_model.caption_note(dataset, cfg.max_text_len))
        resume_from, finished, more_notes = run.resume_point(cfg, run.identity)
        return resume_from, finished, notes + more_notes

    run.resume_from, run.finished, run.notes = dist.on_main(open_on_main)
    return run


def announce_finished(cfg, run, next_command=""):
    """Say that the run is finished, and send the copies that it still owes."""
    store.resend(cfg, run)
    headline = f"{cfg.run_dir} is finished, at step {run.finished['step']}"
    tracker.print_results(
        f"{headline}; to train on, give more --steps.", run.finished, next_command
    )


def resume(run, state, **frozen):
    """Give `state` the weights of the checkpoint to resume from, or of --init_from. Collective.

    frozen: {name: module} that is not trained, but must be the same on all ranks.
    """
    cfg = state.cfg
    if run.resume_from:
        run.notes += state.restore(run.resume_from)
    elif cfg.init_from and not getattr(cfg, "lora_rank", 0):
        state.start_from(cfg.init_from, cfg.init_strict)
    dist.check_in_step({**state.modules, **frozen}, state.step)


def batches(cfg, dataset, indices, step, device):
    """(this rank's plan of chunks, endless iterator over their batches from `step` on)."""
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, step)
    if cfg.leave_out:
        missing = set(cfg.leave_out).difference(map(dataset.name, range(len(dataset))))
        if missing:
            raise UserError(f"--leave_out {min(missing)}: no sample has this name")
    chunks = data.ChunkDataset(dataset, indices, cfg.seed, cfg.leave_out)
    pin_memory = device.type == "cuda"
    timeout = 60 * cfg.timeout_minutes  # as long as the other ranks wait for this one
    return plan, data.loader(chunks, spans, cfg.workers, pin_memory, timeout)


def begin(run, state, given, about, device):
    """Write config.json, open the logger, print what the run is; returns the Tracker. Collective.

    given: the config as the user gave it. about: what is trained on, in words.
    """
    cfg = state.cfg
    if dist.is_main():
        settings = config.as_json(dataclasses.replace(given, chunk_size=cfg.chunk_size))
        checkpoint.write_json({**settings, "versions": state.versions}, run.folder / "config.json")
    log = tracker.Tracker(run, state)
    parameters = sum(p.numel() for p in state.modules["model"].parameters())
    log.print(
        f"{about}; {parameters:,} parameters to train, {accumulate.describe(cfg)}, "
        f"{dist.world_size()} rank(s) on {device.type}"
    )
    for note in run.notes:
        if note:
            log.print(note)
    return log


# In the loop


class Progress:
    """The progress bar, sums since the last log line, and what is due at a line.

    Sums are taken without waiting for the device. As a context, it stands around the loop: after a
    signal to any rank it saves, and ends the process.
    """

    def __init__(self, run, state, log, title, dataset):
        """dataset: that of the training, which names samples."""
        self.run = run
        self.dataset = dataset
        self.state = state
        self.log = log
        self.eval_due = False
        self.save_due = False
        now = time.monotonic()
        self.last_due = {"eval": now, "save": now}
        self.named_unusable = set()
        self.bar = tracker.progress(
            total=state.cfg.steps,
            initial=state.step,
            desc=title,
            unit="step",
            disable=not log.enabled,
        )
        self.restart()
        # What a stop between two lines left for the next line.
        self.last_line = state.logged_step
        self.earlier = state.unlogged
        self.norm = self.earlier["grad_norm"]
        self.overflows = self.earlier["overflows"]
        state.unlogged = dict(checkpoint.NOTHING_UNLOGGED)

    def restart(self):
        """Count from this step on. The clock restarts too: it leaves out evaluating and saving."""
        self.last_line = self.state.step
        self.started = time.monotonic()
        self.earlier = checkpoint.NOTHING_UNLOGGED
        self.losses = []
        self.chunks = []  # of each step since the last line: [(loss, indices of its samples)]
        self.others = {}
        self.norm = 0.0
        self.unusable = []
        self.overflows = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.bar.close()
        if isinstance(error, dist.Stopped):
            self.save_unlogged()
            self.run.wait()
            self.log.print(
                f"stopped by {error} at step {self.state.step}, all saved; the same command goes on"
            )
            raise SystemExit(128 + error.number)
        if error is None:  # a signal may have come after the last step: no next stage then
            try:
                dist.stop_signals.agree()
            except dist.Stopped as stopped:
                raise SystemExit(128 + stopped.number) from None

    def save_unlogged(self):
        """Save at any step, with what is not logged yet: the resumed run logs the same lines."""
        losses, others, unusable = self.totals()
        self.check_steps(losses)
        self.state.unlogged = {
            "losses": losses,
            "others": others,
            "grad_norm": float(self.norm),
            "unusable": unusable,
            "overflows": self.overflows,
        }
        self.run.save(self.state, self.log)

    def add(self, losses, norm, batches, others=None):
        """Count a step.

        losses: of this rank's chunks, each summed over its samples. norm: of the gradients.
        batches: the chunks of this rank, which name samples that were unusable. others: {name: loss
        summed over samples}; those of the last step are logged.
        """
        self.bar.update()
        self.losses.append(sum(losses))
        self.chunks.append([(loss, batch["index"]) for loss, batch in zip(losses, batches)])
        self.others = others or {}
        self.norm = norm
        for batch in batches:
            self.unusable += batch["unusable"]

    def log_due(self):
        """Whether to log now: every cfg.log_every steps, and at the end."""
        cfg = self.state.cfg
        step = self.state.step
        return step > self.last_line and (step % cfg.log_every == 0 or step == cfg.steps)

    def log_line(self):
        """Log the steps since the last line; decide whether to evaluate and save. Collective.

        The ranks meet here, and the host waits for its device. If both are due, it saves first.
        """
        cfg = self.state.cfg
        step = self.state.step
        scaler = self.state.scaler
        losses, others, unusable = self.totals()
        self.check_steps(losses)
        self.loss = sum(losses) / (len(losses) * cfg.batch_size)
        rate = len(self.losses) * cfg.batch_size / (time.monotonic() - self.started)
        scale = {"scale": scaler.get_scale()} if scaler.is_enabled() else {}
        self.log.log(
            step,
            samples_seen=step * cfg.batch_size,
            loss=self.loss,
            lr=schedule.of_config(step - 1, cfg),
            grad_norm=float(self.norm),
            overflows=self.overflows,
            unusable_rows=unusable,
            samples_per_s=rate,
            **{name: loss_sum / cfg.batch_size for name, loss_sum in others.items()},
            **scale,
        )
        self.bar.set_postfix_str(f"loss {self.loss:.4f}, {rate:.0f} samples/s", refresh=False)
        eval_due = self.is_due("eval", cfg.eval_every, cfg.eval_minutes)
        save_due = self.is_due("save", cfg.save_every, cfg.save_minutes)
        self.eval_due, self.save_due = dist.broadcast((eval_due, save_due))  # rank 0's clock
        if self.eval_due and self.save_due:
            # Whatever ends the evaluation, the steps are kept. The run would evaluate them anew,
            # and log this line again: so the state is saved once more when both are done.
            self.save_unlogged()
            self.state.unlogged = dict(checkpoint.NOTHING_UNLOGGED)
        self.logged_at = time.monotonic()

    def is_due(self, name, every, minutes):
        """Whether a multiple of `every` steps has come since the last line, or `minutes` passed.

        `every` 0 and `minutes` 0 are never due. At the end all is due.
        """
        step = self.state.step
        now = time.monotonic()
        by_steps = every > 0 and step // every != self.last_line // every
        by_time = minutes > 0 and now - self.last_due[name] >= 60 * minutes
        due = by_steps or by_time or step == self.state.cfg.steps
        if due:
            self.last_due[name] = now
        return due

    def log_evaluation(self, metrics, samples=None):
        """Log and print an evaluation, and keep the model as best.pt if it is the best. Collective.

        metrics: {name: value} with "val_loss". samples: {file in the run folder: caption}.
        UserError if a loss is not finite.
        """
        step = self.state.step
        seconds = time.monotonic() - self.logged_at
        self.log.log(step, samples, **metrics, evaluation_s=seconds)
        losses = {name: metrics[name] for name in metrics if name.startswith("val_loss")}
        tracker.print_results(f"step {step}", {"loss": self.loss, **losses, **metrics})
        self.check_finite(losses.values(), step + 1)
        best = self.run.save_best(self.state, metrics["val_loss"], self.log)
        if best and self.log.copies_best_checkpoint:
            self.save_due = True
        self.log.report()

    def totals(self):
        """Of all ranks: ([loss sum of each step since the last line], other sums, unusable)."""
        losses = torch.stack(self.losses).tolist() if self.losses else []
        *losses, unusable = dist.total([*losses, len(self.unusable)])
        if unusable:
            names = set().union(*dist.gather(self.unusable[:10]))
            new = sorted(names - self.named_unusable)
            if new:
                self.log.print(f"unusable, and replaced by the next row: {', '.join(new)}")
            self.named_unusable |= names
        others = dist.total_by_name(self.others) or self.earlier["others"]
        return self.earlier["losses"] + losses, others, self.earlier["unusable"] + int(unusable)

    def check_steps(self, losses):
        """`check_finite` of the losses of steps since the last line, and of the last gradient."""
        values = [*losses, float(self.norm)]
        if all(map(math.isfinite, values)):
            return
        numbered = enumerate(losses, self.last_line + 1)
        bad = [step for step, loss in numbered if not math.isfinite(loss)]
        first_bad = bad[0] if bad else self.state.step
        self.check_finite(values, first_bad, self.suspects(first_bad))

    def suspects(self, step):
        """Names of the samples of a step's chunks, of all ranks, whose loss was not finite.

        If all were finite, the gradient was not: names of all its samples.
        """
        names = {True: [], False: []}  # by whether the loss of their chunk is finite
        for loss, indices in self.chunks[step - self.state.step - 1]:
            names[bool(loss.isfinite())] += map(self.dataset.name, indices.tolist())
        bad = set().union(*dist.gather(names[False]))
        return sorted(bad or set().union(*dist.gather(names[True])))

    def check_finite(self, values, step, samples=()):
        """UserError on every rank unless losses or gradients of step number `step` are finite.

        samples: names of those that may be the cause. The loss of a step is that of the weights
        before it: their checkpoint is discarded, too. Collective.
        """
        if all(map(math.isfinite, values)):
            return
        good = dist.on_main(lambda: self.run.drop_from(step - 1))
        remedy = "lower --lr or --max_grad_norm"
        if samples:
            words = shlex.quote(",".join(samples))
            remedy += f", or, if one of its samples is bad, --leave_out {words}"
        dist.fail(
            f"{self.state.cfg.run_dir}: loss or gradient is not finite at step {step}; {remedy}. "
            f"The same command goes on from {good or 'the start: no checkpoint is good'}"
        )


@torch.no_grad()
def mean_loss(model, loss_of, dataset, indices, cfg, device):
    """Mean of `loss_of(batch)` over the first eval_samples of `indices`, on all ranks.

    The noise is the same every time. `model` is in eval mode meanwhile, and afterwards in the mode
    that it was in. Collective.
    """
    mode = model.training
    model.eval()
    loss_sum = 0.0
    count = 0
    for number, batch in data.batches(dataset, indices, cfg.eval_samples, cfg.chunk_size):
        accumulate.seed_all(cfg.seed, "loss", number)
        size = len(batch["index"])
        with amp.autocast(device, cfg.precision):
            loss_sum += loss_of(data.to_device(batch, device)).item() * size
        count += size
    model.train(mode)
    loss_sum, count = dist.total([loss_sum, count])
    return loss_sum / count


# End of a run


def finish(run, state, log, metrics, samples=None):
    """Log the test's `metrics` and write model.pt; returns what to announce."""
    results = {f"test_{name}": value for name, value in metrics.items()}
    log.log(state.step, samples, **results)
    results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
    if dist.is_main():
        run.save_final(state, results)
    log.report()
    return results


def announce_trained(cfg, results, started, next_command=""):
    """Print what was trained. All ranks wait for rank 0's model.pt, which a next stage reads."""
    dist.gather(None)  # a barrier
    seconds = time.monotonic() - started
    headline = f"Trained {cfg.run_dir}; this start took {seconds:.0f} s. See {cfg.run_dir}"
    tracker.print_results(f"{headline}/report.html", results, next_command)
