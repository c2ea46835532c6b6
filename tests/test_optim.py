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
    model = common.nn.Transformer(16, 2, 4, qk_norm=True, normformer=True)
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
    for step in range(20):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        by_hand.step()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), p, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.frozen.weight, make_model().frozen.weight)


def test_muon_turns_matrices_by_orthogonal_updates_and_leaves_the_rest_to_adamw():
    model, before = make_model(), make_model()
    muon, adamw = optim.make(model, "muon", 0.02, 0.0)
    assert [p is model.linear.weight for group in muon.param_groups for p in group["params"]] == [True]
    gradients(model, 0)
    muon.step()
    adamw.step()
    update = (before.linear.weight - model.linear.weight).detach()
    singular = torch.linalg.svdvals(update)
    assert singular.max() / singular.min() < 2.5 < torch.linalg.cond(model.linear.weight.grad)
    assert update.square().mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.3)  # an RMS like AdamW's
    for name in ("embedding.weight", "convolution.weight", "norm.bias", "temperature"):
        change = (before.get_parameter(name) - model.get_parameter(name)).abs()
        torch.testing.assert_close(change, torch.full_like(change, 0.02))  # Adam's first step is lr · sign


def test_muon_is_torchs_but_for_the_rounding_of_bfloat16():
    shapes = [(6, 4), (4, 6), (4, 6), (5, 5), (1, 7)]
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    muon = optim.Muon(ours, lr=0.05, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        before = [p.detach().clone() for p in theirs]
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        muon.step()
        other.step()
        for a, b, old in zip(ours, theirs, before):
            assert (a - b).norm() < 0.05 * (b - old).norm()
            with torch.no_grad():
                b.copy_(a)
    assert muon.state_dict()["state"].keys() == other.state_dict()["state"].keys()


def muon_steps(shapes):
    """What three steps make of matrices of these shapes, on each rank."""
    matrices = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    muon, generator = optim.Muon(matrices, lr=0.05), torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in matrices:
            p.grad = torch.randn(p.shape, generator=generator)
        muon.step()
    return [p.detach().numpy() for p in matrices]


def test_ranks_share_muons_work_and_come_to_the_same(on_ranks):
    shapes = [(6, 4), (4, 6), (4, 6), (4, 6), (5, 5)]  # one of most: a rank has none of a shape
    alone = muon_steps(shapes)
    for ranks in (2, 3):
        first, *others = on_ranks(ranks, muon_steps, shapes)
        for other in others:
            assert all((a == b).all() for a, b in zip(first, other))
        for a, b in zip(first, alone):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def test_newton_schulz_brings_singular_values_near_1_and_keeps_the_vectors():
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    for given, left, right in ((x, u, v), (x.mT, v.mT, u.mT)):
        inner = left.mT @ optim.orthogonal(given) @ right.mT
        values = inner.diagonal(dim1=1, dim2=2)
        assert values.min() > 0.65 and values.max() < 1.25
        torch.testing.assert_close(inner, torch.diag_embed(values), atol=1e-4, rtol=0)
    assert optim.orthogonal(torch.zeros(1, 3, 2)).abs().max() == 0


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
