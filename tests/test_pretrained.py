"""Published weights: with random ones of small sizes, ours computes what diffusers and peft do."""

import shutil

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import flags, run

import train_decoder
import train_prior
from common import checkpoint, clip, config, data, diffusion, pretrained
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
        cfg = clip.Config(run_dir=str(root / "clip"), embed_width=D, text_width=D, context=L)
        torch.manual_seed(0)
        self.clip = clip.CLIP(cfg, vocabulary).eval()
        for parameter in self.clip.parameters():  # a CLIP that tells texts apart
            parameter.data += torch.randn_like(parameter) * 0.1
        state = {"model": self.clip.state_dict(), "config": config.as_json(cfg)}
        checkpoint.save({**state, "vocabulary": vocabulary}, root / "clip/model.pt")
        self.spec = str(root / "clip")
        words = flags(out=self.runs, clip=self.spec)
        run("common.pretrained", "import", self.folder, *words)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("published"))


def load(path):
    """Our model of a file."""
    kind = checkpoint.load(path)["kind"]
    load = train_prior.load_prior if kind == "prior" else train_decoder.load_unet
    model, _ = load(path, "cpu")
    return model


def ours(published, stage):
    return load(published.runs / stage / "model.pt")


def export(run_dir, out):
    run("common.pretrained", "export", *flags(run_dir=run_dir, out=out))


def assert_equal(model, other):
    """All weights are equal."""
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def condition_of(published, length=L):
    """Our condition of ragged texts, of `length` tokens."""
    texts = ["a red car", "a star", "red red red a car star star"]
    return published.clip.text_condition(texts, length)


def guided_condition(published, condition):
    """That of as many empty texts, and `condition`, in one batch, as diffusers has them."""
    null = published.clip.text_condition([""] * 3, condition["text_mask"].shape[1])
    return {name: torch.cat([null[name], value]) for name, value in condition.items()}


def guided(out, scale):
    unconditional, conditional = out.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def exact_scheduler(**settings):
    """diffusers' scheduler with tables in float64: its own are off by 1e-3 in the last step."""
    scheduler = diffusers.UnCLIPScheduler(**settings)
    scheduler.betas = diffusion.noise_betas("cosine", 1000)
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    return scheduler


def noise_fn(x):
    return torch.randn(x.shape)


def scheduled(scheduler, steps, x, predict):
    """diffusers' sampling loop: `predict(x, t)`."""
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    for t, t_next in zip(timesteps, [*timesteps[1:], None]):
        x = scheduler.step(predict(x, t), t, x, prev_timestep=t_next).prev_sample
    return x


# The prior


def theirs_prior(prior, x_t, timestep, condition):
    embedding, encodings, mask = condition.values()
    names = {"attention_mask": mask, "encoder_hidden_states": encodings}
    return prior(x_t, timestep, proj_embedding=embedding, **names).predicted_image_embedding


@torch.no_grad()
def test_the_prior_samples_as_karlos_pipeline_does(published):
    prior = ours(published, "prior")
    cfg = prior.cfg
    assert (cfg.guidance_scale, cfg.eval_timesteps) == (4.0, (25,))
    condition = condition_of(published)
    both = guided_condition(published, condition)

    def predict(x, t):
        out = theirs_prior(published.prior, torch.cat([x, x]), t, both)
        return guided(out, 4.0)

    scheduler = exact_scheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0
    )
    torch.manual_seed(0)
    expected = scheduled(scheduler, 25, torch.randn(3, D), predict)
    torch.manual_seed(0)
    got = train_prior.sample_embeddings(prior, condition, 25, 4.0, cfg.eta, noise_fn)
    expected = published.prior.post_process_latents(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


# The decoder and its upsampler


def theirs_decoder(published, unet, x_t, timestep, condition, image_embed, guided=False):
    encodings, embedding = published.text_proj(
        image_embeddings=image_embed,
        prompt_embeds=condition["text_embed"],
        text_encoder_hidden_states=condition["text_enc"],
        do_classifier_free_guidance=guided,
    )
    mask = F.pad(condition["text_mask"], (4, 0), value=True)
    return unet(x_t, timestep, encodings, class_labels=embedding, attention_mask=mask).sample


@torch.no_grad()
def test_the_decoder_samples_as_karlos_pipeline_does(published):
    unet = ours(published, "base")
    cfg = unet.cfg
    assert (cfg.guidance_scale, cfg.eval_steps, cfg.eta) == (8.0, 25, 1.0)
    condition = condition_of(published, cfg.max_text_len)
    both = guided_condition(published, condition)
    image_embed = torch.randn(3, D) * 3

    def predict(x, t):
        x = torch.cat([x, x])
        out = theirs_decoder(published, published.decoder, x, t, both, image_embed, guided=True)
        return torch.cat([guided(out[:, :3], 8.0), out[3:, 3:]], dim=1)

    scheduler = exact_scheduler(variance_type="learned_range")
    torch.manual_seed(0)
    expected = scheduled(scheduler, 5, torch.randn(3, 3, 8, 8), predict).clamp(-1, 1)
    condition["image_embed"] = image_embed
    torch.manual_seed(0)
    got = train_decoder.sample_images(unet, condition, 3, 5, 8.0, cfg.eta, noise_fn)
    assert got.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_upsampler_samples_as_karlos_pipeline_does_with_its_second_unet_in_the_last_step(
    published,
):
    args = train_decoder.SampleConfig(run_dir=(str(published.runs / "upsample"),))
    [unet], _, _ = train_decoder.load_cascade(args, "cpu")
    assert (unet.cfg.eval_steps, unet.cfg.eta) == (7, 1.0)
    low_res = torch.rand(1, 3, 8, 8) * 2 - 1
    large = F.interpolate(low_res, size=(32, 32), mode="bicubic", antialias=True)

    def predict(x, t):
        model = published.super_res_first if t else published.super_res_last
        return model(torch.cat([x, large], dim=1), t).sample

    torch.manual_seed(0)
    noise_fn(large)  # for the low resolution, which takes none
    expected = scheduled(exact_scheduler(), 3, noise_fn(large), predict)
    torch.manual_seed(0)
    got = train_decoder.sample_images(unet, {}, 1, 3, eta=1.0, noise_fn=noise_fn, low_res=low_res)
    torch.testing.assert_close(got, expected.clamp(-1, 1), rtol=0, atol=1e-4)


# There and back


@pytest.mark.parametrize(
    "stage, part, folder",
    [
        ("prior", "prior", ""),
        ("upsample", "super_res_first", ""),
        ("base", "decoder", "decoder"),
        ("base", "text_proj", "text_proj"),
    ],
)
def test_what_is_exported_is_what_diffusers_loads_and_has_the_weights_that_were_imported(
    published, stage, part, folder, tmp_path
):
    export(published.runs / stage, tmp_path)
    before = getattr(published, part)
    after = type(before).from_pretrained(tmp_path / folder)
    assert_equal(after, before)
    for name, value in before.config.items():
        value = list(value) if isinstance(value, tuple) else value
        assert name.startswith("_") or after.config[name] == value, name


SHORT = dict(batch_size=4, warmup_steps=1, log_every=1, cosine_steps=4, eval_samples=2)


def write_raw_shards(folder, published):
    """Shards of embeddings that are not of unit length, with captions; returns flags for them."""
    images = np.random.default_rng(0).standard_normal((64, D)).astype(np.float32) * 3
    records = [{"caption": f"a red star {i}"} for i in range(64)]
    data.write_shards(folder, images, images, records)
    checkpoint.write_json({"clip": published.spec}, folder / "clip.json")
    return dict(SHORT, data=folder)


def write_pictures(folder):
    """Captioned pictures; returns flags for a few steps on them."""
    helpers.write_captioned(folder, 40)
    return dict(SHORT, data=folder, eval_steps=2)


def adapted(kind, base, adapters):
    """diffusers' model of a folder with adapters, by peft."""
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(kind.from_pretrained(base), adapters).eval()


@torch.no_grad()
@pytest.mark.parametrize("lora_rank, lr", [(0, 1e-3), (2, 0.05)])
def test_an_imported_prior_is_trained_resumed_and_exported(published, lora_rank, lr, tmp_path):
    words = flags(
        **write_raw_shards(tmp_path / "raw", published),
        init_from=published.runs / "prior/model.pt",
        run_dir=tmp_path / "run",
        lora_rank=lora_rank,
        lr=lr,
    )
    with torch.enable_grad():
        run("train_prior", *words, "--steps", 2)
        assert "resuming" in run("train_prior", *words, "--steps", 3)
    prior, state = train_prior.load_prior(tmp_path / "run/model.pt", "cpu")
    assert state["step"] == 3 and prior.cfg.raw_embeddings and prior.cfg.width == 64
    export(tmp_path / "run", tmp_path / "out")
    if lora_rank:
        theirs = adapted(diffusers.PriorTransformer, published.folder / "prior", tmp_path / "out")
    else:
        theirs = diffusers.PriorTransformer.from_pretrained(tmp_path / "out").eval()
    condition = condition_of(published)
    x_t = torch.randn(3, D)
    timestep = torch.tensor([5, 500, 999])
    drop = torch.zeros(3, dtype=torch.bool)
    got = prior(x_t[:, None], timestep[:, None], condition, drop)[:, 0]
    expected = theirs_prior(theirs, x_t, timestep, condition)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got - theirs_prior(published.prior, x_t, timestep, condition)).abs().max() > 1e-3


def train_stage(published, stage, folder, **settings):
    """Train an imported stage of the decoder for a few steps in FOLDER/run/STAGE."""
    words = flags(
        **write_pictures(folder / "pictures"),
        run_dir=folder / "run",
        stage=stage,
        init_from=published.runs / stage / "model.pt",
        **settings,
    )
    run("train_decoder", *words)
    return load(folder / "run" / stage / "model.pt")


@pytest.mark.parametrize("stage", ["base", "upsample"])
def test_all_weights_of_an_imported_decoder_are_trained_but_those_of_no_text(
    published, stage, tmp_path
):
    unet = train_stage(published, stage, tmp_path, steps=1)
    assert (unet.cfg.optimizer, unet.cfg.lr) == ("adamw", 1e-5)
    before = ours(published, stage).state_dict()
    for name, value in unet.state_dict().items():
        assert torch.equal(value, before[name]) == ("null_text" in name), name


@torch.no_grad()
def test_adapters_of_an_imported_decoder_are_loaded_by_peft(published, tmp_path):
    with torch.enable_grad():
        unet = train_stage(published, "base", tmp_path, lora_rank=2, lr=0.05, steps=3)
    export(tmp_path / "run/base", tmp_path / "out")
    folder = published.folder / "decoder"
    adapted_unet = adapted(diffusers.UNet2DConditionModel, folder, tmp_path / "out")
    condition = condition_of(published, unet.cfg.max_text_len)
    image_embed = torch.randn(3, D) * 3
    inputs = torch.randn(3, 3, 8, 8), torch.tensor([0, 500, 999])
    before, expected = [
        theirs_decoder(published, theirs, *inputs, condition, image_embed)
        for theirs in (published.decoder, adapted_unet)
    ]
    drop = torch.zeros(3, dtype=torch.bool)
    got = unet(*inputs, {**condition, "image_embed": image_embed}, drop, drop)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got - before).abs().max() > 1e-3


def test_evaluation_of_an_imported_model_wants_data_and_takes_its_own_settings(
    published, tmp_path
):
    folder = write_raw_shards(tmp_path / "raw", published)["data"]
    words = ("train_prior", "evaluate", "--run_dir", published.runs / "prior")
    assert "similarity_with_text@25" in run(*words, "--data", folder)
    assert "name some with --data" in run(*words, expect=1)
    words = ("train_decoder", "evaluate", "--run_dir", published.runs / "base")
    assert "name some with --data" in run(*words, expect=1)




# The published sizes


def model_of(preset, width):
    """The model of a preset, without memory, and the number of its published parameters."""
    kind = "prior" if preset in train_prior.PRESETS else "decoder"
    script, model_class = pretrained.MODELS[kind]
    with torch.device("meta"):
        model = model_class(script.Config(**script.PRESETS[preset]), width, width)
    weights = model.state_dict().items()
    return model, sum(value.numel() for name, value in weights if "null_text" not in name)


@pytest.mark.parametrize(
    "preset, width, count",
    [
        ("karlo", 768, 1_022_030_080),
        ("kandinsky-2-2", 1280, 1_026_225_920),
        ("karlo-64", 768, 893_318_086),
        ("karlo-256", 0, 691_579_523),
    ],
)
def test_models_of_the_published_sizes_have_the_published_number_of_parameters(
    preset, width, count
):
    model, found = model_of(preset, width)
    assert found == count
    names = pretrained.published_names(model)
    assert names.keys() == {name for name in model.state_dict() if "null_text" not in name}
    theirs = [name for joined in names.values() for name in joined]
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize(
    "preset, width, published, low, high",
    [
        ("dalle2", 768, 1.0e9, 1.15, 1.30),  # the paper's billion is without embedding layers
        ("dalle2-64", 768, 3.5e9, 0.6, 0.75),  # which counts its text transformer, 24 deep
        ("dalle2-256", 0, 700e6, 0.95, 1.05),
        ("dalle2-1024", 0, 300e6, 0.9, 1.1),
    ],
)
def test_presets_of_dalle2_have_about_the_sizes_of_its_table(preset, width, published, low, high):
    _, count = model_of(preset, width)
    assert low < count / published < high


# Mistakes


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norm_in_type": "layer"}, "norm_in_type is 'layer'"),
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"num_layers": 4}, "transformer_blocks.3.norm1.weight is missing"),
        ({"num_layers": 2}, "weights are unknown: transformer_blocks.2"),
        ({"num_embeddings": 9}, r"positional_embedding is \(1, 28, 64\); expected \(13, 64\)"),
    ],
)
def test_a_folder_of_another_form_is_refused(published, change, message, tmp_path):
    folder = shutil.copytree(published.folder / "prior", tmp_path / "prior")
    about = config.read_json(folder / "config.json")
    checkpoint.write_json({**about, **change}, folder / "config.json")
    with pytest.raises(UserError, match=message):
        pretrained.import_folder(folder, tmp_path / "out/model.pt", published.spec)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "source, out, message",
    [
        ("pipeline/prior", "runs/prior", "is there already"),
        ("clip", "out", "neither config.json nor one of the folders"),
        ("runs", "out", "expected config.json and diffusion_pytorch_model"),
        ("nothing", "out", "no such folder"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(published, source, out, message, monkeypatch):
    monkeypatch.chdir(published.folder.parent)
    words = flags(out=out, clip=published.spec)
    assert message in run("common.pretrained", "import", source, *words, expect=1)


@pytest.mark.parametrize(
    "change, widths",
    [
        (dict(width=96), (D, D)),
        (dict(head_dim=48), (D, D)),
        ({}, (D, 0)),
    ],
)
def test_what_diffusers_has_no_class_for_is_not_exported(change, widths):
    form = dict(width=128, channel_mult=(1, 2), attention_levels=(1,), head_dim=64)
    assert pretrained.about_unet(train_decoder.Config(**form), (D, D), "model.pt")
    cfg = train_decoder.Config(**{**form, **change})
    with pytest.raises(UserError, match="diffusers has no class for it"):
        pretrained.about_unet(cfg, widths, "model.pt")


def test_of_a_repository_the_folders_asked_for_are_fetched_once(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    files = ["prior/model.bin", "prior/model.safetensors", "text_encoder/model.bin"]
    monkeypatch.setattr(hub, "list_repo_files", lambda repository: files)
    calls = []

    def snapshot_download(repository, allow_patterns, ignore_patterns):
        assert repository == "someone/model" and ignore_patterns == ["*.fp16.*", "prior/model.bin"]
        calls.append(allow_patterns)
        return tmp_path

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert pretrained.fetch("someone/model/prior") == tmp_path / "prior"
    assert pretrained.fetch("someone/model") == tmp_path
    assert calls[0] == ["prior/*", "text_proj/*"]
    assert {"prior/*", "decoder/*", "super_res_last/*", "text_proj/*"} < set(calls[1])


def test_a_model_of_raw_embeddings_refuses_unit_ones_and_another_width(published, tmp_path):
    images = np.eye(D, dtype=np.float32)
    data.write_shards(tmp_path, images, images, [{"caption": "a star"}] * D)
    words = flags(data=tmp_path, clip=published.spec, init_from=published.runs / "prior/model.pt")
    words += flags(run_dir=tmp_path / "run", batch_size=16)
    assert "of unit length" in run("train_prior", *words, expect=1)
    assert "model.pt is a model of 64" in run("train_prior", *words, "--width=192", expect=2)
