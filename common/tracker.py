"""Where figures and samples go: metrics.jsonl, report.html, the console and a logger. Rank 0 alone writes.

    --logger console | tensorboard | "wandb project=shapes [entity=NAME] [name=NAME] [id=ID]"
"""
import concurrent.futures
import contextlib
import json
import math
import os
import re
import shutil
import struct
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
    identity: {name: plain value} by which the run is known there. A later start with another value is refused.
    log(step, metrics, samples): {"GROUP/NAME": number} and [("GROUP/NAME", PNG or WAV file, caption), ...]; the
        groups are train, validation and test.
    file(path): a file of the run: its config, at every start. finish(status, error): exit status, and what ended it.
    """
    needs, options, identity = (), (), {}

    def __init__(self, *settings):
        pass

    log = file = finish = __init__


class TensorBoard(Logger):
    """Event files in RUN/tensorboard. Of steps that a resumed run repeats, the package shows the later ones."""
    needs = (("tensorboard", "tensorboard"),)

    def __init__(self, cfg, given, known, step, lines):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(Path(cfg.run_dir) / "tensorboard", purge_step=step + 1)

    def log(self, step, metrics, samples):
        from tensorboard.compat.proto.summary_pb2 import Summary
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for name, path, caption in samples:  # add_image and add_audio have no captions, and would encode them again
            value, content = Summary.Value(tag=name), path.read_bytes()
            value.metadata.summary_description = caption
            if path.suffix == ".png":
                value.image.encoded_image_string = content
                value.image.width, value.image.height = struct.unpack(">II", content[16:24])
            else:
                value.audio.encoded_audio_string, value.audio.content_type = content, "audio/wav"
            self.writer.file_writer.add_summary(Summary(value=[value]), step)
        self.writer.flush()  # a checkpoint may follow, and lines up to it are not made again

    def file(self, path):
        self.writer.add_text(path.name, f"```\n{path.read_text()}\n```")

    def finish(self, status, error):
        if error:
            self.writer.add_text("error", error)
        self.writer.close()


class WandB(Logger):
    """A run of Weights & Biases. Its steps are numbers of lines: it drops those that a resumed run makes again."""
    needs, options = (("wandb", "wandb"), ("PIL", "pillow")), ("project", "entity", "name", "id")

    def __init__(self, cfg, given, known, step, lines):
        import wandb
        names = {"name": cfg.run_dir, **known, **given}
        try:
            self.run = wandb.init(**{name: names.get(name) for name in self.options}, config=config.as_json(cfg),
                                  dir=cfg.run_dir, resume="must" if known else "allow",
                                  settings=wandb.Settings(console="off", silent=True))
        except Exception as error:  # no account, no network: the package's own types
            raise UserError(f"--logger wandb: {error}; is there an account (`wandb login`), a network, "
                            "the run of before? WANDB_MODE=offline needs none") from error
        self.run.define_metric("*", step_metric="step")
        self.identity = {"project": self.run.project, "entity": self.run.entity, "id": self.run.id}
        self.line, self.media = lines, {".png": wandb.Image, ".wav": wandb.Audio}

    def log(self, step, metrics, samples):
        shown = {name: self.media[path.suffix](str(path), caption=caption or None) for name, path, caption in samples}
        self.run.log({"step": step, **metrics, **shown}, step=self.line, commit=True)
        self.line += 1

    def file(self, path):
        self.run.save(shutil.copy(path, self.run.dir), base_path=self.run.dir, policy="now")  # else it makes a link

    def finish(self, status, error):
        if error:
            self.run.alert(title="training ended with an error", text=error)
        self.run.finish(exit_code=status)


LOGGERS = {"console": Logger, "tensorboard": TensorBoard, "wandb": WandB}
metadata, check_stages, resend = store.metadata, store.check_stages, store.resend  # by this name, too, for scripts


def check(cfg):
    """UserError for a logger, save or metadata that is wrong on every machine."""
    store.parse("logger", cfg.logger, LOGGERS)
    store.check(cfg)


def check_logger(cfg, record):
    """Identity of the logger in auto_resume.json's `record`, {} for a new run; UserError if cfg.logger is another."""
    kind, given = store.parse("logger", cfg.logger, LOGGERS)
    known = record.get("logger", {"kind": "console"})
    if not record["checkpoints"]:
        return {}
    if known["kind"] != kind or any(known.get(name, value) != value for name, value in given.items()):
        raise UserError(f"{cfg.run_dir}: was logged with {known}, --logger {cfg.logger} would tear its curves; go on "
                        f"with that, branch off with --load {cfg.run_dir}/{record['checkpoints'][0]['file']} and a new "
                        "--run_dir, or start over with --resume never")
    return known


def prepare(cfg):
    """`cfg` with local files as load and init_from where the run needs them; UserError if anything is missing."""
    kind, given = store.parse("logger", cfg.logger, LOGGERS)
    for flag, place in (("logger", LOGGERS[kind]), *(("save", saver) for saver in store.savers(cfg))):
        for module, package in place.needs:
            need(module, f"--{flag}", package)
    return store.prepare(cfg, f"{given.get('entity', '')}/{given.get('project', '')}")


class Tracker:
    """Sends lines and samples to the run's folder and its logger, and copies of what it saves to its savers.

    Rank 0 alone acts. As a context it tells the logger how the run ended, and waits for copies on their way. On resume
    it drops lines that will come again: of later steps, and of an earlier test if only the test is left to do.
    """

    def __init__(self, run, state, epoch_size=1):
        """run: the open checkpoint.Run; state: the State, at the step it goes on from; epoch_size: in samples."""
        self.enabled, self.run, self.epoch_size, self.cfg = dist.is_main(), run, epoch_size, state.cfg
        self.failed, self.savers = False, store.savers(state.cfg)
        self.copies_best_checkpoint = any(s.kind == "checkpoint" and "best" in s.targets for s in self.savers)
        self.thread = concurrent.futures.ThreadPoolExecutor(1)  # sends copies
        dist.on_main(lambda: self._open(state))

    def _open(self, state):
        cfg, folder = self.cfg, self.run.folder
        kind, given = store.parse("logger", cfg.logger, LOGGERS)
        path, last = folder / "metrics.jsonl", state.logged_step >= cfg.steps
        content = path.read_bytes() if path.exists() else b""
        lines = [line[0] for line in re.finditer(rb'(?m)^\{"step": (\d+)\b.*\}\n', content)
                 if int(line[1]) <= state.logged_step and not (last and b'"test_loss"' in line[0])]
        with checkpoint.replacing(path) as file:
            file.writelines(lines)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        known = check_logger(cfg, self.run.record)
        self.logger = LOGGERS[kind](cfg, given, known, state.logged_step, len(lines))
        self.run.record["logger"] = {**self.logger.identity, "kind": kind}
        self.run.record["start"] = {"file": "config.json", "step": state.step, "values": self.values(state)}
        checkpoint.write_json(self.run.record, folder / "auto_resume.json")
        self._tell("file", folder / "config.json")
        self.send()

    def log(self, step, samples=None, **metrics):
        """Append {"step": step, **metrics} to metrics.jsonl. What is not finite becomes null.

        samples: {file in the run folder, PNG or WAV: caption}.
        """
        if self.enabled:
            samples, metrics = {"samples": samples} if samples else {}, store.finite(metrics)
            with self.tolerated():
                self.file.write(json.dumps({"step": step, **metrics, **samples}) + "\n")
                self.file.flush()
            group = "test/" if "test_loss" in metrics else "validation/" if "val_loss" in metrics else "train/"
            shown = [(group + re.sub(r"^.*/((step_\d+|test)_?)?", "", name), self.run.folder / name, caption)
                     for name, caption in samples.get("samples", {}).items()]  # the same name at every step
            numbers = {group + re.sub("^(val|test)_", "", name): value for name, value in metrics.items()
                       if isinstance(value, (int, float))}
            self._tell("log", step, numbers, shown)

    def _tell(self, what, *arguments):
        try:
            if not self.failed:
                getattr(self.logger, what)(*arguments)
        except Exception as error:  # of a network, a disk, a package: whatever it is, training goes on
            self.failed = True
            self.say(f"logger {self.cfg.logger} failed: {type(error).__name__}: {error}; metrics.jsonl goes on alone")

    def values(self, state):
        """{name: value} of what may stand in braces in the paths of copies."""
        seen = state.step * self.cfg.batch_size
        return {**store.metadata(self.cfg), "run": self.run.folder.as_posix().lstrip("/"), "step": state.step,
                "epoch": seen // self.epoch_size, "samples_seen": seen, "best_val_loss": state.best_val_loss}

    def say(self, text):
        """Print a line above the progress bar."""
        if self.enabled:
            tqdm.write(text)

    def evaluated(self, step, losses, figures):
        """Print losses on a line, and the other figures of an evaluation below it."""
        self.say("\n    ".join([f"step {step}: {show(losses)}", *table(figures)]))

    def report(self):
        """Write the folder's report.html anew, with what was logged and sampled so far."""
        if self.enabled:
            with self.tolerated():
                report.write(self.run.folder)

    @contextlib.contextmanager
    def tolerated(self):
        """Context in which an error of the disk is printed, and training goes on."""
        try:
            yield
        except OSError as error:
            self.say(f"{error}; training goes on")

    def sync(self):
        """Make the lines so far durable. A checkpoint is committed next, and after it they do not come again."""
        os.fsync(self.file.fileno())

    def send(self):
        """Begin to send copies of what is new, after each save; returns a Future."""
        return self.thread.submit(store.send, self.savers, self.run)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.enabled:
            status, text = getattr(error, "code", 0), ""
            if error and not isinstance(error, SystemExit):
                status, text = 1, f"{kind.__name__}: {error}"
            else:
                self.run.wait()
            self.send().result()
            self._tell("finish", status, text)
            self.file.close()


class Meter:
    """The progress bar, and sums since the last log line, taken without waiting for the device.

    As a context, within that of dist.stop_signals, it saves where the ranks are after a signal, and
    ends them.
    """

    def __init__(self, log, state, desc):
        self.log = log
        self.state = state
        self.named = set()
        self.begun = dict.fromkeys(("eval", "save"), time.monotonic())  # when each was last due, or training began
        self.bar = progress(total=state.cfg.steps, initial=state.step, desc=desc, unit="step", disable=not log.enabled)
        self.restart()
        self.step = state.logged_step
        self.earlier = state.unlogged
        state.unlogged = dict(checkpoint.NOTHING_UNLOGGED)
        self.norm = self.earlier["grad_norm"]
        self.overflows = self.earlier["overflows"]

    def restart(self):
        """Count from here on. The clock starts anew, too: it leaves out evaluating and saving."""
        self.step = self.state.step
        self.start = time.monotonic()
        self.earlier = checkpoint.NOTHING_UNLOGGED
        self.losses = []
        self.norm = 0.0
        self.unusable = []
        self.overflows = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.bar.close()
        if isinstance(error, dist.Stopped):
            self.save()
            self.log.say(f"stopped by {error} at step {self.state.step}, all saved; "
                         "the same command goes on")
            raise SystemExit(128 + error.number)
        if error is None:  # a signal may have come after the last step: the next stage does not begin
            try:
                dist.stop_signals.agree()
            except dist.Stopped as stopped:
                raise SystemExit(128 + stopped.number) from None

    def save(self):
        """Save at any step, with what is not logged yet. So the resumed run logs the same lines."""
        losses, unusable = self.totals()
        self.check_steps(losses)
        self.state.unlogged = {
            "losses": losses,
            "grad_norm": float(self.norm),
            "unusable": unusable,
            "overflows": self.overflows,
        }
        self.log.run.commit(self.state, self.log)
        self.log.run.wait()

    def line_due(self):
        """Whether to log now: every cfg.log_every steps, and at the end."""
        cfg, step = self.state.cfg, self.state.step
        return step > self.step and (step % cfg.log_every == 0 or step == cfg.steps)

    def due(self):
        """(whether to evaluate, whether to save), decided by rank 0's clock; all ranks call it.

        Each is due at multiples of cfg.eval_every or cfg.save_every steps since the last line, when its minutes have
        passed since it was last due, and at the end.
        """
        cfg, step, now, due = self.state.cfg, self.state.step, time.monotonic(), []
        for name in ("eval", "save"):
            every, minutes = getattr(cfg, f"{name}_every"), getattr(cfg, f"{name}_minutes")
            passed = now - self.begun[name]
            due.append(step == cfg.steps or schedule.due(step, self.step, every, passed, minutes))
            self.begun[name] = now if due[-1] else self.begun[name]
        return dist.broadcast(due)

    def add(self, loss_sum, norm, batch):
        """Count a step. loss_sum: this rank's, summed over its samples; norm: of the gradients.

        batch: this rank's chunks, with unusable rows.
        """
        self.bar.update()
        self.losses.append(loss_sum)
        self.norm = norm
        self.unusable += [name for chunk in batch for name in chunk["unusable"]]

    def check_steps(self, losses):
        """`check_finite` for the losses of the steps since the last line, and the last gradient."""
        bad = self.state.step
        for step, loss in reversed([*enumerate(losses, self.step + 1)]):
            if not math.isfinite(loss):
                bad = step
        self.check_finite([*losses, float(self.norm)], bad)

    def check_finite(self, values, step):
        """UserError on every rank unless losses or gradients of step number `step` are finite; all ranks call it.

        The weights before that step are no good then, so a checkpoint of them is not gone on from.
        """
        if not all(map(math.isfinite, values)):
            good = dist.on_main(lambda: self.log.run.forget(step - 1))
            dist.fail(f"{self.state.cfg.run_dir}: loss or gradient is not finite at step {step}; lower --lr or "
                      f"--max_grad_norm. The same command goes on from {good or 'the start: no checkpoint is good'}")

    def totals(self):
        """([loss of each step since the last line, summed over samples], unusable rows) of all."""
        here = torch.stack(self.losses).tolist() if self.losses else []
        *losses, unusable = dist.total([*here, len(self.unusable)])
        if unusable:
            names = {name for names in dist.gather(self.unusable[:10]) for name in names}
            if fresh := sorted(names - self.named):
                self.log.say(f"unusable, and replaced by the next row: {', '.join(fresh)}")
            self.named |= names
        return self.earlier["losses"] + losses, self.earlier["unusable"] + int(unusable)

    def line(self):
        """Log the steps since the last line; returns their mean loss. All ranks call it, and wait for the device."""
        cfg, scaler, step = self.state.cfg, self.state.scaler, self.state.step
        losses, unusable = self.totals()
        self.check_steps(losses)
        lr = schedule.of_config(step - 1, cfg)
        loss = sum(losses) / (len(losses) * cfg.batch_size)
        rate = len(self.losses) * cfg.batch_size / (time.monotonic() - self.start)
        scale = {"scale": scaler.get_scale()} if scaler.is_enabled() else {}
        self.log.log(step, samples_seen=step * cfg.batch_size, loss=loss, lr=lr, grad_norm=float(self.norm),
                     overflows=self.overflows, unusable_rows=unusable, samples_per_s=rate, **scale)
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)
        return loss


def progress(steps=None, **settings):
    """tqdm's progress bar. Where stderr is no terminal it is a line every ten seconds."""
    return tqdm(steps, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 10, **settings)


def show(metrics):
    """`metrics` on one line, numbers at a readable precision."""
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def table(metrics):
    """`metrics` as aligned lines, one a name."""
    return [f"{name:<40} {f'{value:.4f}' if isinstance(value, float) else value}" for name, value in metrics.items()]


def announce(headline, results, command=""):
    """Print a headline, `results` as a table, and the command that goes on from here; rank 0 alone does."""
    if dist.is_main():
        following = [f"\nNext: python {command}"] * bool(command)
        print("\n".join([f"\n{headline}\n", *(f"  {line}" for line in table(results)), *following]), flush=True)
