"""Flat files: arrays and texts of millions of samples, made once, mapped by all ranks and workers.

    FOLDER/DIGEST/NAME.npy        a column: an array, or the bytes of all its texts in a row
    FOLDER/DIGEST/NAME.ends.npy   where each of the texts ends
    FOLDER/DIGEST/index.json      {column: sha256}, written last
    FOLDER/DIGEST/N.npz           until then: the columns of source N, such as a tar
"""

import atexit
import contextlib
import functools
import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from common import checkpoint, config, dist, order, tracker
from common.data import files


class Index:
    """Columns with a row for each sample: item (name) -> array, which is read where it is indexed.

    In millions of rows a column takes no memory but the system's cache, which processes share.
    """

    def __init__(self, place):
        self.place = place
        self.sums = json.loads((place / "index.json").read_text())
        self.columns = {name: self.scan(name) for name in self.sums}

    def __reduce__(self):  # a worker maps the same files
        return Index, (self.place,)

    def __getitem__(self, name):
        return self.columns[name]

    def scan(self, name):
        """A column to read as a whole: what was read is unmapped with it."""
        return np.asarray(np.load(self.place / f"{name}.npy", mmap_mode="r"))

    def texts(self, name, indices):
        """The texts (bytes) of samples, of a column of texts."""
        ends = self[f"{name}.ends"]
        indices = np.asarray(indices, np.int64)
        starts = np.where(indices, ends[indices - 1], 0)
        content = self[name].data
        return [bytes(content[a:b]) for a, b in zip(starts.tolist(), ends[indices].tolist())]

    def check(self):
        """ValueError if an array has changed since. Texts, which may be many GB, are not read."""
        for name, digest in self.sums.items():
            if digest and checkpoint.checksum(self.place / f"{name}.npy") != digest:
                raise ValueError(f"{name}.npy has changed")


def open_index(folder, identity, count, make):
    """The Index of `make(number)` for each number below `count`, in a row.

    make(number) -> {column: array (n, …), or list of n texts (bytes)} of a source, such as a tar.
    It is made once below `folder`. `identity`, plain values, changes when the results do; so does
    the code of the module of `make`. Without a folder it is kept until the process ends.

    Ranks that call it at the same time make a share each, then what others lack, as where one
    failed. There is no collective: whoever makes a source locks it, and the others wait. What is
    finished is kept, so a kill loses a source for each rank.
    """
    code = inspect.getsource(sys.modules[make.__module__])
    digest = order.hash_of(repr((identity, code)).encode())
    place = Path(_writable(folder), f"{digest:016x}")
    place.mkdir(exist_ok=True)
    record = place / "index.json"
    if not record.exists():
        share = range(dist.rank(), count, dist.world_size())
        for number in tracker.progress(
            [*share, *range(count)],
            desc="index",
            delay=3,
            leave=False,
            disable=not dist.is_main(),
        ):
            part = place / f"{number}.npz"
            with _locked(part):
                if not part.exists() and not record.exists():
                    _write_part(part, make(number))
        # Where there are no locks another rank may have joined the parts meanwhile.
        with _locked(record), contextlib.suppress(FileNotFoundError):
            if not record.exists():
                _join(place, [place / f"{number}.npz" for number in range(count)])
        for path in place.iterdir():
            if path.suffix not in (".npy", ".json"):  # parts, locks, what a killed process wrote
                path.unlink(missing_ok=True)
    with config.explained(f"{place}: damaged; remove this folder, then it is made anew"):
        index = Index(place)
        index.check()
        return index


def _writable(folder):
    """`folder`, marked as output, or a temporary one if there is none, or it cannot be written."""
    if folder:
        with contextlib.suppress(OSError):  # the run of somebody else, to be evaluated
            files.mark_output(folder)
            return folder
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path):
    """Context of one process at a time, where the file system has locks."""
    with open(f"{path}.lock", "w") as file:
        checkpoint.lock(file, wait=True)
        yield


@contextlib.contextmanager
def _written(path):
    """As checkpoint.atomic_write; without locks, ranks may write the same file at the same time."""
    own = f"{path}.{dist.rank()}"
    with checkpoint.atomic_write(own) as file:
        yield file
    os.replace(own, path)


def _write_part(path, columns):
    """Write the columns of a source as they are joined."""
    arrays = {}
    for name, values in columns.items():
        if isinstance(values, list):
            lengths = list(map(len, values))
            arrays[f"{name}.ends"] = np.cumsum(lengths, dtype=np.int64)
            values = np.frombuffer(b"".join(values), np.uint8)
        arrays[name] = values
    with _written(path) as file:
        np.savez(file, **arrays)


def _join(place, parts):
    """Join the parts, one at a time, as all may be larger than memory."""

    def read(name):
        for part in parts:
            with open(part, "rb") as file, config.explained(f"{part}: damaged; remove it"):
                array = np.load(file)[name]
            yield array

    with np.load(parts[0]) as file:
        names = file.files
    sums = {}
    for name in names:
        found = [(len(array), array.dtype) for array in read(name)]
        lengths, dtypes = zip(*found)
        dtype = functools.reduce(np.promote_types, dtypes)  # strings as wide as the longest
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (sum(lengths),),
        }
        path = place / f"{name}.npy"
        with _written(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            end = 0
            for array in read(name):
                if name.endswith(".ends"):
                    array += end
                    end = max(array, default=end)
                file.write(array.astype(dtype).tobytes())
        is_text = f"{name}.ends" in names
        sums[name] = "" if is_text else checkpoint.checksum(path)
    checkpoint.write_json(sums, place / "index.json")
