"""Waves, float tensors with time last: resampling, loudness, spectra, quality."""

import functools
import math
from fractions import Fraction

import numpy as np
import torch

LOUDNESS = 0.1  # root mean square of a wave; EnCodec normalizes files, too (§4.1)
LEVEL_SECONDS = 10  # by which the loudness of a recording is measured
MOST_GAIN = 30.0  # silence stays silence
BLOCK_FRAMES = 1_500  # of codes or semantic tokens in one pass
MARGIN = 1024  # samples of silence behind a wave that is resampled

# Resampling and loudness


def resampled_length(frames, rate, to):
    """How many samples `frames` at `rate` become at `to`: ceil(frames * to / rate)."""
    return -(-frames * to // rate)


def resample(wave, rate, to):
    """Bring waves (..., T) from `rate` to `to` samples a second: fp32 (..., ceil(T * to / rate)).

    Band-limited, by FFT: the spectrum is cut off at the lower of both Nyquist frequencies.
    """
    if rate == to:
        return wave
    up, down = Fraction(to, rate).as_integer_ratio()
    length = wave.shape[-1]
    blocks = 1 << ((length + MARGIN) // down).bit_length()  # of `down` samples, which become `up`
    bins = blocks * min(up, down) // 2 + 1
    spectrum = torch.fft.rfft(wave.float(), blocks * down)
    spectrum = spectrum[..., :bins]

    # An abrupt end of the spectrum would ring: the highest 14 % fade out.
    fraction = torch.linspace(0, 1, bins, device=wave.device)
    angle = (fraction - 0.86).clamp(min=0) / 0.14
    fade = torch.cos(angle * (math.pi / 2)).square()
    resampled = torch.fft.irfft(spectrum * fade * (up / down), blocks * up)
    return resampled[..., : resampled_length(length, rate, to)]


def level(read, length, rate):
    """(mean, gain) of a recording: (wave - mean) * gain has a root mean square of LOUDNESS.

    The gain is at most MOST_GAIN. read(start, stop): samples of the recording (T,), of `length` at
    `rate`. A longer one than LEVEL_SECONDS is measured by as many of its seconds, evenly spaced.
    """
    if length <= LEVEL_SECONDS * rate:
        wave = read(0, length)
    else:
        starts = [i * (length - rate) // (LEVEL_SECONDS - 1) for i in range(LEVEL_SECONDS)]
        wave = torch.cat([read(start, start + rate) for start in starts])
    mean = wave.mean().item()
    rms = wave.std(correction=0).item()
    return mean, min(MOST_GAIN, LOUDNESS / max(rms, 1e-9))


@torch.no_grad()
def in_blocks(work, x, frame_in, frame_out, before, after=0):
    """work(x[None])[0] (T · frame_out, …) of x (T · frame_in, …), in blocks, for an hour of sound.

    before, after: frames beside an output frame that it may depend on.
    """
    block = BLOCK_FRAMES * frame_in
    outputs = []
    for start in range(0, len(x), block):
        first = max(0, start - before * frame_in)
        output = work(x[None, first : start + block + after * frame_in])[0]
        output = output[(start - first) // frame_in * frame_out :]
        outputs.append(output[: BLOCK_FRAMES * frame_out])
    return torch.cat(outputs)


# Spectra

hann_window = functools.cache(torch.hann_window)  # made once for each length and device


def stft(wave, window, hop):
    """Spectra, complex (B, frames, window // 2 + 1), of waves (B, T) in Hann windows, all within T.

    Not by torch.stft: on a GPU its gradient needs a sort to have the same bits in every run.
    """
    samples = wave.unfold(1, window, hop)  # (B, frames, window)
    weights = hann_window(window, device=wave.device)
    return torch.fft.rfft(samples * weights)


def stft_magnitude(wave, window, hop):
    """Magnitudes (B, ceil(T / hop), window // 2 + 1) of the short-time Fourier transform, in fp32.

    For waves x (B, T), with N = window, h = hop, the Hann window w and c = (N - h) // 2:
    M[i, k] = |Σ_n w[n] x[i·h - c + n] exp(-2πi·k·n / N)| · 4 / N. A sine of amplitude a gives a.
    """
    frames = -(-wave.shape[1] // hop)
    left = (window - hop) // 2  # frame i is centered on the samples i * hop to (i + 1) * hop
    length = (frames - 1) * hop + window  # of all frames
    right = length - left - wave.shape[1]
    wave = wave.float()
    wave = torch.nn.functional.pad(wave, (left, right))
    spectrum = stft(wave, window, hop)
    scale = 4 / window  # 2 / Σ w[n]
    return spectrum.abs() * scale


@functools.lru_cache(64)
def mel_filters(rate, window, bins, device="cpu"):
    """Triangular filters (window // 2 + 1, bins) of height 1, from 0 Hz to rate / 2.

    Their centers are evenly spaced in HTK's mel: m = 2595 log10(1 + f / 700).
    """
    highest = math.log10(1 + rate / 2 / 700)  # m / 2595
    edges = 700 * (np.logspace(0, highest, bins + 2) - 1)  # Hz
    centers = edges[1:-1]
    # Each triangle reaches a frequency of the spectrum.
    widths = np.maximum(np.diff(edges), rate / window)
    frequencies = np.linspace(0, rate / 2, window // 2 + 1)[:, None]
    rising = (frequencies - centers) / widths[:-1]
    falling = (centers - frequencies) / widths[1:]
    filters = np.maximum(1 + np.minimum(rising, falling), 0)
    return torch.tensor(filters, dtype=torch.float32, device=device)


def log_mel(wave, rate, window, hop, bins, floor=1e-5):
    """Log-mel spectra (B, ceil(T / hop), bins) of waves (B, T): ln max(M · filters, floor)."""
    filters = mel_filters(rate, window, bins, wave.device)
    with torch.autocast(wave.device.type, enabled=False):
        mel = stft_magnitude(wave, window, hop) @ filters
    return mel.clamp(min=floor).log()


def si_sdr(estimate, target):
    """Scale-invariant signal-to-distortion ratio (B,) in dB of waves (B, T).

    10 log10(|αs|² / |αs - ŝ|²) with α = ŝ·s / |s|², for the estimate ŝ of the target s, both of
    mean 0 (Le Roux et al. 2019, Eq. 3).
    """
    pair = torch.stack([estimate, target]).float()
    estimate, target = pair - pair.mean(2, keepdim=True)

    def energy(x):  # more than that of a wave of 16 bits can be: silence for silence is 0 dB
        return x.square().sum(1) + 1e-10

    scale = (estimate * target).sum(1) / energy(target)
    scaled = target * scale[:, None]
    ratio = energy(scaled) / energy(estimate - scaled)
    return 10 * ratio.log10()
