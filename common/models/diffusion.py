"""Gaussian diffusion: noise schedules, prediction targets, loss weights, samplers.

Throughout x_t = α_t·x₀ + σ_t·ε with timesteps t = 0 … T-1 from little to much noise (DDPM, Ho et
al. 2020, Eq. 4). The named schedules preserve the variance, α_t² + σ_t² = 1, with ᾱ_t = α_t²;
rectified flow has α_t = 1 - σ_t.
"""

import math

import torch
import torch.nn.functional as F
from torch.special import log_ndtr

from common.config import UserError


def check_settings(cfg):
    """UserError for settings of a diffusion model that have no effect together."""
    if cfg.objective == "flow" and cfg.noise_schedule != type(cfg).noise_schedule:
        raise UserError("--noise_schedule: --objective flow has its own noise levels")
    if cfg.objective != "flow" and cfg.loss_weight in ("sigma_sqrt", "cosmap"):
        raise UserError(f"--loss_weight {cfg.loss_weight}: it needs --objective flow")


def noise_betas(name, timesteps):
    """The variances β_t (T,) of the named noise schedule, in float64."""
    if name == "cosine":  # Nichol & Dhariwal 2021, Eq. 17, with their s = 0.008 and β <= 0.999
        time = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
        f = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = 1 - f[1:] / f[:-1]
    elif name == "linear":  # Ho et al. 2020, §4, whose ends are for T = 1000
        beta = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
    else:
        raise ValueError(name)
    return beta.clamp(max=0.999)


def alphas_sigmas(name, timesteps):
    """(α, σ), each (T,) float32, of the named schedule; "flow": σ = 1/T, 2/T, …, 1; α = 1 - σ."""
    if name == "flow":
        # Liu et al. 2022. Their time is σ, counted from the data (Esser et al. 2024, Eq. 13).
        sigma = torch.arange(1, timesteps + 1, dtype=torch.float64) / timesteps
        alpha = 1 - sigma
    else:
        beta = noise_betas(name, timesteps)
        alphas_bar = torch.cumprod(1 - beta, 0)
        alpha = alphas_bar.sqrt()
        sigma = (1 - alphas_bar).sqrt()
    return alpha.float(), sigma.float()


def add_levels(model, cfg):
    """Give a `model` the levels of noise of its config: buffers `alpha` and `sigma`, each (T,).

    They follow from the config, so they are not saved.
    """
    name = "flow" if cfg.objective == "flow" else cfg.noise_schedule
    alpha, sigma = alphas_sigmas(name, cfg.timesteps)
    model.register_buffer("alpha", alpha, persistent=False)
    model.register_buffer("sigma", sigma, persistent=False)


def sample_timesteps(density, shape, timesteps, device):
    """int64 timesteps of `shape`, of a density of SD3 (Esser et al. 2024, §3.1) on (0, 1), times T.

    "uniform". "logit_normal" (Eq. 19): the sigmoid of a standard normal. "mode" (Eq. 20 with
    s = 1.29): mostly the middle.
    """
    if density == "uniform":
        return torch.randint(timesteps, shape, device=device)
    if density == "logit_normal":
        time = torch.randn(shape, device=device).sigmoid()
    elif density == "mode":
        u = torch.rand(shape, device=device)
        time = 1 - u - 1.29 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    else:
        raise ValueError(density)
    return (time * timesteps).long().clamp(0, timesteps - 1)


def extract(table, timestep, like):
    """Entries of `table` (T,) at `timestep` (…), shaped to broadcast against `like` (…, *)."""
    values = table[timestep]
    ones = (1,) * (like.ndim - values.ndim)
    return values.reshape(values.shape + ones)


def levels(model, timestep, like):
    """(α_t, σ_t) at `timestep` of a `model` with `add_levels`, shaped as by `extract`."""
    return extract(model.alpha, timestep, like), extract(model.sigma, timestep, like)


def target(objective, x0, noise, alpha, sigma):
    """What the network learns to predict from x_t."""
    if objective == "x0":
        return x0
    if objective == "epsilon":
        return noise
    if objective == "v":  # Salimans & Ho 2022, App. D
        return alpha * noise - sigma * x0
    if objective == "flow":  # Liu et al. 2022, Eq. 1
        return noise - x0
    raise ValueError(objective)


def predict_x0(objective, prediction, x_t, alpha, sigma):
    """The x₀ that follows from a network's `prediction` at x_t."""
    if objective == "x0":
        return prediction
    if objective == "epsilon":
        return (x_t - sigma * prediction) / alpha
    if objective == "v":
        return alpha * x_t - sigma * prediction
    if objective == "flow":
        return x_t - sigma * prediction
    raise ValueError(objective)


def dream(noise, predicted, sigma):
    """The noise ε + λ(ε - ε̂) of DREAM (Zhou et al. 2023, Alg. 1), with λ = σ (p = 1).

    predicted: ε̂, the network's at the x_t of `noise`, without gradients. x_t and target are made
    anew from this noise, so that training meets the inputs that sampling will.
    """
    return noise + sigma * (noise - predicted)


def snr(alpha, sigma):
    """Signal-to-noise ratio α²/σ², at least 1e-20, so that one can divide by it at α = 0."""
    ratio = (alpha / sigma) ** 2
    return ratio.clamp(min=1e-20)


def loss_weight(kind, objective, alpha, sigma):
    """Weight of a squared error of the `objective`, at each level (α, σ).

    "min_snr": min(SNR, 5) on x₀ (Hang et al. 2023, §3.4), converted to the objective: an error e in
    x₀ is e·α/σ in epsilon, and e/σ in v (σ² = 1/(SNR + 1)) and in flow.
    Of flow alone: "cosmap" = 2/(π(1 - 2σ + 2σ²)) (Esser et al. 2024, Eq. 21), "sigma_sqrt" = σ^-2,
    at most T².
    """
    if kind == "none":
        return torch.ones_like(sigma)
    if kind == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    if kind == "sigma_sqrt":
        return sigma**-2
    if kind != "min_snr":
        raise ValueError(kind)
    ratio = snr(alpha, sigma)
    weight = ratio.clamp(max=5.0)  # on x0
    x0_per_error = {"x0": 1, "epsilon": ratio, "v": ratio + 1, "flow": sigma**-2}  # squared
    return weight / x0_per_error[objective]


def classifier_free_guidance(conditional, unconditional, scale):
    """Ho & Salimans 2022, Eq. 6, with scale = 1 + w: 1 is the conditional prediction itself."""
    return unconditional + scale * (conditional - unconditional)


def variational_bound(x0, timestep, predicted_x0, interpolation, alpha, sigma):
    """The term L_t, in bits a dimension (B,), of the bound on the likelihood of 8-bit images.

    x0 (B, …) in [-1, 1]. The model's reverse steps have the mean of the posterior at `predicted_x0`
    (B, …), without gradients, and the variance exp(f·log β + (1-f)·log β̃) with f = `interpolation`
    (B, …) (Nichol & Dhariwal 2021, Eq. 15 and §3.1); f = (v + 1) / 2 of raw network outputs v.
    timestep: (B,); alpha, sigma: (T,). The bound is T times the mean over t, plus a constant.
    """
    # Tables of q(x_t | x_{t-1}) and of the true posterior q(x_{t-1} | x_t, x₀), DDPM Eq. 6 and 7.
    # σ_t² - (α_t/α_{t-1})²·σ_{t-1}² loses less to rounding than β_t = 1 - (α_t/α_{t-1})².
    alpha_prev = F.pad(alpha[:-1], (1, 0), value=1.0)
    sigma_prev = F.pad(sigma[:-1], (1, 0))
    beta = sigma**2 - (alpha / alpha_prev * sigma_prev) ** 2
    beta = beta.clamp(min=1e-20)
    posterior_variance = beta * (sigma_prev / sigma) ** 2  # β̃_t
    posterior_variance[0] = posterior_variance[1]  # as 0 has no logarithm
    x0_coefficient = alpha_prev * beta / sigma**2

    log_beta = extract(beta.log(), timestep, x0)
    log_posterior = extract(posterior_variance.log(), timestep, x0)
    log_variance = interpolation * log_beta + (1 - interpolation) * log_posterior
    error = x0 - predicted_x0.detach()
    error = extract(x0_coefficient, timestep, x0) * error  # of the mean

    # t > 0: KL(N(0, β̃) || N(error, exp(log_variance))).
    kl = log_variance - log_posterior - 1
    kl = kl + (log_posterior - log_variance).exp()
    kl = 0.5 * (kl + error**2 * (-log_variance).exp())

    # t = 0: -log of the mass of the pixel's bin (Ho et al. 2020, Eq. 13), a difference of two lower
    # tails, in logarithms. The outermost bins go on to infinity.
    half_bin = 1 / 255
    inverse_std = (-0.5 * log_variance).exp()
    is_outermost = x0.abs() > 0.999
    distance = torch.where(is_outermost, error * x0.sign(), error.abs())
    upper = log_ndtr((half_bin - distance) * inverse_std)
    lower = log_ndtr((-half_bin - distance) * inverse_std)
    mass_ratio = (lower - upper).clamp(max=-1e-6).exp()  # < 1 however large the variance
    likelihood = upper + torch.log1p(-mass_ratio.masked_fill(is_outermost, 0))

    kl = kl.flatten(1).mean(1)
    decoder_nll = -likelihood.flatten(1).mean(1)
    nats = torch.where(timestep == 0, decoder_nll, kl)
    return nats / math.log(2)


def sampling_timesteps(timesteps, steps):
    """`steps` evenly spaced timesteps from T-1 down to 0, as in Karlo (T-1 alone for one step)."""
    if steps == 1:
        return [timesteps - 1]
    stride = (timesteps - 1) / (steps - 1)
    return [round(i * stride) for i in reversed(range(steps))]


@torch.no_grad()
def sample(
    denoise,
    x,
    alpha,
    sigma,
    steps,
    eta=1.0,
    noise_fn=torch.randn_like,
    kept=None,
    resample=5,
):
    """Integrate from noise x at level T-1 to x₀ in `steps` steps.

    `denoise(x_t, t (B,))` returns (x₀, f): the prediction, and f of a learned variance, or 0.
    eta = 0 is DDIM (for flow: Euler's method), eta = 1 is ancestral sampling: the posterior of the
    respaced chain (DDIM, Song et al. 2021, Eq. 12 and 16). `denoise` is given the level that x_t is
    at. The last step ends at x₀ itself. alpha, sigma: (T,). `noise_fn(x)` draws noise like x. With
    f, the variance is exp(f·log β + (1-f)·log β̃) of the respaced chain, times eta² (Nichol &
    Dhariwal 2021, Eq. 15 and §4).

    Inpainting (RePaint, Lugmayr et al. 2022, Alg. 1, with a jump length of 1): `kept` is images of
    x₀ and a bool mask (broadcast). Where it is true, the result is exactly these; the rest is
    filled in. Every step but the last is taken `resample` times, noised again in between, so that
    what is filled in fits what is kept: 1 is fast and fits badly, 5 to 10 is usual.
    """
    timesteps = sampling_timesteps(len(alpha), steps)
    alphas = alpha.tolist()
    sigmas = sigma.tolist()
    if kept:
        known, mask = kept
    else:
        resample = 1  # nothing to fit

    for t, t_prev in zip(timesteps, [*timesteps[1:], None]):
        for repeat in range(resample):
            timestep = torch.full((len(x),), t, device=x.device)
            x0, interpolation = denoise(x, timestep)
            if t_prev is None:
                return torch.where(mask, known, x0) if kept else x0

            # The respaced chain: x_t = ratio·x_prev + √β·noise, with β̃ = (σ_prev/σ_t)²·β.
            alpha_t = alphas[t]
            sigma_t = sigmas[t]
            alpha_prev = alphas[t_prev]
            sigma_prev = sigmas[t_prev]
            ratio = alpha_t / alpha_prev
            root_beta = math.sqrt(max(0.0, sigma_t**2 - (ratio * sigma_prev) ** 2))  # √β
            sigma_ratio = sigma_prev / sigma_t

            # Eq. 12 and 16: x_prev = α_prev·x₀ + √(σ_prev² - η²β̃)·ε + η·√β̃·noise.
            noise = (x - alpha_t * x0) / sigma_t
            variance = (eta * sigma_ratio * root_beta) ** 2
            remaining = max(0.0, sigma_prev**2 - variance)
            x = alpha_prev * x0 + math.sqrt(remaining) * noise
            if eta:
                noise_std = eta * sigma_ratio ** (1 - interpolation) * root_beta
                x = x + noise_std * noise_fn(x)

            if kept:
                noised = alpha_prev * known + sigma_prev * noise_fn(x)
                x = torch.where(mask, noised, x)
            if repeat < resample - 1:
                x = ratio * x + root_beta * noise_fn(x)


def noise_generator(seeds, device, draws=1):
    """A `noise_fn(x) -> noise like x`, with a stream for each sample k, seeded by `seeds[k]`.

    With fewer seeds, each is of as many neighbors in the batch. So a sample is the same in any
    batch and on any number of ranks. It is drawn where it is used: a copy from the host would wait
    for the device at every step. Another kind of device draws others. draws: how many of one shape
    are wanted; 64 at most are drawn at once, as a GPU waits for the host at each launch.
    """
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    ahead = []

    def noise_fn(x):
        if not ahead:
            shape = (min(draws, 64), len(x) // len(seeds), *x.shape[1:])
            noise = [torch.randn(shape, generator=g, device=device) for g in generators]
            ahead.extend(torch.cat(noise, dim=1))
        return ahead.pop(0).to(x.dtype)

    return noise_fn
