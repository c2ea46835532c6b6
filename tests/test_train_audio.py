"""Codec and token transformers against themselves computed another way, and the script as a user runs it."""
import functools
import itertools
import os
import random
import shutil
import sys

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import AUDIO as TINY
from helpers import Forked, differences, flags, follow, metrics, read_picture, write_voices
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import train_audio
from common import amp, checkpoint, config, data, dist, recordings
from train_audio import Config, Drawing, Stream, lay_out, targets

CPU, STAGES, KILLS = torch.device("cpu"), list(train_audio.STAGES), int(os.environ.get("KILLS", 1))
WORDS, COARSE, FINE = Stream("semantic", 1, 7), Stream("coarse", 2, 5), Stream("fine", 3, 5)
TEXTS = torch.tensor([[5, 3, 0, 0], [2, 2, 7, 1], [9, 0, 0, 0]])
Tokens = type("Tokens", (list,), {"frames": lambda tokens, row: len(tokens[row])})  # of recordings, as in a TokenCache
run = functools.partial(helpers.run, "train_audio")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of all four stages, by one command, on the recordings in voices/ beside it."""
    folder = tmp_path_factory.mktemp("world")
    (write_voices(folder / "voices") / "z.wav").write_bytes(b"")
    out = run(*flags(data=folder / "voices", run_dir=folder / "whole", **TINY))
    assert out.count("Trained") == out.count("1 recordings cannot be used and are left out") == 4
    assert out.count("The stages together") == 1 and "train_audio.py sample" in out
    assert "wrote out.wav" in follow(out, "--device", "cpu", "--seconds", 0.2)  # a text of the data
    return folder / "whole"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def awake(module, std=0.2):
    """`module`, in which no parameter is zero: those that start there would hide mistakes."""
    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=std)
    return module.eval()


def codec_of(**settings):
    codec = awake(train_audio.SoundStream(Config(stage="soundstream", **{**TINY, **settings}))).requires_grad_(False)
    codec.quantizer.initialize(codec.latents(torch.randn(20, 20 * codec.hop)).flatten(0, 1), 0)
    return codec


def transformer(*streams, **settings):
    settings |= {"max_text_len": 4} if settings.get("text", "none") != "none" else {"text": "none"}
    small = dict(stage=streams[-1].name, width=16, depth=2, heads=2, dropout=0.0)
    cfg = Config(**{**small, **settings})
    model = train_audio.TokenTransformer(cfg, streams)
    model.heads.data *= 5  # so that rounding does not decide what is most probable
    return awake(model, std=0.5)


def tokens_of(streams, *lengths):
    return [[torch.randint(stream.size, (length, stream.codes)) for stream, length in zip(streams, sample)]
            for sample in zip(*lengths)]


def batch_of(streams, samples, ended):
    inputs, places = zip(*(lay_out(streams, codes) for codes in samples))
    target = [targets(streams[-1], codes[-1], end) for codes, end in zip(samples, ended)]
    return pad_sequence([*inputs], True), torch.tensor(places), pad_sequence(target, True, -100)


@pytest.mark.parametrize("strides", [(4, 5, 8), (2, 3)])
def test_a_wave_keeps_its_length_and_nothing_depends_on_later_frames(strides):
    codec = codec_of(strides=strides)
    hop, wave = codec.hop, torch.randn(2, 13 * codec.hop - 3)
    frames, codes, made = codec.latents(wave), codec.encode(wave), codec.decode(codec.encode(wave))
    for n in (1, 5, 12):  # the beginning alone comes out as in the whole
        assert_close(codec.latents(wave[:, :n * hop]), frames[:, :n])
        assert torch.equal(codec.encode(wave[:, :n * hop]), codes[:, :n])
        assert_close(codec.decode(codes[:, :n]), made[:, :n * hop], rtol=1e-4, atol=1e-5)
    again, found, _ = codec(wave)  # every begun hop is a frame, and a wave keeps its length
    assert codes.shape == (2, 13, 4) and made.shape == (2, 13 * hop) and torch.equal(found, codes)
    assert_close(again, made[:, :13 * hop - 3])
    vectors = sum(codec.quantizer.codebook[q][codes[..., q]] for q in range(3))  # fewer codes, a lower bitrate
    assert_close(codec.decode(codec.encode(wave)[..., :3]), codec.waves(vectors))
    later = frames.clone()
    later[:, 5] += 1
    changes = [(codec.waves(later) - codec.waves(frames)).abs().amax(0).view(13, hop).amax(1)]
    for sample in (5 * hop, 6 * hop - 1):  # the first and the last of frame 5
        other = wave.clone()
        other[:, sample] += 1
        changes.append((codec.latents(other) - frames).abs().amax((0, 2)))
    assert all(change[:5].max() < 1e-5 and change[5] > 1e-3 and change[6:].max() > 1e-4 for change in changes)


@torch.no_grad()
def test_the_discriminator_of_spectra_sees_real_and_imaginary_parts_and_shrinks_as_in_the_paper():
    d, wave = train_audio.STFTDiscriminator(8, 256), torch.randn(3, 2048)
    spectrum = torch.stft(wave, 256, 64, window=torch.hann_window(256), return_complex=True)
    spectrum = spectrum[:, :128]
    assert_close(d.spectrum(wave), torch.stack([spectrum.real, spectrum.imag], 1))
    scores, features = d(wave)
    frames = spectrum.shape[2]  # 33; times are halved by every second unit, frequencies by each
    assert [tuple(x.shape[1:]) for x in features] == [
        (8, 128, frames), (16, 64, frames), (32, 32, frames // 2), (32, 16, frames // 2),
        (64, 8, frames // 4), (64, 4, frames // 4), (128, 2, frames // 8)]
    assert scores.shape == (3, frames // 8)
    assert not any(p.is_complex() for p in d.parameters())
    for other in (spectrum.conj(), 0.5 * spectrum):  # phase and magnitude both count
        d.spectrum = lambda wave, other=other: torch.stack([other.real, other.imag], 1)
        assert not torch.allclose(d(wave)[0], scores, rtol=1e-3)


def test_the_loss_of_waves_is_that_of_the_paper_added_up_over_frames_and_a_mean_over_samples():
    cfg = Config(stage="soundstream", mel_weight=1e-3, wave_weight=3.0, commitment_weight=0.5)
    fake, real, expected = torch.randn(4, 4096, requires_grad=True), torch.randn(4, 4096), 0
    for window in (64, 128, 256, 512, 1024, 2048):
        x, y = (recordings.stft_magnitude(wave, window, window // 4) @ recordings.mel_filters(8000, window, 64)
                for wave in (fake, real))
        logs = x.clamp(min=1e-3).log() - y.clamp(min=1e-3).log()
        expected = expected + (x - y).abs().sum((1, 2)) + (window / 2) ** 0.5 * logs.norm(dim=2).sum(1)
    found, none, twice = (train_audio.spectral_distance(*waves, 8000) for waves in (
        (fake, real), (real, real), (fake.repeat(1, 2), real.repeat(1, 2))))
    assert_close((found, twice), (expected, 2 * expected), rtol=0.02, atol=0)
    assert_close(found + none, expected, rtol=1e-3, atol=0)

    def loss(rows, real=real):
        return train_audio.reconstruction_loss(cfg, fake[rows], real[rows], torch.tensor(0.5))
    expected = 1e-3 * expected.mean() + 3 * (fake - real).abs().mean() + 0.25
    with torch.autocast("cpu", torch.bfloat16):
        assert_close((loss(slice(4)), (loss(slice(2)) + loss(slice(2, 4))) / 2), (expected, expected))
    loss(slice(4), torch.zeros(4, 4096)).backward()
    assert fake.grad.isfinite().all() and fake.grad.any()


def test_adversarial_losses_are_hinges_distances_of_features_and_a_penalty_and_leave_the_other_network_alone():
    cfg = Config(stage="soundstream", adversarial_weight=0.3, feature_weight=7.0, **TINY)
    d, fake, real = awake(train_audio.Discriminators(cfg)), torch.randn(4, 2000).requires_grad_(), torch.randn(4, 2000)
    wanted, own, penalty, parameters = 0, 0, 0, [*d.parameters()]
    for one in d.each:
        (score, found), (real_score, features) = one(fake), one(real)
        wanted += 0.3 * (1 - score).clamp(min=0).mean() / 4
        wanted += 7 * sum((x - y.detach()).abs().mean() for x, y in zip(found, features)) / len(features) / 4
        own += ((1 - real_score).clamp(min=0).mean() + (1 + score).clamp(min=0).mean()) / 4
        for wave in real.clone().split(1):
            gradient, = torch.autograd.grad(one(wave.requires_grad_())[0].sum(), wave, create_graph=True)
            penalty += 10 * gradient.square().sum() / 4 / 4
    (loss := train_audio.adversarial_loss(cfg, d, fake, real)).backward()
    gradient, = torch.autograd.grad(wanted, fake, retain_graph=True)
    assert_close((loss, fake.grad), (wanted, gradient), rtol=1e-3, atol=1e-5)
    assert not [p for p in parameters if p.grad is not None or not p.requires_grad]
    for weight, expected in ((0.0, own), (10.0, own + penalty)):
        loss, *halves = (train_audio.discriminator_loss(d, fake[rows], real[rows], weight)
                         for rows in (slice(4), slice(2), slice(2, 4)))
        assert_close((loss, sum(halves) / 2), (expected, expected), rtol=1e-3, atol=1e-5)
        ours, theirs = (torch.cat([p.flatten() for p in torch.autograd.grad(value, parameters, retain_graph=True)])
                        for value in (loss, expected))
        assert (ours - theirs).norm() < 1e-2 * theirs.norm() and not real.requires_grad
        assert torch.autograd.grad(loss, fake, allow_unused=True) == (None,)


def test_every_parameter_learns_and_only_the_codecs_own_pass_in_training_counts_codes(whole):
    cfg = Config(stage="soundstream", data=str(whole.parent / "voices"), quantizer_dropout=0.0, **TINY)
    task = train_audio.CodecTask(cfg, CPU)
    task.make_codebooks()
    quantizer, batch = awake(task.model).train().quantizer, task.recordings.fetch(np.arange(4))[0]
    loss, fake = task.loss(batch, True)
    loss.backward()
    after = [*quantizer.buffers(), *(p.grad for p in task.model.parameters())]
    before = [tensor.clone() for tensor in after]
    train_audio.discriminator_loss(task.discriminators, fake, batch["wave"], 10.0).backward()
    task.figures("validation")
    assert len(train_audio.write_sounds(task, "validation", "x")) == 8
    assert all(map(torch.equal, before, after)) and all(tensor.any() for tensor in after)
    assert all(p.grad is not None for p in task.discriminators.parameters())
    assert quantizer.pending_count.sum(1).tolist() == [4 * 20] * 4  # frames
    task.update_codebooks(False, 3)
    assert not quantizer.pending_count.any() and torch.equal(quantizer.codebook, before[1])


def test_the_layout_is_the_one_that_its_docstring_draws_and_each_code_has_a_row_of_its_own():
    words, codes, s, c = torch.tensor([[4], [0], [6]]), torch.tensor([[4, 1], [0, 4]]), 1, 1 + 1 + 7  # rows of <s>, <c>
    inputs, place = lay_out([WORDS, COARSE], [words, codes])
    assert inputs.tolist() == [s, s + 1 + 4, s + 1 + 0, s + 1 + 6, c, c + 1 + 4, c + 6 + 1, c + 1 + 0, c + 6 + 4]
    assert place == 4 and train_audio.offsets_of([WORDS, COARSE]) == [s, c, 20]
    assert targets(COARSE, codes, True).flatten().tolist() == [4, 1, 0, 4, 5, -100]  # from step 4 on; 5 is EOS
    assert targets(COARSE, codes, False).flatten().tolist() == [4, 1, 0, 4, -100, -100]
    for seed in range(5):
        sizes = np.random.default_rng(seed).integers((2, 1, 2, 1, 0), (9, 4, 9, 6, 5)).tolist()
        streams, owner = [Stream("semantic", 1, sizes[0]), Stream("coarse", *sizes[1:3])], [None]
        for s, stream in enumerate(streams):  # of each row of the table: (stream, quantizer, code), or just the stream
            owner += [(s,), *((s, q, code) for q in range(stream.codes) for code in range(stream.size))]
        assert transformer(*streams).embed.num_embeddings == len(owner)
        codes, = tokens_of(streams, sizes[3:4], sizes[4:])
        inputs, place = lay_out(streams, codes)
        first, second = ([(s,), *((s, q, code) for frame in part.tolist() for q, code in enumerate(frame))]
                         for s, part in enumerate(codes))
        assert [owner[row] for row in inputs.tolist()] == first + second and place == len(first)


def drift():
    codec = codec_of()
    codec.quantizer.codebook[2, 5, 1] += 1e-3 * dist.rank()
    dist.check_in_step({"model": codec}, 3)


def test_a_codebook_entry_that_is_other_on_one_rank_is_found(on_ranks):
    with pytest.raises(RuntimeError, match="by step 3: model of rank 1 not as on rank 0"):
        on_ranks(2, drift)


def crops_of(frames, rate, **settings):
    """TokenCrops of 40 frames of recordings of so many `frames`, in which each token is the number of its frame."""
    cfg = Config(**{**dict(stage="coarse", seconds=40 / rate, text="none"), **settings})
    caches = {"semantic": Tokens(np.arange(-(-n * 50 // rate))[:, None] for n in frames),
              "codes": Tokens(np.arange(n)[:, None] + np.arange(4) * 1000 for n in frames)}
    rates = {"semantic": 50, "codes": rate}
    streams = train_audio.streams_of(cfg, dict.fromkeys(rates, 10_000), 4)
    return train_audio.TokenCrops(cfg, range(len(frames)), streams, caches, rates)


@pytest.mark.parametrize("rate", [25, 50, 62.5, 80])
def test_codes_and_semantic_tokens_of_a_crop_are_of_the_same_time_and_only_true_ends_are_known(rate):
    crops = crops_of([200, 40, 31, 41], rate)
    for row, place in itertools.product(range(4), (0.0, 0.21, 0.499, 0.5, 0.77, 0.999)):
        (words, codes), ended = crops.crop(row, place)
        words, codes, (all_words, all_codes) = words[:, 0], codes[:, 0], [each[row] for each in crops.caches.values()]
        assert abs(codes[0] / rate - words[0] / 50) <= 0.5 / 50 + 1e-6 and len(codes) == min(40, len(all_codes))
        assert abs((codes[-1] + 1) / rate - (words[-1] + 1) / 50) <= 1 / 50 + 1e-6
        assert ended == (codes[-1] == len(all_codes) - 1) and (not ended or words[-1] == len(all_words) - 1)
    batch, good = crops.fetch([0, 1, 2, 3])
    assert good.all() and (batch["target"] == 10_000).nonzero().tolist() == [[1, 40, 0], [2, 31, 0]]
    drawn, _ = crops.fetch([0] * 2000, data.draws(np.arange(2000), 0))
    assert 2 < (drawn["target"] == 10_000).sum() < 30  # one place in 161
    (coarse, fine), _ = crops_of([9], rate, stage="fine", coarse_quantizers=1).crop(0)
    assert coarse.flatten().tolist() == [*range(9)] and fine[4].tolist() == [1004, 2004, 3004]
    crops = crops_of([9], 50)
    crops.caches["semantic"][0] = np.array([[5], [5], [3], [3], [3], [5], [4], [4], [4]])
    assert crops.crop(0)[0][0].tolist() == [[5], [3], [5], [4]] and len(crops.crop(0)[0][1]) == 9


@pytest.mark.parametrize("text", ["none", "prefix"])
@torch.no_grad()
def test_an_output_is_of_nothing_later_and_a_padded_sample_loses_what_it_does_alone(text):
    model, texts = transformer(WORDS, COARSE, text=text), None if text == "none" else TEXTS
    samples, ended, drop = tokens_of([WORDS, COARSE], [5, 1, 3], [2, 6, 0]), [True, False, True], torch.arange(3) == 1
    inputs, place, target = batch_of([WORDS, COARSE], samples, ended)
    outputs = model.run(inputs, condition := model.condition(texts, drop))
    for i in range(1, inputs.shape[1]):
        assert_close(model.run(inputs[:, :i], condition), outputs[:, :i], rtol=1e-4, atol=1e-5)
    sums, counts, right = model(inputs, place, target, texts, drop)
    for b, (words, codes) in enumerate(samples):
        wanted = torch.tensor(codes.flatten().tolist() + [5] * ended[b])
        scores = torch.stack([model.heads[i % 2] @ outputs[b, len(words) + 1 + i] for i in range(len(wanted))])
        assert_close(sums[b], F.cross_entropy(scores, wanted, reduction="sum"), rtol=1e-4, atol=1e-4)
        assert counts[b] == len(wanted) and right[b] == (scores.argmax(1) == wanted).sum()


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("text", ["none", "prefix"])
@torch.no_grad()
def test_cached_generation_in_an_uneven_batch_is_a_naive_loop_over_each_sample(text, scale):
    for streams in ([WORDS, COARSE], [COARSE, FINE]):
        model, seen, texts = transformer(*streams, text=text), [], None if text == "none" else TEXTS
        samples, step, Q = tokens_of(streams, [5, 2, 4], [3, 0, 1]), model.transformer.step, streams[-1].codes
        model.transformer.step = lambda *args, step=step, seen=seen: seen.append(step(*args)) or seen[-1]
        out, ended = train_audio.generate(model, samples, 6, [0, 1, 2], Drawing(0.0, 0, scale), texts)
        for b, codes in enumerate(samples):
            begun, own, mine = codes[-1].numel(), codes[-1].flatten().tolist(), texts if texts is None else texts[[b]]
            for i in range(begun, begun + 6 * Q):  # a code at a time, each from the whole sequence anew
                frames = torch.tensor(own + [0] * (-i % Q), dtype=torch.long).view(-1, Q)
                rows, place = lay_out(streams, [*codes[:-1], frames])
                x, null = (model.run(rows[None, :place + 1 + i], model.condition(mine, torch.tensor([drop])))[0, -1]
                           for drop in (False, True))
                if i > begun:  # the first is of the prompt's own pass
                    assert_close(seen[i - begun - 1][b], x, rtol=1e-3, atol=1e-4)
                scores = model.heads[i % Q] @ (null + scale * (x - null))
                scores[5] += -torch.inf if i % Q or not i else 0  # EOS is for a frame, and no recording is empty
                if scores.argmax() == 5:
                    break
                own.append(scores.argmax().item())
            assert out[b].flatten().tolist() == own and ended[b] == (len(own) < begun + 6 * Q)


@torch.no_grad()
def test_each_sample_ends_by_itself_at_the_start_of_a_frame_and_every_code_can_be_produced():
    model, uniform = transformer(COARSE, FINE), Drawing(1e4)  # as good as uniform
    samples = tokens_of([COARSE, FINE], [2] * 90, [0] * 60 + [1] * 30)
    out, ended = train_audio.generate(model, samples, 12, range(90), uniform)
    added = torch.tensor([len(one) - len(codes[-1]) for one, codes in zip(out, samples)])
    assert torch.equal(added < 12, torch.tensor(ended)) and len(added.unique()) > 8
    assert added[:60].min() == 1 and added[60:].min() == 0  # no recording is empty
    assert all(set(torch.cat(out)[:, q].tolist()) == set(range(5)) for q in range(3))
    assert not any(train_audio.generate(model, samples, 12, range(90), uniform, ends=False)[1])


@pytest.mark.parametrize("text", ["none", "prefix"])
def test_every_parameter_is_used_in_every_step_whatever_is_dropped(text):
    model = transformer(WORDS, COARSE, text=text).train()
    samples = tokens_of([WORDS, COARSE], [20] * 4, [9] * 4)
    given = *batch_of([WORDS, COARSE], samples, [False] * 4), TEXTS[:1].expand(4, -1)
    for drop in (True, False):
        model.zero_grad()
        model(*given, torch.full((4,), drop))[0].sum().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_codes_are_drawn_from_the_softmax_of_the_most_probable():
    scores, uniform = torch.tensor([0.0, 2.0, 1.0, -1.0, -torch.inf]).expand(20_000, 5), torch.rand(20_000)
    best = torch.tensor([-torch.inf, 2.0, 1.0, -torch.inf, -torch.inf]).softmax(0)
    for temperature, top_k, expected in ((0.7, 0, (scores[0] / 0.7).softmax(0)), (1.0, 9, scores[0].softmax(0)),
                                         (1.0, 2, best), (0.0, 0, torch.eye(5)[1]), (1.0, 1, torch.eye(5)[1])):
        drawn = train_audio.draw(scores, uniform, Drawing(temperature, top_k))
        assert_close(torch.bincount(drawn, minlength=5) / 20_000, expected, atol=0.015, rtol=0)
    assert train_audio.draw(scores[:2], torch.tensor([0.0, 1 - 2 ** -24]), Drawing(1.0)).tolist() == [1, 3]


@torch.no_grad()
def test_going_on_is_by_windows_of_the_trained_length_that_begin_with_the_half_before_alike_in_any_batch(monkeypatch):
    model, generate, calls = transformer(WORDS, COARSE, text="prefix"), train_audio.generate, []
    words, prompts = zip(*tokens_of([WORDS, COARSE], [4, 5, 6], [3, 0, 11]))
    monkeypatch.setattr(train_audio, "generate", lambda model, samples, frames, *rest: calls.append(
        (max(len(codes[-1]) for codes in samples), frames)) or generate(model, samples, frames, *rest))
    model.window, model.context = 8, 4
    for ends, goals, model.drawing in ((False, (30, 21, 25), Drawing(1.0, 6, 1.5)), (True, (40, 40, 40), Drawing(3.0))):
        pasts = []
        made = train_audio.go_on(model, lambda b, past, pasts=pasts: pasts.append((b, past)) or [
            words[b][len(past) // 4:]], prompts, goals, [1, 2, 3], TEXTS, ends)
        assert all(begun + 1 <= 8 and frames <= 8 for begun, frames in calls) and len(calls) > 4
        assert min(map(len, made)) < 40 >= max(map(len, made)) if ends else [*map(len, made)] == [*goals]
        for b, past in pasts:  # what a window leaves out is what was there, or made, before
            assert torch.equal(past, made[b][:len(past)]) and (len(past) % 4 == 0 or b == 2)
        for b, goal in enumerate(goals):
            alone, = train_audio.go_on(model, lambda _, past, b=b: [words[b][len(past) // 4:]], prompts[b:b + 1],
                                       [goal], [b + 1], TEXTS[b:b + 1], ends)
            assert torch.equal(alone, made[b]) and torch.equal(alone[:len(prompts[b])], prompts[b])


def words_of(whole, stage, folder, **settings):
    """The command line that trains one stage in `folder`, on the earlier stages of the run `whole`."""
    needs = {name: whole / name for name in ("soundstream", "semantic") if stage in train_audio.ONLY[name]}
    own = {name: value for name, value in TINY.items() if stage in train_audio.ONLY.get(name, STAGES)}
    return flags(**{**own, **needs, **dict(stage=stage, data=whole.parent / "voices", run_dir=folder), **settings})


def test_one_command_trains_all_stages_and_goes_on_from_the_middle_and_torchrun_loses_the_same(whole, tmp_path):
    words, before = flags(data=whole.parent / "voices", **TINY), [path.read_bytes() for path in whole.glob("*/*.pt")]
    out = run(*words, "--run_dir", whole)
    assert out.count("is finished, at step 6; to train on, give more --steps") == 4 and "The stages together" in out
    assert [path.read_bytes() for path in whole.glob("*/*.pt")] == before
    record = checkpoint.record_of(folder := shutil.copytree(whole / "soundstream", tmp_path / "middle/soundstream"))
    checkpoint.write_json({**record, "checkpoints": record["checkpoints"][1:]}, folder / "auto_resume.json")
    assert "at step 4 of 6" in run(*words_of(whole, "soundstream", folder.parent))  # when it has discriminators
    assert not differences(folder, whole / "soundstream")
    out, err = (process := helpers.start("train_audio", *words, "--run_dir", tmp_path, ranks=2)).communicate()
    assert process.returncode == 0 and out.count("2 rank(s) on cpu") == 4 and out.count("Next: ") == 1, out + err
    for stage in STAGES:
        ours, theirs = metrics(tmp_path / stage), metrics(whole / stage)
        assert [line["step"] for line in ours if "loss" in line] == [2, 4, 6] and "test_loss" in ours[-1]
        assert ours == [pytest.approx(line, rel=2e-3) for line in theirs]


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in STAGES for ranks in (1, 2)
                                           if ranks == 1 or stage == "soundstream" or KILLS > 1])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(stage, ranks, whole, tmp_path):
    words, usual, running = words_of(whole, stage, tmp_path / "killed"), whole, 0
    random.seed(f"{stage} {ranks}")
    if ranks > 1:
        Forked("train_audio", *words_of(whole, stage, usual := tmp_path / "whole"), ranks=ranks).finish()
    for number in range(KILLS):
        process, word = Forked("train_audio", *words, ranks=ranks), ("parameters", "step ")[(number + ranks) % 2]
        next((line for line in process.out if word in line), None)  # as it begins, or after its first evaluation
        sum(i * i for i in range(random.randint(0, 300_000)))
        running += process.kill()
    out = Forked("train_audio", *words, ranks=ranks).finish()
    assert running >= KILLS / 2 and not differences(usual / stage, tmp_path / "killed" / stage), out


def main():
    """The script on little built-in data; fp16 overflows once, on rank 1 of a run that is called disturbed."""
    disturbed, scale, losses = "disturbed" in " ".join(sys.argv) and dist.rank() == 1, torch.amp.GradScaler.scale, []
    torch.amp.GradScaler.scale = lambda scaler, loss: losses.append(loss) or scale(scaler, loss) * (
        float("inf") if disturbed and len(losses) == 12 else 1)  # of the codec at step 8, when it has discriminators
    amp.scaler = lambda device, precision: torch.amp.GradScaler(device.type, 64.0, enabled=precision == "fp16")
    train_audio.BUILTIN_ROWS = 40
    train_audio.main()


def test_an_fp16_overflow_on_one_rank_of_two_is_a_step_that_did_not_happen(whole, tmp_path):
    words, found = words_of(whole, "soundstream", "", precision="fp16", steps=8, penalty_every=9, log_every=1,
                            eval_every=0, init_from=whole / "soundstream/model.pt"), []
    for name, scales in (("usual", [(0, 64)] * 8), ("disturbed", [(0, 64)] * 7 + [(1, 32)])):
        Forked("test_train_audio", *words, "--run_dir", tmp_path / name, ranks=2).finish()
        lines, state = metrics(tmp_path / name / "soundstream"), checkpoint.load(
            tmp_path / name / "soundstream/checkpoints/step_00000008.pt")
        assert [(line.pop("overflows"), line.pop("scale")) for line in lines if "scale" in line] == scales
        found.append((lines, [state[part] for part in ("model", "ema", "discriminators", "step")]))
    assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)
    assert found[0][0] == [pytest.approx(line, rel=5e-3) for line in found[1][0]]


def test_gradient_penalties_do_not_drive_the_scale_of_fp16_down(whole, tmp_path):
    run(*words_of(whole, "soundstream", tmp_path, precision="fp16", steps=14, penalty_every=1, log_every=1,
                  quantize_after=1, eval_every=0))
    lines = [line for line in metrics(tmp_path / "soundstream") if "scale" in line]
    assert len(lines) == 14 and min(line["scale"] for line in lines) >= 4096


def test_built_in_syllables_are_trained_on_and_judged_alike_on_any_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(train_audio, "BUILTIN_ROWS", 40)
    settings = dict(run_dir=tmp_path, seconds=0.3, text="prefix", samples_from="both",
                    precision="bf16", validation=0.2, test=0.2)
    assert "wrote out.wav" in follow(run(*flags(**{**TINY, **settings})), "--device", "cpu", "--seconds", 0.2)
    for name in ("step_00000004_0", "step_00000004_online_0", "test_1", "test_online_1"):
        assert recordings.read(tmp_path / f"coarse/samples/{name}.wav")[0].any()
    one = config.read_json(tmp_path / "scores.json")
    words = flags(run_dir=tmp_path, eval_samples=4, batch_size=3, device="cpu")
    out = Forked("test_train_audio", "evaluate", *words, ranks=2).finish()
    assert out.count("The stages together") == 1
    assert one["semantic_syllable_accuracy"] > 0.4 and {"voice_kept_real", "text_heard"} < one.keys()
    assert one == pytest.approx(config.read_json(tmp_path / "scores.json"), rel=1e-3)


@pytest.mark.parametrize("stage, most", [("soundstream", 0.8), ("coarse", 0.1)])
def test_eight_clips_are_learned_by_heart(stage, most, whole, tmp_path):
    clips, others = write_voices(tmp_path / "clips", range(11)), write_voices(tmp_path / "others", range(4), 16_000)
    more = dict(width=48, dropout=0, seconds=1.5, steps=130) if stage == "coarse" else dict(
        channels=4, codec_width=32, seconds=0.2, steps=101, quantize_after=50, discriminator_after=100)
    out = run(*words_of(whole, stage, tmp_path, data=clips, val_data=others, test=0.1, eval_every=0, save_every=0,
                        lr=5e-3, log_every=20, chunk_size=8, batch_size=8, **more))
    assert "recordings of 16000 Hz are resampled to 8000" in out and metrics(tmp_path / stage)[4]["loss"] < most


def sampled(folder, **settings):
    """What `sample` prints, and the wave of the file that it writes."""
    given = dict(seconds=0.5, device="cpu", out=folder / "out.wav", **settings)
    return run("sample", *flags(**given)), torch.from_numpy(recordings.read(folder / "out.wav")[0])[0]


def test_sounds_go_through_the_codec_and_on_from_recordings_also_when_the_run_has_moved(whole, tmp_path):
    codec, voice = train_audio.load_soundstream(whole / "soundstream", CPU), min(whole.parent.glob("voices/*/*.wav"))
    wave = torch.from_numpy(recordings.read(voice)[0])
    for n in (1, 4):
        out, sound = sampled(tmp_path, run_dir=whole, reconstruct=voice, picture=tmp_path / "out.png", quantizers=n % 4)
        expected = codec.decode(codec.encode(wave)[..., :n])[0, :wave.shape[1]]
        assert_close(sound, expected, atol=1e-4, rtol=0)
        assert f"{n} codes a frame, {200 * n} bits a second, si_sdr_db" in out  # 4 bits a code, 50 frames a second
    assert_close(sound, codec(wave)[0][0], atol=1e-4, rtol=0)
    assert read_picture(tmp_path / "out.png").any()
    asked = dict(run_dir=whole, prompt=voice, prompt_seconds=0.3, temperature=1)
    usual, codes = sampled(tmp_path, **asked)[1], codec.encode(wave[:, -2400:])
    assert 2400 < len(usual) <= 2400 + 25 * 160 and len(usual) % 160 == 0
    moved = shutil.copytree(whole, tmp_path / "moved", ignore=shutil.ignore_patterns("auto_resume.json"))
    for stage in ("semantic", "coarse", "fine"):
        (moved / stage / "best.pt").write_bytes((moved / stage / "model.pt").read_bytes())
    for settings, alike in (({}, True), (dict(run_dir=moved, model="best.pt"), True), (dict(seed=1), False),
                            (dict(temperature=0), False), (dict(top_k="0,1,0"), False), (dict(weights="online"), None),
                            (dict(fine="false"), None)):
        sound = sampled(tmp_path, **{**asked, **settings})[1]
        prompt = codec.decode(codes[..., :2] if "fine" in settings else codes)[0]  # the decoder sees no future
        assert_close(sound[:2400], prompt, atol=1e-4, rtol=0)
        assert alike is None or torch.equal(sound, usual) == alike
    longest = codec.decode(codec.encode(wave[:, -19 * 160:]))[0]  # one frame less than the coarse stage is trained on
    assert_close(sampled(tmp_path, **{**asked, "prompt_seconds": 0})[1][:19 * 160], longest, atol=1e-4, rtol=0)
    assert len(sampled(tmp_path, run_dir=whole)[1]) > 0  # of nothing in particular


def test_several_sounds_of_texts_have_their_own_numbers_and_a_long_prompt_is_cut_with_a_note(whole, tmp_path):
    (tmp_path / "texts.txt").write_text("a i u\n\n o e\n")
    voice = min(whole.parent.glob("voices/*/*.wav"))
    words = flags(run_dir=whole, texts=tmp_path / "texts.txt", num_samples=2, prompt=voice, seconds=0.2, device="cpu",
                  temperature=1.5, out=tmp_path / "out.wav", picture=tmp_path / "out.png")
    out = run("sample", *words)
    assert "is cut to its last 0.38 s, as the coarse stage was trained on no more" in out and "wrote 4 sounds" in out
    assert len({(tmp_path / f"out_{k}.wav").read_bytes() for k in range(4)}) == 4 and (tmp_path / "out_3.png").is_file()


def test_sounds_of_texts_and_of_prompts_in_tokens_are_the_same_in_any_batch(whole, tmp_path, monkeypatch):
    given, generate = {}, train_audio.generate
    monkeypatch.setattr(train_audio, "generate", lambda model, *rest: given.update(  # of each stage, its first texts
        {model.streams[-1].name: rest[-2]} | given) or generate(model, *rest))
    sampled(tmp_path, run_dir=whole, text="a i u", temperature=1.5)
    assert (given["semantic"] > 0).sum(1).tolist() == [3] and given["coarse"] is given["fine"] is None
    pipeline, texts = train_audio.Pipeline(whole, CPU), ["a i u", "o e", "y"]
    for model in pipeline.models.values():
        model.drawing = Drawing(1.5)
    prompts = [pipeline.nothing(), *((torch.randint(8, (n, 1)), torch.randint(16, (2 * n, 4))) for n in (2, 5))]
    together = pipeline.speak(prompts, 0.6, [1, 2, 3], texts)
    for b, (prompt, text, codes) in enumerate(zip(prompts, texts, together)):
        alone, = pipeline.speak([prompt], 0.6, [b + 1], [text])
        assert torch.equal(alone, codes) and torch.equal(codes[:len(prompt[1])], prompt[1]) and len(codes) <= 30 + 10
        coarse, = pipeline.speak([prompt], 0.6, [b + 1], [text], fine=False)
        assert torch.equal(coarse, codes[:, :2])


def counted(model, most):
    """`most` {stream: frames}: the most that a pass of `model` sees from now on, of one sample."""
    rows, inside, step = [], model.run, model.step

    def count():
        for stream, first, last in zip(model.streams, model.offsets, model.offsets[1:]):
            tokens = sum(first < row < last for row in rows)  # not the start token
            most[stream.name] = max(most.get(stream.name, 0), -(-tokens // stream.codes))

    def run_and_count(inputs, *rest, **named):
        rows[:] = inputs[0].tolist()
        count()
        return inside(inputs, *rest, **named)

    def step_and_count(row, *rest):
        rows.append(row[0].item())
        count()
        return step(row, *rest)
    model.run, model.step = run_and_count, step_and_count
    return most


def test_a_sound_five_times_as_long_as_a_crop_shows_a_stage_no_more_than_its_training(whole):
    pipeline = train_audio.Pipeline(whole, CPU)
    voice, _ = recordings.read(min(whole.parent.glob("voices/*/*.wav")))
    prompt = pipeline.prompt(torch.from_numpy(voice[0]))
    found, trained = {}, {}
    for stage, model in pipeline.models.items():
        settings = config.read_json(whole / stage / "config.json")
        settings |= dict(text="none", run_dir=whole / stage, soundstream=whole / "soundstream",
                         semantic=whole / "semantic")
        cfg = Config(**config.from_dict(Config, settings, stage))
        crops, rows = train_audio.TokenTask(cfg, CPU, ()).parts["train"]
        samples = [crops.crop(row, place)[0] for row in rows for place in np.linspace(0, 0.99, 30)]
        trained[stage] = {stream.name: max(len(codes[i]) for codes in samples)
                          for i, stream in enumerate(model.streams)}
        model.heads.data[:, -1] = 0  # EOS is never the most probable
        model.drawing = Drawing(0.0)
        found[stage] = counted(model, {})
    for given in (pipeline.nothing(), prompt):
        sound, = pipeline.speak([given], 5 * 0.4, [0])
        assert len(sound) == len(given[1]) + 100 and sound.shape[1] == 4  # 50 frames a second
    for stage, most in found.items():
        assert most.keys() == trained[stage].keys()
        assert all(most[name] <= trained[stage][name] for name in most), (stage, most, trained)
    windows = found["coarse"]["coarse"], found["fine"]["fine"], found["fine"]["coarse"]
    assert windows == (20, 20, 20)  # no less than they may


@torch.no_grad()
def test_a_window_that_is_not_given_all_there_is_to_say_does_not_end_the_sound():
    model, words = transformer(WORDS, COARSE), torch.randint(7, (6, 1))
    model.window, model.context = 8, 4
    model.drawing = Drawing(1e4)  # as good as uniform: EOS comes soon
    nothing = [torch.zeros(0, 2).long()] * 40
    for left, ends in ((6, False), (4, True)):  # semantic tokens that are left in every window
        given = [words[:left]]
        made = train_audio.go_on(model, lambda *_, given=given: given, nothing, [30] * 40,
                                 range(40))
        assert (min(map(len, made)) < 30) == ends


def test_prompts_are_whole_frames_of_codes_and_of_semantic_tokens(whole):
    pipeline, wave = train_audio.Pipeline(whole, CPU), 0.1 * torch.randn(1037)
    pipeline.codec = codec_of(strides=(4, 5, 5))  # 12.5 ms a frame
    words, codes = pipeline.prompt(wave)
    assert torch.equal(codes, pipeline.codec.encode(wave[None, 37:])[0]) and len(codes) == 10
    tokens = pipeline.tokenizer.encode(wave[37:], 8000)
    assert len(tokens) == 7  # the last is mostly of silence
    assert words[:, 0].tolist() == train_audio.semantic.unique(tokens[:6]).tolist()


CODECS = {
    "encodec": dict(
        sampling_rate=8000, target_bandwidths=[0.4, 0.8], num_filters=2, hidden_size=8,
        codebook_size=16, upsampling_ratios=[5, 4, 4, 2]),
    "dac": dict(
        sampling_rate=8000, encoder_hidden_size=2, decoder_hidden_size=16, n_codebooks=4,
        codebook_size=16, codebook_dim=4, downsampling_ratios=[2, 4, 4, 2]),
    "mimi": dict(
        sampling_rate=8000, num_filters=2, hidden_size=16, num_quantizers=4, codebook_size=16,
        codebook_dim=8, vector_quantization_hidden_dimension=8, upsampling_ratios=[5, 4, 4],
        upsample_groups=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16),
}
FEWER = {  # how the packages are asked for two codes a frame
    "encodec": dict(bandwidth=0.4),
    "dac": dict(n_quantizers=2),
    "mimi": dict(num_quantizers=2),
}


def published(folder, kind, **settings):
    """A tiny random model of `kind` in `folder`, whose codes vary."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CODECS[kind], **settings})
    model = transformers.AutoModel.from_config(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("embed", "embed_sum")):  # codebooks
            torch.nn.init.normal_(tensor)
        elif tensor.requires_grad and kind == "encodec":  # as they start, biases outweigh the sound
            tensor.data += 0.4 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", CODECS)
@torch.no_grad()
def test_published_codecs_give_the_packages_own_codes_and_waves(kind, tmp_path):
    model, hop = published(tmp_path, kind), {"encodec": 160, "dac": 64, "mimi": 160}[kind]
    every = dict(bandwidth=0.8) if kind == "encodec" else {}
    for count, given in ((0, every), (4, every), (2, FEWER[kind])):
        codec = train_audio.load_soundstream(f"hf:{tmp_path}", CPU)
        assert (codec.rate, codec.hop, codec.codebook_size, codec.quantizers) == (8000, hop, 16, 4)
        checksum = codec.checksum
        train_audio.use_quantizers(codec, "--codec_quantizers", count)
        assert (codec.checksum != checksum) == (count == 2)  # other codes, other caches
        for samples in (13 * hop, 12 * hop + 1):
            wave = torch.randn(2, samples)
            padded = F.pad(wave, (0, 13 * hop - samples))
            theirs = model(padded[:, None], **given)
            codes = codec.encode(wave)
            assert codes.shape == (2, 13, count or 4) and (codes[:, 1:] != codes[:, :-1]).any()
            assert torch.equal(codes, theirs.audio_codes.view(2, -1, 13).transpose(1, 2))
            sound = codec.decode(codes)
            assert sound.shape == (2, 13 * hop)
            assert_close(sound, theirs.audio_values.view(2, -1))
        assert_close(codec.decode(codes[..., :1]).shape, sound.shape)


def test_published_codecs_that_do_not_fit_are_refused_and_odd_strides_keep_whole_frames(tmp_path):
    published(tmp_path / "odd", "dac", downsampling_ratios=[2, 5, 3])
    odd = train_audio.load_soundstream(f"hf:{tmp_path}/odd", CPU)
    assert odd.decode(odd.encode(torch.randn(1, 7 * 30))).shape == (1, 7 * 30)
    published(tmp_path / "stereo", "encodec", audio_channels=2)
    published(tmp_path / "chunks", "encodec", chunk_length_s=1.0, overlap=0.01, normalize=True)
    published(tmp_path / "good", "mimi")
    transformers = pytest.importorskip("transformers")
    transformers.HubertConfig().save_pretrained(tmp_path / "hubert")
    for name, settings, message in [
        ("stereo", {}, "a model of 2 channels; expected one"),
        ("chunks", {}, "a model that normalizes chunks of sound; expected"),
        ("hubert", {}, "a model of the kind hubert; expected encodec, dac, mimi"),
        ("none", {}, "none"),
        ("good", dict(codec_quantizers=5), "--codec_quantizers: 5, but the codec has 4"),
        ("good", dict(codec_quantizers=2), "--coarse_quantizers: 2, but the codec has 2"),
        ("good", dict(sample_rate=16_000), "--sample_rate: 16000, but the codec is of 8000")]:
        cfg = Config(**{**dict(stage="coarse", soundstream=f"hf:{tmp_path}/{name}"), **settings})
        with pytest.raises(config.UserError, match=message):
            train_audio.codec_of(cfg, CPU)


def test_published_models_take_the_place_of_codec_and_tokenizer(whole, tmp_path):
    published(tmp_path / "mimi", "mimi")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = transformers.WavLMConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=16, conv_dim=(8,) * 7)
    transformers.WavLMModel(small).save_pretrained(tmp_path / "wavlm")
    spec = f"hf:{tmp_path}/mimi"
    folder = tmp_path / "run"
    voice = min(whole.parent.glob("voices/*/*.wav"))
    settings = {name: value for name, value in TINY.items() if name not in train_audio.CODEC}
    settings |= dict(data=whole.parent / "voices", steps=2, run_dir=folder, coarse_quantizers=1)
    words = flags(**settings)
    models = dict(tokenizer=f"hf:{tmp_path}/wavlm:1", soundstream=spec, codec_quantizers=3)
    out = run(*words, *flags(**models))
    assert out.count("Trained") == 3 and "seconds_added" in out
    assert not (folder / "soundstream").exists()
    pipeline = train_audio.Pipeline(folder, CPU)
    codec = train_audio.load_soundstream(spec, CPU)
    wave = torch.from_numpy(recordings.read(voice)[0])
    codes = codec.encode(wave)[..., :3]
    assert torch.equal(pipeline.codes(wave[0]), codes[0])
    assert_close(pipeline.wave(codes[0]), codec.decode(codes)[0])
    assert len(sampled(tmp_path, run_dir=folder, prompt=voice, prompt_seconds=0.2)[1]) > 1600
    message = mistake(*words, "--soundstream", spec, "--channels", 4, status=1)
    assert "--channels: it needs a codec to train: no --soundstream" in message
    fewer = words_of(folder, "fine", folder, data=whole.parent / "voices", soundstream=spec,
                     coarse_quantizers=1, codec_quantizers=2)
    message = mistake(*fewer, status=1)
    assert "codec_quantizers is 3 there and 2 here" in message


def mistake(*words, status):
    lines = run(*words, expect=status).split("\n")
    lines = [line for line in lines if line and "it/s]" not in line]
    assert len(lines) == 1 and lines[0].startswith("train_audio.py: error: "), lines
    return lines[0]


@pytest.mark.parametrize("words, message", [
    *((f"--stage {stage} --{name}={config.as_word(getattr(Config, name))}",
       f"--{name}: it has no effect on --stage {stage}, only on {', '.join(stages)}")
      for stages, name in {stages: name for name, stages in train_audio.ONLY.items()}.items()
      for stage in STAGES if stage not in stages),
    ("--preset audiolm-fine --stage coarse", "--stage coarse: this preset is for --stage fine alone"),
    ("--stage semantic --text none --text_drop 0.2", "--text_drop: it needs --text prefix"),
    ("--stage semantic --text_drop 0 --guidance_scale 2", "--guidance_scale: it needs --text and --text_drop"),
    ("--stage soundstream --discriminator_after 1600 --stft_window 256", "--stft_window: it needs --discriminator_af"),
    ("--stage soundstream --crop_samples 895", "too short for a discriminator"),
    ("--seconds 0.01", "0.01 is shorter than a frame of 320 samples"), ("--steps 300", "before --quantize_after 300"),
    ("sample --out a.mp3", "--out: a.mp3: expected a name that ends in .wav"),
    ("sample --text a --quantizers 2", "--quantizers: it needs --reconstruct"),
    ("sample --text a --reconstruct a.wav", "--text: it needs a command without --reconstruct"),
    ("sample --top_k 0,-1,1", "is not 0 or more"), ("smaple", "expected one of train, evaluate, sample"),
], ids=str)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


def test_the_presets_of_audiolm_have_its_sizes_crops_and_tokens():
    for stage, seconds in (("semantic", 30), ("coarse", 10), ("fine", 3)):
        cfg = Config(**train_audio.PRESETS[f"audiolm-{stage}"])
        assert (cfg.stage, cfg.seconds, cfg.steps, cfg.batch_size) == (stage, seconds, 1_000_000, 256)
        assert (cfg.depth, cfg.heads, cfg.width, cfg.dropout) == (12, 16, 1024, 0.1)
        assert cfg.coarse_quantizers == 4
    semantic = train_audio.PRESETS["audiolm-semantic"]
    assert semantic["clusters"] == 1024 and semantic["tokenizer"] == "hf:facebook/w2v-bert-2.0:7"


def test_mistakes_that_runs_and_files_show_are_one_line_and_status_1(whole, tmp_path):
    voice, moved, short = min(whole.parent.glob("voices/*/*.wav")), tmp_path / "moved", tmp_path / "short.wav"
    recordings.write_wav(short, torch.zeros(159), 8000)
    for settings, message in [
        (dict(reconstruct=voice, quantizers=5), "the codec has 4"), (dict(prompt=short), "shorter than a frame of 160"),
        (dict(model="worst.pt"), "semantic/worst.pt: missing"),
        (dict(model="best.pt", weights="online"), "averaged weights alone; --weights online needs one of RUN/check"),
        (dict(text="a", run_dir=tmp_path), "semantic/model.pt: missing; train it first (--stage semantic)")]:
        assert message in mistake("sample", *flags(**dict(dict(run_dir=whole, device="cpu"), **settings)), status=1)
    for file, change, message in [
        ("semantic/model.pt", dict(text="none"), "--text: "), ("semantic/kmeans.pt", {}, "of another tokenizer than"),
        ("soundstream/model.pt", dict(seed=1), "of another codec than"),
        ("semantic/model.pt", dict(text_drop=0.0), "--guidance_scale: no stage of")]:
        state = checkpoint.load(path := shutil.copytree(whole, moved, dirs_exist_ok=True) / file)
        (path.parent / "auto_resume.json").unlink()  # it has the sha256 of what is changed
        weights = {name: value for name, value in state["model"].items() if not ("text" in change and "text" in name)}
        checkpoint.save({**state, "model": weights, "config": {**state.get("config", {}), **change}}, path)
        words = flags(run_dir=moved, text="a", device="cpu", **{} if "text" in change else {"guidance_scale": 2})
        assert message in mistake("sample", *words, status=1)
    silent = shutil.copytree(whole.parent / "voices", tmp_path / "silent", ignore=shutil.ignore_patterns("*.txt"))
    for stage, settings, message in [
        ("soundstream", dict(channels=3), "channels is 2 there and 3"), ("fine", dict(sample_rate=16_000), "give that"),
        ("semantic", dict(text="prefix", data=silent), "no transcripts"), ("fine", dict(coarse_quantizers=4), "has 4"),
        ("coarse", dict(semantic=whole / "semantic/model.pt"), "not a tokenizer: its kind is 'semantic'"),
        ("coarse", dict(soundstream=tmp_path), "train it first (--stage soundstream), or name a run")]:
        assert message in mistake(*words_of(whole, stage, whole, **settings), status=1)
