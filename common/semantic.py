"""Semantic tokens, 50 a second, that tell what is said rather than who says it, and measures of that.

    tokenizer = semantic.fit(source, rows, clusters=100)       # the same on every rank
    tokens, voice = tokenizer.encode(wave, rate)

k-means on MFCC, or on a layer of HuBERT (the package transformers). `Listener` hears the built-in syllables and voices
in a wave alone, so that what a model generates can be scored.
"""
import functools
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import accumulate, audio, checkpoint, dist, synthetic, tracker
from common.config import UserError, need

RATE, HOP, WINDOW = 16_000, 320, 640  # Hz, samples between frames (20 ms), samples of a frame
FIELD = 400  # samples that HuBERT sees for a frame
TOGETHER = 10  # recordings of a speaker whose mean is taken away together when clusters are fitted
FEW_FRAMES, ROUNDS = 20, 5  # an offset of fewer frames is drawn toward all speakers'; turns that it takes to find it
LENGTHS = np.exp(0.02 * np.arange(-8, 9))  # factors of formants, and so of vocal tracts, that are looked among
BROAD, REFITS, MOST_FRAMES = 12, 3, 600  # classes by which a voice is found, turns to fit them, frames that do for it
BATCH, STEPS, STARTS = 4096, 300, 4  # of mini-batch k-means; batches in frames
FEW = 0.05  # a cluster with less than this share of a mean cluster's frames is moved
NAMES = list(synthetic.SYLLABLES)


class KMeans(nn.Module):
    """Gives each 20 ms of a wave the number of the nearest of `clusters` centers, among features without the voice.

    features: "mfcc", which is c1 to c12, without the loudness, or "hubert:MODEL:LAYER", such as
              "hubert:facebook/hubert-base-ls960:9": the output of that layer (0: of the convolutions) of a HuBERT model
    deltas:   take c0 to c12 and their first and second differences, as the first iteration of HuBERT has it (Hsu et al.
              2021, section IV-A); they tell less about a syllable where speech is as slow as the built-in one

    The voice of a recording is taken to be the length of a vocal tract, which scales all formants (VTLN, Lee & Rose
    1996; not for HuBERT), and an offset of all features, found in turns with the class of each frame (signal bias
    removal, Rahim & Juang 1996), as a mean would depend on what is said: so a second of a prompt gets the tokens that
    it has in training. The classes are few, as many would be told apart by the voice. Make one with `fit` or `load`.
    """

    def __init__(self, clusters: int, features: str = "mfcc", deltas: bool = False):
        super().__init__()
        self.clusters, self.kind, self.deltas, self.hubert = clusters, features, deltas, None
        if features.startswith("hubert:"):
            self.hubert, self.layer = _hubert(features)
        elif features != "mfcc":
            raise UserError(f"features {features!r}: expected mfcc or hubert:MODEL:LAYER")
        width = self.hubert[0].config.hidden_size if self.hubert else 39 if deltas else 12
        warps = torch.eye(width)[None]
        if not self.hubert:
            one = audio.cepstral_warps(LENGTHS, RATE)[:, not deltas:, not deltas:]
            warps = torch.stack([torch.block_diag(*[warp] * (width // len(warp))) for warp in one])
        self.register_buffer("warps", warps, persistent=False)
        self.register_buffer("centers", torch.zeros(clusters, width))
        self.register_buffer("broad", torch.zeros(min(BROAD, clusters), width))  # centers of the classes
        self.register_buffer("mean", torch.zeros(width))  # of all speakers' features
        self.register_buffer("deviation", torch.ones(width))  # of features from their speaker's mean

    def state(self) -> dict:
        """Tensors and plain values for checkpoint.save; `load` makes the tokenizer of it."""
        settings = {"clusters": self.clusters, "features": self.kind, "deltas": self.deltas}
        return {"kind": "kmeans", "settings": settings, "model": self.state_dict()}

    @torch.no_grad()
    def features(self, wave: torch.Tensor, rate: int) -> torch.Tensor:
        """Features (ceil(T16 / 320), D) of a wave (T,) at `rate`, of which T16 are the samples at 16 kHz."""
        wave = audio.resample(torch.as_tensor(wave, dtype=torch.float32, device=self.centers.device), rate, RATE)[None]
        if self.hubert is None:
            cepstra = audio.mfcc(wave, RATE, HOP, WINDOW)
            if not self.deltas:
                return cepstra[0, :, 1:]
            slopes = audio.deltas(cepstra)
            return torch.cat((cepstra, slopes, audio.deltas(slopes)), -1)[0]
        frames = -(-wave.shape[1] // HOP)
        wave = (wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt()  # as the models of 16 kHz were trained
        left = (FIELD - HOP) // 2  # so that frame i is centered where ours is
        padded = nn.functional.pad(wave, (left, (frames - 1) * HOP + FIELD - left - wave.shape[1]))
        model = self.hubert[0].to(wave.device)
        return model(padded, output_hidden_states=True).hidden_states[self.layer][0]

    def voice(self, features: torch.Tensor) -> tuple[int, torch.Tensor]:
        """(number of the warp, offset (D,)) with which features (T, D) are nearest to the broad centers."""
        some = features[::max(1, -(-len(features) // MOST_FRAMES))]
        x = (some @ self.warps - self.mean) / self.deviation  # (warps, T, D)
        offset = x.sum(1, keepdim=True) / (x.shape[1] + FEW_FRAMES)
        for _ in range(ROUNDS):
            said = self.broad[nearest((x - offset).flatten(0, 1), self.broad)[0]].view(x.shape)
            offset = (x - said).sum(1, keepdim=True) / (x.shape[1] + FEW_FRAMES)
        distance = nearest((x - offset).flatten(0, 1), self.broad)[1]
        best = int(distance.view(len(x), -1).mean(1).argmin())
        return best, offset[best, 0]

    def encode(self, wave: torch.Tensor, rate: int) -> tuple[np.ndarray, int]:
        """(tokens int64 (ceil(T16 / 320),), number of the warp of its voice) of a wave (T,) at `rate`."""
        features = self.features(wave, rate)
        warp, offset = self.voice(features)
        normal = (features @ self.warps[warp] - self.mean) / self.deviation - offset
        return nearest(normal, self.centers)[0].cpu().numpy(), warp


def load(state: dict, path: str | Path) -> KMeans:
    """The tokenizer of a `state`, which a file at `path` held. UserError if it is of something else."""
    if state.get("kind") != "kmeans":
        raise UserError(f"{path}: not a tokenizer: its kind is {state.get('kind')!r}, expected 'kmeans'")
    tokenizer = KMeans(**state["settings"])
    checkpoint.load_weights(tokenizer, state, path)
    return tokenizer


def _hubert(spec: str) -> tuple[list, int]:
    """([frozen model], layer) of "hubert:MODEL:LAYER", in a list so that it is no part of the tokenizer's state."""
    name, _, layer = spec.removeprefix("hubert:").rpartition(":")
    if not name or not layer.isdigit():
        raise UserError(f"{spec}: expected hubert:MODEL:LAYER, such as hubert:facebook/hubert-base-ls960:9")
    transformers = need("transformers", spec)
    try:
        model = transformers.HubertModel.from_pretrained(name).eval().requires_grad_(False)
    except OSError as error:  # no such model, or no way to it
        raise UserError(f"{spec}: {str(error).splitlines()[0]}") from error
    if int(layer) > model.config.num_hidden_layers:
        raise UserError(f"{spec}: that model has layers 0 to {model.config.num_hidden_layers}")
    return [model], int(layer)


# k-means

def fit(source, rows: np.ndarray, clusters: int = 100, seed: int = 0, minutes: float = 30, features: str = "mfcc",
        deltas: bool = False, device: torch.device | str = "cpu") -> KMeans:
    """Fit a tokenizer, which will be on `device`, to at most `minutes` of recordings `rows`; the same on every rank.

    source.wave(row) is a float32 tensor (T,) at source.rate, and source.speaker(row) tells whose it is, None if that is
    not known. Recordings that raise audio.Unusable are passed over. Collective: rank 0 fits, the others wait.
    """
    tokenizer = dist.on_each(lambda: KMeans(clusters, features, deltas)).to(device)
    tokenizer.load_state_dict(dist.on_main(lambda: _fitted(tokenizer, source, rows, seed, minutes)))
    return tokenizer


def _fitted(tokenizer: KMeans, source, rows: np.ndarray, seed: int, minutes: float) -> dict[str, torch.Tensor]:
    """The buffers of a tokenizer, fitted."""
    start, order = time.monotonic(), np.random.default_rng(accumulate.number("kmeans", seed)).permutation(rows).tolist()
    speakers: dict[Hashable, list[int]] = {}
    for row in order:
        who = source.speaker(row)
        speakers.setdefault(("row", row) if who is None else who, []).append(row)
    longest = max(map(len, speakers.values()), default=0)
    groups = [those[i:i + TOGETHER] for i in range(0, longest, TOGETHER) for those in speakers.values() if those[i:]]
    voices, frames, most = [], 0, int(minutes * 60 * RATE / HOP)
    for group in tracker.progress(groups, desc="k-means: features", delay=3, leave=False):
        found = []
        for row in group:
            try:
                found.append(tokenizer.features(source.wave(row), source.rate))
            except audio.Unusable:
                continue
        if found:
            voices.append(torch.cat(found)[:most - frames])
            frames += len(voices[-1])
        if frames >= most:
            break
    if frames < tokenizer.clusters:
        raise UserError(f"k-means: {frames} frames of 20 ms are too few for {tokenizer.clusters} clusters")
    warps = np.full(len(voices), len(tokenizer.warps) // 2)  # none; it stays the mean, as lengths are relative
    for turn in range(1 + REFITS * (len(tokenizer.warps) > 1)):
        if turn:
            warps = np.array([tokenizer.voice(features[:MOST_FRAMES])[0] for features in voices])
            warps = (warps - round(warps.mean()) + len(tokenizer.warps) // 2).clip(0, len(tokenizer.warps) - 1)
        warped = [features @ tokenizer.warps[warp] for features, warp in zip(voices, warps)]
        means = [one.mean(0) for one in warped]
        points = torch.cat([one - mean for one, mean in zip(warped, means)])
        tokenizer.mean.copy_(torch.stack(means).mean(0))
        tokenizer.deviation.copy_(points.std(0, correction=0).clamp(min=1e-5))
        points = (points / tokenizer.deviation).cpu()
        tokenizer.broad.copy_(minibatch_kmeans(points, len(tokenizer.broad), seed))
    tokenizer.centers.copy_(tokenizer.broad if tokenizer.clusters <= BROAD else
                            minibatch_kmeans(points, tokenizer.clusters, seed))
    print(f"{tokenizer.clusters} clusters of {tokenizer.kind}, fitted to {len(points) * HOP / RATE / 60:.1f} minutes "
          f"in {time.monotonic() - start:.0f} s", flush=True)
    return tokenizer.state_dict()


def nearest(points: torch.Tensor, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of the nearest center, squared distance to it), each (N,), of points (N, D) among centers (K, D)."""
    distances = [(part.square().sum(1, keepdim=True) - 2 * part @ centers.T + centers.square().sum(1)).min(1)
                 for part in points.split(1 << 16)]
    return torch.cat([d.indices for d in distances]), torch.cat([d.values for d in distances]).clamp(min=0)


def plus_plus(points: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` of the points (N, D), each drawn with chances as its squared distance to those before it.

    k-means++, Arthur & Vassilvitskii 2007.
    """
    chosen, distance = [], torch.ones(len(points))
    for _ in range(count):
        chosen.append(points[torch.multinomial(distance, 1, generator=generator)])
        new = nearest(points, chosen[-1])[1]
        distance = torch.minimum(distance, new) if len(chosen) > 1 else new
        if not distance.any():  # fewer different points than clusters
            distance = torch.ones(len(points))
    return torch.cat(chosen)


def minibatch_kmeans(points: torch.Tensor, clusters: int, seed: int = 0) -> torch.Tensor:
    """Centers (clusters, D) of points (N, D): mini-batch k-means, Sculley 2010, from the best of a few starts.

    The starts are by k-means++, and compared after a third of the steps.
    """
    generator = torch.Generator().manual_seed(accumulate.number("centers", seed))
    few = points[torch.randperm(len(points), generator=generator)[:max(20 * clusters, BATCH)]]
    starts = [_descended(points, few, plus_plus(few, clusters, generator), STEPS // 3, generator)
              for _ in range(STARTS)]
    best = min(starts, key=lambda centers: nearest(few, centers)[1].sum().item())
    return _descended(points, few, best, STEPS - STEPS // 3, generator)


def _descended(points: torch.Tensor, few: torch.Tensor, centers: torch.Tensor, steps: int,
               generator: torch.Generator) -> torch.Tensor:
    """The centers after so many steps.

    A center is the mean of the points it has had in the last steps; one that gets next to none is put elsewhere, far
    from the others: upon one of `few` points.
    """
    counts = torch.zeros(len(centers))
    for step in range(steps):
        batch = points[torch.randint(len(points), (BATCH,), generator=generator)]
        token, _ = nearest(batch, centers)
        got = torch.bincount(token, minlength=len(centers)).float()
        counts += got
        pull = torch.zeros_like(centers).index_add_(0, token, batch) - got[:, None] * centers
        centers = centers + pull / counts.clamp(min=1)[:, None]
        if step % 50 == 49 and step < steps - 50:
            if (dead := counts < FEW * counts.mean()).any():
                far = nearest(few, centers[~dead])[1] + 1e-9
                centers[dead] = few[torch.multinomial(far, int(dead.sum()), generator=generator)]
            counts.zero_()  # what came before was of centers that stood elsewhere
    return centers


# Measures

def unique(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens without repetitions in a row, how often each stood there): np.repeat(*unique(tokens)) is `tokens`."""
    first = np.flatnonzero(np.diff(tokens, prepend=tokens[:1] - 1))
    return tokens[first], np.diff(first, append=len(tokens))


def syllable_labels(record: dict, frames: int, margin: float = 0.025) -> np.ndarray:
    """The syllable of each frame of 20 ms: int64 (frames,), numbers in the order of synthetic.SYLLABLES.

    It is -1, which is to be left out, in pauses and where the middle is less than `margin` seconds from a syllable's
    beginning or end: there one turns into the next.
    """
    middle, labels = (np.arange(frames) + 0.5) * HOP / RATE, np.full(frames, -1)
    for start, stop, name in record["syllables"]:
        labels[(middle > start + margin) & (middle < stop - margin)] = NAMES.index(name)
    return labels


def many_to_one(tokens: np.ndarray, labels: np.ndarray, tokens_other: np.ndarray, labels_other: np.ndarray) -> float:
    """How often the label that a token mostly has in the first pair of arrays is the one it has in the other pair.

    Labels of -1 are left out. A token that the first pair lacks is wrong.
    """
    known, other = labels >= 0, labels_other >= 0
    table = np.zeros((max(tokens.max(), tokens_other.max()) + 1, max(labels.max(), labels_other.max()) + 1), np.int64)
    np.add.at(table, (tokens[known], labels[known]), 1)
    best = np.where(table.any(1), table.argmax(1), -2)
    return float((best[tokens_other[other]] == labels_other[other]).mean())


def speaker_accuracy(tokens: Sequence[np.ndarray], speakers: Sequence[Hashable], tokens_other: Sequence[np.ndarray],
                     speakers_other: Sequence[Hashable]) -> tuple[float, float]:
    """(how often a token tells who speaks by a map fitted to the first recordings, how often the same name always is).

    The map is `many_to_one`'s; the one name is that of who speaks most in the first recordings.
    """
    numbers = {who: number for number, who in enumerate(dict.fromkeys([*speakers, *speakers_other]))}
    labels, others = (np.concatenate([np.full(len(one), numbers[who]) for one, who in zip(*pair)])
                      for pair in ((tokens, speakers), (tokens_other, speakers_other)))
    right = many_to_one(np.concatenate(tokens), labels, np.concatenate(tokens_other), others)
    return right, float((others == np.bincount(labels).argmax()).mean())


# Listening to the built-in syllables

class Listener:
    """Tells voice and syllables of a wave alone, by comparing it with what the synthesizer would make of each.

    Analysis by synthesis (Bell et al. 1961): the loudness of the harmonics of each frame is set beside that of every
    vowel at every formant scale and tilt. Of 120 recordings cut in two after a second, 98 % pass `same_speaker`; of
    pieces by two speakers 10 %, as some voices are that much alike.
    """

    HOP, WINDOW, FFT = 160, 800, 2048  # samples between frames, of a frame, of its transform
    LOWEST, HIGHEST, TOP = 70, 340, 4200  # pitches looked for; the highest harmonic compared, all in Hz
    SCALES = np.exp(np.arange(-0.28, 0.28, 0.01))
    TILTS = synthetic.TILT + synthetic.TILTED * np.array([0, 0.5, 1])
    POWER = 0.7  # of energies: what a codec adds in the valleys counts less than with the 0.3 of loudness
    APART = np.array([0.1, 0.08])  # log pitch, log formant; the pieces are mostly 0.02 and 0.01 apart

    def hear(self, wave: np.ndarray, rate: int = RATE) -> dict:
        """Hear a wave (T,): its "pitch" in Hz (median), "formant" scale and "syllables" [(start_s, stop_s, name), ...].

        Both numbers are NaN and there are no syllables if there is no voice in it.
        """
        wave = audio.resample(torch.as_tensor(wave, dtype=torch.float32), rate, RATE).numpy()
        pitch, voiced, power = self._pitches(wave)
        if not voiced.any():
            return {"pitch": np.nan, "formant": np.nan, "syllables": []}
        middle = np.median(np.log2(pitch[voiced]))
        voiced &= np.abs(np.log2(pitch) - middle) < 0.4  # none an octave off
        scores = np.zeros((len(pitch), len(self.TILTS), len(self.SCALES), len(NAMES)), np.float32)
        steps = np.round(24 * np.log2(pitch / self.LOWEST)).astype(int)
        hiss = np.quantile(power, 0.1, axis=1, keepdims=True) / -np.log(0.9)  # white noise has a mean energy of so much
        below = np.pad(power - hiss, ((0, 0), (1, 0))).cumsum(1)
        for step in set(steps[voiced]):
            rows, made = np.flatnonzero(voiced & (steps == step)), _harmonics(step)
            order = np.arange(1, made.shape[1] + 1)
            left, right = (np.round((order + side) * pitch[rows, None] * self.FFT / RATE).astype(int)
                           for side in (-0.3, 0.3))
            heard = below[rows[:, None], right + 1] - below[rows[:, None], left]  # (rows, harmonics)
            heard = np.clip(heard, 0, None) ** self.POWER
            heard /= np.linalg.norm(heard, axis=1, keepdims=True) + 1e-9
            scores[rows] = (heard.astype(np.float32) @ made.T).reshape(-1, *scores.shape[1:])
        total = scores.max(3).sum(0)
        tilt, scale = np.unravel_index(total.argmax(), total.shape)
        return {"pitch": float(2 ** middle), "formant": float(self.SCALES[scale]),
                "syllables": self._segments(scores[:, tilt, scale], voiced)}

    def _pitches(self, wave: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pitch (frames,), whether there is a voice, and power spectra: by autocorrelation, Boersma 1993."""
        taper = np.hanning(self.WINDOW + 1)[:-1].astype(np.float32)
        lags = np.arange(RATE // self.HIGHEST, RATE // self.LOWEST + 1)
        frames = max(1, -(-len(wave) // self.HOP))
        padded = np.pad(wave, (self.WINDOW // 2, self.WINDOW // 2 + self.HOP))
        cut = np.lib.stride_tricks.sliding_window_view(padded, self.WINDOW)[self.HOP // 2::self.HOP][:frames]
        power, own = (np.abs(np.fft.rfft(x, self.FFT)) ** 2 for x in (cut * taper, taper))
        alike, own = np.fft.irfft(power), np.fft.irfft(own)
        energy, alike = alike[:, 0], alike[:, lags] / (alike[:, :1] + 1e-9) * (own[0] / own[lags])
        best = (alike - 0.1 * np.log2(lags / lags[0]))[:, 1:-1].argmax(1) + 1  # rather the shorter of like periods
        before, peak, after = (alike[np.arange(frames), best + side] for side in (-1, 0, 1))
        shift = (before - after) / (2 * np.minimum(before - 2 * peak + after, -1e-9))  # the top of a parabola
        voiced = (peak > 0.4) & (energy > 0.03 * np.quantile(energy, 0.9))
        return RATE / (lags[best] + np.clip(shift, -0.5, 0.5)), voiced, power

    def _segments(self, scores: np.ndarray, voiced: np.ndarray) -> list[tuple[float, float, str]]:
        """Runs of 50 ms and more of the frames' best syllables, by scores (frames, syllables) smoothed over 50 ms."""
        padded = np.pad(scores, ((2, 2), (0, 0)))
        smooth = sum(padded[side:side + len(scores)] for side in range(5))
        best, times = unique(np.where(voiced, smooth.argmax(1), -1))
        found, at = [], 0
        for number, count in zip(best, times):
            if number >= 0 and count >= 5:
                start = found.pop()[0] if found and found[-1][2] == NAMES[number] else at * self.HOP / RATE
                found.append((start, (at + count) * self.HOP / RATE, NAMES[number]))
            at += count
        return found

    def same_speaker(self, one: dict, other: dict) -> bool:
        """Whether two things heard are of one voice."""
        difference = [np.log(one[name] / other[name]) for name in ("pitch", "formant")]
        return bool(np.hypot(*(difference / self.APART)) < 1)


@functools.cache
def _harmonics(step: int) -> np.ndarray:
    """Loudness (tilts * scales * syllables, harmonics) of all vowels, `step` quarter tones above the lowest pitch."""
    frequencies = Listener.LOWEST * 2 ** (step / 24)
    frequencies = np.arange(1, int(Listener.TOP / frequencies) + 1) * frequencies
    formants = np.array([[*four, 4500] for four in synthetic.SYLLABLES.values()], float).T
    formants = (formants[:, None] * Listener.SCALES[:, None]).reshape(5, -1)
    made = np.concatenate([np.abs(synthetic.resonances(formants, tilt, frequencies)) for tilt in Listener.TILTS])
    made **= 2 * Listener.POWER
    return made / np.linalg.norm(made, axis=1, keepdims=True)


class Hearing:
    """Adds up how well what was generated keeps the voice of a prompt, and says a text; over all ranks in the end."""

    LEAST = 0.4  # seconds by which a voice is judged

    def __init__(self):
        self.listener, self.sums = Listener(), np.zeros(8)

    def voices(self, prompts: Sequence, rests: Sequence, added: Sequence, rate: int) -> None:
        """Take in what followed some prompts in reality, and what was added to them: waves (T,) at `rate`."""
        first, real = ([self.listener.hear(wave, rate) for wave in waves] for waves in (prompts, rests))
        for one, own, other, wave in zip(first, real, [*real[1:], real[0]], added):
            self.sums[:3] += 1, self.listener.same_speaker(one, own), self.listener.same_speaker(one, other)
            if len(wave) >= self.LEAST * rate:
                self.sums[3:5] += 1, self.listener.same_speaker(one, self.listener.hear(wave, rate))

    def texts(self, spoken: Sequence, real: Sequence, records: Sequence[dict], rate: int) -> None:
        """Take in waves made from the texts of `records`, and real ones."""
        for one, other, record in zip(spoken, real, records):
            heard = [syllable_accuracy(self.listener.hear(wave, rate), record) for wave in (one, other)]
            self.sums[5:] += 1, *heard

    def result(self) -> dict:
        """continued: long enough to judge; of those, voice_kept; and the same measure on real pairs. Collective."""
        count, same, other, continued, kept, texts, said, real = dist.total(self.sums.tolist())
        result = {"continued": continued / count, "voice_kept": kept / max(1, continued),
                  "voice_kept_real": same / count, "voice_of_others_real": other / count}
        return result | ({"syllables_of_text": said / texts, "syllables_of_text_real": real / texts} if texts else {})


def syllable_accuracy(heard: dict, record: dict) -> float:
    """1 - (edits that turn the syllables heard into those of the record) / (syllables of the record), at least 0."""
    names, wanted = [name for *_, name in heard["syllables"]], [name for *_, name in record["syllables"]]
    costs = list(range(len(wanted) + 1))  # Levenshtein 1966, a row at a time
    for i, name in enumerate(names):
        row = [i + 1]
        for j, other in enumerate(wanted):
            row.append(min(costs[j] + (name != other), costs[j + 1] + 1, row[j] + 1))
        costs = row
    return max(0.0, 1 - costs[-1] / len(wanted))
