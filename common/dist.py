"""Data parallel training (DDP) by hand: torchrun's group, sums over ranks, one stop for all.

In a single process there is nothing to exchange.
"""

import atexit
import collections
import contextlib
import ctypes
import gc
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as td

# Imported before there is a group, which its default arguments would keep alive.
import torch.distributed.nn

from common.config import UserError, explained, is_main, note

# What clusters and terminals send before they take a machine away; Windows lacks the last two.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def rank():
    """Number of this process among all (0 without torchrun)."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """Number of processes (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", 1))


# The process group


def setup(device="auto", timeout_minutes=30.0, deterministic=True):
    """Join torchrun's process group until the process ends; returns this rank's torch.device.

    deterministic: GPUs compute the same bits in every run, and after a resume. Else cuDNN tries
    which of its kernels are the fastest.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # PR_SET_PDEATHSIG: a rank whose torchrun was killed gets SIGTERM, and does not train on.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.environ.get("SLURM_NTASKS", "1") != "1" and "RANK" not in os.environ:
        note("a task of Slurm, which trains alone; for ranks, let srun start torchrun on each node")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks of this machine
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cpu"
        if gpus >= local_size:
            device = "cuda"
        elif torch.backends.mps.is_available() and world_size() == 1:
            device = "mps"
        if gpus and device == "cpu":
            note(f"{local_size} processes, but {gpus} GPU(s): computing on the CPU")
    if device == "cuda":
        if local_rank >= gpus:
            raise UserError(
                f"--device cuda: rank {local_rank} of this machine has no GPU, {gpus} found; "
                "lower --nproc_per_node or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")  # TF32
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which costs time
        torch.backends.cudnn.benchmark = not deterministic
        device = f"cuda:{local_rank}"
    elif device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: there is none on this machine; use --device cpu")
    elif local_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        # That is torchrun's default. The ranks share the cores instead.
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # those that this process may use
            cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_size))

    if world_size() > 1:
        # Gloo is for what the hosts agree on, also where gradients are on GPUs.
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        timeout = timedelta(minutes=timeout_minutes)
        with explained("cannot reach the other ranks"):
            td.init_process_group(backend, timeout=timeout)
        atexit.register(teardown)
    return torch.device(device)


def teardown():
    """Leave the process group and wait for its threads.

    A thread that still holds a tensor when Python ends would abort the process.
    """
    if td.is_initialized():
        td.destroy_process_group()
        gc.collect()  # the last reference to the group joins its threads


# Stops


class Stopped(SystemExit):
    """Raised on every rank at the same step once any rank receives a signal.

    The caller saves and exits. `code`, the exit status, is 128 plus the number of the signal.
    """


# The newest signal to this process, 0 for none yet; None while nobody listens.
received = None


@contextlib.contextmanager
def listening():
    """Context in which SIGNALS are noted, for `stop_together`, and do not end the process.

    A second Ctrl-C ends it at once. What is ignored, as SIGHUP by nohup, stays so. A thread that is
    not the main one cannot listen.
    """
    global received
    received = 0
    handlers = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # as in a notebook's thread
                handlers[number] = signal.signal(number, note_signal)
    try:
        yield
    finally:
        received = None
        for number, handler in handlers.items():
            signal.signal(number, handler)


def note_signal(number, frame):
    global received
    received = number
    if number == signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)


def stop_together():
    """Raise Stopped on all ranks if any was sent a signal. Collective, by the hosts alone.

    Ranks agree on it at every step, whatever sums the gradients: torchrun kills them 30 s after it
    passes a signal on, and log lines may be further apart.
    """
    if received is None:
        return
    newest = torch.tensor(received)
    if world_size() > 1:
        td.all_reduce(newest, td.ReduceOp.MAX)
    if newest:
        raise Stopped(128 + int(newest))


def my_share(count):
    """This rank's numbers below `count`: rank, rank + world_size, …

    While they listen for signals, all ranks meet before each: `stop_together`.
    """
    for first in range(0, count, world_size()):
        stop_together()
        if first + rank() < count:
            yield first + rank()


# Tensors


BUCKET = 25 * 2**20  # bytes of gradients in an all-reduce


@contextlib.contextmanager
def sum_gradients(module, last=True):
    """Context of a backward pass; in that of a rank's `last` chunk, gradients add up over ranks.

    Buckets of gradients, those of the last parameters first, are all-reduced while the pass goes on
    with the others. None counts as zeros. Buckets and their order follow from the parameters alone,
    so a run resumes bit for bit: DistributedDataParallel makes others after the first step.

    For DistributedDataParallel instead, wrap the model in it after `resume.restore`, and call the
    wrapper where the loss calls the model. Loss and backward pass of all chunks but the last are
    in its `no_sync()`. It takes means, so multiply the loss by world_size(). FSDP needs another
    EMA, another clipping in amp.step, and another `resume.State.contents`, too.
    """
    if not last:
        yield
        return
    parameters = [p for p in module.parameters() if p.requires_grad]
    buckets = collections.defaultdict(list)
    position = 0
    for parameter in parameters:
        buckets[parameter.dtype, position // BUCKET].append(parameter)
        position += parameter.nbytes
    waiting = list(buckets.values())
    ready = set()
    works = []

    def arrived(*parameters):
        ready.update(parameters)
        # waiting[-1] has the last parameters, whose gradients come first. All ranks keep to one
        # order of buckets.
        while waiting and ready.issuperset(waiting[-1]):
            works.append(all_reduce_gradients(waiting.pop()))

    hooks = []
    if world_size() > 1:
        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if hooks:
        arrived(*parameters)  # also those without a gradient
    for work in works:
        work.wait()


def all_reduce_gradients(parameters):
    """Start to add up the gradients of `parameters` over the ranks; returns the work to wait for.

    They move into one tensor, where each is laid out as its parameter is. So there is no second
    copy of all gradients.
    """
    flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
    offset = 0
    for parameter in parameters:
        part = flat.as_strided(parameter.shape, parameter.stride(), offset)
        part.copy_(parameter.grad)
        parameter.grad = part
        offset += parameter.numel()
    return td.all_reduce(flat, async_op=True)


def broadcast_tensor(tensor):
    """Give every rank what `tensor` is on rank 0, in place."""
    if world_size() > 1:
        td.broadcast(tensor, src=0)


# Plain values, and work that may fail


def all_gather(value):
    """The list of every rank's plain `value`, in the order of ranks, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        td.all_gather_object(values, value)
    return values


def all_sum(values):
    """Sums over all ranks of a list of numbers, as Python adds them, in float64. Collective."""
    return [sum(of_ranks, 0.0) for of_ranks in zip(*all_gather(values))]


def fail(message):
    """End all ranks, which call this at the same place, with one message: a UserError of rank 0."""
    if is_main():
        raise UserError(message)
    raise SystemExit(1)


def on_all(work):
    """Run `work()`, without collectives, on every rank; each gets its own result.

    If it fails on one rank by a UserError or OSError, all ranks exit and that one raises the error.
    """
    result = None
    failure = None
    try:
        result = work()
    except (UserError, OSError) as error:
        failure = error
    failed = all_gather(failure is not None)
    if any(failed):
        if rank() == failed.index(True):
            raise failure
        raise SystemExit(1)
    return result


def on_main(work):
    """Run `work()` on rank 0 alone; every rank gets its plain result. Errors are as of `on_all`."""
    result = on_all(lambda: work() if is_main() else None)
    return all_gather(result)[0]
