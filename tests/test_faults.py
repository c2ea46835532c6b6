"""Faults done to real files and processes: nothing is lost or let in, and each ends in one line."""
import importlib
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile

import helpers
import numpy as np
import pytest
import torch
from conftest import ROOT, environment, free_port
from helpers import AUDIO, SMALL, Forked, differences, flags, metrics, two_copies, write_voices

from common import checkpoint, data, dist, images
from common.config import UserError

# It goes on until it is stopped, and evaluates at step 2.
ENDLESS = dict(SMALL, steps=100_000, log_every=2, save_every=0, eval_every=2, eval_samples=8)
TRANSFORMER = ("width", "depth", "heads", "clusters")
CODEC = {name: value for name, value in AUDIO.items() if name not in TRANSFORMER}
CODEC["stage"] = "soundstream"


def run(*words, expect=0):
    """Output of train_prior; if it fails, one line that is no traceback."""
    out = helpers.run("train_prior", *words, expect=expect)
    if expect:
        assert out.count("error:") == 1
        assert "Traceback" not in out
    return out


@pytest.fixture(scope="module")
def finished(emb, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "run"
    run(*flags(data=emb, run_dir=folder, **SMALL))
    return folder


def newest(folder):
    return checkpoint.record_of(folder)["checkpoints"][0]


# Ranks

def test_ranks_with_other_contents_of_the_same_size_do_not_train(emb, tmp_path):
    folders = two_copies(emb, tmp_path, "emb")
    path = tmp_path / "1/emb/img_emb/img_emb_1.npy"
    np.save(path, np.roll(np.load(path), 1, axis=0))
    words = flags(data="emb", run_dir=tmp_path / "run", **SMALL)
    out = Forked("train_prior", *words, ranks=2, folders=folders).finish(1)
    assert out.count("error: rank 1 has another data digest than rank 0") == 1
    assert "Traceback" not in out


def test_nodes_without_a_shared_run_folder_end_in_one_line_before_training(emb, tmp_path):
    run_dir = "runs/deep/prior"
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    words = flags(data=emb, run_dir=run_dir, **SMALL)
    out = Forked("train_prior", *words, ranks=2, folders=folders).finish(1)
    line, = out.splitlines()
    assert f"error: {run_dir}: this folder of rank 0 is not that of rank 1; all nodes" in line
    assert os.listdir(tmp_path / "0" / run_dir) == []  # nothing was begun
    # As links to one folder it is shared.
    (tmp_path / "shared").mkdir()
    for folder in folders:
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "shared")
    Forked("train_prior", *words, ranks=2, folders=folders).finish()
    assert not [*(tmp_path / "shared" / run_dir).glob(".shared*")]


@pytest.mark.parametrize("missing", ["emb", "emb/text_emb"])
def test_a_rank_that_misses_the_data_is_the_one_that_says_so(missing, emb, tmp_path):
    folders = two_copies(emb, tmp_path, "emb")
    shutil.rmtree(folders[1] / missing)
    words = flags(data="emb", run_dir=tmp_path / "run", **SMALL)
    out = Forked("train_prior", *words, ranks=2, folders=folders).finish(1)
    line, = out.splitlines()
    assert "error: emb/" in line and "no such folder" in line


# Rank 1 hangs, or loses its data, while its worker reads for its third chunk.
BROKEN = """
import os, shutil, sys, time
folder, fault = sys.argv[1:3]
os.chdir(folder)
os.environ.update(line.split("=") for line in sys.argv[3:9])
sys.argv = ["train_prior.py", *sys.argv[9:]]
import train_prior
from common import data
calls = []
fetch = data.Embeddings.fetch

def broken(self, indices, random_words=None):
    calls.append(indices)
    if random_words is not None and len(calls) > 2:
        if fault == "hang":
            time.sleep(1000)
        shutil.rmtree("emb")
    return fetch(self, indices, random_words)

if os.environ["RANK"] == "1":
    data.Embeddings.fetch = broken
train_prior.main()
"""


@pytest.mark.parametrize("fault, reason", [
    ("hang", "--workers 1: DataLoader timed out after 6.0 seconds"),
    ("lose", "img_emb_"),
])
def test_a_rank_whose_data_are_gone_or_never_come_ends_all_in_one_line_each(
        fault, reason, emb, tmp_path, script):
    settings = dict(SMALL, workers=1, timeout_minutes=0.1)
    words = flags(data="emb", run_dir=tmp_path / "run", **settings)
    port = free_port()
    processes = []
    for rank, folder in enumerate(two_copies(emb, tmp_path, "emb")):
        variables = map("=".join, environment(rank, 2, port).items())
        processes.append(script(BROKEN, folder, fault, *variables, *words, wait=False))
    errors = []
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1 and "Traceback" not in err, err
        errors.append(err.splitlines()[-1])
    assert "error: another rank has ended, or did not answer for --timeout_minutes" in errors[0]
    assert reason in errors[1]


def main():
    """Run a script whose rank 1, or only rank, gets a SIGTERM at the n-th call of a function.

    STOP=SCRIPT.FUNCTION:n, or STOP=SCRIPT.FUNCTION:n:SIGKILL for another signal
    """
    name, function, number, *kind = re.split("[.:]", os.environ["STOP"])
    kind = signal.Signals[kind[0]] if kind else signal.SIGTERM
    script = importlib.import_module(name)
    module = dist if function == "sum_gradients" else script
    original = getattr(module, function)
    calls = []

    def signaled(*arguments, **named):
        calls.append(function)
        if dist.rank() == min(1, dist.world_size() - 1) and len(calls) == int(number):
            os.kill(os.getpid(), kind)
        return original(*arguments, **named)

    setattr(module, function, signaled)
    script.main()


def stop(where, words, ranks=2, expect=128 + signal.SIGTERM):
    """Output of a run that is stopped there, as `main` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP", where)
        return Forked("test_faults", *words, ranks=ranks).finish(expect)


@pytest.fixture(scope="module")
def whole(emb, tmp_path_factory):
    """The folder of a run on three ranks: sums of three depend on their order."""
    folder = tmp_path_factory.mktemp("stops") / "whole"
    Forked("train_prior", *flags(data=emb, run_dir=folder, **SMALL), ranks=3).finish()
    return folder


@pytest.mark.parametrize("where, step", [
    ("sum_gradients:10", 10),  # between two log lines
    ("diffusion_loss:27", 12),  # in the loss of an evaluation
    ("sample_embeddings:5", 24),  # in the test
])
def test_wherever_a_signal_comes_the_resumed_run_is_bit_for_bit_the_one_without(
        where, step, emb, whole, tmp_path):
    words = flags(data=emb, run_dir=tmp_path, **SMALL)
    out = stop(f"train_prior.{where}", words, ranks=3)
    assert out.count("stopped by") == 1
    assert f"stopped by SIGTERM at step {step}, all saved" in out
    assert f"at step {step} of 24" in Forked("train_prior", *words, ranks=3).finish()
    assert not differences(whole, tmp_path)


def test_steps_are_saved_before_an_evaluation_that_is_killed_and_are_not_logged_twice(
        emb, tmp_path):
    words = flags(data=emb, **dict(SMALL, eval_every=8, keep=1))
    run(*words, "--run_dir", "whole")
    words += ["--run_dir", "killed"]
    for call, step in ((9, 8), (19, 16)):  # of ten an evaluation: the second start repeats one
        stop(f"train_prior.sample_embeddings:{call}:SIGKILL", words, 1, -signal.SIGKILL)
        assert newest("killed")["step"] == step
    assert "at step 16 of 24" in run(*words)
    assert not differences("whole", "killed")


def endless(emb, folder, workers):
    """The process of torchrun with two ranks that train, from step 2 on."""
    words = flags(data=emb, run_dir=folder, workers=workers, **ENDLESS)
    process = helpers.start("train_prior", *words, ranks=2)
    assert "step 2\n" in process.stdout
    return process


def test_torchrun_passes_a_signal_on_to_ranks_whose_workers_leave_it_to_them(emb, tmp_path):
    process = endless(emb, tmp_path, workers=1)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert "stopped by SIGTERM at step" in out, out + err
    assert "DataLoader worker" not in err
    assert newest(tmp_path)["step"] >= metrics(tmp_path)[-1]["step"]


def test_ranks_end_with_a_save_when_torchrun_is_killed(emb, tmp_path):
    process = endless(emb, tmp_path, workers=0)
    process.kill()
    process.communicate(timeout=60)  # until the ranks have closed their output, too
    behind = newest(tmp_path)["step"] - metrics(tmp_path)[-1]["step"]
    assert 0 <= behind <= ENDLESS["log_every"]  # a line due at the last step is the next start's


def test_a_signal_after_the_last_step_of_a_stage_is_not_for_the_next_to_miss(tmp_path):
    words = flags(data=write_voices(tmp_path / "voices"), run_dir=tmp_path / "run", **AUDIO)
    stop("train_audio.write_sounds:2", words)  # the codec's: in an evaluation, and in its test
    assert (tmp_path / "run/soundstream/model.pt").is_file()
    assert not (tmp_path / "run/semantic").exists()


def test_a_codec_stopped_around_its_codebooks_and_discriminators_goes_on_bit_for_bit(tmp_path):
    # Of three chunks the first rank takes two.
    settings = dict(CODEC, batch_size=6, timeout_minutes=0.3)
    words = flags(data=write_voices(tmp_path / "voices"), **settings)
    Forked("train_audio", *words, "--run_dir", "whole", ranks=2).finish()
    words += ["--run_dir", "stopped"]
    for steps, reached in ((1, 1), (2, 3)):
        out = stop(f"train_audio.sum_gradients:{steps}", words)
        assert f"stopped by SIGTERM at step {reached}, all saved" in out
    Forked("train_audio", *words, ranks=2).finish()
    assert not differences("whole/soundstream", "stopped/soundstream")


# Numbers

def test_a_run_that_blew_up_names_the_step_and_goes_on_from_before_at_a_lower_rate(emb, tmp_path):
    settings = dict(log_every=1, save_every=1, warmup_steps=0, eval_every=0)
    words = flags(data=emb, run_dir=tmp_path / "run", **{**SMALL, **settings})
    run(*words, "--steps", 2)
    out = run(*words, "--lr", 1e30, "--no_cosine", expect=1)
    assert "step 4; lower --lr" in out
    assert f"goes on from {tmp_path}/run/checkpoints/step_00000002.pt" in out
    assert newest(tmp_path / "run")["step"] == 2
    assert "at step 2 of 6" in run(*words, "--steps", 6)
    assert math.isfinite(metrics(tmp_path / "run")[-1]["test_loss"])

    last = tmp_path / "last"  # step: no later loss shows what it has done
    out = run(*words, "--run_dir", last, "--steps", 1, "--lr", 1e30, expect=1)
    assert "step 2; lower --lr" in out
    assert not [*last.glob("*.pt")]


# What is loaded

def changed(path, change, folder):
    """model.pt in `folder`: the state of the file `path` after a change."""
    state = checkpoint.load(path)
    change(state)
    checkpoint.save(state, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("change", [
    lambda state: state["optimizers"][0]["state"][0].update(exp_avg=torch.zeros(1, 1)),
    lambda state: state["ema"].popitem(),
    lambda state: state["model"].update(more="text"),
    lambda state: state.pop("scaler"),
])
def test_a_checkpoint_that_does_not_fit_is_refused(change, emb, finished, tmp_path):
    odd = changed(finished / newest(finished)["file"], change, tmp_path)
    out = run(*flags(data=emb, run_dir=tmp_path / "new", load=odd, **SMALL), expect=1)
    assert f"error: {odd}: " in out


@pytest.mark.parametrize("change", [
    lambda state: state.pop("config"),
    lambda state: state.pop("widths"),
    lambda state: state.update(widths=[10 ** 9, 0]),
    lambda state: state["config"].update(width=10 ** 6),
    lambda state: state["config"].update(depth=10 ** 9),
    lambda state: state["config"].update(width="many"),
    lambda state: state.update(lora=5),
    lambda state: state.update(lora={"base": 5}),
])
def test_a_model_file_with_wrong_settings_is_one_line_and_takes_no_memory(
        change, finished, tmp_path):
    path = changed(finished / "model.pt", change, tmp_path)
    assert f"{path}: " in run("sample", *flags(run_dir=tmp_path, device="cpu"), expect=1)


@pytest.mark.parametrize("name", ["identity", "logger", "sha256", "best", "finished"])
def test_a_record_with_null_goes_on(name, emb, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "auto_resume.json"
    checkpoint.write_json({**checkpoint.record_of(folder), name: None}, path)
    out = run(*flags(data=emb, run_dir=folder, **{**SMALL, "steps": 28}))
    assert "at step 24 of 28" in out


def test_a_damaged_model_of_a_run_is_noticed_and_written_again(emb, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "model.pt"
    train = flags(data=emb, run_dir=folder, **SMALL)
    sample = ("sample", *flags(run_dir=folder, device="cpu", steps=2))

    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for command in (sample, ("evaluate", *flags(run_dir=folder, data=emb, device="cpu"))):
        assert f"{path}: damaged: it is not as it was written" in run(*command, expect=1)
    assert "made anew" in run(*train)
    path.unlink()
    assert "made anew" in run(*train)
    assert "made anew" not in run(*train)
    (folder / "auto_resume.json").write_text("[]")
    run(*sample)  # which does not need it


def test_weights_that_are_not_finite_are_refused_by_evaluate_and_sample(finished, tmp_path):
    def spoil(state):
        next(iter(state["model"].values()))[0] = math.nan

    path = changed(finished / "model.pt", spoil, tmp_path)
    for command in ("evaluate", "sample"):
        out = run(command, *flags(run_dir=tmp_path, device="cpu"), expect=1)
        assert f"{path}: 1 weights are not finite" in out


def test_a_run_whose_data_grew_names_the_way_to_go_on_which_works(emb, tmp_path):
    shutil.copytree(emb, tmp_path / "emb")
    words = flags(data=tmp_path / "emb", **dict(SMALL, eval_every=0))
    run(*words, "--run_dir", tmp_path / "old")
    for name in ("img_emb", "text_emb", "captions"):
        for path in (tmp_path / "emb" / name).glob("*_0.*"):
            shutil.copy(path, path.with_stem(f"{name}_3"))
    out = run(*words, "--run_dir", tmp_path / "old", "--steps", 48, expect=1)
    assert "data rows is 1500 there and 2100 here" in out
    way = re.search(r"by (--init_from \S+)", out)[1].split()
    run(*words, "--run_dir", tmp_path / "new", *way)
    assert metrics(tmp_path / "new")[0]["loss"] < metrics(tmp_path / "old")[0]["loss"]


# Systems

WINDOWS = """
# As on Windows, as far as that can be had: what is not there is hidden, once torch is imported.
import importlib, os, signal, sys, types
import torch._dynamo, numpy, multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker
import torch.utils.data._utils.signal_handling as torch_signals
from pathlib import Path

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("pread", "sched_getaffinity", "register_at_fork", "fork", "O_DIRECTORY", "killpg"):
    delattr(os, name)
for name in ("SIGCHLD", "SIGHUP", "SIGUSR1", "SIGALRM", "SIGPIPE"):
    delattr(signal, name)
torch_signals._set_SIGCHLD_handler = lambda: None
open_file = os.open

def open_no_folder(path, *arguments, **named):
    if "dir_fd" not in named and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return open_file(path, *arguments, **named)

def locking(file, mode, size):
    assert (mode, size, os.lseek(file, 0, 1)) == (2, 1, 1 << 30)
    inode = os.fstat(file).st_ino
    if inode in locked:
        raise PermissionError(13, "Permission denied")
    locked.add(inode)

os.open = open_no_folder
locked = set()
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)

if __name__ == "__main__":
    torch.set_num_threads(1)
    multiprocessing.set_start_method("spawn")
    script = importlib.import_module(sys.argv[1])
    sys.argv = sys.argv[1:]
    script.main()
"""


def test_on_windows_one_process_trains_resumes_and_samples(emb, tmp_path):
    program = tmp_path / "windows.py"  # a file: workers start from it
    program.write_text(WINDOWS)

    def start(*words):
        process = subprocess.run(
            [sys.executable, program, "train_prior", *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        assert "Traceback" not in process.stderr
        return process.stdout

    words = flags(data=emb, run_dir="run", **dict(SMALL, steps=4, eval_every=0))
    start(*words)
    assert "at step 4 of 8" in start(*words, "--steps", 8, "--workers", 1)
    texts = emb / "text_emb/text_emb_0.npy"
    start("sample", *flags(run_dir="run", text_embeds=texts, num_samples=1, device="cpu"))
    assert np.load("embeddings.npy").shape == (600, 16)


# Data

def test_a_tar_with_a_negative_size_ends_in_one_line(tmp_path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    content = bytearray(path.read_bytes())
    content[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024 in base 256
    content[148:156] = b" " * 8
    content[148:156] = f"{sum(content[:512]):06o}\0 ".encode()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"0\.tar: corrupt or truncated tar.*\(.*a\.png of -1024"):
        images.CaptionedImages(path)


def test_more_shards_are_read_than_files_may_be_open(tmp_path):
    folder = tmp_path / "img_emb"
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((700, 2, 4)).astype(np.float32)
    for number, rows in enumerate(values):
        np.save(folder / f"img_emb_{number}.npy", rows)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        shards = data.Shards(folder, "img_emb")
        np.testing.assert_array_equal(shards[np.arange(1400)], values.reshape(-1, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_cut_off_before_or_while_it_is_read_is_one_line(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.ones((100, 64), np.float32))
    rows = data.NpyFile(path, 2)
    os.truncate(path, 9000)
    message = r"a\.npy: not a readable \.npy array"
    with pytest.raises(UserError, match=message):
        rows[np.arange(90, 100)]
    with pytest.raises(UserError, match=message):
        data.NpyFile(path, 2)
