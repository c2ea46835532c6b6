"""Sounds: WAV in and out, resampling, log-mel spectra and what is made from them, how alike two waves are.

WAV needs numpy alone; flac, ogg, opus and mp3 are read by soundfile. A wave is float in [-1, 1], time last.
"""
import contextlib
import functools
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.config import UserError, need

SAMPLES = {(1, 1): "u1", (1, 2): "<i2", (1, 3): "u1", (1, 4): "<i4", (3, 4): "<f4", (3, 8): "<f8"}  # (tag, bytes)
TAGS = {1: "PCM", 2: "Microsoft ADPCM", 3: "float", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 49: "GSM 6.10",
        85: "MP3"}
STREAMED = 0x7FFFF000  # what sox gives for a length it does not know, rounded down to whole samples; ffmpeg: 0xFFFFFFFF
LOBES, ATTENUATION = 32, 70  # of the resampling filter: zero crossings a side at the lower rate, dB beyond its Nyquist
MOST_TAPS = 2 ** 26  # a filter takes 256 MiB then
CEPSTRUM_BINS = 40  # mel bins under mfcc
MP3_LEAD = 2  # seconds to decode before what is asked for, as the bits of a frame may be in earlier ones
LAST_PAGE = 30  # seconds of the last page of Vorbis, at most: libsndfile is off where it enters that
COLORS = ((0, 0, 0), (45, 20, 105), (130, 30, 125), (208, 58, 90), (242, 126, 45), (244, 198, 80), (255, 255, 230))
LOUDEST_DB = 80  # the darkest color lies this far below the loudest point of a picture


class Unusable(UserError):
    """A recording that cannot be used, with the reason; training goes on with the next one."""


# Files

class Info(NamedTuple):
    """Length in samples a channel, samples a second, channels."""
    frames: int
    rate: int
    channels: int


def info(path):
    """The Info of an audio file, from its header. Unusable if it is damaged, UserError without soundfile for others."""
    if _is_wav(path):
        with _opened(path) as file:
            return _wav_header(file, path)[0]
    with _soundfile(path) as file:
        return Info(file.frames, file.samplerate, file.channels)


def read(path, start=0, frames=-1):
    """(float32 numpy (channels, frames), samples a second) from sample `start` on, -1: all.

    Nothing else is decoded, but for a lead to what is mp3, or at the end of an ogg. Past the end of the file there is
    nothing: fewer samples come back. Raises as `info` does, and Unusable for samples that are not finite.
    """
    assert start >= 0, start
    if _is_wav(path):
        with _opened(path) as file:
            header, place, kind = _wav_header(file, path)
            count = max(0, header.frames - start if frames < 0 else min(frames, header.frames - start))
            size = header.channels * kind[1]  # bytes of one sample of all channels
            file.seek(place + start * size)
            content = file.read(count * size)
        if len(content) < count * size:
            raise Unusable(f"{path}: truncated, {len(content)} of {count * size} bytes from sample {start} on")
        wave, rate = _decoded(content, kind).reshape(-1, header.channels).T, header.rate
    else:
        with _soundfile(path) as file:
            begin, rate = min(start, file.frames), file.samplerate
            late = file.format == "OGG" and begin > file.frames - LAST_PAGE * rate
            lead = min(begin, (MP3_LEAD if file.format == "MP3" else LAST_PAGE if late else 0) * rate)
            file.seek(begin - lead)
            wave = file.read(frames + lead if frames >= 0 else -1, dtype="float32", always_2d=True).T[:, lead:]
    if not (finite := np.isfinite(wave).all(0)).all():
        raise Unusable(f"{path}: sample {start + int(finite.argmin())} is not finite")
    return np.ascontiguousarray(wave), rate


def _is_wav(path):
    return Path(path).suffix.lower() in (".wav", ".wave")


@contextlib.contextmanager
def _opened(path):
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:  # not the fault of the recording
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _wav_header(file, path):
    """(Info, byte at which the samples begin, (format tag, bytes a sample)) of an open WAV file.

    Multimedia Programming Interface and Data Specifications 1.0 (IBM & Microsoft 1991), pp. 56-65.
    """
    size, form = os.fstat(file.fileno()).st_size, None
    head = file.read(12)
    if len(head) < 12:
        raise Unusable(f"{path}: " + (f"truncated, {size} bytes; expected a WAV file" if head else "empty file"))
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise Unusable(f"{path}: not a WAV file, it begins with {head[:4]!r} and {head[8:]!r}; expected b'RIFF' and "
                       "b'WAVE'")
    while len(chunk := file.read(8)) == 8:
        name, length = struct.unpack("<4sI", chunk)
        place = file.tell()
        if name == b"fmt ":
            channels, rate, kind = form = _format(file.read(min(length, 40)), path)
        elif name == b"data":
            if form is None:
                raise Unusable(f"{path}: no format chunk before the samples")
            align, left = channels * kind[1], size - place
            if length in (0, 2 ** 32 - 1, STREAMED // align * align):  # written to a pipe: what there is
                length = left
            if length > left:
                raise Unusable(f"{path}: truncated, {left} bytes of samples, expected {length}")
            return Info(length // align, rate, channels), place, kind
        file.seek(place + length + length % 2)  # chunks begin at even bytes
    raise Unusable(f"{path}: truncated, no samples within its {size} bytes")


def _format(content, path):
    """(channels, rate, (format tag, bytes a sample)) of a format chunk."""
    extended = content[:2] == b"\xfe\xff"  # WAVE_FORMAT_EXTENSIBLE: the tag begins the subformat
    if len(content) < (26 if extended else 16):
        raise Unusable(f"{path}: truncated, a format chunk of {len(content)} bytes")
    tag, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", content)
    if extended:
        tag, = struct.unpack_from("<H", content, 24)
    if not channels or not rate:
        raise Unusable(f"{path}: {channels} channels at {rate} Hz; expected at least one of each")
    kind = (tag, -(-bits // 8))
    if kind not in SAMPLES:
        raise Unusable(f"{path}: {TAGS.get(tag, 'format')} (tag {tag}) of {bits} bits; expected PCM of 8, 16, 24 or "
                       "32 bits or float of 32 or 64; convert it, such as by ffmpeg -i OLD.wav NEW.wav")
    if align != channels * kind[1]:
        raise Unusable(f"{path}: {align} bytes a sample of {channels} channels of {bits} bits; expected "
                       f"{channels * kind[1]}")
    return channels, rate, kind


def _decoded(content, kind):
    """Bytes of samples -> float32 (n,)."""
    values = np.frombuffer(content, SAMPLES[kind])
    if kind == (1, 1):
        return (values.astype(np.float32) - 128) / 128  # 8 bits, and they alone, are unsigned
    if kind == (1, 3):
        wide = np.zeros((len(values) // 3, 4), np.uint8)
        wide[:, 1:] = values.reshape(-1, 3)  # the upper bytes of 32 bits
        values = wide.view("<i4")[:, 0]
    if kind[0] == 1:
        return values.astype(np.float32) / 2.0 ** (8 * values.itemsize - 1)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@contextlib.contextmanager
def _soundfile(path):
    """An open soundfile.SoundFile."""
    soundfile = need("soundfile", f"{path}: reading {Path(path).suffix}")
    with _opened(path) as file:
        if not file.read(1):
            raise Unusable(f"{path}: empty file")
    try:
        with soundfile.SoundFile(str(path)) as sound:
            yield sound
    except soundfile.SoundFileError as error:
        raise Unusable(f"{path}: not a readable audio file ({str(error).rpartition(': ')[2]})") from error


def write_wav(file, wave, rate):
    """Write float (T,) or (C, T), numpy or tensor, in [-1, 1] as 16-bit PCM to a path or an open binary file.

    What is beyond is clipped. What `read` gives of a 16-bit file is written as it was.
    """
    wave = np.atleast_2d(wave.detach().cpu().float().numpy() if isinstance(wave, torch.Tensor) else wave)
    assert wave.ndim == 2 and np.isfinite(wave).all(), wave.shape
    content = np.clip(np.round(wave.T * 32768.0), -32768, 32767).astype("<i2").tobytes()
    align = 2 * len(wave)
    header = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, len(wave), rate, rate * align, align, 16)
    with contextlib.nullcontext(file) if hasattr(file, "write") else open(file, "wb") as opened:
        opened.write(struct.pack("<4sI4s", b"RIFF", 4 + len(header) + 8 + len(content), b"WAVE") + header)
        opened.write(struct.pack("<4sI", b"data", len(content)) + content)


# Resampling

def resample(wave, rate, to):
    """Waves (..., T) at `rate` as (..., ceil(T * to / rate)) at `to` samples a second; beyond the ends lies silence.

    Band-limited interpolation (Smith & Gossett 1984) with a sinc under a Kaiser window. Of the band below the lower of
    the two Nyquist frequencies the first 86 % pass unchanged, and what is above it ends up 70 dB lower.
    """
    if rate == to:
        return wave
    up, down, length = *_ratio(rate, to), resampled_length(wave.shape[-1], rate, to)
    blocks = max(1, -(-length // up))  # `down` samples become `up`
    with torch.autocast(wave.device.type, enabled=False):
        kernel = _sinc(up, down, wave.device)  # (up, 1, down + 2 * reach)
        reach = _reach(up, down)
        flat = wave.float().reshape(wave.shape[:-1].numel(), 1, wave.shape[-1])
        padded = F.pad(flat, (reach, blocks * down + reach - wave.shape[-1]))
        out = F.conv1d(padded, kernel, stride=down)  # (N, up, blocks)
    return out.transpose(1, 2).reshape(*wave.shape[:-1], blocks * up)[..., :length].to(wave.dtype)


def resampled_length(frames, rate, to):
    """How many samples `frames` at `rate` are at `to`."""
    return -(-frames * to // rate)


def source_span(start, length, rate, to):
    """(first, count, skip): which samples at `rate` suffice for those from `start` on, `length` of them, at `to`.

    resample(wave[first:first + count])[skip:skip + length] is resample(wave)[start:start + length].
    """
    if rate == to:
        return start, length, 0
    up, down = _ratio(rate, to)
    reach = _reach(up, down)
    block = max(0, start // up - -(-reach // down))  # only whole blocks keep the phase
    return block * down, -(-(start + length) * down // up) + reach + 1 - block * down, start - block * up


def _ratio(rate, to):
    """Both rates over their greatest common divisor: (up, down)."""
    common = math.gcd(rate, to)
    up, down = to // common, rate // common
    if up * (down + 2 * _reach(up, down)) > MOST_TAPS:
        raise UserError(f"{rate} to {to} Hz: too odd a ratio, {down} to {up}, to resample; choose a rate that has more "
                        "in common with it")
    return up, down


def _reach(up, down):
    """How many samples the filter reaches to either side."""
    return math.ceil(LOBES * max(1, down / up))


@functools.lru_cache(maxsize=16)
def _sinc(up, down, device):
    """Filters (up, 1, down + 2 * reach), one for each place that an output sample can have among `down` samples."""
    reach, slower = _reach(up, down), min(1, up / down)
    shift = np.arange(up)[:, None] * (down / up)
    t = (np.arange(down + 2 * reach) - reach - shift) * slower  # in samples of the lower rate
    width = (ATTENUATION - 8) / (2.285 * 2 * LOBES) / math.pi  # of the transition, Kaiser 1974, and the window's shape
    beta = 0.1102 * (ATTENUATION - 8.7)
    window = np.i0(beta * np.sqrt(np.clip(1 - (t / LOBES) ** 2, 0, None))) / np.i0(beta) * (np.abs(t) < LOBES)
    kernel = np.sinc((1 - width / 2) * t) * window
    kernel /= kernel.sum(1, keepdims=True)  # a constant stays what it is
    return _constant(kernel[:, None], device)


def _constant(values, device):
    """A tensor to be kept: also made for training when it is first needed under inference_mode."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


# Spectra

@functools.lru_cache(maxsize=64)
def _hann(window, device):
    return _constant(np.hanning(window + 1)[:-1], device)  # periodic


def _mels(hertz):
    return 2595 * np.log10(1 + hertz / 700)  # HTK's


def _hertz(mels):
    return 700 * (10 ** (mels / 2595) - 1)


@functools.lru_cache(maxsize=64)
def mel_filters(rate, window, bins, low=0.0, high=None, device=torch.device("cpu")):  # noqa: B008 (is immutable)
    """Triangular filters (window // 2 + 1, bins) of height 1, evenly spaced in mel from `low` to `high` Hz (rate / 2).

    HTK's mel, 2595 log10(1 + f / 700), and no scaling by width. Where triangles would fall between two frequencies of
    the spectrum they are widened to reach from one to the next, so that every bin hears something.
    """
    high = high or rate / 2
    assert 0 <= low < high <= rate / 2, (low, high, rate)
    edges = _hertz(np.linspace(*_mels(np.array([low, high])), bins + 2))
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    step = rate / window
    rising, falling = np.maximum(center - left, step), np.maximum(right - center, step)
    f = np.arange(window // 2 + 1)[:, None] * step
    return _constant(np.clip(np.minimum((f - center + rising) / rising, (center + falling - f) / falling), 0, None),
                     device)


def stft_magnitude(wave, window, hop):
    """Magnitudes (B, ceil(T / hop), window // 2 + 1) of waves (B, T), in fp32: a sine of amplitude a reads a.

    Frame i is centered on the samples i * hop to (i + 1) * hop, under a Hann window; beyond the ends lies silence.
    """
    assert window >= hop, (window, hop)
    frames, left = -(-wave.shape[1] // hop), (window - hop) // 2
    with torch.autocast(wave.device.type, enabled=False):
        taper = _hann(window, wave.device)
        padded = F.pad(wave.float(), (left, (frames - 1) * hop + window - left - wave.shape[1]))
        spectrum = torch.stft(padded, window, hop, window=taper, center=False, return_complex=True)
        return spectrum.abs().transpose(1, 2) * (4 / window)  # twice over the sum of the Hann window


def log_mel(wave, rate, window, hop, bins, floor=1e-5):
    """Natural logarithms (B, ceil(T / hop), bins) of mel magnitudes of waves (B, T), none below `floor`'s, in fp32."""
    magnitude = stft_magnitude(wave, window, hop)
    with torch.autocast(wave.device.type, enabled=False):
        mel = magnitude @ mel_filters(rate, window, bins, device=wave.device)
        return mel.clamp(min=floor).log()


def mfcc(wave, rate, hop, window, count=13):
    """Cepstral coefficients (B, ceil(T / hop), count) of waves (B, T): the orthonormal DCT-II of 40 log-mel bins.

    Davis & Mermelstein 1980; the first one, the loudness, is among them.
    """
    features = log_mel(wave, rate, window, hop, CEPSTRUM_BINS)
    with torch.autocast(wave.device.type, enabled=False):
        return features @ _dct(count, wave.device)


def _cosines(places, count):
    """The first functions of the orthonormal DCT-II of all bins at `places` (…), even between bins: (…, count)."""
    cosines = np.cos(np.pi / CEPSTRUM_BINS * (places[..., None] + 0.5) * np.arange(count))
    return cosines * np.where(np.arange(count) == 0, 1, 2 ** 0.5) / CEPSTRUM_BINS ** 0.5


@functools.lru_cache(maxsize=16)
def _dct(count, device):
    return _constant(_cosines(np.arange(CEPSTRUM_BINS), count), device)


def cepstral_warps(factors, rate, count=13):
    """Matrices (N, count, count) by which cepstra (…, count) of a spectrum S(f) become those of S(factor · f).

    So they undo that all formants of a voice are higher by a factor, as those of a shorter vocal tract are: VTLN by the
    filters of `mfcc`, which is linear in cepstra (Pitz & Ney 2005). What would come from above rate / 2 is as there.
    """
    top, bins = _mels(rate / 2), np.arange(CEPSTRUM_BINS)
    centers = _hertz(top * (bins + 1) / (CEPSTRUM_BINS + 1))  # of the filters
    mels = _mels(np.multiply.outer(factors, centers))
    places = (mels / top * (CEPSTRUM_BINS + 1) - 1).clip(max=CEPSTRUM_BINS - 0.5)  # (N, bins)
    return torch.from_numpy(_cosines(places, count).swapaxes(1, 2) @ _cosines(bins, count)).float()


def deltas(features):
    """Slopes a frame of features (B, frames, D), by regression over five frames; the outermost are repeated."""
    frames = features.shape[1]
    padded = torch.cat([features[:, :1]] * 2 + [features] + [features[:, -1:]] * 2, 1)
    return sum(n * (padded[:, 2 + n:][:, :frames] - padded[:, 2 - n:][:, :frames]) for n in (1, 2)) / 10


# Measures and pictures

def si_sdr(estimate, target):
    """Scale-invariant signal-to-distortion ratio (B,) in dB of estimates for targets, each (B, T).

    Le Roux et al. 2019, eq. 3, of waves without their means, in fp32.
    """
    estimate, target = (x.float() - x.float().mean(1, keepdim=True) for x in (estimate, target))
    tiny = 1e-10  # far below the energy of a wave of 16 bits; silence for silence is 0 dB
    scale = (estimate * target).sum(1, keepdim=True) / (target.square().sum(1, keepdim=True) + tiny)
    wanted, error = scale * target, estimate - scale * target
    return 10 * torch.log10((wanted.square().sum(1) + tiny) / (error.square().sum(1) + tiny))


def spectral_loss(fake, real, rate, floor=0.0):
    """Distance of mel spectra of waves (B, T) at six scales -> (B,) (SoundStream Eq. 4, 5).

    The L1 distance of magnitudes plus √(window/2) times the L2 distance of logarithms, a frame; over the bins, frames
    and scales it is averaged, not summed, so that it does not grow with their number. Logarithms are of 0.001 or
    more, and of `floor` times the loudest of the real frame: as ears, they miss the faint beside the loud (masking).
    """
    total = 0
    for window in (2 ** i for i in range(6, 12)):
        filters = mel_filters(rate, window, 64, device=real.device)
        one, other = (stft_magnitude(wave, window, window // 4) @ filters for wave in (fake, real))
        least = (floor * other.amax(2, keepdim=True)).clamp(min=1e-3)
        logs = torch.maximum(one, least).log() - torch.maximum(other, least).log()
        distance = (one - other).abs().sum(-1) + (window / 2) ** 0.5 * (logs.square().sum(-1) + 1e-8).sqrt()
        total = total + distance.mean(1) / (6 * 64)
    return total


def mel_distance(fake, real, rate):
    """Mean absolute difference of natural log-mel spectra, 64 bins, windows of 1,024, of waves (B, T) -> (B,)."""
    one, other = (log_mel(wave, rate, 1024, 256, 64) for wave in (fake, real))
    return (one - other).abs().mean((1, 2))


def spectrogram(wave, rate, height=160):
    """A picture uint8 (height, frames, 3) of a wave (T,): time to the right, mel upward, the louder the brighter.

    A column stands for about 8 ms; colors end 80 dB below the loudest point.
    """
    window = 2 ** round(math.log2(rate * 0.032))
    levels = log_mel(wave[None], rate, window, window // 4, height)[0].T.flip(0)  # (height, frames)
    decibels = levels.cpu().double().numpy() * (20 / math.log(10))
    brightness = np.clip(1 + (decibels - decibels.max()) / LOUDEST_DB, 0, 1) if decibels.max() > -99 else 0 * decibels
    places = np.linspace(0, 1, len(COLORS))
    colors = [np.interp(brightness, places, channel) for channel in zip(*COLORS)]
    return np.stack(colors, -1).round().astype(np.uint8)
