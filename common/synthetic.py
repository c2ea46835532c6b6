"""Built-in data, made from a seed: captioned shapes and spoken syllables, of which all is known exactly.

    images, records = synthetic.shapes(range(20_000))          # uint8 (20000, 32, 32, 3), one record each
    waves, records = synthetic.syllables(range(1_000))         # float32 (T_i,) at 16 kHz, one record each

A caption names only some attributes, so one caption fits many images and a model of images given captions has something
left to decide. What a recording says and whose voice says it are drawn independently. Row k is a pure function of
(seed, k).
"""
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from common.config import UserError


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
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
    "moon": lambda x, y: np.maximum(  # a disc with another taken out
        np.hypot(x, y) - 1, 0.85 - np.hypot(x - 0.55, y - 0.1)),
}
COLORS = {"red": (215, 30, 30), "yellow": (245, 205, 20), "green": (25, 150, 50), "cyan": (30, 205, 225),
          "blue": (35, 60, 215), "pink": (250, 110, 205)}
BACKGROUNDS = {"white": (245, 245, 245), "gray": (128, 128, 128), "black": (18, 18, 18)}
SIZES = {"small": 0.21, "large": 0.33}  # half the width, in widths of the picture
PLACES = {"top left": (0.31, 0.31), "top right": (0.69, 0.31), "center": (0.5, 0.5),
          "bottom left": (0.31, 0.69), "bottom right": (0.69, 0.69)}  # of the center, x to the right, y down
ATTRIBUTES: dict[str, tuple[str, ...]] = {"shape": tuple(SHAPES), "color": tuple(COLORS), "size": tuple(SIZES),
                                          "place": tuple(PLACES), "background": tuple(BACKGROUNDS)}
NAMED = {"shape": 0.85, "color": 0.8, "size": 0.5, "place": 0.55, "background": 0.4}  # chance of being in a caption
DRAWS = 17  # uniform numbers per row: 5 for attributes, 6 for drawing, 6 for which attributes the caption names


def shapes(rows: Sequence[int], seed: int = 0, size: int = 32) -> tuple[np.ndarray, list[dict]]:
    """Draw the given rows of the endless data set `seed`.

    Returns uint8 images (N, H, W, 3) with H = W = `size` and a record for each: its "caption", all five "attributes"
    and the names of those that the caption mentions, "named".
    """
    uniform = _uniform(seed, rows)  # (N, DRAWS)
    numbers = (uniform[:, :5] * [len(options) for options in ATTRIBUTES.values()]).astype(int)
    records = []
    for u, row in zip(uniform, numbers):
        attributes = {name: options[number] for (name, options), number in zip(ATTRIBUTES.items(), row)}
        named = [name for x, name in zip(u[11:], ATTRIBUTES) if x < NAMED[name]]
        named = named or [list(ATTRIBUTES)[int(u[16] * len(ATTRIBUTES))]]
        records.append({"caption": _caption(attributes, named), "attributes": attributes, "named": named})
    return draw(numbers, uniform[:, 5:11], size), records


def _caption(attributes: dict[str, str], named: Sequence[str]) -> str:
    """A caption that mentions the `named` attributes, such as "a small shape at the top left on a gray background"."""
    words = ["a", *(attributes[name] for name in ("size", "color", "shape") if name in named)]
    words += ["shape"] * ("shape" not in named)
    if "place" in named:
        words += ["in the center" if attributes["place"] == "center" else f"at the {attributes['place']}"]
    if "background" in named:
        words += [f"on a {attributes['background']} background"]
    return " ".join(words)


def _uniform(seed: int, rows: Sequence[int], draws: int = DRAWS) -> np.ndarray:
    """Numbers in [0, 1) of shape (N, draws), each a hash of (seed, row, column): splitmix64 (Steele et al. 2014)."""
    rows = np.asarray(rows, dtype=np.int64).astype(np.uint64).reshape(-1, 1)
    x = np.full((1, 1), seed % 2**64, np.uint64)
    for numbers in (np.uint64(1), rows, np.arange(1, draws + 1, dtype=np.uint64)):
        x = x + numbers * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * 2.0**-53


def draw(numbers: np.ndarray, variation: np.ndarray, size: int = 32) -> np.ndarray:
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


def values(records: Sequence[dict]) -> np.ndarray:
    """The attributes of records as numbers: int (N, A), in the order of ATTRIBUTES."""
    return np.array([[options.index(record["attributes"][name]) for name, options in ATTRIBUTES.items()]
                     for record in records])


def named(records: Sequence[dict]) -> np.ndarray:
    """Which of its attributes a record's caption names: bool (N, A)."""
    return np.array([[name in record["named"] for name in ATTRIBUTES] for record in records])


class Judge:
    """Recognizes attributes by the nearest of references: features float32 (N, D), values int (N, A)."""

    def __init__(self, features: np.ndarray, values: np.ndarray):
        self.features, self.values, self.squares = features, values, np.square(features).sum(1)

    def attributes(self, features: np.ndarray) -> np.ndarray:
        """features (n, D) -> int (n, A)."""
        return self.values[(self.squares - 2 * features @ self.features.T).argmin(1)]


def picture_features(pictures: np.ndarray) -> np.ndarray:
    """uint8 (N, H, H, 3), H a multiple of 16, averaged over 16 by 16 boxes -> float32 (N, 768) in [0, 1]."""
    count, box = len(pictures), pictures.shape[1] // 16
    return pictures.reshape(count, 16, box, 16, box, 3).mean((2, 4), np.float32).reshape(count, -1) / 255


@functools.cache
def picture_judge() -> Judge:
    """A judge of `picture_features`: eight varied drawings of each combination of attributes.

    By it 0.96 of the real pictures match their captions, which is the ceiling for generated ones.
    """
    numbers = np.array(list(itertools.product(*(range(len(options)) for options in ATTRIBUTES.values()))))
    features = [picture_features(draw(numbers, _uniform(seed, range(len(numbers)))[:, 5:11])) for seed in range(8)]
    return Judge(np.concatenate(features), np.tile(numbers, (8, 1)))


def entropy(values: np.ndarray) -> float:
    """Entropy in nats of the frequencies of integer `values` (n,)."""
    shares = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(shares * np.log(shares)).sum())


# F1 to F4 in Hz of vowels that differ in the ratios of their formants, which the length of a vocal tract leaves alone.
# i ae a u er: men's means of Peterson & Barney 1952, table II; e lies between its [ɪ] and [ɛ]. o y w: near Catford's
# (1988) [ɔ], [y] and [ɯ]. F4, which neither gives, is near that of Hillenbrand et al. 1995.
SYLLABLES: dict[str, tuple[int, int, int, int]] = {
    "i": (270, 2290, 3010, 3650), "y": (250, 1850, 2150, 3350), "e": (460, 2000, 2600, 3650),
    "ae": (660, 1720, 2410, 3600), "a": (730, 1090, 2440, 3650), "o": (500, 760, 2400, 3450),
    "u": (300, 870, 2240, 3350), "w": (300, 1390, 2300, 3400), "er": (490, 1350, 1690, 3350),
}
RATE = 16_000  # samples a second
SPEAKERS = 400
PITCHES = (130, 290)  # in Hz, of the lowest and the highest speaker
BANDWIDTHS = (60, 80, 120, 180, 250)  # of F1 to F5 in Hz
TILT, TILTED = 0.74, 0.18  # the mildest speaker's tilt, a pole, and by how much more the steepest one's tilts
SPREAD, EFFORT = 0.06, 0.06  # ranges of each formant's logarithm and of the tilt, from one syllable to the next
GLIDE = 0.03  # seconds in which one vowel turns into the next
HOP, FFT = 160, 800  # samples between frames, each with one filter, and samples of a frame with its filter's ringing


def voice_of(speaker: int, seed: int = 0) -> dict[str, float]:
    """A speaker's "pitch" in Hz, "formant" (a factor of all of them), "tilt" (a pole) and "breath" (level of noise)."""
    u = _uniform(seed ^ 0x5EA4E5, [speaker], 4)[0]
    low, high = PITCHES
    return {"pitch": float(low * (high / low) ** u[0]), "formant": float(0.87 * (1.15 / 0.87) ** u[1]),
            "tilt": float(TILT + TILTED * u[2]), "breath": float(0.01 * 8 ** u[3])}


def speaker_of(row: int, seed: int = 0) -> int:
    """Who speaks row `row` of the endless data set `seed`: a number below SPEAKERS."""
    return int(_uniform(seed, [row], 1)[0, 0] * SPEAKERS)


def syllables(rows: Sequence[int], seed: int = 0) -> tuple[list[np.ndarray], list[dict]]:
    """Speak the given rows: waves, float32 (T_i,) within [-1, 1] at RATE, of 6 to 12 syllables, and a record for each.

    A record has the "text" (names of syllables, no two alike in a row), the "speaker", whose "pitch" in Hz the wave's
    moves about, the "formant" scale, and "syllables": [(start and stop in seconds, name), ...].
    """
    spoken = []
    for row, u in zip(rows, _uniform(seed, rows, 14)):
        names, number = list(SYLLABLES), -1
        text = []
        for x in u[2:8 + int(7 * u[1])]:  # each other than the one before
            number = (number + 1 + int(x * (len(names) - (number >= 0)))) % len(names)
            text.append(names[number])
        spoken.append(_speak(text, int(u[0] * SPEAKERS), seed, int(row)))
    return [wave for wave, _ in spoken], [record for _, record in spoken]


def speak(text: str, speaker: int, seed: int = 0, take: int = 0) -> tuple[np.ndarray, dict]:
    """Let a speaker of the data set `seed` say `text`, names of SYLLABLES: its wave and record, as from `syllables`.

    Another `take` varies lengths, pauses and intonation.
    """
    names = text.split()
    if not names or not set(names) <= set(SYLLABLES):
        raise UserError(f"text {text!r}: expected syllables, of {' '.join(SYLLABLES)}")
    return _speak(names, speaker, seed, -1 - take)


def _speak(names: list[str], speaker: int, seed: int, row: int) -> tuple[np.ndarray, dict]:
    """The wave and record of `names`, from a source and a filter (Fant 1960) that do not depend on each other."""
    voice, count = voice_of(speaker, seed), len(names)
    u = _uniform(seed ^ 0x50D1A, [row], 12 * count)[0].reshape(12, count)
    length = 0.15 + 0.17 * u[0]
    pause = np.where(u[1] < 0.35, 0.03 + 0.06 * u[2], 0)  # after it
    stop = 0.02 + np.cumsum(length + pause) - pause
    start = stop - length
    time = np.arange(int((stop[-1] + 0.02) * RATE)) / RATE
    random = np.random.default_rng([seed % 2**63, row % 2**63])

    tune = 2 * u[3] + np.linspace(0.5, -0.5, count)  # semitones: intonation, and a fall toward the end
    tune = np.interp(time, (start + stop) / 2, tune - np.average(tune, weights=length))
    source = _pulses(voice["pitch"] * 2 ** (tune / 12), random)
    source += voice["breath"] * random.standard_normal(len(time), np.float32)
    level = 0.7 + 0.6 * u[4]
    dip = np.where(pause > 0, 0, 0.25 + 0.6 * u[5])  # between two syllables; silence in a pause and at the end
    dip[-1] = 0
    source *= np.interp(time, np.stack((start, start + 0.03, stop - 0.04, stop)).T.ravel(),
                        np.stack((np.append(0, dip[:-1]), level, level, dip)).T.ravel())

    frames = np.arange(-(-len(time) // HOP) + 1) * HOP / RATE
    knots = np.stack((start + GLIDE / 2, stop - GLIDE / 2)).T.ravel()
    said = np.log([SYLLABLES[name] for name in names]).T + SPREAD * (u[8:] - 0.5)  # never twice quite the same
    formants = np.exp([np.interp(frames, knots, f.repeat(2)) for f in said])  # (4, frames)
    formants = np.vstack((formants, np.full(len(frames), 4500))) * voice["formant"]
    wave = _filtered(source, formants, voice["tilt"] + np.interp(frames, knots, EFFORT * (u[6] - 0.5).repeat(2)))
    wave *= np.minimum(1, (len(time) - np.arange(len(time))) / (0.02 * RATE))  # the ringing fades, too: a true end
    wave *= (0.08 + 0.06 * u[7, 0]) / np.sqrt(np.mean(np.square(wave)))
    wave *= min(1, 0.98 / np.abs(wave).max())
    times = [(float(a), float(b), name) for a, b, name in zip(start, stop, names)]
    return wave.astype(np.float32), {"text": " ".join(names), "speaker": speaker, "pitch": voice["pitch"],
                                     "formant": voice["formant"], "syllables": times}


def _pulses(pitch: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A pulse train of mean power 1 and `pitch` (T,) in Hz at each sample, with a jitter of 0.6 % of a period.

    A pulse stands where the phase passes a whole number, which is between samples: a sinc under a window.
    """
    phase = np.cumsum(pitch) / RATE
    before = np.flatnonzero(np.diff(np.floor(phase)) > 0)
    at = before + (np.ceil(phase[before]) - phase[before]) / (phase[before + 1] - phase[before])
    at += 0.006 * random.standard_normal(len(at)) * RATE / pitch[before]
    taps = np.floor(at).astype(int)[:, None] + np.arange(-7, 9)  # (pulses, 16)
    offset = taps - at[:, None]
    shape = np.sinc(offset) * np.cos(np.pi * offset / 18) ** 2 * np.sqrt(RATE / pitch[before])[:, None]
    return np.bincount((taps + 16).clip(0).ravel(), shape.ravel(), len(pitch) + 64)[16:len(pitch) + 16]


def _filtered(source: np.ndarray, formants: np.ndarray, tilt: np.ndarray) -> np.ndarray:
    """Let `source` (T,) ring in `resonances` at `formants` (5, frames) in Hz and `tilt` (frames,).

    As the filter moves, overlapping frames of two hops each are filtered in the frequency domain and added up. Vowels
    come out about equally loud.
    """
    frames = formants.shape[1]
    padded = np.pad(source.astype(np.float32), (HOP, frames * HOP - len(source)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * HOP)[::HOP]
    spectra = np.fft.rfft(windows * np.hanning(2 * HOP + 1)[:-1].astype(np.float32), FFT)  # (frames, FFT / 2 + 1)
    response = resonances(formants, tilt, np.arange(FFT // 2 + 1) * RATE / FFT)
    response /= np.sqrt(np.mean(response.real ** 2 + response.imag ** 2, 1, keepdims=True))
    parts = np.fft.irfft(spectra * response, FFT).reshape(frames, FFT // HOP, HOP)
    out = np.zeros((frames + FFT // HOP, HOP), np.float32)
    for i in range(FFT // HOP):
        out[i:i + frames] += parts[:, i]
    return out.ravel()[HOP:HOP + len(source)]


def resonances(formants: np.ndarray, tilt: np.ndarray | float, frequencies: np.ndarray) -> np.ndarray:
    """Complex gains (N, F) at `frequencies` (F,) of filters with resonances at `formants` (5, N), all in Hz.

    They stand in series, each of two poles (Klatt 1980), after a pole `tilt` that stands for the glottis and the lips.
    """
    radius = np.exp(-np.pi * np.array(BANDWIDTHS) / RATE)
    angle = np.minimum(2 * np.pi * formants / RATE, 0.97 * np.pi)
    poles = np.zeros((2 * len(radius) + 2, formants.shape[1]))  # their product, a polynomial in 1/z
    poles[0], poles[1] = 1, -tilt
    for r, a in zip(radius, angle):
        poles = poles - 2 * r * np.cos(a) * np.roll(poles, 1, 0) + r ** 2 * np.roll(poles, 2, 0)
    turn = np.exp(-2j * np.pi / RATE * np.outer(np.arange(len(poles)), frequencies))
    return 1 / (poles.T.astype(np.complex64) @ turn.astype(np.complex64))
