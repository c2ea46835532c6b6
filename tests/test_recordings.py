"""Audio files, resampling and spectra against analytic answers, datasets, token caches."""
import io
import math
import os
import pickle
import struct
import sys
import wave as wavfile

import numpy as np
import pytest
import torch
from helpers import write_files
from torch.testing import assert_close

from common import order, recordings, synthetic
from common.config import UserError
from common.recordings import Recordings, Syllables, Unusable


def noise(channels, frames, seed=0):
    """float32 (C, T), rounded to 16 bits."""
    samples = np.random.default_rng(seed).integers(-32_000, 32_000, (channels, frames))
    return samples.astype(np.float32) / 32768


def wav(wave, rate=16000):
    """A WAV file of 16-bit PCM as bytes, of a wave (C, T)."""
    stream = io.BytesIO()
    with wavfile.open(stream, "wb") as file:
        file.setparams((len(wave), 2, rate, 0, "NONE", ""))
        file.writeframes((wave.T * 32768).astype(np.int16).tobytes())
    return stream.getvalue()


@pytest.fixture
def soundfile():
    return pytest.importorskip("soundfile", reason="soundfile is not installed")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.wav"


# Files

@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_wav_needs_no_package_and_parts_are_slices(channels, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)  # makes its import fail
    wave = noise(channels, 101)
    path.write_bytes(wav(wave, 11025))
    for start, stop in ((0, math.inf), (33, 53), (95, 145), (101, 101)):
        found, rate, frames = recordings.read(path, start, stop)
        assert (found.dtype, rate, frames) == (np.float32, 11025, 101)
        np.testing.assert_array_equal(found, wave[:, start:min(stop, 101)])


@pytest.mark.parametrize("name, kind, subtype, near", [
    ("a.wav", "WAVEX", "PCM_24", 1e-6),
    ("a.wav", "WAV", "FLOAT", 1e-6),
    ("a.wav", "WAV", "ULAW", 0.02),
    ("a.wav", "WAV", "ALAW", 0.02),
    ("a.wav", "WAV", "IMA_ADPCM", 0.2),
    ("a.wav", "WAV", "MS_ADPCM", 0.1),
    ("a.wav", "WAVEX", "ULAW", 0.02),
    ("a.wav", "RF64", "PCM_16", 2.0 ** -15),
    ("a.flac", "FLAC", "PCM_16", 2.0 ** -15),
    ("a.ogg", "OGG", "VORBIS", 0.1),
    ("a.opus", "OGG", "OPUS", 0.1),
    ("a.mp3", "MP3", "MPEG_LAYER_III", 0.1),
])
def test_other_formats_are_read_by_soundfile_also_in_part(
        name, kind, subtype, near, soundfile, tmp_path):
    path = tmp_path / name
    rate = 16000
    time = np.arange(12 * rate)
    wave = 0.5 * np.sin([0.05 * time, 0.08 * time])
    soundfile.write(path, wave.T, rate, format=kind, subtype=subtype)
    whole, *about = recordings.read(path)
    assert about == [rate, whole.shape[1]]
    np.testing.assert_allclose(whole[:, :len(time) - 500], wave[:, :-500], atol=near)

    for start in range(0, 12 * rate - 500, 15_000):  # mp3 and ogg alone are wrong after a seek
        found, _, _ = recordings.read(path, start, start + 500)
        np.testing.assert_allclose(found, whole[:, start:start + 500], atol=1e-5)


@pytest.mark.parametrize("kind, subtype", [
    ("WAV", "ULAW"), ("WAV", "IMA_ADPCM"), ("WAVEX", "ALAW"), ("RF64", "PCM_16"),
])
def test_without_soundfile_no_other_coding_is_taken_for_pcm(
        kind, subtype, soundfile, path, monkeypatch):
    soundfile.write(path, noise(2, 5000).T, 8000, format=kind, subtype=subtype)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Unusable, match=r"a\.wav: not a complete WAV .* pip install soundfile"):
        recordings.read(path)


GOOD = wav(noise(1, 100))  # the length of its samples is at byte 40


def patched(place, value):
    return GOOD[:place] + struct.pack("<I", value) + GOOD[place + 4:]


@pytest.mark.parametrize("content, expected", [
    (GOOD[:-1], 99),
    (patched(40, 2 ** 32 - 1), 100),
    (patched(4, 99), 100),
])
def test_a_wav_file_that_was_cut_or_streamed_is_read_by_soundfile_up_to_its_end(
        content, expected, soundfile, path, monkeypatch):
    path.write_bytes(content)
    found, _, _ = recordings.read(path)
    np.testing.assert_array_equal(found, noise(1, 100)[:, :expected])
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Unusable, match=r"a\.wav: not a complete WAV .* pip install soundfile"):
        recordings.read(path)


@pytest.mark.parametrize("content, message", [
    (b"", "not a readable audio file"),
    (b"\x89PNG" + bytes(40), "not a readable audio file"),
    (patched(24, 999), "999 Hz, expected 1000 to 768000"),
])
def test_what_is_wrong_with_a_file_follows_its_name(content, message, soundfile, path):
    path.write_bytes(content)
    with pytest.raises(Unusable, match=rf"a\.wav: {message}"):
        recordings.read(path)


@pytest.mark.parametrize("value", [np.nan, 101])
def test_floats_far_beyond_full_scale_are_unusable(value, soundfile, path):
    soundfile.write(path, [0.1, value], 16000, subtype="FLOAT")
    with pytest.raises(Unusable, match=r"a\.wav: samples that are not finite, or above 100 times"):
        recordings.read(path)


def test_a_named_pipe_is_no_file_to_wait_for(path):
    os.mkfifo(path)
    with pytest.raises(Unusable, match=r"a\.wav: not a file"):
        recordings.read(path)


def test_written_waves_read_back_rounded_and_clipped_and_then_bit_for_bit(path):
    wave = torch.linspace(-1.2, 1.2, 50)
    recordings.write_wav(path, wave, 22050)
    found, rate, _ = recordings.read(path)
    assert rate == 22050
    expected = wave.clamp(-1, 1 - 2 ** -15)
    np.testing.assert_allclose(found, expected[None], atol=2 ** -16 + 1e-7)
    stream = io.BytesIO()
    recordings.write_wav(stream, torch.from_numpy(found[0]).requires_grad_(), rate)
    assert stream.getvalue() == path.read_bytes()


# Resampling and spectra

def sine(frequency, rate):
    time = torch.arange(rate // 2, dtype=torch.float64) / rate
    return torch.sin(2 * math.pi * frequency * time)


def decibels(error):
    """The power of an error, but for its ends, relative to a sine."""
    middle = error[len(error) // 5:-len(error) // 5]
    return 10 * math.log10(middle.square().mean().item() / 0.5 + 1e-30)


RATE_PAIRS = pytest.mark.parametrize("rate, to", [(16000, 24000), (44100, 16000), (16000, 8000)])


@RATE_PAIRS
def test_resampling_keeps_sines_below_the_nyquist_frequency_and_no_others(rate, to):
    for fraction in (0.003, 0.47, 0.86):
        tone = fraction * min(rate, to) / 2
        resampled = recordings.resample(sine(tone, rate), rate, to)
        assert decibels(resampled - sine(tone, to)) < -90
    for tone in np.arange(to / 2, rate / 2, 1500):
        assert decibels(recordings.resample(sine(tone, rate), rate, to)) < -90


@RATE_PAIRS
def test_a_resampled_wave_is_as_long_and_its_ends_do_not_meet(rate, to):
    for length in (0, 1, 147, 1000):
        resampled = recordings.resample(torch.ones(2, 3, length), rate, to)
        assert resampled.shape == (2, 3, math.ceil(length * to / rate))
        assert resampled.dtype == torch.float32
    click = recordings.resample(torch.eye(1, 4000)[0], rate, to)
    assert click[0] > 0.3
    assert click[len(click) // 2:].abs().max() < 1e-4


@pytest.mark.parametrize("window, hop", [(64, 16), (400, 160), (1024, 1024)])
def test_magnitudes_equal_an_explicit_fourier_sum(window, hop):
    wave = noise(2, 1500)
    n = np.arange(window)
    k = n[:window // 2 + 1]
    taper = 0.5 - 0.5 * np.cos(2 * np.pi * n / window)
    fourier = np.exp(-2j * np.pi * np.outer(n, k) / window)
    padded = np.pad(wave, ((0, 0), ((window - hop) // 2, window)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window, 1)
    frames = frames[:, ::hop][:, :math.ceil(1500 / hop)]
    expected = np.abs(frames * taper @ fourier) * 2 / taper.sum()
    found = recordings.stft_magnitude(torch.from_numpy(wave), window, hop)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_each_mel_filter_reaches_a_frequency_where_they_are_narrower_than_its_steps():
    filters = recordings.mel_filters(16000, 512, 160)
    assert filters.sum(0).min() >= 0.5


def test_mel_filters_are_triangles_evenly_spaced_in_mel():
    filters = recordings.mel_filters(16000, 16384, 20)
    ratio = (1 + 8000 / 700) ** (1 / 21)
    hertz = 700 * (ratio ** np.arange(1, 21) - 1)
    centers = hertz / 16000 * 16384
    np.testing.assert_allclose(filters.argmax(0), centers, atol=1)
    between = filters.sum(1)[math.ceil(centers[0]):int(centers[-1])]
    np.testing.assert_allclose(between, 1, atol=1e-5)


def test_log_mel_is_fp32_under_autocast_and_has_gradients():
    with torch.inference_mode():  # filters first made here can be trained with
        recordings.log_mel(torch.ones(1, 500), 7000, 98, 49, 11)
    wave = torch.from_numpy(noise(2, 4001)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = recordings.log_mel(wave, 7000, 98, 49, 11)
    mel = recordings.stft_magnitude(wave, 98, 49) @ recordings.mel_filters(7000, 98, 11)
    assert_close(found, mel.log())
    found.sum().backward()
    assert wave.grad.any()


def test_log_mel_of_silence_is_its_floor_and_has_finite_gradients():
    silence = torch.zeros(1, 3000, requires_grad=True)
    found = recordings.log_mel(silence, 16000, 64, 16, 64)
    assert_close(found, torch.full_like(found, math.log(1e-5)))
    found.sum().backward()
    assert torch.isfinite(silence.grad).all()


def test_a_spectrogram_shows_low_tones_at_the_bottom_and_faint_ones_darker():
    tones = 0.3 * sine(200, 16000) + 0.003 * sine(4000, 16000)
    picture = recordings.spectrogram(tones, 16000)
    assert picture.dtype == np.uint8
    assert picture.shape == (160, 63, 3)
    assert picture[130:].max() == 255
    assert not picture[60:80, 30].any()
    faint = picture[:50, 30].max(0)
    assert abs(faint - [255, 127, 0]).max() < 50  # 40 of 80 dB
    assert not recordings.spectrogram(torch.zeros(1000), 8000).any()


def test_si_sdr_ignores_scale_and_offset_and_is_the_ratio_of_energies():
    target = sine(500, 16000)[None]
    error = target.roll(8, 1)  # a quarter of a period later: orthogonal
    for estimate in (target + 0.1 * error, 7 * target + 0.7 * error + 3):
        found = recordings.si_sdr(estimate, target)
        assert_close(found, torch.tensor([20.0]), atol=0.01, rtol=0)
    assert recordings.si_sdr(target, -target) > 100
    silence = torch.zeros(2, 10)
    assert recordings.si_sdr(silence, silence).tolist() == [0, 0]


# Datasets

RATES = (16000, 8000, 22050)


def folder(path, speakers=3, each=4):
    """Recordings of several lengths, rates and channels: voice_S/take_N.wav, with NAME.txt."""
    for i in range(speakers * each):
        name = f"voice_{i // each}/take_{i % each}"
        wave = noise(1 + i % 2, 2000 + 300 * i, i)
        text = f" say {i} ü\n".encode()
        write_files(path, {f"{name}.txt": text, f"{name}.wav": wav(wave, RATES[i % 3])})
    return path


def test_a_folder_tree_is_read_in_the_order_of_names_mixed_down_and_resampled(tmp_path):
    dataset = Recordings(folder(tmp_path), 16000)
    assert len(dataset) == 12
    assert dataset.name(4) == "voice_1/take_0.wav"
    assert dataset.has_texts
    assert [dataset.text(i) for i in range(12)] == [f"say {i} ü" for i in range(12)]
    assert dataset.speakers == ["voice_0", "voice_1", "voice_2"]
    for i in (0, 1, 7):
        mono = noise(1 + i % 2, 2000 + 300 * i, i).mean(0)
        expected = recordings.resample(torch.from_numpy(mono), RATES[i % 3], 16000)
        assert torch.equal(dataset.wave(i), expected)


def test_speakers_are_found_by_a_pattern(tmp_path):
    folder(tmp_path)
    assert Recordings(tmp_path, 16000, pattern="(.)[.]").speakers == ["0", "1", "2", "3"]
    for pattern in ("_(", "take", "_(1)?"):
        with pytest.raises(UserError, match=r"--speaker_pattern .*: finds no speaker"):
            Recordings(tmp_path, 16000, pattern=pattern)


def test_speakers_and_texts_are_found_in_folders_of_librispeech(tmp_path):
    write_files(tmp_path, {
        "1/8/1-8-0.wav": GOOD, "1/8/1-8-1.wav": GOOD, "7/8/7-8-0.wav": GOOD,
        "1/8/1-8.trans.txt": b"1-8-0 NORTHANGER ABBEY\n1-8-1  THIS LITTLE WORK\n\n",
        "7/8/7-8.trans.txt": b"\n"})
    dataset = Recordings(tmp_path, 16000)
    assert dataset.texts == ["NORTHANGER ABBEY", "THIS LITTLE WORK", ""]
    assert dataset.speakers == ["1", "7"]


# name: (files, {recording: (transcript, speaker)})
LAYOUTS = {
    "LibriTTS": (
        {"train/84/121/84_121_0_1.wav": GOOD, "train/84/121/84_121_0_1.original.txt": b"Dr. A.",
         "train/84/121/84_121_0_1.normalized.txt": b"Doctor A.",
         "train/9/121/9_121_0_2.wav": GOOD, "train/9/121/9_121_0_2.original.txt": b"Only this.",
         "train/84/121/84_121.book.tsv": b"0\tDr. A.\t1"},
        {"train/84/121/84_121_0_1.wav": ("Doctor A.", "84"),
         "train/9/121/9_121_0_2.wav": ("Only this.", "9")}),
    "VCTK": (
        {"wav48/p225/p225_001_mic1.flac": GOOD, "wav48/p225/p225_001_mic2.flac": GOOD,
         "wav48/p226/p226_001.wav": GOOD, "txt/p225/p225_001.txt": b"Please call.",
         "txt/p226/p226_001.txt": b"Ask her.", "speaker-info.txt": "ID é".encode("cp1252")},
        {"wav48/p225/p225_001_mic1.flac": ("Please call.", "p225"),
         "wav48/p225/p225_001_mic2.flac": ("Please call.", "p225"),
         "wav48/p226/p226_001.wav": ("Ask her.", "p226")}),
    "the same names in each folder of two trees": (
        {"wav/ann/001.wav": GOOD, "wav/bob/001.wav": GOOD, "text/ann/001.TXT": b"of ann",
         "text/bob/001.txt": b"of bob"},
        {"wav/ann/001.wav": ("of ann", "ann"), "wav/bob/001.wav": ("of bob", "bob")}),
    "LJSpeech": (
        {"LJ/wavs/LJ1-1.wav": GOOD, "LJ/wavs/LJ1-2.wav": GOOD, "LJ/wavs/LJ1-3.wav": GOOD,
         "LJ/metadata.csv": 'LJ1-1|in 1455, "so"|in fourteen, "so"\nLJ1-2|a\u2028b\r\n\nx|y|z\n'
         'LJ1-3|c|d'.encode()},
        {"LJ/wavs/LJ1-1.wav": ('in fourteen, "so"', "wavs"),
         "LJ/wavs/LJ1-2.wav": ("a\u2028b", "wavs"), "LJ/wavs/LJ1-3.wav": ("d", "wavs")}),
    "Common Voice": (
        {"en/clips/cv_1.mp3": GOOD, "en/clips/cv_2.MP3": GOOD,
         "en/validated.tsv": b"client_id\tpath\tsentence_id\tsentence\tage\r\n"
         b'f0\tcv_1.mp3\t77\tSay "A".\t\r\nf1\tcv_2.mp3\t78\tSay B.\tten\r\n',
         "en/invalidated.tsv": b"client_id\tpath\tsentence\nf2\tcv_2.mp3\twrong"},
        {"en/clips/cv_1.mp3": ('Say "A".', "f0"), "en/clips/cv_2.MP3": ("Say B.", "f1")}),
    "capitals": (
        {"1/8/1-8-0.WAV": GOOD, "1/8/1-8.TRANS.TXT": b"1-8-0 ABBEY", "2/a.wav": GOOD,
         "2/a.NORMALIZED.TXT": b"b"},
        {"1/8/1-8-0.WAV": ("ABBEY", "1"), "2/a.wav": ("b", "2")}),
    "one transcript of two files": (
        {"a.wav": GOOD, "a.flac": GOOD, "b.wav": GOOD, "a.txt": b"first", "b.wav.txt": b"second"},
        {"a.flac": ("first", ""), "a.wav": ("first", ""), "b.wav": ("second", "")}),
    "names that have endings themselves": (
        {"a.normalized.wav": GOOD, "a.normalized.txt": b"of it", "b_mic1.wav": GOOD,
         "b_mic1.txt": b"near", "b_mic2.wav": GOOD, "b_mic2.txt": b"far", "c.wav": GOOD,
         "c.normalized.txt": b"later", "c.txt": b"own"},
        {"a.normalized.wav": ("of it", ""), "b_mic1.wav": ("near", ""), "b_mic2.wav": ("far", ""),
         "c.wav": ("own", "")}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transcripts_and_speakers_are_found_in_the_layouts_of_known_corpora(layout, tmp_path):
    files, expected = LAYOUTS[layout]
    dataset = Recordings(write_files(tmp_path, files), 16000)
    found = zip(dataset.names, zip(dataset.texts, dataset.speaker_of))
    assert dict(found) == expected
    assert dataset.left_out == ""


def test_a_pattern_for_speakers_wins_over_a_table(tmp_path):
    files, _ = LAYOUTS["Common Voice"]
    dataset = Recordings(write_files(tmp_path, files), 16000, pattern=r"(\d)\.")
    assert dataset.speaker_of == ["1", "2"]


@pytest.mark.parametrize("files, line", [
    ({}, "2 recordings, no transcripts"),
    ({"s1/001.lab": b"", "s2/001.lab": b"", "info.md": b"", "._a.txt": b"\0"},
     "2 recordings, no transcripts. {}: left out are files of kinds that are not read "
     "(2 .lab, 1 .md)"),
    # Of several recordings of one name, a transcript elsewhere may be of any.
    ({"s1/001.txt": b"a", "s3/001.txt": b"b"},
     "2 recordings, 1 transcripts. {}: left out are files of kinds that are not read (1 .txt)"),
    ({"s1/001.txt": b"a", "s2/001.txt": b" \n"}, "2 recordings, 1 transcripts"),
])
def test_how_many_recordings_have_no_transcript_is_said_and_what_was_not_understood(
        files, line, tmp_path):
    write_files(tmp_path, {"s1/001.wav": GOOD, "s2/001.wav": GOOD, **files})
    dataset = Recordings(tmp_path, 16000)
    assert dataset.left_out == line.format(tmp_path)
    assert dataset.text(1) == ""


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name, text", [("8.trans.txt", "0 über\n1 so"), ("0.txt", "über\n")])
def test_a_byte_order_mark_is_no_part_of_the_first_line(name, text, encoding, tmp_path):
    write_files(tmp_path, {"0.wav": GOOD, name: text.encode(encoding)})
    assert Recordings(tmp_path, 16000).texts == ["über"]


@pytest.mark.parametrize("name", ["a.txt", "x.trans.txt", "metadata.csv", "validated.tsv"])
def test_a_transcript_in_another_encoding_is_refused_by_name(name, tmp_path):
    write_files(tmp_path, {"a.wav": GOOD, name: "a|über".encode("cp1252")})
    with pytest.raises(UserError, match=rf"{tmp_path}/{name}: not text in UTF-8.*save it as UTF-8"):
        Recordings(tmp_path, 16000)


def test_linked_folders_are_entered_once_and_links_that_lead_nowhere_are_no_recordings(tmp_path):
    write_files(tmp_path / "disk", {"b/1.wav": GOOD, "b/1.txt": b"one"})
    speech = write_files(tmp_path / "speech", {"a/0.wav": GOOD, "a/0.txt": b"zero"})
    for name, target in {
        "b": tmp_path / "disk/b",
        "c": tmp_path / "disk/b",
        "a/cycle": speech,
        "x.wav": speech / "x.wav",
        "x.txt": speech / "x.txt",
        "y.wav": tmp_path / "nowhere",
    }.items():
        (speech / name).symlink_to(target)
    dataset = Recordings(speech, 16000)
    assert dataset.names == ["a/0.wav", "b/1.wav"]
    assert dataset.texts == ["zero", "one"]
    assert dataset.check() == (0, 2, [])
    assert len(dataset.fingerprint()["digest"]) == 16


def test_a_fingerprint_changes_with_the_data_and_the_rate_alone(tmp_path):
    def fingerprint(name, rate=16000, **settings):
        return Recordings(tmp_path / name, rate, **settings).fingerprint()

    folder(tmp_path / "a")
    seen = [fingerprint("a")]
    assert fingerprint("a", 24000) not in seen
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint("b", crop=7, hop_length=5) in seen
    for name, content in (
            ("voice_0/take_0.txt", b"another text"),
            ("voice_0/take_0.wav", wav(noise(1, 2000, 99))),
            ("voice_0/take_4.wav", GOOD)):
        write_files(tmp_path / "b", {name: content})
        assert fingerprint("b") not in seen
        seen.append(fingerprint("b"))


@pytest.mark.parametrize("rate", [16000, 24000, 11025])
def test_crops_are_slices_of_the_whole_and_little_more_is_decoded(rate, path, monkeypatch):
    path.write_bytes(wav(noise(2, 100_000)))
    dataset = Recordings(path.parent, rate, hop_length=100)
    whole = dataset.wave(0)
    counts = []
    plain = dataset.read

    def read(index, start, stop):
        counts.append(stop - start)
        return plain(index, start, stop)
    monkeypatch.setattr(dataset, "read", read)
    for length, fraction in ((300, 0), (512, 0.7), (400, 0.9999)):
        starts = (len(whole) - length) // 100 + 1
        start = int(fraction * starts) * 100
        crop = dataset.wave(0, length, fraction)
        assert_close(crop, whole[start:start + length], atol=2e-5, rtol=0)
    assert 0 < sum(counts) < 12_000
    assert torch.equal(dataset.wave(0, 10 ** 6, 0.5), whole)


@pytest.mark.parametrize("make", [
    lambda path: Recordings(folder(path), 16000, crop=2500, hop_length=200),
    lambda path: Syllables(9, crop=2500, hop_length=200),
])
def test_crops_begin_at_frames_chosen_at_random_or_in_the_middle(make, tmp_path):
    dataset = pickle.loads(pickle.dumps(make(tmp_path)))  # as a worker gets it
    windows = dataset.wave(8).unfold(0, 2500, 200)  # at all multiples of hop_length
    words = order.random_words(np.arange(300), 0)
    batch, _ = dataset.fetch(np.full(300, 8), words)
    places = torch.cdist(batch["wave"], windows).argmin(1)
    assert_close(windows[places], batch["wave"], atol=2e-5, rtol=0)
    assert len(places.unique()) == len(windows)
    alone, _ = dataset.fetch([8], words[5:6])
    assert torch.equal(alone["wave"][0], batch["wave"][5])
    middle, _ = dataset.fetch([8])
    assert_close(middle["wave"][0], windows[len(windows) // 2], atol=2e-5, rtol=0)


def test_silence_follows_a_recording_shorter_than_a_crop(tmp_path):
    dataset = Recordings(folder(tmp_path), 16000, crop=2500)
    batch, usable = dataset.fetch(np.array([3, 0]))
    assert usable.all()
    assert batch["length"].tolist() == [2500, 2000]
    assert torch.equal(batch["wave"][1, :2000], dataset.wave(0))
    assert not batch["wave"][1, 2000:].any()


@pytest.mark.parametrize("speakers, attribute", [(19, "names"), (20, "speaker_of")])
def test_splits_are_chosen_by_name_and_from_20_speakers_on_by_speaker(
        speakers, attribute, tmp_path):
    dataset = Recordings(folder(tmp_path, speakers), 16000)
    keys = getattr(dataset, attribute)
    for name in ("train", "validation", "test"):
        found = dataset.split(name, 0.3, 0.2, seed=1)
        assert found.tolist() == order.split_keys(keys, name, 0.3, 0.2, seed=1).tolist()


def test_unusable_recordings_are_passed_over_by_name_and_more_than_five_are_refused(tmp_path):
    files = {f"{i}.wav": wav(noise(1, 1000, i)) for i in range(8)}
    short = wav(noise(1, 50))
    files |= {"2.wav": wav(noise(1, 1000), 999), "4.wav": short, "._5.wav": b""}
    dataset = Recordings(write_files(tmp_path, files), 16000, crop=600, hop_length=51)
    assert len(dataset) == 8
    batch, usable = dataset.fetch(np.arange(2, 5))
    assert usable.tolist() == [False, True, False]
    assert not batch["wave"][2].any()
    faults = [f"{tmp_path}/2.wav: 999 Hz, expected 1000 to 768000",
              f"{tmp_path}/4.wav: 50 samples at 16000 Hz, less than a frame of 51"]
    assert dataset.check() == (2, 8, faults)
    indices, waves = dataset.load_usable(np.arange(2, 4))
    assert indices == [3]
    assert torch.equal(waves[0], dataset.wave(3))

    write_files(tmp_path, {"5.wav": short, "6.wav": short, "7.wav": short})
    assert dataset.check()[:2] == (5, 8)
    write_files(tmp_path, {"1.wav": short})
    with pytest.raises(UserError, match=r"6 of 8 samples cannot be used: .*1\.wav: 50 samples"):
        dataset.check()


def test_a_folder_without_usable_recordings_is_refused(path):
    with pytest.raises(UserError, match=r"no such folder, or no \.wav, \.flac, .* below it"):
        Recordings(path.parent, 16000)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="1 of 1 samples cannot be used"):
        Recordings(path.parent, 16000).check()


def test_syllables_are_a_dataset_at_any_rate():
    waves, records = synthetic.syllables(range(9))
    dataset = Syllables(9)
    slower = Syllables(9, rate=6000)
    assert dataset.check() == (0, 9, [])
    assert dataset.has_texts
    assert dataset.records(np.arange(9)) == records
    for i, (wave, record) in enumerate(zip(waves, records)):
        assert dataset.text(i) == record["text"]
        assert dataset.speaker_of[i] == str(record["speaker"])
        dataset.wave(i).zero_()  # a copy
        np.testing.assert_array_equal(dataset.wave(i), wave)
        resampled = recordings.resample(torch.from_numpy(wave), 8000, 6000)
        assert torch.equal(slower.wave(i), resampled)


def test_the_fingerprint_of_syllables_is_of_their_number_and_rate():
    fingerprint = Syllables(30, crop=7).fingerprint()
    assert fingerprint == Syllables(30).fingerprint()
    assert fingerprint != Syllables(40).fingerprint()
    assert fingerprint != Syllables(30, rate=6000).fingerprint()


# Tokens

def codes_of(index):
    return np.full((index % 5 + 1, 3), 100 * index)


def cached(folder, count, key, unusable=(), failing=None):
    """(error or "", recordings encoded in this process, those without tokens) of a token cache."""
    encoded = []

    def encode(index):
        if index == failing:
            raise UserError(f"recording {index}: out of order")
        if index in unusable:
            raise Unusable(f"recording {index}")
        encoded.append(index)
        return codes_of(index)

    try:
        cache = recordings.token_cache(folder, Syllables(count), {"codec": key}, encode, "tokens")
    except UserError as error:
        return str(error), encoded, getattr(error, "relayed", False)
    for index in range(count):
        expected = codes_of(index)[:0] if index in unusable else codes_of(index)
        assert cache[index].dtype == np.uint16
        np.testing.assert_array_equal(cache[index], expected)
    return "", encoded, [index for index, tokens in enumerate(cache) if not len(tokens)]


def cached_again(folder):
    calls = [(1, "a"), (20, "a", (), 19), (20, "a"), (20, "a"), (20, "b")]
    return [cached(folder, *call) for call in calls]


def test_ranks_share_the_work_of_a_cache_and_after_an_error_what_was_done_is_kept(
        tmp_path, on_ranks):
    alone = cached_again(tmp_path / "one")
    ranks = on_ranks(2, cached_again, tmp_path / "two")
    counts = []
    for results in (alone, *ranks):
        errors = [error for error, _, _ in results]
        assert errors == ["", "recording 19: out of order", "", "", ""]
        counts.append([len(encoded) for _, encoded, _ in results])
    assert [results[1][2] for results in ranks] == [True, False]  # only the rank it is of prints
    assert counts[0] == [1, 19, 1, 0, 20]
    assert np.add(*counts[1:]).tolist() == counts[0]
    assert counts[1][4] == counts[2][4] == 10


@pytest.mark.parametrize("count, unusable", [(300, [0, 150, 151]), (20, [3])])
def test_a_recording_that_cannot_be_encoded_has_no_tokens(count, unusable, tmp_path):
    error, encoded, empty = cached(tmp_path, count, "a", unusable)
    assert not error
    assert empty == unusable
    assert len(encoded) == count - len(unusable)


def test_any_bytes_of_a_part_of_a_cache_may_be_damaged(tmp_path):
    rng = np.random.default_rng(0)
    cached(tmp_path, 20, "a")
    [path] = tmp_path.rglob("19.npz")
    good = path.read_bytes()
    made_anew = 0
    for _ in range(100):
        content = np.frombuffer(good, np.uint8).copy()
        places = rng.integers(len(content), size=rng.integers(1, 9))
        content[places] = rng.integers(256, size=len(places))
        path.write_bytes(content[:rng.integers(len(content) // 2, 2 * len(content))].tobytes())
        error, encoded, _ = cached(tmp_path, 20, "a")  # compares the tokens
        assert not error
        made_anew += encoded == [19]
    assert made_anew > 80


