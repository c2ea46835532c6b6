"""PNG: Pillow reads what is written. Grids: all is in its place. Resizing: as Pillow does it."""
import io
import textwrap

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from common import media, synthetic


@pytest.mark.parametrize("shape", [(1, 1, 3), (64, 33, 3)])
def test_what_is_written_is_read_back_by_pillow(shape, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    for file in (tmp_path / "a.png", stream):
        media.write_png(file, image)
        np.testing.assert_array_equal(np.asarray(Image.open(file)), image)


# Grids

H = """\
#....
#....
####.
#...#
#...#
#...#
#...#
.....
"""


def test_every_character_has_its_own_glyph_and_all_others_a_box():
    glyphs = {glyph.tobytes() for glyph in media.GLYPHS}
    assert len(glyphs) == len(media.GLYPHS) == len(media.CHARACTERS) + 1
    h = media.GLYPHS[media.CHARACTERS.index("h")]
    lines = ["".join(".#"[pixel] for pixel in row) for row in h]
    assert lines == H.splitlines()
    box = media.GLYPHS[-1]
    assert not box[1:6, 1:4].any()
    assert box.sum() == 2 * (7 + 5) - 4


def ink_of(lines, width):
    """The pixels below a picture of this width with a caption of these lines: True for ink."""
    ink = np.zeros((10 * len(lines), width), bool)
    for y, line in enumerate(lines):
        for x, character in enumerate(line.lower()):
            glyph = media.GLYPHS[media.CHARACTERS.find(character)]
            cell = ink[10 * y:10 * (y + 1), 6 * x:6 * (x + 1)]
            cell[2:, :5] = glyph
    return ink


@pytest.mark.parametrize("size, scale", [(20, 5), (32, 3), (200, 1)])
def test_a_captioned_grid_has_enlarged_pictures_in_their_places_with_their_captions(size, scale):
    images, _ = synthetic.shapes(range(5), size=size)
    captions = ["Größe 9!", "", "a large red circle on blue", "long " * 200, "a"]
    side = scale * size
    sheet = media.captioned_grid(images, captions, columns=3, gap=3)
    tile = side + 4 * 10 + 3
    expected = np.full((2 * tile + 3, 3 * (side + 3) + 3, 3), 255, np.uint8)
    for i, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(i, 3)
        top = 3 + tile * row
        left = 3 + (side + 3) * column
        enlarged = np.kron(image, np.ones((scale, scale, 1)))
        expected[top:top + side, left:left + side] = enlarged
        lines = textwrap.wrap(
            caption,
            width=side // 6,
            max_lines=4,
            placeholder=" ...")
        ink = ink_of(lines, side)
        below = expected[top + side:, left:left + side]
        below[:len(ink)][ink] = 0
    np.testing.assert_array_equal(sheet, expected)


def test_a_grid_without_captions_leaves_no_room_for_them():
    images = np.zeros((5, 96, 96, 3), np.uint8)
    sheet = media.captioned_grid(images, [""] * 5, columns=2)
    assert sheet.shape == (3 * 100 + 4, 2 * 100 + 4, 3)


# Resizing

@pytest.mark.parametrize("mode", media.KERNELS)
@pytest.mark.parametrize("height, width, size", [
    (12, 12, 4),
    (13, 9, 5),
    (6, 6, 16),
    (40, 3, 9),
])
def test_resizing_is_pillows(mode, height, width, size):
    Image = pytest.importorskip("PIL.Image")
    images = torch.randn(1, 3, height, width)
    resized = media.resize(images, size, mode)
    method = Image.Resampling[mode.upper()]
    for before, after in zip(images[0], resized[0]):
        expected = Image.fromarray(before.numpy()).resize((size, size), method)
        np.testing.assert_allclose(after, np.asarray(expected), atol=5e-6)


@pytest.mark.parametrize("mode", media.RESIZE_MODES)
def test_resizing_keeps_dtype_and_argument_and_an_image_of_that_size(mode):
    images = torch.randn(2, 3, 12, 12).bfloat16()
    before = images.clone()
    expected = media.resize(images.float(), 5, mode).bfloat16()
    assert torch.equal(media.resize(images, 5, mode), expected)
    assert torch.equal(media.resize(images, 12, mode), before)


@pytest.mark.parametrize("mode, row, column", [("nearest", 0, 0), ("nearest_exact", 1, 3)])
def test_nearest_takes_pixels(mode, row, column):
    images = torch.randn(2, 3, 12, 24)
    assert torch.equal(media.resize(images, 4, mode), images[:, :, row::3, column::6])


@pytest.mark.parametrize("work, argument", [(media.resize, 5), (media.blur, torch.ones(2))])
def test_resizing_and_blurring_are_done_in_full_precision_under_autocast(work, argument):
    images = torch.randn(2, 3, 12, 12)
    expected = work(images, argument)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(work(images, argument), expected)


@pytest.mark.parametrize("mode", media.RESIZE_MODES)
def test_uint8_is_resized_as_float_is_and_rounded_and_kept_in_range(mode):
    images = torch.randint(2, (2, 12, 9, 3), dtype=torch.uint8)
    images = 255 * images
    channels = images.permute(0, 3, 1, 2)
    exact = media.resize(channels.float(), 5, mode)
    exact = exact.permute(0, 2, 3, 1)
    resized = media.resize_uint8(images, 5, mode)
    assert resized.dtype == torch.uint8
    assert (resized - exact.clamp(0, 255)).abs().max() < 0.501


# Pixels

def test_uint8_becomes_numbers_within_1_and_comes_back():
    images = torch.arange(255, dtype=torch.uint8)
    images = images.view(1, 5, 17, 3)
    numbers = media.from_uint8(images)
    expected = images.permute(0, 3, 1, 2) / 127.5 - 1
    assert_close(numbers, expected)
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
    variance = line @ squares
    assert_close(variance, sigma**2, rtol=1e-3, atol=1e-4)
    assert_close(blurred, blurred.mT)
    constant = torch.full((2, 1, 9, 9), 0.3)
    assert_close(media.blur(constant, sigma), constant)


@pytest.mark.parametrize(
    "height, width, rows, columns",
    [
        (9, 4, slice(2, 6), slice(0, 4)),
        (4, 9, slice(0, 4), slice(2, 6)),
        (4, 4, slice(0, 4), slice(0, 4)),
    ],
)
def test_a_central_square_is_as_large_as_the_shorter_side(height, width, rows, columns):
    images = torch.randn(2, 3, height, width)
    square = media.central_square(images)
    assert torch.equal(square, images[:, :, rows, columns])


def test_a_crop_is_the_square_that_begins_at_its_corner():
    images = torch.randn(2, 3, 9, 9)
    crops = media.crop(images, 4, torch.tensor([[0, 2], [5, 0]]))
    assert torch.equal(crops[0], images[0, :, :4, 2:6])
    assert torch.equal(crops[1], images[1, :, 5:, :4])
