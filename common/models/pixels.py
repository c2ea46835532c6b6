"""Image tensors: conversion between bytes and floats, resizing, blurring, cropping."""

import functools

import torch


def bicubic(x):
    """The cubic convolution kernel (Keys 1981), with a = -1/2."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x**2 + 1
    outer = (2.5 - 0.5 * x) * x - 4
    outer = outer * x + 2
    outer = outer * (x < 2)
    return torch.where(x < 1, inner, outer)


def box(x):
    """The box kernel, which averages pixels."""
    inside = (x > -0.5) & (x <= 0.5)
    return inside.double()


KERNELS = {"bicubic": bicubic, "box": box}  # functions of a distance in pixels of the smaller image


@functools.lru_cache(maxsize=64)
def _weights(length, size, mode, device):
    """The float32 matrix (size, length) that resizes a line to `size` pixels as Pillow does."""
    ratio = length / size
    centers = torch.arange(size, dtype=torch.float64) + 0.5
    centers = centers[:, None] * ratio
    distances = torch.arange(length) - centers + 0.5
    scale = max(1.0, ratio)  # when shrinking, widen the kernel, so that all pixels count
    table = KERNELS[mode](distances * (1 / scale))
    table = table / table.sum(1, keepdim=True)
    return table.to(device, torch.float32)


def resize(images, size, mode="bicubic"):
    """Resize float images (B, C, H, W) so that the shorter side is `size`.

    The longer side is rounded down. The modes "bicubic" and "box" match Pillow's, with
    antialiasing. "bicubic" overshoots at sharp edges; the caller may clamp the result.
    """
    _, _, height, width = images.shape
    shorter = min(height, width)
    if shorter == size:
        return images
    new_height = size * height // shorter
    new_width = size * width // shorter
    rows = _weights(height, new_height, mode, images.device)
    columns = _weights(width, new_width, mode, images.device)
    with torch.autocast(images.device.type, enabled=False):  # sums of many pixels need fp32
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
    """Resize windows of square images just as `resize` would resize the whole images.

    length, size: sides of the original and of the resized images. windows (B, C, S, S): begin at
    `starts` in the original images, and include all pixels that the result depends on. Returns
    windows (B, C, T, T), T = `new_size`, which begin at `new_starts` in the resized images. starts,
    new_starts (B, 2): pixels from the top and from the left.
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
    """Gaussian blur of square images (B, C, H, H), with a sigma (B,) in pixels for each image.

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

    ratio: maximum ratio of the longer side to the shorter one; above 1, the result is not square.
    """
    longest = ratio * min(images.shape[2:])
    for dim in (2, 3):
        length = images.shape[dim]
        kept = min(length, longest)
        start = round((length - kept) / 2)  # as in CLIP's preprocessing
        images = images.narrow(dim, start, kept)
    return images


def crop(images, size, corners):
    """Squares of side `size` from images (B, C, H, W).

    corners (B, 2): first row and first column of each square.
    """
    windows = images.unfold(2, size, 1)
    windows = windows.unfold(3, size, 1)  # (B, C, tops, lefts, size, size)
    samples = torch.arange(len(images), device=images.device)
    top, left = corners.T
    crops = windows[samples, :, top, left]
    # Contiguous, because torch.randn_like draws different numbers for different memory layouts.
    return crops.contiguous()
