"""Where figures go: what is logged can be read back, by each logger, and a resumed run leaves no line twice."""
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import records_of

import train_prior
from common import audio, checkpoint, dist, media, tracker
from common.config import UserError

EACH = ["console", *(pytest.param(kind, marks=pytest.mark.skipif(
    not importlib.util.find_spec(kind), reason=f"{kind} is not installed")) for kind in ("tensorboard", "wandb"))]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network; and starts of a run in one second, whose event files TensorBoard would read in any order, in several.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.summary.writer import event_file_writer
        clock = itertools.count(time.time())
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(clock)))


def tracker_of(folder, step=0, logger="console", steps=100, **given):
    """A Tracker of a run in `folder` that goes on from `step`."""
    cfg = train_prior.Config(run=str(folder), steps=steps, logger=logger, **given)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json({"logger": logger}, folder / "config.json")
    run = SimpleNamespace(folder=folder, record={"checkpoints": []}, wait=lambda: None)
    if (folder / "auto_resume.json").exists():
        run.record = json.loads((folder / "auto_resume.json").read_text())
    return tracker.Tracker(run, SimpleNamespace(cfg=cfg, step=step, best_val_loss=math.inf), epoch_size=64)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_logged_reads_back_and_what_is_not_finite_is_null(tmp_path):
    log = tracker_of(tmp_path)
    log.log(1, loss=0.1 + 0.2, samples_seen=64, name="größe", rows=["a", 1])
    log.log(2, loss=float("nan"), best=float("inf"), low=float("-inf"), zero=0.0)
    log.sync()
    assert lines(tmp_path) == [{"step": 1, "loss": 0.1 + 0.2, "samples_seen": 64, "name": "größe", "rows": ["a", 1]},
                               {"step": 2, "loss": None, "best": None, "low": None, "zero": 0.0}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_on_resume_lines_beyond_the_step_and_torn_ones_are_dropped_and_come_again_once(tmp_path):
    whole = tracker_of(tmp_path)
    for step in range(1, 11):
        whole.log(step, loss=1 / step)
        if step % 5 == 0:
            whole.log(step, val_loss=2 / step)
    expected = (tmp_path / "metrics.jsonl").read_bytes()
    for torn in (b"", b'{"step": 3, "lo', b'{"step": 3}', b"\xff\xfe\n", b"[1, 2]\n", b'"step"\n', b"{}\n"):
        (tmp_path / "metrics.jsonl").write_bytes(expected + torn)
        resumed = tracker_of(tmp_path, 5)
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 5]
        for step in range(6, 11):
            resumed.log(step, loss=1 / step)
        resumed.log(10, val_loss=2 / 10)
        assert (tmp_path / "metrics.jsonl").read_bytes() == expected


def test_a_rank_that_does_not_log_writes_and_prints_nothing(tmp_path, capsys, monkeypatch):
    cfg = train_prior.Config(run=str(tmp_path / "not there"), logger="wandb", verbose=True)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_main", lambda: False)
        with tracker.Tracker(SimpleNamespace(folder=tmp_path, record={}), SimpleNamespace(cfg=cfg, step=0)) as log:
            log.log(1, {"samples/x.png": ""}, loss=1.0)
            log.say("hello")
            log.sync()
            log.report()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")
    tracker_of(tmp_path).say("hello")
    assert "hello" in "".join(capsys.readouterr())


@pytest.mark.parametrize("value, shown",
                         [(0.123456, "a 0.1235"), (1e-7, "a 1e-07"), (12345678, "a 12345678"), ("x", "a x")])
def test_figures_are_shown_at_a_readable_precision(value, shown):
    assert tracker.show({"a": value, "b": 1}) == f"{shown}  b 1"


def test_the_table_puts_figures_of_several_sampling_steps_on_one_line():
    lines = tracker.table({"step": 3, "match@8": 0.5, "match@64": 0.25, "loss": 0.125})
    assert [" ".join(line.split()) for line in lines] == ["step 3", "match 0.5000 @8 0.2500 @64", "loss 0.1250"]


def test_the_closing_test_is_logged_once_however_often_the_end_is_reached(tmp_path):
    for _ in range(3):
        log = tracker_of(tmp_path, 8, steps=8)
        log.log(8, test_loss=0.5)
    tracker_of(tmp_path, 8)  # a run that is given more steps keeps it
    assert (tmp_path / "metrics.jsonl").read_text().count("test_loss") == 1


# Loggers

def log_steps(log, steps, folder, samples=()):
    """Lines and samples such as a script logs, the same whenever a step is logged."""
    for step in steps:
        log.log(step, loss=1 / step, lr=0.1)
        if step % 5 == 0:
            (folder / "samples").mkdir(exist_ok=True)
            for name in samples:
                name = f"step_{step:08d}_0{name}"
                with open(folder / "samples" / name, "wb") as file:
                    if name.endswith("png"):
                        media.write_png(file, np.full((4, 6, 3), 200, np.uint8))
                    else:
                        audio.write_wav(file, torch.linspace(-0.5, 0.5, 400), 8000)
            log.log(step, {f"samples/step_{step:08d}_0{name}": f"caption {step}" for name in samples},
                    val_loss=2 / step)


@pytest.mark.parametrize("kind", EACH[1:])
def test_a_logger_has_scalars_samples_files_and_errors_read_back_from_it(kind, tmp_path):
    pytest.importorskip("PIL", reason="pillow is not installed")
    with pytest.raises(ZeroDivisionError), tracker_of(tmp_path, logger=kind) as log:
        log_steps(log, range(1, 11), tmp_path, (".png", ".wav"))
        1 / 0  # noqa: B018 (the error is meant)
    curves, media = records_of(tmp_path)
    assert [step for step, _ in curves["loss"]] == [*range(1, 11)]
    assert [value for _, value in curves["loss"]] == pytest.approx([1 / step for step in range(1, 11)])
    assert curves["val_loss"] == [(5, pytest.approx(0.4)), (10, pytest.approx(0.2))]
    assert media == {"validation/0.png": 2, "validation/0.wav": 2}
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.suffix == ".wandb"
                          or path.name.startswith("events"))
    assert b"division by zero" in everything and b"caption 10" in everything
    if kind == "wandb":
        assert list(tmp_path.glob("wandb/offline-run-*/files/config.json"))
    else:
        assert b'"logger": "tensorboard"' in everything


@pytest.mark.parametrize("kind", EACH[1:])
def test_resumed_under_a_logger_no_step_comes_twice_and_none_is_missing(kind, tmp_path):
    log = tracker_of(tmp_path, logger=kind)
    log_steps(log, range(1, 9), tmp_path)
    log.sync()  # a checkpoint of step 8
    log_steps(log, range(9, 13), tmp_path)
    log.logger.sync()
    if kind == "wandb":
        log.logger.run.finish()  # all 12 have got there, and 9 to 12 come again
        log.logger.wandb.teardown()
    log = tracker_of(tmp_path, 8, logger=kind)
    log_steps(log, range(9, 16), tmp_path)
    with log:
        pass
    curves, _ = records_of(tmp_path)
    assert curves["loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 16)]
    assert curves["val_loss"] == [(step, pytest.approx(2 / step)) for step in (5, 10, 15)]
    assert [line["step"] for line in lines(tmp_path)] == sorted([*range(1, 16), 5, 10, 15])


@pytest.mark.parametrize("kind", EACH[1:])
def test_what_a_logger_has_lost_it_is_sent_again(kind, tmp_path):
    with tracker_of(tmp_path, logger=kind) as log:
        log_steps(log, range(1, 9), tmp_path, (".png",))
    shutil.rmtree(tmp_path / kind)
    with tracker_of(tmp_path, 8, logger=kind) as log:
        log_steps(log, range(9, 11), tmp_path, (".png",))
    curves, media = records_of(tmp_path)
    assert [step for step, _ in curves["loss"]] == [*range(1, 11)] and list(media.values()) == [2]


@pytest.mark.parametrize("kind", EACH[1:])
def test_a_closing_test_that_comes_again_is_in_a_logger_once(kind, tmp_path):
    with tracker_of(tmp_path, logger=kind, steps=8) as log:
        log_steps(log, range(1, 9), tmp_path)
    for _ in range(2):
        with tracker_of(tmp_path, 8, logger=kind, steps=8) as log:
            log.log(8, test_loss=0.5)
        curves, _ = records_of(tmp_path)
    assert curves["test_loss"] == [(8, 0.5)] and [step for step, _ in curves["loss"]] == [*range(1, 9)]


def test_a_changed_setting_sends_wandb_what_is_made_anew_behind_what_it_has(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    with tracker_of(tmp_path, logger="wandb") as log:
        log_steps(log, range(1, 13), tmp_path)
    log.logger.wandb.teardown()
    with tracker_of(tmp_path, 8, logger="wandb", log_every=2) as log:
        log_steps(log, range(10, 21, 2), tmp_path)
    curves, _ = records_of(tmp_path)
    assert [step for step, _ in curves["loss"]] == [*range(1, 13), *range(10, 21, 2)]


def test_signals_are_gathered_and_then_are_what_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), tracker.signals() as gathered:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert gathered == [signal.SIGTERM, signal.SIGINT]
        1 / 0  # noqa: B018 (however it ends)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_verbose_prints_each_line(tmp_path, capsys):
    log = tracker_of(tmp_path, verbose=True)
    (tmp_path / "x.png").touch()
    log.log(3, {"x.png": "a red star"}, loss=0.5, test_loss=0.25)
    assert f"step 3  loss 0.5  test_loss 0.25\n    {tmp_path}/x.png  a red star" in capsys.readouterr().out
    tracker_of(tmp_path, 3, verbose=True)
    assert capsys.readouterr().out == ""


def test_a_logger_that_fails_is_told_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    log = tracker_of(tmp_path)
    monkeypatch.setattr(log.logger, "log", lambda *a: 1 / 0)
    log.logger.rows = 0
    for step in (1, 2, 3):
        log.log(step, loss=0.5)
    assert capsys.readouterr().out.count("logger console failed: ZeroDivisionError") == 1 and len(lines(tmp_path)) == 3


@pytest.mark.parametrize("known, logger, message", [
    ({"kind": "wandb", "id": "x", "project": "dalle2-audiolm", "entity": ""}, "console", "--logger wandb"),
    ({"kind": "jsonl"}, "tensorboard", "was logged with console"), ({"kind": "tensorboard"}, "wandb", "--resume never"),
    ({"kind": "wandb", "id": "x", "project": "other", "entity": ""}, "wandb", "project 'other' there")])
def test_another_logger_than_that_of_the_run_is_refused_with_the_ways_out(known, logger, message, tmp_path):
    cfg = train_prior.Config(run=str(tmp_path), logger=logger)
    record = {"checkpoints": [{"file": "checkpoints/step_00000008.pt"}], "logger": known}
    with pytest.raises(UserError, match=message):
        tracker.check_logger(cfg, record)
    tracker.check_logger(cfg, {**record, "checkpoints": []})  # nothing to go on from: it starts anew


def test_a_wandb_that_cannot_start_is_told_before_training(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def fail(**settings):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")
    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"--logger wandb: api_key not configured.*wandb login.*WANDB_MODE=offline"):
        tracker_of(tmp_path, logger="wandb")


def test_the_paths_of_copies_know_the_run(tmp_path):
    log = tracker_of(tmp_path / "prior")
    log.log(10, val_loss=0.5)
    state = SimpleNamespace(step=12, best_val_loss=0.25, cfg=SimpleNamespace(batch_size=8))
    assert log.values(state) == {"run": "prior", "step": 12, "epoch": 1, "samples_seen": 96, "val_loss": 0.5,
                                 "best_val_loss": 0.25}
    assert tracker_of(tmp_path / "prior", 12).val_loss == 0.5
