"""Parameter groups and the choice of optimizer."""
import torch
import torch.distributed as td
from torch import nn

from common import dist


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


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum whose singular values are brought near 1, for matrices.

    The rate is scaled so that AdamW's can be kept (Liu et al. 2025, §2.2). As torch.optim.Muon, which computes in
    bfloat16 wherever it is; that takes 50 times as long on a CPU without instructions for it, where this is exact. And
    matrices of one shape are computed together.
    """

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        """Update the matrices by their gradients, which are those of all ranks: each rank computes its share."""
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            for p in matrices:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grads, buffers = [p.grad for p in matrices], [self.state[p]["momentum_buffer"] for p in matrices]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov's
            share(updates)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for p, update in zip(matrices, updates):
                p.add_(update, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


def share(matrices):
    """Make each of `matrices`, the same on all ranks, orthogonal in place; a rank computes every n-th of each shape."""
    shapes, ranks = {}, dist.world_size()
    for x in matrices:
        shapes.setdefault(x.shape, []).append(x)
    for alike in shapes.values():
        for owner in range(ranks):
            mine = alike[owner::ranks]
            if owner != dist.rank():
                for x in mine:
                    x.zero_()
            elif mine:
                torch._foreach_copy_(mine, [*orthogonal(torch.stack(mine)).to(mine[0].dtype)])
    if ranks > 1:
        whole = torch.cat([x.flatten() for x in matrices])
        td.all_reduce(whole)  # sums of one term and zeros: exact
        torch._foreach_copy_(matrices, [part.view_as(x) for part, x in zip(
            whole.split([x.numel() for x in matrices]), matrices)])


def orthogonal(x, steps=5):
    """U·Vᵀ, nearly, of matrices x (B, n, m) = U·S·Vᵀ: five steps of a quintic Newton-Schulz iteration (Jordan 2024).

    Singular values come out within 0.7 and 1.2, which is near enough, and with the fewest steps.
    """
    x = x.bfloat16() if x.is_cuda else x.float()
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        update = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        wide = torch.baddbmm(wide, update, wide, beta=3.4445)
    return wide if x.shape[1] <= x.shape[2] else wide.mT


def make(model, name, lr, weight_decay, betas=(0.9, 0.99), eps=1e-8):
    """The list of optimizers for `model`: "adamw" gives [AdamW], "muon" [Muon for matrices, AdamW for the rest].

    AdamW without decay is Adam.
    """
    decayed, rest = groups(model)
    optimizers = []
    if name == "muon":
        matrices = [p for p in decayed if p.ndim == 2]
        optimizers.append(Muon(matrices, lr, weight_decay))
        decayed = [p for p in decayed if p.ndim != 2]
    adam = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adam = [group for group in adam if group["params"]]
    optimizers.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, fused=True))
    return optimizers


def load(optimizers, states):
    """Restore the optimizers' states; rates, decay and betas stay as the current command line gives them."""
    for optimizer, state in zip(optimizers, states, strict=True):
        current = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, settings in zip(optimizer.param_groups, current):
            group.update(settings)
