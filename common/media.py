"""PNG in and out with numpy and zlib alone (PNG specification, W3C 2003; section numbers below are its own)."""
import contextlib
import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # color type -> channels: gray, RGB, gray and alpha, RGBA


def read_png(file) -> np.ndarray:
    """Read a PNG file (a path or an open binary file) of 8 bits a channel.

    Returns uint8 (H, W) for gray, (H, W, 2) with alpha, (H, W, 3) for RGB, (H, W, 4) for RGBA. Raises ValueError for
    a file that is damaged, is no PNG, or has a palette, 16 bits or interlacing.
    """
    with contextlib.nullcontext(file) if hasattr(file, "read") else open(file, "rb") as opened:
        data = opened.read()
    if data[:8] != SIGNATURE:
        raise ValueError("not a PNG file: it does not begin with the PNG signature")
    header, compressed, position = None, [], 8
    while position < len(data):  # chunks: length, kind, contents, checksum (§5.3)
        length, kind = struct.unpack_from(">I4s", data.ljust(position + 8, b"\0"), position)
        contents, check = data[position + 8:position + 8 + length], data[position + 8 + length:position + 12 + length]
        if check != struct.pack(">I", zlib.crc32(kind + contents)):
            raise ValueError(f"damaged PNG file: wrong checksum or cut off at byte {position} of {len(data)}")
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", contents)
        elif kind == b"IDAT":
            compressed.append(contents)
        position += 12 + length
        if kind == b"IEND":
            break
    if header is None:
        raise ValueError("damaged PNG file: no header (IHDR)")
    width, height, depth, color, _, _, interlaced = header
    if depth != 8 or color not in CHANNELS or interlaced:
        raise ValueError(f"PNG of {depth} bits, color type {color}{', interlaced' if interlaced else ''}: expected 8 "
                         "bits, gray or RGB, without palette and interlacing; convert it first")
    channels, expected = CHANNELS[color], height * (1 + width * CHANNELS[color])
    try:
        raw = zlib.decompressobj().decompress(b"".join(compressed), expected + 1)  # no more than the header promises
    except zlib.error as error:
        raise ValueError(f"damaged PNG file: {error}") from error
    if len(raw) != expected or expected == 0:
        raise ValueError(f"damaged PNG file: {len(raw)} bytes of pixels, expected {expected}")
    lines = np.frombuffer(raw, np.uint8).reshape(height, -1)
    image = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.uint8)
    for row, line in enumerate(lines):
        above = image[row] = _unfilter(line[0], line[1:], above, channels)
    return image.reshape(height, width) if channels == 1 else image.reshape(height, width, channels)


def _unfilter(kind: int, line: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    """Undo one of the five filters (§9.2) on a line of W*C bytes; `step` bytes to the left lies the same channel."""
    if kind == 0:
        return line
    if kind == 1:  # each byte is the difference from the one to the left: a running sum, modulo 256
        return line.reshape(-1, step).cumsum(0, dtype=np.uint8).ravel()
    if kind == 2:
        return line + above
    if kind not in (3, 4):
        raise ValueError(f"damaged PNG file: unknown filter {kind}")
    out, up = bytearray(step) + bytes(line), bytes(step) + bytes(above)  # both with a pixel of zeros in front
    for i in range(step, len(out)):  # byte by byte, as each needs the one before it
        a, b, c = out[i - step], up[i], up[i - step]
        if kind == 3:
            guess = (a + b) >> 1
        else:  # Paeth: whichever of a, b and c is nearest to a + b - c
            near_a, near_b, near_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            guess = a if near_a <= near_b and near_a <= near_c else b if near_b <= near_c else c
        out[i] = (out[i] + guess) & 255
    return np.frombuffer(out, np.uint8)[step:]


def write_png(file, image: np.ndarray) -> None:
    """Write uint8 (H, W, 3) to a path or an open binary file."""
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3, (image.dtype, image.shape)
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + width * 3), np.uint8)  # filter 0 before each line
    lines[:, 1:] = image.reshape(height, -1)
    with contextlib.nullcontext(file) if hasattr(file, "write") else open(file, "wb") as opened:
        opened.write(SIGNATURE)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        for kind, contents in ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")):
            opened.write(struct.pack(">I", len(contents)) + kind + contents)
            opened.write(struct.pack(">I", zlib.crc32(kind + contents)))


def grid(images: np.ndarray, columns: int, gap: int = 2) -> np.ndarray:
    """Lay images (N, H, W, 3) out in rows of `columns`, with white between them and in the places left over."""
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * columns, height + gap, width + gap, channels), 255, np.uint8)
    sheet[:count, gap:, gap:] = images
    sheet = sheet.reshape(rows, columns, height + gap, width + gap, channels).swapaxes(1, 2)
    sheet = sheet.reshape(rows * (height + gap), columns * (width + gap), channels)
    return np.pad(sheet, ((0, gap), (0, gap), (0, 0)), constant_values=255)
