"""The diffusion arithmetic against slow references and published closed forms."""
import itertools
import math

import pytest
import torch

from common import diffusion

T = 200


@pytest.fixture(params=diffusion.SCHEDULES)
def levels(request):
    return diffusion.levels(request.param, T)


def test_levels_keep_variance_and_only_get_noisier(levels):
    alpha, sigma = levels
    torch.testing.assert_close(alpha ** 2 + sigma ** 2, torch.ones(T))
    assert (alpha.diff() < 0).all() and 0.9 < alpha[0] < 1 and alpha[-1] < 0.25


def test_linear_betas_are_the_published_ones_at_1000_steps():
    beta = diffusion.betas("linear", 1000)
    assert math.isclose(beta[0], 1e-4, rel_tol=1e-9) and math.isclose(beta[-1], 0.02, rel_tol=1e-9)
    assert diffusion.betas("jsd", 4)[:3].tolist() == pytest.approx([1 / 4, 1 / 3, 1 / 2])


def test_cosine_levels_follow_the_closed_form_until_betas_are_clamped():
    alpha, _ = diffusion.levels("cosine", T)
    for t in (0, 17, 100, 180):
        f = [math.cos((u / T + 0.008) / 1.008 * math.pi / 2) ** 2 for u in (t + 1, 0)]
        assert math.isclose(alpha[t] ** 2, f[0] / f[1], rel_tol=1e-4)


def test_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'cosin' is none of cosine, linear"):
        diffusion.betas("cosin", 10)


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon"])
def test_the_true_target_stands_for_the_true_x0(objective):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels("cosine", T)
    x0, noise, t = torch.randn(64, 3, 5), torch.randn(64, 3, 5), torch.randint(T - 20, (64, 3))
    before = x0.clone(), noise.clone()
    a, s = diffusion.at(alpha, t, x0), diffusion.at(sigma, t, x0)
    x_t = diffusion.add_noise(x0, noise, a, s)
    answer = diffusion.target(objective, x0, noise, a, s)
    torch.testing.assert_close(diffusion.to_x0(objective, answer, x_t, a, s), x0, rtol=1e-3, atol=1e-3)
    assert torch.equal(x0, before[0]) and torch.equal(noise, before[1]), "the caller's tensors were written to"


def test_velocity_is_the_derivative_along_the_circle():
    # x(φ) = cos φ · x0 + sin φ · ε, so v = dx/dφ (Salimans & Ho 2022, App. D), here by differences in float64
    torch.manual_seed(0)
    x0, noise, phi, h = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64), 0.7, 1e-6
    slope = [(math.cos(p) * x0 + math.sin(p) * noise) for p in (phi + h, phi - h)]
    v = diffusion.target("v", x0, noise, math.cos(phi), math.sin(phi))
    torch.testing.assert_close(v, (slope[0] - slope[1]) / (2 * h), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_min_snr_weighs_every_objective_alike_in_x0(gamma):
    """Each weight times its loss is the same number: min(SNR, γ) times the squared error in x0."""
    torch.manual_seed(0)
    alpha, sigma = (table.double() for table in diffusion.levels("cosine", T))
    t = torch.arange(0, T - 5)
    x0, noise, error = (torch.randn(len(t), dtype=torch.float64) for _ in range(3))
    a, s = alpha[t], sigma[t]
    x_t = diffusion.add_noise(x0, noise, a, s)
    losses = []
    for objective in ("x0", "v", "epsilon"):
        wrong = x0 + error
        guess = {"x0": wrong, "epsilon": (x_t - a * wrong) / s, "v": (a * x_t - wrong) / s}[objective]
        gap = (guess - diffusion.target(objective, x0, noise, a, s)) ** 2
        losses.append(diffusion.min_snr_weight(objective, a, s, gamma) * gap)
    slow = torch.tensor([min(float((a[i] / s[i]) ** 2), gamma) * float(error[i]) ** 2 for i in range(len(t))])
    for loss in losses:
        torch.testing.assert_close(loss, slow.double(), rtol=1e-5, atol=1e-9)
    assert (diffusion.min_snr_weight("v", a, s, 0.0) == 1).all()


def test_losses_are_the_textbook_distances():
    a, b = torch.tensor([0.0, 0.5, 3.0]), torch.zeros(3)
    assert diffusion.distance("l2", a, b).tolist() == [0, 0.25, 9]
    assert diffusion.distance("l1", a, b).tolist() == [0, 0.5, 3]
    assert diffusion.distance("huber", a, b).tolist() == [0, 0.125, 2.5]


def test_guidance_extrapolates_from_the_unconditional():
    c, u = torch.randn(4, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    assert torch.equal(diffusion.guide(c, u, 1.0), c) and torch.equal(diffusion.guide(c, u, 3.0), 3 * c)
    assert torch.equal(diffusion.guide(c, c * 2, 0.0), c * 2)


def test_respaced_steps_run_from_the_noisiest_level_to_the_first():
    assert diffusion.respaced(1000, 1) == [999] and diffusion.respaced(5, 5) == [4, 3, 2, 1, 0]
    for steps in (2, 7, 64, 999, 1000):
        chosen = diffusion.respaced(1000, steps)
        assert chosen[0] == 999 and chosen[-1] == 0 and chosen == sorted(set(chosen), reverse=True)
        assert len(chosen) == steps


def test_network_is_told_the_level_its_input_is_at_and_the_last_answer_is_returned():
    alpha, sigma = diffusion.levels("cosine", T)
    seen, secret = [], torch.full((3, 2), 0.25)

    def denoise(x, t, before):
        seen.append((x.clone(), int(t[0]), before.clone()))
        return secret

    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    out = diffusion.sample(denoise, start, alpha, sigma, 5, eta=0.0)
    assert torch.equal(out, secret)
    noise = (start - alpha[T - 1] * secret) / sigma[T - 1]
    for x, t, _ in seen:  # with one true answer DDIM stays on the ray of its noise, at the level it names
        torch.testing.assert_close(x, alpha[t] * secret + sigma[t] * noise, rtol=1e-4, atol=1e-4)
    assert [t for _, t, _ in seen] == diffusion.respaced(T, 5)
    assert (seen[0][2] == 0).all() and torch.equal(seen[1][2], secret)


def test_ancestral_step_is_the_posterior_of_ddpm():
    """eta = 1 over all timesteps: mean and variance of q(x_{t-1} | x_t, x0), DDPM Eq. 7, written out slowly."""
    beta = diffusion.betas("linear", T)
    bar = torch.cumprod(1 - beta, 0)
    alpha, sigma = diffusion.levels("linear", T)
    torch.manual_seed(0)
    start, answers, draws, seen = torch.randn(2, 3), torch.randn(T, 2, 3), torch.randn(T, 2, 3), []

    def denoise(x, t, before):
        seen.append(x.double())
        return answers[t[0]]

    fresh = iter(draws)
    diffusion.sample(denoise, start, alpha, sigma, T, eta=1.0, draw=lambda x: next(fresh))
    x = start.double()
    for i, t in enumerate(range(T - 1, 0, -1)):
        torch.testing.assert_close(seen[i], x, rtol=1e-4, atol=1e-4)
        mean = (bar[t - 1].sqrt() * beta[t] * answers[t] + (1 - beta[t]).sqrt() * (1 - bar[t - 1]) * x) / (1 - bar[t])
        x = mean + (beta[t] * (1 - bar[t - 1]) / (1 - bar[t])).sqrt() * draws[i]


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_sampling_a_gaussian_with_its_exact_denoiser_gives_that_gaussian(eta):
    torch.manual_seed(0)
    mean, std = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.1])
    alpha, sigma = diffusion.levels("cosine", 1000)

    def denoise(x, t, before):  # E[x0 | x_t] of a Gaussian
        a, s = alpha[t, None], sigma[t, None]
        return mean + a * std ** 2 / (a ** 2 * std ** 2 + s ** 2) * (x - a * mean)

    out = diffusion.sample(denoise, torch.randn(20_000, 2), alpha, sigma, 200, eta)
    torch.testing.assert_close(out.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(out.std(0), std, atol=0.02, rtol=0.05)


def test_a_sample_has_the_same_noise_in_any_batch():
    whole = diffusion.noise_source([5, 6, 7], "cpu")
    alone = diffusion.noise_source([6], "cpu")
    first, second = whole(torch.zeros(3, 4)), whole(torch.zeros(3, 4))
    assert torch.equal(first[1:2], alone(torch.zeros(1, 4))) and torch.equal(second[1:2], alone(torch.zeros(1, 4)))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)


# Rectified flow, loss weights, timestep densities


def test_flow_levels_run_to_pure_noise_and_are_used_whatever_the_schedule():
    alpha, sigma = diffusion.tables("flow", "linear", 4)
    assert sigma.tolist() == [0.25, 0.5, 0.75, 1] and alpha.tolist() == [0.75, 0.5, 0.25, 0]
    for objective in ("x0", "v", "epsilon"):
        for ours, theirs in zip(diffusion.tables(objective, "linear", T), diffusion.levels("linear", T)):
            assert torch.equal(ours, theirs)


def test_the_true_flow_stands_for_the_true_x0_and_is_the_slope_of_the_path():
    torch.manual_seed(0)
    alpha, sigma = (table[:, None].double() for table in diffusion.levels("flow", T))
    x0, noise = torch.randn(T, 5, dtype=torch.float64), torch.randn(T, 5, dtype=torch.float64)
    x_t, flow = diffusion.add_noise(x0, noise, alpha, sigma), diffusion.target("flow", x0, noise, alpha, sigma)
    torch.testing.assert_close(diffusion.to_x0("flow", flow, x_t, alpha, sigma), x0)
    later = diffusion.add_noise(x0, noise, alpha - 1e-6, sigma + 1e-6)  # dx/dσ by differences
    torch.testing.assert_close((later - x_t) / 1e-6, flow, rtol=1e-6, atol=1e-8)


def guesses(objective, wrong, x_t, alpha, sigma):
    """What a network must say at x_t to stand for the x0 `wrong`."""
    return {"x0": wrong, "epsilon": (x_t - alpha * wrong) / sigma, "v": (alpha * x_t - wrong) / sigma,
            "flow": (x_t - wrong) / sigma}[objective]


@pytest.mark.parametrize("gamma, k", [(0.5, 1.0), (1.0, 1.0), (1.0, 3.0)])
def test_p2_weighs_every_objective_alike_in_epsilon(gamma, k):
    """Each weight times its loss is the same number: (k + SNR)^-γ times the squared error in epsilon."""
    torch.manual_seed(0)
    for objective in ("x0", "v", "epsilon", "flow"):
        a, s = (table.double()[:T - 5] for table in diffusion.tables(objective, "cosine", T))
        x0, noise, error = (torch.randn(len(a), dtype=torch.float64) for _ in range(3))
        x_t = diffusion.add_noise(x0, noise, a, s)
        guess = guesses(objective, (x_t - s * (noise + error)) / a, x_t, a, s)
        loss = (guess - diffusion.target(objective, x0, noise, a, s)) ** 2
        slow = [(k + float((a[i] / s[i]) ** 2)) ** -gamma * float(error[i]) ** 2 for i in range(len(a))]
        torch.testing.assert_close(diffusion.p2_weight(objective, a, s, gamma, k) * loss,
                                   torch.tensor(slow, dtype=torch.float64), rtol=1e-5, atol=1e-9)
        assert (diffusion.p2_weight(objective, a, s, 0.0) == 1).all()


def test_min_snr_weighs_flow_as_it_does_x0():
    torch.manual_seed(0)
    a, s = (table.double() for table in diffusion.levels("flow", T))
    x0, noise, error = (torch.randn(T, dtype=torch.float64) for _ in range(3))
    x_t = diffusion.add_noise(x0, noise, a, s)
    gap = guesses("flow", x0 + error, x_t, a, s) - diffusion.target("flow", x0, noise, a, s)
    slow = torch.tensor([min(float(a[i] / s[i]) ** 2, 5.0) * float(error[i]) ** 2 for i in range(T)])
    torch.testing.assert_close((diffusion.min_snr_weight("flow", a, s, 5.0) * gap ** 2).float(), slow)


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
def test_weights_are_finite_at_every_level_also_of_pure_noise(objective):
    for name in ("flow", *diffusion.SCHEDULES):
        alpha, sigma = diffusion.levels(name, 1000)
        for weight in (diffusion.min_snr_weight(objective, alpha, sigma, 5.0),
                       diffusion.p2_weight(objective, alpha, sigma, 1.0),
                       *(diffusion.flow_weight(kind, sigma) for kind in ("none", "sigma_sqrt", "cosmap"))):
            assert weight.isfinite().all() and (weight >= 0).all()


def test_flow_weights_follow_their_formulas():
    sigma = diffusion.levels("flow", 10)[1]
    assert (diffusion.flow_weight("none", sigma) == 1).all()
    assert diffusion.flow_weight("sigma_sqrt", sigma).tolist() == pytest.approx([(10 / i) ** 2 for i in range(1, 11)])
    cosmap = diffusion.flow_weight("cosmap", diffusion.levels("flow", 100_000)[1])
    assert cosmap.mean() == pytest.approx(1, abs=1e-3)  # it is a density on (0, 1)
    assert cosmap[49_999] == pytest.approx(4 / math.pi) and cosmap[-1] == pytest.approx(2 / math.pi)


def test_uniform_timesteps_are_torchs_own():
    torch.manual_seed(3)
    ours, after = diffusion.draw_timesteps("uniform", (5, 7), 1000, "cpu"), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.randint(1000, (5, 7), device="cpu")) and torch.equal(after, torch.rand(1))


def share_below(density, time, mean, std, scale):
    """Closed-form probability that the time of SD3's Eq. 19 or 20 is below `time`, in floats."""
    if time in (0, 1):
        return float(time)
    if density == "logit_normal":
        return 0.5 + 0.5 * math.erf((math.log(time / (1 - time)) - mean) / std / math.sqrt(2))
    low, high = 0.0, 1.0  # f falls from 1 to 0: the u with f(u) = time by bisection, and all above it lie below
    for _ in range(60):
        u = (low + high) / 2
        if 1 - u - scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u) > time:
            low = u
        else:
            high = u
    return 1 - u


@pytest.mark.parametrize("density, mean, std, scale", [
    ("logit_normal", 0.0, 1.0, 1.29), ("logit_normal", 0.7, 0.5, 1.29), ("mode", 0.0, 1.0, 1.29),
    ("mode", 0.0, 1.0, -0.8), ("mode", 0.0, 1.0, 0.0)])
def test_timesteps_have_the_published_density(density, mean, std, scale):
    torch.manual_seed(0)
    drawn = diffusion.draw_timesteps(density, (400, 500), 20, "cpu", mean, std, scale)
    assert drawn.dtype == torch.int64 and drawn.shape == (400, 500) and drawn.min() >= 0 and drawn.max() <= 19
    shares = torch.bincount(drawn.flatten(), minlength=20).double() / drawn.numel()
    expected = torch.tensor([share_below(density, i / 20, mean, std, scale) for i in range(21)]).double().diff()
    assert (shares - expected).abs().sum() / 2 < 0.008  # total variation; 0.004 is usual for as many draws
    uniform = (shares - 1 / 20).abs().sum() / 2
    assert uniform < 0.008 if scale == 0 else uniform > 0.05


def test_dream_moves_input_and_target_along_the_networks_error():
    torch.manual_seed(0)
    alpha, sigma = (table[:, None] for table in diffusion.levels("cosine", T))
    x0, noise, predicted = (torch.randn(T, 3) for _ in range(3))
    x_t = diffusion.add_noise(x0, noise, alpha, sigma)
    before = x_t.clone(), noise.clone(), predicted.clone()
    moved, target = diffusion.dream(x_t, noise, predicted, sigma, 2.0)
    torch.testing.assert_close(moved, diffusion.add_noise(x0, target, alpha, sigma))  # still of x0, with that noise
    for t in (0, 50, T - 1):
        for i in range(3):
            error = float(sigma[t]) ** 2 * (float(noise[t, i]) - float(predicted[t, i]))
            assert float(target[t, i]) == pytest.approx(float(noise[t, i]) + error, abs=1e-5)
    for tensor, kept in zip((x_t, noise, predicted), before):
        assert torch.equal(tensor, kept), "the caller's tensors were written to"
    exact, same = diffusion.dream(x_t, noise, noise, sigma, 1.0)
    assert torch.equal(exact, x_t) and torch.equal(same, noise)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9, 0.995, 1.0])
def test_dynamic_threshold_clips_each_sample_at_its_own_quantile(quantile):
    torch.manual_seed(0)
    x0 = torch.randn(4, 3, 5, 5) * torch.tensor([0.2, 1.0, 3.0, 10.0]).reshape(4, 1, 1, 1)
    kept, out = x0.clone(), diffusion.threshold(x0, quantile)
    for one, result in zip(kept, out):
        s = max(1.0, float(torch.quantile(one.abs().flatten(), quantile)))
        torch.testing.assert_close(result, one.clamp(-s, s) / s)
    assert torch.equal(x0, kept) and out.abs().max() <= 1
    assert torch.equal(out[0], kept[0])  # already within -1 and 1: not stretched


# Samplers


@pytest.mark.parametrize("name", ["flow", "linear", "cosine"])
@pytest.mark.parametrize("steps", [7, T])
def test_ancestral_steps_are_bayes_posterior_for_any_levels(name, steps):
    """q(x_s | x_t, x0) by multiplying the Gaussians q(x_s | x0) and q(x_t | x_s), in float64."""
    alpha, sigma = diffusion.levels(name, T)
    torch.manual_seed(0)
    start, answers, draws, seen = torch.randn(2, 3), torch.randn(T, 2, 3), torch.randn(T, 2, 3), {}

    def denoise(x, t, before):
        seen[int(t[0])] = x.double()
        return answers[t[0]]

    fresh = iter(draws)
    diffusion.sample(denoise, start, alpha, sigma, steps, eta=1.0, draw=lambda x: next(fresh))
    schedule, a, s = diffusion.respaced(T, steps), alpha.double(), sigma.double()
    for i, (t, after) in enumerate(itertools.pairwise(schedule)):
        slope = a[t] / a[after]
        beta = s[t] ** 2 - slope ** 2 * s[after] ** 2
        variance = 1 / (1 / s[after] ** 2 + slope ** 2 / beta)
        mean = variance * (a[after] * answers[t] / s[after] ** 2 + slope * seen[t] / beta)
        torch.testing.assert_close(seen[after], mean + variance.sqrt() * draws[i], rtol=1e-3, atol=1e-3)


def test_noise_of_a_step_has_the_size_of_ddims_equation_16():
    alpha, sigma = diffusion.levels("linear", T)
    schedule = diffusion.respaced(T, 9)

    def last_input(value):
        seen = []
        diffusion.sample(lambda x, t, before: seen.append(x) or torch.zeros_like(x), torch.zeros(1, 1), alpha, sigma,
                         9, 0.7, draw=lambda x: torch.full_like(x, float(len(seen) == value)))
        return float(seen[value])

    bar = torch.cumprod(1 - diffusion.betas("linear", T), 0)
    for i, (t, after) in enumerate(itertools.pairwise(schedule)):
        std = 0.7 * math.sqrt((1 - bar[after]) / (1 - bar[t])) * math.sqrt(1 - bar[t] / bar[after])
        assert last_input(i + 1) == pytest.approx(std, rel=1e-4)


def test_flow_without_fresh_noise_is_eulers_method():
    alpha, sigma = diffusion.levels("flow", 100)

    def velocity(x, level):
        return torch.tanh(x) + level

    def denoise(x, t, before):
        return diffusion.to_x0("flow", velocity(x, sigma[t][:, None]), x, alpha[t][:, None], sigma[t][:, None])

    start = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    x, grid = start.double(), [(t + 1) / 100 for t in diffusion.respaced(100, 12)] + [0.0]
    for here, there in itertools.pairwise(grid):
        x = x + (there - here) * velocity(x, here)
    out = diffusion.sample(denoise, start, alpha, sigma, 12, eta=0.0)
    torch.testing.assert_close(out, x.float(), rtol=1e-4, atol=1e-4)


MEAN, STD = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.1])


def exact(alpha, sigma):
    """E[x0 | x_t] of the Gaussian with MEAN and STD, as a `denoise`."""
    def denoise(x, t, before):
        a, s = alpha[t, None], sigma[t, None]
        return MEAN + a * STD ** 2 / (a ** 2 * STD ** 2 + s ** 2) * (x - a * MEAN)
    return denoise


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_flow_samples_a_gaussian_with_its_exact_denoiser(eta):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels("flow", 1000)
    out = diffusion.sample(exact(alpha, sigma), torch.randn(20_000, 2), alpha, sigma, 250, eta)
    torch.testing.assert_close(out.mean(0), MEAN, atol=0.02, rtol=0)
    torch.testing.assert_close(out.std(0), STD, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("name", ["linear", "flow"])
@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_learned_variance_runs_from_the_posteriors_to_betas(name, eta):
    alpha, sigma = diffusion.levels(name, T)
    schedule, a, s = diffusion.respaced(T, 6), alpha.double(), sigma.double()
    seen = []
    for fraction in (0.0, 0.3, 1.0, None):
        def denoise(x, t, before, fraction=fraction):
            seen.append(x)
            x0 = torch.full_like(x, 0.5)
            return x0 if fraction is None else (x0, torch.full_like(x, fraction))

        inputs = []
        for size in (0.0, 1.0):  # the same first step without and with noise: its mean and its spread
            diffusion.sample(denoise, torch.ones(1, 1), alpha, sigma, 6, eta, lambda x, n=size: torch.full_like(x, n))
            inputs.append(float(seen[-5]))
        t, after = schedule[:2]
        beta = float(s[t] ** 2 - (a[t] / a[after]) ** 2 * s[after] ** 2)
        posterior = beta * float(s[after] / s[t]) ** 2
        mixed = math.exp((fraction or 0) * math.log(beta) + (1 - (fraction or 0)) * math.log(posterior))
        assert inputs[1] - inputs[0] == pytest.approx(eta * math.sqrt(mixed), rel=1e-4)
        mean = float(a[after]) * 0.5 + math.sqrt(s[after] ** 2 - eta ** 2 * posterior) * float((1 - a[t] * 0.5) / s[t])
        assert inputs[0] == pytest.approx(mean, rel=1e-4)  # whatever the variance


def test_the_right_variance_makes_few_ancestral_steps_exact():
    """Var(x_s | x_t) of a Gaussian is known: with it 6 steps give the exact spread, with β̃ they fall short."""
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels("cosine", 1000)
    schedule, a, s = diffusion.respaced(1000, 6), alpha.double(), sigma.double()
    after = dict(itertools.pairwise(schedule))

    def denoise(x, t, before):
        x0, t = exact(alpha, sigma)(x, t, before), int(t[0])
        if t == 0:
            return x0
        spread = [a[i] ** 2 * STD.double() ** 2 + s[i] ** 2 for i in (t, after[t])]
        shared = a[t] / a[after[t]] * spread[1]
        beta = s[t] ** 2 - (a[t] / a[after[t]]) ** 2 * s[after[t]] ** 2
        posterior = beta * (s[after[t]] / s[t]) ** 2
        wanted = spread[1] - shared ** 2 / spread[0]
        fraction = (wanted / posterior).log() / (beta / posterior).log()
        return x0, fraction.float().expand_as(x)

    start = torch.randn(50_000, 2)
    right = diffusion.sample(denoise, start, alpha, sigma, 6).std(0)
    small = diffusion.sample(exact(alpha, sigma), start, alpha, sigma, 6).std(0)
    torch.testing.assert_close(right, STD, rtol=0.02, atol=0)
    assert (small < 0.95 * STD).all()


@pytest.mark.parametrize("name", ["cosine", "linear", "flow"])
def test_inversion_finds_the_noise_that_sampling_brings_back(name):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels(name, 1000)
    denoise, x0 = exact(alpha, sigma), MEAN + STD * torch.randn(500, 2)
    error, kept = {}, x0.clone()
    for steps in (100, 1000):
        noise = diffusion.invert(denoise, x0, alpha, sigma, steps)
        error[steps] = (diffusion.sample(denoise, noise, alpha, sigma, steps, eta=0.0) - x0).abs().mean()
    assert error[1000] < 2.5e-3 and error[1000] < error[100] / 5 and torch.equal(x0, kept)
    # The exact flow of a Gaussian keeps every point at its quantile.
    torch.testing.assert_close(noise, alpha[-1] * MEAN + (x0 - MEAN) / STD, atol=0.15, rtol=0.05)
    told = []
    diffusion.invert(lambda x, t, before: told.append(int(t[0])) or x, x0, alpha, sigma, 5)
    assert told == [0, *diffusion.respaced(1000, 5)[::-1][:-1]]


def correlated(alpha, sigma, rho):
    """E[x0 | x_t] of two standard normals with correlation rho."""
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]])

    def denoise(x, t, before):
        a, s = alpha[t[0]], sigma[t[0]]
        return x @ (a * covariance @ torch.linalg.inv(a ** 2 * covariance + s ** 2 * torch.eye(2))).T
    return denoise


@pytest.mark.parametrize("name", ["cosine", "flow"])
def test_inpainting_keeps_what_is_known_and_resampling_fits_the_rest_to_it(name):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels(name, 200)
    known, rho = torch.tensor([[1.5, 77.0]]).expand(4000, 2), 0.9  # the 77 is not known and must not matter
    errors = []
    for resample in (1, 10):
        out = diffusion.sample(correlated(alpha, sigma, rho), torch.randn(4000, 2), alpha, sigma, 40, known=known,
                               mask=torch.tensor([[1, 0]]), resample=resample)
        assert torch.equal(out[:, 0], known[:, 0]) and out.isfinite().all()
        errors.append(float((out[:, 1].mean() - rho * 1.5).abs()))
    assert errors[1] < 0.12 and errors[1] < errors[0] / 3
    assert float(out[:, 1].std()) == pytest.approx(math.sqrt(1 - rho ** 2), abs=0.12)


def test_inpainting_with_everything_or_nothing_known():
    alpha, sigma = diffusion.levels("cosine", T)
    known, start = torch.randn(3, 2), torch.randn(3, 2)
    denoise = correlated(alpha, sigma, 0.5)
    out = diffusion.sample(denoise, start, alpha, sigma, 5, known=known, mask=torch.ones(3, 2, dtype=torch.bool))
    assert torch.equal(out, known)
    free = diffusion.sample(denoise, start, alpha, sigma, 5, eta=0.0)
    out = diffusion.sample(denoise, start, alpha, sigma, 5, eta=0.0, known=known, mask=torch.zeros(1, 1))
    assert torch.equal(out, free)


# The variational bound


def test_variational_bound_is_the_kl_of_the_two_gaussians():
    torch.manual_seed(0)
    beta = diffusion.betas("linear", T)
    bar = torch.cumprod(1 - beta, 0)
    alpha, sigma = diffusion.levels("linear", T)
    t = torch.arange(1, T)
    x0, guess = torch.rand(T - 1, 2, 3) * 2 - 1, torch.rand(T - 1, 2, 3) * 2 - 1
    fraction = torch.rand(T - 1, 2, 3)
    x_t = torch.randn(T - 1, 2, 3)
    ours = diffusion.variational_bound(x0, t, guess, fraction, alpha, sigma)
    assert ours.shape == (T - 1,)
    for i in range(T - 1):
        n = int(t[i])
        tilde = beta[n] * (1 - bar[n - 1]) / (1 - bar[n])

        def mean(x, n=n, i=i):  # DDPM Eq. 7
            return (bar[n - 1].sqrt() * beta[n] * x[i].double()
                    + (1 - beta[n]).sqrt() * (1 - bar[n - 1]) * x_t[i].double()) / (1 - bar[n])

        std = (0.5 * (fraction[i].double() * beta[n].log() + (1 - fraction[i].double()) * tilde.log())).exp()
        true, model = torch.distributions.Normal(mean(x0), tilde.sqrt()), torch.distributions.Normal(mean(guess), std)
        kl = torch.distributions.kl_divergence(true, model).mean() / math.log(2)
        assert float(ours[i]) == pytest.approx(float(kl), rel=2e-3)


def test_first_term_is_the_likelihood_of_eight_bit_pixels():
    alpha, sigma = diffusion.levels("linear", T)
    beta = diffusion.betas("linear", T)
    bar = torch.cumprod(1 - beta, 0)
    clipped = beta[1] * (1 - bar[0]) / (1 - bar[1])  # β̃ is 0 there: Nichol's stand-in
    pixels = torch.arange(256) / 127.5 - 1
    for guess, f in ((0.3, 0.0), (-0.97, 1.0), (1.02, 0.5)):
        std = math.exp(0.5 * (f * math.log(beta[0]) + (1 - f) * math.log(clipped)))
        bits = diffusion.variational_bound(pixels[:, None], torch.zeros(256, dtype=torch.int64),
                                           torch.full((256, 1), guess), torch.full((256, 1), f), alpha, sigma)
        mass = torch.exp2(-bits.double())
        assert float(mass.sum()) == pytest.approx(1, abs=1e-4)  # every value a pixel can have, once
        for i in (0, 1, 3, 160, 164, 170, 254, 255):
            low = -3.0 if i == 0 else float(pixels[i]) - 1 / 255
            high = 3.0 if i == 255 else float(pixels[i]) + 1 / 255
            grid = torch.linspace(low, high, 20_001, dtype=torch.float64)
            area = torch.trapezoid(torch.distributions.Normal(guess, std).log_prob(grid).exp(), grid)
            assert float(mass[i]) == pytest.approx(float(area), rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("name", ["linear", "cosine", "jsd", "flow"])
def test_variational_bound_is_finite_and_teaches_the_variance_alone(name):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels(name, 1000)
    t = torch.arange(1000)
    x0 = torch.randint(256, (1000, 4)) / 127.5 - 1
    guess = (x0 + torch.randn(1000, 4)).requires_grad_()
    fraction = torch.rand(1000, 4, requires_grad=True)
    diffusion.variational_bound(x0, t, guess, fraction, alpha, sigma).sum().backward()
    assert guess.grad is None and fraction.grad.isfinite().all() and (fraction.grad != 0).any(1).sum() > 900
    bits = diffusion.variational_bound(x0, t, x0, torch.zeros(1000, 4), alpha, sigma)
    assert bits.isfinite().all() and bits[1:].abs().max() < 1e-5  # the true posterior itself


# All of it on a distribution that is known


CENTERS = torch.tensor([[1.2, 0.0], [-0.8, 0.9], [-0.8, -0.9]])
SPREADS = torch.tensor([[0.15, 0.4], [0.1, 0.1], [0.3, 0.1]])
LEVELS = 100


def mixture(count):
    """Points (count, 2) of three Gaussians with the weights 0.5, 0.3, 0.2."""
    which = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), count, replacement=True)
    return CENTERS[which] + SPREADS[which] * torch.randn(count, 2)


def energy_distance(a, b):
    """2 E|a - b| - E|a - a'| - E|b - b'|: 0 for one distribution, 0.002 for 2000 draws of it."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def network(inputs, outputs, width=96):
    sizes = [inputs, width, width, width, outputs]
    layers = [layer for i in range(4) for layer in (torch.nn.Linear(*sizes[i:i + 2]), torch.nn.SiLU())]
    return torch.nn.Sequential(*layers[:-1])


def denoiser(net, objective, alpha, sigma):
    """(the net's raw outputs at (x, t), the `denoise` made of them), with learned variances if it has 4 outputs."""
    def raw(x, t):
        u = t[:, None] / LEVELS
        return net(torch.cat([x, u, u * u, torch.sin(6 * u), torch.cos(6 * u)], 1))

    def denoise(x, t, before):
        out, a, s = raw(x, t), diffusion.at(alpha, t, x), diffusion.at(sigma, t, x)
        x0 = diffusion.to_x0(objective, out[:, :2], x, a, s)
        return (x0, (out[:, 2:] + 1) / 2) if out.shape[1] == 4 else x0
    return raw, denoise


@pytest.mark.parametrize("objective, settings", [
    ("x0", {"min_snr": 5.0}), ("epsilon", {}), ("v", {"p2": 0.5}), ("flow", {}), ("v", {"learned": True}),
    ("epsilon", {"dream": 10.0}), ("flow", {"density": "logit_normal", "flow_weight": "cosmap"})])
def test_a_small_network_learns_and_samples_a_known_mixture(objective, settings, steps=800, batch=256):
    torch.manual_seed(0)
    alpha, sigma = diffusion.tables(objective, "linear", LEVELS)
    learned = "learned" in settings
    net = network(6, 4 if learned else 2)
    raw, denoise = denoiser(net, objective, alpha, sigma)
    start, true = torch.randn(2000, 2), mixture(2000)
    untrained = energy_distance(diffusion.sample(denoise, start, alpha, sigma, 50), true)
    optimizer = torch.optim.AdamW(net.parameters(), 4e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x0, noise = mixture(batch), torch.randn(batch, 2)
        t = diffusion.draw_timesteps(settings.get("density", "uniform"), (batch,), LEVELS, "cpu")
        a, s = diffusion.at(alpha, t, x0), diffusion.at(sigma, t, x0)
        x_t = diffusion.add_noise(x0, noise, a, s)
        target = diffusion.target(objective, x0, noise, a, s)
        if "dream" in settings:
            x_t, target = diffusion.dream(x_t, noise, raw(x_t, t).detach(), s, settings["dream"])
        out = raw(x_t, t)
        weight = (diffusion.min_snr_weight(objective, a, s, settings.get("min_snr", 0))
                  * diffusion.p2_weight(objective, a, s, settings.get("p2", 0))
                  * diffusion.flow_weight(settings.get("flow_weight", "none"), s))
        loss = (weight * diffusion.distance("l2", out[:, :2], target)).mean()
        if learned:
            guess = diffusion.to_x0(objective, out[:, :2], x_t, a, s)
            bound = diffusion.variational_bound(x0, t, guess, (out[:, 2:] + 1) / 2, alpha, sigma)
            loss = loss + 0.001 * LEVELS * bound.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for eta in (0.0, 1.0):
        assert energy_distance(diffusion.sample(denoise, start, alpha, sigma, 50, eta), true) < 0.03
    # The bound tells right from wrong: an untrained net, a Gaussian of the right moments, a net told a noisier level,
    # an ancestral sampler that forgets the noise.
    assert untrained > 0.08
    assert energy_distance(true.mean(0) + true.std(0) * torch.randn(2000, 2), true) > 0.06
    misled = diffusion.sample(lambda x, t, before: denoise(x, (t + 20).clamp(max=LEVELS - 1), before), start, alpha,
                              sigma, 50)
    assert energy_distance(misled, true) > 0.08
    assert energy_distance(diffusion.sample(denoise, start, alpha, sigma, 50, draw=torch.zeros_like), true) > 0.5
