"""Parts of transformers and U-Nets: attention by torch's scaled_dot_product_attention, rotary positions, norms."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


def rotary_table(positions, width, theta=10000.0):
    """(cos, ∓sin), each (..., N, width), of `positions` (..., N), for `rotate` (RoFormer, Su et al. 2021, Eq. 34)."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions.float()[..., None] * frequencies  # (..., N, width/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x, table):
    """Turn the pairs (i, i + d/2) of x (..., N, d) by their position's angles, in fp32."""
    cos, sin = table
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention; fewer `kv_heads` than `heads` share keys and values (multi-query, Shazeer 2019)."""

    def __init__(self, width, heads, kv_heads=None, context_width=None, qk_norm=False, normformer=False, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.dropout = heads, kv_heads or heads, dropout
        assert width % heads == 0 and heads % self.kv_heads == 0, (width, heads, self.kv_heads)
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(context_width or width, 2 * self.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # cosine-similarity attention (Henry et al. 2020): unit queries and keys, a learned temperature a head
        self.temperature = nn.Parameter(torch.full((heads,), 16.0)) if qk_norm else None
        self.out_norm = nn.LayerNorm(width, bias=False) if normformer else None

    def keys_values(self, context, table=None):
        """Keys and values (B, kv_heads, N, d) of `context` (B, N, W)."""
        k, v = self.key_value(context).unflatten(-1, (2 * self.kv_heads, self.head_width)).transpose(1, 2).chunk(2, 1)
        if self.temperature is not None:
            k = F.normalize(k.float(), dim=-1).to(v.dtype)
        return (k if table is None else rotate(k, table)), v

    def forward(self, x, keys, values, mask=None, causal=False, table=None):
        """Attend from x (B, M, W) to `keys`, `values` (B, kv_heads, N, d); mask (M, N) or (B, 1, M, N), True = seen."""
        q = self.query(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)  # (B, heads, M, d)
        scale = None
        if self.temperature is not None:
            q, scale = (F.normalize(q.float(), dim=-1) * self.temperature[:, None, None]).to(q.dtype), 1.0
        if table is not None:
            q = rotate(q, table)
        shared, single = self.heads // self.kv_heads, x.shape[1] == 1
        if shared > 1 and single:  # heads that share keys and values are like so many queries, and quickest as these
            q = q.view(-1, self.kv_heads, shared, self.head_width)
            if mask is not None and mask.ndim == 4 and mask.shape[1] == self.heads:
                mask = mask.view(-1, self.kv_heads, shared, mask.shape[3])
        elif shared > 1:
            keys, values = (t.repeat_interleave(shared, 1) if self.kv_heads > 1 else t.expand(-1, self.heads, -1, -1)
                            for t in (keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal and not single,
                                             scale=scale, dropout_p=self.dropout if self.training else 0.0)
        out = out.reshape(-1, self.heads, 1, self.head_width) if single else out
        out = self.out(out.transpose(1, 2).flatten(2))
        return out if self.out_norm is None else self.out_norm(out)


class _ELU(torch.autograd.Function):
    """F.elu by exp, and backward from its result: torch's on a CPU is by expm1, in twice the time, for 1e-7."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(max=0).exp_().sub_(1)
        torch.maximum(x, y, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.aten.elu_backward(grad, 1.0, 1.0, 1.0, True, *ctx.saved_tensors)


def elu(x):
    """max(x, eˣ - 1) (Clevert et al. 2015)."""
    plain = x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling()
    return F.elu(x) if plain else _ELU.apply(x)


class ELU(nn.Module):
    """`elu` as a layer; it has no memory."""

    def forward(self, x, memory=None):
        return elu(x)


class _GatedProduct(torch.autograd.Function):
    """(silu(gate)·up) @ weightᵀ for gate_up (N, 2H), which alone is kept for the backward pass, the rest recomputed.

    The two products that autograd would keep are most of what a block remembers, and cost next to nothing to make.
    The gradient takes the place of gate_up, so that may be used nowhere else, and one backward pass is all there is.
    On a CPU the rows go through in pieces that fit its cache.
    """

    @staticmethod
    def pieces(*tensors):
        rows = 512 if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
        return zip(*(tensor.split(rows) for tensor in tensors))

    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        weight, out = weight.to(gate_up.dtype), []
        for (piece,) in _GatedProduct.pieces(gate_up):
            gate, up = piece.chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate).mul_(up), weight))
        return torch.cat(out) if len(out) > 1 else out[0]

    @staticmethod
    def backward(ctx, grad):
        gate_up, weight = ctx.saved_tensors
        cast, grad_weight = weight.to(grad.dtype), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for grad_piece, piece in _GatedProduct.pieces(grad, gate_up):
            gate, up = piece.chunk(2, dim=-1)
            silu, grad_hidden = F.silu(gate), grad_piece @ cast
            if grad_weight is not None:  # not frozen under an adapter; summed in the weight's precision
                grad_weight += grad_piece.T @ (silu * up)
            grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
            torch.mul(grad_hidden, silu, out=up)
            gate.copy_(grad_gate)
        return gate_up, grad_weight


class FeedForward(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020) of `mult` times the width; normformer adds a norm before the last product."""

    def __init__(self, width, mult=4, normformer=False, dropout=0.0):
        super().__init__()
        hidden = int(width * mult)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(hidden, bias=False) if normformer else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        plain = isinstance(self.norm, nn.Identity) and not (self.dropout.p and self.training)
        if plain and x.device.type == "cpu" and not torch.is_grad_enabled():  # large weights are faster first
            gate, up = (self.gate_up.weight @ x.reshape(-1, x.shape[-1]).T).T.chunk(2, dim=-1)
            return self.down(F.silu(gate).mul_(up)).view_as(x)
        gate_up = self.gate_up(x)
        if plain and not torch.compiler.is_compiling():  # which recomputes by itself
            return _GatedProduct.apply(gate_up.flatten(0, -2), self.down.weight).unflatten(0, gate_up.shape[:-1])
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.dropout(self.norm(F.silu(gate) * up)))


class Memory:
    """Keys and values of all blocks for generation token by token, in place, so that a step copies no past.

    `length` (B,): how many tokens a sample has, the place of its next one; no sample has more than `top`.
    """

    def __init__(self, cache, length, size):
        """Room for `size` tokens a sample, filled with `cache`, a pair a block, of which `length` (B,) are real."""
        self.length, self.top = length, int(length.max())
        self.even = bool((length == self.top).all())  # all samples have equally many
        self.rows, self.layers = torch.arange(len(length), device=length.device), []
        for pair in cache:
            room = tuple(part.new_zeros(*part.shape[:2], size, part.shape[3]) for part in pair)
            for slots, part in zip(room, pair):
                slots[:, :, :part.shape[2]] = part
            self.layers.append(MemoryLayer(self, *room))

    def seen(self):
        """Which of the first `top` + 1 places a sample's next token sees, (B, 1, 1, top + 1); None: all of them."""
        if self.even:
            return None
        return (torch.arange(self.top + 1, device=self.length.device) <= self.length[:, None])[:, None, None]

    def advance(self):
        self.length, self.top = self.length + 1, self.top + 1


class MemoryLayer(NamedTuple):
    memory: Memory
    keys: torch.Tensor  # (B, kv_heads, size, d)
    values: torch.Tensor

    def put(self, *fresh):
        """Take in keys and values of one token a sample, each (B, kv_heads, 1, d); returns all there are so far."""
        top = self.memory.top
        for slots, part in zip((self.keys, self.values), fresh):
            if self.memory.even:
                slots[:, :, top] = part[:, :, 0]
            else:
                slots[self.memory.rows, :, self.memory.length] = part[:, :, 0]
        return self.keys[:, :, :top + 1], self.values[:, :, :top + 1]


class Block(nn.Module):
    """Pre-norm transformer block; with a `context_width`, attention to a context stands between its two halves."""

    def __init__(self, width, heads, kv_heads, qk_norm, normformer, dropout, ff_mult, context_width=None):
        super().__init__()
        self.attention_norm, self.ff_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, kv_heads, None, qk_norm, normformer, dropout)
        self.cross = None
        if context_width:
            self.cross_norm = nn.LayerNorm(width, bias=False)
            self.cross = Attention(width, heads, kv_heads, context_width, qk_norm, normformer, dropout)
        self.ff = FeedForward(width, ff_mult, normformer, dropout)
        if not normformer:  # a block starts as the identity; a norm behind a zero would blow up the first steps
            nn.init.zeros_(self.attention.out.weight)
            nn.init.zeros_(self.ff.down.weight)
            if context_width:
                nn.init.zeros_(self.cross.out.weight)

    def forward(self, x, mask, causal, table, cache=None, keep=None, context=None):
        """x (B, N, W) -> (B, keep or N, W); also returns the keys and values of x, before which `cache` is put.

        Only the last `keep` tokens are computed, and attended from: what comes before them serves as keys alone.
        context: keys and values of what `cross` attends to.
        """
        h = self.attention_norm(x)
        keys, values = fresh = self.attention.keys_values(h, table)
        if isinstance(cache, MemoryLayer):
            keys, values = cache.put(keys, values)
        elif cache is not None:
            keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
        if keep is not None and keep < x.shape[1]:
            x, h = x[:, -keep:], h[:, -keep:]
            table = None if table is None else (table[0][..., -keep:, :], table[1][..., -keep:, :])
            if mask is not None:
                mask = mask[..., -keep:, :]
            elif causal:
                # is_causal is aligned to the top left; the last `keep` rows need the bottom right
                causal, total = False, keys.shape[2]
                if keep > 1:
                    mask = torch.ones(keep, total, dtype=torch.bool, device=x.device).tril(total - keep)
        x = x + self.attention(h, keys, values, mask, causal, table)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), *context)
        return x + self.ff(self.ff_norm(x)), fresh


class Transformer(nn.Module):
    """A stack of pre-norm blocks with a final norm."""

    def __init__(self, width, depth, heads, kv_heads=None, causal=True, rotary=True, qk_norm=False, normformer=False,
                 dropout=0.0, ff_mult=4, context_width=None):
        super().__init__()
        self.causal, self.rotary, self.head_width = causal, rotary, width // heads
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, qk_norm, normformer, dropout, ff_mult, context_width)
                                    for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)

    def contexts(self, context):
        """Keys and values, a pair a block, of the `context` (B, J, E) that blocks attend to."""
        return [block.cross.keys_values(context) for block in self.blocks]

    def step(self, x, memory, bias=None, context=None, positions=None):
        """The next token x (B, W) of every sample -> (B, W); `memory` takes it in.

        bias: added to the scores of the first `top` + 1 places, (B or 1, heads, 1, top + 1).
        positions: (B,) of the tokens for the rotary table, by default their places in the memory.
        """
        table, mask = None, memory.seen()
        if self.rotary:
            if positions is None:
                positions = memory.length[:1] if memory.even else memory.length
            table = tuple(part[:, None, None] for part in rotary_table(positions, self.head_width))
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        x = x[:, None]
        for i, (block, layer) in enumerate(zip(self.blocks, memory.layers)):
            x, _ = block(x, mask, False, table, layer, context=None if context is None else context[i])
        memory.advance()
        return self.norm(x)[:, 0]

    def forward(self, x, mask=None, positions=None, cache=None, keep=None, return_cache=False, context=None):
        """x (B, N, W) -> (B, keep or N, W), or (that, cache) with `return_cache`.

        mask: (N, P + N) or (B, 1, N, P + N), True = seen, or a bias; without one, attention is causal if the model is.
        positions: (N,) or (B, N) of the tokens for the rotary table, by default P, P + 1, …, after the P of `cache`.
        cache: keys and values of P earlier tokens, one pair a block, each (B, kv_heads, P, d).
        keep: compute only the last `keep` tokens of the last block, the earlier ones being wanted as keys alone.
        context: keys and values of a context, one pair a block, as `contexts` makes them.
        """
        prefix = cache[0][0].shape[2] if cache is not None else 0
        table = None
        if self.rotary:
            if positions is None:
                positions = torch.arange(prefix, prefix + x.shape[1], device=x.device)
            table = rotary_table(positions, self.head_width)
            if positions.ndim == 2:
                table = tuple(part[:, None] for part in table)  # (B, 1, N, d): for all heads
        causal = self.causal and mask is None
        if causal and prefix:
            causal, n = False, x.shape[1]
            mask = torch.ones(n, prefix + n, dtype=torch.bool, device=x.device).tril(prefix)
        made = []
        for i, block in enumerate(self.blocks):
            last = i == len(self.blocks) - 1
            x, fresh = block(x, mask, causal, table, None if cache is None else cache[i], keep if last else None,
                             None if context is None else context[i])
            made.append(fresh)
        x = self.norm(x)
        return (x, made) if return_cache else x


class TimeEmbedding(nn.Module):
    """A timestep in [0, timesteps) -> (B, width), from a learned table or from a continuous sinusoid and two layers."""

    def __init__(self, width, timesteps, kind="continuous"):
        super().__init__()
        self.timesteps, self.kind = timesteps, kind
        if kind == "table":
            self.table = nn.Embedding(timesteps, width)
        else:
            self.layers = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timestep):
        if self.kind == "table":
            return self.table(timestep)
        return self.layers(sinusoid(timestep * (1000.0 / self.timesteps), 256))


def sinusoid(t, width, period=10000.0):
    """Sines and cosines of t (B,) at `width`/2 geometrically spaced frequencies -> (B, width) (Vaswani 2017, §3.5)."""
    frequencies = period ** (-torch.arange(width // 2, device=t.device, dtype=torch.float32) / (width // 2))
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


# Parts that work on pictures, (B, W, H, H)

class _NormSiLU(torch.autograd.Function):
    """silu(groupnorm(x)·scale + shift), of which x alone is kept for the backward pass, the rest recomputed.

    What autograd would keep (the normalized and the scaled x) is most of what a U-Net remembers, and cheap to remake.
    """

    @staticmethod
    def ordered(x, like):
        """x in the order in memory of `like`, which torch's kernels expect without a check; NHWC on a CPU alone."""
        nhwc = like.device.type == "cpu" and like.is_contiguous(memory_format=torch.channels_last)
        return x.contiguous(memory_format=torch.channels_last if nhwc else torch.contiguous_format)

    @staticmethod
    def unit(x):
        """Weights of one for a half-precision x: torch keeps the statistics in the precision of the weights."""
        return None if x.dtype in (torch.float32, torch.float64) else x.new_ones(x.shape[1], dtype=torch.float32)

    @staticmethod
    def normalize(x, groups):
        """(x normalized, mean, 1/std), the latter two in fp32 at the least."""
        (batch, width, height, _), unit = x.shape, _NormSiLU.unit(x)
        bias = None if unit is None else torch.zeros_like(unit)
        return torch.native_group_norm(x, unit, bias, batch, width, height * x.shape[3], groups, 1e-5)

    @staticmethod
    def forward(ctx, x, scale, shift, groups):
        x = _NormSiLU.ordered(x, x)
        normed, mean, rstd = _NormSiLU.normalize(x, groups)
        ctx.save_for_backward(x, scale, shift, mean, rstd)
        ctx.groups = groups
        return F.silu(torch.addcmul(shift.to(x.dtype), normed, scale.to(x.dtype)), inplace=True)

    @staticmethod
    def backward(ctx, grad):
        x, scale, shift, mean, rstd = ctx.saved_tensors
        normed = _NormSiLU.normalize(x, ctx.groups)[0]
        grad = torch.ops.aten.silu_backward(grad, torch.addcmul(shift.to(x.dtype), normed, scale.to(x.dtype)))
        grad_scale, grad_shift = ((g.sum((2, 3), keepdim=True)).to(scale.dtype) for g in (grad * normed, grad))
        grad = torch.ops.aten.native_group_norm_backward(
            _NormSiLU.ordered(grad * scale.to(x.dtype), x), x, mean, rstd, _NormSiLU.unit(x), *x.shape[:2],
            x.shape[2] * x.shape[3], ctx.groups, [True, False, False])[0]
        return grad, grad_scale, grad_shift, None


class NormSiLU(nn.Module):
    """Group norm, scale and shift by the conditioning (ADM, Dhariwal & Nichol 2021, §4.1), SiLU."""

    def __init__(self, width, groups):
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x, modulation=None):
        """x (B, W, H, H), modulation (B, 2W): scale beyond 1, and shift."""
        scale, shift = self.weight.expand(len(x), -1), self.bias.expand(len(x), -1)
        if modulation is not None:
            more, add = modulation.float().chunk(2, dim=1)
            scale, shift = scale * (1 + more), torch.addcmul(add, shift, 1 + more)
        return _NormSiLU.apply(x, scale[:, :, None, None], shift[:, :, None, None], self.groups)


class CrossAttention(nn.Module):
    """Attention of the pixels, W wide, to J conditioning tokens, E wide, by `heads` heads of width d."""

    def __init__(self, width, context_width, heads, head_width):
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.norm, self.out_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key_value = nn.Linear(context_width, 2 * heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def keys_values(self, context):
        """What attention needs to know of `context` (B, J, E): keys and values, each (B, heads, J, d).

        A few tokens are folded into the projections, q·k = x·(Wqᵀk) and out = attention·(Wo·v), each (B, J·heads, W),
        which spares the product of every pixel with Wq and Wo.
        """
        k, v = self.key_value(context).unflatten(-1, (2 * self.heads, self.head_width)).chunk(2, dim=2)  # (B, J, h, d)
        if context.shape[1] * 2 > self.head_width:
            return k.transpose(1, 2), v.transpose(1, 2)
        query, out = self.query.weight.to(k.dtype), self.out.weight.to(k.dtype)
        keys = torch.einsum("bjhd,hdw->bjhw", k, query.unflatten(0, (self.heads, -1))) * self.head_width ** -0.5
        return keys.flatten(1, 2), torch.einsum("bjhd,whd->bjhw", v, out.unflatten(1, (self.heads, -1))).flatten(1, 2)

    def forward(self, x, keys, values):
        """x (B, W, H, H) plus what it attends to."""
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)  # (B, N, W)
        h = self.norm(x)
        if keys.ndim == 3:
            scores = (h @ keys.transpose(1, 2)).unflatten(-1, (-1, self.heads))  # (B, N, J, heads)
            h = scores.softmax(dim=2, dtype=torch.float32).to(values.dtype).flatten(2) @ values
        else:
            query = self.query(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            h = self.out(F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2))
        return (x + self.out_norm(h)).transpose(1, 2).unflatten(2, size)


def heads_of(width, head_width):
    """How many heads of about `head_width` divide `width`."""
    return next(heads for heads in range(max(1, width // head_width), 0, -1) if width % heads == 0)


class SelfAttention(nn.Module):
    """Attention of the pixels to each other, with one key-value head (Shazeer 2019); x (B, W, H, H) plus that."""

    def __init__(self, width, head_width):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads_of(width, head_width), 1, normformer=True)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, W)
        h = self.norm(tokens)
        tokens = tokens + self.attention(h, *self.attention.keys_values(h))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


class LinearAttention(nn.Module):
    """Attention of the pixels to each other at a cost linear in their number (Shen et al. 2018, §3.2)."""

    def __init__(self, width, head_width):
        super().__init__()
        self.heads = heads_of(width, head_width)
        self.norm, self.out_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, W)
        h = self.norm(tokens)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2).float()  # (B, heads, N, d)
                   for t in (self.query(h), *self.key_value(h).chunk(2, dim=-1)))
        found = (q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)).to(h.dtype)
        tokens = tokens + self.out_norm(self.out(found.transpose(1, 2).flatten(2)))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])
