"""Where figures go: what is logged can be read back, by each logger, and a resumed run leaves no line twice."""
import contextlib
import itertools
import json
import math
import signal
import sys
import threading
import time
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from servers import needs, records_of

from common import checkpoint, config, dist, media, store, tracker
from common.config import UserError

REAL = [pytest.param(kind, marks=needs(kind)) for kind in ("tensorboard", "wandb")]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network; and TensorBoard's files of starts within one second are named in the order of the starts."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        from tensorboard.summary.writer import event_file_writer
    except ImportError:
        return
    clock = itertools.count(time.time())
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(clock)))


def tracker_of(folder, step=0, steps=100, **given):
    """A Tracker of a run in `folder` that goes on from `step`, where it has a checkpoint."""
    cfg = config.Training(run_dir=str(folder), steps=steps, batch_size=8, **given)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json({"marker": "config of the run", "steps": steps}, folder / "config.json")
    run = checkpoint.Run(folder)
    run.record = checkpoint.record_of(folder)
    if step:
        values = {"run": folder.name, "step": step, "epoch": 0, "samples_seen": 0, "best_val_loss": 0.5}
        run.record["checkpoints"] = [{"file": "checkpoints/x.pt", "step": step, "sha256": "", "values": values}]
    return tracker.Tracker(run, SimpleNamespace(cfg=cfg, step=step, logged_step=step,
                                                        best_val_loss=math.inf), epoch_size=64)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_logged_reads_back_and_what_is_not_finite_is_null(tmp_path):
    log = tracker_of(tmp_path)
    log.log(1, loss=0.1 + 0.2, samples_seen=64, name="größe", rows=["a", 1])
    log.log(2, {"samples/x.png": "a star"}, loss=float("nan"), best=float("inf"), low=float("-inf"), zero=0.0)
    log.sync()
    assert lines(tmp_path) == [
        {"step": 1, "loss": 0.1 + 0.2, "samples_seen": 64, "name": "größe", "rows": ["a", 1]},
        {"step": 2, "loss": None, "best": None, "low": None, "zero": 0.0, "samples": {"samples/x.png": "a star"}}]
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


def test_the_closing_test_is_logged_once_however_often_the_end_is_reached(tmp_path):
    for _ in range(3):
        log = tracker_of(tmp_path, 8, steps=8)
        log.log(8, test_loss=0.5)
    tracker_of(tmp_path, 8)  # a run that is given more steps keeps it
    assert (tmp_path / "metrics.jsonl").read_text().count("test_loss") == 1


def test_a_rank_that_does_not_log_writes_and_prints_nothing(tmp_path, capsys, monkeypatch):
    cfg = config.Training(run_dir=str(tmp_path / "not there"), logger="wandb", save=("local save_best_to=x.pt",))
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_main", lambda: False)
        with tracker.Tracker(checkpoint.Run(cfg.run_dir), SimpleNamespace(cfg=cfg, step=0)) as log:
            log.log(1, {"samples/x.png": ""}, loss=1.0)
            log.say("hello")
            log.report()
        tracker.resend(cfg, None)
        tracker.announce("Trained.", {"step": 1}, "next.py")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "") and log.copies_best_checkpoint
    log = tracker_of(tmp_path)
    log.say("hello")
    log.report()
    tracker.announce("Trained.", {"loss": 0.25}, "next.py")
    assert "".join(capsys.readouterr()).split() == ["hello", "Trained.", "loss", "0.2500", "Next:", "python", "next.py"]
    assert (tmp_path / "report.html").is_file()


def test_figures_are_shown_at_a_readable_precision():
    metrics = {"a": 0.123456, "b": 1e-7, "c": 12345678, "d": "x"}
    assert tracker.show(metrics) == "a 0.1235  b 1e-07  c 12345678  d x"


def test_the_table_has_a_line_for_each_figure():
    rows = [line.split() for line in tracker.table({"step": 3, "match@8": 0.5, "loss": 0.123456})]
    assert rows == [["step", "3"], ["match@8", "0.5000"], ["loss", "0.1235"]]


# Loggers

def log_steps(log, steps, folder, samples=()):
    """Lines and samples such as a script logs, the same whenever a step is logged."""
    (folder / "samples").mkdir(exist_ok=True)
    for step in steps:
        log.log(step, loss=1 / step, note="text", broken=math.nan)
        for name in samples if step % 5 == 0 else ():
            path = str(folder / f"samples/step_{step:08d}_0{name}")
            if name == ".png":
                media.write_png(path, np.full((4, 6, 3), 200, np.uint8))
            else:
                with wave.open(path, "wb") as file:
                    file.setparams((1, 2, 8000, 0, "NONE", ""))
                    file.writeframes(bytes(800))
        if step % 5 == 0:
            captions = {f"samples/step_{step:08d}_0{name}": f"caption {step}" for name in samples}
            log.log(step, captions, val_loss=2 / step)


@pytest.mark.parametrize("kind", REAL)
def test_a_logger_has_scalars_samples_files_and_errors_read_back_from_it(kind, tmp_path, capsys):
    pytest.importorskip("PIL", reason="pillow is not installed")
    with pytest.raises(ZeroDivisionError), tracker_of(tmp_path, logger=kind) as log:
        log_steps(log, range(1, 11), tmp_path, (".png", ".wav"))
        1 / 0  # noqa: B018 (the error is meant)
    curves, samples = records_of(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == [*range(1, 11)] and "failed" not in capsys.readouterr().out
    assert [value for _, value in curves["train/loss"]] == pytest.approx([1 / step for step in range(1, 11)])
    assert curves["validation/loss"] == [(5, pytest.approx(0.4)), (10, pytest.approx(0.2))]
    assert samples == {"validation/0.png": 2, "validation/0.wav": 2} and "broken" not in curves
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.suffix == ".wandb"
                          or path.name.startswith("events"))
    assert b"division by zero" in everything and b"caption 10" in everything
    assert {"wandb": b"batch_size", "tensorboard": b"config of the run"}[kind] in everything
    if kind == "wandb":
        assert not any(path.is_symlink() for path in tmp_path.glob("wandb/offline-run-*/files/*"))
        assert [path.read_text() for path in tmp_path.glob("wandb/offline-run-*/files/config.json")] == [
            (tmp_path / "config.json").read_text()]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("validation/0.png")[-1]
        assert (found.width, found.height) == (6, 4)
        assert found.encoded_image_string == (tmp_path / "samples/step_00000010_0.png").read_bytes()


@pytest.mark.parametrize("kind", REAL)
def test_resumed_under_a_logger_no_step_comes_twice_and_none_is_missing(kind, tmp_path):
    log = tracker_of(tmp_path, logger=kind)
    log_steps(log, range(1, 13), tmp_path)  # of which a checkpoint has the first 8
    log.logger.finish(1, "")
    first = json.loads((tmp_path / "auto_resume.json").read_text())["logger"]
    with tracker_of(tmp_path, 8, logger=kind) as log:
        log_steps(log, range(9, 16), tmp_path)
    curves, _ = records_of(tmp_path)
    for name, steps, top in (("train/loss", range(1, 16), 1), ("validation/loss", (5, 10, 15), 2)):
        assert curves[name] == [(step, pytest.approx(top / step)) for step in steps]
    assert json.loads((tmp_path / "auto_resume.json").read_text())["logger"] == first and first["kind"] == kind


@needs("wandb")
@needs("PIL")
def test_a_wandb_run_has_the_id_and_names_that_are_given_and_is_resumed_by_the_package(tmp_path, monkeypatch):
    import wandb
    init, calls = wandb.init, []
    monkeypatch.setattr(wandb, "init", lambda **given: calls.append(given) or init(**given))
    given = "wandb project=shapes entity=me id=mine"
    with tracker_of(tmp_path, logger=given) as log:
        assert (log.logger.run.id, log.logger.run.project, log.logger.run.entity) == ("mine", "shapes", "me")
        assert log.logger.run.name == str(tmp_path)
    with tracker_of(tmp_path, 8, logger="wandb name=again") as log:
        assert (log.logger.run.id, log.logger.run.project, log.logger.run.name) == ("mine", "shapes", "again")
    assert [call["resume"] for call in calls] == ["allow", "must"]
    assert all(call["config"]["batch_size"] == 8 and call["dir"] == str(tmp_path) for call in calls)


def test_a_wandb_that_cannot_start_is_told_before_training(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def fail(**settings):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")
    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"--logger wandb: api_key not configured.*wandb login.*WANDB_MODE=offline"):
        tracker_of(tmp_path, logger="wandb")


def test_figures_and_samples_have_a_group_and_samples_the_same_name_at_every_step(tmp_path):
    told, log = [], tracker_of(tmp_path)
    log.logger.log = lambda *given: told.append(given)
    log.log(2, loss=0.75, lr=0.1)
    log.log(3, {"samples/step_00000003_0.png": "a star"}, val_loss=0.5, coverage=1, note="x")
    log.log(4, {"samples/test_0.png": ""}, test_loss=0.5)
    assert told == [
        (2, {"train/loss": 0.75, "train/lr": 0.1}, []),
        (3, {"validation/loss": 0.5, "validation/coverage": 1},
         [("validation/0.png", tmp_path / "samples/step_00000003_0.png", "a star")]),
        (4, {"test/loss": 0.5}, [("test/0.png", tmp_path / "samples/test_0.png", "")])]


def test_a_logger_that_fails_is_told_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    log = tracker_of(tmp_path)
    monkeypatch.setattr(log.logger, "log", lambda *a: 1 / 0)
    for step in (1, 2, 3):
        log.log(step, loss=0.5)
    assert capsys.readouterr().out.count("logger console failed: ZeroDivisionError: division by zero") == 1
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("error, status", [(None, 0), (SystemExit(143), 143), (ValueError("bad"), 1)])
def test_the_logger_hears_how_a_run_ended(error, status, tmp_path):
    told, log = [], tracker_of(tmp_path)
    log.logger.finish, log.run.wait = lambda *given: told.append(given), lambda: told.append("all is written")
    with contextlib.suppress(SystemExit, ValueError), log:
        if error:
            raise error
    assert told == ([(1, "ValueError: bad")] if status == 1 else ["all is written", (status, "")]) and log.file.closed


@pytest.mark.parametrize("known, logger, message", [
    ({"kind": "wandb", "id": "x"}, "console", "--logger console would tear.*--load .*x.pt.*--resume never"),
    (None, "tensorboard", "was logged with {'kind': 'console'}"),
    ({"kind": "wandb", "id": "x", "project": "other"}, "wandb project=mine", "'project': 'other'"),
    ({"kind": "wandb", "id": "x"}, "wandb id=y", "'id': 'x'")])
def test_another_logger_than_that_of_the_run_is_refused_with_the_ways_out(known, logger, message, tmp_path):
    cfg = config.Training(run_dir=str(tmp_path), logger=logger)
    record = {"checkpoints": [{"file": "x.pt"}], **({"logger": known} if known else {})}
    with pytest.raises(UserError, match=message):
        tracker.check_logger(cfg, record)
    assert tracker.check_logger(cfg, {**record, "checkpoints": []}) == {}  # nothing to go on from: it starts anew


def test_the_same_logger_goes_on_with_what_it_is_known_by(tmp_path):
    record = {"checkpoints": [{"file": "x.pt"}], "logger": {"kind": "wandb", "id": "x", "project": "p"}}
    for logger in ("wandb", "wandb project=p", "wandb project=p id=x name=new"):
        assert tracker.check_logger(config.Training(logger=logger), record) == record["logger"]


@pytest.mark.parametrize("logger, message", [
    ("disk", "expected one of console, tensorboard, wandb"), ("", "not enough"), ("wandb id", "expected NAME=VALUE"),
    ("wandb projekt=x", "NAME=VALUE with a name of project, entity, name, id"),
    ("wandb 'id=x", "No closing quotation")])
def test_a_logger_that_cannot_be_meant_is_refused(logger, message):
    with pytest.raises(UserError, match=f"--logger.*{message}"):
        tracker.check(config.Training(logger=logger))


@pytest.mark.parametrize("given, module, package", [
    ({"logger": "wandb"}, "wandb", "wandb"), ({"logger": "wandb"}, "PIL", "pillow"),
    ({"logger": "tensorboard"}, "tensorboard", "tensorboard"),
    ({"save": ("huggingface repo=a/b save_latest_to=x.pt",)}, "huggingface_hub", "huggingface_hub")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(given, module, package, tmp_path, monkeypatch):
    for name in ("wandb", "PIL", "tensorboard", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    cfg = config.Training(run_dir=str(tmp_path / "run"), **given)
    assert tracker.prepare(cfg) == cfg
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"--.* needs .*: pip install {package}"):
        tracker.prepare(cfg)


# The console and the meter

def test_copies_are_sent_beside_training_which_waits_for_them_at_the_end(tmp_path, monkeypatch):
    gate, put, about = threading.Event(), store.Saver.put, tmp_path / "about/prior"
    monkeypatch.setattr(store.Saver, "put", lambda *given: gate.wait(20) and put(*given))
    with tracker_of(tmp_path / "prior", 8, save=(f"local save_meta_to={tmp_path}/about/{{run}}",)) as log:
        assert not log.send().done() and not about.exists()
        gate.set()
    assert json.loads((about / "metadata.json").read_text())["step"] == 8
    assert (about / "config.json").read_bytes() == (tmp_path / "prior/config.json").read_bytes()


def test_the_config_is_copied_at_the_start_before_there_is_a_checkpoint(tmp_path):
    with tracker_of(tmp_path / "prior", save=(f"local save_meta_to={tmp_path}/about",)) as log:
        log.send().result()
        assert (tmp_path / "about/config.json").read_bytes() == (tmp_path / "prior/config.json").read_bytes()
        assert json.loads((tmp_path / "about/metadata.json").read_text())["step"] == 0


def test_the_paths_of_copies_know_the_run_as_a_whole_so_that_two_stages_do_not_write_to_one_file(tmp_path):
    log = tracker_of(tmp_path / "prior/base", metadata=("fold=3",))
    assert log.values(SimpleNamespace(step=12, best_val_loss=0.25)) == {
        "run": f"{tmp_path}/prior/base"[1:], "step": 12, "epoch": 1, "samples_seen": 96, "best_val_loss": 0.25,
        "fold": "3"}


class Lines:
    """What a Meter logs and says."""
    enabled = False

    def __init__(self):
        self.lines, self.said = [], []

    def log(self, step, **metrics):
        self.lines.append({"step": step, **metrics})

    say = property(lambda self: self.said.append)


def state_at(step, unlogged=checkpoint.NOTHING_UNLOGGED, **settings):
    """As much of a State as a Meter needs."""
    cfg = config.Training(run_dir="runs/x", **settings)
    scaler = SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 4.0)
    logged_step = step - len(unlogged["losses"])
    return SimpleNamespace(cfg=cfg, step=step, scaler=scaler, unlogged=unlogged, logged_step=logged_step)


def metered(rank, losses, rows=((), ())):
    """The lines that a Meter logs of two steps of 8 samples, and what it says, on one of the ranks."""
    state, log = state_at(3, batch_size=8, lr=0.5, warmup_steps=0, cosine=False), Lines()
    meter = tracker.Meter(log, state, "test")
    meter.restart()
    for loss, unusable in zip(losses[rank], rows[rank] or ((), ())):
        state.step += 1
        meter.add(torch.tensor(float(loss)), torch.tensor(2.0), [{"unusable": list(unusable)}, {"unusable": []}])
    meter.overflows += 1
    loss, line = meter.line(), log.lines[0]
    assert loss == line["loss"] and line.pop("samples_per_s") > 0
    meter.restart()
    state.step += 1
    meter.add(torch.tensor(8.0), torch.tensor(2.0), [{"unusable": ["a"]}])
    meter.line()
    return line, log.lines[1]["loss"], log.lines[1]["overflows"], log.said


def rank_metered(losses, rows):
    return metered(dist.rank(), losses, rows)


def test_a_line_is_the_mean_loss_of_the_steps_since_the_last_over_all_ranks(on_ranks):
    expected = {"step": 5, "samples_seen": 40, "loss": 2.5, "lr": 0.5, "grad_norm": 2.0, "overflows": 1,
                "unusable_rows": 0, "scale": 4.0}
    assert metered(0, [(24, 16)]) == (expected, 1.0, 0, ["unusable, and replaced by the next row: a"])
    two = on_ranks(2, rank_metered, [(10, 6), (14, 10)], [(("b",), ("a",)), (("b",), ())])
    assert [line for line, *_ in two] == [{**expected, "unusable_rows": 3}] * 2
    assert two[0][1:] == (2.0, 0, ["unusable, and replaced by the next row: a, b"])  # each row once


@pytest.mark.parametrize("losses, norm, step", [
    ((1.0, math.nan), 1.0, 9), ((math.nan, math.nan), 1.0, 8), ((1.0, 1.0), math.inf, 9)])
def test_a_loss_or_norm_that_is_not_finite_ends_the_run_with_its_step_and_the_last_good_checkpoint(losses, norm, step):
    state, log = state_at(7), Lines()
    log.run = SimpleNamespace(forget=lambda bad: f"the one before {bad}")  # in which the weights before that step are
    meter, state.step = tracker.Meter(log, state, "test"), 9
    for loss in losses:
        meter.add(torch.tensor(loss), torch.tensor(norm), [])
    with pytest.raises(UserError, match=rf"runs/x: .*at step {step}; lower --lr.*from the one before {step - 1}"):
        meter.line()


def test_evaluating_and_saving_are_due_by_steps_by_minutes_and_at_the_end():
    state = state_at(0, steps=20, eval_every=5, eval_minutes=1e-9, save_every=0)
    meter, due = tracker.Meter(Lines(), state, "test"), []
    for state.step in (4, 5, 6, 20):
        due.append(meter.due())
        meter.restart()
    assert due == [[True, False], [True, False], [True, False], [True, True]]  # from the start on


def test_what_a_stop_left_between_two_lines_is_logged_by_the_next_as_if_nothing_was():
    settings = dict(batch_size=8, steps=20, log_every=4, lr=0.5, warmup_steps=0, cosine=False)
    losses, lines = (8.0, 16.0, 40.0, 80.0), []
    for stop in range(4):  # after so many of the steps 9 to 12
        state, log = state_at(8, **settings), Lines()
        log.run = SimpleNamespace(commit=lambda state, log: None, wait=lambda: None)
        with pytest.raises(SystemExit) as ended, tracker.Meter(log, state, "test") as meter:
            for loss in losses[:stop]:
                state.step += 1
                meter.add(torch.tensor(loss), torch.tensor(3.0), [{"unusable": ["a"]}])
            meter.overflows += 1
            raise dist.Stopped(signal.SIGTERM)
        assert ended.value.code == 143 and log.said[-1].startswith(f"stopped by SIGTERM at step {8 + stop}")
        state, log = state_at(8 + stop, state.unlogged, **settings), Lines()
        meter = tracker.Meter(log, state, "test")
        for loss in losses[stop:]:
            assert not meter.line_due()
            state.step += 1
            meter.add(torch.tensor(loss), torch.tensor(3.0), [{"unusable": ["a"]}])
        assert meter.line_due() and meter.line() == 18 / 4
        lines.append({name: value for name, value in log.lines[0].items() if name != "samples_per_s"})
    assert lines == [{"step": 12, "samples_seen": 96, "loss": 4.5, "lr": 0.5, "grad_norm": 3.0, "overflows": 1,
                      "unusable_rows": 4, "scale": 4.0}] * 4
