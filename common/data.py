"""Data: splits of a data set, batches, embedding shards (.npy).

A source has `len`, `fetch(rows, draws=None) -> (batch, good)`, `split(part, validation, test, seed) -> rows`,
`name(row)` for messages, `check()` before training and `fingerprint()`. A script reads the training part without end
by `loader(Chunks(…), training_spans(…))`, and the others by `batches`.
"""
import hashlib
import itertools
import json
import math
import os
import re
import signal
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, config, dist
from common.config import UserError, need
from common.order import Split, draws, part_of, shuffled, uniform  # noqa: F401 (sources need them)

BAD_SHARE = 0.01  # a larger share of unusable rows is refused
FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_enc": "text_enc"}


def parts(source, cfg, val_source=None):
    """{"train", "validation", "test": (source, rows)}. With a `val_source`, validation is all of that."""
    share = 0.0 if val_source else cfg.validation
    found = {part: (source, source.split(part, share, cfg.test, cfg.split_seed))
             for part in ("train", "validation", "test")}
    if val_source:
        found["validation"] = val_source, val_source.split("train", 0.0, 0.0)
    if (rows := len(found["train"][1])) < cfg.batch_size:
        raise UserError(f"{cfg.data}: {rows} training rows, fewer than --batch_size {cfg.batch_size}; lower it")
    for part in ("validation", "test"):
        if not len(found[part][1]):
            raise UserError(f"{cfg.data}: {len(source)} rows leave none for {part}; raise --{part}")
    return found


def clip_of(folder, init_from=""):
    """(CLIP that clip.json in a folder of data names, or None, its fingerprint).

    Both may have moved together. Without clip.json it is the CLIP of the model `init_from`, if given.
    """
    path = Path(folder) / "clip.json"
    if init_from and not path.is_file():
        state = checkpoint.peek(init_from)
        if not state.get("clip"):
            return None, None
        here = Path(init_from).absolute().parent
        place = os.path.join(state["cwd"], state["config"]["run_dir"])
        spec = checkpoint.located(state["clip"], place, here, state["cwd"])
        return spec, state.get("clip_fingerprint")
    note = {name: str(value) for name, value in config.read_json(path).items()} if path.is_file() else {}
    spec = note.get("clip")
    return checkpoint.located(spec, note["place"], folder) if "place" in note else spec, note.get("fingerprint")


def check_lengths(cfg, source, path):
    """UserError if a model of raw embeddings would get some of unit length, the default of files."""
    if not cfg.raw_embeddings:
        return
    lengths = []
    for row in spread(len(source), 16):
        batch, good = source.fetch(np.array([row]))
        if good.all() and "image_embed" in batch:  # else a CLIP makes them
            lengths.append(batch["image_embed"].norm().item())
    if lengths and abs(np.median(lengths) - 1) < 0.01:
        raise UserError(
            f"{path}: its embeddings are of unit length, but the model is one of raw embeddings; "
            "write them anew with python -m common.clip embed --raw")


def spread(count, most):
    """At most `most` evenly spaced numbers (int64) below `count`."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def digest_of(files, most=100):
    """16 digits that change with names or sizes of `files`, or with the first or last bytes of `most` of them."""
    digest = hashlib.sha256(repr([(Path(file).name, os.stat(file).st_size) for file in files]).encode())
    for number in spread(len(files), most):
        with open(files[number], "rb") as file:
            digest.update(file.read(4096))
            file.seek(-min(4096, os.fstat(file.fileno()).st_size), os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def left_out(path, bare, kinds):
    """A line about the files below `path` that are not used, "" if there are none.

    bare: names of images without a caption; kinds: {extension: number of files} of what is not read.
    """
    lines = [f"{len(bare)} images without a caption ({', '.join(bare[:3])}{', …' * (len(bare) > 3)})"] if bare else []
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    lines += [f"files of kinds that are not read ({counts})"] if kinds else []
    return f"{path}: left out are {' and '.join(lines)}" if lines else ""


class Chunks(torch.utils.data.Dataset):
    """The chunks of a run's batches: item (first position, one past the last) -> dict of tensors and lists.

    With a seed, `rows` are shuffled anew each epoch, and `source.fetch` gets draws of seed and position for what is
    random in a sample. Without (evaluation), rows come in order and nothing is random. An unusable row is replaced by
    the next of `rows` on any rank; "unusable" has its `source.fault(row)` or else `source.name(row)`.
    """

    def __init__(self, source, rows, seed=None):
        self.source, self.rows, self.seed = source, rows, seed

    def __getitem__(self, span):
        places, random, unusable = np.arange(*span), None, []
        if self.seed is not None:
            places, random = shuffled(places, len(self.rows), self.seed), draws(places, self.seed)
        while True:
            rows = self.rows[places]
            batch, good = self.source.fetch(rows, random)
            if good.all():
                return {**batch, "rows": torch.from_numpy(rows), "unusable": unusable}
            unusable += [getattr(self.source, "fault", self.source.name)(row) for row in rows[~good]]
            if len(unusable) > 100 + BAD_SHARE * len(self.rows):
                raise UserError(f"more than {len(unusable) - 1} unusable rows (not finite, all zero or unreadable) "
                                f"where {len(rows)} were to be read: {unusable[0]}, …; mend or remove them")
            places[~good] = (places[~good] + 1) % len(self.rows)


def loader(chunks, spans, workers=0, pin_memory=False):
    """Items of `chunks` at `spans`, an iterable of (first, one past last), in order, read ahead by `workers`."""
    try:
        yield from torch.utils.data.DataLoader(chunks, batch_size=None, sampler=spans, num_workers=workers,
                                               pin_memory=pin_memory, worker_init_fn=ignore_signals)
    except UserError as error:  # a worker's comes with its traceback
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None


def ignore_signals(worker):
    """Leave SIGTERM and Ctrl-C to the rank: torchrun and terminals send them to its workers, too."""
    for number in dist.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def training_spans(plan, batch_size, step):
    """The spans of this rank's chunks, `plan`, from `step` on, without end."""
    for start in itertools.count(step * batch_size, batch_size):
        for chunk in plan:
            yield start + chunk.start, start + chunk.stop


def batches(source, rows, most, chunk_size):
    """This rank's (number, batch) of the first `most` (0: all) of the `rows`; ranks take turns.

    Collective: all ranks read to the end, and meet before every batch to see whether to stop.
    """
    count, chunks = min(len(rows), most or len(rows)), Chunks(source, rows)
    for number in dist.deal(math.ceil(count / chunk_size)):
        yield number, chunks[number * chunk_size, min(count, (number + 1) * chunk_size)]


def to_device(batch, device):
    """`batch` with tensors and numpy arrays moved to `device`, other values unchanged."""
    return {name: torch.as_tensor(value).to(device, non_blocking=True)
            if isinstance(value, (np.ndarray, torch.Tensor)) else value for name, value in batch.items()}


# Embeddings, as clip-retrieval writes them

class Rows:
    """The rows of a float16 or float32 .npy file of `ndim` dimensions: [rows (n,)] -> float32 (n, …).

    They are read one by one: a memory map would end the process without a word if the file is cut meanwhile.
    """

    def __init__(self, path, ndim):
        self.path = str(path)
        try:
            array = np.load(path, mmap_mode="r")  # which compares the header with the size of the file
            self.shape, self.dtype, self.offset = array.shape, array.dtype, array.offset
            self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            if self.dtype not in (np.float16, np.float32) or array.ndim != ndim or not array.flags.c_contiguous:
                raise ValueError(f"{self.dtype} of shape {self.shape}")
        except Exception as error:  # numpy raises a dozen types for a damaged header
            raise UserError(f"{path}: not a readable .npy array: {error}; expected float16 or float32 of {ndim} "
                            "dimensions") from error

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        places = (self.offset + np.asarray(rows) * self.row_bytes).tolist()
        found = []
        with open(self.path, "rb", buffering=0) as file:
            for place in places:
                file.seek(place)
                found.append(file.read(self.row_bytes))
        content = b"".join(found)
        if len(content) < len(rows) * self.row_bytes:
            raise UserError(f"{self.path}: was cut off while it was read; write it again")
        return np.frombuffer(content, self.dtype).reshape(len(rows), *self.shape[1:]).astype(np.float32)


def shard_files(folder, name, suffix):
    """{N: path} of the files NAME_N.suffix in `folder`, by number, however many zeros N is padded with."""
    names = {path: re.fullmatch(rf"{name}_(\d+){re.escape(suffix)}", path.name) for path in folder.glob("*")}
    return dict(sorted((int(match[1]), path) for path, match in names.items() if match))


class Shards:
    """The rows of all arrays `FOLDER/NAME_N.npy`, in the order of N: item (rows (n,)) -> float32 (n, …)."""

    def __init__(self, folder, name):
        self.arrays = {number: Rows(path, 3 if name == "text_enc" else 2)
                       for number, path in shard_files(folder, name, ".npy").items()}
        self.numbers, self.sizes = list(self.arrays), [len(array) for array in self.arrays.values()]
        if not sum(self.sizes):
            raise UserError(f"{folder}: no such folder, or no {name}_N.npy files with rows in it")
        self.shape = self.arrays[self.numbers[0]].shape[1:]
        for number, array in self.arrays.items():
            if array.shape[1:] != self.shape:
                raise UserError(f"{folder}: rows of shape {array.shape[1:]} in shard {number}, but {self.shape} in the "
                                "first; all must come from one model")

    def place(self, rows):
        """(number of the shard, place in it) of each of the `rows` (n,), as two int arrays (n,)."""
        ends = np.cumsum(self.sizes)
        shards = np.searchsorted(ends, rows, side="right")
        return np.array(self.numbers)[shards], rows - (ends - self.sizes)[shards]

    def __getitem__(self, rows):
        shards, places = self.place(rows)
        values = np.empty((len(rows), *self.shape), np.float32)
        for shard in np.unique(shards).tolist():
            values[shards == shard] = self.arrays[shard][places[shards == shard]]
        return values


class Embeddings:
    """Rows of `img_emb/`, `text_emb/`, and optionally `text_enc/` and captions, matched by shard number.

    With `captions`, `text_emb/` may be missing. `self.captions` is None if the folder has none.
    fetch(rows) -> ({"image_embed" (n, D), "text_embed" (n, D), "text_enc" (n, L, E), "caption" list}, good (n,)),
    float32; a row is not good if one of its embeddings is all zero or not finite.
    """

    def __init__(self, folder, text_encodings=False, captions=False):
        self.folder, self.with_captions = Path(folder), captions
        wanted = {"image_embed": True, "text_embed": not captions or (self.folder / "text_emb").is_dir(),
                  "text_enc": text_encodings}
        self.tables = {name: Shards(self.folder / FOLDERS[name], FOLDERS[name]) for name in FOLDERS if wanted[name]}
        self.images = self.tables["image_embed"]
        self.width = self.images.shape[0]
        for name, table in self.tables.items():
            of_images, found = ({number: array.shape[:1 if name == "text_enc" else 2] for number, array
                                 in shards.arrays.items()} for shards in (self.images, table))
            if differ := of_images.items() ^ found.items():
                number = min(differ)[0]
                raise UserError(f"{self.folder}: shard {number} is {of_images.get(number, 'missing')} in img_emb "
                                f"and {found.get(number, 'missing')} in {FOLDERS[name]}; they must match")
        files = (shard_files(self.folder / "captions", "captions", ".jsonl")
                 or shard_files(self.folder / "metadata", "metadata", ".parquet"))
        self.captions = Captions(self.folder, files, self.images) if files or captions else None

    def __len__(self):
        return sum(self.images.sizes)

    def split(self, part, validation, test, seed=0):
        """The rows of "train", "validation" or "test"."""
        return Split(len(self), part, validation, test, seed)

    def name(self, row):
        """The shard of a row and its place in it, for messages."""
        shard, place = self.images.place(row)
        return f"img_emb_{shard}.npy row {place}"

    def _embeddings(self, rows):
        """`fetch` without captions."""
        batch, good = {}, np.ones(len(rows), bool)
        for name, table in self.tables.items():
            flat = (values := table[rows]).reshape(len(rows), -1)
            good &= np.isfinite(flat).all(1) & (flat.any(1) | (name == "text_enc"))  # padding is all zero
            batch[name] = torch.from_numpy(values)
        return batch, good

    def fetch(self, rows, draws=None):
        """Read `rows` (n,) in any order; nothing in them is random."""
        batch, good = self._embeddings(rows)
        if self.with_captions:
            batch["caption"] = [record["caption"] for record in self.captions.records(rows)]
        return batch, good

    def check(self, most=100_000):
        """(unusable, checked, names of the first) of `most` evenly spaced rows; UserError if many are unusable."""
        rows = spread(len(self), most)
        bad = np.concatenate([some[~self._embeddings(some)[1]] for some in np.array_split(rows, -(-len(rows) // 256))])
        names = [self.name(row) for row in bad[:5]]
        if len(bad) > BAD_SHARE * len(rows):
            raise UserError(f"{self.folder}: {len(bad)} of {len(rows)} rows are not finite or all zero, more than "
                            f"1 in 100: {', '.join(names)}, …; mend or remove them")
        return len(bad), len(rows), names

    def fingerprint(self):
        """Facts that change when the data does: rows, width, and a digest of files, sizes and a few contents."""
        files = [array.path for name, table in self.tables.items() for array in table.arrays.values()
                 if not (name == "text_embed" and self.with_captions)]  # which may be missing
        files += map(str, self.captions.files.values() if self.captions else ())
        return {"rows": len(self), "width": self.width, "digest": digest_of(files)}


class Captions:
    """Records {"caption": …} of captions_N.jsonl or metadata_N.parquet; a shard is read at its first use, and kept."""

    def __init__(self, folder, files, images):
        if missing := [number for number in images.numbers if number not in files]:
            raise UserError(f"{folder}: no captions for shard {missing[0]}; expected captions/captions_N.jsonl or "
                            "metadata/metadata_N.parquet beside img_emb/")
        self.files, self.images, self.shards = files, images, {}

    def _read(self, number):
        path, rows = self.files[number], len(self.images.arrays[number])
        parquet = need("pyarrow.parquet", f"{path}: reading parquet") if path.suffix == ".parquet" else None
        try:
            records = (parquet.read_table(path, columns=["caption"]).to_pylist() if parquet else
                       [json.loads(line) for line in path.read_bytes().splitlines()])
            if len(records) != rows:
                raise ValueError(f"{len(records)} captions")
            return [{**record, "caption": str(record["caption"] or "")} for record in records]
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise UserError(f"{path}: expected a 'caption' for each of {rows} rows of the shard ({error!r})") from error

    def records(self, rows):
        """The records, at least {"caption": str}, of `rows` (n,)."""
        shards, places = (found.tolist() for found in self.images.place(np.asarray(rows)))
        for number in set(shards) - self.shards.keys():
            self.shards[number] = self._read(number)
        return [self.shards[number][place] for number, place in zip(shards, places)]

    def built_in(self):
        """Whether they come with the attributes of the built-in data."""
        return "attributes" in self.records([0])[0]


def write_shards(folder, image_embeddings, text_embeddings, records, encodings=None, rows_per_shard=100_000):
    """Write embeddings (N, D), records [{"caption": …}] and maybe encodings (N, L, E) as shards, in float16.

    Earlier shards in `folder` are removed: two sets of embeddings must not be mixed.
    """
    folder = Path(folder)
    for name in (*FOLDERS.values(), "captions"):
        for path in (folder / name).glob(f"{name}_*"):
            path.unlink()
    for number, start in enumerate(range(0, len(records), rows_per_shard)):
        rows = slice(start, start + rows_per_shard)
        for name, values in zip(FOLDERS.values(), (image_embeddings, text_embeddings, encodings)):
            if values is not None:
                with checkpoint.replacing(folder / name / f"{name}_{number}.npy") as file:
                    np.save(file, np.asarray(values[rows], np.float16))
        with checkpoint.replacing(folder / "captions" / f"captions_{number}.jsonl") as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records[rows])
