"""Files from elsewhere, which --load and --init_from name, and copies, which --save names.

--load runs/old/checkpoints/step_00001200.pt                   # a file
--init_from https://example.org/model.pt#sha256=9f86d081884c   # a URL, with or without sha256
--load wandb:ENTITY/PROJECT/RUN/latest.pt                      # a file of a run there
--save "local save_latest_to=/backup/{run}_{step:08d}.pt"
--save "huggingface repo=me/prior kind=model save_best_to=best.pt save_meta_to=about"
"""

import io
import json
import math
import os
import re
import shlex
import shutil
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, dist
from common.config import UserError, explained, need

TIMEOUT = 60  # seconds without a byte after which a download fails
MAX_DOWNLOAD = 100 * 2**30  # bytes
RESERVE = 2**30  # bytes of the disk that a download leaves free
# What may stand in braces in the path of a copy, besides the names of --metadata.
FIELDS = ("run", "step", "best_val_loss")
CARD = """---
library_name: pytorch
---
# {repo}

Files of a training run. `torch.load(FILE, weights_only=True)` gives a dict of tensors and plain
values: its entry "model" has the weights, and "config" the settings of the training.
"""


# Settings


def parse(flag, text, kinds):
    """The object that `text`, "NAME OPTION=VALUE ...", describes; UserError.

    kinds: {name: its class, with the options as arguments}. flag: for messages.
    """
    names = ", ".join(kinds)
    with explained(f"--{flag} {text}: expected one of {names}, then OPTION=VALUE …"):
        name, *pairs = shlex.split(text)
        return kinds[name](**dict(pair.split("=", 1) for pair in pairs))


def metadata(cfg):
    """{name: text} of the pairs in cfg.metadata; UserError."""
    values = dict(pair.partition("=")[::2] for pair in cfg.metadata)
    for name, text in values.items():
        if not name.isidentifier() or not text or name in FIELDS:
            raise UserError(
                f"--metadata: {name!r}: expected NAME=VALUE; reserved names are {', '.join(FIELDS)}"
            )
    return values


def path_values(cfg, step=1, best_val_loss=0.5):
    """{name: value} of what may stand in braces in the path of a copy."""
    values = (Path(cfg.run_dir).as_posix().lstrip("/"), step, best_val_loss)
    return {**dict(zip(FIELDS, values)), **metadata(cfg)}


def check_stages(cfgs):
    """UserError if stages that are trained in turn would share a start or the path of a copy."""
    first = cfgs[0]
    words = " ".join(first.save).split()
    shared = any("_to=" in word and "{run" not in word for word in words)
    if len(cfgs) > 1 and (shared or first.init_from or first.load or " id=" in first.logger):
        raise UserError(
            "--init_from, --load, id in --logger, and a path without {run} in --save "
            "are of one stage; give --stage, too"
        )


# Loaders


def fetch_files(cfg):
    """`cfg` with local files as `load` and `init_from`, where the run needs them; UserError."""
    folder = Path(cfg.run_dir)
    saved = checkpoint.record_of(folder)["checkpoints"] if cfg.resume == "auto" else []
    intact = any((folder / entry["file"]).is_file() for entry in saved)
    files = {}
    if not intact and (saved or not cfg.load_only_auto_resume):
        files["load"] = fetch(cfg.load, folder.parent / "downloads")
    if not saved or getattr(cfg, "lora_rank", 0):  # adapters need their base at every start
        files["init_from"] = fetch(cfg.init_from, folder.parent / "downloads")
    return replace(cfg, **files)


def fetch(address, folder):
    """Path of the file at `address`; UserError.

    address: a path, URL[#sha256=HEX], or wandb:ENTITY/PROJECT/RUN/FILE. A download is kept in
    `folder`. It is not fetched again if its sha256 is the one in the address.
    """
    if not address or Path(address).is_file():
        return address
    url, _, sha256 = address.partition("#sha256=")
    wandb_file = re.fullmatch("wandb:([^/]+/[^/]+/[^/]+)/([^/].*)", url)
    if ".." in url:
        raise UserError(f"{address}: expected a name without ..")
    path = Path(folder, re.sub(r"[^\w.-]+", "_", url)[-200:])
    if sha256 and path.is_file() and checkpoint.checksum(path) == sha256:
        return str(path)
    with explained(
        f"{address}: expected a file, http(s)://HOST/FILE[#sha256=HEX] or "
        "wandb:ENTITY/PROJECT/RUN/FILE"
    ):
        if wandb_file:
            run, name = wandb_file.groups()
            file = need("wandb", "--load or --init_from").Api().run(run).file(name)
            return file.download(root=str(path), replace=True).name
        download(url, path, sha256)
    return str(path)


def download(url, path, sha256):
    """Write what is at `url` to `path`; ValueError if it is too long, or of another sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    most = min(MAX_DOWNLOAD, shutil.disk_usage(path.parent).free - RESERVE)
    request = urllib.request.Request(url, headers={"User-Agent": "torch"})  # or some refuse it
    part = path.with_name(f"{path.name}.{os.getpid()}")  # another run may download it, too
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT) as response,
        tqdm.wrapattr(response, "read", desc=url) as stream,
        checkpoint.atomic_write(part) as file,
    ):
        while block := stream.read(2**20):
            file.write(block)
            if file.tell() > most:
                raise ValueError(f"longer than {most:,} bytes, the most that is taken here")
        file.flush()
        digest = checkpoint.checksum(file.name)
        if not digest.startswith(sha256):
            raise ValueError(f"invalid hash value (expected {sha256!r}, got {digest!r})")
    os.replace(part, path)


def from_transformers(flag, name, kinds):
    """The model `name` (an id at huggingface.co, or a folder) by transformers, frozen and in fp32.

    kinds: the values of model_type that fit. flag: the setting that names it, for messages.
    UserError for a model of another kind, or for none.
    """
    transformers = need("transformers", flag)
    try:
        kind = transformers.AutoConfig.from_pretrained(name).model_type  # before large weights
        if kind in kinds:
            model = transformers.AutoModel.from_pretrained(name)
            return model.float().eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag}: {str(error).splitlines()[0]}") from error
    raise UserError(f"{flag}: a model of the kind {kind}; expected {', '.join(kinds)}")


# Savers


@dataclass(kw_only=True)
class Saver:
    """Copies to a folder. A subclass with its `put`, and an entry in SAVERS, is another place."""

    kind: str = "checkpoint"  # or model: averaged weights and settings
    save_latest_to: str = ""  # format strings of paths
    save_best_to: str = ""
    save_meta_to: str = ""  # a folder
    sent: dict = field(default_factory=dict, init=False, repr=False)  # {event: entry}

    def entry(self, event, record):
        """The entry {"file", "step", "values"} of auto_resume.json's `record` to copy, or None."""
        entries = record["checkpoints"]
        if event == "best":
            best = record.get("best")
            if self.kind == "model":
                return best
            entries = [entry for entry in entries if best and entry["step"] == best["step"]]
        return entries[0] if entries else None

    def send(self, event, run):
        """Send what the checkpoint.RunFolder `run` has saved, unless it is sent."""
        path = getattr(self, f"save_{event}_to")
        entry = self.entry(event, run.record)
        if not path or not entry or self.sent.get(event) == entry:
            return
        values = dict(entry["values"])
        if values["best_val_loss"] is None:  # which stands for infinity in auto_resume.json
            values["best_val_loss"] = math.inf
        path = path.format(**values)
        file = run.folder / entry["file"]
        if event == "meta":
            values = json.dumps(checkpoint.finite(values), indent=2)
            with open(run.folder / "config.json", "rb") as config_file:
                self.put(f"{path}/config.json", config_file)
            self.put(f"{path}/metadata.json", io.BytesIO(values.encode()))
        elif self.kind == "model":
            buffer = io.BytesIO()
            torch.save(checkpoint.inference_contents(checkpoint.load(file)), buffer)
            buffer.seek(0)
            self.put(path, buffer)
        else:
            with open(file, "rb") as content:  # it stays readable if the run drops or replaces it
                self.put(path, content)
        self.sent[event] = entry

    def put(self, path, content):
        """Write the binary file `content` there as the file `path`."""
        with checkpoint.atomic_write(path) as file:
            shutil.copyfileobj(content, file)


class WandBSaver(Saver):
    """Files of the run of --logger wandb, while it is open."""

    def put(self, path, content):
        import wandb

        if wandb.run:
            path = Path(wandb.run.dir, path)  # the package would only link to a path elsewhere
            super().put(path, content)
            wandb.save(path, base_path=wandb.run.dir, policy="now")


@dataclass(kw_only=True)
class HuggingFaceSaver(Saver):
    """A model repository on the Hugging Face Hub, with a short model card."""

    repo: str  # OWNER/NAME
    token_file: str = ""  # holds the token; "": it is that of HF_TOKEN or of `hf auth login`

    def put(self, path, content):
        token = Path(self.token_file).read_text().strip() if self.token_file else None
        api = need("huggingface_hub", "--save huggingface").HfApi(token=token)
        repo = api.create_repo(self.repo, private=True, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=repo)
        if not api.file_exists(repo, "README.md"):
            card = CARD.format(repo=repo).encode()
            api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repo)


SAVERS = {"local": Saver, "wandb": WandBSaver, "huggingface": HuggingFaceSaver}


def savers(cfg):
    """The savers that cfg.save names; UserError."""
    fields = path_values(cfg)
    found = [parse("save", text, SAVERS) for text in cfg.save]
    for saver in found:
        paths = [saver.save_latest_to, saver.save_best_to, saver.save_meta_to]
        paths = [path for path in paths if path]
        names = ", ".join(fields)
        with explained(
            f"--save: {paths}: in braces may stand {names}, with a format as in {{step:08d}}"
        ):
            places = [Path(path.format(**fields)).resolve() for path in paths]
        if not paths or saver.kind not in ("checkpoint", "model"):
            raise UserError(
                "--save: expected save_latest_to=PATH, save_best_to=PATH or "
                "save_meta_to=FOLDER, and as kind checkpoint or model"
            )
        own = [place for place in places if place.is_relative_to(Path(cfg.run_dir).resolve())]
        if type(saver) is Saver and own:
            raise UserError(f"--save: {own[0]}: is in the run's own folder; name another place")
    return found


def send(savers, run):
    """Send what the checkpoint.RunFolder `run` has saved, but for what its `savers` have sent.

    So what failed is sent at the next save, and the newest of all is sent at every start.
    """
    for saver in savers:
        for event in ("latest", "best", "meta"):
            try:
                saver.send(event, run)
            except Exception as error:  # of a network, a quota, a token: training continues
                tqdm.write(
                    f"the {event} copy by {saver} failed: {type(error).__name__}: {error}; "
                    "the next save or start of this run tries again"
                )


def resend(cfg, run):
    """Send what the finished `run` has saved."""
    if dist.is_main():
        send(savers(cfg), run)
