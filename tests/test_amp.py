"""The step of mixed precision: equals the plain one when nothing overflows, and does not happen when something does."""
import copy
import warnings

import pytest
import torch
from torch import nn

from common import amp, dist, optim
from common.config import UserError

CPU = torch.device("cpu")


def make(seed=0, lr=0.1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    return model, optim.make(model, "adamw", lr, 0.01)


def loss_of(model, step, factor=1.0):
    torch.manual_seed(step)
    return model(torch.randn(6, 4)).float().square().mean() * factor


def snapshot(model, optimizers):
    return copy.deepcopy([model.state_dict(), *(optimizer.state_dict()["state"] for optimizer in optimizers)])


def same(a, b):
    """Whether two nests of dicts, lists and tensors agree bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return all(map(same, a, b)) if isinstance(a, list) else a == b


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_the_step_is_the_plain_one_bit_for_bit(precision):
    ours, theirs = make(), make()
    scaler = amp.scaler(CPU, precision)
    for step in range(5):
        scaler.scale(loss_of(ours[0], step)).backward()
        norms, taken = amp.step(scaler, ours[1], 0.0)
        loss_of(theirs[0], step).backward()
        norm = torch.cat([p.grad.flatten() for p in theirs[0].parameters()]).norm()
        torch.testing.assert_close(norms, norm)
        theirs[1][0].step()
        assert taken is True
        ours[0].zero_grad()
        theirs[0].zero_grad()
    assert same(snapshot(*ours), snapshot(*theirs))
    assert scaler.state_dict() == {}


@pytest.mark.parametrize("precision, enabled", [("fp32", False), ("bf16", True), ("fp16", True)])
def test_autocast_runs_products_in_the_precision_and_says_nothing(precision, enabled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.autocast(CPU, precision):
            assert torch.is_autocast_enabled("cpu") == enabled
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == amp.DTYPES[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("limit", [0.5, 1000.0, 0.0])
def test_the_gradients_of_one_model_are_clipped_together_as_torch_does_it(precision, optimizer, limit):
    model, reference, scaler = make()[0], make()[0], amp.scaler(CPU, precision)
    scaler.scale(loss_of(model, 0, 50.0)).backward()
    loss_of(reference, 0, 50.0).backward()
    norm, taken = amp.step(scaler, optim.make(model, optimizer, 0.1, 0.01), limit)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), limit or torch.inf)
    assert taken and norm > 0.5
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_models_that_step_together_are_clipped_each_to_its_own_norm(precision):
    models, scaler, limits = [make(seed)[0] for seed in range(3)], amp.scaler(CPU, precision), [0.5, 0.0, 1e-3]
    optimizers = [optim.make(model, "muon", 0.1, 0.01) for model in models]
    for number, model in enumerate(models):
        scaler.scale(loss_of(model, number, 50.0)).backward()
    norms, taken = amp.step(scaler, optimizers, limits)
    clipped = torch.stack([nn.utils.get_total_norm([p.grad for p in model.parameters()]) for model in models])
    assert taken and norms.min() > 0.5
    torch.testing.assert_close(clipped, torch.stack([torch.tensor(0.5), norms[1], torch.tensor(1e-3)]), rtol=1e-3,
                               atol=1e-6)
    with pytest.raises(ValueError, match="shorter"):
        amp.step(scaler, optimizers, limits[:2])


@pytest.mark.parametrize("bad", [0, 1, None])
def test_an_overflow_in_one_of_two_optimizers_stops_both_once_and_the_next_step_goes_on(bad):
    pairs = [make(0), make(1)]
    scaler = amp.scaler(CPU, "fp16")

    def step(number, spoil):
        for i, (model, _) in enumerate(pairs):
            model.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if spoil and i == bad:
                model[2].weight.grad[0, 0] = torch.inf
        return amp.step(scaler, [optimizers for _, optimizers in pairs], [1.0, 1.0])

    step(0, False)
    before, scale = [snapshot(*pair) for pair in pairs], scaler.get_scale()
    norms, taken = step(1, True)
    assert taken == (bad is None)
    assert norms.isfinite().tolist() == [i != bad for i in range(2)]
    assert scaler.get_scale() == (scale if taken else scale / 2)
    assert [same(old, snapshot(*pair)) for old, pair in zip(before, pairs)] == [not taken] * 2
    assert step(2, False)[1] is True
    assert not any(same(old, snapshot(*pair)) for old, pair in zip(before, pairs))
    assert scaler.get_scale() == (scale if taken else scale / 2)


def overflow_on_one_rank():
    model, optimizers = make()
    scaler = amp.scaler(CPU, "fp16")
    taken, scales, weights = [], [], []
    for step in range(3):
        model.zero_grad()
        spoiled = torch.inf if step == 1 and dist.rank() == 1 else 1.0
        with amp.autocast(CPU, "fp16"):
            loss = loss_of(model, 10 * step + dist.rank())
        scaler.scale(loss * spoiled).backward()
        dist.sum_gradients(model)
        taken.append(amp.step(scaler, optimizers, 1.0)[1])
        scales.append(scaler.get_scale())
        weights.append(model[0].weight.detach().numpy().tobytes())
        dist.check_in_step({"model": model}, step)
    return taken, scales, weights


def test_an_overflow_on_one_rank_skips_the_step_on_both(on_ranks):
    first, second = on_ranks(2, overflow_on_one_rank)
    assert first == second
    taken, scales, weights = first
    assert taken == [True, False, True]
    assert scales[1] == scales[2] == scales[0] / 2
    assert weights[0] == weights[1] != weights[2]


def test_a_run_whose_gradients_overflow_at_any_scale_ends_with_a_way_out():
    model, optimizers = make()
    scaler = amp.scaler(CPU, "fp16")
    for k in range(16, -20, -1):  # the scales 2^k that are tried
        scaler.scale(loss_of(model, 0)).backward()
        assert scaler.get_scale() == 2.0 ** k
        model[0].weight.grad[0, 0] = torch.nan
        assert amp.step(scaler, optimizers, 1.0)[1] is False
        model.zero_grad()
    for _ in range(2):  # the scale that is the last to be tried, 2^-20, is still good for a step
        scaler.scale(loss_of(model, 0)).backward()
        assert amp.step(scaler, optimizers, 1.0)[1] or scaler.get_scale() == 2.0 ** -20
        model.zero_grad()
    scaler.scale(loss_of(model, 0) * torch.nan).backward()
    with pytest.raises(UserError, match="gradients overflow fp16 at any scale; use --precision bf16 or a lower --lr"):
        amp.step(scaler, optimizers, 1.0)


def test_a_scale_survives_a_round_trip_and_a_change_of_precision_is_told():
    scaler, model = amp.scaler(CPU, "fp16"), make()[0]
    loss_of(model, 0)
    scaler.scale(torch.ones(()))  # a scaler makes its state when it is first used
    scaler.update(512.0)
    state = scaler.state_dict()
    resumed = amp.scaler(CPU, "fp16")
    assert amp.load_scaler(resumed, state) is None
    assert resumed.state_dict() == state and resumed.get_scale() == 512.0
    assert "dropped" in amp.load_scaler(amp.scaler(CPU, "bf16"), state)
    fresh = amp.scaler(CPU, "fp16")
    assert "anew" in amp.load_scaler(fresh, amp.scaler(CPU, "fp32").state_dict())
    assert fresh.get_scale() == amp.scaler(CPU, "fp16").get_scale()
    assert amp.load_scaler(amp.scaler(CPU, "fp32"), {}) is None
