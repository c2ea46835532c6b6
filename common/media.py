"""Images: PNG files by numpy and zlib (sections: W3C's specification of 2003), grids, resizing."""
import functools
import struct
import textwrap
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:'!?-+()/"
FONT = (  # five bytes a character, one for each column, the lowest bit on top; last the box that stands for all others
    "20545454787f444444383844444428384444447f385454541800087e090218a4a4a47c7f0404047800447d40004080847d007f10284400"
    "00417f40007c047804787c080404783844444438fc2424241818242424fc7c080404084854545424043f4444203c4040207c1c2040201c"
    "3c4030403c44281028441ca0a0a07c4464544c443e5149453e00427f400042615149462141454b311814127f1027454545393c4a494930"
    "01710905033649494936064949291e0000000000006060000000a06000000036360000000007000000005f000002015109060808080808"
    "08083e0808001c2241000041221c0020100804027f4141417f")
GLYPHS = np.unpackbits(np.frombuffer(bytes.fromhex(FONT), np.uint8), bitorder="little").reshape(-1, 5, 8)
KERNELS = {  # Pillow's, of the distance x in pixels of the coarser grid
    "bilinear": lambda x: (1 - x.abs()).clamp(min=0),
    "bicubic": lambda x: torch.where(x.abs() < 1, (1.5 * x.abs() - 2.5) * x ** 2 + 1,  # Keys 1981, a = -1/2
                                     (((2.5 - 0.5 * x.abs()) * x.abs() - 4) * x.abs() + 2) * (x.abs() < 2)),
    "lanczos": lambda x: torch.sinc(x) * torch.sinc(x / 3) * (x.abs() < 3),
    "box": lambda x: ((x > -0.5) & (x <= 0.5)).double(),
    "hamming": lambda x: torch.sinc(x) * (0.54 + 0.46 * torch.cos(torch.pi * x)) * (x.abs() < 1),
}
RESIZE_MODES = (*KERNELS, "nearest", "nearest_exact")


def _chunk(kind, contents):
    """Length, kind, contents and checksum (§5.3)."""
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))


def write_png(file, image):
    """Write uint8 (H, W, 3) to a path or an open binary file."""
    height, width, _ = image.shape
    lines = np.diff(image, axis=0, prepend=np.uint8(0)).reshape(height, -1)  # filter 2 (§9.2): minus the line above
    pixels = zlib.compress(np.insert(lines, 0, 2, axis=1).tobytes(), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits RGB (§11.2.2)
    data = SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")
    file.write(data) if hasattr(file, "write") else Path(file).write_bytes(data)


def captioned_grid(images, captions, columns, gap=4, lines=4):
    """Arrange images, uint8 (N, H, W, 3), in rows of `columns` on white, with captions below -> uint8 (H', W', 3).

    Images are enlarged to at least 96 pixels. A caption is cut after `lines` lines of ten pixels each.
    """
    scale = -(-96 // images.shape[2])
    height, width = scale * images.shape[1], scale * images.shape[2]
    captions = [textwrap.wrap(caption, width // 6, max_lines=lines, placeholder=" ...") for caption in captions]
    down, right = height + 10 * max(map(len, captions), default=0) + gap, width + gap
    sheet = np.full((-(-len(images) // columns) * down + gap, columns * right + gap, 3), 255, np.uint8)
    for i, (image, caption) in enumerate(zip(images, captions)):
        top, left = gap + i // columns * down, gap + i % columns * right
        sheet[top:top + height, left:left + width] = image.repeat(scale, axis=0).repeat(scale, axis=1)
        for y, line in enumerate(caption):
            glyphs = GLYPHS[[CHARACTERS.find(character) for character in line.lower()]]  # -1, the box, for others
            ink = np.pad(glyphs, ((0, 0), (0, 1), (0, 0))).reshape(-1, 8).T == 1  # (8, 6 a character)
            below = top + height + 10 * y + 2
            sheet[below:below + 8, left:left + ink.shape[1]][ink] = 0
    return sheet


@functools.lru_cache(maxsize=64)
def _weights(length, size, mode, device):
    """The matrix (size, length) that resizes a line as Pillow does, in float32."""
    scale = max(1.0, length / size)  # kernels are widened to shrink an image, so that no pixel is left out
    centers = (torch.arange(size, dtype=torch.float64) + 0.5) * (length / size)
    table = KERNELS[mode]((torch.arange(length) - centers[:, None] + 0.5) * (1 / scale))
    return (table / table.sum(1, keepdim=True)).to(device, torch.float32)


def resize(images, size, mode="bicubic"):
    """Resize float images (B, C, H, W) to (B, C, size, size).

    nearest and nearest_exact take pixels as torch does, the other modes are Pillow's, antialiased. bicubic and lanczos
    overshoot at sharp edges; nothing is clamped, because only the caller knows the range.
    """
    if images.shape[2:] == (size, size):
        return images
    if mode not in KERNELS:
        return F.interpolate(images, (size, size), mode=mode.replace("_", "-"))
    with torch.autocast(images.device.type, enabled=False):  # sums of many pixels
        rows, columns = (_weights(length, size, mode, images.device) for length in images.shape[2:])
        return (rows @ (images.float() @ columns.T)).to(images.dtype)


def resize_bytes(pictures, size, mode="bicubic"):
    """uint8 (B, H, W, 3) -> uint8 (B, size, size, 3), as `resize` does."""
    resized = resize(pictures.permute(0, 3, 1, 2).float(), size, mode)
    return resized.round().clamp(0, 255).byte().permute(0, 2, 3, 1)


def pixels(pictures):
    """uint8 (B, H, H, 3) -> float (B, 3, H, H) in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def as_bytes(pictures):
    """float (B, 3, H, H) in [-1, 1] -> uint8 (B, H, H, 3)."""
    return ((pictures.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).byte()


def blurred(pictures, sigma):
    """Gaussian blur of (B, C, H, H) with a sigma in pixels for each, (B,); at the edges of the pixels there are."""
    place = torch.arange(pictures.shape[2], device=pictures.device)
    kernel = torch.exp(-0.5 * ((place - place[:, None]) / sigma[:, None, None]) ** 2)
    kernel = (kernel / kernel.sum(2, keepdim=True))[:, None]  # (B, 1, H, H)
    with torch.autocast(pictures.device.type, enabled=False):
        return kernel @ pictures @ kernel.mT


def cropped(pictures, size, corners):
    """The squares of `size` of (B, C, H, H) that begin at `corners` (B, 2), in pixels down and right."""
    return torch.stack([picture[:, top:top + size, left:left + size]
                        for picture, (top, left) in zip(pictures, corners.tolist())])
