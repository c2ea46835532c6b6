"""Processes: the group from torchrun's variables, gradient averaging, exact sums over ranks, ranks kept in step.

Everything here also works in a single process started with plain `python`, where it does nothing.
"""
import atexit
import contextlib
import ctypes
import datetime
import gc
import hashlib
import os
import threading
import warnings

import torch
import torch.distributed as td
import torch.distributed.nn  # its default arguments would keep alive a group that is there before it
from torch.nn.parallel import DistributedDataParallel

from common.config import UserError


def rank():
    """Number of this process among all (0 without torchrun)."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """Number of processes (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main():
    """Whether this process logs, writes and decides."""
    return rank() == 0


def cores():
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def setup(device="auto", timeout_minutes=30):
    """Join the process group that torchrun describes, until the process ends; returns this rank's torch.device.

    `device` is auto, cuda, mps or cpu; auto takes the first of these that is there (mps for a single process only). On
    the CPU each of the machine's ranks takes its share of the cores, where torchrun would give it one.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and torch.backends.mps.is_available() and world_size() == 1:
            device = "mps"
    local_rank, local_size = (int(os.environ.get(f"LOCAL_{name}", default)) for name, default in
                              (("RANK", 0), ("WORLD_SIZE", 1)))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"--device cuda: rank {local_rank} of this machine has no GPU, {torch.cuda.device_count()} "
                            "found; lower --nproc_per_node or use --device cpu")
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")
        device = torch.device("cuda", local_rank)
    elif device == "mps" and (world_size() > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps: there is none on this machine, or more than one process; use --device cpu")
    else:
        device = torch.device(device)
        if local_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's default, not a wish
            torch.set_num_threads(max(1, cores() // local_size))
        keep_memory()
    if world_size() > 1:
        td.init_process_group("nccl" if device.type == "cuda" else "gloo",
                              timeout=datetime.timedelta(minutes=timeout_minutes))
        atexit.register(teardown)
    return device


def keep_memory():
    """Let the C library keep freed memory for the next tensor, as torch's GPU allocator does.

    By default glibc returns large blocks to the system, and every step pays for having them cleared and mapped again:
    a tenth to a fifth of a training step on the CPU.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to tune
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large request
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD: do not hand the top of the heap back


def touch_memory(size):
    """Have a thread touch `size` bytes, for `keep_memory` to keep: later, new memory would take many times as long.

    They are asked for here: the C library hands what a thread asked for to that thread alone, and one pool for all
    threads (M_ARENA_MAX) would have them wait for each other, which triples attention's backward pass in bf16.
    """
    threading.Thread(target=torch.empty(size, dtype=torch.uint8).zero_).start()


def teardown():
    """Leave the process group, and wait for its threads: one that still holds a tensor when Python ends aborts it."""
    if td.is_initialized():
        td.destroy_process_group()
        gc.collect()  # wrapped models and what they refer to; the last reference to the group joins the threads


def wrap(model, device):
    """`model` with gradients averaged over the ranks. Buffers are not broadcast: who changes one keeps ranks alike."""
    if world_size() == 1:
        return model
    # of a convolution of one channel, whose memory order is any: raised in the first backward pass
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # its successor is not in torch 2.10
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None,
                                       broadcast_buffers=False, gradient_as_bucket_view=True)


def sync_if(model, condition):
    """Context of a backward pass that averages gradients over ranks only if `condition` holds."""
    return contextlib.nullcontext() if condition or world_size() == 1 else model.no_sync()


def broadcast(value):
    """Rank 0's `value`, a plain Python object, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    td.broadcast_object_list(box, src=0, device=_device())
    return box[0]


def on_main(work):
    """Run `work()` on rank 0 while the others wait; its plain result, or its UserError, comes to every rank."""
    return broadcast(_agreed(work, is_main()))


def on_each(work):
    """Run `work()` on every rank and return its own result, which need not be plain; no collectives in it.

    Rank 0 goes first: what it downloads the others find. The first rank's UserError comes to every rank, told once.
    """
    first, later = _agreed(work, is_main()), _agreed(work, not is_main())
    return first if is_main() else later


def at_once(work):
    """As `on_each`, but on all ranks at the same time."""
    return _agreed(work, True)


def _agreed(work, mine):
    """The result of `work()` if it is `mine`, else None; if it fails on any rank, UserError on every rank."""
    result, error = None, None
    if mine:
        try:
            result = work()
        except (UserError, OSError) as caught:
            error = caught
    for number, message in enumerate(gather(None if error is None else str(error))):
        if message is not None:
            failure = UserError(message)
            failure.relayed = rank() != number  # that rank prints it
            raise failure from error
    return result


def total(values):
    """Sums over all ranks of a list of numbers, in float64: add sums and counts here, then divide once.

    So a mean over unevenly filled ranks is exact, and a true zero counts.
    """
    values = torch.tensor(values, dtype=torch.float64, device=_device() if world_size() > 1 else "cpu")
    if world_size() > 1:
        td.all_reduce(values)
    return values.tolist()


def gather(value):
    """The list of every rank's plain `value`, in the order of ranks, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    td.all_gather_object(values, value)
    return values


def check_in_step(model, step):
    """Raise RuntimeError on every rank unless all ranks are at `step` with bit for bit the same parameters."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().flatten().view(torch.uint8).numpy())
    everyone = gather((step, digest.hexdigest()[:16]))
    if any(one != everyone[0] for one in everyone):
        raise RuntimeError(f"the ranks have drifted apart at step {step}: (step, checksum) by rank: {everyone}")


def _device():
    return torch.device("cuda", torch.cuda.current_device()) if td.get_backend() == "nccl" else torch.device("cpu")
