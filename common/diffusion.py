"""Gaussian diffusion as pure functions of tensors: noise schedules, prediction targets, loss weights, a sampler.

Throughout x_t = α_t·x₀ + σ_t·ε with α_t² + σ_t² = 1, timesteps t = 0 … T-1 from little to much noise, ᾱ_t = α_t²
(DDPM, Ho et al. 2020, Eq. 4).
"""
import math

import torch

SCHEDULES = ("cosine", "linear", "quadratic", "sigmoid", "jsd")


def betas(name, timesteps):
    """The variances β_t (T,) of the named noise schedule, in float64."""
    u = torch.linspace(0, 1, timesteps, dtype=torch.float64)
    scale = 1000 / timesteps  # the constants below were given for T = 1000
    low, high = scale * 1e-4, scale * 0.02
    if name == "cosine":  # Nichol & Dhariwal 2021, Eq. 17, with their s = 0.008 and β <= 0.999
        f = torch.cos((torch.arange(timesteps + 1, dtype=torch.float64) / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - f[1:] / f[:-1]).clamp(max=0.999)
    if name == "linear":  # Ho et al. 2020, §4
        return (low + (high - low) * u).clamp(max=0.999)
    if name == "quadratic":
        return ((low ** 0.5 + (high ** 0.5 - low ** 0.5) * u) ** 2).clamp(max=0.999)
    if name == "sigmoid":
        return (low + (high - low) * torch.sigmoid(-6 + 12 * u)).clamp(max=0.999)
    if name == "jsd":  # Sohl-Dickstein et al. 2015, §2.4.1: 1/T, 1/(T-1), …, 1
        return (1 / torch.linspace(timesteps, 1, timesteps, dtype=torch.float64)).clamp(max=0.999)
    raise ValueError(f"noise schedule {name!r} is none of {', '.join(SCHEDULES)}")


def levels(name, timesteps):
    """(α, σ), each (T,) float32, of the named schedule."""
    alphas_bar = torch.cumprod(1 - betas(name, timesteps), 0)
    return alphas_bar.sqrt().float(), (1 - alphas_bar).sqrt().float()


def at(table, timestep, like):
    """Entries of `table` (T,) at `timestep` (…), shaped to broadcast against `like` (…, *)."""
    values = table[timestep]
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def add_noise(x0, noise, alpha, sigma):
    """x_t (DDPM Eq. 4); alpha and sigma broadcast against x0."""
    return alpha * x0 + sigma * noise


def target(objective, x0, noise, alpha, sigma):
    """What the network learns to say: "x0", "epsilon", or "v" = α·ε - σ·x₀ (Salimans & Ho 2022, App. D)."""
    if objective == "x0":
        return x0
    return noise if objective == "epsilon" else alpha * noise - sigma * x0


def to_x0(objective, prediction, x_t, alpha, sigma):
    """The x₀ that a network's `prediction` at x_t stands for."""
    if objective == "x0":
        return prediction
    return (x_t - sigma * prediction) / alpha if objective == "epsilon" else alpha * x_t - sigma * prediction


def snr(alpha, sigma):
    """Signal-to-noise ratio α²/σ²."""
    return (alpha / sigma) ** 2


def min_snr_weight(objective, alpha, sigma, gamma):
    """Loss weight min(SNR, γ), as it stands for each target (Hang et al. 2023, §3.4); γ = 0: no weighting.

    x0: min(SNR, γ); epsilon: that / SNR; v: that / (SNR + 1).
    """
    ratio = snr(alpha, sigma)
    if not gamma:
        return torch.ones_like(ratio)
    clipped = ratio.clamp(max=gamma)
    return clipped if objective == "x0" else clipped / (ratio if objective == "epsilon" else ratio + 1)


def distance(kind, prediction, target):
    """Elementwise "l2", "l1" or "huber" (δ = 1) loss, in fp32."""
    function = {"l2": torch.nn.functional.mse_loss, "l1": torch.nn.functional.l1_loss,
                "huber": torch.nn.functional.smooth_l1_loss}[kind]
    return function(prediction.float(), target.float(), reduction="none")


def guide(conditional, unconditional, scale):
    """Classifier-free guidance (Ho & Salimans 2022, Eq. 6, with scale = 1 + w): 1 is the conditional model itself."""
    return unconditional + scale * (conditional - unconditional)


def respaced(timesteps, steps):
    """`steps` evenly spaced timesteps, from T-1 down to 0 (T-1 alone when steps is 1)."""
    assert 1 <= steps <= timesteps, (steps, timesteps)
    return [timesteps - 1 - round(i * (timesteps - 1) / max(1, steps - 1)) for i in range(steps)]


@torch.no_grad()
def sample(denoise, x, alpha, sigma, steps, eta=1.0, draw=torch.randn_like):
    """Integrate from noise x at level T-1 to x₀ in `steps` evaluations of `denoise(x_t, t (B,), x0_before) -> x₀`.

    eta = 0 is DDIM, eta = 1 is ancestral sampling: DDPM's posterior of the respaced chain (DDIM, Song et al. 2021,
    Eq. 12 and 16). `denoise` is told the level that x_t is at, and its own last answer (zeros at first). The last
    step ends at x₀ itself. alpha, sigma: (T,). `draw(x)` gives the fresh noise. No wait for the device in between.
    """
    schedule = respaced(len(alpha), steps)
    alphas, sigmas = alpha.cpu().double().tolist(), sigma.cpu().double().tolist()
    x0 = torch.zeros_like(x)
    for t, before in zip(schedule, [*schedule[1:], None]):
        x0 = denoise(x, torch.full((len(x),), t, device=x.device), x0)
        if before is None:
            return x0
        a, s, a_next, s_next = alphas[t], sigmas[t], alphas[before], sigmas[before]
        fresh = eta * (s_next / s) * math.sqrt(max(0.0, 1 - (a / a_next) ** 2))  # Eq. 16
        noise = (x - a * x0) / s
        x = a_next * x0 + math.sqrt(max(0.0, s_next ** 2 - fresh ** 2)) * noise
        if fresh:
            x = x + fresh * draw(x)


def noise_source(seeds, device):
    """A `draw(x) -> noise like x` in which sample k has a stream of its own, seeded by `seeds[k]`.

    So a sample is the same in any batch and on any number of ranks. Drawn on the CPU, to be the same on any device.
    """
    generators = [torch.Generator().manual_seed(s) for s in seeds]

    def draw(x):
        return torch.stack([torch.randn(x.shape[1:], generator=g) for g in generators]).to(device, x.dtype)
    return draw
