"""The decoder: its U-Net and its parts against themselves computed another way, and the script as a user runs it."""
import dataclasses
import inspect
import json
import shutil

import helpers
import numpy as np
import pytest
import torch
from helpers import KILLS, Forked, differences, flags, follow, kill_often, metrics, read_picture

import train_decoder
import train_prior
from common import checkpoint, clip, config, data, diffusion, media, synthetic

CPU = torch.device("cpu")
TINY = dict(width=8, mults=(1, 2), attention_levels=(1,), cond_width=8, head_width=8, batch_size=12, chunk_size=5,
            steps=6, lr=0.01, warmup_steps=2, log_every=2, eval_every=4, save_every=2, eval_samples=6, eval_steps=2,
            device="cpu", optimizer="adamw")
STAGES = {"base": dict(stage="base", image_size=8),
          "upsample": dict(stage="upsample", image_size=16, low_res_size=8, random_crop=8)}


def run(*words, ranks=0, expect=0):
    return helpers.run("train_decoder", *words, ranks=ranks, expect=expect)


# Data and models that several tests look at

@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a briefly trained clip/, a prior/, and 160 pictures: plain/, loose/ with embeddings, shapes/."""
    folder = tmp_path_factory.mktemp("world")
    pictures, records = synthetic.shapes(range(160))
    (folder / "plain").mkdir()
    for i, (picture, record) in enumerate(zip(pictures, records)):
        media.write_png(folder / f"plain/{i:05d}.png", picture)
        (folder / f"plain/{i:05d}.txt").write_text(record["caption"])
    encoder = clip.train(clip.Config(run_dir=str(folder / "clip"), data=str(folder / "plain"), steps=30, batch_size=32,
                                     embed_width=16, text_width=32, image_size=16), CPU)
    (image, text), _ = clip.embed(encoder, [(pictures, records)])
    data.write_shards(folder / "shapes", image, text, records)
    shutil.copytree(folder / "plain", folder / "loose")
    for i, row in enumerate(image):
        np.save(folder / f"loose/{i:05d}.npy", row.astype(np.float16))
    for name, more in (("plain", {}), ("loose", {}), ("shapes", {"made_from": "a seed"})):
        (folder / name / "clip.json").write_text(json.dumps({"clip": str(folder / "clip"), **more}))
    cfg = train_prior.Config(width=16, depth=1, heads=2)
    checkpoint.save({"kind": "prior", "model": awake(train_prior.Prior(cfg, 16)).state_dict(), "widths": [16, 0],
                     "config": config.as_json(cfg), "clip": str(folder / "clip"), "clip_fingerprint": None, "cwd": ""},
                    folder / "prior/model.pt")
    return folder


@pytest.fixture(scope="session")
def trained(world):
    """The run folders of both stages, 16 and 32 pixels, trained on the built-in data by the bare command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "builtin_data", lambda folder, device: str(world / "shapes"))
        out = run(*flags(run_dir=world / "trained", **TINY))
    assert "The stages together" in out
    follow(out, "--device", "cpu", "--steps", 2, "--eval_samples", 4)  # an evaluation, as there is no prior here
    assert read_picture("grid.png").any()
    return world / "trained/base", world / "trained/upsample"


def awake(module):
    """`module`, in which no parameter is zero: those that start there would hide mistakes."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def make(**settings):
    small = dict(image_size=16, width=8, mults=(1, 2), attention_levels=(1,), cond_width=16, head_width=8, timesteps=50,
                 objective="v", timestep_density="uniform")
    small |= {"max_text_len": 5} if "text_encodings" in settings else {}
    small |= {"low_res_noise": 0.3} if "low_res_size" in settings else {}
    cfg = train_decoder.Config(**{**small, **settings})
    torch.manual_seed(0)
    unet = awake(train_decoder.UNet(cfg, 16, 12 if cfg.text_encodings == "clip" else 0))
    if cfg.text_encodings == "clip":
        empty = {"text_embed": torch.randn(1, 16), "text_enc": torch.randn(1, 5, 12)}
        unet.null_text.fill({**empty, "text_mask": torch.arange(5)[None] < 2})
    return unet


def inputs(unet, count=3):
    """The arguments of the U-Net by name, as far as it takes them, with nothing dropped."""
    cfg, nobody, condition = unet.cfg, torch.zeros(count, dtype=torch.bool), {"image_embed": torch.randn(count, 16)}
    if cfg.text_encodings == "clip":
        condition |= {"text_enc": torch.randn(count, 5, 12), "text_embed": torch.randn(count, 16),
                      "text_mask": torch.arange(5) < torch.randint(1, 5, (count, 1))}
    x_t, low_res = torch.randn(2, count, 3, 16, 16)
    timestep, level = torch.randint(50, (2, count))
    return dict(x_t=x_t, timestep=timestep, condition=condition, drop_image=nobody, drop_text=nobody,
                low_res=low_res if cfg.low_res_size else None, low_res_level=level if cfg.low_res_noise else None)


def passes(unet):
    """A list that fills with (arguments by name, output) of every pass of the U-Net."""
    seen, bind = [], inspect.signature(unet.forward).bind
    unet.register_forward_hook(lambda _, words, names, out: seen.append((bind(*words, **names).arguments, out)),
                               with_kwargs=True)
    return seen


# The U-Net

@pytest.mark.parametrize("settings", [
    dict(blocks=2, learned_variance=True), dict(mults=(1, 2, 3), attention_levels=(0, 2)), dict(low_res_size=8),
    dict(low_res_size=8, low_res_noise=0.0), dict(width=28, attention_levels=(0,)), dict(image_condition=False),
    dict(attention_levels=()), dict(text_encodings="clip", head_width=64),
    dict(image_condition=False, text_encodings="clip")], ids=str)
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same_by_a_second_pass(settings):
    unet, gradients, calls = make(**settings), [], []
    assert unet(**inputs(unet)).shape == (3, 6 if unet.cfg.learned_variance else 3, 16, 16)
    batch, condition = {"image": torch.full((6, 16, 16, 3), 255, dtype=torch.uint8)}, inputs(unet, 6)["condition"]
    blocks = [module for module in unet.modules() if isinstance(module, train_decoder.Block)]
    for block in blocks:
        block.conv1.register_forward_pre_hook(lambda *_: calls.append(1))
    for drop, checkpointing in ((0.0, False), (1.0, False), (0.5, False), (0.5, True)):
        drops = {"image_drop": drop} | ({"text_drop": drop} if "text_encodings" in settings else {})
        unet.cfg = dataclasses.replace(unet.cfg, **drops)
        for block in blocks:
            block.checkpointing = checkpointing
        unet.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        train_decoder.diffusion_loss(unet, batch, condition).backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert len(calls) == 5 * len(blocks) and all(g is not None for gradient in gradients for g in gradient)
    assert all(gradient.any() and torch.equal(gradient, again) for gradient, again in zip(*gradients[2:]))


def test_all_inputs_reach_the_output_and_the_null_branch_drops_image_and_text_alone():
    unet = make(text_encodings="clip", low_res_size=8).eval()
    given, fresh, everybody = inputs(unet), inputs(unet), torch.ones(3, dtype=torch.bool)
    condition, null = given["condition"], {"drop_image": everybody, "drop_text": everybody}
    other = {**fresh["condition"], "text_mask": ~condition["text_mask"]}
    changes = {name: {"condition": {**condition, name: value}} for name, value in other.items()}
    changes |= {name: {name: fresh[name]} for name in ("x_t", "low_res")}
    changes |= {name: {name: (given[name] + 7) % 50} for name in ("timestep", "low_res_level")}
    with torch.no_grad():
        out, dropped = unet(**given), unet(**{**given, **null})
        for name, change in changes.items():
            assert (unet(**{**given, **change}) - out).abs().amax((1, 2, 3)).min() > 1e-4, name
            assert torch.equal(unet(**{**given, **change, **null}), dropped) == (name in condition), name
        for name, drop in (("image_embed", "drop_image"), ("text_enc", "drop_text")):  # each has a null of its own
            alone = unet(**{**given, drop: everybody})
            assert torch.equal(unet(**{**given, **changes[name], drop: everybody}), alone)
            assert not torch.allclose(alone, out) and not torch.allclose(alone, dropped)


# Loss and sampling

@pytest.mark.parametrize("settings", [
    dict(objective="x0"), dict(objective="v", loss_weight="min_snr", loss_gamma=0.5),
    dict(objective="flow", loss_weight="cosmap", timestep_density="logit_normal", density_mean=1.0, density_std=0.5),
    dict(objective="epsilon", dream=True, loss_weight="min_snr", loss_gamma=4.0, text_encodings="clip", text_drop=0.6),
    dict(objective="v", learned_variance=True, loss_weight="min_snr")], ids=str)
def test_loss_equals_a_slow_one_and_a_plain_loss_has_neither_weights_nor_dream(settings):
    unet, batch = make(image_drop=0.3, **settings), {"image": torch.randint(256, (200, 16, 16, 3)).to(torch.uint8)}
    cfg, seen, condition, x0 = unet.cfg, passes(unet), inputs(unet, 200)["condition"], media.pixels(batch["image"])
    for plain in (False, True):
        loss, (given, out) = train_decoder.diffusion_loss(unet, batch, condition, plain=plain), seen[-1]
        a, s = (table[given["timestep"]][:, None, None, None] for table in (unet.alpha, unet.sigma))
        noise, ratio = (given["x_t"] - a * x0) / s, (a / s) ** 2
        if cfg.dream and not plain:  # to the noise of the first pass its own error is added
            first = (seen[0][0]["x_t"] - a * x0) / s
            torch.testing.assert_close(noise, first + s * (first - seen[0][1]), rtol=1e-3, atol=1e-3)
        else:
            assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
        target, weight = {"x0": (x0, 1),
                          "v": (a * noise - s * x0, ratio.clamp(max=0.5) / (ratio + 1)),
                          "flow": (noise - x0, 2 / torch.pi / (1 - 2 * s + 2 * s ** 2)),
                          "epsilon": (noise, ratio.clamp(max=4) / ratio)}[cfg.objective]
        weight = 1 if plain else ratio.clamp(max=5) / (ratio + 1) if cfg.learned_variance else weight
        expected = ((out[:, :3] - target) ** 2 * weight).mean()
        if cfg.learned_variance:
            x0_hat, fraction = (a * given["x_t"] - s * out[:, :3]).clamp(-1, 1), (out[:, 3:] + 1) / 2
            bound = diffusion.variational_bound(x0, given["timestep"], x0_hat, fraction, unet.alpha, unet.sigma)
            expected += 0.001 * 50 * bound.mean()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        shares = [given[name].float().mean().item() for name in ("drop_image", "drop_text")]
        assert shares == pytest.approx([0.3, cfg.text_drop], abs=0.1)
    assert len(seen) == (3 if cfg.dream else 2)


@pytest.mark.parametrize("blur, crop", [(0.0, 8), (0.4, 0), (1.0, 0)])
def test_an_upsampler_learns_from_blurred_crops_with_noise_of_the_level_it_is_given(blur, crop, monkeypatch):
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")  # whose color tells the place
    batch = {"image": torch.stack([y * 16, x * 16, x + y], -1).to(torch.uint8).repeat(100, 1, 1, 1)}
    unet = make(low_res_size=8, random_crop=crop, low_res_blur=blur, low_res_noise=0.6, image_condition=False)
    monkeypatch.setattr(train_decoder, "BLUR_SIGMA", (0.7, 0.7))
    seen = passes(unet)
    for noise in (torch.zeros_like, torch.randn_like):  # the same without noise and with it
        monkeypatch.setattr(torch, "randn_like", noise)
        torch.manual_seed(0)
        train_decoder.diffusion_loss(unet, batch, {})
    (clean, _), (noisy, _) = seen
    level = noisy["low_res_level"]
    added = (noisy["low_res"] - clean["low_res"]).flatten(1).std(1) / unet.sigma[level]
    assert (added - 1).abs().max() < 0.25 and 0 <= level.min() < 5 and 24 < level.max() <= 29
    large, small = (clean[name] / unet.alpha[clean[t]][:, None, None, None]
                    for name, t in (("x_t", "timestep"), ("low_res", "low_res_level")))
    corners = ((large[:, :2, 0, 0] + 1) * 127.5 / 16).round().long()
    assert all(axis.unique().tolist() == list(range(9 if crop else 1)) for axis in corners.T)  # all places
    low_res = media.resize(media.pixels(batch["image"]), 8, "box")
    sharp, blurred = (media.cropped(media.resize(pictures, 16, "bicubic"), crop or 16, corners)
                      for pictures in (low_res, media.blurred(low_res, torch.full((100,), 0.7))))
    is_blurred, is_sharp = ((small - pictures).flatten(1).abs().amax(1) < 1e-4 for pictures in (blurred, sharp))
    assert torch.equal(is_blurred, ~is_sharp) and abs(is_blurred.float().mean() - blur) < 0.12


@pytest.mark.parametrize("scale, eta, settings", [
    (2.5, 0.0, dict(objective="v", text_encodings="clip")), (1.0, 0.0, dict(objective="epsilon")),
    (0.0, 0.0, dict(objective="x0")), (3.0, 0.0, dict(objective="flow", low_res_size=8)),
    (2.0, 0.0, dict(objective="v", low_res_size=8, low_res_noise=0.0)),
    (1.5, 1.0, dict(objective="x0", learned_variance=True, low_res_size=8))], ids=str)
def test_sampling_equals_one_with_two_passes_a_step(scale, eta, settings):
    unet = make(**settings).eval()
    if unet.cfg.objective == "x0":  # clipping is reached; for others it enlarges rounding
        unet.out[-1].weight.data[:3] *= 10
    cfg, given, low_res = unet.cfg, inputs(unet), torch.rand(3, 3, 8, 8) if unet.cfg.low_res_size else None
    if cfg.low_res_size:
        given["low_res"] = media.resize(low_res, 16, "bicubic")
    if cfg.low_res_noise:  # a fifth of the timesteps
        given["low_res"] = unet.alpha[10] * given["low_res"] + unet.sigma[10] * 0.5
        given["low_res_level"] = torch.full((3,), 10)

    def noise(x):
        return torch.full_like(x, 0.5)

    def denoise(x, t):
        shown, null = (unet(**{**given, "x_t": x, "timestep": t, "drop_image": drop, "drop_text": drop})
                       for drop in (given["drop_image"], ~given["drop_image"]))
        answer, a, s = (null + scale * (shown - null))[:, :3], unet.alpha[t[0]], unet.sigma[t[0]]
        x0 = {"x0": answer, "v": a * x - s * answer, "epsilon": (x - s * answer) / a,
              "flow": x - s * answer}[cfg.objective]
        assert x0.abs().max() > 1 or cfg.objective != "x0"
        x0 = x0.clamp(-1, 1)
        return (x0, (shown[:, 3:] + 1) / 2) if cfg.learned_variance else x0
    expected = diffusion.sample(denoise, torch.full((3, 3, 16, 16), 0.5), unet.alpha, unet.sigma, 4, eta, noise)
    drawn = train_decoder.sample_pictures(unet, given["condition"], 3, 4, scale, eta, noise, low_res, 0.2)
    torch.testing.assert_close(drawn, expected.clamp(-1, 1), rtol=1e-3, atol=5e-4)


# Evaluation

def test_frechet_distance_equals_its_formula():
    rng = np.random.default_rng(0)
    features, others = rng.standard_normal((50, 6)) * [1, 2, 3, 4, 5, 6], rng.standard_normal((70, 6)) + 1
    (mean, cov), (mean2, cov2) = ((x.mean(0), np.cov(x.T)) for x in (features, others))
    expected = ((mean - mean2) ** 2).sum() + np.trace(cov + cov2) - 2 * np.sqrt(np.linalg.eigvals(cov @ cov2)).sum()
    assert train_decoder.frechet_distance(features, others) == pytest.approx(expected, rel=1e-7)
    assert np.isfinite(train_decoder.frechet_distance(features[:1], others[:1]))


def test_evaluate_gives_the_figures_of_training_on_any_number_of_ranks_and_takes_embeddings_of_a_prior(
        trained, world, tmp_path):
    words = ["evaluate", *flags(steps=2, eval_samples=12, device="cpu")]
    run(*words, *flags(run_dir=trained, grid=tmp_path / "grid.png", out=tmp_path / "scores.json"))
    assert (tmp_path / "scores.json").read_bytes() == (world / "trained/cascade.json").read_bytes()
    assert (tmp_path / "grid.png").read_bytes() == (world / "trained/cascade.png").read_bytes()
    words += flags(data=world / "plain", part="train")
    for name, ranks, settings in (("real", 0, {}), ("two", 2, {}), ("prior", 0, dict(prior=world / "prior")),
                                  ("upsample", 0, dict(run_dir=trained[1]))):
        run(*words, *flags(**{"run_dir": trained, "out": tmp_path / name, **settings}), ranks=ranks)
    real, two, *others = (json.loads((tmp_path / name).read_text()) for name in ("real", "two", "prior", "upsample"))
    assert real == pytest.approx(two, rel=1e-4) and len({scores["clip_score"] for scores in (real, *others)}) == 3


# Training, as a user runs it

def test_one_command_trains_both_stages_and_torchrun_on_2_ranks_loses_the_same(trained, world, tmp_path):
    for folder in trained:
        assert {"auto_resume.json", "model.pt", "best.pt", "report.html"} <= {path.name for path in folder.iterdir()}
        lines = metrics(folder)
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 6] and "test_frechet_distance" in lines[-1]
        for name in ("step_00000004.png", "test.png"):  # real pictures with captions above drawn ones
            assert read_picture(folder / "samples" / name).shape[0] > 2 * 96
        assert "is finished, at step 6; to train on, give more --steps" in run(
            "--config", folder / "config.json", "--data", world / "shapes")
    process = helpers.start("train_decoder", *flags(data=world / "shapes", run_dir=tmp_path, **TINY), ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0 and "2 rank(s) on cpu" in out and out.count("Next: ") == 1, out + err
    for folder in trained:
        for ours, theirs in zip(metrics(tmp_path / folder.name), metrics(folder), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in STAGES for ranks in (1, 2)])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(stage, ranks, world, tmp_path):
    shutil.copytree(world / "plain", tmp_path / "data")
    (tmp_path / "data/00003.png").write_bytes(b"hello")
    settings = {**TINY, **STAGES[stage], "steps": 3 * KILLS, "optimizer": "muon"}
    words = flags(data=tmp_path / "data", **settings, crop_scale=0.5, flip=True, text_encodings="clip", max_text_len=9)
    out = Forked("train_decoder", *words, *flags(run_dir=tmp_path / "whole"), ranks=ranks).finish()
    assert "1 of 160 pictures looked at" in out and out.count("00003.png: not a readable image") == 2  # and when met
    words += flags(run_dir=tmp_path / "killed")
    running = kill_often("train_decoder", words, ranks, f"{stage} {ranks}")
    Forked("train_decoder", *words, ranks=ranks).finish()
    assert running >= KILLS / 2 and not differences(tmp_path / "whole" / stage, tmp_path / "killed" / stage)


# Sampling

def drawn(folder, **settings):
    given = dict(steps=(3, 2), num_samples=2, device="cpu", out=folder / "grid.png", pictures=folder / "pictures")
    shutil.rmtree(folder / "pictures", ignore_errors=True)
    run("sample", *flags(**{**given, **settings}))
    assert read_picture(folder / "grid.png").shape[2] == 3
    files = sorted((folder / "pictures").iterdir())
    return np.stack([read_picture(path) for path in files]).astype(int)


def test_adapters_alone_are_trained_and_count_as_they_are_scaled(trained, world, tmp_path):
    out = run(*flags(data=world / "loose", run_dir=tmp_path, stage="base", lora_rank=1,
                     **{**TINY, "lr": 0.05}, init_from=trained[0] / "model.pt"))
    assert "of adapters" in out and "frechet_distance" in follow(out, "--steps", 2, "--device", "cpu")
    base, none, whole = (drawn(tmp_path, run_dir=folder, lora_scale=scale, text="a red star", prior=world / "prior")
                         for folder, scale in ((trained[0], 1), (tmp_path / "base", 0), (tmp_path / "base", 1)))
    assert np.array_equal(base, none) and np.abs(base - whole).max() > 1


def test_a_picture_is_the_same_in_any_batch_and_on_any_number_of_ranks(trained, world, tmp_path):
    (tmp_path / "texts.txt").write_text("a small red star\n\n something blue \n")
    texts = dict(run_dir=trained, texts=tmp_path / "texts.txt", num_samples=3, prior=world / "prior", guidance_scale=2,
                 eta=0.5)
    whole = drawn(tmp_path, **texts)
    assert whole.shape == (6, 32, 32, 3) and np.abs(whole - drawn(tmp_path, **texts, seed=1)).max() > 10
    first = dict(texts="", text="a small red star", num_samples=2)
    for part, change in ((whole, dict(max_batch=1)), (whole[:2], first)):
        assert np.abs(part - drawn(tmp_path, **{**texts, **change})).max() <= 1
    out = run("sample", *flags(**texts, steps=(3, 2), device="cpu", pictures=tmp_path / "two"), ranks=2)
    assert out.count("wrote grid.png: 6 pictures of 32x32") == 1
    names = [f"{text:04d}_{k:04d}.png" for text in range(2) for k in range(3)]
    assert np.abs(whole - [read_picture(tmp_path / "two" / name) for name in names]).max() <= 1


def test_images_are_varied_blended_enlarged_and_filled_in(trained, world, tmp_path):
    files = [world / f"plain/{i:05d}.png" for i in range(2)]
    ends = [drawn(tmp_path, run_dir=trained, image=file, num_samples=1)[0] for file in files]
    way = drawn(tmp_path, run_dir=trained, image=files[0], to=files[1], num_samples=3)
    assert np.abs(way[[0, 2]] - ends).max() <= 1 and all(np.abs(way[1] - end).max() > 1 for end in ends)
    small, enlarged = drawn(tmp_path, run_dir=trained[0], image=files[0], num_samples=2), []
    for picture in small.astype(np.uint8):
        media.write_png(tmp_path / "small.png", picture)
        enlarged.append(drawn(tmp_path, run_dir=trained[1], low_res=tmp_path / "small.png", num_samples=1))
    assert small.shape == (2, 16, 16, 3) and np.abs(enlarged[0] - enlarged[1]).max() > 1
    checkpoint.save({**checkpoint.load(trained[1] / "model.pt"), "clip": None}, tmp_path / "alone/model.pt")
    small = dict(low_res=tmp_path / "small.png", num_samples=1)
    assert np.array_equal(drawn(tmp_path, run_dir=tmp_path / "alone", **small), enlarged[1])  # it needs no CLIP
    mask, image = np.zeros((32, 32, 3), np.uint8), read_picture(files[1])
    mask[8:24, 10:] = 255
    media.write_png(tmp_path / "mask.png", mask)
    for more in (dict(), dict(text="a red star", prior=world / "prior", eta=1.0)):
        for picture in drawn(tmp_path, run_dir=trained, image=files[1], mask=tmp_path / "mask.png", resample=2, **more):
            assert np.array_equal(picture[mask == 0], image[mask == 0])  # what it keeps is kept exactly
            assert np.abs(picture[mask > 0] - image[mask > 0]).mean() > 5


def test_with_a_prior_at_its_place_the_command_at_the_end_draws_from_captions_by_it(trained, world):
    shutil.copytree(world / "prior", "runs/prior")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "builtin_data", lambda folder, device: str(world / "shapes"))
        out = run(*flags(run_dir=world / "trained", **TINY))
    assert "--grid grid.png --prior runs/prior" in out
    assert "caption_accuracy " in follow(out, "--device", "cpu", "--steps", 2, "--eval_samples", 4)


def test_pictures_of_nothing_in_particular_are_those_of_a_dropped_condition(trained, tmp_path):
    unet = train_decoder.load_cascade(train_decoder.SampleConfig(run_dir=(str(trained[0]),)), CPU)[0][0]
    condition, drop = {"image_embed": torch.randn(2, 16)}, torch.ones(2, dtype=torch.bool)
    *nothing, is_key = unet.condition({"image_embed": torch.zeros(2, 16)}, ~drop, drop)
    assert all(map(torch.equal, nothing, unet.condition(condition, drop, drop)))
    assert not any(map(torch.equal, nothing, unet.condition(condition, ~drop, drop)))
    assert is_key is None  # without a text, all tokens are
    drawn(tmp_path, run_dir=trained)


# Mistakes

def mistake(*words, status=1, ranks=0):
    """The one line in which a command must end, with the exit status, whatever the number of ranks."""
    out = run(*words, ranks=ranks, expect=status)
    lines = [line for line in out.strip().splitlines() if "error:" in line or not ranks]
    assert len(lines) == 1 and lines[0].startswith("train_decoder.py: error: ") and "Traceback" not in out, out
    return lines[0]


@pytest.mark.parametrize("words, message", [
    ("--width 30", "--width: 30 is not a multiple of 4"), ("--mults=", "--mults: expected at least one level"),
    ("--raw_embeddings --no_image_condition", "--raw_embeddings: it needs --image_condition or"),
    ("evaluate --prior_guidance 2", "--prior_guidance: it needs --prior"),
    ("sample --prior_guidance 2 --image a.png", "--prior_guidance: it needs a text"),
    ("--image_size 18", "multiples of 4, as 3 levels"), ("--eval_steps 2000", "2000 sampling steps"),
    ("--attention_levels 3", "(3,) are not all below 3"), ("--crop_scale 0", "--crop_scale: 0.0 is not above 0"),
    ("--stage upsample --random_crop 64", "--image_size 32: --low_res_size must be smaller, and"),
    ("--learned_variance --timestep_density mode", "--timestep_density uniform"),
    ("sample --text x --texts y", "no --text beside it"), ("sample --out x.jpg", "expected a name that ends in .png"),
    ("sample --text x --mask a.png", "--mask: it needs --image"), ("sample --text x --image a.png", "it needs --mask"),
], ids=str)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


def test_mistakes_that_models_and_files_show_are_one_line_and_status_1(trained, world, tmp_path):
    base, upsample = trained
    narrow, state = clip.Config(embed_width=8), checkpoint.load(base / "model.pt")
    checkpoint.save({"model": clip.CLIP(narrow, []).state_dict(), "vocabulary": [], "config": config.as_json(narrow)},
                    tmp_path / "clip.pt")
    state |= {"clip": None, "config": {**state["config"], "image_drop": 0.0}}
    checkpoint.save(state, tmp_path / "odd/model.pt")
    text, train = dict(text="x"), dict(data=world / "loose", run_dir=tmp_path / "run", **TINY, stage="base")
    for command, settings, message in [
        ("sample", dict(text, run_dir=(upsample, base)), "stage base starts from pictures of 0 pixels (0: none), but"),
        ("sample", dict(text, run_dir=tmp_path / "odd", guidance_scale=2), "is trained with --image_drop 0"),
        ("sample", dict(text, run_dir=tmp_path / "odd"), "which CLIP made the embeddings is not known; name it"),
        ("sample", dict(text, run_dir=base, clip=tmp_path / "clip.pt"), "clip.pt: not the CLIP that made the embed"),
        ("sample", dict(run_dir=tmp_path / "odd", clip=world / "clip"), "with --image_drop 0, so it needs a text or"),
        ("sample", dict(text, run_dir=(base, upsample), low_res_noise=0.1), "is trained with at most 0.0"),
        ("train", dict(train, data=world / "plain", clip=""), "no embeddings in or beside it, so a CLIP must"),
    ]:
        assert message in mistake(command, *flags(**{"device": "cpu", **settings})), message
    for settings, message in ((dict(train, chunk_size=12), "too few for 2 ranks; leave it out, or give at most 6"),
                              (dict(train, stage="all", image_size=24), "16 pixels (0: none), but base")):
        assert message in mistake(*flags(**settings), ranks=2), message


def test_the_preset_is_a_base_with_dalle_2s_diffusion():
    preset = train_decoder.Config(**train_decoder.PRESETS["dalle2-64"])
    assert (preset.stage, preset.width, preset.mults, preset.batch_size) == ("base", 512, (1, 2, 3, 4), 2048)
    assert (preset.objective, preset.noise_schedule, preset.timestep_density) == ("epsilon", "cosine", "uniform")
    assert preset.learned_variance and preset.eta == 1 and preset.optimizer == "adamw"


@pytest.mark.parametrize("width", [4, 36, 100, 132, 320])
def test_norms_take_any_width_and_have_32_groups_where_each_gets_four_channels(width):
    norm = train_decoder.group_norm(width)
    assert norm(torch.randn(2, width, 3, 3)).shape == (2, width, 3, 3)
    assert norm.num_groups == (32 if width == 320 else 1 if width == 4 else 4)


def test_embeddings_are_brought_to_length_root_d_inside_unless_they_are_raw():
    unet = make().eval()
    given = inputs(unet)
    longer = {"image_embed": given["condition"]["image_embed"] * 7}
    torch.testing.assert_close(unet(**given), unet(**{**given, "condition": longer}), rtol=1e-4, atol=1e-4)
    unet = make(raw_embeddings=True).eval()
    assert not torch.allclose(unet(**given), unet(**{**given, "condition": longer}), atol=1e-2)


def test_blocks_that_resample_average_or_double_both_paths_before_their_first_convolution():
    unet = make(attention_levels=()).eval()
    x = torch.randn(2, 8, 6, 6)
    hidden = torch.randn(2, 32)
    down = unet.downs[1]
    up = unet.ups[2]
    assert isinstance(down.resample, torch.nn.AvgPool2d) and isinstance(up.resample, torch.nn.Upsample)
    halved = torch.nn.functional.avg_pool2d(x, 2)
    torch.testing.assert_close(down(x, hidden, None, None) - halved, change_by(down, x, hidden, halve))
    x = torch.randn(2, 16, 6, 6)
    torch.testing.assert_close(up(x, hidden, None, None) - double(x), change_by(up, x, hidden, double))


def halve(x):
    return (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4


def double(x):
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


def change_by(block, x, hidden, resample):
    """What a residual block adds, written slowly (Dhariwal & Nichol 2021)."""
    silu = torch.nn.functional.silu
    h = block.conv1(resample(silu(block.norm1(x))))
    scale, shift = block.modulation(silu(hidden))[:, :, None, None].chunk(2, dim=1)
    return block.conv2(silu(block.norm2(h) * (1 + scale) + shift))
