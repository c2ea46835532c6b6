"""Semantic tokens hold the syllables, whoever says them; a fit is the same everywhere.

Published models give the features that their own package gives.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from common import checkpoint, recordings, semantic, synthetic
from common.config import UserError


class Dataset:
    """The first of the built-in recordings; those of `unusable` cannot be read."""

    rate = synthetic.RATE

    def __init__(self, count, unusable=()):
        waves, self.records = synthetic.syllables(range(count))
        self.waves = [torch.from_numpy(wave) for wave in waves]
        self.unusable = unusable

    def wave(self, index):
        if index in self.unusable:
            raise recordings.Unusable(f"recording {index}")
        return self.waves[index]


@pytest.fixture(scope="module")
def dataset():
    return Dataset(300)


@pytest.fixture(scope="module")
def split(dataset):
    """Indices of recordings of some speakers, and of the others."""
    even = np.array([record["speaker"] % 2 == 0 for record in dataset.records])
    return np.flatnonzero(even), np.flatnonzero(~even)


@pytest.fixture(scope="module")
def tokenizer(dataset, split):
    return semantic.fit(dataset, split[0], clusters=12)


def labeled(tokenizer, dataset, indices):
    """(tokens, syllables) of all frames of some recordings."""
    tokens = [tokenizer.encode(dataset.wave(i), dataset.rate) for i in indices]
    labels = [synthetic.syllable_labels(dataset.records[i], len(frames), 50)
              for i, frames in zip(indices, tokens)]
    return np.concatenate(tokens), np.concatenate(labels)


def test_tokens_are_of_syllables_also_of_unseen_speakers(tokenizer, dataset, split):
    tokens, labels = labeled(tokenizer, dataset, split[0])
    syllables = synthetic.majority(tokens, labels, tokenizer.clusters)
    tokens, labels = labeled(tokenizer, dataset, split[1])
    assert (syllables[tokens] == labels).mean() > 0.97
    assert len(set(tokens.tolist())) == 12


def test_features_are_cepstra_of_mean_zero_and_variance_one(tokenizer, dataset):
    x = tokenizer.features(dataset.wave(0), dataset.rate)
    assert_close(x.mean(0), torch.zeros(12), atol=1e-5, rtol=0)
    assert_close(x.std(0, correction=0), torch.ones(12))
    mel = recordings.log_mel(dataset.wave(0)[None], 8_000, 400, 160, 26, 1e-3)[0].double().numpy()
    cosine = np.cos(np.pi * 2 * (np.arange(26) + 0.5) / 26)  # the DCT-II; its scale cancels
    second = mel @ cosine
    np.testing.assert_allclose(x[:, 1], (second - second.mean()) / second.std(), atol=1e-3)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050])
def test_there_is_a_token_for_each_20_ms_begun_at_any_rate(rate, tokenizer):
    for samples in (rate // 2, rate // 2 + 1, 100):
        assert len(tokenizer.encode(torch.randn(samples), rate)) == -(-samples * 50 // rate)


def test_a_tokenizer_survives_being_saved(tokenizer, dataset, tmp_path):
    path = tmp_path / "kmeans.pt"
    checkpoint.save(tokenizer.state(), path)
    loaded = semantic.load(checkpoint.load(path), path)
    wave = dataset.wave(1)
    np.testing.assert_array_equal(loaded.encode(wave, 8_000), tokenizer.encode(wave, 8_000))


@pytest.mark.parametrize("kind, message", [
    ("prior", "not a tokenizer: its kind is 'prior'"),
    ("kmeans", "damaged"),
])
def test_a_file_that_holds_no_tokenizer_is_named(kind, message):
    with pytest.raises(UserError, match=rf"other\.pt: {message}"):
        semantic.load({"kind": kind, "model": {}}, "other.pt")


def fitted(seed=3, **settings):
    return semantic.fit(Dataset(40, **settings), np.arange(40), 8, seed).centers.numpy()


def test_a_fit_is_the_same_on_every_rank_and_in_one_process(on_ranks):
    for centers in on_ranks(2, fitted):
        np.testing.assert_allclose(centers, fitted(), rtol=1e-5)


def test_a_fit_repeats_varies_with_the_seed_and_takes_what_can_be_read(monkeypatch):
    centers = fitted()
    np.testing.assert_array_equal(fitted(), centers)
    assert not np.allclose(fitted(seed=1), centers)
    fewer = fitted(unusable=(1, 5, 6))
    assert not np.allclose(fewer, centers)
    monkeypatch.setattr(semantic, "MAX_FRAMES", 7)
    with pytest.raises(UserError, match=r"--clusters 8: only 7 frames"):
        fitted()


@pytest.mark.parametrize("spec", ["mel", "hf:x", "hf::3"])
def test_unknown_tokenizers_are_named(spec):
    with pytest.raises(UserError, match=f"--tokenizer {spec}: expected"):
        semantic.KMeans(8, spec)


def save_speech_model(folder, kind, normalize=True):
    """A tiny random model of `kind` and its feature extractor, saved in `folder`."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    extractor = transformers.SeamlessM4TFeatureExtractor()
    if kind != "Wav2Vec2Bert":
        sizes |= dict(
            conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
    return model, extractor


@pytest.mark.parametrize("kind, normalize", [
    ("Hubert", True),
    ("WavLM", False),
    ("Wav2Vec2Bert", True),
])
@torch.no_grad()
def test_features_of_published_models_are_layers_of_centered_frames(kind, normalize, tmp_path):
    model, extractor = save_speech_model(tmp_path, kind, normalize)
    tokenizer = semantic.KMeans(6, f"hf:{tmp_path}:1")
    for samples in (8_000, 8_001, 4_000 + 159):
        wave = 0.1 * torch.randn(samples) + 0.05
        wide = recordings.resample(wave, 8_000, 16_000)
        frames = -(-samples // 160)
        incomplete = frames * 320 - len(wide)
        if kind == "Wav2Vec2Bert":  # a frame sees 560 samples, 320 apart
            padded = pad(wide, (120, incomplete + 120)).numpy()
            inputs = extractor(padded, sampling_rate=16_000, return_tensors="pt").values()
        else:  # 400
            if normalize:
                wide = (wide - wide.mean()) / wide.std(correction=0)
            inputs = [pad(wide, (40, incomplete + 40))[None]]
        expected = model(*inputs, output_hidden_states=True).hidden_states[1][0]
        found = tokenizer.features(wave, 8_000)
        assert len(found) == frames
        assert_close(found, expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_tokens_of_published_models_are_nearest_in_normalized_features(tmp_path):
    save_speech_model(tmp_path, "Hubert")
    dataset = Dataset(12)
    tokenizer = semantic.fit(dataset, np.arange(12), 6, features=f"hf:{tmp_path}:2")
    features = [tokenizer.features(wave, 8_000) for wave in dataset.waves]
    x = torch.cat(features)
    normalized = (features[0] - x.mean(0)) / x.std(0, correction=0)  # AudioLM §III-B
    expected = torch.cdist(normalized, tokenizer.centers).argmin(1)
    assert len(expected.unique()) > 1
    assert tokenizer.state_dict().keys() == {"centers", "mean", "std"}  # the model is not saved
    np.testing.assert_array_equal(tokenizer.encode(dataset.wave(0), 8_000), expected)


def test_models_and_layers_that_do_not_fit_are_named(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    save_speech_model(tmp_path / "hubert", "Hubert")
    transformers.MimiConfig().save_pretrained(tmp_path / "mimi")
    for spec, message in [
            (f"hf:{tmp_path}/hubert:3", "layers 0 to 2"),
            ("hf:/nowhere:1", "/nowhere"),
            (f"hf:{tmp_path}/mimi:1", "kind mimi; expected hubert, wavlm")]:
        with pytest.raises(UserError, match=f"--tokenizer {spec}.*{message}"):
            semantic.KMeans(6, spec)
    (tmp_path / "hubert/preprocessor_config.json").unlink()
    with pytest.raises(OSError, match=r"preprocessor_config\.json"):
        semantic.KMeans(6, f"hf:{tmp_path}/hubert:1")


@pytest.mark.parametrize("tokens, expected", [
    ([3, 3, 1, 1, 1, 3, 0, 0], [3, 1, 3, 0]),
    ([0, 1], [0, 1]),
    ([], []),
])
def test_unique_consecutive_drops_what_repeats_in_a_row_and_nothing_else(tokens, expected):
    found = semantic.unique_consecutive(np.array(tokens, np.int64))
    assert found.tolist() == expected
