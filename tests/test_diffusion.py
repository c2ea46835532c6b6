"""The diffusion arithmetic against slow references and published closed forms."""
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
