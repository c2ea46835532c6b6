"""WAV files of every kind, resampling against the analytic answer, spectra, and measures of waves."""
import io
import math
import struct
import sys

import numpy as np
import pytest
import torch

from common import audio, synthetic
from common.config import UserError

KINDS = {"u8": (1, 8), "s16": (1, 16), "s24": (1, 24), "s32": (1, 32), "f32": (3, 32), "f64": (3, 64)}
STEP = {"u8": 2 ** -7, "s16": 2 ** -15, "s24": 2 ** -23, "s32": 2 ** -31, "f32": 0, "f64": 0}


def samples(wave, kind):
    """Bytes of a wave (channels, frames) in [-1, 1)."""
    flat, bits = wave.T.ravel().astype(np.float64), KINDS[kind][1]
    if kind[0] == "f":
        return flat.astype(f"<f{bits // 8}").tobytes()
    whole = [int(x) for x in np.round(flat * 2 ** (bits - 1))]
    return b"".join((x + 128).to_bytes(1, "little") if kind == "u8" else x.to_bytes(bits // 8, "little", signed=True)
                    for x in whole)


def chunk(name, content, length=None):
    return struct.pack("<4sI", name, len(content) if length is None else length) + content + b"\0" * (len(content) % 2)


def form(tag, channels, rate, bits, extensible=False):
    align = channels * -(-bits // 8)
    core = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, channels, rate, rate * align, align, bits)
    guid = struct.pack("<H", tag) + b"\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
    return chunk(b"fmt ", core + (struct.pack("<HHI", 22, bits, 0) + guid if extensible else b""))


def riff(*chunks):
    return b"RIFF" + struct.pack("<I", 4 + sum(map(len, chunks))) + b"WAVE" + b"".join(chunks)


def wav(wave, kind, rate=8000, extensible=False):
    tag, bits = KINDS[kind]
    return riff(form(tag, len(wave), rate, bits, extensible), chunk(b"data", samples(wave, kind)))


def noise(channels, frames, seed=0):
    return np.random.default_rng(seed).uniform(-0.99, 0.99, (channels, frames)).astype(np.float32)


def saved(tmp_path, content, name="a.wav"):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


# Files

@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_wav_format_reads_back_and_parts_are_slices(kind, channels, extensible, tmp_path):
    wave = noise(channels, 101)
    path = saved(tmp_path, wav(wave, kind, 11025, extensible))
    assert audio.info(path) == (101, 11025, channels)
    whole, rate = audio.read(path)
    assert whole.dtype == np.float32 and whole.shape == wave.shape and rate == 11025
    np.testing.assert_allclose(whole, wave, rtol=0, atol=STEP[kind] / 2 + 1e-7)
    for start, frames in ((0, 7), (33, 20), (95, 50), (40, -1), (101, 5), (150, -1)):
        part, _ = audio.read(path, start, frames)
        np.testing.assert_array_equal(part, whole[:, start:][:, :frames if frames >= 0 else None])


def test_extremes_of_8_bits_are_those_of_unsigned_numbers(tmp_path):
    path = saved(tmp_path, riff(form(1, 1, 8000, 8), chunk(b"data", bytes([0, 128, 255]))))
    np.testing.assert_array_equal(audio.read(path)[0], [[-1, 0, 127 / 128]])


def test_only_the_part_asked_for_is_read(tmp_path, monkeypatch):
    path, counted, plain = saved(tmp_path, wav(noise(2, 200_000), "s16")), [], open

    class Counting(io.FileIO):
        def read(self, size=-1):
            content = super().read(size)
            counted.append(len(content))
            return content

    monkeypatch.setattr("builtins.open", lambda name, mode: (Counting if name == path else plain)(name, mode))
    audio.read(path, 100_000, 50)
    assert sum(counted) < 400


def test_chunks_around_the_samples_are_passed_over_also_of_odd_size(tmp_path):
    wave = noise(1, 31)
    parts = form(1, 1, 8000, 16), chunk(b"data", samples(wave, "s16"))
    path = saved(tmp_path, riff(chunk(b"LIST", b"odd"), parts[0], chunk(b"junk", b""), chunk(b"fact", b"12345"),
                                parts[1], chunk(b"id3 ", b"after")))
    assert audio.info(path).frames == 31
    np.testing.assert_allclose(audio.read(path)[0], wave, atol=2 ** -15)


@pytest.mark.parametrize("length", [0, 2 ** 32 - 1, 0x7FFFF000])
def test_a_file_written_to_a_pipe_goes_to_its_end(length, tmp_path):
    content = samples(noise(2, 50), "s16")
    path = saved(tmp_path, riff(form(1, 2, 8000, 16), chunk(b"data", content + b"\1\2", length)))  # half a sample more
    assert audio.info(path).frames == 50 and audio.read(path)[0].shape == (2, 50)


def test_a_file_without_samples_is_empty_and_not_broken(tmp_path):
    path = saved(tmp_path, wav(noise(1, 0), "s16"))
    assert audio.info(path).frames == 0 and audio.read(path)[0].shape == (1, 0)


GOOD = wav(noise(1, 100), "s16")


@pytest.mark.parametrize("content, message", [
    (b"", "empty file"),
    (b"RIFF\0\0", "truncated, 6 bytes"),
    (b"\x89PNG" + bytes(40), "not a WAV file, it begins with b'\\x89PNG'"),
    (b"RIFF\0\0\0\0AVI " + bytes(40), "b'AVI '; expected b'RIFF' and b'WAVE'"),
    (GOOD[:-1], "truncated, 199 bytes of samples, expected 200"),
    (GOOD[:40], "truncated, no samples within its 40 bytes"),
    (GOOD[:30], "truncated, a format chunk of 10 bytes"),
    (riff(chunk(b"data", bytes(8))), "no format chunk before the samples"),
    (riff(form(17, 1, 8000, 4), chunk(b"data", bytes(8))), r"IMA ADPCM (tag 17) of 4 bits; expected PCM of 8"),
    (riff(form(99, 1, 8000, 16, True), chunk(b"data", bytes(8))), "format (tag 99) of 16 bits"),
    (riff(form(1, 1, 8000, 64), chunk(b"data", bytes(8))), "PCM (tag 1) of 64 bits"),
    (riff(form(1, 0, 8000, 16), chunk(b"data", bytes(8))), "0 channels at 8000 Hz"),
    (riff(form(1, 1, 0, 16), chunk(b"data", bytes(8))), "1 channels at 0 Hz"),
    (riff(form(1, 1, 8000, 16).replace(b"\2\0\x10\0", b"\3\0\x10\0"), chunk(b"data", bytes(8))), "3 bytes a sample"),
])
def test_what_is_wrong_with_a_file_is_said(content, message, tmp_path):
    path = saved(tmp_path, content)
    for look in (audio.info, audio.read):
        with pytest.raises(audio.Unusable) as error:
            look(path)
        assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("kind, value", [("f32", np.nan), ("f64", np.inf), ("f64", 1e300)])
def test_samples_that_are_not_finite_are_a_fault_of_where_they_are_read(kind, value, tmp_path):
    wave = noise(2, 60).astype(np.float64)
    wave[1, 17] = value
    path = saved(tmp_path, wav(wave, kind))
    assert audio.info(path).frames == 60 and audio.read(path, 18)[0].shape == (2, 42)
    with pytest.raises(audio.Unusable, match="sample 17 is not finite"):
        audio.read(path, 10, 20)


def test_a_missing_file_is_no_fault_of_a_recording(tmp_path):
    with pytest.raises(UserError, match=r"none.wav: cannot be read \(No such file") as error:
        audio.read(tmp_path / "none.wav")
    assert not isinstance(error.value, audio.Unusable)


def test_a_missing_soundfile_is_reported_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = saved(tmp_path, b"fLaC", "a.flac")
    with pytest.raises(UserError, match=r"a\.flac: reading \.flac needs soundfile: pip install soundfile$") as error:
        audio.info(path)
    assert not isinstance(error.value, audio.Unusable)


@pytest.mark.parametrize("suffix, near", [("flac", 2 ** -15), ("ogg", 0.1), ("opus", 0.1), ("mp3", 0.1)])
def test_other_formats_are_read_by_soundfile_also_in_part(suffix, near, tmp_path):
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    wave = 0.5 * np.sin(np.arange(20_000)[None] * np.array([[0.05], [0.08]])).astype(np.float32)
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, wave.T, 16000, **(dict(format="OGG", subtype="OPUS") if suffix == "opus" else {}))
    assert audio.info(path) == (20_000, 16000, 2)
    whole, rate = audio.read(path)
    assert whole.dtype == np.float32 and rate == 16000
    np.testing.assert_allclose(whole, wave, atol=near)
    for start in (*range(0, 20_000, 1500), 19_900):
        np.testing.assert_allclose(audio.read(path, start, 500)[0], whole[:, start:start + 500], atol=1e-5)
    np.testing.assert_allclose(audio.read(path, 19_000)[0], whole[:, 19_000:], atol=1e-5)
    assert audio.read(path, 30_000, 5)[0].shape == (2, 0)
    assert audio.read(path, 7000, 0)[0].shape == (2, 0)
    for content, message in ((b"", "empty file"), (b"nonsense" * 9, "not a readable audio file")):
        with pytest.raises(audio.Unusable, match=message):
            audio.info(saved(tmp_path, content, f"bad.{suffix}"))


@pytest.mark.parametrize("suffix, seconds, most", [("mp3", 20, 2), ("ogg", 45, 30)])
def test_a_part_late_in_a_file_is_that_of_the_whole_and_little_before_it_is_decoded(suffix, seconds, most, tmp_path,
                                                                                    monkeypatch):
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    rate = 8000
    wave = 1e-4 * np.random.default_rng(0).standard_normal(seconds * rate)  # so faint that a page of ogg lasts long
    wave[-8000:] += 0.5 * np.sin(0.05 * np.arange(8000))
    path, decoded, read = tmp_path / f"a.{suffix}", [], soundfile.SoundFile.read
    soundfile.write(path, wave, rate)
    whole = audio.read(path)[0]

    def spy(self, *args, **settings):
        found = read(self, *args, **settings)
        decoded.append(len(found) / rate)
        return found
    monkeypatch.setattr(soundfile.SoundFile, "read", spy)
    last = whole.shape[1]
    for start in (*range(last - 32_000, last - 600, 1700), last - 100):
        np.testing.assert_allclose(audio.read(path, start, 500)[0], whole[:, start:start + 500], atol=1e-5)
    assert max(decoded) < most + 0.2
    decoded.clear()
    np.testing.assert_allclose(audio.read(path, 4 * rate, 500)[0], whole[:, 4 * rate:4 * rate + 500], atol=1e-5)
    assert max(decoded) < 2.2  # far from the end ogg needs no lead


@pytest.mark.parametrize("shape", [(50,), (1, 50), (2, 50)])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_written_waves_read_back_rounded_and_clipped_and_then_bit_for_bit(shape, make, tmp_path):
    wave = np.random.default_rng(1).uniform(-1.2, 1.2, shape).astype(np.float32)
    stream = io.BytesIO()
    audio.write_wav(stream, make(wave), 22050)
    path = tmp_path / "w.wav"
    audio.write_wav(path, make(wave), 22050)
    assert path.read_bytes() == stream.getvalue()
    read, rate = audio.read(path)
    assert rate == 22050
    np.testing.assert_allclose(read, np.clip(np.atleast_2d(wave), -1, 1 - 2 ** -15), rtol=0, atol=2 ** -16 + 1e-7)
    audio.write_wav(again := io.BytesIO(), read, rate)
    assert again.getvalue() == stream.getvalue()


# Resampling

def sine(frequency, rate, seconds=0.5):
    return torch.sin(2 * math.pi * frequency * torch.arange(round(rate * seconds), dtype=torch.float64) / rate)


def decibels(error, signal=0.5):
    return 10 * math.log10(error.double().square().mean().item() / signal + 1e-30)


RATES = [(8000, 16000), (16000, 24000), (44100, 16000), (48000, 16000), (16000, 8000), (22050, 16000)]


@pytest.mark.parametrize("rate, to", RATES)
def test_sines_resample_to_the_analytic_ones(rate, to):
    for share in (0.003, 0.1, 0.47, 0.8, 0.86):
        frequency = share * min(rate, to) / 2
        out = audio.resample(sine(frequency, rate).float(), rate, to)
        middle = slice(len(out) // 5, -len(out) // 5)
        assert decibels((out - sine(frequency, to))[middle]) < -60, frequency


@pytest.mark.parametrize("rate, to", [(44100, 16000), (48000, 16000), (16000, 8000)])
def test_tones_above_the_new_nyquist_frequency_vanish(rate, to):
    for frequency in np.linspace(to / 2, rate / 2 * 0.99, 6):
        out = audio.resample(sine(frequency, rate).float(), rate, to)
        assert decibels(out[len(out) // 5:-len(out) // 5]) < -60, frequency


def test_resampling_keeps_lengths_shapes_and_constants_and_equal_rates_are_left_alone():
    for rate, to in RATES:
        for length in (1, 2, 147, 1000):
            assert audio.resample(torch.ones(2, 3, length), rate, to).shape == (2, 3, -(-length * to // rate))
        middle = audio.resample(torch.ones(4000), rate, to)[500:-500]
        torch.testing.assert_close(middle, torch.ones_like(middle), atol=1e-5, rtol=0)
    assert audio.resample(torch.ones(0), 8000, 16000).shape == (0,)
    assert audio.resample(wave := torch.ones(3), 8000, 8000) is wave


@pytest.mark.parametrize("rate, to", [*RATES, (16000, 16000)])
def test_the_span_of_the_source_suffices_for_a_part(rate, to):
    wave = torch.from_numpy(noise(1, 6000)[0])
    whole = audio.resample(wave, rate, to)
    for start, length in ((0, 10), (100, 333), (1001, 1), (len(whole) - 20, 20), (len(whole) // 2, 700)):
        first, count, skip = audio.source_span(start, length, rate, to)
        assert count <= length * rate / to + 4 * 33 * max(1, rate / to) + 2 * rate / math.gcd(rate, to)
        part = audio.resample(wave[first:first + count], rate, to)[skip:skip + length]
        torch.testing.assert_close(part, whole[start:start + length], atol=1e-6, rtol=0)


def test_a_ratio_that_would_take_too_large_a_filter_is_refused():
    with pytest.raises(UserError, match="44101 to 16000 Hz: too odd a ratio"):
        audio.resample(torch.ones(10), 44101, 16000)


# Spectra

@pytest.mark.parametrize("window, hop", [(64, 16), (512, 128), (400, 160), (1024, 1024)])
def test_magnitudes_equal_an_explicit_fourier_sum(window, hop):
    wave = torch.from_numpy(noise(2, 1500))
    found = audio.stft_magnitude(wave, window, hop)
    assert found.shape == (2, -(-1500 // hop), window // 2 + 1)
    n, k = np.arange(window), np.arange(window // 2 + 1)
    taper, fourier = 0.5 - 0.5 * np.cos(2 * np.pi * n / window), np.exp(-2j * np.pi * np.outer(n, k) / window)
    padded = np.pad(wave.numpy().astype(np.float64), ((0, 0), (window, window + hop)))
    for frame in (0, 1, found.shape[1] // 2, found.shape[1] - 1):
        start = window + frame * hop - (window - hop) // 2
        expected = np.abs(padded[:, start:start + window] * taper @ fourier) * 2 / taper.sum()
        np.testing.assert_allclose(found[:, frame], expected, atol=1e-5)


def test_a_sine_reads_its_amplitude_in_every_window():
    for window in (64, 256, 2048):
        wave = 0.3 * sine(1000, 16000).float()[None]
        assert audio.stft_magnitude(wave, window, window // 4)[0].amax(1)[8].item() == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("rate, window, bins", [(16000, 1024, 40), (16000, 512, 160), (24000, 64, 64)])
def test_mel_filters_are_triangles_that_all_hear_something(rate, window, bins):
    filters = audio.mel_filters(rate, window, bins)
    assert filters.shape == (window // 2 + 1, bins) and filters.min() >= 0 and filters.max() <= 1
    assert filters.sum(0).min() >= 0.5
    peaks = (filters * torch.linspace(0, rate / 2, window // 2 + 1)[:, None]).sum(0) / filters.sum(0)
    assert (peaks.diff() > -1e-3).all()


def test_wide_mel_filters_peak_at_even_places_of_the_scale_and_sum_to_one_between_them():
    wide = audio.mel_filters(16000, 16384, 20)
    top = 2595 * math.log10(1 + 8000 / 700)
    centers = [round((700 * (10 ** (top * (i + 1) / 21 / 2595) - 1)) / (16000 / 16384)) for i in range(20)]
    np.testing.assert_allclose(wide.sum(1)[centers[0] + 1:centers[-1]], 1, atol=1e-5)
    np.testing.assert_allclose(wide.argmax(0), centers, atol=1)
    inner = audio.mel_filters(16000, 1024, 10, low=1000.0, high=2000.0)
    assert not inner[:62].any() and not inner[130:].any() and inner.any(0).all()


def test_log_mel_is_fp32_under_autocast_floored_and_has_finite_gradients():
    wave = torch.from_numpy(noise(2, 4001)).requires_grad_()
    plain = audio.log_mel(wave, 16000, 512, 160, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(audio.log_mel(wave, 16000, 512, 160, 40), plain)
        assert torch.equal(audio.mfcc(wave, 16000, 160, 512), audio.mfcc(wave, 16000, 160, 512).float())
    assert plain.shape == (2, 26, 40) and plain.dtype == torch.float32
    silence = torch.zeros(1, 3000, requires_grad=True)
    out = audio.log_mel(silence, 16000, 64, 16, 64)
    torch.testing.assert_close(out, torch.full_like(out, math.log(1e-5)))
    (out.sum() + plain.sum()).backward()
    assert torch.isfinite(silence.grad).all() and torch.isfinite(wave.grad).all() and wave.grad.any()


def test_a_tone_lights_the_bin_of_its_frequency():
    for frequency in (300, 1200, 5000):
        levels = audio.log_mel(sine(frequency, 16000).float()[None], 16000, 1024, 256, 40)[0, 15]
        mel = 2595 * math.log10(1 + frequency / 700) / (2595 * math.log10(1 + 8000 / 700)) * 41 - 1
        assert abs(levels.argmax().item() - mel) <= 1


def test_tables_first_made_under_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        audio.log_mel(torch.ones(1, 500), 7000, 98, 49, 11)
        audio.resample(torch.ones(1, 500), 7000, 7700)
    wave = torch.from_numpy(noise(1, 500)).requires_grad_()
    (audio.log_mel(wave, 7000, 98, 49, 11).sum() + audio.resample(wave, 7000, 7700).sum()).backward()
    assert wave.grad.any()


def test_cepstral_coefficients_are_cosine_sums_that_keep_energy():
    wave = torch.from_numpy(noise(2, 3000))
    mel = audio.log_mel(wave, 16000, 512, 160, 40).double().numpy()
    found = audio.mfcc(wave, 16000, 160, 512, count=13)
    assert found.shape == (2, 19, 13)
    for k in (0, 1, 12):
        expected = sum(mel[..., n] * math.cos(math.pi / 40 * (n + 0.5) * k) for n in range(40)) * math.sqrt(2 / 40)
        np.testing.assert_allclose(found[..., k], expected / (math.sqrt(2) if k == 0 else 1), atol=1e-4)
    every = audio.mfcc(wave, 16000, 160, 512, count=40).double()
    np.testing.assert_allclose(every.square().sum(-1), np.square(mel).sum(-1), rtol=1e-5)


def test_warped_cepstra_are_those_of_the_spectrum_read_elsewhere():
    torch.manual_seed(0)
    rate, bins, factors = 16_000, audio.CEPSTRUM_BINS, (0.8, 1.0, 1.25)
    cepstra = torch.randn(5, 13).double()
    order, at = torch.arange(13), (torch.arange(bins) + 0.5)[:, None]
    scale = torch.where(order == 0, 1, 2 ** 0.5) / bins ** 0.5
    dct = torch.cos(torch.pi / bins * at * order).double() * scale
    top = 2595 * np.log10(1 + rate / 2 / 700)
    for factor, warp in zip(factors, audio.cepstral_warps(factors, rate).double()):
        hertz = 700 * (10 ** (top * (np.arange(bins) + 1) / (bins + 1) / 2595) - 1)  # of the filters
        place = 2595 * np.log10(1 + factor * hertz / 700) / top * (bins + 1) - 1
        inside = torch.from_numpy(place <= bins - 0.5)
        spectrum = cepstra @ (torch.cos(torch.pi / bins * (torch.from_numpy(place)[:, None] + 0.5) * order) * scale).T
        edge = cepstra @ (torch.cos(torch.pi * order.double()) * scale)
        wanted = torch.where(inside, spectrum, edge[:, None]) @ dct
        torch.testing.assert_close(cepstra @ warp, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(warp[0], torch.eye(13).double()[0], atol=1e-5, rtol=0)  # loudness stays
    torch.testing.assert_close(audio.cepstral_warps([1.0], rate)[0], torch.eye(13), atol=1e-5, rtol=0)


def test_a_warp_undoes_that_formants_are_higher():
    """A vowel of a short vocal tract, warped by how much shorter it is, has nearly the cepstra of the long one's."""
    time = np.arange(16_000) / 16_000
    means = {}
    for factor in (0.9, 1.1):
        formants = factor * np.array([500, 1500, 2500, 3500, 4500.0])
        frequencies = np.arange(1, 60) * 120.0
        gains = np.abs(synthetic.resonances(formants[:, None], 0.8, frequencies))[0]
        wave = sum(g * np.sin(2 * np.pi * f * time + i * i) for i, (f, g) in enumerate(zip(frequencies, gains)))
        means[factor] = audio.mfcc(torch.from_numpy(wave[None].astype(np.float32)), 16_000, 320, 640)[0, 5:-5].mean(0)
    warp, = audio.cepstral_warps([1.1 / 0.9], 16_000)
    apart = [(one - means[0.9])[1:].norm() for one in (means[1.1], means[1.1] @ warp)]
    assert apart[1] < 0.6 * apart[0], apart


def test_deltas_are_the_slopes_of_fitted_lines():
    features = torch.from_numpy(noise(2, 60).reshape(2, 12, 5))
    found = audio.deltas(features)
    assert found.shape == features.shape
    line = np.polyfit(np.arange(5), features[1, 3:8].double().numpy(), 1)[0]
    np.testing.assert_allclose(found[1, 5], line, atol=1e-5)
    ramp = torch.arange(10.0)[None, :, None] * 3
    torch.testing.assert_close(audio.deltas(ramp)[:, 2:-2], torch.full((1, 6, 1), 3.0))
    assert not audio.deltas(torch.ones(1, 1, 2)).any()


# Measures and pictures

@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_spectral_loss_is_the_formula_frame_by_frame(floor):
    fake, real = (0.3 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    real[1, 2000:] = 0
    for b in range(2):
        total = 0.0
        for window in (64, 128, 256, 512, 1024, 2048):
            filters = audio.mel_filters(16_000, window, 64)
            ours, theirs = (audio.stft_magnitude(wave[b:b + 1], window, window // 4)[0] @ filters
                            for wave in (fake, real))
            frames = 0.0
            for s, t in zip(ours, theirs):
                least = max(1e-3, floor * t.max().item())
                logs = s.clamp(min=least).log() - t.clamp(min=least).log()
                frames += ((s - t).abs().sum() + math.sqrt(window / 2) * logs.norm()).item()
            total += frames / len(ours) / 64 / 6
        assert audio.spectral_loss(fake, real, 16_000, floor)[b].item() == pytest.approx(total, rel=1e-3)
    assert audio.spectral_loss(real, real, 16_000).max() < 1e-2


def test_si_sdr_knows_no_scale_and_no_offset_and_is_the_ratio_of_energies():
    target = sine(440, 16000)[None].repeat(3, 1)
    error = torch.cos(2 * math.pi * 440 * torch.arange(8000, dtype=torch.float64) / 16000)[None]  # at a right angle
    estimate = torch.cat([target[:1] + 0.1 * error, 7 * target[:1] + 0.7 * error + 3, error])
    found = audio.si_sdr(estimate, target)
    torch.testing.assert_close(found[:2], torch.tensor([20.0, 20.0]), atol=0.01, rtol=0)
    assert found[2] < -60 and audio.si_sdr(target, -target).min() > 100
    quiet = torch.zeros(1, 10, requires_grad=True)
    audio.si_sdr(quiet, torch.zeros(1, 10)).sum().backward()
    assert torch.isfinite(quiet.grad).all()


def test_a_spectrogram_shows_low_tones_at_the_bottom_and_colors_grow_ever_lighter():
    tone = sine(200, 16000).float()
    picture = audio.spectrogram(tone, 16000)
    assert picture.dtype == np.uint8 and picture.shape == (160, 63, 3)
    assert picture.sum(-1)[:, 30].argmax() > 130 and not picture[:80, 30].any()
    assert audio.spectrogram(sine(4000, 16000).float(), 16000).sum(-1)[:, 30].argmax() < 50
    assert not audio.spectrogram(torch.zeros(1000), 8000, height=32).any()

    def lightness(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.divide(color, 255)]
        luminance = np.dot(linear, (0.2126, 0.7152, 0.0722))
        return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance

    steps = np.diff([lightness(color) for color in audio.COLORS])
    assert steps.min() > 0.85 * steps.mean() and steps.max() < 1.15 * steps.mean()  # CIE L*, evenly spaced
