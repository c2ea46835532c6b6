"""Loaders and savers: the real clients against a server on loopback, and what happens when it fails them."""
import concurrent.futures
import hashlib
import json
import pickle
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from servers import needs

import train_decoder
import train_prior
from common import checkpoint, store
from common.config import UserError


def settings(folder, **given):
    return train_prior.Config(run=str(folder / "run"), **given)


def content(size=200_000, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
                         ).numpy().tobytes()


def model(folder, name="model.pt"):
    checkpoint.save({"model": {"w": torch.arange(6.).view(2, 3)}, "config": {"lr": 1.0}, "step": 3}, folder / name)
    return folder / name


# Addresses

@pytest.mark.parametrize("address", ["ftp://host/x.pt", "http:/x.pt", "https://", "http:x.pt", "s3://bucket/x.pt",
                                     "http://host/x.pt#sha256=12", "https://host/x.pt#md5=1", "wandb:abc", "wandb:/x"])
def test_what_is_not_an_address_is_refused_with_the_command_line(address):
    with pytest.raises(UserError, match=r"--load: .*expected"):
        train_prior.Config(load=address)
    with pytest.raises(UserError, match=r"--init_from: .*expected"):
        train_decoder.Config(init_from=address)


def test_a_path_is_itself_and_a_missing_one_is_told(tmp_path):
    cfg, path = settings(tmp_path), model(tmp_path, "with:colon.pt")
    assert store.fetch(str(path), cfg) == str(path) and store.fetch("", cfg) == ""
    with pytest.raises(UserError, match=r"nothing.pt: no such checkpoint"):
        store.fetch(str(tmp_path / "nothing.pt"), cfg)


# URLs

def test_a_url_is_fetched_once_and_again_when_it_has_changed(tmp_path, server):
    cfg, url = settings(tmp_path), f"{server.url}/a/model.pt"
    server.files["/a/model.pt"] = model(tmp_path).read_bytes()
    path = store.fetch(url, cfg)
    assert Path(path).parent == tmp_path / "downloads" and checkpoint.load(path)["step"] == 3
    assert store.fetch(url, cfg) == path and server.asked[-1][2]["If-None-Match"]
    assert Path(path).read_bytes() == server.files["/a/model.pt"]
    server.files["/a/model.pt"] = content()
    assert Path(store.fetch(url, cfg)).read_bytes() == content()
    assert sorted(p.suffix for p in Path(path).parent.iterdir()) == [".lock", ".pt", ".version"]


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path, server):
    cfg, url = settings(tmp_path), f"{server.url}/x.pt"
    server.files["/x.pt"], server.cut = content(), 70_000
    path = store.fetch(url, cfg)  # three pieces, of one start
    ranges = [headers.get("Range") for _, _, headers, _ in server.asked]
    assert Path(path).read_bytes() == content() and ranges == [None, "bytes=70000-", "bytes=140000-"]


def test_a_later_start_goes_on_too_unless_the_file_has_changed(tmp_path, server):
    cfg, url = settings(tmp_path), f"{server.url}/x.pt"
    server.files["/x.pt"], server.cut = content(), 20_000
    with pytest.raises(UserError, match=r"x.pt: broke off after 100,000 of 200,000 bytes; what has come is kept"):
        store.fetch(url, cfg)
    server.cut = None
    assert Path(store.fetch(url, cfg)).read_bytes() == content()
    assert server.asked[-1][2]["Range"] == "bytes=100000-"
    server.cut, server.files["/x.pt"] = 20_000, content(seed=1)
    assert Path(store.fetch(url, cfg)).read_bytes() == content()  # what there is, if the newer one cannot be had
    server.cut, server.files["/x.pt"] = None, content(seed=2)
    assert Path(store.fetch(url, cfg)).read_bytes() == content(seed=2)  # and not a mixture of two


def test_the_checksum_is_held_to(tmp_path, server):
    cfg, digest = settings(tmp_path), hashlib.sha256(content()).hexdigest()
    server.files["/x.pt"] = content()
    path = store.fetch(f"{server.url}/x.pt#sha256={digest}", cfg)
    count = len(server.asked)
    assert store.fetch(f"{server.url}/x.pt#sha256={digest}", cfg) == path and len(server.asked) == count
    server.files["/x.pt"] = content(seed=1)
    Path(path).write_bytes(b"damaged")
    with pytest.raises(UserError, match=rf"its sha256 is [0-9a-f]+, not {digest}"):
        store.fetch(f"{server.url}/x.pt#sha256={digest}", cfg)
    assert not Path(path).exists()


def test_a_file_above_the_limit_is_refused_and_not_kept(tmp_path, server):
    cfg = settings(tmp_path, load_max_gb=0.0001)
    server.files["/x.pt"] = content()
    with pytest.raises(UserError, match=r"0.0002 GB; raise --load_max_gb, which is 0.0001"):
        store.fetch(f"{server.url}/x.pt", cfg)
    assert [path.suffix for path in (tmp_path / "downloads").iterdir()] == [".lock"]


@pytest.mark.parametrize("status, asked", [(404, 1), (403, 1), (500, store.ATTEMPTS), (429, store.ATTEMPTS)])
def test_what_a_server_refuses_is_told_with_its_reason(status, asked, tmp_path, server):
    server.fail = status
    with pytest.raises(UserError, match=f"/x.pt: {status}"):
        store.fetch(f"{server.url}/x.pt", settings(tmp_path))
    assert len(server.asked) == asked


def test_a_download_killed_before_its_last_move_is_whole(tmp_path, server):
    cfg, url = settings(tmp_path), f"{server.url}/x.pt"
    server.files["/x.pt"] = content()
    path = Path(store.fetch(url, cfg))
    path.rename(f"{path}.part")
    assert store.fetch(url, cfg) == str(path) and path.read_bytes() == content()
    count = len(server.asked)
    assert server.asked[-1][2]["Range"] == "bytes=200000-"
    assert store.fetch(url, cfg, again=False) == str(path) and len(server.asked) == count


def test_no_server_is_told_and_a_copy_of_before_does(tmp_path, server, capsys):
    cfg, url = settings(tmp_path), f"{server.url}/x.pt"
    server.files["/x.pt"] = content()
    path = store.fetch(url, cfg)
    server.http.shutdown()
    server.http.server_close()
    assert store.fetch(url, cfg) == path and f"using the copy {path}" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"http://127.0.0.1:{port}/y.pt: .*refused"):
        store.fetch(f"http://127.0.0.1:{port}/y.pt", cfg)


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_nothing_in_a_download_is_executed(tmp_path, server, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, bad in (("plain", pickle.dumps({"model": Trap()})), ("torch", None)):
        if bad is None:
            torch.save({"model": Trap()}, tmp_path / "trap.pt")
            bad = (tmp_path / "trap.pt").read_bytes()
        server.files[f"/{name}.pt"] = bad
        with pytest.raises(UserError, match="not a checkpoint of this program"):
            checkpoint.load(store.fetch(f"{server.url}/{name}.pt", settings(tmp_path)))
    assert not (tmp_path / "executed").exists()


# Weights & Biases

@needs("wandb")
def test_a_file_of_a_wandb_run_is_fetched_by_the_real_client(tmp_path, server, monkeypatch, request):
    import wandb
    request.addfinalizer(wandb.teardown)  # the package keeps what it finds in the environment until then
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    server.files["/latest.pt"] = model(tmp_path).read_bytes()
    cfg = settings(tmp_path, wandb_project="shapes", wandb_entity="me")
    path = store.fetch("wandb:abc/latest.pt", cfg)
    assert checkpoint.load(path)["step"] == 3
    asked = [json.loads(body)["variables"] for _, path, _, body in server.asked if path == "/graphql" and b"RunFiles"
             in body]
    assert asked and asked[0]["project"] == "shapes" and asked[0]["entity"] == "me" and asked[0]["name"] == "abc"
    for address in ("wandb:abc/other.pt", "wandb:none/latest.pt"):
        with pytest.raises(UserError, match=f"{address}: no such file in me/shapes"):
            store.fetch(address, cfg)
    with pytest.raises(UserError, match="raise --load_max_gb"):
        store.fetch("wandb:abc/latest.pt", settings(tmp_path, wandb_entity="me", load_max_gb=1e-9))


# Savers: the command line

@pytest.mark.parametrize("text, message", [
    ("disk save_latest_to=x.pt", "expected one of local, wandb, huggingface"),
    ("local", "no target; give save_latest_to=PATH"), ("local save_meta_to=x", "no target"),
    ("local save_lastest_to=x.pt", "did you mean save_latest_to"), ("local save_latest_to", "expected NAME=VALUE"),
    ("local save_latest_to={stp}.pt", "KeyError.*in braces may stand run, step, epoch, samples_seen"),
    ("local save_best_to={step:xyz}.pt", "format"), ("local save_best_to={}.pt", "in braces"),
    ("local save_best_to={step.x}.pt", "in braces"), ("local save_best_to={step", "in braces"),
    ("local save_latest_to=x.pt save_meta_to={nope}", "save_meta_to=.*nope"),
    ("local save_latest_to=x.pt kind=weights", "expected checkpoint or model"),
    ("local save_latest_to=x.safetensors", "give kind=model"), ("local 'save_latest_to=x.pt", "No closing quotation"),
    ("huggingface save_latest_to=x.pt", "repo=OWNER/NAME"), ("huggingface repo=x save_latest_to=x.pt", "repo=OWNER"),
    ("huggingface repo=a/b save_latest_to=x.pt private=maybe", "true or false"),
    ("wandb save_latest_to=x.pt", "it needs --logger wandb"),
    ("local save_latest_to=x.pt save_best_to=x.pt", "x.pt would be written twice"),
    ("huggingface repo=a/b save_latest_to=/x.pt", "expected a name within"),
    ("huggingface repo=a/b save_latest_to=a/../../x.pt", "expected a name within")])
def test_a_saver_that_cannot_be_meant_is_refused_with_the_command_line(text, message):
    with pytest.raises(UserError, match=rf"--save.*{message}"):
        train_prior.Config(save=(text,))


@pytest.mark.parametrize("pairs, message", [
    (("step=3",), "'step' is reserved, as are"), (("model=x",), "reserved"), (("note",), "expected NAME=VALUE"),
    (("a b=1",), "expected NAME=VALUE")])
def test_metadata_that_cannot_be_is_refused(pairs, message):
    with pytest.raises(UserError, match=f"--metadata: .*{message}"):
        train_prior.Config(metadata=pairs)
    assert store.metadata(train_prior.Config(metadata=("fold=3", "note=a=b, c", "on=true"))) == {
        "fold": 3, "note": "a=b, c", "on": True}


def test_stages_trained_in_turn_must_not_share_a_path_or_a_start():
    def cfgs(**given):
        return [train_decoder.Config(stage=stage, **given) for stage in ("base", "upsample")]
    with pytest.raises(UserError, match=r"put \{run\} into it, which is the stage"):
        store.check_stages(cfgs(save=("local save_latest_to=/x/latest.pt",)))
    with pytest.raises(UserError, match="--init_from, --load: a file is of one stage"):
        store.check_stages(cfgs(load="x.pt"))
    with pytest.raises(UserError, match=r"save_meta_to=/x: each stage"):
        store.check_stages(cfgs(save=("local save_latest_to=/x/{run}_latest.pt save_meta_to=/x",)))
    store.check_stages(cfgs(save=("local save_latest_to=/x/{run}_latest.pt save_meta_to=/x/{run}",)))
    same_name = ("local save_best_to=x.pt", "huggingface repo=a/b save_best_to=x.pt",
                 "huggingface repo=a/c save_best_to=x.pt")
    assert len(store.savers(train_prior.Config(save=same_name))) == 3
    store.check_stages(cfgs(save=("local save_latest_to=/x/latest.pt",))[:1])


@pytest.mark.parametrize("saver, package", [("huggingface repo=a/b save_latest_to=x.pt", "huggingface_hub"),
                                            ("wandb save_latest_to=x.pt", "wandb"),
                                            ("local kind=model save_best_to=x.safetensors", "safetensors")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(saver, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.torch", None)
    with pytest.raises(UserError, match=f"needs {package}: pip install {package}"):
        store.savers(train_prior.Config(save=(saver,), logger="wandb"))[0].ready(None)


def test_a_missing_token_file_is_told(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    with pytest.raises(UserError, match="token: No such file"):
        store.savers(settings(tmp_path, save=(f"huggingface repo=a/b save_best_to=x token_file={tmp_path}/token",)))[
            0].ready(None)


# Savers: copies

VALUES = {"run": "run", "step": 12, "epoch": 1, "samples_seen": 96, "val_loss": 0.25, "best_val_loss": 0.125}
ABOUT = {"config.json": "{}\n", "metadata.json": '{"step": 12}\n'}
WRITTEN = concurrent.futures.Future()
WRITTEN.set_result(None)


def outbox(folder, *save, **given):
    said = []
    savers = store.savers(settings(folder, save=save, **given))
    for saver in savers:
        saver.ready(None)
    return store.Outbox(folder / "run", savers, said.append), said


def test_local_copies_are_of_the_kind_and_at_the_place_asked_for(tmp_path):
    latest, best = f"local save_latest_to={tmp_path}/a/{{run}}_{{step:04d}}_{{epoch}}.pt save_meta_to={tmp_path}/a", \
        f"local kind=model save_best_to={tmp_path}/b/{{best_val_loss:.3f}}.pt"
    box, said = outbox(tmp_path, latest, best)
    assert box.kinds("latest") == {"checkpoint"} and box.kinds("best") == {"model"}
    file = model(tmp_path, "state.pt")
    box.post(WRITTEN, "latest", "checkpoint", file, VALUES, ABOUT)
    box.post(WRITTEN, "best", "model", file, VALUES, ABOUT)
    box.post(WRITTEN, "best", "checkpoint", file, VALUES, ABOUT)  # which nobody wants
    box.finish()
    assert said == [] and file.exists() and not box.folder.exists()
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for d in "ab" for path in (tmp_path / d).iterdir()}
    assert found == {"a/run_0012_1.pt": file.read_bytes(), "b/0.125.pt": file.read_bytes(),
                     **{f"a/{name}": text.encode() for name, text in ABOUT.items()}}


@needs("safetensors")
def test_a_model_as_safetensors_reads_back_with_the_package_and_without_pickle(tmp_path):
    from safetensors.torch import load_file
    box, said = outbox(tmp_path, f"local kind=model save_latest_to={tmp_path}/x.safetensors")
    file = model(tmp_path)
    box.post(WRITTEN, "latest", "model", file, VALUES, ABOUT, passing=True)
    box.finish()
    assert said == [] and not file.exists()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], torch.arange(6.).view(2, 3))
    state = checkpoint.load(tmp_path / "x.safetensors")
    assert state["config"] == {"lr": 1.0} and state["step"] == 3 and torch.equal(state["model"]["w"],
                                                                                torch.arange(6.).view(2, 3))
    (tmp_path / "y.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-8])
    with pytest.raises(UserError, match=r"y.safetensors: not a safetensors file, or damaged"):
        checkpoint.load(tmp_path / "y.safetensors")


def test_a_file_that_changes_or_goes_after_it_was_posted_is_sent_as_it_was(tmp_path):
    box, said = outbox(tmp_path, f"local save_latest_to={tmp_path}/copies/{{step}}.pt")
    gate = threading.Event()
    put, box.savers[0].put = box.savers[0].put, lambda *a: (gate.wait(20), put(*a))
    for step in (1, 2, 3):  # the first is under way while the second waits, in whose place the third comes
        file = model(tmp_path, "state.pt")
        checkpoint.save({"model": {}, "step": step}, file)
        box.post(WRITTEN, "latest", "checkpoint", file, {**VALUES, "step": step}, ABOUT)
        while step == 1 and box.waiting:
            pass
    file.unlink()
    gate.set()
    box.finish()
    assert {path.name: checkpoint.load(path)["step"] for path in (tmp_path / "copies").iterdir()} == {
        "1.pt": 1, "3.pt": 3} and said == []


def test_a_failure_is_told_once_and_tried_again_at_the_next_save(tmp_path):
    (tmp_path / "wall").write_text("a file where a folder should be")
    box, said = outbox(tmp_path, f"local save_latest_to={tmp_path}/wall/{{step}}.pt save_best_to={tmp_path}/wall/b.pt")
    file = model(tmp_path, "state.pt")
    for step in (1, 2):
        box.post(WRITTEN, "latest", "checkpoint", file, {**VALUES, "step": step}, ABOUT)
        box.jobs[-1].result()
    box.post(WRITTEN, "best", "checkpoint", file, VALUES, ABOUT)
    box.jobs[-1].result()
    assert len(said) == 1 and "wall" in said[0] and said[0].endswith("training goes on, the next save tries again")
    (tmp_path / "wall").unlink()
    box.post(WRITTEN, "latest", "checkpoint", file, {**VALUES, "step": 3}, ABOUT)
    box.finish()
    assert {path.name for path in (tmp_path / "wall").iterdir()} == {"3.pt", "b.pt"}  # 2 was superseded
    assert len(said) == 1 and not box.folder.exists()


def test_what_could_not_be_sent_at_the_end_is_told_and_kept(tmp_path):
    (tmp_path / "wall").write_text("")
    box, said = outbox(tmp_path, f"local save_latest_to={tmp_path}/wall/x.pt")
    box.post(WRITTEN, "latest", "checkpoint", model(tmp_path), VALUES, ABOUT)
    box.finish()
    kept = Path(said[-1].rsplit(" ", 1)[1])
    assert "could not be sent; the next start of this run tries again" in said[-1]
    assert checkpoint.load(kept)["step"] == 3
    (tmp_path / "wall").unlink()
    box, said = outbox(tmp_path, f"local save_latest_to={tmp_path}/wall/x.pt")
    box.finish()
    assert said == [] and checkpoint.load(tmp_path / "wall/x.pt")["step"] == 3 and not box.folder.exists()


def test_what_waited_when_a_run_was_killed_is_sent_at_its_next_start(tmp_path):
    there = f"local save_latest_to={tmp_path}/copies/{{step}}.pt save_best_to={tmp_path}/copies/best.pt"
    box, _ = outbox(tmp_path, there)
    gate = threading.Event()
    box.savers[0].put = lambda *a: gate.wait(20) and 1 / 0  # hangs, and then comes to nothing
    for step in (1, 2):
        box.post(WRITTEN, "latest", "checkpoint", model(tmp_path), {**VALUES, "step": step}, ABOUT)
        box.post(WRITTEN, "best", "checkpoint", model(tmp_path), VALUES, ABOUT)
    (box.folder / "000009_latest.pt").write_bytes(b"cut off before its note was written")
    other, said = outbox(tmp_path, there, "local save_best_to=/x.pt")  # while the process that was killed does no more
    other.finish()
    gate.set()
    assert {"2.pt", "best.pt"} <= {path.name for path in (tmp_path / "copies").iterdir()} and said == []
    gone, said = outbox(tmp_path)  # with no savers any more
    assert not [*gone.folder.glob("*")] and gone.waiting == {}


def test_what_was_not_written_is_not_sent(tmp_path):
    box, said = outbox(tmp_path, f"local save_best_to={tmp_path}/best_copy.pt")
    failed = concurrent.futures.Future()
    failed.set_exception(OSError(28, "No space left on device"))
    box.post(failed, "best", "checkpoint", model(tmp_path), VALUES, ABOUT)  # the best of before is still there
    box.post(WRITTEN, "best", "checkpoint", tmp_path / "nothing.pt", VALUES, ABOUT)
    box.finish()
    assert not (tmp_path / "best_copy.pt").exists() and len(said) == 1 and "nothing.pt" in said[0]


def test_a_converted_copy_that_fails_is_converted_again(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    (tmp_path / "wall").write_text("")
    box, said = outbox(tmp_path, f"local kind=model save_best_to={tmp_path}/wall/x.safetensors")
    box.post(WRITTEN, "best", "model", model(tmp_path), VALUES, ABOUT)
    box.jobs[-1].result()
    (tmp_path / "wall").unlink()
    box.finish()
    assert checkpoint.load(tmp_path / "wall/x.safetensors")["step"] == 3 and len(said) == 1


def test_waiting_for_copies_ends_in_time(tmp_path):
    box, _ = outbox(tmp_path, f"local save_latest_to={tmp_path}/x.pt")
    gate = threading.Event()
    put, box.savers[0].put = box.savers[0].put, lambda *a: (gate.wait(20), put(*a))
    box.post(WRITTEN, "latest", "checkpoint", model(tmp_path), VALUES, ABOUT)
    box.finish(0.01)
    assert not (tmp_path / "x.pt").exists()
    gate.set()
    box.thread.shutdown()
    assert (tmp_path / "x.pt").exists()


def test_without_savers_there_is_nothing(tmp_path):
    box, said = outbox(tmp_path)
    assert box.kinds("latest") == box.kinds("best") == set()
    box.finish()
    assert not box.folder.exists() and said == []


# Hugging Face

@pytest.fixture
def hub(server, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return server


def test_hugging_face_copies_are_sent_by_the_real_client(tmp_path, hub):
    (tmp_path / "token").write_text("hf_secret\n")
    box, said = outbox(tmp_path, f"huggingface repo=me/prior token_file={tmp_path}/token save_latest_to=ck/{{step}}.pt "
                                 "save_meta_to=about")
    file = model(tmp_path)
    box.post(WRITTEN, "latest", "checkpoint", file, VALUES, ABOUT)
    box.finish()
    assert said == []
    assert hub.stored["ck/12.pt"] == file.read_bytes()
    assert {name: hub.stored[f"about/{name}"].decode() for name in ABOUT} == ABOUT
    made, headers = next((json.loads(body), headers) for _, path, headers, body in hub.asked
                         if path == "/api/repos/create")
    assert made["name"] == "prior" and made["organization"] == "me"
    assert made.get("private") is True or made["visibility"] == "private"
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer hf_secret"


def test_a_wrong_token_and_a_full_quota_leave_training_alone(tmp_path, hub):
    box, said = outbox(tmp_path, "huggingface repo=me/prior save_latest_to=latest.pt")
    for number, status in enumerate((401, 413)):
        hub.fail = status
        box.post(WRITTEN, "latest", "checkpoint", model(tmp_path), {**VALUES, "step": number}, ABOUT)
        box.jobs[-1].result()
    assert "401" in said[0] and "the copy of step 0 failed" in said[0]
    hub.fail = None
    box.post(WRITTEN, "latest", "checkpoint", model(tmp_path), VALUES, ABOUT)
    box.finish()
    assert hub.stored["latest.pt"] == model(tmp_path).read_bytes() and len(said) <= 2
