"""Transformer parts: cached and whole runs agree, attention is softmax attention written slowly."""
import copy
import itertools
import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.testing import assert_close

from common.models import nn

WIDTH = 32
HEADS = 4


def close(ours, theirs):
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def make(depth=3, **options):
    """A transformer of random weights in float64: new blocks would be the identity."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, depth, HEADS, **options)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.double().eval()


def tokens(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("rotary", [True, False])
def test_tokens_after_a_cached_prefix_and_the_last_alone_come_out_as_in_one_run(rotary):
    model = make(rotary=rotary)
    x = tokens(11)
    mask = torch.ones(11, 11).tril().bool()
    whole, whole_cache = model(x, return_cache=True)
    assert not torch.allclose(whole, F.layer_norm(x, (WIDTH,)), atol=0.1)  # blocks do something
    for split in (1, 6, 10):
        prefix, cache = model(x[:, :split], return_cache=True)
        suffix, new_cache = model(x[:, split:], mask[split:], cache, return_cache=True)
        close(torch.cat([prefix, suffix], 1), whole)
        for old, new, both in zip(cache, new_cache, whole_cache):
            for kind in range(2):  # keys and values
                close(torch.cat([old[kind], new[kind]], 2), both[kind])
        for num_last in (1, 11 - split):
            close(model(x, mask, num_last=num_last), whole[:, -num_last:])
            last = model(x[:, split:], mask[split:], cache, num_last)
            close(last, whole[:, -num_last:])


def slow_attention(layer, x, mask, rotary):
    """The same with loops over batch, heads and queries."""
    d = WIDTH // HEADS
    queries = layer.query(x).unflatten(-1, (HEADS, d))
    keys, values = layer.key_value(x).unflatten(-1, (2, HEADS, d)).unbind(2)
    out = torch.zeros_like(queries)
    for b, h in itertools.product(range(len(x)), range(HEADS)):
        q = queries[b, :, h]
        k = keys[b, :, h]
        if rotary:
            q = turned(q)
            k = turned(k)
        for i in range(len(q)):
            weights = torch.exp(k @ q[i] / math.sqrt(d)) * mask[i]
            out[b, i, h] = (weights / weights.sum()) @ values[b, :, h]
    return layer.out(out.flatten(2))


def turned(x):
    """x (N, d), the pair (i, i + d/2) at position n turned by n · 10000^(-2i/d), as complex."""
    half = x.shape[1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x))[:, None] * frequencies
    z = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag], 1)


@pytest.mark.parametrize("mode", ["all", "causal", "mask", "rotary"])
def test_attention_is_softmax_attention_written_slowly(mode):
    layer = nn.Attention(WIDTH, HEADS, causal=mode == "causal").double()
    x = tokens(6)
    masks = {
        "causal": torch.ones(6, 6).tril().bool(),
        "mask": torch.rand(6, 6).round().bool() | torch.eye(6).bool(),
    }
    mask = masks.get(mode, torch.ones(6, 6).bool())
    table = None
    if mode == "rotary":
        table = nn.rotary_table(torch.arange(6), WIDTH // HEADS)
    keys_values = layer.keys_values(x, table)
    ours = layer(x, *keys_values, mask if mode == "mask" else None, table)
    slow = slow_attention(layer, x, mask, mode == "rotary")
    assert_close(ours, slow, rtol=1e-5, atol=1e-6)


def test_a_new_block_is_the_identity():
    new = nn.Transformer(WIDTH, 3, HEADS).double()
    assert_close(new(tokens(4)), F.layer_norm(tokens(4), (WIDTH,)))


def gradients_and_memory(**options):
    """The gradients of a pass, and how many numbers it keeps for the backward pass."""
    model = make(depth=2, **options).train()
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(tokens(6))
    out.square().sum().backward()
    return [p.grad for p in model.parameters()], sum(sizes)


def test_recomputing_the_blocks_gives_the_same_gradients_from_less_memory():
    gradients, memory = gradients_and_memory(dropout=0.3)
    recomputed, less_memory = gradients_and_memory(dropout=0.3, checkpointing=True)
    assert all(map(torch.equal, gradients, recomputed))
    assert less_memory < memory / 3


def test_an_embedding_of_timesteps_has_their_cosines_and_sines_at_geometric_frequencies():
    embedding = nn.TimeEmbedding(WIDTH, 48)
    angles = torch.tensor([[0], [300], [900]]) * 10000 ** (-torch.arange(16) / 16)
    expected = embedding.layers(torch.cat([angles.cos(), angles.sin()], 1))
    assert_close(embedding(torch.tensor([0, 300, 900])), expected, rtol=1e-4, atol=1e-4)


# No text

def text_condition(size):
    """Of `size` texts: embeddings 6 wide, encodings 3 wide of 4 tokens, which of these are real."""
    return {
        "text_embed": torch.randn(size, 6),
        "text_enc": torch.randn(size, 4, 3),
        "text_mask": torch.rand(size, 4) < 0.5,
    }


def test_no_text_replaces_dropped_samples_and_changes_nothing_else():
    null = nn.NullText(6, 3, 4)
    empty = text_condition(1)
    null.fill(empty)
    texts = text_condition(3)
    condition = {**copy.deepcopy(texts), "image_embed": torch.randn(3, 6)}
    replaced = null(condition, torch.tensor([True, False, True]))
    assert replaced.keys() == condition.keys()
    assert replaced["image_embed"] is condition["image_embed"]
    for name, value in empty.items():
        assert torch.equal(condition[name], texts[name])  # the caller's
        expected = torch.stack([value[0], texts[name][1], value[0]])
        assert torch.equal(replaced[name], expected), name


def test_no_text_is_saved_with_the_model_and_is_zero_until_it_is_filled():
    embed, encodings, mask = nn.NullText(6, 3, 4).state_dict().values()
    assert not embed.any() and not encodings.any()
    assert mask.all()  # without any key, attention would have nothing to average


# Norms and blocks

@pytest.mark.parametrize("norm, theirs", [
    (nn.LayerNorm(8), torch.nn.LayerNorm(8)),
    (nn.GroupNorm(2, 8), torch.nn.GroupNorm(2, 8)),
])
def test_a_norm_gives_the_type_of_its_input_and_within_its_rounding_what_torchs_gives(norm, theirs):
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1.0)
    theirs.load_state_dict(norm.state_dict())
    x = 5 + torch.randn(4, 8, 8)
    assert torch.equal(norm(x), theirs(x))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = norm(x.bfloat16())
        expected = theirs(x.bfloat16())
        assert torch.equal(norm(x), theirs(x))  # fp32 stays so
    assert outputs.dtype == torch.bfloat16
    assert_close(outputs.float(), expected.float(), rtol=2**-7, atol=0.03)


def test_blocks_are_compiled_once_a_shape_and_compute_the_same(monkeypatch):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend=counter))
    torch._dynamo.reset()
    blocks = []
    for half in range(1, 13):  # more than the eight that torch.compile takes by default
        blocks += [nn.TimeEmbedding(2 * half, 3) for _ in range(2)]
    x = torch.rand(2)
    expected = [block(x) for block in blocks]
    nn.compile_blocks(blocks)
    assert_close([block(x) for block in blocks], expected)
    assert counter.frame_count == 12
