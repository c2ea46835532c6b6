"""Saving as a commit: whatever is cut off, killed, full or damaged, a complete run stays."""
import contextlib
import copy
import dataclasses
import errno
import fcntl
import io
import math
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FORKS
from helpers import Settings, same
from torch import nn

from common import amp, checkpoint, config, dist, ema, loop, optim
from common.config import UserError


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a small model"""

    width: int = config.field(8, model=True)


def log_to(events):
    """What a RunFolder needs of a Tracker; the list `events` gets what was called."""
    return SimpleNamespace(send=lambda: events.append("send"), print=events.append)


def state_of(folder, width=8, seed=0, other=False, **settings):
    """A State of a model with matrices, biases and buffers. other: also of a second model."""
    torch.manual_seed(seed)
    cfg = Config(run_dir=str(folder), width=width, **settings)
    norm = nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(4, width), norm, nn.SiLU(), nn.Linear(width, 1))
    others = {"discriminators": nn.Linear(4, 1)} if other else {}
    optimizers = []
    for module in (model, *others.values()):
        optimizers += optim.make(module, cfg.optimizer, cfg.lr, 0.01)
    return checkpoint.State(
        cfg,
        model,
        ema.EMA(model, decay=0.5),
        optimizers,
        amp.scaler(torch.device("cpu"), cfg.precision),
        {"width": width, "sizes": [1, 2]},
        {"kind": "test"},
        others,
    )


def take_steps(state, count=1):
    """As the scripts do; the data follow from the step."""
    models = nn.ModuleList([state.model, *state.others.values()])
    for _ in range(count):
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(state.step))
        loss = sum(model(data).square().mean() for model in models)
        state.scaler.scale(loss).backward()
        amp.step(state.scaler, state.optimizers, 1.0)
        state.scaler.update()
        models.zero_grad()
        state.step += 1
        state.ema.update(state.step)


def written(state, path):
    checkpoint.save(state.contents(), path)
    return path


def opened(folder):
    run = checkpoint.RunFolder(folder)
    run.open()
    return run


def commit(run, *steps):
    """Commit a State at each of `steps`; returns it."""
    state = state_of(run.folder)
    events = []
    for state.step in steps:
        for _ in range(2):  # by the plan, and after a signal
            run.save(state, log_to(events))
    assert events == ["send"] * len(steps)  # of copies
    return state


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Files

class Secret:
    """What a pickle can do to who loads it."""

    def __reduce__(self):
        return Path("executed").touch, ()


def as_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content, reason", {
    pickle.dumps({"model": Secret()}): "",
    as_file({"model": Secret()}): "Unsupported global: GLOBAL",
    as_file({"model": 1}): "it has no weights",
    b"": "",
    as_file({"model": {}})[:-200]: "failed finding central",
}.items())
def test_loading_runs_no_code_and_refuses_a_foreign_or_torn_file_in_one_line(
        content, reason, tmp_path):
    """Promise 5"""
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    # Without torch's advice, which is to load without weights_only.
    message = f"^{path}: no such checkpoint, or damaged, [^\n]*{reason}[^\n]*$"
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(path)
    assert "weights_only" not in str(caught.value)
    assert not Path("executed").exists()
    with pytest.raises(UserError, match=f"{tmp_path}: no such checkpoint"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("before, after, scale", [
    ("fp16", "fp16", 512.0),
    ("fp16", "bf16", 1.0),
    ("fp32", "fp16", 2.0**16),
])
def test_a_scale_is_resumed_and_starts_anew_after_a_change_of_precision(
        before, after, scale, tmp_path):
    state = state_of(tmp_path, precision=before)
    state.scaler.scale(torch.ones(()))  # a scaler makes its state when it is first used
    state.scaler.update(512.0)
    resumed = state_of(tmp_path, precision=after)
    resumed.restore(state.contents(), "x.pt")
    assert resumed.scaler.get_scale() == scale


def test_an_error_in_the_middle_of_writing_leaves_the_old_file_and_nothing_else(
        tmp_path, monkeypatch):
    """Promise 3"""
    path = tmp_path / "values.json"
    checkpoint.write_json({"a": math.nan}, path)
    old = {"values.json": b'{\n  "a": null\n}\n'}
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with pytest.raises(KeyboardInterrupt), checkpoint.atomic_write(path) as file:
        file.write(b"half a li")
        raise KeyboardInterrupt
    assert contents(tmp_path) == old
    assert not synced
    with checkpoint.atomic_write(path):
        pass
    assert len(synced) == 2  # the file and its folder


def test_a_file_system_without_locks_is_a_note(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    opened(tmp_path)
    assert "make sure that no other process trains here" in capsys.readouterr().err


# Models

def test_a_model_is_read_by_its_kind_with_the_weights_wanted(tmp_path):
    state = state_of(tmp_path, width=4, save=("local",), metadata=("a=b",))
    take_steps(state, 2)  # after one step the average equals the model
    path = written(state, tmp_path / "checkpoints/1.pt")
    classes = {"test": Config}
    for weights, module in (("ema", state.ema), ("online", state.model)):
        cfg, found = checkpoint.read_model(classes, path, weights)
        assert (cfg.width, cfg.save, cfg.metadata) == (4, (), ())  # a fork may have no savers
        assert same(found["model"], module.state_dict())

    opened(tmp_path).write_model(state, "model.pt", step=1, test_loss=0.5)
    averaged = tmp_path / "model.pt"
    names = {"kind", "model", "config", "versions", "step", "test_loss"}
    assert checkpoint.load(averaged).keys() == names
    with pytest.raises(UserError, match=f"{averaged}: .*--weights online needs one of RUN/check"):
        checkpoint.read_model(classes, averaged, "online")
    with pytest.raises(UserError, match=f"{path}: expected a model of the kind decoder"):
        checkpoint.read_model({"decoder": Config}, path)
    with pytest.raises(UserError, match=r"without the state of a run; .*--init_from"):
        checkpoint.check_identity(averaged, {})


# What a run is made of

def test_a_changed_learning_rate_holds_and_what_has_changed_is_noted(tmp_path, capsys):
    state = state_of(tmp_path, precision="fp16")  # whose scale starts anew
    state.versions["code"] = "abc"
    other = state_of(tmp_path, lr=0.5)
    path = written(state, tmp_path / "0.pt")
    other.restore(checkpoint.load(path), path)
    assert capsys.readouterr().err.splitlines() == [
        f"note: resuming {tmp_path}/0.pt at step 0 of 1000",
        f"note: code changed from abc to {other.versions['code']}",
        "note: precision changed from fp16 to fp32",
        "note: lr changed from 0.001 to 0.5",
        "note: learning rate of the next step changed from 2e-05 to 0.01",
    ]
    assert other.optimizers[0].param_groups[0]["lr"] == 0.5


def test_what_was_or_is_not_known_is_no_other_identity(tmp_path):
    path = tmp_path / "1.pt"
    known = {"clip": "a", "width": 8}

    def check(before, now):
        checkpoint.save({"model": {}, "training": {"identity": before}}, path)
        checkpoint.check_identity(path, now)

    for before, now in ((known, {"clip": None}), ({"clip": None}, known), ({}, known), (known, {})):
        check(before, now)
    with pytest.raises(UserError, match=f"{path}: .*clip is 'a' there and 'b' here"):
        check(known, {"clip": "b"})


def test_another_models_file_is_refused_with_names_and_not_strict_takes_what_fits(
        tmp_path, capsys):
    """Promise 5"""
    path = written(state_of(tmp_path, width=12), tmp_path / "12.pt")
    state = state_of(tmp_path, seed=1)

    def start_from(path, strict=True):
        contents = checkpoint.model_contents(checkpoint.load(path))
        checkpoint.load_weights(state.model, contents["model"], path, strict)

    for strict in (True, False):
        message = rf"{path}: weights of another model; .*size mismatch for 0\.weight: "
        with pytest.raises(UserError, match=message):
            start_from(path, strict)
    before = copy.deepcopy(state.model.state_dict())
    weights = state_of(tmp_path, seed=2).model.state_dict()
    del weights["3.weight"]
    checkpoint.save({"model": weights}, path)
    start_from(path, strict=False)
    first, second = capsys.readouterr().err.splitlines()
    assert "2 of 9 weights of the model are in it and fit: 2.4% of the numbers" in first
    assert "8 of 9 weights of the model are in it and fit: 90.2% of the numbers" in second
    assert same(state.model.state_dict(), before | weights)

    state.model[1].running_var[2] = math.nan
    path = written(state, path)
    with pytest.raises(UserError, match=rf"{path}: .* not finite, as 1\.running_var; take ano"):
        state.restore(checkpoint.load(path), path)


@pytest.mark.parametrize("wrap", [
    lambda model: torch.compile(nn.DataParallel(model)),  # names as of DistributedDataParallel
    lambda model: nn.DataParallel(torch.compile(model)),
])
def test_weights_of_a_compiled_or_parallel_model_are_taken_by_a_plain_one(wrap, tmp_path):
    state = state_of(tmp_path)
    other = state_of(tmp_path, seed=1).model
    checkpoint.load_weights(state.model, wrap(other).state_dict(), "file.pt")
    assert same(state.model.state_dict(), other.state_dict())


# Run folders

def test_the_newest_few_are_kept_once_and_what_was_not_recorded_goes(tmp_path):
    opened(tmp_path)
    # Of a save that was not recorded, one that was cut off, and a copy by the user.
    for name in ("05.pt", "50.pt.tmp", "10_mine.pt"):
        checkpoint.save({"model": {}}, tmp_path / f"checkpoints/step_000000{name}")
    run = opened(tmp_path)
    state = commit(run, 10, 20, 30, 40)
    run = opened(tmp_path)
    assert [entry["step"] for entry in run.checkpoints] == [40, 30, 20]
    assert len(os.listdir(tmp_path / "checkpoints")) == 4
    assert (tmp_path / "checkpoints/step_00000010_mine.pt").is_file()
    assert same(checkpoint.load(run.newest_intact()), state.contents())


@pytest.mark.parametrize("content", [None, b"[]", b"{}", b"\xff"])
def test_a_missing_or_damaged_record_is_named_with_the_way_out(content, tmp_path):
    run = opened(tmp_path)
    commit(run, 10)
    path = tmp_path / "auto_resume.json"
    path.unlink()
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: damaged or missing; .*--load FILE"):
        opened(tmp_path)


def test_a_folder_that_is_renamed_or_removed_under_a_run_ends_it_at_the_next_save(tmp_path):
    """Promise 3"""
    run = opened(tmp_path / "run")
    state = commit(run, 10)
    moved = run.folder.rename(tmp_path / "moved")
    left = contents(moved)
    take_steps(state)

    def check_refused():
        for write in (lambda: run.save(state, log_to([])), lambda: run.write_model(state, "x")):
            with pytest.raises(OSError, match=f"^{run.folder}: renamed or removed while the run"):
                write()

    check_refused()
    assert not run.folder.exists()
    other = opened(run.folder)  # another run begins there
    check_refused()
    other.check_in_place()
    assert contents(moved) == left
    assert list(contents(run.folder)) == ["auto_resume.json"]


def test_the_best_is_kept_only_while_it_is_the_best_and_none_that_is_not_finite(tmp_path):
    """Promise 4"""
    run = opened(tmp_path)
    state = state_of(tmp_path)
    path = tmp_path / "best.pt"
    events = []
    for loss, best in ((0.5, 1), (0.75, 1), (0.5, 1), (0.25, 4)):
        take_steps(state)
        run.save_best(state, loss, log_to(events))
        assert checkpoint.load(path)["step"] == best
    with pytest.raises(UserError, match="nan at step 4; the weights are finite: look at the vali"):
        run.save_best(state, math.nan, log_to(events))
    first, rising, last = events
    assert (first, last) == ("send", "send")
    assert "lowest at step 1, and for half of the run it has been higher" in rising  # once
    found = checkpoint.load(path)
    assert same(found["model"], state.ema.state_dict())
    assert found["val_loss"] == run.best_val_loss == 0.25
    state.model[0].weight.data[0, 0] = state.ema.averages["0.weight"][0, 0] = math.nan
    with pytest.raises(UserError, match="at step 4; lower --lr"):
        run.save_best(state, math.nan, log_to(events))
    # Without a checkpoint the next start is a new run, whose best one is its own.
    assert opened(tmp_path).best_val_loss == math.inf


def test_a_model_for_use_is_the_best_one_if_there_is_one(tmp_path, capsys):
    run = opened(tmp_path)
    state = state_of(tmp_path)
    last = tmp_path / "model.pt"
    best = tmp_path / "best.pt"
    assert checkpoint.model_file(tmp_path) == last  # there is neither
    for loss in (0.5, 0.75):
        take_steps(state)
        run.save_best(state, loss, log_to([]))
        assert checkpoint.model_file(tmp_path) == best
    assert "of step 1, whose validation loss 0.5000 was the lowest" in capsys.readouterr().err
    assert checkpoint.model_file(tmp_path, "model.pt") == last
    run.write_model(state, "best.pt")  # without its loss, as a copy of model.pt
    with pytest.raises(UserError, match=r"best\.pt: damaged, .*'val_loss'"):
        checkpoint.model_file(tmp_path)


# Processes

def hold(folder, pipe):
    run = opened(folder)
    if child := os.fork():  # as a worker, which lives on when its parent is killed
        pipe.send(child)
    pipe.recv()
    run.lock_file.close()


def test_a_second_process_is_refused_by_the_name_of_the_first_until_that_is_killed(tmp_path):
    """Promise 3"""
    pipe, other = FORKS.Pipe()
    process = FORKS.Process(target=hold, args=(tmp_path, other))
    process.start()
    child = pipe.recv()
    message = rf"in use by another live process \(process {process.pid} on \S+\)"
    with pytest.raises(UserError, match=message):
        opened(tmp_path)
    process.kill()
    process.join()
    opened(tmp_path)
    os.kill(child, 9)


# Calls that change a folder.
MOMENTS = {"mkdir", "open", "flush", "fsync", "replace", "__exit__", "close", "unlink"}


@contextlib.contextmanager
def copies(run, place):
    """Yield a list that gets a copy of the run's folder at each moment of saving.

    A copy has what a kill would leave: what the system was given.
    """
    left = []

    def copy_folder(frame, event, argument):
        if event == "c_call" and argument.__name__ in MOMENTS:
            left.append(shutil.copytree(run.folder, place / str(len(os.listdir(place)))))

    sys.setprofile(copy_folder)
    yield left
    sys.setprofile(None)


@pytest.mark.parametrize(
    "settings", [{}, dict(optimizer="muon"), dict(precision="fp16"), dict(other=True)])
def test_what_a_kill_at_any_moment_of_saving_leaves_is_a_complete_run_that_goes_on_bit_for_bit(
        settings, tmp_path, monkeypatch, capsys):
    """Promises 1 and 3"""
    monkeypatch.setattr(checkpoint, "KEEP", 1)
    run = opened(tmp_path / "run")
    state = state_of("run", **settings)  # the same config wherever the folder is
    with copies(run, tmp_path) as left:
        for _ in range(3):
            take_steps(state)
            run.save(state, log_to([]))
    take_steps(state)

    assert len(left) > 30
    reached = 0
    for folder in left:
        run = opened(folder)
        again = state_of("run", seed=reached, **settings)
        path = run.newest_intact()
        if path:
            again.restore(checkpoint.load(path), path)
        assert "damaged" not in capsys.readouterr().err
        assert reached <= again.step
        reached = again.step
        take_steps(again, 4 - reached)
        run.save(again, log_to([]))
        (file,) = (folder / "checkpoints").iterdir()  # no scrap of a save that was cut off is left
        assert same(checkpoint.load(file), state.contents())
    assert reached == 3


def start(path, folder):
    """The contents of this rank's state, resumed from the file that rank 0 alone has, or not."""
    state = state_of(folder, seed=dist.rank(), other=True)
    run = SimpleNamespace(resume_from=path)
    if path and not dist.is_main():
        run.resume_from = "nowhere.pt"
    loop.resume(run, state)
    return state.contents()


@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_start_from_the_checkpoint_that_rank_0_reads_or_from_its_weights(
        steps, tmp_path, on_ranks):
    state = state_of(tmp_path, other=True)
    take_steps(state, steps)
    path = None
    if steps:
        path = written(state, tmp_path / "2.pt")
    for found in on_ranks(2, start, path, tmp_path):
        assert same(found, state.contents())


def start_apart(folder):
    checkpoint.versions = lambda script: {"code": dist.rank()}
    with pytest.raises(UserError) as error:
        state_of(folder)
    return str(error.value)


def test_ranks_of_other_code_do_not_start(tmp_path, on_ranks):
    """Promise 6"""
    for message in on_ranks(2, start_apart, tmp_path):
        assert message.startswith("rank 1 has another code than rank 0")
