"""Files from elsewhere, which --load and --init_from name, and copies to elsewhere, which --save names.

    --load runs/old/checkpoints/step_00001200.pt                      # a file
    --init_from https://example.org/model.pt#sha256=9f86d081884c...   # a URL, of which the checksum may be given
    --load wandb:RUN/latest.pt                                        # a file of a run
    --save "local save_latest_to=/backup/{run}_{step:08d}.pt, huggingface repo=me/prior kind=model save_best_to=best.pt"
"""
import concurrent.futures
import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config, dist
from common.config import UserError, need

RESERVED = ("model", "config", "versions", "run", "step", "epoch", "samples_seen", "val_loss", "best_val_loss")
ADDRESS = r"(?i)https?://[^/#]+/[^#]*(#sha256=[0-9a-f]{64})?|wandb:[^/]+/.+|(?!https?:|wandb:|[a-z][\w+.-]*://).*"


def parse(flag, text, kinds):
    """(name, {option: value}) of `text`, "NAME OPTION=VALUE ...", of a class in `kinds` {name: class}; UserError."""
    try:
        name, *words = shlex.split(text)
        options = kinds[name].options
    except (ValueError, KeyError) as error:
        raise UserError(f"--{flag} {text!r}: {error}: expected one of {', '.join(kinds)}, then NAME=VALUE …") from None
    given = dict(word.partition("=")[::2] for word in words)
    if wrong := [option for option, value in given.items() if option not in options or not value]:
        raise UserError(f"--{flag} {text}: {wrong[0]!r}: expected NAME=VALUE with a name of {', '.join(options)}")
    return name, given


def metadata(cfg):
    """{name: value} of the pairs in cfg.metadata; what reads as JSON is a number, true or false."""
    found = {}
    for pair in cfg.metadata:
        name, given, value = (part.strip() for part in pair.partition("="))
        if not given or not re.fullmatch(r"\w+", name) or name in RESERVED:
            raise UserError(f"--metadata: {pair!r}: expected NAME=VALUE; reserved names are {', '.join(RESERVED)}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def check(cfg):
    """UserError for a load, init_from, save or metadata that cannot be meant, on whatever machine."""
    metadata(cfg)
    copies = [(type(saver), saver.given.get("repo"), path) for saver in savers(cfg)
              for event, path in saver.targets.items() if event != "meta"]  # metadata may go where others do
    for wrong, message in [
            *((not re.fullmatch(ADDRESS, getattr(cfg, name)),
               f"--{name}: {getattr(cfg, name)!r}: expected a file, http(s)://HOST/FILE, optionally with #sha256= and "
               "64 hexadecimal digits, or wandb:RUN/FILE") for name in ("load", "init_from")),
            (cfg.load_only_auto_resume and not cfg.load, "--load_only_auto_resume: it needs --load"),
            (cfg.load_only_auto_resume and cfg.resume == "never",
             "--load_only_auto_resume: with --resume never there is nothing to go on with"),
            (len({*copies}) < len(copies), "--save: a path would be written twice; give each copy a path of its own"),
            (any(isinstance(saver, WandBFiles) for saver in savers(cfg)) and cfg.logger.split()[0] != "wandb",
             "--save wandb: the copies are files of the run there; it needs --logger wandb")]:
        if wrong:
            raise UserError(message)


def check_stages(cfgs):
    """UserError if several stages, trained in turn, would start from one file or overwrite each other's copies."""
    if len(cfgs) > 1 and (cfgs[0].init_from or cfgs[0].load or " id=" in cfgs[0].logger):
        raise UserError("--init_from, --load, id in --logger: each is of one stage; give that with --stage, too")
    for saver in savers(cfgs[0]) if len(cfgs) > 1 else ():
        for event, path in saver.targets.items():
            if "{run" not in path and not isinstance(saver, WandBFiles):  # of which each stage has a run
                raise UserError(f"--save save_{event}_to={path}: each stage would write to the same path; put {{run}} "
                                "into it, which is the stage")


# Loaders

def prepare(cfg, project):
    """`cfg` with local files as load and init_from where the run needs them; UserError if one is not to be had."""
    folder = Path(cfg.run).parent / "downloads"
    begun = checkpoint.record_of(cfg.run)["checkpoints"] if cfg.resume == "auto" else []
    lost = not any((Path(cfg.run) / entry["file"]).is_file() for entry in begun)
    if lost and (begun or not cfg.load_only_auto_resume):
        cfg = dataclasses.replace(cfg, load=fetch(cfg.load, folder, True, project))
    if not begun or getattr(cfg, "lora_rank", 0):  # else the weights to start from are not needed any more
        cfg = dataclasses.replace(cfg, init_from=fetch(cfg.init_from, folder, not begun, project))
    return cfg


def fetch(address, folder, again=True, project=""):
    """Path of the file at `address`: a path, URL[#sha256=HEX] or wandb:RUN/FILE of a `project`; UserError.

    What is fetched is kept in `folder`. It serves again if it has the sha256 that is given or, not `again`, as it is.
    """
    url, _, sha256 = address.partition("#sha256=")
    if not re.match(r"(?i)https?://|wandb:", address):
        if address and not Path(address).is_file():
            raise UserError(f"{address}: no such checkpoint")
        return address
    run, name = "", re.sub(r"[^\w.-]+", "_", url)[-200:]
    if url.startswith("wandb:"):
        run, _, name = url.removeprefix("wandb:").partition("/")
    path = Path(folder) / run / name
    if path.is_file() and (checkpoint.checksum(path) == sha256.lower() if sha256 else not again):
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if run:
            file = need("wandb", url).Api(timeout=30).run(f"{project}/{run}").file(name)
            file.download(root=str(Path(folder) / run), replace=True).close()
        else:
            torch.hub.download_url_to_file(url, str(path), sha256.lower() or None)
    except Exception as error:  # of a network, a disk, a package
        raise UserError(f"{url}: {one_line(error)}") from error
    return str(path)


# Savers

class Saver:
    """A place for copies; this one is a folder. Another place is a subclass with its `put`, and an entry in SAVERS.

    kind=checkpoint: the whole state; kind=model: averaged weights and settings. Paths are format strings.
    """
    needs, options = (), ("kind", "save_latest_to", "save_best_to", "save_meta_to")  # (module, package) pairs, names

    def __init__(self, cfg, text, given):
        self.cfg, self.text, self.given, self.kind = cfg, text, given, given.get("kind", "checkpoint")
        self.targets = {name[5:-3]: path for name, path in given.items() if name.startswith("save_")}
        for wrong, message in [
                (not self.targets, "no target; give save_latest_to=PATH, save_best_to=PATH or save_meta_to=FOLDER"),
                (self.kind not in ("checkpoint", "model"), f"kind={self.kind}: expected checkpoint or model"),
                ("repo" in self.options and not re.fullmatch(r"[\w.-]+/[\w.-]+", given.get("repo", "")),
                 "give the repository as repo=OWNER/NAME"),
                (given.get("private", "true") not in ("true", "false"), "private: expected true or false")]:
            if wrong:
                raise UserError(f"--save {text}: {message}")
        values = {**metadata(cfg), **dict.fromkeys(RESERVED[4:], 1200), "val_loss": 0.5, "best_val_loss": 0.5}
        for event in self.targets:
            self.path(event, {"run": Path(cfg.run).name, **values})

    def path(self, event, values):
        """Where the copy at an `event`, latest, best or meta, goes, with `values` for what is in braces."""
        try:
            return self.targets[event].format(**values)
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            raise UserError(f"--save {self.text}: {error!r}; in braces may stand {', '.join(values)}, with a format "
                            "such as {step:08d}") from None

    def put(self, file, name):
        """Copy `file` there as `name`."""
        with checkpoint.replacing(name) as out, open(file, "rb") as content:
            shutil.copyfileobj(content, out, 1 << 22)


class WandBFiles(Saver):
    """Files of the run of logger wandb, which is opened again for what a finished run still has to send."""

    def put(self, file, name):
        import wandb
        known = checkpoint.record_of(self.cfg.run)["logger"]
        run = wandb.run or wandb.init(id=known["id"], project=known["project"], entity=known["entity"], resume="must",
                                      dir=self.cfg.run, settings=wandb.Settings(console="off", silent=True))
        super().put(file, Path(run.dir) / name)  # given a path elsewhere, the package would make a link
        run.save(f"{run.dir}/{name}", base_path=run.dir, policy="now")


class HuggingFace(Saver):
    """A repository of models on the Hugging Face Hub: repo=OWNER/NAME; the token is HF_TOKEN's, or in a file."""
    needs = (("huggingface_hub", "huggingface_hub"),)
    options = (*Saver.options, "repo", "token_file", "revision", "private")

    def put(self, file, name):
        from huggingface_hub import HfApi
        given, repo = self.given, self.given["repo"]
        api = HfApi(token=Path(given["token_file"]).read_text().strip() if "token_file" in given else None)
        api.create_repo(repo, private=given.get("private", "true") == "true", exist_ok=True)
        api.upload_file(path_or_fileobj=file, path_in_repo=name, repo_id=repo, revision=given.get("revision"))


SAVERS = {"local": Saver, "wandb": WandBFiles, "huggingface": HuggingFace}


def savers(cfg):
    """The savers that cfg.save names."""
    found = [(text, *parse("save", text, SAVERS)) for text in cfg.save]
    return [SAVERS[name](cfg, text, given) for text, name, given in found]


class Copies:
    """Sends what a run has saved to its savers, from a thread. RUN/sent.json, {saver: {event: step}}, tells what went.

    So every start knows what is still to be sent, be it that a copy failed or that the process was killed.
    """

    def __init__(self, run, cfg, start=None):
        """run: the open checkpoint.Run; start: {"step", "values"} of what save_meta_to gets before any checkpoint."""
        self.run, self.start, self.savers, self.failures = run, start, savers(cfg), set()
        self.thread, self.job = concurrent.futures.ThreadPoolExecutor(1, "copies"), None
        path = run.folder / "sent.json"
        self.sent = config.read_json(path) if path.exists() else {}

    def entry(self, saver, event):
        """What auto_resume.json has for a saver at an `event`: {"file", "step", "values"}, or None."""
        saved, best = self.run.record["checkpoints"], self.run.record.get("best")
        if event == "best":
            return best if saver.kind == "model" or not best else next(
                (entry for entry in saved if entry["step"] == best["step"]), None)
        return saved[0] if saved else self.start if event == "meta" else None

    def rest(self):
        """Yield what is still to be sent, as (saver, event, entry)."""
        for saver in self.savers:
            for event in saver.targets:
                entry = self.entry(saver, event)
                if entry and self.sent.get(saver.text, {}).get(event) != entry["step"]:
                    yield saver, event, entry

    def send(self):
        """Begin to send the rest."""
        if self.savers:
            self.job = self.thread.submit(self._send)

    def _send(self):
        for saver, event, entry in self.rest():
            try:
                self._copy(saver, event, entry)
                self.sent.setdefault(saver.text, {})[event] = entry["step"]
                checkpoint.write_json(self.sent, self.run.folder / "sent.json")
            except Exception as error:  # of a network, a quota, a token: whatever it is, training goes on
                if (saver, type(error)) not in self.failures:
                    tqdm.write(f"--save {saver.text}: the copy of step {entry['step']} failed: {type(error).__name__}: "
                               f"{one_line(error)}; training goes on, the next save tries again")
                self.failures.add((saver, type(error)))

    def _copy(self, saver, event, entry):
        name, folder = saver.path(event, entry["values"]), self.run.folder
        if event == "meta":
            checkpoint.write_json(finite(entry["values"]), folder / "metadata.json")
            for file in ("config.json", "metadata.json"):
                saver.put(folder / file, f"{name}/{file}")
            return
        sending = folder / "sending.pt"  # which stays as it is when the run replaces or drops the file
        sending.unlink(missing_ok=True)
        if event == "latest" and saver.kind == "model":
            checkpoint.save(checkpoint.averaged(checkpoint.load(folder / entry["file"])), sending)
        else:
            os.link(folder / entry["file"], sending)
        saver.put(sending, name)
        sending.unlink()

    def deliver(self, seconds=None):
        """Send the rest, and wait until it is there, at most so many seconds: before a run counts as finished."""
        self.send()
        if self.job:
            concurrent.futures.wait([self.job], seconds)
        for saver, event, _ in self.rest():
            tqdm.write(f"--save {saver.text}: the {event} copy is not sent; the next start of this run tries again")


def resend(cfg, run):
    """Send what the finished `run` still has to send."""
    if dist.is_main():
        Copies(run, cfg).deliver()


def finite(values):
    """`values` with None for numbers that JSON has no word for."""
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in values.items()}


def one_line(error):
    """The first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
