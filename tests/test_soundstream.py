"""The codec and its discriminators against themselves computed another way."""

import functools

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
    for sample in (60, 71):  # the first and the last of frame 5
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
    wave[1] = 0.9 ** torch.arange(3_000.0)  # neighbors correlate by 0.9
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
    # Every unit halves the 128 frequencies, every second one the 33 times.
    shapes = [x.shape[1:] for x in features[::2]]
    assert shapes == [(8, 128, 33), (32, 32, 16), (64, 8, 8), (128, 2, 4)]
    assert scores.shape == (3, 4)


def test_the_reconstruction_loss_is_the_papers_in_fp32_and_has_a_gradient_at_silence():
    fake = torch.randn(4, 4096, requires_grad=True)
    real = torch.randn(4, 4096)
    expected = 3 * F.l1_loss(fake, real) + 0.25
    for window in (64, 128, 256, 512, 1024, 2048):  # Eq. 4 and 5 of SoundStream
        spectra = audio.stft_magnitude(torch.cat([fake, real]), window, window // 4)
        mel = spectra @ audio.mel_filters(8000, window, 64)
        difference = mel[:4] - mel[4:]
        logs = mel[:4].log() - mel[4:].log()
        distances = difference.norm(1, dim=2) + (window / 2) ** 0.5 * logs.norm(dim=2)
        expected = expected + 1e-3 * distances.sum(1).mean()

    loss = functools.partial(
        soundstream.reconstruction_loss,
        sample_rate=8000,
        wave_weight=3.0,
        mel_weight=1e-3,
        commitment=torch.tensor(0.25),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(loss(fake, real), expected, rtol=1e-4, atol=0)
    loss(fake, fake.detach()).backward()  # differences of 0
    loss(fake, torch.zeros(4, 4096)).backward()
    assert fake.grad.isfinite().all()


def test_adversarial_losses_are_hinges_feature_distances_and_r1_and_spare_the_other_network():
    discriminators = awake(soundstream.make_discriminators(2, 512), std=0.2)
    parameters = [*discriminators.parameters()]
    fake = torch.randn(4, 2000, requires_grad=True)
    real = torch.randn(4, 2000, requires_grad=True)
    codec_loss = their_loss = 0  # four times too large: summed over discriminators
    for d in discriminators:
        fake_score, fake_features = d(fake)
        real_score, real_features = d(real)
        distances = torch.stack([*map(F.l1_loss, fake_features, real_features)])
        codec_loss += 0.3 * F.relu(1 - fake_score).mean() + 7 * distances.mean()
        their_loss += F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        (gradient,) = torch.autograd.grad(real_score.sum(), real, create_graph=True)
        their_loss += 10 * gradient.norm(dim=1).square().mean()

    loss = 4 * soundstream.adversarial_loss(discriminators, fake, real, 0.3, 7.0)
    loss.backward()
    (gradient,) = torch.autograd.grad(codec_loss, fake, retain_graph=True)
    assert_close((loss, fake.grad), (codec_loss, gradient), rtol=1e-3, atol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in parameters)

    loss = 4 * soundstream.discriminator_loss(discriminators, fake, real, r1_weight=10.0)
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    theirs = torch.autograd.grad(their_loss, parameters)
    assert_close((loss, *ours), (their_loss, *theirs), rtol=1e-2, atol=1e-4)
    assert torch.autograd.grad(loss, fake, allow_unused=True) == (None,)
