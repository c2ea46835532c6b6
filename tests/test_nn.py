"""Transformer parts: cached and whole runs agree, attention is softmax attention, rotary positions are relative."""
import math

import pytest
import torch
import torch.nn.functional as F

from common import nn

WIDTH, HEADS = 32, 4


def make(seed=0, **options):
    """A transformer whose weights are all drawn anew: at their start its blocks are the identity."""
    torch.manual_seed(seed)
    model = nn.Transformer(WIDTH, options.pop("depth", 3), HEADS, **options)
    for p in model.parameters():
        torch.nn.init.normal_(p, *((1.0, 0.3) if p.ndim == 1 else (0.0, 0.2)))
    return model.double().eval()


def tokens(count, seed=1):
    return torch.randn(2, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


KINDS = [{"rotary": True}, {"rotary": False}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_after_a_cached_prefix_come_out_as_in_one_run(kind):
    model, x = make(**kind), tokens(11)
    whole, cache = model(x, return_cache=True)
    assert not torch.allclose(whole, F.layer_norm(x, (WIDTH,)), atol=0.1)  # the blocks do something
    for split in (1, 6, 10):
        prefix, cached = model(x[:, :split], return_cache=True)
        rest, fresh = model(x[:, split:], cache=cached, return_cache=True)
        torch.testing.assert_close(torch.cat([prefix, rest], 1), whole, rtol=1e-6, atol=1e-6)
        for before, behind, both in zip(cached, fresh, cache):
            for part in range(2):
                torch.testing.assert_close(torch.cat([before[part], behind[part]], 2), both[part], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_last_tokens_alone_are_those_of_the_whole_run(kind):
    model, x = make(**kind), tokens(9)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    whole = model(x)
    _, cached = model(x[:, :4], return_cache=True)
    for keep in (1, 3, 5, 9):
        for out in (model(x, keep=keep), model(x, mask=mask, keep=keep),
                    model(x[:, 4:], cache=cached, keep=min(keep, 5))):
            torch.testing.assert_close(out, whole[:, -out.shape[1]:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_a_later_token_changes_nothing_before_it_if_causal_and_everything_if_not(causal):
    model, x = make(causal=causal), tokens(8)
    changed = x.clone()
    changed[:, 5, 0] += 3.0  # the same added to all would be lost in the norms
    difference = (model(changed) - model(x)).abs().amax((0, 2))
    assert (difference[5:] > 1e-3).all()
    assert (difference[:5] == 0).all() if causal else (difference[:5] > 1e-3).all()


def slow_attention(layer, x, context, mask, table=None):
    """The same with loops over batch, heads and queries."""
    d, width = layer.head_width, layer.out.in_features
    q = x @ layer.query.weight.T + layer.query.bias
    kv = context @ layer.key_value.weight.T + layer.key_value.bias
    out = torch.zeros_like(q)
    for b in range(len(x)):
        for h in range(layer.heads):
            queries, keys = q[b, :, h * d:(h + 1) * d], kv[b, :, h * d:(h + 1) * d]
            values = kv[b, :, width + h * d:width + (h + 1) * d]
            if table is not None:
                queries, keys = turned(queries), turned(keys)
            for i in range(len(queries)):
                scores = torch.stack([queries[i].dot(key) / math.sqrt(d) for key in keys])
                weights = torch.exp(scores - scores.max()) * mask[i]
                out[b, i, h * d:(h + 1) * d] = (weights / weights.sum()) @ values
    return out @ layer.out.weight.T + layer.out.bias


def turned(x):
    """x (N, d) with the pair (i, i + d/2) at position n turned by n · 10000^(-2i/d), as complex numbers."""
    half = x.shape[1] // 2
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], 1)


@pytest.mark.parametrize("mode", ["all", "causal", "mask", "rotary"])
def test_attention_is_softmax_attention_written_slowly(mode):
    torch.manual_seed(0)
    layer = nn.Attention(WIDTH, HEADS).double()
    x, count = tokens(6), 6
    seen = torch.rand(count, count).round().bool() | torch.eye(count, dtype=torch.bool)
    seen = {"causal": torch.ones(count, count).tril(), "mask": seen}.get(mode, torch.ones(count, count))
    table = nn.rotary_table(torch.arange(count), layer.head_width) if mode == "rotary" else None
    ours = layer(x, *layer.keys_values(x, table), mask=seen if mode == "mask" else None, causal=mode == "causal",
                 table=table)
    slow = slow_attention(layer, x, x, seen, table)
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-6)
    here = None if table is None else tuple(part[3:4] for part in table)
    row = seen[3:4].bool()
    for mask in row, row[None, None]:
        ours = layer(x[:, 3:4], *layer.keys_values(x, table), mask=mask, table=here)  # a query alone
        torch.testing.assert_close(ours, slow[:, 3:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotary", [True, False])
def test_the_order_of_tokens_counts_by_rotary_positions_alone(rotary):
    model, x = make(causal=False, rotary=rotary), tokens(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    same = torch.allclose(model(x[:, order]), model(x)[:, order], rtol=1e-6, atol=1e-6)
    assert same != rotary


def test_several_suffixes_behind_one_prefix_in_one_pass_equal_passes_of_their_own():
    # Without rotary positions, by which a second suffix would lie behind the first.
    model, prefix, draws = make(rotary=False), tokens(5), [tokens(3, seed) for seed in (2, 3, 4)]
    _, cache = model(prefix, return_cache=True)
    own = torch.ones(3, 3, dtype=torch.bool).tril()
    mask = torch.cat([torch.ones(9, 5, dtype=torch.bool), torch.block_diag(own, own, own)], 1)
    together = model(torch.cat(draws, 1), mask=mask, cache=cache)
    apart = torch.cat([model(torch.cat([prefix, draw], 1))[:, 5:] for draw in draws], 1)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)


def test_a_new_block_is_the_identity_and_lets_gradients_reach_every_parameter_once_it_is_not():
    torch.manual_seed(0)
    fresh = nn.Transformer(WIDTH, 3, HEADS).double()
    torch.testing.assert_close(fresh(tokens(4)), F.layer_norm(tokens(4), (WIDTH,)))
    model = make()
    model(tokens(4)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_dropout_acts_in_training_only():
    model = make(dropout=0.5)
    assert torch.equal(model(tokens(4)), model(tokens(4)))
    model.train()
    assert not torch.equal(model(tokens(4)), model(tokens(4)))


def test_the_feed_forward_is_four_times_as_wide_inside_with_exact_gelu_and_dropout_there():
    torch.manual_seed(0)
    layer, x = nn.FeedForward(WIDTH, dropout=0.5).double(), 3 * tokens(5)
    up, down = layer.up, layer.down
    assert up.weight.shape == (4 * WIDTH, WIDTH) and down.weight.shape == (WIDTH, 4 * WIDTH)
    hidden = x @ up.weight.T + up.bias
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # exact, not the tanh near it
    expected = hidden @ down.weight.T + down.bias
    torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-9, atol=1e-9)
    torch.manual_seed(1)
    dropped = layer.train()(x)
    torch.manual_seed(1)
    torch.testing.assert_close(dropped, F.dropout(hidden, 0.5) @ down.weight.T + down.bias)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_the_blocks_gives_the_same_gradients_from_less_memory(dropout):
    gradients, kept = [], []
    for options in ({}, {"checkpointing": True}):
        model = make(depth=2, dropout=dropout, **options).train()
        sizes = []
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            out = model(tokens(6), keep=2)
        out.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        kept.append(sum(sizes))
        if options:
            with torch.no_grad():  # in evaluation there is nothing to recompute
                torch.testing.assert_close(model.eval()(tokens(6)),
                                           make(depth=2)(tokens(6)))
    for ours, theirs in zip(*gradients):
        assert torch.equal(ours, theirs)
    assert kept[1] < kept[0] / 3


def test_a_sinusoid_holds_cosines_then_sines_of_falling_frequencies():
    t, width = torch.tensor([0.0, 1.0, 7.5, 999.0]), 8
    frequencies = [10000 ** (-2 * i / width) for i in range(width // 2)]
    expected = torch.tensor([[*[math.cos(x * frequency) for frequency in frequencies],
                              *[math.sin(x * frequency) for frequency in frequencies]]
                             for x in t.tolist()])
    torch.testing.assert_close(nn.sinusoid(t, width), expected, rtol=1e-4, atol=1e-4)


def test_an_embedding_of_timesteps_depends_on_the_share_of_the_process():
    torch.manual_seed(0)
    coarse, fine = nn.TimeEmbedding(WIDTH, 48, 10), nn.TimeEmbedding(WIDTH, 48, 1000)
    fine.load_state_dict(coarse.state_dict())
    torch.testing.assert_close(coarse(torch.tensor([0, 3, 9])), fine(torch.tensor([0, 300, 900])))
    first, _, second = coarse.layers
    angles = 300 * 10000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
    hidden = first(torch.cat([angles.cos(), angles.sin()]))
    slow = second(hidden * torch.sigmoid(hidden))
    torch.testing.assert_close(coarse(torch.tensor([3]))[0], slow, rtol=1e-4, atol=1e-5)
    out = coarse(torch.arange(10))
    assert out.shape == (10, 48)
    assert torch.cdist(out, out).add(torch.eye(10)).min() > 1e-3  # all different


# No text

def text_condition(size, seed):
    """Of `size` texts: embeddings 6 wide, encodings 3 wide of 4 tokens, which of these are real."""
    generator = torch.Generator().manual_seed(seed)
    return {"text_embed": torch.randn(size, 6, generator=generator),
            "text_enc": torch.randn(size, 4, 3, generator=generator),
            "text_mask": torch.rand(size, 4, generator=generator) < 0.5}


def test_no_text_stands_where_a_sample_is_dropped_and_changes_nothing_else():
    null, empty, given = nn.NullText(6, 3, 4), text_condition(1, seed=1), text_condition(5, seed=2)
    null.fill(empty)
    given["image_embed"] = torch.randn(5, 6)
    before = {name: value.clone() for name, value in given.items()}
    drop = torch.tensor([True, False, False, True, False])
    replaced = null(given, drop)
    assert replaced.keys() == given.keys() and replaced["image_embed"] is given["image_embed"]
    for name, value in empty.items():
        for row in range(5):
            expected = value[0] if drop[row] else before[name][row]
            assert torch.equal(replaced[name][row], expected), (name, row)
    assert all(torch.equal(value, before[name]) for name, value in given.items())  # which stays
    given["text_enc"] = given["text_enc"].bfloat16()
    assert all(value.dtype == given[name].dtype for name, value in null(given, drop).items())


def test_no_text_is_saved_with_the_model_and_is_zero_until_it_is_filled():
    null, empty = nn.NullText(6, 3, 4), text_condition(1, seed=1)
    replaced = null(text_condition(2, seed=2), torch.tensor([True, True]))
    assert not replaced["text_embed"].any() and not replaced["text_enc"].any()
    assert replaced["text_mask"].all()  # without any key, attention would have nothing to average
    null.fill(empty)
    again = nn.NullText(6, 3, 4)
    again.load_state_dict(null.state_dict())
    assert null.state_dict().keys() == empty.keys() and not [*null.parameters()]
    assert all(torch.equal(again.get_buffer(name), value) for name, value in empty.items())


def test_no_text_of_a_model_without_encodings_is_an_embedding_alone():
    null, given = nn.NullText(6), text_condition(2, seed=2)
    null.fill(text_condition(1, seed=1))
    replaced = null(given, torch.tensor([False, True]))
    assert null.state_dict().keys() == {"text_embed"}
    assert torch.equal(replaced["text_embed"][1], null.text_embed[0])
    assert replaced["text_enc"] is given["text_enc"] and replaced["text_mask"] is given["text_mask"]


# Generation token by token

@pytest.mark.parametrize("lengths", [(4, 4), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_token_by_token_gives_what_one_run_does_for_samples_of_any_lengths(kind, lengths):
    model, x = make(**kind), tokens(9)
    whole = model(x)
    _, cache = model(x[:, :4], return_cache=True)  # behind its length, a sample's is of no account
    memory = nn.Memory(cache, torch.tensor(lengths), 9)
    for i in range(5):
        here = torch.tensor(lengths) + i
        out = model.step(x[[0, 1], here], memory)
        torch.testing.assert_close(out, whole[[0, 1], here], rtol=1e-6, atol=1e-6)
    assert memory.length.tolist() == [n + 5 for n in lengths] and memory.top == max(lengths) + 5
    assert {part.shape[2] for pair in memory.layers for part in pair} == {9}  # no room was added on the way


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([(nn.rotate(q, nn.rotary_table(torch.tensor([m]), 8))
                           * nn.rotate(k, nn.rotary_table(torch.tensor([n]), 8))).sum()
                          for m, n in ((3, 0), (8, 5), (103, 100), (4, 0), (104, 100))])
    torch.testing.assert_close(scores[:3], scores[:1].expand(3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[3], scores[4], rtol=1e-4, atol=1e-4)
    assert (scores[0] - scores[3]).abs() > 1e-2
