"""The prior: its model against itself computed another way, and the script as a user runs it."""
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SMALL,
    Forked,
    check_loading,
    differences,
    flags,
    kill_all,
    metrics,
    records_of,
    tensors,
    wait_for,
)
from servers import needs

import train_prior
from common import accumulate, amp, checkpoint, clip, data, diffusion, dist, synthetic


def start(*words, ranks=0):
    return helpers.start("train_prior", *words, ranks=ranks)


def run(*words, ranks=0, expect=0):
    return helpers.run("train_prior", *words, ranks=ranks, expect=expect)


@pytest.fixture(scope="session")
def finished(emb, tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    process = start(*flags(data=emb, run=folder, **SMALL))
    out, err = process.communicate()
    assert process.returncode == 0 and "To sample: python train_prior.py" in out, out + err
    return folder


# The model


def make(**settings):
    torch.manual_seed(0)
    small = dict(width=32, depth=3, heads=4, text_encodings="shards", max_text_len=6)
    cfg = train_prior.Config(**{**small, **settings})
    prior = train_prior.Prior(cfg, 16, 12)
    for name, parameter in prior.named_parameters():
        if "out.weight" in name or "down.weight" in name:  # these start at zero, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.1)
    return prior


def inputs(draws=3, batch=4):
    g = torch.Generator().manual_seed(1)
    condition = {"text_embed": torch.randn(batch, 16, generator=g), "text_enc": torch.randn(batch, 6, 12, generator=g),
                 "text_mask": torch.rand(batch, 6, generator=g) < 0.7}
    return (torch.randn(batch, draws, 16, generator=g), torch.randint(1000, (batch, draws), generator=g),
            torch.randn(batch, draws, 16, generator=g), condition, torch.tensor([True, False, False, True])[:batch])


VARIANTS = [dict(), dict(kv_heads=1, rotary=False, time_embedding="table"), dict(self_condition=True, time_tokens=2),
            dict(qk_norm=True, normformer=True, image_tokens=2, text_tokens=3), dict(text_encodings="none", kv_heads=2)]


@pytest.mark.parametrize("settings", VARIANTS)
def test_shared_text_equals_separate_passes_and_the_cached_sampling_pass(settings):
    prior = make(**settings).eval()
    x_t, t, estimate, condition, drop = inputs()
    together = prior(x_t, t, estimate, condition, drop)
    separate = [prior(x_t[:, [k]], t[:, [k]], estimate[:, [k]], condition, drop) for k in range(3)]
    torch.testing.assert_close(together, torch.cat(separate, 1), rtol=1e-4, atol=1e-5)
    memory = prior.remember(condition, drop)
    cached = [prior.denoise(x_t[:, k], t[:, k], estimate[:, k], memory) for k in range(3)]
    torch.testing.assert_close(together, torch.stack(cached, 1), rtol=1e-4, atol=1e-5)
    assert together.std() > 0.1


def test_gradients_of_shared_text_equal_those_of_separate_passes():
    grads = []
    for separate in (False, True):
        prior = make(time_embedding="table").double()
        x_t, t, estimate, condition, drop = inputs()
        condition = {k: v.double() if v.is_floating_point() else v for k, v in condition.items()}
        x_t, estimate = x_t.double(), estimate.double()
        parts = [slice(k, k + 1) for k in range(3)] if separate else [slice(None)]
        sum(prior(x_t[:, p], t[:, p], estimate[:, p], condition, drop).square().sum() for p in parts).backward()
        grads.append([p.grad for p in prior.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # rotary angles are in fp32


def test_the_null_branch_drops_the_text_and_nothing_else():
    prior = make().eval()
    x_t, t, estimate, condition, _ = inputs()
    other = {"text_embed": -condition["text_embed"], "text_enc": condition["text_enc"] + 1,
             "text_mask": ~condition["text_mask"]}
    everyone, no_one = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    assert torch.equal(prior(x_t, t, estimate, condition, everyone), prior(x_t, t, estimate, other, everyone))
    assert not torch.allclose(prior(x_t, t, estimate, condition, no_one), prior(x_t, t, estimate, other, no_one))
    moved = prior(x_t + 1, t, estimate, condition, everyone)
    assert not torch.allclose(prior(x_t, t, estimate, condition, everyone), moved)


def test_padding_tokens_stand_in_for_what_is_masked():
    prior = make().eval()
    x_t, t, estimate, condition, drop = inputs()
    changed = {**condition, "text_enc": torch.where(condition["text_mask"][..., None], condition["text_enc"], 99.0)}
    assert torch.equal(prior(x_t, t, estimate, condition, drop), prior(x_t, t, estimate, changed, drop))


@pytest.mark.parametrize("settings", [*VARIANTS, dict(noise_draws=1),
                                      dict(objective="v", min_snr_gamma=5.0, loss="huber")])
def test_every_parameter_gets_a_gradient_and_inputs_are_left_alone(settings):
    prior = make(**settings)
    _, _, _, condition, _ = inputs()
    batch = {"image_embed": torch.randn(4, 16), "text_embed": condition["text_embed"].clone(),
             "text_enc": condition["text_enc"]}
    before = {k: v.clone() for k, v in batch.items()}
    condition = train_prior.conditioning(batch, prior.cfg, None)
    train_prior.diffusion_loss(prior, prior, batch, condition).backward()
    assert all(p.grad is not None for p in prior.parameters())
    assert all(torch.equal(batch[k], v) for k, v in before.items())
    assert condition["text_embed"].norm(dim=-1).allclose(torch.tensor(4.0))  # √D, the scale of unit noise


def test_embeddings_are_scaled_inside_and_come_out_unit_length_and_unclamped():
    prior = make(text_encodings="none", clamp_final=False).eval()
    _, _, _, condition, _ = inputs()
    condition = {"text_embed": condition["text_embed"]}
    with torch.no_grad():
        prior.out.weight.mul_(20)  # answers far outside ±1, which pixels would be clamped to
    raw = train_prior.sample_embeddings(prior, condition, 3, eta=0.0, noise=lambda x: torch.ones_like(x))
    assert (raw * 4).abs().max() > 1.5
    prior.cfg = dataclasses.replace(prior.cfg, clamp_final=True)
    unit = train_prior.sample_embeddings(prior, condition, 3, eta=0.0, noise=lambda x: torch.ones_like(x))
    torch.testing.assert_close(unit, F.normalize(raw, dim=-1))


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
def test_sampling_with_guidance_equals_a_slow_uncached_loop(objective):
    prior = make(objective=objective, self_condition=True, clamp_sampling=True).eval()
    _, _, _, condition, _ = inputs()
    steps, scale = 4, 2.5
    out = train_prior.sample_embeddings(prior, condition, steps, scale, 0.0, lambda x: torch.full_like(x, 0.5))
    x, estimate = torch.full((4, 16), 0.5), torch.zeros(4, 16)
    with torch.no_grad():
        for t, after in zip([999, 666, 333, 0], [666, 333, 0, None]):
            level, answers = torch.full((4, 1), t), []
            for drop in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
                answers.append(prior(x[:, None], level, estimate[:, None], condition, drop)[:, 0])
            answer = answers[1] + scale * (answers[0] - answers[1])
            a, s = prior.alpha[t], prior.sigma[t]
            estimate = {"x0": answer, "v": a * x - s * answer, "epsilon": (x - s * answer) / a,
                        "flow": x - s * answer}[objective]
            estimate = estimate / estimate.norm(dim=-1, keepdim=True) * 4
            if after is not None:
                x = prior.alpha[after] * estimate + prior.sigma[after] * (x - a * estimate) / s
    torch.testing.assert_close(out, estimate / 4, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [
    dict(objective="v", p2_gamma=0.5, p2_k=2.0, timestep_density="mode", mode_scale=0.8),
    dict(objective="flow", flow_weight="cosmap", timestep_density="logit_normal", density_mean=1.0, density_std=0.5),
    dict(objective="epsilon", dream=True, dream_power=2.0, min_snr_gamma=5.0)])
def test_loss_equals_a_slow_one_over_samples_and_draws(settings):
    cfg = train_prior.Config(**settings)
    prior = make(text_encodings="none", noise_draws=3, text_drop=0.0, **settings).eval()
    batch = {"image_embed": torch.randn(8, 16), "text_embed": torch.randn(8, 16)}
    condition = train_prior.conditioning(batch, prior.cfg, None)
    torch.manual_seed(5)
    loss = train_prior.diffusion_loss(prior, prior, batch, condition)
    torch.manual_seed(5)
    timestep = diffusion.draw_timesteps(cfg.timestep_density, (8, 3), 1000, "cpu", cfg.density_mean, cfg.density_std,
                                        cfg.mode_scale)
    noise, total = torch.randn(8, 3, 16), 0.0
    for i in range(8):
        for k in range(3):
            a, s = prior.alpha[timestep[i, k]], prior.sigma[timestep[i, k]]
            x0, text = 4 * F.normalize(batch["image_embed"][i], dim=0), {"text_embed": condition["text_embed"][i, None]}

            def say(x, i=i, k=k, text=text):
                return prior(x[None, None], timestep[i, k].reshape(1, 1), torch.zeros(1, 1, 16), text,
                             torch.zeros(1, dtype=torch.bool))[0, 0]

            e, ratio = noise[i, k], (a / s) ** 2
            if cfg.objective == "epsilon":
                e = e + s ** 2 * (e - say(a * x0 + s * e))
            wanted, weight = {"v": (a * e - s * x0, ratio * (2 + ratio) ** -0.5 / (ratio + 1)),
                              "flow": (e - x0, 2 / math.pi / (1 - 2 * s + 2 * s ** 2)),
                              "epsilon": (e, ratio.clamp(max=5) / ratio)}[cfg.objective]
            total = total + weight * ((say(a * x0 + s * e) - wanted) ** 2).mean() / 24
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)


def test_bf16_stays_close_to_fp32():
    prior = make()
    batch = {"image_embed": torch.randn(64, 16), "text_embed": torch.randn(64, 16), "text_enc": torch.randn(64, 6, 12)}
    losses = []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(2)
        with amp.autocast(torch.device("cpu"), precision):
            condition = train_prior.conditioning(batch, prior.cfg, None)
            losses.append(train_prior.diffusion_loss(prior, prior, batch, condition))
    assert losses[1].dtype == torch.float32 and losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)


# Evaluation


def test_validation_is_the_mean_over_rows_and_leaves_the_model_as_it_was(emb):
    cfg = train_prior.Config(**{**SMALL, "eval_timesteps": (4,), "eval_samples": 0, "chunk_size": 64, "dropout": 0.3})
    source = data.Embeddings(emb)
    torch.manual_seed(0)
    prior = train_prior.Prior(cfg, 16).train()
    evaluator = train_prior.Evaluator(cfg, source, None, torch.device("cpu"))
    split = data.Split(1500, "validation", cfg.validation, cfg.test)
    assert len(split) % 64  # the last chunk is uneven
    losses = []
    for number, first in enumerate(range(0, len(split), 64)):  # by hand: every row weighs the same
        rows = split[np.arange(first, min(first + 64, len(split)))]
        batch = source.fetch(rows)[0]
        train_prior.accumulate.seed(cfg.seed, "loss", number)
        with torch.no_grad():
            loss = train_prior.diffusion_loss(prior.eval(), prior, batch, train_prior.conditioning(batch, cfg, None))
        losses += [loss.item()] * len(rows)
    prior.train()
    value = evaluator.loss(prior, "validation")
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    evaluator.similarities(prior, "validation")
    assert prior.training and all(p.grad is None for p in prior.parameters())
    assert evaluator.loss(prior.eval(), "validation") == value and not prior.training


def test_cosine_figures_of_a_prior_that_copies_the_text_are_those_of_the_text(emb, monkeypatch):
    cfg = train_prior.Config(**{**SMALL, "eval_timesteps": (2, 4), "eval_samples": 0})
    source = data.Embeddings(emb)
    prior = train_prior.Prior(cfg, 16)
    monkeypatch.setattr(train_prior, "sample_embeddings", lambda prior, condition, *rest: condition["text_embed"])
    figures = train_prior.Evaluator(cfg, source, None, torch.device("cpu")).similarities(prior, "test")
    batch = source.fetch(data.Split(1500, "test", cfg.validation, cfg.test)[np.arange(150)])[0]
    text, image = batch["text_embed"], batch["image_embed"]
    baseline = F.cosine_similarity(text, image).mean().item()
    unrelated = F.cosine_similarity(text, text.roll(-75, 0)).mean().item()
    for t in (2, 4):
        expected = {"similarity_with_text": 1.0, "similarity_with_image": baseline,
                    "difference_from_baseline": 1 - baseline, "similarity_with_unrelated_text": unrelated}
        for name, value in expected.items():
            assert figures[f"{name}@{t}"] == pytest.approx(value, abs=1e-5), name
    assert figures["baseline_similarity"] == pytest.approx(baseline, abs=1e-5)


def test_scores_of_the_built_in_world_tell_copies_from_noise(tmp_path, monkeypatch):
    """With embeddings that are the attributes themselves, real ones score like the ceiling and random ones do not."""
    _, records = synthetic.shapes(range(10_000), size=8)
    table = [[synthetic.ATTRIBUTES[name].index(value) for name, value in r["attributes"].items()] for r in records]
    sizes = [len(values) for values in synthetic.ATTRIBUTES.values()]
    codes = torch.cat([F.one_hot(column, size) for column, size in zip(torch.tensor(table).T, sizes)], 1).float()
    data.write_shards(tmp_path, codes, codes, records)
    source = data.Embeddings(tmp_path, captions=True)
    cfg = train_prior.Config(eval_captions=64, validation=0.3, test=0.3)
    evaluator = train_prior.Evaluator(cfg, source, None, torch.device("cpu"))
    prior = train_prior.Prior(dataclasses.replace(cfg, width=32, heads=1, depth=1), codes.shape[1])
    monkeypatch.setattr(train_prior, "sample_embeddings", lambda p, condition, *rest: condition["text_embed"])
    copied = evaluator.world.scores(evaluator, prior, "test")
    monkeypatch.setattr(train_prior, "sample_embeddings",
                        lambda p, condition, *rest: torch.rand_like(condition["text_embed"]))
    noise = evaluator.world.scores(evaluator, prior, "test")
    assert copied["caption_match_ceiling"] > 0.9 and noise["caption_match_ceiling"] == copied["caption_match_ceiling"]
    assert copied["caption_match@64"] > 0.9 and noise["caption_match@64"] < 0.4
    assert copied["coverage@64"] < 0.1 and noise["coverage@64"] > 0.6  # copies of one image have no variety
    assert copied["coverage_ceiling"] > 0.8


# The script


def test_bare_run_writes_a_complete_folder_and_says_so_when_started_again(emb, finished):
    for name in ("config.json", "auto_resume.json", "model.pt", "best.pt", "metrics.jsonl"):
        assert (finished / name).is_file(), name
    record = json.loads((finished / "auto_resume.json").read_text())
    assert [c["step"] for c in record["checkpoints"]] == [24, 16, 8] and record["finished"]["step"] == 24
    assert len(list((finished / "checkpoints").iterdir())) == 3
    assert json.loads((finished / "config.json").read_text())["versions"]["torch"] == torch.__version__
    lines = metrics(finished)
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 12, 16, 20, 24]
    assert all(line["samples_seen"] == 48 * line["step"] for line in lines if "loss" in line)
    validations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validations] == [12, 24]
    assert all(line["val_loss"] != line["val_loss_online"] for line in validations)
    before = (finished / "metrics.jsonl").read_bytes()
    assert "is finished, at step 24" in run(*flags(data=emb, run=finished, **SMALL))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_model_file_holds_the_average_and_no_pickled_objects(finished):
    state = checkpoint.load(finished / "model.pt")
    whole = checkpoint.load(finished / "checkpoints/step_00000024.pt")
    assert all(torch.equal(state["model"][name], value) for name, value in whole["ema"].items())
    assert not all(torch.equal(state["model"][name], value) for name, value in whole["model"].items())
    assert state["config"]["width"] == 32 and state["step"] == 24 and not {"optimizers", "ema"} & set(state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(ranks, emb, finished, tmp_path):
    kills, rng = int(os.environ.get("KILLS", 2)), random.Random(ranks)
    steps, running = 8 * kills, 0
    words = flags(data=emb, **{**SMALL, "eval_every": 4, "steps": steps})
    reference = tmp_path / "whole"
    run(*words, *flags(run=reference), ranks=ranks)
    for _ in range(kills):
        process = start(*words, *flags(run=tmp_path / "killed"), ranks=ranks)
        for _ in range(rng.randint(1, 5)):  # wait for so many lines of its output, then a little work more
            process.stdout.readline()
        sum(i * i for i in range(rng.randint(0, 1_000_000)))
        running += process.poll() is None
        kill_all(str(tmp_path / "killed"))
        process.communicate()
    run(*words, *flags(run=tmp_path / "killed"), ranks=ranks)
    assert running > kills / 2 and not differences(reference, tmp_path / "killed")


@pytest.mark.parametrize("logger", [pytest.param(kind, marks=needs(kind)) for kind in ("tensorboard", "wandb")])
def test_killed_and_resumed_under_a_logger_its_curves_have_each_step_once(logger, emb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = flags(data=emb, run=tmp_path, logger=logger, **{**SMALL, "eval_every": 4, "steps": 48})
    for word in ("step 4:", "step 12:"):
        process = Forked("train_prior", *words, ranks=2)
        next((line for line in process.out if word in line), None)
        assert process.kill()
    out = Forked("train_prior", *words, ranks=2).finish()
    lines, (curves, _) = metrics(tmp_path), records_of(tmp_path)
    assert "resuming" in out and json.loads((tmp_path / "auto_resume.json").read_text())["resumed"]
    assert [line["step"] for line in lines if "loss" in line] == [*range(4, 49, 4)]
    for name in ("loss", "lr", "val_loss", "val_loss_online", "test_loss"):
        found = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert curves[name] == found and found, name
    record = json.loads((tmp_path / "auto_resume.json").read_text())["logger"]
    assert record["kind"] == logger and (logger != "wandb" or list(tmp_path.glob(f"wandb/*{record['id']}*")))
    out = run(*flags(data=emb, run=tmp_path, **{**SMALL, "steps": 20}), expect=1)
    assert f"was logged with {logger}, --logger console would tear its curves; go on with --logger {logger}" in out
    assert len(out.strip().splitlines()) == 1


def test_checkpoints_load_from_files_and_urls(emb, finished, server, tmp_path):
    check_loading("train_prior", flags(data=emb, **SMALL), finished, "", server, tmp_path)


@needs("safetensors")
def test_a_run_sends_what_it_saves_and_goes_on_from_it_where_its_own_is_lost(emb, finished, tmp_path):
    words = flags(data=emb, run=tmp_path / "run", load=tmp_path / "there/latest.pt", **SMALL)
    words += ["--load_only_auto_resume", "--metadata", "note=a test, of=3", "--save",
              f"local save_latest_to={tmp_path}/there/latest.pt save_meta_to={tmp_path}/there,"
              f"local kind=model save_best_to={tmp_path}/there/{{run}}.safetensors save_latest_to={tmp_path}/there/"
              "{step:04d}_{epoch}_{samples_seen}.pt,"
              f"local save_best_to={tmp_path}/there/best_{{val_loss:.0f}}.pt"]
    run(*words)  # whose --load is not there yet
    assert not differences(finished, tmp_path / "run")
    found = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert {"0024_0_1152.pt", "best_0.pt", "config.json", "latest.pt", "metadata.json", "run.safetensors"} <= {*found}
    latest, best = (checkpoint.load(tmp_path / "there" / name) for name in ("latest.pt", "best_0.pt"))
    newest = checkpoint.load(tmp_path / "run/checkpoints/step_00000024.pt")
    assert all(a is b or torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
               for a, b in zip(tensors(latest), tensors(newest), strict=True))
    assert latest["metadata"] == {"note": "a test", "of": 3} and "optimizers" in best
    about = json.loads((tmp_path / "there/metadata.json").read_text())
    assert (about["note"], about["step"], about["samples_seen"]) == ("a test", 24, 1152)
    out = run("evaluate", "--run", tmp_path / "there", "--model", "run.safetensors", "--eval_timesteps", "4")
    assert out == run("evaluate", "--run", tmp_path / "run", "--model", "best.pt", "--eval_timesteps", "4")
    assert not (tmp_path / "run/outbox").exists()
    shutil.rmtree(tmp_path / "run/checkpoints")  # a disk that was lost, but for the record
    out = run(*words, "--steps", 28)
    assert f"resuming {tmp_path}/there/latest.pt at step 24 of 28" in out


def test_ranks_see_the_same_samples_and_lose_the_same(emb, finished, tmp_path):
    for ranks in (2, 3):
        run(*flags(data=emb, run=tmp_path / str(ranks), **SMALL), ranks=ranks)
        for ours, theirs in zip(metrics(tmp_path / str(ranks)), metrics(finished), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_another_number_of_ranks_goes_on_with_the_same_samples(emb, finished, tmp_path):
    words = flags(data=emb, run=tmp_path / "run", **SMALL)
    process = start(*words, ranks=2)
    wait_for("step 12", process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert "resuming" in run(*words)
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_signal_saves_and_the_same_command_goes_on_bit_for_bit(emb, finished, tmp_path):
    words = flags(data=emb, run=tmp_path / "run", **SMALL)
    process = start(*words)
    wait_for("parameters", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    if process.returncode == 128 + signal.SIGTERM:  # else the signal came before the loop took charge of it
        step = int(re.search(r"stopped by signal 15 at step (\d+)", out + err)[1])
        assert (tmp_path / f"run/checkpoints/step_{step:08d}.pt").exists()
    run(*words)
    assert not differences(finished, tmp_path / "run")


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_taken(emb, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000024.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    out = run(*flags(data=emb, run=tmp_path / "run", **SMALL))
    assert "step_00000024.pt: damaged" in out and "resuming" in out and "step 16" in out
    assert not differences(finished, tmp_path / "run")


def test_settings_that_may_change_do_and_are_named(emb, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    changed = {**SMALL, "steps": 28, "lr": 1e-5, "cosine": "false", "precision": "fp16"}
    out = run(*flags(data=emb, run=tmp_path / "run", **changed))
    assert "lr changed from 0.002 to 1e-05" in out and "gradient scale started anew" in out
    last = [line for line in metrics(tmp_path / "run") if "loss" in line][-1]
    assert last["step"] == 28 and last["lr"] == 1e-5 and "scale" in last
    out = run(*flags(data=emb, run=tmp_path / "run", **{**changed, "steps": 32, "precision": "bf16"}))
    assert "gradient scale of the fp16 run dropped" in out


def test_resume_never_moves_the_old_run_aside(emb, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    out = run(*flags(data=emb, run=tmp_path / "run", **SMALL), "--resume", "never")
    assert "the earlier run is now in" in out
    assert not differences(finished, tmp_path / "run.1")
    assert not differences(finished, tmp_path / "run")


def test_a_run_can_start_from_another_ones_checkpoint_or_weights(emb, finished, tmp_path):
    old = finished / "checkpoints/step_00000016.pt"
    run(*flags(data=emb, run=tmp_path / "branch", **SMALL), "--load", old)
    assert [line for line in metrics(finished) if line["step"] > 16] == metrics(tmp_path / "branch")
    out = run(*flags(data=emb, run=tmp_path / "tuned", **{**SMALL, "steps": 4}), "--init_from", finished / "model.pt")
    assert "step 4" in out
    shutil.copy(finished / "model.pt", tmp_path / "weights.pt")
    words = flags(data=emb, run=tmp_path / "gone", **{**SMALL, "steps": 4})
    run(*words, "--init_from", tmp_path / "weights.pt")
    run(*flags(data=emb, run=tmp_path / "gone", **{**SMALL, "steps": 8}), "--resume", "auto")
    assert metrics(tmp_path / "gone")[0]["loss"] == metrics(tmp_path / "tuned")[0]["loss"]
    tuned, fresh = (metrics(folder)[0]["loss"] for folder in (tmp_path / "tuned", finished))
    assert tuned < 0.7 * fresh


@pytest.mark.parametrize("settings", [
    dict(text_encodings="shards", max_text_len=4, self_condition="true", dropout=0.1, workers=2, precision="bf16"),
    dict(objective="v", min_snr_gamma=5, loss="huber", noise_schedule="linear", optimizer="muon", ema_warmup="ratio",
         guidance_scale=2, eta=0, kv_heads=1, noise_draws=1, eval_captions=0),
    dict(objective="epsilon", loss="l1", noise_schedule="sigmoid", clamp_sampling="true", qk_norm="true",
         normformer="true", precision="bf16", eval_minutes=0.001, save_minutes=0.001,
         ema_update_every=2, ema_on_host="true"),
])
def test_options_train_on_two_ranks(settings, emb, tmp_path):
    run(*flags(data=emb, run=tmp_path / "run", **{**SMALL, "steps": 40, "lr": 3e-3, **settings}), ranks=2)
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0] and all(np.isfinite(losses))


def overflow_on_rank_1(emb):
    """[update, whether it was taken, steps counted, whether nothing changed, ratio of scales]: the third overflows."""
    cfg = train_prior.Config(**{**SMALL, "eval_timesteps": (4,), "precision": "fp16"})
    device, source = torch.device("cpu"), data.Embeddings(emb)
    state = train_prior.make(cfg, source, None, None, device)
    model = dist.wrap(state.model, device)
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    reader = data.Chunks(source, data.Split(len(source), "train", 0.1, 0.1), cfg.seed)
    overflow, results = dist.rank() == 1, []
    next(state.model.parameters()).register_hook(
        lambda g: g * float("inf") if overflow and len(results) == 2 else g)

    def attempt():
        start = state.step * cfg.batch_size
        batch = [reader[start + chunk.start, start + chunk.stop] for chunk in plan]
        return train_prior.update(state, model, None, plan, batch)[2]

    while not attempt():  # the first scale is a guess
        pass
    for number in range(4):
        before = [t.clone() for t in [*state.model.state_dict().values(), *state.average.state_dict().values()]]
        step, scale = state.step, state.scaler.get_scale()
        taken = attempt()
        after = [*state.model.state_dict().values(), *state.average.state_dict().values()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        results.append([number, taken, state.step - step, same, state.scaler.get_scale() / scale])
        dist.check_in_step(state.model, state.step)
    return results


def test_fp16_overflow_on_one_rank_of_two_is_a_step_that_did_not_happen(emb, on_ranks):
    usual, skipped = [True, 1, False, 1.0], [False, 0, True, 0.5]  # taken, steps, unchanged, ratio of scales
    expected = [[number, *(skipped if number == 2 else usual)] for number in range(4)]
    assert on_ranks(2, overflow_on_rank_1, emb) == [expected] * 2


@pytest.mark.parametrize("settings", [
    dict(objective="flow", flow_weight="cosmap", timestep_density="logit_normal", self_condition="true"),
    dict(objective="flow", eta=0, timestep_density="mode", mode_scale=-0.5, p2_gamma=1),
    dict(objective="epsilon", dream="true", dream_power=3)])
def test_flow_densities_and_dream_train_and_sample(settings, emb, tmp_path):
    run(*flags(data=emb, run=tmp_path / "run", **{**SMALL, "steps": 40, "lr": 3e-3, **settings}))
    lines = metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] and all(np.isfinite(losses))
    assert lines[-1]["similarity_with_text@4"] > lines[-1]["similarity_with_unrelated_text@4"] + 0.05


# Mistakes


@pytest.mark.parametrize("settings, message", [
    (dict(dream=True), "--dream: it needs --objective epsilon"),
    (dict(objective="epsilon", dream_power=2.0), "--dream_power: it needs --dream true"),
    (dict(flow_weight="cosmap"), "--flow_weight: it needs --objective flow"),
    (dict(objective="flow", noise_schedule="linear"), "--noise_schedule: it needs an objective other than flow"),
    (dict(p2_k=2.0), "--p2_k: it needs --p2_gamma above 0"),
    (dict(p2_gamma=1.0, p2_k=0.0), "--p2_k: 0.0 is not above 0"),
    (dict(p2_gamma=1.0, min_snr_gamma=5.0), "each is a loss weight; give one of them"),
    (dict(objective="flow", p2_gamma=1.0, flow_weight="cosmap"), "each is a loss weight; give one of them"),
    (dict(density_mean=1.0), "--density_mean: it needs --timestep_density logit_normal"),
    (dict(timestep_density="mode", density_std=2.0), "--density_std: it needs --timestep_density logit_normal"),
    (dict(timestep_density="logit_normal", mode_scale=1.0), "--mode_scale: it needs --timestep_density mode"),
    (dict(timestep_density="mode", mode_scale=2.0), "--mode_scale: 2.0 is not within -1 and 1.7519"),
    (dict(objective="flow", clamp_training=True), "it needs --objective x0")])
def test_settings_that_make_no_sense_together_are_refused(settings, message):
    with pytest.raises(train_prior.UserError, match=re.escape(message)):
        train_prior.Config(**settings)


def broken(emb, folder, change):
    shutil.copytree(emb, folder)
    change(folder)
    return folder


def set_rows(folder, rows, value):
    path = folder / "img_emb/img_emb_1.npy"
    array = np.load(path)
    array[rows] = value
    np.save(path, array)


def test_a_few_unusable_rows_are_left_out_counted_and_named(emb, tmp_path):
    folder = broken(emb, tmp_path / "bad", lambda f: (set_rows(f, [3, 7], 0), set_rows(f, [8], np.nan)))
    out = {ranks: run(*flags(data=folder, run=tmp_path / f"run{ranks}", **{**SMALL, "steps": 40}), ranks=ranks)
           for ranks in (1, 2)}
    assert "3 of 1500 rows looked at" in out[1] and "img_emb_1.npy row 3, img_emb_1.npy row 7" in out[1]
    one, two = (metrics(tmp_path / f"run{ranks}") for ranks in (1, 2))
    assert sum(line.get("unusable_rows", 0) for line in one) >= 3
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


DATA_MISTAKES = {
    "no such folder": lambda f: shutil.rmtree(f),
    "no such folder; expected img_emb_N.npy": lambda f: shutil.rmtree(f / "img_emb"),
    "img_emb: empty": lambda f: [p.unlink() for p in (f / "img_emb").iterdir()],
    "text_emb_1.npy: 599 rows, but 600": lambda f: np.save(f / "text_emb/text_emb_1.npy", np.ones((599, 16), "f2")),
    "text_emb_2.npy: rows of shape (8,), but (16,)":
        lambda f: np.save(f / "text_emb/text_emb_2.npy", np.ones((300, 8), "f2")),
    "shard 2 has no counterpart in": lambda f: (f / "text_emb/text_emb_2.npy").unlink(),
    "Python objects in dtype": lambda f: np.save(f / "img_emb/img_emb_0.npy", np.array([{}] * 600, object)),
    "float64 of shape": lambda f: np.save(f / "img_emb/img_emb_0.npy", np.ones((600, 16))),
    "17 of 1500 rows are not finite or all zero": lambda f: set_rows(f, np.arange(17), np.inf),
    "1206 training rows, fewer than --batch_size 4000": None,
}


@pytest.mark.parametrize("message", DATA_MISTAKES)
def test_bad_data_is_one_clear_line_before_training(message, emb, tmp_path, capsys):
    change = DATA_MISTAKES[message]
    folder = broken(emb, tmp_path / "bad", change) if change else emb
    cfg = train_prior.Config(**{**SMALL, "eval_timesteps": (4,), "batch_size": 48 if change else 4000},
                             data=str(folder), run=str(tmp_path / "run"))
    with pytest.raises(train_prior.UserError) as caught:
        train_prior.train(cfg)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_mistakes_on_the_command_line_end_in_one_line_and_a_status(emb, finished, tmp_path):
    folder = tmp_path / "run"
    bad = tmp_path / "bad.json"
    bad.write_text('{"witdh": 3}')
    for words, status, message in [
        (["--widht", "3"], 2, "--widht: no such setting; did you mean --width?"),
        (["smaple", "--width", "3"], 2, "'smaple': expected one of train, evaluate, sample; did you mean sample?"),
        (["--width", "wide"], 2, "--width: 'wide' is not a whole number"),
        (["--config", bad], 2, "witdh: no such setting; did you mean width?"),
        (["--objective", "eps"], 2, "'eps' is none of x0, v, epsilon"),
        (["--heads", "5"], 2, "must be a multiple of heads"),
        (["--eval_timesteps", "2000"], 2, "2000 is not within 1 and 1000"),
        (["sample"], 2, "--text: give a text"),
        (["sample", "--text", "x", "--run", tmp_path / "nothing"], 1, "no such checkpoint"),
        (["sample", "--text", "x", "--run", finished], 1, "name it with --clip"),
        (["evaluate", "--run", finished, "--weights", "online"], 1, "needs one of RUN/checkpoints"),
        (["--beta2", "1.5"], 2, "--beta2: 1.5 is above what a share may be"),
        (["--init_from", tmp_path / "nothing"], 1, "nothing: no such checkpoint"),
        (["--data", broken(emb, tmp_path / "odd", lambda f: (f / "clip.json").write_text("?")), "--run", folder], 1,
         "clip.json: not a JSON file"),
        (["evaluate", "--run", finished, "--model", "metrics.jsonl"], 1, "not a checkpoint of this program"),
        (["--data", tmp_path / "nothing", "--run", folder], 1, "nothing: no such folder"),
        (["--data", emb, "--run", finished, *flags(**{**SMALL, "width": 64})], 1, "width is 32 there and 64 here"),
        (["--data", emb, "--run", folder, *flags(**SMALL), "--load", finished / "model.pt"], 1, "--init_from"),
        (["--resume", finished / "model.pt"], 2, "is none of auto, never"),
        (["--load", "ftp://host/model.pt"], 2, "is not a URL that can be read"),
        (["--save", "local save_latest_to={stp}.pt"], 2, "in braces may stand run, step"),
        (["--save", "local"], 2, "no target"), (["--metadata", "step=1"], 2, "'step' is reserved"),
        (["--save", "wandb save_latest_to=x.pt"], 2, "it needs --logger wandb"),
        (["--load_only_auto_resume"], 2, "it needs --load"),
        (["--data", emb, "--run", folder, *flags(**SMALL), "--text_encodings", "clip"], 1, "name it with --clip"),
    ]:
        out = run(*words, expect=status)
        assert message in out and "Traceback" not in out, out
        assert len(out.strip().splitlines()) == 1, out


def test_other_data_and_too_few_chunks_are_refused(emb, finished, tmp_path):
    def drop_shard(f):
        for name in ("img_emb/img_emb_2.npy", "text_emb/text_emb_2.npy", "captions/captions_2.jsonl"):
            (f / name).unlink()
    other = broken(emb, tmp_path / "other", drop_shard)
    shutil.copytree(finished, tmp_path / "run")
    out = run(*flags(data=other, run=tmp_path / "run", **{**SMALL, "steps": 30}), expect=1)
    assert "data rows is 1500 there and 1200 here" in out and "Traceback" not in out
    out = run(*flags(data=emb, run=tmp_path / "new", **{**SMALL, "chunk_size": 48}), ranks=2, expect=1)
    assert "too few for 2 ranks; lower chunk_size to 24 or less" in out


def test_a_folder_in_use_is_refused(emb, tmp_path):
    words = flags(data=emb, run=tmp_path / "run", **{**SMALL, "steps": 100_000})
    process = start(*words)
    wait_for("parameters", process)
    out = run(*words, expect=1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert f"in use by another live process (process {process.pid} on" in out and "Traceback" not in out


# With a CLIP


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a hurriedly trained CLIP, and the shapes that it embedded."""
    folder = tmp_path_factory.mktemp("world")
    images, records = synthetic.shapes(range(1200))
    cfg = clip.Config(steps=30, batch_size=64, embed_width=16, channels=(8, 16, 16), text_width=32, text_depth=1)
    torch.set_num_threads(1)
    model = clip.train(images, [r["caption"] for r in records], cfg, torch.device("cpu"))
    state = {"model": model.state_dict(), "config": dataclasses.asdict(cfg), "merges": model.tokenizer.merges}
    checkpoint.save(state, folder / "clip/model.pt")
    image, text, encodings = clip.embed(model, images, [r["caption"] for r in records], encodings=True)
    data.write_shards(folder / "emb", image, text, records, encodings)
    (folder / "emb/clip.json").write_text(json.dumps({"clip": str(folder / "clip")}))
    return folder


@pytest.mark.parametrize("encodings", ["none", "clip", "shards"])
def test_sampling_names_neighbors_and_does_not_depend_on_the_batch(encodings, world, tmp_path):
    small = {**SMALL, "steps": 8, "eval_captions": 16, "max_text_len": 20, "objective": "v"}
    out = run(*flags(data=world / "emb", run=tmp_path / "run", text_encodings=encodings, **small))
    assert re.search(r"caption_match +0\.\d+ @4", out) and re.search(r"coverage_ceiling +\d\.\d+", out)
    words = ["sample", *flags(run=tmp_path / "run", steps=3, num=3, device="cpu")]
    out = run(*words, *flags(text="a small red star", out=tmp_path / "a.npy"))
    assert out.count("similarity with the text") == 3 and len(re.findall(r"^    0\.\d+  \w+", out, re.M)) == 9
    (tmp_path / "texts.txt").write_text("a small red star\n\nsomething blue\n")
    run(*words, *flags(texts=tmp_path / "texts.txt", out=tmp_path / "b.npy", max_batch=4))
    a, b = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert a.shape == (3, 16) and b.shape == (6, 16)
    np.testing.assert_allclose(a, b[:3], atol=1e-5)
    assert np.abs(a[0] - a[1]).max() > 1e-3
    run(*words, *flags(text="a small red star", seed=2 ** 62, model="checkpoints/step_00000008.pt", weights="online",
                       out=tmp_path / "c.npy"))
    assert np.abs(a - np.load(tmp_path / "c.npy")).max() > 1e-3


def test_evaluate_gives_the_figures_of_the_end_of_training(world, tmp_path):
    small = {**SMALL, "steps": 8, "eval_captions": 16}
    run(*flags(data=world / "emb", run=tmp_path / "run", **small))
    last = metrics(tmp_path / "run")[-1]
    for ranks in (0, 2):
        run("evaluate", *flags(run=tmp_path / "run", eval_captions=16, eval_timesteps=4, eval_samples=100, device="cpu",
                               out=tmp_path / "figures.json"), ranks=ranks)
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert figures.pop("loss") == pytest.approx(last["test_loss"], rel=1e-5)
        assert figures == pytest.approx({k: v for k, v in last.items() if k in figures}, rel=1e-4)
        assert {"caption_match@4", "coverage@4", "similarity_with_image@4"} <= figures.keys()


def test_a_run_with_encodings_goes_on_with_the_clip_of_its_start_and_no_other(world, tmp_path):
    words = flags(data=world / "emb", run=tmp_path / "run", **{**SMALL, "text_encodings": "clip", "eval_captions": 0,
                                                               "max_text_len": 20})
    run(*words, "--steps", 4)
    shutil.copytree(world / "clip", tmp_path / "clip")
    assert "at step 4 of 8" in run(*words, "--steps", 8, "--clip", tmp_path / "clip")
    state = checkpoint.load(tmp_path / "clip/model.pt")
    state["model"]["text_projection.weight"][0, 0] += 1
    checkpoint.save(state, tmp_path / "clip/model.pt")
    assert "other data: clip is" in run(*words, "--steps", 12, "--clip", tmp_path / "clip", expect=1)


def test_a_mistake_that_only_the_data_shows_is_told_once_by_two_ranks(finished, tmp_path):
    data.write_shards(tmp_path, np.ones((9, 8)), np.ones((9, 8)), [{}] * 9)
    out = Forked("train_prior", "evaluate", *flags(run=finished, data=tmp_path, device="cpu"), ranks=2).finish(expect=1)
    assert out.count("error: ") == out.count("are [8, 0] wide, the prior's [16, 0]") == 1 and "Traceback" not in out


def test_presets_are_valid_settings():
    for name, settings in train_prior.PRESETS.items():
        cfg = train_prior.Config(**settings)
        assert cfg.width == 768 and cfg.depth == 12 and cfg.heads == 12 and cfg.max_text_len == 77, name


def test_entropy_is_that_of_the_distribution():
    assert train_prior.entropy(np.array([3, 3, 3])) == 0
    assert train_prior.entropy(np.array([0, 1, 2, 3])) == pytest.approx(np.log(4))
    assert diffusion.SCHEDULES[0] == train_prior.Config().noise_schedule
