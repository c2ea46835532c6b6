"""What stands in or around the training loops: when to evaluate, log lines, what is not finite.

The loop with its optimizer step stands in each script, within the context `begin`, which gives its
`Progress`. That logs and saves.
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

MAX_TRIES = 64  # of a step that overflows fp16: nearly each halves the scale

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
            due = dist.on_main(lambda: time.monotonic() - self.started >= 60 * self.every)
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
                    "--lr or --max_grad_norm: then the same command resumes from an earlier "
                    "checkpoint"
                )

    def log_line(self):
        """Log the steps since the last line. Collective.

        The ranks meet here, and the host waits for its device. UserError if a loss or gradient is
        not finite.
        """
        losses = dist.all_sum(torch.stack(self.losses).tolist())
        norms = torch.stack(self.norms).tolist()
        self.check_finite([loss + norm for loss, norm in zip(losses, norms)])
        unusable = list(itertools.chain(*dist.all_gather(self.unusable)))  # of all ranks
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
            metrics[name] = sum(dist.all_gather(value.item())) / samples
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
        self.run.save_best(self.state, metrics["val_loss"])
        self.log.send()

    def save(self):
        """Save the state, unless it is not finite: UserError. Collective.

        A loss that is not finite, on any rank, makes the norm of the summed gradients so.
        """
        if self.norms:
            self.check_finite(torch.stack(self.norms).tolist())
        with self.paused():
            self.run.save(self.state)
            self.log.send()

    def finish(self, metrics, samples=None):
        """Log the test's `metrics`, and write model.pt and run.results. Collective."""
        run = self.run
        state = self.state
        results = {f"test_{name}": value for name, value in metrics.items()}
        self.log.log(state.step, samples, **results)
        self.log.write_page()
        run.results = {"step": state.step, "best_val_loss": run.best_val_loss, **results}
        self.save()  # nothing, unless --load brought a run that had all its steps

        def write():
            run.write_model(state, "model.pt", **run.results)
            run.write_record()

        dist.on_main(write)  # all wait for it: a next stage reads model.pt
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
            progress.save()  # for which all wait: torchrun kills all when one has ended
            name = signal.Signals(stop.code - 128).name
            log.print(
                f"stopped by {name} at step {state.step}, all saved; the same command resumes"
            )
            raise
        except torch.OutOfMemoryError:
            log.print("out of memory: lower --chunk_size, or give --checkpointing")
            raise
        finally:
            progress.bar.close()
    announce(run, cfg, log.savers)


def announce(run, cfg, savers=None):
    """Print the results of a finished run, and send the copies that are missing.

    savers: those that have sent some; without them, those of an earlier start are sent again.
    """
    tracker.print_results(
        f"{run.folder} is finished, at step {run.results['step']}; to train on, give more --steps. "
        "See its report.html",
        run.results,
    )
    if cfg.save and dist.is_main():
        from common.interop import store

        store.send_missing(savers or store.savers(cfg), run, cfg.timeout_minutes)


# Evaluation


@torch.no_grad()
def mean_loss(model, loss_of, dataset, indices):
    """Mean of `loss_of(batch)` over eval_samples of `indices`, on all ranks.

    The settings are model.cfg. The noise is the same every time. `model` is in eval mode meanwhile,
    and afterwards in the mode that it was in. Collective.
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
    """{metric: mean over all ranks} of {metric: values on this rank}. Collective."""
    sums = collections.defaultdict(float)
    counts = collections.defaultdict(int)
    for values_of_rank in dist.all_gather(found):  # which may lack some metrics
        for name, values in values_of_rank.items():
            sums[name] += sum(values)
            counts[name] += len(values)
    return {name: sums[name] / counts[name] for name in sums}


def evaluation_settings(cfg, args, max_chunk):
    """The settings `cfg` of a training, but for what the command `args` of an evaluation says.

    max_chunk: samples in one forward pass, if the training has not chosen that yet.
    """
    if not args.data and cfg.data == type(cfg).data:  # imported: training has a path there
        raise UserError(
            f"{config.as_word(args.run_dir)}: its data are not known; name some with --data"
        )
    return dataclasses.replace(
        cfg,
        data=args.data or cfg.data,
        val_data="" if args.data else cfg.val_data,
        eval_samples=args.eval_samples,
        seed=args.seed,
        batch_size=1,  # nothing is trained: the training split may be small
        chunk_size=cfg.chunk_size or max_chunk,
    )
