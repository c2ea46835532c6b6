"""Parameter groups, choice of optimizer, optimizer state."""

import torch
from torch import nn

from common.config import UserError

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers whose weights are (out, in, *kernel)
# Options of parameter groups for which a resumed run uses its own value, not the checkpoint's.
GIVEN = {"lr", "weight_decay", "betas", "eps", "momentum"}


def groups(model):
    """Split the trainable parameters of `model`: (matrices, others with decay, without decay).

    The weights of layers in MATRICES are matrices. Other layers name their matrices in an attribute
    `matrices`. Weight decay applies to matrices and to other parameters with two or more
    dimensions, but not to norms, biases and tables (nn.Embedding); learned tokens are tables.
    """
    matrices = []
    decayed = []
    undecayed = []
    seen = set()  # a tied parameter counts only once
    for layer in model.modules():
        of_layer = ("weight",) if isinstance(layer, MATRICES) else getattr(layer, "matrices", ())
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            if name in of_layer:
                matrices.append(parameter)
            elif parameter.ndim < 2 or isinstance(layer, nn.Embedding):
                undecayed.append(parameter)
            else:
                decayed.append(parameter)
    return matrices, decayed, undecayed


def make(
    model,
    name,
    lr,
    weight_decay,
    betas=(0.9, 0.99),
    eps=1e-8,
):
    """The optimizers of `model`: "adamw": [AdamW]; "muon": [Muon of matrices, AdamW of the rest].

    AdamW without decay is Adam.
    """
    matrices, decayed, undecayed = groups(model)
    optimizers = []
    if name == "muon" and matrices:
        from common.muon import Muon

        optimizers.append(Muon(matrices, lr, weight_decay))
    else:
        decayed = matrices + decayed
    adam = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    if decayed or undecayed:  # a group may be empty, but an optimizer may not
        optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


def state(optimizers):
    """The optimizers' state for a checkpoint: a list of {"class": name, **state_dict}."""
    return [
        {"class": type(optimizer).__name__, **optimizer.state_dict()} for optimizer in optimizers
    ]


def load(optimizers, states, path):
    """Restore the `state` of optimizers, read from the file `path`.

    Learning rate, weight decay, betas, eps and momentum keep their current values. UserError if the
    states belong to other classes of optimizers, or to other parameter groups.
    """

    def kind(state):
        return state["class"], [len(group["params"]) for group in state["param_groups"]]

    saved = list(map(kind, states))
    present = list(map(kind, state(optimizers)))
    if saved != present:
        raise UserError(
            f"{path}: its optimizers are {saved}, those of this run {present}; start from its "
            "weights with --init_from and a new --run_dir"
        )
    for optimizer, saved_state in zip(optimizers, states):
        # Current values win, so write them into the loaded groups. Other entries come from the
        # file.
        for saved_group, group in zip(saved_state["param_groups"], optimizer.param_groups):
            saved_group.update({name: group[name] for name in GIVEN & group.keys()})
        optimizer.load_state_dict(saved_state)
        for values in optimizer.state.values():
            for name, value in values.items():
                if torch.is_tensor(value):  # may still be in a memory-mapped file
                    values[name] = value.clone()
