"""Semantic tokens hold the syllables, hardly the voice; k-means does what its papers say; the listener hears right."""
import copy
import importlib.util
import itertools

import numpy as np
import pytest
import torch

from common import audio, checkpoint, semantic, synthetic
from common.config import UserError

ROWS = 360


class Source:
    """The first of the built-in recordings, as `semantic.fit` takes them."""

    rate = synthetic.RATE

    def __init__(self, count=ROWS):
        self.waves, self.records = synthetic.syllables(range(count))

    def wave(self, row):
        return torch.from_numpy(self.waves[row])

    def speaker(self, row):
        return self.records[row]["speaker"]


@pytest.fixture(scope="module")
def source():
    return Source()


@pytest.fixture(scope="module")
def split(source):
    """Rows of some speakers, and rows of the others."""
    even = np.array([source.speaker(row) % 2 == 0 for row in range(ROWS)])
    return np.flatnonzero(even), np.flatnonzero(~even)


@pytest.fixture(scope="module")
def tokenizer(source, split):
    return semantic.fit(source, split[0], clusters=100)


def encoded(tokenizer, source, rows, seconds=60):
    """(tokens of each row's first seconds, syllable labels of these)."""
    tokens = [tokenizer.encode(source.wave(row)[:int(seconds * source.rate)], source.rate)[0] for row in rows]
    return tokens, [semantic.syllable_labels(source.records[row], len(t)) for row, t in zip(rows, tokens)]


@pytest.mark.parametrize("seconds", [60, 1])
def test_tokens_tell_the_syllables_of_speakers_never_heard(tokenizer, source, split, seconds):
    tokens, labels, *others = *encoded(tokenizer, source, split[0]), *encoded(tokenizer, source, split[1], seconds)
    accuracy = semantic.many_to_one(*map(np.concatenate, (tokens, labels, *others)))
    assert accuracy > 0.97
    share = np.mean(np.concatenate(labels) >= 0)
    assert share > 0.6  # most frames are counted


@pytest.mark.parametrize(("clusters", "least"), [(12, 0.97), (32, 0.9)])
def test_a_prompt_has_the_tokens_of_its_recording(source, split, clusters, least):
    """Those of the first second by themselves are mostly what they are within the whole, by which the stages learn."""
    tokenizer = semantic.fit(source, split[0], clusters)
    whole, begun = (encoded(tokenizer, source, split[1], seconds)[0] for seconds in (60, 1))
    assert np.mean(np.concatenate([one[:len(own)] == own for one, own in zip(whole, begun)])) > least


@torch.no_grad()
@pytest.mark.parametrize("warp", [2, 8, 15])
def test_the_warp_and_offset_of_a_voice_are_found_whatever_is_said(warp):
    torch.manual_seed(0)
    tokenizer = semantic.KMeans(8)
    said = torch.randint(5, (40,))  # not all of them, so that a mean is not the offset
    for name, value in (("broad", torch.randn(8, 12)), ("mean", torch.randn(12)), ("deviation", 1 + torch.rand(12))):
        getattr(tokenizer, name).copy_(value)
    tokenizer.centers.copy_(tokenizer.broad)
    voice = 0.3 * torch.randn(12)
    normal = (tokenizer.broad[said] + voice) * tokenizer.deviation + tokenizer.mean
    tokenizer.features = lambda wave, rate: normal @ tokenizer.warps[warp].inverse()
    tokens, heard = tokenizer.encode(None, 16_000)
    np.testing.assert_array_equal(tokens, said)
    assert heard == warp
    for frames in (tokenizer.features(None, 16_000), tokenizer.features(None, 16_000).repeat_interleave(40, 0)):
        found, offset = tokenizer.voice(frames)  # of a long recording, frames from all over it
        used = min(len(frames), 534)
        torch.testing.assert_close(offset, voice * used / (used + semantic.FEW_FRAMES), atol=1e-3, rtol=0)
        assert found == warp


def test_tokens_are_what_is_said_not_the_length_of_a_vocal_tract(source, split):
    """Voices whose formants are a fifth apart and more have the same tokens for the same words, but for the warps."""
    tokenizer = semantic.fit(source, split[0], clusters=12)
    plain = copy.deepcopy(tokenizer)
    plain.warps = plain.warps[[len(plain.warps) // 2]]
    heights = {who: synthetic.voice_of(who)["formant"] for who in range(synthetic.SPEAKERS)}
    low, high = ([who for who in heights if least < heights[who] < most][:6]
                 for least, most in ((0.87, 0.9), (1.1, 1.15)))
    alike = {"warped": [], "plain": []}
    for take, (one, other) in enumerate(zip(low, high)):
        for name, found in (("warped", tokenizer), ("plain", plain)):
            waves = [synthetic.speak("i ae o u er a e", who, take=take)[0] for who in (one, other)]  # at the same times
            tokens = [found.encode(wave, source.rate)[0] for wave in waves]
            alike[name].append(np.mean(tokens[0] == tokens[1]))
    assert np.mean(alike["warped"]) > 0.9 and np.mean(alike["plain"]) < 0.8, alike


def test_tokens_tell_less_of_the_speaker_than_features_do(tokenizer, source):
    by_speaker = {}
    for row in range(ROWS):
        by_speaker.setdefault(source.speaker(row), []).append(row)
    pairs = [rows[:2] for rows in by_speaker.values() if len(rows) > 1]
    first, second = map(list, zip(*pairs))
    speakers = [source.speaker(row) for row in first]
    features = [[tokenizer.features(source.wave(row), 16_000) for row in rows] for rows in (first, second)]
    centers = semantic.minibatch_kmeans(torch.cat(features[0]), 100)
    accuracy = {}
    for name, tokens in (
            ("normalized", [encoded(tokenizer, source, rows)[0] for rows in (first, second)]),
            ("raw", [[semantic.nearest(one, centers)[0].numpy() for one in each] for each in features])):
        accuracy[name], chance = semantic.speaker_accuracy(tokens[0], speakers, tokens[1], speakers)
    assert chance < 2 / len(pairs)
    assert accuracy["normalized"] < 0.8 * accuracy["raw"], accuracy


def test_there_is_a_token_for_each_20_ms_begun_at_any_rate(tokenizer):
    wave = torch.from_numpy(synthetic.speak("a i u", 0)[0])
    for length in (320, 321, 640, 6399, 6400, 6401):
        assert len(tokenizer.encode(wave[:length], 16_000)[0]) == -(-length // 320)
    tokens, _ = tokenizer.encode(wave, 16_000)
    assert tokens.dtype == np.int64 and tokens.min() >= 0 and tokens.max() < 100
    slower, _ = tokenizer.encode(audio.resample(wave, 16_000, 24_000), 24_000)
    assert len(slower) == len(tokens) and np.mean(slower == tokens) > 0.5  # the band above 8 kHz is empty either way


def test_a_tokenizer_survives_being_saved(tokenizer, tmp_path):
    checkpoint.save(tokenizer.state(), tmp_path / "kmeans.pt")
    again = semantic.load(checkpoint.load(tmp_path / "kmeans.pt"), "kmeans.pt")
    wave = torch.from_numpy(synthetic.speak("o er y", 3)[0])
    np.testing.assert_array_equal(again.encode(wave, 16_000)[0], tokenizer.encode(wave, 16_000)[0])
    with pytest.raises(UserError, match=r"a\.pt: not a tokenizer: its kind is 'codec'"):
        semantic.load({"kind": "codec", "model": {}}, "a.pt")
    older = tokenizer.state() | {"model": {"centers": tokenizer.centers}}
    with pytest.raises(UserError, match=r"a\.pt: weights of another model: 3 entries differ"):
        semantic.load(older, "a.pt")


def _fitted(count):
    return {name: value.numpy() for name, value in
            semantic.fit(Source(count), np.arange(count), clusters=20, deltas=True).state_dict().items()}


def test_a_fit_is_the_same_on_every_rank_and_in_one_process(on_ranks):
    alone = _fitted(12)
    assert {name: value.shape for name, value in alone.items()} == {"centers": (20, 39), "broad": (12, 39),
                                                                    "mean": (39,), "deviation": (39,)}
    for found, (name, value) in itertools.product(on_ranks(2, _fitted, 12), alone.items()):
        np.testing.assert_array_equal(found[name], value)


class Faulty(Source):
    """A source of which a recording is broken and of whose speakers nothing is known."""

    def wave(self, row):
        if row == 1:
            raise audio.Unusable("1.wav: broken")
        return super().wave(row)

    def speaker(self, row):
        return None


def test_a_fit_repeats_varies_with_the_seed_and_passes_over_broken_recordings(capsys):
    source, rows = Faulty(8), np.arange(8)
    fits = [semantic.fit(source, rows, clusters=10, seed=seed).centers for seed in (0, 0, 1)]
    assert torch.equal(fits[0], fits[1]) and not torch.equal(fits[0], fits[2])
    assert "10 clusters of mfcc" in capsys.readouterr().out
    semantic.fit(source, rows, clusters=10, minutes=0.01)  # one recording is enough then
    assert "0.0 minutes" in capsys.readouterr().out
    for clusters, some in ((5000, rows), (10, rows[1:2]), (10, rows[:0])):
        with pytest.raises(UserError, match=f"too few for {clusters} clusters"):
            semantic.fit(source, some, clusters=clusters)


def test_unknown_features_and_missing_packages_are_named():
    with pytest.raises(UserError, match="'mel': expected mfcc"):
        semantic.KMeans(10, "mel")
    with pytest.raises(UserError, match="hubert:MODEL:LAYER"):
        semantic.KMeans(10, "hubert:facebook/hubert-base-ls960")
    if importlib.util.find_spec("transformers") is None:
        with pytest.raises(UserError, match="pip install transformers"):
            semantic.KMeans(10, "hubert:facebook/hubert-base-ls960:9")


def test_tokens_of_hubert_have_the_same_interface(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    model = transformers.HubertModel(transformers.HubertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(16,) * 7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4))
    model.save_pretrained(tmp_path)
    tokenizer = semantic.fit(Source(4), np.arange(4), clusters=8, features=f"hubert:{tmp_path}:1")
    assert tokenizer.centers.shape == (8, 16) and list(tokenizer.state()["model"]) == [
        "centers", "broad", "mean", "deviation"]
    wave = torch.from_numpy(synthetic.speak("a i u", 0)[0])
    for length in (320, 321, 6400, 6401):
        assert len(tokenizer.encode(wave[:length], 16_000)[0]) == -(-length // 320)
    with pytest.raises(UserError, match="layers 0 to 2"):
        semantic.KMeans(8, f"hubert:{tmp_path}:3")
    with pytest.raises(UserError, match="hubert:"):
        semantic.KMeans(8, f"hubert:{tmp_path}/none:1")


def blobs(count, seed=0):
    """Points around `count` places far from each other, of very different numbers."""
    generator = torch.Generator().manual_seed(seed)
    places = 100 * torch.randn(count, 4, generator=generator)
    numbers = torch.multinomial(torch.linspace(1, 20, count), 4000, True, generator=generator)
    return places[numbers] + torch.randn(4000, 4, generator=generator), places


def test_kmeans_finds_clusters_that_stand_apart():
    points, places = blobs(12)
    centers = semantic.minibatch_kmeans(points, 12)
    which, distance = semantic.nearest(places, centers)
    assert len(set(which.tolist())) == 12 and distance.max() < 1
    which, distance = semantic.nearest(points, centers)
    assert distance.mean() < 1.05 * 4  # the variance in four dimensions
    exact = torch.cdist(points, centers)
    assert torch.equal(which, exact.argmin(1))
    torch.testing.assert_close(distance, exact.square().amin(1), rtol=1e-2, atol=0.05)


def test_kmeans_goes_on_with_the_best_of_its_starts(monkeypatch):
    torch.manual_seed(0)
    points, starts = torch.cat([torch.randn(1000, 2) + place for place in (0, 20, 40)]), iter((0, 1, 2, 3))
    bad, good = torch.tensor([[0.0, 0], [1, 1], [30, 30]]), torch.tensor([[1.0, 1], [21, 21], [41, 41]])
    monkeypatch.setattr(semantic, "plus_plus", lambda *_: good.clone() if next(starts) == 2 else bad.clone())
    monkeypatch.setattr(semantic, "FEW", 0.0)  # none is moved
    centers = semantic.minibatch_kmeans(points, 3)
    assert next(starts, None) is None
    places = torch.tensor([0.0, 20, 40])[:, None].expand(3, 2)
    torch.testing.assert_close(centers.sort(0).values, places, atol=0.2, rtol=0)


def test_kmeans_plus_plus_starts_better_than_chance():
    points, _ = blobs(30)
    spread = {"++": [], "random": []}
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        starts = {"++": semantic.plus_plus(points, 30, generator),
                  "random": points[torch.randperm(len(points), generator=generator)[:30]]}
        for name, centers in starts.items():
            spread[name].append(float(semantic.nearest(points, centers)[1].mean()))
    assert np.mean(spread["++"]) < 0.2 * np.mean(spread["random"])


def test_no_cluster_dies_where_there_are_points_for_it():
    points = torch.cat((0.01 * torch.randn(5000, 2), torch.randn(300, 2) + 20))
    centers = semantic.minibatch_kmeans(points, 40)
    assert len(torch.unique(semantic.nearest(points, centers)[0])) >= 39
    alike = semantic.minibatch_kmeans(torch.ones(100, 3), 10)  # nor does it fail where there are none
    assert torch.isfinite(alike).all()


def test_runs_restore_the_tokens():
    generator = np.random.default_rng(0)
    for length in (0, 1, 2, 50):
        tokens = generator.integers(0, 3, length)
        short, runs = semantic.unique(tokens)
        np.testing.assert_array_equal(np.repeat(short, runs), tokens)
        assert all(a != b for a, b in itertools.pairwise(short)) and (runs > 0).all()


def test_labels_leave_out_what_is_between_two_syllables():
    record = {"syllables": [(0.0, 0.2, "i"), (0.2, 0.4, "a"), (0.46, 0.6, "i")]}
    i, a = (list(synthetic.SYLLABLES).index(name) for name in "ia")
    expected = [-1, *[i] * 8, -1, -1, *[a] * 8, *[-1] * 5, *[i] * 5, -1]  # middles are at 10, 30, ... ms
    assert semantic.syllable_labels(record, 30).tolist() == expected


def test_measures_of_tokens_by_hand():
    tokens, labels = np.array([0, 0, 0, 1, 1, 2]), np.array([5, 5, 3, 3, -1, -1])
    # 0 means 5 and 1 means 3; 2 has no label, and 3 was never there
    assert semantic.many_to_one(tokens, labels, np.array([0, 0, 1, 2, 3, 1]), np.array([5, 3, 3, 5, 0, -1])) == 2 / 5
    ones, twos = np.ones(9, int), np.full(9, 2)
    assert semantic.speaker_accuracy([ones, twos], "ab", [twos, ones, ones], "bab") == (2 / 3, 1 / 3)
    record = {"syllables": [(0, 1, name) for name in ("a", "i", "u", "o")]}
    for names, accuracy in (("aiuo", 1), ("aio", 0.75), ("aieuo", 0.75), ("aiee", 0.5), ("", 0), ("eeeeeeeeee", 0)):
        assert semantic.syllable_accuracy({"syllables": [(0, 1, name) for name in names]}, record) == accuracy


# The listener

def noisy(wave, seed=0):
    """With white noise at a signal-to-noise ratio of 8 dB."""
    noise = np.random.default_rng(seed).standard_normal(len(wave)).astype(np.float32)
    return wave + noise * np.sqrt(np.mean(np.square(wave)) * 10 ** -0.8)


def of_a_second(wave):
    return wave[4000:20_000]


@pytest.mark.parametrize("change", [np.asarray, noisy, of_a_second])
def test_the_listener_hears_voice_and_syllables(source, change):
    listener = semantic.Listener()
    rows = range(60)
    heard = [listener.hear(change(source.waves[row])) for row in rows]
    records = [source.records[row] for row in rows]
    for name, least, typical in (("pitch", 0.12, 0.05), ("formant", 0.12, 0.03)):
        errors = np.abs([np.log(one[name] / record[name]) for one, record in zip(heard, records)])
        assert errors.max() < least and errors.mean() < typical, name
    if change is not of_a_second:
        assert np.mean([semantic.syllable_accuracy(one, record) for one, record in zip(heard, records)]) > 0.97
        (start, stop, name), (begin, end, same) = heard[0]["syllables"][0], records[0]["syllables"][0]
        assert name == same and abs(start - begin) < 0.04 and abs(stop - end) < 0.04


def test_the_listener_tells_speakers_apart():
    listener = semantic.Listener()
    first, second = ([listener.hear(noisy(synthetic.speak("a i u er o e", who, take=take)[0], take))
                      for who in range(40)] for take in (0, 1))
    alike = np.array([[listener.same_speaker(one, other) for other in second] for one in first])
    assert np.diag(alike).mean() >= 0.97
    assert alike[~np.eye(40, dtype=bool)].mean() < 0.15


def test_the_listener_does_not_depend_on_loudness_or_rate():
    listener, (wave, record) = semantic.Listener(), synthetic.speak("i a u y", 11)
    plain, quiet = listener.hear(wave), listener.hear(0.01 * wave)
    assert plain["syllables"] == quiet["syllables"] and listener.same_speaker(plain, quiet)
    faster = listener.hear(audio.resample(torch.from_numpy(wave), 16_000, 24_000), 24_000)
    assert listener.same_speaker(plain, faster) and semantic.syllable_accuracy(faster, record) == 1


def test_the_listener_says_when_there_is_no_voice():
    listener, voice = semantic.Listener(), semantic.Listener().hear(synthetic.speak("a", 0)[0])
    for wave in (np.zeros(8000), np.zeros(10), 0.1 * np.random.default_rng(0).standard_normal(16_000)):
        heard = listener.hear(wave)
        assert np.isnan(heard["pitch"]) and not heard["syllables"]
        assert not listener.same_speaker(heard, voice) and not listener.same_speaker(heard, heard)
