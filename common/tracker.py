"""Where figures go: the console, and metrics.jsonl, one JSON object a line. Rank 0 alone writes."""
import json
import math
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common import checkpoint


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

    def sync(self):
        """Make the lines so far durable: before a checkpoint is committed, which will not make them again."""
        if self.enabled:
            os.fsync(self.file.fileno())


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
