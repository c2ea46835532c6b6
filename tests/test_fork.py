"""A fork as somebody makes it who has their own embeddings and their own transformer.

It is the script, the files of common/ that the README lists, arrays without captions, and the
README's transformer and loss. It trains on two processes and samples, and resumes after a setting
got another name.
"""
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT
from helpers import SMALL, flags, metrics, start

README = (ROOT / "README.md").read_text()
LISTED = re.search(r"A prior on embeddings of your own needs(.*?)\. ", README, re.DOTALL)[1]
_, MIXER, LOSS = re.split(r"\*\*To (?:swap|add)", README)
MIXER = re.search(r"```python\n(.*?)```", MIXER, re.DOTALL)[1]
SETTING, *LOSS = re.search(r"```python\n(.*?)```", LOSS, re.DOTALL)[1].splitlines()


def edit(path, changes):
    """Replace what each pattern of `changes` finds, which must be something."""
    text = path.read_text()
    for pattern, new in changes.items():
        text, count = re.subn(pattern, new, text)
        assert count, pattern
    path.write_text(text)


def write_embeddings(folder):
    rng = np.random.default_rng(0)
    text = rng.standard_normal((300, 16))
    image = text + rng.standard_normal((300, 16)) / 4
    for name, rows in (("text_emb", text), ("img_emb", image)):
        (folder / name).mkdir(parents=True)
        np.save(folder / name / f"{name}_0.npy", rows.astype(np.float32))


def run(fork, *words, ranks=0):
    """Output of the fork's script, by plain python or by torchrun on `ranks` processes."""
    process = start("train_prior", *words, "--run_dir", fork / "run", ranks=ranks, folder=fork)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return out


def train(fork, steps):
    settings = {**SMALL, "steps": steps, "length_weight": 0.1}
    return run(fork, *flags(data=fork / "emb", **settings), ranks=2)


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """The fork's folder, in which four steps are trained."""
    folder = tmp_path_factory.mktemp("fork")
    (folder / "common").mkdir()
    for name in ("__init__", *re.findall(r"`(\w+)`", LISTED)):
        shutil.copy(ROOT / f"common/{name}.py", folder / "common")
    shutil.copy(ROOT / "train_prior.py", folder)
    changes = {
        r"class Prior\(": f"{MIXER}\n\nclass Prior(",
        r"= Transformer\(": "= Mixer(",
        "    # Diffusion:": f"{SETTING}\n    # Diffusion:",
        r"    return loss\.mean\(\)\n": "\n".join([*LOSS, ""]),
    }
    edit(folder / "train_prior.py", changes)
    write_embeddings(folder / "emb")
    assert "2 rank(s) on cpu" in train(folder, 4)
    return folder


def test_a_fork_with_its_own_transformer_and_loss_trains_on_two_processes_and_samples(fork):
    losses = [line["loss"] for line in metrics(fork / "run") if "loss" in line]
    assert losses and np.isfinite(losses).all()
    texts = fork / "emb/text_emb/text_emb_0.npy"
    run(fork, "sample", *flags(text_embeds=texts, num_samples=2, out=fork / "out.npy"))
    embeddings = np.load(fork / "out.npy")
    assert embeddings.shape == (600, 16)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)


def test_after_a_setting_got_another_name_the_same_command_resumes_with_a_note(fork):
    renamed = {r"\bdropout:": "drop_rate:", r"\bcfg\.dropout\b": "cfg.drop_rate"}
    edit(fork / "train_prior.py", renamed)
    out = train(fork, 8)
    assert "at step 4 of 8" in out
    assert "dropout" in out
