"""Gaussian diffusion as pure functions of tensors: noise schedules, prediction targets, loss weights, samplers.

Throughout x_t = α_t·x₀ + σ_t·ε with timesteps t = 0 … T-1 from little to much noise (DDPM, Ho et al. 2020, Eq. 4).
The named schedules preserve the variance, α_t² + σ_t² = 1, with ᾱ_t = α_t²; rectified flow has α_t = 1 - σ_t.
"""
import math

import torch
from torch.special import log_ndtr

from common import config
from common.config import UserError

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
    """(α, σ), each (T,) float32, of the named schedule, or "flow": σ = 1/T, 2/T, …, 1 and α = 1 - σ."""
    if name == "flow":  # Liu et al. 2022, with σ as their time, counted from the data (Esser et al. 2024, Eq. 13)
        sigma = torch.arange(1, timesteps + 1, dtype=torch.float64) / timesteps
        return (1 - sigma).float(), sigma.float()
    alphas_bar = torch.cumprod(1 - betas(name, timesteps), 0)
    return alphas_bar.sqrt().float(), (1 - alphas_bar).sqrt().float()


def tables(objective, noise_schedule, timesteps):
    """(α, σ), each (T,) float32, that an objective is trained on: "flow" has its own, all others the schedule's."""
    return levels("flow" if objective == "flow" else noise_schedule, timesteps)


def draw_timesteps(density, shape, timesteps, device, mean=0.0, std=1.0, mode_scale=1.29):
    """int64 timesteps of `shape`: "uniform", or by a density of SD3 (Esser et al. 2024, §3.1) on (0, 1), times T.

    "logit_normal" (Eq. 19): the sigmoid of a normal of that mean and std. "mode" (Eq. 20): more in the middle for
    mode_scale > 0, at the ends for < 0; it must lie in [-1, 2/(π-2)].
    """
    if density == "uniform":
        return torch.randint(timesteps, shape, device=device)
    if density == "logit_normal":
        time = torch.sigmoid(mean + std * torch.randn(shape, device=device))
    else:
        assert density == "mode", density
        u = torch.rand(shape, device=device)
        time = 1 - u - mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    return (time * timesteps).long().clamp(0, timesteps - 1)


def at(table, timestep, like):
    """Entries of `table` (T,) at `timestep` (…), shaped to broadcast against `like` (…, *)."""
    values = table[timestep]
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def add_noise(x0, noise, alpha, sigma):
    """x_t (DDPM Eq. 4); alpha and sigma broadcast against x0."""
    return alpha * x0 + sigma * noise


def target(objective, x0, noise, alpha, sigma):
    """What the network learns to say.

    "x0", "epsilon", "v" = α·ε - σ·x₀ (Salimans & Ho 2022, App. D), or "flow" = ε - x₀ (Liu et al. 2022, Eq. 1).
    """
    if objective == "x0":
        return x0
    if objective == "flow":
        return noise - x0
    return noise if objective == "epsilon" else alpha * noise - sigma * x0


def to_x0(objective, prediction, x_t, alpha, sigma):
    """The x₀ that a network's `prediction` at x_t stands for."""
    if objective == "x0":
        return prediction
    if objective == "flow":
        return x_t - sigma * prediction
    return (x_t - sigma * prediction) / alpha if objective == "epsilon" else alpha * x_t - sigma * prediction


def dream(x_t, noise, predicted, sigma, power):
    """DREAM (Zhou et al. 2023, Alg. 1): the x_t that the network's own error leads to, and its target in epsilon.

    `predicted` is the network's epsilon at the given x_t, without gradients. λ = σ^power of its error is added to the
    noise of both, so that training meets the inputs that sampling will.
    """
    error = sigma ** power * (noise - predicted)
    return x_t + sigma * error, noise + error


def snr(alpha, sigma):
    """Signal-to-noise ratio α²/σ², at least 1e-20, so that pure noise (α = 0) can be divided by it."""
    return ((alpha / sigma) ** 2).clamp(min=1e-20)


def of_target(objective, weight, alpha, sigma):
    """The weight of a squared error in x₀ as the weight of the same error where the network makes it.

    An error e in x₀ is e·α/σ in epsilon, and e/σ in v and in flow; for v, σ² = 1/(SNR + 1).
    """
    ratio = snr(alpha, sigma)
    return weight / {"x0": 1, "epsilon": ratio, "v": ratio + 1, "flow": sigma ** -2}[objective]


def min_snr_weight(objective, alpha, sigma, gamma):
    """Loss weight min(SNR, γ), as it stands for each target (Hang et al. 2023, §3.4); γ = 0: no weighting.

    x0: min(SNR, γ); epsilon: that / SNR; v: that / (SNR + 1); flow: that · σ².
    """
    ratio = snr(alpha, sigma)
    return of_target(objective, ratio.clamp(max=gamma), alpha, sigma) if gamma else torch.ones_like(ratio)


def p2_weight(objective, alpha, sigma, gamma, k=1.0):
    """Loss weight (k + SNR)^-γ on epsilon (Choi et al. 2022, Eq. 8), as it stands for each target; γ = 0: none.

    epsilon: w = (k + SNR)^-γ; x0: w · SNR; v: w · SNR / (SNR + 1); flow: w · α².
    """
    ratio = snr(alpha, sigma)
    return of_target(objective, ratio * (k + ratio) ** -gamma, alpha, sigma) if gamma else torch.ones_like(ratio)


def flow_weight(kind, sigma):
    """Loss weight on flow: "none", "cosmap" = 2/(π(1 - 2σ + 2σ²)) (Esser et al. 2024, Eq. 21), or "sigma_sqrt" = σ^-2.

    The last is common in public training of SD3; σ is never below 1/T, so it is at most T².
    """
    if kind == "none":
        return torch.ones_like(sigma)
    if kind == "sigma_sqrt":
        return sigma ** -2
    assert kind == "cosmap", kind
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma ** 2))


def loss_weight(cfg, alpha, sigma):
    """The weight that a script's settings ask for; at most one of the three is not 1."""
    return (min_snr_weight(cfg.objective, alpha, sigma, cfg.min_snr_gamma)
            * p2_weight(cfg.objective, alpha, sigma, cfg.p2_gamma, cfg.p2_k) * flow_weight(cfg.flow_weight, sigma))


def distance(kind, prediction, target):
    """Elementwise "l2", "l1" or "huber" (δ = 1) loss, in fp32."""
    function = {"l2": torch.nn.functional.mse_loss, "l1": torch.nn.functional.l1_loss,
                "huber": torch.nn.functional.smooth_l1_loss}[kind]
    return function(prediction.float(), target.float(), reduction="none")


def guide(conditional, unconditional, scale):
    """Classifier-free guidance (Ho & Salimans 2022, Eq. 6, with scale = 1 + w): 1 is the conditional model itself."""
    return unconditional + scale * (conditional - unconditional)


def threshold(x0, quantile):
    """Dynamic thresholding (Imagen, Saharia et al. 2022, §2.3): clip to ±s and divide by s.

    s is that quantile of a sample's magnitudes |x₀|, at least 1. By sorting: torch.quantile has a limit on sizes.
    """
    ordered = x0.flatten(1).abs().sort(dim=1).values
    place = quantile * (ordered.shape[1] - 1)
    low, high = ordered[:, math.floor(place)], ordered[:, math.ceil(place)]
    s = torch.lerp(low, high, place % 1).clamp(min=1).reshape(-1, *(1,) * (x0.ndim - 1))
    return x0.clamp(-s, s) / s


def variational_bound(x0, timestep, predicted_x0, fraction, alpha, sigma):
    """The term L_t, in bits a dimension (B,), of the bound on the likelihood of 8-bit x0 (B, …) in [-1, 1].

    For a model whose reverse steps have the mean of the posterior at `predicted_x0` (B, …), without gradients, and
    the variance exp(f·log β + (1-f)·log β̃), f = `fraction` (B, …) (Nichol & Dhariwal 2021, Eq. 15 and §3.1). With raw
    network outputs v, f = (v + 1) / 2. timestep: (B,); alpha, sigma: (T,). t > 0: KL from the true posterior; t = 0:
    the discretized decoder (Ho et al. 2020, §3.3). The whole bound is T times the mean over t, plus a constant.
    """
    # The tables of β and β̃; σ² - (α/α')²·σ'² loses less to rounding than 1 - (α/α')². β̃₀ = 0 is replaced by β̃₁.
    alpha_before, sigma_before = torch.cat([torch.ones_like(alpha[:1]), alpha[:-1]]), sigma.roll(1)
    sigma_before[0] = 0
    beta = (sigma ** 2 - (alpha / alpha_before * sigma_before) ** 2).clamp(min=1e-20)
    posterior = beta * (sigma_before / sigma) ** 2
    posterior[0] = posterior[1]
    pull = alpha_before * beta / sigma ** 2  # how much of x0 is in the posterior's mean (DDPM Eq. 7); 1 at t = 0
    x0, predicted_x0, fraction = x0.float(), predicted_x0.detach().float(), fraction.float()
    log_beta, log_posterior, pull = (at(table, timestep, x0) for table in (beta.log(), posterior.log(), pull))
    log_variance = fraction * log_beta + (1 - fraction) * log_posterior
    gap = pull * (x0 - predicted_x0)
    kl = 0.5 * (log_variance - log_posterior - 1 + (log_posterior - log_variance).exp()
                + gap ** 2 * (-log_variance).exp())
    # The mass of the pixel's bin, as a difference of two lower tails, in logs; the outermost bins go on to infinity.
    half, scale = 1 / 255, (-0.5 * log_variance).exp()
    upper, lower = log_ndtr((half - gap.abs()) * scale), log_ndtr((-half - gap.abs()) * scale)
    outermost = log_ndtr((half - gap * x0.sign()) * scale)
    inside = upper + torch.log1p(-(lower - upper).clamp(max=-1e-6).exp())  # finite however large the variance
    likelihood = torch.where(x0.abs() > 0.999, outermost, inside)
    first = (timestep == 0).reshape(-1, *(1,) * (x0.ndim - 1))
    return torch.where(first, -likelihood, kl).flatten(1).mean(1) / math.log(2)


def respaced(timesteps, steps):
    """`steps` evenly spaced timesteps, from T-1 down to 0 (T-1 alone when steps is 1)."""
    assert 1 <= steps <= timesteps, (steps, timesteps)
    return [timesteps - 1 - round(i * (timesteps - 1) / max(1, steps - 1)) for i in range(steps)]


def added_variance(alpha, sigma, alpha_less, sigma_less):
    """Variance β of x at level (α, σ) given x at a less noisy level: σ² - (α/α')²·σ'²."""
    ratio = (alpha / alpha_less) ** 2
    if max(abs(alpha ** 2 + sigma ** 2 - 1), abs(alpha_less ** 2 + sigma_less ** 2 - 1)) < 1e-6:
        return max(0.0, 1 - ratio)  # the same, as DDPM and DDIM have it
    return max(0.0, sigma ** 2 - ratio * sigma_less ** 2)


@torch.no_grad()
def sample(denoise, x, alpha, sigma, steps, eta=1.0, draw=torch.randn_like, known=None, mask=None, resample=1):
    """Integrate from noise x at level T-1 to x₀ in `steps` steps, by `denoise(x_t, t (B,), x0_before) -> x₀`.

    eta = 0 is DDIM (for flow: Euler's method), eta = 1 is ancestral sampling: the posterior of the respaced chain
    (DDIM, Song et al. 2021, Eq. 12 and 16). `denoise` is told the level that x_t is at, and its own last answer (zeros
    at first). The last step ends at x₀ itself. alpha, sigma: (T,). `draw(x)` gives the fresh noise. No wait for the
    device in between. Where `denoise` gives (x₀, fraction), the fresh noise has the variance
    exp(f·log β + (1-f)·log β̃) of the respaced chain, times eta² (Nichol & Dhariwal 2021, Eq. 15 and §4).

    Inpainting (RePaint, Lugmayr et al. 2022, Alg. 1): `known` holds x₀ where `mask` (broadcast) is 1 or true, and the
    result is exactly that there. Every step is taken `resample` times, noised again in between, so that what is filled
    in fits what is known: 1 is fast and fits badly, 5 to 10 is usual.
    """
    schedule = respaced(len(alpha), steps)
    alphas, sigmas = alpha.cpu().double().tolist(), sigma.cpu().double().tolist()
    x0, mask = torch.zeros_like(x), None if known is None else mask.bool()
    resample = 1 if known is None else resample  # else there is nothing to fit in
    for t, before in zip(schedule, [*schedule[1:], None]):
        for repeat in range(resample if before is not None else 1):
            answer = denoise(x, torch.full((len(x),), t, device=x.device), x0)
            x0, fraction = answer if isinstance(answer, tuple) else (answer, None)
            if before is None:
                return x0 if known is None else torch.where(mask, known, x0)
            a, s, a_next, s_next = alphas[t], sigmas[t], alphas[before], sigmas[before]
            beta = added_variance(a, s, a_next, s_next)
            fresh = eta * (s_next / s) * math.sqrt(beta)  # Eq. 16
            noise = (x - a * x0) / s
            x = a_next * x0 + math.sqrt(max(0.0, s_next ** 2 - fresh ** 2)) * noise
            if fraction is not None:  # β̃ = (σ'/σ)²·β
                fresh = eta * math.sqrt(beta) * (s_next / s) ** (1 - fraction)
            if eta:
                x = x + fresh * draw(x)
            if known is not None:
                x = torch.where(mask, add_noise(known, draw(x), a_next, s_next), x)
            if repeat < resample - 1:
                x = a / a_next * x + math.sqrt(beta) * draw(x)


@torch.no_grad()
def invert(denoise, x0, alpha, sigma, steps):
    """The noise at level T-1 from which `sample` with eta = 0 comes back to x0, up to the error of `steps` steps.

    DDIM's equation integrated backwards, from data to noise, along the same levels (Song et al. 2021, §4.3; DALL-E 2,
    Ramesh et al. 2022, §3). `denoise` as for `sample`.
    """
    schedule = respaced(len(alpha), steps)[::-1]
    alphas, sigmas = alpha.cpu().double().tolist(), sigma.cpu().double().tolist()
    x, t, estimate = alphas[schedule[0]] * x0, schedule[0], torch.zeros_like(x0)  # x0 is at no level: start beside it
    for i, after in enumerate(schedule):  # the first of them corrects x at the least noisy level, given x0 itself
        answer = denoise(x, torch.full((len(x),), t, device=x.device), estimate)
        estimate = answer[0] if isinstance(answer, tuple) else answer
        noise = (x - alphas[t] * estimate) / sigmas[t]
        x, t = alphas[after] * (estimate if i else x0) + sigmas[after] * noise, after
    return x


def noise_source(seeds, device):
    """A `draw(x) -> noise like x` in which sample k has a stream of its own, seeded by `seeds[k]`.

    So a sample is the same in any batch and on any number of ranks. Drawn on the CPU, to be the same on any device.
    """
    generators = [torch.Generator().manual_seed(s) for s in seeds]

    def draw(x):
        return torch.stack([torch.randn(x.shape[1:], generator=g) for g in generators]).to(device, x.dtype)
    return draw


def check(cfg):
    """UserError if a script's settings of diffusion contradict each other, or one would have no effect."""
    config.refuse_unused(cfg, (
        ("noise_schedule", cfg.objective != "flow", "an objective other than flow, which has its own levels"),
        ("flow_weight", cfg.objective == "flow", "--objective flow"),
        ("dream", cfg.objective == "epsilon", "--objective epsilon"),
        ("dream_power", cfg.dream, "--dream true"),
        ("p2_k", cfg.p2_gamma, "--p2_gamma above 0"),
        ("density_mean", cfg.timestep_density == "logit_normal", "--timestep_density logit_normal"),
        ("density_std", cfg.timestep_density == "logit_normal", "--timestep_density logit_normal"),
        ("mode_scale", cfg.timestep_density == "mode", "--timestep_density mode")))
    if not -1 <= cfg.mode_scale <= 2 / (math.pi - 2):
        raise UserError(f"--mode_scale: {cfg.mode_scale} is not within -1 and {2 / (math.pi - 2):.4f}")
    if bool(cfg.min_snr_gamma) + bool(cfg.p2_gamma) + (cfg.flow_weight != "none") > 1:
        raise UserError("--min_snr_gamma, --p2_gamma and --flow_weight: each is a loss weight; give one of them")
