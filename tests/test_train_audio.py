"""Codec and token transformers against themselves computed another way, and the script as a user runs it."""
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Forked, check_loading, differences, flags, metrics, start
from helpers import run as run_script
from servers import needs, records_of

import train_audio
from common import accumulate, audio, checkpoint, config, data, dist, media, synthetic
from common.config import UserError
from train_audio import Config, Drawing, Stream, lay_out

CPU = torch.device("cpu")
CODEC = dict(channels=2, strides=(4, 5, 16), codec_width=16, quantizers=4, codebook_size=16, grouped_quantizers=0,
             wave_channels=1, stft_channels=2, stft_window=256)
TINY = dict(CODEC, grouped_quantizers=1, least_quantizers=2, steps=6, batch_size=4, chunk_size=2, seconds=0.5,
            eval_seconds=0.5, prompt_seconds=0.2, quantize_after=2, discriminate_after=0.5, penalty_every=2, width=16,
            depth=2, heads=2, coarse_quantizers=2, clusters=20, text_depth=1, text_vocabulary=12, eval_samples=4,
            eval_sounds=1, log_every=2, eval_every=4, save_every=2, warmup_steps=2, device="cpu")
STAGES = list(train_audio.STAGES)
COARSE = [Stream("semantic", 1, 7, 50), Stream("coarse", 2, 5, 50, 3)]
VOICED = [Stream("voice", 1, 3, 0), *COARSE]
FINE = [Stream("coarse", 2, 5, 50, 3), Stream("fine", 3, 5, 50, 3)]
RATES = [Stream("semantic", 1, 7, 40), Stream("coarse", 2, 5, 75, 3)]
LAYOUTS = ["flattened", "delay", "aligned"]


def run(*words, **settings):
    return run_script("train_audio", *words, **settings)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Data and runs that several tests look at

def write_voices(folder, rows=range(40), rate=16_000, text=True):
    """Recordings of a second by four speakers, SPEAKER/NUMBER.wav, with transcripts beside."""
    for row in rows:
        syllables = list(synthetic.SYLLABLES)
        words = " ".join(syllables[(7 * row + 3 * i) % len(syllables)] for i in range(4))
        wave, _ = synthetic.speak(words, speaker=row % 4, take=row)
        path = folder / f"voice_{row % 4}/{row:03d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        audio.write_wav(path, audio.resample(torch.from_numpy(wave), 16_000, rate), rate)
        if text:
            path.with_suffix(".txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    return write_voices(tmp_path_factory.mktemp("data") / "voices")


@pytest.fixture(scope="module")
def whole(voices):
    """The folder of a run of all four stages, by one command of torchrun on two ranks, and what it printed."""
    folder = voices.parent / "whole"
    process = start("train_audio", *flags(data=voices, run=folder, **TINY), ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    (folder / "out.txt").write_text(out)
    return folder


def moved(whole, folder, *leave_out, to=None):
    """A copy of the run of all stages, whose files name one another in their new place, or in another, `to`."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoints", "samples", *leave_out))
    for path in folder.glob("*/model.pt"):
        state = checkpoint.load(path)
        if state["kind"] == "soundstream":
            continue  # its checksum is what tells it from others
        for name in ("run", "soundstream", "semantic"):
            state["config"][name] = state["config"][name].replace(str(whole), str(to or folder))
        checkpoint.save(state, path)
    return folder


def settings_of(stage, **settings):
    """The Config of a stage as the command line makes it."""
    return Config(**{**train_audio.STAGES[stage], **TINY, **settings, "stage": stage})


def codec_of(seed=0, **settings):
    """A codec of random weights and codebooks, that fit its frames."""
    torch.manual_seed(seed)
    codec = train_audio.SoundStream(Config(**{**CODEC, "stage": "soundstream", **settings})).eval()
    with torch.no_grad():
        codec.quantizer.initialize(codec.latents(noise(20, 20 * codec.hop)).flatten(0, 1), 0)
    return codec


def noise(batch, samples, seed=1):
    return 0.3 * torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed))


def codec_task(monkeypatch, **settings):
    """(task, its plan, a batch of chunks) of a codec in training on built-in syllables."""
    monkeypatch.setattr(train_audio, "BUILTIN_ROWS", 24)
    cfg = settings_of("soundstream", **{**dict(split_by="file", validation=0.2, test=0.2, seconds=0.2), **settings})
    task = train_audio.CodecTask(cfg, CPU)
    task.wrap()
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    return task, plan, [task.recordings.fetch(np.arange(c.start, c.stop))[0] for c in plan]


def token_task(whole, stage, **settings):
    """A stage's task on the data and the earlier stages of the run `whole`, whose token caches serve it."""
    cfg = json.loads((whole / stage / "config.json").read_text())
    del cfg["versions"]
    cfg = config.from_dict(Config, cfg, stage)
    decided = checkpoint.load(whole / stage / "model.pt")["config"]
    given = dict(run=str(whole / stage), soundstream=decided["soundstream"], semantic=decided["semantic"],
                 text=decided["text"])
    cfg = dataclasses.replace(Config(**cfg), **{**given, **settings})
    task = train_audio.TokenTask(cfg, CPU)
    task.wrap()
    return task


def transformer(streams, vocabulary=0, embed_width=0, seed=0, **settings):
    """A token transformer whose weights are all drawn anew: at their start its blocks are the identity."""
    stage = {"semantic": "semantic", "coarse": "coarse", "fine": "fine"}[streams[-1].name]
    cfg = Config(**{**dict(stage=stage, width=16, depth=2, heads=2, text="none", max_text_len=4, text_depth=1,
                           mask_past=0.0, layout="delay"), **settings})
    torch.manual_seed(seed)
    model = train_audio.TokenTransformer(cfg, streams, vocabulary, embed_width)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, *((1.0, 0.2) if p.ndim == 1 else (0.0, 1.0 if "bias" in name else 0.3)))
    with torch.no_grad():
        model.embed.weight[0] = 0
    if model.within and streams[-1].width:
        model.stand_for(torch.randn(streams[-1].codes, streams[-1].size, streams[-1].width))
    return model.eval()


def tokens_of(streams, lengths, seed=0):
    """(codes, lengths) as `lay_out` takes them, of random codes; `lengths` (S, B)."""
    random_ = np.random.default_rng(seed)
    made = [[torch.from_numpy(random_.integers(stream.size, size=(length, stream.codes))) for length in row]
            for stream, row in zip(streams, lengths)]
    return tuple(zip(*map(train_audio.pad, made)))


# Codec

@pytest.mark.parametrize("settings", [dict(), dict(residual_units=3, strides=(2, 3)),
                                      dict(residual_units=2, strides=(4, 5))], ids=str)
def test_chunk_by_chunk_gives_what_the_whole_does(settings):
    codec = codec_of(**settings)
    wave = noise(2, 13 * codec.hop - 3)
    whole_frames, whole_codes = codec.latents(wave), codec.encode(wave)
    whole_wave = codec.decode(whole_codes)
    assert whole_wave.std() > 0.01
    for frames in (1, 3, 5):
        hear, speak, encode = {}, {}, {}
        parts = wave.split(frames * codec.hop, 1)
        latents = torch.cat([codec.latents(part, hear) for part in parts], 1)
        codes = torch.cat([codec.encode(part, memory=encode) for part in parts], 1)
        waves = torch.cat([codec.decode(part, speak) for part in whole_codes.split(frames, 1)], 1)
        torch.testing.assert_close(latents, whole_frames, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(waves, whole_wave, rtol=1e-5, atol=1e-5)
        assert torch.equal(codes, whole_codes)


def test_sounds_of_any_length_become_codes_and_waves_by_passes_of_few_lengths():
    codec, passes = codec_of(), {"latents": set(), "waves": set()}
    waves = [noise(2, n) for n in (1, 5 * codec.hop, 31 * codec.hop + 1, 32 * codec.hop, 70 * codec.hop + 3)]
    wanted = [codec.quantizer.encode(codec.latents(wave)) for wave in waves]
    sounds = [codec.waves(codec.quantizer.decode(codes)) for codes in wanted]
    for name, lengths in passes.items():
        method = getattr(codec, name)
        setattr(codec, name, lambda x, *rest, m=method, seen=lengths: (seen.add(x.shape[1]), m(x, *rest))[1])
    for wave, codes, sound in zip(waves, wanted, sounds):
        assert torch.equal(codec.encode(wave), codes)
        torch.testing.assert_close(codec.decode(codes), sound, rtol=1e-5, atol=1e-6)
    assert passes == {"latents": {32 * codec.hop, 96 * codec.hop}, "waves": {32, 96}}


def test_nothing_depends_on_what_comes_later():
    codec = codec_of()
    wave = noise(1, 12 * codec.hop)
    other = wave.clone()
    other[:, 5 * codec.hop:] += 0.1
    frames, others = codec.latents(wave), codec.latents(other)
    torch.testing.assert_close(frames[:, :5], others[:, :5], rtol=1e-5, atol=1e-6)
    assert (frames - others)[:, 5:].abs().amax(2).min() > 1e-4
    there, back = codec.waves(frames), codec.waves(torch.cat([frames[:, :5], others[:, 5:] + 1], 1))
    torch.testing.assert_close(there[:, :5 * codec.hop], back[:, :5 * codec.hop], rtol=1e-5, atol=1e-6)
    assert (there - back)[:, 5 * codec.hop:].abs().max() > 1e-3


@pytest.mark.parametrize("stride", [2, 5])
def test_upsampling_is_a_transposed_convolution_cut_to_the_past(stride):
    layer, x = train_audio.CausalUpsample(3, 4, stride), torch.randn(2, 7, 3)
    torch.nn.init.normal_(layer.bias)
    now, before = (part.weight.view(stride, 4, 3) for part in (layer.own, layer.earlier))  # (stride, out, in)
    taps = torch.cat([now, before]).permute(2, 1, 0)  # (in, out, 2 * stride)
    wanted = F.conv_transpose1d(x.transpose(1, 2), taps, layer.bias, stride)[..., :7 * stride].transpose(1, 2)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [
    {}, dict(strides=(8, 5, 4, 2), channels=12), dict(channels=4, codec_width=160), dict(residual_units=3),
    dict(sample_rate=24_000, strides=(3, 5, 5))])
def test_a_codec_starts_as_a_transform_coder_that_speech_passes(settings):
    torch.manual_seed(0)
    codec = train_audio.SoundStream(Config(stage="soundstream", **settings))
    speech = torch.stack([torch.from_numpy(wave[8000:16000]) for wave in synthetic.syllables(range(8))[0]])
    with torch.no_grad():
        silent = audio.si_sdr(codec.waves(codec.latents(speech))[:, :8000], speech).mean()
        assert train_audio.initialize(codec) is codec
        latents = codec.latents(speech)
        passed = audio.si_sdr(codec.waves(latents)[:, :8000], speech).mean()
    assert silent < 0 and passed > 4 and 0.3 < latents.std() < 3


@pytest.mark.parametrize("strides", [(2, 4, 5), (3,), (2, 2)])
def test_every_begun_hop_is_a_frame_and_the_wave_keeps_its_length(strides):
    codec = codec_of(strides=strides)
    for samples in (1, codec.hop - 1, codec.hop, codec.hop + 1, 4 * codec.hop + 2):
        wave, frames = noise(2, samples), math.ceil(samples / codec.hop)
        assert codec.encode(wave).shape == (2, frames, 4) and codec(wave)[0].shape == wave.shape
        assert codec.decode(codec.encode(wave)).shape == (2, frames * codec.hop)


@pytest.mark.parametrize("settings", [
    dict(), dict(grouped_quantizers=4, group_codebooks="learned"), dict(grouped_quantizers=2)], ids=str)
def test_the_first_codes_decode_to_the_pass_with_as_many_quantizers(settings):
    codec, grouped = codec_of(**settings), settings.get("grouped_quantizers", 0)
    wave = noise(2, 5 * codec.hop)
    codes, waves = codec.encode(wave), []
    assert codes.shape == (2, 5, 4 + 7 * grouped)  # eight pairs of channels
    for count in (1, 2, 4):
        made, found, _ = codec(wave, count)
        assert torch.equal(found, codes[..., :count + 7 * max(0, count - 4 + grouped)])
        assert torch.equal(found, codec.encode(wave, count))
        torch.testing.assert_close(codec.decode(found), made, rtol=1e-5, atol=1e-6)
        waves.append(made)
    assert not torch.allclose(waves[0], waves[1]) and not torch.allclose(waves[1], waves[2])


def test_complex_convolution_is_torchs():
    layer, x = train_audio.ComplexConv2d(3, 5, (3, 4), (2, 1), 1), torch.randn(2, 6, 8, 9)
    torch.nn.init.normal_(layer.bias)
    wanted = F.conv2d(torch.complex(*x.chunk(2, 1)), torch.complex(layer.real, layer.imaginary),
                      torch.complex(*layer.bias.chunk(2)), (2, 1), 1)
    torch.testing.assert_close(layer(x), torch.cat([wanted.real, wanted.imag], 1), rtol=1e-5, atol=1e-5)


def test_mod_relu_moves_the_magnitude_and_keeps_the_phase():
    act, x = train_audio.ModReLU(), torch.randn(2, 6, 4, 4)
    act.bias.data.fill_(-0.8)
    before, after = (torch.complex(*y.chunk(2, 1)) for y in (x, act(x)))
    torch.testing.assert_close(after.abs(), (before.abs() - 0.8).clamp(min=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, torch.polar(after.abs(), before.angle()), rtol=1e-4, atol=1e-5)


def test_mod_relu_is_finite_in_fp16_too_for_silence_and_for_loud_sounds():
    x = torch.tensor([0.0, 1e-4, 1.0, 300.0], dtype=torch.float16).view(1, 4, 1, 1).repeat(1, 2, 1, 1).requires_grad_()
    out = train_audio.ModReLU()(x)
    out.float().sum().backward()
    assert out.dtype == torch.float16 and torch.equal(out, x) and x.grad.isfinite().all()


@pytest.mark.parametrize("emphasis", [0.0, 0.5])
def test_losses_of_waves_are_those_of_the_formulas_after_pre_emphasis(emphasis):
    cfg = settings_of("soundstream", pre_emphasis=emphasis, mel_weight=0.7, mel_floor=0.3, l1_weight=3.0,
                      sdr_weight=0.2)
    fake, real = noise(2, 3000), noise(2, 3000, seed=2)
    given = fake.clone(), real.clone()
    ours = train_audio.reconstruction_loss(cfg, fake, real, torch.tensor(0.5))
    assert torch.equal(fake, given[0]) and torch.equal(real, given[1])  # the caller's stay
    one, other = (np.array([[wave[t] - emphasis * wave[t - 1] for t in range(1, 3000)] for wave in waves.tolist()])
                  for waves in given)
    if not emphasis:
        one, other = (waves.double().numpy() for waves in given)
    decibels = 10 * np.log10(((one - other) ** 2).mean(1) / (other ** 2).mean(1)).mean()
    expected = (0.7 * audio.spectral_loss(*given, cfg.sample_rate, 0.3).mean().item() + 3 * np.abs(one - other).mean()
                + 0.2 * decibels + cfg.commitment_weight * 0.5)
    assert ours.item() == pytest.approx(expected, rel=1e-4)


def test_losses_of_waves_are_in_fp32_under_autocast_and_finite_for_silence():
    cfg = settings_of("soundstream")
    fake, silence = noise(2, 3000).requires_grad_(), torch.zeros(2, 3000)
    plain = train_audio.reconstruction_loss(cfg, fake, silence, torch.tensor(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert train_audio.reconstruction_loss(cfg, fake, silence, torch.tensor(0.5)).item() == plain.item()
    plain.backward()
    assert plain.isfinite() and fake.grad.isfinite().all() and fake.grad.any()


# Discriminators

def critics_of():
    return train_audio.Discriminators(Config(**CODEC, stage="soundstream"))


def test_losses_of_the_discriminators_are_the_hinge_ones_and_the_penalty_is_that_of_each_sample():
    critics, real, fake = critics_of(), noise(3, 2000, 1), noise(3, 2000, 2)
    own, adversarial, feature = critics(real, fake, 10.0)
    wanted = torch.zeros(3)
    for one in critics.each:
        leaf = real.clone().requires_grad_()
        (score, features), (fake_score, fakes) = one(leaf), one(fake)
        penalty = 0.0
        for b in range(3):  # by itself: a sample's score depends on that sample alone
            alone = real[b:b + 1].clone().requires_grad_()
            gradient, = torch.autograd.grad(one(alone)[0].sum(), alone)
            penalty += gradient.square().sum() / 3
        wanted += torch.stack([(1 - score).relu().mean() + (1 + fake_score).relu().mean() + 10 * penalty,
                               (1 - fake_score).relu().mean(),
                               sum((a - b).abs().mean() for a, b in zip(features, fakes)) / len(fakes)]).detach() / 4
    torch.testing.assert_close(torch.stack([own, adversarial, feature]).detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_doubled_with_copies_has_the_same_losses_and_penalty():
    critics, real, fake = critics_of(), noise(2, 2000, 1), noise(2, 2000, 2)
    for weight in (0.0, 10.0):
        for one, two in zip(critics(real, fake, weight), critics(real.repeat(2, 1), fake.repeat(2, 1), weight)):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert critics(real, fake, 10.0)[0] > critics(real, fake)[0] + 1e-4


READY = dict(quantize_after=0, discriminate_after=0.0, quantizer_dropout=0.0, warmup_steps=0,
             discriminator_warmup_steps=0)


def gradients(task, plan, batch):
    """What a step's backward passes leave to each optimizer, and to a codec's codebooks, before it is taken."""
    found = []

    def look(*_):
        found.extend([p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
                     for optimizer in task.state.optimizers)
        if isinstance(task, train_audio.CodecTask):
            found.append([task.model.quantizer.pending_sum.clone()])
        return torch.zeros(2), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_audio.amp, "step", look)
        return found, task.update(plan, batch)[0]


def close(one, other, rtol=1e-4):
    """Whether two lists of gradients agree, to a share of their length: some entries of it are sums that cancel."""
    one, other = (torch.cat([gradient.flatten() for gradient in found]) for found in (one, other))
    return (one - other).norm() <= rtol * other.norm()


def test_codec_and_discriminators_get_the_gradients_of_their_own_losses_alone(monkeypatch):
    """One pass serves both, but it must be as if each had its own, by the formula, with the other held constant."""
    task, plan, batch = codec_task(monkeypatch, chunk_size=4, **READY)
    task.make_codebooks()
    real, codec, critics, cfg = batch[0]["wave"], task.model, task.discriminators, task.cfg
    (ours, critics_ours, _), _ = gradients(task, plan, batch)
    fake, _, commitment = codec(real)
    own, adversarial, feature = critics(real, fake, 0.0)
    loss = train_audio.reconstruction_loss(cfg, fake, real, commitment)
    loss = loss + cfg.adversarial_weight * adversarial + cfg.feature_weight * feature
    parameters = [[p for group in opt.param_groups for p in group["params"]] for opt in task.state.optimizers]
    assert close(ours, torch.autograd.grad(loss, parameters[0], retain_graph=True))
    own = critics(real, fake.detach(), cfg.penalty_weight)[0]  # step 0 has a penalty
    assert close(critics_ours, torch.autograd.grad(own, parameters[1]))


def test_the_discriminators_pass_leaves_codec_and_codebooks_alone_and_the_codecs_the_discriminators(monkeypatch):
    task, plan, batch = codec_task(monkeypatch, **READY)
    task.make_codebooks()
    codec, critics = task.model.train(), task.discriminators
    fake, _, _ = codec(batch[0]["wave"])
    counted, book = codec.quantizer.pending_count.clone(), codec.quantizer.codebook.clone()
    gradient = task.discriminate(batch[0]["wave"], fake, plan[0], 10.0)
    assert all(p.grad is None for p in codec.parameters()) and gradient.shape == fake.shape and gradient.any()
    assert torch.equal(codec.quantizer.pending_count, counted) and torch.equal(codec.quantizer.codebook, book)
    theirs = [p.grad.clone() for p in critics.parameters()]
    (fake * gradient).sum().backward()
    assert all(torch.equal(p.grad, before) for p, before in zip(critics.parameters(), theirs))
    assert all(p.grad is not None for name, p in codec.named_parameters())


def test_each_optimizer_is_clipped_by_the_norm_of_its_own_and_no_gradient_is_left_over(monkeypatch):
    task, plan, batch = codec_task(monkeypatch, max_grad_norm=1e-3, discriminator_max_grad_norm=2e-3, **READY)
    (*found, _), _ = gradients(task, plan, batch)
    seen, norms, step = {}, [], train_audio.amp.step
    for optimizer, name in zip(task.state.optimizers, ("codec", "critics")):
        optimizer.register_step_pre_hook(lambda opt, *_, name=name: seen.update({name: torch.stack([
            p.grad.norm() for group in opt.param_groups for p in group["params"]]).norm().item()}))
    monkeypatch.setattr(train_audio.amp, "step", lambda *args: norms.append(result := step(*args)) or result)
    task.update(plan, batch)
    wanted = [torch.stack([g.norm() for g in group]).norm() for group in found]
    torch.testing.assert_close(norms[0][0], torch.stack(wanted), rtol=1e-4, atol=1e-6)
    assert seen == pytest.approx({"codec": 1e-3, "critics": 2e-3}, rel=1e-3)
    assert not [p for module in (task.model, task.discriminators) for p in module.parameters() if p.grad is not None]


def test_discriminators_wait_for_their_turn_and_have_a_schedule_of_their_own(monkeypatch):
    task, plan, batch = codec_task(monkeypatch, steps=8, discriminate_after=0.5, discriminator_lr=1e-3,
                                   discriminator_warmup_steps=2, cosine=False)
    rates, moves = [], []
    for _ in range(7):
        before = [p.clone() for p in task.discriminators.parameters()]
        task.update(plan, batch)
        rates.append(task.discriminator_optimizers[0].param_groups[0]["lr"])
        moves.append(any(not torch.equal(a, b) for a, b in zip(before, task.discriminators.parameters())))
    assert moves == [False] * 4 + [True] * 3 and rates[4:] == pytest.approx([5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("chunk_size", [2, 3])
def test_chunking_leaves_the_codecs_gradients_and_codebooks_as_they_are(chunk_size, monkeypatch):
    found, state = [], None
    for size in (4, chunk_size):
        task, plan, batch = codec_task(monkeypatch, chunk_size=size, **READY)
        if not state:
            task.make_codebooks()
            state = task.model.state_dict()
        task.model.load_state_dict(state)
        parts, loss = gradients(task, plan, batch)
        found.append((*parts, [loss]))
    assert all(close(one, other) for one, other in zip(*found, strict=True))


def test_the_codebooks_begin_by_kmeans_at_their_step_and_every_code_is_in_use(monkeypatch):
    task, plan, batch = codec_task(monkeypatch)
    ready, frames = [], torch.zeros(0)
    for _ in range(4):
        task.update(plan, batch)
        ready.append(task.model.quantizer.ready)
        if len(ready) == 2:
            frames = task.model.latents(batch[0]["wave"]).flatten(0, 1)
            assert torch.equal(task.model(batch[0]["wave"])[0], task.model.waves(
                task.model.latents(batch[0]["wave"]))[:, :3200])  # so far the plain autoencoder
    assert ready == [False, False, True, True] and task.model.quantizer.ema_count[0].gt(0).all()
    assert len(frames) and task.state.average.state_dict()["quantizer.initialized"]


def test_figures_and_sounds_leave_the_codec_in_the_mode_they_found_it_in(monkeypatch, tmp_path):
    task, _, _ = codec_task(monkeypatch, **READY, eval_samples=3)
    task.cfg = dataclasses.replace(task.cfg, run=str(tmp_path))
    task.make_codebooks()
    heard, rows = task.parts["validation"]
    for mode in (True, False):
        task.model.train(mode)
        before = {name: value.clone() for name, value in task.model.state_dict().items()}
        figures = task.figures("validation")
        made = task.write_sounds("validation", f"{mode}")
        assert task.model.training == mode and all(p.grad is None for p in task.model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
        assert not task.model.quantizer.pending_count.any()
    assert [name for name in figures if "@" in name and "si_sdr" in name] == [f"si_sdr_db@{n}" for n in (1, 2, 4)]
    assert {f"codebook_perplexity@{n}" for n in (1, 2, 3, 4)} < figures.keys()
    wave = heard.wave(int(rows[0]))
    sound, rate = audio.read(tmp_path / "samples/True_0.wav")
    assert rate == 16_000 and sound.shape == (1, len(wave))
    assert media.read_png(tmp_path / "samples/True_0.png").shape[2] == 3
    assert {name for name in made if name.startswith("samples/False_0")} == {
        f"samples/False_0{name}" for name in (".wav", ".png", "_real.wav", "_real.png")}
    assert all((tmp_path / name).is_file() and caption.startswith("syllables ") for name, caption in made.items())


def test_figures_of_the_codec_are_means_over_recordings(monkeypatch):
    task, _, _ = codec_task(monkeypatch, **READY, eval_samples=0, chunk_size=2)
    task.make_codebooks()
    heard, rows = task.parts["validation"]
    assert len(rows) % 2
    codec, figures = task.model.eval(), task.figures("validation")
    for count in (2, 4):  # of 4, the last of which has groups
        values = []
        for row in rows:
            wave = heard.fetch([row])[0]["wave"]
            values.append(audio.si_sdr(codec.decode(codec.encode(wave, count))[:, :wave.shape[1]], wave).item())
        assert figures[f"si_sdr_db@{count}"] == pytest.approx(np.mean(values), rel=1e-4)
    assert figures["si_sdr_db@2"] != figures["si_sdr_db@4"]


def test_perplexity_counts_the_frames_of_recordings_and_not_their_padding(monkeypatch):
    task, _, _ = codec_task(monkeypatch, **READY, eval_samples=0, chunk_size=3, eval_seconds=20.0)
    task.make_codebooks()
    codec, used = task.model.eval(), torch.zeros(11, task.cfg.codebook_size)
    heard, rows = task.parts["validation"]
    for row in map(int, rows):
        for q, column in enumerate(codec.encode(heard.wave(row)[None])[0].T):
            used[q] += torch.bincount(column, minlength=task.cfg.codebook_size)
    share = used / used.sum(1, keepdim=True)
    figures = task.figures("validation")
    used = torch.special.entr(share).sum(1).exp()
    assert len(used[3:].unique()) > 1  # of the groups of the last quantizer, the one least in use
    for q, value in enumerate([*used[:3].tolist(), used[3:].min().item()], 1):
        assert figures[f"codebook_perplexity@{q}"] == pytest.approx(value, rel=0.02)


# Codec on several ranks

def trained_codebooks(precision="fp32", poison=None):
    """Four steps of a tiny codec, k-means and discriminators included: codebooks, weights, what became of the steps."""
    with pytest.MonkeyPatch.context() as patch:
        task, plan, batch = codec_task(patch, precision=precision, **(
            dict(READY, seconds=0.1, penalty_weight=0.0) if poison else dict(discriminate_after=0.5)))
    inject, taken, state = [False], [], task.state
    next(task.model.parameters()).register_hook(lambda g: g * torch.inf if inject[0] and dist.rank() == 1 else g)

    def everything():
        return [value.clone() for part in (*state.modules.values(), state.average)
                for value in part.state_dict().values()]
    if poison:
        state.scaler.scale(torch.ones(()))  # so that it has a scale, which is then one that does not overflow
        state.scaler.update(8.0)
    for number in range(4):
        inject[0], before, step, scale = number == poison, everything(), state.step, state.scaler.get_scale()
        took = task.update(plan, batch)[3]
        same = all(torch.equal(a, b) for a, b in zip(before, everything()))
        taken.append((took, state.step - step, same, state.scaler.get_scale() / scale))
        dist.check_in_step(state.modules, state.step)
        assert not task.model.quantizer.pending_count.any()
    weights = torch.cat([p.detach().flatten() for p in task.model.parameters()])
    return task.model.quantizer.codebook.numpy(), task.model.quantizer.ema_count.numpy(), weights.numpy(), taken


def test_codebooks_are_the_same_on_all_ranks_and_up_to_rounding_on_any_number_of_them(on_ranks):
    one, (two, other) = trained_codebooks(), on_ranks(2, trained_codebooks)
    for alone, first, second in zip(one[:3], two[:3], other[:3]):
        assert first.tobytes() == second.tobytes()
        np.testing.assert_allclose(first, alone, rtol=1e-3, atol=1e-5)
    assert [took for took, *_ in one[3]] == [True] * 4


def test_fp16_overflow_on_one_rank_of_two_is_a_step_that_did_not_happen(on_ranks):
    usual, skipped = (True, 1, False, 1.0), (False, 0, True, 0.5)
    for _, _, _, taken in on_ranks(2, trained_codebooks, "fp16", 2):
        assert taken == [usual, usual, skipped, usual]


# Layout

def slow_layout(streams, codes, lengths, ended, layout):
    """(rows, predictions) of one sample: rows of each step, and {(stream, frame, quantizer): (target, step)}."""
    if layout == "aligned" and len(streams) > 1:
        *given, last = range(len(streams))
        starts = list(itertools.accumulate([1, *(1 + one.codes * one.size for one in streams)]))
        own, wanted = slow_layout([streams[last]], [codes[last]], [lengths[last]], ended, layout)
        own = [[one and one + starts[last] - 1 for one in rows] for rows in own]
        steps = [[]] * train_audio.AHEAD + own
        for s in given:
            Q, K = streams[s].codes, streams[s].size
            frames = [int(i * streams[s].rate / streams[last].rate) for i in range(len(steps))]
            more = [[starts[s] + 1 + q * K + codes[s][t][q] for q in range(Q)] if t < lengths[s] else [0] * Q
                    for t in frames]
            wide = streams[last].codes + sum(streams[other].codes for other in given[:s])
            steps = [rows + [0] * (wide - len(rows)) + new for rows, new in zip(steps, more)]
        return steps, {(last, t, q): (target, step + train_audio.AHEAD) for (_, t, q), (target, step) in wanted.items()}
    steps, predictions, row, late = [], {}, 1, layout == "delay"
    for s, (stream, code, length) in enumerate(zip(streams, codes, lengths)):
        begin = len(steps)
        steps.append([row])
        Q, K = stream.codes, stream.size
        if layout == "flattened":
            steps += [[row + 1 + q * K + code[t][q]] for t in range(length) for q in range(Q)]
        else:
            steps += [[row + 1 + q * K + code[i - q * late][q] if 0 <= i - q * late < length else 0 for q in range(Q)]
                      for i in range(length + (Q - 1) * late)]
        for t, q in itertools.product(range(length), range(Q)):
            predictions[s, t, q] = code[t][q], begin + (t * Q + q if layout == "flattened" else t + q * late)
        if ended and length:
            predictions[s, length, 0] = K, begin + (length * Q if layout == "flattened" else length)
        row += 1 + Q * K
    return steps, predictions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("streams", [[Stream("semantic", 1, 4, 50)], COARSE, VOICED, FINE, RATES],
                         ids=["semantic", "coarse", "voiced", "fine", "rates"])
def test_streams_are_laid_out_as_a_slow_loop_does_and_every_code_is_predicted_once_from_what_is_before(streams, layout):
    lengths = [*[[1, 0, 0, 1]] * (streams is VOICED), [5, 1, 3, 4], [2, 6, 3, 1]][:len(streams)]
    codes, lengths = tokens_of(streams, lengths)
    ended = torch.tensor([True, False, True, False])
    inputs, predicted, begins = lay_out(streams, codes, lengths, ended, layout)
    for b in range(4):
        rows, wanted = slow_layout(streams, [c[b].tolist() for c in codes], [n[b].item() for n in lengths], ended[b],
                                   layout)
        found = [[row for row in step if row] for step in inputs[b].tolist()]
        assert found[:len(rows)] == [[row for row in step if row] for step in rows]
        assert not any(found[len(rows):]) or layout == "aligned"  # whose given tokens may last longer
        assert all(inputs[b, i, q] == row for i, step in enumerate(rows) for q, row in enumerate(step))
        assert begins[-1][b] == len(rows)
        made, at = {}, {}
        for s, (target, step) in enumerate(predicted):
            for t, q in (target[b] >= 0).nonzero().tolist():
                made[s, t, q] = target[b, t, q].item(), step[b, t, q].item()
        assert made == wanted
        for (s, t, q), (_, step) in made.items():  # the step that takes a code in is later than the one predicting it
            at.setdefault((s, step), []).append((t, q))
        assert all(len(pairs) == len({q for _, q in pairs}) for pairs in at.values())
        assert layout != "flattened" or all(len(pairs) == 1 for pairs in at.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_goes_on_can_end_at_once(layout):
    model = transformer(FINE, layout=layout)
    codes, lengths = tokens_of(FINE, [[2] * 60, [0] * 30 + [1] * 30])
    out, ended = train_audio.generate(model, codes, lengths, 1, range(60), temperature=1e3)
    added = torch.tensor([len(one) for one in out]) - lengths[-1]
    assert added[:30].tolist() == [1] * 30 and not any(ended[:30])
    assert added[30:].unique().tolist() == [0, 1] and torch.equal(added[30:] == 0, torch.tensor(ended[30:]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_code_reaches_the_step_that_predicts_it_or_one_before(layout):
    """By changing it, in what lay_out makes and a transformer hears: what comes before its own step stays."""
    model = transformer(FINE, layout=layout)
    codes, lengths = tokens_of(FINE, [[3], [3]])
    ended = torch.tensor([False])
    inputs, predicted, _ = lay_out(FINE, codes, lengths, ended, layout)
    prompt = torch.arange(inputs.shape[1])[None] < 4
    before = model.run(inputs, prompt, None)
    for s, t, q in itertools.product(range(2), range(3), range(FINE[0].codes)):
        other = [code.clone() for code in codes]
        other[s][0, t, q] = (other[s][0, t, q] + 1) % 5
        changed = (model.run(lay_out(FINE, other, lengths, ended, layout)[0], prompt, None) - before).abs().amax(2)[0]
        step = predicted[s][1][0, t, q] if s or layout != "aligned" else t - 1  # given codes are there from the start
        assert (changed[:step + 1] < 1e-5).all() and changed[step + 1] > 1e-5


@torch.no_grad()
def test_a_code_of_a_frame_is_told_those_before_it_and_no_other():
    torch.manual_seed(0)
    within = train_audio.WithinFrame(FINE[1], 8, 2, 0.0)
    for layer in within.layers:
        torch.nn.init.normal_(layer.down.weight)
    within.stand_for(torch.randn(3, 5, 3))
    x, codes = torch.randn(4, 1, 8), torch.randint(5, (4, 3))
    before = within(x + within.told(codes))
    for q in range(3):
        other = codes.clone()
        other[:, q] = (other[:, q] + 1) % 5
        changed = (within(x + within.told(other)) - before).abs().amax(2) > 1e-5
        assert changed.tolist() == [[place > q for place in range(3)]] * 4


@torch.no_grad()
def test_what_is_told_of_a_frame_is_also_what_its_codes_add_up_to():
    model, codes, vectors = transformer(FINE, layout="aligned").within, torch.randint(5, (4, 3)), torch.randn(3, 5, 3)
    model.stand_for(vectors)
    told = model.told(codes)
    for q in range(3):
        frame = sum((vectors[before][codes[:, before]] for before in range(q)), torch.zeros(4, 3)) / vectors[0].std()
        embeds = sum((model.embed.weight[before * 5 + codes[:, before]] for before in range(q)), torch.zeros(4, 16))
        torch.testing.assert_close(told[:, q], embeds + frame @ model.enter.weight.T, rtol=1e-4, atol=1e-5)
    before = transformer([stream._replace(width=0) for stream in FINE], layout="aligned")  # a run without
    before.stand_for(torch.randn(5, 5, 3))
    assert before.within.enter is None and torch.equal(before.within.tell(codes), before.within.embed(codes))


@pytest.mark.parametrize("stage", ["coarse", "fine"])
def test_codes_stand_for_the_codecs_vectors_in_training_and_in_use(whole, stage):
    task = token_task(whole, stage)
    quantizer, held, own = task.codec.quantizer, task.model.within.vectors, task.crops.streams[-1].codes
    codes, first = torch.randint(16, (1, 6, quantizer.ends[-1])), 0 if stage == "coarse" else quantizer.ends[-1] - own
    wanted = quantizer.decode(codes[..., :first + own])
    if first:
        wanted = wanted - quantizer.decode(codes[..., :first])
    vectors = task.codec.vectors()[first:first + own]
    frames = held[torch.arange(own - 1) * 16 + codes[..., first:first + own - 1]].sum(-2) * vectors[0].std()
    last = vectors[-1][codes[..., first + own - 1]]  # of which no other is told
    torch.testing.assert_close(frames + last, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(train_audio.Stack(whole, CPU).models[stage].within.vectors, held) and held.any()


@pytest.mark.parametrize("layout, least", [("aligned", 0.5), ("delay", 1.0), ("flattened", 0.5)])
def test_a_frame_is_predicted_from_the_whole_frame_before_it_unless_it_is_delayed(layout, least):
    """The first code of a frame is the second of the frame before, which is any: half of the bits can be known."""
    streams = [Stream("coarse", 2, 4, 50)]
    model = transformer(streams, layout=layout).train()
    optimizer, lengths = torch.optim.Adam(model.parameters(), 1e-2), [torch.full((64,), 6)]
    for _ in range(150):
        second = torch.randint(4, (64, 7))
        codes = [torch.stack([second[:, :-1], second[:, 1:]], dim=-1)]
        sums, counts, _ = model(*lay_out(streams, codes, lengths, torch.zeros(64, dtype=torch.bool), layout)[:2])
        loss = sums.sum() / counts.sum() / math.log(4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    least += (1 - least) / 6  # of the first frame nothing can be known
    assert least - 0.03 < loss.item() < least + 0.08


@pytest.mark.parametrize("layout", ["flattened", "delay"])
@pytest.mark.parametrize("streams", [COARSE, VOICED, FINE], ids=["coarse", "voiced", "fine"])
def test_every_code_of_every_quantizer_and_every_start_has_a_row_of_its_own(streams, layout):
    model, owner = transformer(streams, layout=layout), {}
    for s, stream in enumerate(streams):
        for code in range(stream.size):
            codes = [torch.full((1, 1, one.codes), code if i == s else 0) for i, one in enumerate(streams)]
            inputs, predicted, begins = lay_out(streams, codes, [torch.ones(1, dtype=torch.long)] * len(streams),
                                                torch.tensor([True]), layout)
            owner.setdefault(("start", s), set()).add(inputs[0, begins[s], 0].item())
            for q in range(stream.codes):
                step = predicted[s][1][0, 0, q]
                column = q if layout == "delay" else 0
                owner.setdefault((s, q, code), set()).add(inputs[0, step + 1, column].item())
    rows = [row for rows in owner.values() for row in rows]
    assert all(len(rows) == 1 for rows in owner.values()) and len(set(rows)) == len(rows) and 0 not in rows
    assert set(rows) == set(range(1, model.embed.num_embeddings)) and model.starts[-1] == model.embed.num_embeddings
    assert not any(model.embed.weight[0]) and model.heads[-1].shape[1] == streams[-1].size + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_can_be_produced_and_eos_ends_each_sample_and_is_no_code(layout):
    model = transformer(FINE, layout=layout)
    codes, lengths = tokens_of(FINE, [[2] * 60, [0] * 60])
    drawing = dict(temperature=1e3)  # as good as uniform
    out, ended = train_audio.generate(model, codes, lengths, 12, range(60), **drawing)
    lengths_made = torch.tensor([len(one) for one in out])
    assert torch.equal(lengths_made < 12, torch.tensor(ended)) and len(set(lengths_made.tolist())) > 6
    assert lengths_made.min() == 1  # no recording is empty
    assert abs((torch.tensor(ended).float().mean() - (1 - (5 / 6) ** 11)).item()) < 0.12
    for q in range(3):
        assert set(torch.cat(out)[:, q].tolist()) == set(range(5))
    out, ended = train_audio.generate(model, codes, lengths, 12, range(60), ends=False, **drawing)
    assert not any(ended) and {len(one) for one in out} == {12} and torch.cat(out).unique().tolist() == [*range(5)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_that_is_padded_in_a_batch_loses_what_it_does_alone(layout):
    model = transformer(COARSE, layout=layout, given_weight=0.5 * (layout != "aligned"))
    codes, lengths = tokens_of(COARSE, [[5, 1, 3], [2, 6, 4]])
    ended = torch.tensor([True, False, True])
    together = model(*lay_out(COARSE, codes, lengths, ended, layout)[:2])
    for b in range(3):
        alone = model(*lay_out(COARSE, [c[b:b + 1, :n[b]] for c, n in zip(codes, lengths)],
                               [n[b:b + 1] for n in lengths], ended[b:b + 1], layout)[:2])
        for one, other in zip(together, alone):
            torch.testing.assert_close(one[b:b + 1], other, rtol=1e-4, atol=1e-4)
    counts = [[6, 5], [1, 12], [4, 9]]  # codes and, at true ends, EOS
    assert together[1].tolist() == ([[0, own] for _, own in counts] if layout == "aligned" else counts)


@pytest.mark.parametrize("layout, rate, wanted", [
    ("delay", 50, [[-2, -1, 0, 1, 2, 3, 0, 1, 2, 3], [-2, -1, 0, 1, 0, 1, 2, 3, 4, 5]]),
    ("delay", 25, [[-2, -1, 0, 2, 4, 6, 0, 1, 2, 3], [-2, -1, 0, 2, 0, 1, 2, 3, 4, 5]]),
    ("flattened", 50, [[-2, -1, 0, 2, 4, 6, 0, 1, 2, 3, 4], [-2, -1, 0, 2, 0, 1, 2, 3, 4, 5, 6]]),
])
def test_positions_are_times_so_that_what_sounds_together_is_near(layout, rate, wanted):
    streams = [Stream("semantic", 1, 7, rate), COARSE[1]]
    codes, lengths = tokens_of(streams, [[3, 1], [2, 3]])
    inputs = lay_out(streams, codes, lengths, torch.ones(2, dtype=torch.bool), layout)[0]
    found = transformer(streams, layout=layout).positions(inputs, 2)
    for line, begin in zip(found.tolist(), wanted):
        assert line[:len(begin)] == begin


class Tokens(list):
    """Tokens of recordings as a TokenCache has them."""

    def frames(self, row):
        return len(self[row])


def crops_of(frames, window, rate=25, other=50.0, **settings):
    """TokenCrops of recordings of so many frames, in which each token is the number of its frame."""
    codes = Tokens([np.arange(n)[:, None].repeat(4, 1) for n in frames])
    meaning = Tokens([np.arange(math.ceil(n * other / rate))[:, None] for n in frames])
    cfg = settings_of("coarse", seconds=window / rate, unique=False, text="none", **settings)
    streams = [Stream("semantic", 1, 10_000, 50), Stream("coarse", 2, 10_000, 50)]
    return train_audio.TokenCrops(cfg, range(len(frames)), streams, {"semantic": meaning, "codes": codes},
                                  {"semantic": other, "codes": rate}, None)


@pytest.mark.parametrize("rate", [25, 50, 80, 62.5])
def test_codes_and_semantic_tokens_of_a_crop_are_of_the_same_time(rate):
    crops = crops_of([200, 40, 31], 40, rate)
    for row, place in itertools.product(range(3), (0.0, 0.21, 0.5, 0.77, 0.999)):
        found, ended = crops.crop(row, place)
        codes, meaning = found["codes"][:, 0], found["semantic"][:, 0]
        assert abs(codes[0] / rate - meaning[0] / 50) <= 0.5 / 50 + 1e-9
        assert abs((codes[-1] + 1) / rate - (meaning[-1] + 1) / 50) <= 1 / 50 + 1e-9
        assert ended == (codes[-1] == crops.caches["codes"].frames(row) - 1)
        assert not ended or meaning[-1] == len(crops.caches["semantic"][row]) - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eos_is_a_target_at_the_true_end_of_a_recording_and_nowhere_else(layout):
    crops = crops_of([100, 40, 30, 41], 40, layout=layout)
    assert [crops.crop(0, place)[1] for place in (0.0, 0.5, 0.98, 0.999)] == [False, False, False, True]
    assert [crops.crop(1, place)[1] for place in (0.0, 0.999)] == [True, True]  # it fits exactly
    assert [crops.crop(3, place)[1] for place in (0.0, 0.499, 0.5, 0.999)] == [False, False, True, True]
    batch, good = crops.fetch([0, 1, 2, 3])
    eos = [(batch[f"target{s}"] == stream.size).sum((1, 2)).tolist() for s, stream in enumerate(crops.streams)]
    assert good.all() and eos == [[0] * 4 if layout == "aligned" else [0, 1, 1, 0], [0, 1, 1, 0]]
    assert (batch["target1"] == 10_000).nonzero().tolist() == [[1, 40, 0], [2, 30, 0]]
    drawn = [crops.crop(0, place)[1] for place in data.uniform(data.draws(np.arange(500), 0), 1)[:, 0]]
    assert 0 < sum(drawn) < 40  # one in 61, as any other place


@pytest.mark.parametrize("voice, given_drop", [(True, 0.0), (True, 0.3), (False, 0.3)])
def test_the_voice_of_the_whole_recording_is_told_in_any_crop_and_what_is_told_left_out_in_training(voice, given_drop):
    crops = crops_of([100, 40, 90], 40, voice=voice, given_drop=given_drop)
    for row, tokens in enumerate(crops.caches["semantic"]):
        crops.caches["semantic"][row] = np.hstack([tokens, np.full_like(tokens, 5 + row)])
    assert [crops.crop(row, 0.9)[0]["voice"].tolist() for row in range(3)] == [[[5]], [[6]], [[7]]]
    crops.streams = train_audio.streams_of(crops.cfg, dict(voice=9, semantic=10_000, codes=10_000),
                                           dict(voice=0, semantic=50, codes=25), range(1, 5), 3)
    assert [stream.name for stream in crops.streams] == ["voice"] * voice + ["semantic", "coarse"]
    column = crops.streams[-1].codes  # of the aligned layout: codes, then voice and semantic tokens
    rows = np.arange(600) % 3
    plain, drawn = (crops.fetch(rows, draws) for draws in (None, data.draws(np.arange(600), 0)))
    assert plain[1].all() and drawn[1].all() and plain[0]["inputs"].shape[2] == column + 1 + voice
    told = (drawn[0]["inputs"][..., column:] != 0).any(1).float().mean(0)
    assert (abs(told - (1 - given_drop)) < 0.06).all() and (drawn[0]["inputs"][..., 0] != 0).any(1).all()
    if voice:
        all_told, told = (batch["inputs"][:, :, column] for batch, _ in (plain, drawn))
        assert (all_told == torch.from_numpy(2 + 5 + rows)[:, None]).all()  # behind "none" and where the stream begins
        assert torch.equal((told != 0).all(1), (told != 0).any(1))
        assert torch.equal(told[told != 0], all_told[:, :1].expand_as(told)[told != 0])
        semantic = drawn[0]["inputs"][:, 0, column + 1] != 0
        assert not given_drop or 0 < (semantic & (told[:, 0] == 0)).float().mean() < 0.3  # each kind by itself


# Transformer

TEXTS = {"tokens": torch.tensor([[5, 3, 0, 0], [2, 2, 7, 1], [9, 0, 0, 0]]),
         "embeds": torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3)) * torch.tensor(
             [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])[..., None]}


def spoken(model, kind):
    return None if model.cfg.text == "none" else TEXTS[kind]


def slow_generate(model, codes, lengths, frames, text, scale=1.0, ends=True, others=()):
    """Greedily, one sample, every step from the whole sequence anew: (codes (T, Q), outputs of each step)."""
    stream, layout = model.streams[-1], model.cfg.layout
    (Q, K), late = stream[1:3], layout == "delay"
    rivals = [(codes, lengths, False, 1.0), *((*told, False, other_scale) for *told, other_scale in others)]
    rivals += [(codes, lengths, True, scale)] if scale != 1 and text is not None else []
    fresh = torch.zeros(frames, Q, dtype=torch.long)
    pairs = [(t, q) for t in range(frames) for q in range(Q)]
    steps = [[pair] for pair in pairs] if layout == "flattened" else [
        [(t, q) for t, q in pairs if t + q * late == i] for i in range(frames + (Q - 1) * late)]
    end, heard = frames, []
    for step in steps:
        x = []
        for own, n, drop, _ in rivals:
            begun = n[-1].item()
            now = torch.cat([own[-1][0, :begun], fresh])[None]
            inputs, _, begins = lay_out(model.streams, [*own[:-1], now], [*n[:-1], torch.tensor([begun + frames])],
                                        torch.tensor([False]), layout)
            place = begins[-2] + train_audio.step_of(begun + step[0][0], step[0][1], Q, layout)
            known = torch.arange(inputs.shape[1]) <= begins[-2] + train_audio.step_of(begun, 0, Q, layout)
            prompt = (inputs > model.starts[-2]).any(2) & known
            x.append(model.run(inputs, prompt, model.condition(text, torch.tensor([drop])))[0, place[0]])
        heard.append(torch.stack(x))
        for t, q in step:
            if model.within:
                told = sum(model.within.tell(before * K + fresh[t, before]) for before in range(q))
            scores = [model.heads[-1][q] @ (model.within(one + told) if model.within else one) for one in x]
            logs = [one.softmax(-1).log() for one in scores]
            score = logs[0].clone()
            if others:
                away = sum((other[2] - 1) * (logs[0] - log) for other, log in zip(others, logs[1:]))
                score[:K] = ((logs[0] + away)[:K].softmax(-1) * (1 - logs[0][K].exp())).log()
            if len(rivals) > 1 + len(others):
                score = score + (scale - 1) * (logs[0] - logs[-1])
            empty = t == 0 and not lengths[-1].item()  # which no recording is
            best = score[:K + (ends and q == 0 and not empty)].argmax().item()
            if best == K:
                end = min(end, t)
            fresh[t, q] = min(best, K - 1)
        if end <= step[-1][0]:
            break
    return torch.cat([codes[-1][0, :lengths[-1].item()], fresh[:end]]), heard


VARIANTS = [*itertools.product(LAYOUTS, ["rotary", "relative"], ["none", "prefix", "cross"], TEXTS)]


@pytest.mark.parametrize("layout, position, text, kind", VARIANTS)
@torch.no_grad()
def test_cached_generation_in_an_uneven_batch_is_the_one_without_a_cache_alone(layout, position, text, kind,
                                                                               monkeypatch):
    model = transformer(VOICED, 10, 6 if kind == "embeds" else 0, layout=layout, position=position, text=text,
                        text_embeds=kind == "embeds" and text != "none")
    codes, lengths = tokens_of(VOICED, [[1, 0, 1], [5, 2, 4], [3, 0, 1]])
    scale, seen, step = 1.0 if text == "none" else 2.5, [], model.transformer.step
    monkeypatch.setattr(model.transformer, "step", lambda *args: seen.append(step(*args)) or seen[-1])
    texts = spoken(model, kind)
    out, ended = train_audio.generate(model, codes, lengths, 6, [0, 1, 2], texts, 0.0, guidance_scale=scale)
    for b in range(3):
        given = [c[b:b + 1, :n[b]] for c, n in zip(codes, lengths)], [n[b:b + 1] for n in lengths]
        wanted, heard = slow_generate(model, *given, 6, None if texts is None else texts[b:b + 1], scale)
        assert torch.equal(out[b], wanted) and ended[b] == (len(wanted) < lengths[-1][b] + 6)
        for ours, theirs in zip(seen, heard[1:]):  # the first is of the prompt's own pass
            torch.testing.assert_close(ours[b::3], theirs, rtol=1e-3, atol=1e-4)
    assert len(seen) > 4


@pytest.mark.parametrize("text", ["none", "prefix"])
@pytest.mark.parametrize("given_drop", [0.0, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_guidance_toward_the_prompt_moves_scores_away_from_those_of_who_has_not_heard_it(layout, given_drop, text):
    """And, in a model that was trained for it, from those of who has not heard what is to be said."""
    model = transformer(VOICED, 10, layout=layout, text=text, given_drop=given_drop)
    scale = 1.0 if text == "none" else 1.5
    texts, drawing = None if text == "none" else TEXTS["tokens"], Drawing(0.0, 1.0, scale, 4.0, 2.0)
    prompts, meaning = [torch.randint(5, (n, 2)) for n in (3, 0, 2)], [torch.randint(7, (n, 1)) for n in (9, 8, 7)]
    calls, rates, voice = [], [], torch.tensor([[2]])

    def given(b, past):
        calls.append((b, len(past)))
        return [voice, meaning[b][len(past):]]
    seen, step = [], model.transformer.step
    model.transformer.step = lambda *args: seen.append(step(*args)) or seen[-1]
    made, _ = train_audio.go_on(model, 8, given, prompts, [len(one) + 5 for one in prompts], [0, 1, 2], drawing, texts)
    assert calls == [(0, 0), (1, 0), (2, 0), (0, 3), (1, 0), (2, 2)] and len(seen) > 3
    for b, (prompt, tokens) in enumerate(zip(prompts, meaning)):
        pair, alone = ([[voice[None], tokens[n:][None], prompt[:len(prompt) - n][None]],
                        [torch.tensor([k]) for k in (1, len(tokens) - n, len(prompt) - n)]] for n in (0, len(prompt)))
        less = [pair[0][0], pair[0][1][:, :0], pair[0][2]], [pair[1][0], torch.tensor([0]), pair[1][2]]
        rest = [(*less, 2.0)] * bool(given_drop)
        wanted, heard = slow_generate(model, *pair, 5, None if texts is None else texts[b:b + 1], scale, True,
                                      [*rest, (*alone, 4.0)])
        assert torch.equal(made[b], wanted)
        for ours, theirs in zip(seen, heard[1:]):
            torch.testing.assert_close(ours[b::3], theirs, rtol=1e-3, atol=1e-4)
        rates.append(torch.equal(wanted, slow_generate(model, *pair, 5, None if texts is None else texts[b:b + 1],
                                                       scale, True, rest)[0]))
    assert rates[1] and not all(rates)  # who has no prompt is not guided by it


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("text", ["prefix", "cross"])
@torch.no_grad()
def test_guidance_and_texts_change_what_is_made_and_no_text_is_the_null_one(text, kind):
    model = transformer(COARSE, 10, 6 if kind == "embeds" else 0, text=text, text_embeds=kind == "embeds")
    codes, lengths = tokens_of(COARSE, [[3, 3, 3], [1, 1, 1]])

    def make(text, scale):
        return torch.cat(train_audio.generate(model, codes, lengths, 12, [0, 1, 2], text, 0.0, 1.0, scale,
                                             ends=False)[0])
    plain, none = make(TEXTS[kind], 1.0), make(None, 1.0)
    assert not torch.equal(make(TEXTS[kind], 4.0), plain)
    assert torch.equal(make(TEXTS[kind], 0.0), none)  # all the way to the scores without text
    assert not torch.equal(none, plain) and torch.equal(make(None, 3.0), none)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_sample_is_decided_by_its_seed_whatever_the_batch(layout):
    model = transformer(COARSE, 10, layout=layout, text="prefix")
    codes, lengths = tokens_of(COARSE, [[5, 2, 4], [3, 0, 1]])
    drawing = dict(temperature=1.0, top_k=0.8, guidance_scale=1.5)
    together, ended = train_audio.generate(model, codes, lengths, 9, [5, 6, 7], TEXTS["tokens"], **drawing)
    for b in range(3):
        alone, end = train_audio.generate(model, [c[b:b + 1] for c in codes], [n[b:b + 1] for n in lengths], 9,
                                          [5 + b], TEXTS["tokens"][b:b + 1], **drawing)
        assert torch.equal(alone[0], together[b]) and end == ended[b:b + 1]
    other, _ = train_audio.generate(model, codes, lengths, 9, [8, 9, 10], TEXTS["tokens"], **drawing)
    assert not torch.equal(torch.cat(other), torch.cat(together))


def test_codes_are_drawn_from_the_softmax_of_the_best():
    scores = torch.tensor([0.0, 2.0, 1.0, -1.0, -torch.inf]).expand(20_000, 1, 5)
    uniform = torch.rand(20_000, 1)

    def shares(temperature, top_k):
        drawn = train_audio.draw(scores, uniform, temperature, top_k)
        return torch.bincount(drawn.flatten(), minlength=5) / 20_000
    torch.testing.assert_close(shares(0.7, 1.0), (scores[0, 0] / 0.7).softmax(0), atol=0.015, rtol=0)
    best = torch.tensor([-torch.inf, 2.0, 1.0, -torch.inf, -torch.inf])
    torch.testing.assert_close(shares(1.0, 0.4), best.softmax(0), atol=0.015, rtol=0)
    assert shares(0.0, 1.0)[1] == shares(1.0, 0.01)[1] == 1


@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("text", ["none", "prefix", "cross"])
def test_masking_hides_some_of_the_past_in_training_only_and_never_the_text_or_a_token_from_itself(text, position):
    model, prefix = transformer(COARSE, 10, text=text, position=position, mask_past=0.3), 4 if text == "prefix" else 0
    codes, lengths = tokens_of(COARSE, [[20] * 64, [9] * 64])
    inputs, predicted, _ = lay_out(COARSE, codes, lengths, torch.zeros(64, dtype=torch.bool), "delay")
    masks, inside = [], model.transformer.forward
    model.transformer.forward = lambda x, mask=None, *more, **rest: masks.append(mask) or inside(x, mask, *more, **rest)
    drop, texts = torch.zeros(64, dtype=torch.bool), TEXTS["tokens"][:1].expand(64, -1)
    with torch.no_grad():
        quiet = model(inputs, predicted, texts, drop)
        assert torch.equal(quiet[0], model(inputs, predicted, texts, drop)[0])
        loud = [model.train()(inputs, predicted, texts, drop)[0] for _ in range(2)]
    assert not torch.equal(*loud) and not torch.equal(loud[0], quiet[0])
    rest, mask = masks[0], masks[-1]
    size = inputs.shape[1] + prefix
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    assert rest is None if position == "rotary" else torch.equal(rest[0, 0] > -torch.inf, causal)
    seen = (mask if mask.dtype == torch.bool else mask > -torch.inf)[:, 0]
    past = causal & ~torch.eye(size, dtype=torch.bool)
    past[:, :prefix] = False
    assert not (seen & ~causal).any() and seen[:, causal & ~past].all()  # text and self always, the future never
    assert abs(1 - seen[:, past].float().mean() - 0.3) < 0.03
    hidden = ~seen[:, -1, prefix:-1]
    assert torch.equal(hidden[:, :-1], ~seen[:, -2, prefix:-2])  # one choice for a sample, at every step
    assert not torch.equal(hidden[0], hidden[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_frames_behind_a_marked_prompt_are_in_part_those_of_another_sample_in_training_alone(layout):
    model, heard, samples = transformer(COARSE, layout=layout, noise_past=0.6), [], torch.arange(500)
    (meaning, codes), lengths = tokens_of(COARSE, [[20] * 500, [20 + b % 5 for b in range(500)]])
    codes = (samples[:, None, None] + torch.tensor([0, 1])).expand_as(codes) % 5  # they tell the sample
    inputs, predicted, _ = lay_out(COARSE, [meaning, codes], lengths, torch.ones(500, dtype=torch.bool), layout)
    model.run = lambda *args, run=model.run: heard.append(args) or run(*args)
    quiet = model(inputs, predicted)
    assert heard[0][0] is inputs and not heard[0][1].any()
    loud = model.train()(inputs, predicted)
    (made, prompt, _), own = heard[1], inputs > model.starts[-2]
    changed, steps = made != inputs, own.any(2)
    assert not changed[~own].any() and not changed[prompt].any()  # semantic tokens, where a stream begins, the prompt
    rows = made - model.starts[-2] - 1
    swapped = (samples[:, None, None] - 1 + rows // 5) % 5 == rows % 5  # quantizer q of sample b has the code b + q
    assert swapped[changed].all() and torch.equal((rows // 5)[own], ((inputs - model.starts[-2] - 1) // 5)[own])
    assert layout != "aligned" or torch.equal(changed[..., 0], changed[..., 1])  # whole frames
    share = prompt.sum(1) / steps.sum(1)
    assert torch.equal(prompt, steps & (steps.cumsum(1) <= prompt.sum(1, keepdim=True)))
    assert abs((share == 0).float().mean() - 0.2) < 0.08 and abs(share[share > 0].mean() - 0.5) < 0.05
    behind = own & ~prompt[..., None]
    shares = (changed.flatten(1).sum(1) / behind.flatten(1).sum(1))[share < 0.5]
    assert abs(shares.mean() - 0.3) < 0.03 and shares.min() < 0.05 and shares.max() > 0.5
    assert torch.equal(loud[1], quiet[1]) and not torch.equal(loud[0], quiet[0])


def test_every_parameter_gets_a_gradient_whatever_is_dropped():
    for text, (given, layout), drop in itertools.product(
            ("prefix", "cross"), ((0.0, "delay"), (0.5, "delay"), (0.0, "aligned")), (False, True)):
        model = transformer(COARSE, 10, text=text, given_weight=given, position="relative", layout=layout).train()
        codes, lengths = tokens_of(COARSE, [[3, 3, 3], [4, 4, 4]])
        model(*lay_out(COARSE, codes, lengths, torch.ones(3, dtype=torch.bool), layout)[:2], TEXTS["tokens"],
              torch.full((3,), drop))[0].sum().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


@torch.no_grad()
def test_going_on_past_the_length_of_training_is_by_windows_that_begin_with_the_half_before(monkeypatch):
    model, generate, calls = transformer(COARSE), train_audio.generate, []

    def spy(model, codes, lengths, frames, *rest):
        calls.append((codes, lengths, frames))
        return generate(model, codes, lengths, frames, *rest)
    monkeypatch.setattr(train_audio, "generate", spy)
    prompts = [torch.randint(5, (n, 2)) for n in (3, 0, 11)]
    meaning, pasts = [torch.randint(7, (n, 1)) for n in (4, 5, 6)], []

    def given(b, past):
        pasts.append((b, past))
        return [meaning[b][len(past) // 4:]]
    drawing = Drawing(1.0, 0.9)
    made, over = train_audio.go_on(model, 8, given, prompts, [30, 21, 25], [1, 2, 3], drawing, ends=False)
    assert [len(one) for one in made] == [30, 21, 25] and over == [False] * 3
    assert all(torch.equal(one[:len(prompt)], prompt) for one, prompt in zip(made, prompts))
    assert all((lengths[-1] + 1 <= 8).all() and frames <= 8 for _, lengths, frames in calls) and len(calls) > 4
    for b, past in pasts:
        assert torch.equal(past, made[b][:len(past)]) and (len(past) == 0 or len(past) % 4 == 0 or b == 2)
    first = generate(model, [one[None] for one in (meaning[0], prompts[0])], [torch.tensor([4]), torch.tensor([3])], 5,
                     [accumulate.number(1, 0)], None, *drawing[:3], ends=False)[0][0]
    assert torch.equal(made[0][:8], first)
    for b, goal in enumerate((30, 21, 25)):
        alone, _ = train_audio.go_on(model, 8, lambda _, past, b=b: given(b, past), [prompts[b]], [goal], [b + 1],
                                     drawing, ends=False)
        assert torch.equal(alone[0], made[b])


@torch.no_grad()
def test_going_on_stops_at_the_end_of_each(monkeypatch):
    model = transformer(COARSE)
    prompts, meaning = [torch.zeros(0, 2, dtype=torch.long)] * 16, torch.randint(7, (16, 4, 1))
    made, over = train_audio.go_on(model, 6, lambda b, past: [meaning[b]], prompts, [20] * 16, range(16),
                                   Drawing(10.0))
    assert {len(one) < 20 for one in made} == {True, False} or all(over)
    assert [len(one) < 20 for one in made] == over and len({len(one) for one in made}) > 3


def test_chunking_leaves_a_transformers_gradients_as_they_are(whole):
    for stage, given_weight in (("coarse", 0.0), ("coarse", 0.7), ("semantic", 0.0), ("fine", 0.3)):
        found = []
        for size in (6, 4, 1):
            task = token_task(whole, stage, batch_size=6, chunk_size=size, given_weight=given_weight, mask_past=0.0,
                              noise_past=0.0, layout="delay" if given_weight else "aligned", text_drop=0.0, dropout=0.0)
            for name, p in task.model.named_parameters():
                accumulate.seed(name)
                torch.nn.init.normal_(p, std=0.2)
            task.model.train()
            plan = accumulate.plan(6, size)
            parts, loss = gradients(task, plan, [task.crops.fetch(np.arange(c.start, c.stop), np.arange(
                c.start, c.stop, dtype=np.uint64) * 2 ** 59)[0] for c in plan])
            found.append((parts[0], loss))
        for parts, loss in found[1:]:
            assert close(parts, found[0][0])
            torch.testing.assert_close(loss, found[0][1], rtol=1e-5, atol=1e-5)


# Learning by heart

def test_a_codec_learns_eight_clips_by_heart(monkeypatch):
    task, _, _ = codec_task(monkeypatch, steps=120, batch_size=8, chunk_size=8, channels=4, strides=(2, 4, 5), lr=8e-3,
                            codec_width=32, quantize_after=50, quantizers=6, codebook_size=32, discriminate_after=0.95,
                            seconds=0.06, dead_below=0.0)
    batch = [task.recordings.fetch(np.arange(8))[0]]
    for _ in range(task.cfg.steps):
        *_, taken = task.update(accumulate.plan(8, 8), batch)
    codec, wave = task.model.eval(), batch[0]["wave"]
    quality = [audio.si_sdr(codec.decode(codec.encode(wave, n)), wave).mean().item() for n in (1, 2, 6)]
    assert taken and quality[2] > 10 and quality == sorted(quality), quality


@pytest.mark.parametrize("stage, layout, steps", [
    ("semantic", "delay", 80), ("coarse", "flattened", 120), ("coarse", "delay", 80), ("coarse", "aligned", 80),
    ("fine", "aligned", 80)])  # flattened: the longest sequences by far
def test_a_transformer_learns_eight_clips_by_heart_and_says_them_again(stage, layout, steps, whole):
    task = token_task(whole, stage, steps=steps, lr=1e-2, batch_size=8, chunk_size=8, width=48, layout=layout,
                      seconds=3.0, mask_past=0.0, noise_past=0.0, text_drop=0.0, weight_decay=0.0, dropout=0.0)
    batch, good = task.crops.fetch(np.arange(8))
    task.model.train()
    for _ in range(task.cfg.steps):
        loss, *_ = task.update(accumulate.plan(8, 8), [batch])
    model = task.model.eval()
    assert good.all() and loss.item() / 8 < 0.15
    with torch.no_grad():
        _, count, right = model(batch["inputs"], train_audio.predicted(batch), batch.get("text"),
                                torch.zeros(8, dtype=torch.bool))
    assert right[:, -1].sum() > 0.98 * count[:, -1].sum()
    made = [task.crops.streams_of(task.crops.crop(row)[0]) for row in range(8)]
    again, over = train_audio.go_on(model, task.crops.window, lambda b, past: made[b][:-1], [one[-1][:0] for one in
                                    made], [len(one[-1]) + 5 * (stage != "fine") for one in made], range(8),
                                    Drawing(0.0), batch.get("text"), ends=stage != "fine")
    same = [torch.equal(one[-1], other) for one, other in zip(made, again)]
    assert sum(same) >= 7 and over == [stage != "fine"] * 8, (same, over)


# Training, as a user runs it

def test_one_command_trains_all_stages_and_started_again_says_they_are_finished(whole, voices):
    out = (whole / "out.txt").read_text()
    assert f"To generate: python train_audio.py sample --run {whole}" in out and "The stages together" in out
    assert "seconds_added" in json.loads((whole / "voices.json").read_text())
    for stage in STAGES:
        for name in ("config.json", "auto_resume.json", "model.pt", "best.pt", "metrics.jsonl"):
            assert (whole / stage / name).is_file(), name
        lines = metrics(whole / stage)
        assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
        assert [line["step"] for line in lines if "val_loss" in line] == [4, 6]
        wanted = {"si_sdr_db@4", "mel_distance@1", "codebook_perplexity@3"} if stage == "soundstream" else {
            "val_accuracy", "unigram_entropy"}
        assert {"test_loss"} | wanted <= lines[-1].keys()
        for name in ("step_00000004_0", "test_0") if stage != "semantic" else ():
            sound, rate = audio.read(whole / stage / f"samples/{name}.wav")
            assert rate == 16_000 and sound.any()
            assert media.read_png(whole / stage / f"samples/{name}.png").shape[2] == 3
    assert audio.read(whole / "sounds/0_goes_on.wav")[0].any() and (whole / "sounds/0_goes_on.png").is_file()
    before = {path: path.read_bytes() for path in whole.rglob("*.pt")}
    out = run(*flags(data=voices, run=whole, **TINY))
    assert out.count("is finished, at step 6; to train on, give more --steps") == 4 and "The stages together" in out
    assert {path: path.read_bytes() for path in before} == before
    assert "is finished, at step 6" in run("--config", whole / "fine/config.json")


def words_of(whole, stage, folder, **settings):
    """The command line that trains one stage in `folder`, on the earlier stages and token caches of `whole`."""
    if stage != "soundstream" and not (folder / "tokens").exists():
        shutil.copytree(whole / "tokens", folder / "tokens")
    if stage == "semantic" and not (folder / stage).exists():
        (folder / stage).mkdir(parents=True)
        shutil.copy(whole / stage / "kmeans.pt", folder / stage)
    return flags(**{**TINY, **dict(stage=stage, data=whole.parent / "voices", run=folder,
                                   soundstream=whole / "soundstream", semantic=whole / "semantic"), **settings})


@pytest.fixture(scope="module")
def undisturbed(whole):
    """undisturbed(stage, ranks) -> the folder of a run that nothing disturbed."""
    def folder(stage, ranks):
        path = whole.parent / f"{stage}_{ranks}"
        if not path.exists():
            Forked("train_audio", *words_of(whole, stage, path), ranks=ranks).finish()
        return path / stage
    return folder


@pytest.mark.parametrize("stage", ["soundstream", "coarse"])
def test_checkpoints_load_from_files_and_urls(stage, undisturbed, whole, server, tmp_path):
    for name in ("file", "url", "rate", "model_file", "model_url", "strict", "loose", "none"):
        words = words_of(whole, stage, tmp_path / name)  # with the caches of tokens
    check_loading("train_audio", words, undisturbed(stage, 1), stage, server, tmp_path)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(kind)) for kind in ("tensorboard", "wandb")])
def test_a_logger_gets_the_sounds_and_their_spectrograms(kind, whole, tmp_path, monkeypatch):
    pytest.importorskip("PIL", reason="pillow is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(*words_of(whole, "soundstream", tmp_path, logger=kind))
    curves, media = records_of(tmp_path / "soundstream")
    assert media == {f"{part}/0{name}": 1 for part in ("validation", "test") for name in (".png", ".wav", "_real.png",
                                                                                         "_real.wav")}
    assert [step for step, _ in curves["loss"]] == [2, 4, 6]


@pytest.mark.parametrize("stage, ranks", [(stage, ranks) for stage in STAGES for ranks in (1, 2)]
                         if "KILLS" in os.environ else [("soundstream", 1), ("coarse", 2)])
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(stage, ranks, undisturbed, whole, tmp_path):
    """Among them, of the codec, moments before and after k-means and with discriminators."""
    kills, rng, running = int(os.environ.get("KILLS", 2)), random.Random(f"{stage} {ranks}"), 0
    words = words_of(whole, stage, tmp_path)
    for number in range(kills):
        process = Forked("train_audio", *words, ranks=ranks)
        word = ("parameters", "step ")[number % 2]  # as it begins, and after its first evaluation
        next((line for line in process.out if word in line), None)
        sum(i * i for i in range(rng.randint(0, 500_000)))
        running += process.kill()
    out = Forked("train_audio", *words, ranks=ranks).finish()
    assert running >= kills / 2 and "resuming" in out
    assert not differences(undisturbed(stage, ranks), tmp_path / stage)


def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_bits(whole, tmp_path):
    more = dict(steps=40, log_every=1, save_every=100, eval_every=10)
    words = words_of(whole, "coarse", tmp_path / "stopped", **more)
    process = Forked("train_audio", *words)
    while "step 10:" not in (line := process.out.readline()):
        assert line
    process.processes[0].terminate()
    assert "stopped by signal 15 at step" in process.finish(expect=143)
    out = run(*words)
    assert "resuming" in out and "at step 40 of" not in out
    run(*words_of(whole, "coarse", tmp_path / "whole", **more))
    assert not differences(tmp_path / "whole/coarse", tmp_path / "stopped/coarse")


def test_checkpoints_before_kmeans_have_no_codebooks_and_later_ones_do(undisturbed):
    for step, ready in ((2, False), (4, True), (6, True)):
        state = checkpoint.load(undisturbed("soundstream", 1) / f"checkpoints/step_{step:08d}.pt")
        assert all(state[name]["quantizer.initialized"] == ready for name in ("model", "ema"))
        assert state["model"]["quantizer.codebook"].any() == ready and state["discriminators"]


@pytest.mark.parametrize("stage", STAGES)
def test_any_number_of_ranks_learns_the_same(stage, undisturbed):
    for ours, theirs in zip(metrics(undisturbed(stage, 2)), metrics(undisturbed(stage, 1)), strict=True):
        losses = {name for name in theirs if "loss" in name or name == "grad_norm"}
        assert {k: ours[k] for k in losses} == pytest.approx({k: theirs[k] for k in losses}, rel=1e-4)
        assert ours.keys() == theirs.keys()


def test_recordings_are_split_by_speaker_if_asked_and_by_the_seed(voices):
    found = []
    for seed in (0, 2):
        cfg = settings_of("soundstream", data=str(voices), split_by="speaker", validation=0.4, test=0.2,
                          split_seed=seed)
        source, = train_audio.open_sources(cfg, 0.1)
        who = [{source.speaker(row) for row in source.split(part, 0.4, 0.2, seed)}
               for part in ("train", "validation", "test")]
        assert sum(map(len, who)) == len(set().union(*who)) == 4
        found.append(who)
    assert found[0] != found[1]


@pytest.mark.parametrize("stage", ["soundstream", "coarse"])
def test_recordings_of_another_folder_are_the_validation_set(stage, whole, tmp_path):
    others = write_voices(tmp_path / "others", range(100, 107))
    run(*words_of(whole, stage, tmp_path / "run", val_data=others, steps=4))
    cfg = dataclasses.replace(Config(**checkpoint.load(tmp_path / "run" / stage / "model.pt")["config"]))
    assert cfg.val_data == str(others)
    task = (train_audio.CodecTask if stage == "soundstream" else train_audio.TokenTask)(cfg, CPU)
    train, held, test = (task.parts[part] for part in ("train", "validation", "test"))
    assert len(held[1]) == 7 and str(others) in held[0].name(0) and len(held[0].fetch(held[1])[1]) == 7
    assert len(train[1]) + len(test[1]) == 40 and str(others) not in train[0].name(0) + test[0].name(0)
    if stage == "coarse":  # its tokens are its recordings' own
        wave = held[0].source.wave(3)
        assert np.array_equal(held[0].caches["codes"][3], task.codec.encode(wave[None])[0].numpy())


def test_tokens_are_cached_and_made_anew_for_another_codec(voices, tmp_path):
    source, codec, calls = *train_audio.open_sources(settings_of("coarse", data=str(voices))), codec_of(), []
    encode = codec.encode
    codec.encode = lambda wave: calls.append(len(wave)) or encode(wave)
    for checksum, asked in (("one", 40), ("one", 0), ("other", 40), ("one", 0)):
        codec.checksum = checksum
        cache = train_audio.code_cache(tmp_path, source, codec, CPU)
        assert len(calls) == asked
        calls.clear()
    for row in (0, 17):
        assert np.array_equal(cache[row], encode(source.wave(row)[None])[0].numpy())


def test_figures_of_the_transformers_are_means_over_tokens_and_leave_the_mode(whole, tmp_path):
    task = token_task(whole, "coarse", eval_samples=0, chunk_size=3)
    for mode in (True, False):
        task.model.train(mode)
        figures = task.figures("train")
        task.write_sounds("test", "sound")
        assert task.model.training == mode
    model, sums = task.model, np.zeros(3)
    for row in task.training[1]:
        batch = task.crops.fetch([row])[0]
        with torch.no_grad():
            sums += [value[:, -1].sum().item() for value in
                     model(batch["inputs"], train_audio.predicted(batch), None, torch.zeros(1, dtype=torch.bool))]
    assert figures["loss"] == pytest.approx(sums[0] / sums[1], rel=1e-4)
    assert figures["val_accuracy"] == pytest.approx(sums[2] / sums[1], rel=1e-6)


@pytest.mark.parametrize("settings", [
    dict(layout="flattened", text="cross", position="relative", unique=True, given_weight=0.5, dropout=0.1),
    dict(grouped_quantizers=4, groups=2, group_codebooks="learned", codec_width=64, text="prefix", precision="bf16",
         deltas=True, optimizer="muon")], ids=["flattened", "aligned"])
def test_built_in_syllables_with_every_other_setting_are_trained_on_and_judged(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(train_audio, "BUILTIN_ROWS", 40)
    words = flags(run=tmp_path, **{**TINY, **settings, "steps": 4, "seconds": 0.4, "eval_samples": 2})
    out = run(*words)
    assert '--text "a i u o"' in out
    scores = json.loads((tmp_path / "voices.json").read_text())
    assert {"voice_kept", "voice_kept_real", "syllables_of_text_real", "semantic_syllable_accuracy"} < scores.keys()
    assert scores["semantic_syllable_accuracy"] > 0.5 and scores["seconds_added"] >= 0
    out = run("sample", *flags(run=tmp_path, text="a i u", seconds=0.8, guidance_scale=(2.0,), device="cpu",
                               out=tmp_path / "out.wav"))
    assert "1 sound(s)" in out and audio.read(tmp_path / "out.wav")[0].shape[1] <= 0.8 * 16_000


def test_embeddings_beside_the_recordings_condition_as_texts_do(voices, tmp_path):
    shutil.copytree(voices, tmp_path / "voices", ignore=shutil.ignore_patterns("*.txt"))
    for path in (tmp_path / "voices").rglob("*.wav"):
        np.save(path.with_suffix(".npy"), np.random.default_rng(len(path.name)).standard_normal((3, 6)).astype("f2"))
    out = run(*flags(**{**TINY, **dict(stage="semantic", data=tmp_path / "voices", run=tmp_path / "run", text="cross",
                                       text_embeds="true", steps=2)}))
    assert "Trained" in out and checkpoint.load(tmp_path / "run/semantic/model.pt")["embed_width"] == 6


def test_a_sound_is_made_of_the_embedding_of_a_text_by_stages_that_were_trained_on_such(whole, voices, tmp_path):
    shutil.copytree(voices, tmp_path / "voices")
    for path in (tmp_path / "voices").rglob("*.wav"):
        np.save(path.with_suffix(".npy"), np.random.default_rng(len(path.name)).standard_normal((3, 6)).astype("f2"))
    folder, made, both = moved(whole, tmp_path / "run"), {}, dict(run=tmp_path / "run", num=2, temperature=1.0)
    run(*words_of(whole, "semantic", tmp_path / "other", data=tmp_path / "voices", text="cross", text_embeds="true"))
    shutil.copy(tmp_path / "other/semantic/model.pt", folder / "semantic/model.pt")
    for name, shape in (("one", (3, 6)), ("two", (30, 6)), ("wide", (3, 7)), ("flat", (6,))):
        np.save(tmp_path / f"{name}.npy", 9 * np.random.default_rng(0).standard_normal(shape).astype("f4"))
    np.save(tmp_path / "bad.npy", np.full((3, 6), np.nan, "f4"))
    for name, scale in (("one", 1.0), ("two", 1.0), ("one", 9.0)):  # the longer one is cut
        sampled(tmp_path, **both, text_embeds=tmp_path / f"{name}.npy", guidance_scale=(scale, 1.0, 1.0))
        made[name, scale] = [np.load(tmp_path / f"codes_{number}.npy") for number in range(2)]
    assert len({tuple(one.tobytes() for one in each) for each in made.values()}) == 3
    _, _, codes = sampled(tmp_path, run=folder, text_embeds=tmp_path / "one.npy", prompt=next(voices.rglob("*.wav")),
                          prompt_seconds=0.2)
    assert len(codes) >= 10
    asked = dict(device="cpu", out=tmp_path / "x.wav")
    for settings, message in (
            (dict(run=folder, text="a i u"), "was trained on embeddings of texts; give one by --text_embeds"),
            (dict(run=whole, text_embeds=tmp_path / "one.npy"), "was not trained on embeddings of texts"),
            (dict(run=folder, text_embeds=tmp_path / "wide.npy"), "(3, 7), or not finite; expected (length, 6)"),
            (dict(run=folder, text_embeds=tmp_path / "bad.npy"), "(3, 6), or not finite; expected (length, 6)"),
            (dict(run=folder, text_embeds=tmp_path / "flat.npy"), "shape (6,); expected float16 or float32"),
            (dict(run=folder, text_embeds=tmp_path / "none.npy"), "none.npy: not a readable .npy array")):
        assert message in mistake("sample", **asked, **settings)


def test_a_published_codec_takes_the_place_of_one_trained_here(voices, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = transformers.EncodecModel(transformers.EncodecConfig(
        target_bandwidths=[1.5, 3.0], sampling_rate=16_000, num_filters=2, hidden_size=8, codebook_size=16,
        codebook_dim=8, upsampling_ratios=[8, 5, 4, 2], num_lstm_layers=1))
    for layer in model.quantizer.layers:
        torch.nn.init.normal_(layer.codebook.embed)
    model.save_pretrained(tmp_path / "encodec")
    spec, voice = f"encodec:{tmp_path / 'encodec'}", next(voices.rglob("*.wav"))
    codec = train_audio.load_soundstream(spec, CPU)
    wave = torch.from_numpy(audio.read(voice)[0][0])
    codes = codec.encode(wave[None])[0]
    frames = sum(part[codes[:, q]] for q, part in enumerate(codec.vectors()))
    torch.testing.assert_close(frames, codec.model.quantizer.decode(codes.T[:, None])[0].T, rtol=1e-4, atol=1e-4)
    out, sound, codes = sampled(tmp_path, soundstream=spec, reconstruct=voice, quantizers=3)
    assert codes.shape == (math.ceil(len(wave) / 320), 3) and codec.ends[-1] > 4 and "si_sdr_db" in out
    np.testing.assert_allclose(sound, codec.decode(codec.encode(wave[None], 3))[0, :len(wave)].clamp(-1, 1), atol=1e-4)
    for stage in ("semantic", "coarse", "fine"):
        run(*flags(**{**TINY, **dict(stage=stage, data=voices, run=tmp_path / "run", soundstream=spec, steps=2,
                                     quantizers=codec.ends[-1])}))
    _, sound, codes = sampled(tmp_path, run=tmp_path / "run", text="a i u")
    assert codes.shape[1] == codec.ends[-1] and len(sound) == 320 * len(codes) > 0
    with torch.no_grad():
        model.quantizer.layers[0].codebook.embed += 1
    model.bfloat16().save_pretrained(tmp_path / "encodec")
    assert train_audio.load_soundstream(spec, CPU).checksum != codec.checksum
    found = mistake(**{**TINY, **dict(stage="fine", data=voices, run=tmp_path / "low", soundstream=spec, quantizers=9,
                                      sample_rate=24_000)})
    assert f"--sample_rate: 24000, but {spec} was trained at 16000; give that" in found
    transformers.HubertConfig().save_pretrained(tmp_path / "hubert")
    with pytest.raises(UserError, match="a model of the kind hubert; expected encodec"):
        train_audio.load_soundstream(f"encodec:{tmp_path / 'hubert'}", CPU)


def test_settings_of_the_quantizer_reach_it():
    found = vars(codec_of(quantizer_dropout=0.3, least_quantizers=2, codebook_decay=0.9, dead_below=1.5,
                          grouped_quantizers=2, groups=4, group_codebooks="learned").quantizer)
    wanted = dict(dropout=0.3, least=2, decay=0.9, dead_below=1.5, groups=(1, 1, 4, 4), quantizers=4)
    assert {name: found[name] for name in wanted} == wanted
    pairs = [codec_of(grouped_quantizers=2, group_codebooks=kind).quantizer for kind in ("uniform", "learned")]
    assert pairs[0].groups == pairs[1].groups == (1, 1, 8, 8)
    assert [len(one.codebook[2].view(8, 16, 2)[0].unique(dim=0)) for one in pairs] == [15, 16]  # a grid of 5 * 3


@pytest.mark.parametrize("every, weight, wanted", [(3, 10.0, [10.0, 0, 0, 10.0, 0]), (1, 2.0, [2.0] * 5),
                                                   (1, 0.0, [0.0] * 5)])
def test_the_gradient_penalty_is_of_one_step_in_so_many(every, weight, wanted, monkeypatch):
    task, plan, batch = codec_task(monkeypatch, penalty_every=every, penalty_weight=weight, discriminate_after=0.0)
    heard, forward = [], train_audio.Discriminators.forward
    monkeypatch.setattr(train_audio.Discriminators, "forward",
                        lambda self, *args: heard.append(args[2:]) or forward(self, *args))
    for _ in wanted:
        task.update(plan, batch)
    assert [args[0] for args in heard if args][::len(plan)] == wanted


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_texts_are_dropped_in_training_as_often_as_asked(share, whole, monkeypatch):
    task, dropped = token_task(whole, "semantic", text_drop=share, dropout=0.0), []
    forward = train_audio.TokenTransformer.forward
    monkeypatch.setattr(train_audio.TokenTransformer, "forward",
                        lambda self, *args: dropped.extend(args[3].tolist()) or forward(self, *args))
    batch = [task.crops.fetch([0, 1])[0]] * 40
    task.update(accumulate.plan(80, 2, 0, 1), batch)
    assert len(dropped) == 80 and abs(np.mean(dropped) - share) < 0.15 * (0 < share < 1) + 1e-9
    task.figures("validation")
    assert not any(dropped[80:]) and len(dropped) > 80


def test_ranks_wait_for_each_other_as_long_as_asked(monkeypatch):
    class Asked(Exception):
        pass

    def setup(device, minutes):
        raise Asked(device, minutes)
    monkeypatch.setattr(dist, "setup", setup)
    with pytest.raises(Asked, match=r"\('cpu', 7.5\)"):
        train_audio.train([settings_of("coarse", timeout_minutes=7.5)])


def test_the_length_of_a_crop_is_given_in_seconds_or_samples(whole, tmp_path, voices):
    assert settings_of("coarse", crop_samples=4000) == settings_of("coarse", crop_samples=4000, seconds=9.0)
    assert settings_of("coarse", crop_samples=4000).seconds == 0.25
    path = tmp_path / "config.json"
    run(*words_of(whole, "semantic", tmp_path / "run", crop_samples=8000, steps=2))
    shutil.copy(tmp_path / "run/semantic/config.json", path)
    asked = dict(data=voices, run=tmp_path / "other", semantic=whole / "semantic", seconds=0.4)
    run("--config", path, *flags(**asked))
    assert [json.loads((tmp_path / one / "semantic/config.json").read_text())["seconds"] for one in ("run", "other")] \
        == [0.5, 0.4]  # what the command line says wins
    cfg = settings_of("soundstream", data=str(voices), crop_samples=5_001, sample_rate=24_000)
    assert train_audio.open_sources(cfg, cfg.seconds)[0].fetch([0])[0]["wave"].shape == (1, 5_001)


def write_bad(path):
    """A WAV file of float samples, of which those from the hundredth on are not finite."""
    samples = np.zeros(9000, "<f4")
    samples[100:] = np.nan
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32)
    path.write_bytes(struct.pack("<4sI4s", b"RIFF", 36 + samples.nbytes, b"WAVE") + header
                     + struct.pack("<4sI", b"data", samples.nbytes) + samples.tobytes())


def test_recordings_with_bad_samples_are_left_out_and_named_in_every_stage(tmp_path):
    write_voices(tmp_path / "data", range(101))
    source, = train_audio.open_sources(settings_of("soundstream", data=str(tmp_path / "data")))
    row = int(source.split("test", 0.1, 0.1)[0])  # the first to be listened to
    bad = Path(source.name(row))
    write_bad(bad)
    (tmp_path / "data/empty.wav").write_bytes(b"")
    (tmp_path / "data/cut.wav").write_bytes(bad.read_bytes()[:30])
    out = run(*flags(data=tmp_path / "data", run=tmp_path / "run", **{**TINY, "steps": 3, "eval_samples": 0}))
    assert f"{bad}: sample 100 is not finite" in out and out.count("3 recordings cannot be used and are left out") == 4
    assert "empty.wav" in out and "cut.wav" in out and "The stages together" in out
    assert len(list((tmp_path / "run/tokens").iterdir())) == 2


# Evaluation and sampling

def sampled(folder, *words, out="out.wav", **settings):
    """(what a `sample` printed, its sound (T,), codes) for one sound."""
    given = dict(seconds=0.5, device="cpu", out=folder / out, codes=folder / "codes.npy")
    said = run("sample", *flags(**{**given, **settings}), *words)
    found = folder / out
    return said, audio.read(found)[0][0] if found.exists() else None, (
        np.load(folder / "codes.npy") if (folder / "codes.npy").exists() else None)


def test_evaluate_gives_the_figures_of_training_and_of_any_weights(whole, tmp_path):
    folder = moved(whole, tmp_path / "run", to=tmp_path / "elsewhere")
    out = run("evaluate", *flags(run=folder, samples=4, seconds=0.3, device="cpu"))
    for stage in STAGES:
        trained = metrics(whole / stage)[-1]
        assert f"{folder / stage}, on test recordings:" in out
        assert f"{trained['test_loss']:.4f}" in out
    assert "The stages together" in out
    told = train_audio.Stack(folder, torch.device("cpu")).cfgs["coarse"]
    assert [told.run, told.soundstream, told.semantic] == [str(folder / name) for name in (
        "coarse", "soundstream", "semantic")] and not (tmp_path / "elsewhere").exists()  # nor are tokens put there
    online = run("evaluate", *flags(run=whole, samples=4, seconds=0.3, device="cpu", weights="online", part="train"))
    assert "on train recordings:" in online and "seconds_added" in online


def test_evaluate_on_other_recordings_reads_texts_as_the_model_learned_them(whole, tmp_path):
    data_ = write_voices(tmp_path / "voices", range(100, 140))
    for path in data_.rglob("*.txt"):
        path.write_text("entirely other words " + path.read_text())
    task, figures = token_task(whole, "semantic"), run("evaluate", *flags(run=whole, data=data_, samples=0, seconds=0.3,
                                                                         device="cpu"))
    assert "semantic, on test recordings" in figures and task.text.tokenizer.vocabulary


def test_reconstruction_by_any_number_of_quantizers_and_codes_written_and_read(whole, voices, tmp_path):
    voice = next(voices.rglob("*.wav"))
    wave = torch.from_numpy(audio.read(voice)[0][0])
    codec = train_audio.load_soundstream(whole / "soundstream", CPU)
    for quantizers, width in ((0, 11), (1, 1), (3, 3), (4, 11)):  # the last has eight pairs
        out, sound, codes = sampled(tmp_path, run=whole, reconstruct=voice, quantizers=quantizers,
                                    picture=tmp_path / "out.png")
        assert codes.shape == (math.ceil(len(wave) / 320), width) and len(sound) == len(wave)
        assert f"{codes.shape[1]} codes a frame, {codes.shape[1] * 200} bits a second, si_sdr_db" in out
        wanted = codec.decode(codec.encode(wave[None], quantizers or None))[0, :len(wave)]
        np.testing.assert_allclose(sound, wanted.clamp(-1, 1), atol=1e-4)
        shutil.copy(tmp_path / "codes.npy", tmp_path / "kept.npy")
        _, again, _ = sampled(tmp_path, run=whole, decode=tmp_path / "kept.npy")
        np.testing.assert_array_equal(again[:len(wave)], sound)
    _, fewer, codes = sampled(tmp_path, run=whole, decode=tmp_path / "kept.npy", quantizers=1)
    assert codes.shape[1] == 1 and not np.array_equal(fewer, again)
    assert media.read_png(tmp_path / "out.png").std() > 5
    online, _, _ = sampled(tmp_path, run=whole, reconstruct=voice, weights="online")
    assert "si_sdr_db" in online


def test_sounds_go_on_from_a_recording_from_its_codes_or_from_a_text(whole, voices, tmp_path):
    voice = next(voices.rglob("*.wav"))
    wave = torch.from_numpy(audio.read(voice)[0][0])
    codec = train_audio.load_soundstream(whole / "soundstream", CPU)
    prompt = codec.encode(wave[None, -4800:])[0].numpy()
    asked = dict(run=whole, prompt=voice, prompt_seconds=0.3, temperature=1.0)
    _, sound, codes = sampled(tmp_path, **asked)
    assert np.array_equal(codes[:15], prompt) and 15 <= len(codes) <= 15 + 25 and len(sound) == 320 * len(codes)
    _, _, again = sampled(tmp_path, **asked)
    _, _, other = sampled(tmp_path, **asked, seed=1)
    assert np.array_equal(codes, again) and not np.array_equal(codes, other)
    np.save(tmp_path / "prompt.npy", prompt)
    _, _, of_codes = sampled(tmp_path, run=whole, prompt_codes=tmp_path / "prompt.npy")
    assert np.array_equal(of_codes[:15], prompt)
    _, _, coarse = sampled(tmp_path, "--no_fine", **asked)
    assert np.array_equal(coarse, codes[:, :2])
    _, sound, codes = sampled(tmp_path, run=whole, text="a i u o", picture=tmp_path / "out.png", weights="online",
                              temperature=(0.0, 1.0, 0.5), top_k=(0.1, 1.0, 1.0), guidance_scale=(3.0, 1.0, 1.0))
    assert codes.shape[1] == 11 and len(codes) <= 25 and (tmp_path / "out.png").is_file()
    _, _, with_text = sampled(tmp_path, **asked, text="a i u o", guidance_scale=4.0)
    assert np.array_equal(with_text[:15], prompt)


@torch.no_grad()
def test_coarse_is_told_the_voice_of_the_prompt_or_one_as_frequent_as_in_training(whole, monkeypatch):
    stack, generate, told = train_audio.Stack(whole, CPU), train_audio.generate, []
    cfg = stack.cfgs["coarse"]
    source, = train_audio.open_sources(cfg)
    rows = source.split("train", cfg.validation, cfg.test)
    counts = np.bincount([stack.tokenizer.encode(source.wave(row), source.rate)[1] for row in rows], minlength=17)
    assert stack.facts["coarse"]["voices"] == counts.tolist() and (counts > 0).sum() > 2
    drawn = torch.cat([voice[0] for *_, voice in stack.silence(range(2000))])
    np.testing.assert_allclose(np.bincount(drawn, minlength=17) / 2000, counts / len(rows), atol=0.04)
    assert torch.equal(stack.silence([7])[0][2][0], drawn[7:8])
    monkeypatch.setitem(stack.cfgs, "coarse", dataclasses.replace(cfg, text="prefix"))  # which may name who speaks
    assert not len(stack.silence([7])[0][2])
    monkeypatch.setitem(stack.cfgs, "coarse", dataclasses.replace(cfg, text="prefix", given_drop=0.0))
    assert torch.equal(stack.silence([7])[0][2][0], drawn[7:8])
    monkeypatch.undo()

    def spy(model, codes, lengths, *rest):
        if model.streams[-1].name == "coarse":
            told.append((codes[0][..., 0].tolist(), lengths[0].tolist()))
        return generate(model, codes, lengths, *rest)
    monkeypatch.setattr(train_audio, "generate", spy)
    prompts = list(zip(*stack.heard([source.wave(row)[:3200] for row in rows[:2]])))
    prompts = [prompts[0], (*prompts[1][:2], prompts[1][2][:0]), *stack.silence([7])]
    drawings = train_audio.drawings_of(train_audio.EvaluateConfig())
    stack.speak(prompts, 0.8, [0, 1, 2], drawings, fine=False)
    voice = stack.tokenizer.encode(source.wave(rows[0])[:3200], source.rate)[1]
    assert len(told) > 1  # also in the second window
    for voices, lengths in told:
        for line, count in zip(voices, lengths):
            assert count in (0, 1) and (not count or line[0] in (voice, drawn[7]))
    first, lengths = told[0]
    assert lengths == [1, 0, 1] * 3 and first[0] == first[3] == first[6] == [voice]  # the rivals of guidance, too


@pytest.mark.parametrize("given_drop", [0.0, 0.1])
def test_without_a_prompt_to_hear_coarse_is_told_a_voice_unless_it_was_trained_without(given_drop, whole, tmp_path,
                                                                                       monkeypatch):
    folder, told = moved(whole, tmp_path / "run"), []
    state = checkpoint.load(folder / "coarse/model.pt")
    state["config"]["given_drop"] = given_drop
    checkpoint.save(state, folder / "coarse/model.pt")
    np.save(tmp_path / "prompt.npy", np.random.default_rng(0).integers(8, size=(15, 11)))

    class Spy(train_audio.Stack):
        def speak(self, prompts, *rest):
            told.append([voice for *_, voice in prompts])
            return super().speak(prompts, *rest)
    monkeypatch.setattr(train_audio, "Stack", Spy)
    asked = dict(run=str(folder), seconds=0.1, device="cpu", out=str(tmp_path / "out.wav"))
    train_audio.sample(train_audio.SampleConfig(**asked, prompt_codes=str(tmp_path / "prompt.npy")))
    train_audio.sample(train_audio.SampleConfig(**asked, text="a i u", num=3))
    stack = train_audio.Stack(folder, CPU)
    [voice] = stack.heard([stack.wave(torch.from_numpy(np.load(tmp_path / "prompt.npy")))])[2]
    assert [one.tolist() for one in told[0]] == ([[]] if given_drop else [voice.tolist()])
    drawn = stack.silence([accumulate.number(0, "a i u", number) for number in range(3)])
    assert [len(one) for one in told[1]] == [1] * 3 and all(map(torch.equal, told[1], [one for *_, one in drawn]))


def test_sounds_are_the_same_on_any_number_of_ranks(whole, tmp_path):
    (tmp_path / "texts.txt").write_text("a i u\n\n o e\n")
    words = ["sample", *flags(run=whole, file=tmp_path / "texts.txt", num=3, seconds=0.6, device="cpu")]

    def to(name):
        (tmp_path / name).mkdir()
        return flags(out=tmp_path / name / "out.wav", codes=tmp_path / name / "codes.npy")
    assert "6 sound(s)" in run(*words, *to("1"))
    out = Forked("train_audio", *words, *to("2"), ranks=2).finish()
    assert out.count("6 sound(s)") == 1
    for number in range(6):
        one, two = (np.load(tmp_path / ranks / f"codes_{number}.npy") for ranks in "12")
        assert np.array_equal(one, two)
        assert (tmp_path / f"2/out_{number}.wav").read_bytes() == (tmp_path / f"1/out_{number}.wav").read_bytes()
    assert len(list((tmp_path / "2").iterdir())) == 12


def test_recordings_of_another_rate_are_resampled_and_that_is_said(whole, voices, tmp_path):
    write_voices(tmp_path / "low", range(20), rate=8000)
    low = next((tmp_path / "low").rglob("*.wav"))
    out, sound, _ = sampled(tmp_path, run=whole, reconstruct=low)
    assert f"{low}: 8000 Hz, resampled to the codec's 16000" in out and len(sound) == 2 * len(audio.read(low)[0][0])
    out, _, _ = sampled(tmp_path, run=whole, prompt=low, prompt_seconds=0.2)
    assert f"{low}: 8000 Hz, resampled to the codec's 16000" in out
    out = run(*flags(**{**TINY, **dict(stage="soundstream", data=tmp_path / "low", run=tmp_path / "run", steps=3)}))
    assert "20 of 20 recordings at 8000 Hz are resampled to 16000" in out


# Mistakes

def mistake(*words, status=1, **settings):
    """The one line in which a command must end, with the exit status."""
    out = run(*words, *flags(**settings), expect=status)
    lines = [line for line in out.strip().splitlines() if "error:" in line]
    assert len(lines) == 1 and lines[0].startswith("train_audio.py: error: ") and "Traceback" not in out, out
    assert out.strip().splitlines()[-1] == lines[0], out
    return lines[0]


@pytest.mark.parametrize("words, message", [
    (["--stridse", "2"], "--stridse: no such setting; did you mean --strides?"),
    (["--strides", "1,4"], "is not 2 or more"), (["--strides", ""], "--strides"),
    (["--strides", "two"], "--strides: "),
    (["--coarse_quantizers", "8"], "--coarse_quantizers: 8 is not within 1 and 7"),
    (["--mel_floor", "1.5"], "--mel_floor: 1.5 is not within 0 and 1"),
    (["--coarse_quantizers", "0"], "--coarse_quantizers: 0 is not above 0"),
    (["--stft_window", "100"], "--stft_window: 100 is not a multiple of 128"), (["--seconds", "-1"], "--seconds: -1"),
    (["--heads", "5"], "--heads: width 192 must be a multiple of heads 5"), (["--lr", "0"], "--lr: 0.0 is not above 0"),
    (["--mask_past", "1"], "--mask_past: 1.0 is not 0 or more and below 1"),
    (["--validation", "0.6", "--test", "0.5"], "--validation 0.6"),
    (["--text_embeds"], "--text_embeds: it needs --text prefix or --text cross"),
    (["--stage", "coarse", "--tokenizer", "hubert:x:9"], "--tokenizer: it belongs to the semantic run"),
    (["--unique"], "--layout aligned: it predicts no tokens that are given"), (["--given_weight", "1"], "--layout al"),
    (["--codec_width", "80", "--grouped_quantizers", "1", "--groups", "3"],
     "--codebook_size, --groups: width 80 does not divide into 3 groups"),
    (["--grouped_quantizers", "-1"], "--grouped_quantizers: -1 is not 0 or more"),
    (["--grouped_quantizers", "9"], "--grouped_quantizers: 9, but there are 8"),
    (["--grouped_quantizers", "0", "--groups", "3"], "--groups: 3, but --grouped_quantizers is 0"),
    (["--codec_width", "91"], "--groups: pairs of channels, by default, need an even number of them, not 91"),
    (["--seconds", "0.01"], "--seconds: 0.01, shorter than a frame of 320 samples at 16000 Hz"),
    (["--crop_samples", "1700"], "too short for the discriminator of spectra, which takes 1.75 windows"),
    (["--crop_samples", "-1"], "--crop_samples: -1 is not 0 or more"),
    (["sample", "--top_k", "0.5,0,1"], "is not above 0 and at most 1"),
    (["--crop_samples", "4000", "--sample_rate", "0"], "--sample_rate: 0 is not above 0"),
    (["--seconds", "inf"], "--seconds: inf is not a finite number"),
    (["sample", "--seconds", "inf"], "--seconds: inf is not a finite number"),
    (["sample", "--given_scale", "1,inf,1"], "is not a finite number"),
    (["sample", "--top_k", "2"], "is not above 0 and at most 1"),
    (["sample", "--temperature", "-1"], "is not 0 or more"),
    (["sample", "--num", "0"], "--num: 0 is not above 0"), (["sample", "--seconds", "0"], "--seconds: 0.0 is not"),
    (["sample", "--quantizers", "-1"], "--quantizers: -1 is not 0 or more"),
    (["evaluate", "--prompt_seconds", "0"], "--prompt_seconds: 0.0 is not above 0"),
    (["evaluate", "--samples", "-3"], "--samples: -3 is not 0 or more"),
    (["--stage", "middle"], "--stage: invalid choice: 'middle' (choose from"),
    (["smaple"], "smaple: expected one of train, evaluate, sample"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words, status=2)


def test_samples_that_cannot_be_made_are_refused_in_one_line(whole, voices, tmp_path):
    voice, files = next(voices.rglob("*.wav")), {}
    whole_file = voice.read_bytes()
    for name, content in dict(empty=b"", truncated=whole_file[:2000], header=b"RIFX" + whole_file[4:]).items():
        files[name] = tmp_path / f"{name}.wav"
        files[name].write_bytes(content)
    write_bad(tmp_path / "nan.wav")
    audio.write_wav(tmp_path / "short.wav", np.zeros(319), 16_000)
    audio.write_wav(tmp_path / "long.wav", np.random.default_rng(0).uniform(-0.5, 0.5, 16_000), 16_000)
    (tmp_path / "empty.txt").write_text(" \n")
    for name, codes in dict(high=[[16] * 11], negative=[[-1] * 11], wide=[[1] * 12], between=[[1] * 4],
                            flat=[1, 2, 3], none=[[]], real=[[0.5] * 11], few=[[1] * 3]).items():
        np.save(tmp_path / f"{name}.npy", np.array(codes))
    (tmp_path / "text.npy").write_text("hello")
    for settings, message in [
        (dict(), "nothing to say: give --text"), (dict(reconstruct=files["empty"]), "empty.wav"),
        (dict(prompt=files["truncated"]), "truncated.wav: "), (dict(reconstruct=files["header"]), "header.wav: "),
        (dict(prompt=tmp_path / "missing.wav"), "missing.wav"),
        (dict(prompt=tmp_path / "nan.wav"), "nan.wav: sample 100 is not finite"),
        (dict(reconstruct=tmp_path / "nan.wav"), "nan.wav: sample 100 is not finite"),
        (dict(prompt=voice, soundstream=whole / "soundstream"), "--soundstream: only --reconstruct and --decode take"),
        (dict(prompt=tmp_path / "short.wav"), "319 samples at 16000 Hz, shorter than a frame of 320"),
        (dict(prompt=tmp_path / "long.wav"), "--prompt: 1.00 s, longer than the 0.48 s that the coarse stage was"),
        (dict(reconstruct=voice, text="a"), "--text, --reconstruct: the codec alone takes"),
        (dict(prompt=voice, prompt_codes=tmp_path / "few.npy"), "--prompt, --prompt_codes: give one of them"),
        (dict(text="a", file=tmp_path / "empty.txt"), "--text, --file: give one of them"),
        (dict(file=tmp_path / "empty.txt"), "empty.txt: no text in it"),
        (dict(reconstruct=voice, quantizers=5), "--quantizers: 5, but the codec has 4"),
        (dict(text="a", temperature=(1.0, 2.0)), "--temperature: 2 values; expected one, or one for each of semantic"),
        *((dict(decode=tmp_path / f"{name}.npy"),
           "expected whole numbers (frames, codes) below 16, of 1, 2, 3, 11 codes a frame")
          for name in ("high", "negative", "wide", "between", "flat", "none", "real")),
        (dict(decode=tmp_path / "text.npy"), "not a readable .npy array"),
        (dict(prompt_codes=tmp_path / "few.npy"), "3 codes a frame, but to go on takes 11"),
        (dict(text="a", run=tmp_path / "nothing"), "missing; train it first: --stage semantic"),
        (dict(reconstruct=voice, run=tmp_path / "nothing"), "missing; train it first: --stage soundstream"),
    ]:
        found = mistake("sample", **{**dict(run=whole, device="cpu", out=tmp_path / "x.wav"), **settings})
        assert message in found, (settings, found)
    assert not (tmp_path / "x.wav").exists()


def test_stages_that_were_not_trained_together_are_refused(whole, tmp_path):
    folder = moved(whole, tmp_path / "run")
    words = dict(run=folder, text="a", seconds=0.2, device="cpu", out=tmp_path / "x.wav")
    assert "1 sound(s)" in run("sample", *flags(**words))
    state = checkpoint.load(folder / "soundstream/model.pt")
    state["model"]["quantizer.codebook"] += 1e-3  # as by more training
    checkpoint.save(state, folder / "soundstream/model.pt")
    assert f"coarse: it was trained on the tokens of another codec than {folder / 'soundstream'}; train it anew" in \
        mistake("sample", **words)
    shutil.copytree(whole / "coarse/checkpoints", folder / "coarse/checkpoints")
    found = mistake(**{**TINY, **dict(stage="coarse", run=folder, data=whole.parent / "voices", steps=8)})
    assert "a run of another model or other data: codec is" in found
    shutil.copy(whole / "soundstream/model.pt", folder / "soundstream/model.pt")
    state = checkpoint.load(folder / "semantic/kmeans.pt")
    state["model"]["centers"] += 1
    checkpoint.save(state, folder / "semantic/kmeans.pt")
    assert "it was trained on the tokens of another tokenizer than" in mistake("sample", **words)
    shutil.copy(whole / "semantic/kmeans.pt", folder / "semantic/kmeans.pt")
    for stage, name, other, told in (("fine", "coarse_quantizers", 3, "3, and coarse with 2"),
                                     ("semantic", "unique", True, "True, and coarse with False")):
        run(*words_of(whole, stage, tmp_path / name, steps=2, layout="delay", **{name: other}))
        shutil.copy(tmp_path / name / stage / "model.pt", folder / stage / "model.pt")
        assert f"{folder / stage}: it was trained with --{name} {told}; train one of them anew" in mistake(
            "sample", **words)
        shutil.copy(whole / stage / "model.pt", folder / stage / "model.pt")
    run(*words_of(whole, "semantic", tmp_path / "silent", steps=2, text="none"))
    shutil.copy(tmp_path / "silent/semantic/model.pt", folder / "semantic/model.pt")
    assert f"--text: {folder} was trained without texts; give --prompt alone" in mistake("sample", **words)


def test_data_and_stages_that_training_cannot_use_are_refused_in_one_line(whole, voices, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/note.txt").write_text("hello")
    content = next(voices.rglob("*.wav")).read_bytes()
    bad = {"empty": b"", "truncated": content[:40], "header": b"JUNK" + content[4:]}
    for name, content in bad.items():
        for number in range(12):
            path = tmp_path / name / f"{number}.wav"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    for number in range(12):
        (tmp_path / "short").mkdir(exist_ok=True)
        audio.write_wav(tmp_path / f"short/{number}.wav", np.zeros(100), 16_000)
    silent = write_voices(tmp_path / "silent", range(20), text=False)
    stages = dict(soundstream=whole / "soundstream", semantic=whole / "semantic")
    caches = tmp_path / "stale/tokens"
    shutil.copytree(whole / "tokens", caches)
    for path in caches.glob("*/key.json"):
        path.write_text(json.dumps({name: "other" if name == "encoder codec" else value
                                    for name, value in json.loads(path.read_text()).items()}))
    for settings, message in [
        *((dict(data=tmp_path / name), message) for name, message in [
            ("missing", "no such folder"), ("nothing", "no audio files below it, 1 others"), ("empty", "0.wav"),
            ("truncated", "12 of 12 recordings cannot be used"), ("header", "12 of 12 recordings cannot be used"),
            ("short", "100 samples at 16000 Hz, 100 at 16000, shorter than a frame of 320")]),
        (dict(batch_size=50), "28 training rows, fewer than --batch_size 50; lower it"),
        (dict(steps=2), "--steps 2: there are no codebooks before --quantize_after 2; give more steps, or lower that"),
        (dict(validation=0.001), "40 rows leave none for validation; raise --validation"),
        (dict(speaker_pattern="("), "--speaker_pattern (: expected a regular expression"),
        (dict(stage="semantic", data=silent, text="prefix"), "has no transcripts; expected NAME.txt beside"),
        (dict(stage="semantic", text="cross", text_embeds="true"), "--text_embeds: no NAME.npy beside the recordings"),
        (dict(stage="coarse"), "soundstream/model.pt: missing; train it first: --stage soundstream, or give its run"),
        (dict(stage="fine"), "soundstream/model.pt: missing; train it first: --stage soundstream, or give its run"),
        (dict(stage="coarse", soundstream=stages["soundstream"]),
         "semantic/kmeans.pt: missing; train it first: --stage semantic, or give its run with --semantic"),
        (dict(stage="coarse", **stages, quantizers=9, coarse_quantizers=4), "--coarse_quantizers: 4, but"),
        (dict(stage="coarse", **{**stages, "soundstream": whole / "fine"}), "not a soundstream's model.pt"),
        *((dict(stage=stage, **stages, sample_rate=8000, run=tmp_path / "low"),
           f"--sample_rate: 8000, but {stages['soundstream']} was trained at 16000; give that")
          for stage in ("coarse", "fine")),
        (dict(stage="fine", **stages, run=tmp_path / "stale"), "token cache of another codec or of other data"),
        (dict(init_from=tmp_path / "nothing.pt"), "nothing.pt: no such checkpoint"),
        (dict(init_from=whole / "fine/model.pt"), "weights of another model"),
        (dict(run=whole, channels=3), "channels is 2 there and 3 here"),
        (dict(run=whole, grouped_quantizers=2), "grouped_quantizers is 1 there and 2 here"),
        (dict(run=whole, groups=16), "groups is 0 there and 16 here"),
        (dict(run=whole, group_codebooks="learned"), "group_codebooks is 'uniform' there and 'learned' here"),
        (dict(stage="fine", run=whole, width=32, **stages), "width is 16 there and 32 here"),
    ]:
        given = {**TINY, **dict(stage="soundstream", data=voices, run=tmp_path / f"run {message[:9]}"), **settings}
        found = mistake(**given)
        assert message in found, found
    out = Forked("train_audio", *flags(data=voices, run=tmp_path / "ranks", **{**TINY, "chunk_size": 4}),
                 ranks=2).finish(expect=1)
    assert "too few for 2 ranks; lower chunk_size to 2 or less" in out and "Traceback" not in out


def test_presets_and_defaults_of_the_stages_are_valid_settings():
    for settings in (*train_audio.PRESETS.values(), *train_audio.STAGES.values()):
        assert Config(**settings).sample_rate > 0
    codec = train_audio.SoundStream(Config(**train_audio.PRESETS["soundstream-24khz"]))
    assert (codec.hop, codec.rate, codec.ends) == (320, 24_000, [*range(1, 9)])
