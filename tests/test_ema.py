"""The moving average and its decay, compared with torch's AveragedModel and the formula."""
import copy

import pytest
import torch
from helpers import same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.ema import EMA


class Model(nn.Sequential):
    """Layers with parameters, buffers, and frozen weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def train(model, steps, after_step):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        model.frozen.weight.add_(1e-3)  # frozen, but not constant: other code may change it
        after_step(step)


def make(steps=5, **settings):
    """A model trained for some steps, and its average."""
    torch.manual_seed(0)
    model = Model()
    ema = EMA(model, **settings)
    train(model, range(1, steps + 1), ema.update)
    return model, ema


@pytest.mark.parametrize("settings", [
    dict(min_decay=0.9999),
    dict(decay=0.8, update_after=3),
    dict(min_decay=0.9, update_every=4),
])
def test_the_average_is_torchs_averagedmodel_of_those_decays_and_all_else_is_the_models_own(
        settings):
    model, ema = make(0, **settings)
    reference = AveragedModel(model)

    def after_step(step):
        ema.update(step)
        if step % ema.update_every == 0:
            reference.multi_avg_fn = get_ema_multi_avg_fn(ema.decay_at(step))
            reference.update_parameters(model)
        expected = model.state_dict()  # for buffers and frozen weights
        for name, parameter in reference.module.named_parameters():
            if parameter.requires_grad:
                expected[name] = parameter
        assert same(ema.state_dict(), expected)

    train(model, range(1, 41), after_step)
    assert not torch.equal(ema.state_dict()["first.weight"], model.first.weight)


@pytest.mark.parametrize("settings", [
    dict(inv_gamma=10.0),
    dict(inv_gamma=2.5, power=2 / 3, min_decay=0.2, update_after=40),
    {},
])
def test_the_decay_follows_the_formula(settings):
    ema = EMA(Model(), decay=0.95, **settings)
    decays = [ema.decay_at(step) for step in range(1, 300)]
    # EMA's defaults, except for `decay`.
    defaults = dict(inv_gamma=1.0, power=0.75, min_decay=0.0, update_after=0)
    inv_gamma, power, min_decay, update_after = (defaults | settings).values()
    s = torch.arange(1.0, 299 - update_after, dtype=torch.float64)
    expected = (1 - (s / inv_gamma + 1) ** -power).clamp(min_decay, 0.95).tolist()
    # Up to and including the step after `update_after`, the parameters are copied.
    assert decays == pytest.approx([0.0] * (update_after + 1) + expected, rel=1e-12)


def test_by_default_every_step_is_averaged_up_to_a_decay_of_four_nines():
    ema = EMA(Model())
    assert (ema.update_every, ema.decay_at(10**9)) == (1, 0.9999)
    assert [ema.decay_at(step) for step in (1, 2, 3)] == [0.0, 1 - 2**-0.75, 1 - 3**-0.75]


def test_the_first_update_copies_whenever_it_comes():
    model = Model()
    ema = EMA(model, update_every=4, min_decay=0.9)
    nn.init.constant_(model.first.weight, 2.0)
    ema.update(3)
    assert not torch.equal(ema.state_dict()["first.weight"], model.first.weight)
    ema.update(4)
    assert torch.equal(ema.state_dict()["first.weight"], model.first.weight)


def test_without_a_decay_all_is_the_models_own():
    model, ema = make(decay=0)
    assert not ema.averages
    assert same(ema.state_dict(), model.state_dict())


def test_a_state_that_was_saved_is_copied_in_and_goes_on_bit_for_bit():
    """Promise 1: resuming is exact."""
    model, ema = make(3, min_decay=0.9)
    again = EMA(copy.deepcopy(model), min_decay=0.9)
    state = copy.deepcopy(ema.state_dict())
    again.load_state_dict(state)
    for each in (ema, again):
        train(each.model, range(4, 7), each.update)
    assert same(again.state_dict(), ema.state_dict())
    assert not same(state, ema.state_dict())  # the loaded state is not written to


def test_a_bf16_model_has_an_fp32_average_that_moves_where_bf16_would_stand_still():
    model = Model().bfloat16()
    ema = EMA(model, min_decay=0.9999)
    nn.init.constant_(model.first.weight, 1.0)
    ema.update(1)
    nn.init.constant_(model.first.weight, 1.5)
    for step in range(2, 12):
        ema.update(step)
    expected = torch.full((6, 4), 1.5 - 0.5 * 0.9999 ** 10)
    torch.testing.assert_close(ema.state_dict()["first.weight"], expected, rtol=1e-6, atol=0)


def test_applied_gives_the_averages_and_then_the_models_own_weights_bit_for_bit():
    model, ema = make()
    weights = copy.deepcopy(model.state_dict())
    parameters = [*model.parameters()]
    with ema.applied(model):
        assert same(model.state_dict(), ema.state_dict())
        assert not same(model.state_dict(), weights)
        model.train()(torch.randn(8, 4))  # changes the batch norm's buffers
    assert same(model.state_dict(), weights)
    assert all(p is q for p, q in zip(parameters, model.parameters()))


def test_a_model_that_was_cast_and_got_other_parameters_and_buffers_is_followed():
    model, ema = make()
    before = copy.deepcopy(ema.state_dict())
    model.double()
    model.first.weight = nn.Parameter(torch.ones(6, 4))
    model.norm.running_mean = torch.ones(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update(6)
    averages = ema.state_dict()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, weight in model.state_dict().items():
        expected = weight
        if name in trainable:
            expected = before[name].lerp(weight.float(), 1 - ema.decay_at(6))
        assert torch.equal(averages[name], expected)


def test_an_update_reads_the_weights_alone_and_makes_no_state_dict():
    model, ema = make()
    before = copy.deepcopy(ema.averages)
    made = []
    model.register_state_dict_post_hook(lambda *arguments: made.append(arguments))
    ema.update(6)
    assert not made
    assert not same(ema.averages, before)
    assert not any(average.requires_grad for average in ema.averages.values())


def test_a_state_of_another_model_is_refused_by_name_and_changes_nothing():
    ema = EMA(Model())
    before = copy.deepcopy(ema.state_dict())
    other = Model()
    other.second = nn.Linear(7, 2)
    other.third = nn.Linear(1, 1, bias=False)
    del other.norm.bias
    with pytest.raises(ValueError, match="EMA state of another model") as caught:
        ema.load_state_dict(other.state_dict())
    for entry in (("norm.bias", (6,)), ("second.weight", (2, 7)), ("third.weight", (1, 1))):
        assert str(entry) in str(caught.value)
    assert same(ema.state_dict(), before)


def test_weights_are_restored_after_an_error_and_not_stored_twice():
    model, ema = make()
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError), ema.applied(model):
        1 / 0  # noqa: B018 (the error is intended)
    assert same(model.state_dict(), weights)
    with ema.applied(model), pytest.raises(AssertionError), ema.applied(model):
        pass


def test_a_buffer_that_is_named_is_averaged_and_may_begin_anew():
    name = "norm.running_mean"
    model, ema = make(0, buffers=(name,))
    expected = model.norm.running_mean.clone()

    def after_step(step):
        ema.update(step)
        expected.lerp_(model.norm.running_mean, 1 - ema.decay_at(step))

    train(model, range(1, 6), after_step)
    assert torch.equal(ema.state_dict()[name], expected)
    assert not torch.equal(model.norm.running_mean, expected)
    ema.restart(name)
    assert torch.equal(ema.state_dict()[name], model.norm.running_mean)
    _, nothing = make(0, buffers=(name,), decay=0)
    nothing.restart(name)
    assert not nothing.averages
