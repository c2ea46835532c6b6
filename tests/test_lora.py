"""Low-rank adapters: their algebra, their files, and training them as a user does."""
import copy
import dataclasses
import json

import pytest
import torch
from helpers import SMALL, differences, flags, metrics
from helpers import run as run_script
from torch import nn

import train_prior
from common import checkpoint, config, lora, optim
from common import nn as layers
from common.config import UserError


class Small(nn.Module):
    """A transformer between two layers that take no adapters, the last of which is called as one of attention's."""

    def __init__(self, width=32):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=4)
        self.transformer = layers.Transformer(width, 2, 4)
        self.out = nn.Linear(width, 5)
        for name, parameter in self.named_parameters():
            if "out.weight" in name or "down.weight" in name:  # these start at zero, which would hide mistakes
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        return self.out(self.transformer(self.conv(x).flatten(2).mT))


def small(width=32):
    torch.manual_seed(0)
    return Small(width)


def inputs():
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def stir(adapters):
    """Give every B values, as training would."""
    for name, parameter in adapters.named_parameters():
        if name.endswith("B"):
            nn.init.normal_(parameter, std=0.1)
    return adapters


def fit(model, adapters):
    optimizers = optim.make(adapters, "adamw", 0.02, 0.1)
    for _ in range(3):
        (model(inputs()).float() - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_fresh_adapter_changes_nothing_and_training_changes_adapters_alone():
    model, plain = small(), small()
    adapters = lora.inject(model, 4)
    assert torch.equal(model(inputs()), plain(inputs()))
    before = {name: tensor.clone() for name, tensor in adapters.state_dict().items()}
    assert {id(p) for p in adapters.parameters()} == {id(p) for p in model.parameters() if p.requires_grad}
    fit(model, adapters)
    assert all(not torch.equal(before[name], tensor) for name, tensor in adapters.state_dict().items())
    frozen = {name.replace(".parametrizations.weight.original", ".weight"): p for name, p in model.named_parameters()
              if not p.requires_grad}
    assert frozen.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(tensor, plain.get_parameter(name)) for name, tensor in frozen.items())
    assert not torch.allclose(model(inputs()), plain(inputs()), atol=1e-3)


def test_only_the_layers_of_attention_or_those_named_are_adapted():
    adapters = lora.inject(small(), 2)
    assert list(adapters.state_dict()) == [
        f"transformer/blocks/{i}/attention/{layer}.{matrix}" for i in range(2)
        for layer in ("query", "key_value", "out") for matrix in "AB"]  # not the last layer, called `out` too
    assert set(lora.inject(small(), 2, names=("down", "blocks.1.attention.query"))) == {
        "transformer/blocks/0/ff/down", "transformer/blocks/1/ff/down", "transformer/blocks/1/attention/query"}
    attention = lora.inject(layers.Attention(8, 2), 2)  # itself the module with a layer `key_value`
    assert set(attention) == {"query", "key_value", "out"}
    with pytest.raises(UserError, match="Sequential has no layers to adapt that are named as in attention"):
        lora.inject(nn.Sequential(nn.Linear(4, 4)), 2)
    with pytest.raises(UserError, match=r"Small has no layers to adapt that are named \('q_proj',\)"):
        lora.inject(small(), 2, names=("q_proj",))


def test_every_adapted_weight_is_the_formula_at_any_scale():
    model, plain = small(), small()
    adapters = stir(lora.inject(model, 4))
    lora.set_scale(model, 0.5)
    with torch.no_grad():
        changed = copy.deepcopy(plain)
        for name, adapter in adapters.items():
            change = torch.einsum("or,ri->oi", adapter.B, adapter.A)
            changed.get_submodule(name.replace("/", ".")).weight += 0.5 * change
        torch.testing.assert_close(model(inputs()), changed(inputs()))
        lora.set_scale(model, 0)
        assert torch.equal(model(inputs()), plain(inputs()))


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
def test_merging_equals_the_adapted_model_at_that_scale_and_leaves_no_trace(scale):
    model, plain = small(), small()
    stir(lora.inject(model, 4))
    lora.set_scale(model, scale)
    with torch.no_grad():
        expected = model(inputs())
        lora.merge(model)
        torch.testing.assert_close(model(inputs()), expected)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()}
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()] and not lora.extract(model)
    assert not any(p.requires_grad for p in model.parameters())


def test_adapters_survive_the_round_trip_and_those_of_another_model_are_refused_by_name(tmp_path):
    model = small()
    stir(lora.inject(model, 4))
    checkpoint.save({"model": lora.extract(model).state_dict()}, tmp_path / "lora.pt")
    found, other = checkpoint.load(tmp_path / "lora.pt")["model"], small()
    lora.inject(other, 4)
    lora.load(other, found, "lora.pt")
    assert torch.equal(other(inputs()), model(inputs()))
    wide = small(64)
    lora.inject(wide, 4)
    with pytest.raises(UserError, match=r"lora.pt: weights of another model: 12 entries differ: transformer/b"):
        lora.load(wide, found, "lora.pt")


def test_a_compiled_model_computes_the_same_and_follows_the_scale():
    model = small()
    stir(lora.inject(model, 4))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for scale in (1.0, 0.5):
        lora.set_scale(model, scale)
        torch.testing.assert_close(compiled(inputs()), model(inputs()))


def test_adapters_stay_fp32_on_a_bf16_base():
    model = small().to(torch.bfloat16)
    adapters = lora.inject(model, 4)
    assert {p.dtype for p in adapters.parameters()} == {torch.float32}
    assert model.transformer.blocks[0].attention.query.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        fit(model, adapters)
    assert all((p != 0).any() for p in adapters.parameters())


# The prior, as a user trains it


def run(*words, **settings):
    return run_script("train_prior", *words, **settings)


def adapters_of(folder, **settings):
    return {**SMALL, "lr": 0.01, "init_from": folder / "base/model.pt", "lora_rank": 4, **settings}


@pytest.fixture(scope="module")
def runs(emb, tmp_path_factory):
    """A folder with a run `base`, and `lora`, adapters on it."""
    folder = tmp_path_factory.mktemp("runs")
    run(*flags(data=emb, run_dir=folder / "base", **SMALL))
    out = run(*flags(data=emb, run_dir=folder / "lora", **adapters_of(folder)))
    assert out.endswith(f"evaluate --run_dir {folder}/lora\n")
    return folder


def test_a_run_of_adapters_learns_and_saves_them_alone_and_says_of_what(runs):
    losses = [line["val_loss"] for line in metrics(runs / "lora") if "val_loss" in line]
    base = [line["val_loss"] for line in metrics(runs / "base") if "val_loss" in line]
    assert losses[-1] < losses[0] < base[0]  # it starts where the base ends
    for name in ("model.pt", "best.pt", "checkpoints/step_00000024.pt"):
        found = checkpoint.load(runs / "lora" / name)
        assert all(key.endswith((".A", ".B")) for key in found["model"]) and len(found["model"]) == 12
        assert found["lora"] == {"rank": 4, "base": str(runs / "base/model.pt"),
                                 "base_sha256": checkpoint.checksum(runs / "base/model.pt")}


def test_a_run_of_adapters_resumes_bit_for_bit_and_not_on_another_base(emb, runs, tmp_path):
    settings = dict(data=emb, run_dir=tmp_path / "run")
    run(*flags(**settings, **adapters_of(runs, cosine="false", steps=8)))
    run(*flags(data=emb, run_dir=tmp_path / "whole", **adapters_of(runs, cosine="false")))
    out = run(*flags(**settings, **adapters_of(runs, cosine="false")))
    assert "at step 8 of 24" in out
    assert differences(tmp_path / "whole", tmp_path / "run") == ["metrics"]  # which have the test at step 8 as well
    for changed, name in ((dict(init_from=runs / "base/best.pt"), "lora_base"), (dict(lora_rank=2), "lora_rank")):
        out = run(*flags(**settings, **adapters_of(runs, **changed)), expect=1)
        assert "a run of another model or other data" in out and f"{name} is" in out


def test_adapters_train_on_two_ranks(emb, runs, tmp_path):
    run(*flags(data=emb, run_dir=tmp_path / "run", **adapters_of(runs)), ranks=2)
    losses = [line["val_loss"] for line in metrics(tmp_path / "run") if "val_loss" in line]
    assert losses[-1] < losses[0]


def loss(folder, tmp_path, *words):
    """The test loss that `evaluate` finds."""
    run("evaluate", *flags(run_dir=folder, eval_timesteps=4, device="cpu", out=tmp_path / "figures.json"), *words)
    return json.loads((tmp_path / "figures.json").read_text())["loss"]


def test_adapters_are_used_with_their_base_at_any_scale(runs, tmp_path):
    base, adapted = (loss(runs / name, tmp_path) for name in ("base", "lora"))
    assert loss(runs / "lora", tmp_path, "--lora_scale", "0") == base
    half = loss(runs / "lora", tmp_path, "--lora_scale", "0.5")
    assert adapted < half < base
    recorded = [line["test_loss"] for line in metrics(runs / "lora") if "test_loss" in line][-1]
    same = loss(runs / "lora", tmp_path, "--eval_samples", "100")
    assert same == pytest.approx(recorded, abs=1e-5)  # training measured the same by adapters in place


def test_a_model_is_read_by_its_kind_with_the_weights_wanted(runs):
    path = runs / "base/checkpoints/step_00000024.pt"
    whole = checkpoint.load(path)
    for weights, entry in (("ema", "ema"), ("online", "model")):
        cfg, found = lora.read_model("prior", train_prior.Config, path, weights)
        assert cfg.width == 32 and all(torch.equal(t, whole[entry][name]) for name, t in found["model"].items())
    with pytest.raises(UserError, match="has the averaged weights alone; --weights online needs one of RUN/checkpoint"):
        lora.read_model("prior", train_prior.Config, runs / "base/model.pt", "online")
    with pytest.raises(UserError, match=f"{path}: not a decoder's model.pt, best.pt or checkpoint"):
        lora.read_model("decoder", train_prior.Config, path)


# Files

@dataclasses.dataclass(frozen=True)
class Config(config.Settings):
    width: int = 32  # of the model
    lora_rank: int = 0  # of adapters
    init_from: str = ""  # their base
    run_dir: str = ""  # folder of the run


def saved(tmp_path, width=32):
    """A model's file and one of adapters on it, of rank 4; the adapted model."""
    model, base, path = small(width), tmp_path / f"base{width}.pt", tmp_path / "adapters.pt"
    facts = {"kind": "small", "step": 1, "config": {"width": width, "run_dir": str(tmp_path)}, "cwd": "/",
             "clip": "open_clip:ViT-L-14/openai"}
    checkpoint.save({"model": model.state_dict(), **facts}, base)
    adapters, about = lora.start(model, Config(width, 4, str(base)))
    checkpoint.save({"model": stir(adapters).state_dict(), **facts, "step": 2, "lora": about}, path)
    return base, path, model


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_file_with_adapters_merged_in_equals_the_adapted_model(tmp_path, capsys, scale):
    _, path, adapted = saved(tmp_path)
    cfg, state = lora.read_model("small", Config, path, "ema", *([] if scale == 1 else [scale]))
    model = small()
    model.load_state_dict(state["model"])
    lora.set_scale(adapted, scale)
    torch.testing.assert_close(model(inputs()), adapted(inputs()))
    assert cfg.width == 32 and state["step"] == 2 and "lora" not in state and not capsys.readouterr().out
    assert state["clip"] == "open_clip:ViT-L-14/openai"  # which is no path
    found = checkpoint.load(path)
    before = dict(found["model"])
    lora.merged(found, path, 2.0)  # the contents given are left as they are
    assert "lora" in found and all(found["model"][name] is tensor for name, tensor in before.items())


def test_mistakes_with_files_of_adapters_are_named(tmp_path, capsys):
    base, path, _ = saved(tmp_path)
    with pytest.raises(UserError, match=f"{path}: LoRA adapters, not a model; give their base, {base}"):
        lora.start(small(), Config(32, 4, str(path)))
    checkpoint.save({**checkpoint.load(base), "step": 5}, base)
    lora.read_model("small", Config, path)
    assert f"note: {path} was trained on {base}, which has changed since" in capsys.readouterr().out
    checkpoint.save({"model": small(64).state_dict(), "kind": "small", "config": {}}, base)
    with pytest.raises(UserError, match=f"{path}: adapters of another model than {base}: transformer.blocks.0."
                                        "attention.key_value.weight is not 64 x 32"):
        lora.read_model("small", Config, path)
