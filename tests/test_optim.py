"""Parameter groups and optimizers against torch's own, put together by hand."""
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from common import checkpoint, optim
from common.config import UserError
from common.models import lora, muon
from common.models.nn import learned_tokens

GIVEN = ("lr", "weight_decay", "betas", "eps")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.null = learned_tokens(2, 8)
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
    adapter = lora.Adapter(torch.zeros(4, 4), 2)
    assert optim.groups(adapter) == ([adapter.A, adapter.B], [], [])


def test_adamw_decays_those_parameters_alone():
    model = Model()
    matrices, decayed, undecayed = optim.groups(model)
    adamw, = optim.make(model, "adamw", 0.05, 0.3, (0.8, 0.95), 1e-6)
    expected = [({*matrices, *decayed}, 0.3), ({*undecayed}, 0.0)]
    for group, (parameters, decay) in zip(adamw.param_groups, expected, strict=True):
        assert {*group["params"]} == parameters
        assert [group[name] for name in GIVEN] == [0.05, decay, (0.8, 0.95), 1e-6]


SHAPES = [(8, 8), (8, 8), (4, 24), (24, 4), (8, 8), (16, 3)]


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
            assert (new - torchs).norm() < 0.08 * (step + 1) * (new - old).norm()  # theirs is bf16


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
    assert not muon.orthogonalize(0 * stack).any()  # and no gradient moves nothing


def weights_after_muon(shapes):
    model = linear_layers(shapes, bias=True)
    train(model, optim.make(model, "muon", 0.01, 0.1), range(4))
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("ranks, shapes", [(2, SHAPES), (3, SHAPES[1:3])])
def test_any_number_of_ranks_takes_the_same_step_bit_for_bit(ranks, shapes, on_ranks):
    assert on_ranks(ranks, weights_after_muon, shapes) == [weights_after_muon(shapes)] * ranks


@pytest.mark.parametrize("model, name", [
    (nn.Linear(4, 4, bias=False), "Muon"),
    (nn.LayerNorm(4), "AdamW"),
])
def test_no_optimizer_is_empty_and_one_with_an_empty_group_steps(model, name):
    optimizer, = optim.make(model, "muon", 0.1, 0.1)
    assert type(optimizer).__name__ == name
    train(model, [optimizer], [0])


# Resuming

class Adaptive(torch.optim.Optimizer):
    """Finds its own rate, and keeps it in its groups, as Prodigy does."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1, rate=1.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                group["rate"] *= 1 + 0.1 * parameter.grad.mean().item()
                parameter.add_(parameter.grad, alpha=-group["lr"] * group["rate"])


def build(kind):
    """A model, and its optimizers by `optim.make`, or of a class in place of them."""
    model = Model()
    if isinstance(kind, str):
        return model, optim.make(model, kind, 0.01, 0.1)
    return model, [kind([p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("kind", [
    "adamw",
    "muon",
    lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
    torch.optim.Adafactor,
    Adaptive,
])
def test_optimizers_of_any_class_are_saved_and_go_on_bit_for_bit(kind, tmp_path):
    model, optimizers = build(kind)
    train(model, optimizers, range(3))
    path = tmp_path / "x.pt"
    checkpoint.save({"model": model.state_dict(), "optimizers": optim.state(optimizers)}, path)
    contents = checkpoint.load(path)
    resumed, resumed_optimizers = build(kind)
    resumed.load_state_dict(contents["model"])
    optim.load(resumed_optimizers, contents["optimizers"], path)
    train(model, optimizers, range(3, 6))
    train(resumed, resumed_optimizers, range(3, 6))
    for name, weights in model.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name])


@pytest.mark.parametrize("kind, given", [
    (torch.optim.AdamW, dict(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)),
    (torch.optim.SGD, dict(momentum=0.5)),
])
def test_rates_decay_betas_eps_and_momentum_stay_those_that_are_given_now(kind, given):
    weight = nn.Parameter(torch.ones(2))
    resumed = kind([weight], lr=0.5, **given)
    optim.load([resumed], optim.state([kind([weight], lr=0.1)]), "x.pt")
    assert {"lr": 0.5, **given}.items() <= resumed.param_groups[0].items()


@pytest.mark.parametrize("kind, present", [
    ("muon", r"\('Muon', \[\d+\]\), \('AdamW', \[\d+, \d+\]\)"),
    (torch.optim.Adam, r"\('Adam', \[\d+\]\)"),
    (torch.optim.AdamW, r"\('AdamW', \[\d+\]\)"),
])
def test_the_state_of_another_class_or_of_other_groups_is_refused_by_name(kind, present):
    _, saved = build("adamw")
    _, optimizers = build(kind)
    saved_kind = r"\('AdamW', \[\d+, \d+\]\)"
    message = rf"x.pt: its optimizers are \[{saved_kind}\], these are \[{present}\]; start from its"
    with pytest.raises(UserError, match=message):
        optim.load(optimizers, optim.state(saved), "x.pt")
