"""The decoder: its parts, compared with slow references, and the script as users run it."""

import dataclasses
import functools
import shutil
import types
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from helpers import BRIEF, CPU, UNET, awake, metrics, read_picture, write_captioned
from torch.testing import assert_close

import train_decoder
import train_prior
from common import checkpoint, config
from common.data import clips, embed, embeddings, media
from common.models import diffusion, pixels

TINY = dict(
    BRIEF,
    **UNET,
    batch_size=12,
    chunk_size=5,
    steps=4,
    lr=0.01,
    eval_every=2,
    eval_samples=6,
    eval_steps=2,
    optimizer="adamw",
)
BASE = dict(TINY, stage="base", attention_levels=(1,), cond_width=8)
UPSAMPLE = dict(TINY, stage="upsample")
run = functools.partial(helpers.run, "train_decoder")


# Data and models that several tests use


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a small clip/, a prior/, 160 images in plain/, and shapes/ with embeddings."""
    folder = tmp_path_factory.mktemp("world")
    plain = folder / "plain"
    pictures, records = write_captioned(plain, 160)
    settings = dict(steps=30, batch_size=32, embed_width=16, text_width=32, image_size=16)
    clip_config = embed.Config(run_dir=str(folder / "clip"), data=str(plain), **settings)
    embed.train(clip_config, CPU)
    (image, text), _ = embed.embed(clips.load(clip_config.run_dir, CPU), [(pictures, records)])
    embeddings.write_shards(folder / "shapes", image, text, records)
    note = {"clip": str(folder / "clip")}
    checkpoint.write_json(note, plain / "clip.json")
    checkpoint.write_json({**note, "made_from": "a seed"}, folder / "shapes/clip.json")
    cfg = train_prior.Config(width=16, depth=1, heads=2, eval_timesteps=(4,), max_text_len=20)
    contents = {"kind": "prior", "widths": [16, 0], "config": config.as_json(cfg)}
    contents["model"] = awake(train_prior.Prior(cfg, 16)).state_dict()
    checkpoint.save(contents, folder / "prior/model.pt")
    return folder


@pytest.fixture(scope="session")
def trained(world):
    """The run folders of both stages, 16 and 32 pixels, trained by the command without --stage."""
    train_stage = train_decoder.train_stage

    def train_small(cfg, device):
        settings = {"base": BASE, "upsample": UPSAMPLE}[cfg.stage]
        train_stage(dataclasses.replace(cfg, **settings), device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed, "builtin_data", lambda folder, device: str(world / "shapes"))
        patch.setattr(train_decoder, "train_stage", train_small)
        out = run(run_dir=world / "trained", device="cpu", eval_samples=6)
    assert "trained, on test images; judge: the decoder's own CLIP" in out
    assert read_picture(world / "trained/cascade.png").any()
    return world / "trained/base", world / "trained/upsample"


def make(**settings):
    """A small U-Net for embeddings of width 16 and text encodings of width 12.

    settings: fields of BaseConfig. Other names become constants of its class, as in a fork.
    """
    defaults = dict(UNET, attention_levels=(1,), cond_width=8, objective="v", timesteps=50)
    settings = defaults | {"timestep_density": "uniform"} | settings
    fields = {each.name for each in dataclasses.fields(train_decoder.BaseConfig)}
    constants = {name: settings.pop(name) for name in settings.keys() - fields}
    cfg = type("Config", (train_decoder.BaseConfig,), constants)(**settings)
    torch.manual_seed(0)
    has_text = cfg.text_encodings
    unet = train_decoder.UNet(cfg, 16, 12 if has_text else 0)
    unet = awake(train_decoder.place(unet, "cpu"))
    if has_text:
        unet.null_text.fill(text_condition(1))
    return unet


def text_condition(count):
    return {
        "text_embed": torch.randn(count, 16),
        "text_enc": torch.randn(count, 77, 12),
        "text_mask": torch.arange(77) < torch.randint(2, 5, (count, 1)),
    }


def test_the_clip_embeds_images_in_fp32_also_within_autocast():
    images = torch.randn(4, 4)
    encoder = types.SimpleNamespace(embed_image=lambda x: x @ x)
    with torch.autocast("cpu", torch.bfloat16):
        condition = train_decoder.conditioning({"clip_image": images}, make().cfg, encoder)
    assert torch.equal(condition["image_embed"], images @ images)


def inputs(unet, count=3):
    """The arguments of the U-Net by name, with no conditions dropped."""
    cfg = unet.cfg
    condition = {"image_embed": torch.randn(count, 16)}
    if cfg.text_encodings:
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


def test_stored_embeddings_of_another_clip_are_refused(world, tmp_path):
    model = clips.load(world / "clip", CPU)
    shutil.copytree(world / "plain", tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.png"):
        image_embed = model.embed_image(torch.tensor(read_picture(path))[None])
        np.save(path.with_suffix(".npy"), image_embed[0].numpy())
    cfg = train_decoder.BaseConfig(**BASE, data=str(tmp_path))
    train_decoder.open_data(cfg, 16, None, CPU)
    for path in tmp_path.glob("*.npy"):
        np.save(path, -np.roll(np.load(path), 5))
    with pytest.raises(config.UserError, match="its embeddings are from another CLIP"):
        train_decoder.open_data(cfg, 16, None, CPU)


# The U-Net


@pytest.mark.parametrize("width, groups", {4: 1, 36: 4, 124: 4, 132: 4, 320: 32}.items())
def test_norms_have_32_groups_where_each_gets_four_channels_and_else_fewer(width, groups):
    assert train_decoder.group_norm(width).num_groups == groups


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_res_blocks=2, learned_variance=True),
        dict(channel_mult=(1, 2, 3), attention_levels=(0, 2)),
        dict(low_res_size=8, low_res_noise=0.3, scale_shift=False),
        dict(text_encodings=True),
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same(settings, monkeypatch):
    monkeypatch.setattr(train_decoder, "IMAGE_DROP", 0.5)
    batch = {"image": torch.full((6, 16, 16, 3), 255, dtype=torch.uint8)}
    calls = []
    gradients = []
    for checkpointing in (False, True):
        unet = make(**settings, checkpointing=checkpointing)
        if "low_res_size" in settings:
            batch = train_decoder.cut_crops(batch, np.arange(6), unet.cfg)
        condition = inputs(unet, 6)["condition"]
        unet.middle[0].conv1.register_forward_pre_hook(lambda *_: calls.append(1))
        train_decoder.diffusion_loss(unet, batch, condition).backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert len(calls) == 3  # with checkpointing, the block is computed twice
    for gradient, again in zip(*gradients):
        assert gradient.any() and torch.equal(gradient, again)


@pytest.mark.parametrize("dropped", [(), ("image",), ("text",), ("image", "text")])
def test_a_drop_removes_its_condition_and_nothing_else(dropped):
    unet = make(text_encodings=True, low_res_size=8)
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
    assert not condition["text_enc"].grad[~mask].any()  # padding has no effect


def test_zeros_condition_as_a_dropped_embedding_does():
    unet = make()
    given = inputs(unet)
    kept = unet(**given)
    dropped = unet(**given | {"drop_image": ~given["drop_image"]})
    given["condition"]["image_embed"] *= 0
    assert torch.equal(unet(**given), dropped) and not torch.equal(kept, dropped)


@pytest.mark.parametrize("raw_embeddings, length", [(False, 2), (True, 5)])
def test_embeddings_are_brought_to_length_root_d_unless_they_are_raw(raw_embeddings, length):
    embed = make(raw_embeddings=raw_embeddings).scale_embedding(torch.tensor([[3.0, 4.0, 0, 0]]))
    assert embed.norm().item() == pytest.approx(length)


# Loss and sampling


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        dict(objective="flow", loss_weight="cosmap", timestep_density="logit_normal"),
        dict(objective="x0", text_encodings=True, loss_weight="min_snr"),
        dict(objective="v", learned_variance=True),
    ],
    ids=str,
)
def test_loss_equals_a_slow_one_and_in_evaluation_has_no_weights(settings, training):
    unet = make(**settings).train(training)
    cfg = unet.cfg
    batch = {"image": torch.randint(256, (200, 16, 16, 3)).to(torch.uint8)}
    condition = inputs(unet, 200)["condition"]
    passes = []
    unet.register_forward_hook(lambda _, given, out: passes.append((given, out)))
    loss = train_decoder.diffusion_loss(unet, batch, condition)
    [((x_t, timestep, _, *drops, low_res, low_res_timestep), out)] = passes
    assert low_res is low_res_timestep is None
    x0 = pixels.from_uint8(batch["image"])
    alpha, sigma = levels = diffusion.alpha_sigma(unet, timestep, x0)
    noise = (x_t - alpha * x0) / sigma
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    expected = (out[:, :3] - diffusion.target(cfg.objective, x0, noise, *levels)) ** 2
    if training:
        expected *= diffusion.loss_weight(cfg.loss_weight, cfg.objective, *levels)
    expected = expected.mean()
    if cfg.learned_variance:
        x0_hat = diffusion.predict_x0(cfg.objective, out[:, :3], x_t, *levels).clamp(-1, 1)
        fraction = (out[:, 3:] + 1) / 2
        bound = diffusion.variational_bound(x0, timestep, x0_hat, fraction, unet.alpha, unet.sigma)
        expected += 0.001 * 50 * bound.mean()
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    shares = [drop.float().mean().item() for drop in drops]
    assert shares == pytest.approx([0.1, 0.5], abs=0.1)  # DALL-E 2 §2.1


def positions(count, size):
    """uint8 (count, size, size, 3): the color of a pixel is its position."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    image = torch.stack([y, x, x * y % 256], dim=-1)
    return image.byte().repeat(count, 1, 1, 1)


@pytest.mark.parametrize("size, low, crop", [(16, 8, 8), (16, 8, 0), (128, 64, 16), (120, 80, 20)])
def test_an_upsampler_learns_from_blurred_crops_with_noise_of_the_level_it_is_given(
    size, low, crop, monkeypatch
):
    images = positions(100, size)
    unet = make(image_size=size, low_res_size=low, random_crop=crop, low_res_noise=0.6)
    batch = train_decoder.cut_crops({"image": images}, np.arange(100), unet.cfg)
    monkeypatch.setattr(train_decoder, "BLUR_SIGMA", (0.7, 0.7))
    monkeypatch.setattr(train_decoder, "BLUR_PROBABILITY", 0.4)
    outputs = []
    for noise_fn in (torch.zeros_like, torch.randn_like):
        monkeypatch.setattr(torch, "randn_like", noise_fn)
        torch.manual_seed(0)
        outputs.append(train_decoder.upsampler_inputs(unet, batch))
    (clean, level), (noisy, _) = outputs
    assert 0 <= level.min() < 5 and 24 < level.max() <= 29  # the first 0.6 of 50 timesteps
    alpha, sigma = diffusion.alpha_sigma(unet, level, clean)
    noise = (noisy - clean) / sigma
    assert (noise.flatten(1).std(1) - 1).abs().max() < 0.25

    # Crops come from everywhere. The enlarged window has all pixels that they depend on.
    crop = crop or size
    corners = batch["image"][:, 0, 0, :2].long()
    assert torch.equal(corners, batch["corner"])
    assert len(corners.unique()) > 0.7 * (size - crop + 1)
    x0 = pixels.from_uint8(images)
    assert torch.equal(pixels.from_uint8(batch["image"]), pixels.crop(x0, crop, corners))
    assert batch["low_res"].shape[2] <= crop * low // size + 2 * train_decoder.MARGIN + 1
    low_res = pixels.resize(x0, low, "box")
    is_match = []
    for pictures in (low_res, pixels.blur(low_res, torch.full((100,), 0.7))):
        expected = alpha * pixels.crop(pixels.resize(pictures, size, "bicubic"), crop, corners)
        is_match.append((clean - expected).flatten(1).abs().amax(1) < 1e-5)
    is_sharp, is_blurred = is_match
    assert torch.equal(is_blurred, ~is_sharp)
    assert is_blurred.float().mean().item() == pytest.approx(0.4, abs=0.12)


@pytest.mark.parametrize(
    "scale, eta, settings",
    [
        (2.5, 0.0, dict(objective="v", text_encodings=True)),
        (0.0, 0.0, dict(objective="flow")),
        (1.5, 1.0, dict(objective="x0", learned_variance=True)),
    ],
    ids=str,
)
@torch.no_grad()
def test_sampling_equals_one_with_two_passes_a_step(scale, eta, settings):
    unet = make(**settings, low_res_size=8, low_res_noise=0.3).eval()
    cfg = unet.cfg
    if cfg.objective == "x0":  # so that x0 is clipped; other objectives would amplify rounding
        unet.out[-1].weight.data[:3] *= 10
    given = inputs(unet)
    low_res = torch.rand(3, 3, 8, 8)
    noise_fn = functools.partial(torch.full_like, fill_value=0.5)
    large = pixels.resize(low_res, 16, "bicubic")
    given["low_res"] = unet.alpha[0] * large + unet.sigma[0] * 0.5  # the least noise
    given["low_res_timestep"] = torch.zeros(3)
    null = {name: ~given[name] for name in ("drop_image", "drop_text")}

    def denoise(x, t):
        given.update(x_t=x, timestep=t)
        out = unet(**given)
        dropped = unet(**given | null)
        guided = (dropped + scale * (out - dropped))[:, :3]
        levels = diffusion.alpha_sigma(unet, t, x)
        x0 = diffusion.predict_x0(cfg.objective, guided, x, *levels).clamp(-1, 1)
        return x0, (out[:, 3:] + 1) / 2 if cfg.learned_variance else 0.0

    x = noise_fn(given["x_t"])
    expected = diffusion.sample(denoise, x, unet.alpha, unet.sigma, 4, eta, noise_fn)
    sampled = train_decoder.sample_images(
        unet, given["condition"], 3, 4, scale, eta, noise_fn, low_res
    )
    assert_close(sampled, expected, rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("objective", ["epsilon", "x0", "v"])
def test_dream_moves_the_noise_by_the_networks_own_error_in_training_alone(objective):
    unet = make(objective=objective, low_res_size=8, dream=True)
    batch = {"image": torch.randint(256, (20, 16, 16, 3)).to(torch.uint8)}
    batch = train_decoder.cut_crops(batch, np.arange(20), unet.cfg)
    condition = inputs(unet, 20)["condition"]
    passes = []
    unet.register_forward_hook(lambda _, given, out: passes.append((given, out)))
    loss = train_decoder.diffusion_loss(unet.train(), batch, condition)
    (first, out), (second, moved_out) = passes
    x0 = pixels.from_uint8(batch["image"])
    timestep = first[1]
    alpha, sigma = levels = diffusion.alpha_sigma(unet, timestep, x0)
    noise = (first[0] - alpha * x0) / sigma
    x0_hat = diffusion.predict_x0(objective, out[:, :3], first[0], *levels)
    error = noise - (first[0] - alpha * x0_hat) / sigma
    moved = noise + sigma * error
    # At the last timesteps, epsilon divides by an alpha near 0, which amplifies rounding.
    usual = timestep < 45
    assert_close(second[0][usual], (alpha * x0 + sigma * moved)[usual], rtol=1e-3, atol=1e-3)
    target = diffusion.target(objective, x0, moved, *levels)
    assert_close(loss, ((moved_out[:, :3] - target) ** 2).mean(), rtol=1e-2, atol=1e-3)
    passes.clear()
    train_decoder.diffusion_loss(unet.eval(), batch, condition)
    assert len(passes) == 1


# Evaluation


def test_frechet_distance_equals_its_formula():
    rng = np.random.default_rng(0)
    fake = rng.standard_normal((50, 6)) * [1, 2, 3, 4, 5, 6]
    real = rng.standard_normal((70, 6)) + 1
    cov1 = np.cov(fake.T)
    cov2 = np.cov(real.T)
    squared = (fake.mean(0) - real.mean(0)) ** 2
    root = np.sqrt(np.linalg.eigvals(cov1 @ cov2))
    expected = (squared + np.diag(cov1 + cov2) - 2 * root).sum()
    assert train_decoder.frechet_distance(fake, real) == pytest.approx(expected)
    assert np.isfinite(train_decoder.frechet_distance(fake[:1], real[:1]))


def test_evaluate_repeats_the_metrics_of_training_on_any_ranks_and_takes_a_prior(trained, world):
    def evaluate(**settings):
        given = dict(steps=2, eval_samples=12, device="cpu", run_dir=trained, out="metrics.json")
        run("evaluate", **given, **settings)
        return config.read_json("metrics.json")

    assert evaluate(grid="grid.png") == config.read_json(world / "trained/cascade.json")
    grid = world / "trained/cascade.png"
    assert Path("grid.png").read_bytes() == grid.read_bytes()
    plain = world / "plain"
    real = evaluate(data=plain)
    assert evaluate(data=plain, ranks=2) == pytest.approx(real, rel=1e-4)
    by_prior = evaluate(data=plain, prior=world / "prior")
    assert by_prior["clip_score"] != real["clip_score"]
    name = "caption_retrieval_ceiling"
    assert by_prior[name] == real[name] > 0
    settings = dict(data=plain, run_dir=trained[0], prior=world / "prior")
    for name in ("run_dir", "prior"):
        contents = checkpoint.load(settings[name] / "model.pt") | {"clip_fingerprint": "another"}
        checkpoint.save(contents, f"{name}/model.pt")
        out = run("evaluate", **settings | {name: name}, device="cpu", expect=1)
        assert "not the CLIP that made the embeddings" in out

    # Without captions
    ignore = shutil.ignore_patterns("*.txt")
    shutil.copytree(plain, "bare", ignore=ignore)
    assert evaluate(data="bare") == {"frechet_distance": real["frechet_distance"]}
    out = run("evaluate", **settings | {"data": "bare"}, expect=1)
    assert "bare: has no captions, which --prior needs" in out


def test_another_clip_of_another_width_may_judge_and_pictures_are_left_for_other_scores(
    trained, world, monkeypatch
):
    settings = dict(steps=2, run_dir=trained, data=world / "plain", eval_samples=12, device="cpu")
    run("evaluate", **settings, out="own.json")
    run("evaluate", **settings, out="same.json", judge=world / "clip")
    own = config.read_json("own.json")
    assert config.read_json("same.json") == own
    sizes = dict(steps=5, batch_size=32, embed_width=24, text_width=32, image_size=32)
    embed.train(embed.Config(run_dir="judge", data=str(world / "plain"), **sizes), CPU)
    out = run("evaluate", **settings, out="other.json", judge="judge", samples="samples", ranks=2)
    assert "on test images; judge: judge" in out
    other = config.read_json("other.json")
    assert other.keys() == own.keys() and other["clip_score"] != own["clip_score"]

    # The scores can be computed from the files, which are complete.
    judge = clips.load("judge", CPU)
    files = sorted(Path("samples/generated").glob("*.png"))
    real = sorted(Path("samples/real").glob("*.png"))
    assert [path.name for path in files] == [path.name for path in real]
    texts = [path.with_suffix(".txt").read_text() for path in files]
    pictures = torch.tensor(np.stack([read_picture(path) for path in files]))
    text = judge.text_condition(texts, 1)["text_embed"]
    cosines = torch.cosine_similarity(judge.embed_image(pictures), text)
    assert len(files) == 12
    assert Path("samples/.output").is_file()  # marks a folder whose images are not training data
    assert 100 * cosines.clamp(min=0).mean().item() == pytest.approx(other["clip_score"], rel=1e-4)
    out = run("evaluate", **settings, samples="samples", expect=1)
    assert "--samples samples: expected a new folder, or an empty one" in out


# Training, as a user runs it


def test_one_command_trains_both_stages_and_2_ranks_lose_the_same(trained, world):
    for folder, settings in zip(trained, (BASE, UPSAMPLE)):
        out = run(data=world / "shapes", run_dir="run", ranks=2, **settings)
        assert "2 rank(s) on cpu" in out and out.count("is finished") == 1
        assert (folder / "report.html").is_file()
        lines = metrics(folder)
        for name in ("loss", "val_loss"):
            assert [line["step"] for line in lines if name in line] == [2, 4]
        assert "test_frechet_distance" in lines[-1]
        grid = read_picture(folder / "samples/step_00000002.png")
        assert len(grid) > 2 * 96  # real images above samples
        for ours, theirs in zip(lines, metrics(f"run/{folder.name}"), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)
        again = run("--config", folder / "config.json", "--stage", folder.name)
        assert "is finished at step 4; give more --steps to continue" in again


def test_adapters_alone_are_trained(trained, world):
    base = trained[0] / "model.pt"
    settings = dict(BASE, lr=0.05, lora_rank=1, init_from=base)
    run(data=world / "plain", run_dir="run", **settings)
    assert "frechet_distance" in run("evaluate", run_dir="run/base", steps=2, device="cpu")
    weights = checkpoint.load(base)["model"]
    unet, _ = train_decoder.load_unet("run/base/model.pt", CPU)
    adapted = unet.state_dict()
    changed = [name for name in weights if not torch.equal(weights[name], adapted[name])]
    assert changed and all("attention." in name for name in changed)


# Sampling, as a user runs it


def sample(**settings):
    """The images (N, H, W, 3) that the sample command writes."""
    given = dict(steps=(3, 2), num_samples=2, device="cpu", pictures="pictures", out="grid.png")
    shutil.rmtree("pictures", ignore_errors=True)
    out = run("sample", **given | settings)
    files = sorted(Path("pictures").glob("*.png"))
    assert f"wrote grid.png: {len(files)} images of" in out
    assert read_picture("grid.png").shape[2] == 3
    return np.stack([read_picture(path) for path in files]).astype(int)


def difference(left, right):
    """The greatest difference in any pixel value."""
    return np.abs(left - right).max()


def test_a_sample_is_the_same_in_any_batch_but_for_the_same_text_twice(
    trained, world, monkeypatch
):
    Path("texts.txt").write_text("a small red star\n\n something blue \na small red star")
    settings = dict(run_dir=trained, prior=world / "prior", guidance_scale=2, eta=0.5)
    texts = dict(settings, texts="texts.txt", num_samples=3)
    together = sample(**texts)
    assert together.shape == (9, 32, 32, 3)
    assert Path("pictures/0001_0002.png").is_file()  # TEXT_NUMBER.png
    assert difference(together, sample(**texts, seed=1)) > 10
    assert difference(together[:3], together[6:]) > 10
    sizes = []
    best_embeddings = train_prior.best_embeddings

    def spy(prior, condition, *others, **settings):
        sizes.append(len(condition["text_embed"]))
        return best_embeddings(prior, condition, *others, **settings)

    monkeypatch.setattr(train_prior, "best_embeddings", spy)
    assert difference(together, sample(**texts, max_batch=2)) <= 1
    assert sizes == [2, 2, 2, 2, 1]  # texts are encoded in small batches, too
    alone = sample(**settings, text="a small red star")
    assert difference(together[:2], alone) <= 1
    settings |= dict(num_samples=1, steps=1, device="cpu", text=30 * "red ")
    out = run("sample", **settings)
    assert out.count("1 are longer than 18 tokens and will be cut") == 1  # only the prior prints it


def test_a_negative_text_takes_the_place_of_no_text(trained, world):
    text = "a small red star"
    settings = dict(run_dir=trained, prior=world / "prior", guidance_scale=5, text=text)
    plain = sample(**settings)
    captions = read_picture("grid.png")[-44:]  # below the pictures
    assert difference(plain, sample(**settings, negative_text="")) == 0
    away = sample(**settings, negative_text="something blue")
    assert difference(plain, away) > 10
    assert (read_picture("grid.png")[-44:] == captions).all()
    assert (captions < 255).any()
    assert difference(away, sample(**settings, negative_text="something blue", max_batch=1)) <= 1
    # Guidance away from the text itself has no effect.
    settings |= dict(negative_text=text)
    nowhere = sample(**settings)
    assert difference(nowhere, sample(**settings | {"guidance_scale": 7})) <= 1


@torch.no_grad()
def test_guidance_runs_the_second_copy_with_the_negative_condition():
    unet = make(text_encodings=True, objective="v").eval()
    condition = inputs(unet)["condition"]
    other = {name: value.flip(0) for name, value in condition.items()}
    noise_fn = functools.partial(torch.full_like, fill_value=0.5)
    settings = dict(count=3, steps=1, noise_fn=noise_fn)
    positive = train_decoder.sample_images(unet, condition, **settings)
    negative = train_decoder.sample_images(unet, other, **settings)
    rows = []
    unet.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    guided, at_zero, at_one = [
        train_decoder.sample_images(
            unet, condition, **settings, guidance_scale=scale, negative=away
        )
        for scale, away in ((1.5, other), (0, other), (1, None))
    ]
    assert rows == [6, 3, 3]  # scales 0 and 1 need only one of the two copies
    assert_close(at_zero, negative)
    assert torch.equal(at_one, positive)
    inside = (positive.abs() < 1) & (negative.abs() < 1)  # not clipped
    expected = (negative + 1.5 * (positive - negative)).clamp(-1, 1)
    assert inside.any() and (positive - negative).abs().max() > 1e-3
    assert_close(guided[inside], expected[inside], rtol=1e-3, atol=1e-4)


def test_images_are_varied_and_interpolated(trained, world):
    settings = dict(run_dir=trained, guidance_scale=20)
    files = [world / f"plain/{i:05d}.png" for i in range(2)]
    ends = [sample(**settings, image=file, num_samples=1)[0] for file in files]
    way = sample(**settings, image=files[0], to=files[1], num_samples=3)
    assert difference(way[[0, 2]], ends) <= 1
    assert all(difference(way[1], end) > 1 for end in ends)


def test_an_upsampler_and_a_base_without_text_or_image_need_no_clip(trained, world):
    for folder in trained:
        contents = checkpoint.load(folder / "model.pt")
        checkpoint.save({**contents, "clip": None}, f"{folder.name}/model.pt")
    sample(run_dir="base")
    sample(run_dir=trained, weights="online")  # the online weights of the newest checkpoints
    settings = dict(run_dir="upsample", num_samples=1)
    first = sample(**settings, image=world / "plain/00000.png")
    second = sample(**settings, image=world / "plain/00001.png")
    assert difference(first, second) > 1


@pytest.mark.parametrize("text", ["", "a red star"])
def test_inpainting_keeps_the_black_of_the_mask_exactly(text, trained, world):
    image = world / "plain/00001.png"
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[8:24, 10:] = 255
    mask[:4] = (0, 255, 0)  # only white is filled in
    mask[4:8] = (255, 0, 0)
    # The mask is larger than the model's images. A pixel that is partly white is filled in.
    pixels = read_picture(image).astype(np.uint8)
    for name, array in (("image", pixels), ("mask", mask)):
        array = array.repeat(3, axis=0).repeat(3, axis=1)
        array[72, 30:] = 255
        Path(f"{name}.png").write_bytes(media.png(array))
    mask[24, 10:] = 255
    settings = dict(text=text, prior=world / "prior") if text else {}
    for picture in sample(run_dir=trained, image="image.png", mask="mask.png", eta=1.0, **settings):
        change = np.abs(picture - read_picture(image))
        assert not change[mask.min(-1) == 0].any()
        assert change[mask.min(-1) > 0].mean() > 5


def test_resampling_fits_what_is_filled_in_and_noise_is_told_to_an_upsampler(trained, world):
    base, _ = trained
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[8:24, 10:] = 255
    Path("mask.png").write_bytes(media.png(mask))
    settings = dict(run_dir=base, image=world / "plain/00001.png", mask="mask.png")
    usual = sample(**settings)
    assert difference(sample(**settings, resample=5), usual) == 0
    assert difference(sample(**settings, resample=1), usual) > 0
    refused = mistake("sample", run_dir=base, resample=2, status=2)
    assert "--resample has no effect without --mask" in refused
    refused = mistake("sample", run_dir=base, low_res_noise=0.3, device="cpu")
    assert "--low_res_noise has no effect without a stage that was trained with it" in refused

    words = dict(UPSAMPLE, data=world / "shapes", run_dir="noised", low_res_noise=0.5)
    run(**words)
    settings = dict(run_dir="noised/upsample", image=world / "plain/00001.png")
    clean = sample(**settings)
    assert difference(sample(**settings, low_res_noise=0.0), clean) == 0
    assert difference(sample(**settings, low_res_noise=0.4), clean) > 0


def test_adapters_count_as_much_as_their_scale(trained, world):
    base, _ = trained
    adapted = dict(BASE, data=world / "shapes", run_dir="adapted", init_from=base / "model.pt")
    run(**adapted | dict(lora_rank=2, lr=0.5, eval_every=0))
    plain = sample(run_dir=base)
    assert difference(sample(run_dir="adapted/base", lora_scale=0), plain) == 0
    trained_scale = sample(run_dir="adapted/base")
    assert difference(sample(run_dir="adapted/base", lora_scale=1), trained_scale) == 0
    assert difference(trained_scale, plain) > 0
    refused = mistake("sample", run_dir=base, lora_scale=0.5, device="cpu")
    assert "has no adapters; leave it out" in refused


# Mistakes


mistake = functools.partial(helpers.mistake, "train_decoder")


@pytest.mark.parametrize("words, message", {
    "--init_from a.pt": "these are for one stage",
    "--stage base --width 30": "--width 30: expected a multiple of 4; --image_size",
    "--stage base --image_size 18": "multiples of 4, for 3 levels",
    "--stage base --attention_levels 3": "expected at least one number, all below 3",
    "--stage base --learned_variance": "--timestep_density uniform",
    "--stage base --lora_rank 2": "adapters need a model: give --init_from",
    "--stage upsample --random_crop 7": "multiples of 2, for 2 levels",
    "--stage upsample --low_res_size 32": "--image_size 32: --low_res_size must be smaller",
    "sample --text x --mask a.png": "--mask has no effect without --image",
    "sample --prior a": "--prior has no effect without a text",
    "sample --negative_text a": "--negative_text has no effect without a text",
    "sample --text x --out g.jpg": "--out g.jpg: expected a name that ends in .png",
    "sample --text x --image a.png": "it needs --mask",
    "sample --text x --image a.png --mask b.png --to c.png": "and takes no --to",
    "sample --text x --steps 25,1001": "--steps 1001: expected 1 to 1000",
    "--stage base --betas 0.9,1": "--betas 1.0: expected numbers from 0 to below 1",
}.items())
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


@pytest.mark.parametrize("words, message", {
    "sample --run_dir trained/upsample,trained/base": "takes images of 0 pixels",
    "sample --text x --run_dir trained": "runs/prior/model.pt: no such checkpoint",
    "sample --run_dir trained/upsample": "an upsampler needs an --image to enlarge",
    "sample --run_dir trained/upsample --text x --image plain/0.png --mask plain/0.png":
        "takes no text",
    "sample --run_dir trained --guidance_scale 1 --text x --negative_text y":
        "--negative_text needs guidance",
    "evaluate --run_dir trained/upsample --prior prior": "an upsampler, which needs no prior",
    "evaluate --run_dir trained --judge none": "there is no CLIP here",
    "sample --run_dir=": "model.pt: no such checkpoint",
    "sample --run_dir trained/base --steps 1 --out plain/00000.png/x.png": "'plain/00000.png'",
    "sample --run_dir trained --image plain/00000.png --mask trained/cascade.png":
        "those of --image are [32, 32]; expected the same size",
    "evaluate --run_dir trained --data plain --clip none": "there is no CLIP here",
    "--data plain --clip= --stage base": "has no embeddings; name the CLIP",
    "--data plain --clip clip --preset pictures-cpu": "smaller than 64",  # before training the base
    "--data plain --stage upsample --init_from trained/base/model.pt":
        "--stage: invalid choice: 'base'",
}.items())
def test_mistakes_in_files_are_one_line_and_status_1(words, message, trained, world, monkeypatch):
    monkeypatch.chdir(world)
    assert message in mistake(*words.split(), "--device", "cpu")


@pytest.mark.parametrize("name", train_decoder.PRESETS)
def test_presets_are_stages_and_those_of_papers_have_their_diffusion(name):
    preset = train_decoder.PRESETS[name]
    if name == "pictures-cpu":
        base, upsample = (cls(**preset[stage]) for stage, cls in train_decoder.STAGES.items())
        assert base.image_size == upsample.low_res_size
        return
    cfg = train_decoder.STAGES[preset["stage"]](**preset)
    diffusion = cfg.objective, cfg.timestep_density, cfg.optimizer
    assert (diffusion == ("epsilon", "uniform", "adamw")) != (name == "pictures-gpu")
    assert cfg.eta == 1 or not cfg.learned_variance  # otherwise learned_variance has no effect


@pytest.mark.parametrize("low_res_size", [0, 8])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_all_images_in_training_have_the_layout_of_the_weights(layout, low_res_size, monkeypatch):
    """Norms on GPUs would copy other layouts. CPUs use channels_last, GPUs contiguous_format."""
    assert train_decoder.layout_on("cpu") == torch.channels_last
    assert train_decoder.layout_on("cuda") == torch.contiguous_format
    monkeypatch.setattr(train_decoder, "layout_on", lambda device: layout)
    unet = make(text_encodings=True, low_res_size=low_res_size)
    copied = []

    def check(module, images):
        copied.append(not images[0].is_contiguous(memory_format=layout))

    for module in unet.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_pre_hook(check)
    batch = {"image": torch.randint(256, (4, 16, 16, 3)).to(torch.uint8)}
    if low_res_size:
        batch = train_decoder.cut_crops(batch, np.arange(4), unet.cfg)
    train_decoder.diffusion_loss(unet, batch, inputs(unet, 4)["condition"])
    assert len(copied) > 10
    assert not any(copied)
