"""Faults done to real files and processes: nothing is lost or let in, and each ends in one line or harmlessly."""
import importlib
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import socketserver
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import AUDIO, SMALL, Forked, differences, flags, metrics, wait_for, write_voices

from common import checkpoint, clip, config, data, dist, images, media, recordings, report, store
from common.config import UserError

LONG = {**SMALL, "steps": 100_000, "log_every": 2, "save_every": 0, "eval_every": 2, "eval_samples": 8}


CODEC = {name: value for name, value in AUDIO.items() if name not in ("width", "depth", "heads", "clusters")}


def run(*words, expect=0, script="train_prior"):
    """Output of the script; if it fails, one line that is no traceback."""
    out = helpers.run(script, *words, expect=expect)
    assert not expect or (out.count("error:") == 1 and "Traceback" not in out), out
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
    for rank in (0, 1):
        shutil.copytree(emb, tmp_path / f"{rank}/emb")
    values = np.load(path := tmp_path / "1/emb/img_emb/img_emb_1.npy")
    np.save(path, np.roll(values, 1, axis=0))
    folders = [tmp_path / "0", tmp_path / "1"]
    out = Forked("train_prior", *flags(data="emb", run_dir="run", **SMALL), ranks=2, folders=folders).finish(1)
    assert out.count("error: rank 1 has another data digest than rank 0") == 1 and "Traceback" not in out


def test_ranks_with_other_code_do_not_train(emb, tmp_path):
    processes = []
    for rank in (0, 1):
        shutil.copytree(ROOT / "common", tmp_path / f"{rank}/common")
        shutil.copy(ROOT / "train_prior.py", tmp_path / str(rank))
    with open(tmp_path / "1/common/nn.py", "a") as file:
        file.write("# another version\n")
    with socketserver.TCPServer(("127.0.0.1", 0), None) as server:
        port = server.server_address[1]
    for rank in (0, 1):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        processes.append(subprocess.Popen([sys.executable, "train_prior.py", *flags(data=emb, run_dir="run", **SMALL)],
                                          cwd=tmp_path / str(rank), env=env, stderr=subprocess.PIPE, text=True))
    errors = "".join(process.communicate()[1] for process in processes)
    assert errors.count("error: rank 1 has another code than rank 0") == 1 and "Traceback" not in errors, errors
    assert [process.returncode for process in processes] == [1, 1]


def main():
    """A script of which rank 1 gets a SIGTERM when it calls a function for the n-th time: STOP=SCRIPT.FUNCTION:n."""
    name, function, number = re.split("[.:]", os.environ["STOP"])
    script = importlib.import_module(name)
    module = dist if function == "sum_gradients" else script
    original, calls = getattr(module, function), []

    def signaled(*given, **named):
        calls.append(function)
        if dist.rank() == 1 and len(calls) == int(number):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given, **named)
    setattr(module, function, signaled)
    script.main()


def test_a_stop_is_heard_at_the_next_step_however_seldom_lines_are_logged(emb, tmp_path, monkeypatch):
    monkeypatch.setenv("STOP", "train_prior.sum_gradients:21")
    words = flags(data=emb, run_dir=tmp_path, **{**LONG, "log_every": 100_000, "eval_every": 0})
    out = Forked("test_faults", *words, ranks=2).finish(128 + 15)
    assert "stopped by SIGTERM at step 21, all saved" in out and out.count("stopped by") == 1
    assert newest(tmp_path)["step"] == 21 and not metrics(tmp_path)


@pytest.fixture(scope="module")
def finished_by_two(emb, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops") / "whole"
    Forked("train_prior", *flags(data=emb, run_dir=folder, **SMALL), ranks=2).finish()
    return folder


@pytest.mark.parametrize("where, step", [
    ("sum_gradients:3", 3), ("diffusion_loss:7", 4), ("sum_gradients:12", 12),  # the last where an evaluation is due
    ("diffusion_loss:27", 12), ("sample_embeddings:3", 12),  # in the evaluation: of the loss, of the figures
    ("sample_embeddings:8", 24)])  # in the test
def test_wherever_a_signal_comes_the_resumed_run_is_bit_for_bit_the_one_without(
        where, step, emb, finished_by_two, tmp_path, monkeypatch):
    monkeypatch.setenv("STOP", f"train_prior.{where}")
    words = flags(data=emb, run_dir=tmp_path, **SMALL)
    assert f"stopped by SIGTERM at step {step}," in Forked("test_faults", *words, ranks=2).finish(128 + 15)
    assert f"at step {step} of 24" in Forked("train_prior", *words, ranks=2).finish()
    assert not differences(finished_by_two, tmp_path)


def test_a_stop_is_heard_by_ranks_whose_workers_torchrun_signals_too(emb, tmp_path):
    words = flags(data=emb, run_dir=tmp_path / "run", workers=1, **{**LONG, "eval_every": 0})
    process = helpers.start("train_prior", *words, ranks=2)
    until = time.monotonic() + 60
    while not (tmp_path / "run/metrics.jsonl").is_file() or not metrics(tmp_path / "run"):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate()
    assert "stopped by SIGTERM at step" in out and "DataLoader worker" not in err, out + err
    assert newest(tmp_path / "run")["step"] >= metrics(tmp_path / "run")[-1]["step"]


def test_a_signal_after_the_last_step_of_a_stage_is_not_for_the_next_to_miss(tmp_path, monkeypatch):
    words = flags(data=write_voices(tmp_path / "voices"), run_dir=tmp_path / "run", **AUDIO)
    monkeypatch.setenv("STOP", "train_audio.write_sounds:2")  # of the codec: in its evaluation, and in its test
    Forked("test_faults", *words, ranks=2).finish(128 + 15)
    assert (tmp_path / "run/soundstream/model.pt").is_file() and not (tmp_path / "run/semantic").exists()


def test_a_codec_stopped_around_its_codebooks_and_discriminators_goes_on_bit_for_bit(tmp_path, monkeypatch):
    words = flags(data=write_voices(tmp_path / "voices"), stage="soundstream", **CODEC)
    Forked("train_audio", *words, "--run_dir", tmp_path / "whole", ranks=2).finish()
    for step in (1, 3, 5):
        monkeypatch.setenv("STOP", f"train_audio.sum_gradients:{step}")
        again = [*words, "--run_dir", tmp_path / str(step)]
        out = Forked("test_faults", *again, ranks=2).finish(128 + 15)
        assert f"stopped by SIGTERM at step {step}, all saved" in out
        Forked("train_audio", *again, ranks=2).finish()
        assert not differences(tmp_path / "whole/soundstream", tmp_path / f"{step}/soundstream")


def test_ranks_end_with_a_save_when_torchrun_is_killed(emb, tmp_path):
    process = helpers.start("train_prior", *flags(data=emb, run_dir=tmp_path / "orphaned", **LONG), ranks=2)
    wait_for("step 2: loss", process)
    process.kill()
    until = time.monotonic() + 30
    while [p for p in Path("/proc").glob("[0-9]*/cmdline") if _mentions(p, f"{tmp_path}/orphaned")]:
        assert time.monotonic() < until, "the ranks train on"
        time.sleep(0.05)
    behind = newest(tmp_path / "orphaned")["step"] - metrics(tmp_path / "orphaned")[-1]["step"]
    assert 0 <= behind <= LONG["log_every"]  # a line that is due at the last step comes with the next start


def _mentions(path, word):
    try:
        return word in path.read_text() and int(path.parent.name) != os.getpid()
    except OSError:  # it has ended
        return False


def test_ranks_with_different_numbers_of_chunks_keep_their_order_with_discriminators(tmp_path):
    settings = {**CODEC, "batch_size": 6, "timeout_minutes": 0.3, "stage": "soundstream"}
    words = flags(data=write_voices(tmp_path / "voices"), **settings)
    for ranks in (1, 2):  # of two, the first takes two chunks and the second one
        Forked("train_audio", *words, *flags(run_dir=tmp_path / f"{ranks}"), ranks=ranks).finish()
    one, two = (metrics(tmp_path / f"{ranks}/soundstream") for ranks in (1, 2))
    assert [line.get("loss", 0) for line in one] == pytest.approx([line.get("loss", 0) for line in two], rel=1e-3)


def test_three_ranks_go_on_bit_for_bit(emb, tmp_path):
    words = flags(data=emb, **SMALL)
    Forked("train_prior", *words, "--run_dir", tmp_path / "whole", ranks=3).finish()
    record = checkpoint.record_of(shutil.copytree(tmp_path / "whole", tmp_path / "cut"))
    checkpoint.write_json({**record, "checkpoints": record["checkpoints"][1:]}, tmp_path / "cut/auto_resume.json")
    assert "at step 16 of 24" in Forked("train_prior", *words, "--run_dir", tmp_path / "cut", ranks=3).finish()
    assert not helpers.differences(tmp_path / "whole", tmp_path / "cut")


# Numbers

def test_a_run_that_blew_up_names_the_step_and_goes_on_from_before_at_a_lower_rate(emb, tmp_path):
    words = flags(data=emb, run_dir=tmp_path, **{**SMALL, "log_every": 1, "save_every": 1, "warmup_steps": 0})
    run(*words, "--steps", 2)
    assert "step 4; lower --lr" in (out := run(*words, "--lr", 1e30, "--no_cosine", expect=1)), out
    assert f"goes on from {tmp_path}/checkpoints/step_00000002.pt" in out and newest(tmp_path)["step"] == 2
    assert "at step 2 of 24" in run(*words) and math.isfinite(metrics(tmp_path)[-1]["test_loss"])
    assert "step 2; lower --lr" in run(*words, "--run_dir", tmp_path / "last", "--steps", 1, "--lr", 1e30, expect=1)
    assert not (tmp_path / "last/model.pt").exists() and not (tmp_path / "last/best.pt").exists()
    assert "--lr: inf is not a finite number" in run(*words, "--lr", "inf", expect=2)


def test_one_bad_recording_in_forty_is_left_out_by_name(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(40):
        wave = rng.standard_normal(8000).astype(np.float32) / 10
        wave[4000] = np.nan if i == 7 else 0.0
        content = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + wave.nbytes, b"WAVEfmt ", 16, 3, 1, 8000, 32000, 4, 32,
                              b"data", wave.nbytes)
        (tmp_path / f"{i:02d}.wav").write_bytes(content + wave.tobytes())
    source = recordings.Recordings(tmp_path, 8000, crop=4000)
    assert source.check()[2] == [f"{tmp_path}/07.wav: samples that are not finite, or above 100 times full scale"]
    assert source.fetch(np.arange(6, 9))[1].tolist() == [True, False, True]


def test_a_report_that_cannot_be_written_does_not_stop_training(emb, tmp_path, monkeypatch):
    def write(folder):
        raise OSError(28, "No space left on device", str(folder / "report.html"))
    monkeypatch.setattr(report, "write", write)
    out = run(*flags(data=emb, run_dir=tmp_path, **SMALL))
    assert "No space left on device" in out and (tmp_path / "model.pt").is_file()


# What is loaded

def _moment(state, shape):
    state["optimizers"][0]["state"][0]["exp_avg"] = torch.zeros(shape)


@pytest.mark.parametrize("change", [
    lambda s: _moment(s, (1, 1)), lambda s: _moment(s, (3,)), lambda s: s["optimizers"][0]["state"][0].pop("step"),
    lambda s: s["optimizers"][0].pop("param_groups"), lambda s: s["optimizers"].append({}), lambda s: s.pop("scaler"),
    lambda s: s["ema"].popitem(), lambda s: s.update(ema=[]), lambda s: s.update(step="24"), lambda s: s.pop("config"),
    lambda s: s.update(versions=3), lambda s: s.update(identity={}), lambda s: s.update(best_val_loss=None),
    lambda s: s.update(model={"x": 3}), lambda s: s.update(optimizers=s), lambda s: s["model"].update(more="text")])
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_taken_over(change, emb, finished, tmp_path):
    state = checkpoint.load(finished / newest(finished)["file"])
    change(state)
    checkpoint.save(state, tmp_path / "odd.pt")
    out = run(*flags(data=emb, run_dir=tmp_path / "new", load=tmp_path / "odd.pt", **SMALL), expect=1)
    assert f"error: {tmp_path}/odd.pt: " in out


@pytest.mark.parametrize("change", [
    lambda s: s.pop("config"), lambda s: s["config"].update(width=10 ** 6), lambda s: s["config"].update(depth=10 ** 9),
    lambda s: s.update(widths=3), lambda s: s.pop("widths"), lambda s: s.update(cwd=[]), lambda s: s.update(model=[]),
    lambda s: s["config"].update(width="many"), lambda s: s.update(widths=[10 ** 9, 0]), lambda s: s.update(kind=0)])
def test_a_model_file_with_wrong_facts_is_one_line_and_takes_no_memory(change, finished, tmp_path):
    state = checkpoint.load(finished / "model.pt")
    change(state)
    checkpoint.save(state, tmp_path / "model.pt")
    assert f"{tmp_path}/model.pt: " in run("sample", *flags(run_dir=tmp_path, device="cpu"), expect=1)


def test_a_small_file_of_a_huge_clip_takes_no_memory(tmp_path):
    cfg = clip.Config()
    state = {"model": clip.CLIP(cfg, []).state_dict(), "vocabulary": [], "config": {"embed_width": 10 ** 6}}
    checkpoint.save(state, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"model\.pt: weights of another model"):
        clip.load(tmp_path, "cpu")


def test_a_damaged_model_of_a_run_is_known_and_made_anew(emb, finished, tmp_path):
    folder, before = shutil.copytree(finished, tmp_path / "run"), (finished / "model.pt").read_bytes()
    for damage in (lambda path: path.write_bytes(before[:-9] + b"x" * 9), Path.unlink):
        damage(folder / "model.pt")
        out = run("sample", *flags(run_dir=folder, device="cpu"), expect=1)
        assert "sha256 is not that of" in out or "no such checkpoint" in out
        assert "made anew" in run(*flags(data=emb, run_dir=folder, **SMALL))
        assert helpers.tensors(checkpoint.load(folder / "model.pt")["model"])[0].shape
    assert "missing" not in run(*flags(data=emb, run_dir=folder, **SMALL))


def _png(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return media.SIGNATURE + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def test_pillow_opens_nothing_but_jpeg_png_and_webp_and_no_huge_image():
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    for form in ("GIF", "BMP", "EPS", "TIFF"):
        image.save(stream := io.BytesIO(), form)
        with pytest.raises(images.Unusable, match=r"a\.jpg: not a readable image"):
            images.decode_image(stream.getvalue(), "a.jpg")
    with pytest.raises(images.Unusable, match=r"13000 x 13000 pixels, more than"):
        images.decode_image(_png(13_000, 13_000) + bytes(4) + b"IDAT" + bytes(8), "a.png")


def test_a_named_pipe_and_rates_that_are_none_do_not_stop_a_folder_of_recordings(tmp_path):
    for i in range(8):
        recordings.write_wav(tmp_path / f"{i}.wav", torch.randn(9000) / 10, 8000)
    os.mkfifo(tmp_path / "pipe.wav")
    recordings.write_wav(tmp_path / "slow.wav", torch.randn(9000) / 10, 1)
    recordings.write_wav(tmp_path / "odd.wav", torch.randn(9000) / 10, 15_999)
    source = recordings.Recordings(tmp_path, 8000, crop=1000)
    assert source.bad == [f"{tmp_path}/pipe.wav: not a file", f"{tmp_path}/slow.wav: 1 Hz, expected 1000 to 768000"]
    assert source.fetch(np.arange(9))[1].all() and source.frames(8) == 4501


def test_a_tar_with_a_negative_size_ends_in_one_line(tmp_path):
    with tarfile.open(path := tmp_path / "0.tar", "w") as archive:
        for name in ("a.png", "a.txt"):
            archive.addfile(tarfile.TarInfo(name))
    content = bytearray(path.read_bytes())
    content[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024 in base 256
    content[148:156] = b"        "
    content[148:156] = f"{sum(content[:512]):06o}\0 ".encode()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"0\.tar: corrupt or truncated tar \(a\.png of -1024 bytes\)"):
        images.CaptionedImages(path)


# Addresses

class Odd(socketserver.StreamRequestHandler):
    """A server that sends a request elsewhere, or a byte now and then, or a length that is no number."""

    def handle(self):
        path = self.rfile.readline().split()[1].decode()
        if path == "/elsewhere":
            self.wfile.write(b"HTTP/1.0 302 Found\r\nLocation: file:///etc/hostname\r\n\r\n")
        elif path == "/length":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\nx")
        else:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\nx")
            self.wfile.flush()
            self.server.done.wait(20)


@pytest.mark.parametrize("path, message", [("elsewhere", "file|redirect|unknown"), ("length", "many"),
                                           ("slow", "not there after 1 s; download it by hand")])
def test_odd_servers_end_in_one_line(path, message, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "DEADLINE", 1)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Odd) as server:
        server.done = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match=message) as caught:
            store.fetch(f"http://127.0.0.1:{server.server_address[1]}/{path}", tmp_path)
        server.done.set()
        server.shutdown()
    assert len(str(caught.value).splitlines()) == 1 and not [*tmp_path.glob("*elsewhere*")]


@pytest.mark.parametrize("path", ["{step.__class__}", "{step:>999999999}", "{run!r:09}", "{step:{epoch}}", "{0}", "}{"])
def test_paths_of_copies_hold_documented_names_alone(path):
    with pytest.raises(UserError, match="in braces may stand run, step, epoch, samples_seen, best_val_loss"):
        store.savers(config.Training(save=(f"local save_latest_to=/tmp/{path}",)))


def test_a_file_of_a_wandb_run_stays_inside_the_downloads(tmp_path):
    with pytest.raises(UserError, match=r"wandb:abc/\.\./\.\./x: expected the name of a file of the run, without"):
        store.fetch("wandb:abc/../../x", tmp_path)


# Files

def test_more_shards_are_read_than_files_may_be_open(tmp_path):
    values, limits = np.random.default_rng(0).standard_normal((700, 2, 4)).astype(np.float32), resource.getrlimit(
        resource.RLIMIT_NOFILE)
    (tmp_path / "img_emb").mkdir()
    for number, rows in enumerate(values):
        np.save(tmp_path / f"img_emb/img_emb_{number}.npy", rows)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        table = data.Shards(tmp_path / "img_emb", "img_emb")
        np.testing.assert_array_equal(table[np.arange(1400)], values.reshape(-1, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_cut_off_before_or_while_it_is_read_is_one_line(tmp_path):
    np.save(path := tmp_path / "a.npy", np.ones((100, 64), np.float32))
    rows = data.Rows(path, 2)
    os.truncate(path, 9000)
    with pytest.raises(UserError, match=r"a\.npy: was cut off while it was read"):
        rows[np.arange(90, 100)]
    with pytest.raises(UserError, match=r"a\.npy: not a readable \.npy array: mmap length is greater than file size"):
        data.Rows(path, 2)


def test_a_tree_of_runs_works_where_it_is_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(clip, "BUILTIN_ROWS", 300)
    monkeypatch.chdir(tmp_path)
    small = dict(steps=6, batch_size=32)
    monkeypatch.setattr(clip, "train", lambda cfg, device, train=clip.train: train(
        clip.dataclasses.replace(cfg, **small), device))
    words = flags(run_dir="runs/prior", **{**SMALL, "steps": 8})
    run(*words)
    run(*flags(run_dir="runs/lora", init_from="runs/prior/model.pt", lora_rank=2, **{**SMALL, "steps": 8}))
    Path("elsewhere/deep").mkdir(parents=True)
    shutil.move("runs", "elsewhere/deep/moved")
    sample = ("sample", "--text", "a red star", "--steps", 2, "--device", "cpu")
    for name in ("prior", "lora"):
        assert "similarity" in run(*sample, "--run_dir", f"elsewhere/deep/moved/{name}")
        assert "baseline" in run("evaluate", "--eval_timesteps", 2, "--run_dir", f"elsewhere/deep/moved/{name}")
    made = Path("elsewhere/deep/moved/clip/model.pt").stat().st_mtime_ns
    assert "is finished" in run(*words[2:], "--run_dir", "elsewhere/deep/moved/prior")
    assert Path("elsewhere/deep/moved/clip/model.pt").stat().st_mtime_ns == made
    os.truncate("elsewhere/deep/moved/shapes/img_emb/img_emb_0.npy", 900)  # built-in data cut off are made anew
    assert "is finished" in run(*words[2:], "--run_dir", "elsewhere/deep/moved/prior")
    assert len(data.Embeddings("elsewhere/deep/moved/shapes", captions=True)) == 300


def test_a_damaged_cache_of_tokens_is_made_anew(tmp_path):
    calls, source = [], recordings.Syllables(4)

    def encode(row):
        calls.append(row)
        return np.full((3, 2), row)
    for damage in (None, lambda path: os.truncate(path, 130), lambda path: path.write_bytes(bytes(144))):
        for path in tmp_path.rglob("tokens.npy"):
            damage(path)
        cache = recordings.token_cache(tmp_path, source, {"codec": "a"}, encode, "tokens")
        assert [cache[row].tolist() for row in range(4)] == [[[row] * 2] * 3 for row in range(4)]
    assert len(calls) == 12
    os.truncate(cache.path, 170)  # while it is in use
    with pytest.raises(UserError, match=r"tokens\.npy: was cut off while it was read"):
        cache[3]


@pytest.mark.parametrize("text", ["[]", "{}", '{"checkpoints": 3}', '{"checkpoints": [3], "finished": null}', "\x00",
                                  '{"checkpoints": [{"file": 1, "step": 2, "sha256": "a", "values": {}}]}',
                                  '{"checkpoints": [], "finished": 3}', '{"checkpoints": [], "logger": []}'])
def test_a_state_file_with_wrong_types_is_one_line_with_the_way_out(text, emb, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "auto_resume.json").write_text(text)
    out = run(*flags(data=emb, run_dir=folder, **SMALL), expect=1)
    assert "auto_resume.json: damaged or missing; go on from one of" in out
    run("sample", *flags(run_dir=folder, device="cpu"))  # which does not need it


def test_a_list_of_what_was_sent_that_is_damaged_sends_again(emb, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    for text in ("{", "[]", '{"a": {}}'):
        (folder / "sent.json").write_text(text)
        run(*flags(data=emb, run_dir=folder, **SMALL), "--save", f"local save_latest_to={tmp_path}/{{step}}.pt")
        (tmp_path / "24.pt").unlink()
    assert 24 in json.loads((folder / "sent.json").read_text()).values()
