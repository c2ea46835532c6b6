"""Audio files; datasets of recordings (see loader.py).

The standard library reads WAV files of 16-bit PCM. Any other file (WAV of 24 bits, floats, mu-law
or ADPCM, flac, ogg, opus, mp3, aiff, au) is read by soundfile. A wave is float, time last; in files
within [-1, 1].
"""

import collections
import contextlib
import functools
import hashlib
import math
import re
import wave as wavfile
from fractions import Fraction
from os.path import abspath, dirname, join, splitext
from pathlib import Path

import numpy as np
import torch

from common import config, order
from common.config import UserError
from common.data import files, synthetic
from common.data.files import Unusable
from common.models.audio import LOUDNESS, MARGIN, level, resample, resampled_length

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif", ".au")
# Seconds to decode before a crop: MP3 has a reservoir of bits, Vorbis pages of several seconds.
LEAD = {"MP3": 2, "OGG": 5}
RATES = range(1_000, 768_001)  # Hz
MAX_SAMPLE = 4e9  # 32-bit integers as floats are in files, too; squares of 1e20 would overflow
CROP_SECONDS = 1  # of crops in evaluation
EXCERPT_SECONDS = 10  # of recordings that are evaluated as a whole
SHIFT_RATE = 50  # shifts are parts of 1/50 s, a frame of semantic tokens

# Tables of transcripts: {end of a file's /NAME: (separator of its columns, their names)}. Names in
# the first line win, but in LibriSpeech, where it is a text.
TABLES = {
    ".trans.txt": (" ", ["path", "sentence"]),  # LibriSpeech
    "/metadata.csv": ("|", ["path", "sentence", "spoken"]),  # LJSpeech: as written, as spoken
    "/validated.tsv": ("\t", ["path", "sentence"]),  # Common Voice
}
COLUMNS = {  # as Coqui names them
    "audio_file": "path",
    "text": "sentence",
    "speaker": "client_id",
    "speaker_name": "client_id",
}
# Folders of one kind of files, as wav48 and txt in VCTK. Without their names, a recording and its
# transcript have the same path.
KINDS = (
    r"(?i)/((wav|flac)s?(_?\d\d[^/]*)?|mp3|ogg|opus|audio|clips|recordings"
    r"|txt|texts?|transcripts?)(?=/)"
)
# What a transcript, named without .txt, may have behind the name of its recording; the best first.
ENDINGS = ("", *SUFFIXES, ".WAV", ".normalized", ".original")
SPEAKER_CHAPTER = r"(?:^|/)(\d+)/(\d+)/\1[-_]\2[-_][^/]*$"  # LibriSpeech and LibriTTS


# Files


def read(path, start=0, stop=math.inf):
    """Read the samples `start` to `stop` of an audio file, by default all. No others are decoded.

    Returns the wave, float32 numpy (C, T); its samples a second; the samples a channel of the file.
    Unusable: the file is damaged, has samples that are not finite or huge, or soundfile is missing.
    """
    if not Path(path).is_file():
        raise Unusable(f"{path}: not a file")  # opening a named pipe would wait without end
    contents = _read_pcm16(path, start, stop) or _read_by_soundfile(path, start, stop)
    wave, rate, _ = contents
    if rate not in RATES:
        raise Unusable(f"{path}: {rate} Hz, expected {RATES[0]} to {RATES[-1]}")
    if not (np.abs(wave) < MAX_SAMPLE).all():
        raise Unusable(f"{path}: samples that are not finite, or beyond {MAX_SAMPLE:g}")
    return contents


def _read_pcm16(path, start, stop):
    """As `read`, or None unless the file is a complete WAV file of 16-bit PCM."""
    # RuntimeError: chunks beyond the end of the file. OSError: a disk that cannot read it.
    errors = (wavfile.Error, EOFError, RuntimeError, OSError)
    with contextlib.suppress(*errors), wavfile.open(str(path)) as file:
        channels, width, rate, frames, *_ = file.getparams()
        file.setpos(frames - 1)
        last = file.readframes(1)  # is not there if the file was cut, or written as a stream
        if width == 2 and len(last) == 2 * channels:
            file.setpos(start)
            content = file.readframes(min(stop, frames) - start)
            samples = np.frombuffer(content, np.int16).reshape(-1, channels)
            return samples.T.astype(np.float32) / 32768, rate, frames
    return None


def _read_by_soundfile(path, start, stop):
    with config.explained(f"{path}: cannot be read", Unusable):
        soundfile = config.need("soundfile", "what is not a complete WAV file of 16-bit PCM")
        with soundfile.SoundFile(str(path)) as file:
            lead = LEAD.get(file.format, 0) * file.samplerate
            first = max(0, start - lead)
            file.seek(first)
            count = min(stop, file.frames) - first  # at once: soundfile seeks after each call
            samples = file.read(count, dtype="float32", always_2d=True)
            return samples[start - first :].T, file.samplerate, file.frames


@functools.cache
def note_once(text):
    """Print a note once. Of workers that read ahead the first does, unless it was said before."""
    worker = torch.utils.data.get_worker_info()
    if not (worker and worker.id):
        config.note(text)


def mix_down(channels, path):
    """The mean (T,) of the channels (C, T) of a wave, numpy; the loudest if they cancel out.

    Both are said once for a `path`.
    """
    if len(channels) > 1:
        note_once(f"{path}: recordings of several channels are mixed down to one")
    energy = np.square(channels).sum(1)
    energy_of_sum = np.square(channels.sum(0)).sum()
    if energy_of_sum < 0.04 * energy.max():  # of two the mean is 20 dB lower
        note_once(f"{path}: channels that cancel out are not mixed: the loudest is taken")
        return channels[energy.argmax()]
    return channels.mean(0)


# Datasets


class Recordings:
    """A dataset: the audio files below a folder, at `rate`, in one channel, of one loudness.

    Several channels are mixed down, which is said once. A recording has a root mean square of
    LOUDNESS as a whole: one gain for all its crops.

    Transcripts are found as `read_transcripts` says. A note counts recordings, speakers,
    transcripts, and files of other kinds.
    The speaker of a file is its folder; in trees of numbers as of LibriSpeech and LibriTTS
    (SPEAKER/CHAPTER/SPEAKER_CHAPTER_…) the folder above; or what a table says; or, with a regular
    expression `pattern`, what its first group finds in the path below `path`.
    crop: samples of a training crop. hop_length: samples of a frame; shorter recordings are
    unusable.
    """

    shifts = 1

    def __init__(
        self,
        path,
        rate,
        crop=0,
        hop_length=1,
        pattern="",
    ):
        self.path = Path(path)
        self.rate = rate
        self.rates = collections.Counter()  # how many files were read at each rate
        self.levels = {}  # {index: `audio.level` of the recording}
        self.crop = crop
        self.hop_length = hop_length

        audio = []
        others = []
        for file in files.files_below(path):
            if not file.name.startswith("."):  # hidden, such as ._NAME.wav of macOS
                kind = audio if file.suffix.lower() in SUFFIXES else others
                kind.append(file.relative_to(path))
        if not audio:
            raise UserError(f"{path}: no such folder, or no {', '.join(SUFFIXES)} below it")
        self.names = [file.as_posix() for file in audio]
        self.texts = []
        self.speaker_of = []
        for file, (text, speaker) in zip(audio, read_transcripts(self.path, audio, others)):
            self.texts.append(text)
            self.speaker_of.append(_speaker(file, speaker, pattern))
        count = sum(map(bool, self.texts))
        speakers = len(set(self.speaker_of))
        kinds = collections.Counter(file.suffix.lower() for file in others)
        config.note(
            f"{path}: {len(audio)} recordings of {speakers} speakers, {count} transcripts; other "
            f"files: {dict(kinds)}"
        )

    def __len__(self):
        return len(self.names)

    def repeat(self, shifts):
        """Make `shifts` recordings of each. They begin 0, 1, 2, … parts of 1/50 s later.

        Their tokens differ, so less is learned by heart. They are all in the same split.
        """
        self.shifts = shifts
        for attribute in ("names", "texts", "speaker_of"):
            values = getattr(self, attribute)
            repeated = [value for value in values for _ in range(shifts)]
            setattr(self, attribute, repeated)

    def read(self, index, start, stop):
        """As the function `read`, of a recording."""
        return read(self.path / self.names[index], start, stop)

    def wave(self, index, length=math.inf, fraction=0.0):
        """A crop of a recording, float32 (T,), at most `length` samples; by default the whole.

        It begins at a frame, that is at a multiple of `hop_length`; `fraction` in [0, 1) chooses
        which. Only the crop is decoded. Unusable: damaged, or shorter than a frame.
        """
        _, file_rate, frames = self.read(index, 0, 0)
        self.rates[file_rate] += 1
        first = index % self.shifts * self.rate // (SHIFT_RATE * self.shifts)
        total = resampled_length(frames, file_rate, self.rate) - first
        if total < self.hop_length:
            raise Unusable(
                f"{self.path / self.names[index]}: {frames} samples at {file_rate} Hz, "
                f"less than a frame of {self.hop_length}"
            )
        length = min(length, total)
        starts = (total - length) // self.hop_length + 1
        start = first + int(fraction * starts) * self.hop_length

        # `down` samples of the file become `up`. Whole blocks of them keep the phase. A margin is
        # read on both sides of a crop.
        up, down = Fraction(self.rate, file_rate).as_integer_ratio()
        first_block = max(0, start // up - math.ceil(MARGIN / down))
        stop = resampled_length(start + length, self.rate, file_rate) + MARGIN
        channels, _, _ = self.read(index, first_block * down, stop)
        wave = torch.from_numpy(mix_down(channels, self.path))
        mean, gain = self.level(index, frames, file_rate)
        resampled = resample((wave - mean) * gain, file_rate, self.rate)
        wave = resampled[start - first_block * up :][:length]
        if not len(wave):
            raise Unusable(f"{self.path / self.names[index]}: it ends before its header says")
        return wave

    def __getitem__(self, index):
        """The wave of a recording (T,), or None if it is unusable."""
        with contextlib.suppress(Unusable):
            return self.wave(index)

    def level(self, index, frames, file_rate):
        """`audio.level` of a recording, which is measured once."""
        index -= index % self.shifts  # shifted ones are of the same file

        def read_mono(start, stop):
            channels, _, _ = self.read(index, start, stop)
            return torch.from_numpy(mix_down(channels, self.path))

        if index not in self.levels:
            self.levels[index] = level(read_mono, frames, file_rate)
        return self.levels[index]

    def load_usable(self, indices):
        """{index: wave} of those recordings that can be read.

        Of long ones it is the first EXCERPT_SECONDS: an hour takes minutes to encode.
        """
        waves = {}
        for index in map(int, indices):
            with contextlib.suppress(Unusable):
                waves[index] = self.wave(index, EXCERPT_SECONDS * self.rate)
        return waves

    def fetch(self, indices, random_bits=None):
        """Crops {"wave": float32 (B, T), "length": int64 (B,)}, and which are usable: bool (B,).

        They are of `crop` samples and begin at random, or without `random_bits` (B,), for
        evaluation, are CROP_SECONDS from the middle. Silence follows shorter recordings.
        """
        fractions = order.uniform(random_bits, len(indices), [0.5])
        fractions = fractions[:, 0]
        length = CROP_SECONDS * self.rate if random_bits is None else self.crop
        waves = torch.zeros(len(indices), length)
        lengths = torch.zeros(len(indices), dtype=torch.int64)
        for i, index in enumerate(indices):
            with contextlib.suppress(Unusable):
                wave = self.wave(index, length, fractions[i])
                waves[i, : len(wave)] = wave
                lengths[i] = len(wave)
        return {"wave": waves, "length": lengths}, lengths.numpy() > 0

    def split(self, name, validation, test, seed=0):
        """Indices (int64) of "train", "validation" or "test", by a hash of speakers or names."""
        microphone = re.compile(r"_mic\d(?=\.)")  # of VCTK, whose two hear the same
        keys = [
            microphone.sub("", name)
            for name in self.names
        ]
        if len(set(self.speaker_of)) >= 20:  # so that validation is on unseen speakers
            keys = self.speaker_of
        return order.split_keys(keys, name, validation, test, seed)

    def fault(self, index):
        """Why the first minute of a recording cannot be used; "" if it can."""
        try:
            self.wave(index, 60 * self.rate)
        except Unusable as error:
            return str(error)
        return ""

    def content_hash(self, index):
        """A number that equal recordings, begun equally late (`repeat`), have in common."""
        wave, *_ = self.read(index, 0, RATES[-1])
        return hash((wave.tobytes(), index % self.shifts))

    def check(self):
        """See files.check_samples. UserError if more than five files, or all, are unusable.

        A note counts rates, if recordings are resampled.
        """
        checked = files.check_samples(self, 5 * self.shifts)
        if set(self.rates) - {self.rate}:
            counts = dict(self.rates)  # of those looked at
            config.note(f"{self.path}: recordings are brought to {self.rate} Hz; rates: {counts}")
        return checked

    def fingerprint(self):
        """Plain values that change when the data does.

        The digest is of names, speakers, transcripts, sizes, and a few contents.
        """
        contents = files.digest_of([self.path / name for name in self.names])
        facts = repr((self.names, self.speaker_of, self.texts, contents, LOUDNESS))
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return {"recordings": len(self), "rate": self.rate, "digest": digest[:16]}


def read_transcripts(folder, audio, others):
    """[(transcript, speaker that a table names, or "")] of the files `audio`.

    All paths are relative to `folder`. A transcript is NAME.txt, or NAME.normalized.txt, else
    NAME.original.txt (LibriTTS), or in a row of one of TABLES, whose paths are relative to it; ""
    if there is none. It is of the recordings NAME and NAME_mic1 in its folder. If there are none of
    any name in its folder, it is of those whose paths are the same without the folders of KINDS:
    VCTK's txt/p225 and wav48/p225 are, those of two speakers never are.
    A note counts transcripts without a text or a recording. UserError names one that is not text.
    """

    def elsewhere(path):
        return "elsewhere" + re.sub(KINDS, "", path)

    paths = [files.nfc(abspath(folder / file)) for file in audio]
    places = set(map(dirname, paths))
    transcripts = {}  # {key: (path of the recording, text or its file, speaker)}
    for file in others:
        ending = f"/{file.name}".lower()
        rows = []
        if ending.endswith(".txt"):
            rows = [(file.stem, folder / file, "")]
        for table in filter(ending.endswith, TABLES):
            rows = _read_table(folder / file, *TABLES[table])
        for path, text, speaker in rows:
            path = files.nfc(abspath(join(folder, file.parent, path)))
            key = path if dirname(path) in places else elsewhere(path)
            transcripts.setdefault(key, (path, text, speaker))

    found = []
    used = set()
    for path in paths:
        keys = []  # of its transcripts, the best first
        for place in (path, elsewhere(path)):
            stem, suffix = splitext(place)
            for name in (stem, re.sub(r"_mic\d$", "", stem)):  # VCTK's microphones have one text
                keys += [name + ending for ending in (suffix, *ENDINGS)]
        keys = [key for key in keys if key in transcripts]
        used.update(keys)
        _, text, speaker = transcripts[keys[0]] if keys else ("", "", "")
        if isinstance(text, Path):
            text = files.decode_text(text.read_bytes(), text)
        found.append((text.strip(), speaker))

    left = [path for key, (path, text, _) in transcripts.items() if not text or key not in used]
    if left:
        config.note(f"transcripts without text or recording: {len(left)}, as {left[0]}")
    return found


def _read_table(path, separator, columns):
    """Yield (path, text, speaker) of the rows of a table, "" for what is not there."""
    # str.splitlines would also split at U+2028.
    lines = files.decode_text(path.read_bytes(), path).split("\n")
    header = [COLUMNS.get(name, name) for name in lines[0].strip().lower().split(separator)]
    if separator != " " and {"path", "sentence"} <= set(header):
        columns = header
        del lines[0]
    rows = []
    for line in filter(str.strip, lines):
        cells = line.split(separator, len(columns) - 1)  # the last column has the rest
        rows.append(collections.defaultdict(str, zip(columns, map(str.strip, cells))))

    column = "spoken"
    spoken = [row for row in rows if row["spoken"]]
    if all(row["spoken"] != row["sentence"] for row in spoken):  # it may be the speaker
        column = "sentence"
        if spoken:
            config.note(f"{path}: no names of columns, so the second is taken as the text")
    for row in rows:
        text = row[column] or row["sentence"]
        quoted = r'"([^"]|"")*"'  # in Common Voice before 2020, as in csv
        if separator == "\t" and re.fullmatch(quoted, text):
            text = text[1:-1].replace('""', '"')
        yield row["path"], text, row["client_id"]


def _speaker(path, speaker, pattern):
    """The speaker of a file, below the folder; speaker: what a table says, or ""."""
    if pattern:
        with config.explained(
            f"--speaker_pattern {pattern}: finds no speaker, in (), in {path}"
        ):
            return files.nfc(re.search(pattern, path.as_posix())[1])
    numbered = re.search(SPEAKER_CHAPTER, path.as_posix())
    folder = numbered[1] if numbered else path.parent.name
    return speaker or folder


class Syllables(Recordings):
    """The first `count` of the built-in syllables. They are made when needed."""

    path = Path("syllables")

    def __init__(self, count, crop=0, hop_length=1, rate=synthetic.RATE):
        self.rate = rate
        self.rates = collections.Counter()  # of files that were read
        self.levels = {}
        self.crop = crop
        self.hop_length = hop_length
        self.names = [f"syllables {index}" for index in range(count)]
        self.texts, speakers = synthetic.syllables(range(count))
        self.speaker_of = speakers.tolist()  # numbers

    def read(self, index, start, stop):
        wave = synthetic.speak(self.texts[index], self.speaker_of[index])
        return wave[None, start:stop], synthetic.RATE, len(wave)

    def fingerprint(self):
        return {"recordings": len(self), "rate": self.rate, "digest": f"syllables {LOUDNESS}"}
