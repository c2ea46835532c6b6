"""The built-in data: captions describe the drawings, and scores recognize real data."""

import itertools

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from common.data import embeddings, synthetic

PLAIN = {
    "shape": "circle",
    "color": "red",
    "size": "large",
    "place": "center",
    "background": "white",
}


@pytest.fixture(scope="module")
def spoken():
    """[(text, speaker, wave)]"""
    samples = zip(*synthetic.syllables(range(300)))
    return [(*sample, synthetic.speak(*sample)) for sample in samples]


@pytest.mark.parametrize("make", [synthetic.shapes, synthetic.syllables])
def test_a_sample_does_not_depend_on_the_others(make):
    indices = [42, 7, 10**12]  # the dataset is infinite
    for all_of_them, few in zip(make(range(50)), make(indices)):
        for i, index in enumerate(indices[:2]):
            assert_array_equal(few[i], all_of_them[index])


def test_the_built_in_data_are_what_they_were():
    """Otherwise earlier models and results would silently belong to other data."""
    images, records = synthetic.shapes(range(512))
    assert sum(len(record["caption"]) for record in records) == 16713
    means = [135.304453, 134.629026, 133.695710]
    assert_allclose(images.mean((0, 1, 2)), means, rtol=1e-6)
    waves = [synthetic.speak(*sample) for sample in zip(*synthetic.syllables(range(3)))]
    assert [len(wave) for wave in waves] == [5760, 9600, 7680]
    chirps = [np.cos(2e-5 * np.arange(len(wave)) ** 2) @ wave for wave in waves]
    assert_allclose(chirps, [28.8419, -5.4676, 13.0694], atol=1e-3)


# Shapes


def test_captions_name_what_they_claim_and_nothing_else():
    attribute_of = {}
    for name, options in synthetic.ATTRIBUTES.items():
        attribute_of |= dict.fromkeys(options, name)
    _, records = synthetic.shapes(range(4000))
    for record in records:
        caption = f" {record['caption']} "
        named = {name for option, name in attribute_of.items() if f" {option} " in caption}
        assert named == set(record["named"]), record
        assert named
        assert all(record["attributes"][name] in caption for name in named)


def draw(name, options):
    """Pictures of an attribute's `options`, without variation: uint8 (N, 32, 32, 3)."""
    records = [{"attributes": {**PLAIN, name: option}} for option in options]
    values = synthetic.attribute_values(records)
    return synthetic.draw(values, np.full((len(values), 6), 0.5))


def test_the_drawing_has_the_place_and_the_size():
    ink = draw("place", synthetic.PLACES)[..., 1] < 128  # red is dark in the green channel
    centers = [np.argwhere(picture).mean(0)[::-1] / 31 for picture in ink]
    assert_allclose(centers, list(synthetic.PLACES.values()), atol=0.04)
    small, large = (draw("size", synthetic.SIZES)[..., 1] < 128).sum((1, 2))
    assert large / small == pytest.approx((0.33 / 0.21) ** 2, rel=0.1)


# Recognizing attributes


@pytest.mark.parametrize("size", [32, 64])
def test_pictures_are_judged_at_any_size_and_those_that_are_spoiled_fail(size):
    images, records = synthetic.shapes(range(20_000, 20_500), size=size)
    is_named = synthetic.named_attributes(records)

    def caption_match(noise):
        pictures = (images + noise).clip(0, 255).astype(np.uint8)
        features = synthetic.picture_features(pictures)
        values = synthetic.nearest(features, *synthetic.picture_references())
        is_right = values == synthetic.attribute_values(records)
        return (is_right | ~is_named).all(1).mean()

    noise = np.random.default_rng(0).integers(-90, 91, images.shape)
    assert caption_match(0) > 0.95
    assert caption_match(noise * 9) < 0.2


def copied(batch, seeds):
    return batch["text_embed"]


def varied(batch, seeds):
    """Embeddings of both shapes equally often; the last 4 of every 16 have the wrong color."""
    number = torch.arange(len(batch["text_embed"])) % 16
    color = batch["text_embed"].argmax(-1) // 2 ^ (number >= 12)
    return torch.eye(4)[color * 2 + number % 2]


@pytest.mark.parametrize("sample, match, coverage", [(copied, 1, 0), (varied, 0.75, 1)])
def test_scores_of_embeddings_tell_copies_from_variety(sample, match, coverage, tmp_path):
    """Captions mention the color, but not the shape."""
    records = []
    for color, shape in itertools.product(("red", "blue"), ("ring", "star")):
        attributes = {**PLAIN, "color": color, "shape": shape}
        records.append({"caption": "", "named": ["color"], "attributes": attributes})
    embeds = torch.eye(4).repeat(300, 1)
    embeddings.write_shards(tmp_path, embeds, embeds, records * 300)
    splits = {}
    dataset = embeddings.Embeddings(tmp_path)
    for split, indices in zip(("train", "validation", "test"), np.split(np.arange(1200), 3)):
        splits[split] = dataset, indices
    assert synthetic.embedding_scores(splits, "test", sample, seed=0) == {}  # not the built-in data
    (tmp_path / "clip.json").write_text('{"made_from": {}}')
    scores = synthetic.embedding_scores(splits, "test", sample, seed=0)
    expected = {
        "caption_match": match,
        "caption_match_ceiling": 1,
        "coverage": pytest.approx(coverage, abs=1e-4),
        "coverage_ceiling": pytest.approx(0.95, abs=0.05),
    }
    assert scores == expected


# Syllables


def test_recordings_are_what_their_records_say(spoken):
    for text, speaker, wave in spoken:
        names = text.split()
        assert len(wave) == len(names) * 1920
        for i, name in enumerate(names):  # neighbors do not change a syllable's middle
            alone = synthetic.speak(name, speaker)
            middle = wave[1920 * i + 640 : 1920 * i + 1280]
            assert_allclose(middle, alone[640:1280], atol=1e-6)


def test_voices_are_recognized_by_the_wave_alone(spoken):
    halves = []
    for _, speaker, wave in spoken:
        voice = synthetic.estimate_voice(wave)
        pitch, timbre = np.log(voice) - np.log(synthetic.voice_of(speaker))
        assert abs(pitch) < 0.005
        assert abs(timbre) < 0.4
        halves.append([synthetic.estimate_voice(half) for half in np.array_split(wave, 2)])
    same = [synthetic.same_voice(*voices) for voices in halves]
    others = [synthetic.same_voice(a[0], b[1]) for a, b in itertools.pairwise(halves)]
    assert np.mean(same) > 0.95
    assert np.mean(others) < 0.1
    silence = synthetic.estimate_voice(np.zeros(4000, np.float32))
    assert not synthetic.same_voice(silence, (100.0, 1.0))


def test_syllables_are_recognized_in_the_labels_of_frames(spoken):
    for text, _, _ in spoken[:50]:
        names = text.split()
        labels = synthetic.syllable_labels(text, 12 * len(names), 50)
        labels[5:8] = (labels[5] + 1) % 6  # too short a run
        assert synthetic.recognize_syllables(labels) == names
    assert synthetic.recognize_syllables(np.array([1] * 4 + [2] * 3)) == ["e"]


@pytest.mark.parametrize("found, similarity", {
    "aio": 1,
    "aiou": 2 / 3,
    "uuuuuuu": 0,
    "oia": 1 / 3,
}.items())
def test_texts_are_compared_by_edits(found, similarity):
    assert synthetic.text_similarity(list(found), list("aio")) == pytest.approx(similarity)
