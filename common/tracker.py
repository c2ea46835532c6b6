"""Where figures and samples go: metrics.jsonl, report.html, the console and a logger. Rank 0 alone writes.

    --logger console | tensorboard | "wandb project=shapes [entity=NAME] [name=NAME] [id=ID]"
"""
import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config, dist, report, schedule, store
from common.config import UserError, need

# Loggers

class Logger:
    """Where a run's lines go besides metrics.jsonl. This one is the console, which needs nothing more.

    Another one is a subclass with what it needs of the following, and an entry in LOGGERS, whose key --logger names.
    An error of any method is printed once, and training goes on without the logger.

    needs: (module, package) pairs. options: names that may follow in --logger, as NAME=VALUE.
    __init__(cfg, given, known, step, lines): given: {option: value}. known: `identity` at an earlier start of the run,
        or {}. step: of the run, to go on from. lines: how many were logged up to it.
    identity: {name: plain value} by which the run is known there; a later start with another value is refused.
    log(step, metrics, samples): {name: number} and [("SECTION/NAME", PNG or WAV file, caption), ...].
    file(path): a file of the run: its config, at every start. error(text): what ended it. finish(status): exit status.
    """
    needs, options, identity = (), (), {}

    def __init__(self, *settings):
        pass

    log = file = error = finish = __init__


class TensorBoard(Logger):
    """Event files in RUN/tensorboard; of steps that a resumed run repeats, the package shows the later ones alone."""
    needs = (("tensorboard", "tensorboard"),)

    def __init__(self, cfg, given, known, step, lines):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(Path(cfg.run) / "tensorboard", purge_step=step + 1)

    def log(self, step, metrics, samples):
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for name, path, caption in samples:  # as they are: add_image would encode them again, and has no captions
            content, about = path.read_bytes(), SummaryMetadata(summary_description=caption)
            if path.suffix == ".png":
                width, height = (int.from_bytes(content[i:i + 4], "big") for i in (16, 20))
                media = {"image": Summary.Image(width=width, height=height, encoded_image_string=content)}
            else:
                media = {"audio": Summary.Audio(encoded_audio_string=content, content_type="audio/wav")}
            value = Summary.Value(tag=name, metadata=about, **media)
            self.writer.file_writer.add_summary(Summary(value=[value]), step)
        self.writer.flush()  # a checkpoint may follow, and lines up to it are not made again

    def file(self, path):
        self.writer.add_text(path.name, f"```\n{path.read_text()}\n```")

    def error(self, text):
        self.writer.add_text("error", text)

    def finish(self, status):
        self.writer.close()


class WandB(Logger):
    """A run of Weights & Biases. Its steps are numbers of lines: it drops those that a resumed run makes again."""
    needs, options = (("wandb", "wandb"), ("PIL", "pillow")), ("project", "entity", "name", "id")

    def __init__(self, cfg, given, known, step, lines):
        import wandb
        names = {"name": cfg.run, **known, **given}
        try:
            self.run = wandb.init(**{name: names.get(name) for name in self.options}, config=config.as_json(cfg),
                                  dir=cfg.run, resume="must" if known else "allow",
                                  settings=wandb.Settings(console="off", silent=True))
        except Exception as error:  # no account, no network: the package's own types
            raise UserError(f"--logger wandb: {store.one_line(error)}; is there an account (`wandb login`), a network, "
                            "the run of before? WANDB_MODE=offline needs none") from error
        self.run.define_metric("*", step_metric="step")
        ahead = known.get("ahead", self.run.starting_step)  # lines of a run with a given id that was begun elsewhere
        self.identity = {"project": self.run.project, "entity": self.run.entity, "id": self.run.id, "ahead": ahead}
        self.line, self.media = ahead + lines, {".png": wandb.Image, ".wav": wandb.Audio}

    def log(self, step, metrics, samples):
        shown = {name: self.media[path.suffix](str(path), caption=caption or None) for name, path, caption in samples}
        self.run.log({"step": step, **metrics, **shown}, step=self.line, commit=True)
        self.line += 1

    def file(self, path):
        self.run.save(shutil.copy(path, self.run.dir), base_path=self.run.dir, policy="now")  # else it makes a link

    def error(self, text):
        self.run.alert(title="training ended with an error", text=text)

    def finish(self, status):
        self.run.finish(exit_code=status)


LOGGERS = {"console": Logger, "tensorboard": TensorBoard, "wandb": WandB}
metadata, check_stages, resend = store.metadata, store.check_stages, store.resend  # by this name, too, for scripts


def check(cfg):
    """UserError for a logger, load, init_from, save or metadata that cannot be meant, on whatever machine."""
    store.parse("logger", cfg.logger, LOGGERS)
    store.check(cfg)


def check_logger(cfg, record):
    """`identity` of the logger of the run with the auto_resume.json `record`; UserError if cfg.logger is another."""
    kind, given = store.parse("logger", cfg.logger, LOGGERS)
    known = record.get("logger", {"kind": "console"})
    if not record["checkpoints"]:  # nothing to go on from: it starts anew
        return {}
    if known["kind"] != kind or any(known.get(name, value) != value for name, value in given.items()):
        raise UserError(f"{cfg.run}: was logged with {known}, --logger {cfg.logger} would tear its curves; go on with "
                        f"that, branch off with --load {cfg.run}/{record['checkpoints'][0]['file']} and a new --run, "
                        "or start over with --resume never")
    return known


def prepare(cfg):
    """`cfg` with local files as load and init_from where the run needs them; UserError if anything is missing."""
    kind, given = store.parse("logger", cfg.logger, LOGGERS)
    for module, package in [*LOGGERS[kind].needs, *(pair for saver in store.savers(cfg) for pair in saver.needs)]:
        need(module, f"--logger {cfg.logger}, --save {', '.join(cfg.save)}".removesuffix(", --save "), package)
    return store.prepare(cfg, f"{given.get('entity', '')}/{given.get('project', '')}")


class Tracker:
    """What a run tells: lines and samples to its folder and its logger, copies of what it saves to its savers.

    A context, which tells the logger how the run ended and waits for copies on their way. Rank 0 alone acts. On resume
    lines that will come again are dropped: of later steps, and of an earlier test if nothing else is left to do.
    """

    def __init__(self, run, state, epoch_size=1):
        """run: the open checkpoint.Run; state: the State, at the step it goes on from; epoch_size: in samples."""
        self.enabled, self.run, self.epoch_size, self.cfg = dist.is_main(), run, epoch_size, state.cfg
        self.val_loss, self.failed = math.nan, False
        self.copies_best_checkpoint = any(saver.kind == "checkpoint" and "best" in saver.targets
                                          for saver in store.savers(state.cfg))
        dist.on_main(lambda: self._open(state))

    def _open(self, state):
        cfg, folder = self.cfg, self.run.folder
        kind, given = store.parse("logger", cfg.logger, LOGGERS)
        path, last = folder / "metrics.jsonl", state.step >= cfg.steps
        content = path.read_bytes() if path.exists() else b""
        lines = [line[0] for line in re.finditer(rb'(?m)^\{"step": (\d+)\b.*\}\n', content)
                 if int(line[1]) <= state.step and not (last and b'"test_loss"' in line[0])]
        with checkpoint.replacing(path) as file:
            file.writelines(lines)
        for line in lines:
            self.val_loss = json.loads(line).get("val_loss", self.val_loss)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self.logger = LOGGERS[kind](cfg, given, check_logger(cfg, self.run.record), state.step, len(lines))
        self.run.record["logger"] = {**self.logger.identity, "kind": kind}
        checkpoint.write_json(self.run.record, folder / "auto_resume.json")
        self._tell("file", folder / "config.json")
        self.copies = store.Copies(self.run, cfg, {"step": state.step, "values": self.values(state)})
        self.copies.send()

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics}; what is not finite is written as null, as JSON has no word for it.

        samples: {file in the run folder, PNG or WAV: caption}.
        """
        if self.enabled:
            samples, metrics = {"samples": samples} if samples else {}, store.finite(metrics)
            self.val_loss = metrics.get("val_loss", self.val_loss)
            self.file.write(json.dumps({"step": step, **metrics, **samples}) + "\n")
            self.file.flush()
            section = "test/" if "test_loss" in metrics else "validation/"
            shown = [(section + re.sub(r"^.*/((step_\d+|test)_?)?", "", name), self.run.folder / name, caption)
                     for name, caption in samples.get("samples", {}).items()]  # the same name at every step
            self._tell("log", step, {name: v for name, v in metrics.items() if isinstance(v, (int, float))}, shown)

    def _tell(self, what, *arguments):
        try:
            if not self.failed:
                getattr(self.logger, what)(*arguments)
        except Exception as error:  # of a network, a disk, a package: whatever it is, training goes on
            self.failed = True
            self.say(f"logger {self.cfg.logger} failed: {type(error).__name__}: {store.one_line(error)}; metrics.jsonl "
                     "goes on alone")

    def values(self, state):
        """What the paths of copies may have in braces, {name: value}."""
        seen = state.step * self.cfg.batch_size
        return {**store.metadata(self.cfg), "run": self.run.folder.name, "step": state.step,
                "epoch": seen // self.epoch_size, "samples_seen": seen, "val_loss": self.val_loss,
                "best_val_loss": state.best_val_loss}

    def say(self, text):
        """Print a line above the progress bar."""
        if self.enabled:
            tqdm.write(text)

    def report(self):
        """Write the folder's report.html anew, with what was logged and sampled so far."""
        if self.enabled:
            report.write(self.run.folder)

    def sync(self):
        """Make the lines so far durable: before a checkpoint is committed, which will not make them again."""
        os.fsync(self.file.fileno())

    def send(self):
        """Begin to send copies of what is new: after each save."""
        self.copies.send()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.enabled:
            status = error.code if isinstance(error, SystemExit) else int(bool(error))
            if error and not isinstance(error, SystemExit):
                self._tell("error", f"{kind.__name__}: {error}")
            else:
                self.run.wait()
            self.copies.deliver(self.cfg.timeout_minutes * 30 if dist.world_size() > 1 else None)  # ranks wait for it
            self._tell("finish", status)
            self.file.close()


class Meter:
    """The progress bar, and what has happened since the last log line, summed without waiting for the device."""

    def __init__(self, log, state, desc):
        self.log, self.state, self.named = log, state, set()
        self.begun = dict.fromkeys(("eval", "save"), time.monotonic())  # when each was last due, or training began
        self.bar = progress(total=state.cfg.steps, initial=state.step, desc=desc, unit="step", disable=not log.enabled)
        self.restart()

    def restart(self):
        """Count from here on; the clock, too, which is not to include evaluating and saving."""
        self.step, self.start, self.losses, self.unusable, self.overflows = self.state.step, time.monotonic(), [], [], 0

    def due(self, signals):
        """(whether to evaluate, whether to save, the signal to stop at or None), as rank 0 decides; all ranks call it.

        Due are multiples of cfg.eval_every and cfg.save_every steps since the last line, so many minutes since the last
        time, and the end.
        """
        cfg, step, now, due = self.state.cfg, self.state.step, time.monotonic(), []
        for name in ("eval", "save"):
            every, minutes = getattr(cfg, f"{name}_every"), getattr(cfg, f"{name}_minutes")
            passed = now - self.begun[name]
            due.append(step == cfg.steps or schedule.due(step, self.step, every, passed, minutes))
            self.begun[name] = now if due[-1] else self.begun[name]
        return dist.broadcast((*due, signals[0] if signals else None))

    def add(self, loss_sum, batch):
        """Take in a step: this rank's loss summed over its samples, and its chunks, for the unusable rows in them."""
        self.bar.update()
        self.losses.append(loss_sum)
        self.unusable += [name for chunk in batch for name in chunk["unusable"]]

    def line(self, norm, lr):
        """Log the steps since the last line; returns their mean loss. All ranks call it, and wait for the device."""
        cfg, scaler, step = self.state.cfg, self.state.scaler, self.state.step
        samples = (step - self.step) * cfg.batch_size
        loss, unusable = dist.total([torch.stack(self.losses).sum().item(), len(self.unusable)])
        loss, rate = loss / samples, samples / (time.monotonic() - self.start)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise UserError(f"loss {loss:.4g} and gradient norm {norm.item():.4g} are not both finite at step {step}; "
                            f"lower --lr or --max_grad_norm. The checkpoints of {cfg.run} are from before")
        names = {name for names in dist.gather(self.unusable[:10]) for name in names} if unusable else set()
        if fresh := sorted(names - self.named):
            self.log.say(f"unusable, and replaced by the next row: {', '.join(fresh)}")
        self.named |= names
        scale = {"scale": scaler.get_scale()} if scaler.is_enabled() else {}
        self.log.log(step, samples_seen=step * cfg.batch_size, loss=loss, lr=lr, grad_norm=norm.item(),
                     overflows=self.overflows, unusable_rows=int(unusable), samples_per_s=rate, **scale)
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)
        return loss


@contextlib.contextmanager
def signals():
    """Context in which SIGTERM and Ctrl-C are gathered in a list, which it gives, for the loop to stop when it can."""
    gathered, numbers = [], (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.signal(number, lambda number, _: gathered.append(number)) for number in numbers]
    try:
        yield gathered
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)


def progress(steps=None, **settings):
    """tqdm's progress bar in the house's settings: where nobody watches it move, a line every ten seconds."""
    return tqdm(steps, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 10, **settings)


def show(metrics):
    """`metrics` on one line, numbers at a readable precision."""
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def table(metrics):
    """`metrics` as aligned lines, one a name."""
    return [f"{name:<40} {f'{value:.4f}' if isinstance(value, float) else value}" for name, value in metrics.items()]
