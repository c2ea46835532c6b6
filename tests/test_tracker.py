"""Metrics: the loggers' records are read back, and resumed runs repeat no line."""
import contextlib
import io
import itertools
import json
import math
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Settings
from servers import needs, records_of

from common import checkpoint, config, dist, resume, tracker
from common.config import UserError
from common.data import media, sounds
from common.interop import store


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network. TensorBoard's files sort by start time, even within a second."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # otherwise it keeps the environment of earlier tests
    with contextlib.suppress(ImportError):
        from tensorboard.summary.writer import event_file_writer
        clock = itertools.count(time.time())
        time_module = SimpleNamespace(time=lambda: next(clock))
        monkeypatch.setattr(event_file_writer, "time", time_module)


def tracker_of(folder, step=0, **given):
    """A Tracker of a run in `folder` that resumes at `step`."""
    run = resume.RunFolder(folder)
    run.open()
    run.checkpoints = [{"file": "x.pt", "step": step, "sha256": ""}]
    checkpoint.write_json({"marker": "config of the run"}, folder / "config.json")
    cfg = Settings(run_dir=str(folder), batch_size=8, **given)
    return tracker.Tracker(run, SimpleNamespace(cfg=cfg, step=step))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_logged_reads_back_and_what_is_not_finite_is_null(tmp_path):
    log = tracker_of(tmp_path)
    calls = []
    log.logger.log = lambda *arguments: calls.append(arguments)
    file = "samples/step_00000003_0.png"
    log.log(3, {file: "a star"}, loss=0.1 + 0.2, best=math.inf, zero=0)
    log.log(4, {"samples/test_0.png": ""}, test_loss=0.5)
    assert lines(tmp_path)[0] == {
        "step": 3, "loss": 0.1 + 0.2, "best": None, "zero": 0, "samples": {file: "a star"}}
    # In loggers, samples have the same name at every step.
    validation = ("samples/validation_0.png", tmp_path / file, "a star")
    test = ("samples/test_0.png", tmp_path / "samples/test_0.png", "")
    assert calls == [
        (3, {"loss": 0.1 + 0.2, "zero": 0}, [validation]), (4, {"test_loss": 0.5}, [test])]


@pytest.mark.parametrize("torn", [
    b'{"step": 3, "lo',
    b'{"step": 3}',
    b'\xff\xfe\n{"step": null}\n{}\n',
    b'{"step": "3"}\n{"step": [3]}\n{}\n',
])
def test_on_resume_later_and_torn_lines_are_dropped_and_come_again_once(torn, tmp_path, capsys):
    """Promise 1: resuming is exact."""
    def log_from(log, first):
        for step in range(first, 11):
            if step % 5 == 1:  # an evaluation is at the start of a step, so it is repeated
                log.log(step - 1, val_loss=2 / step)
            log.log(step, loss=1 / step)
    log_from(tracker_of(tmp_path), 1)
    path = tmp_path / "metrics.jsonl"
    expected = path.read_bytes()
    path.write_bytes(expected + torn)
    log = tracker_of(tmp_path, 5)
    err = capsys.readouterr().err
    assert err.count("metrics.jsonl: 3 damaged lines ignored, first: line 13") == (b"{}" in torn)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert not any("val_loss" in line for line in lines(tmp_path)[-1:])
    log_from(log, 6)
    assert path.read_bytes() == expected


def test_of_the_last_step_the_test_comes_again_unless_more_steps_follow(tmp_path):
    log = tracker_of(tmp_path)
    log.log(5, val_loss=0.5)
    log.log(5, test_loss=0.5)
    tracker_of(tmp_path, 5, steps=9)
    assert lines(tmp_path) == [{"step": 5, "test_loss": 0.5}]
    tracker_of(tmp_path, 5, steps=5)
    assert not lines(tmp_path)


def test_an_evaluation_that_the_loop_does_not_repeat_stays(tmp_path):
    log = tracker_of(tmp_path)
    log.log(5, val_loss=0.5)
    log.log(5, loss=1.0)
    log.log(6, val_loss=0.25)
    run = log.run
    state = SimpleNamespace(cfg=Settings(run_dir=str(tmp_path)), step=5)
    tracker.Tracker(run, state, repeats_evaluation=False)
    assert lines(tmp_path) == [{"step": 5, "val_loss": 0.5}, {"step": 5, "loss": 1.0}]
    tracker.Tracker(run, state)
    assert lines(tmp_path) == [{"step": 5, "loss": 1.0}]


def test_a_page_a_line_or_a_logger_that_fails_is_told_and_training_continues(tmp_path, capsys):
    log = tracker_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    log.logger.log = lambda *arguments: 1 / 0
    for step in (1, 2):
        log.log(step)
        log.write_page()
    assert len(lines(tmp_path)) == 2
    log.file.close()
    log.file = open("/dev/full", "a")  # noqa: SIM115 (closed by the tracker)
    log.log(3)
    out = capsys.readouterr().out
    assert out.count("logger console failed: ZeroDivisionError: division by zero") == 1
    assert out.count("report.html: exists, and is not a file; training continues") == 2
    assert "No space left on device; training continues" in out
    with pytest.raises(OSError, match="of a checkpoint"), log:  # the line's error does not hide it
        raise OSError("of a checkpoint")


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    written = []

    def gone(text):
        written.append(text)
        raise OSError("no terminal")

    monkeypatch.setattr(tracker.tqdm, "write", gone)
    tracker.print_results("step 1", {"loss": 1.0})
    assert written == ["\nstep 1\n"]


def results_of_rank():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tracker.print_results("step 1", {"loss": 0.12345, "count": 3})
    return out.getvalue()


def test_results_are_a_table_that_rank_0_alone_prints(on_ranks):
    table = f"\nstep 1\n\n  {'loss':<40} 0.1235\n  {'count':<40} 3\n"
    assert on_ranks(2, results_of_rank) == [table, ""]


def tracks(folder):
    """The effects on this rank of a Tracker that logs, prints, sends, and writes a page."""
    if dist.is_main():
        log = tracker_of(folder)
    else:
        cfg = Settings(run_dir=str(folder), save=("local save_meta_to=about",))
        log = tracker.Tracker(resume.RunFolder(folder), SimpleNamespace(cfg=cfg, step=0))
    with contextlib.redirect_stdout(io.StringIO()) as out, log:
        log.log(3, loss=0.5)
        log.print("a word")
        log.send()
        log.write_page()
    return log.enabled, out.getvalue()


def test_rank_0_alone_writes_lines_and_pages(tmp_path, on_ranks):
    assert on_ranks(2, tracks, tmp_path) == [(True, "a word\n"), (False, "")]
    assert lines(tmp_path) == [{"step": 3, "loss": 0.5}]
    assert "loss" in (tmp_path / "report.html").read_text()


def test_the_bar_counts_steps_and_where_there_is_no_terminal_it_speaks_every_ten_seconds():
    out = io.StringIO()
    bar = tracker.progress(range(5), file=out, desc="x")
    assert list(bar) == [0, 1, 2, 3, 4]
    assert (bar.n, bar.total, bar.mininterval) == (5, 5, 10)
    assert "5/5" in out.getvalue()


def test_the_console_is_a_logger_without_an_identity(tmp_path):
    assert tracker.Logger().open(Settings(), tmp_path, {}, 0) == {}
    assert tracker.make_savers(Settings()) == []
    assert type(tracker.make_logger(Settings())) is tracker.Logger


def test_a_signal_while_the_logger_finishes_ends_the_process_after_that(tmp_path):
    """Promise 2: a run is saved after a signal."""
    log = tracker_of(tmp_path)
    log.logger.finish = lambda error: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(dist.Stopped, match="143"), log:
        pass
    assert log.file.closed


def test_a_logger_hears_how_a_run_ended_and_a_signal_then_does_not_hide_its_error(tmp_path):
    """Promise 2: a run is saved after a signal."""
    heard = []
    for error in (None, KeyError("x"), SystemExit(1)):
        log = tracker_of(tmp_path)

        def finish(error):
            heard.append(error)
            if error:
                signal.raise_signal(signal.SIGTERM)

        log.logger.finish = finish
        with contextlib.suppress(KeyError, SystemExit), log:
            if error:
                raise error
    assert [type(error) for error in heard] == [type(None), KeyError, SystemExit]


# Loggers

def log_steps(log, steps):
    """Log lines and samples as a script does. They depend only on the step."""
    folder = log.run.folder
    for step in steps:
        log.log(step, loss=1 / step, broken=math.nan)
        if step % 5 == 0:
            name = f"samples/step_{step:08d}_0"
            (folder / "samples").mkdir(exist_ok=True)
            (folder / f"{name}.png").write_bytes(media.png(np.full((4, 6, 3), 200, np.uint8)))
            sounds.write_sound(torch.zeros(400), 8000, folder / f"{name}.wav")
            captions = {f"{name}.png": f"caption {step}", f"{name}.wav": ""}
            log.log(step, captions, val_loss=2 / step)


@pytest.mark.parametrize("kind, files, settings", [
    pytest.param("wandb", "wandb/*/*.wandb", b"batch_size", marks=needs("wandb")),
    pytest.param(
        "tensorboard", "tensorboard/*", b"config of the run", marks=needs("tensorboard")),
])
def test_a_resumed_logger_has_each_step_once_and_samples_settings_and_errors(
        kind, files, settings, tmp_path):
    pytest.importorskip("PIL")
    log = tracker_of(tmp_path, logger=kind)
    log_steps(log, range(1, 13))  # the run resumes after step 8
    log.logger.finish(SystemExit(1))
    first = log.run.loggers
    with pytest.raises(ZeroDivisionError), tracker_of(tmp_path, 8, logger=kind) as log:
        log.call_logger("file", tmp_path / "config.json")
        log_steps(log, range(9, 16))
        1 / 0  # noqa: B018 (on purpose)
    assert log.run.loggers == first and [*first] == [kind]
    curves, samples = records_of(tmp_path)
    assert curves == {
        "loss": [(step, pytest.approx(1 / step)) for step in range(1, 16)],
        "val_loss": [(step, pytest.approx(2 / step)) for step in (5, 10, 15)],
    }
    assert samples == {"samples/validation_0.png": 3, "samples/validation_0.wav": 3}
    content = b"".join(path.read_bytes() for path in tmp_path.glob(files))
    assert all(text in content for text in (b"division by zero", b"caption 15", settings))


@needs("wandb")
def test_a_wandb_run_has_the_given_names_and_is_resumed_by_the_package(tmp_path, monkeypatch):
    import wandb
    init = wandb.init
    resumed = []

    def recorded_init(resume, **given):
        resumed.append(resume)
        return init(resume=resume, **given)

    monkeypatch.setattr(wandb, "init", recorded_init)
    for step, options, name in (
        (0, "project=shapes entity=me id=mine", str(tmp_path)),
        (8, "name=again", "again"),
    ):
        with tracker_of(tmp_path, step, logger=f"wandb {options}") as log:
            run = log.logger.run
        assert (run.id, run.project, run.entity, run.name) == ("mine", "shapes", "me", name)
    assert resumed == ["allow", "must"]


@needs("wandb")
def test_a_wandb_that_cannot_start_is_reported_before_training(tmp_path):
    """Promise 8: a user error prints one line."""
    with pytest.raises(UserError, match=r"--logger wandb: .*wandb login.*WANDB_MODE=offline"):
        tracker_of(tmp_path, logger="wandb projekt=x")


@pytest.mark.parametrize("kind, files", [
    pytest.param("wandb", "wandb/*/*.wandb", marks=needs("wandb")),
    pytest.param("tensorboard", "tensorboard/*", marks=needs("tensorboard")),
])
def test_a_run_that_began_on_the_console_takes_any_logger_and_later_finds_the_same_run_there(
        kind, files, tmp_path):
    """Promise 1: resuming is exact."""
    pytest.importorskip("PIL")
    starts = ["console", kind, "'console'", kind]
    found = []
    for number, logger in enumerate(starts):
        step = 4 * number
        with tracker_of(tmp_path, step, logger=logger) as log:
            log_steps(log, range(step + 1, step + 5))
        found.append(config.read_json(tmp_path / "auto_resume.json")["loggers"])
    assert found[0] == {"console": {}}
    assert found[1] == found[2] == found[3] == log.run.loggers
    assert found[1].keys() == {"console", kind}
    assert [*tmp_path.glob(files)]
    curves, _ = records_of(tmp_path)
    steps = [step for step, _ in curves["loss"]]
    assert steps == [5, 6, 7, 8, 13, 14, 15, 16]  # the steps while `kind` was the logger
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [*range(1, 17)]


@needs("wandb")
def test_what_a_disabled_wandb_answers_is_not_kept(tmp_path, monkeypatch):
    import wandb
    seen = []
    for step, mode in ((0, "offline"), (4, "disabled"), (8, "offline")):
        monkeypatch.setenv("WANDB_MODE", mode)
        wandb.teardown()
        with tracker_of(tmp_path, step, logger="wandb") as log:
            log_steps(log, [step + 1])
            seen.append(log.run.loggers["wandb"])
    assert seen == [seen[0]] * 3
    assert seen[0]["entity"] != "dummy"
    other = tmp_path / "other"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    with tracker_of(other, logger="wandb") as log:
        assert log.run.loggers["wandb"] == {}


@needs("wandb")
def test_a_run_without_a_checkpoint_begins_another_one_in_wandb(tmp_path):
    identities = []
    for _ in range(2):
        with tracker_of(tmp_path, logger="wandb") as log:
            identities.append(log.run.loggers["wandb"])
    assert identities[0].keys() == {"project", "entity", "id"}
    assert identities[0]["id"] != identities[1]["id"]


@pytest.mark.parametrize("logger, message", {
    "disk": "expected one of console, tensorboard, wandb, then OPTION=VALUE.*'disk'",
    "": "expected one of",
    "tensorboard id=x": "got an unexpected keyword argument 'id'",
    "wandb 'id=x": "No closing quotation",
}.items())
def test_a_logger_that_cannot_be_meant_is_refused(logger, message):
    """Promise 8: a user error prints one line."""
    with pytest.raises(UserError, match=f"--logger.*{message}"):
        tracker.check(Settings(logger=logger))


# Copies

def test_copies_are_sent_beside_training_which_waits_for_them_at_the_end(tmp_path, monkeypatch):
    gate = threading.Event()
    put = store.Saver.put
    about = tmp_path / "about"
    monkeypatch.setattr(store.Saver, "put", lambda *given: gate.wait(20) and put(*given))
    with tracker_of(tmp_path / "run", save=(f"local save_meta_to={about}",)) as log:
        log.run.checkpoints = [{"file": "x.pt", "step": 8}]
        log.send()
        assert not about.exists()
        gate.set()
    assert (about / "metadata.json").is_file()
