"""Reading audio files, and datasets of recordings."""
import math
import struct
import sys

import numpy as np
import pytest
import torch
from helpers import wav, write_files
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

from common import loader, order
from common.config import UserError
from common.data import recordings, sounds, synthetic
from common.data.files import Unusable
from common.data.recordings import Recordings, Syllables


def noise(channels, frames, seed=0):
    """float32 (C, T), rounded to 16 bits."""
    samples = np.random.default_rng(seed).integers(-32_000, 32_000, (channels, frames))
    return samples.astype(np.float32) / 32768


@pytest.fixture
def soundfile():
    return pytest.importorskip("soundfile")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.wav"


# Files

@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_wav_needs_no_package_and_parts_are_slices(channels, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)  # makes importing it fail
    wave = noise(channels, 101)
    path.write_bytes(wav(wave, 11025))
    for start, stop in ((0, math.inf), (33, 53), (95, 145)):
        found, rate, frames = recordings.read(path, start, stop)
        assert (found.dtype, rate, frames) == (np.float32, 11025, 101)
        assert_array_equal(found, wave[:, start:min(stop, 101)])


@pytest.mark.parametrize("name, kind, subtype, near", [
    ("a.wav", "WAVEX", "PCM_24", 1e-6),
    ("a.wav", "WAV", "IMA_ADPCM", 0.2),
    ("a.flac", "FLAC", "PCM_16", 2.0 ** -15),
    ("a.aiff", "AIFF", "PCM_24", 1e-6),
    ("a.au", "AU", "ULAW", 0.05),
    ("a.ogg", "OGG", "VORBIS", 0.1),
    ("a.mp3", "MP3", "MPEG_LAYER_III", 0.1),
])
def test_other_formats_are_read_by_soundfile_also_in_part(
        name, kind, subtype, near, soundfile, tmp_path):
    path = tmp_path / name
    time = np.arange(200_000)
    wave = 0.5 * np.sin([0.05 * time, 0.08 * time])
    soundfile.write(path, wave.T, 16000, format=kind, subtype=subtype)
    whole, *about = recordings.read(path)
    assert about == [16000, whole.shape[1]]
    assert_allclose(whole[:, :199_500], wave[:, :-500], atol=near)

    for start in range(0, 190_000, 40_000):  # only mp3 and ogg are inexact after a seek
        found, _, _ = recordings.read(path, start, start + 500)
        assert_allclose(found, whole[:, start:start + 500], atol=1e-5)


GOOD = wav(noise(1, 100))  # byte 40 begins the size of the sample data


def patched(place, value):
    return GOOD[:place] + struct.pack("<I", value) + GOOD[place + 4:]


@pytest.mark.parametrize("content, expected", [
    (GOOD[:-1], 99),
    (patched(40, 2 ** 32 - 1), 100),
])
def test_a_wav_file_that_was_cut_or_streamed_is_read_by_soundfile_up_to_its_end(
        content, expected, soundfile, path, monkeypatch):
    path.write_bytes(content)
    found, _, _ = recordings.read(path)
    assert_array_equal(found, noise(1, 100)[:, :expected])
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Unusable, match=r"a\.wav: .* complete WAV .*: pip install soundfile"):
        recordings.read(path)


def test_a_soundfile_that_does_not_import_gives_its_own_error_and_no_file_is_blamed(
        path, monkeypatch):
    path.write_bytes(GOOD[:-1])
    write_files(path.parent, {"soundfile.py": b"raise OSError('sndfile library not found')"})
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "soundfile", raising=False)
    with pytest.raises(Unusable, match=r"install soundfile.*sndfile library not found") as error:
        recordings.read(path)
    assert "not a readable" not in str(error.value)


@pytest.mark.parametrize("content, message", [
    (b"", r"cannot be read \(LibsndfileError: .* Format not recognised"),
    ([0.1, 1e38], r"samples are not finite, or beyond 4e\+09"),
    (patched(24, 999), "999 Hz, expected 1000 to 768000"),
    (None, "not a file"),
    ([0.1, np.nan], "samples are not finite"),
])
def test_what_is_wrong_with_a_file_follows_its_name(content, message, soundfile, path):
    if isinstance(content, list):
        soundfile.write(path, content, 16000, subtype="FLOAT")
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(Unusable, match=rf"a\.wav: {message}"):
        recordings.read(path)


def test_written_waves_read_back_rounded_and_clipped(path):
    wave = torch.linspace(-1.2, 1.2, 50)
    sounds.write_sound(wave, 22050, path)
    found, rate, _ = recordings.read(path)
    assert rate == 22050
    expected = wave.clamp(-1, 1 - 2 ** -15)
    assert_allclose(found, expected[None], atol=2 ** -16 + 1e-7)


# Datasets

RATES = (16000, 8000, 22050)


def folder(path):
    """Write voice_S/take_N.wav with various lengths, rates and channel counts, each with a .txt."""
    for i in range(12):
        name = f"voice_{i // 4}/take_{i % 4}"
        wave = noise(1 + i % 2, 2000 + 300 * i, i)
        text = f" say {i} ü\n".encode()
        write_files(path, {f"{name}.txt": text, f"{name}.wav": wav(wave, RATES[i % 3])})
    return path


def test_a_folder_tree_is_read_in_the_order_of_names_mixed_down_and_resampled(tmp_path):
    dataset = Recordings(folder(tmp_path), 16000)
    assert len(dataset) == 12
    assert dataset.names[4] == "voice_1/take_0.wav"
    assert [dataset.texts[i] for i in range(12)] == [f"say {i} ü" for i in range(12)]
    assert set(dataset.speaker_of) == {"voice_0", "voice_1", "voice_2"}
    for i in (0, 1, 7):
        mono = noise(1 + i % 2, 2000 + 300 * i, i).mean(0)
        mono = as_loud(torch.from_numpy(mono))
        expected = recordings.resample(mono, RATES[i % 3], 16000)
        assert_close(dataset.wave(i), expected)


def test_channels_are_mixed_down_which_is_said_once_unless_they_cancel_out(tmp_path, capsys):
    left = noise(1, 3000)[0]
    hum = 0.02 * noise(1, 3000, 1)[0]  # all that mixing down would leave
    alike = wav(np.stack([left, 0.5 * left]), 8000)
    opposite = wav(np.stack([0.5 * left, hum - 0.45 * left]), 8000)
    files = {"a.wav": alike, "b.wav": opposite, "c.wav": alike, "d.wav": opposite}
    dataset = Recordings(write_files(tmp_path, files), 8000)
    for i in range(4):
        assert_close(dataset.wave(i), dataset.wave(0), atol=1e-3, rtol=0)
    err = capsys.readouterr().err
    assert err.count("recordings with several channels are mixed down") == 1
    assert err.count("channels that cancel out are not mixed; the loudest is used") == 1
    recordings.mix_down(np.stack([left] + 14 * [0 * left]), "one of 15 microphones")
    assert "15 microphones: channels that cancel" not in capsys.readouterr().err


def test_workers_that_read_ahead_say_once_that_channels_are_mixed_down(tmp_path, capfd):
    files = {f"{i}.wav": wav(noise(2, 3000, i), 8000) for i in range(8)}
    chunks = loader.ChunkDataset(Recordings(write_files(tmp_path, files), 8000, 9), np.arange(8), 0)
    list(loader.read_ahead(chunks, [(0, 4), (4, 8)], workers=2))
    assert capfd.readouterr().err.count("are mixed down to one") == 1


def test_it_is_said_which_rates_are_resampled_and_of_long_recordings_a_beginning_is_evaluated(
        tmp_path, capsys):
    write_files(tmp_path, {"long.wav": wav(noise(1, 11_000), 1000)})
    dataset = Recordings(folder(tmp_path), 1000)
    dataset.check()
    found = "{1000: 1, 16000: 4, 8000: 4, 22050: 4}"
    assert f"recordings are resampled to 1000 Hz; rates: {found}" in capsys.readouterr().err
    [(index, wave)] = dataset.load_usable([0]).items()
    assert_close(wave, dataset.wave(index)[:10_000], atol=1e-3, rtol=0)
    Syllables(9).check()
    assert not capsys.readouterr().err


def test_every_recording_is_as_loud_but_silence(path):
    for size, loudness in ((0.02, 0.1), (0, 0)):
        path.write_bytes(wav(size * noise(1, 3000)))
        wave = Recordings(path.parent, 16000).wave(0)
        assert wave.square().mean().sqrt() == pytest.approx(loudness, abs=1e-3)


def test_a_quiet_passage_stays_as_quiet_and_an_offset_is_not_loudness(path):
    samples = 0.5 * noise(1, 16_000)
    samples[:, 8_000:] *= 0.05  # -26 dB
    path.write_bytes(wav(samples + 0.2))
    dataset = Recordings(path.parent, 16000, crop=1_000)
    expected = as_loud(torch.from_numpy(samples[0]))
    quiet = dataset.wave(0, 1_000, 0.99999)
    assert_close(quiet, expected[-1_000:], atol=1e-4, rtol=0)
    assert quiet.std() < 0.01


def test_speakers_are_found_by_a_pattern(tmp_path):
    folder(tmp_path)
    assert set(Recordings(tmp_path, 16000, pattern="(.)[.]").speaker_of) == set("0123")
    assert set(Recordings(tmp_path, 16000, pattern="(.)/").speaker_of) == set("012")
    for pattern in ("_(", "take", "x|x(1)?"):
        with pytest.raises(UserError, match=r"--speaker_pattern .*: its group finds no speaker"):
            Recordings(tmp_path, 16000, pattern=pattern)


# name: (other files, {recording: (transcript, speaker)})
LAYOUTS = {
    "LibriSpeech": (
        {"1/8/1-8.TRANS.txt": b"1-8-0 NORTHANGER ABBEY\n1-8-1  THIS LITTLE WORK\n\n",
         "7/8/7-8.trans.txt": b"7-8-0 ALAS"},
        {"1/8/1-8-0.WAV": ("NORTHANGER ABBEY", "1"), "1/8/1-8-1.wav": ("THIS LITTLE WORK", "1"),
         "7/8/7-8-0.wav": ("ALAS", "7")}),
    "LibriTTS": (
        {"train/84/121/84_121_0_1.original.txt": b"Dr. A.",
         "train/84/121/84_121_0_1.normalized.txt": b"Doctor A.",
         "train/9/121/9_121_0_2.original.txt": b"Only this.",
         "train/84/121/84_121.book.tsv": b"0\tDr. A.\t1"},
        {"train/84/121/84_121_0_1.wav": ("Doctor A.", "84"),
         "train/9/121/9_121_0_2.wav": ("Only this.", "9")}),
    "VCTK": (
        {"txt/p225/1.txt": b"Please call.", "txt/p226/1.txt": b"Ask her.",
         "speaker-info.txt": "ID é".encode("cp1252")},
        {"wav48/p225/1_mic1.flac": ("Please call.", "p225"),
         "wav48/p225/1_mic2.flac": ("Please call.", "p225"),
         "wav16/p225/1.wav": ("Please call.", "p225"),
         "wav48_silence_trimmed/p225/1_mic1.wav": ("Please call.", "p225"),
         "wav48/p226/1.wav": ("Ask her.", "p226")}),
    "a transcript of each file": (
        {"t_mic1.txt": b"one", "t_mic2.txt": b"two", "u.original.txt": b"three", "u.txt": b"four",
         "x.mp3.txt": b"five", "x.wav.txt": b"six", "y_mic1.txt": b"seven"},
        {"t_mic1.wav": ("one", ""), "t_mic2.wav": ("two", ""), "u.original.wav": ("three", ""),
         "u.wav": ("four", ""), "x.mp3": ("five", ""), "x.wav": ("six", ""),
         "y_mic1.wav": ("seven", ""), "y_mic2.wav": ("", "")}),
    # If recordings share a name, a transcript elsewhere could belong to any of them.
    "the same name in several folders": (
        {"s1/001.txt": b"a", "s3/001.txt": b"b", "s3/001.m4a": b"", "txt/001.txt": b"c"},
        {"s1/001.wav": ("a", "s1"), "s2/001.wav": ("", "s2")}),
    "a transcript of another folder's recording that is gone": (
        {"s2/7.txt": b"wrong", "s2/8.txt": b"right", "s3/wav/9.txt": b"wrong"},
        {"s1/7.wav": ("", "s1"), "s2/8.wav": ("right", "s2"), "s1/wav/9.wav": ("", "wav"),
         "s2/wav/9.wav": ("", "wav")}),
    "transcripts below each speaker": (
        {"s2/Transcripts/1.txt": b"two"},
        {"s1/wav/1.wav": ("", "wav"), "s2/wav/1.wav": ("two", "wav")}),
    "a tree of transcripts beside speakers": (
        {"txt/s1/1.txt": b"one", "txt/s3/1.txt": b"three"},
        {"s1/1.wav": ("one", "s1"), "s2/1.wav": ("", "s2"), "s3/1.wav": ("three", "s3")}),
    "two corpora": (
        {"A/a.trans.txt": b"1 one\n2 wrong", "B/b.trans.txt": b"1 first"},
        {"A/wavs/1.wav": ("one", "wavs"), "B/wavs/1.wav": ("first", "wavs"),
         "B/wavs/2.wav": ("", "wavs")}),
    "accents in both forms of Unicode": (
        {"\xfc/\xe4.txt": b"one", "1-8.trans.txt": "\xf6 two".encode()},
        {"u\u0308/a\u0308.wav": ("one", "u\u0308"), "o\u0308.wav": ("two", "")}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transcripts_and_speakers_are_found_in_the_layouts_of_known_corpora(layout, tmp_path):
    others, expected = LAYOUTS[layout]
    dataset = Recordings(write_files(tmp_path, others | dict.fromkeys(expected, GOOD)), 16000)
    assert dict(zip(dataset.names, zip(dataset.texts, dataset.speaker_of))) == expected


def test_it_is_said_how_many_recordings_and_transcripts_go_without_the_other(tmp_path, capsys):
    table = b"0 a\n2 absent\n1\nc d\n"
    write_files(tmp_path, {"0.wav": GOOD, "1.wav": GOOD, "3.txt": b"a", "x.trans.txt": table})
    Recordings(tmp_path, 16000)
    err = capsys.readouterr().err
    assert "2 recordings of 0 known speakers, 1 transcripts" in err
    assert f"transcripts without text or recording: 4, such as {tmp_path}/3\n" in err


def test_files_that_are_not_read_are_counted_by_kind(tmp_path, capsys):
    others = {"1.M4A": b"", "1.txt": b"one", "2.m4a": b"", "3.wma": b""}
    write_files(tmp_path, {"0.wav": GOOD, **others})
    Recordings(tmp_path, 16000)
    others = "{'.m4a': 2, '.txt': 1, '.wma': 1}"
    message = f"{tmp_path}: 1 recordings of 0 known speakers, 0 transcripts; other files: {others}"
    assert f"note: {message}\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.txt", "x.trans.txt"])
def test_a_transcript_in_another_encoding_is_refused_by_name(name, tmp_path):
    write_files(tmp_path, {"a.wav": GOOD, name: "a|über".encode("cp1252")})
    with pytest.raises(UserError, match=rf"{tmp_path}/{name}: not UTF-8 text.*save it as UTF-8"):
        Recordings(tmp_path, 16000)


def test_a_fingerprint_changes_with_the_data_and_the_rate_alone(tmp_path):
    def fingerprint(rate=16000, **settings):
        return Recordings(tmp_path, rate, **settings).fingerprint()

    folder(tmp_path)
    seen = [fingerprint()]
    assert fingerprint(24000) not in seen
    assert fingerprint(crop=7, hop_length=5) in seen
    for name, content in (
            ("voice_0/take_0.txt", b"another text"),
            ("voice_0/take_0.wav", wav(noise(1, 2000, 99))),
            ("voice_0/take_4.wav", GOOD)):
        write_files(tmp_path, {name: content})
        assert fingerprint() not in seen
        seen.append(fingerprint())


def as_loud(waves):
    """Normalize waves (..., T) to the loudness that `Recordings` gives them."""
    waves = waves - waves.mean(-1, keepdim=True)
    return waves * 0.1 / waves.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("rate", [16000, 24000, 11025])
def test_crops_are_slices_of_the_whole_and_little_more_is_decoded(rate, path):
    path.write_bytes(wav(noise(2, 100_000)))
    dataset = Recordings(path.parent, rate, hop_length=100)
    whole = dataset.wave(0)
    counts = []

    def read(index, start, stop):
        counts.append(stop - start)
        return Recordings.read(dataset, index, start, stop)

    dataset.read = read
    dataset.level(0, 100_000, 16000)  # measured once, not counted below
    counts.clear()
    for length, fraction in ((300, 0), (512, 0.7), (400, 0.9999)):
        starts = (len(whole) - length) // 100 + 1
        start = int(fraction * starts) * 100
        crop = dataset.wave(0, length, fraction)
        assert_close(crop, whole[start : start + length], atol=2e-5, rtol=0)
    assert 0 < sum(counts) < 12_000
    assert torch.equal(dataset.wave(0, 10 ** 6, 0.5), whole)


def test_crops_begin_at_frames_chosen_at_random_or_in_the_middle():
    dataset = Syllables(9, crop=2500, hop_length=200)
    windows = dataset.wave(8).unfold(0, 2500, 200)  # one at each multiple of hop_length
    words = order.random_bits(np.arange(300), 0)
    batch, _ = dataset.fetch(np.full(300, 8), words)
    places = torch.cdist(batch["wave"], windows).argmin(1)
    assert_close(windows[places], batch["wave"])
    assert len(places.unique()) == len(windows)
    alone, _ = dataset.fetch([8], words[5:6])
    assert torch.equal(alone["wave"][0], batch["wave"][5])
    middle, _ = dataset.fetch([4])  # the recording's middle second
    assert_close(middle["wave"][0], dataset.wave(4)[800:8800])


def test_repeated_recordings_begin_parts_of_20_ms_later_and_share_a_split():
    dataset = Syllables(50)
    whole = dataset.wave(7)
    text = dataset.texts[7]
    dataset.repeat(4)
    for shift in range(4):
        index = 4 * 7 + shift
        assert_close(dataset.wave(index), whole[40 * shift:])
        assert dataset.texts[index] == text
    parts = [set(dataset.split(name, 0.2, 0.2) // 4) for name in order.SPLITS]
    assert sum(map(len, parts)) == 50


def test_splits_are_chosen_by_name_and_from_20_speakers_on_by_speaker():
    few = Syllables(9)
    many = Syllables(200)
    for dataset, keys in ((few, few.names), (many, many.speaker_of)):
        for name in order.SPLITS:
            expected = order.split_keys(keys, name, 0.3, 0.2, seed=1)
            assert_array_equal(dataset.split(name, 0.3, 0.2, seed=1), expected)
    few.names = [f"a{i // 2}_mic{i % 2 + 1}.wav" for i in range(60)]  # pairs, as in VCTK
    parts = [set(few.split(name, 0.3, 0.2) // 2) for name in order.SPLITS]
    assert sum(map(len, parts)) == 30


def test_unusable_recordings_are_passed_over_by_name_and_more_than_five_are_refused(tmp_path):
    short = wav(noise(1, 50))
    files = {f"{i}.wav": wav(noise(1, 1000, i)) for i in range(8)}
    files |= {"4.wav": short, "._5.wav": b""}
    dataset = Recordings(write_files(tmp_path, files), 16000, crop=1200, hop_length=51)
    batch, usable = dataset.fetch(np.arange(3, 5))
    assert usable.tolist() == [True, False]
    assert batch["length"].tolist() == [1000, 0]
    assert torch.equal(batch["wave"][0, :1000], dataset.wave(3))
    assert not batch["wave"][0, 1000:].any()
    fault = f"{tmp_path}/4.wav: 50 samples at 16000 Hz, less than a frame of 51"
    assert dataset.check() == (1, 8, [fault])
    assert [*dataset.load_usable(np.arange(3, 5))] == [3]

    write_files(tmp_path, {f"{i}.wav": short for i in range(3, 8)})
    assert dataset.check()[:2] == (5, 8)
    write_files(tmp_path, {"1.wav": short})
    with pytest.raises(UserError, match=r"6 of 8 samples cannot be used: .*1\.wav: 50 samples"):
        dataset.check()


def test_equal_recordings_are_counted_and_repeated_ones_are_not(tmp_path, capsys):
    same = wav(noise(1, 3000))
    files = {"0.wav": same, "1.wav": wav(noise(1, 3000, 1)), "2.wav": same}
    dataset = Recordings(write_files(tmp_path, files), 16000)
    for shifts, found in ((1, "1 of 3"), (2, "2 of 6")):
        dataset.repeat(shifts)
        dataset.check()
        assert f"{found} checked files are duplicates" in capsys.readouterr().err
    (tmp_path / "2.wav").unlink()
    dataset = Recordings(tmp_path, 16000)
    dataset.repeat(3)
    dataset.check()
    assert "duplicates" not in capsys.readouterr().err


def test_a_folder_without_recordings_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such folder, or no \.wav, \.flac, .* below it"):
        Recordings(tmp_path, 16000)


def test_syllables_are_a_dataset_at_any_rate():
    texts, speakers = synthetic.syllables(range(9))
    dataset = Syllables(9)
    slower = Syllables(9, rate=6000)
    assert dataset.check() == (0, 9, [])
    assert slower.fingerprint() != dataset.fingerprint()
    assert dataset.texts == texts
    for i, (text, speaker) in enumerate(zip(texts, speakers)):
        assert dataset.speaker_of[i] == speaker
        wave = torch.from_numpy(synthetic.speak(text, speaker))
        assert_close(dataset.wave(i), as_loud(wave))
        assert_close(slower.wave(i), recordings.resample(as_loud(wave), 8000, 6000))
