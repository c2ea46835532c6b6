"""Parameter groups and optimizers against torch's own, put together by hand."""
import copy

import numpy as np
import pytest
import torch
from torch import nn

import common.nn
from common import dist, lora, optim


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 8)
        self.null = common.nn.learned_tokens(2, 8)
        self.convolution = nn.Conv1d(8, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.heads = nn.Parameter(torch.randn(4, 6))
        self.temperature = nn.Parameter(torch.tensor(1.0))


def train(model, optimizers, steps):
    for step in steps:
        torch.manual_seed(step)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()


def states(optimizers):
    return [optimizer.state_dict() for optimizer in optimizers]


def test_only_matrices_and_kernels_decay_and_frozen_and_tied_parameters_are_not_doubled():
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, decayed, undecayed = optim.groups(model)
    assert [names[p] for p in matrices] == ["convolution.weight", "linear.weight"]
    # Not of a layer, so it is no matrix (out, in), and Muon does not take it.
    assert [names[p] for p in decayed] == ["heads"]
    assert sorted(names[p] for p in undecayed) == [
        "convolution.bias", "embedding.weight", "linear.bias", "norm.bias", "norm.weight",
        "null.weight", "temperature"]


def test_a_layer_of_another_kind_names_its_matrices_in_an_attribute():
    adapters = lora.inject(nn.Sequential(nn.Linear(4, 4, bias=False)), 2, names=("0",))
    matrices, decayed, undecayed = optim.groups(adapters)
    assert [p.shape for p in matrices] == [(2, 4), (4, 2)]
    assert not decayed and not undecayed


def test_adamw_decays_those_parameters_alone():
    model = Model()
    matrices, decayed, undecayed = optim.groups(model)
    adamw, = optim.make(model, "adamw", 0.05, 0.3, betas=(0.8, 0.95), eps=1e-6)
    assert type(adamw) is torch.optim.AdamW
    groups = [set(group["params"]) for group in adamw.param_groups]
    assert groups == [{*matrices, *decayed}, {*undecayed}]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.0]
    for name, value in dict(lr=0.05, betas=(0.8, 0.95), eps=1e-6, fused=True).items():
        assert [group[name] for group in adamw.param_groups] == [value] * 2
    default, = optim.make(model, "adamw", 0.05, 0.3)
    assert (default.defaults["betas"], default.defaults["eps"]) == ((0.9, 0.99), 1e-8)


SHAPES = [(8, 8), (8, 8), (4, 24), (24, 4), (8, 8), (16, 3)]


def linear_layers(shapes=SHAPES, bias=False):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(n, m, bias=bias) for m, n in shapes)


def test_muon_is_torchs_with_updates_of_the_size_of_adamws():
    ours = linear_layers()
    theirs = linear_layers()
    optimizer = optim.Muon([*ours.parameters()], 0.02, 0.1)
    reference = torch.optim.Muon(
        theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = [p.clone() for p in ours.parameters()]
        train(ours, [optimizer], [step])
        train(theirs, [reference], [step])
        for old, new, torchs in zip(before, ours.parameters(), theirs.parameters()):
            assert (new - torchs).norm() < 0.08 * (step + 1) * (new - old).norm()  # theirs is bf16


def test_muon_takes_a_kernel_as_a_matrix_of_its_outputs():
    kernel = nn.Conv2d(3, 8, 3, bias=False)
    matrix = nn.Linear(27, 8, bias=False)
    matrix.weight.data = kernel.weight.data.flatten(1).clone()
    kernel.to(memory_format=torch.channels_last)
    for layer in (kernel, matrix):
        optimizer, = optim.make(layer, "muon", 0.1, 0.1)
        for step in range(2):
            torch.manual_seed(step)
            layer.weight.grad = torch.randn(8, 27).view_as(layer.weight)
            optimizer.step()
    torch.testing.assert_close(kernel.weight.flatten(1), matrix.weight)


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 4, 30), (3, 30, 4)])
def test_orthogonalize_changes_singular_values_by_five_rounds_of_the_published_polynomial(shape):
    torch.manual_seed(0)
    stack = torch.randn(shape)
    u, s, v = torch.linalg.svd(stack, full_matrices=False)
    s = s / s.square().sum(1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5  # Jordan 2024
    expected = u @ s.diag_embed() @ v
    torch.testing.assert_close(optim.orthogonalize(stack), expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_zeros_moves_nothing():
    assert not optim.orthogonalize(torch.zeros(1, 3, 5)).any()


def weights_after_muon(shapes):
    model = linear_layers(shapes, bias=True)
    train(model, optim.make(model, "muon", 0.01, 0.1), range(4))
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


@pytest.mark.parametrize("world_size, shapes", [(2, SHAPES), (3, SHAPES[1:3])])
def test_any_number_of_ranks_takes_the_same_step_bit_for_bit(world_size, shapes, on_ranks):
    expected = weights_after_muon(shapes)
    for weights in on_ranks(world_size, weights_after_muon, shapes):
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("model, name, groups", [
    (nn.Linear(4, 4), "muon", {"Muon": 1, "AdamW": 1}),
    (nn.Linear(4, 4, bias=False), "muon", {"Muon": 1}),
    (nn.LayerNorm(4), "muon", {"AdamW": 1}),
    (nn.Linear(4, 4), "adamw", {"AdamW": 2}),
    (nn.Linear(4, 4, bias=False), "adamw", {"AdamW": 1}),
])
def test_no_optimizer_or_group_is_empty(model, name, groups):
    optimizers = optim.make(model, name, 0.1, 0.1)
    assert {type(o).__name__: len(o.param_groups) for o in optimizers} == groups


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("zeros", [True, False])
def test_an_optimizer_with_a_parameter_that_never_gets_a_gradient_is_restored(name, zeros):
    model = Model()
    optimizers = optim.make(model, name, 0.01, 0.1)
    for _ in range(2):
        model.linear(torch.ones(6)).sum().backward()
        if zeros:
            dist.sum_gradients(model)  # as the scripts do: None counts as zeros
        for optimizer in optimizers:
            optimizer.step()
    saved = copy.deepcopy(states(optimizers))
    resumed = optim.make(model, name, 0.01, 0.1)
    assert optim.fit(resumed, saved)
    optim.load(resumed, saved)
    assert [len(state["state"]) for state in states(resumed)] == [
        len(state["state"]) for state in saved
    ]


@pytest.mark.parametrize("old, new", [(0.1, 0.2), (0.0, 0.2), (0.2, 0.0)])
def test_rate_decay_and_betas_stay_those_of_the_command_line(old, new):
    model = Model()
    saved = optim.make(model, "adamw", 0.01, old, betas=(0.9, 0.99))
    train(model, saved, [0])
    resumed, = optim.make(model, "adamw", 0.5, new, betas=(0.8, 0.9))
    optim.load([resumed], states(saved))
    settings = [(g["lr"], g["betas"], g["weight_decay"]) for g in resumed.param_groups]
    assert settings == [(0.5, (0.8, 0.9), new), (0.5, (0.8, 0.9), 0.0)]


def spoil(change, states):
    """Change one thing in the `states` that optimizers of the same model cannot have."""
    moments = states[0]["state"][0]
    if change == "optimizers":
        states.append(states[0])
    elif change == "groups":
        states[0]["param_groups"][0]["params"].pop()
    elif change == "names":
        moments["more"] = torch.zeros(())
    elif change == "shape":
        moments.update({name: torch.zeros(3) for name in ("exp_avg", "momentum_buffer")})
    elif change == "step":
        moments["step"] = torch.zeros(3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("change", ["", "optimizers", "groups", "names", "shape", "step"])
def test_only_states_of_the_same_optimizers_fit(name, change):
    model = Model()
    optimizers = optim.make(model, name, 0.1, 0.1)
    assert optim.fit(optimizers, states(optimizers))  # before the first step
    train(model, optimizers, [0])
    saved = states(optimizers)
    spoil(change, saved)
    assert optim.fit(optimizers, saved) == (change == "")
