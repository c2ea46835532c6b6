"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1) on the attention projections of any module.

An adapted layer computes with weight + scale · B A (alpha is the rank); adapters are saved by
themselves.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from common import checkpoint, config, dist
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


def set_scale(model, scale):
    """Let the adapters count `scale` times: 0 is the model without them, 1 as they were trained."""
    for adapter in extract(model).values():
        adapter.scale = scale


def merge(model):
    """Add the adapters to the weights, which stay frozen; all has its name from before `inject`."""
    for name in extract(model):
        layer = model.get_submodule(name.replace("/", "."))
        parametrize.remove_parametrizations(layer, "weight")


def cast_trainable(model, dtype=torch.float32):
    """Cast the trainable parameters alone. A GradScaler takes gradients in fp32, not in fp16."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.to(dtype)


def start(model, path, rank, sha256):
    """Give `model` the (averaged) weights of the file `path`, and adapters of that rank.

    Returns (adapters, {"rank", "base", "base_sha256", "source"}, the entry "lora" of the run's
    files). source: what the base was imported from, if it was, else its path. Rank 0 reads the
    file, whose digest is `sha256`, and sends it to the others. Collective.
    UserError if the file is of another model, or of adapters.
    """

    def read():
        contents = checkpoint.model_contents(checkpoint.load(path))
        if "lora" in contents:
            raise UserError(f"{path}: LoRA adapters, not a model; give their base")
        return contents

    contents = dist.on_main(read)
    dist.together(lambda: checkpoint.load_weights(model, contents["model"], path))
    base = str(Path(path).absolute())
    info = {
        "rank": rank,
        "base": base,
        "base_sha256": sha256,
        "source": contents.get("source", base),
    }
    return inject(model, rank), info


def merged(contents, path):
    """The contents of a model's file, from those of the file `path`, of adapters on a base.

    All entries are those of the adapters, without "lora"; "model" has the weights of the base with
    the adapters added.
    """
    adapters = contents["model"]
    base = contents["lora"]["base"]
    weights = checkpoint.strip_prefixes(checkpoint.model_contents(checkpoint.load(base))["model"])
    if checkpoint.checksum(base) != contents["lora"]["base_sha256"]:
        config.note(f"{path} was trained on {base}, which has changed since")
    for name in sorted({key[:-2] for key in adapters}):  # without .A and .B
        layer = name.replace("/", ".") + ".weight"
        with config.explained(f"{path}: adapters of another model than {base}: {layer}"):
            weights[layer] = weights[layer] + adapters[f"{name}.B"] @ adapters[f"{name}.A"]
    contents = contents | {"model": weights}
    del contents["lora"]
    return contents
