"""Codec and transformers against themselves computed another way; the script as a user runs it."""

import functools
import itertools
import shutil
import types

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import AUDIO as TINY
from helpers import (
    KILLS,
    Forked,
    awake,
    differences,
    flags,
    follow,
    kill_often,
    kill_ranks,
    metrics,
    read_picture,
    two_copies,
    write_voices,
)
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import train_audio
from common import amp, checkpoint, config, order, recordings
from train_audio import Config, Lengths, SamplingParams, Stream, build_sequence, targets

CPU = torch.device("cpu")
STAGES = list(train_audio.STAGES)
WORDS = Stream("semantic", 1, 7)
COARSE = Stream("coarse", 2, 5)
FINE = Stream("fine", 3, 5)
VOCABULARY = ("a", "b", "c")
TEXTS = ["a b c", "", "c a"]
GREEDY = SamplingParams(0.0)
NEVER = -torch.inf
UNIFORM = SamplingParams(1e4)  # as good as uniform: EOS comes soon
run = functools.partial(helpers.run, "train_audio")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of all four stages, on the recordings in voices/ beside it."""
    folder = tmp_path_factory.mktemp("world")
    voices = write_voices(folder / "voices")
    (voices / "z.wav").write_bytes(b"")
    words = flags(data=voices, run_dir=folder / "whole", **TINY)
    out = run(*words)
    assert out.count("Trained") == 4
    assert out.count("1 of 41 samples looked at cannot be used") == 4
    # By four stages and evaluate: z.wav has none.
    assert out.count("41 recordings, 40 transcripts") == 5
    assert "wrote" in follow(out, "--device=cpu", "--out", folder / "next.wav")
    assert run(*words).count("is finished, at step 6; to train on, give more --steps") == 4
    return folder / "whole"


@pytest.fixture
def voice(whole):
    return whole.parent / "voices/voice_0/003.wav"


@pytest.fixture
def wave(voice):
    return read_wave(voice)


@pytest.fixture
def codec(whole):
    return train_audio.load_codec(str(whole / "soundstream"), CPU)


@pytest.fixture
def pipeline(whole):
    return train_audio.Pipeline(whole, CPU)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def read_wave(path):
    channels, *_ = recordings.read(path)
    return torch.from_numpy(channels)[0]


def make_codec(**settings):
    codec = awake(train_audio.SoundStream(Config(**{**TINY, **settings})), std=0.2).eval()
    with torch.no_grad():
        frames = codec.encode_latents(torch.randn(20, 20 * codec.hop_length))
    codec.quantizer.initialize(frames.flatten(0, 1), 0)
    return codec


def transformer(*streams, vocabulary=()):
    cfg = Config(width=16, depth=2, heads=2, dropout=0.0, max_text_len=4)
    lengths = Lengths(max_frames=8, max_context=4, frame_rate=50.0)
    model = train_audio.TokenTransformer(cfg, streams, lengths, vocabulary)
    model.heads.data *= 5  # so that rounding does not decide what is most probable
    return awake(model, std=0.5).eval()


def random_tokens(streams, *lengths):
    """For each sample its streams' codes (T, Q). lengths: of each stream, one a sample."""
    samples = []
    for sample_lengths in zip(*lengths):
        codes = []
        for stream, length in zip(streams, sample_lengths):
            codes.append(torch.randint(stream.codebook_size, (length, stream.num_quantizers)))
        samples.append(codes)
    return samples


# SoundStream


def test_a_wave_keeps_its_length_through_the_codec():
    codec = make_codec()
    wave = torch.randn(2, 13 * 160 - 3)
    codes = codec.encode(wave)
    decoded = codec.decode(codes)
    assert codes.shape == (2, 13, 4)
    assert decoded.shape == (2, 13 * 160)
    assert_close(codec(wave)[0], decoded[:, :-3])


@torch.no_grad()
def test_encoder_and_decoder_are_causal_by_frame():
    codec = make_codec(strides=(4, 3))
    hop = codec.hop_length
    wave = torch.randn(2, 13 * hop)
    frames = codec.encode_latents(wave)
    for sample in (5 * hop, 6 * hop - 1):  # the first and the last of frame 5
        other = wave.clone()
        other[:, sample] += 1
        change = (codec.encode_latents(other) - frames).abs().amax((0, 2))
        assert change[:5].max() < 1e-5
        assert change[5] > 1e-3

    decoded = codec.decode_latents(frames)
    frames[:, 5] += 1
    change = (codec.decode_latents(frames) - decoded).abs()
    assert change[:, : 5 * hop].max() < 1e-5
    assert change[:, 5 * hop : 6 * hop].max() > 1e-3


@torch.no_grad()
def test_the_stft_discriminator_sees_real_and_imaginary_parts_and_shrinks_as_in_the_paper():
    d = train_audio.STFTDiscriminator(8, 256)
    wave = torch.randn(3, 2048)
    spectrum = torch.stft(wave, 256, 64, window=torch.hann_window(256), return_complex=True)
    expected = torch.stack([spectrum.real, spectrum.imag], 1)
    assert_close(d.spectrum(wave), expected[:, :, :128])
    scores, features = d(wave)
    assert [x.shape[1] for x in features] == [8, 16, 32, 32, 64, 64, 128]
    # Every unit halves the 128 frequencies, every second one the 33 times.
    assert [x.shape[2] for x in features] == [128, 64, 32, 16, 8, 4, 2]
    assert [x.shape[3] for x in features] == [33, 33, 16, 16, 8, 8, 4]
    assert scores.shape == (3, 4)


def test_the_reconstruction_loss_is_the_papers_in_fp32_and_has_a_gradient_at_silence():
    cfg = Config(stage="soundstream", mel_weight=1e-3, wave_weight=3.0, commitment_weight=0.5)
    fake = torch.randn(4, 4096, requires_grad=True)
    real = torch.randn(4, 4096)
    expected = 3 * (fake - real).abs().mean() + 0.25
    for window in (64, 128, 256, 512, 1024, 2048):  # Eq. 4 and 5 of SoundStream
        spectra = recordings.stft_magnitude(torch.cat([fake, real]), window, window // 4)
        x, y = (spectra @ recordings.mel_filters(8000, window, 64)).chunk(2)
        logs = x.clamp(min=1e-3).log() - y.clamp(min=1e-3).log()
        distances = (x - y).abs().sum(2) + (window / 2) ** 0.5 * logs.norm(dim=2)
        expected = expected + 1e-3 * distances.sum(1).mean()

    loss = functools.partial(train_audio.reconstruction_loss, cfg, commitment=torch.tensor(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(loss(fake, real), expected, rtol=1e-4, atol=0)
    loss(fake, fake.detach()).backward()  # differences of 0
    loss(fake, torch.zeros(4, 4096)).backward()
    assert fake.grad.isfinite().all()


def test_adversarial_losses_are_hinges_feature_distances_and_r1_and_spare_the_other_network():
    cfg = Config(stage="soundstream", adversarial_weight=0.3, feature_weight=7.0, **TINY)
    discriminators = awake(train_audio.make_discriminators(cfg), std=0.2)
    parameters = [*discriminators.parameters()]
    fake = torch.randn(4, 2000, requires_grad=True)
    real = torch.randn(4, 2000, requires_grad=True)
    codec_loss = hinge = r1 = 0  # four times too large: summed over discriminators
    for d in discriminators:
        fake_score, fake_features = d(fake)
        real_score, real_features = d(real)
        codec_loss += 0.3 * F.relu(1 - fake_score).mean()
        for x, y in zip(fake_features, real_features):
            codec_loss += 7 * (x - y).abs().mean() / len(fake_features)
        hinge += F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        (gradient,) = torch.autograd.grad(real_score.sum(), real, create_graph=True)
        r1 += gradient.norm(dim=1).square().mean()

    loss = 4 * train_audio.adversarial_loss(cfg, discriminators, fake, real)
    loss.backward()
    (gradient,) = torch.autograd.grad(codec_loss, fake, retain_graph=True)
    assert_close((loss, fake.grad), (codec_loss, gradient), rtol=1e-3, atol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in parameters)

    loss = 4 * train_audio.discriminator_loss(discriminators, fake, real, r1_weight=10.0)
    expected = hinge + 10 * r1
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    theirs = torch.autograd.grad(expected, parameters)
    assert_close((loss, *ours), (expected, *theirs), rtol=1e-2, atol=1e-4)
    assert torch.autograd.grad(loss, fake, allow_unused=True) == (None,)
    with torch.autocast("cpu", torch.bfloat16):  # R1 stays in fp32
        loss = train_audio.discriminator_loss(discriminators, fake, real, r1_weight=1.0)
        loss -= train_audio.discriminator_loss(discriminators, fake, real)
    assert_close(4 * loss, r1, rtol=1e-4, atol=1e-5)


# Token transformers


def test_the_layout_is_the_one_that_its_docstring_draws():
    words = torch.tensor([[4], [0], [6]])
    codes = torch.tensor([[4, 1], [0, 4]])
    inputs, start = build_sequence([WORDS, COARSE], [words, codes])
    # Row 1 is <s>, row 9 <c>; the second quantizer's rows begin at 15.
    assert inputs.tolist() == [1, 2 + 4, 2 + 0, 2 + 6, 9, 10 + 4, 15 + 1, 10 + 0, 15 + 4]
    assert start == 4
    assert train_audio.stream_offsets([WORDS, COARSE]) == [1, 9, 20]
    assert targets(COARSE, codes, True).flatten().tolist() == [4, 1, 0, 4, 5, -100]  # 5 is EOS
    assert targets(COARSE, codes, False).flatten().tolist() == [4, 1, 0, 4, -100, -100]


def make_crops(frames, frame_rate=50):
    """TokenCrops of 40 frames of recordings of so many `frames`.

    Each token is the number of its frame, plus 1,000 a quantizer.
    """
    cfg = Config(seconds=40 / frame_rate)
    dataset = types.SimpleNamespace(text=lambda index: "")
    streams = [
        Stream("semantic", 1, 10_000),
        Stream("coarse", 2, 10_000),
        Stream("fine", 2, 10_000),
    ]
    words = list(np.arange(n * 50 / frame_rate, dtype=int)[:, None] for n in frames)
    codes = list(np.arange(n)[:, None] + [0, 1000, 2000, 3000] for n in frames)
    codec = types.SimpleNamespace(frame_rate=frame_rate)
    return train_audio.TokenCrops(cfg, dataset, streams, words, codes, codec)


@pytest.mark.parametrize("rate", [25, 50, 62.5, 80])
def test_tokens_of_a_crop_are_of_the_same_time_and_only_true_ends_end(rate):
    lengths = [200, 40, 31, 41]
    crops = make_crops(lengths, rate)
    for index, offset in itertools.product(range(4), (0.0, 0.21, 0.499, 0.5, 0.77, 0.999)):
        (words, coarse, fine), ended = crops.crop(index, offset)
        first, last = coarse[[0, -1], 0]
        assert len(coarse) == min(40, lengths[index])
        assert torch.equal(fine, coarse + 2000)  # the other quantizers
        assert abs(first / rate - words[0] / 50) <= 0.5 / 50 + 1e-6
        assert abs((last + 1) / rate - (words[-1] + 1) / 50) <= 1 / 50 + 1e-6
        assert ended == (last == lengths[index] - 1)
        assert not ended or words[-1] == len(crops.semantic_tokens[index]) - 1
    batch, _ = crops.fetch([0, 1, 2, 3])
    assert (batch["target"] == 10_000).nonzero().tolist() == [[1, 40, 0], [2, 31, 0]]  # EOS
    batch, _ = crops.fetch([0] * 2000, order.random_words(np.arange(2000), 0))
    assert 2 < (batch["target"] == 10_000).sum() < 30  # one crop in 161


def test_repeated_semantic_tokens_are_removed():
    crops = make_crops([6])
    crops.semantic_tokens[0] = np.array([[5], [5], [3], [3], [3], [5]])
    (words, _, _), _ = crops.crop(0)
    assert words.tolist() == [[5], [3], [5]]


@torch.no_grad()
def test_a_padded_sample_loses_what_it_does_alone():
    streams = [WORDS, COARSE]
    model = transformer(*streams, vocabulary=VOCABULARY)
    drop = torch.tensor([False, True, False])
    condition = model.condition(TEXTS, drop)
    inputs = []
    starts = []
    target = []
    expected = []
    for b, codes in enumerate(random_tokens(streams, [5, 1, 3], [2, 6, 0])):
        rows, start = build_sequence(streams, codes)
        inputs.append(rows)
        starts.append(start)
        target.append(targets(COARSE, codes[1], ended=b != 1))
        classes = target[b][target[b] >= 0]
        outputs, _ = model.run(rows[None], condition[b : b + 1])
        logits = [model.heads[i % 2] @ outputs[0, start + i] for i in range(len(classes))]
        logits = torch.stack(logits)
        loss = F.cross_entropy(logits, classes, reduction="sum")
        expected.append([loss, len(classes), (logits.argmax(1) == classes).sum()])
    batch = {
        "inputs": pad_sequence(inputs, True),
        "start": torch.tensor(starts),
        "target": pad_sequence(target, True, -100),
        "text": TEXTS,
    }
    found = torch.stack(model(batch, drop), 1)
    assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sampling, exponents",
    [
        (SamplingParams(0.7), [0, 2 / 0.7, 1 / 0.7, -1 / 0.7]),
        (SamplingParams(1.0, 9), [0, 2, 1, -1]),
        (SamplingParams(1.0, 2), [NEVER, 2, 1, NEVER]),
        (GREEDY, [NEVER, 2, NEVER, NEVER]),
    ],
)
def test_codes_are_sampled_from_the_softmax_of_the_most_probable(sampling, exponents):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, NEVER])
    uniform = torch.linspace(0, 1 - 2**-24, 20_000)
    codes = train_audio.sample_token(logits.expand(20_000, 5), uniform, sampling)
    expected = torch.tensor([*exponents, NEVER]).softmax(0)
    assert_close(torch.bincount(codes, minlength=5) / 20_000, expected, atol=1e-4, rtol=0)


# Generation


def naive(model, sample, frames, texts, scale):
    """Add `frames` of the most probable codes, each from a pass over the whole sequence."""
    context, prompt = sample
    Q = model.streams[-1].num_quantizers
    codes = prompt.flatten().tolist()
    for i in range(len(codes), len(codes) + frames * Q):
        padded = torch.tensor(codes + [0] * (-i % Q), dtype=torch.long).view(-1, Q)
        rows, start = build_sequence(model.streams, [context, padded])
        x = 0
        for drop, weight in ((False, scale), (True, 1 - scale)):
            condition = model.condition(texts, torch.tensor([drop]))
            outputs, _ = model.run(rows[None, : start + 1 + i], condition)
            x = x + weight * outputs[0, -1]
        logits = model.heads[i % Q] @ x
        if i % Q or not i:  # EOS is for a frame, and no recording is empty
            logits[5] = NEVER
        code = logits.argmax().item()
        if code == 5:
            break
        codes.append(code)
    return codes


@pytest.mark.parametrize("vocabulary, scale", [((), 1.0), (VOCABULARY, 2.5)])
@pytest.mark.parametrize("streams", [[WORDS, COARSE], [COARSE, FINE]])
@torch.no_grad()
def test_cached_generation_in_an_uneven_batch_is_a_naive_loop_over_each_sample(
    streams, vocabulary, scale
):
    model = transformer(*streams, vocabulary=vocabulary)
    samples = random_tokens(streams, [5, 2, 4], [3, 0, 1])
    sampling = SamplingParams(0.0, 0, scale)
    generated, ended = train_audio.generate(model, samples, 6, [0, 1, 2], sampling, TEXTS)
    for b, sample in enumerate(samples):
        assert generated[b].flatten().tolist() == naive(model, sample, 6, TEXTS[b : b + 1], scale)
        assert ended[b] == (len(generated[b]) < len(sample[1]) + 6)


@torch.no_grad()
def test_each_sample_ends_by_itself_at_the_start_of_a_frame_and_every_code_can_be_produced():
    model = transformer(COARSE, FINE)
    samples = random_tokens([COARSE, FINE], [2] * 90, [0] * 60 + [1] * 30)
    generated, ended = train_audio.generate(model, samples, 12, range(90), UNIFORM)
    added = torch.tensor([*map(len, generated)]) - torch.tensor([0] * 60 + [1] * 30)
    assert torch.equal(added < 12, torch.tensor(ended))
    assert len(added.unique()) > 8
    assert added[:60].min() == 1  # no recording is empty
    assert added[60:].min() == 0
    for q in range(3):
        assert torch.cat(generated)[:, q].unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "may_end, goals, sampling",
    [(False, [30, 21, 25], SamplingParams(1.0, 6, 1.5)), (True, [40, 40, 40], SamplingParams(3.0))],
)
@torch.no_grad()
def test_a_long_sound_comes_in_windows_that_overlap_by_half_alike_in_any_batch(
    may_end, goals, sampling
):
    model = transformer(WORDS, COARSE, vocabulary=VOCABULARY)  # 8 frames, 4 of context
    samples = random_tokens([WORDS, COARSE], [4, 5, 6], [3, 0, 11])
    pasts = []

    def generated(*indices):
        def condition_fn(i, past):
            pasts.append((indices[i], past))
            return [samples[indices[i]][0][len(past) // 4 :]]

        return train_audio.generate_long(
            model,
            condition_fn,
            [samples[b][1] for b in indices],
            [goals[b] for b in indices],
            indices,  # seeds
            sampling,
            [TEXTS[b] for b in indices],
            may_end,
        )

    sounds = generated(0, 1, 2)
    assert ([*map(len, sounds)] == goals) != may_end
    for b, past in pasts:  # a window drops what is there before it
        assert torch.equal(past, sounds[b][: len(past)])
        assert len(past) % 4 == 0 or b == 2  # whose prompt is 11 frames
    for b in range(3):
        assert torch.equal(generated(b)[0], sounds[b])


@pytest.mark.parametrize("length, ends", [(6, False), (4, True)])
@torch.no_grad()
def test_a_window_that_does_not_see_all_of_the_context_does_not_end_the_sound(length, ends):
    model = transformer(WORDS, COARSE)  # 8 frames, 4 of context
    context = torch.randint(7, (length, 1))
    empty = [torch.zeros(0, 2, dtype=torch.long)] * 40
    sounds = train_audio.generate_long(
        model, lambda *_: [context], empty, [30] * 40, range(40), UNIFORM
    )
    assert (min(map(len, sounds)) < 30) == ends


# Training


def words_of(whole, stage, folder, **settings):
    """The command line that trains one stage in `folder`, on earlier stages of the run `whole`."""
    words = {**TINY, "soundstream": whole / "soundstream", "semantic": whole / "semantic"}
    words |= dict(stage=stage, data=whole.parent / "voices", run_dir=folder)
    fields = Config.__dataclass_fields__
    words = {name: value for name, value in words.items() if config.is_for(fields[name], stage)}
    return flags(**{**words, **settings})


def test_two_ranks_lose_what_one_process_does(whole, tmp_path):
    words = flags(data=whole.parent / "voices", run_dir=tmp_path, **TINY)
    out = run(*words, ranks=2)
    assert out.count("2 rank(s) on cpu") == 4
    for stage in STAGES:
        expected = [pytest.approx(line, rel=2e-3) for line in metrics(whole / stage)]
        assert metrics(tmp_path / stage) == expected


def test_ranks_with_other_recordings_are_told_so_before_these_are_tokens(whole, tmp_path):
    folders = two_copies(whole.parent / "voices", tmp_path, "voices")
    voice = tmp_path / "1/voices/voice_0/003.wav"
    recordings.write_wav(voice, read_wave(voice).flip(0), 8000)
    words = words_of(whole, "semantic", tmp_path / "run", data="voices")
    out = Forked("train_audio", *words, ranks=2, folders=folders).finish(1)
    assert out.count("error: rank 1 has another data digest than rank 0") == 1
    assert "Traceback" not in out
    assert not (tmp_path / "run/tokens").exists()


@pytest.mark.parametrize("ranks", kill_ranks(1))
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_moments_and_started_again_ends_in_the_same_bits(
    stage, ranks, whole, tmp_path
):
    usual = whole
    settings = {"chunk_size": 1} if ranks > 2 else {}  # a chunk for each
    if ranks > 1:
        usual = tmp_path / "whole"
        Forked("train_audio", *words_of(whole, stage, usual, **settings), ranks=ranks).finish()
    words = words_of(whole, stage, tmp_path / "killed", **settings)
    running = kill_often("train_audio", words, ranks, f"{stage} {ranks}")
    Forked("train_audio", *words, ranks=ranks).finish()
    assert running >= KILLS / 2
    assert not differences(usual / stage, tmp_path / "killed" / stage)


def test_the_codecs_step_clears_the_gradients_of_both_networks(whole, tmp_path, monkeypatch):
    networks = []
    make = train_audio.make_discriminators

    def remember(cfg):
        networks.append(make(cfg))
        return networks[0]

    monkeypatch.setattr(train_audio, "make_discriminators", remember)
    run(*words_of(whole, "soundstream", tmp_path))
    [discriminators] = networks
    assert all(parameter.grad is None for parameter in discriminators.parameters())


def test_an_fp16_overflow_is_a_step_that_did_not_happen(whole, tmp_path, monkeypatch):
    settings = dict(
        precision="fp16",
        seconds=0.1,
        steps=5,
        chunk_size=4,
        log_every=1,
        eval_every=0,
        init_from=whole / "soundstream/model.pt",
    )
    monkeypatch.setattr(amp, "scaler", lambda *_: torch.amp.GradScaler("cpu", 64.0))

    def train(name, *last):
        run(*words_of(whole, "soundstream", tmp_path / name, **settings))
        folder = tmp_path / name / "soundstream"
        lines = [line for line in metrics(folder) if "scale" in line]
        assert [(line["overflows"], line["scale"]) for line in lines] == [(0, 64)] * 4 + [last]
        state = checkpoint.load(folder / "checkpoints/step_00000005.pt")
        return [state[name] for name in ("model", "ema", "discriminators")]

    usual = train("usual", 0, 64)
    scale = torch.amp.GradScaler.scale
    numbers = itertools.count()

    def overflow(scaler, loss):
        # Number 5 is the codec's in the last step: the discriminators' come from step 4 on.
        return scale(scaler, loss * torch.inf if next(numbers) == 5 else loss)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", overflow)
    assert_close(train("disturbed", 1, 32), usual, rtol=1e-3, atol=1e-3)


def main():
    """The script on few of the built-in recordings."""
    train_audio.BUILTIN_ROWS = 40
    train_audio.main()


def test_built_in_syllables_are_trained_on_and_scored_alike_on_any_number_of_ranks(tmp_path):
    few = functools.partial(helpers.run, "test_train_audio")
    settings = dict(seconds=0.3, precision="bf16", validation=0.2, test=0.2, online_samples=True)
    few(*flags(**{**TINY, **settings, "run_dir": tmp_path}), ranks=1)
    for name in ("step_00000004_0", "step_00000004_online_0", "test_1"):
        assert read_wave(tmp_path / f"coarse/samples/{name}.wav").any()
    scores = config.read_json(tmp_path / "scores.json")
    assert {"voice_kept_real", "text_heard", "text_heard_real"} < scores.keys()
    few("evaluate", *flags(run_dir=tmp_path, eval_samples=4, device="cpu"), ranks=2)
    assert scores == pytest.approx(config.read_json(tmp_path / "scores.json"), rel=1e-3)


@pytest.mark.parametrize(
    "stage, most, settings",
    [
        (
            "soundstream",
            0.8,
            dict(
                channels=4,
                latent_dim=32,
                seconds=0.2,
                lr=5e-3,
                quantizer_start=30,
                discriminator_start=60,
            ),
        ),
        ("coarse", 0.1, dict(width=48, dropout=0, seconds=1.5, lr=1e-2)),
    ],
)
def test_eight_clips_are_learned_by_heart(stage, most, settings, whole, tmp_path):
    settings |= dict(
        data=write_voices(tmp_path / "clips", range(11)),
        val_data=write_voices(tmp_path / "others", range(4), 16_000),
        test=0.1,
        steps=60,
        eval_every=0,
        save_every=0,
        log_every=20,
        chunk_size=8,
        batch_size=8,
    )
    run(*words_of(whole, stage, tmp_path, **settings))
    assert metrics(tmp_path / stage)[2]["loss"] < most


def test_a_codec_without_codebooks_is_not_evaluated(tmp_path):
    folder = write_voices(tmp_path / "voices")
    settings = {**TINY, "data": folder, "run_dir": tmp_path, "stage": "soundstream"}
    for name in ("width", "depth", "heads", "clusters"):
        del settings[name]
    run(*flags(**{**settings, "quantizer_start": 4, "eval_every": 2, "discriminator_start": 5}))
    lines = [line for line in metrics(tmp_path / "soundstream") if "val_loss" in line]
    assert [line["step"] for line in lines] == [6]


# The pipeline


def sampled(folder, **settings):
    """What `sample` prints, and the wave of the file that it writes."""
    words = flags(seconds=0.5, device="cpu", out=folder / "out.wav", **settings)
    return run("sample", *words), read_wave(folder / "out.wav")


def test_a_recording_goes_through_the_codec_at_a_bitrate(whole, codec, voice, wave, tmp_path):
    out, sound = sampled(tmp_path, run_dir=whole, reconstruct=voice, num_quantizers=3)
    codes = codec.encode(wave)
    assert_close(sound, codec.decode(codes[:, :3])[: len(wave)], atol=1e-4, rtol=0)
    # 4 bits a code, 50 frames a second.
    assert "3 codes a frame, 600 bits a second, si_sdr_db" in out
    assert read_picture(tmp_path / "out.png").any()


def test_a_prompt_is_continued_also_when_the_run_has_moved(whole, codec, voice, wave, tmp_path):
    moved = shutil.copytree(whole, tmp_path / "moved")
    settings = dict(run_dir=whole, prompt=voice, prompt_seconds=0.3, temperature=1)
    _, usual = sampled(tmp_path, **settings)
    prompt = codec.encode(wave[-2400:])
    assert 2400 < len(usual) <= 2400 + 25 * 160
    for other, alike in [
        (dict(run_dir=moved), True),
        (dict(seed=1), False),
        (dict(temperature=0), False),
        (dict(top_k=1), False),
        (dict(weights="online"), False),
    ]:
        _, sound = sampled(tmp_path, **{**settings, **other})
        assert_close(sound[:2400], codec.decode(prompt), atol=1e-4, rtol=0)
        assert torch.equal(sound, usual) == alike, other
    _, sound = sampled(tmp_path, fine="false", **settings)
    assert_close(sound[:2400], codec.decode(prompt[:, :2]), atol=1e-4, rtol=0)
    _, sound = sampled(tmp_path, **{**settings, "prompt_seconds": 0})
    longest = 19 * 160  # one frame less than coarse is trained on
    prompt = codec.encode(wave[-longest:])
    assert_close(sound[:longest], codec.decode(prompt), atol=1e-4, rtol=0)


def test_sounds_of_texts_and_prompts_are_the_same_in_any_batch(pipeline):
    texts = ["a i u", "o e", "y"]
    prompts = [pipeline.empty_prompt()]
    for n in (2, 5):
        words = torch.randint(8, (n, 1))
        prompts.append(train_audio.Prompt(words, torch.randint(16, (2 * n, 4))))
    sampling = SamplingParams(1.5)
    together = pipeline.generate(prompts, 0.6, [1, 2, 3], texts, sampling)
    for b in range(3):
        (alone,) = pipeline.generate([prompts[b]], 0.6, [b + 1], [texts[b]], sampling)
        assert torch.equal(alone, together[b])
    (without_text,) = pipeline.generate(prompts[:1], 0.6, [1], None, sampling)
    assert without_text.tolist() != together[0].tolist()


def test_a_sound_five_times_as_long_as_a_crop_shows_a_stage_no_more_than_its_training(
    pipeline, wave, monkeypatch
):
    def watched(model, samples, num_frames, *rest, generate=train_audio.generate):
        ((*context, prompt),) = samples
        assert all(len(codes) <= model.lengths.max_context <= 20 for codes in context)
        # Crops of 0.4 s have 20 frames.
        assert len(prompt) + num_frames <= model.lengths.max_frames <= 20
        return generate(model, samples, num_frames, *rest)

    monkeypatch.setattr(train_audio, "generate", watched)
    for model in pipeline.models.values():
        model.heads.data[:, -1] = 0  # EOS is never the most probable
    for prompt in (pipeline.empty_prompt(), pipeline.prompt(wave)):
        (sound,) = pipeline.generate([prompt], 5 * 0.4, [0], sampling=GREEDY)
        assert sound.shape == (len(prompt.codes) + 100, 4)  # 50 frames a second


def test_prompts_are_whole_frames_of_codes_and_of_semantic_tokens(pipeline):
    pipeline.codec = train_audio.Codec(make_codec(strides=(4, 5, 5)), "", CPU)  # 12.5 ms a frame
    wave = 0.1 * torch.randn(1037)
    words, codes = pipeline.prompt(wave)
    assert len(codes) == 10
    assert torch.equal(codes, pipeline.codec.encode(wave[37:]))
    tokens = pipeline.tokenize(wave[37:])
    assert len(tokens) == 7  # the last is mostly of silence
    assert words[:, 0].tolist() == train_audio.semantic.unique_consecutive(tokens[:6]).tolist()


# Published codecs

CODECS = {
    "encodec": dict(
        target_bandwidths=[0.4, 0.8],
        num_filters=2,
        hidden_size=8,
        upsampling_ratios=[5, 4, 4, 2],
    ),
    "dac": dict(
        encoder_hidden_size=2,
        decoder_hidden_size=16,
        n_codebooks=4,
        codebook_dim=4,
        downsampling_ratios=[2, 5, 3],
    ),
    "mimi": dict(
        num_filters=2,
        hidden_size=16,
        num_quantizers=4,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        upsampling_ratios=[5, 4, 4],
        upsample_groups=16,
        num_hidden_layers=1,
    ),
}


def published(folder, kind, **settings):
    """A tiny random model of `kind` in `folder`, whose codes vary."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = {**CODECS[kind], "sampling_rate": 8000, "codebook_size": 16, **settings}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **settings))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("embed", "embed_sum")):  # codebooks
            torch.nn.init.normal_(tensor)
        elif tensor.requires_grad and kind == "encodec":  # as they start, biases outweigh the sound
            tensor.data += 0.4 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "kind, hop_length, all_codes, two_codes",
    [
        ("encodec", 160, dict(bandwidth=0.8), dict(bandwidth=0.4)),
        ("dac", 30, {}, dict(n_quantizers=2)),
        ("mimi", 160, {}, dict(num_quantizers=2)),
    ],
)
@torch.no_grad()
def test_published_codecs_give_the_packages_own_codes_and_waves(
    kind, hop_length, all_codes, two_codes, tmp_path
):
    model = published(tmp_path, kind)
    wave = torch.randn(12 * hop_length + 1)
    padded = F.pad(wave, (0, hop_length - 1))[None, None]
    checksums = []
    for count, settings in ((4, all_codes), (2, two_codes)):
        codec = train_audio.load_codec(f"hf:{tmp_path}", CPU, count % 4)  # 0: all
        checksums.append(codec.checksum)
        theirs = model(padded, **settings)
        codes = codec.encode(wave)
        assert codes.shape == (13, count)
        assert (codes[1:] != codes[:-1]).any()
        assert torch.equal(codes, theirs.audio_codes.view(-1, 13).T)
        sound = codec.decode(codes)
        assert len(sound) == 13 * hop_length
        values = theirs.audio_values.flatten()  # DAC's are fewer where a stride is odd
        assert_close(sound[: len(values)], values)
    assert checksums[0] != checksums[1]  # other codes need other caches


@pytest.mark.parametrize(
    "kind, shape, settings, message",
    [
        ("encodec", dict(audio_channels=2), {}, "a model of 2 channels; expected one"),
        ("encodec", dict(normalize=True), {}, "normalizes chunks"),
        ("mimi", {}, dict(codec_quantizers=5), "5 quantizers: the codec has 4"),
        ("mimi", {}, dict(codec_quantizers=2), "--coarse_quantizers: 2, but the codec has 2"),
        ("mimi", {}, dict(sample_rate=16_000), "--sample_rate: 16000, but the codec's is 8000"),
    ],
)
def test_published_codecs_that_do_not_fit_are_refused(kind, shape, settings, message, tmp_path):
    published(tmp_path, kind, **shape)
    cfg = Config(stage="coarse", soundstream=f"hf:{tmp_path}", **settings)
    with pytest.raises(config.UserError, match=message):
        train_audio.codec_of(cfg, CPU)


def test_published_models_take_the_place_of_codec_and_tokenizer(whole, voice, tmp_path):
    published(tmp_path / "mimi", "mimi")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = transformers.WavLMConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_dim=(8,) * 7,
    )
    transformers.WavLMModel(small).save_pretrained(tmp_path / "wavlm")
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "wavlm")
    settings = dict(
        data=whole.parent / "voices",
        steps=2,
        run_dir=tmp_path / "run",
        coarse_quantizers=1,
        soundstream=f"hf:{tmp_path}/mimi",
        codec_quantizers=3,
        tokenizer=f"hf:{tmp_path}/wavlm:1",
    )
    out = run(*flags(**{**TINY, **settings}))
    assert out.count("Trained") == 3
    assert not (tmp_path / "run/soundstream").exists()
    pipeline = train_audio.Pipeline(tmp_path / "run", CPU)
    assert pipeline.codec.num_quantizers == 3
    _, sound = sampled(tmp_path, run_dir=tmp_path / "run", prompt=voice, prompt_seconds=0.2)
    assert len(sound) > 1600


# Mistakes


def mistake(*words, status):
    out = run(*words, expect=status)
    *notes, error = out.splitlines()
    assert all(note.startswith("note: ") for note in notes)
    assert error.startswith("train_audio.py: error: ")
    return out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--stage semantic --channels 4", "--channels: it has no effect on --stage semantic"),
        ("--stage soundstream --crop_samples 895", "too short for a discriminator"),
        ("--steps 300", "before --quantizer_start 300"),
        ("--width 30", "--heads: --width 30 must be an even multiple"),
        ("sample --out a.mp3", "--out: a.mp3: expected a name that ends in .wav"),
        ("sample --text a --reconstruct a.wav", "--reconstruct: no --text or --prompt"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(reconstruct="short.wav"), "shorter than a frame of 160"),
        (dict(model="worst.pt"), "semantic/worst.pt: missing"),
        (dict(weights="online", model="best.pt"), "averaged weights alone; --weights online needs"),
        (dict(run_dir="."), "semantic/model.pt: missing; train it first (--stage semantic)"),
    ],
)
def test_mistakes_that_files_show_are_one_line_and_status_1(settings, message, whole):
    recordings.write_wav("short.wav", torch.zeros(159), 8000)
    words = flags(**{"run_dir": whole, "device": "cpu", **settings})
    assert message in mistake("sample", *words, status=1)


@pytest.mark.parametrize(
    "stage, change, words, message",
    [
        ("semantic", dict(text_drop=0.0), {}, "so it needs --text"),
        ("semantic", dict(text_drop=0.0), dict(text="a", guidance_scale=2), "--guidance_scale: "),
        ("soundstream", {}, {}, "trained with another codec than coarse"),
    ],
)
def test_runs_that_do_not_fit_each_other_or_the_text_are_refused(
    stage, change, words, message, whole, tmp_path
):
    path = shutil.copytree(whole, tmp_path / "moved") / stage / "model.pt"
    state = checkpoint.load(path)
    (path.parent / "auto_resume.json").unlink()  # it has the sha256 of what is changed
    state["config"] |= change
    checkpoint.save({**state, "changed": True}, path)
    words = flags(run_dir=tmp_path / "moved", device="cpu", **words)
    assert message in mistake("sample", *words, status=1)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(semantic="semantic/model.pt"), "not a tokenizer: its kind is 'semantic'"),
        (dict(soundstream="nowhere"), "train it first (--stage soundstream)"),
    ],
)
def test_earlier_stages_that_do_not_fit_are_refused(settings, message, whole, monkeypatch):
    monkeypatch.chdir(whole)  # paths in settings are relative to it
    assert message in mistake(*words_of(whole, "coarse", "new", **settings), status=1)
