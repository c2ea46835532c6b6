"""Processes: exact sums, one decision for all, ranks kept in step; with real gloo processes."""
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

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


def sum_up():
    model = nn.ModuleDict({"used": nn.Conv2d(1, 2, 3), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["used"].to(memory_format=torch.channels_last)
    model["frozen"].requires_grad_(False)
    for number, parameter in enumerate(model["used"].parameters(), 1):
        parameter.grad = torch.full_like(parameter, number * 10.0 ** dist.rank())
    dist.sum_gradients(model)
    return [None if p.grad is None else (p.grad.unique().tolist(), p.grad.stride() == p.stride())
            for p in model.parameters()]


@pytest.mark.parametrize("ranks, total", [(1, 1.0), (3, 111.0)])
def test_gradients_are_summed_where_they_lie_and_are_zero_where_there_are_none(on_ranks, ranks, total):
    expected = [([total], True), ([2 * total], True), ([0.0], True), ([0.0], True), None, None]
    assert on_ranks(ranks, sum_up) == [expected] * ranks


def hand_out():
    tensors = [torch.full((n, 2), float(dist.rank())).T for n in range(1, 6)]
    dist.share(tensors)
    return [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_each_tensor_comes_from_its_owner(on_ranks, ranks):
    assert on_ranks(ranks, hand_out) == [[[float(i % ranks)] for i in range(5)]] * ranks


def steps_until_stopped(kind, number):
    """(steps taken, what was dealt, signal) of a rank; a signal comes to rank 1 at its fourth step or second number."""
    model, dealt, steps = nn.Linear(2, 2), [], 0
    try:
        with dist.stop_signals:
            for step in range(9):
                dist.stop_signals.check()
                if kind == "step" and dist.rank() == 1 and step == 3:
                    os.kill(os.getpid(), number)
                dist.sum_gradients(model)
                steps += 1
            for i in dist.deal(7):
                dealt.append(i)
                if kind == "deal" and dist.rank() == 1 and len(dealt) == 2:
                    os.kill(os.getpid(), number)
    except dist.Stopped as stopped:
        return steps, dealt, stopped.number
    return steps, dealt, None


@pytest.mark.parametrize("kind, number, expected", [
    ("step", signal.SIGTERM, [(4, [], signal.SIGTERM)] * 2),
    ("step", signal.SIGINT, [(4, [], signal.SIGINT)] * 2),
    ("deal", signal.SIGTERM, [(9, [0, 2], signal.SIGTERM), (9, [1, 3], signal.SIGTERM)]),
    ("none", signal.SIGTERM, [(9, [0, 2, 4, 6], None), (9, [1, 3, 5], None)])])
def test_a_signal_to_one_rank_stops_all_at_the_same_place(on_ranks, kind, number, expected):
    assert on_ranks(2, steps_until_stopped, kind, number) == expected


def test_a_gpu_is_not_waited_for_as_what_is_checked_there_is_a_step_old(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(
        record=lambda: events.append("record"), synchronize=lambda: events.append("synchronize")))
    with dist.stop_signals:
        for count in (0.0, 1.0, 0.0):
            message = torch.tensor([count, 0.0])
            dist.stop_signals.hear(SimpleNamespace(is_cuda=True, to=lambda *_, m=message, **__: m))
            if events.count("record") < 3:
                dist.stop_signals.check()
        assert events == ["record", "record", "synchronize", "record"]
        with pytest.raises(dist.Stopped, match="SIGTERM"):
            dist.stop_signals.check()


def test_without_a_context_that_listens_nothing_is_stopped_and_handlers_are_what_they_were():
    before = [signal.getsignal(number) for number in dist.SIGNALS]
    with pytest.raises(ZeroDivisionError), dist.stop_signals:
        os.kill(os.getpid(), signal.SIGTERM)
        1 / 0  # noqa: B018 (however it ends)
    assert [signal.getsignal(number) for number in dist.SIGNALS] == before
    assert [*dist.deal(3)] == [0, 1, 2]


TWICE = """
import os, signal, sys
from common import dist
first, second = (getattr(signal, name) for name in sys.argv[1:])
with dist.stop_signals:
    os.kill(os.getpid(), first)
    os.kill(os.getpid(), second)
    print("still here", flush=True)
"""


@pytest.mark.parametrize("first, second, ends", [
    ("SIGINT", "SIGINT", True), ("SIGINT", "SIGTERM", True),
    ("SIGTERM", "SIGTERM", False)])  # a scheduler signals torchrun and its ranks, and torchrun passes it on
def test_a_second_ctrl_c_ends_at_once(script, first, second, ends):
    process = script(TWICE, first, second)
    assert (process.returncode == -getattr(signal, second), process.stdout == "") == (ends, ends), process.stderr


def alone():
    model = nn.Linear(2, 2)
    dist.check_in_step({"model": model}, 1)
    return (dist.is_main(), dist.world_size(), dist.total([1, 2.5]),
            dist.gather("x"), dist.broadcast("y"), dist.on_main(lambda: "z"), dist.on_each(lambda: "e"),
            torch.distributed.is_initialized())


LEAVE = """
import os, sys
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2],
                  WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
import torch
from common import dist, optim
device = dist.setup("cpu")
def work():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    dist.sum_gradients(model)
    for optimizer in optim.make(model, "muon", 0.1, 0.1):  # which imports what may hold the group
        optimizer.step()
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
    expected = (True, 1, [1.0, 2.5], ["x"], "y", "z", "e", False)
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
