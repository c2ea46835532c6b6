"""Image tensors: resizing like Pillow, blurring, conversion to and from bytes."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from common.models import pixels

# Resizing


@pytest.mark.parametrize("mode", pixels.KERNELS)
@pytest.mark.parametrize("height, width, size", [
    (13, 9, 5),
    (6, 6, 16),
    (40, 3, 9),
])
def test_resizing_is_pillows(mode, height, width, size):
    Image = pytest.importorskip("PIL.Image")
    images = torch.randn(1, 3, height, width)
    resized = pixels.resize(images, size, mode)
    method = Image.Resampling[mode.upper()]
    shorter = min(height, width)
    size = (size * width // shorter, size * height // shorter)
    for before, after in zip(images[0], resized[0]):
        expected = Image.fromarray(before.numpy()).resize(size, method)
        assert_allclose(after, np.asarray(expected), atol=5e-6)


@pytest.mark.parametrize("mode", pixels.KERNELS)
def test_resizing_keeps_dtype_and_argument_and_an_image_of_that_size(mode):
    images = torch.randn(2, 3, 12, 12).bfloat16()
    before = images.clone()
    expected = pixels.resize(images.float(), 5, mode).bfloat16()
    assert torch.equal(pixels.resize(images, 5, mode), expected)
    assert torch.equal(pixels.resize(images, 12, mode), before)


@pytest.mark.parametrize("work, argument", [
    (pixels.resize, 5),
    (pixels.blur, torch.ones(2)),
])
def test_resizing_and_blurring_are_done_in_full_precision_under_autocast(work, argument):
    images = torch.randn(2, 3, 12, 12)
    expected = work(images, argument)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(work(images, argument), expected)


def test_uint8_is_resized_as_float_is_and_rounded_and_kept_in_range():
    values = torch.randint(2, (2, 12, 9, 3), dtype=torch.uint8) * 255
    images = values.permute(0, 3, 1, 2).float()
    exact = pixels.resize(images, 5).clamp(0, 255)  # resizing overshoots
    error = pixels.resize_uint8(values, 5).permute(0, 3, 1, 2) - exact
    assert error.abs().max() < 0.501


def test_uint8_becomes_numbers_within_1_and_comes_back():
    images = torch.arange(255, dtype=torch.uint8)
    images = images.view(1, 5, 17, 3)
    numbers = pixels.from_uint8(images)
    assert_close(numbers, images.permute(0, 3, 1, 2) / 127.5 - 1)
    assert torch.equal(pixels.to_uint8(numbers), images)
    beyond = torch.tensor([-3.0, 3.0, 0.0]).view(1, 3, 1, 1)
    assert pixels.to_uint8(beyond).flatten().tolist() == [0, 255, 128]


def test_a_blur_has_the_width_asked_for_both_ways_and_keeps_constants():
    spot = torch.zeros(2, 3, 33, 33)
    spot[:, :, 16, 16] = 1
    sigma = torch.tensor([0.8, 2.5])
    blurred = pixels.blur(spot, sigma)
    squares = (torch.arange(33) - 16.0) ** 2
    line = blurred[:, 1].sum(1)
    assert_close(line @ squares, sigma**2, rtol=1e-3, atol=1e-4)
    assert_close(blurred, blurred.mT)
    constant = torch.full((2, 1, 9, 9), 0.3)
    assert_close(pixels.blur(constant, sigma), constant)
