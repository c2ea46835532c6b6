"""Folders of audio as a user may have them, the built-in syllables, and caches of tokens under kills and ranks."""
import io
import json
import pickle
import sys

import numpy as np
import pytest
import torch

from common import audio, data, dist, recordings, synthetic
from common.config import UserError


def wav(wave, rate=16000):
    audio.write_wav(stream := io.BytesIO(), np.asarray(wave, np.float32), rate)
    return stream.getvalue()


def noise(number, frames=3000, channels=1):
    return np.random.default_rng(number).uniform(-0.5, 0.5, (channels, frames)).astype(np.float32)


def write(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def folder(path, speakers=3, each=4):
    """Recordings of several lengths, rates and channels: voice_S/take_N.wav, with NAME.txt beside."""
    files = {}
    for i in range(speakers * each):
        name = f"voice_{i // each}/take_{i % each}"
        files[f"{name}.wav"] = wav(noise(i, 2000 + 300 * i, 1 + i % 2), (16000, 8000, 22050)[i % 3])
        files[f"{name}.txt"] = f" say {i} ü\n".encode()
    return write(path, files)


# The user's

def test_a_folder_tree_is_read_in_the_order_of_names_with_texts_and_speakers(tmp_path):
    source = recordings.Recordings(folder(tmp_path), 16000)
    assert len(source) == 12 and source.texts == 12 and source.bad == [] and source.embed_width == 0
    assert [source.text(row) for row in range(12)] == [f"say {i} ü" for i in range(12)]
    assert source.speakers == ["voice_0", "voice_1", "voice_2"] and source.speaker(5) == "voice_1"
    assert source.name(4).endswith("voice_1/take_0.wav") and source.text_embed(0) is None
    for row in (0, 1, 2, 7):
        expected = torch.from_numpy(noise(row, 2000 + 300 * row, 1 + row % 2).mean(0))
        expected = audio.resample(expected, (16000, 8000, 22050)[row % 3], 16000)
        assert source.frames(row) == len(expected)
        torch.testing.assert_close(source.wave(row), expected, atol=1e-4, rtol=0)
    assert source.resampled == "4 of 12 recordings at 8000 Hz and 4 of 12 recordings at 22050 Hz are resampled to 16000"
    assert recordings.Recordings(tmp_path / "voice_0", 16000).speakers == [""]


def test_the_order_of_a_listing_does_not_matter(tmp_path, monkeypatch):
    folder(tmp_path)
    walk = recordings.os.walk
    there = recordings.Recordings(tmp_path, 16000)
    monkeypatch.setattr(recordings.os, "walk", lambda path: [(f, d, n[::-1]) for f, d, n in reversed([*walk(path)])])
    again = recordings.Recordings(tmp_path, 16000)
    assert again.files == there.files and again.fingerprint() == there.fingerprint()
    np.testing.assert_array_equal(again.split("train", 0.3, 0.3), there.split("train", 0.3, 0.3))


@pytest.mark.parametrize("rate", [16000, 24000])
def test_crops_are_slices_of_the_whole(rate, tmp_path):
    source = recordings.Recordings(folder(tmp_path), rate)
    for row in range(len(source)):
        whole = source.wave(row)
        for start, length in ((0, 300), (700, 512), (len(whole) - 100, 400), (len(whole) + 5, 10), (0, 10 ** 6)):
            found = source.crop_wave(row, start, length)
            torch.testing.assert_close(found, whole[start:start + length], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rate", [16000, 24000])
def test_of_a_long_recording_only_the_crop_is_decoded(rate, tmp_path, monkeypatch):
    audio.write_wav(tmp_path / "long.wav", 0.1 * np.random.default_rng(0).standard_normal(200_000), 16_000)
    source, decoded, read = recordings.Recordings(tmp_path, rate, crop=500), [], audio.read

    def spy(*args):
        found = read(*args)
        decoded.append(found[0].shape[1])
        return found
    monkeypatch.setattr(audio, "read", spy)
    for draws in (None, data.draws(np.arange(1), 0)):
        source.fetch(np.array([0]), draws)
    source.crop_wave(0, 100_000, 500)
    assert len(decoded) == 3 and 300 < min(decoded) <= max(decoded) < 1000


def test_fetch_crops_the_middle_or_where_the_draw_says_and_fills_short_ones_with_silence(tmp_path):
    source = recordings.Recordings(folder(tmp_path), 16000, crop=2500)
    rows = np.array([3, 0, 6, 3])
    batch, good = source.fetch(rows)
    assert good.all() and batch["wave"].shape == (4, 2500) and batch["wave"].dtype == torch.float32
    assert source.frames(0) == 2000 and not batch["wave"][1, 2000:].any()
    torch.testing.assert_close(batch["wave"][1, :2000], source.wave(0))
    spare = source.frames(3) - 2500
    torch.testing.assert_close(batch["wave"][0], source.wave(3)[(spare + 1) // 2:][:2500])
    drawn = source.fetch(np.full(40, 3), data.draws(np.arange(40), 0))[0]["wave"]
    windows = source.wave(3).unfold(0, 2500, 1)
    places = [int((windows - crop).abs().amax(1).argmin()) for crop in drawn]
    torch.testing.assert_close(windows[places], drawn)
    assert len(set(places)) > 25 and min(places) < spare / 5 and max(places) > spare * 4 / 5
    torch.testing.assert_close(source.fetch(np.full(3, 3), data.draws(np.arange(5, 8), 0))[0]["wave"], drawn[5:8])


def test_splits_keep_old_files_where_they_were_and_go_by_speaker_from_20_on(tmp_path):
    parts, kinds = ("train", "validation", "test"), ("file", "speaker", "auto")
    folder(tmp_path / "a", speakers=19, each=3)
    old, new = {by: recordings.Recordings(tmp_path / "a", 16000, by=by) for by in kinds}, {}
    folder(tmp_path / "a", speakers=25, each=4)
    for by in kinds:
        new[by] = recordings.Recordings(tmp_path / "a", 16000, by=by)
        before, after = ([{source[by].keys[row] for row in source[by].split(part, 0.3, 0.2)} for part in parts]
                         for source in (old, new))
        assert all(before) and sum(map(len, after)) == len(new[by])
        assert by == "auto" or all(a & set(old[by].keys) == b for b, a in zip(before, after))
    for source, like in ((old, "file"), (new, "speaker")):
        assert [*source["auto"].split("test", 0.3, 0.2)] == [*source[like].split("test", 0.3, 0.2)]
    voices = [{new["auto"].speaker(row) for row in new["auto"].split(part, 0.3, 0.2)} for part in parts]
    assert sum(map(len, voices)) == 25 == len(set.union(*voices))


def test_the_seed_turns_the_split(tmp_path):
    source = recordings.Recordings(folder(tmp_path, speakers=10, each=4), 16000)
    splits = [[*source.split("test", 0.3, 0.2, seed)] for seed in (0, 1, 0)]
    assert splits[0] == splits[2] != splits[1]


def test_a_pattern_finds_the_speaker_in_a_files_name(tmp_path):
    write(tmp_path, {f"{i % 3}_{name}_{i}.wav": wav(noise(i)) for i, name in enumerate(("ann", "bob", "bob"))})
    source = recordings.Recordings(tmp_path, 16000, pattern=r"_(\w+)_")
    assert source.speakers == ["ann", "bob"] and source.who == ["ann", "bob", "bob"]
    for pattern, message in (("_(", "parentheses"), ("_b.b_", "parentheses"), ("_(bob)_", "no speaker in 1 of 3")):
        with pytest.raises(UserError, match=message) as error:
            recordings.Recordings(tmp_path, 16000, pattern=pattern)
        assert f"--speaker_pattern {pattern}: " in str(error.value)


def test_transcripts_of_librispeech_and_missing_ones(tmp_path):
    write(tmp_path, {**{f"19/198/19-198-000{i}.wav": wav(noise(i)) for i in range(3)},
                     "7/8/7-8-0000.wav": wav(noise(9)),
                     "19/198/19-198.trans.txt": b"19-198-0000 NORTHANGER ABBEY\n19-198-0001  THIS LITTLE WORK\n",
                     "19/198/19-198-0001.txt": b"its own", "7/8/19-198.trans.txt": b"19-198-0002 ELSEWHERE\n\n"})
    source = recordings.Recordings(tmp_path, 16000, pattern=r"^(\d+)-")
    assert [source.text(row) for row in range(4)] == ["NORTHANGER ABBEY", "its own", "", ""]
    assert source.texts == 2 and source.speakers == ["19", "7"]


def npy(values):
    np.save(stream := io.BytesIO(), values)
    return stream.getvalue()


def test_embeddings_of_texts_lie_beside(tmp_path):
    values = noise(0, 5, 3)
    write(tmp_path, {**{f"{i}.wav": wav(noise(i)) for i in range(5)}, "1.npy": npy(values), "2.npy": npy(values[:, :4]),
                     "3.npy": b"nonsense", "4.npy": npy(np.full((1, 5), np.nan, np.float16))})
    source = recordings.Recordings(tmp_path, 16000)
    assert source.embed_width == 5 and source.text_embed(0) is None
    np.testing.assert_array_equal(source.text_embed(1), values)
    for row, message in ((2, r"\(3, 4\)"), (3, "not a readable"), (4, "not finite")):
        with pytest.raises(audio.Unusable, match=rf"{row}\.npy: .*{message}"):
            source.text_embed(row)


def test_a_few_broken_or_short_recordings_are_left_out_and_many_are_refused(tmp_path):
    files = {f"{i:03d}.wav": wav(noise(i, 500)) for i in range(8)}
    files |= {"002.wav": b"", "003.wav": files["003.wav"][:-9], "004.wav": wav(noise(4, 100)), "._5.wav": b"of a Mac"}
    write(tmp_path, files)
    source = recordings.Recordings(tmp_path, 16000, least=320)
    assert len(source) == 5 and source.files[2] == "005.wav" and len(source.bad) == 3
    for message, expected in zip(source.bad, ("002.wav: empty", "003.wav: truncated", "shorter than a frame of 320")):
        assert expected in message
    write(tmp_path, {f"{i:03d}.wav": b"" for i in range(5, 7)})
    assert len(recordings.Recordings(tmp_path, 16000, least=320)) == 3
    write(tmp_path, {"007.wav": b""})
    with pytest.raises(UserError, match=r"6 of 8 recordings cannot be used: .*002.wav: empty file, …; mend or remove"):
        recordings.Recordings(tmp_path, 16000, least=320)
    one = write(tmp_path / "one", {"a.wav": b"nonsense of no use"})
    with pytest.raises(UserError, match=r"1 of 1 recordings cannot be used: .*a.wav: not a WAV file.*'WAVE'; mend"):
        recordings.Recordings(one, 16000)
    odd = write(tmp_path / "odd", {"a.wav": wav(noise(0, 9000), 44_101)})
    with pytest.raises(UserError, match="44101 to 16000 Hz: too odd a ratio"):
        recordings.Recordings(odd, 16000)


def test_folders_without_audio_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"none: no such folder; expected a folder with \.wav, \.flac"):
        recordings.Recordings(tmp_path / "none", 16000)
    write(tmp_path, {"a/b.txt": b"", "c.json": b""})
    with pytest.raises(UserError, match=r"no audio files below it, 2 others; expected"):
        recordings.Recordings(tmp_path, 16000)
    write(tmp_path, {"x.flac": b"fLaC"})
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UserError, match="pip install soundfile"):
        recordings.Recordings(tmp_path, 16000)


def float_wav(wave):
    content = np.asarray(wave, "<f4").tobytes()
    head = wav(np.zeros(1), 16000)[:36].replace(b"\1\0\1\0", b"\3\0\1\0", 1)
    head = head[:28] + (64000).to_bytes(4, "little") + (4).to_bytes(2, "little") + (32).to_bytes(2, "little")
    return head + b"data" + len(content).to_bytes(4, "little") + content


def test_samples_that_are_not_finite_are_faults_of_their_row_and_many_are_refused(tmp_path):
    bad = noise(0, 1000)[0]
    bad[500] = np.nan
    write(tmp_path, {f"{i:03d}.wav": float_wav(bad if i == 7 else noise(i, 1000)[0]) for i in range(120)})
    source = recordings.Recordings(tmp_path, 16000, crop=600)
    batch, good = source.fetch(np.arange(5, 10))
    assert good.tolist() == [True, True, False, True, True] and not batch["wave"][2].any()
    assert source.fault(7) == f"{tmp_path}/007.wav: sample 500 is not finite" and source.fault(8) == source.name(8)
    assert source.check() == (1, 120, [source.fault(7)])
    chunks = data.Chunks(source, np.arange(12), seed=0)
    batch = chunks[0, 12]
    assert batch["unusable"] == [source.fault(7)] and batch["wave"].shape == (12, 600) and 7 not in batch["rows"]
    write(tmp_path, {"009.wav": float_wav(bad)})
    with pytest.raises(UserError, match=r"2 of 120 recordings cannot be used, more than 1 in 100: .*7.wav: sample"):
        source.check()


def test_fingerprints_tell_other_data_and_other_rates(tmp_path):
    folder(tmp_path)
    first = recordings.Recordings(tmp_path, 16000).fingerprint()
    assert first == recordings.Recordings(tmp_path, 16000, crop=7).fingerprint() == json.loads(json.dumps(first))
    assert first != recordings.Recordings(tmp_path, 24000).fingerprint()
    write(tmp_path, {"voice_0/take_0.wav": wav(noise(0, 2001))})
    longer = recordings.Recordings(tmp_path, 16000).fingerprint()
    (tmp_path / "voice_0/take_0.wav").rename(tmp_path / "voice_0/other.wav")
    renamed = recordings.Recordings(tmp_path, 16000).fingerprint()
    assert len({facts["digest"] for facts in (first, longer, renamed)}) == 3


# Both

def sources(tmp_path):
    return recordings.Recordings(folder(tmp_path), 16000, crop=1600), recordings.Syllables(12, crop=1600)


def test_workers_give_the_same_batches_and_sources_can_be_sent_to_them(tmp_path):
    for source in sources(tmp_path):
        chunks = data.Chunks(source, source.split("train", 0.2, 0), seed=3)
        spans = [(0, 4), (4, 7), (7, 12)]
        plain = [item["wave"] for item in data.loader(chunks, spans)]
        for workers, sent in ((2, chunks), (0, pickle.loads(pickle.dumps(chunks)))):
            assert all(map(torch.equal, plain, (item["wave"] for item in data.loader(sent, spans, workers))))


# The built-in ones

def test_syllables_have_the_interface_of_recordings_and_are_rounded_to_16_bits():
    source = recordings.Syllables(60, crop=4000)
    waves, records = synthetic.syllables(range(60))
    assert len(source) == 60 and source.records(np.arange(2)) == records[:2]
    for row in (0, 7):
        assert source.frames(row) == len(waves[row]) and source.text(row) == records[row]["text"]
        assert source.speaker(row) == str(records[row]["speaker"])
        np.testing.assert_allclose(source.wave(row), waves[row], atol=2 ** -16 + 1e-7)
        torch.testing.assert_close(source.crop_wave(row, 100, 50), source.wave(row)[100:150])
    wave = source.fetch(np.array([7]), data.draws([1], 0))[0]["wave"][0]
    assert any(torch.equal(wave, window) for window in source.wave(7).unfold(0, 4000, 1))
    interface = {name for name in dir(recordings.Recordings) if not name.startswith("_")}
    assert all(hasattr(source, name) for name in (*interface, "speakers", "texts", "bad", "resampled", "embed_width"))
    assert (source.check(), source.resampled, source.text_embed(0)) == ((0, 0, []), "", None)
    parts = [source.split(part, 0.3, 0.3) for part in ("train", "validation", "test")]
    voices = [{source.speaker(row) for row in part} for part in parts]
    assert sum(map(len, parts)) == 60 and sum(map(len, voices)) == len(set.union(*voices)) == len(source.speakers)
    assert source.fingerprint() == recordings.Syllables(60).fingerprint() != recordings.Syllables(61).fingerprint()


def test_syllables_at_another_rate_are_resampled():
    source = recordings.Syllables(2, rate=8000)
    (wave, _), _ = synthetic.syllables(range(2))
    assert source.frames(0) == -(-len(wave) // 2)
    expected = audio.resample(torch.from_numpy(wave), 16000, 8000)
    torch.testing.assert_close(source.wave(0), expected, atol=2 ** -16 + 1e-6, rtol=0)


def test_syllables_are_drawn_once_and_the_oldest_are_dropped_where_memory_ends(monkeypatch):
    drawn, draw = [], synthetic.syllables
    monkeypatch.setattr(synthetic, "syllables", lambda rows: drawn.extend(rows) or draw(rows))
    monkeypatch.setattr(recordings.Syllables, "kept", {})
    monkeypatch.setattr(recordings.Syllables, "bytes", 0)
    source, again = recordings.Syllables(10, crop=100), recordings.Syllables(12, crop=50)
    first = source.fetch(np.arange(6))[0]["wave"]
    assert torch.equal(source.fetch(np.arange(6))[0]["wave"], first) and drawn == [*range(6)]
    assert torch.equal(again.wave(5), source.wave(5)) and drawn == [*range(6)]  # by another stage
    assert recordings.Syllables(6, rate=8000).frames(0) < source.frames(0) and drawn == [*range(6), 0]
    monkeypatch.setattr(recordings, "CACHED", source.bytes - 1)
    source.fetch(np.array([6]))
    assert (0, 16000) not in source.kept and {(5, 16000), (0, 8000), (6, 16000)} <= set(source.kept)
    assert source.bytes == sum(wave.nbytes for wave, _ in source.kept.values()) <= recordings.CACHED
    assert torch.equal(source.fetch(np.arange(6))[0]["wave"], first)
    assert len(pickle.dumps(source)) < 200


# Tokens

class Numbers:
    """A source of nothing but row numbers."""

    def __init__(self, rows, name="numbers"):
        self.rows, self.facts = rows, {"recordings": rows, "name": name}

    def __len__(self):
        return self.rows

    def fingerprint(self):
        return self.facts

    def fault(self, row):
        return f"row {row}: bad"


def tokens_of(row):
    return np.arange(3 * (row % 5 + 1)).reshape(-1, 3) * 1000 + row


def made(path, rows, key, bad=(), fails=None):
    """What a cache holds once it is made, and the rows that this rank encoded, or what stopped it."""
    encoded = []

    def encode(row):
        if row == fails:
            raise UserError(f"row {row}: out of order")
        if row in bad:
            raise audio.Unusable(f"row {row}: bad")
        encoded.append(row)
        return tokens_of(row)

    try:
        cache = recordings.token_cache(path, Numbers(rows), key, encode, "tokens")
    except UserError as error:
        return str(error), encoded, getattr(error, "relayed", False)
    return [cache[row] for row in range(len(cache))], encoded, cache.empty.tolist()


def made_in_turn(*calls):
    """What each call of `made` gives, with these arguments."""
    return [made(*arguments) for arguments in calls]


def test_a_cache_is_the_same_from_one_rank_and_two_and_is_used_again(tmp_path, on_ranks):
    key = {"codec": "abc", "streams": (1, 2)}
    calls = [(name, rows, key) for name, rows in (("few", 1), ("many", 150), ("many", 150))]
    ranks = on_ranks(2, made_in_turn, *((tmp_path / "two" / name, *rest) for name, *rest in calls))
    alone = made_in_turn(*((tmp_path / "one" / name, *rest) for name, *rest in calls))
    for results in (*ranks, alone):
        for (_, rows, _), (tokens, _, empty) in zip(calls, results):
            assert len(tokens) == rows and empty == [] and tokens[0].dtype == np.int64
            assert all(np.array_equal(tokens[row], tokens_of(row)) for row in range(rows))
        assert results[2][1] == []  # it was there
    shares = [set(results[1][1]) for results in ranks]
    assert not shares[0] & shares[1] and len(shares[0] | shares[1]) == 150 and min(map(len, shares)) > 50
    (one,), (two,) = (tmp_path / "one/many").iterdir(), (tmp_path / "two/many").iterdir()
    assert one.name == two.name and sorted(p.name for p in one.iterdir()) == ["ends.npy", "key.json", "tokens.npy"]
    assert all((one / p.name).read_bytes() == p.read_bytes() for p in two.iterdir())
    assert np.load(one / "tokens.npy").dtype == np.uint16


def test_a_cache_knows_lengths_without_reading_and_can_be_sent_to_a_worker(tmp_path):
    made(tmp_path, 40, {})
    cache = recordings.TokenCache(*tmp_path.iterdir())
    assert len(cache) == 40 and cache.streams == 3 and [cache.frames(row) for row in (0, 6, 39)] == [1, 2, 5]
    assert isinstance(cache.tokens, np.memmap) and len(pickle.dumps(cache)) < 500
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cache))[39], tokens_of(39))


def test_another_codec_or_other_data_get_a_cache_of_their_own_and_mixed_files_are_refused(tmp_path):
    made(tmp_path, 5, {"codec": "abc"})
    first, = tmp_path.iterdir()
    assert len(made(tmp_path, 5, {"codec": "def"})[1]) == 5 and len(made(tmp_path, 6, {"codec": "abc"})[1]) == 6
    assert len(list(tmp_path.iterdir())) == 3
    facts = json.loads((first / "key.json").read_text())
    (first / "key.json").write_text(json.dumps({**facts, "encoder codec": "xyz"}))
    message, encoded, _ = made(tmp_path, 5, {"codec": "abc"})
    assert "token cache of another codec" in message and "encoder codec is 'xyz' there and 'abc' here" in message
    assert str(first) in message and not encoded
    (first / "key.json").write_text(json.dumps(facts))
    (first / "tokens.npy").write_bytes((first / "tokens.npy").read_bytes()[:-4])
    assert "damaged token cache" in made(tmp_path, 5, {"codec": "abc"})[0]


def test_a_kill_at_any_write_leaves_nothing_or_a_whole_cache_and_the_next_call_goes_on(tmp_path, monkeypatch):
    replace, writes, done = recordings.checkpoint.os.replace, 0, False
    while not done:  # killed at the first write, then at the second, …, each time in a folder of its own
        path, left = tmp_path / str(writes), iter(range(writes))

        def dying(old, new, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            replace(old, new)

        monkeypatch.setattr(recordings.checkpoint.os, "replace", dying)
        try:
            made(path, 6, {})
            done = True
        except KeyboardInterrupt:
            pass
        monkeypatch.setattr(recordings.checkpoint.os, "replace", replace)
        assert done or not list(path.glob("*/key.json"))
        tokens, encoded, _ = made(path, 6, {})
        assert len(tokens) == 6 and all(np.array_equal(tokens[row], tokens_of(row)) for row in range(6))
        assert encoded == [*range(min(writes, 6), 6)]
        assert sorted(p.name for p in next(path.iterdir()).iterdir()) == ["ends.npy", "key.json", "tokens.npy"]
        writes += 1
    assert writes == 10  # six parts, three files, and once to the end


def test_parts_left_behind_after_the_last_write_are_removed(tmp_path):
    made(tmp_path, 6, {})
    place, = tmp_path.iterdir()
    write(place, {"part_003.npz": b"", "part_004.npz.tmp": b""})
    assert made(tmp_path, 6, {})[1] == [] and len(list(place.iterdir())) == 3


def test_an_error_on_one_rank_ends_all_and_what_was_done_is_kept(tmp_path, on_ranks):
    calls = [(tmp_path / name, 8, {}, (), fails) for name, fails in (("a", 0), ("b", 1), ("b", None))]
    ranks = on_ranks(2, made_in_turn, *calls)
    for fails in (0, 1):
        assert [results[fails][0] for results in ranks] == [f"row {fails}: out of order"] * 2
        assert [results[fails][2] for results in ranks] == [rank != fails for rank in (0, 1)]  # told once, where it was
    assert len(ranks[0][2][0]) == 8 and [results[2][1] for results in ranks] == [[], [1, 3, 5, 7]]


def test_a_row_that_cannot_be_encoded_is_empty_and_many_are_refused_until_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "BLOCKS", 30)
    tokens, _, empty = made(tmp_path / "few", 300, {}, (0, 150))
    assert empty == [0, 150] and tokens[0].shape == (0, 3) and np.array_equal(tokens[151], tokens_of(151))
    message, _, _ = made(tmp_path / "many", 300, {}, (0, 1, 150, 151))
    assert message.startswith("4 of 300 recordings cannot be used, more than 1 in 100: row 0: bad")
    tokens, encoded, empty = made(tmp_path / "many", 300, {})
    assert len(tokens) == 300 and empty == [] and encoded == [*range(10), *range(150, 160)]


def test_a_cache_of_real_recordings(tmp_path):
    source = recordings.Recordings(folder(tmp_path / "data"), 16000)
    cache = recordings.token_cache(tmp_path / "cache", source, {"hop": 320}, lambda row: source.wave(row)
                                   .mul(100).abs().long().numpy()[::320, None], "tokens")
    assert dist.world_size() == 1 and len(cache) == len(source)
    assert [cache.frames(row) for row in range(12)] == [-(-source.frames(row) // 320) for row in range(12)]
