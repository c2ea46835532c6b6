"""Gaussian diffusion as pure functions of tensors: noise schedules, prediction targets, loss weights, samplers.

Throughout x_t = α_t·x₀ + σ_t·ε with timesteps t = 0 … T-1 from little to much noise (DDPM, Ho et al. 2020, Eq. 4).
The named schedules preserve the variance, α_t² + σ_t² = 1, with ᾱ_t = α_t²; rectified flow has α_t = 1 - σ_t.
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.special import log_ndtr

from common import accumulate, amp, config, data, dist
from common.config import Count, Natural, NonNegative, Positive, Share, UserError


@dataclass(frozen=True)
class Training(config.Training):
    """What the training of every diffusion model can be told; a script names the defaults that differ for it."""
    # Run and data
    lora_rank: Natural = 0  # train low-rank adapters of the attention on the frozen --init_from; 0: all weights
    # Model
    raw_embeddings: bool = False  # embeddings as a CLIP gives them (Karlo); off: of unit length
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more time
    # Diffusion
    objective: Literal["x0", "v", "epsilon", "flow"] = "v"  # what the network predicts; flow has levels of its own
    noise_schedule: Literal["cosine", "linear"] = "cosine"  # levels of noise
    timesteps: Count = 1000  # levels of noise
    timestep_density: Literal["uniform", "logit_normal", "mode"] = "uniform"  # timesteps in training (SD3 §3.1)
    density_mean: float = 0.0  # of logit_normal; above 0 for more noise
    density_std: Positive = 1.0  # of logit_normal
    loss_weight: Literal["none", "min_snr", "sigma_sqrt", "cosmap"] = "none"  # the last two: flow
    loss_gamma: Positive = 5.0  # of min_snr (Hang et al. 2023)
    dream: bool = False  # train on the inputs its own error leads to (DREAM, Zhou et al. 2023); objective epsilon
    text_drop: Share = 0.1  # probability of training a sample without its text, for guidance
    # Evaluation and saving; both happen at the first log line at or after they are due
    guidance_scale: NonNegative = 1.0  # of the samples in evaluation, 1 for none
    eta: Share = 0.0  # noise of sampling: 1 as DDPM, 0 for DDIM

    def __post_init__(self):
        super().__post_init__()
        config.refuse_unused(self, (
            ("noise_schedule", self.objective != "flow", "an objective other than flow, which has its own levels"),
            ("loss_gamma", self.loss_weight == "min_snr", "--loss_weight min_snr"),
            ("dream", self.objective == "epsilon", "--objective epsilon"),
            *((name, self.timestep_density == "logit_normal", "--timestep_density logit_normal")
              for name in ("density_mean", "density_std")),
            ("loss_weight", self.loss_weight not in ("sigma_sqrt", "cosmap") or self.objective == "flow",
             "--objective flow"),
            ("lora_rank", self.init_from, "a trained model, whose file is named with --init_from")))


@dataclass(frozen=True)
class Inference(config.Settings):
    """What every command that uses a trained diffusion model can be told."""
    # The model
    model: str = "model.pt"  # file of the run: model.pt (last), best.pt (lowest validation loss), checkpoints/step_N.pt
    weights: Literal["ema", "online"] = "ema"  # of a checkpoint: averaged, or as the optimizer left them
    lora_scale: float = 1.0  # how much LoRA adapters count, of a run that trained some: 0 not at all
    seed: int = 0  # of the noise
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute


def check_sampling(cfg, guidance_scale, steps=1):
    """UserError for more steps than timesteps, and for guidance, or no condition (a scale of 0), without drops."""
    if not 1 <= steps <= cfg.timesteps:
        raise UserError(f"{steps} sampling steps: expected 1 to {cfg.timesteps}, the --timesteps of {cfg.run_dir}")
    for name in ("image_drop", "text_drop"):
        if guidance_scale != 1 and getattr(cfg, name, 1) == 0:
            raise UserError(f"{cfg.run_dir} is trained with --{name} 0, so it needs a text or image, and a guidance "
                            "scale of 1")


def betas(name, timesteps):
    """The variances β_t (T,) of the named noise schedule, in float64."""
    if name == "cosine":  # Nichol & Dhariwal 2021, Eq. 17, with their s = 0.008 and β <= 0.999
        time = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
        f = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - f[1:] / f[:-1]).clamp(max=0.999)
    assert name == "linear", name  # Ho et al. 2020, §4, whose ends are for T = 1000
    low = 1000 / timesteps * 1e-4
    high = 1000 / timesteps * 0.02
    u = torch.linspace(0, 1, timesteps, dtype=torch.float64)
    return (low + (high - low) * u).clamp(max=0.999)


def levels(name, timesteps):
    """(α, σ), each (T,) float32, of the named schedule, or "flow": σ = 1/T, 2/T, …, 1 and α = 1 - σ."""
    if name == "flow":  # Liu et al. 2022, with σ as their time, counted from the data (Esser et al. 2024, Eq. 13)
        sigma = torch.arange(1, timesteps + 1, dtype=torch.float64) / timesteps
        return (1 - sigma).float(), sigma.float()
    alphas_bar = torch.cumprod(1 - betas(name, timesteps), 0)
    return alphas_bar.sqrt().float(), (1 - alphas_bar).sqrt().float()


def draw_timesteps(density, shape, timesteps, device, mean=0.0, std=1.0):
    """int64 timesteps of `shape`: "uniform", or by a density of SD3 (Esser et al. 2024, §3.1) on (0, 1), times T.

    "logit_normal" (Eq. 19): the sigmoid of a normal of that mean and std. "mode" (Eq. 20, s = 1.29): mostly the middle.
    """
    if density == "uniform":
        return torch.randint(timesteps, shape, device=device)
    if density == "logit_normal":
        time = torch.sigmoid(mean + std * torch.randn(shape, device=device))
    else:
        assert density == "mode", density
        u = torch.rand(shape, device=device)
        time = 1 - u - 1.29 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    return (time * timesteps).long().clamp(0, timesteps - 1)


def at(table, timestep, like):
    """Entries of `table` (T,) at `timestep` (…), shaped to broadcast against `like` (…, *)."""
    values = table[timestep]
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def target(objective, x0, noise, alpha, sigma):
    """What the network learns to predict; v: Salimans & Ho 2022, App. D, flow: Liu et al. 2022, Eq. 1."""
    return {"x0": x0, "epsilon": noise, "v": alpha * noise - sigma * x0, "flow": noise - x0}[objective]


def to_x0(objective, prediction, x_t, alpha, sigma):
    """The x₀ that a network's `prediction` at x_t stands for."""
    if objective == "epsilon":
        return (x_t - sigma * prediction) / alpha
    return {"x0": prediction, "v": alpha * x_t - sigma * prediction, "flow": x_t - sigma * prediction}[objective]


def dream(x_t, noise, predicted, sigma):
    """DREAM (Zhou et al. 2023, Alg. 1, p = 1): the x_t that the network's own error leads to, and its target epsilon.

    `predicted` is the network's epsilon at the given x_t, without gradients. λ = σ of its error is added to the noise
    of both, so that training meets the inputs that sampling will.
    """
    error = sigma * (noise - predicted)
    return x_t + sigma * error, noise + error


def snr(alpha, sigma):
    """Signal-to-noise ratio α²/σ², at least 1e-20, so that pure noise (α = 0) can be divided by it."""
    return ((alpha / sigma) ** 2).clamp(min=1e-20)


def loss_weight(kind, objective, alpha, sigma, gamma):
    """Weight of a squared error of the `objective`, at each level (α, σ).

    "min_snr": min(SNR, γ) on x₀ (Hang et al. 2023, §3.4), as it stands for the objective: an error
    e in x₀ is e·α/σ in epsilon, and e/σ in v (σ² = 1/(SNR + 1)) and in flow.
    Of flow alone: "cosmap" = 2/(π(1 - 2σ + 2σ²)) (Esser et al. 2024, Eq. 21), "sigma_sqrt" = σ^-2,
    at most T².
    """
    if kind == "none":
        return torch.ones_like(sigma)
    if kind == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma ** 2))
    if kind == "sigma_sqrt":
        return sigma ** -2
    assert kind == "min_snr", kind
    ratio = snr(alpha, sigma)
    weight = ratio.clamp(max=gamma)  # on x0
    return weight / {"x0": 1, "epsilon": ratio, "v": ratio + 1, "flow": sigma ** -2}[objective]


def guide(conditional, unconditional, scale):
    """Classifier-free guidance (Ho & Salimans 2022, Eq. 6, with scale = 1 + w): 1 is the conditional model itself."""
    return unconditional + scale * (conditional - unconditional)


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
    """`steps` evenly spaced timesteps from T-1 down to 0, as in Karlo (T-1 alone for one step)."""
    assert 1 <= steps <= timesteps, (steps, timesteps)
    if steps == 1:
        return [timesteps - 1]
    stride = (timesteps - 1) / (steps - 1)
    return [round(i * stride) for i in reversed(range(steps))]


@torch.no_grad()
def sample(denoise, x, alpha, sigma, steps, eta=1.0, draw=torch.randn_like, known=None, mask=None, resample=1):
    """Integrate from noise x at level T-1 to x₀ in `steps` steps, by `denoise(x_t, t (B,)) -> x₀`.

    eta = 0 is DDIM (for flow: Euler's method), eta = 1 is ancestral sampling: the posterior of the respaced chain
    (DDIM, Song et al. 2021, Eq. 12 and 16). `denoise` is given the level that x_t is at. The last step ends at x₀
    itself. alpha, sigma: (T,). `draw(x)` gives the fresh noise. If `denoise` returns (x₀, f), the variance of that is
    exp(f·log β + (1-f)·log β̃) of the respaced chain, times eta² (Nichol & Dhariwal 2021, Eq. 15 and §4).

    Inpainting (RePaint, Lugmayr et al. 2022, Alg. 1): `known` holds x₀ where `mask` (broadcast) is 1 or true, and the
    result is exactly that there. Every step is taken `resample` times, noised again in between, so that what is filled
    in fits what is known: 1 is fast and fits badly, 5 to 10 is usual.
    """
    schedule, alphas, sigmas = respaced(len(alpha), steps), alpha.cpu().double().tolist(), sigma.cpu().double().tolist()
    mask, resample = (None, 1) if known is None else (mask.bool(), resample)  # nothing known: nothing to fit in
    for t, before in zip(schedule, [*schedule[1:], None]):
        for repeat in range(resample):
            answer = denoise(x, torch.full((len(x),), t, device=x.device))
            x0, fraction = answer if isinstance(answer, tuple) else (answer, None)
            if before is None:
                return x0 if known is None else torch.where(mask, known, x0)
            a, s, a_next, s_next = alphas[t], sigmas[t], alphas[before], sigmas[before]
            beta = max(0.0, s ** 2 - (a / a_next * s_next) ** 2)  # the variance of x_t given the next x
            fresh = eta * (s_next / s) * math.sqrt(beta)  # Eq. 16
            noise = (x - a * x0) / s
            x = a_next * x0 + math.sqrt(max(0.0, s_next ** 2 - fresh ** 2)) * noise
            if fraction is not None:  # β̃ = (σ'/σ)²·β
                fresh = eta * math.sqrt(beta) * (s_next / s) ** (1 - fraction)
            if eta:
                x = x + fresh * draw(x)
            if known is not None:
                x = torch.where(mask, a_next * known + s_next * draw(x), x)
            if repeat < resample - 1:
                x = a / a_next * x + math.sqrt(beta) * draw(x)


@torch.no_grad()
def mean_loss(model, loss_of, source, rows, cfg, device):
    """Mean of `loss_of(batch)` over the first eval_samples of `rows`, on all ranks, with the same noise every time.

    `model` is in eval mode meanwhile, and afterwards in the mode that it was in.
    """
    mode, loss_sum, count = model.training, 0.0, 0
    model.eval()
    for number, batch in data.batches(source, rows, cfg.eval_samples, cfg.chunk_size):
        accumulate.seed(cfg.seed, "loss", number)
        with amp.autocast(device, cfg.precision):
            loss_sum += loss_of(data.to_device(batch, device)).item() * len(batch["rows"])
        count += len(batch["rows"])
    model.train(mode)
    loss_sum, count = dist.total([loss_sum, count])
    return loss_sum / count


def noise_source(seeds, device):
    """A `draw(x) -> noise like x` in which sample k has a stream of its own, seeded by `seeds[k]`.

    So a sample is the same in any batch and on any number of ranks. Drawn on the CPU, to be the same on any device.
    """
    generators = [torch.Generator().manual_seed(s) for s in seeds]

    def draw(x):
        return torch.stack([torch.randn(x.shape[1:], generator=g) for g in generators]).to(device, x.dtype)
    return draw
