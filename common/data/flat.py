"""Flat files: arrays and texts of millions of samples, made once, mapped by all ranks and workers.

    FOLDER/DIGEST/NAME.npy        a column: an array, or the bytes of all its texts in a row
    FOLDER/DIGEST/NAME.ends.npy   where each of the texts ends
    FOLDER/DIGEST/complete        an empty file, made last
    FOLDER/DIGEST/N.npz           until then: the columns of source N, such as a tar
"""

import atexit
import contextlib
import inspect
import itertools
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

    It takes no memory of the process but the system's cache of files, which processes share.
    """

    def __init__(self, place):
        self.place = place
        self.columns = {path.stem: self.scan(path.stem) for path in place.glob("*.npy")}

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


def open_index(folder, identity, count, make):
    """The Index of `make(number)` for each number below `count`, in a row.

    make(number) -> {column: array (n,), or list of n texts (bytes)} of a source, such as a tar. It
    is made once below `folder`. `identity`, plain values, changes when the results do; so does the
    code of the module of `make`. Without a folder it is kept until the process ends.

    Ranks that call it at the same time make a share each, then what others lack, as where one
    failed. There is no collective: whoever makes a source locks it, and the others wait. What is
    finished is kept, so a kill loses one source a rank.
    """
    code = inspect.getsource(sys.modules[make.__module__])
    digest = order.hash_of(repr((identity, code)).encode())
    place = Path(_writable(folder), f"{digest:016x}")
    place.mkdir(exist_ok=True)
    complete = place / "complete"
    if not complete.exists():
        parts = [place / f"{number}.npz" for number in range(count)]
        share = parts[dist.rank() :: dist.world_size()]
        share = tracker.progress(share, desc="index", delay=3, disable=not dist.is_main())
        for part in itertools.chain(share, parts):
            with _locked(part):
                if not part.exists() and not complete.exists():
                    _write_part(part, make(int(part.stem)))
        # Without locks another rank may have joined the parts meanwhile.
        with _locked(complete), contextlib.suppress(FileNotFoundError):
            if not complete.exists():
                _join(parts)
                complete.touch()
        for path in (*parts, *place.glob("*.lock")):
            path.unlink(missing_ok=True)
    with config.explained(f"{place}: damaged; remove this folder, then it is made anew"):
        return Index(place)


def _writable(folder):
    """`folder`, marked as output, or a temporary one if there is none or it cannot be written."""
    if folder:
        with contextlib.suppress(OSError):  # as a run of somebody else, which is evaluated
            files.mark_output(folder)
            return folder
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path):
    """Context of one process at a time, if the file system has locks."""
    with open(f"{path}.lock", "w") as file:
        checkpoint.lock(file, wait=True)
        yield


@contextlib.contextmanager
def _written(path):
    """As checkpoint.atomic_write; without locks, ranks may write the same at the same time."""
    own = f"{path}.{dist.rank()}"
    with checkpoint.atomic_write(own) as file:
        yield file
    os.replace(own, path)


def _write_part(path, columns):
    """Write the columns of a source as they are joined."""
    arrays = {}
    for name, values in columns.items():
        if isinstance(values, list):
            arrays[f"{name}.ends"] = np.cumsum(list(map(len, values)), dtype=np.int64)
            values = np.frombuffer(b"".join(values), np.uint8)
        arrays[name] = values
    with _written(path) as file:
        np.savez(file, **arrays)


def _join(parts):
    """Join parts to columns beside them. All may be larger than memory: it takes one at a time."""

    def read(name):
        for part in parts:
            with open(part, "rb") as file, config.explained(f"{part}: damaged; remove it"):
                array = np.load(file)[name]
            yield array

    with np.load(parts[0]) as file:
        names = file.files
    for name in names:
        sizes = [(len(array), array.dtype) for array in read(name)]
        lengths, dtypes = zip(*sizes)
        dtype = np.result_type(*dtypes)  # strings as wide as the longest
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (sum(lengths),),
        }
        end = 0
        with _written(parts[0].with_name(f"{name}.npy")) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for array in read(name):
                if name.endswith(".ends"):
                    array += end
                    end = max(array, default=end)
                file.write(array.astype(dtype).tobytes())
