"""Low-rank adapters: their algebra, their files, and training them as a user does."""
import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, differences, flags, metrics, run
from torch import nn
from torch.testing import assert_close

from common import checkpoint, lora, optim
from common import nn as layers
from common.config import UserError


class Small(nn.Module):
    """A transformer between two layers that take no adapters, the last of them named "out"."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=4)
        self.transformer = layers.Transformer(width, 2, 4)
        self.out = nn.Linear(width, 5)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # of zeros, which would hide mistakes
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        return self.out(self.transformer(self.conv(x).flatten(2).mT))


def output(model):
    inputs = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(inputs).float()


def randomize(adapters):
    """Give every B values, as training would."""
    for adapter in adapters.values():
        nn.init.normal_(adapter.B, std=0.1)
    return adapters


def train(model, adapters):
    optimizer, = optim.make(adapters, "adamw", 0.02, 0.1)
    for _ in range(3):
        (output(model) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_new_adapter_changes_nothing_and_training_changes_adapters_alone():
    model = Small()
    plain = Small()
    adapters = lora.inject(model, 4)
    assert torch.equal(output(model), output(plain))
    assert {*adapters.parameters()} == {p for p in model.parameters() if p.requires_grad}
    before = copy.deepcopy(adapters.state_dict())
    train(model, adapters)
    for name, tensor in adapters.state_dict().items():
        assert not torch.equal(before[name], tensor)
    assert not torch.allclose(output(model), output(plain), atol=1e-3)
    lora.set_scale(model, 0)
    assert torch.equal(output(model), output(plain))


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


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
def test_every_adapted_weight_is_the_formula_at_that_scale_also_when_merged(scale):
    model = Small()
    expected = Small()
    adapters = randomize(lora.inject(model, 4))
    lora.set_scale(model, scale)
    for name, adapter in adapters.items():
        layer = expected.get_submodule(name.replace("/", "."))
        layer.weight.data += scale * torch.einsum("or,ri->oi", adapter.B, adapter.A)
    assert_close(output(model), output(expected))
    lora.merge(model)
    assert_close(model.state_dict(), expected.state_dict())
    assert not lora.extract(model)
    assert not any(p.requires_grad for p in model.parameters())


def test_adapters_survive_the_round_trip_and_those_of_another_model_are_refused(tmp_path):
    model = Small()
    randomize(lora.inject(model, 4))
    checkpoint.save({"model": lora.extract(model).state_dict()}, tmp_path / "lora.pt")
    weights = checkpoint.load(tmp_path / "lora.pt")["model"]
    other = Small()
    lora.inject(other, 4)
    lora.load(other, weights, "lora.pt")
    assert torch.equal(output(other), output(model))
    wide = Small(64)
    lora.inject(wide, 4)
    with pytest.raises(UserError, match=r"lora\.pt: weights of another model: 12 entries differ"):
        lora.load(wide, weights, "lora.pt")


def test_a_compiled_model_computes_the_same_and_follows_the_scale():
    model = Small()
    randomize(lora.inject(model, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for scale in (1.0, 0.5):
        lora.set_scale(model, scale)
        assert_close(output(compiled), output(model))


def test_adapters_stay_fp32_on_a_bf16_base():
    model = Small().to(torch.bfloat16)
    adapters = lora.inject(model, 4)
    assert {p.dtype for p in adapters.parameters()} == {torch.float32}
    assert model.transformer.blocks[0].attention.query.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        train(model, adapters)
    assert all((p != 0).any() for p in adapters.parameters())


# The prior, as a user trains it

@pytest.fixture(scope="module")
def base(emb, tmp_path_factory):
    """The folder of a prior."""
    folder = tmp_path_factory.mktemp("base")
    run("train_prior", *flags(data=emb, run_dir=folder, **SMALL))
    return folder


def adapt(base, emb, folder, expect=0, **changed):
    """Output of training adapters on `base`, on two ranks."""
    settings = dict(SMALL, lr=0.01, lora_rank=4, init_from=base / "model.pt", cosine="false")
    words = flags(data=emb, run_dir=folder, **{**settings, **changed})
    return run("train_prior", *words, ranks=2, expect=expect)


def val_losses(folder):
    return [line["val_loss"] for line in metrics(folder) if "val_loss" in line]


def test_adapters_are_trained_and_saved_alone_and_resume_bit_for_bit_but_not_on_another_base(
        emb, base, tmp_path):
    folder = tmp_path / "run"
    adapt(base, emb, folder, steps=8)
    out = adapt(base, emb, folder, expect=1, init_from=base / "best.pt", lora_rank=2)
    assert "a run of another model or other data" in out
    assert "lora_base is" in out and "lora_rank is" in out
    assert "at step 8 of 16" in adapt(base, emb, folder, steps=16)
    adapt(base, emb, tmp_path / "whole", steps=16)
    # The metrics have the test at step 8 as well.
    assert differences(tmp_path / "whole", folder) == ["metrics"]

    losses = val_losses(folder)
    assert losses[-1] < losses[0] < val_losses(base)[0]  # it starts where the base ends
    path = base / "model.pt"
    about = {"rank": 4, "base": str(path), "base_sha256": checkpoint.checksum(path)}
    for name in ("model.pt", "best.pt", "checkpoints/step_00000016.pt"):
        contents = checkpoint.load(folder / name)
        assert contents["lora"] == about
        assert len(contents["model"]) == 12
        assert all(key.endswith((".A", ".B")) for key in contents["model"])


# Files

def save_adapters(folder):
    """(file of a model, file of adapters on it of rank 4, the adapted model)."""
    model = Small()
    base = folder / "base.pt"
    path = folder / "adapters.pt"
    checkpoint.save({"model": model.state_dict(), "step": 1}, base)
    adapters, about = lora.start(model, SimpleNamespace(lora_rank=4, init_from=str(base)))
    weights = randomize(adapters).state_dict()
    checkpoint.save({"model": weights, "step": 2, "lora": about}, path)
    return base, path, model


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_file_with_adapters_merged_in_equals_the_adapted_model(tmp_path, capsys, scale):
    _, path, adapted = save_adapters(tmp_path)
    contents = checkpoint.load(path)
    before = copy.deepcopy(contents["model"])
    merged = lora.merged(contents, path, scale)
    assert merged.keys() == {"model", "step"} and merged["step"] == 2
    assert_close(contents["model"], before)  # the caller's
    model = Small()
    model.load_state_dict(merged["model"])
    lora.set_scale(adapted, scale)
    assert_close(output(model), output(adapted))
    assert not capsys.readouterr().out


def test_mistakes_with_files_of_adapters_are_named(tmp_path, capsys):
    base, path, _ = save_adapters(tmp_path)
    with pytest.raises(UserError, match=f"{path}: LoRA adapters, not a model; give their base"):
        lora.start(Small(), SimpleNamespace(lora_rank=4, init_from=str(path)))
    contents = checkpoint.load(path)
    checkpoint.save({"model": Small().state_dict(), "step": 5}, base)
    lora.merged(contents, path)
    note = f"note: {path} was trained on {base}, which has changed since"
    assert note in capsys.readouterr().out
    checkpoint.save({"model": Small(64).state_dict()}, base)
    message = (f"{path}: adapters of another model than {base}: "
               "transformer.blocks.0.attention.key_value.weight is not 64 x 32")
    with pytest.raises(UserError, match=message):
        lora.merged(contents, path)
