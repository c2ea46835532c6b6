"""Images: PNG files by numpy and zlib, grids, resizing."""

import functools
import math
import struct
import textwrap
import zlib

import numpy as np
import torch
import torch.nn.functional as F

GAP = 4  # pixels between the images of a grid
SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:'!?-+()/"
# Six bytes a character, one for each column, the lowest bit on top; the sixth is the space to the
# next one. The last character is the box that stands for all others.
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


def bicubic(x):
    """Keys 1981, with a = -1/2."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x**2 + 1
    outer = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, inner, outer * (x < 2))


KERNELS = {  # Pillow's, of the distance x in pixels of the coarser grid
    "bilinear": lambda x: (1 - x.abs()).clamp(min=0),
    "bicubic": bicubic,
    "lanczos": lambda x: torch.sinc(x) * torch.sinc(x / 3) * (x.abs() < 3),
    "box": lambda x: ((x > -0.5) & (x <= 0.5)).double(),
    "hamming": lambda x: torch.sinc(x) * (0.54 + 0.46 * torch.cos(torch.pi * x)) * (x.abs() < 1),
}


def png(image):
    """The PNG file (bytes) of an image, uint8 (H, W, 3).

    Sections in comments are those of W3C's Portable Network Graphics, 2nd edition, 2003.
    """

    def chunk(kind, body):  # (§5.3)
        content = kind + body
        return struct.pack(f">I{len(content)}sI", len(body), content, zlib.crc32(content))

    height, width, _ = image.shape
    header = struct.pack(  # (§11.2.2)
        ">IIBB3x",  # three zeros at the end: the default methods
        width,
        height,
        8,  # bits
        2,  # color
    )
    lines = image.reshape(height, -1)
    lines = np.insert(lines, 0, 0, axis=1)  # a 0 before each line: no filter (§9)
    pixels = zlib.compress(lines.tobytes(), 9)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def captioned_grid(images, captions, columns):
    """Arrange images, uint8 (N, H, W, 3), in rows of `columns` on white -> uint8 (H', W', 3).

    Images are enlarged to at least 96 pixels. Below each is room for four lines of its caption.
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
            characters = [CHARACTERS.find(each) for each in line]  # -1, the box, for others
            ink = np.hstack(GLYPHS[characters])
            ink = ink[..., None]  # (8, 6 · characters, 1)
            start = height + 10 * i + 2  # two rows stay white between lines
            tile[start : start + 8, : ink.shape[1]] -= 255 * ink
    return sheet


@functools.lru_cache(maxsize=64)
def _weights(length, size, mode, device):
    """The matrix (size, length) that resizes a line to `size` pixels as Pillow does, in float32."""
    ratio = length / size
    centers = torch.arange(size, dtype=torch.float64) + 0.5
    centers = centers * ratio
    distances = torch.arange(length) - centers[:, None] + 0.5
    scale = max(1.0, ratio)  # kernels are widened to shrink, so that no pixel is left out
    table = KERNELS[mode](distances * (1 / scale))
    table = table / table.sum(1, keepdim=True)
    return table.to(device, torch.float32)


def resize(images, size, mode="bicubic"):
    """Resize float images (B, C, H, W) so that the shorter side is `size`, rounding down the other.

    nearest and nearest_exact take pixels as torch does, the other modes are Pillow's, antialiased.
    bicubic and lanczos overshoot at sharp edges; nothing is clamped, because only the caller knows
    the range.
    """
    _, _, height, width = images.shape
    shorter = min(height, width)
    if shorter == size:
        return images
    new_height = size * height // shorter
    new_width = size * width // shorter
    if mode not in KERNELS:
        mode = mode.replace("_", "-")
        return F.interpolate(images, (new_height, new_width), mode=mode)
    rows = _weights(height, new_height, mode, images.device)
    columns = _weights(width, new_width, mode, images.device)
    with torch.autocast(images.device.type, enabled=False):  # sums of many pixels
        resized = rows @ (images.float() @ columns.T)
    return resized.to(images.dtype)


def to_floats(images):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W), of the same values."""
    return images.permute(0, 3, 1, 2).float()


def to_bytes(images):
    """float (B, 3, H, W) of 0 to 255 -> uint8 (B, H, W, 3), rounded and clamped."""
    return images.permute(0, 2, 3, 1).round().clamp(0, 255).byte()


def resize_uint8(images, size, mode="bicubic"):
    """`resize` of uint8 (B, H, W, 3), which gives uint8."""
    return to_bytes(resize(to_floats(images), size, mode))


def from_uint8(images):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [-1, 1]."""
    return to_floats(images) / 127.5 - 1


def to_uint8(images):
    """float (B, 3, H, W) in [-1, 1] -> uint8 (B, H, W, 3)."""
    return to_bytes((images + 1) * 127.5)


def blur(images, sigma):
    """Gaussian blur of (B, C, H, H) with a sigma in pixels for each, (B,).

    At the edges, the weights of the pixels inside are normalized.
    """
    position = torch.arange(images.shape[2], device=images.device)
    distance = (position - position[:, None]) / sigma[:, None, None]  # (B, H, H)
    kernel = torch.exp(-0.5 * distance**2)
    kernel = kernel / kernel.sum(2, keepdim=True)
    kernel = kernel[:, None]  # (B, 1, H, H)
    with torch.autocast(images.device.type, enabled=False):
        return kernel @ images @ kernel.mT


def central_square(images, ratio=1):
    """The largest central squares (B, C, S, S) of images (B, C, H, W).

    ratio: of longer side to shorter one at most, so that above 1 it takes more of the longer side.
    """
    longest = ratio * min(images.shape[2:])
    for dim in (2, 3):
        length = images.shape[dim]
        kept = min(length, longest)
        first = round((length - kept) / 2)  # as in CLIP's preprocessing
        images = images.narrow(dim, first, kept)
    return images


def crop(images, size, corners):
    """The squares of `size` of (B, C, H, W) that begin at `corners` (B, 2): pixels down, right."""
    windows = images.unfold(2, size, 1).unfold(3, size, 1)  # (B, C, tops, lefts, size, size)
    samples = torch.arange(len(images), device=images.device)
    top, left = corners.T
    # Contiguous, as noise drawn like it depends on the layout.
    return windows[samples, :, top, left].contiguous()
