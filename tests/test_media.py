"""PNG: what is written is read back, by us and by Pillow; every filter is undone."""
import io
import itertools
import struct
import zlib

import numpy as np
import pytest

from common import media


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
