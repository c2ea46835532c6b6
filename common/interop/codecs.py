"""Published codecs, loaded with the package transformers: EnCodec, DAC, Mimi."""

import math
from pathlib import Path

import torch.nn.functional as F

from common import checkpoint
from common.config import UserError, explained, need
from common.models import audio


def from_transformers(flag, name, kinds):
    """Load the model `name` (an id at huggingface.co, or a folder), frozen and in fp32.

    kinds: allowed values of model_type. flag: the setting that names the model, for messages.
    UserError if there is no such model, or if it is of another kind.
    """
    transformers = need("transformers", flag)
    with explained(f"{flag}: expected a name at huggingface.co, or a folder"):
        # Check the config before downloading large weights.
        kind = transformers.AutoConfig.from_pretrained(name).model_type
        if kind not in kinds:
            raise UserError(f"{flag}: model type {kind}; expected {', '.join(kinds)}")
        model = transformers.AutoModel.from_pretrained(name)
    model = model.float().eval()
    return model.requires_grad_(False)


class PublishedCodec:
    """EnCodec, DAC or Mimi, with the interface of SoundStream.

    spec: hf:MODEL, where MODEL is a name at huggingface.co or a folder. Waves are padded with
    silence to whole frames.

    sample_rate: samples per second. hop_length: samples per frame. frame_rate: frames per second.
    num_quantizers: codes per frame, each below codebook_size. checksum: a text that changes with
    the weights.
    """

    def __init__(self, spec, device):
        flag = f"--soundstream {spec}"
        name = spec.removeprefix("hf:")
        self.model = from_transformers(flag, name, ("encodec", "dac", "mimi")).to(device)
        settings = self.model.config
        stereo = getattr(settings, "audio_channels", 1) > 1
        if stereo or getattr(settings, "normalize", False):
            raise UserError(
                f"{flag}: stereo models, and models that normalize chunks, do not work; "
                "use another, such as hf:facebook/encodec_24khz"
            )
        self.is_encodec = settings.model_type == "encodec"
        if self.is_encodec:
            # Use the highest bitrate, which is the last. The default is the first, the lowest.
            settings.target_bandwidths = settings.target_bandwidths[-1:]
        # The three models have different names for these settings.
        self.sample_rate = settings.sampling_rate
        hop_length = getattr(settings, "hop_length", 0)
        self.hop_length = hop_length or round(self.sample_rate / settings.frame_rate)
        self.frame_rate = self.sample_rate / self.hop_length
        self.codebook_size = settings.codebook_size
        self.num_quantizers = getattr(settings, "n_codebooks", 0) or settings.num_quantizers

        # A frame may depend on this many frames before and after it. Before: ten seconds, more than
        # EnCodec's LSTM remembers, plus the attention windows of all of Mimi's layers. After: one
        # second, because DAC is not causal.
        layers = getattr(settings, "num_hidden_layers", 0)
        window = getattr(settings, "sliding_window", 0)
        self.before = math.ceil(10 * self.frame_rate) + layers * window
        self.after = math.ceil(self.frame_rate)

        # The weights in a folder may change while its name stays the same.
        files = sorted(Path(name).glob("*.safetensors"))
        digests = [checkpoint.checksum(file)[:16] for file in files]
        self.checksum = " ".join(digests) or name

    def encode(self, wave):
        """Codes (frames, Q) of a wave (T,), on the CPU, computed block by block."""

        def work(block):
            block = block[None].to(self.model.device)
            codes = self.model.encode(block).audio_codes
            # (…, Q, frames): EnCodec has a chunk axis before the batch axis.
            codes = codes.flatten(0, -3)
            return codes.mT.cpu()

        missing = -len(wave) % self.hop_length
        wave = F.pad(wave, (0, missing))
        return audio.in_blocks(work, wave, self.hop_length, 1, self.before, self.after)

    def decode(self, codes):
        """The wave (frames · hop_length,) for codes (frames, n) from n quantizers, on the CPU."""

        def work(block):
            length = block.shape[1] * self.hop_length
            block = block.mT.to(self.model.device)  # (1, n, frames), as transformers expects
            if self.is_encodec:
                out = self.model.decode(block[None], [None])
            else:
                out = self.model.decode(audio_codes=block)
            wave = out.audio_values.flatten(1).cpu()  # (1, T), the only channel
            missing = length - wave.shape[1]
            return F.pad(wave, (0, missing))  # DAC models with an odd stride return fewer samples

        return audio.in_blocks(work, codes, 1, self.hop_length, self.before, self.after)
