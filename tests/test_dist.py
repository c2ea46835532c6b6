"""Processes: exact sums, one decision for all, ranks kept in step; with real gloo processes."""
import os
import socket
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common import dist
from common.config import UserError

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def uneven_means():
    here = [[1.0, 0.0, 5.0], [7.0]][dist.rank()]  # three samples on one rank, one on the other, and a true zero
    total, count, zeros = dist.total([sum(here), len(here), 0.0])
    tiny, = dist.total([2.0 ** -30 if dist.rank() else 2.0 ** 20])
    return total / count, zeros, tiny, dist.gather({"rank": dist.rank()}), dist.broadcast(("first", dist.rank()))


def test_means_over_unevenly_filled_ranks_are_exact_and_values_reach_every_rank(on_ranks):
    for result in on_ranks(2, uneven_means):
        mean, zeros, tiny, gathered, told = result
        assert mean == 13 / 4
        assert zeros == 0.0
        assert tiny == 2.0 ** 20 + 2.0 ** -30  # float32 would lose it
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert told == ("first", 0)


def decide():
    done = []
    assert dist.on_main(lambda: done.append(dist.rank()) or "made") == "made"
    messages = []
    for error in (UserError("no such data"), OSError(28, "No space left on device", "x.pt")):
        def fail(error=error):
            raise error
        with pytest.raises(UserError) as caught:
            dist.on_main(fail)
        messages.append(str(caught.value))
    return done, messages, dist.total([1.0])  # the ranks still work together after the errors


def test_work_for_rank_0_is_done_once_and_its_errors_reach_every_rank(on_ranks):
    results = on_ranks(2, decide)
    assert [done for done, *_ in results] == [[0], []]
    for _, messages, total in results:
        assert messages == ["no such data", "[Errno 28] No space left on device: 'x.pt'"]
        assert total == [2.0]


def each(folder, failing):
    done = []

    def work():
        if dist.is_main():
            time.sleep(0.2)
            Path(folder, "downloaded").touch()
        done.append(Path(folder, "downloaded").exists())
        if dist.rank() in failing:
            raise (UserError if dist.rank() % 2 else OSError)(f"rank {dist.rank()}")
        return dist.rank  # which could not be sent to another

    try:
        result, relayed = dist.on_each(work)(), None
    except UserError as error:
        result, relayed = str(error), error.relayed
    return done, result, relayed, dist.total([1.0])  # the ranks still work together after the errors


@pytest.mark.parametrize("failing", [(), (1, 2), (0, 2)])
def test_work_for_each_rank_is_done_by_rank_0_first_and_the_first_error_is_told_once(on_ranks, failing, tmp_path):
    for rank, (done, result, relayed, total) in enumerate(on_ranks(3, each, str(tmp_path), failing)):
        assert done == ([True] if rank == 0 or 0 not in failing else [])
        assert (result, relayed) == ((f"rank {failing[0]}", rank != failing[0]) if failing else (rank, None))
        assert total == [3.0]


def meet(failing):
    def work():
        assert dist.gather(dist.rank()) == [0, 1]  # one after the other, the first would wait in vain
        if dist.rank() == failing:
            raise OSError(f"rank {failing}")
        return dist.rank

    try:
        return dist.at_once(work)(), None
    except UserError as error:
        return str(error), error.relayed


@pytest.mark.parametrize("failing", [None, 1])
def test_work_done_at_once_is_done_at_the_same_time_and_an_error_is_reported_once(on_ranks, failing):
    results = on_ranks(2, meet, failing)
    assert results == [(rank, None) if failing is None else (f"rank {failing}", rank != failing) for rank in (0, 1)]


def drift(kind):
    torch.manual_seed(0)
    modules = {"model": nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), "codec": nn.Linear(2, 2).bfloat16()}
    modules["codec"].register_buffer("usage", torch.zeros(3), persistent=False)
    weight = modules["model"][0].weight.data.view(-1)
    weight[:2] = torch.tensor([1e-20, 0.5])  # a drift of the first does not show in the sum of all
    dist.check_in_step(modules, 3)
    if dist.rank() == 1:
        if kind == "ulp":
            weight[0] = torch.nextafter(weight[0], torch.tensor(1.0))
        if kind == "swap":
            weight[:2] = weight[:2].flip(0)
        if kind == "buffers":
            modules["model"][1].num_batches_tracked += 1
            modules["codec"].usage[2] = 1
    with pytest.raises(RuntimeError) as caught:
        dist.check_in_step(modules, 4 + (kind == "step") * dist.rank())
    return str(caught.value)


@pytest.mark.parametrize("kind, differing", [
    ("ulp", "model of rank 1"), ("swap", "model of rank 1"), ("step", "step of rank 1, step of rank 2"),
    ("buffers", "model of rank 1, codec of rank 1")])
def test_ranks_that_differ_in_one_bit_of_a_module_or_in_the_step_are_found_out(on_ranks, kind, differing):
    for rank, message in enumerate(on_ranks(3, drift, kind)):
        step = 4 + (kind == "step") * rank
        assert message == f"the ranks have drifted apart by step {step}: {differing} not as on rank 0"


def average():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(3, 1, bias=False)
        model.register_buffer("usage", torch.zeros(()))
        model = dist.wrap(model, torch.device("cpu"))
    model.module.usage += dist.rank()
    inputs = torch.arange(12.0).reshape(4, 3)
    for i, x in enumerate(inputs[2 * dist.rank():2 * dist.rank() + 2]):
        with dist.sync_if(model, i == 1):
            model(x[None]).sum().backward()
        if i == 0:
            alone = model.module.weight.grad.clone()
    return alone.numpy(), model.module.weight.grad.numpy(), float(model.module.usage)


def test_gradients_are_averaged_on_the_last_backward_pass_and_only_then_and_buffers_are_not(on_ranks):
    inputs = np.arange(12.0).reshape(4, 3)
    for rank, (alone, together, usage) in enumerate(on_ranks(2, average)):
        assert usage == rank
        np.testing.assert_array_equal(alone[0], inputs[2 * rank])
        np.testing.assert_array_equal(together[0], inputs.sum(0) / 2)


def alone():
    model = nn.Linear(2, 2)
    dist.check_in_step({"model": model}, 1)
    return (dist.wrap(model, torch.device("cpu")) is model, dist.is_main(), dist.world_size(), dist.total([1, 2.5]),
            dist.gather("x"), dist.broadcast("y"), dist.on_main(lambda: "z"), dist.on_each(lambda: "e"),
            torch.distributed.is_initialized())


LEAVE = """
import os, sys
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2],
                  WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
import torch
from common import dist
device = dist.setup("cpu")
def work():
    model = dist.wrap(torch.nn.Linear(2, 2), device)
    model(torch.ones(1, 2)).sum().backward()
    model.around = [model]  # the group is held in a circle, which only the garbage collector finds
def threads():
    return {open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")} - {"python"}
work()
print(any("gloo" in name for name in threads()))
dist.teardown()
print(any("gloo" in name for name in threads()))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the threads of Linux")
def test_no_thread_of_the_group_outlives_it_and_aborts_the_process_at_its_end(script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [script(LEAVE, rank, port, wait=False) for rank in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "True\nFalse\n"), err


def test_a_single_process_needs_no_group_and_is_left_as_it_is(on_ranks):
    expected = (True, True, 1, [1.0, 2.5], ["x"], "y", "z", "e", False)
    assert on_ranks(1, alone) == [expected] and alone() == expected  # by torchrun, and by plain python


@pytest.mark.parametrize("ranks, threads, expected", [(2, "1", max(1, CORES // 2)), (3 * CORES, "1", 1), ("", "1", 7),
                                                      (2, "3", 7)])
def test_ranks_of_a_machine_share_its_cores_unless_their_number_was_chosen(monkeypatch, ranks, threads, expected):
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        dist.setup("cpu")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_the_device_is_the_one_named_or_the_best_there_is(monkeypatch):
    assert dist.setup("cpu") == torch.device("cpu")
    assert dist.setup("auto").type == ("cuda" if torch.cuda.is_available() else
                                       "mps" if torch.backends.mps.is_available() else "cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert dist.setup("mps") == torch.device("mps")


@pytest.mark.parametrize("gpus, way", [(1, "python"), (3, "torchrun --nproc_per_node=3")])
def test_more_ranks_than_gpus_compute_on_the_cpu_and_say_how_to_use_the_gpu(monkeypatch, capsys, gpus, way):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus + 1))
    monkeypatch.setattr("sys.argv", ["train_prior.py"])
    assert dist.setup("auto") == torch.device("cpu")
    assert capsys.readouterr().out == (f"{gpus + 1} processes, but {gpus} GPU(s) here: computing on the CPU. "
                                       f"To use the GPU: {way} train_prior.py\n")


@pytest.mark.parametrize("device, there, message", [
    ("cuda", True, r"rank {0} of this machine has no GPU, {0} found; lower --nproc_per_node or use --device cpu"),
    ("mps", True, "there is none on this machine, or more than one process; use --device cpu"),
    ("mps", False, "there is none on this machine, or more than one process; use --device cpu")])
def test_a_device_that_is_not_there_is_refused_with_a_way_out(monkeypatch, device, there, message):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    monkeypatch.setenv("WORLD_SIZE", "2" if there else "1")
    if torch.cuda.device_count():
        monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    with pytest.raises(UserError, match=f"--device {device}: " + message.format(torch.cuda.device_count())):
        dist.setup(device)
