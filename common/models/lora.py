"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1) on the attention projections of any module.

An adapted layer computes with weight + scale · B A (alpha is the rank); adapters are saved by
themselves.
"""

import torch
from torch import nn
from torch.nn.utils import parametrize

from common.config import UserError

# The projections of models/nn.py's attention.
ATTENTION = ("attention.query", "attention.key_value", "attention.out")


class Adapter(nn.Module):
    """A change of rank `rank` to a weight (out, in), fp32 whatever the weight is.

    There is no change at first, as B is zero.
    """

    matrices = ("A", "B")  # see optim.groups

    def __init__(self, weight, rank):
        super().__init__()
        rows, columns = weight.shape
        a = torch.randn(rank, columns, device=weight.device) * columns**-0.5
        self.A = nn.Parameter(a)
        self.B = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        self.scale = 1.0

    def forward(self, weight):
        change = self.scale * (self.B @ self.A)
        return (weight.float() + change).to(weight.dtype)


def cast_matrices(model, dtype):
    """Store the weights of the matrix layers of a frozen `model` in `dtype`, for less memory.

    For training under autocast of that type, which would cast them at each use.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.to(dtype)


def inject(model, rank, names=ATTENTION):
    """Freeze `model` and put adapters on its attention; returns a module of the adapters alone.

    names: the endings of the names of the Linear layers to adapt, such as ("q_proj", "v_proj").
    The returned module is what is trained and saved; in it a layer a.b is "a/b".
    """
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(names):
            parametrize.register_parametrization(layer, "weight", Adapter(layer.weight, rank))
    adapters = extract(model)
    if not adapters:
        raise UserError(f"{type(model).__name__} has no Linear layers with names in {names}")
    return adapters


def extract(model):
    """The adapters of an adapted model, as of `inject`; their state_dict() is what is saved."""
    adapters = nn.ModuleDict()
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            layer = name.removesuffix(".parametrizations.weight.0")
            adapters[layer.replace(".", "/")] = module
    return adapters


def add(weights, adapters, scale=1.0):
    """`weights` of a model, {name: tensor}, with `scale` · B A of `adapters` added; KeyError.

    0 is the model without its adapters, 1 as they were trained.
    """
    weights = dict(weights)
    for name in sorted({key[:-2] for key in adapters}):  # without .A and .B
        layer = name.replace("/", ".") + ".weight"
        change = adapters[f"{name}.B"] @ adapters[f"{name}.A"]
        weights[layer] = weights[layer] + scale * change
    return weights
