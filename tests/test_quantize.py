"""The residual quantizer, against brute force and formulas, for any chunks and number of ranks."""
import pytest
import torch
from torch.testing import assert_close

from common import dist
from common.ema import EMA
from common.quantize import ResidualQuantizer, kmeans, nearest


def latents(batch=8, frames=20, seed=1):
    return torch.randn(batch, frames, 6, generator=torch.Generator().manual_seed(seed))


def make(ready=True, width=6, quantizers=3, codebook_size=16, dead_below=20.125, **settings):
    """A quantizer whose codes stand for 25 vectors each on average, of which some die in the next update."""
    quantizer = ResidualQuantizer(width, quantizers, codebook_size, dead_below=dead_below, **settings)
    if ready:
        quantizer.initialize(latents(20).flatten(0, 1), seed=0)
    return quantizer


def residuals(quantizer, z):
    """What none, the first, the first two and all quantizers leave of z (B, T, D): (Q + 1, B, T, D)."""
    codes = quantizer.encode(z)
    return torch.stack([z] + [z - quantizer.decode(codes[..., :n]) for n in (1, 2, 3)])


def buffers(quantizer):
    return {name: tensor.clone() for name, tensor in quantizer.named_buffers()}


def after_a_step(quantizer, seed=0):
    quantizer.train()(latents())
    quantizer.update(seed)
    return buffers(quantizer)


def test_kmeans_finds_well_separated_blobs_and_repeats_bit_for_bit_by_seed():
    places = 100 * torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    blobs = places[:, None] + torch.randn(32, 20, 4, generator=torch.Generator().manual_seed(1))
    runs = [kmeans(blobs.flatten(0, 1), 32, torch.Generator().manual_seed(seed), rounds=2) for seed in (0, 0, 1)]
    for centers, counts in runs:
        assert counts.tolist() == [20] * 32
        assert_close(centers[torch.cdist(places, centers).argmin(1)], blobs.mean(1))
    assert torch.equal(runs[0][0], runs[1][0]) and not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("draw", [0.0, 1 - 2 ** -53])  # the two ends of what a generator gives
def test_kmeans_starts_from_distinct_vectors_while_there_are_any(monkeypatch, draw):
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), draw, dtype=torch.float64))
    x = torch.tensor([7.0, 0.1, 7.0, 7.0, 0.1, 7.0, 3.3])[:, None]
    centers, counts = kmeans(x, 6, torch.Generator())
    used = zip(centers[counts > 0].flatten().tolist(), counts[counts > 0].tolist())
    assert sorted(used) == [(x[1], 2), (x[6], 1), (x[0], 4)] and torch.isin(centers, x).all()


def test_the_nearest_codes_are_found_in_full_precision_and_in_slabs(monkeypatch):
    x, codebook = 100 + latents(2000)[..., :2].flatten(0, 1), 100 + latents(50)[..., 2:4].flatten(0, 1)
    precision, addmm, seen = torch.get_float32_matmul_precision, torch.addmm, []
    monkeypatch.setattr(torch, "addmm", lambda *args, alpha: seen.append(precision()) or addmm(*args, alpha=alpha))
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", torch.bfloat16):  # which cannot tell these vectors from one another
        codes = nearest(x, codebook)
    assert seen == ["highest"] * 3 and precision() == "high"  # three slabs
    torch.set_float32_matmul_precision("highest")
    distances = torch.cdist(x, codebook, compute_mode="donot_use_mm_for_euclid_dist")
    assert (distances.gather(1, codes[:, None])[:, 0] - distances.amin(1)).max() < 0.1


def test_each_quantizer_codes_what_those_before_it_leave():
    quantizer, z = make(), latents()
    codes, left = quantizer.encode(z), residuals(quantizer, z)
    assert_close(codes.flatten(0, 1).T, torch.cdist(left[:-1].flatten(1, 2), quantizer.codebook).argmin(-1))
    assert all(torch.equal(quantizer.encode(z, n), codes[..., :n]) for n in (1, 2, 3))
    assert (left[1:].square().mean((1, 2, 3)) < 0.8 * left[:-1].square().mean((1, 2, 3))).all()  # the error falls


def test_the_gradient_goes_straight_through_and_the_commitment_pulls_z_to_its_codes():
    quantizer, z, direction = make(), latents().requires_grad_(), latents(seed=2)
    quantized, _, loss = quantizer(z)
    assert_close(torch.autograd.grad(quantized, z, direction)[0], direction, rtol=0, atol=0)
    assert_close(torch.autograd.grad(loss, z)[0], residuals(quantizer, z)[1:].sum(0) * 2 / 3 / z.numel())
    assert_close(loss, sum(quantizer(chunk)[2] * len(chunk) / 8 for chunk in z.split(3)))
    assert quantizer(z.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.7, 1.0])
def test_dropout_uses_the_first_n_quantizers_and_the_loss_is_the_mean_of_the_samples(dropout):
    quantizer, z = make(dropout=dropout), latents(batch=400, frames=2)
    torch.manual_seed(0)
    quantized, codes, loss = quantizer(z)
    assert torch.equal(codes, quantizer.encode(z))
    left = residuals(quantizer, z)[1:]
    n = (left - (z - quantized)).abs().amax((2, 3)).argmin(0) + 1  # (B,), how many quantizers each sample uses
    assert_close(left[n - 1, torch.arange(400)], z - quantized)
    expected = torch.tensor([dropout / 3, dropout / 3, 1 - dropout * 2 / 3])
    assert_close(torch.bincount(n, minlength=4)[1:] / 400, expected, rtol=0, atol=0.07)
    assert_close(loss, torch.stack([left[:n[b], b].square().mean() for b in range(400)]).mean())
    assert quantizer.pending_count.sum(-1).tolist() == [2 * (n > q).sum() for q in range(3)]
    assert_close(quantizer.eval()(z)[0], z - left[2])


def test_codebooks_are_moving_averages_over_all_chunks_and_unused_quantizers_stay():
    quantizer, z = make(decay=0.9, dead_below=0.0), latents(8, 1)
    quantizer.ema_count, quantizer.ema_sum = quantizer.ema_count / 1000, quantizer.ema_sum / 1000  # smoothing matters
    quantizer.codebook[:, 0], quantizer.ema_count[:, 0], quantizer.ema_sum[:, 0] = 100, 0, 0  # dead, but not replaced
    before = {name: tensor.double() for name, tensor in buffers(quantizer).items()}
    assert_close(before["ema_sum"], before["codebook"] * before["ema_count"][..., None])
    hits = torch.nn.functional.one_hot(quantizer.encode(z), 16).double()  # (B, T, Q, K)
    count = 0.9 * before["ema_count"] + 0.1 * hits.sum((0, 1))
    total = 0.9 * before["ema_sum"] + 0.1 * torch.einsum("btqk,qbtd->qkd", hits, residuals(quantizer, z)[:-1].double())
    for chunk in z.split(5):
        quantizer(chunk)
    quantizer.pending_count[2] = quantizer.pending_sum[2] = 0  # as if dropout had always left out the last quantizer
    quantizer.update(0)
    smoothed = (count + 1e-5) / (count.sum(-1, keepdim=True) + 16e-5) * count.sum(-1, keepdim=True)
    for name, value in dict(ema_count=count, ema_sum=total, codebook=total / smoothed[..., None]).items():
        assert_close(getattr(quantizer, name)[:2], value[:2].float(), rtol=1e-5, atol=1e-5)
        assert_close(getattr(quantizer, name)[2], before[name][2].float(), rtol=0, atol=0)
    assert (quantizer.ema_count[:2, 0] == 0).all()


def test_dead_codes_become_vectors_of_the_first_chunk_with_a_count_of_the_threshold():
    quantizer, z = make(), latents(1)
    given = residuals(quantizer, z)[:-1]  # (Q, 1, T, D)
    quantizer(z)
    quantizer(z + 1)
    quantizer.update(seed=0)
    dead = quantizer.ema_count == 20.125
    distances = (quantizer.codebook[:, :, None] - given).abs().amax(-1).amin(-1)  # (Q, K)
    assert torch.equal(distances < 1e-5, dead) and dead.any(1).all() and not dead.all()
    assert (quantizer.ema_count >= 20.125).all() and len(quantizer.codebook[dead].unique(dim=0)) == dead.sum()
    assert_close(quantizer.ema_sum[dead], 20.125 * quantizer.codebook[dead])
    assert not torch.equal(*(after_a_step(make(), seed)["codebook"] for seed in (0, 1)))  # the seed draws


def train(world_size):
    """The state after three steps on eight samples in three chunks, which the ranks take in turn."""
    quantizer = make(ready=False)
    quantizer.initialize(latents(20 - 19 * dist.rank(), seed=dist.rank()).flatten(0, 1), seed=dist.rank())  # rank 0's
    for step in range(3):
        for chunk in latents(seed=step).split(3)[dist.rank()::world_size]:
            quantizer(chunk)
        quantizer.update(step)
    return {name: tensor.numpy() for name, tensor in quantizer.state_dict().items()}


def test_codebooks_are_equal_on_all_ranks_and_the_same_for_any_number_of_them(on_ranks):
    first, second = on_ranks(2, train, 2)
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first, train(1))
    assert first["initialized"] and (first["ema_count"] >= 20.125).any()


def test_passes_without_gradients_or_training_and_discarded_steps_leave_no_trace():
    quantizer, z = make(), latents()
    before = buffers(quantizer)
    quantizer(z + 1)
    quantizer.discard()
    quantizer.update(0)  # of nothing
    with torch.no_grad():
        quantizer(z + 1)
    quantizer.eval()(z + 1)
    assert_close(buffers(quantizer), before, rtol=0, atol=0)
    assert quantizer._candidates is None
    assert_close(after_a_step(quantizer), after_a_step(make()), rtol=0, atol=0)


def test_before_initialization_z_passes_and_nothing_counts():
    quantizer, z = make(ready=False), latents().requires_grad_()
    quantized, codes, loss = quantizer(z)
    assert torch.equal(quantized, z) and codes.shape == (8, 20, 3) and not codes.any() and loss == 0
    assert torch.equal(torch.autograd.grad(quantized.sum() + loss, z)[0], torch.ones_like(z))
    assert not any(tensor.any() for tensor in after_a_step(quantizer).values())
    quantizer(z + 1)
    quantizer.initialize(latents(20).flatten(0, 1), seed=0)
    assert_close(after_a_step(quantizer), after_a_step(make()), rtol=0, atol=0)


def test_being_ready_survives_state_dicts_and_ema_copies():
    quantizer, loaded, averaged = make(), make(ready=False), make(ready=False)
    assert set(quantizer.state_dict()) == {"initialized", "codebook", "ema_count", "ema_sum"} and not loaded.ready
    loaded.load_state_dict(quantizer.state_dict())
    EMA(quantizer).copy_to(averaged)
    for copy in (loaded, averaged):
        assert copy.ready
        assert_close(after_a_step(copy), after_a_step(make()), rtol=0, atol=0)
