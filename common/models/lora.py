"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1) on the attention projections of any module.

An adapted layer uses weight + B A (alpha equals the rank). Only the adapters are saved.
"""

import torch
from torch import nn
from torch.nn.utils import parametrize

from common.config import UserError

# The attention projections in models/nn.py
ATTENTION = ("attention.query", "attention.key_value", "attention.out")


class Adapter(nn.Module):
    """A low-rank update of a weight (out, in), kept in fp32 whatever the dtype of the weight.

    B starts at zero, so the weight is unchanged at first.
    """

    matrices = ("A", "B")  # see optim.groups

    def __init__(self, weight, rank):
        super().__init__()
        rows, columns = weight.shape
        a = torch.randn(rank, columns, device=weight.device) * columns**-0.5
        self.A = nn.Parameter(a)
        self.B = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight):
        adapted = weight.float() + self.B @ self.A
        return adapted.to(weight.dtype)


def cast_matrices(model, dtype):
    """Store the matrices of a frozen `model` in `dtype`, to save memory.

    Autocast would cast them to `dtype` at each use anyway.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.to(dtype)


def inject(model, rank):
    """Freeze `model`, add adapters to its attention layers, and return a module of all adapters.

    The caller trains and saves this module. It names the adapter of layer a.b "a/b".
    """
    model.requires_grad_(False)
    adapters = nn.ModuleDict()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(ATTENTION):
            adapter = Adapter(layer.weight, rank)
            parametrize.register_parametrization(layer, "weight", adapter)
            adapters[name.replace(".", "/")] = adapter
    if not adapters:
        raise UserError("--lora_rank: the model has no attention layers to adapt; leave it out")
    return adapters


def add(weights, adapters, scale=1.0):
    """Merge `adapters` into a model's `weights`, {name: tensor}: add `scale` · B A to each layer.

    scale: 0 gives the model without its adapters, 1 the model as trained. KeyError if a layer or a
    matrix is missing.
    """
    weights = dict(weights)
    for name in sorted({key[:-2] for key in adapters}):  # without .A and .B
        layer = name.replace("/", ".") + ".weight"
        change = adapters[f"{name}.B"] @ adapters[f"{name}.A"]
        weights[layer] = weights[layer] + scale * change
    return weights
