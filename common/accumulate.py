"""The plan that cuts a global batch into chunks and gives them to ranks.

A chunk is the unit of everything random: it is seeded by (seed, step, chunk), so what it sees does not depend on the
number of ranks, and gradient accumulation and data parallelism are one mechanism.
"""
import hashlib
import random
from typing import NamedTuple

import numpy as np
import torch

from common.config import UserError


class Chunk(NamedTuple):
    index: int  # number of the chunk in its batch
    start: int  # its first sample in the batch
    stop: int  # one past its last sample
    weight: float  # factor of its mean loss, so that DDP's average over ranks is the mean over the batch
    last: bool  # whether it is this rank's last chunk, on which gradients are synchronized


def plan(batch_size, chunk_size, rank=0, world_size=1):
    """The chunks that `rank` of `world_size` takes from each batch, rank, rank + world_size, …; UserError if none."""
    count = -(-batch_size // chunk_size)
    if count < world_size:
        raise UserError(f"batch_size {batch_size} in chunks of {chunk_size} makes {count} chunk(s), too few for "
                        f"{world_size} ranks; lower chunk_size to {max(1, batch_size // world_size)} or less")
    chunks = []
    for index in range(rank, count, world_size):
        start, stop = index * chunk_size, min((index + 1) * chunk_size, batch_size)
        chunks.append(Chunk(index, start, stop, (stop - start) * world_size / batch_size, index + world_size >= count))
    return chunks


def number(*key):
    """A seed, below 2^63, made of all the parts of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2 ** 63


def seed(*key):
    """Seed Python's, numpy's and torch's generators (all devices) from `key`, e.g. (seed, step, chunk)."""
    value = number(*key)
    random.seed(value)
    np.random.seed(value % 2 ** 32)
    torch.manual_seed(value)


def split(fields, chunk_size):
    """Cut a dict of tensors, arrays and lists of one common length into dicts of at most `chunk_size`.

    Anything else (numbers, tensors without dimensions, text, None) is handed to every chunk as it is.
    """
    sized = {k: v for k, v in fields.items() if isinstance(v, (list, tuple)) or getattr(v, "ndim", 0)}
    lengths = {k: len(v) for k, v in sized.items()}
    assert len(set(lengths.values())) == 1, f"fields of different lengths: {lengths}"
    for start in range(0, next(iter(lengths.values())), chunk_size):
        yield {**fields, **{k: v[start:start + chunk_size] for k, v in sized.items()}}
