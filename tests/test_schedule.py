"""The learning rate against torch's own schedulers."""
import pytest
import torch

from common import optim, schedule


def torchs(lr, warmup_steps, steps, cosine):
    """The rates of the steps 0, 1, … by torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    lr_schedulers = torch.optim.lr_scheduler
    after = (lr_schedulers.CosineAnnealingLR(optimizer, steps - warmup_steps) if cosine else
             lr_schedulers.ConstantLR(optimizer, factor=1.0))
    scheduler = after
    if warmup_steps > 1:
        warmup = lr_schedulers.LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps - 1)
        scheduler = lr_schedulers.SequentialLR(optimizer, [warmup, after], [warmup_steps])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("warmup_steps, steps", [(0, 50), (2, 30), (17, 100), (99, 100)])
def test_rates_are_those_of_torchs_warmup_and_cosine(warmup_steps, steps, cosine):
    ours = [schedule.learning_rate(step, 3e-4, warmup_steps, steps, cosine) for step in range(steps)]
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64),
                               torch.tensor(torchs(3e-4, warmup_steps, steps, cosine), dtype=torch.float64),
                               rtol=1e-9, atol=1e-15)


def test_the_warmup_starts_above_zero_and_ends_at_the_rate_and_the_cosine_ends_at_zero():
    rate = [schedule.learning_rate(step, 1.0, 4, 10, True) for step in range(13)]
    assert rate[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate[7] == pytest.approx(0.5) and rate[10:] == [0.0, 0.0, 0.0]
    assert schedule.learning_rate(0, 1.0, 1, 10, False) == 1.0
    assert schedule.learning_rate(5, 1.0, 10, 10, True) == 0.6  # a run that is all warm-up


def test_the_rate_stays_constant_after_the_warmup_without_cosine():
    assert {schedule.learning_rate(step, 0.1, 5, 20, False) for step in range(5, 500)} == {0.1}


def test_a_rate_changed_on_the_command_line_takes_effect_on_resume():
    def train(model, optimizers, lr, steps):
        rates = []
        for step in steps:
            schedule.set_learning_rate(optimizers, schedule.learning_rate(step, lr, 3, 10, True))
            model(torch.ones(1, 4)).sum().backward()
            rates += [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
            for optimizer in optimizers:
                optimizer.step()
        return rates

    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizers = optim.make(first, "adamw", 1.0, 0.1)
    before = train(first, optimizers, 1.0, range(6))
    resumed = optim.make(second, "adamw", 0.5, 0.1)
    optim.load(resumed, [optimizer.state_dict() for optimizer in optimizers])
    after = train(second, resumed, 0.5, range(6, 10))
    whole = train(torch.nn.Linear(4, 4), optim.make(first, "adamw", 1.0, 0.1), 1.0, range(10))
    assert before + [2 * rate for rate in after] == whole


def test_due_counts_every_multiple_passed_and_the_minutes():
    last, found = 0, []
    for step in range(7, 100, 7):  # log lines fall where they fall
        if schedule.due(step, last, 20, 0, 0):
            found.append(step)
        last = step
    assert found == [21, 42, 63, 84]
    assert not schedule.due(5, 0, 0, 1e9, 0)
    assert schedule.due(5, 0, 0, 60, 1) and not schedule.due(5, 0, 0, 59, 1)
