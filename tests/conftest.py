"""What several tests share: functions run in real processes, and scripts run as a user runs them."""
import concurrent.futures
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import Server

from common import data, dist

torch.set_num_threads(1)  # the models are tiny, and other processes run beside this one
ROOT = Path(__file__).parent.parent
FORKS = multiprocessing.get_context("forkserver")  # imports torch once; a process a rank is then forked in no time
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest"])  # the second is what optimizers import


def _as_rank(rank, world_size, port, work, arguments):
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)))
    dist.setup("cpu", timeout_minutes=0.5)  # so a test in which a rank waits in vain fails, and does not hang
    try:
        return work(*arguments)
    finally:
        dist.teardown()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """A test works in a folder of its own: the scripts' default ones, `runs/prior` and so on, may be somebody's."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def on_ranks():
    """on_ranks(n, work, *arguments) -> what `work`, a function of the test's module, returned in each of n processes.

    The processes are a gloo group, as torchrun makes it. Arguments and results are plain values or numpy arrays.
    """
    def run(world_size, work, *arguments):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with concurrent.futures.ProcessPoolExecutor(world_size, FORKS) as pool:
            ranks = [pool.submit(_as_rank, r, world_size, port, work, arguments) for r in range(world_size)]
            return [rank.result() for rank in ranks]
    return run


@pytest.fixture
def script(tmp_path):
    """script(text, *words) -> the finished process of a Python program `text`, started with the arguments `words`.

    With `wait=False` it is the running one, its output in pipes.
    """
    def start(text, *words, wait=True):
        path = tmp_path / f"script_{abs(hash(text))}.py"
        path.write_text(text)
        process = subprocess.Popen([sys.executable, str(path), *map(str, words)], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if not wait:
            return process
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return start


@pytest.fixture(scope="session")
def emb(tmp_path_factory):
    """A folder of embeddings in three shards, with text encodings."""
    folder, rng = tmp_path_factory.mktemp("emb"), np.random.default_rng(0)
    text = rng.standard_normal((1500, 16)).astype(np.float32)
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    image = 0.8 * text + 0.2 * rng.standard_normal((1500, 16)).astype(np.float32) / 4
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    encodings = rng.standard_normal((1500, 5, 12)).astype(np.float32)
    encodings[np.arange(5) >= rng.integers(2, 6, 1500)[:, None]] = 0
    data.write_shards(folder, image, text, [{"caption": f"number {i}"} for i in range(1500)], encodings, 600)
    return folder


@pytest.fixture
def server():
    """An HTTP server on loopback."""
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()
