"""Text–image encoders: the small CLIP, trained here in under a minute, and open_clip's behind the same three calls.

    python -m common.clip train --data PATH|shapes --run runs/clip      # on any captioned images -> runs/clip/model.pt
    python -m common.clip embed --data PATH --run runs/clip --out emb   # embedding shards, and emb/clip.json
    python -m common.clip train --data PATH --init_from runs/clip/model.pt --lora_rank 4 --run runs/clip_lora

The third trains low-rank adapters of the text encoder alone: lora.pt, and model.pt with them merged in.

PATH is a folder of img2dataset tars or of images with .txt beside them. Radford et al. 2021, "Learning Transferable
Visual Models From Natural Language Supervision".
"""
import collections
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import accumulate, amp, checkpoint, config, data, dist, images, lora, optim, schedule, synthetic, tracker
from common import nn as layers
from common.config import UserError, need
from common.images import BUILTIN_ROWS
from common.media import resize

SIZES = ("image_size", "context", "vocabulary", "embed_width", "text_width", "text_depth", "channels")
PAD, START, END, BYTES = 0, 1, 2, 3  # token BYTES + b is the byte b; what was merged follows


@dataclasses.dataclass(frozen=True)
class Config:
    run: str = "runs/clip"  # folder for model.pt and config.json
    data: str = "shapes"  # captioned images: folder of tars or of images; "shapes": the built-in ones
    init_from: str = ""  # with lora_rank: model.pt of the CLIP to adapt, whose tokenizer and sizes are taken
    lora_rank: int = 0  # train adapters of this rank on the text encoder's attention alone; images keep their embedding
    lora_alpha: float = 0.0  # the adapters are scaled by lora_alpha / lora_rank, 0 for lora_rank
    holdout: float = 0.2  # share of the images kept out of training, chosen by a hash of the key
    image_size: int = 32  # width and height in pixels that images are brought to, a multiple of 8
    context: int = 24  # longest text in tokens, start and end included; longer ones are cut
    vocabulary: int = 1024  # most tokens that the tokenizer may learn, the 259 bytes and specials included
    embed_width: int = 64  # of the embeddings
    text_width: int = 64  # of the text encodings
    text_depth: int = 1  # transformer blocks of the text encoder
    channels: tuple[int, ...] = (24, 48, 96)  # of the image encoder's three convolutions
    steps: int = 550  # optimizer steps
    batch_size: int = 256  # pairs; each is told apart from all the others
    lr: float = 2e-3  # highest learning rate
    weight_decay: float = 0.1  # of AdamW, on matrices only
    warmup_steps: int = 50  # of linear rise to lr; half a cosine follows
    precision: Literal["fp32", "bf16"] = "fp32"  # of the matrix products in training
    seed: int = 0  # of weights and order
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto takes the first that is there

    def __post_init__(self):
        shrink = max(8, 2 ** len(self.channels))
        for wrong, message in (
                (self.image_size < 8 or self.image_size % shrink, f"image_size must be a multiple of {shrink}"),
                (self.text_width < 32 or self.text_width % 32, "text_width must be a multiple of 32"),
                (self.context < 3, "context must be at least 3 tokens"),
                (self.vocabulary < BYTES + 256, f"vocabulary must be at least {BYTES + 256}, a token for every byte"),
                (self.batch_size < 2, "batch_size must be at least 2, for there to be pairs to tell apart"),
                (not 0 <= self.holdout < 1, "holdout must be at least 0 and below 1"),
                (self.steps < 1, "steps must be above 0"),
                (self.init_from and self.lora_rank < 1, "lora_rank with --init_from must be above 0"),
                (self.lora_rank and not self.init_from, "lora_rank without --init_from must be 0")):
            if wrong:
                raise UserError(f"--{message}, not {getattr(self, message.split()[0])}")


@dataclasses.dataclass(frozen=True)
class EmbedConfig:
    data: str = "shapes"  # captioned images: folder of tars or of images; "shapes": the built-in ones
    run: str = "runs/clip"  # the CLIP: folder, model.pt, or open_clip:MODEL/WEIGHTS
    out: str = "emb"  # folder for img_emb/, text_emb/, captions/ and clip.json
    encodings: bool = False  # also write the text encodings of every token, to text_enc/
    batch_size: int = 256  # images at a time
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto takes the first that is there


# Tokenizer

PIECES = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # a word takes the space before it along; nothing is left out


class Tokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes, Radford et al. 2019 §2.2) of any text.

    `merges` is a list of pairs of tokens; merge number i makes the token BYTES + 256 + i.
    """

    def __init__(self, merges: list[tuple[int, int]]):
        self.merges = [(int(a), int(b)) for a, b in merges]
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.spelling = [b"", b"", b""] + [bytes([b]) for b in range(256)]
        for a, b in self.merges:
            self.spelling.append(self.spelling[a] + self.spelling[b])
        self.known = {}  # piece -> tokens

    @classmethod
    def learn(cls, texts: list[str], vocabulary: int) -> "Tokenizer":
        """Merge the most frequent pair of neighbors within the pieces of `texts`, again and again.

        Stops at `vocabulary` tokens or when no pair is left that occurs twice. Ties go to the smaller pair, so the
        order of the texts does not matter.
        """
        counts = collections.Counter(piece for text in texts for piece in PIECES.findall(text))
        words = [[[BYTES + b for b in _utf8(piece)], count] for piece, count in counts.items()]
        pairs, places = collections.Counter(), collections.defaultdict(set)
        for i, (word, count) in enumerate(words):
            for pair in itertools.pairwise(word):
                pairs[pair] += count
                places[pair].add(i)
        merges = []
        while BYTES + 256 + len(merges) < vocabulary and pairs:
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            if pairs[best] < 2:
                break
            merges.append(best)
            for i in places.pop(best):  # recount only the words that change
                word, count = words[i]
                for pair in itertools.pairwise(word):
                    pairs[pair] -= count
                words[i][0] = word = _merge(word, best, BYTES + 255 + len(merges))
                for pair in itertools.pairwise(word):
                    pairs[pair] += count
                    places[pair].add(i)
            del pairs[best]
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without start and end."""
        tokens = []
        for piece in PIECES.findall(text):
            word = self.known.get(piece)
            if word is None:
                word = [BYTES + b for b in _utf8(piece)]
                while len(word) > 1:
                    best = min(itertools.pairwise(word), key=lambda pair: self.ranks.get(pair, math.inf))
                    if best not in self.ranks:
                        break
                    word = _merge(word, best, BYTES + 256 + self.ranks[best])
                if len(self.known) < 100_000:  # texts without end must not fill the memory
                    self.known[piece] = word
            tokens += word
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; special tokens have none, and a character cut in half becomes U+FFFD."""
        return b"".join(self.spelling[token] for token in tokens).decode("utf-8", errors="replace")

    def __len__(self):
        return len(self.spelling)


def plain(text):
    """Lower case, one space before each word: so a word is the same token wherever it stands."""
    return "".join(f" {word}" for word in text.lower().split())


def _utf8(text):
    return text.encode("utf-8", errors="replace")  # half a surrogate pair, which UTF-8 has no bytes for, becomes "?"


def _merge(word, pair, token):
    merged = []
    for last in word:
        if merged and (merged[-1], last) == pair:
            merged[-1] = token
        else:
            merged.append(last)
    return merged


# The small CLIP

class CLIP(nn.Module):
    """A small convolutional image encoder and a small text transformer into one space of unit vectors."""

    def __init__(self, cfg: Config, merges: list[tuple[int, int]]):
        super().__init__()
        self.cfg, self.tokenizer = cfg, Tokenizer(merges)
        self.image_size, self.context = cfg.image_size, cfg.context
        self.embed_width, self.encoding_width = cfg.embed_width, cfg.text_width
        self.token_embedding = nn.Embedding(len(self.tokenizer), cfg.text_width)
        self.transformer = layers.Transformer(cfg.text_width, cfg.text_depth, max(1, cfg.text_width // 32), ff_mult=2)
        self.text_projection = nn.Linear(cfg.text_width, cfg.embed_width, bias=False)
        convolutions, inputs = [], 3
        for outputs, kernel in zip(cfg.channels, (5, *[3] * len(cfg.channels))):
            conv = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
            nn.init.kaiming_normal_(conv.weight)  # for ReLU (He et al. 2015); torch's own is too small by sqrt(6)
            convolutions += [conv, nn.ReLU()]
            inputs = outputs
        features = inputs * (cfg.image_size // 2 ** len(cfg.channels)) ** 2
        # Flattened, not averaged: an average would forget where in the picture a thing is, which captions do name.
        self.image_encoder = nn.Sequential(*convolutions, nn.Flatten(), nn.LayerNorm(features),
                                           nn.Linear(features, cfg.embed_width, bias=False))
        self.image_encoder.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # of the logits, learned (Radford 2021 §2.3)

    def fingerprint(self) -> str:
        """A digest of weights and tokenizer, by which a CLIP is known wherever it lies."""
        digest = hashlib.sha256(repr(self.tokenizer.merges).encode())
        for name, value in self.state_dict().items():
            digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        """int64 (B, L), padded with PAD: START, at most L - 2 tokens, END. Case and runs of spaces do not matter."""
        tokens = torch.full((len(texts), self.context), PAD)
        for i, text in enumerate(texts):
            row = [START, *self.tokenizer.encode(plain(text))[:self.context - 2], END]
            tokens[i, :len(row)] = torch.tensor(row)
        return tokens

    def embed_text(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens (B, L) -> embedding (B, D) of unit norm, encodings (B, L, W), zero at padding, mask (B, L)."""
        mask = tokens != PAD
        x = self.transformer(self.token_embedding(tokens))  # (B, L, W); causal, so padding behind END changes nothing
        end = (tokens == END).int().argmax(1)
        embedding = self.text_projection(x[torch.arange(len(x), device=x.device), end])
        return F.normalize(embedding.float(), dim=-1), x * mask[..., None], mask

    def embed_image(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (B, H, W, 3), or float (B, 3, H, W) in [0, 1] -> (B, D) of unit norm."""
        pixels = resized(as_float(images), self.image_size) * 2 - 1
        return F.normalize(self.image_encoder(pixels.contiguous(memory_format=torch.channels_last)).float(), dim=-1)


def as_float(images: torch.Tensor) -> torch.Tensor:
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [0, 1]; floats of that shape are returned as they are."""
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2).float() / 255
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images of shape {tuple(images.shape)}: expected uint8 (B, H, W, 3) or float (B, 3, H, W)")
    return images


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """The central square of float images (B, 3, H, W), brought to (B, 3, size, size)."""
    if images.shape[2:] == (size, size):
        return images
    side = min(images.shape[2:])
    top, left = (images.shape[2] - side) // 2, (images.shape[3] - side) // 2
    square = images[:, :, top:top + side, left:left + side]
    return resize(square, size).clamp(0, 1)


def contrastive_loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Symmetric InfoNCE of unit vectors (B, D), pair by pair (Radford et al. 2021, Figure 3)."""
    logits = scale * image.float() @ text.float().T  # (B images, B texts)
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


# open_clip

class OpenCLIP(nn.Module):
    """A pretrained model of the package open_clip with the calls and attributes of `CLIP`."""

    def __init__(self, spec: str, device: torch.device | str):
        super().__init__()
        self.spec = spec
        open_clip = need("open_clip", spec, "open_clip_torch")
        name, _, weights = spec.removeprefix("open_clip:").partition("/")
        if name not in open_clip.list_models():
            raise UserError(f"{spec}: open_clip has no model {name!r}; expected open_clip:MODEL/WEIGHTS, such as "
                            "open_clip:ViT-L-14/openai")
        tags = open_clip.list_pretrained_tags_by_model(name)
        if weights not in tags and not Path(weights).is_file():
            raise UserError(f"{spec}: {name} has no weights {weights!r}; expected a file or one of {', '.join(tags)}")
        self.model = open_clip.create_model(name, pretrained=weights, device=device)
        text = getattr(self.model, "text", self.model)  # CustomTextCLIP has a text tower, CLIP is one itself
        if not hasattr(text, "ln_final") or getattr(text, "cls_emb", None) is not None:
            raise UserError(f"{spec}: its text encoder (of Hugging Face, or CoCa's) gives no encodings of the tokens; "
                            "take a model whose text encoder is open_clip's plain one, such as ViT-L-14/openai")
        self.tokenizer, self.norm = open_clip.get_tokenizer(name), text.ln_final
        inner = getattr(self.tokenizer, "tokenizer", None)  # of one from Hugging Face
        self.end = inner.eos_token_id if inner else self.tokenizer.eot_token_id
        size = self.model.visual.image_size
        self.image_size, self.context = size if isinstance(size, int) else size[0], self.model.context_length
        for key in ("mean", "std"):
            values = torch.tensor(getattr(self.model.visual, f"image_{key}"), device=device)
            self.register_buffer(key, values.view(1, 3, 1, 1))
        with torch.no_grad():
            embedding, encodings, _ = self.embed_text(self.tokenize([""]).to(device))
        self.embed_width, self.encoding_width = embedding.shape[-1], encodings.shape[-1]

    def fingerprint(self) -> str:
        return self.spec

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        return self.tokenizer(list(texts), context_length=self.context)

    def embed_text(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = []
        hook = self.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
        try:
            embedding = self.model.encode_text(tokens, normalize=True)
        finally:
            hook.remove()
        is_end = tokens == self.end
        end = torch.where(is_end.any(1), is_end.int().argmax(1), tokens.shape[1] - 1)
        mask = torch.arange(tokens.shape[1], device=tokens.device) <= end[:, None]  # all L where there is no end
        return embedding.float(), seen[0] * mask[..., None], mask

    def embed_image(self, images: torch.Tensor) -> torch.Tensor:
        pixels = (resized(as_float(images), self.image_size) - self.mean) / self.std
        return self.model.encode_image(pixels, normalize=True).float()


def load(spec: str | Path, device: torch.device | str) -> CLIP | OpenCLIP:
    """The frozen CLIP that `spec` names: a run folder, a model.pt, or open_clip:MODEL/WEIGHTS."""
    if str(spec).startswith("open_clip:"):
        return OpenCLIP(str(spec), device).eval().requires_grad_(False)
    path = Path(spec) / "model.pt" if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        raise UserError(f"{path}: there is no CLIP here; train one (python -m common.clip train --data PATH --run "
                        f"{spec}), or name a run folder, a model.pt or open_clip:MODEL/WEIGHTS")
    state = checkpoint.load(path)
    if "merges" not in state:
        raise UserError(f"{path}: not a CLIP, but another model; expected what python -m common.clip train writes")
    try:
        model = CLIP(Config(**config.from_dict(Config, state["config"], str(path))), state["merges"])
        model.load_state_dict(state["model"])
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path}: a CLIP of another version of this program; train it again ({error})") from error
    return model.to(device).eval().requires_grad_(False)


# Training and embedding

def train(images: np.ndarray, captions: list[str], cfg: Config, device: torch.device | str) -> CLIP:
    """A CLIP trained on uint8 images (N, H, W, 3) with a caption each; with lora_rank, one with adapters on it.

    Repeats bit for bit on the same device and number of threads: the order is a function of (seed, step), and
    nothing else in a step is random. No flips and no crops, as captions may name places.
    """
    if len(images) < cfg.batch_size:
        raise UserError(f"{cfg.data}: {len(images)} training images, fewer than a batch of {cfg.batch_size}; give more "
                        "images or a lower --batch_size")
    accumulate.seed(cfg.seed, "clip")
    if cfg.lora_rank:
        model = load(cfg.init_from, device).train()
        lora.inject(model, cfg.lora_rank, cfg.lora_alpha)
    else:
        merges = Tokenizer.learn([plain(caption) for caption in captions], cfg.vocabulary).merges
        model = CLIP(cfg, merges).to(device).train()
    images, tokens = torch.from_numpy(images).to(device), model.tokenize(captions)
    tokens = tokens[:, :int((tokens != PAD).sum(1).max())].to(device)  # no position that is padding in every row
    optimizers = optim.make(model, "adamw", cfg.lr, cfg.weight_decay, betas=(0.9, 0.98), eps=1e-6)
    scaler = amp.scaler(torch.device(device), cfg.precision)
    bar = tracker.progress(range(cfg.steps), desc="small CLIP", unit="step")
    for step in bar:
        positions = np.arange(step * cfg.batch_size, (step + 1) * cfg.batch_size)
        rows = torch.from_numpy(data.shuffled(positions, len(images), cfg.seed)).to(device)
        schedule.set_learning_rate(optimizers, schedule.learning_rate(step, cfg.lr, cfg.warmup_steps, cfg.steps, True))
        with amp.autocast(torch.device(device), cfg.precision):
            image, (text, _, _) = model.embed_image(images[rows]), model.embed_text(tokens[rows])
        loss = contrastive_loss(image, text, model.log_scale.clamp(max=math.log(100)).exp())
        scaler.scale(loss).backward()
        amp.step(scaler, optimizers, 0.0)
        model.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == cfg.steps - 1:
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return model.eval().requires_grad_(False)


def embed(model: CLIP | OpenCLIP, images: np.ndarray, captions: list[str], batch_size: int = 256,
          encodings: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Image embeddings (N, D), text embeddings (N, D) and maybe text encodings (N, L, W), in float32."""
    device, found = next(model.parameters()).device, []
    with torch.no_grad():
        for start in range(0, len(captions), batch_size):
            part = slice(start, start + batch_size)
            text, encoded, _ = model.embed_text(model.tokenize(captions[part]).to(device))
            image = model.embed_image(torch.from_numpy(images[part]).to(device))
            found.append([t.float().cpu().numpy() for t in (image, text, encoded)[:3 if encodings else 2]])
    image, text, *rest = (np.concatenate(parts) for parts in zip(*found))
    return image, text, rest[0] if rest else None


class Images:
    """The captioned images of `path`, or the built-in ones, all brought to one size."""

    def __init__(self, path: str, image_size: int):
        self.image_size, self.source = image_size, None if path == "shapes" else images.CaptionedImages(path)

    def __len__(self):
        return BUILTIN_ROWS if self.source is None else len(self.source)

    def read(self, rows: range, progress: bool = False) -> tuple[np.ndarray, list[dict]]:
        """uint8 (N, S, S, 3) and a record for each, with its "caption"."""
        if self.source is None:
            return synthetic.shapes(rows, size=self.image_size)
        images, records = np.empty((len(rows), self.image_size, self.image_size, 3), np.uint8), []
        for i, row in enumerate(tracker.progress(rows, desc="reading", unit="image", disable=not progress)):
            image, caption, key = self.source[row]
            pixels = resized(as_float(torch.tensor(image)[None]), self.image_size)[0].permute(1, 2, 0)
            images[i] = (pixels * 255).round().numpy()
            records.append({"caption": caption, "key": key})
        return images, records


def held_out(records: list[dict], holdout: float) -> np.ndarray:
    """Which samples are kept out of training, bool (N,): by the key's hash, or by the row where there are no keys."""
    if records and "key" in records[0]:
        return np.array([data.part_of(record["key"], holdout, 0.0) == "validation" for record in records])
    split = data.Split(len(records), "train", holdout, 0.0)
    return ~np.isin(np.arange(len(records)), split[np.arange(len(split))])


def retrieval(image: np.ndarray, text: np.ndarray, captions: list[str]) -> dict[str, float]:
    """Share of texts whose nearest image has that very caption, and the other way round, with what chance gives."""
    similarity = torch.from_numpy(text) @ torch.from_numpy(image).T  # (texts, images)
    which = torch.from_numpy(np.unique(captions, return_inverse=True)[1])
    return {"text_to_image": (which[similarity.argmax(1)] == which).float().mean().item(),
            "image_to_text": (which[similarity.argmax(0)] == which).float().mean().item(),
            "chance": float(((torch.bincount(which) / len(which)) ** 2).sum())}


def matches(image: np.ndarray, text: np.ndarray, records: list[dict]) -> dict[str, float]:
    """For built-in data. same_X: share of images whose nearest other image has the same X (is a star, too).

    caption_match: share of captions whose nearest image has everything that the caption names.
    """
    image, text = torch.from_numpy(image), torch.from_numpy(text)
    names = list(synthetic.ATTRIBUTES)
    values = torch.tensor([[synthetic.ATTRIBUTES[k].index(v) for k, v in r["attributes"].items()] for r in records])
    named = torch.tensor([[name in r["named"] for name in names] for r in records])  # (N, attributes)
    same = (values[(image @ image.T).fill_diagonal_(-2.0).argmax(1)] == values).float().mean(0)
    fits = (values[(text @ image.T).argmax(1)] == values) | ~named
    return {**{f"same_{name}": share for name, share in zip(names, same.tolist())},
            "caption_match": fits.all(1).float().mean().item()}


def train_run(cfg: Config, device: torch.device) -> CLIP:
    """Read the images, train, say how well held-out ones are told apart, and write RUN/model.pt and config.json."""
    (Path(cfg.run) / "made.json").unlink(missing_ok=True)  # it may have vouched for another CLIP
    if cfg.lora_rank:
        base = getattr(load(cfg.init_from, "cpu"), "cfg", None)
        if base is None or Path(cfg.init_from).is_dir():
            raise UserError(f"--init_from {cfg.init_from}: expected the model.pt of a CLIP trained here")
        if Path(cfg.init_from).resolve().parent == Path(cfg.run).resolve():
            raise UserError(f"--run {cfg.run}: has the CLIP to adapt, {cfg.init_from}; give another folder")
        cfg = dataclasses.replace(cfg, **{name: getattr(base, name) for name in SIZES})
    source = Images(cfg.data, cfg.image_size)
    images, records = source.read(range(len(source)), progress=True)
    captions, out = [record["caption"] for record in records], held_out(records, cfg.holdout)
    model = train(images[~out], [captions[i] for i in np.flatnonzero(~out)], cfg, device)
    facts = {"config": dataclasses.asdict(cfg), "merges": model.tokenizer.merges}
    if cfg.lora_rank:
        about = lora.facts(cfg.lora_rank, cfg.lora_alpha, "attention", cfg.init_from)
        checkpoint.save({"model": lora.extract(model), **facts, "lora": about}, Path(cfg.run) / "lora.pt")
        lora.merge(model)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    checkpoint.save({"model": weights, **facts}, Path(cfg.run) / "model.pt")
    checkpoint.write_json({**dataclasses.asdict(cfg), "versions": checkpoint.versions(__file__)},
                          Path(cfg.run) / "config.json")
    rows = np.flatnonzero(out)[:5000]
    if len(rows) > 1:
        image, text, _ = embed(model, images[rows], [captions[i] for i in rows])
        figures = retrieval(image, text, [captions[i] for i in rows])
        if cfg.data == "shapes":
            figures |= matches(image, text, [records[i] for i in rows])
        print(f"{len(rows)} held-out pairs: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return model


def builtin_data(folder: str | Path, device: torch.device) -> str:
    """Make what is missing of FOLDER/clip, the small CLIP, and FOLDER/shapes, the embeddings; returns the latter.

    What was made of other images or by other settings is made anew. The CLIP does not see the rows that
    data.Split(…, 0.1, 0.1) holds out. It may use all cores, as other ranks wait; so do other runs that need the same.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / ".builtin.lock", "a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        return _builtin_data(folder, device)


def _builtin_data(folder, device):
    run, out, cfg = Path(folder) / "clip", Path(folder) / "shapes", Config(run=str(Path(folder) / "clip"))
    images, records = synthetic.shapes(range(64))
    used = {name: value for name, value in dataclasses.asdict(cfg).items() if not re.match("lora_|init_from", name)}
    settings = [records, BUILTIN_ROWS, {**used, "run": ""}]
    digest = hashlib.sha256(images.tobytes() + json.dumps(settings).encode())
    note, threads = {"made_from": digest.hexdigest()}, torch.get_num_threads()
    torch.set_num_threads(max(threads, min(8, dist.cores())))  # beyond eight, layers as small as these gain nothing
    try:
        for made, make in ((run / "model.pt", lambda: train_run(cfg, device)),
                           (out / "clip.json", lambda: embed_run(EmbedConfig(run=str(run), out=str(out)), device))):
            path = made.parent / "made.json"
            if not (made.is_file() and path.is_file() and config.read_json(path) == note):
                (out / "made.json").unlink(missing_ok=True)  # the embeddings of a CLIP go with it
                make()
                checkpoint.write_json(note, path)
    finally:
        torch.set_num_threads(threads)
    return str(out)


def embed_run(cfg: EmbedConfig, device: torch.device) -> None:
    """Write the embedding shards of all images of `data`, and which CLIP they are of."""
    (Path(cfg.out) / "made.json").unlink(missing_ok=True)
    model = load(cfg.run, device)
    source, found, records = Images(cfg.data, model.image_size), [], []
    for start in tracker.progress(range(0, len(source), cfg.batch_size), desc="embedding", unit="batch"):
        images, part = source.read(range(start, min(start + cfg.batch_size, len(source))))
        arrays = embed(model, images, [record["caption"] for record in part], cfg.batch_size, cfg.encodings)
        found.append([a.astype(np.float16) for a in arrays if a is not None])  # images stream by, embeddings are kept
        records += part
    image, text, *rest = (np.concatenate(parts) for parts in zip(*found))
    data.write_shards(cfg.out, image, text, records, *rest)
    spec = cfg.run if cfg.run.startswith("open_clip:") else str(Path(cfg.run).resolve())
    checkpoint.write_json({"clip": spec}, Path(cfg.out) / "clip.json")


COMMANDS = {"train": (lambda cfg: train_run(cfg, dist.setup(cfg.device)), Config),
            "embed": (lambda cfg: embed_run(cfg, dist.setup(cfg.device)), EmbedConfig)}


def main():
    config.dispatch(COMMANDS, __doc__)


if __name__ == "__main__":
    config.run(main)
