"""The order of samples and their splits: pure functions of numbers and a seed, in O(1) memory."""
import hashlib
import math

import numpy as np


def draws(numbers, *key):
    """A hash (uint64) of each of the int `numbers` (n,) and the key, by splitmix64 (Steele et al. 2014)."""
    start = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), np.uint64)
    x = start + np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(numbers, count):
    """Random numbers in [0, 1), (n, count), of the `draws` (n,) of n samples."""
    return np.stack([(draws(numbers, i) >> np.uint64(11)) * 2.0 ** -53 for i in range(count)], axis=1)


def permuted(index, n, *key):
    """Entries at the int array `index` of a pseudo-random permutation of range(n) -> int64 array.

    A Feistel network over pairs (left, right) of range(a) × range(b), a·b >= n, with modular addition in place of
    exclusive-or, and cycle walking for the few numbers beyond n (Black & Rogaway 2002, §4 and §5).
    """
    a = np.uint64(math.isqrt(n - 1) + 1)
    b = np.uint64(-(-n // int(a)))

    def network(x):
        left, right = x % a, x // a
        for i in range(3):
            left = (left + draws(right, i, *key) % a) % a
            right = (right + draws(left, i, *key) % b) % b
        return left + a * right

    x = network(np.asarray(index).astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def shuffled(positions, n, seed):
    """Places in range(n) at the `positions` (int array) of an endless pass that is reshuffled every n positions."""
    places = np.empty(len(positions), np.int64)
    for epoch in np.unique(positions // n):
        here = positions // n == epoch
        places[here] = permuted(positions[here] % n, n, seed, int(epoch))
    return places


class Picks:
    """Picks `count` of every `total` whole numbers: a hash picks one in each cell of total / count numbers."""

    def __init__(self, count, total, *key):
        self.count, self.total, self.key = count, total, key

    def below(self, limit):
        """How many of the numbers below `limit` are picked."""
        if not self.count:
            return 0
        cells = ((limit + 1) * self.count - 1) // self.total  # complete ones
        return cells + int(self.picked(np.array([cells]))[0] < limit)

    def picked(self, index):
        """The number picked in each cell `index` (int array)."""
        start, stop = index * self.total // self.count, (index + 1) * self.total // self.count
        return start + (draws(index, *self.key) % (stop - start).astype(np.uint64)).astype(np.int64)

    def others(self, index):
        """The numbers not picked, in ascending order, at `index` (int array)."""
        if not self.count:
            return index
        cell = ((index + 1) * self.count - 1) // (self.total - self.count)
        number = index + cell  # one is picked in each cell before
        return number + (number >= self.picked(cell))


class Split:
    """The rows of one part ("train", "validation" or "test") of numbered rows: item (int array of places) -> rows.

    Evenly spread rows are held out, some of them for validation. Shares are exact to two rows, rows keep their part
    when rows are appended, and the j-th row of a part is found in O(1).
    """

    UNIT = 10 ** 9  # the unit of shares; 64 bits then suffice for 9 billion rows

    def __init__(self, rows, part, validation, test, seed=0):
        validation, test = round(validation * self.UNIT), round(test * self.UNIT)
        self.held_out = Picks(validation + test, self.UNIT, "held out", seed)
        self.validation = Picks(validation, validation + test, "validation", seed)
        held_out = self.held_out.below(rows)
        sizes = {"train": rows - held_out, "validation": self.validation.below(held_out)}
        self.part, self.size = part, sizes.get(part, held_out - sizes["validation"])

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.part == "train":
            return self.held_out.others(index)
        return self.held_out.picked(
            self.validation.picked(index) if self.part == "validation" else self.validation.others(index))


def part_of(key, validation, test, seed=0):
    """The part ("train", "validation" or "test") of a sample, by a hash of its text `key` (file name, speaker)."""
    encoded = f"{seed} {key}".encode(errors="surrogateescape")  # a file's name need not be valid UTF-8
    share = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") / 2 ** 64
    return "validation" if share < validation else "test" if share < validation + test else "train"
