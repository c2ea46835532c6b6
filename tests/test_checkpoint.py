"""Saving as a commit: whatever is cut off, killed, full or damaged, a complete run stays."""
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FORKS
from helpers import Settings
from torch import nn

from common import amp, checkpoint, config, dist, ema, optim
from common.config import UserError


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a small model"""

    width: int = config.field(8, model=True)
    lr: float = 0.01
    lora_rank: int = 0


def log_to(events):
    """What a RunFolder needs of a Tracker; the list `events` gets what was called."""
    return SimpleNamespace(
        sync=lambda: events.append("sync"),
        send=lambda: events.append("send"),
        values=lambda state: {"step": state.step, "best": state.best_val_loss},
    )


def state_of(folder, width=8, seed=0, other=False, **settings):
    """A State of a model with matrices, biases and buffers. other: also of a second model."""
    torch.manual_seed(seed)
    cfg = Config(run_dir=str(folder), chunk_size=8, width=width, **settings)
    norm = nn.BatchNorm1d(width)
    modules = {"model": nn.Sequential(nn.Linear(4, width), norm, nn.SiLU(), nn.Linear(width, 1))}
    if other:
        modules["discriminators"] = nn.Linear(4, 1)
    optimizers = []
    for module in modules.values():
        optimizers += optim.make(module, cfg.optimizer, cfg.lr, 0.01)
    return checkpoint.State(
        cfg,
        modules,
        ema.EMA(modules["model"], decay=0.5),
        optimizers,
        amp.scaler(torch.device("cpu"), cfg.precision),
        {"width": width, "sizes": [1, 2]},
        {"kind": "test", "widths": (4, width)},
    )


def take_steps(state, count=1):
    """As the scripts do; the data follow from the step."""
    models = nn.ModuleList(state.modules.values())
    for _ in range(count):
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(state.step))
        loss = sum(model(data).square().mean() for model in models)
        state.scaler.scale(loss).backward()
        amp.step(state.scaler, [(state.optimizers, 1.0)])
        models.zero_grad()
        state.step += 1
        state.ema.update(state.step)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def saved(state, path):
    checkpoint.save(state.contents(), path)
    return path


def opened(folder, resume="auto"):
    run = checkpoint.RunFolder(folder)
    run.open(resume)
    return run


def save(run, state):
    run.save(state, log_to([]))
    run.wait()


def commit(run, *steps, **settings):
    """Commit a State at each of `steps`; returns it."""
    state = state_of(run.folder, **settings)
    for state.step in steps:
        save(run, state)
    return state


def resume_point(run, **settings):
    """(step or None, results, notes): where the run goes on."""
    state = state_of(run.folder, **settings)
    path, finished, notes = run.resume_point(state.cfg, state.identity)
    step = checkpoint.load(path)["step"] if path else None
    return step, finished, notes


NEW = (None, None, [])  # the resume point of a run that has saved nothing


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Files

def test_a_saved_state_is_read_as_it_was_and_known_by_its_sha256(tmp_path):
    path = tmp_path / "deep/state.pt"
    half = torch.ones(3, dtype=torch.bfloat16)
    state = {"model": {"w": torch.randn(9), "half": half}, "plan": [1, (2, "a"), None]}
    for _ in range(2):  # also over an older one
        digest = checkpoint.save(state, path)
    assert len(contents(tmp_path)) == 1
    assert same(checkpoint.load(path), state)
    good = path.read_bytes()
    assert digest == checkpoint.checksum(path) == hashlib.sha256(good).hexdigest()


class Secret:
    """What a pickle can do to who loads it."""

    def __reduce__(self):
        return Path("executed").touch, ()


def as_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


WHOLE = as_file({"model": {"w": torch.zeros(9)}})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content, reason", [
    (pickle.dumps({"model": Secret()}), ""),
    (as_file({"model": Secret()}), "Unsupported global: GLOBAL"),
    (as_file(["model"]), ""),
    (as_file({"step": 1}), ""),
    (b"", "EOFError"),
    (b"PK\x03\x04" + bytes(40), ""),
    (WHOLE[:-200], "PytorchStreamReader failed reading zip archive: failed finding central"),
])
def test_a_file_that_is_no_checkpoint_is_refused_with_torchs_reason_and_not_executed(
        content, reason, tmp_path):
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    message = f"^{path}: not a checkpoint of this program[^\n]*{reason}[^\n]*$"
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(path)
    assert "weights_only" not in str(caught.value)  # torch's advice
    assert not Path("executed").exists()
    with pytest.raises(UserError, match=f"{tmp_path}: no such checkpoint"):
        checkpoint.load(tmp_path)


def test_a_disk_that_takes_no_more_is_reported_as_one_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    checkpoint.save({"model": {}}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"\[Errno 27\] File too large, writing: '{path}'"):
            checkpoint.save({"model": {"w": torch.zeros(100_000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(contents(tmp_path)) == ["state.pt"]
    assert checkpoint.load(path) == {"model": {}}


def test_an_error_in_the_middle_of_writing_leaves_the_old_file_and_nothing_else(
        tmp_path, monkeypatch):
    path = tmp_path / "values.json"
    checkpoint.write_json({"a": None}, path)
    old = {"values.json": b'{\n  "a": null\n}\n'}
    synced = []
    monkeypatch.setattr(checkpoint.os, "fsync", synced.append)
    with pytest.raises(KeyboardInterrupt), checkpoint.atomic_write(path) as file:
        file.write(b"half a li")
        raise KeyboardInterrupt
    assert contents(tmp_path) == old
    assert not synced
    (tmp_path / "values.json.tmp").symlink_to(path)  # a link of this name is not followed
    with checkpoint.atomic_write(path) as file:
        file.write(b"whole")
        assert contents(tmp_path)["values.json"] == old["values.json"]
    assert contents(tmp_path) == {"values.json": b"whole"}
    assert len(synced) == 2  # the file and its folder


def refuse(monkeypatch, number, module, name, when=lambda file: True):
    """Let a function of the system raise the error `number`, as some file systems do."""
    work = getattr(module, name)

    def refusing(file, *arguments):
        if when(file):
            raise OSError(number, os.strerror(number))
        return work(file, *arguments)

    monkeypatch.setattr(module, name, refusing)


def is_folder(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_is_written_where_a_folder_cannot_be_synced(number, tmp_path, monkeypatch):
    refuse(monkeypatch, number, os, "fsync", is_folder)
    checkpoint.write_json([1], tmp_path / "a.json")
    assert contents(tmp_path) == {"a.json": b"[\n  1\n]\n"}


@pytest.mark.parametrize("when", [is_folder, lambda file: not is_folder(file)])
def test_any_other_error_of_syncing_names_the_file(when, tmp_path, monkeypatch):
    refuse(monkeypatch, errno.EIO, os, "fsync", when)
    path = tmp_path / "a.json"
    with pytest.raises(OSError, match=f"Input/output error, writing: '{path}'"):
        checkpoint.write_json([1], path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_note(number, tmp_path, monkeypatch, capsys):
    refuse(monkeypatch, number, fcntl, "lockf")
    assert resume_point(opened(tmp_path)) == NEW
    note = f"note: {tmp_path} has no locks; make sure that no other process trains in it\n"
    assert capsys.readouterr().err == note


def test_any_other_error_of_locking_names_the_file(tmp_path, monkeypatch):
    refuse(monkeypatch, errno.EIO, fcntl, "lockf")
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/.lock'"):
        opened(tmp_path)


def test_of_files_with_one_flipped_bit_each_is_refused_in_one_line_or_has_the_same_in_it(tmp_path):
    path = tmp_path / "state.pt"
    state = checkpoint.copy_to_host(state_of(tmp_path).contents())
    digest = checkpoint.save(state, path)
    good = path.read_bytes()
    rng = random.Random(0)
    places = [rng.randrange(8 * len(good)) for _ in range(100)]
    # Torch reads nothing of what this bit of the central directory says is a folder.
    places += [8 * (at.start() + 38) + 4 for at in re.finditer(b"PK\x01\x02", good)][:20]
    refused = 0
    for place in places:
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        assert checkpoint.checksum(path) != digest
        try:
            assert same(checkpoint.load(path), state)  # of padding, for one
        except UserError as error:
            assert re.fullmatch(f"{path}: (damaged|not a checkpoint of this program)[^\n]*",
                                str(error))
            refused += 1
    assert refused > 70


@pytest.mark.parametrize("change, reason", [
    (dict(step=-1), "step -1"),
    (dict(step=2**70), "step 1180591620717411303424"),
    (dict(step="1"), "TypeError"),
])
def test_steps_that_no_run_can_reach_are_refused(change, reason, tmp_path):
    path = tmp_path / "state.pt"
    checkpoint.save({"model": {}, **change}, path)
    with pytest.raises(UserError, match=f"{path}: damaged, .*{reason}"):
        checkpoint.load(path)


# Models

@pytest.mark.parametrize("spoil, message", [
    (lambda weight: weight.fill_(math.nan), "1 weights are not finite: weight;"),
    (lambda weight: weight + 0j, "weights of another model: 1 entries differ: weight;"),
])
def test_weights_that_are_not_finite_or_not_real_are_refused_by_name(spoil, message, tmp_path):
    path = tmp_path / "model.pt"
    model = nn.Linear(2, 2)
    state = {"model": {**model.state_dict(), "weight": spoil(torch.ones(2, 2))}, "config": {}}
    checkpoint.save(state, path)
    for load in (
        lambda: checkpoint.build(lambda: nn.Linear(2, 2), checkpoint.load(path), path),
        lambda: checkpoint.load_weights(model, checkpoint.load(path), path),
    ):
        with pytest.raises(UserError, match=f"{path}: {message}"):
            load()


def read(path, weights="ema", kind="test", scale=1.0):
    return checkpoint.read_model(kind, Config, path, weights, scale)


def test_a_model_is_read_by_its_kind_with_the_weights_wanted(tmp_path):
    state = state_of(tmp_path, width=4)
    take_steps(state)
    path = saved(state, tmp_path / "checkpoints/1.pt")
    for weights, module in (("ema", state.ema), ("online", state.modules["model"])):
        cfg, found = read(path, weights)
        assert cfg.width == 4
        assert same(found["model"], module.state_dict())
    averaged = tmp_path / "model.pt"
    checkpoint.save(read(path)[1], averaged)
    assert same(read(averaged)[1]["model"], state.ema.state_dict())
    with pytest.raises(UserError, match=f"{averaged}: .*--weights online needs one of RUN/check"):
        read(averaged, "online")
    with pytest.raises(UserError, match=f"{path}: not a decoder's model.pt"):
        read(path, kind="decoder")


@pytest.mark.parametrize("file", ["model.pt", "checkpoints/0.pt"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_model_is_read_with_its_adapters_merged_and_its_paths_after_its_run_was_moved(
        file, scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {"w.weight": torch.randn(3, 4)}
    checkpoint.save({"model": weights}, "old/base.pt")
    base_sha256 = checkpoint.checksum("old/base.pt")
    lora = {"base": str(tmp_path / "old/base.pt"), "base_sha256": base_sha256}
    adapters = {"w.A": torch.randn(2, 4), "w.B": torch.randn(3, 2)}
    state = state_of("old/run", data="old/data/", val_data="elsewhere/data")
    about = checkpoint.inference_contents(state.contents()) | {"clip": "old/clip/model.pt"}
    checkpoint.save({**about, "model": adapters, "lora": lora}, Path("old/run", file))
    for name in ("old/data", "old/clip/model.pt"):
        Path(name).mkdir(parents=True)
    Path("old").rename("new")

    cfg, found = read(Path("new/run", file), scale=scale)
    assert cfg.data == str(tmp_path / "new/data")
    assert cfg.val_data == str(tmp_path / "elsewhere/data")  # which is not there
    assert cfg.run_dir == str(tmp_path / "new/run")
    assert found["clip"] == str(tmp_path / "new/clip/model.pt")
    merged = weights["w.weight"] + scale * (adapters["w.B"] @ adapters["w.A"])
    assert same(found["model"], {"w.weight": merged})


def test_names_that_are_no_paths_are_left_as_they_are():
    for name in ("", "shapes", "open_clip:ViT-L-14/openai", "hf:kyutai/mimi"):
        assert checkpoint.resolve_path(name, "old", "new", "/") == name


# What a run is made of

@pytest.mark.parametrize(
    "settings", [{}, dict(optimizer="muon"), dict(precision="fp16"), dict(other=True)])
def test_a_restored_state_goes_on_bit_for_bit(settings, tmp_path):
    straight = state_of(tmp_path, **settings)
    take_steps(straight, 4)
    straight.best_val_loss = 0.25
    path = saved(straight, tmp_path / "checkpoints/4.pt")
    restored = state_of(tmp_path, seed=1, **settings)
    assert restored.restore(path) == [f"resuming {path} at step 4 of 1000", None]
    assert (restored.step, restored.best_val_loss) == (4, 0.25)
    for _ in range(2):
        assert same(restored.contents(), straight.contents())
        take_steps(straight, 3)
        take_steps(restored, 3)


def test_a_changed_learning_rate_holds_and_what_has_changed_is_noted(tmp_path):
    state = state_of(tmp_path / "a", precision="fp16")
    state.best_val_loss = 0.25
    state.versions["code"] = "abc"
    path = saved(state, tmp_path / "a/checkpoints/0.pt")
    other = state_of(tmp_path / "b", lr=0.5)
    assert {*other.restore(path)[1:]} == {
        "gradient scale of the fp16 run dropped",
        f"code changed from abc to {other.versions['code']}",
        f"run_dir changed from {tmp_path}/a to {tmp_path}/b",
        "lr changed from 0.01 to 0.5",
        "precision changed from fp16 to fp32",
    }
    assert other.optimizers[0].param_groups[0]["lr"] == 0.5
    assert other.best_val_loss == math.inf  # the file of the best is in the other folder
    checkpoint.save({"model": {}, "val_loss": 0.5}, tmp_path / "b/best.pt")
    other.restore(path)
    assert other.best_val_loss == 0.5


def test_the_version_of_the_code_changes_with_an_edit_and_only_then(tmp_path):
    script = tmp_path / "script.py"
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):
        script.write_text(text)
        found.append(checkpoint.versions(script)["code"])
    assert found[0] == found[2] != found[1]


def test_weights_that_do_not_fit_are_refused_by_name_and_not_strict_takes_what_fits(tmp_path):
    path = saved(state_of(tmp_path, width=12), tmp_path / "12.pt")
    state = state_of(tmp_path, seed=1)
    before = checkpoint.copy_to_host(state.contents())
    message = f"{path}: a run of another model.*width is 12 there and 8 here.*--config"
    with pytest.raises(UserError, match=message):
        state.restore(path)
    message = rf"{path}: weights of another model: 7 entries .*: 0\.bias, 0\.weight, .*;"
    with pytest.raises(UserError, match=message):
        state.start_from(path)
    with pytest.raises(UserError, match="2 entries differ: bias, weight;"):  # nothing fits
        checkpoint.load_weights(nn.Linear(1, 1), {"model": {}}, path, strict=False)
    assert same(state.contents(), before)
    state.start_from(path, strict=False)
    after = state.modules["model"].state_dict()
    changed = [name for name in after if not torch.equal(after[name], before["model"][name])]
    assert changed == ["3.bias"]
    assert same(state.ema.state_dict(), after)  # it starts where the weights do


def test_a_run_is_known_by_its_fixed_settings_its_data_its_clip_and_the_base_of_its_adapters(
        tmp_path):
    (tmp_path / "base.pt").write_bytes(b"base")
    dataset = SimpleNamespace(fingerprint=lambda: {"rows": 5})
    clip_model = SimpleNamespace(fingerprint=lambda: "abc")
    cfg = Config(seed=3, width=4, lora_rank=2, init_from=str(tmp_path / "base.pt"))
    identity = checkpoint.identity(cfg, dataset, clip_model)
    assert identity.pop("lora_base") == hashlib.sha256(b"base").hexdigest()
    settings = dict(validation=0.1, test=0.1, split_seed=0, chunk_size=0, seed=3, width=4)
    assert identity == {"data rows": 5, "clip": "abc", **settings}


def test_the_weights_for_use_are_the_average_with_what_it_takes_to_make_the_model(tmp_path):
    state = state_of(tmp_path, other=True)
    take_steps(state)
    opened(tmp_path).save_final(state, {"test_loss": 0.5})
    path = tmp_path / "model.pt"
    assert same(checkpoint.load(path), {
        "model": state.ema.state_dict(),
        "step": 1,
        "config": config.as_json(state.cfg),
        "versions": checkpoint.versions(__file__),
        "cwd": os.getcwd(),
        "kind": "test",
        "widths": (4, 8),
        "test_loss": 0.5,
    })
    with pytest.raises(UserError, match=r"without the state of a run; .*--init_from"):
        state.restore(path)


# Run folders

def test_a_run_is_found_again_as_it_was_left(tmp_path):
    run = opened(tmp_path)
    assert resume_point(run) == NEW
    assert checkpoint.record_of(tmp_path / "none") == run.record
    state = commit(run, 10, 20)
    run.lock_file.close()
    run = opened(tmp_path)
    newest = run.record["checkpoints"][0]
    assert newest["values"] == {"step": 20, "best": None}  # JSON has no infinity
    assert same(checkpoint.load(tmp_path / newest["file"]), state.contents())
    run.save_final(state, {"step": 20})
    assert resume_point(run, steps=20) == (20, {"step": 20}, [])
    assert resume_point(run, steps=21) == (20, None, [])  # there is more to train
    commit(run, 21)
    assert resume_point(run, steps=21) == (21, None, [])  # the test is still to come
    with pytest.raises(UserError, match=f"{tmp_path}: a run of another.*width is 8 there") as other:
        resume_point(run, width=9)
    assert "--init_from" not in str(other.value)  # a model of another width cannot start from it


@pytest.mark.parametrize("keep, left", [(1, [30]), (2, [20, 30]), (0, [5, 10, 20, 30])])
def test_the_newest_few_are_kept_of_those_recorded(keep, left, tmp_path):
    opened(tmp_path).lock_file.close()
    # Of a save that was not recorded, of one that was cut off, and of a later one, discarded.
    for name in ("05.pt", "50.pt.tmp", "90.pt"):
        checkpoint.save({"model": {}}, tmp_path / f"checkpoints/step_000000{name}")
    run = opened(tmp_path)
    assert resume_point(run) == NEW
    commit(run, 10, 20, 30, keep=keep)
    files = sorted(os.listdir(tmp_path / "checkpoints"))
    assert files == [f"step_{step:08d}.pt" for step in [*left, 90]]
    steps = [entry["step"] for entry in run.record["checkpoints"]]
    assert steps == [30, 20, 10][:keep or None]


def test_a_damaged_or_missing_newest_is_reported_and_the_one_before_it_used(tmp_path):
    run = opened(tmp_path)
    commit(run, 10, 20, 30)
    second = tmp_path / "checkpoints/step_00000020.pt"
    third = tmp_path / "checkpoints/step_00000030.pt"
    third.write_bytes(third.read_bytes()[:-1] + b"\1")
    damaged = f"{third}: damaged or missing, trying the one before it"
    assert resume_point(run) == (20, None, [damaged])
    second.unlink()
    missing = f"{second}: damaged or missing, trying the one before it"
    assert resume_point(run) == (10, None, [damaged, missing])
    commit(run, 15)  # continued from there: the damaged one is no longer the newest
    assert resume_point(run) == (15, None, [])
    assert third.exists()


def test_a_checkpoint_to_load_is_used_if_the_run_has_none_but_not_if_it_is_for_resuming_alone(
        tmp_path):
    run = opened(tmp_path / "run")
    load = str(saved(state_of(tmp_path), tmp_path / "other.pt"))
    always = dict(load=load)
    only = dict(load=load, load_only_auto_resume=True)
    assert resume_point(run, **always) == (0, None, [])
    note = f"a new run, so --load {load} is not used, with --load_only_auto_resume"
    assert resume_point(run, **only) == (None, None, [note])
    commit(run, 10)
    assert resume_point(run, **always) == resume_point(run, **only) == (10, None, [])
    (run.folder / "checkpoints/step_00000010.pt").unlink()
    assert resume_point(run, **always)[0] == resume_point(run, **only)[0] == 0
    with pytest.raises(UserError, match=r"all 1 checkpoints are .* --load, or .* --resume never"):
        resume_point(run)


def test_starting_anew_moves_the_old_run_aside_and_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    kept = []
    for number in range(3):
        run = opened(folder, "never")
        assert resume_point(run) == NEW
        commit(run, 1 + number)
        kept.append(contents(folder))
        run.lock_file.close()
    assert [contents(tmp_path / name) for name in ("run.1", "run.2", "run")] == kept
    note = f"the earlier run is now in {folder}.3"
    assert checkpoint.RunFolder(folder).open("never") == [note]


def test_a_run_in_the_current_folder_cannot_be_moved_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", tmp_path, ".."):
        run = opened(folder, "never")
        commit(run, 1)
        run.lock_file.close()
        with pytest.raises(UserError, match="never cannot move aside the folder it is started in"):
            opened(folder, "never")
        assert resume_point(opened(folder))[0] == 1
        shutil.rmtree(Path(folder, "checkpoints"))
        Path(folder, "auto_resume.json").unlink()


@pytest.mark.parametrize("text", [
    None,
    "[]",
    "{}",
    "\xff",
    '{"checkpoints": [{"step": 1, "file": "x"}]}',
    '{"checkpoints": [{"file": 1, "step": 2, "sha256": "a", "values": {}}]}',
    '{"checkpoints": [], "finished": {}}',
    "[" * 100_000,
    '{"checkpoints": [], "logger": []}',
])
def test_a_missing_or_damaged_record_is_named_with_ways_out(text, tmp_path):
    run = opened(tmp_path / "run")
    commit(run, 10, 20)
    run.lock_file.close()
    path = tmp_path / "run/auto_resume.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=f"{path}: damaged or missing; .*--load.*--resume never"):
        opened(tmp_path / "run")
    assert resume_point(opened(tmp_path / "run", "never")) == NEW  # a way out
    assert len(os.listdir(tmp_path / "run.1/checkpoints")) == 2


def test_a_save_that_has_begun_is_of_the_state_as_it_was(tmp_path, monkeypatch):
    run = opened(tmp_path)
    state = state_of(tmp_path)
    events = []
    gate = threading.Event()
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: gate.wait(60) and save(*args))
    take_steps(state, 2)
    before = checkpoint.copy_to_host(state.contents())
    run.save(state, log_to(events))
    take_steps(state)  # as training continues
    assert events == ["sync"]  # lines are durable before the checkpoint
    assert not run.record["checkpoints"]
    gate.set()
    run.wait()
    assert events == ["sync", "send"]
    assert same(checkpoint.load(tmp_path / "checkpoints/step_00000002.pt"), before)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_save_that_failed_is_tried_again_at_the_next_and_ends_the_run_if_that_fails(
        failures, tmp_path, monkeypatch):
    run = opened(tmp_path)
    log = log_to([])
    state = commit(run, 10)
    errors = [OSError(28, "No space left")] * failures
    save = torch.save

    def failing(*args):
        if errors:
            raise errors.pop()
        save(*args)

    monkeypatch.setattr(checkpoint.torch, "save", failing)
    take_steps(state)
    assert run.save_best(state, 0.5, log)
    run.save(state, log)
    if failures == 2:
        with pytest.raises(OSError, match=r"No space left, writing.*best\.pt"):
            run.save(state, log)
    else:
        run.wait()
        assert checkpoint.load(tmp_path / "best.pt")["step"] == 11
        assert resume_point(run)[0] == 11


def test_the_best_is_kept_only_while_it_is_the_best(tmp_path):
    run = opened(tmp_path)
    state = state_of(tmp_path)
    path = tmp_path / "best.pt"
    events = []
    for loss, best in ((0.5, 1), (0.75, 1), (0.5, 1), (math.nan, 1), (0.25, 5)):
        take_steps(state)
        assert run.save_best(state, loss, log_to(events)) == (state.step == best)
        run.wait()
        assert checkpoint.load(path)["step"] == best
    assert events == ["send", "send"]
    found = checkpoint.load(path)
    assert found["val_loss"] == 0.25
    assert same(found["model"], state.ema.state_dict())
    record = checkpoint.record_of(tmp_path)
    assert record["best"]["values"] == {"step": 5, "best": 0.25}


# Processes

def hold(folder, pipe):
    run = opened(folder)
    if child := os.fork():  # as a worker, which lives on when its parent is killed
        pipe.send(child)
    pipe.recv()
    run.lock_file.close()


def test_a_folder_in_use_is_refused_naming_the_process_until_that_is_killed(tmp_path):
    pipe, other = FORKS.Pipe()
    process = FORKS.Process(target=hold, args=(tmp_path, other))
    process.start()
    child = pipe.recv()
    message = rf"in use by another live process \(process {process.pid} on \S+\)"
    for resume in ("auto", "never"):  # a refused attempt takes nothing away from the holder
        with pytest.raises(UserError, match=message):
            opened(tmp_path, resume)
    process.kill()
    process.join()
    assert resume_point(opened(tmp_path)) == NEW
    os.kill(child, 9)


# Calls that change a folder.
MOMENTS = {"mkdir", "open", "flush", "fsync", "replace", "__exit__", "close", "unlink"}


@contextlib.contextmanager
def copies(run, place):
    """Yield a list that gets a copy of the run's folder at each moment of saving.

    A copy has what a kill would leave: what the system was given.
    """
    left = []

    def copy(frame, event, argument):
        if event == "c_call" and argument.__name__ in MOMENTS:
            left.append(shutil.copytree(run.folder, place / str(len(os.listdir(place)))))

    threading.setprofile(copy)  # of the thread that writes
    yield left
    threading.setprofile(None)
    run.thread.shutdown()


def test_what_a_kill_at_any_moment_of_saving_leaves_is_a_complete_run_that_goes_on_bit_for_bit(
        tmp_path):
    run = opened(tmp_path / "run")
    state = state_of("run", keep=1)  # the same config wherever the folder is
    with copies(run, tmp_path) as left:
        for _ in range(3):
            take_steps(state)
            save(run, state)
    take_steps(state)

    reached = 0
    for folder in left:
        run = opened(folder)
        again = state_of("run", keep=1)
        path, _, notes = run.resume_point(again.cfg, again.identity)
        if path:
            again.restore(path)
        assert notes == []
        assert reached <= again.step
        reached = again.step
        take_steps(again, 4 - reached)
        save(run, again)
        file, = (folder / "checkpoints").iterdir()  # no scrap of a save that was cut off is left
        assert same(checkpoint.load(file), state.contents())
    assert reached == 3


def test_a_kill_while_a_step_is_saved_again_leaves_the_one_or_the_other(tmp_path):
    run = opened(tmp_path / "run")
    with copies(run, tmp_path) as left:
        state = commit(run, 1, keep=1)
        left.clear()
        state.best_val_loss = 0.5
        save(run, state)
    losses = set()
    for folder in left:
        path, _, notes = opened(folder).resume_point(state.cfg, state.identity)
        assert notes == []
        losses.add(checkpoint.load(path)["best_val_loss"])
    assert losses == {math.inf, 0.5}


def save_drifted(folder):
    state = state_of(folder, other=True)
    if not dist.is_main():
        state.modules["model"][1].running_mean.add_(1)
        state.modules["discriminators"].bias.data.add_(1)
    message = "by step 0: model of rank 1, discriminators of rank 1 not as on rank 0"
    with pytest.raises(RuntimeError, match=message):
        checkpoint.RunFolder(folder).save(state, log_to([]))


def test_a_save_is_refused_when_weights_or_buffers_of_the_ranks_have_drifted_apart(
        tmp_path, on_ranks):
    on_ranks(2, save_drifted, tmp_path)
    assert not contents(tmp_path)


def start_with_other_code(folder):
    checkpoint.versions = lambda script: {"code": dist.rank()}
    with pytest.raises(UserError, match="rank 1 has another code than rank 0"):
        state_of(folder)
    return True


def test_ranks_with_other_code_do_not_train(tmp_path, on_ranks):
    assert on_ranks(2, start_with_other_code, tmp_path) == [True, True]
