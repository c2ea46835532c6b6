"""Helpers for training loops: when to evaluate and save, log lines, checks for NaN, evaluation.

Each script has its own loop, inside the context `begin`, which yields a `Progress` that logs and
saves.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import signal
import time

import torch

from common import accumulate, amp, checkpoint, config, dist, loader, tracker
from common.config import UserError

MAX_TRIES = 64  # attempts at a step that overflows fp16; nearly all of them halve the loss scale

# In the loop


class Due:
    """Decides when to evaluate or save: every few steps or minutes, and at the last step.

    Minutes are counted from the last time it was due.
    """

    def __init__(self, interval, state):
        """interval: "200" for steps, "10min" for minutes, "0" for the last step only."""
        number, self.is_minutes, _ = str(interval).partition("min")
        self.every = int(number) or math.inf
        self.state = state
        self.started = time.monotonic()

    def __call__(self):
        """True if it is due. Collective if the interval is in minutes: rank 0's clock decides."""
        step = self.state.step
        if self.is_minutes:
            due = dist.on_main(lambda: time.monotonic() - self.started >= 60 * self.every)
        else:
            due = step % self.every == 0
        if due:
            self.started = time.monotonic()
        return step > 0 and (due or step == self.state.cfg.steps)


class Progress:
    """Collects losses for the next log line, logs, saves, and shows a progress bar.

    Collecting does not synchronize with the device.
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
        self.losses = []  # one per step, summed over this rank's samples
        self.norms = []  # gradient norms, one per step
        self.extra_losses = collections.Counter()  # {name: sum over the steps}
        self.unusable = []  # names of samples
        self.overflows = []  # steps that were repeated

    def count_overflow(self, stepped):
        """Count an fp16 overflow, unless the optimizers stepped.

        If the step overflows even at the smallest loss scale, all ranks exit with a UserError.
        """
        if stepped:
            return
        step = self.state.step + 1
        self.overflows.append(step)
        if self.overflows.count(step) == MAX_TRIES:
            self.run.drop_from(step - 1)  # see `check_finite`
            dist.fail(
                f"{self.run.folder}: gradients overflow fp16 at any loss scale, most recently at "
                f"steps {config.as_word(sorted(set(self.overflows)))}; use --precision bf16 or "
                "fp32, or lower --lr"
            )

    def add(self, losses, norm, batches, **others):
        """Add a step to the next log line.

        losses: one for each of this rank's chunks, summed over its samples. norm: gradient norm,
        the same on all ranks. batches: this rank's chunks, which list unusable samples. others:
        more losses by name, summed over samples.
        """
        self.bar.update()
        self.losses.append(sum(losses))
        self.norms.append(norm)
        self.extra_losses.update(others)  # Counter.update adds the values
        for batch in batches:
            self.unusable += batch["unusable"]

    @contextlib.contextmanager
    def paused(self):
        """Context around an evaluation or a save, whose time does not count in samples_per_s."""
        before = time.monotonic()
        yield
        self.paused_s = time.monotonic() - before  # of the last pause only
        self.started += self.paused_s

    def check_finite(self, values):
        """End all ranks with a UserError unless the `values` of the latest steps are finite.

        The loss of step N comes from the weights after step N - 1, so checkpoints from step N - 1
        on are dropped.
        """
        for number, value in enumerate(values, self.state.step - len(values) + 1):
            if not math.isfinite(value):
                self.run.drop_from(number - 1)
                dist.fail(
                    f"{self.run.folder}: loss or gradient is not finite at step {number}; lower "
                    "--lr or --max_grad_norm, and run the same command again: it resumes from an "
                    "earlier checkpoint"
                )

    def log_line(self):
        """Log the steps since the previous log line. Collective.

        It synchronizes with the device and the other ranks. UserError if a loss or gradient is not
        finite.
        """
        losses = dist.all_sum(torch.stack(self.losses).tolist())
        norms = torch.stack(self.norms).tolist()
        self.check_finite([loss + norm for loss, norm in zip(losses, norms)])
        unusable = list(itertools.chain(*dist.all_gather(self.unusable)))  # of all ranks
        new = sorted(set(unusable) - self.named_unusable)
        if new:
            self.named_unusable.update(new)
            self.log.print(f"unusable samples, replaced by the next ones: {', '.join(new[:10])}")
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
            metrics[name] = sum(dist.all_gather(value.item())) / samples
        if torch.cuda.is_initialized():
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30  # on rank 0
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)
        self.restart()
        self.log.log(self.state.step, **metrics)

    def log_evaluation(self, metrics, samples=None):
        """Log and print an evaluation, and write best.pt if its val_loss is the lowest so far.

        samples: see `Tracker.log`. Collective.
        """
        metrics = metrics | {"evaluation_s": self.paused_s}
        self.log.log(self.state.step, samples, **metrics)
        tracker.print_results(f"step {self.state.step}", metrics)
        self.log.write_page()
        self.run.save_best(self.state, metrics["val_loss"])
        self.log.send()

    def save(self):
        """Save a checkpoint; UserError if the state is not finite. Collective.

        Checking the norms suffices: a NaN loss on any rank makes the norm of the summed gradients
        NaN.
        """
        if self.norms:
            self.check_finite(torch.stack(self.norms).tolist())
        with self.paused():
            self.run.save(self.state)
            self.log.send()

    def finish(self, metrics, samples=None):
        """Log the test `metrics`; write model.pt and the results of the run. Collective."""
        run = self.run
        state = self.state
        results = {f"test_{name}": value for name, value in metrics.items()}
        self.log.log(state.step, samples, **results)
        self.log.write_page()
        run.results = {"step": state.step, "best_val_loss": run.best_val_loss, **results}
        self.save()  # usually done already, but not if --load named a finished run

        def write():
            run.write_model(state, "model.pt", **run.results)
            run.write_record()

        dist.on_main(write)  # all ranks wait, because the next stage reads model.pt
        dist.stop_together()  # after a signal, the next stage must not start


# Around the loop


@contextlib.contextmanager
def begin(run, state, about, device):
    """Context around the training loop, which yields its Progress. Collective.

    It opens the logger, writes config.json, and prints a description of the run. At the end it
    prints the results, which `progress.finish` sets. After a signal to any rank it saves and exits.
    about: description of the data, for the console.
    """
    cfg = state.cfg
    # If an evaluation is due now, the loop starts with it. If an earlier start has already
    # logged it, the tracker drops the old line.
    repeats_evaluation = Due(cfg.eval_every, state)()
    log = tracker.Tracker(run, state, repeats_evaluation)
    if dist.is_main():  # after the tracker: if it fails, config.json stays unchanged
        settings = config.as_json(cfg) | {"versions": state.versions}
        path = run.folder / "config.json"
        checkpoint.write_json(settings, path)
        log.call_logger("file", path)
    parameters = sum(p.numel() for p in state.model.parameters())
    log.print(
        f"{about}; {parameters:,} trainable parameters, batches of {cfg.batch_size} in chunks of "
        f"{cfg.chunk_size}, {dist.world_size()} rank(s) on {device.type}"
    )
    if cfg.warmup_steps >= cfg.steps:
        config.note(f"--warmup_steps {cfg.warmup_steps}: the run ends before its warm-up does")
    with log, dist.listening():  # a second SIGTERM does not interrupt the save
        progress = Progress(run, state, log)
        try:
            yield progress
        except dist.Stopped as stop:
            progress.save()  # all ranks wait: once one exits, torchrun stops the others
            name = signal.Signals(stop.code - 128).name
            log.print(
                f"stopped by {name} at step {state.step}, saved; the same command resumes"
            )
            raise
        except torch.OutOfMemoryError:
            log.print("out of memory: lower --chunk_size, or give --checkpointing if available")
            raise
        finally:
            progress.bar.close()
    announce(run, cfg, log.savers)


def announce(run, cfg, savers=None):
    """Print the results of a finished run, and upload what --save asks for and is still missing.

    savers: the run's savers, which know what they have sent; None: send everything again.
    """
    tracker.print_results(
        f"{run.folder} is finished at step {run.results['step']}; give more --steps to continue. "
        "See its report.html",
        run.results,
    )
    if cfg.save and dist.is_main():
        from common.interop import store

        store.send_missing(savers or store.savers(cfg), run, cfg.timeout_minutes)


# Evaluation


@torch.no_grad()
def mean_loss(model, loss_of, dataset, indices):
    """Mean of `loss_of(batch)` over `indices`, or over eval_samples of them. Collective.

    eval_samples, chunk_size, precision and seed come from model.cfg. The noise is the same every
    time. During the call, `model` is in eval mode.
    """
    cfg = model.cfg
    device = next(model.parameters()).device
    mode = model.training
    model.eval()
    loss_sum = 0.0
    count = 0
    for number, batch in loader.eval_batches(dataset, indices, cfg.eval_samples, cfg.chunk_size):
        accumulate.seed_all(cfg.seed, "loss", number)
        size = len(batch["index"])
        with amp.autocast(device, cfg.precision):
            loss_sum += loss_of(loader.to_device(batch, device)).item() * size
        count += size
    model.train(mode)
    loss_sum, count = dist.all_sum([loss_sum, count])
    return loss_sum / count


def means(found):
    """Turn {metric: values on this rank} into {metric: mean over all ranks}. Collective."""
    sums = collections.defaultdict(float)
    counts = collections.defaultdict(int)
    for values_of_rank in dist.all_gather(found):  # a rank may lack some metrics
        for name, values in values_of_rank.items():
            sums[name] += sum(values)
            counts[name] += len(values)
    return {name: sums[name] / counts[name] for name in sums}


def evaluation_settings(cfg, args, max_chunk):
    """The settings `cfg` of a training run, with those of the evaluation command `args` applied.

    max_chunk: the chunk size if `cfg` has none.
    """
    # Training runs record where their data are, but imported models do not.
    if not args.data and cfg.data == type(cfg).data:
        raise UserError(
            f"{config.as_word(args.run_dir)}: its training data are unknown; give --data"
        )
    return dataclasses.replace(
        cfg,
        data=args.data or cfg.data,
        val_data="" if args.data else cfg.val_data,
        eval_samples=args.eval_samples,
        seed=args.seed,
        batch_size=1,  # order.splits then accepts even a small training split
        chunk_size=cfg.chunk_size or max_chunk,
    )
