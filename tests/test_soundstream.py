"""The codec and its discriminators, compared with other ways to compute them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import awake, make_codec
from torch.testing import assert_close

from common.models import audio, soundstream


@torch.no_grad()
def test_encoder_and_decoder_are_causal_by_frame():
    codec = make_codec(strides=(4, 3))  # frames of 12 samples
    wave = torch.randn(2, 156)
    frames = codec.encode_latents(wave)
    for sample in (60, 71):  # the first and the last sample of frame 5
        other = wave.clone()
        other[:, sample] += 1
        change = (codec.encode_latents(other) - frames).abs().amax((0, 2))
        assert change[:5].max() < 1e-5
        assert change[5] > 1e-3

    decoded = codec.decode_latents(frames)
    frames[:, 5] += 1
    change = (codec.decode_latents(frames) - decoded).abs()
    assert change[:, :60].max() < 1e-5
    assert change[:, 60:72].max() > 1e-3


@torch.no_grad()
def test_a_long_sound_is_coded_in_blocks_as_in_one_piece(monkeypatch):
    codec = make_codec(strides=(2, 2), pre_emphasis=0.9)
    wave = 0.1 * torch.randn(4_001)
    codes = codec.encode(wave)
    decoded = codec.decode(codes)
    monkeypatch.setattr(audio, "BLOCK_FRAMES", 300)
    assert torch.equal(codec.encode(wave), codes)
    assert_close(codec.decode(codes), decoded)


def test_emphasis_is_undone_and_keeps_the_size_of_sound_whose_neighbors_are_alike():
    codec = make_codec(pre_emphasis=0.95)
    wave = torch.randn(2, 3_000).cumsum(1)
    wave[1] = 0.9 ** torch.arange(3_000.0)  # neighbors have correlation 0.9
    emphasized = codec.emphasize(wave)
    assert_close(codec.deemphasize(emphasized), wave, atol=1e-2, rtol=0)
    assert 0.9 < emphasized[1].norm() / wave[1].norm() < 1.1


def test_the_elu_is_torchs_with_its_gradient():
    x = torch.linspace(-9, 9, 1001).requires_grad_()
    y = soundstream.ELU()(x)
    y.sum().backward()
    assert_close(y, F.elu(x), atol=1e-6, rtol=1e-6)
    assert_close(x.grad, x.exp().clamp(max=1), atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_the_stft_discriminator_sees_real_and_imaginary_parts_and_shrinks_as_in_the_paper():
    d = soundstream.STFTDiscriminator(8, 256)
    wave = torch.randn(3, 2048)
    spectrum = torch.stft(wave, 256, 64, window=torch.hann_window(256), return_complex=True)
    assert_close(torch.complex(*d.transform(wave).unbind(1)), spectrum[:, :128])
    scores, features = d(wave)
    # Every unit halves the 128 frequencies, and every second unit the 33 frames.
    shapes = [x.shape[1:] for x in features[::2]]
    assert shapes == [(8, 128, 33), (32, 32, 16), (64, 8, 8), (128, 2, 4)]
    assert scores.shape == (3, 4)


def weights(rate=8_000, seconds=0.0853):
    return SimpleNamespace(
        sample_rate=rate, wave_weight=3.0, mel_weight=2.0, mel_seconds=seconds
    )


@pytest.mark.parametrize(
    "rate, seconds, windows",
    [
        (24_000, 2048 / 24_000, (64, 128, 256, 512, 1024, 2048)),  # the paper's
        (8_000, 2048 / 24_000, (22, 42, 86, 170, 342, 682)),
        (8_000, 0.256, (64, 128, 256, 512, 1024, 2048)),
    ],
)
def test_the_reconstruction_loss_is_a_mean_over_windows_in_fp32(rate, seconds, windows):
    fake = torch.randn(4, 4096, requires_grad=True)
    real = torch.randn(4, 4096)
    expected = 3 * F.l1_loss(fake, real)
    for window in windows:
        spectra = audio.stft_magnitude(torch.cat([fake, real]), window, window // 4)
        logs = (spectra @ audio.mel_filters(rate, window, 64)).log()
        expected = expected + 2 * F.l1_loss(logs[:4], logs[4:]) / 6
    cfg = weights(rate, seconds)
    with torch.autocast("cpu", torch.bfloat16):
        loss = soundstream.reconstruction_loss(fake, real, cfg)
    assert_close(loss, expected, rtol=1e-4, atol=0)
    soundstream.reconstruction_loss(fake, fake.detach(), cfg).backward()  # all differences are 0
    soundstream.reconstruction_loss(fake, torch.zeros(4, 4096), cfg).backward()
    assert fake.grad.isfinite().all()


def test_no_loss_depends_on_the_length_of_a_crop():
    fake, real = (0.1 * torch.randn(8, 2, 16_000)).unbind(1)
    short = soundstream.reconstruction_loss(fake[:, :4_000], real[:, :4_000], weights())
    long = soundstream.reconstruction_loss(fake, real, weights())
    assert_close(short, long, rtol=0.02, atol=0)


def test_adversarial_losses_are_hinges_feature_distances_and_r1_and_spare_the_other_network():
    discriminators = awake(soundstream.make_discriminators(2, 512), std=0.2)
    parameters = [*discriminators.parameters()]
    fake = torch.randn(4, 2000, requires_grad=True)
    real = torch.randn(4, 2000, requires_grad=True)
    codec_loss = their_loss = 0  # sums over four discriminators, not means
    for d in discriminators:
        fake_score, fake_features = d(fake)
        real_score, real_features = d(real)
        distances = []
        for fake_layer, real_layer in zip(fake_features, real_features):
            size = real_layer.abs().mean() + 1e-5
            distances.append(F.l1_loss(fake_layer, real_layer) / size)
        distances = torch.stack(distances)
        codec_loss += 0.3 * F.relu(1 - fake_score).mean() + 7 * distances.mean()
        their_loss += F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        (gradient,) = torch.autograd.grad(real_score.sum(), real, create_graph=True)
        their_loss += 10 * gradient.norm(dim=1).square().mean()

    hinge, features = soundstream.adversarial_loss(discriminators, fake, real)
    loss = 4 * (0.3 * hinge + 7 * features)
    loss.backward()
    (gradient,) = torch.autograd.grad(codec_loss, fake, retain_graph=True)
    assert_close((loss, fake.grad), (codec_loss, gradient), rtol=1e-3, atol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in parameters)

    loss = 4 * soundstream.discriminator_loss(discriminators, fake, real, r1_weight=10.0)
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    theirs = torch.autograd.grad(their_loss, parameters)
    assert_close((loss, *ours), (their_loss, *theirs), rtol=1e-2, atol=1e-4)
    assert torch.autograd.grad(loss, fake, allow_unused=True) == (None,)
