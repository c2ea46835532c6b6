"""An index of millions of samples in flat files, which all ranks and workers memory-map.

    FOLDER/DIGEST/NAME.npy        a column: an array, or the concatenated bytes of texts
    FOLDER/DIGEST/NAME.ends.npy   the end of each text, in bytes
    FOLDER/DIGEST/complete        an empty file, written last
    FOLDER/DIGEST/N.npz           temporary: the columns of source N, such as a tar
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
    """Columns with one row per sample: index[name] is a memory-mapped array.

    The arrays take no memory in the process. They are in the system's file cache, which all
    processes share.
    """

    def __init__(self, place):
        self.place = place
        self.columns = {path.stem: self.scan(path.stem) for path in place.glob("*.npy")}

    def __reduce__(self):  # spawned workers map the same files
        return Index, (self.place,)

    def __getitem__(self, name):
        return self.columns[name]

    def scan(self, name):
        """Map a column anew, for reading all of it: the memory is released along with the array."""
        return np.asarray(np.load(self.place / f"{name}.npy", mmap_mode="r"))

    def texts(self, name, indices):
        """The texts (bytes) of the samples `indices`, from the text column `name`."""
        ends = self[f"{name}.ends"]
        indices = np.asarray(indices, np.int64)
        starts = np.where(indices, ends[indices - 1], 0)
        content = self[name].data
        return [bytes(content[a:b]) for a, b in zip(starts.tolist(), ends[indices].tolist())]


def open_index(folder, identity, count, make):
    """Open the Index of `count` sources, such as tars. It is built if it does not exist yet.

    make(number) -> {column: array (n,), or list of n texts (bytes)} for one source. The index has
    these columns, concatenated over all sources. It is stored below `folder` or, without a folder,
    in a temporary folder until the process exits. A new index is built if `identity` (plain
    values), or the code of the module that defines `make`, has changed.

    Not collective. Ranks that call this at the same time build a share of the sources each, and
    then any that are still missing, for example after a failure. A source is locked while a rank
    builds it. Finished sources are kept, so a rank that is killed loses at most one.
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
        # Without file locks, another rank may have joined the parts meanwhile.
        with _locked(complete), contextlib.suppress(FileNotFoundError):
            if not complete.exists():
                _join(parts)
                complete.touch()
        for path in (*parts, *place.glob("*.lock")):
            path.unlink(missing_ok=True)
    with config.explained(f"{place}: damaged; remove this folder, and it will be rebuilt"):
        return Index(place)


def _writable(folder):
    """`folder`, marked as output, or a temporary folder if it is "", None or not writable."""
    if folder:
        with contextlib.suppress(OSError):  # not writable, such as another user's run folder
            files.mark_output(folder)
            return folder
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path):
    """Context manager: a lock for `path`, held by one process at a time if files can be locked."""
    with open(f"{path}.lock", "w") as file:
        checkpoint.lock(file, wait=True)
        yield


@contextlib.contextmanager
def _written(path):
    """Like checkpoint.atomic_write, but ranks may write the same file at the same time."""
    temporary = f"{path}.{dist.rank()}"
    with checkpoint.atomic_write(temporary) as file:
        yield file
    os.replace(temporary, path)


def _write_part(path, columns):
    """Write the columns of a source, for `_join`."""
    arrays = {}
    for name, values in columns.items():
        if isinstance(values, list):
            arrays[f"{name}.ends"] = np.cumsum(list(map(len, values)), dtype=np.int64)
            values = np.frombuffer(b"".join(values), np.uint8)
        arrays[name] = values
    with _written(path) as file:
        np.savez(file, **arrays)


def _join(parts):
    """Concatenate the columns of parts, one at a time, because together they may exceed memory."""

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
        dtype = np.result_type(*dtypes)  # strings get the width of the longest one
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
