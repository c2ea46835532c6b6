"""Where figures go: the console, metrics.jsonl, one JSON object a line, and report.html. Rank 0 alone writes.

    python -m common.tracker report RUN [RUN ...] [--out FILE]      # the page of a run, or one that compares runs
"""
import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config, dist, report
from common.config import UserError


class Tracker:
    """Logger of a run folder. Lines that come again after resuming at `step` are dropped: those of later steps and, if
    `at_end`, when all that is left to do is to test, those of an earlier test.
    """

    def __init__(self, folder, step, enabled=True, at_end=False):
        self.enabled, self.file = enabled, None
        if not enabled:
            return
        path = Path(folder) / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True)
                    if _step(line) <= step and not (at_end and b'"test_loss"' in line)]
            with checkpoint.replacing(path) as file:
                file.writelines(kept)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self.page = report.Report(folder)

    def log(self, step, **metrics):
        """Append {"step": step, **metrics}; what is not finite is written as null, as JSON has no word for it."""
        if self.enabled:
            line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
            self.file.write(json.dumps({"step": step, **line}) + "\n")
            self.file.flush()

    def say(self, text):
        """Print a line above the progress bar."""
        if self.enabled:
            tqdm.write(text)

    def report(self):
        """Write the folder's report.html anew, with what was logged and sampled so far."""
        if self.enabled:
            self.page.write()

    def sync(self):
        """Make the lines so far durable: before a checkpoint is committed, which will not make them again."""
        if self.enabled:
            os.fsync(self.file.fileno())


class Meter:
    """What has happened since the last log line, summed without waiting for the device."""

    def __init__(self, log, state):
        self.log, self.state, self.named = log, state, set()
        self.restart()

    def restart(self):
        """Count from here on; the clock, too, which is not to include evaluating and saving."""
        self.step, self.start, self.losses = self.state.step, time.monotonic(), []
        self.unusable, self.overflows = [], 0

    def add(self, loss_sum, batch):
        """Take in a step: this rank's loss summed over its samples, and its chunks, for the unusable rows in them."""
        self.losses.append(loss_sum)
        self.unusable += [name for part in batch for name in part["unusable"]]

    def line(self, norm):
        """Log the steps since the last line; returns (loss, samples per second). All ranks call it, and wait here."""
        state, cfg, step = self.state, self.state.cfg, self.state.step
        samples = (step - self.step) * cfg.batch_size
        loss, bad_rows = dist.total([torch.stack(self.losses).sum().item(), len(self.unusable)])
        loss, rate = loss / samples, samples / (time.monotonic() - self.start)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise UserError(f"loss {loss:.4g} and gradient norm {norm.item():.4g} are not both finite at step {step}; "
                            f"lower --lr or --max_grad_norm. The checkpoints of {cfg.run} are from before")
        if bad_rows:
            names = [name for part in dist.gather(self.unusable[:10]) for name in part]
            if fresh := [name for name in dict.fromkeys(names) if name not in self.named]:
                self.named.update(fresh)
                self.log.say(f"unusable, and replaced by the next row: {', '.join(fresh)}")
        self.log.log(step, samples_seen=step * cfg.batch_size, loss=loss,
                     lr=state.optimizers[0].param_groups[0]["lr"], grad_norm=norm.item(),
                     ema_decay=state.average.decay_at(step), overflows=self.overflows, unusable_rows=int(bad_rows),
                     samples_per_s=rate, **({"scale": state.scaler.get_scale()} if state.scaler.is_enabled() else {}))
        return loss, rate


def _step(line):
    """The step of a line of metrics.jsonl, infinite for one that was cut off in the middle."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def progress(steps=None, **settings):
    """tqdm's progress bar in the house's settings: where nobody watches it move, a line every ten seconds."""
    return tqdm(steps, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 10, **settings)


def table(metrics):
    """`metrics` as aligned lines, one a name; those of several numbers of sampling steps T, name@T, share a line."""
    rows = {}
    for name, value in metrics.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        name, at, steps = name.partition("@")
        rows.setdefault(name, []).append(f"{shown} {at}{steps}".rstrip())
    return [f"{name:<30} {'   '.join(values)}" for name, values in rows.items()]


def show(metrics):
    """`metrics` on one line, numbers at a readable precision."""
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def main():
    parser = argparse.ArgumentParser(prog="python -m common.tracker", description="Pages to look at runs.")
    command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "report", help="write RUN/report.html, or a page that compares several runs")
    command.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    command.add_argument("--out", help="file to write (default: RUN/report.html, or report.html)")
    asked = parser.parse_args()
    out = Path(asked.out or (Path(asked.runs[0]) / "report.html" if len(asked.runs) == 1 else "report.html"))
    text = report.compare(asked.runs) if len(asked.runs) > 1 else report.Report(asked.runs[0]).page()
    with checkpoint.replacing(out) as file:
        file.write(text.encode())
    print(f"wrote {out}")


if __name__ == "__main__":
    config.run(main)
