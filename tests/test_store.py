"""Loaders and savers: the real clients against a server on loopback, and what happens when it fails them."""
import dataclasses
import hashlib
import io
import json
import math
import pickle
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from servers import needs

from common import checkpoint, config, store, tracker
from common.config import UserError


def settings(folder="runs", **given):
    return config.Training(run_dir=f"{folder}/run", **given)


def model(path, step=3, **more):
    checkpoint.save({"model": {"w": torch.full((2,), 1.0 * step)}, "config": {"lr": 1.0}, "step": step, **more}, path)
    return path


# Addresses

@pytest.mark.parametrize("address", ["nothing.pt", "ftp://host/x.pt", "http:/x.pt", "s3://bucket/x.pt", "wandb:abc",
                                     "wandb:/x"])
def test_a_path_is_itself_and_what_is_no_file_and_no_address_is_refused(address, tmp_path):
    path = model(tmp_path / "with:colon.pt")
    assert store.fetch(str(path), tmp_path) == str(path) and store.fetch("", tmp_path) == ""
    with pytest.raises(UserError, match=f"{address}: no such checkpoint; expected a file, http"):
        store.fetch(address, tmp_path)


def test_load_only_auto_resume_needs_a_file_and_a_run_to_go_on_with():
    for given in ({}, {"load": "x.pt", "resume": "never"}):
        with pytest.raises(UserError, match="--load_only_auto_resume: it needs --load, and a --resume"):
            store.check(settings(load_only_auto_resume=True, **given))
    store.check(settings(load_only_auto_resume=True, load="x.pt"))


# Fetching

def test_a_url_is_fetched_and_kept_in_a_folder(tmp_path, server):
    url, folder = f"{server.url}/a/model.pt", tmp_path / "downloads"
    for step in (3, 4):  # what changed there comes again
        server.files["/a/model.pt"] = model(tmp_path / "m.pt", step).read_bytes()
        path = store.fetch(url, folder)
        assert [*folder.iterdir()] == [Path(path)] and checkpoint.load(path)["step"] == step
    server.files["/b/model.pt"] = model(tmp_path / "m.pt", 5).read_bytes()
    assert checkpoint.load(store.fetch(f"{server.url}/b/model.pt", folder))["step"] == 5
    server.files[long := f"/{'x' * 250}?v=1&w=2"] = b"x"
    assert Path(store.fetch(server.url + long, folder)).read_bytes() == b"x"


def test_the_checksum_is_held_to(tmp_path, server):
    right, folder = model(tmp_path / "m.pt").read_bytes(), tmp_path / "downloads"
    digest = hashlib.sha256(right).hexdigest()
    server.files["/x.pt"], url = right, f"{server.url}/x.pt#sha256={digest}"
    path = store.fetch(url, folder)
    assert store.fetch(url, folder) == path and len(server.asked) == 1
    Path(path).write_bytes(b"damaged")
    assert Path(store.fetch(url, folder)).read_bytes() == right
    server.files["/x.pt"] = b"another"
    Path(path).unlink()
    with pytest.raises(UserError, match=f"/x.pt: invalid hash value .expected .{digest}., got "):
        store.fetch(url, folder)
    assert not [*folder.iterdir()]


def test_what_a_server_refuses_is_told_with_its_reason_and_so_is_no_server(tmp_path, server):
    for server.fail in (404, 500):
        with pytest.raises(UserError, match=f"/x.pt: HTTP Error {server.fail}"):
            store.fetch(f"{server.url}/x.pt", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"http://127.0.0.1:{port}/y.pt: .*refused"):
        store.fetch(f"http://127.0.0.1:{port}/y.pt", tmp_path)


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_nothing_in_a_download_is_executed(tmp_path, server, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    for name, bad in (("plain", pickle.dumps({"model": Trap()})), ("torch", (tmp_path / "trap.pt").read_bytes())):
        server.files[f"/{name}.pt"] = bad
        with pytest.raises(UserError, match="not a checkpoint of this program"):
            checkpoint.load(store.fetch(f"{server.url}/{name}.pt", tmp_path / "downloads"))
    assert not (tmp_path / "executed").exists()


@needs("wandb")
def test_a_file_of_a_wandb_run_is_fetched_by_the_real_client(tmp_path, server, monkeypatch, request):
    import wandb
    request.addfinalizer(wandb.teardown)  # the package keeps what it finds in the environment until then
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    server.files["/ck/latest.pt"] = model(tmp_path / "m.pt").read_bytes()
    cfg = settings(tmp_path, logger="wandb project=shapes entity=me", load="wandb:abc/ck/latest.pt")
    monkeypatch.setitem(sys.modules, "PIL", wandb)  # which the logger needs, and this does not
    path = tracker.prepare(cfg).load
    assert checkpoint.load(path)["step"] == 3 and path == f"{tmp_path}/downloads/abc/ck/latest.pt"
    asked = [json.loads(body)["variables"] for _, _, _, body in server.asked if b"RunFiles" in body]
    assert asked and asked[0]["project"] == "shapes" and asked[0]["entity"] == "me" and asked[0]["name"] == "abc"
    with pytest.raises(UserError, match=r"wandb:none/latest\.pt: "):
        store.fetch("wandb:none/latest.pt", tmp_path, project="me/shapes")


@dataclasses.dataclass(frozen=True)
class Adapters(config.Training):
    lora_rank: int = 0


def test_files_to_start_from_are_fetched_where_the_run_needs_them(tmp_path, server):
    server.files = {name: model(tmp_path / "m.pt").read_bytes() for name in ("/load.pt", "/init.pt")}
    given = dict(load=f"{server.url}/load.pt", init_from=f"{server.url}/init.pt")

    def fetched(**more):
        server.asked.clear()
        cfg = tracker.prepare(settings(tmp_path, **given, **more))
        assert (Path(cfg.load).is_file(), Path(cfg.init_from).is_file()) == tuple(
            not getattr(cfg, name).startswith("http") for name in given)
        return sorted(path for _, path, _, _ in server.asked)
    assert fetched() == ["/init.pt", "/load.pt"]
    assert fetched(load_only_auto_resume=True) == ["/init.pt"]  # a new run
    entry = {"file": "checkpoints/a.pt", "step": 1, "sha256": "", "values": {}}
    checkpoint.write_json({"checkpoints": [entry], "finished": None}, tmp_path / "run/auto_resume.json")
    assert fetched() == fetched(load_only_auto_resume=True) == ["/load.pt"]  # its own are lost
    model(tmp_path / "run/checkpoints/a.pt")
    assert fetched() == []
    assert fetched(resume="never") == ["/init.pt", "/load.pt"]
    assert Path(tracker.prepare(Adapters(run_dir=f"{tmp_path}/run", lora_rank=4, **given)).init_from).is_file()


# Savers: the command line

@pytest.mark.parametrize("text, message", [
    ("disk save_latest_to=x.pt", "expected one of local, wandb, huggingface"),
    ("local", "no target; give save_latest_to=PATH"), ("local kind=model", "no target"),
    ("local save_lastest_to=x.pt", "a name of kind, save_latest_to"), ("local save_latest_to", "expected NAME=VALUE"),
    ("local save_latest_to={stp}.pt", "KeyError.*in braces may stand run, step, epoch, samples_seen"),
    ("local save_best_to={step:xyz}.pt", "format"), ("local save_best_to={}.pt", "in braces"),
    ("local save_best_to={step.x}.pt", "in braces"), ("local save_best_to={step", "in braces"),
    ("local save_latest_to=x.pt save_meta_to={nope}", "nope"),
    ("local save_latest_to=x.pt kind=weights", "expected checkpoint or model"),
    ("local 'save_latest_to=x.pt", "No closing quotation"), ("local repo=a/b save_best_to=x", "expected NAME=VALUE"),
    ("huggingface save_latest_to=x.pt", "repo=OWNER/NAME"), ("huggingface repo=x save_latest_to=x.pt", "repo=OWNER"),
    ("wandb save_latest_to=x.pt", "it needs --logger wandb"),
    ("local save_latest_to=x.pt save_best_to=x.pt", "would be written twice")])
def test_a_saver_that_cannot_be_meant_is_refused_with_the_command_line(text, message):
    with pytest.raises(UserError, match=rf"--save.*{message}"):
        store.check(settings(save=(text,)))


@pytest.mark.parametrize("pairs, message", [
    (("step=3",), "'step=3'.*reserved names are model"), (("note",), "expected NAME=VALUE"),
    (("a b=1",), "expected NAME=VALUE")])
def test_metadata_that_cannot_be_is_refused(pairs, message):
    with pytest.raises(UserError, match=f"--metadata: .*{message}"):
        store.check(settings(metadata=pairs))
    assert store.metadata(settings(metadata=("fold=3", "note=a=b, c"))) == {"fold": "3", "note": "a=b, c"}


def test_stages_trained_in_turn_must_not_share_a_path_or_a_start():
    for given, message in [
            ({"save": ("local save_latest_to=/x/l.pt",)}, r"write to /x/l.pt; put \{run\} into it, which ends in"),
            ({"save": ("local save_latest_to=/x/{run}.pt save_meta_to=/x",)}, "--save: each stage would write to /x;"),
            *(({name: text}, "--init_from, --load, id in --logger: each is of one stage") for name, text in (
                ("load", "x.pt"), ("init_from", "x.pt"), ("logger", "wandb id=x")))]:
        store.check_stages([settings(**given)])
        with pytest.raises(UserError, match=message):
            store.check_stages([settings(**given)] * 2)
    store.check_stages([settings(save=("local save_latest_to=/x/{run:9}.pt",))] * 2)


# Copies

def entry_of(folder, step, file=None):
    """An entry of auto_resume.json, and its file."""
    file = file or f"checkpoints/step_{step:08d}.pt"
    more = {"ema": {"w": torch.full((2,), -1.0 * step)}} if file.startswith("checkpoints") else {}
    model(folder / file, step, **more)
    values = {"run": "run", "step": step, "epoch": 1, "samples_seen": 96, "best_val_loss": math.inf, "fold": "3"}
    return {"file": file, "step": step, "sha256": "", "values": values}


def run_of(folder, *steps, best=None):
    """A run in `folder` that has saved checkpoints of `steps`, newest first, and a `best` step."""
    run = SimpleNamespace(folder=folder / "run", record={"checkpoints": [entry_of(folder / "run", s) for s in steps]})
    if best is not None:
        run.record["best"] = entry_of(run.folder, best, "best.pt")
    checkpoint.write_json({"lr": 1.0}, run.folder / "config.json")
    return run


def send(run, *save):
    """Send the copies of a run to the savers that are named; {saver and event: step} of all that went."""
    store.send(store.savers(settings(run.folder.parent, save=save, metadata=("fold=3",), logger="wandb")), run)
    path = run.folder / "sent.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_copies_are_of_the_kind_and_at_the_place_that_is_given(tmp_path, capsys):
    run = run_of(tmp_path, 12, 8, 4, best=8)
    send(run, f"local save_latest_to={tmp_path}/a/{{run}}_{{step:04d}}_{{epoch}}.pt save_meta_to={tmp_path}/about",
         f"local kind=model save_best_to={tmp_path}/b/{{best_val_loss:.3f}}.pt save_latest_to={tmp_path}/b/l.pt",
         f"local save_best_to={tmp_path}/c/best_{{step}}.pt")
    files = run.folder / "checkpoints"
    assert (tmp_path / "a/run_0012_1.pt").read_bytes() == (files / "step_00000012.pt").read_bytes()
    assert (tmp_path / "c/best_8.pt").read_bytes() == (files / "step_00000008.pt").read_bytes()
    for name, step, weight in (("inf", 8, 8.0), ("l", 12, -12.0)):  # best.pt is averaged, the checkpoint is not yet
        found = checkpoint.load(tmp_path / f"b/{name}.pt")
        assert found["step"] == step and "ema" not in found and found["model"]["w"].tolist() == [weight] * 2
    assert sorted(path.name for folder in "abc" for path in (tmp_path / folder).iterdir()) == [
        "best_8.pt", "inf.pt", "l.pt", "run_0012_1.pt"]
    about = json.loads((tmp_path / "about/metadata.json").read_text())
    assert about == {**run.record["checkpoints"][0]["values"], "best_val_loss": None} and about["fold"] == "3"
    assert (tmp_path / "about/config.json").read_bytes() == (run.folder / "config.json").read_bytes()
    assert capsys.readouterr().out == ""


def test_what_was_sent_is_not_sent_again_and_what_is_new_is(tmp_path):
    text = f"local save_latest_to={tmp_path}/latest.pt save_best_to={tmp_path}/best.pt"
    assert send(run_of(tmp_path), text) == send(run_of(tmp_path, 4, best=4)) is None  # nothing saved, no savers
    assert send(run_of(tmp_path, 4, best=4), text) == {f"{text} latest": 4, f"{text} best": 4}
    (tmp_path / "latest.pt").unlink()
    send(run_of(tmp_path, 4, best=4), text)
    assert not (tmp_path / "latest.pt").exists()
    (tmp_path / "best.pt").unlink()
    assert send(run_of(tmp_path, 8, 4, best=4), text)[f"{text} latest"] == 8
    assert checkpoint.load(tmp_path / "latest.pt")["step"] == 8 and not (tmp_path / "best.pt").exists()
    assert f"{text}x best" not in send(run_of(tmp_path, 8, best=4), text + "x")  # whose checkpoint is gone


def test_a_failure_is_told_and_tried_again_at_the_next_save_and_at_the_next_start_of_a_finished_run(tmp_path, capsys):
    (tmp_path / "wall").write_text("a file where a folder should be")
    save = (f"local save_latest_to={tmp_path}/wall/{{step}}.pt", f"local save_latest_to={tmp_path}/fine.pt")
    for step in (1, 2):
        sent = send(run := run_of(tmp_path, step), *save)
        assert re.search(f"latest copy of step {step} failed: .*{tmp_path}/wall.*; the next save or start of this run "
                         "tries again\n$", capsys.readouterr().out)
        assert checkpoint.load(tmp_path / "fine.pt")["step"] == step and sent == {f"{save[1]} latest": step}
    (tmp_path / "wall").unlink()
    tracker.resend(settings(tmp_path, save=save), run)
    assert checkpoint.load(tmp_path / "wall/2.pt")["step"] == 2 and capsys.readouterr().out == ""


def test_a_file_that_is_dropped_while_it_is_sent_is_sent_whole(tmp_path, monkeypatch):
    run, put = run_of(tmp_path, 1), store.Saver.put
    monkeypatch.setattr(store.Saver, "put", lambda saver, file, name: [
        (run.folder / "checkpoints/step_00000001.pt").unlink(), put(saver, file, name)])
    send(run, f"local save_latest_to={tmp_path}/copy.pt")
    assert checkpoint.load(tmp_path / "copy.pt")["step"] == 1


@needs("wandb")
@needs("PIL")
def test_wandb_keeps_copies_with_the_run_also_of_a_finished_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, text = run_of(tmp_path, 4), "wandb save_latest_to=ck/{step}.pt"
    log = tracker.WandB(settings(tmp_path), {"id": "mine"}, {}, 0, 0)
    checkpoint.write_json({**run.record, "logger": {"kind": "wandb", **log.identity}},
                          tmp_path / "run/auto_resume.json")
    send(run, text)
    log.finish(0, "")
    send(run_of(tmp_path, 8), text)
    import wandb
    assert wandb.run.id == "mine"
    wandb.finish()
    found = {path.name: path for path in tmp_path.glob("run/wandb/*-mine*/files/ck/*.pt")}
    assert {name: checkpoint.load(path)["step"] for name, path in found.items()} == {"4.pt": 4, "8.pt": 8}
    assert not any(path.is_symlink() for path in found.values())


# Hugging Face

@pytest.fixture
def hub(server, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return server


def test_hugging_face_copies_are_sent_by_the_real_client(tmp_path, hub, capsys):
    (tmp_path / "token").write_text("hf_secret\n")
    text = f"huggingface repo=me/prior token_file={tmp_path}/token save_latest_to=ck/{{step}}.pt save_meta_to=about"
    for kind in ("model", "checkpoint"):
        send(run_of(tmp_path, 12), f"{text} kind={kind}")
        stored = torch.load(io.BytesIO(hub.stored["ck/12.pt"]), weights_only=True)
        assert capsys.readouterr().out == "" and ("ema" in stored) == (kind == "checkpoint")
    assert hub.stored["ck/12.pt"] == (tmp_path / "run/checkpoints/step_00000012.pt").read_bytes()
    assert json.loads(hub.stored["about/metadata.json"])["step"] == 12 and b"lr" in hub.stored["about/config.json"]
    made, headers = next((json.loads(body), headers) for _, path, headers, body in hub.asked if "create" in path)
    assert made["name"] == "prior" and made["organization"] == "me"
    assert made.get("private") is True or made.get("visibility") == "private"
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer hf_secret"


def test_a_wrong_token_and_a_full_quota_leave_training_alone(tmp_path, hub, capsys):
    run, text = run_of(tmp_path, 1), "huggingface repo=me/prior save_latest_to=latest.pt"
    for hub.fail in (401, 413):
        assert send(run, text) is None
        assert f"{hub.fail}" in (out := capsys.readouterr().out) and out.count("the latest copy of step 1 failed") == 1
    hub.fail = None
    send(run, text, f"huggingface repo=a/b save_latest_to=x token_file={tmp_path}/token")
    assert hub.stored["latest.pt"] == (tmp_path / "run/checkpoints/step_00000001.pt").read_bytes()
    assert f"No such file or directory: '{tmp_path}/token'" in capsys.readouterr().out
