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

# Imported before there is a group, which its default arguments would keep alive.
import torch.distributed.nn

from common.config import UserError


def variable(name, default):
    """The number in the variable `name`, which torchrun sets; UserError if it is none."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}={text}: expected a number; start by torchrun, or unset it")
    return int(text)


def rank():
    """Number of this process among all (0 without torchrun)."""
    return variable("RANK", 0)


def world_size():
    """Number of processes (1 without torchrun)."""
    return variable("WORLD_SIZE", 1)


def is_main():
    """Whether this process logs, writes and decides."""
    return rank() == 0


def end_with_torchrun():
    """Let this process get SIGTERM when torchrun has been killed: it must not train on alone."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


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
        self.newest = None  # what all ranks had noted at a step, and when it is on the CPU
        self.arriving = None  # the same of the step after, from a GPU

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

    def counts_here(self):
        """How often this process was sent each of SIGNALS."""
        return [float(count) for count in self.counts.values()]

    def receive(self, message):
        """Take in the sums over ranks of `counts_here`, a tensor (2,)."""
        if not message.is_cuda:
            self.newest = message, None
            return
        # Copied while the GPU computes, and checked a step later, so that it always has work.
        copy = message.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.newest = self.arriving
        self.arriving = copy, copied

    def check(self):
        """Raise Stopped on all ranks if any noted a signal by the last step (GPU: before it)."""
        if self.listening and self.newest:
            message, copied = self.newest
            if copied:
                copied.synchronize()
            self.raise_for(message.tolist())

    def agree(self):
        """Raise Stopped on all ranks if any has noted a signal. Collective while listening."""
        if self.listening:
            self.raise_for(total(self.counts_here()))

    def raise_for(self, counts):
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


collective_timeout = timedelta(minutes=30)


def setup(device="auto", timeout_minutes=30):
    """Join torchrun's process group until the process ends; returns this rank's torch.device."""
    end_with_torchrun()
    if rank() >= world_size():
        raise UserError(f"RANK={rank()} of WORLD_SIZE={world_size()}: start all ranks by torchrun")
    local_size = variable("LOCAL_WORLD_SIZE", 1)  # ranks of this machine
    local_rank = variable("LOCAL_RANK", 0)
    has_mps = torch.backends.mps.is_available() and world_size() == 1
    if device == "auto":
        device = choose_device(local_size, has_mps)

    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--device cuda: rank {local_rank} of this machine has no GPU, "
                f"{torch.cuda.device_count()} found; lower --nproc_per_node or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")  # TF32
        device = f"cuda:{local_rank}"
    elif device == "mps" and not has_mps:
        raise UserError(
            "--device mps: there is none on this machine, or more than one process; use --device "
            "cpu"
        )
    elif local_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        # That is torchrun's default. The ranks share the cores instead.
        torch.set_num_threads(max(1, available_cores() // local_size))

    if world_size() > 1:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        global collective_timeout
        collective_timeout = timedelta(minutes=timeout_minutes)
        try:
            td.init_process_group(backend, timeout=collective_timeout)
        except (ValueError, RuntimeError) as error:  # a variable, or the network
            raise UserError(f"start all ranks by torchrun; {str(error).splitlines()[0]}") from error
        atexit.register(teardown)
    return torch.device(device)


def choose_device(local_size, has_mps):
    """The kind of device for the `local_size` ranks of this machine: a GPU each, or the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= local_size:
        return "cuda"
    if gpus and is_main():
        start = "python" if gpus == 1 else f"torchrun --nproc_per_node={gpus}"
        print(
            f"{local_size} processes, but {gpus} GPU(s) here: computing on the CPU. "
            f"To use the GPU: {start} {sys.argv[0]}",
            flush=True,
        )
    return "mps" if has_mps else "cpu"


def available_cores():
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def teardown():
    """Leave the process group and wait for its threads.

    A thread that still holds a tensor when Python ends would abort the process.
    """
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
        stop_signals.receive(torch.tensor(stop_signals.counts_here()))
        return
    gradients = [parameter.grad for parameter in parameters]
    signals = torch.tensor(stop_signals.counts_here()).to(gradients[0].device, non_blocking=True)
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), signals])
    td.all_reduce(flat)
    *sums, signals = flat.split([*(gradient.numel() for gradient in gradients), len(signals)])
    for gradient, total_of_ranks in zip(gradients, sums):
        gradient.copy_(total_of_ranks.view_as(gradient))
    stop_signals.receive(signals.clone())  # a view would keep all of `flat`


def broadcast_tensor(tensor):
    """Give every rank what `tensor` is on rank 0, in place."""
    if world_size() > 1:
        td.broadcast(tensor, src=0)


def exchange_owned(tensors):
    """Give every rank what each tensor's owner has in it. Rank i % world_size owns tensor i."""
    if world_size() == 1:
        return
    messages = []
    for owner in range(world_size()):
        owned = tensors[owner :: world_size()]
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
    """Sums over all ranks of a list of numbers, in float64. Collective."""
    values = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        values = values.to("cuda" if td.get_backend() == "nccl" else "cpu")
        td.all_reduce(values)
    return values.tolist()


def total_by_name(sums):
    """{name: sum over all ranks} of {name: number}; a rank may lack some names. Collective."""
    names = {}
    for names_of_rank in gather(list(sums)):
        names |= dict.fromkeys(names_of_rank)
    totals = total([float(sums.get(name, 0.0)) for name in names])
    return dict(zip(names, totals))


def set_timeout(timeout):
    """Set how long a collective waits for a rank that is alive."""
    if td.is_initialized():
        # Public in later torch than 2.13.
        getattr(td, "set_timeout", td.distributed_c10d._set_pg_timeout)(timeout)


def on_main(work):
    """Run `work()` on rank 0 while the others wait; every rank gets its result or UserError."""
    return broadcast(run_together(work, is_main()))


def main_first(work):
    """Run `work()` on rank 0, then on the others, which find what it has downloaded.

    Each rank returns its own result; a UserError reaches every rank.
    """
    first = run_together(work, is_main())
    later = run_together(work, not is_main())
    return first if is_main() else later


def run_together(work, here=True):
    """Run `work()`, without collectives, where `here`; a UserError reaches every rank.

    The others wait for as long as it takes: it may be a download.
    """
    result = None
    failure = None
    try:
        if here:
            result = work()
    except (UserError, OSError) as error:
        failure = str(error)
    set_timeout(timedelta(days=1))
    failures = gather(failure)
    set_timeout(collective_timeout)
    for number, message in enumerate(failures):
        if message is not None:
            error = UserError(message)
            error.relayed = rank() != number  # that rank prints it
            raise error
    return result


def fail(message):
    """Raise a UserError, as all ranks do at the same place; rank 0 prints it."""
    error = UserError(message)
    error.relayed = not is_main()
    raise error


def differences(facts):
    """[(rank, name, value there, value of rank 0)] of plain `facts` {name: value}. Collective."""
    first, *others = gather(facts)
    found = []
    for number, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                found.append((number, name, value, first[name]))
    return found


def check_alike(facts):
    """UserError on every rank unless the plain `facts` {name: value} are the same on all."""
    for number, name, value, expected in differences(facts):
        fail(
            f"rank {number} has another {name} than rank 0, {value!r} and {expected!r}; start all "
            "ranks with the same data and code"
        )


def check_in_step(modules, step):
    """RuntimeError on every rank unless all have the same step and bit for bit the same modules.

    modules: {name: module}.
    """
    hashes = {"step": step}
    for name, module in modules.items():
        digest = hashlib.sha256()
        for tensor in [*module.parameters(), *module.buffers()]:
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
        hashes[name] = digest.hexdigest()
    drifted = [f"{name} of rank {number}" for number, name, _, _ in differences(hashes)]
    if drifted:
        raise RuntimeError(
            f"the ranks have drifted apart by step {step}: {', '.join(drifted)} not as on rank 0"
        )
