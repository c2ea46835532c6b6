"""Low-rank adapters: shapes, scales, merging."""

import pytest
import torch
from helpers import awake
from torch import nn
from torch.testing import assert_close

from common.config import UserError
from common.models import lora
from common.models import nn as layers


class Small(nn.Module):
    """A transformer between two layers that get no adapters; the last one is named "out"."""

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


def test_only_the_layers_of_attention_are_adapted():
    names = []
    for i in range(2):
        for layer in ("query", "key_value", "out"):
            names.append(f"transformer/blocks/{i}/attention/{layer}")
    assert list(lora.inject(Small(), 2)) == names  # not the last layer, though its name is "out"
    with pytest.raises(UserError, match="--lora_rank: the model has no attention layers to adapt"):
        lora.inject(nn.Sequential(nn.Linear(2, 2)), 2)


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
