"""Download files for --load and --init_from, and copy or upload files for --save.

--init_from https://example.org/model.pt#sha256=9f86d081884c   # a URL, optionally with a sha256
--load wandb:ENTITY/PROJECT/RUN/latest.pt                      # a file of a Weights & Biases run
--save "local save_latest_to=/backup/{run}_{step:08d}.pt"
--save "huggingface repo=me/prior kind=model save_best_to=best.pt save_meta_to=about"
"""

import io
import json
import re
import shlex
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, config
from common.config import UserError, explained, need

TIMEOUT = 60  # seconds without any data after which a download fails
CARD = """---
library_name: pytorch
---
# {repo}

Files of a training run. `torch.load(FILE, weights_only=True)` returns a dict of tensors and plain
values. Its entry "model" has the weights, and "config" has the training settings.
"""


def fetch(address, folder):
    """Download the file at `address` to `folder`, and return its path; UserError if it fails.

    address: URL[#sha256=HEX], or wandb:ENTITY/PROJECT/RUN/FILE. If the file is already there and
    its sha256 starts with HEX, it is not downloaded again.
    """
    url, _, sha256 = address.partition("#sha256=")
    path = str(folder / re.sub(r"[^\w.-]+", "_", url)[-200:])
    if sha256 and Path(path).is_file() and checkpoint.checksum(path).startswith(sha256):
        return path
    wandb_file = re.fullmatch("wandb:([^/]+/[^/]+/[^/]+)/([^/].*)", url)
    with explained(
        f"{address}: expected a file, http(s)://HOST/FILE[#sha256=HEX] or "
        "wandb:ENTITY/PROJECT/RUN/FILE"
    ):
        if ".." in re.split(r"[/\\]", url):
            raise ValueError("the path leads out of its folder")
        if wandb_file:
            run, name = wandb_file.groups()
            file = need("wandb", "--load or --init_from").Api().run(run).file(name)
            return file.download(root=path, replace=True).name
        folder.mkdir(parents=True, exist_ok=True)
        socket.setdefaulttimeout(TIMEOUT)  # otherwise torch may wait forever
        try:
            torch.hub.download_url_to_file(url, path, sha256)
        finally:
            socket.setdefaulttimeout(None)
    return path


# Savers


@dataclass(kw_only=True)
class Saver:
    """Copies files to local paths. To save elsewhere, add a subclass with its `put` to SAVERS."""

    kind: str = "checkpoint"  # or "model": the latest copy has only averaged weights and settings
    save_latest_to: str = ""  # a path, which may contain names from `path_values` in braces
    save_best_to: str = ""  # a path for best.pt, which has only the model
    save_meta_to: str = ""  # a folder for metadata.json and config.json

    def send(self, event, entry, run):
        """Send a file of the RunFolder `run`, if this saver has a path for it.

        event: which file, "latest", "best" or "meta". entry: its {"file", "step"}, from
        run.checkpoints or run.best.
        """
        values = path_values(run.folder, entry["step"], run.best_val_loss)
        path = getattr(self, f"save_{event}_to").format(**values)
        file = run.folder / entry["file"]
        if not path:
            return
        if event == "meta":
            about = json.dumps(config.nan_to_none(values), indent=2)
            self.put(f"{path}/metadata.json", io.BytesIO(about.encode()))
            path = f"{path}/config.json"
            file = run.folder / "config.json"
        with open(file, "rb") as content:  # stays readable even if the run deletes the file
            if event == "latest" and self.kind == "model":
                model = checkpoint.model_contents(checkpoint.load(file))
                content = io.BytesIO()
                torch.save(model, content)
                content.seek(0)
            self.put(path, content)

    def put(self, path, content):
        """Write the binary file `content` to `path`."""
        with checkpoint.atomic_write(path) as file:
            shutil.copyfileobj(content, file)


class WandBSaver(Saver):
    """Uploads files to the run of --logger wandb while that run is open."""

    def put(self, path, content):
        import wandb

        if not wandb.run:  # closed, because the run is finished
            return
        path = Path(wandb.run.dir, path)  # wandb would only symlink a file that is elsewhere
        super().put(path, content)
        wandb.save(path, base_path=wandb.run.dir, policy="now")


@dataclass(kw_only=True)
class HuggingFaceSaver(Saver):
    """Uploads files to a model repository on the Hugging Face Hub, with a short model card."""

    repo: str  # OWNER/NAME
    token_file: str = ""  # file with the token; "": from HF_TOKEN or `hf auth login`

    def __post_init__(self):
        self.hub = need("huggingface_hub", "--save huggingface")

    def put(self, path, content):
        token = Path(self.token_file).read_text().strip() if self.token_file else None
        api = self.hub.HfApi(token=token)
        repo = api.create_repo(self.repo, private=True, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=repo)
        if not api.file_exists(repo, "README.md"):
            card = CARD.format(repo=repo).encode()
            api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repo)


SAVERS = {"local": Saver, "wandb": WandBSaver, "huggingface": HuggingFaceSaver}


def path_values(folder, step, best_val_loss):
    """Return {name: value} for the names in braces that paths in --save may contain.

    folder: the run folder.
    """
    return {
        "run": Path(folder).as_posix().lstrip("/"),
        "step": step,
        "best_val_loss": best_val_loss,
    }


def savers(cfg):
    """The savers that --save describes; UserError if it is malformed."""
    values = path_values(cfg.run_dir, step=1, best_val_loss=0.5)
    # A comma separates savers only if the name of a saver follows; otherwise it belongs to a path.
    texts = re.split(rf",(?=(?:{'|'.join(SAVERS)})\s)", ",".join(cfg.save))
    found = [config.parse_options("save", text, SAVERS) for text in texts]
    for saver in found:
        with explained(
            "--save: expected save_latest_to=PATH, save_best_to=PATH or save_meta_to=FOLDER, and "
            f"kind=checkpoint or kind=model; paths may have {', '.join(values)} in braces, also "
            "with a format such as {step:08d}"
        ):
            paths = saver.save_latest_to + saver.save_best_to + saver.save_meta_to
            # Reject format widths of four or more digits: a huge one would exhaust memory.
            too_wide = re.search(r"{[^}:]*:[^}]*\d{4}", paths)
            if not paths or too_wide or saver.kind not in ("checkpoint", "model"):
                raise ValueError(saver)
            paths.format(**values)
        if isinstance(saver, WandBSaver) and shlex.split(cfg.logger)[0] != "wandb":
            raise UserError("--save wandb uploads to the run of the logger; give --logger wandb")
        saver.sent = {}  # {event: entry}
    return found


def send(savers, run):
    """Send everything in the run folder `run` that its `savers` have not sent yet.

    A failed upload is retried at the next save. Returns True if everything was sent.
    """
    all_sent = True
    newest = run.checkpoints[0] if run.checkpoints else {}
    entries = {"latest": newest, "best": run.best, "meta": {}}
    if newest:
        entries["meta"] = {**newest, "best": run.best}  # metadata.json describes both
    for saver in savers:
        for event, entry in entries.items():
            try:
                if entry and saver.sent.get(event) != entry:
                    saver.send(event, entry, run)
                    saver.sent[event] = entry
            except Exception as error:  # such as a network or quota error; training continues
                all_sent = False
                tqdm.write(
                    f"the {event} copy by {saver} failed: {type(error).__name__}: {error}; it is "
                    "retried at the next save, at the end, and when the same command runs again"
                )
    return all_sent


def send_missing(savers, run, minutes):
    """Retry `send` at the end of a run, with doubling pauses, for up to `minutes`."""
    pause = 1  # seconds
    while not send(savers, run) and 2 * pause < 60 * minutes:
        time.sleep(pause)
        pause *= 2
