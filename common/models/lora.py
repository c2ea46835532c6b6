"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1) on the attention projections of any module.

The weight of an adapted layer is weight + scale · B A (alpha equals the rank). Only the adapters
are saved.
"""

import torch
from torch import nn
from torch.nn.utils import parametrize

# The projections of the attention in models/nn.py
ATTENTION = ("attention.query", "attention.key_value", "attention.out")


class Adapter(nn.Module):
    """An update of rank `rank` to a weight (out, in), in fp32 whatever the weight's type is.

    B starts at zero, so there is no change at first.
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
    """Store the matrices of a frozen `model` in `dtype`, to save memory.

    Autocast to that type would cast them at each use anyway.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.to(dtype)


def inject(model, rank):
    """Freeze `model`, add adapters to its attention, and return a module of only the adapters.

    The returned module is trained and saved; in its names, layer a.b is "a/b".
    """
    model.requires_grad_(False)
    adapters = nn.ModuleDict()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(ATTENTION):
            adapter = Adapter(layer.weight, rank)
            parametrize.register_parametrization(layer, "weight", adapter)
            adapters[name.replace(".", "/")] = adapter
    return adapters


def add(weights, adapters, scale=1.0):
    """Merge: the `weights` of a model, {name: tensor}, plus `scale` · B A of the `adapters`.

    scale: 0 for the model without its adapters, 1 for the model as trained. KeyError if they do not
    fit.
    """
    weights = dict(weights)
    for name in sorted({key[:-2] for key in adapters}):  # without .A and .B
        layer = name.replace("/", ".") + ".weight"
        change = adapters[f"{name}.B"] @ adapters[f"{name}.A"]
        weights[layer] = weights[layer] + scale * change
    return weights
