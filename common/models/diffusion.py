"""Gaussian diffusion: noise schedules, prediction targets, loss weights, samplers.

Throughout, x_t = α_t·x₀ + σ_t·ε, where noise grows with the timestep t = 0 … T-1 (DDPM, Ho et al.
2020, Eq. 4). "cosine" and "linear" preserve the variance: α_t² + σ_t² = 1, with ᾱ_t = α_t².
Rectified flow has α_t = 1 - σ_t.
"""

import math

import torch
import torch.nn.functional as F
from torch.special import log_ndtr

from common.config import UserError


def check_settings(cfg):
    """UserError for diffusion settings that do not fit together."""
    if cfg.objective == "flow" and cfg.noise_schedule != type(cfg).noise_schedule:
        raise UserError("--noise_schedule: --objective flow has its own noise levels")
    if cfg.objective != "flow" and cfg.loss_weight in ("sigma_sqrt", "cosmap"):
        raise UserError(f"--loss_weight {cfg.loss_weight} needs --objective flow")


def noise_betas(name, timesteps):
    """Variances β_t (T,) of the named noise schedule, in float64."""
    if name == "cosine":  # Nichol & Dhariwal 2021, Eq. 17, with s = 0.008 and β <= 0.999
        time = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
        f = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = 1 - f[1:] / f[:-1]
    elif name == "linear":  # Ho et al. 2020, §4; the end points are for T = 1000
        beta = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
    else:
        raise ValueError(name)
    return beta.clamp(max=0.999)


def alphas_sigmas(name, timesteps):
    """(α, σ), each (T,) float32, of the named schedule; "flow": σ = 1/T, 2/T, …, 1; α = 1 - σ."""
    if name == "flow":
        # Liu et al. 2022. Time is σ, which is 0 at the data (Esser et al. 2024, Eq. 13).
        sigma = torch.arange(1, timesteps + 1, dtype=torch.float64) / timesteps
        alpha = 1 - sigma
    else:
        alphas_bar = (1 - noise_betas(name, timesteps)).cumprod(0)
        alpha = alphas_bar.sqrt()
        sigma = (1 - alphas_bar).sqrt()
    return alpha.float(), sigma.float()


def add_noise_schedule(model, cfg):
    """Register the noise schedule of `cfg` as buffers `alpha` and `sigma` of `model`, each (T,).

    They follow from the config, so they are not saved.
    """
    name = "flow" if cfg.objective == "flow" else cfg.noise_schedule
    alpha, sigma = alphas_sigmas(name, cfg.timesteps)
    model.register_buffer("alpha", alpha, persistent=False)
    model.register_buffer("sigma", sigma, persistent=False)


def sample_timesteps(density, shape, timesteps, device):
    """Random timesteps, int64 of shape `shape`, from a density of SD3 (Esser et al. 2024, §3.1).

    "uniform"; "logit_normal" (Eq. 19), the sigmoid of a standard normal; "mode" (Eq. 20 with
    s = 1.29), which favors the middle. Times in [0, 1] are scaled to T = `timesteps`.
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
    """Entries of `table` (T,) at `timestep` (…), shaped to broadcast with `like` (…, *)."""
    ones = (1,) * (like.ndim - timestep.ndim)
    return table[timestep].reshape(timestep.shape + ones)


def alpha_sigma(model, timestep, like):
    """(α_t, σ_t) of a model's noise schedule at `timestep` (…), shaped by `extract`."""
    return extract(model.alpha, timestep, like), extract(model.sigma, timestep, like)


def target(objective, x0, noise, alpha, sigma):
    """The training target: what the network predicts from x_t."""
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
    """Convert the network's `prediction` at x_t to an estimate of x₀."""
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

    predicted: ε̂, the network's estimate of `noise` from x_t, without gradients. The caller
    recomputes x_t and the target with the returned noise, which brings training closer to sampling.
    """
    return noise + sigma * (noise - predicted)


def loss_weight(kind, objective, alpha, sigma):
    """Loss weight at each noise level (α, σ), for the squared error of the `objective`.

    "min_snr": min(SNR, 5) for the squared error of x₀ (Hang et al. 2023, §3.4). For other
    objectives, another factor converts the squared error of the prediction to that of x₀.
    Only for flow: "cosmap" = 2/(π(1 - 2σ + 2σ²)) (Esser et al. 2024, Eq. 21), "sigma_sqrt" = σ^-2,
    which is at most T².
    """
    if kind == "none":
        return torch.ones_like(sigma)
    if kind == "cosmap":
        return 2 / (math.pi * (alpha**2 + sigma**2))
    if kind == "sigma_sqrt":
        return sigma**-2
    if kind != "min_snr":
        raise ValueError(kind)
    alpha = alpha.clamp(min=1e-10)  # flow's α is 0 at pure noise
    weight = ((alpha / sigma) ** 2).clamp(max=5.0)  # for the x0 objective
    x0_per_error = predict_x0(objective, 1, 0, alpha, sigma)
    return weight * x0_per_error**2


def classifier_free_guidance(conditional, unconditional, scale):
    """Guided prediction (Ho & Salimans 2022, Eq. 6). scale: 1 + w; 1 is no guidance."""
    return unconditional + scale * (conditional - unconditional)


def variational_bound(x0, timestep, predicted_x0, interpolation, alpha, sigma):
    """The term L_t of the variational bound for 8-bit images, in bits per dimension (B,).

    x0: (B, …), in [-1, 1]. predicted_x0: (B, …); gives the mean of the model's reverse step, and
    gets no gradients. interpolation: (B, …), the f in the reverse step's variance
    exp(f·log β + (1-f)·log β̃) (Nichol & Dhariwal 2021, Eq. 15 and §3.1). For a network output v,
    it is (v + 1) / 2. timestep: (B,). alpha, sigma: (T,).

    The bound is T times the mean of L_t over t, plus a constant.
    """
    # Tables for q(x_t | x_{t-1}) and the true posterior q(x_{t-1} | x_t, x₀), DDPM Eq. 6 and 7.
    # β_t = 1 - (α_t/α_{t-1})² would lose more precision than σ_t² - (α_t/α_{t-1})²·σ_{t-1}².
    alpha_prev = F.pad(alpha[:-1], (1, 0), value=1.0)
    sigma_prev = F.pad(sigma[:-1], (1, 0))
    beta = (sigma**2 - (alpha / alpha_prev * sigma_prev) ** 2).clamp(min=1e-20)
    posterior_variance = beta * (sigma_prev / sigma) ** 2  # β̃_t
    posterior_variance[0] = posterior_variance[1]  # it is 0, which has no logarithm
    x0_coefficient = alpha_prev * beta / sigma**2

    log_beta = extract(beta.log(), timestep, x0)
    log_posterior = extract(posterior_variance.log(), timestep, x0)
    log_variance = log_posterior.lerp(log_beta, interpolation)
    inverse_std = (-0.5 * log_variance).exp()
    # The error of the model's mean of x_{t-1}.
    error = extract(x0_coefficient, timestep, x0) * (x0 - predicted_x0.detach())

    # t > 0: KL(N(0, β̃) || N(error, exp(log_variance))).
    log_ratio = log_posterior - log_variance
    kl = 0.5 * (log_ratio.exp() - log_ratio - 1 + (error * inverse_std) ** 2)

    # t = 0: the negative log-probability of the pixel's bin (Ho et al. 2020, Eq. 13). The
    # probability is a difference of two normal CDFs. The outermost bins extend to infinity.
    half_bin = 1 / 255
    is_outermost = x0.abs() > 0.999
    distance = torch.where(is_outermost, error * x0.sign(), error.abs())
    upper = log_ndtr((half_bin - distance) * inverse_std)
    lower = log_ndtr((-half_bin - distance) * inverse_std)
    mass_ratio = (lower - upper).clamp(max=-1e-6).exp()  # < 1, so that log1p is finite
    likelihood = upper + torch.log1p(-mass_ratio.masked_fill(is_outermost, 0))

    kl, decoder_nll = torch.stack([kl, -likelihood]).flatten(2).mean(2)  # (B,) each
    nats = torch.where(timestep == 0, decoder_nll, kl)
    return nats / math.log(2)


def sampling_timesteps(timesteps, steps, to_zero):
    """`steps` evenly spaced timesteps from T-1 down to 0, as in Karlo (only T-1 for one step).

    to_zero: stop at T/steps - 1 instead, so that the last step, to x₀, is as long as the others
    ("trailing" in Lin et al. 2023, Table 2). At t = 0, x_t is almost x₀ already.
    """
    last = timesteps / steps - 1 if to_zero or steps == 1 else 0
    stride = (timesteps - 1 - last) / max(1, steps - 1)
    return [round(last + i * stride) for i in reversed(range(steps))]


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
    """Integrate from noise x at timestep T-1 to x₀ in `steps` steps.

    denoise(x_t, t (B,)): returns (estimate of x₀, f), where f is 0 without a learned variance.
    alpha, sigma: (T,). noise_fn(x): returns noise like x. The last step returns the estimate of x₀.

    eta = 0 adds no noise: DPM-Solver++(2M), a second-order solver (Lu et al. 2022, arXiv
    2211.01095, Alg. 2). eta = 1 is ancestral sampling: the posterior of the respaced chain (DDIM,
    Song et al. 2021, Eq. 12 and 16). The variance of the added noise is eta² times
    exp(f·log β + (1-f)·log β̃) of the respaced chain (Nichol & Dhariwal 2021, Eq. 15 and §4).

    Inpainting (RePaint, Lugmayr et al. 2022, Alg. 1, with a jump length of 1): `kept` is (x₀, bool
    mask); both are broadcast. Where the mask is true, the result is exactly this x₀; the rest is
    filled in. Every step but the last is taken `resample` times, with noise added again in between,
    so that the filled part fits the kept one: 1 is fast but fits badly, 5 to 10 is usual. Steps are
    first-order here, because x_t changes between them: eta = 0 is DDIM.
    """
    log_snr = (alpha / sigma).log()  # λ of DPM-Solver: half of the log-SNR
    table = torch.stack([alpha, sigma, log_snr], 1).tolist()
    # With noise, step to t = 0 as published DDPM samplers do, except for flow, which has no such
    # sampler. Without noise, do not: this step is long in λ, and 2M would extrapolate too far.
    timesteps = sampling_timesteps(len(alpha), steps, not eta or alpha[-1] == 0)
    before = None  # (x₀, h) of the previous step
    if kept:
        known, mask = kept
    else:
        resample = 1  # repeated steps are only for inpainting

    for t, t_prev in zip(timesteps, [*timesteps[1:], None]):
        for more in reversed(range(resample)):
            timestep = torch.full((len(x),), t, device=x.device)
            x0, interpolation = denoise(x, timestep)
            if t_prev is None:
                if kept:
                    x0 = torch.where(mask, known, x0)
                return x0

            alpha_t, sigma_t, lambda_t = table[t]
            alpha_prev, sigma_prev, lambda_prev = table[t_prev]
            h = lambda_prev - lambda_t

            # 2M: a DDIM step with x₀ extrapolated, linearly in λ, to the middle of the step. Plain
            # DDIM in the first step, and in flow's second step, because its first has h = ∞.
            latest = x0, h
            if before and not eta and not kept:
                x0_before, h_before = before
                x0 = x0 + (x0 - x0_before) * h / h_before / 2
            before = latest

            # The respaced chain: x_t = α_t/α_prev·x_prev + √β·noise, with e^(-2h) = 1 - β/σ_t².
            root = math.sqrt(-math.expm1(-2 * h))  # equals both √β/σ_t and √β̃/σ_prev

            # Eq. 12 and 16: x_prev = α_prev·x₀ + √(σ_prev² - η²β̃)·ε + η·√β̃·noise.
            noise_std = eta * sigma_prev * root
            epsilon = (x - alpha_t * x0) / sigma_t
            x = alpha_prev * x0 + math.sqrt(sigma_prev**2 - noise_std**2) * epsilon
            if eta:
                x = x + noise_std * (sigma_t / sigma_prev) ** interpolation * noise_fn(x)

            if kept:
                noised = alpha_prev * known + sigma_prev * noise_fn(x)
                x = torch.where(mask, noised, x)
            if more:
                x = alpha_t / alpha_prev * x + sigma_t * root * noise_fn(x)


def noise_generator(seeds, device, draws=1):
    """A `noise_fn(x) -> noise like x`, with one random stream per sample k, seeded by `seeds[k]`.

    A sample is therefore the same in any batch and on any number of ranks. With fewer seeds than
    samples, neighbors share a stream. Noise is drawn on the device, because copies from the host
    would synchronize at every step. CPUs and GPUs draw different numbers. draws: expected number of
    calls. Noise for up to 64 calls is drawn at once, to save kernel launches.
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
