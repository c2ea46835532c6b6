"""Write metrics and samples to metrics.jsonl, report.html, the console and a logger, on rank 0.

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
    """Base class of loggers, which get what metrics.jsonl gets. This one, "console", does nothing.

    To add a logger, write a class with these methods, and add it to LOGGERS under its name in
    --logger. The options in --logger are the arguments of the class. If `log`, `file` or `finish`
    fails, the error is printed, and training continues without the logger.
    """

    def open(self, cfg, folder, known, step):
        """Start logging at `step`; returns {name: plain value}, which identifies the logger's run.

        folder: the run folder. known: the result of an earlier start, or {}. UserError if
        logging cannot start.
        """
        return {}

    def log(self, step, metrics, samples):
        """Log metrics {name: number}, and samples [(SECTION/NAME, PNG or WAV file, caption), …]."""

    def file(self, path):
        """Store a file. It is called with config.json whenever a run starts or resumes."""

    def finish(self, error):
        """End logging. error: what ended the run: Exception, SystemExit (a signal) or None."""


LOGGERS = {"console": Logger}


def make_logger(cfg):
    """The logger that --logger describes; UserError if it is malformed."""
    kinds = LOGGERS
    with contextlib.suppress(ImportError):  # a fork may lack common/interop
        from common.interop import loggers

        kinds = LOGGERS | loggers.LOGGERS
    return config.parse_options("logger", cfg.logger, kinds)


def make_savers(cfg):
    """The savers that --save describes; UserError if it is malformed."""
    if not cfg.save:
        return []
    from common.interop import store

    return store.savers(cfg)


def check(cfg):
    """UserError if --logger or --save is malformed."""
    make_logger(cfg)
    make_savers(cfg)


# Lines and samples


class Tracker(contextlib.AbstractContextManager):
    """Writes metrics and samples to the run folder and the logger, and uploads checkpoints.

    Only rank 0 does this. On resume, lines of steps that will be repeated are dropped. Leaving the
    context finishes the logger and waits for uploads.
    """

    def __init__(self, run, state, repeats_evaluation=True):
        """run: the open RunFolder. state: the State to resume from. Collective.

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
                # The test is also repeated, unless --steps was raised.
                is_last = step >= self.cfg.steps
                is_evaluation = "val_loss" in line or (is_last and "test_loss" in line)
                repeated = repeats_evaluation and is_evaluation and line["step"] == step
                if line["step"] <= step and not repeated:
                    file.write(json.dumps(line).encode() + b"\n")
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (for the whole run)
        # A logger of the same kind continues its run; a new kind starts one.
        self.logger = make_logger(self.cfg)
        kind = shlex.split(self.cfg.logger)[0]
        known = self.run.loggers.get(kind, {}) if step else {}
        identity = self.logger.open(self.cfg, self.run.folder, known, step)
        self.run.loggers = {**self.run.loggers, kind: identity}
        self.run.write_record()

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics} to metrics.jsonl, with null for NaN and infinity.

        samples: {PNG or WAV file in the run folder: caption}. In the logger, a sample has the same
        name at every step, and its folder is the section.
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
        except OSError as error:  # training continues even on a full disk
            self.print(f"{self.path}: {error}; training continues")
        numbers = {name: value for name, value in metrics.items() if line[name] is not None}
        self.call_logger("log", step, numbers, media)

    def call_logger(self, method, *arguments):
        try:
            getattr(self.logger, method)(*arguments)
        except Exception as error:  # from the network, disk or package: training continues
            self.logger = Logger()
            self.print(
                f"logger {self.cfg.logger} failed: {type(error).__name__}: {error}; only "
                "metrics.jsonl is still written"
            )

    def write_page(self):
        """Rewrite report.html. A fork without common/interop has no report."""
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
        """Print a line above the progress bar, unless the terminal is gone."""
        if self.enabled:
            with contextlib.suppress(OSError):
                tqdm.write(text)

    def send(self):
        """Start uploading new files in the background."""
        if self.savers and self.enabled:
            from common.interop import store

            self.copier.submit(store.send, self.savers, self.run)

    def __exit__(self, kind, error, trace):
        if self.enabled:
            with dist.listening():  # torchrun sends SIGTERM once another rank has exited
                self.copier.shutdown()  # waits for uploads
                self.call_logger("finish", error)
                with contextlib.suppress(OSError):  # full disk, already reported
                    self.file.close()
                number = dist.received
            if number and not error:  # a signal: do not start the next stage
                raise dist.Stopped(128 + number)


def read_metrics(path):
    """The intact lines {"step": …} of a metrics.jsonl; [] if there is no file."""
    lines = []
    damaged = []  # line numbers
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # drop an incomplete last line
        try:
            metrics = json.loads(line)
            # TypeError unless the step is a number.
            lines.append({"step": 0 + metrics["step"], **metrics})
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    if damaged:
        config.note(f"{path}: {len(damaged)} damaged lines ignored, first: line {damaged[0]}")
    return lines


# Console


def progress(iterable=None, **settings):
    """A tqdm progress bar, or one line every ten seconds if stderr is not a terminal."""
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(iterable, dynamic_ncols=True, mininterval=interval, **settings)


def print_results(headline, results):
    """Print a headline and a table of `results`, on rank 0 only."""
    if dist.is_main():
        with contextlib.suppress(OSError):  # the terminal is gone
            tqdm.write(f"\n{headline}\n")
            for name, value in results.items():
                text = f"{value:.4f}" if isinstance(value, float) else value
                tqdm.write(f"  {name:<40} {text}")
