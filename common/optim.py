"""Parameter groups, the choice of optimizer, and its state."""

import torch
from torch import nn

from common.config import UserError

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers whose weights are (out, in, *kernel)
# What the command line, or a fork's own line, gives for a group: a resumed run takes the new value.
GIVEN = {"lr", "weight_decay", "betas", "eps", "momentum"}


def groups(model):
    """(matrices, other decayed, not decayed) trainable parameters of `model`, in the model's order.

    The layer decides. Weights of MATRICES are matrices. A layer of another kind lists the names of
    its matrices in the attribute `matrices`. Weight decay is for matrices, and for all else of two
    or more dimensions. Norms, biases and tables (nn.Embedding) have none; so learned tokens, which
    are tables, have none.
    """
    matrices = []
    decayed = []
    undecayed = []
    seen = set()  # a tied parameter counts where it comes first
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
    if decayed or undecayed:  # a group may be empty, an optimizer may not
        optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


def state(optimizers):
    """What a checkpoint has of the optimizers: {"class": name, **its state_dict} of each."""
    return [
        {"class": type(optimizer).__name__, **optimizer.state_dict()} for optimizer in optimizers
    ]


def load(optimizers, states, path):
    """Restore the `state` of optimizers of any class, from the file `path`.

    Rates, decay, betas and momentum stay as they are given now. UserError for states of other
    classes, which would be misread or ignored, or of other groups of parameters.
    """

    def kind(state):
        return state["class"], [len(group["params"]) for group in state["param_groups"]]

    saved = list(map(kind, states))
    present = list(map(kind, state(optimizers)))
    if saved != present:
        raise UserError(
            f"{path}: its optimizers are {saved}, these are {present}; start from its weights with "
            "--init_from and a new --run_dir"
        )
    for optimizer, saved_state in zip(optimizers, states):
        # The values given now win, so they are written into what is loaded. What else an optimizer
        # keeps in its groups comes from the file.
        for saved_group, group in zip(saved_state["param_groups"], optimizer.param_groups):
            saved_group.update({name: group[name] for name in GIVEN & group.keys()})
        optimizer.load_state_dict(saved_state)
        for values in optimizer.state.values():
            for name, value in values.items():
                if torch.is_tensor(value):  # maybe of a mapped file
                    values[name] = value.clone()
