"""Parameter groups, the choice of optimizer, and Muon."""
import itertools

import torch
from torch import nn

from common import dist

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers whose weights are (out, in, *kernel)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic iteration (Jordan 2024)


def groups(model):
    """(matrices, other decayed, not decayed) trainable parameters of `model`, in the model's order.

    The layer decides. Weights of MATRICES are matrices, and so is what a layer of another kind
    names in its attribute `matrices`. Weight decay is for them and all else of two or more
    dimensions. Norms, biases and tables (nn.Embedding) have none; learned tokens are tables.
    """
    of_matrices = set()
    of_tables = set()
    for layer in model.modules():
        if isinstance(layer, MATRICES):
            of_matrices.add(id(layer.weight))
        if isinstance(layer, nn.Embedding):
            of_tables.add(id(layer.weight))
        for name in getattr(layer, "matrices", ()):
            of_matrices.add(id(getattr(layer, name)))
    matrices = []
    decayed = []
    rest = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in of_matrices:
            matrices.append(parameter)
        elif parameter.ndim >= 2 and id(parameter) not in of_tables:
            decayed.append(parameter)
        else:
            rest.append(parameter)
    return matrices, decayed, rest


def make(model, name, lr, weight_decay, betas=(0.9, 0.99), eps=1e-8):
    """The optimizers of `model`: "adamw": [AdamW]; "muon": [Muon of matrices, AdamW of the rest].

    AdamW without decay is Adam.
    """
    matrices, decayed, rest = groups(model)
    optimizers = []
    if name == "muon" and matrices:
        optimizers.append(Muon(matrices, lr, weight_decay))
    else:
        decayed = matrices + decayed
    adam = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
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

            # Equal shapes are neighbors, so that every rank gets its part of the large ones.
            mine = updates[dist.rank()::dist.world_size()]
            for _, alike in itertools.groupby(mine, key=lambda update: update.shape):
                alike = [*alike]
                for update, result in zip(alike, orthogonalized(torch.stack(alike))):
                    update.copy_(result)
            dist.share(updates)

            for parameter, update in zip(parameters, updates):
                scale = 0.2 * max(update.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)


def orthogonalized(stack, steps=5, eps=1e-7):
    """The matrices (N, rows, columns), each near U·V^T of its SVD: singular values become about 1.

    Newton-Schulz iteration (Jordan 2024); in fp32 on CPUs, and in bf16 on GPUs, as published.
    """
    if stack.shape[1] > stack.shape[2]:
        return orthogonalized(stack.mT, steps, eps).mT
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16() if stack.is_cuda else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(stack.dtype)


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
