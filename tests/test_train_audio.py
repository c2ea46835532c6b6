"""Codec and transformers against themselves computed another way; the script as a user runs it."""

import collections
import dataclasses
import functools
import itertools
import shutil
from pathlib import Path
from unittest import mock

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, STAGES, awake, follow, metrics, published_codec, saved, write_voices
from torch.testing import assert_close

import train_audio
from common import amp, checkpoint, config
from common.data import recordings, sounds, tokens
from common.models import quantize
from train_audio import CodecConfig, SamplingParams, Stream, build_sequence, targets

WORDS = Stream("semantic", 1, 7)
COARSE = Stream("coarse", 2, 5)
FINE = Stream("fine", 3, 5)
VOCABULARY = ("a", "b", "c")
TEXTS = ["a b c", "", "c a"]
GREEDY = SamplingParams(0.0)
NEVER = -torch.inf
UNIFORM = SamplingParams(1e4)  # as good as uniform: EOS comes soon
run = functools.partial(helpers.run, "train_audio")


def train(whole, stage, folder, **settings):
    """Train one stage in `folder`, on earlier stages of the run `whole`; returns the output."""
    usual = {**STAGES[stage], "data": whole.parent / "voices", "run_dir": folder}
    if stage in ("coarse", "fine") and folder != whole:
        usual["soundstream"] = whole / "soundstream"
    return run(**usual | settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of all four stages, on the recordings in voices/ beside it."""
    folder = tmp_path_factory.mktemp("world")
    voices = write_voices(folder / "voices")
    (voices / "z.wav").write_bytes(b"")
    for stage in STAGES:
        out = train(folder / "whole", stage, folder / "whole")
        assert "1 of 41 samples looked at cannot be used" in out
        again = train(folder / "whole", stage, folder / "whole")
        assert "is finished, at step 6; to train on, give more --steps" in again
    # A run may be in a folder that only others may write to.
    out = run("evaluate", run_dir=folder / "whole", out=folder / "scores", device="cpu")
    follow(out, "--device=cpu", "--out", folder / "next.wav")
    assert (folder / "scores/scores.json").exists()
    assert not (folder / "whole/scores.json").exists()
    assert not (folder / "whole/sounds").exists()
    return folder / "whole"


@pytest.fixture
def voice(whole):
    return whole.parent / "voices/voice_0/003.wav"


@pytest.fixture
def wave(voice):
    return read_wave(voice)


@pytest.fixture
def codec(whole):
    return train_audio.load_model("soundstream", f"{whole}/soundstream", CPU)


@pytest.fixture
def pipeline(whole):
    return train_audio.Pipeline(train_audio.EvaluateConfig(run_dir=str(whole)), CPU)


def read_wave(path):
    channels, *_ = recordings.read(path)
    return torch.from_numpy(channels)[0]


def make_codec(**settings):
    cfg = CodecConfig(**STAGES["soundstream"] | settings)
    codec = awake(train_audio.SoundStream(cfg), std=0.2).eval()
    with torch.no_grad():
        frames = codec.encode_latents(torch.randn(20, 20 * codec.hop_length))
    codec.quantizer.initialize(frames.flatten(0, 1), 0, 100)
    return codec


def transformer(*streams, vocabulary=()):
    cfg = train_audio.SemanticConfig(width=16, depth=2, heads=2, dropout=0.0, max_text_len=4)
    lengths = (8, 4, 50.0)  # frames, frames of context, frames a second
    model = train_audio.TokenTransformer(cfg, streams, lengths, vocabulary)
    model.heads.data *= 5  # so that rounding does not decide what is most probable
    return awake(model, std=0.5).eval()


def random_tokens(streams, *lengths):
    """For each sample its streams' codes (T, Q). lengths: of each stream, one a sample."""
    columns = []
    for stream, column in zip(streams, lengths):
        K = stream.codebook_size
        columns.append([torch.randint(K, (n, stream.num_quantizers)) for n in column])
    return [*zip(*columns)]


# SoundStream


@torch.no_grad()
def test_encoder_and_decoder_are_causal_by_frame():
    codec = make_codec(strides=(4, 3))  # frames of 12 samples
    wave = torch.randn(2, 156)
    frames = codec.encode_latents(wave)
    for sample in (60, 71):  # the first and the last of frame 5
        other = wave.clone()
        other[:, sample] += 1
        change = (codec.encode_latents(other) - frames).abs().amax((0, 2))
        assert change[:5].max() < 1e-5
        assert change[5] > 1e-3

    decoded = codec.decode_latents(frames)
    frames[:, 5] += 1
    change = (codec.decode_latents(frames) - decoded).abs()
    assert change[:, :60].max() < 1e-5
    assert change[:, 60:72].max() > 1e-3


@torch.no_grad()
def test_a_long_sound_is_coded_in_blocks_as_in_one_piece(monkeypatch):
    codec = make_codec(strides=(2, 2), pre_emphasis=0.9)
    wave = 0.1 * torch.randn(4_001)
    codes = codec.encode(wave)
    decoded = codec.decode(codes)
    monkeypatch.setattr(recordings, "BLOCK_FRAMES", 300)
    assert torch.equal(codec.encode(wave), codes)
    assert_close(codec.decode(codes), decoded)


def test_emphasis_is_undone_and_keeps_the_size_of_sound_whose_neighbors_are_alike():
    codec = make_codec(pre_emphasis=0.95)
    wave = torch.randn(2, 3_000).cumsum(1)
    wave[1] = 0.9 ** torch.arange(3_000.0)  # neighbors correlate by 0.9
    emphasized = codec.emphasize(wave)
    assert_close(codec.deemphasize(emphasized), wave, atol=1e-2, rtol=0)
    assert 0.9 < emphasized[1].norm() / wave[1].norm() < 1.1


def test_the_elu_is_torchs_with_its_gradient():
    x = torch.linspace(-9, 9, 1001).requires_grad_()
    y = train_audio.ELU()(x)
    y.sum().backward()
    assert_close(y, F.elu(x), atol=1e-6, rtol=1e-6)
    assert_close(x.grad, x.exp().clamp(max=1), atol=2e-6, rtol=1e-5)


def test_augmented_waves_are_louder_or_softer_and_some_are_mixes():
    waves = torch.eye(200)  # each sounds at a time of its own
    found = train_audio.augment(waves)
    gains = 20 * found.diagonal().log10()
    assert -10 <= gains.min() < -9 and 5 < gains.max() <= 6
    assert 60 < ((found > 0).sum(1) == 2).sum() < 140


@torch.no_grad()
def test_the_stft_discriminator_sees_real_and_imaginary_parts_and_shrinks_as_in_the_paper():
    d = train_audio.STFTDiscriminator(8, 256)
    wave = torch.randn(3, 2048)
    spectrum = torch.stft(wave, 256, 64, window=torch.hann_window(256), return_complex=True)
    assert_close(torch.complex(*d.transform(wave).unbind(1)), spectrum[:, :128])
    scores, features = d(wave)
    # Every unit halves the 128 frequencies, every second one the 33 times.
    shapes = [x.shape[1:] for x in features[::2]]
    assert shapes == [(8, 128, 33), (32, 32, 16), (64, 8, 8), (128, 2, 4)]
    assert scores.shape == (3, 4)


def test_the_reconstruction_loss_is_the_papers_in_fp32_and_has_a_gradient_at_silence():
    cfg = CodecConfig(mel_weight=1e-3, wave_weight=3.0, commitment_weight=0.5)
    fake = torch.randn(4, 4096, requires_grad=True)
    real = torch.randn(4, 4096)
    expected = 3 * F.l1_loss(fake, real) + 0.25
    for window in (64, 128, 256, 512, 1024, 2048):  # Eq. 4 and 5 of SoundStream
        spectra = recordings.stft_magnitude(torch.cat([fake, real]), window, window // 4)
        mel = spectra @ recordings.mel_filters(8000, window, 64)
        difference = mel[:4] - mel[4:]
        logs = mel[:4].log() - mel[4:].log()
        distances = difference.norm(1, dim=2) + (window / 2) ** 0.5 * logs.norm(dim=2)
        expected = expected + 1e-3 * distances.sum(1).mean()

    loss = functools.partial(train_audio.reconstruction_loss, cfg, commitment=torch.tensor(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(loss(fake, real), expected, rtol=1e-4, atol=0)
    loss(fake, fake.detach()).backward()  # differences of 0
    loss(fake, torch.zeros(4, 4096)).backward()
    assert fake.grad.isfinite().all()


def test_adversarial_losses_are_hinges_feature_distances_and_r1_and_spare_the_other_network():
    cfg = CodecConfig(adversarial_weight=0.3, feature_weight=7.0, **STAGES["soundstream"])
    discriminators = awake(train_audio.make_discriminators(cfg), std=0.2)
    parameters = [*discriminators.parameters()]
    fake = torch.randn(4, 2000, requires_grad=True)
    real = torch.randn(4, 2000, requires_grad=True)
    codec_loss = their_loss = 0  # four times too large: summed over discriminators
    for d in discriminators:
        fake_score, fake_features = d(fake)
        real_score, real_features = d(real)
        distances = torch.stack([*map(F.l1_loss, fake_features, real_features)])
        codec_loss += 0.3 * F.relu(1 - fake_score).mean() + 7 * distances.mean()
        their_loss += F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        (gradient,) = torch.autograd.grad(real_score.sum(), real, create_graph=True)
        their_loss += 10 * gradient.norm(dim=1).square().mean()

    loss = 4 * train_audio.adversarial_loss(cfg, discriminators, fake, real)
    loss.backward()
    (gradient,) = torch.autograd.grad(codec_loss, fake, retain_graph=True)
    assert_close((loss, fake.grad), (codec_loss, gradient), rtol=1e-3, atol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in parameters)

    loss = 4 * train_audio.discriminator_loss(discriminators, fake, real, r1_weight=10.0)
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    theirs = torch.autograd.grad(their_loss, parameters)
    assert_close((loss, *ours), (their_loss, *theirs), rtol=1e-2, atol=1e-4)
    assert torch.autograd.grad(loss, fake, allow_unused=True) == (None,)


# Token transformers


def test_the_layout_is_the_one_that_its_docstring_draws():
    words = torch.tensor([[4], [0], [6]])
    codes = torch.tensor([[4, 1], [0, 4]])
    inputs, start = build_sequence([WORDS, COARSE], [words, codes])
    # Row 1 is <s>, row 9 <c>; the second quantizer's rows begin at 15.
    assert inputs.tolist() == [1, 2 + 4, 2 + 0, 2 + 6, 9, 10 + 4, 15 + 1, 10 + 0, 15 + 4]
    assert start == 4
    assert targets(COARSE, codes, True).flatten().tolist() == [4, 1, 0, 4, 5, -100]  # 5 is EOS
    assert targets(COARSE, codes, False).flatten().tolist() == [4, 1, 0, 4, -100, -100]


@torch.no_grad()
def test_a_padded_sample_loses_what_it_does_alone():
    streams = [WORDS, COARSE]
    model = transformer(*streams, vocabulary=VOCABULARY)
    drop = torch.tensor([False, True, False])
    ended = [True, False, True]
    samples = random_tokens(streams, [5, 1, 3], [2, 6, 1])
    batch = {**train_audio.lay_out(streams, [*zip(samples, ended)]), "text": TEXTS}
    losses, accuracies = model(batch, drop)
    condition = model.condition(TEXTS, drop)
    for b, codes in enumerate(samples):
        rows, start = build_sequence(streams, codes)
        outputs, _ = model.run(rows[None], condition[b : b + 1])
        classes = codes[1].flatten().tolist() + [5] * ended[b]  # 5 is EOS
        logits = [model.heads[i % 2] @ outputs[0, start + i] for i in range(len(classes))]
        logits = torch.stack(logits)
        classes = torch.tensor(classes)
        assert_close(losses[b], F.cross_entropy(logits, classes), rtol=1e-4, atol=1e-4)
        assert_close(accuracies[b], (logits.argmax(1) == classes).float().mean())


@pytest.mark.parametrize(
    "sampling, exponents",
    [
        (SamplingParams(0.7), [0, 2 / 0.7, 1 / 0.7, -1 / 0.7]),
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
    limits = [6, 5, 7]
    generated = train_audio.generate(
        model, samples, [0, 1, 0], limits, [0, 1, 2], sampling, TEXTS
    )
    for b, (context, prompt) in enumerate(samples):
        expected = naive(model, (context, prompt), limits[b], TEXTS[b : b + 1], scale)
        assert [*prompt.flatten().tolist(), *generated[b].flatten().tolist()] == expected


@torch.no_grad()
def test_each_sample_ends_by_itself_at_the_start_of_a_frame_and_every_code_can_be_produced():
    model = transformer(COARSE, FINE)
    samples = random_tokens([COARSE, FINE], [2] * 90, [0] * 60 + [1] * 30)
    fewest = [1] * 60 + [0] * 20 + [12] * 10
    generated = train_audio.generate(model, samples, fewest, [12] * 90, range(90), UNIFORM)
    added = torch.tensor([*map(len, generated)])
    assert len(added.unique()) > 8
    assert added[:60].min() == 1  # no recording is empty
    assert added[60:80].min() == 0
    assert added[80:].min() == 12
    for q in range(3):
        assert torch.cat(generated)[:, q].unique().tolist() == [0, 1, 2, 3, 4]


@torch.no_grad()
def test_a_long_sound_is_the_same_in_any_batch():
    model = transformer(WORDS, COARSE, vocabulary=VOCABULARY)  # 8 frames, 4 of context
    samples = random_tokens([WORDS, COARSE], [4, 5, 6], [3, 0, 11])
    limits = [30, 21, 25]

    def generated(*indices):
        return train_audio.generate_long(
            model,
            lambda i, codes, start: [samples[indices[i]][0][start // 4 :]],
            [samples[b][1] for b in indices],
            [limits[b] for b in indices],
            indices,  # seeds
            SamplingParams(1.0, 6, 1.5),
            [TEXTS[b] for b in indices],
            may_end=False,
        )

    sounds = generated(0, 1, 2)
    assert [*map(len, sounds)] == limits
    for b in range(3):
        assert torch.equal(*generated(b), sounds[b])


# Training


def test_two_ranks_lose_what_one_process_does(whole, tmp_path):
    for stage in STAGES:
        out = train(tmp_path, stage, tmp_path, data=whole.parent / "voices", ranks=2)
        assert "2 rank(s) on cpu" in out
        expected = [pytest.approx(line, rel=2e-3) for line in metrics(whole / stage)]
        assert metrics(tmp_path / stage) == expected


def test_a_discriminator_that_is_not_finite_ends_the_run_before_it_is_saved(whole, monkeypatch):
    loss = train_audio.discriminator_loss
    monkeypatch.setattr(train_audio, "discriminator_loss", lambda *args: loss(*args) * torch.nan)
    out = train(whole, "soundstream", "run", expect=1)
    assert "loss or gradient is not finite at step 4" in out
    assert [entry["step"] for entry in saved("run/soundstream")] == [2]


def test_an_fp16_overflow_is_a_step_that_did_not_happen(whole, monkeypatch):
    settings = dict(
        precision="fp16",
        seconds=0.12,
        steps=5,
        chunk_size=4,
        log_every=1,
        eval_every=0,
        init_from=whole / "soundstream/model.pt",
    )
    monkeypatch.setattr(amp, "scaler", lambda *_: torch.amp.GradScaler("cpu", 64.0))

    def outcome(name):
        train(whole, "soundstream", name, **settings)
        folder = f"{name}/soundstream"
        last = metrics(folder)[-3]  # before those of validation and test
        state = checkpoint.load(f"{folder}/checkpoints/step_00000005.pt")
        weights = state["model"], state["ema"], state["training"]["others"]
        return (last["overflows"], state["training"]["scaler"]["scale"]), weights

    scales, usual = outcome("usual")
    assert scales == (0, 64)
    scale = torch.amp.GradScaler.scale
    numbers = itertools.count()

    def overflow(scaler, loss):
        # Number 5 is the codec's in the last step: the discriminators' come from step 4 on.
        return scale(scaler, loss * torch.inf if next(numbers) == 5 else loss)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", overflow)
    scales, disturbed = outcome("disturbed")
    assert scales == (1, 32)
    assert_close(disturbed, usual, rtol=1e-3, atol=1e-3)


def main():
    """The script with small stages, on few of the built-in recordings."""
    train_audio.BUILTIN_ROWS = 40
    for stage, settings in STAGES.items():
        cls = train_audio.STAGES[stage]
        cls.__init__ = functools.partialmethod(cls.__init__, **settings)  # other defaults
    train_audio.main()


def test_all_stages_are_trained_and_the_built_in_syllables_scored_alike_on_any_ranks():
    few = functools.partial(helpers.run, "test_train_audio")
    settings = dict(chunk_size=2, precision="bf16", validation=0.2, test=0.2, eval_every=2)
    out = few(run_dir="run", device="cpu", ranks=1, **settings)
    assert out.count("is finished") == 4
    assert "wrote" in follow(out, "--device=cpu", "--out", "next.wav")
    for name in ("step_00000004_0", "test_1"):
        assert read_wave(f"run/coarse/samples/{name}.wav").any()
    # In step 2 the codec has no codebooks yet.
    evaluated = [line["step"] for line in metrics("run/soundstream") if "val_loss" in line]
    assert evaluated == [4, 6]
    scores = config.read_json("run/scores.json")
    assert {"voice_kept_real", "text_heard", "text_heard_real"} < scores.keys()
    few("evaluate", run_dir="run", device="cpu", ranks=2)
    assert scores == pytest.approx(config.read_json("run/scores.json"), rel=1e-3)


# The pipeline


def sampled(**settings):
    """What `sample` prints, and the wave of the file that it writes."""
    out = run("sample", device="cpu", out="out.wav", **settings)
    return out, read_wave("out.wav")


def test_a_recording_goes_through_the_codec_at_a_bitrate(whole, codec, wave):
    stereo = torch.stack([wave, -wave]).numpy()  # whose mean is silence
    Path("stereo.wav").write_bytes(helpers.wav(stereo, 8000))
    out, sound = sampled(run_dir=whole, reconstruct="stereo.wav", num_quantizers=3)
    assert "stereo.wav: channels that cancel out are not mixed" in out
    gain = 0.1 / wave.square().mean().sqrt()
    codes = codec.encode(gain * wave)
    expected = codec.decode(codes[:, :3])[: len(wave)] / gain  # as loud as it was
    assert_close(sound, expected, atol=1e-4, rtol=0)
    # 4 bits a code, 50 frames a second.
    assert "3 codes a frame, 600 bits a second" in out


def test_a_prompt_is_continued_also_when_the_run_has_moved(whole, codec, voice, wave):
    shutil.copytree(whole, "moved")
    settings = dict(run_dir=whole, prompt=voice, prompt_seconds=0.3, seconds=0.5, temperature=1)
    _, usual = sampled(**settings)
    gain = 0.1 / wave[-2400:].square().mean().sqrt()
    prompt = codec.encode(gain * wave[-2400:])
    assert 2400 < len(usual) <= 2400 + 25 * 160
    for name, value, alike in [
        ("run_dir", "moved", True),
        ("seed", 1, False),
        ("top_k", 1, False),
        ("weights", "online", False),
    ]:
        _, sound = sampled(**settings | {name: value})
        assert_close(sound[:2400], codec.decode(prompt) / gain, atol=1e-4, rtol=0)
        assert torch.equal(sound, usual) == alike, name
    shutil.rmtree("moved/fine")  # which is not needed
    _, sound = sampled(**settings | {"run_dir": "moved", "fine": "false"})
    assert_close(sound[:2400], codec.decode(prompt[:, :2]) / gain, atol=1e-4, rtol=0)


def test_a_text_longer_than_those_of_training_is_cut_with_a_note(whole):
    out, _ = sampled(run_dir=whole, text=25 * "a ")
    assert "1 are cut, as they are longer than 24 tokens" in out
    out, _ = sampled(run_dir=whole, text=24 * "a ")
    assert "are cut" not in out


def test_a_sound_five_times_as_long_as_a_crop_shows_a_stage_no_more_than_its_training(
    pipeline, wave, monkeypatch
):
    def watched(model, samples, fewest, most, *rest, generate=train_audio.generate):
        ((*context, window),) = samples
        assert all(len(codes) <= model.max_context <= 20 for codes in context)
        # Crops of 0.4 s have 20 frames.
        assert len(window) + most[0] <= model.max_frames <= 20
        new = generate(model, samples, fewest, most, *rest)
        calls[model.streams[-1].name].append((*context, len(window), new[0]))
        return new

    monkeypatch.setattr(train_audio, "generate", watched)
    for model in pipeline.models:
        model.heads.data[:, -1] = 0  # EOS is never the most probable
    calls = collections.defaultdict(list)
    prompt = pipeline.prompt(wave)
    (sound,) = pipeline.generate([prompt], 5 * 0.4, [0], sampling=GREEDY)
    assert sound.shape == (len(prompt.codes) + 100, 4)  # 50 frames a second
    # A later window of coarse begins with the semantic token that is heard there.
    content = torch.cat([prompt.semantic, *(new for _, new in calls["semantic"])])
    known = prompt.codes[:, :2]
    assert [length for _, length, _ in calls["coarse"]] == [10] * 10  # they overlap by half
    for context, length, new in calls["coarse"]:
        heard = pipeline.kmeans.encode(pipeline.codec.decode(known))
        expected = tokens.tokens_of_window(content, heard, len(known) - length)
        assert torch.equal(context, expected[:20][: len(context)])
        known = torch.cat([known, new])


def test_prompts_are_whole_frames_of_codes_and_of_semantic_tokens(pipeline):
    pipeline.codec = make_codec(strides=(4, 5, 5))  # 12.5 ms a frame
    wave = 0.1 * torch.randn(1037)
    words, codes = pipeline.prompt(wave)
    assert len(codes) == 10
    assert torch.equal(codes, pipeline.codec.encode(wave[37:]))
    tokens = pipeline.kmeans.encode(wave[37:])
    assert len(tokens) == 7  # the last is mostly of silence
    assert words[:, 0].tolist() == tokens[:6].unique_consecutive().tolist()


def test_every_stage_keeps_the_rate_of_its_models_and_all_of_a_preset_share_settings(whole):
    shutil.copytree(whole / "semantic", "run/semantic")
    contents = checkpoint.load("run/semantic/kmeans.pt")
    contents["settings"]["sample_rate"] = 16000
    checkpoint.save(contents, "run/semantic/kmeans.pt")
    out = train(whole, "coarse", "run", expect=1)
    assert "--sample_rate: 8000, but that of" in out
    assert "is 16000; train the semantic stage at this rate, too" in out

    shared = {each.name for each in dataclasses.fields(train_audio.SharedConfig)}
    preset = train_audio.PRESETS["speech-small"]
    for settings in preset.values():
        assert {name: settings[name] for name in shared & settings.keys()} == preset["all"]
    for preset in train_audio.PRESETS.values():
        for stage, cls in train_audio.STAGES.items():
            if stage in preset:
                cls(**preset[stage])


def test_a_published_codec_takes_the_place_of_soundstream(whole, voice, tmp_path):
    published_codec(tmp_path / "mimi", "mimi")
    settings = dict(
        soundstream=f"hf:{tmp_path}/mimi", coarse_quantizers=1, codec_quantizers=3, shifts=2)
    shutil.copytree(whole / "semantic", "run/semantic")
    for stage in ("coarse", "fine"):
        out = train(whole, stage, "run", steps=2, **settings)
        assert "2 of 82 samples looked at cannot be used" in out
    _, sound = sampled(run_dir="run", prompt=voice, prompt_seconds=0.2)
    assert len(sound) > 1600
    out, sound = sampled(reconstruct=voice, soundstream=settings["soundstream"])
    assert "4 codes a frame" in out
    assert len(sound) == len(read_wave(voice))
    out = train(whole, "fine", "other", **settings | {"codec_quantizers": 5}, expect=1)
    assert "--codec_quantizers 5: the codec has 4" in out


# Mistakes


mistake = functools.partial(helpers.mistake, "train_audio")


@pytest.mark.parametrize("words, message", {
    "--init_from a.pt": "they are of one stage",
    "--stage soundstream --seconds 0.1": "too short for the STFT discriminator",
    "--stage soundstream --steps 300": "before --quantizer_start 300",
    "--stage fine --width 30": "--heads: --width 30 must be an even multiple",
    "--stage semantic --clusters 65537": "65537: expected a number from 1 to 65536",
    "sample --out a.mp3": "--out a.mp3: expected a name that ends in .wav",
    "sample --text a --reconstruct a.wav": "--text: with --reconstruct it does nothing",
    "sample --text a --num_quantizers 2": "--num_quantizers: without --reconstruct it does",
    "sample --prompt_seconds 1": "--prompt_seconds: without --prompt",
    "sample --prompt a.wav --guidance_scale 2": "--guidance_scale: without --text",
}.items())
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(reconstruct="short.wav"), "shorter than a frame of 160"),
        (dict(model="worst.pt"), "semantic/worst.pt: no such checkpoint"),
        (dict(weights="online", model="best.pt"), "averaged weights alone; --weights online needs"),
        (dict(run_dir="."), "another program; train first, or name another file (FileNotFound"),
    ],
)
def test_mistakes_that_files_show_are_one_line_and_status_1(settings, message, whole):
    sounds.write_sound(torch.zeros(159), 8000, "short.wav")
    assert message in mistake("sample", **{"run_dir": whole, "device": "cpu", **settings})


def test_runs_that_do_not_fit_each_other_are_refused(whole):
    shutil.copytree(whole, "moved")
    path = "moved/soundstream/model.pt"
    checkpoint.save({**checkpoint.load(path), "changed": True}, path)
    assert "trained with other tokens" in mistake("sample", run_dir="moved", device="cpu")
    shutil.rmtree("moved/coarse")
    settings = dict(soundstream="moved/soundstream", init_from=whole / "coarse/model.pt")
    out = train(whole, "coarse", "moved", expect=1, **settings)
    assert "of other tokens or other words, so its embeddings mean others" in out


def test_codebooks_that_do_not_come_with_other_weights_start_by_k_means(whole, monkeypatch):
    start = mock.Mock(wraps=quantize.kmeans)
    monkeypatch.setattr(quantize, "kmeans", start)
    settings = dict(num_quantizers=3, init_from=whole / "soundstream/model.pt")
    train(whole, "soundstream", "run", **settings, init_strict="false")
    assert start.called
