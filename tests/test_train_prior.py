"""The prior: its model, compared with other ways to compute it, and the script as users run it."""

import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, SMALL, awake, differences, flags, metrics
from numpy.testing import assert_allclose
from torch.testing import assert_close

import train_prior
from common import amp, checkpoint, config, order, tracker
from common.data import clips, embed, embeddings
from common.models import diffusion

SHORT = {**SMALL, "steps": 8, "max_text_len": 20}
STAR = "a small red star"
run = partial(helpers.run, "train_prior")

# Model


class Inputs(NamedTuple):
    """The arguments of `Prior.forward`."""

    x_t: torch.Tensor
    timestep: torch.Tensor
    condition: dict
    drop: torch.Tensor


def make_prior(**settings):
    torch.manual_seed(0)
    sizes = dict(width=32, depth=3, heads=4, text_encodings=True, max_text_len=6)
    cfg = train_prior.Config(**sizes | settings)
    encoding_width = 12 if cfg.text_encodings else 0
    return awake(train_prior.Prior(cfg, 16, encoding_width))


def make_batch(size):
    return {
        "image_embed": torch.randn(size, 16),
        "text_embed": torch.randn(size, 16),
        "text_enc": torch.randn(size, 6, 12),
        "text_mask": torch.rand(size, 6) < 0.7,
    }


@pytest.fixture
def inputs():
    drop = torch.tensor([True, False, False, True])
    return Inputs(torch.randn(4, 3, 16), torch.randint(1000, (4, 3)), make_batch(4), drop)


@pytest.mark.parametrize("settings", [{}, dict(text_encodings="none", checkpointing=True)])
def test_draws_that_share_a_text_equal_separate_passes_and_cached_ones(settings, inputs):
    prior = make_prior(**settings)
    cache = prior.text_cache(inputs.condition, inputs.drop)
    separate = []
    cached = []
    for k in range(3):
        draw = inputs.x_t[:, [k]], inputs.timestep[:, [k]]
        separate.append(prior(*draw, inputs.condition, inputs.drop))
        cached.append(prior.predict(*draw, *cache))

    def with_gradients(out):
        return [out, *torch.autograd.grad(out.square().mean(), prior.parameters())]

    together = with_gradients(prior(*inputs))
    for outputs in (separate, cached):
        others = with_gradients(torch.cat(outputs, dim=1))
        assert_close(others, together, rtol=1e-3, atol=1e-5)


def test_the_null_branch_drops_the_text_and_nothing_else(inputs):
    prior = make_prior()
    other_text = make_batch(4)
    kept = inputs._replace(drop=torch.zeros(4, dtype=torch.bool))
    dropped = inputs._replace(drop=torch.ones(4, dtype=torch.bool))
    out = prior(*dropped)
    assert torch.equal(prior(*dropped._replace(condition=other_text)), out)
    assert not torch.allclose(prior(*dropped._replace(x_t=inputs.x_t + 1)), out)
    assert not torch.allclose(prior(*kept._replace(condition=other_text)), prior(*kept))


def test_padding_is_no_key(inputs):
    prior = make_prior()
    mask = inputs.condition["text_mask"]
    mask[1, 0] = False  # the first token sees only itself
    out = prior(*inputs)
    inputs.condition["text_enc"][~mask] = 99.0
    assert torch.equal(prior(*inputs), out)


@pytest.mark.parametrize("length", [3, 8])
def test_text_encodings_are_cut_or_padded_and_rows_of_zeros_are_padding(length, inputs):
    encodings = inputs.condition["text_enc"]
    encodings[1, 4:] = 0  # padding
    encodings[2, 0, :11] = 0  # not padding: one number is not zero
    cfg = train_prior.Config(max_text_len=length)
    condition = train_prior.conditioning(inputs.condition, cfg, None)
    expected = F.pad(encodings, (0, 0, 0, 2))[:, :length]
    assert torch.equal(condition["text_enc"], expected)
    assert torch.equal(condition["text_mask"], expected.ne(0).any(-1))


NONE = dict(text_encodings=False)


@pytest.mark.parametrize(
    "settings", [{}, dict(NONE, objective="epsilon", loss_weight="min_snr")]
)
def test_every_parameter_gets_a_gradient_also_in_bf16_and_the_batch_is_not_changed(settings):
    prior = make_prior(**settings)
    batch = make_batch(64)
    before = {name: value.clone() for name, value in batch.items()}
    losses = []
    for precision in ("fp32", "bf16"):
        prior.zero_grad()
        torch.manual_seed(2)
        with amp.autocast(CPU, precision):
            condition = train_prior.conditioning(batch, prior.cfg, None)
            loss = train_prior.diffusion_loss(prior, batch, condition)
        loss.backward()
        assert all(parameter.grad is not None for parameter in prior.parameters())
        losses.append(loss)
    fp32, bf16 = losses
    assert bf16.dtype == torch.float32
    assert bf16 != fp32
    assert_close(bf16, fp32, rtol=0.02, atol=0)
    assert helpers.same(batch, before)


def test_raw_embeddings_get_mean_0_and_deviation_1_inside_and_texts_of_unit_length_are_refused():
    rows = 3 * np.random.default_rng(0).standard_normal((100, 16), np.float32) + 1
    priors = []
    for name, scale, more in (
        ("run", 1, ["--raw_embeddings"]),
        ("tuned", 2, ["--init_from", "run/model.pt"]),
    ):
        embeddings.write_shards(name, scale * rows, scale * rows, [])
        settings = dict(SHORT, steps=1, data=name, run_dir=name)
        run(*more, **settings)
        priors.append(train_prior.load_prior(f"{name}/model.pt", CPU)[0])
    prior, tuned = priors
    _, indices = order.splits(embeddings.Embeddings("run"), prior.cfg)["train"]
    image_embed = torch.from_numpy(rows[indices[np.arange(len(indices))]])
    x0 = prior.standardize(image_embed)
    assert_close(x0.mean(0), torch.zeros(16), rtol=0, atol=1e-5)
    assert_close(x0.std(0), torch.ones(16))
    assert_close(prior.destandardize(x0), image_embed)
    assert torch.equal(tuned.clip_std, prior.clip_std)  # loaded with the weights

    np.save("raw.npy", rows / 1.5)
    np.save("unit.npy", rows / np.linalg.norm(rows, axis=1, keepdims=True))
    words = ("sample", "--run_dir", "run", "--steps", 1, "--text_embeds")
    run(*words, "raw.npy")
    out = run(*words, "unit.npy", expect=1)
    assert "unit.npy: its embeddings have length 1, but those in training have length 12" in out
    assert "embed --raw" in out


@pytest.mark.parametrize("raw", [False, True])
def test_the_length_of_a_text_embedding_counts_only_if_it_is_raw(raw, inputs):
    prior = make_prior(raw_embeddings=raw)
    out = prior(*inputs)
    inputs.condition["text_embed"] *= 5
    assert torch.allclose(prior(*inputs), out, rtol=1e-4, atol=1e-5) != raw


@torch.no_grad()
def test_sampling_with_guidance_equals_a_slow_uncached_loop(inputs):
    prior = make_prior(objective="epsilon")
    condition = inputs.condition

    def noise_fn(x):
        return torch.full_like(x, 0.5)

    # With two steps, DPM-Solver++ is DDIM.
    out = train_prior.sample_embeddings(prior, condition, 2, 2.5, 0.0, noise_fn)
    x = torch.full((4, 16), 0.5)
    for t, after in [(999, 499), (499, None)]:
        timestep = torch.full((4, 1), t)
        null = prior(x[:, None], timestep, condition, torch.full((4,), True))[:, 0]
        text = prior(x[:, None], timestep, condition, torch.full((4,), False))[:, 0]
        noise = null + 2.5 * (text - null)
        x0 = (x - prior.sigma[t] * noise) / prior.alpha[t]
        if t == 999:
            assert x0.abs().max() > 4  # the bound √16 has an effect
        x0 = x0.clamp(-4, 4)
        if after is not None:
            noise = (x - prior.alpha[t] * x0) / prior.sigma[t]
            x = prior.alpha[after] * x0 + prior.sigma[after] * noise
    assert_close(out, F.normalize(x0, dim=-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale, copies", [(0, 1), (1, 1), (2.5, 2)])
@torch.no_grad()
def test_a_text_is_encoded_once_for_all_candidates_and_only_the_copies_that_count(
    scale, copies, inputs
):
    prior = make_prior().eval()
    repeated = {name: x.repeat_interleave(3, 0) for name, x in inputs.condition.items()}
    noise_fn = diffusion.noise_generator(range(12), CPU)
    expected = train_prior.sample_embeddings(prior, repeated, 2, scale, noise_fn=noise_fn)
    rows = []
    prior.transformer.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    noise_fn = diffusion.noise_generator(range(12), CPU)
    sampled = train_prior.sample_embeddings(
        prior, inputs.condition, 2, scale, noise_fn=noise_fn, candidates=3
    )
    assert rows == [copies * 4, copies * 12, copies * 12]  # the text, then two steps
    assert_close(sampled, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_negative_text_is_all_at_guidance_0_and_nothing_at_1(inputs):
    prior = make_prior().eval()
    text = inputs.condition
    negative = {name: x[:1] for name, x in make_batch(1).items()}
    everywhere = {name: x.expand(4, *x.shape[1:]) for name, x in negative.items()}
    sampled = []
    for condition, scale, other in (
        (text, 0, negative),
        (everywhere, 1, None),
        (text, 1, negative),
        (text, 1, None),
    ):
        noise_fn = diffusion.noise_generator(range(4), CPU)
        embeds = train_prior.sample_embeddings(
            prior, condition, 2, scale, noise_fn=noise_fn, negative=other
        )
        sampled.append(embeds)
    assert_close(sampled[0], sampled[1])
    assert torch.equal(sampled[2], sampled[3])
    assert not torch.allclose(sampled[0], sampled[2], atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(timestep_density="logit_normal", objective="flow", loss_weight="cosmap"),
        dict(objective="epsilon", loss_weight="min_snr"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_equals_a_slow_one_and_in_evaluation_has_no_weights(training, settings):
    prior = make_prior(**NONE, noise_draws=3, text_drop=0.4, **settings).train(training)
    cfg = prior.cfg
    batch = make_batch(8)
    torch.manual_seed(5)
    loss = train_prior.diffusion_loss(prior, batch, batch)
    torch.manual_seed(5)
    timestep = diffusion.sample_timesteps(cfg.timestep_density, (8, 3), 1000, CPU)
    e = torch.randn(8, 3, 16)  # the noise ε
    drop = torch.rand(8) < 0.4
    a = prior.alpha[timestep][..., None]
    s = prior.sigma[timestep][..., None]
    x0 = 4 * F.normalize(batch["image_embed"], dim=-1)[:, None]
    target, weight = {
        "x0": (x0, 1),
        "flow": (e - x0, 2 / torch.pi / (1 - 2 * s + 2 * s**2)),
        "epsilon": (e, (5 * (s / a) ** 2).clamp(max=1)),
    }[cfg.objective]
    error = prior(a * x0 + s * e, timestep, batch, drop) - target
    expected = error**2 * (weight if training else 1)
    assert_close(loss, expected.mean())


# Evaluation


def prior_and_splits(folder, **settings):
    settings = {**SMALL, **NONE, "data": str(folder), "eval_timesteps": (4,), **settings}
    prior = make_prior(**settings)
    return prior, order.splits(embeddings.Embeddings(folder), prior.cfg)


def test_evaluation_has_no_dropout_and_no_loss_weights_and_leaves_the_mode_as_it_was(emb):
    prior, splits = prior_and_splits(emb, loss_weight="min_snr", dropout=0.3)
    plain, _ = prior_and_splits(emb)
    plain.eval()
    found = []
    for model in (prior, plain):
        loss = train_prior.mean_loss(model, splits["test"], None)
        found.append((loss, train_prior.sample_metrics(model, splits, "test", None)))
    assert found[0] == found[1]
    assert prior.training
    assert not plain.training


def test_similarities_are_means_over_samples(emb, monkeypatch):
    def sample(prior, condition, steps, guidance_scale):
        assert guidance_scale == 2
        return condition["text_embed"] * (3 - steps)  # copies of the text, or their negatives

    monkeypatch.setattr(train_prior, "sample_embeddings", sample)
    # The chunks have 10 samples; the last one has 5.
    settings = dict(eval_samples=95, eval_timesteps=(2, 4), guidance_scale=2)
    prior, splits = prior_and_splits(emb, **settings)
    dataset, indices = splits["test"]
    batch, _ = dataset.fetch(order.some_of(indices, 95))
    text = batch["text_embed"]
    baseline = F.cosine_similarity(text, batch["image_embed"]).mean().item()
    unrelated = F.cosine_similarity(text, text.roll(-47, 0)).mean().item()
    expected = {"baseline_similarity": baseline}
    for steps, sign in ((2, 1), (4, -1)):
        expected |= {
            f"similarity_with_text@{steps}": sign,
            f"similarity_with_image@{steps}": sign * baseline,
            f"similarity_with_unrelated_text@{steps}": sign * unrelated,
            f"difference_from_baseline@{steps}": sign - baseline,
        }
    found = train_prior.sample_metrics(prior, splits, "test", None)
    assert found == pytest.approx(expected, abs=1e-5)


# Training


def test_a_run_writes_a_complete_folder(finished):
    out = run("evaluate", run_dir=finished, eval_timesteps=2, device="cpu")
    assert "similarity_with_text@2" in out
    assert [saved["step"] for saved in helpers.saved(finished)] == [24, 16, 8]
    assert (finished / "report.html").is_file()
    lines = metrics(finished)
    for name, steps in (
        ("loss", [4, 8, 12, 16, 20, 24]),
        ("val_loss", [12, 24]),
        ("similarity_with_text@4", [12]),
        ("test_similarity_with_text@4", [24]),
    ):
        assert [line["step"] for line in lines if name in line] == steps
    first, last = [line for line in lines if "val_loss" in line]
    assert lines[0]["loss"] < 1.3
    assert last["val_loss"] < first["val_loss"]
    assert last["val_loss"] != last["val_loss_online"]


def test_a_finished_run_started_again_changes_nothing(emb, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    out = run(data=emb, run_dir=folder, **SMALL)
    assert "is finished at step 24" in out
    assert "test_loss" in out
    assert not differences(finished, folder)
    # Load a checkpoint that needs no more steps.
    whole = folder / helpers.saved(folder)[0]["file"]
    run(data=emb, run_dir="loaded", load=whole, **SMALL)
    assert [entry["step"] for entry in helpers.saved("loaded")] == [24]


def test_an_fp16_overflow_is_a_step_that_did_not_happen(emb, monkeypatch):
    settings = SMALL | dict(steps=8, eval_every=0, precision="fp16")
    scale_loss = torch.amp.GradScaler.scale
    losses = []

    def overflowing(scaler, loss):
        losses.append(loss)
        scaled = scale_loss(scaler, loss)
        return scaled * torch.inf if len(losses) == 10 else scaled

    runs = []
    for name in ("usual", "disturbed"):
        run(data=emb, run_dir=name, **settings)
        lines = metrics(name)
        overflows = sum(line.pop("overflows", 0) for line in lines)
        state = checkpoint.load(f"{name}/checkpoints/step_00000008.pt")
        runs.append((lines, overflows, state["training"]["scaler"]["scale"]))
        monkeypatch.setattr(torch.amp.GradScaler, "scale", overflowing)
    (usual, overflows, scale), disturbed = runs
    # An absolute tolerance, too, because some cosines are near zero.
    usual = [pytest.approx(line, rel=1e-3, abs=1e-4) for line in usual]
    assert disturbed == (usual, overflows + 1, scale / 2)


def test_checkpoints_load_from_urls(emb, finished, server):
    _, whole, _ = helpers.saved(finished)
    files = {"/whole.pt": finished / whole["file"], "/model.pt": finished / "model.pt"}
    server.files = {name: path.read_bytes() for name, path in files.items()}

    def train(flag, address):
        """(output, lines of metrics.jsonl) of a run."""
        out = run(data=emb, run_dir=flag, **SMALL, **{flag: server.url + address})
        return out, metrics(flag)

    out, lines = train("load", f"/whole.pt#sha256={whole['sha256']}")
    assert "at step 16 of 24" in out
    from_scratch = metrics(finished)
    assert lines == [line for line in from_scratch if line["step"] > 16]
    _, (line, *_) = train("init_from", "/model.pt")
    assert line["step"] == from_scratch[0]["step"]
    assert line["loss"] < from_scratch[0]["loss"]


def test_a_validation_set_a_split_seed_a_cosine_length_and_no_averaging(emb):
    embeds = np.random.default_rng(1).normal(size=(2, 60, 16))
    embeddings.write_shards("noise", *embeds, [{"caption": ""}] * 60)
    settings = dict(val_data="noise", split_seed=1, ema_decay=0, cosine_steps=10, eval_every=4)
    words = flags(data=emb, run_dir="run", **SMALL | settings)
    run(*words)
    lines = metrics("run")
    assert [line["lr"] == 0 for line in lines if "loss" in line] == [False] * 2 + [True] * 4
    validations = [line for line in lines if "val_loss" in line]
    losses = [line["val_loss"] for line in validations]
    assert losses == [line["val_loss_online"] for line in validations]
    best = checkpoint.load("run/best.pt")
    assert best["step"] == 4 + 4 * int(np.argmin(losses))

    baseline = F.cosine_similarity(*torch.from_numpy(embeds)).mean()
    assert validations[0]["baseline_similarity"] == pytest.approx(baseline.item(), rel=1e-4)
    out = run(*words, "--split_seed", 2, "--steps", 28, expect=1)
    assert "split_seed is 1 there and 2 here" in out


def test_guidance_is_refused_for_a_model_that_never_trained_without_text(emb):
    run(data=emb, run_dir="run", **SMALL | {"steps": 1, "text_drop": 0})
    for words in (["evaluate", "--guidance_scale", 2], ["sample"]):
        out = run(*words, "--run_dir", "run", expect=1)
        assert "is trained with --text_drop 0" in out


@pytest.mark.parametrize(
    "words, status, message",
    [
        ("--loss_weight cosmap", 2, "needs --objective flow"),
        ("--objective flow --noise_schedule linear", 2, "--noise_schedule"),
        ("--lora_rank 4", 2, "adapters need a model: give --init_from"),
        ("--heads 5", 2, "--width 192: expected a multiple of 2 and --heads 5"),
        ("--width 9", 2, "--width 9: expected a multiple of 2 and --heads 3"),
        ("--eval_timesteps 1,2000", 2, "2000 sampling steps"),
        ("--guidance_scale 2 --text_drop 0", 2, "is trained with --text_drop 0"),
        ("sample --text x --texts y", 2, "--texts has no effect with --text"),
        ("sample --texts x --text_embeds y", 2, "--text_embeds has no effect with --texts"),
        ("sample --text_embeds y --clip z", 2, "--clip has no effect without a text"),
        ("sample --best_of 3", 2, "--best_of has no effect without a text"),
        ("sample --text_embeds y --negative_text z", 2, "--negative_text has no effect without"),
        ("sample --run_dir used --text_embeds narrow/text_emb/text_emb_0.npy", 1, "of width 8"),
        ("sample --run_dir used --text_embeds none.npy", 1, "0 rows of width 16"),
        ("sample --run_dir used --steps 1001", 1, "1001 sampling steps: expected 1 to"),
        ("sample --run_dir used --text x --steps 1000", 1, "name it with --clip"),
        ("evaluate --run_dir used --data narrow", 1, "[8, 0]; those of the model are [16, 0]"),
        ("--data emb --run_dir used", 1, "width is 32 there"),
        ("--data emb --val_data narrow", 1, "narrow: widths of embeddings"),
        ("--data emb --text_source clip", 1, "name it with --clip"),
    ],
)
def test_a_mistake_ends_in_one_line_and_a_status(words, status, message, emb, finished):
    embeddings.write_shards("narrow", np.ones((9, 8)), np.ones((9, 8)), [{}] * 9)
    np.save("none.npy", np.ones((0, 16), np.float32))
    Path("emb").symlink_to(emb)
    Path("used").symlink_to(finished)
    assert message in helpers.mistake("train_prior", *words.split(), status=status)


# Texts that a CLIP encodes


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with two CLIPs, embeddings, and a run.

    clip/ is trained briefly, and other/ for one step with another seed. emb/ has shapes embedded
    by clip/, and run/ is trained on emb/ as if it were the built-in data.
    """
    folder = tmp_path_factory.mktemp("world")
    sizes = dict(steps=30, batch_size=64, embed_width=16, text_width=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed, "BUILTIN_ROWS", 600)
        run_dir = str(folder / "clip")
        embed.train(embed.Config(run_dir=run_dir, **sizes), CPU)
        other = {**sizes, "steps": 1, "seed": 1}
        embed.train(embed.Config(run_dir=str(folder / "other"), **other), CPU)
        out = str(folder / "emb")
        embed.embed_all(embed.EmbedConfig(run_dir=run_dir, out=out, encodings=True), CPU)
        note = config.read_json(f"{out}/clip.json")
        checkpoint.write_json({**note, "made_from": "shapes"}, f"{out}/clip.json")
        patch.setattr(embed, "builtin_data", lambda *_: out)
        run(run_dir=folder / "run", **SHORT)
    return folder


def sample(folder, **settings):
    """(output, embeddings (N, 16)) of the sample command."""
    out = run("sample", run_dir=folder, steps=3, device="cpu", out="out.npy", **settings)
    return out, np.load("out.npy")


def embed_texts(world, texts):
    model = clips.load(world / "clip", CPU)
    return model.embed_text(model.tokenizer(texts))[0]


@pytest.mark.parametrize("source", ["clip", "shards"])
def test_the_samples_kept_are_the_most_similar_to_the_text(source, world):
    settings = dict(text_encodings="true", text_source=source, objective="v", **SHORT)
    run(data=world / "emb", run_dir="run", **settings)
    _, candidates = sample("run", text=STAR, num_samples=6, best_of=1)
    cosines = candidates @ F.normalize(embed_texts(world, [STAR])[0], dim=0).numpy()
    _, best = sample("run", text=STAR, num_samples=2, best_of=3)
    kept = [cosines[:3].argmax(), 3 + cosines[3:].argmax()]
    assert_allclose(best, candidates[kept], atol=1e-5)
    assert np.abs(best[0] - best[1]).max() > 1e-3


def test_samples_of_texts_do_not_depend_on_the_batch_and_equal_those_of_their_embeddings(
    world, monkeypatch
):
    texts = [STAR, "something blue"]
    Path("texts").write_text(f"{texts[0]}\n\n{texts[1]}\n")
    np.save("texts.npy", embed_texts(world, texts))
    _, first = sample(world / "run", text=STAR, num_samples=2)
    _, of_texts = sample(world / "run", texts="texts", num_samples=2, max_batch=3)
    monkeypatch.setattr(clips, "load", None)  # no CLIP is needed
    _, of_embeddings = sample(world / "run", text_embeds="texts.npy", num_samples=2)
    assert of_texts.shape == (4, 16)
    assert_allclose(of_texts[:2], first, atol=1e-5)
    assert_allclose(of_embeddings, of_texts, atol=1e-5)


def test_a_sample_does_not_wait_for_other_ranks_where_a_cluster_names_some(world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    _, samples = sample(world / "run", num_samples=2)
    assert samples.shape == (2, 16)


def test_samples_without_a_text_are_those_of_the_clips_encoding_of_an_empty_text(world):
    folder = world / "run"
    np.save("empty.npy", embed_texts(world, [""]))
    _, samples = sample(folder)
    for settings in (dict(text_embeds="empty.npy"), dict(text=STAR, guidance_scale=0)):
        _, others = sample(folder, best_of=1, **settings)
        assert_allclose(others, samples, atol=1e-5)
    _, of_text = sample(folder, text=STAR)
    _, guided = sample(folder, text=STAR, guidance_scale=3)
    for others in (samples, guided):
        assert np.abs(of_text - others).max() > 1e-3
    out, _ = sample(folder, text=20 * "red ")
    assert "1 are longer than 18 tokens and will be cut" in out


def test_a_negative_text_takes_the_place_of_no_text(world):
    settings = dict(text=STAR, guidance_scale=3, best_of=1)
    _, guided = sample(world / "run", **settings)
    _, by_empty = sample(world / "run", **settings, negative_text="")
    assert np.array_equal(guided, by_empty)
    _, away = sample(world / "run", **settings, negative_text="something blue")
    assert np.abs(guided - away).max() > 1e-3
    # Guidance away from the text itself has no effect.
    _, by_itself = sample(world / "run", **settings, negative_text=STAR)
    _, not_guided = sample(world / "run", **settings | {"guidance_scale": 1})
    assert_allclose(by_itself, not_guided, atol=1e-5)
    out = run("sample", run_dir=world / "run", text=STAR, negative_text="x", expect=1)
    assert "--negative_text needs guidance; give a --guidance_scale above 1" in out


def evaluated(words):
    """{metric: value} of the evaluate command, before rounding and printing."""
    found = {}
    train_prior.tracker.print_results = lambda headline, results: found.update(results)
    train_prior.dist.setup = torch.device  # the process group already exists
    run("evaluate", *words)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluate_gives_the_metrics_of_the_end_of_training(ranks, world, on_ranks):
    settings = dict(eval_timesteps=4, eval_samples=100, device="cpu")
    words = flags(run_dir=world / "run", **settings)
    last = metrics(world / "run")[-1]
    for found in on_ranks(ranks, evaluated, words):
        assert {"caption_match@4", "coverage@4", "coverage_ceiling"} < found.keys()
        expected = {name: last[f"test_{name}"] for name in found}
        assert found == pytest.approx(expected, rel=1e-4)
    assert run("evaluate", *words, ranks=ranks).count("similarity_with_text@4") == 1


def test_another_clip_of_the_same_width_is_refused(world):
    shutil.copytree(world / "emb", "emb")
    Path("emb/clip.json").unlink()
    words = flags(data="emb", run_dir="run", **SHORT)
    out = run(*words, "--clip", world / "other", expect=1)
    assert "emb: its embeddings are from another CLIP" in out
    for path in Path("emb/captions").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"caption"', b'"prompt"'))
    run(*words, "--clip", world / "clip")  # this model needs no captions


def test_the_built_in_data_are_not_scored_with_another_validation_set(world):
    prior, splits = prior_and_splits(world / "emb", eval_samples=20)
    assert "coverage@4" in train_prior.sample_metrics(prior, splits, "test", None)
    splits["validation"] = embeddings.Embeddings(world / "emb"), splits["validation"][1]
    assert "coverage@4" not in train_prior.sample_metrics(prior, splits, "test", None)


def test_a_logger_gets_the_config_of_every_start(emb, monkeypatch):
    steps = []

    class Kept(tracker.Logger):
        def file(self, path):
            steps.append(config.read_json(path)["steps"])

    monkeypatch.setitem(tracker.LOGGERS, "kept", Kept)
    for count in (1, 2):
        run(data=emb, run_dir="run", **SMALL | dict(steps=count, logger="kept"))
    assert steps == [1, 2]


def test_captions_that_are_all_damaged_are_told_before_the_run_begins(world):
    shutil.copytree(world / "emb", "emb")
    captions = Path("emb/captions/captions_0.jsonl")
    captions.write_text(captions.read_text().replace('"caption"', '"prompt"'))
    told = helpers.mistake("train_prior", data="emb", run_dir="run", text_source="clip", **SHORT)
    assert "captions_0.jsonl: expected a 'caption' for each row" in told
    assert not Path("run/config.json").exists()


def test_a_run_on_captions_needs_no_text_embeddings_and_resumes_with_its_clip_alone(
    world,
):
    shutil.copytree(world / "emb", "emb")
    shutil.copytree(world / "clip", "clip")
    about = config.read_json("emb/clip.json")
    del about["made_from"]  # like users' data, whose captions have no attributes
    checkpoint.write_json(about, "emb/clip.json")
    captions = Path("emb/captions/captions_0.jsonl")
    _, *rows = captions.read_text().splitlines()
    captions.write_text("\n".join(["{}", *rows]) + "\n")  # makes the first sample unusable
    words = flags(clip="clip", run_dir="run", text_encodings="true", text_source="clip", **SHORT)
    run(*words, "--data", "emb", "--steps", 4)
    shutil.move("emb", "moved")
    shutil.rmtree("moved/text_emb")
    assert "at step 4 of 8" in run(*words, "--data", "moved")
    Path("clip/model.pt").write_bytes((world / "other/model.pt").read_bytes())
    out = run(*words, "--data", "moved", "--steps", 12, expect=1)
    assert "not the CLIP that made the embeddings, or it was retrained since" in out


def test_a_prior_goes_between_captions_and_precomputed_encodings_of_the_same_shape(world):
    settings = dict(data=world / "emb", text_encodings="true", **SHORT | dict(steps=2))
    for first, second in (("clip", "shards"), ("shards", "clip")):
        folder = f"from_{first}"
        run(run_dir=folder, text_source=first, **settings)
        out = run(run_dir=folder, text_source=second, **settings | dict(steps=4))
        assert f"text_source changed from {first} to {second}" in out
        assert "is finished at step 4" in out
        tuned = dict(run_dir=f"tuned_{second}", text_source=second, init_from=f"{folder}/model.pt")
        run(**tuned, **settings)


def test_what_the_user_gave_is_held_against_the_file_and_a_preset_is_not(emb, monkeypatch):
    settings = SMALL | dict(steps=2, eval_every=0, save_every=0)
    run(data=emb, run_dir="raw", raw_embeddings="true", objective="v", **settings)
    sizes = {name: settings.pop(name) for name in ("width", "depth", "heads")}
    start = dict(data=emb, init_from="raw/model.pt", **settings)
    for name, given in (("objective", "x0"), ("raw_embeddings", "false"), ("width", 96)):
        told = helpers.mistake("train_prior", run_dir="new", **start, **{name: given})
        assert f"--{name}" in told and "raw/model.pt has" in told and "leave it out" in told
    other = dict(width=64, heads=2, raw_embeddings=False)
    monkeypatch.setitem(train_prior.PRESETS, "other", other)
    run(run_dir="new", preset="other", **start)
    _, contents = train_prior.load_prior("new/model.pt", CPU)
    found = contents["config"]
    assert (found["objective"], found["raw_embeddings"], found["width"]) == ("v", True, 32)
    assert sizes["width"] == 32
