"""Distributed helpers, with real gloo processes: exact sums, and decisions shared by all ranks."""
import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import environment, free_port, script, start
from torch import nn

from common import dist
from common.config import UserError

# Values

def exchange():
    values = [[1.0, 0.0, 5.0], [7.0]][dist.rank()]  # rank 0 has more values, one of them 0
    tiny = [2.0**20, 2.0**-30][dist.rank()]
    return (
        dist.all_sum([sum(values), len(values), 0.0, tiny]),
        dist.all_gather(("value", dist.rank())),
    )


def test_sums_over_unevenly_filled_ranks_are_exact_and_values_reach_every_rank(on_ranks):
    sums = [13.0, 4.0, 0.0, 2.0**20 + 2.0**-30]  # float32 would round the last sum
    assert on_ranks(2, exchange) == [(sums, [("value", 0), ("value", 1)])] * 2


def alone():
    with dist.listening():
        dealt = [*dist.my_share(3)]
    values = dist.all_gather("x"), dist.on_all(lambda: "y"), dist.on_main(lambda: "z")
    tensor = torch.ones(2)
    dist.broadcast_tensor(tensor)
    assert tensor.tolist() == [1, 1]
    return dealt, values, dist.all_sum([1, 2.5]), torch.distributed.is_initialized()


def test_a_single_process_needs_no_group(on_ranks):
    expected = ([0, 1, 2], (["x"], "y", "z"), [1.0, 2.5], False)
    assert alone() == expected  # under plain python
    assert on_ranks(1, alone) == [expected]  # under torchrun


# Work and its errors

def outcome(way, failing=()):
    """The outcome on this rank: a result, a message, or None if it exits silently.

    failing: ranks where the work fails.
    """
    def work():
        if dist.rank() in failing:
            kind = UserError if dist.rank() % 2 else OSError
            raise kind(f"rank {dist.rank()}")
        return dist.rank()

    try:
        return way(work)
    except (UserError, OSError) as error:
        return str(error)
    except SystemExit as end:
        assert end.code == 1
        return None


def outcomes():
    found = []
    for failing in ((), (0,), (1, 2)):
        for way in (dist.on_all, dist.on_main):
            found.append(outcome(way, failing))
            assert dist.all_sum([1.0]) == [3.0]  # the ranks are still in sync
    return [*found, outcome(lambda work: dist.fail("all"))]


def test_of_work_that_fails_one_rank_raises_the_error_and_all_ranks_end(on_ranks):
    """Promise 6: all ranks end together."""
    first, second, third = on_ranks(3, outcomes)
    # Work fails on no rank, then on rank 0, then on ranks 1 and 2, where on_main does not run it.
    assert first == [0, 0, "rank 0", "rank 0", None, 0, "all"]
    assert second == [1, 0, None, None, "rank 1", 0, None]
    assert third == [2, 0, None, None, None, 0, None]


def meet_a_fault():
    def work():
        raise NameError("no such name")

    for way in (dist.on_all, dist.on_main):
        with pytest.raises(NameError, match="no such name"):
            way(work)


def test_a_programming_error_in_work_of_all_is_raised_as_it_is(on_ranks):
    assert on_ranks(1, meet_a_fault) == [None]


def shared_tensor():
    tensor = torch.arange(3) + 10 * dist.rank()
    dist.broadcast_tensor(tensor)
    return tensor.tolist()


def test_a_tensor_of_rank_0_reaches_every_rank_in_place(on_ranks):
    assert on_ranks(2, shared_tensor) == [[0, 1, 2]] * 2


# Tensors

def sum_up(bucket):
    """(sums over ranks of each rank's own gradients, gradients from dist.sum_gradients).

    Ranks have different numbers of chunks. One layer is never used, and another only on some ranks.
    """
    dist.BUCKET = bucket
    kernel = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    last = nn.Linear(2, 2).double()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.ModuleList([kernel, nn.Linear(2, 2), nn.Linear(2, 2), frozen, last])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    early = []  # size of the last layer's bucket, while the first layer has no gradient yet

    def gradients(context):
        model.zero_grad()
        for chunk in range(dist.rank() + 1):
            x = kernel(torch.full((1, 2, 2, 2), chunk + 1.0)).flatten(1)
            x.register_hook(lambda _: early.append(last.weight.grad.untyped_storage().nbytes()))
            if dist.rank() < 2:
                x = model[2](x)
            with context(model, chunk == dist.rank()):
                last(x.double()).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return [grad.flatten().tolist() for grad in grads]

    plain = gradients(lambda *_: contextlib.nullcontext())
    summed = gradients(dist.sum_gradients)
    assert kernel.weight.grad.stride() == kernel.weight.stride()
    assert frozen.weight.grad is None
    assert early[-1] == 48  # its weight and bias, in one buffer
    return [dist.all_sum(values) for values in plain], summed


@pytest.mark.parametrize("bucket", [60, 2**20])  # in three all-reduces or two
def test_gradients_are_summed_while_the_pass_goes_on_and_are_zero_where_there_are_none(
        bucket, on_ranks):
    for expected, summed in on_ranks(3, sum_up, bucket):
        assert summed == expected


# Signals

def places_of_stops(cases):
    """(steps taken, numbers dealt, signal) of this rank, for each of `cases`.

    A case is {rank: signal}. The signal comes in the fourth step, or, if its number is negative,
    after the second number dealt. dist.sum_gradients is not called, because a fork may sum
    gradients by other means.
    """
    places = []
    for case in cases:
        number = case.get(dist.rank(), 0)
        steps = 0
        dealt = []
        stopped = None
        try:
            with dist.listening():
                for _ in range(9):
                    if steps == 3 and number > 0:
                        os.kill(os.getpid(), number)
                    steps += 1
                    dist.stop_together()
                for i in dist.my_share(7):
                    dealt.append(i)
                    if len(dealt) == 2 and number < 0:
                        os.kill(os.getpid(), -number)
        except dist.Stopped as error:
            stopped = error.code - 128
        places.append((steps, dealt, stopped))
    return places


def test_a_signal_to_any_rank_stops_all_in_the_same_step_or_before_the_same_sample(on_ranks):
    number = signal.SIGHUP
    cases = [{0: number}, {1: number}, {0: -number}, {1: -number}]
    cases += [{0: signal.SIGTERM, 1: signal.SIGUSR1}, {}]  # two signals at once, then none
    for rank, places in enumerate(on_ranks(2, places_of_stops, cases)):
        expected = [(4, [], number)] * 2 + [(9, [rank, rank + 2], number)] * 2
        expected += [(4, [], signal.SIGTERM), (9, [*range(rank, 7, 2)], None)]
        assert places == expected


def test_nothing_is_stopped_outside_the_context_and_handlers_are_what_they_were():
    before = [signal.getsignal(number) for number in dist.SIGNALS]
    with pytest.raises(ZeroDivisionError), dist.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        1 / 0  # noqa: B018 (an error ends the context)
    assert [signal.getsignal(number) for number in dist.SIGNALS] == before
    assert [*dist.my_share(3)] == [0, 1, 2]


TWICE = """
import os, signal, sys
from common import dist
with dist.listening():
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
    print("still here", flush=True)
"""


@pytest.mark.parametrize("names, status, out", [
    (("SIGINT", "SIGINT"), -signal.SIGINT, ""),
    # A scheduler signals torchrun and its ranks, and torchrun forwards it: ranks get two.
    (("SIGTERM", "SIGTERM"), 0, "still here\n"),
])
def test_whatever_comes_after_a_ctrl_c_ends_at_once(names, status, out):
    found = script(TWICE, *names)
    assert found[:2] == (status, out), found


# The start and the end of the group

LEAVE = """
import os
import torch
from common import dist, optim

def work():
    model = torch.nn.Linear(2, 2)
    with dist.sum_gradients(model):
        model(torch.ones(1, 2)).sum().backward()
    for optimizer in optim.make(model, "muon", 0.1, 0.1):  # its imports may keep the group alive
        optimizer.step()
    model.around = [model]  # a reference cycle, which only the garbage collector frees

def has_threads():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    return any("gloo" in name for name in names)

dist.setup("cpu")
work()
print(has_threads())
dist.teardown()
print(has_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_thread_of_the_group_outlives_it_and_aborts_the_process_at_its_end():
    port = free_port()
    outputs = []
    for process in [start("-c", LEAVE, **environment(rank, 2, port)) for rank in range(2)]:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        outputs.append(out.splitlines()[-2:])
    if torch.__version__ < "2.13" and outputs == [["False", "False"]] * 2:
        pytest.skip("this torch gives these threads no names")
    assert outputs == [["True", "False"]] * 2


@pytest.mark.parametrize("variables, message", [
    ({"WORLD_SIZE": "2"}, "variable RANK expected, but not set"),
    (environment(0, 2, free_port()), "[Tt]imed out"),  # rank 1 never joins
])
def test_a_group_that_does_not_come_together_is_one_line(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^cannot reach the other ranks .*{message}.*$"):
        dist.setup("cpu", timeout_minutes=0.02)


def test_a_task_of_slurm_without_torchrun_is_told_to_use_it(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    for rank in (None, "0"):
        if rank:
            monkeypatch.setenv("RANK", rank)
        dist.setup("cpu")
        assert ("let srun start torchrun" in capsys.readouterr().err) == (rank is None)


# Devices

@pytest.mark.parametrize("threads, expected", [("1", [4]), ("3", [])])
def test_ranks_of_a_machine_share_its_cores_unless_their_number_was_chosen(
        threads, expected, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    dist.setup("cpu")
    assert chosen == expected


@pytest.mark.parametrize("gpus, mps, best, out", [
    (0, True, "mps", ""),
    (0, False, "cpu", ""),
    (1, False, "cpu", "note: 2 processes, but 1 GPU(s): computing on the CPU\n"),
])
def test_the_best_device_is_taken_that_all_ranks_have(gpus, mps, best, out, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus + 1))
    assert [dist.setup(name).type for name in ("auto", best, "cpu")] == [best, best, "cpu"]
    assert capsys.readouterr().err == out


@pytest.mark.parametrize("device, message", [
    ("cuda", "no GPU for rank 2 of this machine, which has 2; lower --nproc_per_node or"),
    ("mps", "this machine has none; use --device cpu"),
])
def test_a_device_that_is_not_there_is_refused_with_a_way_out(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=f"--device {device}: {message}"):
        dist.setup(device)


# Runs in its own process, because it changes torch's global settings. It needs no GPU.
ON_GPU = """
import torch
from common import dist

torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda number: None
for options in ({}, {"deterministic": False}):
    device = dist.setup("cuda", **options)
    print(device, torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
"""


def test_on_a_gpu_bits_repeat_unless_cudnn_may_look_for_faster_kernels():
    """Promise 9: results repeat."""
    status, out, err = script(ON_GPU)
    assert status == 0, err
    assert out == "cuda:0 True False\ncuda:0 False True\n"
