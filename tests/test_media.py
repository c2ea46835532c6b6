"""PNG: what is written is read back, by us and by Pillow; every filter is undone. Grids: all is in its place."""
import io
import itertools
import string
import struct
import zlib

import numpy as np
import pytest
import torch

from common import media, synthetic


def chunk(kind, contents):
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))


def slow_png(image, filters, depth=8, color=None, pieces=1):
    """A PNG file written byte by byte from the specification's formulas; line y is filtered with filters[y]."""
    image = image.reshape(*image.shape[:2], -1)
    height, width, channels = image.shape
    color = {1: 0, 2: 4, 3: 2, 4: 6}[channels] if color is None else color
    raw = bytearray()
    for y in range(height):
        raw.append(filters[y])
        for x in range(width):
            for c in range(channels):
                left = int(image[y, x - 1, c]) if x else 0
                up = int(image[y - 1, x, c]) if y else 0
                corner = int(image[y - 1, x - 1, c]) if x and y else 0
                nearest = min((left, up, corner), key=lambda value: abs(left + up - corner - value))  # first wins ties
                guess = [0, left, up, (left + up) // 2, nearest][filters[y]]
                raw.append((int(image[y, x, c]) - guess) % 256)
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = zlib.compress(bytes(raw))
    cuts = np.linspace(0, len(data), pieces + 1).astype(int)
    body = b"".join(chunk(b"IDAT", data[a:b]) for a, b in itertools.pairwise(cuts))
    return media.SIGNATURE + chunk(b"IHDR", header) + chunk(b"tEXt", b"note\0text") + body + chunk(b"IEND", b"")


def picture(rng, *shape):
    """Smooth enough that left, up and corner are the nearest in turn, with sharp edges too."""
    image = rng.integers(0, 256, shape, dtype=np.uint8)
    image[: shape[0] // 2] = image[: shape[0] // 2] // 16 + 100
    return image


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, None])
def test_reading_undoes_every_filter(channels, kind):
    rng = np.random.default_rng(channels)
    image = picture(rng, 11, 7) if channels == 1 else picture(rng, 11, 7, channels)
    filters = rng.integers(0, 5, 11).tolist() if kind is None else [kind] * 11
    read = media.read_png(io.BytesIO(slow_png(image, filters, pieces=3)))
    np.testing.assert_array_equal(read, image)


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 3, 3), (64, 33, 3)])
def test_what_is_written_is_read_back(tmp_path, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    media.write_png(tmp_path / "a.png", image)
    np.testing.assert_array_equal(media.read_png(tmp_path / "a.png"), image)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_smallest_filter_is_chosen_and_read_back(kind):
    rng = np.random.default_rng(kind)
    steps = rng.choice(np.array([0, 1, 255], np.uint8), (40, 50, 3))  # sums of small steps: the difference packs best
    image = [steps, steps.cumsum(1, dtype=np.uint8), steps.cumsum(0, dtype=np.uint8)][kind]
    media.write_png(written := io.BytesIO(), image)
    np.testing.assert_array_equal(media.read_png(io.BytesIO(written.getvalue())), image)
    others = [len(slow_png(image, [other] * 40)) for other in range(3)]
    assert np.argmin(others) == kind and len(written.getvalue()) <= min(others)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_agrees_with_pillow_both_ways(tmp_path, mode):
    Image = pytest.importorskip("PIL.Image")
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    gradient = np.add.outer(np.arange(40), np.arange(50))[..., None] * np.arange(1, channels + 1)
    image = (gradient % 256).astype(np.uint8)  # smooth: Pillow chooses among all filters
    Image.fromarray(image[..., 0] if mode == "L" else image, mode=mode).save(tmp_path / "theirs.png")
    np.testing.assert_array_equal(media.read_png(tmp_path / "theirs.png").reshape(image.shape), image)
    if mode == "RGB":
        media.write_png(tmp_path / "ours.png", image)
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "ours.png")), image)


def test_damaged_and_foreign_files_are_refused():
    image = picture(np.random.default_rng(0), 6, 5, 3)
    good = slow_png(image, [4] * 6)
    for cut in range(0, len(good) - 12, 7):  # beyond that only the empty end chunk is missing
        with pytest.raises(ValueError):
            media.read_png(io.BytesIO(good[:cut]))
    for at in range(8, len(good) - 12, 5):  # one flipped bit anywhere
        bad = bytearray(good)
        bad[at] ^= 4
        with pytest.raises(ValueError):
            media.read_png(io.BytesIO(bytes(bad)))
    for strange in (slow_png(image, [0] * 6, depth=16), slow_png(image[..., :1], [0] * 6, color=3)):
        with pytest.raises(ValueError, match="expected 8 bits"):
            media.read_png(io.BytesIO(strange))


def test_grid_puts_every_image_in_its_place():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    sheet = media.grid(images, columns=3, gap=1)
    assert sheet.shape == (2 * 5 + 1, 3 * 7 + 1, 3)
    for i, image in enumerate(images):
        top, left = 1 + 5 * (i // 3), 1 + 7 * (i % 3)
        np.testing.assert_array_equal(sheet[top:top + 4, left:left + 6], image)
    assert (sheet[6:, 15:] == 255).all() and (sheet[::5] == 255).all()


SUPPORTED = string.ascii_letters + string.digits + " .,;:'\"!?-+()/&%#=@_"


def test_every_supported_character_has_a_glyph_of_its_own_and_all_others_the_box():
    drawn = {character: media._draw(character) for character in SUPPORTED + "\u00e9"}
    assert len({(ink.shape, ink.tobytes()) for ink in drawn.values()}) == len(SUPPORTED) + 1
    assert all(ink.any() == (character != " ") for character, ink in drawn.items())
    box = drawn["\u00e9"][:7]
    assert box[[0, -1]].all() and box[:, [0, -1]].all() and not box[1:-1, 1:-1].any()
    for unknown in "~\u4e2d\0\U0001f600":
        np.testing.assert_array_equal(media._draw(unknown), drawn["\u00e9"])
    np.testing.assert_array_equal(  # side by side, a column of white between two
        media._draw("gA~"), np.hstack([media._draw("g"), np.zeros((9, 1), bool), media._draw("A"),
                                       np.zeros((9, 1), bool), drawn["\u00e9"]]))


@pytest.mark.parametrize("width", [20, 33, 96])
def test_wrapping_keeps_the_words_and_the_width(width):
    rng = np.random.default_rng(width)
    for _ in range(8):
        words = ["".join(rng.choice(list(SUPPORTED.replace(" ", "")), rng.integers(1, 30))) for _ in range(12)]
        rows = media._wrap("  ".join(words), width, lines=1000)
        assert all(media._draw(row).shape[1] <= width for row in rows)
        assert "".join(rows).replace(" ", "") == "".join(words)
        whole = [word for row in rows for word in row.split()]
        assert all(word in whole for word in words if media._draw(word).shape[1] <= width)  # only long words are broken
        for row, after in itertools.pairwise(rows):  # no line could have taken a word more
            assert media._draw(row + " " + after.split()[0]).shape[1] > width
        assert media._wrap(" ".join(words), width, len(rows)) == rows  # nothing to cut
        cut = media._wrap(" ".join(words), width, 3)
        assert len(cut) == 3 and cut[:2] == rows[:2] and rows[2].startswith(cut[2].removesuffix("..."))
        assert cut[2].endswith("...") and media._draw(cut[2]).shape[1] <= width


def test_captioned_grid_has_enlarged_pictures_and_ink_only_below_captioned_ones():
    images, records = synthetic.shapes(range(5), size=20)
    captions = [record["caption"] for record in records]
    captions[1], captions[3] = "", "long " * 50
    sheet = media.captioned_grid(images, captions, columns=3, gap=3)
    side = 100  # 5 times 20: the least multiple that is not below 96
    tile = side + 4 * 11 + 3
    assert sheet.shape == (2 * tile + 3, 3 * (side + 3) + 3, 3)
    for i, image in enumerate(images):
        top, left = 3 + tile * (i // 3), 3 + (side + 3) * (i % 3)
        np.testing.assert_array_equal(sheet[top:top + side, left:left + side], np.kron(image, np.ones((5, 5, 1))))
        sheet[top:top + side, left:left + side] = 255
        below = sheet[top + side:top + tile, left:left + side]
        assert (below == 0).any() == bool(captions[i])
        for line, row in enumerate(media._wrap(captions[i], side, 4)):
            text = below[11 * line + 2:11 * line + 11]
            np.testing.assert_array_equal((text == 0).all(-1)[:, :media._draw(row).shape[1]], media._draw(row))
        below[:] = 255
    assert (sheet == 255).all()  # no ink anywhere else


def test_captioned_grid_without_captions_is_the_grid_of_enlarged_images():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    enlarged = images.repeat(2, axis=1).repeat(2, axis=2)
    sheet = media.captioned_grid(images, [""] * 5, columns=2, scale=2, gap=1)
    np.testing.assert_array_equal(sheet, media.grid(enlarged, 2, gap=1))
    tiny = media.captioned_grid(images[:, :, :2], ["wide"] * 5, columns=2, scale=1)  # narrower than a character
    assert tiny.shape == (3 * (4 + 44 + 4) + 4, 2 * (2 + 4) + 4, 3)


def slow_bicubic(image, size):
    """Antialiased bicubic resizing of (H, W) as Pillow does it: Keys' kernel (a = -1/2) widened by the reduction."""
    def kernel(x):
        x = np.abs(x)
        return np.where(x < 1, (1.5 * x - 2.5) * x ** 2 + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))

    def weights(length):
        scale = max(1.0, length / size)
        centers = (np.arange(size)[:, None] + 0.5) * length / size
        table = kernel((np.arange(length)[None] + 0.5 - centers) / scale)
        return table / table.sum(1, keepdims=True)

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


@pytest.mark.parametrize("height, width, size", [(12, 12, 4), (13, 9, 5), (6, 6, 16), (7, 12, 7)])
def test_bicubic_resizing_is_the_widened_cubic_kernel(height, width, size):
    image = np.random.default_rng(size).normal(size=(2, 3, height, width))
    resized = media.resize(torch.from_numpy(image), size)
    expected = [[slow_bicubic(channel, size) for channel in one] for one in image]
    np.testing.assert_allclose(resized.numpy(), expected, atol=1e-6)


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
        if mode != "bicubic":  # the only one that overshoots
            assert resized.min() >= a.min() and resized.max() <= a.max()
    assert torch.equal(a, before) and torch.equal(media.resize(a, 12, mode), a)


def test_area_is_the_mean_of_boxes_and_nearest_takes_pixels():
    image = np.random.default_rng(0).normal(size=(2, 3, 12, 24))
    means = image.reshape(2, 3, 4, 3, 4, 6).mean((3, 5))
    np.testing.assert_allclose(media.resize(torch.from_numpy(image), 4, "area").numpy(), means, atol=1e-12)
    nearest = media.resize(torch.from_numpy(image), 4, "nearest").numpy()
    np.testing.assert_array_equal(nearest, image[:, :, ::3, ::6])
    exact = media.resize(torch.from_numpy(image), 4, "nearest-exact").numpy()
    np.testing.assert_array_equal(exact, image[:, :, 1::3, 3::6])
    larger = media.resize(torch.from_numpy(nearest), 8, "area").numpy()
    np.testing.assert_array_equal(larger, nearest.repeat(2, 2).repeat(2, 3))


@pytest.mark.parametrize("mode", media.RESIZE_MODES)
def test_bytes_are_resized_as_floats_are_rounded_and_kept_within_their_range(mode):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (2, 12, 9, 3), np.uint8) * 255)
    exact = media.resize(image.permute(0, 3, 1, 2).double(), 5, mode).permute(0, 2, 3, 1).clamp(0, 255)
    found = media.resize_bytes(image, 5, mode)
    assert found.dtype == torch.uint8 and (found - exact).abs().max() < 0.501
    assert media.resize_bytes(found, 5, mode) is found


def test_an_unknown_way_to_resize_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="resize mode 'lanczos' is none of nearest, nearest-exact, bilinear, "):
        media.resize(torch.zeros(1, 3, 4, 4), 4, "lanczos")
