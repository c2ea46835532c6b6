"""Faults in real files and processes: nothing saved is lost, and errors name their cause."""
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from conftest import ROOT, environment, free_port, start
from helpers import (
    BRIEF,
    SMALL,
    STAGES,
    UNET,
    Forked,
    differences,
    flags,
    metrics,
    saved,
    write_captioned,
    write_voices,
)

import train_prior
from common import checkpoint, dist
from common.config import UserError
from common.data import embeddings

KILLS = int(os.environ.get("KILLS", 2))


def run(*words, expect=0):
    """Run train_prior; returns its output. If it fails, it must print exactly one error."""
    out = helpers.run("train_prior", *words, expect=expect)
    assert out.count("error:") == expect
    return out


@pytest.fixture(scope="module")
def world(emb, tmp_path_factory):
    """Data for all scripts, and a codec and a tokenizer for the later audio stages."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "emb").symlink_to(emb)
    write_captioned(folder / "pictures", 160)
    rng = np.random.default_rng(0)
    for path in (folder / "pictures").glob("*.png"):
        np.save(path.with_suffix(".npy"), rng.standard_normal(16, np.float32))
    path.write_bytes(b"hello")
    write_voices(folder / "voices")
    for stage in ("soundstream", "semantic"):
        helpers.run("train_audio", data=folder / "voices", run_dir=folder, **STAGES[stage])
    return folder


# Kills

PRIOR = dict(
    SMALL,
    data="emb",
    steps=8 * KILLS,
    eval_every=4,
    text_encodings="true",
    max_text_len=4,
    dropout=0.1,
    precision="bf16",
    objective="v",
    optimizer="muon",
)
DECODER = dict(
    BRIEF,
    **UNET,
    data="pictures",
    batch_size=12,
    chunk_size=4,
    steps=3 * KILLS,
    eval_samples=6,
    eval_steps=2,
    optimizer="muon",
    crop_scale=0.5,
    flip="true",
)
CASES = {
    "prior": ("train_prior", "", PRIOR),
    "base": ("train_decoder", "base", dict(DECODER, image_size=8, attention_levels=1)),
    "upsample": (
        "train_decoder", "upsample", dict(DECODER, image_size=16, low_res_size=8, random_crop=8)),
    "soundstream": ("train_audio", "soundstream", {}),
    "semantic": ("train_audio", "semantic", {}),
    "coarse": ("train_audio", "coarse", {"soundstream": "soundstream"}),
    "fine": ("train_audio", "fine", {"soundstream": "soundstream"}),
}
USUAL = {"prior": 2, "base": 2}  # ranks, unless KILLS asks for more


def kill_often(script, words, ranks):
    """Start a script KILLS times, and kill it at random moments.

    Returns how often all ranks were still running.
    """
    rng = random.Random(f"{script} {ranks}")
    running = 0
    for _ in range(KILLS):
        process = Forked(script, *words, ranks=ranks)
        for _ in range(rng.randint(1, 5)):  # wait for a few lines of output
            process.out.readline()
        sum(i * i for i in range(rng.randint(0, 1_000_000)))  # then wait a little longer
        running += process.kill()
    return running


@pytest.mark.parametrize("case, ranks", [
    (case, ranks)
    for case in CASES
    for ranks in ((1, 2, 3) if KILLS > 2 else (USUAL.get(case, 1),))
])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(
        case, ranks, world, tmp_path, monkeypatch):
    """Promise 1: resuming is exact."""
    monkeypatch.chdir(world)
    script, stage, settings = CASES[case]
    if script == "train_audio":  # chunks of one sample, so that each rank has one
        settings = {**STAGES[stage], "data": "voices", "chunk_size": 1, **settings}
    if stage:
        settings["stage"] = stage
    folders = []
    for name in ("whole", "killed"):
        if case == "coarse":  # reads the semantic tokens of its own run
            shutil.copytree("semantic", tmp_path / name / "semantic")
        words = flags(**settings, run_dir=tmp_path / name)
        if name == "killed":
            assert kill_often(script, words, ranks) >= KILLS / 2
        Forked(script, *words, ranks=ranks).finish()
        folders.append(tmp_path / name / stage)
    assert not differences(*folders)


# Stops

def main():
    """Run train_prior, and send rank 1 a signal at the n-th call of a function.

    The environment has STOP=FUNCTION:n:SIGNAL.
    """
    function, number, kind = os.environ["STOP"].split(":")
    module = dist if function == "sum_gradients" else train_prior
    original = getattr(module, function)
    calls = []

    def signaled(*arguments, **named):
        calls.append(function)
        if dist.rank() == 1 and len(calls) == int(number):
            os.kill(os.getpid(), signal.Signals[kind])
        return original(*arguments, **named)

    setattr(module, function, signaled)
    train_prior.main()


@pytest.fixture(scope="module")
def whole(emb, tmp_path_factory):
    """The folder of a run on three ranks: the sum of three gradients depends on their order."""
    folder = tmp_path_factory.mktemp("stops") / "whole"
    Forked("train_prior", *flags(data=emb, run_dir=folder, **SMALL), ranks=3).finish()
    return folder


@pytest.mark.parametrize("where, number, step", [
    ("sum_gradients:20", signal.SIGUSR1, 10),  # between two log lines; two chunks per step
    ("diffusion_loss:27", signal.SIGINT, 12),  # in an evaluation's loss
    ("sample_embeddings:5", signal.SIGHUP, 24),  # in the test at the end
])
def test_a_signal_to_one_rank_stops_all_within_a_step_and_the_run_goes_on_bit_for_bit(
        where, number, step, emb, whole, tmp_path, monkeypatch):
    """Promises 1 and 2: resuming is exact; a run is saved after a signal."""
    words = flags(data=emb, run_dir=tmp_path, **SMALL)
    monkeypatch.setenv("STOP", f"{where}:{number.name}")
    out = Forked("test_faults", *words, ranks=3).finish(128 + number)
    assert out.count("stopped by") == 1
    assert f"stopped by {number.name} at step {step}, saved" in out
    assert f"at step {step} of 24" in Forked("train_prior", *words, ranks=3).finish()
    # If a run stops between two log lines, the next line covers only the steps after the stop.
    assert set(differences(whole, tmp_path)) <= {"metrics"}


@pytest.mark.parametrize("end, workers", [("terminate", 1), ("kill", 0)])
def test_ranks_save_when_torchrun_passes_a_signal_on_or_is_killed(end, workers, emb, tmp_path):
    """Promise 2: a run is saved after a signal."""
    settings = dict(steps=100_000, log_every=2, save_every=0, eval_every=2, eval_samples=8)
    words = flags(data=emb, run_dir=tmp_path, workers=workers, **SMALL | settings)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start("-m", *torchrun, ROOT / "train_prior.py", *words)
    assert "step 2\n" in process.stdout
    getattr(process, end)()
    out, err = process.communicate(timeout=60)  # until the ranks have closed the pipes, too
    assert "DataLoader worker" not in err
    assert "stopped by SIGTERM at step" in out, out + err
    assert 0 <= saved(tmp_path)[0]["step"] - metrics(tmp_path)[-1]["step"] <= 2


def test_a_signal_to_a_rank_and_its_workers_saves_and_ends_with_its_status(emb, tmp_path):
    """Promise 2: Ctrl-C in a terminal, or a scheduler, signals the whole process group."""
    settings = dict(steps=100_000, log_every=2, save_every=0, eval_every=2, eval_samples=8)
    words = flags(data=emb, run_dir=tmp_path, workers=2, **SMALL | settings)
    process = start(ROOT / "train_prior.py", *words)  # it leads a process group
    assert "step 2\n" in process.stdout
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)  # until the workers have closed the pipes, too
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err and "DataLoader" not in err
    assert "stopped by SIGTERM at step" in out
    assert 0 <= saved(tmp_path)[0]["step"] - metrics(tmp_path)[-1]["step"] <= 2


# Ranks

def two_copies(emb, place):
    """Folders 0 and 1 of `place`, one for each of two ranks, each with a copy of `emb`."""
    ranks = [place / "0", place / "1"]
    for folder in ranks:
        shutil.copytree(emb, folder / "emb")
    return ranks


def roll_rows(emb):
    path = emb / "img_emb/img_emb_1.npy"
    np.save(path, np.roll(np.load(path), 1, axis=0))


def test_a_rank_without_its_data_ends_all_by_one_message(emb, tmp_path):
    """Promise 6: all ranks end together."""
    folders = two_copies(emb, tmp_path)
    shutil.rmtree(folders[1] / "emb/text_emb")
    words = flags(data="emb", run_dir=tmp_path / "run", **SMALL)
    out = Forked("train_prior", *words, ranks=2, folders=folders).finish(1)
    assert "error: emb/text_emb" in out
    assert out.count("error:") == 1
    assert "Traceback" not in out


# Rank 1 fails while its worker reads the third chunk.
BROKEN = """
import os, shutil, signal, sys, time
folder, fault, *words = sys.argv[1:]
os.chdir(folder)
sys.argv = ["train_prior.py", *words]
import train_prior
from common.data import embeddings
calls = []
fetch = embeddings.Embeddings.fetch

def broken(self, indices, random_bits=None):
    calls.append(indices)
    if random_bits is not None and len(calls) > 2:
        if fault == "hang":
            time.sleep(1000)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.rmtree("emb")
    return fetch(self, indices, random_bits)

if os.environ["RANK"] == "1":
    embeddings.Embeddings.fetch = broken
train_prior.main()
"""


@pytest.mark.parametrize("fault, timeout_minutes, reason", [
    ("hang", 0.1, "RuntimeError: DataLoader timed out after 6.0 seconds"),
    ("kill", 30, "killed by signal: Killed|exited unexpectedly"),
    ("lose", 30, "train_prior.py: error: "),
])
def test_all_ranks_end_if_the_worker_of_one_dies_or_hangs_or_loses_its_data(
        fault, timeout_minutes, reason, emb, tmp_path):
    """Promise 6: all ranks end together."""
    settings = dict(SMALL, workers=1, timeout_minutes=timeout_minutes)
    words = flags(data="emb", run_dir=tmp_path / "run", **settings)
    port = free_port()
    processes = []
    for rank, folder in enumerate(two_copies(emb, tmp_path)):
        variables = environment(rank, 2, port)
        processes.append(start("-c", BROKEN, folder, fault, *words, **variables))
    errors = []
    for process in processes:
        _, err = process.communicate(timeout=60)  # until its workers have ended, too
        assert process.returncode, err
        errors.append(err)
    assert re.search(reason, errors[1]), errors
    assert ("Traceback" in errors[1]) == (fault != "lose")


# Full disks and non-finite numbers

def go_on(words, finished, folder, but=()):
    """Check that the same command resumes at step 8, and ends as a run without the fault does.

    but: the differences that are expected.
    """
    assert saved(folder)[0]["step"] == 8
    assert "at step 8 of 24" in run(*words)
    assert differences(finished, folder) == list(but)


def test_a_full_disk_ends_the_run_by_the_files_name_and_the_last_checkpoint_stands(
        emb, finished, tmp_path):
    """Promise 3: nothing saved is lost."""
    words = flags(data=emb, run_dir=tmp_path, **SMALL)
    run(*words, "--steps", 8, "--cosine_steps", 24)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit is half the size of a checkpoint and twice that of best.pt, so torch reaches it in
    # the middle of writing a checkpoint.
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, limits[1]))
    try:
        out = run(*words, expect=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"File too large, writing: '{tmp_path}/checkpoints/step_00000016.pt'" in out
    # The first command evaluated at its end, step 8, and its metrics are kept.
    go_on(words, finished, tmp_path, but=["metrics"])


def test_a_loss_that_is_not_finite_is_told_by_its_step_and_the_run_goes_on_from_before(
        emb, finished, tmp_path, monkeypatch):
    """Promise 4: non-finite values are not saved."""
    words = flags(data=emb, run_dir=tmp_path, **SMALL)
    diffusion_loss = train_prior.diffusion_loss
    calls = []

    def broken(*arguments, **named):
        calls.append(named)
        loss = diffusion_loss(*arguments, **named)
        return loss * torch.nan if len(calls) == 5 * 10 + 3 else loss  # in step 11

    with monkeypatch.context() as patch:
        patch.setattr(train_prior, "diffusion_loss", broken)
        assert "not finite at step 11; lower --lr" in run(*words, expect=1)
    assert metrics(tmp_path)[-1]["step"] == 8
    go_on(words, finished, tmp_path)


# Loading damaged or wrong files

def test_a_damaged_newest_checkpoint_is_told_and_the_run_goes_on_from_one_before(
        emb, finished, tmp_path):
    """Promise 3: nothing saved is lost."""
    folder = shutil.copytree(finished, tmp_path / "run")
    words = flags(data=emb, run_dir=folder, **SMALL)
    paths = [folder / entry["file"] for entry in saved(folder)[:2]]
    os.truncate(paths[0], 9000)
    paths[1].unlink()
    (folder / "model.pt").unlink()  # otherwise the run counts as finished
    out = run(*words)
    for path in paths:
        assert f"{path}: damaged or missing, trying the one before it" in out
    assert "at step 8 of 24" in out
    assert not differences(finished, folder)

    roll_rows(shutil.copytree(emb, tmp_path / "emb"))
    out = run(*words, "--data", tmp_path / "emb", expect=1)
    assert "from a run with another model or other data: data digest is" in out


@pytest.mark.parametrize("name, change, message", [
    ("", lambda state: state["model"].pop("query.weight"), "weights of another .*query"),
    ("", lambda state: state["model"].update(more=torch.ones(1)), "weights of another .*more"),
    ("", lambda state: state.pop("config"), "it has no config"),
    ("model.pt", lambda state: state.pop("config"), "it has no config"),
    ("model.pt", lambda state: state.pop("model"), "it has no model"),
])
def test_a_file_of_another_model_is_refused_in_one_line_with_the_names_that_differ(
        name, change, message, emb, finished, tmp_path):
    """Promises 5 and 8: files are loaded safely; a user error prints one line."""
    state = checkpoint.load(finished / (name or saved(finished)[0]["file"]))
    change(state)
    odd = tmp_path / "model.pt"
    checkpoint.save(state, odd)
    words = flags(data=emb, run_dir=tmp_path / "new", load=odd, **SMALL)
    if name:
        words = ["sample", *flags(run_dir=tmp_path, device="cpu")]
    assert re.search(f"error: {odd}: .*{message}", run(*words, expect=1))


def test_a_shard_cut_off_while_it_is_read_is_one_line(tmp_path):
    """Promise 8: reopening the file fails with a one-line error.

    Reading it through the earlier memory map would crash the process.
    """
    path = tmp_path / "a.npy"
    np.save(path, np.ones((100, 64), np.float32))
    embeddings.open_npy(path)
    os.truncate(path, 9000)
    with pytest.raises(UserError, match=r"a\.npy: not a readable \.npy array"):
        embeddings.open_npy(path)


# A fork's own mistakes

FORK = """
import sys

import train_prior
from common.data.embeddings import Embeddings


def broken(*arguments, **settings):
    return name_of_no_variable


place, _, name = sys.argv.pop(1).rpartition(".")
PLACES = {"prior": train_prior.Prior, "script": train_prior, "data": Embeddings}
setattr(PLACES[place], name, broken)
train_prior.main()
"""


def check_traceback(err):
    """The traceback must name the line, and blame neither a file nor the user."""
    assert "return name_of_no_variable" in err, err
    assert "NameError: name" in err, err
    assert "damaged" not in err and "fork.py: error:" not in err, err


@pytest.mark.parametrize("place, command", [
    ("prior.__init__", "train"),
    ("prior.__init__", "resume"),
    ("prior.__init__", "sample"),
    ("script.diffusion_loss", "train"),
    ("data.fetch", "train"),
    ("data.fetch", "workers"),
])
def test_a_programming_error_of_a_fork_shows_its_traceback(place, command, emb, finished, tmp_path):
    Path("fork.py").write_text(FORK)
    folder = tmp_path / "run"
    settings = dict(SMALL, steps=2, data=emb, run_dir=folder)
    if command == "resume":
        shutil.copytree(finished, folder)
        settings["steps"] = 30
    if command == "workers":
        settings["workers"] = 1
    words = flags(**settings)
    if command == "sample":
        words = ["sample", *flags(run_dir=finished, device="cpu")]
    process = start("fork.py", place, *words)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    check_traceback(err)


def test_a_programming_error_of_a_fork_shows_its_traceback_under_torchrun(emb, tmp_path):
    Path("fork.py").write_text(FORK)
    words = flags(**dict(SMALL, steps=2, data=emb, run_dir=tmp_path / "run"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start(*torchrun, "fork.py", "script.diffusion_loss", *words)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    check_traceback(err)
