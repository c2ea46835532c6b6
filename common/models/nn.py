"""Transformers: torch's scaled_dot_product_attention, rotary positions, feed-forward, KV cache.

Shapes: B batch, N tokens, D width, d width of a head.
"""

import collections
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def rotary_table(positions, rotary_dim):
    """The table that `rotate` takes, for `positions` (…, N): (cos, ∓sin), stacked as (2, …, N, d).

    d is `rotary_dim`; 0 gives None. From RoFormer (Su et al. 2021, Eq. 34), with its base 10000.
    """
    if not rotary_dim:
        return None
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 10000.0 ** (-exponent / rotary_dim)
    angles = positions[..., None] * frequencies  # (…, N, d/2)
    angles = torch.cat([-angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x, table):
    """Rotate the pairs (i, i + d/2) of x (…, N, d) by the angles of their position, in fp32.

    The last N positions of the table belong to x. Without a table, x is returned unchanged.
    """
    if table is None:
        return x
    cos, sin = table[..., -x.shape[-2] :, :]
    x32 = x.float()
    swapped = x32.roll(x.shape[-1] // 2, -1)
    return (x32 * cos + swapped * sin).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, §3.2).

    causal: without a mask, a token attends only to itself and earlier tokens.
    """

    def __init__(self, width, num_heads, dropout=0.0, causal=False):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def split_heads(self, both):
        """Keys and values, each (B, heads, N, d), from the output of `key_value` (B, N, 2D)."""
        both = both.unflatten(-1, (2 * self.num_heads, -1))
        both = both.transpose(1, 2)  # (B, 2 · heads, N, d)
        return both.chunk(2, dim=1)

    def keys_values(self, x, table=None):
        """Keys and values, each (B, heads, N, d), of x (B, N, D); `table` rotates the keys."""
        keys, values = self.split_heads(self.key_value(x))
        return rotate(keys, table), values

    def forward(self, x, keys, values, mask=None, table=None):
        """Attend from x (B, M, D) to `keys`, `values` (B, heads, N, d) -> (B, M, D).

        mask: (M, N) or (B, 1, M, N), bool with True = attend, or an `attention_bias`. table:
        rotates the queries.
        """
        query = self.query(x)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        x = F.scaled_dot_product_attention(
            rotate(query, table),  # (B, heads, M, d)
            keys,
            values,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(x.transpose(1, 2).flatten(2))


def attention_bias(mask, dtype):
    """Convert a bool `mask` (…, N) to a bias for attention logits: 0 where it is true, else -∞."""
    bias = torch.where(mask, 0.0, -math.inf).to(dtype)
    # Align rows to multiples of 8 elements. GPU kernels would copy other layouts.
    length = mask.shape[-1]
    return F.pad(bias, (0, -length % 8))[..., :length]


def normalized(norm, function, x, groups):
    """Apply `function` with the weights of `norm` to x, in the dtype of x even under autocast.

    torch's norms return fp32 under autocast, and the next layer would cast it back. Mean and
    variance are computed in fp32 either way.
    """
    with torch.autocast(x.device.type, enabled=False):
        weight = norm.weight.to(x.dtype)
        bias = norm.bias.to(x.dtype)
        return function(x, groups, weight, bias, norm.eps)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, but with outputs in the dtype of x."""

    def forward(self, x):
        return normalized(self, F.layer_norm, x, self.normalized_shape)


class GroupNorm(nn.GroupNorm):
    """torch's group norm, but with outputs in the dtype of x."""

    def forward(self, x):
        return normalized(self, F.group_norm, x, self.num_groups)


class KVCache:
    """Keys and values of all blocks, for generating token by token.

    New keys and values are written in place, at the same index for all samples, so that no step
    copies the earlier ones. length (B,): number of tokens in each sample, which is the position of
    its next token. filled: number of slots in use, including the padding of shorter samples.
    """

    def __init__(self, cache, length, size):
        """Copy `cache`, and make room for `size` tokens per sample.

        cache: keys and values (B, heads, N, d) of each block. length (B,): number of tokens in each
        sample; the rest of N is padding.
        """
        self.length = length
        self.filled = cache[0][0].shape[2]
        places = torch.arange(size, device=length.device)
        is_padding = (places >= length[:, None]) & (places < self.filled)
        self.mask = ~is_padding[:, None, None]  # (B, 1, 1, size)
        self.layers = []
        for keys_values in cache:
            both = torch.stack(keys_values, dim=1)  # (B, 2, heads, N, d)
            padding = (0, 0, 0, size - self.filled)
            self.layers.append(F.pad(both, padding))

    def append(self, layer, new):
        """Write `new` keys and values (B, heads, 1, d) of one token per sample, in block `layer`.

        Returns all keys and values so far, `filled` + 1 per sample.
        """
        both = self.layers[layer]
        new = torch.stack(new, dim=1)  # (B, 2, heads, 1, d)
        stop = self.filled + 1
        both[..., self.filled : stop, :] = new
        return both[..., :stop, :].unbind(1)


class Block(nn.Module):
    """Pre-norm transformer block. Its feed-forward layer has width 4D, as in GPT and CLIP."""

    def __init__(self, width, num_heads, dropout, causal):
        super().__init__()
        self.attention_norm = LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout, causal)
        self.ff_norm = LayerNorm(width)
        feed_forward = collections.OrderedDict(
            up=nn.Linear(width, 4 * width),
            gelu=nn.GELU(),
            dropout=nn.Dropout(dropout),
            down=nn.Linear(4 * width, width),
        )
        self.ff = nn.Sequential(feed_forward)
        zero_init(self.attention.out)  # a block starts as the identity
        zero_init(self.ff.down)

    def forward(self, x, mask, table, past, num_last):
        """x (B, N, D) -> (B, num_last or N, D), and the keys and values of x.

        past: keys and values (B, heads, P, d) of earlier tokens. num_last: compute outputs only for
        this many last tokens; needs a mask. The others only serve as keys and values.
        """
        h = self.attention_norm(x)
        new = self.attention.keys_values(h, table)
        keys_values = new
        if past:
            keys_values = [torch.cat(pair, dim=2) for pair in zip(past, new)]
        if num_last:
            x = x[:, -num_last:]
            h = h[:, -num_last:]
            mask = mask[..., -num_last:, :]
        x = x + self.attention(h, *keys_values, mask, table)
        return x + self.ff(self.ff_norm(x)), new


def run_block(block, checkpointing, *inputs):
    """Apply `block`. With `checkpointing`, the backward pass recomputes it."""
    if checkpointing:
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)


class Transformer(nn.Module):
    """A stack of pre-norm blocks with a final norm.

    checkpointing: recompute each block in the backward pass to save memory.
    """

    def __init__(
        self,
        width,
        depth,
        num_heads,
        causal=True,
        rotary=True,
        dropout=0.0,
        checkpointing=False,
    ):
        super().__init__()
        self.rotary_dim = width // num_heads if rotary else 0
        self.checkpointing = checkpointing
        blocks = [Block(width, num_heads, dropout, causal) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(width)

    def forward(self, x, mask=None, cache=None, num_last=None, return_cache=False):
        """x (B, N, D) -> (B, num_last or N, D); with `return_cache`, also the cache of x.

        mask: (N, P + N) or (B, 1, N, P + N), True = attend. Without a mask, attention is causal if
        the model is. `cache` and `num_last` need a mask.
        cache: keys and values (B, heads, P, d) of P earlier tokens, a pair for each block.
        num_last: the last block computes outputs only for this many last tokens.
        """
        # SDPA aligns its own causal mask to the top left, which would hide the earlier tokens.
        assert mask is not None or cache is None
        if mask is not None:
            mask = attention_bias(mask, x.dtype)  # once, instead of in every block
        prefix = cache[0][0].shape[2] if cache else 0
        positions = torch.arange(prefix, prefix + x.shape[1], device=x.device)
        table = rotary_table(positions, self.rotary_dim)

        new_cache = []
        for i, block in enumerate(self.blocks):
            past = cache[i] if cache else None
            num_last_here = num_last if block is self.blocks[-1] else None
            inputs = (x, mask, table, past, num_last_here)
            x, new = run_block(block, self.checkpointing, *inputs)
            if return_cache:  # otherwise `new` is freed, which saves memory with checkpointing
                new_cache.append(new)
        x = self.norm(x)
        if return_cache:
            return x, new_cache
        return x

    def step(self, x, cache):
        """Process the next token of every sample, x (B, D) -> (B, D); append it to the KVCache."""
        # Positions (B, 1, 1), to broadcast over heads and tokens: each sample has its own.
        table = rotary_table(cache.length[:, None, None], self.rotary_dim)
        mask = cache.mask[..., : cache.filled + 1]
        x = x[:, None]
        for i, block in enumerate(self.blocks):
            h = block.attention_norm(x)
            keys_values = cache.append(i, block.attention.keys_values(h, table))
            x = x + block.attention(h, *keys_values, mask, table)
            x = x + block.ff(block.ff_norm(x))
        cache.length = cache.length + 1  # not in place: the tensor belongs to the caller
        cache.filled += 1
        return self.norm(x)[:, 0]


def compile_blocks(blocks):
    """Let torch.compile compile each block at its first call. Equal blocks are compiled only once.

    This saves minutes compared with compiling the whole model.
    """
    # Blocks recompile for each shape, with and without gradients. torch's default limit is 8.
    torch._dynamo.config.recompile_limit = 128
    for block in blocks:
        block.compile()


def learned_tokens(count, width):
    """A module whose `weight` (count, width) holds learned tokens.

    It is never indexed. It is an nn.Embedding only so that optim.groups does not decay it.
    """
    weight = torch.randn(count, width) * 0.02
    return nn.Embedding.from_pretrained(weight, freeze=False)


class NullText(nn.Module):
    """The condition "no text": a CLIP's encoding of "", in buffers that are saved with the model.

    The buffers are zero until `fill` is called, and stay zero if no CLIP is loaded.
    """

    def __init__(self, embed_width, encoding_width, length):
        super().__init__()
        self.register_buffer("text_embed", torch.zeros(1, embed_width))
        if encoding_width:
            self.register_buffer("text_enc", torch.zeros(1, length, encoding_width))
            self.register_buffer("text_mask", torch.ones(1, length, dtype=torch.bool))

    def fill(self, condition):
        """Fill the buffers from the `condition` {name: (1, …)} of "". Other names are ignored."""
        self.load_state_dict(condition, strict=False)

    def forward(self, condition, drop):
        """`condition` {name: (B, …)}, with "no text" where `drop` (B,) is true."""
        replaced = dict(condition)
        for name, null in self.named_buffers():
            where = drop.reshape(-1, *[1] * (null.ndim - 1))
            replaced[name] = torch.where(where, null, condition[name])
        return replaced


class TimeEmbedding(nn.Module):
    """Timesteps (…) in [0, 1000), not necessarily integers -> (…, hidden) (DDPM, App. B).

    Cosines and sines at `width`/2 geometrically spaced frequencies (Vaswani et al. 2017, §3.5),
    then two linear layers.
    """

    def __init__(self, width, hidden):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
        )

    def forward(self, timestep):
        half = self.width // 2
        exponent = torch.arange(half, device=timestep.device, dtype=torch.float32) / half
        # Use exp, as published models do. A power differs by 1e-7, times a timestep of up to 999.
        frequencies = torch.exp(-math.log(10000.0) * exponent)
        angles = timestep[..., None] * frequencies
        sinusoid = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.layers(sinusoid)


def zero_init(layer):
    """Set the parameters of `layer` to zero, so that its output starts at zero, and return it."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
