"""Built-in data, made from a seed: captioned shapes and spoken syllables, of which all is known exactly.

    images, records = synthetic.shapes(range(20_000))          # uint8 (20000, 32, 32, 3), one record each
    waves, records = synthetic.syllables(range(1_000))         # float32 (T_i,) at 8 kHz, one record each

A caption names only some attributes, so one caption fits many images and a model of images given captions has something
left to decide. What a recording says and whose voice says it are drawn independently. Row k is a pure function of k.
"""
import functools
import itertools

import numpy as np


def _star(x, y):
    angle = np.arctan2(x, y) % (0.4 * np.pi)  # fold the five points onto half a point
    angle = np.minimum(angle, 0.4 * np.pi - angle)
    edge = np.array([0.5 * np.cos(0.2 * np.pi) - 1.12, 0.5 * np.sin(0.2 * np.pi)])  # from the tip to the inner corner
    normal = np.array([edge[1], -edge[0]], np.float32) / np.float32(np.hypot(*edge))
    radius = np.hypot(x, y)
    return (radius * np.cos(angle) - 1.12) * normal[0] + radius * np.sin(angle) * normal[1]


# Distance to the outline of a shape that fills about [-1, 1], negative inside, y upward; near the outline it is exact.
# Shapes that turning by a few degrees does not make alike (no hexagon beside a circle, no diamond beside a square).
SHAPES = {
    "circle": lambda x, y: np.hypot(x, y) - 0.97,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) - 0.85,
    "triangle": lambda x, y: np.maximum(-y, abs(x) * 0.8660254 + y * 0.5) - 0.58,
    "star": _star,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.75) - 0.27,
    "cross": lambda x, y: np.minimum(np.maximum(abs(x) - 1, abs(y) - 0.33), np.maximum(abs(x) - 0.33, abs(y) - 1)),
    "heart": lambda x, y: np.minimum(  # a square on its corner, with a disc on each of the upper sides
        (abs(x) + abs(y + 0.05)) * 0.7071068, np.hypot(abs(x) - 0.44, y - 0.39)) - 0.62,
    "moon": lambda x, y: np.maximum(np.hypot(x, y) - 1, 0.85 - np.hypot(x - 0.55, y - 0.1)),  # a disc less another
}
COLORS = {"red": (215, 30, 30), "yellow": (245, 205, 20), "green": (25, 150, 50), "cyan": (30, 205, 225),
          "blue": (35, 60, 215), "pink": (250, 110, 205)}
BACKGROUNDS = {"white": (245, 245, 245), "gray": (128, 128, 128), "black": (18, 18, 18)}
SIZES = {"small": 0.21, "large": 0.33}  # half the width, in widths of the picture
PLACES = {"top left": (0.31, 0.31), "top right": (0.69, 0.31), "center": (0.5, 0.5),
          "bottom left": (0.31, 0.69), "bottom right": (0.69, 0.69)}  # of the center, x to the right, y down
ATTRIBUTES = {"shape": tuple(SHAPES), "color": tuple(COLORS), "size": tuple(SIZES), "place": tuple(PLACES),
              "background": tuple(BACKGROUNDS)}
NAMED = {"shape": 0.85, "color": 0.8, "size": 0.5, "place": 0.55, "background": 0.4}  # chance of being in a caption


def shapes(rows, size=32):
    """Draw the given rows of an endless data set: uint8 images (N, size, size, 3), and a record for each.

    A record has the "caption", all five "attributes" and the names of those that the caption mentions, "named".
    """
    uniform = _uniform(0, rows, 17)  # (N, 17): 5 for attributes, 6 for drawing, 6 for what the caption names
    numbers = (uniform[:, :5] * [len(options) for options in ATTRIBUTES.values()]).astype(int)
    records = []
    for u, row in zip(uniform, numbers):
        attributes = {name: options[number] for (name, options), number in zip(ATTRIBUTES.items(), row)}
        named = [name for x, name in zip(u[11:], ATTRIBUTES) if x < NAMED[name]]
        named = named or [list(ATTRIBUTES)[int(u[16] * len(ATTRIBUTES))]]
        records.append({"caption": _caption(attributes, named), "attributes": attributes, "named": named})
    return draw(numbers, uniform[:, 5:11], size), records


def _caption(attributes, named):
    """A caption that mentions the `named` attributes, such as "a small shape at the top left on a gray background"."""
    words = ["a", *(attributes[name] for name in ("size", "color", "shape") if name in named)]
    words += ["shape"] * ("shape" not in named)
    if "place" in named:
        words += ["in the center" if attributes["place"] == "center" else f"at the {attributes['place']}"]
    if "background" in named:
        words += [f"on a {attributes['background']} background"]
    return " ".join(words)


def _uniform(seed, rows, draws):
    """Numbers in [0, 1) of shape (N, draws), each a hash of (seed, row, column): splitmix64 (Steele et al. 2014)."""
    rows = np.asarray(rows, dtype=np.int64).astype(np.uint64).reshape(-1, 1)
    x = np.full((1, 1), seed % 2**64, np.uint64)
    for numbers in (np.uint64(1), rows, np.arange(1, draws + 1, dtype=np.uint64)):
        x = x + numbers * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * 2.0**-53


def draw(numbers, variation, size=32):
    """Pictures uint8 (N, size, size, 3) of attributes (N, 5), as from `values`.

    variation: (N, 6) in [0, 1]: shift x and y, turn, scale, and shades of shape and background; 0.5 for none.
    """
    images = np.empty((len(numbers), size, size, 3), np.uint8)
    grid = ((np.arange(size) + 0.5) / size).astype(np.float32)  # centers of the pixels
    variation = variation.astype(np.float32) * 2 - 1
    colors, scales, centers, backgrounds = (
        np.array(list(table.values()), np.float32)[column]
        for table, column in zip((COLORS, SIZES, PLACES, BACKGROUNDS), numbers.T[1:]))
    for number, distance_to in enumerate(SHAPES.values()):
        rows = np.flatnonzero(numbers[:, 0] == number)
        vary = variation[rows].T[:, :, None, None]  # (6, n, 1, 1)
        scale = scales[rows, None, None] * (1 + 0.06 * vary[3])
        x = (grid[None, None, :] - centers[rows, 0, None, None] - 0.03 * vary[0]) / scale  # (n, 1, W)
        y = (centers[rows, 1, None, None] + 0.03 * vary[1] - grid[None, :, None]) / scale  # (n, H, 1), upward
        cos, sin = np.cos(0.2 * vary[2]), np.sin(0.2 * vary[2])  # a turn of at most 11 degrees
        distance = distance_to(cos * x + sin * y, cos * y - sin * x) * scale  # (n, H, W)
        inside = np.clip(0.5 - distance * size, 0, 1)[..., None]  # the edge is one pixel wide
        front = colors[rows, None, None] * (1 + 0.12 * vary[4])[..., None]
        back = backgrounds[rows, None, None] + 14 * vary[5][..., None]
        images[rows] = np.clip(back + inside * (front - back) + 0.5, 0, 255)
    return images


def values(records):
    """The attributes of records as numbers: int (N, A), in the order of ATTRIBUTES."""
    return np.array([[options.index(record["attributes"][name]) for name, options in ATTRIBUTES.items()]
                     for record in records])


def named(records):
    """Which of its attributes a record's caption names: bool (N, A)."""
    return np.array([[name in record["named"] for name in ATTRIBUTES] for record in records])


class Judge:
    """Recognizes attributes by the nearest of references: features float32 (N, D), values int (N, A)."""

    def __init__(self, features, values):
        self.features, self.values, self.squares = features, values, np.square(features).sum(1)

    def attributes(self, features):
        """features (n, D) -> int (n, A)."""
        return self.values[(self.squares - 2 * features @ self.features.T).argmin(1)]


def picture_features(pictures):
    """uint8 (N, H, H, 3), H a multiple of 16, averaged over 16 by 16 boxes -> float32 (N, 768) in [0, 1]."""
    count, box = len(pictures), pictures.shape[1] // 16
    return pictures.reshape(count, 16, box, 16, box, 3).mean((2, 4), np.float32).reshape(count, -1) / 255


@functools.cache
def picture_judge():
    """A judge of `picture_features`: eight varied drawings of each combination of attributes.

    By it 0.96 of the real pictures match their captions, which is the ceiling for generated ones.
    """
    numbers = np.array(list(itertools.product(*(range(len(options)) for options in ATTRIBUTES.values()))))
    features = [picture_features(draw(numbers, _uniform(seed, range(len(numbers)), 11)[:, 5:])) for seed in range(8)]
    return Judge(np.concatenate(features), np.tile(numbers, (8, 1)))


def entropy(values):
    """Entropy in nats of the frequencies of integer `values` (n,)."""
    shares = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(shares * np.log(shares)).sum())


# Sounds

RATE = 8_000  # samples a second
SYLLABLES = {  # F1 and F2 in Hz: vowel-like, and further apart than vowels of a language
    "i": (250, 1500), "e": (420, 1150), "a": (700, 1000), "o": (430, 720), "u": (250, 500), "y": (250, 950)}
BANDWIDTH, SECOND = 150, 0.5  # width of a formant in Hz, and the level of the second against the first
LENGTH, GLIDE, FADE = 0.24, 0.04, 0.01  # seconds of a syllable, of its turning into the next, and at both ends
PERIOD = 640  # samples after which a held sound repeats: 0.08 s, as all pitches are multiples of 12.5 Hz
PITCHES = [100 + 12.5 * i for i in range(10)]  # of a speaker, in Hz
TIMBRES = [0.25 * 4 ** (i / 9) for i in range(10)]  # of a speaker: level of even harmonics against odd ones
SPEAKERS = len(PITCHES) * len(TIMBRES)


def voice_of(speaker):
    """(pitch in Hz, timbre) of a speaker, a number below SPEAKERS."""
    return PITCHES[speaker % len(PITCHES)], TIMBRES[speaker // len(PITCHES)]


def speakers_of(rows):
    """Who speaks each of the `rows` (N,) of `syllables`: int (N,), below SPEAKERS."""
    return (_uniform(0, rows, 1)[:, 0] * SPEAKERS).astype(int)


def syllables(rows):
    """Speak the given rows of an endless data set: waves, float32 (T_i,) within [-1, 1] at RATE, and records.

    A row is 3 to 5 different syllables by one speaker. A record has the "text" (names of SYLLABLES) and the "speaker".
    """
    spoken = []
    for u in _uniform(0, rows, 2 + len(SYLLABLES)):
        names = [list(SYLLABLES)[number] for number in np.argsort(u[2:])[:3 + int(3 * u[1])]]
        spoken.append(speak(names, int(u[0] * SPEAKERS)))
    return [wave for wave, _ in spoken], [record for _, record in spoken]


def speak(names, speaker):
    """The wave and record, as of `syllables`, of what a speaker says. Nothing is random, as codes would spell noise."""
    pitch, timbre = voice_of(speaker)
    time = np.arange(int(len(names) * LENGTH * RATE)) / RATE
    wave = np.zeros(len(time))
    for place, name in enumerate(names):  # one sound fades into the next, in phase
        rise = np.clip((time - place * LENGTH) / GLIDE + 0.5, 0, 1) if place else 1
        fall = np.clip(((place + 1) * LENGTH - time) / GLIDE + 0.5, 0, 1) if place < len(names) - 1 else 1
        wave += rise * fall * np.resize(_held(name, pitch, timbre), len(time))
    wave *= np.clip(np.minimum(time, time[-1] - time) / FADE, 0, 1)
    return wave.astype(np.float32), {"text": " ".join(names), "speaker": speaker}


@functools.cache
def _held(name, pitch, timbre):
    """PERIOD samples of a held syllable: harmonics under two formants, at the same phases for all voices."""
    harmonic = np.arange(1, int(0.48 * RATE / pitch) + 1)
    level = sum(gain / np.hypot(1, (harmonic * pitch - formant) / (BANDWIDTH / 2))
                for gain, formant in zip((1, SECOND), SYLLABLES[name]))
    spectrum = np.zeros(PERIOD // 2 + 1, complex)
    spectrum[np.round(harmonic * pitch * PERIOD / RATE).astype(int)] = (
        level * np.where(harmonic % 2, 1, timbre) * np.exp(0.5j * harmonic ** 2))  # spread, so without high peaks
    wave = np.fft.irfft(spectrum)
    return wave * (0.15 / np.sqrt(np.square(wave).mean()))


# How sounds are scored

def heard_voice(wave):
    """(pitch in Hz, timbre) of a wave (T,) at RATE; NaN if it is silent.

    The pitch is the first peak of the autocorrelation that is nearly as high as the highest one. The timbre is how far
    even harmonics lie below their odd neighbors, weighted by the neighbors.
    """
    size = 2 ** int(np.ceil(np.log2(2 * len(wave))) + 2)
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), size)) ** 2
    lags = np.arange(int(RATE / 240), int(RATE / 85) + 1)
    alike = np.fft.irfft(power)[:lags[-1] + 2]
    if not alike[0] > 1e-6:
        return np.nan, np.nan
    before, here, after = (alike[lags + side] for side in (-1, 0, 1))
    peaks = np.flatnonzero((here >= before) & (here >= after) & (here > 0.85 * here.max()))
    best = peaks[0] if len(peaks) else int(here.argmax())
    shift = (before - after)[best] / (2 * min(-1e-9, (before - 2 * here + after)[best]))  # the top of a parabola
    pitch = RATE / (lags[best] + np.clip(shift, -0.5, 0.5))
    harmonic = np.arange(1, int(2000 / pitch))
    near = np.round((harmonic * pitch)[:, None] * size / RATE + np.linspace(-0.2, 0.2, 21) * pitch * size / RATE)
    level = np.sqrt(power[near.astype(int)].max(1))
    around = np.sqrt(level[:-2] * level[2:])[::2]  # of the neighbors of harmonics 2, 4, …
    return float(pitch), float(np.exp(np.average(np.log(level[1:-1:2] / around), weights=around)))


def same_voice(one, other):
    """Whether two voices, as of `heard_voice`, are one: pitches within 2 %, timbres within 0.45 in their logarithms."""
    pitch, timbre = np.abs(np.log(np.array(one) / np.array(other)))
    return bool(pitch < 0.02 and timbre < 0.45)


def syllable_labels(record, frames, rate):
    """The number of the syllable of each of `frames` frames, `rate` a second: int (frames,)."""
    middle = (np.arange(frames) + 0.5) / rate
    numbers = np.array([list(SYLLABLES).index(name) for name in record["text"].split()])
    return numbers[(middle / LENGTH).astype(int).clip(max=len(numbers) - 1)]


def majority(tokens, labels, count):
    """The label (count,) that each of `count` tokens mostly has, in int arrays (N,) of tokens and labels."""
    table = np.zeros((count, labels.max() + 1), np.int64)
    np.add.at(table, (tokens, labels), 1)
    return table.argmax(1)


def heard_text(labels, least=4):
    """Names of the syllables that stand in `labels` (frames,) for at least so many frames in a row."""
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    runs = [int(labels[start]) for start, length in zip(starts, np.diff(starts, append=len(labels))) if length >= least]
    return [list(SYLLABLES)[number] for number, _ in itertools.groupby(runs)]


def text_similarity(found, wanted):
    """1 - (edits that turn one text into the other) / (syllables wanted), at least 0 (Levenshtein 1966)."""
    costs = np.arange(len(wanted) + 1)
    for i, name in enumerate(found, 1):
        row = [i]
        for j, other in enumerate(wanted):
            row.append(min(costs[j] + (name != other), costs[j + 1] + 1, row[j] + 1))
        costs = row
    return max(0.0, 1 - costs[-1] / len(wanted))
