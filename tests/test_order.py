"""Order and splits are pure functions of data and seed, and need little memory."""
import hashlib
import itertools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import Words
from numpy.testing import assert_array_equal

from common import accumulate, order
from common.config import UserError

HUGE = 2 * 10**9


@pytest.mark.parametrize("n", [1, 2, 7, 100, 101, 99_999])
def test_a_permutation_has_every_number_once_in_any_order_of_reading(n):
    table = order.permute(np.arange(n), n, 0, 1)
    assert table.dtype == np.int64
    assert_array_equal(np.sort(table), np.arange(n))
    assert_array_equal(order.permute(np.arange(n)[::-2], n, 0, 1), table[::-2])


def chi_square(values):
    """The chi-squared statistic of numbers below 10, for a uniform distribution."""
    counts = np.bincount(values, minlength=10)
    expected = len(values) / 10
    squares = (counts - expected) ** 2
    return (squares / expected).sum()


def test_every_place_of_a_permutation_is_as_likely_as_any_other():
    tables = np.stack([order.permute(np.arange(10), 10, key) for key in range(4000)])
    for places in tables.T:
        assert chi_square(places) < 40  # p < 1e-5 for 9 degrees of freedom


def test_random_bits_are_splitmix64_of_the_number_and_a_hash_of_the_key():
    digest = hashlib.blake2b(repr(("key", 7)).encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little")
    for number, bits in enumerate(order.random_bits(np.arange(50), "key", 7).tolist()):
        x = (start + number * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        assert bits == x ^ x >> 31


def test_uniform_numbers_fill_the_unit_interval_in_every_column():
    words = order.random_bits(np.arange(20_000), 3)
    for column in order.uniform(words, 20_000, [0.5] * 3).T:
        assert chi_square((column * 10).astype(int)) < 40


def test_each_epoch_has_every_index_once_in_a_new_order():
    n = 50
    indices = order.shuffle(np.arange(4 * n), n, 5)
    epochs = indices.reshape(4, n)
    assert_array_equal(np.sort(epochs), np.tile(np.arange(n), (4, 1)))
    other_seed = order.shuffle(np.arange(n), n, 6)
    assert len(np.unique([*epochs, other_seed], axis=0)) == 5
    some = np.random.default_rng(0).permutation(4 * n)[:2 * n]
    assert_array_equal(order.shuffle(some, n, 5), indices[some])


@pytest.mark.parametrize("count, limit", [
    (1, 5),
    (7, 7),
    (7, 3),
    (100, 9),
    (10**12, 1000),
])
def test_evenly_spaced_numbers_begin_at_the_first_and_end_at_the_last(count, limit):
    numbers = order.evenly_spaced(count, limit)
    assert (len(numbers), numbers[0], numbers[-1]) == (min(count, limit), 0, count - 1)
    steps = np.diff(numbers)
    assert not len(steps) or steps.max() - steps.min() <= 1
    indices = order.some_of(np.arange(count) * 3, limit) if count < 200 else 3 * numbers
    assert_array_equal(indices, 3 * numbers)
    if count < 200:
        assert_array_equal(order.some_of(np.arange(count), 0), np.arange(count))


def test_spans_are_those_of_the_ranks_chunks_in_each_batch_from_the_step_on():
    plan = [accumulate.Chunk(1, 3, 3, 0.3), accumulate.Chunk(3, 9, 1, 0.1)]
    spans = itertools.islice(order.training_spans(plan, 10, 7), 5)
    assert [*spans] == [(73, 76), (79, 80), (83, 86), (89, 90), (93, 96)]


@pytest.mark.parametrize("n, count, total", [(10, 1, 5), (200, 7, 100), (3, 2, 3), (9, 0, 4)])
def test_a_stratified_choice_has_one_number_in_each_interval_and_each_as_often(n, count, total):
    frequencies = np.zeros(n)
    for seed in range(300):
        picks = order.stratified(n, count, total, seed)
        bounds = np.arange(n * count // total + 1) * total // max(1, count)
        assert_array_equal(np.searchsorted(bounds, picks, side="right"), range(1, len(bounds)))
        frequencies[picks] += 1
    sizes = np.diff(bounds)  # of the intervals
    assert frequencies[:bounds[-1]] == pytest.approx(300 / np.repeat(sizes, sizes), abs=60)


# Splits

def rows_of(n, validation=0.05, test=0.02):
    """Rows of validation, test and train."""
    splits = [order.split_indices(n, name, validation, test) for name in order.SPLITS]
    return [split[np.arange(len(split))] for split in splits]


@pytest.mark.parametrize("n", [0, 1, 19, 12_345])
@pytest.mark.parametrize("validation, test", [
    (0.05, 0.02),
    (0.0, 0.0),
    (0.5, 0.5),
    (0.0, 1 / 3),
])
def test_the_splits_have_every_row_once_in_the_fractions_given(n, validation, test):
    splits = rows_of(n, validation, test)
    assert_array_equal(np.sort(np.concatenate(splits)), np.arange(n))
    for rows, fraction in zip(splits, (validation, test, 1 - validation - test)):
        assert abs(len(rows) - fraction * n) < 2
        assert fraction or not len(rows)


@pytest.mark.parametrize("small, large", [
    (0, 150),
    (150, 151),
    (1730, 5000),
])
def test_rows_keep_their_split_when_the_data_grows(small, large):
    for before, after in zip(rows_of(small), rows_of(large)):
        assert_array_equal(np.sort(before), np.sort(after[after < small]))


def test_of_two_billion_rows_only_the_held_out_ones_take_memory():
    tracemalloc.start()
    split = order.split_indices(HUGE, "train", 1e-5, 1.5e-6)
    positions = np.random.default_rng(0).choice(len(split), 20_000, replace=False)
    rows = split[order.shuffle(positions, len(split), 7)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # about 30 int64 arrays of 20,000 numbers
    assert len(split) == HUGE - 23_000
    assert len(np.unique(rows)) == 20_000
    assert 0.99 * HUGE < rows.max() < HUGE


@pytest.mark.parametrize("name, fraction", [
    ("validation", 0.1),
    ("test", 0.05),
    ("train", 0.85),
])
def test_the_hash_of_a_key_and_the_seed_alone_split_in_the_fractions_given(name, fraction):
    keys = [f"speaker {i}" for i in range(20_000)]
    first = order.split_keys(keys, name, 0.1, 0.05, seed=0)
    second = order.split_keys(keys, name, 0.1, 0.05, seed=1)
    both = np.intersect1d(first, second)  # the overlap is by chance
    assert len(first) == pytest.approx(2e4 * fraction, abs=200)
    assert len(both) == pytest.approx(2e4 * fraction**2, abs=200)
    half = order.split_keys(keys[10_000:], name, 0.1, 0.05)
    assert half.tolist() == [i - 10_000 for i in first if i >= 10_000]


@pytest.mark.parametrize("seed", range(5))
def test_few_keys_have_one_held_out_for_each_purpose_and_keep_the_samples_of_a_key_together(seed):
    keys = [f"speaker {i // 2}" for i in range(20)]
    splits = [order.split_keys(keys, name, 0.01, 0.02, seed).tolist() for name in order.SPLITS]
    assert sorted(itertools.chain(*splits)) == list(range(20))
    for split in splits:
        assert split
        assert {i ^ 1 for i in split} == set(split)  # both samples of each key


def test_nothing_is_held_out_by_a_fraction_of_zero_and_a_key_need_not_be_utf_8():
    assert order.split_keys(["a", "\udcff.png"], "train", 0.0, 0.0).tolist() == [0, 1]


def test_the_last_key_stays_for_training_and_two_have_one_held_out_for_the_test():
    def splits(keys, validation, test):
        return [order.split_keys(keys, name, validation, test).tolist() for name in order.SPLITS]

    assert splits(["a", "a"], 1e-9, 1e-9) == [[], [], [0, 1]]
    assert sorted(map(len, splits(["a", "b"], 0.0, 1e-9))) == [0, 1, 1]
    validation, test, train = splits(["a", "b"], 1e-9, 1e-9)
    assert (len(validation), len(test), len(train)) == (1, 0, 1)


def test_of_few_keys_those_with_the_smallest_hashes_are_held_out():
    keys = [f"speaker {i}" for i in range(20)]
    hashes = [order.hash_of(f"0 {key}".encode()) for key in keys]
    first, second, *others = np.argsort(hashes)
    found = [order.split_keys(keys, name, 1e-9, 1e-9).tolist() for name in order.SPLITS]
    assert found == [[first], [second], sorted(others)]


# Splits of a dataset

def make_splits(val_dataset=None, **settings):
    """{split: (number of rows in its dataset, its rows)} for a dataset of 400 rows."""
    values = {"data": "a", "validation": 0.2, "test": 0.1, "split_seed": 3, "batch_size": 280}
    cfg = SimpleNamespace(**values | settings)
    found = {}
    for name, (dataset, indices) in order.splits(Words(400), cfg, val_dataset).items():
        found[name] = len(dataset), indices[np.arange(len(indices))].tolist()
    return found


def test_with_a_validation_set_all_of_it_is_validated_on_and_nothing_held_out_for_it():
    sizes = {name: len(rows) for name, (_, rows) in make_splits().items()}
    assert sizes == {"train": 280, "validation": 80, "test": 40}
    found = make_splits(Words(60))
    assert found["validation"] == (60, list(range(60)))
    (_, train), (_, test) = found["train"], found["test"]
    assert sorted(train + test) == list(range(400))
    assert len(train) == 360


@pytest.mark.parametrize("change, message", [
    ({"batch_size": 281}, "a: 280 samples for train, expected at least 281; .* --batch_size"),
    ({"validation": 0.0}, "a: 0 samples for validation, expected at least 1; .* --validation"),
])
def test_a_split_with_too_few_rows_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        make_splits(**change)
