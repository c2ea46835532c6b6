"""Mutate each kind of file that the scripts read, and use it.

The result must be harmless or one line, never a traceback.

    python tests/benchmarks/fuzz.py [--count 100] [KIND ...]    # status 1 if anything else came
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import helpers  # noqa: E402
from helpers import AUDIO, SMALL, flags, write_voices  # noqa: E402

from common import clip, data, media, synthetic  # noqa: E402

TRAIN = {**SMALL, "steps": 2, "log_every": 1, "eval_every": 0, "save_every": 0, "eval_samples": 8}


def mutated(content, rng):
    """`content` with a few bytes changed, cut off, or with a block repeated."""
    content = bytearray(content)
    way = rng.choice(["bytes", "cut", "repeat"])
    start = rng.randrange(len(content))
    size = rng.randrange(1, 4096)
    if way == "cut":
        return content[:start]
    if way == "repeat":
        return content[: start + size] + content[start:]
    for place in rng.choices(range(len(content)), k=rng.choice([1, 2, 8])):
        content[place] = rng.randrange(256)
    return content


def make_world():
    """Runs of all three scripts, and data of all kinds, in the current folder."""
    pictures, records = synthetic.shapes(range(40))
    Path("images").mkdir()
    for i, (picture, record) in enumerate(zip(pictures, records)):
        media.write_png(f"images/{i:04d}.png", picture)
        Path(f"images/{i:04d}.txt").write_text(record["caption"])
    from PIL import Image

    Image.fromarray(pictures[0]).save("images/0000.jpg")
    Path("images/0000.png").unlink()
    shutil.make_archive("tars/00000", "tar", "images")
    cfg = clip.Config(run_dir="runs/clip", data="images", steps=2, batch_size=16)
    encoder = clip.train(cfg, torch.device("cpu"))
    (image, text), _ = clip.embed(encoder, [(pictures, records)])
    data.write_shards("emb", np.tile(image, (20, 1)), np.tile(text, (20, 1)), records * 20)
    note = {"clip": "runs/clip", "fingerprint": encoder.fingerprint()}
    Path("emb/clip.json").write_text(json.dumps(note))
    helpers.run("train_prior", *flags(data="emb", run_dir="runs/prior", **TRAIN))
    shutil.copytree("runs/prior", "runs/loose", ignore=shutil.ignore_patterns("auto_resume.json"))
    for path in sorted(write_voices(Path("voices")).glob("*/*0.wav")):
        shutil.copy(path, f"voices/{path.stem.lstrip('0') or 0}.wav")
    helpers.run("train_audio", *flags(data="voices", run_dir="runs/audio", **AUDIO))


PRIOR = ("train_prior", *flags(data="emb", run_dir="runs/new", resume="never", **TRAIN))
AGAIN = ("train_prior", *flags(data="emb", run_dir="runs/prior", **{**TRAIN, "steps": 3}))
SAMPLE = ("train_prior", "sample", "--steps", "2", "--text")
SPEAK = ("train_audio", "sample", *flags(seconds=0.2, device="cpu"))
SOUNDSTREAM = dict(AUDIO, run_dir="runs/codec", stage="soundstream", data="voices", resume="never")
for setting in ("width", "depth", "heads", "clusters"):
    del SOUNDSTREAM[setting]
CODEC = ("train_audio", *flags(**SOUNDSTREAM))
CLIP = (
    "common.clip",
    "train",
    *flags(run_dir="runs/other", steps=1, batch_size=8, device="cpu"),
    "--data",
)
LAST = "runs/prior/checkpoints/step_00000002.pt"
VOICE = "voices/0.wav"
KINDS = {  # name: (file, the command that reads it)
    "checkpoint": (LAST, (*PRIOR, "--load", LAST)),
    "checkpoint of the run": (LAST, AGAIN),
    "auto_resume.json": ("runs/prior/auto_resume.json", AGAIN),
    "metrics.jsonl": ("runs/prior/metrics.jsonl", AGAIN),
    "CLIP": ("runs/clip/model.pt", (*SAMPLE, "a star")),
    "clip.json": ("emb/clip.json", PRIOR),
    "model.pt": ("runs/loose/model.pt", (*SAMPLE, "", "--run_dir", "runs/loose")),
    "config file": (
        "runs/prior/config.json",
        ("train_prior", "--config", "runs/prior/config.json", "--steps", "2"),
    ),
    "shard": ("emb/img_emb/img_emb_0.npy", PRIOR),
    "captions": (
        "emb/captions/captions_0.jsonl",
        (*PRIOR, *flags(text_encodings="clip", clip="runs/clip")),
    ),
    "JPEG": ("images/0000.jpg", (*CLIP, "images")),
    "PNG": ("images/0001.png", (*CLIP, "images")),
    "tar": ("tars/00000.tar", (*CLIP, "tars")),
    "WAV": (VOICE, CODEC),
    "prompt": (VOICE, (*SPEAK, "--prompt", VOICE)),
    "codec": ("runs/audio/soundstream/model.pt", SPEAK),
    "tokenizer": ("runs/audio/semantic/kmeans.pt", SPEAK),
    "transformer": ("runs/audio/coarse/model.pt", SPEAK),
}


def attempt(name, *words):
    """What comes of a command: "harmless", "one line", or what else."""
    try:
        helpers.run(name, *words)
        return "harmless"
    except Exception as error:  # AssertionError: an exit status
        text = str(error)
        if not isinstance(error, AssertionError) or "Traceback" in text:
            return repr(error)
        return "one line" if text.count("error: ") == 1 else repr(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; by default all")
    parser.add_argument("--count", type=int, default=100, help="mutations a kind")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_world()
        shutil.copytree("runs", "whole")
        for kind in args.kinds or KINDS:
            file, words = KINDS[kind]
            rng = random.Random(kind)
            found = Counter()
            content = Path(file).read_bytes()
            for _ in range(args.count):
                Path(file).write_bytes(mutated(content, rng))
                result = attempt(*words)
                if result not in ("harmless", "one line"):
                    print(f"{kind}: {result[-1500:]}", flush=True)
                    result = "wrong"
                found[result] += 1
                shutil.rmtree("runs/prior")
                shutil.copytree("whole/prior", "runs/prior")
            Path(file).write_bytes(content)
            wrong += found["wrong"]
            counts = [f"{found[name]:>5} {name}" for name in ("harmless", "one line", "wrong")]
            print(f"{kind:<24}", *counts)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
