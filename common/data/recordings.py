"""Audio files, and datasets of recordings (see loader.py).

The standard library reads WAV files of 16-bit PCM. soundfile reads the others (WAV of 24 bits,
floats, mu-law or ADPCM, flac, ogg, opus, mp3, aiff, au). Waves are floats in [-1, 1], time last.
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
# Seconds to decode before a crop, because MP3 has a bit reservoir, and Vorbis has pages of several
# seconds.
LEAD = {"MP3": 2, "OGG": 5}
RATES = range(1_000, 768_001)  # Hz
MAX_SAMPLE = 4e9  # allows 32-bit integers stored as floats; 1e20 squared would overflow
CROP_SECONDS = 1  # length of crops in evaluation
EXCERPT_SECONDS = 10  # recordings that are evaluated as a whole are cut to this length
SHIFT_RATE = 50  # `Recordings.repeat` shifts by fractions of 1/50 s, one frame of semantic tokens

# Folders for one kind of file, such as wav48 and txt in VCTK. Without them in the path, a recording
# and its transcript have the same path.
KINDS = (
    r"(?i)/((wav|flac)s?(_?\d\d[^/]*)?|mp3|ogg|opus|audio|clips|recordings"
    r"|txt|texts?|transcripts?)(?=/)"
)
# The transcript of a recording NAME is NAME + ENDING + .txt. The first that exists is used.
ENDINGS = ("", *SUFFIXES, ".WAV", ".normalized", ".original")
SPEAKER_CHAPTER = r"(?:^|/)(\d+)/(\d+)/\1[-_]\2[-_][^/]*$"  # LibriSpeech and LibriTTS


# Files


def read(path, start=0, stop=math.inf):
    """Read the samples `start` to `stop` of an audio file, by default all.

    Returns (wave, float32 numpy (C, T); sample rate; samples per channel in the file). Unusable if
    the file is damaged, if its rate is not in RATES, if its samples are huge or not finite, or if
    soundfile is needed but not installed.
    """
    if not Path(path).is_file():
        raise Unusable(f"{path}: not a file")  # opening a named pipe would wait forever
    contents = _read_pcm16(path, start, stop) or _read_by_soundfile(path, start, stop)
    wave, rate, _ = contents
    if rate not in RATES:
        raise Unusable(f"{path}: {rate} Hz, expected {RATES[0]} to {RATES[-1]}")
    if not (np.abs(wave) < MAX_SAMPLE).all():
        raise Unusable(f"{path}: samples are not finite, or beyond {MAX_SAMPLE:g}")
    return contents


def _read_pcm16(path, start, stop):
    """Like `read`, but returns None unless the file is a complete WAV file of 16-bit PCM."""
    # RuntimeError: chunks beyond the end of the file. OSError: a disk read error.
    errors = (wavfile.Error, EOFError, RuntimeError, OSError)
    with contextlib.suppress(*errors), wavfile.open(str(path)) as file:
        channels, width, rate, frames, *_ = file.getparams()
        file.setpos(frames - 1)
        last = file.readframes(1)  # missing if the file was truncated, or written as a stream
        if width == 2 and len(last) == 2 * channels:
            file.setpos(start)
            content = file.readframes(min(stop, frames) - start)
            samples = np.frombuffer(content, np.int16).reshape(-1, channels)
            return samples.T.astype(np.float32) / 32768, rate, frames
    return None


def _read_by_soundfile(path, start, stop):
    with config.explained(f"{path}: cannot be read", Unusable):
        soundfile = config.need("soundfile", "audio other than complete WAV files of 16-bit PCM")
        with soundfile.SoundFile(str(path)) as file:
            lead = LEAD.get(file.format, 0) * file.samplerate
            first = max(0, start - lead)
            file.seek(first)
            # Read the lead and the crop in one call, because soundfile seeks after each read.
            count = min(stop, file.frames) - first
            samples = file.read(count, dtype="float32", always_2d=True)
            return samples[start - first :].T, file.samplerate, file.frames


@functools.cache
def note_once(text):
    """Print a note once. In data workers, only worker 0 prints."""
    worker = torch.utils.data.get_worker_info()
    if not (worker and worker.id):
        config.note(text)


def mix_down(channels, path):
    """The mean (T,) of NumPy `channels` (C, T), or the loudest channel if they cancel out.

    Prints a note, once per `path`, about either case.
    """
    if len(channels) > 1:
        note_once(f"{path}: recordings with several channels are mixed down to one")
    energy = np.square(channels).sum(1)
    energy_of_sum = np.square(channels.sum(0)).sum()
    if energy_of_sum < 0.04 * energy.max():  # for two channels, the mean is 20 dB lower
        note_once(f"{path}: channels that cancel out are not mixed; the loudest is used")
        return channels[energy.argmax()]
    return channels.mean(0)


# Datasets


class Recordings:
    """A dataset of the audio files below a folder, as mono waves at `rate` with equal loudness.

    All crops of a recording have the same gain, which brings the whole recording to a root mean
    square of LOUDNESS. For transcripts, see `read_transcripts`. A note gives the numbers of
    recordings, speakers, transcripts, and other files.

    If given, the regular expression `pattern` is searched for in the file's path below `path`, and
    its first group is the speaker. Otherwise, the speaker is the name of the file's folder or, for
    LibriSpeech and LibriTTS (SPEAKER/CHAPTER/SPEAKER_CHAPTER_…), of that folder's parent. The
    speaker of files directly in `path` is unknown: "".

    crop: samples per training crop. hop_length: samples per frame; shorter recordings are unusable.
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
        self.rates = collections.Counter()  # {sample rate: number of files read}
        self.levels = {}  # {index: `audio.level` of the recording}
        self.crop = crop
        self.hop_length = hop_length

        audio = []
        others = []
        for file in files.files_below(path):
            if not file.name.startswith("."):  # skip hidden files, such as macOS's ._NAME.wav
                kind = audio if file.suffix.lower() in SUFFIXES else others
                kind.append(file.relative_to(path))
        if not audio:
            raise UserError(f"{path}: no such folder, or no {', '.join(SUFFIXES)} below it")
        self.names = [file.as_posix() for file in audio]
        self.texts = read_transcripts(self.path, audio, others)
        self.speaker_of = [_speaker(file, pattern) for file in audio]
        count = sum(map(bool, self.texts))
        speakers = len({*self.speaker_of} - {""})
        kinds = collections.Counter(file.suffix.lower() for file in others)
        config.note(
            f"{path}: {len(audio)} recordings of {speakers} known speakers, {count} transcripts; "
            f"other files: {dict(kinds)}"
        )

    def __len__(self):
        return len(self.names)

    def repeat(self, shifts):
        """Make `shifts` copies of each recording. Copy k skips its first k / (50 · `shifts`) s.

        The copies have different tokens, which reduces overfitting. All are in the same split.
        """
        self.shifts = shifts
        for attribute in ("names", "texts", "speaker_of"):
            values = getattr(self, attribute)
            repeated = [value for value in values for _ in range(shifts)]
            setattr(self, attribute, repeated)

    def read(self, index, start, stop):
        """Call the function `read` for a recording."""
        return read(self.path / self.names[index], start, stop)

    def wave(self, index, length=math.inf, fraction=0.0):
        """A crop of a recording, float32 (T,), of at most `length` samples; by default all of it.

        It begins at a multiple of `hop_length`, chosen by `fraction` in [0, 1). Only the crop is
        decoded. Unusable if the recording is damaged, or shorter than a frame.
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

        # Resampling turns each block of `down` samples into `up` samples. Begin reading at a block,
        # so that the phase is kept, and read a margin on both sides of the crop.
        up, down = Fraction(self.rate, file_rate).as_integer_ratio()
        first_block = max(0, start // up - math.ceil(MARGIN / down))
        stop = resampled_length(start + length, self.rate, file_rate) + MARGIN
        channels, _, _ = self.read(index, first_block * down, stop)
        wave = torch.from_numpy(mix_down(channels, self.path))
        mean, gain = self.level(index, frames, file_rate)
        resampled = resample((wave - mean) * gain, file_rate, self.rate)
        wave = resampled[start - first_block * up :][:length]
        if not len(wave):
            raise Unusable(f"{self.path / self.names[index]}: shorter than its header says")
        return wave

    def __getitem__(self, index):
        """The wave of a recording (T,), or None if it is unusable."""
        with contextlib.suppress(Unusable):
            return self.wave(index)

    def level(self, index, frames, file_rate):
        """`audio.level` of a recording, measured only once."""
        index -= index % self.shifts  # shifted copies have the same file

        def read_mono(start, stop):
            channels, _, _ = self.read(index, start, stop)
            return torch.from_numpy(mix_down(channels, self.path))

        if index not in self.levels:
            self.levels[index] = level(read_mono, frames, file_rate)
        return self.levels[index]

    def load_usable(self, indices):
        """{index: wave (T,)} of the usable recordings among `indices`.

        Long recordings are cut to EXCERPT_SECONDS, because encoding an hour takes minutes.
        """
        waves = {}
        for index in map(int, indices):
            with contextlib.suppress(Unusable):
                waves[index] = self.wave(index, EXCERPT_SECONDS * self.rate)
        return waves

    def fetch(self, indices, random_bits=None):
        """Read crops: ({"wave": float32 (B, T), "length": int64 (B,)}, usable: bool (B,)).

        With `random_bits` (B,), crops have `crop` samples and random positions. Without, as in
        evaluation, they are the middle CROP_SECONDS. Short recordings are padded with silence;
        "length" is their length before padding.
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
        """Indices (int64) of "train", "validation" or "test", by hashes of speakers or names."""
        microphone = re.compile(r"_mic\d(?=\.)")  # VCTK has two microphones per utterance
        keys = [
            microphone.sub("", name)
            for name in self.names
        ]
        if len(set(self.speaker_of)) >= 20:  # validate on unseen speakers
            keys = self.speaker_of
        return order.split_keys(keys, name, validation, test, seed)

    def fault(self, index):
        """Why the first minute of a recording is unusable, naming it; "" if it is usable."""
        try:
            self.wave(index, 60 * self.rate)
        except Unusable as error:
            return str(error)
        return ""

    def content_hash(self, index):
        """A hash of the beginning of a recording, and of its shift (see `repeat`)."""
        wave, *_ = self.read(index, 0, RATES[-1])
        return hash((wave.tobytes(), index % self.shifts))

    def check(self):
        """See files.check_samples. UserError if more than five files, or all, are unusable.

        A note lists the sample rates if recordings are resampled.
        """
        checked = files.check_samples(self, 5 * self.shifts)
        if set(self.rates) - {self.rate}:
            counts = dict(self.rates)  # of the recordings checked
            config.note(f"{self.path}: recordings are resampled to {self.rate} Hz; rates: {counts}")
        return checked

    def fingerprint(self):
        """Plain values that change when the data change.

        The digest covers names, speakers, transcripts, file sizes, and the start of some files.
        """
        contents = files.digest_of([self.path / name for name in self.names])
        facts = repr((self.names, self.speaker_of, self.texts, contents, LOUDNESS))
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return {"recordings": len(self), "rate": self.rate, "digest": digest[:16]}


def read_transcripts(folder, audio, others):
    """The transcript of each of the files `audio`; "" if there is none.

    All paths are relative to `folder`. A transcript is a file NAME.txt, NAME.normalized.txt or
    NAME.original.txt (LibriTTS), or a line "NAME TEXT" in a *.trans.txt file (LibriSpeech). It
    belongs to the recordings NAME, NAME_mic1, NAME_mic2, … in the same folder. If that folder has
    no recordings, it belongs to those with the same path apart from the folders in KINDS. In VCTK,
    txt/p225 thus belongs to wav48/p225. The folders of two speakers never match.

    A note tells how many transcripts have no recording, or are lines without text. UserError if a
    file is not text.
    """

    def elsewhere(path):
        return "elsewhere" + re.sub(KINDS, "", path)

    paths = [files.nfc(abspath(folder / file)) for file in audio]
    places = set(map(dirname, paths))
    transcripts = {}  # {key: (path of the recording, text or file with the text)}
    for file in others:
        rows = []
        if file.name.lower().endswith(".trans.txt"):
            content = files.decode_text((folder / file).read_bytes(), folder / file)
            lines = filter(str.strip, content.split("\n"))  # splitlines would split at U+2028
            rows = [line.strip().partition(" ")[::2] for line in lines]
        elif file.suffix.lower() == ".txt":
            rows = [(file.stem, folder / file)]
        for name, text in rows:
            path = files.nfc(abspath(join(folder, file.parent, name)))
            key = path if dirname(path) in places else elsewhere(path)
            transcripts.setdefault(key, (path, text))

    found = []
    used = set()
    for path in paths:
        keys = []  # of possible transcripts, the best one first
        for place in (path, elsewhere(path)):
            stem, suffix = splitext(place)
            for name in (stem, re.sub(r"_mic\d$", "", stem)):  # VCTK's microphones share a text
                keys += [name + ending for ending in (suffix, *ENDINGS)]
        keys = [key for key in keys if key in transcripts]
        used.update(keys)
        _, text = transcripts[keys[0]] if keys else ("", "")
        if isinstance(text, Path):
            text = files.decode_text(text.read_bytes(), text)
        found.append(text.strip())

    left = [path for key, (path, text) in transcripts.items() if not text or key not in used]
    if left:
        config.note(f"transcripts without text or recording: {len(left)}, such as {left[0]}")
    return found


def _speaker(path, pattern):
    """The speaker of a file, see Recordings. path: relative to the folder of the data."""
    if pattern:
        with config.explained(
            f"--speaker_pattern {pattern}: its group finds no speaker in {path}"
        ):
            return files.nfc(re.search(pattern, path.as_posix())[1])
    numbered = re.search(SPEAKER_CHAPTER, path.as_posix())
    return numbered[1] if numbered else path.parent.name


class Syllables(Recordings):
    """The first `count` recordings of the built-in syllables, synthesized on demand."""

    path = Path("syllables")

    def __init__(self, count, crop=0, hop_length=1, rate=synthetic.RATE):
        self.rate = rate
        self.rates = collections.Counter()  # {sample rate: number of files read}
        self.levels = {}
        self.crop = crop
        self.hop_length = hop_length
        self.names = [f"syllables {index}" for index in range(count)]
        self.texts, speakers = synthetic.syllables(range(count))
        self.speaker_of = speakers.tolist()  # numbers instead of names

    def read(self, index, start, stop):
        wave = synthetic.speak(self.texts[index], self.speaker_of[index])
        return wave[None, start:stop], synthetic.RATE, len(wave)

    def fingerprint(self):
        return {"recordings": len(self), "rate": self.rate, "digest": f"syllables {LOUDNESS}"}
