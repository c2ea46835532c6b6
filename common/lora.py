"""Low-rank adapters: LoRA (Hu et al. 2021, §4.1), put on the weights of a frozen model, taken off, and merged.

    python -m common.lora merge --model runs/prior/model.pt --lora runs/prior_lora/model.pt --out merged.pt

An adapted layer computes with weight + scale · alpha/rank · B A. Adapters are kept in files of their own, as
{layer.A, layer.B} by the layer's name in the model.
"""
import dataclasses
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from common import checkpoint, config, dist
from common.config import UserError
from common.state import load_weights

TRAINING = ("ema", "optimizers", "scaler", "identity", "best_val_loss", "lora")  # what a merged model does not have


class Adapter(nn.Module):
    """A change of rank `rank` to one weight, (out, in) or (out, in, h, w); none at first, as B is zero."""

    def __init__(self, weight, rank, alpha):
        super().__init__()
        columns, kind = weight[0].numel(), dict(dtype=torch.float32, device=weight.device)
        self.A = nn.Parameter(torch.randn(rank, columns, **kind) * columns ** -0.5)
        self.B = nn.Parameter(torch.zeros(len(weight), rank, **kind))
        self.factor, self.scale = alpha / rank, 1.0

    def forward(self, weight):
        """The adapted weight, summed in fp32 whatever autocast says, in the shape and dtype of `weight`."""
        with torch.autocast(weight.device.type, enabled=False):
            return adapted(weight, self.A, self.B, self.scale * self.factor)


def adapted(weight, a, b, factor):
    """weight (out, …) + factor · b (out, rank) @ a (rank, in·…)."""
    return (weight.float() + (factor * (b @ a)).view(weight.shape)).to(weight.dtype)


def layers(model, targets):
    """{name: layer} of what takes adapters: "all" Linear and Conv2d, or those of "attention" alone."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    if targets == "attention":  # a module with a layer `key_value`
        found = {name: m for name, m in found.items() for owner, _, last in [name.rpartition(".")]
                 if last in ("query", "key_value", "out") and f"{owner}.key_value".lstrip(".") in found}
    return found


def inject(model, rank, alpha=None, targets="attention"):
    """Freeze `model` and put adapters on it; returns a module of these alone, to be trained, averaged and saved.

    alpha: by default the rank. The adapters are parametrizations: whatever reads `.weight` gets the adapted one, and
    the names in the model's own state_dict() change until `merge`.
    """
    found, adapters = layers(model.requires_grad_(False), targets), nn.Module()
    if not found:
        raise UserError(f"--lora_targets: {type(model).__name__} has no {targets} layers to adapt; expected attention "
                        "or all")
    for name, layer in found.items():
        assert not parametrize.is_parametrized(layer, "weight"), f"{name} has an adapter already"
        adapter, place = Adapter(layer.weight, rank, alpha or rank), adapters
        parametrize.register_parametrization(layer, "weight", adapter)
        *path, last = name.split(".")
        for part in path:  # a tree like the model's, so that names in files are the layers' own
            if not hasattr(place, part):
                setattr(place, part, nn.Module())
            place = getattr(place, part)
        setattr(place, last, adapter)
    return adapters


def _found(model):
    """{name of the layer: its adapter} of an adapted model, or of what `inject` returned."""
    return {name.removesuffix(".parametrizations.weight.0"): m for name, m in model.named_modules()
            if isinstance(m, Adapter)}


def extract(model):
    """{layer.A: (rank, in·…), layer.B: (out, rank)} of an adapted model: the tensors themselves, without gradients."""
    return {f"{name}.{part}": getattr(adapter, part).detach() for name, adapter in _found(model).items()
            for part in "AB"}


@torch.no_grad()
def load(model, weights, path):
    """Copy `weights`, as `extract` gives them, into an adapted model; `path` is what an error says they came from."""
    own = extract(model)
    for name in [*own, *weights]:
        shapes = [tuple(part[name].shape) if name in part else "missing" for part in (weights, own)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{path}: adapters of another model: {name} is {shapes[0]} there and {shapes[1]} here; "
                            "give the model and the rank that they were trained with")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def set_scale(model, scale):
    """Let the adapters count `scale` times: 0 is the model without them, 1 as they were trained."""
    for adapter in _found(model).values():
        adapter.scale = scale


@torch.no_grad()
def merge(model):
    """Bake the adapters into the weights, which stay frozen; names and types are again as before `inject`."""
    for name in _found(model):
        layer = model.get_submodule(name)
        weight = layer.weight
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.copy_(weight)
        if layer.bias is not None:  # back behind the weight, where an optimizer or a file expects it
            bias = layer.bias
            del layer.bias
            layer.bias = bias


# Scripts: training on the weights of --init_from, and files

def check(cfg):
    """UserError if the fields lora_* of a script's Config do not go with the others."""
    if cfg.lora_rank and not cfg.init_from:
        raise UserError(f"--lora_rank {cfg.lora_rank}: adapters need a trained model; name its file with --init_from")
    if cfg.lora_rank and cfg.lora_base != "fp32" and cfg.precision != cfg.lora_base:
        raise UserError(f"--lora_base {cfg.lora_base}: frozen weights of this precision need --precision "
                        f"{cfg.lora_base}, not {cfg.precision}")


def start(model, cfg):
    """Load the base, the (averaged) weights of cfg.init_from, all of which must fit, and adapt it as cfg.lora_* say.

    Returns (the adapters, {"rank", "alpha", "targets", "base", "base_digest"}), the latter for every file of the run.
    """
    load_weights(model, averaged(checkpoint.load(cfg.init_from)), cfg.init_from)
    if cfg.lora_base == "bf16":
        for layer in layers(model, "all").values():
            layer.to(torch.bfloat16)
    adapters = inject(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets)
    return adapters, facts(cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.init_from)


def facts(rank, alpha, targets, base):
    """The entry "lora" of a file of adapters, by which it is known as one."""
    return {"rank": rank, "alpha": alpha or float(rank), "targets": targets, "base": str(base),
            "base_digest": checkpoint.checksum(base)[:16]}


def identity(cfg):
    """What identifies the base of a run that trains adapters: another file is another base."""
    return {"lora_base_digest": checkpoint.checksum(cfg.init_from)[:16]} if cfg.lora_rank else {}


def read_model(kind, cls, path, weights="ema", adapters="", scale=1.0):
    """(config of the class `cls`, contents) of the file `path` of a `kind` of model; "model" has the weights to load.

    weights: "ema", those averaged, or "online", which only checkpoints have, not model.pt and best.pt. The `adapters`
    of another run, a file or its folder, are merged in at `scale`, if they are given.
    """
    state = checkpoint.load(path)
    if state.get("kind", "prior" if "widths" in state else None) != kind:  # the oldest priors do not name theirs
        raise UserError(f"{path}: not a {kind}'s model.pt, best.pt or checkpoint")
    if "ema" not in state and weights == "online":
        raise UserError(f"{path}: has the averaged weights alone; --weights online needs one of RUN/checkpoints")
    state = averaged(state) if weights == "ema" else state
    state = merged(state, path, adapters, scale) if adapters else state
    return cls(**config.from_dict(cls, state["config"], path)), state


def averaged(state):
    """The contents of a file with the averaged weights as "model", which those of a checkpoint have as "ema"."""
    return {**state, "model": state.get("ema", state["model"])}


def merged(state, base, path, scale=1.0):
    """Contents of a model's file `base`, its weights in state["model"], merged with those of the adapters' `path`.

    Config and all other facts are those of the adapters' run, the last that the model went through. `path` may be the
    run's folder.
    """
    path = Path(path) / "model.pt" if Path(path).is_dir() else Path(path)
    lora, weights = averaged(checkpoint.load(path)), dict(state["model"])
    if "lora" not in lora or "lora" in state:
        raise UserError(f"{path}: not LoRA adapters, but a whole model; give it as the model, without --lora"
                        if "lora" not in lora else f"{base}: LoRA adapters, not the model that they adapt, which is "
                        f"{state['lora']['base']}")
    if dist.is_main() and checkpoint.checksum(base)[:16] != lora["lora"]["base_digest"]:
        print(f"note: {path} was trained on {lora['lora']['base']}, which {base} is not, or no longer")
    factor = scale * lora["lora"]["alpha"] / lora["lora"]["rank"]
    for name in [name.removesuffix(".A") for name in lora["model"] if name.endswith(".A")]:
        weight, a, b = weights.get(f"{name}.weight"), lora["model"][f"{name}.A"], lora["model"][f"{name}.B"]
        if weight is None or weight.ndim < 2 or weight.flatten(1).shape != (len(b), a.shape[1]):
            raise UserError(f"{path}: adapters of another model than {base}: {name} is for a weight of {len(b)} x "
                            f"{a.shape[1]}, found {'none' if weight is None else tuple(weight.shape)}")
        weights[f"{name}.weight"] = adapted(weight, a, b, factor)
    settings = {k: v for k, v in lora["config"].items() if not k.startswith(("lora_", "init_"))}
    return {**{k: v for k, v in lora.items() if k not in TRAINING}, "model": weights, "config": settings}


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    model: str = ""  # the base: a model.pt, best.pt or checkpoint, of which the averaged weights are taken
    lora: str = ""  # the adapters: a run's model.pt or best.pt, or its folder
    scale: float = 1.0  # how much the adapters count, 1 for as in training
    out: str = "merged.pt"  # file to write, which can be used wherever the base can

    def __post_init__(self):
        for name in ("model", "lora"):
            if not getattr(self, name):
                raise UserError(f"--{name}: expected a file")


def merge_files(cfg):
    state = averaged(checkpoint.load(cfg.model))
    checkpoint.save(merged(state, cfg.model, cfg.lora, cfg.scale), cfg.out)
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    config.run(lambda: config.dispatch({"merge": (merge_files, MergeConfig)}, __doc__))
