"""Cached tokens and crops: ranks share the work, a kill loses little work, streams stay aligned."""

import collections
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_codec

from common import order
from common.config import UserError
from common.data import tokens
from common.data.files import Unusable
from common.data.recordings import Syllables
from common.models import semantic

Stream = collections.namedtuple("Stream", "name num_quantizers")
OF_ANOTHER_RANK = "of another rank"  # stands for an error raised there
STREAMS = [Stream("semantic", 1), Stream("coarse", 2), Stream("fine", 2)]
FORK = multiprocessing.get_context("fork")


def codes_of(index):
    return np.arange(3) + np.full((index % 5 + 1, 3), 100 * index)


class Numbers(Syllables):
    """Recordings whose waves are their numbers. Number 7 is unusable, and 50 raises UserError."""

    unusable = 7

    def wave(self, index):
        if fault := self.fault(index):
            raise Unusable(fault)
        if index == 50:
            raise UserError("recording 50: the disk is gone")
        return index

    def fault(self, index):
        return "" if index != self.unusable else f"recording {index}"


def settings(folder, workers=0):
    return SimpleNamespace(run_dir=folder, workers=workers, timeout_minutes=1)


def cached(folder, count, checksum, failing=None, workers=0):
    """Make or open a cache: (error or "", recordings encoded in this process)."""
    encoded = []

    def encode(index):
        if index == failing:
            raise UserError(f"recording {index}: out of order")
        encoded.append(index)
        return torch.from_numpy(codes_of(index))

    tokenizer = SimpleNamespace(checksum=checksum, encode=encode, num_quantizers=3)
    try:
        cache = tokens.token_cache(settings(folder, workers), Numbers(count), tokenizer)
    except (UserError, OSError) as error:
        return str(error), encoded
    except SystemExit as end:
        return end.code if end.code > 1 else OF_ANOTHER_RANK, encoded
    check(cache, count)
    assert not [*Path(folder).rglob("*.npz*")]
    return "", encoded


def check(cache, count):
    for index, found in enumerate(cache):
        expected = codes_of(index)[: 0 if index == Numbers.unusable else None]
        assert found.T.tolist() == expected.tolist()
        assert cache.frames[index] == len(expected)
        for start, stop in ((0, 2), (1, 3), (0, 6)):  # windows are cut at the recording's end
            window = cache.window(index, start, stop, slice(1, None))
            assert window.tolist() == expected[start:stop, 1:].tolist()
    assert index == count - 1


def contents(folder):
    """The bytes of the only cache below a folder."""
    [path] = Path(folder).rglob("tokens/*/tokens")
    return path.read_bytes()


def cached_again(folder):
    calls = [(1, "a"), (20, "a", 19), (20, "a"), (20, "a"), (20, "b")]
    return [cached(folder, *call) for call in calls]


def test_ranks_share_the_work_of_a_cache_and_after_an_error_what_was_done_is_kept(
    tmp_path, on_ranks
):
    alone = cached_again(tmp_path / "one")
    ranks = on_ranks(2, cached_again, tmp_path / "two")
    counts = []
    met = []
    for results in (alone, *ranks):
        errors = [error for error, _ in results]
        met.append(errors.pop(1))
        assert errors == [""] * 4
        counts.append([len(encoded) for _, encoded in results])
    message = "recording 19: out of order"
    assert met[0] == message
    assert sorted(met[1:]) == [OF_ANOTHER_RANK, message]
    assert counts[0] == [1, 18, 1, 0, 19]
    assert np.add(*counts[1:]).tolist() == counts[0]
    assert abs(counts[1][4] - counts[2][4]) == 1


def meeting_often(folder):
    tokens.PIECE_SECONDS = 0
    return cached(folder, 9, "a", workers=1)


def test_a_cache_is_the_same_file_from_one_rank_or_two_that_meet_and_read_ahead(tmp_path, on_ranks):
    assert cached(tmp_path / "one", 9, "a")[0] == ""
    ranks = on_ranks(2, meeting_often, tmp_path / "two")
    assert ranks == [("", [0, 2, 4, 6, 8]), ("", [1, 3, 5])]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_tokens_are_those_of_recordings_encoded_one_by_one(tmp_path):
    codec = make_codec()
    codec.checksum = "codec"
    dataset = Syllables(8, hop_length=codec.hop_length)
    kmeans = semantic.KMeans(8, semantic.MFCC(), dataset.rate)
    kmeans.checksum = "kmeans"
    kmeans.fit(kmeans.features(dataset.wave(0)), 0)
    for tokenizer in (codec, kmeans):
        cache = tokens.token_cache(settings(tmp_path), dataset, tokenizer)
        for index, found in enumerate(cache):
            expected = tokenizer.encode(dataset.wave(index)).reshape(found.shape[1], -1)
            assert found.T.tolist() == expected.tolist()


def test_a_cache_is_mapped_and_not_read_also_by_a_worker_that_gets_a_copy(tmp_path):
    tokenizer = SimpleNamespace(checksum="a", encode=codes_of, num_quantizers=3)
    cache = tokens.token_cache(settings(tmp_path), Numbers(20), tokenizer)
    copied = pickle.dumps(cache)
    assert len(copied) < 500
    caches = [cache, pickle.loads(copied)]
    with open(cache.arguments[0], "r+b") as file:
        file.seek(-2, 2)
        file.write((60000).to_bytes(2, "little"))
    for each in caches:
        assert each.window(19, 4, 5).tolist() == [[1900, 1901, 60000]]


def test_an_error_of_a_worker_that_reads_ahead_ends_the_run_and_what_was_done_is_kept(tmp_path):
    error, encoded = cached(tmp_path, 60, "a", workers=2)
    assert error == "recording 50: the disk is gone"
    assert encoded == [*range(7), *range(8, 50)]


# Kills


def in_a_process(work, *arguments):
    """The exit status of `work` in a separate process."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def end_at(folder, moment, number):
    """Make a cache in this process until a signal ends it.

    moment: a signal to send while recording `number` is encoded, or a call to replace with SIGKILL.
    The file `encoded` gets the numbers of encoded recordings.
    """
    with open(folder / "encoded", "a") as record:

        def encode(index):
            if moment in (signal.SIGTERM, signal.SIGKILL) and index == number:
                os.kill(os.getpid(), moment)
            print(index, file=record, flush=True)
            return codes_of(index)

        replace = os.replace

        def kill(path, target=None):
            if target and target.suffix:  # a piece, not the whole cache
                return replace(path, target)
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "replace":
            os.replace = kill
        if moment == "unlink":
            Path.unlink = kill
        tokens.PIECE_SECONDS = 0
        tokenizer = SimpleNamespace(checksum="a", encode=encode, num_quantizers=3)
        tokens.token_cache(settings(folder), Numbers(20), tokenizer)


def test_a_kill_at_any_moment_loses_the_recording_in_work(tmp_path):
    assert cached(tmp_path / "whole", 20, "a")[0] == ""
    folder = tmp_path / "killed"
    folder.mkdir()
    for number in (0, 1, 5, 6, 12, 19):
        assert in_a_process(end_at, folder, signal.SIGKILL, number) == -signal.SIGKILL
    for moment in ("replace", "unlink"):  # while joining: before the cache exists, and after
        assert in_a_process(end_at, folder, moment, 0) == -signal.SIGKILL
    assert in_a_process(end_at, folder, "", 0) == 0
    encoded = (folder / "encoded").read_text().split()
    assert encoded == [str(index) for index in range(20) if index != 7]
    assert contents(folder) == contents(tmp_path / "whole")
    assert {path.name for path in folder.rglob("*/*/*")} == {"tokens", ".lock"}


def test_a_signal_is_heard_and_the_recording_in_work_is_kept(tmp_path):
    assert in_a_process(end_at, tmp_path, signal.SIGTERM, 12) == 128 + signal.SIGTERM
    assert in_a_process(end_at, tmp_path, "", 0) == 0
    encoded = (tmp_path / "encoded").read_text().split()
    assert encoded == [str(index) for index in range(20) if index != 7]


@pytest.mark.parametrize("fault", ["cut", "changed", "empty"])
def test_a_damaged_piece_is_made_anew(fault, tmp_path):
    assert in_a_process(end_at, tmp_path, signal.SIGKILL, 12) == -signal.SIGKILL
    [piece] = tmp_path.rglob("4.npz")
    good = piece.read_bytes()
    changed = good.replace((401).to_bytes(2, "little"), b"12", 1)
    piece.write_bytes({"cut": good[:-1], "changed": changed, "empty": b""}[fault])
    assert cached(tmp_path, 20, "a") == ("", [4, *range(12, 20)])


@pytest.mark.parametrize("size", [0, 1, 100, -2])
def test_a_cache_of_another_size_is_made_anew(size, tmp_path):
    cached(tmp_path, 20, "a")
    good = contents(tmp_path)
    [path] = tmp_path.rglob("tokens/*/tokens")
    path.write_bytes(good[:size])
    assert len(cached(tmp_path, 20, "a")[1]) == 19  # `cached` compares the tokens
    assert contents(tmp_path) == good


def fill_the_disk(folder):
    tokens.PIECE_SECONDS = 0
    # A piece with one recording has 772 bytes, plus 6 per frame.
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, 800))
    error, encoded = cached(folder, 20, "a")
    assert "File too large, writing" in error, error
    assert "4.npz" in error
    assert encoded == [0, 1, 2, 3, 4]


def test_a_full_disk_ends_the_run_with_the_name_of_the_file_and_what_fitted_is_kept(tmp_path):
    assert in_a_process(fill_the_disk, tmp_path) == 0
    assert cached(tmp_path, 20, "a")[1][0] == 4


TOGETHER = FORK.Barrier(2)


def cached_together(folder):
    TOGETHER.wait()
    return cached(folder, 20, "a")


def test_runs_at_the_same_time_share_a_cache_and_what_was_mended_is_encoded(tmp_path, monkeypatch):
    with FORK.Pool(2) as pool:
        results = pool.map(cached_together, [tmp_path] * 2, chunksize=1)
    assert [error for error, _ in results] == ["", ""]
    assert sum(len(encoded) for _, encoded in results) == 19
    monkeypatch.setattr(Numbers, "unusable", None)
    assert cached(tmp_path, 20, "a") == ("", [7])
    assert cached(tmp_path, 20, "a") == ("", [])


# Crops


def written(arrays, num_quantizers):
    """Write arrays (T, Q) or (T,) to a file, and open it as cached tokens."""
    path = Path(f"tokens of {num_quantizers}").absolute()
    arrays = [np.asarray(x, np.uint16).reshape(-1, num_quantizers).T for x in arrays]
    frames = np.array([x.shape[1] for x in arrays])
    tokens.write_tokens(path, frames, ((i, x.copy()) for i, x in enumerate(arrays)))
    return tokens.Tokens(path, len(arrays), num_quantizers)


def make_crops(frames, frame_rate=50, words=None):
    """TokenCrops of 40 frames, for recordings with the lengths `frames`.

    A token is the number of its frame, plus 1,000 per quantizer before it. words: semantic tokens
    to use instead.
    """
    numbers = range(len(frames))
    dataset = SimpleNamespace(
        texts=[f"text {index}" for index in numbers],
        names=[f"{index}.wav" for index in numbers],
    )
    words = words or [np.arange(n * 50 / frame_rate, dtype=int) for n in frames]
    codes = [np.arange(n)[:, None] + [0, 1000, 2000, 3000, 4000] for n in frames]

    def ends(streams, samples):
        assert streams == STREAMS
        return {"ended": [ended for _, ended in samples]}

    return tokens.TokenCrops(
        dataset,
        40 / frame_rate,
        STREAMS,
        ends,
        written(words, 1),
        written(codes, 5),
        frame_rate,
    )


def without_codes(crops):
    """The same crops with only semantic tokens, 50 per second."""
    return tokens.TokenCrops(
        crops.dataset,
        crops.seconds,
        STREAMS[:1],
        crops.lay_out,
        crops.semantic_tokens,
        None,
        50,
    )


@pytest.mark.parametrize("rate", [25, 50, 62.5, 80])
def test_tokens_of_a_crop_are_of_the_same_time_and_only_true_ends_end(rate):
    lengths = [200, 40, 31, 41]
    crops = make_crops(lengths, rate)
    for index, offset in itertools.product(range(4), (0.0, 0.21, 0.499, 0.5, 0.77, 0.999)):
        (words, coarse, fine), ended = crops.crop(index, offset)
        first, last = coarse[[0, -1], 0]
        assert len(coarse) == min(40, lengths[index])
        assert (fine == coarse + 2000).all()  # quantizers 2 and 3, after coarse's 0 and 1
        assert abs(first / rate - words[0] / 50) <= 0.5 / 50 + 1e-6
        assert abs((last + 1) / rate - (words[-1] + 1) / 50) <= 1 / 50 + 1e-6
        assert ended == (last == lengths[index] - 1)
        assert not ended or words[-1] == crops.semantic_tokens.frames[index] - 1
    batch, usable = crops.fetch(np.arange(4))
    # A text belongs to a whole recording, so a part of it has no text.
    assert batch == {"ended": [False, True, True, False], "text": ["", "text 1", "text 2", ""]}
    assert usable.all()
    batch, _ = crops.fetch(np.zeros(2000, int), order.random_bits(np.arange(2000), 0))
    assert 2 < sum(batch["ended"]) < 30  # one crop in 161 reaches the end


def test_repeated_semantic_tokens_are_removed_and_empty_recordings_are_unusable():
    crops = make_crops([6, 0], words=[[5, 5, 3, 3, 3, 5], []])
    (words, _, _), _ = crops.crop(0)
    assert words.tolist() == [[5], [3], [5]]
    _, usable = crops.fetch(np.arange(2))
    assert usable.tolist() == [True, False]
    assert crops.readable(np.arange(2)).tolist() == [0]
    crops.streams = STREAMS[:2]
    assert crops.lengths(np.arange(2)) == {"max_frames": 6, "max_context": 3, "frame_rate": 50}


@pytest.mark.parametrize(
    "start, stop, expected",
    [
        (0, 30, "ABC"),
        (15, 30, "BC"),  # B is still sounding
        (9, 11, "AB"),
        (12, 12, "B"),  # an empty window
        (0, 0, "A"),
    ],
)
def test_a_window_has_the_tokens_that_sound_in_it_and_one_at_least(start, stop, expected):
    crops = make_crops([30], words=[np.repeat([7, 8, 9], 10)])
    words, _, _ = crops.window(0, start, stop)
    assert "".join("ABC"[token - 7] for token in words[:, 0]) == expected


def flickering(content, durations, share, generator):
    """(tokens heard, the position of each): `content` with some tokens replaced by others."""
    places = np.repeat(np.arange(len(content)), durations)
    heard = content[places]
    flickers = generator.random(len(heard)) < share
    others = generator.integers(0, content.max() + 1, len(heard))
    return np.where(flickers, others, heard), places


def test_what_is_heard_finds_its_place_though_a_tenth_of_it_flickers():
    """In these 30 s, counting changes of the token would be off by over 100 positions."""
    generator = np.random.default_rng(0)
    content = generator.integers(0, 36, 800)
    content = content[np.append(True, np.diff(content) != 0)]
    durations = generator.integers(1, 5, len(content))
    heard, places = flickering(content, durations, 0.1, generator)
    heard = heard[:1500]
    places = places[:1500]
    assert (np.diff(heard) != 0).sum() > places[-1] + 100
    found = tokens.align(content, heard)
    assert set(np.diff(found)) == {0, 1}  # nothing is skipped or repeated
    assert abs(found - places).max() <= 2
    assert (found == places).mean() > 0.95
    heard, places = flickering(content, durations, 0.0, generator)
    assert (tokens.align(content, heard) == places).all()


def test_lengths_are_those_of_crops_at_any_place_and_not_of_the_silence_before():
    silence = np.zeros(300, int)
    crops = make_crops([400] * 50, words=[np.append(silence, np.arange(100))] * 50)
    crops.streams = STREAMS[:2]
    assert all(len(crops.crop(index)[0][0]) == 1 for index in range(50))  # silence
    assert crops.lengths(np.arange(50))["max_context"] == 40


def test_with_texts_the_longest_sound_is_one_window_and_without_most_are():
    crops = without_codes(make_crops([10] * 99 + [40]))
    assert crops.lengths(np.arange(100))["max_frames"] == 40
    crops.dataset.texts = [""] * 100
    assert crops.lengths(np.arange(100))["max_frames"] == 10


def test_a_whole_recording_may_be_followed_by_another_of_its_speaker_with_both_texts():
    crops = make_crops([10, 12, 14, 200, 30])
    crops.dataset.speaker_of = [0, 0, "b", 0, 0]  # the built-in speakers are numbers
    crops.join_within(np.array([0, 1, 2, 3]), 0.5)
    for draw, which, expected in (
        (0.6, 0.0, ([0], "text 1")),
        (0.4, 0.0, ([0, 0], "text 1 text 0")),
        (0.4, 0.9, ([0, 0], "text 1 text 1")),
    ):
        (words, coarse, fine), ended, text = crops.sample(1, 0.0, draw, which)
        starts, expected_text = expected
        assert (coarse[:, 0] == 0).sum() == len(starts)
        assert len(coarse) == len(fine) == 12 + (0, 10, 12)[len(starts) - 1 + (which > 0.5)]
        assert text == expected_text
        assert ended
    assert words[:, 0].tolist() == [*range(12), *range(12)]
    assert crops.sample(2, 0.0, 0.0, 0.9)[2] == "text 2 text 2"  # the only one of its speaker
    assert crops.sample(3, 0.0, 0.0, 0.0)[2] == ""  # not a whole recording
    assert crops.sample(4, 0.0, 0.0, 0.9)[2] == "text 4"  # 42 frames are too many
    crops.dataset.texts[1] = ""
    assert crops.sample(0, 0.0, 0.0, 0.9)[2] == ""  # one of the two has no text
    crops.dataset.texts[1] = "text 1"
    crops = without_codes(crops)
    crops.join_within(np.array([0, 1, 2, 3]), 0.5)
    assert crops.lengths(np.arange(2))["max_frames"] > 12
    crops.lay_out = lambda streams, samples: {}
    batch, _ = crops.fetch(np.arange(3))
    assert batch["text"] == ["text 0", "text 1", "text 2"]  # not joined in evaluation


def test_a_recording_whose_speaker_is_not_known_is_followed_by_itself_alone():
    crops = make_crops([10, 12, 14, 10])
    crops.dataset.speaker_of = [""] * 4
    crops.dataset.names[3] = crops.dataset.names[0]  # a shifted copy of recording 0
    crops.join_within(np.arange(4), 1.0)
    for index, followers in enumerate([{0, 3}, {1}, {2}, {0, 3}]):
        assert set(crops.others[crops.voice_of(index)]) == followers
        assert crops.sample(index, 0.0, 0.0)[2].startswith(f"text {index} text ")


def test_it_is_said_how_many_recordings_are_too_long_for_their_text(capsys):
    crops = make_crops([200, 40, 31])
    assert tokens.learn_vocabulary(crops, np.arange(3), 5, 20)
    err = capsys.readouterr().err
    assert "1 of 3 recordings are longer than a crop, up to 4.00 s (0.wav)" in err
    with pytest.raises(UserError, match=r"up to 4\.00 s \(0\.wav\).* give --seconds 4\.00"):
        tokens.learn_vocabulary(crops, np.arange(1), 5, 20)


def test_the_benchmark_gives_its_lines(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    bench = importlib.import_module("bench_tokens")
    monkeypatch.setattr("sys.argv", ["bench_tokens", "--hours", "0.1", "--crops", "100"])
    bench.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [(line["case"], line.get("processes")) for line in lines]
    crops = [(stage, processes) for stage in ("coarse", "fine") for processes in (1, 2)]
    assert cases == [("write", None), ("open", None), *crops]
    assert all(line.get("crops_per_s", 1) > 0 for line in lines)
