"""Every case of the benchmarks runs. Their results are not tested."""
import importlib
import json
import math
import re
from pathlib import Path

import pytest

import train_decoder
import train_prior

UNET = dict(
    width=8,
    channel_mult=(1, 2),
    num_res_blocks=1,
    objective="epsilon",
    timestep_density="uniform",
)
BASE = dict(image_size=8, cond_width=16, attention_levels=(1,), learned_variance=True)
TEXT = dict(text_encodings="clip", raw_embeddings=True)
TRANSFORMER = dict(width=16, depth=1, heads=2)

# Small sizes for the benchmarks, and small presets.
CONSTANTS = {
    "CODEC": dict(
        channels=2,
        strides=(4, 5, 16),
        latent_dim=16,
        codebook_size=16,
        seconds=0.12,
        sample_rate=8_000,
    ),
    "TOKENS": TRANSFORMER,
    "FRAMES": {"semantic": 8, "coarse": 4, "fine": 4},
    "MODEL": UNET,
    "BASE": BASE,
    "UPSAMPLE": dict(image_size=16, random_crop=8, low_res_size=8),
    "SIZES": TRANSFORMER,
    "STEPS": 2,
}
PRIORS = {"small": dict(TEXT, **TRANSFORMER, max_text_len=4)}
DECODERS = {"small": dict(TEXT, **UNET, **BASE, stage="base")}


@pytest.mark.parametrize("name, words, cases", [
    ("bench_audio", "--tokens 6 --batch 2", None),
    ("bench_prior", "--embed 8 --batch 2", None),
    ("bench_prior", "--embed 8 --batch 2 --preset small train", ["train"]),
    ("bench_decoder", "--embed 8 --batch 1 --sample_batch 1", None),
    ("bench_decoder", "--embed 8 --batch 1 --sample_batch 1 --preset small", ["train", "sample"]),
])
def test_every_case_gives_a_line_of_its_own(name, words, cases, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    bench = importlib.import_module(name)
    for constant in CONSTANTS.keys() & vars(bench).keys():
        monkeypatch.setattr(bench, constant, CONSTANTS[constant])
    monkeypatch.setattr("bench_prior.SIDE", 256)  # size of the matrices that measure peak FLOP/s
    monkeypatch.setattr(train_prior, "PRESETS", PRIORS)
    monkeypatch.setattr(train_decoder, "PRESETS", DECODERS)
    monkeypatch.setattr("sys.argv", [name, *words.split(), "--repeats", "1", "--threads", "1"])
    bench.main()
    found = set()
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        assert 0 < line["ms"] < math.inf
        assert 0 < line.get("share_of_peak", 0.5) < 1
        # The cases `checkpoint` and `tokenize` print two lines each.
        case = re.sub("^checkpoint_.*", "checkpoint", line["case"])
        found.add(case.replace("decode", "tokenize"))
    assert found == set(cases or bench.CASES)


def test_large_data_are_opened_and_read(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    bench = importlib.import_module("bench_data")
    monkeypatch.setattr("sys.argv", ["bench_data", "pictures", "--rows", "40", "--ranks", "1"])
    bench.main()
    line = json.loads(capsys.readouterr().out)
    assert line["items_per_s"] > 0
    assert 0 < line["first_s"] < math.inf
