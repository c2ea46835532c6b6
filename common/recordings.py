"""Recordings: audio files, resampling, spectra; folders of recordings, the built-in syllables, caches of their tokens.

WAV needs numpy alone; flac, ogg, opus and mp3 are read by soundfile. A wave is float in [-1, 1], time last.
"""
import collections
import contextlib
import functools
import hashlib
import math
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, config, data, dist, synthetic, tracker
from common.config import UserError, need

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus")
SAMPLES = {(1, 8): ("u1", 2 ** 7), (1, 16): ("<i2", 2 ** 15), (1, 24): ("<i4", 2 ** 31), (1, 32): ("<i4", 2 ** 31),
           (3, 32): ("<f4", 1), (3, 64): ("<f8", 1)}  # format tag and bits of a WAV file: type and full scale
LEAD = {"MP3": 2, "OGG": 5}  # seconds to decode before a crop: MP3's bit reservoir, the last page of Vorbis
RATES, LOUDEST = range(1_000, 768_001), 100  # Hz, and how far a float sample may be beyond full scale
MARGIN = 1024  # samples of silence between the ends of a wave that is resampled, and read on both sides of a crop


class Unusable(UserError):
    """A recording that cannot be used, with the reason; training goes on with the next one."""


def read(path):
    """(float32 numpy (C, T), samples a second) of a whole file, as `read_part`."""
    return read_part(path, 0, None)[:2]


def read_part(path, start, stop):
    """(float32 numpy (C, T) of the samples `start` to `stop`, samples a second, samples a channel in all).

    Only that is decoded. Unusable if the file is damaged or samples are not finite, UserError if soundfile is missing.
    """
    if not Path(path).is_file():
        raise Unusable(f"{path}: not a file")  # a named pipe would wait without end
    reader = _read_wav if Path(path).suffix.lower() == ".wav" else _read_by_soundfile
    wave, rate, total = reader(path, start, stop)
    if rate not in RATES:
        raise Unusable(f"{path}: {rate} Hz, expected {RATES[0]} to {RATES[-1]}")
    if not (np.abs(wave) <= LOUDEST).all():
        raise Unusable(f"{path}: samples that are not finite, or above {LOUDEST} times full scale")
    return wave, rate, total


def _read_by_soundfile(path, start, stop):
    soundfile = need("soundfile", f"{path}: reading {Path(path).suffix}")
    try:
        with soundfile.SoundFile(str(path)) as file:
            start = min(start, file.frames)
            lead = min(start, LEAD.get(file.format, 0) * file.samplerate)
            file.seek(start - lead)
            samples = file.read(-1 if stop is None else lead + stop - start, dtype="float32", always_2d=True)
            return np.ascontiguousarray(samples[lead:].T), file.samplerate, file.frames
    except soundfile.SoundFileError as error:
        raise Unusable(f"{path}: not a readable audio file ({error})") from error


def _read_wav(path, start, stop):
    """Multimedia Programming Interface and Data Specifications 1.0 (IBM & Microsoft 1991), pp. 56-65."""
    size, chunks, place = Path(path).stat().st_size, {}, 12
    content = np.memmap(path, mode="r") if size else b""
    if bytes(content[:4]) + bytes(content[8:12]) != b"RIFFWAVE":
        raise Unusable(f"{path}: not a WAV file, or an empty one")
    while place + 8 <= size and b"data" not in chunks:
        name, length = struct.unpack_from("<4sI", content, place)
        chunks[name] = place + 8, length
        place += 8 + length + length % 2  # chunks begin at even bytes
    (form, _), (place, length) = (chunks.get(name, (size, 1)) for name in (b"fmt ", b"data"))
    if not length or length > 0x7FFF0000:  # of a stream, by sox or ffmpeg: it goes to the end of the file
        length = min(length or size, size - place)
    if (least := max(form + 26, place + length)) > size:
        raise Unusable(f"{path}: truncated, {size} bytes, expected {least} or more")
    tag, channels, rate, bits, subformat = struct.unpack_from("<HHI6xH8xH", content, form)
    kind, scale = SAMPLES.get((subformat if tag == 0xFFFE else tag, bits), ("", 0))  # WAVE_FORMAT_EXTENSIBLE
    if not (kind and channels):
        raise Unusable(f"{path}: unsupported, format {tag} of {bits} bits, {channels} channels; make it PCM")
    total, width = length // (channels * bits // 8), bits // 8
    samples = content[place:place + total * channels * width].reshape(total, channels, width)[start:stop]
    samples = np.pad(samples, ((0, 0), (0, 0), (int(bits == 24), 0))).view(kind)[..., 0]  # 24 bits: the upper of 32
    wave = samples.T.astype(np.float32, order="C") / scale - int(bits == 8)  # 8 bits alone are unsigned
    return wave, rate, total


def write_wav(file, wave, rate):
    """Write a wave (T,) or (C, T), numpy or tensor, as 16-bit PCM to a path or an open binary file; it is clipped."""
    wave = np.atleast_2d(torch.as_tensor(wave).detach().cpu().float().numpy())
    samples, align = np.clip(np.round(wave.T * 32768), -32768, 32767).astype("<i2").tobytes(), 2 * len(wave)
    header = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVEfmt ", 16, 1, len(wave), rate,
                         rate * align, align, 16, b"data", len(samples))
    file.write(header + samples) if hasattr(file, "write") else Path(file).write_bytes(header + samples)


def resampled_length(frames, rate, to):
    """How many samples `frames` at `rate` are at `to`."""
    return -(-frames * to // rate)


def resample(wave, rate, to):
    """Waves (..., T) at `rate` -> float32 (..., ceil(T * to / rate)) at `to` samples a second, band-limited, by FFT."""
    if rate == to:
        return wave
    up, down = to // math.gcd(rate, to), rate // math.gcd(rate, to)
    blocks = 1 << ((wave.shape[-1] + MARGIN) // down).bit_length()  # of `down` samples that become `up`; a fast number
    spectrum = torch.fft.rfft(wave.float(), blocks * down)[..., :blocks * min(up, down) // 2 + 1]
    share = torch.linspace(0, 1, spectrum.shape[-1], device=wave.device)  # of the lower of both Nyquist frequencies
    fade = torch.cos((share - 0.86).clamp(min=0) / 0.14 * (math.pi / 2)).square()  # above 86 % of it
    return torch.fft.irfft(spectrum * fade * (up / down), blocks * up)[..., :resampled_length(wave.shape[-1], rate, to)]


def stft_magnitude(wave, window, hop):
    """Magnitudes (B, ceil(T / hop), window // 2 + 1) of waves (B, T), in fp32: a sine of amplitude a reads a."""
    frames, left = -(-wave.shape[1] // hop), (window - hop) // 2  # frame i is centered on i * hop to (i + 1) * hop
    padded = torch.nn.functional.pad(wave.float(), (left, (frames - 1) * hop + window - left - wave.shape[1]))
    taper = torch.hann_window(window, device=wave.device)
    spectrum = torch.stft(padded, window, hop, window=taper, center=False, return_complex=True)
    return spectrum.abs().mT * (4 / window)  # twice over the sum of the Hann window


@functools.lru_cache(64)
@torch.inference_mode(False)  # wherever they are first needed, they can be used in training
def mel_filters(rate, window, bins, device="cpu"):
    """Triangular filters (window // 2 + 1, bins) of height 1, evenly spaced in HTK's mel from 0 Hz to rate / 2."""
    edges = 700 * (np.logspace(0, math.log10(1 + rate / 2 / 700), bins + 2) - 1)  # Hz; mel is 2595 log10(1 + f / 700)
    f = np.linspace(0, rate / 2, window // 2 + 1)[:, None]
    widths = np.maximum(np.diff(edges), rate / window)  # so that each triangle reaches a frequency of the spectrum
    rising, falling = (f - edges[1:-1]) / widths[:-1], (edges[1:-1] - f) / widths[1:]
    return torch.tensor(np.clip(1 + np.minimum(rising, falling), 0, None), dtype=torch.float32, device=device)


def log_mel(wave, rate, window, hop, bins, floor=1e-5):
    """Natural logarithms (B, ceil(T / hop), bins) of mel magnitudes of waves (B, T), none below `floor`'s, in fp32."""
    with torch.autocast(wave.device.type, enabled=False):
        mel = stft_magnitude(wave, window, hop) @ mel_filters(rate, window, bins, wave.device)
    return mel.clamp(min=floor).log()


def si_sdr(estimate, target):
    """Scale-invariant signal-to-distortion ratio (B,) in dB of waves (B, T) (Le Roux et al. 2019, Eq. 3)."""
    estimate, target = (x.float() - x.float().mean(1, keepdim=True) for x in (estimate, target))
    tiny = 1e-10  # far below the energy of a wave of 16 bits; silence for silence is 0 dB
    scaled = target * ((estimate * target).sum(1, keepdim=True) / (target.square().sum(1, keepdim=True) + tiny))
    return 10 * torch.log10((scaled.square().sum(1) + tiny) / ((estimate - scaled).square().sum(1) + tiny))


def spectrogram(wave, rate, height=160):
    """A picture uint8 (height, frames of about 8 ms, 3) of a wave (T,): mel upward, 80 dB from black to white."""
    window = 2 ** round(math.log2(rate * 0.032))
    decibels = 20 / math.log(10) * log_mel(wave[None], rate, window, window // 4, height)[0].mT.flip(0).cpu().numpy()
    level = np.clip(1 + (decibels - max(decibels.max(), -20)) / 80, 0, 1)[..., None]
    return (255 * np.clip(3 * level - [0, 1, 2], 0, 1)).astype(np.uint8)  # by way of red and yellow


def _refuse_many(faults, count, few=0):
    """UserError if more than 1 in 100 of `count` recordings, and more than `few`, have faults."""
    if len(faults) > max(few, data.BAD_SHARE * count):
        raise UserError(f"{len(faults)} of {count} recordings cannot be used: {faults[0]}; mend or remove them")


class Recordings:
    """A source for data.Chunks: the audio files of a folder tree, brought to `rate` and mixed down to one channel.

    The speaker is the folder, beside a *.trans.txt the one above it (LibriSpeech: SPEAKER/CHAPTER), or what the first
    group of the regular expression `pattern` finds in a file's name. A transcript is NAME.txt beside, or the line "NAME
    text" of a *.trans.txt; `texts` counts them. Recordings shorter than `hop` samples are left out; `bad` says what is
    wrong with recordings that are left out, `resampled` which have another rate.
    """

    def __init__(self, path, rate, crop=0, hop=1, pattern=""):
        self.path, self.rate, self.crop, self.hop = Path(path), rate, crop, hop
        found = sorted(file.relative_to(path).as_posix() for file in self.path.rglob("*") if file.name[0] != ".")
        files = [name for name in found if name.lower().endswith(SUFFIXES)]
        if not files:
            raise UserError(f"{path}: no such folder, or no {', '.join(SUFFIXES)} among {len(found)} files below it")
        self.keys, self.headers, self.bad = [], [], []
        for name in tracker.progress(files, desc="reading headers", delay=3, leave=False, disable=not dist.is_main()):
            try:
                _, file_rate, frames = read_part(file := self.path / name, 0, 0)
                if resampled_length(frames, file_rate, rate) < hop:
                    raise Unusable(f"{file}: {frames} samples at {file_rate} Hz, less than a frame of {hop}")
                self.keys.append(name)
                self.headers.append((frames, file_rate))
            except Unusable as error:
                self.bad.append(str(error))
        _refuse_many(self.bad, len(files), min(5, len(files) - 1))  # a few are left out of a small folder, too
        kinds = collections.Counter(Path(name).suffix[1:].lower() for name in found
                                    if not name.lower().endswith((*SUFFIXES, ".txt")) and (self.path / name).is_file())
        self.left_out = data.left_out(path, [], kinds)
        others = sorted({file_rate for _, file_rate in self.headers} - {rate})
        self.resampled = f"recordings of {', '.join(map(str, others))} Hz are resampled to {rate}" if others else ""
        chapters = {Path(name).parent for name in found if name.endswith(".trans.txt")}
        folders = [Path(name).parent for name in self.keys]
        self.who = [(folder.parent if folder in chapters else folder).name for folder in folders]
        try:
            if pattern:
                self.who = [re.search(pattern, Path(name).name)[1] for name in self.keys]
            self.speakers = sorted(set(self.who))
        except (re.error, IndexError, TypeError) as error:
            raise UserError(f"--speaker_pattern {pattern}: finds no speaker, in (), in some file's name") from error
        self.lines = {}  # transcripts by a file's path without suffix
        for name in (name for name in found if name.endswith(".txt")):
            text = (self.path / name).read_text("utf-8", errors="replace").strip()
            self.lines[name.removesuffix(".txt")] = text
            for line in text.splitlines() if name.endswith(".trans.txt") else ():
                key, _, text = line.partition(" ")
                self.lines[(Path(name).parent / key).as_posix()] = text.strip()
        self.texts = sum(self.text(row) != "" for row in range(len(self)))

    def __len__(self):
        return len(self.keys)

    def name(self, row):
        return self.keys[row]

    def text(self, row):
        """The transcript of a row, "" if there is none."""
        return self.lines.get(self.keys[row].rpartition(".")[0], "")

    def frames(self, row):
        """Samples of a row at `rate`."""
        return resampled_length(*self.headers[row], self.rate)

    def crop_wave(self, row, start, length):
        """wave(row)[start:start + length], for which only that part of the file is decoded; raises Unusable."""
        file_rate, length = self.headers[row][1], min(length, self.frames(row) - start)
        up, down = self.rate // math.gcd(file_rate, self.rate), file_rate // math.gcd(file_rate, self.rate)
        block = max(0, start // up - -(-MARGIN // down))  # whole blocks keep the phase
        wave, *_ = read_part(self.path / self.keys[row], block * down, -(-(start + length) * down // up) + MARGIN)
        return resample(torch.from_numpy(wave.mean(0)), file_rate, self.rate)[start - block * up:][:length]

    def wave(self, row):
        """The whole recording, float32 (T,); raises Unusable."""
        return self.crop_wave(row, 0, self.frames(row))

    def readable(self, rows):
        """Those of the `rows` (n,) whose recordings can be read, as a list, and their waves."""
        found = {}
        for row in map(int, rows):
            with contextlib.suppress(Unusable):
                found[row] = self.wave(row)
        return [*found], [*found.values()]

    def fetch(self, rows, draws=None):
        """({"wave": float32 (n, crop), "length": int64 (n,)}, good (n,)): crops of `rows`, silence behind short ones.

        They begin at multiples of `hop`, as the codec's frames do at evaluation: by `draws` (n,), else in the middle.
        """
        waves, lengths = torch.zeros(len(rows), self.crop), torch.zeros(len(rows), dtype=torch.int64)
        places = np.full(len(rows), 0.5) if draws is None else data.uniform(draws, 1)[:, 0]
        for i, row in enumerate(rows):
            starts = max(0, self.frames(row) - self.crop) // self.hop + 1
            with contextlib.suppress(Unusable):
                wave = self.crop_wave(row, int(places[i] * starts) * self.hop, self.crop)
                waves[i, :len(wave)], lengths[i] = wave, len(wave)
        return {"wave": waves, "length": lengths}, lengths.numpy() > 0

    def split(self, part, validation, test, seed=0):
        """The rows (int64) of "train", "validation" or "test", by a hash of the seed and the speaker or the file."""
        keys = self.who if len(self.speakers) >= 20 else self.keys  # so that validation is on unseen speakers
        return np.flatnonzero([data.part_of(key, validation, test, seed) == part for key in keys])

    def fault(self, row, length=None):
        """What is wrong with a row, or with its first `length` samples, after its name; "" if it can be used."""
        try:
            self.crop_wave(row, 0, length or self.frames(row))
        except Unusable as error:
            return str(error)
        return ""

    def check(self, most=256):
        """(unusable, checked, first faults) of `most` evenly spaced rows, a minute of each; UserError if many are."""
        rows = data.spread(len(self), most)
        faults = [fault for row in rows if (fault := self.fault(row, 60 * self.rate))]
        _refuse_many(faults, len(rows), min(5, len(rows) // 20))  # a few are left out of a small folder, too
        return len(faults), len(rows), faults[:5]

    def fingerprint(self):
        """Plain facts that change when the data does: recordings, rate, digest of names, lengths and a few contents."""
        files = [self.path / self.keys[row] for row in data.spread(len(self.headers), 100)]
        facts = self.keys, self.who, self.headers, self.lines, data.digest_of(files)
        digest = hashlib.sha256(repr(facts).encode())
        return {"recordings": len(self), "rate": self.rate, "digest": digest.hexdigest()[:16]}


class Syllables(Recordings):
    """The first `rows` of the built-in syllables; they are drawn when needed."""

    def __init__(self, rows, crop=0, hop=1, rate=synthetic.RATE):
        self.crop, self.hop, self.rate, self.texts = crop, hop, rate, rows
        self.bad, self.resampled, self.left_out, self.headers, self.lines = (), "", "", (), {}
        self.keys = [f"syllables {row}" for row in range(rows)]
        self.who = [*map(str, synthetic.speakers_of(range(rows)))]
        self.speakers = sorted(set(self.who))

    def records(self, rows):
        """A record for each of `rows` (n,): its "text", "speaker" and the rest that synthetic.syllables tells."""
        return [_drawn(int(row), self.rate)[1] for row in rows]

    def text(self, row):
        return self.records([row])[0]["text"]

    def frames(self, row):
        return len(_drawn(int(row), self.rate)[0])

    def crop_wave(self, row, start, length):
        return _drawn(int(row), self.rate)[0][start:start + length].clone()


@functools.lru_cache(2 ** 13)  # 250 MB at 8 kHz, for all the stages of a process
def _drawn(row, rate):
    """(wave float32 (T,) at `rate`, record) of a row of synthetic.syllables."""
    (wave,), (record,) = synthetic.syllables([row])
    return resample(torch.from_numpy(wave), synthetic.RATE, rate), record


class TokenCache:
    """Tokens of a source's recordings, on disk: [row] -> int64 numpy (frames, Q). `empty`: rows without any.

    They are read as files: a memory map would end the process without a word if the file is cut meanwhile.
    """

    def __init__(self, place):
        tokens = np.load(place / "tokens.npy", mmap_mode="r")  # its header
        self.path, self.offset, self.quantizers = place / "tokens.npy", tokens.offset, tokens.shape[1]
        self.edges = np.load(place / "edges.npy")
        self.empty = np.flatnonzero(np.diff(self.edges) == 0)

    def frames(self, row):
        return int(self.edges[row + 1] - self.edges[row])

    def __getitem__(self, row):
        count, offset = self.frames(row) * self.quantizers, self.offset + 2 * self.quantizers * int(self.edges[row])
        tokens = np.fromfile(self.path, "<u2", count, offset=offset)
        if len(tokens) < count:
            raise UserError(f"{self.path}: was cut off while it was read; start again, and it is made anew")
        return tokens.reshape(-1, self.quantizers).astype(np.int64)


def token_cache(folder, source, key, encode, desc):
    """The TokenCache of a `source`, kept below `folder`; all ranks call it, and encode their share of what is missing.

    The plain facts `key`, of what encodes, and those of the source name it. encode(row) gives int numpy (frames, Q),
    below 65536, or raises Unusable: the row has no tokens then. UserError if these are more than 1 in 100.
    """
    place = Path(folder) / hashlib.sha256(repr((key, source.fingerprint())).encode()).hexdigest()[:16]
    blocks = np.array_split(np.arange(len(source)), min(64, len(source)))  # a kill costs each rank one at most
    parts = {place / f"part_{number:03d}.npz": rows.tolist() for number, rows in enumerate(blocks)}
    if not dist.on_main(lambda: _whole(place)):
        dist.at_once(lambda: _encode_parts(parts, encode, desc))
        dist.on_main(lambda: _join(place, parts, source))
    return dist.at_once(lambda: TokenCache(place))


def _whole(place):
    """Whether a cache is there as it was written."""
    with contextlib.suppress(UserError, OSError):  # not there, or damaged: it is made anew
        return config.read_json(place / "sums.json") == _sums(place)
    return False


def _sums(place):
    return {name: checkpoint.checksum(place / name) for name in ("tokens.npy", "edges.npy")}


def _encode_parts(parts, encode, desc):
    """Write those of `parts` {path: rows} that are this rank's and missing: .npz of uint16 (frames, Q) for each row."""
    mine = [path for path in [*parts][dist.rank()::dist.world_size()] if not path.exists()]
    for path in tracker.progress(mine, desc=desc, disable=not dist.is_main() or not mine):
        tokens = [np.empty((0, 0), "<u2")] * len(parts[path])
        for i, row in enumerate(parts[path]):
            with contextlib.suppress(Unusable):
                tokens[i] = encode(row).astype("<u2")
        with checkpoint.replacing(path) as file:
            np.savez(file, *tokens)


def _join(place, parts, source):
    """Make one array of all parts; sums.json, written last, commits it."""
    tokens = [tokens for path in parts for tokens in np.load(path).values()]
    empty = [row for row, found in enumerate(tokens) if not len(found)]
    if len(empty) > data.BAD_SHARE * len(source):
        shutil.rmtree(place)  # to be made again when the recordings are mended
        _refuse_many([source.fault(row) for row in empty], len(source))
    arrays = {"tokens.npy": np.concatenate([found for found in tokens if len(found)]),
              "edges.npy": np.cumsum([0, *map(len, tokens)])}
    for name, array in arrays.items():
        with checkpoint.replacing(place / name) as file:
            np.save(file, array)
    checkpoint.write_json(_sums(place), place / "sums.json")
    for path in parts:
        path.unlink(missing_ok=True)
