"""Low-rank adapters: their algebra, their files, and training them as a user does."""
import copy
import json

import numpy as np
import pytest
import torch
from helpers import SMALL, differences, flags, metrics
from helpers import run as run_script
from torch import nn
from torch.nn.utils import parametrize

import train_prior
from common import checkpoint, clip, config, ema, lora, optim, synthetic
from common import nn as layers
from common.config import UserError

CPU = torch.device("cpu")


class Small(nn.Module):
    """Convolution, transformer and a last layer: everything that takes adapters, also one read by its `.weight`."""

    def __init__(self, width=32):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=4)
        self.transformer = layers.Transformer(width, 2, 4, ff_mult=2)
        self.out = nn.Linear(width, 5)
        for name, parameter in self.named_parameters():
            if "out.weight" in name or "down.weight" in name:  # these start at zero, which would hide mistakes
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        return self.out(self.transformer(self.conv(x).flatten(2).mT))


def small(width=32):
    torch.manual_seed(0)
    return Small(width)


def inputs(count=6):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def stir(adapters):
    """Give every B values, as training would."""
    for name, parameter in adapters.named_parameters():
        if name.endswith("B"):
            nn.init.normal_(parameter, std=0.1)
    return adapters


def fit(model, adapters, steps=3):
    optimizers = optim.make(adapters, "adamw", 0.02, 0.1)
    for _ in range(steps):
        (model(inputs()).float() - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def frozen(model):
    """The frozen weights by their names before adapters came."""
    return {name.replace(".parametrizations.weight.original", ".weight"): p.detach().clone()
            for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_a_fresh_adapter_changes_nothing_and_training_changes_adapters_alone(targets):
    model, plain = small(), small()
    adapters = lora.inject(model, 4, targets=targets)
    assert torch.equal(model(inputs()), plain(inputs()))
    before, weights = lora.extract(copy.deepcopy(model)), dict(plain.named_parameters())
    fit(model, adapters)
    after = lora.extract(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert frozen(model).keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in frozen(model).items())
    assert not torch.allclose(model(inputs()), plain(inputs()), atol=1e-3)


def test_targets_and_names():
    attention = lora.inject(small(), 2).state_dict()
    expected = [f"transformer.blocks.{i}.attention.{layer}.{part}" for i in range(2)
                for layer in ("query", "key_value", "out") for part in "AB"]
    assert list(attention) == expected  # the last layer, which is called `out` too, is not one of attention
    model = small()
    everything = lora.inject(model, 2, targets="all")
    assert {name[:-2] for name in everything.state_dict()} == {
        "conv", "out", *(f"transformer.blocks.{i}.{layer}" for i in range(2) for layer in (
            "attention.query", "attention.key_value", "attention.out", "ff.gate_up", "ff.down"))}
    assert list(lora.extract(model)) == list(everything.state_dict())
    assert {id(p) for p in everything.parameters()} == {id(p) for p in model.parameters() if p.requires_grad}
    with pytest.raises(UserError, match="--lora_targets: Sequential has no attention layers to adapt"):
        lora.inject(nn.Sequential(nn.Linear(4, 4)), 2)


def test_every_adapted_weight_is_the_formula():
    model, plain = small(), small()
    adapters = stir(lora.inject(model, 4, alpha=6, targets="all"))
    lora.set_scale(model, 0.5)
    x = inputs()
    with torch.no_grad():
        changed = copy.deepcopy(plain)
        for name, layer in lora.layers(changed, "all").items():
            a, b = (adapters.get_parameter(f"{name}.{part}") for part in "AB")
            layer.weight += 0.5 * 6 / 4 * torch.einsum("or,ri->oi", b, a).reshape(layer.weight.shape)
        assert torch.allclose(model(x), changed(x), atol=1e-5)
        lora.set_scale(model, 0)
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
def test_merging_equals_the_adapted_model_at_that_scale_and_leaves_no_trace(scale):
    model, plain = small(), small()
    stir(lora.inject(model, 4, targets="all"))
    lora.set_scale(model, scale)
    with torch.no_grad():
        expected = model(inputs())
        lora.merge(model)
        assert torch.allclose(model(inputs()), expected, atol=1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()] and not lora.extract(model)


def test_adapters_survive_the_round_trip_and_another_model_is_refused_by_name(tmp_path):
    model = small()
    stir(lora.inject(model, 4))
    checkpoint.save({"model": lora.extract(model)}, tmp_path / "lora.pt")
    found, other = checkpoint.load(tmp_path / "lora.pt")["model"], small()
    adapters = lora.inject(other, 4)
    lora.load(other, found, "lora.pt")
    assert torch.equal(other(inputs()), model(inputs()))
    stir(adapters)
    lora.load(adapters, found, "lora.pt")  # the adapters by themselves take them as well
    assert torch.equal(other(inputs()), model(inputs()))
    wide = small(64)
    lora.inject(wide, 4)
    name = r"transformer.blocks.0.attention.query.A"
    with pytest.raises(UserError, match=rf"lora.pt: adapters of another model: {name} is \(4, 32\) there and \(4, 6"):
        lora.load(wide, found, "lora.pt")
    more = small()
    lora.inject(more, 4, targets="all")
    with pytest.raises(UserError, match=r"adapters of another model: conv.A is missing there and \(4, 27\) here"):
        lora.load(more, found, "lora.pt")
    with pytest.raises(UserError, match=r"conv.A is \(4, 27\) there and missing here"):
        lora.load(other, lora.extract(more), "lora.pt")


def test_a_copy_of_an_adapted_model_has_adapters_of_its_own():
    model = small()
    adapters = stir(lora.inject(model, 4, targets="all"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(inputs()), model(inputs()))
    fit(model, adapters)
    assert not torch.equal(twin(inputs()), model(inputs()))
    lora.merge(twin)
    assert parametrize.is_parametrized(model.conv, "weight")


def test_the_average_of_adapters_is_applied_and_taken_back():
    model = small()
    adapters = lora.inject(model, 4)
    average = ema.EMA(adapters, decay=0.5, warmup="none")
    fit(model, adapters)
    average.update(5)
    with torch.no_grad():
        own = model(inputs())
        with average.applied(adapters):
            assert not torch.equal(model(inputs()), own)
            assert all(torch.equal(lora.extract(model)[name], t) for name, t in average.state_dict().items())
        assert torch.equal(model(inputs()), own)


def test_a_compiled_model_computes_the_same_and_follows_the_scale():
    model = small()
    stir(lora.inject(model, 4))
    expected = model(inputs())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(inputs()), expected, atol=1e-5)
    lora.set_scale(model, 0.5)
    assert torch.allclose(compiled(inputs()), model(inputs()), atol=1e-5)
    assert not torch.allclose(compiled(inputs()), expected, atol=1e-3)


def test_adapters_stay_fp32_on_a_bf16_base():
    model, plain = small(), small()
    for layer in lora.layers(model, "all").values():
        layer.to(torch.bfloat16)
    adapters = lora.inject(model, 4, targets="all")
    assert {p.dtype for p in adapters.parameters()} == {torch.float32}
    assert model.conv.weight.dtype == torch.bfloat16 == model.transformer.blocks[0].ff.down.weight.dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(inputs()), plain(inputs()))  # autocast rounds the weights in the same way
        fit(model, adapters)
    assert all(p.dtype == torch.float32 and (p != 0).any() for p in adapters.parameters())


def test_rank_8_is_less_than_a_twentieth_of_a_prior():
    big = {**train_prior.PRESETS["vit-l-14"], "depth": 2}
    for cfg, most in ((train_prior.Config(), 0.05), (train_prior.Config(**big), 0.01)):
        prior = train_prior.Prior(cfg, 768, 768)
        size = sum(p.numel() for p in prior.parameters())
        assert 0 < sum(p.numel() for p in lora.inject(prior, 8).parameters()) < most * size


# The prior, as a user trains it


def run(*words, **settings):
    return run_script("train_prior", *words, **settings)


@pytest.fixture(scope="module")
def runs(emb, tmp_path_factory):
    """A folder with a run `base`, and `lora`, adapters on it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs")
    run(*flags(data=emb, run=folder / "base", **SMALL))
    out = run(*flags(data=emb, run=folder / "lora", **adapters_of(folder)))
    assert f"--run {folder}/base --model model.pt --lora {folder}/lora/model.pt" in out
    return folder


def adapters_of(folder, **settings):
    return {**SMALL, "lr": 0.01, "init_from": folder / "base/model.pt", "lora_rank": 4, **settings}


def test_a_run_of_adapters_learns_saves_them_alone_and_says_of_what(runs):
    losses = [line["val_loss"] for line in metrics(runs / "lora") if "val_loss" in line]
    base = [line["val_loss"] for line in metrics(runs / "base") if "val_loss" in line]
    assert losses[-1] < losses[0] < base[0]  # it starts where the base ends
    for name in ("model.pt", "best.pt", "checkpoints/step_00000024.pt"):
        found = checkpoint.load(runs / "lora" / name)
        assert all(key.endswith((".A", ".B")) for key in found["model"]) and len(found["model"]) == 12
        assert found["lora"] == {"rank": 4, "alpha": 4.0, "targets": "attention", "base": str(runs / "base/model.pt"),
                                 "base_digest": checkpoint.checksum(runs / "base/model.pt")[:16]}
    assert (runs / "lora/model.pt").stat().st_size < (runs / "base/model.pt").stat().st_size / 5


def test_a_run_of_adapters_resumes_bit_for_bit_and_not_on_another_base(emb, runs, tmp_path):
    settings = dict(data=emb, run=tmp_path / "run")
    run(*flags(**settings, **adapters_of(runs, cosine="false", steps=8)))
    run(*flags(data=emb, run=tmp_path / "whole", **adapters_of(runs, cosine="false")))
    out = run(*flags(**settings, **adapters_of(runs, cosine="false")))
    assert "at step 8 of 24" in out
    assert differences(tmp_path / "whole", tmp_path / "run") == ["metrics"]  # which have the test at step 8 as well
    for changed, name in ((dict(init_from=runs / "base/best.pt"), "lora_base_digest"), (dict(lora_rank=2), "lora_rank"),
                          (dict(lora_rank=0), "lora_rank"), (dict(lora_targets="all"), "lora_targets")):
        out = run(*flags(**settings, **adapters_of(runs, **changed)), expect=1)
        assert "a run of another model or other data" in out and f"{name} is" in out


def test_adapters_train_on_two_ranks_on_a_bf16_base(emb, runs, tmp_path):
    settings = adapters_of(runs, lora_targets="all", lora_base="bf16", precision="bf16", lora_alpha=8,
                           self_condition="false")
    run(*flags(data=emb, run=tmp_path / "run", **settings), ranks=2)
    found = checkpoint.load(tmp_path / "run/checkpoints/step_00000024.pt")
    assert {t.dtype for t in (*found["model"].values(), *found["ema"].values())} == {torch.float32}
    assert found["lora"]["alpha"] == 8
    losses = [line["val_loss"] for line in metrics(tmp_path / "run") if "val_loss" in line]
    assert losses[-1] < losses[0]


def loss(folder, tmp_path, *words):
    """The test loss that `evaluate` finds."""
    run("evaluate", *flags(run=folder, eval_timesteps=4, device="cpu", out=tmp_path / "figures.json"), *words)
    return json.loads((tmp_path / "figures.json").read_text())["loss"]


def test_adapters_are_used_with_their_base_at_any_scale_or_merged_with_it(runs, tmp_path):
    base, adapted = loss(runs / "base", tmp_path), loss(runs / "base", tmp_path, "--lora", str(runs / "lora"))
    assert adapted < base
    assert loss(runs / "base", tmp_path, "--lora", str(runs / "lora/model.pt"), "--lora_scale", "0") == base
    half = loss(runs / "base", tmp_path, "--lora", str(runs / "lora"), "--lora_scale", "0.5")
    assert adapted < half < base
    lora.merge_files(lora.MergeConfig(model=str(runs / "base/model.pt"), lora=str(runs / "lora"), scale=0.5,
                                      out=str(tmp_path / "merged/model.pt")))
    assert loss(tmp_path / "merged", tmp_path) == half
    whole, found = checkpoint.load(runs / "base/model.pt"), checkpoint.load(tmp_path / "merged/model.pt")
    assert found["model"].keys() == whole["model"].keys() and found["kind"] == "prior" and "lora" not in found
    recorded = [line["test_loss"] for line in metrics(runs / "lora") if "test_loss" in line][-1]
    same = loss(runs / "base", tmp_path, "--lora", str(runs / "lora"), "--eval_samples", "100")
    assert same == pytest.approx(recorded, abs=1e-5)  # training measured the same by adapters in place


def test_a_model_is_read_by_its_kind_with_the_weights_asked_for(runs, tmp_path):
    path = runs / "base/checkpoints/step_00000024.pt"
    whole = checkpoint.load(path)
    for weights, entry in (("ema", "ema"), ("online", "model")):
        cfg, found = lora.read_model("prior", train_prior.Config, path, weights)
        assert cfg.width == 32 and all(torch.equal(t, whole[entry][name]) for name, t in found["model"].items())
    with pytest.raises(UserError, match="has the averaged weights alone; --weights online needs one of RUN/checkpoint"):
        lora.read_model("prior", train_prior.Config, runs / "base/model.pt", "online")
    whole.pop("kind")  # as in the oldest files
    checkpoint.save(whole, tmp_path / "old.pt")
    assert lora.read_model("prior", train_prior.Config, tmp_path / "old.pt")[0] == cfg
    checkpoint.save({"model": {}, "config": {}, "merges": []}, tmp_path / "clip.pt")
    for kind, file in (("decoder", tmp_path / "old.pt"), ("decoder", path), ("prior", tmp_path / "clip.pt")):
        with pytest.raises(UserError, match=f"{file}: not a {kind}'s model.pt, best.pt or checkpoint"):
            lora.read_model(kind, train_prior.Config, file)


def test_samples_with_adapters_are_those_of_the_merged_model(emb, runs, tmp_path):
    cfg = clip.Config(embed_width=16, channels=(4, 4, 4), steps=1, batch_size=8)
    torch.manual_seed(0)
    encoder = clip.CLIP(cfg, [])
    checkpoint.save({"model": encoder.state_dict(), "config": config.as_json(cfg), "merges": []}, tmp_path / "clip.pt")
    lora.merge_files(lora.MergeConfig(model=str(runs / "base/model.pt"), lora=str(runs / "lora"),
                                      out=str(tmp_path / "merged/model.pt")))
    found = []
    for folder, words in ((runs / "base", flags(lora=runs / "lora")), (tmp_path / "merged", []), (runs / "base", [])):
        run("sample", *flags(run=folder, text="a word", num=2, steps=4, clip=tmp_path / "clip.pt", device="cpu",
                             out=tmp_path / "out.npy"), *words)
        found.append(np.load(tmp_path / "out.npy"))
    assert np.array_equal(found[0], found[1]) and not np.allclose(found[0], found[2], atol=1e-3)


def test_mistakes_with_adapters_are_named(emb, runs, tmp_path):
    settings = dict(data=emb, run=tmp_path / "run")
    out = run(*flags(**settings, **{**SMALL, "lora_rank": 4}), expect=2)
    assert "--lora_rank 4: adapters need a trained model; name its file with --init_from" in out
    out = run(*flags(**settings, **adapters_of(runs, lora_base="bf16")), expect=2)
    assert "--lora_base bf16: frozen weights of this precision need --precision bf16, not fp32" in out
    out = run(*flags(**settings, **adapters_of(runs, width=64)), expect=1)
    assert f"{runs}/base/model.pt: weights of another model" in out
    advice = (f"{runs}/lora/model.pt: LoRA adapters, not a model; give their base, {runs}/base/model.pt, and these "
              "with --lora, or merge the two: python -m common.lora merge")
    out = run("evaluate", *flags(run=runs / "lora", device="cpu"), expect=1)
    assert advice in out
    out = run(*flags(**settings, **{**SMALL, "init_from": runs / "lora/model.pt"}), expect=1)
    assert advice in out
    out = run("evaluate", *flags(run=runs / "base", device="cpu", lora=runs / "base"), expect=1)
    assert f"{runs}/base/model.pt: not LoRA adapters, but a whole model; give it as the model, without --lora" in out
    out = run("evaluate", *flags(run=runs / "base", model="best.pt", device="cpu", lora=runs / "lora"))
    assert f"note: {runs}/lora/model.pt was trained on {runs}/base/model.pt, which {runs}/base/best.pt is not" in out
    other = train_prior.Prior(train_prior.Config(width=48, heads=2, depth=2), 16)
    checkpoint.save({**checkpoint.load(runs / "base/model.pt"), "model": other.state_dict()}, tmp_path / "other.pt")
    out = run("evaluate", *flags(run=tmp_path, model="other.pt", device="cpu", lora=runs / "lora"), expect=1)
    assert (f"{runs}/lora/model.pt: adapters of another model than {tmp_path}/other.pt: "
            "transformer.blocks.0.attention.query is for a weight of 32 x 32, found (48, 48)") in out


# The small CLIP's text encoder


def test_adapters_of_the_text_encoder_leave_image_embeddings_alone(tmp_path, monkeypatch, capsys):
    cfg = clip.Config(run=str(tmp_path / "clip"), channels=(8, 8, 8), steps=4, batch_size=32, warmup_steps=2)
    monkeypatch.setattr(clip, "BUILTIN_ROWS", 200)
    clip.train_run(cfg, CPU)
    base, path = clip.load(tmp_path / "clip", CPU), tmp_path / "clip/model.pt"
    before = path.read_bytes()
    clip.train_run(clip.Config(run=str(tmp_path / "lora"), init_from=str(path), lora_rank=4, steps=8, batch_size=32,
                               warmup_steps=2), CPU)
    adapted = clip.load(tmp_path / "lora", CPU)
    images, records = synthetic.shapes(range(16))
    captions = [record["caption"] for record in records]
    (image, text, _), (image_now, text_now, _) = (clip.embed(model, images, captions) for model in (base, adapted))
    assert np.array_equal(image, image_now) and not np.allclose(text, text_now, atol=1e-3)
    changed = [n for n, t in base.state_dict().items() if not torch.equal(t, adapted.state_dict()[n])]
    assert changed == [f"transformer.blocks.0.attention.{name}.weight" for name in ("query", "key_value", "out")]
    assert adapted.tokenizer.merges == base.tokenizer.merges and adapted.cfg.channels == (8, 8, 8)
    found = checkpoint.load(tmp_path / "lora/lora.pt")
    assert found["lora"]["base"] == str(path) and {name[:-2] + ".weight" for name in found["model"]} == set(changed)
    lora.merge_files(lora.MergeConfig(model=str(path), lora=str(tmp_path / "lora/lora.pt"), scale=1.0,
                                      out=str(tmp_path / "again.pt")))
    again = clip.load(tmp_path / "again.pt", CPU).state_dict()
    assert all(torch.equal(t, again[n]) for n, t in adapted.state_dict().items())
    with pytest.raises(UserError, match="has the CLIP to adapt"):
        clip.train_run(clip.Config(run=str(tmp_path / "clip"), init_from=str(path), lora_rank=4), CPU)
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="lora_rank without --init_from must be 0, not 4"):
        clip.Config(lora_rank=4)
