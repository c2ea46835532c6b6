"""Model files: atomic writing, loading without running code, clear refusals."""
import errno
import fcntl
import hashlib
import io
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Settings, same
from torch import nn

from common import checkpoint, config
from common.config import UserError

CLASSES = {"test": Settings}


def layer(seed=0, width=3):
    torch.manual_seed(seed)
    return nn.Linear(4, width)


def contents_of(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_checkpoint(path, **entries):
    """Write a checkpoint whose averaged weights differ from its model's; returns its contents.

    Its settings name a logger and a saver that another program may not have.
    """
    settings = Settings(batch_size=7, logger="wandb", save=("local save_best_to=x",))
    contents = {
        "kind": "test",
        "model": layer(1).state_dict(),
        "ema": layer(2).state_dict(),
        "config": config.as_json(settings),
        "widths": (4, 3),
        "step": 5,
        "training": {"identity": {}},
    }
    contents |= entries
    checkpoint.save(contents, path)
    return contents


# Files

class Secret:
    """An object that runs code when unpickled."""

    def __reduce__(self):
        return Path("executed").touch, ()


def as_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content, reason", {
    pickle.dumps({"model": Secret()}): "",
    as_file({"model": Secret()}): "not a file of tensors and plain values",
    as_file({"model": 1}): "it has no model",
    as_file({"model": {}, "step": "three"}): "it has no step",
    as_file({"model": {}, "lora": 5}): "it has no lora",
    as_file({"weights": {}}): "it has no model",
    b"": "",
    as_file({"model": {}})[:-200]: "failed finding central",
}.items())
@pytest.mark.parametrize("mmap", [False, True])
def test_loading_runs_no_code_and_refuses_a_foreign_or_torn_file_in_one_line(
        content, reason, mmap, tmp_path):
    """Promise 5: files are loaded safely."""
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    # torch's error advises loading without weights_only; users must not see this advice.
    message = f"^{path}: no such checkpoint, or damaged, [^\n]*{reason if not mmap else ''}[^\n]*$"
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(path, mmap=mmap)
    assert "weights_only" not in str(caught.value)
    assert not Path("executed").exists()
    with pytest.raises(UserError, match=f"{tmp_path}: no such checkpoint"):
        checkpoint.load(tmp_path)


def test_a_file_without_a_wanted_entry_is_refused_by_the_entrys_name(tmp_path):
    path = tmp_path / "x.pt"
    checkpoint.save({"model": {}, "step": 3}, path)
    assert checkpoint.load(path, "step") == {"model": {}, "step": 3}
    with pytest.raises(UserError, match=f"{path}: .*it has no config, training"):
        checkpoint.load(path, "step", "config", "training")


def test_an_error_in_the_middle_of_writing_leaves_the_old_file_and_nothing_else(
        tmp_path, monkeypatch):
    """Promise 3: nothing saved is lost."""
    path = tmp_path / "new" / "values.json"
    checkpoint.write_json({"a": math.nan}, path)
    old = {"values.json": b'{\n  "a": null\n}\n'}
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with pytest.raises(KeyboardInterrupt), checkpoint.atomic_write(path) as file:
        file.write(b"half a li")
        raise KeyboardInterrupt
    assert contents_of(path.parent) == old
    assert not synced


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_write_ends(
        tmp_path, monkeypatch):
    """Promise 3: nothing saved is lost."""
    path = tmp_path / "x"
    temporary = tmp_path / "x.tmp"
    path.write_bytes(b"old")
    synced = []  # at each sync: (True if the folder is synced, contents of both files)

    def fsync(descriptor):
        is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        synced.append((is_folder, contents_of(tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    descriptors = len(os.listdir("/proc/self/fd"))
    with checkpoint.atomic_write(path) as file:
        file.write(b"new")
    assert synced == [
        (False, {"x": b"old", "x.tmp": b"new"}),
        (True, {"x": b"new"}),
    ]
    assert not temporary.exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("write", [
    lambda path: checkpoint.save({"model": {"w": torch.zeros(1 << 16)}}, path),  # torch.save fails
    lambda path: checkpoint.write_json(["x" * 4000] * 100, path),
])
def test_a_full_disk_is_told_with_the_files_name_and_the_old_file_stands(write, tmp_path):
    """Promise 3: nothing saved is lost."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    (tmp_path / "x.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert contents_of(tmp_path) == {"x": b"old"}


def test_an_error_that_is_not_of_the_disk_stays_what_it_is(tmp_path):
    for error in (RuntimeError("of the caller"), NameError("of a fork")):
        with pytest.raises(type(error), match=str(error)), checkpoint.atomic_write(tmp_path / "x"):
            raise error
    with pytest.raises(FileExistsError, match="/dev/null: exists, and is not a file"):
        checkpoint.save({}, "/dev/null")


@pytest.mark.parametrize("size", [0, 1, (1 << 22) + 1])
def test_the_checksum_is_the_sha256_of_all_bytes(size, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"x" * size)
    assert checkpoint.checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    contents = {"model": {"w": torch.arange(size), "b": torch.ones(3)}}
    sha256 = checkpoint.save(contents, path)  # computed while writing
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert same(checkpoint.load(path), contents)


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_refused_or_waited_for_while_another_process_has_it(tmp_path):
    path = tmp_path / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"locked\n"
    with open(path, "a") as file:
        with pytest.raises(BlockingIOError):
            checkpoint.lock(file)
        process.stdin.close()
        checkpoint.lock(file, wait=True)  # waits until the other process ends
    process.wait()


def test_a_file_system_without_locks_is_a_note_about_the_run_alone(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with open(tmp_path / "x", "a") as file:
        checkpoint.lock(file, wait=True)  # as for an index: no note, because it may be built twice
        assert capsys.readouterr().err == ""
        checkpoint.lock(file)
        assert "make sure that no other process trains here" in capsys.readouterr().err


# Weights

def test_weights_that_fit_are_taken_bit_for_bit(tmp_path):
    model = layer(1)
    checkpoint.load_weights(model, layer(2).state_dict(), "x.pt")
    assert same(model.state_dict(), layer(2).state_dict())


@pytest.mark.parametrize("change, name", [
    (lambda weights: weights.pop("3.weight"), r"\('3.weight', \(1, 12\)\)"),
    (lambda weights: weights.update(more=torch.zeros(2)), r"\('more', \(2,\)\)"),
    (lambda weights: weights.update({"0.bias": torch.zeros(3)}), r"\('0.bias', \(3,\)\)"),
])
def test_another_models_weights_are_refused_with_the_first_names_and_change_nothing(change, name):
    """Promise 5: files are loaded safely."""
    model = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.SiLU(), nn.Linear(12, 1))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = {name: torch.ones_like(weight) for name, weight in before.items()}
    change(weights)
    with pytest.raises(UserError, match=f"x.pt: weights of another model, .*{name}"):
        checkpoint.load_weights(model, weights, "x.pt")
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(value):
    weights = layer(1).state_dict()
    weights["bias"][1] = value
    weights["_extra"] = "a plain value"
    assert checkpoint.not_finite(weights) == ["bias"]


# Models

def test_a_model_is_read_by_its_kind_with_the_weights_wanted(tmp_path):
    path = tmp_path / "checkpoints/step_1.pt"
    written = write_checkpoint(path)
    for weights, entry in (("ema", "ema"), ("online", "model")):
        cfg, found = checkpoint.read_model(CLASSES, path, weights)
        # Using a model does not need the loggers and savers that it was trained with.
        assert cfg == Settings(batch_size=7)
        assert same(found["model"], written[entry])
        assert ("training" in found) == (weights == "online")
    with pytest.raises(UserError, match=f"{path}: expected a model of the kind decoder or prior"):
        checkpoint.read_model({"decoder": Settings, "prior": Settings}, path)

    averaged = tmp_path / "model.pt"
    checkpoint.save(checkpoint.model_contents(written), averaged)
    assert same(checkpoint.read_model(CLASSES, averaged)[1]["model"], written["ema"])
    with pytest.raises(UserError, match=f"{averaged}: .*--weights online needs one of RUN/check"):
        checkpoint.read_model(CLASSES, averaged, "online")


def test_the_contents_of_a_model_are_those_of_a_checkpoint_without_what_only_training_needs(
        tmp_path):
    written = write_checkpoint(tmp_path / "x.pt")
    found = checkpoint.model_contents(written)
    assert found.keys() == written.keys() - {"ema", "training"}
    assert found["model"] is written["ema"]
    assert {"ema", "training"} <= written.keys()  # the caller's dict is unchanged
    assert same(checkpoint.model_contents(found), found)


def test_a_mistake_in_a_forks_model_is_not_blamed_on_its_file(tmp_path):
    """Promises 8 and 10: only user errors print one line; a fork's bug has a traceback."""
    path = tmp_path / "x.pt"
    written = write_checkpoint(path)

    class Layer(nn.Linear):
        """A model whose load_state_dict contains a misspelled name."""

        def load_state_dict(self, weights):
            return wieghts  # noqa: F821

    with pytest.raises(NameError, match="wieghts"):
        checkpoint.load_weights(Layer(4, 3), written["ema"], path)


# Which file is used

def test_a_model_for_use_is_the_one_named_or_the_best_or_the_last(tmp_path, capsys):
    last = tmp_path / "model.pt"
    best = tmp_path / "best.pt"
    assert checkpoint.model_file(tmp_path) == last  # neither exists
    for step in (9, 10, 100):
        checkpoint.save({"model": {}}, tmp_path / f"checkpoints/step_{step:08d}.pt")
    newest = tmp_path / "checkpoints/step_00000100.pt"
    assert checkpoint.model_file(tmp_path, weights="online") == newest
    assert capsys.readouterr().err == ""
    checkpoint.save({"model": {}, "step": 1, "val_loss": 0.5}, best)
    assert checkpoint.model_file(tmp_path) == best
    assert "from step 1, which had the lowest validation loss, 0.5000" in capsys.readouterr().err
    assert checkpoint.model_file(tmp_path, "model.pt") == last
    assert checkpoint.model_file(tmp_path, weights="online") == newest
    assert checkpoint.model_file(tmp_path, "best.pt", "online") == best
    assert capsys.readouterr().err == ""
    checkpoint.save({"model": {}, "step": 1}, best)  # without a loss, like a copy of model.pt
    with pytest.raises(UserError, match=r"best\.pt: .*damaged, .*it has no val_loss"):
        checkpoint.model_file(tmp_path)


def test_without_a_checkpoint_the_online_weights_are_looked_for_in_model_pt(tmp_path):
    assert checkpoint.model_file(tmp_path, weights="online") == tmp_path / "model.pt"
