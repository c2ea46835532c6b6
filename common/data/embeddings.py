"""Embeddings in .npy shards, in the layout of clip-retrieval, with captions.

`Embeddings` is a dataset (see loader.py).
"""

import functools
import json
import math
from pathlib import Path

import numpy as np
import torch

from common import accumulate, checkpoint, config, loader, order
from common.config import UserError
from common.data import files, flat

FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_enc": "text_enc"}
MAX_LOG_RATIO = 2  # an embedding may be up to 7.4 times longer or shorter than the median


def open_npy(path, ndim=2):
    """Memory-map a .npy file; UserError if it is not float16 or float32 of `ndim` dimensions.

    It is called for each read, because a process cannot keep thousands of files open. It compares
    the file's size with its header, so that a truncated file raises an error instead of crashing
    the process.
    """
    expected = f"float16 or float32 of {ndim} dimensions"
    with config.explained(f"{path}: not a readable .npy array; expected {expected}"):
        array = np.load(path, mmap_mode="r")
        if array.dtype not in (np.float16, np.float32) or array.ndim != ndim:
            raise ValueError(f"{array.dtype} of shape {array.shape}")
        return array


def shard_files(folder, name, suffix):
    """{N: path} of the files NAME_N.suffix in `folder`, sorted by N; leading zeros are allowed."""
    paths = {}
    for path in folder.glob(f"{name}_*{suffix}"):
        number = path.stem.removeprefix(f"{name}_")
        if number.isdecimal():
            paths[int(number)] = path
    return dict(sorted(paths.items()))


class Shards:
    """The rows of all arrays FOLDER/NAME_N.npy, in order of N. shards[indices]: float32 (n, …)."""

    def __init__(self, folder, name):
        self.folder = folder
        self.ndim = 3 if name == "text_enc" else 2
        self.paths = shard_files(folder, name, ".npy")
        shapes = [open_npy(path, self.ndim).shape for path in self.paths.values()]
        self.sizes = {number: shape[0] for number, shape in zip(self.paths, shapes)}
        shapes = {shape[1:] for shape in shapes}
        if len(shapes) != 1:
            raise UserError(
                f"{folder}: no such folder, or no {name}_N.npy files with rows of the same "
                f"shape: {shapes or 'none'}"
            )
        [self.shape] = shapes
        self.starts = np.cumsum([0, *self.sizes.values()])  # first row of each shard, and the end

    def __len__(self):
        return int(self.starts[-1])

    @functools.cached_property
    def median_norm(self):
        """The median length of 256 evenly spaced rows; UserError if it is zero or not finite."""
        rows = self[order.evenly_spaced(len(self), 256)]
        length = torch.from_numpy(rows).norm(dim=1).nanmedian().item()
        if not 0 < length < math.inf:  # as in a file that was not completely written
            raise UserError(f"{self.folder}: most rows are all zero or not finite; rewrite it")
        return length

    def locate(self, indices):
        """Return (position of the shard, row in the shard) of `indices` (n,): int arrays (n,)."""
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        return shards, indices - self.starts[shards]

    def __getitem__(self, indices):
        shards, rows = self.locate(indices)
        paths = list(self.paths.values())
        values = np.empty((len(indices), *self.shape), np.float32)
        for shard in np.unique(shards):
            inside = shards == shard
            values[inside] = open_npy(paths[shard], self.ndim)[rows[inside]]
        return values


# Captions


def caption_lines(path):
    """The captions of a shard: a list of JSON objects (bytes), one per row.

    A parquet file is read completely, because single rows cannot be read.
    """
    if path.suffix == ".jsonl":
        return path.read_bytes().rstrip(b"\n").split(b"\n")
    parquet = config.need("pyarrow.parquet", f"{path}: reading parquet")
    column = files.caption_in({name: name for name in parquet.read_schema(path).names})
    captions = parquet.read_table(path, columns=[column])[column].to_pylist()
    return [json.dumps({"caption": caption}).encode() for caption in captions]


class Embeddings:
    """A dataset of the embeddings in `img_emb/` and `text_emb/`.

    Files are matched by shard number. text_encodings: also read `text_enc/`. captions: also read
    captions; then `text_emb/` may be missing. index_dir: where to keep the index of the captions,
    see flat.open_index. `self.captions` is {shard number: caption file}, or {} if there are none.
    `self.width` is D, the width of image and text embeddings.

    `fetch` returns {"image_embed": (n, D), "text_embed": (n, D), "text_enc": (n, L, E), "caption":
    list}, with float32 tensors. A row is unusable if one of its embeddings is all zero, not finite,
    or much longer or shorter than most, or if its caption cannot be read.
    """

    def __init__(self, folder, text_encodings=False, captions=False, index_dir=None):
        self.path = self.folder = Path(folder)
        self.index_dir = index_dir
        self.with_captions = captions
        present = {
            "image_embed": True,
            "text_embed": not captions or (self.folder / "text_emb").is_dir(),
            "text_enc": text_encodings,
        }
        self.tables = {
            name: Shards(self.folder / subfolder, subfolder)
            for name, subfolder in FOLDERS.items()
            if present[name]
        }
        self.encoding_width = self.tables["text_enc"].shape[1] if text_encodings else 0
        self.images = self.tables["image_embed"]
        [self.width] = self.images.shape
        self.text_embeds = self.tables.get("text_embed", self.images)
        if self.text_embeds.shape != self.images.shape:
            raise UserError(
                f"{folder}: the width of img_emb is {self.width}, that of text_emb is "
                f"{self.text_embeds.shape[0]}; expected embeddings from the same CLIP"
            )
        for name, table in self.tables.items():
            differences = self.images.sizes.items() ^ table.sizes.items()
            if differences:
                raise UserError(
                    f"{folder}: img_emb and {FOLDERS[name]} must match; shards (number, rows) "
                    f"in only one of them: {sorted(differences)[:2]}"
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
        self.caption_paths = [self.captions.get(number) for number in self.images.sizes]
        if captions:  # build the index now, on all ranks, before workers start
            self.index  # noqa: B018

    @functools.cached_property
    def index(self):
        """The flat.Index of the captions, built on first use."""
        sizes = list(self.images.sizes.values())

        def lines(shard):
            path = self.caption_paths[shard]
            with config.explained(f"{path}: expected a 'caption' for each of {sizes[shard]} rows"):
                found = caption_lines(path)
                if len(found) != sizes[shard]:
                    raise ValueError(f"{len(found)} captions")
                return {"captions": found}

        identity = [sizes, files.stamps(self.caption_paths)]
        return flat.open_index(self.index_dir, identity, len(sizes), lines)

    def __len__(self):
        return len(self.images)

    def split(self, name, validation, test, seed=0):
        return order.split_indices(len(self), name, validation, test, seed)

    def fault(self, index):
        """Why a row is unusable, naming the row; "" if it is usable."""
        indices = np.array([index])
        if self.with_captions:
            try:
                self.texts(indices)
            except UserError as error:
                return f"row {index}: {error}"
        _, usable = self._embeddings(indices)
        [shard], [row] = self.images.locate(indices)
        name = list(self.images.paths.values())[shard].name
        reason = "all zero, not finite, or much longer or shorter than most"
        return "" if usable else f"{name} row {row}: {reason}"

    def fetch(self, indices, random_bits=None):
        """Read samples in any order. Nothing is random, so `random_bits` is ignored."""
        batch, usable = self._embeddings(indices)
        if self.with_captions:
            try:
                batch["caption"] = self.texts(indices)
            except UserError:  # at least one caption is unreadable
                usable = np.array([not self.fault(index) for index in indices])
        return batch, usable

    def _embeddings(self, indices):
        batch = {}
        usable = torch.ones(len(indices), dtype=torch.bool)
        for name, table in self.tables.items():
            batch[name] = torch.from_numpy(table[indices])
            length = batch[name].flatten(1).norm(dim=1)
            usable &= length.isfinite()
            if name != "text_enc":  # its norm varies with the amount of padding
                ratio = length / table.median_norm
                usable &= ratio.log().abs() < MAX_LOG_RATIO  # false for a zero vector
        return batch, usable.numpy()

    def texts(self, indices):
        """The captions of samples; UserError if one cannot be read."""
        return [record["caption"] for record in self.records(indices)]

    def records(self, indices):
        """The records of samples: {"caption": text, and possibly more}."""
        shards, _ = self.images.locate(indices)
        records = []
        for shard, line in zip(shards.tolist(), self.index.texts("captions", indices)):
            path = self.caption_paths[shard]
            with config.explained(f"{path}: expected a 'caption' for each row"):
                record = json.loads(line)
                record["caption"] = files.clean_caption(files.caption_in(record))
                records.append(record)
        return records

    def check(self):
        """Check the embeddings of up to 100,000 evenly spaced rows.

        Returns (number unusable, number checked, first faults). UserError if more than 1% are
        unusable.
        """
        checked = order.evenly_spaced(len(self), 100_000)
        unusable = []
        for indices in np.array_split(checked, math.ceil(len(checked) / 256)):
            _, usable = self._embeddings(indices)
            unusable += indices[~usable].tolist()
        faults = list(map(self.fault, unusable[:5]))
        if len(unusable) > loader.MAX_UNUSABLE * len(checked):
            raise UserError(
                f"{self.path}: {len(unusable)} of {len(checked)} samples cannot be used: "
                f"{faults[0]}; fix or remove them"
            )
        return len(unusable), len(checked), faults

    def fingerprint(self):
        """Values that change when the data change: number of rows, width, digest of the files.

        Text embeddings do not count, because a run may compute them from captions instead.
        """
        paths = [*self.images.paths.values(), *self.captions.values()]
        return {"rows": len(self), "width": self.width, "digest": files.digest_of(paths)}


def write_shards(
    folder, image_embeddings, text_embeddings, records, encodings=None, rows_per_shard=100_000
):
    """Write embeddings (N, D) and optionally token encodings (N, L, E) as shards.

    records: N dicts {"caption": text}, or [] for none. Earlier shards in `folder` are deleted, so
    that two sets of embeddings never mix. float16 arrays stay float16, others become float32.
    """
    folder = Path(folder)
    tables = {"img_emb": image_embeddings, "text_emb": text_embeddings}
    if encodings is not None:
        tables["text_enc"] = encodings
    if records:
        tables["captions"] = [json.dumps(record).encode() + b"\n" for record in records]
    shards = list(accumulate.batches(tables, rows_per_shard))
    for name in (*FOLDERS.values(), "captions"):
        for path in (folder / name).glob(f"{name}_*"):
            path.unlink()

    for number, shard in enumerate(shards):
        for name, rows in shard.items():
            suffix = ".jsonl" if name == "captions" else ".npy"
            with checkpoint.atomic_write(folder / name / f"{name}_{number}{suffix}") as file:
                if name == "captions":
                    file.writelines(rows)
                else:
                    values = np.asarray(rows)
                    dtype = np.float16 if values.dtype == np.float16 else np.float32
                    np.save(file, values.astype(dtype))
