"""Parameter groups, the optimizers built from them, and their saved state."""
import pytest
import torch
from torch import nn

from common import checkpoint, optim
from common.config import UserError
from common.models import lora
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
    # `heads` is in no layer, so it does not count as an (out, in) matrix for Muon to train.
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
    """Adapts its learning rate, and stores it in its groups, as Prodigy does."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1, rate=1.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                group["rate"] *= 1 + 0.1 * parameter.grad.mean().item()
                parameter.add_(parameter.grad, alpha=-group["lr"] * group["rate"])


def build(kind):
    """A model and its optimizers: from `optim.make` if `kind` is a name, else of class `kind`."""
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
    message = rf"x.pt: its optimizers are \[{saved_kind}\], those of this run \[{present}\]; start"
    with pytest.raises(UserError, match=message):
        optim.load(optimizers, optim.state(saved), "x.pt")
