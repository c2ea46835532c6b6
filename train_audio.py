"""Train a SoundStream codec, then semantic, coarse and fine token transformers (AudioLM).

(text, prompt) -> sound:

    torchrun --nproc_per_node=2 train_audio.py         # all four, on syllables that it makes itself
    torchrun --nproc_per_node=2 train_audio.py --stage soundstream --data speech --run_dir runs/mine
    python train_audio.py evaluate
    python train_audio.py sample --text "a i u o" --out out.wav
    python train_audio.py sample --prompt voice.wav --seconds 2 --out out.wav   # in the same voice
    python train_audio.py sample --reconstruct in.wav --quantizers 2 --out out.wav

The same command again resumes. Each stage is a run of its own, RUN/soundstream, RUN/semantic,
RUN/coarse and RUN/fine; later stages read the folders of earlier ones. A published codec can take
the place of the first stage (--soundstream hf:kyutai/mimi).
`python train_audio.py [train|evaluate|sample] --help`: the settings.

SoundStream: Zeghidour et al. 2021. AudioLM: Borsos et al. 2022.

What differs from the papers (the presets have their values, where they give them):
SoundStream: no FiLM, so no denoising (§III-F); residual units start as the identity; features are
compared by a mean over channels, too; mel spectra have a scale of their own (`spectral_distance`);
weights are averaged (EMA). By default also an L1 loss of waves, a gradient penalty, k-means after
300 steps without a quantizer, and discriminators (no weight norm) in the last 40 of 1,050 steps.
AudioLM: semantic tokens are 50 a second, of MFCC by default. Positions are rotary: AudioLM's
relative ones (T5), a bias of all scores, would keep attention from its fast paths. Blocks are
pre-norm with GELU, of which it says nothing. Text and EOS are added. Long sounds come in windows
that overlap by half. By default Muon trains the coarse stage.
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: a thread that waits soon leaves its core to others

import collections
import copy
import dataclasses
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

from common import (
    accumulate,
    amp,
    checkpoint,
    clip,
    config,
    data,
    dist,
    ema,
    lora,
    media,
    optim,
    recordings,
    schedule,
    semantic,
    store,
    synthetic,
    tracker,
)
from common.config import Count, Decay, Natural, NonNegative, Positive, Share, UserError
from common.nn import Memory, Transformer, learned_tokens
from common.quantize import ResidualQuantizer

BUILTIN_ROWS = 6_000  # recordings of the built-in syllables

# Config

@dataclass(frozen=True)
class Config(config.Training):
    # Run and data
    stage: Literal["all", "soundstream", "semantic", "coarse", "fine"] = "all"  # what to train; all: each in turn
    run_dir: str = "runs/audio"  # folder of the runs: the stage's own is RUN/STAGE; started again, it resumes
    data: str = "syllables"  # folder of recordings (wav; flac, ogg, mp3 by soundfile), or "syllables": built in
    sample_rate: Count = 8_000  # samples a second of the codec; recordings of other rates are resampled
    seconds: Positive = 0.32  # length of a training crop; the default is that of the stage
    crop_samples: Natural = 0  # the same in samples, instead of --seconds, if not 0
    speaker_pattern: str = ""  # regular expression, group 1 of which in a file's name is the speaker; "": by folder
    soundstream: str = ""  # codec of coarse and fine: run, file or hf:MODEL; "": RUN/soundstream
    semantic: str = ""  # run whose semantic tokens coarse takes; "": RUN/semantic
    # Codec; the paper's settings are the preset's, these are for minutes on two cores
    channels: Count = 8  # of the first layer; each stride doubles them
    strides: tuple[Annotated[int, ("2 or more", lambda stride: stride > 1)], ...] = (2, 4, 5, 8)  # product: the hop
    codec_width: Count = 128  # channels of a frame
    quantizers: Count = 4  # each quantizes what those before it have left over; the first few alone are a lower bitrate
    codebook_size: Count = 256  # codes of a quantizer
    codebook_decay: Decay = 0.95  # of the codebooks' moving averages
    dead_below: NonNegative = 0.1  # codes of fewer frames a step are replaced; 2 would be all of them in small batches
    quantizer_dropout: Share = 1.0  # share of samples that are cut to a random number of quantizers
    quantize_after: Natural = 300  # steps of the plain autoencoder before k-means makes the codebooks; the paper: 0
    mel_weight: NonNegative = 2e-5  # of the distance of mel spectra, summed over frames; paper: 1
    wave_weight: NonNegative = 10.0  # of the L1 distance of waves (EnCodec Eq. 1); the paper: 0
    commitment_weight: NonNegative = 0.25  # of the distance of frames to their codes
    # Discriminators of the codec
    discriminator_after: Natural = 1010  # steps without them; the paper: 0, which takes longer than minutes
    adversarial_weight: NonNegative = 0.1  # of the hinge loss; the paper: 1
    feature_weight: NonNegative = 10.0  # of the distance of features; the paper: 100
    penalty_weight: NonNegative = 10.0  # of the gradient penalty; 0 for none, as in the paper
    penalty_every: Count = 4  # steps between gradient penalties
    discriminator_channels: Count = 4  # of the first layers; the one of spectra has twice as many, as in the paper
    stft_window: Annotated[int, ("a multiple of 128", lambda size: size > 0 and size % 128 == 0)] = 512  # in samples
    discriminator_lr: Positive = 3e-4  # peak learning rate
    discriminator_warmup_steps: Natural = 20  # steps of linear warm-up, from when they begin
    discriminator_max_grad_norm: NonNegative = 5.0  # gradients are clipped to this norm, 0 for not at all
    # Semantic tokens
    tokenizer: str = "kmeans"  # kmeans on MFCC, or hf:MODEL:LAYER (HuBERT, WavLM, w2v-BERT 2.0)
    clusters: Count = 12  # semantic tokens; speech has more sounds than the built-in syllables: 100, say
    # Token transformers
    width: Count = 128  # width of the transformer
    depth: Count = 4  # blocks
    heads: Count = 4  # attention heads
    dropout: Share = 0.1  # in attention and feed-forward
    coarse_quantizers: Count = 2  # quantizers that the coarse stage predicts; fine: the others
    codec_quantizers: Natural = 0  # first quantizers of the codec that coarse and fine use; 0: all
    text: Literal["auto", "none", "prefix"] = "auto"  # auto: a prefix of semantic, if there are transcripts
    max_text_len: Count = 24  # longer texts are cut, shorter ones padded
    text_drop: Share = 0.1  # probability of training a sample without its text, for guidance
    # Evaluation and saving; both happen at the first log line at or after they are due
    samples_from: Literal["ema", "online", "both"] = "ema"  # the weights that its sounds are made with
    temperature: NonNegative = 0.7  # of the codes drawn, 0 for the most probable; also the default of `sample`
    top_k: Natural = 0  # draw from so many codes, the most probable; 0 for all
    guidance_scale: NonNegative = 1.0  # guidance toward the text; 1: none

    def __post_init__(self):
        super().__post_init__()
        if self.crop_samples:  # only seconds are kept, so that those of a command line win over a file's
            object.__setattr__(self, "seconds", self.crop_samples / self.sample_rate)
            object.__setattr__(self, "crop_samples", 0)
        hop, samples = math.prod(self.strides), round(self.seconds * self.sample_rate)
        codec = self.stage == "soundstream" and not self.soundstream
        if samples < hop:
            raise UserError(f"--seconds: {self.seconds} is shorter than a frame of {hop} samples (--strides)")
        if codec and self.discriminator_after < self.steps and samples < 1.75 * self.stft_window:
            raise UserError(f"--seconds: {self.seconds} is too short for a discriminator of --stft_window "
                            f"{self.stft_window}; expected 1.75 windows or more")
        if codec and self.steps <= self.quantize_after and not self.init_from:
            raise UserError(f"--steps {self.steps}: no codebooks come before --quantize_after {self.quantize_after}")
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(f"--heads: --width {self.width} must be an even multiple of --heads {self.heads}")
        config.refuse_unused(self, (
            *((name, not codec or self.discriminator_after < self.steps, "--discriminator_after below --steps")
              for name in DISCRIMINATORS),
            ("penalty_every", self.penalty_weight, "a --penalty_weight"),
            *((name, self.text != "none", "--text prefix") for name in ("text_drop", "max_text_len")),
            ("guidance_scale", self.text != "none" and self.text_drop, "--text and --text_drop")))
        tracker.check(self)


# What is different by default for a stage, and named settings for all of it.
TRANSFORMER = dict(seconds=1.2, batch_size=64, lr=3e-3, ema_decay=0.98)
STAGES = {
    "soundstream": dict(steps=1050, batch_size=16, lr=2e-3, weight_decay=0.0, betas=(0.8, 0.99),
                        max_grad_norm=5.0, ema_decay=0.99, eval_samples=96),
    "semantic": dict(TRANSFORMER, steps=300),
    # In equal time more of a text is heard than with the papers' Adam.
    "coarse": dict(TRANSFORMER, steps=620, optimizer="muon", lr=6e-3),
    "fine": dict(TRANSFORMER, seconds=0.4, steps=150),
}
COMMON = dict(lr=1e-4, steps=1_000_000, warmup_steps=1_000, cosine=False, ema_decay=0.9999, validation=0.01,
              test=0.01, log_every=100, eval_every=10_000, save_every=2_000, workers=4)  # to all presets
AUDIOLM = dict(COMMON, sample_rate=16_000, clusters=1024, width=1024, depth=12, heads=16,
               coarse_quantizers=4, batch_size=256, chunk_size=8, optimizer="adamw", lr=3e-4,
               warmup_steps=4_000, precision="bf16")
PRESETS = {
    # SoundStream §III. Batch, crop, learning rates and commitment weight are not in the paper.
    "soundstream-24khz": dict(
        COMMON, stage="soundstream", sample_rate=24_000, channels=32, codec_width=512, quantizers=8,
        codebook_size=1024, codebook_decay=0.99, dead_below=2.0, quantize_after=0, mel_weight=1.0, wave_weight=0.0,
        commitment_weight=1.0, discriminator_after=0, adversarial_weight=1.0, feature_weight=100.0, penalty_weight=0.0,
        discriminator_channels=16, stft_window=1024, discriminator_lr=1e-4, discriminator_warmup_steps=1_000,
        seconds=1.0, batch_size=64, chunk_size=16, betas=(0.5, 0.9)),
    # AudioLM §IV-A: 12 layers, 16 heads, width 1024; crops of 30, 10 and 3 s; 1M steps of 256.
    # §IV-B: temperatures. Learning rates are not in the paper. Its codec is the one above with
    # --sample_rate 16000 and --quantizers 12. Its semantic tokens are of layer 7 of w2v-BERT XL,
    # 25 a second; that model is not published, so they are of w2v-BERT 2.0's, 50 a second.
    "audiolm-semantic": dict(AUDIOLM, stage="semantic", seconds=30.0, temperature=0.6,
                             tokenizer="hf:facebook/w2v-bert-2.0:7"),
    "audiolm-coarse": dict(AUDIOLM, stage="coarse", seconds=10.0, temperature=0.8),
    "audiolm-fine": dict(AUDIOLM, stage="fine", seconds=3.0, temperature=0.6),
}

# The stages that a field is for; a flag of another stage is refused. All other fields are for all.
FIELDS = [field.name for field in dataclasses.fields(Config)]
CODEC, TOKENS = FIELDS[FIELDS.index("channels"):FIELDS.index("tokenizer")], FIELDS[FIELDS.index("width"):]
DISCRIMINATORS = CODEC[CODEC.index("adversarial_weight"):]
ONLY = {**dict.fromkeys(CODEC, ("soundstream",)), **dict.fromkeys(TOKENS, ("semantic", "coarse", "fine")),
        **dict.fromkeys(("tokenizer", "clusters"), ("semantic",)), "semantic": ("coarse",),
        **dict.fromkeys(("soundstream", "coarse_quantizers", "codec_quantizers"),
                        ("coarse", "fine")),
        "samples_from": ("soundstream", "coarse", "fine")}

# What must not change when a run goes on; all else may.
FIXED = (*config.FIXED, "stage", "sample_rate", "seconds")
FIXED_CODEC = (*FIXED, "channels", "strides", "codec_width", "quantizers", "codebook_size", "quantize_after",
               "discriminator_after", "discriminator_channels", "stft_window")
FIXED_TOKENS = (*FIXED, "width", "depth", "heads", "coarse_quantizers", "codec_quantizers", "text",
                "max_text_len")

MOST_CHUNK = 64  # recordings in one forward pass, at most, where --chunk_size is 0
EVAL_SECONDS = 1.0  # length of the codec's crops in evaluation
SOUNDS = 2  # recordings that an evaluation writes as WAV and PNG
PROMPT_SECONDS = 0.4  # how much of them a continuation is given, in training's evaluations
LONGEST = 2.0  # seconds of a text of the built-in data, at most
HEARD_SECONDS = 0.2  # by which a voice is judged, at least
TEXT_WORDS, TEXT_DEPTH = 320, 2  # words with a token of their own, others being spelled; blocks of the text encoder
TOKENIZER = "kmeans.pt"  # in the folder of the semantic run


# Codec (SoundStream §III-A, §III-B)

class CausalConv(nn.Conv1d):
    """Convolution whose output depends on nothing later, (B, C, T) -> (B, C', T / stride)."""

    def forward(self, x):
        left = self.dilation[0] * (self.kernel_size[0] - 1) + 1 - self.stride[0]
        return super().forward(F.pad(x, (left, 0)))


class CausalUpsample(nn.ConvTranspose1d):
    """Transposed convolution, its kernel twice its stride, cut to what does not need the future: T -> T · stride."""

    def forward(self, x):
        x = torch.cat([torch.zeros_like(x[..., :1]), x], dim=2)  # after silence
        return super().forward(x)[..., self.stride[0]:-self.stride[0]]


class ResidualUnit(nn.Module):
    """Dilated convolution of 7, then one of 1 (SoundStream, Fig. 3)."""

    def __init__(self, width, dilation):
        super().__init__()
        self.wide, self.narrow = CausalConv(width, width, 7, dilation=dilation), CausalConv(width, width, 1)

    def forward(self, x):
        return x + self.narrow(F.elu(self.wide(F.elu(x))))


class SoundStream(nn.Module):
    """Waves -> codes -> waves (SoundStream §III, Fig. 3). T samples make ceil(T / hop) frames of Q codes.

    Everything is causal at the grain of a frame: later samples change nothing in earlier frames.
    """

    checksum = ""  # of its file, which tells it from others

    def __init__(self, cfg):
        super().__init__()
        self.hop = math.prod(cfg.strides)
        self.rate = cfg.sample_rate
        self.quantizers = cfg.quantizers
        self.codebook_size = cfg.codebook_size
        widths = [cfg.channels * 2 ** i for i in range(len(cfg.strides) + 1)]
        encoder, decoder = [CausalConv(1, widths[0], 7)], []
        for narrow, wide, stride in zip(widths, widths[1:], cfg.strides):
            encoder += [*(ResidualUnit(narrow, dilation) for dilation in (1, 3, 9)), nn.ELU(),
                        CausalConv(narrow, wide, 2 * stride, stride)]
            decoder = [nn.ELU(), CausalUpsample(wide, narrow, 2 * stride, stride),
                       *(ResidualUnit(narrow, dilation) for dilation in (1, 3, 9)), *decoder]
        self.encoder = nn.Sequential(*encoder, nn.ELU(), CausalConv(widths[-1], cfg.codec_width, 3))
        self.decoder = nn.Sequential(CausalConv(cfg.codec_width, widths[-1], 7), *decoder, nn.ELU(),
                                     CausalConv(widths[0], 1, 7))
        self.quantizer = ResidualQuantizer(cfg.codec_width, cfg.quantizers, cfg.codebook_size, cfg.codebook_decay,
                                           cfg.dead_below, cfg.quantizer_dropout)
        self.apply(self.initialize)

    @staticmethod
    def initialize(layer):
        """Weights that keep the variance (LeCun et al. 1998, §4.6); a residual unit starts as the identity."""
        if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
            taps = layer.kernel_size[0] // (layer.stride[0] if isinstance(layer, nn.ConvTranspose1d) else 1)
            nn.init.normal_(layer.weight, std=(layer.in_channels * taps) ** -0.5)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, ResidualUnit):
            nn.init.zeros_(layer.narrow.weight)

    def latents(self, wave):
        """Frames (B, ceil(T / hop), D) of waves (B, T)."""
        x = F.pad(wave, (0, -wave.shape[1] % self.hop))[:, None]
        return self.encoder(x).transpose(1, 2)

    def waves(self, latents):
        """Waves (B, T·hop) of frames (B, T, D)."""
        return self.decoder(latents.transpose(1, 2))[:, 0].float()

    def forward(self, wave):
        """(reconstruction (B, T), codes (B, frames, Q), commitment loss) of waves (B, T)."""
        quantized, codes, commitment = self.quantizer(self.latents(wave))
        return self.waves(quantized)[:, :wave.shape[1]], codes, commitment

    @torch.no_grad()
    def encode(self, wave):
        """Codes (B, frames, Q) of waves (B, T), of the first `quantizers`."""
        return self.quantizer.encode(self.latents(wave), self.quantizers)

    @torch.no_grad()
    def decode(self, codes):
        """Waves (B, frames·hop) of codes (B, frames, n), of the first n quantizers."""
        return self.waves(self.quantizer.decode(codes))


class PublishedCodec:
    """EnCodec, DAC or Mimi from the package transformers in the place of a SoundStream: hf:MODEL.

    MODEL is a name at huggingface.co or a folder. T samples make ceil(T / hop) frames of Q codes: a
    wave is padded with silence to whole frames, and its codes are the package's of that.
    """

    def __init__(self, spec, device):
        flag = f"--soundstream {spec}"
        name = spec.removeprefix("hf:")
        self.model = store.from_transformers(flag, name, ("encodec", "dac", "mimi")).to(device)
        settings = self.model.config
        channels = getattr(settings, "audio_channels", 1)
        if channels != 1:
            raise UserError(f"{flag}: a model of {channels} channels; expected one")
        if getattr(settings, "normalize", False) or getattr(settings, "chunk_length_s", None):
            raise UserError(f"{flag}: a model that normalizes chunks of sound; expected one that "
                            "does not, such as hf:facebook/encodec_24khz")
        self.rate = settings.sampling_rate
        self.hop = getattr(settings, "hop_length", 0) or round(self.rate / settings.frame_rate)
        self.codebook_size = settings.codebook_size
        self.quantizers = getattr(settings, "n_codebooks", 0) or settings.num_quantizers
        self.encodec = settings.model_type == "encodec"
        self.checksum = name
        if Path(name).is_dir():  # what is in a folder may change, unlike what is published
            files = Path(name).iterdir()
            weights = [path for path in files if path.suffix in (".safetensors", ".bin")]
            self.checksum = " ".join(checkpoint.checksum(path)[:16] for path in sorted(weights))

    @torch.no_grad()
    def encode(self, wave):
        """Codes (B, frames, Q) of waves (B, T)."""
        wave = F.pad(wave, (0, -wave.shape[1] % self.hop))[:, None]
        bitrate = {"bandwidth": max(self.model.config.target_bandwidths)} if self.encodec else {}
        codes = self.model.encode(wave, **bitrate, return_dict=True).audio_codes
        codes = codes.flatten(0, -3).transpose(1, 2)  # EnCodec's have an axis of chunks before
        return codes[..., :self.quantizers]

    @torch.no_grad()
    def decode(self, codes):
        """Waves (B, frames·hop) of codes (B, frames, n), of the first n quantizers."""
        length = codes.shape[1] * self.hop
        codes = codes.transpose(1, 2)
        if self.encodec:
            found = self.model.decode(codes[None], [None], return_dict=True)
        else:
            found = self.model.decode(audio_codes=codes, return_dict=True)
        wave = found.audio_values.flatten(1)
        return F.pad(wave, (0, length - wave.shape[1]))  # DAC's is shorter where a stride is odd


# Discriminators (SoundStream §III-D)

class WaveDiscriminator(nn.Module):
    """Strided, grouped convolutions over a wave (MelGAN, Kumar et al. 2019, Table 1b)."""

    def __init__(self, channels, scale):
        super().__init__()
        self.scale, widths = scale, [channels * min(64, 4 ** i) for i in range(5)]
        self.layers = nn.ModuleList([nn.Conv1d(1, channels, 15, padding=7), *(
            nn.Conv1d(narrow, wide, 41, 4, 20, groups=max(1, narrow // 4))
            for narrow, wide in itertools.pairwise(widths)), nn.Conv1d(widths[-1], widths[-1], 5, padding=2)])
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


class STFTDiscriminator(nn.Module):
    """Residual units over the short-time Fourier transform (SoundStream §III-D, Fig. 4).

    Its real and imaginary parts are two channels. The paper names no activation and no shortcut:
    here a leaky ReLU, as over waves, and a strided convolution of 1.
    """

    def __init__(self, channels, window):
        super().__init__()
        self.window = window
        self.stem = nn.Conv2d(2, channels, 7, padding=3)
        self.units = nn.ModuleList()
        widths = [channels * mult for mult in (1, 2, 4, 4, 8, 8, 16)]
        strides = [(2, 1), (2, 2)] * 3  # over frequency, time
        for narrow, wide, stride in zip(widths, widths[1:], strides):
            kernel = stride[0] + 2, stride[1] + 2
            self.units.append(nn.ModuleList([
                nn.Conv2d(narrow, narrow, 3, padding=1),
                nn.Conv2d(narrow, wide, kernel, stride, 1),
                nn.Conv2d(narrow, wide, 1, stride),
            ]))
        self.out = nn.Conv2d(widths[-1], 1, (window // 128, 1))  # all frequencies that are left
        self.register_buffer("hann", torch.hann_window(window), persistent=False)

    def spectrum(self, wave):
        """Real and imaginary parts (B, 2, F, T') of waves (B, T), F = window / 2, in fp32."""
        with torch.autocast(wave.device.type, enabled=False):
            x = torch.stft(wave.float(), self.window, self.window // 4, window=self.hann,
                           return_complex=True)
            x = x[:, :-1]  # without the highest frequency
            return torch.view_as_real(x).permute(0, 3, 1, 2)

    def forward(self, wave):
        """Scores (B, T' / 8) of waves (B, T), higher for real ones, and features of every unit."""
        x = F.leaky_relu(self.stem(self.spectrum(wave)), 0.1)
        features = [x]
        for narrow, wide, shortcut in self.units:
            h = wide(F.leaky_relu(narrow(x), 0.1))
            x = F.leaky_relu(h + shortcut(x)[..., :h.shape[3]], 0.1)
            features.append(x)
        return self.out(x).flatten(1), features


class Discriminators(nn.Module):
    """Three of waves, at full, half and quarter rate, and one of spectra; forward: [(scores, features)], one each."""

    def __init__(self, cfg):
        super().__init__()
        self.each = nn.ModuleList([*(WaveDiscriminator(cfg.discriminator_channels, scale) for scale in (1, 2, 4)),
                                   STFTDiscriminator(2 * cfg.discriminator_channels, cfg.stft_window)])

    def forward(self, wave):
        return [one(wave) for one in self.each]


# Losses of the codec (SoundStream §III-E)

def spectral_distance(fake, real, rate):
    """Distance of mel spectra of waves (B, T) at six windows s = 64 .. 2048 -> (B,) (Eq. 4, 5).

    L1 plus sqrt(s / 2) times the L2 norm of the logarithms, over 64 mel bins, summed over windows
    and over frames, s / 4 samples apart: a crop twice as long has twice this loss. The paper gives
    no scale of its spectra. Here a sine of amplitude a has the magnitude a at every s. Of plain FFT
    magnitudes the L1 part would be s / 4 times larger, that of the logarithms the same down to the
    floor of 1e-3. So --mel_weight is not in the paper's unit, also where it is 1.
    """
    total = 0
    for window in (2 ** i for i in range(6, 12)):
        filters = recordings.mel_filters(rate, window, 64, device=real.device)
        x, y = (recordings.stft_magnitude(wave, window, window // 4) @ filters for wave in (fake, real))
        logs = (x.clamp(min=1e-3).log() - y.clamp(min=1e-3).log()).square().sum(2)
        total = total + ((x - y).abs().sum(2) + (window / 2) ** 0.5 * (logs + 1e-8).sqrt()).sum(1)
    return total


def reconstruction_loss(cfg, fake, real, commitment):
    """What the codec learns from besides the discriminators, for waves (B, T), in fp32."""
    with torch.autocast(real.device.type, enabled=False):
        fake, loss = fake.float(), cfg.commitment_weight * commitment.float()
        loss = loss + cfg.wave_weight * (fake - real).abs().mean()
        return loss + cfg.mel_weight * spectral_distance(fake, real, cfg.sample_rate).mean()


def adversarial_loss(cfg, discriminators, fake, real):
    """Hinge loss of the codec (Eq. 2) and L1 distance of features (Eq. 3), by frozen discriminators, as means."""
    discriminators.requires_grad_(False)
    with torch.no_grad():
        wanted = discriminators(real)
    found = discriminators(fake)
    discriminators.requires_grad_(True)
    hinge = torch.stack([F.relu(1 - score.float()).mean() for score, _ in found]).mean()
    distances = []
    for (_, fake_features), (_, real_features) in zip(found, wanted):
        layers = [F.l1_loss(x.float(), y.float()) for x, y in zip(fake_features, real_features)]
        distances.append(torch.stack(layers).mean())
    feature = torch.stack(distances).mean()
    return cfg.adversarial_weight * hinge + cfg.feature_weight * feature


def discriminator_loss(discriminators, fake, real, penalty_weight=0.0):
    """Hinge loss of the discriminators (Eq. 1) for waves (B, T), a mean over them.

    With a weight, plus the squared norm of a sample's gradient at real waves (Mescheder et al. 2018, Eq. 9), in fp32:
    in fp16 its own gradient would overflow at any loss scale.
    """
    scores = [score.float() for score, _ in discriminators(torch.cat([real, fake.detach()]))]
    loss = torch.stack([F.relu(1 - x[:len(real)]).mean() + F.relu(1 + x[len(real):]).mean() for x in scores]).mean()
    if penalty_weight:
        real = real.detach().requires_grad_()
        with torch.autocast(real.device.type, enabled=False):
            gradients = [torch.autograd.grad(score.sum(), real, create_graph=True)[0]
                         for score, _ in discriminators(real)]
        loss = loss + penalty_weight * torch.stack([g.square().sum(1).mean() for g in gradients]).mean()
    return loss


# Token transformers (AudioLM §III-C)

class Stream(NamedTuple):
    """A kind of tokens: frames of Q codes below K."""
    name: str
    codes: int  # Q
    size: int  # K


def offsets_of(streams):
    """Where each stream's rows of embeddings begin, one for its start token and K a quantizer; row 0 is padding."""
    return list(itertools.accumulate([1, *(1 + stream.codes * stream.size for stream in streams)]))


def lay_out(streams, codes):
    """The one sequence that a recording's streams make: (inputs (N,), place of the last stream's start token).

    codes: for each stream (T, Q) int64. Two frames of the coarse stage, with two quantizers, after three semantic
    tokens; C01 is the code of frame 0 and quantizer 1, <s> and <c> are start tokens:

        step     0    1    2    3    4    5    6    7    8
        input   <s>  S0   S1   S2   <c>  C00  C01  C10  C11
        target                      C00  C01  C10  C11  EOS

    Code (t, q) is predicted at step `place` + t·Q + q, from all before it. EOS (class K of the first quantizer's head)
    is in place of a frame that there is not, only where the recording truly ends; see `targets`. In the table, a code's
    row is offset + 1 + q·K + code, so no two kinds of tokens share a row.
    """
    sequence = []
    for stream, offset, code in zip(streams, offsets_of(streams), codes):
        place = sum(map(len, sequence))
        rows = offset + 1 + torch.arange(stream.codes) * stream.size + code  # (T, Q)
        sequence += [torch.tensor([offset]), rows.flatten()]
    return torch.cat(sequence), place


def targets(stream, code, ended):
    """What the steps from the start token on predict: (T + 1, Q) of codes (T, Q); -100 for nothing; EOS if `ended`."""
    target = F.pad(code, (0, 0, 0, 1), value=-100)
    target[len(code), 0] = stream.size if ended else -100
    return target


class TokenTransformer(nn.Module):
    """A causal transformer over streams of tokens, of which it predicts the last: semantic, coarse and fine alike.

    Each quantizer has embeddings of its own, and a head of its own over its K codes and EOS; EOS is a target of the
    first alone. Text is not in AudioLM: it is a prefix, as in SPEAR-TTS (Kharitonov et al. 2023), and
    dropped at times for guidance.
    """

    def __init__(self, cfg, streams, vocabulary=()):
        super().__init__()
        self.cfg, self.streams, self.offsets, width = cfg, streams, offsets_of(streams), cfg.width
        self.tokenizer = clip.Tokenizer(vocabulary)  # of texts
        self.drawing = Drawing(cfg.temperature, cfg.top_k, cfg.guidance_scale)
        # What training had: most frames of the last stream and of that before it, frames a second.
        self.window = self.context = self.rate = 0
        self.embed = nn.Embedding(self.offsets[-1], width, padding_idx=0)
        nn.init.normal_(self.embed.weight[1:], std=width ** -0.5)
        self.heads = nn.Parameter(torch.randn(streams[-1].codes, streams[-1].size + 1, width) * 0.5 * width ** -0.5)
        self.transformer = Transformer(width, cfg.depth, cfg.heads, dropout=cfg.dropout)
        if cfg.text != "none":
            self.text_embed = nn.Embedding(len(self.tokenizer), width)
            self.text_encoder = Transformer(width, TEXT_DEPTH, cfg.heads, causal=False)
            self.null_text = learned_tokens(cfg.max_text_len, width)

    def text_tokens(self, texts):
        """Word tokens (B, L) of B texts, padded with 0; None for a model without text."""
        if self.cfg.text == "none":
            return None
        tokens = [self.tokenizer.encode(text)[:self.cfg.max_text_len] for text in texts]
        padded = [found + [0] * (self.cfg.max_text_len - len(found)) for found in tokens]
        return torch.tensor(padded, device=self.text_embed.weight.device)

    def condition(self, text, drop):
        """Embeddings (B, L, W) of texts (B, L), of "no text" where `drop` (B,) or if text is None; None without."""
        if self.cfg.text == "none":
            return None
        if text is None:
            return self.null_text.weight.expand(len(drop), -1, -1)
        tokens = self.text_encoder(self.text_embed(text))
        return torch.where(drop[:, None, None], self.null_text.weight.to(tokens.dtype), tokens)

    def run(self, inputs, condition, cache=False):
        """Outputs (B, N, W) at inputs (B, N) after a text prefix; with `cache`, keys and values, too."""
        x = self.embed(inputs)
        prefix = 0
        if condition is not None:
            x = torch.cat([condition.to(x.dtype), x], dim=1)
            prefix = condition.shape[1]
        if not cache:
            return self.transformer(x)[:, prefix:]
        x, keys_values = self.transformer(x, return_cache=True)
        return x[:, prefix:], keys_values

    def forward(self, inputs, place, target, text=None, drop=None):
        """(cross-entropy summed, number of tokens, of right guesses) a sample, each (B,).

        inputs (B, N), place (B,), target (B, T + 1, Q): as of `lay_out` and `targets`, padded. drop (B,): without text.
        """
        x = self.run(inputs, self.condition(text, drop))  # padding stands at the end, so the causal mask hides it
        steps = place[:, None] + torch.arange(target[0].numel(), device=x.device)  # (B, (T + 1)·Q)
        steps = steps.clamp(max=x.shape[1] - 1)  # those beyond have no target
        x = x.gather(1, steps[..., None].expand(-1, -1, x.shape[2]))
        x = x.unflatten(1, target.shape[1:])  # (B, T + 1, Q, W)
        logits = torch.einsum("btqw,qkw->btqk", x, self.heads.to(x.dtype)).float()
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), ignore_index=-100, reduction="none")
        right = logits.detach().argmax(-1) == target
        return loss.view(target.shape).sum((1, 2)), (target >= 0).sum((1, 2)), right.sum((1, 2))

    def step(self, rows, memory):
        """Outputs (B, W) at the next input (B,) of every sample."""
        return self.transformer.step(self.embed(rows), memory)


# Generation (AudioLM §III-D)

class Drawing(NamedTuple):
    """How codes are drawn."""
    temperature: float = 1.0
    top_k: int = 0
    guidance_scale: float = 1.0


def draw(scores, uniform, drawing):
    """Codes (B,) of scores (B, K), by the numbers `uniform` (B,) in [0, 1), from the top_k most probable."""
    if not drawing.temperature:
        return scores.argmax(-1)
    kept, codes = scores.topk(min(drawing.top_k or scores.shape[-1], scores.shape[-1]), dim=-1)
    cumulative = (kept / drawing.temperature).softmax(-1).double().cumsum(-1)
    place = (cumulative < uniform[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    return codes.gather(-1, place).squeeze(-1)


@torch.no_grad()
def generate(model, samples, frames, seeds, drawing, text=None, ends=True):
    """Go on with the last stream of B samples for up to `frames` frames, or to EOS if it `ends`.

    samples: for each, its streams' codes (T, Q); of the last stream, what there is already, maybe nothing. seeds: a
    number a sample, which alone decides it. text (B, L): guidance moves scores away from those
    without it. ends: a bool, or one a sample.
    Returns B of (T, Q), what there was included, and for each whether it came to EOS; no recording is empty.
    """
    stream, device, count = model.streams[-1], model.embed.weight.device, len(samples)
    laid = [lay_out(model.streams, codes)[0] for codes in samples]
    guided = text is not None and drawing.guidance_scale != 1
    if guided:  # the second half goes without the text
        laid, text = laid * 2, text.repeat(2, 1)
    inputs = nn.utils.rnn.pad_sequence(laid, batch_first=True).to(device)
    length, unguided = torch.tensor([len(one) for one in laid], device=device), torch.arange(len(laid)) >= count
    x, cache = model.run(inputs, model.condition(text, unguided.to(device)), cache=True)
    x, size = x[torch.arange(len(x), device=device), length - 1], cache[0][0].shape[2]  # with the text prefix
    memory = Memory(cache, length + size - inputs.shape[1], size + frames * stream.codes)

    uniform = torch.stack([torch.rand(frames, stream.codes, generator=torch.Generator().manual_seed(seed))
                           for seed in seeds]).to(device)
    empty = torch.tensor([not len(codes[-1]) for codes in samples], device=device)
    endless = ~torch.tensor(ends, device=device).expand(count)
    out = torch.zeros(count, frames, stream.codes, dtype=torch.long, device=device)
    end = torch.full((count,), frames, device=device)  # frames that each has
    for i in range(frames * stream.codes):
        t, q = divmod(i, stream.codes)
        scores = F.linear(x, model.heads[q].to(x.dtype)).float()  # (B, K + 1), or (2B, K + 1) if guided
        if guided:
            with_text, without = scores.chunk(2)
            scores = without + drawing.guidance_scale * (with_text - without)
        if q:  # EOS is only in place of a frame's first code
            scores[:, stream.size] = -torch.inf
        else:
            scores[:, stream.size].masked_fill_(endless | empty if t == 0 else endless, -torch.inf)
        code = draw(scores, uniform[:, t, q], drawing)
        end = torch.where((code == stream.size) & (end == frames), t, end)
        if q == 0 and bool((end <= t).all()):
            break
        out[:, t, q] = code = code.clamp(max=stream.size - 1)
        if i + 1 < frames * stream.codes:
            rows = model.offsets[-2] + 1 + q * stream.size + code
            x = model.step(rows.repeat(1 + guided), memory)
    out, lengths = out.cpu(), end.tolist()
    return [torch.cat([codes[-1], new[:length]]) for codes, new, length in zip(samples, out, lengths)], \
        [length < frames for length in lengths]


def go_on(model, given, tokens, goals, seeds, text=None, ends=True):
    """`generate` past the training length: up to `goals` frames each, in windows of at most model.window frames.

    tokens: B of (T_b, Q), what there is. given(b, past): the earlier streams of sample b from the
    time on at which `past` (T, Q) ends. A window begins there and is given what a training sample
    had at most, model.context frames of them; one that is not given all cannot come to EOS. When a
    window is full, its later half is what the next one begins with. Returns B of (T_b, Q).
    """
    tokens, over, window = [one.cpu() for one in tokens], [False] * len(tokens), model.window
    for number in itertools.count():
        todo = [b for b, one in enumerate(tokens) if not over[b] and len(one) < goals[b]]
        if not todo:
            return tokens
        begins = [len(tokens[b]) - window // 2 if len(tokens[b]) >= window else 0 for b in todo]
        rooms = [min(window - len(tokens[b]) + begin, goals[b] - len(tokens[b])) for b, begin in zip(todo, begins)]
        samples, may_end = [], []
        for b, begin in zip(todo, begins):
            earlier = given(b, tokens[b][:begin])
            samples.append([*(codes[:model.context] for codes in earlier), tokens[b][begin:]])
            may_end.append(ends and all(len(codes) <= model.context for codes in earlier))
        window_seeds = [accumulate.number(seeds[b], number) for b in todo]
        made, ended = generate(model, samples, max(rooms), window_seeds, model.drawing,
                               None if text is None else text[todo], may_end)
        for b, begin, room, one, end in zip(todo, begins, rooms, made, ended):
            fresh = one[len(tokens[b]) - begin:]
            over[b] = end and len(fresh) < room
            tokens[b] = torch.cat([tokens[b], fresh[:room]])


# The pipeline: text -> semantic -> coarse -> fine -> wave (AudioLM, Fig. 2)

class Pipeline:
    """Codec, semantic tokenizer and the three transformers, as a text or a prompt goes through them."""

    def __init__(self, run, device, weights="ema", model="model.pt"):
        """run: the folder of the runs, RUN/semantic and so on. UserError if they were not trained on each other."""
        self.device, self.models, made_of = device, {}, {}
        for stage in ("semantic", "coarse", "fine"):
            file = model_file(Path(run) / stage, stage, model, weights)
            self.models[stage], made_of[stage] = load_transformer(file, stage, device, weights)
        coarse = self.models["coarse"]
        self.codec = codec_of(coarse.cfg, device)
        self.tokenizer = load_tokenizer(coarse.cfg.semantic, device)
        for stage, name in itertools.product(made_of, ("tokenizer", "codec")):
            if made_of[stage].get(name) not in (None, getattr(self, name).checksum):
                raise UserError(f"{Path(run) / stage}: trained on the tokens of another {name} than coarse; train it "
                                "anew")
        if self.models["fine"].streams[0] != coarse.streams[-1]:
            raise UserError(f"{Path(run) / 'fine'}: trained with other --coarse_quantizers than coarse; train it anew")

    def semantic_tokens(self, wave):
        """Semantic tokens (N, 1) of the whole frames of a wave (T,), at the codec's rate."""
        rate = self.codec.rate
        whole = max(1, len(wave) * semantic.FRAME_RATE // rate)  # the next would end in silence
        tokens = self.tokenizer.encode(wave, rate)[:whole]
        return torch.from_numpy(semantic.unique(tokens))[:, None]

    def codes(self, wave):
        """Codes (N, Q) of a wave (T,)."""
        return self.codec.encode(wave[None].to(self.device))[0].cpu()

    def prompt(self, wave):
        """(semantic tokens, codes) of the end of a wave (T,), in whole frames; for `speak`."""
        wave = wave[len(wave) % self.codec.hop:]
        return self.semantic_tokens(wave), self.codes(wave)

    def nothing(self):
        """The semantic tokens and codes of no prompt."""
        return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, self.codec.quantizers, dtype=torch.long)

    def speak(self, prompts, seconds, seeds, texts=None, fine=True):
        """Codes of B sounds, each (T, Q): those of the prompts, and up to `seconds` after them.

        prompts: (semantic tokens, codes) of each. texts: B, or None. Not `fine`: of the coarse quantizers alone.
        """
        begun, codes = ([*each] for each in zip(*prompts))
        width, rate = self.models["coarse"].streams[-1].codes, self.models["semantic"].rate

        def by(stage, given, tokens, goals, ends=True):
            model = self.models[stage]
            text = None if texts is None else model.text_tokens(texts)
            return go_on(model, given, tokens, goals, [accumulate.number(seed, stage) for seed in seeds], text, ends)

        # Content: semantic tokens, from the text or the prompt (§III-C1).
        content = by("semantic", lambda b, past: [], begun, [len(one) + math.ceil(seconds * rate) for one in begun])

        # Voice and sound: coarse codes, of the semantic tokens after what a window has dropped (§III-C2).
        def after(b, past):  # tokens have no durations: those of the dropped codes are counted by encoding them again
            spoken = len(self.semantic_tokens(self.wave(past))) if len(past) else 0
            return [content[b][min(len(content[b]) - 1, spoken):]]
        goals = [len(one) + max(1, round(seconds * self.codec.rate / self.codec.hop)) for one in codes]
        coarse = by("coarse", after, [one[:, :width] for one in codes], goals)
        if not fine:
            return coarse

        # Detail: fine codes, of the coarse ones (§III-C3).
        rest = by("fine", lambda b, past: [coarse[b][len(past):]],
                  [one[:, width:] for one in codes], [len(one) for one in coarse], ends=False)
        return [torch.cat(pair, dim=1) for pair in zip(coarse, rest)]

    def wave(self, codes):
        """The wave (T,) of codes (T, Q), on the CPU."""
        return self.codec.decode(codes[None].to(self.device))[0].cpu()


# What a stage trains on, and how it is evaluated

class CodecTask:
    """What training the codec needs: crops of waves, the model, its discriminators, figures and sounds."""

    facts, fixed = {}, FIXED_CODEC

    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        longer, *val_longer = open_sources(cfg, EVAL_SECONDS)
        self.parts = data.parts(longer, cfg, *val_longer)
        self.recordings = copy.copy(longer)  # the same in shorter crops
        self.recordings.crop = round(cfg.seconds * cfg.sample_rate)
        self.training = self.recordings, self.parts["train"][1]
        accumulate.seed(cfg.seed, "weights")
        self.model = self.codec = SoundStream(cfg).to(device)
        self.discriminators = Discriminators(cfg).to(device) if cfg.discriminator_after < cfg.steps else None

    def loss(self, batch, adversarial):
        """(loss, reconstruction) of a chunk; `adversarial`: with what the discriminators say."""
        fake, _, commitment = self.model(batch["wave"])
        loss = reconstruction_loss(self.cfg, fake, batch["wave"], commitment)
        if adversarial:
            loss = loss + adversarial_loss(self.cfg, self.discriminators, fake, batch["wave"])
        return loss, fake

    @torch.no_grad()
    def make_codebooks(self):
        """K-means on frames of the first training crops, by rank 0 for all: the same on any number of ranks."""
        if self.model.quantizer.ready:  # of --init_from
            return
        cfg, frames = self.cfg, [torch.zeros(0, self.cfg.codec_width, device=self.device)]
        reader = data.Chunks(*self.training, accumulate.number(cfg.seed, "codebooks"))
        for start in itertools.count(0, cfg.chunk_size):
            if not dist.is_main() or sum(map(len, frames)) >= 32 * cfg.codebook_size:
                break
            wave = reader[start, start + cfg.chunk_size]["wave"].to(self.device)
            frames.append(self.model.latents(wave).flatten(0, 1).float())
        self.model.quantizer.initialize(torch.cat(frames), accumulate.number(cfg.seed, "kmeans"))

    def update_codebooks(self, stepped, step):
        """Move the codebooks by what the chunks gathered on all ranks, unless the step overflowed."""
        if stepped:
            self.model.quantizer.update(accumulate.number(self.cfg.seed, "codes", step))
        else:
            self.model.quantizer.discard()

    @torch.no_grad()
    def figures(self, part):
        """Mean reconstruction loss, the quality of sound at each number of quantizers, and the codebooks' use."""
        cfg, codec, ready = self.cfg, self.model, self.model.quantizer.ready
        numbers = sorted({cfg.quantizers, *(2 ** i for i in range(cfg.quantizers.bit_length()))}) if ready else []
        sums, used = collections.defaultdict(lambda: np.zeros(2)), [torch.zeros(0, cfg.quantizers, dtype=torch.long)]
        for _, batch in data.batches(*self.parts[part], cfg.eval_samples, cfg.chunk_size):
            wave = batch["wave"].to(self.device)
            with amp.autocast(self.device, cfg.precision):
                z = codec.latents(wave)
                codes = codec.quantizer.encode(z)
                sounds = {n: codec.decode(codes[..., :n])[:, :wave.shape[1]] for n in numbers}
                best = sounds[cfg.quantizers] if ready else codec.waves(z)[:, :wave.shape[1]]
            loss = reconstruction_loss(cfg, best, wave, torch.zeros((), device=self.device))
            sums["loss"] += loss.expand(len(wave)).sum().item(), len(wave)
            for n, sound in sounds.items():
                fake, real = (recordings.log_mel(x, codec.rate, window=1024, hop=256, bins=64) for x in (sound, wave))
                sums[f"mel_distance@{n}"] += (fake - real).abs().mean((1, 2)).sum().item(), len(wave)
                sums[f"si_sdr_db@{n}"] += recordings.si_sdr(sound, wave).sum().item(), len(wave)
            frames = -(-batch["length"][:, None] // codec.hop)  # the padding of a short recording tells nothing
            used.append(codes.cpu()[torch.arange(codes.shape[1]) < frames])
        entropies, _ = use_of(used, cfg.codebook_size)
        return means(sums) | {f"codebook_perplexity@{q}": entropy.exp().item()
                              for q, entropy in enumerate(entropies, 1) if ready}

    def sounds(self, part):
        """(name, wave (T,), caption) of a part's first recordings, and of their reconstructions."""
        source, rows = self.parts[part]
        for number, (row, wave) in enumerate(zip(*source.readable(rows[:SOUNDS]))):
            yield f"{number}_real", wave, source.name(row)
            yield f"{number}", self.model(wave[None].to(self.device))[0][0].cpu(), source.name(row)


def use_of(codes, size):
    """(entropies (Q,) in nats, numbers (Q,)) of the codes below `size` in all ranks' `codes` [(N, Q)]; -100: none."""
    counts = [torch.bincount(column[column >= 0], minlength=size) for column in torch.cat(codes).T]
    counts = torch.tensor(dist.total(torch.cat(counts).tolist())).view(len(counts), size)
    return torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1), counts.sum(1)


def means(sums):
    """{name: mean over all ranks} of {name: (sum, number)}, of which a rank may have some alone."""
    names = list(dict.fromkeys(name for names in dist.gather([*sums]) for name in names))
    totals = dist.total([value for name in names for value in sums[name]])
    return {name: total / number for name, total, number in zip(names, totals[::2], totals[1::2])}


class TokenCrops:
    """A source for data.Chunks: crops of recordings as tokens, laid out for the transformer of a stage.

    fetch(rows, draws) -> ({"inputs", "place", "target", "text"}, good (n,)). Kinds of tokens are cut at the same time,
    whatever their frame rates. A crop that reaches the true end of its recording ends in EOS.
    """

    def __init__(self, cfg, source, streams, caches, rates):
        """caches, rates: of each kind of tokens, {"semantic", "codes": TokenCache} and {…: frames a second}."""
        self.cfg, self.source, self.streams, self.caches, self.rates = cfg, source, streams, caches, rates
        self.main = "codes" if "codes" in caches else "semantic"
        self.window = max(1, round(cfg.seconds * rates[self.main]))

    def __len__(self):
        return len(self.source)

    def name(self, row):
        return self.source.name(row)

    def crop(self, row, place=0.0):
        """(each stream's tokens (T, Q) int64, whether the end is reached) of a row, cropped at `place` in [0, 1)."""
        frames, rate = self.caches[self.main].frames(row), self.rates[self.main]
        begin = int(place * (max(0, frames - self.window) + 1))
        end, found = min(frames, begin + self.window), {}
        for kind, cache in self.caches.items():
            first, last = (round(edge * self.rates[kind] / rate) for edge in (begin, end))
            found[kind] = cache[row][first:last if end < frames else None]
        if "codes" in found:
            found["coarse"], found["fine"] = np.split(found["codes"], [self.cfg.coarse_quantizers], axis=1)
        if "semantic" in found:  # without repetitions, so the coarse stage finds durations (AudioLM §III-C)
            found["semantic"] = semantic.unique(found["semantic"][:, 0])[:, None]
        return [torch.from_numpy(np.ascontiguousarray(found[s.name])) for s in self.streams], end == frames

    def fetch(self, rows, draws=None):
        places = np.zeros(len(rows)) if draws is None else data.uniform(draws, 1)[:, 0]
        crops = [self.crop(int(row), place) for row, place in zip(rows, places)]
        inputs, begins = zip(*(lay_out(self.streams, codes) for codes, _ in crops))
        target = [targets(self.streams[-1], codes[-1], ended) for codes, ended in crops]
        batch = {"inputs": nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), "place": torch.tensor(begins),
                 "target": nn.utils.rnn.pad_sequence(target, batch_first=True, padding_value=-100)}
        if self.cfg.text != "none":
            batch["text"] = [self.source.text(int(row)) for row in rows]
        return batch, np.array([all(map(len, codes)) for codes, _ in crops])


def streams_of(cfg, sizes, quantizers):
    """The streams of a stage's transformer; sizes: {kind of tokens: how many different ones}."""
    words = Stream("semantic", 1, sizes["semantic"])
    coarse = Stream("coarse", cfg.coarse_quantizers, sizes["codes"])
    fine = Stream("fine", quantizers - cfg.coarse_quantizers, sizes["codes"])
    return {"semantic": [words], "coarse": [words, coarse], "fine": [coarse, fine]}[cfg.stage]


class TokenTask:
    """What training a token transformer needs: crops of tokens, the model, figures and sounds."""

    discriminators, fixed = None, FIXED_TOKENS

    def __init__(self, cfg, device, vocabulary):
        self.cfg = cfg
        self.device = device
        self.codec = tokenizer = None
        sources = open_sources(cfg)
        sizes = {"semantic": 0, "codes": 0}
        rates, made_of = {}, {}
        self.recordings, parts = sources[0], data.parts(sources[0], cfg, *sources[1:])
        if cfg.stage == "semantic":
            fit_tokenizer(cfg, self.recordings, parts["train"][1], device)
        if cfg.stage != "fine":
            tokenizer = load_tokenizer(cfg.run_dir if cfg.stage == "semantic" else cfg.semantic, device)
            made_of["tokenizer"] = tokenizer.checksum
            sizes["semantic"], rates["semantic"] = tokenizer.clusters, semantic.FRAME_RATE
        if cfg.stage != "semantic":
            self.codec = codec = dist.on_each(lambda: codec_of(cfg, device))
            made_of["codec"] = codec.checksum
            sizes["codes"] = codec.codebook_size
            rates["codes"] = codec.rate / codec.hop
        self.streams = streams_of(cfg, sizes, self.codec.quantizers if self.codec else 0)
        crops = {source: TokenCrops(cfg, source, self.streams, token_caches(cfg, source, tokenizer, self.codec, device),
                                    rates) for source in sources}
        self.parts = {name: (crops[source], those) for name, (source, those) in parts.items()}
        self.training = self.crops, _ = self.parts["train"]
        accumulate.seed(cfg.seed, "weights")
        self.model = TokenTransformer(cfg, self.streams, vocabulary).to(device)
        lengths = self.lengths()
        for name, value in lengths.items():
            setattr(self.model, name, value)
        self.facts = {"streams": [list(stream) for stream in self.streams],
                      "vocabulary": vocabulary, "made_of": made_of, **lengths}

    def lengths(self):
        """The model's window, context and rate, as they are in the crops of 200 recordings.

        Semantic tokens have no fixed rate: 95th percentiles.
        """
        crops = self.crops
        rate = crops.rates[crops.main]
        cache = crops.caches[crops.main]
        rows = np.setdiff1d(self.training[1][:200], cache.empty).tolist()
        crop_lengths = [[len(codes) for codes in crops.crop(row)[0]] for row in rows]
        tokens = np.array(crop_lengths)  # (rows, streams)
        if self.cfg.stage != "semantic":
            return dict(window=int(tokens[:, 1].max()), context=int(tokens[:, 0].max()), rate=rate)
        seconds = np.array([min(crops.window, cache.frames(row)) for row in rows]) / rate
        rate = float(np.quantile(tokens[:, 0] / seconds, 0.95))
        return dict(window=int(np.quantile(tokens, 0.95)), context=0, rate=rate)

    def loss(self, batch, adversarial=False):
        """(loss, None) of a chunk. A sample's loss is the mean over its tokens, so a batch's is that of its chunks."""
        drop = torch.rand(len(batch["inputs"]), device=self.device) < self.cfg.text_drop
        text = self.model.text_tokens(batch.get("text"))
        sums, counts, _ = self.model(batch["inputs"], batch["place"], batch["target"], text, drop)
        return (sums / counts.clamp(min=1)).mean(), None

    @torch.no_grad()
    def figures(self, part):
        """Mean loss a token of the stage's own stream, share guessed right, and the loss of ignoring all context."""
        cfg, stream = self.cfg, self.streams[-1]
        sums, used = collections.defaultdict(lambda: np.zeros(2)), [torch.zeros(0, stream.codes, dtype=torch.long)]
        for _, batch in data.batches(*self.parts[part], cfg.eval_samples, cfg.chunk_size):
            batch = data.to_device(batch, self.device)
            with amp.autocast(self.device, cfg.precision):
                found = self.model(batch["inputs"], batch["place"], batch["target"],
                                   self.model.text_tokens(batch.get("text")), drop=batch["place"] < 0)  # none
            loss, count, right = (values.sum().item() for values in found)
            sums["loss"] += loss, count
            sums["accuracy"] += right, count
            used.append(batch["target"].flatten(0, 1).cpu())
        entropies, counts = use_of(used, stream.size + 1)
        return means(sums) | {"unigram_entropy": (entropies @ counts / counts.sum()).item()}

    def sounds(self, part):
        """(name, wave (T,), caption) of coarse codes of real semantic tokens, or of fine codes of real coarse ones."""
        model, (crops, rows), fine = self.model, self.parts[part], self.cfg.stage == "fine"
        rows = np.setdiff1d(rows, crops.caches[crops.main].empty)[:SOUNDS].tolist()
        if self.cfg.stage == "semantic" or not rows:
            return
        codes = [crops.crop(row)[0] for row in rows]
        begun = 0 if fine else round(PROMPT_SECONDS * model.rate)
        tokens = go_on(model, lambda b, past: [codes[b][0][len(past):]],
                       [real[:begun] for _, real in codes], [len(real) if fine else model.window for _, real in codes],
                       [accumulate.number(self.cfg.seed, "sound", row) for row in rows],
                       model.text_tokens(map(crops.source.text, rows)), ends=not fine)
        for number, (row, (given, _), found) in enumerate(zip(rows, codes, tokens)):
            found = torch.cat([given, found], dim=1) if fine else found
            yield f"{number}", self.codec.decode(found[None].to(self.device))[0].cpu(), crops.name(row)


@torch.no_grad()
def write_sounds(task, part, name):
    """Rank 0 writes what a task makes of a part's first recordings, as samples/NAME_*: {file: caption}."""
    files = {}
    for kind, wave, caption in task.sounds(part) if dist.is_main() else ():
        paths = [f"samples/{name}_{kind}{suffix}" for suffix in (".wav", ".png")]
        write_sound(wave, task.codec.rate, *(Path(task.cfg.run_dir) / path for path in paths))
        files |= dict.fromkeys(paths, caption)
    return files


def write_sound(wave, rate, *paths):
    """Write a wave (T,) to each of the `paths`: a .wav file, or a .png file of its spectrogram."""
    for path in paths:
        with checkpoint.replacing(path) as file:
            if str(path).lower().endswith(".wav"):
                recordings.write_wav(file, wave, rate)
            else:
                media.write_png(file, recordings.spectrogram(wave, rate))


# Data and what earlier stages made

def open_sources(cfg, seconds=0.0):
    """[recordings of cfg.data, those of cfg.val_data if there are], whose fetch gives crops of so many seconds."""
    crop, hop = round(seconds * cfg.sample_rate), math.prod(cfg.strides)
    return [recordings.Syllables(BUILTIN_ROWS, crop, hop, cfg.sample_rate) if path == "syllables" else
            recordings.Recordings(path, cfg.sample_rate, crop, hop, cfg.speaker_pattern)
            for path in (cfg.data, cfg.val_data) if path]


def token_caches(cfg, source, tokenizer, codec, device):
    """{"semantic", "codes": TokenCache} of all recordings, by a tokenizer and a codec, if there are."""
    folder, caches = Path(cfg.run_dir).parent / "tokens", {}
    if tokenizer:
        caches["semantic"] = recordings.token_cache(
            folder, source, {"tokenizer": tokenizer.checksum},
            lambda row: tokenizer.encode(source.wave(row), source.rate)[:, None], "semantic tokens")
    if codec:
        caches["codes"] = recordings.token_cache(
            folder, source, {"codec": codec.checksum},
            lambda row: codec.encode(source.wave(row)[None].to(device))[0].cpu().numpy(), "codes")
    return caches


def fit_tokenizer(cfg, source, rows, device):
    """Fit the tokenizer of the semantic stage to the training `rows` of its recordings, if its run has none yet."""
    path = Path(cfg.run_dir) / TOKENIZER
    if not dist.on_main(path.exists):
        features = "mfcc" if cfg.tokenizer == "kmeans" else cfg.tokenizer
        tokenizer = semantic.fit(source, rows, cfg.clusters, cfg.seed, features=features, device=device)
        dist.on_main(lambda: checkpoint.save(tokenizer.state(), path) and None)


def load_tokenizer(run, device):
    """The tokenizer of a semantic run, with what tells it from others in `checksum`."""
    path = model_file(run, "semantic", TOKENIZER)
    tokenizer = semantic.load(checkpoint.load(path), path).to(device)
    tokenizer.checksum = checkpoint.checksum(path)[:16]
    return tokenizer


def model_file(path, stage, name="model.pt", weights="ema"):
    """The file `name` of a stage's run, given its folder or the file; with "online" weights, the newest checkpoint."""
    path = Path(path)
    file = path / name if path.is_dir() or not path.suffix else path
    if weights == "online" and name == "model.pt":
        file = max((path / "checkpoints").glob("step_*.pt"), default=file)
    if not file.is_file():
        raise UserError(f"{file}: missing; train it first (--stage {stage}), or name a run that has it")
    return file


def load_soundstream(path, device, weights="ema"):
    """The codec of a run folder or file, in eval mode, with what tells it from others in `checksum`."""
    if str(path).startswith("hf:"):
        return PublishedCodec(path, device)
    file = model_file(path, "soundstream")
    cfg, state = lora.read_model("soundstream", Config, file, weights)
    codec = checkpoint.build(lambda: SoundStream(cfg), state, file, device).requires_grad_(False)
    codec.checksum = checkpoint.checksum(file)[:16]
    return codec


def use_quantizers(codec, flag, count):
    """Let a codec use its first `count` quantizers, 0 for all. flag: the setting, for messages."""
    if count > codec.quantizers:
        raise UserError(f"{flag}: {count}, but the codec has {codec.quantizers}")
    if 0 < count < codec.quantizers:
        codec.quantizers = count
        codec.checksum += f", {count} quantizers"  # other codes, so other caches and other models


def codec_of(cfg, device):
    """The codec whose codes coarse and fine predict; UserError if it does not fit `cfg`.

    Without cfg.soundstream, it is to be trained by the same command, and is as it starts.
    """
    codec = load_soundstream(cfg.soundstream, device) if cfg.soundstream else SoundStream(cfg)
    use_quantizers(codec, "--codec_quantizers", cfg.codec_quantizers)
    if codec.rate != cfg.sample_rate:
        raise UserError(f"--sample_rate: {cfg.sample_rate}, but the codec is of {codec.rate}; "
                        "give that")
    if cfg.coarse_quantizers >= codec.quantizers:
        raise UserError(f"--coarse_quantizers: {cfg.coarse_quantizers}, but the codec has "
                        f"{codec.quantizers}")
    return codec


def load_transformer(file, stage, device, weights="ema"):
    """(model in eval mode, checksums of what it was made of) of a stage's model.pt, best.pt or checkpoint."""
    cfg, state = lora.read_model(stage, Config, file, weights)
    with checkpoint.reading(file):
        streams = [Stream(*stream) for stream in state["streams"]]
        model = checkpoint.build(lambda: TokenTransformer(cfg, streams, state["vocabulary"]), state, file, device)
        for name in ("window", "context", "rate"):
            setattr(model, name, state[name])
        return for_generation(model), state["made_of"]


def for_generation(model):
    """`model` in eval mode, its matrices column by column: so one token is made 1.3 to 1.4 times as fast on a CPU."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return model.eval().requires_grad_(False)


# Training

def prepare(cfg, run):
    """What rank 0 does before anyone trains: check the config and the data, hold the run folder.

    Returns (the config with nothing left open, the vocabulary of texts, messages).
    """
    cfg = checkpoint.with_chunk_size(tracker.prepare(cfg), MOST_CHUNK)
    whole = Path(cfg.run_dir).parent
    sources = open_sources(cfg)
    if cfg.text == "auto":
        use = dict(text="prefix") if cfg.stage == "semantic" and sources[0].texts else dict(
            text="none", text_drop=Config.text_drop, max_text_len=Config.max_text_len, guidance_scale=1.0)
        cfg = dataclasses.replace(cfg, **use)
    if cfg.text != "none" and not all(source.texts for source in sources):
        raise UserError(f"--text {cfg.text}: {cfg.val_data if sources[0].texts else cfg.data} has no transcripts; "
                        "expected NAME.txt beside recordings, or *.trans.txt")
    if cfg.stage != "soundstream":
        cfg = dataclasses.replace(cfg, soundstream=cfg.soundstream or str(whole / "soundstream"),
                                  semantic=cfg.semantic or str(whole / "semantic"))
    if cfg.stage in ("coarse", "fine") and not cfg.soundstream.startswith("hf:"):
        model_file(cfg.soundstream, "soundstream")  # it must be there before an earlier run is moved aside
    if cfg.stage == "coarse":
        model_file(cfg.semantic, "semantic", TOKENIZER)
    parts, vocabulary, longest = data.parts(sources[0], cfg, *sources[1:]), [], 0
    if cfg.text != "none":
        texts = [sources[0].text(row) for row in parts["train"][1][:20_000].tolist()]
        words = clip.Tokenizer.learn(texts, TEXT_WORDS)
        vocabulary, longest = words.vocabulary, max(len(words.encode(text)) for text in texts)
    faults = [[*source.bad, *source.check()[2]] for source in sources]
    notes = run.open(cfg.resume)
    if longest > cfg.max_text_len:
        notes.append(f"texts of up to {longest} tokens are cut to --max_text_len {cfg.max_text_len}")
    for source, names in zip(sources, faults):
        if names:
            notes.append(f"{len(names)} recordings cannot be used and are left out: {', '.join(names[:5])}")
        notes += [source.left_out, source.resampled]
        if len(source.speakers) == 1 and len(source) >= 100:
            notes.append(f"all {len(source)} recordings count as one speaker's; --speaker_pattern finds speakers in "
                         "the names of files")
    return cfg, vocabulary, notes


def train(cfgs):
    first = cfgs[0]
    device = dist.setup(first.device, first.timeout_minutes)
    tracker.check_stages(cfgs)
    if len(cfgs) > 1:
        dist.on_each(lambda: codec_of(first, device))  # mistakes show before hours of training
        if first.soundstream:  # then no codec is trained
            cfgs = cfgs[1:]
            unused = [(name, False, "a codec to train: no --soundstream") for name in CODEC]
            config.refuse_unused(first, unused)
    finished = [train_stage(cfg, device) for cfg in cfgs]
    run, command = shlex.quote(first.run_dir), ""
    if all((Path(first.run_dir) / stage / "model.pt").is_file() for stage in STAGES):
        command = "evaluate"
    if first.stage == "soundstream":
        command = f"sample --reconstruct {run}/soundstream/samples/test_0_real.wav --out out.wav"
    if len(cfgs) > 1:
        args = EvaluateConfig(run_dir=first.run_dir, seed=first.seed, eval_samples=cfgs[-1].eval_samples)
        scores = Path(first.run_dir) / "scores.json"
        scores = config.read_json(scores) if all(finished) and scores.is_file() else evaluate_together(args, device)
        tracker.announce(f"The stages together ({first.run_dir}/sounds):", scores)
        command = f"sample --prompt {run}/sounds/0_real.wav --prompt_seconds {PROMPT_SECONDS} --out out.wav"
    if dist.is_main() and command:
        print(f"\nNext: python train_audio.py {command} --run_dir {run}", flush=True)


def train_stage(cfg, device):
    """Train one stage; returns whether it was finished before."""
    # Let rank 0 hold the run folder and check all there is to check; make what earlier stages give.
    started, given = time.monotonic(), cfg
    cfg = dataclasses.replace(cfg, run_dir=str(Path(cfg.run_dir) / cfg.stage))
    run = checkpoint.Run(cfg.run_dir)
    cfg, vocabulary, notes = dist.on_main(lambda: prepare(cfg, run))
    codec = cfg.stage == "soundstream"
    task = CodecTask(cfg, device) if codec else TokenTask(cfg, device, vocabulary)
    identity = {**checkpoint.identity(cfg, task.fixed, task.recordings), **task.facts.get("made_of", {})}
    resume_from, finished, more = dist.on_main(lambda: run.resume_point(cfg, identity))
    if finished:
        tracker.resend(cfg, run)
        headline = f"{cfg.run_dir} is finished, at step {finished['step']}; to train on, give more --steps."
        tracker.announce(headline, finished)
        return True

    # Make what trains the models, or take it up where it was.
    modules, discriminators, discriminator_optimizers = {"model": task.model}, task.discriminators, []
    optimizers = optim.make(task.model, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    if discriminators:
        modules["discriminators"] = discriminators
        discriminator_optimizers = optim.make(discriminators, "adamw", cfg.discriminator_lr, 0.0, cfg.betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    average = ema.EMA(task.model, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    state = checkpoint.State(cfg, modules, average, [*optimizers, *discriminator_optimizers], scaler, identity,
                             {"kind": cfg.stage, "metadata": tracker.metadata(cfg), **task.facts})
    notes += more
    if resume_from:
        notes += state.restore(resume_from)
    elif cfg.init_from:
        state.start_from(cfg.init_from, cfg.init_strict)
    dist.check_in_step(modules, state.step)
    if cfg.compile:
        task.model.compile()

    # Ask for the data in the order that seed and step give.
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, state.step)
    batches = data.loader(data.Chunks(*task.training, cfg.seed), spans, cfg.workers, device.type == "cuda")

    # Say what is to come, and where the figures go.
    if dist.is_main():
        settings = {**config.as_json(given), "chunk_size": cfg.chunk_size}
        checkpoint.write_json({**settings, "versions": state.versions}, run.folder / "config.json")
    log = tracker.Tracker(run, state, len(task.training[1]))
    log.say(f"{cfg.stage}: {sum(p.numel() for p in task.model.parameters()):,} parameters, {len(task.recordings):,} "
            f"recordings of {len(task.recordings.speakers):,} speaker(s), "
            f"{accumulate.described(cfg)}, {dist.world_size()} rank(s) on {device.type}")
    for note in filter(None, notes):
        log.say(note)

    # After a signal the meter saves and ends the run. The log hears how it ended.
    with log, dist.stop_signals, tracker.Meter(log, state, cfg.stage) as meter:
        task.model.train()
        stepped = True
        while True:
            dist.stop_signals.check()

            # Log; evaluate and save when they are due. Here ranks and GPUs are waited for.
            if meter.line_due():
                loss = meter.line()
                eval_due, save_due = meter.due()
                if eval_due:
                    begun = time.monotonic()
                    last = state.step >= cfg.steps  # so the sounds of the test are next
                    samples = {}
                    task.model.eval()
                    losses = {"val_loss_online": task.figures("validation")["loss"]}
                    if cfg.samples_from != "ema" and not last:
                        samples |= write_sounds(task, "validation", f"step_{state.step:08d}_online")
                    with average.applied(task.model):
                        figures = task.figures("validation")
                        if cfg.samples_from != "online" and not last:
                            samples |= write_sounds(task, "validation", f"step_{state.step:08d}")
                    task.model.train()
                    losses["val_loss"] = figures.pop("loss")
                    if "accuracy" in figures:
                        losses["val_accuracy"] = figures.pop("accuracy")
                    seconds = time.monotonic() - begun
                    log.log(state.step, samples, **losses, **figures, evaluation_s=seconds)
                    log.evaluated(state.step, {"loss": loss, **losses}, figures)
                    meter.check_finite(losses.values(), state.step + 1)
                    complete = not codec or task.model.quantizer.ready  # before k-means: no codes
                    best = complete and run.save_best(state, losses["val_loss"], log)
                    save_due = save_due or (best and log.copies_best_checkpoint)
                    log.report()
                if save_due:
                    run.commit(state, log)
                meter.restart()
            if state.step >= cfg.steps:
                break

            # Set the learning rates; a codec makes its codebooks when they are due, and then has discriminators.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if codec and state.step == cfg.quantize_after:
                task.make_codebooks()
            adversarial = discriminators is not None and state.step >= cfg.discriminator_after
            if adversarial:
                since, last = state.step - cfg.discriminator_after, cfg.steps - cfg.discriminator_after
                schedule.set_learning_rate(discriminator_optimizers, schedule.learning_rate(
                    since, cfg.discriminator_lr, cfg.discriminator_warmup_steps, last, cfg.cosine))
            penalty = cfg.penalty_weight if state.step % cfg.penalty_every == 0 else 0.0

            # Take one optimizer step.
            if stepped:  # else fp16 overflowed: try the same samples again, at a lower scale
                chunks = [next(batches) for _ in plan]
            step_loss = torch.zeros((), device=device)
            for chunk, batch in zip(plan, chunks):
                accumulate.seed(cfg.seed, state.step, chunk.index)
                batch = data.to_device(batch, device)
                with amp.autocast(device, cfg.precision):
                    loss, fake = task.loss(batch, adversarial)
                scaler.scale(loss * chunk.weight).backward()
                if adversarial:
                    with amp.autocast(device, cfg.precision):
                        own_loss = discriminator_loss(discriminators, fake, batch["wave"], penalty)
                    scaler.scale(own_loss * chunk.weight).backward()
                step_loss += loss.detach() * (chunk.stop - chunk.start)
            active = [task.model]
            models, limits = [optimizers], [cfg.max_grad_norm]
            if adversarial:  # both step at once; each is clipped by itself
                active += [discriminators]
                models += [discriminator_optimizers]
                limits += [cfg.discriminator_max_grad_norm]
            dist.sum_gradients(*active)
            norms, stepped = amp.step(scaler, models, limits)
            for module in modules.values():
                module.zero_grad(set_to_none=True)
            if codec:
                task.update_codebooks(stepped, state.step)
            if not stepped:
                meter.overflows += 1
                continue
            state.step += 1
            average.update(state.step)
            meter.add(step_loss, norms[0], chunks)
        meter.bar.close()

        # Test the averaged weights, and save them last of all.
        task.model.eval()
        samples = write_sounds(task, "test", "test_online") if cfg.samples_from != "ema" else {}
        with average.applied(task.model):
            results = {f"test_{name}": value for name, value in task.figures("test").items()}
            samples |= write_sounds(task, "test", "test") if cfg.samples_from != "online" else {}
        log.log(state.step, samples, **results)
        results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
        if dist.is_main():
            run.finish(state, results)
        log.report()
    dist.gather(None)  # rank 0 has written model.pt, which the next stage or the evaluation of all reads
    tracker.announce(f"Trained {cfg.run_dir}; this start took {time.monotonic() - started:.0f} s.", results)
    return False


# Commands

@dataclass(frozen=True)
class Inference(config.Settings):
    # The model
    run_dir: str = "runs/audio"  # folder of the runs, one a stage
    model: str = "model.pt"  # file of each run: model.pt (last), best.pt (lowest validation loss), or a checkpoint
    weights: Literal["ema", "online"] = "ema"  # averaged, or as the optimizer left them in the newest checkpoint
    seed: int = 0  # of everything random
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute


@dataclass(frozen=True)
class EvaluateConfig(Inference):
    # What to evaluate
    data: str = ""  # recordings; "": those the coarse stage was trained on
    part: Literal["train", "validation", "test"] = "test"  # which of them
    eval_samples: Natural = 192  # most recordings to go on with, 0 for all
    prompt_seconds: Positive = PROMPT_SECONDS  # how much of each the model is given
    seconds: Positive = 1.0  # how much it adds
    batch_size: Count = 48  # recordings at a time


@dataclass(frozen=True)
class SampleConfig(Inference):
    # What to say
    text: str = ""  # text to say; without a text and a prompt: nothing in particular
    texts: str = ""  # or a file with one text a line
    prompt: str = ""  # recording to go on with, in its voice
    prompt_seconds: NonNegative = 0.0  # how much of its end to take; 0: as much as the coarse stage was trained on
    seconds: Positive = LONGEST  # length at most, after the prompt
    num_samples: Count = 1  # sounds a text or prompt
    temperature: tuple[NonNegative, ...] = ()  # of each stage's codes, the last for all that follow; "": as trained
    top_k: tuple[Natural, ...] = ()  # of each stage: draw from so many most probable codes, 0 for all
    guidance_scale: tuple[NonNegative, ...] = ()  # of each stage: guidance toward the text; 1: none
    fine: bool = True  # let the fine stage add its codes, else the coarse ones alone are heard
    # The codec alone
    reconstruct: str = ""  # recording to send through the codec
    quantizers: Natural = 0  # how many the codec uses, 0 for all
    # Out
    out: str = "out.wav"  # the sound; several are out_0.wav, out_1.wav, …
    picture: str = ""  # also write the spectrogram, PNG, to this file; several likewise

    def __post_init__(self):
        super().__post_init__()
        config.check_suffixes(self, out=".wav", picture=".png")
        if self.text and self.texts:
            raise UserError("--text, --texts: give one of them")
        config.refuse_unused(self, [("quantizers", self.reconstruct, "--reconstruct"),
                                    ("prompt_seconds", self.prompt, "--prompt"),
                                    *((name, not self.reconstruct, "a command without --reconstruct")
                                      for name in ("text", "texts", "prompt"))])


def evaluate(args):
    tracker.announce(f"The stages together ({args.run_dir}/sounds):", evaluate_together(args, dist.setup(args.device)))


def evaluate_together(args, device):
    """Go on with held-out recordings and, on the built-in ones, score who speaks and what is said, into scores.json.

    A score that ends in _real is that of real recordings after the codec.
    """
    pipeline = Pipeline(args.run_dir, device, args.weights, args.model)
    cfg, rate, hop = pipeline.models["coarse"].cfg, pipeline.codec.rate, pipeline.codec.hop
    cfg = dataclasses.replace(cfg, batch_size=1, data=args.data or cfg.data, val_data="" if args.data else cfg.val_data)
    sources = open_sources(cfg)
    parts = data.parts(sources[0], cfg, *sources[1:])
    source, rows = parts[args.part]
    builtin, most = isinstance(source, recordings.Syllables), round(args.prompt_seconds * rate)
    syllables = syllables_of_tokens(pipeline, *parts["train"]) if builtin else None

    def voice(wave):
        return synthetic.heard_voice(recordings.resample(wave, rate, synthetic.RATE).numpy())

    def labels(wave):  # the syllable of each frame
        return syllables[pipeline.tokenizer.encode(wave, rate)]

    def text_similarity(wave, text):
        return synthetic.text_similarity(synthetic.heard_text(labels(wave)), text.split())
    sums = collections.defaultdict(lambda: np.zeros(2))
    mine = range(len(rows))[:args.eval_samples or None][dist.rank()::dist.world_size()]
    for begin in tracker.progress(range(0, len(mine), args.batch_size), desc="continuations",
                                  disable=not dist.is_main()):
        places = mine[begin:begin + args.batch_size]
        found, waves = source.readable(rows[list(places)])
        seeds = [accumulate.number(args.seed, "goes on", row) for row in found]
        prompts = [wave[:max(1, min(most, len(wave) // 2) // hop) * hop] for wave in waves]
        spoken = pipeline.speak(map(pipeline.prompt, prompts), args.seconds, seeds)
        continued = [pipeline.wave(codes) for codes in spoken]
        for place, wave, prompt, sound in zip(places, waves, prompts, continued):
            sums["seconds_added"] += (len(sound) - len(prompt)) / rate, 1
            for name, heard in (("real", wave), ("continued", sound)) if place < SOUNDS else ():
                path = f"{args.run_dir}/sounds/{place}_{name}"
                write_sound(heard, rate, f"{path}.wav", f"{path}.png")
        if not builtin:
            continue
        records = source.records(found)
        for place, wave, prompt, sound, record in zip(places, waves, prompts, continued, records):
            real, other = pipeline.wave(pipeline.codes(wave)), source.wave(rows[(place + 1) % len(rows)])[:most]
            begun, rest, expected = voice(prompt), voice(real[len(prompt):]), labels(wave)
            if len(sound) - len(prompt) >= HEARD_SECONDS * rate:
                sums["voice_kept"] += synthetic.same_voice(begun, voice(sound[len(prompt):])), 1
            sums["voice_kept_real"] += synthetic.same_voice(begun, rest), 1
            sums["voice_of_others"] += synthetic.same_voice(voice(other), rest), 1
            sums["text_heard_real"] += text_similarity(real, record["text"]), 1
            true = synthetic.syllable_labels(record, len(expected), semantic.FRAME_RATE)
            sums["semantic_syllable_accuracy"] += np.mean(expected == true), 1
        if pipeline.models["semantic"].cfg.text != "none":
            texts = [record["text"] for record in records]
            spoken = pipeline.speak([pipeline.nothing()] * len(found), LONGEST, seeds, texts)
            for text, codes in zip(texts, spoken):
                sums["text_heard"] += text_similarity(pipeline.wave(codes), text), 1
    result = means(sums)
    if dist.is_main():
        checkpoint.write_json(result, Path(args.run_dir) / "scores.json")
    return result


def syllables_of_tokens(pipeline, source, rows):
    """The syllable that each semantic token mostly stands for in recordings of the built-in world, int (clusters,)."""
    found, waves = source.readable(rows[:200])
    tokens = [pipeline.tokenizer.encode(wave, pipeline.codec.rate) for wave in waves]
    labels = [synthetic.syllable_labels(record, len(each), semantic.FRAME_RATE)
              for record, each in zip(source.records(found), tokens)]
    return synthetic.majority(np.concatenate(tokens), np.concatenate(labels), pipeline.tokenizer.clusters)


def open_wave(path, codec):
    """The wave (T,) of a recording, at the codec's rate."""
    channels, rate = recordings.read(path)
    if channels.shape[1] * codec.rate < codec.hop * rate:
        raise UserError(f"{path}: {channels.shape[1]} samples at {rate} Hz, shorter than a frame of {codec.hop} at "
                        f"{codec.rate} Hz")
    return recordings.resample(torch.from_numpy(channels).mean(0), rate, codec.rate)


def sample(args):
    device = dist.setup(args.device)
    message = dist.on_main(lambda: (reconstruct if args.reconstruct else speak)(args, device))
    if dist.is_main():
        print(message, flush=True)


def speak(args, device):
    """Write the sounds of texts, a prompt, or both; returns a message."""
    pipeline, note = Pipeline(args.run_dir, device, args.weights, args.model), ""
    for i, model in enumerate(pipeline.models.values()):
        given = {name: values[min(i, len(values) - 1)] for name in Drawing._fields if (values := getattr(args, name))}
        model.drawing = model.drawing._replace(**given)
    with_text = [model.cfg for model in pipeline.models.values() if model.cfg.text != "none"]
    texts = config.lines_of(args.texts) if args.texts else [args.text]
    if any(texts) and not with_text:
        raise UserError(f"--text: {args.run_dir} was trained without texts; give --prompt alone, or train with "
                        "--text prefix")
    if not any(texts) and not all(cfg.text_drop for cfg in with_text):
        raise UserError(f"--text: {args.run_dir} was trained with --text_drop 0, so it needs a text")
    if args.guidance_scale and not any(cfg.text_drop for cfg in with_text):
        raise UserError(f"--guidance_scale: no stage of {args.run_dir} was trained with a text that was dropped")
    codec, prompt = pipeline.codec, pipeline.nothing()
    if args.prompt:
        wave, most = open_wave(args.prompt, codec), codec.hop * (pipeline.models["coarse"].window - 1)
        wave = wave[-max(codec.hop, round(args.prompt_seconds * codec.rate)):] if args.prompt_seconds else wave
        if len(wave) > most:
            note = (f"the prompt of {len(wave) / codec.rate:.2f} s is cut to its last {most / codec.rate:.2f} s, as "
                    "the coarse stage was trained on no more\n")
        prompt = pipeline.prompt(wave[-most:])
    wanted = [(text, k) for text in texts for k in range(args.num_samples)]
    seeds = [accumulate.number(args.seed, text, k) for text, k in wanted]
    sounds = pipeline.speak([prompt] * len(wanted), args.seconds, seeds,
                            [text for text, _ in wanted] if any(texts) else None, args.fine)
    for place, codes in enumerate(sounds):
        paths = [Path(path) for path in (args.out, args.picture) if path]
        if len(sounds) > 1:
            paths = [path.with_stem(f"{path.stem}_{place}") for path in paths]
        write_sound(pipeline.wave(codes), codec.rate, *paths)
    return note + (f"wrote {len(sounds)} sounds, the last to {paths[0]}" if len(sounds) > 1 else f"wrote {args.out}")


def reconstruct(args, device):
    """Send a recording through the codec of a run; returns a message."""
    file = model_file(Path(args.run_dir) / "soundstream", "soundstream", args.model, args.weights)
    codec = load_soundstream(file, device, args.weights)
    use_quantizers(codec, "--quantizers", args.quantizers)
    wave = open_wave(args.reconstruct, codec)
    codes = codec.encode(wave[None].to(device))
    sound = codec.decode(codes)[0, :len(wave)].cpu()
    write_sound(sound, codec.rate, *filter(None, (args.out, args.picture)))
    bits = codes.shape[2] * math.log2(codec.codebook_size) * codec.rate / codec.hop
    return (f"{args.out}: {codes.shape[2]} codes a frame, {bits:.0f} bits a second, si_sdr_db "
            f"{recordings.si_sdr(sound[None], wave[None]).item():.2f}")


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.run(COMMANDS, __doc__, "train", PRESETS, STAGES, ONLY)


if __name__ == "__main__":
    main()
