"""Speech features from a layer of a published model, loaded with the package transformers.

AudioLM (Borsos et al. 2022, §III-B) uses layer 7 of w2v-BERT XL, which is not published; w2v-BERT
2.0 is of the same family. HuBERT (Hsu et al. 2021, §III-A) and WavLM (Chen et al. 2021) are used in
the same way.
"""

import torch.nn.functional as F

from common.config import UserError
from common.interop.codecs import from_transformers

HOP = 320  # samples per frame
KINDS = ("hubert", "wavlm", "wav2vec2", "wav2vec2-bert")  # values of model_type


class SpeechLayer:
    """A layer of a published speech model, not an nn.Module, so that its weights are not saved.

    spec: "hf:MODEL:LAYER"; layer 0 is the input of the first layer. width: D of the outputs.
    """

    sample_rate = 16_000

    def __init__(self, spec):
        flag = f"--tokenizer {spec}"
        name, _, layer = spec.removeprefix("hf:").rpartition(":")
        if not name or not layer.isdigit():
            raise UserError(
                f"{flag}: expected mfcc or hf:MODEL:LAYER, such as hf:facebook/w2v-bert-2.0:7"
            )
        self.layer = int(layer)
        self.model = from_transformers(flag, name, KINDS)
        layers = self.model.config.num_hidden_layers
        if self.layer > layers:
            raise UserError(f"{flag}: that model has layers 0 to {layers}")
        self.width = self.model.config.hidden_size
        import transformers  # it must be installed, because it has just loaded the model

        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(name)

    def __call__(self, wave):
        """The layer's outputs (1, ceil(T / 320), D) for a wave (1, T) at 16 kHz."""
        # w2v-BERT 2.0 takes (1, frames, 160): two windows with 80 mel bins each.
        takes_mel = self.model.config.model_type == "wav2vec2-bert"
        if not takes_mel and self.extractor.do_normalize:
            wave = F.layer_norm(wave, wave.shape, eps=1e-7)
        # Center each frame on its 20 ms (320 samples). A frame sees 400 samples, so pad by 40 on
        # each side. A frame of w2v-BERT sees two windows of 400 samples that begin 160 apart, 560
        # samples in all, so pad by 120.
        margin = 120 if takes_mel else 40
        missing = -wave.shape[1] % HOP  # samples missing from the last frame
        x = F.pad(wave, (margin, margin + missing))
        if takes_mel:
            padded = x[0].cpu().numpy()
            features = self.extractor(padded, sampling_rate=self.sample_rate, return_tensors="pt")
            x = features["input_features"]
        model = self.model.to(wave.device)
        outputs = model(x.to(wave.device), output_hidden_states=True)
        return outputs.hidden_states[self.layer]
