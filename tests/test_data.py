"""Datasets and batches: pure functions of data and seed, and every fault of the files is named."""
import itertools
import json
import pickle
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import accumulate, data, order
from common.config import UserError

HUGE = 2 * 10**9
SHAPES = {"img_emb": (6,), "text_emb": (6,), "text_enc": (3, 2)}  # of the rows that `write` writes
SIZES = (5, 8, 4)  # and their number in each shard


def write(folder, sizes=SIZES, seed=0):
    """Write shards of random embeddings, encodings and captions; returns {folder: table}."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    tables = {}
    for name, shape in SHAPES.items():
        dtype = np.float32 if name == "text_emb" else np.float16
        tables[name] = generator.standard_normal((sum(sizes), *shape)).astype(dtype)
        (folder / name).mkdir(parents=True)
        for number, shard in enumerate(np.split(tables[name], ends[:-1])):
            np.save(folder / name / f"{name}_{number}.npy", shard)
    (folder / "captions").mkdir()
    for number, (size, end) in enumerate(zip(sizes, ends)):
        lines = [json.dumps({"caption": f"row {row} ü"}) for row in range(end - size, end)]
        (folder / f"captions/captions_{number:04d}.jsonl").write_text("\n".join(lines))
    return tables


def change_rows(path, rows, value):
    table = np.load(path)
    table[rows] = value
    np.save(path, table)


# Embeddings

def test_rows_are_those_of_the_shards_in_order_of_their_numbers(tmp_path):
    # More than ten shards: 10 comes after 9, not after 1.
    tables = write(tmp_path, (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5))
    dataset = data.Embeddings(tmp_path, text_encodings=True, captions=True)
    assert len(dataset) == 44
    assert dataset.width == 6
    rows = np.random.default_rng(1).permutation(44)
    batch, usable = pickle.loads(pickle.dumps(dataset)).fetch(rows)  # as a worker gets it
    assert usable.all()
    for name, folder in data.FOLDERS.items():
        assert batch[name].dtype == torch.float32
        np.testing.assert_array_equal(batch[name], tables[folder][rows])
    assert batch["caption"] == [f"row {row} ü" for row in rows]
    assert dataset.name(0) == "img_emb_0.npy row 0"
    assert dataset.name(43) == "img_emb_10.npy row 4"
    assert "caption" not in data.Embeddings(tmp_path).fetch(rows)[0]


def test_written_shards_read_back_and_replace_those_that_were_there(tmp_path):
    tables = np.random.default_rng(0).standard_normal((3, 23, 4)).astype(np.float16)
    images, texts, encodings = tables
    encodings = encodings.reshape(23, 2, 2)
    records = [{"caption": f"größe {i}", "attributes": {"n": i}} for i in range(23)]
    data.write_shards(tmp_path, images, torch.from_numpy(texts), records, encodings, 10)
    dataset = data.Embeddings(tmp_path, text_encodings=True)
    assert dataset.images.sizes == {0: 10, 1: 10, 2: 3}
    assert dataset.records(range(23)) == records
    batch, _ = dataset.fetch(np.arange(23))
    for values, table in zip(batch.values(), (images, texts, encodings)):
        np.testing.assert_array_equal(values, table)

    data.write_shards(tmp_path, images[:9], texts[:9], [{"caption": "a"}] * 9)
    dataset = data.Embeddings(tmp_path)
    assert len(dataset) == 9
    assert not list((tmp_path / "text_enc").iterdir())


@pytest.mark.parametrize("dtype, stored", [("f2", "f2"), ("f4", "f4"), ("f8", "f4")])
def test_written_shards_keep_their_precision(dtype, stored, tmp_path):
    rows = np.linspace(0, 1, 6).reshape(3, 2).astype(dtype)
    data.write_shards(tmp_path, rows, rows, [])
    assert np.load(tmp_path / "img_emb/img_emb_0.npy").dtype == np.dtype(stored)


def test_shards_of_unequal_lengths_are_refused_before_those_there_are_removed(tmp_path):
    rows = np.ones((3, 2))
    data.write_shards(tmp_path, rows, rows, [])
    for texts, records in ((rows[:2], []), (rows, [{"caption": "a"}])):
        with pytest.raises(AssertionError, match="different lengths"):
            data.write_shards(tmp_path, rows, texts, records)
    assert len(data.Embeddings(tmp_path)) == 3


def test_with_captions_text_embeddings_are_optional(tmp_path):
    tables = write(tmp_path)
    shutil.rmtree(tmp_path / "text_emb")
    batch, usable = data.Embeddings(tmp_path, captions=True).fetch(np.arange(17))
    assert usable.all()
    assert batch.keys() == {"image_embed", "caption"}
    np.testing.assert_array_equal(batch["image_embed"], tables["img_emb"])


def test_padding_in_text_encodings_is_usable_but_infinity_is_not(tmp_path):
    encodings = np.ones((4, 3, 2), np.float32)
    encodings[1] = 0
    encodings[2, 1] = 0
    encodings[3, 2, 1] = np.inf
    data.write_shards(tmp_path, np.ones((4, 2)), np.ones((4, 2)), [], encodings)
    dataset = data.Embeddings(tmp_path, text_encodings=True)
    _, usable = dataset.fetch(np.arange(4))
    assert usable.tolist() == [True, True, True, False]


def test_the_fingerprint_changes_with_the_data_and_only_then(tmp_path):
    def fingerprint(name, **settings):
        write(tmp_path / name, **settings)
        return data.Embeddings(tmp_path / name).fingerprint()

    first = fingerprint("first")
    assert fingerprint("copy") == first
    assert fingerprint("other rows", seed=1) != first
    assert fingerprint("other shards", sizes=(5, 7, 5)) != first
    assert first["rows"] == 17
    assert json.loads(json.dumps(first)) == first


def write_sparse(path, rows, width, values):
    """A .npy file of float16 zeros without blocks on the disk, but for the rows {row: value}."""
    header = {"descr": "<f2", "fortran_order": False, "shape": (rows, width)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        start = file.tell()
        try:
            file.truncate(start + rows * width * 2)
        except OSError as error:
            pytest.skip(f"no file of this size here: {error}")
        for row, value in values.items():
            file.seek(start + row * width * 2)
            file.write(np.full(width, value, np.float16).tobytes())


def test_two_billion_rows_of_768_are_opened_and_read_in_little_memory(tmp_path):
    rows = np.array([HUGE - 1, 0, 1_234_567_890])
    values = dict(zip(rows, (1, 2, 3)))
    for name in ("img_emb", "text_emb"):
        (tmp_path / name).mkdir()
        write_sparse(tmp_path / name / f"{name}_0.npy", HUGE, 768, values)
    tracemalloc.start()
    dataset = data.Embeddings(tmp_path)
    sent = pickle.dumps(dataset)  # to a worker that is not forked
    batch, usable = pickle.loads(sent).fetch(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert len(sent) < 10_000
    assert len(dataset) == HUGE
    assert usable.all()
    for name in ("image_embed", "text_embed"):
        np.testing.assert_array_equal(batch[name], np.tile([[1], [2], [3]], 768))
    with pytest.raises(UserError, match="198 of 200 rows are not finite or all zero"):
        dataset.check(200)


def test_one_unusable_row_in_a_hundred_is_named_and_more_are_refused(tmp_path):
    write(tmp_path, (200, 300))
    dataset = data.Embeddings(tmp_path)
    assert dataset.check() == (0, 500, [])
    path = tmp_path / "text_emb/text_emb_1.npy"
    change_rows(path, slice(10, 15), 0)
    names = [f"img_emb_1.npy row {row}" for row in range(10, 15)]
    assert dataset.check() == (5, 500, names)
    change_rows(path, 15, np.nan)
    with pytest.raises(UserError, match=r"6 of 500 rows .*: img_emb_1\.npy row 10, "):
        dataset.check()


# Splits

def make_splits(dataset, val_dataset=None, **settings):
    """({split: dataset}, {split: rows})"""
    values = {"data": "a", "validation": 0.2, "test": 0.1, "split_seed": 3, "batch_size": 280}
    cfg = SimpleNamespace(**values | settings)
    datasets = {}
    rows = {}
    for name, (found, indices) in data.splits(dataset, cfg, val_dataset).items():
        datasets[name] = found
        rows[name] = indices[np.arange(len(indices))].tolist()
    return datasets, rows


@pytest.fixture
def dataset_of_400(tmp_path):
    write(tmp_path, (400,))
    return data.Embeddings(tmp_path)


def test_the_splits_of_a_dataset_hold_every_row_once_by_the_split_seed(dataset_of_400):
    _, rows = make_splits(dataset_of_400)
    assert sorted(itertools.chain(*rows.values())) == list(range(400))
    assert len(rows["validation"]) == 80
    _, other = make_splits(dataset_of_400, split_seed=0)
    assert rows["test"] != other["test"]


def test_with_a_validation_set_all_of_it_is_validated_on_and_nothing_held_out_for_it(
        dataset_of_400, tmp_path):
    write(tmp_path / "b", (60,))
    val_dataset = data.Embeddings(tmp_path / "b")
    datasets, rows = make_splits(dataset_of_400, val_dataset)
    assert list(datasets.values()) == [dataset_of_400, val_dataset, dataset_of_400]
    assert rows["validation"] == list(range(60))
    assert sorted(rows["train"] + rows["test"]) == list(range(400))
    assert len(rows["train"]) == 360


@pytest.mark.parametrize("change, message", [
    ({"batch_size": 281}, "a: 280 samples for train, expected at least 281; .* --batch_size"),
    ({"validation": 1e-6}, "a: 0 samples for validation, expected at least 1; .* --validation"),
    ({"test": 1e-6}, "a: 0 samples for test, expected at least 1; .* --test"),
])
def test_a_split_with_too_few_rows_is_refused(change, message, dataset_of_400):
    with pytest.raises(UserError, match=message):
        make_splits(dataset_of_400, **change)


# The stream of batches

def read_steps(folder, world_size, first_step, steps, workers=0):
    """Indices and image embeddings of each step, put together from all ranks, and the unusable."""
    dataset = data.Embeddings(folder)
    chunks = data.ChunkDataset(dataset, dataset.split("train", 0.1, 0.1), seed=4)
    indices = np.zeros((steps, 10), int)
    embeds = np.zeros((steps, 10, dataset.width), np.float32)
    unusable = set()
    for rank in range(world_size):
        plan = accumulate.plan(10, 3, rank, world_size)
        batches = data.loader(chunks, data.training_spans(plan, 10, first_step), workers)
        for step in range(steps):
            for chunk in plan:
                batch = next(batches)
                indices[step, chunk.start:chunk.stop] = batch["index"]
                embeds[step, chunk.start:chunk.stop] = batch["image_embed"]
                unusable.update(batch["unusable"])
    return indices, embeds, unusable


def slow_order(split, unusable, seed, positions):
    """The row at each position, one at a time: the shuffled one, or the next usable one."""
    rows = []
    for position in positions:
        place = order.shuffle(np.array([position]), len(split), seed)
        while split[place][0] in unusable:
            place = (place + 1) % len(split)
        rows.append(split[place][0])
    return rows


def test_samples_come_in_one_order_on_any_number_of_ranks_and_workers_and_from_any_step_on(
        tmp_path):
    images = write(tmp_path, (20, 30, 25))["img_emb"]
    split = order.split_indices(75, "train", 0.1, 0.1)
    dataset = data.Embeddings(tmp_path)
    damaged = split[np.array([3, 25, len(split) - 1])]  # after the last comes the first
    folders = ("img_emb", "img_emb", "text_emb")
    for row, name, value in zip(damaged, folders, (np.nan, 0.0, np.inf)):
        shard, row_in_shard = dataset.images.locate(row)
        change_rows(tmp_path / name / f"{name}_{shard}.npy", row_in_shard, value)

    indices, embeds, unusable = read_steps(tmp_path, 1, 0, steps=20)
    np.testing.assert_array_equal(embeds, images[indices])
    assert unusable == set(map(dataset.name, damaged))
    assert indices.ravel().tolist() == slow_order(split, damaged, 4, range(200))
    assert len(np.unique(indices)) == len(split) - 3
    for world_size, first, workers in ((1, 13, 2), (2, 6, 0), (3, 0, 0)):
        again = read_steps(tmp_path, world_size, first, 7, workers)
        np.testing.assert_array_equal(again[0], indices[first:first + 7])
        np.testing.assert_array_equal(again[1], embeds[first:first + 7])


class Words:
    """A dataset whose samples are the random words that `fetch` gets."""

    def fetch(self, indices, random_words=None):
        if random_words is not None:
            random_words = random_words.astype(np.int64)
        return {"words": random_words}, np.ones(len(indices), bool)

    def name(self, index):
        return str(index)


def test_what_is_random_in_a_sample_depends_on_seed_and_position_alone():
    def words(start, stop, count=7, seed=2):
        chunks = data.ChunkDataset(Words(), np.arange(count), seed)
        return chunks[start, stop]["words"].tolist()

    first = words(0, 40)
    assert len(set(first)) == 40  # another one each time that a row comes
    assert words(13, 31, count=9) == first[13:31]
    assert not set(words(0, 40, seed=3)) & set(first)


def evaluated(most):
    """[(number, indices, random words)] of this rank's batches."""
    batches = data.batches(Words(), np.arange(80, 200), most, 16)
    return [(number, batch["index"].tolist(), batch["words"]) for number, batch in batches]


@pytest.mark.parametrize("most, count", [(0, 120), (50, 50), (32, 32), (10_000, 120)])
def test_evaluation_takes_the_first_samples_of_a_split_in_order_and_nothing_random(most, count):
    numbers, indices, words = zip(*evaluated(most))
    assert set(words) == {None}
    assert list(itertools.chain(*indices)) == list(range(80, 80 + count))
    assert list(numbers) == list(range(-(-count // 16)))


def test_two_ranks_take_the_batches_in_turns(on_ranks):
    alone = evaluated(50)
    assert on_ranks(2, evaluated, 50) == [alone[0::2], alone[1::2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_with_nothing_usable_ends_in_one_line(workers, tmp_path):
    write(tmp_path, (40, 40))
    for number, value in enumerate((np.nan, 0)):
        change_rows(tmp_path / f"img_emb/img_emb_{number}.npy", slice(None), value)
    dataset = data.Embeddings(tmp_path)
    chunks = data.ChunkDataset(dataset, dataset.split("train", 0.1, 0.1), 0)
    with pytest.raises(UserError, match=r"^104 unusable rows .*: img_emb_[01]\.npy row .*$"):
        next(data.loader(chunks, [(0, 8)], workers))


def test_tensors_and_arrays_go_to_the_device_and_the_rest_stays():
    batch = {"a": np.arange(3), "b": torch.ones(2), "caption": ["x"]}
    moved = data.to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"].device.type == "meta"
    assert moved["caption"] is batch["caption"]
    assert isinstance(batch["a"], np.ndarray)


# Faults in embeddings

def remove(name):
    return lambda folder: (folder / name).unlink()


def remove_folder(name):
    return lambda folder: shutil.rmtree(folder / name)


def replace(name, *shape, dtype=np.float16):
    return lambda folder: np.save(folder / name, np.ones(shape, dtype))


def cut(folder):
    path = folder / "img_emb/img_emb_1.npy"
    path.write_bytes(path.read_bytes()[:150])


@pytest.mark.parametrize("fault, message", [
    (remove_folder("img_emb"), "data/img_emb: no such folder, or no img_emb_N.npy files"),
    (remove_folder("text_enc"), "text_enc: no such folder"),
    (remove("text_emb/text_emb_1.npy"), r"text_emb must match; .* in one only: \[\(1, 8\)\]"),
    (replace("text_enc/text_enc_1.npy", 7, 3, 2), r"text_enc .* \[\(1, 7\), \(1, 8\)\]"),
    (replace("img_emb/img_emb_1.npy", 8, 5), r"img_emb: .* of one shape: \{\([56],\), \([56],\)"),
    (replace("img_emb/img_emb_0.npy", 5, 6, dtype=object), "img_emb_0.npy: not a readable .npy"),
    (replace("img_emb/img_emb_0.npy", 5, 6, dtype=np.int64),
     r"img_emb_0.npy: .*expected float16 or float32 of 2 dimensions .*int64 of shape \(5, 6\)"),
    (replace("img_emb/img_emb_0.npy", 5, 1, 6), r"shape \(5, 1, 6\)"),
    (cut, "img_emb_1.npy: not a readable .npy array"),
    (remove_folder("captions"), "no captions for shard 0; expected captions/captions_N.jsonl"),
])
def test_a_fault_of_the_shards_is_found_at_the_start_and_named(fault, message, tmp_path):
    folder = tmp_path / "data"
    write(folder)
    settings = {"text_encodings": True, "captions": "shard 0" in message}
    data.Embeddings(folder, **settings)  # before the fault
    fault(folder)
    with pytest.raises(UserError, match=message):
        data.Embeddings(folder, **settings)


@pytest.mark.parametrize("line, message", [
    ("hello\n", "JSONDecodeError"),
    ("[1]\n", "TypeError"),
    ('{"caption": 1}\n', ""),
    ('{"text": "a"}\n', r"KeyError\('caption'\)"),
    ("", "7 captions"),
    ("[" * 100_000 + "\n", "RecursionError"),
])
def test_a_fault_of_a_caption_is_named_by_its_file(line, message, tmp_path):
    write(tmp_path)
    path = tmp_path / "captions/captions_0001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[3] = line
    path.write_text("".join(lines))
    dataset = data.Embeddings(tmp_path, captions=True)
    expected = f"captions_0001.jsonl: expected a 'caption' for each of 8 rows .*{message}"
    with pytest.raises(UserError, match=expected):
        dataset.fetch(np.array([2, 8]))


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture
def parquet_folder(tmp_path):
    write(tmp_path)
    shutil.rmtree(tmp_path / "captions")
    (tmp_path / "metadata").mkdir()
    captions = [f"row {row} ü" for row in range(17)]
    captions[6] = None
    for number, rows in enumerate((slice(0, 5), slice(5, 13), slice(13, 17))):
        path = tmp_path / f"metadata/metadata_{number:03d}.parquet"
        write_parquet(path, {"caption": captions[rows]})
    return tmp_path


def test_captions_in_parquet_are_read_in_any_order(parquet_folder):
    dataset = data.Embeddings(parquet_folder, captions=True)
    captions = dataset.fetch(np.array([16, 0, 6, 12, 5]))[0]["caption"]
    assert captions == ["row 16 ü", "row 0 ü", "", "row 12 ü", "row 5 ü"]


@pytest.mark.parametrize("columns", [{"text": ["a"] * 8}, None])
def test_a_fault_of_a_parquet_file_is_named(columns, parquet_folder):
    path = parquet_folder / "metadata/metadata_001.parquet"
    path.write_bytes(b"hello")
    if columns:
        write_parquet(path, columns)
    dataset = data.Embeddings(parquet_folder, captions=True)
    with pytest.raises(UserError, match=r"metadata_001\.parquet: expected a 'caption' for each"):
        dataset.fetch(np.array([5]))


FAILS = """
import sys
import torch
from common import data

class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, span):
        return span

batches = data.loader(Numbers(), [(0, 1), (1, 2)], workers=1)
next(batches)
raise MemoryError
"""


def test_a_process_that_ends_by_an_error_does_not_wait_for_its_workers(script):
    assert "MemoryError" in script(FAILS).stderr


def with_captions(folder, lines):
    """Write a data set of as many rows as lines of captions."""
    rows = np.ones((len(lines), 2))
    data.write_shards(folder, rows, rows, [{"caption": ""}] * len(lines))
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "captions/captions_0.jsonl").write_bytes(text.encode("utf-16"))


def test_captions_of_another_key_and_several_captions_of_a_row_are_read(tmp_path):
    texts = ["a", "b", "c"]
    with_captions(tmp_path, [{"TEXT": texts}, {"TEXT": "größe"}])
    dataset = data.Embeddings(tmp_path, captions=True, caption_key="TEXT")
    assert dataset.fetch(np.array([0, 1]))[0]["caption"] == ["a", "größe"]
    rows = np.array([0])
    drawn = data.ChunkDataset(dataset, rows, seed=0)[0, 300]["caption"]
    assert set(drawn) == set(texts)


def test_built_in_is_what_the_project_wrote_whatever_the_records_have(tmp_path):
    with_captions(tmp_path, [{"caption": "a", "attributes": {"shape": "star"}}])
    assert not data.is_built_in(tmp_path)
    (tmp_path / "clip.json").write_text('{"clip": "x", "made_from": "y"}')
    assert data.is_built_in(tmp_path)


# Folders

def test_links_to_folders_are_entered_once_and_broken_ones_are_counted(tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere/deep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "b").touch()
    folder = tmp_path / "data"
    (folder / "own").mkdir(parents=True)
    (folder / "own/a").touch()
    links = {
        "first": elsewhere.parent,
        "second": elsewhere.parent,
        "own/cycle": folder,
        "itself": folder / "itself",
        "broken": tmp_path / "nowhere",
        "file": folder / "own/a",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    names = [path.relative_to(folder).as_posix() for path in data.files_below(folder)]
    assert names == ["file", "first/deep/b", "own/a"]
    broken = folder / "broken"
    assert f"note: 2 links lead nowhere, and are left out: {broken}" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        data.files_below(tmp_path)
