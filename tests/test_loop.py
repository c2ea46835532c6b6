"""The loops' shared part: log lines, what is due when, what ends a run, how it starts."""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import Settings

from common import checkpoint, dist, loop
from common.config import UserError


def progress_of(step):
    """The Progress of a run at `step`, whose parts keep what they are told."""
    saved = []
    printed = []
    run = SimpleNamespace(
        folder="runs/x",
        save=lambda state, log: saved.append(state.step),
        saved=saved,
        drop_from=lambda step: saved.append(f"without {step}"),
    )
    state = SimpleNamespace(
        cfg=Settings(batch_size=8),
        step=step,
        optimizers=[SimpleNamespace(param_groups=[{"lr": 0.5}])],
        info={"kind": "test"},
    )
    lines = []
    log = SimpleNamespace(
        enabled=False,
        print=printed.append,
        printed=printed,
        log=lambda step, **metrics: lines.append(metrics),
        lines=lines,
    )
    return loop.Progress(run, state, log)


def add(progress, loss, norm=2.0, unusable=()):
    progress.state.step += 1
    batches = [{"unusable": unusable}]
    loss = torch.tensor(float(loss))
    losses = [loss - 2, torch.tensor(2.0)]
    progress.add(losses, torch.tensor(norm), batches, other_loss=2 * loss)


# Lines

def two_lines(losses, unusable):
    """(lines, what was printed, what the bar says) of two steps, and of one, on this rank."""
    progress = progress_of(3)
    for loss, names in zip(losses[dist.rank()], unusable[dist.rank()]):
        add(progress, loss, unusable=names)
    progress.overflows.append(4)
    progress.log_line()
    add(progress, 8, unusable=["a"])
    progress.log_line()
    return progress.log.lines, progress.log.printed, progress.bar.postfix


def test_a_line_is_of_the_steps_since_the_last_over_all_ranks_and_names_unusable_samples_once(
        on_ranks):
    """Promise 7"""
    losses = [(10, 6), (14, 10)]
    unusable = [(["b"], ["a"]), (["b"], [])]
    for (first, second), printed, bar in on_ranks(2, two_lines, losses, unusable):
        assert first.pop("samples_per_s") > 0
        assert first == {
            "samples_seen": 40,
            "loss": 2.5,
            "lr": 0.5,
            "grad_norm": 2.0,
            "overflows": 1,
            "unusable_rows": 3,
            "other_loss": 5.0,  # twice the loss
        }
        assert [second[name] for name in ("loss", "overflows", "unusable_rows")] == [2.0, 0, 2]
        assert printed == ["unusable, and replaced by the next sample: a, b"]
        assert bar.startswith("loss 2.0000, ")


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_by_its_step_and_is_not_saved(
        loss, norm):
    """Promise 4"""
    progress = progress_of(7)
    add(progress, 1)
    add(progress, loss, norm)
    add(progress, 1)
    with pytest.raises(UserError, match=r"runs/x: .*at step 9; lower --lr"):
        progress.log_line()
    if math.isinf(norm):
        with pytest.raises(UserError, match="at step 9"):
            progress.save()
    assert set(progress.run.saved) == {"without 8"}


def test_a_run_whose_gradients_overflow_at_any_scale_ends_with_the_steps_and_a_way_out():
    progress = progress_of(3)
    progress.count_overflow(False)
    progress.count_overflow(True)
    progress.state.step = 8
    for _ in range(63):  # from 2^16 the scale has fallen to 2^-47
        progress.count_overflow(False)
    assert set(progress.overflows) == {4, 9}
    with pytest.raises(UserError, match=r"at any scale, .* steps 4,9; use --precision bf16 or"):
        progress.count_overflow(False)
    assert progress.run.saved == ["without 8"]


def test_it_is_due_by_steps_or_minutes_and_at_the_end_but_not_at_the_start(monkeypatch):
    clock = itertools.count(0, 20)  # seconds
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def steps(interval):
        state = SimpleNamespace(cfg=Settings(steps=7), step=0)
        due = loop.Due(interval, state)
        found = []
        for state.step in range(8):
            if due():
                found.append(state.step)
        return found

    assert steps("3") == [3, 6, 7]
    assert steps("0") == [7]
    assert steps("1min") == [2, 5, 7]


# Start

@pytest.mark.parametrize("given, earlier, ranks, expected", [
    (0, 0, 8, 8),
    (0, 16, 2, 16),  # the run's
    (0, 16, 8, 8),  # of which there would be too few
    (5, 16, 2, 5),
])
def test_the_chunk_size_is_the_one_given_or_the_runs_or_gives_every_rank_a_chunk(
        given, earlier, ranks, expected, monkeypatch):
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    cfg = Settings(batch_size=64, chunk_size=given)
    assert loop.choose_chunk_size(cfg, earlier, 16) == expected


def write_run(folder, **identity):
    """Write a run folder with a checkpoint; returns its path."""
    path = folder / "checkpoints/8.pt"
    contents = {"model": {}, "training": {"identity": identity}}
    checkpoint.save(contents, path)
    entry = {"file": "checkpoints/8.pt", "step": 8, "sha256": checkpoint.checksum(path)}
    record = {"checkpoints": [entry], "logger": {}, "results": {"step": 8}}
    checkpoint.write_json(record, folder / "auto_resume.json")
    return path


def dataset_of(rows):
    fingerprint = {"rows": rows, "shape": (2, 3)}
    return SimpleNamespace(check=lambda: (0, 0, []), fingerprint=lambda: fingerprint)


def start_of(folder, rows=20, val_rows=20, **settings):
    """The RunFolder `folder`, begun or gone on with."""
    run, cfg = loop.open_run(Settings(**settings), folder, 16)
    splits = {"train": (dataset_of(rows), None), "validation": (dataset_of(val_rows), None)}
    loop.identify(run, cfg, splits)
    return run


def test_a_run_goes_on_where_it_was_left_and_one_of_other_data_models_or_settings_is_refused(
        tmp_path):
    """Promise 3"""
    def start(**settings):
        run = start_of(tmp_path, **settings)
        return run.resume_from, run.results

    load = str(write_run(tmp_path / "elsewhere"))
    only = dict(load=load, load_only_auto_resume=True)
    assert start(load=load) == (load, None)
    assert start(**only) == (None, None)

    path = write_run(tmp_path, **{"seed": 0, "data rows": 20})
    assert start(**only) == (path, None)
    assert start(steps=8) == (path, None)  # model.pt is lost
    checkpoint.save({"model": {}}, tmp_path / "model.pt")
    assert start(steps=8) == (path, {"step": 8})
    assert start(steps=9) == (path, None)  # there is more to train

    with pytest.raises(UserError, match="data rows is 20 there and 21 here"):
        start(rows=21)
    with pytest.raises(UserError, match=f"{path}: .*seed is 0 there and 1 here"):
        start(seed=1)

    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"all checkpoints are .*--load, or .*another --run_dir"):
        start()
    assert start(**only) == (load, None)


def test_where_validation_has_changed_the_best_starts_anew_with_a_note(tmp_path, capsys):
    write_run(tmp_path)

    best = tmp_path / "best.pt"

    def goes_on(**settings):
        """Whether the run goes on with the best loss that it had."""
        run = start_of(tmp_path, val_data="val", **settings)
        contents = {"model": {}, "step": 8, "val_loss": 0.5, "measure": run.measure}
        checkpoint.save(contents, best)
        run.lock_file.close()
        return run.best_val_loss == 0.5

    assert not goes_on()
    assert goes_on(lr=0.5)
    contents = checkpoint.load(best)
    checkpoint.save(contents | {"step": 9}, best)  # later than the checkpoint
    assert not goes_on()
    assert "best.pt" not in capsys.readouterr().err
    best.write_bytes(best.read_bytes()[:99])
    assert not goes_on()
    assert "best.pt: damaged, so best.pt starts anew" in capsys.readouterr().err
    for changed in (dict(val_rows=21), dict(val_rows=21, eval_samples=8)):
        assert not goes_on(**changed)
        assert "best.pt starts anew" in capsys.readouterr().err


def test_of_a_file_to_start_from_only_the_settings_of_the_model_are_read(tmp_path, capsys):
    path = str(tmp_path / "of_another_kind.pt")
    checkpoint.save({"model": {}, "config": {"image_size": 3}}, path)
    _, cfg = loop.open_run(Settings(init_from=path), tmp_path / "run", 16)
    assert (cfg.init_from, capsys.readouterr().err) == (path, "")  # not all that it lacks
