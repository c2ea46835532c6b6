"""Measure how fast large datasets are opened and read at random, and the memory this takes.

    python tests/benchmarks/bench_data.py [pictures captions jsonl] [--rows 100_000] [--ranks 1 2]

Prints one JSON line per case and number of ranks. first_s and again_s: seconds to open the data the
first and the second time, including splits and fingerprint. private_mb and mapped_mb: memory that a
process takes to open the data the second time, and to read them. private_mb is its own memory.
mapped_mb is its share (PSS) of the files that it maps, which the system can drop when memory is
short. items_per_s: total of all ranks. Runs on Linux only.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from common import order
from common.data import embeddings, images, media

PER_TAR = 10_000  # pictures
SHARDS = 1000  # of captions
DISTINCT = 10  # real files; the others are links to them
BATCH = 256  # items per read
SECONDS = 3.0  # of reading


def member(name, content):
    """A tar member as bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf() + content + bytes(-len(content) % 512)


def link_all(paths):
    """Make all but the first few paths links to those few: only the number of rows matters."""
    for number, path in enumerate(paths[DISTINCT:]):
        os.link(paths[number % DISTINCT], path)


def make_pictures(folder, rows):
    """Write tars of tiny captioned images."""
    folder.mkdir()
    picture = media.png(np.zeros((1, 1, 3), np.uint8))
    per_tar = min(rows, PER_TAR)
    paths = [folder / f"{number:05d}.tar" for number in range(rows // per_tar)]
    for number, path in enumerate(paths[:DISTINCT]):
        with open(path, "wb") as file:
            for i in range(number * per_tar, (number + 1) * per_tar):
                file.write(member(f"{i:09d}.png", picture))
                file.write(member(f"{i:09d}.txt", f"caption number {i}".encode()))
            file.write(bytes(1024))
    link_all(paths)


def make_captions(folder, rows, suffix=".parquet"):
    """Write shards of embeddings of width 2, and of captions of about 80 characters."""
    name = "metadata" if suffix == ".parquet" else "captions"
    for subfolder in ("img_emb", name):
        (folder / subfolder).mkdir(parents=True)
    count = rows // SHARDS or 1
    shards = range(rows // count)
    tables = [folder / f"img_emb/img_emb_{number}.npy" for number in shards]
    texts = [folder / f"{name}/{name}_{number}{suffix}" for number in shards]
    for number in shards[:DISTINCT]:
        np.save(tables[number], np.ones((count, 2), np.float16))
        first = number * count
        captions = [f"{i} {'what is in the picture, ' * 3}" for i in range(first, first + count)]
        if suffix == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"caption": captions}), texts[number])
        else:
            lines = [json.dumps({"caption": caption}) for caption in captions]
            texts[number].write_text("\n".join(lines))
    link_all(tables)
    link_all(texts)


def make_jsonl(folder, rows):
    make_captions(folder, rows, ".jsonl")


def open_pictures(folder, settings):
    dataset = images.Pictures(folder, 1, **settings)

    def read(indices):
        for index in indices:
            dataset.read(index, "image")
            dataset.caption(index)

    return dataset, read


def open_captions(folder, settings):
    dataset = embeddings.Embeddings(folder, captions=True, **settings)
    return dataset, dataset.texts


CASES = {
    "pictures": (make_pictures, open_pictures),
    "captions": (make_captions, open_captions),
    "jsonl": (make_jsonl, open_captions),
}


def memory(folder):
    """Memory of this process in MB: (its share of mapped files below `folder`, its own)."""
    mapped = private = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            is_below = str(folder) in line
        elif name == "Pss:" and is_below:
            mapped += int(values[0])
        elif name == "Anonymous:":
            private += int(values[0])
    return np.array([mapped, private]) / 1000


def measure(case, folder, rank, ranks, results):
    """Open and read data as one rank. results gets (seconds, growth of `memory`, items per s)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    settings = {}
    if "index_dir" in inspect.signature(embeddings.Embeddings).parameters:  # not in old versions
        settings["index_dir"] = folder / f"index_{ranks}"
    before = memory(folder)
    start = time.perf_counter()
    _, open_data = CASES[case]
    dataset, read = open_data(folder / "data", settings)
    splits = [dataset.split(name, 0.005, 0.005) for name in order.SPLITS]
    dataset.fingerprint()
    seconds = time.perf_counter() - start
    taken = memory(folder) - before

    rng = np.random.default_rng(rank)
    start = time.perf_counter()
    items = 0
    while time.perf_counter() < start + SECONDS:
        read(splits[-1][rng.integers(0, len(splits[-1]), BATCH)])
        items += BATCH
    rate = items / (time.perf_counter() - start)
    taken = np.maximum(taken, memory(folder) - before)
    results.put((seconds, taken.tolist(), rate))


def on_ranks(*arguments, ranks):
    """Run `measure` in `ranks` processes: (maximum seconds, maximum memory, total items per s)."""
    spawn = multiprocessing.get_context("spawn")  # forked processes would share memory
    results = spawn.SimpleQueue()
    processes = []
    for rank in range(ranks):
        process = spawn.Process(target=measure, args=(*arguments, rank, ranks, results))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
        assert not process.exitcode
    seconds, taken, rates = zip(*(results.get() for _ in processes))
    return max(seconds), np.max(taken, axis=0), sum(rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    args = parser.parse_args()
    for case in args.cases or CASES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            folder = Path(folder)
            make, _ = CASES[case]
            make(folder / "data", args.rows)
            for ranks in args.ranks:
                first, _, _ = on_ranks(case, folder, ranks=ranks)
                again, (mapped, private), rate = on_ranks(case, folder, ranks=ranks)
                line = {
                    "case": case,
                    "rows": args.rows,
                    "ranks": ranks,
                    "first_s": round(first, 2),
                    "again_s": round(again, 2),
                    "private_mb": round(private, 1),
                    "mapped_mb": round(mapped, 1),
                    "items_per_s": round(rate),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
