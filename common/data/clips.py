"""Load a CLIP by name, find which CLIP made the embeddings of a run, and check embeddings."""

import contextlib
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, config, order
from common.config import UserError, explained, need
from common.models import clip

MIN_COSINE = 0.3  # minimum mean cosine between stored and new embeddings; about 0 for a wrong CLIP
ORDER_MARGIN = 0.02  # cosines closer than this count as equal, because of near-duplicate samples


class OpenCLIP(clip.Encoder):
    """A pretrained model from the package open_clip, with the interface of `CLIP`.

    text_only: do not load the image encoder, which takes 7 GB for ViT-bigG-14.
    """

    def __init__(self, spec, text_only=False):
        super().__init__()
        open_clip = need("open_clip", spec, "open_clip_torch")
        self.spec = spec
        name, _, weights = spec.removeprefix("open_clip:").partition("/")
        with explained(
            f"{spec}: expected open_clip:MODEL/WEIGHTS, such as open_clip:ViT-L-14/openai, or a "
            "file in place of WEIGHTS"
        ):
            # Some weights, such as OpenAI's, need QuickGELU. By default, open_clip uses GELU even
            # for these, and only warns.
            pretrained_cfg = open_clip.get_pretrained_cfg(name, weights)
            quick_gelu = pretrained_cfg.get("quick_gelu", False)
            settings = open_clip.get_model_config(name)
            # A custom text encoder may need the image encoder, so load such models completely.
            if text_only and "custom_text" not in settings:
                settings["vision_cfg"] = {"layers": 0}
                settings.setdefault("quick_gelu", quick_gelu)
                self.model = open_clip.CLIP(**settings)
                self.model.visual = None
                path = open_clip.download_pretrained(pretrained_cfg) or weights
                missing, _ = open_clip.load_checkpoint(self.model, path, strict=False)
                if missing:
                    raise KeyError(missing[0])
            else:
                self.model = open_clip.create_model(
                    name,
                    pretrained=weights,
                    require_pretrained=True,
                    force_quick_gelu=quick_gelu,
                )
        self.tokenizer = open_clip.get_tokenizer(name)
        if not isinstance(self.tokenizer, open_clip.SimpleTokenizer):
            raise UserError(
                f"{spec}: its text encoder differs from the original CLIP's; "
                "use a model such as ViT-L-14/openai"
            )
        self.text_norm = getattr(self.model, "text", self.model).ln_final
        self.context = self.model.context_length
        self.embed_width = settings["embed_dim"]
        self.encoding_width = len(self.text_norm.weight)
        visual = self.model.visual
        if visual:
            self.image_size = int(np.max(visual.image_size))  # a number, or (height, width)
            statistics = torch.tensor([visual.image_mean, visual.image_std])
            self.register_buffer("statistics", statistics.view(2, 3, 1, 1))

    def fingerprint(self):
        return self.spec

    def embed_text(self, tokens):
        outputs = []  # the output of the last norm, which open_clip does not return
        hook = self.text_norm.register_forward_hook(lambda *call: outputs.append(call[-1]))
        embedding = self.model.encode_text(tokens)
        hook.remove()
        end = tokens.argmax(1, keepdim=True)  # END has the largest ID
        mask = torch.arange(tokens.shape[1], device=tokens.device) <= end
        return embedding.float(), outputs[0] * mask[..., None], mask

    def embed_image(self, images):
        mean, std = self.statistics
        pixels = (clip.center_crop(images, self.image_size) - mean) / std
        return self.model.encode_image(pixels).float()


def load(spec, device, fingerprint=None, text_only=False):
    """Load the frozen CLIP `spec`: a run folder, model.pt or open_clip:MODEL/WEIGHTS.

    fingerprint: the expected one; UserError if it differs. text_only: see OpenCLIP.
    """
    if not spec:
        raise UserError("the CLIP that made the embeddings is not known; name it with --clip")
    spec = str(spec)
    if spec.startswith("open_clip:"):
        model = OpenCLIP(spec, text_only)
    else:
        path = Path(spec)
        if not path.is_file():
            path = path / "model.pt"
        contents = checkpoint.load(path) if path.is_file() else {}
        if contents.get("kind") != "clip":
            raise UserError(
                f"{path}: there is no CLIP here; train one with python -m common.data.embed train, "
                'name another with --clip, or train without a CLIP: --clip ""'
            )
        model = clip.CLIP(**contents["settings"])
        checkpoint.load_weights(model, contents["model"], path)
    model.check_fingerprint(spec, fingerprint)
    return model.to(device).eval().requires_grad_(False)


def clip_of(cfg, model_file=None):
    """Return (name of the run's CLIP or None, its expected fingerprint or None).

    --clip names the CLIP. If it is "auto", the name comes from clip.json in --data or, without that
    file, from `model_file`. The fingerprint also comes from one of these two. If both have one, and
    they differ, a note is printed.
    """
    known = {}
    if model_file:
        contents = checkpoint.load(model_file, mmap=True)
        known = {"clip": contents.get("clip"), "fingerprint": contents.get("clip_fingerprint")}
    path = Path(cfg.data, "clip.json")
    if path.is_file():
        before = known.get("fingerprint")
        known = config.read_json(path)
        if before and before != known.get("fingerprint"):
            config.note(f"{model_file}: trained with a CLIP other than the one in {path}")
    spec = known.get("clip") if cfg.clip == "auto" else cfg.clip
    return spec, known.get("fingerprint")


def check_source(cfg, dataset, path, clip_model=None):
    """Check the stored embeddings of a few samples; UserError if the model cannot use them.

    A model for raw embeddings refuses embeddings of unit length. If `clip_model` is given, it must
    be the CLIP that made the embeddings, and they must be in the same order as their samples.
    `path` is named in error messages.
    """
    # Check pairs of adjacent samples, to notice embeddings that are shifted by one. First find out
    # which samples are usable, because `fetch` of an image dataset returns only these.
    indices = (order.evenly_spaced(len(dataset), 16)[:, None] + [0, 1]).ravel() % len(dataset)
    _, usable = dataset.fetch(indices)
    indices = indices[usable]
    batch, _ = dataset.fetch(indices)
    stored = batch.get("image_embed")
    if stored is None:  # a CLIP will compute the embeddings
        return
    length = stored.norm(dim=1).nanmedian()
    if cfg.raw_embeddings and abs(length - 1) < 0.01:
        raise UserError(
            f"{path}: its embeddings have unit length, but the model takes raw embeddings; rewrite "
            "them with python -m common.data.embed embed --raw"
        )

    # Embed the captions again or, without captions, the images.
    texts = []
    if clip_model and "text_embed" in batch and dataset.captions:
        with contextlib.suppress(UserError):  # unreadable captions are not an error here
            texts = dataset.texts(indices)
    if texts:
        stored = batch["text_embed"]
        found = clip_model.text_condition(texts, 1)["text_embed"]
    elif clip_model and "image" in batch:
        device = next(clip_model.parameters()).device
        found = clip_model.embed_image(batch["image"].to(device))
    else:
        config.note(f"{path}: cannot check whether embeddings are in the order of their samples")
        return
    cosines = torch.cosine_similarity(found.cpu()[:, None], stored, dim=-1)  # (n, n)
    own = cosines.diagonal()
    cosine = own.mean()
    if cosine < MIN_COSINE:
        raise UserError(
            f"{path}: its embeddings are from another CLIP (mean cosine {cosine:.2f}); name the "
            "CLIP that made them with --clip"
        )
    misplaced = own < cosines.amax(1) - ORDER_MARGIN
    if misplaced.float().mean() > 0.5:
        raise UserError(
            f"{path}: embeddings are not in the same order as their samples: sample "
            f"{indices[misplaced][0]} fits the embedding of another sample better; rewrite them"
        )
