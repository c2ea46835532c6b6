"""Data: splits of a data set, batches, embedding shards (.npy).

A dataset has these methods:
    len(dataset)
    fetch(indices, random_words=None) -> (batch, usable)    dict of tensors and lists, bool (n,)
    split(name, validation, test, seed) -> indices          name: "train", "validation" or "test"
    name(index) -> text for messages
    check() -> (unusable, checked, messages)                before training
    fingerprint() -> dict                                   changes when the data does

A script reads the training split without end by `loader(ChunkDataset(…), training_spans(…))`,
and the others by `batches`.
"""

import atexit
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import torch

from common import accumulate, checkpoint, config, dist, order
from common.config import UserError, need

MAX_UNUSABLE = 0.01  # a larger fraction of unusable rows is refused
FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_enc": "text_enc"}


def splits(dataset, cfg, val_dataset=None):
    """{"train", "validation", "test": (dataset, indices)}.

    With a `val_dataset`, validation is all of that.
    """
    validation = 0.0 if val_dataset else cfg.validation
    found = {}
    for name in ("train", "validation", "test"):
        found[name] = dataset, dataset.split(name, validation, cfg.test, cfg.split_seed)
    if val_dataset:
        found["validation"] = val_dataset, val_dataset.split("train", 0.0, 0.0)

    needed = {"train": cfg.batch_size, "validation": 1, "test": 1}
    for name, (_, indices) in found.items():
        if len(indices) < needed[name]:
            raise UserError(
                f"{cfg.data}: {len(indices)} samples for {name}, expected at least "
                f"{needed[name]}; change --batch_size, --validation or --test"
            )
    return found


def is_built_in(folder):
    """Whether clip.builtin_data wrote this folder: its captions come with their attributes."""
    path = Path(folder, "clip.json")
    return path.is_file() and "made_from" in config.read_json(path)


def clip_of(folder, init_from=""):
    """The CLIP that clip.json in a folder of data names, or None, and its fingerprint.

    Both may have moved together. Without clip.json it is the CLIP of the model `init_from`, if any.
    """
    path = Path(folder) / "clip.json"
    if path.is_file():
        note = config.read_json(path)
        spec = note.get("clip")
        if "place" in note:
            spec = checkpoint.resolve_path(spec, note["place"], folder)
        return spec, note.get("fingerprint")

    state = checkpoint.peek(init_from) if init_from else {}
    if not state.get("clip"):
        return None, None
    stored_folder = os.path.join(state["cwd"], state["config"]["run_dir"])
    model_folder = Path(init_from).absolute().parent
    spec = checkpoint.resolve_path(state["clip"], stored_folder, model_folder, state["cwd"])
    return spec, state.get("clip_fingerprint")


def check_lengths(cfg, dataset, path):
    """UserError if a model of raw embeddings would get unit-length ones, the default of files."""
    if not cfg.raw_embeddings:
        return
    batch, _ = dataset.fetch(evenly_spaced(len(dataset), 16))
    if "image_embed" not in batch:  # a CLIP will compute them
        return
    length = batch["image_embed"].norm(dim=1).nanmedian().item()
    if abs(length - 1) < 0.01:
        raise UserError(
            f"{path}: its embeddings are of unit length, but the model is one of raw embeddings; "
            "write them anew with python -m common.clip embed --raw"
        )


class Unusable(UserError):
    """A sample that cannot be used, with the reason. Training goes on with the next one."""


def evenly_spaced(count, most):
    """At most `most` evenly spaced numbers (int64) below `count`."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def files_below(folder):
    """Sorted paths of the files below a folder. Links to folders are entered, each folder once."""
    entered = set()
    files = []
    for parent, folders, names in os.walk(folder, onerror=fail_if_refused, followlinks=True):
        place = os.path.realpath(parent)
        if place in entered:
            folders.clear()
            continue
        entered.add(place)
        folders.sort()  # which of two links is entered must not depend on the file system
        files += [os.path.join(parent, name) for name in names]
    files.sort()
    broken = [file for file in files if not os.path.exists(file)]
    if broken:
        config.note(f"{len(broken)} links lead nowhere, and are left out: {broken[0]}, …")
    return list(map(Path, filter(os.path.isfile, files)))


def fail_if_refused(error):
    if isinstance(error, PermissionError):  # else the samples in it would be missing silently
        raise error


def clean_caption(value):
    """The caption of a sample: a text, or a list of several. TypeError of another `value`.

    None and an empty list are "".
    """
    texts = value if isinstance(value, list) else ["" if value is None else value]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{value!r:.100} is not a text, nor a list of texts")
    texts = [text.strip() for text in texts] or [""]
    return texts if len(texts) > 1 else texts[0]


def choose_caption(caption, fraction=0.0):
    """One text of a caption (see `clean_caption`), by a `fraction` in [0, 1), or the first."""
    if isinstance(caption, str):
        return caption
    return caption[int(fraction * len(caption))]


def check_samples(dataset, most):
    """(unusable, looked at, first faults) of 256 evenly spaced samples, by `dataset.fault`.

    UserError if more than `most`, or all, are unusable.
    """
    indices = evenly_spaced(len(dataset), 256)
    faults = list(filter(None, map(dataset.fault, indices)))
    if len(faults) > min(most, len(indices) - 1):
        raise UserError(
            f"{dataset.path}: {len(faults)} of {len(indices)} samples cannot be used: "
            f"{faults[0]}; mend or remove them"
        )
    return len(faults), len(indices), faults[:5]


def digest_of(files, most=100):
    """16 digits that change with the names or sizes of `files`, or the start of `most` of them."""
    sizes = [(Path(file).name, os.stat(file).st_size) for file in files]
    digest = hashlib.sha256(repr(sizes).encode())
    for number in evenly_spaced(len(files), most):
        with open(files[number], "rb") as file:
            digest.update(file.read(2**16))
    return digest.hexdigest()[:16]


def left_out(path, kinds):
    """A line about the files below `path` that are not used, "" if there are none.

    kinds: {kind of file: number of files}.
    """
    if not kinds:
        return ""
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return f"{path}: left out are files of kinds that are not read ({counts})"


@dataclasses.dataclass(eq=False)
class ChunkDataset(torch.utils.data.Dataset):
    """The chunks of a run's batches: item (first position, one past the last) -> batch.

    With a seed, `indices` are shuffled anew each epoch, and `fetch` gets random words of seed and
    position for what is random in a sample. Without (evaluation), samples come in order and nothing
    is random. An unusable sample, or one of `leave_out`, is replaced by the next of `indices`, on
    any rank alike, and batch["unusable"] has its `dataset.fault(index)` or `dataset.name(index)`.
    """

    dataset: object
    indices: object  # int array, or order.Complement
    seed: int | None = None
    leave_out: tuple = ()  # names of samples

    def __getitem__(self, span):
        places = np.arange(*span)
        random_words = None
        if self.seed is not None:
            random_words = order.random_words(places, self.seed)
            places = order.shuffle(places, len(self.indices), self.seed)

        fault = getattr(self.dataset, "fault", self.dataset.name)
        unusable = []
        while True:
            indices = self.indices[places]
            batch, usable = self.dataset.fetch(indices, random_words)
            if self.leave_out:
                usable &= [self.dataset.name(index) not in self.leave_out for index in indices]
            if usable.all():
                return {**batch, "index": torch.from_numpy(indices), "unusable": unusable}
            unusable += [fault(index) or self.dataset.name(index) for index in indices[~usable]]
            if len(unusable) > 100 + MAX_UNUSABLE * len(self.indices):
                raise UserError(
                    f"{len(unusable)} unusable rows (not finite, all zero or "
                    f"unreadable): {unusable[0]}, …; mend or remove them"
                )
            places[~usable] = (places[~usable] + 1) % len(self.indices)


def loader(chunks, spans, workers=0, pin_memory=False, timeout=0):
    """Items of a ChunkDataset at `spans`, an iterable, in order, read ahead by `workers`.

    timeout: seconds after which a worker that does not answer is a UserError, 0: none.
    """
    if workers:
        atexit.register(kill_workers)
    try:
        yield from torch.utils.data.DataLoader(
            chunks,
            batch_size=None,
            sampler=spans,
            num_workers=workers,
            pin_memory=pin_memory,
            worker_init_fn=ignore_signals,
            timeout=timeout if workers else 0,
        )
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        raise UserError(f"--workers {workers}: {error}; is the data's disk still there?") from None
    except UserError as error:  # a worker adds its traceback to the message
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None


def ignore_signals(worker):
    """Leave SIGTERM and Ctrl-C to the rank: they are also sent to its workers."""
    for number in dist.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers():
    """End the workers of a rank that ends by an error: Python would do it by SIGTERM, and wait."""
    if hasattr(signal, "SIGCHLD"):  # which torch handles, and would report a killed worker by
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def training_spans(plan, batch_size, step):
    """The spans (first position, one past the last) of a rank's chunks from `step` on, endless."""
    for start in itertools.count(step * batch_size, batch_size):
        for chunk in plan:
            yield start + chunk.start, start + chunk.stop


def batches(dataset, indices, most, chunk_size):
    """This rank's (number, batch) of the first `most` (0: all) samples; ranks take turns.

    Collective: all ranks read to the end, and meet before every batch to see whether to stop.
    """
    chunks = ChunkDataset(dataset, indices)
    count = min(len(indices), most or len(indices))
    for number in dist.deal(math.ceil(count / chunk_size)):
        start = number * chunk_size
        yield number, chunks[start, min(count, start + chunk_size)]


def to_device(batch, device):
    """`batch` with tensors and numpy arrays moved to `device`, other values unchanged."""
    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, (np.ndarray, torch.Tensor)):
            moved[name] = torch.as_tensor(value).to(device, non_blocking=True)
    return moved


# Embeddings, as clip-retrieval writes them


class NpyFile:
    """A float16 or float32 .npy file of `ndim` dimensions: item (int array) -> float32 rows.

    It is opened anew at each reading, because thousands of files cannot be open at once. Opening
    compares its size with its header, so a file that was cut meanwhile is an error, not a crash.
    """

    def __init__(self, path, ndim):
        self.path = str(path)
        self.ndim = ndim
        self.shape = self._open().shape

    def _open(self):
        with config.explained(
            f"{self.path}: not a readable .npy array; expected float16 or float32 of {self.ndim} "
            "dimensions"
        ):
            array = np.load(self.path, mmap_mode="r")  # compares the header with the file's size
            if array.dtype not in (np.float16, np.float32) or array.ndim != self.ndim:
                raise ValueError(f"{array.dtype} of shape {array.shape}")
            return array

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, indices):
        return self._open()[indices].astype(np.float32)


def shard_files(folder, name, suffix):
    """{N: path} of the files NAME_N.suffix in `folder`, by number; N may have leading zeros."""
    files = {}
    for path in folder.glob(f"{name}_*{suffix}"):
        number = path.stem.removeprefix(f"{name}_")
        if number.isdecimal():
            files[int(number)] = path
    return dict(sorted(files.items()))


class Shards:
    """The rows of all arrays `FOLDER/NAME_N.npy`, by N: item (int array) -> float32 rows."""

    def __init__(self, folder, name):
        ndim = 3 if name == "text_enc" else 2
        files = shard_files(folder, name, ".npy")
        self.arrays = {number: NpyFile(path, ndim) for number, path in files.items()}
        self.sizes = {number: len(array) for number, array in self.arrays.items()}
        shapes = {array.shape[1:] for array in self.arrays.values()}
        if len(shapes) != 1:
            raise UserError(
                f"{folder}: no such folder, or no {name}_N.npy files with rows of one "
                f"shape: {shapes or 'none'}"
            )
        [self.shape] = shapes

    def __len__(self):
        return sum(self.sizes.values())

    def locate(self, indices):
        """The shard number of each of `indices` (n,) and its row there, as two int arrays (n,)."""
        numbers = np.array(list(self.sizes))
        sizes = np.array(list(self.sizes.values()))
        ends = np.cumsum(sizes)
        shards = np.searchsorted(ends, indices, side="right")
        return numbers[shards], indices - (ends - sizes)[shards]

    def __getitem__(self, indices):
        shards, rows = self.locate(indices)
        values = np.empty((len(indices), *self.shape), np.float32)
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            values[inside] = self.arrays[shard][rows[inside]]
        return values


class Embeddings:
    """Embeddings in `img_emb/`, `text_emb/`, and optionally `text_enc/` and captions.

    Files are matched by shard number. With `captions`, `text_emb/` may be missing. `self.captions`
    holds the files of captions by number; it is empty if there are none. Image and text embeddings
    may be of two encoders: `width` and `text_width`.

    `fetch` returns {"image_embed" (n, D), "text_embed" (n, D), "text_enc" (n, L, E), "caption"
    list}, in float32. A row is not usable if one of its embeddings is all zero or not finite.
    """

    def __init__(self, folder, text_encodings=False, captions=False, caption_key=""):
        self.folder = Path(folder)
        self.caption_key = caption_key or "caption"
        self.with_captions = captions
        names = ["image_embed"]
        if not captions or (self.folder / "text_emb").is_dir():
            names.append("text_embed")
        if text_encodings:
            names.append("text_enc")
        self.tables = {name: Shards(self.folder / FOLDERS[name], FOLDERS[name]) for name in names}
        self.images = self.tables["image_embed"]
        self.width = self.images.shape[0]
        self.text_width = self.tables.get("text_embed", self.images).shape[0]
        for name, table in self.tables.items():
            differences = self.images.sizes.items() ^ table.sizes.items()
            if differences:
                raise UserError(
                    f"{self.folder}: img_emb and {FOLDERS[name]} must match; shards (number, rows) "
                    f"in one only: {sorted(differences)[:2]}"
                )

        self.captions = shard_files(self.folder / "captions", "captions", ".jsonl")
        if not self.captions:
            self.captions = shard_files(self.folder / "metadata", "metadata", ".parquet")
        missing = self.images.sizes.keys() - self.captions.keys()
        if missing and (captions or self.captions):
            raise UserError(
                f"{folder}: no captions for shard {min(missing)}; expected captions/"
                "captions_N.jsonl or metadata/metadata_N.parquet beside img_emb/"
            )
        self.records_read = {}  # by shard number

    def __len__(self):
        return len(self.images)

    def split(self, name, validation, test, seed=0):
        return order.split_indices(len(self), name, validation, test, seed)

    def name(self, index):
        """The shard of a row and its place in it, for messages."""
        shard, row = self.images.locate(index)
        return f"img_emb_{shard}.npy row {row}"

    def _embeddings(self, indices):
        """`fetch` without captions."""
        batch = {}
        usable = np.ones(len(indices), bool)
        for name, table in self.tables.items():
            values = table[indices]
            flat = values.reshape(len(indices), -1)
            usable &= np.isfinite(flat).all(1)
            if name != "text_enc":  # whose padding is all zero
                usable &= flat.any(1)
            batch[name] = torch.from_numpy(values)
        return batch, usable

    def fetch(self, indices, random_words=None):
        """Read samples in any order. Of several captions of one, a random word chooses."""
        batch, usable = self._embeddings(indices)
        if self.with_captions:
            fractions = np.zeros(len(indices))
            if random_words is not None:
                fractions = order.uniform(random_words, 1)[:, 0]
            batch["caption"] = [
                choose_caption(record["caption"], fraction)
                for record, fraction in zip(self.records(indices), fractions)
            ]
        return batch, usable

    def texts(self, indices):
        """A caption of each of the samples, if the model is conditioned on captions."""
        if not self.with_captions:
            return []
        return [choose_caption(record["caption"]) for record in self.records(indices)]

    def records(self, indices):
        """The records of samples, at least {"caption": see `clean_caption`}.

        A shard is read once.
        """
        found = []
        for number, row in zip(*self.images.locate(np.asarray(indices))):
            if number not in self.records_read:
                size = self.images.sizes[number]
                path = self.captions[number]
                self.records_read[number] = read_captions(path, size, self.caption_key)
            found.append(self.records_read[number][row])
        return found

    def check(self, most=100_000):
        """(unusable, checked, names of the first) of `most` evenly spaced rows.

        UserError if many are unusable.
        """
        checked = evenly_spaced(len(self), most)
        unusable = []
        for indices in np.array_split(checked, math.ceil(len(checked) / 256)):
            _, usable = self._embeddings(indices)
            unusable += indices[~usable].tolist()
        names = [self.name(index) for index in unusable[:5]]
        if len(unusable) > MAX_UNUSABLE * len(checked):
            raise UserError(
                f"{self.folder}: {len(unusable)} of {len(checked)} rows are not finite "
                f"or all zero: {', '.join(names)}, …; mend or remove them"
            )
        return len(unusable), len(checked), names

    def fingerprint(self):
        """Values that change when the data does: rows, width, digest of the files' starts."""
        files = []
        for name, table in self.tables.items():
            if not (name == "text_embed" and self.with_captions):  # then it may be missing
                files += [array.path for array in table.arrays.values()]
        files += self.captions.values()
        return {"rows": len(self), "width": self.width, "digest": digest_of(files)}


def read_captions(path, size, key="caption"):
    """The `size` records {"caption": …} of a captions_N.jsonl or metadata_N.parquet.

    key: of the captions in the file.
    """
    if path.suffix == ".parquet":
        parquet = need("pyarrow.parquet", f"{path}: reading parquet")
    with config.explained(f"{path}: expected a {key!r} for each of {size} rows of the shard"):
        if path.suffix == ".parquet":
            records = parquet.read_table(path, columns=[key]).to_pylist()
        else:
            lines = config.decode_text(path.read_bytes(), path).rstrip("\n").split("\n")
            records = [json.loads(line) for line in lines]
        if len(records) != size:
            raise ValueError(f"{len(records)} captions")
        return [{**record, "caption": clean_caption(record[key])} for record in records]


def write_shards(
    folder, image_embeddings, text_embeddings, records, encodings=None, rows_per_shard=100_000
):
    """Write embeddings (N, D) and maybe token encodings (N, L, E) as shards.

    records: N captions [{"caption": text}], or []. Earlier shards in `folder` are removed, so that
    two sets of embeddings never mix. float16 stays, all else becomes float32.
    """
    folder = Path(folder)
    tables = {"img_emb": image_embeddings, "text_emb": text_embeddings}
    if encodings is not None:
        tables["text_enc"] = encodings
    if records:
        tables["captions"] = records
    shards = list(accumulate.split(tables, rows_per_shard))
    for name in (*FOLDERS.values(), "captions"):
        for path in (folder / name).glob(f"{name}_*"):
            path.unlink()

    for number, shard in enumerate(shards):
        for name, rows in shard.items():
            suffix = ".jsonl" if name == "captions" else ".npy"
            with checkpoint.atomic_write(folder / name / f"{name}_{number}{suffix}") as file:
                if name == "captions":
                    for record in rows:
                        file.write(json.dumps(record).encode() + b"\n")
                else:
                    values = np.asarray(rows)
                    kind = np.float16 if values.dtype == np.float16 else np.float32
                    np.save(file, values.astype(kind))
