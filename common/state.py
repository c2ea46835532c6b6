"""What a training run is made of and how it goes to disk and back: the part that is the same in every script."""
import dataclasses
import inspect
import json
from pathlib import Path

from common import accumulate, amp, checkpoint, config, dist, ema, optim, schedule, store, tracker
from common.config import UserError, need


class State:
    """What a run is made of and a checkpoint holds: weights, average, optimizers, scaler, step, best validation loss.

    `trained` is the module whose parameters are trained, averaged and saved: the model itself, or its LoRA adapters.
    The forward and backward passes stay in the script:

        state.set_rate()
        ...  # state.scaler.scale(loss * chunk.weight).backward() for each chunk
        norms, taken = state.advance()
    """

    def __init__(self, cfg, model, device, identity, facts, trained=None):
        """cfg: the script's Config, with the common fields; model: on `device` already.

        identity: facts by which the run is known again, {name: plain value}; what must not change while it goes on.
        facts: plain values for every file the run writes, what it takes to make the model besides the config.
        """
        self.cfg, self.model, self.trained, self.device = cfg, model, model if trained is None else trained, device
        self.identity, self.facts = identity, {**facts, "metadata": store.metadata(cfg)}
        self.versions = checkpoint.versions(inspect.getfile(type(cfg)))  # the script is the file that has the Config
        self.optimizers = optim.make(self.trained, cfg.optimizer, cfg.lr, cfg.weight_decay, (cfg.beta1, cfg.beta2),
                                     cfg.eps)
        self.scaler = amp.scaler(device, cfg.precision)
        self.average = ema.EMA(self.trained, cfg.ema_update_every, decay=cfg.ema_decay, warmup=cfg.ema_warmup,
                               power=cfg.ema_power, inv_gamma=cfg.ema_inv_gamma, min_decay=cfg.ema_min_decay,
                               update_after=cfg.ema_update_after)
        self.average.to("cpu" if cfg.ema_on_host else device, pin_memory=cfg.ema_on_host)
        self.step, self.best_val_loss = 0, float("inf")
        if dist.is_main() and device.type == "cpu":  # two moments to come, and the first copy of weights, average, both
            dist.touch_memory(6 * sum(p.numel() * p.element_size() for p in self.trained.parameters()))

    def state(self):
        """The contents of a checkpoint, with the tensors themselves, not copies."""
        return {"model": self.trained.state_dict(), "ema": self.average.state_dict(),
                "scaler": self.scaler.state_dict(), "optimizers": [opt.state_dict() for opt in self.optimizers],
                "step": self.step, "best_val_loss": self.best_val_loss, "identity": self.identity,
                "config": config.as_json(self.cfg), "versions": self.versions, **self.facts}

    def averaged(self, **extra):
        """The contents of model.pt and best.pt: the averaged weights, and what is needed to use them."""
        return {"model": self.average.state_dict(), "config": config.as_json(self.cfg), "step": self.step,
                "versions": self.versions, **self.facts, **extra}

    def export(self, run, name, **extra):
        """Rank 0 begins to write `averaged` to the open `run` as `name`, which `run.wait` awaits; its future."""
        return run.write(self.averaged(**extra), run.folder / name) if dist.is_main() else None

    def keep_best(self, val_loss, run, log):
        """Export best.pt, and send the copies asked for, if `val_loss` is the lowest so far."""
        if val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            written = self.export(run, "best.pt", val_loss=val_loss)
            if dist.is_main():
                self.share("best", {"model": (written, run.folder / "best.pt")}, run, log)

    def share(self, event, files, run, log):
        """Have the savers of `log` send what they want of an `event`, "latest" or "best", once it is written.

        files: {kind: (future that writes it, file)} of what is written anyway; other kinds are written for this alone.
        """
        if not (kinds := log.outbox.kinds(event)):
            return
        values = log.values(self)
        about = {"config.json": config.as_json(self.cfg), "metadata.json": {
            **self.facts["metadata"], **tracker.finite(values), "versions": self.versions}}
        about = {name: json.dumps(part, indent=2) + "\n" for name, part in about.items()}
        for kind in sorted(kinds):
            if kind in files:
                written, file = files[kind]
            else:
                file = log.outbox.folder / f"{event}_{kind}.pt"
                written = run.write(self.averaged() if kind == "model" else self.state(), file)
            run.later(f"{event} {kind}", log.outbox.post, written, event, kind, file, values, about,
                      passing=kind not in files)

    def start_from(self, path, strict=True):
        """Take the weights, and nothing else, of a model.pt or a checkpoint; not `strict`: those that fit."""
        load_weights(self.trained, checkpoint.load(path), path, strict)
        self.average.load_state_dict(self.trained.state_dict())

    def load(self, state, path):
        """Take up the tensors and the step of the checkpoint `state`, which is of the file `path`."""
        load_weights(self.trained, state, path)
        self.average.load_state_dict(state["ema"])
        optim.load(self.optimizers, state["optimizers"])
        self.step = state["step"]

    def restore(self, path):
        """Load the checkpoint `path`; returns notes on what has changed. The rate and the rest follow from the step."""
        state = checkpoint.load(path)
        if "identity" not in state:
            raise UserError(f"{path}: weights without the state of a run; start from them with --init_from, not --load")
        check_identity(self.cfg, state["identity"], self.identity, path)
        self.load(state, path)
        best = Path(self.cfg.run) / "best.pt"  # another run's best is not in this one's folder
        if Path(path).parent.parent == Path(self.cfg.run):
            self.best_val_loss = state["best_val_loss"]
        elif best.is_file():
            self.best_val_loss = checkpoint.load(best)["val_loss"]
        now = config.as_json(self.cfg)
        notes = [f"resuming {path} at step {self.step} of {self.cfg.steps}",
                 amp.load_scaler(self.scaler, state["scaler"])]
        return notes + [f"{name} changed from {then} to {now[name]}" for name, then in state["config"].items()
                        if name in now and now[name] != then]

    def commit(self, run, log):
        """Rank 0 begins to commit a checkpoint to the open `run`, after the lines of `log`, which `run.wait` awaits.

        RuntimeError if the ranks differ.
        """
        dist.check_in_step(self.model, self.step)
        if dist.is_main():
            log.sync()
            written = run.begin(self.step, self.state(), self.cfg.keep, world_size=dist.world_size(),
                                identity=self.identity)
            self.share("latest", {"checkpoint": (written, run.folder / checkpoint.file_of(self.step))}, run, log)

    def set_rate(self):
        """Give the optimizers the learning rate of the step to come."""
        cfg = self.cfg
        lr = schedule.learning_rate(self.step, cfg.lr, cfg.warmup_steps, cfg.steps, cfg.cosine)
        schedule.set_learning_rate(self.optimizers, lr)

    def advance(self):
        """One step with the gradients at hand, which are then gone; a step that overflowed did not happen.

        Returns (gradient norms (n,) of the n optimizers, whether the step was taken).
        """
        norms, taken = self.try_step(self.optimizers, self.cfg.max_grad_norm)
        if taken:
            self.follow()
        return norms, taken

    def try_step(self, optimizers, max_grad_norm):
        """The part of `advance` that may overflow, for some `optimizers`, with a norm for all or one for each."""
        norms, taken = amp.step(self.scaler, optimizers, max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if not taken and self.scaler.get_scale() < 2 ** -20:
            raise UserError(f"step {self.step}: gradients overflow fp16 at any scale; use --precision bf16 or a lower "
                            "--lr")
        return norms, taken

    def follow(self):
        """The part of `advance` that follows a step taken: the count and the average."""
        self.step += 1
        self.average.update(self.step)


def check_start(cfg):
    """What can be checked before anything is read; returns the config with a local path as init_from.

    UserError if the batch cannot be cut for the ranks, a package is missing, or a file to start from cannot be had.
    """
    try:
        accumulate.plan(cfg.batch_size, cfg.chunk_size, 0, dist.world_size())
    except ValueError as error:
        raise UserError(str(error)) from error
    if cfg.logger != "console":
        need(cfg.logger, f"--logger {cfg.logger}")
    for saver in store.savers(cfg):
        saver.ready(None)
    begun = bool(cfg.resume == "auto" and checkpoint.record_of(cfg.run)["checkpoints"])
    if not begun and not cfg.load_only_auto_resume:
        store.fetch(cfg.load, cfg)
    if not begun or getattr(cfg, "lora_rank", 0):  # else the weights to start from are not needed any more
        cfg = dataclasses.replace(cfg, init_from=store.fetch(cfg.init_from, cfg, again=not begun))
    return cfg


def resume_point(cfg, run, identity):
    """(checkpoint to go on from or None, results of a run that is finished or None, notes) of the open `run`."""
    tracker.check_logger(cfg, run.record)
    newest, notes = run.newest(another=bool(cfg.load))
    resume_from = None
    if newest:
        resume_from = str(run.folder / newest["file"])
        check_identity(cfg, run.record.get("identity", {}), identity, run.folder)
        earlier = (step for step in run.record.get("resumed", ()) if step < newest["step"])
        run.record["resumed"] = [*earlier, newest["step"]] if newest["step"] < cfg.steps else [*earlier]
    elif cfg.load and (run.record["checkpoints"] or not cfg.load_only_auto_resume):
        resume_from = store.fetch(cfg.load, cfg, again=bool(run.record["checkpoints"]))  # else `check_start` has it
    elif cfg.load:
        notes.append(f"a new run, for which --load {cfg.load} is not used, with --load_only_auto_resume")
    finished = run.record["finished"] if newest and newest["step"] >= cfg.steps else None
    return resume_from, finished, notes


def check_identity(cfg, found, expected, where):
    """UserError unless the run `found` is the one `expected`; a setting younger than that run counts as its default."""
    found = {field.name: field.default for field in dataclasses.fields(cfg)} | found

    def plain(facts):  # what has been through JSON has lists for tuples
        return {name: list(v) if isinstance(v, tuple) else v for name, v in facts.items()}
    checkpoint.check_identity(plain(found), plain(expected), where)


def load_weights(module, state, path, strict=True):
    """Load `state["model"]` into `module`; if it does not fit, UserError, or, not `strict`, what does fit of it."""
    own, found = module.state_dict(), state["model"]
    fits = {name: value for name, value in found.items() if name in own and own[name].shape == value.shape}
    wrong = sorted((own.keys() | found.keys()) - fits.keys())
    if wrong and "lora" in state:
        base = Path(state["lora"]["base"])
        raise UserError(f"{path}: LoRA adapters, not a model; give their base, {base}, and these with --lora, or merge "
                        f"the two: python -m common.lora merge --model {base} --lora {path} --out FILE")
    if wrong and (strict or not fits):
        names = ", ".join(wrong[1:5]) + ", …" * (len(wrong) > 5)
        raise UserError(f"{path}: weights of another model: {len(wrong)} entries differ, the first is {wrong[0]}"
                        f"{', then ' * (len(wrong) > 1)}{names}; give the settings it was trained with")
    module.load_state_dict(fits, strict=False)
