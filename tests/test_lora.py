"""Low-rank adapters: their algebra, their files, and training them as a user does."""
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, Settings, awake, metrics, run
from torch import nn
from torch.testing import assert_close

import train_prior
from common import checkpoint, resume
from common.config import UserError
from common.ema import EMA
from common.models import lora
from common.models import nn as layers


class Small(nn.Module):
    """A transformer between two layers that take no adapters, the last of them named "out"."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=4)
        self.transformer = layers.Transformer(width, 2, 4)
        self.out = nn.Linear(width, 5)
        awake(self)

    def forward(self, x):
        return self.out(self.transformer(self.conv(x).flatten(2).mT))


def output(model):
    inputs = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(inputs).float()


def test_a_new_adapter_changes_nothing_and_adapters_alone_are_trained():
    model = Small()
    plain = Small()
    adapters = lora.inject(model, 4)
    assert torch.equal(output(model), output(plain))
    assert {*adapters.parameters()} == {p for p in model.parameters() if p.requires_grad}


def test_only_the_layers_of_attention_or_those_named_are_adapted():
    names = []
    for i in range(2):
        for layer in ("query", "key_value", "out"):
            names.append(f"transformer/blocks/{i}/attention/{layer}")
    assert list(lora.inject(Small(), 2)) == names  # not the last layer, though its name is "out"
    adapters = lora.inject(Small(), 2, names=("down", "blocks.1.attention.query"))
    assert set(adapters) == {
        "transformer/blocks/0/ff/down",
        "transformer/blocks/1/ff/down",
        "transformer/blocks/1/attention/query",
    }
    with pytest.raises(UserError, match=r"Small has no Linear layers with names in \('q_proj',\)"):
        lora.inject(Small(), 2, names=("q_proj",))


@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_every_adapted_weight_is_the_formula_at_that_scale_and_the_callers_stay(scale):
    plain = Small()
    expected = Small()
    adapted = Small()
    adapters = awake(lora.inject(adapted, 4))
    for name, adapter in adapters.items():
        layer = expected.get_submodule(name.replace("/", "."))
        layer.weight.data += scale * torch.einsum("or,ri->oi", adapter.B, adapter.A)
    before = plain.state_dict()
    weights = lora.add(before, adapters.state_dict(), scale)
    assert_close(weights, expected.state_dict())
    assert before is not weights
    assert_close(before, Small().state_dict(), rtol=0, atol=0)
    if scale == 1:
        assert_close(output(adapted), output(expected))


# The prior, as a user trains it

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
    assert losses[1][-1] < losses[1][0] < losses[0][0]  # it starts where the base ends

    digest = checkpoint.checksum(base)
    info = {"rank": 4, "base": str(base), "base_sha256": digest, "source": str(base)}
    for name in ("model.pt", "checkpoints/step_00000016.pt"):
        contents = checkpoint.load(f"run/{name}")
        assert contents["lora"] == info
        assert len(contents["model"]) == 12
        assert all(key.endswith((".A", ".B")) for key in contents["model"])

    # Another run starts from the model that they make.
    path = "run/model.pt"
    words = dict(SMALL, init_from=path, steps=1, lr=1e-9)
    run("train_prior", data=emb, run_dir="all", **words)
    expected, _ = train_prior.load_prior(path, "cpu")
    found, _ = train_prior.load_prior("all/model.pt", "cpu")
    assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)


# Files

def save_adapters(folder):
    """(file of a model, file of adapters on it of rank 4, the adapted model)."""
    model = Small()
    base = folder / "base.pt"
    path = folder / "adapters.pt"
    checkpoint.save({"model": model.state_dict(), "step": 1}, base)
    adapters, info = resume.add_adapters(model, adapting(base), checkpoint.checksum(base))
    weights = awake(adapters).state_dict()
    checkpoint.save({"model": weights, "step": 2, "lora": info}, path)
    return base, path, model


def adapting(base):
    return SimpleNamespace(init_from=str(base), lora_rank=4, precision="fp32")


def test_a_base_in_half_precision_gives_what_autocast_does_and_adapters_stay_in_fp32(tmp_path):
    path = tmp_path / "base.pt"
    checkpoint.save({"model": Small().state_dict()}, path)
    outputs = []
    for precision in ("fp32", "bf16"):
        model = Small()
        cfg = SimpleNamespace(init_from=str(path), lora_rank=4, precision=precision)
        adapters, _ = resume.add_adapters(model, cfg, "digest")
        assert {p.dtype for p in adapters.parameters()} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(output(model))
        outputs[-1].sum().backward()
        assert all(adapter.B.grad.any() for adapter in adapters.values())
        stored = {p.dtype for p in model.out.parameters()}
        assert stored == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert torch.equal(*outputs)


def test_a_file_with_adapters_merged_in_or_loaded_equals_the_adapted_model(tmp_path, capsys):
    base, path, adapted = save_adapters(tmp_path)
    contents = checkpoint.load(path)
    weights = contents["model"]
    merged = checkpoint.merged(contents, path)
    assert merged.keys() == {"model", "step"}
    assert contents["model"] is weights  # the caller's
    model = Small()
    model.load_state_dict(merged["model"])
    assert_close(output(model), output(adapted))
    without = checkpoint.merged(contents, path, scale=0.0)["model"]
    assert_close(without, checkpoint.load(base)["model"], rtol=0, atol=0)
    other = Small()
    checkpoint.load_weights(lora.inject(other, 4), weights, path)
    assert torch.equal(output(other), output(adapted))
    assert not capsys.readouterr().err


def test_mistakes_with_files_of_adapters_are_named(tmp_path, capsys):
    base, path, _ = save_adapters(tmp_path)
    with pytest.raises(UserError, match=f"{path}: LoRA adapters, not a model; give their base"):
        resume.add_adapters(Small(), adapting(path), "digest")
    contents = checkpoint.load(path)
    checkpoint.save({"model": Small().state_dict(), "step": 5}, base)
    checkpoint.merged(contents, path)
    assert f"{path} was trained on {base}, which has changed since" in capsys.readouterr().err
    checkpoint.save({"model": Small(64).state_dict()}, base)
    with pytest.raises(UserError, match=f"{path}: adapters of another model than {base}"):
        checkpoint.merged(contents, path)


def start_adapted(base, path):
    """Weights of a new adapted model, and of one that begins with adapters merged in."""
    models = [Small(), Small()]
    for parameter in (*models[0].parameters(), *models[1].parameters()):
        nn.init.zeros_(parameter)
    adapters, _ = resume.add_adapters(models[0], adapting(base), "digest")
    state = resume.State(
        Settings(init_from=str(path)), models[1], EMA(models[1]), [], None, {}, {})
    resume.restore(SimpleNamespace(resume_from=None), state)
    base_weights = models[0].out.weight.detach()  # which has no adapter
    return len(adapters), base_weights, models[1].state_dict()


def test_every_rank_reads_the_base_of_adapters(tmp_path, on_ranks):
    base, path, _ = save_adapters(tmp_path)
    merged = checkpoint.merged(checkpoint.load(path), path)["model"]
    for count, base_weights, weights in on_ranks(2, start_adapted, base, path):
        assert count == 6
        assert torch.equal(base_weights, Small().out.weight)
        assert_close(weights, merged, rtol=0, atol=0)
