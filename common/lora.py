"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1) on the attention projections of any module.

An adapted layer computes with weight + scale · B A (alpha is the rank); adapters are saved by themselves.
"""
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from common import checkpoint, config, dist
from common.config import UserError

PATHS = ("data", "val_data", "embeddings", "clip", "soundstream", "semantic")  # settings that name files


class Adapter(nn.Module):
    """A change of rank `rank` to a weight (out, in); none at first, as B is zero. It is fp32 whatever the weight is."""
    matrices = ("A", "B")  # see optim.groups

    def __init__(self, weight, rank):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device) * weight.shape[1] ** -0.5)
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))
        self.scale = 1.0

    def forward(self, weight):
        return (weight.float() + self.scale * (self.B @ self.A)).to(weight.dtype)


def inject(model, rank, names=None):
    """Freeze `model` and put adapters on its attention; returns a module of these alone, to be trained and saved.

    names: what the names of the Linear layers to adapt end in, such as ("q_proj", "v_proj"); by default query,
    key_value and out, in common/nn.py's attention. A layer a.b is "a/b" in the module returned.
    """
    layers = {name: m for name, m in model.requires_grad_(False).named_modules() if isinstance(m, nn.Linear)}
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        attention = last in ("query", "key_value", "out") and f"{parent}.key_value".removeprefix(".") in layers
        if attention if names is None else name.endswith(tuple(names)):
            parametrize.register_parametrization(layer, "weight", Adapter(layer.weight, rank))
    adapters = extract(model)
    if not adapters:
        raise UserError(f"{type(model).__name__} has no layers to adapt that are named {names or 'as in attention'}")
    return adapters


def extract(model):
    """The adapters of an adapted model, as `inject` returned them; their state_dict() is what is saved."""
    return nn.ModuleDict({name.removesuffix(".parametrizations.weight.0").replace(".", "/"): module
                          for name, module in model.named_modules() if isinstance(module, Adapter)})


def load(model, weights, path):
    """Give an adapted model the adapters' `weights` of the file `path`; UserError names those that do not fit."""
    checkpoint.load_weights(extract(model), {"model": weights}, path)


def set_scale(model, scale):
    """Let the adapters count `scale` times: 0 is the model without them, 1 as they were trained."""
    for adapter in extract(model).values():
        adapter.scale = scale


def merge(model):
    """Bake the adapters into the weights, which stay frozen; all is named again as before `inject`."""
    for name in extract(model):
        parametrize.remove_parametrizations(model.get_submodule(name.replace("/", ".")), "weight")


def start(model, cfg):
    """Adapt the model with the (averaged) weights of cfg.init_from; (adapters, entry "lora" of the run's files)."""
    checkpoint.load_weights(model, checkpoint.averaged(checkpoint.load(cfg.init_from)), cfg.init_from)
    base = str(Path(cfg.init_from).absolute())
    about = {"rank": cfg.lora_rank, "base": base, "base_sha256": checkpoint.checksum(base)}
    return inject(model, cfg.lora_rank), about


def merged(adapted, path, scale=1.0):
    """The contents `adapted` of the file `path` of a run of adapters, with these merged into the weights of their base.

    Config and all other facts are those of the adapters' run, the last that the model went through.
    """
    about, adapters = adapted["lora"], adapted["model"]
    base, rest = about["base"], {name: value for name, value in adapted.items() if name != "lora"}
    weights = dict(checkpoint.averaged(checkpoint.load(base))["model"])
    if dist.is_main() and checkpoint.checksum(base) != about["base_sha256"]:
        print(f"note: {path} was trained on {base}, which has changed since")
    for name in sorted({name[:-2] for name in adapters}):
        a, b = adapters[f"{name}.A"], adapters[f"{name}.B"]
        layer = name.replace("/", ".") + ".weight"
        if layer not in weights or weights[layer].shape != (len(b), a.shape[1]):
            raise UserError(f"{path}: adapters of another model than {base}: {layer} is not {len(b)} x {a.shape[1]}")
        weights[layer] = weights[layer] + scale * (b @ a)
    return {**rest, "model": weights}


def read_model(kind, cls, path, weights="ema", scale=1.0):
    """(config of the class `cls`, contents) of the file `path` of a `kind` of model; "model" has the weights to load.

    weights: "ema", those averaged, or "online", which only checkpoints have. Adapters are `merged` into their base.
    Paths in it are where they are now, if the run has moved together with them.
    """
    state, path = checkpoint.load(path), Path(path)
    if state.get("kind") != kind:
        raise UserError(f"{path}: not a {kind}'s model.pt, best.pt or checkpoint")
    if "ema" not in state and weights == "online":
        raise UserError(f"{path}: has the averaged weights alone; --weights online needs one of RUN/checkpoints")
    with checkpoint.reading(path):
        folder = path.absolute().parents[path.parent.name == "checkpoints"]
        settings, place = {**state["config"]}, os.path.join(state["cwd"], state["config"]["run_dir"])
        for values, name in [*((settings, name) for name in PATHS), (state, "clip"), (state.get("lora", {}), "base")]:
            if name in values:
                values[name] = checkpoint.located(values[name], place, folder, state["cwd"])
        state = checkpoint.averaged(state) if weights == "ema" else state
        state = merged(state, path, scale) if "lora" in state else state
        return cls(**config.from_dict(cls, {**settings, "run_dir": str(folder)}, path)), state
