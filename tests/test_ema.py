"""The moving average against torch's AveragedModel, and its decay against the formulas written slowly."""
import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common import ema


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        self.counts += 1
        return self.frozen(self.second(self.norm(self.first(x))))


def make(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Model().to(dtype)


def train(model, steps, after):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=model.first.weight.dtype)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.frozen.weight.add_(1e-3)  # frozen, not constant: loaded or moved by someone else
        after(step)


@pytest.mark.parametrize("settings", [
    {"decay": 0.9, "min_decay": 0.9}, {"decay": 0.8, "update_after": 3}])
def test_the_average_is_torchs_averagedmodel_of_those_decays_bit_for_bit(settings):
    model, compared = make(), []
    ours, theirs = ema.EMA(model, **settings), AveragedModel(model)

    def after(step):
        ours.update(step)
        theirs.multi_avg_fn = get_ema_multi_avg_fn(ema.decay_at(step, **settings))
        theirs.update_parameters(model)
        compared.append(all(torch.equal(ours.state_dict()[name], p) for name, p in theirs.module.named_parameters()
                            if not name.startswith("frozen")))
    train(model, 60, after)
    assert compared == [True] * 60
    assert not torch.equal(ours.state_dict()["first.weight"], model.first.weight)


@pytest.mark.parametrize("warmup", ["power", "ratio"])
@pytest.mark.parametrize("inv_gamma, power, min_decay, update_after",
                         [(1.0, 2 / 3, 0.0, 0), (10.0, 0.75, 0.0, 0), (1.0, 2 / 3, 0.5, 0),
                          (1.0, 2 / 3, 0.2, 40), (1.0, 2 / 3, 0.95, 0)])
def test_the_decay_follows_the_formulas(warmup, inv_gamma, power, min_decay, update_after):
    settings = {"decay": 0.95, "warmup": warmup, "inv_gamma": inv_gamma, "power": power, "min_decay": min_decay,
                "update_after": update_after}
    steps = range(1, 300)
    decays = [ema.decay_at(step, **settings) for step in steps]
    since = torch.arange(1.0, 299 - update_after, dtype=torch.float64)
    formula = {"power": 1 - (since / inv_gamma + 1) ** -power,
               "ratio": (since + 1) / (since + 10)}[warmup].clamp(min_decay, 0.95)
    assert decays == pytest.approx([0.0] * (update_after + 1) + formula.tolist(), rel=1e-12)
    assert decays[update_after] == 0.0 < decays[update_after + 1]  # the parameters are copied up to here
    assert decays == sorted(decays) and max(decays) <= 0.95


def test_a_known_decay_is_that_of_the_package_replaced():
    assert ema.decay_at(2, power=2 / 3) == pytest.approx(1 - 2 ** (-2 / 3))
    assert ema.decay_at(10 ** 9) == 0.9999
    assert ema.decay_at(11, warmup="ratio") == 11 / 20


def test_between_updates_the_shadow_stands_still():
    model = make()
    average, seen = ema.EMA(model, update_every=4, decay=0.5, min_decay=0.5), []

    def after(step):
        before = average.state_dict()["first.weight"].clone()
        average.update(step)
        seen.append(not torch.equal(before, average.state_dict()["first.weight"]))
    train(model, 12, after)
    assert [i + 1 for i, changed in enumerate(seen) if changed] == [4, 8, 12]


def test_buffers_and_frozen_parameters_are_copied():
    model = make()
    average = ema.EMA(model, decay=0.99, min_decay=0.99)
    train(model, 5, average.update)
    state = average.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "counts", "frozen.weight"):
        assert torch.equal(state[name], model.state_dict()[name]), name
    assert state["norm.num_batches_tracked"] == 5
    assert not torch.equal(state["norm.weight"], model.norm.weight)


def test_a_bf16_model_has_an_fp32_shadow_that_moves_where_bf16_would_stand_still():
    model = make(torch.bfloat16)
    average = ema.EMA(model, decay=0.9999, min_decay=0.9999)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {average.state_dict()[name].dtype for name in trained} == {torch.float32}
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    average.update(1)
    with torch.no_grad():
        model.first.weight.fill_(1.5)
    for step in range(2, 12):
        average.update(step)
    expected = torch.full((6, 4), 1.5 - 0.5 * 0.9999 ** 10)
    torch.testing.assert_close(average.state_dict()["first.weight"], expected, rtol=1e-6, atol=0)


def test_applied_gives_the_averages_and_then_the_models_own_weights_bit_for_bit():
    model = make()
    average = ema.EMA(model, decay=0.9)
    train(model, 5, average.update)
    own, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    with average.applied(model):
        assert all(torch.equal(t, average.state_dict()[name]) for name, t in model.state_dict().items())
        assert not torch.equal(model.first.weight, own["first.weight"])
        model.train()(torch.randn(8, 4))  # moves the buffers of the batch norm
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    with pytest.raises(KeyError), average.applied(model):
        raise KeyError("from inside")
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    assert all(p is q for p, q in zip(parameters, model.parameters()))


def test_a_shadow_survives_a_round_trip_and_goes_on_bit_for_bit(tmp_path):
    def go(model, average, steps):
        for step in steps:
            for p in model.parameters():
                p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            average.update(step)

    straight, resumed = make(), make(seed=1)
    whole, other = ema.EMA(straight, decay=0.99), ema.EMA(resumed, decay=0.99)
    go(straight, whole, range(1, 6))
    torch.save({"model": straight.state_dict(), "ema": whole.state_dict()}, tmp_path / "state.pt")
    go(straight, whole, range(6, 11))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(state["model"])
    other.load_state_dict(state["ema"])
    go(resumed, other, range(6, 11))
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in whole.state_dict().items())


def test_averages_can_be_moved_pinned_and_cast_and_go_on_there():
    model, twin = make(), make()
    average, moved = ema.EMA(model, decay=0.9), ema.EMA(twin, decay=0.9).to(torch.device("cpu"), pin_memory=True).to()
    train(model, 4, average.update)
    train(twin, 4, moved.update)
    assert all(torch.equal(t, moved.state_dict()[name]) for name, t in average.state_dict().items())
    cast = moved.to(dtype=torch.bfloat16)
    train(twin, 4, lambda step: cast.update(step + 4))
    state = cast.state_dict()
    assert state["first.weight"].dtype == torch.bfloat16 and state["frozen.weight"].dtype == torch.float32
    assert state["counts"].dtype == torch.int64 and state["counts"].tolist() == [8] * 3
    with cast.applied(twin):
        assert torch.equal(twin.first.weight, state["first.weight"].float())
    assert not torch.equal(twin.first.weight, state["first.weight"].float())


def test_stored_weights_come_back_bit_for_bit_and_are_not_stored_over():
    model = make()
    average = ema.EMA(model, decay=0.9)
    train(model, 3, average.update)
    own = copy.deepcopy(model.state_dict())
    average.store(model)
    average.copy_to(model)
    assert torch.equal(model.first.weight, average.state_dict()["first.weight"])
    with pytest.raises(AssertionError, match="have not been restored"), average.applied(model):
        pass
    average.restore(model)
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    with average.applied(model):  # which stores anew
        pass


def test_with_decay_0_averaging_is_off_and_the_shadow_is_the_model_itself():
    model = make()
    average = ema.EMA(model, decay=0.0, update_after=3).to("meta", torch.bfloat16)  # stays where the model is
    train(model, 3, average.update)
    assert average.state_dict().keys() == model.state_dict().keys()
    assert all(t.data_ptr() == average.state_dict()[name].data_ptr() for name, t in model.state_dict().items())
    own = copy.deepcopy(model.state_dict())
    with average.applied(model):
        assert average.stored is None
    average.load_state_dict({name: t + 1 for name, t in own.items()})  # the average of a run that had one
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    with pytest.raises(ValueError, match=r"first\.weight missing"):
        average.load_state_dict({})
    other = make(seed=1)
    average.copy_to(other)
    assert torch.equal(other.first.weight, model.first.weight)


def test_a_state_of_another_model_is_refused_by_name_and_changes_nothing():
    average = ema.EMA(make())
    before = {name: t.clone() for name, t in average.state_dict().items()}
    state = {name: t + 1 for name, t in average.state_dict().items()}
    state["second.weight"], state["third.bias"] = torch.zeros(2, 7), torch.zeros(1)
    del state["norm.bias"]
    with pytest.raises(ValueError) as caught:
        average.load_state_dict(state)
    for part in ("norm.bias missing", "third.bias unexpected", "second.weight is (2, 7), expected (2, 6)"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"^EMA state of another model: (\S+ missing; ){5}…$"):
        average.load_state_dict({})
    assert all(torch.equal(t, before[name]) for name, t in average.state_dict().items())
