"""Resuming: after kills, damage or changes, a run uses its newest intact state."""
import contextlib
import dataclasses
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FORKS
from helpers import Settings, same
from torch import nn

from common import amp, checkpoint, config, dist, ema, optim, resume
from common.config import UserError


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a small model"""

    preset: str = ""
    width: int = config.field(8, model=True)
    objective: str = config.field("v", model=True)
    lora_rank: int = 0


def state_of(folder, width=8, seed=0, other=False, **settings):
    """A State of a model with matrices, biases and buffers. other: with a second model, too."""
    torch.manual_seed(seed)
    cfg = Config(run_dir=str(folder), width=width, **settings)
    norm = nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(4, width), norm, nn.SiLU(), nn.Linear(width, 1))
    others = {"discriminators": nn.Linear(4, 1)} if other else {}
    optimizers = []
    for module in (model, *others.values()):
        optimizers += optim.make(module, cfg.optimizer, cfg.lr, 0.01)
    return resume.State(
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
    """Train as the scripts do, with data that depend on the step."""
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
    run = resume.RunFolder(folder)
    run.open()
    return run


def commit(run, *steps):
    """Save a State at each of `steps`; returns the State."""
    state = state_of(run.folder)
    for state.step in steps:
        for _ in range(2):  # as scheduled, and again after a signal
            run.save(state)
    return state


def steps_of(run):
    return [entry["step"] for entry in run.checkpoints]


# What a checkpoint holds

@pytest.mark.parametrize("before, after, scale", [
    ("fp16", "fp16", 512.0),
    ("fp16", "bf16", 1.0),
    ("fp32", "fp16", 2.0**16),
])
def test_a_scale_is_resumed_and_starts_anew_after_a_change_of_precision(
        before, after, scale, tmp_path):
    state = state_of(tmp_path, precision=before)
    state.scaler.scale(torch.ones(()))  # a scaler creates its state when it is first used
    state.scaler.update(512.0)
    resumed = state_of(tmp_path, precision=after)
    resumed.load(state.contents(), "x.pt")
    assert resumed.scaler.get_scale() == scale


def test_a_changed_learning_rate_holds_and_what_has_changed_is_noted(tmp_path, capsys):
    state = state_of(tmp_path, precision="fp16")  # resumed below in fp32
    state.versions["code"] = "abc"
    other = state_of(tmp_path, lr=0.5)
    contents = state.contents()
    contents["config"]["dropout"] = 0.0  # a setting that a fork has removed
    del contents["config"]["seed"]
    other.load(contents, "x.pt")
    assert capsys.readouterr().err.splitlines() == [
        "note: resuming x.pt at step 0 of 1000",
        f"note: code changed from abc to {other.versions['code']}",
        "note: precision changed from fp16 to fp32",
        "note: lr changed from 0.001 to 0.5",
        "note: dropout changed from 0.0 to no setting",
        "note: seed changed from no setting to 0",
    ]
    assert other.optimizers[0].param_groups[0]["lr"] == 0.5


def test_the_version_of_the_code_changes_with_any_edit(tmp_path, monkeypatch):
    shutil.copytree(Path(resume.__file__).parent, tmp_path / "common")
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    monkeypatch.setattr(resume, "__file__", str(tmp_path / "common/resume.py"))
    found = [resume.versions(script)]
    assert resume.versions(script) == found[0]
    assert found[0]["torch"] == torch.__version__
    for path in (script, tmp_path / "common/models/nn.py"):
        path.write_text(path.read_text() + "# edited\n")
        found.append(resume.versions(script))
    assert len({versions["code"] for versions in found}) == 3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_state_is_a_copy_and_does_not_need_its_file(optimizer, tmp_path):
    """Promise 1: resuming is exact."""
    state = state_of("run", optimizer=optimizer, other=True)
    take_steps(state, 2)
    path = written(state, tmp_path / "2.pt")
    again = state_of("run", optimizer=optimizer, other=True, seed=1)
    again.load(checkpoint.load(path, mmap=True), path)
    with open(path, "r+b") as file:  # overwrite the mapped bytes
        file.write(bytes(path.stat().st_size))
    path.unlink()
    assert same(again.contents(), state.contents())
    for each in (state, again):
        take_steps(each, 2)
    assert same(again.contents(), state.contents())


def test_a_checkpoint_of_another_or_a_diverged_model_is_refused(tmp_path):
    """Promises 4 and 5: non-finite values are not saved; files are loaded safely."""
    state = state_of(tmp_path, other=True)
    wider = state_of(tmp_path, width=12, other=True)
    judged = state_of(tmp_path, other=True)
    judged.others["discriminators"] = nn.Linear(4, 2)
    for other, part in (
        (wider, r"\('0.bias', \(12,\)\)"),
        (judged, r"\('bias', \(2,\)\)"),
    ):
        with pytest.raises(UserError, match=f"x.pt: weights of another model, .*{part}"):
            state.load(other.contents(), "x.pt")


def test_a_forks_mistake_while_restoring_is_not_blamed_on_the_file(tmp_path):
    """Promises 8 and 10: a user error prints one line; a fork works."""
    path = written(state_of(tmp_path), tmp_path / "1.pt")

    class Optimizer(torch.optim.SGD):
        def load_state_dict(self, state):
            return staet  # noqa: F821

    class Model(nn.Sequential):
        def load_state_dict(self, state):
            return staet  # noqa: F821

    for change in ("optimizers", "model"):
        state = state_of(tmp_path)
        if change == "optimizers":
            state.optimizers = [Optimizer(state.model.parameters(), 0.1)]
            path = written(state, tmp_path / "2.pt")
        else:
            state.model = Model(*state.model)
        run = SimpleNamespace(resume_from=path)
        with pytest.raises(NameError, match="staet"):
            resume.restore(run, state)


# The run folder

def test_the_newest_few_are_kept_once_and_what_was_not_recorded_goes(tmp_path):
    opened(tmp_path)
    # An unrecorded save, an incomplete save, and a copy by the user.
    for name in ("05.pt", "50.pt.tmp", "10_mine.pt"):
        checkpoint.save({"model": {}}, tmp_path / f"checkpoints/step_000000{name}")
    run = opened(tmp_path)
    state = commit(run, 10, 20, 30, 40)
    run = opened(tmp_path)
    assert steps_of(run) == [40, 30, 20]
    assert len(os.listdir(tmp_path / "checkpoints")) == 4
    assert (tmp_path / "checkpoints/step_00000010_mine.pt").is_file()
    assert same(checkpoint.load(run.newest_intact()), state.contents())


def test_a_step_that_is_saved_is_not_written_again(tmp_path):
    run = opened(tmp_path)
    state = commit(run, 10)
    path = run.newest_intact()
    before = path.stat()
    take_steps(state)
    state.step = 10
    run.save(state)
    assert path.stat().st_ino == before.st_ino
    assert steps_of(run) == [10]


@pytest.mark.parametrize("damage", [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(bytes(1) + path.read_bytes()[1:]),
])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_is_taken(
        damage, tmp_path, capsys):
    """Promise 3: nothing saved is lost."""
    run = opened(tmp_path)
    commit(run, 10, 20, 30)
    paths = [tmp_path / entry["file"] for entry in run.checkpoints]
    damage(paths[0])
    damage(paths[1])
    assert run.newest_intact() == paths[2]
    assert steps_of(run) == [10]
    err = capsys.readouterr().err
    assert err.count("damaged or missing, trying the one before it") == 2
    assert str(paths[0]) in err and str(paths[1]) in err
    damage(paths[2])
    assert run.newest_intact() is None


def test_of_an_intact_newest_checkpoint_the_older_ones_are_not_looked_at(tmp_path, capsys):
    run = opened(tmp_path)
    commit(run, 10, 20, 30)
    newest, *older = [tmp_path / entry["file"] for entry in run.checkpoints]
    for path in older:
        path.unlink()
    assert run.newest_intact() == newest
    assert steps_of(run) == [30, 20, 10]
    assert not capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """Promise 3: if a network disk is unavailable for a while, its files are not forgotten."""
    run = opened(tmp_path)
    commit(run, 10, 20)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "checksum", refuse)
    with pytest.raises(PermissionError, match=r"step_00000020\.pt"):
        run.newest_intact()
    assert steps_of(run) == [20, 10]


NO_STEP = b'{"checkpoints": [{"file": "x", "sha256": ""}], "loggers": {}, "results": null}'
NO_RESULT = (
    b'{"checkpoints": [{"file": "x", "step": 1, "sha256": ""}], "loggers": {}, "results": {"s": 1}}'
)


@pytest.mark.parametrize("content", [None, b"[]", b"{}", b"\xff", NO_STEP, NO_RESULT])
def test_a_missing_or_damaged_record_is_named_with_the_way_out(content, tmp_path):
    """Promises 3 and 8: nothing saved is lost; a user error prints one line."""
    run = opened(tmp_path)
    commit(run, 10)
    path = tmp_path / "auto_resume.json"
    path.unlink()
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: damaged, missing, or from an earlier version"):
        opened(tmp_path)


def test_the_record_has_what_a_start_resumes_and_a_run_without_checkpoints_begins_anew(tmp_path):
    run = opened(tmp_path)
    path = tmp_path / "auto_resume.json"
    assert config.read_json(path) == {"checkpoints": [], "loggers": {}, "results": None}
    run.loggers = {"wandb": {"id": "x"}}
    run.results = {"step": 10}
    commit(run, 10)
    again = opened(tmp_path)
    assert (again.loggers, again.results) == ({"wandb": {"id": "x"}}, {"step": 10})
    assert config.read_json(path)["checkpoints"] == run.checkpoints
    again.drop_from(10)
    new = opened(tmp_path)
    assert (new.loggers, new.results, new.checkpoints) == ({}, None, [])


@pytest.mark.parametrize("spoil", ["weights", "average"])
def test_weights_that_are_not_finite_are_not_saved_and_the_checkpoint_before_stands(
        spoil, tmp_path):
    """Promise 4: even a finite gradient may overflow a weight."""
    run = opened(tmp_path)
    state = commit(run, 10)
    state.step = 20
    if spoil == "weights":
        state.model[0].weight.data[0, 0] = torch.inf
    else:
        state.ema.averages["3.bias"][0] = torch.nan
    with pytest.raises(UserError, match=r"weights are not finite at step 20, such as .*lower --lr"):
        run.save(state)
    assert steps_of(run) == [10]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000010.pt"]
    assert run.newest_intact()


def test_a_drop_forgets_the_steps_from_there_on(tmp_path):
    """Promise 4: non-finite values are not saved."""
    run = opened(tmp_path)
    commit(run, 10, 20, 30)
    run.drop_from(20)
    assert steps_of(run) == steps_of(opened(tmp_path)) == [10]


def hold(folder, pipe):
    run = opened(folder)
    if child := os.fork():  # like a worker, which survives when its parent is killed
        pipe.send(child)
    pipe.recv()
    run.lock_file.close()


def test_a_second_process_is_refused_by_the_name_of_the_first_until_that_is_killed(tmp_path):
    """Promise 3: nothing saved is lost."""
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

    A copy holds what a kill would leave: everything handed to the operating system so far.
    """
    left = []

    def copy_folder(frame, event, argument):
        if event == "c_call" and argument.__name__ in MOMENTS:
            left.append(shutil.copytree(run.folder, place / str(len(os.listdir(place)))))

    sys.setprofile(copy_folder)
    yield left
    sys.setprofile(None)


@pytest.mark.parametrize(
    "settings", [{}, dict(optimizer="muon", precision="fp16", other=True)])
def test_what_a_kill_at_any_moment_of_saving_leaves_is_a_complete_run_that_goes_on_bit_for_bit(
        settings, tmp_path, monkeypatch, capsys):
    """Promises 1 and 3: resuming is exact; nothing saved is lost."""
    monkeypatch.setattr(resume, "KEEP", 1)
    run = opened(tmp_path / "run")
    state = state_of("run", **settings)  # the same config for every copy of the folder
    with copies(run, tmp_path) as left:
        for _ in range(2):
            take_steps(state)
            run.save(state)
    take_steps(state)

    assert len(left) > 20
    reached = 0
    for folder in left:
        run = opened(folder)
        again = state_of("run", seed=reached, **settings)
        path = run.newest_intact()
        if path:
            again.load(checkpoint.load(path), path)
        assert "damaged" not in capsys.readouterr().err
        assert reached <= again.step
        reached = again.step
        take_steps(again, 3 - reached)
        run.save(again)
        (file,) = (folder / "checkpoints").iterdir()  # nothing of the incomplete save is left
        assert same(checkpoint.load(file), state.contents())
    assert reached == 2


# The best model

def test_the_best_is_kept_only_while_it_is_the_best_and_none_that_is_not_finite(tmp_path):
    """Promise 4: non-finite values are not saved."""
    run = opened(tmp_path)
    run.val_settings = {"eval_samples": 4}
    state = state_of(tmp_path)
    path = tmp_path / "best.pt"
    for loss, best in ((0.5, 1), (0.75, 1), (0.5, 1), (0.25, 4)):
        take_steps(state)
        run.save(state)
        run.save_best(state, loss)
        assert checkpoint.load(path)["step"] == run.best["step"] == best
    found = checkpoint.load(path)
    assert same(found["model"], state.ema.state_dict())
    assert found["val_loss"] == run.best_val_loss == 0.25
    assert found["val_settings"] == {"eval_samples": 4}
    assert not {"ema", "training"} & found.keys()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_drops_its_checkpoints_and_names_the_step(
        loss, tmp_path):
    """Promise 4: non-finite values are not saved."""
    run = opened(tmp_path)
    state = commit(run, 10, 20, 30)
    run.save_best(state, 0.5)
    state.step = 20
    with pytest.raises(UserError, match=f"{tmp_path}: the validation loss is {loss} at step 20; "):
        run.save_best(state, loss)
    assert steps_of(opened(tmp_path)) == [10]
    assert checkpoint.load(tmp_path / "best.pt")["val_loss"] == run.best_val_loss == 0.5


def best_by_rank(folder):
    """(best validation loss, number of checkpoints) that this rank's RunFolder knows."""
    run = resume.RunFolder(folder)
    if dist.is_main():
        run.open()
    state = state_of(folder)
    for state.step in (1, 2):
        run.save(state)
        run.save_best(state, 0.5)
    return run.best_val_loss, len(run.checkpoints)


def test_rank_0_alone_writes(tmp_path, on_ranks):
    assert on_ranks(2, best_by_rank, tmp_path) == [(0.5, 2), (math.inf, 0)]


# Start of a run

def dataset_of(rows, unusable=()):
    fingerprint = {"rows": rows, "shape": (2, 3)}
    found = (len(unusable), 9, list(unusable))
    return SimpleNamespace(check=lambda: found, fingerprint=lambda: fingerprint)


def start_of(folder, rows=20, val_rows=5, **settings):
    """The RunFolder `folder`, new or resumed."""
    run, cfg = resume.open_run(Config(**settings), folder, 16)
    splits = {"train": (dataset_of(rows), None), "validation": (dataset_of(val_rows), None)}
    resume.identify(run, cfg, splits)
    run.lock_file.close()
    return run


def write_run(folder, results=None, **identity):
    """Write a run folder with a checkpoint of step 8; returns the checkpoint's path."""
    path = folder / "checkpoints/8.pt"
    contents = {"model": {}, "config": {}, "training": {"identity": identity}}
    checkpoint.save(contents, path)
    entry = {"file": "checkpoints/8.pt", "step": 8, "sha256": checkpoint.checksum(path)}
    record = {"checkpoints": [entry], "loggers": {}, "results": results}
    checkpoint.write_json(record, folder / "auto_resume.json")
    return path


def test_a_run_goes_on_from_its_own_checkpoint_else_from_the_one_to_load(tmp_path):
    """Promises 1 and 3: resuming is exact; nothing saved is lost."""
    load = str(write_run(tmp_path / "elsewhere"))
    init = str(tmp_path / "init.pt")
    checkpoint.save({"model": {}, "config": {}}, init)

    def start(**settings):
        run = start_of(tmp_path / "run", **settings)
        return run.resume_from, run.source

    assert start() == (None, "")
    assert start(init_from=init) == (None, init)
    assert start(load=load) == (load, load)
    assert start(load=load, init_from=init) == (load, load)
    path = write_run(tmp_path / "run")
    assert start(load=load, init_from="gone.pt") == (path, path)
    path.write_bytes(b"")
    assert start(load=load) == (load, load)
    path = write_run(tmp_path / "run")
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"all checkpoints are .*--load, or .*another --run_dir"):
        start()


def test_a_run_has_finished_while_it_has_its_steps_and_its_model(tmp_path, capsys):
    path = write_run(tmp_path, {"step": 8})

    def start(**settings):
        return start_of(tmp_path, **settings).results

    assert start(steps=8) is None  # model.pt is lost
    write_run(tmp_path, {"step": 8})
    checkpoint.save({"model": {}}, tmp_path / "model.pt")
    assert start(steps=8) == {"step": 8}
    path.write_bytes(b"")  # a finished run does not need its checkpoint
    assert start(steps=7) == {"step": 8}
    best = {"model": {}, "step": 8, "val_loss": 0.5, "val_settings": {}}
    checkpoint.save(best, tmp_path / "best.pt")
    write_run(tmp_path, {"step": 8})
    capsys.readouterr()
    assert start(steps=8) == {"step": 8}
    assert capsys.readouterr().err == ""  # best.pt of a finished run is not read
    write_run(tmp_path, {"step": 8})
    assert start(steps=9) is None  # there is more to train


@pytest.mark.parametrize("changed, message", [
    (dict(rows=21), "data rows is 20 there and 21 here"),
    (dict(seed=1), "seed is 0 there and 1 here"),
    (dict(width=9), "width is 8 there and 9 here"),
    (dict(val_data="x"), "own validation set is False there and True here"),
])
def test_a_run_of_other_data_another_model_or_kept_settings_is_refused(
        changed, message, tmp_path):
    """Promise 3: nothing saved is lost."""
    identity = {"seed": 0, "width": 8, "data rows": 20, "own validation set": False}
    path = write_run(tmp_path, **identity, **{"data shape": [2, 3]})
    assert start_of(tmp_path, lr=0.5).resume_from == path
    with pytest.raises(UserError, match=f"{path}: from a run with another model.*{message}"):
        start_of(tmp_path, **changed)


def test_a_validation_set_of_the_training_samples_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^--val_data val: the same .* as --data here; leave"):
        start_of(tmp_path, data="here", val_data="val", val_rows=20)


def test_what_was_or_is_not_known_is_no_other_identity(tmp_path):
    path = tmp_path / "1.pt"
    known = {"clip": "a", "width": 8}

    def check(before, now):
        checkpoint.save({"model": {}, "training": {"identity": before}}, path)
        resume.check_identity(path, now)

    for before, now in ((known, {"clip": None}), ({"clip": None}, known), ({}, known), (known, {})):
        check(before, now)
    with pytest.raises(UserError, match=f"{path}: .*clip is 'a' there and 'b' here"):
        check(known, {"clip": "b"})
    checkpoint.save({"model": {}}, path)
    with pytest.raises(UserError, match=r"not the state of a run; .*--init_from"):
        resume.check_identity(path, {})


def identity_of(folder, **settings):
    run, cfg = resume.open_run(Config(**settings), folder, 16)
    names = ("a.npy:3",) if dist.is_main() else ()
    splits = {"train": (dataset_of(20, names), None), "validation": (dataset_of(5), None)}
    return resume.identify(run, cfg, splits, clip="c"), run.val_settings


def test_all_ranks_get_the_identity_of_settings_data_and_other_models(tmp_path, on_ranks):
    identities = on_ranks(2, identity_of, tmp_path / "two")
    assert identities[0] == identities[1] == identity_of(tmp_path / "one")
    identity, val_settings = identities[0]
    expected = {
        "width": 8,
        "seed": 0,
        "clip": "c",
        "own validation set": False,
        "data rows": 20,
        "data shape": [2, 3],
    }
    assert expected.items() <= identity.items()
    assert "lr" not in identity
    assert val_settings == {"chunk_size": 16, "eval_samples": 192}


def test_adapters_keep_the_sha256_of_their_base_and_bad_samples_are_named(tmp_path, capsys):
    """Promises 3 and 7: nothing saved is lost; a bad sample is replaced."""
    base = tmp_path / "base.pt"
    checkpoint.save({"model": {}, "config": {"width": 12}}, base)
    settings = dict(init_from=str(base), lora_rank=2)
    identity, _ = identity_of(tmp_path / "run", **settings)
    assert identity["base"] == checkpoint.checksum(base)
    assert identity["width"] == 12
    message = "1 of 9 checked samples cannot be used, and will be replaced by others: a.npy:3"
    assert message in capsys.readouterr().err


def test_best_pt_is_kept_where_validation_is_the_same_and_starts_anew_where_it_changed(
        tmp_path, capsys):
    write_run(tmp_path)
    best = tmp_path / "best.pt"
    run = start_of(tmp_path, val_data="val")
    contents = {"model": {}, "step": 8, "val_loss": 0.5, "val_settings": run.val_settings}

    def goes_on(**settings):
        """True if the run continues with the best loss that it had."""
        run = start_of(tmp_path, val_data="val", **settings)
        assert (run.best == {"file": "best.pt", "step": 8}) == (run.best_val_loss == 0.5)
        assert run.best_val_loss in (0.5, math.inf)
        return run.best_val_loss == 0.5

    assert not goes_on()  # there is no best.pt
    checkpoint.save(contents, best)
    assert goes_on(lr=0.5)
    checkpoint.save(contents | {"step": 7}, best)
    assert start_of(tmp_path, val_data="val").best == {"file": "best.pt", "step": 7}
    assert "best.pt" not in capsys.readouterr().err
    checkpoint.save(contents, best)
    for changed in (dict(val_rows=6), dict(eval_samples=8), dict(chunk_size=5)):
        assert not goes_on(**changed)
        assert "validation changed from {" in capsys.readouterr().err
    assert goes_on()  # the attempts above changed nothing


def test_a_best_pt_that_is_newer_than_the_checkpoint_or_damaged_is_not_believed(
        tmp_path, capsys):
    """Promise 3: nothing saved is lost."""
    write_run(tmp_path)
    best = tmp_path / "best.pt"
    run = start_of(tmp_path)
    contents = {"model": {}, "step": 9, "val_loss": 0.5, "val_settings": run.val_settings}
    checkpoint.save(contents, best)
    assert start_of(tmp_path).best_val_loss == math.inf
    assert "best.pt" not in capsys.readouterr().err  # step 9 will be taken again
    best.write_bytes(best.read_bytes()[:99])
    assert start_of(tmp_path).best_val_loss == math.inf
    assert "best.pt: damaged, so it will be replaced" in capsys.readouterr().err
    # Without a checkpoint, the run is new, and gets its own best.pt.
    checkpoint.save(contents | {"step": 0}, best)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "auto_resume.json").unlink()
    assert start_of(tmp_path).best_val_loss == math.inf


# Settings taken from files at the start of a run

@pytest.mark.parametrize("given, earlier, ranks, expected, noted", [
    (0, 0, 8, 8, False),
    (0, 0, 2, 16, False),  # the maximum
    (0, 16, 2, 16, False),  # the earlier size
    (0, 24, 3, 24, False),  # above the maximum, but each rank has a chunk: 24, 24, 16
    (0, 16, 4, 16, False),
    (0, 16, 8, 8, True),  # with 16, some ranks would have no chunk
    (0, 12, 7, 10, True),
    (5, 16, 2, 5, True),
    (16, 16, 2, 16, False),
    (24, 0, 2, 24, False),
    (64, 0, 2, 32, True),
])
def test_the_chunk_size_is_the_one_given_or_the_runs_or_gives_every_rank_a_chunk(
        given, earlier, ranks, expected, noted, monkeypatch, capsys):
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    cfg = Settings(batch_size=64, chunk_size=given)
    assert resume.choose_chunk_size(cfg, earlier, 16) == expected
    assert (f"chunks of {expected} samples instead of " in capsys.readouterr().err) == noted


def test_a_resumed_run_keeps_its_chunks_and_one_that_starts_from_weights_does_not(tmp_path):
    path = tmp_path / "init.pt"
    checkpoint.save({"model": {}, "config": {"chunk_size": 4}}, path)
    _, cfg = resume.open_run(Config(init_from=str(path)), tmp_path / "new", 16)
    assert cfg.chunk_size == 16
    contents = {"model": {}, "config": {"chunk_size": 4}, "training": {"identity": {}}}
    checkpoint.save(contents, path)
    _, cfg = resume.open_run(Config(load=str(path)), tmp_path / "loaded", 16)
    assert cfg.chunk_size == 4


PRESETS = {"small": {"width": 3}}
FILE = {"width": 12, "objective": "x0", "lr": 0.5, "gone": 1}


@pytest.mark.parametrize("words", [
    "",
    "--preset small",
    "--width 12",
    "--objective x0 --width 12 --lr 0.25",
])
def test_the_models_settings_are_the_files_whatever_a_preset_or_a_default_says(words, capsys):
    cfg = config.parse(Config, words.split(), presets=PRESETS)
    found = resume.with_model(cfg, FILE, "x.pt")
    assert (found.width, found.objective, found.lr) == (12, "x0", cfg.lr)
    assert found.given == cfg.given
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words, message", [
    ("--width 9", "--width 9: the model of x.pt has 12; leave it out"),
    ("--width 8", "--width 8: the model of x.pt has 12; leave it out"),  # the default, but given
    ("--objective v", "--objective v: the model of x.pt has x0; leave it out"),
    ("--preset small --width 3", "--width 3: the model of x.pt has 12; leave it out"),
    ("--config run.json", "--width 8: the model of x.pt has 12; leave it out"),
])
def test_a_given_setting_of_the_model_that_differs_from_the_files_is_refused(words, message):
    """Promise 8: a user error prints one line."""
    checkpoint.write_json({"width": 8}, Path("run.json"))
    cfg = config.parse(Config, words.split(), presets=PRESETS)
    with pytest.raises(UserError, match=message):
        resume.with_model(cfg, FILE, "x.pt")


def test_of_a_config_made_in_python_what_is_not_a_default_was_given():
    assert resume.with_model(Config(), FILE, "x.pt").width == 12
    assert resume.with_model(Config(width=12), FILE, "x.pt").width == 12
    with pytest.raises(UserError, match=r"--width 9: the model of x\.pt has 12; leave it out"):
        resume.with_model(Config(width=9), FILE, "x.pt")


def test_of_a_file_to_start_from_only_the_settings_of_the_model_are_read(tmp_path, capsys):
    path = str(tmp_path / "of_another_kind.pt")
    checkpoint.save({"model": {}, "config": {"image_size": 3}}, path)
    _, cfg = resume.open_run(Settings(init_from=path), tmp_path / "run", 16)
    assert (cfg.init_from, capsys.readouterr().err) == (path, "")  # missing settings are not noted


def test_a_file_elsewhere_is_downloaded_beside_the_run_unless_the_run_has_its_own(
        tmp_path, server):
    source = tmp_path / "source.pt"
    checkpoint.save({"model": {}, "config": {}}, source)
    server.files["/x.pt"] = source.read_bytes()
    address = server.url + "/x.pt"
    _, cfg = resume.open_run(Config(init_from=address), tmp_path / "runs/a", 16)
    assert Path(cfg.init_from).parent == tmp_path / "runs/downloads"
    assert Path(cfg.init_from).read_bytes() == source.read_bytes()
    write_run(tmp_path / "runs/b")
    asked = len(server.asked)
    resume.open_run(Config(init_from=address), tmp_path / "runs/b", 16)
    assert len(server.asked) == asked
    local = tmp_path / "a:b.pt"
    local.write_bytes(source.read_bytes())
    _, cfg = resume.open_run(Config(init_from=str(local)), tmp_path / "runs/c", 16)
    assert cfg.init_from == str(local)


# What a run starts with

def start(path, folder, **settings):
    """The contents of this rank's state, optionally resumed from the file `path`."""
    state = state_of(folder, seed=dist.rank(), other=True, **settings)
    resume.restore(SimpleNamespace(resume_from=path), state)
    return state.contents()


@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_start_from_the_checkpoint_or_from_the_weights_of_rank_0(
        steps, tmp_path, on_ranks):
    state = state_of(tmp_path, other=True)
    take_steps(state, steps)
    path = written(state, tmp_path / "2.pt") if steps else None
    for found in on_ranks(2, start, path, tmp_path):
        assert same(found, state.contents())


def test_a_start_from_weights_takes_the_averages_and_begins_at_step_0(tmp_path):
    state = state_of(tmp_path, seed=3)
    take_steps(state, 3)
    path = written(state, tmp_path / "3.pt")
    found = start(None, tmp_path, init_from=str(path))
    averages = state.ema.state_dict()
    assert not same(averages, state.model.state_dict())
    assert same(found["model"], averages) and same(found["ema"], averages)
    assert found["step"] == 0
    assert not found["training"]["optimizers"][0]["state"]


def test_a_start_from_adapters_takes_the_model_that_they_make(tmp_path):
    base = tmp_path / "base.pt"
    weights = state_of(tmp_path, seed=3).model.state_dict()
    checkpoint.save({"model": weights, "config": {}}, base)
    adapters = {"3.A": torch.randn(2, 8), "3.B": torch.randn(1, 2)}
    lora = {"base": str(base), "base_sha256": checkpoint.checksum(base)}
    path = tmp_path / "adapters.pt"
    checkpoint.save({"model": adapters, "lora": lora}, path)
    found = start(None, tmp_path, init_from=str(path))
    weights["3.weight"] += adapters["3.B"] @ adapters["3.A"]
    assert same(found["model"], weights)
    assert same(found["ema"], weights)
