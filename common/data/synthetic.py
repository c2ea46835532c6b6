"""Built-in data, generated from a seed: captioned shapes and spoken syllables, with scores.

    images, records = synthetic.shapes(range(20_000))      # uint8 (20000, 32, 32, 3), records
    texts, speakers = synthetic.syllables(range(1_000))    # transcripts, int (1000,)
    wave = synthetic.speak(texts[0], speakers[0])          # float32 (T,) at 8 kHz

Captions mention only some attributes, so one caption fits many images, and a model must choose
among them. The text and the speaker of a recording are independent. Sample k is a pure
function of k, and all its attributes are known.
"""

import collections
import functools
import itertools
from pathlib import Path

import numpy as np
import torch

from common import accumulate, config, loader, loop, order


def _triangle(x, y):
    slope = abs(x) * 0.8660254 + y * 0.5
    return np.maximum(-y, slope) - 0.58


def _star(x, y):
    radius = np.hypot(x, y)
    # By symmetry, map all five points of the star onto half of one point.
    angle = np.arctan2(x, y) % (0.4 * np.pi)
    angle = np.minimum(angle, 0.4 * np.pi - angle)
    # Distance to the line from the tip (radius 1.12) to the inner corner (radius 0.5, 36 degrees).
    # The constants are the normal of this line.
    along = radius * np.cos(angle) - 1.12
    across = radius * np.sin(angle)
    return 0.37995207 * along + 0.9250061 * across


def _cross(x, y):
    horizontal = np.maximum(abs(x) - 1, abs(y) - 0.33)
    vertical = np.maximum(abs(x) - 0.33, abs(y) - 1)
    return np.minimum(horizontal, vertical)


def _heart(x, y):
    square = (abs(x) + abs(y + 0.05)) * 0.7071068  # standing on a corner
    discs = np.hypot(abs(x) - 0.44, y - 0.39)  # one on each upper side
    return np.minimum(square, discs) - 0.62


def _moon(x, y):
    disc = np.hypot(x, y) - 1
    shadow = np.hypot(x - 0.55, y - 0.1) - 0.85
    return np.maximum(disc, -shadow)


# Signed distances to the outlines of shapes that fill about [-1, 1]: negative inside, y upward,
# exact near the outline. They must look different even when rotated a few degrees, so there is no
# hexagon (too similar to the circle) and no diamond (too similar to the square).
SHAPES = {
    "circle": lambda x, y: np.hypot(x, y) - 0.97,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) - 0.85,
    "triangle": _triangle,
    "star": _star,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.75) - 0.27,
    "cross": _cross,
    "heart": _heart,
    "moon": _moon,
}
COLORS = {
    "red": (215, 30, 30),
    "yellow": (245, 205, 20),
    "green": (25, 150, 50),
    "cyan": (30, 205, 225),
    "blue": (35, 60, 215),
    "pink": (250, 110, 205),
}
# Half the width of a shape, as a fraction of the image's width.
SIZES = {"small": 0.21, "large": 0.33}
# Positions of the center (x to the right, y down).
PLACES = {
    "top left": (0.31, 0.31),
    "top right": (0.69, 0.31),
    "center": (0.5, 0.5),
    "bottom left": (0.31, 0.69),
    "bottom right": (0.69, 0.69),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "gray": (128, 128, 128),
    "black": (18, 18, 18),
}
ATTRIBUTES = {
    "shape": list(SHAPES),
    "color": list(COLORS),
    "size": list(SIZES),
    "place": list(PLACES),
    "background": list(BACKGROUNDS),
}
NUM_OPTIONS = list(map(len, ATTRIBUTES.values()))
# Probability that a caption mentions the attribute.
NAMED = {
    "shape": 0.85,
    "color": 0.8,
    "size": 0.5,
    "place": 0.55,
    "background": 0.4,
}


def shapes(indices, size=32):
    """Samples `indices` of an endless data set: uint8 images (N, size, size, 3), and N records.

    A record has the "caption", all five "attributes", and "named", the names of the attributes that
    the caption mentions.
    """
    # Of 17 numbers per sample, 5 choose the attributes, 6 vary the drawing, and 6 the caption.
    uniform = _uniform(0, indices, 17)
    values = (uniform[:, :5] * NUM_OPTIONS).astype(int)
    records = list(map(_record, values, uniform[:, 11:]))
    return draw(values, uniform[:, 5:11], size), records


def _record(values, uniform):
    attributes = {name: ATTRIBUTES[name][value] for name, value in zip(ATTRIBUTES, values)}
    named = [name for name, number in zip(NAMED, uniform) if number < NAMED[name]]
    if not named:
        position = int(uniform[5] * len(NAMED))
        named = [list(NAMED)[position]]
    caption = _caption({name: attributes[name] for name in named})
    return {
        "caption": caption,
        "attributes": attributes,
        "named": named,
    }


def _caption(named):
    """A caption like "a small shape at the top left on a gray background".

    named: {attribute: value}.
    """
    words = [
        "a",
        named.get("size"),
        named.get("color"),
        named.get("shape", "shape"),
    ]
    place = named.get("place")
    if place:
        preposition = "in" if place == "center" else "at"
        words.append(f"{preposition} the {place}")
    if "background" in named:
        words.append(f"on a {named['background']} background")
    return " ".join(filter(None, words))


def _uniform(seed, indices, count):
    """Numbers in [0, 1), of shape (N, count): hashes of (seed, index, column)."""
    x = np.full(1, seed, np.uint64)
    rows = np.asarray(indices, np.uint64)[:, None]
    columns = np.arange(1, count + 1, dtype=np.uint64)
    for numbers in (1, rows, columns):
        x = order.splitmix64(x, numbers)
    return (x >> 11) * 2.0**-53


def _look_up(table, values):
    """The entries at `values` (n,) of a table of numbers or tuples: float32 (n, 1, 1[, L])."""
    entries = np.array(list(table.values()), np.float32)
    return entries[values, None, None]


def draw(values, variation, size=32):
    """Draw images, uint8 (N, size, size, 3).

    values (N, 5): attributes, see `attribute_values`. variation (N, 6) in [0, 1]: shift in x,
    shift in y, rotation, scale, shade of the shape, shade of the background; 0.5 means no change.
    """
    images = np.empty((len(values), size, size, 3), np.uint8)
    centers = (np.arange(size) + 0.5) / size  # pixel centers, in [0, 1]
    grid = centers.astype(np.float32)
    variation = variation.astype(np.float32) * 2 - 1
    for shape, distance_to in enumerate(SHAPES.values()):
        chosen = values[:, 0] == shape
        _, color, scale, place, background = values[chosen].T
        vary = variation[chosen].T[..., None, None]  # (6, n, 1, 1)
        shift_x, shift_y, turn, stretch, shade, background_shade = vary
        scale = _look_up(SIZES, scale) * (1 + 0.06 * stretch)  # (n, 1, 1)
        center = _look_up(PLACES, place)  # (n, 1, 1, 2)
        x = grid - center[..., 0] - 0.03 * shift_x
        x = x / scale  # (n, 1, W)
        y = center[..., 1] + 0.03 * shift_y - grid[:, None]
        y = y / scale  # (n, H, 1), upward
        cos = np.cos(0.2 * turn)  # at most 11 degrees
        sin = np.sin(0.2 * turn)
        turned_x = cos * x + sin * y
        turned_y = cos * y - sin * x
        distance = distance_to(turned_x, turned_y)
        distance = distance * scale * size  # (n, H, W), in pixels
        # The edge is one pixel wide.
        inside = np.clip(0.5 - distance, 0, 1)[..., None]
        front = _look_up(COLORS, color)
        front = front * (1 + 0.12 * shade[..., None])
        back = _look_up(BACKGROUNDS, background)
        back = back + 14 * background_shade[..., None]
        pixels = back + inside * (front - back) + 0.5
        images[chosen] = np.clip(pixels, 0, 255)
    return images


# Recognizing attributes


def attribute_values(records):
    """The attributes of records as numbers: int (N, 5), in the order of ATTRIBUTES."""
    values = []
    for record in records:
        attributes = record["attributes"].items()
        values.append([ATTRIBUTES[name].index(value) for name, value in attributes])
    return np.array(values)


def named_attributes(records):
    """True for the attributes that a record's caption mentions: bool (N, 5)."""
    rows = []
    for record in records:
        rows.append([name in record["named"] for name in ATTRIBUTES])
    return np.array(rows)


def nearest(features, references, values):
    """Rows of `values` (N, …) for the `references` (N, D) nearest to `features` (n, D): (n, …)."""
    squares = np.square(references).sum(1)
    distances = squares - 2 * features @ references.T
    return values[distances.argmin(1)]


def picture_features(pictures):
    """Average uint8 images (B, H, H, 3), H = 16, 32, …, to 16x16: float32 (B, 768) in [0, 1]."""
    box = pictures.shape[1] // 16
    boxes = pictures.reshape(-1, 16, box, 16, box, 3)
    means = boxes.mean((2, 4), np.float32)
    means = means.reshape(-1, 768)
    return means / 255


@functools.cache
def picture_references():
    """Features (N, D) and attributes (N, 5) of eight drawings of each combination of attributes.

    With these references, the nearest-neighbor classifier finds that 96% of the real images match
    their captions. This is the ceiling for generated images.
    """
    values = np.indices(NUM_OPTIONS)
    values = values.reshape(5, -1).T
    features = []
    for seed in range(8):
        variation = _uniform(seed, range(len(values)), 11)[:, 5:]
        drawings = draw(values, variation)
        features.append(picture_features(drawings))
    values = np.tile(values, (8, 1))
    return np.concatenate(features), values


def is_correct(pictures, records):
    """Whether images, uint8 (B, H, H, 3), show everything their captions mention: bool (B,)."""
    # Take the attributes of the nearest neighbor among drawings of all combinations.
    found = nearest(picture_features(pictures), *picture_references())
    correct = found == attribute_values(records)
    correct |= ~named_attributes(records)  # attributes that are not mentioned may have any value
    return correct.all(1)


MAX_CAPTIONS = 96  # maximum number of captions to score
DRAWS = 16  # samples per caption
AT_ONCE = 48  # captions per batch: half of MAX_CAPTIONS, so that two ranks have equal work


def is_built_in(folder):
    """True if embed.builtin_data wrote this folder, whose captions then have attributes."""
    path = Path(folder, "clip.json")
    return path.is_file() and "made_from" in config.read_json(path)


def embedding_scores(splits, split, sample_fn, seed):
    """caption_match and coverage of sampled image embeddings, and their ceilings. Collective.

    Returns {} unless both the data and the validation set are the built-in ones.

    caption_match: fraction of samples whose nearest neighbor among held-out images has everything
    that the caption mentions. coverage: variety of the attributes that the caption leaves open. It
    is their entropy among the neighbors of a caption's samples, divided by their entropy among all
    images that fit the caption. The ceilings are the scores of real embeddings: those of training
    images that fit the caption.

    splits: {name: (dataset, indices)}. split: name of the split to score. sample_fn(batch, seeds):
    samples embeddings (N, D), given DRAWS rows and one seed for each of at most AT_ONCE captions.
    """
    dataset, captions = splits[split]
    if not is_built_in(dataset.folder) or splits["validation"][0] is not dataset:
        return {}
    rows = np.repeat(captions[:MAX_CAPTIONS], DRAWS)
    held_out = np.concatenate([splits[name][1] for name in ("validation", "test")])
    with config.explained(f"{dataset.folder}/captions: damaged, or from another program"):
        records = dataset.records(range(len(dataset)))
        attributes = attribute_values(records)  # (images, attributes)
        mentioned = named_attributes(records)  # bool, of the same shape
    references = unit_embeddings(dataset, held_out)

    found = collections.defaultdict(list)  # {score: one value per caption}
    for number, batch in loader.eval_batches(dataset, rows, 0, AT_ONCE * DRAWS):
        indices = batch["index"][::DRAWS].tolist()
        first = number * AT_ONCE
        numbers = range(first, first + len(indices))
        seeds = [accumulate.derive_seed(seed, "scores", k) for k in numbers]
        embeds = sample_fn(batch, seeds).float().cpu().numpy()
        for index, sampled, seed_of_caption in zip(indices, np.split(embeds, len(indices)), seeds):
            named = mentioned[index]
            fits = (attributes == attributes[index])[:, named].all(1)
            training = np.setdiff1d(np.flatnonzero(fits), held_out)
            if not len(training):  # without training images, there is no ceiling
                continue

            random = np.random.RandomState(seed_of_caption % 2**32)
            real = unit_embeddings(dataset, random.choice(training, DRAWS))
            for ending, embeds_of_kind in (("", sampled), ("_ceiling", real)):
                # (DRAWS, attributes)
                neighbors = nearest(embeds_of_kind, references, attributes[held_out])
                matches = (neighbors == attributes[index])[:, named].all(1)
                match = matches.mean().item()
                found[f"caption_match{ending}"].append(match)
                found[f"coverage{ending}"].append(entropy(neighbors[:, ~named]))
            possible = entropy(attributes[fits][:, ~named])
            found["possible"].append(possible)

    scores = loop.means(found)
    possible = scores.pop("possible", 1.0)
    for name in scores:
        if name.startswith("coverage"):
            scores[name] /= possible
    return scores


def unit_embeddings(dataset, indices):
    """Image embeddings of unit length: a NumPy array (N, D)."""
    batch, _ = dataset.fetch(indices)
    embeds = torch.nn.functional.normalize(batch["image_embed"], dim=-1)
    return embeds.numpy()


def entropy(attributes):
    """Entropy of each column of `attributes` (N, columns), in nats, summed over columns."""
    total = 0.0
    for column in attributes.T:
        _, counts = np.unique(column, return_counts=True)
        fractions = counts / len(column)
        total -= (fractions * np.log(fractions)).sum().item()
    return total


# Syllables

RATE = 8_000  # samples per second
# Formants F1 and F2 in Hz, farther apart than those of vowels in a natural language.
SYLLABLES = {
    "i": (250, 1500),
    "e": (420, 1150),
    "a": (700, 1000),
    "o": (430, 720),
    "u": (250, 500),
    "y": (250, 950),
}
NAMES = list(SYLLABLES)
HALF_WIDTH = 75  # half the width of a formant, in Hz
LENGTH = 0.24  # seconds per syllable
GLIDE = 0.04  # seconds of transition between two syllables
FADE = 0.01  # seconds of fading in and out
PERIOD = 640  # samples after which a syllable repeats, because pitches are multiples of 12.5 Hz
SPEAKERS = 100


def voice_of(speaker):
    """(pitch in Hz, timbre: level of even harmonics relative to odd ones) of a speaker."""
    timbre = 0.25 * 4 ** (speaker // 10 / 9)
    return 100 + 12.5 * (speaker % 10), timbre


def syllables(indices):
    """Samples `indices` of an endless data set for `speak`: N texts, and speakers, int (N,).

    A text is 3 to 5 different names from SYLLABLES. Speakers are numbers below SPEAKERS.
    """
    # Of 8 numbers per sample, 1 chooses the speaker, 1 the syllable count, and 6 the order.
    uniform = _uniform(0, indices, 8)
    texts = []
    for numbers in uniform:
        count = 3 + int(3 * numbers[1])
        labels = np.argsort(numbers[2:])[:count]
        texts.append(" ".join(NAMES[label] for label in labels))
    speakers = (uniform[:, 0] * SPEAKERS).astype(int)
    return texts, speakers


@functools.lru_cache(2**13)  # about 250 MB, shared by all stages of a process
def speak(text, speaker):
    """Synthesize a text (names of SYLLABLES) in a speaker's voice: float32 (T,) within ±1 at RATE.

    There is no noise, because a codec would waste its codes on it.
    """
    names = text.split()
    samples = int(len(names) * LENGTH * RATE)
    time = np.arange(samples) / RATE
    wave = 0
    rise = 1
    for position, name in enumerate(names):
        sound = np.resize(_sound(name, *voice_of(speaker)), samples)
        if position:  # the previous syllable fades into this one, in phase
            begin = position * LENGTH
            rise = np.clip((time - begin) / GLIDE + 0.5, 0, 1)
        wave = (1 - rise) * wave + rise * sound
    to_end = np.minimum(time, time[-1] - time)
    wave *= np.clip(to_end / FADE, 0, 1)
    return wave.astype(np.float32)


@functools.cache
def _sound(name, pitch, timbre):
    """PERIOD samples of a syllable: harmonics with two formants. All voices have equal phases."""
    highest = int(0.48 * RATE / pitch)
    harmonic = np.arange(1, highest + 1)
    formants = np.array(SYLLABLES[name])[:, None]
    distance = (harmonic * pitch - formants) / HALF_WIDTH
    first, second = 1 / np.hypot(1, distance)
    envelope = first + 0.5 * second
    level = envelope * np.where(harmonic % 2, 1, timbre)
    # These phases spread the energy over time, which avoids high peaks.
    phase = np.exp(0.5j * harmonic**2)
    spectrum = np.zeros(PERIOD // 2 + 1, complex)
    spectrum[harmonic * round(pitch * PERIOD / RATE)] = level * phase
    wave = np.fft.irfft(spectrum)
    rms = np.sqrt(np.square(wave).mean())
    return wave * (0.15 / rms)


# Recognizing voices and syllables


def estimate_voice(wave):
    """(pitch in Hz, timbre) of a wave (T,) at RATE; both are NaN if it is silent.

    The pitch is the first peak of the autocorrelation that is nearly as high as the highest one.
    The timbre is the mean level of even harmonics relative to their odd neighbors, weighted by the
    level of the neighbors.
    """
    # A power of 2, at least 8 times as long as the wave, for a fine spectrum.
    size = 8 << (len(wave) - 1).bit_length()
    windowed = wave * np.hanning(len(wave))
    spectrum = np.fft.rfft(windowed, size)
    power = np.abs(spectrum) ** 2
    correlation = np.fft.irfft(power)
    if not correlation[0] > 1e-6:
        return np.nan, np.nan

    # Lags from 33 to 94 samples correspond to pitches from 242 to 85 Hz.
    before = correlation[32:94]
    here = correlation[33:95]
    after = correlation[34:96]
    is_peak = (here >= before) & (here >= after)
    is_high = here > 0.85 * here.max()
    # Without a peak, `best` is 0: the lag of 242 Hz, which is not the pitch of any speaker.
    best = (is_peak & is_high).argmax()
    # Find the top of a parabola through the peak and its two neighbors.
    slope = (before - after)[best]
    curvature = (before - 2 * here + after)[best]
    shift = slope / (2 * min(-1e-9, curvature))
    pitch = RATE / (33 + best + np.clip(shift, -0.5, 0.5))

    highest = int(2000 / pitch)
    harmonic = np.arange(1, highest)[:, None]
    near = harmonic + np.linspace(-0.2, 0.2, 21)
    bins = np.round(near * pitch * size / RATE).astype(int)
    level = np.sqrt(power[bins].max(1))
    even = level[1:-1:2]  # harmonics 2, 4, …
    products = level[:-2:2] * level[2::2]
    neighbors = np.sqrt(products)
    log_timbre = np.average(np.log(even / neighbors), weights=neighbors)
    return pitch, np.exp(log_timbre)


def same_voice(voice, other):
    """True if two voices from `estimate_voice` belong to the same speaker.

    Their pitches must differ by less than 2%, and the logarithms of their timbres by less than
    0.45.
    """
    pitch, timbre = np.abs(np.log(voice) - np.log(other))
    return bool(pitch < 0.02 and timbre < 0.45)


def syllable_labels(text, frames, rate):
    """The syllable of each frame, as an index of NAMES: int (frames,). rate: frames per second."""
    labels = np.array([NAMES.index(name) for name in text.split()])
    middle = (np.arange(frames) + 0.5) / rate
    position = (middle / LENGTH).astype(int)
    position = position.clip(max=len(labels) - 1)
    return labels[position]


def recognize_syllables(labels):
    """Names of the syllables in `labels` (frames,) that last at least four frames.

    Adjacent repeats are merged.
    """
    lasting = []
    for label, run in itertools.groupby(labels):
        if len(list(run)) >= 4:
            lasting.append(NAMES[label])
    return [name for name, _ in itertools.groupby(lasting)]


def text_similarity(found, expected):
    """max(0, 1 - edit distance / number of expected syllables) (Levenshtein 1966)."""
    costs = range(len(expected) + 1)  # of inserting 0, 1, … names of `expected`
    for name in found:
        row = [costs[0] + 1]
        for j, other in enumerate(expected):
            substituted = costs[j] + (name != other)
            row.append(min(substituted, row[j] + 1, costs[j + 1] + 1))
        costs = row
    return max(0.0, 1 - costs[-1] / len(expected))
