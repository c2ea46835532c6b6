"""The built-in shapes: what is said is drawn, what is drawn can be told apart, rows do not depend on each other."""
import collections

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


def test_seeds_give_other_data(world):
    other, records = synthetic.shapes(range(200), seed=1)
    assert (other != world[0][:200]).any(axis=(1, 2, 3)).all()
    assert records != world[1][:200]


def test_captions_name_what_they_claim_and_nothing_else(world):
    values = {value: name for name, values in synthetic.ATTRIBUTES.items() for value in values}
    for record in world[1]:
        words = record["caption"].replace(",", "")
        found = {values[value] for value in values if f" {value} " in f" {words} "}
        assert found == set(record["named"]), record
        assert all(record["attributes"][name] in words for name in record["named"])
        assert record["named"] and set(record["attributes"]) == set(synthetic.ATTRIBUTES)


def test_captions_are_varied_and_leave_something_open(world):
    records = world[1]
    captions = collections.Counter(record["caption"] for record in records)
    assert len(captions) > 1500
    assert np.mean([len(record["named"]) < 5 for record in records]) > 0.8
    wordings = {tuple(record["named"]) for record in records}
    assert len(wordings) == 2 ** 5 - 1  # every set of attributes is named by some caption
    typical = {record["caption"] for record in synthetic.shapes(range(40_000), size=1)[1]}
    assert {"a small red star", "a large green triangle at the top left", "something blue at the top left"} <= typical
    assert any(caption.startswith("a large green triangle at the") and caption.endswith("background")
               for caption in typical)


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


def test_the_drawing_has_the_attributes():
    for size in (16, 32, 64):
        places = synthetic.draw([grown(place=p) for p in synthetic.ATTRIBUTES["place"]], size=size).astype(float)
        ink = 255 - places[..., 1]  # red on white is dark in the green channel
        total = ink.sum((1, 2))
        x = (ink.sum(1) * (np.arange(size) + 0.5)).sum(1) / total / size
        y = (ink.sum(2) * (np.arange(size) + 0.5)).sum(1) / total / size
        for place, *found in zip(synthetic.ATTRIBUTES["place"], x, y):
            np.testing.assert_allclose(found, synthetic.CENTERS[place], atol=0.03)
        small, large = synthetic.draw([grown(size=s) for s in ("small", "large")], size=size).astype(float)
        darkest, lightest = small[..., 1].min(), small[..., 1].max()
        area = [((lightest - image[..., 1]) / (lightest - darkest)).sum() / size ** 2 for image in (small, large)]
        expected = [np.pi * (0.97 * synthetic.HALF_WIDTH[s]) ** 2 for s in ("small", "large")]
        np.testing.assert_allclose(area, expected, rtol=0.02)
    for color in synthetic.ATTRIBUTES["color"]:
        assert tuple(synthetic.draw([grown(color=color)])[0, 16, 16]) == synthetic.COLORS[color]
    for background in synthetic.ATTRIBUTES["background"]:
        assert tuple(synthetic.draw([grown(background=background)])[0, 0, 0]) == synthetic.COLORS[background]


@pytest.mark.parametrize("size", [16, 32])
def test_shapes_can_be_told_apart_at_any_turn(size):
    """The nearest of 8 shapes × 24 variations, others of the same seed left out, is of the same shape."""
    one_of_each = [grown(shape=s, size="small") for s in synthetic.ATTRIBUTES["shape"]]
    images = synthetic.draw(one_of_each * 24, size=32, seed=3).astype(float)
    images = images.reshape(len(images), size, 32 // size, size, 32 // size, 3).mean((2, 4))
    ink = images[:, :1, :1] - images  # the shade of the background is subtracted
    ink = ink.reshape(len(ink), -1) / np.linalg.norm(ink.reshape(len(ink), -1), axis=1, keepdims=True)
    similarity = ink @ ink.T - 2 * np.eye(len(ink))
    shape = np.arange(len(ink)) % 8
    assert (shape[similarity.argmax(1)] == shape).mean() > 0.95


def test_drawing_varies_with_a_seed_and_repeats():
    attributes = [grown()] * 6
    varied, again = synthetic.draw(attributes, seed=5), synthetic.draw(attributes, seed=5)
    np.testing.assert_array_equal(varied, again)
    assert len(np.unique(varied.reshape(6, -1), axis=0)) == 6
    plain = synthetic.draw(attributes)
    assert len(np.unique(plain.reshape(6, -1), axis=0)) == 1
    np.testing.assert_array_equal(plain[0], plain[0][:, ::-1])  # a plain circle in the center is symmetric
