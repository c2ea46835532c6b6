"""Data parallel training (DDP) by hand: torchrun's group, sums over ranks, one stop for all.

In a single process all of it does nothing.
"""
import atexit
import ctypes
import gc
import hashlib
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as td
import torch.distributed.nn  # its default arguments would keep alive a group that is there before it

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


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Some rank was sent the signal `number`. All ranks raise this at the same place, to save."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """SIGTERM and Ctrl-C, noted in this process and agreed on by all ranks.

    Training agrees at every step, by numbers that travel with the gradients (`sum_gradients`), and
    stops between two steps (`check`). Evaluation agrees before every batch (`deal`).
    """

    def __init__(self):
        self.listening = False
        self.reset()

    def reset(self):
        self.counts = dict.fromkeys(SIGNALS, 0)  # of this process
        self.to_check = None  # what all ranks had noted at a step, and when it is on the CPU
        self.on_its_way = None  # the same of the step after, from a GPU

    def __enter__(self):
        self.reset()
        self.listening = True
        self.before = {number: signal.signal(number, self.note) for number in SIGNALS}

    def __exit__(self, *error):
        self.listening = False
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        """The handler: count the signal. Whatever comes after a Ctrl-C ends the process at once."""
        self.counts[number] += 1
        if self.counts[signal.SIGINT]:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)

    def noted(self):
        """How often this process was sent each of SIGNALS. The end of torchrun is a SIGTERM."""
        if orphaned():
            return [1.0, 0.0]
        return [float(count) for count in self.counts.values()]

    def hear(self, message):
        """Take in the sums over ranks of `noted`, a tensor (2,)."""
        if not message.is_cuda:
            self.to_check = message, None
            return
        # Copied while the GPU computes, and checked a step later, so that it always has work.
        copy = message.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.to_check = self.on_its_way
        self.on_its_way = copy, copied

    def check(self):
        """Raise Stopped on all ranks if any had noted a signal by the last step (GPU: one before)."""
        if self.listening and self.to_check:
            message, copied = self.to_check
            if copied:
                copied.synchronize()
            self.stop_for(message.tolist())

    def agree(self):
        """Raise Stopped on all ranks if any has noted a signal. Collective while it is listening."""
        if self.listening:
            self.stop_for(total(self.noted()))

    def stop_for(self, counts):
        for number, count in zip(SIGNALS, counts):
            if count:
                raise Stopped(number)


stop_signals = StopSignals()


def deal(count):
    """This rank's numbers below `count`: rank, rank + world_size, … All ranks meet before each.

    It raises Stopped on all ranks after a signal to any.
    """
    for first in range(0, count, world_size()):
        stop_signals.agree()
        if first + rank() < count:
            yield first + rank()


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
        gc.collect()  # the last reference to the group joins its threads


def sum_gradients(*modules):
    """Add up the gradients of the modules over the ranks, in place. None counts as zeros.

    It is one all-reduce after a rank's last chunk, in the order of the parameters. So sums are
    added in the same order at every start, and a run resumes bit for bit. DistributedDataParallel
    lays its gradients out anew after the first step, which changes that order. With the gradients
    travels which signals this rank has noted, for `stop_signals.check`.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if world_size() == 1:
        stop_signals.hear(torch.tensor(stop_signals.noted()))
        return
    gradients = [parameter.grad for parameter in parameters]
    signals = torch.tensor(stop_signals.noted()).to(gradients[0].device, non_blocking=True)
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), signals])
    td.all_reduce(flat)
    *sums, signals = flat.split([*(gradient.numel() for gradient in gradients), len(signals)])
    for gradient, total_of_ranks in zip(gradients, sums):
        gradient.copy_(total_of_ranks.view_as(gradient))
    stop_signals.hear(signals.clone())  # a view would keep all of `flat`


def share(tensors):
    """Give every rank what each tensor's owner has in it. Rank i % world_size owns tensor i."""
    if world_size() == 1:
        return
    messages = []
    for owner in range(world_size()):
        owned = tensors[owner::world_size()]
        if owned:
            flat = torch.cat([tensor.flatten() for tensor in owned])
            work = td.broadcast(flat, owner, async_op=True)
            messages.append((work, flat, owned))
    for work, flat, owned in messages:
        work.wait()
        for tensor, values in zip(owned, flat.split([tensor.numel() for tensor in owned])):
            tensor.copy_(values.view_as(tensor))


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
