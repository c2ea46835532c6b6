"""Indexes in flat files: equal for any number of ranks, even after kills or damage."""
import itertools
import os
import pickle
import re
import signal

import numpy as np
import pytest
from conftest import FORKS
from numpy.testing import assert_array_equal

from common import checkpoint, dist
from common.config import UserError
from common.data import flat

COUNT = 7
# Source 3 has no rows, and source 5 has the longest name.
TEXTS = [[b"a", b"", "ü".encode()], [b"b" * 99], [b""], [], [b"c", b"d"], [b"e"], [b"f"] * 4]


def columns(number):
    texts = TEXTS[number]
    names = [f"{number}{'x' * number * (number == 5)}" for _ in texts]
    return {"names": np.array(names, np.bytes_), "rows": np.arange(len(texts)), "texts": texts}


def open_index(folder, made=None, identity="a"):
    """Open the index of all sources. `made` gets the numbers of the sources indexed now."""
    def make(number):
        if made is not None:
            made.append(number)
        return columns(number)

    return flat.open_index(folder, identity, COUNT, make)


def content(index):
    """The index as {column: its values}, with the texts as a list."""
    size = len(index["texts.ends"])
    found = {name: index[name].tolist() for name in ("names", "rows")}
    return found | {"texts": index.texts("texts", range(size))}


def expected():
    made = list(map(columns, range(COUNT)))
    found = {name: np.concatenate([each[name] for each in made]) for name in ("names", "rows")}
    found = {name: values.tolist() for name, values in found.items()}
    return found | {"texts": [*itertools.chain(*TEXTS)]}


def test_the_rows_of_all_sources_follow_each_other_and_texts_are_read_in_any_order(tmp_path):
    index = pickle.loads(pickle.dumps(open_index(tmp_path)))  # as a worker gets it
    assert content(index) == expected()
    rows = np.random.default_rng(0).permutation(12)
    assert index.texts("texts", rows) == [expected()["texts"][row] for row in rows]
    assert_array_equal(index.scan("rows"), index["rows"])


def test_it_is_made_once_and_anew_if_what_it_is_made_of_changes(tmp_path):
    made = []
    for identity in ("a", "a", "b", "a"):
        assert content(open_index(tmp_path, made, identity)) == expected()
    assert made == [*range(COUNT), *range(COUNT)]


def test_without_a_folder_that_can_be_written_it_is_a_temporary_one(tmp_path):
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file/index"):
        assert content(open_index(folder)) == expected()


def make_share(folder, locks):
    if not locks:  # as on some file systems
        checkpoint.fcntl = None
    made = []
    found = content(dist.on_all(lambda: open_index(folder, made)))
    return made, found


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("locks", [True, False])
def test_ranks_make_a_share_each_and_the_same_files_as_one(locks, on_ranks, tmp_path):
    ranks = on_ranks(2, make_share, tmp_path / "two", locks)
    numbers = sorted(number for made, _ in ranks for number in made)
    assert numbers == list(range(COUNT)) or not locks
    assert all(made and found == expected() for made, found in ranks)
    open_index(tmp_path / "one")
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def fail_at_3(folder):
    def make(number):
        if number == 3:
            raise UserError("source 3 is damaged")
        return columns(number)

    dist.on_all(lambda: flat.open_index(folder, "a", COUNT, make))


def test_a_source_that_cannot_be_read_ends_all_ranks_with_its_message(on_ranks, tmp_path):
    with pytest.raises(UserError, match="source 3 is damaged"):
        on_ranks(2, fail_at_3, tmp_path)


def open_and_die(folder, moment):
    """Open the index in `folder`, and kill this process at call number `moment` of fsync."""
    calls = []
    fsync = os.fsync

    def fsync_or_die(number):
        calls.append(number)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)

    os.fsync = fsync_or_die
    open_index(folder)


def test_after_a_kill_at_any_moment_only_the_source_that_it_was_at_is_made_again(tmp_path):
    for moment in range(1, 40):
        folder = tmp_path / str(moment)
        process = FORKS.Process(target=open_and_die, args=(folder, moment))
        process.start()
        process.join()
        finished = len(list(folder.rglob("*.npz")))
        made = []
        assert content(open_index(folder, made)) == expected()
        if not process.exitcode:  # fewer than `moment` calls: not killed
            break
        assert process.exitcode == -signal.SIGKILL
        assert made == list(range(finished, COUNT))
        names = {path.name for path in folder.glob("*/*")}
        assert names == {"complete", *(f"{name}.npy" for name in (
            "names", "rows", "texts", "texts.ends"))}
    assert moment > 20


@pytest.mark.parametrize("name, size", [
    ("names", 0),
    ("texts", 130),
    ("texts.ends", 130),
])
def test_a_damaged_file_is_told_with_what_to_remove(name, size, tmp_path):
    place = open_index(tmp_path).place
    os.truncate(place / f"{name}.npy", size)
    with pytest.raises(UserError, match=f"{re.escape(str(place))}: damaged; remove this folder"):
        open_index(tmp_path)


def test_a_damaged_part_is_told_by_name(tmp_path):
    # The process is killed while joining the parts.
    process = FORKS.Process(target=open_and_die, args=(tmp_path, 2 * COUNT + 1))
    process.start()
    process.join()
    [part] = tmp_path.rglob("4.npz")
    part.write_bytes(part.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"4\.npz: damaged; remove it"):
        open_index(tmp_path)
    part.unlink()
    assert content(open_index(tmp_path)) == expected()
