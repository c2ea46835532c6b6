"""Transformer parts: cached and full passes agree, attention equals slow softmax attention."""
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
    """A float64 transformer with random weights, because new blocks are the identity."""
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
    assert not torch.allclose(whole, F.layer_norm(x, (WIDTH,)), atol=0.1)  # blocks have an effect
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
    """Attention of `layer`, with loops over batch, heads and queries."""
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
    """x (N, d), with its pairs (i, i + d/2) at position n rotated by n · 10000^(-2i/d)."""
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


@pytest.mark.parametrize("length", [8, 11])
def test_all_blocks_get_a_mask_as_one_bias_which_attends_bit_for_bit_as_the_mask_does(length):
    mask = torch.rand(2, 1, length, length).round().bool() | torch.eye(length).bool()
    layer = nn.Attention(WIDTH, HEADS).double()
    x = tokens(length)
    bias = nn.attention_bias(mask, x.dtype)
    assert bias.shape == mask.shape
    assert bias.stride(-2) % 8 == 0
    by_mask, by_bias = [layer(x, *layer.keys_values(x), each) for each in (mask, bias)]
    assert torch.equal(by_mask, by_bias)

    model = make(depth=3)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[1]))
    model(x, mask)
    assert len(seen) == 3
    for each in seen:
        assert each is seen[0]
        assert torch.equal(each, bias)


def test_a_new_block_is_the_identity():
    new = nn.Transformer(WIDTH, 3, HEADS).double()
    assert_close(new(tokens(4)), F.layer_norm(tokens(4), (WIDTH,)))


def gradients_and_memory(**options):
    """(gradients of a pass, number of elements that it keeps for the backward pass)."""
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


# Null text

def text_condition(size):
    """Random conditions for `size` texts: embeddings (B, 6), encodings (B, 4, 3), mask (B, 4)."""
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
        assert torch.equal(condition[name], texts[name])  # the caller's dict is unchanged
        expected = torch.stack([value[0], texts[name][1], value[0]])
        assert torch.equal(replaced[name], expected), name


def test_no_text_is_saved_with_the_model_and_is_zero_until_it_is_filled():
    embed, encodings, mask = nn.NullText(6, 3, 4).state_dict().values()
    assert not embed.any() and not encodings.any()
    assert mask.all()  # without a key, attention would have nothing to average


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
        assert torch.equal(norm(x), theirs(x))  # fp32 stays fp32
    assert outputs.dtype == torch.bfloat16
    assert_close(outputs.float(), expected.float(), rtol=2**-7, atol=0.03)


def test_blocks_are_compiled_once_a_shape_and_compute_the_same(monkeypatch):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend=counter))
    torch._dynamo.reset()
    blocks = []
    for half in range(1, 13):  # more shapes than torch.compile's default limit of eight
        blocks += [nn.TimeEmbedding(2 * half, 3) for _ in range(2)]
    x = torch.rand(2)
    expected = [block(x) for block in blocks]
    nn.compile_blocks(blocks)
    assert_close([block(x) for block in blocks], expected)
    assert counter.frame_count == 12


# Generation token by token

@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("rotary", [True, False])
def test_steps_after_prompts_of_two_lengths_come_out_as_each_sample_alone(rotary, depth):
    model = make(depth, rotary=rotary)
    x = tokens(9)
    lengths = [5, 2]  # so three tokens of the second prompt are padding
    caller_lengths = torch.tensor(lengths)
    _, prompts = model(x[:, :5], return_cache=True)
    cache = nn.KVCache(prompts, caller_lengths, size=9)
    assert [layer.shape[-2] for layer in cache.layers] == [9] * depth
    for step in range(4):
        stops = [length + step for length in lengths]
        new = torch.stack([x[b, stop] for b, stop in enumerate(stops)])
        out = model.step(new, cache)
        for b, stop in enumerate(stops):
            alone = model(x[b : b + 1, : stop + 1])
            close(out[b], alone[0, -1])
    assert cache.length.tolist() == [9, 6]
    assert caller_lengths.tolist() == lengths


def test_a_token_sees_all_others_unless_the_model_is_causal():
    x = tokens(5)
    changed = x.clone()
    changed[:, 3] *= -1
    for causal in (True, False):
        model = make(causal=causal)
        difference = model(x) - model(changed)
        moved = difference.abs().amax((0, 2)) > 1e-6
        assert moved.tolist() == [not causal] * 3 + [True] * 2
    close(make()(x), make(causal=True)(x))
    layer = nn.Attention(8, 2)  # not causal
    x = torch.randn(1, 3, 8)
    keys_values = layer.keys_values(x)
    last = layer(x[:, -1:], *keys_values)
    assert_close(last, layer(x, *keys_values)[:, -1:])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_seen_whatever_the_depth(depth):
    model = make(depth)
    x = tokens(6)
    _, cache = model(x[:, :4], return_cache=True)
    mask = torch.ones(6, 6).tril().bool()
    suffix = model(x[:, 4:], mask[4:], cache)
    assert_close(suffix, model(x)[:, 4:], rtol=1e-6, atol=1e-6)


def test_order_matters_to_a_model_by_its_rotary_positions_alone():
    x = tokens(5)
    order = torch.tensor([3, 0, 4, 2, 1])
    unordered = make(causal=False, rotary=False)
    shuffled = x[:, order]
    close(unordered(shuffled), unordered(x)[:, order])
    ordered = make(causal=False)
    expected = ordered(x)[:, order]
    assert not torch.allclose(ordered(shuffled), expected, atol=1e-3)


# Rotary positions

def test_rotation_keeps_lengths_and_its_products_depend_on_distance_alone():
    pair = torch.randn(2, 8)  # a query and a key
    products = []
    for start in (0, 3, 40):
        table = nn.rotary_table(torch.tensor([start, start + 6]), 8)
        both = nn.rotate(pair, table)
        assert_close(both.norm(dim=-1), pair.norm(dim=-1))
        products.append(both[0] @ both[1])
    values = torch.stack(products)
    assert_close(values, values[:1].expand(3), rtol=1e-4, atol=1e-4)
    table = nn.rotary_table(torch.tensor([0, 7]), 8)
    both = nn.rotate(pair, table)
    farther = both[0] @ both[1]
    assert (farther - values[0]).abs() > 1e-3


def test_the_frequencies_are_published_ones_also_far_from_the_start():
    positions = torch.tensor([1, 5000])
    x = torch.cat([torch.ones(2, 4), torch.zeros(2, 4)], 1)  # pairs (1, 0)
    turned_x = nn.rotate(x, nn.rotary_table(positions, 8))
    frequencies = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
    angles = positions[:, None] * frequencies
    expected = torch.cat([angles.cos(), angles.sin()], 1)
    assert_close(turned_x.double(), expected, rtol=0, atol=2e-4)


def test_queries_fewer_than_the_positions_are_at_the_last_ones():
    x = torch.randn(3, 8).bfloat16()
    table = nn.rotary_table(torch.arange(5), 8)
    last_table = nn.rotary_table(torch.arange(2, 5), 8)
    last = nn.rotate(x, last_table)
    assert torch.equal(nn.rotate(x, table), last)
    assert last.dtype == torch.bfloat16
    no_table = nn.rotary_table(torch.arange(3), 0)
    assert nn.rotate(x, no_table) is x


# Dropout and initial weights

def test_attention_drops_its_weights_in_training_alone_and_keeps_their_mean():
    layer = nn.Attention(8, 2, dropout=0.25)
    torch.nn.init.eye_(layer.out.weight)
    torch.nn.init.zeros_(layer.out.bias)
    x = torch.randn(1, 1, 8).expand(4000, 1, 8)
    keys_values = layer.keys_values(x)  # one key, so its weight is 1; dropout makes it 0 or 1/0.75
    values = keys_values[1].flatten(1)
    layer.eval()
    assert_close(layer(x, *keys_values)[:, 0], values)
    layer.train()
    out = layer(x, *keys_values)[:, 0]
    dropped = out == 0
    share = dropped.double().mean().item()
    assert share == pytest.approx(0.25, abs=0.03)
    expected = (values / 0.75).masked_fill(dropped, 0)
    assert_close(out, expected)


def test_a_feed_forward_is_four_times_as_wide_and_drops_in_training_alone():
    block = make(depth=1, dropout=0.5).blocks[0]
    matrices = [p for p in block.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in matrices) == 12 * WIDTH**2  # as in GPT
    x = tokens(3)
    close(block.ff(x), block.ff(x))
    hidden = block.ff.train().dropout(torch.ones(1000, 4))
    assert hidden.unique().tolist() == [0, 2]
    assert not torch.equal(block.ff(x), block.ff(x))


def test_without_dropout_training_computes_what_evaluation_does():
    model = make()
    x = tokens(4)
    expected = model(x)
    model.train()
    assert_close(model(x), expected)


def test_a_layer_of_zeros_adds_nothing_and_is_given_back():
    layer = torch.nn.Linear(3, 4)
    assert nn.zero_init(layer) is layer
    assert not layer(torch.randn(2, 3)).any()


def test_learned_tokens_start_small_and_are_trained():
    tokens = nn.learned_tokens(50, 400)
    assert tokens.weight.shape == (50, 400) and tokens.weight.requires_grad
    assert tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert tokens.weight.mean().abs() < 1e-3


def test_no_text_without_encodings_replaces_the_embedding_alone():
    null = nn.NullText(6, 0, 4)
    condition = {"text_embed": torch.randn(3, 6)}
    replaced = null(condition, torch.tensor([False, True, False]))
    assert list(null.state_dict()) == list(replaced) == ["text_embed"]
    expected = condition["text_embed"] * torch.tensor([[1.0], [0.0], [1.0]])
    assert torch.equal(replaced["text_embed"], expected)
    null.fill(text_condition(1))  # ignores the encodings
    assert null.text_embed.any() and len(null.state_dict()) == 1
