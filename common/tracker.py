"""Where metrics and samples go: metrics.jsonl, report.html, the console and a logger, from rank 0.

--logger console | tensorboard | "wandb project=shapes [entity=NAME] [name=NAME] [id=ID]"
"""

import concurrent.futures
import contextlib
import json
import shlex
import sys

from tqdm import tqdm

from common import checkpoint, config, dist
from common.config import UserError

# Loggers


class Logger:
    """Where a run's lines go besides metrics.jsonl. This one is the console, which needs no more.

    Another one has the same methods, and an entry in LOGGERS, whose key --logger names. Its
    arguments are the options in --logger. An error of `log`, `file` or `finish` is printed, and
    training continues without the logger.
    """

    def open(self, cfg, folder, known, step):
        """Start at `step`; returns the identity {name: plain value} of the run there.

        folder: of the run. known: the identity at an earlier start of the run, or {}. UserError.
        """
        return {}

    def log(self, step, metrics, samples):
        """metrics: {name: number}. samples: [(SECTION/NAME, PNG or WAV file, caption), ...]."""

    def file(self, path):
        """Store a file of the run: its config, at every start."""

    def finish(self, error):
        """error: what ended the run (an Exception, or SystemExit after a signal), or None."""


LOGGERS = {"console": Logger}


def make_logger(cfg):
    """The logger that --logger describes; UserError."""
    kinds = LOGGERS
    with contextlib.suppress(ImportError):  # a fork may have no common/interop
        from common.interop import loggers

        kinds = LOGGERS | loggers.LOGGERS
    return config.parse_options("logger", cfg.logger, kinds)


def make_savers(cfg):
    """The savers that --save names; UserError."""
    if not cfg.save:
        return []
    from common.interop import store

    return store.savers(cfg)


def check(cfg):
    """UserError for a logger, or for copies, that are wrong on every machine."""
    make_logger(cfg)
    make_savers(cfg)


# Lines and samples


class Tracker(contextlib.AbstractContextManager):
    """Sends lines and samples to the run's folder and logger, and copies of saves to its savers.

    Rank 0 alone acts. As a context it tells the logger how the run ended, and waits for copies on
    their way. On resume it drops the lines that will come again.
    """

    def __init__(self, run, state, repeats_evaluation=True):
        """run: the open resume.RunFolder. state: the State to resume. Collective.

        repeats_evaluation: True if the loop starts by repeating an evaluation that may already be
        logged.
        """
        self.enabled = dist.is_main()
        self.run = run
        self.cfg = state.cfg
        self.path = run.folder / "metrics.jsonl"
        self.savers = make_savers(state.cfg)
        self.copier = concurrent.futures.ThreadPoolExecutor(1)
        dist.on_main(lambda: self.open(state.step, repeats_evaluation))

    def open(self, step, repeats_evaluation):
        lines = read_metrics(self.path)
        with checkpoint.atomic_write(self.path) as file:
            for line in lines:
                # The test comes again, unless there are more steps now.
                is_last = step >= self.cfg.steps
                is_evaluation = "val_loss" in line or (is_last and "test_loss" in line)
                repeated = repeats_evaluation and is_evaluation and line["step"] == step
                if line["step"] <= step and not repeated:
                    file.write(json.dumps(line).encode() + b"\n")
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (for the whole run)
        # The same kind of logger finds its run there; another one begins with this start.
        self.logger = make_logger(self.cfg)
        kind = shlex.split(self.cfg.logger)[0]
        known = self.run.loggers.get(kind, {}) if step else {}
        identity = self.logger.open(self.cfg, self.run.folder, known, step)
        self.run.loggers = {**self.run.loggers, kind: identity}
        self.run.write_record()

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics} to metrics.jsonl. What is not finite becomes null.

        samples: {file in the run folder, PNG or WAV: caption}. In a logger the folder is their
        section, and their name is the same at every step.
        """
        if not self.enabled:
            return
        line = {"step": step, **config.nan_to_none(metrics)}
        media = []
        if samples:
            line["samples"] = samples
            for name, caption in samples.items():
                tag = name.replace(f"step_{step:08d}", "validation")
                media.append((tag, self.run.folder / name, caption))
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk does not end training
            self.print(f"{self.path}: {error}; training continues")
        numbers = {name: value for name, value in metrics.items() if line[name] is not None}
        self.call_logger("log", step, numbers, media)

    def call_logger(self, method, *arguments):
        try:
            getattr(self.logger, method)(*arguments)
        except Exception as error:  # of a network, a disk, a package: training continues
            self.logger = Logger()
            self.print(
                f"logger {self.cfg.logger} failed: {type(error).__name__}: {error}; "
                "metrics.jsonl continues alone"
            )

    def write_page(self):
        """Write the folder's report.html anew. A fork without common/interop has none."""
        try:
            from common.interop import report
        except ImportError:
            return
        if self.enabled:
            try:
                report.write(self.run.folder, read_metrics(self.path))
            except (OSError, UserError) as error:
                self.print(f"{error}; training continues")

    def print(self, text):
        """Print a line above the progress bar, if the terminal is still there."""
        if self.enabled:
            with contextlib.suppress(OSError):
                tqdm.write(text)

    def send(self):
        """Begin to send copies of what is new, after each save."""
        if self.savers and self.enabled:
            from common.interop import store

            self.copier.submit(store.send, self.savers, self.run)

    def __exit__(self, kind, error, trace):
        if self.enabled:
            with dist.listening():  # torchrun sends SIGTERM when another rank has ended
                self.copier.shutdown()  # wait for copies on their way
                self.call_logger("finish", error)
                with contextlib.suppress(OSError):  # a full disk, which has been told
                    self.file.close()
                number = dist.received
            if number and not error:  # no next stage begins
                raise dist.Stopped(128 + number)


def read_metrics(path):
    """The lines {"step": …} of a metrics.jsonl, if it is there, without those that are damaged."""
    lines = []
    damaged = []  # their numbers
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # without a torn one
        try:
            metrics = json.loads(line)
            # A TypeError unless it is a number.
            lines.append({"step": 0 + metrics["step"], **metrics})
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    if damaged:
        config.note(f"{path}: {len(damaged)} damaged lines are left out, from line {damaged[0]}")
    return lines


# Console


def progress(iterable=None, **settings):
    """tqdm's progress bar. Where stderr is no terminal it is a line every ten seconds."""
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(iterable, dynamic_ncols=True, mininterval=interval, **settings)


def print_results(headline, results):
    """Print a headline, and `results` as a table; rank 0 alone does."""
    if dist.is_main():
        with contextlib.suppress(OSError):  # the terminal is gone
            tqdm.write(f"\n{headline}\n")
            for name, value in results.items():
                text = f"{value:.4f}" if isinstance(value, float) else value
                tqdm.write(f"  {name:<40} {text}")
