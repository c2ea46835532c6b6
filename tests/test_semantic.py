"""Semantic tokens hold the syllables, whoever says them; a fit is the same everywhere.

Published models give the features that their own package gives.
"""
import numpy as np
import pytest
import torch

from common import checkpoint, recordings, semantic, synthetic
from common.config import UserError

ROWS = 300


class Source:
    """The first of the built-in recordings, as `semantic.fit` takes them; those of `broken` cannot be read."""

    rate = synthetic.RATE

    def __init__(self, count=ROWS, broken=()):
        self.waves, self.records = synthetic.syllables(range(count))
        self.broken = broken

    def wave(self, row):
        if row in self.broken:
            raise recordings.Unusable(f"row {row}")
        return torch.from_numpy(self.waves[row])


@pytest.fixture(scope="module")
def source():
    return Source()


@pytest.fixture(scope="module")
def split(source):
    """Rows of some speakers, and rows of the others."""
    even = np.array([record["speaker"] % 2 == 0 for record in source.records])
    return np.flatnonzero(even), np.flatnonzero(~even)


@pytest.fixture(scope="module")
def tokenizer(source, split):
    return semantic.fit(source, split[0], clusters=12)


def labeled(tokenizer, source, rows):
    """(tokens, syllables) of all frames of some rows."""
    tokens = [tokenizer.encode(source.wave(row), source.rate) for row in rows]
    labels = [synthetic.syllable_labels(source.records[row], len(one), semantic.FRAME_RATE)
              for row, one in zip(rows, tokens)]
    return np.concatenate(tokens), np.concatenate(labels)


def test_tokens_tell_the_syllables_of_speakers_never_heard(tokenizer, source, split):
    best = synthetic.majority(*labeled(tokenizer, source, split[0]), tokenizer.clusters)
    tokens, labels = labeled(tokenizer, source, split[1])
    assert (best[tokens] == labels).mean() > 0.97
    assert len(set(tokens.tolist())) == 12


def test_tokens_do_not_depend_on_the_speaker():
    """The same words by other voices have mostly the same tokens, at the same times."""
    source = Source(200)
    tokenizer = semantic.fit(source, np.arange(200), clusters=12)
    tokens = [tokenizer.encode(synthetic.speak("aiuo", who)[0], synthetic.RATE) for who in range(synthetic.SPEAKERS)]
    assert np.mean([one == tokens[0] for one in tokens]) > 0.85


def test_loudness_and_a_fixed_filter_hardly_change_the_tokens(tokenizer, source):
    alike = np.zeros(2)
    for row in range(40):
        wave = source.wave(row)
        tokens = [tokenizer.encode(x, source.rate) for x in (wave, 0.5 * wave, wave - 0.4 * wave.roll(1))]
        alike += [(one == tokens[0]).mean() / 40 for one in tokens[1:]]
    assert alike.min() > 0.9, alike


def test_features_are_cepstra_of_mean_zero_and_variance_one(tokenizer, source):
    x = tokenizer.features(source.wave(0), source.rate)
    torch.testing.assert_close(x.mean(0), torch.zeros(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(12))
    mel = recordings.log_mel(source.wave(0)[None], 8_000, 400, 160, 26, 1e-3)[0].double().numpy()
    place = np.arange(26) + 0.5
    second = mel @ np.cos(np.pi * 2 * place / 26)  # the DCT-II by hand; its scale cancels
    np.testing.assert_allclose(x[:, 1], (second - second.mean()) / second.std(), atol=1e-3)


def test_there_is_a_token_for_each_20_ms_begun_at_any_rate(tokenizer):
    for rate in (8_000, 16_000, 22_050):
        for samples in (rate // 2, rate // 2 + 1, 100):
            assert len(tokenizer.encode(torch.randn(samples), rate)) == -(-samples * 50 // rate)


def test_a_tokenizer_survives_being_saved(tokenizer, source, tmp_path):
    path = tmp_path / "kmeans.pt"
    checkpoint.save(tokenizer.state(), path)
    loaded = semantic.load(checkpoint.load(path), path)
    np.testing.assert_array_equal(loaded.encode(source.wave(1), 8_000), tokenizer.encode(source.wave(1), 8_000))
    with pytest.raises(UserError, match=r"other\.pt: not a tokenizer: its kind is 'prior'"):
        semantic.load({"kind": "prior", "model": {}}, "other.pt")


def fitted(_):
    return semantic.fit(Source(40), np.arange(40), 8, seed=3).centers.numpy()


def test_a_fit_is_the_same_on_every_rank_and_in_one_process(on_ranks):
    alone = fitted(0)
    for centers in on_ranks(2, fitted, 0):
        np.testing.assert_allclose(centers, alone, rtol=1e-5)


def test_a_fit_repeats_varies_with_the_seed_and_takes_what_can_be_read():
    rows = np.arange(40)
    centers = semantic.fit(Source(40), rows, 8).centers
    assert torch.equal(semantic.fit(Source(40), rows, 8).centers, centers)
    assert not torch.allclose(semantic.fit(Source(40), rows, 8, seed=1).centers, centers)
    kept = np.setdiff1d(rows, [1, 5, 6])
    few = semantic.fit(Source(40, broken=(1, 5, 6)), rows, 8).centers
    assert torch.isfinite(few).all() and not torch.equal(few, centers) and len(kept) == 37
    short = semantic.fit(Source(40), rows, 8, minutes=0.05).centers
    assert not torch.allclose(short, centers)
    with pytest.raises(UserError, match=r"--clusters 99: only 10 frames"):
        semantic.fit(Source(40), rows, 99, minutes=10 / 3000)


def test_unknown_tokenizers_and_missing_packages_are_named(monkeypatch):
    for spec in ("mel", "hf:x", "hf::3", "hubert:x:3"):
        with pytest.raises(UserError, match=f"--tokenizer {spec}: expected"):
            semantic.KMeans(8, spec)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        semantic.KMeans(8, "hf:model:1")


def save_speech_model(folder, kind, normalize=None):
    """A tiny random model of `kind` in `folder`, and its feature extractor, if it has one.

    normalize: what that does to waves; None: there is none for waves.
    """
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    if kind != "Wav2Vec2Bert":
        sizes |= dict(conv_dim=(16,) * 7, num_conv_pos_embeddings=16)
        sizes |= dict(num_conv_pos_embedding_groups=2)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    extractor = None
    if kind == "Wav2Vec2Bert":
        extractor = transformers.SeamlessM4TFeatureExtractor()
    elif normalize is not None:
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize)
    if extractor is not None:
        extractor.save_pretrained(folder)
    return model, extractor


@pytest.mark.parametrize("kind, normalize", [
    ("Hubert", None), ("Hubert", True), ("WavLM", False), ("WavLM", True), ("Wav2Vec2Bert", None)])
@torch.no_grad()
def test_features_of_published_models_are_layers_of_centered_frames(kind, normalize, tmp_path):
    model, extractor = save_speech_model(tmp_path, kind, normalize=normalize)
    tokenizer = semantic.KMeans(6, f"hf:{tmp_path}:1")
    for samples in (8_000, 8_001, 4_000 + 159):
        wave = 0.1 * torch.randn(samples) + 0.05
        wide = recordings.resample(wave, 8_000, 16_000)
        frames = -(-samples // 160)
        behind = frames * 320 - len(wide)  # silence after what is begun
        if kind == "Wav2Vec2Bert":  # a frame is of 560 samples, 320 apart
            padded = torch.nn.functional.pad(wide, (120, behind + 120)).numpy()
            given = extractor(padded, sampling_rate=16_000, return_tensors="pt")
            expected = model(**given, output_hidden_states=True)
        else:  # of 400
            if normalize is not False:  # without a feature extractor, too
                wide = (wide - wide.mean()) / wide.std(correction=0)
            given = torch.nn.functional.pad(wide, (40, behind + 40))[None]
            expected = model(given, output_hidden_states=True)
        found = tokenizer.features(wave, 8_000)
        assert len(found) == frames
        torch.testing.assert_close(found, expected.hidden_states[1][0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Hubert", "WavLM", "Wav2Vec2Bert"])
@torch.no_grad()
def test_tokens_of_published_models_are_of_dimensions_that_weigh_alike(kind, tmp_path):
    save_speech_model(tmp_path, kind)
    spec, source = f"hf:{tmp_path}:2", Source(12)
    tokenizer = semantic.fit(source, np.arange(12), 6, features=spec)
    features = [tokenizer.features(wave, 8_000) for wave in map(source.wave, range(12))]
    whole = torch.cat(features)
    scaled = (features[0] - whole.mean(0)) / whole.std(0, correction=0)  # AudioLM §III-B
    expected = torch.cdist(scaled, tokenizer.centers).argmin(1)
    tokens = tokenizer.encode(source.wave(0), 8_000)
    np.testing.assert_array_equal(tokens, expected)
    assert len(tokens) == -(-len(source.wave(0)) // 160) and len(set(tokens.tolist())) > 1
    assert tokenizer.state_dict().keys() == {"centers", "mean", "std"}  # the model is not saved
    again = semantic.load(tokenizer.state(), "x")
    np.testing.assert_array_equal(again.encode(source.wave(0), 8_000), tokens)


def test_models_and_layers_that_do_not_fit_are_named(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    save_speech_model(tmp_path / "hubert", "Hubert")
    save_speech_model(tmp_path / "bert", "Wav2Vec2Bert")
    (tmp_path / "bert/preprocessor_config.json").unlink()
    transformers.MimiConfig().save_pretrained(tmp_path / "mimi")
    for spec, message in [
        (f"hf:{tmp_path}/hubert:3", "layers 0 to 2"),
        ("hf:/nowhere:1", "/nowhere"),
        (f"hf:{tmp_path}/bert:1", "no preprocessor_config.json"),
        (f"hf:{tmp_path}/mimi:1", "kind mimi; expected hubert, wavlm, wav2vec2, wav2vec2-bert")]:
        with pytest.raises(UserError, match=f"--tokenizer {spec}.*{message}"):
            semantic.KMeans(6, spec)


def test_unique_drops_what_repeats_in_a_row_and_nothing_else():
    tokens = np.array([3, 3, 1, 1, 1, 3, 0, 0])
    np.testing.assert_array_equal(semantic.unique(tokens), [3, 1, 3, 0])
    np.testing.assert_array_equal(semantic.unique(np.array([0, 1, 2])), [0, 1, 2])
    assert len(semantic.unique(tokens[:0])) == 0
