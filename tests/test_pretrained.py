"""Published weights: with random ones of small sizes, ours computes what diffusers and peft do."""

import json

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run, run_module

import train_decoder
import train_prior
from common import checkpoint, clip, config, data, diffusion, media, pretrained, synthetic
from common.config import UserError

diffusers = pytest.importorskip("diffusers")
D = 64  # width of the embeddings and of the text encodings
L = 24  # length of the texts


class Published:
    """A pipeline in Karlo's form, as folders of diffusers, and the same as run folders of ours."""

    def __init__(self, root):
        self.folder = root / "pipeline"
        self.runs = root / "runs"
        vars(self).update(helpers.write_pipeline(self.folder, D, L))
        vocabulary = ["a", "red", "car", "star"]
        settings = clip.Config(run_dir=str(root / "clip"), embed_width=D, text_width=D, context=L)
        torch.manual_seed(0)
        self.clip = clip.CLIP(settings, vocabulary).eval()
        for parameter in self.clip.parameters():  # a CLIP that tells texts apart
            parameter.data += torch.randn_like(parameter) * 0.1
        checkpoint.save(
            {
                "model": self.clip.state_dict(),
                "vocabulary": vocabulary,
                "config": config.as_json(settings),
            },
            root / "clip/model.pt",
        )
        self.spec = str(root / "clip")
        run_module(
            "common.pretrained", "import", self.folder, "--out", self.runs, "--clip", self.spec
        )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("published"))


def ours(published, stage):
    load = train_prior.load_prior if stage == "prior" else train_decoder.load_unet
    model, _ = load(published.runs / stage / "model.pt", "cpu")
    return model


def texts_of(published, length=L):
    """(condition of ragged texts, that of as many empty ones), of `length` tokens."""
    texts = ["a red car", "a star", "red red red a car star star"]
    return published.clip.text_condition(texts, length), published.clip.text_condition(
        [""] * 3, length
    )


def exact_scheduler(**settings):
    """diffusers' scheduler with tables in float64: its own are off by 1e-3 in the last step."""
    scheduler = diffusers.UnCLIPScheduler(**settings)
    scheduler.betas = diffusion.betas("cosine", 1000)
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    return scheduler


def draws(seed=0):
    """A function of a tensor that draws noise of its shape, and of a shape the same noise."""
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda x: torch.randn(x.shape, generator=generator)


def scheduled(scheduler, steps, x, predict, generator):
    """diffusers' sampling loop: `predict(x, t, whether it is the last)`."""
    scheduler.set_timesteps(steps)
    times = scheduler.timesteps.tolist()
    for t, before in zip(times, [*times[1:], None]):
        out = predict(x, t, before is None)
        x = scheduler.step(out, t, x, prev_timestep=before, generator=generator).prev_sample
    return x


# The prior


@torch.no_grad()
def theirs_prior(published, x_t, timestep, condition):
    return published.prior(
        x_t, timestep, condition["text_embed"], condition["text_enc"], condition["text_mask"]
    ).predicted_image_embedding


@torch.no_grad()
def test_the_prior_predicts_as_diffusers_does_and_for_two_draws_at_once(published):
    prior = ours(published, "prior")
    condition, _ = texts_of(published)
    x_t, timestep = torch.randn(3, 2, D), torch.tensor([[0, 999], [500, 3], [7, 640]])
    got = prior(x_t, timestep, condition, torch.zeros(3, dtype=torch.bool))
    for draw in range(2):
        expected = theirs_prior(published, x_t[:, draw], timestep[:, draw], condition)
        assert expected.std() > 0.01
        torch.testing.assert_close(got[:, draw], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_prior_samples_as_karlos_pipeline_does(published):
    prior = ours(published, "prior")
    condition, null = texts_of(published)
    both = {name: torch.cat([null[name], value]) for name, value in condition.items()}
    generator, draw = draws()
    x = draw(torch.empty(3, D))

    def predict(x, t, _):
        unconditional, conditional = theirs_prior(published, torch.cat([x, x]), t, both).chunk(2)
        return unconditional + 4.0 * (conditional - unconditional)

    scheduler = exact_scheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0
    )
    expected = published.prior.post_process_latents(scheduled(scheduler, 25, x, predict, generator))
    assert prior.cfg.guidance_scale == 4.0 and prior.cfg.eval_timesteps == (25,)
    got = train_prior.sample_embeddings(prior, condition, 25, 4.0, prior.cfg.eta, draws()[1])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


# The decoder and its upsampler


@torch.no_grad()
def theirs_decoder(published, x_t, timestep, condition, image_embed, guided=False, unet=None):
    encodings, embedding = published.text_proj(
        image_embeddings=image_embed,
        prompt_embeds=condition["text_embed"],
        text_encoder_hidden_states=condition["text_enc"],
        do_classifier_free_guidance=guided,
    )
    mask = F.pad(condition["text_mask"], (4, 0), value=True)
    unet = unet or published.decoder
    return unet(x_t, timestep, encodings, class_labels=embedding, attention_mask=mask).sample


@torch.no_grad()
def test_the_decoder_predicts_as_diffusers_does(published):
    unet = ours(published, "base")
    condition, _ = texts_of(published, unet.cfg.max_text_len)
    image_embed, x_t = torch.randn(3, D) * 3, torch.randn(3, 3, 8, 8)
    timestep = torch.tensor([0, 500, 999])
    keep = torch.zeros(3, dtype=torch.bool)
    got = unet(x_t, timestep, {**condition, "image_embed": image_embed}, keep, keep)
    expected = theirs_decoder(published, x_t, timestep, condition, image_embed)
    assert expected.std() > 0.05
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_decoder_samples_as_karlos_pipeline_does(published):
    unet = ours(published, "base")
    condition, null = texts_of(published, unet.cfg.max_text_len)
    both = {name: torch.cat([null[name], value]) for name, value in condition.items()}
    image_embed = torch.randn(3, D) * 3
    generator, draw = draws()
    x = draw(torch.empty(3, 3, 8, 8))

    def predict(x, t, _):
        out = theirs_decoder(published, torch.cat([x, x]), t, both, image_embed, guided=True)
        unconditional, conditional = out.chunk(2)
        guided = unconditional[:, :3] + 8.0 * (conditional[:, :3] - unconditional[:, :3])
        return torch.cat([guided, conditional[:, 3:]], dim=1)

    scheduler = exact_scheduler(variance_type="learned_range")
    expected = scheduled(scheduler, 25, x, predict, generator).clamp(-1, 1)
    cfg = unet.cfg
    assert (cfg.guidance_scale, cfg.eval_steps, cfg.eta) == (8.0, 25, 1.0)
    got = train_decoder.sample_pictures(
        unet, {**condition, "image_embed": image_embed}, 3, 25, 8.0, 1.0, draws()[1]
    )
    assert got.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_upsampler_samples_as_karlos_pipeline_does_with_its_second_unet_in_the_last_step(
    published,
):
    args = train_decoder.SampleConfig(run_dir=(str(published.runs / "upsample"),))
    [unet], _, _ = train_decoder.load_cascade(args, "cpu")
    low_res = torch.rand(2, 3, 8, 8) * 2 - 1
    large = F.interpolate(
        low_res, size=(32, 32), mode="bicubic", align_corners=False, antialias=True
    )
    used = []

    def predict(x, t, last):
        used.append(last)
        model = published.super_res_last if last else published.super_res_first
        return model(torch.cat([x, large], dim=1), t).sample

    generator, draw = draws()
    draw(large)  # for the low resolution, which takes none
    x = draw(torch.empty(2, 3, 32, 32))
    expected = scheduled(exact_scheduler(), 7, x, predict, generator)
    got = train_decoder.sample_pictures(
        unet, {}, 2, unet.cfg.eval_steps, eta=unet.cfg.eta, noise=draws()[1], low_res=low_res
    )
    assert used == [False] * 6 + [True]
    torch.testing.assert_close(got, expected.clamp(-1, 1), rtol=0, atol=1e-4)


# There and back


@pytest.mark.parametrize(
    "stage, parts",
    [
        ("prior", {"": "prior"}),
        ("upsample", {"": "super_res_first"}),
        ("base", {"decoder": "decoder", "text_proj": "text_proj"}),
    ],
)
def test_what_is_exported_is_what_diffusers_loads_and_has_the_weights_that_were_imported(
    published, stage, parts, tmp_path
):
    run_module(
        "common.pretrained",
        "export",
        "--run_dir",
        published.runs / stage,
        "--out",
        tmp_path / "out",
    )
    for folder, part in parts.items():
        before = getattr(published, part)
        after = type(before).from_pretrained(tmp_path / "out" / folder)
        old, new = (
            json.loads(json.dumps(dict(model.config), default=str)) for model in (before, after)
        )
        assert {name: new[name] for name in old if name[0] != "_"} == {
            name: old[name] for name in old if name[0] != "_"
        }
        weights = before.state_dict()
        assert after.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in after.state_dict().items())


def write_raw_shards(folder, published, rows=64):
    """Shards of embeddings that are not of unit length, with captions."""
    images = np.random.default_rng(0).standard_normal((rows, D)).astype(np.float32) * 3
    data.write_shards(
        folder, images, images, [{"caption": f"a red star {row}"} for row in range(rows)]
    )
    return (
        "--data",
        folder,
        "--clip",
        published.spec,
        "--batch_size",
        16,
        "--warmup_steps",
        1,
        "--log_every",
        1,
    )


def test_an_imported_prior_is_trained_resumed_and_exported(published, tmp_path):
    settings = (
        *write_raw_shards(tmp_path / "raw", published),
        "--init_from",
        published.runs / "prior/model.pt",
        "--run_dir",
        tmp_path / "run",
        "--lr",
        1e-3,
        "--eval_samples",
        8,
    )
    run("train_prior", *settings, "--steps", 2, "--cosine_steps", 4)
    text = run("train_prior", *settings, "--steps", 4, "--cosine_steps", 4)
    assert "resuming" in text
    mine, state = train_prior.load_prior(tmp_path / "run/model.pt", "cpu")
    assert state["step"] == 4 and mine.cfg.raw_embeddings and mine.cfg.width == 64
    run_module(
        "common.pretrained", "export", "--run_dir", tmp_path / "run", "--out", tmp_path / "out"
    )
    theirs = diffusers.PriorTransformer.from_pretrained(tmp_path / "out").eval()
    condition, _ = texts_of(published)
    x_t, timestep = torch.randn(3, D), torch.tensor([5, 500, 999])
    with torch.no_grad():
        got = mine(x_t[:, None], timestep[:, None], condition, torch.zeros(3, dtype=torch.bool))[
            :, 0
        ]
        expected = theirs(
            x_t, timestep, condition["text_embed"], condition["text_enc"], condition["text_mask"]
        ).predicted_image_embedding
        before = theirs_prior(published, x_t, timestep, condition)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 1e-3


def test_adapters_of_an_imported_prior_are_loaded_by_peft(published, tmp_path):
    peft = pytest.importorskip("peft")
    settings = write_raw_shards(tmp_path / "raw", published)
    run(
        "train_prior",
        *settings,
        "--init_from",
        published.runs / "prior/model.pt",
        "--lora_rank",
        2,
        "--lr",
        0.05,
        "--run_dir",
        tmp_path / "lora",
        "--steps",
        4,
        "--eval_samples",
        8,
    )
    run_module(
        "common.pretrained", "export", "--run_dir", tmp_path / "lora", "--out", tmp_path / "out"
    )
    adapted = peft.PeftModel.from_pretrained(
        diffusers.PriorTransformer.from_pretrained(published.folder / "prior"), tmp_path / "out"
    ).eval()
    mine, _ = train_prior.load_prior(tmp_path / "lora/model.pt", "cpu")
    condition, _ = texts_of(published)
    x_t, timestep = torch.randn(3, D), torch.tensor([5, 500, 999])
    with torch.no_grad():
        got = mine(x_t[:, None], timestep[:, None], condition, torch.zeros(3, dtype=torch.bool))[
            :, 0
        ]
        expected = adapted(
            x_t,
            timestep,
            proj_embedding=condition["text_embed"],
            encoder_hidden_states=condition["text_enc"],
            attention_mask=condition["text_mask"],
        ).predicted_image_embedding
        before = theirs_prior(published, x_t, timestep, condition)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 1e-3


def pictures_of(folder, size):
    """Captioned pictures in a folder, and the words for a few steps on them."""
    pictures, records = synthetic.shapes(range(40), size=size)
    folder.mkdir()
    for number, (picture, record) in enumerate(zip(pictures, records)):
        media.write_png(folder / f"{number}.png", picture)
        (folder / f"{number}.txt").write_text(record["caption"])
    return (
        "--data",
        folder,
        "--batch_size",
        4,
        "--warmup_steps",
        1,
        "--log_every",
        1,
        "--eval_samples",
        4,
    )


@pytest.mark.parametrize("stage, size", [("base", 32), ("upsample", 32)])
def test_an_imported_decoder_is_trained_resumed_and_exported(published, stage, size, tmp_path):
    settings = (
        *pictures_of(tmp_path / "pictures", size),
        "--run_dir",
        tmp_path / "run",
        "--stage",
        stage,
        "--init_from",
        published.runs / stage / "model.pt",
        "--eval_steps",
        2,
    )
    run("train_decoder", *settings, "--steps", 1, "--cosine_steps", 4)
    assert "resuming" in run("train_decoder", *settings, "--steps", 2, "--cosine_steps", 4)
    mine, state = train_decoder.load_unet(tmp_path / "run" / stage / "model.pt", "cpu")
    assert state["step"] == 2 and (mine.cfg.optimizer, mine.cfg.lr) == ("adamw", 1e-5)
    before = ours(published, stage).state_dict()
    changed = [
        name for name, value in mine.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert len(changed) > len(before) / 2 and not any("null_text" in name for name in changed)
    run_module(
        "common.pretrained",
        "export",
        "--run_dir",
        tmp_path / "run" / stage,
        "--out",
        tmp_path / "out",
    )
    folder = tmp_path / "out/decoder" if stage == "base" else tmp_path / "out"
    kind = diffusers.UNet2DConditionModel if stage == "base" else diffusers.UNet2DModel
    weights = kind.from_pretrained(folder).state_dict()
    assert torch.equal(weights["conv_in.weight"], mine.stem.weight)


def test_adapters_of_an_imported_decoder_are_loaded_by_peft(published, tmp_path):
    peft = pytest.importorskip("peft")
    settings = (
        *pictures_of(tmp_path / "pictures", 32),
        "--run_dir",
        tmp_path / "run",
        "--stage",
        "base",
    )
    lora = ("--lora_rank", 2, "--lr", 0.05, "--steps", 3, "--eval_steps", 2)
    run("train_decoder", *settings, "--init_from", published.runs / "base/model.pt", *lora)
    run_module(
        "common.pretrained", "export", "--run_dir", tmp_path / "run/base", "--out", tmp_path / "out"
    )
    base = diffusers.UNet2DConditionModel.from_pretrained(published.folder / "decoder")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    unet, _ = train_decoder.load_unet(tmp_path / "run/base/model.pt", "cpu")
    condition, _ = texts_of(published, unet.cfg.max_text_len)
    image_embed, x_t = torch.randn(3, D) * 3, torch.randn(3, 3, 8, 8)
    timestep = torch.tensor([0, 500, 999])
    keep = torch.zeros(3, dtype=torch.bool)
    with torch.no_grad():
        got = unet(x_t, timestep, {**condition, "image_embed": image_embed}, keep, keep)
        before = theirs_decoder(published, x_t, timestep, condition, image_embed)
        expected = theirs_decoder(published, x_t, timestep, condition, image_embed, unet=adapted)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 1e-3


def test_evaluation_of_an_imported_prior_wants_data_and_takes_its_own_settings(published, tmp_path):
    words = write_raw_shards(tmp_path / "raw", published)[:2]
    (tmp_path / "raw/clip.json").write_text(json.dumps({"clip": published.spec}))
    folder = ("evaluate", "--run_dir", published.runs / "prior")
    assert "similarity_with_text@25" in run("train_prior", *folder, *words)
    assert "name some with --data" in run("train_prior", *folder, expect=1)
    folder = ("evaluate", "--run_dir", published.runs / "base")
    assert "name some with --data" in run("train_decoder", *folder, expect=1)


def test_raw_embeddings_are_standardized_by_their_own_mean_and_deviation(published, tmp_path):
    settings = write_raw_shards(tmp_path / "raw", published)
    small = (
        "--width",
        16,
        "--depth",
        1,
        "--heads",
        1,
        "--steps",
        1,
        "--eval_samples",
        8,
        "--eval_timesteps",
        2,
    )
    run("train_prior", *settings, *small, "--raw_embeddings", "--run_dir", tmp_path / "run")
    mine, _ = train_prior.load_prior(tmp_path / "run/model.pt", "cpu")
    source = data.Embeddings(tmp_path / "raw")
    rows = data.parts(source, mine.cfg)["train"][1]
    x0 = mine.standardize(source.fetch(rows[np.arange(len(rows))])[0]["image_embed"])
    torch.testing.assert_close(x0.mean(0), torch.zeros(D), rtol=0, atol=1e-4)
    torch.testing.assert_close(x0.std(0), torch.ones(D), rtol=0, atol=1e-3)


# Karlo's own files


def fused(model, tensors):
    """Karlo's own tensors: queries, keys and values of a head lie together in one layer."""
    own = {}
    width = getattr(model.cfg, "head_width", 0) or model.cfg.width // model.cfg.heads
    for name in tensors:
        module, _, kind = name.rpartition(".")
        layer, _, number = module.rpartition(".")
        if not layer.endswith(("qkv", "encoder_kv")):
            own[name] = tensors[name]
        elif number == "0":
            parts = [
                tensors[f"{layer}.{i}.{kind}"]
                for i in range(2 if layer.endswith("encoder_kv") else 3)
            ]
            heads = torch.stack([part.unflatten(0, (-1, width)) for part in parts], dim=1)
            own[f"{layer}.{kind}"] = heads.flatten(0, 2)
    return own


def karlos_own(model):
    """The weights of our model under the names of Karlo's own files."""
    weights = model.state_dict()
    tensors = {}
    for name, theirs in pretrained.published_names(model, pretrained.KARLO).items():
        value = weights[name]
        if name.startswith("image_tokens_in."):
            value = value.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
        tensors |= dict(zip(theirs, value.chunk(len(theirs))))
    return fused(model, tensors)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module."])
def test_karlos_own_files_load(published, wrapper, tmp_path, monkeypatch):
    prior = ours(published, "prior")
    small = {
        name: getattr(prior.cfg, name)
        for name in (
            "width",
            "depth",
            "heads",
            "max_text_len",
            "text_encodings",
            "raw_embeddings",
            "guidance_scale",
            "eval_timesteps",
        )
    }
    monkeypatch.setitem(train_prior.PRESETS, "karlo", small)
    own = karlos_own(prior)
    torch.save((own.pop("clip_mean"), own.pop("clip_std")), tmp_path / "ViT-L-14_stats.th")
    assert "transformer.resblocks.2.attn.c_qkv.weight" in own and "prd_emb" in own
    torch.save(
        {"state_dict": {f"{wrapper}model.{name}": value for name, value in own.items()}},
        tmp_path / "prior.ckpt",
    )
    pretrained.import_file(tmp_path / "prior.ckpt", tmp_path / "prior", published.spec)
    again, _ = train_prior.load_prior(tmp_path / "prior/model.pt", "cpu")
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in prior.state_dict().items()
    )

    unet = ours(published, "base")
    settings = (*train_decoder.MODEL, "timestep_density")
    monkeypatch.setitem(
        train_decoder.PRESETS, "karlo-64", {name: getattr(unet.cfg, name) for name in settings}
    )
    own = karlos_own(unet)
    assert (
        "output_blocks.1.2.in_layers.0.weight" in own
        and "input_blocks.3.1.encoder_kv.weight" in own
    )
    torch.save(
        {f"{wrapper}model.{name}": value for name, value in own.items()}, tmp_path / "decoder.ckpt"
    )
    pretrained.import_file(tmp_path / "decoder.ckpt", tmp_path / "base", published.spec)
    again, _ = train_decoder.load_unet(tmp_path / "base/model.pt", "cpu")
    assert (again.cfg.optimizer, again.cfg.lr) == ("adamw", 1e-5)  # for --init_from
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in unet.state_dict().items()
    )

    unet = ours(published, "upsample")
    monkeypatch.setitem(
        train_decoder.PRESETS, "karlo-256", {name: getattr(unet.cfg, name) for name in settings}
    )
    own = karlos_own(unet)
    torch.save(
        {
            f"{wrapper}model_{step}.{name}": value
            for name, value in own.items()
            for step in ("first_steps", "last_step")
        },
        tmp_path / "upsampler.ckpt",
    )
    pretrained.import_file(tmp_path / "upsampler.ckpt", tmp_path / "upsample", "")
    for name in ("model.pt", "last_step.pt"):
        again, _ = train_decoder.load_unet(tmp_path / "upsample" / name, "cpu")
        assert all(
            torch.equal(value, again.state_dict()[key]) for key, value in unet.state_dict().items()
        )


# The published sizes


def parameters(model):
    """How many numbers the published files have, without our encoding of ""."""
    return sum(
        value.numel()
        for name, value in model.state_dict().items()
        if not name.startswith("null_text")
    )


@pytest.mark.parametrize(
    "script, preset, widths, count",
    [
        (train_prior, "karlo", (768, 768), 1_022_030_080),
        (train_prior, "kandinsky-2-2", (1280, 1280), 1_026_225_920),
        (train_decoder, "karlo-64", (768, 768), 893_318_086),
        (train_decoder, "karlo-256", (0, 0), 691_579_523),
    ],
)
def test_models_of_the_published_sizes_have_the_published_number_of_parameters(
    script, preset, widths, count
):
    cfg = script.Config(**script.PRESETS[preset])
    with torch.device("meta"):
        model = (train_prior.Prior if script is train_prior else train_decoder.UNet)(cfg, *widths)
    assert parameters(model) == count
    for style in (pretrained.DIFFUSERS, pretrained.KARLO):
        names = pretrained.published_names(model, style)
        assert {name for name in model.state_dict() if not name.startswith("null_text")} == set(
            names
        )
        theirs = [name for names_of_one in names.values() for name in names_of_one]
        assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize(
    "script, preset, widths, published, ours_over_theirs",
    [
        (
            train_prior,
            "dalle2",
            (768, 768),
            1.0e9,
            (1.15, 1.30),
        ),  # the paper's billion is without embedding layers
        (
            train_decoder,
            "dalle2-64",
            (768, 768),
            3.5e9,
            (0.6, 0.75),
        ),  # which counts its text transformer, 24 deep
        (train_decoder, "dalle2-256", (0, 0), 700e6, (0.95, 1.05)),
        (train_decoder, "dalle2-1024", (0, 0), 300e6, (0.9, 1.1)),
    ],
)
def test_presets_of_dalle2_have_about_the_sizes_of_its_table(
    script, preset, widths, published, ours_over_theirs
):
    cfg = script.Config(**script.PRESETS[preset])
    with torch.device("meta"):
        model = (train_prior.Prior if script is train_prior else train_decoder.UNet)(cfg, *widths)
    low, high = ours_over_theirs
    assert low < parameters(model) / published < high


# Mistakes


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norm_in_type": "layer"}, "norm_in_type is 'layer'"),
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"num_layers": 4}, "transformer_blocks.3.norm1.weight is missing"),
        ({"num_layers": 2}, "weights are unknown: transformer_blocks.2"),
    ],
)
def test_a_folder_of_another_form_is_refused(published, change, message, tmp_path):
    folder = tmp_path / "prior"
    folder.mkdir()
    for file in (published.folder / "prior").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(UserError, match=message):
        pretrained.import_folder(folder, tmp_path / "out/model.pt", published.spec)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_missing_folder_is_said(published, tmp_path):
    with pytest.raises(UserError, match="is there already"):
        pretrained.import_folder(
            published.folder / "prior", published.runs / "prior/model.pt", published.spec
        )
    with pytest.raises(UserError, match="expected config\\.json"):
        pretrained.import_folder(tmp_path, tmp_path / "out/model.pt", published.spec)
    with pytest.raises(UserError, match="no such file or folder"):
        pretrained.fetch("nothing")
    (tmp_path / "model.ckpt").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"model\.ckpt: damaged, or not of tensors alone"):
        pretrained.import_file(tmp_path / "model.ckpt", tmp_path / "out", published.spec)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.ckpt")
    with pytest.raises(UserError, match=r"no clip_emb\.weight in it; expected a prior, decoder"):
        pretrained.import_file(tmp_path / "model.ckpt", tmp_path / "out", published.spec)


def test_of_a_repository_the_folders_asked_for_are_fetched_once(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    files = [
        f"{part}/{name}"
        for part in ("prior", "text_encoder")
        for name in ("model.bin", "model.safetensors")
    ]
    monkeypatch.setattr(hub, "list_repo_files", lambda repository: files)

    def snapshot_download(repository, allow_patterns, ignore_patterns):
        asked.append((repository, allow_patterns, ignore_patterns))
        return tmp_path

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert pretrained.fetch("someone/model/prior") == tmp_path / "prior"
    assert pretrained.fetch("someone/model") == tmp_path
    one, whole = asked
    assert one[:2] == ("someone/model", ["prior/*", "text_proj/*"]) and "prior/model.bin" in one[2]
    assert {"prior/*", "decoder/*", "super_res_last/*"} < set(whole[1])


def test_a_flag_against_the_file_of_init_from_is_refused(published):
    file = str(published.runs / "prior/model.pt")
    parse = [
        train_prior.Config,
        ["--init_from", file],
        "",
        None,
        None,
        None,
        lambda path: checkpoint.settings_in(path, train_prior.MODEL, train_prior.TAKEN),
    ]
    cfg = config.parse(*parse)
    assert (cfg.width, cfg.guidance_scale, cfg.eval_timesteps) == (64, 4.0, (25,))
    parse[1] = ["--init_from", file, "--guidance_scale", "2"]
    assert config.parse(*parse).guidance_scale == 2.0
    parse[1] = ["--init_from", file, "--width", "192"]
    with pytest.raises(UserError, match=r"--width 192: .* is a model of 64"):
        config.parse(*parse)


def test_unit_embeddings_are_refused_for_a_model_of_raw_ones(published, tmp_path):
    images = np.eye(D, dtype=np.float32)
    data.write_shards(tmp_path / "unit", images, images, [{"caption": "a star"}] * D)
    text = run(
        "train_prior",
        "--data",
        tmp_path / "unit",
        "--clip",
        published.spec,
        "--init_from",
        published.runs / "prior/model.pt",
        "--run_dir",
        tmp_path / "run",
        "--batch_size",
        16,
        expect=1,
    )
    assert "of unit length" in text
