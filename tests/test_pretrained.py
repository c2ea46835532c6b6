"""Small random models in published formats: our code agrees with diffusers and peft."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch.testing import assert_close

import train_decoder
import train_prior
from common import adapters, checkpoint, config
from common.config import UserError
from common.data import embeddings
from common.interop import pretrained
from common.models import clip, diffusion

diffusers = pytest.importorskip("diffusers")
MODULE = "common.interop.pretrained"
D = 64  # width of the embeddings and of the text encodings
L = 24  # length of the texts
TEXTS = ["a red car", "a star", "red red red a car star star"]
NO_TEXTS = [""] * 3
KEPT = torch.zeros(3, dtype=torch.bool)  # no condition is dropped
TIMESTEPS = torch.tensor([0, 500, 999])


class Published:
    """A pipeline like Karlo's, both as diffusers saves it and as imported run folders."""

    def __init__(self, root):
        self.folder = root / "pipeline"
        self.runs = root / "runs"
        vars(self).update(helpers.write_pipeline(self.folder))
        settings = dict(
            vocabulary=["a", "red", "car", "star"],
            image_size=32,
            context=L,
            embed_width=D,
            text_width=D,
        )
        torch.manual_seed(0)
        self.clip = clip.CLIP(**settings).eval()
        for parameter in self.clip.parameters():  # so that it tells texts apart
            parameter.data += torch.randn_like(parameter) * 0.1
        contents = {"kind": "clip", "settings": settings, "model": self.clip.state_dict()}
        self.spec = str(root / "clip.pt")
        checkpoint.save(contents, self.spec)
        run(MODULE, "import", self.folder, out=self.runs, clip=self.spec)

    def condition(self, texts=TEXTS, length=L):
        """The condition that our CLIP makes from texts, cut or padded to `length` tokens."""
        return self.clip.text_condition(texts, length)

    def their_decoder(self, unet, x_t, timestep, condition, image_embed):
        encodings, embedding = self.text_proj(
            image_embeddings=image_embed,
            prompt_embeds=condition["text_embed"],
            text_encoder_hidden_states=condition["text_enc"],
            do_classifier_free_guidance=False,
        )
        mask = F.pad(condition["text_mask"], (4, 0), value=True)
        return unet(x_t, timestep, encodings, class_labels=embedding, attention_mask=mask).sample


def their_prior(prior, x_t, timestep, condition):
    embedding, encodings, mask = condition.values()
    names = {"attention_mask": mask, "encoder_hidden_states": encodings}
    return prior(x_t, timestep, proj_embedding=embedding, **names).predicted_image_embedding


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("published"))


def load(folder):
    """Our model from a run folder."""
    path = folder / "model.pt"
    loader = train_decoder.load_unet if folder.name == "base" else train_prior.load_prior
    return loader(path, "cpu")[0]


def upsampler_of(folder):
    """(U-Net for sampling, its CLIP) from a run folder."""
    args = train_decoder.SampleConfig(run_dir=(str(folder),))
    [unet], spec, _ = train_decoder.load_cascade(args, "cpu")
    return unet, spec


def export(run_dir):
    """Export a run folder to `out`."""
    run(MODULE, "export", run_dir=run_dir, out="out")


# Sampling


def noise_fn(x):
    return torch.randn(x.shape)


def scheduled(settings, steps, shape, predict):
    """diffusers' sampling loop with the model `predict(x, t)`, starting from newly drawn noise.

    The scheduler gets float64 tables, because its own are off by 1e-3 in the last step.
    """
    scheduler = diffusers.UnCLIPScheduler(**settings)
    scheduler.betas = diffusion.noise_betas("cosine", 1000)
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    x = torch.randn(shape)
    for t, t_next in zip(timesteps, [*timesteps[1:], None]):
        x = scheduler.step(predict(x, t), t, x, prev_timestep=t_next).prev_sample
    torch.manual_seed(0)
    return x


@torch.no_grad()
def test_the_prior_samples_as_karlos_pipeline_does(published):
    prior = load(published.runs / "prior")
    assert (prior.cfg.guidance_scale, prior.cfg.eval_timesteps) == (4.0, (25,))
    condition = published.condition()
    no_condition = published.condition(NO_TEXTS)

    def predict(x, t):
        conditional = their_prior(published.prior, x, t, condition)
        unconditional = their_prior(published.prior, x, t, no_condition)
        return unconditional + 4 * (conditional - unconditional)

    settings = dict(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=0.5
    )
    torch.manual_seed(0)
    expected = scheduled(settings, 25, (3, D), predict)
    expected = published.prior.post_process_latents(expected)
    got = train_prior.sample_embeddings(prior, condition, 25, 4.0, noise_fn=noise_fn)
    assert_close(got, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_decoder_samples_as_karlos_pipeline_does(published):
    unet = load(published.runs / "base")
    cfg = unet.cfg
    assert (cfg.guidance_scale, cfg.eval_steps, cfg.eta) == (8.0, 25, 1.0)
    condition = published.condition(length=cfg.max_text_len)
    no_condition = published.condition(NO_TEXTS, cfg.max_text_len)
    image_embed = torch.randn(3, D) * 3
    no_image = published.text_proj.learned_classifier_free_guidance_embeddings.expand(3, D)

    def predict(x, t):
        out = published.their_decoder(published.decoder, x, t, condition, image_embed)
        null = published.their_decoder(published.decoder, x, t, no_condition, no_image)
        epsilon = null + 8 * (out - null)
        return torch.cat([epsilon[:, :3], out[:, 3:]], dim=1)

    torch.manual_seed(0)
    expected = scheduled({"variance_type": "learned_range"}, 5, (3, 3, 8, 8), predict)
    condition["image_embed"] = image_embed
    got = train_decoder.sample_images(unet, condition, 3, 5, 8.0, cfg.eta, noise_fn)
    assert got.std() > 0.1
    assert_close(got, expected.clamp(-1, 1), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_upsampler_samples_as_karlos_with_its_second_unet_in_the_last_step(published):
    unet, _ = upsampler_of(published.runs / "upsample")
    assert (unet.cfg.eval_steps, unet.cfg.eta) == (7, 1.0)
    low_res = torch.rand(1, 3, 8, 8) * 2 - 1
    large = F.interpolate(low_res, size=(32, 32), mode="bicubic", antialias=True)

    def predict(x, t):
        model = published.super_res_first if t else published.super_res_last
        return model(torch.cat([x, large], dim=1), t).sample

    torch.manual_seed(0)
    noise_fn(large)  # our sampler also draws noise for low_res first, without adding it
    expected = scheduled({}, 3, large.shape, predict)
    got = train_decoder.sample_images(unet, {}, 1, 3, eta=1.0, noise_fn=noise_fn, low_res=low_res)
    assert_close(got, expected.clamp(-1, 1), rtol=0, atol=1e-4)


# Round trips


@pytest.mark.parametrize(
    "stage, parts",
    [
        ("prior", {"prior": ""}),
        ("upsample", {"super_res_first": ""}),
        ("base", {"decoder": "decoder", "text_proj": "text_proj"}),
    ],
)
def test_what_is_exported_is_what_was_imported(published, stage, parts):
    export(published.runs / stage)
    for part, folder in parts.items():
        before = getattr(published, part)
        after = type(before).from_pretrained(f"out/{folder}")
        assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
        for name, value in before.config.items():
            value = list(value) if isinstance(value, tuple) else value
            assert name.startswith("_") or after.config[name] == value, name
    if stage == "base":
        run(MODULE, "import", "out", out="run", clip=published.spec)
        paths = Path("run/base/model.pt"), published.runs / "base/model.pt"
        left, right = [checkpoint.load(path) for path in paths]
        assert helpers.same(left["model"], right["model"])
        assert left["config"] == right["config"] | {"run_dir": "run/base"}
    if stage == "prior":
        run(MODULE, "import", "out", out="run", clip=published.spec)
        assert checkpoint.load("run/model.pt")["config"]["x0_bound"] == 0.5
        scheduler = diffusers.UnCLIPScheduler.from_pretrained("out/scheduler")
        assert scheduler.config.clip_sample_range == 0.5


def outputs(published, model, theirs):
    """The outputs of our model and of theirs for the same inputs."""
    condition = published.condition(length=model.cfg.max_text_len)
    if isinstance(model, train_prior.Prior):
        x_t = torch.randn(3, D)
        ours = model(x_t[:, None], TIMESTEPS[:, None], condition, KEPT)[:, 0]
        return ours, their_prior(theirs, x_t, TIMESTEPS, condition)
    x_t = torch.randn(3, 3, 8, 8)
    image_embed = torch.randn(3, D) * 3
    expected = published.their_decoder(theirs, x_t, TIMESTEPS, condition, image_embed)
    condition["image_embed"] = image_embed
    return model(x_t, TIMESTEPS, condition, KEPT, KEPT), expected


def test_an_imported_prior_is_trained_resumed_and_exported(published):
    images = np.random.default_rng(0).standard_normal((64, D)) * 3
    embeddings.write_shards("raw", images, images, [{"caption": "a red star"}] * 64)
    shutil.rmtree("raw/text_emb")  # not made by this CLIP
    settings = dict(
        data="raw",
        clip=published.spec,
        init_from=published.runs / "prior/model.pt",
        text_source="clip",
        run_dir="run",
        batch_size=4,
        eval_samples=2,
        lr=1e-3,
    )
    run("train_prior", steps=2, **settings)
    assert "resuming" in run("train_prior", steps=3, **settings)
    export("run")
    theirs = diffusers.PriorTransformer.from_pretrained("out").eval()
    with torch.no_grad():
        got, expected = outputs(published, load(Path("run")), theirs)
    assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage, part", [("prior", "prior"), ("base", "decoder")])
@torch.no_grad()
def test_adapters_are_loaded_by_peft(published, stage, part):
    peft = pytest.importorskip("peft")
    path = published.runs / stage / "model.pt"
    model = load(published.runs / stage)
    cfg = SimpleNamespace(init_from=str(path), lora_rank=2, precision="fp32")
    trained, about = adapters.start(model, cfg, "digest")
    weights = helpers.awake(trained).state_dict()
    contents = {**checkpoint.load(path), "model": weights, "lora": about}
    checkpoint.save(contents, "run/model.pt")
    export("run")
    about = config.read_json("out/adapter_config.json")
    assert about["base_model_name_or_path"] == str(published.folder / part)
    base = type(getattr(published, part)).from_pretrained(published.folder / part)
    theirs = peft.PeftModel.from_pretrained(base, "out").eval()
    assert_close(*outputs(published, model, theirs), rtol=0, atol=1e-5)


# The published sizes


@pytest.mark.parametrize(
    "kind, preset, width, count",
    [
        ("prior", "karlo", 768, 1_022_030_080),
        ("prior", "karlo", 1280, 1_026_225_920),
        ("base", "karlo-64", 768, 893_318_086),
        ("upsample", "karlo-256", 0, 691_579_523),
    ],
)
def test_presets_have_the_published_number_of_parameters(kind, preset, width, count):
    script = train_prior if kind == "prior" else train_decoder
    model_class = train_prior.Prior if kind == "prior" else train_decoder.UNet
    cfg = pretrained.CONFIGS[kind](**script.PRESETS[preset])
    with torch.device("meta"):
        model = model_class(cfg, width, width)
    weights = model.state_dict()
    table = pretrained.PRIOR if kind == "prior" else pretrained.UNET + pretrained.TEXT_PROJ
    names = pretrained.published_names(cfg, table, weights)
    assert sum(weights[name].numel() for name in names) == count


# Mistakes


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("prior", {"time_embed_act_fn": "gelu"}, "time_embed_act_fn is 'gelu'"),
        ("prior", {"_class_name": "AutoencoderKL"}, "a AutoencoderKL; expected a PriorTransformer"),
        ("prior", {"num_layers": 2}, "weights are unknown: transformer_blocks.2"),
        ("prior", {"num_embeddings": 9}, r"positional_embedding: .* of shape \(13, 64\)"),
        ("decoder", {"attention_head_dim": 32}, "attention_head_dim is 32; only 64"),
    ],
)
def test_a_folder_of_another_form_is_refused(published, part, change, message, tmp_path):
    folder = shutil.copytree(published.folder / part, tmp_path / part)
    about = config.read_json(folder / "config.json")
    checkpoint.write_json(about | change, folder / "config.json")
    with pytest.raises(UserError, match=message):
        pretrained.import_folder(folder, tmp_path / "out/model.pt", published.spec, "")
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_a_folder_is_refused(published, tmp_path):
    published.prior.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    out = run(MODULE, "import", file, out="run", clip=published.spec, expect=1)
    assert f"{file}: expected a folder with a config.json" in out


def test_another_model_is_not_overwritten_and_an_import_that_broke_off_is_repeated(
    published, tmp_path
):
    runs = shutil.copytree(published.runs, tmp_path / "runs")
    (runs / "upsample/last_step.pt").unlink()
    run(MODULE, "import", published.folder, out=runs, clip=published.spec)
    assert (runs / "upsample/last_step.pt").is_file()
    words = MODULE, "import", published.folder / "decoder", "--out", runs / "prior"
    assert "already exists, from another source" in run(*words, expect=1)


@pytest.mark.parametrize("kind, model_class, width, settings", [
    ("prior", train_prior.Prior, D, dict(width=32, depth=1, heads=2)),
    ("upsample", train_decoder.UNet, 0,
     dict(width=128, channel_mult=(1,), num_res_blocks=1, image_size=32, random_crop=8)),
])
def test_an_exported_model_of_our_own_comes_back_with_its_diffusion(
        kind, model_class, width, settings, published):
    cfg = pretrained.CONFIGS[kind](noise_schedule="linear", **settings)
    weights = model_class(cfg, width).state_dict()
    contents = {"kind": kind, "model": weights, "config": config.as_json(cfg), "widths": [width, 0]}
    checkpoint.save(contents, "run/model.pt")
    export("run")
    run(MODULE, "import", "out", out="again", clip=published.spec)
    again = checkpoint.load("again/model.pt")
    assert again["widths"] == [width, 0]
    model_settings = config.nan_to_none(config.settings_with(cfg, "model"))
    assert again["config"] | model_settings == again["config"]
    again["model"].pop("null_text.text_embed", None)  # the import takes it from the CLIP
    assert again["model"].keys() == weights.keys() - {"null_text.text_embed"}
    assert not Path("out/scheduler").exists()  # diffusers' scheduler only knows the cosine schedule
    assert helpers.same(again["model"], {name: weights[name] for name in again["model"]})


def test_what_diffusers_has_no_class_for_is_not_exported():
    cfg = train_decoder.BaseConfig(width=96)  # its norms have 16 groups; in diffusers, 32
    with pytest.raises(UserError, match="diffusers has no class for it"):
        pretrained.their_config(cfg, (D, D), "model.pt")


# The hub


@pytest.mark.parametrize(
    "place, dtype, settings",
    [
        ("", torch.float, {"max_shard_size": "200KB"}),
        ("prior", torch.half, {"variant": "fp16"}),
        ("deep/prior", torch.float, {"max_shard_size": "200KB", "safe_serialization": False}),
    ],
)
def test_a_repository_is_imported_with_its_folders_shards_and_half_precision(
    published, place, dtype, settings, monkeypatch, tmp_path
):
    hub = pytest.importorskip("huggingface_hub")
    remote = tmp_path / "remote"
    copy.deepcopy(published.prior).to(dtype).save_pretrained(remote / place, **settings)
    beside = Path(remote, place or "prior").with_name("prior_scheduler")
    shutil.copytree(published.folder / "prior_scheduler", beside)
    (remote / "other.safetensors").touch()

    def snapshot_download(repository, **patterns):
        assert repository == "me/model"
        names = [str(path.relative_to(remote)) for path in remote.rglob("*.*")]
        wanted = list(hub.utils.filter_repo_objects(names, **patterns))
        assert "other.safetensors" not in wanted
        files = {name: (remote / name).read_bytes() for name in wanted}
        return helpers.write_files(tmp_path / "here", files)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    source = f"me/model/{place}".rstrip("/")
    run(MODULE, "import", source, out=tmp_path, clip=published.spec)
    contents = checkpoint.load(tmp_path / "model.pt")
    expected = checkpoint.load(published.runs / "prior/model.pt")
    assert_close(contents["model"], expected["model"], rtol=0, atol=1e-3)
    assert contents["source"] == source
    assert contents["config"]["x0_bound"] == 0.5


# Imported models in use


@pytest.mark.parametrize("script, model", [("train_prior", "prior"), ("train_decoder", "base")])
def test_an_imported_model_is_evaluated_on_data_that_are_named(published, script, model):
    folder = published.runs / model
    out = run(script, "evaluate", run_dir=folder, expect=1)
    assert out.endswith(f"{folder}: its training data are unknown; give --data\n")


def test_a_fine_tuned_upsampler_keeps_the_imported_last_step_or_says_that_it_is_missing(
    published, tmp_path, capsys
):
    helpers.write_captioned(tmp_path / "images", 12)
    imported = shutil.copytree(published.runs / "upsample", tmp_path / "imported")
    last_step = imported / "last_step.pt"
    settings = dict(
        stage="upsample",
        data=tmp_path / "images",
        init_from=imported / "model.pt",
        run_dir=tmp_path,
        batch_size=2,
        eval_samples=1,
        eval_steps=1,
    )
    for steps in (1, 2):  # the second run resumes, and still finds the last step
        out = run("train_decoder", steps=steps, **settings)
        assert f"the last sampling step uses {last_step}" in out
    unet, _ = upsampler_of(tmp_path / "upsample")
    expected = checkpoint.load(last_step)["model"]
    assert_close(unet.last_step_unet.state_dict(), expected, rtol=0, atol=0)

    last_step.unlink()
    run(MODULE, "import", published.folder / "super_res_first", "--out", tmp_path / "alone")
    for folder in ("upsample", "alone"):
        unet, spec = upsampler_of(tmp_path / folder)
        assert unet.last_step_unet is None
        assert "last_step.pt is missing, " in capsys.readouterr().err
    assert not spec
