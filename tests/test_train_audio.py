"""train_audio.py, as users run it."""

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
from helpers import CPU, STAGES, follow, make_codec, metrics, published_codec, saved, write_voices
from torch.testing import assert_close

import train_audio
from common import amp, checkpoint, config
from common.data import files, recordings, sounds, tokens
from common.models import quantize, soundstream, token_lm

run = functools.partial(helpers.run, "train_audio")


def train(whole, stage, folder, **settings):
    """Train one stage in `folder`, with the codec of the run `whole`; returns the output."""
    usual = {**STAGES[stage], "data": whole.parent / "voices", "run_dir": folder}
    if stage in ("coarse", "fine") and folder != whole:
        usual["soundstream"] = whole / "soundstream"
    return run(**usual | settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of all four stages, trained on the recordings in voices/ beside it."""
    folder = tmp_path_factory.mktemp("world")
    voices = write_voices(folder / "voices")
    (voices / "z.wav").write_bytes(b"")
    for stage in STAGES:
        out = train(folder / "whole", stage, folder / "whole")
        assert "1 of 41 checked samples cannot be used" in out
        again = train(folder / "whole", stage, folder / "whole")
        assert "is finished at step 6; give more --steps to continue" in again
    # A run may be read-only, so outputs can go elsewhere.
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
    return train_audio.load_codec(f"{whole}/soundstream", CPU)


@pytest.fixture
def pipeline(whole):
    return train_audio.Pipeline(train_audio.EvaluateConfig(run_dir=str(whole)), CPU)


def read_wave(path):
    channels, *_ = recordings.read(path)
    return torch.from_numpy(channels)[0]


# Training


def test_augmented_waves_are_louder_or_softer_and_some_are_mixes():
    waves = torch.eye(200)  # each has a click at its own time
    found = train_audio.augment(waves)
    gains = 20 * found.diagonal().log10()
    assert -10 <= gains.min() < -9 and 5 < gains.max() <= 6
    assert 60 < ((found > 0).sum(1) == 2).sum() < 140


def test_two_ranks_lose_what_one_process_does(whole, tmp_path):
    for stage in STAGES:
        out = train(tmp_path, stage, tmp_path, data=whole.parent / "voices", ranks=2)
        assert "2 rank(s) on cpu" in out
        expected = [pytest.approx(line, rel=2e-3) for line in metrics(whole / stage)]
        assert metrics(tmp_path / stage) == expected


def test_a_discriminator_that_is_not_finite_ends_the_run_before_it_is_saved(whole, monkeypatch):
    loss = soundstream.discriminator_loss
    numbers = itertools.count()  # numbers the chunks, two per step

    def overflow(*args):
        return loss(*args) * (torch.nan if next(numbers) >= 6 else 1)

    monkeypatch.setattr(soundstream, "discriminator_loss", overflow)
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
        last = metrics(folder)[-3]  # the last line of training; validation and test follow
        state = checkpoint.load(f"{folder}/checkpoints/step_00000005.pt")
        weights = state["model"], state["ema"], state["training"]["others"]
        return (last["overflows"], state["training"]["scaler"]["scale"]), weights

    scales, usual = outcome("usual")
    assert scales == (0, 64)
    scale = torch.amp.GradScaler.scale
    numbers = itertools.count()

    def overflow(scaler, loss):
        # Every second call is for the discriminators. Call 8 is for the codec, in the last of five
        # steps.
        return scale(scaler, loss * torch.inf if next(numbers) == 8 else loss)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", overflow)
    scales, disturbed = outcome("disturbed")
    assert scales == (1, 32)
    assert_close(disturbed, usual, rtol=1e-3, atol=1e-3)


def main():
    """Run the script with small stages, on a few of the built-in recordings."""
    train_audio.BUILTIN_ROWS = 40
    for stage, settings in STAGES.items():
        cls = train_audio.STAGES[stage]
        cls.__init__ = functools.partialmethod(cls.__init__, **settings)  # the new defaults
    train_audio.main()


def test_all_stages_are_trained_and_the_built_in_syllables_scored_alike_on_any_ranks():
    few = functools.partial(helpers.run, "test_train_audio")
    settings = dict(chunk_size=2, precision="bf16", validation=0.2, test=0.2, eval_every=2)
    out = few(run_dir="run", device="cpu", ranks=1, **settings)
    assert out.count("is finished") == 4
    assert "wrote" in follow(out, "--device=cpu", "--out", "next.wav")
    for name in ("step_00000004_0", "test_1"):
        assert read_wave(f"run/coarse/samples/{name}.wav").any()
    # At step 2 the codec has no codebooks yet.
    evaluated = [line["step"] for line in metrics("run/soundstream") if "val_loss" in line]
    assert evaluated == [4, 6]
    assert files.files_below("run/sounds")
    assert not [path for path in files.files_below(".") if path.parent.name == "sounds"]
    scores = config.read_json("run/scores.json")
    assert {"voice_kept_real", "text_heard", "text_heard_real"} < scores.keys()
    few("evaluate", run_dir="run", device="cpu", ranks=2)
    assert scores == pytest.approx(config.read_json("run/scores.json"), rel=1e-3)


# The pipeline


def sampled(**settings):
    """(output of `sample`, wave in the file that it writes)."""
    out = run("sample", device="cpu", out="out.wav", **settings)
    return out, read_wave("out.wav")


def test_a_recording_goes_through_the_codec_at_a_bitrate(whole, codec, wave):
    stereo = torch.stack([wave, -wave]).numpy()  # whose mean is silence
    Path("stereo.wav").write_bytes(helpers.wav(stereo, 8000))
    out, sound = sampled(run_dir=whole, reconstruct="stereo.wav", num_quantizers=3)
    assert "stereo.wav: channels that cancel out are not mixed" in out
    gain = 0.1 / wave.std(correction=0)
    codes = codec.encode(gain * (wave - wave.mean()))
    expected = codec.decode(codes[:, :3])[: len(wave)] / gain  # as loud as it was
    assert_close(sound, expected, atol=1e-4, rtol=0)
    # 4 bits per code, 50 frames per second.
    assert "3 codes per frame, 600 bits per second" in out


def test_a_prompt_is_continued_also_when_the_run_has_moved(whole, codec, voice, wave):
    shutil.copytree(whole, "moved")
    settings = dict(run_dir=whole, prompt=voice, prompt_seconds=0.3, seconds=0.5, temperature=1)
    _, usual = sampled(**settings)
    gain = 0.1 / wave.std(correction=0)  # of the whole recording, as in training
    prompt = codec.encode(gain * (wave - wave.mean())[-2400:])
    assert len(usual) == 2400 + 25 * 160  # it does not end early
    for name, value, alike in [
        ("run_dir", "moved", True),
        ("seed", 1, False),
        ("top_k", 1, False),
        ("weights", "online", False),
    ]:
        _, sound = sampled(**settings | {name: value})
        assert_close(sound[:2400], codec.decode(prompt) / gain, atol=1e-4, rtol=0)
        assert torch.equal(sound, usual) == alike, name
    shutil.rmtree("moved/fine")  # the fine stage is not needed
    _, sound = sampled(**settings | {"run_dir": "moved", "fine": "false"})
    assert_close(sound[:2400], codec.decode(prompt[:, :2]) / gain, atol=1e-4, rtol=0)


def test_a_text_longer_than_those_of_training_is_said_in_parts(whole, pipeline):
    longest = pipeline.semantic.longest_text
    assert 2 < longest < 24
    text = " ".join("aiueo"[n % 5] for n in range(2 * longest + 1))
    out, _ = sampled(run_dir=whole, text=text, seconds=9)
    assert "longer than all training texts, so it is spoken in 3 parts: a i u e o" in out
    out, _ = sampled(run_dir=whole, text=text[: 2 * longest - 1], seconds=0.1)
    assert "parts" not in out
    assert "--seconds 0.1: reached, so the audio may end before the text does" in out
    assert "--text: no text in it" in run("sample", run_dir=whole, text=" ", expect=2)
    word = "x" * (longest + 1)
    out = run("sample", run_dir=whole, text=f"a {word}", expect=1)
    assert f"'{word}': {longest + 2} tokens without a space" in out


def test_parts_of_a_text_are_said_one_after_the_other(pipeline, monkeypatch):
    parts = []

    def watched(model, samples, fewest, most, seeds, sampling, texts, generate=token_lm.generate):
        new = generate(model, samples, fewest, most, seeds, sampling, texts)
        if model is pipeline.semantic:
            parts.extend(zip(texts, new))
        else:
            heard.append(samples)
        return new

    heard = []
    monkeypatch.setattr(token_lm, "generate", watched)
    longest = pipeline.semantic.longest_text
    long = " ".join("a" for _ in range(longest + 1))
    empty = pipeline.empty_prompt()
    pipeline.fine = None
    pipeline.generate([empty] * 3, 0.2, [0, 1, 2], ["a i", long, ""])
    assert [text for text, _ in parts] == ["a i", long[:-2], "a", ""]
    for text, spoken in parts:
        assert not text or len(spoken) <= pipeline.semantic.max_frames
    said = torch.cat([parts[1][1], parts[2][1]]).unique_consecutive(dim=0)
    context, _ = heard[0][1]
    assert torch.equal(context, said[: pipeline.coarse.max_context])


def test_a_sound_five_times_as_long_as_a_crop_shows_a_stage_no_more_than_its_training(
    pipeline, wave, monkeypatch
):
    def watched(model, samples, fewest, most, *rest, generate=token_lm.generate):
        ((*context, window),) = samples
        assert all(len(codes) <= model.max_context <= 20 for codes in context)
        # Crops of 0.4 s have 20 frames.
        assert len(window) + most[0] <= model.max_frames <= 20
        new = generate(model, samples, fewest, most, *rest)
        calls[model.streams[-1].name].append((*context, len(window), new[0]))
        return new

    monkeypatch.setattr(token_lm, "generate", watched)
    for model in pipeline.models:
        model.classifiers.data[:, -1] = 0  # EOS is never the most probable
    calls = collections.defaultdict(list)
    prompt = pipeline.prompt(wave)
    (sound,) = pipeline.generate([prompt], 5 * 0.4, [0], sampling=token_lm.SamplingParams(0.0))
    assert sound.shape == (len(prompt.codes) + 100, 4)  # 50 frames a second
    # The context of a coarse window begins with the semantic token that sounds at its start.
    content = torch.cat([prompt.semantic, *(new for _, new in calls["semantic"])])
    known = prompt.codes[:, :2]
    assert [length for _, length, _ in calls["coarse"]] == [10] * 10  # windows overlap by half
    for context, length, new in calls["coarse"]:
        heard = pipeline.kmeans.encode(pipeline.codec.decode(known))
        places = tokens.align(content[:, 0].numpy(), heard.numpy())
        expected = content[places[len(known) - length] :]
        assert torch.equal(context, expected[:20][: len(context)])
        known = torch.cat([known, new])


def test_a_window_may_begin_at_the_end_of_what_is_heard(pipeline):
    pipeline.coarse.max_frames = 1
    pipeline.fine = None
    (sound,) = pipeline.generate([pipeline.empty_prompt()], 0.1, [0])
    assert len(sound) == 5


def test_prompts_are_whole_frames_of_codes_and_of_semantic_tokens(pipeline):
    pipeline.codec = make_codec(strides=(4, 5, 5))  # 12.5 ms a frame
    wave = 0.1 * torch.randn(1037)
    words, codes = pipeline.prompt(wave)
    assert len(codes) == 10
    assert torch.equal(codes, pipeline.codec.encode(wave[37:]))
    tokens = pipeline.kmeans.encode(wave[37:])
    assert len(tokens) == 7  # the last one is mostly silence
    assert words[:, 0].tolist() == tokens[:6].unique_consecutive().tolist()


def test_every_stage_keeps_the_rate_of_its_models_and_all_of_a_preset_share_settings(whole):
    shutil.copytree(whole / "semantic", "run/semantic")
    contents = checkpoint.load("run/semantic/kmeans.pt")
    contents["settings"]["sample_rate"] = 16000
    checkpoint.save(contents, "run/semantic/kmeans.pt")
    out = train(whole, "coarse", "run", expect=1)
    assert "--sample_rate 8000: " in out
    assert "has 16000; train the semantic stage at the same rate" in out

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
        assert "2 of 82 checked samples cannot be used" in out
    _, sound = sampled(run_dir="run", prompt=voice, prompt_seconds=0.2)
    assert len(sound) > 1600
    out, sound = sampled(reconstruct=voice, soundstream=settings["soundstream"])
    assert "4 codes per frame" in out
    assert len(sound) == len(read_wave(voice))
    out = train(whole, "fine", "other", **settings | {"codec_quantizers": 5}, expect=1)
    assert "--codec_quantizers 5: the codec has 4" in out


def test_where_coarse_predicts_all_quantizers_there_is_no_fine_stage(whole, voice):
    for stage in ("soundstream", "semantic"):
        shutil.copytree(whole / stage, f"run/{stage}")
    train(whole, "coarse", "run", steps=2, coarse_quantizers=4)
    _, sound = sampled(run_dir="run", prompt=voice, prompt_seconds=0.2)
    assert len(sound) > 1600
    out = train(whole, "fine", "run", coarse_quantizers=4, expect=1)
    assert "the codec has 4 quantizers, and fine needs 5 of them" in out


@pytest.mark.parametrize("preset, has_fine", [("", True), ("speech-small", False)])
def test_all_stages_are_those_that_have_something_to_predict(preset, has_fine, monkeypatch):
    stages = []

    def trained(cfg, device):
        stages.append(cfg.stage)

    monkeypatch.setattr(train_audio, "TRAIN", dict.fromkeys(STAGES, trained))
    monkeypatch.setattr(train_audio, "evaluate_pipeline", lambda *args: None)
    train_audio.train(train_audio.SharedConfig(preset=preset, device="cpu"))
    assert stages == list(STAGES)[: 3 + has_fine]


# Mistakes


mistake = functools.partial(helpers.mistake, "train_audio")


@pytest.mark.parametrize("words, message", {
    "--init_from a.pt": "these are for one stage",
    "--stage soundstream --feature_weight 1 --seconds 0.1": "too short for the STFT",
    "--stage soundstream --steps 300": "before --quantizer_start 300",
    "--stage fine --width 30": "--width 30: expected an even multiple of --heads 4",
    "--stage semantic --clusters 65537": "65537: expected a number from 1 to 65536",
    "sample --out a.mp3": "--out a.mp3: expected a name that ends in .wav",
    "sample --text a --reconstruct a.wav": "--text has no effect with --reconstruct",
    "sample --text a --num_quantizers 2": "--num_quantizers has no effect without --reconstruct",
    "sample --prompt_seconds 1": "--prompt_seconds has no effect without --prompt",
    "sample --prompt a.wav --guidance_scale 2": "--guidance_scale has no effect without --text",
}.items())
def test_mistakes_on_the_command_line_are_one_line_and_status_2(words, message):
    assert message in mistake(*words.split(), status=2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(reconstruct="short.wav"), "shorter than a frame of 160"),
        (dict(model="worst.pt"), "semantic/worst.pt: no such checkpoint"),
        (dict(weights="online", model="best.pt"), "has only averaged weights; --weights online"),
        (dict(run_dir="."), "another program or version; train first, or name another file (File"),
    ],
)
def test_mistakes_that_files_show_are_one_line_and_status_1(settings, message, whole):
    sounds.write_sound(torch.zeros(159), 8000, "short.wav")
    assert message in mistake("sample", **{"run_dir": whole, "device": "cpu", **settings})


def test_runs_that_do_not_fit_each_other_are_refused(whole):
    shutil.copytree(whole, "moved")
    path = "moved/soundstream/model.pt"
    checkpoint.save({**checkpoint.load(path), "changed": True}, path)
    assert "trained on other tokens" in mistake("sample", run_dir="moved", device="cpu")
    shutil.rmtree("moved/coarse")
    settings = dict(soundstream="moved/soundstream", init_from=whole / "coarse/model.pt")
    out = train(whole, "coarse", "moved", expect=1, **settings)
    assert "trained on other tokens or words, so its embeddings do not fit" in out


def test_codebooks_start_by_k_means_unless_they_come_with_other_weights(whole, monkeypatch):
    start = mock.Mock(wraps=quantize.kmeans)
    monkeypatch.setattr(quantize, "kmeans", start)
    train(whole, "soundstream", "other", steps=3, init_from=whole / "soundstream/model.pt")
    assert not start.called
    train(whole, "soundstream", "run", steps=3)
    assert start.called
