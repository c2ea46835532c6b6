"""Images as tensors: bytes and floats, resizing, blurring, cropping."""

import functools

import torch


def bicubic(x):
    """Keys 1981, with a = -1/2."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x**2 + 1
    outer = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, inner, outer * (x < 2))


def box(x):
    """The mean of the pixels."""
    return ((x > -0.5) & (x <= 0.5)).double()


KERNELS = {"bicubic": bicubic, "box": box}  # of the distance x in pixels of the coarser grid


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

    The modes, "bicubic" and "box", are Pillow's, antialiased. bicubic overshoots at sharp edges;
    nothing is clamped, because only the caller knows the range.
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
        resized = rows @ (images.float() @ columns.T)
    return resized.to(images.dtype)


def resize_windows(windows, starts, length, size, new_starts, new_size, mode="bicubic"):
    """Windows (B, C, T, T) of what `resize` to `size` gives of images, T = `new_size`.

    They begin at the pixels `new_starts` (B, 2): down, right. windows (B, C, S, S): of the images,
    whose side is `length`, from `starts` (B, 2) on, with all pixels that these depend on.
    """
    table = _weights(length, size, mode, windows.device)
    pixel = torch.arange(length, device=windows.device)
    columns = starts[..., None] + pixel[: windows.shape[-1]]  # (B, 2, S)
    rows = new_starts[..., None] + torch.arange(new_size, device=windows.device)  # (B, 2, T)
    weights = table[rows[..., None], columns[:, :, None]]  # (B, 2, T, S)
    vertical, horizontal = weights[:, :, None].unbind(1)  # (B, 1, T, S) each
    with torch.autocast(windows.device.type, enabled=False):
        return vertical @ (windows @ horizontal.mT)


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
