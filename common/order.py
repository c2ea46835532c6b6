"""The order of samples and their splits: pure functions of numbers and a seed."""

import hashlib
import math

import numpy as np

UNIT = 10**9  # fractions are rounded to billionths, so that all sums are exact in 64-bit integers


def random_words(numbers, *key):
    """A hash (uint64) of each of the integers `numbers` (n,) and the key.

    The hash is splitmix64 (Steele, Lea & Flood 2014, Figure 16), started at a digest of the key.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return splitmix64(np.frombuffer(digest, np.uint64), np.asarray(numbers, np.uint64))


def splitmix64(start, numbers):
    """Words (uint64) of splitmix64, in `numbers` steps (uint64 or 1) from `start` (uint64)."""
    x = start + numbers * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def uniform(words, count):
    """Random numbers in [0, 1), (n, count), from the random words (n,) of n samples."""
    columns = [random_words(words, i) >> 11 for i in range(count)]  # a double holds 53 bits
    return np.stack(columns, axis=1) * 2.0**-53


def permute(index, n, *key):
    """Entries at `index` (int array) of a pseudo-random permutation of range(n) -> int64 array.

    A number is a pair (left, right) of range(a) × range(b) with a·b >= n. Three Feistel rounds
    permute the pairs, with modular addition instead of exclusive-or (Black & Rogaway 2002, §5).
    A result that is not below n is permuted again ("cycle walking", §4). Needs O(1) memory.
    """
    a = math.isqrt(n - 1) + 1
    b = math.ceil(n / a)

    def network(x):
        left = x % a
        right = x // a
        for i in range(3):
            left = (left + random_words(right, i, *key) % a) % a
            right = (right + random_words(left, i, *key) % b) % b
        return left + a * right

    x = network(np.asarray(index, np.uint64))
    while (x >= n).any():
        outside = x >= n
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def shuffle(positions, n, seed):
    """Indices below n at `positions` (int array) of training without end.

    Every n positions are an epoch, in an order of its own.
    """
    epochs = positions // n
    indices = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = permute(positions[inside] % n, n, seed, int(epoch))
    return indices


def stratified(n, count, total, *key):
    """Random numbers below n, ascending: one in each interval of total / count numbers.

    A larger n only appends more of them.
    """
    if not count:
        return np.zeros(0, np.int64)
    intervals = -(-n * count // total)
    edges = np.arange(intervals + 1) * total // count
    sizes = np.diff(edges).astype(np.uint64)
    offsets = random_words(np.arange(intervals), *key) % sizes
    picks = edges[:-1] + offsets.astype(np.int64)
    return picks[picks < n]


class Complement:
    """The numbers below n without `excluded` (ascending): item (int array) -> int64 array.

    It holds only the excluded numbers, so that billions of training rows take no memory.
    """

    def __init__(self, n, excluded):
        self.size = n - len(excluded)
        self.kept_before = excluded - np.arange(len(excluded))  # kept numbers before each excluded

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index + np.searchsorted(self.kept_before, index, side="right")


def split_indices(
    n,
    split,
    validation,
    test,
    seed=0,
):
    """The rows of a split ("train", "validation" or "test") of n numbered rows.

    validation, test: fractions. They are exact to two rows. A row keeps its split when rows are
    appended. The training split is a Complement, the others are int64 arrays.
    """
    validation = round(validation * UNIT)
    both = validation + round(test * UNIT)
    held_out = stratified(n, both, UNIT, "held out", seed)
    if split == "train":
        return Complement(n, held_out)
    chosen = stratified(len(held_out), validation, both, "validation", seed)
    if split == "validation":
        return held_out[chosen]
    return np.delete(held_out, chosen)


def split_keys(
    keys,
    split,
    validation,
    test,
    seed=0,
):
    """The samples (int64, ascending) of a split ("train", "validation" or "test").

    A hash of a sample's text key, a file name or a speaker, decides. validation, test: fractions,
    about. If no key would be held out, the one of the smallest hash is.
    """
    hashes = []
    for key in keys:
        text = f"{seed} {key}".encode(errors="surrogateescape")  # a file name may be no UTF-8
        digest = hashlib.blake2b(text, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little") / 2**64)
    hashes = np.array(hashes)
    names = ("validation", "test", "train")
    splits = np.searchsorted([validation, validation + test], hashes, side="right")
    for number, share in enumerate((validation, test)):
        training = hashes[splits == 2]
        if share and number not in splits and len(set(training)) > 1:
            splits[hashes == training.min()] = number
    return np.flatnonzero(splits == names.index(split))
