"""Parameter groups, the choice of optimizer, and Muon."""

import itertools

import torch
from torch import nn

from common import dist

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers whose weights are (out, in, *kernel)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic iteration (Jordan 2024)


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
        optimizers.append(Muon(matrices, lr, weight_decay))
    else:
        decayed = matrices + decayed
    adam = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    adam = [group for group in adam if group["params"]]
    if adam:
        optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized before it is added to the weights (Jordan 2024).

    torch.optim.Muon does the same in bf16 on every device, which is slow on a CPU without bf16
    units, and takes no kernels. Here kernels (out, in, *k) are matrices (out, in·k), and the work
    is dealt to the ranks, which all get the same result. The rate is scaled so that updates have
    the size of AdamW's, 0.2·lr an entry (Liu et al. 2025, §2.2): AdamW's rate fits.
    """

    def __init__(self, matrices, lr, weight_decay, momentum=0.95):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        by_shape = sorted(matrices, key=lambda matrix: matrix.flatten(1).shape)
        super().__init__(by_shape, defaults)

    @torch.no_grad()
    def step(self):
        """Take a step with gradients that are the same on all ranks."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(buffer, group["momentum"])
                updates.append(nesterov.flatten(1))  # (out, in·k)

            # Equal shapes are neighbors, so that every rank gets its share of the large ones.
            local = updates[dist.rank() :: dist.world_size()]
            for _, same_shape in itertools.groupby(local, key=lambda update: update.shape):
                same_shape = list(same_shape)
                results = orthogonalize(torch.stack(same_shape))
                for update, result in zip(same_shape, results):
                    update.copy_(result)
            dist.exchange_owned(updates)

            for parameter, update in zip(parameters, updates):
                scale = 0.2 * max(update.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)


def orthogonalize(stack):
    """The matrices (N, rows, columns), each near U·V^T of its SVD: singular values become about 1.

    Newton-Schulz iteration (Jordan 2024); in fp32 on CPUs, and in bf16 on GPUs, as published.
    """
    if stack.shape[1] > stack.shape[2]:
        return orthogonalize(stack.mT).mT
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16() if stack.is_cuda else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(stack.dtype)


MOMENTS = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}


def fit(optimizers, states):
    """Whether `states` are of these optimizers. A fused kernel writes out of bounds of others."""
    if len(optimizers) != len(states):
        return False
    for optimizer, state in zip(optimizers, states):
        current = optimizer.state_dict()["param_groups"]
        saved = state["param_groups"]
        if [group["params"] for group in saved] != [group["params"] for group in current]:
            return False
        groups = [group["params"] for group in optimizer.param_groups]
        for number, parameter in enumerate(itertools.chain(*groups)):
            moments = state["state"].get(number, {})
            expected = dict.fromkeys(MOMENTS[type(optimizer).__name__], parameter.shape)
            if "step" in expected:
                expected["step"] = ()
            shapes = {name: value.shape for name, value in moments.items()}
            if moments and shapes != expected:  # there are none before its first gradient
                return False
    return True


def load(optimizers, states):
    """Restore the states that `fit`; rates, decay and betas stay as the command line gives them."""
    for optimizer, state in zip(optimizers, states, strict=True):
        current = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": current})
