"""Transformers: attention by torch's scaled_dot_product_attention, rotary positions, feed-forward, key-value cache."""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


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
    """Multi-head attention (Vaswani et al. 2017, §3.2)."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        assert width % heads == 0, (width, heads)
        self.heads = heads
        self.head_width = width // heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_values(self, x, table=None):
        """Keys and values, each (B, heads, N, d), of x (B, N, W); `table` rotates the keys."""
        both = self.key_value(x).unflatten(-1, (2 * self.heads, self.head_width))
        k, v = both.transpose(1, 2).chunk(2, dim=1)
        return (k if table is None else rotate(k, table)), v

    def forward(self, x, keys, values, mask=None, causal=False, table=None):
        """Attend from x (B, M, W) to `keys`, `values` (B, heads, N, d) -> (B, M, W).

        mask: (M, N) or (B, 1, M, N), True = seen. causal: only for M = N, as SDPA aligns it to the
        top left.
        """
        q = self.query(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)  # (B, heads, M, d)
        q = q if table is None else rotate(q, table)
        x = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal,
                                           dropout_p=self.dropout if self.training else 0.0)
        return self.out(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Linear, GELU, Linear, with a hidden layer of four times the width, as in GPT and CLIP."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(F.gelu(self.up(x))))


class Memory:
    """Keys and values of all blocks for generation token by token; written in place, so that no step copies the past.

    `length` (B,): how many tokens each sample has, so the place of its next one; `top` is the greatest of them.
    """

    def __init__(self, cache, length, size):
        """Room for `size` tokens a sample, filled with `cache`, a pair a block, of which `length` (B,) are real."""
        self.length, self.top = length, int(length.max())
        self.rows = torch.arange(len(length), device=length.device)
        self.layers = [tuple(F.pad(part, (0, 0, 0, size - part.shape[2])) for part in pair) for pair in cache]

    def put(self, layer, *fresh):
        """Write one token a sample, keys and values (B, heads, 1, d); returns the first `top` + 1 of block `layer`."""
        for slots, part in zip(self.layers[layer], fresh):
            slots[self.rows, :, self.length] = part[:, :, 0]
        return tuple(slots[:, :, :self.top + 1] for slots in self.layers[layer])

    def seen(self):
        """Which of the first `top` + 1 places the next token of a sample attends to, (B, 1, 1, top + 1)."""
        return (torch.arange(self.top + 1, device=self.length.device) <= self.length[:, None])[:, None, None]


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ff_norm = nn.LayerNorm(width)
        self.ff = FeedForward(width, dropout)
        zeroed(self.attention.out)  # a block starts as the identity
        zeroed(self.ff.down)

    def forward(self, x, mask=None, causal=False, table=None, cache=None, keep=None):
        """x (B, N, W) -> (B, keep or N, W); also returns the keys and values of x.

        Only the last `keep` tokens are computed: what comes before them serves as keys alone. cache: keys and values of
        earlier tokens, or a function that takes in those of x and returns all.
        """
        h = self.attention_norm(x)
        keys, values = fresh = self.attention.keys_values(h, table)
        if callable(cache):
            keys, values = cache(keys, values)
        elif cache is not None:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(cache, fresh))
        if keep is not None and keep < x.shape[1]:
            x, h = x[:, -keep:], h[:, -keep:]
            table = None if table is None else tuple(part[..., -keep:, :] for part in table)
            if mask is not None:
                mask = mask[..., -keep:, :]
            elif causal:
                mask, causal = causal_mask(keep, keys.shape[2], x.device), False
        x = x + self.attention(h, keys, values, mask, causal, table)
        return x + self.ff(self.ff_norm(x)), fresh


def causal_mask(rows, total, device):
    """(rows, total), True = seen, for the last `rows` of `total` tokens: aligned to the bottom right."""
    return torch.ones(rows, total, dtype=torch.bool, device=device).tril(total - rows)


class Transformer(nn.Module):
    """A stack of pre-norm blocks with a final norm; `checkpointing` recomputes each block in the backward pass."""

    def __init__(self, width, depth, heads, causal=True, rotary=True, dropout=0.0,
                 checkpointing=False):
        super().__init__()
        self.causal = causal
        self.rotary = rotary
        self.head_width = width // heads
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, mask=None, cache=None, keep=None, return_cache=False):
        """x (B, N, W) -> (B, keep or N, W), or (that, cache) with `return_cache`.

        mask: (N, P + N) or (B, 1, N, P + N), True = seen; without one, attention is causal if the
        model is.
        cache: keys and values of P earlier tokens, a pair a block, each (B, heads, P, d); the returned one is of x.
        keep: compute only the last `keep` tokens of the last block, the earlier ones being wanted as keys alone.
        """
        n = x.shape[1]
        prefix = 0 if cache is None else cache[0][0].shape[2]
        table = None
        if self.rotary:
            positions = torch.arange(prefix, prefix + n, device=x.device)
            table = rotary_table(positions, self.head_width)
        fresh = []
        causal = self.causal and mask is None
        if causal and prefix:
            mask, causal = causal_mask(n, prefix + n, x.device), False
        for i, block in enumerate(self.blocks):
            earlier = None if cache is None else cache[i]
            kept = keep if block is self.blocks[-1] else None
            args = x, mask, causal, table, earlier, kept
            recompute = self.checkpointing and self.training
            x, pair = checkpoint(block, *args, use_reentrant=False) if recompute else block(*args)
            if return_cache:  # else not kept alive: recomputed, they need not be
                fresh.append(pair)
        x = self.norm(x)
        return (x, fresh) if return_cache else x

    def step(self, x, memory):
        """The next token x (B, W) of every sample -> (B, W); `memory` takes it in."""
        table = None
        if self.rotary:  # of each sample's own place in the memory: (B, 1, 1, d)
            table = rotary_table(memory.length[:, None, None], self.head_width)
        mask = memory.seen()
        x = x[:, None]
        for i, block in enumerate(self.blocks):
            x, _ = block(x, mask, False, table, functools.partial(memory.put, i))
        memory.length, memory.top = memory.length + 1, memory.top + 1
        return self.norm(x)[:, 0]


def learned_tokens(count, width):
    """A table of learned tokens, whose weight is (count, width). Tables have no weight decay."""
    return nn.Embedding.from_pretrained(torch.randn(count, width) * 0.02, freeze=False)


class NullText(nn.Module):
    """What stands for "no text": a CLIP's encoding of "". Buffers hold it, so models keep it.

    It is zero until `fill` gives it, and stays so where no CLIP is at hand.
    """

    def __init__(self, embed_width, encoding_width=0, length=0):
        super().__init__()
        self.register_buffer("text_embed", torch.zeros(1, embed_width))
        if encoding_width:
            self.register_buffer("text_enc", torch.zeros(1, length, encoding_width))
            self.register_buffer("text_mask", torch.ones(1, length, dtype=torch.bool))

    def fill(self, condition):
        """Take the `condition` of the text "": {buffer: (1, …)}."""
        for name, buffer in self.named_buffers():
            buffer.copy_(condition[name])

    def forward(self, condition, drop):
        """`condition`, {buffer: (B, …), and others}, with "no text" where `drop` (B,) is true."""
        replaced = dict(condition)
        for name, buffer in self.named_buffers():
            value = condition[name]
            where = drop.reshape(-1, *(1,) * (value.ndim - 1))
            replaced[name] = torch.where(where, buffer.to(value.dtype), value)
        return replaced


class TimeEmbedding(nn.Module):
    """A timestep in [0, timesteps), whole or not, (B,) -> (B, hidden) (DDPM, App. B).

    It is a sinusoid of `width` numbers and two layers.
    """

    def __init__(self, width, hidden, timesteps):
        super().__init__()
        self.width = width
        self.timesteps = timesteps
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, timestep):
        return self.layers(sinusoid(timestep * (1000.0 / self.timesteps), self.width))


def sinusoid(t, width, period=10000.0):
    """Cosines and sines of t (B,) at `width`/2 geometric frequencies -> (B, width).

    Vaswani et al. 2017, §3.5.
    """
    half = width // 2
    exponent = torch.arange(half, device=t.device, dtype=torch.float32) / half
    # As exp, not as a power: they differ by 1e-7, times 999 for the last timestep.
    angles = t.float()[:, None] * torch.exp(-math.log(period) * exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def zeroed(layer):
    """`layer` with weights of zero, so that what it is added to starts unchanged."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
