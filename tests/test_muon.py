"""Muon, compared with torch's Muon and the published polynomial, on any number of ranks."""
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from common import muon, optim

SHAPES = [(8, 8), (8, 8), (4, 24), (24, 4), (8, 8), (16, 3)]


def train(model, optimizers, steps):
    for step in steps:
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()


def linear_layers(shapes=SHAPES, bias=False):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(n, m, bias) for m, n in shapes)


def test_muon_is_torchs_with_updates_of_the_size_of_adamws():
    ours = linear_layers()
    theirs = linear_layers()
    optimizer = muon.Muon([*ours.parameters()], 0.02, 0.1)
    reference = torch.optim.Muon(
        theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = [p.clone() for p in ours.parameters()]
        train(ours, [optimizer], [step])
        train(theirs, [reference], [step])
        for old, new, torchs in zip(before, ours.parameters(), theirs.parameters()):
            assert (new - torchs).norm() < 0.08 * (step + 1) * (new - old).norm()  # torch uses bf16


def test_muon_takes_a_kernel_as_a_matrix_of_its_outputs():
    kernel = nn.Conv2d(3, 8, 3, bias=False)
    matrix = nn.Linear(27, 8, bias=False)
    matrix.weight.data = kernel.weight.data.flatten(1).clone()
    kernel.to(memory_format=torch.channels_last)
    for layer in (kernel, matrix):
        optimizer, = optim.make(layer, "muon", 0.1, 0.1)
        torch.manual_seed(0)
        layer.weight.grad = torch.randn(8, 27).view_as(layer.weight)
        optimizer.step()
    assert_close(kernel.weight.flatten(1), matrix.weight)


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 4, 30), (3, 30, 4)])
def test_orthogonalize_changes_singular_values_by_five_rounds_of_the_published_polynomial(shape):
    stack = torch.randn(shape)
    u, s, v = torch.linalg.svd(stack, full_matrices=False)
    s = s / s.square().sum(1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5  # Jordan 2024
    expected = u @ s.diag_embed() @ v
    assert_close(muon.orthogonalize(stack), expected, rtol=1e-4, atol=1e-5)
    assert not muon.orthogonalize(0 * stack).any()  # a zero gradient has no effect


def weights_after_muon(shapes):
    model = linear_layers(shapes, bias=True)
    train(model, optim.make(model, "muon", 0.01, 0.1), range(4))
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("ranks, shapes", [(2, SHAPES), (3, SHAPES[1:3])])
def test_any_number_of_ranks_takes_the_same_step_bit_for_bit(ranks, shapes, on_ranks):
    assert on_ranks(ranks, weights_after_muon, shapes) == [weights_after_muon(shapes)] * ranks


def test_a_matrix_without_a_gradient_stays_as_it_is_and_the_others_move():
    layers = linear_layers()
    before = [p.clone() for p in layers.parameters()]
    optimizer = muon.Muon([*layers.parameters()], 0.02, 0.1)
    layers[1].weight.grad = torch.ones(8, 8)
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(layers.parameters(), before)]
    assert moved == [False, True, False, False, False, False]
