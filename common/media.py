"""Images: PNG in and out with numpy and zlib alone, and resizing.

PNG specification, W3C 2003; section numbers below are its own.
"""
import contextlib
import struct
import zlib

import numpy as np
import torch
import torch.nn.functional as F

RESIZE_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # color type -> channels: gray, RGB, gray and alpha, RGBA
CHARACTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:'\"!?-+()/&%#=@_"
FONT = (  # nine rows a character, the last two below the base line; the bits of a base-32 digit are a row's pixels
    "00000000000c2eie00ggsiiis0000eggge0022eiiie0000ciuge00cggoggg0000eiiie2cggsiiii000g0gggg0008088888gggikoki00"
    "ggggggg0000qllll0000siiii0000ciiic0000siiisgg00eiiie2200koggg0000egc2s000gsgggc0000iiiie0000hhaa40000hllla00"
    "00ha4ah0000iiiie2c00u2cgu00ciiuiii00siisiis00cigggic00siiiiis00uggsggu00uggsggg00cigmiie00iiiuiii00s88888s00"
    "22222ic00iikokii00ggggggu00hrllhhh00hpllljh00ehhhhhe00siisggg00ehhhlid00siiskii00eggc22s00v44444400iiiiiic00"
    "hhhhaa400hhhllla00hha4ahh00hha444400u24c8gu00cimiqic008o8888s00ci248gu00ci2c2ic004ckku4400ugs22ic00cggsiic00"
    "u22448800ciiciic00ciie22c00000000g0000000088g00080088g000g00g00gg0000000kk0000000ggggg0g00ci24808000000s0000"
    "0044v44008ggggg800g88888g0044488gg00ciiclid00pq248bj000avaava00000u0u000ehnlnge000000000u0uiiiiiu00"
)  # one glyph more than characters: the box that stands for all others


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
    padded = np.pad(image, ((1, 0), (1, 0), (0, 0)))
    guesses = (0, padded[1:, :-1], padded[:-1, 1:])  # filters 0, 1 and 2 (§9.2): nothing, the pixel left, the one above
    lines = (np.insert((image - guess).reshape(height, -1), 0, kind, axis=1) for kind, guess in enumerate(guesses))
    smallest = min((zlib.compress(line.tobytes(), 9) for line in lines), key=len)
    with contextlib.nullcontext(file) if hasattr(file, "write") else open(file, "wb") as opened:
        opened.write(SIGNATURE)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        for kind, contents in ((b"IHDR", header), (b"IDAT", smallest), (b"IEND", b"")):
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


def captioned_grid(images: np.ndarray, captions: list[str], columns: int, scale: int = 0, gap: int = 4,
                   lines: int = 4) -> np.ndarray:
    """Lay images (N, H, W, 3) out as `grid` does, each enlarged `scale` times with its caption below it.

    A scale of 0 is the least that makes pictures 96 pixels wide; captions are cut after `lines` >= 1 lines. Returns
    uint8 (rows * (tile height + gap) + gap, columns * (W * scale + gap) + gap, 3).
    """
    assert len(images) == len(captions), (len(images), len(captions))
    scale = scale or -(-96 // images.shape[2])
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    _, height, width, _ = images.shape
    wrapped = [_wrap(caption, width, lines) for caption in captions]
    below = 11 * max(map(len, wrapped), default=0)  # a line takes nine rows and two of white above it
    tiles = np.pad(images, ((0, 0), (0, below), (0, 0), (0, 0)), constant_values=255)
    for tile, rows in zip(tiles, wrapped):
        for top, row in zip(range(height + 2, height + below, 11), rows):
            ink = _draw(row)[:, :width]  # cut only where not even one character fits
            tile[top:top + 9, :ink.shape[1]][ink] = 0
    return grid(tiles, columns, gap)


def _draw(text: str) -> np.ndarray:
    """The ink of one line of text: bool (9, W), with a column of white between characters."""
    glyphs = []
    for at in map(CHARACTERS.find, text):  # -1, the last glyph, for what is not there
        pixels = np.array([[int(digit, 32)] for digit in FONT[9 * at:][:9]]) << 1 >> np.arange(5, -1, -1) & 1  # (9, 6)
        glyphs.append(pixels[:, :np.flatnonzero(pixels.any(0)).max(initial=0) + 2])
    return np.concatenate(glyphs, axis=1)[:, :-1] == 1


def _wrap(text: str, width: int, lines: int) -> list[str]:
    """Break text into at most `lines` lines, drawn at most `width` pixels wide; "..." tells that more follows."""
    rows = []
    for word in text.split():
        if rows and _draw(f"{rows[-1]} {word}").shape[1] <= width:
            rows[-1] += " " + word
            continue
        rows.append("")
        for char in word:  # a word wider than a line is broken
            if rows[-1] and _draw(rows[-1] + char).shape[1] > width:
                rows.append("")
            rows[-1] += char
    if len(rows) > lines:
        last = rows[lines - 1]
        while last and _draw(last + "...").shape[1] > width:
            last = last[:-1].rstrip()
        rows[lines - 1:] = [last + "..."]
    return rows


def resize(images: torch.Tensor, size: int, mode: str = "bicubic") -> torch.Tensor:
    """Bring float images (B, C, H, W) to (B, C, size, size), whatever their values range over.

    bilinear and bicubic are antialiased; area takes the mean of each box, and boxes overlap where `size` does not
    divide H or W. All are linear and keep constants. Only bicubic can leave the range that the pixels had, by a tenth
    of it at sharp edges; nothing is clamped here, as only the caller knows what range is allowed.
    """
    if mode not in RESIZE_MODES:
        raise ValueError(f"resize mode {mode!r} is none of {', '.join(RESIZE_MODES)}")
    if images.shape[2:] == (size, size):
        return images
    wide = images if images.dtype == torch.float64 else images.float()  # sums of many pixels
    smooth = mode in ("bilinear", "bicubic")
    return F.interpolate(wide, (size, size), mode=mode, antialias=smooth).to(images.dtype)


def resize_bytes(pictures, size, mode="bicubic"):
    """uint8 (B, H, W, 3) -> uint8 (B, size, size, 3), as `resize` does."""
    if pictures.shape[1:3] == (size, size):
        return pictures
    resized = resize(pictures.permute(0, 3, 1, 2).float(), size, mode)
    return resized.round().clamp(0, 255).byte().permute(0, 2, 3, 1)


def pixels(pictures):
    """uint8 (B, H, H, 3) -> float (B, 3, H, H) in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def as_bytes(pictures):
    """float (B, 3, H, H) in [-1, 1] -> uint8 (B, H, H, 3)."""
    return ((pictures.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def blurred(pictures, sigma, radius=3):
    """Gaussian blur of (B, C, H, H) with a sigma in pixels for each, (B,), by two passes; edges are repeated.

    radius: where the kernel is cut off, three times the largest sigma or more.
    """
    offset = torch.arange(-radius, radius + 1, device=pictures.device)
    kernel = torch.exp(-0.5 * (offset / sigma[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(pictures.shape[1], 0)  # (B·C, 2·radius + 1)
    x = F.pad(pictures, (radius,) * 4, mode="replicate").flatten(0, 1)[None]  # one group a channel of a picture
    with torch.autocast(pictures.device.type, enabled=False):
        x = F.conv2d(x, kernel[:, None, None, :], groups=len(kernel))
        x = F.conv2d(x, kernel[:, None, :, None], groups=len(kernel))
    return x[0].unflatten(0, pictures.shape[:2])


def cropped(pictures, size, corners):
    """The squares of `size` of (B, C, H, H) that begin at `corners` (B, 2), in pixels down and right."""
    places = torch.arange(size, device=pictures.device)
    rows, columns = (corner[:, None] + places for corner in corners.unbind(1))  # (B, size)
    batch = torch.arange(len(pictures), device=pictures.device)[:, None, None]
    return pictures.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
