"""Semantic tokens, 50 a second: k-means on MFCC, or on a layer of a published model of speech.

    tokenizer = semantic.fit(source, rows, clusters=100)       # the same on every rank
    tokens = tokenizer.encode(wave, rate)                      # int64 (frames,)

They encode content, not speaker identity. AudioLM (Borsos et al. 2022, §III-B) takes 1,024 clusters
of layer 7 of w2v-BERT XL, 25 a second. That model is not published; w2v-BERT 2.0 is of its family.
HuBERT (Hsu et al. 2021, §III-A) and WavLM (Chen et al. 2021) are used in the same way.
"""
import functools
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import accumulate, checkpoint, dist, quantize, store, tracker
from common.config import UserError, need
from common.recordings import Unusable, log_mel, resample

FRAME_RATE = 50  # tokens a second
RATE, HOP, WINDOW = 8_000, 160, 400  # of MFCC: the band of telephones, where speech is told apart; in Hz and samples
BINS, CEPSTRA, FLOOR = 26, 12, 1e-3  # mel bins; cepstral coefficients without the loudness; least mel magnitude
SPEECH_RATE = 16_000  # Hz, of published models
SPEECH_HOP = 320  # samples between their frames
# Samples that a frame sees, by model_type. w2v-BERT's is two windows of 400, 160 apart.
FIELDS = {"hubert": 400, "wavlm": 400, "wav2vec2": 400, "wav2vec2-bert": 560}
LLOYD_ROUNDS = 30  # of k-means


class KMeans(nn.Module):
    """Gives each 20 ms of a wave the number of the nearest of `clusters` centers, among its features.

    features: "mfcc" (Davis & Mermelstein 1980), without the mean and the variance of the recording,
    which are mostly the speaker's; or "hf:MODEL:LAYER", such as "hf:facebook/w2v-bert-2.0:7": the
    output of that layer (0: the first one's input) of a HuBERT, WavLM, wav2vec 2.0 or w2v-BERT 2.0.
    MODEL is a name at huggingface.co or a folder.
    """

    def __init__(self, clusters, features="mfcc"):
        super().__init__()
        self.clusters = clusters
        self.kind = features
        self.speech = None
        width = CEPSTRA
        if features.startswith("hf:"):
            self.speech = SpeechLayer(features)
            width = self.speech.width
        elif features != "mfcc":
            raise UserError(f"--tokenizer {features}: expected kmeans or hf:MODEL:LAYER")
        self.register_buffer("centers", torch.zeros(clusters, width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def state(self):
        """Tensors and plain values for checkpoint.save; `load` makes the tokenizer of it."""
        return {"kind": "kmeans", "settings": {"clusters": self.clusters, "features": self.kind},
                "model": self.state_dict()}

    @torch.no_grad()
    def features(self, wave, rate):
        """Features (ceil(seconds * FRAME_RATE), D) of a wave (T,) at `rate`."""
        wave = torch.as_tensor(wave, dtype=torch.float32, device=self.centers.device)[None]
        if self.speech:
            return self.speech(resample(wave, rate, SPEECH_RATE))
        mel = log_mel(resample(wave, rate, RATE), RATE, WINDOW, HOP, BINS, FLOOR)[0]
        x = mel @ _dct(wave.device)
        return (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-5)

    def encode(self, wave, rate):
        """Tokens, int64 numpy (ceil(seconds * FRAME_RATE),), of a wave (T,) at `rate`."""
        x = (self.features(wave, rate) - self.mean) / self.std
        return quantize.nearest(x, self.centers).cpu().numpy()


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


class SpeechLayer:
    """A layer of a published model of speech, "hf:MODEL:LAYER"; no module, so it is not saved."""

    def __init__(self, spec):
        flag = f"--tokenizer {spec}"
        name, _, layer = spec.removeprefix("hf:").rpartition(":")
        if not name or not layer.isdigit():
            raise UserError(f"{flag}: expected hf:MODEL:LAYER, such as hf:facebook/w2v-bert-2.0:7")
        self.flag = flag
        self.layer = int(layer)
        self.model = store.from_transformers(flag, name, FIELDS)
        self.width = self.model.config.hidden_size
        self.field = FIELDS[self.model.config.model_type]
        if self.layer > self.model.config.num_hidden_layers:
            layers = self.model.config.num_hidden_layers
            raise UserError(f"{flag}: that model has layers 0 to {layers}")
        self.extractor = None  # a folder may hold a model alone
        if not Path(name).is_dir() or (Path(name) / "preprocessor_config.json").is_file():
            transformers = need("transformers", flag)
            try:
                self.extractor = transformers.AutoFeatureExtractor.from_pretrained(name)
            except (OSError, ValueError) as error:
                raise UserError(f"{flag}: {str(error).splitlines()[0]}") from error
        elif self.model.main_input_name == "input_features":
            raise UserError(f"{flag}: {name} has no preprocessor_config.json, for its mel spectra")

    def __call__(self, wave):
        """Outputs (ceil(T / 320), D) of the layer at a wave (1, T) of 16 kHz."""
        device = wave.device
        frames = -(-wave.shape[1] // SPEECH_HOP)
        left = (self.field - SPEECH_HOP) // 2  # so that a frame is centered on its 20 ms
        right = (frames - 1) * SPEECH_HOP + self.field - left - wave.shape[1]
        if self.model.main_input_name == "input_features":
            wave = F.pad(wave, (left, right))[0].cpu().numpy()
            found = self.extractor(wave, sampling_rate=SPEECH_RATE, return_tensors="pt")
            x = found["input_features"]  # (1, frames, 160): two windows of 80 mel bins
        else:
            if getattr(self.extractor, "do_normalize", True):
                wave = (wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt()
            x = F.pad(wave, (left, right))
        model = self.model.to(device)
        outputs = model(x.to(device), output_hidden_states=True).hidden_states[self.layer][0]
        if len(outputs) != frames:
            raise UserError(f"{self.flag}: {len(outputs)} frames of 20 ms, expected {frames}")
        return outputs


def fit(source, rows, clusters=100, seed=0, minutes=30, features="mfcc", device="cpu"):
    """Fit a tokenizer, which will be on `device`, to at most `minutes` of recordings `rows`; the same on every rank.

    source.wave(row) is a float32 tensor (T,) at source.rate; recordings that raise Unusable are passed over.
    Each dimension is brought to mean 0 and variance 1 before the clustering (AudioLM §III-B).
    Collective: rank 0 fits, the others wait. UserError for fewer frames than clusters.
    """
    tokenizer = dist.on_each(lambda: KMeans(clusters, features)).to(device)

    def state():
        order = np.random.default_rng(accumulate.number("kmeans", seed)).permutation(rows).tolist()
        found = []
        frames = 0
        most = math.ceil(minutes * 60 * FRAME_RATE)
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
        x = torch.cat(found).to(device)
        mean = x.mean(0)
        std = x.std(0, correction=0).clamp(min=1e-5)
        generator = torch.Generator().manual_seed(accumulate.number("centers", seed))
        centers, _ = quantize.kmeans((x - mean) / std, clusters, generator, LLOYD_ROUNDS)
        return {"centers": centers.cpu(), "mean": mean.cpu(), "std": std.cpu()}
    tokenizer.load_state_dict(dist.on_main(state))
    return tokenizer


def unique(tokens):
    """Tokens (T,) without repetitions in a row, as AudioLM §III-C takes them."""
    return tokens[np.flatnonzero(np.diff(tokens, prepend=tokens[:1] - 1))]
