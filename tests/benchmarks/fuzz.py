"""Randomly damage each kind of file that the scripts read, and run a command that reads it.

The command must continue as documented, or end with one error line and status 1 or 2. Anything else
is wrong: a traceback, a hang, or a resumed run whose weights differ from those of an undamaged run.

    python tests/benchmarks/fuzz.py [--count 100] [KIND ...]    # status 1 if something was wrong
"""

import argparse
import collections
import contextlib
import faulthandler
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import helpers  # noqa: E402
from helpers import SMALL, STAGES, flags  # noqa: E402

from common import checkpoint  # noqa: E402

HANG = 300  # seconds after which a command counts as hung, even on a busy machine
TRAIN = dict(SMALL, steps=2, log_every=1, eval_every=0, save_every=1, eval_samples=8)
UNET = dict(
    width=8,
    channel_mult=(1, 2),
    image_size=8,
    attention_levels=1,
    batch_size=8,
    steps=1,
    eval_samples=4,
    eval_steps=1,
    device="cpu",
)


def prior(run_dir, **settings):
    return "train_prior", *flags(**{**TRAIN, "data": "emb", "run_dir": run_dir, **settings})


def decoder(data):
    words = flags(**UNET, stage="base", clip="runs/clip", data=data, run_dir="new")
    return "train_decoder", *words


def audio(stage, run_dir="new", **settings):
    settings = {**STAGES[stage], "steps": 3, "run_dir": run_dir, "data": "voices", **settings}
    return "train_audio", *flags(**settings)


EMBED = ("common.data.embed", "embed", *flags(data="images", run_dir="runs/clip", out="new"))
AGAIN = prior("runs/prior", steps=3)
SAMPLE = ("train_prior", "sample", *flags(run_dir="alone", steps=2, device="cpu"))
SPEAK = ("train_audio", "sample", *flags(run_dir="runs", seconds=0.2, device="cpu"))
NEWEST = "runs/prior/checkpoints/step_00000002.pt"
KINDS = {  # name: (file, command that reads it)
    "checkpoint": (NEWEST, AGAIN),
    "auto_resume.json": ("runs/prior/auto_resume.json", AGAIN),
    "metrics.jsonl": ("runs/prior/metrics.jsonl", AGAIN),
    "--load": (NEWEST, prior("new", load=NEWEST)),
    "--init_from": ("alone/model.pt", prior("new", init_from="alone/model.pt")),
    "config.json": ("runs/prior/config.json", prior("new", config="runs/prior/config.json")),
    "model.pt": ("alone/model.pt", SAMPLE),
    "CLIP": ("runs/clip/model.pt", (*SAMPLE, "--text", "a star")),
    "clip.json": ("emb/clip.json", prior("new")),
    "shard": ("emb/img_emb/img_emb_0.npy", prior("new")),
    "captions.jsonl": ("emb/captions/captions_0.jsonl", prior("new", text_source="clip")),
    "captions.parquet": (
        "parquet/metadata/metadata_0.parquet",
        prior("new", data="parquet", text_source="clip"),
    ),
    "texts": ("texts.txt", (*SAMPLE, "--texts", "texts.txt")),
    "jpg": ("images/00000.jpg", EMBED),
    "png": ("images/00001.png", EMBED),
    "webp": ("images/00002.webp", EMBED),
    "caption": ("images/00003.txt", EMBED),
    "json": ("images/00004.json", EMBED),
    "image in training": ("images/00001.png", decoder("images")),
    "npy": ("images/00001.npy", decoder("images")),
    "tar": ("tars/00000.tar", decoder("tars")),
    "wav": ("voices/a.wav", audio("soundstream")),
    "flac": ("voices/b.flac", audio("soundstream")),
    "ogg": ("voices/c.ogg", audio("soundstream")),
    "transcript": ("voices/a.txt", audio("semantic")),
    "table of transcripts": ("voices/x.trans.txt", audio("semantic")),
    "prompt": ("voices/a.wav", (*SPEAK, "--prompt", "voices/a.wav")),
    "codec": ("runs/soundstream/model.pt", SPEAK),
    "kmeans": ("runs/semantic/kmeans.pt", SPEAK),
    "transformer": ("runs/coarse/best.pt", SPEAK),
}


def make_world():
    """Make data and runs of all scripts in the current folder."""
    import pyarrow.parquet
    import soundfile
    from PIL import Image

    helpers.write_captioned(Path("images"), 80)
    shutil.make_archive("tars/00000", "tar", "images")
    for name, suffix in (("00000", "jpg"), ("00002", "webp")):
        path = Path(f"images/{name}.png")
        Image.open(path).save(path.with_suffix(f".{suffix}"))
        path.unlink()
    caption = Path("images/00004.txt")
    caption.with_suffix(".json").write_text(json.dumps({"caption": caption.read_text()}))
    caption.unlink()
    Path("texts.txt").write_text("a star\na red circle\n")
    train = flags(data="tars", run_dir="runs/clip", steps=2, batch_size=16, device="cpu")
    helpers.run("common.data.embed", "train", *train)
    embed = flags(data="tars", run_dir="runs/clip", out="emb", device="cpu")
    helpers.run("common.data.embed", "embed", *embed)
    lines = Path("emb/captions/captions_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record, embedding in zip(records, np.load("emb/img_emb/img_emb_0.npy")):
        np.save(f"images/{record['key']}.npy", embedding)
    shutil.copytree("emb", "parquet", ignore=shutil.ignore_patterns("captions"))
    Path("parquet/metadata").mkdir()
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, "parquet/metadata/metadata_0.parquet")
    helpers.run(*prior("runs/prior"))
    Path("alone").mkdir()
    shutil.copy("runs/prior/model.pt", "alone")

    helpers.write_voices(Path("voices"))
    first = min(Path("voices").glob("*/*.wav"))
    for suffix in (".wav", ".txt"):
        first.with_suffix(suffix).rename(f"voices/a{suffix}")
    for name in ("b.flac", "c.ogg"):
        soundfile.write(f"voices/{name}", *soundfile.read("voices/a.wav"))
    Path("voices/x.trans.txt").write_text("b a i u\nc a i u\n")
    for stage in STAGES:
        helpers.run(*audio(stage, "runs"))


def damaged(content, rng):
    """`content` with a few bytes changed, its end cut off, or a block repeated."""
    content = bytearray(content)
    way = rng.choice(["bytes", "signs", "cut", "repeat"])
    start = rng.randrange(len(content))
    if way == "cut":
        return content[:start]
    if way == "repeat":
        return content[: start + rng.randrange(1, 4096)] + content[start:]
    for place in rng.choices(range(len(content)), k=rng.choice([1, 2, 8])):
        content[place] = rng.randrange(256) if way == "bytes" else rng.choice(b'0123456789-.e"{[,')
    return content


def attempt(name, *words):
    """Run a command. Returns how it ended: "well", "in one line", or all that it printed."""
    faulthandler.dump_traceback_later(HANG, exit=True, file=sys.__stderr__)
    try:
        helpers.run(name, *words)
        return "well"
    except Exception as error:  # AssertionError: the status is not 0
        out = str(error)
        one_line = isinstance(error, AssertionError) and out.count("error: ") == 1
        return "in one line" if one_line and "Traceback" not in out else repr(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def fuzz(kind, count):
    """Run the command of a kind on `count` damaged files: {how it ended: how often}."""
    file, words = KINDS[kind]
    content = Path(file).read_bytes()
    rng = random.Random(kind)
    found = collections.Counter()
    weights = None  # of the run resumed from undamaged files
    for number in range(count + 1):
        if number:
            Path(file).write_bytes(damaged(content, rng))
        result = attempt(*words)
        if words is AGAIN and result == "well":
            state = checkpoint.load("runs/prior/model.pt")["model"]
            weights = weights or state
            if not helpers.same(weights, state):
                result = "other weights"
        if result not in ("well", "in one line") or (result != "well" and not number):
            print(f"{kind}, file {number}: {result[-1500:]}", flush=True)
            result = "wrong"
        found[result] += 1
        # Restore the runs.
        shutil.rmtree("new", ignore_errors=True)
        shutil.rmtree("runs/prior")
        shutil.copytree("whole", "runs/prior")
    Path(file).write_bytes(content)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"among {', '.join(KINDS)}; default: all")
    parser.add_argument("--count", type=int, default=100, help="damaged files of each kind")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_world()
        shutil.copytree("runs/prior", "whole")
        for kind in args.kinds or KINDS:
            found = fuzz(kind, args.count)
            wrong += found["wrong"]
            counts = [f"{found[end]:>5} {end}" for end in ("well", "in one line", "wrong")]
            print(f"{kind:<24}", *counts, flush=True)
    print(f"{wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
