"""SoundStream (Zeghidour et al. 2021): the codec, its discriminators, and their losses.

train_audio.py lists the differences from the paper.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from common.models import audio
from common.models.quantize import ResidualQuantizer

# A code is dead if its use is below this share of the mean use in its quantizer. The paper's
# threshold of 2 vectors per batch depends on the batch size, and replaces more codes in the last
# quantizers, which dropout often skips.
DEAD_BELOW = 0.2
INNER_SCALE = 10.0  # waves are multiplied by this inside the codec: LOUDNESS becomes an RMS of 1
MEL_FLOOR = 3e-4  # minimum mel magnitude, 50 dB below LOUDNESS; quieter detail is not learned


# Model (SoundStream §III-A, §III-B)


class CausalConv(nn.Conv1d):
    """Convolution padded only on the left: (B, C, T) -> (B, C', T / stride).

    Output t depends only on inputs before (t + 1) · stride.
    """

    def forward(self, x):
        field_of_view = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        padding = field_of_view - self.stride[0]
        return super().forward(F.pad(x, (padding, 0)))


class CausalUpsample(nn.ConvTranspose1d):
    """Transposed convolution with kernel size 2 · stride: (B, C, T) -> (B, C', T · stride)."""

    def forward(self, x):
        out = super().forward(x)
        return out[..., : -self.stride[0]]  # the last `stride` outputs lack the next input


class FastELU(torch.autograd.Function):
    """ELU for fp32 on CPUs, up to rounding. With AVX-512, torch's takes up to 8 times as long."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(max=0).exp_().sub_(1)
        y = torch.maximum(x, y, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        # 1 where y > 0, else exp(x) = y + 1.
        slope = y.clamp(max=0).add_(1)
        return slope.mul_(gradient)


class ELU(nn.Module):
    """Exponential linear unit (Clevert et al. 2016): x for x > 0, else exp(x) - 1."""

    def forward(self, x):
        if x.is_cuda or x.dtype != torch.float32:
            return F.elu(x)
        return FastELU.apply(x)


class ResidualUnit(nn.Module):
    """Dilated convolution with kernel 7, then one with kernel 1 (SoundStream, Fig. 3)."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.conv2 = nn.Conv1d(channels, channels, 1)
        self.elu = ELU()

    def forward(self, x):
        h = self.conv1(self.elu(x))
        h = self.conv2(self.elu(h))
        return x + h


def residual_units(channels):
    return [ResidualUnit(channels, dilation) for dilation in (1, 3, 9)]


class SoundStream(nn.Module):
    """Waves -> codes -> waves (SoundStream §III, Fig. 3).

    T samples become ceil(T / hop_length) frames of Q codes each. The model is causal: frames do not
    depend on samples of later frames. cfg: the model's settings, and codebook_decay.
    """

    def __init__(self, cfg):
        super().__init__()
        self.sample_rate = cfg.sample_rate
        self.hop_length = math.prod(cfg.strides)
        self.frame_rate = cfg.sample_rate / self.hop_length
        self.num_quantizers = cfg.num_quantizers
        self.codebook_size = cfg.codebook_size
        self.pre_emphasis = a = cfg.pre_emphasis
        # Emphasis multiplies the power by 1 + a² - 2·a·r, where r, about 0.9, is the correlation of
        # neighboring samples.
        power_ratio = 1 + a * a - 1.8 * a
        self.emphasis_gain = power_ratio**-0.5
        # Upper bound on the number of earlier frames that a frame depends on. In the worst case,
        # all strides are 1, and each adds about 80.
        self.reach = 100 * len(cfg.strides)

        # The decoder mirrors the encoder, so build it from its end.
        channels = cfg.channels  # doubled by each stride
        encoder = [CausalConv(1, channels, 7)]  # a wave has one channel
        decoder = [ELU(), CausalConv(channels, 1, 7)]
        for stride in cfg.strides:
            downsample = CausalConv(channels, 2 * channels, 2 * stride, stride)
            upsample = CausalUpsample(2 * channels, channels, 2 * stride, stride)
            encoder += [*residual_units(channels), ELU(), downsample]
            decoder = [ELU(), upsample, *residual_units(channels), *decoder]
            channels *= 2
        to_latents = CausalConv(channels, cfg.latent_dim, 3)
        from_latents = CausalConv(cfg.latent_dim, channels, 7)
        self.encoder = nn.Sequential(*encoder, ELU(), to_latents)
        self.decoder = nn.Sequential(from_latents, *decoder)
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
        """Preserve the variance (LeCun et al. 1998, §4.6). Residual units start as the identity."""
        if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
            (taps,) = layer.kernel_size
            if isinstance(layer, nn.ConvTranspose1d):
                taps //= layer.stride[0]  # number of inputs that an output sees
            inputs = layer.in_channels * taps
            nn.init.normal_(layer.weight, std=inputs**-0.5)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, ResidualUnit):
            nn.init.zeros_(layer.conv2.weight)

    def emphasize(self, wave):
        """x[t] - a x[t-1] for waves x (..., T), scaled to about the same loudness."""
        past = F.pad(wave[..., :-1], (1, 0))
        change = wave - self.pre_emphasis * past
        return change * self.emphasis_gain

    def deemphasize(self, wave):
        """The inverse of `emphasize`, for waves (..., T).

        It is the sum of a^n wave[t-n] over n. Each iteration doubles the number of terms.
        """
        wave = wave / self.emphasis_gain
        a = self.pre_emphasis
        shift = 1
        while a**shift > 1e-6 and shift < wave.shape[-1]:
            past = F.pad(wave[..., :-shift], (shift, 0))
            wave = wave + a**shift * past
            shift *= 2
        return wave

    def encode_latents(self, wave):
        """Latent frames (B, ceil(T / hop_length), D) of emphasized waves (B, T)."""
        missing = -wave.shape[1] % self.hop_length
        x = F.pad(wave, (0, missing))  # silence fills the last frame
        x = x[:, None] * INNER_SCALE  # ELUs are almost linear for much smaller inputs
        latents = self.encoder(x)  # (B, D, frames)
        return latents.transpose(1, 2)

    def decode_latents(self, latents):
        """Emphasized waves (B, frames · hop_length), in fp32, from latents (B, frames, D)."""
        x = self.decoder(latents.transpose(1, 2))
        wave = x[:, 0].float()  # the only channel
        return wave / INNER_SCALE

    def forward(self, wave):
        """(reconstruction (B, T), codes (B, frames, Q), commitment loss) of emphasized waves."""
        latents = self.encode_latents(wave)  # (B, frames, D)
        quantized, codes, commitment = self.quantizer(latents)
        reconstruction = self.decode_latents(quantized)
        return reconstruction[:, : wave.shape[1]], codes, commitment

    def encode(self, wave):
        """Codes (frames, Q) of a wave (T,), on the CPU."""
        wave = wave.to(self.quantizer.codebook.device)

        def work(block):
            return self.quantizer.encode(self.encode_latents(block))

        codes = audio.in_blocks(work, self.emphasize(wave), self.hop_length, 1, self.reach)
        return codes.cpu()

    def decode(self, codes):
        """The wave (frames · hop_length,) for codes (frames, n) from n quantizers, on the CPU."""

        def work(block):
            return self.decode_latents(self.quantizer.decode(block))

        codes = codes.to(self.quantizer.codebook.device)
        wave = audio.in_blocks(work, codes, 1, self.hop_length, self.reach)
        return self.deemphasize(wave).cpu()


# Discriminators (SoundStream §III-D)


class Discriminator(nn.Module):
    """Base class of both kinds of discriminators: `layers` are applied to `transform(wave)`.

    Unlike in MelGAN, the leaky ReLU's slope is 0.1, not 0.2, and there is no weight norm.
    """

    def forward(self, wave):
        """(scores (B, T') of waves (B, T), higher for real ones; the features of every layer)."""
        x = self.transform(wave)
        features = []  # for feature matching
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)  # (B, C, T') or (B, C, F, T')
        return self.out(x).flatten(1), features


class WaveDiscriminator(Discriminator):
    """Strided, grouped convolutions over a wave (MelGAN, Kumar et al. 2019, Table 1b).

    downsample: the factor by which average pooling first reduces the sample rate.
    """

    def __init__(self, channels, downsample):
        super().__init__()
        self.pool = nn.Identity()
        if downsample > 1:
            self.pool = nn.AvgPool1d(
                2 * downsample,
                downsample,
                downsample // 2,
                count_include_pad=False,
            )
        layers = [nn.Conv1d(1, channels, 15, padding=7)]
        # Each layer has four times as many channels as the one before, up to 64 · `channels`.
        widths = [channels * mult for mult in (1, 4, 16, 64, 64)]
        for narrow, wide in itertools.pairwise(widths):
            groups = math.gcd(narrow, narrow // 4)  # of 4 channels each, if 4 divides `narrow`
            convolution = nn.Conv1d(
                narrow,
                wide,
                41,
                stride=4,
                padding=20,
                groups=groups,
            )
            layers.append(convolution)
        layers.append(nn.Conv1d(wide, wide, 5, padding=2))
        self.layers = nn.ModuleList(layers)
        self.out = nn.Conv1d(wide, 1, 3, padding=1)

    def transform(self, wave):
        return self.pool(wave[:, None])  # (B, 1, T // downsample)


class STFTUnit(nn.Module):
    """Residual unit over (B, C, F, T) that halves F and, depending on `stride`, T."""

    def __init__(self, channels, out_channels, stride):
        super().__init__()
        kernel = (stride[0] + 2, stride[1] + 2)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, out_channels, kernel, stride, padding=1)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride)

    def forward(self, x):
        h = F.leaky_relu(self.conv1(x), 0.1)
        h = self.conv2(h)  # (B, C', F / 2, T or T / 2)
        shortcut = self.shortcut(x)
        return h + shortcut[..., : h.shape[3]]  # for odd T, the shortcut has one more frame


class STFTDiscriminator(Discriminator):
    """Residual units over the short-time Fourier transform (SoundStream §III-D, Fig. 4).

    The real and imaginary parts are two channels. The paper specifies neither activation nor
    shortcut. Here, the activation is a leaky ReLU, as in WaveDiscriminator, and the shortcut is a
    strided convolution with kernel size 1.
    """

    def __init__(self, channels, window):
        super().__init__()
        self.window = window
        layers = [nn.Conv2d(2, channels, 7, padding=3)]  # real and imaginary part
        widths = [channels * mult for mult in (1, 2, 4, 4, 8, 8, 16)]
        for i, (narrow, wide) in enumerate(itertools.pairwise(widths)):
            # Every unit halves the frequencies, and every second unit also halves the frames.
            stride = (2, 1 + i % 2)
            layers.append(STFTUnit(narrow, wide, stride))
        self.layers = nn.ModuleList(layers)
        self.out = nn.Conv2d(wide, 1, (window // 128, 1))  # over all remaining frequencies

    def transform(self, wave):
        """Real and imaginary parts (B, 2, F, T') of waves (B, T), F = window / 2, in fp32."""
        half = self.window // 2
        # Pad by reflection. On GPUs, the gradient of torch's "reflect" mode is not deterministic.
        left = wave[:, 1 : half + 1]
        right = wave[:, -half - 1 : -1]
        wave = torch.cat([left.flip(1), wave, right.flip(1)], dim=1)
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = audio.stft(wave.float(), self.window, self.window // 4)
            spectrum = spectrum[..., :-1]  # without the highest frequency
            # Two real channels, for real convolutions, as in the paper.
            x = torch.view_as_real(spectrum)  # (B, T', F, 2)
            return x.permute(0, 3, 2, 1)


def make_discriminators(channels, stft_window):
    """Three wave discriminators, at 1, 1/2 and 1/4 of the rate, and one STFT discriminator.

    channels: number of channels in the codec's first layer. The STFT discriminator starts with as
    many, a wave discriminator with half as many.
    """
    channels = max(1, channels // 2)
    waves = [WaveDiscriminator(channels, downsample) for downsample in (1, 2, 4)]
    spectral = STFTDiscriminator(2 * channels, stft_window)
    return nn.ModuleList([*waves, spectral])


# Losses (SoundStream §III-E)


def spectral_distance(fake, real, sample_rate, seconds):
    """Mean absolute difference (B,) of the log-mel spectra of waves (B, T), in nats.

    The mean is over six window lengths, over frames a quarter of a window apart, and over 64 mel
    bins. The longest window lasts `seconds`; each further window is half as long as the one before.
    The paper (Eq. 4, 5) has windows of 64, 128, … 2,048 samples at 24 kHz (2.7 to 85 ms). It sums
    instead of averaging, takes the L2 norm of log spectra, and adds the L1 norm without logarithms.
    """
    distances = []
    for halvings in range(6):
        samples = seconds * sample_rate / 2**halvings
        window = max(8, 2 * round(samples / 2))  # even
        filters = audio.mel_filters(sample_rate, window, 64, device=real.device)
        logs = []
        for wave in (fake, real):
            mel = audio.stft_magnitude(wave, window, window // 4) @ filters
            mel = mel.clamp(min=MEL_FLOOR)
            logs.append(mel.log())  # (B, frames, 64)
        difference = logs[0] - logs[1]
        distances.append(difference.abs().mean((1, 2)))
    return torch.stack(distances).mean(0)


def reconstruction_loss(fake, real, cfg):
    """The codec's reconstruction loss for waves (B, T), in fp32.

    cfg: has sample_rate, wave_weight, mel_weight and mel_seconds.
    """
    with torch.autocast(real.device.type, enabled=False):
        fake = fake.float()  # (B, T)
        wave_loss = (fake - real).abs().mean()  # EnCodec Eq. 1
        distances = spectral_distance(fake, real, cfg.sample_rate, cfg.mel_seconds)
        mel_loss = distances.mean()
    return cfg.wave_weight * wave_loss + cfg.mel_weight * mel_loss


def adversarial_loss(discriminators, fake, real):
    """The codec's hinge loss (Eq. 2) and feature matching loss, averaged over discriminators.

    Feature matching is the L1 distance between the features of fake and real waves (Eq. 3), divided
    by the mean magnitude of the real features (EnCodec Eq. 3), and averaged over layers. With the
    division, the loss does not depend on the features' scale.

    The discriminators are frozen meanwhile, so that the codec's step leaves no gradients in them.
    """
    discriminators.requires_grad_(False)
    hinges = []
    distances = []
    for discriminator in discriminators:
        _, real_features = discriminator(real)  # targets, without gradients
        score, fake_features = discriminator(fake)
        hinge = F.relu(1 - score.float())
        hinges.append(hinge.mean())
        layers = []
        for fake_layer, real_layer in zip(fake_features, real_features):
            real_layer = real_layer.float()
            distance = F.l1_loss(fake_layer.float(), real_layer)
            size = real_layer.abs().mean() + 1e-5
            layers.append(distance / size)
        distances.append(torch.stack(layers).mean())  # so that discriminators have equal weights
    discriminators.requires_grad_(True)
    return torch.stack(hinges).mean(), torch.stack(distances).mean()


def discriminator_loss(discriminators, fake, real, r1_weight):
    """The discriminators' hinge loss (Eq. 1) for waves (B, T), averaged over discriminators.

    r1_weight: weight of the R1 penalty, the squared norm of the scores' gradient at a real wave
    (γ/2 in Mescheder et al. 2018, Eq. 9); 0: no penalty.
    """
    # `fake` is detached: no gradient reaches the codec. It is not recomputed, because a second
    # codec pass would count every sample twice in the codebooks' statistics.
    waves = torch.cat([real, fake.detach()])
    real = real.detach().requires_grad_()  # R1 needs the gradient at the waves
    losses = []
    for discriminator in discriminators:
        score, _ = discriminator(waves)
        real_score, fake_score = score.float().chunk(2)  # (B, T') each
        real_loss = F.relu(1 - real_score).mean()
        fake_loss = F.relu(1 + fake_score).mean()
        loss = real_loss + fake_loss
        if r1_weight:
            with torch.autocast(real.device.type, enabled=False):  # fp16 would overflow
                score, _ = discriminator(real)
                (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)  # (B, T)
                penalty = gradient.square().sum(1)  # (B,)
                loss = loss + r1_weight * penalty.mean()
        losses.append(loss)
    return torch.stack(losses).mean()
