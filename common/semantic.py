"""Semantic tokens, 50 a second: k-means on MFCC, or on a layer of HuBERT. They encode content, not speaker identity.

    tokenizer = semantic.fit(source, rows, clusters=100)       # the same on every rank
    tokens = tokenizer.encode(wave, rate)                      # int64 (frames,)

AudioLM (Borsos et al. 2022, §III-B) takes k-means on w2v-BERT; HuBERT (Hsu et al. 2021, §III-A) is the like of it.
"""
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import accumulate, checkpoint, dist, quantize, tracker
from common.config import UserError, need
from common.recordings import Unusable, log_mel, resample

FRAME_RATE = 50  # tokens a second
RATE, HOP, WINDOW = 8_000, 160, 400  # of MFCC: the band of telephones, where speech is told apart; in Hz and samples
BINS, CEPSTRA, FLOOR = 26, 12, 1e-3  # mel bins; cepstral coefficients without the loudness; least mel magnitude
HUBERT_RATE, HUBERT_HOP, HUBERT_FIELD = 16_000, 320, 400  # in Hz; samples between frames, and that a frame sees
LLOYD_ROUNDS = 30  # of k-means


class KMeans(nn.Module):
    """Gives each 20 ms of a wave the number of the nearest of `clusters` centers, among its features.

    features: "mfcc" (Davis & Mermelstein 1980), without the mean and the variance of the recording, which are mostly
              the speaker's; or "hubert:MODEL:LAYER", such as "hubert:facebook/hubert-base-ls960:9": the output of that
              layer (0: of the convolutions), as it is
    """

    def __init__(self, clusters, features="mfcc"):
        super().__init__()
        self.clusters, self.kind, self.hubert = clusters, features, None
        if features.startswith("hubert:"):
            self.hubert, self.layer = _hubert(features)
        elif features != "mfcc":
            raise UserError(f"--tokenizer {features}: expected kmeans or hubert:MODEL:LAYER")
        self.register_buffer("centers", torch.zeros(clusters, self.hubert[0].config.hidden_size if self.hubert else
                                                    CEPSTRA))

    def state(self):
        """Tensors and plain values for checkpoint.save; `load` makes the tokenizer of it."""
        return {"kind": "kmeans", "settings": {"clusters": self.clusters, "features": self.kind},
                "model": self.state_dict()}

    @torch.no_grad()
    def features(self, wave, rate):
        """Features (ceil(seconds * FRAME_RATE), D) of a wave (T,) at `rate`."""
        own_rate = HUBERT_RATE if self.hubert else RATE
        wave = resample(torch.as_tensor(wave, dtype=torch.float32, device=self.centers.device), rate, own_rate)[None]
        if self.hubert is None:
            x = log_mel(wave, RATE, WINDOW, HOP, BINS, FLOOR)[0] @ _dct(wave.device)
            return (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-5)
        frames = -(-wave.shape[1] // HUBERT_HOP)
        wave = (wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt()  # as the models of 16 kHz were trained
        left = (HUBERT_FIELD - HUBERT_HOP) // 2  # so that a frame is centered on its 20 ms
        wave = F.pad(wave, (left, (frames - 1) * HUBERT_HOP + HUBERT_FIELD - left - wave.shape[1]))
        model = self.hubert[0].to(wave.device)
        return model(wave, output_hidden_states=True).hidden_states[self.layer][0]

    def encode(self, wave, rate):
        """Tokens, int64 numpy (ceil(seconds * FRAME_RATE),), of a wave (T,) at `rate`."""
        return quantize.nearest(self.features(wave, rate), self.centers).cpu().numpy()


@functools.lru_cache(maxsize=4)
def _dct(device):
    """(BINS, CEPSTRA): the orthonormal DCT-II, without its constant."""
    angles = np.pi / BINS * (np.arange(BINS)[:, None] + 0.5) * np.arange(1, CEPSTRA + 1)
    with torch.inference_mode(False):
        return torch.tensor(np.cos(angles) * (2 / BINS) ** 0.5, dtype=torch.float32, device=device)


def load(state, path):
    """The tokenizer of a `state`, which a file at `path` held. UserError if it is of something else."""
    if state.get("kind") != "kmeans":
        raise UserError(f"{path}: not a tokenizer: its kind is {state.get('kind')!r}, expected 'kmeans'")
    with checkpoint.reading(path):
        if state["settings"]["clusters"] != len(state["model"]["centers"]):  # before memory is taken
            raise UserError(f"{path}: damaged: its settings are of {state['settings']['clusters']} clusters")
        tokenizer = KMeans(**state["settings"])
        checkpoint.load_weights(tokenizer, state, path)
        return tokenizer


def _hubert(spec):
    """([frozen model], layer) of "hubert:MODEL:LAYER"; in a list, so that it is no part of the tokenizer's state."""
    name, _, layer = spec.removeprefix("hubert:").rpartition(":")
    if not name or not layer.isdigit():
        raise UserError(f"--tokenizer {spec}: expected hubert:MODEL:LAYER, such as hubert:facebook/hubert-base-ls960:9")
    transformers = need("transformers", f"--tokenizer {spec}")
    try:
        model = transformers.HubertModel.from_pretrained(name).eval().requires_grad_(False)
    except OSError as error:  # no such model, or no way to it
        raise UserError(f"--tokenizer {spec}: {str(error).splitlines()[0]}") from error
    if int(layer) > model.config.num_hidden_layers:
        raise UserError(f"--tokenizer {spec}: that model has layers 0 to {model.config.num_hidden_layers}")
    return [model], int(layer)


def fit(source, rows, clusters=100, seed=0, minutes=30, features="mfcc", device="cpu"):
    """Fit a tokenizer, which will be on `device`, to at most `minutes` of recordings `rows`; the same on every rank.

    source.wave(row) is a float32 tensor (T,) at source.rate; recordings that raise Unusable are passed over.
    Collective: rank 0 fits, the others wait. UserError for fewer frames than clusters.
    """
    tokenizer = dist.on_each(lambda: KMeans(clusters, features)).to(device)

    def centers():
        order = np.random.default_rng(accumulate.number("kmeans", seed)).permutation(rows).tolist()
        found, frames, most = [], 0, math.ceil(minutes * 60 * FRAME_RATE)
        for row in tracker.progress(order, desc="k-means: features", delay=3, leave=False):
            try:
                found.append(tokenizer.features(source.wave(row), source.rate)[:most - frames].cpu())
            except Unusable:
                continue
            frames += len(found[-1])
            if frames >= most:
                break
        if frames < clusters:
            raise UserError(f"--clusters {clusters}: only {frames} frames of 20 ms to fit them to")
        generator = torch.Generator().manual_seed(accumulate.number("centers", seed))
        return quantize.kmeans(torch.cat(found).to(device), clusters, generator, LLOYD_ROUNDS)[0].cpu()
    tokenizer.centers.copy_(dist.on_main(centers))
    return tokenizer


def unique(tokens):
    """Tokens (T,) without repetitions in a row, as AudioLM §III-C takes them."""
    return tokens[np.flatnonzero(np.diff(tokens, prepend=tokens[:1] - 1))]
