"""Order and splits: every number once, in the fractions given, in little memory."""
import hashlib
import tracemalloc

import numpy as np
import pytest

from common import order

HUGE = 2 * 10**9
SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize("n", [1, 2, 7, 100, 101, 99_999])
def test_a_permutation_has_every_number_once_in_any_order_of_reading(n):
    table = order.permute(np.arange(n), n, 0, 1)
    assert table.dtype == np.int64
    np.testing.assert_array_equal(np.sort(table), np.arange(n))
    np.testing.assert_array_equal(order.permute(np.arange(n)[::-2], n, 0, 1), table[::-2])


@pytest.mark.parametrize("key", [(0, 2), (1, 1), (1,), ("0", 1)])
def test_permutations_of_two_keys_agree_no_more_than_by_chance(key):
    n = 1000
    table = order.permute(np.arange(n), n, 0, 1)
    other = order.permute(np.arange(n), n, *key)
    assert (table == other).mean() < 0.01


def chi_square(values, bins):
    counts = np.bincount(values)
    counts = counts[counts > 0]
    assert len(counts) == bins
    expected = len(values) / bins
    return ((counts - expected) ** 2 / expected).sum()


def test_every_place_of_a_permutation_is_as_likely_as_any_other():
    tables = np.stack([order.permute(np.arange(10), 10, key) for key in range(4000)])
    for places in tables.T:
        assert chi_square(places, 10) < 40  # 9 degrees of freedom: 1 in 100,000
    pairs = tables[:, 0] * 10 + tables[:, 1]
    assert chi_square(pairs, 90) < 160  # 89 degrees of freedom


def test_a_random_word_is_splitmix64_of_the_number_and_a_hash_of_the_key():
    digest = hashlib.blake2b(repr(("key", 7)).encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little")
    words = order.random_words(np.arange(50), "key", 7).tolist()
    for number, word in enumerate(words):
        x = start + number * 0x9E3779B97F4A7C15
        x %= 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
        x %= 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB
        x %= 2**64
        assert word == x ^ x >> 31


def test_uniform_numbers_fill_the_unit_interval_and_are_independent():
    words = order.random_words(np.arange(20_000), 3)
    table = order.uniform(words, 3)
    assert table.min() >= 0
    assert table.max() < 1
    for column in table.T:
        tenths = np.bincount((column * 10).astype(int))
        assert np.abs(tenths - 2000).max() < 200
    columns = [*table[1:].T, table[:-1, 0]]  # the last: the sample before
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < 0.03


def test_each_epoch_has_every_index_once_in_a_new_order():
    n = 50
    indices = order.shuffle(np.arange(4 * n), n, 5)
    epochs = indices.reshape(4, n)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(n), (4, 1)))
    other_seed = order.shuffle(np.arange(n), n, 6)
    assert len(np.unique([*epochs, other_seed], axis=0)) == 5
    some = np.random.default_rng(0).permutation(4 * n)[:2 * n]
    np.testing.assert_array_equal(order.shuffle(some, n, 5), indices[some])


def rows_of(n, validation=0.05, test=0.02, seed=0):
    splits = [order.split_indices(n, name, validation, test, seed) for name in SPLITS]
    return [split[np.arange(len(split))] for split in splits]


@pytest.mark.parametrize("n", [0, 1, 19, 12_345])
@pytest.mark.parametrize("validation, test", [
    (0.05, 0.02),
    (0.0, 0.0),
    (0.5, 0.5),
    (0.0004, 1 / 3),
    (0.123456789, 0.0),
    (0.0, 0.7),
])
def test_the_splits_have_every_row_once_in_the_fractions_given(n, validation, test):
    splits = rows_of(n, validation, test)
    np.testing.assert_array_equal(np.sort(np.concatenate(splits)), np.arange(n))
    for rows, fraction in zip(splits, (1 - validation - test, validation, test)):
        assert abs(len(rows) - fraction * n) < 2
        assert fraction or not len(rows)


@pytest.mark.parametrize("small, large", [(0, 150), (150, 151), (151, 999), (1730, 5000)])
def test_rows_keep_their_split_when_the_data_grows(small, large):
    for before, after in zip(rows_of(small), rows_of(large)):
        np.testing.assert_array_equal(np.sort(before), np.sort(after[after < small]))


def test_another_seed_holds_out_other_rows():
    seeds = [rows_of(10_000, 0.1, 0.1, seed) for seed in (3, 4)]
    for rows, other_rows in list(zip(*seeds))[1:]:
        common = np.isin(rows, other_rows).mean()
        assert abs(common - 0.1) < 0.04  # by chance


def test_held_out_rows_are_spread_evenly_but_without_a_pattern():
    held_out = np.sort(np.concatenate(rows_of(10_500)[1:]))
    gaps = np.diff(held_out)
    assert gaps.max() <= 2 / 0.07
    assert gaps.std() > 4
    remainders = np.bincount(held_out % 14)
    assert remainders.min() > 30


def test_of_two_billion_rows_only_the_held_out_ones_take_memory():
    tracemalloc.start()
    split = order.split_indices(HUGE, "train", 1e-5, 1.5e-6)
    positions = np.random.default_rng(0).choice(len(split), 20_000, replace=False)
    rows = split[order.shuffle(positions, len(split), 7)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # a few arrays of 20,000 numbers
    assert len(split) == HUGE - 23_000
    assert len(np.unique(rows)) == 20_000
    assert rows.min() >= 0
    assert 0.99 * HUGE < rows.max() < HUGE


@pytest.mark.parametrize("name, fraction", [("validation", 0.1), ("test", 0.05), ("train", 0.85)])
def test_keys_are_split_by_their_hash_and_seed_in_the_fractions_given(name, fraction):
    keys = [f"speaker {i}" for i in range(20_000)]
    first, second = [order.split_keys(keys, name, 0.1, 0.05, seed) for seed in (0, 1)]
    assert abs(len(first) / len(keys) - fraction) < 0.01
    both = np.intersect1d(first, second)
    assert abs(len(both) / len(keys) - fraction**2) < 0.01  # by chance


SPLITS = ("train", "validation", "test")


def test_the_split_of_a_key_does_not_depend_on_the_other_keys():
    keys = [f"{i}.png" for i in range(1000)]
    for name in SPLITS:
        found = order.split_keys(keys, name, 0.2, 0.2)
        half = order.split_keys(keys[500:], name, 0.2, 0.2)
        assert half.tolist() == [i - 500 for i in found if i >= 500]


@pytest.mark.parametrize("seed", range(20))
def test_few_keys_have_one_held_out_for_each_purpose_and_keep_the_samples_of_a_key_together(seed):
    keys = [f"speaker {i // 2}" for i in range(20)]
    splits = [order.split_keys(keys, name, 0.01, 0.02, seed).tolist() for name in SPLITS]
    assert sorted([*splits[0], *splits[1], *splits[2]]) == [*range(20)]
    for split in splits:
        assert split
        assert {keys.count(keys[i]) for i in split} == {2}
        assert len({keys[i] for i in split}) == len(split) / 2


def test_nothing_is_held_out_by_a_fraction_of_zero():
    assert order.split_keys(["a", "b"], "train", 0.0, 0.0).tolist() == [0, 1]


def test_a_key_may_be_a_file_name_that_is_not_valid_utf_8():
    assert order.split_keys(["\udcff.png"], "train", 0.0, 0.0).tolist() == [0]
