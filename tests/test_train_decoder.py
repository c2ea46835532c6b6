"""The decoder: its U-Net and its parts against themselves computed another way, and the script as a user runs it."""
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Forked, check_loading, differences, flags, metrics, start
from helpers import run as run_script

import train_decoder
import train_prior
from common import accumulate, checkpoint, clip, config, data, dist, media, synthetic
from common import nn as layers
from train_decoder import pixels

CPU = torch.device("cpu")
TINY = dict(width=8, mults=(1, 2), groups=4, cond_width=8, heads=2, head_width=8, image_tokens=2, batch_size=12,
            chunk_size=5, steps=6, log_every=2, eval_every=4, save_every=2, eval_samples=6, eval_steps=2,
            warmup_steps=2, device="cpu")
STAGES = {"base": dict(stage="base", image_size=8),
          "upsample": dict(stage="upsample", image_size=16, low_res_size=8, random_crop=8, image_condition=False)}


def run(*words, **settings):
    return run_script("train_decoder", *words, **settings)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Data and runs that several tests look at

def png(image):
    stream = io.BytesIO()
    media.write_png(stream, image)
    return stream.getvalue()


def npy(values):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, np.float16))
    return stream.getvalue()


def write_tar(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with tars/ (160 pictures in two), a hurriedly trained clip/, and shapes/, built-in data for it."""
    folder = tmp_path_factory.mktemp("world")
    images, records = synthetic.shapes(range(160))
    files = {f"{i:05d}{suffix}": content for i, (image, record) in enumerate(zip(images, records))
             for suffix, content in ((".png", png(image)), (".txt", record["caption"].encode()))}
    write_tar(folder / "plain/00000.tar", files)
    cfg = clip.Config(run=str(folder / "clip"), data=str(folder / "plain"), steps=8, batch_size=32, embed_width=16,
                      channels=(8, 8, 16), text_width=32, image_size=16, vocabulary=300, device="cpu")
    encoder = clip.train_run(cfg, CPU)
    embeddings, _, _ = clip.embed(encoder, images, [record["caption"] for record in records])
    files |= {f"{i:05d}.npy": npy(row) for i, row in enumerate(embeddings)}
    for number, span in enumerate((range(100), range(100, 160))):
        write_tar(folder / f"tars/{number:05d}.tar", {k: v for k, v in files.items() if int(k[:5]) in span})
    images, records = synthetic.shapes(range(200))
    image, text, _ = clip.embed(encoder, images, [record["caption"] for record in records])
    data.write_shards(folder / "shapes", image, text, records)
    (folder / "shapes/made.json").write_text("{}")
    for name in ("plain", "tars", "shapes"):
        (folder / name / "clip.json").write_text(json.dumps({"clip": str(folder / "clip")}))
    np.save(folder / "embeddings.npy", embeddings)
    prior_cfg = train_prior.Config(width=16, depth=1, heads=2)
    torch.manual_seed(0)
    prior = train_prior.Prior(prior_cfg, 16)
    torch.nn.init.normal_(prior.out.weight, std=0.3)
    checkpoint.save({"kind": "prior", "model": prior.state_dict(), "config": config.as_json(prior_cfg),
                     "widths": [16, 0], "clip": str(folder / "clip")}, folder / "prior/model.pt")
    for i in range(3):
        (folder / f"{i}.png").write_bytes(png(images[i]))
    return folder


@pytest.fixture(scope="session")
def cascade(world):
    """Run folders of both stages, 16 and 32 pixels, trained by one command of torchrun on two ranks."""
    process = start("train_decoder", *flags(data=world / "tars", run=world / "cascade", **TINY), ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0 and "To draw: python train_decoder.py sample --runs" in out, out + err
    return tuple(str(world / "cascade" / stage) for stage in STAGES)


@pytest.fixture(scope="session")
def artists(world):
    """Run folders of both stages with weights that nobody trained: what they draw depends on all that it should."""
    for stage, size in (("base", dict(image_size=16)), ("upsample", dict(image_size=32, low_res_size=16))):
        cfg = train_decoder.Config(**{**TINY, **STAGES[stage], **size, "random_crop": 0}, data=str(world / "tars"))
        torch.manual_seed(1)
        unet = train_decoder.UNet(cfg, 16)
        torch.nn.init.normal_(unet.out.weight, std=0.1)
        checkpoint.save({"kind": "decoder", "model": unet.state_dict(), "config": config.as_json(cfg),
                         "widths": [16, 0], "clip": str(world / "clip")}, world / "artists" / stage / "model.pt")
    return tuple(str(world / "artists" / stage) for stage in STAGES)


@pytest.fixture(scope="session")
def undisturbed(world):
    """undisturbed(stage, ranks, steps) -> the folder of a run that nothing disturbed."""
    def folder(stage, ranks, steps=TINY["steps"]):
        path = world / f"{stage}_{ranks}_{steps}"
        if not path.exists():
            words = flags(data=world / "tars", run=path, **{**TINY, **STAGES[stage], "steps": steps})
            Forked("train_decoder", *words, ranks=ranks).finish()
        return path / stage
    return folder


@pytest.fixture(scope="session")
def judge():
    return synthetic.Judge()


def make(embed_width=16, encoding_width=12, **settings):
    """A U-Net of random weights, its last layer included."""
    small = dict(image_size=16, width=8, mults=(1, 2), groups=4, cond_width=16, heads=2, head_width=8, image_tokens=2,
                 random_crop=0, timesteps=50, memory_efficient=False,
                 timestep_density="uniform")
    if settings.get("text_encodings") == "clip":
        small["max_text_len"] = 5
    cfg = train_decoder.Config(**{**small, **settings})
    torch.manual_seed(0)
    unet = train_decoder.UNet(cfg, embed_width, encoding_width if cfg.text_encodings == "clip" else 0)
    torch.nn.init.normal_(unet.out.weight, std=0.1)
    return unet


def inputs(unet, batch=3, size=16):
    """x_t, timestep, condition, estimate, low_res and its level, as far as the U-Net takes them."""
    cfg, g = unet.cfg, torch.Generator().manual_seed(1)
    condition = {"image_embed": torch.randn(batch, 16, generator=g)}
    if cfg.text_encodings == "clip":
        condition |= {"text_enc": torch.randn(batch, 5, 12, generator=g), "no_text": torch.arange(batch) == 9,
                      "text_mask": torch.arange(5) < torch.tensor([[2], [5], [3]])[:batch]}
    x_t, estimate, low_res = torch.randn(3, batch, 3, size, size, generator=g)
    timestep, level = torch.randint(cfg.timesteps, (2, batch), generator=g)
    return (x_t, timestep, condition, estimate if cfg.self_condition else None, low_res if cfg.low_res_size else None,
            level if cfg.low_res_size and cfg.low_res_noise else None)


def batch_of(count, size=16):
    g = torch.Generator().manual_seed(2)
    return {"image": torch.randint(256, (count, size, size, 3), generator=g).to(torch.uint8),
            "image_embed": torch.randn(count, 16, generator=g), "caption": ["a red star"] * count}


NOBODY, EVERYBODY = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)


# The U-Net

VARIANTS = [
    dict(), dict(blocks=2, learned_variance=True, self_condition=True), dict(mults=(1, 2, 3), image_tokens=6),
    dict(memory_efficient=True, final_block=False), dict(memory_efficient=True, blocks=2, cross_embed=False),
    dict(attention_levels=(0,), linear_levels=(1,), middle_attention=False), dict(pixel_shuffle=False),
    dict(image_map=False), dict(text_encodings="clip"), dict(image_condition=False),
    dict(image_condition=False, text_encodings="clip"),
    dict(low_res_size=8), dict(low_res_size=8, low_res_noise=0.0, self_condition=True), dict(mults=(3,)),
    dict(width=28, mults=(1, 2), attention_levels=(1,), linear_levels=(0,)),  # heads 8 wide do not divide 28
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_option_gives_pictures_and_a_gradient_to_every_parameter(settings):
    unet = make(**settings)
    x_t, timestep, condition, estimate, low_res, level = inputs(unet)
    assert unet(x_t, timestep, condition, NOBODY, NOBODY, estimate, low_res, level).shape == (
        3, 6 if unet.cfg.learned_variance else 3, 16, 16)
    for drop in (0.0, 1.0):
        unet.cfg = dataclasses.replace(unet.cfg, image_drop=drop, **(
            {"text_drop": drop} if unet.cfg.text_encodings != "none" else {}))
        unet.zero_grad(set_to_none=True)
        train_decoder.diffusion_loss(unet, unet, batch_of(3), condition).backward()
        assert not [name for name, p in unet.named_parameters() if p.grad is None]
    used = [name for name, p in unet.named_parameters() if p.grad.any()]
    assert len(used) > len(list(unet.parameters())) * 0.6


@pytest.mark.parametrize("settings", [dict(self_condition=True, text_encodings="clip", low_res_size=8),
                                      dict(memory_efficient=True, low_res_size=8, self_condition=True)], ids=str)
def test_every_input_is_heard_and_no_sample_hears_another(settings):
    unet = make(**settings).eval()
    x_t, timestep, condition, estimate, low_res, level = inputs(unet)
    arguments = dict(x_t=x_t, timestep=timestep, estimate=estimate, low_res=low_res, low_res_level=level, **condition)

    def say(**changed):
        given = {**arguments, **changed}
        condition = {name: given.pop(name) for name in ("image_embed", "text_enc", "text_mask", "no_text")
                     if name in given}
        return unet(condition=condition, drop_image=NOBODY[:len(given["x_t"])], drop_text=NOBODY[:len(given["x_t"])],
                    **given)

    with torch.no_grad():
        said = say()
        for name, value in arguments.items():
            other = ~value if value.dtype == torch.bool else (value + 7) % 50 if name in (
                "timestep", "low_res_level") else value + 0.5
            assert (say(**{name: other}) - said).abs().max() > 1e-4, name
        torch.testing.assert_close(say(**{k: v[1:2] for k, v in arguments.items()}), said[1:2], rtol=1e-4, atol=1e-5)


def test_what_is_remembered_serves_any_number_of_steps():
    unet = make(text_encodings="clip", low_res_size=8)
    x_t, timestep, condition, estimate, low_res, level = inputs(unet)
    drop = torch.tensor([True, False, False])
    memory = unet.remember(condition, drop, ~drop)
    for shift in range(3):
        here = x_t + shift, (timestep + shift) % 50
        again = unet(*here, condition, drop, ~drop, estimate, low_res, level)
        assert torch.equal(unet.denoise(*here, memory, estimate, low_res, level), again)


def test_checkpointing_changes_the_gradients_not_at_all():
    grads = []
    for checkpointing in (False, True):
        unet = make(text_encodings="clip", blocks=2, checkpointing=checkpointing)
        condition = inputs(unet)[2]
        torch.manual_seed(3)
        train_decoder.diffusion_loss(unet, unet, batch_of(3), condition).backward()
        grads.append([p.grad for p in unet.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_norm_and_silu_in_one_equal_the_plain_ones_in_value_and_gradient(layout, modulated):
    torch.manual_seed(0)
    norm = layers.NormSiLU(8, 4)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = (torch.randn(2, 8, 5, 5) * 3 + 1).to(memory_format=layout).requires_grad_()
    modulation = torch.randn(2, 16, requires_grad=True)
    out, wanted = norm(x, modulation if modulated else None), F.group_norm(x, 4, norm.weight, norm.bias)
    if modulated:
        scale, shift = modulation[:, :, None, None].chunk(2, 1)
        wanted = wanted * (1 + scale) + shift
    wanted = F.silu(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    leaves, weight = [x, norm.weight, norm.bias, *[modulation] * modulated], torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (out, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    some = x[:1, :, :2, :2], *modulation[:1, :, None, None].chunk(2, 1)  # memory with gaps, and gradients in any order
    exact = [t.detach().double().requires_grad_() for t in some]
    assert torch.autograd.gradcheck(lambda *t: layers._NormSiLU.apply(*t, 4), exact)


def test_statistics_of_a_norm_are_in_fp32_under_autocast_too():
    x = (torch.randn(4, 16, 8, 8) * 2 + 5).bfloat16().requires_grad_()
    exact = x.detach().double().requires_grad_()
    assert [t.dtype for t in layers._NormSiLU.normalize(x, 4)] == [torch.bfloat16, torch.float32, torch.float32]
    one, weight = torch.ones(1, 1, 1, 1), torch.randn(4, 16, 8, 8)
    grads = [torch.autograd.grad((layers._NormSiLU.apply(t, one, 0 * one, 4) * weight).sum(), t)[0] for t in (x, exact)]
    assert (grads[0].double() - grads[1]).abs().mean() < 4e-3 * grads[1].abs().mean()


@pytest.mark.parametrize("tokens", [1, 4, 5, 12])
def test_attention_with_tokens_folded_into_the_projections_equals_the_plain_one(tokens):
    torch.manual_seed(0)
    attention = layers.CrossAttention(12, 10, heads=3, head_width=8).double()
    x, context = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
                  for shape in ((12, 3, 3), (tokens, 10)))
    keys, values = attention.keys_values(context)
    assert keys.ndim == (3 if 2 * tokens <= 8 else 4)  # half a head's width is where folding stops to pay
    out = attention(x, keys, values)
    pixels = x.flatten(2).transpose(1, 2)
    q = attention.query(attention.norm(pixels)).view(2, 9, 3, 8).transpose(1, 2)
    k, v = attention.key_value(context).view(2, tokens, 2, 3, 8).permute(2, 0, 3, 1, 4)
    found = attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 9, 24))
    wanted = (pixels + attention.out_norm(found)).transpose(1, 2).view(2, 12, 3, 3)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)  # the softmax is in fp32
    leaves, weight = [x, context, *attention.parameters()], torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (out, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_linear_attention_equals_the_one_with_all_pairs_of_pixels():
    torch.manual_seed(0)
    attention, x = layers.LinearAttention(16, head_width=8), torch.randn(2, 16, 3, 3)
    tokens = x.flatten(2).transpose(1, 2)
    h = attention.norm(tokens)
    q, k, v = (t.view(2, 9, 2, 8) for t in (attention.query(h), *attention.key_value(h).chunk(2, -1)))
    weights = torch.einsum("bnhd,bmhd->bhnm", q.softmax(-1), k.softmax(1))  # of pixel m for pixel n
    found = attention.out(torch.einsum("bhnm,bmhd->bnhd", weights, v).reshape(2, 9, 16))
    wanted = (tokens + attention.out_norm(found)).transpose(1, 2).view(2, 16, 3, 3)
    torch.testing.assert_close(attention(x), wanted, rtol=1e-4, atol=1e-5)


def test_upsampling_starts_without_a_checkerboard():
    torch.manual_seed(0)
    out = train_decoder.Upsample(6, 5, shuffle=True)(torch.randn(2, 6, 4, 4))
    assert out.shape == (2, 5, 8, 8) and out.std() > 0.1
    assert torch.equal(out, out[:, :, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3))


# Pixels

def test_blur_equals_an_explicit_gaussian_with_edges_repeated():
    torch.manual_seed(0)
    x, sigma = torch.randn(2, 3, 5, 6), torch.tensor([0.4, 1.1])
    out = train_decoder.blurred(x, sigma)
    for b, c, i, j in itertools.product(range(2), range(3), range(5), range(6)):
        total = weights = 0.0
        for down, right in itertools.product(range(-3, 4), repeat=2):
            weight = np.exp(-(down ** 2 + right ** 2) / (2 * sigma[b].item() ** 2))
            total += weight * x[b, c, min(max(i + down, 0), 4), min(max(j + right, 0), 5)].item()
            weights += weight
        assert out[b, c, i, j].item() == pytest.approx(total / weights, abs=1e-5)


def test_crops_equal_slices():
    x, corners = torch.randn(4, 3, 9, 9), torch.tensor([[0, 0], [5, 5], [2, 4], [4, 1]])
    out = train_decoder.cropped(x, 4, corners)
    for picture, crop, (top, left) in zip(x, out, corners.tolist()):
        assert torch.equal(crop, picture[:, top:top + 4, left:left + 4])


def test_bytes_become_pixels_and_bytes_again():
    every = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 16, 16, 3)
    found = pixels(every)
    assert found.shape == (1, 3, 16, 16) and found.min() == -1 and found.max() == 1
    assert torch.equal(train_decoder.as_bytes(found), every)
    assert train_decoder.as_bytes(torch.tensor([-3.0, 0.0, 3.0]).view(1, 3, 1, 1)).flatten().tolist() == [0, 128, 255]


def test_slerp_goes_from_one_to_the_other_along_the_sphere_at_even_speed():
    one, other = F.normalize(torch.randn(2, 1, 7, generator=torch.Generator().manual_seed(0)), dim=-1)
    way = train_decoder.slerp(one, other, torch.linspace(0, 1, 5)[:, None])
    torch.testing.assert_close(way[[0, -1]], torch.cat([one, other]))
    torch.testing.assert_close(way.norm(dim=-1), torch.ones(5))
    apart = F.cosine_similarity(way[1:], way[:-1], dim=-1)
    torch.testing.assert_close(apart, apart[:1].expand(4))
    assert torch.equal(train_decoder.slerp(one, one, torch.tensor([[0.3]])), one)


# Scores

def test_frechet_distance_equals_the_closed_form_where_there_is_one():
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    one, other = rng.uniform(0, 3, (2, 6))  # eigenvalues of covariances that commute
    one[0] = 0
    means = rng.standard_normal((2, 6))
    gaussians = [(mean, turn @ np.diag(values) @ turn.T) for mean, values in zip(means, (one, other))]
    wanted = ((means[0] - means[1]) ** 2).sum() + ((one ** 0.5 - other ** 0.5) ** 2).sum()
    assert train_decoder.frechet_distance(*gaussians) == pytest.approx(wanted, rel=1e-7)
    assert train_decoder.frechet_distance(*reversed(gaussians)) == pytest.approx(wanted, rel=1e-7)
    assert train_decoder.frechet_distance(gaussians[0], gaussians[0]) == pytest.approx(0, abs=1e-6)


def moments_of_rank(features):
    moments = train_decoder.Moments(features.shape[1])
    for part in np.array_split(features, 7)[dist.rank()::dist.world_size()]:
        moments.add(torch.from_numpy(part))
    return moments.reduce()


def test_moments_over_ranks_are_those_of_all_samples_at_once(on_ranks):
    features = (np.random.default_rng(0).standard_normal((23, 4)) * 2 + 1).astype(np.float32)
    for mean, covariance in on_ranks(2, moments_of_rank, features):
        np.testing.assert_allclose(mean, features.astype(np.float64).mean(0), atol=1e-12)
        np.testing.assert_allclose(covariance, np.cov(features.astype(np.float64).T), atol=1e-12)


def test_frechet_distance_is_that_of_torchmetrics_for_the_same_features():
    fid = pytest.importorskip("torchmetrics.image.fid")

    class Features(torch.nn.Module):
        num_features = 12

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3 * 8 * 8, 12)

        def forward(self, pictures):
            return self.layer(pictures.flatten(1).float() / 255)

    features = Features().requires_grad_(False)
    theirs, ours = fid.FrechetInceptionDistance(feature=features, input_img_size=(3, 8, 8)), []
    for real, low in ((True, 0), (False, 60)):
        pictures = torch.randint(low, 200, (150, 3, 8, 8), dtype=torch.uint8)
        theirs.update(pictures, real=real)
        moments = train_decoder.Moments(12)
        moments.add(features(pictures))
        ours.append(moments.reduce())
    assert train_decoder.frechet_distance(*ours) == pytest.approx(theirs.compute().item(), rel=1e-3)


def test_the_judge_passes_real_pictures_and_notices_each_attribute_that_is_wrong(judge):
    images, records = synthetic.shapes(range(50_000, 50_400))
    records = [{**record, "named": list(synthetic.ATTRIBUTES)} for record in records]
    for size in (16, 32):
        pictures = train_decoder.as_bytes(media.resize(pixels(torch.from_numpy(images)), size, "area"))
        right, named = judge.right(pictures.numpy(), records)
        assert named.all() and right.all(1).mean() >= 0.93
    for place, (name, values) in enumerate(synthetic.ATTRIBUTES.items()):
        swapped = [{**record["attributes"], name: values[values.index(record["attributes"][name]) - 1]}
                   for record in records[:100]]
        right, _ = judge.right(synthetic.draw(swapped, seed=9), records[:100])
        assert right[:, place].mean() < 0.05 and np.delete(right, place, 1).mean() > 0.9, name


# Loss and sampling

def test_low_resolution_pictures_get_noise_of_the_level_that_the_network_is_told():
    unet = make(low_res_size=8, low_res_noise=0.5)
    picture, noise, share = torch.randn(3, 3, 16, 16), torch.randn(3, 3, 16, 16), torch.tensor([0.0, 0.5, 1.0])
    noised, level = train_decoder.noised_low_res(unet, picture, share, noise)
    assert level.tolist() == [0, 12, 24]  # of timesteps 0 to 49, half of them
    for i, t in enumerate(level):
        torch.testing.assert_close(noised[i], unet.alpha[t] * picture[i] + unet.sigma[t] * noise[i])
    plain = make(low_res_size=8, low_res_noise=0.0)
    noised, level = train_decoder.noised_low_res(plain, picture, share, noise)
    assert level is None and torch.equal(noised, picture)


def test_the_network_is_shown_the_same_place_in_both_sizes_and_told_the_noise_that_was_added(monkeypatch):
    seen = []

    def model(x_t, timestep, condition, drop_image, drop_text, estimate, low_res, level):
        seen.append((x_t, timestep, low_res, level))
        return torch.zeros_like(x_t)

    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    batch = {"image": torch.stack([y * 8, x * 8, x + y], -1).to(torch.uint8).repeat(64, 1, 1, 1)}
    condition = {"image_embed": torch.zeros(64, 16)}
    unet = make(low_res_size=16, image_size=32, random_crop=8, low_res_blur=0.0, low_res_noise=0.6, image_map=False)
    torch.manual_seed(0)
    train_decoder.diffusion_loss(model, unet, batch, condition)
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # the same again without noise
    torch.manual_seed(0)
    train_decoder.diffusion_loss(model, unet, batch, condition)
    (_, _, noisy, told), (x_t, timestep, low_res, level) = seen
    clean, small = (picture / unet.alpha[t][:, None, None, None] for picture, t in ((x_t, timestep), (low_res, level)))
    assert torch.equal(told, level) and 0 <= level.min() < 5 and 24 < level.max() <= 29
    added = [(n - s).std() / unet.sigma[t] for n, s, t in zip(noisy, low_res, level)]
    assert all(abs(ratio - 1) < 0.25 for ratio in added)
    corners = (clean[:, :2, 0, 0] + 1) * 127.5 / 8
    assert corners.std(0).min() > 5 and corners.max() > 20  # crops of all places
    assert (small - clean).abs().mean() < 0.02  # a ramp, made smaller and larger again, is still one


def test_blur_is_for_the_share_of_pictures_and_the_sigmas_asked_for():
    seen, batch = [], {"image": torch.randint(256, (200, 16, 16, 3)).to(torch.uint8)}
    for share in (0.0, 0.4, 1.0):
        unet = make(low_res_size=8, low_res_noise=0.0, low_res_blur=share, blur_sigma=(0.7, 0.7))
        train_decoder.diffusion_loss(lambda x_t, *rest: seen.append(rest[-2]) or x_t, unet, batch,
                                     {"image_embed": torch.zeros(200, 16)})
    plain, some, every = seen
    small = media.resize(pixels(batch["image"]), 8, "area")
    wanted = media.resize(train_decoder.blurred(small, torch.full((200,), 0.7)), 16, "bicubic")
    torch.testing.assert_close(every, wanted)
    changed = (some - plain).flatten(1).any(1)
    assert 50 < changed.sum() < 110 and torch.equal(some[changed], every[changed])


@pytest.mark.parametrize("scale, settings", [
    (2.5, dict(objective="v", self_condition=True, text_encodings="clip")), (1.0, dict(objective="epsilon")),
    (0.0, dict(objective="x0", threshold=0.9)), (3.0, dict(objective="flow", low_res_size=8)),
    (2.0, dict(objective="x0", learned_variance=True, low_res_size=8, image_condition=False)),
    (4.0, dict(objective="x0", threshold=0.8, low_res_size=8, low_res_noise=0.0))], ids=str)
def test_sampling_equals_a_slow_loop_with_two_passes_a_step(scale, settings):
    unet = make(**settings).eval()
    torch.nn.init.normal_(unet.out.weight, std=1.0)  # so that thresholds are reached
    cfg, condition, low_res, low, level = unet.cfg, inputs(unet)[2], None, None, None
    if cfg.low_res_size:
        low_res = torch.rand(3, 3, 8, 8) * 2 - 1
        low = media.resize(low_res, 16, "bicubic")
        if cfg.low_res_noise:
            t = round(0.5 * cfg.low_res_noise * 49)
            low, level = unet.alpha[t] * low + unet.sigma[t] * 0.5, torch.full((3,), t)
    out = train_decoder.sample_pictures(unet, condition, 4, scale, 0.0, lambda x: torch.full_like(x, 0.5), low_res, 0.5)
    x, estimate = torch.full((3, 3, 16, 16), 0.5), torch.zeros(3, 3, 16, 16)
    with torch.no_grad():
        for t, after in zip([49, 33, 16, 0], [33, 16, 0, None]):
            conditional, unconditional = (
                unet(x, torch.full((3,), t), condition, drop, drop, estimate if cfg.self_condition else None, low,
                     level)[:, :3] for drop in (NOBODY, EVERYBODY))
            answer = unconditional + scale * (conditional - unconditional)
            a, s = unet.alpha[t], unet.sigma[t]
            estimate = {"x0": answer, "v": a * x - s * answer, "epsilon": (x - s * answer) / a,
                        "flow": x - s * answer}[cfg.objective]
            if cfg.threshold:
                limit = torch.quantile(estimate.flatten(1).abs(), cfg.threshold, dim=1).clamp(min=1)
                assert limit.max() > 1
                estimate = estimate / limit[:, None, None, None]
            estimate = estimate.clamp(-1, 1)
            if after is not None:
                x = unet.alpha[after] * estimate + unet.sigma[after] * (x - a * estimate) / s
    assert not out.eq(out[:1]).all() or not cfg.image_condition or not scale
    torch.testing.assert_close(out, estimate, rtol=1e-3, atol=2e-4)


def test_the_null_branch_drops_image_and_text_and_nothing_else():
    unet = make(text_encodings="clip", low_res_size=8).eval()
    x_t, timestep, condition, estimate, low_res, level = inputs(unet)
    other = {**condition, "image_embed": -condition["image_embed"], "text_enc": condition["text_enc"] + 1,
             "text_mask": ~condition["text_mask"]}

    def say(condition, drop, x_t=x_t, low_res=low_res):
        return unet(x_t, timestep, condition, drop, drop, estimate, low_res, level)

    assert torch.equal(say(condition, EVERYBODY), say(other, EVERYBODY))
    for moved in (dict(x_t=x_t + 1), dict(low_res=low_res + 1)):
        assert (say(condition, EVERYBODY, **moved) - say(condition, EVERYBODY)).abs().max() > 1e-3
    for part in ("image_embed", "text_enc"):  # each has a null of its own
        one = {**condition, part: other[part]}
        assert not torch.equal(say(condition, NOBODY), say(one, NOBODY))
        drops = (EVERYBODY, NOBODY) if part == "image_embed" else (NOBODY, EVERYBODY)
        answers = [unet(x_t, timestep, c, *drops, estimate, low_res, level) for c in (condition, one)]
        assert torch.equal(*answers) and not torch.equal(answers[0], say(condition, EVERYBODY))


def test_empty_captions_count_as_no_text_and_embeddings_have_the_length_of_noise(world):
    encoder = clip.load(world / "clip", CPU)
    cfg = make(text_encodings="clip", max_text_len=9).cfg
    unet = make(encoding_width=encoder.encoding_width, text_encodings="clip", max_text_len=9)
    batch = {"image_embed": torch.randn(3, 16) * 7, "caption": ["a red star", "", " \t"]}
    before = batch["image_embed"].clone()
    condition = train_decoder.conditioning(batch, cfg, encoder)
    assert condition["no_text"].tolist() == [False, True, True] and torch.equal(batch["image_embed"], before)
    torch.testing.assert_close(condition["image_embed"].norm(dim=-1), torch.full((3,), 4.0))
    assert condition["text_enc"].shape == (3, 9, 32) and condition["text_mask"].shape == (3, 9)
    x_t, timestep = torch.randn(3, 3, 16, 16), torch.tensor([5, 5, 5])
    said, dropped = (unet(x_t, timestep, condition, NOBODY, drop) for drop in (NOBODY, EVERYBODY))
    assert torch.equal(said[1:], dropped[1:]) and not torch.equal(said[0], dropped[0])


def test_chunking_leaves_the_gradient_of_a_batch_as_it_is(monkeypatch):
    """What is random is made a function of the sample, or left out, so that it does not depend on the chunk."""
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.sin(1000 * x))
    grads = []
    for chunk_size in (12, 5):
        unet = make(image_drop=0.0, timesteps=1, eval_steps=1, objective="x0")
        batch = batch_of(12)
        for chunk in accumulate.plan(12, chunk_size):
            part = {name: value[chunk.start:chunk.stop] for name, value in batch.items()}
            condition = train_decoder.conditioning(part, unet.cfg, None)
            (train_decoder.diffusion_loss(unet, unet, part, condition) * chunk.weight).backward()
        grads.append(torch.cat([p.grad.flatten() for p in unet.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert grads[0].norm() > 0.1


def state_of(world, **settings):
    """A new run's State with its data: (state, source, encoder)."""
    given = {**TINY, **STAGES["base"], **settings, "data": str(world / "tars")}
    cfg = train_decoder.Config(**given)
    source, encoder, spec = train_decoder.open_data(cfg)
    return train_decoder.make(cfg, source, encoder, spec, CPU), source, encoder


@pytest.mark.parametrize("settings", [
    dict(objective="x0"), dict(objective="v", p2_gamma=0.5, loss="huber"), dict(objective="epsilon", min_snr_gamma=5.0),
    dict(objective="epsilon", dream=True),
    dict(objective="epsilon", learned_variance=True, noise_schedule="linear", timestep_density="uniform"),
    dict(objective="flow", flow_weight="cosmap", timestep_density="logit_normal"),
    dict(objective="flow", timestep_density="mode", self_condition=True, optimizer="muon"),
    dict(objective="v", self_condition=True, text_encodings="clip", precision="bf16", loss="l1"),
    dict(STAGES["upsample"], objective="x0", learned_variance=True, image_condition=True, image_map=False,
         threshold=0.95, timestep_density="uniform")], ids=str)
def test_every_objective_trains_and_samples(settings, world):
    state, source, encoder = state_of(world, lr=5e-3, cosine=False, **settings)
    cfg, unet = state.cfg, state.model
    reader, plan = data.Chunks(source, np.arange(12)), accumulate.plan(cfg.batch_size, cfg.chunk_size)
    batch = [reader[chunk.start, chunk.stop] for chunk in plan]  # the same pictures again and again

    def loss():
        accumulate.seed("loss")
        with torch.no_grad():
            return sum(train_decoder.diffusion_loss(unet, unet, part, train_decoder.conditioning(part, cfg, encoder))
                       for part in batch).item() / 3

    before = loss()
    for step in range(4):
        step_loss, norm, taken = train_decoder.update(state, unet, encoder, plan, batch)
        assert taken and state.step == step + 1 and torch.isfinite(step_loss) and torch.isfinite(norm)
    assert loss() < before
    part = {"image_embed": batch[0]["image_embed"], "caption": batch[0]["caption"]}
    low_res = torch.zeros(5, 3, 8, 8) if cfg.low_res_size else None
    for eta, scale in ((0.0, 1.0), (1.0, 2.0)):
        drawn = train_decoder.sample_pictures(unet, train_decoder.conditioning(part, cfg, encoder), 2, scale, eta,
                                              low_res=low_res)
        assert drawn.shape == (5, 3, cfg.image_size, cfg.image_size) and drawn.abs().max() <= 1
        assert torch.isfinite(drawn).all() and drawn.std() > 0.01


def overflow(settings):
    """For four steps, of which the third overflows on rank 1: (taken, steps, all as before, ratio of scales)."""
    cfg = train_decoder.Config(**settings)
    source, encoder, spec = train_decoder.open_data(cfg)
    state, results, inject = train_decoder.make(cfg, source, encoder, spec, CPU), [], [False]
    model, plan = dist.wrap(state.model, CPU), accumulate.plan(12, 5, dist.rank(), dist.world_size())
    reader = data.Chunks(source, source.split("train", 0.1, 0.1), cfg.seed)
    next(state.model.parameters()).register_hook(
        lambda g: g * float("inf") if inject[0] and dist.rank() == 1 else g)

    def attempt():
        start = state.step * cfg.batch_size
        batch = [reader[start + chunk.start, start + chunk.stop] for chunk in plan]
        return train_decoder.update(state, model, encoder, plan, batch)[2]

    def everything():
        return [*state.model.state_dict().values(), *state.average.state_dict().values()]

    while not attempt():  # the first scale is a guess
        pass
    for number in range(4):
        before, step, scale = [t.clone() for t in everything()], state.step, state.scaler.get_scale()
        inject[0] = number == 2
        taken, same = attempt(), all(torch.equal(a, b) for a, b in zip(before, everything()))
        results.append((taken, state.step - step, same, state.scaler.get_scale() / scale))
        dist.check_in_step(state.model, state.step)
    return results


def test_fp16_overflow_on_one_rank_of_two_is_a_step_that_did_not_happen(world, on_ranks):
    settings = {**TINY, **STAGES["base"], "precision": "fp16", "data": str(world / "tars")}
    usual, skipped = (True, 1, False, 1.0), (False, 0, True, 0.5)
    assert on_ranks(2, overflow, settings) == [[usual, usual, skipped, usual]] * 2


# Training, as a user runs it

def test_one_command_trains_the_cascade_and_started_again_says_it_is_finished(cascade, world):
    for folder, low_res_size, size in zip(map(Path, cascade), (0, 16), (16, 32)):
        for name in ("config.json", "auto_resume.json", "model.pt", "best.pt", "metrics.jsonl"):
            assert (folder / name).is_file(), name
        cfg = json.loads((folder / "config.json").read_text())
        assert (cfg["image_size"], cfg["low_res_size"], cfg["run"]) == (size, low_res_size, str(world / "cascade"))
        lines = metrics(folder)
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 6]
        assert {"test_loss", "clip_score", "clip_score_real", "frechet_distance"} < lines[-1].keys()
        for name in ("step_00000004.png", "test.png"):  # real pictures with captions above drawn ones
            grid = media.read_png(folder / "samples" / name)
            assert grid.shape[2] == 3 and grid.shape[0] > 2 * 96 and grid.std() > 10
    assert {"clip_score", "frechet_distance"} < json.loads((world / "cascade/cascade.json").read_text()).keys()
    assert media.read_png(world / "cascade/cascade.png").shape[2] == 3
    whole, average = (checkpoint.load(Path(cascade[0]) / name) for name in ("checkpoints/step_00000006.pt", "model.pt"))
    assert all(torch.equal(average["model"][name], value) for name, value in whole["ema"].items())
    before = {path: path.read_bytes() for folder in cascade for path in Path(folder).glob("[a-z]*.*")}
    out = run(*flags(data=world / "tars", run=world / "cascade", **TINY))
    assert out.count("is finished, at step 6; to train on, give more --steps") == 2 and "The stages together" in out
    assert {path: path.read_bytes() for path in before} == before
    for folder in cascade:  # what it wrote can be fed back in
        again = run("--config", Path(folder) / "config.json")
        assert "is finished, at step 6" in again


def test_more_steps_go_on_and_a_damaged_checkpoint_is_passed_over(undisturbed, world, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(undisturbed("base", 1), folder)
    newest = folder / "checkpoints/step_00000006.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    words = flags(data=world / "tars", run=tmp_path, **{**TINY, **STAGES["base"], "steps": 8, "lr": 1e-5})
    out = run(*words, "--no_cosine")
    assert "step_00000006.pt: damaged" in out and "at step 4 of 8" in out and "lr changed from 0.002 to 1e-05" in out
    lines = [line for line in metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8] and lines[-1]["lr"] == 1e-5
    out = run(*words, "--no_cosine", "--resume", "never")
    assert "the earlier run is now in" in out and metrics(folder)[0]["step"] == 2


def test_checkpoints_load_from_files_and_urls(world, undisturbed, server, tmp_path):
    check_loading("train_decoder", flags(data=world / "tars", **{**TINY, **STAGES["base"]}), undisturbed("base", 1),
                  "base", server, tmp_path)


def test_copies_of_the_stages_go_to_places_of_their_own(world, tmp_path):
    words = flags(data=world / "tars", run=tmp_path / "run", **{**TINY, "stage": "base", "image_size": 8})
    run(*words, "--save", f"local save_latest_to={tmp_path}/{{run}}_latest.pt kind=model")
    assert checkpoint.load(tmp_path / "base_latest.pt")["kind"] == "decoder"
    out = run("--data", world / "tars", "--save", f"local save_latest_to={tmp_path}/latest.pt", expect=1)
    assert "each stage would write to the same path" in out and "Traceback" not in out


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in STAGES for ranks in (1, 2)]
                         if "KILLS" in os.environ else [("base", 2), ("upsample", 1)])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(stage, ranks, undisturbed, world, tmp_path):
    kills, rng = int(os.environ.get("KILLS", 2)), random.Random(f"{stage} {ranks}")
    steps, running = 3 * kills, 0
    words = flags(data=world / "tars", run=tmp_path, **{**TINY, **STAGES[stage], "steps": steps})
    for _ in range(kills):
        process = Forked("train_decoder", *words, ranks=ranks)
        for _ in range(rng.randint(1, 4)):  # wait for so many lines of its output, then a little work more
            process.out.readline()
        sum(i * i for i in range(rng.randint(0, 1_000_000)))
        running += process.kill()
    Forked("train_decoder", *words, ranks=ranks).finish()
    assert running >= kills / 2 and not differences(undisturbed(stage, ranks, steps), tmp_path / stage)


@pytest.mark.parametrize("stage", STAGES)
def test_any_number_of_ranks_sees_the_same_samples_and_loses_the_same(stage, undisturbed):
    alone = metrics(undisturbed(stage, 1))
    for ranks in (2, 3):
        for ours, theirs in zip(metrics(undisturbed(stage, ranks)), alone, strict=True):
            losses = {name for name in theirs if "loss" in name}
            assert {k: ours[k] for k in losses} == pytest.approx({k: theirs[k] for k in losses}, rel=1e-5)
            assert ours == pytest.approx(theirs, rel=1e-3)


def first_losses(world, folder, name, *words, **settings):
    run(*flags(data=world / name, run=folder / name, **{**TINY, **STAGES["base"], "steps": 2, **settings}), *words)
    return metrics(folder / name / "base")


def test_embeddings_are_found_inside_beside_and_elsewhere_or_made_on_the_fly(world, tmp_path):
    table = np.load(world / "embeddings.npy").astype(np.float16)
    for name in ("beside", "elsewhere", "loose"):
        shutil.copytree(world / "plain", tmp_path / name)
    np.save(tmp_path / "beside/img_emb_00000.npy", table)
    np.save(tmp_path / "codes.npy", table)
    (tmp_path / "codes").mkdir()
    (tmp_path / "codes.npy").rename(tmp_path / "codes/img_emb_0.npy")
    with tarfile.open(tmp_path / "loose/00000.tar") as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in Python before 3.11.4
        archive.extractall(tmp_path / "loose", **safely)
    (tmp_path / "loose/00000.tar").unlink()
    for i, row in enumerate(table):
        (tmp_path / f"loose/{i:05d}.npy").write_bytes(npy(row))
    inside = first_losses(world, tmp_path / "runs", "tars", index_width=5)
    for name, more in (("beside", {}), ("elsewhere", {"embeddings": tmp_path / "codes"}), ("loose", {})):
        assert first_losses(tmp_path, tmp_path / "runs", name, index_width=5, **more) == inside, name
    made = first_losses(world, tmp_path / "runs", "plain")
    for ours, theirs in zip(made, inside, strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("loss", "val_loss", "test_loss"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3)


def test_crops_mirror_images_text_encodings_and_bad_pictures_on_two_ranks(world, tmp_path):
    with tarfile.open(world / "plain/00000.tar") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    files |= {f"{i:05d}.png": b"hello" for i in range(2, 30)}
    files["00001.png"] = png(np.zeros((6, 30, 3), np.uint8))
    files["00005.bin"] = b"of no interest"
    write_tar(tmp_path / "data/00000.tar", files)
    words = flags(data=tmp_path / "data", clip=world / "clip", **{**TINY, **STAGES["base"], "steps": 4},
                  crop_scale=0.5, flip=True, text_encodings="clip", max_text_len=9)
    out = run(*words, *flags(run=tmp_path / "1", workers=1))
    assert "29 of 160 pictures looked at cannot be used" in out and "00003.png: not a readable image" in out
    assert "30x6 pixels, smaller than the 8 asked for" in out and "unusable, and replaced by the next row" in out
    Forked("train_decoder", *words, *flags(run=tmp_path / "2"), ranks=2).finish()
    one, two = (metrics(tmp_path / ranks / "base") for ranks in "12")
    assert sum(line.get("unusable_rows", 0) for line in one)
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_run_knows_its_clip_by_its_weights_wherever_it_lies(world, tmp_path):
    settings = {**TINY, **STAGES["base"], "run": tmp_path / "run", "data": world / "plain"}
    run(*flags(**{**settings, "steps": 2}))
    shutil.copytree(world / "clip", tmp_path / "clip")
    assert "at step 2 of 4" in run(*flags(**{**settings, "steps": 4, "clip": tmp_path / "clip"}))
    state = checkpoint.load(tmp_path / "clip/model.pt")
    state["model"]["text_projection.weight"][0, 0] += 1
    checkpoint.save(state, tmp_path / "clip/model.pt")
    out = run(*flags(**{**settings, "clip": tmp_path / "clip"}), expect=1)
    assert "a run of another model or other data: clip is" in out and "Traceback" not in out


def test_a_learned_step_needs_no_clip_where_embeddings_are_at_hand(world, tmp_path):
    shutil.copytree(world / "tars", tmp_path / "tars", ignore=shutil.ignore_patterns("*.json"))
    out = run(*flags(data=tmp_path / "tars", run=tmp_path, **{**TINY, **STAGES["base"], "steps": 2}))
    assert "clip_score" not in out and "test_loss" in out
    out = run("sample", *flags(runs=tmp_path / "base", image=world / "0.png", steps=2, device="cpu"), expect=1)
    assert "which CLIP it was trained on is not known; name it with --clip" in out


# LoRA

@pytest.fixture(scope="session")
def adapted(artists, world):
    """The words of a training of adapters for the base, and its finished run folder."""
    words = flags(data=world / "tars", stage="base", init_from=Path(artists[0]) / "model.pt", lora_rank=1,
                  **{**TINY, "lr": 0.1})
    run(*words, *flags(run=world / "lora"))
    return words, world / "lora/base"


def test_adapters_are_all_that_is_trained_and_saved_and_resume_bit_for_bit(adapted, artists, tmp_path):
    words, folder = adapted
    base, lora = (checkpoint.load(Path(path) / "model.pt") for path in (artists[0], folder))
    assert lora["model"] and all(name.endswith((".A", ".B")) for name in lora["model"])
    size = {name: sum(t.numel() for t in state["model"].values()) for name, state in (("base", base), ("lora", lora))}
    assert size["lora"] < 0.05 * size["base"] and lora["lora"]["rank"] == 1
    assert any(value.any() for name, value in lora["model"].items() if name.endswith(".B"))
    shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "base/checkpoints/step_00000006.pt").write_bytes(b"damaged")
    out = run(*words, *flags(run=tmp_path))
    assert "damaged" in out and "resuming" in out and "in LoRA" in out
    assert not differences(folder, tmp_path / "base")
    words = [*words, *flags(run=tmp_path / "half", lora_base="bf16", precision="bf16", lora_targets="all", steps=2)]
    run(*words)
    weights = checkpoint.load(tmp_path / "half/base/model.pt")["model"]
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())


def drawn(folder, *words, **settings):
    """The pictures of a `sample`, in order: uint8 (N, H, W, 3)."""
    given = dict(steps=(3, 2), num=2, prior="none", device="cpu", out=folder / "grid.png", pictures=folder / "pictures")
    shutil.rmtree(folder / "pictures", ignore_errors=True)
    run("sample", *flags(**{**given, **settings}), *words)
    assert media.read_png(folder / "grid.png").shape[2] == 3
    return np.stack([media.read_png(path) for path in sorted((folder / "pictures").iterdir())])


def difference(one, other):
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other).max()


def test_adapters_change_pictures_as_much_as_they_are_told_to(adapted, artists, tmp_path):
    lora = adapted[1] / "model.pt"
    draw = dict(runs=artists[0], text="a red star")
    base = drawn(tmp_path, **draw)
    whole, none, run_folder, merged = (drawn(tmp_path, **draw, **more) for more in (
        dict(lora=lora), dict(lora=lora, lora_scale=0), dict(lora=adapted[1]), dict(lora=lora, lora_scale=1.0)))
    assert difference(base, none) <= 1 and difference(base, whole) > 1
    assert difference(whole, run_folder) == 0 and difference(whole, merged) == 0
    both = drawn(tmp_path, runs=artists, text="a red star", lora=("none", "none"))
    assert difference(both, drawn(tmp_path, runs=artists, text="a red star")) == 0
    out = run("sample", *flags(runs=artists, lora=("none", lora), text="x", prior="none", device="cpu"), expect=1)
    assert f"{lora}: adapters of another model than {artists[1]}" in out and len(out.splitlines()) <= 2, out
    out = run("sample", *flags(runs=artists[0], lora=(lora, lora), text="x", device="cpu"), expect=1)
    assert "--lora: 2 files for 1 --runs" in out


# Sampling

def test_a_picture_is_the_same_in_any_batch_and_on_any_number_of_ranks(artists, world, tmp_path):
    (tmp_path / "texts.txt").write_text("a small red star\n\n something blue \n")
    settings = dict(runs=artists, num=3, prior=world / "prior", prior_steps=3, guidance_scale=(2.0, 1.0), eta=0.5)
    whole = drawn(tmp_path, texts=tmp_path / "texts.txt", **settings)
    assert whole.shape == (6, 32, 32, 3) and difference(whole[:3], whole[3:]) > 1 and difference(whole[0], whole[1]) > 1
    assert difference(whole, drawn(tmp_path, texts=tmp_path / "texts.txt", max_batch=1, **settings)) <= 1
    assert difference(whole[:2], drawn(tmp_path, text="a small red star", **{**settings, "num": 2})) <= 1
    assert difference(whole, drawn(tmp_path, texts=tmp_path / "texts.txt", seed=1, **settings)) > 10
    words = flags(**settings, texts=tmp_path / "texts.txt", steps=(3, 2), device="cpu", out=tmp_path / "2.png",
                  pictures=tmp_path / "two")
    out = Forked("train_decoder", "sample", *words, ranks=2).finish()
    assert out.count("wrote") == 2 and "6 pictures of 32x32" in out
    names = [f"{text:04d}_{k:04d}.png" for text in range(2) for k in range(3)]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    assert difference(whole, np.stack([media.read_png(tmp_path / "two" / name) for name in names])) <= 1


def test_a_cascade_is_entered_and_left_anywhere(artists, world, tmp_path):
    image = world / "0.png"
    assert drawn(tmp_path, runs=artists, image=image, stop=1).shape == (2, 16, 16, 3)
    small = drawn(tmp_path, runs=artists[0], image=image)
    assert difference(small, drawn(tmp_path, runs=artists, image=image, stop=1)) == 0
    (tmp_path / "small.png").write_bytes(png(small[0]))
    (tmp_path / "other.png").write_bytes(png(small[1]))
    enlarged, again, other = (drawn(tmp_path, runs=artists, start=2, low_res=tmp_path / name)
                              for name in ("small.png", "small.png", "other.png"))
    assert enlarged.shape == (2, 32, 32, 3) and difference(enlarged, again) == 0 and difference(enlarged, other) > 1
    noisy = drawn(tmp_path, runs=artists, start=2, low_res=tmp_path / "small.png", low_res_share=1.0)
    assert difference(enlarged, noisy) > 1


def test_what_the_mask_keeps_is_kept_exactly(artists, world, tmp_path):
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[8:24, 10:] = 255
    (tmp_path / "mask.png").write_bytes(png(mask))
    image = media.read_png(world / "1.png")
    for more in (dict(), dict(text="a red star"), dict(eta=1.0)):
        out = drawn(tmp_path, runs=artists, image=world / "1.png", mask=tmp_path / "mask.png", resample=2, **more)
        keep = mask[..., 0] == 0
        assert all(np.array_equal(picture[keep], image[keep]) for picture in out)
        assert all(np.abs(picture[~keep].astype(int) - image[~keep]).mean() > 5 for picture in out)


def test_the_way_between_two_images_begins_and_ends_with_variations_of_each(artists, world, tmp_path):
    ends = [drawn(tmp_path, runs=artists, image=world / f"{i}.png", num=1)[0] for i in range(2)]
    way = drawn(tmp_path, runs=artists, image=world / "0.png", to=world / "1.png", num=3)
    assert difference(way[0], ends[0]) <= 1 and difference(way[-1], ends[1]) <= 1
    assert difference(way[1], way[0]) > 1 and difference(way[1], way[2]) > 1


def test_inverted_noise_leads_back_to_the_image_it_came_from(artists, world, tmp_path):
    images = [train_decoder.open_image(world / f"{i}.png", 16)[0].numpy() for i in range(2)]
    inverted = dict(runs=artists[0], invert=True, steps=100)
    back = drawn(tmp_path, image=world / "0.png", num=1, **inverted)[0]
    assert np.abs(back.astype(int) - images[0]).mean() < 3
    fresh = drawn(tmp_path, runs=artists[0], image=world / "0.png", num=1, steps=40)[0]
    assert np.abs(fresh.astype(int) - images[0]).mean() > 30
    way = drawn(tmp_path, image=world / "0.png", to=world / "1.png", num=3, **inverted)
    for picture, image in zip(way[::2], images):
        assert np.abs(picture.astype(int) - image).mean() < 3


# Evaluation

def test_evaluate_gives_the_same_figures_on_any_number_of_ranks_and_those_of_training(cascade, world, tmp_path):
    words = ["evaluate", *flags(runs=cascade, steps=2, eval_samples=12, device="cpu")]
    run(*words, *flags(out=tmp_path / "1.json", grid=tmp_path / "grid.png"))
    one, trained = (json.loads(path.read_text()) for path in (tmp_path / "1.json", world / "cascade/cascade.json"))
    assert one == pytest.approx(trained, rel=1e-4) and media.read_png(tmp_path / "grid.png").shape[2] == 3
    words = ["evaluate", *flags(runs=cascade, steps=2, eval_samples=7, device="cpu", data=world / "shapes",
                                prior="none")]
    out = run(*words, *flags(out=tmp_path / "1.json"))
    Forked("train_decoder", *words, *flags(out=tmp_path / "2.json"), ranks=2).finish()
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert one == pytest.approx(two, rel=1e-6)
    assert one.keys() == {"clip_score", "clip_score_real", "frechet_distance", "caption_accuracy",
                          "caption_accuracy_ceiling", *(f"accuracy_{name}" for name in synthetic.ATTRIBUTES)}
    assert one["caption_accuracy_ceiling"] > 0.7 > one["caption_accuracy"] and "caption_accuracy" in out


def test_validation_is_the_mean_over_samples_and_leaves_the_model_as_it_was(world):
    state, source, encoder = state_of(world, eval_samples=0, **{"text_encodings": "clip"})
    evaluator, unet, cfg = train_decoder.Evaluator(state.cfg, source, encoder, CPU), state.model, state.cfg
    rows, losses = source.split("validation", 0.1, 0.1), []
    assert len(rows) % 5
    for number, first in enumerate(range(0, len(rows), 5)):  # by hand: every row weighs the same
        batch = source.fetch(rows[first:first + 5])[0]
        accumulate.seed(cfg.seed, "loss", number)
        with torch.no_grad():
            loss = train_decoder.diffusion_loss(unet, unet, batch, train_decoder.conditioning(batch, cfg, encoder))
        losses += [loss.item()] * len(batch["caption"])
    unet.train()
    value = evaluator.loss(unet, "validation")
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    evaluator.figures(unet, "validation")
    assert unet.training and all(p.grad is None for p in unet.parameters())
    assert evaluator.loss(unet.eval(), "validation") == value and not unet.training


# Mistakes

def mistake(*words, status=1, **settings):
    """The one line in which a command must end, with the exit status."""
    out = run(*words, *flags(**settings), expect=status)
    lines = [line for line in out.strip().splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and lines[0].startswith("train_decoder.py: error: ") and "Traceback" not in out, out
    return lines[0]


@pytest.mark.parametrize("words, message", [
    (["--widht", "3"], "--widht: no such setting; did you mean --width?"),
    (["smaple"], "'smaple': expected one of train, evaluate, sample; did you mean sample?"),
    (["--mults", "0,1"], "--mults (0, 1): width 32 times each must be a multiple of groups 8"),
    (["--mults", "one"], "--mults: 'one' is not a whole number"), (["--mults", ""], "--mults (): width 32"),
    (["--groups", "7"], "a multiple of groups 7"), (["--image_size", "18"], "18 is not a multiple of 8"),
    (["--memory_efficient", "--image_size", "20"], "20 is not a multiple of 8, as 3 levels need"),
    (["--stage", "upsample", "--random_crop", "64"], "--random_crop 64: the first must be below image_size 32"),
    (["--stage", "upsample", "--random_crop", "15"], "--random_crop: 15 is not a multiple of 2"),
    (["--stage", "upsample", "--low_res_size", "32"], "--low_res_size 32 and --random_crop 16: the first must be"),
    (["--attention_levels", "3"], "--attention_levels, --linear_levels: 3 is no level; there are 3"),
    (["--stage", "middle"], "'middle' is none of all, base, upsample"), (["--eval_steps", "2000"], "2000 is more than"),
    (["--dream"], "--dream: it needs --objective epsilon"), (["--blur_sigma", "1"], "--blur_sigma: expected two"),
    (["--p2_gamma", "1", "--min_snr_gamma", "5"], "each is a loss weight; give one of them"),
    (["--objective", "flow", "--learned_variance", "--timestep_density", "uniform"], "steps of flow have no variance"),
    (["--learned_variance"], "--learned_variance: it needs --timestep_density uniform"),
    (["--low_res_noise", "0.1"], "--low_res_noise: it needs a --low_res_size"),
    (["--attention_levels", "1", "--linear_levels", "1,2"], "level 1 is in both"),
    (["evaluate", "--eval_samples", "-5"], "--eval_samples: -5 is below 0"),
    (["sample", "--text", "a", "--eta", "5"], "--eta: (5.0,) is not within 0 and 1"),
    (["--lora_rank", "4"], "--lora_rank 4: adapters need a trained model; name its file with --init_from"),
    (["sample"], "--text: give a text that is not empty"), (["sample", "--text", " "], "a text that is not empty"),
    (["sample", "--text", "x", "--texts", "y"], "--text and --texts: give one of them"),
    (["sample", "--text", "x", "--to", "a.png"], "--to: needs --image"),
    (["sample", "--text", "x", "--low_res", "a.png"], "--low_res: an image to enlarge goes with --start 2"),
    (["sample", "--text", "x", "--start", "2"], "--low_res: an image to enlarge goes with --start 2"),
    (["sample", "--image", "a.png", "--to", "b.png", "--mask", "c.png"], "--to: the way between two images takes no"),
    (["sample", "--image", "a.png", "--invert", "--text", "x"], "--invert: goes with --image alone"),
    (["sample", "--image", "a.png", "--text", "x"], "--text with --image: it needs --mask"),
    (["sample", "--text", "x", "--num", "0"], "--num: 0 is not above 0"),
    (["sample", "--text", "x", "--steps", "5,0"], "--steps: (5, 0) is not above 0"),
    (["evaluate", "--low_res_share", "2"], "--low_res_share: 2.0 is not within 0 and 1"),
    (["evaluate", "--torchmetrics", "fod"], "--torchmetrics: 'fod' is none of fid, kid, is, lpips"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words, status=2)


def other_stage(folder, **settings):
    """A stage's model.pt that nothing was learned for, in `folder`."""
    cfg = train_decoder.Config(**{**TINY, **STAGES["upsample"], **settings})
    width = 24 if settings else 16
    checkpoint.save({"kind": "decoder", "model": train_decoder.UNet(cfg, width).state_dict(), "clip": None,
                     "config": config.as_json(cfg), "widths": [width, 0]}, folder / "model.pt")
    return folder


def test_stages_that_do_not_fit_and_files_that_are_no_stages_are_refused(cascade, adapted, world, tmp_path):
    base, upsample = cascade
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "wide.png").write_bytes(png(np.zeros((32, 40, 3), np.uint8)))
    (tmp_path / "tiny.png").write_bytes(png(np.zeros((9, 9, 3), np.uint8)))
    wide = other_stage(tmp_path / "wide", low_res_size=16, image_size=32, random_crop=0)
    text, image = dict(text="x", prior="none"), dict(image=world / "0.png")
    for settings, message in [
        (dict(text, runs=(upsample, base)), f"stage 2, {base}/model.pt, starts from pictures of 0 pixels (0: none)"),
        (dict(text, runs=(base, other_stage(tmp_path / "small"))), "starts from pictures of 8 pixels (0: none), but"),
        (dict(text, runs=(base, wide)), "takes image embeddings 16 wide"),
        (dict(text, runs=upsample), "--runs: the first"), (dict(text, runs=tmp_path), "no such checkpoint"),
        (dict(text, runs=(world / "prior", upsample)), "model.pt: not a decoder's model.pt, best.pt or checkpoint"),
        (dict(text, runs=adapted[1]), "LoRA adapters, not a model; give their base"),
        (dict(text, runs=cascade, stop=3), "--start 1 --stop 3"),
        (dict(text, runs=cascade, lora=("none", base)), "not LoRA adapters, but a whole model"),
        (dict(text, runs=cascade, steps=1001), "--steps: 1001 is more than the 1000 timesteps of"),
        (dict(text, runs=cascade, weights="online"), "--weights online needs one of RUN/checkpoints"),
        (dict(text, runs=cascade, model="metrics.jsonl"), "not a checkpoint of this program"),
        (dict(text="x", runs=cascade, prior=tmp_path / "nothing"), "there is no prior's model.pt"),
        (dict(text="x", runs=cascade, prior=base), "not a prior's model.pt"),
        (dict(text, runs=cascade, clip=tmp_path / "nothing"), "there is no CLIP here"),
        (dict(texts=tmp_path / "empty.txt", runs=cascade), "empty.txt: no text in it"),
        (dict(texts=tmp_path / "nothing.txt", runs=cascade), "nothing.txt"),
        (dict(image=tmp_path / "nothing.png", runs=cascade), "nothing.png"),
        (dict(image=tmp_path / "empty.png", runs=cascade), "empty.png: not a readable image"),
        (dict(image, runs=cascade, mask=tmp_path / "wide.png"), "40x32 pixels, but --image has 32x32"),
        (dict(image=tmp_path / "tiny.png", runs=base, invert=True), "9x9 pixels, smaller than the 16 needed"),
        (dict(low_res=tmp_path / "tiny.png", start=2, runs=cascade), "9x9 pixels, smaller than the 16 needed"),
    ]:
        assert message in mistake("sample", device="cpu", out=tmp_path / "x.png", **settings), settings
    out = Forked("train_decoder", "sample", *flags(text="x", runs=cascade, prior=tmp_path, device="cpu"),
                 ranks=2).finish(expect=1)
    assert out.count("there is no prior's model.pt") == 1 and "Traceback" not in out


def test_torchmetrics_that_are_not_there_are_named_with_the_line_that_installs_them(cascade, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert "pip install 'torchmetrics[image]'" in mistake(
        "evaluate", runs=cascade, torchmetrics=("fid",), device="cpu", eval_samples=2)


def test_data_that_training_cannot_use_are_refused_in_one_line(cascade, world, tmp_path, monkeypatch):
    with tarfile.open(world / "tars/00001.tar") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}

    def changed(name, change):
        write_tar(tmp_path / name / "00001.tar", {k: v for key, value in files.items() for k, v in change(key, value)})
        return dict(data=tmp_path / name, clip=world / "clip")

    def keep(key, value):
        return [(key, value)]

    whole = changed("truncated", keep)["data"] / "00001.tar"
    whole.write_bytes(whole.read_bytes()[:50_000])
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    for settings, message in [
        (dict(data=tmp_path / "nothing"), "nothing: no such file or folder"),
        (dict(data=tmp_path / "truncated"), "00001.tar: corrupt or truncated tar"),
        (changed("jpg", lambda k, v: [(k.replace(".png", ".jpg"), v)]), "reading .jpg images needs pillow: pip"),
        (changed("text", lambda k, v: [(k, b"hello" if k.endswith("png") else v)]), "not a readable image"),
        (dict(changed("whole", keep), image_size=64), "32x32 pixels, smaller than the 64 asked for"),
        (changed("gaps", lambda k, v: [] if k > "00140" and k.endswith("npy") else [(k, v)]),
         "00140.npy: this embedding is missing"),
        (dict(data=world / "tars", embeddings=tmp_path), "no such files in it; expected img_emb_N.npy"),
        (dict(data=world / "plain", clip=""), "no embeddings in or beside it, so a CLIP must make them"),
        (dict(data=world / "tars", clip="", text_encodings="clip"), "--text_encodings clip: name the CLIP with --clip"),
        (dict(data=world / "tars", clip=tmp_path / "nothing"), "there is no CLIP here"),
        (dict(data=world / "tars", batch_size=200), "fewer than --batch_size 200; lower it"),
        (dict(data=world / "tars", init_from=tmp_path / "nothing.pt"), "nothing.pt: no such checkpoint"),
        (dict(data=world / "tars", init_from=world / "prior/model.pt"), "weights of another model"),
        (dict(data=world / "tars", init_from=world / "prior/model.pt", lora_rank=2), "weights of another model"),
        (dict(data=world / "tars", load=Path(cascade[0]) / "model.pt"), "start from them with --init_from"),
        (dict(data=world / "tars", run=world / "cascade", groups=2), "groups is 4 there and 2 here"),
        (dict(changed("other", keep), run=world / "cascade", image_size=16), "a run of another model or other data"),
    ]:
        given = {**TINY, **STAGES["base"], "run": tmp_path / f"run {message[:9]}", **settings}
        assert message in mistake(**given), message
    out = Forked("train_decoder", *flags(data=world / "tars", run=tmp_path / "run", **{**TINY, "chunk_size": 12}),
                 ranks=2).finish(expect=1)
    assert "too few for 2 ranks; lower chunk_size to 6 or less" in out and "Traceback" not in out
    few = changed("few", lambda k, v: [(k, v)] if k < "00102" else [])["data"]
    message = mistake("evaluate", runs=cascade, data=few, device="cpu", part="test")
    assert "none of its 2 pictures is in the part test" in message


def test_a_folder_in_use_is_refused(world, tmp_path):
    words = flags(data=world / "tars", run=tmp_path, **{**TINY, **STAGES["base"], "steps": 100_000})
    process = Forked("train_decoder", *words)
    while "parameters" not in (line := process.out.readline()):
        assert line
    message = mistake(*words)
    assert process.kill() and "in use by another live process" in message


def test_presets_and_defaults_of_the_stages_are_valid_settings():
    for settings in (*train_decoder.PRESETS.values(), *train_decoder.STAGES.values()):
        assert train_decoder.Config(**settings).image_size > 0
    assert train_decoder.Config(**train_decoder.STAGES["upsample"]).low_res_size == train_decoder.Config().image_size
    cfg = train_decoder.Config(**train_decoder.PRESETS["dalle2-64"])
    assert (cfg.width, cfg.mults, cfg.clip, cfg.batch_size) == (128, (1, 2, 4, 8), "open_clip:ViT-L-14/openai", 2048)
