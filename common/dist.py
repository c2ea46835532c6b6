"""Processes: torchrun's group, gradient averaging, sums over ranks. In a single process all of it does nothing."""
import atexit
import contextlib
import ctypes
import gc
import hashlib
import os
import signal
import sys
import warnings
from datetime import timedelta

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


def end_with_torchrun():
    """Let this process get SIGTERM when torchrun has been killed, which would leave it training alone."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


PARENT = os.getppid()


def orphaned():
    """Whether torchrun, which started this process, has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT


def setup(device="auto", timeout_minutes=30):
    """Join torchrun's process group until the process ends; returns this rank's device (auto: cuda, mps or cpu)."""
    end_with_torchrun()
    mps = torch.backends.mps.is_available() and world_size() == 1
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks of this machine
    if device == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = "cuda" if gpus >= local_size else "mps" if mps else "cpu"
        if 0 < gpus < local_size and is_main():
            print(f"{local_size} processes, but {gpus} GPU(s) here: computing on the CPU. To use the GPU: "
                  f"{'python' if gpus == 1 else f'torchrun --nproc_per_node={gpus}'} {sys.argv[0]}", flush=True)
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"--device cuda: rank {local_rank} of this machine has no GPU, {torch.cuda.device_count()} "
                            "found; lower --nproc_per_node or use --device cpu")
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")
        device = f"cuda:{local_rank}"
    elif device == "mps" and not mps:
        raise UserError("--device mps: there is none on this machine, or more than one process; use --device cpu")
    else:
        if local_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's default: share the cores instead
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // local_size))
    if world_size() > 1:
        td.init_process_group("nccl" if device[:4] == "cuda" else "gloo", timeout=timedelta(minutes=timeout_minutes))
        atexit.register(teardown)
    return torch.device(device)


def teardown():
    """Leave the process group, and wait for its threads: one that still holds a tensor when Python ends aborts it."""
    if td.is_initialized():
        td.destroy_process_group()
        gc.collect()  # wrapped models and what they refer to; the last reference to the group joins the threads


def wrap(model, device):
    """`model` with gradients averaged over the ranks. Buffers are not broadcast: who changes one keeps ranks alike.

    find_unused_parameters is for what it turns off: DDP would lay out the gradients anew after its first step. Three
    ranks or more would then add in another order than after a resume, and two models could wait for each other.
    """
    if world_size() == 1:
        return model
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)  # convolutions of one channel
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # its successor is not in torch 2.10
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None,
                                   broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=True)


def sync_if(model, condition):
    """Context of a backward pass that averages gradients over ranks only if `condition` holds."""
    return contextlib.nullcontext() if condition or world_size() == 1 else model.no_sync()


def gather(value):
    """The list of every rank's plain `value`, in the order of ranks, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        td.all_gather_object(values, value)
    return values


def broadcast(value):
    """Rank 0's `value`, a plain Python object, on every rank."""
    values = [value]
    if world_size() > 1:
        td.broadcast_object_list(values, src=0)
    return values[0]


def total(values):
    """Sums over all ranks of a list of numbers, in float64: for an exact mean, of sums and of counts."""
    values = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        values = values.to("cuda" if td.get_backend() == "nccl" else "cpu")
        td.all_reduce(values)
    return values.tolist()


def on_main(work):
    """Run `work()` on rank 0 while the others wait; its plain result, or its UserError, comes to every rank."""
    return broadcast(at_once(work, is_main()))


def on_each(work):
    """Run `work()` on rank 0, then on the others, which find what it has downloaded; each returns its own result."""
    first, later = at_once(work, is_main()), at_once(work, not is_main())
    return first if is_main() else later


def at_once(work, here=True):
    """The result of `work()`, which has no collectives, run on all ranks `here`; a UserError reaches every rank."""
    try:
        result, failure = work() if here else None, None
    except (UserError, OSError) as error:
        result, failure = None, str(error)
    for number, message in enumerate(gather(failure)):
        if message is not None:
            error = UserError(message)
            error.relayed = rank() != number  # that rank prints it
            raise error
    return result


def fail(message):
    """Raise a UserError, as all ranks do at once; rank 0 prints it."""
    error = UserError(message)
    error.relayed = not is_main()
    raise error


def check_alike(facts):
    """UserError on every rank, with rank and fact, unless the plain `facts` {name: value} are rank 0's on all."""
    first, *others = gather(facts)
    for number, theirs in enumerate(others, 1):
        if differ := [name for name in first if theirs[name] != first[name]]:
            fail(f"rank {number} has another {differ[0]} than rank 0, {theirs[differ[0]]!r} and {first[differ[0]]!r}; "
                 "start all ranks with the same data and code")


def check_in_step(modules, step):
    """RuntimeError on every rank unless all have bit for bit the same `modules` {name: module} and the same `step`."""
    ours = {"step": step}
    for name, module in modules.items():
        digest = hashlib.sha256()
        for tensor in [*module.parameters(), *module.buffers()]:
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
        ours[name] = digest.hexdigest()
    first, *others = gather(ours)
    drifted = [f"{name} of rank {r}" for r, x in enumerate(others, 1) for name in ours if x[name] != first[name]]
    if drifted:
        raise RuntimeError(f"the ranks have drifted apart by step {step}: {', '.join(drifted)} not as on rank 0")
