"""Data: the order of samples, splits, batches, embedding shards (.npy).

Order and splits are pure functions of numbers, in O(1) memory: two billion rows cost nothing to shuffle or to resume.
"""
import hashlib
import itertools
import json
import mmap
import re
from pathlib import Path

import numpy as np
import torch

from common import checkpoint
from common.config import UserError, need

BAD_SHARE = 0.01  # more unusable rows than this are refused
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step


# Order and splits

def _mix(x):
    """splitmix64's finalizer (Steele et al. 2014) on a uint64 array: a good 64-bit hash."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A pseudo-random permutation of range(n), computed entry by entry in O(1) memory.

    A Feistel network over pairs (left, right) of range(a) × range(b), a·b >= n, with modular addition in place of
    exclusive-or, and cycle walking for the few numbers beyond n (Black & Rogaway 2002, §4 and §5).
    """

    def __init__(self, n, *key):
        self.n, self.a = n, max(1, int(np.ceil(np.sqrt(n))))
        self.b = -(-n // self.a)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=48).digest()
        self.keys = np.frombuffer(digest, np.uint64)  # one a round

    def _once(self, x):
        a, b = np.uint64(self.a), np.uint64(self.b)
        left, right = x % a, x // a
        for key in self.keys.reshape(-1, 2):
            left = (left + _mix(right ^ key[0]) % a) % a
            right = (right + _mix(left ^ key[1]) % b) % b
        return left + a * right

    def __call__(self, index):
        """Entries at the int array `index`, each in range(n) -> int64 array."""
        x = self._once(np.atleast_1d(np.asarray(index)).astype(np.uint64))
        while (outside := x >= np.uint64(self.n)).any():
            x[outside] = self._once(x[outside])
        return x.astype(np.int64)


class Split:
    """One part ("train", "validation" or "test") of numbered rows, decided by a row's number alone.

    In every block of 1,000 rows the same share is chosen, by a fixed shuffle turned by a hash of the block's number.
    So the j-th row of a part is found in O(1), and rows keep their part when more are added behind them.
    """

    BLOCK = 1000
    SHUFFLE = Permutation(BLOCK, "split")(np.arange(BLOCK))

    def __init__(self, rows, part, validation, test):
        counts = {"validation": round(validation * self.BLOCK), "test": round(test * self.BLOCK)}
        counts["train"] = self.BLOCK - sum(counts.values())
        start = sum(list(counts.values())[:list(counts).index(part)])
        self.slots = self.SHUFFLE[start:start + counts[part]]
        self.blocks = rows // self.BLOCK
        tail = self._row(np.full(len(self.slots), self.blocks), np.arange(len(self.slots)))
        self.tail = tail[tail < rows]  # of the last, incomplete block

    def _row(self, block, slot):
        turn = (_mix(block.astype(np.uint64) + np.uint64(1)) % np.uint64(self.BLOCK)).astype(np.int64)
        return block * self.BLOCK + (self.slots[slot] + turn) % self.BLOCK

    def __len__(self):
        return self.blocks * len(self.slots) + len(self.tail)

    def __getitem__(self, index):
        """Rows (int64) at the places `index` (int array) of this part."""
        index = np.asarray(index)
        if index.size and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"place {index.min()} or {index.max()} is not within a split of {len(self)}")
        full = self.blocks * len(self.slots)
        inside = np.minimum(index, max(0, full - 1))
        rows = self._row(inside // max(1, len(self.slots)), inside % max(1, len(self.slots))) if full else inside
        if len(self.tail):
            rows = np.where(index < full, rows, self.tail[np.clip(index - full, 0, len(self.tail) - 1)])
        return rows


def part_of(key, validation, test):
    """Which part a sample with the text `key` (file name, speaker) belongs to, by its hash."""
    encoded = key.encode(errors="surrogateescape")  # a file's name need not be valid UTF-8
    share = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") / 2 ** 64
    return "validation" if share < validation else "test" if share < validation + test else "train"


def shuffled(positions, n, seed):
    """Places in range(n) at the `positions` of an endless pass that is reshuffled every n positions."""
    positions = np.asarray(positions)
    places = np.empty(len(positions), np.int64)
    for epoch in np.unique(positions // n):
        here = positions // n == epoch
        places[here] = Permutation(n, seed, int(epoch))(positions[here] % n)
    return places


def draws(positions, seed):
    """A hash (uint64) of each of the `positions` (n,) and the seed: what the augmentation of a sample is made from."""
    key = np.frombuffer(hashlib.blake2b(repr(("draws", seed)).encode(), digest_size=8).digest(), np.uint64)
    return _mix(key + np.asarray(positions).astype(np.uint64) * GOLDEN)


def uniform(draws, count):
    """Numbers in [0, 1) of shape (n, count), made from the `draws` (n,) (splitmix64, Steele et al. 2014)."""
    x = _mix(np.asarray(draws).astype(np.uint64)[:, None] + np.arange(1, count + 1).astype(np.uint64) * GOLDEN)
    return (x >> np.uint64(11)) * 2.0 ** -53


# Batches

class Chunks(torch.utils.data.Dataset):
    """The chunks of a run's batches: item (first position, one past the last) -> dict of tensors and lists.

    `source.fetch(rows) -> (dict, good (n,))` reads rows. An unusable row is replaced by the next of its split, on
    whichever rank it falls, so the order stays a pure function of data and seed; "unusable" names such rows, by
    `source.fault(row)`, which says what is wrong with it, where the source has it, else by `source.name(row)`.

    A source that augments (`source.augments` is true) is called as `fetch(rows, draws)`, with a number a sample that
    depends on the seed and the sample's position alone; without a seed (evaluation), and others, as `fetch(rows)`.
    """

    def __init__(self, source, split, seed=None):
        self.source, self.split, self.seed = source, split, seed
        self.describe = getattr(source, "fault", source.name)

    def __getitem__(self, span):
        positions = np.arange(*span)
        places = positions if self.seed is None else shuffled(positions, len(self.split), self.seed)
        augments = self.seed is not None and getattr(self.source, "augments", False)
        drawn = (draws(positions, self.seed),) if augments else ()
        batch, good = self.source.fetch(rows := self.split[places], *drawn)
        unusable = []
        while not good.all():
            unusable += [self.describe(row) for row in rows[~good]]
            if len(unusable) > 100 + BAD_SHARE * len(self.split):
                raise UserError(f"more than {len(unusable) - 1} unusable rows (not finite, all zero or unreadable) "
                                f"where {len(rows)} were to be read: {unusable[0]}, …; mend or remove them")
            places[~good] = (places[~good] + 1) % len(self.split)
            batch, good = self.source.fetch(rows := self.split[places], *drawn)
        return {**batch, "rows": torch.from_numpy(rows), "unusable": unusable}


class _Told(torch.utils.data.Dataset):
    """`chunks`, with a UserError for an item: raised in a worker, it would come with a traceback, and end 5 s late."""

    def __init__(self, chunks):
        self.chunks = chunks

    def __getitem__(self, span):
        try:
            return self.chunks[span]
        except UserError as error:
            return error


def loader(chunks, spans, workers=0, pin_memory=False):
    """Items of `chunks` at `spans`, an iterable of (first, one past last), in order, read ahead by `workers`."""
    for item in torch.utils.data.DataLoader(_Told(chunks), batch_size=None, sampler=spans, num_workers=workers,
                                            pin_memory=pin_memory):
        if isinstance(item, UserError):
            raise item
        yield item


def training_spans(plan, batch_size, step):
    """The spans of this rank's chunks, `plan`, from `step` on, without end."""
    for start in itertools.count(step * batch_size, batch_size):
        for chunk in plan:
            yield start + chunk.start, start + chunk.stop


def to_device(batch, device):
    """`batch` with tensors and numpy arrays moved to `device`, anything else as it is."""
    def move(value):
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
    return {name: move(value) for name, value in batch.items()}


# Embeddings, as clip-retrieval writes them

def shard_files(folder, suffix, required=True, prefix=""):
    """{shard number: path} of the files NAME_N.suffix in `folder`, by number, however many zeros N is padded with.

    With a `prefix`, only of those whose name begins with it.
    """
    expected = f"{prefix or f'{folder.name}_'}N{suffix}"
    if not folder.is_dir():
        if required:
            raise UserError(f"{folder}: no such folder; expected {expected} files in it")
        return {}
    found = {}
    for path in sorted(folder.glob(f"{prefix}*{suffix}")):
        number = re.search(r"(\d+)$", path.name.removesuffix(suffix))
        if not number:
            raise UserError(f"{path}: no shard number at the end of its name; expected {expected}")
        if int(number[1]) in found:
            raise UserError(f"{path}: the same shard number as {found[int(number[1])].name}; remove one of them")
        found[int(number[1])] = path
    if not found and required:
        raise UserError(f"{folder}: no such files in it; expected {expected}" if prefix else
                        f"{folder}: empty; expected {expected} files in it")
    return dict(sorted(found.items()))


def open_array(path, ndim):
    """Memory map of a float array of `ndim` dimensions; nothing is read but the header."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy meets a damaged header with any of a dozen types
        raise UserError(f"{path}: not a readable .npy array of floats ({error})") from error
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float16, np.float32) or array.ndim != ndim:
        raise UserError(f"{path}: {getattr(array, 'dtype', 'archive')} of shape {getattr(array, 'shape', '?')}; "
                        f"expected float16 or float32 of shape {('(rows, width)', '(rows, tokens, width)')[ndim - 2]}")
    if hasattr(mmap, "MADV_RANDOM"):  # rows are read at random: to read ahead costs up to a thousand times as much
        array.base.madvise(mmap.MADV_RANDOM)
    return array


class Embeddings:
    """Rows of `img_emb/`, `text_emb/`, and where asked for `text_enc/` and captions, matched by shard number.

    `captions` are there to be looked up wherever the folder has them, and None where it has none; fetch reads them if
    asked to in the beginning.

    fetch(rows) -> ({"image_embed" (n, D), "text_embed" (n, D), "text_enc" (n, L, E), "caption" list}, good (n,)),
    float32; a row is not good if an embedding of it is all zero or not finite.
    """

    def __init__(self, folder, text_encodings=False, captions=False):
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; expected one with img_emb/ and text_emb/ in it")
        self.folder, self.opened = folder, (folder, text_encodings, captions)
        self.files = {"image_embed": shard_files(folder / "img_emb", ".npy"),
                      "text_embed": shard_files(folder / "text_emb", ".npy")}
        if text_encodings:
            self.files["text_enc"] = shard_files(folder / "text_enc", ".npy")
        self.arrays = {name: [open_array(path, 3 if name == "text_enc" else 2) for path in files.values()]
                       for name, files in self.files.items()}
        self.sizes = np.array([len(array) for array in self.arrays["image_embed"]], np.int64)
        self.ends = np.cumsum(self.sizes)
        for name in self.files:
            self._check(name)
        if not len(self):
            raise UserError(f"{folder / 'img_emb'}: no rows in any of its {len(self.sizes)} shard(s)")
        self.with_captions, self.captions = captions, None
        try:
            self.captions = Captions(folder, list(self.files["image_embed"]), self.sizes)
        except UserError:
            if captions:
                raise
        self.width = self.arrays["image_embed"][0].shape[1]
        if self.arrays["text_embed"][0].shape[1] != self.width:
            raise UserError(f"{folder}: img_emb is {self.width} wide and text_emb "
                            f"{self.arrays['text_embed'][0].shape[1]}; both must come from one CLIP")

    def __reduce__(self):
        """A worker that is not forked opens the files anew, rather than be sent what is in them."""
        return Embeddings, self.opened

    def _check(self, name):
        images, files = self.files["image_embed"], self.files[name]
        if missing := sorted(set(images) ^ set(files)):
            has, lacks = (images, name) if missing[0] in images else (files, "image_embed")
            raise UserError(f"{has[missing[0]]}: shard {missing[0]} has no counterpart in "
                            f"{self.folder / _FOLDERS[lacks]}")
        for path, array, size in zip(files.values(), self.arrays[name], self.sizes):
            if len(array) != size:
                raise UserError(f"{path}: {len(array)} rows, but {size} in the image shard of the same number")
            if array.shape[1:] != self.arrays[name][0].shape[1:]:
                raise UserError(f"{path}: rows of shape {array.shape[1:]}, but {self.arrays[name][0].shape[1:]} in "
                                f"{next(iter(files.values())).name}")

    def __len__(self):
        return int(self.ends[-1])

    def name(self, row):
        """The shard and the row in it of the row number `row`, for messages."""
        shard = int(np.searchsorted(self.ends, row, side="right"))
        path = list(self.files["image_embed"].values())[shard]
        return f"{path.name} row {row - self.ends[shard] + self.sizes[shard]}"

    def fetch(self, rows, captions=True):
        """Read `rows` (n,) in any order."""
        shards = np.searchsorted(self.ends, rows, side="right")
        batch, good = {}, np.ones(len(rows), bool)
        for name, arrays in self.arrays.items():
            values = np.empty((len(rows), *arrays[0].shape[1:]), np.float32)
            for shard in np.unique(shards):
                here = shards == shard
                values[here] = arrays[shard][rows[here] - (self.ends[shard] - self.sizes[shard])]
            with np.errstate(over="ignore", invalid="ignore"):
                energy = np.square(values).reshape(len(rows), -1).sum(1)
            good &= np.isfinite(energy) & ((energy > 0) | (name == "text_enc"))
            batch[name] = torch.from_numpy(values)
        if self.with_captions and captions:
            batch["caption"] = [record["caption"] for record in self.captions.records(rows)]
        return batch, good

    def check_rows(self, most=100_000):
        """(unusable, read, names of the first): looks at all rows, or `most` evenly spaced ones. UserError if many."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64))
        parts = np.array_split(rows, -(-len(rows) // 256))
        bad = np.concatenate([part[~self.fetch(part, captions=False)[1]] for part in parts])
        names = [self.name(row) for row in bad[:5]]
        if len(bad) > BAD_SHARE * len(rows):
            raise UserError(f"{self.folder}: {len(bad)} of {len(rows)} rows are not finite or all zero, more than "
                            f"1 in 100: {', '.join(names)}, …; mend or remove them")
        return len(bad), len(rows), names

    def fingerprint(self):
        """Plain facts that change when the data does: rows, width, shards, and a digest of sizes and first rows."""
        digest = hashlib.sha256(self.sizes.tobytes())
        for array in self.arrays["image_embed"][:100]:
            digest.update(np.ascontiguousarray(array[:1]).tobytes())
        return {"rows": len(self), "width": self.width, "shards": len(self.sizes), "digest": digest.hexdigest()[:16]}


_FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_enc": "text_enc"}


class Captions:
    """Records {"caption": …} of `captions/captions_N.jsonl` or `metadata/metadata_N.parquet`, read at random.

    A jsonl shard is indexed (8 bytes a row) when it is first read.
    """

    def __init__(self, folder, numbers, sizes):
        files = shard_files(folder / "captions", ".jsonl", False) or shard_files(folder / "metadata", ".parquet", False)
        if missing := [n for n in numbers if n not in files]:
            raise UserError(f"{folder}: no captions for shard {missing[0]}; expected captions/captions_N.jsonl or "
                            "metadata/metadata_N.parquet beside img_emb/")
        self.files, self.sizes, self.ends, self.index = [files[n] for n in numbers], sizes, np.cumsum(sizes), {}

    def _open(self, shard):
        path = self.files[shard]
        if path.suffix == ".parquet":
            parquet = need("pyarrow.parquet", f"{path}: reading parquet")
            try:
                names = parquet.read_schema(path).names
                if "caption" not in names:
                    raise UserError(f"{path}: no column 'caption' among {', '.join(names)}")
                entry = parquet.read_table(path, columns=["caption"], memory_map=True).column("caption")
            except UserError:
                raise
            except (ValueError, OSError) as error:
                raise UserError(f"{path}: not a readable parquet file ({error})") from error
        else:
            with open(path, "rb") as file:
                lengths = np.fromiter((len(line) for line in file), np.int64)
            entry = np.concatenate([[0], np.cumsum(lengths)])
        rows = len(entry) - (path.suffix == ".jsonl")
        if rows != self.sizes[shard]:
            raise UserError(f"{path}: {rows} captions, but {self.sizes[shard]} rows in the image shard")
        self.index[shard] = entry
        return entry

    def built_in(self):
        """Whether they come with the attributes that the built-in data has."""
        return self.files[0].suffix == ".jsonl" and "attributes" in self.records([0])[0]

    def records(self, rows):
        """The records, at the least {"caption": str}, of `rows` (n,)."""
        found = []
        for row in map(int, rows):
            shard = int(np.searchsorted(self.ends, row, side="right"))
            entry, place = self.index.get(shard), row - int(self.ends[shard] - self.sizes[shard])
            entry = self._open(shard) if entry is None else entry
            if isinstance(entry, np.ndarray):
                with open(self.files[shard], "rb") as file:
                    file.seek(entry[place])
                    line = file.read(entry[place + 1] - entry[place])
                try:
                    record = json.loads(line)
                    found.append({**record, "caption": str(record["caption"] or "")})
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self.files[shard]} line {place + 1}: expected a JSON object with an entry "
                                    f"'caption' ({error!r})") from error
            else:
                found.append({"caption": str(entry[place].as_py() or "")})
        return found


def write_shards(folder, image_embeddings, text_embeddings, records, encodings=None, rows_per_shard=100_000):
    """Write embeddings (N, D), records [{"caption": …}] and maybe encodings (N, L, E) as shards, in float16.

    Shards that are there already are removed: two sets of embeddings must not be mixed.
    """
    folder = Path(folder)
    for name in ("img_emb", "text_emb", "text_enc", "captions"):
        for path in (folder / name).glob(f"{name}_*"):
            path.unlink()
    for number, start in enumerate(range(0, len(records), rows_per_shard)):
        part = slice(start, start + rows_per_shard)
        for name, values in (("img_emb", image_embeddings), ("text_emb", text_embeddings), ("text_enc", encodings)):
            if values is not None:
                with checkpoint.replacing(folder / name / f"{name}_{number}.npy") as file:
                    np.save(file, np.asarray(values[part], np.float16))
        with checkpoint.replacing(folder / "captions" / f"captions_{number}.jsonl") as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records[part])
