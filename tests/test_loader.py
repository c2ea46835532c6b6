"""Batches: the same samples for any number of ranks and workers; unusable samples; worker exits."""
import itertools
import os
import re
import signal

import numpy as np
import pytest
import torch
from conftest import script
from helpers import CPU, Settings, Words
from numpy.testing import assert_array_equal
from torch import nn

from common import accumulate, dist, loader, loop, order
from common.config import UserError

DAMAGED = (3, 25, 74)


def read_steps(world_size, first_step, steps, workers=0):
    """Read steps on all ranks: ((rows, random words) by step, names of unusable samples)."""
    chunks = loader.ChunkDataset(Words(75, DAMAGED), np.arange(75), seed=4)
    values = np.zeros((2, steps, 10), int)
    unusable = set()
    for rank in range(world_size):
        plan = accumulate.plan(10, 3, rank, world_size)
        batches = loader.read_ahead(chunks, order.training_spans(plan, 10, first_step), workers)
        for step in range(steps):
            for chunk in plan:
                batch = next(batches)
                assert_array_equal(batch["row"], batch["index"])
                values[0, step, chunk.start:chunk.start + chunk.size] = batch["row"]
                values[1, step, chunk.start:chunk.start + chunk.size] = batch["words"]
                unusable.update(batch["unusable"])
    return values, unusable


def slow_order(position):
    """The row at a position: the shuffled row, or the next usable one."""
    row = order.shuffle(np.array([position]), 75, seed=4)[0]
    while row in DAMAGED:
        row = (row + 1) % 75  # the first row follows the last
    return row


def test_samples_come_in_one_order_on_any_number_of_ranks_and_workers_and_from_any_step_on():
    values, unusable = read_steps(1, 0, steps=20)
    assert unusable == {"row 3", "row 25", "row 74"}
    assert values[0].ravel().tolist() == [slow_order(position) for position in range(200)]
    assert len(np.unique(values[0])) == 72
    assert len(np.unique(values[1])) == 200  # a repeated row gets new random words
    for world_size, first, workers in ((1, 13, 2), (2, 6, 0), (3, 0, 0)):
        again, _ = read_steps(world_size, first, 7, workers)
        assert_array_equal(again, values[:, first:first + 7])


def evaluated(limit):
    """[(number, indices, random words)] of this rank's batches."""
    batches = loader.eval_batches(Words(200), np.arange(80, 200), limit, 16)
    return [(number, batch["index"].tolist(), batch["words"]) for number, batch in batches]


@pytest.mark.parametrize("limit, count", [(0, 120), (50, 50)])
def test_evaluation_takes_samples_from_all_over_a_split_in_order_and_nothing_random(limit, count):
    numbers, indices, words = zip(*evaluated(limit))
    assert set(words) == {None}
    rows = list(itertools.chain(*indices))
    assert rows == sorted(set(rows))
    tenths = np.bincount((np.array(rows) - 80) // 12)
    assert tenths.tolist() == pytest.approx([count / 10] * 10, abs=1)
    assert list(numbers) == list(range(-(-count // 16)))


def test_two_ranks_take_the_batches_in_turns(on_ranks):
    alone = evaluated(50)
    assert on_ranks(2, evaluated, 50) == [alone[0::2], alone[1::2]]


def batch_of_everything(workers):
    """The UserError from reading 8 of 80 samples, none of which is usable."""
    chunks = loader.ChunkDataset(Words(80, tuple(range(80))), np.arange(80), 0)
    with pytest.raises(UserError) as caught:
        next(loader.read_ahead(chunks, [(0, 8)], workers))
    return str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_with_nothing_usable_are_refused_after_about_100_samples(workers):
    message = r"104 unusable samples: row \d+, …; fix or remove them"
    assert re.fullmatch(message, batch_of_everything(workers))
    loader.kill_workers()  # pytest keeps the error, whose traceback keeps the loader alive


class Gone:
    def fetch(self, indices, random_bits=None):
        raise FileNotFoundError(2, "No such file or directory", "shard_0.npy")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_disk_is_one_line_also_from_a_worker(workers):
    chunks = loader.ChunkDataset(Gone(), np.arange(8))
    with pytest.raises(FileNotFoundError) as caught:
        next(loader.read_ahead(chunks, [(0, 8)], workers))
    assert str(caught.value) == "[Errno 2] No such file or directory: 'shard_0.npy'"
    loader.kill_workers()


def test_a_second_reading_may_succeed_and_a_sample_without_a_fault_has_its_number():
    dataset = Words(10, (4,))
    dataset.fault = lambda index: ""
    batch = loader.ChunkDataset(dataset, np.arange(10))[3, 6]
    assert batch["unusable"] == ["sample 4"]
    assert batch["row"].tolist() == [3, 5, 5]
    last = loader.ChunkDataset(Words(10, (9,)), np.arange(10))[8, 10]
    assert last["row"].tolist() == [8, 0]


def test_at_most_one_sample_in_a_hundred_and_a_hundred_more_may_be_unusable():
    damaged = 110  # the first 110 of 1000
    chunks = loader.ChunkDataset(Words(1000, tuple(range(damaged))), np.arange(1000))
    assert len(chunks[0, 1]["unusable"]) == damaged
    chunks.dataset.damaged += (damaged,)
    with pytest.raises(UserError, match=r"^111 unusable samples: row 0, …"):
        chunks[0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_reads_its_ranks_chunks_from_the_step_on(workers, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = Settings(batch_size=10, chunk_size=3, seed=4, workers=workers)
    indices = np.arange(75)
    plan, batches = loader.train_batches(cfg, Words(75), indices, 6, CPU)
    assert [chunk.start for chunk in plan] == [3, 9]
    for position in (63, 69, 73, 79):
        span = np.arange(position, min(position + 3, position // 10 * 10 + 10))
        batch = next(batches)
        assert_array_equal(batch["row"], order.shuffle(span, 75, 4))
        assert_array_equal(batch["words"], order.random_bits(span, 4).astype(np.int64))


# Workers

class Captioned(Words):
    def fetch(self, indices, random_bits=None):
        batch, usable = super().fetch(indices, random_bits)
        return {**batch, "caption": [f"a {index}" for index in indices]}, usable


def length_of(texts):
    return torch.tensor([[len(text), os.getpid()] for text in texts])


def doubled(batch, random_bits):
    return {**batch, "double": 2 * batch["row"], "bits": random_bits.astype(np.int64)}


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_turn_captions_into_tokens_and_transform_what_replaces_the_unusable(workers):
    chunks = loader.ChunkDataset(Captioned(9, (4,)), np.arange(9), 0, length_of, doubled)
    batch = next(loader.read_ahead(chunks, [(0, 9)], workers))
    assert batch["tokens"][:, 0].tolist() == [len(text) for text in batch["caption"]]
    in_worker = batch["tokens"][:, 1] != os.getpid()
    assert in_worker.tolist() == [bool(workers)] * 9
    assert_array_equal(batch["double"], 2 * batch["row"])
    assert_array_equal(batch["bits"], batch["words"])
    loader.kill_workers()


class Handlers(torch.utils.data.Dataset):
    def __getitem__(self, span):
        return [int(signal.getsignal(number)) for number in dist.SIGNALS]


def test_signals_are_left_to_the_rank_by_its_workers():
    """Promise 2: a run is saved after a signal."""
    handlers = next(loader.read_ahead(Handlers(), [(0, 1)], workers=1))
    assert set(handlers) == {signal.SIG_IGN}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    loader.kill_workers()


WORKERS = """
import os, signal, sys, time
import numpy as np
from common import config, loader
from common.config import UserError

class Numbers:
    def fetch(self, indices, random_bits=None):
        if fault == "kill" and indices[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang" and indices[0]:
            time.sleep(1000)
        if fault == "name" and indices[0]:
            undefined_name
        if fault == "user" and indices[0]:
            raise UserError("no such sample")
        return {"row": indices}, np.ones(len(indices), bool)

def train(cfg):
    chunks = loader.ChunkDataset(Numbers(), np.arange(9))
    batches = loader.read_ahead(chunks, [(0, 1), (1, 2), (2, 3)], workers=1, timeout=2)
    assert next(batches)["row"] == 0
    if fault == "end":
        raise ArithmeticError("of the rank")
    next(batches)

fault = sys.argv.pop()
config.run({"train": (train, config.Settings)}, "", default="train")
"""


@pytest.mark.parametrize("fault, message", [
    ("kill", r"(?s)Traceback .*RuntimeError: DataLoader worker \(pid.* killed by signal: Killed"),
    ("hang", r"(?s)Traceback .*RuntimeError: DataLoader timed out after 2 seconds"),
    ("name", r"(?s)Traceback .*NameError: name 'undefined_name' is not defined"),
    ("end", r"(?s)Traceback .*ArithmeticError: of the rank"),
    ("user", r"-c: error: no such sample\n"),
])
def test_a_process_ends_with_its_workers_in_a_traceback_or_in_one_line_for_a_user_error(
        fault, message):
    """Promises 6 and 8: all ranks end together; a user error prints one line."""
    status, _, err = script(WORKERS, fault)
    assert status == 1
    assert re.match(message, err), err
    assert ("error: " in err) == (fault == "user")


# Evaluation and device

def mean_of(chunk_size, most=0):
    model = nn.Linear(1, 1)
    model.cfg = Settings(chunk_size=chunk_size, eval_samples=most)
    noise = []

    def loss_of(batch):
        assert not model.training and not torch.is_grad_enabled()
        noise.append(torch.rand(()).item())
        return batch["row"].float().mean()

    mean = loop.mean_loss(model, loss_of, Words(20), np.arange(20))
    assert model.training
    return mean, noise


def test_a_mean_loss_is_the_same_in_chunks_of_any_size_and_on_any_ranks(on_ranks):
    """Promise 9: results repeat."""
    assert mean_of(7) == mean_of(7)  # including the noise
    assert mean_of(7)[0] == mean_of(20)[0] == 9.5
    assert mean_of(7, 2)[0] == 9.5  # the mean of the first and the last row
    assert [mean for mean, _ in on_ranks(2, mean_of, 7)] == [9.5, 9.5]


def test_tensors_and_arrays_go_to_the_device_and_the_rest_stays():
    batch = {"a": np.arange(3), "b": torch.ones(2), "caption": ["x"]}
    array, tensor, caption = loader.to_device(batch, torch.device("meta")).values()
    assert array.device.type == tensor.device.type == "meta"
    assert caption == ["x"]
