"""The plan that cuts a global batch into chunks and deals them to ranks, and the seeds of chunks.

A chunk is the unit of everything random: it is seeded by (seed, step, chunk), so what it sees does
not depend on the number of ranks. Gradient accumulation and data parallelism are one mechanism.
"""

import hashlib
import math
import random
from typing import NamedTuple

import numpy as np
import torch

from common.config import UserError


class Chunk(NamedTuple):
    index: int  # number of the chunk in its batch
    start: int  # its first sample in the batch
    size: int  # number of its samples
    weight: float  # its fraction of the batch: weight · mean loss adds up to the batch's mean


def chunk_size_for(batch_size, world_size, most):
    """The chunk size, at most `most`, that gives every rank about as many equal chunks of a batch.

    UserError if there are more ranks than samples in a batch.
    """
    if batch_size < world_size:
        raise UserError(
            f"--batch_size {batch_size}: fewer samples than the {world_size} ranks; raise it"
        )
    chunks_per_rank = math.ceil(batch_size / (world_size * most))
    size = math.ceil(batch_size / (world_size * chunks_per_rank))
    if math.ceil(batch_size / size) < world_size:
        # 9 samples on 4 ranks: not 3, 3, 3 but 2, 2, 2, 2, 1
        size = batch_size // world_size
    return size


def plan(batch_size, chunk_size, rank, world_size):
    """The chunks that `rank` of `world_size` takes from each batch: rank, rank + world_size, …"""
    chunks = []
    for start in range(rank * chunk_size, batch_size, world_size * chunk_size):
        size = min(chunk_size, batch_size - start)
        chunks.append(Chunk(start // chunk_size, start, size, size / batch_size))
    return chunks


def derive_seed(*key):
    """A seed below 2^63, a hash of all numbers and texts of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def seed_all(*key):
    """Seed Python's, numpy's and torch's generators (all devices) by `key`: (seed, step, chunk)."""
    value = derive_seed(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def batches(fields, batch_size):
    """Cut a dict of tensors, arrays and lists of one length into dicts of at most `batch_size`."""
    lengths = {name: len(value) for name, value in fields.items()}
    assert len(set(lengths.values())) == 1, f"fields of different lengths: {lengths}"
    for start in range(0, max(lengths.values()), batch_size):
        stop = start + batch_size
        yield {name: value[start:stop] for name, value in fields.items()}
