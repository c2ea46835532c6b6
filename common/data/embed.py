"""Train the small CLIP on captioned images, and embed captioned images with it or with open_clip.

    python -m common.data.embed train --data PATH|shapes --run_dir runs/clip    # writes model.pt
    python -m common.data.embed embed --data PATH --run_dir runs/clip --out emb    # writes shards
"""

import copy
import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import accumulate, checkpoint, config, dist, optim, order, schedule, tracker
from common.config import Fraction, PositiveFloat, PositiveInt, UserError, field
from common.data import clips, embeddings, files, synthetic
from common.data.images import BUILTIN_ROWS, CaptionedImages
from common.models import clip
from common.models.pixels import from_uint8, to_uint8


@dataclasses.dataclass(frozen=True)
class DataConfig(config.Settings):
    """The data"""

    data: str = field(
        "shapes", 'captioned images: tars, or a folder of images; "shapes": the built-in ones'
    )
    device: config.Device = field("auto", "where to compute")


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """The small CLIP and its training"""

    run_dir: str = field("runs/clip", "folder for model.pt")
    image_size: PositiveInt = field(32, "images are resized to this width and height")
    context: PositiveInt = field(24, "maximum tokens per text, at least 3; longer texts are cut")
    vocabulary: config.NonNegativeInt = field(
        4096, "number of words that get a token; other words are spelled in bytes"
    )
    embed_width: PositiveInt = field(64, "width of the embeddings")
    text_width: PositiveInt = field(64, "width of the text encodings, a multiple of 32")
    crop_scale: Fraction = field(
        1.0, "minimum area of random square crops, as a fraction of the image"
    )
    flip: bool = field(False, "mirror half of the images; leave off if captions say left or right")
    steps: PositiveInt = field(700, "optimizer steps")
    batch_size: PositiveInt = field(256, "pairs per step; each is contrasted with all others")
    lr: PositiveFloat = field(3e-3, "peak learning rate")
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: Muon for matrices, AdamW for the rest"
    )
    seed: int = field(0, "seed of weights and sample order")

    def __post_init__(self):
        super().__post_init__()
        if self.context < 3 or self.text_width % 32:
            raise UserError(
                f"--context {self.context}, --text_width {self.text_width}: expected 3 or more, "
                "and a multiple of 32"
            )


@dataclasses.dataclass(frozen=True)
class EmbedConfig(DataConfig):
    """Embedding"""

    run_dir: str = field("runs/clip", "the CLIP: folder, model.pt, or open_clip:MODEL/WEIGHTS")
    out: str = field("emb", "folder for img_emb/, text_emb/, captions/ and clip.json")
    split: Literal["all", "train"] = field(
        "all",
        "images to embed; train: the default training split of train_decoder.py or, for shapes, "
        "images that the training scripts do not use",
    )
    raw: bool = field(
        False, "do not normalize the embeddings (for --raw_embeddings); off: unit length"
    )
    encodings: bool = field(False, "also write the encodings of all text tokens, to text_enc/")


def captions_of(records):
    return [record["caption"] for record in records]


def read(path, image_size, split="all"):
    """Yield batches of captioned images: uint8 (B, S, S, 3), and B records {"caption": …}.

    path: tars or a folder, see CaptionedImages; or "shapes" for the built-in images. split: "all",
    or one of the training scripts' default splits, "train", "validation" or "test". For "shapes",
    "train" gives images that these scripts do not use.
    """
    if path == "shapes":
        first = BUILTIN_ROWS if split == "train" else 0
        indices = range(first, first + BUILTIN_ROWS)
    else:
        dataset = CaptionedImages(path)
        indices = range(len(dataset))
        if split != "all":
            indices = dataset.split(split, 0.1, 0.1)
            indices = indices[np.arange(len(indices))]
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
                image = torch.tensor(dataset.image(index))[None]
                records.append({"caption": dataset.caption(index), "key": dataset.key(index)})
                images.append(clip.center_crop(image, image_size))
            except files.Unusable as error:
                faults.append(str(error))
        if records:
            yield to_uint8(torch.cat(images) * 2 - 1).numpy(), records
    if faults:
        config.note(
            f"{len(faults)} of {len(indices)} images cannot be used and are left out: "
            f"{', '.join(faults[:5])}"
        )


def augment(images, crop_scale, flip):
    """Random square crops of uint8 images (B, S, S, 3), resized to S.

    The area of a crop is `crop_scale` to 1 times that of its image. flip: mirror each crop with
    probability 0.5.
    """
    images = from_uint8(images)  # (B, 3, S, S)
    side = torch.empty(len(images)).uniform_(crop_scale, 1).sqrt()
    mirrored = torch.rand(len(images)) < 0.5 * flip
    # Affine maps from a crop to its image: x -> scale · x + shift. The edges of both are at ±1.
    window = torch.zeros(len(images), 2, 3)
    window[:, 0, 0] = torch.where(mirrored, -side, side)
    window[:, 1, 1] = side
    window[:, :, 2] = (2 * torch.rand(len(images), 2) - 1) * (1 - side)[:, None]
    grid = F.affine_grid(window.to(images.device), images.shape, align_corners=False)
    return to_uint8(F.grid_sample(images, grid, padding_mode="border", align_corners=False))


def train(cfg, device=None):
    """Train a CLIP, and write it to RUN/model.pt.

    Unless `data` is "shapes", the CLIP is evaluated about ten times, and the weights with the best
    retrieval of held-out images are kept, because a CLIP soon overfits a small data set. The result
    is bit-identical on the same device with the same number of threads.
    """
    device = device or dist.setup(cfg.device)
    if Path(cfg.run_dir, "auto_resume.json").exists():
        raise UserError(f"{cfg.run_dir}: contains the run of another model; give another --run_dir")
    batches = list(read(cfg.data, cfg.image_size, "train"))
    held_out = []
    if cfg.data != "shapes":
        held_out = list(read(cfg.data, cfg.image_size, "validation"))
    captions = [caption for _, records in batches for caption in captions_of(records)]
    if len(captions) < cfg.batch_size:
        raise UserError(
            f"{cfg.data}: {len(captions)} training images, fewer than a batch of "
            f"{cfg.batch_size}; give more images or a lower --batch_size"
        )
    accumulate.seed_all(cfg.seed, "clip")
    tokenizer = clip.Tokenizer.learn(captions, cfg.vocabulary)
    clip.note_texts(captions, tokenizer.encode, cfg.context - 2)
    settings = {
        "vocabulary": tokenizer.vocabulary,
        "image_size": cfg.image_size,
        "context": cfg.context,
        "embed_width": cfg.embed_width,
        "text_width": cfg.text_width,
    }
    model = clip.CLIP(**settings).to(device).train()
    # Betas and epsilon: Radford et al. 2021, Table 18.
    optimizers = optim.make(model, cfg.optimizer, cfg.lr, 0.1, (0.9, 0.98), 1e-6)
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches])).to(device)
    tokens = model.tokenizer(captions)
    tokens = tokens[:, (tokens != clip.PAD).any(0)].to(device)  # (N, L), L: longest text
    _, group = tokens.unique(dim=0, return_inverse=True)  # (N,), equal for equal captions
    best = 0.0
    for step in tracker.progress(range(1, cfg.steps + 1), desc="small CLIP", unit="step"):
        lr = schedule.learning_rate(step - 1, cfg.lr, cfg.steps // 10, cfg.steps, cosine=True)
        schedule.set_learning_rate(optimizers, lr)
        stop = step * cfg.batch_size
        positions = np.arange(stop - cfg.batch_size, stop)
        indices = order.shuffle(positions, len(captions), cfg.seed)
        images = pixels[indices]
        if cfg.crop_scale < 1 or cfg.flip:
            images = augment(images, cfg.crop_scale, cfg.flip)
        image = F.normalize(model.embed_image(images), dim=-1)
        text = F.normalize(model.embed_text(tokens[indices])[0], dim=-1)
        logits = model.logit_scale.clamp(max=math.log(100)).exp() * image @ text.T  # (B, B)
        loss = clip.contrastive_loss(logits, group[indices])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        if step % max(1, cfg.steps // 10) and step < cfg.steps:
            continue
        if checkpoint.not_finite(model.state_dict()):
            raise UserError(f"step {step}: weights are not finite; give a lower --lr")
        recall = 0.0
        if held_out:
            (image, text), records = embed(model, held_out)
            recall = clip.retrieval(text, image, captions_of(records))
            tracker.print_results(f"step {step}", {"loss": loss.item(), "retrieval": recall})
        if recall >= best:
            best = recall
            weights = copy.deepcopy(model.state_dict())
    # Written only now: a CLIP whose training was interrupted must not look finished.
    contents = {"kind": "clip", "model": weights, "settings": settings}
    checkpoint.save(contents, Path(cfg.run_dir, "model.pt"))
    print(f"small CLIP: last loss {loss:.3f}; chance is {math.log(cfg.batch_size):.3f}")
    if held_out:
        gallery = min(clip.GALLERY, len(records))
        print(f"retrieval {best:.3f}: fraction of captions that find their image among {gallery}")


@torch.no_grad()
def embed(clip_model, batches, encodings=False, raw=False):
    """Embed the batches of `read`. Returns a list of float32 arrays, and N records.

    The arrays are image embeddings (N, D), text embeddings (N, D) and, with `encodings`, text
    encodings (N, L, E). Embeddings have unit length unless `raw`.
    """
    device = next(clip_model.parameters()).device
    arrays = []
    records = []
    for pixels, batch in batches:
        image = clip_model.embed_image(torch.from_numpy(pixels).to(device))
        text = clip_model.text_condition(captions_of(batch), clip_model.context)
        outputs = [image, text["text_embed"]]
        if not raw:
            outputs = [F.normalize(each, dim=-1) for each in outputs]
        if encodings:
            outputs.append(text["text_enc"])
        arrays.append([output.cpu().numpy() for output in outputs])
        records += batch
    return [np.concatenate(column) for column in zip(*arrays)], records


def embed_all(cfg, device=None):
    """Embed the images in `data`, and write shards and clip.json, which names the CLIP."""
    device = device or dist.setup(cfg.device)
    clip_model = clips.load(cfg.run_dir, device)
    out = Path(cfg.out)
    (out / "clip.json").unlink(missing_ok=True)  # an old one may name another CLIP
    batches = read(cfg.data, clip_model.image_size, cfg.split)
    arrays, records = embed(clip_model, batches, cfg.encodings, cfg.raw)
    if not records:
        raise UserError(f"{cfg.data}: none of its images can be used")
    # In half precision, as clip-retrieval writes them.
    image, text, *encodings = [array.astype(np.float16) for array in arrays]
    embeddings.write_shards(out, image, text, records, *encodings)
    spec = cfg.run_dir
    if not spec.startswith("open_clip:"):
        spec = str(Path(spec).resolve())
    values = {"clip": spec, "fingerprint": clip_model.fingerprint()}
    checkpoint.write_json(values, out / "clip.json")
    print(f"wrote {out}: {len(records)} embeddings")


def builtin_data(folder, device):
    """Train the small CLIP in FOLDER/clip, and write its embeddings of shapes to FOLDER/shapes.

    If both already exist, and were made with the same settings, they are kept. Returns the path of
    the embeddings.
    """
    run_dir = str(folder.resolve() / "clip")
    out = folder / "shapes"
    path = out / "clip.json"
    pictures, _ = synthetic.shapes(range(64))
    made_from = {
        **config.as_json(Config()),
        "rows": BUILTIN_ROWS,
        "pictures": hashlib.sha256(pictures).hexdigest(),
    }
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        checkpoint.lock(lock, wait=True)  # another run may be writing here
        try:
            values = config.read_json(path)
            clips.load(run_dir, "cpu", str(values.get("fingerprint")))
        except (UserError, OSError):  # missing or damaged
            values = {}
        if values.get("made_from") != made_from:
            threads = torch.get_num_threads()
            torch.set_num_threads(min(8, threads * dist.world_size()))  # other ranks are idle
            train(Config(run_dir=run_dir), device)
            embed_all(EmbedConfig(run_dir=run_dir, out=str(out)), device)
            torch.set_num_threads(threads)
            checkpoint.write_json({**config.read_json(path), "made_from": made_from}, path)
    return str(out)


def with_builtin_data(cfg, device):
    """`cfg` with `data` set to the folder from `builtin_data`. Collective."""
    folder = dist.on_main(lambda: builtin_data(Path(cfg.run_dir).parent, device))
    return config.replace(cfg, data=folder)


def main():
    config.run({"train": (train, Config), "embed": (embed_all, EmbedConfig)}, __doc__)


if __name__ == "__main__":
    main()
