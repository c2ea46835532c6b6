"""Encode PNG files with numpy and zlib, and arrange images with captions in a grid."""

import math
import struct
import textwrap
import zlib

import numpy as np

GAP = 4  # pixels between the images of a grid
SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:'!?-+()/"
# A glyph is six bytes, one per column; the lowest bit is the top pixel. The sixth column is the gap
# to the next character. The last glyph is a box, for all other characters.
FONT = (
    "2054545478007f4444443800384444442800384444447f0038545454180000087e09020018a4a4a47c007f040404"
    "780000447d4000004080847d00007f102844000000417f4000007c04780478007c0804047800384444443800fc24"
    "2424180018242424fc007c0804040800485454542400043f444420003c4040207c001c2040201c003c4030403c00"
    "4428102844001ca0a0a07c004464544c44003e5149453e0000427f4000004261514946002141454b31001814127f"
    "10002745454539003c4a49493000017109050300364949493600064949291e0000000000000000606000000000a0"
    "6000000000363600000000000700000000005f00000002015109060008080808080008083e080800001c22410000"
    "0041221c00002010080402007f4141417f00"
)
FONT_BYTES = np.frombuffer(bytes.fromhex(FONT), np.uint8)
COLUMNS = np.unpackbits(FONT_BYTES, bitorder="little")
GLYPHS = COLUMNS.reshape(-1, 6, 8).swapaxes(1, 2)  # (characters, 8, 6), 1 for ink


def png(image):
    """Encode an image, uint8 (H, W, 3), as a PNG file (bytes).

    Sections in comments refer to W3C's Portable Network Graphics, 2nd edition, 2003.
    """

    def chunk(kind, body):  # (§5.3)
        content = kind + body
        return struct.pack(f">I{len(content)}sI", len(body), content, zlib.crc32(content))

    height, width, _ = image.shape
    header = struct.pack(  # (§11.2.2)
        ">IIBB3x",  # three zeros at the end: compression, filter and interlace methods
        width,
        height,
        8,  # bits per color
        2,  # RGB
    )
    lines = image.reshape(height, -1)
    lines = np.insert(lines, 0, 0, axis=1)  # a 0 before each line: no filter (§9)
    pixels = zlib.compress(lines.tobytes(), 9)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def captioned_grid(images, captions, columns):
    """Arrange images, uint8 (N, H, W, 3), in a grid of `columns` columns: uint8 (H', W', 3).

    Images are enlarged to a width of at least 96 pixels. Below each image is its caption, in up to
    four lines. The background is white.
    """
    scale = math.ceil(96 / images.shape[2])
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width, _ = images.shape
    down = GAP + height + 40
    right = GAP + width
    rows = math.ceil(count / columns)
    shape = (
        rows * down + GAP,
        columns * right + GAP,
        3,
    )
    sheet = np.full(shape, 255, np.uint8)
    for number, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(number, columns)
        top = GAP + row * down
        left = GAP + column * right
        tile = sheet[top:, left:]
        tile[:height, :width] = image
        lines = textwrap.wrap(caption.lower(), width // 6, max_lines=4, placeholder=" ...")
        for i, line in enumerate(lines):
            characters = [CHARACTERS.find(each) for each in line]  # -1 is the box
            ink = np.hstack(GLYPHS[characters])
            ink = ink[..., None]  # (8, 6 · characters, 1)
            start = height + 10 * i + 2  # two white rows between lines
            tile[start : start + 8, : ink.shape[1]] -= 255 * ink
    return sheet
