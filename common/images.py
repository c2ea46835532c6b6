"""Captioned images: of the user, in tars or folders, with embeddings inside or beside, and the built-in shapes.

`Pictures` and `Shapes` are sources for data.Chunks: `fetch` gives the pixels of rows with embeddings and captions.
"""
import hashlib
import importlib.util
import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import torch

from common import data, media, synthetic
from common.config import UserError, need

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
ENTRY = np.dtype([("tar", np.int32), ("in_json", bool), ("image", np.int64, 2), ("caption", np.int64, 2),
                  ("embedding", np.int64, 2)])  # the last three: offset and size, -1 if there is none
BUILTIN_ROWS = 25_000  # of the captioned shapes


class Unusable(UserError):
    """A sample that cannot be used, with the reason; training goes on with the next one."""


def decode_image(content, name):
    """The image file `content` (bytes) as uint8 RGB (H, W, 3), read by Pillow or, if PNG, without; raises Unusable."""
    own = name.lower().endswith(".png") and importlib.util.find_spec("PIL") is None
    Image = None if own else need("PIL.Image", f"{name}: reading {Path(name).suffix} images", "pillow")
    try:
        if Image:
            return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        image = media.read_png(io.BytesIO(content))
        image = image.reshape(*image.shape[:2], -1)  # gray, gray and alpha, RGB or RGBA
        return image[..., :3] if image.shape[2] > 2 else image[..., :1].repeat(3, -1)
    except Exception as error:  # Pillow meets a damaged file with any of a dozen types
        reason = str(error).partition(" <")[0]  # without the address of an object
        raise Unusable(f"{name}: not a readable image ({reason})") from error


class CaptionedImages:
    """Images with captions: a tar, a folder of tars (KEY.jpg|png|webp + KEY.txt or KEY.json), or a folder of images.

    Tars are indexed once, in 53 bytes and a name an image, and then read at random: [i] -> (image uint8 (H, W, 3),
    caption, key). Images without a caption are left out and counted in `uncaptioned`. `shards` ("0-99,120") takes only
    the tars of these numbers.
    """

    def __init__(self, path, shards=""):
        self.path, self.uncaptioned = Path(path), 0
        self.tars = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        if shards:
            self.tars = _chosen(self.tars, shards)
        found = [_members(tar) for tar in self.tars] or [
            {str(file.relative_to(path)): (0, file.stat().st_size) for file in sorted(self.path.rglob("*.*"))}]
        names, entries = zip(*(self._index(tar, members) for tar, members in enumerate(found)))
        self.names, self.entries = np.concatenate(names), np.concatenate(entries)
        if not len(self):
            raise UserError(f"{path}: no captioned images found ({self.uncaptioned} without a caption); expected "
                            "KEY.jpg, .png or .webp and KEY.txt, in .tar files or loose")

    def _index(self, tar, members):
        """Names (n,) and entries (n,) of the captioned images among {name: (offset, size)}."""
        names, entries = [], []
        for name in members:
            stem, _, suffix = name.rpartition(".")
            if f".{suffix.lower()}" not in IMAGES or Path(name).name.startswith("."):
                continue
            text, embedding = members.get(f"{stem}.txt"), members.get(f"{stem}.npy", (-1, -1))
            if caption := text or members.get(f"{stem}.json"):
                names.append(name.encode(errors="surrogateescape"))  # as Python reads names that are no UTF-8
                entries.append((tar, text is None, members[name], caption, embedding))
            else:
                self.uncaptioned += 1
        return np.array(names, np.bytes_), np.array(entries, ENTRY)

    def __len__(self):
        return len(self.entries)

    def key(self, i):
        """The name without suffix of image `i`, with folders within the tar or below `path`."""
        return self.names[i].decode(errors="surrogateescape").rpartition(".")[0]

    def name(self, i, part="image"):
        """Tar and member, or file, of one part of image `i`: "image", "caption" or "embedding"."""
        suffix = {"image": self.names[i].decode(errors="surrogateescape")[len(self.key(i)):], "embedding": ".npy",
                  "caption": ".json" if self.entries[i]["in_json"] else ".txt"}[part]
        where = f"{self.tars[self.entries[i]['tar']]}: " if self.tars else f"{self.path}/"
        return where + self.key(i) + suffix

    def read(self, i, part):
        """The bytes of one part of image `i`."""
        offset, size = self.entries[i][part].tolist()
        with open(self.tars[self.entries[i]["tar"]] if self.tars else self.name(i, part), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def caption(self, i):
        text = self.read(i, "caption").decode("utf-8", errors="replace").strip()
        if self.entries[i]["in_json"]:
            try:
                text = str(json.loads(text)["caption"] or "")
            except (ValueError, KeyError, TypeError) as error:
                raise Unusable(f"{self.name(i, 'caption')}: no entry 'caption' in it") from error
        return text

    def __getitem__(self, i):
        return decode_image(self.read(i, "image"), self.name(i)), self.caption(i), self.key(i)


def _members(tar):
    """{name: (offset, size)} of the files in a tar; UserError unless it is whole."""
    try:
        with tarfile.open(tar, "r:") as archive:
            members = {m.name: (m.offset_data, m.size) for m in archive if m.isfile()}
            archive.fileobj.seek(archive.offset)
            if archive.fileobj.read(512) != bytes(512):  # tarfile ends without a word at a damaged member
                raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{tar}: corrupt or truncated tar ({error}); fetch or write it again") from error
    return members


def _number(tar):
    digits = re.search(r"(\d+)\.tar$", tar.name)
    if not digits:
        raise UserError(f"{tar}: no shard number at the end of its name; expected one such as 00012.tar")
    return int(digits[1])


def _chosen(tars, shards):
    """Those of the `tars` whose numbers are in `shards`: numbers and ranges, such as "0-99,120"."""
    pieces = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece) for piece in shards.split(",")]
    if not all(pieces):
        raise UserError(f"--shards {shards}: expected numbers and ranges of numbers such as 0-99,120")
    ranges = [range(int(piece[1]), int(piece[2] or piece[1]) + 1) for piece in pieces]
    chosen = [tar for tar in tars if any(_number(tar) in numbers for numbers in ranges)]
    if not chosen:
        raise UserError(f"--shards {shards}: none of the {len(tars)} tars in --data has such a number")
    return chosen


class Pictures:
    """Captioned images as square pictures, with the embeddings that lie with them.

    Embeddings are looked for in the folder `embeddings` (img_emb_NNNNN.npy for NNNNN.tar; the row is the last
    `index_width` digits of a key), else inside the tars or beside loose images (KEY.npy), else beside the tars as in
    `embeddings`; where there are none, `width` is None. They are of the whole picture, however it is cropped.

    fetch(rows, draws) -> ({"image": uint8 (n, size, size, 3), "image_embed": float32 (n, D), "clip_image": uint8
    (n, C, C, 3) if C = `clip_size` is given, "caption": list}, good (n,)). It is the central square or, with draws, one
    of `crop_scale` to 1 of that area at a random place, half of them mirrored if `flip`. A row is not good if its
    embedding is missing, all zero or not finite, or its image damaged or smaller than `size`; `fault` says which.
    """

    def __init__(self, path, size, embeddings="", index_width=4, shards="", clip_size=0, crop_scale=1.0, flip=False,
                 resize="bicubic"):
        self.images, self.size, self.clip_size = CaptionedImages(path, shards), size, clip_size
        self.crop_scale, self.flip, self.resize = crop_scale, flip, resize
        self.table, self.width, tars = None, None, self.images.tars
        self.places = self.images.entries["embedding"][:, 0]  # of each embedding within its file, -1 for none
        inside = np.flatnonzero(self.places >= 0)
        if embeddings and not tars:
            raise UserError(f"--embeddings {embeddings}: matched by the numbers of tars, but {path} holds loose "
                            "images; put KEY.npy beside each image")
        if not embeddings and not len(inside) and tars and any(tars[0].parent.glob("img_emb_*.npy")):
            embeddings = tars[0].parent
        if embeddings:
            self.table = data.Shards(Path(embeddings), "img_emb")
            self.width, self.places = self.table.shape[0], self._rows_of_table(index_width)
        elif len(inside):
            self.width = len(self._embedding(inside[0]))

    def _rows_of_table(self, index_width):
        """The row (n,) of the table that is each image's embedding, -1 where there is none."""
        starts = dict(zip(self.table.numbers, np.cumsum([0, *self.table.sizes])))
        numbers = [_number(tar) for tar in self.images.tars]
        places = np.full(len(self), -1)
        for row, tar in enumerate(self.images.entries["tar"]):
            number, digits = numbers[tar], re.search(rf"\d{{{index_width}}}$", self.images.key(row))
            if number not in starts:
                raise UserError(f"{self.images.tars[tar]}: no embeddings for it; expected img_emb_{number:05d}.npy in "
                                f"{self.table.folder}")
            if digits and int(digits[0]) < len(self.table.arrays[number]):
                places[row] = starts[number] + int(digits[0])
        found, counts = np.unique(places[places >= 0], return_counts=True)
        if (counts > 1).any():
            first, second = np.flatnonzero(places == found[counts > 1][0])[:2]
            raise UserError(f"{self.name(first)} and {self.name(second)}: the same embedding; --index_width "
                            f"{index_width} is not how many digits count within a tar")
        return places

    def _embedding(self, row):
        """The embedding (D,) of one row in float32; raises Unusable."""
        what = f"{self.images.name(row, 'embedding')}: this embedding is"
        if self.places[row] < 0:
            raise Unusable(f"{what} missing" + ", if the last --index_width digits are its row" * bool(self.table))
        try:
            values = self.table[self.places[row:row + 1]] if self.table else np.load(
                io.BytesIO(self.images.read(row, "embedding")), allow_pickle=False)
            values = values.astype(np.float32).ravel()
        except Exception as error:  # numpy meets a damaged file with any of a dozen types
            raise Unusable(f"{what} not a readable .npy file ({error})") from error
        if len(values) != (self.width or len(values)):
            raise Unusable(f"{what} {len(values)} wide; expected {self.width}")
        if not np.isfinite(values).all() or not values.any():
            raise Unusable(f"{what} all zero or not finite")
        return values

    def __len__(self):
        return len(self.images)

    def name(self, row):
        return self.images.name(row)

    def split(self, part, validation, test, seed=0):
        """The rows (int64, ascending) of "train", "validation" or "test", by a hash of their keys."""
        parts = [data.part_of(self.images.key(row), validation, test, seed) for row in range(len(self))]
        return np.flatnonzero(np.array(parts) == part)

    def fetch(self, rows, draws=None):
        """Read `rows` (n,) in any order, augmented by `draws` (n,), if given."""
        uniform = [None] * len(rows) if draws is None else data.uniform(draws, 4)
        samples, good = [], np.ones(len(rows), bool)
        for i, row in enumerate(rows):
            try:
                samples.append(self._sample(row, uniform[i]))
            except Unusable:
                good[i] = False
        batch = {name: [sample[name] for sample in samples] for name in (samples[0] if good.all() else ())}
        return {name: values if name == "caption" else torch.stack(values) for name, values in batch.items()}, good

    def _sample(self, row, uniform=None):
        """What `fetch` gives of one row, from four numbers in [0, 1) or None; raises Unusable."""
        sample = {"image_embed": torch.from_numpy(self._embedding(row))} if self.width else {}
        image, sample["caption"], _ = self.images[row]
        height, width, _ = image.shape
        if (side := min(height, width)) < self.size:
            raise Unusable(f"{self.name(row)}: {width}x{height} pixels, smaller than the {self.size} asked for; lower "
                           "--image_size or remove it")
        top, left, mirror = (height - side) // 2, (width - side) // 2, 1
        if uniform is not None:
            area, down, right, mirror = uniform
            if self.crop_scale < 1:
                side = max(self.size, round(side * (self.crop_scale + (1 - self.crop_scale) * area) ** 0.5))
                top, left = int(down * (height - side + 1)), int(right * (width - side + 1))
        crop = image[top:top + side, left:left + side]
        if self.flip and mirror < 0.5:
            crop = crop[:, ::-1]
        crop = torch.from_numpy(crop.copy())[None]
        sample["image"] = media.resize_bytes(crop, self.size, self.resize)[0]
        if self.clip_size:
            sample["clip_image"] = media.resize_bytes(crop, self.clip_size)[0]  # bicubic, as CLIP was trained
        return sample

    def fault(self, row):
        """What is wrong with a row, after its name; "" if it can be used."""
        try:
            self._sample(row)
        except Unusable as error:
            return str(error)
        return ""

    def check(self, most=256):
        """(unusable, looked at, what is wrong with the first) of evenly spaced rows; UserError if most are unusable."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64))
        faults = [fault for row in rows if (fault := self.fault(row))]
        if len(faults) > len(rows) / 2:
            raise UserError(f"{self.images.path}: {len(faults)} of {len(rows)} pictures cannot be used: {faults[0]}")
        return len(faults), len(rows), faults[:5]

    def fingerprint(self):
        """Plain facts that change when the data does: rows, width, and a digest of names and of places and sizes."""
        table = repr(self.table and (self.table.numbers, self.table.sizes)).encode()
        digest = hashlib.sha256(self.images.names.tobytes() + self.images.entries.tobytes() + table)
        return {"rows": len(self), "width": self.width, "digest": digest.hexdigest()[:16]}


class Shapes(data.Embeddings):
    """The built-in captioned shapes, with their embeddings in `folder`, as clip.builtin_data writes them.

    fetch(rows) -> ({"image": uint8 (n, size, size, 3), "image_embed" (n, D), "text_embed" (n, D), "caption"}, good).
    Below 32 pixels they are averages of the 32-pixel ones. No crops, no mirror images, as captions name places.
    """

    def __init__(self, folder, size):
        super().__init__(folder, captions=True)
        self.size = size

    def fetch(self, rows, draws=None):
        batch, good = super().fetch(rows)
        pictures = torch.from_numpy(synthetic.shapes(rows, size=max(self.size, 32))[0])
        return {"image": media.resize_bytes(pictures, self.size, "box"), **batch}, good

    def records(self, rows):
        """A record for each of `rows` (n,): its "caption", all "attributes", and those that the caption "named"."""
        return self.captions.records(rows)
