"""The residual quantizer: against brute force and formulas by hand, for any cutting into chunks and number of ranks."""
import copy
import itertools

import numpy as np
import pytest
import torch

from common import checkpoint, dist
from common.config import UserError
from common.quantize import ResidualQuantizer, kmeans, nearest, uniform_grid


def make(width=6, quantizers=3, codebook_size=16, seed=0, ready=True, **more):
    torch.manual_seed(seed)
    quantizer = ResidualQuantizer(width, quantizers, codebook_size, **more)
    if ready:
        quantizer.initialize(torch.randn(400, width), seed)
    return quantizer


def samples(batch=8, frames=20, width=6, seed=1):
    return torch.randn(batch, frames, width, generator=torch.Generator().manual_seed(seed))


def vectors(quantizer, name="codebook"):
    """A view (Q, G, K, d) of the vectors of quantizers that have as many groups each."""
    return getattr(quantizer, name).view(quantizer.quantizers, quantizer.groups[0], quantizer.codebook_size, -1)


def counts_of(quantizer):
    """A view (Q, G, K) of their counts."""
    return vectors(quantizer, "ema_count")[..., 0]


def state(quantizer):
    """Everything that could change, pending statistics and candidates included."""
    held = {name: tensor.clone() for name, tensor in quantizer.named_buffers()}
    return {**held, "candidates": quantizer._candidates}


def same(one, other):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one.values(), other.values()))


KINDS = [dict(), dict(groups=2), dict(groups=(1, 3, 2)), dict(groups=(1, 3, 6), uniform=True)]


@pytest.mark.parametrize("more", KINDS, ids=str)
def test_decoded_codes_equal_the_forward_pass_with_as_many_quantizers(more):
    quantizer, z = make(**more).eval(), samples()
    ends, every = list(itertools.accumulate(quantizer.groups)), quantizer.encode(z)
    assert every.shape == (8, 20, ends[-1]) and every.dtype == torch.int64 and quantizer.ends == ends
    assert every.min() >= 0 and every.max() < quantizer.codebook_size
    for count in (1, 2, 3):
        quantized, codes, _ = quantizer(z, count)
        torch.testing.assert_close(quantizer.encode(z, count), codes, rtol=0, atol=0)
        torch.testing.assert_close(every[..., :ends[count - 1]], codes, rtol=0, atol=0)  # any prefix is a description
        torch.testing.assert_close(quantizer.decode(codes), quantized, rtol=0, atol=0)
        added = sum(part[codes[..., c]] for c, part in zip(range(ends[count - 1]), quantizer.vectors()))
        torch.testing.assert_close(added, quantized, rtol=1e-5, atol=1e-5)
    assert quantizer.vectors().shape[:2] == (ends[-1], quantizer.codebook_size)


@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 2, 2), (1, 3, 2)])
def test_codes_are_the_nearest_of_each_residual(groups):
    quantizer, z = make(groups=groups), samples()
    codes, residual, column = quantizer.encode(z), z, 0
    for q, number in enumerate(groups):
        parts = []
        # a quantizer's vectors lie flat: group after group, code after code
        books = quantizer.codebook[q].reshape(number, 16, 6 // number)
        for part, book in zip(residual.chunk(number, dim=-1), books):
            expected = (part[..., None, :] - book).square().sum(-1).argmin(-1)
            torch.testing.assert_close(codes[..., column], expected, rtol=0, atol=0)
            parts.append(book[expected])
            column += 1
        residual = residual - torch.cat(parts, dim=-1)


@pytest.mark.parametrize("more", KINDS, ids=str)
def test_error_falls_with_every_further_quantizer(more):
    if isinstance(more.get("groups"), tuple):
        more = dict(more, groups=(*more["groups"], 6))
    quantizer, z = make(**more, quantizers=4), samples()
    codes = quantizer.encode(z)
    errors = [z.square().mean()] + [(quantizer.decode(codes[..., :n]) - z).square().mean()
                                    for n in quantizer.ends]
    assert all(after < 0.8 * before for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.12 * errors[0]


def test_kmeans_finds_clusters_that_random_picks_miss_and_uses_every_code():
    generator = torch.Generator().manual_seed(0)
    places = 10 * torch.randn(32, 4, generator=generator)
    x = (places[:, None] + 0.05 * torch.randn(32, 20, 4, generator=generator)).flatten(0, 1)[None]  # (1, 640, 4)
    centers, counts = kmeans(x, 32, generator)
    assert counts.tolist() == [[20.0] * 32]
    error = torch.cdist(x, centers).amin(-1).square().mean()
    picks = x[:, torch.randperm(640, generator=generator)[:32]]
    assert error < 0.01 * torch.cdist(x, picks).amin(-1).square().mean()
    # 32 clusters found as they are: the nearest place of each center is another one
    assert torch.cdist(centers, places[None]).argmin(-1).unique().numel() == 32


def test_initialization_repeats_bit_for_bit_counts_what_it_saw_and_asks_for_enough_vectors():
    first, second = make(), make()
    assert same(state(first), state(second))
    assert first.ema_count.sum(-1).tolist() == [400.0] * 3
    torch.testing.assert_close(vectors(first, "ema_sum"), vectors(first) * counts_of(first)[..., None])
    with pytest.raises(ValueError, match="15 vectors to start 16 codes"):
        first.initialize(torch.randn(15, 6), 0)


def test_codebooks_move_as_the_formula_by_hand_says():
    quantizer, z = make(quantizers=1, decay=0.9, dead_below=0), samples()
    counts, sums = quantizer.ema_count[0].clone(), vectors(quantizer, "ema_sum")[0, 0].clone()
    for step in range(3):
        x = z + step
        codes = quantizer.encode(x).flatten()
        quantizer(x)
        quantizer.update(step)
        for k in range(16):
            mine = x.flatten(0, 1)[codes == k]
            counts[k] = 0.9 * counts[k] + 0.1 * len(mine)
            sums[k] = 0.9 * sums[k] + 0.1 * mine.sum(0)
        smoothed = (counts + 1e-5) / (counts.sum() + 16e-5) * counts.sum()
        torch.testing.assert_close(quantizer.ema_count[0], counts)
        torch.testing.assert_close(vectors(quantizer)[0, 0], sums / smoothed[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("levels, step", [(3, 1.2240), (5, 0.8430), (9, 0.5338), (17, 0.3164)])  # Max 1960, Table II
def test_a_grid_is_as_wide_as_is_best_for_its_levels(levels, step):
    grid = uniform_grid(levels, 1)
    x = torch.randn(1, 100_000, 1, generator=torch.Generator().manual_seed(0))

    def error(points):
        return (x - points[nearest(x, points[None])[0]]).square().mean()
    places = torch.arange(levels) - levels // 2
    torch.testing.assert_close(grid[:, 0], step * places, rtol=0.06, atol=1e-6)
    assert error(grid) < 1.02 * error(step * places[:, None])
    assert error(grid) < min(error(0.7 * grid), error(1.4 * grid))


def test_grids_have_as_many_points_as_fit_and_one_in_the_middle():
    for size, width, levels in ((256, 2, [17, 15]), (256, 1, [255]), (16, 2, [5, 3]), (27, 3, [3, 3, 3])):
        grid = uniform_grid(size, width)
        assert grid.shape == (size, width) and (grid[:np.prod(levels)] == 0).all(1).sum() == 1
        assert [len(column.unique()) for column in grid.T] == levels
        assert len(grid.unique(dim=0)) == np.prod(levels) and (grid[np.prod(levels):] == 0).all()
        assert nearest(torch.zeros(1, 1, width), grid[None]) < np.prod(levels)  # those to spare are never found
    with pytest.raises(ValueError, match=r"codebook_size 16: grids of groups of 3 channels have 3\^3 points or more"):
        make(groups=2, uniform=True)


def test_grids_start_as_wide_as_each_channel_is():
    quantizer, z = make(quantizers=1, groups=3, uniform=True, ready=False), samples() * torch.arange(1, 7)
    quantizer.initialize(z.flatten(0, 1), seed=0)
    wanted = uniform_grid(16, 2) * z.square().mean((0, 1)).sqrt().view(3, 1, 2)
    torch.testing.assert_close(vectors(quantizer)[0], wanted)


def test_grids_follow_the_width_of_what_is_left_and_their_codes_do_not_die():
    quantizer, z = make(quantizers=1, groups=3, uniform=True, decay=0.9, dead_below=1e9), samples()
    power, mass = 400 * torch.randn(400, 6, generator=torch.Generator().manual_seed(0)).square().mean(0), 400.0
    torch.testing.assert_close(vectors(quantizer, "ema_sum").sum(2).flatten(), power)  # what `make` started it with
    for step in range(3):
        x = (1 + step) * z * torch.tensor([0.1, 1, 2, 3, 4, 5])
        codes, parts = quantizer.encode(x).flatten(0, 1), x.reshape(-1, 3, 2)
        torch.testing.assert_close(codes, torch.cdist(parts.transpose(0, 1), vectors(quantizer)[0]).argmin(-1).T)
        quantizer(x)
        quantizer.update(step)
        power, mass = 0.9 * power + 0.1 * x.square().sum((0, 1)), 0.9 * mass + 0.1 * 160
        wanted = uniform_grid(16, 2) * (power / mass).sqrt().view(3, 1, 2)
        torch.testing.assert_close(vectors(quantizer)[0], wanted)


def kill(quantizer):
    """Move some codes where no vector is, and let them have none on average either."""
    with torch.no_grad():
        for q, number in enumerate(quantizer.groups):
            quantizer.codebook[q].view(number, quantizer.codebook_size, -1)[:, q:q + 5] = 100.0
            quantizer.ema_count[quantizer.ends[q] - number:quantizer.ends[q], q:q + 5] = 0.01
            quantizer.ema_sum[q].view(number, quantizer.codebook_size, -1)[:, q:q + 5] = 1.0


def train(world_size, chunk, killed, groups=2, uniform=False, steps=3):
    """The persistent state after `steps` steps on a batch of 8, cut into chunks given to ranks in turn."""
    quantizer = make(groups=groups, uniform=uniform, dead_below=2.0 if killed else 0.0)
    if killed:
        kill(quantizer)
    for step in range(steps):
        chunks = samples(seed=step).split(chunk)
        for mine in chunks[dist.rank()::world_size]:
            quantizer(mine)
        quantizer.update(seed=step)
    return {name: tensor.numpy() for name, tensor in quantizer.state_dict().items()}


@pytest.mark.parametrize("killed, chunk, groups, uniform", [  # 3 chunks, uneven; 4: rank 0's last is not the last
    (False, 3, 2, False), (True, 2, 2, False), (False, 3, (1, 3, 2), False), (True, 2, (1, 3, 2), False),
    (False, 3, (1, 3, 6), True)])
def test_codebooks_do_not_depend_on_the_number_of_ranks_and_are_equal_on_all(on_ranks, killed, chunk, groups, uniform):
    alone = train(1, chunk, killed, groups, uniform)
    first, second = on_ranks(2, train, 2, chunk, killed, groups, uniform)
    for name in alone:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-6, atol=1e-6, err_msg=name)
    if not killed:  # what dead codes become is the first chunk's; all else is the batch's
        for name, whole in train(1, 8, killed, groups, uniform).items():
            np.testing.assert_allclose(whole, alone[name], rtol=1e-6, atol=1e-6, err_msg=name)
    else:
        assert abs(first["codebook"]).max() < 10


def start(rank_matters):
    quantizer = make(ready=False)
    z = torch.randn(400 - 390 * dist.rank() * rank_matters, 6,
                    generator=torch.Generator().manual_seed(dist.rank() * rank_matters))
    quantizer.initialize(z, seed=0)
    return {name: tensor.numpy() for name, tensor in quantizer.state_dict().items()}


def test_all_ranks_start_from_rank_0s_codebooks(on_ranks):
    alone = start(0)
    for one in on_ranks(2, start, 1):
        for name in alone:
            np.testing.assert_array_equal(one[name], alone[name])


def test_dead_codes_of_groups_become_parts_of_what_the_quantizers_before_left_over():
    quantizer, z = make(groups=(1, 3, 2)), samples()
    kill(quantizer)
    residual, left = z.flatten(0, 1), []
    for q, end in enumerate(quantizer.ends):
        left.append(residual.unflatten(-1, (quantizer.groups[q], -1)).transpose(0, 1))  # (G, N, d)
        residual = z.flatten(0, 1) - quantizer.decode(quantizer.encode(z)[..., :end]).flatten(0, 1)
    quantizer(z)
    quantizer.update(seed=0)
    for q, parts in enumerate(left):
        for codes, part in zip(quantizer._vectors(quantizer.codebook, q)[:, q:q + 5], parts):
            assert torch.cdist(codes, part, compute_mode="donot_use_mm_for_euclid_dist").amin(1).max() < 1e-5


def test_dead_codes_become_vectors_of_the_batch_and_are_not_dead_at_once_again():
    quantizer, z = make(), samples()
    kill(quantizer)
    alive = vectors(quantizer).clone()
    quantizer(z)
    quantizer.update(seed=0)
    residual, codes = z.flatten(0, 1), quantizer.encode(z)
    after = vectors(quantizer).clone()
    replaced = (alive == 100).all(-1)
    assert replaced.sum() == 15
    firsts = after[0, 0][replaced[0, 0]]
    distances = (firsts[:, None] - residual).abs().amax(-1).amin(-1)  # to the nearest vector of the batch
    assert distances.max() == 0 and len(firsts.unique(dim=0)) == 5
    assert (counts_of(quantizer)[replaced] > 10).all()  # as many as the average code, 400 vectors to 16
    assert torch.isin(torch.arange(5), codes[..., 0]).all()  # and they are in use
    other = make()
    kill(other)
    other(z)
    other.update(seed=1)
    assert not torch.equal(vectors(other), after)  # the seed draws
    quantizer(1e-3 * z)  # one step in which they get little or nothing
    quantizer.update(seed=1)
    assert (counts_of(quantizer)[replaced] > 10).all()


def test_codes_are_not_dead_for_being_many_more_than_the_vectors_of_a_step():
    quantizer = make(quantizers=1, codebook_size=64)
    for step in range(60):
        quantizer(samples(2, 16, seed=step))  # half a vector a code: all averages fall below 2
        before = vectors(quantizer).clone()
        quantizer.update(step)
    assert quantizer.ema_count.mean() < 1
    assert ((vectors(quantizer) - before).abs().amax(-1) > 1).float().mean() < 0.1


def test_evaluation_changes_nothing_and_repeats():
    quantizer, z = make(codebook_size=64, dropout=1.0), samples()
    quantizer(z)
    before = state(quantizer)
    quantizer.eval()
    first, second = quantizer(z), quantizer(z)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    quantizer.train()
    quantizer.encode(z)
    assert same(before, state(quantizer))


def test_the_discriminators_pass_does_not_move_the_codebooks():
    def step(with_discriminator):
        quantizer, z = make(), samples()
        if with_discriminator:
            with torch.no_grad():
                quantizer(z + 1)
        quantizer(z)
        if with_discriminator:
            quantizer.eval()
            quantizer(z + 1)
            quantizer.train()
        quantizer.update(0)
        return state(quantizer)
    assert same(step(True), step(False))


def test_a_discarded_step_did_not_happen():
    quantizer, z = make(), samples()
    before = state(quantizer)
    quantizer(torch.full_like(z, float("inf")))
    quantizer.discard()
    assert same(before, state(quantizer))
    quantizer.update(0)  # and nothing pending is no step
    assert same(before, state(quantizer))


@pytest.mark.parametrize("least, wanted", [  # half have all; n of the others is uniform
    (1, [0.125, 0.125, 0.125, 0.625]), (3, [0, 0, 0.25, 0.75]), (9, [0, 0, 0, 1])])
def test_dropout_leaves_out_the_last_quantizers_of_some_samples(least, wanted):
    quantizer, z = make(quantizers=4, dropout=0.5, least=least), samples(batch=400, frames=2)
    before = quantizer.codebook.clone()
    torch.manual_seed(0)
    quantized, codes, loss = quantizer(z)
    whole = quantizer.encode(z)
    torch.testing.assert_close(codes, whole, rtol=0, atol=0)
    parts = torch.stack([quantizer.decode(whole[..., :n]) for n in (1, 2, 3, 4)])  # (4, B, T, D)
    hits = (parts == quantized).flatten(2).all(-1)
    assert (hits.sum(0) == 1).all()  # each sample is the sum of its first n codes, all its frames alike
    n = hits.int().argmax(0) + 1
    shares = torch.bincount(n, minlength=5)[1:] / 400
    torch.testing.assert_close(shares, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=0.06)
    assert (shares[:min(least, 4) - 1] == 0).all()
    errors = (parts - z).square().mean((2, 3))  # (4, B): those of the residuals
    used = torch.arange(4)[:, None] < n
    torch.testing.assert_close(loss, ((errors * used).sum(0) / n).mean())
    assert quantizer.pending_count.sum(-1).tolist() == [2 * (n > q).sum() for q in range(4)]
    quantizer.discard()
    quantizer(z, 2)  # the caller's wish goes before dropout
    assert quantizer.pending_count.sum(-1).tolist() == [800, 800, 0, 0]
    quantizer.update(0)
    changed = (quantizer.codebook != before).flatten(1).any(1)
    assert changed.tolist() == [True, True, False, False]


def test_the_loss_of_a_batch_is_the_mean_of_its_chunks():
    quantizer, z = make(groups=2), samples()
    whole = quantizer(z)[2]
    chunks = z.split(3)
    torch.testing.assert_close(whole, sum(quantizer(c)[2] * len(c) for c in chunks) / len(z))
    errors = [(quantizer.decode(quantizer.encode(z, n)) - z).square().mean() for n in (1, 2, 3)]
    torch.testing.assert_close(whole, torch.stack(errors).mean())


def test_the_loss_pulls_the_input_to_its_codes_and_leaves_the_codebooks():
    quantizer, z = make(quantizers=1), samples().requires_grad_()
    loss = quantizer(z)[2]
    gradient, = torch.autograd.grad(loss, z)
    torch.testing.assert_close(gradient, 2 * (z - quantizer.decode(quantizer.encode(z))).detach() / z.numel())
    assert not list(quantizer.parameters())


def test_the_gradient_goes_straight_through():
    quantizer, z, towards = make(groups=2), samples().requires_grad_(), samples(seed=2)
    quantized, codes, _ = quantizer(z)
    torch.testing.assert_close(quantized, quantizer.decode(codes), rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(quantized, z, towards)[0], towards, rtol=0, atol=0)


def test_groups_are_quantizers_of_their_own_laid_out_one_level_after_the_other():
    together, z = make(groups=2), samples()
    codes = together.encode(z)
    for g in range(2):
        alone = make(width=3, ready=False)
        alone.load_state_dict({name: vectors(together, name)[:, g].flatten(1) if t.ndim else t
                               for name, t in together.state_dict().items()})
        part = z[..., 3 * g:3 * g + 3]
        torch.testing.assert_close(alone.encode(part), codes[..., g::2], rtol=0, atol=0)
        torch.testing.assert_close(alone.decode(codes[..., g::2]), together.decode(codes)[..., 3 * g:3 * g + 3])


def test_autocast_does_not_change_the_codes():
    generator = torch.Generator().manual_seed(0)
    quantizer = make(quantizers=2, codebook_size=8)
    with torch.no_grad():  # far from zero and close to one another: bfloat16 distances would be all alike
        quantizer.codebook.copy_(torch.randn(quantizer.codebook.shape, generator=generator))
        quantizer.codebook[0] += 100
    z = quantizer.decode(torch.randint(8, (4, 30, 2), generator=generator))
    expected = quantizer(z)
    pending = quantizer.pending_sum.clone()
    quantizer.discard()
    with torch.autocast("cpu", torch.bfloat16):
        result = quantizer(z)
        torch.testing.assert_close(quantizer.encode(z), expected[1], rtol=0, atol=0)
    for one, other in zip(result, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(quantizer.pending_sum, pending)
    narrow = z.sub(100).bfloat16()
    assert quantizer(narrow)[0].dtype == torch.bfloat16


def test_before_initialization_the_input_passes_and_nothing_is_counted():
    quantizer, z = make(ready=False), samples().requires_grad_()
    assert not quantizer.ready
    quantized, codes, loss = quantizer(z)
    assert torch.equal(quantized, z) and not codes.any() and codes.shape == (8, 20, 3) and loss == 0
    gradient, = torch.autograd.grad(quantized.sum() + loss, z)
    assert torch.equal(gradient, torch.ones_like(z))
    before = state(quantizer)
    quantizer.update(0)
    quantizer(z)
    assert not quantizer.codebook.any() and not quantizer.ema_count.any() and not quantizer.pending_count.any()
    quantizer.discard()
    assert same({**before, "candidates": None}, state(quantizer))


def test_being_initialized_survives_state_dicts_and_copies_and_training_goes_on_bit_for_bit():
    quantizer = make()
    quantizer(samples())
    quantizer.update(0)
    saved = {name: tensor.clone() for name, tensor in quantizer.state_dict().items()}
    assert set(saved) == {"initialized", "codebook", "ema_count", "ema_sum"}
    loaded = make(ready=False)
    assert not loaded.ready
    loaded.load_state_dict(saved)
    others = [loaded, copy.deepcopy(quantizer)]
    for one in (quantizer, *others):
        assert one.ready
        one(samples(seed=5))
        one.update(1)
    assert all(same(state(quantizer), state(one)) for one in others)


@pytest.mark.parametrize("there, here", [(False, True), (True, False)])
def test_learned_codebooks_and_grids_do_not_pass_for_each_other(there, here):
    saved = {"model": make(groups=(1, 1, 3), uniform=there).state_dict()}
    with pytest.raises(UserError, match=r"a\.pt: weights of another model: 1 entries differ: grid3"):
        checkpoint.load_weights(make(groups=(1, 1, 3), uniform=here, ready=False), saved, "a.pt")
    again = make(groups=(1, 1, 3), uniform=there, ready=False)
    checkpoint.load_weights(again, saved, "a.pt")
    assert again.ready


def test_the_nearest_of_many_vectors_are_found_slab_by_slab(monkeypatch):
    x, codebook, most = torch.randn(2, 70_000, 3), torch.randn(2, 200, 3), []
    monkeypatch.setattr(torch, "baddbmm", lambda *args, whole=torch.baddbmm, **more: (
        found := whole(*args, **more), most.append(found.numel()))[0])
    found = nearest(x, codebook)
    assert len(most) == 2 and max(most) <= 2 ** 24
    torch.testing.assert_close((x - codebook.gather(1, found[..., None].expand(-1, -1, 3))).norm(dim=-1),
                               torch.cat([torch.cdist(part, codebook).amin(-1) for part in x.split(10_000, 1)], 1),
                               rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("more, message", [
    (dict(quantizers=0), "quantizers 0"), (dict(width=0), "width 0"),
    (dict(codebook_size=1), "codebook_size 1"), (dict(groups=4), "width 6 .* 4 groups"),
    (dict(groups=(1, 2)), r"groups \(1, 2\): .* each of 3 quantizers"), (dict(groups=(1, 2, 4)), "width 6 .* 4 groups"),
    (dict(decay=1.0), "decay 1.0"), (dict(dropout=1.5), "dropout 1.5"), (dict(least=0), "least 0"),
    (dict(dead_below=-1), "dead_below -1")])
def test_what_does_not_fit_is_refused_with_its_values(more, message):
    with pytest.raises(ValueError, match=message):
        make(ready=False, **more)


def test_more_quantizers_than_there_are_is_refused():
    quantizer, z = make(groups=2), samples()
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count {count}: expected from 1 to 3"):
            quantizer.encode(z, count)
        with pytest.raises(ValueError, match="from 1 to 3"):
            quantizer(z, count)
    for number in (0, 3, 8):
        with pytest.raises(ValueError, match=f"{number} codes a frame: expected 2, 4, 6"):
            quantizer.decode(torch.zeros(1, 1, number, dtype=torch.int64))
