"""Shared fixtures (embeddings, a finished run, a server), and functions that run real processes.

Docstrings of tests name the promises to users that they check: 1 resuming is exact, 2 a run is
saved after a signal, 3 nothing saved is lost, 4 non-finite values are not saved, 5 files are loaded
safely, 6 all ranks end together, 7 a bad sample is replaced, 8 a user error prints one line,
9 results repeat, 10 a fork (a user's changed copy of this code) works.
"""
import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import Server

from common import dist
from common.data import embeddings

torch.set_num_threads(1)  # the models are tiny, and other processes run at the same time
# Programs that a shell starts in the background ignore Ctrl-C, and under nohup they ignore hangups.
# Child processes would inherit this, but tests send them both signals. With handlers here, children
# start with the defaults. Under nohup, this process still ignores hangups.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
ROOT = Path(__file__).parent.parent
# The README and the guides, in reading order.
GUIDES = [ROOT / name / "README.md" for name in ("", "common", "common/data", "common/interop")]
README = "\n".join(path.read_text() for path in GUIDES)

# The forkserver imports torch once, and then quickly forks a process for each rank. It preloads
# torch._dynamo because optimizers import it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest"])


def free_port():
    """A free port on loopback.

    It is below the ports that Linux assigns automatically, because parallel tests may get those.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(rank, ranks, port):
    """The variables that torchrun sets for one of `ranks` processes on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _as_rank(variables, work, arguments):
    os.environ.update(variables)
    dist.setup("cpu", timeout_minutes=0.5)  # a rank that waits in vain fails instead of hanging
    try:
        return work(*arguments)
    finally:
        dist.teardown()


@pytest.fixture
def on_ranks():
    """on_ranks(n, work, *arguments) -> the results of `work` in each of n processes.

    The processes form a gloo group, as under torchrun. `work` is a function of the test's module.
    Arguments and results are plain values or numpy arrays.
    """
    def run(world_size, work, *arguments):
        port = free_port()
        with concurrent.futures.ProcessPoolExecutor(world_size, FORKS) as pool:
            ranks = []
            for rank in range(world_size):
                variables = environment(rank, world_size, port)
                ranks.append(pool.submit(_as_rank, variables, work, arguments))
            # If one rank raises an error, the others raise SystemExit. Report the error.
            errors = [rank.exception() for rank in ranks]
            for error in sorted(filter(None, errors), key=lambda e: isinstance(e, SystemExit)):
                raise error
            return [rank.result() for rank in ranks]
    return run


def start(*words, **variables):
    """Start `python WORDS`, with its output in pipes. variables: added to its environment."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def script(text, *words):
    """Run the Python program `text` with arguments `words`: (status, stdout, stderr)."""
    process = start("-c", text, *words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path_factory, monkeypatch):
    """Run each test in its own folder, because defaults such as `runs/prior` may be in use."""
    monkeypatch.chdir(tmp_path_factory.mktemp("scratch"))
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def emb(tmp_path_factory):
    """A folder of embeddings in three shards, with text encodings."""
    folder = tmp_path_factory.mktemp("emb")
    rng = np.random.default_rng(0)
    text = rng.standard_normal((1500, 16))
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    image = 0.8 * text + 0.05 * rng.standard_normal((1500, 16))
    encodings = rng.standard_normal((1500, 5, 12))
    lengths = rng.integers(2, 6, 1500)
    encodings[np.arange(5) >= lengths[:, None]] = 0  # padding
    records = [{"caption": f"number {i}"} for i in range(1500)]
    embeddings.write_shards(folder, image, text, records, encodings, 600)
    return folder


@pytest.fixture(scope="session")
def finished(emb, tmp_path_factory):
    """The folder of a finished run of the small prior; tests must not change it."""
    from helpers import SMALL, run
    folder = tmp_path_factory.mktemp("finished")
    out = run("train_prior", data=emb, run_dir=folder, **SMALL)
    assert re.search(r"(?s)1,500 embeddings of width 16; .*step 12\n.*24/24", out), out
    return folder


@pytest.fixture
def server():
    """An HTTP server on loopback."""
    server = Server()
    yield server
    server.close()
