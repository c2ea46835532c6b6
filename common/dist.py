"""Data-parallel training without DDP: process group, sums over ranks, stopping all ranks together.

A single process exchanges nothing.
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

# Import this before the group exists. Otherwise its default arguments would keep the group alive.
import torch.distributed.nn

from common.config import UserError, explained, is_main, note

# Sent by clusters and terminals before they end a process; Windows lacks the last two.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def rank():
    """Rank of this process (0 without torchrun)."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """Number of processes (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", 1))


# The process group


def setup(device="auto", timeout_minutes=30.0, deterministic=True):
    """Join torchrun's process group until the process exits; returns this rank's torch.device.

    deterministic: see `choose_device`.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # PR_SET_PDEATHSIG: if torchrun is killed, its ranks get SIGTERM and stop training.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.environ.get("SLURM_NTASKS", "1") != "1" and "RANK" not in os.environ:
        note("this Slurm task trains alone; to use several, let srun start torchrun on each node")
    device = choose_device(device, deterministic)
    if world_size() > 1:
        # Stop signals and plain values are exchanged on the CPU over gloo, even with GPUs.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() else "gloo"
        timeout = timedelta(minutes=timeout_minutes)
        with explained("cannot reach the other ranks"):
            td.init_process_group(backend, timeout=timeout)
        atexit.register(teardown)
    return device


def choose_device(device="auto", deterministic=True):
    """This process's torch.device, set up for use.

    Commands of a single process call this instead of `setup`, so that they do not wait for other
    ranks in containers that set WORLD_SIZE. deterministic: GPU results repeat bit for bit, even
    across a resume; otherwise, cuDNN times its kernels and picks the fastest.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine
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
                f"--device cuda: no GPU for rank {local_rank} of this machine, which has {gpus}; "
                "lower --nproc_per_node or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")  # TF32
        # Without this variable, cuBLAS does not repeat results bit for bit.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling costs time
        torch.backends.cudnn.benchmark = not deterministic
        device = f"cuda:{local_rank}"
    elif device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine has none; use --device cpu")
    elif local_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        # 1 thread is torchrun's default. Divide the cores among the ranks instead.
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
            cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_size))
    return torch.device(device)


def teardown():
    """Leave the process group and wait for its threads.

    A thread that still holds a tensor when Python exits would abort the process.
    """
    if td.is_initialized():
        td.destroy_process_group()
        gc.collect()  # freeing the last reference to the group joins its threads


# Stops


class Stopped(SystemExit):
    """Raised on every rank at the same step once any rank receives a signal.

    The caller saves and exits. `code`, the exit status, is 128 plus the number of the signal.
    """


# The last signal that this process received: 0 before the first, None outside `listening`.
received = None


@contextlib.contextmanager
def listening():
    """Context in which SIGNALS do not end the process: `stop_together` handles them.

    A second Ctrl-C ends the process at once. Signals that were ignored stay ignored, such as SIGHUP
    under nohup. Only the main thread can listen.
    """
    global received
    received = 0
    handlers = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not in the main thread
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
        signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process


def stop_together():
    """Raise Stopped on all ranks if any rank received a signal. Collective, but on the CPU.

    Call it at every step rather than only at log lines, which may be too far apart: torchrun kills
    the ranks 30 s after it forwards a signal.
    """
    if received is None:
        return
    newest = torch.tensor(received)
    if world_size() > 1:
        td.all_reduce(newest, td.ReduceOp.MAX)
    if newest:
        raise Stopped(128 + int(newest))


def my_share(count):
    """Yield this rank's numbers below `count`: rank, rank + world_size, …

    Within `listening` this is collective: it calls `stop_together` before each number.
    """
    for first in range(0, count, world_size()):
        stop_together()
        if first + rank() < count:
            yield first + rank()


# Tensors


BUCKET = 25 * 2**20  # bytes of parameters whose gradients share an all-reduce


@contextlib.contextmanager
def sum_gradients(module, last=True):
    """Context around a backward pass. For a rank's `last` chunk, it sums gradients over all ranks.

    Gradients are all-reduced in buckets during the backward pass, starting with those of the last
    parameters. A gradient of None counts as zeros. Buckets and their order depend only on the
    parameters, so that a run resumes bit for bit. (DistributedDataParallel rebuilds its buckets
    after the first step.)

    To use DistributedDataParallel instead, wrap the model in it after `resume.restore`, and call
    the wrapper where the loss calls the model. For all chunks but the last, run the loss and the
    backward pass inside its `no_sync()`. It averages over ranks, so multiply the loss by
    world_size(). For FSDP, also change the EMA, the clipping in amp.step, and
    `resume.State.contents`.
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
        # Buckets are reduced in the same order on all ranks. waiting[-1] has the last parameters,
        # whose gradients are ready first.
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
        arrived(*parameters)  # including parameters that got no gradient
    for work in works:
        work.wait()


def all_reduce_gradients(parameters):
    """Start summing the gradients of `parameters` over all ranks; returns the work to wait for.

    The gradients become views of one flat tensor, so there is no second copy of them. Each keeps
    the memory layout of its parameter.
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
    """Overwrite `tensor` on every rank with rank 0's values."""
    if world_size() > 1:
        td.broadcast(tensor, src=0)


# Plain values, and functions that may fail


def all_gather(value):
    """Collect the plain `value` of every rank; returns a list in order of rank, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        td.all_gather_object(values, value)
    return values


def all_sum(values):
    """Sum lists of numbers over all ranks, elementwise, in float64. Collective."""
    return [sum(of_ranks, 0.0) for of_ranks in zip(*all_gather(values))]


def fail(message):
    """End all ranks with one message, a UserError on rank 0. Every rank must call this."""
    if is_main():
        raise UserError(message)
    raise SystemExit(1)


def on_all(work):
    """Run `work()` on every rank and return each rank's own result. `work` is not collective.

    If it raises a UserError or OSError on some ranks, all ranks exit, and the first rank that
    failed raises its error.
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
    """Run `work()` only on rank 0; every rank gets the plain result. Errors: see `on_all`."""
    result = on_all(lambda: work() if is_main() else None)
    return all_gather(result)[0]
