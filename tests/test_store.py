"""Loaders and savers: the real clients against a server on loopback, and how they fail."""
import contextlib
import hashlib
import json
import math
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Settings
from servers import needs

from common import checkpoint, store, tracker
from common.config import UserError


def settings(folder="runs", **given):
    return Settings(run_dir=f"{folder}/run", **given)


def model(path, step=3, **more):
    state = {"model": {"w": torch.full((2,), float(step))}, "step": step}
    checkpoint.save({**state, **more}, path)
    return path


def step_of(path):
    return checkpoint.load(path)["step"]


# Loaders

def test_a_path_is_itself_and_so_is_none(tmp_path):
    path = str(model(tmp_path / "with:colon.pt"))
    assert store.fetch(path, tmp_path) == path
    assert store.fetch("", tmp_path) == ""


@pytest.mark.parametrize(
    "address",
    [
        "nothing.pt",
        "http:/x.pt",
        "s3://bucket/x.pt",
        "wandb:abc",
        "wandb:RUN//etc/passwd",
        "wandb:me/shapes/abc//etc/passwd",
        "http://x/../y",
    ],
)
def test_what_is_no_file_and_no_address_is_refused(address, tmp_path):
    with pytest.raises(UserError, match=f"^{address}: .*expected a (file, http|name without)"):
        store.fetch(address, tmp_path)


def test_a_url_is_fetched_again_and_kept_in_a_folder(tmp_path, server):
    folder = tmp_path / "downloads"
    for step in (3, 4):
        server.files["/a/model.pt"] = model(tmp_path / "m.pt", step).read_bytes()
        path = store.fetch(f"{server.url}/a/model.pt", folder)
        assert list(folder.iterdir()) == [Path(path)]
        assert step_of(path) == step


def test_urls_do_not_share_a_file(tmp_path, server):
    server.files = {"/a/x.pt": b"a", "/b/x.pt": b"b", f"/{'x' * 250}?v=1": b"long"}
    paths = [Path(store.fetch(server.url + name, tmp_path)) for name in server.files]
    assert [path.read_bytes() for path in paths] == [b"a", b"b", b"long"]


def test_a_file_with_its_sha256_is_fetched_once_and_no_other_is_taken(tmp_path, server):
    digest = hashlib.sha256(b"right").hexdigest()
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
    with pytest.raises(UserError, match=f"/x.pt.*invalid hash value .expected .{digest}., got "):
        store.fetch(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_or_says_no_or_nothing_is_reported(
        tmp_path, server, monkeypatch):
    with pytest.raises(UserError, match=r"x.pt: .*HTTPError 404"):
        store.fetch(f"{server.url}/x.pt", tmp_path)
    monkeypatch.setattr(store, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/y.pt"
        with pytest.raises(UserError, match=f"{url}: .*timed out"):
            store.fetch(url, tmp_path)
    with pytest.raises(UserError, match=f"{url}: .*refused"):
        store.fetch(url, tmp_path)
    assert socket.getdefaulttimeout() is None  # other connections have no such limit


@pytest.mark.parametrize("limit", ["MAX_DOWNLOAD", "RESERVE"])
def test_a_download_that_does_not_end_is_broken_off_and_leaves_no_file(
        limit, tmp_path, server, monkeypatch):
    most = 10_000_000
    if limit == "RESERVE":  # all but so many bytes of the disk
        monkeypatch.setattr(store, "RESERVE", shutil.disk_usage(tmp_path).free - most)
    else:
        monkeypatch.setattr(store, "MAX_DOWNLOAD", most)
    sent = []

    def without_end(request):
        request.send_response(200)
        request.end_headers()
        request.close_connection = True
        with contextlib.suppress(OSError):
            while len(sent) < 1000:
                request.wfile.write(bytes(2**20))
                sent.append(2**20)

    monkeypatch.setattr(server.http.RequestHandlerClass, "do_GET", without_end)
    with pytest.raises(UserError, match=r"/x\.pt: .*longer than .* bytes, the most that is taken"):
        store.fetch(f"{server.url}/x.pt", tmp_path / "downloads")
    assert len(sent) < 200
    assert list((tmp_path / "downloads").iterdir()) == []


@needs("wandb")
def test_a_file_of_a_wandb_run_is_fetched_by_the_real_client(
        tmp_path, server, monkeypatch, request):
    import wandb
    request.addfinalizer(wandb.teardown)  # the package keeps its environment until then
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    server.files["/ck/latest.pt"] = model(tmp_path / "m.pt").read_bytes()

    path = Path(store.fetch("wandb:me/shapes/abc/ck/latest.pt", tmp_path / "downloads"))
    assert step_of(path) == 3
    assert tmp_path / "downloads" in path.parents
    body = next(body for *_, body in server.asked if b"RunFiles" in body)
    run = json.loads(body)["variables"]
    assert (run["entity"], run["project"], run["name"]) == ("me", "shapes", "abc")
    with pytest.raises(UserError, match=r"wandb:me/shapes/none/latest\.pt: "):
        store.fetch("wandb:me/shapes/none/latest.pt", tmp_path)


ONLY = {"load_only_auto_resume": True}


@pytest.mark.parametrize("saved, given, fetched", [
    ([], {}, ["init", "load"]),
    ([], ONLY, ["init"]),
    (["lost.pt"], {}, ["load"]),
    (["lost.pt"], ONLY, ["load"]),
    (["lost.pt", "kept.pt"], {}, []),
    (["kept.pt"], {"resume": "never"}, ["init", "load"]),
])
def test_files_to_start_from_are_fetched_if_the_run_needs_them(
        saved, given, fetched, tmp_path, server):
    server.files = {"/load": b"load", "/init": b"init"}
    entries = [{"file": file, "step": 1, "sha256": "", "values": {}} for file in saved]
    record = {"checkpoints": entries, "finished": None}
    checkpoint.write_json(record, tmp_path / "run/auto_resume.json")
    (tmp_path / "run/kept.pt").touch()
    urls = {"load": f"{server.url}/load", "init_from": f"{server.url}/init"}
    store.fetch_files(settings(tmp_path, **urls, **given))
    assert sorted(path.removeprefix("/") for _, path, *_ in server.asked) == fetched


# Savers: the command line

@pytest.mark.parametrize("text, message", [
    ("disk save_latest_to=x.pt", "expected one of local, wandb, huggingface.*'disk'"),
    ("local", "expected save_latest_to=PATH"),
    ("local save_lastest_to=x.pt", "unexpected keyword argument 'save_lastest_to'"),
    ("local save_latest_to", "expected one of local"),
    ("local save_latest_to={stp}.pt", "in braces may stand run, step, best_val_loss.*KeyError"),
    ("local save_best_to={step:xyz}.pt", "in braces"),
    ("local save_best_to={step.x}.pt", "in braces"),
    ("local save_best_to={step", "in braces"),
    ("local save_best_to={0}", "in braces"),
    ("local save_latest_to=x.pt kind=weights", "as kind checkpoint or model"),
    ("local 'save_latest_to=x.pt", "No closing quotation"),
    ("huggingface save_latest_to=x.pt", "missing 1 required .* argument: 'repo'"),
    ("wandb save_latest_to=x.pt", "it needs --logger wandb"),
])
def test_a_saver_that_cannot_be_meant_is_refused_with_the_command_line(text, message):
    with pytest.raises(UserError, match=rf"--save.*{message}"):
        tracker.check(settings(save=(text,)))


@pytest.mark.parametrize("path", [
    "{run}/checkpoints/step_{step:08d}.pt",
    "{run}/model.pt",
    "{run}/../run/auto_resume.json",
    "link/best.pt",
])
def test_a_copy_onto_the_runs_own_files_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/run").mkdir(parents=True)
    Path("link").symlink_to("runs/run")
    for event in ("latest", "best", "meta"):
        text = f"local save_latest_to=/x/{{run}} save_{event}_to={path}"
        with pytest.raises(UserError, match=f"--save: {tmp_path}/runs/run/.*the run's own folder"):
            tracker.check(settings(save=(text,)))
    tracker.check(settings(save=("local save_latest_to=copies/{run}/model.pt",)))


@pytest.mark.parametrize("pair", ["step=3", "note", "a b=1"])
def test_metadata_has_names_that_are_not_reserved(pair):
    with pytest.raises(UserError, match=r"--metadata: .*expected NAME=VALUE; reserved names are"):
        tracker.check(settings(metadata=(pair,)))
    cfg = settings(metadata=("fold=3", "note=a=b, c"))
    assert store.metadata(cfg) == {"fold": "3", "note": "a=b, c"}


@pytest.mark.parametrize("given", [
    {"load": "x.pt"},
    {"init_from": "x.pt"},
    {"logger": "wandb id=x"},
    {"save": ("local save_latest_to=/x/{run}.pt save_meta_to=/x",)},
])
def test_stages_trained_in_turn_must_not_share_a_path_or_a_start(given):
    store.check_stages([settings(**given)])
    with pytest.raises(UserError, match=r"a path without {run} in --save are of one stage"):
        store.check_stages([settings(**given)] * 2)
    store.check_stages([settings(save=("local save_latest_to=/x/{run:9}.pt",))] * 2)


# Copies

def entry_of(folder, file, step):
    """An entry of auto_resume.json, and its file."""
    averaged = {"ema": {"w": torch.full((2,), -float(step))}} if "step_" in file else {}
    model(folder / file, step, **averaged)
    values = {"run": "run", "step": step, "best_val_loss": math.inf, "fold": "3"}
    return {"file": file, "step": step, "sha256": "", "values": values}


def run_of(folder, *steps, best=None):
    """A run in `folder` that has saved checkpoints of `steps`, newest first, and a `best` step."""
    folder = folder / "run"
    record = {"checkpoints": [entry_of(folder, f"checkpoints/step_{n:08d}.pt", n) for n in steps]}
    if best:
        record["best"] = entry_of(folder, "best.pt", best)
    checkpoint.write_json({"lr": 1.0}, folder / "config.json")
    return SimpleNamespace(folder=folder, record=record)


def savers_of(folder, *save):
    return store.savers(settings(folder, save=save, metadata=("fold=3",)))


@pytest.mark.parametrize("text, step, weight", [
    ("save_latest_to=", 12, 12.0),
    ("save_best_to=", 8, 8.0),
    ("kind=model save_latest_to=", 12, -12.0),
    ("kind=model save_best_to=", 8, 8.0),  # best.pt holds the averaged weights
])
def test_copies_are_of_the_kind_and_at_the_place_that_is_given(
        text, step, weight, tmp_path, capsys):
    text = f"local {text}{tmp_path}/a/{{run}}_{{fold}}_{{step:04d}}_{{best_val_loss:.3f}}.pt"
    store.send(savers_of(tmp_path, text), run_of(tmp_path, 12, 8, 4, best=8))
    state = checkpoint.load(tmp_path / f"a/run_3_{step:04d}_inf.pt")
    assert state["step"] == step
    assert state["model"]["w"].tolist() == [weight] * 2
    assert ("ema" in state) == ("kind=model" not in text)
    assert capsys.readouterr().out == ""


def test_what_was_sent_is_not_sent_again_and_what_is_new_is(tmp_path):
    latest = tmp_path / "latest"
    best = tmp_path / "best"
    savers = savers_of(tmp_path, f"local save_latest_to={latest} save_best_to={best}")
    for steps, best_step, sent in (
        ((), None, []),  # nothing is saved
        ((4,), 4, [latest, best]),
        ((4,), 4, []),
        ((8, 4), 4, [latest]),
    ):
        store.send(savers, run_of(tmp_path, *steps, best=best_step))
        assert [path for path in (latest, best) if path.exists()] == sent
        for path in sent:
            assert step_of(path) == (steps[0] if path == latest else best_step)
            path.unlink()


def test_a_checkpoint_that_was_saved_again_at_its_step_is_copied_again(tmp_path):
    savers = savers_of(tmp_path, f"local save_latest_to={tmp_path}/x.pt")
    run = run_of(tmp_path, 4)
    store.send(savers, run)
    again = {**run.record["checkpoints"][0], "sha256": "other"}
    run.record["checkpoints"] = [again]
    model(run.folder / again["file"], 4, more=1)
    store.send(savers, run)
    assert checkpoint.load(tmp_path / "x.pt")["more"] == 1


def test_a_copy_of_a_run_read_from_its_folder_that_was_not_evaluated_says_inf(tmp_path):
    run = run_of(tmp_path, 4)
    checkpoint.write_json(run.record, run.folder / "auto_resume.json")
    run.record = checkpoint.record_of(run.folder)
    text = f"local save_latest_to={tmp_path}/{{best_val_loss:.2f}}.pt save_meta_to={tmp_path}/about"
    store.send(savers_of(tmp_path, text), run)
    assert step_of(tmp_path / "inf.pt") == 4
    about = json.loads((tmp_path / "about/metadata.json").read_text())
    assert about["best_val_loss"] is None


def test_a_failure_is_logged_and_tried_again_at_the_next_save_and_the_next_start(
        tmp_path, capsys):
    wall = tmp_path / "wall"
    wall.write_text("a file where a folder should be")
    save = (f"local save_latest_to={wall}/x.pt", f"local save_latest_to={tmp_path}/fine.pt")
    savers = savers_of(tmp_path, *save)
    for step in (1, 2):
        store.send(savers, run_of(tmp_path, step))
        assert f"'{wall}'; the next save or start of this" in capsys.readouterr().out
        assert step_of(tmp_path / "fine.pt") == step
    wall.unlink()
    store.send(savers, run_of(tmp_path, 2))
    assert step_of(wall / "x.pt") == 2
    assert capsys.readouterr().out == ""
    store.resend(settings(tmp_path, save=save), run_of(tmp_path, 5))  # of a finished run
    assert step_of(wall / "x.pt") == 5


@needs("wandb")
def test_wandb_keeps_copies_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = tracker.WandB(id="mine")
    logger.open(settings(tmp_path), {}, 0)
    store.send(savers_of(tmp_path, "wandb save_latest_to=ck/{step}.pt"), run_of(tmp_path, 4))
    logger.finish(None)
    copy, = tmp_path.glob("run/wandb/*-mine*/files/ck/4.pt")
    assert not copy.is_symlink()
    assert step_of(copy) == 4


# Hugging Face

@pytest.fixture
def hub(server, monkeypatch):
    """The server as a Hub, which also says whether it stores a file."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="not installed")
    files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def head(request):
        stored = request.path.partition("/resolve/main/")[2] in server.stored
        request.send_response(200 if stored else 404)
        request.send_header("X-Error-Code", "" if stored else "EntryNotFound")
        request.send_header("Content-Length", "0")
        request.end_headers()
    monkeypatch.setattr(server.http.RequestHandlerClass, "do_HEAD", head, raising=False)
    return server


def test_hugging_face_copies_are_sent_by_the_real_client(tmp_path, hub, capsys):
    (tmp_path / "token").write_text("hf_secret\n")
    text = (f"huggingface repo=me/prior token_file={tmp_path}/token "
            "save_latest_to=ck/{step}.pt save_meta_to=about")
    run = run_of(tmp_path, 12)
    store.send(savers_of(tmp_path, text), run)
    assert capsys.readouterr().out == ""
    assert hub.stored["ck/12.pt"] == (run.folder / "checkpoints/step_00000012.pt").read_bytes()
    about = json.loads(hub.stored["about/metadata.json"])
    assert about == {"run": "run", "step": 12, "best_val_loss": None, "fold": "3"}
    assert json.loads(hub.stored["about/config.json"]) == {"lr": 1.0}
    headers, body = next(asked[2:] for asked in hub.asked if "create" in asked[1])
    created = json.loads(body)
    assert (created["organization"], created["name"]) == ("me", "prior")
    assert created.get("private") or created.get("visibility") == "private"
    assert "Bearer hf_secret" in headers.values()


def test_a_model_card_is_sent_unless_the_repository_has_one(tmp_path, hub):
    text = "huggingface repo=me/prior save_latest_to=x.pt"
    store.send(savers_of(tmp_path, text), run_of(tmp_path, 1))
    assert b"# me/prior" in hub.stored["README.md"]
    hub.stored["README.md"] = b"of the user"
    store.send(savers_of(tmp_path, text), run_of(tmp_path, 2))
    assert hub.stored["README.md"] == b"of the user"


@pytest.mark.parametrize("status", [401, 413])  # a wrong token, a full quota
def test_a_hub_that_refuses_leaves_training_alone(status, tmp_path, hub, capsys):
    savers = savers_of(tmp_path, "huggingface repo=me/prior save_latest_to=latest.pt")
    hub.fail = status
    store.send(savers, run_of(tmp_path, 1))
    assert f"{status}" in capsys.readouterr().out
    hub.fail = None
    store.send(savers, run_of(tmp_path, 1))
    assert "latest.pt" in hub.stored


@pytest.mark.parametrize("text, package, message", [
    ("repo=a/b token_file=nothing", "", "No such file or directory: 'nothing'"),
    ("repo=a/b", "huggingface_hub", "needs huggingface_hub: pip install huggingface_hub"),
])
def test_what_a_saver_lacks_is_named(text, package, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    store.send(savers_of(tmp_path, f"huggingface {text} save_latest_to=x"), run_of(tmp_path, 1))
    assert message in capsys.readouterr().out
