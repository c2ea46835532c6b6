"""Recordings: folders of audio files of the user, the built-in syllables, and caches of the tokens made of either.

`Recordings` and `Syllables` are sources for data.Chunks: `fetch` gives crops of waves.
"""
import collections
import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from common import audio, checkpoint, data, dist, synthetic, tracker
from common.audio import Unusable
from common.config import UserError

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus")
FEW = 5  # broken files that are left out however few there are in all; of many, data.BAD_SHARE
ENOUGH_SPEAKERS = 20  # from as many on they are what is split, so that validation is by voices never heard
LOOKED_AT = 60  # seconds of a recording that `check` reads
CACHED = 2 ** 29  # bytes of drawn syllables that a process keeps
BLOCKS = 128  # parts in which tokens are cached, whatever the number of ranks: a kill costs each rank one at most


class _Source:
    """What both have in common, given `rate`, `crop`, `keys`, `who` (the speakers), `by` ("auto", "speaker" or "file",
    which is what `split` keeps together), frames (of a row), crop_wave, name.

    fetch(rows, draws) -> ({"wave": float32 (n, crop)}, good (n,)): with draws, a number a sample, from a random place;
    without, from the middle; shorter recordings have silence behind them. A row whose samples cannot be read or are
    not finite is not good; `fault` says why.
    """

    augments = True

    def __len__(self):
        return len(self.keys)

    def speaker(self, row):
        return self.who[row]

    def split(self, part, validation, test, seed=0):
        """The rows (int64, ascending) of "train", "validation" or "test", by a hash of the seed and a key, taken once.

        The key is the speaker or the file (its path below the folder, without suffix), as `by` says, so rows keep their
        part when others are added; "auto" is by speaker from 20 of them on, with fewer of which a part may get none.
        """
        by_speaker = self.by == "speaker" or (self.by == "auto" and len(self.speakers) >= ENOUGH_SPEAKERS)
        if (validation, test, seed) not in self.parts:
            keys = self.who if by_speaker else self.keys
            self.parts[validation, test, seed] = np.array([data.part_of(key, validation, test, seed) for key in keys])
        return np.flatnonzero(self.parts[validation, test, seed] == part)

    def wave(self, row):
        """The whole recording, float32 (T,), mixed down to one channel, at `rate`; raises Unusable."""
        return self.crop_wave(row, 0, self.frames(row))

    def readable(self, rows):
        """Those of the `rows` (n,) whose recordings can be read, as a list, and their waves."""
        found = {}
        for row in map(int, rows):
            with contextlib.suppress(Unusable):
                found[row] = self.wave(row)
        return [*found], [*found.values()]

    def fetch(self, rows, draws=None):
        """Read crops of `rows` (n,) in any order, at places made of `draws` (n,), if given."""
        waves, good, lengths = torch.zeros(len(rows), self.crop), np.ones(len(rows), bool), [0] * len(rows)
        places = np.full(len(rows), 0.5) if draws is None else data.uniform(draws, 1)[:, 0]
        for i, row in enumerate(map(int, rows)):
            spare = max(0, self.frames(row) - self.crop)
            try:
                wave = self.crop_wave(row, int(places[i] * (spare + 1)), self.crop)
            except Unusable:
                good[i] = False
            else:
                waves[i, :len(wave)], lengths[i] = wave, len(wave)
        return {"wave": waves, "length": torch.tensor(lengths)}, good

    def fault(self, row):
        """What is wrong with an unusable row, after its name; just its name if nothing is."""
        try:
            self.wave(int(row))
        except Unusable as error:
            return str(error)
        return self.name(row)


# The user's

class Recordings(_Source):
    """A folder tree of audio files, in the order of their names: .wav, .flac, .ogg, .mp3, .opus of any rate.

    rate:     samples a second that all are brought to
    crop:     samples that `fetch` gives of each
    pattern:  regular expression whose first group, found in a file's name, is the speaker; "": the folder it lies in
    least:    samples at `rate` below which a recording is left out

    A transcript is NAME.txt beside, or the line "NAME text" of a *.trans.txt there (LibriSpeech); `texts` counts them.
    A text's embedding is NAME.npy beside, (L, E), float16 or float32; `embed_width` is E, 0 if there are none. Headers
    are read once, here; `bad` says what is wrong with the recordings left out, `resampled` which are of other rates.
    """

    def __init__(self, path, rate, crop=0, pattern="", least=1, by="auto"):
        self.path, self.rate, self.crop, self.by, self.parts = Path(path), rate, crop, by, {}
        found = sorted((Path(folder) / name).relative_to(self.path).as_posix()
                       for folder, _, names in os.walk(self.path) for name in names if not name.startswith("."))
        files = [name for name in found if name.lower().endswith(SUFFIXES)]
        if not files:
            what = f"no audio files below it, {len(found)} others" if self.path.is_dir() else "no such folder"
            raise UserError(f"{path}: {what}; expected a folder with {', '.join(SUFFIXES)} files below it")
        self.files, self.bad, headers = [], [], []
        for name in tracker.progress(files, desc="reading headers", delay=3, leave=False, disable=not dist.is_main()):
            try:
                header = audio.info(self.path / name)
                audio.source_span(0, 1, header.rate, rate)  # UserError if this ratio cannot be resampled
                if (length := audio.resampled_length(header.frames, header.rate, rate)) < least:
                    raise Unusable(f"{self.path / name}: {header.frames} samples at {header.rate} Hz, {length} at "
                                   f"{rate}, shorter than a frame of {least}")
                self.files.append(name)
                headers.append(header)
            except Unusable as error:
                self.bad.append(str(error))
        if not self.files or len(self.bad) > max(FEW, data.BAD_SHARE * len(files)):
            raise UserError(f"{path}: {len(self.bad)} of {len(files)} recordings cannot be used: {self.bad[0]}"
                            f"{', …' if len(self.bad) > 1 else ''}; mend or remove them")
        self.headers = np.array(headers, np.int64)  # (n, 3): samples, rate, channels
        others = collections.Counter(self.headers[self.headers[:, 1] != rate, 1].tolist())
        others = [f"{count} of {len(headers)} recordings at {other} Hz" for other, count in sorted(others.items())]
        self.resampled = f"{' and '.join(others)} are resampled to {rate}" if others else ""
        self.lengths = audio.resampled_length(self.headers[:, 0], self.headers[:, 1], rate)
        self.keys, self.who = [name.rpartition(".")[0] for name in self.files], _speakers(self.files, pattern)
        self.speakers, beside = sorted(set(self.who)), set(found)
        self.has_text = np.array([f"{key}.txt" in beside for key in self.keys])
        self.has_embed = np.array([f"{key}.npy" in beside for key in self.keys])
        lines = dict(line for name in found if name.endswith(".trans.txt") for line in self._lines(name))
        self.lines = {row: lines[key] for row, key in enumerate(self.keys) if key in lines and not self.has_text[row]}
        self.texts, first = int(self.has_text.sum()) + len(self.lines), self.keys[self.has_embed.argmax()]
        self.embed_width = data.open_array(self.path / f"{first}.npy", 2).shape[1] if self.has_embed.any() else 0

    def _lines(self, name):
        """(key, text) of each line "NAME text" of a file that lies beside the recordings it is about."""
        for line in (self.path / name).read_text("utf-8", errors="replace").splitlines():
            key, _, text = line.strip().partition(" ")
            yield (Path(name).parent / key).as_posix(), text.strip()

    def name(self, row):
        return str(self.path / self.files[row])

    def frames(self, row):
        return int(self.lengths[row])

    def text(self, row):
        """The transcript of a row, "" if there is none."""
        if self.has_text[row]:
            return (self.path / f"{self.keys[row]}.txt").read_text("utf-8", errors="replace").strip()
        return self.lines.get(row, "")

    def text_embed(self, row):
        """The embedding (L, E) of a row's text in float32, None if there is none; raises Unusable."""
        if not self.has_embed[row]:
            return None
        path = self.path / f"{self.keys[row]}.npy"
        try:
            values = np.array(data.open_array(path, 2), np.float32)
        except UserError as error:
            raise Unusable(str(error)) from error
        if values.shape[1] != self.embed_width or not np.isfinite(values).all():
            raise Unusable(f"{path}: of shape {values.shape}, or not finite; expected (length, {self.embed_width})")
        return values

    def crop_wave(self, row, start, length):
        """wave(row)[start:start + length], for which only that part of the file is decoded; raises Unusable."""
        rate = int(self.headers[row, 1])
        length = max(0, min(length, self.frames(row) - start))
        first, count, skip = audio.source_span(start, length, rate, self.rate)
        samples, _ = audio.read(self.path / self.files[row], first, count)
        mono = torch.from_numpy(samples.mean(0, dtype=np.float32))
        return audio.resample(mono, rate, self.rate)[skip:skip + length]

    def check(self, most=256):
        """(unusable, looked at, what is wrong with the first): reads `most` evenly spaced ones, a minute of each.

        UserError if more than 1 in 100 cannot be used.
        """
        rows, faults = np.unique(np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64)).tolist(), []
        for row in rows:
            try:
                self.crop_wave(row, 0, LOOKED_AT * self.rate)
                self.text_embed(row)
            except Unusable as error:
                faults.append(str(error))
        if len(faults) > data.BAD_SHARE * len(rows):
            raise UserError(f"{self.path}: {len(faults)} of {len(rows)} recordings cannot be used, more than 1 in 100: "
                            f"{faults[0]}; mend or remove them")
        return len(faults), len(rows), faults[:5]

    def fingerprint(self):
        """Plain facts that change when the data does: recordings, samples, rate, digest of names and headers."""
        digest = hashlib.sha256("\n".join(self.files).encode(errors="surrogateescape") + self.headers.tobytes())
        return {"recordings": len(self), "samples": int(self.lengths.sum()), "rate": self.rate,
                "digest": digest.hexdigest()[:16]}


def _speakers(files, pattern):
    """The speaker of each of the `files`, paths: the folder it lies in, or what the `pattern` finds in its name."""
    if not pattern:
        return [Path(name).parent.name for name in files]
    try:
        groups = re.compile(pattern).groups
    except re.error:
        groups = 0
    if not groups:
        raise UserError(f"--speaker_pattern {pattern}: expected a regular expression with the speaker's part of a "
                        "file's name in parentheses")
    found = [re.search(pattern, Path(name).name) for name in files]
    if missing := [name for name, match in zip(files, found) if not match or not match[1]]:
        raise UserError(f"--speaker_pattern {pattern}: finds no speaker in {len(missing)} of {len(files)} names, such "
                        f"as {missing[0]}")
    return [match[1] for match in found]


# The built-in ones

class Syllables(_Source):
    """The first `rows` of the built-in syllables, with the interface of Recordings.

    They are drawn when needed, and kept for all of a process: every stage opens the same ones anew.
    """

    bad, resampled, embed_width = (), "", 0
    kept, bytes = {}, 0  # {(row, rate): (wave, record)}, and the size of the waves

    def __init__(self, rows, crop=0, rate=synthetic.RATE, by="auto"):
        self.crop, self.rate, self.by, self.parts, self.texts = crop, rate, by, {}, rows
        self.keys, self.who = [[str(f(row)) for row in range(rows)] for f in (int, synthetic.speaker_of)]
        self.speakers = sorted(set(self.who))

    def __reduce__(self):
        """Draws anew in a worker that is not forked, rather than be sent all waves."""
        return Syllables, (len(self), self.crop, self.rate, self.by)

    def _drawn(self, row):
        """(int16 wave (T,) at `rate`, record) of a row."""
        key = int(row), self.rate
        if key not in self.kept:
            (wave,), (record,) = synthetic.syllables([key[0]])
            wave = audio.resample(torch.from_numpy(wave), synthetic.RATE, self.rate).numpy()
            self.kept[key] = np.clip(np.round(wave * 32768), -32768, 32767).astype(np.int16), record
            Syllables.bytes += self.kept[key][0].nbytes
            while self.bytes > CACHED and len(self.kept) > 1:
                Syllables.bytes -= self.kept.pop(next(iter(self.kept)))[0].nbytes  # the oldest
        return self.kept[key]

    def records(self, rows):
        """A record for each of `rows` (n,): its "text", "speaker" and the rest that synthetic.syllables tells."""
        return [self._drawn(row)[1] for row in rows]

    def name(self, row):
        return f"syllables {row}"

    def frames(self, row):
        return len(self._drawn(row)[0])

    def text(self, row):
        return self._drawn(row)[1]["text"]

    def text_embed(self, row):
        return None

    def crop_wave(self, row, start, length):
        """wave(row)[start:start + length]."""
        return torch.from_numpy(self._drawn(row)[0][start:start + length] / np.float32(32768))

    def check(self, most=256):
        return 0, 0, []

    def fingerprint(self):
        """Plain facts that change when the data does: recordings, rate, digest of the first waves."""
        digest = hashlib.sha256(b"".join(self._drawn(row)[0].tobytes() for row in range(min(4, len(self)))))
        return {"recordings": len(self), "rate": self.rate, "digest": digest.hexdigest()[:16]}


# Tokens

class TokenCache:
    """Tokens of every recording of a source, as `token_cache` writes them: [row] -> int64 numpy (frames, streams).

    `empty` are the rows without any, as they could not be read.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            self.tokens = np.load(self.folder / "tokens.npy", mmap_mode="r")
            self.ends = np.load(self.folder / "ends.npy")
            self.streams = self.tokens.shape[1]
            assert len(self.tokens) == self.ends[-1], f"{len(self.tokens)} frames, expected {self.ends[-1]}"
        except Exception as error:  # numpy meets a damaged file with any of a dozen types
            raise UserError(f"{folder}: damaged token cache ({error}); remove the folder") from error
        self.starts = np.append(0, self.ends[:-1])
        self.empty = np.flatnonzero(self.ends == self.starts)

    def __reduce__(self):
        return TokenCache, (self.folder,)

    def __len__(self):
        return len(self.ends)

    def frames(self, row):
        return int(self.ends[row] - self.starts[row])

    def __getitem__(self, row):
        return self.tokens[self.starts[row]:self.ends[row]].astype(np.int64)


def token_cache(folder, source, key, encode, desc):
    """The TokenCache of a `source`, made below `folder` if it is not there; all ranks call it, and encode their share.

    key:    plain facts of what encodes, which with those of the source name the cache's own folder
    encode: encode(row) -> int numpy (frames, streams), 0 to 65535; where it raises Unusable, the row gets no frames
    desc:   what the progress bar says

    key.json is written last: without it there is no cache, only parts, which the next call goes on from. Raises
    UserError if more than 1 in 100 rows are unusable, or the folder holds a cache of something else.
    """
    facts = {f"{of} {name}": value for of, those in (("encoder", key), ("data", source.fingerprint()))
             for name, value in those.items()}
    place = Path(folder) / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    if not dist.on_main(lambda: _complete(place, facts)):
        blocks = np.array_split(np.arange(len(source)), min(BLOCKS, len(source)))
        parts = [(place / f"part_{number:03d}.npz", rows.tolist()) for number, rows in enumerate(blocks)]
        dist.at_once(lambda: _encode_parts(parts[dist.rank()::dist.world_size()], encode, desc))
        dist.on_main(lambda: _join(place, facts, source, [path for path, _ in parts]))
    return dist.on_each(lambda: TokenCache(place))


def _complete(place, facts):
    """Whether there is a whole cache at `place`; UserError if it is one of other facts."""
    if not (place / "key.json").exists():
        return False
    there, facts = json.loads((place / "key.json").read_text()), json.loads(json.dumps(facts))
    if differing := [f"{name} is {there.get(name)!r} there and {facts.get(name)!r} here"
                     for name in sorted(there.keys() | facts.keys()) if there.get(name) != facts.get(name)]:
        raise UserError(f"{place}: token cache of another codec or of other data: {'; '.join(differing)}; remove the "
                        "folder")
    for scrap in place.glob("part_*"):  # of a process killed at the very end
        scrap.unlink(missing_ok=True)
    return True


def _encode_parts(parts, encode, desc):
    """Write what is not there of `parts` (path, rows): .npz of "tokens" uint16 (frames, streams) and "lengths"."""
    parts = [(path, rows) for path, rows in parts if not path.exists()]
    with tracker.progress(total=sum(len(rows) for _, rows in parts), desc=desc, unit=" recordings",
                          disable=not dist.is_main()) as bar:
        for path, rows in parts:
            encoded = []
            for row in rows:
                try:
                    encoded.append(np.asarray(encode(row)))
                    assert not encoded[-1].size or 0 <= encoded[-1].min() <= encoded[-1].max() < 2 ** 16, "16 bits"
                except Unusable:
                    encoded.append(())
                bar.update()
            tokens = [tokens for tokens in encoded if len(tokens)] or [np.empty((0, 0))]
            with checkpoint.replacing(path) as file:
                np.savez(file, tokens=np.concatenate(tokens).astype("<u2"), lengths=[len(t) for t in encoded])


def _join(place, facts, source, parts):
    """Make one array of the files `parts`; key.json commits it."""
    if _complete(place, facts):
        return  # by another run, at the same time
    arrays = [np.load(path) for path in parts]  # opened, and read one at a time
    lengths = np.concatenate([part["lengths"] for part in arrays])
    if len(empty := np.flatnonzero(lengths == 0)) > data.BAD_SHARE * len(lengths):
        for path, part in zip(parts, arrays):
            if not part["lengths"].all():
                path.unlink()  # to be made again when the recordings are mended
        raise UserError(f"{len(empty)} of {len(lengths)} recordings cannot be used, more than 1 in 100: "
                        f"{source.fault(empty[0])}, …; mend or remove them")
    with checkpoint.replacing(place / "tokens.npy") as file:
        shape = int(lengths.sum()), max(part["tokens"].shape[1] for part in arrays)
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": shape})
        for part in arrays:
            file.write(part["tokens"].tobytes())
    with checkpoint.replacing(place / "ends.npy") as file:
        np.save(file, np.cumsum(lengths))
    checkpoint.write_json(facts, place / "key.json")
    for path in parts:
        path.unlink()
