"""Every case of the scripts' benchmarks still runs; what they find is for whoever waits for it."""
import importlib
import json
import math
import types
from pathlib import Path

import pytest
import torch

import train_decoder
import train_prior

FOLDER = Path(__file__).parent / "benchmarks"
SMALL = {"CODEC": dict(channels=2, strides=(4, 5, 16), codec_width=16, codebook_size=16, stft_window=256, seconds=0.1,
                       discriminator_channels=1, sample_rate=8_000),
         "TOKENS": dict(width=16, depth=1, heads=2, clusters=8, coarse_quantizers=3),
         "FRAMES": {"semantic": 8, "coarse": 4, "fine": 4},
         "MODEL": dict(width=8, mults=(1, 2), blocks=1, cond_width=16, head_width=8, attention_levels=(1,),
                       objective="epsilon", timestep_density="uniform"),
         "BASE": dict(image_size=8, learned_variance=True),
         "UPSAMPLE": dict(image_size=16, low_res_size=8, image_condition=False, attention_levels=())}


# Presets of each script, small, with what those that it has say of the condition.
PRIOR = dict(width=16, depth=1, heads=2, max_text_len=4, text_encodings="clip", raw_embeddings=True)
UNET = dict(width=8, mults=(1, 2), blocks=1, cond_width=16, head_width=8, objective="epsilon",
            timestep_density="uniform")
DECODER = dict(UNET, stage="base", image_size=8, attention_levels=(1,), text_encodings="clip",
               max_text_len=4, raw_embeddings=True, learned_variance=True)
UPSAMPLER = dict(UNET, stage="upsample", image_size=16, low_res_size=4, random_crop=8,
                 image_condition=False, attention_levels=())


@pytest.mark.parametrize("name, cases, words", [
    ("bench_audio", None, ["--tokens", "6", "--batch", "2"]),
    ("bench_prior", None, ["--preset", "small", "--embed", "8", "--batch", "2"]),
    ("bench_decoder", None, ["--embed", "8", "--batch", "1", "--sample_batch", "1"]),
    ("bench_decoder", ["train", "sample"],
     ["--preset", "small", "--embed", "8", "--batch", "1", "--sample_batch", "1"]),
    ("bench_decoder", ["train_upsample", "sample_upsample"],
     ["--preset", "small_upsampler", "--batch", "1", "--sample_batch", "1"]),
])
def test_every_case_gives_a_line_with_what_it_found(name, cases, words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    bench = importlib.import_module(name)
    for constant in SMALL.keys() & vars(bench).keys():
        monkeypatch.setattr(bench, constant, SMALL[constant])
    monkeypatch.setattr("bench_prior.SIDE", 256)
    monkeypatch.setitem(train_prior.PRESETS, "small", PRIOR)
    monkeypatch.setitem(train_decoder.PRESETS, "small", DECODER)
    monkeypatch.setitem(train_decoder.PRESETS, "small_upsampler", UPSAMPLER)
    given = [] if "--preset" in words else cases or []  # a preset's cases are those of its stage
    monkeypatch.setattr("sys.argv", [name, *given, *words, "--repeats", "1", "--threads", "1"])
    bench.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    several = {"decode": "tokenize", "checkpoint_save": "checkpoint", "checkpoint_load": "checkpoint"}  # a case's lines
    found = [several.get(line["case"], line["case"]) for line in lines]
    assert list(dict.fromkeys(found)) == [*(cases or bench.CASES)]
    assert all(math.isfinite(line["ms"]) and line["ms"] > 0 for line in lines)
    for line, case in zip(lines, found):
        if case not in ("ema", "checkpoint", "order"):  # which compute nothing that counts
            assert line["gflop"] > 0 and line["peak_gflop_per_s"] > 0 and 0 < line["share_of_peak"] < 1


def test_a_line_has_flops_rates_and_what_is_made_of_the_seconds(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    bench = importlib.import_module("bench_prior")
    args = types.SimpleNamespace(device=torch.device("cpu"), precision="fp32", compile=False)
    matrix = torch.randn(bench.SIDE, bench.SIDE)
    bench.measure("product", args, lambda: matrix @ matrix, 5, parameters=7, doubled=lambda seconds: 2 * seconds)
    line = json.loads(capsys.readouterr().out)
    assert line["gflop"] == pytest.approx(2 * 2.048 ** 3, rel=1e-3) and line["parameters"] == 7
    assert line["gflop_per_s"] == pytest.approx(line["gflop"] / line["ms"] * 1e3, rel=1e-2)
    assert line["share_of_peak"] == pytest.approx(line["gflop_per_s"] / line["peak_gflop_per_s"], rel=1e-2)
    assert line["doubled"] == pytest.approx(2e-3 * line["ms"], rel=1e-2)


def test_flops_are_those_of_the_products_whatever_computes_attention(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    bench = importlib.import_module("bench_prior")
    x, w = torch.randn(3, 4, 16, 8), torch.randn(8, 5)
    assert bench.flops_of(lambda: x @ w) == 2 * 3 * 4 * 16 * 8 * 5
    attention = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="eager")
    assert bench.flops_of(lambda: attention(x, x, x)) == 2 * 2 * 3 * 4 * 16 * 16 * 8
