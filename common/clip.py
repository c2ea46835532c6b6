"""Text–image encoders: a small CLIP (Radford et al. 2021), trained in a minute, and open_clip's by the same calls.

    python -m common.clip train --data PATH|shapes --run_dir runs/clip   # on captioned images -> model.pt
    python -m common.clip embed --data PATH --run_dir runs/clip --out emb   # embedding shards, and emb/clip.json
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: a thread that waits soon leaves its core to others

import collections
import dataclasses
import hashlib
import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import accumulate, checkpoint, config, data, dist, optim, schedule, synthetic, tracker
from common import nn as layers
from common.config import UserError, need
from common.images import BUILTIN_ROWS, CaptionedImages, Unusable
from common.media import as_bytes, resize

PAD, START, END, BYTES = 0, 1, 2, 3  # token BYTES + b is the byte b; the words of the vocabulary follow
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or a sign


@dataclasses.dataclass(frozen=True)
class Config(config.Settings):
    run_dir: str = "runs/clip"  # folder for model.pt
    data: str = "shapes"  # captioned images: folder of tars or of images; "shapes": the built-in ones
    image_size: config.Count = 32  # width and height in pixels that images are brought to
    context: Annotated[int, ("3 or more", lambda tokens: tokens > 2)] = 24  # longest text in tokens; others are cut
    vocabulary: config.Natural = 4096  # most words with a token of their own; others are spelled by their bytes
    embed_width: config.Count = 64  # of the embeddings
    text_width: Annotated[int, ("a multiple of 32", lambda width: width > 0 and width % 32 == 0)] = 64  # of encodings
    steps: config.Count = 700  # optimizer steps
    batch_size: Annotated[int, ("2 or more", lambda pairs: pairs > 1)] = 256  # pairs; each contrasts with all others
    lr: config.Positive = 3e-3  # highest learning rate
    seed: int = 0  # of weights and order
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto takes the first that is there


@dataclasses.dataclass(frozen=True)
class EmbedConfig(config.Settings):
    data: str = "shapes"  # captioned images: folder of tars or of images; "shapes": the built-in ones
    run_dir: str = "runs/clip"  # the CLIP: folder, model.pt, or open_clip:MODEL/WEIGHTS
    out: str = "emb"  # folder for img_emb/, text_emb/, captions/ and clip.json, and of tars for img_emb_N.npy
    index_width: config.Count = 4  # of tars: digits at the end of a key that number its row in img_emb_N.npy
    raw: bool = False  # embeddings as the CLIP gives them, for --raw_embeddings; off: of unit length
    encodings: bool = False  # also write the text encodings of every token, to text_enc/
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto takes the first that is there


class Tokenizer:
    """A token for each word or sign of `vocabulary`; any other is spelled by its UTF-8 bytes, after a space."""

    def __init__(self, vocabulary):
        self.vocabulary = list(vocabulary)
        self.numbers = {word: BYTES + 256 + i for i, word in enumerate(self.vocabulary)}

    @classmethod
    def learn(cls, texts, size):
        """With a vocabulary of the `size` most frequent words and signs of `texts`, ties by their spelling."""
        counts = collections.Counter(word for text in texts for word in WORD.findall(text.lower()))
        return cls(sorted(counts, key=lambda word: (-counts[word], word))[:size])

    def encode(self, text):
        """Tokens of `text`, without START and END. Case and spaces do not matter."""
        tokens = []
        for word in WORD.findall(text.lower()):
            spelled = f" {word}".encode(errors="replace")  # half a surrogate pair, which has no bytes, becomes "?"
            tokens += [self.numbers[word]] if word in self.numbers else [BYTES + byte for byte in spelled]
        return tokens

    def __len__(self):
        return BYTES + 256 + len(self.vocabulary)


class Encoder(nn.Module):
    """What any CLIP here can do by its `tokenize` and `embed_text`."""

    @torch.no_grad()
    def text_condition(self, texts, length):
        """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)} of texts, L = `length`.

        Longer texts are cut, shorter ones padded. In fp32, also within a model that is not.
        """
        device = next(self.parameters()).device
        with torch.autocast(device.type, enabled=False):
            embedding, encodings, mask = self.embed_text(self.tokenize(texts).to(device))
        missing = length - encodings.shape[1]  # below 0 to cut
        return {
            "text_embed": embedding,
            "text_enc": F.pad(encodings.float(), (0, 0, 0, missing)),
            "text_mask": F.pad(mask, (0, missing)),
        }


class CLIP(Encoder):
    """A small convolutional image encoder and a small text transformer into one space.

    Embeddings are compared by cosine.
    """

    def __init__(self, cfg, vocabulary):
        super().__init__()
        self.tokenizer, self.image_size, self.context = Tokenizer(vocabulary), cfg.image_size, cfg.context
        self.embed_width, self.encoding_width = cfg.embed_width, cfg.text_width
        self.token_embedding = nn.Embedding(len(self.tokenizer), cfg.text_width)
        self.transformer = layers.Transformer(cfg.text_width, 1, cfg.text_width // 32)
        self.text_projection = nn.Linear(cfg.text_width, cfg.embed_width, bias=False)
        # Flattened, not averaged: an average would forget where in the picture a thing is, which captions do name.
        features = 96 * math.ceil(cfg.image_size / 8) ** 2
        self.image_encoder = nn.Sequential(
            nn.Conv2d(3, 24, 5, 2, 2), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 96, 3, 2, 1),
            nn.ReLU(), nn.Flatten(), nn.LayerNorm(features), nn.Linear(features, cfg.embed_width, bias=False))
        for convolution in self.image_encoder[:6:2]:  # for ReLU (He et al. 2015); torch's is too small by √6
            nn.init.kaiming_normal_(convolution.weight)
        self.image_encoder.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # of the logits, learned (Radford 2021 §2.3)

    def fingerprint(self):
        """A digest of weights and vocabulary, by which a CLIP is known wherever it lies."""
        weights = b"".join(value.cpu().numpy().tobytes() for value in self.state_dict().values())
        return hashlib.sha256(weights + repr(self.tokenizer.vocabulary).encode()).hexdigest()[:16]

    def tokenize(self, texts):
        """int64 (B, L), padded with PAD: START, at most L - 2 tokens, END."""
        rows = [[START, *self.tokenizer.encode(text)[:self.context - 2], END] for text in texts]
        return torch.tensor([row + [PAD] * (self.context - len(row)) for row in rows])

    def embed_text(self, tokens):
        """tokens (B, L) -> embedding (B, D), encodings (B, L, W), zero at padding, mask (B, L)."""
        mask, end = tokens != PAD, (tokens == END).int().argmax(1)
        x = self.transformer(self.token_embedding(tokens))  # (B, L, W); causal, so padding behind END changes nothing
        embedding = self.text_projection(x[torch.arange(len(x), device=x.device), end])
        return embedding.float(), x * mask[..., None], mask

    def embed_image(self, images):
        """uint8 (B, H, W, 3), or float (B, 3, H, W) in [0, 1] -> (B, D)."""
        pixels = squares(images, self.image_size) * 2 - 1
        return self.image_encoder(pixels.contiguous(memory_format=torch.channels_last)).float()


def squares(images, size):
    """The central squares of uint8 (B, H, W, 3) or float (B, 3, H, W) in [0, 1], as float (B, 3, size, size)."""
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2).float() / 255
    side = min(images.shape[2:])
    top, left = (images.shape[2] - side) // 2, (images.shape[3] - side) // 2
    return resize(images[:, :, top:top + side, left:left + side], size).clamp(0, 1)


class OpenCLIP(Encoder):
    """A pretrained model of the package open_clip with the calls and attributes of `CLIP`."""

    def __init__(self, spec):
        super().__init__()
        open_clip = need("open_clip", spec, "open_clip_torch")
        self.spec = spec
        name, _, weights = spec.removeprefix("open_clip:").partition("/")
        try:
            # Where weights need QuickGELU, as OpenAI's do, open_clip builds GELU and only warns.
            known = open_clip.get_pretrained_cfg(name, weights) or {}
            self.model = open_clip.create_model(name, pretrained=weights, require_pretrained=True,
                                                force_quick_gelu=known.get("quick_gelu", False))
        except Exception as error:  # a failed download has many types, a file of other weights has more
            raise UserError(f"{spec}: {str(error).partition(chr(10))[0]}; expected open_clip:MODEL/WEIGHTS, such as "
                            "open_clip:ViT-L-14/openai, or a file in place of WEIGHTS") from error
        text = getattr(self.model, "text", self.model)  # CustomTextCLIP has a text tower, CLIP is one itself
        self.tokenizer, self.norm = open_clip.get_tokenizer(name), getattr(text, "ln_final", None)
        plain = isinstance(self.tokenizer, open_clip.SimpleTokenizer) and getattr(text, "cls_emb", None) is None
        if self.norm is None or not plain:
            raise UserError(f"{spec}: its text encoder is not that of the original CLIP; take a model such as "
                            "ViT-L-14/openai")
        visual, self.context = self.model.visual, self.model.context_length
        self.image_size = int(np.max(visual.image_size))  # a number, or height and width
        self.register_buffer("mean", torch.tensor(visual.image_mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(visual.image_std).view(3, 1, 1))
        self.embed_width, self.encoding_width = (t.shape[-1] for t in self.embed_text(self.tokenize([""]))[:2])

    def fingerprint(self):
        return self.spec

    def tokenize(self, texts):
        return self.tokenizer(list(texts), context_length=self.context)

    def embed_text(self, tokens):
        normed = []  # what the last norm gives, which open_clip does not return
        hook = self.norm.register_forward_hook(lambda module, inputs, output: normed.append(output))
        embedding = self.model.encode_text(tokens)
        hook.remove()
        mask = torch.arange(tokens.shape[1], device=tokens.device) <= tokens.argmax(1)[:, None]  # END is the largest
        return embedding.float(), normed[0] * mask[..., None], mask

    def embed_image(self, images):
        pixels = (squares(images, self.image_size) - self.mean) / self.std
        return self.model.encode_image(pixels).float()


def load(spec, device, fingerprint=None):
    """The frozen CLIP that `spec` names: a run folder, model.pt or open_clip:MODEL/WEIGHTS, with the `fingerprint`."""
    if not spec:
        raise UserError("which CLIP made the embeddings is not known; name it with --clip")
    if str(spec).startswith("open_clip:"):
        model = OpenCLIP(str(spec))
    else:
        path = Path(spec) / "model.pt" if Path(spec).is_dir() else Path(spec)
        state = checkpoint.load(path) if path.is_file() else {}
        if "vocabulary" not in state:
            raise UserError(f"{path}: there is no CLIP here; train one by python -m common.clip train, or name another")
        with checkpoint.reading(path):
            cfg = Config(**config.from_dict(Config, state["config"], path))
            model = checkpoint.build(lambda: CLIP(cfg, state["vocabulary"]), state, path)
    found = model.fingerprint()
    if fingerprint and found != fingerprint and "open_clip:" not in found + fingerprint:
        raise UserError(f"{spec}: not the CLIP that made the embeddings, or trained anew since: fingerprint {found}, "
                        f"expected {fingerprint}; embed the data again, or name the right one with --clip")
    return model.to(device).eval().requires_grad_(False)


def check_widths(model, where, embed_width, encoding_width=0):
    """UserError, which says `where`, unless the CLIP has these widths of embeddings and text encodings; 0 is any."""
    for name, found, needed in (("embeddings", model.embed_width, embed_width),
                                ("text encodings", model.encoding_width, encoding_width)):
        if needed and found != needed:
            raise UserError(f"{where}: the CLIP's {name} are {found} wide, but {needed} are needed")


def read(path, image_size, training=None):
    """Yield the captioned images of `path`, or the built-in ones: uint8 (B, S, S, 3), and a record for each.

    training: only those to train on, or, if False, only those held out, to which the scripts' built-in ones belong.
    """
    faults = []
    if path == "shapes":
        rows = range(BUILTIN_ROWS, 2 * BUILTIN_ROWS) if training else range(BUILTIN_ROWS)
    else:
        source = CaptionedImages(path)
        rows = [row for row in range(len(source)) if training is None or
                training == (data.part_of(source.key(row), 0.1, 0.1) == "train")]  # as the scripts split by default
        if training is not False and source.left_out:
            print(source.left_out)
    for start in tracker.progress(range(0, len(rows), 256), desc="reading", unit="batch"):
        batch, images, records = rows[start:start + 256], [], []
        if path == "shapes":
            yield synthetic.shapes(batch, size=image_size)
            continue
        for row in batch:
            try:
                image, caption, key = source[row]
                images.append(squares(torch.tensor(image)[None], image_size))
                records.append({"caption": caption, "key": key})
            except Unusable as error:
                faults.append(str(error))
        if records:
            yield as_bytes(torch.cat(images) * 2 - 1).numpy(), records
    if faults:
        print(f"{len(faults)} of {len(rows)} images cannot be used and are left out: {', '.join(faults[:5])}")


def train(cfg, device):
    """Train a CLIP, write it to RUN/model.pt, and print how well its embeddings retrieve held-out images.

    Repeats bit for bit on the same device and number of threads. No flips and no crops, as captions may name places.
    """
    batches = [*read(cfg.data, cfg.image_size, training=True)]
    captions = [record["caption"] for _, records in batches for record in records]
    if len(captions) < cfg.batch_size:
        raise UserError(f"{cfg.data}: {len(captions)} training images, fewer than a batch of {cfg.batch_size}; give "
                        "more images or a lower --batch_size")
    accumulate.seed(cfg.seed, "clip")
    model = CLIP(cfg, Tokenizer.learn(captions, cfg.vocabulary).vocabulary).to(device).train()
    [optimizer] = optim.make(model, "adamw", cfg.lr, 0.1, (0.9, 0.98), 1e-6)  # betas, eps: Radford 2021, Table 18
    pixels, tokens = torch.from_numpy(np.concatenate([p for p, _ in batches])).to(device), model.tokenize(captions)
    tokens = tokens[:, (tokens != PAD).any(0)].to(device)  # (N, L) without what is padding in every row
    labels = torch.arange(cfg.batch_size, device=device)  # caption i is that of image i
    for step in tracker.progress(range(cfg.steps), desc="small CLIP", unit="step"):
        lr = schedule.learning_rate(step, cfg.lr, cfg.steps // 10, cfg.steps, cosine=True)
        schedule.set_learning_rate([optimizer], lr)
        rows = data.shuffled(step * cfg.batch_size + np.arange(cfg.batch_size), len(captions), cfg.seed)
        image = F.normalize(model.embed_image(pixels[rows]), dim=-1)
        text = F.normalize(model.embed_text(tokens[rows])[0], dim=-1)
        logits = model.log_scale.clamp(max=math.log(100)).exp() * image @ text.T  # (B images, B texts)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2  # Radford 2021, Figure 3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().requires_grad_(False)
    checkpoint.save({"model": model.state_dict(), "vocabulary": model.tokenizer.vocabulary,
                     "config": config.as_json(cfg)}, Path(cfg.run_dir) / "model.pt")
    if held_out := [*itertools.islice(read(cfg.data, cfg.image_size, training=False), 20)]:
        (image, text), records = embed(model, held_out)
        captions, nearest = np.array([record["caption"] for record in records]), (text @ image.T).argmax(1)
        print(f"{len(records)} held-out captions: text_to_image {(captions[nearest] == captions).mean():.3f}")
    return model


@torch.no_grad()
def embed(model, batches, encodings=False, raw=False):
    """Embed what `read` gives: [images (N, D), texts (N, D), maybe encodings (N, L, W)], and records.

    Embeddings are of unit length, unless `raw`. There are N records.
    """
    device = next(model.parameters()).device
    found = []
    records = []
    for pixels, batch in batches:
        image = model.embed_image(torch.from_numpy(pixels).to(device))
        tokens = model.tokenize([record["caption"] for record in batch]).to(device)
        text, text_encodings, _ = model.embed_text(tokens)
        if not raw:
            image = F.normalize(image, dim=-1)
            text = F.normalize(text, dim=-1)
        arrays = [image, text]
        if encodings:
            arrays.append(text_encodings)
        found.append([array.float().cpu().numpy() for array in arrays])
        records += batch
    return [np.concatenate(arrays) for arrays in zip(*found)], records


def embed_all(cfg, device):
    """Write the embeddings of all images of `data`: shards, of tars also img_emb_N.npy, and clip.json."""
    model, out = load(cfg.run_dir, device), Path(cfg.out)
    (out / "clip.json").unlink(missing_ok=True)  # it may name another CLIP
    arrays, records = embed(model, read(cfg.data, model.image_size), cfg.encodings, cfg.raw)
    if not records:
        raise UserError(f"{cfg.data}: none of its images can be used")
    for path in out.glob("img_emb_*.npy"):  # of other data
        path.unlink()
    data.write_shards(out, *arrays[:2], records, *arrays[2:])
    keys = [record.get("key", "").rpartition("/")[2] for record in records]
    if any(Path(cfg.data).glob("*.tar")) and all(map(str.isdecimal, keys)):
        # As train_decoder.py takes them: a key's last digits number its row, those before them its tar.
        tars, rows = np.divmod([*map(int, keys)], 10 ** cfg.index_width)
        for tar in np.unique(tars):
            table = np.zeros((rows[tars == tar].max() + 1, model.embed_width), np.float16)  # zero without a key
            table[rows[tars == tar]] = arrays[0][tars == tar]
            with checkpoint.replacing(out / f"img_emb_{tar:05d}.npy") as file:
                np.save(file, table)
    spec = cfg.run_dir if cfg.run_dir.startswith("open_clip:") else str(Path(cfg.run_dir).resolve())
    note = {"clip": spec, "fingerprint": model.fingerprint(), "place": str(out.absolute())}
    checkpoint.write_json(note, out / "clip.json")


def builtin_data(folder, device):
    """Make FOLDER/clip, the small CLIP, and FOLDER/shapes, its embeddings, unless they are there; returns that."""
    run, out, drawn = Path(folder).resolve() / "clip", Path(folder) / "shapes", synthetic.shapes(range(64))
    cfg, path = Config(run_dir=str(run)), out / "clip.json"
    facts = drawn[0].tobytes(), drawn[1], BUILTIN_ROWS, dataclasses.replace(cfg, run_dir="")  # wherever it is
    made_from = hashlib.sha256(repr(facts).encode()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        checkpoint.lock(lock, wait=True)  # other runs may want the same
        try:
            note = config.read_json(path)
            load(run, "cpu", str(note.get("fingerprint")))
            data.Embeddings(out, captions=True).captions.records([0])
        except (UserError, OSError):  # missing or damaged
            note = {}
        if note.get("made_from") != made_from:
            threads = torch.get_num_threads()
            torch.set_num_threads(min(8, threads * dist.world_size()))  # the other ranks wait; layers are small
            train(cfg, device)
            embed_all(EmbedConfig(run_dir=str(run), out=str(out)), device)
            torch.set_num_threads(threads)
            checkpoint.write_json({**config.read_json(path), "made_from": made_from}, path)
    return str(out)


def train_command(cfg):
    train(cfg, dist.setup(cfg.device))
    print(f"Next: python -m common.clip embed --data {cfg.data} --run_dir {cfg.run_dir} --out emb")


def embed_command(cfg):
    embed_all(cfg, dist.setup(cfg.device))
    decoder = f"--data {cfg.data} --clip {cfg.run_dir} --run_dir runs/my_decoder"
    if any(Path(cfg.out).glob("img_emb_*.npy")):
        decoder += f" --embeddings {cfg.out} --index_width {cfg.index_width}"
    print(f"Next: python train_prior.py --data {cfg.out} --run_dir runs/my_prior\n"
          f"      python train_decoder.py {decoder}")


def main():
    config.run({"train": (train_command, Config), "embed": (embed_command, EmbedConfig)}, __doc__)


if __name__ == "__main__":
    main()
