"""Parameter groups and the choice of optimizer."""
import itertools

import torch
from torch import nn


def groups(model):
    """(decayed, not decayed) trainable parameters of `model`, without duplicates, in the model's order.

    Weight decay is for tensors of two or more dimensions that multiply activations: norms, biases, learned tokens
    and embedding tables are left alone, and frozen parameters are in neither list.
    """
    spared = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    spared |= {id(p) for name, p in model.named_parameters() if name.rpartition(".")[2].endswith("tokens")}
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in spared]
    chosen = {id(p) for p in decayed}
    return decayed, [p for p in trainable if id(p) not in chosen]


def make(model, name, lr, weight_decay, betas=(0.9, 0.99), eps=1e-8):
    """The list of optimizers for `model`: "adamw" gives [AdamW], "muon" [Muon for matrices, AdamW for the rest].

    AdamW without decay is Adam. Muon (Jordan 2024) has its rate scaled so that AdamW's fits it (Liu et al. 2025, §2.2).
    """
    decayed, rest = groups(model)
    optimizers = []
    matrices = [p for p in decayed if p.ndim == 2]
    if name == "muon" and matrices:  # a codec has none
        optimizers.append(torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        decayed = [p for p in decayed if p.ndim != 2]
    adam = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adam = [group for group in adam if group["params"]]
    if adam:  # low-rank adapters are matrices alone
        optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}


def fit(optimizers, states):
    """Whether `states` fit the optimizers: a moment of another shape would be written beyond its memory."""
    if len(optimizers) != len(states):
        return False
    for optimizer, state in zip(optimizers, states):
        groups = [group["params"] for group in optimizer.param_groups]
        numbers = [group["params"] for group in state["param_groups"]]
        if [*map(len, groups)] != [*map(len, numbers)]:
            return False
        for parameter, number in zip(itertools.chain(*groups), itertools.chain(*numbers)):
            moments = state["state"].get(number, {})
            if not state["state"]:  # before the first step of discriminators
                continue
            if moments.keys() != MOMENTS[type(optimizer).__name__] or any(
                    value.shape != (() if name == "step" else parameter.shape) for name, value in moments.items()):
                return False
    return True


def load(optimizers, states):
    """Restore the optimizers' states; rates, decay and betas stay as the current command line gives them."""
    for optimizer, state in zip(optimizers, states, strict=True):
        current = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, settings in zip(optimizer.param_groups, current):
            group.update(settings)
