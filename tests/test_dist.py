"""Processes: exact sums, one decision for all, ranks kept in step; with real gloo processes."""
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import environment, free_port
from torch import nn

from common import dist
from common.config import UserError

CORES = dist.available_cores()


# Values

def exchange():
    values = [[1.0, 0.0, 5.0], [7.0]][dist.rank()]  # more on one rank, and a true zero
    tiny = [2.0 ** 20, 2.0 ** -30][dist.rank()]
    return (
        dist.total([sum(values), len(values), 0.0, tiny]),
        dist.gather({"rank": dist.rank()}),
        dist.broadcast(("first", dist.rank())),
    )


def test_sums_over_unevenly_filled_ranks_are_exact_and_values_reach_every_rank(on_ranks):
    sums = [13.0, 4.0, 0.0, 2.0 ** 20 + 2.0 ** -30]  # float32 would lose the last one
    expected = (sums, [{"rank": 0}, {"rank": 1}], ("first", 0))
    assert on_ranks(2, exchange) == [expected] * 2


def alone():
    dist.check_in_step({"model": nn.Linear(2, 2)}, 1)
    return (
        dist.is_main(),
        dist.world_size(),
        dist.total([1, 2.5]),
        dist.gather("x"),
        dist.broadcast("y"),
        dist.on_main(lambda: "z"),
        dist.main_first(lambda: "e"),
        torch.distributed.is_initialized(),
    )


def test_a_single_process_needs_no_group(on_ranks):
    expected = (True, 1, [1.0, 2.5], ["x"], "y", "z", "e", False)
    assert alone() == expected  # by plain python
    assert on_ranks(1, alone) == [expected]  # by torchrun


# Work and its errors

def fail_on_main(kind, *arguments):
    done = []
    assert dist.on_main(lambda: done.append(dist.rank()) or "result") == "result"

    def fail():
        raise kind(*arguments)

    with pytest.raises(UserError) as caught:
        dist.on_main(fail)
    return done, str(caught.value), dist.total([1.0])  # the ranks still work together


@pytest.mark.parametrize("error, message", [
    ((UserError, "no such data"), "no such data"),
    ((OSError, 28, "No space left", "x.pt"), "[Errno 28] No space left: 'x.pt'"),
])
def test_work_for_rank_0_is_done_once_and_its_errors_reach_every_rank(error, message, on_ranks):
    ranks = on_ranks(2, fail_on_main, *error)
    assert ranks == [([0], message, [2.0]), ([], message, [2.0])]


def wait_for_a_download(seconds):
    dist.collective_timeout = timedelta(seconds=1)
    dist.set_timeout(dist.collective_timeout)
    found = dist.on_main(lambda: time.sleep(seconds) or "downloaded")
    if dist.is_main():
        time.sleep(seconds)  # a rank that hangs
        return found
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        dist.gather("x")
    return found


def test_ranks_wait_for_a_download_longer_than_for_a_rank_that_hangs(on_ranks):
    assert on_ranks(2, wait_for_a_download, 3) == ["downloaded"] * 2


def on_each(folder, failing):
    downloaded = Path(folder, "downloaded")

    def work():
        if dist.is_main():
            downloaded.touch()
        assert downloaded.exists()
        if dist.rank() in failing:
            kind = UserError if dist.rank() % 2 else OSError
            raise kind(f"rank {dist.rank()}")
        return dist.rank  # which could not be sent to another

    try:
        found = dist.main_first(work)()
    except UserError as error:
        found = str(error), error.relayed
    return found, dist.total([1.0])


@pytest.mark.parametrize("failing, found", [
    ((), [0, 1, 2]),
    ((1, 2), [("rank 1", True), ("rank 1", False), ("rank 1", True)]),
    ((0, 2), [("rank 0", False), ("rank 0", True), ("rank 0", True)]),
])
def test_rank_0_works_first_and_of_errors_the_first_is_printed_by_its_rank_alone(
        failing, found, on_ranks, tmp_path):
    expected = [(value, [3.0]) for value in found]
    assert on_ranks(3, on_each, str(tmp_path), failing) == expected


def meet():
    return dist.run_together(lambda: dist.gather(dist.rank()))


def test_work_done_at_once_is_done_at_the_same_time(on_ranks):
    assert on_ranks(2, meet) == [[0, 1]] * 2  # one after the other, the first would wait in vain


# Ranks in step

def add_ulp(weight, codec):
    weight[0] = torch.nextafter(weight[0], torch.tensor(1.0))


def swap(weight, codec):
    weight[:2] = weight[:2].flip(0)


def change_buffer(weight, codec):
    codec.usage[2] = 1


def drift(change):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    codec = nn.Linear(2, 2).bfloat16()
    codec.register_buffer("usage", torch.zeros(3), persistent=False)
    modules = {"model": model, "codec": codec}
    weight = model.weight.data.view(-1)
    weight[:2] = torch.tensor([1e-20, 0.5])  # a drift of the first does not show in the sum of all
    dist.check_in_step(modules, 3)
    if dist.rank() == 1 and change:
        change(weight, codec)
    step = 4 if change else 4 + dist.rank()
    with pytest.raises(RuntimeError) as caught:
        dist.check_in_step(modules, step)
    return str(caught.value)


@pytest.mark.parametrize("change, differing", [
    (add_ulp, "model of rank 1"),
    (swap, "model of rank 1"),
    (change_buffer, "codec of rank 1"),
    (None, "step of rank 1"),
])
def test_ranks_that_differ_in_one_bit_of_a_module_or_in_the_step_are_found_out(
        change, differing, on_ranks):
    for message in on_ranks(2, drift, change):
        expected = rf"the ranks have drifted apart by step \d: {differing} not as on rank 0"
        assert re.fullmatch(expected, message)


# Tensors

def sum_up():
    used = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.ModuleList([used, nn.Linear(2, 2), frozen])
    used.weight.grad = torch.full_like(used.weight, 10.0 ** dist.rank())
    dist.sum_gradients(model)
    assert used.weight.grad.stride() == used.weight.stride()
    assert frozen.weight.grad is None
    return [p.grad.unique().tolist() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("ranks, total", [(1, 1.0), (3, 111.0)])
def test_gradients_are_summed_where_they_lie_and_are_zero_where_there_are_none(
        ranks, total, on_ranks):
    assert on_ranks(ranks, sum_up) == [[[total], [0.0], [0.0], [0.0]]] * ranks


# Signals

def steps_until_stopped(kind, number):
    """(steps taken, numbers dealt, signal), of a rank.

    The signal comes to rank 1 at its fourth step, or at its second number.
    """
    model = nn.Linear(2, 2)
    steps = 0
    dealt = []
    try:
        with dist.stop_signals:
            for _ in range(9):
                dist.stop_signals.check()
                if kind == "step" and dist.rank() == 1 and steps == 3:
                    os.kill(os.getpid(), number)
                dist.sum_gradients(model)
                steps += 1
            for i in dist.deal(7):
                dealt.append(i)
                if kind == "deal" and dealt == [1, 3]:
                    os.kill(os.getpid(), number)
    except dist.Stopped as stopped:
        return steps, dealt, stopped.number
    return steps, dealt, None


@pytest.mark.parametrize("kind, number, steps, dealt", [
    ("step", signal.SIGTERM, 4, ([], [])),
    ("deal", signal.SIGINT, 9, ([0, 2], [1, 3])),
    ("none", None, 9, ([0, 2, 4, 6], [1, 3, 5])),
])
def test_a_signal_to_one_rank_stops_all_at_the_same_place(kind, number, steps, dealt, on_ranks):
    expected = [(steps, numbers, number) for numbers in dealt]
    assert on_ranks(2, steps_until_stopped, kind, number) == expected


def test_a_gpu_is_not_waited_for_as_its_signals_are_checked_a_step_later(monkeypatch):
    calls = []
    event = SimpleNamespace(
        record=lambda: calls.append("record"), synchronize=lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def receive(count):
        message = torch.tensor([count, 0.0])
        dist.stop_signals.receive(SimpleNamespace(is_cuda=True, to=lambda *_, **__: message))

    with dist.stop_signals:
        for count in (0.0, 1.0):
            receive(count)
            dist.stop_signals.check()
        receive(0.0)
        assert calls == ["record", "record", "synchronize", "record"]
        with pytest.raises(dist.Stopped, match="SIGTERM"):
            dist.stop_signals.check()


def test_nothing_is_stopped_outside_the_context_and_handlers_are_what_they_were():
    before = [signal.getsignal(number) for number in dist.SIGNALS]
    with pytest.raises(ZeroDivisionError), dist.stop_signals:
        os.kill(os.getpid(), signal.SIGTERM)
        1 / 0  # noqa: B018 (however it ends)
    assert [signal.getsignal(number) for number in dist.SIGNALS] == before
    assert [*dist.deal(3)] == [0, 1, 2]


TWICE = """
import os, signal, sys
from common import dist
with dist.stop_signals:
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
    print("still here", flush=True)
"""


@pytest.mark.parametrize("names, status, out", [
    (("SIGINT", "SIGTERM"), -signal.SIGTERM, ""),
    # A scheduler signals torchrun and its ranks, and torchrun passes it on.
    (("SIGTERM", "SIGTERM"), 0, "still here\n"),
])
def test_whatever_comes_after_a_ctrl_c_ends_at_once(names, status, out, script):
    process = script(TWICE, *names)
    assert (process.returncode, process.stdout) == (status, out), process.stderr


# The end of the group

LEAVE = """
import os, sys
os.environ.update(line.split("=") for line in sys.argv[1:])
import torch
from common import dist, optim

def work():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    dist.sum_gradients(model)
    for optimizer in optim.make(model, "muon", 0.1, 0.1):  # which imports what may hold the group
        optimizer.step()
    model.around = [model]  # the group is held in a circle, which only the garbage collector finds

def has_threads():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    return any("gloo" in name for name in names)

dist.setup("cpu")
work()
print(has_threads())
dist.teardown()
print(has_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the threads of Linux")
def test_no_thread_of_the_group_outlives_it_and_aborts_the_process_at_its_end(script):
    port = free_port()
    processes = []
    for rank in range(2):
        variables = environment(rank, 2, port).items()
        processes.append(script(LEAVE, *map("=".join, variables), wait=False))
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "True\nFalse\n"), err


# Variables

@pytest.mark.parametrize("variables, message", [
    ({"RANK": "x"}, "RANK=x: expected a number"),
    ({"RANK": ""}, "RANK=: expected a number"),
    ({"RANK": "-1"}, "RANK=-1: expected a number"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: expected a number"),
    ({"WORLD_SIZE": "0"}, "RANK=0 of WORLD_SIZE=0: start all ranks by torchrun"),
    ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK=1.5: expected a number"),
    ({"RANK": "1"}, "RANK=1 of WORLD_SIZE=1: start all ranks by torchrun"),
    ({"WORLD_SIZE": "2"}, "variable RANK expected, but not set"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "variable MASTER_ADDR expected, but not set"),
    (environment(0, 2, "x"), "start all ranks by torchrun; invalid literal"),
    (environment(0, 2, free_port()), "start all ranks by torchrun; "),  # the other one never comes
])
def test_variables_that_torchrun_would_not_set_are_one_line(variables, message, script):
    program = """
import os, sys
os.environ.update(line.split("=") for line in sys.argv[1:])
from common import config, dist
sys.argv[1:] = []
config.run({"join": (lambda cfg: dist.setup("cpu", 0.02), config.Settings)}, "usage", "join")
"""
    process = script(program, *map("=".join, variables.items()))
    assert process.returncode == 1
    line = process.stderr.splitlines()[-1]
    assert line.startswith("-c: error: ") and message in line
    assert "Traceback" not in process.stderr


# Devices

@pytest.mark.parametrize("ranks, threads, expected", [
    (2, "1", max(1, CORES // 2)),
    (3 * CORES, "1", 1),
    (1, "1", 7),
    (2, "3", 7),
])
def test_ranks_of_a_machine_share_its_cores_unless_their_number_was_chosen(
        ranks, threads, expected, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    chosen = [7]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    dist.setup("cpu")
    assert chosen[-1] == expected


@pytest.mark.parametrize("available, best", [(True, "mps"), (False, "cpu")])
def test_the_device_is_the_one_named_or_the_best_there_is(available, best, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
    for name in ("auto", best):
        assert dist.setup(name) == torch.device(best)
    assert dist.setup("cpu") == torch.device("cpu")


@pytest.mark.parametrize("gpus, launcher", [(1, "python"), (3, "torchrun --nproc_per_node=3")])
def test_more_ranks_than_gpus_compute_on_the_cpu_and_say_how_to_use_the_gpu(
        gpus, launcher, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus + 1))
    monkeypatch.setattr("sys.argv", ["train_prior.py"])
    assert dist.setup("auto") == torch.device("cpu")
    assert capsys.readouterr().out.endswith(f"To use the GPU: {launcher} train_prior.py\n")


@pytest.mark.parametrize("device, mps, ranks, message", [
    ("cuda", False, 1, "rank 2 of this machine has no GPU, 2 found; lower --nproc_per_node or use"),
    ("mps", True, 2, "there is none on this machine, or more than one process; use --device cpu"),
    ("mps", False, 1, "there is none"),
])
def test_a_device_that_is_not_there_is_refused_with_a_way_out(
        device, mps, ranks, message, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=f"--device {device}: {message}"):
        dist.setup(device)
