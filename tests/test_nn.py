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


def test_elu_and_its_gradient_are_torchs():
    x, grad = torch.linspace(-20, 20, 4001, requires_grad=True), torch.linspace(1, 2, 4001)
    torch.testing.assert_close(nn.elu(x), F.elu(x), atol=1e-6, rtol=0)
    ours, theirs = (torch.autograd.grad(function(x), x, grad)[0] for function in (nn.elu, F.elu))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    half = x.detach().bfloat16()
    assert torch.equal(nn.elu(half), F.elu(half))  # in fp32 within, where eˣ - 1 would be coarse


KINDS = [{"rotary": True}, {"rotary": False}, {"kv_heads": 1}, {"kv_heads": 2}, {"qk_norm": True},
         {"normformer": True}, {"qk_norm": True, "normformer": True, "kv_heads": 2, "rotary": False}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_after_a_cached_prefix_come_out_as_in_one_run(kind):
    model, x = make(**kind), tokens(11)
    whole, cache = model(x, return_cache=True)
    assert not torch.allclose(whole, F.layer_norm(x, (WIDTH,)), atol=0.1)  # the blocks do something
    for split in (1, 6, 10):
        prefix, cached = model(x[:, :split], return_cache=True)
        rest, made = model(x[:, split:], cache=cached, return_cache=True)
        torch.testing.assert_close(torch.cat([prefix, rest], 1), whole, rtol=1e-6, atol=1e-6)
        for (k0, v0), (k1, v1), (k, v) in zip(cached, made, cache):
            torch.testing.assert_close(torch.cat([k0, k1], 2), k, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(torch.cat([v0, v1], 2), v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_last_tokens_alone_are_those_of_the_whole_run(kind):
    model, x = make(**kind), tokens(9)
    whole = model(x)
    _, cached = model(x[:, :4], return_cache=True)
    for keep in (1, 3, 5):
        torch.testing.assert_close(model(x, keep=keep), whole[:, -keep:], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model(x[:, 4:], cache=cached, keep=keep), whole[:, -keep:], rtol=1e-6, atol=1e-6)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        torch.testing.assert_close(model(x, mask=mask, keep=keep), whole[:, -keep:], rtol=1e-6, atol=1e-6)


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
    d, shared = layer.head_width, layer.heads // layer.kv_heads
    q, kv = F.linear(x, layer.query.weight), F.linear(context, layer.key_value.weight)
    out = torch.zeros_like(q)
    for b in range(len(x)):
        for h in range(layer.heads):
            queries = q[b, :, h * d:(h + 1) * d]
            key_start = (h // shared) * d
            keys = kv[b, :, key_start:key_start + d]
            values = kv[b, :, layer.kv_heads * d + key_start:layer.kv_heads * d + key_start + d]
            scale = 1 / math.sqrt(d)
            if layer.temperature is not None:
                queries, keys = (t / t.norm(dim=-1, keepdim=True) for t in (queries, keys))
                scale = layer.temperature[h]
            if table is not None:
                queries, keys = (turned(t) for t in (queries, keys))
            for i in range(len(queries)):
                scores = torch.stack([scale * queries[i].dot(key) for key in keys])
                weights = torch.exp(scores - scores.max()) * mask[i]
                out[b, i, h * d:(h + 1) * d] = (weights / weights.sum()) @ values
    out = F.linear(out, layer.out.weight)
    return out if layer.out_norm is None else F.layer_norm(out, (WIDTH,), layer.out_norm.weight)


def turned(x):
    """x (N, d) with the pair (i, i + d/2) at position n turned by n · 10000^(-2i/d), as complex numbers."""
    half = x.shape[1] // 2
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], 1)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"kv_heads": 2}, {"qk_norm": True}, {"normformer": True},
                                     {"qk_norm": True, "kv_heads": 2, "normformer": True}], ids=str)
@pytest.mark.parametrize("mode", ["all", "causal", "mask", "rotary"])
def test_attention_is_softmax_attention_written_slowly(options, mode):
    torch.manual_seed(0)
    layer = nn.Attention(WIDTH, HEADS, **options).double()
    x, count = tokens(6), 6
    seen = torch.rand(count, count).round().bool() | torch.eye(count, dtype=torch.bool)
    seen = {"all": torch.ones(count, count), "causal": torch.ones(count, count).tril(), "mask": seen,
            "rotary": torch.ones(count, count)}[mode]
    table = nn.rotary_table(torch.arange(count), layer.head_width) if mode == "rotary" else None
    ours = layer(x, *layer.keys_values(x, table), mask=seen if mode == "mask" else None, causal=mode == "causal",
                 table=table)
    slow = slow_attention(layer, x, x, seen, table)
    torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-6)
    here = None if table is None else tuple(part[3:4] for part in table)
    row = seen[3:4].bool()
    for mask in row, row[None, None], torch.zeros(1, HEADS, 1, count).double().masked_fill(~row, -torch.inf):
        ours = layer(x[:, 3:4], *layer.keys_values(x, table), mask=mask, table=here)  # a query alone
        torch.testing.assert_close(ours, slow[:, 3:4], rtol=1e-5, atol=1e-6)


def test_a_single_query_takes_the_bias_of_each_head():
    torch.manual_seed(0)
    layer, x, bias = nn.Attention(WIDTH, HEADS, kv_heads=2).double(), tokens(6), torch.randn(2, HEADS, 6, 6).double()
    ours = layer(x[:, 5:], *layer.keys_values(x), mask=bias[:, :, 5:])
    torch.testing.assert_close(ours, layer(x, *layer.keys_values(x), mask=bias)[:, 5:], rtol=1e-5, atol=1e-6)


def test_attention_to_a_context_of_another_width_is_softmax_attention():
    torch.manual_seed(0)
    layer = nn.Attention(WIDTH, HEADS, context_width=12).double()
    context = torch.randn(2, 9, 12, dtype=torch.float64)
    ours = layer(tokens(5), *layer.keys_values(context))
    torch.testing.assert_close(ours, slow_attention(layer, tokens(5), context, torch.ones(5, 9)))


def test_rotary_scores_depend_on_the_distance_alone_and_lengths_stay():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 8, generator=generator)
    scores = torch.stack([(nn.rotate(q, nn.rotary_table(torch.tensor([m]), 8))
                           * nn.rotate(k, nn.rotary_table(torch.tensor([n]), 8))).sum()
                          for m, n in ((3, 0), (8, 5), (103, 100), (4, 0), (104, 100))])
    torch.testing.assert_close(scores[:2], scores[2:3].expand(2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[3], scores[4], rtol=1e-4, atol=1e-4)
    assert (scores[0] - scores[3]).abs() > 1e-2
    torch.testing.assert_close(nn.rotate(q, nn.rotary_table(torch.tensor([7]), 8)).norm(), q.norm())
    torch.testing.assert_close(nn.rotate(q, nn.rotary_table(torch.tensor([0]), 8)), q)


def test_a_shift_of_all_positions_changes_nothing_and_of_some_does():
    model, x = make(), tokens(6)
    first, positions = model(x), torch.arange(6)
    torch.testing.assert_close(model(x, positions=positions), first)
    torch.testing.assert_close(model(x, positions=positions + 50), first, rtol=1e-4, atol=1e-4)
    assert (model(x, positions=positions * 2) - first).abs().max() > 1e-2


def test_samples_with_positions_of_their_own_come_out_as_each_by_itself_also_token_by_token():
    model, x, positions = make(), tokens(6), torch.tensor([[-2, -1, 0, 1, 0, 1], [0, 0.5, 1, 1.5, 2, 2.5]])
    together, cache = model(x, positions=positions, return_cache=True)
    torch.testing.assert_close(together, torch.cat([model(x[b:b + 1], positions=positions[b]) for b in range(2)]))
    torch.testing.assert_close(model(x, positions=positions, keep=2), together[:, -2:])
    memory = nn.Memory([tuple(part[:, :, :3] for part in pair) for pair in cache], torch.full((2,), 3), 6)
    for i in range(3, 6):
        torch.testing.assert_close(model.step(x[:, i], memory, positions=positions[:, i]), together[:, i])


@pytest.mark.parametrize("per_sample", [False, True])
def test_tokens_that_a_mask_hides_have_no_influence(per_sample):
    model, x = make(), tokens(7)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    mask[:, 2] = False
    mask[2, 2] = True
    other = x.clone()
    other[:, 2] = -other[:, 2]
    given = mask.expand(2, 1, 7, 7).clone() if per_sample else mask
    if per_sample:
        given[1, 0, 2:, 2] = True  # the second sample sees the token after all
    difference = (model(x, mask=given) - model(other, mask=given)).abs().amax(2)  # (B, N)
    assert difference[0, [0, 1, 3, 4, 5, 6]].max() == 0.0 < difference[0, 2]
    assert (difference[1, 3:].min() > 1e-3) == per_sample


def test_several_suffixes_behind_one_prefix_in_one_pass_equal_passes_of_their_own():
    model, prefix, draws = make(), tokens(5), [tokens(3, seed) for seed in (2, 3, 4)]
    _, cache = model(prefix, return_cache=True)
    own = torch.ones(3, 3, dtype=torch.bool).tril()
    mask = torch.cat([torch.ones(9, 5, dtype=torch.bool), torch.block_diag(own, own, own)], 1)
    together = model(torch.cat(draws, 1), mask=mask, positions=torch.arange(5, 8).repeat(3), cache=cache)
    apart = torch.cat([model(torch.cat([prefix, draw], 1))[:, 5:] for draw in draws], 1)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)


def test_a_new_block_is_the_identity_and_lets_gradients_reach_every_parameter_once_it_is_not():
    torch.manual_seed(0)
    fresh = nn.Transformer(WIDTH, 3, HEADS).double()
    torch.testing.assert_close(fresh(tokens(4)), F.layer_norm(tokens(4), (WIDTH,)))
    model = make(qk_norm=True, normformer=True, kv_heads=2)
    model(tokens(4)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_dropout_acts_in_training_only():
    model = make(dropout=0.5)
    assert torch.equal(model(tokens(4)), model(tokens(4)))
    model.train()
    assert not torch.equal(model(tokens(4)), model(tokens(4)))


@pytest.mark.parametrize("normformer", [False, True])
def test_the_feed_forward_and_its_gradients_are_those_of_swiglu(normformer):
    torch.manual_seed(0)
    layer, x = nn.FeedForward(WIDTH, 2, normformer).double(), tokens(5).requires_grad_()
    given = [x, *layer.parameters()]
    (gate, up), down = layer.gate_up.weight.chunk(2), layer.down.weight
    hidden = (x @ gate.T) / (1 + torch.exp(-(x @ gate.T))) * (x @ up.T)
    slow = (F.layer_norm(hidden, (2 * WIDTH,), layer.norm.weight) if normformer else hidden) @ down.T
    torch.testing.assert_close(layer(x), slow)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), slow)
    weight = tokens(5, seed=2)
    for ours, theirs in zip(torch.autograd.grad((layer(x) * weight).sum(), given),
                            torch.autograd.grad((slow * weight).sum(), given)):
        torch.testing.assert_close(ours, theirs)


def test_the_feed_forward_under_autocast_is_near_the_exact_one_and_keeps_fp32_gradients():
    torch.manual_seed(0)
    layer, x = nn.FeedForward(WIDTH, 2), tokens(5).float().requires_grad_()
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.02)
    for ours, theirs in zip(torch.autograd.grad(rough.float().sum(), [x, *layer.parameters()]),
                            torch.autograd.grad(exact.sum(), [x, *layer.parameters()])):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_a_sinusoid_holds_sines_and_cosines_of_falling_frequencies():
    t, width = torch.tensor([0.0, 1.0, 7.5, 999.0]), 8
    expected = torch.tensor([[function(x / 10000 ** (2 * i / width)) for function in (math.sin, math.cos)
                              for i in range(width // 2)] for x in t.tolist()])
    torch.testing.assert_close(nn.sinusoid(t, width), expected, rtol=1e-4, atol=1e-4)


def test_a_table_of_timesteps_gives_its_rows_and_a_continuous_embedding_the_time_in_the_process():
    torch.manual_seed(0)
    table = nn.TimeEmbedding(WIDTH, 10, "table")
    assert torch.equal(table(torch.tensor([3, 9, 3])), table.table.weight[[3, 9, 3]])
    coarse, fine = nn.TimeEmbedding(WIDTH, 10), nn.TimeEmbedding(WIDTH, 1000)
    fine.load_state_dict(coarse.state_dict())
    torch.testing.assert_close(coarse(torch.tensor([0, 3, 9])), fine(torch.tensor([0, 300, 900])))
    out = coarse(torch.arange(10))
    assert out.shape == (10, WIDTH) and torch.cdist(out, out).add(torch.eye(10)).min() > 1e-3  # all different


# Contexts, and generation token by token

CROSSED = [{"context_width": 12}, {"context_width": 12, "kv_heads": 1, "qk_norm": True},
           {"context_width": 12, "normformer": True, "rotary": False}]


def context_of(model):
    """Keys and values of a context, if the model attends to one."""
    if model.blocks[0].cross is None:
        return None
    return model.contexts(torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("kind", CROSSED, ids=str)
def test_a_block_attends_to_itself_then_to_its_context_then_feeds_forward(kind):
    model = make(depth=1, **kind)
    block, x, context = model.blocks[0], tokens(6), torch.randn(2, 5, 12, dtype=torch.float64)
    table = nn.rotary_table(torch.arange(6), model.head_width) if model.rotary else None
    h = block.attention_norm(x)
    slow = x + slow_attention(block.attention, h, h, torch.ones(6, 6).tril(), table)
    slow = slow + slow_attention(block.cross, block.cross_norm(slow), context, torch.ones(6, 5))
    slow = model.norm(slow + block.ff(block.ff_norm(slow)))
    torch.testing.assert_close(model(x, context=model.contexts(context)), slow, rtol=1e-5, atol=1e-5)
    other = model(x, context=model.contexts(context.flip(0)))
    assert (other - slow).abs().amax((1, 2)).min() > 1e-2


def test_a_new_block_with_a_context_is_the_identity_too():
    torch.manual_seed(0)
    fresh = nn.Transformer(WIDTH, 2, HEADS, context_width=12).double()
    torch.testing.assert_close(fresh(tokens(4), context=context_of(fresh)), F.layer_norm(tokens(4), (WIDTH,)))


@pytest.mark.parametrize("lengths", [(4, 4), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS + CROSSED, ids=str)
def test_token_by_token_gives_what_one_run_does_for_samples_of_any_lengths(kind, lengths):
    model, x = make(**kind), tokens(9)
    context = context_of(model)
    whole = model(x, context=context)
    _, cache = model(x[:, :4], return_cache=True, context=context)  # behind its length, a sample's is of no account
    memory = nn.Memory(cache, torch.tensor(lengths), 9)
    for i in range(5):
        here = torch.tensor(lengths) + i
        out = model.step(x[[0, 1], here], memory, context=context)
        torch.testing.assert_close(out, whole[[0, 1], here], rtol=1e-6, atol=1e-6)
    assert memory.length.tolist() == [n + 5 for n in lengths] and memory.top == max(lengths) + 5
    for (keys, values), layer in zip(cache, memory.layers):  # which were copied, and are as they were
        assert keys.shape[2] == values.shape[2] == 4 and layer.keys.shape[2] == 9


@pytest.mark.parametrize("lengths", [(3, 3), (3, 1)], ids=str)
def test_a_bias_is_added_to_the_scores_of_steps_as_to_those_of_one_run(lengths):
    model, x = make(rotary=False), tokens(7)
    bias = torch.randn(1, HEADS, 7, 7, dtype=torch.float64)
    whole = model(x, mask=bias.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf))
    _, cache = model(x[:, :3], mask=bias[..., :3, :3].masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(),
                                                                 -torch.inf), return_cache=True)
    memory = nn.Memory(cache, torch.tensor(lengths), 7)
    for i in range(4):
        here = torch.tensor(lengths) + i
        given = bias[0][:, here, :memory.top + 1].transpose(0, 1)[:, :, None]  # (B, heads, 1, top + 1)
        torch.testing.assert_close(model.step(x[[0, 1], here], memory, given), whole[[0, 1], here], rtol=1e-6,
                                   atol=1e-6)
    assert not torch.allclose(whole, model(x))
