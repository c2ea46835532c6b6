"""LoRA runs: starting from a base model, and merging adapters for inference."""
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, Settings, awake, metrics, run, same
from torch import nn
from torch.testing import assert_close

import train_prior
from common import adapters, checkpoint, resume
from common.config import UserError
from common.ema import EMA
from common.models import lora
from common.models import nn as layers


class Small(nn.Module):
    """A transformer, then a layer that gets no adapter, although its name is "out"."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.transformer = layers.Transformer(width, 2, 4)
        self.out = nn.Linear(width, 5)
        awake(self)

    def forward(self, x):
        return self.out(self.transformer(x))


def output(model):
    inputs = torch.randn(6, 16, 32, generator=torch.Generator().manual_seed(1))
    return model(inputs).float()


@dataclass(frozen=True)
class Tuning(Settings):
    lora_rank: int = 4


def adapting(base, precision="fp32"):
    return SimpleNamespace(init_from=str(base), lora_rank=4, precision=precision)


def save_adapters(folder):
    """Save a base and adapters of rank 4: (file of the base, file of the adapters, model)."""
    model = Small()
    base = folder / "base.pt"
    path = folder / "adapters.pt"
    checkpoint.save({"model": model.state_dict(), "step": 1}, base)
    trained, info = adapters.start(model, adapting(base), checkpoint.checksum(base))
    weights = awake(trained).state_dict()
    checkpoint.save({"model": weights, "step": 2, "lora": info}, path)
    return base, path, model


# The start of a run

@pytest.mark.parametrize("source", [None, "someone/model"])
def test_adapters_stand_on_the_averages_of_their_base_and_say_where_it_is_from(source, tmp_path):
    path = tmp_path / "base.pt"
    weights = Small().state_dict()
    averages = {name: weight + 1 for name, weight in weights.items()}
    entries = {"source": source} if source else {}
    checkpoint.save({"model": weights, "ema": averages, **entries}, path)
    model = Small()
    trained, info = adapters.start(model, adapting(path), "digest")
    assert {*trained.parameters()} == {p for p in model.parameters() if p.requires_grad}
    assert trained["transformer/blocks/0/attention/query"].A.shape == (4, 32)
    query = model.transformer.blocks[0].attention.query
    assert torch.equal(query.weight, averages["transformer.blocks.0.attention.query.weight"])
    assert torch.equal(model.out.bias, averages["out.bias"])
    base = str(Path(path).absolute())
    assert info == {
        "rank": 4,
        "base": base,
        "base_sha256": "digest",
        "source": source or base,
    }

    # The weights of --init_from are the frozen base, not part of the State.
    cfg = Tuning(init_from=str(path))
    state = resume.State(cfg, trained, EMA(trained), [], None, {}, {"kind": "test"})
    before = {name: weight.clone() for name, weight in trained.state_dict().items()}
    resume.restore(SimpleNamespace(resume_from=None), state)
    assert same(state.model.state_dict(), before)


def test_a_base_in_half_precision_gives_what_autocast_does_and_adapters_stay_in_fp32(tmp_path):
    path = tmp_path / "base.pt"
    checkpoint.save({"model": Small().state_dict()}, path)
    outputs = []
    for precision in ("fp32", "bf16"):
        model = Small()
        trained, _ = adapters.start(model, adapting(path, precision), "digest")
        assert {p.dtype for p in trained.parameters()} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(output(model))
        outputs[-1].sum().backward()
        assert all(adapter.B.grad.any() for adapter in trained.values())
        stored = {p.dtype for p in model.out.parameters()}
        assert stored == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert torch.equal(*outputs)


def start_adapted(base, path):
    """(number of adapters, a weight of the base, weights with adapters merged in)."""
    models = [Small(), Small()]
    for parameter in (*models[0].parameters(), *models[1].parameters()):
        nn.init.zeros_(parameter)
    trained, _ = adapters.start(models[0], adapting(base), "digest")
    state = resume.State(
        Settings(init_from=str(path)), models[1], EMA(models[1]), [], None, {}, {})
    resume.restore(SimpleNamespace(resume_from=None), state)
    base_weights = models[0].out.weight.detach()  # this layer has no adapter
    return len(trained), base_weights, models[1].state_dict()


def test_every_rank_reads_the_base_of_adapters(tmp_path, on_ranks):
    base, path, _ = save_adapters(tmp_path)
    merged = adapters.merged(checkpoint.load(path), path)["model"]
    for count, base_weights, weights in on_ranks(2, start_adapted, base, path):
        assert count == 6
        assert torch.equal(base_weights, Small().out.weight)
        assert_close(weights, merged, rtol=0, atol=0)


# Files

def test_a_file_with_adapters_merged_in_or_loaded_equals_the_adapted_model(tmp_path, capsys):
    base, path, adapted = save_adapters(tmp_path)
    contents = checkpoint.load(path)
    weights = contents["model"]
    merged = adapters.merged(contents, path)
    assert merged.keys() == {"model", "step"}
    assert contents["model"] is weights  # the caller's dict is unchanged
    model = Small()
    model.load_state_dict(merged["model"])
    assert_close(output(model), output(adapted))
    without = adapters.merged(contents, path, scale=0.0)["model"]
    assert_close(without, checkpoint.load(base)["model"], rtol=0, atol=0)
    other = Small()
    checkpoint.load_weights(lora.inject(other, 4), weights, path)
    assert torch.equal(output(other), output(adapted))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0])
def test_the_averages_of_a_base_are_what_adapters_are_added_to_at_that_scale(scale, tmp_path):
    base, path, _ = save_adapters(tmp_path)
    torch.manual_seed(3)
    averages = {name: torch.randn_like(w) for name, w in Small().state_dict().items()}
    checkpoint.save({"model": Small().state_dict(), "ema": averages}, base)
    contents = checkpoint.load(path)
    merged = adapters.merged(contents, path, scale)["model"]
    name = "transformer/blocks/1/attention/out"
    product = contents["model"][f"{name}.B"] @ contents["model"][f"{name}.A"]
    key = name.replace("/", ".") + ".weight"
    assert_close(merged[key], averages[key] + scale * product)
    assert torch.equal(merged["out.bias"], averages["out.bias"])


def test_mistakes_with_files_of_adapters_are_named(tmp_path, capsys):
    base, path, _ = save_adapters(tmp_path)
    with pytest.raises(UserError, match=f"{path}: has only LoRA adapters; give their base model"):
        adapters.start(Small(), adapting(path), "digest")
    whole = checkpoint.load(base)
    assert adapters.merged(whole, base) is whole
    with pytest.raises(UserError, match=f"--lora_scale: {base} has no adapters; leave it out"):
        adapters.merged(whole, base, scale=0.5)
    contents = checkpoint.load(path)
    checkpoint.save({"model": Small().state_dict(), "step": 5}, base)
    adapters.merged(contents, path)
    assert f"{path} was trained on {base}, which has changed since" in capsys.readouterr().err
    for other in (Small(64), nn.Linear(4, 3)):
        checkpoint.save({"model": other.state_dict()}, base)
        with pytest.raises(UserError, match=f"{path}: its adapters do not fit {base}"):
            adapters.merged(contents, path)


# Training the prior as a user would

def test_adapters_are_trained_and_saved_alone_and_resume_but_not_on_another_base(emb, finished):
    base = finished / "model.pt"

    def adapt(**changed):
        settings = dict(SMALL, lr=0.01, lora_rank=4, init_from=base, cosine="false")
        return run("train_prior", data=emb, run_dir="run", **settings | changed)

    adapt(steps=8)
    assert "another model" in adapt(expect=1, init_from=finished / "best.pt")
    adapt(steps=16)
    losses = []
    for folder in (finished, "run"):
        losses.append([line["val_loss"] for line in metrics(folder) if "val_loss" in line])
    assert losses[1][-1] < losses[1][0] < losses[0][0]  # the adapters start from the base

    digest = checkpoint.checksum(base)
    info = {"rank": 4, "base": str(base), "base_sha256": digest, "source": str(base)}
    for name in ("model.pt", "checkpoints/step_00000016.pt"):
        contents = checkpoint.load(f"run/{name}")
        assert contents["lora"] == info
        assert len(contents["model"]) == 12
        assert all(key.endswith((".A", ".B")) for key in contents["model"])

    # Another run starts from the merged model.
    path = "run/model.pt"
    words = dict(SMALL, init_from=path, steps=1, lr=1e-9)
    run("train_prior", data=emb, run_dir="all", **words)
    expected, _ = train_prior.load_prior(path, "cpu")
    found, _ = train_prior.load_prior("all/model.pt", "cpu")
    assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)
