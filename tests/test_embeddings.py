"""Embeddings: rows and captions are read as written, and errors name the file."""
import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from common.config import UserError
from common.data import embeddings
from common.data.embeddings import Embeddings, write_shards

ROWS = 150  # in shards of 70, 70 and 10


@pytest.fixture
def tables():
    """Image embeddings, text embeddings, text encodings."""
    rng = np.random.default_rng(0)
    shapes = [(ROWS, 6), (ROWS, 6), (ROWS, 3, 2)]
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


@pytest.fixture
def folder(tables, tmp_path):
    image, text, encodings = tables
    records = [{"caption": f"row {row} ü", "n": row} for row in range(ROWS)]
    write_shards(tmp_path, image, torch.from_numpy(text), records, encodings, 70)
    return tmp_path


def change_rows(path, rows, value):
    table = np.load(path)
    table[rows] = value
    np.save(path, table)


def test_rows_and_records_are_read_in_any_order_as_they_were_written(tables, folder):
    dataset = Embeddings(folder, text_encodings=True, captions=True)
    dataset = pickle.loads(pickle.dumps(dataset))  # as a worker gets it
    rows = np.random.default_rng(1).permutation(ROWS)
    batch, usable = dataset.fetch(rows)
    assert usable.all()
    for name, table in zip(embeddings.FOLDERS, tables):
        assert batch[name].dtype == torch.float32
        assert_array_equal(batch[name], table[rows])
    assert batch["caption"] == dataset.texts(rows) == [f"row {row} ü" for row in rows]
    assert [record["n"] for record in dataset.records(range(ROWS))] == list(range(ROWS))
    assert dataset.fault(149) == ""
    assert "caption" not in Embeddings(folder).fetch(rows)[0]


def test_shards_are_in_the_order_of_their_numbers_and_may_be_empty(tmp_path):
    # 10 comes after 9, not after 1.
    table = np.arange(44, dtype=np.float32)[:, None]
    ends = np.cumsum((3, 1, 4, 0, 5, 9, 2, 6, 5, 3, 6))
    for number, shard in enumerate(np.split(table, ends[:-1])):
        np.save(tmp_path / f"img_emb_{number}.npy", shard)
    shards = embeddings.Shards(tmp_path, "img_emb")
    rows = np.random.default_rng(1).permutation(44)
    assert_array_equal(shards[rows], table[rows])


@pytest.mark.parametrize("dtype, stored", [("f2", "f2"), ("f4", "f4"), ("f8", "f4")])
def test_written_shards_keep_their_precision_and_replace_those_that_were_there(
        dtype, stored, folder):
    rows = np.ones((3, 2), dtype)
    write_shards(folder, rows, rows, [])
    assert np.load(folder / "img_emb/img_emb_0.npy").dtype == np.dtype(stored)
    assert len(Embeddings(folder)) == 3
    assert not list((folder / "text_enc").iterdir())


def test_arrays_of_unequal_lengths_are_refused_before_shards_are_removed(folder):
    rows = np.ones((3, 2))
    with pytest.raises(AssertionError, match="different lengths"):
        write_shards(folder, rows, rows[:2], [])
    assert len(Embeddings(folder)) == ROWS


def test_what_is_zero_not_finite_or_of_another_length_is_unusable_but_for_padding_in_encodings(
        folder):
    change_rows(folder / "text_enc/text_enc_0.npy", 1, 0)
    change_rows(folder / "text_enc/text_enc_0.npy", (2, 2, 1), np.inf)
    change_rows(folder / "img_emb/img_emb_0.npy", 3, 0)
    change_rows(folder / "text_emb/text_emb_0.npy", (4, 0), np.nan)
    change_rows(folder / "img_emb/img_emb_0.npy", (5, 0), 60_000)  # much longer than most
    change_rows(folder / "text_emb/text_emb_0.npy", 6, 1e-3)
    _, usable = Embeddings(folder, text_encodings=True).fetch(np.arange(8))
    assert usable.tolist() == [True, True, False, False, False, False, False, True]


def test_one_unusable_row_in_a_hundred_is_named_and_more_are_refused(folder):
    path = folder / "text_emb/text_emb_1.npy"
    change_rows(path, 10, 0)
    dataset = Embeddings(folder)
    fault = dataset.fault(80)
    assert fault.startswith("img_emb_1.npy row 10: all zero, not finite, ")
    assert dataset.check() == (1, ROWS, [fault])
    change_rows(path, 11, np.nan)
    with pytest.raises(UserError, match=r"2 of 150 samples .*: img_emb_1\.npy row 10: all zero"):
        dataset.check()


def test_a_file_that_claims_more_rows_than_were_written_is_refused_at_once(folder):
    for name in ("img_emb", "text_emb"):  # sparse files take no space
        path = folder / name / f"{name}_0.npy"
        np.lib.format.open_memmap(path, "w+", np.float16, (10**9, 6))
    with pytest.raises(UserError, match="img_emb: most rows are all zero"):
        Embeddings(folder).fetch(np.arange(2))


def test_the_fingerprint_changes_with_the_data_and_only_then(tables, folder):
    image, text, _ = tables
    seen = []
    for images, rows in ((image, 100), (image, 100), (image + 1, 100), (image, 50)):
        write_shards(folder, images, text, [], rows_per_shard=rows)
        seen.append(json.dumps(Embeddings(folder).fingerprint()))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def remove_folder(name):
    return lambda folder: shutil.rmtree(folder / name)


def replace(name, *shape, dtype=np.float16):
    return lambda folder: np.save(folder / name, np.ones(shape, dtype))


@pytest.mark.parametrize("fault, message", [
    (remove_folder("img_emb"), "img_emb: no such folder, or no img_emb_N.npy files"),
    (lambda folder: (folder / "text_emb/text_emb_1.npy").unlink(),
     r"text_emb must match; .* in only one of them: \[\(1, 70\)\]"),
    (replace("text_enc/text_enc_1.npy", 7, 3, 2), r"text_enc .* \[\(1, 7\), \(1, 70\)\]"),
    (replace("img_emb/img_emb_1.npy", 8, 5), r"img_emb: .* same shape: \{\([56],\), \([56],\)"),
    (replace("img_emb/img_emb_0.npy", 5, 6, dtype=np.int64),
     r"img_emb_0.npy: .*expected float16 or float32 of 2 dimensions .*int64 of shape \(5, 6\)"),
    (lambda folder: os.truncate(folder / "img_emb/img_emb_1.npy", 150),
     "img_emb_1.npy: not a readable .npy array"),
    (remove_folder("captions"), "no captions for shard 0; expected captions/captions_N.jsonl"),
    (lambda folder: os.truncate(folder / "captions/captions_1.jsonl", 99),
     r"captions_1.jsonl: expected a 'caption' for each of 70 rows \(ValueError: 3 captions"),
])
def test_a_fault_of_the_shards_is_found_at_the_start_and_named(fault, message, folder):
    fault(folder)
    with pytest.raises(UserError, match=message):
        Embeddings(folder, text_encodings=True, captions=True)


# Captions

@pytest.mark.parametrize("line, message", {
    b"hello\n": "JSONDecodeError",
    b"[1]\n": "TypeError",
    b'{"url": "a"}\n': "no caption or text, but url",
    b"[" * 100_000 + b"\n": "RecursionError",
    "größe".encode("cp1252") + b"\n": "UnicodeDecodeError",
}.items())
def test_a_fault_of_a_caption_costs_a_sample_and_is_named_by_its_file(line, message, folder):
    path = folder / "captions/captions_1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = line
    path.write_bytes(b"".join(lines))
    dataset = Embeddings(folder, captions=True)
    _, usable = dataset.fetch(np.array([2, 73]))
    assert usable.tolist() == [True, False]
    assert re.search(f"^row 73: .*captions_1.jsonl: .*{message}", dataset.fault(73))
    assert not dataset.fault(2)


def test_captions_of_some_shards_alone_are_none_where_none_are_needed(folder):
    (folder / "captions/captions_1.jsonl").unlink()
    dataset = Embeddings(folder)
    assert dataset.fetch(np.array([0, 71]))[1].all()
    assert not dataset.captions


def test_a_mark_and_another_end_of_line_are_no_part_of_a_caption(tmp_path):
    write_shards(tmp_path, np.ones((2, 2)), np.ones((2, 2)), [{"caption": ""}] * 2)
    text = '{"caption": ["a", "b"]}\r\n{"caption": "größe"}'
    (tmp_path / "captions/captions_0.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert Embeddings(tmp_path, captions=True).texts([0, 1]) == ["a", "größe"]


def write_parquet(folder, shards):
    """Write a parquet file for each list of captions in `shards`."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "metadata").mkdir()
    for number, captions in enumerate(shards):
        table = pyarrow.table({"caption": captions})
        parquet.write_table(table, folder / f"metadata/metadata_{number:03d}.parquet")
    return pyarrow


@pytest.fixture
def parquet_folder(folder):
    """A folder with captions in parquet instead of jsonl."""
    shutil.rmtree(folder / "captions")
    captions = [f"row {row} ü" for row in range(ROWS)]
    captions[6] = None
    write_parquet(folder, [captions[:70], captions[70:140], captions[140:]])
    return folder


def test_captions_in_parquet_are_read_in_any_order_without_text_embeddings(parquet_folder):
    shutil.rmtree(parquet_folder / "text_emb")
    dataset = Embeddings(parquet_folder, captions=True)
    assert dataset.fetch(np.arange(9))[0].keys() == {"image_embed", "caption"}
    assert dataset.texts([149, 0, 6, 71]) == ["row 149 ü", "row 0 ü", "", "row 71 ü"]


def test_a_fault_of_a_parquet_file_is_named(parquet_folder):
    (parquet_folder / "metadata/metadata_001.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"metadata_001.parquet: expected a 'caption' for each"):
        Embeddings(parquet_folder, captions=True)


@pytest.mark.parametrize("kind", ["folder", "parquet_folder"])
def test_captions_are_indexed_once_and_anew_if_a_file_changes(kind, request, monkeypatch):
    folder = request.getfixturevalue(kind)
    settings = {"captions": True, "index_dir": folder / "index"}
    rows = np.random.default_rng(1).permutation(ROWS)
    before = Embeddings(folder, **settings).texts(rows)
    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "caption_lines", None)  # reading a file would fail
        assert Embeddings(folder, **settings).texts(rows) == before
    path = Embeddings(folder).captions[2]
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    seen = []
    read = embeddings.caption_lines
    monkeypatch.setattr(embeddings, "caption_lines", lambda path: seen.append(path) or read(path))
    assert Embeddings(folder, **settings).texts(rows) == before
    assert len(seen) == 3


def test_captions_of_a_model_that_needs_none_are_not_indexed_until_they_are_read(folder):
    dataset = Embeddings(folder, index_dir=folder / "index")
    assert not (folder / "index").exists()
    assert dataset.texts([3]) == ["row 3 ü"]
