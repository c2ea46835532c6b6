"""The learning rate, compared with torch's schedulers."""
import pytest
import torch
from helpers import Settings
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from common import optim, schedule


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("warmup_steps", [0, 2, 59])
def test_rates_are_those_of_torchs_warmup_and_cosine(warmup_steps, cosine):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    scheduler = ConstantLR(optimizer, factor=1.0)
    if cosine:
        scheduler = CosineAnnealingLR(optimizer, 60 - warmup_steps)
    if warmup_steps:
        warmup = LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps - 1)
        scheduler = SequentialLR(optimizer, [warmup, scheduler], [warmup_steps])
    for step in range(60):
        rate = schedule.learning_rate(step, 3e-4, warmup_steps, 60, cosine)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("step, warmup_steps, expected", [
    (10, 4, 0.0),
    (99, 4, 0.0),
    (5, 10, 0.6),  # a run that is all warm-up
])
def test_the_cosine_ends_at_zero_and_stays_there(step, warmup_steps, expected):
    assert schedule.learning_rate(step, 1.0, warmup_steps, 10, cosine=True) == expected


def test_the_cosine_is_as_long_as_the_run():
    assert schedule.of_config(10, Settings(warmup_steps=2, steps=10)) == 0.0
    assert schedule.of_config(1000, Settings(cosine=False)) == 1e-3


def test_every_group_of_all_optimizers_gets_the_rate():
    optimizers = optim.make(torch.nn.Linear(4, 4), "muon", 1.0, 0.1)  # Muon and AdamW
    schedule.set_learning_rate(optimizers, 0.5)
    rates = [[group["lr"] for group in each.param_groups] for each in optimizers]
    assert rates == [[0.5], [0.5, 0.5]]
