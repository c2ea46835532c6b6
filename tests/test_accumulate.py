"""The plan of a batch: chunks of any size, on any number of ranks, make the whole batch's gradient."""
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from common import accumulate, dist
from common.config import UserError


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size, chunk_size", [(7, 1), (8, 1), (10, 3), (64, 8), (100, 13), (100, 14)])
def test_the_ranks_chunks_cover_the_batch_once(batch_size, chunk_size, world_size):
    if -(-batch_size // chunk_size) < world_size:
        with pytest.raises(AssertionError):
            accumulate.plan(batch_size, chunk_size, 0, world_size)
        return
    plans = [accumulate.plan(batch_size, chunk_size, rank, world_size) for rank in range(world_size)]
    chunks = sorted(chunk for plan in plans for chunk in plan)
    assert [sample for chunk in chunks for sample in range(chunk.start, chunk.stop)] == list(range(batch_size))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert chunks == accumulate.plan(batch_size, chunk_size)
    assert sum(chunk.weight for chunk in chunks) == pytest.approx(1.0, rel=1e-12)


def test_a_chunk_size_is_at_most_the_limit_and_gives_every_rank_as_many_chunks():
    for batch_size, world_size, most in itertools.product(range(1, 80), range(1, 10), (1, 3, 8, 100)):
        if batch_size < world_size:
            with pytest.raises(UserError, match=f"--batch_size {batch_size}: fewer samples than the {world_size} rank"):
                accumulate.chunk_size_for(batch_size, world_size, most)
            continue
        size = accumulate.chunk_size_for(batch_size, world_size, most)
        plans = [accumulate.plan(batch_size, size, rank, world_size) for rank in range(world_size)]
        assert 1 <= size <= most
        assert max(map(len, plans)) - min(map(len, plans)) <= 1
        if batch_size % world_size == 0 and most >= batch_size:
            assert all(len(plan) == 1 for plan in plans)
    assert accumulate.chunk_size_for(256, 2, 256) == 128
    assert accumulate.chunk_size_for(256, 3, 64) == 43  # two chunks a rank
    assert accumulate.chunk_size_for(9, 4, 100) == 2


BATCH = 10


def whole_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, torch.randn(BATCH, 3, dtype=torch.float64), torch.randn(BATCH, 2, dtype=torch.float64)


def chunked_gradient(chunk_size):
    """The gradient that training in chunks of `chunk_size` leaves on this rank."""
    model, inputs, targets = whole_batch()
    for chunk in accumulate.plan(BATCH, chunk_size, dist.rank(), dist.world_size()):
        part = slice(chunk.start, chunk.stop)
        loss = nn.functional.mse_loss(model(inputs[part]), targets[part])
        (loss * chunk.weight).backward()
    dist.sum_gradients(model)
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])


def chunked_gradients(chunk_sizes):
    return [chunked_gradient(size) for size in chunk_sizes]


@pytest.mark.parametrize("world_size, chunk_sizes",
                         [(1, [1, 3, 4, 9, 10, 64]), (2, [1, 3, 4, 5, 9]), (3, [1, 2, 3, 4])])
def test_chunks_of_any_size_on_any_number_of_ranks_leave_the_whole_batchs_gradient(world_size, chunk_sizes, on_ranks):
    model, inputs, targets = whole_batch()
    nn.functional.mse_loss(model(inputs), targets).backward()
    expected = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    ranks = on_ranks(world_size, chunked_gradients, chunk_sizes) if world_size > 1 else [chunked_gradients(chunk_sizes)]
    for gradients in ranks:
        for gradient in gradients:
            np.testing.assert_allclose(gradient, expected, rtol=1e-13, atol=1e-16)
    for one, first in zip(ranks[-1], ranks[0]):
        np.testing.assert_array_equal(one, first)


def draws(*key):
    accumulate.seed(*key)
    return random.random(), np.random.rand(), torch.rand(()).item(), torch.randn(2).tolist()


def test_one_key_gives_one_stream_and_other_keys_give_others():
    first = draws(0, 5, 1)
    accumulate.seed(3)
    random.random(), np.random.rand(), torch.rand(9)
    assert draws(0, 5, 1) == first
    keys = [(0, 5, 2), (0, 6, 1), (1, 5, 1), (0, 51), (0, 5, 1, 0), (5, 0, 1), ("eval", 5, 1)]
    others = [draws(*key) for key in keys]
    for generator in range(4):
        assert len({str(draw[generator]) for draw in [first, *others]}) == 8
    assert all(0 <= accumulate.number(key) < 2 ** 63 for key in range(99))  # what every generator takes


def test_splitting_mixed_fields_and_joining_them_again_gives_them_back():
    fields = {"image": torch.arange(14.0).reshape(7, 2), "row": np.arange(7), "caption": list("abcdefg"),
              "pairs": tuple(range(7)), "prompt": "a long text", "scale": 3.5, "level": torch.tensor(2.0), "none": None}
    parts = list(accumulate.split(fields, 3))
    assert [len(part["caption"]) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part["image"] for part in parts]), fields["image"])
    assert np.concatenate([part["row"] for part in parts]).tolist() == list(range(7))
    assert [caption for part in parts for caption in part["caption"]] == fields["caption"]
    assert tuple(pair for part in parts for pair in part["pairs"]) == fields["pairs"]
    assert all(type(part["pairs"]) is tuple for part in parts)
    for part in parts:
        assert all(part[name] is fields[name] for name in ("prompt", "scale", "level", "none"))


def test_fields_of_different_lengths_are_not_split():
    with pytest.raises(AssertionError, match="different lengths"):
        next(accumulate.split({"a": [1, 2], "b": [1]}, 1))
