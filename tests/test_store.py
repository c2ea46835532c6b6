"""Downloads and uploads: the real clients with a server on loopback, and their failures."""
import hashlib
import json
import math
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Settings
from servers import needs

from common import checkpoint, config, tracker
from common.config import UserError
from common.interop import store


def settings(*save, logger="console"):
    return SimpleNamespace(run_dir="/runs/run", save=save, logger=logger)


def savers_of(*save):
    return store.savers(settings(*save))


def model(path, step=3, **more):
    contents = {"model": {"w": torch.full((2,), float(step))}, "step": step, "config": {}}
    checkpoint.save(contents | more, path)
    return path


def step_of(path):
    return checkpoint.load(path)["step"]


# Loaders

@pytest.mark.parametrize("address, reason", {
    "nothing.pt": "unknown url type",
    "s3://bucket/x.pt": "unknown url type: s3",
    "wandb:RUN//etc/passwd": "unknown url type: wandb",
    "wandb:E/P/R/a/../../../b.pt": "the path leads out of its folder",
    r"wandb:E/P/R/..\b.pt": "the path leads out of its folder",
    "http://host/../b.pt": "the path leads out of its folder",
}.items())
def test_what_is_no_file_and_no_address_is_refused(address, reason, tmp_path):
    message = f"^{re.escape(address)}: expected a file, http.*{reason}"
    with pytest.raises(UserError, match=message):
        store.fetch(address, tmp_path)


def test_urls_are_fetched_again_and_do_not_share_a_file(tmp_path, server):
    server.files = {"/a/x.pt": b"a", "/b/x.pt": b"b", f"/{'x' * 250}?v=1": b"long"}
    paths = [Path(store.fetch(server.url + name, tmp_path / "new")) for name in server.files]
    assert [path.read_bytes() for path in paths] == [b"a", b"b", b"long"]
    server.files["/a/x.pt"] = b"later"
    store.fetch(f"{server.url}/a/x.pt", tmp_path / "new")
    assert paths[0].read_bytes() == b"later"
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)


def test_a_file_with_its_sha256_is_fetched_once_and_no_other_is_taken(tmp_path, server):
    digest = hashlib.sha256(b"right").hexdigest()[:12]
    url = f"{server.url}/x.pt#sha256={digest}"
    server.files["/x.pt"] = b"right"
    path = Path(store.fetch(url, tmp_path))
    assert store.fetch(url, tmp_path) == str(path)
    assert len(server.asked) == 1

    path.write_bytes(b"damaged")
    store.fetch(url, tmp_path)
    assert path.read_bytes() == b"right"

    path.unlink()
    server.files["/x.pt"] = b"another"
    with pytest.raises(UserError, match=f"/x.pt.*invalid hash value .expected .{digest}"):
        store.fetch(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_says_no_or_nothing_is_reported(tmp_path, server, monkeypatch):
    with pytest.raises(UserError, match=r"x.pt: .*HTTP Error 404"):
        store.fetch(f"{server.url}/x.pt", tmp_path)
    monkeypatch.setattr(store, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/y.pt"
        with pytest.raises(UserError, match=f"{url}: .*timed out"):
            store.fetch(url, tmp_path)
    assert socket.getdefaulttimeout() is None  # other connections get no timeout


@needs("wandb")
def test_a_file_of_a_wandb_run_is_fetched_by_the_real_client(
        tmp_path, server, monkeypatch, request):
    import wandb
    request.addfinalizer(wandb.teardown)  # otherwise wandb keeps this environment
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    server.files["/ck/latest.pt"] = model(tmp_path / "m.pt").read_bytes()

    path = Path(store.fetch("wandb:me/shapes/abc/ck/latest.pt", tmp_path / "downloads"))
    assert step_of(path) == 3
    assert tmp_path / "downloads" in path.parents
    body = next(body for *_, body in server.asked if b"RunFiles" in body)
    run = json.loads(body)["variables"]
    assert (run["entity"], run["project"], run["name"]) == ("me", "shapes", "abc")


# Savers: the command line

@pytest.mark.parametrize("text, message", [
    ("local", "expected save_latest_to=PATH"),
    ("local save_latest_to={stp}.pt", "paths may have run, .*KeyError"),
    ("local save_latest_to={step:02000000000d}.pt", "paths may have run, step, best_val_loss in"),
    ("local save_latest_to=x.pt kind=weights", "kind=checkpoint or kind=model"),
    ("huggingface save_latest_to=x.pt", "missing a required argument: 'repo'"),
    ("wandb save_latest_to=x.pt", "give --logger wandb"),
])
def test_a_saver_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(UserError, match=rf"--save.*{message}"):
        tracker.check(settings(text))


# Copies

def run_of(folder, latest=None, best=None):
    """A run in `folder` with a checkpoint of step `latest`, and best.pt of step `best`."""
    folder = folder / "run"
    checkpoints = []
    best_entry = {}
    if latest:
        averaged = {"w": torch.full((2,), -float(latest))}
        model(folder / "checkpoints/x.pt", latest, ema=averaged)
        checkpoints = [{"file": "checkpoints/x.pt", "step": latest}]
    if best:
        model(folder / "best.pt", best)
        best_entry = {"file": "best.pt", "step": best}
    checkpoint.write_json({"lr": 1.0}, folder / "config.json")
    return SimpleNamespace(
        folder=folder, checkpoints=checkpoints, best=best_entry, best_val_loss=math.inf)


@pytest.mark.parametrize("text, step, weight", [
    ("save_latest_to=", 12, 12.0),
    ("kind=model save_latest_to=", 12, -12.0),
    ("save_best_to=", 8, 8.0),  # best.pt holds the averaged weights
])
def test_copies_are_of_the_kind_and_at_the_place_that_is_given(
        text, step, weight, tmp_path, capsys):
    text = f"local {text}{tmp_path}/copies/{{step:04d}}_{{best_val_loss:.3f}}.pt"
    store.send(savers_of(text), run_of(tmp_path, 12, best=8))
    contents = checkpoint.load(tmp_path / f"copies/{step:04d}_inf.pt")
    assert contents["step"] == step
    assert contents["model"]["w"].tolist() == [weight] * 2
    assert ("ema" in contents) == (weight == 12)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", [
    "local save_latest_to={0}/a,b/x.pt, local save_latest_to={0}/c.pt",
    "local save_latest_to={0}/a,b/x.pt,local save_latest_to={0}/c.pt",
])
def test_a_comma_between_savers_is_none_in_a_path(text, tmp_path):
    cfg = config.parse(Settings, ["--save", text.format(tmp_path)])
    store.send(store.savers(cfg), run_of(tmp_path, 3))
    assert step_of(tmp_path / "a,b/x.pt") == step_of(tmp_path / "c.pt") == 3


def test_what_was_sent_is_not_sent_again_and_what_is_new_is(tmp_path):
    latest = tmp_path / "latest"
    best = tmp_path / "best"
    savers = savers_of(f"local save_latest_to={latest} save_best_to={best}")
    for steps, sent in (
        ((None, None), {}),  # nothing is saved yet
        ((4, 4), {latest: 4, best: 4}),
        ((4, 4), {}),
        ((8, 4), {latest: 8}),
    ):
        store.send(savers, run_of(tmp_path, *steps))
        assert {path: step_of(path) for path in (latest, best) if path.exists()} == sent
        for path in sent:
            path.unlink()


def test_metadata_is_sent_again_when_a_checkpoint_proves_the_best(tmp_path):
    savers = savers_of(f"local save_meta_to={tmp_path}/about")
    for best, loss in ((8, 0.5), (12, 0.25)):
        run = run_of(tmp_path, 12, best)
        run.best_val_loss = loss
        store.send(savers, run)
        assert json.loads((tmp_path / "about/metadata.json").read_text())["best_val_loss"] == loss


def test_a_failure_is_printed_and_tried_again_at_the_next_save(tmp_path, capsys):
    wall = tmp_path / "wall"
    wall.write_text("a file where a folder should be")
    fine = tmp_path / "fine.pt"
    savers = savers_of(f"local save_latest_to={wall}/x.pt", f"local save_latest_to={fine}")
    for step in (1, 2):
        store.send(savers, run_of(tmp_path, step))
        assert f"'{wall}'; it is retried at the next save" in capsys.readouterr().out
        assert step_of(fine) == step
    wall.unlink()
    store.send(savers, run_of(tmp_path, 2))
    assert step_of(wall / "x.pt") == 2
    assert capsys.readouterr().out == ""


@needs("wandb")
def test_wandb_keeps_copies_with_the_run(tmp_path):
    import wandb
    wandb.init(mode="offline", dir=tmp_path, id="mine")
    savers = store.savers(settings("wandb save_latest_to=ck/{step}.pt", logger="wandb"))
    store.send(savers, run_of(tmp_path, 4))
    wandb.finish()
    copy, = tmp_path.glob("wandb/*-mine*/files/ck/4.pt")
    assert not copy.is_symlink()
    assert step_of(copy) == 4
    started = time.monotonic()
    store.send_missing(savers, run_of(tmp_path, 8), minutes=1)  # wandb's run is closed
    assert time.monotonic() - started < 1
    assert step_of(copy) == 4


def test_hugging_face_copies_are_sent_by_the_real_client(tmp_path, server, monkeypatch, capsys):
    constants = pytest.importorskip("huggingface_hub.constants")
    files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    (tmp_path / "token").write_text("hf_secret\n")
    text = (f"huggingface repo=me/prior token_file={tmp_path}/token "
            "save_latest_to=ck/{step}.pt save_meta_to=about")
    savers = savers_of(text)
    run = run_of(tmp_path, 12)
    store.send(savers, run)
    assert capsys.readouterr().out == ""
    stored = server.stored
    assert stored["ck/12.pt"] == (run.folder / "checkpoints/x.pt").read_bytes()
    about = json.loads(stored["about/metadata.json"])
    name = run.folder.as_posix()[1:]
    assert about == {"run": name, "step": 12, "best_val_loss": None}
    assert json.loads(stored["about/config.json"]) == {"lr": 1.0}
    headers, body = next(asked[2:] for asked in server.asked if "create" in asked[1])
    created = json.loads(body)
    assert created.get("private") or created.get("visibility") == "private"
    assert "Bearer hf_secret" in headers.values()

    assert b"# me/prior" in stored["README.md"]  # a model card is added if there is none
    stored["README.md"] = b"of the user"
    store.send(savers, run_of(tmp_path, 13))
    assert stored["README.md"] == b"of the user"
