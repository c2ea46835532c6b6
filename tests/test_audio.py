"""Resampling, spectra and quality of audio, compared with analytic results."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from common.models import audio


def noise(channels, frames):
    random = np.random.default_rng(0)
    samples = random.uniform(-1, 1, (channels, frames))
    return samples.astype(np.float32)


def sine(frequency, rate):
    time = torch.arange(rate // 2, dtype=torch.float64) / rate
    return torch.sin(2 * math.pi * frequency * time)


def decibels(error):
    """The power of an error relative to a sine's, in dB, ignoring its first and last fifth."""
    middle = error[len(error) // 5:-len(error) // 5]
    power = middle.square().mean().item()
    return 10 * math.log10(power / 0.5 + 1e-30)


RATE_PAIRS = pytest.mark.parametrize("rate, to", [(16000, 24000), (44100, 16000), (16000, 8000)])


@RATE_PAIRS
def test_resampling_keeps_sines_below_the_nyquist_frequency_and_no_others(rate, to):
    for fraction in (0.003, 0.47, 0.86):
        tone = fraction * min(rate, to) / 2
        resampled = audio.resample(sine(tone, rate), rate, to)
        assert decibels(resampled - sine(tone, to)) < -90
    for tone in np.arange(to / 2, rate / 2, 1500):
        resampled = audio.resample(sine(tone, rate), rate, to)
        assert decibels(resampled) < -90


@RATE_PAIRS
def test_a_resampled_wave_is_as_long_and_its_ends_do_not_meet(rate, to):
    for length in (0, 1, 147, 1000):
        resampled = audio.resample(torch.ones(2, 3, length), rate, to)
        assert resampled.shape == (2, 3, math.ceil(length * to / rate))
        assert resampled.dtype == torch.float32
    click = audio.resample(torch.eye(1, 4000)[0], rate, to)
    assert click[0] > 0.3
    later = click[len(click) // 2:]
    assert later.abs().max() < 1e-4


@pytest.mark.parametrize("window, hop", [(64, 16), (400, 160), (1024, 1024)])
def test_magnitudes_equal_an_explicit_fourier_sum(window, hop):
    wave = noise(2, 1500)
    n = np.arange(window)
    taper = 0.5 - 0.5 * np.cos(2 * np.pi * n / window)
    fourier = np.exp(-2j * np.pi * np.outer(n, n[:window // 2 + 1]) / window)
    starts = np.arange(0, 1500, hop)
    left = (window - hop) // 2
    padded = np.pad(wave, ((0, 0), (left, window)))
    frames = padded[:, starts[:, None] + n]  # (2, frames, window)
    spectrum = frames * taper @ fourier
    expected = np.abs(spectrum) * 2 / taper.sum()
    found = audio.stft_magnitude(torch.from_numpy(wave), window, hop)
    assert_allclose(found, expected, atol=1e-5)


def test_mel_filters_are_triangles_evenly_spaced_in_mel():
    filters = audio.mel_filters(16000, 16384, 20)
    ratio = (1 + 8000 / 700) ** (1 / 21)
    hertz = 700 * (ratio ** np.arange(1, 21) - 1)
    centers = hertz / 16000 * 16384
    assert_allclose(filters.argmax(0), centers, atol=1)
    between = filters.sum(1)[math.ceil(centers[0]):int(centers[-1])]
    assert_allclose(between, 1, atol=1e-5)
    # Even a filter narrower than the spacing of the STFT's frequencies covers one of them.
    narrow = audio.mel_filters(16000, 512, 160)
    assert narrow.sum(0).min() >= 0.5


def test_log_mel_is_fp32_under_autocast_and_has_gradients_also_of_silence():
    wave = torch.from_numpy(noise(2, 4001))
    wave[1] = 0
    wave.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = audio.log_mel(wave, 7000, 98, 49, 11)
    filters = audio.mel_filters(7000, 98, 11)
    mel = audio.stft_magnitude(wave, 98, 49) @ filters
    assert_close(found[0], mel[0].log())
    assert_close(found[1], torch.full_like(found[1], math.log(1e-5)))
    found.sum().backward()
    assert wave.grad[0].any()
    assert wave.grad.isfinite().all()


def test_si_sdr_ignores_scale_and_offset_and_is_the_ratio_of_energies():
    target = sine(500, 16000)[None]
    error = target.roll(8, 1)  # a quarter of a period later: orthogonal
    for estimate in (target + 0.1 * error, 7 * target + 0.7 * error + 3):
        assert_close(audio.si_sdr(estimate, target), torch.tensor([20.0]), atol=0.01, rtol=0)
    assert audio.si_sdr(target, -target) > 100
    silence = torch.zeros(2, 10)
    assert audio.si_sdr(silence, silence).tolist() == [0, 0]


def test_the_level_of_a_long_recording_is_that_of_ten_of_its_seconds_and_silence_stays():
    wave = torch.arange(100.0).repeat_interleave(1_000)
    wave = wave + torch.tensor([1.0, -1.0]).repeat(50_000)
    seconds = []

    def read(start, stop):
        seconds.append(wave[start:stop])
        return wave[start:stop]

    mean, gain = audio.level(read, 100_000, 1_000)
    assert [part[0].item() - 1 for part in seconds] == [11 * n for n in range(10)]
    whole = torch.cat(seconds)
    rms = (whole - mean).square().mean().sqrt()
    assert_close(rms.item() * gain, 0.1)
    assert audio.level(lambda start, stop: wave[start:stop], 1_000, 1_000) == (0, 0.1)
    assert audio.level(lambda start, stop: torch.zeros(9), 9, 1_000) == (0, 30)
