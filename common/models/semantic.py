"""Semantic tokens, 50 a second: k-means on MFCC, or on a layer of a published speech model.

    tokenizer = semantic.fit(dataset, indices, clusters=100)
    tokens = tokenizer.encode(wave)                            # int64 (T,)

They encode content, not speaker identity. AudioLM (Borsos et al. 2022, §III-B) takes 1,024 clusters
of layer 7 of w2v-BERT XL, 25 a second. That model is not published; w2v-BERT 2.0 is of its family.
HuBERT (Hsu et al. 2021, §III-A) and WavLM (Chen et al. 2021) are used in the same way.

Features of another model are a class as SpeechLayer of interop/speech.py, and a branch in
KMeans.__init__. A semantic model without k-means goes in the place of KMeans: it needs `settings`
(its arguments, which its file has), `clusters`, `encode` and, if it is fitted, the buffers that
`fit` fills; its tokens must be FRAME_RATE a second.
"""

import contextlib

import numpy as np
import torch
from torch import nn

from common import accumulate, tracker
from common.config import UserError
from common.data.files import Unusable
from common.data.recordings import in_blocks, log_mel, resample
from common.models import quantize

FRAME_RATE = 50  # tokens a second
# Of MFCC. Sampled at 8 kHz like a telephone, whose band is enough to understand speech.
MFCC_RATE = 8_000
MFCC_HOP = 160  # samples
MFCC_WINDOW = 400  # samples
MFCC_FLOOR = 1e-3  # least mel magnitude
MEL_BINS = 26
CEPSTRA = 12  # coefficients, without the one of loudness
LLOYD_ROUNDS = 30  # of k-means
MAX_FRAMES = 30 * 60 * FRAME_RATE  # to fit k-means to: half an hour


class KMeans(nn.Module):
    """Maps each 20 ms of a wave to the nearest of `clusters` centers, in the space of its features.

    features: "mfcc" (Davis & Mermelstein 1980), or "hf:MODEL:LAYER", such as
    "hf:facebook/w2v-bert-2.0:7": a layer of a published model, see interop/speech.py. They are
    normalized by the mean and deviation of the training data. So with MFCC a prompt has the same
    tokens alone as within its recording; a layer of a published model sees all of a block. Long
    sounds are taken in blocks, so an hour fits into memory.
    """

    def __init__(self, clusters, features, sample_rate):
        super().__init__()
        # `sample_rate` is of all recordings, also of those to fit it to.
        self.settings = {"clusters": clusters, "features": features, "sample_rate": sample_rate}
        self.clusters = clusters
        self.sample_rate = sample_rate
        self.frames_of = mfcc  # a wave (1, T) at `self.rate` -> features (1, T', D)
        self.rate = MFCC_RATE
        width = CEPSTRA
        if features != "mfcc":
            from common.interop import speech

            self.frames_of = speech.SpeechLayer(features)
            self.rate = speech.SAMPLE_RATE
            width = self.frames_of.width
        self.register_buffer("centers", torch.zeros(clusters, width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def features(self, wave):
        """Features (ceil(seconds * FRAME_RATE), D) of a wave, a tensor (T,) at `sample_rate`."""
        wave = resample(wave.to(self.centers.device), self.sample_rate, self.rate)
        hop = self.rate // FRAME_RATE
        # A second of what is around a block.
        return in_blocks(self.frames_of, wave, hop, 1, FRAME_RATE, FRAME_RATE)

    def encode(self, wave):
        """Tokens, int64 (ceil(seconds * FRAME_RATE),), on the CPU, of a wave, a tensor (T,)."""
        x = self.features(wave)
        tokens = quantize.nearest_codes((x - self.mean) / self.std, self.centers)
        return tokens.cpu()


def mfcc(wave):
    """Mel cepstra (1, T', CEPSTRA) of a wave (1, T): of its log-mel spectrum the DCT-II.

    It is orthonormal, and without its constant.
    """
    mel = log_mel(wave, MFCC_RATE, MFCC_WINDOW, MFCC_HOP, MEL_BINS, MFCC_FLOOR)
    places = np.arange(MEL_BINS)[:, None] + 0.5
    angles = np.pi / MEL_BINS * places * np.arange(1, CEPSTRA + 1)
    matrix = np.cos(angles) * (2 / MEL_BINS) ** 0.5  # (MEL_BINS, CEPSTRA)
    return mel @ torch.tensor(matrix, dtype=mel.dtype, device=mel.device)


def fit(dataset, indices, clusters, seed=0, features="mfcc", device="cpu"):
    """A tokenizer that is fitted to at most half an hour of the recordings `indices`.

    dataset.wave(index, length, fraction) is as that of Recordings, at dataset.rate; recordings that
    raise Unusable are skipped. Features are normalized to mean 0 and variance 1 (AudioLM §III-B).
    UserError if there are fewer frames than clusters.
    """
    tokenizer = KMeans(clusters, features, dataset.rate).to(device)
    key = accumulate.derive_seed("kmeans", seed)
    order = np.random.default_rng(key).permutation(indices).tolist()
    found = [torch.zeros(0, len(tokenizer.mean))]
    frames = 0
    for index in tracker.progress(order, desc="k-means: features", delay=3, leave=False):
        with contextlib.suppress(Unusable):
            # Of long recordings a part, so that the half hour is of many.
            x = tokenizer.features(dataset.wave(index, 10 * dataset.rate, 0.5))
            found.append(x.cpu())
            frames += len(x)
        if frames >= MAX_FRAMES:
            break
    x = torch.cat(found)[:MAX_FRAMES].to(device)
    if len(x) < clusters:
        raise UserError(f"--clusters {clusters}: only {len(x)} frames of 20 ms to fit them to")
    tokenizer.mean = x.mean(0)
    tokenizer.std = x.std(0, correction=0).clamp(min=1e-5)
    generator = torch.Generator().manual_seed(accumulate.derive_seed("centers", seed))
    x = (x - tokenizer.mean) / tokenizer.std
    tokenizer.centers, _ = quantize.kmeans(x, clusters, generator, LLOYD_ROUNDS)
    return tokenizer
