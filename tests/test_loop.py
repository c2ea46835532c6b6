"""The loops' shared part: log lines, what is due when, what ends a run, how it starts."""

import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Settings
from torch import nn

from common import checkpoint, dist, loop
from common.config import UserError

# Constant rate, no warm-up.
PLAIN = dict(batch_size=8, lr=0.5, warmup_steps=0, cosine=False)


class Log:
    """What a Progress logs and prints."""

    enabled = False

    def __init__(self):
        self.lines = []
        self.printed = []

    def log(self, step, samples=None, **metrics):
        self.lines.append({"step": step, **metrics})

    def print(self, text):
        self.printed.append(text)


def state_at(step, unlogged=checkpoint.NOTHING_UNLOGGED, **settings):
    """As much of a State as a Progress needs."""
    return SimpleNamespace(
        cfg=Settings(**{**PLAIN, **settings}),
        step=step,
        scaler=SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 4.0),
        unlogged=unlogged,
        logged_step=step - len(unlogged["losses"]),
    )


def progress_of(state, run=None):
    dataset = SimpleNamespace(name=lambda index: f"sample {index}")
    return loop.Progress(run, state, Log(), "test", dataset)


def add(progress, loss, norm=2.0, unusable=()):
    progress.state.step += 1
    batches = []
    for chunk, names in enumerate((list(unusable), [])):
        index = torch.tensor([10 * progress.state.step + chunk])
        batches.append({"unusable": names, "index": index})
    loss = torch.tensor(float(loss))
    losses = [loss - 2, torch.tensor(2.0)]
    progress.add(losses, torch.tensor(norm), batches, {"other_loss": 2 * loss})


# Lines


def two_lines(losses, unusable=((), ())):
    """(lines, what was printed) of two steps of 8 samples, then of one, on this rank."""
    progress = progress_of(state_at(3))
    for loss, names in zip(losses, unusable):
        add(progress, loss, unusable=names)
    progress.overflows += 1
    progress.log_line()
    progress.restart()
    add(progress, 8, unusable=["a"])
    progress.log_line()
    for line in progress.log.lines:
        assert line.pop("samples_per_s") > 0
    return progress.log.lines, progress.log.printed


def two_lines_on_rank(losses, unusable):
    return two_lines(losses[dist.rank()], unusable[dist.rank()])


LINE = {
    "step": 5,
    "samples_seen": 40,
    "loss": 2.5,
    "lr": 0.5,
    "grad_norm": 2.0,
    "overflows": 1,
    "unusable_rows": 0,
    "other_loss": 4.0,  # of the last step
    "scale": 4.0,
}


def test_a_line_is_the_mean_loss_of_the_steps_since_the_last():
    (first, second), printed = two_lines([24, 16])
    assert first == LINE
    assert (second["loss"], second["overflows"], second["unusable_rows"]) == (1.0, 0, 1)
    assert printed == ["unusable, and replaced by the next row: a"]


def test_lines_are_sums_over_all_ranks_and_each_unusable_sample_is_named_once(on_ranks):
    unusable = [(("b",), ("a",)), (("b",), ())]
    ranks = on_ranks(2, two_lines_on_rank, [(10, 6), (14, 10)], unusable)
    for lines, _ in ranks:
        assert lines[0] == {**LINE, "unusable_rows": 3, "other_loss": 4.0}
        assert lines[1]["loss"] == 2.0
    assert ranks[0][1] == ["unusable, and replaced by the next row: a, b"]


@pytest.mark.parametrize(
    "losses, norm, step, suspects",
    [
        ((1.0, math.nan), 1.0, 9, "sample 90"),
        ((math.nan, math.nan), 1.0, 8, "sample 80"),
        ((1.0, 1.0), math.inf, 9, "sample 90,sample 91"),  # of a gradient all may be the cause
    ],
)
def test_what_is_not_finite_ends_the_run_with_its_step_its_samples_and_the_last_good_checkpoint(
    losses, norm, step, suspects
):
    run = SimpleNamespace(drop_from=lambda bad: f"the one before {bad}")
    progress = progress_of(state_at(7), run)
    for loss in losses:
        add(progress, loss, norm)
    message = (
        rf"runs/x: .*at step {step}; lower --lr .*--leave_out '{suspects}'\. "
        rf".*from the one before {step - 1}"
    )
    with pytest.raises(UserError, match=message):
        progress.log_line()


def due_of(steps, **settings):
    """[(step, whether to evaluate, whether to save), ...] at the lines of a run."""
    run = SimpleNamespace(save=lambda state, log: None)
    progress = progress_of(state_at(0, steps=steps, **settings), run)
    due = []
    for _ in range(steps):
        add(progress, 8)
        if progress.log_due():
            progress.log_line()
            due.append((progress.state.step, progress.eval_due, progress.save_due))
            progress.restart()
    return due


def test_evaluating_and_saving_are_due_by_steps_by_minutes_and_at_the_end():
    due = due_of(4, log_every=1, eval_every=2, save_every=0)
    assert due == [(1, False, False), (2, True, False), (3, False, False), (4, True, True)]
    due = due_of(2, log_every=1, eval_every=0, eval_minutes=1e-9, save_every=0, save_minutes=1e9)
    assert due == [(1, True, False), (2, True, True)]


def test_multiples_between_two_lines_are_due_once():
    due = due_of(16, log_every=4, eval_every=3, save_every=5)
    assert due == [(4, True, False), (8, True, True), (12, True, True), (16, True, True)]


@pytest.mark.parametrize("stop", range(5))
def test_what_a_stop_left_between_two_lines_is_logged_by_the_next_as_if_nothing_was(stop):
    losses = (8.0, 16.0, 40.0, 80.0)  # of the steps 9 to 12; the stop comes after `stop` of them
    run = SimpleNamespace(save=lambda state, log: None, wait=lambda: None)
    state = state_at(8, steps=20, log_every=4)
    progress = progress_of(state, run)
    with pytest.raises(SystemExit) as ended, progress:
        for loss in losses[:stop]:
            add(progress, loss, norm=3.0, unusable=["a"])
        progress.overflows += 1
        raise dist.Stopped(signal.SIGTERM)
    assert ended.value.code == 143
    assert progress.log.printed[-1].startswith(f"stopped by SIGTERM at step {8 + stop}")

    progress = progress_of(state_at(8 + stop, state.unlogged, steps=20, log_every=4))
    for loss in losses[stop:]:
        assert not progress.log_due()
        add(progress, loss, norm=3.0, unusable=["a"])
    assert progress.log_due()
    progress.log_line()
    line = progress.log.lines[0]
    del line["samples_per_s"]
    changed = dict(
        step=12,
        samples_seen=96,
        loss=4.5,
        grad_norm=3.0,
        unusable_rows=4,
        other_loss=20.0,
    )
    assert line == {**LINE, **changed}


# Evaluation


class Dataset:
    """Numbers, each its own index."""

    def name(self, index):
        return str(index)

    def fetch(self, indices, random_words=None):
        return {"x": torch.tensor(indices)}, np.ones(len(indices), dtype=bool)


def mean_of(chunk_size, most=0):
    model = nn.Dropout()
    cfg = Settings(chunk_size=chunk_size, eval_samples=most)
    noise = []

    def loss_of(batch):
        assert not model.training and not torch.is_grad_enabled()
        noise.append(torch.rand(()).item())
        return batch["x"].float().mean()

    mean = loop.mean_loss(model, loss_of, Dataset(), np.arange(20), cfg, torch.device("cpu"))
    assert model.training
    return mean, noise


@pytest.mark.parametrize("chunk_size", [7, 20])
def test_a_mean_loss_is_the_same_in_chunks_of_any_size_and_on_any_ranks(chunk_size, on_ranks):
    mean, noise = mean_of(chunk_size)
    assert mean == 9.5
    assert mean_of(chunk_size, 10)[0] == 4.5
    assert mean_of(chunk_size)[1] == noise  # the same every time
    assert [mean for mean, _ in on_ranks(2, mean_of, chunk_size)] == [9.5, 9.5]


# Start


@pytest.mark.parametrize(
    "settings, ranks, expected",
    [
        (dict(batch_size=64), 1, 16),
        (dict(batch_size=64), 8, 8),
        (dict(batch_size=64, chunk_size=5), 2, 5),
    ],
)
def test_the_chunk_size_is_the_one_given_or_gives_every_rank_a_chunk(
    settings, ranks, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    cfg = Settings(run_dir=str(tmp_path), **settings)
    assert loop.with_chunk_size(cfg, 16).chunk_size == expected
