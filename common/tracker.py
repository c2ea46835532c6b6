"""Where figures go: the console, metrics.jsonl, report.html, and TensorBoard or Weights & Biases. Rank 0 alone writes.

    python -m common.tracker report RUN [RUN ...] [--out FILE]      # the page of a run, or one that compares runs
"""
import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import time
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config, dist, report, store
from common.config import UserError

# Loggers: where lines go besides metrics.jsonl. `rows` is how many of its lines a logger has from earlier starts: what
# it lacks it is sent again, and what a resumed run makes anew it is not sent twice.

class Console:
    """Nowhere."""

    def __init__(self, cfg, known, lines, step, at_end):
        """known: `identity` of an earlier start, {} for none; lines: of metrics.jsonl, up to the `step` to go on from.

        at_end: all that is left to do is to test.
        """
        self.identity, self.rows = {"kind": "console"}, len(lines)

    def log(self, index, line, samples):
        """Take line number `index`; samples: [(section, path, caption), ...], pictures (.png) and sounds (.wav)."""

    def file(self, path):
        """Take a file of the run, such as its config."""

    def error(self, text):
        """Take the error that ended the run."""

    def sync(self):
        """Make all so far durable, which a run that goes on from here will not make again."""

    def finish(self, status):
        """End with an exit status."""


class TensorBoard(Console):
    """Event files in RUN/tensorboard. What a resumed run makes anew is marked as void by the package's own means."""

    def __init__(self, cfg, known, lines, step, at_end):
        from torch.utils.tensorboard import SummaryWriter
        super().__init__(cfg, known, lines, step, at_end)
        folder = Path(cfg.run) / "tensorboard"
        purge_step = step if at_end else step + 1  # at the end only the test is made anew, at the last step
        self.identity = {"kind": "tensorboard"}
        begun = any(folder.glob("events.*"))
        self.rows = sum(line["step"] < purge_step for line in lines) if begun else 0
        self.writer = SummaryWriter(folder, purge_step=purge_step if begun else None)

    def log(self, index, line, samples):
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(name, value, line["step"])
        for section, path, caption in samples:  # as they are: add_image would need Pillow to encode them again
            content, about = path.read_bytes(), SummaryMetadata(summary_description=caption)
            if path.suffix == ".png":
                height, width = struct.unpack(">II", content[20:24] + content[16:20])
                content = {"image": Summary.Image(height=height, width=width, colorspace=3,
                                                  encoded_image_string=content)}
            else:
                rate, = struct.unpack("<I", content[24:28])
                content = {"audio": Summary.Audio(sample_rate=rate, num_channels=1, encoded_audio_string=content,
                                                  length_frames=(len(content) - 44) // 2, content_type="audio/wav")}
            value = Summary.Value(tag=f"{section}/{series(path)}", metadata=about, **content)
            self.writer.file_writer.add_summary(Summary(value=[value]), line["step"])

    def file(self, path):
        self.writer.add_text(path.name, f"```\n{path.read_text()}\n```")

    def error(self, text):
        self.writer.add_text("error", text)

    def sync(self):
        self.writer.flush()

    def finish(self, status):
        self.writer.close()


class WandB(Console):
    """A run of Weights & Biases, whose steps are the lines' numbers: WANDB_MODE and the like are the package's.

    What a run makes anew after a kill is the same, so it is not sent again; unless its settings have changed, when it
    is sent behind what is there, which cannot be taken back.
    """

    def __init__(self, cfg, known, lines, step, at_end):
        import wandb
        super().__init__(cfg, known, lines, step, at_end)
        self.wandb, resumed = wandb, bool(step)
        settings = zlib.crc32(json.dumps(config.as_json(cfg)).encode())
        self.identity = {"kind": "wandb", "project": cfg.wandb_project, "entity": cfg.wandb_entity,
                         "id": known.get("id") or os.urandom(4).hex(), "settings": settings}
        try:
            self.run = wandb.init(project=cfg.wandb_project, entity=cfg.wandb_entity or None, id=self.identity["id"],
                                  name=cfg.wandb_name or cfg.run, dir=cfg.run, config=config.as_json(cfg),
                                  resume="must" if resumed and known.get("id") else "allow",
                                  settings=wandb.Settings(console="off", silent=True))
        except Exception as error:  # no account, no network: the package's own types
            raise UserError(f"--logger wandb: {store.one_line(error)}; is there an account (`wandb login`), a network, "
                            "the run of before? WANDB_MODE=offline needs none") from error
        self.run.define_metric("*", step_metric="step")
        offline = self.run.settings.mode in ("offline", "dryrun")
        self.rows = recorded(Path(cfg.run) / "wandb", self.run.id) if offline else self.run.starting_step
        self.ahead = 0  # of the lines' numbers
        if known.get("settings", settings) != settings:
            self.ahead, self.rows = max(0, self.rows - len(lines)), min(self.rows, len(lines))
        self.pictures = importlib.util.find_spec("PIL") is not None
        tqdm.write(f"wandb: run {self.run.id}, {self.run.dir if offline else self.run.url}"
                   + ("" if self.pictures else "; pictures need Pillow: pip install pillow"))

    def log(self, index, line, samples):
        media = {".png": self.wandb.Image, ".wav": self.wandb.Audio}
        shown = {f"{section}/{series(path)}": media[path.suffix](str(path), caption=caption or None)
                 for section, path, caption in samples if path.suffix != ".png" or self.pictures}
        line = {name: value for name, value in line.items() if name != "samples"}
        self.run.log({**line, **shown}, step=index + self.ahead, commit=True)

    def file(self, path):
        own = Path(self.run.dir) / path.name
        shutil.copyfile(path, own)  # as it is now: of a path elsewhere, it would be a link
        self.run.save(str(own), base_path=self.run.dir, policy="now")

    def error(self, text):
        self.run.alert(title="training ended with an error", text=text, level=self.wandb.AlertLevel.ERROR)

    def finish(self, status):
        self.run.finish(exit_code=status)


LOGGERS = {"console": Console, "tensorboard": TensorBoard, "wandb": WandB}


def series(path):
    """The name of a picture or sound that it shares with those of other steps."""
    return (re.sub(r"^(step_\d+|test)_?", "", path.stem) or "samples") + path.suffix


def recorded(folder, run_id):
    """How many lines of a run the files of earlier starts of wandb offline hold, of which a kill may leave little."""
    return max((history.step.num + 1 for path in folder.glob(f"offline-run-*-{run_id}*/*.wandb")
                for history in histories(path)), default=0)


def histories(path):
    """The logged lines, as the package's own records, in a file of wandb offline.

    It is a log in the format of LevelDB (blocks of 32 KiB, in which a record may be cut) of protobuf records.
    """
    from wandb.proto.wandb_internal_pb2 import Record
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum; 1 whole, 2 first, 3 middle, 4 last
        left = 32768 - at % 32768  # of the block, whose end is padded with zeros
        if left < 7 or not kind:
            at += left
            continue
        if at + 7 + size > len(data):  # cut off
            break
        record += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found, record = Record.FromString(record), b""
            if found.WhichOneof("record_type") == "history":
                yield found.history


def check_logger(cfg, record):
    """UserError if a run, of the auto_resume.json `record`, was logged elsewhere than `cfg` says."""
    known = record.get("logger") or {}
    kind = known.get("kind", "console").replace("jsonl", "console")
    if record["checkpoints"] and kind != cfg.logger:
        raise UserError(f"{cfg.run}: was logged with {kind}, --logger {cfg.logger} would tear its curves; go on with "
                        f"--logger {kind}, branch off with --load {cfg.run}/{record['checkpoints'][0]['file']} and a "
                        "new --run, or start over with --resume never")
    for name in ("project", "entity") if record["checkpoints"] and kind == "wandb" else ():
        if known.get(name, "") != getattr(cfg, f"wandb_{name}"):
            raise UserError(f"{cfg.run}: is run {known['id']} of {name} {known.get(name)!r} there, not of "
                            f"--wandb_{name} {getattr(cfg, f'wandb_{name}')!r}; give the same, or a new --run")


class Tracker:
    """What a run tells: lines and samples to its folder and its logger, copies of what it saves to its savers.

    A context, which tells the logger how the run ended and waits for copies on their way. Rank 0 alone acts. Lines that
    come again after resuming are dropped: those of later steps and, when all that is left to do is to test, those of an
    earlier test.
    """

    def __init__(self, run, state, epoch_size=1):
        """run: the open checkpoint.Run; state: the State, at the step it goes on from; epoch_size: in samples."""
        self.enabled, self.epoch_size, self.val_loss, self.run = dist.is_main(), epoch_size, math.nan, run
        self.patience = state.cfg.timeout_minutes * 30 if dist.world_size() > 1 else None  # others wait for this rank
        dist.on_main(lambda: self._open(run, state))

    def _open(self, run, state):
        cfg, step = state.cfg, state.step
        self.folder, at_end = run.folder, step >= cfg.steps
        path = self.folder / "metrics.jsonl"
        raw = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        raw = [line for line in raw if _step(line) <= step and not (at_end and b'"test_loss"' in line)]
        with checkpoint.replacing(path) as file:
            file.writelines(raw)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self.page = report.Report(self.folder)
        lines = [json.loads(line) for line in raw]
        self.count, self.failed, self.verbose = len(lines), False, cfg.verbose
        self.logger = LOGGERS[cfg.logger](cfg, run.record.get("logger") or {}, lines, step, at_end)
        run.record["logger"] = self.logger.identity
        checkpoint.write_json(run.record, self.folder / "auto_resume.json")
        self._tell("file", self.folder / "config.json")
        for index, line in enumerate(lines):
            self.val_loss = line.get("val_loss", self.val_loss)
            self._tell_line(index, line)
        savers = store.savers(cfg)
        for saver in savers:
            saver.ready(self)
        self.outbox = store.Outbox(self.folder, savers, self.say)  # which may have something to send at once

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics}; what is not finite is written as null, as JSON has no word for it.

        samples: {file in the run folder, PNG or WAV: caption}.
        """
        if self.enabled:
            line = {"step": step, **finite(metrics), **({"samples": samples} if samples else {})}
            self.val_loss = line.get("val_loss", self.val_loss)
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            if self.verbose:
                self.say(show({name: value for name, value in line.items() if name != "samples"}))
                for name, caption in (samples or {}).items():
                    self.say(f"    {self.folder / name}  {caption}".rstrip())
            self._tell_line(self.count, line)
            self.count += 1

    def _tell_line(self, index, line):
        if index >= self.logger.rows:
            section = "test" if "test_loss" in line else "validation"
            self._tell("log", index, line, [(section, self.folder / name, caption) for name, caption
                                            in line.get("samples", {}).items() if (self.folder / name).is_file()])

    def _tell(self, what, *arguments):
        """Have the logger do `what`. An error of it is told once, and the logger left alone: training goes on."""
        if self.failed:
            return
        try:
            getattr(self.logger, what)(*arguments)
        except Exception as error:  # of a network, a disk, a package
            self.failed = True
            self.say(f"logger {self.logger.identity['kind']} failed: {type(error).__name__}: {store.one_line(error)}; "
                     "metrics.jsonl goes on alone, and the next start sends the logger what it lacks")

    def values(self, state):
        """What the paths of copies may have in braces, {name: value}."""
        seen = state.step * state.cfg.batch_size
        return {"run": self.folder.name, "step": state.step, "epoch": seen // self.epoch_size, "samples_seen": seen,
                "val_loss": self.val_loss, "best_val_loss": state.best_val_loss}

    def say(self, text):
        """Print a line above the progress bar."""
        if self.enabled:
            tqdm.write(text)

    def report(self):
        """Write the folder's report.html anew, with what was logged and sampled so far."""
        if self.enabled:
            self.page.write()

    def deliver(self):
        """Wait for all that is saved, here and elsewhere: before a run counts as finished, which sends nothing more."""
        if self.enabled:
            self.run.wait()
            self.outbox.finish(self.patience)

    def sync(self):
        """Make the lines so far durable: before a checkpoint is committed, which will not make them again."""
        if self.enabled:
            os.fsync(self.file.fileno())
            self._tell("sync")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if not self.enabled:
            return
        stopped = isinstance(error, SystemExit)
        if error and not stopped:
            self._tell("error", f"{kind.__name__}: {error}")
        try:
            self.run.wait()
        except OSError as failed:
            if not error:
                raise
            self.say(f"{failed}")
        self.outbox.finish(self.patience)
        self._tell("finish", int(error.code or 0) if stopped else int(bool(error)))
        self.file.close()


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


def finite(values):
    """`values` with None for numbers that JSON has no word for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _step(line):
    """The step of a line of metrics.jsonl, infinite for one that was cut off in the middle."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


@contextlib.contextmanager
def signals():
    """Context in which SIGTERM and Ctrl-C are gathered in a list, which it gives, for the loop to stop when it can."""
    gathered = []
    handlers = {number: signal.signal(number, lambda number, _: gathered.append(number))
                for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield gathered
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
