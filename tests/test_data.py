"""Readers and batches: pure functions of data and seed, and every fault of the files told by name."""
import itertools
import json
import pickle
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import accumulate, data
from common.config import UserError

HUGE = 2 * 10 ** 9
FOLDERS, SIZES = ("img_emb", "text_emb"), (5, 8, 4)  # what `write` writes: rows of each shard


def write(folder, sizes=SIZES, width=6, dtype=np.float16, pad=0, seed=0, captions=True):
    """Shards of random embeddings, each row's first number its own; returns the two tables."""
    generator, tables = np.random.default_rng(seed), []
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        table = generator.standard_normal((sum(sizes), width)).astype(dtype)
        table[:, 0] = np.arange(1, sum(sizes) + 1)
        for number, part in enumerate(np.split(table, np.cumsum(sizes)[:-1])):
            np.save(folder / name / f"{name}_{number:0{pad}d}.npy", part)
        tables.append(table.astype(np.float32))
    if captions:
        (folder / "captions").mkdir()
        for number, end in enumerate(np.cumsum(sizes)):
            lines = [json.dumps({"caption": f"row {row} ü"}) + "\n" for row in range(end - sizes[number], end)]
            (folder / "captions" / f"captions_{number:0{pad}d}.jsonl").write_text("".join(lines), encoding="utf-8")
    return tables


# Embeddings

@pytest.mark.parametrize("dtype, pad", [(np.float16, 0), (np.float32, 4)])
def test_rows_read_in_any_order_are_those_of_the_shards_in_order_of_their_numbers(dtype, pad, tmp_path):
    sizes = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)  # more than ten: 10 comes after 9, not after 1
    images, texts = write(tmp_path, sizes, dtype=dtype, pad=pad)
    source = data.Embeddings(tmp_path, captions=True)
    assert (len(source), source.width) == (44, 6)
    rows = np.random.default_rng(1).permutation(44)
    for copy in (source, pickle.loads(pickle.dumps(source))):
        batch, good = copy.fetch(rows)
        assert good.all() and batch["image_embed"].dtype == torch.float32
        np.testing.assert_array_equal(batch["image_embed"], images[rows])
        np.testing.assert_array_equal(batch["text_embed"], texts[rows])
        assert batch["caption"] == [f"row {row} ü" for row in rows]
    assert source.name(0) == "img_emb_0.npy row 0" and source.name(43) == "img_emb_10.npy row 4"
    assert "caption" not in data.Embeddings(tmp_path).fetch(rows)[0]


def test_written_shards_read_back_and_do_not_mix_with_those_that_were_there(tmp_path):
    generator = np.random.default_rng(0)
    images, texts = generator.standard_normal((2, 23, 4)).astype(np.float16)
    encodings = generator.standard_normal((23, 3, 5)).astype(np.float16)
    records = [{"caption": f"größe {i}", "attributes": {"color": "red", "n": i}} for i in range(23)]
    data.write_shards(tmp_path, images, torch.from_numpy(texts), records, encodings, rows_per_shard=10)
    source = data.Embeddings(tmp_path, text_encodings=True, captions=True)
    assert source.images.sizes == [10, 10, 3] and source.captions.built_in()
    batch, good = source.fetch(np.arange(23))
    assert good.all() and source.captions.records(range(23)) == records
    for name, table in (("image_embed", images), ("text_embed", texts), ("text_enc", encodings)):
        np.testing.assert_array_equal(batch[name], table.astype(np.float32))
    data.write_shards(tmp_path, images[:9], texts[:9], [{"caption": "a"}] * 9)
    source = data.Embeddings(tmp_path, captions=True)
    assert len(source) == 9 and not list((tmp_path / "text_enc").iterdir()) and not source.captions.built_in()


def test_with_captions_there_need_be_no_text_embeddings_and_without_either_can_be_told(tmp_path):
    images, _ = write(tmp_path)
    assert data.Embeddings(tmp_path).captions.records([16, 0]) == [{"caption": "row 16 ü"}, {"caption": "row 0 ü"}]
    shutil.rmtree(tmp_path / "text_emb")
    batch, good = data.Embeddings(tmp_path, captions=True).fetch(np.arange(17))
    assert good.all() and set(batch) == {"image_embed", "caption"}
    np.testing.assert_array_equal(batch["image_embed"], images)
    write(tmp_path / "plain", captions=False)
    assert data.Embeddings(tmp_path / "plain").captions is None


def test_padding_in_text_encodings_is_no_fault_but_what_is_not_finite_is(tmp_path):
    encodings = np.ones((4, 3, 2), np.float32)
    encodings[1], encodings[2, 1] = 0, 0
    encodings[3, 2, 1] = np.inf
    data.write_shards(tmp_path, np.ones((4, 2)), np.ones((4, 2)), [{"caption": ""}] * 4, encodings)
    assert data.Embeddings(tmp_path, text_encodings=True).fetch(np.arange(4))[1].tolist() == [True, True, True, False]


def test_the_fingerprint_changes_with_the_data_and_only_then(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    write(tmp_path / "c", seed=1)
    write(tmp_path / "d", sizes=(5, 7, 5))
    prints = [data.Embeddings(tmp_path / name).fingerprint() for name in "abcd"]
    assert prints[0] == prints[1] and prints[0] not in prints[2:] and prints[0]["rows"] == 17
    assert json.loads(json.dumps(prints[0])) == prints[0]


def sparse(path, rows, width, filled):
    """A .npy file of float16 zeros that takes no room on the disk, with a few rows written: {row: value}."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_2_0(file, {"descr": "<f2", "fortran_order": False, "shape": (rows, width)})
        start = file.tell()
        try:
            file.truncate(start + rows * width * 2)
        except OSError as error:
            pytest.skip(f"no file of this size here: {error}")
        for row, value in filled.items():
            file.seek(start + row * width * 2)
            file.write(np.full(width, value, np.float16).tobytes())


def test_two_billion_rows_of_768_are_opened_and_read_without_memory_that_grows(tmp_path):
    rows = np.array([HUGE - 1, 0, 1_234_567_890])
    for name, sign in zip(FOLDERS, (1, -1)):
        (tmp_path / name).mkdir()
        sparse(tmp_path / name / f"{name}_0.npy", HUGE, 768, {row: sign * (i + 1) for i, row in enumerate(rows)})
    tracemalloc.start()
    source = data.Embeddings(tmp_path)
    sent = pickle.dumps(source)  # to a worker that is not forked
    copy = pickle.loads(sent)
    split = source.split("train", 0.001, 0.001)
    batch, good = copy.fetch(rows)
    spans = data.training_spans(accumulate.plan(512, 64, 1, 2), 512, 3_000_000)
    order = split[data.shuffled(np.arange(*next(spans)), len(split), 0)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 and len(sent) < 10_000 and len(source) == HUGE
    assert good.all() and not source.fetch(rows - 1 + 2 * (rows == 0))[1].any()  # their neighbors are all zero
    for i in range(3):
        assert (batch["image_embed"][i] == i + 1).all() and (batch["text_embed"][i] == -i - 1).all()
    assert len(set(order.tolist())) == 64 and order.min() >= 0 and order.max() < HUGE
    with pytest.raises(UserError, match="198 of 200 rows are not finite or all zero"):
        data.Embeddings(tmp_path).check(200)


@pytest.mark.parametrize("bad, refused", [(0, False), (5, False), (6, True)])
def test_more_than_one_unusable_row_in_a_hundred_is_refused_and_fewer_are_named(bad, refused, tmp_path):
    write(tmp_path, (200, 300))
    for name in FOLDERS:
        path = tmp_path / name / f"{name}_1.npy"
        table = np.load(path)
        table[10:10 + bad] = 0
        np.save(path, table)
    source = data.Embeddings(tmp_path)
    if refused:
        with pytest.raises(UserError, match=r"6 of 500 rows .*more than 1 in 100: img_emb_1\.npy row 10, "):
            source.check()
    else:
        assert source.check() == (bad, 500, [f"img_emb_1.npy row {row}" for row in range(10, 10 + bad)])


# Parts

def test_the_parts_of_a_source_and_a_validation_set_of_another_folder(tmp_path):
    write(tmp_path / "a", (400,))
    write(tmp_path / "b", (60,))
    cfg = SimpleNamespace(data="a", validation=0.2, test=0.1, split_seed=3, batch_size=280)
    source, other = (data.Embeddings(tmp_path / name) for name in "ab")
    for val_source in (None, other):
        parts = data.parts(source, cfg, val_source)
        found = {part: rows[np.arange(len(rows))].tolist() for part, (_, rows) in parts.items()}
        assert parts["train"][0] is parts["test"][0] is source and parts["validation"][0] is (val_source or source)
        if val_source:  # all its rows, and what would have been validation is trained on
            assert sorted(found["validation"]) == list(range(60))
            assert sorted(found["train"] + found["test"]) == list(range(400)) and len(found["train"]) == 360
        else:
            assert sorted(itertools.chain(*found.values())) == list(range(400)) and len(found["validation"]) == 80
            tests = [source.split("test", 0.2, 0.1, seed=seed)[np.arange(40)].tolist() for seed in (3, 0)]
            assert found["test"] == tests[0] != tests[1]


@pytest.mark.parametrize("change, message", [
    ({"batch_size": 281}, "a: 280 training rows, fewer than --batch_size 281; lower it"),
    ({"validation": 1e-6}, "a: 400 rows leave none for validation; raise --validation"),
    ({"test": 1e-6}, "a: 400 rows leave none for test; raise --test"),
])
def test_a_part_with_too_few_rows_is_refused(change, message, tmp_path):
    write(tmp_path, (400,))
    settings = {"data": "a", "validation": 0.2, "test": 0.1, "split_seed": 0, "batch_size": 280} | change
    with pytest.raises(UserError, match=f"^{message}$"):
        data.parts(data.Embeddings(tmp_path), SimpleNamespace(**settings))


# The stream of batches

def stream(folder, world_size, first_step, steps=7, batch_size=10, chunk_size=3, workers=0):
    """Row numbers and image embeddings of each step, put together from all ranks, and names of the unusable."""
    source = data.Embeddings(folder)
    chunks = data.Chunks(source, source.split("train", 0.1, 0.1), seed=4)
    rows, embeds = np.zeros((steps, batch_size), int), np.zeros((steps, batch_size, source.width), np.float32)
    unusable = []
    for rank in range(world_size):
        plan = accumulate.plan(batch_size, chunk_size, rank, world_size)
        batches = data.loader(chunks, data.training_spans(plan, batch_size, first_step), workers)
        for step in range(steps):
            for chunk in plan:
                batch = next(batches)
                rows[step, chunk.start:chunk.stop] = batch["rows"]
                embeds[step, chunk.start:chunk.stop] = batch["image_embed"]
                unusable += batch["unusable"]
    return rows, embeds, sorted(unusable)


def slow_order(split, unusable, seed, positions):
    """The row at each position, one at a time: the place that the permutation gives, or the next usable one behind."""
    order = []
    for position in positions:
        place = data.shuffled(np.array([position]), len(split), seed)
        while split[place][0] in unusable:
            place = (place + 1) % len(split)
        order.append(split[place][0])
    return order


def spoil(folder):
    """Make three rows of the training part unusable, one way each; returns them and their names."""
    split, bad = data.Split(75, "train", 0.1, 0.1), []
    for place, name, value in ((3, "img_emb", np.nan), (25, "img_emb", 0.0), (len(split) - 1, "text_emb", np.inf)):
        bad.append(int(split[np.array([place])][0]))
        shard = np.searchsorted([20, 50, 75], bad[-1], side="right")
        path = folder / name / f"{name}_{shard}.npy"
        table = np.load(path)
        table[bad[-1] - [0, 20, 50][shard]] = value
        np.save(path, table)
    return bad, [data.Embeddings(folder).name(row) for row in bad]


@pytest.mark.parametrize("damaged", [False, True])
def test_samples_come_in_one_order_on_any_number_of_ranks_and_workers_and_from_any_step_on(damaged, tmp_path):
    images, _ = write(tmp_path, (20, 30, 25))
    bad, names = spoil(tmp_path) if damaged else ([], [])
    whole = stream(tmp_path, 1, 0, steps=20)
    np.testing.assert_array_equal(whole[1], images[whole[0]])
    assert set(whole[2]) == set(names)
    split = data.Split(75, "train", 0.1, 0.1)
    assert whole[0].ravel().tolist() == slow_order(split, bad, 4, range(200))
    assert len(np.unique(whole[0])) == len(split) - len(names)
    for world_size, first, workers in ((1, 6, 0), (1, 13, 2), (2, 0, 0), (2, 6, 0), (3, 13, 0)):
        rows, embeds, _ = stream(tmp_path, world_size, first, workers=workers)
        np.testing.assert_array_equal(rows, whole[0][first:first + 7])
        np.testing.assert_array_equal(embeds, whole[1][first:first + 7])


class Numbers:
    """A source whose samples are what `fetch` was given."""

    def fetch(self, rows, draws=None):
        return {"draws": None if draws is None else draws.astype(np.int64)}, np.ones(len(rows), bool)

    def name(self, row):
        return str(row)


def test_what_is_random_in_a_sample_depends_on_seed_and_position_alone_and_nothing_is_in_evaluation():
    whole = data.Chunks(Numbers(), np.arange(7), seed=2)[0, 40]["draws"]
    assert len(set(whole.tolist())) == 40  # another one each time that a row comes
    np.testing.assert_array_equal(data.Chunks(Numbers(), np.arange(9), seed=2)[13, 31]["draws"], whole[13:31])
    assert not np.isin(data.Chunks(Numbers(), np.arange(7), seed=3)[0, 40]["draws"], whole).any()
    batch = data.Chunks(Numbers(), np.arange(10, 17))[2, 5]
    assert batch["draws"] is None and batch["rows"].tolist() == [12, 13, 14]


def evaluated(folder, most):
    source = data.Embeddings(folder, captions=True)
    split = source.split("validation", 0.1, 0.1)
    found = data.batches(source, split, most, 16)
    return [(number, batch["rows"].tolist(), batch["caption"]) for number, batch in found]


@pytest.mark.parametrize("most", [0, 50, 32, 10_000])
def test_batches_of_all_ranks_together_are_the_first_rows_of_a_part_once_each(most, tmp_path, on_ranks):
    write(tmp_path, (500, 700))
    split = data.Split(1200, "validation", 0.1, 0.1)
    expected = split[np.arange(min(len(split), most or len(split)))].tolist()
    alone = evaluated(tmp_path, most)
    assert [number for number, _, _ in alone] == list(range(-(-len(expected) // 16)))
    assert [row for _, rows, _ in alone for row in rows] == expected
    assert all(captions == [f"row {row} ü" for row in rows] for _, rows, captions in alone)
    if most == 50:
        assert on_ranks(2, evaluated, tmp_path, most) == [alone[0::2], alone[1::2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_with_nothing_usable_ends_in_one_message_and_no_endless_search(workers, tmp_path):
    write(tmp_path, (40, 40))
    np.save(tmp_path / "img_emb" / "img_emb_1.npy", np.zeros((40, 6), np.float16))
    np.save(tmp_path / "img_emb" / "img_emb_0.npy", np.full((40, 6), np.nan, np.float16))
    source = data.Embeddings(tmp_path)
    batches = data.loader(data.Chunks(source, source.split("train", 0.1, 0.1), 0), [(0, 8)], workers)
    with pytest.raises(UserError, match=r"^more than 103 unusable rows .*where 8 .*img_emb_[01]\.npy row") as caught:
        next(batches)
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_and_arrays_go_to_the_device_and_the_rest_stays():
    batch = {"a": np.arange(3), "b": torch.ones(2), "caption": ["x"], "n": 3}
    moved = data.to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"].device.type == "meta"
    assert moved["caption"] is batch["caption"] and moved["n"] == 3 and isinstance(batch["a"], np.ndarray)


# Faults in embeddings

def replace(name, value):
    return lambda folder: np.save(folder / name, value, allow_pickle=True)


@pytest.mark.parametrize("work, message", [
    (shutil.rmtree, "data/img_emb: no such folder, or no img_emb_N.npy files with rows in it"),
    (lambda f: shutil.rmtree(f / "text_emb"), "text_emb: no such folder, or no text_emb_N.npy files"),
    (lambda f: (f / "text_emb/text_emb_1.npy").unlink(),
     r"data: shard 1 is \(8, 6\) in img_emb and missing in text_emb; they must match"),
    (lambda f: (f / "img_emb/img_emb_2.npy").unlink(), r"data: shard 2 is missing in img_emb and \(4, 6\) in text_emb"),
    (replace("text_emb/text_emb_1.npy", np.ones((7, 6), np.float16)), r"shard 1 is \(8, 6\) in img_emb and \(7, 6\)"),
    (replace("img_emb/img_emb_1.npy", np.ones((8, 5), np.float16)),
     r"img_emb: rows of shape \(5,\) in shard 1, but \(6,\) in the first"),
    (lambda f: [np.save(f / f"text_emb/text_emb_{i}.npy", np.ones((n, 5), np.float16)) for i, n in enumerate(SIZES)],
     r"shard 0 is \(5, 6\) in img_emb and \(5, 5\) in text_emb"),
    (replace("img_emb/img_emb_0.npy", np.array([[1, "a"]] * 5, object)), "img_emb_0.npy: not a readable .npy array"),
    (replace("img_emb/img_emb_0.npy", np.ones((5, 6), np.int64)),
     r"img_emb_0.npy: .*int64 of shape \(5, 6\); expected float16 or float32 of 2 dimensions"),
    (replace("img_emb/img_emb_0.npy", np.ones((5, 1, 6), np.float16)), r"float16 of shape \(5, 1, 6\); expected"),
    (lambda f: [np.save(f / n / f"{n}_{i}.npy", np.ones((0, 6), np.float16)) for i in range(3) for n in FOLDERS],
     "img_emb: no such folder, or no img_emb_N.npy files with rows in it"),
    (lambda f: (f / "img_emb/img_emb_1.npy").write_bytes((f / "img_emb/img_emb_1.npy").read_bytes()[:150]),
     "img_emb_1.npy: not a readable .npy array"),
    (lambda f: (f / "img_emb/img_emb_1.npy").write_bytes(b"hello"), "img_emb_1.npy: not a readable .npy array"),
    (lambda f: shutil.rmtree(f / "captions"), "data: no captions for shard 0; expected captions/captions_N.jsonl"),
    (lambda f: (f / "captions/captions_2.jsonl").unlink(), "data: no captions for shard 2"),
])
def test_a_fault_of_the_shards_is_found_at_the_start_and_named(work, message, tmp_path):
    folder = tmp_path / "data"
    write(folder)
    data.Embeddings(folder, captions=True)  # before the fault
    work(folder)
    with pytest.raises(UserError, match=message):
        data.Embeddings(folder, captions="captions" in message or "img_emb_0" in message)


def test_encodings_that_do_not_match_are_named(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="text_enc: no such folder"):
        data.Embeddings(tmp_path, text_encodings=True)
    (tmp_path / "text_enc").mkdir()
    for number, (rows, length) in enumerate(((5, 3), (8, 3), (4, 2))):
        np.save(tmp_path / "text_enc" / f"text_enc_{number}.npy", np.ones((rows, length, 2), np.float16))
    with pytest.raises(UserError, match=r"text_enc: rows of shape \(2, 2\) in shard 2, but \(3, 2\) in the first"):
        data.Embeddings(tmp_path, text_encodings=True)
    np.save(tmp_path / "text_enc" / "text_enc_2.npy", np.ones((3, 3, 2), np.float16))
    with pytest.raises(UserError, match=r"shard 2 is \(4,\) in img_emb and \(3,\) in text_enc"):
        data.Embeddings(tmp_path, text_encodings=True)


@pytest.mark.parametrize("line, message", [
    ("hello", "JSONDecodeError"), ("[1]", "TypeError"), ('{"text": "a"}', r"KeyError\('caption'\)"),
    (None, "7 captions"), ('{"caption": "a"}\n{"caption": "b"}', "9 captions"),
])
def test_a_fault_of_a_caption_is_named_by_its_file(line, message, tmp_path):
    write(tmp_path)
    path = tmp_path / "captions" / "captions_1.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3:4] = [line] if line else []
    path.write_text("\n".join(lines), encoding="utf-8")
    source = data.Embeddings(tmp_path, captions=True)
    with pytest.raises(UserError, match=f"captions_1.jsonl: expected a 'caption' for each of 8 rows .*{message}"):
        source.fetch(np.array([2, 8]))


def test_captions_in_parquet_read_at_random(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    write(tmp_path, captions=False)
    (tmp_path / "metadata").mkdir()
    captions = [None if row == 6 else f"row {row} ü" for row in range(17)]
    for number, (start, end) in enumerate(((0, 5), (5, 13), (13, 17))):
        parquet.write_table(pyarrow.table({"key": list(range(start, end)), "caption": captions[start:end]}),
                            tmp_path / "metadata" / f"metadata_{number:03d}.parquet")
    source, rows = data.Embeddings(tmp_path, captions=True), np.array([16, 0, 6, 12, 5])
    assert source.fetch(rows)[0]["caption"] == [captions[row] or "" for row in rows] and not source.captions.built_in()
    path = tmp_path / "metadata" / "metadata_001.parquet"
    for table in (pyarrow.table({"text": ["a"] * 8}), pyarrow.table({"caption": ["a"] * 7}), None):
        path.write_bytes(b"hello") if table is None else parquet.write_table(table, path)
        with pytest.raises(UserError, match=r"metadata_001\.parquet: expected a 'caption' for each of 8 rows"):
            data.Embeddings(tmp_path, captions=True).fetch(np.array([5]))
