"""Files from elsewhere, which --load and --init_from name, and copies to elsewhere, which --save names.

    --load runs/old/checkpoints/step_00001200.pt                      # a file
    --init_from https://example.org/model.pt#sha256=9f86d081884c...   # a URL, whose sha256 may be given
    --load wandb:RUN/latest.pt                                        # a file of a run
    --save "local save_latest_to=/backup/{run}_{step:08d}.pt, huggingface repo=me/prior kind=model save_best_to=best.pt"
"""
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import re
import shlex
import shutil
import threading
import urllib.request
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config, dist
from common.config import UserError, need

DEADLINE = 3600  # seconds that a download may take
RESERVED = ("model", "config", "versions", "run", "step", "epoch", "samples_seen", "val_loss", "best_val_loss")


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
    """{name: text} of the pairs in cfg.metadata; UserError."""
    for pair in cfg.metadata:
        name = re.match(r"(\w+)=", pair)
        if not name or name[1] in RESERVED:
            raise UserError(f"--metadata: {pair!r}: expected NAME=VALUE; reserved names are {', '.join(RESERVED)}")
    return dict(pair.split("=", 1) for pair in cfg.metadata)


def check(cfg):
    """UserError for a save or metadata that is wrong on every machine."""
    metadata(cfg)
    if any(isinstance(saver, WandBFiles) for saver in savers(cfg)) and cfg.logger.split()[0] != "wandb":
        raise UserError("--save wandb: the copies are files of the run there; it needs --logger wandb")
    config.refuse_unused(cfg, [
        ("load_only_auto_resume", cfg.load and cfg.resume == "auto", "--load, and a --resume that is not never")])


def check_stages(cfgs):
    """UserError if several stages, trained in turn, would start from one file or overwrite each other's copies."""
    if len(cfgs) == 1:
        return
    if cfgs[0].init_from or cfgs[0].load or " id=" in cfgs[0].logger:
        raise UserError("--init_from, --load, id in --logger: each is of one stage; give that with --stage, too")
    for path in (path for saver in savers(cfgs[0]) for path in saver.targets.values()):
        if "{run" not in path:
            raise UserError(f"--save: each stage would write to {path}; put {{run}} into it, which ends in the stage")


# Loaders

def prepare(cfg, project):
    """`cfg` with local files as load and init_from where the run needs them; UserError if one is not available."""
    folder = Path(cfg.run_dir).parent / "downloads"
    begun = checkpoint.record_of(cfg.run_dir)["checkpoints"] if cfg.resume == "auto" else []
    lost = not any((Path(cfg.run_dir) / entry["file"]).is_file() for entry in begun)
    if lost and (begun or not cfg.load_only_auto_resume):
        cfg = dataclasses.replace(cfg, load=fetch(cfg.load, folder, project))
    if not begun or getattr(cfg, "lora_rank", 0):  # adapters need their base at every start
        cfg = dataclasses.replace(cfg, init_from=fetch(cfg.init_from, folder, project))
    return cfg


def fetch(address, folder, project=""):
    """Path of the file at `address`: a path, URL[#sha256=HEX] or wandb:RUN/FILE of a `project`; UserError.

    A download is kept in `folder`. It is not fetched again if its sha256 is the one that is given.
    """
    url, _, sha256 = address.partition("#sha256=")
    of_run = re.fullmatch(r"wandb:([^/]+)/(.+)", url)
    if not of_run and not re.match(r"https?://", url):
        if address and not Path(address).is_file():
            raise UserError(f"{address}: no such checkpoint; expected a file, http(s)://HOST/FILE, optionally with "
                            "#sha256=HEX, or wandb:RUN/FILE")
        return address
    path = Path(folder, *(of_run.groups() if of_run else [re.sub(r"[^\w.-]+", "_", url)[-200:]]))
    if ".." in path.parts[len(Path(folder).parts):]:
        raise UserError(f"{url}: expected the name of a file of the run, without ..")
    if sha256 and path.is_file() and checkpoint.checksum(path) == sha256:
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if of_run:
            file = need("wandb", url).Api(timeout=30).run(f"{project}/{of_run[1]}").file(of_run[2])
            file.download(root=str(Path(folder, of_run[1])), replace=True).close()
        else:
            download = concurrent.futures.Future()
            threading.Thread(target=_download, args=(url, path, sha256, download), daemon=True).start()
            download.result(DEADLINE)
    except concurrent.futures.TimeoutError as error:
        raise UserError(f"{url}: not there after {DEADLINE} s; download it by hand and name the file") from error
    except Exception as error:  # of a network, a disk, a package
        raise UserError(f"{url}: {error}") from error
    return str(path)


def _download(url, path, sha256, future):
    """Download to `path`, and tell the `future` how it went. A thread, as a server may send a byte now and then."""
    opener = urllib.request.OpenerDirector()  # of http(s) alone: a server may redirect to a local file
    for name in ("Proxy", "HTTP", "HTTPS", "HTTPRedirect", "HTTPDefaultError", "Unknown"):
        opener.add_handler(getattr(urllib.request, f"{name}Handler")())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    try:
        urllib.request.install_opener(opener)
        torch.hub.download_url_to_file(url, str(path), sha256 or None)
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


# Savers

FIELD = re.compile(r"\{\w+(:0?\d{0,2}(\.\d{1,2})?[a-z]?)?\}")  # what may stand in a path, such as {step:08d}


def from_transformers(flag, name, kinds):
    """The model `name` (an id at huggingface.co, or a folder) by transformers, frozen and in fp32.

    kinds: the values of model_type that fit. flag: the setting that names it, for messages.
    UserError for a model of another kind, or for none.
    """
    transformers = need("transformers", flag)
    try:
        kind = transformers.AutoConfig.from_pretrained(name).model_type
        if kind in kinds:
            model = transformers.AutoModel.from_pretrained(name)
            return model.float().eval().requires_grad_(False)
    except (OSError, ValueError) as error:  # no such model, or no way to it
        raise UserError(f"{flag}: {str(error).splitlines()[0]}") from error
    raise UserError(f"{flag}: a model of the kind {kind}; expected {', '.join(kinds)}")


class Saver:
    """A place for copies; this one is a folder. Another place is a subclass with its `put`, and an entry in SAVERS.

    kind=checkpoint: the whole state; kind=model: averaged weights and settings. Paths are format strings.
    """
    needs, options = (), ("kind", "save_latest_to", "save_best_to", "save_meta_to")  # (module, package) pairs, names

    def __init__(self, cfg, text, given):
        self.cfg, self.text, self.given, self.kind = cfg, text, given, given.get("kind", "checkpoint")
        self.targets = {name[5:-3]: path for name, path in given.items() if name.startswith("save_")}  # {event: path}
        for wrong, message in [
                (not self.targets, "no target; give save_latest_to=PATH, save_best_to=PATH or save_meta_to=FOLDER"),
                (len(set(self.targets.values())) < len(self.targets), "a path would be written twice"),
                (self.kind not in ("checkpoint", "model"), f"kind={self.kind}: expected checkpoint or model"),
                ("repo" in self.options and not re.fullmatch(r"[\w.-]+/[\w.-]+", given.get("repo", "")),
                 "give the repository as repo=OWNER/NAME")]:
            if wrong:
                raise UserError(f"--save {text}: {message}")
        values = {**metadata(cfg), "run": "", "step": 1, "epoch": 1, "samples_seen": 1, "best_val_loss": 0.5}
        try:
            for path in self.targets.values():
                if set("{}") & set(FIELD.sub("", path)):  # an attribute, or a width that takes all memory
                    raise ValueError(path)
                path.format(**values)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UserError(f"--save {text}: {error!r}; in braces may stand {', '.join(values)}, with a format such as "
                            "{step:08d}") from None

    def entry(self, event, record):
        """What to copy at an `event`: an entry, {"file", "step", "values"}, of auto_resume.json's `record`, or None."""
        saved, best = record["checkpoints"], record.get("best")
        if event == "meta":  # the config is there from the start on
            return saved[0] if saved else record.get("start")
        if event == "latest":
            return saved[0] if saved else None
        if self.kind == "model" or not best:
            return best
        return next((entry for entry in saved if entry["step"] == best["step"]), None)

    def copy(self, folder, event, entry):
        """Copy what the run in `folder` has saved as `entry`."""
        name, path = self.targets[event].format(**entry["values"]), folder / entry["file"]
        if event == "meta":
            self.put(io.BytesIO((folder / "config.json").read_bytes()), f"{name}/config.json")
            self.put(io.BytesIO(json.dumps(finite(entry["values"]), indent=2).encode()), f"{name}/metadata.json")
        elif self.kind == "model":
            content = io.BytesIO()
            torch.save(checkpoint.averaged(checkpoint.load(path)), content)
            content.seek(0)
            self.put(content, name)
        else:
            with open(path, "rb") as file:  # it stays whole when the run drops or replaces it
                self.put(file, name)

    def put(self, file, name):
        """Write the binary `file` there as `name`."""
        with checkpoint.replacing(name) as out:
            shutil.copyfileobj(file, out, 1 << 22)


class WandBFiles(Saver):
    """Files of the run of logger wandb, which is opened again for what a finished run still has to send."""

    def put(self, file, name):
        import wandb
        known = checkpoint.record_of(self.cfg.run_dir)["logger"]
        run = wandb.run or wandb.init(id=known["id"], project=known["project"], entity=known["entity"], resume="must",
                                      dir=self.cfg.run_dir, settings=wandb.Settings(console="off", silent=True))
        super().put(file, Path(run.dir) / name)  # given a path elsewhere, the package would make a link
        run.save(f"{run.dir}/{name}", base_path=run.dir, policy="now")


class HuggingFace(Saver):
    """A repository of models on the Hugging Face Hub: repo=OWNER/NAME; the token is HF_TOKEN's, or in a file."""
    needs, options = (("huggingface_hub", "huggingface_hub"),), (*Saver.options, "repo", "token_file")

    def put(self, file, name):
        from huggingface_hub import HfApi
        api = HfApi(token=Path(self.given["token_file"]).read_text().strip() if "token_file" in self.given else None)
        api.create_repo(self.given["repo"], private=True, exist_ok=True)
        api.upload_file(path_or_fileobj=file, path_in_repo=name, repo_id=self.given["repo"])


SAVERS = {"local": Saver, "wandb": WandBFiles, "huggingface": HuggingFace}


def savers(cfg):
    """The savers that cfg.save names."""
    found = [(text, *parse("save", text, SAVERS)) for text in cfg.save]
    return [SAVERS[name](cfg, text, given) for text, name, given in found]


def send(savers, run):
    """Send what the checkpoint.Run `run` has saved, unless RUN/sent.json, {"SAVER EVENT": step}, says that it went.

    So the next save, or the next start, sends again what failed or what a killed process did not send.
    """
    path, sent = run.folder / "sent.json", {}
    with contextlib.suppress(UserError, OSError):  # a damaged one: all is sent again
        sent = config.read_json(path)
    for saver in savers:
        for event in saver.targets:
            entry, key = saver.entry(event, run.record), f"{saver.text} {event}"
            if not entry or sent.get(key) == entry["step"]:
                continue
            try:
                saver.copy(run.folder, event, entry)
                sent[key] = entry["step"]
                checkpoint.write_json(sent, path)
            except Exception as error:  # of a network, a quota, a token: whatever it is, training goes on
                tqdm.write(f"--save {saver.text}: the {event} copy of step {entry['step']} failed: "
                           f"{type(error).__name__}: {error}; the next save or start of this run tries again")


def resend(cfg, run):
    """Send what the finished `run` still has to send."""
    if dist.is_main():
        send(savers(cfg), run)


def finite(values):
    """`values` with None for numbers that JSON has no word for."""
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in values.items()}
