"""Order and splits: every number once, in shares as given, and no memory that grows with the data."""
import hashlib
import itertools
import tracemalloc

import numpy as np
import pytest

from common import order

HUGE = 2 * 10 ** 9
PARTS = ("train", "validation", "test")


@pytest.mark.parametrize("n", [1, 2, 3, 7, 97, 100, 101, 99_999])
def test_a_permutation_takes_every_number_once_in_an_order_of_its_key(n):
    table = order.permuted(np.arange(n), n, 0, 1)
    assert table.dtype == np.int64
    np.testing.assert_array_equal(np.sort(table), np.arange(n))
    np.testing.assert_array_equal(order.permuted(np.arange(n), n, 0, 1), table)
    scattered = np.random.default_rng(0).integers(0, n, 500)  # in any order, repeated
    np.testing.assert_array_equal(order.permuted(scattered, n, 0, 1), table[scattered])
    if n > 50:
        others = [order.permuted(np.arange(n), n, *key) for key in ((0, 2), (1, 1), (1,), ("0", 1))]
        assert all((other == table).mean() < 5 / n + 0.05 for other in others)


def test_every_place_of_a_permutation_is_as_likely_as_any_other():
    n, keys = 10, 4000
    tables = np.stack([order.permuted(np.arange(n), n, key) for key in range(keys)])  # (keys, n)
    for place in range(n):
        counts = np.bincount(tables[:, place], minlength=n)
        assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 40  # chi-square, 9 degrees of freedom: 1 in 100,000
    pairs = np.bincount(tables[:, 0] * n + tables[:, 1], minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
    assert ((pairs - keys / 90) ** 2 / (keys / 90)).sum() < 160  # 89 degrees of freedom


def test_a_draw_is_splitmix64_of_the_number_and_a_hash_of_the_key():
    start = int.from_bytes(hashlib.blake2b(repr(("key", 7)).encode(), digest_size=8).digest(), "little")
    for number, found in enumerate(order.draws(np.arange(50), "key", 7).tolist()):
        x = (start + number * 0x9E3779B97F4A7C15) % 2 ** 64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2 ** 64
        assert found == x ^ x >> 31


def test_uniform_numbers_of_samples_fill_the_unit_interval_and_do_not_depend_on_each_other():
    table = order.uniform(order.draws(np.arange(20_000), 3), 3)
    assert table.shape == (20_000, 3) and table.min() >= 0 and table.max() < 1
    for column in table.T:
        assert np.abs(np.bincount((column * 10).astype(int)) - 2000).max() < 200
    assert np.abs(np.corrcoef(table.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(table[1:, 0], table[:-1, 0])[0, 1]) < 0.03
    np.testing.assert_array_equal(order.uniform(order.draws([5, 2], 3), 2), table[[5, 2], :2])
    assert not np.isin(order.draws(np.arange(1000), 4), order.draws(np.arange(1000), 3)).any()


@pytest.mark.parametrize("n", [1, 7, 50])
def test_each_pass_over_the_data_takes_every_row_once_in_a_new_order(n):
    places = order.shuffled(np.arange(4 * n), n, 5).reshape(4, n)
    np.testing.assert_array_equal(np.sort(places), np.tile(np.arange(n), (4, 1)))
    assert len({tuple(epoch) for epoch in places}) == (4 if n > 4 else 1)
    some = np.random.default_rng(0).permutation(4 * n)[:2 * n]
    np.testing.assert_array_equal(order.shuffled(some, n, 5), places.ravel()[some])
    if n > 4:
        assert not np.array_equal(order.shuffled(np.arange(n), n, 6), places[0])


def rows_of(rows, validation=0.05, test=0.02, seed=0):
    splits = [order.Split(rows, part, validation, test, seed) for part in PARTS]
    return [split[np.arange(len(split))] for split in splits]


@pytest.mark.parametrize("rows", [0, 1, 2, 19, 100, 999, 12_345])
@pytest.mark.parametrize("validation, test", [(0.05, 0.02), (0.0, 0.0), (0.5, 0.5), (0.0004, 1 / 3), (0.3, 0.0),
                                              (0.0, 0.3), (0.123456789, 0.7)])
def test_the_three_parts_hold_every_row_once_in_the_shares_given(rows, validation, test):
    found = rows_of(rows, validation, test)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(rows))
    for part, share in zip(found, (1 - validation - test, validation, test)):
        assert abs(len(part) - share * rows) < 2 and part.dtype == np.int64
        assert share or not len(part)


def test_rows_keep_their_part_when_the_data_grows():
    for small, large in itertools.pairwise([0, 150, 151, 999, 1730, 5000]):
        for before, after in zip(rows_of(small), rows_of(large)):
            np.testing.assert_array_equal(np.sort(before), np.sort(after[after < small]))


def test_another_seed_holds_out_other_rows_and_the_same_seed_the_same():
    first, again, other = (rows_of(10_000, 0.1, 0.1, seed) for seed in (3, 3, 4))
    for part in range(3):
        np.testing.assert_array_equal(first[part], again[part])
    for part in (1, 2):
        assert abs(np.isin(first[part], other[part]).mean() - 0.1) < 0.04  # as chance has it


def test_a_split_read_at_random_is_the_split_read_in_order_and_held_out_rows_are_spread_evenly_but_no_stripes():
    for part in PARTS:
        split = order.Split(10_500, part, 0.05, 0.02)
        index = np.random.default_rng(0).integers(0, len(split), 300)
        np.testing.assert_array_equal(split[index], split[np.arange(len(split))][index])
    held_out = np.sort(np.concatenate(rows_of(10_500)[1:]))
    assert np.diff(held_out).max() <= 2 / 0.07 and np.diff(held_out).std() > 4
    assert np.bincount(held_out % 14, minlength=14).min() > 30


def test_two_billion_rows_are_shuffled_and_split_without_memory_that_grows():
    tracemalloc.start()
    split = order.Split(HUGE, "train", 0.01, 0.01)
    rows = split[order.shuffled(np.random.default_rng(0).choice(len(split), 20_000, replace=False), len(split), 7)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # a few arrays of 20,000 numbers
    assert len(np.unique(rows)) == 20_000 and rows.min() >= 0 and 0.99 * HUGE < rows.max() < HUGE
    assert abs(len(split) - HUGE * 98 // 100) <= 1
    sizes = [len(order.Split(HUGE, part, 1.5e-6, 0.123456789)) for part in PARTS]  # shares are not rounded
    assert abs(sizes[1] - 3000) <= 2 and abs(sizes[2] - 246_913_578) <= 2 and sum(sizes) == HUGE


def test_samples_with_names_are_parted_by_name_and_seed_alone_in_their_shares():
    names = [f"speaker {i}" for i in range(20_000)]
    found = [order.part_of(name, 0.1, 0.05) for name in names]
    for part, share in (("validation", 0.1), ("test", 0.05), ("train", 0.85)):
        assert abs(found.count(part) / len(names) - share) < 0.01
    assert [order.part_of(name, 0.1, 0.05) for name in names[::-1]] == found[::-1]
    assert {order.part_of(name, 0.0, 0.0) for name in names} == {"train"}
    kept = [a == b == "validation" for a, b in zip(found, [order.part_of(name, 0.1, 0.05, seed=1) for name in names])]
    assert abs(sum(kept) / len(names) - 0.01) < 0.005
    assert order.part_of("\udcff.png", 0.5, 0.5) in PARTS  # as Python reads names that are no UTF-8
