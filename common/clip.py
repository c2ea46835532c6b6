"""CLIPs (Radford et al. 2021): a small one, trained in a minute, and those of open_clip.

All have the same calls: `tokenize`, `embed_text`, `embed_image` and `text_condition`.

    python -m common.clip train --data PATH|shapes --run_dir runs/clip    # writes model.pt
    python -m common.clip embed --data PATH --run_dir runs/clip --out emb    # writes shards
"""

import os

# Before torch: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import dataclasses
import hashlib
import math
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import (
    accumulate,
    checkpoint,
    config,
    data,
    dist,
    optim,
    order,
    schedule,
    synthetic,
    tracker,
)
from common import nn as layers
from common.config import UserError, need
from common.images import BUILTIN_ROWS, CaptionedImages, Unusable
from common.media import central_square, resize, to_uint8

PAD = 0
START = 1
END = 2
BYTES = 3  # token BYTES + b is the byte b
WORDS = BYTES + 256  # and token WORDS + i the word i of the vocabulary
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or a sign


@dataclasses.dataclass(frozen=True)
class DataConfig(config.Settings):
    """The data"""

    data: str = config.field(
        "shapes", 'captioned images: tars, or a folder of images; "shapes": the built-in ones'
    )
    caption_key: str = config.field(
        "", 'key of captions in JSON or CSV, "": caption; "lines": each line of a .txt is one'
    )
    device: config.Device = config.field("auto", "auto takes the first that is there")


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """The small CLIP and its training"""

    run_dir: str = config.field("runs/clip", "folder for model.pt")
    image_size: config.Size = config.field(
        32, "width and height in pixels that images are brought to"
    )
    context: Annotated[config.Size, ("3 or more", lambda tokens: tokens > 2)] = config.field(
        24, "longest text in tokens; others are cut"
    )
    vocabulary: config.SizeOrZero = config.field(
        4096, "most words with a token of their own; others are spelled by their bytes"
    )
    embed_width: config.Size = config.field(64, "of the embeddings")
    text_width: Annotated[config.Size, ("a multiple of 32", lambda width: width % 32 == 0)] = (
        config.field(64, "of encodings")
    )
    steps: config.PositiveInt = config.field(700, "optimizer steps")
    batch_size: Annotated[int, ("2 or more", lambda pairs: pairs > 1)] = config.field(
        256, "pairs; each contrasts with all others"
    )
    lr: config.PositiveFloat = config.field(3e-3, "highest learning rate")
    seed: int = config.field(0, "of weights and order")


@dataclasses.dataclass(frozen=True)
class EmbedConfig(DataConfig):
    """How to embed it"""

    run_dir: str = config.field(
        "runs/clip", "the CLIP: folder, model.pt, or open_clip:MODEL/WEIGHTS"
    )
    out: str = config.field("emb", "folder for img_emb/, text_emb/, captions/ and clip.json")
    raw: bool = config.field(
        False, "embeddings as the CLIP gives them, for --raw_embeddings; off: of unit length"
    )
    encodings: bool = config.field(
        False, "also write the text encodings of every token, to text_enc/"
    )


class Tokenizer:
    """A token for each word or sign of `vocabulary`. Others become a space and UTF-8 bytes."""

    def __init__(self, vocabulary):
        self.vocabulary = list(vocabulary)
        self.token_of = {word: WORDS + i for i, word in enumerate(self.vocabulary)}

    @classmethod
    def learn(cls, texts, size):
        """A tokenizer of the `size` most frequent words and signs of `texts`.

        Of equally frequent ones, the alphabetically first are taken.
        """
        words = sorted(WORD.findall("\n".join(texts).lower()))
        return cls(word for word, _ in collections.Counter(words).most_common(size))

    def encode(self, text):
        """Tokens of `text`, without START and END. Case and spaces do not matter."""
        tokens = []
        for word in WORD.findall(text.lower()):
            if word in self.token_of:
                tokens.append(self.token_of[word])
            else:  # half a surrogate pair, which has no bytes, becomes "?"
                spelled = f" {word}".encode(errors="replace")
                tokens += [BYTES + byte for byte in spelled]
        return tokens

    def __len__(self):
        return WORDS + len(self.vocabulary)


def text_note(texts, encode, most):
    """A note for the user on texts that are empty, or of more than `most` tokens; "" if none is.

    encode: function of a text that gives its tokens.
    """
    empty = sum(not text for text in texts)
    longer = sum(len(encode(text)) > most for text in texts)
    if not empty + longer:
        return ""
    return (
        f"of {len(texts)} texts looked at {empty} are empty, and {longer} are cut, as they are "
        f"longer than {most} tokens"
    )


class Encoder(nn.Module):
    """What all CLIPs here share."""

    def caption_note(self, dataset, length):
        """`text_note` of the captions of a dataset, for a model of `length` tokens."""
        texts = dataset.texts(data.evenly_spaced(len(dataset), 256))
        most = min(self.context, length) - 2  # START and END
        return text_note(texts, self.tokenizer.encode, most)

    @torch.no_grad()
    def text_condition(self, texts, length):
        """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)} of texts, L = `length`.

        Longer texts are cut, shorter ones padded. All is fp32, also within autocast.
        """
        device = next(self.parameters()).device
        with torch.autocast(device.type, enabled=False):
            embedding, encodings, mask = self.embed_text(self.tokenize(texts).to(device))
        padding = length - encodings.shape[1]  # below 0 it cuts
        return {
            "text_embed": embedding,
            "text_enc": F.pad(encodings.float(), (0, 0, 0, padding)),
            "text_mask": F.pad(mask, (0, padding)),
        }


class CLIP(Encoder):
    """A small convolutional image encoder and a small text transformer into one space.

    Embeddings are compared by their cosine.
    """

    def __init__(self, cfg, vocabulary):
        super().__init__()
        self.tokenizer = Tokenizer(vocabulary)
        self.image_size = cfg.image_size
        self.context = cfg.context
        self.embed_width = cfg.embed_width
        self.encoding_width = cfg.text_width
        self.token_embedding = nn.Embedding(len(self.tokenizer), cfg.text_width)
        self.transformer = layers.Transformer(cfg.text_width, 1, cfg.text_width // 32)
        self.text_projection = nn.Linear(cfg.text_width, cfg.embed_width, bias=False)
        # Flattened, not averaged: an average would lose the place of a thing, which captions name.
        features = 96 * math.ceil(cfg.image_size / 8) ** 2
        self.image_encoder = nn.Sequential(
            nn.Conv2d(3, 24, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(48, 96, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(features),
            nn.Linear(features, cfg.embed_width, bias=False),
        )
        for convolution in self.image_encoder[:6:2]:
            # For ReLU (He et al. 2015): torch's default is smaller by √6.
            nn.init.kaiming_normal_(convolution.weight)
        self.image_encoder.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        # The logarithm of the inverse temperature (Radford et al. 2021, §2.3).
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def fingerprint(self):
        """A digest of weights and vocabulary. It identifies a CLIP wherever its file is."""
        digest = hashlib.sha256()
        for value in self.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        digest.update(repr(self.tokenizer.vocabulary).encode())
        return digest.hexdigest()[:16]

    def tokenize(self, texts):
        """int64 (B, L): START, at most L - 2 tokens, END, and PAD."""
        tokens = torch.full((len(texts), self.context), PAD)
        for row, text in zip(tokens, texts):
            encoded = [START, *self.tokenizer.encode(text)[: self.context - 2], END]
            row[: len(encoded)] = torch.tensor(encoded)
        return tokens

    def embed_text(self, tokens):
        """tokens (B, L) -> embedding (B, D), encodings (B, L, W), zero at padding, mask (B, L)."""
        mask = tokens != PAD
        end = mask.sum(1) - 1
        x = self.transformer(self.token_embedding(tokens))  # (B, L, W), causal: blind to padding
        embedding = self.text_projection(x[torch.arange(len(x), device=x.device), end])
        return embedding.float(), x * mask[..., None], mask

    def embed_image(self, images):
        """uint8 (B, H, W, 3), or float (B, 3, H, W) in [0, 1] -> (B, D)."""
        pixels = center_crop(images, self.image_size) * 2 - 1
        return self.image_encoder(pixels.contiguous(memory_format=torch.channels_last)).float()


def center_crop(images, size):
    """The central squares of images, resized.

    images: uint8 (B, H, W, 3), or float (B, 3, H, W) in [0, 1]. Returns float (B, 3, size, size).
    """
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2).float() / 255
    return resize(central_square(images), size).clamp(0, 1)


class OpenCLIP(Encoder):
    """A pretrained model of the package open_clip, with the calls and attributes of `CLIP`."""

    def __init__(self, spec):
        super().__init__()
        open_clip = need("open_clip", spec, "open_clip_torch")
        self.spec = spec
        name, _, weights = spec.removeprefix("open_clip:").partition("/")
        try:
            # Where weights need QuickGELU, as OpenAI's do, open_clip builds GELU and only warns.
            pretrained_cfg = open_clip.get_pretrained_cfg(name, weights) or {}
            self.model = open_clip.create_model(
                name,
                pretrained=weights,
                require_pretrained=True,
                force_quick_gelu=pretrained_cfg.get("quick_gelu", False),
            )
        except Exception as error:  # of many types: failed downloads, other weights
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{spec}: {reason}; expected open_clip:MODEL/WEIGHTS, such as "
                "open_clip:ViT-L-14/openai, or a file in place of WEIGHTS"
            ) from error
        self.tokenizer = open_clip.get_tokenizer(name)
        text = getattr(self.model, "text", self.model)  # CLIP is its own text tower
        appends_token = getattr(text, "cls_emb", None) is not None  # as CoCa does
        if appends_token or not isinstance(self.tokenizer, open_clip.SimpleTokenizer):
            raise UserError(
                f"{spec}: its text encoder is not that of the original CLIP; "
                "take a model such as ViT-L-14/openai"
            )
        self.text_norm = text.ln_final
        visual = self.model.visual
        self.context = self.model.context_length
        self.image_size = int(np.max(visual.image_size))  # a number, or height and width
        self.register_buffer("mean", torch.tensor(visual.image_mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(visual.image_std).view(3, 1, 1))
        embedding, encodings, _ = self.embed_text(self.tokenize([""]))
        self.embed_width = embedding.shape[-1]
        self.encoding_width = encodings.shape[-1]

    def fingerprint(self):
        return self.spec

    def tokenize(self, texts):
        return self.tokenizer(list(texts), context_length=self.context)

    def embed_text(self, tokens):
        outputs = []  # of the last norm, which open_clip does not return
        hook = self.text_norm.register_forward_hook(lambda *call: outputs.append(call[-1]))
        embedding = self.model.encode_text(tokens)
        hook.remove()
        end = tokens.argmax(1, keepdim=True)  # END is the largest token
        mask = torch.arange(tokens.shape[1], device=tokens.device) <= end
        return embedding.float(), outputs[0] * mask[..., None], mask

    def embed_image(self, images):
        pixels = (center_crop(images, self.image_size) - self.mean) / self.std
        return self.model.encode_image(pixels).float()


def load(spec, device, fingerprint=None):
    """The frozen CLIP `spec`: a run folder, model.pt or open_clip:MODEL/WEIGHTS.

    UserError if it has another `fingerprint`.
    """
    if not spec:
        raise UserError("which CLIP made the embeddings is not known; name it with --clip")
    spec = str(spec)
    if spec.startswith("open_clip:"):
        model = OpenCLIP(spec)
    else:
        path = Path(spec)
        if not path.is_file():
            path = path / "model.pt"
        state = checkpoint.load(path) if path.is_file() else {}
        if "vocabulary" not in state:
            raise UserError(
                f"{path}: there is no CLIP here; train one by python -m common.clip train, name "
                'another with --clip, or train with --clip "", which is without a CLIP'
            )
        with checkpoint.damage_is_named(path):
            cfg = Config(**config.from_json(Config, state["config"], path))
            model = checkpoint.build(lambda: CLIP(cfg, state["vocabulary"]), state, path)
    found = model.fingerprint()
    if fingerprint and found != fingerprint and "open_clip:" not in found + fingerprint:
        raise UserError(
            f"{spec}: not the CLIP that made the embeddings, or trained anew since: fingerprint "
            f"{found}, expected {fingerprint}; embed the data again, or name the right one "
            "with --clip"
        )
    return model.to(device).eval().requires_grad_(False)


def check_widths(clip_model, where, embed_width, encoding_width=0):
    """UserError, which begins with `where`, unless the CLIP has these widths; 0 is any."""
    for name, found, expected in (
        ("embeddings", clip_model.embed_width, embed_width),
        ("text encodings", clip_model.encoding_width, encoding_width),
    ):
        if expected and found != expected:
            raise UserError(
                f"{where}: the CLIP's {name} are {found} wide, but {expected} are needed"
            )


def first_caption(record):
    return data.choose_caption(record["caption"])


def read(path, image_size, training=False, caption_key=""):
    """Yield batches of captioned images: uint8 (B, S, S, 3), and B records {"caption": …}.

    path: a folder, or "shapes", the built-in ones. training: only those that the scripts train on,
    or, of the built-in ones, others than the scripts have.
    """
    if path == "shapes":
        first = BUILTIN_ROWS if training else 0
        indices = range(first, first + BUILTIN_ROWS)
    else:
        dataset = CaptionedImages(path, caption_key=caption_key)
        indices = range(len(dataset))
        if training:  # the scripts split in this way by default
            indices = order.split_keys(map(dataset.key, indices), "train", 0.1, 0.1)
    faults = []
    for start in tracker.progress(range(0, len(indices), 256), desc="reading", unit="batch"):
        batch = indices[start : start + 256]
        if path == "shapes":
            yield synthetic.shapes(batch, size=image_size)
            continue
        images = []
        records = []
        for index in batch:
            try:
                image, caption, key = dataset[index]
            except Unusable as error:
                faults.append(str(error))
                continue
            images.append(center_crop(torch.tensor(image)[None], image_size))
            records.append({"caption": caption, "key": key})
        if records:
            yield to_uint8(torch.cat(images) * 2 - 1).numpy(), records
    if faults:
        print(
            f"{len(faults)} of {len(indices)} images cannot be used and are left out: "
            f"{', '.join(faults[:5])}"
        )


def train(cfg, device):
    """Train a CLIP, write it to RUN/model.pt, and print its last loss.

    It repeats bit for bit on the same device and number of threads. There are no flips and no
    crops, as captions may name places.
    """
    batches = list(read(cfg.data, cfg.image_size, training=True, caption_key=cfg.caption_key))
    captions = [first_caption(record) for _, records in batches for record in records]
    if len(captions) < cfg.batch_size:
        raise UserError(
            f"{cfg.data}: {len(captions)} training images, fewer than a batch of "
            f"{cfg.batch_size}; give more images or a lower --batch_size"
        )
    accumulate.seed_all(cfg.seed, "clip")
    tokenizer = Tokenizer.learn(captions, cfg.vocabulary)
    vocabulary = tokenizer.vocabulary
    note = text_note(captions, tokenizer.encode, cfg.context - 2)
    if note:
        print(note)
    model = CLIP(cfg, vocabulary).to(device).train()
    # Betas and epsilon: Radford et al. 2021, Table 18.
    [optimizer] = optim.make(model, "adamw", cfg.lr, 0.1, (0.9, 0.98), 1e-6)
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches])).to(device)
    tokens = model.tokenize(captions)
    longest = (tokens != PAD).sum(1).max()
    tokens = tokens[:, :longest].to(device)  # (N, L)
    labels = torch.arange(cfg.batch_size, device=device)  # caption i is that of image i
    for step in tracker.progress(range(cfg.steps), desc="small CLIP", unit="step"):
        lr = schedule.learning_rate(step, cfg.lr, cfg.steps // 10, cfg.steps, cosine=True)
        schedule.set_learning_rate([optimizer], lr)
        position = step * cfg.batch_size + np.arange(cfg.batch_size)
        indices = order.shuffle(position, len(captions), cfg.seed)
        # Radford et al. 2021, Figure 3.
        image = F.normalize(model.embed_image(pixels[indices]), dim=-1)
        text = F.normalize(model.embed_text(tokens[indices])[0], dim=-1)
        logits = model.logit_scale.clamp(max=math.log(100)).exp() * image @ text.T  # (B, B)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"small CLIP: last loss {loss:.3f}; chance is {math.log(cfg.batch_size):.3f}")
    state = {"model": model.state_dict(), "vocabulary": vocabulary, "config": config.as_json(cfg)}
    checkpoint.save(state, Path(cfg.run_dir, "model.pt"))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def embed(clip_model, batches, encodings=False, raw=False):
    """Embed the batches of `read`: ([images (N, D), texts (N, D)], N records).

    With `encodings`, a third array has the text encodings (N, L, W). Embeddings are of unit
    length, unless `raw`.
    """
    device = next(clip_model.parameters()).device
    arrays = []
    records = []
    for pixels, batch in batches:
        image = clip_model.embed_image(torch.from_numpy(pixels).to(device))
        tokens = clip_model.tokenize([first_caption(record) for record in batch]).to(device)
        text, text_enc, _ = clip_model.embed_text(tokens)
        if not raw:
            image = F.normalize(image, dim=-1)
            text = F.normalize(text, dim=-1)
        outputs = [image, text, text_enc] if encodings else [image, text]
        arrays.append([output.float().cpu().numpy() for output in outputs])
        records += batch
    return [np.concatenate(column) for column in zip(*arrays)], records


def embed_all(cfg, device):
    """Write embeddings of all images of `data` as shards, and clip.json, which names the CLIP."""
    clip_model = load(cfg.run_dir, device)
    out = Path(cfg.out)
    (out / "clip.json").unlink(missing_ok=True)  # it may name another CLIP
    batches = read(cfg.data, clip_model.image_size, caption_key=cfg.caption_key)
    arrays, records = embed(clip_model, batches, cfg.encodings, cfg.raw)
    if not records:
        raise UserError(f"{cfg.data}: none of its images can be used")
    # In half precision, as clip-retrieval writes them.
    image, text, *encodings = [array.astype(np.float16) for array in arrays]
    data.write_shards(out, image, text, records, *encodings)
    spec = cfg.run_dir
    if not spec.startswith("open_clip:"):
        spec = str(Path(spec).resolve())
    note = {"clip": spec, "fingerprint": clip_model.fingerprint(), "place": str(out.absolute())}
    checkpoint.write_json(note, out / "clip.json")


def builtin_data(folder, device):
    """Make FOLDER/clip, the small CLIP, and FOLDER/shapes, its embeddings, unless they are there.

    Returns the path of the latter.
    """
    run_dir = Path(folder).resolve() / "clip"
    out = Path(folder) / "shapes"
    path = out / "clip.json"
    cfg = Config(run_dir=str(run_dir))
    pictures, records = synthetic.shapes(range(64))
    facts = pictures.tobytes(), records, BUILTIN_ROWS, dataclasses.replace(cfg, run_dir="")
    made_from = hashlib.sha256(repr(facts).encode()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        checkpoint.lock(lock, wait=True)  # another run may be making them
        try:
            note = config.read_json(path)
            load(run_dir, "cpu", str(note.get("fingerprint")))
        except (UserError, OSError):  # missing or damaged
            note = {}
        if note.get("made_from") != made_from:
            threads = torch.get_num_threads()
            torch.set_num_threads(min(8, threads * dist.world_size()))  # the other ranks wait
            train(cfg, device)
            embed_all(EmbedConfig(run_dir=str(run_dir), out=str(out)), device)
            torch.set_num_threads(threads)
            checkpoint.write_json({**config.read_json(path), "made_from": made_from}, path)
    return str(out)


def train_command(cfg):
    train(cfg, dist.setup(cfg.device))
    embedding = f"embed --data {cfg.data} --run_dir {cfg.run_dir} --out emb"
    print(f"Next: python -m common.clip {embedding}")


def embed_command(cfg):
    embed_all(cfg, dist.setup(cfg.device))
    print(f"Next: python train_prior.py --data {cfg.out} --run_dir runs/my_prior")


def main():
    config.run({"train": (train_command, Config), "embed": (embed_command, EmbedConfig)}, __doc__)


if __name__ == "__main__":
    main()
