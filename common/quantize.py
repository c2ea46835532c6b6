"""The residual vector quantizer of a neural codec, whole or in groups of channels.

A frame is described by one code of each quantizer in turn, each quantizing what the ones before it left over
(SoundStream, Zeghidour et al. 2021, Section III-C, Algorithm 1). The bitrate is chosen at use: the first n suffice.
"""
import itertools
import math

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import nn

from common import dist

SMOOTHING = 1e-5  # pseudo-count of a code, so that none is divided by zero


def nearest(x, codebook):
    """The code of each vector: x (G, N, d), codebook (G, K, d) -> (G, N) int64.

    In full fp32, though autocast or `dist.setup` may have products' factors rounded: near ties would go wrong.
    """
    slab = max(1, 2 ** 24 // codebook[..., 0].numel())  # vectors at a time: long sounds would need gigabytes
    half_squares, turned = codebook.square().sum(-1)[:, None] / 2, codebook.transpose(1, 2)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(x.device.type, enabled=False):  # half the squared distance, less |x|²/2
            return torch.cat([torch.baddbmm(half_squares, part, turned, alpha=-1).argmin(-1)
                              for part in x.split(slab, 1)], 1)
    finally:
        torch.set_float32_matmul_precision(precision)


def _add_by_code(counts, sums, x, codes, weight):
    """Add the weights (N,) of the vectors x (G, N, d) to counts (G, K), and the weighted x to sums (G, K, d)."""
    groups, size = counts.shape[:2]
    index = (codes + size * torch.arange(groups, device=codes.device)[:, None]).flatten()  # (G*N,)
    counts.view(-1).index_add_(0, index, weight.repeat(groups))
    sums.view(groups * size, -1).index_add_(0, index, (x * weight[:, None]).flatten(0, 1))


@torch.no_grad()
def kmeans(x, size, generator, rounds=10):
    """`size` centers of x (G, N, d), each group by itself -> centers (G, K, d), how many each is the mean of (G, K).

    k-means++ (Arthur & Vassilvitskii 2007): each center is drawn with probability proportional to the squared distance
    to the nearest one so far. Then `rounds` of Lloyd's, at least one. `generator` is the CPU's: all devices draw alike.
    """
    groups, n, width = x.shape
    draws = torch.rand(size, groups, 1, generator=generator).to(x.device)
    centers, distances = x.new_empty(groups, size, width), x.new_ones(groups, n)  # at first, any will do
    for k in range(size):
        cumulative = distances.cumsum(-1)
        chosen = torch.searchsorted(cumulative, draws[k] * cumulative[:, -1:], right=True).clamp_(max=n - 1)
        centers[:, k] = x.gather(1, chosen[..., None].expand(-1, -1, width))[:, 0]
        from_it = (x - centers[:, k, None]).square_().sum(-1)
        distances = torch.minimum(distances, from_it) if k else from_it
    for _ in range(rounds):
        counts, sums = x.new_zeros(groups, size, 1), torch.zeros_like(centers)
        _add_by_code(counts, sums, x, nearest(x, centers), x.new_ones(n))
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), centers)
    return centers, counts[..., 0]


def uniform_grid(size, dimensions):
    """At most `size` points of a grid for numbers of variance 1, (size, d): 256 of two dimensions are 17 * 15 and one.

    Odd numbers of levels, as even as can be, so that 0 is one; as wide as is best for each number of them (Max 1960,
    Table II, to 5 % for the numbers that it has, up to 36). What is left of `size` is in the middle, behind the point
    that is. ValueError for fewer than three levels each.
    """
    levels = [1] * dimensions
    while math.prod(levels) // min(levels) * (min(levels) + 2) <= size:
        levels[levels.index(min(levels))] += 2
    if min(levels) < 3:
        raise ValueError(f"codebook_size {size}: grids of groups of {dimensions} channels have 3^{dimensions} points "
                         "or more; take more groups, or learned codebooks")
    lines = [(torch.arange(n) - n // 2) * ((0.77 * math.log(n) + 0.37) / (n // 2)) for n in levels]
    points = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).reshape(-1, dimensions)
    return F.pad(points, (0, 0, 0, size - len(points)))


class ResidualQuantizer(nn.Module):
    """Q quantizers in a row, each of the residual of those before it, as a whole or in groups of channels.

    Codebooks are learned: moving averages of the vectors they stand for (van den Oord et al. 2017, Appendix A.1), zero
    and not `ready` until `initialize` was called: so long `forward` returns its input.

    groups: a quantizer of G > 1 has a code for each G-th of the width (HiFi-Codec, Yang et al. 2023). Few codes say
    most as codes of whole frames; many, as codes of parts. The C codes of a frame are laid out quantizer by quantizer,
    `ends[q]` is behind those of quantizer q. A code is an integer in [0, codebook_size).
    uniform: codebooks of groups are grids, each channel as wide as the root mean square of what is left over in it,
    and do not die. Learned codes lie the closer, the more vectors there are, so the most probable code of a loud frame
    is a loud one; of a grid it is the middle.

    A step of training: `forward` for each chunk, in training mode and with gradients enabled, adds to the statistics;
    then once, on all ranks, `update` if the step counts, else `discard`. A pass in evaluation mode or under no_grad,
    such as the discriminator's, leaves no trace.
    """

    def __init__(self, width, quantizers=8, codebook_size=1024, groups=1, uniform=False, decay=0.95, dead_below=2.0,
                 dropout=0.0, least=1):
        """`width` is the D of z.

        groups: of every quantizer, or a sequence of one number each.
        uniform: codebooks of quantizers of several groups are grids, by `uniform_grid`, else learned as the others.
        decay: of the moving averages, a step. dead_below: a code that gets fewer vectors a step, on a moving average,
            is replaced, but never one with a quarter of the average code's; 0 replaces none.
        dropout: probability that a sample uses, in training, only its first n quantizers, n uniform from `least`, or Q
            if that is less, to Q.
        Raises ValueError for what does not fit together.
        """
        super().__init__()
        groups = (groups,) * quantizers if isinstance(groups, int) else tuple(groups)
        if len(groups) != quantizers:
            raise ValueError(f"groups {groups}: expected one number, or one for each of {quantizers} quantizers")
        if min(width, quantizers, least, *groups) < 1 or codebook_size < 2 or dead_below < 0:
            raise ValueError(f"width {width}, quantizers {quantizers}, least {least}, groups {groups}: expected at "
                             f"least 1; codebook_size {codebook_size}: 2; dead_below {dead_below}: 0")
        if not (0 <= decay < 1 and 0 <= dropout <= 1):
            raise ValueError(f"decay {decay}: expected in [0, 1); dropout {dropout}: expected in [0, 1]")
        if wrong := [number for number in groups if width % number]:
            raise ValueError(f"width {width} does not divide into {wrong[0]} groups")
        self.quantizers, self.codebook_size = quantizers, codebook_size
        self.groups, self.ends = groups, list(itertools.accumulate(groups))
        self.decay, self.dead_below, self.dropout, self.least = decay, dead_below, dropout, min(least, quantizers)

        # a tensor, not a Python value, so that checkpoints and EMA copies carry it along
        self.register_buffer("initialized", torch.tensor(False))
        # a quantizer's vectors are (G, K, d), laid out flat, as G·d is the same for all; a grid sums squares
        vectors, counts = (quantizers, codebook_size * width), (self.ends[-1], codebook_size)
        for name, size in ("codebook", vectors), ("ema_count", counts), ("ema_sum", vectors):
            self.register_buffer(name, torch.zeros(size))
        for name, size in ("pending_count", counts), ("pending_sum", vectors):
            self.register_buffer(name, torch.zeros(size), persistent=False)
        for number in {*groups} - {1} if uniform else ():  # saved, so that learned codebooks do not pass for these
            self.register_buffer(f"grid{number}", uniform_grid(codebook_size, width // number))
        self._candidates = None  # (Q, M, D): residuals of the first chunk after an update, M <= K

    @property
    def ready(self):
        """Whether there are codebooks. On a GPU this waits for the device, so ask once, not in every step."""
        return bool(self.initialized)

    def forward(self, z, count=None):
        """z (B, T, D), `count` quantizers or all -> (quantized (B, T, D), codes (B, T, ends[count - 1]), loss).

        loss: the commitment, the mean squared difference of what each quantizer was given and its code (held constant),
        averaged over a sample's quantizers, then over samples, so that a batch's is the mean of its chunks'.
        The codes are all quantizers', also those that dropout left out of a sample. Not `ready`: z, zeros and 0.
        """
        x = z.float().flatten(0, 1)  # (B*T, D), in fp32 also under autocast
        total, codes, loss = self._quantize(x, self._used(z, count, self.training), self.training)
        if x.requires_grad:  # straight through
            total = total.detach() + (x - x.detach())
        quantized = torch.where(self.initialized, total.view(z.shape).to(z.dtype), z)
        return quantized, codes[..., :self.ends[(count or self.quantizers) - 1]], loss

    @torch.no_grad()
    def encode(self, z, count=None):
        """z (B, T, D) -> codes (B, T, ends[count - 1]) int64 of the first `count` quantizers, or all; nearest codes."""
        return self._quantize(z.float().flatten(0, 1), self._used(z, count, False), False)[1]

    def decode(self, codes):
        """codes (B, T, ends[n - 1]) of the first n quantizers -> (B, T, D); ValueError if that is not what they are."""
        if codes.shape[-1] not in self.ends:
            raise ValueError(f"{codes.shape[-1]} codes a frame: expected {', '.join(map(str, self.ends))}")
        by_quantizer = codes.flatten(0, 1).T.split(self.groups[:self.ends.index(codes.shape[-1]) + 1])  # n of (G, N)
        return sum(self._lookup(one, q) for q, one in enumerate(by_quantizer)).unflatten(0, codes.shape[:2])

    @torch.no_grad()
    def vectors(self):
        """What each code adds to a frame, (C, K, D): `decode` is their sum."""
        codes, made = torch.arange(self.codebook_size, device=self.initialized.device), []
        for q, groups in enumerate(self.groups):
            parts = self._grouped(self._lookup(codes.expand(groups, -1), q), q)  # (G, K, d / G)
            width = parts.shape[2]
            made += [F.pad(part, (g * width, (groups - 1 - g) * width)) for g, part in enumerate(parts)]
        return torch.stack(made)

    @torch.no_grad()
    def initialize(self, z, seed, rounds=10):
        """Fit the codebooks by k-means to z (N, D), quantizer after quantizer to the residuals; call it on all ranks.

        Rank 0's z decides, and its codebooks go to all. Raises ValueError for fewer vectors than codes.
        """
        if (n := dist.broadcast(len(z))) < self.codebook_size:
            raise ValueError(f"{n} vectors to start {self.codebook_size} codes: at least as many are needed")
        if dist.is_main():
            generator = torch.Generator().manual_seed(seed)
            residual = z.float()
            for q in range(self.quantizers):
                x, grid = self._grouped(residual, q), self._grid(q)
                if grid is None:
                    centers, counts = kmeans(x, self.codebook_size, generator, rounds)
                    sums, codes = centers * counts[..., None], nearest(x, centers)
                else:
                    centers = grid * x.square().mean(1, keepdim=True).sqrt()
                    counts, sums = torch.zeros_like(centers[..., 0]), torch.zeros_like(centers)
                    codes = nearest(x, centers)
                    _add_by_code(counts, sums, x.square(), codes, x.new_ones(x.shape[1]))
                self._vectors(self.codebook, q).copy_(centers)
                self._vectors(self.ema_sum, q).copy_(sums)
                self._counts(self.ema_count, q).copy_(counts)
                residual = residual - self._lookup(codes, q)
        for tensor in (self.codebook, self.ema_count, self.ema_sum) if td.is_initialized() else ():
            td.broadcast(tensor, 0)
        self.initialized.fill_(True)
        self.discard()

    @torch.no_grad()
    def update(self, seed):
        """Move the codebooks by what `forward` gathered on all ranks since the last time, once a step, on all ranks.

        Dead codes become residuals of rank 0's first chunk, drawn by `seed`, a function of the step: codebooks are
        equal bit for bit on all ranks, and up to rounding for any number of them. Quantizers that none used stay.
        """
        if td.is_initialized():
            td.all_reduce(self.pending_count)
            td.all_reduce(self.pending_sum)
        fresh = self.pending_count.sum(-1, keepdim=True) > 0  # (C, 1)
        rate = (1 - self.decay) * fresh
        self.ema_count.lerp_(self.pending_count, rate.expand_as(self.ema_count))
        mass = self.ema_count.sum(-1, keepdim=True)
        smoothed = (self.ema_count + SMOOTHING) / (mass + self.codebook_size * SMOOTHING) * mass  # Laplace's rule
        for q in range(self.quantizers):
            codebook, total, new = (self._vectors(x, q) for x in (self.codebook, self.ema_sum, self.pending_sum))
            own_rate, own_fresh, count = (self._counts(x, q)[..., None] for x in (rate, fresh, smoothed))
            total.lerp_(new, own_rate.expand_as(total))
            if (grid := self._grid(q)) is None:
                found = total / count
            else:
                found = grid * (total.sum(1, keepdim=True) / count.sum(1, keepdim=True)).sqrt()
            codebook.copy_(torch.where(own_fresh, found, codebook))
            if grid is not None:  # its codes do not die
                own_fresh.zero_()
        self._replace_dead(fresh, mass / self.codebook_size, seed)
        self.discard()

    def discard(self):
        """Forget what `forward` gathered: the step overflowed, or the passes were not to count."""
        self.pending_count.zero_()
        self.pending_sum.zero_()
        self._candidates = None

    def _used(self, z, count, training):
        """Which quantizers each sample of z uses: (B, passes) bool; in training `passes` is Q."""
        if count is not None and not 1 <= count <= self.quantizers:
            raise ValueError(f"count {count}: expected from 1 to {self.quantizers}")
        limit = torch.full((len(z),), count or self.quantizers, device=z.device)
        if training and self.dropout and count is None:
            fewer = torch.randint(self.least, self.quantizers + 1, limit.shape, device=z.device)
            limit = torch.where(torch.rand(limit.shape, device=z.device) < self.dropout, fewer, limit)
        # in training those not used are computed too: they supply candidates to replace dead codes
        passes = self.quantizers if training else count or self.quantizers
        return torch.arange(passes, device=z.device) < limit[:, None]

    def _vectors(self, x, q):
        """Those of quantizer q in x (Q, G·K·d), a view (G, K, d)."""
        return x[q].view(self.groups[q], self.codebook_size, -1)

    def _grid(self, q):
        """The grid (K, d) that quantizer q's codebooks are, but for their widths, or None if they are learned."""
        return getattr(self, f"grid{self.groups[q]}", None)

    def _counts(self, x, q):
        """Those of quantizer q in x (C, …), a view (G, …)."""
        return x[self.ends[q] - self.groups[q]:self.ends[q]]

    def _grouped(self, x, q):
        """x (N, G·d) as quantizer q takes it, (G, N, d)."""
        return x.unflatten(-1, (self.groups[q], -1)).transpose(0, 1)

    @torch.compiler.disable  # it changes buffers and the precision of products, which a compiled graph cannot
    def _quantize(self, x, used, training):
        """x (B*T, D), used (B, passes) bool -> (sum of used codes (B*T, D), codes (B, T, ends[passes - 1]), loss)."""
        batch, passes = used.shape
        frames = len(x) // max(1, batch)
        learns = training and torch.is_grad_enabled()
        residual, total, codes, losses, candidates = x, torch.zeros_like(x), [], [], []
        for q in range(passes):
            given, weight = self._grouped(residual.detach(), q), used[:, q].repeat_interleave(frames)  # (G, N, d), (N,)
            code = nearest(given, self._vectors(self.codebook, q))
            value = self._lookup(code, q)
            if learns:
                counted = (weight & self.initialized).float()
                seen = given if self._grid(q) is None else given.square()  # all there is to know for a grid
                _add_by_code(self._counts(self.pending_count, q), self._vectors(self.pending_sum, q), seen, code,
                             counted)
                candidates.append(residual.detach())
            residual = residual - value
            total = total + value * weight[:, None]
            codes.append(code)
            error = residual.square().unflatten(0, (batch, frames)).mean((1, 2))  # (B,)
            losses.append((error * used[:, q] / used.sum(1)).mean())
        if learns and self._candidates is None and dist.is_main():
            # evenly spaced, so that nothing is drawn: on other ranks there would be no such draw
            n, m = len(x), min(len(x), self.codebook_size)
            self._candidates = torch.stack(candidates)[:, torch.arange(m, device=x.device) * n // m]
        codes = torch.cat(codes).T.unflatten(0, (batch, frames))
        return total, codes * self.initialized, torch.stack(losses).sum() * self.initialized

    def _lookup(self, codes, q):
        """The vectors (N, G·d) that codes (G, N) of quantizer q stand for."""
        offsets = self.codebook_size * torch.arange(len(codes), device=codes.device)[:, None]
        found = F.embedding(codes + offsets, self._vectors(self.codebook, q).flatten(0, 1))  # (G, N, d)
        return found.transpose(0, 1).flatten(1)

    def _replace_dead(self, fresh, average, seed):
        """Give dead codes new vectors, and the `average` (C, 1) count, so that they are not dead at once again."""
        # small batches leave all codes below any fixed number: a quarter of the average is still alive
        dead = fresh & (self.ema_count < (average / 4).clamp(max=self.dead_below))  # (C, K)
        if not dead.any():  # all ranks find the same
            return
        picks, replaced = torch.zeros_like(self.codebook), torch.zeros_like(self.ema_count)
        if dist.is_main() and self._candidates is not None:
            m, generator = self._candidates.shape[1], torch.Generator().manual_seed(seed)
            order = torch.rand(len(dead), m, generator=generator).argsort(-1).to(dead.device)  # (C, M)
            place = dead.cumsum(-1) - 1  # a dead code's number among the dead, who get one candidate each
            rows = order.gather(-1, place.clamp(0, m - 1))[..., None]  # (C, K, 1)
            for q, candidates in enumerate(self._candidates):
                own = self._vectors(picks, q)
                own.copy_(self._grouped(candidates, q).gather(1, self._counts(rows, q).expand_as(own)))
            replaced = (dead & (place < m)).to(replaced.dtype)
        for tensor in (picks, replaced) if td.is_initialized() else ():
            td.broadcast(tensor, 0)
        replaced = replaced > 0
        self.ema_count.copy_(torch.where(replaced, average, self.ema_count))
        for q in range(self.quantizers):
            codebook, total, new = (self._vectors(x, q) for x in (self.codebook, self.ema_sum, picks))
            own_replaced, count = (self._counts(x, q)[..., None] for x in (replaced, average))
            codebook.copy_(torch.where(own_replaced, new, codebook))
            total.copy_(torch.where(own_replaced, new * count, total))
