"""The state of a run: what a checkpoint brings back, what it refuses, and steps that did not happen."""
import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import train_prior
from common import checkpoint, config, schedule, state, tracker
from common.config import UserError

CPU = torch.device("cpu")


def make(folder, width=8, seed=0, trained=None, **settings):
    """A State of a model with a matrix, a bias, a buffer that steps change, and a part that takes nothing."""
    torch.manual_seed(seed)
    cfg = train_prior.Config(run=str(folder), lr=0.01, ema_power=0.5, **settings)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Linear(width, 1))
    return state.State(cfg, model, CPU, {"width": width, "steps apart": (1, 2)}, {"kind": "test", "widths": [4, width]},
                       trained and trained(model))


def step(run, poison=1.0):
    """One step on data that the step gives."""
    run.set_rate()
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(run.step))
    run.scaler.scale(run.model(data).square().mean() * poison).backward()
    return run.advance()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def same(one, other):
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def saved(run, name="checkpoints/step_1.pt"):
    path = Path(run.cfg.run) / name
    checkpoint.save(run.state(), path)
    return path


@pytest.mark.parametrize("settings", [{}, dict(optimizer="muon"), dict(precision="fp16", ema_on_host=True)])
def test_a_restored_state_goes_on_bit_for_bit(settings, tmp_path):
    run = make(tmp_path, **settings)
    for _ in range(4):
        step(run)
    run.best_val_loss = 0.25
    path = saved(run)
    other = make(tmp_path, seed=1, **settings)
    assert not same(other.state(), run.state())
    notes = other.restore(path)
    run.set_rate()  # which the step gives, and no file
    other.set_rate()
    assert same(other.state(), run.state()) and notes[0] == f"resuming {path} at step {run.step} of {run.cfg.steps}"
    for _ in range(3):
        step(run)
        step(other)
    assert same(other.state(), run.state()) and other.best_val_loss == 0.25


def test_a_commit_is_what_a_run_goes_on_from(tmp_path):
    run, folder = make(tmp_path, keep=1), checkpoint.Run(tmp_path)
    folder.open("auto")
    log = tracker.Tracker(folder, run)
    for number in range(2):
        step(run)
        log.log(run.step, number=number)
        run.commit(folder, log)
    folder.wait()
    again = checkpoint.Run(tmp_path)
    again.open("auto")
    newest, _ = again.newest()
    other = make(tmp_path, seed=1)
    other.restore(tmp_path / newest["file"])
    assert same(other.state()["model"], run.state()["model"]) and other.step == newest["step"] == 2
    assert again.record["world_size"] == 1 and again.record["identity"] == {"width": 8, "steps apart": [1, 2]}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_changed_rate_holds_and_is_told(tmp_path):
    run = make(tmp_path)
    step(run)
    other = make(tmp_path)
    other.cfg = dataclasses.replace(other.cfg, lr=0.5, run=str(tmp_path / "elsewhere"))
    notes = other.restore(saved(run))
    assert "lr changed from 0.01 to 0.5" in notes
    other.set_rate()
    assert other.optimizers[0].param_groups[0]["lr"] == schedule.learning_rate(1, 0.5, 50, 1200, True)
    assert other.best_val_loss == float("inf")  # the file best.pt is in the other folder


def test_another_model_is_refused_by_name_and_not_strict_takes_what_fits(tmp_path):
    run = make(tmp_path)
    path = saved(run, "model.pt")
    other = make(tmp_path, width=12, seed=1)
    with pytest.raises(UserError, match=rf"{path}: a run of another model.*width is 8 there and 12 here"):
        other.restore(path)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(UserError, match=rf"{path}: weights of another model: 7 entries differ, the first is 0.bias"):
        other.start_from(path)
    assert same(before, other.model.state_dict())
    other.start_from(path, strict=False)
    assert [n for n, t in other.model.state_dict().items() if not torch.equal(t, before[n])] == ["3.bias"]
    assert same(other.average.state_dict(), other.model.state_dict())  # the average starts where the weights do


def test_a_file_of_weights_alone_cannot_be_resumed(tmp_path):
    run, folder = make(tmp_path), checkpoint.Run(tmp_path)
    run.export(folder, "model.pt")
    folder.wait()
    with pytest.raises(UserError, match="weights without the state of a run; start from them with --init_from"):
        run.restore(tmp_path / "model.pt")


def test_identity_knows_lists_as_tuples_and_younger_settings_by_their_defaults(tmp_path):
    run = make(tmp_path)
    expected = {"width": 8, "timesteps": 1000, "steps apart": (1, 2)}
    state.check_identity(run.cfg, json.loads(json.dumps({"width": 8, "steps apart": (1, 2)})), expected, "there")
    with pytest.raises(UserError, match=r"there: .*timesteps is 1000 there and 8 here"):
        state.check_identity(run.cfg, {"width": 8, "steps apart": [1, 2]}, {**expected, "timesteps": 8}, "there")
    with pytest.raises(UserError, match="steps apart is None there"):
        state.check_identity(run.cfg, {"width": 8}, expected, "there")


def test_a_step_that_overflowed_advances_nothing_but_the_scale(tmp_path):
    run = make(tmp_path, precision="fp16")
    while not step(run)[1]:  # the first scale is a guess
        pass
    run.model.eval()  # the buffer belongs to the forward pass, not to the step
    def contents():
        return [run.model.state_dict(), run.average.state_dict(), run.optimizers[0].state_dict()["state"], run.step]
    before = copy.deepcopy(contents())
    norms, taken = step(run, poison=float("inf"))
    assert not taken and not norms.isfinite().all() and same(before, contents())
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(UserError, match="step 1: gradients overflow fp16 at any scale; use --precision bf16"):
        for _ in range(60):
            step(run, poison=float("inf"))


def test_export_has_the_averaged_weights_and_what_it_takes_to_use_them(tmp_path):
    run, folder = make(tmp_path), checkpoint.Run(tmp_path)
    for _ in range(5):
        step(run)
    run.export(folder, "best.pt", val_loss=0.5)
    folder.wait()
    found = checkpoint.load(tmp_path / "best.pt")
    assert same(found["model"], run.average.state_dict()) and not same(found["model"], run.model.state_dict())
    assert found["config"] == config.as_json(run.cfg) and found["versions"] == checkpoint.versions(train_prior.__file__)
    assert (found["kind"], found["widths"], found["step"], found["val_loss"]) == ("test", [4, 8], 5, 0.5)
    assert not found.keys() & {"ema", "optimizers", "scaler", "identity"}


def test_the_best_is_kept_and_sent_only_while_it_is_the_best(tmp_path):
    run, folder = make(tmp_path, save=(f"local save_best_to={tmp_path}/{{step}}_{{best_val_loss}}.pt",
                                       f"local kind=model save_latest_to={tmp_path}/latest.pt",
                                       f"local save_latest_to={tmp_path}/at_{{val_loss:.2f}}.pt"),
                       metadata=("of=3",)), checkpoint.Run(tmp_path)
    folder.open("auto")
    with tracker.Tracker(folder, run) as log:
        run.commit(folder, log)  # before there is a loss
        for loss in (0.5, 0.75, 0.25):
            step(run)
            log.log(run.step, val_loss=loss)
            run.keep_best(loss, folder, log)
            folder.wait()
            for job in log.outbox.jobs:
                job.result()
            assert checkpoint.load(tmp_path / "best.pt")["step"] == (3 if loss == 0.25 else 1)
        run.commit(folder, log)
        folder.wait()
    assert sorted(path.name for path in tmp_path.glob("?_*.pt")) == ["1_0.5.pt", "3_0.25.pt"]
    best, latest, newest = (checkpoint.load(tmp_path / name) for name in (
        "3_0.25.pt", "latest.pt", "checkpoints/step_00000003.pt"))
    assert best.keys() == newest.keys() and same(best["optimizers"], newest["optimizers"])
    assert same(latest["model"], newest["ema"]) and "optimizers" not in latest and latest["metadata"] == {"of": 3}
    assert not (tmp_path / "outbox").exists()
    assert sorted(path.name for path in tmp_path.glob("at_*.pt")) == ["at_0.25.pt", "at_nan.pt"]


def test_a_part_of_the_model_can_be_all_that_is_trained_and_saved(tmp_path):
    run = make(tmp_path, trained=lambda model: model[3])
    before = {name: tensor.clone() for name, tensor in run.model[0].state_dict().items()}
    last = run.model[3].weight.clone()
    step(run)
    assert same(before, run.model[0].state_dict()) and not torch.equal(last, run.model[3].weight)
    assert list(run.state()["model"]) == list(run.state()["ema"]) == ["weight", "bias"]


class Pair(state.State):
    """A State with a second model and its optimizer, which has a part in every other step only."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        torch.manual_seed(9)
        self.other = nn.Linear(4, 1)
        self.optimizers = [*self.optimizers, torch.optim.AdamW(self.other.parameters(), lr=0.1)]

    def state(self):
        return {**super().state(), "other": self.other.state_dict()}

    def load(self, state, path):
        super().load(state, path)
        self.other.load_state_dict(state["other"])


def pair_of(folder, **settings):
    torch.manual_seed(0)
    cfg = train_prior.Config(run=str(folder), lr=0.01, max_grad_norm=0.0, **settings)
    return Pair(cfg, nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)), CPU, {}, {"kind": "test"})


def backward(run, poison=1.0):
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(run.step))
    loss = run.model(data).square().mean() * 100 + run.other(data).square().mean() * poison
    run.scaler.scale(loss).backward()


def test_some_of_the_optimizers_step_with_norms_of_their_own_and_all_gradients_are_gone(tmp_path):
    run = pair_of(tmp_path)
    first, second = (copy.deepcopy([*module.parameters()]) for module in (run.model, run.other))
    backward(run)
    norms, taken = run.try_step(run.optimizers[:1], [1e-3])
    assert taken and norms.shape == (1,) and norms[0] > 1e-3 and run.step == 0  # which is for `follow`
    assert not same(first, [*run.model.parameters()]) and same(second, [*run.other.parameters()])
    assert all(p.grad is None for module in (run.model, run.other) for p in module.parameters())
    average = copy.deepcopy(run.average.state_dict())
    run.follow()
    assert run.step == 1 and not same(average, run.average.state_dict())
    assert same(run.average.state_dict(), run.model.state_dict())  # the first average is a copy
    backward(run)
    norms, taken = run.try_step(run.optimizers, [0.0, 1e-3])
    assert taken and norms.shape == (2,) and not same(second, [*run.other.parameters()])


def test_an_overflow_of_one_optimizer_stops_the_others_and_nothing_follows(tmp_path):
    run = pair_of(tmp_path, precision="fp16")
    while not (backward(run), run.try_step(run.optimizers, [0.0, 0.0])[1])[1]:  # the first scale is a guess
        pass
    before, scale = copy.deepcopy([run.model.state_dict(), run.other.state_dict()]), run.scaler.get_scale()
    backward(run, poison=float("inf"))
    norms, taken = run.try_step(run.optimizers, [0.0, 0.0])
    assert not taken and norms.isfinite().tolist() == [True, False] and run.scaler.get_scale() == scale / 2
    assert same(before, [run.model.state_dict(), run.other.state_dict()]) and run.step == 0


def test_what_a_script_adds_to_a_state_is_saved_and_taken_up_with_it(tmp_path):
    run, other = pair_of(tmp_path), pair_of(tmp_path)
    for _ in range(3):
        run.set_rate()
        backward(run)
        run.advance()
    path = saved(run)
    assert not same(run.state(), other.state())
    other.load(checkpoint.load(path), path)
    assert other.step == 3 and same(run.state()["other"], other.state()["other"])
    for part in ("model", "ema"):
        assert same(run.state()[part], other.state()[part])
    for one in (run, other):
        one.set_rate()
        backward(one)
        one.advance()
    assert same(run.state(), other.state())
