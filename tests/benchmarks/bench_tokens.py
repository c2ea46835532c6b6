"""Time token caches of many hours of audio, and print JSON lines.

    python tests/benchmarks/bench_tokens.py [--hours 100] [--folder FOLDER]

The cases write (random tokens, which take no time to compute) and open (opening the cache again)
have one line each. coarse and fine have two: crops per second of CPU time in one process, and in
two at once. pss_mb: a process's share of memory (Linux). more_mb: its growth. more_anon_mb: its
growth without pages of the file, which processes share, and which the system can drop. The file
takes 2 bytes per token, and twice that while it is joined from pieces.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.data import tokens
from common.models import token_lm

FRAME_RATE = 50  # codes and semantic tokens per second
FORK = multiprocessing.get_context("fork")
TOGETHER = FORK.Barrier(2)


class Same:
    """A list of `count` equal items that needs no memory."""

    def __init__(self, count, item):
        self.count = count
        self.item = item

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.item


class Recordings:
    """Recordings of 5 to 25 seconds. In place of its wave, each returns its index."""

    def __init__(self, hours):
        self.count = round(hours * 3600 / 15)
        self.texts = Same(self.count, "")

    def __len__(self):
        return self.count

    def fingerprint(self):
        return {"recordings": self.count}

    def __getitem__(self, index):
        return index


class Tokenizer:
    """Random tokens (T, Q), or (T,) for a single quantizer."""

    def __init__(self, num_quantizers):
        self.num_quantizers = num_quantizers
        self.checksum = f"{num_quantizers} quantizers"
        shape = (5_000, num_quantizers)
        self.tokens = np.random.default_rng(0).integers(0, 1024, shape)
        if num_quantizers == 1:
            self.tokens = self.tokens[:, 0]

    def encode(self, index):
        start = index % 1000
        return self.tokens[start : start + FRAME_RATE * (5 + index % 21)]


def emit(case, **facts):
    rounded = {name: float(f"{value:.4g}") for name, value in facts.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


def memory():
    """Memory of this process in MB: (its share (PSS), the anonymous part of that share)."""
    path = Path("/proc/self/smaps_rollup")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return np.array([kilobytes.get(name, 0) / 1e3 for name in ("Pss", "Pss_Anon")])


def growth(before):
    """`memory` now, and its growth since `before`."""
    now = memory()
    more, more_anon = now - before
    return {"pss_mb": now[0], "more_mb": more, "more_anon_mb": more_anon}


def work(crops, count, seed, processes, results):
    """Take crops in a forked process. results gets (CPU seconds, `growth` of memory)."""
    generator = np.random.default_rng(seed)
    indices = generator.integers(0, len(crops.dataset), count)
    def together():  # wait, so that memory is measured while all processes are alive
        if processes > 1:
            TOGETHER.wait()

    together()
    before = memory()
    started = time.process_time()
    for start in range(0, count, 50):
        bits = generator.integers(0, 2**63, 50).astype(np.uint64)
        _, usable = crops.fetch(indices[start : start + 50], bits)
        assert usable.all()
    seconds = time.process_time() - started
    together()
    results.put((seconds, growth(before)))
    together()


def take_crops(case, crops, count):
    """Time crops in one process, then in two at once, and print a line for each."""
    for processes in (1, 2):
        results = FORK.SimpleQueue()
        workers = []
        for seed in range(processes):
            arguments = (crops, count, seed, processes, results)
            workers.append(FORK.Process(target=work, args=arguments))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds, megabytes = results.get()
        emit(case, processes=processes, crops_per_s=count / seconds, **megabytes)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--quantizers", type=int, default=12, help="of the codec; coarse has 4")
    parser.add_argument("--crops", type=int, default=10_000, help="number per process")
    parser.add_argument("--folder", default="", help="where to keep the tokens")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(args, args.folder or temporary)


def measure(args, folder):
    tokens.PIECE_SECONDS = 1  # these tokens take no time to compute, so a piece holds hours
    cfg = SimpleNamespace(run_dir=folder, workers=0, timeout_minutes=30)
    dataset = Recordings(args.hours)
    tokenizers = [Tokenizer(1), Tokenizer(args.quantizers)]
    for case in ("write", "open"):
        before = memory()
        started = time.perf_counter()
        cpu_started = time.process_time()
        words, codes = [tokens.token_cache(cfg, dataset, each) for each in tokenizers]
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu_started
        emit(case, seconds=seconds, cpu_s=cpu, recordings=len(dataset), **growth(before))
    semantic, coarse, fine = [
        token_lm.Stream("semantic", 1, 1024),
        token_lm.Stream("coarse", 4, 1024),
        token_lm.Stream("fine", args.quantizers - 4, 1024),
    ]
    # Crop lengths are those of the preset audiolm-16khz.
    stages = {
        "coarse": tokens.TokenCrops(
            dataset, 10.0, [semantic, coarse], token_lm.lay_out, words, codes, FRAME_RATE
        ),
        "fine": tokens.TokenCrops(
            dataset, 3.0, [coarse, fine], token_lm.lay_out, None, codes, FRAME_RATE
        ),
    }
    for case, crops in stages.items():
        take_crops(case, crops, args.crops)


if __name__ == "__main__":
    main()
