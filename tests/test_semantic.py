"""Semantic tokens encode the syllables of any speaker. A fit is the same on all ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

import train_audio
from common import checkpoint
from common.config import UserError
from common.data import recordings, synthetic, tokens
from common.models import audio, semantic


class Raw(recordings.Syllables):
    """Syllables without loudness normalization."""

    def wave(self, index, *crop):
        return torch.from_numpy(synthetic.speak(self.texts[index], self.speaker_of[index]))


DATASET = Raw(300)
EVEN, ODD = (np.flatnonzero(np.array(DATASET.speaker_of) % 2 == odd) for odd in (0, 1))


def fitted(dataset, indices, clusters, seed=0):
    kmeans = semantic.KMeans(clusters, semantic.MFCC(), dataset.rate)
    tokens.fit(kmeans, dataset, indices, seed)
    return kmeans


@pytest.fixture(scope="module")
def tokenizer():
    return fitted(DATASET, EVEN, clusters=36)


def labeled(tokenizer, indices):
    """(tokens, syllables) of all frames in recordings `indices`."""
    tokens = []
    labels = []
    for i in indices:
        tokens.append(tokenizer.encode(DATASET.wave(i)))
        labels.append(synthetic.syllable_labels(DATASET.texts[i], len(tokens[-1]), 50))
    return np.concatenate(tokens), np.concatenate(labels)


def test_tokens_are_of_syllables_also_of_unseen_speakers(tokenizer):
    tokens, labels = labeled(tokenizer, EVEN)
    votes = np.zeros((tokenizer.clusters, 6))
    np.add.at(votes, (tokens, labels), 1)
    syllables = votes.argmax(1)
    tokens, labels = labeled(tokenizer, ODD)
    assert (syllables[tokens] == labels).mean() > 0.97
    assert len(set(tokens.tolist())) > 30


def test_features_are_cepstra(tokenizer):
    x = tokenizer.features(DATASET.wave(0))
    mel = audio.log_mel(DATASET.wave(0)[None], 8_000, 400, 160, 26, 1e-3)[0].double().numpy()
    cosine = np.cos(np.pi * 2 * (np.arange(26) + 0.5) / 26)  # the DCT-II
    assert_allclose(x[:, 1], mel @ cosine * (2 / 26) ** 0.5, atol=1e-3)


def test_a_sound_has_the_same_tokens_alone_inside_of_another_and_in_blocks(
    tokenizer, monkeypatch
):
    waves = torch.cat([DATASET.wave(i) for i in range(10)])
    waves = waves[: len(waves) // 160 * 160]
    whole = tokenizer.encode(waves)
    # The last frame's window extends past the prompt.
    prompt = tokenizer.encode(waves[:8_000])
    assert_array_equal(prompt[:-1], whole[:49])
    monkeypatch.setattr(audio, "BLOCK_FRAMES", 100)
    assert_array_equal(tokenizer.encode(waves), whole)


@pytest.mark.parametrize("rate", [8_000, 22_050])
def test_there_is_a_token_for_each_20_ms_begun_at_any_rate(rate):
    tokenizer = semantic.KMeans(8, semantic.MFCC(), rate)
    for samples in (rate // 2, rate // 2 + 1, 100):
        assert len(tokenizer.encode(torch.randn(samples))) == -(-samples * 50 // rate)


def saved(folder, clusters=36, resume_from=None):
    run = SimpleNamespace(folder=folder, resume_from=resume_from)
    cfg = SimpleNamespace(clusters=clusters, seed=0, tokenizer="mfcc")
    return tokens.fit_kmeans(run, DATASET, EVEN, cfg, "cpu", train_audio.make_features)


def test_a_tokenizer_survives_being_saved_and_another_file_is_refused(tokenizer, tmp_path):
    wave = DATASET.wave(1)
    assert saved(tmp_path, clusters=8).clusters == 8  # left by an aborted start
    for resume_from in (None, "a checkpoint"):
        found = saved(tmp_path, resume_from=resume_from)
        assert_array_equal(found.encode(wave), tokenizer.encode(wave))
    checkpoint.save({"model": {}}, tmp_path / "kmeans.pt")
    with pytest.raises(UserError, match=r"kmeans\.pt: .*damaged, or from another program"):
        saved(tmp_path, resume_from="a checkpoint")


def fitted_centers(seed=3, hop_length=1):
    dataset = recordings.Syllables(40, hop_length=hop_length)
    return fitted(dataset, np.arange(40), 8, seed).centers.numpy()


def saved_centers(folder):
    return saved(folder).centers.numpy()


def test_a_fit_is_the_same_on_every_rank_and_in_one_process(tokenizer, on_ranks, tmp_path):
    for centers in on_ranks(2, saved_centers, tmp_path):
        assert_allclose(centers, tokenizer.centers, rtol=1e-5)


def test_a_fit_repeats_varies_with_the_seed_and_takes_what_can_be_read(monkeypatch):
    centers = fitted_centers()
    assert_array_equal(fitted_centers(), centers)
    assert not np.allclose(fitted_centers(seed=1), centers)
    assert not np.allclose(fitted_centers(hop_length=7_000), centers)  # short waves are unusable
    monkeypatch.setattr(tokens, "MAX_FRAMES", 7)
    with pytest.raises(UserError, match=r"--clusters 8: there are only 7 frames"):
        fitted_centers()


def test_features_of_another_model_are_of_the_wave_at_its_rate():
    with pytest.raises(UserError, match="--tokenizer mel: expected mfcc or hf:MODEL:LAYER"):
        train_audio.make_features("mel")

    def layer(wave):  # stands in for a model: the first sample of each frame
        return wave[:, ::320, None]

    layer.width = 1
    layer.sample_rate = 16_000
    tokenizer = semantic.KMeans(8, layer, 8_000)
    wave = torch.randn(4_000)
    expected = audio.resample(wave[None], 8_000, 16_000)[0, ::320, None]
    assert_close(tokenizer.features(wave), expected)
    assert tokenizer.state_dict().keys() == {"centers", "mean", "std"}  # the layer is not saved
