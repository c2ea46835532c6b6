"""Split the global batch into chunks (micro-batches), assign them to ranks, and seed them.

Each chunk is seeded by (seed, step, chunk), so its noise does not depend on the number of ranks.
Gradient accumulation and data parallelism are the same mechanism: one rank runs all chunks in turn,
several ranks share them.
"""

import math
import random
from typing import NamedTuple

import numpy as np
import torch

from common import order
from common.config import UserError


class Chunk(NamedTuple):
    index: int  # number of the chunk in its batch
    start: int  # position of its first sample in the batch
    size: int  # number of samples
    weight: float  # share of the batch; the sum of weight · mean loss is the batch's mean loss


def chunk_size_for(batch_size, world_size, most):
    """A chunk size, at most `most`, that gives every rank about the same number of chunks.

    UserError if there are more ranks than samples in a batch.
    """
    if batch_size < world_size:
        raise UserError(
            f"--batch_size {batch_size}: fewer samples than the {world_size} ranks; raise it"
        )
    chunks_per_rank = math.ceil(batch_size / (world_size * most))
    size = math.ceil(batch_size / (world_size * chunks_per_rank))
    if math.ceil(batch_size / size) < world_size:
        # Some rank would get no chunk: 9 samples on 4 ranks would be split into 3, 3, 3. Use
        # smaller chunks instead: 2, 2, 2, 2, 1.
        size = batch_size // world_size
    return size


def plan(batch_size, chunk_size, rank, world_size):
    """The chunks of a batch that `rank` processes: numbers rank, rank + world_size, …"""
    chunks = []
    for start in range(rank * chunk_size, batch_size, world_size * chunk_size):
        size = min(chunk_size, batch_size - start)
        chunks.append(Chunk(start // chunk_size, start, size, size / batch_size))
    return chunks


def derive_seed(*key):
    """A seed below 2^63: a hash of the numbers and strings in `key`."""
    return order.hash_of(repr(key).encode()) % 2**63


def seed_all(*key):
    """Seed Python, numpy and torch (on all devices) from `key`, such as (seed, step, chunk)."""
    value = derive_seed(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def batches(fields, batch_size):
    """Yield slices of at most `batch_size` rows of a dict of equally long tensors or lists."""
    lengths = {name: len(value) for name, value in fields.items()}
    assert len(set(lengths.values())) == 1, f"fields of different lengths: {lengths}"
    for start in range(0, max(lengths.values()), batch_size):
        stop = start + batch_size
        yield {name: value[start:stop] for name, value in fields.items()}
