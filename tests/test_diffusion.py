"""The diffusion arithmetic against slow references and published closed forms."""
import itertools
import math

import numpy as np
import pytest
import torch

from common import accumulate, diffusion
from common.config import UserError

T = 200


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_levels_keep_variance_and_only_get_noisier(name):
    alpha, sigma = diffusion.levels(name, T)
    torch.testing.assert_close(alpha ** 2 + sigma ** 2, torch.ones(T))
    assert (alpha.diff() < 0).all() and 0.9 < alpha[0] < 1 and alpha[-1] < 0.25


def test_betas_are_the_published_ones():
    beta = diffusion.betas("linear", 1000)
    assert math.isclose(beta[0], 1e-4, rel_tol=1e-9) and math.isclose(beta[-1], 0.02, rel_tol=1e-9)
    halfway = diffusion.betas("linear", 1001)[500]
    assert math.isclose(halfway, 1000 / 1001 * (1e-4 + 0.02) / 2, rel_tol=1e-9)
    for name in ("cosine", "linear"):
        assert diffusion.betas(name, 2).max() == 0.999  # none is 1


def test_cosine_levels_follow_the_closed_form():
    alpha, _ = diffusion.levels("cosine", T)
    for t in (0, 17, 100, 180):
        f = [math.cos((u / T + 0.008) / 1.008 * math.pi / 2) ** 2 for u in (t + 1, 0)]
        assert math.isclose(alpha[t] ** 2, f[0] / f[1], rel_tol=1e-4)


def levels_of(objective):
    return diffusion.levels("flow" if objective == "flow" else "cosine", T)


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
def test_the_true_target_stands_for_the_true_x0(objective):
    torch.manual_seed(0)
    alpha, sigma = levels_of(objective)
    x0, noise, t = torch.randn(64, 3, 5), torch.randn(64, 3, 5), torch.randint(T - 20, (64, 3))
    before = x0.clone(), noise.clone()
    a, s = diffusion.at(alpha, t, x0), diffusion.at(sigma, t, x0)
    x_t = a * x0 + s * noise
    target = diffusion.target(objective, x0, noise, a, s)
    torch.testing.assert_close(target, prediction_of(objective, x0, x_t, a, s), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(diffusion.to_x0(objective, target, x_t, a, s), x0, rtol=1e-3, atol=1e-3)
    assert torch.equal(x0, before[0]) and torch.equal(noise, before[1]), "the caller's tensors were written to"


def prediction_of(objective, x0, x_t, alpha, sigma):
    """What a network must predict at x_t to stand for x0."""
    return {"x0": x0, "epsilon": (x_t - alpha * x0) / sigma, "v": (alpha * x_t - x0) / sigma,
            "flow": (x_t - x0) / sigma}[objective]


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_min_snr_weighs_every_objective_alike(gamma, objective):
    """Weight times loss is min(SNR, γ) times the squared error in x0."""
    torch.manual_seed(0)
    a, s = (table.double()[:T - 5] for table in levels_of(objective))
    x0, noise, error = (torch.randn(len(a), dtype=torch.float64) for _ in range(3))
    x_t = a * x0 + s * noise
    prediction = prediction_of(objective, x0 + error, x_t, a, s)
    loss = (prediction - diffusion.target(objective, x0, noise, a, s)) ** 2
    slow = []
    for alpha, sigma, e in zip(a.tolist(), s.tolist(), error.tolist()):
        ratio = (alpha / sigma) ** 2
        slow.append(min(ratio, gamma) * e ** 2)
    weight = diffusion.loss_weight("min_snr", objective, a, s, gamma)
    slow = torch.tensor(slow, dtype=torch.float64)
    torch.testing.assert_close(weight * loss, slow, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
def test_weights_are_finite_at_every_level_also_of_pure_noise(objective):
    for name in ("flow", "cosine", "linear"):
        alpha, sigma = diffusion.levels(name, 1000)
        for kind in ("none", "min_snr", "cosmap", "sigma_sqrt"):
            weight = diffusion.loss_weight(kind, objective, alpha, sigma, 1.0)
            assert weight.isfinite().all() and (weight >= 0).all() and weight.shape == (1000,)


def test_weights_of_flow_follow_their_formulas():
    alpha, sigma = diffusion.levels("flow", 10)
    assert (diffusion.loss_weight("none", "flow", alpha, sigma, 5.0) == 1).all()
    weight = diffusion.loss_weight("sigma_sqrt", "flow", alpha, sigma, 5.0)
    assert weight.tolist() == pytest.approx([(10 / i) ** 2 for i in range(1, 11)])
    cosmap = diffusion.loss_weight("cosmap", "flow", *diffusion.levels("flow", 100_000), 5.0)
    assert cosmap.mean() == pytest.approx(1, abs=1e-3)  # it is a density on (0, 1)
    assert cosmap[49_999] == pytest.approx(4 / math.pi) and cosmap[-1] == pytest.approx(2 / math.pi)


def test_guidance_extrapolates_from_the_unconditional():
    c, u = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    for scale, expected in ((1.0, c), (0.0, u), (3.0, 3 * c - 2 * u)):
        torch.testing.assert_close(diffusion.guide(c, u, scale), expected)


def test_respaced_steps_run_from_the_noisiest_level_to_the_first():
    assert diffusion.respaced(1000, 1) == [999] and diffusion.respaced(5, 5) == [4, 3, 2, 1, 0]
    for steps in (2, 7, 64, 999, 1000):
        chosen = diffusion.respaced(1000, steps)
        assert chosen[0] == 999 and chosen[-1] == 0 and chosen == sorted(set(chosen), reverse=True)
        assert len(chosen) == steps


def test_the_network_is_given_the_level_its_input_is_at_and_its_last_prediction_is_returned():
    alpha, sigma = diffusion.levels("cosine", T)
    seen, secret = [], torch.full((3, 2), 0.25)

    def denoise(x, t):
        seen.append((x.clone(), t.tolist()))
        return secret

    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    out = diffusion.sample(denoise, start, alpha, sigma, 5, eta=0.0)
    assert torch.equal(out, secret)
    noise = (start - alpha[T - 1] * secret) / sigma[T - 1]
    for x, (t, *_) in seen:  # with one true x0 DDIM stays on the line of its noise, at the level it names
        torch.testing.assert_close(x, alpha[t] * secret + sigma[t] * noise, rtol=1e-4, atol=1e-4)
    assert [t for _, t in seen] == [[t] * 3 for t in diffusion.respaced(T, 5)]


def test_a_sample_has_the_same_noise_in_any_batch():
    whole = diffusion.noise_source([5, 6, 7], "cpu")
    alone = diffusion.noise_source([6], "cpu")
    first, second = whole(torch.zeros(3, 4)), whole(torch.zeros(3, 4))
    assert torch.equal(first[1:2], alone(torch.zeros(1, 4))) and torch.equal(second[1:2], alone(torch.zeros(1, 4)))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)


def test_flow_levels_run_to_pure_noise():
    alpha, sigma = diffusion.levels("flow", 4)
    assert sigma.tolist() == [0.25, 0.5, 0.75, 1] and alpha.tolist() == [0.75, 0.5, 0.25, 0]


def test_timesteps_are_made_of_torchs_own_draws():
    torch.manual_seed(3)
    ours = [diffusion.draw_timesteps(density, (5, 7), 1000, "cpu") for density in ("uniform", "logit_normal")]
    torch.manual_seed(3)
    assert torch.equal(ours[0], torch.randint(1000, (5, 7)))
    assert torch.equal(ours[1], (torch.randn(5, 7).sigmoid() * 1000).long())


@pytest.mark.parametrize("density, mean, std", [("logit_normal", 0.0, 1.0), ("logit_normal", 0.7, 0.5),
                                                ("mode", 0.0, 1.0)])
def test_timesteps_have_the_published_density(density, mean, std):
    torch.manual_seed(0)
    drawn = diffusion.draw_timesteps(density, (400, 500), 20, "cpu", mean, std)
    assert drawn.dtype == torch.int64 and drawn.shape == (400, 500) and drawn.min() >= 0 and drawn.max() <= 19
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # the times at all quantiles (SD3, Eq. 19 and 20)
    time = 1 - u - 1.29 * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
    time = torch.sigmoid(mean + std * torch.special.ndtri(u)) if density == "logit_normal" else time
    shares = torch.bincount(drawn.flatten(), minlength=20) / drawn.numel()
    assert (shares - torch.histc(time, 20, 0, 1) / len(time)).abs().sum() / 2 < 0.008  # 0.004 is usual for so many
    assert diffusion.draw_timesteps(density, (9,), 3, "cpu", 40.0).max() <= 2  # the sigmoid may round to 1


def test_dream_moves_input_and_target_along_the_networks_error():
    torch.manual_seed(0)
    alpha, sigma = (table[:, None] for table in diffusion.levels("cosine", T))
    x0, noise, predicted = (torch.randn(T, 3) for _ in range(3))
    x_t = alpha * x0 + sigma * noise
    before = x_t.clone(), noise.clone()
    moved, target = diffusion.dream(x_t, noise, predicted, sigma)
    torch.testing.assert_close(moved, alpha * x0 + sigma * target)  # still of x0, with that noise
    for t in (0, 50, T - 1):
        error = sigma[t].item() * (noise[t, 1].item() - predicted[t, 1].item())
        assert target[t, 1].item() == pytest.approx(noise[t, 1].item() + error, abs=1e-5)
    assert torch.equal(x_t, before[0]) and torch.equal(noise, before[1]), "the caller's tensors were written to"


@pytest.mark.parametrize("name", ["flow", "linear", "cosine"])
@pytest.mark.parametrize("steps", [7, T])
def test_ancestral_steps_are_bayes_posterior_for_any_levels(name, steps):
    """q(x_s | x_t, x0) by multiplying the Gaussians q(x_s | x0) and q(x_t | x_s), in float64."""
    alpha, sigma = diffusion.levels(name, T)
    torch.manual_seed(0)
    start, answers, draws, seen = torch.randn(2, 3), torch.randn(T, 2, 3), torch.randn(T, 2, 3), {}

    def denoise(x, t):
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


MEAN, STD = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.1])


def exact(alpha, sigma):
    """E[x0 | x_t] of the Gaussian with MEAN and STD, as a `denoise`."""
    def denoise(x, t):
        a, s = alpha[t, None], sigma[t, None]
        return MEAN + a * STD ** 2 / (a ** 2 * STD ** 2 + s ** 2) * (x - a * MEAN)
    return denoise


@pytest.mark.parametrize("name", ["cosine", "flow"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_sampling_a_gaussian_with_its_exact_denoiser_gives_that_gaussian(name, eta):
    torch.manual_seed(0)
    alpha, sigma = diffusion.levels(name, 1000)
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
        def denoise(x, t, fraction=fraction):
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


def correlated(alpha, sigma, rho):
    """E[x0 | x_t] of two standard normals with correlation rho."""
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]])

    def denoise(x, t):
        a, s = alpha[t[0]], sigma[t[0]]
        return x @ (a * covariance @ torch.linalg.inv(a ** 2 * covariance + s ** 2 * torch.eye(2))).T
    return denoise


def test_a_step_taken_again_starts_from_its_result_noised_again():
    alpha, sigma = diffusion.levels("linear", T)
    seen, (first, after) = [], diffusion.respaced(T, 2)
    diffusion.sample(lambda x, t: seen.append(x) or x, torch.ones(1, 1), alpha, sigma, 2, eta=0.0, draw=torch.ones_like,
                     known=torch.ones(1, 1), mask=torch.zeros(1, 1), resample=2)
    ratio = (alpha[first] / alpha[after]).item()  # DDPM's Eq. 1 over the levels between
    again = ratio * (alpha[after] + sigma[after] * (1 - alpha[first]) / sigma[first]).item() + math.sqrt(1 - ratio ** 2)
    assert seen[1].item() == pytest.approx(again, rel=1e-4)


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
    whole, free, none = (diffusion.sample(denoise, start, alpha, sigma, 5, eta=0.0, **inpainting) for inpainting in (
        {"known": known, "mask": torch.ones(3, 2, dtype=torch.bool)}, {}, {"known": known, "mask": torch.zeros(1, 1)}))
    assert torch.equal(whole, known) and torch.equal(none, free)


def test_variational_bound_is_the_kl_of_the_two_gaussians():
    torch.manual_seed(0)
    beta = diffusion.betas("linear", T)
    bar = torch.cumprod(1 - beta, 0)
    alpha, sigma = diffusion.levels("linear", T)
    t = torch.arange(1, T)
    x0, guess = torch.rand(T - 1, 2, 3) * 2 - 1, torch.rand(T - 1, 2, 3) * 2 - 1
    fraction, x_t = torch.rand(T - 1, 2, 3), torch.randn(T - 1, 2, 3)
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
            edges = [-3.0 if i == 0 else pixels[i] - 1 / 255, 3.0 if i == 255 else pixels[i] + 1 / 255]
            low, high = torch.distributions.Normal(guess, std).cdf(torch.tensor(edges, dtype=torch.float64))
            assert float(mass[i]) == pytest.approx(float(high - low), rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("name", ["linear", "cosine", "flow"])
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


@pytest.mark.parametrize("settings, needed, message", [
    ({"noise_schedule": "linear"}, {"objective": "v"}, "an objective other than flow, which has its own levels"),
    ({"loss_gamma": 1.0}, {"loss_weight": "min_snr"}, "--loss_weight min_snr"),
    ({"dream": True}, {"objective": "epsilon"}, "--objective epsilon"),
    ({"density_mean": 1.0}, {"timestep_density": "logit_normal"}, "--timestep_density logit_normal"),
    ({"density_std": 2.0}, {"timestep_density": "logit_normal"}, "--timestep_density logit_normal"),
    ({"loss_weight": "cosmap"}, {"objective": "flow"}, "--objective flow"),
    ({"loss_weight": "sigma_sqrt"}, {"objective": "flow"}, "--objective flow"),
    ({"lora_rank": 4}, {"init_from": "model.pt"}, "with --init_from")])
def test_a_setting_without_effect_is_refused_with_what_it_needs(settings, needed, message):
    diffusion.Training(**settings, **needed)
    others = {"objective": "flow"} if "noise_schedule" in settings else {}
    with pytest.raises(UserError, match=f"--{next(iter(settings))}.*: .*{message}"):
        diffusion.Training(**settings, **others)


def test_steps_and_guidance_are_those_that_a_model_can_be_sampled_with():
    learned, never = (diffusion.Training(text_drop=drop, timesteps=50) for drop in (0.1, 0.0))
    for scale, steps in ((1, 1), (0, 50), (3, 7)):
        diffusion.check_sampling(learned, scale, steps)
    diffusion.check_sampling(never, 1, 50)
    for cfg, scale, steps, message in ((learned, 1, 0, "0 sampling steps: expected 1 to 50"),
                                       (learned, 1, 51, "51 sampling steps"), (never, 0, 5, "with --text_drop 0, so"),
                                       (never, 2, 5, "with --text_drop 0, so")):
        with pytest.raises(UserError, match=message):
            diffusion.check_sampling(cfg, scale, steps)


class Numbers:
    """A source of eleven rows, each its number, and two more that are not to be taken."""

    def fetch(self, rows, draws=None):
        return {"values": torch.from_numpy(rows).float()}, np.ones(len(rows), bool)


def mean_loss(training):
    """What a rank finds of 11 rows in batches of 3; the loss of a batch is the mean of its rows, and some noise."""
    model, cfg = torch.nn.Dropout().train(training), diffusion.Training(seed=3, chunk_size=3, eval_samples=11)
    def loss_of(batch):
        assert not model.training and not torch.is_grad_enabled()
        return batch["values"].mean() + torch.rand(())
    return diffusion.mean_loss(model, loss_of, Numbers(), np.arange(13), cfg, torch.device("cpu")), model.training


def test_the_mean_loss_is_that_of_all_rows_on_any_number_of_ranks_and_the_mode_is_as_before(on_ranks):
    total = 55.0
    for number, size in enumerate((3, 3, 3, 2)):
        accumulate.seed(3, "loss", number)
        total += torch.rand(()).item() * size
    expected = pytest.approx(total / 11, rel=1e-6)
    assert [mean_loss(True), *on_ranks(2, mean_loss, False)] == [(expected, True), *[(expected, False)] * 2]
