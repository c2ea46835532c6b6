"""Parameter groups and optimizers against torch's own, put together by hand."""
import pytest
import torch
from torch import nn

import common.nn
from common import optim


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.null_tokens = nn.Parameter(torch.randn(2, 8))
        self.convolution = nn.Conv1d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.embedding(x) + self.null_tokens[0]  # (B, N, 8)
        x = self.norm(self.convolution(x.transpose(1, 2)).transpose(1, 2))
        return self.frozen(self.tied(self.linear(x))) * self.temperature


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
    decayed, rest = ([names[id(p)] for p in part] for part in optim.groups(model))
    assert decayed == ["convolution.weight", "linear.weight"]
    assert sorted(rest) == ["convolution.bias", "embedding.weight", "linear.bias", "norm.bias", "norm.weight",
                            "null_tokens", "temperature"]


def test_in_a_transformer_the_weights_of_linear_layers_decay_and_nothing_else():
    model = common.nn.Transformer(16, 2, 4, context_width=6)
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    decayed, rest = optim.groups(model)
    assert {id(p) for p in decayed} == {id(p) for p in linear}
    assert len(decayed) + len(rest) == len(list(model.parameters()))


def test_adamw_is_torchs_with_decay_for_those_parameters_alone():
    ours, theirs = make_model(), make_model()
    decayed = [theirs.convolution.weight, theirs.linear.weight]
    rest = [theirs.embedding.weight, theirs.null_tokens, theirs.convolution.bias, *theirs.norm.parameters(),
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


def test_muon_is_torchs_for_matrices_at_a_rate_as_adamws_and_adamw_is_for_the_rest():
    ours, theirs, before = make_model(), make_model(), make_model()
    optimizers = optim.make(ours, "muon", 0.02, 0.1, betas=(0.8, 0.95), eps=1e-6)
    others = [p for p in theirs.parameters() if p is not theirs.linear.weight and p is not theirs.convolution.weight]
    by_hand = [torch.optim.Muon([theirs.linear.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
               torch.optim.AdamW([{"params": [theirs.convolution.weight], "weight_decay": 0.1},
                                  {"params": others, "weight_decay": 0.0}], lr=0.02, betas=(0.8, 0.95), eps=1e-6)]
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.Muon, torch.optim.AdamW]
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for optimizer in optimizers + by_hand:
            optimizer.step()
        if step == 0:
            kept = before.linear.weight * (1 - 0.02 * 0.1)  # what the decay leaves
            update = (kept - ours.linear.weight).detach()
            assert update.square().mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.3)  # an RMS like AdamW's
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shapes, kinds", [([(4, 4)], ["Muon"]), ([(4, 4), (4,)], ["Muon", "AdamW"])])
def test_a_model_of_matrices_alone_needs_no_adamw_beside_muon(shapes, kinds):
    model = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    assert [type(optimizer).__name__ for optimizer in optim.make(model, "muon", 0.1, 0.1)] == kinds
    assert [len(optimizer.param_groups) for optimizer in optim.make(model, "adamw", 0.1, 0.1)] == [len(shapes)]


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
