"""Saving as a commit: whatever is cut off, killed, full or damaged, the run folder holds a complete run."""
import hashlib
import io
import json
import os
import pickle
import random
import resource
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import FORKS
from helpers import tensors

from common import checkpoint
from common.config import UserError


def state_of(step, size=1000):
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(size, generator=generator), "half": torch.ones(3, dtype=torch.bfloat16) * step,
                      "count": torch.tensor(step)}, "step": step, "best": 0.1, "plan": [1, (2, "a"), None, True]}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def opened(folder, resume="auto"):
    run = checkpoint.Run(folder)
    run.open(resume)
    return run


def commit(run, *steps, keep=0, **facts):
    for step in steps:
        run.commit(step, state_of(step), keep, **facts)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# Files

def test_a_state_survives_a_round_trip_bit_for_bit_and_the_checksum_is_the_files(tmp_path):
    path = tmp_path / "deep" / "state.pt"
    for step in (1, 2):  # also over an older one
        digest = checkpoint.save(state_of(step), path)
        assert same(checkpoint.load(path, digest), state_of(step))
        assert digest == checkpoint.checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.name for p in path.parent.iterdir()] == ["state.pt"]


def test_every_flipped_bit_is_refused_when_the_checksum_is_known(tmp_path):
    path = tmp_path / "state.pt"
    digest = checkpoint.save(state_of(1, 10), path)
    good, generator = path.read_bytes(), random.Random(0)
    silent = 0
    for _ in range(50):
        bad = bytearray(good)
        bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(path, digest)
        try:
            silent += checkpoint.load(path) is not None
        except UserError:
            silent += 0
    assert silent > 10  # what the checksum is for
    path.write_bytes(good)
    assert same(checkpoint.load(path, digest), state_of(1, 10))


class Secret:
    """What a pickle can do to who loads it."""

    def __reduce__(self):
        return Path("executed").touch, ()


def foreign_files():
    """(kind, bytes) of files that hold anything but a state."""
    stream, tensor = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("hello.txt", "hello")
    torch.save(torch.zeros(3), tensor)
    whole = io.BytesIO()
    torch.save(state_of(1), whole)
    secret = io.BytesIO()
    torch.save({"model": Secret()}, secret)
    return {"empty": b"", "text": b"hello", "zip": stream.getvalue(), "tensor": tensor.getvalue(),
                "object": secret.getvalue(), "pickle": pickle.dumps({"model": Secret()}),
                "no model": pickle.dumps({"step": 1}), "cut": whole.getvalue()[:-700]}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", foreign_files())
def test_a_file_that_is_no_checkpoint_is_refused_by_name(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state.pt"
    path.write_bytes(foreign_files()[kind])
    with pytest.raises(UserError, match="not a checkpoint of this program") as caught:
        checkpoint.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert not Path("executed").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_random_and_truncated_bytes_are_refused_and_never_crash(tmp_path):
    path, generator = tmp_path / "state.pt", random.Random(0)
    checkpoint.save(state_of(1, 10), path)
    whole = path.read_bytes()
    prefixes = [b"", b"\x80\x02", b"\x80\x04", b"PK\x03\x04"]
    files = [prefix + generator.randbytes(generator.randrange(80)) for prefix in prefixes for _ in range(150)]
    for data in files + [whole[:length] for length in range(0, len(whole), 37)]:
        path.write_bytes(data)
        with pytest.raises(UserError, match="not a checkpoint"):
            checkpoint.load(path)


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path):
    for path in (tmp_path / "no.pt", tmp_path):
        with pytest.raises(UserError, match=f"{path}: no such checkpoint"):
            checkpoint.load(path)


def fill_the_disk(path, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # of this process alone
    try:
        checkpoint.save(state_of(2, 100_000), path)
    except OSError as error:
        return str(error), error.errno, error.filename
    return None


@pytest.mark.parametrize("limit", [0, 100, 5_000, 200_000])
def test_a_write_that_fails_is_reported_as_what_it_is_and_leaves_the_old_file(limit, tmp_path, on_ranks):
    path = tmp_path / "state.pt"
    digest = checkpoint.save(state_of(1), path)
    message, number, filename = on_ranks(1, fill_the_disk, path, limit)[0]
    assert number == 27 and filename == str(path) and "File too large, writing" in message and str(path) in message
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]
    assert same(checkpoint.load(path, digest), state_of(1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("size", [10, 100_000])  # an error on closing, an error in the middle
def test_a_full_disk_is_reported_as_one(size, tmp_path):
    path = tmp_path / "state.pt"
    checkpoint.save(state_of(1), path)
    (tmp_path / "state.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoint.save(state_of(2, size), path)
    assert caught.value.errno == 28 and caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"] and same(checkpoint.load(path), state_of(1))


def test_an_error_in_the_middle_of_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "values.json"
    checkpoint.write_json({"a": [1, 2.5, None]}, path)
    with pytest.raises(TypeError):
        checkpoint.write_json({"a": {1, 2}}, path)
    with pytest.raises(KeyboardInterrupt), checkpoint.replacing(path) as file:
        file.write(b"half a li")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"values.json": b'{\n  "a": [\n    1,\n    2.5,\n    null\n  ]\n}\n'}


# Run folders

def test_a_run_is_found_again_as_it_was_left(tmp_path):
    run = opened(tmp_path / "run")
    assert run.newest() == (None, []) and run.record["finished"] is None
    commit(run, 10, 20, world_size=2)
    run.lock.close()
    again = opened(tmp_path / "run")
    entry, notes = again.newest()
    assert (entry["step"], notes, again.record["world_size"]) == (20, [], 2)
    assert same(checkpoint.load(again.folder / entry["file"], entry["sha256"]), state_of(20))
    again.finish({"loss": 0.5})
    again.lock.close()
    assert opened(tmp_path / "run").record["finished"] == {"loss": 0.5}


@pytest.mark.parametrize("keep, left", [(1, [50]), (2, [40, 50]), (3, [30, 40, 50]), (9, [10, 20, 30, 40, 50]),
                                        (0, [10, 20, 30, 40, 50])])
def test_the_newest_few_are_kept(keep, left, tmp_path):
    run = opened(tmp_path)
    commit(run, 10, 20, 30, 40, 50, keep=keep)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step_{step:08d}.pt" for step in left]
    recorded = json.loads((tmp_path / "auto_resume.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in recorded] == left[::-1]


def test_a_damaged_or_missing_newest_is_reported_and_the_one_before_it_used(tmp_path):
    run = opened(tmp_path)
    commit(run, 10, 20, 30, keep=3)
    path = tmp_path / "checkpoints" / "step_00000030.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    entry, notes = run.newest()
    assert entry["step"] == 20 and len(notes) == 1 and f"{path}: damaged" in notes[0]
    (tmp_path / "checkpoints" / "step_00000020.pt").unlink()
    entry, notes = run.newest()
    assert entry["step"] == 10 and [note.split(": ")[1].split(",")[0] for note in notes] == ["damaged", "missing"]
    commit(run, 15, keep=3)  # gone on from there: the damaged one is no longer the newest
    assert run.newest()[0]["step"] == 15 and run.newest()[1] == []
    assert [entry["step"] for entry in run.record["checkpoints"]] == [15, 10]
    commit(run, 30, keep=3)
    assert run.newest()[0]["step"] == 30 and run.newest()[1] == []
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"gone")
    with pytest.raises(UserError, match="all 3 checkpoints"):
        run.newest()


def test_starting_anew_moves_the_old_run_aside_and_loses_nothing(tmp_path):
    folder, kept = tmp_path / "run", []
    for number in range(1, 4):
        run = checkpoint.Run(folder)
        moved = run.open("never")
        assert moved == (None if number == 1 else tmp_path / f"run.{number - 1}")
        assert run.newest() == (None, []) and list(contents(folder)) == ["auto_resume.json"]
        commit(run, number)
        (folder / "config.json").write_text(f"{{}} {number}")
        kept.append(contents(folder))
        run.lock.close()
    assert [contents(tmp_path / name) for name in ("run.1", "run.2", "run")] == kept


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\xff", '{"checkpoints": 3}',
                                  '{"checkpoints": [{"step": 1}]}'])
def test_a_damaged_record_is_told_with_ways_out(text, tmp_path):
    run = opened(tmp_path / "run")
    commit(run, 10)
    run.lock.close()
    path = tmp_path / "run" / "auto_resume.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=f"{path}: damaged .*--resume never"):
        opened(tmp_path / "run")
    assert opened(tmp_path / "run", "never").newest() == (None, [])  # the way out
    assert (tmp_path / "run.1" / "checkpoints" / "step_00000010.pt").exists()


def test_a_save_that_has_begun_is_of_the_state_as_it_was_and_one_at_a_time(tmp_path, monkeypatch):
    run, state, going, save = opened(tmp_path), state_of(10), threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: going.wait(60) and save(*args))
    before = checkpoint.copied(state)
    run.begin(10, state, 0, world_size=3)
    for tensor in tensors(state):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()  # as training goes on
    assert same(before, state_of(10)) and not same(state, before) and not run.record["checkpoints"]
    second = threading.Thread(target=run.begin, args=(20, state_of(20), 0))
    second.start()
    second.join(0.1)
    assert second.is_alive()  # it waits for the first
    going.set()
    second.join()
    run.wait()
    assert [entry["step"] for entry in run.record["checkpoints"]] == [20, 10] and run.record["world_size"] == 3
    assert same(checkpoint.load(tmp_path / "checkpoints/step_00000010.pt"), before)


def test_an_error_of_a_save_is_raised_where_it_is_awaited_and_the_run_stays_whole(tmp_path, monkeypatch):
    run = opened(tmp_path)
    commit(run, 10)
    monkeypatch.setattr(checkpoint.torch, "save", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    run.begin(20, state_of(20), 0)
    with pytest.raises(OSError, match="No space left, writing"):
        run.finish({})
    run.wait()  # it is told once
    assert [entry["step"] for entry in run.record["checkpoints"]] == [10] and not run.record["finished"]
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000010.pt"]


@pytest.mark.parametrize("steps", [[10], [10, 20]])
def test_checkpoints_without_a_record_are_not_silently_started_over(steps, tmp_path):
    run = opened(tmp_path)
    commit(run, *steps)
    run.lock.close()
    (tmp_path / "auto_resume.json").unlink()
    with pytest.raises(UserError, match=rf"has {len(steps)} checkpoints but no auto_resume\.json.*--resume"):
        opened(tmp_path)


def test_first_saves_cut_off_before_they_were_recorded_do_not_stand_in_the_way(tmp_path):
    run = opened(tmp_path)
    for step in (4, 5):
        checkpoint.save(state_of(step), tmp_path / "checkpoints" / f"step_{step:08d}.pt")
    run.lock.close()
    again = opened(tmp_path)
    assert again.newest() == (None, [])
    commit(again, 6, keep=2)
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000006.pt"]


def test_a_run_of_another_model_or_other_data_is_refused_with_both_values():
    expected = {"width": 64, "data": "abc", "objective": None}
    checkpoint.check_identity({**expected, "torch": "2.13"}, expected, "run")  # says nothing
    with pytest.raises(UserError, match=r"runs/x.*width is 32 there and 64 here.*data is None there and 'abc' here"):
        checkpoint.check_identity({"width": 32, "objective": None}, expected, "runs/x")


def test_the_version_of_the_code_changes_with_an_edit_and_only_then(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("a = 1\n")
    first = checkpoint.versions(script)
    assert checkpoint.versions(script) == first and first["torch"] == torch.__version__
    script.write_text("a = 2\n")
    assert checkpoint.versions(script)["code"] != first["code"]


# Processes

def hold(folder, pipe, fork):
    run = opened(folder)
    child = 0
    if fork and not (child := os.fork()):
        pipe.recv()  # a worker, which lives on when its parent is killed
        os._exit(0)
    pipe.send(child)
    pipe.recv()
    run.lock.close()


@pytest.mark.parametrize("fork", [False, True])
def test_a_folder_in_use_is_refused_naming_the_process_until_that_is_killed(fork, tmp_path):
    pipe, other = FORKS.Pipe()
    process = FORKS.Process(target=hold, args=(tmp_path / "run", other, fork))
    process.start()
    child = pipe.recv()
    for _ in range(2):  # a refused attempt takes nothing away from the holder
        with pytest.raises(UserError, match=rf"/run: in use by another live process \(process {process.pid} on "):
            opened(tmp_path / "run")
    process.kill()
    process.join()
    assert opened(tmp_path / "run").newest() == (None, [])
    if child:
        os.kill(child, 9)


STEPS = 120
MOMENTS = {"mkdir", "open", "flush", "fsync", "replace", "__exit__", "close", "unlink"}  # calls that change a folder


def train(folder, results, stride, die_at):
    """Resume and commit up to STEPS; the process kills itself before call number `die_at` of MOMENTS."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if event == "c_call" and argument.__name__ in MOMENTS:
            calls += 1
            if calls == die_at:
                os.kill(os.getpid(), 9)

    run = opened(folder)
    entry, notes = run.newest()
    step = entry["step"] if entry else 0
    intact = not entry or same(checkpoint.load(run.folder / entry["file"], entry["sha256"]), state_of(step, 200))
    results.send((step, notes, intact))
    sys.setprofile(count)
    while step < STEPS:
        step = min(STEPS, step + stride)
        run.commit(step, state_of(step, 200), 2)
    sys.setprofile(None)
    results.send(calls)


def start(folder, stride, die_at):
    """(exit code, what was sent before the end) of `train` in a process of its own."""
    pipe, other = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=train, args=(folder, other, stride, die_at))
    process.start()
    other.close()
    received = []
    while pipe.poll(None):
        try:
            received.append(pipe.recv())
        except EOFError:
            break
    process.join()
    return process.exitcode, received


def test_a_kill_at_every_moment_of_saving_leaves_a_complete_run_that_goes_on(tmp_path):
    code, (_, calls) = start(tmp_path / "straight", 1, None)
    moments, generator, reached = calls // STEPS + 3, random.Random(0), 0  # those of a save and of its unlink
    assert code == 0 and moments > 15
    for die_at in range(1, moments):
        code, received = start(tmp_path / "run", generator.randint(1, 3), die_at)
        assert code == -9
        (step, notes, intact), = received
        assert intact and notes == [] and reached <= step < STEPS - 6
        reached = step
    assert start(tmp_path / "run", 1, None)[0] == 0
    left, newest = contents(tmp_path / "run"), f"checkpoints/step_{STEPS:08d}.pt"
    assert left[newest] == contents(tmp_path / "straight")[newest]
    assert [name for name in left if name.endswith(".tmp")] == []  # nor is a scrap of a cut-off save left


def test_files_are_written_beside_from_copies_and_in_the_order_asked_for(tmp_path):
    run, state, order = opened(tmp_path), {"model": {"w": torch.zeros(3)}}, []
    run.later("first", order.append, 1)
    for number in (1, 2):
        state["model"]["w"].fill_(number)
        run.write(state, tmp_path / f"{number}.pt")
        run.write(state, tmp_path / "both.pt")
        state["model"]["w"].fill_(-1)
    run.later("last", lambda: order.append(sorted(path.name for path in tmp_path.glob("*.pt"))))
    run.wait()
    assert order == [1, ["1.pt", "2.pt", "both.pt"]]
    found = [checkpoint.load(tmp_path / name)["model"]["w"][0].item() for name in ("1.pt", "2.pt", "both.pt")]
    assert found == [1, 2, 2]


def test_an_error_of_a_file_written_beside_is_told_when_it_is_waited_for(tmp_path):
    run = opened(tmp_path)
    (tmp_path / "wall").touch()
    run.write({"model": {}}, tmp_path / "wall/model.pt")
    with pytest.raises(OSError, match="wall"):
        run.wait()
    run.wait()  # once


def test_what_can_be_made_again_is_replaced_whole_without_waiting_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.os, "fsync", lambda file: pytest.fail("waited for the disk"))
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), checkpoint.replacing(tmp_path / "x", durably=False) as file:
        file.write(b"ne")
        1 / 0  # noqa: B018 (in the middle of it)
    assert (tmp_path / "x").read_bytes() == b"old"
    with checkpoint.replacing(tmp_path / "x", durably=False) as file:
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1
