"""The decoder: its parts against slow references, and the script as a user runs it."""

import functools
import inspect
import json
import shutil

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    KILLS,
    Forked,
    awake,
    differences,
    flags,
    follow,
    kill_often,
    kill_ranks,
    metrics,
    read_picture,
    write_captioned,
)

import train_decoder
import train_prior
from common import checkpoint, clip, config, data, diffusion, media, synthetic

CPU = torch.device("cpu")
UNET = dict(width=8, channel_mult=(1, 2), attention_levels=(1,), head_dim=8, cond_width=8)
TINY = dict(
    UNET,
    batch_size=12,
    chunk_size=5,
    steps=4,
    lr=0.01,
    warmup_steps=2,
    log_every=2,
    eval_every=2,
    save_every=2,
    eval_samples=6,
    eval_steps=2,
    device="cpu",
    optimizer="adamw",
)
run = functools.partial(helpers.run, "train_decoder")


# Data and models that several tests use


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a small clip/, a prior/, and 160 images: plain/, and shapes/ (embeddings)."""
    folder = tmp_path_factory.mktemp("world")
    plain = folder / "plain"
    pictures, records = write_captioned(plain, 160)
    settings = dict(steps=30, batch_size=32, embed_width=16, text_width=32, image_size=16)
    clip_config = clip.Config(run_dir=str(folder / "clip"), data=str(plain), **settings)
    (image, text), _ = clip.embed(clip.train(clip_config, CPU), [(pictures, records)])
    data.write_shards(folder / "shapes", image, text, records)
    note = {"clip": str(folder / "clip")}
    checkpoint.write_json(note, plain / "clip.json")
    checkpoint.write_json({**note, "made_from": "a seed"}, folder / "shapes/clip.json")
    cfg = train_prior.Config(width=16, depth=1, heads=2, eval_timesteps=(4,))
    state = {"kind": "prior", "widths": [16, 0], "config": config.as_json(cfg), "cwd": ""}
    state["model"] = awake(train_prior.Prior(cfg, 16)).state_dict()
    checkpoint.save(state, folder / "prior/model.pt")
    return folder


@pytest.fixture(scope="session")
def trained(world):
    """The run folders of both stages, 16 and 32 pixels, trained by the bare command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "builtin_data", lambda folder, device: str(world / "shapes"))
        out = run(*flags(run_dir=world / "trained", **TINY))
    assert "The stages together" in out
    follow(out, *flags(device="cpu", steps=2, eval_samples=4))
    assert read_picture("grid.png").any()
    return world / "trained/base", world / "trained/upsample"


def make(**settings):
    """A small U-Net whose embeddings are 16 wide, and text encodings 12."""
    defaults = dict(UNET, image_size=16, timesteps=50, objective="v", timestep_density="uniform")
    cfg = train_decoder.Config(**{**defaults, **settings})
    torch.manual_seed(0)
    has_text = cfg.text_encodings == "clip"
    unet = awake(train_decoder.UNet(cfg, 16, 12 if has_text else 0))
    if has_text:
        unet.null_text.fill(text_condition(1))
    return unet


def text_condition(count):
    return {
        "text_embed": torch.randn(count, 16),
        "text_enc": torch.randn(count, 77, 12),
        "text_mask": torch.arange(77) < torch.randint(2, 5, (count, 1)),
    }


def test_the_clip_embeds_images_in_fp32_also_within_autocast(world):
    clip_model = clip.load(world / "clip", CPU)
    cfg = make().cfg
    pictures, _ = synthetic.shapes(range(3), size=16)
    batch = {"clip_image": torch.from_numpy(pictures)}
    expected = clip_model.embed_image(batch["clip_image"])
    with torch.autocast("cpu", torch.bfloat16):
        condition = train_decoder.conditioning(batch, cfg, clip_model)
    assert torch.equal(condition["image_embed"], expected)


def inputs(unet, count=3):
    """The arguments of the U-Net by name, with nothing dropped."""
    cfg = unet.cfg
    condition = {"image_embed": torch.randn(count, 16)}
    if cfg.text_encodings == "clip":
        condition |= text_condition(count)
    keep = torch.zeros(count, dtype=torch.bool)
    return dict(
        x_t=torch.randn(count, 3, 16, 16),
        timestep=torch.randint(50, (count,)),
        condition=condition,
        drop_image=keep,
        drop_text=keep,
        low_res=torch.randn(count, 3, 16, 16) if cfg.low_res_size else None,
    )


def record_passes(unet):
    """A list that fills with ({argument: value}, output) of every pass of the U-Net."""
    passes = []
    signature = inspect.signature(unet.forward)

    def note(module, args, kwargs, out):
        passes.append((signature.bind(*args, **kwargs).arguments, out))

    unet.register_forward_hook(note, with_kwargs=True)
    return passes


def at(table, timestep):
    return table[timestep][:, None, None, None]


# The U-Net


@pytest.mark.parametrize("width, groups", [(4, 1), (36, 4), (124, 4), (132, 4), (320, 32)])
def test_norms_have_32_groups_where_each_gets_four_channels_and_else_fewer(width, groups):
    assert train_decoder.group_norm(width).num_groups == groups


@pytest.mark.parametrize(
    "name, resample",
    [
        ("downs.1", lambda x: F.avg_pool2d(x, 2)),
        ("ups.2", lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3)),
    ],
)
def test_blocks_that_resample_do_so_on_both_paths_before_the_first_convolution(name, resample):
    block = make(attention_levels=()).get_submodule(name)
    x = torch.randn(2, block.norm1.num_channels, 6, 6)
    emb = torch.randn(2, 32)
    h = block.conv1(resample(F.silu(block.norm1(x))))
    scale, shift = block.modulation(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
    h = block.conv2(F.silu(block.norm2(h) * (1 + scale) + shift))
    torch.testing.assert_close(block(x, emb, None, None), resample(x) + h)


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_res_blocks=2, learned_variance=True),
        dict(channel_mult=(1, 2, 3), attention_levels=(0, 2)),
        dict(low_res_size=8, low_res_noise=0.3, scale_shift=False),
        dict(width=28, attention_levels=(0,), image_condition=False),
        dict(low_res_size=8, attention_levels=()),
        dict(text_encodings="clip", head_dim=64),
        dict(image_condition=False, text_encodings="clip"),
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same(settings):
    unet = make(**settings, image_drop=0.5)
    batch = {"image": torch.full((6, 16, 16, 3), 255, dtype=torch.uint8)}
    condition = inputs(unet, 6)["condition"]
    calls = []
    unet.middle[0].conv1.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for checkpointing in (False, True):
        for block in [*unet.downs, *unet.middle, *unet.ups]:
            block.checkpointing = checkpointing
        unet.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        train_decoder.diffusion_loss(unet, batch, condition).backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert len(calls) == 3  # with checkpointing the block is computed twice
    for gradient, again in zip(*gradients):
        assert gradient.any() and torch.equal(gradient, again)


@pytest.mark.parametrize("dropped", [(), ("image",), ("text",), ("image", "text")])
def test_a_drop_removes_its_condition_and_nothing_else(dropped):
    unet = make(text_encodings="clip", low_res_size=8)
    given = inputs(unet)
    for kind in dropped:
        given[f"drop_{kind}"] = torch.ones(3, dtype=torch.bool)
    condition = given["condition"]
    mask = condition["text_mask"]
    values = {"x_t": given["x_t"], "low_res": given["low_res"], **condition}
    del values["text_mask"]
    for value in values.values():
        value.requires_grad_()
    unet(**given).square().sum().backward()
    for name, value in values.items():
        has_effect = name.partition("_")[0] not in dropped
        assert value.grad.flatten(1).any(1).tolist() == [has_effect] * 3
    assert not condition["text_enc"].grad[~mask].any()  # padding has none


@pytest.mark.parametrize("raw_embeddings, length", [(False, 2), (True, 5)])
def test_embeddings_are_brought_to_length_root_d_unless_they_are_raw(raw_embeddings, length):
    embed = make(raw_embeddings=raw_embeddings).scale_embedding(torch.tensor([[3.0, 4.0, 0, 0]]))
    assert embed.norm().item() == pytest.approx(length)


# Loss and sampling


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        dict(objective="flow", loss_weight="cosmap", timestep_density="logit_normal"),
        dict(objective="x0", text_encodings="clip", text_drop=0.6, loss_weight="min_snr"),
        dict(objective="v", learned_variance=True),
        dict(objective="epsilon", dream=True),
    ],
    ids=str,
)
def test_loss_equals_a_slow_one_and_a_plain_loss_has_neither_weights_nor_dream(settings, plain):
    unet = make(image_drop=0.3, **settings)
    cfg = unet.cfg
    batch = {"image": torch.randint(256, (200, 16, 16, 3)).to(torch.uint8)}
    condition = inputs(unet, 200)["condition"]
    passes = record_passes(unet)
    loss = train_decoder.diffusion_loss(unet, batch, condition, plain=plain)
    given, out = passes[0]
    x_t = given["x_t"]
    x0 = media.from_uint8(batch["image"])
    levels = at(unet.alpha, given["timestep"]), at(unet.sigma, given["timestep"])
    noise = (x_t - levels[0] * x0) / levels[1]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    target = diffusion.target(cfg.objective, x0, noise, *levels)
    assert len(passes) == 1 + (cfg.dream and not plain)
    if len(passes) == 2:
        x_t, target = diffusion.dream(x_t, noise, out, levels[1])
        given, out = passes[1]
        torch.testing.assert_close(given["x_t"], x_t, rtol=1e-3, atol=1e-3)
    kind = "none" if plain else cfg.loss_weight
    weight = diffusion.loss_weight(kind, cfg.objective, *levels, cfg.loss_gamma)
    expected = ((out[:, :3] - target) ** 2 * weight).mean()
    if cfg.learned_variance:
        x0_hat = diffusion.predict_x0(cfg.objective, out[:, :3], x_t, *levels).clamp(-1, 1)
        fraction = (out[:, 3:] + 1) / 2
        tables = unet.alpha, unet.sigma
        bound = diffusion.variational_bound(x0, given["timestep"], x0_hat, fraction, *tables)
        expected += 0.001 * 50 * bound.mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for name, expected in (("drop_image", 0.3), ("drop_text", cfg.text_drop)):
        assert given[name].float().mean().item() == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("blur, crop", [(0.0, 8), (0.4, 0)])
def test_an_upsampler_learns_from_blurred_crops_with_noise_of_the_level_it_is_given(
    blur, crop, monkeypatch
):
    # The color of a pixel is its position.
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    images = torch.stack([y, x, x * y / 16]).repeat(100, 1, 1, 1)
    unet = make(low_res_size=8, random_crop=crop, low_res_blur=blur, low_res_noise=0.6)
    monkeypatch.setattr(train_decoder, "BLUR_SIGMA", (0.7, 0.7))
    outputs = []
    for noise_fn in (torch.zeros_like, torch.randn_like):
        monkeypatch.setattr(torch, "randn_like", noise_fn)
        torch.manual_seed(0)
        outputs.append(train_decoder.upsampler_inputs(unet, images))
    (large, clean, level), (_, noisy, _) = outputs
    assert 0 <= level.min() < 5 and 24 < level.max() <= 29  # 0.6 of the timesteps
    noise = (noisy - clean).flatten(1).std(1)
    assert (noise / unet.sigma[level] - 1).abs().max() < 0.25

    small = clean / at(unet.alpha, level)
    corners = large[:, :2, 0, 0].long()
    for axis in corners.T:  # crops from everywhere
        assert axis.unique().tolist() == list(range(9 if crop else 1))
    low_res = media.resize(images, 8, "box")
    matches = []
    for pictures in (low_res, media.blur(low_res, torch.full((100,), 0.7))):
        expected = media.crop(media.resize(pictures, 16, "bicubic"), crop or 16, corners)
        matches.append((small - expected).flatten(1).abs().amax(1) < 1e-3)
    is_sharp, is_blurred = matches
    assert torch.equal(is_blurred, ~is_sharp)
    assert is_blurred.float().mean().item() == pytest.approx(blur, abs=0.12)


@pytest.mark.parametrize(
    "scale, eta, settings",
    [
        (2.5, 0.0, dict(objective="v", text_encodings="clip")),
        (1.0, 0.0, dict(objective="epsilon")),
        (0.0, 0.0, dict(objective="flow")),
        (1.5, 1.0, dict(objective="x0", learned_variance=True)),
    ],
    ids=str,
)
@torch.no_grad()
def test_sampling_equals_one_with_two_passes_a_step(scale, eta, settings):
    unet = make(**settings, low_res_size=8, low_res_noise=0.3).eval()
    cfg = unet.cfg
    if cfg.objective == "x0":  # so that clipping is reached; elsewhere it enlarges rounding
        unet.out[-1].weight.data[:3] *= 10
    given = inputs(unet)
    low_res = torch.rand(3, 3, 8, 8)
    large = media.resize(low_res, 16, "bicubic")
    given["low_res"] = unet.alpha[10] * large + unet.sigma[10] * 0.5  # a fifth of the timesteps
    given["low_res_level"] = torch.full((3,), 10)
    null = {name: ~given[name] for name in ("drop_image", "drop_text")}

    def noise_fn(x):
        return torch.full_like(x, 0.5)

    def denoise(x, t):
        given.update(x_t=x, timestep=t)
        out = unet(**given)
        dropped = unet(**{**given, **null})
        guided = (dropped + scale * (out - dropped))[:, :3]
        levels = unet.alpha[t[0]], unet.sigma[t[0]]
        x0 = diffusion.predict_x0(cfg.objective, guided, x, *levels).clamp(-1, 1)
        return (x0, (out[:, 3:] + 1) / 2) if cfg.learned_variance else x0

    x = noise_fn(given["x_t"])
    expected = diffusion.sample(denoise, x, unet.alpha, unet.sigma, 4, eta, noise_fn)
    sampled = train_decoder.sample_images(
        unet, given["condition"], 3, 4, scale, eta, noise_fn, low_res, low_res_noise=0.2
    )
    torch.testing.assert_close(sampled, expected.clamp(-1, 1), rtol=1e-3, atol=5e-4)


# Evaluation


def test_frechet_distance_equals_its_formula():
    rng = np.random.default_rng(0)
    fake = rng.standard_normal((50, 6)) * [1, 2, 3, 4, 5, 6]
    real = rng.standard_normal((70, 6)) + 1
    means = ((fake.mean(0) - real.mean(0)) ** 2).sum()
    cov1 = np.cov(fake.T)
    cov2 = np.cov(real.T)
    root = np.sqrt(np.linalg.eigvals(cov1 @ cov2)).sum()
    expected = means + np.trace(cov1 + cov2) - 2 * root
    assert train_decoder.frechet_distance(fake, real) == pytest.approx(expected, rel=1e-7)
    assert np.isfinite(train_decoder.frechet_distance(fake[:1], real[:1]))


def test_evaluate_repeats_the_metrics_of_training_on_any_ranks_and_takes_a_prior(
    trained, world, tmp_path
):
    def evaluate(name, *words, ranks=0):
        given = dict(steps=2, eval_samples=12, device="cpu", run_dir=trained, out=tmp_path / name)
        run("evaluate", *flags(**given), *words, ranks=ranks)
        return json.loads((tmp_path / name).read_text())

    evaluate("again", "--grid", tmp_path / "grid.png")
    for ours, theirs in (("again", "cascade.json"), ("grid.png", "cascade.png")):
        assert (tmp_path / ours).read_bytes() == (world / "trained" / theirs).read_bytes()
    words = flags(data=world / "plain", split="train")
    real = evaluate("real", *words)
    assert evaluate("two", *words, ranks=2) == pytest.approx(real, rel=1e-4)
    by_prior = evaluate("prior", *words, "--prior", world / "prior")
    assert by_prior["clip_score"] != real["clip_score"]
    assert by_prior["clip_score_real"] == real["clip_score_real"]


# Training, as a user runs it


def test_one_command_trains_both_stages_and_2_ranks_lose_the_same(trained, world, tmp_path):
    out = run(*flags(data=world / "shapes", run_dir=tmp_path, **TINY), ranks=2)
    assert "2 rank(s) on cpu" in out and out.count("Next: ") == 1
    for folder in trained:
        for name in ("auto_resume.json", "model.pt", "best.pt", "report.html"):
            assert (folder / name).is_file()
        lines = metrics(folder)
        for name in ("loss", "val_loss"):
            assert [line["step"] for line in lines if name in line] == [2, 4]
        assert "test_frechet_distance" in lines[-1]
        for name in ("step_00000002.png", "test.png"):  # real images above samples
            assert read_picture(folder / "samples" / name).shape[0] > 2 * 96
        for ours, theirs in zip(lines, metrics(tmp_path / folder.name), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)
        again = run("--config", folder / "config.json", "--data", world / "shapes")
        assert "is finished, at step 4; to train on, give more --steps" in again


UPSAMPLE = dict(stage="upsample", image_size=16, low_res_size=8, random_crop=8)
BASE = dict(stage="base", image_size=8)


@pytest.mark.parametrize(
    "ranks, stage",
    [
        *((ranks, UPSAMPLE) for ranks in kill_ranks(1)),
        *((ranks, BASE) for ranks in kill_ranks(2)),
    ],
)
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(
    ranks, stage, world, tmp_path
):
    shutil.copytree(world / "plain", tmp_path / "data")
    (tmp_path / "data/00003.png").write_bytes(b"hello")
    settings = {**TINY, **stage, "steps": 3 * KILLS, "eval_every": 4, "optimizer": "muon"}
    settings |= dict(crop_scale=0.5, flip=True, text_encodings="clip", max_text_len=9)
    words = flags(data=tmp_path / "data", **settings)
    whole = [*words, *flags(run_dir=tmp_path / "whole")]
    out = Forked("train_decoder", *whole, ranks=ranks).finish()
    assert "1 of 160 samples looked at" in out
    assert out.count("00003.png: not a readable image") == 2  # at the start, and when met
    words += flags(run_dir=tmp_path / "killed")
    running = kill_often("train_decoder", words, ranks, f"{stage['stage']} {ranks}")
    Forked("train_decoder", *words, ranks=ranks).finish()
    assert running >= KILLS / 2
    folders = [tmp_path / name / stage["stage"] for name in ("whole", "killed")]
    assert not differences(*folders)


def test_adapters_alone_are_trained_and_count_as_they_are_scaled(trained, world, tmp_path):
    base = trained[0] / "model.pt"
    settings = dict(TINY, lr=0.05, stage="base", lora_rank=1, init_from=base)
    out = run(*flags(data=world / "plain", run_dir=tmp_path, **settings))
    assert "frechet_distance" in follow(out, "--steps", 2, "--device", "cpu")
    weights = checkpoint.load(base)["model"]
    for scale in (0.0, 1.0):
        unet, _ = train_decoder.load_unet(tmp_path / "base/model.pt", CPU, lora_scale=scale)
        adapted = unet.state_dict()
        changed = [name for name in weights if not torch.equal(weights[name], adapted[name])]
        assert bool(changed) == bool(scale) and all("attention." in name for name in changed)


# Sampling, as a user runs it


def sample(folder, **settings):
    """The pictures (N, H, W, 3) that the sample command writes."""
    given = dict(steps=(3, 2), num_samples=2, device="cpu")
    given |= dict(out=folder / "grid.png", pictures=folder / "pictures")
    shutil.rmtree(folder / "pictures", ignore_errors=True)
    out = run("sample", *flags(**{**given, **settings}))
    files = sorted((folder / "pictures").iterdir())
    assert f"wrote {folder}/grid.png: {len(files)} pictures of" in out
    assert read_picture(folder / "grid.png").shape[2] == 3
    return np.stack([read_picture(path) for path in files]).astype(int)


def test_a_sample_is_the_same_in_any_batch(trained, world, tmp_path):
    (tmp_path / "texts.txt").write_text("a small red star\n\n something blue \n")
    settings = dict(run_dir=trained, prior=world / "prior", guidance_scale=2, eta=0.5)
    texts = dict(settings, texts=tmp_path / "texts.txt", num_samples=3)
    together = sample(tmp_path, **texts)
    assert together.shape == (6, 32, 32, 3)
    assert (tmp_path / "pictures/0001_0002.png").is_file()  # TEXT_NUMBER.png
    assert np.abs(together - sample(tmp_path, **texts, seed=1)).max() > 10
    assert np.abs(together - sample(tmp_path, **texts, max_batch=1)).max() <= 1
    alone = sample(tmp_path, **settings, text="a small red star")
    assert np.abs(together[:2] - alone).max() <= 1


def test_images_are_varied_and_interpolated(trained, world, tmp_path):
    files = [world / f"plain/{i:05d}.png" for i in range(2)]
    ends = [sample(tmp_path, run_dir=trained, image=file, num_samples=1)[0] for file in files]
    way = sample(tmp_path, run_dir=trained, image=files[0], to=files[1], num_samples=3)
    assert np.abs(way[[0, 2]] - ends).max() <= 1
    assert all(np.abs(way[1] - end).max() > 1 for end in ends)


def test_an_upsampler_alone_enlarges_images_without_a_clip(trained, world, tmp_path):
    state = checkpoint.load(trained[1] / "model.pt")
    checkpoint.save({**state, "clip": None}, tmp_path / "alone/model.pt")
    enlarged = []
    for i in range(2):
        settings = dict(run_dir=tmp_path / "alone", low_res=world / f"plain/{i:05d}.png")
        enlarged.append(sample(tmp_path, **settings, num_samples=1))
    assert np.abs(enlarged[0] - enlarged[1]).max() > 1


@pytest.mark.parametrize("text", ["", "a red star"])
def test_inpainting_keeps_the_black_of_the_mask_exactly(text, trained, world, tmp_path):
    image = world / "plain/00001.png"
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[8:24, 10:] = 255
    media.write_png(tmp_path / "mask.png", mask)
    settings = dict(image=image, mask=tmp_path / "mask.png", prior=world / "prior")
    for picture in sample(tmp_path, run_dir=trained, text=text, eta=1.0, **settings):
        difference = np.abs(picture - read_picture(image))
        assert not difference[mask == 0].any()
        assert difference[mask > 0].mean() > 5


@torch.no_grad()
def test_unconditional_samples_are_those_of_a_dropped_condition(trained, tmp_path):
    unet, _ = train_decoder.load_unet(trained[0] / "model.pt", CPU)
    embed = torch.randn(2, 16)
    keep = torch.zeros(2, dtype=torch.bool)
    zeros = unet.embed_conditions({"image_embed": 0 * embed}, keep, keep)
    dropped = unet.embed_conditions({"image_embed": embed}, ~keep, keep)
    torch.testing.assert_close(zeros, dropped, rtol=0, atol=0)
    assert not torch.equal(zeros[0], unet.embed_conditions({"image_embed": embed}, keep, keep)[0])
    assert len(sample(tmp_path, run_dir=trained)) == 2


# Mistakes


def mistake(*words, status=1, ranks=0):
    """The one line in which a command must end, whatever the number of ranks."""
    out = run(*words, ranks=ranks, expect=status)
    lines = [line for line in out.strip().splitlines() if "error:" in line or not ranks]
    assert len(lines) == 1 and lines[0].startswith("train_decoder.py: error: "), out
    assert "Traceback" not in out
    return lines[0]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--width 30", "--width: 30 is not a multiple of 4"),
        ("--raw_embeddings --no_image_condition", "--raw_embeddings: it needs --image_condition"),
        ("--image_size 18", "multiples of 4, as 3 levels"),
        ("--stage upsample --random_crop 7", "multiples of 2, as 2 levels"),
        ("--eval_steps 2000", "2000 sampling steps"),
        ("--attention_levels 3", "(3,) are not all below 3"),
        ("--crop_scale 0", "--crop_scale: 0.0 is not above 0"),
        ("--stage upsample --random_crop 64", "--image_size 32: --low_res_size must be smaller"),
        ("--stage upsample --low_res_size 32", "--image_size 32: --low_res_size must be smaller"),
        ("--learned_variance --timestep_density mode", "--timestep_density uniform"),
        ("sample --out x.jpg", "expected a name that ends in .png"),
        ("sample --text x --mask a.png", "--mask: it has no effect without --image"),
        ("sample --text x --image a.png", "it needs --mask"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


@pytest.fixture(scope="module")
def odd(trained, world):
    """World with odd/, whose CLIP is not known and which needs a condition, and clip/narrow.pt."""
    narrow = clip.Config(embed_width=8)
    state = {"model": clip.CLIP(narrow, []).state_dict(), "vocabulary": []}
    checkpoint.save({**state, "config": config.as_json(narrow)}, world / "clip/narrow.pt")
    state = checkpoint.load(trained[0] / "model.pt")
    state |= {"clip": None, "clip_fingerprint": None}
    state["config"]["image_drop"] = 0.0
    checkpoint.save(state, world / "odd/model.pt")
    return world


@pytest.mark.parametrize(
    "words, message",
    [
        ("sample --run_dir trained/upsample,trained/base", "starts from pictures of 0 pixels"),
        ("sample --text x --run_dir odd --guidance_scale 2", "trained with --image_drop 0"),
        ("sample --run_dir odd --clip clip", "--image_drop 0, so it needs a text or image"),
        ("sample --run_dir odd", "which CLIP made the embeddings is not known; name it"),
        ("sample --run_dir trained --clip clip/narrow.pt", "not the CLIP that made the"),
        ("sample --run_dir odd --clip clip/narrow.pt", "embeddings are 8 wide, but 16 are needed"),
        ("sample --text x --run_dir trained", "--prior runs/prior: there is no prior's model.pt"),
        ("sample --run_dir trained/upsample", "--low_res: an upsampler, and no other stage"),
        ("sample --run_dir trained --low_res_noise 0.1", "are trained with at most 0.0"),
        (
            "evaluate --run_dir odd --data plain --clip clip/narrow.pt",
            "embeddings 8 wide, but the decoder takes 16",
        ),
        ("train --data plain --clip=", "no embeddings in or beside it, so a CLIP must"),
        ("train --data plain --image_size 24", "16 pixels (0: none), but base"),
    ],
)
def test_mistakes_in_files_are_one_line_and_status_1(words, message, odd, monkeypatch):
    monkeypatch.chdir(odd)
    assert message in mistake(*words.split(), "--device", "cpu")


def test_a_mistake_on_2_ranks_is_one_line(world, tmp_path):
    words = flags(stage="base", data=world / "plain", run_dir=tmp_path, **TINY)
    assert "too few for 2 ranks; leave it out" in mistake(*words, "--chunk_size=12", ranks=2)


@pytest.mark.parametrize("preset", train_decoder.PRESETS.values(), ids=train_decoder.PRESETS)
def test_presets_are_a_stage_with_the_papers_diffusion(preset):
    cfg = train_decoder.Config(**preset)
    assert (cfg.objective, cfg.timestep_density, cfg.optimizer) == ("epsilon", "uniform", "adamw")
    assert cfg.eta == 1 or not cfg.learned_variance  # else it has no effect
