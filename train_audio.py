"""Train a SoundStream codec, then semantic, coarse and fine token transformers: (text, prompt) -> sound (AudioLM).

    torchrun --nproc_per_node=2 train_audio.py                             # all four, on syllables that it makes itself
    torchrun --nproc_per_node=2 -- train_audio.py --stage soundstream --data speech --run runs/mine     # one, on yours
    python train_audio.py evaluate
    python train_audio.py sample --text "a i u o" --seconds 3 --out out.wav
    python train_audio.py sample --prompt voice.wav --seconds 4 --out out.wav        # goes on in the prompt's own voice
    python train_audio.py sample --reconstruct in.wav --quantizers 4 --out out.wav   # through the codec

The same command again resumes. Each stage is a run of its own, RUN/soundstream, RUN/semantic, RUN/coarse and RUN/fine;
later stages read the folders of earlier ones. `python train_audio.py [train|evaluate|sample] --help`: the settings.

SoundStream: Zeghidour et al. 2021. AudioLM: Borsos et al. 2022.
"""
import collections
import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import (
    accumulate,
    amp,
    audio,
    checkpoint,
    clip,
    config,
    data,
    dist,
    ema,
    lora,
    media,
    optim,
    schedule,
    semantic,
    tracker,
)
from common.config import Count, Decay, Natural, NonNegative, Positive, Share, UserError, need
from common.nn import FeedForward, Memory, Transformer
from common.quantize import ResidualQuantizer
from common.recordings import Recordings, Syllables, token_cache

LONGEST = 6.0  # seconds of a text of the built-in data, at most
FRAME_RATE = semantic.RATE / semantic.HOP  # semantic tokens a second
BUILTIN_ROWS = 4_000  # recordings of the built-in syllables
TopK = Annotated[float, ("above 0 and at most 1", lambda share: 0 < share <= 1)]

# Config

@dataclass(frozen=True)
class Config(config.Training):
    # Run and data
    stage: Literal["all", "soundstream", "semantic", "coarse", "fine"] = "all"  # what to train; all: each in turn
    run: str = "runs/audio"  # folder of the runs, one a stage: config, checkpoints, metrics; started again, it resumes
    data: str = "syllables"  # folder of recordings (wav; flac, ogg, mp3 by soundfile), or "syllables": built in
    sample_rate: Count = 16_000  # samples a second of the codec; recordings of other rates are resampled
    seconds: Positive = 0.5  # length of a training crop
    crop_samples: Natural = 0  # the same in samples of the wave, instead of --seconds, if not 0
    speaker_pattern: str = ""  # regular expression, group 1 of which in a file's name is the speaker; "": its folder
    split_by: Literal["auto", "speaker", "file"] = "auto"  # what is held out; auto: speakers, if there are 20 or more
    soundstream: str = ""  # codec of coarse and fine: run, model.pt or encodec:MODEL; "": RUN/soundstream
    semantic: str = ""  # run whose semantic tokens coarse takes; "": RUN/semantic
    # Codec
    channels: Count = 8  # of the first layer; each stride doubles them
    strides: tuple[Annotated[int, ("2 or more", lambda stride: stride > 1)], ...] = (2, 4, 5, 8)  # product: the hop
    residual_units: Count = 1  # a stride, with dilations 1, 3, 9
    codec_width: Count = 90  # width of a frame
    quantizers: Count = 8  # each quantizes what those before it have left over; the first few alone are a lower bitrate
    codebook_size: Count = 256  # codes of a quantizer
    grouped_quantizers: Natural = 1  # the last so many have a code for each of --groups, those before one for the frame
    groups: Natural = 0  # of the channels of a frame; 0: pairs of channels
    group_codebooks: Literal["uniform", "learned"] = "uniform"  # grids as wide as what is left, or as others
    codebook_decay: Decay = 0.98  # of the codebooks' moving averages
    dead_below: NonNegative = 0.1  # codes of fewer frames a step, on average, are replaced
    quantizer_dropout: Share = 1.0  # share of samples that are cut to a random number of quantizers
    least_quantizers: Count = 6  # the smallest such number; of no more quantizers than that, none is cut
    quantize_after: Natural = 100  # steps of the plain autoencoder before k-means makes the codebooks
    mel_weight: NonNegative = 1.0  # of the distance of log-mel spectra at six scales
    mel_floor: Share = 0.1  # share of a frame's loudest mel magnitude below which that is deaf, as ears are
    pre_emphasis: Share = 0.4  # of waves in the two losses below, 0 for none: it lifts the faint upper formants
    l1_weight: NonNegative = 10.0  # of the L1 distance of waves
    sdr_weight: NonNegative = 0.1  # of the signal-to-distortion ratio, in dB; scale-invariant, it would blow up silence
    commitment_weight: NonNegative = 0.25  # of the distance of frames to their codes
    # Discriminators of the codec
    discriminate_after: Share = 0.97  # share of the steps without them; 1 for none at all
    adversarial_weight: NonNegative = 0.1  # of the hinge loss
    feature_weight: NonNegative = 10.0  # of the distance of features
    penalty_weight: NonNegative = 10.0  # of the gradient penalty, 0 for none
    penalty_every: Count = 4  # steps between gradient penalties
    wave_channels: Count = 4  # of the first layer of the three that hear waves
    stft_channels: Count = 4  # of the first layer of the one that sees spectra
    stft_window: Annotated[int, ("a multiple of 128", lambda size: size > 0 and size % 128 == 0)] = 1024  # in samples
    discriminator_lr: Positive = 3e-4  # peak learning rate
    discriminator_warmup_steps: Natural = 20  # steps of linear warm-up, from when they begin
    discriminator_max_grad_norm: NonNegative = 5.0  # gradients are clipped to this norm, 0 for not at all
    # Semantic tokens
    tokenizer: str = "kmeans"  # kmeans on mel-cepstra, or hubert:MODEL:LAYER
    clusters: Count = 12  # semantic tokens; speech has more sounds than the built-in syllables: 100, say
    deltas: bool = False  # kmeans: with c0 and first and second differences, as HuBERT's first iteration
    unique: bool = False  # consecutive equal semantic tokens are one, as in the paper, which forgets how long they last
    # Token transformers
    width: Count = 192  # width of the transformer
    depth: Count = 4  # blocks
    heads: Count = 4  # attention heads
    ff_mult: Positive = 2.0  # hidden width of the feed-forward, in widths
    position: Literal["rotary", "relative"] = "rotary"  # embedding of positions
    dropout: Share = 0.0  # in attention and feed-forward
    mask_past: Decay = 0.05  # share of the past that is hidden from a sample in training
    noise_past: Share = 0.0  # share of a stage's past behind a prompt, at most, that training takes from another sample
    layout: Literal["aligned", "delay", "flattened"] = "aligned"  # streams side by side, in a row, or in a row by codes
    frame_depth: Count = 1  # aligned: feed-forwards between a frame's codes, each of which is told those before it
    coarse_quantizers: Count = 6  # the coarse stage predicts the codes of the codec's first so many, fine the others'
    voice: bool = False  # coarse is told the voice that the tokenizer finds; hubert finds none
    given_drop: Share = 0.0  # probability of training without the tokens that a stage is given, each kind by itself
    given_weight: NonNegative = 0.0  # loss weight of the tokens that a stage is given, 0 to predict its own alone
    text: Literal["auto", "none", "prefix", "cross"] = "auto"  # how text conditions; auto: a prefix of semantic, if any
    text_embeds: bool = False  # texts are embeddings in NAME.npy beside the recordings, not transcripts
    max_text_len: Count = 24  # longer texts are cut, shorter ones padded
    text_vocabulary: Natural = 320  # most words with a token of their own; others are spelled by their bytes
    text_depth: Count = 2  # blocks of the text encoder, which is learned with the rest
    text_drop: Share = 0.1  # probability of training a sample without its text, for guidance
    # Optimization
    steps: Count = 1200  # optimizer steps
    batch_size: Count = 4  # samples a step, over all ranks
    chunk_size: Count = 2  # samples in one forward pass; part of what defines a run
    weight_decay: NonNegative = 0.0  # decoupled, on matrices only; 0 makes AdamW Adam
    betas: tuple[Decay, ...] = (0.8, 0.99)  # Adam's decays of the mean and of the square
    max_grad_norm: NonNegative = 5.0  # gradients are clipped to this norm, 0 for not at all
    ema_decay: Share = 0.99  # decay of the averaged weights, 0 for no averaging
    # Evaluation and saving; both happen at the first log line at or after they are due
    eval_every: Natural = 600  # steps between evaluations, 0 for none but the last
    eval_samples: Natural = 48  # most recordings an evaluation takes, 0 for all
    eval_seconds: Positive = 2.0  # length of the codec's crops in evaluation
    eval_sounds: Natural = 2  # recordings that an evaluation writes as WAV and PNG, 0 for none
    prompt_seconds: Positive = 1.0  # how much of them the continuations of coarse and fine are given
    temperature: NonNegative = 0.3  # of the codes drawn in evaluation, 0 for the most probable
    top_k: TopK = 0.2  # share of the codes that is drawn from, the most probable

    def __post_init__(self):
        super().__post_init__()
        if self.crop_samples:  # only seconds are kept, so that those of a command line win over a file's
            object.__setattr__(self, "seconds", self.crop_samples / self.sample_rate)
            object.__setattr__(self, "crop_samples", 0)
        if not self.strides:
            raise UserError("--strides: expected at least one")
        for name in ("seconds", "eval_seconds"):
            if round(getattr(self, name) * self.sample_rate) < math.prod(self.strides):
                raise UserError(f"--{name}: {getattr(self, name)}, shorter than a frame of {math.prod(self.strides)} "
                                f"samples at {self.sample_rate} Hz")
        if self.stage in ("all", "soundstream") and self.discriminate_after < 1 and \
                round(self.seconds * self.sample_rate) < 1.75 * self.stft_window:
            raise UserError(f"--seconds: {self.seconds}, too short for the discriminator of spectra, which takes 1.75 "
                            f"windows of --stft_window {self.stft_window} samples")
        if self.grouped_quantizers > self.quantizers:
            raise UserError(f"--grouped_quantizers: {self.grouped_quantizers}, but there are {self.quantizers}")
        if self.groups and not self.grouped_quantizers:
            raise UserError(f"--groups: {self.groups}, but --grouped_quantizers is 0")
        if self.grouped_quantizers and not self.groups and self.codec_width % 2:
            raise UserError(f"--groups: pairs of channels, by default, need an even number of them, not "
                            f"{self.codec_width}")
        with torch.device("meta"):
            try:
                quantizer_of(self)
            except ValueError as error:
                raise UserError(f"--codebook_size, --groups: {error}") from error
        if self.width % self.heads:
            raise UserError(f"--heads: width {self.width} must be a multiple of heads {self.heads}")
        if self.width // self.heads % 2:
            raise UserError(f"--heads: rotary positions need an even width a head, not {self.width // self.heads}")
        if self.stage not in ("soundstream", "semantic") and not self.coarse_quantizers < self.quantizers:
            raise UserError(f"--coarse_quantizers: {self.coarse_quantizers} is not within 1 and {self.quantizers - 1}, "
                            "one less than --quantizers")
        if self.layout == "aligned" and self.stage not in ("soundstream", "semantic") and (
                self.given_weight or (self.unique and self.stage != "fine")):
            raise UserError("--layout aligned: it predicts no tokens that are given (--given_weight), and needs tokens "
                            "that last (--unique false); for those there are --layout delay and --layout flattened")
        if self.stage not in ("all", "semantic") and self.tokenizer != type(self).tokenizer:
            raise UserError("--tokenizer: it belongs to the semantic run; train that, then give it with --semantic")
        if self.text_embeds and self.text in ("none", "auto"):
            raise UserError("--text_embeds: it needs --text prefix or --text cross")
        tracker.check(self)


# What is different by default for a stage, and named settings for all of it.
TRANSFORMER = dict(seconds=3.5, batch_size=16, chunk_size=8, optimizer="muon", lr=6e-3, weight_decay=0.01,
                   betas=(0.9, 0.99), max_grad_norm=1.0, eval_samples=160, ema_decay=0.995, eval_every=200)
STAGES = {
    "soundstream": dict(steps=1400),
    "semantic": dict(TRANSFORMER, steps=320),
    "coarse": dict(TRANSFORMER, seconds=2.5, steps=1000, mask_past=0.0, noise_past=0.6, given_drop=0.1, voice=True),
    "fine": dict(TRANSFORMER, seconds=0.9, steps=100),
}
PRESETS = {  # the codec of SoundStream §III at 24 kHz; transformers of AudioLM §IV-A
    "soundstream-24khz": dict(
        stage="soundstream", sample_rate=24_000, channels=32, residual_units=3, codec_width=512, codebook_size=1024,
        grouped_quantizers=0, codebook_decay=0.99, quantizer_dropout=1.0, least_quantizers=1, wave_channels=16,
        stft_channels=32, seconds=1.0, batch_size=64, chunk_size=16, lr=1e-4, betas=(0.5, 0.9), steps=1_000_000,
        cosine=False, warmup_steps=1_000, mel_weight=1.0, mel_floor=0.0, l1_weight=0.0, sdr_weight=0.0,
        commitment_weight=1.0, adversarial_weight=1.0, feature_weight=100.0, discriminate_after=0.0,
        discriminator_lr=1e-4, quantize_after=0, ema_decay=0.9999, validation=0.01, test=0.01, log_every=100,
        eval_every=10_000, save_every=2_000, workers=4),
    "audiolm": dict(
        sample_rate=24_000, width=1024, depth=12, heads=16, ff_mult=4.0, position="relative", dropout=0.1,
        clusters=1024, unique=True, layout="flattened", coarse_quantizers=4, voice=False, mask_past=0.15,
        noise_past=0.0, given_drop=0.0, seconds=10.0, batch_size=256, chunk_size=8, optimizer="adamw", lr=3e-4,
        warmup_steps=4_000, steps=1_000_000, betas=(0.9, 0.99), max_grad_norm=1.0, precision="bf16", ema_decay=0.9999,
        validation=0.01, test=0.01, log_every=100, eval_every=10_000, save_every=2_000, workers=4),
}

# What must not change when a run goes on; all else may.
SHARED = (*config.FIXED, "stage", "sample_rate", "seconds", "split_by")
FIXED_CODEC = (*SHARED, "channels", "strides", "residual_units", "codec_width", "quantizers", "codebook_size",
               "grouped_quantizers", "groups", "group_codebooks", "quantize_after", "wave_channels", "stft_channels",
               "stft_window")
FIXED_TOKENS = (*SHARED, "unique", "width", "depth", "heads", "ff_mult", "position", "layout", "frame_depth",
                "coarse_quantizers", "voice", "given_weight", "text", "text_embeds", "max_text_len", "text_vocabulary",
                "text_depth")

# Codec

class CausalConv(nn.Conv2d):
    """Convolution over time whose output depends on nothing later, (B, T, C) -> (B, ceil(T / stride), C').

    `memory`, a dict, holds what a stream of chunks must remember of its past; without one, the past is silence. Time
    is the width of a picture of height 1 with its channels last, which is what CPUs convolve fastest.
    """

    def __init__(self, width_in, width_out, kernel, stride=1, dilation=1):
        super().__init__(width_in, width_out, (1, kernel), (1, stride), dilation=(1, dilation))
        self.left = dilation * (kernel - 1) + 1 - stride

    def forward(self, x, memory=None):
        past = None if memory is None else memory.get(self)
        x = torch.cat([x.new_zeros(len(x), self.left, x.shape[2]) if past is None else past, x], dim=1)
        if memory is not None:
            memory[self] = x[:, x.shape[1] - self.left:]
        return super().forward(x[:, None].permute(0, 3, 1, 2)).permute(0, 2, 3, 1).squeeze(1)

    def pair_with(self, inverse, x):
        """Take the principal components of x (B, T, C), in blocks of the stride, and let `inverse` undo it.

        Times 0.8, as otherwise the energy that fewer and fewer numbers share would leave ELU's near-linear range.
        """
        width, narrow, taps = self.out_channels, self.in_channels, self.stride[1]
        if taps == narrow == 1:  # a wave: all taps, so that the channels differ
            taps = self.kernel_size[1]
            x = F.pad(x, (0, 0, taps - 1, 0)).unfold(1, taps, 1)
        blocks = x.reshape(-1, taps * narrow).double()  # each (taps, C)
        best = torch.linalg.eigh(blocks.T @ blocks).eigenvectors.flip(1)[:, :width].T.float()
        turned = torch.linalg.qr(torch.randn(width, width)).Q[:, :len(best)] @ best  # (C', taps * C)
        self.weight[..., 0, -taps:] = 0.8 * turned.unflatten(1, (taps, narrow)).transpose(1, 2)
        if isinstance(inverse, CausalUpsample):
            inverse.own.weight.copy_(turned.T / 0.8)
        else:
            inverse.weight[..., 0, -1] = turned.T[-narrow:] / 0.8


class CausalUpsample(nn.Module):
    """Transposed convolution, kernel twice the stride, cut to what does not need the future, (B, T, C) -> (B, T·s, C').

    As each output lies under two taps, it is a product of its own frame and one of the frame before.
    """

    def __init__(self, width_in, width_out, stride):
        super().__init__()
        self.width_out = width_out
        self.own, self.earlier = (nn.Linear(width_in, stride * width_out, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x, memory=None):
        past = None if memory is None else memory.get(self)
        before = torch.cat([torch.zeros_like(x[:, :1]) if past is None else past, x[:, :-1]], dim=1)
        if memory is not None:
            memory[self] = x[:, -1:]
        return (self.own(x) + self.earlier(before)).unflatten(2, (-1, self.width_out)).flatten(1, 2) + self.bias


class ELU(nn.ELU):
    """torch's, as a layer among those with a `memory`."""

    def forward(self, x, memory=None):
        return super().forward(x)


class ResidualUnit(nn.Module):
    """Dilated convolution of 7, then one of 1 (SoundStream, Fig. 3)."""

    def __init__(self, width, dilation):
        super().__init__()
        self.wide, self.narrow = CausalConv(width, width, 7, dilation=dilation), nn.Linear(width, width)

    def forward(self, x, memory=None):
        return x + self.narrow(F.elu(self.wide(F.elu(x), memory)))


def groups_of(cfg):
    """How many codes a frame has of each quantizer."""
    groups = cfg.groups or cfg.codec_width // 2
    return [groups if left <= cfg.grouped_quantizers else 1 for left in range(cfg.quantizers, 0, -1)]


def quantizer_of(cfg):
    """The quantizer of a codec; ValueError if its settings do not fit together."""
    return ResidualQuantizer(cfg.codec_width, cfg.quantizers, cfg.codebook_size, groups_of(cfg),
                             cfg.group_codebooks == "uniform", cfg.codebook_decay, cfg.dead_below,
                             cfg.quantizer_dropout, cfg.least_quantizers)


class SoundStream(nn.Module):
    """Waves -> codes -> waves (SoundStream §III). T samples make ceil(T / hop) frames of C codes, `ends[q]` up to q.

    Everything is causal at the grain of a frame: chunk by chunk, with a `memory`, gives what the whole would.
    """

    SCALE = 10.0  # of frames: layers work near 0, where ELU is near linear, but commitment is of variances near 1
    ROUND = 32  # frames, to a multiple of which sounds are lengthened: CPUs plan a convolution anew for every length

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.hop, self.rate = cfg, math.prod(cfg.strides), cfg.sample_rate
        self.codebook_size = cfg.codebook_size
        widths = [cfg.channels * 2 ** i for i in range(len(cfg.strides) + 1)]
        dilations = [3 ** i for i in range(cfg.residual_units)]
        encoder, decoder = [CausalConv(1, widths[0], 7)], []
        for narrow, wide, stride in zip(widths, widths[1:], cfg.strides):
            encoder += [*(ResidualUnit(narrow, d) for d in dilations), ELU(),
                        CausalConv(narrow, wide, 2 * stride, stride)]
            decoder = [ELU(), CausalUpsample(wide, narrow, stride), *(ResidualUnit(narrow, d) for d in dilations),
                       *decoder]
        self.encoder = nn.ModuleList([*encoder, ELU(), CausalConv(widths[-1], cfg.codec_width, 3)])
        self.decoder = nn.ModuleList([CausalConv(cfg.codec_width, widths[-1], 7), *decoder, ELU(),
                                      CausalConv(widths[0], 1, 7)])
        self.quantizer = quantizer_of(cfg)
        self.ends = self.quantizer.ends  # codes a frame of the first quantizer, of the first two, …

    @staticmethod
    def _through(layers, x, memory):
        for layer in layers:
            x = layer(x, memory)
        return x

    def latents(self, wave, memory=None):
        """Frames (B, ceil(T / hop), D) of waves (B, T)."""
        wave = F.pad(wave, (0, -wave.shape[1] % self.hop))
        return self.SCALE * self._through(self.encoder, wave[..., None], memory)

    def waves(self, latents, memory=None):
        """Waves (B, T·hop) of frames (B, T, D)."""
        return self._through(self.decoder, latents / self.SCALE, memory).squeeze(-1).float()

    def vectors(self):
        """What each code adds to a frame, (C, K, D')."""
        return self.quantizer.vectors()

    def forward(self, wave, count=None):
        """(reconstruction (B, T), codes (B, frames, C), commitment loss) of waves (B, T)."""
        quantized, codes, commitment = self.quantizer(self.latents(wave), count)
        return self.waves(quantized)[:, :wave.shape[1]], codes, commitment

    @torch.no_grad()
    def encode(self, wave, count=None, memory=None):
        """Codes (B, frames, C) of waves (B, T): those of the first `count` quantizers, or of all."""
        frames = -(-wave.shape[1] // self.hop)
        if memory is None:  # what follows changes nothing before it
            wave = F.pad(wave, (0, -wave.shape[1] % (self.ROUND * self.hop)))
        return self.quantizer.encode(self.latents(wave, memory)[:, :frames], count)

    @torch.no_grad()
    def decode(self, codes, memory=None):
        """Waves (B, frames·hop) of codes (B, frames, C), of any number of quantizers."""
        latents = self.quantizer.decode(codes)
        if memory is None:
            latents = F.pad(latents, (0, 0, 0, -latents.shape[1] % self.ROUND))
        return self.waves(latents, memory)[:, :codes.shape[1] * self.hop]


@torch.no_grad()
def initialize(codec):
    """Start as a linear transform coder, which passes low frequencies from the first step; returns the codec.

    Each of the encoder's convolutions takes the principal components of what it gets of low-pass noise, turned at
    random, and its counterpart in the decoder is the transpose. Latents are kept small, as ELU is near linear at 0;
    residual branches and taps on the past start near 0. Random weights stay silent for thousands of steps.
    """
    x = torch.fft.rfft(torch.randn(16, 64 * codec.hop))
    x = torch.fft.irfft(x / (1 + (torch.fft.rfftfreq(64 * codec.hop, 1 / codec.rate) / 500).square()))
    x = (0.1 / x.std() * x)[..., None]
    decoders = [layer for layer in codec.decoder if isinstance(layer, (CausalConv, CausalUpsample))]
    for name, parameter in [*codec.encoder.named_parameters(), *codec.decoder.named_parameters()]:
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            scale = 1.2 if "wide" in name else 0.05 if name.endswith("narrow.weight") else 0.1
            nn.init.normal_(parameter, std=scale / parameter[0].numel() ** 0.5)
    for layer in codec.encoder:
        if isinstance(layer, CausalConv):
            layer.pair_with(decoders.pop(), x)
        x = codec._through([layer], x, None)
    return codec


# Discriminators

class WaveDiscriminator(nn.Module):
    """Strided, grouped convolutions over a wave (MelGAN, Kumar et al. 2019, Table 1b; SoundStream §III-D)."""

    def __init__(self, channels, scale):
        super().__init__()
        self.scale, widths = scale, [channels * min(64, 4 ** i) for i in range(5)]
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList([nn.Conv1d(1, channels, 15, padding=7), *(
            nn.Conv1d(narrow, wide, 41, 4, 20, groups=max(1, narrow // 4)) for narrow, wide in pairs),
            nn.Conv1d(widths[-1], widths[-1], 5, padding=2)])
        self.out = nn.Conv1d(widths[-1], 1, 3, padding=1)

    def forward(self, wave):
        """Scores (B, T') of waves (B, T), higher for real ones, and the features of every layer."""
        x, features = wave[:, None], []
        if self.scale > 1:
            x = F.avg_pool1d(x, 2 * self.scale, self.scale, self.scale // 2, count_include_pad=False)
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.out(x)[:, 0], features


class ComplexConv2d(nn.Module):
    """Complex convolution as one real convolution over stacked real and imaginary parts, (B, 2C, H, W)."""

    def __init__(self, width_in, width_out, kernel, stride=1, padding=0):
        super().__init__()
        self.stride, self.padding = stride, padding
        fan_in = 2 * width_in * kernel[0] * kernel[1]
        self.real, self.imaginary = (nn.Parameter(torch.randn(width_out, width_in, *kernel) * fan_in ** -0.5)
                                     for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(2 * width_out))

    def forward(self, x):
        weight = torch.cat([torch.cat([self.real, -self.imaginary], 1), torch.cat([self.imaginary, self.real], 1)])
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class ModReLU(nn.Module):
    """ReLU of the magnitude plus a learned bias, the phase kept (Arjovsky et al. 2016, Eq. 8); x (B, 2C, H, W)."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        parts = x.unflatten(1, (2, -1))
        inverse = (parts.float().square().sum(1, keepdim=True) + 1e-12).rsqrt()  # in fp16 that would be inf, or 0
        return (parts * F.relu(1 + self.bias * inverse).to(x.dtype)).flatten(1, 2)


class STFTDiscriminator(nn.Module):
    """Complex residual units over the short-time Fourier transform (SoundStream §III-D, Fig. 4)."""

    MULTS, STRIDES = (1, 2, 4, 4, 8, 8), ((2, 1), (2, 2)) * 3  # strides over frequency, time

    def __init__(self, channels, window):
        super().__init__()
        self.window = window
        self.stem = ComplexConv2d(1, channels, (7, 7), padding=3)
        widths = [channels, *(channels * mult for mult in self.MULTS)]
        self.units = nn.ModuleList(nn.ModuleList([
            ComplexConv2d(narrow, narrow, (3, 3), padding=1), ModReLU(),
            ComplexConv2d(narrow, wide, (stride[0] + 2, stride[1] + 2), stride, 1),
            ComplexConv2d(narrow, wide, (1, 1), stride), ModReLU(),
        ]) for narrow, wide, stride in zip(widths, widths[1:], self.STRIDES))
        self.out = ComplexConv2d(widths[-1], 1, (window // 2 // 2 ** len(self.STRIDES), 1))
        self.register_buffer("hann", torch.hann_window(window), persistent=False)

    def forward(self, wave):
        """Scores (B, T') of waves (B, T), higher for real ones, and the features of every unit."""
        with torch.autocast(wave.device.type, enabled=False):
            x = torch.stft(wave.float(), self.window, self.window // 4, window=self.hann, return_complex=True)
            x = torch.view_as_real(x[:, :-1]).permute(0, 3, 1, 2)  # (B, 2, F, T), without the highest frequency
        x, features = self.stem(x), []
        features.append(x)
        for narrow, act, wide, skip, out in self.units:
            h = wide(act(narrow(x)))
            x = out(h + skip(x)[:, :, :h.shape[2], :h.shape[3]])
            features.append(x)
        return self.out(x)[:, 0].flatten(1), features  # the real part


class Discriminators(nn.Module):
    """Three of waves, at full, half and quarter rate, and one of spectra."""

    def __init__(self, cfg):
        super().__init__()
        self.each = nn.ModuleList([*(WaveDiscriminator(cfg.wave_channels, scale) for scale in (1, 2, 4)),
                                   STFTDiscriminator(cfg.stft_channels, cfg.stft_window)])

    def forward(self, real, fake, penalty_weight=0.0):
        """(their loss, adversarial loss, feature loss) for waves (B, T): what they learn from, and what `fake` does.

        Hinge losses (SoundStream Eq. 1, 2), L1 between features (Eq. 3), averaged over the discriminators; with a
        weight, beside their loss the squared norm of a sample's gradient at real waves (Mescheder et al. 2018, Eq. 9).
        """
        own, adversarial, feature = [], [], []
        real = real.detach().requires_grad_(penalty_weight > 0)
        for one in self.each:
            score, wanted = one(real)
            fake_score, found = one(fake)
            score, fake_score = score.float(), fake_score.float()
            own.append(F.relu(1 - score).mean() + F.relu(1 + fake_score).mean())
            if penalty_weight:
                gradient, = torch.autograd.grad(score.sum(), real, create_graph=True)
                own[-1] = own[-1] + penalty_weight * gradient.square().sum(1).mean()
            adversarial.append(F.relu(1 - fake_score).mean())
            feature.append(torch.stack([(f.float() - w.detach().float()).abs().mean()
                                        for f, w in zip(found, wanted)]).mean())
        return tuple(torch.stack(values).mean() for values in (own, adversarial, feature))


# Token transformers

class Stream(NamedTuple):
    """A kind of tokens: frames of Q codes below K. A model of several predicts each after all those before it."""
    name: str
    codes: int
    size: int
    rate: float  # frames a second; 0: one frame for all times
    width: int = 0  # of the vectors that a codec's codes stand for; tokens of other kinds have none

    def own(self, codes):
        """Its part of what there is for each code of a codec's frame, (C, …): coarse has the first, fine the last."""
        return codes[:self.codes] if self.name == "coarse" else codes[-self.codes:]


AHEAD = 4  # frames of the earlier streams that the last one knows before its first, where they are aligned


def step_of(frame, quantizer, quantizers, layout):
    """Step of a stream's part of the sequence that predicts the code (frame, quantizer).

    Flattened: a code a step (AudioLM §III-C). Else a frame a step; delay: quantizer q is q steps late (MusicGen §2.1).
    """
    if layout == "flattened":
        return frame * quantizers + quantizer
    return frame + quantizer * (layout == "delay")


def lay_out(streams, codes, lengths, ended, layout):
    """Lay streams out, one after the other and without gaps, so that plain causal attention is all it takes.

    streams: S of `Stream`; codes: S of (B, T_s, Q_s); lengths: S of (B,) frames; ended (B,): whether the last stream's
    last frame is the end of its recording. A stream begins with a start token of its own; step i + 1 takes in the codes
    that step i predicts. Behind the true end comes the class `size`, EOS, in place of the first quantizer's code. A
    stream without frames is one that is not told.

    Returns inputs (B, N, J), rows of the embedding table, 0 for none; for each stream, targets (B, T_s + 1, Q_s), -100
    for none, and the steps (B, T_s + 1, Q_s) that predict them; and where each stream begins, (B,), and the last ends.
    """
    if layout == "aligned" and len(streams) > 1:
        return align(streams, codes, lengths, ended)
    batch, begins, predicted, row = len(ended), [torch.zeros(len(ended), dtype=torch.long)], [], 1
    for stream, length in zip(streams, lengths):
        begins.append(begins[-1] + step_of(length - 1, stream.codes - 1, stream.codes, layout) + 2)
    total, several = int(begins[-1].max()), layout != "flattened"
    width = max(stream.codes for stream in streams) if several else 1
    inputs, samples = torch.zeros(batch, total + 1, width, dtype=torch.long), torch.arange(batch)
    for stream, code, length, begin in zip(streams, codes, lengths, begins):
        frame = torch.arange(code.shape[1] + 1)[:, None]  # (T + 1, 1)
        quantizer = torch.arange(stream.codes)
        step = begin[:, None, None] + step_of(frame, quantizer, stream.codes, layout)  # (B, T + 1, Q)
        code, real = F.pad(code, (0, 0, 0, 1)), (frame < length[:, None, None]).expand_as(step)
        inputs[samples, begin, 0] = row
        at = torch.where(real, step + 1, total)  # what is not there goes to a column that is cut off
        inputs[samples[:, None, None], at, (quantizer * several).expand_as(at)] = \
            row + 1 + quantizer * stream.size + code
        eos = (frame == length[:, None, None]) & (quantizer == 0) & (ended & (length > 0))[:, None, None]
        target = torch.where(real, code, torch.where(eos, stream.size, -100))
        predicted.append((target, torch.where(target >= 0, step, 0)))
        row += 1 + stream.codes * stream.size
    return inputs[:, :total], predicted, begins


def align(streams, codes, lengths, ended):
    """`lay_out`, but side by side: a step takes in a frame of each stream (Moshi, Défossez et al. 2024, §3.4).

    Those of the earlier streams are AHEAD later in time. The sequence is short, but tokens must have times, and only
    the last stream is predicted. Inputs have its columns first, then those of the others.
    """
    *given, last = streams
    own, ((target, step),), (begin, end) = lay_out([last], codes[-1:], lengths[-1:], ended, "aligned")
    total, columns, predicted, row = own.shape[1] + AHEAD, [], [], 1
    for stream, code, length in zip(given, codes, lengths):
        now = (torch.arange(total) * stream.rate / last.rate).long()  # its frame that each step takes in
        code = F.pad(code, (0, 0, 0, 1))[:, now.clamp(max=code.shape[1])]
        rows = row + 1 + torch.arange(stream.codes) * stream.size + code
        columns.append(torch.where((now < length[:, None])[..., None], rows, 0))
        predicted.append((torch.full_like(rows[:, :1], -100), torch.zeros_like(rows[:, :1])))
        row += 1 + stream.codes * stream.size
    inputs = torch.cat([F.pad(torch.where(own > 0, own + row - 1, 0), (0, 0, AHEAD, 0)), *columns], dim=2)
    predicted.append((target, torch.where(target >= 0, step + AHEAD, 0)))
    return inputs, predicted, [begin] * len(given) + [begin + AHEAD, end + AHEAD]


class TextEncoder(nn.Module):
    """Texts -> tokens (B, L, W): a small transformer over words, learned with the rest, or a projection."""

    def __init__(self, cfg, vocabulary, embed_width):
        super().__init__()
        width = cfg.width
        if embed_width:
            self.embed = nn.Linear(embed_width, width)
            self.padding_tokens = nn.Parameter(torch.randn(cfg.max_text_len, width) * 0.02)
        else:
            self.embed = nn.Embedding(vocabulary, width)
            self.transformer = Transformer(width, cfg.text_depth, cfg.heads, causal=False, ff_mult=cfg.ff_mult)

    def forward(self, text):
        """text: words (B, L), 0 being padding, or embeddings (B, L, E), zero rows being padding."""
        if text.ndim == 2:
            return self.transformer(self.embed(text))
        x = self.embed(text)
        return torch.where((text != 0).any(-1, keepdim=True), x, self.padding_tokens.to(x.dtype))


class WithinFrame(nn.Module):
    """Predicts the codes of a frame one after the other, from what the transformer makes of the frames before it.

    As RQ-Transformer (Lee et al. 2022, §3.2.2), with feed-forwards: each is told the sum of the embeddings of those
    before it, and, by a linear map, of the vectors that they stand for: what is known of the frame. What is learned of
    one code so holds for those that sound like it.
    """

    def __init__(self, stream, width, depth, dropout):
        super().__init__()
        self.size, self.embed = stream.size, nn.Embedding((stream.codes - 1) * stream.size, width)
        nn.init.normal_(self.embed.weight, std=0.5 * width ** -0.5)
        self.enter = nn.Linear(stream.width, width, bias=False) if stream.width else None
        self.register_buffer("vectors", torch.zeros(self.embed.num_embeddings, stream.width), persistent=False)
        if self.enter:
            nn.init.normal_(self.enter.weight, std=0.5 * stream.width ** -0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(depth + 1))
        self.layers = nn.ModuleList(FeedForward(width, 1, dropout=dropout) for _ in range(depth))
        for layer in self.layers:
            nn.init.zeros_(layer.down.weight)

    def forward(self, x):
        """Outputs (…, W) of a frame's x (…, W) to which the `told` codes are added."""
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.norms[-1](x)

    def stand_for(self, vectors):
        """Let the codes stand for `vectors` (Q, K, D), the codec's, which are not saved here."""
        self.vectors.copy_((vectors / vectors[0].std())[:-1].flatten(0, 1))

    def tell(self, rows):
        """What (…, W) each code tells those after it; rows: code k of quantizer q is q·K + k."""
        x = self.embed(rows)
        return x + self.enter(F.embedding(rows, self.vectors)) if self.enter else x

    def told(self, codes):
        """Sums (…, Q, W) of what those before each of `codes` (…, Q) tell; what is none counts as any."""
        codes = codes[..., :-1].clamp(0, self.size - 1)
        rows = codes + torch.arange(codes.shape[-1], device=codes.device) * self.size
        return F.pad(self.tell(rows).cumsum(-2), (0, 0, 1, 0))


class TokenTransformer(nn.Module):
    """A causal transformer over streams of tokens (AudioLM §III-C): semantic, coarse and fine are all made of it.

    Each code of a frame has embeddings of its own, and a head of its own over its values and EOS.
    """

    def __init__(self, cfg, streams, vocabulary=0, embed_width=0):
        super().__init__()
        self.cfg, self.streams, width = cfg, streams, cfg.width
        # rows of the table, as lay_out counts them
        self.starts = list(itertools.accumulate([1, *(1 + s.codes * s.size for s in streams)]))
        self.embed = nn.Embedding(self.starts[-1], width, padding_idx=0)
        nn.init.normal_(self.embed.weight[1:], std=width ** -0.5 if cfg.layout == "flattened" else 0.5 * width ** -0.5)
        self.heads = nn.ParameterList(
            nn.Parameter(torch.randn(s.codes, s.size + 1, width) * width ** -0.5 * 0.5)
            if s is streams[-1] or cfg.given_weight else None for s in streams)
        self.prompted = nn.Parameter(torch.zeros(width))  # added to what the steps of a prompt take in
        whole = cfg.layout == "aligned" and streams[-1].codes > 1  # a step predicts the codes of a frame
        self.within = WithinFrame(streams[-1], width, cfg.frame_depth, cfg.dropout) if whole else None
        steps = [s.rate * (s.codes if cfg.layout == "flattened" else 1) for s in streams]  # a second
        self.register_buffer("pace", torch.tensor([steps[-1] / (own or steps[-1]) for own in steps]), persistent=False)
        self.register_buffer("begin_rows", torch.tensor(self.starts[:-1]), persistent=False)
        crossed = cfg.text == "cross"
        self.transformer = Transformer(width, cfg.depth, cfg.heads, rotary=cfg.position == "rotary",
                                       dropout=cfg.dropout, ff_mult=cfg.ff_mult,
                                       context_width=width if crossed else None)
        self.bias = nn.Embedding(32, cfg.heads) if cfg.position == "relative" else None
        self.timed = cfg.position == "rotary" and cfg.layout != "aligned"  # positions are not those in the sequence
        if cfg.text != "none":
            self.text = TextEncoder(cfg, vocabulary, embed_width)
            self.null_text_tokens = nn.Parameter(torch.randn(cfg.max_text_len, width) * 0.02)

    def stand_for(self, vectors):
        """Let the last stream's codes stand for the codec's `vectors` (C, K, D)."""
        stream = self.streams[-1]
        if self.within and stream.width:  # runs of before there was a width know of none
            self.within.stand_for(stream.own(vectors))

    def condition(self, text, drop):
        """Tokens (B, L, W) of texts, of "no text" where `drop` (B,) is true or if it is None; None without."""
        if self.cfg.text == "none":
            return None
        if text is None:
            return self.null_text_tokens.expand(len(drop), -1, -1)
        tokens = self.text(text)
        return torch.where(drop[:, None, None], self.null_text_tokens.to(tokens.dtype), tokens)

    def relative(self, distance):
        """Bias (heads, …) for keys `distance` tokens back: 16 buckets of one, 16 up to 1,024 (T5, Raffel 2020)."""
        far = 16 + (distance.clamp(min=16).float() / 16).log() * (16 / math.log(64))
        bucket = torch.where(distance < 16, distance.clamp(min=0), far.long().clamp(max=31))
        return self.bias(bucket).movedim(-1, 0)

    def mask(self, batch, size, prefix, device):
        """What attends to what: None (causal), True where it does, or, with relative positions, a bias.

        In training a share of the past is hidden from a sample (forgetful causal masking, Liu et al. 2022), never the
        text and never a token from itself.
        """
        hidden, place = self.cfg.mask_past if self.training else 0.0, torch.arange(size, device=device)
        if not hidden and self.bias is None:
            return None
        distance = place[:, None] - place
        seen = (distance >= 0)[None, None]
        if hidden:
            kept = (torch.rand(batch, 1, 1, size, device=device) >= hidden) | (place < prefix)
            seen = seen & (kept | (distance == 0))
        return seen if self.bias is None else self.relative(distance)[None].masked_fill(~seen, -torch.inf)

    def own(self, inputs):
        """Which of the inputs (B, N, J) are codes of the last stream."""
        return inputs > self.starts[-2]

    def noisy(self, inputs):
        """(inputs (B, N, J) as training has them, which steps (B, N) are a prompt).

        What a model has said itself is not quite in the voice of its prompt and, where trusted, leads further away. So
        the first of a sample's steps, any share of them, in a fifth of the samples none, are marked as a prompt, and of
        those behind it a share, another for each sample, takes in frames of another sample (or time, if it is alone).
        """
        codes = self.own(inputs)
        own = codes.any(-1)
        if not (self.cfg.noise_past and self.training):
            return inputs, torch.zeros_like(own)
        place, count, draws = own.cumsum(1) - 1, own.sum(1), torch.rand(len(inputs), 2, 1, device=inputs.device)
        prompt = own & (place < (1.25 * draws[:, 0] - 0.25) * count[:, None])
        shift = self.streams[-1].codes * torch.randint(inputs.shape[1], (), device=inputs.device)
        there = (place + shift) % count.roll(1)[:, None].clamp(min=1) + own.int().argmax(1).roll(1)[:, None]
        other = inputs.roll(1, 0).gather(1, there[..., None].expand_as(inputs))
        chosen = (torch.rand(own.shape, device=inputs.device) < self.cfg.noise_past * draws[:, 1]) & ~prompt
        return torch.where(chosen[..., None] & codes & self.own(other), other, inputs), prompt

    def positions(self, inputs, prefix):
        """Positions (B, prefix + N) for the rotary table: the time since a stream began, in steps of the last stream.

        What sounds at the same time is thus near each other, however long the streams are. The text comes before 0.
        """
        begin = torch.isin(inputs[..., 0], self.begin_rows)  # (B, N)
        place = torch.arange(inputs.shape[1], device=inputs.device)
        time = (place - torch.where(begin, place, 0).cummax(1).values) * self.pace[begin.cumsum(1) - 1]
        return F.pad(time, (prefix, 0)) + F.pad(torch.arange(-prefix, 0, device=inputs.device), (0, len(place)))

    def run(self, inputs, prompt, condition, cache=False):
        """Outputs (B, N, W) at the inputs (B, N, J), given what `condition` gives; with `cache`, keys and values, too.

        prompt: which steps (B, N) are one. The text, as a prefix, comes first in the cache.
        """
        x, prefix = self.embed(inputs).sum(2) + prompt[..., None] * self.prompted, 0
        if condition is not None and self.cfg.text == "prefix":
            x, prefix = torch.cat([condition.to(x.dtype), x], dim=1), condition.shape[1]
        context = self.transformer.contexts(condition) if self.cfg.text == "cross" else None
        mask = self.mask(len(x), x.shape[1], prefix, x.device)
        positions = self.positions(inputs, prefix) if self.timed else None
        x, made = self.transformer(x, mask, positions, return_cache=True, context=context)
        return (x[:, prefix:], made, context) if cache else x[:, prefix:]

    def logits(self, x, stream):
        """Scores (…, Q, K + 1) of the codes of a stream, and of EOS, from x (…, Q, W)."""
        return torch.einsum("...qw,qkw->...qk", x, self.heads[stream].to(x.dtype))

    def forward(self, inputs, predicted, text=None, drop=None):
        """(cross-entropy summed, number, number of right guesses) a sample, each (B, S) over the S streams."""
        x = self.run(*self.noisy(inputs), self.condition(text, drop))
        samples, result = torch.arange(len(x), device=x.device)[:, None, None], []
        for i, (target, step) in enumerate(predicted):
            if self.heads[i] is None:
                result.append(torch.zeros(3, len(x), device=x.device))
                continue
            h = self.within(x[samples, step[..., :1]] + self.within.told(target)) if self.within else x[samples, step]
            logits = self.logits(h, i).float()  # (B, T + 1, Q, K + 1)
            loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), ignore_index=-100, reduction="none")
            result.append(torch.stack([part.unflatten(0, target.shape).sum((1, 2)) for part in (
                loss, (target >= 0).flatten().float(), (logits.detach().argmax(-1) == target).flatten().float())]))
        return torch.stack(result, dim=-1).unbind(0)


# Generation

@torch.no_grad()
def generate(model, codes, lengths, frames, seeds, text=None, temperature=1.0, top_k=1.0, guidance_scale=1.0,
             rival_scales=(), ends=True):
    """Go on with the last of the streams for up to `frames` frames, or to EOS if it `ends`.

    codes, lengths: of all streams, as `lay_out` takes them; of the last stream, what there is already. seeds: a number
    a sample, which alone decides it. Codes are drawn from the most probable share `top_k` at the `temperature`, 0 for
    the first alone. Guidance: by its scale, scores are moved away from those without the text; likewise, but for how
    likely EOS is, from those of rivals: codes and lengths go on with the same samples as each of them has heard them.
    Returns B of (T, Q), what there was included, and for each whether it came to its end; at least one frame.
    """
    cfg, stream, device, batch = model.cfg, model.streams[-1], model.embed.weight.device, len(seeds)
    Q, K, several = stream.codes, stream.size, cfg.layout != "flattened"
    guided, known = guidance_scale != 1 and text is not None, len(lengths[-1])  # rows below that one know the text
    assert known == batch * (1 + len(rival_scales)), (known, batch, rival_scales)
    scales = [*rival_scales, *[guidance_scale] * guided]
    order = torch.cat([torch.arange(known), torch.arange(batch * guided)])
    codes, lengths = ([part[order] for part in parts] for parts in (codes, lengths))
    begun, rows = lengths[-1], torch.arange(len(order), device=device)
    out = torch.zeros(len(rows), int(begun.max()) + frames, Q, dtype=torch.long)
    out[:, :codes[-1].shape[1]] = codes[-1][:, :out.shape[1]]
    inputs, _, begins = lay_out(model.streams, [*codes[:-1], out], [*lengths[:-1], begun + frames],
                                torch.zeros(len(rows), dtype=torch.bool), cfg.layout)
    position = step_of(begun, 0, Q, cfg.layout)  # in the stream, of the first step that predicts something new
    place = begins[-2] + position
    given = inputs[..., Q if cfg.layout == "aligned" else inputs.shape[2]:].to(device)  # what is known of later steps
    inputs = inputs[:, :int(place.max()) + 1].to(device)  # no step up to its own `place` takes in what is not there yet

    if text is not None:
        text = text.to(device).repeat(1 + len(scales), *[1] * (text.ndim - 1))
    x, cache, context = model.run(inputs, model.own(inputs).any(-1), model.condition(text, rows >= known), cache=True)
    place, position = place.to(device), position.to(device)
    x, prefix = x[rows, place], cache[0][0].shape[2] - inputs.shape[1]
    steps = step_of(frames - 1, Q - 1, Q, cfg.layout) + 1
    memory = Memory(cache, place + prefix + 1, prefix + inputs.shape[1] + steps)

    uniform = torch.stack([torch.rand(frames, Q, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    uniform = uniform.to(device)
    out, begun = out.to(device), begun.to(device)
    end = torch.full((batch,), frames, device=device)  # behind what there was
    first = model.starts[-2] + 1
    for i in range(steps):
        # The codes of this step, quantizer q of frame t behind what there was: all at once, or each told those before.
        pairs = [(i - q * (cfg.layout == "delay"), q) for q in range(Q)] if several else [(i // Q, i % Q)]
        new = [(t, q) for t, q in pairs if 0 <= t < frames]
        for part in [[pair] for pair in new] if model.within else [new]:
            quantizers = slice(part[0][1], part[-1][1] + 1)
            heads = model.heads[-1][quantizers].flatten(0, 1).to(x.dtype)
            scores = F.linear(model.within(x) if model.within else x, heads).unflatten(1, (-1, K + 1)).float()
            own, *others = scores.split(batch)
            away = [(scale - 1) * (own - other) for scale, other in zip(scales, others)]
            if rival_scales:  # whether it ends is for the one that knows most to say
                led = (own + sum(away[:len(rival_scales)]))[..., :K].log_softmax(-1)
                own = torch.cat([led + own[..., :K].logsumexp(-1, keepdim=True), own[..., K:]], dim=-1)
            scores = own + sum(away[len(rival_scales):])
            may_end = ends and part[0][1] == 0  # only the first quantizer's code can be EOS
            scores[:, int(may_end):, K] = -torch.inf
            if may_end and i == 0:
                scores[:, 0, K].masked_fill_(begun[:batch] == 0, -torch.inf)  # no recording is empty
            drawn = draw(scores, torch.stack([uniform[:, t, q] for t, q in part], 1), temperature, top_k)
            if may_end:
                end = torch.where((drawn[:, 0] == K) & (end == frames), part[0][0], end)
            drawn = drawn.clamp(max=K - 1).repeat(1 + len(scales), 1)
            for j, (t, q) in enumerate(part):
                out[rows, begun + t, q] = drawn[:, j]
            if model.within and part[0][1] < Q - 1:
                x = x + model.within.tell(part[0][1] * K + drawn[:, 0])
        if i == steps - 1 or (ends and i % 8 == 7 and bool((end <= new[-1][0]).all())):  # none before is still open
            break
        taken = [(begun + t, q) for t, q in pairs if t < frames]
        row = torch.stack([torch.where(t >= 0, first + q * K + out[rows, t.clamp(min=0), q], 0) for t, q in taken], 1)
        x = model.embed(torch.cat([row, given[rows, place + i + 1]], 1)).sum(1)
        bias = None
        if model.bias is not None:
            places = torch.arange(memory.top + 1, device=device)
            bias = model.relative(memory.length[:, None] - places).transpose(0, 1)[:, :, None]
        x = model.transformer.step(x, memory, bias, context, position + i + 1 if model.timed else None)
    return [out[b, :begun[b] + end[b]] for b in range(batch)], (end < frames).tolist()


def draw(scores, uniform, temperature, top_k):
    """Codes (B, Q) from scores (B, Q, K), by inverting the cumulative distribution at `uniform` (B, Q)."""
    if temperature == 0:
        return scores.argmax(-1)
    best, codes = scores.topk(max(1, math.ceil(top_k * scores.shape[-1])), dim=-1)
    shares = (best / temperature).softmax(-1).cumsum(-1)
    chosen = (shares < uniform[..., None] * shares[..., -1:]).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    return codes.gather(-1, chosen)[..., 0]


# Generation by all stages

class Drawing(NamedTuple):
    """How codes are drawn."""
    temperature: float = 1.0
    top_k: float = 1.0
    guidance_scale: float = 1.0
    prompt_scale: float = 1.0
    given_scale: float = 1.0


def go_on(model, window, given, tokens, goals, seeds, drawing, text=None, ends=True):
    """Go on with the last stream of B samples, up to `goals` frames each or EOS if it `ends`, in windows of training.

    tokens: B of (T_b, Q), what there is. given(b, past): the earlier streams of sample b, for a window that begins
    after `past` (T, Q). When a window is full, its later half is what the next one begins with. Guidance away from what
    a sample would be without its prompt, and, in a model that was trained so, without the stream before the last.
    Returns B of (T_b, Q) and whether each came to its end.
    """
    tokens, over = [one.cpu() for one in tokens], [False] * len(tokens)
    for part in itertools.count():
        todo = [b for b, one in enumerate(tokens) if not over[b] and len(one) < goals[b]]
        if not todo:
            return tokens, over
        begins = [len(tokens[b]) - window // 2 if len(tokens[b]) >= window else 0 for b in todo]
        rooms = [min(window - len(tokens[b]) + begin, goals[b] - len(tokens[b])) for b, begin in zip(todo, begins)]
        samples, scales = [[*given(b, tokens[b][:begin]), tokens[b][begin:]] for b, begin in zip(todo, begins)], []
        if drawing.given_scale != 1 and model.cfg.given_drop and len(model.streams) > 1:
            samples += [[*others, last[:0], own] for *others, last, own in samples]
            scales.append(drawing.given_scale)
        if drawing.prompt_scale != 1 and any(len(tokens[b]) for b in todo):
            samples += [[*given(b, tokens[b]), tokens[b][:0]] for b in todo]
            scales.append(drawing.prompt_scale)
        codes, lengths = zip(*(pad(column) for column in zip(*samples)))
        made, ended = generate(
            model, codes, lengths, max(rooms), [accumulate.number(seeds[b], part) for b in todo],
            None if text is None else text[todo], drawing.temperature, drawing.top_k, drawing.guidance_scale, scales,
            ends)
        for b, begin, room, one, end in zip(todo, begins, rooms, made, ended):
            fresh = one.cpu()[len(tokens[b]) - begin:]
            over[b] = end and len(fresh) < room
            tokens[b] = torch.cat([tokens[b], fresh[:room]])


class Stack:
    """The stages together: codec, semantic tokenizer and three transformers, as text or a prompt goes through them."""

    def __init__(self, run, device, weights="ema"):
        """run: the folder of the runs, RUN/soundstream and so on."""
        self.device, self.models, self.facts, self.cfgs = device, {}, {}, {}
        for stage in ("semantic", "coarse", "fine"):
            self.cfgs[stage], self.models[stage], self.facts[stage] = load_transformer(Path(run) / stage, stage, device,
                                                                                       weights)
        cfg, self.told = self.cfgs["coarse"], self.models["coarse"].streams[0].name == "voice"
        self.codec = load_soundstream(cfg.soundstream, device)
        self.tokenizer = load_tokenizer(model_file(cfg.semantic, "semantic", TOKENIZER), device)
        for stage, name, thing in (("semantic", "tokenizer", self.tokenizer), ("coarse", "tokenizer", self.tokenizer),
                                   ("coarse", "codec", self.codec), ("fine", "codec", self.codec)):
            if self.facts[stage]["made_of"][name] != thing.checksum:
                raise UserError(f"{Path(run) / stage}: it was trained on the tokens of another {name} than "
                                f"{cfg.soundstream if name == 'codec' else cfg.semantic}; train it anew")
            if name == "codec":
                self.models[stage].stand_for(self.codec.vectors())
        for stage, name in (("semantic", "unique"), ("fine", "coarse_quantizers")):
            here, there = getattr(cfg, name), getattr(self.cfgs[stage], name)
            if here != there:
                raise UserError(f"{Path(run) / stage}: it was trained with --{name} {there}, and coarse with {here}; "
                                "train one of them anew")

    def text(self, stage, texts, embeds=None):
        """What the model of a stage takes of B texts or of their embeddings (L, E), or None if it takes neither."""
        cfg, facts = self.cfgs[stage], self.facts[stage]
        given = embeds if cfg.text_embeds else texts
        if cfg.text == "none" or given is None:
            return None
        tokens = TextTokens(cfg, facts["vocabulary"], facts["embed_width"])
        return tokens.embeds(given) if cfg.text_embeds else tokens.tokens(given)

    def heard(self, waves):
        """Semantic tokens (T, 1), codes (T, Q) and voice (1, 1) of each of the waves (T,), at the codec's rate."""
        said = [self.tokenizer.encode(wave, self.codec.rate) for wave in waves]
        tokens, voices = [tokens for tokens, _ in said], [torch.tensor([[voice]]) for _, voice in said]
        if self.cfgs["semantic"].unique:
            tokens = [semantic.unique(one)[0] for one in tokens]
        with torch.inference_mode():
            codes = [self.codec.encode(wave[None].to(self.device))[0].cpu() for wave in waves]
        return [torch.from_numpy(one)[:, None] for one in tokens], codes, voices

    def silence(self, seeds):
        """What goes before sounds without a prompt: a voice drawn, or none for texts of coarse, which may name one.

        None only if coarse has been trained without it, too (--given_drop).
        """
        cfg = self.cfgs["coarse"]
        nothing = torch.zeros(0, 1, dtype=torch.long)
        voices = [nothing] * len(seeds)
        if self.told and not (cfg.given_drop and cfg.text != "none"):
            shares = torch.tensor(self.facts["coarse"]["voices"]).float()
            draws = [torch.Generator().manual_seed(accumulate.number(seed, "voice")) for seed in seeds]
            voices = [torch.multinomial(shares, 1, generator=draw)[None] for draw in draws]
        return [(nothing, nothing.expand(-1, self.codec.ends[-1]), voice) for voice in voices]

    def speak(self, prompts, seconds, seeds, drawings, texts=None, embeds=None, fine=True):
        """Codes of B sounds, each (T, Q): the prompts' own, and `seconds` after them.

        prompts: (semantic (T, 1), codes (T, Q), voice (1, 1), or (0, 1) if it is not known) of each. drawings: {stage:
        Drawing}. texts, embeds: as `text` takes them. Not `fine`: of the coarse quantizers alone.
        """
        cfgs, models = self.cfgs, self.models
        meant, begun, voices = ([prompt[part] for prompt in prompts] for part in range(3))
        width = self.codec.ends[cfgs["coarse"].coarse_quantizers - 1]
        window = {stage: facts["window"] for stage, facts in self.facts.items()}
        rate = window["semantic"] / cfgs["semantic"].seconds if cfgs["semantic"].unique else FRAME_RATE
        meaning, _ = go_on(models["semantic"], window["semantic"], lambda b, past: [], meant,
                           [len(one) + math.ceil(seconds * rate) for one in meant],
                           [accumulate.number(seed, "semantic") for seed in seeds], drawings["semantic"],
                           self.text("semantic", texts, embeds))
        spoken = [codes[:, :width] for codes in begun]
        goals = [len(codes) + max(1, round(seconds * self.codec.rate / self.codec.hop)) for codes in spoken]

        def behind(b, past):
            """Voice and semantic tokens of b after the frames `past`; without times, those in these are heard."""
            said = round(len(past) * self.codec.hop / self.codec.rate * FRAME_RATE)
            if len(past) and cfgs["coarse"].unique:
                said = len(self.heard([self.wave(past)])[0][0])
            return [*[voices[b]] * self.told, meaning[b][min(len(meaning[b]) - 1, said):]]
        coarse, _ = go_on(models["coarse"], window["coarse"], behind, spoken, goals,
                          [accumulate.number(seed, "coarse") for seed in seeds], drawings["coarse"],
                          self.text("coarse", texts, embeds))
        if not fine:
            return coarse
        rest, _ = go_on(models["fine"], window["fine"], lambda b, past: [coarse[b][len(past):][:window["fine"]]],
                        [codes[:, width:] for codes in begun], [len(codes) for codes in coarse],
                        [accumulate.number(seed, "fine") for seed in seeds], drawings["fine"],
                        self.text("fine", texts, embeds), ends=False)
        return [torch.cat(pair, dim=1) for pair in zip(coarse, rest)]

    def wave(self, codes):
        """The wave (T,) of codes (T, Q), on the CPU."""
        with torch.inference_mode():
            return self.codec.decode(codes[None].to(self.device))[0].cpu()


# Losses of the codec

def reconstruction_loss(cfg, fake, real, commitment):
    """What the codec learns from besides the discriminators, for waves (B, T), in fp32."""
    with torch.autocast(real.device.type, enabled=False):
        fake, loss = fake.float(), cfg.commitment_weight * commitment.float()
        if cfg.mel_weight:
            loss = loss + cfg.mel_weight * audio.spectral_loss(fake, real, cfg.sample_rate, cfg.mel_floor).mean()
        if cfg.pre_emphasis:
            fake, real = (x[:, 1:] - cfg.pre_emphasis * x[:, :-1] for x in (fake, real))
        if cfg.l1_weight:
            loss = loss + cfg.l1_weight * (fake - real).abs().mean()
        if cfg.sdr_weight:
            noise, power = ((x.square().mean(1) + 1e-6) for x in (fake - real, real))  # silence is not all that counts
            loss = loss + cfg.sdr_weight * 10 * (noise / power).log10().mean()
        return loss


# Training

class CodecTask:
    """Training and evaluation of the codec."""

    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.recordings = open_sources(cfg, cfg.seconds)[0]
        heard, *val_heard = open_sources(cfg, cfg.eval_seconds)
        self.parts = data.parts(heard, cfg, *val_heard)
        self.training = self.recordings, self.parts["train"][1]
        accumulate.seed(cfg.seed, "weights")
        self.model = SoundStream(cfg)
        self.model.load_state_dict(dist.on_main(lambda: initialize(self.model).state_dict()))  # others round otherwise
        modules, self.discriminators = {"model": self.model.to(device)}, None
        self.optimizers = optim.make(self.model, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
        self.discriminator_optimizers = []
        if cfg.discriminate_after < 1:
            accumulate.seed(cfg.seed, "discriminators")  # anew, as rank 0 alone has drawn in `initialize`
            self.discriminators = modules["discriminators"] = Discriminators(cfg).to(device)
            self.discriminator_optimizers = optim.make(self.discriminators, "adamw", cfg.discriminator_lr, 0.0,
                                                       cfg.betas, cfg.eps)
        average = ema.EMA(self.model, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
        facts = {"kind": "soundstream", "metadata": tracker.metadata(cfg)}
        self.state = checkpoint.State(
            cfg, modules, average, [*self.optimizers, *self.discriminator_optimizers],
            amp.scaler(device, cfg.precision), {**identity(cfg, self.recordings), "discriminators": len(modules) > 1},
            facts)

    def wrap(self):
        """Wrap the models for the ranks."""
        self.wrapped = dist.wrap(self.model, self.device)
        self.wrapped_discriminators = self.discriminators and dist.wrap(self.discriminators, self.device)

    def update(self, plan, chunks):
        """A step on this rank's `chunks`: (loss summed over its samples, gradient norm, learning rate, whether taken).

        The discriminators learn from a reconstruction cut off from the codec, and the codec gets from them a gradient
        at that reconstruction alone: neither's backward pass goes through the other, and the two share a forward pass.
        """
        cfg, state, step_loss = self.cfg, self.state, torch.zeros((), device=self.device)
        if state.step == cfg.quantize_after and not self.model.quantizer.ready:
            self.make_codebooks()
        begin = math.ceil(cfg.discriminate_after * cfg.steps)  # the first step with discriminators
        adversarial = self.discriminators is not None and state.step >= begin
        lr = schedule.learning_rate(state.step, cfg.lr, cfg.warmup_steps, cfg.cosine_steps or cfg.steps, cfg.cosine)
        schedule.set_learning_rate(self.optimizers, lr)
        if adversarial:
            schedule.set_learning_rate(self.discriminator_optimizers, schedule.learning_rate(
                state.step - begin, cfg.discriminator_lr, cfg.discriminator_warmup_steps, cfg.steps - begin,
                cfg.cosine))
        penalty = cfg.penalty_weight if state.step % cfg.penalty_every == 0 else 0.0
        for chunk, batch in zip(plan, chunks):
            accumulate.seed(cfg.seed, state.step, chunk.index)
            real = batch["wave"].to(self.device, non_blocking=True)
            with dist.sync_if(self.wrapped, chunk.last):
                with amp.autocast(self.device, cfg.precision):
                    fake, _, commitment = self.wrapped(real)
                loss = reconstruction_loss(cfg, fake, real, commitment)
                total = state.scaler.scale(loss * chunk.weight)
                if adversarial:  # a product whose gradient at `fake` is the discriminators'
                    total = total + (fake * self.discriminate(real, fake, chunk, penalty)).sum()
                total.backward()
            step_loss += loss.detach() * (chunk.stop - chunk.start)
        models, limits = [self.optimizers], [cfg.max_grad_norm]
        if adversarial:
            models, limits = [*models, self.discriminator_optimizers], [*limits, cfg.discriminator_max_grad_norm]
        norms, taken = amp.step(state.scaler, models, limits)
        for module in state.modules.values():
            module.zero_grad(set_to_none=True)
        if taken:
            self.model.quantizer.update(accumulate.number(cfg.seed, "codes", state.step))
            state.step += 1
            state.average.update(state.step)
        else:
            self.model.quantizer.discard()
        return step_loss, norms[0], lr, taken

    def discriminate(self, real, fake, chunk, penalty_weight):
        """Gradients of the discriminators' loss to themselves; returns the one of what they make of `fake`, to that."""
        cfg, scale, fake = self.cfg, self.state.scaler.scale, fake.detach().requires_grad_()
        with dist.sync_if(self.wrapped_discriminators, chunk.last):
            with amp.autocast(self.device, cfg.precision):
                loss, adversarial, feature = self.wrapped_discriminators(real, fake, penalty_weight)
            codec_loss = cfg.adversarial_weight * adversarial + cfg.feature_weight * feature
            gradient, = torch.autograd.grad(scale(codec_loss * chunk.weight), fake, retain_graph=True)
            scale(loss * chunk.weight).backward(inputs=list(self.discriminators.parameters()))
        return gradient

    def make_codebooks(self):
        """K-means on frames of the first training crops, by rank 0 for all: the same on any number of ranks."""
        cfg, codec, frames = self.cfg, self.model, []
        reader = data.Chunks(*self.training, accumulate.number(cfg.seed, "codebooks"))
        mode = codec.training
        codec.eval()
        wanted = 32 * cfg.codebook_size
        with torch.no_grad():
            for start in itertools.count(0, cfg.chunk_size):
                if sum(len(part) for part in frames) >= wanted:
                    break
                wave = reader[start, start + cfg.chunk_size]["wave"].to(self.device)
                frames.append(codec.latents(wave).flatten(0, 1).float())
        codec.quantizer.initialize(torch.cat(frames), accumulate.number(cfg.seed, "kmeans"))
        codec.train(mode)

    @torch.no_grad()
    def figures(self, part):
        """Mean loss over a part, the quality of sound at each number of quantizers, and the codebooks' use."""
        cfg, codec, count = self.cfg, self.model, 0
        mode, ready = codec.training, codec.quantizer.ready
        codec.eval()
        numbers = sorted({2 ** i for i in range(cfg.quantizers.bit_length()) if 2 ** i < cfg.quantizers}
                         | {cfg.quantizers}) if ready else []
        used = torch.zeros(codec.ends[-1], cfg.codebook_size)
        sums = np.zeros(3 + 2 * len(numbers))
        for _, batch in data.batches(*self.parts[part], cfg.eval_samples, cfg.chunk_size):
            wave = batch["wave"].to(self.device)
            with amp.autocast(self.device, cfg.precision):
                z = codec.latents(wave)
                codes = codec.quantizer.encode(z)
                plain = codec.waves(z)[:, :wave.shape[1]]
                made = [codec.decode(codes[..., :codec.ends[n - 1]])[:, :wave.shape[1]] for n in numbers]
            frames = -(-batch["length"][:, None] // codec.hop)  # the padding of a short recording tells nothing
            codes = codes.cpu()[torch.arange(codes.shape[1]) < frames]
            for line, column in zip(used, codes.T):
                line += torch.bincount(column, minlength=cfg.codebook_size)
            best = made[-1] if made else plain
            loss = reconstruction_loss(cfg, best, wave, torch.zeros((), device=self.device))
            values = [loss.expand(len(wave)), audio.si_sdr(plain, wave),
                      *(audio.si_sdr(one, wave) for one in made), *(audio.mel_distance(one, wave, cfg.sample_rate)
                                                                          for one in [plain, *made])]
            sums += [value.sum().item() for value in values]
            count += len(wave)
        codec.train(mode)
        *sums, count = dist.total([*sums, count])
        loss, plain, *rest = [value / count for value in sums]
        used = torch.tensor(dist.total(used.flatten().tolist())).view(used.shape)
        entropy = torch.special.entr(used / used.sum(1, keepdim=True)).sum(1)
        result = {"loss": loss} | {f"si_sdr_db@{n}": value for n, value in zip(numbers, rest)}
        result |= {"si_sdr_db_unquantized": plain}
        result |= {f"mel_distance@{n}": value for n, value in zip(numbers, rest[len(numbers) + 1:])}
        uses = entropy.exp().split(codec.quantizer.groups) if ready else []  # of groups, the codebook least in use
        return result | {f"codebook_perplexity@{q}": value.min().item() for q, value in enumerate(uses, 1)}

    @torch.no_grad()
    def write_sounds(self, part, name):
        """Rank 0 writes reconstructions of a part's first recordings, and these, as samples/NAME_*: {file: caption}."""
        cfg, codec, made, (source, rows) = self.cfg, self.model, {}, self.parts[part]
        mode = codec.training
        codec.eval()
        for number, (row, wave) in enumerate(zip(*source.readable(rows[:cfg.eval_sounds])) if dist.is_main() else []):
            caption = source.name(row)
            made |= write_sound(cfg.run, f"samples/{name}_{number}_real", wave, codec.rate, caption)
            made |= write_sound(cfg.run, f"samples/{name}_{number}", codec(wave[None].to(self.device))[0][0].cpu(),
                                codec.rate, caption)
        codec.train(mode)
        return made


class TokenCrops:
    """A source for data.Chunks: crops of recordings as tokens, laid out for the transformer of a stage.

    fetch(rows, draws) -> ({"inputs", "target0", "step0", …, "text"}, good (n,)); `ended` crops reach the true end of
    their recording. Streams are cut at the same time, whatever their frame rates.
    """

    augments = True

    def __init__(self, cfg, source, streams, caches, rates, encoder):
        """caches, rates: of each kind of tokens in `streams`, {name: TokenCache} and {name: frames a second}."""
        self.cfg, self.source, self.streams, self.caches, self.rates = cfg, source, streams, caches, rates
        self.encoder, self.main = encoder, "codes" if "codes" in caches else "semantic"
        self.window = max(1, round(cfg.seconds * rates[self.main]))

    def __len__(self):
        return len(self.source)

    def name(self, row):
        return self.source.name(row)

    def crop(self, row, place=0.0):
        """({kind: (T, Q) int64}, whether the end is reached) of the crop at `place`, in [0, 1), of a row.

        "semantic" has a column of tokens and one of the voice of the whole recording, "voice" (1, 1) the latter.
        """
        frames, rate = self.caches[self.main].frames(row), self.rates[self.main]
        begin = int(place * (max(0, frames - self.window) + 1))
        end, found = min(frames, begin + self.window), {}
        for kind, cache in self.caches.items():
            first, last = (round(edge * self.rates[kind] / rate) for edge in (begin, end))
            found[kind] = cache[row][first:last if end < frames else None]
        if "semantic" in self.caches:
            found["voice"] = self.caches["semantic"][row][:1, 1:]
        return found, end == frames

    def streams_of(self, found):
        """The crop's tokens, stream by stream, (T, Q) int64 tensors."""
        made = []
        for stream in self.streams:
            if stream.name == "voice":
                made.append(found["voice"])
            elif stream.name == "semantic":
                tokens = found["semantic"][:, 0]
                made.append((semantic.unique(tokens)[0] if self.cfg.unique else tokens)[:, None])
            else:
                made.append(stream.own(found["codes"].T).T)
        return [torch.from_numpy(np.ascontiguousarray(tokens)) for tokens in made]

    def fetch(self, rows, draws=None):
        draws = None if draws is None else data.uniform(draws, len(self.streams))
        places = np.zeros(len(rows)) if draws is None else draws[:, 0]
        crops = [self.crop(int(row), place) for row, place in zip(rows, places)]
        made = [self.streams_of(found) for found, _ in crops]
        good = np.array([all(len(tokens) for tokens in each) for each in made])
        if draws is not None and self.cfg.given_drop:
            made = [[*(one[:0] if drop < self.cfg.given_drop else one for one, drop in zip(each, drops)), each[-1]]
                    for each, drops in zip(made, draws[:, 1:])]
        batch = self.batch(made, torch.tensor([ended for _, ended in crops]))
        if self.cfg.text != "none":
            batch["text"] = self.encoder.encode([int(row) for row in rows], self.source)
        return batch, good

    def batch(self, made, ended):
        """What `lay_out` makes of samples, each a list of its streams' tokens, as one flat dict."""
        codes, lengths = zip(*(pad(column) for column in zip(*made)))
        inputs, predicted, _ = lay_out(self.streams, codes, lengths, ended, self.cfg.layout)
        batch = {"inputs": inputs}
        for i, (target, step) in enumerate(predicted):
            batch |= {f"target{i}": target, f"step{i}": step}
        return batch


def pad(tokens):
    """B of (T_b, Q) -> (codes (B, max T, Q), lengths (B,))."""
    lengths = torch.tensor([len(one) for one in tokens])
    return nn.utils.rnn.pad_sequence(list(tokens), batch_first=True), lengths


class TextTokens:
    """Texts as TokenTransformer takes them: words of the transcripts, or embeddings beside recordings."""

    def __init__(self, cfg, vocabulary, embed_width=0):
        self.cfg, self.embed_width, self.tokenizer = cfg, embed_width, clip.Tokenizer(vocabulary)

    @classmethod
    def learn(cls, cfg, source, rows):
        """Of the transcripts of the training `rows`, by rank 0 for all."""
        if cfg.text == "none" or cfg.text_embeds:
            return cls(cfg, [], source.embed_width if cfg.text_embeds else 0)
        return cls(cfg, dist.on_main(lambda: clip.Tokenizer.learn(
            (source.text(int(row)) for row in rows[:20_000]), cfg.text_vocabulary).vocabulary))

    def tokens(self, texts):
        """Tokens (B, L) of texts, 0 where there are none."""
        out = torch.zeros(len(texts), self.cfg.max_text_len, dtype=torch.long)
        for line, text in zip(out, texts):
            found = self.tokenizer.encode(text)[:self.cfg.max_text_len]
            line[:len(found)] = torch.tensor(found, dtype=torch.long)
        return out

    def embeds(self, found):
        """Embeddings (B, L, E) of B of (L_b, E) or None, padded with zeros."""
        out = torch.zeros(len(found), self.cfg.max_text_len, self.embed_width)
        for line, one in zip(out, found):
            if one is not None:
                line[:len(one)] = torch.from_numpy(one[:self.cfg.max_text_len])
        return out

    def encode(self, rows, source):
        if self.cfg.text_embeds:
            return self.embeds([source.text_embed(row) for row in rows])
        return self.tokens([source.text(row) for row in rows])


def streams_of(cfg, vocabularies, rates, ends, width):
    """The streams of a stage's transformer, of vocabularies and rates {kind of tokens: size or frames a second}.

    ends: how many codes a frame has up to each of the codec's quantizers: one more, or one more a group of channels.
    width: of the vectors that they stand for.
    """
    def stream(name, codes, kind):
        return Stream(name, codes, vocabularies[kind], rates[kind], width if kind == "codes" else 0)
    if cfg.stage == "semantic":
        return [stream("semantic", 1, "semantic")]
    if cfg.stage == "coarse":
        voice = [stream("voice", 1, "voice")] if cfg.voice else []
        return [*voice, stream("semantic", 1, "semantic"), stream("coarse", ends[cfg.coarse_quantizers - 1], "codes")]
    coarse = ends[cfg.coarse_quantizers - 1]
    return [stream("coarse", coarse, "codes"), stream("fine", ends[-1] - coarse, "codes")]


class TokenTask:
    """Training and evaluation of a token transformer; of one that was trained, `state` is what its file holds."""

    def __init__(self, cfg, device, contents=None):
        self.cfg, self.device = cfg, device
        sources = open_sources(cfg, cfg.seconds)
        self.recordings, parts = sources[0], data.parts(sources[0], cfg, *sources[1:])
        rows, folder = parts["train"][1], Path(cfg.run).parent / "tokens"
        self.codec = load_soundstream(cfg.soundstream, device) if cfg.stage in ("coarse", "fine") else None
        if self.codec and self.codec.rate != cfg.sample_rate:
            raise UserError(f"--sample_rate: {cfg.sample_rate}, but {cfg.soundstream} was trained at "
                            f"{self.codec.rate}; give that")
        self.tokenizer = open_tokenizer(cfg, self.recordings, rows, device) if cfg.stage in ("semantic", "coarse") \
            else None
        vocabularies, rates, ends, width, voices = {}, {"voice": 0.0}, [], 0, []
        caches = {source: {} for source in sources}
        if self.tokenizer:
            vocabularies["semantic"], rates["semantic"] = self.tokenizer.clusters, FRAME_RATE
            vocabularies["voice"] = len(self.tokenizer.warps)
            for source, found in caches.items():
                found["semantic"] = semantic_cache(folder, source, self.tokenizer)
        if cfg.stage == "coarse" and cfg.voice:
            cache = caches[self.recordings]["semantic"]
            voices = np.bincount(cache.tokens[cache.starts[np.setdiff1d(rows[:10_000], cache.empty)], 1],
                                 minlength=vocabularies["voice"]).tolist()
        if self.codec:
            ends = self.codec.ends
            vocabularies["codes"], rates["codes"] = self.codec.codebook_size, self.codec.rate / self.codec.hop
            if cfg.coarse_quantizers >= len(ends):
                raise UserError(f"--coarse_quantizers: {cfg.coarse_quantizers}, but {cfg.soundstream} has {len(ends)}")
            for source, found in caches.items():
                found["codes"] = code_cache(folder, source, self.codec, device)
            width = self.codec.vectors().shape[2]
        self.streams = streams_of(cfg, vocabularies, rates, ends, width)
        self.text = TextTokens(cfg, contents["vocabulary"], contents["embed_width"]) if contents else \
            TextTokens.learn(cfg, self.recordings, rows)
        crops = {source: TokenCrops(cfg, source, self.streams, found, rates, self.text)
                 for source, found in caches.items()}
        self.parts = {part: (crops[source], those) for part, (source, those) in parts.items()}
        self.training = self.parts["train"]
        self.crops = self.training[0]
        accumulate.seed(cfg.seed, "weights")
        self.model = TokenTransformer(cfg, self.streams, len(self.text.tokenizer), self.text.embed_width).to(device)
        if self.codec:
            self.model.stand_for(self.codec.vectors())
        made_of = {name: thing.checksum for name, thing in (("tokenizer", self.tokenizer), ("codec", self.codec))
                   if thing}
        facts = {"kind": cfg.stage, "streams": [list(stream) for stream in self.streams], "made_of": made_of,
                 "vocabulary": self.text.tokenizer.vocabulary, "embed_width": self.text.embed_width,
                 "window": self.typical_window(), "voices": voices, "metadata": tracker.metadata(cfg)}
        self.optimizers = optim.make(self.model, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
        average = ema.EMA(self.model, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
        self.state = checkpoint.State(cfg, {"model": self.model}, average, self.optimizers,
                                      amp.scaler(device, cfg.precision),
                                      {**identity(cfg, self.recordings), **made_of}, facts)

    def typical_window(self):
        """Frames of the last stream that a training crop has at most; of `unique` tokens, that most crops have."""
        if self.streams[-1].name != "semantic" or not self.cfg.unique:
            return self.crops.window
        return int(np.quantile([len(self.crops.streams_of(self.crops.crop(int(row))[0])[0])
                                for row in self.training[1][:200]], 0.95))

    def wrap(self):
        self.wrapped = dist.wrap(self.model, self.device)

    def update(self, plan, chunks):
        """A step on this rank's `chunks`: (loss summed over its samples, gradient norm, learning rate, whether taken).

        A sample's loss is the mean over its tokens, so that a batch's is the mean of its chunks'.
        """
        cfg, state, step_loss = self.cfg, self.state, torch.zeros((), device=self.device)
        lr = schedule.learning_rate(state.step, cfg.lr, cfg.warmup_steps, cfg.cosine_steps or cfg.steps, cfg.cosine)
        schedule.set_learning_rate(self.optimizers, lr)
        for chunk, batch in zip(plan, chunks):
            accumulate.seed(cfg.seed, state.step, chunk.index)
            batch = data.to_device(batch, self.device)
            with dist.sync_if(self.wrapped, chunk.last):
                with amp.autocast(self.device, cfg.precision):
                    drop = torch.rand(len(batch["inputs"]), device=self.device) < cfg.text_drop
                    sums, counts, _ = self.wrapped(batch["inputs"], predicted(batch), batch.get("text"), drop)
                weight = torch.full((sums.shape[1],), cfg.given_weight, device=self.device)
                weight[-1] = 1.0
                loss = ((sums @ weight) / (counts @ weight).clamp(min=1)).mean()
                state.scaler.scale(loss * chunk.weight).backward()
            step_loss += loss.detach() * (chunk.stop - chunk.start)
        norm, taken = amp.step(state.scaler, self.optimizers, cfg.max_grad_norm)
        self.model.zero_grad(set_to_none=True)
        if taken:
            state.step += 1
            state.average.update(state.step)
        return step_loss, norm, lr, taken

    @torch.no_grad()
    def figures(self, part):
        """Mean loss a token of the stage's own stream, share guessed right, and what the tokens' frequencies give."""
        cfg, model, stream = self.cfg, self.model, self.streams[-1]
        mode, sums = model.training, np.zeros(3)
        model.eval()
        used = torch.zeros(stream.codes, stream.size + 1)
        for _, batch in data.batches(*self.parts[part], cfg.eval_samples, cfg.chunk_size):
            batch = data.to_device(batch, self.device)
            with amp.autocast(self.device, cfg.precision):
                found = model(batch["inputs"], predicted(batch), batch.get("text"),
                              torch.zeros(len(batch["inputs"]), dtype=torch.bool, device=self.device))
            sums += [value[:, -1].sum().item() for value in found]
            for q, target in enumerate(predicted(batch)[-1][0].unbind(-1)):
                used[q] += torch.bincount(target[target >= 0].cpu(), minlength=stream.size + 1)
        model.train(mode)
        loss, count, right, *used = dist.total([*sums, *used.flatten().tolist()])
        used = torch.tensor(used).view(stream.codes, -1)
        entropy = torch.special.entr(used / used.sum(1, keepdim=True)).sum(1) @ used.sum(1) / used.sum()
        return {"loss": loss / count, "val_accuracy": right / count, "unigram_entropy": entropy.item()}

    def write_sounds(self, part, name):
        """Rank 0 writes continuations of a part's first recordings, by the codes that the stage makes: {file: caption}.

        Coarse makes them of the real voice and semantic tokens, fine of real coarse ones; semantic alone has no sound.
        """
        cfg, stream, (crops, rows) = self.cfg, self.streams[-1], self.parts[part]
        rows = np.setdiff1d(rows, crops.caches[crops.main].empty)[:cfg.eval_sounds]
        if stream.name == "semantic" or not dist.is_main() or not len(rows):
            return {}
        mode = self.model.training
        self.model.eval()
        made = [crops.streams_of(crops.crop(int(row))[0]) for row in rows]
        begun = round(cfg.prompt_seconds * crops.rates["codes"]) if stream.name == "coarse" else 0
        window = crops.window
        tokens, _ = go_on(self.model, window, lambda b, past: [part[len(past):][:window] if stream.name == "fine"
                                                                   else part for part in made[b][:-1]],
                          [one[-1][:begun] for one in made],
                          [len(one[-1]) if stream.name == "fine" else window for one in made],
                          [accumulate.number(cfg.seed, "sound", int(row)) for row in rows],
                          Drawing(cfg.temperature, cfg.top_k), self.text.encode(list(map(int, rows)), crops.source)
                          if cfg.text != "none" else None, ends=stream.name == "coarse")
        files = {}
        for number, (one, own) in enumerate(zip(made, tokens)):
            codes = torch.cat([one[0][:len(own)], own], dim=1) if stream.name == "fine" else own
            wave = self.codec.decode(codes[None].to(self.device))[0].cpu()
            files |= write_sound(cfg.run, f"samples/{name}_{number}", wave, self.codec.rate,
                                 crops.name(int(rows[number])))
        self.model.train(mode)
        return files


def predicted(batch):
    """The pairs (targets, steps) of the streams in a batch."""
    return [(batch[name], batch[name.replace("target", "step")]) for name in batch if name.startswith("target")]


# Data and what earlier stages made

def open_sources(cfg, seconds=0.0):
    """[recordings of cfg.data, those of cfg.val_data if there are], whose fetch gives crops of so many seconds."""
    crop = round(seconds * cfg.sample_rate)
    return [Syllables(BUILTIN_ROWS, crop, cfg.sample_rate, cfg.split_by) if path == "syllables" else
            Recordings(path, cfg.sample_rate, crop, cfg.speaker_pattern, math.prod(cfg.strides), cfg.split_by)
            for path in (cfg.data, cfg.val_data) if path]


def identity(cfg, source):
    """What must not change while a run goes on."""
    names = FIXED_CODEC if cfg.stage == "soundstream" else FIXED_TOKENS
    return {**{name: getattr(cfg, name) for name in names}, **{f"data_{k}": v for k, v in source.fingerprint().items()}}


def code_cache(folder, source, codec, device):
    """The codes of all recordings by a codec."""
    def encode(row):
        with torch.inference_mode():
            return codec.encode(source.wave(row)[None].to(device))[0].cpu().numpy()
    return token_cache(folder, source, {"codec": codec.checksum}, encode, "codes")


def semantic_cache(folder, source, tokenizer):
    """The semantic tokens of all recordings, and in a second column the voice of each."""
    def encode(row):
        tokens, voice = tokenizer.encode(source.wave(row), source.rate)
        return np.stack([tokens, np.full_like(tokens, voice)], axis=1)
    return token_cache(folder, source, {"tokenizer": tokenizer.checksum, "columns": 2}, encode, "semantic tokens")


def prepare(cfg, run):
    """What rank 0 does before anyone trains: check the config and the data, hold the run folder.

    Returns (the config with all that was "auto" or left to the run's place decided, messages).
    """
    cfg = tracker.prepare(cfg)
    accumulate.plan(cfg.batch_size, cfg.chunk_size, 0, dist.world_size())
    if cfg.stage == "soundstream" and cfg.steps <= cfg.quantize_after and not cfg.init_from:
        raise UserError(f"--steps {cfg.steps}: there are no codebooks before --quantize_after {cfg.quantize_after}; "
                        "give more steps, or lower that")
    sources = open_sources(cfg)  # checked before an earlier run is moved aside
    if cfg.text == "auto":
        use = "prefix" if cfg.stage == "semantic" and sources[0].texts else "none"
        cfg = dataclasses.replace(cfg, text=use)
    for path, source in zip((cfg.data, cfg.val_data), sources):
        if cfg.stage != "soundstream" and cfg.text != "none" and not cfg.text_embeds and not source.texts:
            raise UserError(f"--text {cfg.text}: {path} has no transcripts; expected NAME.txt beside recordings, or "
                            "*.trans.txt")
        if cfg.text_embeds and not source.embed_width:
            raise UserError(f"--text_embeds: no NAME.npy beside the recordings of {path}")
    if cfg.text_embeds and len({source.embed_width for source in sources}) > 1:
        raise UserError(f"--val_data {cfg.val_data}: embeddings of texts {sources[1].embed_width} wide, those of "
                        f"{cfg.data} are {sources[0].embed_width}")
    whole = Path(cfg.run).parent
    cfg = dataclasses.replace(cfg, soundstream=cfg.soundstream or str(whole / "soundstream"),
                              semantic=cfg.semantic or str(whole / "semantic"))
    if cfg.stage in ("coarse", "fine") and not cfg.soundstream.startswith("encodec:"):
        model_file(cfg.soundstream, "soundstream")
    if cfg.stage == "coarse":
        model_file(cfg.semantic, "semantic", TOKENIZER)
    notes = run.open(cfg.resume)
    for source in sources:
        bad, _, names = source.check()
        if bad or source.bad:
            names = [*source.bad, *names]
            notes.append(f"{len(names)} recordings cannot be used and are left out: {', '.join(names[:5])}"
                         f"{', …' if len(names) > 5 else ''}")
        if source.resampled:
            notes.append(source.resampled)
    data.parts(sources[0], cfg, *sources[1:])
    return cfg, notes


def train(cfgs):
    first, last = cfgs[0], cfgs[-1]
    device = dist.setup(first.device, first.timeout_minutes)
    tracker.check_stages(cfgs)
    before = [train_stage(cfg, device) for cfg in cfgs]
    run = Path(first.run)
    if len(cfgs) > 1:
        args = EvaluateConfig(run=str(run), data=first.data, seed=first.seed, device=first.device,
                              samples=last.eval_samples, sounds=first.eval_sounds)
        if all(before) and (run / "voices.json").is_file():
            scores = config.read_json(run / "voices.json")
        else:
            scores = evaluate_together(args, device)
        report(f"The stages together, on {args.part} recordings ({run}/sounds):", scores)
    if dist.is_main():
        print(f"\nTo generate: python train_audio.py sample --run {run} "
              + ('--text "a i u o" ' if first.data == "syllables" else "--prompt voice.wav ")
              + "--seconds 3 --out out.wav", flush=True)


def train_stage(cfg, device):
    """Train one stage; returns whether it was finished before."""
    # Let rank 0 hold the run folder and check all there is to check; make what earlier stages give.
    started, given = time.monotonic(), cfg
    cfg = dataclasses.replace(cfg, run=str(Path(cfg.run) / cfg.stage))
    run = checkpoint.Run(cfg.run)
    cfg, notes = dist.on_main(lambda: prepare(cfg, run))
    task = (CodecTask if cfg.stage == "soundstream" else TokenTask)(cfg, device)
    state = task.state
    resume_from, finished, more = dist.on_main(lambda: run.resume_point(cfg, state.identity))
    if finished:
        tracker.resend(cfg, run)
        report(f"{cfg.run} is finished, at step {finished['step']}; to train on, give more --steps.", finished)
        return True

    # Take the run up where it was.
    notes += more
    if resume_from:
        notes += state.restore(resume_from)
    elif cfg.init_from:
        state.start_from(cfg.init_from, cfg.init_strict)
    dist.check_in_step(state.modules, state.step)
    if cfg.compile:
        task.model.compile()
    task.wrap()

    # Ask for the data in the order that seed and step give.
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, state.step)
    batches = data.loader(data.Chunks(*task.training, cfg.seed), spans, cfg.workers, device.type == "cuda")

    # Say what is to come, and where the figures go.
    if dist.is_main():
        checkpoint.write_json({**config.as_json(given), "versions": state.versions}, run.folder / "config.json")
    log = tracker.Tracker(run, state, len(task.training[1]))
    log.say(f"{cfg.stage}: {sum(p.numel() for p in task.model.parameters()):,} parameters, {len(task.recordings):,} "
            f"recordings of {len(task.recordings.speakers):,} speaker(s), {dist.world_size()} rank(s) on {device.type}")
    for note in filter(None, notes):
        log.say(note)

    with log, tracker.signals() as signals:  # the log hears how it ends
        meter, chunks, taken = tracker.Meter(log, state, cfg.stage), [], True
        task.model.train()
        while state.step < cfg.steps:
            # Take one optimizer step. One that overflowed did not happen: it is tried again, on the same samples.
            chunks = [next(batches) for _ in plan] if taken else chunks
            step_loss, norm, lr, taken = task.update(plan, chunks)
            if not taken:
                meter.overflows += 1
                continue
            meter.add(step_loss, chunks)
            if state.step % cfg.log_every and state.step < cfg.steps:
                continue

            # Log; evaluate and save when they are due. Here the ranks meet, and the host waits for the device.
            loss, step, begun = meter.line(norm, lr), state.step, time.monotonic()
            eval_due, save_due, stop = meter.due(signals)
            if eval_due:
                losses, samples = {"val_loss_online": task.figures("validation")["loss"]}, {}
                with state.average.applied(task.model):
                    figures = task.figures("validation")
                    losses["val_loss"] = figures.pop("loss")
                    if step < cfg.steps:  # else the test is next
                        samples = task.write_sounds("validation", f"step_{step:08d}")
                log.log(step, samples, **losses, **figures, evaluation_s=time.monotonic() - begun)
                log.say("\n    ".join([f"step {step}: " + tracker.show({"loss": loss, **losses}),
                                       *tracker.table(figures)]))
                best = run.save_best(state, losses["val_loss"], log)
                save_due = save_due or (best and log.copies_best_checkpoint)
                log.report()
            if save_due or stop:
                run.commit(state, log)
            if stop:
                run.wait()
                log.say(f"stopped by signal {stop} at step {step}, all saved; the same command goes on")
                raise SystemExit(128 + stop)
            meter.restart()
        meter.bar.close()

        # Test the averaged weights, and save them last of all.
        with state.average.applied(task.model):
            figures = task.figures("test")
            results = {"test_loss": figures.pop("loss"), **figures}
            samples = task.write_sounds("test", "test")
        log.log(state.step, samples, **results)
        results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
        if dist.is_main():
            run.finish(state, results)
        log.report()
    dist.gather(None)  # rank 0 has written model.pt, which the next stage or the evaluation of all reads
    report(f"Trained {cfg.run}; this start took {time.monotonic() - started:.0f} s.", results)
    return False


def report(headline, results):
    """A headline, and the results as a table."""
    if dist.is_main():
        print("\n".join([f"\n{headline}\n", *(f"  {line}" for line in tracker.table(results))]), flush=True)


def write_sound(run, name, wave, rate, caption=""):
    """RUN/NAME.wav of a wave (T,), and NAME.png, its spectrogram. Returns {file: caption} of the two."""
    files = {f"{name}.wav": lambda file: audio.write_wav(file, wave, rate),
             f"{name}.png": lambda file: media.write_png(file, audio.spectrogram(wave, rate))}
    for name, write in files.items():
        with checkpoint.replacing(Path(run) / name) as file:
            write(file)
    return dict.fromkeys(files, caption)


# What earlier stages made

TOKENIZER = "kmeans.pt"  # in the folder of the semantic run


def model_file(path, kind, name="model.pt"):
    """The file `name` of a run that a stage needs, given its folder or the file itself; UserError if it is missing."""
    path = Path(path)
    file = path / name if path.is_dir() or not path.suffix else path
    if not file.is_file():
        raise UserError(f"{file}: missing; train it first: --stage {kind}, or give its run with --{kind}")
    return file


def load_soundstream(path, device, weights="ema"):
    """The codec of a run folder or file, in eval mode, with what tells it from others in `checksum`."""
    if str(path).startswith("encodec:"):
        return EnCodec(path, device)
    file = model_file(path, "soundstream")
    cfg, state = lora.read_model("soundstream", Config, file, weights)
    codec = SoundStream(cfg)
    checkpoint.load_weights(codec, state, file)
    codec.checksum = checkpoint.checksum(file)[:16]
    return codec.to(device).eval().requires_grad_(False)


class EnCodec:
    """A published EnCodec (Défossez et al. 2022) in the place of a SoundStream: encodec:MODEL, through transformers."""

    def __init__(self, spec, device):
        transformers, name = need("transformers", f"--soundstream {spec}"), spec.removeprefix("encodec:")
        try:
            kind = transformers.AutoConfig.from_pretrained(name).model_type
            if kind != "encodec":
                raise UserError(f"--soundstream {spec}: a model of the kind {kind}; expected encodec")
            self.model = transformers.EncodecModel.from_pretrained(name).float().to(device).eval().requires_grad_(False)
        except OSError as error:  # no such model, or no way to it
            raise UserError(f"--soundstream {spec}: {str(error).splitlines()[0]}") from error
        settings = self.model.config
        if settings.audio_channels != 1:
            raise UserError(f"--soundstream {spec}: a model of {settings.audio_channels} channels; expected one")
        self.rate, self.hop, self.codebook_size = settings.sampling_rate, settings.hop_length, settings.codebook_size
        self.bandwidth, self.checksum = max(settings.target_bandwidths), name
        self.ends = list(range(1, settings.num_quantizers + 1))
        if Path(name).is_dir():  # what is in a folder may change, what is published under a name does not
            files = sorted(path for path in Path(name).iterdir() if path.suffix in (".safetensors", ".bin"))
            self.checksum = " ".join(checkpoint.checksum(path)[:16] for path in files)

    def vectors(self):
        """What each code adds to a frame, (Q, K, D)."""
        return torch.stack([layer.codebook.embed for layer in self.model.quantizer.layers])

    @torch.no_grad()
    def encode(self, wave, count=None):
        """Codes (B, frames, Q) of waves (B, T)."""
        wave = F.pad(wave, (0, -wave.shape[1] % self.hop))
        codes = self.model.encode(wave[:, None], bandwidth=self.bandwidth, return_dict=True).audio_codes
        return codes[0].transpose(1, 2)[..., :count]

    @torch.no_grad()
    def decode(self, codes):
        """Waves (B, frames·hop) of codes (B, frames, Q)."""
        return self.model.decode(codes.transpose(1, 2)[None], [None], return_dict=True).audio_values[:, 0]


def open_tokenizer(cfg, source, rows, device):
    """The tokenizer of semantic tokens: of the run that the stage is of, or, for the semantic stage, its own.

    That is fitted to the training `rows` when the run has none yet, and saved with it.
    """
    folder = Path(cfg.run if cfg.stage == "semantic" else cfg.semantic)
    path = folder / TOKENIZER
    if not dist.on_main(path.exists):
        features = "mfcc" if cfg.tokenizer == "kmeans" else cfg.tokenizer
        made = semantic.fit(source, rows, cfg.clusters, cfg.seed, features=features, deltas=cfg.deltas)
        dist.on_main(lambda: checkpoint.save(made.state(), path) and None)
    return load_tokenizer(path, device)


def load_tokenizer(path, device):
    """The tokenizer of a file, with what tells it from others in `checksum`."""
    tokenizer = semantic.load(checkpoint.load(path), path).to(device)
    tokenizer.checksum = checkpoint.checksum(path)[:16]
    return tokenizer


def where_it_is(cfg, run):
    """A trained stage's config with its folder, and those it needs as far as they are beside it, in `run`: it may have
    moved, or been trained from another working directory."""
    there = {name: str(Path(run) / name) for name in ("soundstream", "semantic") if (Path(run) / name).is_dir()}
    return dataclasses.replace(cfg, run=str(Path(run) / cfg.stage), **there)


def load_transformer(path, stage, device, weights="ema"):
    """(config, model in eval mode, contents of the file) of a stage's run folder."""
    file = model_file(path, stage) if weights == "ema" else newest_checkpoint(path)
    cfg, state = lora.read_model(stage, Config, file, weights)
    streams = [Stream(*stream) for stream in state["streams"]]
    text = TextTokens(cfg, state["vocabulary"], state["embed_width"])
    model = TokenTransformer(cfg, streams, len(text.tokenizer), text.embed_width)
    checkpoint.load_weights(model, state, file)
    return where_it_is(cfg, Path(path).parent), model.to(device).eval().requires_grad_(False), state


# Commands

@dataclass(frozen=True)
class DrawingConfig(config.Settings):
    # How
    run: str = "runs/audio"  # folder of the runs, one a stage
    temperature: tuple[NonNegative, ...] = (0.85, 0.3, 0.3)  # of codes drawn, 0: the most probable; one, or one a stage
    top_k: tuple[TopK, ...] = (1.0, 0.2, 0.2)  # share of the codes that is drawn from; one, or one a stage
    guidance_scale: tuple[NonNegative, ...] = (1.5, 1.0, 1.0)  # lean toward the text, 1 for not; one, or one a stage
    prompt_scale: tuple[NonNegative, ...] = (1.0, 2.5, 1.0)  # lean toward the prompt, 1 for not; one, or one a stage
    given_scale: tuple[NonNegative, ...] = (1.0, 2.0, 1.0)  # lean toward the stage before, if trained with --given_drop
    weights: Literal["ema", "online"] = "ema"  # averaged weights, or those of the newest checkpoint
    seed: int = 0  # of everything random
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute


@dataclass(frozen=True)
class EvaluateConfig(DrawingConfig):
    # What to evaluate
    data: str = ""  # recordings; "": those the coarse stage was trained on
    part: Literal["train", "validation", "test"] = "test"  # which of them
    samples: Natural = 160  # most recordings to go on with, 0 for all
    sounds: Natural = 4  # recordings that are written as WAV and PNG to RUN/sounds
    prompt_seconds: Positive = 1.0  # how much of each the model is given
    seconds: Positive = 1.5  # how much it adds
    batch_size: Count = 40  # recordings at a time


@dataclass(frozen=True)
class SampleConfig(DrawingConfig):
    # What to say
    text: str = ""  # text to say
    file: str = ""  # file with a text to say a line, instead
    text_embeds: str = ""  # embedding of a text, .npy (L, E), for stages that were trained with --text_embeds
    prompt: str = ""  # recording to go on with, in its voice
    prompt_seconds: NonNegative = 0.0  # how much of its end to take, 0 for all
    prompt_codes: str = ""  # codes to go on with, .npy (T, Q), as --codes writes them, instead of a recording
    seconds: Positive = 3.0  # length at most, after the prompt
    num: Count = 1  # sounds a text or prompt
    fine: bool = True  # let the fine stage add its codes, else the coarse ones alone are heard
    # The codec alone
    reconstruct: str = ""  # recording to send through the codec
    decode: str = ""  # codes to turn into sound, .npy (T, Q)
    quantizers: Natural = 0  # how many the codec uses, 0 for all
    soundstream: str = ""  # codec: run, model.pt or encodec:MODEL; "": RUN/soundstream
    # Out
    out: str = "out.wav"  # the sound; several are out_0.wav, out_1.wav, …
    codes: str = ""  # also write the codes, .npy (T, Q), to this file
    picture: str = ""  # also write the spectrogram, PNG, to this file


def evaluate(args):
    """Every stage that there is, on held-out recordings, and what they make together."""
    device, ready = dist.setup(args.device), []
    for stage in STAGES:
        path = Path(args.run) / stage / "model.pt"
        if not path.is_file():
            continue
        file = path if args.weights == "ema" else newest_checkpoint(path.parent)
        cfg, state = lora.read_model(stage, Config, file, args.weights)
        cfg = dataclasses.replace(where_it_is(cfg, args.run), eval_samples=args.samples, **of_data(args))
        task = CodecTask(cfg, device) if stage == "soundstream" else TokenTask(cfg, device, state)
        checkpoint.load_weights(task.model, state, file)
        report(f"{path.parent}, on {args.part} recordings:", task.figures(args.part))
        ready.append(stage)
    if not ready:
        raise UserError(f"{args.run}: no model.pt in {', '.join(f'{stage}/' for stage in STAGES)}; train first")
    if len(ready) == len(STAGES):
        report(f"The stages together ({args.run}/sounds):", evaluate_together(args, device))


def of_data(args):
    """What is other in a trained stage's config to evaluate it on the data of `args`."""
    return {"batch_size": 1, **({"data": args.data, "val_data": ""} if args.data else {})}


def newest_checkpoint(folder):
    """The newest checkpoint of a run folder."""
    if found := sorted((folder / "checkpoints").glob("step_*.pt")):
        return found[-1]
    raise UserError(f"{folder}/checkpoints: empty; --weights online needs a checkpoint")


def evaluate_together(args, device):
    """Go on with held-out recordings and, on the built-in ones, listen to who speaks and what is said."""
    drawings, stack = drawings_of(args), Stack(args.run, device, args.weights)
    cfg = dataclasses.replace(stack.cfgs["coarse"], **of_data(args))
    sources, ranks, added, count = open_sources(cfg), dist.world_size(), 0.0, 0
    parts = data.parts(sources[0], cfg, *sources[1:])
    source, rows = parts[args.part]
    rows = rows[:args.samples or len(rows)]
    mine, begin = rows[dist.rank()::ranks], round(args.prompt_seconds * source.rate)
    hearing = semantic.Hearing() if isinstance(source, Syllables) else None
    bar = tracker.progress(total=len(mine), desc="continuations", unit=" recordings", disable=not dist.is_main())
    for at in range(0, len(mine), args.batch_size):
        part, waves = source.readable(mine[at:at + args.batch_size])
        prompts = [wave[:min(begin, len(wave) // 2)] for wave in waves]
        seeds = [accumulate.number(args.seed, "voice", row) for row in part]
        codes = stack.speak(list(zip(*stack.heard(prompts))), args.seconds, seeds, drawings)
        made = [stack.wave(one) for one in codes]
        for number, sound in enumerate(made, at):
            if (place := number * ranks + dist.rank()) < args.sounds:
                write_sound(args.run, f"sounds/{place}_goes_on", sound, source.rate)
        count += len(part)
        added += sum((len(sound) - len(prompt)) / source.rate for sound, prompt in zip(made, prompts))
        if hearing:  # what followed in reality goes through the codec, too, which is scored by itself
            waves = [stack.wave(one) for one in stack.heard(waves)[1]]
            hearing.voices(prompts, *([one[len(prompt):] for one, prompt in zip(sounds, prompts)]
                                      for sounds in (waves, made)), source.rate)
        if hearing and stack.cfgs["semantic"].text != "none" and not stack.cfgs["semantic"].text_embeds:
            records = source.records(part)
            spoken = stack.speak(stack.silence(seeds), LONGEST, seeds, drawings, [record["text"] for record in records])
            hearing.texts([stack.wave(one) for one in spoken], waves, records, source.rate)
        bar.update(len(part))
    bar.close()
    added, count = dist.total([added, count])
    result = {"seconds_added": added / count}
    if hearing:
        result |= hearing.result() | semantic_scores(stack.tokenizer, cfg, parts["train"], (source, rows))
    if dist.is_main():
        checkpoint.write_json(result, Path(args.run) / "voices.json")
    return result


def semantic_scores(tokenizer, cfg, train, held_out):
    """Whether semantic tokens tell the syllables, by a map fitted on other speakers, and the speakers.

    train, held_out: (source, rows) each.
    """
    pairs, folder = [], Path(cfg.run).parent / "tokens"
    for source, rows in ((train[0], train[1][:400]), held_out):
        cache, records = semantic_cache(folder, source, tokenizer), source.records(rows)
        pairs.append((np.concatenate([cache[int(row)][:, 0] for row in rows]), np.concatenate([
            semantic.syllable_labels(record, cache.frames(int(row))) for row, record in zip(rows, records)])))
    seen, halves = collections.Counter(), ([], [])
    for row in map(int, rows):
        seen[who := source.speaker(row)] += 1
        halves[seen[who] % 2].append((cache[row][:, 0], who))
    result = {"semantic_syllable_accuracy": semantic.many_to_one(*pairs[0], *pairs[1])}
    if all(halves):  # someone is heard twice
        result["semantic_speaker_accuracy"], result["semantic_speaker_chance"] = semantic.speaker_accuracy(
            *zip(*halves[1]), *zip(*halves[0]))
    return result


def drawings_of(args):
    """{stage: Drawing} by the settings asked for, each of them one value for semantic, coarse and fine, or three."""
    stages, columns = list(STAGES)[1:], []
    for name in Drawing._fields:
        values = getattr(args, name)
        if len(values) not in (1, len(stages)):
            raise UserError(f"--{name}: {len(values)} values; expected one, or one for each of {', '.join(stages)}")
        columns.append(values * (len(stages) if len(values) == 1 else 1))
    return {stage: Drawing(*values) for stage, *values in zip(stages, *columns)}


def open_wave(path, rate, hop):
    """(wave (T,) of a recording at `rate`, a note if it was resampled)."""
    channels, own = audio.read(path)
    if channels.shape[1] * rate < hop * own:
        raise UserError(f"{path}: {channels.shape[1]} samples at {own} Hz, shorter than a frame of {hop} at {rate} Hz")
    note = f"{path}: {own} Hz, resampled to the codec's {rate}" if own != rate else None
    return audio.resample(torch.from_numpy(channels).mean(0), own, rate), note


def open_text_embed(path, stack):
    """The embedding of a text (L, E) in a .npy file, checked against the stages that were trained on such."""
    embed = np.array(data.open_array(path, 2), np.float32)
    for width in {facts["embed_width"] for facts in stack.facts.values()} - {0}:
        if embed.shape[1] != width or not np.isfinite(embed).all():
            raise UserError(f"{path}: of shape {embed.shape}, or not finite; expected (length, {width})")
    return embed


def open_codes(path, codec):
    """Codes (T, Q) of a .npy file, checked against the codec."""
    try:
        codes = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable .npy array ({error})") from error
    fits = codes.ndim == 2 and codes.dtype.kind in "iu" and codes.size and codes.shape[1] in codec.ends
    if not fits or not 0 <= codes.min() <= codes.max() < codec.codebook_size:
        raise UserError(f"{path}: {codes.dtype} {codes.shape}; expected whole numbers (frames, codes) below "
                        f"{codec.codebook_size}, of {', '.join(map(str, codec.ends))} codes a frame")
    return torch.from_numpy(codes.astype(np.int64))


def sample(args):
    device = dist.setup(args.device)
    chosen = [name for name in ("text", "file", "text_embeds", "prompt", "prompt_codes", "reconstruct", "decode")
              if getattr(args, name)]
    if {"reconstruct", "decode"} & set(chosen):
        if len(chosen) > 1:
            raise UserError(f"--{chosen[0]}, --{chosen[1]}: the codec alone takes one recording or one file of codes")
        return dist.on_main(lambda: through_codec(args, device))
    for one, other in (("text", "file"), ("prompt", "prompt_codes")):
        if one in chosen and other in chosen:
            raise UserError(f"--{one}, --{other}: give one of them")
    if not chosen:
        raise UserError("nothing to say: give --text, --file, --text_embeds, --prompt, --prompt_codes, --reconstruct "
                        "or --decode")
    if args.soundstream:
        raise UserError("--soundstream: only --reconstruct and --decode take another codec than that of the stages")
    drawings, stack, note = drawings_of(args), Stack(args.run, device, args.weights), None
    texts = [args.text]
    if args.file:
        texts = [line.strip() for line in Path(args.file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if args.file and not texts:
        raise UserError(f"{args.file}: no text in it")
    takes = {cfg.text_embeds for cfg in stack.cfgs.values() if cfg.text != "none"}  # embeddings, texts or both
    if any(texts) and False not in takes:
        raise UserError(f"--{'file' if args.file else 'text'}: {args.run} was trained " + (
            "on embeddings of texts; give one by --text_embeds" if takes else
            "without texts; give --prompt alone, or train with --text prefix"))
    if args.text_embeds and True not in takes:
        raise UserError(f"--text_embeds: {args.run} was not trained on embeddings of texts")
    embed = open_text_embed(args.text_embeds, stack) if args.text_embeds else None
    codec, prompt = stack.codec, None
    if args.prompt:
        wave, note = open_wave(args.prompt, codec.rate, codec.hop)
        if args.prompt_seconds:
            wave = wave[-round(args.prompt_seconds * codec.rate):]
        prompt, = zip(*stack.heard([wave]))
    elif args.prompt_codes:
        codes = open_codes(args.prompt_codes, codec)
        if codes.shape[1] < codec.ends[-1]:
            raise UserError(f"{args.prompt_codes}: {codes.shape[1]} codes a frame, but to go on takes "
                            f"{codec.ends[-1]}")
        meant, _, voice = stack.heard([stack.wave(codes)])
        # What the codec adds would be taken for another voice, so coarse is told none, if it has been trained so, too.
        prompt = meant[0], codes, voice[0][:0] if stack.cfgs["coarse"].given_drop else voice[0]
    if prompt and len(prompt[1]) >= stack.facts["coarse"]["window"]:
        own, most = (n * codec.hop / codec.rate for n in (len(prompt[1]), stack.facts["coarse"]["window"] - 1))
        raise UserError(f"--{'prompt' if args.prompt else 'prompt_codes'}: {own:.2f} s, longer than the {most:.2f} s "
                        f"that the coarse stage was trained on; give --prompt_seconds {most:.2f} or less")
    wanted = [(text, number) for text in texts for number in range(args.num)]
    mine = wanted[dist.rank()::dist.world_size()]
    if mine:
        seeds = [accumulate.number(args.seed, text, number) for text, number in mine]
        given = [text for text, _ in mine] if any(texts) else None
        prompts = [prompt] * len(mine) if prompt else stack.silence(seeds)
        embeds = None if embed is None else [embed] * len(mine)
        made = stack.speak(prompts, args.seconds, seeds, drawings, given, embeds, args.fine)
        for (text, number), codes in zip(mine, made):
            place = texts.index(text) * args.num + number
            write_out(args, stack.wave(codes), codes, codec.rate, f"_{place}" if len(wanted) > 1 else "")
    if dist.is_main():
        print("\n".join(filter(None, [note, f"{len(wanted)} sound(s): {args.out}"])), flush=True)
    return None


def through_codec(args, device):
    """Send a recording through the codec of a run, or turn codes into sound."""
    path, note, wave = args.soundstream or Path(args.run) / "soundstream", None, None
    if args.weights == "online" and Path(path).is_dir():
        path = newest_checkpoint(Path(path))
    codec = load_soundstream(path, device, args.weights)
    if args.quantizers > len(codec.ends):
        raise UserError(f"--quantizers: {args.quantizers}, but the codec has {len(codec.ends)}")
    if args.reconstruct:
        wave, note = open_wave(args.reconstruct, codec.rate, codec.hop)
        codes = codec.encode(wave[None].to(device), args.quantizers or None)
    else:
        codes = open_codes(args.decode, codec)[None, :, :codec.ends[args.quantizers - 1]].to(device)
    sound = codec.decode(codes)[0].cpu()
    write_out(args, sound[:len(wave)] if wave is not None else sound, codes[0], codec.rate)
    quality = f", si_sdr_db {audio.si_sdr(sound[None, :len(wave)], wave[None]).item():.2f}" if wave is not None else ""
    bits = codes.shape[2] * math.log2(codec.codebook_size) * codec.rate / codec.hop
    print("\n".join(filter(None, [note, f"{args.out}: {codes.shape[2]} codes a frame, {bits:.0f} bits a second"
                                  f"{quality}"])), flush=True)


def write_out(args, wave, codes, rate, suffix=""):
    """Write a sound and what else is asked for; several get a `suffix` before the ending."""
    def to(path):
        return Path(path).with_stem(Path(path).stem + suffix)
    with checkpoint.replacing(to(args.out)) as file:
        audio.write_wav(file, wave, rate)
    if args.codes:
        with checkpoint.replacing(to(args.codes)) as file:
            np.save(file, codes.cpu().numpy().astype(np.uint16))
    if args.picture:
        with checkpoint.replacing(to(args.picture)) as file:
            media.write_png(file, audio.spectrogram(wave, rate))


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.run(COMMANDS, __doc__, "train", PRESETS, STAGES)


if __name__ == "__main__":
    main()
