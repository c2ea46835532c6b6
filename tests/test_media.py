"""PNG: Pillow reads what is written. Grids: all is in its place. Resizing: as Pillow does it."""
import textwrap

import numpy as np
import pytest
import torch

from common import media, synthetic


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 3, 3), (64, 33, 3)])
def test_what_is_written_is_read_back_by_pillow(tmp_path, shape):
    Image = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    media.write_png(tmp_path / "a.png", image)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), image)


def drawn(lines, width):
    """The pixels below a picture of this width with a caption of these lines: bool, True for ink."""
    ink = np.zeros((10 * len(lines), width), bool)
    for y, line in enumerate(lines):
        for x, character in enumerate(line):
            glyph = media.GLYPHS[media.CHARACTERS.find(character.lower())].T == 1
            ink[10 * y + 2:10 * y + 10, 6 * x:6 * x + 5] = glyph
    return ink


def test_every_character_has_a_glyph_of_its_own_and_all_others_the_box():
    glyphs = [glyph.tobytes() for glyph in media.GLYPHS]
    assert len(set(glyphs)) == len(glyphs) == len(media.CHARACTERS) + 1 and media.GLYPHS.shape[1:] == (5, 8)
    assert [character for character, glyph in zip(media.CHARACTERS, media.GLYPHS) if not glyph.any()] == [" "]
    box = media.GLYPHS[-1, :, :7]
    assert box[[0, -1]].all() and box[:, [0, -1]].all() and not box[1:-1, 1:-1].any()
    assert ["".join(" #"[pixel] for pixel in row) for row in media.GLYPHS[media.CHARACTERS.index("h")].T] == [
        "#    ", "#    ", "#### ", "#   #", "#   #", "#   #", "#   #", "     "]


@pytest.mark.parametrize("size, scale", [(20, 5), (32, 3), (200, 1)])
def test_a_captioned_grid_has_enlarged_pictures_in_their_places_and_ink_only_below_captioned_ones(size, scale):
    images, records = synthetic.shapes(range(5), size=size)
    captions = [record["caption"] for record in records]
    captions[0], captions[1], captions[3] = "Größe 9!", "", "long " * 200
    sheet, side = media.captioned_grid(images, captions, columns=3, gap=3), scale * size
    tile = side + 4 * 10 + 3
    assert sheet.dtype == np.uint8 and sheet.shape == (2 * tile + 3, 3 * (side + 3) + 3, 3)
    for i, image in enumerate(images):
        top, left = 3 + tile * (i // 3), 3 + (side + 3) * (i % 3)
        enlarged = np.kron(image, np.ones((scale, scale, 1)))
        np.testing.assert_array_equal(sheet[top:top + side, left:left + side], enlarged)
        sheet[top:top + side, left:left + side] = 255
        lines = textwrap.wrap(captions[i], side // 6)
        if i == 3:
            lines = textwrap.wrap("long " * 200, side // 6, max_lines=4, placeholder=" ...")
        ink = drawn(lines, side)
        assert ink.any() == bool(captions[i])
        below = sheet[top + side:top + side + len(ink), left:left + side]
        np.testing.assert_array_equal(below, np.where(ink, 0, 255)[..., None].repeat(3, -1))
        below[:] = 255
    assert (sheet == 255).all()  # no ink anywhere else


def test_a_grid_without_captions_leaves_no_room_for_them():
    images = np.random.default_rng(0).integers(0, 256, (5, 96, 96, 3), dtype=np.uint8)
    assert media.captioned_grid(images, [""] * 5, columns=2).shape == (3 * 100 + 4, 2 * 100 + 4, 3)


PILLOW = {"bilinear": "BILINEAR", "bicubic": "BICUBIC", "lanczos": "LANCZOS", "box": "BOX", "hamming": "HAMMING"}


@pytest.mark.parametrize("mode", PILLOW)
@pytest.mark.parametrize("height, width, size", [(12, 12, 4), (13, 9, 5), (6, 6, 16), (40, 3, 9), (5, 10, 2)])
def test_resizing_is_pillows(mode, height, width, size):
    Image = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(size).normal(size=(2, 3, height, width)).astype(np.float32)
    expected = [[Image.fromarray(channel).resize((size, size), Image.Resampling[PILLOW[mode]]) for channel in picture]
                for picture in image]
    expected = np.array([[np.asarray(channel) for channel in picture] for picture in expected])
    np.testing.assert_allclose(media.resize(torch.from_numpy(image), size, mode), expected, atol=2e-6)


@pytest.mark.parametrize("mode", media.RESIZE_MODES)
def test_every_way_to_resize_keeps_constants_shape_and_dtype_and_is_linear(mode):
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(size=(2, 3, 12, 12)).astype(np.float32)) for _ in range(2))
    before = a.clone()
    for size in (3, 5, 12, 20):
        resized = media.resize(a, size, mode)
        assert resized.shape == (2, 3, size, size) and resized.dtype == torch.float32
        torch.testing.assert_close(media.resize(torch.full((1, 1, 12, 9), 0.7), size, mode),
                                   torch.full((1, 1, size, size), 0.7))
        torch.testing.assert_close(media.resize(2 * a - b, size, mode), 2 * resized - media.resize(b, size, mode))
        half = a.bfloat16()
        assert torch.equal(media.resize(half, size, mode), media.resize(half.float(), size, mode).bfloat16())
        if mode not in ("bicubic", "lanczos"):  # which overshoot
            assert resized.min() >= a.min() and resized.max() <= a.max()
    assert torch.equal(a, before) and torch.equal(media.resize(a, 12, mode), a)


def test_box_is_the_mean_of_boxes_and_nearest_takes_pixels():
    image = np.random.default_rng(0).normal(size=(2, 3, 12, 24)).astype(np.float32)
    means = image.reshape(2, 3, 4, 3, 4, 6).mean((3, 5))
    np.testing.assert_allclose(media.resize(torch.from_numpy(image), 4, "box").numpy(), means, atol=1e-6)
    nearest = media.resize(torch.from_numpy(image), 4, "nearest").numpy()
    np.testing.assert_array_equal(nearest, image[:, :, ::3, ::6])
    exact = media.resize(torch.from_numpy(image), 4, "nearest_exact").numpy()
    np.testing.assert_array_equal(exact, image[:, :, 1::3, 3::6])
    larger = media.resize(torch.from_numpy(nearest), 8, "box").numpy()
    np.testing.assert_array_equal(larger, nearest.repeat(2, 2).repeat(2, 3))


def test_resizing_and_blurring_are_done_in_full_precision_under_autocast():
    image = torch.randn(2, 3, 12, 12)
    resized, soft = media.resize(image, 5), media.blurred(image, torch.tensor([1.0, 0.5]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(media.resize(image, 5), resized)
        assert torch.equal(media.blurred(image, torch.tensor([1.0, 0.5])), soft)


@pytest.mark.parametrize("mode", media.RESIZE_MODES)
def test_bytes_are_resized_as_floats_are_rounded_and_kept_within_their_range(mode):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (2, 12, 9, 3), np.uint8) * 255)
    exact = media.resize(image.permute(0, 3, 1, 2).float(), 5, mode).permute(0, 2, 3, 1).clamp(0, 255)
    found = media.resize_bytes(image, 5, mode)
    assert found.dtype == torch.uint8 and (found - exact).abs().max() < 0.501
    assert torch.equal(media.resize_bytes(found, 5, mode), found)


def test_bytes_become_numbers_within_1_and_come_back():
    pictures = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3)
    numbers = media.pixels(pictures)
    assert numbers.shape == (2, 3, 16, 16) and numbers.min() == -1 and numbers.max() == 1
    assert torch.equal(media.as_bytes(numbers), pictures)
    assert media.as_bytes(torch.tensor([-3.0, 3.0, 0.0]).view(1, 3, 1, 1)).flatten().tolist() == [0, 255, 128]


def test_a_blur_has_the_width_asked_for_keeps_constants_and_is_the_same_both_ways():
    spot = torch.zeros(2, 3, 33, 33)
    spot[:, :, 16, 16] = 1
    sigma = torch.tensor([0.8, 2.5])
    found = media.blurred(spot, sigma)
    offset = torch.arange(33) - 16.0
    torch.testing.assert_close((found[:, 1].sum(1) * offset ** 2).sum(1), sigma ** 2, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found.sum((2, 3)), torch.ones(2, 3))
    torch.testing.assert_close(media.blurred(torch.full((2, 1, 9, 9), 0.3), sigma), torch.full((2, 1, 9, 9), 0.3))


def test_a_crop_is_the_square_that_begins_at_its_corner():
    pictures = torch.randn(3, 2, 9, 9)
    found = media.cropped(pictures, 4, torch.tensor([[0, 0], [5, 2], [1, 5]]))
    expected = torch.stack([pictures[0, :, :4, :4], pictures[1, :, 5:, 2:6], pictures[2, :, 1:5, 5:]])
    assert torch.equal(found, expected)
