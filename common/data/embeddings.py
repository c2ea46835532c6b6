"""Embeddings in shards (.npy), as clip-retrieval writes them, with captions.

`Embeddings` is a dataset (see order.py).
"""

import functools
import json
import math
from pathlib import Path

import numpy as np
import torch

from common import accumulate, checkpoint, config, tracker
from common.config import UserError
from common.data import files, order

FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_enc": "text_enc"}
MAX_LOG_RATIO = 2  # of a usable embedding's length to the median one: a factor of 7.4
MIN_COSINE = 0.3  # of a CLIP's embeddings with stored ones: with those of another it is about 0


class NpyFile:
    """A float16 or float32 .npy file of `ndim` dimensions: item (int array) -> float32 rows.

    It is opened anew at each reading, because thousands of files cannot be open at once. Opening
    compares its size with its header, so a file that was cut meanwhile is an error, not a crash.
    """

    def __init__(self, path, ndim):
        self.path = path
        self.ndim = ndim
        self.shape = self._open().shape

    def _open(self):
        expected = f"float16 or float32 of {self.ndim} dimensions"
        with config.explained(f"{self.path}: not a readable .npy array; expected {expected}"):
            array = np.load(self.path, mmap_mode="r")
            if array.dtype not in (np.float16, np.float32) or array.ndim != self.ndim:
                raise ValueError(f"{array.dtype} of shape {array.shape}")
            return array

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, indices):
        return self._open()[indices].astype(np.float32)


def shard_files(folder, name, suffix):
    """{N: path} of the files NAME_N.suffix in `folder`, by number; N may have leading zeros."""
    paths = {}
    for path in Path(folder).glob(f"{name}_*{suffix}"):
        number = path.stem.removeprefix(f"{name}_")
        if number.isdecimal():
            paths[int(number)] = path
    return dict(sorted(paths.items()))


class Shards:
    """The rows of all arrays `FOLDER/NAME_N.npy`, by N: item (int array) -> float32 rows."""

    def __init__(self, folder, name):
        self.folder = folder
        ndim = 3 if name == "text_enc" else 2
        paths = shard_files(folder, name, ".npy")
        self.arrays = {number: NpyFile(path, ndim) for number, path in paths.items()}
        self.sizes = {number: len(array) for number, array in self.arrays.items()}
        shapes = {array.shape[1:] for array in self.arrays.values()}
        if len(shapes) != 1:
            raise UserError(
                f"{folder}: no such folder, or no {name}_N.npy files with rows of one "
                f"shape: {shapes or 'none'}"
            )
        [self.shape] = shapes
        self.numbers = np.array(list(paths))
        self.starts = np.cumsum([0, *self.sizes.values()])  # first row of each, and the end

    def __len__(self):
        return int(self.starts[-1])

    @functools.cached_property
    def usual_length(self):
        """The median length of 256 rows (n, D); UserError if it is no length."""
        rows = self[files.evenly_spaced(len(self), 256)]
        length = torch.from_numpy(rows).norm(dim=1).nanmedian().item()
        if not 0 < length < math.inf:  # as of a file that claims more rows than were written
            raise UserError(f"{self.folder}: most rows are all zero or not finite; write it anew")
        return length

    def locate(self, indices):
        """The shard number of each of `indices` (n,) and its row there, as two int arrays (n,)."""
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        return self.numbers[shards], indices - self.starts[shards]

    def __getitem__(self, indices):
        shards, rows = self.locate(indices)
        values = np.empty((len(indices), *self.shape), np.float32)
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            values[inside] = self.arrays[shard][rows[inside]]
        return values


# Captions


class JsonLines:
    """The records of a captions_N.jsonl: item (int) -> dict.

    Training reads rows in random order. So this holds where every 64th line begins, which is less
    than a byte a row, and the 64 lines that were read last.
    """

    def __init__(self, path):
        self.path = path
        content = np.frombuffer(path.read_bytes().rstrip(b"\n") + b"\n", np.uint8)
        ends = np.flatnonzero(content == ord("\n")) + 1
        self.size = len(ends)
        self.starts = [0, *ends[63::64].tolist(), len(content)]
        self.block = None  # the number of the 64 lines that were read last

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        block, line = divmod(row, 64)
        if block != self.block:
            start, stop = self.starts[block : block + 2]
            with open(self.path, "rb") as file:
                file.seek(start)
                self.lines = file.read(stop - start).split(b"\n")
            self.block = block
        return json.loads(files.decode_text(self.lines[line], self.path))


@functools.lru_cache(16)  # shards: every worker of every rank holds as many
def parquet_captions(path):
    """The captions of a metadata_N.parquet: a pyarrow array.

    A row cannot be read alone. In random order, more shards than are kept are slow; write .jsonl.
    """
    parquet = config.need("pyarrow.parquet", f"{path}: reading parquet")
    column = files.caption_in({name: name for name in parquet.read_schema(path).names})
    return parquet.read_table(path, columns=[column])[column]


class Embeddings:
    """Embeddings in `img_emb/`, `text_emb/`, and optionally `text_enc/` and captions.

    Files are matched by shard number. With `captions`, `text_emb/` may be missing. `self.captions`
    holds the files of captions by number; it is empty if there are none. Embeddings of images and
    of texts are `width` wide.

    `fetch` returns {"image_embed" (n, D), "text_embed" (n, D), "text_enc" (n, L, E), "caption"
    list}, in float32. A row is not usable if one of its embeddings is all zero, not finite, or much
    longer or shorter than most are.
    """

    def __init__(self, folder, text_encodings=False, captions=False):
        self.folder = Path(folder)
        self.with_captions = captions
        names = ["image_embed"]
        if not captions or (self.folder / "text_emb").is_dir():
            names.append("text_embed")
        if text_encodings:
            names.append("text_enc")
        self.tables = {name: Shards(self.folder / FOLDERS[name], FOLDERS[name]) for name in names}
        self.encoding_width = self.tables["text_enc"].shape[1] if text_encodings else 0
        self.images = self.tables["image_embed"]
        self.width = self.images.shape[0]
        self.text_embeds = self.tables.get("text_embed", self.images)
        text_width = self.text_embeds.shape[0]
        if text_width != self.width:
            raise UserError(
                f"{folder}: img_emb is {self.width} wide and text_emb {text_width}; expected "
                "embeddings of one CLIP"
            )
        for name, table in self.tables.items():
            differences = self.images.sizes.items() ^ table.sizes.items()
            if differences:
                raise UserError(
                    f"{folder}: img_emb and {FOLDERS[name]} must match; shards (number, rows) "
                    f"in one only: {sorted(differences)[:2]}"
                )

        self.captions = shard_files(self.folder / "captions", "captions", ".jsonl")
        if not self.captions:
            self.captions = shard_files(self.folder / "metadata", "metadata", ".parquet")
        missing = self.images.sizes.keys() - self.captions.keys()
        if missing and captions:
            raise UserError(
                f"{folder}: no captions for shard {min(missing)}; expected captions/"
                "captions_N.jsonl or metadata/metadata_N.parquet beside img_emb/"
            )
        if missing:
            self.captions = {}
        self.lines = {}  # the JsonLines of shards that were read

    def __len__(self):
        return len(self.images)

    def split(self, name, validation, test, seed=0):
        return order.split_indices(len(self), name, validation, test, seed)

    def fault(self, index):
        """The shard of a row and its place in it, for messages."""
        shard, row = self.images.locate(index)
        return f"img_emb_{shard}.npy row {row}"

    def _embeddings(self, indices):
        """`fetch` without captions."""
        batch = {}
        usable = torch.ones(len(indices), dtype=torch.bool)
        for name, table in self.tables.items():
            batch[name] = torch.from_numpy(table[indices])
            length = batch[name].flatten(1).norm(dim=1)
            usable &= length.isfinite()
            if name != "text_enc":  # whose padding is all zero
                ratio = length / table.usual_length
                usable &= ratio.log().abs() < MAX_LOG_RATIO  # so zero is not usable
        return batch, usable.numpy()

    def fetch(self, indices, random_words=None):
        """Read samples in any order. Of several captions of one, a random word chooses."""
        batch, usable = self._embeddings(indices)
        if self.with_captions:
            batch["caption"] = self.texts(indices, random_words)
        return batch, usable

    def texts(self, indices, random_words=None):
        """A caption of each of the samples, if there are captions."""
        if not self.captions:
            return []
        fractions = order.fractions(random_words, len(indices))
        captions = [record["caption"] for record in self.records(indices)]
        return list(map(files.choose_caption, captions, fractions))

    def records(self, indices):
        """The records of samples, at least {"caption": see files.clean_caption}."""
        shards, rows = self.images.locate(np.asarray(indices))
        records = [None] * len(rows)
        for i in np.argsort(shards):  # so that each is read once
            records[i] = self._record(shards[i], rows[i])
        return records

    def _record(self, shard, row):
        path = self.captions[shard]
        size = self.images.sizes[shard]
        with config.explained(f"{path}: expected a 'caption' for each of {size} rows of the shard"):
            if path.suffix == ".parquet":
                captions = parquet_captions(path)
                record = {"caption": captions[row].as_py()}
            else:
                if shard not in self.lines:
                    self.lines[shard] = JsonLines(path)
                captions = self.lines[shard]
                record = captions[row]
            if len(captions) != size:
                raise ValueError(f"{len(captions)} captions")
            return {**record, "caption": files.clean_caption(files.caption_in(record))}

    def check(self, limit=100_000):
        """(unusable, checked, names of the first) of `limit` evenly spaced rows.

        UserError if many are unusable.
        """
        checked = files.evenly_spaced(len(self), limit)
        unusable = []
        batches = np.array_split(checked, math.ceil(len(checked) / 256))
        for indices in tracker.progress(batches, desc="checking", unit="batch", delay=5):
            _, usable = self._embeddings(indices)
            unusable += indices[~usable].tolist()
        names = list(map(self.fault, unusable[:5]))
        if len(unusable) > order.MAX_UNUSABLE * len(checked):
            raise UserError(
                f"{self.folder}: {len(unusable)} of {len(checked)} rows are not finite, all zero, "
                f"or much longer or shorter than most: {', '.join(names)}, …; mend or remove them"
            )
        return len(unusable), len(checked), names

    def fingerprint(self):
        """Values that change when the data does: rows, width, digest of the files' starts."""
        paths = []
        for name, table in self.tables.items():
            if not (name == "text_embed" and self.with_captions):  # then it may be missing
                paths += [array.path for array in table.arrays.values()]
        paths += self.captions.values()
        return {"rows": len(self), "width": self.width, "digest": files.digest_of(paths)}


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
                    dtype = np.float16 if values.dtype == np.float16 else np.float32
                    np.save(file, values.astype(dtype))


# The CLIP of embeddings


def is_built_in(folder):
    """Whether embed.builtin_data wrote this folder: its captions come with their attributes."""
    path = Path(folder, "clip.json")
    return path.is_file() and "made_from" in config.read_json(path)


def clip_of(cfg, model_file=None):
    """The CLIP that --clip names, or None, and the fingerprint of the one that is known, or None.

    "auto" is that of clip.json in --data; without clip.json that of the model in the file, if one
    is given.
    """
    path = Path(cfg.data, "clip.json")
    spec = fingerprint = None
    if path.is_file():
        note = config.read_json(path)
        spec = note.get("clip")
        fingerprint = note.get("fingerprint")
    elif model_file:
        contents = checkpoint.load(model_file, mmap=True)
        spec = contents.get("clip")
        fingerprint = contents.get("clip_fingerprint")
    if cfg.clip != "auto":
        spec = cfg.clip
    return spec, fingerprint


def check_source(cfg, dataset, path, clip_model=None):
    """UserError if the embeddings are not those that a model needs, by some of them.

    They must not be of unit length for a model of raw ones, nor those of another CLIP than
    `clip_model`, if there is one.
    """
    indices = files.evenly_spaced(len(dataset), 16)
    batch, _ = dataset.fetch(indices)
    if "image_embed" not in batch:  # a CLIP will compute them
        return
    stored = batch["image_embed"]
    length = stored.norm(dim=1).nanmedian()
    if cfg.raw_embeddings and abs(length - 1) < 0.01:
        raise UserError(
            f"{path}: its embeddings are of unit length, but the model is one of raw embeddings; "
            "write them anew with python -m common.data.embed embed --raw"
        )

    # Embed the same texts, or else images, again.
    if not clip_model:
        return
    if "text_embed" in batch and dataset.captions:
        stored = batch["text_embed"]
        found = clip_model.text_condition(dataset.texts(indices), 1)["text_embed"]
    elif "image" in batch:
        device = next(clip_model.parameters()).device
        found = clip_model.embed_image(batch["image"].to(device))
    else:
        return
    cosine = torch.cosine_similarity(found.cpu(), stored).nanmean()
    if cosine < MIN_COSINE:
        raise UserError(
            f"{path}: its embeddings are not of this CLIP, whose own have a mean cosine of "
            f"{cosine:.2f} with them; name the one that made them with --clip"
        )
