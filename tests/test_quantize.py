"""The residual quantizer, compared with brute force and formulas, for any chunks and ranks."""
import pytest
import torch
from helpers import same
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from common import dist
from common.ema import EMA
from common.models.quantize import ResidualQuantizer, kmeans, nearest_codes


def latents(batch=8, frames=20, width=6, seed=1):
    return torch.randn(batch, frames, width, generator=torch.Generator().manual_seed(seed))


def make(ready=True, decay=0.95, dead_below=0.8, per_step=400):
    """A quantizer with 3 codebooks of 16 codes; with 25 vectors per code, some die in an update."""
    quantizer = ResidualQuantizer(6, 3, 16, decay, dead_below)
    if ready:
        quantizer.initialize(latents(20).flatten(0, 1), seed=0, per_step=per_step)
    return quantizer


def residuals(quantizer, z):
    """The residuals of z (B, T, D) after 0, 1, 2 and 3 quantizers: (Q + 1, B, T, D)."""
    codes = quantizer.encode(z)
    decoded = [quantizer.decode(codes[..., :n]) for n in (1, 2, 3)]
    return torch.stack([z, *[z - vectors for vectors in decoded]])


def buffers(quantizer):
    return {name: tensor.clone() for name, tensor in quantizer.named_buffers()}


def after_a_step(quantizer):
    torch.manual_seed(0)
    quantizer.train()(latents())
    quantizer.update(seed=0)
    return buffers(quantizer)


@pytest.fixture
def no_dropout(monkeypatch):
    def most(low, high, size, device):
        return torch.full(size, high - 1)

    monkeypatch.setattr(torch, "randint", most)


def test_kmeans_finds_well_separated_blobs_and_repeats_bit_for_bit_by_seed():
    means = 100 * latents(32, 1, seed=0)
    blobs = means + latents(32, 20)
    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        centers, counts = kmeans(blobs.flatten(0, 1), 32, generator, rounds=2)
        runs.append(centers)
    assert torch.equal(*runs)
    assert counts.tolist() == [20] * 32
    nearest = torch.cdist(means[:, 0], centers).argmin(1)
    assert_close(centers[nearest], blobs.mean(1))


def test_the_nearest_codes_are_found_in_full_precision():
    x = 100 + latents(1000, width=2).flatten(0, 1)
    codebook = 100 + latents(50, width=2, seed=2).flatten(0, 1)
    with torch.autocast("cpu", torch.bfloat16):  # bfloat16 cannot tell these vectors apart
        codes = nearest_codes(x, codebook)
    distances = (x[:, None] - codebook).square().sum(-1)
    found = distances.gather(1, codes[:, None])[:, 0]
    assert (found - distances.amin(1)).max() < 0.02  # distances have rounding errors of 0.002


def test_each_quantizer_codes_what_those_before_it_leave_over():
    quantizer = make()
    z = latents()
    left = residuals(quantizer, z)
    distances = torch.cdist(left[:-1].flatten(1, 2), quantizer.codebook)
    assert_close(quantizer.encode(z).flatten(0, 1).T, distances.argmin(-1))
    errors = left.square().mean((1, 2, 3))
    assert (errors[1:] < 0.8 * errors[:-1]).all()


def test_the_gradient_goes_straight_through_and_the_commitment_pulls_z_to_its_codes():
    quantizer = make().eval()
    z = latents().requires_grad_()
    direction = latents(seed=2)
    quantized, _, loss = quantizer(z)
    assert same(torch.autograd.grad(quantized, z, direction)[0], direction)
    expected = residuals(quantizer, z)[1:].sum(0) * 2 / 3 / z.numel()
    assert_close(torch.autograd.grad(loss, z)[0], expected)
    assert quantizer(z.bfloat16())[0].dtype == torch.bfloat16


def test_training_uses_the_first_n_quantizers_and_the_loss_is_the_mean_of_the_samples():
    quantizer = make()
    z = latents(batch=400, frames=2)
    torch.manual_seed(0)
    quantized, codes, loss = quantizer(z)
    assert torch.equal(codes, quantizer.encode(z))
    left = residuals(quantizer, z)[1:]
    # The number of quantizers that each sample uses, (B,).
    n = (left - (z - quantized)).abs().amax((2, 3)).argmin(0) + 1
    samples = torch.arange(400)
    assert_close(left[n - 1, samples], z - quantized)
    assert (torch.bincount(n, minlength=4)[1:] > 100).all()
    losses = [left[:n[b], b].square().mean() for b in samples]
    assert_close(loss, torch.stack(losses).mean())
    counts = quantizer.pending[..., 0].sum(-1)
    assert counts.tolist() == [2 * (n > q).sum() for q in range(3)]
    assert_close(quantizer.eval()(z)[0], z - left[2])


def test_codebooks_are_moving_averages_over_all_chunks_and_unused_quantizers_stay(no_dropout):
    quantizer = make(decay=0.9, dead_below=0.0, per_step=0.4)  # small counts, so smoothing matters
    assert_close(quantizer.ema_count.sum(-1), torch.full((3,), 0.4))
    z = latents(8, 1)
    quantizer.ema_count[:, 0] = 0  # dead, but not replaced
    before = {name: tensor.double() for name, tensor in buffers(quantizer).items()}
    hits = torch.nn.functional.one_hot(quantizer.encode(z), 16).double()  # (B, T, Q, K)
    inputs = residuals(quantizer, z)[:-1].double()
    for chunk in z.split(5):
        quantizer(chunk)
    quantizer.pending[2] = 0  # as if dropout had always dropped the last quantizer
    quantizer.update(0)

    count = 0.9 * before["ema_count"] + 0.1 * hits.sum((0, 1))
    total = 0.9 * before["ema_sum"] + 0.1 * torch.einsum("btqk,qbtd->qkd", hits, inputs)
    all_counts = count.sum(-1, keepdim=True)
    smoothed = (count + 1e-5) / (all_counts + 16e-5) * all_counts
    expected = dict(ema_count=count, ema_sum=total, codebook=total / smoothed[..., None])
    for name, value in expected.items():
        ours = quantizer.get_buffer(name).double()
        assert_close(ours[:2], value[:2], rtol=1e-5, atol=1e-5)
        assert same(ours[2], before[name][2])


def test_codes_used_less_than_a_share_of_the_mean_become_vectors_of_the_first_chunk(no_dropout):
    quantizer = make()
    z = latents(1)
    inputs = residuals(quantizer, z)[:-1]  # (Q, 1, T, D)
    quantizer(z)
    quantizer(z + 1)
    undisturbed = make(dead_below=0)
    undisturbed.pending.copy_(quantizer.pending)
    undisturbed.update(seed=0)
    least = 0.8 * undisturbed.ema_count.mean(1, keepdim=True)  # (Q, 1)
    quantizer.update(seed=0)
    dead = undisturbed.ema_count < least
    assert dead.any(1).all() and not dead.all()
    distances = (quantizer.codebook[:, :, None] - inputs).abs().amax(-1).amin(-1)  # (Q, K)
    assert torch.equal(distances < 1e-5, dead)
    assert_close(quantizer.ema_count, undisturbed.ema_count.maximum(least))
    replaced = quantizer.codebook[dead]
    assert len(replaced.unique(dim=0)) == len(replaced)
    assert_close(quantizer.ema_sum[dead], quantizer.ema_count[dead][:, None] * replaced)


def train(world_size):
    """The state after three steps on eight samples in three chunks, distributed over the ranks."""
    quantizer = make(ready=False)
    rank = dist.rank()
    z = latents(20 - 19 * rank, seed=rank)  # only rank 0's are used
    quantizer.initialize(z.flatten(0, 1), seed=rank, per_step=400)
    for step in range(3):
        chunks = latents(seed=step).split(3)
        for number in range(rank, 3, world_size):
            torch.manual_seed(number)
            quantizer(chunks[number])
        quantizer.update(step)
    return quantizer.state_dict()


def test_codebooks_are_equal_on_all_ranks_and_the_same_for_any_number_of_them(on_ranks):
    first, second = on_ranks(2, train, 2)
    assert same(first, second)
    assert_close(first, train(1))
    assert (first["ema_count"] >= 12).any()


def test_passes_without_gradients_or_training_and_discarded_steps_leave_no_trace():
    quantizer = make()
    z = latents() + 1
    quantizer(z)
    quantizer.discard()
    quantizer.update(0)  # without statistics
    with torch.no_grad():
        quantizer(z)
    quantizer.eval()(z)
    assert same(buffers(quantizer), buffers(make()))
    assert same(after_a_step(quantizer), after_a_step(make()))


def test_before_initialization_z_passes_and_nothing_counts():
    quantizer = make(ready=False)
    z = latents().requires_grad_()
    quantized, codes, loss = quantizer(z)
    assert torch.equal(quantized, z) and loss == 0
    assert codes.shape == (8, 20, 3) and not codes.any()
    gradient, = torch.autograd.grad(quantized.sum() + loss, z)
    assert (gradient == 1).all()
    assert not any(tensor.any() for tensor in after_a_step(quantizer).values())
    quantizer(z + 1)
    quantizer.initialize(latents(20).flatten(0, 1), seed=0, per_step=400)
    assert same(after_a_step(quantizer), after_a_step(make()))


def test_being_ready_survives_state_dicts_and_ema_copies():
    quantizer = make()
    loaded = make(ready=False)
    averaged = make(ready=False)
    assert not loaded.ready
    loaded.load_state_dict(quantizer.state_dict())
    EMA(quantizer).copy_to(averaged)
    for copy in (loaded, averaged):
        assert copy.ready
        assert same(after_a_step(copy), after_a_step(make()))


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_products_are_in_full_precision_and_leave_the_programs_as_it_was(precision):
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.addmm:
                seen.append(torch.get_float32_matmul_precision())
            return function(*args, **(kwargs or {}))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with Watch():
            nearest_codes(torch.randn(5, 2), torch.randn(3, 2))
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"] and after == precision


def test_the_averages_start_as_the_data_with_the_weight_of_one_step():
    quantizer = make(ready=False)
    z = 3 + latents(20).flatten(0, 1)
    quantizer.initialize(z, seed=0, per_step=50)
    assert_close(quantizer.ema_count.sum(-1), torch.full((3,), 50.0))
    left = z
    for q, codebook in enumerate(quantizer.codebook):
        assert_close(quantizer.ema_sum[q].sum(0), 50 * left.mean(0), rtol=1e-3, atol=1e-3)
        left = left - codebook[torch.cdist(left, codebook).argmin(1)]


def test_centers_without_vectors_stay_where_they_began():
    points = torch.tensor([[1.0, 2.0], [30.0, 40.0]])
    centers, counts = kmeans(points.repeat(9, 1), 5, torch.Generator().manual_seed(0))
    assert sorted(counts.tolist()) == [0, 0, 0, 9, 9]
    assert torch.equal(centers.unique(dim=0), points)


def test_kmeans_ends_where_every_center_is_the_mean_of_its_vectors():
    for seed in range(25):  # for some seeds, a center loses all vectors but one
        x = latents(30, 1, width=2, seed=seed).flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        centers, counts = kmeans(x, 12, generator, rounds=30)
        nearest = torch.cdist(x, centers).argmin(1)
        assert torch.equal(counts, nearest.bincount(minlength=12))
        means = torch.stack([x[nearest == k].mean(0) for k in range(12)])
        assert_close(centers, means)


def test_files_hold_the_codebooks_and_their_averages_alone():
    saved = make().state_dict()
    assert {*saved} == {"initialized", "codebook", "ema_count", "ema_sum"}


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_vector_far_from_all_others_becomes_a_center_wherever_it_stands(place):
    x = torch.zeros(20, 3)
    x[place] = 50.0
    for seed in range(5):
        centers, counts = kmeans(x, 2, torch.Generator().manual_seed(seed), rounds=1)
        assert sorted(centers[:, 0].tolist()) == [0, 50]
        assert sorted(counts.tolist()) == [1, 19]


def test_no_more_codes_are_replaced_than_there_are_candidates_and_none_is_taken_twice(no_dropout):
    quantizer = make(dead_below=1e9)  # all are dead
    z = latents(1)[:, :5]
    inputs = residuals(quantizer, z)[:-1]  # (Q, 1, 5, D)
    undisturbed = make(dead_below=0)
    for each in (quantizer, undisturbed):
        each(z)
        each.update(seed=0)
    for q in range(3):
        codes = quantizer.codebook[q]
        taken = (codes[:, None] - inputs[q]).abs().amax(-1) < 1e-5  # (K, 5)
        assert taken.sum(0).tolist() == [1] * 5
        rest = ~taken.any(1)
        assert torch.equal(codes[rest], undisturbed.codebook[q][rest])
