"""Audio as float tensors, with time last: resampling, loudness, spectra, quality."""

import functools
import math
from fractions import Fraction

import numpy as np
import torch

LOUDNESS = 0.1  # root mean square after normalization; EnCodec normalizes files as well (§4.1)
LEVEL_SECONDS = 10  # the loudness of a long recording is measured on this many seconds
MOST_GAIN = 30.0  # maximum gain, so that near-silence is not amplified to full loudness
BLOCK_FRAMES = 1_500  # frames of codes or semantic tokens that `in_blocks` computes at a time
MARGIN = 1024  # minimum samples of silence appended for the FFT, so that ends do not wrap around

# Resampling and loudness


def resampled_length(frames, rate, to):
    """Number of samples after resampling `frames` samples from `rate` to `to` Hz, rounded up."""
    return -(-frames * to // rate)


def resample(wave, rate, to):
    """Resample waves (..., T) from `rate` to `to` Hz. Returns (..., ceil(T * to / rate)).

    The result is fp32; if the rates are equal, it is `wave` itself. Band-limited, by FFT: the
    spectrum is cut off at the lower of the two Nyquist frequencies.
    """
    if rate == to:
        return wave
    up, down = Fraction(to, rate).as_integer_ratio()
    length = wave.shape[-1]
    blocks = (length + MARGIN) // down  # every `down` samples become `up` samples
    blocks = 1 << blocks.bit_length()
    bins = blocks * min(up, down) // 2 + 1
    spectrum = torch.fft.rfft(wave.float(), blocks * down)
    spectrum = spectrum[..., :bins]

    # Fade out the highest 14% of the spectrum. A sharp cutoff would cause ringing.
    position = torch.linspace(0, 1, bins, device=wave.device)
    angle = (position - 0.86).clamp(min=0) / 0.14
    fade = torch.cos(angle * (math.pi / 2))
    fade = fade.square()
    spectrum = spectrum * fade * (up / down)
    resampled = torch.fft.irfft(spectrum, blocks * up)
    length = resampled_length(length, rate, to)
    return resampled[..., :length]


def level(read, length, rate):
    """(mean, gain) of a recording: (wave - mean) * gain has a root mean square of LOUDNESS.

    The gain is at most MOST_GAIN. read(start, stop): returns samples (T,) of the recording, which
    has `length` samples at `rate` Hz. If a recording is longer than LEVEL_SECONDS, only that many
    evenly spaced seconds are measured.
    """
    if length <= LEVEL_SECONDS * rate:
        wave = read(0, length)
    else:
        seconds = []
        for i in range(LEVEL_SECONDS):
            start = i * (length - rate) // (LEVEL_SECONDS - 1)
            seconds.append(read(start, start + rate))
        wave = torch.cat(seconds)
    mean = wave.mean().item()
    rms = wave.std(correction=0).item()
    gain = LOUDNESS / max(rms, 1e-9)
    return mean, min(MOST_GAIN, gain)


@torch.no_grad()
def in_blocks(work, x, frame_in, frame_out, before, after=0):
    """Compute work(x[None])[0] block by block, so that an hour of audio fits in memory.

    x is (T · frame_in, …), the result (T · frame_out, …). before, after: an output frame may depend
    on this many earlier and later frames.
    """
    block = BLOCK_FRAMES * frame_in
    outputs = []
    for start in range(0, len(x), block):
        begin = max(0, start - before * frame_in)
        end = start + block + after * frame_in
        output = work(x[None, begin:end])
        frames_before = (start - begin) // frame_in
        output = output[0, frames_before * frame_out :]
        outputs.append(output[: BLOCK_FRAMES * frame_out])
    return torch.cat(outputs)


# Spectra

hann_window = functools.cache(torch.hann_window)  # cached for each length and device


def stft(wave, window, hop):
    """Complex spectra (B, frames, window // 2 + 1) of waves (B, T), with Hann windows, unpadded.

    torch.stft would be slower: on GPUs, its gradient needs a sort to be deterministic.
    """
    samples = wave.unfold(1, window, hop)  # (B, frames, window)
    weights = hann_window(window, device=wave.device)
    return torch.fft.rfft(samples * weights)


def stft_magnitude(wave, window, hop):
    """Magnitudes (B, ceil(T / hop), window // 2 + 1) of the short-time Fourier transform, in fp32.

    For waves x (B, T), with N = window, h = hop, the Hann window w and c = (N - h) // 2:
    M[i, k] = |Σ_n w[n] x[i·h - c + n] exp(-2πj·k·n / N)| · 4 / N. A sine of amplitude a peaks at a.
    """
    frames = -(-wave.shape[1] // hop)
    left = (window - hop) // 2  # frame i is centered on samples i * hop to (i + 1) * hop
    length = (frames - 1) * hop + window  # of the padded wave
    right = length - left - wave.shape[1]
    wave = wave.float()
    wave = torch.nn.functional.pad(wave, (left, right))
    spectrum = stft(wave, window, hop)
    scale = 4 / window  # 2 / Σ w[n]
    return spectrum.abs() * scale


@functools.lru_cache(64)
def mel_filters(rate, window, bins, device="cpu"):
    """Triangular filters (window // 2 + 1, bins) of height 1, from 0 Hz to rate / 2.

    Their centers are evenly spaced on HTK's mel scale: m = 2595 log10(1 + f / 700).
    """
    highest = math.log10(1 + rate / 2 / 700)  # m / 2595
    edges = np.logspace(0, highest, bins + 2)
    edges = 700 * (edges - 1)  # Hz
    centers = edges[1:-1]
    # Make every triangle wide enough to contain a frequency of the spectrum.
    widths = np.diff(edges)
    widths = np.maximum(widths, rate / window)
    frequencies = np.linspace(0, rate / 2, window // 2 + 1)
    frequencies = frequencies[:, None]
    rising = (frequencies - centers) / widths[:-1]
    falling = (centers - frequencies) / widths[1:]
    filters = 1 + np.minimum(rising, falling)
    filters = np.maximum(filters, 0)
    return torch.tensor(filters, dtype=torch.float32, device=device)


def log_mel(wave, rate, window, hop, bins, floor=1e-5):
    """Log-mel spectra (B, ceil(T / hop), bins) of waves (B, T): ln max(mel, floor)."""
    filters = mel_filters(rate, window, bins, wave.device)
    with torch.autocast(wave.device.type, enabled=False):
        magnitudes = stft_magnitude(wave, window, hop)
        mel = magnitudes @ filters
    return mel.clamp(min=floor).log()


def si_sdr(estimate, target):
    """Scale-invariant signal-to-distortion ratio (B,) in dB of waves (B, T).

    10 log10(|αs|² / |αs - ŝ|²) with α = ŝ·s / |s|², for the estimate ŝ of the target s, both with
    mean 0 (Le Roux et al. 2019, Eq. 3).
    """
    pair = torch.stack([estimate, target]).float()
    pair = pair - pair.mean(2, keepdim=True)
    estimate, target = pair

    def energy(x):  # with the constant, a silent estimate of silence scores 0 dB
        return x.square().sum(1) + 1e-10

    product = (estimate * target).sum(1)
    scale = product / energy(target)
    scaled = target * scale[:, None]
    ratio = energy(scaled) / energy(estimate - scaled)
    return 10 * ratio.log10()
