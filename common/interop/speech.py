"""Layers of published speech models, through the package transformers: features of speech.

AudioLM (Borsos et al. 2022, §III-B) takes layer 7 of w2v-BERT XL, which is not published. w2v-BERT
2.0 is of its family. HuBERT (Hsu et al. 2021, §III-A) and WavLM (Chen et al. 2021) are used in the
same way.
"""

import torch.nn.functional as F

from common.config import UserError
from common.interop.codecs import from_transformers

HOP = 320  # samples of a frame
KINDS = ("hubert", "wavlm", "wav2vec2", "wav2vec2-bert")  # of model_type


class SpeechLayer:
    """A layer of a published speech model, "hf:MODEL:LAYER". Not a module, so it is not saved.

    LAYER is 0 for the input of the first one. width: of its outputs.
    """

    sample_rate = 16_000

    def __init__(self, spec):
        flag = f"--tokenizer {spec}"
        name, _, layer = spec.removeprefix("hf:").rpartition(":")
        if not name or not layer.isdigit():
            raise UserError(
                f"{flag}: expected mfcc or hf:MODEL:LAYER, as hf:facebook/w2v-bert-2.0:7"
            )
        self.layer = int(layer)
        self.model = from_transformers(flag, name, KINDS)
        layers = self.model.config.num_hidden_layers
        if self.layer > layers:
            raise UserError(f"{flag}: that model has layers 0 to {layers}")
        self.width = self.model.config.hidden_size
        import transformers  # which is there, as the model came from it

        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(name)

    def __call__(self, wave):
        """The layer's outputs (1, ceil(T / 320), D) for a wave (1, T) of 16 kHz."""
        # (1, frames, 160): two windows of 80 mel bins
        takes_mel = self.model.config.model_type == "wav2vec2-bert"
        if not takes_mel and self.extractor.do_normalize:
            wave = F.layer_norm(wave, wave.shape, eps=1e-7)
        # A frame is centered on its 20 ms. It sees 400 samples, or 560 of w2v-BERT's two windows
        # of 400, which are 160 apart: 40 or 120 more on each side.
        margin = 120 if takes_mel else 40
        incomplete = -wave.shape[1] % HOP  # samples missing from the last frame
        x = F.pad(wave, (margin, margin + incomplete))
        if takes_mel:
            padded = x[0].cpu().numpy()
            features = self.extractor(padded, sampling_rate=self.sample_rate, return_tensors="pt")
            x = features["input_features"]
        model = self.model.to(wave.device)
        outputs = model(x.to(wave.device), output_hidden_states=True)
        return outputs.hidden_states[self.layer]
