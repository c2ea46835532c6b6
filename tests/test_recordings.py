"""Audio files of every kind, resampling and spectra against analytic answers, folders, syllables, caches of tokens."""
import io
import math
import pickle
import struct

import numpy as np
import pytest
import torch

from common import data, recordings, synthetic
from common.config import UserError
from common.recordings import Recordings, Syllables, Unusable

KINDS = {"u8": (1, 8), "s16": (1, 16), "s24": (1, 24), "s32": (1, 32), "f32": (3, 32), "f64": (3, 64)}  # (tag, bits)


def wav(wave, rate=16000, kind="s16", extensible=False):
    """Bytes of a WAV file of a wave (C, T) in [-1, 1)."""
    (tag, bits), align = KINDS[kind], len(wave) * KINDS[kind][1] // 8
    content = wave.T.ravel().astype("<f4" if bits == 32 else "<f8").tobytes()
    if tag == 1:
        whole = np.round(wave.T.ravel().astype(float) * 2 ** (bits - 1)).astype("<i8") + 128 * (bits == 8)
        content = whole.view(np.uint8).reshape(-1, 8)[:, :bits // 8].tobytes()
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, len(wave), rate, rate * align, align, bits)
    form += struct.pack("<HHIH14x", 22, bits, 0, tag) if extensible else b""
    return (struct.pack("<4sI8sI", b"RIFF", 20 + len(form) + len(content), b"WAVEfmt ", len(form)) + form
            + struct.pack("<4sI", b"data", len(content)) + content)


def noise(channels, frames, seed=0):
    return np.random.default_rng(seed).uniform(-0.99, 0.99, (channels, frames)).astype(np.float32)


def write(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_wav_format_reads_back_and_parts_are_slices(kind, tmp_path):
    for channels, extensible in ((1, False), (2, False), (2, True)):
        wave, path = noise(channels, 101), tmp_path / "a.WAV"
        path.write_bytes(wav(wave, 11025, kind, extensible))
        whole, rate = recordings.read(path)
        assert whole.dtype == np.float32 and whole.shape == wave.shape and rate == 11025
        np.testing.assert_allclose(whole, wave, rtol=0, atol=2.0 ** -KINDS[kind][1] + 1e-7)  # half a step
        for start, stop in ((0, 7), (33, 53), (95, 145), (40, None), (101, 106), (150, None), (5, 5)):
            part, *facts = recordings.read_part(path, start, stop)
            np.testing.assert_array_equal(part, whole[:, start:stop])
            assert facts == [11025, 101]


GOOD = wav(noise(1, 100))  # its format begins at byte 20, its samples at 44
ODD = b"LIST\3\0\0\0odd\0"  # chunks begin at even bytes


def patched(place, code, *values):
    return GOOD[:place] + struct.pack(code, *values) + GOOD[place + struct.calcsize(code):]


def test_other_chunks_are_passed_over_and_a_stream_goes_to_the_end_of_its_file(tmp_path):
    streams = [patched(40, "<I", length) + b"\1" for length in (0, 2 ** 32 - 1, 0x7FFFF000)]  # and half a sample
    for content in GOOD[:12] + ODD + GOOD[12:36] + b"junk\0\0\0\0" + ODD + GOOD[36:] + ODD, *streams:
        found, _ = recordings.read(write(tmp_path, {"a.wav": content}) / "a.wav")
        np.testing.assert_allclose(found, noise(1, 100), atol=2 ** -15)


@pytest.mark.parametrize("content, message", [
    (b"", "not a WAV file, or an empty one"), (b"\x89PNG" + bytes(40), "not a WAV file"),
    (patched(8, "4s", b"AVI "), "not a WAV file"), (GOOD[:-1], "truncated, 243 bytes, expected 244 or more"),
    (GOOD[:40], "truncated, 40 bytes"), (GOOD[:30], "truncated, 30 bytes"), (patched(12, "4s", b"LIST"), "truncated"),
    (patched(20, "<H", 17), "unsupported, format 17 of 16 bits"), (patched(34, "<H", 20), "unsupported"),
    (patched(22, "<H", 0), "0 channels"), (patched(24, "<I", 0), "0 Hz"),
    (wav(np.array([[0.1, np.nan]]), kind="f32"), "samples that are not finite")])
def test_what_is_wrong_with_a_file_is_one_line_with_its_name(content, message, tmp_path):
    with pytest.raises(Unusable) as error:
        recordings.read(write(tmp_path, {"a.wav": content}) / "a.wav")
    assert message in str(error.value) and f"{tmp_path}/a.wav" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix, near", [("flac", 2 ** -15), ("ogg", 0.1), ("opus", 0.1), ("mp3", 0.1)])
def test_other_formats_are_read_by_soundfile_also_in_part(suffix, near, tmp_path, monkeypatch):
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    rate, path, decoded, plain = 16000, tmp_path / f"a.{suffix}", [], soundfile.SoundFile.read
    wave = 0.5 * np.sin(np.arange(12 * rate)[None] * np.array([[0.05], [0.08]])[:1 if suffix == "flac" else 2])
    soundfile.write(path, wave.T, rate, **(dict(format="OGG", subtype="OPUS") if suffix == "opus" else {}))
    whole, _ = recordings.read(path)
    np.testing.assert_allclose(whole[:, :-500], wave[:, :-500], atol=near)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *a, **b: decoded.append(plain(*a, **b)) or decoded[-1])
    for start in (*range(0, 12 * rate, 15_000), 12 * rate - 100, 20 * rate):  # a plain seek is wrong in mp3 and ogg
        part, *_ = recordings.read_part(path, start, start + 500)
        np.testing.assert_allclose(part, whole[:, start:start + 500], atol=1e-5)
    assert max(map(len, decoded)) <= 500 + rate * {"flac": 0, "mp3": 2}.get(suffix, 5)
    np.testing.assert_allclose(recordings.read_part(path, 19_000, None)[0], whole[:, 19_000:], atol=1e-5)
    with pytest.raises(Unusable, match="not a readable audio file"):
        recordings.read(write(tmp_path, {path.name: b"nonsense" * 9}) / path.name)


def test_written_waves_read_back_rounded_and_clipped_and_then_bit_for_bit(tmp_path):
    for shape in ((50,), (1, 50), (2, 50)):
        wave, path = np.random.default_rng(1).uniform(-1.2, 1.2, shape).astype(np.float32), tmp_path / "w.wav"
        recordings.write_wav(path, wave, 22050)
        read, _ = recordings.read(path)
        np.testing.assert_allclose(read, np.clip(np.atleast_2d(wave), -1, 1 - 2 ** -15), rtol=0, atol=2 ** -16 + 1e-7)
        recordings.write_wav(stream := io.BytesIO(), torch.from_numpy(read).requires_grad_(), 22050)
        assert stream.getvalue() == path.read_bytes() == wav(read, 22050)  # every byte as the specification has it


def sine(frequency, rate):
    return torch.sin(2 * math.pi * frequency * torch.arange(rate // 2, dtype=torch.float64) / rate)


def decibels(error):  # in the middle, relative to a sine
    return 10 * math.log10(error[len(error) // 5:-len(error) // 5].double().square().mean().item() / 0.5 + 1e-30)


@pytest.mark.parametrize("rate, to", [(8000, 16000), (16000, 24000), (44100, 16000), (48000, 16000), (16000, 8000)])
def test_resampling_gives_the_analytic_sines_none_above_the_new_nyquist_frequency_and_right_lengths(rate, to):
    for share in (0.003, 0.1, 0.47, 0.8, 0.86):
        tone = share * min(rate, to) / 2
        assert decibels(recordings.resample(sine(tone, rate), rate, to) - sine(tone, to)) < -90, tone
    for tone in np.linspace(to / 2, rate / 2 * 0.99, 6) if to < rate else ():
        assert decibels(recordings.resample(sine(tone, rate), rate, to)) < -90, tone
    for length in (0, 1, 2, 147, 1000):
        made = recordings.resample(torch.ones(2, 3, length), rate, to)
        assert made.shape == (2, 3, math.ceil(length * to / rate)) and made.dtype == torch.float32
    click = recordings.resample(torch.eye(1, 4000)[0], rate, to)
    assert click[0] > 0.3 and click[len(click) // 2:].abs().max() < 1e-4  # it does not come back at the other end
    assert recordings.resample(wave := torch.ones(3), rate, rate) is wave


@pytest.mark.parametrize("window, hop", [(64, 16), (512, 128), (400, 160), (1024, 1024)])
def test_magnitudes_equal_an_explicit_fourier_sum(window, hop):
    wave, left = noise(2, 1500), (window - hop) // 2
    found = recordings.stft_magnitude(torch.from_numpy(wave), window, hop)
    n, k = np.arange(window), np.arange(window // 2 + 1)
    taper, fourier = 0.5 - 0.5 * np.cos(2 * np.pi * n / window), np.exp(-2j * np.pi * np.outer(n, k) / window)
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(wave, ((0, 0), (left, window))), window, 1)[:, ::hop]
    expected = np.abs(frames[:, :-(-1500 // hop)] * taper @ fourier) * 2 / taper.sum()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_mel_filters_are_triangles_at_even_places_of_the_scale_and_each_reaches_a_frequency():
    for rate, window, bins in ((16000, 1024, 40), (16000, 512, 160), (24000, 64, 64)):
        filters = recordings.mel_filters(rate, window, bins)
        assert filters.min() >= 0 and filters.max() <= 1 and filters.sum(0).min() >= 0.5
    wide = recordings.mel_filters(16000, 16384, 20)
    centers = [700 * ((1 + 8000 / 700) ** (i / 21) - 1) / 16000 * 16384 for i in range(1, 21)]  # of equal ratios
    np.testing.assert_allclose(wide.argmax(0), centers, atol=1)
    np.testing.assert_allclose(wide.sum(1)[math.ceil(centers[0]):int(centers[-1])], 1, atol=1e-5)


def test_log_mel_is_fp32_under_autocast_has_a_floor_and_finite_gradients():
    with torch.inference_mode():  # tables first made here can be trained with
        recordings.log_mel(torch.ones(1, 500), 7000, 98, 49, 11)
    wave, silence = torch.from_numpy(noise(2, 4001)).requires_grad_(), torch.zeros(1, 3000, requires_grad=True)
    plain, quiet = recordings.log_mel(wave, 7000, 98, 49, 11), recordings.log_mel(silence, 16000, 64, 16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recordings.log_mel(wave, 7000, 98, 49, 11), plain)
    expected = recordings.stft_magnitude(wave, 98, 49) @ recordings.mel_filters(7000, 98, 11)
    torch.testing.assert_close(plain, expected.log())
    torch.testing.assert_close(quiet, torch.full_like(quiet, math.log(1e-5)))
    (quiet.sum() + plain.sum()).backward()
    assert torch.isfinite(silence.grad).all() and torch.isfinite(wave.grad).all() and wave.grad.any()


def test_a_spectrogram_shows_low_tones_at_the_bottom_faint_ones_darker_and_silence_black():
    picture = recordings.spectrogram(0.3 * sine(200, 16000) + 0.003 * sine(4000, 16000), 16000)
    assert picture.dtype == np.uint8 and picture.shape == (160, 63, 3) and not picture[60:80, 30].any()
    assert picture[130:].max() == 255 and abs(picture[:50, 30].max(0) - [255, 127, 0]).max() < 50  # 40 of 80 dB
    assert not recordings.spectrogram(torch.zeros(1000), 8000, height=32).any()


def test_si_sdr_ignores_scale_and_offset_and_is_the_ratio_of_energies():
    target = sine(440, 16000)[None].repeat(3, 1)
    error = torch.cos(2 * math.pi * 440 * torch.arange(8000, dtype=torch.float64) / 16000)[None]  # at a right angle
    found = recordings.si_sdr(torch.cat([target[:1] + 0.1 * error, 7 * target[:1] + 0.7 * error + 3, error]), target)
    torch.testing.assert_close(found[:2], torch.tensor([20.0, 20.0]), atol=0.01, rtol=0)
    assert found[2] < -60 and recordings.si_sdr(target, -target).min() > 100
    assert recordings.si_sdr(torch.zeros(2, 10), torch.zeros(2, 10)).tolist() == [0, 0]


def folder(path, speakers=3, each=4):
    """Recordings of several lengths, rates and channels: voice_S/take_N.wav, with NAME.txt beside."""
    for i in range(speakers * each):
        name, wave = f"voice_{i // each}/take_{i % each}", noise(1 + i % 2, 2000 + 300 * i, i)
        write(path, {f"{name}.txt": f" say {i} ü\n".encode(), f"{name}.wav": wav(wave, (16000, 8000, 22050)[i % 3])})
    return path


def test_a_folder_tree_is_read_in_the_order_of_names_with_texts_speakers_and_a_fingerprint(tmp_path):
    source = Recordings(folder(tmp_path), 16000)
    assert len(source) == 12 and source.texts == 12 and source.bad == [] and source.name(4) == "voice_1/take_0.wav"
    assert [source.text(row) for row in range(12)] == [f"say {i} ü" for i in range(12)]
    assert source.speakers == ["voice_0", "voice_1", "voice_2"] and source.who[5] == "voice_1"
    for row in (0, 1, 2, 7):
        expected = torch.from_numpy(noise(1 + row % 2, 2000 + 300 * row, row).mean(0))
        expected = recordings.resample(expected, (16000, 8000, 22050)[row % 3], 16000)
        assert source.frames(row) == len(expected)
        torch.testing.assert_close(source.wave(row), expected, atol=1e-4, rtol=0)
    assert source.resampled == "recordings of 8000, 22050 Hz are resampled to 16000"
    assert Recordings(tmp_path, 16000, pattern="(.)[.]").speakers == ["0", "1", "2", "3"]
    for pattern in ("_(", "take", "_(1)", "_(1)?"):
        with pytest.raises(UserError, match=r"--speaker_pattern .*: finds no speaker"):
            Recordings(tmp_path, 16000, pattern=pattern)
    found = [Recordings(tmp_path, rate, crop).fingerprint() for rate, crop in ((16000, 0), (16000, 7), (24000, 0))]
    write(tmp_path, {"voice_0/take_0.wav": wav(noise(1, 2001))})
    assert found[0] == found[1] != found[2] and Recordings(tmp_path, 16000).fingerprint() not in found
    libri = write(tmp_path / "libri", {name: GOOD for name in ("1/8/1-8-0.wav", "1/8/1-8-1.wav", "7/8/7-8-0.wav")})
    write(libri, {"1/8/1-8.trans.txt": b"1-8-0 NORTHANGER ABBEY\n1-8-1  THIS LITTLE WORK\n\n"})
    write(libri, {"7/8/7-8.trans.txt": b"\n"})
    source = Recordings(libri, 16000)  # SPEAKER/CHAPTER, without a pattern
    assert [source.text(row) for row in range(3)] == ["NORTHANGER ABBEY", "THIS LITTLE WORK", ""]
    assert source.texts == 2 and source.speakers == ["1", "7"] and source.resampled == ""


@pytest.mark.parametrize("rate", [16000, 24000, 11025])
def test_crops_are_slices_of_the_whole_and_little_more_is_decoded(rate, tmp_path):
    source = Recordings(folder(tmp_path), rate)
    for row in range(len(source)):
        whole = source.wave(row)
        for start, length in ((0, 300), (1700, 512), (len(whole) - 100, 400), (0, 10 ** 6)):
            part = whole[start:start + length]
            torch.testing.assert_close(source.crop_wave(row, start, length), part, atol=2e-5, rtol=0)
    wave = np.where(abs(np.arange(100_000) - 50_000) < 3000, noise(1, 100_000), np.nan)  # far from the middle unusable
    source = Recordings(write(tmp_path / "long", {"a.wav": wav(wave, kind="f32")}), rate, crop=500)
    assert source.fetch([0])[1].all() and source.fault(0)


def test_crops_begin_at_frames_where_the_draw_says_or_in_the_middle_also_in_workers(tmp_path):
    for source in Recordings(folder(tmp_path), 16000, 2500, hop=200), Syllables(9, 2500, hop=200):
        row = max(range(9), key=source.frames)
        windows = source.wave(row).unfold(0, 2500, 200)  # at all multiples of hop
        drawn, good = source.fetch(np.full(500, row), data.draws(np.arange(500), 0))
        places = [int((windows - crop).abs().amax(1).argmin()) for crop in drawn["wave"]]
        torch.testing.assert_close(windows[places], drawn["wave"], atol=2e-5, rtol=0)
        assert good.all() and set(places) == set(range(len(windows)))
        assert torch.equal(source.fetch([row], data.draws(np.arange(5, 6), 0))[0]["wave"][0], drawn["wave"][5])
        torch.testing.assert_close(source.fetch([row])[0]["wave"][0], windows[len(windows) // 2], atol=2e-5, rtol=0)
        chunks, spans = data.Chunks(source, np.arange(9), seed=3), [(0, 4), (4, 7), (7, 9)]
        plain = [item["wave"] for item in data.loader(chunks, spans)]
        for workers, sent in ((2, chunks), (0, pickle.loads(pickle.dumps(chunks)))):
            assert all(map(torch.equal, plain, (item["wave"] for item in data.loader(sent, spans, workers))))
    short = Recordings(tmp_path, 16000, 2500)
    batch, good = short.fetch(np.array([3, 0]))
    assert good.tolist() == [True, True] and torch.equal(batch["length"], torch.tensor([2500, 2000]))
    assert torch.equal(batch["wave"][1], torch.cat([short.wave(0), torch.zeros(500)]))


@pytest.mark.parametrize("speakers, kind", [(19, "keys"), (20, "who")])
def test_splits_keep_old_rows_where_they_were_and_go_by_speaker_from_20_on(speakers, kind, tmp_path):
    old, new = (Recordings(folder(tmp_path, speakers, each), 16000) for each in (3, 4))
    before, after = ([{getattr(source, kind)[row] for row in source.split(part, 0.3, 0.2)}
                      for part in ("train", "validation", "test")] for source in (old, new))
    assert all(before) and sum(map(len, after)) == len(set.union(*after)) == len(set(getattr(new, kind)))
    assert all(one <= other for one, other in zip(before, after))
    seeds = [[*new.split("train", 0.3, 0.2, seed)] for seed in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1] and seeds[0] == sorted(seeds[0])


def test_a_few_broken_or_short_recordings_are_left_out_and_many_are_refused(tmp_path):
    write(tmp_path, {f"{i:03d}.wav": wav(noise(1, 500)) for i in range(8)})
    write(tmp_path, {"002.wav": b"", "003.wav": GOOD[:-9], "004.wav": GOOD, "._5.wav": b"of a Mac"})
    write(tmp_path, {"a.m4a": b"", "b/c.M4A": b"", "b/d.pdf": b"", "e.txt": b""})
    source = Recordings(tmp_path, 8000, hop=51)
    assert source.left_out == f"{tmp_path}: left out are files of kinds that are not read (2 m4a, 1 pdf)"
    assert len(source) == 5 and source.name(2) == "005.wav" and len(Recordings(tmp_path, 8000, hop=50)) == 6
    assert all(map(str.__contains__, source.bad, ("002.wav: not", "003.wav: truncated", "004.wav: 100 samples")))
    write(tmp_path, {f"00{i}.wav": b"" for i in (5, 6, 7)})
    with pytest.raises(UserError, match=r"6 of 8 recordings cannot be used: .*002.wav: not a WAV file"):
        Recordings(tmp_path, 8000, hop=51)
    with pytest.raises(UserError, match="1 of 1 recordings cannot be used"):
        Recordings(write(tmp_path / "one", {"a.wav": b"nonsense of no use"}), 16000)
    with pytest.raises(UserError, match=r"none: no such folder, or no \.wav, \.flac, .*among 0 files"):
        Recordings(tmp_path / "none", 16000)


def test_samples_that_are_not_finite_are_faults_of_their_row_and_many_are_refused(tmp_path):
    bad = np.where(np.arange(1000) == 500, np.nan, noise(1, 1000))
    write(tmp_path, {f"{i:03d}.wav": wav(bad if i == 7 else noise(1, 1000, i), kind="f32") for i in range(120)})
    source = Recordings(tmp_path, 16000, crop=600)
    batch, good = source.fetch(np.arange(5, 10))
    assert good.tolist() == [True, True, False, True, True] and not batch["wave"][2].any()
    assert source.fault(7) == f"{tmp_path}/007.wav: samples that are not finite, or above 100 times full scale"
    assert source.fault(8) == ""
    assert source.check() == (1, 120, [source.fault(7)]) and source.check(13) == (0, 13, [])
    (rows, waves), source.keys = source.readable(np.arange(6, 9)), source.keys[7:8]
    assert rows == [6, 8] and len(waves) == 2
    with pytest.raises(UserError, match="1 of 1 recordings cannot be used"):
        source.check()


def test_syllables_have_the_interface_of_recordings_and_are_drawn_once(tmp_path, monkeypatch):
    (waves, records), drawn, draw = synthetic.syllables(range(30)), [], synthetic.syllables
    monkeypatch.setattr(synthetic, "syllables", lambda rows: drawn.extend(rows) or draw(rows))
    recordings._drawn.cache_clear()
    source, again, slower = Syllables(30), Syllables(40), Syllables(30, rate=6000)
    assert len(source) == 30 and source.records(np.arange(2)) == records[:2] and source.rate == synthetic.RATE
    for row in (0, 7):
        assert source.text(row) == records[row]["text"] and source.who[row] == str(records[row]["speaker"])
        assert source.frames(row) == len(waves[row]) and np.array_equal(source.wave(row), waves[row])
        source.wave(row).zero_()  # a copy
        assert torch.equal(again.crop_wave(row, 100, 50), source.wave(row)[100:150])
    assert [source.frames(row) for row in [*range(30)] * 2] == [*map(len, waves)] * 2 and sorted(drawn) == [*range(30)]
    torch.testing.assert_close(slower.wave(0), recordings.resample(torch.from_numpy(waves[0]), 8000, 6000))
    assert vars(Recordings(folder(tmp_path), 8000)).keys() - {"path", "lines"} <= vars(source).keys()
    assert source.check(5)[0] == 0 and source.fingerprint() == Syllables(30).fingerprint() != again.fingerprint()


def made(*calls):
    """For each call (folder, rows, key, bad rows, row that fails): the error or "", rows encoded here, empty rows."""
    found = []

    def encode(row):
        if row == fails or row in bad:
            raise (UserError if row == fails else Unusable)(f"row {row}: out of order")
        encoded.append(row)
        return np.full((row % 5 + 1, 3), 100 * row)

    for folder, rows, key, bad, fails in calls:  # noqa: B007
        encoded = []
        try:
            cache = recordings.token_cache(folder, Syllables(rows), {"codec": key}, encode, "tokens")
        except UserError as error:
            found.append((str(error), encoded, getattr(error, "relayed", False)))
            continue
        for row in set(range(rows)) - set(bad):
            assert cache.frames(row) == row % 5 + 1 and cache[row].dtype == np.int64
            assert np.array_equal(cache[row], np.full((row % 5 + 1, 3), 100 * row))
        found.append(("", encoded, cache.empty.tolist()))
    return found


def test_a_cache_is_the_same_from_one_rank_and_two_and_after_an_error_what_was_done_is_kept(tmp_path, on_ranks):
    calls = [(rows, key, (), fails) for rows, key, fails in (
        (1, "abc", None), (20, "abc", 19), (20, "abc", None), (20, "abc", None), (20, "def", None))]
    alone, *ranks = [made(*((tmp_path / "one", *call) for call in calls)),
                     *on_ranks(2, made, *((tmp_path / "two", *call) for call in calls))]
    for results in (alone, *ranks):
        assert [error for error, *_ in results] == ["", "row 19: out of order", *[""] * 3] and results[2][2] == []
    assert [results[1][2] for results in ranks] == [True, False]  # told once, where it was: the last part is rank 1's
    shares = [[len(encoded) for _, encoded, _ in results] for results in (alone, *ranks)]
    assert shares[0] == [1, 19, 1, 0, 20] == [sum(pair) for pair in zip(*shares[1:])]  # the fourth was there
    files = [{path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.npy")}
             for name in ("one", "two")]
    assert files[0] == files[1] and shares[1][4] == shares[2][4] == 10


def test_a_row_that_cannot_be_encoded_is_empty_and_many_are_refused_until_mended(tmp_path):
    few, many, mended = made(*((tmp_path, 300, key, bad, None) for key, bad in (
        ("few", (0, 150, 151)), ("many", (0, 1, 150, 151)), ("many", ()))))
    assert few[2] == [0, 150, 151] and many[0].startswith("4 of 300 recordings cannot be used: ")
    assert mended == ("", [*range(300)], [])
