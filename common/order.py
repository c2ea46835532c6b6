"""The order of samples: splits, and the permutation of each epoch.

Everything is a pure function of numbers and a seed, so there is no state to save.
"""

import hashlib
import itertools
import math

import numpy as np

from common.config import UserError

UNIT = 10**9  # fractions are rounded to billionths, so that sums are exact in 64-bit integers


def hash_of(content):
    """A hash of `content` (bytes), an integer below 2^64."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_bits(numbers, *key):
    """Hash each of the integers `numbers` (n,), together with the key, to random bits (uint64).

    The hash is splitmix64 (Steele, Lea & Flood 2014, Figure 16), started at a hash of the key.
    """
    start = np.full(1, hash_of(repr(key).encode()), np.uint64)
    return splitmix64(start, np.asarray(numbers, np.uint64))


def splitmix64(start, numbers):
    """The output (uint64) of splitmix64 after `numbers` (uint64 or int) steps from `start`."""
    x = start + numbers * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def uniform(bits, count, otherwise):
    """Random numbers (count, n) in [0, 1) from random bits (count,).

    If `bits` is None, every row is `otherwise` (n numbers).
    """
    if bits is None:
        return np.tile(otherwise, (count, 1))
    columns = [random_bits(bits, i) >> 11 for i in range(len(otherwise))]
    return np.stack(columns, axis=1) * 2.0**-53  # a double holds 53 bits


def permute(index, n, *key):
    """Entries at `index` (int array) of a pseudo-random permutation of range(n) -> int64 array.

    Each number is treated as a pair (left, right) in range(a) × range(b) with a·b >= n. Three
    Feistel rounds, with modular addition instead of exclusive-or, permute the pairs (Black &
    Rogaway 2002, §5). Results of n or more are permuted again ("cycle walking", §4). Memory use
    does not depend on n.
    """
    a = math.isqrt(n - 1) + 1
    b = math.ceil(n / a)
    x = np.array(index, np.uint64)
    walking = np.arange(len(x))  # places in x that have no result yet
    while len(walking):
        left = x[walking] % a
        right = x[walking] // a
        for i in range(3):
            left = (left + random_bits(right, i, *key) % a) % a
            right = (right + random_bits(left, i, *key) % b) % b
        x[walking] = left + a * right
        walking = walking[x[walking] >= n]
    return x.astype(np.int64)


def evenly_spaced(count, limit):
    """At most `limit` evenly spaced numbers (int64) below `count`."""
    return np.linspace(0, count - 1, min(count, limit)).astype(np.int64)


def shuffle(positions, n, seed):
    """Map `positions` (int array), which count samples across epochs, to indices below n.

    Every n positions form an epoch, and each epoch has its own order.
    """
    epochs = positions // n
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = permute(positions[inside] % n, n, seed, int(epoch))
    return indices


def stratified(n, count, total, *key):
    """Ascending random integers below n: one in each interval of total / count integers.

    For n = 10, count = 1, total = 5, these are one of 0 to 4 and one of 5 to 9. With a larger n,
    more numbers follow, and the first ones stay the same.
    """
    if not count:
        return np.zeros(0, np.int64)
    interval = np.arange(-(-n * count // total))
    start = interval * total // count
    size = (interval + 1) * total // count - start
    offset = random_bits(interval, *key) % size.astype(np.uint64)
    picks = start + offset.astype(np.int64)
    return picks[: np.searchsorted(picks, n)]


class Complement:
    """The numbers below n that are not in `excluded` (ascending). Index it with an int array.

    It stores only the excluded numbers, so that billions of training rows need no memory.
    """

    def __init__(self, n, excluded):
        self.size = n - len(excluded)
        # For each excluded number: how many smaller numbers are kept.
        self.kept_before = excluded - np.arange(len(excluded))

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
    """The rows in a split ("train", "validation" or "test") of n numbered rows.

    validation, test: fractions, accurate to within two rows. Rows keep their split when more
    rows are appended. The training split is a Complement; the others are int64 arrays.
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


SPLITS = ("validation", "test", "train")  # from the smallest hashes to the largest


def hash_keys(keys, seed):
    """A hash in [0, 1] (float64) of each sample's key: a file name or a speaker."""
    # File names need not be valid UTF-8.
    texts = (f"{seed} {key}".encode(errors="surrogateescape") for key in keys)
    return np.fromiter(map(hash_of, texts), np.uint64) / 2.0**64


def split_hashes(hashes, split, validation, test):
    """The samples in a split ("train", "validation" or "test"), by the hashes (n,) of their keys.

    validation, test: approximate fractions. If a split with a fraction above 0 would be empty,
    it gets the training key with the smallest hash. The training split is a Complement; the others
    are ascending int64 arrays.
    """
    splits = (hashes >= validation).astype(np.int8) + (hashes >= validation + test)
    for number, share in enumerate((validation, test)):
        if share and number not in splits:
            training = hashes[splits == 2]
            if len(np.unique(training)) > 1:
                splits[hashes == training.min()] = number
    if split == "train":
        return Complement(len(hashes), np.flatnonzero(splits < 2))
    return np.flatnonzero(splits == SPLITS.index(split))


def split_keys(
    keys,
    split,
    validation,
    test,
    seed=0,
):
    """`split_hashes`, given keys instead of hashes. All splits are arrays."""
    indices = split_hashes(hash_keys(keys, seed), split, validation, test)
    return indices[np.arange(len(indices))]


# Splits of a dataset


def splits(dataset, cfg, val_dataset=None):
    """{split: (dataset, indices)} for "train", "validation" and "test".

    If there is a `val_dataset`, all of it is the validation split. UserError if a split is too
    small.
    """
    validation = 0.0 if val_dataset else cfg.validation
    found = {}
    for name in SPLITS:
        found[name] = dataset, dataset.split(name, validation, cfg.test, cfg.split_seed)
    if val_dataset:
        found["validation"] = val_dataset, val_dataset.split("train", 0.0, 0.0)

    for name, (_, indices) in found.items():
        least = cfg.batch_size if name == "train" else 1
        if len(indices) < least:
            raise UserError(
                f"{cfg.data}: {len(indices)} samples for {name}, expected at least {least}; "
                "change --batch_size, --validation or --test"
            )
    return found


# Positions


def training_spans(plan, batch_size, step):
    """Endlessly yield (first position, one past the last) of a rank's chunks, from `step` on."""
    for batch_start in itertools.count(step * batch_size, batch_size):
        for chunk in plan:
            start = batch_start + chunk.start
            yield start, start + chunk.size


def some_of(indices, limit):
    """At most `limit` (0: all) of the indices of a split, evenly spaced."""
    return indices[evenly_spaced(len(indices), limit or len(indices))]
