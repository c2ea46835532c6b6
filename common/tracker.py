"""Where metrics and samples go: metrics.jsonl, report.html, the console and a logger, from rank 0.

--logger console | tensorboard | "wandb project=shapes [entity=NAME] [name=NAME] [id=ID]"
"""

import concurrent.futures
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common import checkpoint, config, dist, report, store
from common.config import UserError, need

# Loggers


class Logger:
    """Where a run's lines go besides metrics.jsonl. This one is the console, which needs no more.

    Another one is a subclass and an entry in LOGGERS, whose key --logger names. Its arguments are
    the options in --logger, which it keeps as the dict `options`. An error of `log`, `file` or
    `finish` is printed, and training continues without the logger.
    """

    def open(self, cfg, known, step):
        """Start at `step`; returns the identity {name: plain value} of the run there.

        known: the identity at an earlier start of the run, or {}. UserError.
        """
        return {}

    def log(self, step, metrics, samples):
        """metrics: {name: number}. samples: [(SECTION/NAME, PNG or WAV file, caption), ...]."""

    def file(self, path):
        """Store a file of the run: its config, at every start."""

    def finish(self, error):
        """error: what ended the run (an Exception, or SystemExit after a signal), or None."""


class TensorBoard(Logger):
    """Event files in RUN/tensorboard. Of steps that a resumed run repeats, the last ones count."""

    def open(self, cfg, known, step):
        need("tensorboard", "--logger tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(cfg.run_dir, "tensorboard"), purge_step=step + 1)
        return {}

    def log(self, step, metrics, samples):
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for name, path, caption in samples:  # add_image and add_audio would encode them again
            content = path.read_bytes()
            value = Summary.Value(tag=name)
            if path.suffix == ".png":
                value.image.encoded_image_string = content
            else:
                value.audio.encoded_audio_string = content
                value.audio.content_type = "audio/wav"
            self.writer.file_writer.add_summary(Summary(value=[value]), step)
            self.writer.add_text(name, caption, step)
        self.writer.flush()  # a checkpoint may follow, and lines up to it do not come again

    def file(self, path):
        self.writer.add_text(path.name, f"```\n{path.read_text()}\n```")

    def finish(self, error):
        if error:
            self.writer.add_text("error", repr(error))
        self.writer.close()


class WandB(Logger):
    """A run of Weights & Biases. It ignores the steps that a resumed run repeats."""

    def __init__(self, **options):
        """options: those of wandb.init, such as project, entity, name and id."""
        self.options = options

    def open(self, cfg, known, step):
        wandb = need("wandb", "--logger wandb")
        try:
            self.run = wandb.init(
                **{"name": cfg.run_dir, **known, **self.options},
                config=config.as_json(cfg),
                dir=cfg.run_dir,
                resume="must" if known else "allow",
            )
        except Exception as error:  # no account, no network: the package's own types
            raise UserError(
                f"--logger wandb: {error}; is there an account (`wandb login`), a "
                "network, the run to resume? WANDB_MODE=offline needs none"
            ) from error
        self.media = {".png": wandb.Image, ".wav": wandb.Audio}
        return {name: getattr(self.run, name) for name in ("project", "entity", "id")}

    def log(self, step, metrics, samples):
        for name, path, caption in samples:
            metrics[name] = self.media[path.suffix](str(path), caption=caption)
        self.run.log(metrics, step=step)

    def file(self, path):
        self.run.save(path, base_path=path.parent, policy="now")

    def finish(self, error):
        if isinstance(error, Exception):
            self.run.alert(title="training ended with an error", text=repr(error))
        self.run.finish(exit_code=int(error is not None))


LOGGERS = {"console": Logger, "tensorboard": TensorBoard, "wandb": WandB}


def check(cfg):
    """UserError for a logger, copies or metadata that are wrong on every machine."""
    logger = store.parse("logger", cfg.logger, LOGGERS)
    for saver in store.savers(cfg):
        if isinstance(saver, store.WandBSaver) and not isinstance(logger, WandB):
            raise UserError(
                "--save wandb: copies are files of the run there; it needs --logger wandb"
            )


def check_logger(cfg, record):
    """(the logger that cfg names, its identity in auto_resume.json's `record`, {} for a new run).

    UserError if the run was logged by another logger, or as another run there.
    """
    logger = store.parse("logger", cfg.logger, LOGGERS)
    if not record["checkpoints"]:
        return logger, {}
    known = dict(record.get("logger", {"kind": "console"}))
    given = {"kind": cfg.logger.split()[0], **getattr(logger, "options", {})}
    if any(known.get(name, value) != value for name, value in given.items()):
        raise UserError(
            f"{cfg.run_dir}: was logged with {known}, --logger {cfg.logger} would "
            "split its curves; continue with that, branch off with --load "
            f"{cfg.run_dir}/{record['checkpoints'][0]['file']} and a new --run_dir, or "
            "start over with --resume never"
        )
    del known["kind"]
    return logger, known


class Tracker:
    """Sends lines and samples to the run's folder and logger, and copies of saves to its savers.

    Rank 0 alone acts. As a context it tells the logger how the run ended, and waits for copies on
    their way. On resume it drops the lines that will come again: those of later steps, and tests.
    """

    def __init__(self, run, state):
        """run: the open checkpoint.RunFolder. state: the State to resume."""
        self.enabled = dist.is_main()
        self.run = run
        self.cfg = state.cfg
        self.savers = store.savers(state.cfg)
        self.copies_best_checkpoint = any(
            saver.kind == "checkpoint" and saver.save_best_to for saver in self.savers
        )
        self.copier = concurrent.futures.ThreadPoolExecutor(1)
        dist.on_main(lambda: self.open(state.logged_step))

    def open(self, step):
        path = self.run.folder / "metrics.jsonl"
        lines = report.read_metrics(path)  # not torn ones
        with checkpoint.atomic_write(path) as file:
            for line in lines:
                if line["step"] <= step and "test_loss" not in line:
                    file.write(json.dumps(line).encode() + b"\n")
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)

        self.logger, known = check_logger(self.cfg, self.run.record)
        identity = self.logger.open(self.cfg, known, step)
        self.run.record["logger"] = {"kind": self.cfg.logger.split()[0], **identity}
        checkpoint.write_json(self.run.record, self.run.folder / "auto_resume.json")
        self.call_logger("file", self.run.folder / "config.json")
        self.send()

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics} to metrics.jsonl. What is not finite becomes null.

        samples: {file in the run folder, PNG or WAV: caption}. In a logger the folder is their
        section, and their name is the same at every step.
        """
        if not self.enabled:
            return
        metrics = checkpoint.finite(metrics)
        line = {"step": step, **metrics}
        numbers = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float))
        }
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
            self.print(f"{error}; training continues")
        self.call_logger("log", step, numbers, media)

    def call_logger(self, method, *arguments):
        try:
            if self.logger:
                getattr(self.logger, method)(*arguments)
        except Exception as error:  # of a network, a disk, a package: training continues
            self.logger = None
            self.print(
                f"logger {self.cfg.logger} failed: {type(error).__name__}: {error}; "
                "metrics.jsonl continues alone"
            )

    def values(self, state):
        """{name: value} of what may stand in braces in the paths of copies."""
        return store.path_values(self.cfg, state.step, state.best_val_loss)

    def print(self, text):
        """Print a line above the progress bar."""
        if self.enabled:
            tqdm.write(text)

    def report(self):
        """Write the folder's report.html anew. An error of its files does not end training."""
        if self.enabled:
            try:
                report.write(self.run.folder)
            except (OSError, UserError) as error:
                self.print(f"{error}; training continues")

    def sync(self):
        """Make the lines so far durable. A checkpoint follows, and they do not come again."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            error.filename = self.file.name
            raise

    def send(self):
        """Begin to send copies of what is new, after each save; returns a Future."""
        return self.copier.submit(store.send, self.savers, self.run)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.enabled:
            if not isinstance(error, Exception):
                self.run.wait()
                self.send().result()
            self.call_logger("finish", error)
            self.file.close()


def progress(steps=None, **settings):
    """tqdm's progress bar. Where stderr is no terminal it is a line every ten seconds."""
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(steps, dynamic_ncols=True, mininterval=interval, **settings)


def format_table(metrics):
    """`metrics` as aligned lines, one a name."""
    return [
        f"{name:<40} {value:.4f}" if isinstance(value, float) else f"{name:<40} {value}"
        for name, value in metrics.items()
    ]


def print_results(headline, results, command=""):
    """Print a headline, `results` as a table, and the command to run next; rank 0 alone does."""
    if dist.is_main():
        tqdm.write("\n  ".join([f"\n{headline}\n", *format_table(results)]))
        if command:
            tqdm.write(f"\nNext: python {command}")
