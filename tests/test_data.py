"""Order, splits and readers: pure functions of data and seed, and every fault of the files told by name."""
import itertools
import json
import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
import torch

from common import accumulate, data
from common.config import UserError

HUGE = 2 * 10 ** 9
FOLDERS, SIZES = ("img_emb", "text_emb"), (5, 8, 4)  # what `write` makes: rows of each shard


# Order and splits

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 10, 97, 100, 101, 1000, 4096, 99_999])
def test_a_permutation_takes_every_number_once_in_an_order_of_its_key(n):
    table = data.Permutation(n, 0, 1)(np.arange(n))
    assert table.dtype == np.int64
    np.testing.assert_array_equal(np.sort(table), np.arange(n))
    np.testing.assert_array_equal(data.Permutation(n, 0, 1)(np.arange(n)), table)
    scattered = np.random.default_rng(0).integers(0, n, 500)  # in any order, repeated
    np.testing.assert_array_equal(data.Permutation(n, 0, 1)(scattered), table[scattered])
    if n > 50:
        others = [data.Permutation(n, *key)(np.arange(n)) for key in ((0, 2), (1, 1), (1,), ("0", 1))]
        assert all((other == table).mean() < 5 / n + 0.05 for other in others)


def test_every_place_of_a_permutation_is_as_likely_as_any_other():
    n, keys = 10, 4000
    tables = np.stack([data.Permutation(n, key)(np.arange(n)) for key in range(keys)])  # (keys, n)
    for place in range(n):
        counts = np.bincount(tables[:, place], minlength=n)
        chi_square = ((counts - keys / n) ** 2 / (keys / n)).sum()
        assert chi_square < 40  # 9 degrees of freedom: 1 in 100,000
    pairs = np.bincount(tables[:, 0] * n + tables[:, 1], minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
    assert ((pairs - keys / 90) ** 2 / (keys / 90)).sum() < 160  # 89 degrees of freedom


def test_a_permutation_is_spread_like_a_random_one():
    n = 100_000
    table = data.Permutation(n, 3)(np.arange(n))
    assert (table == np.arange(n)).sum() <= 6  # fixed points: one on average
    assert abs(np.corrcoef(table, np.arange(n))[0, 1]) < 0.015
    assert abs(np.corrcoef(table[1:], table[:-1])[0, 1]) < 0.015
    assert np.abs(np.bincount(table[:1000] * 10 // n, minlength=10) - 100).max() < 45  # of its first hundredth
    assert abs((np.abs(np.diff(table)) / n).mean() - 1 / 3) < 0.01
    assert (np.diff(table) == table[1] - table[0]).sum() <= 6  # no steps that repeat


def test_two_billion_rows_are_shuffled_and_split_without_memory_that_grows():
    places = np.random.default_rng(0).choice(HUGE, 20_000, replace=False)
    tracemalloc.start()
    rows = data.Permutation(HUGE, 0, 0)(places)
    split = data.Split(HUGE, "train", 0.01, 0.01)
    chosen = split[data.shuffled(places % len(split), len(split), 7)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # a few arrays of 20,000 numbers
    assert len(np.unique(rows)) == len(np.unique(chosen)) == 20_000
    assert rows.min() >= 0 and chosen.min() >= 0 and 0.99 * HUGE < rows.max() < HUGE and chosen.max() < HUGE
    assert len(split) == HUGE * 98 // 100


@pytest.mark.parametrize("n", [1, 7, 50])
def test_each_pass_over_the_data_takes_every_row_once_in_a_new_order(n):
    places = data.shuffled(np.arange(4 * n), n, 5).reshape(4, n)
    np.testing.assert_array_equal(np.sort(places), np.tile(np.arange(n), (4, 1)))
    assert len({tuple(epoch) for epoch in places}) == (4 if n > 4 else 1)
    some = np.random.default_rng(0).permutation(4 * n)[:2 * n]
    np.testing.assert_array_equal(data.shuffled(some, n, 5), places.ravel()[some])
    if n > 4:
        assert not np.array_equal(data.shuffled(np.arange(n), n, 6), places[0])


def parts(rows, validation=0.05, test=0.02):
    splits = [data.Split(rows, part, validation, test) for part in ("train", "validation", "test")]
    return [split[np.arange(len(split))] for split in splits]


@pytest.mark.parametrize("rows", [0, 1, 2, 19, 999, 1000, 1001, 2500, 12_345])
@pytest.mark.parametrize("validation, test", [(0.05, 0.02), (0.0, 0.0), (0.5, 0.5), (0.001, 0.1)])
def test_the_three_parts_hold_every_row_once_in_their_shares(rows, validation, test):
    found = parts(rows, validation, test)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(rows))
    for part, share in zip(found, (1 - validation - test, validation, test)):
        assert abs(len(part) - share * rows) <= share * 1000  # exact but for the last, incomplete block
        if rows % 1000 == 0:
            assert len(part) == round(share * rows)


def test_rows_keep_their_part_when_the_data_grows():
    for small, large in itertools.pairwise([150, 999, 1000, 1730, 5000]):
        for before, after in zip(parts(small), parts(large)):
            np.testing.assert_array_equal(np.sort(before), np.sort(after[after < small]))


def test_a_split_read_at_random_is_the_split_read_in_order_and_is_no_stripe():
    split = data.Split(10_500, "validation", 0.05, 0.02)
    table = split[np.arange(len(split))]
    index = np.random.default_rng(0).integers(0, len(split), 300)
    np.testing.assert_array_equal(split[index], table[index])
    blocks = [set(table[table // 1000 == block] % 1000) for block in range(10)]
    assert len(set.intersection(*blocks)) == 0  # not the same rows of each block
    assert 2 < np.abs(np.diff(np.sort(table))).std() < 100


def test_samples_with_names_are_parted_by_name_alone_in_their_shares():
    names = [f"speaker {i}" for i in range(20_000)]
    found = [data.part_of(name, 0.1, 0.05) for name in names]
    for part, share in (("validation", 0.1), ("test", 0.05), ("train", 0.85)):
        assert abs(found.count(part) / len(names) - share) < 0.01
    assert [data.part_of(name, 0.1, 0.05) for name in names[::-1]] == found[::-1]
    assert {data.part_of(name, 0.0, 0.0) for name in names} == {"train"}


# Embeddings

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


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("pad", [0, 4])
def test_rows_read_in_any_order_are_those_of_the_shards_in_order_of_their_numbers(dtype, pad, tmp_path):
    sizes = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)  # more than ten: 10 comes after 9, not after 1
    images, texts = write(tmp_path, sizes, dtype=dtype, pad=pad)
    source = data.Embeddings(tmp_path, captions=True)
    assert (len(source), source.width) == (44, 6)
    rows = np.random.default_rng(1).permutation(44)
    batch, good = source.fetch(rows)
    assert good.all() and batch["image_embed"].dtype == torch.float32
    np.testing.assert_array_equal(batch["image_embed"], images[rows])
    np.testing.assert_array_equal(batch["text_embed"], texts[rows])
    assert batch["caption"] == [f"row {row} ü" for row in rows]
    assert source.name(0) == f"img_emb_{0:0{pad}d}.npy row 0" and source.name(43) == f"img_emb_{10:0{pad}d}.npy row 4"


def test_written_shards_read_back(tmp_path):
    generator = np.random.default_rng(0)
    images, texts = generator.standard_normal((2, 23, 4)).astype(np.float16)
    encodings = generator.standard_normal((23, 3, 5)).astype(np.float16)
    records = [{"caption": f"größe {i}", "attributes": {"color": "red", "n": i}} for i in range(23)]
    data.write_shards(tmp_path, images, torch.from_numpy(texts), records, encodings, rows_per_shard=10)
    source = data.Embeddings(tmp_path, text_encodings=True, captions=True)
    assert source.sizes.tolist() == [10, 10, 3]
    batch, good = source.fetch(np.arange(23))
    assert good.all() and source.captions.records(range(23)) == records
    for name, table in (("image_embed", images), ("text_embed", texts), ("text_enc", encodings)):
        np.testing.assert_array_equal(batch[name], table.astype(np.float32))


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
    assert prints[0] == prints[1] and prints[0] not in prints[2:]
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
    split = data.Split(len(source), "train", 0.001, 0.001)
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
        data.Embeddings(tmp_path).check_rows(200)


# The stream of batches

def stream(folder, world_size, first_step, steps=7, batch_size=10, chunk_size=3, workers=0):
    """Row numbers and image embeddings of each step, put together from all ranks."""
    source = data.Embeddings(folder)
    chunks = data.Chunks(source, data.Split(len(source), "train", 0.1, 0.1), seed=4)
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
        epoch, place = divmod(position, len(split))
        place = data.Permutation(len(split), seed, epoch)(place)[0]
        while split[[place]][0] in unusable:
            place = (place + 1) % len(split)
        order.append(split[[place]][0])
    return order


def spoil(folder):
    """Make three rows of the training part unusable, one way each; returns their names."""
    assert all((data.Split(75, "train", 0.1, 0.1)[np.arange(60)] == row).any() for row in (4, 26, 67))
    for name, row, value in (("img_emb_0.npy", 4, np.nan), ("img_emb_1.npy", 6, 0.0), ("text_emb_2.npy", 17, np.inf)):
        path = folder / name.rpartition("_")[0] / name
        table = np.load(path)
        table[row] = value
        np.save(path, table)
    return ["img_emb_0.npy row 4", "img_emb_1.npy row 6", "img_emb_2.npy row 17"]


@pytest.mark.parametrize("bad", [False, True])
def test_samples_come_in_one_order_on_any_number_of_ranks_and_from_any_step_on(bad, tmp_path):
    images, _ = write(tmp_path, (20, 30, 25))
    names = spoil(tmp_path) if bad else []
    whole = stream(tmp_path, 1, 0, steps=20)
    np.testing.assert_array_equal(whole[1], images[whole[0]])
    assert set(whole[2]) == set(names)
    split = data.Split(75, "train", 0.1, 0.1)
    assert whole[0].ravel().tolist() == slow_order(split, {4, 26, 67} if bad else {}, 4, range(200))
    assert len(np.unique(whole[0])) == len(data.Split(75, "train", 0.1, 0.1)) - len(names)
    for world_size, first in itertools.product((1, 2, 3), (0, 6, 13)):
        rows, embeds, _ = stream(tmp_path, world_size, first)
        np.testing.assert_array_equal(rows, whole[0][first:first + 7])
        np.testing.assert_array_equal(embeds, whole[1][first:first + 7])


def test_workers_give_the_same_batches_in_the_same_order(tmp_path):
    write(tmp_path, (20, 30, 25))
    spoil(tmp_path)
    for alone, helped in zip(stream(tmp_path, 1, 3, workers=0), stream(tmp_path, 1, 3, workers=2)):
        np.testing.assert_array_equal(alone, helped)


def test_a_pass_for_evaluation_reads_each_row_of_its_part_once(tmp_path):
    write(tmp_path, (500, 700))
    source = data.Embeddings(tmp_path, captions=True)
    split = data.Split(len(source), "validation", 0.1, 0.1)
    spans = [(start, min(start + 16, len(split))) for start in range(0, len(split), 16)]
    batches = list(data.loader(data.Chunks(source, split), spans))
    assert torch.cat([batch["rows"] for batch in batches]).tolist() == split[np.arange(len(split))].tolist()
    assert all(batch["caption"] == [f"row {row} ü" for row in batch["rows"]] for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_with_nothing_usable_ends_in_one_message_and_no_endless_search(workers, tmp_path):
    write(tmp_path, (40, 40))
    np.save(tmp_path / "img_emb" / "img_emb_1.npy", np.zeros((40, 6), np.float16))
    np.save(tmp_path / "img_emb" / "img_emb_0.npy", np.full((40, 6), np.nan, np.float16))
    source = data.Embeddings(tmp_path)
    batches = data.loader(data.Chunks(source, data.Split(80, "train", 0.1, 0.1), 0), [(0, 8)], workers)
    with pytest.raises(UserError, match=r"^more than \d+ unusable rows .*img_emb_[01]\.npy row") as caught:
        next(batches)
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad, refused", [(0, False), (4, False), (5, True)])
def test_more_than_one_unusable_row_in_a_hundred_is_refused_and_fewer_are_named(bad, refused, tmp_path):
    write(tmp_path, (200, 250))
    for name in FOLDERS:
        path = tmp_path / name / f"{name}_1.npy"
        table = np.load(path)
        table[10:10 + bad] = 0
        np.save(path, table)
    source = data.Embeddings(tmp_path)
    if refused:
        with pytest.raises(UserError, match=r"5 of 450 rows .*more than 1 in 100: img_emb_1\.npy row 10, "):
            source.check_rows()
    else:
        assert source.check_rows() == (bad, 450, [f"img_emb_1.npy row {row}" for row in range(10, 10 + bad)])


def test_tensors_and_arrays_go_to_the_device_and_the_rest_stays():
    batch = {"a": np.arange(3), "b": torch.ones(2), "caption": ["x"], "n": 3}
    moved = data.to_device(batch, torch.device("meta"))
    assert moved["a"].device.type == moved["b"].device.type == "meta"
    assert moved["caption"] is batch["caption"] and moved["n"] == 3 and isinstance(batch["a"], np.ndarray)


# Faults in embeddings

def replace(name, value):
    return lambda folder: np.save(folder / name, value, allow_pickle=True)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def empty(name):
    def work(folder):
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
    return work


def damaged(name, data_):
    return lambda folder: (folder / name).write_bytes(data_)


@pytest.mark.parametrize("work, message", [
    (shutil.rmtree, "data: no such folder; expected one with img_emb/ and text_emb/"),
    (lambda f: shutil.rmtree(f / "text_emb"), "text_emb: no such folder; expected text_emb_N.npy"),
    (empty("img_emb"), "img_emb: empty; expected img_emb_N.npy"),
    (lambda f: (f / "text_emb/text_emb_1.npy").unlink(), "img_emb_1.npy: shard 1 has no counterpart in .*text_emb"),
    (lambda f: (f / "img_emb/img_emb_2.npy").unlink(), "text_emb_2.npy: shard 2 has no counterpart in .*img_emb"),
    (replace("text_emb/text_emb_1.npy", np.ones((7, 6), np.float16)), "text_emb_1.npy: 7 rows, but 8 in the image"),
    (replace("img_emb/img_emb_1.npy", np.ones((8, 5), np.float16)),
     r"img_emb_1.npy: rows of shape \(5,\), but \(6,\) in img_emb_0.npy"),
    (lambda f: [np.save(f / f"text_emb/text_emb_{i}.npy", np.ones((n, 5), np.float16)) for i, n in enumerate(SIZES)],
     "img_emb is 6 wide and text_emb 5"),
    (replace("img_emb/img_emb_0.npy", np.array([[1, "a"]] * 5, object)), "img_emb_0.npy: not a readable .npy array"),
    (replace("img_emb/img_emb_0.npy", np.ones((5, 6), np.int64)),
     r"img_emb_0.npy: int64 of shape \(5, 6\); expected float16 or float32 of shape \(rows, width\)"),
    (replace("img_emb/img_emb_0.npy", np.ones((5, 6))), "img_emb_0.npy: float64 of shape"),
    (replace("img_emb/img_emb_0.npy", np.ones((5, 1, 6), np.float16)), r"float16 of shape \(5, 1, 6\); expected"),
    (lambda f: [np.save(f / f"img_emb/img_emb_{i}.npy", np.ones((0, 6), np.float16)) for i in range(3)],
     "text_emb_0.npy: 5 rows, but 0"),
    (lambda f: [np.save(f / n / f"{n}_{i}.npy", np.ones((0, 6), np.float16)) for i in range(3) for n in FOLDERS],
     "img_emb: no rows in any of its 3 shard"),
    (cut("img_emb/img_emb_1.npy", 150), "img_emb_1.npy: not a readable .npy array"),
    (cut("img_emb/img_emb_1.npy", 0), "img_emb_1.npy: not a readable .npy array"),
    (damaged("img_emb/img_emb_1.npy", b"hello"), "img_emb_1.npy: not a readable .npy array"),
    (damaged("img_emb/img_emb_1.npy", b"PK\x03\x04hello"), "img_emb_1.npy: not a readable .npy array"),
    (damaged("img_emb/img_emb_1.npy", b"\x93NUMPY\x01\x00\x06\x00{'a':("), "img_emb_1.npy: not a readable .npy array"),
    (damaged("img_emb/img_emb.npy", b""), "img_emb.npy: no shard number at the end of its name; expected img_emb_N"),
    (lambda f: shutil.copy(f / "img_emb/img_emb_1.npy", f / "img_emb/img_emb_01.npy"),
     "img_emb_1.npy: the same shard number as img_emb_01.npy"),
    (lambda f: shutil.rmtree(f / "captions"), "data: no captions for shard 0; expected captions/captions_N.jsonl"),
    (lambda f: (f / "captions/captions_2.jsonl").unlink(), "data: no captions for shard 2"),
])
def test_a_fault_of_the_shards_is_found_at_the_start_and_named(work, message, tmp_path):
    folder = tmp_path / "data"
    write(folder)
    data.Embeddings(folder, captions=True)  # before the fault
    work(folder)
    with pytest.raises(UserError, match=message):
        data.Embeddings(folder, captions=True)


def test_encodings_that_do_not_match_are_named(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="text_enc: no such folder"):
        data.Embeddings(tmp_path, text_encodings=True)
    (tmp_path / "text_enc").mkdir()
    for number, (rows, length) in enumerate(((5, 3), (8, 3), (4, 2))):
        np.save(tmp_path / "text_enc" / f"text_enc_{number}.npy", np.ones((rows, length, 2), np.float16))
    with pytest.raises(UserError, match=r"text_enc_2.npy: rows of shape \(2, 2\), but \(3, 2\) in text_enc_0.npy"):
        data.Embeddings(tmp_path, text_encodings=True)


@pytest.mark.parametrize("line, message", [
    ("hello", "captions_1.jsonl line 4: expected a JSON object with an entry 'caption'"),
    ("[1]", "captions_1.jsonl line 4: expected"), ('{"text": "a"}', "captions_1.jsonl line 4: expected"),
    (None, "captions_1.jsonl: 7 captions, but 8 rows"),
    ('{"caption": "a"}\n{"caption": "b"}', "captions_1.jsonl: 9 captions, but 8 rows"),
])
def test_a_fault_of_a_caption_is_named_by_file_and_line(line, message, tmp_path):
    write(tmp_path)
    path = tmp_path / "captions" / "captions_1.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3:4] = [line] if line else []
    path.write_text("\n".join(lines), encoding="utf-8")
    source = data.Embeddings(tmp_path, captions=True)
    with pytest.raises(UserError, match=message):
        source.fetch(np.array([2, 8]))


def test_a_caption_of_null_is_no_caption(tmp_path):
    write(tmp_path, (2,))
    (tmp_path / "captions" / "captions_0.jsonl").write_text('{"caption": null, "n": 1}\n{"caption": 7}')
    records = data.Embeddings(tmp_path, captions=True).captions.records([1, 0])
    assert records == [{"caption": "7"}, {"caption": "", "n": 1}]


def test_captions_in_parquet_read_at_random(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    write(tmp_path, captions=False)
    (tmp_path / "metadata").mkdir()
    captions = [None if row == 6 else f"row {row} ü" for row in range(17)]
    for number, (start, end) in enumerate(((0, 5), (5, 13), (13, 17))):
        parquet.write_table(pyarrow.table({"key": list(range(start, end)), "caption": captions[start:end]}),
                            tmp_path / "metadata" / f"metadata_{number:03d}.parquet")
    source, rows = data.Embeddings(tmp_path, captions=True), np.array([16, 0, 6, 12, 5])
    assert source.fetch(rows)[0]["caption"] == [captions[row] or "" for row in rows]
    path = tmp_path / "metadata" / "metadata_001.parquet"
    for table, message in ((pyarrow.table({"text": ["a"] * 8}), "no column 'caption' among text"),
                           (pyarrow.table({"caption": ["a"] * 7}), "7 captions, but 8 rows"),
                           (None, "not a readable parquet file")):
        path.write_bytes(b"hello") if table is None else parquet.write_table(table, path)
        with pytest.raises(UserError, match=f"metadata_001.parquet: {message}"):
            data.Embeddings(tmp_path, captions=True).fetch(np.array([5]))


def test_shards_written_anew_do_not_mix_with_those_that_were_there(tmp_path):
    rng = np.random.default_rng(0)
    for rows, encodings in ((300, rng.standard_normal((300, 2, 3))), (100, None)):
        values = rng.standard_normal((rows, 4))
        data.write_shards(tmp_path, values, values, [{"caption": str(k)} for k in range(rows)], encodings, 100)
    source = data.Embeddings(tmp_path, captions=True)
    assert len(source) == 100 and not list((tmp_path / "text_enc").iterdir())
    np.testing.assert_allclose(source.fetch(np.arange(100))[0]["image_embed"], values, rtol=1e-2, atol=1e-3)
