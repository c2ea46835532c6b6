"""Saving as a commit: whatever is cut off, killed, full or damaged, the folder holds a complete run that goes on."""
import hashlib
import io
import math
import os
import pickle
import random
import resource
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FORKS
from torch import nn

from common import amp, checkpoint, config, diffusion, dist, ema, optim
from common.config import UserError


def log_to(events):
    """What a Run needs of a Tracker; it tells the list `events` what was called."""
    return SimpleNamespace(sync=lambda: events.append("sync"), send=lambda: events.append("send"),
                           values=lambda state: {"step": state.step, "best": state.best_val_loss})


def state_of(folder, width=8, seed=0, other=False, **settings):
    """A State of a model with matrices, biases and buffers that steps change; `other`: and of a second model."""
    torch.manual_seed(seed)
    cfg = config.Training(**{"run_dir": str(folder), "lr": 0.01, "ema_decay": 0.5, "chunk_size": 8, **settings})
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Linear(width, 1))
    modules = {"model": model, "discriminators": nn.Linear(4, 1)} if other else {"model": model}
    optimizers = [o for m in modules.values() for o in optim.make(m, cfg.optimizer, cfg.lr, cfg.weight_decay)]
    return checkpoint.State(cfg, modules, ema.EMA(model, decay=cfg.ema_decay), optimizers,
                            amp.scaler(torch.device("cpu"), cfg.precision), {"width": width, "sizes": (1, 2)},
                            {"kind": "test", "widths": (4, width)})


def take_steps(state, count=1):
    """As the scripts do; the data follow from the step."""
    models = nn.ModuleList(state.modules.values())
    for _ in range(count):
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(state.step))
        state.scaler.scale(sum(model(data).square().mean() for model in models)).backward()
        assert amp.step(state.scaler, state.optimizers, 1.0)[1]
        models.zero_grad()
        state.step += 1
        state.average.update(state.step)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        a, b = ({"type": type(value), **dict(enumerate(value))} for value in (a, b))
    return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else a == b


def saved(state, path):
    checkpoint.save(state.contents(), path)
    return path


def opened(folder, resume="auto"):
    run = checkpoint.Run(folder)
    run.open(resume)
    return run


def commit(run, *steps, **settings):
    """Commit a State at each of `steps`; returns it."""
    state = state_of(run.folder, **settings)
    for state.step in steps:
        run.commit(state, log_to([]))
    run.wait()
    return state


def resume_point(run, **settings):
    """(step or None, results, notes): where the run goes on."""
    state = state_of(run.folder, **settings)
    path, finished, notes = run.resume_point(state.cfg, state.identity)
    return checkpoint.load(path)["step"] if path else None, finished, notes


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# Files

def test_every_flipped_bit_of_a_saved_state_is_noticed_and_without_one_it_is_the_same(tmp_path):
    path, generator = tmp_path / "deep" / "state.pt", random.Random(0)
    state = {"model": {"w": torch.randn(9), "half": torch.ones(3, dtype=torch.bfloat16)}, "plan": [1, (2, "a"), None]}
    for _ in range(2):  # also over an older one
        digest = checkpoint.save(state, path)
    good = path.read_bytes()
    assert digest == checkpoint.checksum(path) == hashlib.sha256(good).hexdigest() and len(contents(tmp_path)) == 1
    for _ in range(50):
        bad = bytearray(good)
        bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        assert checkpoint.checksum(path) != digest
    path.write_bytes(good)
    assert same(checkpoint.load(path), state)


class Secret:
    """What a pickle can do to who loads it."""

    def __reduce__(self):
        return Path("executed").touch, ()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_that_is_no_checkpoint_is_refused_by_name_and_nothing_in_it_is_executed(tmp_path):
    path, generator, files = tmp_path / "state.pt", random.Random(0), [pickle.dumps({"model": Secret()})]
    for value in ({"model": Secret()}, torch.zeros(3), ["model"], {"step": 1}, {"model": {"w": torch.zeros(9)}}):
        stream = io.BytesIO()
        torch.save(value, stream)
        files.append(stream.getvalue())
    whole = files.pop()
    files += [whole[:length] for length in range(0, len(whole), 67)]
    files += [start + generator.randbytes(generator.randrange(80)) for start in (b"", b"\x80\x02", b"PK\x03\x04") * 50]
    for content in files:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path}: not a checkpoint of this program[^\n]*$"):
            checkpoint.load(path)
    assert not Path("executed").exists()
    path.unlink()
    for missing in (path, tmp_path):
        with pytest.raises(UserError, match=f"{missing}: no such checkpoint"):
            checkpoint.load(missing)


def test_a_disk_that_takes_no_more_is_reported_as_one_and_leaves_the_old_file(tmp_path):
    path, limits = tmp_path / "state.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint.save({"model": {}}, path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"\[Errno 27\] File too large, writing: '{path}'"):
            checkpoint.save({"model": {"w": torch.zeros(100_000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(contents(tmp_path)) == ["state.pt"] and checkpoint.load(path) == {"model": {}}


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "state.pt.tmp").symlink_to(tmp_path / "other")
    checkpoint.save({"model": {}}, tmp_path / "state.pt")
    assert (tmp_path / "other").read_text() == "kept" and checkpoint.load(tmp_path / "state.pt") == {"model": {}}


@pytest.mark.parametrize("durably", [True, False])
def test_an_error_in_the_middle_of_writing_leaves_the_old_file_and_nothing_else(durably, tmp_path, monkeypatch):
    path, waits = tmp_path / "values.json", []
    checkpoint.write_json({"a": None}, path)
    monkeypatch.setattr(checkpoint.os, "fsync", waits.append)
    with pytest.raises(KeyboardInterrupt), checkpoint.replacing(path, durably) as file:
        file.write(b"half a li")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"values.json": b'{\n  "a": null\n}\n'} and not waits
    with checkpoint.replacing(path, durably) as file:
        file.write(b"whole")
    assert contents(tmp_path) == {"values.json": b"whole"} and len(waits) == 2 * durably  # the file and its folder


# What a run is made of

@pytest.mark.parametrize("settings", [{}, dict(optimizer="muon"), dict(precision="fp16"), dict(other=True)])
def test_a_restored_state_goes_on_bit_for_bit(settings, tmp_path):
    straight, restored = (state_of(tmp_path, seed=seed, **settings) for seed in (0, 1))
    take_steps(straight, 4)
    straight.best_val_loss = 0.25
    path = saved(straight, tmp_path / "checkpoints/4.pt")
    assert restored.restore(path) == [f"resuming {path} at step 4 of 1000", None] and restored.step == 4
    for _ in range(2):
        assert same(restored.contents(), straight.contents()) and restored.best_val_loss == 0.25
        take_steps(straight, 3)
        take_steps(restored, 3)


def test_a_changed_learning_rate_holds_and_what_has_changed_is_told(tmp_path):
    state, other = state_of(tmp_path / "a", precision="fp16"), state_of(tmp_path / "b", lr=0.5)
    path, state.best_val_loss, state.versions["code"] = tmp_path / "a/checkpoints/0.pt", 0.25, "abc"
    saved(state, path)
    assert other.restore(path)[1:] == [
        "gradient scale of the fp16 run dropped", f"{path} is of another code: abc, this is {other.versions['code']}",
        f"run_dir changed from {tmp_path}/a to {tmp_path}/b", "lr changed from 0.01 to 0.5",
        "precision changed from fp16 to fp32"]
    assert other.optimizers[0].param_groups[0]["lr"] == 0.5
    assert other.best_val_loss == math.inf  # the file of the best is in the other folder
    checkpoint.save({"model": {}, "val_loss": 0.5}, tmp_path / "b/best.pt")
    other.restore(path)
    assert other.best_val_loss == 0.5
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):  # the version of the code changes with an edit, and only then
        (tmp_path / "script.py").write_text(text)
        found.append(checkpoint.versions(tmp_path / "script.py"))
    assert found[0] == found[2] != found[1] and found[0]["torch"] == torch.__version__


def test_weights_that_do_not_fit_are_refused_by_name_and_not_strict_takes_what_fits(tmp_path):
    path, other = saved(state_of(tmp_path, width=12), tmp_path / "12.pt"), state_of(tmp_path, seed=1)
    before = checkpoint.copied(other.contents())
    with pytest.raises(UserError, match=rf"{path}: a run of another model.*width is 12 there and 8 here.*--config"):
        other.restore(path)
    with pytest.raises(UserError, match=rf"{path}: weights of another model: 7 entries .*: 0\.bias, 0\.weight, .*, …;"):
        other.start_from(path)
    with pytest.raises(UserError, match="2 entries differ: bias, weight;"):  # nothing fits
        checkpoint.load_weights(nn.Linear(1, 1), {"model": {}}, path, strict=False)
    with pytest.raises(UserError, match=r"LoRA adapters, not a model; give their base, BASE$"):
        checkpoint.load_weights(nn.Linear(1, 1), {"model": {}, "lora": {"base": "BASE"}}, path)
    assert same(other.contents(), before)
    other.start_from(path, strict=False)
    after = other.modules["model"].state_dict()
    assert [name for name in after if not torch.equal(after[name], before["model"][name])] == ["3.bias"]
    assert same(other.average.state_dict(), after)  # it starts where the weights do


def test_a_run_is_known_by_its_settings_its_data_its_clip_and_the_base_of_its_adapters(tmp_path):
    (tmp_path / "base.pt").write_bytes(b"base")
    source, encoder = (SimpleNamespace(fingerprint=lambda facts=facts: facts) for facts in ({"rows": 5}, "abc"))
    cfg = diffusion.Training(seed=3, lora_rank=2, init_from=str(tmp_path / "base.pt"))
    expected = {"seed": 3, "lr": 1e-3, "data rows": 5}
    assert checkpoint.identity(config.Training(seed=3), ("seed", "lr"), source) == expected
    expected |= {"clip": "abc", "lora_base": hashlib.sha256(b"base").hexdigest()}
    assert checkpoint.identity(cfg, ("seed", "lr"), source, encoder) == expected


def test_the_weights_for_use_are_the_average_with_what_it_takes_to_make_the_model(tmp_path):
    state, run = state_of(tmp_path, other=True), opened(tmp_path)
    take_steps(state, 3)
    run.finish(state, {"test_loss": 0.5})
    found = checkpoint.load(tmp_path / "model.pt")
    assert same(found["model"], state.average.state_dict()) and not same(found["model"], state.contents()["model"])
    about = {"config": config.as_json(state.cfg), "versions": checkpoint.versions(config.__file__), "step": 3,
             "kind": "test", "widths": (4, 8), "test_loss": 0.5, "cwd": os.getcwd()}
    assert {name: value for name, value in found.items() if name != "model"} == about
    assert same(checkpoint.averaged(found), found)
    with pytest.raises(UserError, match="weights without the state of a run; start from them with --init_from"):
        state.restore(tmp_path / "model.pt")


# Run folders

def test_a_run_is_found_again_as_it_was_left(tmp_path):
    run = opened(tmp_path)
    assert resume_point(run) == (None, None, []) and checkpoint.record_of(tmp_path / "none") == run.record
    state = commit(run, 10, 20)
    run.lock.close()
    again = opened(tmp_path)
    newest = again.record["checkpoints"][0]
    assert newest["values"] == {"step": 20, "best": math.inf} and again.record["world_size"] == 1
    assert same(checkpoint.load(tmp_path / newest["file"]), state.contents())
    again.finish(state, {"step": 20})
    assert resume_point(again, steps=20) == (20, {"step": 20}, []) and checkpoint.record_of(tmp_path)["finished"]
    assert resume_point(again, steps=21) == (20, None, [])  # there is more to train
    commit(again, 21)
    assert resume_point(again, steps=21) == (21, None, [])  # the test is still to come
    with pytest.raises(UserError, match=rf"{tmp_path}: a run of another.*width is 8 there and 9 here"):
        resume_point(again, width=9)


@pytest.mark.parametrize("keep, left", [(1, [50, 90]), (2, [40, 50, 90]), (0, [5, 10, 20, 30, 40, 50, 90])])
def test_the_newest_few_are_kept_of_those_recorded(keep, left, tmp_path):
    opened(tmp_path).lock.close()
    for name in ("05.pt", "50.pt.tmp", "90.pt"):  # of a save that was cut off; of a later one, which was damaged
        checkpoint.save({"model": {}}, tmp_path / f"checkpoints/step_000000{name}")
    run = opened(tmp_path)
    assert resume_point(run) == (None, None, [])
    commit(run, 10, 20, 30, 40, 50, keep=keep)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step_{step:08d}.pt" for step in left]
    assert [entry["step"] for entry in run.record["checkpoints"]] == [step for step in left[-2::-1] if step != 5]


def test_a_damaged_or_missing_newest_is_reported_and_the_one_before_it_used(tmp_path):
    run = opened(tmp_path)
    commit(run, 10, 20, 30)
    second, third = (tmp_path / "checkpoints" / f"step_000000{step}.pt" for step in (20, 30))
    third.write_bytes(third.read_bytes()[:-1] + b"\1")
    assert resume_point(run) == (20, None, [f"{third}: damaged, trying the one before it"])
    second.unlink()
    step, _, notes = resume_point(run)
    assert step == 10 and notes[1] == f"{second}: missing, trying the one before it"
    commit(run, 15)  # gone on from there: the damaged one is no longer the newest
    assert resume_point(run) == (15, None, []) and third.exists()
    assert [entry["step"] for entry in run.record["checkpoints"]] == [15, 10]


def test_a_checkpoint_to_load_is_used_if_the_run_has_none_but_not_if_it_is_for_resuming_alone(tmp_path):
    run, load = opened(tmp_path / "run"), str(saved(state_of(tmp_path), tmp_path / "other.pt"))
    assert resume_point(run, load=load) == (0, None, [])
    note = f"a new run, for which --load {load} is not used, with --load_only_auto_resume"
    assert resume_point(run, load=load, load_only_auto_resume=True) == (None, None, [note])
    commit(run, 10, 20)
    assert resume_point(run, load=load) == resume_point(run, load=load, load_only_auto_resume=True) == (20, None, [])
    for path in run.folder.glob("checkpoints/*"):
        path.write_bytes(b"gone")
    for rule in (False, True):
        step, _, notes = resume_point(run, load=load, load_only_auto_resume=rule)
        assert step == 0 and len(notes) == 2
    with pytest.raises(UserError, match=r"all 2 checkpoints are damaged or missing; .* --load, or .* --resume never"):
        resume_point(run)


def test_starting_anew_moves_the_old_run_aside_and_loses_nothing(tmp_path):
    folder, kept = tmp_path / "run", []
    for number in range(3):
        run = checkpoint.Run(folder)
        assert run.open("never") == [f"the earlier run is now in {folder}.{number}"] * bool(number)
        assert resume_point(run) == (None, None, []) and list(contents(folder)) == ["auto_resume.json"]
        commit(run, 1 + number)
        kept.append(contents(folder))
        run.lock.close()
    assert [contents(tmp_path / name) for name in ("run.1", "run.2", "run")] == kept


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", "{}", "\xff", '{"checkpoints": 3}', '{"checkpoints": [3]}',
                                  '{"checkpoints": [{"step": 1, "file": "x"}]}'])
def test_a_missing_or_damaged_record_is_told_with_ways_out(text, tmp_path):
    run, path = opened(tmp_path / "run"), tmp_path / "run/auto_resume.json"
    commit(run, 10, 20)
    run.lock.close()
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=f"{path}: damaged or missing; .*--load.*--resume never"):
        opened(tmp_path / "run")
    assert resume_point(opened(tmp_path / "run", "never")) == (None, None, [])  # a way out
    assert len(os.listdir(tmp_path / "run.1/checkpoints")) == 2


WINDOWS = """
import fcntl, os, signal, sys, types
import torch

def locking(file, mode, size, lock=fcntl.lockf, how=fcntl.LOCK_EX | fcntl.LOCK_NB):
    lock(file, how, size, os.lseek(file, 0, os.SEEK_CUR))

sys.modules["fcntl"] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
from common import checkpoint
run = checkpoint.Run(sys.argv[1])
try:
    run.open("auto")
except checkpoint.UserError as error:
    print(error)
else:
    print("held", flush=True)
    signal.pause()
"""


def test_a_run_folder_is_locked_where_there_is_no_fcntl_as_on_windows(script, tmp_path):
    first = script(WINDOWS, tmp_path / "run", wait=False)
    assert first.stdout.readline() == "held\n", first.stderr.read()
    message = f"{tmp_path}/run: in use by another live process (process {first.pid} on "
    assert script(WINDOWS, tmp_path / "run").stdout.startswith(message)
    first.kill()
    first.wait()
    last = script(WINDOWS, tmp_path / "run", wait=False)
    assert last.stdout.readline() == "held\n"
    last.kill()


def test_a_save_that_has_begun_is_of_the_state_as_it_was(tmp_path, monkeypatch):
    run, state, events, going, save = opened(tmp_path), state_of(tmp_path), [], threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: going.wait(60) and save(*args))
    take_steps(state, 2)
    before = checkpoint.copied(state.contents())
    run.commit(state, log_to(events))
    take_steps(state)  # as training goes on
    assert events == ["sync"] and not run.record["checkpoints"]  # lines are durable before the checkpoint
    going.set()
    run.wait()
    assert events == ["sync", "send"] and resume_point(run)[0] == 2
    assert same(checkpoint.load(tmp_path / "checkpoints/step_00000002.pt"), before)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_save_that_failed_is_tried_again_at_the_next_and_ends_the_run_if_that_fails(failures, tmp_path, monkeypatch):
    run, events, save = opened(tmp_path), [], torch.save
    state, log = commit(run, 10), log_to(events)
    left = [OSError(28, "No space left")] * failures

    def failing(*args):
        if left:
            raise left.pop()
        save(*args)
    monkeypatch.setattr(checkpoint.torch, "save", failing)
    take_steps(state)
    assert run.save_best(state, 0.5, log)
    run.commit(state, log)
    if failures == 2:
        with pytest.raises(OSError, match=r"No space left, writing.*best\.pt"):
            run.commit(state, log)
        return
    run.wait()
    assert checkpoint.load(tmp_path / "best.pt")["step"] == state.step
    assert resume_point(run, steps=11) == (state.step, None, []) and events.count("send") == 2


def test_the_best_is_kept_only_while_it_is_the_best(tmp_path):
    run, state, events = opened(tmp_path), state_of(tmp_path), []
    for loss, best in ((0.5, 1), (0.75, 1), (0.5, 1), (math.nan, 1), (0.25, 5)):
        take_steps(state)
        assert run.save_best(state, loss, log_to(events)) == (state.step == best)
        run.wait()
        found, values = checkpoint.load(tmp_path / "best.pt"), {"step": best, "best": 0.5 if best == 1 else 0.25}
        assert checkpoint.checksum(tmp_path / "best.pt") == checkpoint.record_of(tmp_path)["sha256"]["best.pt"][-1]
        assert (found["step"], found["val_loss"]) == (best, values["best"])
        assert checkpoint.record_of(tmp_path)["best"] == {"file": "best.pt", "step": best, "values": values}
    assert same(found["model"], state.average.state_dict()) and events == ["send", "send"]


# Processes

def hold(folder, pipe):
    run = opened(folder)
    if child := os.fork():  # as a worker, which lives on when its parent is killed
        pipe.send(child)
    pipe.recv()
    run.lock.close()


def test_a_folder_in_use_is_refused_naming_the_process_until_that_is_killed(tmp_path):
    pipe, other = FORKS.Pipe()
    process = FORKS.Process(target=hold, args=(tmp_path, other))
    process.start()
    child = pipe.recv()
    for resume in ("auto", "never"):  # a refused attempt takes nothing away from the holder
        with pytest.raises(UserError, match=rf"in use by another live process \(process {process.pid} on \S+\)"):
            opened(tmp_path, resume)
    process.kill()
    process.join()
    assert resume_point(opened(tmp_path)) == (None, None, [])
    os.kill(child, 9)


MOMENTS = {"mkdir", "open", "flush", "fsync", "replace", "__exit__", "close", "unlink"}  # calls that change a folder


def test_what_a_kill_at_any_moment_of_saving_leaves_is_a_complete_run_that_goes_on_bit_for_bit(tmp_path):
    """It leaves what the system has been given until then, which is what a copy of the folder at that moment holds."""
    run, state = opened(tmp_path / "run"), state_of("run", keep=1)  # the same config wherever the folder is
    left = [shutil.copytree(run.folder, tmp_path / "0")]

    def copy(frame, event, argument):
        if event == "c_call" and argument.__name__ in MOMENTS:
            left.append(shutil.copytree(run.folder, tmp_path / str(len(left))))

    threading.setprofile(copy)  # of the thread that writes
    for _ in range(3):
        take_steps(state)
        run.commit(state, log_to([]))
        run.wait()
    threading.setprofile(None)
    run.writer.shutdown()
    take_steps(state)
    reached = 0
    for folder in left:
        run, again = opened(folder), state_of("run", keep=1)
        path, _, notes = run.resume_point(again.cfg, again.identity)
        if path:
            again.restore(path)
        assert notes == [] and reached <= again.step
        reached = again.step
        take_steps(again, 4 - again.step)
        run.commit(again, log_to([]))
        run.wait()
        assert os.listdir(folder / "checkpoints") == ["step_00000004.pt"]  # nor is a scrap of a cut-off save left
        assert same(checkpoint.load(folder / "checkpoints/step_00000004.pt"), state.contents())
    assert reached == 3


def commit_on_ranks(folder):
    state = state_of(folder, other=True)
    if not dist.is_main():
        state.modules["model"][1].running_mean.add_(1)
        state.modules["discriminators"].bias.data.add_(1)
    with pytest.raises(RuntimeError, match="by step 0: model of rank 1, discriminators of rank 1 not as on rank 0"):
        checkpoint.Run(folder).commit(state, log_to([]))


def test_a_commit_is_refused_when_weights_or_buffers_of_the_ranks_have_drifted_apart(tmp_path, on_ranks):
    on_ranks(2, commit_on_ranks, tmp_path)
    assert not contents(tmp_path)
