"""Codecs that others have published, through the package transformers: EnCodec, DAC, Mimi."""

import math
from pathlib import Path

import torch.nn.functional as F

from common import checkpoint
from common.config import UserError, explained, need
from common.models import audio


def from_transformers(flag, name, kinds):
    """The model `name` (an id at huggingface.co, or a folder) by transformers, frozen and in fp32.

    kinds: the values of model_type that fit. flag: the setting that names it, for messages.
    UserError for a model of another kind, or for none.
    """
    transformers = need("transformers", flag)
    with explained(f"{flag}: expected a name at huggingface.co, or a folder"):
        kind = transformers.AutoConfig.from_pretrained(name).model_type  # before large weights
        if kind not in kinds:
            raise UserError(f"{flag}: a model of the kind {kind}; expected {', '.join(kinds)}")
        model = transformers.AutoModel.from_pretrained(name)
    return model.float().eval().requires_grad_(False)


class PublishedCodec:
    """EnCodec, DAC or Mimi, used like a SoundStream: hf:MODEL.

    MODEL is a name at huggingface.co or a folder. A wave is padded with silence to whole frames.
    sample_rate: samples a second. hop_length: samples of a frame. frame_rate: frames a second.
    num_quantizers: codes of a frame, each below codebook_size. checksum: text that changes with
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
                f"{flag}: a model of two channels, or one that normalizes chunks of sound; "
                "expected another, such as hf:facebook/encodec_24khz"
            )
        self.is_encodec = settings.model_type == "encodec"
        if self.is_encodec:
            # By default it takes the first bitrate, which is the lowest.
            settings.target_bandwidths = settings.target_bandwidths[-1:]
        # The three models name these in three ways.
        self.sample_rate = settings.sampling_rate
        hop_length = getattr(settings, "hop_length", 0)
        self.hop_length = hop_length or round(self.sample_rate / settings.frame_rate)
        self.frame_rate = self.sample_rate / self.hop_length
        self.codebook_size = settings.codebook_size
        self.num_quantizers = getattr(settings, "n_codebooks", 0) or settings.num_quantizers

        # Frames before one that it may depend on: on ten seconds, after which an LSTM (EnCodec) has
        # forgotten, and for Mimi on the windows of all layers of a transformer. Then a second after
        # it: DAC is not causal.
        layers = getattr(settings, "num_hidden_layers", 0)
        window = getattr(settings, "sliding_window", 0)
        self.before = math.ceil(10 * self.frame_rate) + layers * window
        self.after = math.ceil(self.frame_rate)

        # The weights of a folder may change under the same name.
        files = sorted(Path(name).glob("*.safetensors"))
        digests = [checkpoint.checksum(file)[:16] for file in files]
        self.checksum = " ".join(digests) or name

    def encode(self, wave):
        """Codes (frames, Q) of a wave (T,), on the CPU. In blocks: an hour fits into memory."""

        def work(block):
            codes = self.model.encode(block[None].to(self.model.device)).audio_codes
            # (…, Q, frames): before the batch, EnCodec's have an axis of chunks.
            return codes.flatten(0, -3).mT.cpu()

        wave = F.pad(wave, (0, -len(wave) % self.hop_length))
        return audio.in_blocks(work, wave, self.hop_length, 1, self.before, self.after)

    def decode(self, codes):
        """The wave (frames · hop_length,), on the CPU, of codes (frames, n) of n quantizers."""

        def work(block):
            length = block.shape[1] * self.hop_length
            block = block.mT.to(self.model.device)  # (1, n, frames), as the package has them
            if self.is_encodec:
                out = self.model.decode(block[None], [None])
            else:
                out = self.model.decode(audio_codes=block)
            wave = out.audio_values.flatten(1).cpu()  # (1, T), the only channel
            return F.pad(wave, (0, length - wave.shape[1]))  # DAC's is shorter: a stride is odd

        return audio.in_blocks(work, codes, 1, self.hop_length, self.before, self.after)
