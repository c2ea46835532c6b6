"""Image tensors: conversion between bytes and floats, resizing, blurring, cropping."""

import functools

import torch


def bicubic(x):
    """Keys 1981, with a = -1/2."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x**2 + 1
    outer = (2.5 - 0.5 * x) * x - 4
    outer = outer * x + 2
    outer = outer * (x < 2)
    return torch.where(x < 1, inner, outer)


def box(x):
    """The mean of the pixels."""
    inside = (x > -0.5) & (x <= 0.5)
    return inside.double()


KERNELS = {"bicubic": bicubic, "box": box}  # functions of the distance x in coarser pixels


@functools.lru_cache(maxsize=64)
def _weights(length, size, mode, device):
    """The matrix (size, length) that resizes a line to `size` pixels like Pillow, in float32."""
    ratio = length / size
    centers = torch.arange(size, dtype=torch.float64) + 0.5
    centers = centers[:, None] * ratio
    distances = torch.arange(length) - centers + 0.5
    scale = max(1.0, ratio)  # when shrinking, widen kernels, so that all pixels count
    table = KERNELS[mode](distances * (1 / scale))
    table = table / table.sum(1, keepdim=True)
    return table.to(device, torch.float32)


def resize(images, size, mode="bicubic"):
    """Resize float images (B, C, H, W) so that the shorter side is `size`; the other rounds down.

    The modes "bicubic" and "box" are those of Pillow, with antialiasing. "bicubic" overshoots at
    sharp edges; the caller may clamp the result.
    """
    _, _, height, width = images.shape
    shorter = min(height, width)
    if shorter == size:
        return images
    new_height = size * height // shorter
    new_width = size * width // shorter
    rows = _weights(height, new_height, mode, images.device)
    columns = _weights(width, new_width, mode, images.device)
    with torch.autocast(images.device.type, enabled=False):  # sums of many pixels
        resized = images.float() @ columns.T
        resized = rows @ resized
    return resized.to(images.dtype)


def resize_windows(
    windows,
    starts,
    length,
    size,
    new_starts,
    new_size,
    mode="bicubic",
):
    """Windows (B, C, T, T) of images resized to `size`, T = `new_size`, beginning at `new_starts`.

    windows (B, C, S, S): windows of the original images, which have sides of `length`, beginning at
    `starts`. They must have all pixels that the new windows depend on. starts, new_starts (B, 2):
    pixels down and right.
    """
    table = _weights(length, size, mode, windows.device)
    pixel = torch.arange(length, device=windows.device)
    columns = starts[..., None] + pixel[: windows.shape[-1]]  # (B, 2, S)
    rows = new_starts[..., None] + torch.arange(new_size, device=windows.device)  # (B, 2, T)
    weights = table[rows[..., None], columns[:, :, None]]  # (B, 2, T, S)
    weights = weights[:, :, None]
    vertical, horizontal = weights.unbind(1)  # (B, 1, T, S) each
    with torch.autocast(windows.device.type, enabled=False):
        resized = windows @ horizontal.mT
        return vertical @ resized


def to_floats(images):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) with the same values."""
    images = images.permute(0, 3, 1, 2)
    return images.float()


def to_bytes(images):
    """float (B, 3, H, W) in [0, 255] -> uint8 (B, H, W, 3), rounded and clamped."""
    images = images.permute(0, 2, 3, 1)
    images = images.round().clamp(0, 255)
    return images.byte()


def resize_uint8(images, size, mode="bicubic"):
    """`resize` for uint8 images (B, H, W, 3)."""
    images = resize(to_floats(images), size, mode)
    return to_bytes(images)


def from_uint8(images):
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [-1, 1]."""
    return to_floats(images) / 127.5 - 1


def to_uint8(images):
    """float (B, 3, H, W) in [-1, 1] -> uint8 (B, H, W, 3)."""
    images = (images + 1) * 127.5
    return to_bytes(images)


def blur(images, sigma):
    """Gaussian blur of images (B, C, H, H), with a sigma (B,) in pixels for each.

    At the edges, only pixels inside the image count.
    """
    position = torch.arange(images.shape[2], device=images.device)
    distance = position - position[:, None]
    distance = distance / sigma[:, None, None]  # (B, H, H)
    kernel = torch.exp(-0.5 * distance**2)
    kernel = kernel / kernel.sum(2, keepdim=True)
    kernel = kernel[:, None]  # (B, 1, H, H)
    with torch.autocast(images.device.type, enabled=False):
        blurred = kernel @ images
        return blurred @ kernel.mT


def central_square(images, ratio=1):
    """The largest central squares (B, C, S, S) of images (B, C, H, W).

    ratio: maximum ratio of the longer side to the shorter one; above 1, the result is no square.
    """
    longest = ratio * min(images.shape[2:])
    for dim in (2, 3):
        length = images.shape[dim]
        kept = min(length, longest)
        start = round((length - kept) / 2)  # as in CLIP's preprocessing
        images = images.narrow(dim, start, kept)
    return images


def crop(images, size, corners):
    """Squares of `size` from images (B, C, H, W), at `corners` (B, 2): pixels down and right."""
    windows = images.unfold(2, size, 1)
    windows = windows.unfold(3, size, 1)  # (B, C, tops, lefts, size, size)
    samples = torch.arange(len(images), device=images.device)
    top, left = corners.T
    crops = windows[samples, :, top, left]
    # Contiguous, because noise drawn like it depends on the layout.
    return crops.contiguous()
