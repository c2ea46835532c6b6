"""The decoder: its U-Net and its parts against themselves computed another way, and the script as a user runs it."""
import dataclasses
import inspect
import json
import os
import random
import shutil
import tarfile

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Forked, differences, flags, metrics

import train_decoder
import train_prior
from common import accumulate, checkpoint, clip, config, data, diffusion, media, synthetic

CPU = torch.device("cpu")
TINY = dict(width=8, mults=(1, 2), attention_levels=(1,), cond_width=8, head_width=8, batch_size=12, chunk_size=5,
            steps=6, lr=0.01, warmup_steps=2, log_every=2, eval_every=4, save_every=2, eval_samples=6, eval_steps=2,
            device="cpu")
STAGES = {"base": dict(stage="base", image_size=8),
          "upsample": dict(stage="upsample", image_size=16, low_res_size=8, random_crop=8)}


def run(*words, ranks=0, expect=0):
    return helpers.run("train_decoder", *words, ranks=ranks, expect=expect)


# Data and models that several tests look at

def write_tar(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for file in files:
            archive.add(file, file.name)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a hurriedly trained clip/, a prior/, and 160 pictures in plain/, without embeddings.

    In loose/ these are beside them, in tars/ inside, and shapes/ has the built-in pictures.
    """
    folder = tmp_path_factory.mktemp("world")
    pictures, records = synthetic.shapes(range(160))
    (folder / "plain").mkdir()
    for i, (picture, record) in enumerate(zip(pictures, records)):
        media.write_png(folder / f"plain/{i:05d}.png", picture)
        (folder / f"plain/{i:05d}.txt").write_text(record["caption"])
    encoder = clip.train(clip.Config(run=str(folder / "clip"), data=str(folder / "plain"), steps=8, batch_size=32,
                                     embed_width=16, text_width=32, image_size=16), CPU)
    (image, text), _ = clip.embed(encoder, [(pictures, records)])
    data.write_shards(folder / "shapes", image, text, records)
    shutil.copytree(folder / "plain", folder / "loose")
    for i, row in enumerate(image):
        np.save(folder / f"loose/{i:05d}.npy", row.astype(np.float16))
    files = sorted((folder / "loose").iterdir())
    for number, part in enumerate((files[:300], files[300:])):
        write_tar(folder / f"tars/{number:05d}.tar", part)
    for name, more in (("plain", {}), ("loose", {}), ("tars", {}), ("shapes", {"made_from": "a seed"})):
        (folder / name / "clip.json").write_text(json.dumps({"clip": str(folder / "clip"), **more}))
    cfg = train_prior.Config(width=16, depth=1, heads=2)
    checkpoint.save({"kind": "prior", "model": awake(train_prior.Prior(cfg, 16)).state_dict(), "widths": [16, 0],
                     "config": config.as_json(cfg), "clip": str(folder / "clip")}, folder / "prior/model.pt")
    return folder


@pytest.fixture(scope="session")
def trained(world):
    """The run folders of both stages, 16 and 32 pixels, trained on the built-in data by the bare command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "builtin_data", lambda folder, device: str(world / "shapes"))
        out = run(*flags(run=world / "trained", **TINY))
    assert "To draw: python train_decoder.py sample --runs" in out and "The stages together" in out
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
                 timestep_density="uniform", **{"max_text_len": 5} if "text_encodings" in settings else {})
    cfg = train_decoder.Config(**{**small, **settings})
    return awake(train_decoder.UNet(cfg, 16, 12 if cfg.text_encodings == "clip" else 0))


def inputs(unet, count=3):
    """The arguments of the U-Net by name, as far as it takes them, with nothing dropped."""
    cfg, nobody, condition = unet.cfg, torch.zeros(count, dtype=torch.bool), {"image_embed": torch.randn(count, 16)}
    if cfg.text_encodings == "clip":
        condition |= {"text_enc": torch.randn(count, 5, 12), "no_text": nobody,
                      "text_mask": torch.arange(5) < torch.randint(1, 5, (count, 1))}
    x_t, low_res = torch.randn(2, count, 3, 16, 16)
    timestep, level = torch.randint(50, (2, count))
    return dict(x_t=x_t, timestep=timestep, condition=condition, drop_image=nobody, drop_text=nobody,
                low_res=low_res if cfg.low_res_size else None, low_res_level=level if cfg.low_res_size else None)


def passes(unet):
    """A list that fills with (arguments by name, output) of every pass of the U-Net."""
    seen, bind = [], inspect.signature(unet.forward).bind
    unet.register_forward_hook(lambda _, words, names, out: seen.append((bind(*words, **names).arguments, out)),
                               with_kwargs=True)
    return seen


# The U-Net

@pytest.mark.parametrize("settings", [
    dict(blocks=2, learned_variance=True), dict(mults=(1, 2, 3), attention_levels=(0, 2)), dict(low_res_size=8),
    dict(width=28, attention_levels=(0,)), dict(image_condition=False), dict(attention_levels=()),
    dict(text_encodings="clip", head_width=64), dict(image_condition=False, text_encodings="clip")], ids=str)
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same_by_a_second_pass(settings):
    unet, gradients, calls = make(**settings), [], []
    assert unet(**inputs(unet)).shape == (3, 6 if unet.cfg.learned_variance else 3, 16, 16)
    batch, condition = {"image": torch.full((6, 16, 16, 3), 255, dtype=torch.uint8)}, inputs(unet, 6)["condition"]
    blocks = [module for module in unet.modules() if isinstance(module, train_decoder.Block)]
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for drop, checkpointing in ((0.0, False), (1.0, False), (0.5, False), (0.5, True)):
        drops = {"image_drop": drop} | ({"text_drop": drop} if "text_encodings" in settings else {})
        unet.cfg = dataclasses.replace(unet.cfg, checkpointing=checkpointing, **drops)
        unet.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        train_decoder.diffusion_loss(unet, unet, batch, condition).backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert len(calls) == 5 * len(blocks) and all(g is not None for gradient in gradients for g in gradient)
    assert all(gradient.any() and torch.equal(gradient, again) for gradient, again in zip(*gradients[2:]))


def test_all_inputs_reach_the_output_and_the_null_branch_drops_image_and_text_alone():
    unet = make(text_encodings="clip", low_res_size=8).eval()
    given, fresh, everybody = inputs(unet), inputs(unet), torch.ones(3, dtype=torch.bool)
    condition, null = given["condition"], {"drop_image": everybody, "drop_text": everybody}
    other = {**fresh["condition"], "text_mask": ~condition["text_mask"], "no_text": everybody}
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
        assert torch.equal(unet(**{**given, **changes["no_text"]}), alone)
        second = {name: value[1:2] for name, value in given.items() if name != "condition"}
        second["condition"] = {name: value[1:2] for name, value in condition.items()}
        torch.testing.assert_close(unet(**second), out[1:2], rtol=1e-4, atol=1e-5)  # no sample depends on another


@pytest.mark.parametrize("count", [0, 5])
def test_a_block_equals_one_by_hand_in_which_pixels_attend_to_pixels_and_tokens(count):
    block = awake(train_decoder.Block(12, 16, 20, 10, 8, True)).double()
    x, hidden, tokens = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((12, 3, 3), (20,), (count, 10)))
    h = block.conv1(F.silu(F.group_norm(x, 3, block.norm1.weight, block.norm1.bias)))
    scale, shift = block.modulation(F.silu(hidden))[:, :, None, None].split(16, 1)
    h = F.silu(F.group_norm(h, 4, block.norm2.weight, block.norm2.bias) * (1 + scale) + shift)
    expected = block.skip(x) + block.conv2(h)
    pixels = F.group_norm(expected, 4, block.attention_norm.weight, block.attention_norm.bias).flatten(2).mT
    q, pairs = block.attention.query(pixels), (block.token_key_value(tokens), block.attention.key_value(pixels))
    k, v = torch.cat(pairs, dim=1).split(16, dim=-1)  # (2, J + 9, 16) each, q (2, 9, 16)
    heads = [(q[..., d] @ k[..., d].mT / 8 ** 0.5).softmax(-1) @ v[..., d] for d in (slice(0, 8), slice(8, 16))]
    expected = expected + block.attention.out(torch.cat(heads, dim=-1)).mT.unflatten(2, (3, 3))
    torch.testing.assert_close(block(x, hidden, tokens if count else None), expected)


def test_texts_are_cut_and_padded_empty_ones_count_as_none_and_embeddings_get_the_length_of_noise(world):
    encoder = clip.load(world / "clip", CPU)
    batch = {"image_embed": torch.randn(3, 16), "caption": ["a red star", "", " "]}
    before, expected = batch["image_embed"].clone(), encoder.embed_text(encoder.tokenize(batch["caption"]))[1:]
    for length in (9, 30):  # below and above the CLIP's 24
        cfg = train_decoder.Config(text_encodings="clip", max_text_len=length)
        condition = train_decoder.conditioning(batch, cfg, encoder)
        for found, value in zip((condition["text_enc"], condition["text_mask"]), expected):
            assert torch.equal(found[:, :24], value[:, :length]) and len(found[0]) == length and not found[:, 24:].any()
    assert condition["no_text"].tolist() == [False, True, True] and torch.equal(batch["image_embed"], before)
    torch.testing.assert_close(condition["image_embed"], 4 * F.normalize(before, dim=-1))


# Loss and sampling

@pytest.mark.parametrize("settings", [
    dict(objective="x0", loss="l1"), dict(objective="v", loss_weight="p2", loss_gamma=0.5),
    dict(objective="flow", loss_weight="cosmap", timestep_density="logit_normal", density_mean=1.0, density_std=0.5),
    dict(objective="epsilon", dream=True, loss_weight="min_snr", loss_gamma=4.0, text_encodings="clip", text_drop=0.6),
    dict(objective="v", learned_variance=True, loss_weight="min_snr")], ids=str)
def test_loss_equals_a_slow_one_and_a_plain_loss_has_neither_weights_nor_dream(settings):
    unet, batch = make(image_drop=0.3, **settings), {"image": torch.randint(256, (200, 16, 16, 3)).to(torch.uint8)}
    cfg, seen, condition, x0 = unet.cfg, passes(unet), inputs(unet, 200)["condition"], media.pixels(batch["image"])
    for plain in (False, True):
        loss, (given, out) = train_decoder.diffusion_loss(unet, unet, batch, condition, plain=plain), seen[-1]
        a, s = (table[given["timestep"]][:, None, None, None] for table in (unet.alpha, unet.sigma))
        noise, ratio = (given["x_t"] - a * x0) / s, (a / s) ** 2
        if cfg.dream and not plain:  # to the noise of the first pass its own error is added
            first = (seen[0][0]["x_t"] - a * x0) / s
            torch.testing.assert_close(noise, first + s * (first - seen[0][1]), rtol=1e-3, atol=1e-3)
        else:
            assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
        target, weight = {"x0": (x0, 1), "v": (a * noise - s * x0, ratio * (1 + ratio) ** -0.5 / (ratio + 1)),
                          "flow": (noise - x0, 2 / torch.pi / (1 - 2 * s + 2 * s ** 2)),
                          "epsilon": (noise, ratio.clamp(max=4) / ratio)}[cfg.objective]
        weight = 1 if plain else ratio.clamp(max=5) / (ratio + 1) if cfg.learned_variance else weight
        expected = (((out[:, :3] - target).abs() ** (1 if cfg.loss == "l1" else 2)) * weight).mean()
        if cfg.learned_variance:
            x0_hat, fraction = (a * given["x_t"] - s * out[:, :3]).clamp(-1, 1), (out[:, 3:] + 1) / 2
            bound = diffusion.variational_bound(x0, given["timestep"], x0_hat, fraction, unet.alpha, unet.sigma)
            expected += 0.001 * 50 * bound.mean()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for name, share in (("drop_image", 0.3), ("drop_text", cfg.text_drop)):
            assert abs(given[name].float().mean() - share) < 0.1
        assert 30 < given["timestep"].float().mean() < 40 or cfg.objective != "flow"
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
        train_decoder.diffusion_loss(unet, unet, batch, {})
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
    drawn = train_decoder.sample_pictures(unet, {}, 2, 3, low_res=torch.rand(2, 3, 8, 8))
    assert drawn.shape == (2, 3, 16, 16) and large.shape[2:] == (crop or 16, crop or 16)  # drawn whole


@pytest.mark.parametrize("scale, eta, settings", [
    (2.5, 0.0, dict(objective="v", text_encodings="clip")), (1.0, 0.0, dict(objective="epsilon")),
    (0.0, 0.0, dict(objective="x0", threshold=0.9)), (3.0, 0.0, dict(objective="flow", low_res_size=8)),
    (1.5, 1.0, dict(objective="x0", learned_variance=True, low_res_size=8, threshold=0.8))], ids=str)
def test_sampling_equals_one_with_two_passes_a_step(scale, eta, settings):
    unet = make(**settings).eval()
    unet.out[-1].weight.data[:3] *= 10  # so that thresholds are reached
    cfg, given, low_res = unet.cfg, inputs(unet), torch.rand(3, 3, 8, 8) if unet.cfg.low_res_size else None
    if cfg.low_res_size:  # the lowest level of noise
        given["low_res"] = unet.alpha[0] * media.resize(low_res, 16, "bicubic") + unet.sigma[0] * 0.5
        given["low_res_level"] = torch.zeros(3, dtype=torch.int64)

    def noise(x):
        return torch.full_like(x, 0.5)

    def denoise(x, t):
        shown, null = (unet(**{**given, "x_t": x, "timestep": t, "drop_image": drop, "drop_text": drop})
                       for drop in (given["drop_image"], ~given["drop_image"]))
        answer, a, s = (null + scale * (shown - null))[:, :3], unet.alpha[t[0]], unet.sigma[t[0]]
        x0 = {"x0": answer, "v": a * x - s * answer, "epsilon": (x - s * answer) / a,
              "flow": x - s * answer}[cfg.objective]
        limit = torch.quantile(x0.flatten(1).abs(), cfg.threshold, dim=1).clamp(min=1)[:, None, None, None]
        assert limit.max() > 1 or not cfg.threshold
        x0 = (x0 / limit).clamp(-1, 1)
        return (x0, (shown[:, 3:] + 1) / 2) if cfg.learned_variance else x0
    expected = diffusion.sample(denoise, torch.full((3, 3, 16, 16), 0.5), unet.alpha, unet.sigma, 4, eta, noise)
    drawn = train_decoder.sample_pictures(unet, given["condition"], 3, 4, scale, eta, noise, low_res)
    torch.testing.assert_close(drawn, expected.clamp(-1, 1), rtol=1e-3, atol=5e-4)


# Evaluation

def test_frechet_distance_equals_its_formula_on_known_gaussians():
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    values, means = rng.uniform(0, 3, (2, 6)), rng.standard_normal((2, 6))  # eigenvalues of covariances that commute
    gaussians = [(mean, turn @ np.diag(value) @ turn.T) for mean, value in zip(means, values)]
    expected = ((means[0] - means[1]) ** 2).sum() + ((values[0] ** 0.5 - values[1] ** 0.5) ** 2).sum()
    assert train_decoder.frechet_distance(*gaussians) == pytest.approx(expected, rel=1e-7)


def test_scores_are_those_of_all_pictures_at_once_however_they_are_chunked(world):
    cfg = train_decoder.Config(**{**TINY, "eval_samples": 0}, stage="base", data=str(world / "shapes"))
    source, _, encoder, _ = train_decoder.open_data(cfg)
    parts, right, embeds = data.parts(source, cfg), [], []
    rows = parts["test"][1][np.arange(len(parts["test"][1]))]
    batch, drawn, records = source.fetch(rows)[0], source.fetch(rows // 2 * 2)[0]["image"], source.records(rows)
    text, named = encoder.embed_text(encoder.tokenize(batch["caption"]))[0], synthetic.named(records)
    for pictures in (drawn, batch["image"]):  # half of those drawn are other rows' pictures
        embeds.append(encoder.embed_image(pictures))
        found = synthetic.picture_judge().attributes(synthetic.picture_features(pictures.numpy()))
        right.append(found == synthetic.values(records))
    accuracy, ceiling = ((r | ~named).all(1).mean() for r in right)
    scores, real_scores = (100 * (embed * text).sum(-1).clamp(min=0).mean().item() for embed in embeds)
    gaussians = [(embed.double().mean(0).numpy(), np.cov(embed.double().T)) for embed in embeds]
    expected = {"clip_score": scores, "clip_score_real": real_scores, "caption_accuracy": accuracy,
                "frechet_distance": train_decoder.frechet_distance(*gaussians), "caption_accuracy_ceiling": ceiling,
                **{f"accuracy_{name}": right[0][named[:, i], i].mean() for i, name in enumerate(synthetic.ATTRIBUTES)}}
    for size in (5, 100):
        evaluator = train_decoder.Evaluator(dataclasses.replace(cfg, chunk_size=size), parts, encoder, CPU)
        found, grid = evaluator.scores(lambda batch, noise: media.pixels(
            source.fetch(batch["rows"].numpy() // 2 * 2)[0]["image"]), "test")
        assert found == pytest.approx(expected, rel=1e-4) and accuracy < ceiling
        assert all(np.array_equal(a, b[:min(8, size)]) for a, b in zip(grid, (batch["image"], drawn, batch["caption"])))


def test_evaluate_gives_the_figures_of_training_on_any_number_of_ranks_and_takes_embeddings_of_a_prior(
        trained, world, tmp_path):
    words = ["evaluate", *flags(steps=2, eval_samples=12, device="cpu")]
    run(*words, *flags(runs=trained, grid=tmp_path / "grid.png", out=tmp_path / "scores.json"))
    expected = json.loads((world / "trained/cascade.json").read_text())
    assert json.loads((tmp_path / "scores.json").read_text()) == pytest.approx(expected, rel=1e-4)
    assert media.read_png(tmp_path / "grid.png").shape == media.read_png(world / "trained/cascade.png").shape
    words += flags(data=world / "plain", part="train")
    for name, ranks, settings in (("real", 0, {}), ("ranks", 2, {}), ("none", 0, dict(prior="none")),
                                  ("prior", 0, dict(prior=world / "prior")), ("upsample", 0, dict(runs=trained[1]))):
        run(*words, *flags(**{"runs": trained, "out": tmp_path / name, **settings}), ranks=ranks)
    real, ranks, *others = (json.loads((tmp_path / name).read_text())
                            for name in ("real", "ranks", "none", "prior", "upsample"))
    assert real == pytest.approx(ranks, rel=1e-4) and len({scores["clip_score"] for scores in (real, *others)}) == 4


# Training, as a user runs it

def test_one_command_trains_both_stages_and_torchrun_on_2_ranks_loses_the_same(trained, world, tmp_path):
    for folder, size in zip(trained, (16, 32)):
        assert {"auto_resume.json", "model.pt", "best.pt", "report.html"} <= {path.name for path in folder.iterdir()}
        assert json.loads((folder / "config.json").read_text())["image_size"] == size
        lines = metrics(folder)
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 6] and "frechet_distance" in lines[-1]
        for name in ("step_00000004.png", "test.png"):  # real pictures with captions above drawn ones
            assert media.read_png(folder / "samples" / name).shape[0] > 2 * 96
        before = {path: path.read_bytes() for path in folder.glob("*.*")}
        assert "is finished, at step 6; to train on, give more --steps" in run(
            "--config", folder / "config.json", "--data", world / "shapes")
        assert {path: path.read_bytes() for path in before} == before
    process = helpers.start("train_decoder", *flags(data=world / "shapes", run=tmp_path, **TINY), ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0 and "2 rank(s) on cpu" in out and out.count("To draw") == 1, out + err
    for folder in trained:
        for ours, theirs in zip(metrics(tmp_path / folder.name), metrics(folder), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)


def test_training_is_adam_on_the_mean_loss_and_validation_the_mean_over_all_of_val_data(world, tmp_path):
    settings = {**TINY, **STAGES["base"], "steps": 3, "log_every": 1, "weight_decay": 0.0, "max_grad_norm": 0.5,
                "ema_decay": 0.0, "eval_samples": 0, "data": str(world / "tars"), "val_data": str(world / "plain"),
                "loss_weight": "min_snr", "split_seed": 1, "init_from": str(tmp_path / "start.pt")}
    cfg = train_decoder.Config(**settings)
    unet = awake(train_decoder.UNet(cfg, 16))
    checkpoint.save({"model": unet.state_dict()}, tmp_path / "start.pt")
    run(*flags(run=tmp_path, **settings))
    lines, (source, val_source, encoder, _) = metrics(tmp_path / "base"), train_decoder.open_data(cfg)
    parts, optimizer = data.parts(source, cfg, val_source), torch.optim.Adam(unet.parameters(), betas=(0.9, 0.99))
    reader = data.Chunks(*parts["train"], 0)

    def loss(batch, *key, plain=False):
        accumulate.seed(0, *key)
        return train_decoder.diffusion_loss(unet, unet, batch, train_decoder.conditioning(batch, cfg, encoder), plain)
    for step, rate in enumerate((0.005, 0.01, 0.01)):
        total = sum(loss(reader[12 * step + start, 12 * step + stop], step, start // 5) * (stop - start) / 12
                    for start, stop in ((0, 5), (5, 10), (10, 12)))
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(unet.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        expected = {"loss": total.item(), "grad_norm": norm.item(), "lr": rate, "samples_seen": 12 * (step + 1)}
        assert {name: lines[step][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    with torch.no_grad():
        losses = [loss(val_source.fetch(np.arange(start, start + 5))[0], "loss", start // 5, plain=True).item()
                  for start in range(0, 160, 5)]
    evaluator = train_decoder.Evaluator(cfg, parts, encoder, CPU)
    found = [line[name] for line in lines if "val_loss" in line for name in ("val_loss", "val_loss_online")]
    assert [*found, evaluator.loss(unet, "validation")] == pytest.approx([np.mean(losses)] * 3, rel=1e-3)
    evaluator.figures(unet, "test")
    assert unet.training and not unet.eval().training and evaluator.loss(unet, "test") and not unet.training


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in STAGES for ranks in (1, 2)])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(stage, ranks, world, tmp_path):
    kills, rng, running = int(os.environ.get("KILLS", 2)), random.Random(f"{stage} {ranks}"), 0
    shutil.copytree(world / "plain", tmp_path / "data")
    (tmp_path / "data/00003.png").write_bytes(b"hello")
    words = flags(data=tmp_path / "data", **{**TINY, **STAGES[stage], "steps": 3 * kills}, crop_scale=0.5, flip=True,
                  text_encodings="clip", max_text_len=9)
    out = Forked("train_decoder", *words, *flags(run=tmp_path / "whole"), ranks=ranks).finish()
    assert "1 of 160 pictures looked at" in out and out.count("00003.png: not a readable image") == 2  # and when met
    for _ in range(kills):
        process = Forked("train_decoder", *words, *flags(run=tmp_path / "killed"), ranks=ranks)
        for _ in range(rng.randint(1, 4)):  # wait for so many lines of its output, then a little work more
            process.out.readline()
        sum(i * i for i in range(rng.randint(0, 1_000_000)))
        running += process.kill()
    Forked("train_decoder", *words, *flags(run=tmp_path / "killed"), ranks=ranks).finish()
    assert running >= kills / 2 and not differences(tmp_path / "whole" / stage, tmp_path / "killed" / stage)


def test_embeddings_are_found_inside_beside_and_elsewhere_or_made_by_a_clip_known_by_its_weights(world, tmp_path):
    found = {name: dict(data=world / name) for name in ("tars", "loose", "plain")}
    table = np.stack([np.load(path) for path in sorted((world / "loose").glob("*.npy"))])
    for name, settings in (("beside", {}), ("elsewhere", dict(embeddings=tmp_path / "table", index_width=5))):
        found[name] = dict(data=tmp_path / name, clip=world / "clip", **settings)
        write_tar(tmp_path / name / "00000.tar", sorted((world / "plain").glob("*.[pt][nx][gt]")))
    (tmp_path / "table").mkdir()
    for path in ("table/img_emb_0.npy", "beside/img_emb_00000.npy"):
        np.save(tmp_path / path, table)
    for name, settings in found.items():
        words = flags(run=tmp_path / "runs" / name, **{**TINY, **STAGES["base"], "steps": 2}, **settings)
        run(*words)
        lines, inside = (metrics(tmp_path / "runs" / run / "base") for run in (name, "tars"))
        losses = [[line.get(kind, 0) for line in lines for kind in ("loss", "val_loss")] for lines in (lines, inside)]
        assert lines == inside if name != "plain" else losses[0] == pytest.approx(losses[1], rel=1e-3)
    state = checkpoint.load(world / "clip/model.pt")
    words = flags(run=tmp_path / "runs/plain", data=world / "plain", **TINY, **STAGES["base"])
    for change, expect, message in ((0, 0, "at step 2 of 6"), (1, 1, "a run of another model or other data: clip is")):
        state["model"]["text_projection.weight"][0, 0] += change
        checkpoint.save(state, tmp_path / "clip.pt")
        assert message in run(*words, "--clip", tmp_path / "clip.pt", expect=expect)


# Sampling

def drawn(folder, **settings):
    """The pictures of a `sample`, in order: uint8 (N, H, W, 3), as int."""
    given = dict(steps=(3, 2), num=2, prior="none", device="cpu", out=folder / "grid.png", pictures=folder / "pictures")
    shutil.rmtree(folder / "pictures", ignore_errors=True)
    run("sample", *flags(**{**given, **settings}))
    assert media.read_png(folder / "grid.png").shape[2] == 3
    return np.stack([media.read_png(path) for path in sorted((folder / "pictures").iterdir())]).astype(int)


def test_adapters_alone_are_trained_and_saved_resume_bit_for_bit_and_count_as_they_are_scaled(trained, world, tmp_path):
    words = flags(data=world / "tars", stage="base", init_from=trained[0] / "model.pt", lora_rank=1, **TINY)
    out, file = run(*words, *flags(run=tmp_path / "lora")), tmp_path / "lora/base/model.pt"
    assert "of adapters" in out and f"--runs {trained[0]} --model model.pt --lora {file}" in out
    weights = checkpoint.load(file)["model"]
    assert all(name.endswith((".A", ".B")) and value.any() for name, value in weights.items())
    shutil.copytree(tmp_path / "lora", tmp_path / "again")
    (tmp_path / "again/base/checkpoints/step_00000006.pt").write_bytes(b"damaged")
    out = run(*words, *flags(run=tmp_path / "again"))
    assert "damaged" in out and "resuming" in out and not differences(file.parent, tmp_path / "again/base")
    base, none, whole, folder = (drawn(tmp_path, runs=trained[0], text="a red star", **given) for given in (
        {}, {"lora": file, "lora_scale": 0}, {"lora": file}, {"lora": file.parent}))
    assert np.array_equal(base, none) and np.array_equal(whole, folder) and np.abs(base - whole).max() > 1


def test_a_picture_is_the_same_in_any_batch_and_on_any_number_of_ranks(trained, world, tmp_path):
    (tmp_path / "texts.txt").write_text("a small red star\n\n something blue \n")
    texts = dict(runs=trained, texts=tmp_path / "texts.txt", num=3, prior=world / "prior", guidance_scale=2, eta=0.5)
    whole = drawn(tmp_path, **texts)
    assert whole.shape == (6, 32, 32, 3) and np.abs(whole - drawn(tmp_path, **texts, seed=1)).max() > 10
    assert min(np.abs(whole[i] - whole[j]).max() for i in range(6) for j in range(i)) > 1
    for part, change in ((whole, dict(max_batch=1)), (whole[:2], dict(texts="", text="a small red star", num=2))):
        assert np.abs(part - drawn(tmp_path, **{**texts, **change})).max() <= 1
    out = run("sample", *flags(**texts, steps=(3, 2), device="cpu", pictures=tmp_path / "two"), ranks=2)
    assert out.count("wrote grid.png: 6 pictures of 32x32") == 1
    names = [f"{text:04d}_{k:04d}.png" for text in range(2) for k in range(3)]
    assert np.abs(whole - [media.read_png(tmp_path / "two" / name) for name in names]).max() <= 1


def test_images_are_varied_blended_enlarged_and_filled_in(trained, world, tmp_path):
    files = [world / f"plain/{i:05d}.png" for i in range(2)]
    ends = [drawn(tmp_path, runs=trained, image=file, num=1)[0] for file in files]
    way = drawn(tmp_path, runs=trained, image=files[0], to=files[1], num=3)
    assert np.abs(way[[0, 2]] - ends).max() <= 1 and all(np.abs(way[1] - end).max() > 1 for end in ends)
    small, enlarged = drawn(tmp_path, runs=trained[0], image=files[0], num=2), []
    for picture in small.astype(np.uint8):
        media.write_png(tmp_path / "small.png", picture)
        enlarged.append(drawn(tmp_path, runs=trained[1], low_res=tmp_path / "small.png", num=1))
    assert small.shape == (2, 16, 16, 3) and np.abs(enlarged[0] - enlarged[1]).max() > 1
    mask, image = np.zeros((32, 32, 3), np.uint8), media.read_png(files[1])
    mask[8:24, 10:] = 255
    media.write_png(tmp_path / "mask.png", mask)
    for more in (dict(), dict(text="a red star", eta=1.0)):
        for picture in drawn(tmp_path, runs=trained, image=files[1], mask=tmp_path / "mask.png", resample=2, **more):
            assert np.array_equal(picture[mask == 0], image[mask == 0])  # what it keeps is kept exactly
            assert np.abs(picture[mask > 0] - image[mask > 0]).mean() > 5


# Mistakes

def mistake(*words, status=1, ranks=0):
    """The one line in which a command must end, with the exit status, whatever the number of ranks."""
    out = run(*words, ranks=ranks, expect=status)
    lines = [line for line in out.strip().splitlines() if "error:" in line or not ranks]
    assert len(lines) == 1 and lines[0].startswith("train_decoder.py: error: ") and "Traceback" not in out, out
    return lines[0]


@pytest.mark.parametrize("words, message", [
    ("--widht 3", "--widht: no such setting; did you mean --width?"), ("smaple", "smaple: expected one of train"),
    ("--width 30", "--width 30: expected a multiple of 4"), ("--mults=", "--mults for at least one level"),
    ("--image_size 18", "18 is not a multiple of 4, as 3 levels need"), ("--eval_steps 2000", "2000 is more than"),
    ("--attention_levels 3", "3 is no level; there are 3"), ("--crop_scale 0", "--crop_scale: 0.0 is not above 0"),
    ("--stage upsample --random_crop 64", "--random_crop 64: the first must be below image_size 32"),
    ("--stage upsample --low_res_size 32", "--low_res_size 32 and --random_crop 16: the first must be"),
    ("--low_res_noise 0.1", "it needs a --low_res_size"), ("--text_drop 0.1", "it needs --text_encodings clip"),
    ("--learned_variance --timestep_density mode", "--timestep_density uniform"), ("--lora_rank 4", "--init_from"),
    ("--text_encodings clip --attention_levels=", "it needs --attention_levels"), ("--dream", "--objective epsilon"),
    ("--guidance_scale 2 --image_drop 0", "--guidance_scale 2.0: the decoder is trained with --image_drop 0"),
    ("--preset dalle2-64 --stage upsample", "this preset is for --stage base alone"),
    ("evaluate --runs=", "--runs: expected at least one value"), ("sample", "--text: give a text"),
    ("sample --texts y --text x", "give one of them"), ("sample --text x --mask a.png", "--mask: needs --image"),
    ("sample --text x --image a.png", "it needs --mask"), ("sample --image a --to b --mask c", "takes no --mask"),
], ids=str)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


def test_mistakes_that_models_and_files_show_are_one_line_and_status_1(trained, world, tmp_path):
    (base, upsample), image = trained, world / "plain/00000.png"
    media.write_png(tmp_path / "tiny.png", np.zeros((9, 9, 3), np.uint8))
    narrow, state = clip.Config(embed_width=8), checkpoint.load(base / "model.pt")
    checkpoint.save({"model": clip.CLIP(narrow, []).state_dict(), "vocabulary": [], "config": config.as_json(narrow)},
                    tmp_path / "clip.pt")
    state |= {"clip": None, "config": {**state["config"], "image_drop": 0.0}}
    checkpoint.save(state, tmp_path / "odd/model.pt")
    text, train = dict(text="x", prior="none"), dict(data=world / "tars", run=tmp_path / "run", **TINY, stage="base")
    for command, settings, message in [
        ("sample", dict(text, runs=(upsample, base)), "stage 2 starts from pictures of 0 pixels (0: none), but"),
        ("sample", dict(text, runs=upsample), "upsample starts from pictures of 16 pixels (0: none)"),
        ("sample", dict(text, runs=world / "prior"), "not a decoder's model.pt"),
        ("sample", dict(text, runs=base, lora=("none", "none")), "--lora: 2 files for 1 --runs"),
        ("sample", dict(text, runs=trained, steps=1001), "--steps: 1001 is more than the 1000 timesteps of"),
        ("sample", dict(text, runs=tmp_path / "odd", guidance_scale=2), "is trained with --image_drop 0"),
        ("sample", dict(text, runs=tmp_path / "odd"), "which CLIP it was trained on is not known; name it with --clip"),
        ("sample", dict(text, runs=base, clip=tmp_path / "clip.pt"), "embeddings 8 wide, the decoder's are 16"),
        ("sample", dict(texts=os.devnull, runs=base), "null: no text in it"),
        ("sample", dict(image=image, runs=base, mask=tmp_path / "tiny.png"), "9x9 pixels, but --image has 32x32"),
        ("sample", dict(low_res=tmp_path / "tiny.png", runs=upsample), "9x9 pixels, smaller than the 16 needed"),
        ("evaluate", dict(runs=base, data=world / "plain", clip=tmp_path / "clip.pt"), "8 wide, the decoder's are 16"),
        ("train", dict(train, data=world / "shapes", flip=True), "--flip: it needs pictures of your own"),
        ("train", dict(train, data=world / "plain", clip=""), "no embeddings in or beside it, so a CLIP must"),
        ("train", dict(train, clip="", text_encodings="clip"), "--text_encodings clip: name the CLIP with --clip"),
        ("train", dict(train, clip=tmp_path / "clip.pt"), "clip.pt: its embeddings are 8 wide, those of"),
        ("train", dict(train, image_size=64), "32x32 pixels, smaller than the 64 asked for"),
        ("train", dict(train, data=world / "shapes", run=base.parent, width=16), "width is 8 there and 16 here"),
    ]:
        assert message in mistake(command, *flags(**{"device": "cpu", **settings})), message
    for command, settings, message in [
        ("train", dict(train, chunk_size=12), "lower chunk_size to 6"),
        ("train", dict(train, stage="all", image_size=24), "--stage all: base makes pictures of 24 pixels, upsample"),
        ("sample", dict(text="x", runs=base, prior=tmp_path, device="cpu"), "there is no prior's model.pt")]:
        assert message in mistake(command, *flags(**settings), ranks=2), message


def test_the_preset_is_valid_and_the_defaults_of_the_stages_fit_each_other():
    both = train_decoder.PRESETS, train_decoder.STAGES
    preset, base, upsample = (cfg for words in (["--preset", "dalle2-64"], [])
                              for cfg in config.parse(train_decoder.Config, words, "", *both))
    assert base.image_size == upsample.low_res_size and base.image_condition and not upsample.image_condition
    assert (preset.stage, preset.width, preset.mults, preset.batch_size) == ("base", 128, (1, 2, 4, 8), 2048)
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in train_decoder.UNet(cfg, 64).parameters()) for cfg in (preset, base, upsample)]
    assert sizes == [270_153_411, 3_047_235, 768_035]  # parameters, by all that the defaults say of the U-Net
