"""Train a SoundStream codec, then semantic, coarse and fine token transformers (AudioLM).

(text, prompt) -> sound:

    torchrun --nproc_per_node=2 train_audio.py         # all four, on built-in syllables
    torchrun --nproc_per_node=2 train_audio.py --stage soundstream --data speech --run_dir runs/mine
    python train_audio.py evaluate
    python train_audio.py sample --text "a i u o" --out out.wav
    python train_audio.py sample --prompt voice.wav --seconds 2 --out out.wav   # in the same voice
    python train_audio.py sample --reconstruct in.wav --num_quantizers 2 --out out.wav

The same command again resumes. Each stage is a run of its own: RUN/soundstream, RUN/semantic,
RUN/coarse and RUN/fine. Later stages read the folders of earlier ones. A published codec can
replace the first stage (--soundstream hf:kyutai/mimi).
`python train_audio.py [train|evaluate|sample] --help` lists the settings.

    wave (T,) -> SoundStream -> codes (frames, Q): the first quantizers are coarse, the others fine
    wave (T,) -> k-means of MFCC or HuBERT -> semantic tokens (N,)
    text -> [semantic] -> [semantic | coarse] -> [coarse | fine] -> SoundStream's decoder -> wave

SoundStream: Zeghidour et al. 2021. AudioLM: Borsos et al. 2022.

What differs from the papers (the presets have the papers' values, where these are known):
SoundStream: no FiLM, so no denoising (§III-F). Residual units start as the identity. Feature
matching is a mean over channels too. Mel spectra are scaled differently (`spectral_distance`).
Weights are averaged (EMA). By default also: an L1 loss of waves, an R1 penalty, no quantizer in
the first 300 steps, and discriminators (no weight norm) only in the last 40 of 1,050 steps.
AudioLM: semantic tokens are 50 a second, of MFCC by default. Positions are rotary: AudioLM's
relative ones (T5) are a bias of all scores, which would prevent fast attention. Blocks are pre-norm
with GELU; the paper names neither. Text and EOS are added. Long sounds are made in windows that
overlap by half. By default Muon trains the coarse stage.
"""

import os

# Before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import copy
import dataclasses
import functools
import itertools
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from common import (
    accumulate,
    amp,
    checkpoint,
    clip,
    config,
    data,
    diffusion,
    dist,
    loop,
    media,
    optim,
    order,
    recordings,
    schedule,
    semantic,
    store,
    synthetic,
    tracker,
)
from common.config import (
    Decay,
    Folder,
    Fraction,
    Layers,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SampleRate,
    Seconds,
    Size,
    SizeOrZero,
    UserError,
    field,
    within,
)
from common.ema import EMA
from common.nn import KVCache, Transformer, learned_tokens
from common.quantize import ResidualQuantizer

# Config

# The stages that a setting is for.
CODEC = ("soundstream",)
SEMANTIC = ("semantic",)
COARSE = ("coarse",)
COARSE_FINE = ("coarse", "fine")
TOKENS = ("semantic", "coarse", "fine")
SOUNDS = ("soundstream", "coarse", "fine")


@dataclass(frozen=True)
class Config(config.TrainingRun):
    """Model, data and optimization of one stage"""

    # Run and data
    stage: Literal["all", "soundstream", "semantic", "coarse", "fine"] = field(
        "all", "stage to train; all: one after the other", fixed=True
    )
    run_dir: Folder = field("runs/audio", "folder of the runs; a stage's run is RUN/STAGE")
    data: str = field(
        "syllables", 'folder of recordings (wav, flac, ogg, mp3), or "syllables": built in'
    )
    sample_rate: SampleRate = field(
        8_000, "samples a second; recordings of other rates are resampled", fixed=True
    )
    seconds: Seconds = field(0.32, "length of a training crop", fixed=True)
    crop_samples: within(int, 0, 10**8) = field(
        0, "length of a training crop in samples; 0: --seconds", fixed=True
    )
    speaker_pattern: str = field(
        "", 'regular expression; group 1 in a file name is the speaker; "": the folder is'
    )
    soundstream: str = field(
        "", 'codec to use: run, file or hf:MODEL; "": RUN/soundstream', stages=COARSE_FINE
    )
    semantic: str = field("", 'run whose semantic tokens to use; "": RUN/semantic', stages=COARSE)
    # Codec
    channels: Size = field(
        8, "channels of the first layer; each stride doubles them", stages=CODEC, fixed=True
    )
    strides: tuple[Annotated[int, ("2 or more", lambda stride: stride > 1)], ...] = field(
        (2, 4, 5, 8), "strides; their product is the hop length", stages=CODEC, fixed=True
    )
    latent_dim: Size = field(128, "width of a frame", stages=CODEC, fixed=True)
    num_quantizers: Layers = field(
        4, "residual quantizers; the first n alone are a lower bitrate", stages=CODEC, fixed=True
    )
    codebook_size: Size = field(256, "codes of a quantizer", stages=CODEC, fixed=True)
    codebook_decay: Decay = field(0.95, "decay of the codebooks' averages", stages=CODEC)
    dead_code_threshold: NonNegativeFloat = field(
        0.1, "re-seed codes with fewer frames a step; 2 needs large batches", stages=CODEC
    )
    quantizer_dropout: Fraction = field(
        1.0, "fraction of samples that use a random number of quantizers", stages=CODEC
    )
    quantizer_start: NonNegativeInt = field(
        300, "steps without quantizer, before k-means (paper: 0)", stages=CODEC, fixed=True
    )
    # The paper's weights are for a loss summed over features and long training.
    mel_weight: NonNegativeFloat = field(
        2e-5, "weight of the distance of mel spectra (paper: 1)", stages=CODEC
    )
    wave_weight: NonNegativeFloat = field(
        10.0, "weight of the L1 distance of waves, EnCodec Eq. 1 (paper: 0)", stages=CODEC
    )
    commitment_weight: NonNegativeFloat = field(
        0.25, "weight of the distance of frames to their codes", stages=CODEC
    )
    # Discriminators of the codec
    discriminator_start: NonNegativeInt = field(
        1010, "first step with discriminators (paper: 0)", stages=CODEC, fixed=True
    )
    adversarial_weight: NonNegativeFloat = field(
        0.1, "weight of the hinge loss (paper: 1)", stages=CODEC
    )
    feature_weight: NonNegativeFloat = field(
        10.0, "weight of feature matching (paper: 100)", stages=CODEC
    )
    # R1 (Mescheder et al. 2018) keeps training with small batches stable.
    r1_weight: NonNegativeFloat = field(
        10.0, "weight of the R1 gradient penalty (paper: 0)", stages=CODEC
    )
    r1_every: PositiveInt = field(
        4,
        "steps between R1 penalties; the weight is not multiplied by it",
        stages=CODEC,
        needs="r1_weight",
    )
    discriminator_channels: Size = field(
        4, "channels of their first layers; of spectra twice as many", stages=CODEC, fixed=True
    )
    stft_window: Annotated[Size, ("a multiple of 128", lambda size: size % 128 == 0)] = field(
        512, "window of the STFT discriminator, in samples", stages=CODEC, fixed=True
    )
    discriminator_lr: PositiveFloat = field(3e-4, "their peak learning rate", stages=CODEC)
    discriminator_warmup_steps: NonNegativeInt = field(
        20, "steps of their linear warm-up, from their start on", stages=CODEC
    )
    discriminator_max_grad_norm: NonNegativeFloat = field(
        5.0, "clip their gradients to this norm; 0: no clipping", stages=CODEC
    )
    # Semantic tokens
    tokenizer: str = field(
        "kmeans",
        "kmeans of MFCC, or hf:MODEL:LAYER (HuBERT, WavLM, w2v-BERT 2.0)",
        stages=SEMANTIC,
        fixed=True,
    )
    clusters: Size = field(
        12, "semantic tokens; speech needs more, such as 100", stages=SEMANTIC, fixed=True
    )
    # Token transformers
    width: Size = field(128, "width of the transformer", stages=TOKENS, fixed=True)
    depth: Layers = field(4, "transformer blocks", stages=TOKENS, fixed=True)
    heads: Size = field(4, "attention heads", stages=TOKENS, fixed=True)
    dropout: Fraction = field(0.1, "dropout in attention and feed-forward", stages=TOKENS)  # §IV-A
    coarse_quantizers: Size = field(
        2, "quantizers that coarse predicts; fine predicts the rest", stages=COARSE_FINE, fixed=True
    )
    codec_quantizers: NonNegativeInt = field(
        0, "first quantizers of the codec to use; 0: all", stages=COARSE_FINE, fixed=True
    )
    max_text_len: SizeOrZero = field(
        24, "longest transcript in tokens, longer is cut, 0: no text", stages=SEMANTIC, fixed=True
    )
    text_drop: Fraction = field(
        0.1, "probability of dropping the text, for guidance", stages=SEMANTIC, needs="max_text_len"
    )
    # Optimization
    steps: PositiveInt = field(1000, "optimizer steps")
    batch_size: PositiveInt = field(64, "samples a step, over all ranks", fixed=True)
    lr: PositiveFloat = field(1e-3, "peak learning rate")
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay to 0 along half a cosine after the warm-up")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: Muon for matrices, AdamW for the rest", fixed=True
    )
    weight_decay: NonNegativeFloat = field(0.01, "decoupled weight decay of matrices and kernels")
    beta1: Decay = field(0.9, "Adam's decay of the mean of gradients")
    beta2: Decay = field(0.99, "Adam's decay of the mean of squared gradients")
    eps: PositiveFloat = field(1e-8, "Adam's epsilon")
    max_grad_norm: NonNegativeFloat = field(1.0, "clip gradients to this norm; 0: no clipping")
    ema_decay: Fraction = field(0.9999, "decay of the averaged weights; 0: no averaging")
    ema_update_after: NonNegativeInt = field(0, "first steps in which the average is a copy")
    ema_update_every: PositiveInt = field(1, "steps between updates of the average")
    # Evaluation
    online_samples: bool = field(
        False, "also make the sounds of an evaluation with the online weights", stages=SOUNDS
    )
    temperature: NonNegativeFloat = field(
        0.7, "temperature of sampling; 0: the most probable code", stages=TOKENS
    )
    eval_every: NonNegativeInt = field(500, "steps between evaluations; 0: only the last")
    eval_samples: NonNegativeInt = field(192, "most held-out samples of an evaluation; 0: all")

    def __post_init__(self):
        super().__post_init__()
        tracker.check(self)
        # Rotary positions turn pairs of the numbers of a head.
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(
                f"--heads: --width {self.width} must be an even multiple of --heads {self.heads}"
            )
        if self.stage == "soundstream" and not self.soundstream:  # else no codec is trained
            self.check_codec()

    def check_codec(self):
        """UserError if the crops or the steps of the codec are too short."""
        crop = self.crop_length
        # The STFT discriminator halves the frames three times.
        if self.discriminator_start < self.steps and crop < 1.75 * self.stft_window:
            raise UserError(
                f"--seconds: {crop} samples are too short for a discriminator of --stft_window "
                f"{self.stft_window}; expected 1.75 windows or more"
            )
        # Then the run would end without codebooks.
        if self.steps <= self.quantizer_start and not self.init_from:
            raise UserError(
                f"--steps {self.steps}: there are no codebooks before --quantizer_start "
                f"{self.quantizer_start}"
            )

    @property
    def crop_length(self):
        """Length of a training crop in samples."""
        return self.crop_samples or round(self.seconds * self.sample_rate)


# Defaults that differ by stage, and named settings for one stage.
TRANSFORMER = dict(seconds=1.2, batch_size=64, lr=3e-3, ema_decay=0.98)  # of all token stages
STAGES = {
    "soundstream": dict(
        steps=1050,
        batch_size=16,
        lr=2e-3,
        weight_decay=0.0,  # so AdamW is Adam
        beta1=0.8,
        beta2=0.99,
        max_grad_norm=5.0,
        ema_decay=0.99,
        eval_samples=96,
    ),
    "semantic": dict(TRANSFORMER, steps=300),
    # In the same time Muon reaches a higher text_heard than Adam, which AudioLM uses.
    "coarse": dict(TRANSFORMER, steps=620, optimizer="muon", lr=6e-3),
    "fine": dict(TRANSFORMER, seconds=0.4, steps=150),
}
# Of all presets.
LARGE = dict(
    lr=1e-4,
    steps=1_000_000,
    warmup_steps=1_000,
    cosine=False,  # the papers name no decay
    ema_decay=0.9999,  # the papers have no EMA
    validation=0.01,
    test=0.01,
    log_every=100,
    eval_every=10_000,
    save_every=2_000,
    workers=4,
)
# Of the three token stages.
AUDIOLM = dict(
    LARGE,
    sample_rate=16_000,
    clusters=1024,
    width=1024,  # §IV-A
    depth=12,
    heads=16,
    coarse_quantizers=4,  # Q' of Q = 12
    batch_size=256,
    chunk_size=8,  # a crop of 30 s is 1,500 tokens
    optimizer="adamw",
    lr=3e-4,
    warmup_steps=4_000,
    precision="bf16",
)
PRESETS = {
    # SoundStream §III. Batch, crop, learning rates and commitment weight are not in the paper.
    "soundstream-24khz": dict(
        LARGE,
        stage="soundstream",
        sample_rate=24_000,
        channels=32,  # C_enc and C_dec (§III-A)
        latent_dim=512,  # D
        num_quantizers=8,  # of 10 bits each: 6 kbit/s at 75 frames a second
        codebook_size=1024,  # K
        codebook_decay=0.99,  # §III-C
        dead_code_threshold=2.0,  # §III-C
        quantizer_start=0,  # k-means before the first step (§III-C)
        mel_weight=1.0,  # λ_rec (§III-E)
        wave_weight=0.0,  # not in the paper
        commitment_weight=1.0,
        discriminator_start=0,
        adversarial_weight=1.0,  # λ_adv
        feature_weight=100.0,  # λ_feat
        r1_weight=0.0,  # not in the paper
        discriminator_channels=16,  # over waves; 32 over spectra
        stft_window=1024,  # W; the hop is W / 4
        discriminator_lr=1e-4,
        discriminator_warmup_steps=1_000,
        seconds=1.0,
        batch_size=64,
        chunk_size=16,
        beta1=0.5,  # Adam's; low, as in many GANs
        beta2=0.9,
    ),
    # AudioLM §IV-A: 12 layers, 16 heads, width 1024; crops of 30, 10 and 3 s; 1M steps of 256.
    # §IV-B: temperatures. Learning rates are not in the paper. Its codec is the preset above with
    # --sample_rate 16000 and --num_quantizers 12. Its semantic tokens are of layer 7 of w2v-BERT
    # XL, 25 a second. That model is not published. Here they are of w2v-BERT 2.0, 50 a second.
    "audiolm-semantic": dict(
        AUDIOLM,
        stage="semantic",
        seconds=30.0,
        temperature=0.6,
        tokenizer="hf:facebook/w2v-bert-2.0:7",  # layer 7, as in the paper
    ),
    "audiolm-coarse": dict(AUDIOLM, stage="coarse", seconds=10.0, temperature=0.8),
    "audiolm-fine": dict(AUDIOLM, stage="fine", seconds=3.0, temperature=0.6),
}

BUILTIN_ROWS = 6_000  # recordings of the built-in syllables
MAX_CHUNK_SIZE = 64  # most recordings in one forward pass, where --chunk_size is 0
EVAL_SECONDS = 1.0  # length of the codec's crops and of continuations in evaluation
EVAL_BATCH = 48  # recordings to continue at a time
NUM_SOUNDS = 2  # recordings that an evaluation writes as WAV and PNG
PROMPT_SECONDS = 0.4  # length of the prompts in evaluation
MAX_TEXT_SECONDS = 2.0  # longest sound of a text of the built-in data
MIN_VOICE_SECONDS = 0.2  # shortest sound whose voice is scored
TEXT_WORDS = 320  # words with a token of their own; others are spelled
TEXT_DEPTH = 2  # blocks of the text encoder
TOKENIZER_FILE = "kmeans.pt"  # in the folder of the semantic run


# Part 1: SoundStream

# Model (SoundStream §III-A, §III-B)


class CausalConv(nn.Conv1d):
    """Convolution that sees no later input: (B, C, T) -> (B, C', T / stride)."""

    def forward(self, x):
        field_of_view = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        return super().forward(F.pad(x, (field_of_view - self.stride[0], 0)))


class CausalUpsample(nn.ConvTranspose1d):
    """Transposed convolution with a kernel of two strides, trimmed to be causal.

    (B, C, T) -> (B, C', T · stride)
    """

    def forward(self, x):
        silence = torch.zeros_like(x[..., :1])
        x = super().forward(torch.cat([silence, x], dim=2))  # as if silence came before
        return x[..., self.stride[0] : -self.stride[0]]  # without what needs later inputs


class ResidualUnit(nn.Module):
    """Dilated convolution of kernel 7, then one of kernel 1 (SoundStream, Fig. 3)."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x):
        return x + self.conv2(F.elu(self.conv1(F.elu(x))))


def residual_units(channels):
    return [ResidualUnit(channels, dilation) for dilation in (1, 3, 9)]


class SoundStream(nn.Module):
    """Waves -> codes -> waves (SoundStream §III, Fig. 3).

    T samples become ceil(T / hop_length) frames of Q codes each. It is causal by frame: later
    samples change nothing in earlier frames.
    """

    def __init__(self, cfg):
        super().__init__()
        self.sample_rate = cfg.sample_rate
        self.hop_length = math.prod(cfg.strides)
        self.num_quantizers = cfg.num_quantizers
        self.codebook_size = cfg.codebook_size

        # The decoder mirrors the encoder, so it is built from its end.
        channels = cfg.channels  # doubled by each stride
        encoder = [CausalConv(1, channels, 7)]  # a wave has one channel
        decoder = [nn.ELU(), CausalConv(channels, 1, 7)]
        for stride in cfg.strides:
            downsample = CausalConv(channels, 2 * channels, 2 * stride, stride)
            upsample = CausalUpsample(2 * channels, channels, 2 * stride, stride)
            encoder += [*residual_units(channels), nn.ELU(), downsample]
            decoder = [nn.ELU(), upsample, *residual_units(channels), *decoder]
            channels *= 2
        self.encoder = nn.Sequential(*encoder, nn.ELU(), CausalConv(channels, cfg.latent_dim, 3))
        self.decoder = nn.Sequential(CausalConv(cfg.latent_dim, channels, 7), *decoder)
        self.quantizer = ResidualQuantizer(
            cfg.latent_dim,
            cfg.num_quantizers,
            cfg.codebook_size,
            cfg.codebook_decay,
            cfg.dead_code_threshold,
            cfg.quantizer_dropout,
        )
        self.apply(self.initialize)

    @staticmethod
    def initialize(layer):
        """Keep the variance (LeCun et al. 1998, §4.6). A residual unit starts as the identity."""
        if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
            taps = layer.kernel_size[0]
            if isinstance(layer, nn.ConvTranspose1d):
                taps //= layer.stride[0]  # an output sees so many inputs
            nn.init.normal_(layer.weight, std=(layer.in_channels * taps) ** -0.5)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, ResidualUnit):
            nn.init.zeros_(layer.conv2.weight)

    def encode_latents(self, wave):
        """Frames (B, ceil(T / hop_length), D) of waves (B, T)."""
        x = F.pad(wave, (0, -wave.shape[1] % self.hop_length))  # silence up to a whole frame
        return self.encoder(x[:, None]).transpose(1, 2)  # (B, frames, D)

    def decode_latents(self, latents):
        """Waves (B, T · hop_length) of frames (B, T, D), in fp32."""
        return self.decoder(latents.transpose(1, 2))[:, 0].float()  # (B, T), the only channel

    def forward(self, wave):
        """(reconstruction (B, T), commitment loss) of waves (B, T)."""
        quantized, _, commitment = self.quantizer(self.encode_latents(wave))  # (B, frames, D)
        return self.decode_latents(quantized)[:, : wave.shape[1]], commitment

    @torch.no_grad()
    def encode(self, wave):
        """Codes (B, frames, Q) of waves (B, T)."""
        return self.quantizer.encode(self.encode_latents(wave))

    @torch.no_grad()
    def decode(self, codes):
        """Waves (B, frames · hop_length) of codes (B, frames, n) of the first n quantizers."""
        return self.decode_latents(self.quantizer.decode(codes))


# Discriminators (SoundStream §III-D)


class WaveDiscriminator(nn.Module):
    """Strided, grouped convolutions over a wave (MelGAN, Kumar et al. 2019, Table 1b).

    downsample: the wave is averaged to 1 / downsample of its rate first.
    """

    def __init__(self, channels, downsample):
        super().__init__()
        self.pool = nn.Identity()
        if downsample > 1:
            self.pool = nn.AvgPool1d(
                2 * downsample, downsample, downsample // 2, count_include_pad=False
            )
        self.layers = nn.ModuleList([nn.Conv1d(1, channels, 15, padding=7)])
        # Channels grow four times a layer, to at most 64 times.
        widths = [channels * mult for mult in (1, 4, 16, 64, 64)]
        for narrow, wide in itertools.pairwise(widths):
            groups = max(1, narrow // 4)  # of four channels each
            self.layers.append(nn.Conv1d(narrow, wide, 41, stride=4, padding=20, groups=groups))
        self.layers.append(nn.Conv1d(widths[-1], widths[-1], 5, padding=2))
        self.out = nn.Conv1d(widths[-1], 1, 3, padding=1)

    def forward(self, wave):
        """Scores (B, T') of waves (B, T), higher for real ones, and the features of every layer."""
        x = self.pool(wave[:, None])  # (B, 1, T)
        features = []  # for feature matching
        for layer in self.layers:
            # MelGAN has a slope of 0.2, and weight norm.
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)  # (B, C, T')
        return self.out(x)[:, 0], features


class STFTUnit(nn.Module):
    """Residual unit over (B, C, F, T) that halves F, and also T if `stride` says so."""

    def __init__(self, channels, out_channels, stride):
        super().__init__()
        kernel = (stride[0] + 2, stride[1] + 2)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, out_channels, kernel, stride, padding=1)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride)

    def forward(self, x):
        h = self.conv2(F.leaky_relu(self.conv1(x), 0.1))  # (B, C', F / 2, T or T / 2)
        shortcut = self.shortcut(x)[..., : h.shape[3]]  # an odd T leaves one frame more
        return F.leaky_relu(h + shortcut, 0.1)


class STFTDiscriminator(nn.Module):
    """Residual units over the short-time Fourier transform (SoundStream §III-D, Fig. 4).

    Its real and imaginary parts are two channels. The paper names no activation and no shortcut:
    here a leaky ReLU, as over waves, and a strided convolution of kernel 1.
    """

    def __init__(self, channels, window):
        super().__init__()
        self.window = window
        self.conv_in = nn.Conv2d(2, channels, 7, padding=3)  # real and imaginary part
        self.units = nn.ModuleList()
        widths = [channels * mult for mult in (1, 2, 4, 4, 8, 8, 16)]
        for i, (narrow, wide) in enumerate(itertools.pairwise(widths)):
            # Frequencies are halved by each unit, times by every second one.
            stride = (2, 1 + i % 2)  # over frequency and time
            self.units.append(STFTUnit(narrow, wide, stride))
        self.out = nn.Conv2d(widths[-1], 1, (window // 128, 1))  # over all remaining frequencies
        self.register_buffer("hann", torch.hann_window(window), persistent=False)

    def spectrum(self, wave):
        """Real and imaginary parts (B, 2, F, T') of waves (B, T), F = window / 2, in fp32."""
        with torch.autocast(wave.device.type, enabled=False):
            x = torch.stft(
                wave.float(),
                self.window,
                self.window // 4,
                window=self.hann,
                return_complex=True,
            )
            x = x[:, :-1]  # without the highest frequency
            # Real convolutions over two channels, as in the paper, not complex ones.
            return torch.view_as_real(x).permute(0, 3, 1, 2)

    def forward(self, wave):
        """Scores (B, T' / 8) of waves (B, T), higher for real ones, and features of every unit."""
        x = F.leaky_relu(self.conv_in(self.spectrum(wave)), 0.1)  # (B, C, F, T')
        features = [x]
        for unit in self.units:
            x = unit(x)
            features.append(x)
        return self.out(x).flatten(1), features  # (B, T' / 8)


def make_discriminators(cfg):
    """Three wave discriminators, at 1, 1/2 and 1/4 of the rate, and one STFT discriminator."""
    channels = cfg.discriminator_channels
    return nn.ModuleList(
        [
            WaveDiscriminator(channels, downsample=1),
            WaveDiscriminator(channels, downsample=2),
            WaveDiscriminator(channels, downsample=4),
            STFTDiscriminator(2 * channels, cfg.stft_window),
        ]
    )


# Losses (SoundStream §III-E)


def spectral_distance(fake, real, sample_rate):
    """Distance (B,) of mel spectra of waves (B, T) at windows s = 64, 128, ... 2048 (Eq. 4, 5).

    L1 plus sqrt(s / 2) times the L2 norm of the logarithms, over 64 mel bins, summed over windows
    and over frames, s / 4 samples apart: a crop twice as long has twice this loss.

    The paper gives no scale of its spectra. Here a sine of amplitude a has the magnitude a, which
    is s / 4 times smaller than that of an FFT. So --mel_weight 1 is not the paper's 1.
    """
    total = 0
    for exponent in range(6, 12):
        window = 2**exponent  # s of Eq. 4
        filters = recordings.mel_filters(sample_rate, window, 64, device=real.device)
        x = recordings.stft_magnitude(fake, window, window // 4) @ filters  # (B, frames, 64)
        y = recordings.stft_magnitude(real, window, window // 4) @ filters
        difference = x.clamp(min=1e-3).log() - y.clamp(min=1e-3).log()
        log_distance = (difference.square().sum(2) + 1e-8).sqrt()  # with a finite gradient at 0
        distance = (x - y).abs().sum(2) + (window / 2) ** 0.5 * log_distance  # (B, frames)
        total = total + distance.sum(1)  # (B,)
    return total


def reconstruction_loss(cfg, fake, real, commitment):
    """Reconstruction part of the codec's loss for waves (B, T), in fp32."""
    with torch.autocast(real.device.type, enabled=False):
        fake = fake.float()  # (B, T)
        loss = cfg.commitment_weight * commitment.float()
        loss = loss + cfg.wave_weight * (fake - real).abs().mean()  # EnCodec Eq. 1
        return loss + cfg.mel_weight * spectral_distance(fake, real, cfg.sample_rate).mean()


def adversarial_loss(cfg, discriminators, fake, real):
    """The codec's hinge loss (Eq. 2) and L1 feature matching (Eq. 3).

    Both are averaged over discriminators; distances of features first over layers.

    The discriminators are frozen meanwhile: the codec's step must not leave gradients in them.
    """
    discriminators.requires_grad_(False)
    hinges = []
    distances = []
    # Real features are targets; gradients reach the codec through the fake ones.
    for discriminator in discriminators:
        with torch.no_grad():
            _, real_features = discriminator(real)  # targets, without a gradient
        score, fake_features = discriminator(fake)
        hinges.append(F.relu(1 - score.float()).mean())
        layers = []
        for fake_layer, real_layer in zip(fake_features, real_features):
            layers.append(F.l1_loss(fake_layer.float(), real_layer.float()))
        distances.append(torch.stack(layers).mean())  # one discriminator counts like another
    discriminators.requires_grad_(True)
    hinge_loss = torch.stack(hinges).mean()
    feature_loss = torch.stack(distances).mean()
    return cfg.adversarial_weight * hinge_loss + cfg.feature_weight * feature_loss


def discriminator_loss(discriminators, fake, real, r1_weight=0.0):
    """The discriminators' hinge loss (Eq. 1) for waves (B, T), a mean over them.

    With r1_weight it has the R1 penalty, too: the squared norm of a sample's gradient at real waves
    (Mescheder et al. 2018, Eq. 9).
    """
    # Detached: no gradient reaches the codec. It is not run again, so the codebooks' statistics
    # count every sample once.
    hinges = []
    for discriminator in discriminators:
        score, _ = discriminator(torch.cat([real, fake.detach()]))
        real_score, fake_score = score.float().chunk(2)  # (B, T') each
        hinges.append(F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean())
    loss = torch.stack(hinges).mean()
    if not r1_weight:
        return loss

    real = real.detach().requires_grad_()  # gradients are taken at the waves
    penalties = []
    with torch.autocast(real.device.type, enabled=False):  # fp16 would overflow at any loss scale
        for discriminator in discriminators:
            score, _ = discriminator(real)
            (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)  # (B, T)
            penalties.append(gradient.square().sum(1).mean())
    return loss + r1_weight * torch.stack(penalties).mean()


# Data and sounds of both parts


def open_recordings(cfg, seconds=0.0):
    """[recordings of cfg.data, those of cfg.val_data if given], with crops of so many seconds."""
    crop = round(seconds * cfg.sample_rate)
    hop_length = math.prod(cfg.strides)
    datasets = []
    for path in (cfg.data, cfg.val_data):
        if path == "syllables":
            dataset = recordings.Syllables(BUILTIN_ROWS, crop, hop_length, cfg.sample_rate)
            datasets.append(dataset)
        elif path:
            dataset = recordings.Recordings(
                path, cfg.sample_rate, crop, hop_length, cfg.speaker_pattern
            )
            datasets.append(dataset)
    return datasets


def open_stage(given, seconds=0.0):
    """(config of a stage's run, {split: (recordings, indices)}). Collective."""
    cfg = dataclasses.replace(given, run_dir=str(Path(given.run_dir) / given.stage))
    cfg = dist.on_main(lambda: loop.with_chunk_size(store.fetch_files(cfg), MAX_CHUNK_SIZE))
    datasets = dist.run_together(lambda: open_recordings(cfg, seconds))
    return cfg, data.splits(datasets[0], cfg, *datasets[1:])


def write_sound(wave, sample_rate, path):
    """Write a wave (T,) to a .wav file, and its spectrogram beside it as .png."""
    with checkpoint.atomic_write(path) as file:
        recordings.write_wav(file, wave, sample_rate)
    with checkpoint.atomic_write(Path(path).with_suffix(".png")) as file:
        media.write_png(file, recordings.spectrogram(wave, sample_rate))


@torch.no_grad()
def write_sounds(sounds, cfg, name):
    """Rank 0 writes `sounds` as samples/NAME_*: {file in the run folder: caption}.

    sounds: iterator over (number, wave (T,), caption), which only rank 0 runs.
    """
    files = {}
    # The iterator is lazy, so the other ranks make no sounds.
    if not dist.is_main():
        return files
    for number, wave, caption in sounds:
        path = f"samples/{name}_{number}"
        write_sound(wave, cfg.sample_rate, Path(cfg.run_dir) / f"{path}.wav")
        files |= {f"{path}.wav": caption, f"{path}.png": caption}
    return files


# Evaluation of both parts


class Means:
    """Means of metrics over all ranks, from sums over samples or tokens."""

    def __init__(self):
        self.sums = collections.defaultdict(float)
        self.counts = collections.defaultdict(float)

    def add(self, name, value_sum, count=1):
        self.sums[name] += value_sum
        self.counts[name] += count

    def result(self):
        """{name: mean}. Collective."""
        sums = dist.total_by_name(self.sums)
        counts = dist.total_by_name(self.counts)
        return {name: value_sum / counts[name] for name, value_sum in sums.items()}


def code_entropies(codes, size):
    """(entropy (Q,) in nats, count (Q,)) of each quantizer's codes, over all ranks. Collective.

    codes: list of (N, Q), each code below `size`, or -100 for none.
    """
    counts = []
    for column in torch.cat(codes).T:
        counts.append(torch.bincount(column[column >= 0], minlength=size))
    # Sum over ranks before taking the entropy, which is not additive.
    counts = torch.stack(counts)  # (Q, size)
    counts = torch.tensor(dist.total(counts.flatten().tolist())).view(counts.shape)
    frequencies = counts / counts.sum(1, keepdim=True)  # (Q, size)
    return torch.special.entr(frequencies).sum(1), counts.sum(1)


@torch.no_grad()
def evaluate_weights(state, name, splits, device, evaluate, sounds):
    """(metrics, samples) of the split `name`, with averaged weights. Collective.

    In validation also the loss with the online weights, and, if cfg asks for them, their sounds.
    evaluate(model, cfg, split, device): {metric: value}. sounds(model, cfg, split, device): see
    `write_sounds`.
    """
    model = state.modules["model"]
    cfg = state.cfg
    inputs = (model, cfg, splits[name], device)
    validation = name == "validation"
    prefix = f"step_{state.step:08d}" if validation else "test"
    with_sounds = not validation or state.step < cfg.steps  # else those of the test are next
    metrics = {}
    samples = {}
    # In training mode dropout acts, and the codebooks gather statistics.
    model.eval()
    if validation:
        metrics["loss_online"] = evaluate(*inputs)["loss"]
    if with_sounds and cfg.online_samples:
        samples |= write_sounds(sounds(*inputs), cfg, f"{prefix}_online")
    with state.ema.applied(model):
        metrics |= evaluate(*inputs)
        if with_sounds:
            samples |= write_sounds(sounds(*inputs), cfg, prefix)
    model.train()
    if validation:
        val_names = ("loss_online", "loss", "accuracy")
        # The others have the same names in validation and test.
        metrics = {f"val_{n}" if n in val_names else n: value for n, value in metrics.items()}
    return metrics, samples


# Evaluation of the codec


@torch.no_grad()
def evaluate_codec(codec, cfg, split, device):
    """Mean reconstruction loss, quality of sound by number of quantizers, use of the codebooks.

    split: (dataset, indices).
    """
    bitrates = [2**i for i in range(8) if 2**i < cfg.num_quantizers]  # 1, 2, 4, … quantizers
    bitrates.append(cfg.num_quantizers)
    means = Means()
    codes_seen = [torch.zeros(0, cfg.num_quantizers, dtype=torch.long)]
    for _, batch in data.batches(*split, cfg.eval_samples, cfg.chunk_size):
        real = batch["wave"].to(device)  # (B, T), silence behind short recordings
        size, length = real.shape
        real_mel = recordings.log_mel(real, cfg.sample_rate, window=1024, hop=256, bins=64)
        # Spectra are in fp32; only the networks run in the precision of training.
        with amp.autocast(device, cfg.precision):
            codes = codec.encode(real)  # (B, frames, Q)
        for n in bitrates:
            with amp.autocast(device, cfg.precision):
                fake = codec.decode(codes[..., :n])[:, :length]
            fake_mel = recordings.log_mel(fake, cfg.sample_rate, window=1024, hop=256, bins=64)
            distance = (fake_mel - real_mel).abs().mean((1, 2))  # (B,)
            means.add(f"mel_distance@{n}", distance.sum().item(), size)
            means.add(f"si_sdr_db@{n}", recordings.si_sdr(fake, real).sum().item(), size)
        # `fake` is now of all quantizers.
        loss = reconstruction_loss(cfg, fake, real, commitment=torch.zeros((), device=device))
        means.add("loss", loss.item() * size, size)
        # Codes of the silence behind a short recording do not count.
        frames = -(-batch["length"][:, None] // codec.hop_length)  # rounded up
        codes_seen.append(codes.cpu()[torch.arange(codes.shape[1]) < frames])

    metrics = means.result()
    entropies, _ = code_entropies(codes_seen, cfg.codebook_size)
    for q, perplexity in enumerate(entropies.exp().tolist(), 1):
        metrics[f"codebook_perplexity@{q}"] = perplexity
    return metrics


def reconstructions(codec, cfg, split, device):
    """Yield (number, wave (T,), caption) of the first recordings and of their reconstructions."""
    dataset, indices = split
    readable, waves = dataset.load_usable(indices[:NUM_SOUNDS])
    for number, (index, wave) in enumerate(zip(readable, waves)):
        yield f"{number}_real", wave, dataset.name(index)
        fake, _ = codec(wave[None].to(device))
        yield f"{number}", fake[0].cpu(), dataset.name(index)


# Training of the codec


@torch.no_grad()
def initialize_codebooks(codec, cfg, crops, indices, device):
    """k-means on frames of training crops, by rank 0: the same on any number of ranks."""
    if codec.quantizer.ready:  # by --init_from, or this step is tried again after an overflow
        return
    chunks = data.ChunkDataset(crops, indices, accumulate.derive_seed(cfg.seed, "codebooks"))
    frames = torch.zeros(0, cfg.latent_dim, device=device)
    start = 0
    # As many frames as k-means needs: 32 for each code.
    while dist.is_main() and len(frames) < 32 * cfg.codebook_size:
        wave = chunks[start, start + cfg.chunk_size]["wave"].to(device)
        new = codec.encode_latents(wave).flatten(0, 1).float()  # (B · frames, D)
        frames = torch.cat([frames, new])
        start += cfg.chunk_size
    # Collective: the others get the codebooks of rank 0.
    codec.quantizer.initialize(frames, accumulate.derive_seed(cfg.seed, "kmeans"))


def train_soundstream(given, device):
    """Train the codec."""
    started = time.monotonic()

    # Open the data, on all ranks. Then rank 0 takes the run folder.
    cfg, splits = open_stage(given, EVAL_SECONDS)
    dataset, indices = splits["train"]
    # The same recordings, in the shorter crops of training.
    crops = copy.copy(dataset)
    crops.crop = cfg.crop_length
    run = loop.open_run(cfg, dataset)
    if run.finished:
        return loop.announce_finished(cfg, run)

    # Build codec, discriminators, their optimizers and the EMA. Restore them if resuming.
    # The same start on all ranks.
    accumulate.seed_all(cfg.seed, "weights")
    codec = SoundStream(cfg).to(device)  # encoder, quantizer, decoder
    discriminators = make_discriminators(cfg).to(device)  # unused before discriminator_start
    # Two networks, two optimizers, one gradient scaler.
    betas = (cfg.beta1, cfg.beta2)
    optimizers = optim.make(codec, cfg.optimizer, cfg.lr, cfg.weight_decay, betas, cfg.eps)
    discriminator_optimizers = optim.make(
        discriminators, "adamw", cfg.discriminator_lr, 0.0, betas, cfg.eps
    )
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(codec, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    state = checkpoint.State(
        cfg,
        {"model": codec, "discriminators": discriminators},
        ema,
        [*optimizers, *discriminator_optimizers],
        scaler,
        run.identity,
        {"kind": "soundstream", "metadata": store.metadata(cfg)},
    )
    loop.resume(run, state)  # or take the weights of --init_from
    if cfg.compile:
        codec.compile()

    # The order of samples follows from seed and step. Write config.json and open the logger.
    plan, batches = loop.batches(cfg, crops, indices, state.step, device)
    log = loop.begin(run, state, given, f"{len(dataset):,} recordings", device)

    # A signal to any rank ends the loop: `progress` saves first.
    progress = loop.Progress(run, state, log, "soundstream", crops)
    with log, dist.stop_signals, progress:
        codec.train()
        stepped = True
        while True:
            dist.stop_signals.check()

            # Log; evaluate and save when they are due.
            if progress.log_due():
                progress.log_line()  # synchronizes ranks and GPU
                # Before k-means there are no codes, so that codec cannot be the best one.
                if progress.eval_due and codec.quantizer.ready:
                    metrics, samples = evaluate_weights(
                        state, "validation", splits, device, evaluate_codec, reconstructions
                    )
                    progress.log_evaluation(metrics, samples)
                if progress.save_due:
                    run.save(state, log)
                progress.restart()
            if state.step >= cfg.steps:
                break

            # Set the learning rates. Codebooks and discriminators start when they are due.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if state.step == cfg.quantizer_start:
                initialize_codebooks(codec, cfg, crops, indices, device)
            adversarial = state.step >= cfg.discriminator_start
            if adversarial:
                discriminator_lr = schedule.learning_rate(
                    state.step - cfg.discriminator_start,
                    cfg.discriminator_lr,
                    cfg.discriminator_warmup_steps,
                    cfg.steps - cfg.discriminator_start,
                    cfg.cosine,
                )
                schedule.set_learning_rate(discriminator_optimizers, discriminator_lr)
            # Not multiplied by r1_every, unlike the lazy regularization of StyleGAN2.
            r1_weight = cfg.r1_weight if state.step % cfg.r1_every == 0 else 0.0

            # Take one optimizer step of the codec and, on the same fakes, of the discriminators.
            if stepped:  # an fp16 step that overflowed is tried again, on the same samples
                step_batches = [next(batches) for _ in plan]
            chunk_losses = []  # summed over the samples of a chunk
            step_discriminator_loss = torch.zeros((), device=device)
            for chunk, batch in zip(plan, step_batches):
                # All that is random in a chunk follows from (seed, step, chunk), on any rank.
                accumulate.seed_all(cfg.seed, state.step, chunk.index)
                real = batch["wave"].to(device, non_blocking=True)
                with amp.autocast(device, cfg.precision):
                    fake, commitment = codec(real)
                    loss = reconstruction_loss(cfg, fake, real, commitment)
                    if adversarial:
                        loss = loss + adversarial_loss(cfg, discriminators, fake, real)
                # Weights add up to 1 over a batch: the gradient is that of its mean loss.
                scaler.scale(loss * chunk.weight).backward()
                chunk_losses.append(loss.detach() * (chunk.stop - chunk.start))
                # The discriminators learn from the same fakes, before the codec moves.
                if adversarial:
                    with amp.autocast(device, cfg.precision):
                        loss = discriminator_loss(discriminators, fake, real, r1_weight)
                    scaler.scale(loss * chunk.weight).backward()
                    step_discriminator_loss += loss.detach() * (chunk.stop - chunk.start)
            modules = [codec]
            groups = [(optimizers, cfg.max_grad_norm)]
            if adversarial:  # both step or neither does; each has its own clipping norm
                modules.append(discriminators)
                groups.append((discriminator_optimizers, cfg.discriminator_max_grad_norm))
            dist.sum_gradients(*modules)
            grad_norms, stepped = amp.step(scaler, groups)
            codec.zero_grad(set_to_none=True)
            discriminators.zero_grad(set_to_none=True)
            if not stepped:  # a step that overflowed did not happen
                codec.quantizer.discard()  # its statistics, too
                progress.overflows += 1
                continue
            # Move the codebooks to the statistics of all ranks, and re-seed codes that are dead.
            codec.quantizer.update(accumulate.derive_seed(cfg.seed, "codes", state.step))
            state.step += 1
            ema.update(state.step)
            # The line of the log has the codec's loss and norm.
            progress.add(
                chunk_losses,
                grad_norms[0],
                step_batches,
                {"discriminator_loss": step_discriminator_loss},
            )

        # Test the averaged weights, and save them last of all.
        metrics, samples = evaluate_weights(
            state, "test", splits, device, evaluate_codec, reconstructions
        )
        results = loop.finish(run, state, log, metrics, samples)
    loop.announce_trained(cfg, results, started)


# The trained codec, as the token stages use it


class PublishedCodec:
    """EnCodec, DAC or Mimi by the package transformers, used like a SoundStream: hf:MODEL.

    MODEL is a name at huggingface.co or a folder. A wave is padded with silence to whole frames.
    """

    def __init__(self, spec, device):
        flag = f"--soundstream {spec}"
        name = spec.removeprefix("hf:")
        self.model = store.from_transformers(flag, name, ("encodec", "dac", "mimi")).to(device)
        settings = self.model.config
        # Refuse what this adapter does not do.
        channels = getattr(settings, "audio_channels", 1)
        if channels != 1:
            raise UserError(f"{flag}: a model of {channels} channels; expected one")
        if getattr(settings, "normalize", False) or getattr(settings, "chunk_length_s", None):
            raise UserError(
                f"{flag}: a model that normalizes chunks of sound; expected one that "
                "does not, such as hf:facebook/encodec_24khz"
            )
        # The three models name these in three ways.
        self.sample_rate = settings.sampling_rate
        self.hop_length = getattr(settings, "hop_length", 0)
        self.hop_length = self.hop_length or round(self.sample_rate / settings.frame_rate)
        self.codebook_size = settings.codebook_size
        self.num_quantizers = getattr(settings, "n_codebooks", 0) or settings.num_quantizers
        self.is_encodec = settings.model_type == "encodec"

        # The weights of a folder may change under the same name.
        files = sorted(Path(name).glob("*.safetensors"))
        self.checksum = " ".join(checkpoint.checksum(file)[:16] for file in files) or name

    @torch.no_grad()
    def encode(self, wave):
        """Codes (B, frames, Q) of waves (B, T)."""
        wave = F.pad(wave, (0, -wave.shape[1] % self.hop_length))[:, None]
        options = {}
        if self.is_encodec:
            # By default EnCodec takes its lowest bitrate.
            options["bandwidth"] = max(self.model.config.target_bandwidths)
        codes = self.model.encode(wave, return_dict=True, **options).audio_codes
        codes = codes.flatten(0, -3)  # EnCodec's have an axis of chunks before the batch
        return codes.transpose(1, 2)[..., : self.num_quantizers]

    @torch.no_grad()
    def decode(self, codes):
        """Waves (B, frames · hop_length) of codes (B, frames, n) of the first n quantizers."""
        length = codes.shape[1] * self.hop_length
        codes = codes.transpose(1, 2)  # (B, n, frames), as the package has them
        if self.is_encodec:
            out = self.model.decode(codes[None], [None], return_dict=True)
        else:
            out = self.model.decode(audio_codes=codes, return_dict=True)
        wave = out.audio_values.flatten(1)  # (B, T), the only channel
        return F.pad(wave, (0, length - wave.shape[1]))  # DAC's is shorter where a stride is odd


class Codec:
    """A trained codec of which the first `num_quantizers` quantizers are used, 0 for all.

    model: SoundStream or PublishedCodec. checksum: of its weights. UserError if it has fewer.
    """

    def __init__(self, model, checksum, device, num_quantizers=0):
        if num_quantizers > model.num_quantizers:
            raise UserError(f"{num_quantizers} quantizers: the codec has {model.num_quantizers}")
        self.model = model
        self.device = device
        self.sample_rate = model.sample_rate
        self.hop_length = model.hop_length
        self.frame_rate = model.sample_rate / model.hop_length
        self.codebook_size = model.codebook_size
        self.num_quantizers = num_quantizers or model.num_quantizers
        self.checksum = checksum
        if self.num_quantizers < model.num_quantizers:  # other codes, so other caches and models
            self.checksum += f", {num_quantizers} quantizers"

    def encode(self, wave):
        """Codes (frames, Q) of a wave (T,), on the CPU."""
        codes = self.model.encode(wave[None].to(self.device))
        # Codes are residual: the first n do not depend on the others.
        return codes[0, :, : self.num_quantizers].cpu()

    def decode(self, codes):
        """The wave (frames · hop_length,) of codes (frames, n), on the CPU."""
        return self.model.decode(codes[None].to(self.device))[0].cpu()


def model_file(path, stage, name="model.pt", weights="ema"):
    """The file `name` of a stage's run, given the run folder or the file itself.

    With "online" weights it is the newest checkpoint. UserError if it is missing.
    """
    path = Path(path)
    file = path / name if path.is_dir() or not path.suffix else path
    # Only checkpoints have the online weights.
    if weights == "online" and name == "model.pt":
        file = max((path / "checkpoints").glob("step_*.pt"), default=file)
    if not file.is_file():
        raise UserError(
            f"{file}: missing; train it first (--stage {stage}), or name a run that has it"
        )
    return file


def load_codec(path, device, num_quantizers=0, name="model.pt", weights="ema"):
    """The Codec of a run folder, of a file or of hf:MODEL, in eval mode."""
    if path.startswith("hf:"):
        model = PublishedCodec(path, device)
        return Codec(model, model.checksum, device, num_quantizers)
    file = model_file(path, "soundstream", name, weights)
    cfg, state = checkpoint.read_model("soundstream", Config, file, weights)
    model = checkpoint.build(lambda: SoundStream(cfg), state, file, device).requires_grad_(False)
    return Codec(model, checkpoint.checksum(file)[:16], device, num_quantizers)


def codec_of(cfg, device):
    """The codec of the coarse and fine stages; UserError if it does not fit `cfg`."""
    path = cfg.soundstream or str(Path(cfg.run_dir).parent / "soundstream")
    codec = load_codec(path, device, cfg.codec_quantizers)
    if codec.sample_rate != cfg.sample_rate:
        raise UserError(
            f"--sample_rate: {cfg.sample_rate}, but the codec's is {codec.sample_rate}; give that"
        )
    if cfg.coarse_quantizers >= codec.num_quantizers:
        raise UserError(
            f"--coarse_quantizers: {cfg.coarse_quantizers}, but the codec has "
            f"{codec.num_quantizers}"
        )
    return codec


# Part 2: AudioLM

# Streams of tokens (AudioLM §III-C)


class Stream(NamedTuple):
    """A kind of tokens: frames of Q codes below K."""

    name: str
    num_quantizers: int  # Q
    codebook_size: int  # K


def make_streams(cfg, tokenizer, codec):
    """The streams of a stage's transformer. It predicts the last one from the one before it.

    tokenizer, codec: None if the stage has none of their tokens.
    """
    streams = []
    if tokenizer:
        streams.append(Stream("semantic", 1, tokenizer.kmeans.clusters))
    if codec:
        streams.append(Stream("coarse", cfg.coarse_quantizers, codec.codebook_size))
    if cfg.stage == "fine":
        num_quantizers = codec.num_quantizers - cfg.coarse_quantizers
        streams.append(Stream("fine", num_quantizers, codec.codebook_size))
    return streams


def stream_offsets(streams):
    """The first embedding row of each stream, and the number of rows.

    Row 0 is padding. A stream has a row for its start token, and Q · K for its codes.
    """
    offsets = [1]  # after padding
    for stream in streams:
        rows = 1 + stream.num_quantizers * stream.codebook_size  # the start token, the codes
        offsets.append(offsets[-1] + rows)
    return offsets


def build_sequence(streams, codes):
    """(embedding rows (N,) of the streams of a recording, position of the last stream's start).

    codes: for each stream (T, Q) int64. The coarse stage, with two frames of two quantizers after
    three semantic tokens; C01 is the code of frame 0 and quantizer 1, <s> and <c> are start tokens:

        position   0    1    2    3    4    5    6    7    8
        input     <s>  S0   S1   S2   <c>  C00  C01  C10  C11
        target                        C00  C01  C10  C11  EOS

    Code (t, q) is predicted at position start + t·Q + q, from all before it. EOS is class K of the
    first quantizer's head. It is the target after the last frame, only if the recording truly ends
    there (see `targets`). The row of a code is offset + 1 + q·K + code, so no two kinds of tokens
    share a row.
    """
    sequence = []
    for stream, offset, stream_codes in zip(streams, stream_offsets(streams), codes):
        start = sum(map(len, sequence))
        quantizer_offsets = torch.arange(stream.num_quantizers) * stream.codebook_size
        rows = offset + 1 + quantizer_offsets + stream_codes  # (T, Q)
        sequence += [torch.tensor([offset]), rows.flatten()]
    return torch.cat(sequence), start


def targets(stream, codes, ended):
    """Targets (T + 1, Q) from the start token on, for codes (T, Q); -100 is no target.

    The frame after the last one is EOS in its first quantizer if the recording `ended`.
    """
    target = F.pad(codes, (0, 0, 0, 1), value=-100)  # (T + 1, Q)
    if ended:
        target[-1, 0] = stream.codebook_size
    return target


# Model


class Lengths(NamedTuple):
    """What a transformer was trained on: its generation goes no further."""

    max_frames: int  # of the last stream
    max_context: int  # of the stream before it
    frame_rate: float  # frames of the last stream a second


class TokenTransformer(nn.Module):
    """A causal transformer over streams of tokens that predicts the last one.

    Each quantizer has its own embeddings, and its own output head over K codes and EOS. Only the
    first head predicts EOS. Text is not in AudioLM. It is a prefix, as in SPEAR-TTS (Kharitonov et
    al. 2023), and is dropped at times for guidance. Without a vocabulary the model takes no text.
    """

    def __init__(self, cfg, streams, lengths, vocabulary=()):
        super().__init__()
        self.cfg = cfg
        self.streams = streams
        self.lengths = lengths
        self.has_text = len(vocabulary) > 0
        self.offsets = stream_offsets(streams)  # of their embedding rows
        width = cfg.width
        self.embed = nn.Embedding(self.offsets[-1], width, padding_idx=0)  # of all streams
        nn.init.normal_(self.embed.weight[1:], std=width**-0.5)
        classes = streams[-1].codebook_size + 1  # with EOS
        heads = torch.randn(streams[-1].num_quantizers, classes, width)  # (Q, K + 1, D)
        self.heads = nn.Parameter(heads * 0.5 * width**-0.5)
        self.transformer = Transformer(width, cfg.depth, cfg.heads, dropout=cfg.dropout)
        if self.has_text:
            self.tokenizer = clip.Tokenizer(vocabulary)
            self.text_embed = nn.Embedding(len(self.tokenizer), width)
            self.text_encoder = Transformer(width, TEXT_DEPTH, cfg.heads, causal=False)
            self.null_text = learned_tokens(cfg.max_text_len, width)  # in place of a dropped text

    def condition(self, texts, drop):
        """Embeddings (B, L, D) of B texts, of "no text" where `drop` (B,) is true.

        With texts None they are all of "no text". None for a model without text.
        """
        if not self.has_text:
            return None
        null_text = self.null_text.weight
        if texts is None:
            return null_text.expand(len(drop), -1, -1)
        length = self.cfg.max_text_len
        tokens = torch.zeros(len(texts), length, dtype=torch.long)  # padded with 0
        for i, text in enumerate(texts):
            encoded = self.tokenizer.encode(text)[:length]
            tokens[i, : len(encoded)] = torch.tensor(encoded)
        x = self.text_encoder(self.text_embed(tokens.to(drop.device)))
        return torch.where(drop[:, None, None], null_text.to(x.dtype), x)  # (B, L, D)

    def run(self, inputs, condition):
        """(outputs (B, N, D), KV cache) at inputs (B, N) after a text prefix."""
        x = self.embed(inputs)  # (B, N, D)
        if condition is not None:
            x = torch.cat([condition.to(x.dtype), x], dim=1)  # (B, L + N, D)
        x, cache = self.transformer(x, return_cache=True)
        return x[:, -inputs.shape[1] :], cache

    def forward(self, batch, drop=None):
        """(cross-entropy summed, number of tokens, correct predictions) of each sample, (B,).

        batch: "inputs" (B, N), "start" (B,), "target" (B, T + 1, Q), as of `build_sequence` and
        `targets`, padded; "text" [B]. drop (B,): samples that go without their text.
        """
        inputs = batch["inputs"]
        target = batch["target"]
        if drop is None:
            drop = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        # Padding stands at the end, so the causal mask hides it.
        x, _ = self.run(inputs, self.condition(batch["text"], drop))
        frames, num_quantizers = target.shape[1:]
        positions = batch["start"][:, None] + torch.arange(frames * num_quantizers, device=x.device)
        positions = positions.clamp(max=x.shape[1] - 1)  # those beyond have no target
        x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))  # (B, (T + 1) · Q, D)
        x = x.unflatten(1, (frames, num_quantizers))  # (B, T + 1, Q, D)
        # Each quantizer has its own head; (B, T + 1, Q, K + 1).
        logits = torch.einsum("btqd,qkd->btqk", x, self.heads.to(x.dtype)).float()
        loss = F.cross_entropy(
            logits.flatten(0, 2), target.flatten(), ignore_index=-100, reduction="none"
        )
        loss = loss.view(target.shape).sum((1, 2))  # (B,)
        count = (target >= 0).sum((1, 2))  # (B,)
        correct = (logits.detach().argmax(-1) == target).sum((1, 2))
        return loss, count, correct


def transpose_linears(model):
    """Store the weights of linear layers by columns: a CPU then decodes 1.3 times as fast."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return model


# Generation (AudioLM §III-D)


class SamplingParams(NamedTuple):
    temperature: float = 1.0  # 0: the most probable code
    top_k: int = 0  # 0: all codes
    guidance_scale: float = 1.0  # 1: none


def sample_token(logits, uniform, sampling):
    """Codes (B,) sampled from logits (B, K) by random numbers `uniform` (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    classes = logits.shape[-1]
    k = min(sampling.top_k or classes, classes)  # 0 is all
    top_logits, codes = logits.topk(k, dim=-1)  # (B, k), from the most probable on
    # Inverse transform sampling; in fp64, as the sum of many fp32 numbers is not exactly 1.
    cumulative = (top_logits / sampling.temperature).softmax(-1).double().cumsum(-1)
    # The first code whose cumulative probability reaches the random number.
    index = (cumulative < uniform[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    return codes.gather(-1, index).squeeze(-1)


@torch.no_grad()
def generate(model, samples, num_frames, seeds, sampling, texts=None, may_end=True):
    """Generate up to `num_frames` frames of the last stream, or up to EOS.

    samples: for each of B samples, its streams' codes (T, Q); of the last stream, the prompt, which
    may be empty. seeds: B numbers; the random numbers of a sample come from its own alone.
    texts: B, or None. may_end: whether EOS is allowed, a bool or B of them.
    Returns B of (T, Q), with the prompt, and for each whether it came to EOS.
    """
    *_, stream = model.streams
    eos = stream.codebook_size  # class K of each head
    Q = stream.num_quantizers
    B = len(samples)
    device = model.embed.weight.device
    # Sequences end with what there is of the last stream, so the next code is predicted there.
    sequences = [build_sequence(model.streams, codes)[0] for codes in samples]
    guided = model.has_text and texts is not None and sampling.guidance_scale != 1
    if guided:  # a second half of the batch goes without the text
        sequences = sequences * 2
        texts = texts * 2
    without_text = torch.arange(len(sequences), device=device) >= B

    # One pass over the prompts fills the KV cache. x: the output at each sample's last input.
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    inputs = pad_sequence(sequences, batch_first=True).to(device)  # (B or 2B, N)
    outputs, cache = model.run(inputs, model.condition(texts, without_text))
    x = outputs[torch.arange(len(outputs), device=device), lengths - 1]  # (B or 2B, D)
    size = cache[0][0].shape[2]  # padded length, with the text prefix
    prefix = size - inputs.shape[1]
    kv_cache = KVCache(cache, prefix + lengths, size + num_frames * Q)

    # Random numbers are drawn for each sample alone, so they do not depend on the batch.
    uniform = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        uniform.append(torch.rand(num_frames, Q, generator=generator))
    uniform = torch.stack(uniform).to(device)  # (B, frames, Q)
    is_empty = torch.tensor([len(codes[-1]) == 0 for codes in samples], device=device)
    never_ends = ~torch.tensor(may_end, device=device).expand(B)
    generated = torch.zeros(B, num_frames, Q, dtype=torch.long, device=device)
    ends = torch.full((B,), num_frames, device=device)  # frames before EOS
    for i in range(num_frames * Q):
        t, q = divmod(i, Q)
        logits = F.linear(x, model.heads[q].to(x.dtype)).float()  # (B or 2B, K + 1)
        if guided:  # classifier-free guidance (Ho & Salimans 2022, Eq. 6)
            conditional, unconditional = logits.chunk(2)
            logits = diffusion.classifier_free_guidance(
                conditional, unconditional, sampling.guidance_scale
            )
        # EOS stands only where a frame would begin, and no recording is empty.
        no_eos = never_ends | (is_empty & (t == 0)) | (q > 0)
        logits[:, eos].masked_fill_(no_eos, -torch.inf)
        code = sample_token(logits, uniform[:, t, q], sampling)
        ends = torch.where((code == eos) & (ends == num_frames), t, ends)
        # Once a frame the host waits for the device, to see whether all have ended.
        if q == 0 and bool((ends <= t).all()):
            break
        code = code.clamp(max=eos - 1)  # samples that have ended go on, and are cut below
        generated[:, t, q] = code
        if i + 1 < num_frames * Q:
            # The new code is the next input, as in `build_sequence`.
            rows = model.offsets[-2] + 1 + q * stream.codebook_size + code
            if guided:
                rows = rows.repeat(2)  # the same code with and without the text
            x = model.transformer.step(model.embed(rows), kv_cache)  # (B or 2B, D)

    results = []
    ends = ends.tolist()
    for codes, new, end in zip(samples, generated.cpu(), ends):
        results.append(torch.cat([codes[-1], new[:end]]))
    return results, [end < num_frames for end in ends]  # EOS came before the last frame


def generate_long(model, condition_fn, tokens, goals, seeds, sampling, texts=None, may_end=True):
    """`generate` past the training length, in windows that overlap by half.

    tokens: B prompts (T_b, Q). goals: the most frames of each sample. condition_fn(b, past): the
    context of sample b (its earlier streams) for a window that begins after the frames `past`
    (T, Q). A window has at most the max_frames and the max_context of training. If it does not see
    all of the context, it may not end. Returns B of (T_b, Q).
    """
    max_frames = model.lengths.max_frames
    max_context = model.lengths.max_context
    tokens = [codes.cpu() for codes in tokens]
    ended = [False] * len(tokens)
    for number in itertools.count():
        active = []
        for b, codes in enumerate(tokens):
            if len(codes) < goals[b] and not ended[b]:
                active.append(b)
        if not active:
            return tokens

        samples = []
        rooms = []  # frames that each window may add
        window_may_end = []
        for b in active:
            start = 0
            if len(tokens[b]) >= max_frames:
                start = len(tokens[b]) - max_frames // 2  # the window is full: keep its later half
            window = tokens[b][start:]
            context = condition_fn(b, tokens[b][:start])  # of the time of the window
            samples.append([*(codes[:max_context] for codes in context), window])
            rooms.append(min(max_frames - len(window), goals[b] - len(tokens[b])))
            # If the context is cut, EOS is forbidden: the remaining context is for later windows.
            sees_all = all(len(codes) <= max_context for codes in context)
            window_may_end.append(may_end and sees_all)

        windows, came_to_eos = generate(
            model,
            samples,
            max(rooms),
            [accumulate.derive_seed(seeds[b], number) for b in active],
            sampling,
            texts and [texts[b] for b in active],
            window_may_end,
        )
        for i, b in enumerate(active):
            new = windows[i][len(samples[i][-1]) :]
            # All windows are as long as the longest: frames beyond the room do not count.
            ended[b] = came_to_eos[i] and len(new) < rooms[i]
            tokens[b] = torch.cat([tokens[b], new[: rooms[i]]])


# Data of the token transformers


class SemanticTokenizer(NamedTuple):
    kmeans: semantic.KMeans
    checksum: str  # of its file


def load_tokenizer(cfg, device):
    """The tokenizer of the semantic run."""
    run_dir = cfg.semantic or Path(cfg.run_dir).parent / "semantic"
    path = model_file(run_dir, "semantic", TOKENIZER_FILE)
    kmeans = semantic.load(checkpoint.load(path), path).to(device)
    return SemanticTokenizer(kmeans, checkpoint.checksum(path)[:16])


def fit_tokenizer(cfg, dataset, indices, device):
    """The tokenizer of this semantic run, fitted to training recordings. Collective.

    An earlier start of the run may have fitted it.
    """
    path = Path(cfg.run_dir) / TOKENIZER_FILE
    if not dist.on_main(path.exists):
        features = "mfcc" if cfg.tokenizer == "kmeans" else cfg.tokenizer
        kmeans = semantic.fit(
            dataset, indices, cfg.clusters, cfg.seed, features=features, device=device
        )
        dist.on_main(lambda: checkpoint.save(kmeans.state(), path))
    return load_tokenizer(cfg, device)


def token_caches(cfg, dataset, tokenizer, codec):
    """(semantic tokens, codes) of all recordings, made once and kept in files. Collective.

    Each is a list of arrays, see `recordings.token_cache`, or None without a tokenizer or a codec.
    """
    # The stages share the folder: each part is made once.
    cache = functools.partial(recordings.token_cache, Path(cfg.run_dir).parent / "tokens", dataset)
    semantic_tokens = None
    codes = None
    if tokenizer:
        semantic_tokens = cache(
            {"tokenizer": tokenizer.checksum},
            lambda i: tokenizer.kmeans.encode(dataset.wave(i), dataset.rate)[:, None],
            "semantic tokens",
        )
    if codec:
        codes = cache(
            {"codec": codec.checksum},
            lambda i: codec.encode(dataset.wave(i)).numpy(),
            "codes",
        )
    return semantic_tokens, codes


class TokenCrops:
    """A dataset for data.ChunkDataset: crops of recordings as tokens, in the sequences of a stage.

    dataset: Recordings. semantic_tokens, codes: as of `token_caches`, None if no stream needs them.
    A crop is cut in frames of the codec or, without one, of the semantic tokens.
    """

    def __init__(self, cfg, dataset, streams, semantic_tokens, codes, codec):
        self.codec = codec
        self.dataset = dataset
        self.streams = streams
        self.semantic_tokens = semantic_tokens
        self.codes = codes
        self.counted_tokens = codes or semantic_tokens  # their frames are counted
        # Recordings that could not be read.
        self.empty = [i for i, tokens in enumerate(self.counted_tokens) if not len(tokens)]
        self.frame_rate = codec.frame_rate if codec else semantic.FRAME_RATE
        self.coarse_quantizers = cfg.coarse_quantizers
        self.crop_frames = max(1, round(cfg.crop_length / cfg.sample_rate * self.frame_rate))

    def __len__(self):
        return len(self.dataset)

    def name(self, index):
        return self.dataset.name(index)

    def crop(self, index, offset=0.0):
        """(each stream's tokens (T, Q) int64, whether the recording ends there).

        offset: within [0, 1), from the first to the last possible crop.
        """
        frames = len(self.counted_tokens[index])
        # Every frame at which a whole crop fits is equally probable.
        start = int(offset * (max(0, frames - self.crop_frames) + 1))
        stop = min(frames, start + self.crop_frames)
        ended = stop == frames
        # Codes of the crop, split into those of coarse and fine.
        tokens = {}
        if self.codes is not None:
            # Caches hold 16 bits; embeddings take 64.
            codes = self.codes[index][start:stop].astype(np.int64)
            tokens["coarse"] = codes[:, : self.coarse_quantizers]  # (T, Q')
            tokens["fine"] = codes[:, self.coarse_quantizers :]  # (T, Q - Q')
        if self.semantic_tokens is not None:
            # The same time, at another frame rate. At the end rounding must not lose a token.
            ratio = semantic.FRAME_RATE / self.frame_rate
            last = None if ended else round(stop * ratio)
            semantic_tokens = self.semantic_tokens[index][round(start * ratio) : last, 0]
            semantic_tokens = semantic_tokens.astype(np.int64)
            # Consecutive repetitions are removed, so coarse must model durations (AudioLM §III-C).
            tokens["semantic"] = semantic.unique_consecutive(semantic_tokens)[:, None]  # (N, 1)
        crops = []
        for stream in self.streams:
            crops.append(torch.from_numpy(np.ascontiguousarray(tokens[stream.name])))
        return crops, ended

    def fetch(self, indices, random_words=None):
        """({"inputs", "start", "target", "text"}, usable (n,)), for TokenTransformer."""
        # In evaluation every crop is the beginning of its recording.
        offsets = np.zeros(len(indices))
        if random_words is not None:
            offsets = order.uniform(random_words, 1)[:, 0]
        inputs = []
        starts = []
        target = []
        usable = []
        for index, offset in zip(indices, offsets):
            codes, ended = self.crop(int(index), offset)
            sequence, start = build_sequence(self.streams, codes)
            inputs.append(sequence)
            starts.append(start)
            # EOS is a target only where the recording ends, not where a crop does.
            target.append(targets(self.streams[-1], codes[-1], ended))
            usable.append(all(map(len, codes)))  # unreadable recordings have no tokens
        batch = {
            "inputs": pad_sequence(inputs, batch_first=True),
            "start": torch.tensor(starts),
            "target": pad_sequence(target, batch_first=True, padding_value=-100),
            "text": [self.dataset.text(int(index)) for index in indices],
        }
        return batch, np.array(usable)


def measure_lengths(crops, indices):
    """The Lengths of the crops of the first 200 recordings."""
    # Without recordings that could not be read.
    indices = np.setdiff1d(indices[:200], crops.empty).tolist()
    lengths = []
    for index in indices:
        lengths.append([len(codes) for codes in crops.crop(index)[0]])
    lengths = np.array(lengths)  # (recordings, streams)
    # Coarse and fine frames have a fixed rate, so the longest crop is the limit.
    if crops.codes is not None:
        context, frames = lengths.max(0).tolist()
        return Lengths(frames, context, crops.frame_rate)
    # Without repetitions semantic tokens have no fixed rate, so these are 95th percentiles.
    frames = [min(crops.crop_frames, len(crops.counted_tokens[index])) for index in indices]
    seconds = np.array(frames) / crops.frame_rate
    frame_rate = float(np.quantile(lengths[:, 0] / seconds, 0.95))
    return Lengths(int(np.quantile(lengths, 0.95)), 0, frame_rate)


def learn_vocabulary(cfg, dataset, indices):
    """The words of the training transcripts; none for a stage without text."""
    if cfg.stage != "semantic" or not cfg.max_text_len or not dataset.has_texts:
        return []
    texts = [dataset.text(index) for index in indices[:20_000].tolist()]
    return clip.Tokenizer.learn(texts, TEXT_WORDS).vocabulary


# Evaluation of the token transformers


@torch.no_grad()
def evaluate_transformer(model, cfg, split, device):
    """Loss per token of the last stream, accuracy, and unigram entropy: a model without context.

    split: (TokenCrops, indices).
    """
    stream = model.streams[-1]
    # Loss and accuracy are means over tokens, so long crops count more.
    means = Means()
    tokens_seen = [torch.zeros(0, stream.num_quantizers, dtype=torch.long)]
    for _, batch in data.batches(*split, cfg.eval_samples, cfg.chunk_size):
        batch = data.to_device(batch, device)
        with amp.autocast(device, cfg.precision):
            loss, count, correct = model(batch)
        count = count.sum().item()
        means.add("loss", loss.sum().item(), count)
        means.add("accuracy", correct.sum().item(), count)
        tokens_seen.append(batch["target"].flatten(0, 1).cpu())
    entropies, counts = code_entropies(tokens_seen, stream.codebook_size + 1)  # with EOS
    metrics = means.result()
    # The loss of a model that ignores context.
    metrics["unigram_entropy"] = (entropies @ counts / counts.sum()).item()
    return metrics


def continuations(model, cfg, split, device):
    """Yield (number, wave (T,), caption) of what coarse or fine makes of real context.

    coarse: continuations of prompts, from real semantic tokens. fine: with real coarse codes.
    """
    crops, indices = split
    if cfg.stage == "semantic":  # tokens without a codec make no sound
        return
    indices = np.setdiff1d(indices, crops.empty)[:NUM_SOUNDS].tolist()
    crop_codes = [crops.crop(index)[0] for index in indices]
    contexts = [context for context, _ in crop_codes]
    frames = round(PROMPT_SECONDS * model.lengths.frame_rate) if cfg.stage == "coarse" else 0
    # Noise is seeded by the recording, so sounds of different steps can be compared.
    tokens = generate_long(
        model,
        lambda b, past: [contexts[b][len(past) :]],
        [codes[:frames] for _, codes in crop_codes],
        [len(codes) for _, codes in crop_codes],
        [accumulate.derive_seed(cfg.seed, "sound", index) for index in indices],
        SamplingParams(cfg.temperature),
        may_end=False,
    )
    for number, index in enumerate(indices):
        codes = tokens[number]
        if cfg.stage == "fine":
            codes = torch.cat([contexts[number], codes], dim=1)
        yield f"{number}", crops.codec.decode(codes), crops.name(index)


# Training of the token transformers


def train_transformer(given, device):
    """Train the transformer of a stage."""
    started = time.monotonic()

    # Open the data and the earlier stages, on all ranks. Then rank 0 takes the run folder.
    cfg, splits = open_stage(given)
    dataset, indices = splits["train"]
    # Semantic needs no codec; fine needs no semantic tokens.
    codec = None
    tokenizer = None
    made_with = {}  # what decides the tokens
    if cfg.stage != "semantic":
        codec = dist.main_first(lambda: codec_of(cfg, device))
        made_with |= {"codec": codec.checksum, "coarse_quantizers": cfg.coarse_quantizers}
    if cfg.stage == "coarse":
        tokenizer = dist.run_together(lambda: load_tokenizer(cfg, device))
        made_with["tokenizer"] = tokenizer.checksum
    # Another codec or tokenizer makes other tokens: then the run cannot be resumed.
    run = loop.open_run(cfg, dataset, checksums=made_with)
    if run.finished:
        return loop.announce_finished(cfg, run)

    # Tokenize all recordings, unless an earlier start has done so.
    # The semantic stage fits its tokenizer before it trains.
    if cfg.stage == "semantic":
        tokenizer = fit_tokenizer(cfg, dataset, indices, device)
        made_with["tokenizer"] = tokenizer.checksum
    streams = make_streams(cfg, tokenizer, codec)
    crops = {}  # of each dataset: --data and, if given, --val_data
    for name, (recorded, members) in splits.items():
        if recorded not in crops:
            caches = token_caches(cfg, recorded, tokenizer, codec)
            crops[recorded] = TokenCrops(cfg, recorded, streams, *caches, codec)
        splits[name] = (crops[recorded], members)

    # Build model, optimizer and EMA. Restore them if resuming.
    # Generation will stay within these lengths.
    lengths = measure_lengths(crops[dataset], indices)
    # Words of the training texts have tokens of their own.
    vocabulary = dist.on_main(lambda: learn_vocabulary(cfg, dataset, indices))
    accumulate.seed_all(cfg.seed, "weights")
    model = TokenTransformer(cfg, streams, lengths, vocabulary).to(device)
    if vocabulary:
        texts = [dataset.text(index) for index in data.evenly_spaced(len(dataset), 256)]
        run.notes.append(clip.text_note(texts, model.tokenizer.encode, cfg.max_text_len))
    betas = (cfg.beta1, cfg.beta2)
    optimizers = optim.make(model, cfg.optimizer, cfg.lr, cfg.weight_decay, betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(model, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    model_info = {
        "kind": cfg.stage,
        "streams": [list(stream) for stream in streams],
        "lengths": list(lengths),
        "vocabulary": vocabulary,
        "made_with": made_with,
        "metadata": store.metadata(cfg),
    }
    state = checkpoint.State(
        cfg, {"model": model}, ema, optimizers, scaler, run.identity, model_info
    )
    loop.resume(run, state)  # or take the weights of --init_from
    if cfg.compile:
        model.compile()

    # The order of samples follows from seed and step. Write config.json and open the logger.
    plan, batches = loop.batches(cfg, crops[dataset], indices, state.step, device)
    log = loop.begin(run, state, given, f"{len(dataset):,} recordings", device)

    # A signal to any rank ends the loop: `progress` saves first.
    progress = loop.Progress(run, state, log, cfg.stage, crops[dataset])
    with log, dist.stop_signals, progress:
        model.train()
        stepped = True
        while True:
            dist.stop_signals.check()

            # Log; evaluate and save when they are due.
            if progress.log_due():
                progress.log_line()  # synchronizes ranks and GPU
                if progress.eval_due:
                    metrics, samples = evaluate_weights(
                        state, "validation", splits, device, evaluate_transformer, continuations
                    )
                    progress.log_evaluation(metrics, samples)
                if progress.save_due:
                    run.save(state, log)
                progress.restart()
            if state.step >= cfg.steps:
                break

            # Take one optimizer step.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if stepped:  # an fp16 step that overflowed is tried again, on the same samples
                step_batches = [next(batches) for _ in plan]
            chunk_losses = []  # summed over the samples of a chunk
            for chunk, batch in zip(plan, step_batches):
                # All that is random in a chunk follows from (seed, step, chunk), on any rank.
                accumulate.seed_all(cfg.seed, state.step, chunk.index)
                batch = data.to_device(batch, device)
                drop = torch.rand(len(batch["inputs"]), device=device) < cfg.text_drop
                with amp.autocast(device, cfg.precision):
                    loss_sums, counts, _ = model(batch, drop)
                    # Each sample counts alike, so the loss of a batch is the mean of its chunks'.
                    loss = (loss_sums / counts.clamp(min=1)).mean()
                scaler.scale(loss * chunk.weight).backward()
                chunk_losses.append(loss.detach() * (chunk.stop - chunk.start))
            # Ranks meet here once a step.
            dist.sum_gradients(model)
            [grad_norm], stepped = amp.step(scaler, [(optimizers, cfg.max_grad_norm)])
            model.zero_grad(set_to_none=True)
            if not stepped:  # a step that overflowed did not happen
                progress.overflows += 1
                continue
            state.step += 1
            ema.update(state.step)
            progress.add(chunk_losses, grad_norm, step_batches)

        # Test the averaged weights, and save them last of all.
        metrics, samples = evaluate_weights(
            state, "test", splits, device, evaluate_transformer, continuations
        )
        results = loop.finish(run, state, log, metrics, samples)
    loop.announce_trained(cfg, results, started)


def load_transformer(file, stage, device, weights="ema"):
    """(model for generation, {what decided its tokens}) of a stage's model file."""
    cfg, state = checkpoint.read_model(stage, Config, file, weights)
    with checkpoint.damage_is_named(file):
        streams = [Stream(*stream) for stream in state["streams"]]
        lengths = Lengths(*state["lengths"])

        def make():
            return TokenTransformer(cfg, streams, lengths, state["vocabulary"])

        model = checkpoint.build(make, state, file, device).requires_grad_(False)
        return transpose_linears(model), state["made_with"]


# The pipeline: text -> semantic -> coarse -> fine -> wave (AudioLM, Fig. 2)


class Prompt(NamedTuple):
    """What generation continues, at the same time in both kinds of tokens."""

    semantic: torch.Tensor  # (N, 1)
    codes: torch.Tensor  # (T, Q)


AS_TRAINED = SamplingParams(temperature=-1.0)


class Pipeline:
    """The three transformers of a folder of runs, with their codec and semantic tokenizer.

    UserError if they were not trained on each other's tokens.
    """

    def __init__(self, run_dir, device, weights="ema", model="model.pt"):
        self.models = {}
        made_with = {}
        for stage in TOKENS:
            file = model_file(Path(run_dir) / stage, stage, model, weights)
            self.models[stage], made_with[stage] = load_transformer(file, stage, device, weights)
        cfg = self.models["coarse"].cfg
        # Those that coarse was trained with.
        self.codec = codec_of(cfg, device)
        self.tokenizer = load_tokenizer(cfg, device)
        # What decides the tokens must be what the models were trained with.
        expected = {
            "codec": self.codec.checksum,
            "coarse_quantizers": cfg.coarse_quantizers,
            "tokenizer": self.tokenizer.checksum,
        }
        for stage, found in made_with.items():
            for name, value in found.items():
                if value != expected[name]:
                    raise UserError(
                        f"{run_dir}/{stage}: trained with another {name} than coarse; train it anew"
                    )

    def tokenize(self, wave):
        """Semantic tokens (frames,) of a wave (T,), numpy."""
        return self.tokenizer.kmeans.encode(wave, self.codec.sample_rate)

    def semantic_tokens(self, wave):
        """Semantic tokens (N, 1) of the whole frames of a wave (T,), without repetitions."""
        frames = len(wave) * semantic.FRAME_RATE // self.codec.sample_rate
        tokens = self.tokenize(wave)[: max(1, frames)]  # the next one would be mostly of silence
        return torch.from_numpy(semantic.unique_consecutive(tokens))[:, None]

    def prompt(self, wave):
        """The Prompt of the end of a wave (T,), in whole frames."""
        wave = wave[len(wave) % self.codec.hop_length :]  # the end is what is continued
        return Prompt(self.semantic_tokens(wave), self.codec.encode(wave))

    def empty_prompt(self):
        tokens = torch.zeros(0, 1, dtype=torch.long)
        codes = torch.zeros(0, self.codec.num_quantizers, dtype=torch.long)
        return Prompt(tokens, codes)

    def generate(self, prompts, seconds, seeds, texts=None, sampling=AS_TRAINED, fine=True):
        """Codes of B sounds, each (T, Q): those of its prompt, and at most `seconds` more.

        texts: B, or None. sampling: SamplingParams, whose temperature is as in training if it is
        below 0. fine: else it is the codes of the coarse quantizers alone.
        """

        def run(stage, condition_fn, tokens, goals, may_end=True):
            model = self.models[stage]
            params = sampling
            if sampling.temperature < 0:
                params = sampling._replace(temperature=model.cfg.temperature)
            return generate_long(
                model,
                condition_fn,
                tokens,
                goals,
                [accumulate.derive_seed(seed, stage) for seed in seeds],
                params,
                texts,
                may_end,
            )

        # Content: semantic tokens, from the text or the prompt (§III-C1).
        # A prompt without tokens begins with the start token alone.
        tokens = [prompt.semantic for prompt in prompts]  # B of (N, 1)
        more = math.ceil(seconds * self.models["semantic"].lengths.frame_rate)
        goals = [len(prompt) + more for prompt in tokens]
        content = run("semantic", lambda b, past: [], tokens, goals)  # no stream before it

        # Voice and sound: coarse codes, from the semantic tokens (§III-C2). A window that begins
        # later needs those of its own time. Tokens without repetitions have no timing, so the
        # earlier sound is encoded again to count its tokens.
        def remaining_content(b, past):
            count = 0
            if len(past):
                count = len(self.semantic_tokens(self.codec.decode(past)))
            # At least one token, as in training.
            return [content[b][min(len(content[b]) - 1, count) :]]

        # Prompts are cut to the quantizers of the stage.
        width = self.models["coarse"].streams[-1].num_quantizers
        tokens = [prompt.codes[:, :width] for prompt in prompts]  # B of (T, Q')
        more = max(1, round(seconds * self.codec.frame_rate))
        goals = [len(prompt) + more for prompt in tokens]
        coarse = run("coarse", remaining_content, tokens, goals)  # up to EOS
        if not fine:
            return coarse

        # Detail: fine codes, from the coarse ones (§III-C3).
        details = run(
            "fine",
            lambda b, past: [coarse[b][len(past) :]],
            [prompt.codes[:, width:] for prompt in prompts],
            [len(codes) for codes in coarse],
            may_end=False,
        )
        return [torch.cat(pair, dim=1) for pair in zip(coarse, details)]


# Evaluation of the pipeline


@dataclass(frozen=True)
class PipelineConfig(config.Inference):
    """The models"""

    run_dir: Folder = field("runs/audio", "folder of the runs, one for each stage")


@dataclass(frozen=True)
class EvaluateConfig(PipelineConfig):
    """What to evaluate"""

    eval_samples: NonNegativeInt = field(192, "most held-out recordings to continue, 0: all")


class SyllableScores:
    """Scores of sounds in the built-in world: who speaks, and which syllables.

    split: (recordings, indices) of training. In these each semantic token is given the syllable
    that it mostly stands for.
    """

    def __init__(self, pipeline, split):
        self.pipeline = pipeline
        dataset, indices = split
        readable, waves = dataset.load_usable(indices[:200])
        tokens = []
        syllables = []
        for record, wave in zip(dataset.records(readable), waves):
            tokens.append(pipeline.tokenize(wave))
            syllables.append(
                synthetic.syllable_labels(record, len(tokens[-1]), semantic.FRAME_RATE)
            )
        # Tokens are clusters without names: a vote names them.
        self.syllable_of_token = synthetic.majority(
            np.concatenate(tokens),
            np.concatenate(syllables),
            pipeline.tokenizer.kmeans.clusters,
        )

    def text_similarity(self, wave, text):
        """1 - syllable error rate of a wave (T,), at least 0."""
        syllables = self.syllable_of_token[self.pipeline.tokenize(wave)]
        return synthetic.text_similarity(synthetic.recognize_syllables(syllables), text.split())

    def same_voice(self, wave, other):
        """Whether two waves (T,) are of the same voice."""
        voices = []
        for each in (wave, other):
            each = recordings.resample(each, self.pipeline.codec.sample_rate, synthetic.RATE)
            voices.append(synthetic.estimate_voice(each.numpy()))
        return synthetic.same_voice(*voices)


def evaluate_pipeline(args, device):
    """Continue held-out recordings, and write and print their metrics. Collective.

    The metrics are in scores.json, the sounds in sounds/. The built-in recordings are also scored.
    Metrics ending in _real are those of the real recordings after the codec.
    """
    pipeline = dist.main_first(lambda: Pipeline(args.run_dir, device, args.weights, args.model))
    codec = pipeline.codec
    # Nothing is trained: the training split may be smaller than a batch.
    cfg = dataclasses.replace(pipeline.models["coarse"].cfg, batch_size=1)
    datasets = dist.run_together(lambda: open_recordings(cfg))
    splits = data.splits(datasets[0], cfg, *datasets[1:])
    dataset, indices = splits["test"]
    scores = None
    if cfg.data == "syllables":
        scores = SyllableScores(pipeline, splits["train"])
    # A prompt is at most half of its recording, in whole frames.
    max_prompt = round(PROMPT_SECONDS * codec.sample_rate)

    means = Means()
    size = min(len(indices), args.eval_samples or len(indices))
    for batch in dist.deal(math.ceil(size / EVAL_BATCH)):
        first = batch * EVAL_BATCH
        readable, waves = dataset.load_usable(indices[first : min(size, first + EVAL_BATCH)])
        seeds = [accumulate.derive_seed(args.seed, "goes on", index) for index in readable]
        prompts = []
        for wave in waves:
            frames = min(max_prompt, len(wave) // 2) // codec.hop_length
            prompts.append(wave[: max(1, frames) * codec.hop_length])
        sounds = pipeline.generate([pipeline.prompt(wave) for wave in prompts], EVAL_SECONDS, seeds)

        for i, index in enumerate(readable):
            start = len(prompts[i])
            sound = codec.decode(sounds[i])
            new = sound[start:]
            means.add("seconds_added", len(new) / codec.sample_rate)
            if first + i < NUM_SOUNDS:
                path = f"{args.run_dir}/sounds/{i}"
                write_sound(waves[i], codec.sample_rate, f"{path}_real.wav")
                write_sound(sound, codec.sample_rate, f"{path}_continued.wav")
            if scores:
                real = codec.decode(codec.encode(waves[i]))
                similarity = scores.text_similarity(real, dataset.text(index))
                means.add("text_heard_real", similarity)
                # The real recording after the codec is the best that a model can reach.
                means.add("voice_kept_real", scores.same_voice(prompts[i], real[start:]))
                # Shorter sounds have no measurable pitch.
                if len(new) >= MIN_VOICE_SECONDS * codec.sample_rate:
                    means.add("voice_kept", scores.same_voice(prompts[i], new))
        # Say the texts of these recordings, without a prompt.
        if scores and pipeline.models["semantic"].has_text:
            texts = [dataset.text(index) for index in readable]
            empty = [pipeline.empty_prompt()] * len(texts)
            sounds = pipeline.generate(empty, MAX_TEXT_SECONDS, seeds, texts)
            for text, codes in zip(texts, sounds):
                means.add("text_heard", scores.text_similarity(codec.decode(codes), text))
    metrics = means.result()
    if dist.is_main():
        checkpoint.write_json(metrics, Path(args.run_dir) / "scores.json")
    tracker.print_results(f"The stages together ({args.run_dir}/sounds):", metrics)


def evaluate(args):
    evaluate_pipeline(args, dist.setup(args.device))


# Sampling


@dataclass(frozen=True)
class SampleConfig(PipelineConfig):
    """What to sample"""

    text: str = field("", "text to say; without a text and a prompt, the sound is any")
    prompt: str = field("", "recording to continue, in its voice")
    prompt_seconds: NonNegativeFloat = field(
        0.0, "length of its end to take; 0: the most that coarse was trained on", needs="prompt"
    )
    seconds: Seconds = field(MAX_TEXT_SECONDS, "most seconds after the prompt")
    temperature: float = field(-1.0, "temperature, 0: most probable codes, below 0: as trained")
    top_k: NonNegativeInt = field(0, "sample from the k most probable codes, 0: all")
    guidance_scale: NonNegativeFloat = field(1.0, "guidance toward the text, 1: none", needs="text")
    fine: bool = field(True, "add the codes of the fine stage to the coarse ones")
    reconstruct: str = field("", "recording to encode and decode by the codec")
    num_quantizers: NonNegativeInt = field(
        0, "quantizers of the codec to use, 0: all", needs="reconstruct"
    )
    out: str = field("out.wav", "file of the sound; its spectrogram is beside it, as .png")

    def __post_init__(self):
        super().__post_init__()
        config.check_suffix("out", self.out, ".wav")
        if self.reconstruct and (self.text or self.prompt):
            raise UserError("--reconstruct: no --text or --prompt has an effect beside it")


def read_wave(path, codec):
    """The wave (T,) of a recording, at the codec's rate; UserError if shorter than a frame."""
    channels, rate, _ = recordings.read(path)
    length = channels.shape[1]
    if length * codec.sample_rate < codec.hop_length * rate:
        raise UserError(
            f"{path}: {length} samples at {rate} Hz, shorter than a frame of {codec.hop_length} "
            f"at {codec.sample_rate} Hz"
        )
    return recordings.resample(torch.from_numpy(channels).mean(0), rate, codec.sample_rate)


def check_text(args, model):
    """UserError if the semantic stage cannot do what the settings say about text."""
    if args.text and not model.has_text:
        raise UserError(f"--text: {args.run_dir} was trained without texts; give --prompt alone")
    # A model that always had its text knows no "no text", which guidance needs.
    can_drop = model.has_text and model.cfg.text_drop
    if model.has_text and not args.text and not can_drop:
        raise UserError(f"{args.run_dir}: trained with --text_drop 0, so it needs --text")
    if args.guidance_scale != 1 and not can_drop:
        raise UserError(f"--guidance_scale: {args.run_dir} was trained with --text_drop 0")


def read_prompt(args, pipeline):
    """The Prompt of the end of a recording, at most what the coarse stage was trained on."""
    hop_length = pipeline.codec.hop_length
    wave = read_wave(args.prompt, pipeline.codec)
    max_length = hop_length * (pipeline.models["coarse"].lengths.max_frames - 1)  # and a new frame
    length = round(args.prompt_seconds * pipeline.codec.sample_rate) or max_length
    length = min(max(length, hop_length), max_length)
    return pipeline.prompt(wave[-length:])


def generate_sound(args, device):
    """Write the sound of a text, of a prompt, or of both."""
    pipeline = Pipeline(args.run_dir, device, args.weights, args.model)
    check_text(args, pipeline.models["semantic"])
    sampling = SamplingParams(args.temperature, args.top_k, args.guidance_scale)
    # Any of text and prompt may be missing.
    prompt = read_prompt(args, pipeline) if args.prompt else pipeline.empty_prompt()
    # Another text has other noise.
    seed = accumulate.derive_seed(args.seed, args.text, 0)
    texts = [args.text] if args.text else None
    (codes,) = pipeline.generate([prompt], args.seconds, [seed], texts, sampling, args.fine)
    write_sound(pipeline.codec.decode(codes), pipeline.codec.sample_rate, args.out)
    print(f"wrote {args.out}")


def reconstruct(args, device):
    """Send a recording through the codec of a run, and print how well it comes out."""
    run_dir = f"{args.run_dir}/soundstream"
    codec = load_codec(run_dir, device, args.num_quantizers, args.model, args.weights)
    wave = read_wave(args.reconstruct, codec)
    sound = codec.decode(codec.encode(wave))[: len(wave)]
    write_sound(sound, codec.sample_rate, args.out)
    # Codes of K values have log2(K) bits.
    bitrate = codec.num_quantizers * math.log2(codec.codebook_size) * codec.frame_rate
    si_sdr = recordings.si_sdr(sound[None], wave[None]).item()
    print(
        f"wrote {args.out}: {codec.num_quantizers} codes a frame, {bitrate:.0f} bits a second, "
        f"si_sdr_db {si_sdr:.2f}"
    )


def sample(args):
    device = dist.setup(args.device)
    if not dist.is_main():
        return
    if args.reconstruct:
        reconstruct(args, device)
    else:
        generate_sound(args, device)


# Training of one stage or all


def train(cfgs):
    """Train one stage, or all in turn and then evaluate them together."""
    first = cfgs[0]
    device = dist.setup(first.device, first.timeout_minutes)
    loop.check_shared(first.run_dir)
    dist.on_main(lambda: store.check_stages(cfgs))
    if len(cfgs) > 1 and first.soundstream:  # then no codec is trained
        dist.main_first(lambda: codec_of(cfgs[-1], device))  # a mistake shows before training
        cfgs = cfgs[1:]  # of the published or the given codec
    # Each stage is a run of its own, so a stopped command resumes in its stage.
    for cfg in cfgs:
        if cfg.stage == "soundstream":
            train_soundstream(cfg, device)
        else:
            train_transformer(cfg, device)

    run_dir = first.run_dir
    if len(cfgs) > 1:
        args = EvaluateConfig(run_dir=run_dir, seed=first.seed, eval_samples=cfgs[-1].eval_samples)
        evaluate_pipeline(args, device)
        prompt = shlex.quote(f"{run_dir}/sounds/0_real.wav")
        command = f"sample --prompt {prompt} --prompt_seconds {PROMPT_SECONDS}"
    elif first.stage == "soundstream":
        wave = shlex.quote(f"{run_dir}/soundstream/samples/test_0_real.wav")
        command = f"sample --reconstruct {wave}"
    else:
        command = "evaluate"
    if dist.is_main():
        print(f"\nNext: python train_audio.py {command} --run_dir {shlex.quote(run_dir)}")


COMMANDS = {
    "train": (train, Config),
    "evaluate": (evaluate, EvaluateConfig),
    "sample": (sample, SampleConfig),
}


def main():
    config.run(COMMANDS, __doc__, "train", PRESETS, STAGES)


if __name__ == "__main__":
    main()
