"""SoundStream (Zeghidour et al. 2021): the codec, its discriminators, and the losses of both.

What differs from the paper stands in train_audio.py.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from common.models import audio
from common.models.quantize import ResidualQuantizer

# A code is dead below this share of its quantizer's mean use. The paper's 2 vectors a batch depend
# on the batch, and are more of the last quantizers, which dropout often leaves out.
DEAD_BELOW = 0.2
INNER_SCALE = 10.0  # of waves inside the codec: those of LOUDNESS get a size of 1
MEL_FLOOR = 3e-4  # of magnitudes, 50 dB below LOUDNESS: what is quieter is not learned


# Model (SoundStream §III-A, §III-B)


class CausalConv(nn.Conv1d):
    """Convolution that pads on the left alone: (B, C, T) -> (B, C', T / stride).

    An output sees the inputs up to the end of its own stride, and none after it.
    """

    def forward(self, x):
        field_of_view = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        return super().forward(F.pad(x, (field_of_view - self.stride[0], 0)))


class CausalUpsample(nn.ConvTranspose1d):
    """Transposed convolution with a kernel of two strides: (B, C, T) -> (B, C', T · stride)."""

    def forward(self, x):
        return super().forward(x)[..., : -self.stride[0]]  # what is cut off needs later inputs


class FastELU(torch.autograd.Function):
    """ELU in fp32 on a CPU, equal to rounding: torch's takes up to 8 times longer with AVX-512."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(max=0).exp_().sub_(1)
        y = torch.maximum(x, y, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        # The slope is 1 where y > 0, else exp(x) = y + 1.
        return y.clamp(max=0).add_(1).mul_(gradient)


class ELU(nn.Module):
    """Exponential linear unit (Clevert et al. 2016): x where x > 0, else exp(x) - 1."""

    def forward(self, x):
        if x.is_cuda or x.dtype != torch.float32:
            return F.elu(x)
        return FastELU.apply(x)


class ResidualUnit(nn.Module):
    """Dilated convolution of kernel 7, then one of kernel 1 (SoundStream, Fig. 3)."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.conv2 = nn.Conv1d(channels, channels, 1)
        self.elu = ELU()

    def forward(self, x):
        return x + self.conv2(self.elu(self.conv1(self.elu(x))))


def residual_units(channels):
    return [ResidualUnit(channels, dilation) for dilation in (1, 3, 9)]


class SoundStream(nn.Module):
    """Waves -> codes -> waves (SoundStream §III, Fig. 3).

    T samples become ceil(T / hop_length) frames of Q codes each. It is causal by frame: later
    samples change nothing in earlier frames. cfg: the settings of the model, and codebook_decay.
    """

    def __init__(self, cfg):
        super().__init__()
        self.sample_rate = cfg.sample_rate
        self.hop_length = math.prod(cfg.strides)
        self.frame_rate = cfg.sample_rate / self.hop_length
        self.num_quantizers = cfg.num_quantizers
        self.codebook_size = cfg.codebook_size
        self.pre_emphasis = a = cfg.pre_emphasis
        # The power is 1 + a² - 2·a·r times as large, where neighbors correlate by r, about 0.9.
        self.emphasis_gain = (1 + a * a - 1.8 * a) ** -0.5
        # A frame depends on fewer frames than these before it: on about 80 for each stride, if all
        # are 1.
        self.reach = 100 * len(cfg.strides)

        # The decoder mirrors the encoder, so it is built from its end.
        channels = cfg.channels  # doubled by each stride
        encoder = [CausalConv(1, channels, 7)]  # a wave has one channel
        decoder = [ELU(), CausalConv(channels, 1, 7)]
        for stride in cfg.strides:
            downsample = CausalConv(channels, 2 * channels, 2 * stride, stride)
            upsample = CausalUpsample(2 * channels, channels, 2 * stride, stride)
            encoder += [*residual_units(channels), ELU(), downsample]
            decoder = [ELU(), upsample, *residual_units(channels), *decoder]
            channels *= 2
        self.encoder = nn.Sequential(*encoder, ELU(), CausalConv(channels, cfg.latent_dim, 3))
        self.decoder = nn.Sequential(CausalConv(cfg.latent_dim, channels, 7), *decoder)
        self.quantizer = ResidualQuantizer(
            cfg.latent_dim,
            cfg.num_quantizers,
            cfg.codebook_size,
            cfg.codebook_decay,
            DEAD_BELOW,
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

    def emphasize(self, wave):
        """x[t] - a x[t-1] of waves x (..., T), about as loud as they are."""
        past = F.pad(wave[..., :-1], (1, 0))
        return (wave - self.pre_emphasis * past) * self.emphasis_gain

    def deemphasize(self, wave):
        """The waves (..., T) that `emphasize` makes `wave` of.

        x[t] is the sum of a^n wave[t-n]. With twice as many terms each time it is a few additions.
        """
        wave = wave / self.emphasis_gain
        a = self.pre_emphasis
        shift = 1
        while a**shift > 1e-6 and shift < wave.shape[-1]:
            wave = wave + a**shift * F.pad(wave[..., :-shift], (shift, 0))
            shift *= 2
        return wave

    def encode_latents(self, wave):
        """Frames (B, ceil(T / hop_length), D) of emphasized waves (B, T)."""
        x = F.pad(wave, (0, -wave.shape[1] % self.hop_length))  # silence up to a whole frame
        # Below a size of about 1 an ELU is almost linear.
        return self.encoder(x[:, None] * INNER_SCALE).transpose(1, 2)  # (B, frames, D)

    def decode_latents(self, latents):
        """Emphasized waves (B, T · hop_length) of frames (B, T, D), in fp32."""
        x = self.decoder(latents.transpose(1, 2))[:, 0].float()  # (B, T), the only channel
        return x / INNER_SCALE

    def forward(self, wave):
        """(reconstruction (B, T), codes (B, frames, Q), commitment loss) of emphasized waves."""
        quantized, codes, commitment = self.quantizer(self.encode_latents(wave))  # (B, frames, D)
        return self.decode_latents(quantized)[:, : wave.shape[1]], codes, commitment

    def encode(self, wave):
        """Codes (frames, Q) of a wave (T,), on the CPU."""
        wave = self.emphasize(wave.to(self.quantizer.codebook.device))

        def work(block):
            return self.quantizer.encode(self.encode_latents(block))

        return audio.in_blocks(work, wave, self.hop_length, 1, self.reach).cpu()

    def decode(self, codes):
        """The wave (frames · hop_length,), on the CPU, of codes (frames, n) of n quantizers."""

        def work(block):
            return self.decode_latents(self.quantizer.decode(block))

        codes = codes.to(self.quantizer.codebook.device)
        wave = audio.in_blocks(work, codes, 1, self.hop_length, self.reach)
        return self.deemphasize(wave).cpu()


# Discriminators (SoundStream §III-D)


class Discriminator(nn.Module):
    """Layers over what `transform` makes of waves: what both kinds share.

    MelGAN has a slope of 0.2, and weight norm.
    """

    def forward(self, wave):
        """Scores (B, T') of waves (B, T), higher for real ones, and the features of every layer."""
        x = self.transform(wave)
        features = []  # for feature matching
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)  # (B, C, T') or (B, C, F, T')
        return self.out(x).flatten(1), features


class WaveDiscriminator(Discriminator):
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
            groups = math.gcd(narrow, narrow // 4)  # of four channels each, if 4 divides
            self.layers.append(nn.Conv1d(narrow, wide, 41, stride=4, padding=20, groups=groups))
        self.layers.append(nn.Conv1d(wide, wide, 5, padding=2))
        self.out = nn.Conv1d(wide, 1, 3, padding=1)

    def transform(self, wave):
        return self.pool(wave[:, None])  # (B, 1, T)


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
        return h + self.shortcut(x)[..., : h.shape[3]]  # an odd T leaves one frame more


class STFTDiscriminator(Discriminator):
    """Residual units over the short-time Fourier transform (SoundStream §III-D, Fig. 4).

    Its real and imaginary parts are two channels. The paper names no activation and no shortcut:
    here a leaky ReLU, as over waves, and a strided convolution of kernel 1.
    """

    def __init__(self, channels, window):
        super().__init__()
        self.window = window
        # Real and imaginary part.
        self.layers = nn.ModuleList([nn.Conv2d(2, channels, 7, padding=3)])
        widths = [channels * mult for mult in (1, 2, 4, 4, 8, 8, 16)]
        for i, (narrow, wide) in enumerate(itertools.pairwise(widths)):
            # Frequencies are halved by each unit, times by every second one.
            self.layers.append(STFTUnit(narrow, wide, stride=(2, 1 + i % 2)))
        self.out = nn.Conv2d(wide, 1, (window // 128, 1))  # over all remaining frequencies

    def transform(self, wave):
        """Real and imaginary parts (B, 2, F, T') of waves (B, T), F = window / 2, in fp32."""
        half = self.window // 2
        # Mirrored at the ends; the gradient of torch's own way varies from run to run on GPUs.
        left = wave[:, 1 : half + 1].flip(1)
        right = wave[:, -half - 1 : -1].flip(1)
        wave = torch.cat([left, wave, right], dim=1)
        with torch.autocast(wave.device.type, enabled=False):
            x = audio.stft(wave.float(), self.window, self.window // 4)
            x = x[..., :-1]  # without the highest frequency
            # Real convolutions over two channels, as in the paper, not complex ones.
            return torch.view_as_real(x).permute(0, 3, 2, 1)


def make_discriminators(channels, stft_window):
    """Three wave discriminators, at 1, 1/2 and 1/4 of the rate, and one STFT discriminator.

    channels: of the codec's first layer, which is twice as wide as that of a wave discriminator.
    """
    channels = max(1, channels // 2)
    waves = [WaveDiscriminator(channels, downsample) for downsample in (1, 2, 4)]
    return nn.ModuleList([*waves, STFTDiscriminator(2 * channels, stft_window)])


# Losses (SoundStream §III-E)


def spectral_distance(fake, real, sample_rate, seconds):
    """Distance (B,) of the log-mel spectra of waves (B, T): a mean absolute difference, in nats.

    It is the mean over six windows, their frames, a quarter of a window apart, and 64 mel bins. The
    longest lasts `seconds`, each other half as long as the next. The paper's (Eq. 4, 5) are of 64,
    128, … 2,048 samples at 24 kHz: 85 ms. It sums, and adds an L1 distance without logarithms.
    """
    distances = []
    for halvings in range(6):
        window = max(8, 2 * round(seconds * sample_rate / 2**halvings / 2))  # even
        filters = audio.mel_filters(sample_rate, window, 64, device=real.device)
        logs = []
        for wave in (fake, real):
            magnitudes = audio.stft_magnitude(wave, window, window // 4) @ filters
            logs.append(magnitudes.clamp(min=MEL_FLOOR).log())  # (B, frames, 64)
        distances.append((logs[0] - logs[1]).abs().mean((1, 2)))
    return torch.stack(distances).mean(0)


def reconstruction_loss(fake, real, cfg):
    """Reconstruction part of the codec's loss for waves (B, T), in fp32.

    cfg: with sample_rate, wave_weight, mel_weight and mel_seconds.
    """
    with torch.autocast(real.device.type, enabled=False):
        fake = fake.float()  # (B, T)
        wave_loss = (fake - real).abs().mean()  # EnCodec Eq. 1
        mel_loss = spectral_distance(fake, real, cfg.sample_rate, cfg.mel_seconds).mean()
    return cfg.wave_weight * wave_loss + cfg.mel_weight * mel_loss


def adversarial_loss(discriminators, fake, real):
    """(the codec's hinge loss (Eq. 2), its loss of features), means over discriminators.

    Features: their L1 distance (Eq. 3) in proportion to those of real waves (EnCodec Eq. 3), so
    that a weight means the same at any width. A mean over layers.

    The discriminators are frozen meanwhile: the codec's step must not leave gradients in them.
    """
    discriminators.requires_grad_(False)
    hinges = []
    distances = []
    for discriminator in discriminators:
        _, real_features = discriminator(real)  # targets: nothing here has a gradient
        score, fake_features = discriminator(fake)
        hinges.append(F.relu(1 - score.float()).mean())
        layers = []
        for fake_layer, real_layer in zip(fake_features, real_features):
            size = real_layer.float().abs().mean() + 1e-5
            layers.append(F.l1_loss(fake_layer.float(), real_layer.float()) / size)
        distances.append(torch.stack(layers).mean())  # one discriminator counts like another
    discriminators.requires_grad_(True)
    return torch.stack(hinges).mean(), torch.stack(distances).mean()


def discriminator_loss(discriminators, fake, real, r1_weight):
    """The discriminators' hinge loss (Eq. 1) for waves (B, T), a mean over them.

    r1_weight: of the R1 penalty, the squared norm of a sample's gradient at real waves (Mescheder
    et al. 2018, Eq. 9); it stands for the γ/2 there; 0: none.
    """
    # Detached: no gradient reaches the codec. It is not run again, so the codebooks' statistics
    # count every sample once.
    waves = torch.cat([real, fake.detach()])
    real = real.detach().requires_grad_()  # R1 takes gradients at the waves
    losses = []
    for discriminator in discriminators:
        score, _ = discriminator(waves)
        real_score, fake_score = score.float().chunk(2)  # (B, T') each
        loss = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        if r1_weight:
            with torch.autocast(real.device.type, enabled=False):  # fp16 overflows at any scale
                score, _ = discriminator(real)
                (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)  # (B, T)
                loss = loss + r1_weight * gradient.square().sum(1).mean()
        losses.append(loss)
    return torch.stack(losses).mean()
