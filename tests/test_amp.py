"""The step of mixed precision: the plain one if nothing overflows, and none if something does."""
import warnings

import pytest
import torch
from torch import nn

from common import amp, optim
from common.config import UserError

CPU = torch.device("cpu")


def make(seed=0, optimizer="adamw"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    return model, optim.make(model, optimizer, 0.1, 0.01)


def loss_of(model, step):
    torch.manual_seed(step)
    return model(torch.randn(6, 4)).float().square().mean()


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def state_of(model, optimizers):
    """The weights and all that the optimizers keep, as one vector."""
    tensors = [*model.parameters()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += state.values()
    return nn.utils.parameters_to_vector(tensors).detach().clone()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_the_step_is_the_plain_one_bit_for_bit(precision):
    model, optimizers = make()
    plain_model, plain_optimizers = make()
    scaler = amp.scaler(CPU, precision)
    for step in range(5):
        scaler.scale(loss_of(model, step)).backward()
        [norm], stepped = amp.step(scaler, [(optimizers, 0.0)])
        loss_of(plain_model, step).backward()
        torch.testing.assert_close(norm, gradients(plain_model).norm())
        plain_optimizers[0].step()
        assert stepped is True
        model.zero_grad()
        plain_model.zero_grad()
    assert torch.equal(state_of(model, optimizers), state_of(plain_model, plain_optimizers))


@pytest.mark.parametrize("precision, enabled", [("fp32", False), ("bf16", True), ("fp16", True)])
def test_autocast_runs_products_in_the_precision_and_says_nothing(precision, enabled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.autocast(CPU, precision):
            assert torch.is_autocast_enabled("cpu") == enabled
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == amp.DTYPES[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_gradients_of_each_model_are_clipped_together_as_torch_does_it(precision):
    scaler = amp.scaler(CPU, precision)
    limits = [0.01, 0.0, 1000.0, 1e-3]
    groups = []
    models = []
    for seed, limit in enumerate(limits):
        model, optimizers = make(seed, "muon")
        scaler.scale(loss_of(model, seed)).backward()
        models.append(model)
        groups.append((optimizers, limit))
    norms, stepped = amp.step(scaler, groups)
    assert stepped and norms.min() > 0.01
    for seed, limit in enumerate(limits):
        expected, _ = make(seed)
        loss_of(expected, seed).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), limit or torch.inf)
        torch.testing.assert_close(norms[seed], norm)
        torch.testing.assert_close(gradients(models[seed]), gradients(expected))


@pytest.mark.parametrize("spoiled", [0, 1])
def test_an_overflow_in_one_of_two_models_stops_both_once_and_the_next_step_goes_on(spoiled):
    pairs = [make(0), make(1)]
    scaler = amp.scaler(CPU, "fp16")

    def step(number, spoiled=None):
        """Whether it stepped, and the states after it."""
        for i, (model, _) in enumerate(pairs):
            model.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if i == spoiled:
                model[2].weight.grad[0, 0] = torch.inf
        norms, stepped = amp.step(scaler, [(optimizers, 1.0) for _, optimizers in pairs])
        assert norms.isfinite().tolist() == [i != spoiled for i in range(2)]
        return stepped, torch.stack([state_of(*pair) for pair in pairs])

    _, first = step(0)
    scale = scaler.get_scale()
    stepped, second = step(1, spoiled)
    assert not stepped and torch.equal(first, second)
    assert scaler.get_scale() == scale / 2  # lowered once
    stepped, third = step(2)
    assert stepped and (third != second).any(1).all()
    assert scaler.get_scale() == scale / 2


def test_a_run_whose_gradients_overflow_at_any_scale_ends_with_a_way_out():
    model, optimizers = make()
    scaler = amp.scaler(CPU, "fp16")

    def step(factor=1.0):
        model.zero_grad()
        scaler.scale(loss_of(model, 0) * factor).backward()
        return amp.step(scaler, [(optimizers, 1.0)])[1]

    while scaler.get_scale() > 2 ** -20:
        assert not step(torch.nan)
    assert step()  # the last scale to be tried is still good for a step
    with pytest.raises(UserError, match="overflow fp16 at any scale; use --precision bf16"):
        step(torch.nan)


def test_a_scale_survives_a_round_trip_and_a_change_of_precision_is_reported():
    scaler = amp.scaler(CPU, "fp16")
    default = scaler.get_scale()
    scaler.scale(torch.ones(()))  # a scaler makes its state when it is first used
    scaler.update(512.0)
    state = scaler.state_dict()
    resumed = amp.scaler(CPU, "fp16")
    assert amp.load_scaler(resumed, state) is None
    assert resumed.state_dict() == state
    assert "dropped" in amp.load_scaler(amp.scaler(CPU, "bf16"), state)
    new = amp.scaler(CPU, "fp16")
    assert "anew" in amp.load_scaler(new, {})
    assert new.get_scale() == default
    plain = amp.scaler(CPU, "fp32")
    assert amp.load_scaler(plain, {}) is None
    assert plain.state_dict() == {}
