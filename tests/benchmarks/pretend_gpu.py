"""Run a script on a pretend GPU: what would fail, change from run to run, or wait on a real one.

    python tests/benchmarks/pretend_gpu.py train_prior.py --steps 3 --eval_samples 16

Tensors of the device "pretend" are computed on the CPU. As on a GPU, none of them can be used with
a tensor of the CPU: that ends the run. In the end it counts, by place, operations that torch
refuses on GPUs under deterministic algorithms; waits of the host for the device; all operations
but views. Not seen: speed, memory, several ranks, and autocast, so take --precision fp32 alone.
"""

import collections
import runpy
import sys
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "pretend"
# Of torch.use_deterministic_algorithms: what raises an error on GPUs, as ATen names it.
REFUSED = {
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "histc",
    "kthvalue",
    "max_pool3d_with_indices_backward",
    "nll_loss2d_forward",
    "put_",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
}
# Their result, or its shape, depends on values.
WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_consecutive"}
COPIES = {"_to_copy", "copy_"}  # between devices
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by a tensor of any device
counts = collections.defaultdict(collections.Counter)  # {kind: {place: how often}}


def place():
    """FILE:LINE of the project's code that runs now; the backward pass is not in it."""
    frame = sys._getframe(1)
    while frame:
        path = Path(frame.f_code.co_filename)
        if path != Path(__file__) and ROOT in path.parents and "site-packages" not in path.parts:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward pass"


class OnDevice(torch.Tensor):
    """A tensor of the pretend device; `inner` holds its values, on the CPU."""

    is_cuda = True

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE, 0),
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __reduce_ex__(self, protocol):  # saved as a tensor of the CPU
        return self.detach().inner.__reduce_ex__(protocol)

    def __format__(self, form):
        return format(self.item(), form)

    def tolist(self):
        counts["waits"][place()] += 1
        return self.detach().inner.tolist()


def count(function, name, args, tensors, to_host):
    """Count an operation, by the place that it comes from."""
    if not function.is_view:
        counts["operations"][place()] += 1
    is_masked = name in INDEXES and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    if to_host or is_masked or name in WAITS:
        counts["waits"][place()] += 1
    if name in REFUSED or (name == "cumsum" and args[0].is_floating_point()):
        counts["refused"][f"{name} at {place()}"] += 1


def check(name, args, tensors):
    """AssertionError for an operation on tensors of both devices. Numbers may be on either."""
    if name in COPIES or (name in INDEXES and isinstance(args[0], OnDevice)):
        return
    for tensor in tensors:
        if tensor.dim() and not isinstance(tensor, OnDevice):
            raise AssertionError(
                f"{name} at {place()}: a tensor {[*tensor.shape]} of the CPU among those of the "
                "device"
            )


def dispatch(function, args, kwargs):
    """Compute an operation of ATen on the CPU, and wrap its results if they are of the device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    target = kwargs.get("device")
    to_device = target is not None and torch.device(target).type == DEVICE
    if not on_device and not to_device:
        return function(*args, **kwargs)
    name = function._schema.name.removeprefix("aten::")
    if name == "copy_":  # into the first of its arguments
        to_host = not isinstance(args[0], OnDevice)
    else:
        to_host = target is not None and not to_device
    count(function, name, args, tensors, to_host)
    if on_device:
        check(name, args, tensors)

    inner_args, inner_kwargs = tree_map_only(OnDevice, lambda x: x.inner, (args, kwargs))
    if to_device:
        inner_kwargs["device"] = "cpu"
    out = function(*inner_args, **inner_kwargs)
    if to_host:
        return out
    given = {id(tensor.inner): tensor for tensor in on_device}

    def wrapped(inner):  # an operation in place gives back the tensor that it changed
        return given[id(inner)] if id(inner) in given else OnDevice(inner)

    return tree_map_only(torch.Tensor, wrapped, out)


class Pretend(TorchDispatchMode):
    """Also sees what makes a tensor on the device from none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})


class Backend(backend_registration._DummyBackendModule):
    """What torch.autocast asks of a device."""

    def get_amp_supported_dtype(self):
        return [torch.float32, torch.bfloat16, torch.float16]


class Generator(torch.Generator):
    """A generator of the CPU, whatever the device."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)


def on_cpu_first(make):
    """`make`, a function that torch does not dispatch, with a copy to the device after it."""

    def wrapped(*args, device=None, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return wrapped


def main():
    script, *words = sys.argv[1:] or ["--help"]
    if not script.endswith(".py"):
        raise SystemExit(__doc__)
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, Backend())
    # New parameters take the place of those on the CPU, whose storage cannot be exchanged.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    torch.tensor = on_cpu_first(torch.tensor)
    torch.Generator = Generator
    sys.path.insert(0, str(ROOT))
    from common import dist

    dist.setup = lambda *args: torch.device(DEVICE, 0)
    sys.argv = [script, *words]
    with Pretend():
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            for kind in ("refused", "waits", "operations"):
                print(f"{kind}: {counts[kind].total()}", *counts[kind].most_common(12), sep="\n  ")


if __name__ == "__main__":
    main()
