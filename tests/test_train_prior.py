"""The prior: its model against itself computed another way, and the script as a user runs it."""
import dataclasses
import json
import os
import re
import shutil
from functools import partial

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import KILLS, SMALL, Forked, check_loading, differences, flags, follow, kill_often, metrics

import train_prior
from common import accumulate, amp, checkpoint, clip, config, data, diffusion, dist, synthetic

CPU = torch.device("cpu")
SHORT = {**SMALL, "steps": 8, "max_text_len": 20}
run = partial(helpers.run, "train_prior")

# The model

def make(**settings):
    torch.manual_seed(0)
    small = dict(width=32, depth=3, heads=4, text_encodings="shards", max_text_len=6)
    cfg = train_prior.Config(**{**small, **settings})
    prior = train_prior.Prior(cfg, 16, 0 if cfg.text_encodings == "none" else 12)
    for parameter in [p for p in prior.parameters() if not p.any()]:  # a start at zero would hide mistakes
        torch.nn.init.normal_(parameter, std=0.1)
    return prior


def batch_of(rows):
    return {"image_embed": torch.randn(rows, 16), "text_embed": torch.randn(rows, 16),
            "text_enc": torch.randn(rows, 6, 12), "text_mask": torch.rand(rows, 6) < 0.7}


def inputs():
    return torch.randn(4, 3, 16), torch.randint(1000, (4, 3)), batch_of(4), torch.tensor([True, False, False, True])


@pytest.mark.parametrize("settings", [dict(), dict(text_encodings="none", checkpointing=True)])
def test_shared_text_equals_separate_passes_and_the_cached_sampling_pass(settings):
    prior, (x_t, t, condition, drop) = make(**settings), inputs()
    cache, outputs = prior.text_cache(condition, drop), [prior(x_t, t, condition, drop)]
    outputs.append(torch.cat([prior(x_t[:, [k]], t[:, [k]], condition, drop) for k in range(3)], 1))
    outputs.append(torch.cat([prior.denoise(x_t[:, [k]], t[:, [k]], *cache) for k in range(3)], 1))
    together, *others = [[out, *torch.autograd.grad(out.square().mean(), [*prior.parameters()])] for out in outputs]
    torch.testing.assert_close([together] * 2, others, rtol=1e-3, atol=1e-5)


def test_the_null_branch_drops_the_text_and_nothing_else():
    prior, (x_t, t, condition, _) = make(), inputs()
    other = {name: ~value if name == "text_mask" else value + 1 for name, value in condition.items()}
    drop = torch.ones(4, dtype=torch.bool)
    assert torch.equal(prior(x_t, t, condition, drop), prior(x_t, t, other, drop))
    assert not torch.allclose(prior(x_t, t, condition, ~drop), prior(x_t, t, other, ~drop))
    assert not torch.allclose(prior(x_t, t, condition, drop), prior(x_t + 1, t, condition, drop))


def test_padding_is_no_key_and_longer_texts_are_cut():
    prior, (x_t, t, condition, drop) = make(), inputs()
    condition["text_mask"][0, 0] = False  # so that the first token sees itself alone
    changed = {**condition, "text_enc": torch.where(condition["text_mask"][..., None], condition["text_enc"], 99.0)}
    assert torch.equal(prior(x_t, t, condition, drop), prior(x_t, t, changed, drop))
    encodings = condition["text_enc"]
    encodings[1, 4:], encodings[2, 0, 1:], encodings[3, 5, :11] = 0, 0, 0  # of which only the first are padding
    for length in (3, 8):
        found = train_prior.conditioning(condition, make(max_text_len=length).cfg, None)
        expected = torch.cat([encodings, torch.zeros(4, 2, 12)], 1)[:, :length]
        assert torch.equal(found["text_enc"], expected) and torch.equal(found["text_mask"], expected.ne(0).any(-1))


@pytest.mark.parametrize("settings", [
    dict(noise_draws=1), dict(text_encodings="none", objective="epsilon", dream=True, loss_weight="min_snr")])
def test_every_parameter_gets_a_gradient_and_bf16_stays_close(settings):
    prior, batch, losses = make(**settings), batch_of(64), []
    before = {name: value.clone() for name, value in batch.items()}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(2)
        prior.zero_grad()
        with amp.autocast(CPU, precision):
            condition = train_prior.conditioning(batch, prior.cfg, None)
            losses.append(train_prior.diffusion_loss(prior, batch, condition))
        losses[-1].backward()
        assert all(p.grad is not None for p in prior.parameters())
    assert losses[1].dtype == torch.float32 and losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    assert losses[0] != losses[1] and all(torch.equal(before[name], value) for name, value in batch.items())


def test_embeddings_get_length_root_d_inside_or_raw_ones_their_mean_and_deviation():
    embed, (x_t, t, condition, drop) = torch.randn(5, 16) * 3 + 1, inputs()
    longer = {**condition, "text_embed": condition["text_embed"] * 5}
    prior = make()
    x0 = prior.standardize(embed)
    torch.testing.assert_close(x0, embed / embed.norm(dim=-1, keepdim=True) * 4)
    torch.testing.assert_close(prior.destandardize(x0 * 2), embed / embed.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(prior(x_t, t, condition, drop), prior(x_t, t, longer, drop), rtol=1e-4, atol=1e-5)
    prior = make(raw_embeddings=True)
    prior.clip_mean.copy_(torch.randn(16))
    prior.clip_std.copy_(torch.rand(16) + 0.5)
    x0 = prior.standardize(embed)
    torch.testing.assert_close(x0 * prior.clip_std + prior.clip_mean, embed)
    torch.testing.assert_close(prior.destandardize(x0), embed)
    assert not torch.allclose(prior(x_t, t, condition, drop), prior(x_t, t, longer, drop), atol=1e-2)


@pytest.mark.parametrize("objective", ["x0", "v", "epsilon", "flow"])
def test_sampling_with_guidance_equals_a_slow_uncached_loop(objective):
    prior, (_, _, condition, _) = make(objective=objective), inputs()
    out = train_prior.sample_embeddings(prior, condition, 4, 2.5, 0.0, lambda x: torch.full_like(x, 0.5))
    x = torch.full((4, 16), 0.5)
    for t, after in zip([999, 666, 333, 0], [666, 333, 0, None]):
        null, text = (prior(x[:, None], torch.full((4, 1), t), condition, torch.full((4,), drop))[:, 0].detach()
                      for drop in (True, False))
        a, s, answer = prior.alpha[t], prior.sigma[t], null + 2.5 * (text - null)
        x0 = {"x0": answer, "v": a * x - s * answer, "epsilon": (x - s * answer) / a, "flow": x - s * answer}[objective]
        assert t < 999 or objective != "epsilon" or x0.abs().max() > 4  # the bound, √16, is reached
        x0 = x0.clamp(-4, 4)
        if after is not None:
            x = prior.alpha[after] * x0 + prior.sigma[after] * (x - a * x0) / s
    torch.testing.assert_close(out, F.normalize(x0, dim=-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [
    dict(), dict(objective="v", loss_weight="min_snr", loss_gamma=0.5),
    dict(objective="flow", loss_weight="cosmap", timestep_density="logit_normal", density_mean=1.0, density_std=0.5),
    dict(objective="epsilon", dream=True, loss_weight="min_snr", loss_gamma=4.0)])
@pytest.mark.parametrize("plain", [False, True])
def test_loss_equals_a_slow_one_and_a_plain_loss_has_neither_weights_nor_dream(plain, settings):
    prior, batch, losses = make(text_encodings="none", noise_draws=3, text_drop=0.4, **settings), batch_of(8), []
    cfg, condition = prior.cfg, train_prior.conditioning(batch, prior.cfg, None)
    torch.manual_seed(5)
    loss = train_prior.diffusion_loss(prior, batch, condition, plain=plain)
    torch.manual_seed(5)
    timestep = diffusion.draw_timesteps(cfg.timestep_density, (8, 3), 1000, CPU, cfg.density_mean, cfg.density_std)
    noise, drop = torch.randn(8, 3, 16), torch.rand(8) < 0.4
    def predict(i, k, x_t):
        text = {"text_embed": condition["text_embed"][[i]]}
        return prior(x_t[None, None], timestep[i, k].view(1, 1), text, drop[[i]])[0, 0]
    for i, k in np.ndindex(8, 3):
        a, s, e = prior.alpha[timestep[i, k]], prior.sigma[timestep[i, k]], noise[i, k]
        x0, ratio = 4 * F.normalize(batch["image_embed"][i], dim=0), (a / s) ** 2
        if cfg.dream and not plain:
            e = e + s * (e - predict(i, k, a * x0 + s * e))
        answer = predict(i, k, a * x0 + s * e)
        target, weight = {"x0": (x0, 1), "v": (a * e - s * x0, ratio.clamp(max=0.5) / (ratio + 1)),
                          "flow": (e - x0, 2 / torch.pi / (1 - 2 * s + 2 * s ** 2)),
                          "epsilon": (e, ratio.clamp(max=4) / ratio)}[cfg.objective]
        error = (answer - target).square().mean().item()
        losses.append((1 if plain else weight) * error)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)


def evaluator_of(folder, **settings):
    cfg = train_prior.Config(**{**SMALL, "data": str(folder), "eval_timesteps": (4,), **settings})
    source = data.Embeddings(folder)
    return train_prior.Evaluator(cfg, data.parts(source, cfg), None, CPU), train_prior.Prior(cfg, source.width)


def test_evaluation_takes_means_over_rows_and_leaves_the_mode_as_it_was(emb, monkeypatch):
    settings = dict(text_encodings="none", loss_weight="min_snr", dropout=0.3)
    evaluator, prior = evaluator_of(emb, eval_timesteps=(2, 4), eval_samples=95)[0], make(**settings)
    (source, rows), losses = evaluator.parts["test"], []
    for number, first in enumerate(range(0, 95, 10)):  # of which the last are fewer
        batch = source.fetch(rows[np.arange(first, min(first + 10, 95))])[0]
        accumulate.seed(0, "loss", number)
        condition = train_prior.conditioning(batch, prior.cfg, None)
        loss = train_prior.diffusion_loss(prior.eval(), batch, condition, plain=True)
        losses += [loss.item()] * min(10, 95 - first)
    assert evaluator.loss(prior.train(), "test") == pytest.approx(np.mean(losses), rel=1e-6)
    figures = evaluator.figures(prior, "test")
    assert prior.training and all(p.grad is None for p in prior.parameters())
    assert evaluator.figures(prior.eval(), "test") == figures and not prior.training
    monkeypatch.setattr(train_prior, "sample_embeddings",  # copies of the text, and their opposites
                        lambda prior, condition, steps, *rest: condition["text_embed"] * (3 - steps))
    batch = source.fetch(rows[np.arange(95)])[0]
    baseline, unrelated = (F.cosine_similarity(batch["text_embed"], other).mean().item()
                           for other in (batch["image_embed"], batch["text_embed"].roll(-47, 0)))
    expected = {"baseline_similarity": baseline}
    for t, sign in ((2, 1), (4, -1)):
        expected |= {f"similarity_with_text@{t}": sign, f"similarity_with_image@{t}": sign * baseline,
                     f"similarity_with_unrelated_text@{t}": sign * unrelated,
                     f"difference_from_baseline@{t}": sign - baseline}
    assert evaluator.figures(prior, "test") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("copies, match, coverage", [(True, 1, 0), (False, 0.75, 1)])
def test_scores_of_the_built_in_data_tell_copies_from_variety(copies, match, coverage, tmp_path, monkeypatch):
    base = synthetic.shapes([0], size=8)[1][0]["attributes"]
    attributes = [{**base, "color": color, "shape": shape} for color in ("red", "blue") for shape in ("ring", "star")]
    records = [{"caption": "", "named": ["color"], "attributes": attributes[i % 4]} for i in range(1200)]
    codes, calls = torch.eye(4)[torch.arange(1200) % 4], []
    data.write_shards(tmp_path, codes, codes, records)
    evaluator, prior = evaluator_of(tmp_path, validation=0.3, test=0.3, eval_timesteps=(2, 8, 4))
    def sample(prior, condition, *rest):
        calls.append(condition["text_embed"])
        color, number = calls[-1].argmax(-1) // 2, torch.arange(len(calls[-1]))
        return calls[-1] if copies else torch.eye(4)[(color ^ (number >= 12)) * 2 + number % 2]  # 4 in the other color
    monkeypatch.setattr(train_prior, "sample_embeddings", sample)
    scores = evaluator.built_in_scores(prior, "test")
    assert (scores["caption_match@8"], scores["coverage@8"]) == (match, pytest.approx(coverage, abs=1e-4))
    assert scores["caption_match_ceiling"] == 1 and 0.9 < scores["coverage_ceiling"] <= 1
    assert [len(draws) for draws in calls] == [16] * 96
    evaluator.cfg = dataclasses.replace(evaluator.cfg, val_data="of another source")  # so without held-out images
    assert not any("caption_match" in name for name in evaluator.figures(prior, "test"))


# The script

@pytest.fixture(scope="session")
def finished(emb, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    out = run(*flags(data=emb, run_dir=folder, **SMALL))
    assert re.search(r"(?s)parameters, 1,500 rows of width 16.*step 12: loss.*24/24", out), out
    assert "similarity_with_text@2" in follow(out, "--eval_timesteps", 2, "--device", "cpu")  # as no CLIP is known
    return folder


def test_a_run_writes_a_complete_folder_and_says_so_when_started_again(emb, finished, tmp_path):
    record, lines = json.loads((finished / "auto_resume.json").read_text()), metrics(finished)
    assert [c["step"] for c in record["checkpoints"]] == [24, 16, 8] and (finished / "report.html").is_file()
    for name, steps in (("loss", [4, 8, 12, 16, 20, 24]), ("similarity_with_text@4", [12]),
                        ("test_similarity_with_text@4", [24]), ("test_loss", [24])):
        assert [line["step"] for line in lines if name in line] == steps
    first, last = (line for line in lines if "val_loss" in line)
    assert lines[0]["loss"] < 1.3 and first["val_loss"] > last["val_loss"] != last["val_loss_online"]
    state, whole = (checkpoint.load(finished / name) for name in ("model.pt", "checkpoints/step_00000024.pt"))
    assert all(torch.equal(state["model"][name], value) for name, value in whole["ema"].items())
    assert state["model"].keys() == evaluator_of(emb)[1].state_dict().keys()
    words = flags(data=emb, run_dir=shutil.copytree(finished, tmp_path / "run"), **SMALL)
    out = run(*words, "--save", f"local save_latest_to={tmp_path}/{{step}}.pt")  # sent by a run that is finished, too
    assert "is finished, at step 24" in out and "test_loss" in out and (tmp_path / "24.pt").is_file()
    assert not differences(finished, tmp_path / "run")


def test_the_script_alone_does_not_import_what_makes_and_reads_pictures_and_sounds(script):
    loaded = script("import sys, train_prior; print(*sys.modules)").stdout.replace("common.", "").split()
    assert {"images", "recordings", "media", "synthetic", "lora", "clip", "data"}.intersection(loaded) == {"data"}


@pytest.mark.parametrize("ranks, settings", [
    (1, dict(text_encodings="shards", max_text_len=4, dropout=0.1, precision="bf16", checkpointing="true")),
    (2, dict(objective="v", loss_weight="min_snr", optimizer="muon", eta=0, guidance_scale=2))])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(ranks, settings, emb, tmp_path):
    words = flags(data=emb, **{**SMALL, "eval_every": 4, "steps": 8 * KILLS, **settings})
    run(*words, *flags(run_dir=tmp_path / "whole"), ranks=ranks - 1 and ranks)
    words += flags(run_dir=tmp_path / "killed")
    running = kill_often("train_prior", words, ranks, ranks)
    run(*words, ranks=ranks - 1 and ranks)
    assert running > KILLS / 2 and not differences(tmp_path / "whole", tmp_path / "killed")


def test_a_chunk_size_that_is_left_out_is_decided_once_and_kept_by_the_run(emb, tmp_path):
    words = flags(data=emb, run_dir=tmp_path / "run", **{**SMALL, "chunk_size": 0, "steps": 4})
    assert "batches of 48 in chunks of 12, 4 rank(s)" in run(*words, ranks=4)
    for more, ranks in ((8, 1), (12, 3), (16, 4)):
        assert "batches of 48 in chunks of 12" in run(*words, "--steps", more, ranks=ranks)
    assert checkpoint.load(tmp_path / "run/model.pt")["config"]["chunk_size"] == 12
    assert json.loads((tmp_path / "run/config.json").read_text())["chunk_size"] == 12
    out = run(*words, "--steps", 20, ranks=5, expect=1)
    assert "step_00000016.pt: its batches have 4 chunk(s) of 12 samples, so at most 4 rank(s)" in out
    assert "--chunk_size" not in out  # which no run can change
    assert "is finished, at step 16" in run(*words, "--steps", 16, ranks=5)  # which any number may say
    assert "chunk_size is 12 there and 6 here" in run(*words, "--steps", 20, "--chunk_size", 6, expect=1)
    loaded = flags(run_dir=tmp_path / "loaded", load=tmp_path / "run/checkpoints/step_00000016.pt", steps=20)
    assert "batches of 48 in chunks of 12" in run(*words, *loaded)
    assert "fewer samples than the 3 ranks" in run(*words, *flags(run_dir=tmp_path / "b", batch_size=2), ranks=3,
                                                   expect=1)


def test_stopped_on_3_ranks_and_started_again_by_torchrun_on_2_loses_the_same_as_on_1(emb, finished, tmp_path):
    words = flags(data=emb, run_dir=tmp_path / "run", **SMALL)
    process = Forked("train_prior", *words, ranks=3)
    assert next(line for line in process.out if "step 12: " in line)
    process.processes[0].terminate()
    step = re.search(r"stopped by SIGTERM at step (\d+), all saved", process.finish(expect=143))[1]
    process = helpers.start("train_prior", *words, ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0 and f"at step {step} of 24" in out and out.count("Next: ") == 1, out + err
    assert metrics(tmp_path / "run") == [pytest.approx(line, rel=1e-4) for line in metrics(finished)]


def main():
    """The script, on ranks of which the second has one loss, its tenth, that is infinite when it is scaled."""
    scale, losses = torch.amp.GradScaler.scale, []
    def overflowing(scaler, loss):
        losses.append(loss)
        return scale(scaler, loss) * (float("inf") if dist.rank() == 1 and len(losses) == 10 else 1)
    torch.amp.GradScaler.scale = overflowing
    train_prior.main()


def test_an_fp16_overflow_on_one_rank_of_two_is_a_step_that_did_not_happen(emb, tmp_path):
    for script in ("train_prior", "test_train_prior"):
        Forked(script, *flags(data=emb, run_dir=tmp_path / script, **SMALL, precision="fp16"), ranks=2).finish()
    usual, disturbed = (metrics(tmp_path / script) for script in ("train_prior", "test_train_prior"))
    ends = [[sum(line.pop("overflows", 0) for line in lines), [line.pop("scale", 0) for line in lines][-3]]
            for lines in (usual, disturbed)]
    assert ends[1] == [ends[0][0] + 1, ends[0][1] / 2]
    # some cosines are near zero
    assert disturbed == [pytest.approx(line, rel=1e-3, abs=1e-4) for line in usual]


def test_checkpoints_load_from_files_and_urls_and_say_what_is_other_than_it_was(emb, finished, server, tmp_path):
    words = flags(data=emb, **SMALL)
    check_loading("train_prior", words, finished, "", server, tmp_path)  # with another learning rate, too
    state = checkpoint.load(finished / "checkpoints/step_00000016.pt")
    checkpoint.save({**state, "versions": {**state["versions"], "torch": "1.0"}}, tmp_path / "old.pt")
    out = run(*words, *flags(run_dir=tmp_path / "new", load=tmp_path / "old.pt"))
    assert f"old.pt is of another torch: 1.0, this is {torch.__version__}" in out and "another code" not in out


def test_validation_data_split_seed_clock_copies_and_lengths_of_average_and_cosine(emb, tmp_path):
    noise, folder = tmp_path / "noise", tmp_path / "run"
    data.write_shards(noise, *np.random.default_rng(1).normal(size=(2, 60, 16)), [{"caption": ""}] * 60)
    words = flags(data=spoiled(emb, tmp_path / "bad", [603, 607], 0), run_dir=folder, val_data=noise, split_seed=1,
                  ema_decay=0, cosine_steps=10, text_drop=0, **{**SMALL, "eval_every": 0, "save_every": 0},
                  eval_minutes=1e-6, save_minutes=10, save=f"local save_best_to={tmp_path}/{{step}}.pt")
    assert "2 of 1500 rows looked at" in (out := run(*words)) and "img_emb_1.npy row 3, img_emb_1.npy row 7" in out
    assert "split_seed is 1 there and 2 here" in run(*words, "--split_seed", 2, "--steps", 28, expect=1)
    validations = [line for line in metrics(folder) if "val_loss" in line]
    assert [line["step"] for line in validations] == [4, 8, 12, 16, 20, 24]  # the clock runs from the start
    losses = [line["val_loss"] for line in validations]
    best = {f"{4 * i + 4}.pt" for i, loss in enumerate(losses) if loss < min(losses[:i], default=np.inf)}
    assert {path.name for path in tmp_path.glob("*.pt")} == best != {f"{step}.pt" for step in range(4, 25, 4)}
    assert all(line["val_loss"] == line["val_loss_online"] for line in validations)
    *lines, last = metrics(folder)
    assert [line["lr"] == 0 for line in lines if "loss" in line] == [False, False, True, True, True, True]
    assert len({line["val_loss"] for line in validations[-4:]}) == 1  # as nothing changes at that rate
    for line, source, split in ((validations[0], noise, data.Split(60, "train", 0, 0)),
                                (last, emb, data.Split(1500, "test", 0, 0.1, seed=1))):
        batch = data.Embeddings(source).fetch(split[np.arange(min(len(split), 100))])[0]
        baseline = F.cosine_similarity(batch["text_embed"], batch["image_embed"]).mean().item()
        name = "test_" * (line is last) + "baseline_similarity"
        assert line[name] == pytest.approx(baseline, rel=1e-4)
    for words in (["evaluate"], ["sample", "--text", "x"]):
        assert "is trained with --text_drop 0" in run(*words, "--run_dir", folder, "--guidance_scale", 2, expect=1)


def spoiled(emb, folder, rows, value):
    images = np.load(shutil.copytree(emb, folder) / "img_emb/img_emb_1.npy")
    images[np.array(rows) - 600] = value
    np.save(folder / "img_emb/img_emb_1.npy", images)
    return folder


def test_mistakes_end_in_one_line_and_a_status(emb, finished, tmp_path):
    train, used, narrow = ["--data", emb, "--run_dir", tmp_path / "run"], ["--run_dir", finished], tmp_path / "narrow"
    data.write_shards(narrow, np.ones((9, 8)), np.ones((9, 8)), [{}] * 9)
    for words, status, message in [
        (["--widht", "3"], 2, "no such setting; did you mean --width?"), (["--dream"], 2, "needs --objective epsilon"),
        (["--heads", "5"], 2, "--width 192: expected an even multiple of --heads 5"),
        (["--width", "9"], 2, "--width 9: expected an even multiple of --heads 3"),
        (["--eval_timesteps", "1,2000"], 2, "2000 sampling steps"), (["--lora_rank", "4"], 2, "--init_from"),
        (["--guidance_scale", "2", "--text_drop", "0"], 2, "is trained with --text_drop 0"),
        (["sample", "--text", "x", "--texts", "y"], 2, "--text, --texts: give one"),
        (["sample", "--out", "x.pt"], 2, "--out: x.pt: expected a name that ends in .npy"),
        (["sample", "--text_embeds", narrow / "text_emb/text_emb_0.npy", *used], 1, "8 wide, or not finite"),
        (["sample", "--texts", os.devnull, *used], 1, "no text in it"), ([*train, "--data", "no"], 1, "no such folder"),
        (["sample", "--text", "x", "--steps", "1001", *used], 1, "1001 sampling steps: expected 1 to 1000"),
        (["sample", "--text", "x", "--steps", "1000", *used], 1, "name it with --clip"),
        (["evaluate", *used, "--data", narrow], 1, "none) are [8, 0]; the"), ([*train, *used], 1, "width is 32 there"),
        ([*train, "--data", spoiled(emb, tmp_path / "bad", range(600, 617), np.inf)], 1, "17 of 1500 rows are not"),
        ([*train, "--val_data", narrow], 1, "8 wide"), ([*train, "--text_encodings", "clip"], 1, "name it with --clip"),
    ]:
        out = run(*words, expect=status)
        assert message in out and "Traceback" not in out and len(out.strip().splitlines()) == 1, out
    out = run(*train, "--chunk_size", "256", ranks=2, expect=1)
    assert out.count("too few for 2 ranks; leave it out, or give at most 128") == 1  # said once


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a hurriedly trained CLIP, the shapes that it embedded, and a run on them as the built-in data."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "BUILTIN_ROWS", 600)
        cfg = clip.Config(run_dir=str(folder / "clip"), steps=30, batch_size=64, embed_width=16, text_width=32)
        clip.train(cfg, CPU)
        clip.embed_all(clip.EmbedConfig(run_dir=str(folder / "clip"), out=str(folder / "emb"), encodings=True), CPU)
        patch.setattr(clip, "builtin_data", lambda *_: str(folder / "emb"))
        run(*flags(run_dir=folder / "run", **SHORT))
    return folder


def sampled(folder, **settings):
    words = flags(run_dir=folder, steps=3, device="cpu", out="out.npy", **{"text": "a small red star", **settings})
    return run("sample", *words), np.load("out.npy")


@pytest.mark.parametrize("encodings", ["none", "clip", "shards"])
def test_samples_do_not_depend_on_the_batch_and_are_the_best_of_several(encodings, world, tmp_path):
    out = run(*flags(data=world / "emb", run_dir=tmp_path / "run", text_encodings=encodings, objective="v", **SHORT))
    caption = json.loads((world / "emb/captions/captions_0.jsonl").read_text().splitlines()[0])["caption"]
    assert f"{caption!r}: similarity" in follow(out, "--steps", 2, "--device", "cpu")  # a caption of the data
    out, several = sampled(tmp_path / "run", num_samples=6, best_of=1)
    model = clip.load(world / "clip", CPU)
    text = F.normalize(model.embed_text(model.tokenize(["a small red star"]))[0][0], dim=0)
    cosines = several @ text.numpy()
    assert f"similarity with the text {', '.join(f'{cosine:.3f}' for cosine in cosines)}" in out
    (tmp_path / "texts").write_text("a small red star\n\nsomething blue\n")
    best = sampled(tmp_path / "run", text="", texts=tmp_path / "texts", num_samples=2, best_of=3, max_batch=4)[1]
    np.testing.assert_allclose(best[:2], several[[cosines[:3].argmax(), 3 + cosines[3:].argmax()]], atol=1e-5)
    assert best.shape == (4, 16) and np.abs(several[0] - several[1]).max() > 1e-3
    if encodings == "none":  # no CLIP is needed
        embeds = model.embed_text(model.tokenize(["a small red star", "something blue"]))[0]
        np.save(tmp_path / "texts.npy", embeds)
        given = dict(text="", text_embeds=tmp_path / "texts.npy", clip="nowhere", num_samples=2, best_of=3)
        np.testing.assert_allclose(sampled(tmp_path / "run", **given)[1], best, atol=1e-5)


def test_samples_without_a_text_are_those_of_a_dropped_text(world):
    prior, _ = train_prior.load_prior(world / "run/model.pt", CPU)
    out, drawn = sampled(world / "run", text="", num_samples=3)
    assert "similarity" not in out and len(drawn) == 3
    encoder = clip.load(world / "clip", CPU)
    empty = train_prior.conditioning({"caption": [""]}, prior.cfg, encoder)
    assert torch.equal(prior.null_text.text_embed, empty["text_embed"]) and empty["text_embed"].any()
    keys = [0]
    expected, _ = train_prior.best_embeddings(prior, empty, keys, 3, 3, best_of=2)
    np.testing.assert_allclose(drawn, expected[0].numpy(), atol=1e-5)
    text = sampled(world / "run", num_samples=3)[1]
    assert np.abs(text - drawn).max() > 1e-3


def test_evaluate_gives_the_figures_of_the_end_of_training_and_adapters_count_as_they_are_scaled(world, tmp_path):
    whole, lora = world / "run", tmp_path / "lora"
    out = run(*flags(data=world / "emb", run_dir=lora, init_from=whole / "model.pt", lora_rank=4, **SHORT))
    assert "of adapters" in out and out.endswith(f"--run_dir {lora}\n") and "similarity" in follow(out, "--steps", 2)
    for ranks, folder in ((0, whole), (2, whole), (0, lora)):
        words = flags(run_dir=folder, eval_timesteps=4, eval_samples=100, device="cpu", out=tmp_path / "out")
        out, last = run("evaluate", *words, ranks=ranks), metrics(folder)[-1]
        figures = json.loads((tmp_path / "out").read_text())
        assert out.count("similarity_with_text@4") == 1 and figures.pop("loss") == pytest.approx(last["test_loss"])
        assert figures == pytest.approx({name: last[f"test_{name}"] for name in figures}, rel=1e-4)
        assert "coverage@4" in figures
    base, none, adapted = (sampled(folder, lora_scale=scale)[1] for folder, scale in ((whole, 1), (lora, 0), (lora, 1)))
    assert np.array_equal(base, none) and np.abs(base - adapted).max() > 1e-4


def test_a_run_on_captions_needs_no_text_embeddings_and_goes_on_with_its_clip_and_no_other(world, tmp_path):
    shutil.rmtree(shutil.copytree(world, tmp_path / "world") / "emb/text_emb")
    words = flags(text_encodings="clip", run_dir=tmp_path / "run", clip=tmp_path / "world/clip", **SHORT)
    run(*words, "--data", world / "emb", "--steps", 4)
    assert "at step 4 of 8" in run(*words, "--data", tmp_path / "world/emb")
    train, sample = [*words, "--data", world / "emb", "--steps", 12], ["sample", "--text", "x", *words[2:6]]
    cfg = clip.Config(embed_width=16, text_width=32)
    other = {"model": clip.CLIP(cfg, []).state_dict(), "vocabulary": [], "config": config.as_json(cfg)}
    checkpoint.save(other, tmp_path / "world/clip/model.pt")
    for words in (train, sample):
        out = run(*words, expect=1)
        assert "not the CLIP that made the embeddings, or trained anew since" in out and len(out.splitlines()) == 1
    train += ["--run_dir", tmp_path / "other", "--data", shutil.copytree(world / "emb", tmp_path / "unknown")]
    (tmp_path / "unknown/clip.json").unlink()  # without it the widths tell
    checkpoint.save({**other, "model": clip.CLIP(clip.Config(embed_width=8, text_width=32), []).state_dict(),
                     "config": {"embed_width": 8, "text_width": 32}}, tmp_path / "world/clip/model.pt")
    assert "embeddings are 8 wide, but 16 are needed" in run(*train, expect=1)


def test_the_default_is_the_papers_method_and_the_preset_has_its_table_3():
    cfg, table = train_prior.Config(), train_prior.Config(**train_prior.PRESETS["dalle2"])
    assert (cfg.objective, cfg.noise_schedule, cfg.timesteps, cfg.eta) == ("x0", "cosine", 1000, 1)
    assert (table.batch_size, table.steps, table.lr, table.weight_decay) == (4096, 600_000, 1.1e-4, 0.06)
    assert (table.optimizer, table.betas[1], table.eps) == ("adamw", 0.96, 1e-6)
    assert (table.width, table.depth, table.heads) == (2048, 24, 32)
    assert train_prior.SampleConfig.best_of == 2
