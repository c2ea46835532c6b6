"""Parameter groups and optimizers against torch's own, put together by hand."""
import numpy as np
import pytest
import torch
from torch import nn

import common.nn
from common import lora, optim


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.null = common.nn.learned_tokens(2, 8)
        self.convolution = nn.Conv1d(8, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.heads = nn.Parameter(torch.randn(2, 4, 6))
        self.temperature = nn.Parameter(torch.tensor(1.0))


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model()


def gradients(model, seed):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None


def test_only_matrices_and_kernels_decay_and_frozen_and_tied_parameters_are_not_doubled():
    model = make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, decayed, rest = ([names[id(p)] for p in part] for part in optim.groups(model))
    assert matrices == ["convolution.weight", "linear.weight"]
    assert decayed == ["heads"]  # not of a layer, so it is no matrix (out, in): Muon does not take it
    assert sorted(rest) == ["convolution.bias", "embedding.weight", "linear.bias", "norm.bias", "norm.weight",
                            "null.weight", "temperature"]


def test_what_a_layer_of_another_kind_names_as_matrices_is_taken_for_such():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    adapters = lora.inject(model, 2, names=("0",))
    matrices, decayed, rest = optim.groups(adapters)
    assert [p.shape for p in matrices] == [(2, 4), (4, 2)] and not decayed and not rest
    assert [type(optimizer).__name__ for optimizer in optim.make(adapters, "muon", 0.1, 0.1)] == ["Muon"]


def test_in_a_transformer_the_weights_of_linear_layers_decay_and_nothing_else():
    model = common.nn.Transformer(16, 2, 4)
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    matrices, decayed, rest = optim.groups(model)
    assert {id(p) for p in matrices} == {id(p) for p in linear} and not decayed
    assert len(matrices) + len(rest) == len(list(model.parameters()))


def test_adamw_is_torchs_with_decay_for_those_parameters_alone():
    ours, theirs = make_model(), make_model()
    decayed = [theirs.convolution.weight, theirs.linear.weight, theirs.heads]
    rest = [theirs.embedding.weight, theirs.null.weight, theirs.convolution.bias, *theirs.norm.parameters(),
            theirs.linear.bias, theirs.temperature]
    by_hand = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
                                lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    optimizer, = optim.make(ours, "adamw", 0.05, 0.3, betas=(0.8, 0.95), eps=1e-6)
    usual, = optim.make(ours, "adamw", 0.05, 0.3)
    assert {(g["betas"], g["eps"], g["fused"]) for g in usual.param_groups} == {((0.9, 0.99), 1e-8, True)}
    for step in range(20):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        by_hand.step()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), p, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.frozen.weight, make_model().frozen.weight)


SHAPES = [(8, 8), (8, 8), (4, 24), (24, 4), (8, 8), (16, 3)]


def test_muon_is_torchs_and_adamw_is_for_the_rest():
    ours, theirs = (nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in SHAPES) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = optim.Muon([p for p in ours.parameters()], 0.02, 0.1)
    by_hand = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = [p.clone() for p in ours.parameters()]
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        by_hand.step()
        for old, mine, torchs in zip(before, ours.parameters(), theirs.parameters()):
            update = mine - old * (1 - 0.02 * 0.1)
            size = 0.02 * 0.2 * max(old.shape) ** 0.5 * (min(old.shape) / old.numel()) ** 0.5  # an RMS
            assert update.square().mean().sqrt().item() == pytest.approx(size, rel=0.3)
            assert (mine - torchs).norm() < 0.08 * (step + 1) * update.norm()  # theirs is bf16
    names = [type(optimizer).__name__ for optimizer in optim.make(make_model(), "muon", 0.02, 0.1)]
    assert names == ["Muon", "AdamW"]


def test_muon_takes_a_kernel_as_a_matrix_of_its_outputs():
    kernel, matrix = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(27, 8, bias=False)
    matrix.weight.data = kernel.weight.data.flatten(1).clone()
    kernel.to(memory_format=torch.channels_last)
    for step in range(2):
        for layer in kernel, matrix:
            torch.manual_seed(step)
            layer.weight.grad = torch.randn(8, 27).view_as(layer.weight)
        if step == 0:
            optimizers = [optim.make(layer, "muon", 0.1, 0.1)[0] for layer in (kernel, matrix)]
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(kernel.weight.flatten(1), matrix.weight)


def test_orthogonalized_changes_singular_values_by_five_rounds_of_the_published_polynomial():
    torch.manual_seed(0)
    for shape in ((2, 6, 6), (1, 4, 30), (3, 30, 4)):
        stack = torch.randn(shape)
        before = stack.clone()
        u, s, v = torch.linalg.svd(stack, full_matrices=False)
        s = s / s.square().sum(1, keepdim=True).sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5  # Jordan 2024
        assert s.min() > 0.5 and s.max() < 1.25
        torch.testing.assert_close(optim.orthogonalized(stack), u @ s.diag_embed() @ v, rtol=1e-4, atol=1e-5)
        assert torch.equal(stack, before)
    assert not optim.orthogonalized(torch.zeros(1, 3, 5)).any()  # a gradient of zeros moves nothing


def weights_after(name):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(n, m) for m, n in SHAPES)
    optimizers = optim.make(model, name, 0.01, 0.1)
    for step in range(4):
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def test_any_number_of_ranks_takes_the_same_step_bit_for_bit(on_ranks):
    expected = weights_after("muon")
    for ranks in (1, 2, 3, 8):  # the last with more ranks than matrices
        for found in on_ranks(ranks, weights_after, "muon"):
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bias, kinds", [(False, ["Muon"]), (True, ["Muon", "AdamW"])])
def test_a_model_of_matrices_alone_needs_no_adamw_beside_muon(bias, kinds):
    model = nn.Linear(4, 4, bias=bias)
    assert [type(optimizer).__name__ for optimizer in optim.make(model, "muon", 0.1, 0.1)] == kinds
    assert [len(optimizer.param_groups) for optimizer in optim.make(model, "adamw", 0.1, 0.1)] == [1 + bias]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_bit_for_bit(name):
    def run(model, optimizers, steps):
        for step in steps:
            gradients(model, step)
            for optimizer in optimizers:
                optimizer.step()

    straight = make_model()
    run(straight, optim.make(straight, name, 0.01, 0.1), range(6))
    first = make_model()
    optimizers = optim.make(first, name, 0.01, 0.1)
    run(first, optimizers, range(3))
    second = make_model(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = optim.make(second, name, 0.01, 0.1)
    optim.load(resumed, [optimizer.state_dict() for optimizer in optimizers])
    run(second, resumed, range(3, 6))
    for key, value in straight.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


@pytest.mark.parametrize("old, new", [(0.1, 0.2), (0.0, 0.2), (0.2, 0.0)])
def test_rate_decay_and_betas_stay_those_of_the_command_line(old, new):
    first, second = make_model(), make_model()
    saved = optim.make(first, "adamw", 0.01, old, betas=(0.9, 0.99))
    gradients(first, 0)
    saved[0].step()
    resumed = optim.make(second, "adamw", 0.5, new, betas=(0.8, 0.9))
    optim.load(resumed, [saved[0].state_dict()])
    decays = [group["weight_decay"] for group in resumed[0].param_groups]
    assert decays == [new, 0.0]
    assert all(group["lr"] == 0.5 and group["betas"] == (0.8, 0.9) for group in resumed[0].param_groups)
    before, after = saved[0].state[first.linear.weight], resumed[0].state[second.linear.weight]
    assert torch.equal(before["exp_avg"], after["exp_avg"])


def test_the_states_of_another_number_of_optimizers_are_refused():
    optimizers = optim.make(make_model(), "adamw", 0.1, 0.1)
    with pytest.raises(ValueError, match="longer"):
        optim.load(optimizers, [optimizers[0].state_dict()] * 2)
