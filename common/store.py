"""Checkpoints from elsewhere and to elsewhere: what --load and --init_from name, and the copies that --save asks for.

    --load runs/old/checkpoints/step_00001200.pt                      # a file
    --init_from https://example.org/model.pt#sha256=9f86d081884c...   # a URL, of which the checksum may be given
    --load wandb:RUN/latest.pt                                        # a file of a run, with --wandb_project
    --save "local save_latest_to=/backup/{run}_{step:08d}.pt, huggingface repo=me/prior kind=model save_best_to=best.pt"
"""
import concurrent.futures
import contextlib
import difflib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from common import checkpoint, config
from common.config import UserError, need

RESERVED = ("model", "config", "versions", "run", "step", "epoch", "samples_seen", "val_loss", "best_val_loss")
ATTEMPTS = 5  # at a download that breaks off, each of which goes on where the one before it ended


@dataclass(frozen=True)
class Settings:
    """The fields that watching, keeping and sharing add to each script's Config."""
    # Watching and sharing
    logger: Literal["console", "tensorboard", "wandb"] = "console"  # where figures and samples go, besides RUN
    verbose: bool = False  # print each line of metrics.jsonl
    wandb_project: str = "dalle2-audiolm"  # project of logger wandb, and of wandb:RUN/FILE
    wandb_entity: str = ""  # its owner, by default the account's
    wandb_name: str = ""  # name of the run there, by default its folder
    load: str = ""  # checkpoint to go on from if RUN has none: a file, URL[#sha256=HEX] or wandb:RUN/FILE
    load_only_auto_resume: bool = False  # use --load only for a run begun before, whose own are lost; it may be absent
    load_max_gb: float = 20.0  # larger downloads are refused
    save: tuple[str, ...] = ()  # copies: "local|wandb|huggingface [kind=model] [repo=NAME] save_latest_to=PATH …", …
    metadata: tuple[str, ...] = ()  # NAME=VALUE pairs for every file that the run writes


def check(cfg):
    """UserError for a setting of `Settings` that cannot be meant; asks nothing of the machine or the network."""
    metadata(cfg)
    for name in ("load", "init_from"):
        check_address(f"--{name}", getattr(cfg, name))
    if cfg.load_only_auto_resume and not cfg.load:
        raise UserError("--load_only_auto_resume: it needs --load")
    if cfg.load_only_auto_resume and cfg.resume == "never":
        raise UserError("--load_only_auto_resume: with --resume never there is nothing to go on with")
    names = [(type(saver), str(saver.settings), saver.target(event, examples(cfg)))
             for saver in savers(cfg) for event in saver.events]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--save: {twice[-1]} would be written twice; give each copy a path of its own")
    if cfg.logger != "wandb":
        if any(isinstance(saver, WandB) for saver in savers(cfg)):
            raise UserError("--save wandb: the copies are files of the run there; it needs --logger wandb")
        config.refuse_unused(cfg, [("wandb_name", False, "--logger wandb")])


def check_stages(cfgs):
    """UserError if several stages, trained in turn, would start from one file or overwrite each other's copies."""
    if len(cfgs) > 1 and (cfgs[0].init_from or cfgs[0].load):
        raise UserError("--init_from, --load: a file is of one stage; give that with --stage, too")
    for saver in savers(cfgs[0]) if len(cfgs) > 1 else []:
        for target, name in saver.targets.items():
            if "{run" not in name and not isinstance(saver, WandB):  # of which each stage has a run of its own
                raise UserError(f"--save {target}={name}: each stage would write to the same path; put {{run}} into "
                                "it, which is the stage")


def metadata(cfg):
    """{name: value} of the pairs in cfg.metadata; what reads as JSON is a number, true or false."""
    found = {}
    for pair in cfg.metadata:
        name, given, value = (part.strip() for part in pair.partition("="))
        if not given or not re.fullmatch(r"\w+", name):
            raise UserError(f"--metadata: {pair!r}: expected NAME=VALUE")
        if name in RESERVED:
            raise UserError(f"--metadata: {name!r} is reserved, as are {', '.join(RESERVED)}; give it another name")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


# Loaders

def check_address(flag, address):
    """UserError unless `address` has the form of a path, an http(s) URL or wandb:RUN/FILE."""
    if re.match(r"(?i)https?:|[a-z][\w+.-]*://", address):
        parts = urllib.parse.urlsplit(address)
        digest = re.fullmatch(r"(sha256=[0-9a-f]{64})?", parts.fragment)
        if parts.scheme not in ("http", "https") or not parts.hostname or not digest:
            raise UserError(f"{flag}: {address!r} is not a URL that can be read; expected http(s)://HOST/FILE, "
                            "optionally with #sha256= and 64 hexadecimal digits, a file, or wandb:RUN/FILE")
    elif address.startswith("wandb:") and not re.fullmatch(r"wandb:[^/]+/.+", address):
        raise UserError(f"{flag}: {address!r}: expected wandb:RUN/FILE, with the run's id")


def is_remote(address):
    """Whether `address` has to be fetched."""
    return address.lower().startswith(("http://", "https://", "wandb:"))


def fetch(address, cfg, again=True):
    """Path of a local copy of the file that `address` names, "" for no address; UserError if it cannot be had.

    Copies are kept in the folder downloads beside the run's. A URL is asked whether its file has changed since, unless
    `again` is false and there is a copy.
    """
    folder = Path(cfg.run).parent / "downloads"
    if not is_remote(address):
        if address and not Path(address).is_file():
            raise UserError(f"{address}: no such checkpoint")
        return address
    file = copy_of(address, folder)
    if again or not file.is_file():
        if address.startswith("wandb:"):
            from_wandb(address, cfg, folder)
        else:
            download(address, folder, cfg.load_max_gb * 1e9)
    return str(file)


def copy_of(address, folder):
    """Where in `folder` the copy of a remote file is."""
    if address.startswith("wandb:"):
        return folder / address.removeprefix("wandb:")
    url = address.partition("#")[0]
    name = Path(urllib.parse.urlsplit(url).path).name or "file"
    return folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}_{name}"


def download(address, folder, most):
    """Bring the copy in `folder` of the file at a URL up to date: at most `most` bytes, of the sha256 it names."""
    url, _, digest = address.partition("#sha256=")
    file, reason = copy_of(address, folder), None
    if digest and file.is_file() and checkpoint.checksum(file) == digest:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may fetch it right now
        for attempt in range(ATTEMPTS):
            try:
                transfer(url, file, most)
                break
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 416, 429):
                    raise UserError(f"{url}: {reason}") from error
            except (OSError, http.client.HTTPException) as error:
                if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                    raise
                reason = getattr(error, "reason", error)
            time.sleep(min(attempt, 3))
        else:
            if not file.is_file():
                raise UserError(f"{url}: {reason}; what has come is kept, the same command goes on from there")
            print(f"{url}: {reason}; using the copy {file}")
    if digest and (found := checkpoint.checksum(file)) != digest:
        file.unlink()
        raise UserError(f"{url}: its sha256 is {found}, not {digest}")


def transfer(url, file, most):
    """Bring `file` up to date with what the server has: whole, the rest of it, or not at all if it is the same."""
    part, mark = file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.version")
    version = mark.read_text() if mark.is_file() else ""  # of `part` if there is one, else of `file`: ETag or date
    request, begun = urllib.request.Request(url), 0
    if part.is_file() and version:
        begun = part.stat().st_size
        request.add_header("Range", f"bytes={begun}-")
        request.add_header("If-Range", version)
    elif file.is_file() and version:
        request.add_header("If-None-Match" if version.startswith('"') else "If-Modified-Since", version)
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 304:
            return
        if error.code == 416:  # there is no more of it than there is here: it is whole, or another file
            if error.headers["Content-Range"] == f"bytes */{begun}":
                os.replace(part, file)
                return
            part.unlink()
            mark.unlink()
        raise
    with response:
        size = begun if response.status == 206 else 0
        length = response.headers["Content-Length"]
        whole = size + int(length) if length else None
        etag = response.headers["ETag"] or ""
        with open(part, "ab" if size else "wb") as out, tqdm(
                total=whole, initial=size, desc=file.name, unit="B", unit_scale=True, delay=2, leave=False) as bar:
            mark.write_text(etag if etag.startswith('"') else response.headers["Last-Modified"] or "")
            while (whole or size) <= most and (block := response.read(1 << 20)):
                out.write(block)
                size += len(block)
                bar.update(len(block))
            out.flush()
            os.fsync(out.fileno())
    if (whole or size) > most:
        part.unlink()
        mark.unlink()  # it is not that of `file`
        raise UserError(f"{url}: {(whole or size) / 1e9:.3g} GB{'' if whole else ' and more'}; raise --load_max_gb, "
                        f"which is {most / 1e9:.3g}, if that is meant")
    if whole and size < whole:
        raise ConnectionError(f"broke off after {size:,} of {whole:,} bytes")
    os.replace(part, file)


def from_wandb(address, cfg, folder):
    """Copy a file of a run, wandb:RUN/FILE, to its place in `folder`."""
    wandb = need("wandb", address)
    run, _, name = address.removeprefix("wandb:").partition("/")
    where = "/".join(filter(None, (cfg.wandb_entity, cfg.wandb_project, run)))
    try:
        file = wandb.Api(timeout=30).run(where).file(name)
        if file.size > cfg.load_max_gb * 1e9:
            raise UserError(f"{address}: {file.size / 1e9:.3g} GB; raise --load_max_gb, which is {cfg.load_max_gb:g}, "
                            "if that is meant")
        place = copy_of(address, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:  # so that what is there stays whole
            file.download(root=fresh).close()
            os.replace(Path(fresh) / name, place)
    except (UserError, OSError):
        raise
    except Exception as error:  # the package's own types, and those of what it uses
        raise UserError(f"{address}: no such file in {where}, or no way to it: {one_line(error)}") from error


# Savers

def examples(cfg):
    """What may stand in braces in the path of a copy, with values like those that it will have."""
    return {"run": Path(cfg.run).name, "step": 1200, "epoch": 3, "samples_seen": 153_600, "val_loss": 0.125,
            "best_val_loss": 0.125}


class Saver:
    """A place for copies. `targets`: {"save_latest_to": PATH, "save_best_to": …, "save_meta_to": …} as given.

    kind: "checkpoint", the whole state, or "model", averaged weights and settings. Paths are format strings.
    """
    options = ()  # names of settings besides those of all savers

    def __init__(self, text, words, cfg):
        self.text, self.kind, self.targets, self.settings = text, "checkpoint", {}, {}
        known = ("save_latest_to", "save_best_to", "save_meta_to", "kind", *self.options)
        for word in words:
            name, given, value = word.partition("=")
            if name not in known or not given or not value:
                close = difflib.get_close_matches(name, known, 1)
                raise UserError(f"--save {text}: {word!r}: expected NAME=VALUE with a name of {', '.join(known)}"
                                + (f"; did you mean {close[0]}?" if close and name not in known else ""))
            (self.targets if name.startswith("save_") else self.settings)[name] = value
        self.kind = self.settings.pop("kind", "checkpoint")
        if self.kind not in ("checkpoint", "model"):
            raise UserError(f"--save {text}: kind={self.kind}: expected checkpoint or model")
        self.events = [event for event in ("latest", "best") if f"save_{event}_to" in self.targets]
        if not self.events:
            raise UserError(f"--save {text}: no target; give save_latest_to=PATH, save_best_to=PATH or both")
        for name, path in self.targets.items():
            self.fill(name, path, examples(cfg))
            if not isinstance(self, Local) and (path.startswith("/") or ".." in path.split("/")):
                raise UserError(f"--save {text}: {name}={path}: expected a name within the run or repository there")
            if path.endswith(".safetensors") and self.kind != "model":
                raise UserError(f"--save {text}: {name}: safetensors files hold weights alone; give kind=model")

    def fill(self, name, path, values):
        try:
            return path.format(**values)
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            raise UserError(f"--save {self.text}: {name}={path}: {error!r}; in braces may stand {', '.join(values)}, "
                            "with a format such as {step:08d}") from None

    def target(self, event, values):
        """The path for a copy at an `event`, "latest" or "best"."""
        return self.fill(f"save_{event}_to", self.targets[f"save_{event}_to"], values)

    def ready(self, log):
        """Check what can be before training; UserError. log: the run's Tracker, or None."""
        if any(path.endswith(".safetensors") for path in self.targets.values()):
            need("safetensors.torch", f"--save {self.text}")

    def send(self, file, event, values, about):
        """Copy `file` to its place, and `about`, {file name: text}, to the one for metadata, if there is one."""
        name, converted = self.target(event, values), file.with_suffix(".safetensors")
        try:
            if name.endswith(".safetensors"):
                checkpoint.save_safetensors(checkpoint.load(file), converted)
                file = converted
            self.put(file, name)
        finally:
            converted.unlink(missing_ok=True)
        if "save_meta_to" in self.targets:
            folder = self.fill("save_meta_to", self.targets["save_meta_to"], values)
            for part, text in about.items():
                self.put(text.encode(), f"{folder.rstrip('/')}/{part}")


class Local(Saver):
    """Another folder: another disk, a share."""

    def put(self, content, name):
        with checkpoint.replacing(name) as out:
            if isinstance(content, bytes):
                out.write(content)
            else:
                with open(content, "rb") as file:
                    shutil.copyfileobj(file, out, 1 << 22)


class WandB(Saver):
    """Files of the run of logger wandb."""

    def ready(self, log):
        super().ready(log)
        need("wandb", "--save wandb")
        self.run = log and log.logger.run

    def put(self, content, name):
        Local.put(self, content, Path(self.run.dir) / name)  # of its own: given a path elsewhere, it would be a link
        self.run.save(str(Path(self.run.dir) / name), base_path=self.run.dir, policy="now")


class HuggingFace(Saver):
    """A repository of models on the Hugging Face Hub: repo=OWNER/NAME; the token is HF_TOKEN's, or in a file."""
    options = ("repo", "token_file", "revision", "private")

    def __init__(self, text, words, cfg):
        super().__init__(text, words, cfg)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.settings.get("repo", "")):
            raise UserError(f"--save {text}: give the repository as repo=OWNER/NAME")
        if self.settings.get("private", "true") not in ("true", "false"):
            raise UserError(f"--save {text}: private={self.settings['private']}: expected true or false")

    def ready(self, log):
        super().ready(log)
        hub, token = need("huggingface_hub", "--save huggingface"), None
        if path := self.settings.get("token_file"):
            try:
                token = Path(path).read_text().strip()
            except OSError as error:
                raise UserError(f"--save {self.text}: {path}: {error.strerror}") from error
        self.api, self.made = hub.HfApi(token=token), False

    def put(self, content, name):
        where = {"repo_id": self.settings["repo"]}
        if not self.made:
            self.api.create_repo(**where, private=self.settings.get("private", "true") == "true", exist_ok=True)
            self.made = True
        self.api.upload_file(path_or_fileobj=content if isinstance(content, bytes) else str(content),
                             path_in_repo=name, revision=self.settings.get("revision"), **where)


SAVERS = {"local": Local, "wandb": WandB, "huggingface": HuggingFace}


def savers(cfg):
    """The savers that cfg.save names."""
    made = []
    for text in cfg.save:
        try:
            kind, *words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--save {text!r}: {error}") from None
        if kind not in SAVERS:
            raise UserError(f"--save {text}: {kind!r}: expected one of {', '.join(SAVERS)}")
        made.append(SAVERS[kind](text, words, cfg))
    return made


class Outbox:
    """Copies on their way: taken to their savers by a thread. No error of theirs reaches the training.

    What waits lies in the folder `outbox` of the run, with a note of where it is to go, so that the next start of a run
    that was killed sends it.
    """

    def __init__(self, folder, savers, say):
        """folder: the run's; savers: ready; say: a function that prints a line."""
        self.folder, self.savers, self.say = Path(folder) / "outbox", savers, say
        self.waiting, self.told, self.number = {}, set(), 0
        self.thread, self.jobs = None, []
        for note in sorted(self.folder.glob("*.json")):
            to, event, values, about = json.loads(note.read_text())
            number = next((n for n, saver in enumerate(savers) if saver.text == to and event in saver.events), None)
            if number is not None:
                self.waiting[number, event] = note.with_suffix(".pt"), values, about
            self.number = max(self.number, int(note.name.partition("_")[0]))
        for file in self.folder.glob("*"):
            if file.with_suffix(".pt") not in [item[0] for item in self.waiting.values()]:
                file.unlink()  # of a saver that is no more, or cut off in the middle
        if self.waiting:
            self._begin()

    def _begin(self):
        self.thread = self.thread or concurrent.futures.ThreadPoolExecutor(1, "outbox")
        self.jobs = [job for job in self.jobs if not job.done()] + [self.thread.submit(self.deliver)]

    def kinds(self, event):
        """The kinds of files that are wanted at an `event`."""
        return {saver.kind for saver in self.savers if event in saver.events}

    def post(self, written, event, kind, file, values, about, passing=False):
        """Send a copy of `file` as it is now to all that want that kind at that `event`, in place of ones that wait.

        written: the finished future that wrote it. passing: `file` itself is not wanted any longer.
        """
        if written.exception():  # which the training hears of
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for number, saver in enumerate(self.savers):
                if event in saver.events and saver.kind == kind:
                    self.number += 1
                    own = self.folder / f"{self.number:06d}_{event}.pt"
                    try:
                        os.link(file, own)  # a second name: what writes `file` anew replaces it, and leaves this alone
                    except OSError:
                        shutil.copyfile(file, own)
                    checkpoint.write_json([saver.text, event, values, about], own.with_suffix(".json"))
                    if before := self.waiting.pop((number, event), None):
                        self._drop(before[0])
                    self.waiting[number, event] = own, values, about
            if passing:
                file.unlink()
        except OSError as error:
            self.say(f"--save: {error}; training goes on")
        self._begin()

    def _drop(self, file):
        file.with_suffix(".json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)

    def deliver(self):
        """Send all that waits, also what failed before."""
        for key in [*self.waiting]:
            if not (item := self.waiting.pop(key, None)):
                continue
            (file, values, about), (number, event) = item, key
            try:
                self.savers[number].send(file, event, values, about)
            except Exception as error:  # of a network, a quota, a token: whatever it is, training goes on
                if self.waiting.setdefault(key, item) is not item:
                    self._drop(file)
                if (kind := (number, type(error))) not in self.told:
                    self.told.add(kind)
                    self.say(f"--save {self.savers[number].text}: the copy of step {values['step']} failed: "
                             f"{type(error).__name__}: {one_line(error)}; training goes on, the next save tries again")
            else:
                self._drop(file)

    def finish(self, seconds=None):
        """Wait for what is on its way, and try once more what has failed; no longer than so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        for once_more in (True, False):
            jobs, self.jobs = self.jobs, []
            for job in tqdm(jobs, desc="waiting for copies on their way", unit="save", leave=False, disable=not jobs):
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    job.result(end and max(0, end - time.monotonic()))
            if self.waiting and once_more:
                self._begin()
        for (number, event), (file, _, _) in [*self.waiting.items()]:
            self.say(f"--save {self.savers[number].text}: the {event} copy could not be sent; the next start of this "
                     f"run tries again, with {file}")
        if not self.waiting:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def one_line(error):
    """The first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
