"""Semantic tokens, 50 per second: k-means on MFCCs, or on a layer of a published speech model.

    tokenizer = semantic.KMeans(100, semantic.MFCC(), sample_rate)
    tokenizer.fit(x, seed)                                     # features (N, D) of many waves
    tokens = tokenizer.encode(wave)                            # int64 (T,)

Semantic tokens encode content, not speaker identity. AudioLM (Borsos et al. 2022, §III-B) clusters
layer 7 of w2v-BERT XL into 1,024 tokens, at 25 per second. w2v-BERT XL is not published; w2v-BERT
2.0 is from the same family. HuBERT (Hsu et al. 2021, §III-A) and WavLM (Chen et al. 2021) work the
same way.

To add features, write a class like MFCC, or like SpeechLayer in interop/speech.py. A semantic model
without k-means can replace KMeans. It needs `clusters`, `num_quantizers` and `encode`; if it is
fitted, also `fit` and the buffers that `fit` fills. It must return FRAME_RATE tokens per second.
"""

import numpy as np
import torch
from torch import nn

from common.models import quantize
from common.models.audio import in_blocks, log_mel, resample

FRAME_RATE = 50  # tokens per second
LLOYD_ROUNDS = 30  # iterations of k-means

# MFCC settings
HOP = 160  # samples
WINDOW = 400  # samples
FLOOR = 1e-3  # minimum mel magnitude
MEL_BINS = 26


class MFCC:
    """Mel cepstra (Davis & Mermelstein 1980): the orthonormal DCT-II of the log-mel spectrum.

    The constant coefficient, which measures loudness, is left out. width: number of coefficients.
    """

    # The sample rate of telephony, which is enough for intelligible speech.
    sample_rate = 8_000
    width = 12

    def __call__(self, wave):
        """Cepstra (1, T', width) of a wave (1, T)."""
        mel = log_mel(wave, self.sample_rate, WINDOW, HOP, MEL_BINS, FLOOR)
        places = np.arange(MEL_BINS)[:, None] + 0.5
        angles = np.pi / MEL_BINS * places * np.arange(1, self.width + 1)
        matrix = np.cos(angles) * (2 / MEL_BINS) ** 0.5  # (MEL_BINS, width)
        return mel @ torch.tensor(matrix, dtype=mel.dtype, device=mel.device)


class KMeans(nn.Module):
    """Maps each 20 ms of a wave to the nearest of `clusters` centers in feature space.

    features: maps a wave (1, T) at its `sample_rate` to (1, T', `width`), like MFCC. Long
    recordings are processed in blocks, so that an hour fits in memory. Features are normalized with
    the mean and standard deviation of the training data. With MFCC, a prompt therefore gets the
    same tokens as it does within its recording. With a published model, tokens depend on the whole
    block.
    """

    num_quantizers = 1  # tokens per frame; a codec has more

    def __init__(self, clusters, features, sample_rate):
        super().__init__()
        self.clusters = clusters
        self.frames_of = features
        self.sample_rate = sample_rate  # of the waves for `features` and `encode`
        self.register_buffer("centers", torch.zeros(clusters, features.width))
        self.register_buffer("mean", torch.zeros(features.width))
        self.register_buffer("std", torch.ones(features.width))

    def features(self, wave):
        """Features (ceil(seconds * FRAME_RATE), D) of a wave (T,) at `sample_rate`."""
        rate = self.frames_of.sample_rate
        wave = resample(wave.to(self.centers.device), self.sample_rate, rate)
        # The features of a block also depend on the second before it and the second after it.
        return in_blocks(self.frames_of, wave, rate // FRAME_RATE, 1, FRAME_RATE, FRAME_RATE)

    def fit(self, x, seed):
        """Standardize features x (N, D) and fit the centers (AudioLM §III-B)."""
        x = x.to(self.centers.device)
        self.mean = x.mean(0)
        self.std = x.std(0, correction=0).clamp(min=1e-5)
        generator = torch.Generator().manual_seed(seed)
        x = (x - self.mean) / self.std
        self.centers, _ = quantize.kmeans(x, self.clusters, generator, LLOYD_ROUNDS)

    def encode(self, wave):
        """Tokens of a wave (T,), int64 (ceil(seconds * FRAME_RATE),), on the CPU."""
        x = self.features(wave)
        tokens = quantize.nearest_codes((x - self.mean) / self.std, self.centers)
        return tokens.cpu()
