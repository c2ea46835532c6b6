"""Published codecs, small and with random weights: codes and waves equal those of transformers."""

import pytest
import torch
from helpers import published_codec
from torch.nn.functional import pad
from torch.testing import assert_close

from common.config import UserError
from common.interop.codecs import PublishedCodec
from common.models import audio


@pytest.mark.parametrize(
    "kind, hop_length, two_codes",
    [
        ("encodec", 160, dict(bandwidth=0.4)),
        ("dac", 30, dict(n_quantizers=2)),
        ("mimi", 160, dict(num_quantizers=2)),
    ],
)
@torch.no_grad()
def test_codes_and_waves_are_the_packages_own(kind, hop_length, two_codes, tmp_path):
    model = published_codec(tmp_path, kind)
    codec = PublishedCodec(f"hf:{tmp_path}", "cpu")
    assert (codec.hop_length, codec.frame_rate) == (hop_length, 8000 / hop_length)
    assert (codec.sample_rate, codec.num_quantizers, codec.codebook_size) == (8000, 4, 16)

    wave = torch.randn(12 * hop_length + 1)
    padded = pad(wave, (0, hop_length - 1))[None, None]
    all_codes = {"bandwidth": 0.8} if kind == "encodec" else {}
    codes = codec.encode(wave)
    assert (codes[1:] != codes[:-1]).any()
    for count, settings in ((4, all_codes), (2, two_codes)):
        theirs = model(padded, **settings)
        first = codes[..., :count]  # what fewer quantizers would give
        assert torch.equal(first, theirs.audio_codes.view(count, 13).T)
        sound = codec.decode(first)
        assert sound.shape == (13 * hop_length,)
        values = theirs.audio_values.flatten()  # DAC returns fewer samples if a stride is odd
        assert_close(sound[: len(values)], values)

    published_codec(tmp_path, kind)
    assert PublishedCodec(f"hf:{tmp_path}", "cpu").checksum != codec.checksum


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    published_codec(tmp_path, "encodec", normalize=True)
    with pytest.raises(UserError, match="stereo models, and models that normalize chunks"):
        PublishedCodec(f"hf:{tmp_path}", "cpu")


@pytest.mark.parametrize("kind, frames", [("encodec", 900), ("dac", 4500), ("mimi", 900)])
@torch.no_grad()
def test_a_long_sound_in_blocks_is_the_packages_whole_and_a_block_is_short(
    kind, frames, tmp_path, monkeypatch
):
    settings = {"sliding_window": 20} if kind == "mimi" else {}
    model = published_codec(tmp_path, kind, **settings)
    codec = PublishedCodec(f"hf:{tmp_path}", "cpu")
    wave = torch.randn(frames * codec.hop_length)
    monkeypatch.setattr(audio, "BLOCK_FRAMES", frames // 9)
    lengths = []
    encode = codec.model.encode

    def watched(block):
        lengths.append(block.shape[-1])
        return encode(block)

    monkeypatch.setattr(codec.model, "encode", watched)
    codes = codec.encode(wave)
    settings = {"bandwidth": 0.8} if kind == "encodec" else {}
    theirs = model(wave[None, None], **settings)
    assert torch.equal(codes, theirs.audio_codes.view(4, frames).T)
    values = theirs.audio_values.flatten()
    assert_close(codec.decode(codes)[: len(values)], values, atol=1e-4, rtol=0)
    assert len(lengths) == 9
    assert max(lengths) < 0.8 * len(wave)
