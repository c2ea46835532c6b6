"""A fork with its own embeddings, transformer, loss and optimizer.

The fork is one script and common/ without common/interop, changed by the README's recipes. Its data
are arrays without captions. It trains on two processes, is killed, resumes on four, and samples.
"""
import re
import shutil

import numpy as np
import pytest
from conftest import README, ROOT, environment, free_port, start
from helpers import SMALL, flags, metrics

from common.data.embeddings import write_shards


def recipe(title):
    """The Python code in the README for **title**."""
    return re.search(rf"\*\*{title}.*?```python\n(.*?)```", README, re.DOTALL)[1]


SETTING, *LOSS = recipe("To add a loss").splitlines(keepends=True)
CHANGES = {
    r"class Prior\(": recipe("To swap the transformer") + "\n\nclass Prior(",
    r"= Transformer\(": "= Mixer(",
    r"    # Diffusion:": f"{SETTING}    # Diffusion:",
    r"    return loss\.mean\(\)\n": "".join(LOSS),
    r"    optimizers = optim\.make\(\n.*?\n    \)\n": recipe("To swap the optimizer"),
}


def edit(path, changes):
    """Replace all matches of each pattern in `changes`. Each pattern must match."""
    text = path.read_text()
    for pattern, new in changes.items():
        text, count = re.subn(pattern, lambda match, new=new: new, text, flags=re.DOTALL)
        assert count, pattern
    path.write_text(text)


def launch(fork, *words, ranks=1):
    """Start the fork's script in one process per rank."""
    port = free_port()
    words = (fork / "train_prior.py", *words, "--run_dir", fork / "run")
    return [start(*words, **environment(rank, ranks, port)) for rank in range(ranks)]


def finish(processes):
    """Wait for processes that must succeed; returns the output of rank 0."""
    outputs = ["".join(process.communicate()) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return outputs[0]


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """The fork's folder."""
    folder = tmp_path_factory.mktemp("fork")
    ignore = shutil.ignore_patterns("interop", "__pycache__")
    shutil.copytree(ROOT / "common", folder / "common", ignore=ignore)
    shutil.copy(ROOT / "train_prior.py", folder)
    edit(folder / "train_prior.py", CHANGES)
    rng = np.random.default_rng(0)
    text = rng.standard_normal((300, 16))
    image = text + rng.standard_normal((300, 16)) / 4
    write_shards(folder / "emb", image, text, [])
    return folder


def test_a_fork_trains_on_2_ranks_is_killed_goes_on_with_4_and_samples(fork):
    settings = {**SMALL, "chunk_size": 0, "eval_every": 8, "lr": 0.1, "length_weight": 0.1}
    words = flags(data=fork / "emb", **settings)
    processes = launch(fork, *words, ranks=2)
    assert any("step 16" in line for line in iter(processes[0].stdout.readline, ""))
    for process in processes:
        process.kill()
        process.communicate()
    # A fork may rename a setting between two starts.
    renamed = {r"\bdropout:": "drop_rate:", r"\bcfg\.dropout\b": "cfg.drop_rate"}
    edit(fork / "train_prior.py", renamed)
    out = finish(launch(fork, *words, ranks=4))
    assert re.search(r"resuming .* at step (8|16) of 24", out)
    assert "chunks of 12 samples instead of 24" in out
    assert "dropout changed from 0.0 to no setting" in out
    losses = [line["loss"] for line in metrics(fork / "run") if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]

    texts = fork / "emb/text_emb/text_emb_0.npy"
    finish(launch(fork, "sample", *flags(text_embeds=texts, num_samples=2, out=fork / "out.npy")))
    embeddings = np.load(fork / "out.npy")
    assert embeddings.shape == (600, 16)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    (process,) = launch(fork, "--save", "local save_latest_to=x.pt")
    assert "No module named 'common.interop'" in process.communicate()[1]
