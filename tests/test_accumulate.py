"""Chunks of any size, on any number of ranks, give the gradient of the whole batch."""
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from common import accumulate, dist
from common.config import UserError


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("batch_size, chunk_size", [(7, 1), (64, 8), (100, 14)])
def test_the_ranks_chunks_cover_the_batch_once(batch_size, chunk_size, world_size):
    whole = accumulate.plan(batch_size, chunk_size, 0, 1)
    samples = [range(chunk.start, chunk.start + chunk.size) for chunk in whole]
    assert [*itertools.chain(*samples)] == list(range(batch_size))
    for rank in range(world_size):
        chunks = accumulate.plan(batch_size, chunk_size, rank, world_size)
        assert chunks == whole[rank::world_size]


def most_chunks(batch_size, size, world_size):
    """The largest number of chunks on a rank, or None if a rank has no chunk."""
    counts = []
    for rank in range(world_size):
        plan = accumulate.plan(batch_size, size, rank, world_size)
        counts.append(len(plan))
    return max(counts) if all(counts) else None


@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_a_chunk_size_gives_every_rank_a_chunk_and_none_more_than_another_size_would(world_size):
    for batch_size, most in itertools.product(range(world_size, 40), (1, 2, 3, 7, 100)):
        counts = [most_chunks(batch_size, size, world_size) for size in range(1, most + 1)]
        size = accumulate.chunk_size_for(batch_size, world_size, most)
        assert 1 <= size <= most
        count = counts[size - 1]
        assert count == min(filter(None, counts))
        if batch_size % (world_size * count) == 0:
            assert size * world_size * count == batch_size  # all chunks are equal


def test_a_batch_has_a_sample_for_every_rank():
    assert accumulate.chunk_size_for(4, 4, 8) == 1
    with pytest.raises(UserError, match="--batch_size 3: fewer samples than the 4 ranks"):
        accumulate.chunk_size_for(3, 4, 8)


@pytest.mark.parametrize("size, lengths", [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_batches_have_all_rows_in_order(size, lengths):
    fields = {"a": torch.arange(5), "b": [*"abcde"], "c": np.eye(5)}
    batches = [*accumulate.batches(fields, size)]
    assert [len(batch["a"]) for batch in batches] == lengths
    a = torch.cat([batch["a"] for batch in batches])
    b = itertools.chain(*[batch["b"] for batch in batches])
    c = np.concatenate([batch["c"] for batch in batches])
    assert a.equal(fields["a"])
    assert list(b) == fields["b"]
    np.testing.assert_array_equal(c, fields["c"])
    with pytest.raises(AssertionError, match="fields of different lengths"):
        next(accumulate.batches({"a": fields["a"], "b": ["x"]}, size))


def whole_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    inputs = torch.randn(10, 3, dtype=torch.float64)
    targets = torch.randn(10, 2, dtype=torch.float64)
    return model, inputs, targets


def gradient_of(model):
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])


def chunked_gradients():
    """The batch's gradient on this rank, once for each chunk size from 1 to 4."""
    gradients = []
    for chunk_size in (1, 2, 3, 4):
        model, inputs, targets = whole_batch()
        plan = accumulate.plan(10, chunk_size, dist.rank(), dist.world_size())
        for chunk in plan:
            samples = slice(chunk.start, chunk.start + chunk.size)
            loss = mse_loss(model(inputs[samples]), targets[samples])
            with dist.sum_gradients(model, chunk is plan[-1]):
                (loss * chunk.weight).backward()
        gradients.append(gradient_of(model))
    return gradients


def test_chunks_on_any_number_of_ranks_leave_the_whole_batchs_gradient(on_ranks):
    model, inputs, targets = whole_batch()
    mse_loss(model(inputs), targets).backward()
    expected = np.stack([gradient_of(model)] * 4)
    ranks = on_ranks(3, chunked_gradients)
    for gradients in [chunked_gradients(), *ranks]:
        np.testing.assert_allclose(gradients, expected, rtol=1e-13, atol=1e-16)
    np.testing.assert_array_equal(ranks[1:], [ranks[0]] * 2)


def random_numbers(*key):
    accumulate.seed_all(*key)
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_one_key_gives_one_stream_and_other_keys_give_others():
    keys = [
        (0, 5, 1),
        (0, 5, 2),
        (0, 6, 1),
        (1, 5, 1),
        (0, 51),
        ("eval", 5, 1),
    ]
    numbers = [random_numbers(*key) for key in keys]
    assert random_numbers(*keys[0]) == numbers[0]
    for of_generator in zip(*numbers):
        assert len(set(of_generator)) == len(keys)
