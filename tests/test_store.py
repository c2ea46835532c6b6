"""Loaders and savers: the real clients against a server on loopback, and what happens when it fails them."""
import dataclasses
import hashlib
import json
import math
import pickle
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from servers import needs

from common import checkpoint, config, store, tracker
from common.config import UserError


def settings(folder="runs", **given):
    return config.Training(run=f"{folder}/run", **given)


def model(path, step=3, **more):
    checkpoint.save({"model": {"w": torch.full((2,), 1.0 * step)}, "config": {"lr": 1.0}, "step": step, **more}, path)
    return path


# Addresses

@pytest.mark.parametrize("address", ["ftp://host/x.pt", "http:/x.pt", "https://", "http:x.pt", "s3://bucket/x.pt",
                                     "http://host/x.pt#sha256=12", "https://host/x.pt#md5=1", "wandb:abc", "wandb:/x",
                                     "https:///x.pt", f"https://host/x.pt#sha256={'g' * 64}"])
def test_what_is_not_an_address_is_refused_with_the_command_line(address):
    for name in ("load", "init_from"):
        with pytest.raises(UserError, match=f"--{name}: '.*expected a file, http"):
            store.check(settings(**{name: address}))


@pytest.mark.parametrize("address", ["", "x.pt", "with:colon.pt", "/a/b#c", "C:x", "wandb:run/a/b.pt", "HTTPS://host/x",
                                     f"http://host:80/a/x.pt?b=c#sha256={'0a' * 32}"])
def test_what_is_an_address_is_taken(address):
    store.check(settings(load=address, init_from=address))


def test_a_path_is_itself_and_a_missing_one_is_told(tmp_path):
    path = model(tmp_path / "with:colon.pt")
    assert store.fetch(str(path), tmp_path) == str(path) and store.fetch("", tmp_path) == ""
    with pytest.raises(UserError, match=r"nothing.pt: no such checkpoint"):
        store.fetch(str(tmp_path / "nothing.pt"), tmp_path)


def test_load_only_auto_resume_needs_a_file_and_a_run_to_go_on_with():
    with pytest.raises(UserError, match="--load_only_auto_resume: it needs --load"):
        store.check(settings(load_only_auto_resume=True))
    with pytest.raises(UserError, match=r"--load_only_auto_resume: .* there is nothing to go on with"):
        store.check(settings(load_only_auto_resume=True, load="x.pt", resume="never"))
    store.check(settings(load_only_auto_resume=True, load="x.pt"))


# Fetching

def test_a_url_is_fetched_into_a_folder_and_serves_again_when_it_may(tmp_path, server):
    url, folder = f"{server.url}/a/model.pt", tmp_path / "downloads"
    server.files["/a/model.pt"] = model(tmp_path / "m.pt").read_bytes()
    path = store.fetch(url, folder)
    assert Path(path).parent == folder and path.endswith("model.pt") and checkpoint.load(path)["step"] == 3
    server.files["/a/model.pt"] = model(tmp_path / "m.pt", 4).read_bytes()
    assert store.fetch(url, folder, again=False) == path and checkpoint.load(path)["step"] == 3
    assert store.fetch(url, folder) == path and checkpoint.load(path)["step"] == 4
    assert [*folder.iterdir()] == [Path(path)] and len(server.asked) == 2
    server.files["/b/model.pt"] = model(tmp_path / "m.pt", 5).read_bytes()
    assert checkpoint.load(store.fetch(f"{server.url}/b/model.pt", folder))["step"] == 5
    server.files[long := f"/{'x' * 250}?v=1&w=2"] = b"x"
    assert Path(store.fetch(server.url + long, folder)).read_bytes() == b"x"


def test_the_checksum_is_held_to(tmp_path, server):
    right, folder = model(tmp_path / "m.pt").read_bytes(), tmp_path / "downloads"
    digest = hashlib.sha256(right).hexdigest()
    server.files["/x.pt"], url = right, f"{server.url}/x.pt#sha256={digest}"
    path = store.fetch(url, folder)
    assert store.fetch(url, folder) == store.fetch(url.replace(digest, digest.upper()), folder) == path
    assert len(server.asked) == 1
    Path(path).write_bytes(b"damaged")
    assert Path(store.fetch(url, folder, again=False)).read_bytes() == right
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
    server.asked.clear()
    cfg = tracker.prepare(Adapters(run=f"{tmp_path}/run", lora_rank=4, **given))  # whose base every start needs
    assert Path(cfg.init_from).is_file() and not server.asked  # the same one


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
    ("huggingface repo=a/b save_latest_to=x.pt private=maybe", "true or false"),
    ("wandb save_latest_to=x.pt", "it needs --logger wandb"),
    ("local save_latest_to=x.pt save_best_to=x.pt", "would be written twice")])
def test_a_saver_that_cannot_be_meant_is_refused_with_the_command_line(text, message):
    with pytest.raises(UserError, match=rf"--save.*{message}"):
        store.check(settings(save=(text,)))


@pytest.mark.parametrize("pairs, message", [
    (("step=3",), "'step=3'.*reserved names are model"), (("model=x",), "reserved"), (("note",), "expected NAME=VALUE"),
    (("a b=1",), "expected NAME=VALUE")])
def test_metadata_that_cannot_be_is_refused(pairs, message):
    with pytest.raises(UserError, match=f"--metadata: .*{message}"):
        store.check(settings(metadata=pairs))
    assert store.metadata(settings(metadata=("fold=3", "note=a=b, c", "on=true"))) == {
        "fold": 3, "note": "a=b, c", "on": True}


def test_savers_may_share_names_but_not_places():
    same = ("local save_best_to=x.pt save_meta_to=m", "huggingface repo=a/b save_best_to=x.pt",
            "huggingface repo=a/c save_best_to=x.pt", "local save_latest_to='a b {fold}.pt' save_meta_to=m",
            "wandb save_best_to=x.pt")
    store.check(settings(save=same, metadata=("fold=3",), logger="wandb"))
    assert len(store.savers(settings(save=same, metadata=("fold=3",)))) == 5


def test_stages_trained_in_turn_must_not_share_a_path_or_a_start():
    def cfgs(**given):
        return [settings(**given)] * 2
    with pytest.raises(UserError, match=r"save_latest_to=/x/latest.pt.*put \{run\} into it, which is the stage"):
        store.check_stages(cfgs(save=("local save_latest_to=/x/latest.pt",)))
    for given in ({"load": "x.pt"}, {"init_from": "x.pt"}, {"logger": "wandb id=x"}):
        with pytest.raises(UserError, match="--init_from, --load, id in --logger: each is of one stage"):
            store.check_stages(cfgs(**given))
        store.check_stages(cfgs(**given)[:1])
    with pytest.raises(UserError, match=r"save_meta_to=/x: each stage"):
        store.check_stages(cfgs(save=("local save_latest_to=/x/{run}_latest.pt save_meta_to=/x",)))
    store.check_stages(cfgs(save=("local save_latest_to=/x/{run:>9}.pt", "wandb save_best_to=x"), logger="wandb"))
    store.check_stages(cfgs(save=("local save_latest_to=/x/latest.pt",))[:1])


# Copies

def entry_of(folder, step, file=None):
    """An entry of auto_resume.json, and its file."""
    file = file or f"checkpoints/step_{step:08d}.pt"
    more = {"ema": {"w": torch.full((2,), -1.0 * step)}} if file.startswith("checkpoints") else {}
    model(folder / file, step, **more)
    values = {"run": "run", "step": step, "epoch": 1, "samples_seen": 96, "val_loss": math.nan, "best_val_loss": 0.125}
    return {"file": file, "step": step, "sha256": "", "values": values}


def copies(folder, *save, steps=(), best=None, start=None, **given):
    """Copies of a run in `folder`, which has saved checkpoints of `steps`, newest first, and a `best` step."""
    run = SimpleNamespace(folder=folder / "run", record={"checkpoints": [entry_of(folder / "run", s) for s in steps]})
    if best is not None:
        run.record["best"] = entry_of(run.folder, best, "best.pt")
    checkpoint.write_json({"lr": 1.0}, run.folder / "config.json")
    return store.Copies(run, settings(folder, save=save, **given), start)


def test_copies_are_of_the_kind_and_at_the_place_that_is_given(tmp_path, capsys):
    box = copies(tmp_path, f"local save_latest_to={tmp_path}/a/{{run}}_{{step:04d}}_{{epoch}}.pt",
                 f"local kind=model save_best_to={tmp_path}/b/{{best_val_loss:.3f}}.pt "
                 f"save_latest_to={tmp_path}/b/l.pt",
                 f"local save_best_to={tmp_path}/c/best_{{step}}.pt", steps=(12, 8, 4), best=8)
    box.deliver()
    run = tmp_path / "run"
    assert (tmp_path / "a/run_0012_1.pt").read_bytes() == (run / "checkpoints/step_00000012.pt").read_bytes()
    assert (tmp_path / "b/0.125.pt").read_bytes() == (run / "best.pt").read_bytes()
    assert (tmp_path / "c/best_8.pt").read_bytes() == (run / "checkpoints/step_00000008.pt").read_bytes()
    latest = checkpoint.load(tmp_path / "b/l.pt")
    assert latest["step"] == 12 and "ema" not in latest and latest["model"]["w"].tolist() == [-12.0, -12.0]
    assert capsys.readouterr().out == "" and not (run / "sending.pt").exists()
    assert sorted(path.name for folder in "abc" for path in (tmp_path / folder).iterdir()) == [
        "0.125.pt", "best_8.pt", "l.pt", "run_0012_1.pt"]


def test_metadata_alone_goes_at_the_start_and_with_each_save(tmp_path):
    start = {"step": 0, "values": {**entry_of(tmp_path / "run", 1)["values"], "step": 0, "fold": 3}}
    text = f"local save_meta_to={tmp_path}/about"
    box = copies(tmp_path, text, start=start, metadata=("fold=3",))
    box.deliver()
    about = json.loads((tmp_path / "about/metadata.json").read_text())
    assert about == {**start["values"], "val_loss": None} and about["fold"] == 3
    assert (tmp_path / "about/config.json").read_bytes() == (tmp_path / "run/config.json").read_bytes()
    box.run.record["checkpoints"] = [entry_of(tmp_path / "run", 4)]
    box.deliver()
    assert json.loads((tmp_path / "about/metadata.json").read_text())["step"] == 4
    assert [*copies(tmp_path, text, steps=(4,)).rest()] == []


def test_what_was_sent_is_not_sent_again_and_what_is_new_is(tmp_path):
    text = f"local save_latest_to={tmp_path}/latest.pt save_best_to={tmp_path}/best.pt"
    copies(tmp_path, text, steps=(4,), best=4).deliver()
    assert json.loads((tmp_path / "run/sent.json").read_text()) == {text: {"latest": 4, "best": 4}}
    (tmp_path / "latest.pt").unlink()
    box = copies(tmp_path, text, steps=(4,), best=4)
    box.deliver()
    assert not (tmp_path / "latest.pt").exists() and [*box.rest()] == []
    box = copies(tmp_path, text, steps=(8, 4), best=4)
    assert [(event, entry["step"]) for _, event, entry in box.rest()] == [("latest", 8)]
    assert [event for _, event, _ in copies(tmp_path, text + " kind=model", steps=(8,), best=4).rest()] == [
        "latest", "best"]
    box = copies(tmp_path, text + "x", steps=(8,), best=4)  # whose checkpoint of the best is gone
    assert [event for _, event, _ in box.rest()] == ["latest"]
    (tmp_path / "run/sent.json").unlink()
    assert [*copies(tmp_path, text).rest()] == []  # nothing is saved yet
    copies(tmp_path, steps=(1,), best=1).deliver()  # no savers
    assert not (tmp_path / "run/sent.json").exists()


def test_a_failure_is_told_once_and_tried_again_at_the_next_save(tmp_path, capsys):
    (tmp_path / "wall").write_text("a file where a folder should be")
    box = copies(tmp_path, f"local save_latest_to={tmp_path}/wall/{{step}}.pt save_best_to={tmp_path}/wall/b.pt",
                 f"local save_latest_to={tmp_path}/fine.pt", steps=(1,), best=1)
    for step in (1, 2):
        box.run.record["checkpoints"].insert(0, entry_of(box.run.folder, step))
        box.send()
        box.job.result()
    out = capsys.readouterr().out
    assert out.count("failed") == 1 and "the copy of step 1 failed" in out and f"{tmp_path}/wall" in out
    assert out.strip().endswith("training goes on, the next save tries again")
    assert checkpoint.load(tmp_path / "fine.pt")["step"] == 2 and not (tmp_path / "run/sending.pt").exists()
    (tmp_path / "wall").unlink()
    box.run.record["checkpoints"].insert(0, entry_of(box.run.folder, 3))
    box.deliver()
    assert {path.name for path in (tmp_path / "wall").iterdir()} == {"3.pt", "b.pt"}  # 2 was superseded
    assert capsys.readouterr().out == ""


def test_what_could_not_be_sent_is_told_at_the_end_and_sent_at_the_next_start_of_the_finished_run(tmp_path, capsys):
    (tmp_path / "wall").write_text("")
    text = f"local save_latest_to={tmp_path}/wall/x.pt"
    box = copies(tmp_path, text, steps=(4,))
    box.deliver()
    assert "the latest copy is not sent; the next start of this run tries again" in capsys.readouterr().out
    (tmp_path / "wall").unlink()
    tracker.resend(settings(tmp_path, save=(text,)), box.run)
    assert checkpoint.load(tmp_path / "wall/x.pt")["step"] == 4 and capsys.readouterr().out == ""


def test_a_file_that_is_dropped_while_it_is_sent_is_sent_whole_and_training_does_not_wait(tmp_path):
    box = copies(tmp_path, f"local save_latest_to={tmp_path}/copies/{{step}}.pt", steps=(1,))
    begun, gate, put = threading.Event(), threading.Event(), box.savers[0].put

    def slow(file, name):
        begun.set()
        assert gate.wait(20)
        put(file, name)
    box.savers[0].put = slow
    box.send()
    assert begun.wait(20)
    for step in (2, 3):  # of which the second takes the place of the first
        (tmp_path / f"run/checkpoints/step_{step - 1:08d}.pt").unlink()
        box.run.record["checkpoints"] = [entry_of(box.run.folder, step)]
        box.send()
    box.deliver(0.01)  # which waits no longer than that
    assert not (tmp_path / "copies").exists()
    gate.set()
    box.deliver()
    assert {path.name: checkpoint.load(path)["step"] for path in (tmp_path / "copies").iterdir()} == {
        "1.pt": 1, "3.pt": 3}


@needs("wandb")
@needs("PIL")
def test_wandb_keeps_copies_with_the_run_also_of_a_finished_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    text = "wandb save_latest_to=ck/{step}.pt"
    box = copies(tmp_path, text, steps=(4,), logger="wandb")
    log = tracker.WandB(box.savers[0].cfg, {"id": "mine"}, {}, 0, 0)
    checkpoint.write_json({**box.run.record, "logger": {"kind": "wandb", **log.identity}},
                          tmp_path / "run/auto_resume.json")
    box.deliver()
    log.finish(0)
    box.run.record["checkpoints"].insert(0, entry_of(box.run.folder, 8))
    box.deliver()
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


@pytest.mark.parametrize("private", [True, False])
def test_hugging_face_copies_are_sent_by_the_real_client(private, tmp_path, hub, capsys):
    (tmp_path / "token").write_text("hf_secret\n")
    text = f"huggingface repo=me/prior token_file={tmp_path}/token save_latest_to=ck/{{step}}.pt save_meta_to=about"
    copies(tmp_path, text + " private=false" * (not private), steps=(12,)).deliver()
    assert capsys.readouterr().out == ""
    assert hub.stored["ck/12.pt"] == (tmp_path / "run/checkpoints/step_00000012.pt").read_bytes()
    assert json.loads(hub.stored["about/metadata.json"])["step"] == 12 and b"lr" in hub.stored["about/config.json"]
    made, headers = next((json.loads(body), headers) for _, path, headers, body in hub.asked if "create" in path)
    assert made["name"] == "prior" and made["organization"] == "me"
    assert (made.get("private") is True or made.get("visibility") == "private") == private
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer hf_secret"


def test_a_wrong_token_and_a_full_quota_leave_training_alone(tmp_path, hub, capsys):
    box = copies(tmp_path, "huggingface repo=me/prior save_latest_to=latest.pt", steps=(1,))
    for status in (401, 413):
        hub.fail = status
        box.send()
        box.job.result()
    assert "401" in (out := capsys.readouterr().out) and out.count("the copy of step 1 failed") in (1, 2)
    hub.fail = None
    box.deliver()
    assert hub.stored["latest.pt"] == (tmp_path / "run/checkpoints/step_00000001.pt").read_bytes()
    copies(tmp_path, f"huggingface repo=a/b save_latest_to=x token_file={tmp_path}/token", steps=(1,)).deliver()
    assert f"No such file or directory: '{tmp_path}/token'" in capsys.readouterr().out
