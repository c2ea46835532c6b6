"""Where metrics go: each logger's records read back, and a resumed run leaves no line twice."""
import contextlib
import itertools
import json
import math
import threading
import time
import wave
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import Settings
from servers import needs, records_of

from common import checkpoint, dist, media, store, tracker
from common.config import UserError

REAL = [pytest.param(kind, marks=needs(kind)) for kind in ("tensorboard", "wandb")]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network; TensorBoard's files of one second are named in the order of their starts."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with contextlib.suppress(ImportError):
        from tensorboard.summary.writer import event_file_writer
        clock = itertools.count(time.time())
        time_module = SimpleNamespace(time=lambda: next(clock))
        monkeypatch.setattr(event_file_writer, "time", time_module)


def tracker_of(folder, step=0, steps=100, **given):
    """A Tracker of a run in `folder` that goes on from `step`, where it has a checkpoint."""
    cfg = Settings(run_dir=str(folder), steps=steps, batch_size=8, **given)
    run = checkpoint.RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json({"marker": "config of the run", "steps": steps}, folder / "config.json")
    run.record = checkpoint.record_of(folder)
    if step:
        values = {"run": "run", "step": step, "best_val_loss": 0.5}
        entry = {"file": "checkpoints/x.pt", "step": step, "sha256": "", "values": values}
        run.record["checkpoints"] = [entry]
    return tracker.Tracker(run, SimpleNamespace(cfg=cfg, logged_step=step))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def recorded(log, method):
    """The list to which each later call of a method of the logger adds its arguments."""
    calls = []
    setattr(log.logger, method, lambda *arguments: calls.append(arguments))
    return calls


def test_what_is_logged_reads_back_and_what_is_not_finite_is_null(tmp_path):
    log = tracker_of(tmp_path)
    log.log(1, loss=0.1 + 0.2, name="größe", rows=["a", 1])
    log.log(2, {"samples/x.png": "a star"}, loss=math.nan, best=math.inf, zero=0.0)
    log.sync()
    samples = {"samples/x.png": "a star"}
    assert lines(tmp_path) == [
        {"step": 1, "loss": 0.1 + 0.2, "name": "größe", "rows": ["a", 1]},
        {"step": 2, "loss": None, "best": None, "zero": 0.0, "samples": samples}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("torn", [
    b"", b'{"step": 3, "lo', b'{"step": 3}', b"\xff\xfe\n", b"[1, 2]\n", b"{}\n"])
def test_on_resume_later_and_torn_lines_are_dropped_and_come_again_once(torn, tmp_path):
    def log_from(log, first):
        for step in range(first, 11):
            log.log(step, loss=1 / step)
            if step % 5 == 0:
                log.log(step, val_loss=2 / step)
    log_from(tracker_of(tmp_path), 1)
    path = tmp_path / "metrics.jsonl"
    expected = path.read_bytes()
    path.write_bytes(expected + torn)
    log = tracker_of(tmp_path, 5)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 5]
    log_from(log, 6)
    assert path.read_bytes() == expected


def test_the_closing_test_is_logged_once_however_often_the_end_is_reached(tmp_path):
    for _ in range(3):
        tracker_of(tmp_path, 8, steps=8).log(8, test_loss=0.5)
    assert len(lines(tmp_path)) == 1


def use(log):
    with log:
        log.log(1, loss=1.0)
        log.print("hello")
        log.report()
    store.resend(log.cfg, log.run)
    tracker.print_results("Trained.", {"step": 1, "loss": 0.25}, "next.py")


def test_rank_0_writes_and_prints(tmp_path, capsys):
    use(tracker_of(tmp_path))
    assert "".join(capsys.readouterr()).split() == [
        "hello", "Trained.", "step", "1", "loss", "0.2500", "Next:", "python", "next.py"]
    assert (tmp_path / "report.html").is_file()


def test_other_ranks_neither_write_nor_print(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dist, "is_main", lambda: False)
    run = checkpoint.RunFolder(tmp_path / "not there")
    cfg = Settings(run_dir=str(run.folder), save=("local save_best_to=x.pt",))
    log = tracker.Tracker(run, SimpleNamespace(cfg=cfg, logged_step=0))
    use(log)
    assert log.copies_best_checkpoint  # on all ranks, which save together
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_report_that_cannot_be_written_does_not_stop_training(tmp_path, capsys):
    log = tracker_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    log.report()
    assert "report.html; training continues" in capsys.readouterr().out.replace("'", "")
    (tmp_path / "config.json").write_text("[" * 100_000)
    log.report()
    assert "config.json: not a JSON file" in capsys.readouterr().out


# Loggers

def write_sample(path):
    if path.suffix == ".png":
        return media.write_png(path, np.full((4, 6, 3), 200, np.uint8))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(800))


def log_steps(log, steps, folder, *samples):
    """Lines and samples such as a script logs, the same whenever a step is logged."""
    (folder / "samples").mkdir(exist_ok=True)
    for step in steps:
        log.log(step, loss=1 / step, note="text", broken=math.nan)
        if step % 5 == 0:
            captions = {}
            for name in samples:
                file = f"samples/step_{step:08d}_0{name}"
                write_sample(folder / file)
                captions[file] = f"caption {step}"
            log.log(step, captions, val_loss=2 / step)


def check_curves(curves, end):
    """Each step is there once."""
    losses = [(step, pytest.approx(1 / step)) for step in range(1, end + 1)]
    assert curves["loss"] == losses
    assert curves["val_loss"] == [(n, pytest.approx(2 / n)) for n in range(5, end + 1, 5)]


@pytest.mark.parametrize("kind, files, settings", [
    pytest.param("wandb", "wandb/*/*.wandb", b"batch_size", marks=needs("wandb")),
    pytest.param(
        "tensorboard", "tensorboard/*", b"config of the run", marks=needs("tensorboard")),
])
def test_a_logger_has_scalars_samples_settings_and_errors_read_back_from_it(
        kind, files, settings, tmp_path, capsys):
    pytest.importorskip("PIL", reason="pillow is not installed")
    with pytest.raises(ZeroDivisionError), tracker_of(tmp_path, logger=kind) as log:
        log_steps(log, range(1, 11), tmp_path, ".png", ".wav")
        1 / 0  # noqa: B018 (the error is meant)
    assert "failed" not in capsys.readouterr().out
    curves, samples = records_of(tmp_path)
    check_curves(curves, 10)
    assert curves.keys() == {"loss", "val_loss"}
    assert samples == {"samples/validation_0.png": 2, "samples/validation_0.wav": 2}
    content = b"".join(path.read_bytes() for path in tmp_path.glob(files))
    for text in (b"division by zero", b"caption 10", settings):
        assert text in content
    for path in tmp_path.glob("wandb/offline-run-*/files/config.json"):
        assert path.read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("kind", REAL)
def test_resumed_under_a_logger_no_step_comes_twice_and_none_is_missing(kind, tmp_path):
    log = tracker_of(tmp_path, logger=kind)
    log_steps(log, range(1, 13), tmp_path)  # of which a checkpoint has the first 8
    log.logger.finish(SystemExit(1))
    first = checkpoint.record_of(tmp_path)["logger"]
    with tracker_of(tmp_path, 8, logger=kind) as log:
        log_steps(log, range(9, 16), tmp_path)
    check_curves(records_of(tmp_path)[0], 15)
    assert checkpoint.record_of(tmp_path)["logger"] == first and first["kind"] == kind


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
    with pytest.raises(UserError, match=r"--logger wandb: .*wandb login.*WANDB_MODE=offline"):
        tracker_of(tmp_path, logger="wandb projekt=x")


def test_samples_have_the_same_name_at_every_step(tmp_path):
    log = tracker_of(tmp_path)
    calls = recorded(log, "log")
    log.log(3, {"samples/step_00000003_0.png": "a star"}, val_loss=0.5, coverage=1, note="x")
    log.log(4, {"samples/test_0.png": ""}, test_loss=0.5)
    validation = ("samples/validation_0.png", tmp_path / "samples/step_00000003_0.png", "a star")
    test = ("samples/test_0.png", tmp_path / "samples/test_0.png", "")
    assert calls == [
        (3, {"val_loss": 0.5, "coverage": 1}, [validation]), (4, {"test_loss": 0.5}, [test])]


def test_a_logger_that_fails_is_reported_once_and_training_continues(tmp_path, capsys):
    log = tracker_of(tmp_path)
    log.logger.log = lambda *arguments: 1 / 0
    for step in (1, 2, 3):
        log.log(step, loss=0.5)
    message = "logger console failed: ZeroDivisionError: division by zero"
    assert capsys.readouterr().out.count(message) == 1
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("error", [None, SystemExit(143), ValueError("bad")])
def test_the_logger_is_told_how_a_run_ended_after_all_is_written(error, tmp_path):
    log = tracker_of(tmp_path)
    calls = recorded(log, "finish")
    log.run.wait = lambda: calls.append("written")
    with contextlib.suppress(SystemExit, ValueError), log:
        if error:
            raise error
    written = [] if isinstance(error, ValueError) else ["written"]
    assert calls == [*written, (error,)] and log.file.closed


@pytest.mark.parametrize("logger, message", [
    ("console", "would split.*--load .*x.pt.*--resume never"),
    ("tensorboard", "was logged with {'kind': 'wandb', 'id': 'x', 'project': 'p'}"),
    ("wandb id=y", "'id': 'x'"),
])
def test_another_logger_than_that_of_the_run_is_refused_with_the_ways_out(logger, message):
    known = {"id": "x", "project": "p"}
    record = {"checkpoints": [{"file": "x.pt"}], "logger": {"kind": "wandb", **known}}
    with pytest.raises(UserError, match=message):
        tracker.check_logger(Settings(logger=logger), record)
    for same in ("wandb", "wandb project=p id=x name=new"):
        assert tracker.check_logger(Settings(logger=same), record)[1] == known
    new = {"checkpoints": [], "logger": record["logger"]}
    assert tracker.check_logger(Settings(logger=logger), new)[1] == {}


@pytest.mark.parametrize("logger, message", [
    ("disk", "expected one of console, tensorboard, wandb.*'disk'"),
    ("", "not enough"),
    ("wandb id", "expected one of console"),
    ("tensorboard id=x", "takes no arguments"),
    ("wandb 'id=x", "No closing quotation"),
])
def test_a_logger_that_cannot_be_meant_is_refused(logger, message):
    with pytest.raises(UserError, match=f"--logger.*{message}"):
        tracker.check(Settings(logger=logger))


# Copies

def test_copies_are_sent_beside_training_which_waits_for_them_at_the_end(tmp_path, monkeypatch):
    gate = threading.Event()
    put = store.Saver.put
    about = tmp_path / "about"
    monkeypatch.setattr(store.Saver, "put", lambda *given: gate.wait(20) and put(*given))
    with tracker_of(tmp_path / "run", 8, save=(f"local save_meta_to={about}/{{run}}",)) as log:
        assert not log.send().done() and not about.exists()
        gate.set()
    assert json.loads((about / "run/metadata.json").read_text())["step"] == 8


def test_paths_of_copies_know_the_whole_path_of_the_run(tmp_path):
    # Two stages do not write to one file.
    values = tracker_of(tmp_path / "prior/base", metadata=("fold=3",)).values
    found = values(SimpleNamespace(step=12, best_val_loss=0.25))
    run = f"{tmp_path}/prior/base"[1:]
    assert found == {"run": run, "step": 12, "best_val_loss": 0.25, "fold": "3"}
