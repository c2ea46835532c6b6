"""Grids: all is in its place. Resizing: as Pillow does it."""
import textwrap

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

from common.data import media, synthetic

# Grids

@pytest.mark.parametrize("size, scale", [(20, 5), (200, 1)])
def test_a_captioned_grid_has_enlarged_pictures_in_their_places_above_their_captions(size, scale):
    images, _ = synthetic.shapes(range(5), size=size)
    captions = ["Größe 9!", "", "a large red circle on blue", "long " * 200, "a"]
    side = scale * size
    sheet = media.captioned_grid(images, captions, columns=3)
    tile = side + 4 * 10 + 4
    height = 2 * tile + 4
    width = 3 * (side + 4) + 4
    expected = np.full((height, width, 3), 255, np.uint8)
    for i, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(i, 3)
        place = expected[4 + tile * row :, 4 + (side + 4) * column :]
        enlarged = np.kron(image, np.ones((scale, scale, 1)))
        place[:side, :side] = enlarged
        lines = textwrap.wrap(caption, side // 6, max_lines=4, placeholder=" ...")
        for y, line in enumerate(lines):
            for x, character in enumerate(line.lower()):
                glyph = media.GLYPHS[media.CHARACTERS.find(character)]
                cell = place[side + 10 * y + 2 :, 6 * x :]
                cell[:8, :6][glyph == 1] = 0
    assert_array_equal(sheet, expected)


# Resizing

@pytest.mark.parametrize("mode", media.KERNELS)
@pytest.mark.parametrize("height, width, size", [
    (13, 9, 5),
    (6, 6, 16),
    (40, 3, 9),
])
def test_resizing_is_pillows(mode, height, width, size):
    Image = pytest.importorskip("PIL.Image")
    images = torch.randn(1, 3, height, width)
    resized = media.resize(images, size, mode)
    method = Image.Resampling[mode.upper()]
    shorter = min(height, width)
    size = (size * width // shorter, size * height // shorter)
    for before, after in zip(images[0], resized[0]):
        expected = Image.fromarray(before.numpy()).resize(size, method)
        assert_allclose(after, np.asarray(expected), atol=5e-6)


@pytest.mark.parametrize("mode", [*media.KERNELS, "nearest", "nearest_exact"])
def test_resizing_keeps_dtype_and_argument_and_an_image_of_that_size(mode):
    images = torch.randn(2, 3, 12, 12).bfloat16()
    before = images.clone()
    expected = media.resize(images.float(), 5, mode).bfloat16()
    assert torch.equal(media.resize(images, 5, mode), expected)
    assert torch.equal(media.resize(images, 12, mode), before)


@pytest.mark.parametrize("mode, first", [
    ("nearest", 0),
    ("nearest_exact", 1),
])
def test_nearest_takes_pixels(mode, first):
    images = torch.randn(2, 3, 12, 24)
    assert torch.equal(media.resize(images, 4, mode), images[:, :, first::3, first::3])


@pytest.mark.parametrize("work, argument", [
    (media.resize, 5),
    (media.blur, torch.ones(2)),
])
def test_resizing_and_blurring_are_done_in_full_precision_under_autocast(work, argument):
    images = torch.randn(2, 3, 12, 12)
    expected = work(images, argument)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(work(images, argument), expected)


def test_uint8_is_resized_as_float_is_and_rounded_and_kept_in_range():
    pixels = torch.randint(2, (2, 12, 9, 3), dtype=torch.uint8) * 255
    images = pixels.permute(0, 3, 1, 2).float()
    exact = media.resize(images, 5).clamp(0, 255)  # it overshoots
    error = media.resize_uint8(pixels, 5).permute(0, 3, 1, 2) - exact
    assert error.abs().max() < 0.501


# Pixels

def test_uint8_becomes_numbers_within_1_and_comes_back():
    images = torch.arange(255, dtype=torch.uint8)
    images = images.view(1, 5, 17, 3)
    numbers = media.from_uint8(images)
    assert_close(numbers, images.permute(0, 3, 1, 2) / 127.5 - 1)
    assert torch.equal(media.to_uint8(numbers), images)
    beyond = torch.tensor([-3.0, 3.0, 0.0]).view(1, 3, 1, 1)
    assert media.to_uint8(beyond).flatten().tolist() == [0, 255, 128]


def test_a_blur_has_the_width_asked_for_both_ways_and_keeps_constants():
    spot = torch.zeros(2, 3, 33, 33)
    spot[:, :, 16, 16] = 1
    sigma = torch.tensor([0.8, 2.5])
    blurred = media.blur(spot, sigma)
    squares = (torch.arange(33) - 16.0) ** 2
    line = blurred[:, 1].sum(1)
    assert_close(line @ squares, sigma**2, rtol=1e-3, atol=1e-4)
    assert_close(blurred, blurred.mT)
    constant = torch.full((2, 1, 9, 9), 0.3)
    assert_close(media.blur(constant, sigma), constant)
