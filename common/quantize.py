"""Residual vector quantization (SoundStream, Zeghidour et al. 2021, Section III-C, Algorithm 1)."""
import torch
import torch.distributed as td

from common import dist


def nearest(x, codebook):
    """Codes of the nearest vectors: x (N, D), codebook (K, D) -> (N,) int64, in fp32 also under autocast or TF32."""
    half_squares = codebook.square().sum(-1) / 2  # |x - c|² / 2 is |c|² / 2 - x·c and what is the same for all codes
    slab = 2 ** 24 // len(codebook)  # vectors at a time: all distances of a long sound would take gigabytes
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # rounded factors would give wrong codes where two are close
    try:
        with torch.autocast(x.device.type, enabled=False):
            return torch.cat([torch.addmm(half_squares, v, codebook.T, alpha=-1).argmin(-1) for v in x.split(slab)])
    finally:
        torch.set_float32_matmul_precision(precision)


@torch.no_grad()
def kmeans(x, size, generator, rounds=10):
    """k-means of x (N, D) -> centers (K, D) and counts (K,), how many vectors each center is the mean of.

    Starts by k-means++ (Arthur & Vassilvitskii 2007, Section 2.2), then `rounds` >= 1 of Lloyd's algorithm.
    """
    draws = 1 - torch.rand(size, generator=generator, dtype=torch.float64)  # on the CPU, so that all devices draw alike
    centers, distances = x.new_empty(size, x.shape[1]), x.new_full((len(x),), 1e30)  # equal: the first is any vector
    for k in range(size):  # drawn in proportion to the squared distance to the nearest center so far
        cumulative = distances.cpu().double().cumsum(0)  # draws are in (0, 1]: none is past its end or at a distance 0
        centers[k] = x[torch.searchsorted(cumulative, draws[k] * cumulative[-1])]
        distances = torch.minimum(distances, (x - centers[k]).square().sum(-1))
    for _ in range(rounds):
        codes = nearest(x, centers)
        counts = x.new_zeros(size).index_add_(0, codes, x.new_ones(len(x)))
        sums = torch.zeros_like(centers).index_add_(0, codes, x)
        centers = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centers)
    return centers, counts


class ResidualQuantizer(torch.nn.Module):
    """Q quantizers in a row; codebooks are moving averages (van den Oord et al. 2017, App. A.1), Laplace-smoothed.

    In a training step `forward` gathers statistics of each chunk, in training mode with gradients enabled, and in
    no other pass. Then all ranks call `update`, or `discard` if the step overflowed.
    width: D. decay: of the averages, a step. dead_below: a code of fewer frames a step on average is replaced; 0: none.
    dropout: probability that a sample uses in training only its first n quantizers, n uniform in 1..Q (Section III-C).
    """

    def __init__(self, width, quantizers=8, codebook_size=1024, decay=0.95, dead_below=2.0, dropout=0.0):
        super().__init__()
        self.quantizers, self.codebook_size = quantizers, codebook_size
        self.decay, self.dead_below, self.dropout = decay, dead_below, dropout
        self.register_buffer("initialized", torch.tensor(False))  # a tensor: checkpoints and EMA copies carry it along
        self.register_buffer("codebook", torch.zeros(quantizers, codebook_size, width))
        for name, persistent in ("ema", True), ("pending", False):
            self.register_buffer(f"{name}_count", torch.zeros(quantizers, codebook_size), persistent)
            self.register_buffer(f"{name}_sum", torch.zeros(quantizers, codebook_size, width), persistent)
        self._candidates = None  # (Q, K, D): inputs of the quantizers in the first chunk since the last update

    @property
    def ready(self):
        """Whether there are codebooks. On a GPU this waits for the device, so do not ask in every step."""
        return bool(self.initialized)

    @torch.compiler.disable  # it changes buffers and the precision of matrix products, which a compiled graph cannot
    def forward(self, z):
        """z (B, T, D) -> (quantized (B, T, D), codes (B, T, Q), loss). Not `ready`: z, zeros and 0.

        The gradient goes straight through. loss: commitment, the mean squared difference of each quantizer's input and
        its code's vector (held constant), averaged over a sample's used quantizers, then over samples.
        """
        x, codes = z.float(), self.encode(z)
        uses = torch.ones(self.quantizers, len(z), dtype=torch.bool, device=z.device)  # (Q, B)
        if self.training and self.dropout:
            n = torch.randint(1, self.quantizers + 1, (len(z),), device=z.device)
            uses = (uses.cumsum(0) <= n) | (torch.rand(len(z), device=z.device) >= self.dropout)
        vectors = torch.stack([codebook[code] for codebook, code in zip(self.codebook, codes.unbind(-1))])
        residuals = x - vectors.cumsum(0)  # (Q, B, T, D), what each quantizer leaves
        loss = ((residuals.square().mean((2, 3)) * uses).sum(0) / uses.sum(0)).mean() * self.initialized
        if self.training and torch.is_grad_enabled():
            inputs = torch.cat([x[None], residuals[:-1]]).detach().flatten(1, 2)  # (Q, N, D), N = B·T
            weights = (uses & self.initialized).float().repeat_interleave(z.shape[1], 1)  # (Q, N)
            for q, code in enumerate(codes.flatten(0, 1).unbind(-1)):
                self.pending_count[q].index_add_(0, code, weights[q])
                self.pending_sum[q].index_add_(0, code, inputs[q] * weights[q, :, None])
            if self._candidates is None:  # evenly spaced, so that nothing is drawn
                self._candidates = inputs[:, torch.arange(self.codebook_size) * inputs.shape[1] // self.codebook_size]
        quantized = (vectors * uses[..., None, None]).sum(0) + (x - x.detach())
        return torch.where(self.initialized, quantized.to(z.dtype), z), codes, loss

    def encode(self, z, count=None):
        """z (B, T, D) -> codes (B, T, count) int64 of the first `count` quantizers, or all."""
        residual, codes = z.detach().float().flatten(0, 1), []
        for codebook in self.codebook[:count]:
            codes.append(nearest(residual, codebook))
            residual = residual - codebook[codes[-1]]
        return torch.stack(codes, -1).unflatten(0, z.shape[:2]) * self.initialized

    def decode(self, codes):
        """codes (B, T, n) of the first n quantizers -> (B, T, D), the sum of their vectors."""
        return sum(codebook[code] for codebook, code in zip(self.codebook, codes.unbind(-1)))

    def initialize(self, z, seed, rounds=10):
        """Fit all codebooks by k-means to rank 0's z (N, D), on all ranks."""
        residual, generator = z.detach().float(), torch.Generator().manual_seed(seed)
        for q in range(self.quantizers if dist.is_main() else 0):
            self.codebook[q], self.ema_count[q] = kmeans(residual, self.codebook_size, generator, rounds)
            residual = residual - self.codebook[q][nearest(residual, self.codebook[q])]
        if td.is_initialized():
            td.broadcast(self.codebook, 0)
            td.broadcast(self.ema_count, 0)
        self.ema_sum.copy_(self.codebook * self.ema_count[..., None])
        self.initialized.fill_(True)
        self.discard()

    def update(self, seed):
        """Move the codebooks by what all ranks gathered, on all ranks once a step. `seed`: a function of the step."""
        if td.is_initialized():
            td.all_reduce(self.pending_count)
            td.all_reduce(self.pending_sum)
        rate = (1 - self.decay) * self.pending_count.any(-1, keepdim=True)  # (Q, 1), 0 where no sample used it
        self.ema_count += rate * (self.pending_count - self.ema_count)
        self.ema_sum += rate[..., None] * (self.pending_sum - self.ema_sum)
        smoothed = (self.ema_count + 1e-5) / (1 + 1e-5 * self.codebook_size / self.ema_count.sum(-1, keepdim=True))
        self.codebook.copy_(torch.where(rate[..., None] > 0, self.ema_sum / smoothed[..., None], self.codebook))
        dead = (rate > 0) & (self.ema_count < self.dead_below)  # (Q, K)
        if dead.any():  # they become random vectors, as in vector-quantize-pytorch, but of rank 0's first chunk
            order = torch.randperm(self.codebook_size, generator=torch.Generator().manual_seed(seed))
            picks = self._candidates[:, order].contiguous()  # (Q, K, D)
            if td.is_initialized():
                td.broadcast(picks, 0)
            self.codebook[dead] = picks[dead]
            self.ema_sum[dead] = picks[dead] * self.dead_below
            self.ema_count[dead] = self.dead_below  # so that it is not dead at once again
        self.discard()

    def discard(self):
        """Forget what `forward` gathered since the last update."""
        self.pending_count.zero_()
        self.pending_sum.zero_()
        self._candidates = None
