"""Residual vector quantization (SoundStream, Zeghidour et al. 2021, Section III-C, Algorithm 1)."""

import itertools

import torch
import torch.distributed as td
import torch.nn.functional as F

from common import dist


def nearest_codes(x, codebook):
    """Codes (N,) int64 of the vectors in `codebook` (K, D) that are nearest to x (N, D).

    Products are in full fp32 precision. Otherwise, the wrong one of two close codes could win.
    """
    # |x - c|² / 2 = |x|² / 2 + |c|² / 2 - x·c; the first term is the same for all codes.
    half_squares = codebook.square().sum(-1) / 2
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.autocast(x.device.type, enabled=False):
        distances = torch.addmm(half_squares, x, codebook.T, alpha=-1)
    torch.set_float32_matmul_precision(precision)
    return distances.argmin(-1)


@torch.no_grad()
def kmeans(x, size, generator, rounds=10):
    """k-means of x (N, D) with K = `size`: (centers (K, D), number of vectors per center (K,)).

    k-means++ (Arthur & Vassilvitskii 2007, Section 2.2), then `rounds` >= 1 Lloyd iterations.
    """
    # The probability that a vector becomes the next center is proportional to its squared distance
    # to the nearest center so far. Random numbers are drawn on the CPU, so that all devices use the
    # same ones. They are in (0, 1], because 0 could pick a vector that is already a center.
    uniform = 1 - torch.rand(size, generator=generator, dtype=torch.float64)
    centers = x.new_empty(size, x.shape[1])
    distances = torch.full_like(x[:, 0], 1e30)  # equal, so that the first center is drawn uniformly
    for k in range(size):
        distances_on_cpu = distances.cpu().double()
        cumulative = distances_on_cpu.cumsum(0)
        threshold = uniform[k] * cumulative[-1]
        index = torch.searchsorted(cumulative, threshold)
        centers[k] = x[index]
        differences = x - centers[k]
        squares = differences.square()
        distances = torch.minimum(distances, squares.sum(-1))

    for _ in range(rounds):
        codes = nearest_codes(x, centers)
        counts = codes.bincount(minlength=size)
        sums = torch.zeros_like(centers)
        sums.index_add_(0, codes, x)
        column = counts[:, None]
        means = sums / column
        centers = torch.where(column > 0, means, centers)
    return centers, counts


class ResidualQuantizer(torch.nn.Module):
    """Q quantizers in a row: each quantizes the residual that the previous ones leave.

    A code's vector is the moving average of the inputs assigned to it (van den Oord et al. 2017,
    App. A.1), with Laplace smoothing. In training mode with gradients enabled, `forward` gathers
    statistics of each chunk. After the step, all ranks call `update`, or `discard` if the step
    overflowed.

    In training, each sample uses only its first n quantizers, n uniform in 1..Q (Section III-C).

    width: D. decay: the averages' decay per step. dead_below: a code is replaced if its use is
    below this share of the mean use in its quantizer; 0: never.
    """

    def __init__(self, width, num_quantizers, codebook_size, decay, dead_below):
        super().__init__()
        self.num_quantizers = num_quantizers
        self.codebook_size = codebook_size
        self.decay = decay
        self.dead_below = dead_below
        vectors = torch.zeros(num_quantizers, codebook_size, width)
        # A tensor, so that checkpoints and EMA copies include it.
        self.register_buffer("initialized", torch.tensor(False))
        self.register_buffer("codebook", vectors)
        self.register_buffer("ema_count", vectors.sum(-1))
        self.register_buffer("ema_sum", vectors.clone())
        # For each code: the number of its vectors since the last update, and their sum.
        pending = torch.zeros(num_quantizers, codebook_size, 1 + width)
        self.register_buffer("pending", pending, persistent=False)
        self._candidates = None  # (Q, N, D), N <= K inputs of each quantizer, from the first chunk

    @property
    def ready(self):
        """True once the codebooks are initialized. Synchronizes with a GPU; avoid it in a step."""
        return bool(self.initialized)

    @torch.compiler.disable  # it changes buffers and the matmul precision
    def forward(self, z):
        """z (B, T, D) -> (quantized (B, T, D), codes (B, T, Q), loss).

        Until the codebooks are initialized, these are z, zeros and 0. Gradients are
        straight-through. loss: the commitment loss, which is the mean squared difference between
        each quantizer's input and its code's vector (held constant), averaged over the active
        quantizers of a sample, then over samples.
        """
        x = z.float()
        codes = self.encode(z)
        vectors = self.lookup(codes)  # (Q, B, T, D)
        # Running sums over the quantizers. torch.cumsum is not deterministic on GPUs.
        partial_sums = [*itertools.accumulate(vectors)]
        residuals = x - torch.stack(partial_sums)  # (Q, B, T, D)
        squares = residuals.square()
        errors = squares.mean((2, 3))  # (Q, B)

        active = torch.ones_like(errors, dtype=torch.bool)
        if self.training:  # each sample uses only its first n quantizers
            n = torch.randint(1, self.num_quantizers + 1, (len(z),), device=z.device)
            active = active.cumsum(0) <= n  # cumsum counts the quantizers: 1, 2, …, Q

        error_sum = (errors * active).sum(0)
        errors = error_sum / active.sum(0)
        loss = errors.mean() * self.initialized
        active = active[..., None, None]  # (Q, B, 1, 1)
        if self.training and torch.is_grad_enabled():
            inputs = torch.cat([x[None], residuals[:-1]])
            self.gather(inputs.detach(), codes, active)

        straight_through = x - x.detach()  # zeros that carry the gradient of x
        active_vectors = vectors * active
        quantized = active_vectors.sum(0) + straight_through
        quantized = quantized.to(z.dtype)
        quantized = torch.where(self.initialized, quantized, z)
        return quantized, codes, loss

    def gather(self, inputs, codes, active):
        """Add the active inputs (Q, B, T, D) to the statistics of their codes (B, T, Q)."""
        rows = F.pad(inputs, (1, 0), value=1.0)  # the new column counts vectors
        rows = rows * active
        offsets = self.codebook_size * torch.arange(self.num_quantizers, device=codes.device)
        places = codes + offsets
        places = places.movedim(-1, 0)  # (Q, B, T), rows of the concatenated codebooks
        pending = self.pending.flatten(0, 1)  # a view
        pending.index_add_(0, places.flatten(), rows.flatten(0, 2))
        if self._candidates is None:
            inputs = inputs.flatten(1, 2)  # (Q, N, D)
            # Take evenly spaced frames: no random numbers are needed, and no frame is taken twice.
            count = inputs.shape[1]
            most = min(self.codebook_size, count)
            frames = torch.arange(most) * count // most
            self._candidates = inputs[:, frames]

    def encode(self, z):
        """z (B, T, D) -> codes (B, T, Q) int64."""
        residual = z.detach().float()
        residual = residual.flatten(0, 1)
        codes = []
        for codebook in self.codebook:
            code = nearest_codes(residual, codebook)
            residual = residual - codebook[code]
            codes.append(code)
        codes = torch.stack(codes, -1)
        return codes.unflatten(0, z.shape[:2])

    def lookup(self, codes):
        """The vectors (n, B, T, D) for codes (B, T, n) of the first n quantizers."""
        vectors = []
        for codebook, code in zip(self.codebook, codes.unbind(-1)):
            vectors.append(codebook[code])
        return torch.stack(vectors)

    def decode(self, codes):
        """codes (B, T, n) of the first n quantizers -> the sum of their vectors (B, T, D)."""
        vectors = self.lookup(codes)
        return sum(vectors)

    def initialize(self, z, seed, per_step):
        """Initialize all codebooks by k-means on rank 0's z (N, D), fp32. All ranks get them.

        per_step: number of vectors in a training step. It is the initial weight of the averages:
        with the weight of all N vectors, codes would hardly move at first.
        """
        if dist.is_main():
            residual = z
            generator = torch.Generator().manual_seed(seed)
            for q in range(self.num_quantizers):
                centers, counts = kmeans(residual, self.codebook_size, generator)
                self.codebook[q] = centers
                self.ema_count[q] = counts * (per_step / len(z))
                codes = nearest_codes(residual, centers)
                residual = residual - centers[codes]
        dist.broadcast_tensor(self.codebook)
        dist.broadcast_tensor(self.ema_count)
        counts = self.ema_count[..., None]
        self.ema_sum.copy_(self.codebook * counts)
        self.initialized.fill_(True)
        self.discard()

    def update(self, seed):
        """Update the codebooks with the statistics of all ranks. Call it on all ranks after a step.

        seed: picks the new vectors of dead codes; must depend on the step.
        """
        if dist.world_size() > 1:
            td.all_reduce(self.pending)
        counts = self.pending[..., 0]
        sums = self.pending[..., 1:]
        # (Q, 1). False for quantizers that no sample used, and before initialization.
        used = counts.any(-1, keepdim=True) & self.initialized
        rate = (1 - self.decay) * used
        self.ema_count += rate * (counts - self.ema_count)
        self.ema_sum += rate[..., None] * (sums - self.ema_sum)
        total = self.ema_count.sum(-1, keepdim=True)
        scale = 1 + 1e-5 * self.codebook_size / total
        smoothed = (self.ema_count + 1e-5) / scale
        means = self.ema_sum / smoothed[..., None]
        codebook = torch.where(used[..., None], means, self.codebook)
        self.codebook.copy_(codebook)

        mean_count = self.ema_count.mean(-1, keepdim=True)
        least = self.dead_below * mean_count  # (Q, 1)
        dead = used & (self.ema_count < least)  # (Q, K)
        if dead.any():
            # Replace dead codes with inputs that `gather` took from rank 0's first chunk. Each is
            # used at most once. If there are too few, the remaining codes wait for the next update.
            generator = torch.Generator().manual_seed(seed)
            count = self._candidates.shape[1]
            order = torch.randperm(count, generator=generator).to(dead.device)
            number = dead.cumsum(1) - 1  # numbers the dead codes of a quantizer: 0, 1, 2, …
            dead &= number < count
            number = order[number.clamp(0, count - 1)]  # (Q, K)
            picks = self._candidates.gather(1, number[..., None].expand_as(self.codebook))
            dist.broadcast_tensor(picks)  # (Q, K, D)
            dist.broadcast_tensor(dead)  # other ranks may have fewer candidates
            # Start at the threshold: if no input uses the new code, it is dead again at the next
            # update.
            counts = torch.where(dead, least, self.ema_count)
            self.ema_count.copy_(counts)
            dead = dead[..., None]
            sums = picks * counts[..., None]
            sums = torch.where(dead, sums, self.ema_sum)
            self.ema_sum.copy_(sums)
            codebook = torch.where(dead, picks, self.codebook)
            self.codebook.copy_(codebook)
        self.discard()

    def discard(self):
        """Clear the statistics gathered since the last update."""
        self.pending.zero_()
        self._candidates = None
