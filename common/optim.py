"""Parameter groups, choice of optimizer, optimizer state."""

import torch
from torch import nn

from common.config import UserError

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers whose weights are (out, in, *kernel)
# Options of parameter groups for which a resumed run takes the new value, not the checkpoint's.
GIVEN = {"lr", "weight_decay", "betas", "eps", "momentum"}


def groups(model):
    """Trainable parameters of `model`, in order: (matrices, others with decay, without decay).

    Weights of the layers in MATRICES are matrices; other layers may list the names of theirs in an
    attribute `matrices`. Matrices and other parameters of two or more dimensions are decayed.
    Norms, biases and tables (nn.Embedding) are not; learned tokens are tables.
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
    if decayed or undecayed:  # groups may be empty, but not an optimizer
        optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


def state(optimizers):
    """The optimizers' state for a checkpoint: {"class": name, **state_dict} for each."""
    return [
        {"class": type(optimizer).__name__, **optimizer.state_dict()} for optimizer in optimizers
    ]


def load(optimizers, states, path):
    """Restore the `state` of optimizers, read from the file `path`.

    Learning rates, weight decay, betas and momentum keep their present values. UserError if the
    states belong to other classes of optimizers, or to other parameter groups.
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
        # Present values win, so write them into the loaded groups. Other entries of the groups come
        # from the file.
        for saved_group, group in zip(saved_state["param_groups"], optimizer.param_groups):
            saved_group.update({name: group[name] for name in GIVEN & group.keys()})
        optimizer.load_state_dict(saved_state)
        for values in optimizer.state.values():
            for name, value in values.items():
                if torch.is_tensor(value):  # it may be in a memory-mapped file
                    values[name] = value.clone()
