"""Helpers of the training loops: log lines, intervals, ends of runs, evaluation."""
import concurrent.futures
import dataclasses
import itertools
import math
import random
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Settings, metrics, same, saved
from torch import nn

from common import accumulate, amp, checkpoint, config, dist, ema, loop, optim, order, resume
from common.config import UserError
from common.interop import store


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a small run"""

    eval_every: str = "4"


def progress_of(step):
    """The Progress of a run at `step`, with parts that record their calls."""
    saved = []
    printed = []
    run = SimpleNamespace(
        folder="runs/x",
        save=lambda state: saved.append(state.step),
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
        send=lambda: saved.append("sent"),
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
    """Log a line after two steps, and one after a third: (lines, printed text, text of the bar)."""
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
    """Promise 7: a bad sample is replaced."""
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
        assert printed == ["unusable samples, replaced by the next ones: a, b"]
        assert bar.startswith("loss 2.0000, ")


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_by_its_step_and_is_not_saved(
        loss, norm):
    """Promise 4: non-finite values are not saved."""
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


def test_what_is_finite_is_saved_and_then_copied():
    progress = progress_of(7)
    progress.save()  # no training steps since the last log line
    add(progress, 1)
    progress.save()
    assert progress.run.saved == [7, "sent", 8, "sent"]


def end_of_a_full_disk(what):
    """How this rank ends if rank 0 cannot write."""
    def refuse(*arguments, **entries):
        raise OSError(28, "No space left on device, writing", "x.pt")

    progress = progress_of(7)
    run = progress.run = resume.RunFolder("runs/x")
    run.commit = run.write_model = refuse
    try:
        if what == "best":
            run.save_best(progress.state, 0.5)
        else:
            progress.save()
    except (OSError, SystemExit) as error:
        return str(error)


@pytest.mark.parametrize("what", ["checkpoint", "best"])
def test_a_full_disk_of_rank_0_ends_all_ranks_by_its_message_alone(what, on_ranks):
    """Promise 6: all ranks end together."""
    first, second = on_ranks(2, end_of_a_full_disk, what)
    assert first == "[Errno 28] No space left on device, writing: 'x.pt'"
    assert second == "1"  # an exit status, without a message


def test_a_run_whose_gradients_overflow_at_any_scale_ends_with_the_steps_and_a_way_out():
    progress = progress_of(3)
    progress.count_overflow(False)
    progress.count_overflow(True)
    progress.state.step = 8
    for _ in range(63):  # the scale falls from 2^16 to 2^-47
        progress.count_overflow(False)
    assert set(progress.overflows) == {4, 9}
    with pytest.raises(UserError, match=r"at any loss scale, .* steps 4,9; use --precision"):
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


def test_an_evaluation_does_not_count_as_time_of_training(monkeypatch):
    clock = itertools.count(0, 2.0)  # seconds
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = progress_of(0)  # reads the clock at 0 s
    add(progress, 1)
    with progress.paused():  # from 2 s to 4 s
        pass
    assert progress.paused_s == 2.0
    progress.log_line()  # at 6 s
    line, = progress.log.lines
    assert line["samples_per_s"] == 8 / (6 - 2)


def counts_by_minutes():
    state = SimpleNamespace(cfg=Settings(steps=7), step=1)
    due = loop.Due("1min", state)
    if dist.is_main():
        due.started -= 61
    return [due(), due()]


def test_by_minutes_the_clock_of_rank_0_decides_for_all(on_ranks):
    """Promise 6: all ranks end together."""
    assert on_ranks(2, counts_by_minutes) == [[True, False]] * 2


# A run in miniature

class Samples:
    """A data set of 40 vectors."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.vectors = torch.randn(40, 4, generator=generator)

    def __len__(self):
        return 40

    def fetch(self, indices, bits=None):
        return {"x": self.vectors[indices]}, np.ones(len(indices), bool)

    def check(self):
        return 0, 0, []

    def fingerprint(self):
        return {"rows": 40}


def losses_of(model, batch):
    return model(batch["x"]).square().mean()


def train(folder, at=None, event=None, **settings):
    """Train a small model as the scripts do, and call `event(progress)` after step `at`."""
    settings = dict(steps=6, batch_size=8, lr=0.1, eval_samples=10) | settings
    cfg = Config(run_dir=str(folder), save_every="3", log_every=2, **settings)
    run, cfg = resume.open_run(cfg, folder, 4)
    dataset = Samples()
    splits = {"train": (dataset, np.arange(24)), "validation": (dataset, np.arange(24, 40))}
    identity = resume.identify(run, cfg, splits)
    if run.results:
        return loop.announce(run, cfg)
    torch.manual_seed(cfg.seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model.cfg = cfg
    averages = ema.EMA(model, decay=0.5)
    optimizers = optim.make(model, cfg.optimizer, cfg.lr, 0.0)
    scaler = amp.scaler(torch.device("cpu"), cfg.precision)
    state = resume.State(cfg, model, averages, optimizers, scaler, identity, {"kind": "small"})
    resume.restore(run, state)
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    def mean_loss():
        return loop.mean_loss(model, lambda batch: losses_of(model, batch), *splits["validation"])

    with loop.begin(run, state, "40 vectors", torch.device("cpu")) as progress:
        while True:
            if eval_due():
                with progress.paused(), averages.applied(model):
                    metrics = {"val_loss": mean_loss()}
                progress.log_evaluation(metrics)
            if state.step >= cfg.steps:
                break
            accumulate.seed_all(cfg.seed, state.step)
            loss = losses_of(model, {"x": dataset.vectors[state.step:][:8]})
            loss.backward()
            norm, stepped = amp.step(scaler, optimizers, 1.0)
            model.zero_grad()
            progress.count_overflow(stepped)
            state.step += 1
            averages.update(state.step)
            progress.add([loss.detach() * 8], norm, [])
            if state.step % cfg.log_every == 0:
                progress.log_line()
            if save_due():
                progress.save()
            if state.step == at:
                event(progress)
            dist.stop_together()
        progress.finish({"loss": mean_loss()})
    run.lock_file.close()


@pytest.fixture(autouse=True)
def not_killed():
    """An unhandled signal fails the test instead of ending all tests."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: 1 / 0)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate(progress=None):
    signal.raise_signal(signal.SIGTERM)


def files_of(folder):
    names = ("model.pt", "best.pt", saved(folder)[0]["file"])
    contents = [checkpoint.load(folder / name) for name in names]
    for each in contents:
        del each["config"]
    return contents


@pytest.mark.parametrize("warmup_steps", [5, 6])
def test_a_warm_up_as_long_as_the_run_is_noted(warmup_steps, tmp_path, capsys):
    train(tmp_path / "run", warmup_steps=warmup_steps)
    err = capsys.readouterr().err
    assert ("--warmup_steps 6: the run ends before its warm-up does" in err) == (warmup_steps == 6)


def test_a_run_writes_its_lines_config_models_and_results_and_is_announced_again(
        tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder)
    out = capsys.readouterr().out
    about = "40 vectors; 25 trainable parameters, batches of 8 in chunks of 4, 1 rank(s) on cpu"
    assert about in out
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [2, 4, 4, 6, 6, 6]
    names = [next(name for name in line if "loss" in name) for line in lines]
    assert names == ["loss", "loss", "val_loss", "loss", "val_loss", "test_loss"]
    written = config.read_json(folder / "config.json")
    assert (written["lr"], written["versions"]["torch"]) == (0.1, torch.__version__)

    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    best = checkpoint.load(folder / "best.pt")
    assert best["val_loss"] == min(losses.values()) == losses[best["step"]]
    results = config.read_json(folder / "auto_resume.json")["results"]
    assert results == {
        "step": 6,
        "best_val_loss": best["val_loss"],
        "test_loss": lines[-1]["test_loss"],
    }
    model = checkpoint.load(folder / "model.pt")
    assert results.items() <= model.items()
    assert same(model["model"], checkpoint.load(folder / saved(folder)[0]["file"])["ema"])

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.suffix}
    del before[folder / "auto_resume.json"]
    train(folder)
    out = capsys.readouterr().out
    assert f"{folder} is finished at step 6; give more --steps to continue" in out
    assert f"test_loss                                {results['test_loss']:.4f}" in out
    assert all(path.read_bytes() == content for path, content in before.items())


def test_copies_that_fail_are_tried_again_at_the_end_and_by_the_same_command(tmp_path, capsys):
    """Until the third command, a file stands where the folder of the copies should be."""
    wall = tmp_path / "wall"
    wall.write_text("")
    save = (f"local save_latest_to={wall}/{{step}}.pt save_best_to={wall}/{{step}}_best.pt",)
    settings = dict(save=save, timeout_minutes=0.001)
    missing = "the best copy by .* failed: .*; it is retried .* the same command runs again\n"
    for _ in range(2):
        train(tmp_path / "run", **settings)
        assert re.search(f"finished at step 6(.*\n)*{missing}$", capsys.readouterr().out)
    wall.unlink()
    train(tmp_path / "run", **settings)
    best = checkpoint.load(tmp_path / "run/best.pt")["step"]
    assert {path.name for path in wall.iterdir()} == {"6.pt", f"{best}_best.pt"}
    assert "missing" not in capsys.readouterr().out


def test_a_copy_that_fails_for_a_while_at_the_end_is_sent(tmp_path, monkeypatch, capsys):
    pauses = []
    copy = tmp_path / "copy"
    copy.mkdir()

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 6:
            copy.rmdir()

    monkeypatch.setattr(store.time, "sleep", sleep)
    train(tmp_path / "run", save=(f"local save_latest_to={copy}",), timeout_minutes=3)
    assert pauses == [1, 2, 4, 8, 16, 32]
    assert checkpoint.load(copy)["step"] == 6
    copy.unlink()
    copy.mkdir()
    pauses[:] = range(100)  # so that `sleep` leaves the folder there
    train(tmp_path / "run", save=(f"local save_latest_to={copy}",), timeout_minutes=3)
    assert pauses[100:] == [1, 2, 4, 8, 16, 32, 64]  # 127 s, within three minutes


def test_a_thread_may_train_and_the_handlers_of_signals_stay(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train, tmp_path).result()
    assert saved(tmp_path)[0]["step"] == 6
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_signal_saves_the_step_ends_with_its_status_and_the_run_goes_on_bit_for_bit(
        step, tmp_path, capsys):
    """Promises 1 and 2: resuming is exact; a run is saved after a signal."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    train(whole)
    with pytest.raises(dist.Stopped) as end:
        train(stopped, step, terminate)
    assert end.value.code == 128 + signal.SIGTERM
    assert saved(stopped)[0]["step"] == step
    out = capsys.readouterr().out
    assert f"stopped by SIGTERM at step {step}, saved; the same command resumes" in out
    train(stopped)
    lines = [line for line in metrics(stopped) if "loss" in line]
    assert [line["step"] for line in lines][-1] == 6
    evaluations = [line for line in metrics(stopped) if "val_loss" in line]
    assert evaluations == [line for line in metrics(whole) if "val_loss" in line]
    assert same(files_of(stopped), files_of(whole))


def test_a_signal_before_the_first_step_is_heard_and_saved(tmp_path, monkeypatch):
    """Promise 2: a run is saved after a signal."""
    add_up = loop.Progress.__init__

    def sent(progress, *parts):
        add_up(progress, *parts)
        terminate()

    with monkeypatch.context() as patch:
        patch.setattr(loop.Progress, "__init__", sent)
        with pytest.raises(dist.Stopped, match="143"):
            train(tmp_path / "run")
    assert saved(tmp_path / "run")[0]["step"] <= 1
    train(tmp_path / "run")
    train(tmp_path / "whole")
    assert same(files_of(tmp_path / "run"), files_of(tmp_path / "whole"))


def test_a_signal_at_the_very_end_leaves_a_finished_run_and_no_next_stage(tmp_path, monkeypatch):
    """Promise 2: a run is saved after a signal."""
    write_model = resume.RunFolder.write_model

    def sent(run, state, file, **entries):
        if file == "model.pt":
            terminate()
        write_model(run, state, file, **entries)

    with monkeypatch.context() as patch:
        patch.setattr(resume.RunFolder, "write_model", sent)
        with pytest.raises(dist.Stopped, match="143"):
            train(tmp_path)
    assert config.read_json(tmp_path / "auto_resume.json")["results"]["step"] == 6
    assert (tmp_path / "model.pt").is_file()


def test_a_validation_loss_that_is_not_finite_is_logged_ends_the_run_and_drops_its_step(
        tmp_path):
    """Promise 4: non-finite values are not saved."""
    def spoil(progress):
        for average in progress.state.ema.averages.values():
            average.fill_(math.nan)

    with pytest.raises(UserError, match="the validation loss is nan at step 4"):
        train(tmp_path, 4, spoil)
    assert [entry["step"] for entry in saved(tmp_path)] == [3]
    assert metrics(tmp_path)[-1] == {"step": 4, "val_loss": None}
    assert not (tmp_path / "best.pt").exists()
    train(tmp_path)
    assert [line["step"] for line in metrics(tmp_path) if "val_loss" in line] == [4, 6]


def test_too_little_memory_has_a_hint_and_any_other_error_its_own_words(tmp_path, capsys):
    def fill(progress):
        raise torch.OutOfMemoryError("of torch")

    def misspell(progress):
        return progres  # noqa: F821

    with pytest.raises(torch.OutOfMemoryError, match="of torch"):
        train(tmp_path / "a", 1, fill)
    assert "out of memory: lower --chunk_size, or give" in capsys.readouterr().out
    with pytest.raises(NameError, match="progres"):
        train(tmp_path / "b", 1, misspell)
    assert "out of memory" not in capsys.readouterr().out
    assert not saved(tmp_path / "b")  # nothing is saved after an error


def test_a_run_that_was_loaded_with_all_its_steps_is_tested_and_has_its_own_files(tmp_path):
    train(tmp_path / "a")
    file = saved(tmp_path / "a")[0]["file"]
    train(tmp_path / "b", load=str(tmp_path / "a" / file))
    assert saved(tmp_path / "b")[0]["file"] == file
    found, expected = (files_of(tmp_path / name)[0] for name in "ba")
    assert same(found["model"], expected["model"])
    assert found["test_loss"] == expected["test_loss"]


def test_the_page_is_written_after_each_evaluation(tmp_path):
    pages = []

    def read(progress):
        pages.append((tmp_path / "report.html").read_text())

    train(tmp_path, 5, read)
    pages.append((tmp_path / "report.html").read_text())
    assert ["test_loss" in page for page in pages] == [False, True]
    assert "val_loss" in pages[0]


def test_the_same_logger_gets_the_config_at_every_start(tmp_path, monkeypatch):
    paths = []
    monkeypatch.setattr("common.tracker.Logger.file", lambda logger, path: paths.append(path))
    train(tmp_path, steps=3)
    train(tmp_path, steps=4)
    assert paths == [tmp_path / "config.json"] * 2


# Evaluation

class Noisy(nn.Module):
    """A model with a noisy loss, and with dropout in training."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)
        self.cfg = Settings(eval_samples=15, **settings)

    def loss_of(self, batch):
        x = self.dropout(batch["x"]) + torch.randn(4) + random.random() + np.random.rand()
        return self.linear(x.float()).square().mean()


def evaluate(training=True, **settings):
    model = Noisy(chunk_size=4, **settings).train(training)
    indices = np.arange(3, 40)
    loss = loop.mean_loss(model, model.loss_of, Samples(), indices)
    assert model.training == training
    assert all(p.grad is None for p in model.parameters())
    return loss


def slow_loss():
    """The loss of a plain loop over 15 samples in 4 chunks, each with its own seed; no dropout."""
    model = Noisy().eval()
    vectors = Samples().vectors[order.some_of(np.arange(3, 40), 15)]
    total = 0.0
    for number, x in enumerate(vectors.split(4)):
        accumulate.seed_all(0, "loss", number)
        total += model.loss_of({"x": x}).item() * len(x)
    return total / 15


def test_the_mean_loss_is_that_of_a_slow_loop_in_any_mode_and_has_no_graph():
    expected = slow_loss()
    for training in (True, False):
        torch.manual_seed(random.randrange(99))  # has no effect on the noise
        assert evaluate(training) == pytest.approx(expected, rel=1e-12)
    assert evaluate(seed=1) != pytest.approx(expected)
    assert evaluate(precision="bf16") != expected


def test_the_mean_loss_is_the_same_on_any_number_of_ranks(on_ranks):
    """Promise 9: results repeat."""
    first, second = on_ranks(2, evaluate)
    assert first == second == pytest.approx(evaluate(), rel=1e-12)


def means_of(found):
    return loop.means(found[dist.rank()])


def test_means_are_over_all_values_of_all_ranks_which_may_lack_some(on_ranks):
    found = [{"a": [1.0, 2.0], "b": [5.0]}, {"a": [6.0]}]
    assert on_ranks(2, means_of, found) == [{"a": 3.0, "b": 5.0}] * 2
    assert loop.means({}) == {}


def test_an_evaluation_has_the_settings_of_its_training_but_for_its_own_and_other_data():
    cfg = Settings(data="there", val_data="val", lr=0.5, batch_size=64, chunk_size=0)
    args = SimpleNamespace(data="", eval_samples=7, seed=3, run_dir="run")
    found = loop.evaluation_settings(cfg, args, 16)
    assert found == Settings(
        data="there", val_data="val", lr=0.5, batch_size=1, chunk_size=16, eval_samples=7, seed=3)
    args.data = "here"
    found = loop.evaluation_settings(dataclasses.replace(cfg, chunk_size=5), args, 16)
    assert (found.data, found.val_data, found.chunk_size) == ("here", "", 5)
    args.data = ""
    with pytest.raises(UserError, match="run: its training data are unknown; give --data"):
        loop.evaluation_settings(Settings(), args, 16)
