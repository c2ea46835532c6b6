"""The built-in shapes: what is said is drawn, what is drawn can be told apart, rows do not depend on each other."""
import collections
import itertools

import numpy as np
import pytest

from common import synthetic


@pytest.fixture(scope="module")
def world():
    return synthetic.shapes(range(4000))


def test_a_row_is_the_same_whatever_other_rows_are_asked_for(world):
    images, records = world
    rows = np.random.default_rng(0).permutation(4000)[:300]
    some, their_records = synthetic.shapes(rows)
    np.testing.assert_array_equal(some, images[rows])
    assert their_records == [records[row] for row in rows]
    far, _ = synthetic.shapes([10 ** 12])  # the data set has no end
    assert far.shape == (1, 32, 32, 3)


def test_captions_name_what_they_claim_and_nothing_else(world):
    values = {value: name for name, values in synthetic.ATTRIBUTES.items() for value in values}
    for record in world[1]:
        words = record["caption"].replace(",", "")
        found = {values[value] for value in values if f" {value} " in f" {words} "}
        assert found == set(record["named"]), record
        assert all(record["attributes"][name] in words for name in record["named"])
        assert record["named"] and set(record["attributes"]) == set(synthetic.ATTRIBUTES)


def test_captions_leave_something_open_and_name_any_set_of_attributes(world):
    records = world[1]
    assert 0.8 < np.mean([len(record["named"]) < 5 for record in records]) < 0.98
    assert len({tuple(record["named"]) for record in records}) == 2 ** 5 - 1
    shares = synthetic.named(records).mean(0)
    np.testing.assert_allclose(shares, list(synthetic.NAMED.values()), atol=0.03)
    captions = {record["caption"] for record in synthetic.shapes(range(20_000))[1]}
    assert {"a small red star", "a large green triangle at the top left", "a blue shape in the center",
            "a large shape on a gray background", "a moon at the bottom right on a white background"} <= captions


def test_attributes_are_uniform_and_independent(world):
    table = np.array([list(record["attributes"].values()) for record in world[1]])
    for i, (name, values) in enumerate(synthetic.ATTRIBUTES.items()):
        share = np.array([(table[:, i] == value).mean() for value in values])
        assert np.abs(share * len(values) - 1).max() < 0.2, name
        for j in range(i):
            pairs = collections.Counter(zip(table[:, i], table[:, j]))
            cells = len(values) * len(set(table[:, j]))
            chi_squared = sum((n - 4000 / cells) ** 2 for n in pairs.values()) / (4000 / cells)
            assert chi_squared < cells + 5 * np.sqrt(2 * cells), (name, j)


def grown(**changes):
    plain = {"shape": "circle", "color": "red", "size": "large", "place": "center", "background": "white"}
    return {**plain, **changes}


def draw(attributes, size=32):
    """Pictures of attributes without variation."""
    numbers = synthetic.values([{"attributes": values} for values in attributes])
    return synthetic.draw(numbers, np.full((len(attributes), 6), 0.5), size)


def test_the_drawing_has_the_attributes():
    for size in (16, 32, 64):
        places = draw([grown(place=p) for p in synthetic.ATTRIBUTES["place"]], size=size).astype(float)
        ink = 255 - places[..., 1]  # red on white is dark in the green channel
        total = ink.sum((1, 2))
        x = (ink.sum(1) * (np.arange(size) + 0.5)).sum(1) / total / size
        y = (ink.sum(2) * (np.arange(size) + 0.5)).sum(1) / total / size
        for place, *found in zip(synthetic.ATTRIBUTES["place"], x, y):
            np.testing.assert_allclose(found, synthetic.PLACES[place], atol=0.03)
        small, large = draw([grown(size=s) for s in ("small", "large")], size=size).astype(float)
        darkest, lightest = small[..., 1].min(), small[..., 1].max()
        area = [((lightest - image[..., 1]) / (lightest - darkest)).sum() / size ** 2 for image in (small, large)]
        expected = [np.pi * (0.97 * synthetic.SIZES[s]) ** 2 for s in ("small", "large")]
        np.testing.assert_allclose(area, expected, rtol=0.02)
    for color in synthetic.ATTRIBUTES["color"]:
        assert tuple(draw([grown(color=color)])[0, 16, 16]) == synthetic.COLORS[color]
    for background in synthetic.ATTRIBUTES["background"]:
        assert tuple(draw([grown(background=background)])[0, 0, 0]) == synthetic.BACKGROUNDS[background]


def test_each_shape_has_the_area_of_its_geometry():
    def segment(radius, distance):  # of a disc, cut off at a distance from its center
        return radius ** 2 * np.arccos(distance / radius) - distance * np.sqrt(radius ** 2 - distance ** 2)

    apart = np.hypot(0.55, 0.1)  # of the moon's two discs
    chord = (apart ** 2 + 1 - 0.85 ** 2) / 2 / apart
    areas = {"circle": np.pi * 0.97 ** 2, "square": 1.7 ** 2, "triangle": 3 * np.sqrt(3) * 0.58 ** 2,
             "star": 5 * 1.12 * 0.5 * np.sin(0.2 * np.pi), "ring": np.pi * (1.02 ** 2 - 0.48 ** 2),
             "cross": 2 * 2 * 0.66 - 0.66 ** 2, "heart": 1.24 ** 2 + np.pi * 0.62 ** 2,
             "moon": np.pi - segment(1, chord) - segment(0.85, apart - chord)}
    x, y = np.meshgrid(np.linspace(-1.3, 1.3, 521), np.linspace(-1.3, 1.3, 521))  # 200 points a unit
    for shape, distance in synthetic.SHAPES.items():
        inside = distance(x, y) < 0
        assert inside.sum() / 200 ** 2 == pytest.approx(areas[shape], rel=0.01), shape
        assert shape == "moon" or (inside == inside[:, ::-1]).mean() > 0.99  # left is as right


def test_the_built_in_data_are_what_they_were():
    """A change of them would go unnoticed otherwise, and what was trained on them is no longer what it says."""
    images = synthetic.shapes(range(512))[0].astype(float)
    np.testing.assert_allclose(images.mean((0, 1, 2)), [135.304453, 134.629026, 133.695710], rtol=1e-6)
    expected = (5760, 28.8419, -13.0985), (9600, -5.4676, -3.9344), (7680, 13.0694, 20.7395)
    for wave, (length, chirp, level) in zip(synthetic.syllables(range(3))[0], expected):
        time = np.arange(len(wave))
        found = np.cos(2e-5 * time ** 2) @ wave, np.cos(1e-3 * time) @ np.square(wave)
        assert len(wave) == length
        np.testing.assert_allclose(found, (chirp, level), atol=1e-3)


# Judging

def test_numbers_of_attributes_and_of_what_is_named():
    record = {"attributes": grown(shape="star", place="bottom right"), "named": ["size", "place"]}
    assert synthetic.values([record, {"attributes": grown()}]).tolist() == [[3, 0, 1, 4, 0], [0, 0, 1, 2, 0]]
    assert synthetic.named([record]).tolist() == [[False, False, True, True, False]]


def test_a_judge_gives_the_attributes_of_the_nearest_reference():
    rng = np.random.default_rng(0)
    references, values = rng.standard_normal((50, 8)).astype(np.float32), rng.integers(0, 9, (50, 3))
    features = rng.standard_normal((20, 8)).astype(np.float32)
    nearest = [min(range(50), key=lambda i, x=x: float(((references[i] - x) ** 2).sum())) for x in features]
    np.testing.assert_array_equal(synthetic.Judge(references, values).attributes(features), values[nearest])


def test_pictures_are_judged_at_any_size_and_worse_the_more_they_are_spoilt():
    judge = synthetic.picture_judge()
    assert judge is synthetic.picture_judge() and len(judge.values) == 8 * 8 * 6 * 2 * 5 * 3
    noise = np.random.default_rng(0).integers(-90, 91, (500, 32, 32, 3))
    shares = {}
    for size in (16, 32, 64):
        images, records = synthetic.shapes(range(20_000, 20_500), size=size)
        spoilt = (images.astype(int) + noise).clip(0, 255).astype(np.uint8) if size == 32 else images
        for name, pictures in ((size, images), ("spoilt", spoilt), ("black", images * 0)):
            right = judge.attributes(synthetic.picture_features(pictures)) == synthetic.values(records)
            shares[name] = (right | ~synthetic.named(records)).all(1).mean()
            if size == 32:
                shares[f"{name} of one attribute"] = right.mean(0).min()
    assert min(shares[32], shares[64]) > 0.95 and shares["32 of one attribute"] > 0.93, shares
    assert shares["black"] < 0.2, shares
    features = synthetic.picture_features(images)
    assert features.shape == (500, 768) and features.dtype == np.float32
    box = images[0, 12:16, 20:24].mean((0, 1)) / 255
    np.testing.assert_allclose(features[0].reshape(16, 16, 3)[3, 5], box, rtol=1e-5)


def test_entropy_is_that_of_the_frequencies():
    assert synthetic.entropy(np.array([3, 3, 3])) == 0
    assert synthetic.entropy(np.array([0, 7, 7, 9])) == pytest.approx(1.5 * np.log(2))


@pytest.fixture(scope="module")
def spoken():
    return synthetic.syllables(range(300))


def test_a_recording_is_the_same_whatever_other_rows_are_asked_for(spoken):
    waves, records = spoken
    some, theirs = synthetic.syllables([70, 3, 119])
    for row, wave, record in zip([70, 3, 119], some, theirs):
        np.testing.assert_array_equal(wave, waves[row])
        assert record == records[row] and synthetic.speakers_of([row])[0] == record["speaker"]
    assert synthetic.syllables([10 ** 12])[0][0].dtype == np.float32  # the data set has no end


def test_recordings_are_what_their_records_say(spoken):
    for wave, record in zip(*spoken):
        names = record["text"].split()
        assert 3 <= len(set(names)) == len(names) <= 5 and set(names) <= set(synthetic.SYLLABLES)
        assert len(wave) == len(names) * 1920
        assert np.abs(wave).max() <= 1 and abs(wave[0]) < 0.01 and abs(wave[-1]) < 0.01
        assert 0.1 < np.sqrt(np.mean(np.square(wave))) < 0.2
        alone = synthetic.speak(names[1:2], record["speaker"])[0]  # held, it is the syllable by itself
        np.testing.assert_allclose(wave[1920 + 320:1920 + 640], alone[640 + 320:1280], atol=1e-6)


def test_speakers_and_syllables_are_uniform_and_independent(spoken):
    records = synthetic.syllables(range(3000))[1]
    pitch, timbre = np.log([synthetic.voice_of(record["speaker"]) for record in records]).T
    count = [len(record["text"].split()) for record in records]
    assert abs(np.corrcoef(pitch, timbre)[0, 1]) < 0.06
    assert len({record["speaker"] for record in records}) == synthetic.SPEAKERS
    for values in (pitch, timbre, count, [name for record in records for name in record["text"].split()]):
        shares = np.unique(values, return_counts=True)[1] / len(values)
        assert abs(shares * len(shares) - 1).max() < 0.2


def test_a_voice_has_its_harmonics_and_a_syllable_its_formants():
    for speaker in (0, 37, 99):
        pitch, timbre = synthetic.voice_of(speaker)
        for name, formants in synthetic.SYLLABLES.items():
            wave = synthetic.speak([name], speaker)[0][640:1280]
            level = np.abs(np.fft.rfft(wave))
            step = round(pitch / 12.5)
            assert np.delete(level, np.arange(0, 321, step)).max() < 1e-3 * level.max()  # nothing between harmonics
            number = np.arange(1, int(3800 / pitch) + 1)
            expected = np.where(number % 2, 1, timbre) * sum(
                gain / np.hypot(1, (number * pitch - f) / 75) for gain, f in zip((1, 0.5), formants))
            found = level[number * step]
            np.testing.assert_allclose(found / found.max(), expected / expected.max(), rtol=1e-3)


def test_voices_are_heard_in_the_wave_alone(spoken):
    for wave, record in zip(*spoken):
        pitch, timbre = np.log(np.array(synthetic.heard_voice(wave)) / synthetic.voice_of(record["speaker"]))
        assert abs(pitch) < 0.005 and abs(timbre) < 0.4
    halves = [[synthetic.heard_voice(half) for half in np.array_split(wave, 2)] for wave in spoken[0]]
    assert np.mean([synthetic.same_voice(*pair) for pair in halves]) > 0.95
    others = [synthetic.same_voice(one, other) for (one, _), (_, other) in itertools.pairwise(halves)]
    assert np.mean(others) < 0.1
    assert np.isnan(synthetic.heard_voice(np.zeros(4000, np.float32))).all()
    assert not synthetic.same_voice((np.nan, np.nan), (100.0, 1.0))


def test_texts_are_heard_in_labels_and_compared_by_edits(spoken):
    for record in spoken[1][:50]:
        labels = synthetic.syllable_labels(record, round(50 * 0.24 * len(record["text"].split())), 50)
        assert synthetic.heard_text(labels) == record["text"].split()
        noisy = labels.copy()
        noisy[5:8] = (labels[5] + 1) % 6  # shorter than `least`
        assert synthetic.heard_text(noisy) == record["text"].split()
    assert synthetic.heard_text(np.array([], int)) == []
    for found, wanted, similarity in (("aio", "aio", 1), ("ao", "aio", 2 / 3), ("aeo", "aio", 2 / 3), ("", "aio", 0),
                                      ("aiou", "aio", 2 / 3), ("uuuuuuu", "aio", 0), ("oia", "aio", 1 / 3)):
        assert synthetic.text_similarity(list(found), list(wanted)) == pytest.approx(similarity), (found, wanted)
    np.testing.assert_array_equal(synthetic.majority(np.array([0, 0, 0, 2, 2]), np.array([1, 1, 0, 3, 3]), 4),
                                  [1, 0, 3, 0])
