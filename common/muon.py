"""Muon: an optimizer that orthogonalizes the momentum before adding it to the weights."""

import itertools

import torch
import torch.distributed as td

from common import dist

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic iteration (Jordan 2024)
MOMENTUM = 0.95  # also from Jordan 2024


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum (Jordan 2024).

    torch.optim.Muon always computes in bf16, which is slow on a CPU without bf16 units, and does
    not take convolution kernels. Here kernels (out, in, *k) are treated as matrices (out, in·k),
    and each rank orthogonalizes a share of the matrices. As with AdamW, the root mean square of an
    update is about 0.2·lr (Liu et al. 2025, §2.2), so AdamW's learning rates can be reused.
    """

    def __init__(self, matrices, lr, weight_decay):
        matrices = sorted(matrices, key=matrix_shape)
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """Take a step. Gradients must be the same on all ranks."""
        rank = dist.rank()
        world_size = dist.world_size()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            buffers = []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffers.append(state["momentum_buffer"])
            # Update all tensors in one call: small models are launch-bound on a GPU.
            torch._foreach_lerp_(buffers, gradients, 1 - MOMENTUM)

            # All updates are views of one tensor, so that one collective suffices. For a small
            # model, one collective per update would cost more time than sharing the work saves.
            sizes = [p.numel() for p in parameters]
            flat = group["params"][0].new_zeros(sum(sizes))
            updates = []
            for parameter, part in zip(parameters, flat.split(sizes)):
                updates.append(part.view(parameter.shape))

            # Parameters are sorted by shape, so every rank gets a share of the large ones.
            share = slice(rank, None, world_size)
            for results, *momentum in by_shape(updates[share], gradients[share], buffers[share]):
                nesterov = torch._foreach_lerp(*momentum, MOMENTUM)
                stack = torch.stack([matrix.flatten(1) for matrix in nesterov])
                stack = orthogonalize(stack).contiguous()  # so that the copy is one launch
                results = [result.flatten(1) for result in results]
                torch._foreach_copy_(results, stack.unbind())
            if world_size > 1:
                td.all_reduce(flat)  # each update is zero on all ranks but one

            lr = group["lr"]
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            for some, their_updates in by_shape(parameters, updates):
                scale = 0.2 * max(matrix_shape(some[0])) ** 0.5
                torch._foreach_add_(some, their_updates, alpha=-lr * scale)


def matrix_shape(kernel):
    """The shape (out, in·k) of a kernel (out, in, *k) as a matrix."""
    rows = len(kernel)
    return rows, kernel.numel() // rows


def by_shape(*lists):
    """Split equally long lists of tensors into groups of neighbors with the same matrix shape.

    For each group, yields its part of every list. The shapes in the first list decide.
    """

    def shape_of_first(row):
        first = row[0]
        return matrix_shape(first)

    rows = zip(*lists)
    for _, neighbors in itertools.groupby(rows, shape_of_first):
        yield map(list, zip(*neighbors))


def orthogonalize(stack):
    """Map matrices (N, rows, columns) to about U·V^T of their SVD: all singular values near 1.

    Newton-Schulz iteration (Jordan 2024), in fp32 on CPUs and, as published, in bf16 on GPUs.
    """
    if stack.shape[1] > stack.shape[2]:
        return orthogonalize(stack.mT).mT
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16() if stack.is_cuda else stack
    length = x.norm(dim=(1, 2), keepdim=True)
    x = x / length.clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
