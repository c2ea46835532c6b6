"""Diffusion math, compared with slow references and published closed forms."""
import dataclasses
import itertools
import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from common.config import UserError
from common.models import diffusion

T = 200
OBJECTIVES = ["x0", "v", "epsilon", "flow"]
objectives = pytest.mark.parametrize("objective", OBJECTIVES)


# Noise levels

def test_the_linear_betas_are_the_published_ones():
    betas = diffusion.noise_betas("linear", 1001)[::500]
    assert betas.tolist() == pytest.approx([1e-4, (1e-4 + 0.02) / 2, 0.02], rel=1e-9)


def test_cosine_levels_follow_the_closed_form():
    alpha, sigma = diffusion.alphas_sigmas("cosine", T)
    assert_close(alpha ** 2 + sigma ** 2, torch.ones(T))
    time = torch.arange(T) / T
    f = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    assert_close(alpha[:180] ** 2, f[1:181] / f[0], rtol=1e-4, atol=0)
    assert diffusion.noise_betas("cosine", 2).max() == 0.999  # α is never 0


def test_flow_levels_run_to_pure_noise():
    alpha, sigma = diffusion.alphas_sigmas("flow", 4)
    assert sigma.tolist() == [0.25, 0.5, 0.75, 1]
    assert alpha.tolist() == [0.75, 0.5, 0.25, 0]


# Training

def levels_of(objective):
    return diffusion.alphas_sigmas("flow" if objective == "flow" else "cosine", T)


def prediction_of(objective, x0, x_t, alpha, sigma):
    """What a network must predict at x_t to obtain x0."""
    return {
        "x0": x0,
        "epsilon": (x_t - alpha * x0) / sigma,
        "v": (alpha * x_t - x0) / sigma,
        "flow": (x_t - x0) / sigma,
    }[objective]


@objectives
def test_the_true_x0_follows_from_the_true_target(objective):
    alpha, sigma = levels_of(objective)
    x0, noise = torch.randn(2, 64, 3, 5)
    t = torch.randint(T - 20, (64, 3))
    a = diffusion.extract(alpha, t, x0)
    s = diffusion.extract(sigma, t, x0)
    x_t = a * x0 + s * noise
    target = diffusion.target(objective, x0, noise, a, s)
    expected = prediction_of(objective, x0, x_t, a, s)
    assert_close(target, expected, rtol=1e-3, atol=1e-3)
    found = diffusion.predict_x0(objective, target, x_t, a, s)
    assert_close(found, x0, rtol=1e-3, atol=1e-3)
    assert x0._version == noise._version == 0  # the caller's tensors are not written to


@objectives
def test_min_snr_weighs_every_objective_alike(objective):
    """Weight times loss equals min(SNR, γ) times the squared error of x0."""
    alpha, sigma = levels_of(objective)
    a = alpha.double()[:T - 5]
    s = sigma.double()[:T - 5]
    x0, noise, error = torch.randn(3, len(a), dtype=torch.float64)
    x_t = a * x0 + s * noise
    prediction = prediction_of(objective, x0 + error, x_t, a, s)
    target = diffusion.target(objective, x0, noise, a, s)
    loss = (prediction - target) ** 2
    weight = diffusion.loss_weight("min_snr", objective, a, s)
    expected = ((a / s) ** 2).clamp(max=5) * error ** 2
    assert_close(weight * loss, expected, rtol=1e-5, atol=1e-9)


def test_weights_are_finite_at_pure_noise_and_those_of_flow_follow_their_formulas():
    alpha, sigma = diffusion.alphas_sigmas("flow", 1000)  # α ends at 0
    for objective in OBJECTIVES:
        weight = diffusion.loss_weight("min_snr", objective, alpha, sigma)
        assert weight.isfinite().all() and (weight >= 0).all()
    sigma = torch.tensor([0.1, 0.5, 1.0])
    expected = {
        "none": [1, 1, 1],
        "sigma_sqrt": [100, 4, 1],
        "cosmap": [2 / 0.82 / math.pi, 4 / math.pi, 2 / math.pi],
    }
    for kind, values in expected.items():
        weight = diffusion.loss_weight(kind, "flow", 1 - sigma, sigma)
        assert weight.tolist() == pytest.approx(values)


@pytest.mark.parametrize("density", ["uniform", "logit_normal", "mode"])
def test_timesteps_have_the_published_density(density):
    drawn = diffusion.sample_timesteps(density, (400, 500), 20, "cpu")
    # Times at evenly spaced quantiles (SD3, Eq. 19 and 20).
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    time = {
        "uniform": u,
        "logit_normal": torch.special.ndtri(u).sigmoid(),
        "mode": 1 - u - 1.29 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u),
    }[density]
    expected = torch.histc(time, 20, 0, 1) / len(time)
    fractions = torch.bincount(drawn.flatten(), minlength=20) / drawn.numel()
    assert (fractions - expected).abs().sum() / 2 < 0.008  # 0.004 is usual for this many draws


def test_dream_moves_input_and_target_along_the_networks_error():
    alpha, sigma = diffusion.alphas_sigmas("cosine", T)
    alpha = alpha[:, None]
    sigma = sigma[:, None]
    x0, noise, predicted = torch.randn(3, T, 3)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.dream(noise, predicted, sigma)
    assert_close(target, noise + (noise - predicted) * sigma)
    # Algorithm 1 moves x_t by the same error, so that it fits x0 and the new noise.
    assert_close(x_t + sigma * sigma * (noise - predicted), alpha * x0 + sigma * target)
    assert torch.equal(diffusion.dream(noise, noise, sigma), noise)  # nothing to correct


@pytest.mark.parametrize(
    "function, arguments",
    [
        (diffusion.noise_betas, ("sigmoid", T)),
        (diffusion.alphas_sigmas, ("sigmoid", T)),
        (diffusion.sample_timesteps, ("cosmap", (2,), T, "cpu")),
        (diffusion.target, ("xO", 0, 0, 1, 1)),
        (diffusion.predict_x0, ("xO", 0, 0, 1, 1)),
        (diffusion.loss_weight, ("p2", "x0", torch.ones(1), torch.ones(1))),
    ],
)
def test_a_choice_that_a_fork_forgot_is_an_error_and_not_another_choice(function, arguments):
    with pytest.raises(ValueError, match=r"sigmoid|cosmap|xO|p2"):
        function(*arguments)


# The bound on the likelihood

def test_variational_bound_is_the_kl_of_the_two_gaussians():
    beta = diffusion.noise_betas("linear", T)
    alphas_bar = torch.cumprod(1 - beta, 0)
    alpha, sigma = diffusion.alphas_sigmas("linear", T)
    t = torch.arange(1, T)
    x0, estimate = torch.rand(2, T - 1, 2, 3) * 2 - 1
    estimate.requires_grad_()
    fraction = torch.rand(T - 1, 2, 3, requires_grad=True)
    x_t = torch.randn(T - 1, 2, 3).double()
    ours = diffusion.variational_bound(x0, t, estimate, fraction, alpha, sigma)

    # DDPM Eq. 7.
    b = beta[1:, None, None]
    bar = alphas_bar[1:, None, None]
    bar_prev = alphas_bar[:-1, None, None]
    variance = b * (1 - bar_prev) / (1 - bar)
    model_variance = (fraction * b.log() + (1 - fraction) * variance.log()).exp()

    def mean(x0):
        from_x_t = (1 - b).sqrt() * (1 - bar_prev) * x_t
        return (bar_prev.sqrt() * b * x0.double() + from_x_t) / (1 - bar)

    posterior = Normal(mean(x0), variance.sqrt())
    model = Normal(mean(estimate), model_variance.sqrt())
    bits = kl_divergence(posterior, model).mean((1, 2)) / math.log(2)
    assert_close(ours.double(), bits, rtol=2e-3, atol=0)
    ours.sum().backward()
    assert estimate.grad is None  # the bound trains only the variance
    assert fraction.grad.isfinite().all() and fraction.grad.any()


@pytest.mark.parametrize("estimate, fraction", [
    (0.3, 0.0),
    (-0.97, 1.0),
    (1.02, 0.5),
])
def test_the_first_term_is_the_likelihood_of_eight_bit_pixels(estimate, fraction):
    pixels = torch.arange(256)[:, None] / 127.5 - 1
    first = torch.zeros(256, dtype=torch.int64)
    estimates = torch.full((256, 1), estimate)
    fractions = torch.full((256, 1), fraction)
    levels = diffusion.alphas_sigmas("linear", T)
    bits = diffusion.variational_bound(pixels, first, estimates, fractions, *levels)
    beta = diffusion.noise_betas("linear", T)
    bar = torch.cumprod(1 - beta, 0)
    stand_in = beta[1] * (1 - bar[0]) / (1 - bar[1])  # used by Nichol & Dhariwal, because β̃₀ is 0
    std = (beta[0] ** fraction * stand_in ** (1 - fraction)).sqrt()
    upper = pixels[:-1, 0].double() + 1 / 255  # the edges between neighboring values
    below = Normal(estimate, std).cdf(upper)
    below = torch.cat([torch.zeros(1), below, torch.ones(1)])
    assert_close(torch.exp2(-bits.double()), below.diff(), rtol=2e-3, atol=1e-7)


# Sampling

def test_sampling_timesteps_run_evenly_from_the_noisiest_level_to_the_first():
    assert diffusion.sampling_timesteps(1000, 1, False) == [999]
    assert diffusion.sampling_timesteps(5, 5, False) == [4, 3, 2, 1, 0]
    assert diffusion.sampling_timesteps(1000, 4, False) == [999, 666, 333, 0]


def test_levels_to_zero_are_even_and_none_is_spent_near_it():
    _, sigma = diffusion.alphas_sigmas("flow", 1000)
    for steps in (1, 2, 5, 8, 1000):
        timesteps = diffusion.sampling_timesteps(1000, steps, True)
        assert_close(sigma[timesteps], torch.linspace(1, 0, steps + 1)[:-1])


def test_a_sample_has_the_same_noise_in_any_batch():
    of_three = diffusion.noise_generator([5, 6, 7], "cpu")
    of_pairs = diffusion.noise_generator([5, 6], "cpu")
    of_one = diffusion.noise_generator([6], "cpu")
    draws = torch.stack([of_three(torch.zeros(3, 16)) for _ in range(3)])
    expected = of_one(torch.zeros(2, 16))  # two samples share this seed
    assert torch.equal(draws[:2, 1], expected)
    assert torch.equal(of_pairs(torch.zeros(4, 16))[2:], expected)
    assert len(torch.cat(list(draws)).unique(dim=0)) == 9
    by_two = diffusion.noise_generator([5, 6, 7], "cpu", draws=2)
    assert torch.equal(draws, torch.stack([by_two(torch.zeros(3, 16)) for _ in range(3)]))


@pytest.mark.parametrize("name", ["flow", "linear", "cosine"])
@pytest.mark.parametrize("steps", [7, T])
def test_ancestral_steps_are_bayes_posterior_from_the_level_of_each_input_to_x0(name, steps):
    """The slow reference multiplies the Gaussians q(x_s | x0) and q(x_t | x_s), in float64."""
    alpha, sigma = diffusion.alphas_sigmas(name, T)
    predictions, noises = torch.randn(2, T, 2, 3)
    unused = iter(noises)
    inputs = {}

    def denoise(x_t, t):
        level, again = t.tolist()
        assert level == again
        inputs[level] = x_t.double()
        return predictions[level], 0.0

    def noise_fn(x):
        return next(unused)

    x = torch.randn(2, 3)
    out = diffusion.sample(denoise, x, alpha, sigma, steps, noise_fn=noise_fn)
    a = alpha.double()
    s = sigma.double()
    timesteps = diffusion.sampling_timesteps(T, steps, name == "flow")
    assert torch.equal(out, predictions[timesteps[-1]])
    assert [*inputs] == timesteps
    for t, t_prev, noise in zip(timesteps, timesteps[1:], noises):
        ratio = a[t] / a[t_prev]
        variance_prev = s[t_prev] ** 2
        beta = s[t] ** 2 - ratio ** 2 * variance_prev
        variance = 1 / (1 / variance_prev + ratio ** 2 / beta)
        mean = a[t_prev] * predictions[t] / variance_prev + ratio * inputs[t] / beta
        expected = variance * mean + variance.sqrt() * noise
        assert_close(inputs[t_prev], expected, rtol=1e-3, atol=1e-3)


def exact_x0(objective, alpha, sigma, std):
    """`denoise` with the optimal network for data from N(0, std²)."""

    def denoise(x_t, t):
        a = alpha[t[0]]
        s = sigma[t[0]]
        mean = a * std**2 / (a**2 * std**2 + s**2) * x_t
        prediction = prediction_of(objective, mean, x_t, a, s)
        return diffusion.predict_x0(objective, prediction, x_t, a, s), 0.0

    return denoise


@objectives
def test_without_noise_half_as_long_steps_have_a_fourth_of_the_error(objective):
    name = "flow" if objective == "flow" else "cosine"
    alpha, sigma = (level.double() for level in diffusion.alphas_sigmas(name, 4096))
    denoise = exact_x0(objective, alpha, sigma, 2.0)
    x_T = torch.ones(1, 1, dtype=torch.float64)
    # Without noise, x_t keeps its quantile, so it is proportional to its standard deviation.
    exact = 2 / (4 * alpha[-1] ** 2 + sigma[-1] ** 2).sqrt()
    errors = []
    for steps in (16, 32, 64, 128, 256):
        found = diffusion.sample(denoise, x_T, alpha, sigma, steps, eta=0.0)
        errors.append((found - exact).abs().item())
    # Doubling the steps divides the error by 4 (in all, by 256), or a bit less, because λ is
    # unbounded at σ = 0. A first-order solver would divide it by 2 (in all, by 16).
    assert min(a / b for a, b in itertools.pairwise(errors)) > 2.9
    assert errors[0] / errors[-1] > 90


@objectives
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20])
def test_without_noise_it_is_the_published_multistep_solver(objective, steps):
    diffusers = pytest.importorskip("diffusers")
    alpha, sigma = levels_of(objective)
    is_flow = objective == "flow"
    kinds = {"x0": "sample", "v": "v_prediction", "flow": "flow_prediction"}
    scheduler = diffusers.DPMSolverMultistepScheduler(
        num_train_timesteps=T,
        prediction_type=kinds.get(objective, objective),
        use_flow_sigmas=is_flow,
    )
    scheduler.set_timesteps(steps)
    timesteps = diffusion.sampling_timesteps(T, steps, True)
    ratio = sigma if is_flow else sigma / alpha
    scheduler.sigmas = torch.cat([ratio[timesteps], torch.zeros(1)])
    scheduler.timesteps = torch.tensor(timesteps)

    def network(x_t, t):
        x0 = torch.sin(3 * x_t + t / T)
        return prediction_of(objective, x0, x_t, alpha[t], sigma[t])

    def denoise(x_t, t):
        t = t[0]
        prediction = network(x_t, t)
        return diffusion.predict_x0(objective, prediction, x_t, alpha[t], sigma[t]), 0.0

    x_T = torch.randn(4, 3)
    expected = x_T
    for t in scheduler.timesteps:
        expected = scheduler.step(network(expected, t), t, expected).prev_sample
    found = diffusion.sample(denoise, x_T, alpha, sigma, steps, eta=0.0)
    assert_close(found, expected, rtol=1e-3, atol=2e-4)
    # A sample does not depend on its batch.
    alone = diffusion.sample(denoise, x_T[2:3], alpha, sigma, steps, eta=0.0)
    assert torch.equal(alone, found[2:3])


@pytest.mark.parametrize("name", ["linear", "flow"])
def test_inpainting_without_noise_takes_steps_of_ddim(name):
    alpha, sigma = diffusion.alphas_sigmas(name, T)
    predictions = torch.randn(T, 2, 3)
    inputs = {}

    def denoise(x_t, t):
        inputs[t[0].item()] = x_t
        return predictions[t[0]], 0.0

    nothing = torch.full((2, 3), 7.0), torch.tensor(False)
    settings = dict(eta=0.0, kept=nothing, resample=1)
    diffusion.sample(denoise, torch.randn(2, 3), alpha, sigma, 6, **settings)
    for t, t_prev in itertools.pairwise(inputs):
        epsilon = (inputs[t] - alpha[t] * predictions[t]) / sigma[t]
        expected = alpha[t_prev] * predictions[t] + sigma[t_prev] * epsilon
        assert_close(inputs[t_prev], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "flow"])
@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_learned_variance_runs_from_the_posteriors_to_betas_times_eta(name, eta, fraction):
    alpha, sigma = diffusion.alphas_sigmas(name, T)
    inputs = []

    def denoise(x_t, t):
        inputs.append(x_t.item())
        return torch.zeros(1, 1), fraction

    noise_fn = torch.ones_like
    x = torch.ones(1, 1)
    diffusion.sample(denoise, x, alpha, sigma, 6, eta, noise_fn)
    t, t_prev, *_ = diffusion.sampling_timesteps(T, 6, name == "flow")
    # The first of six steps, for x_t = 1 and x₀ = 0.
    a = alpha.double().tolist()
    s = sigma.double().tolist()
    ratio = a[t] / a[t_prev]
    beta = s[t] ** 2 - ratio ** 2 * s[t_prev] ** 2
    posterior = beta * (s[t_prev] / s[t]) ** 2
    spread = eta * math.sqrt(beta ** fraction * posterior ** (1 - fraction))
    direction = math.sqrt(s[t_prev] ** 2 - eta ** 2 * posterior)  # for any `fraction`
    assert inputs[1] == pytest.approx(direction / s[t] + spread, rel=1e-4)


# Inpainting

@pytest.mark.parametrize("name", ["cosine", "flow"])
def test_inpainting_keeps_what_is_known_and_resampling_fits_the_rest_to_it(name):
    alpha, sigma = diffusion.alphas_sigmas(name, 200)
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]])  # of two standard normals

    def denoise(x_t, t):
        """E[x0 | x_t]"""
        a = alpha[t[0]]
        s = sigma[t[0]]
        total = a ** 2 * covariance + s ** 2 * torch.eye(2)
        gain = a * covariance @ torch.linalg.inv(total)
        return x_t @ gain.T, 0.0

    known = torch.tensor([[1.5, 77.0]]).expand(4000, 2)  # the 77 is not kept and must not matter
    errors = []
    for resample in (1, 10):
        kept = known, torch.tensor([[True, False]])
        x_T = torch.randn(4000, 2)
        out = diffusion.sample(denoise, x_T, alpha, sigma, 40, kept=kept, resample=resample)
        assert torch.equal(out[:, 0], known[:, 0])
        errors.append((out[:, 1].mean() - 0.9 * 1.5).abs().item())
    assert errors[1] < 0.12 and errors[1] < errors[0] / 3
    assert out[:, 1].std().item() == pytest.approx(0.44, abs=0.12)  # √(1 - 0.9²)


# Settings and guidance

@dataclasses.dataclass
class Settings:
    """The part of a script's Config that the noise schedule needs."""

    objective: str
    noise_schedule: str = "cosine"
    loss_weight: str = "none"
    timesteps: int = 50


WEIGHTS = ["none", "min_snr", "cosmap", "sigma_sqrt"]


def test_settings_that_would_have_no_effect_are_refused_and_no_others():
    accepted = set()
    for names in itertools.product(OBJECTIVES, ["cosine", "linear"], WEIGHTS):
        try:
            diffusion.check_settings(Settings(*names))
        except UserError:
            continue
        accepted.add(names)
    # Flow ignores the noise schedule, and accepts only its default, cosine.
    of_flow = itertools.product(["flow"], ["cosine"], WEIGHTS)
    of_others = itertools.product(OBJECTIVES[:3], ["cosine", "linear"], WEIGHTS[:2])
    assert accepted == {*of_flow, *of_others}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@objectives
def test_a_model_has_the_levels_of_its_config_and_does_not_save_them(objective, schedule):
    model = torch.nn.Module()
    diffusion.add_noise_schedule(model, Settings(objective, schedule))
    assert not model.state_dict()
    alpha, sigma = dict(model.named_buffers()).values()
    name = "flow" if objective == "flow" else schedule
    assert_close((alpha, sigma), diffusion.alphas_sigmas(name, 50))
    like = torch.zeros(2, 3, 4, 5)
    t = torch.tensor([[0, 7, 49], [8, 8, 1]])
    a, s = diffusion.alpha_sigma(model, t, like)
    assert a.shape == s.shape == (2, 3, 1, 1)
    power = 1 if objective == "flow" else 2
    assert_close(a**power + s**power, torch.ones(2, 3, 1, 1))
    assert (s[0, 0] < s[1, 2]).all() and torch.equal(s[1, 0], s[1, 1])


@pytest.mark.parametrize("w", [-1.0, 0.0, 0.5, 3.0])
def test_guidance_is_equation_six_of_ho_and_salimans(w):
    conditional, unconditional = torch.randn(2, 4, 5)
    guided = diffusion.classifier_free_guidance(conditional, unconditional, 1 + w)
    assert_close(guided, (1 + w) * conditional - w * unconditional)


@pytest.mark.parametrize("density", ["logit_normal", "mode"])
def test_the_rarest_draws_are_timesteps_too(density, monkeypatch):
    ends = torch.tensor([0.0, 1 - 2**-24])
    monkeypatch.setattr(torch, "rand", lambda shape, device: ends)
    monkeypatch.setattr(torch, "randn", lambda shape, device: torch.tensor([40.0, -40.0]))
    drawn = diffusion.sample_timesteps(density, (2,), 30, "cpu")
    assert drawn.tolist() == [29, 0]


def test_noise_drawn_ahead_is_the_same_noise_for_more_draws_than_one_piece_holds():
    x = torch.zeros(1, 16)
    by_one = diffusion.noise_generator([3], "cpu")
    ahead = diffusion.noise_generator([3], "cpu", draws=100)
    expected = torch.stack([by_one(x) for _ in range(150)])
    assert torch.equal(torch.stack([ahead(x) for _ in range(150)]), expected)
    assert ahead(x.bfloat16()).dtype == torch.bfloat16
    images = torch.zeros(4, 3, 2, 5)
    assert diffusion.noise_generator([3, 4], "cpu")(images).shape == images.shape


def test_what_is_kept_is_noised_to_the_level_of_each_step_and_again_before_it_is_resampled():
    alpha, sigma = diffusion.alphas_sigmas("cosine", T)
    inputs = []

    def denoise(x_t, t):
        inputs.append((t.item(), x_t.item()))
        return torch.zeros(1, 1), 0.0

    kept = torch.full((1, 1), 2.0), torch.tensor([[True]])
    options = dict(noise_fn=torch.ones_like, kept=kept, resample=3)
    out = diffusion.sample(denoise, torch.ones(1, 1), alpha, sigma, 5, **options)
    assert out.item() == 2
    timesteps = diffusion.sampling_timesteps(T, 5, False)
    visited = [t for t, _ in inputs]
    assert visited == [t for t in timesteps[:-1] for _ in range(3)] + [0]
    a = alpha.double().tolist()
    s = sigma.double().tolist()
    for (before, _), (t, x) in itertools.pairwise(inputs):
        expected = 2 * a[t] + s[t]
        if before == t:  # noised by q(x_t | x_prev): the variances add up to σ_t²
            t_prev = timesteps[timesteps.index(t) + 1]
            ratio = a[t] / a[t_prev]
            from_prev = ratio * s[t_prev]
            expected = 2 * a[t] + from_prev + math.sqrt(s[t] ** 2 - from_prev**2)
        assert x == pytest.approx(expected, rel=1e-4)
