"""Published speech models with random weights: layers equal those in `transformers`."""

import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from common.config import UserError
from common.interop.speech import SpeechLayer

transformers = pytest.importorskip("transformers")


def save_model(folder, kind, normalize=True):
    """A tiny random model of `kind` and its feature extractor, saved in `folder`."""
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    extractor = transformers.SeamlessM4TFeatureExtractor()
    if kind != "Wav2Vec2Bert":
        sizes |= dict(
            conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2
        )
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
    return model, extractor


@pytest.mark.parametrize(
    "kind, normalize",
    [("Hubert", True), ("WavLM", False), ("Wav2Vec2Bert", True)],
)
@torch.no_grad()
def test_features_are_a_layers_outputs_of_centered_frames(kind, normalize, tmp_path):
    model, extractor = save_model(tmp_path, kind, normalize)
    layer = SpeechLayer(f"hf:{tmp_path}:1")
    for samples in (16_000, 16_001, 8_319):
        wave = 0.1 * torch.randn(1, samples) + 0.05
        frames = -(-samples // 320)
        [found] = layer(wave)
        assert found.shape == (frames, layer.width)
        incomplete = frames * 320 - samples
        if kind == "Wav2Vec2Bert":  # a frame sees 560 samples; frames are 320 apart
            padded = pad(wave[0], (120, incomplete + 120)).numpy()
            inputs = extractor(padded, sampling_rate=16_000, return_tensors="pt").values()
        else:  # a frame sees 400 samples
            if normalize:
                wave = (wave - wave.mean()) / wave.std(correction=0)
            inputs = [pad(wave, (40, incomplete + 40))]
        expected = model(*inputs, output_hidden_states=True).hidden_states[1][0]
        assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_models_and_layers_that_do_not_fit_are_named(tmp_path):
    save_model(tmp_path / "hubert", "Hubert")
    transformers.MimiConfig().save_pretrained(tmp_path / "mimi")
    for spec, message in [
        ("hf:x", "expected mfcc or hf:MODEL:LAYER"),
        ("hf:/nowhere:1", "/nowhere"),
        (f"hf:{tmp_path}/hubert:3", "layers 0 to 2"),
        (f"hf:{tmp_path}/mimi:1", "model type mimi; expected hubert, wavlm"),
    ]:
        with pytest.raises(UserError, match=f"--tokenizer {spec}.*{message}"):
            SpeechLayer(spec)
