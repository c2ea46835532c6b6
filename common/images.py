"""Captioned images: the user's, in tars or folders, with embeddings inside or beside, and the built-in shapes.

`Pictures` and `Shapes` are sources for data.Chunks: `fetch` returns pixels, embeddings and captions.
"""
import collections
import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import torch

from common import data, media, synthetic
from common.config import UserError, need

IMAGES = ("jpg", "jpeg", "png", "webp")
ENTRY = np.dtype([("tar", np.int32), ("in_json", bool), ("image", np.int64, 2), ("caption", np.int64, 2),
                  ("embedding", np.int64, 2)])  # the last three: offset and size, -1 if there is none
BUILTIN_ROWS = 25_000  # of the captioned shapes
MOST_PIXELS = 2 ** 27  # of an image that is read, so that a small file does not take all memory


class Unusable(UserError):
    """A sample that cannot be used, with the reason."""


def decode_image(content, name):
    """Decode the image file `content` (bytes): uint8 RGB (H, W, 3). Unusable if it is damaged."""
    Image = need("PIL.Image", f"{name}: reading {Path(name).suffix} images", "pillow")
    try:
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))  # others run programs
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than {MOST_PIXELS}")
        return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises a dozen types for a damaged file
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise Unusable(f"{name}: not a readable image{why}") from error


class CaptionedImages:
    """Images with captions: a tar, a folder of tars (KEY.jpg|png|webp + KEY.txt or KEY.json), or a folder of images.

    [i] -> (image uint8 (H, W, 3), caption, key). KEY is what stands before the first dot of a file's name, as in
    webdataset: KEY.image.png is no image. `left_out` tells of images without a caption and of files of other kinds.
    `shards` ("0-99,120") takes only the tars of these numbers. Tars are indexed once, then read at random.
    """

    def __init__(self, path, shards=""):
        self.path = Path(path)
        self.tars = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        if shards:
            self.tars = _chosen(self.tars, shards)
        listings = [_members(tar) for tar in self.tars] or [
            {file.relative_to(path).as_posix(): (0, file.stat().st_size)
             for file in sorted(self.path.rglob("*.*")) if file.is_file()}]
        names, entries, bare, kinds = [], [], [], collections.Counter()
        for tar, members in enumerate(listings):
            for name, place in members.items():
                key, extension = _parts(name)
                text, other = members.get(f"{key}.txt"), members.get(f"{key}.json")
                if name.rpartition("/")[2].startswith("."):
                    continue
                if extension not in IMAGES:
                    kinds[extension] += extension not in ("txt", "json", "npy")
                elif not (text or other):
                    bare.append(name)
                else:
                    names.append(name.encode(errors="surrogateescape"))  # a name need not be valid UTF-8
                    embedding = members.get(f"{key}.npy", (-1, -1))
                    entries.append((tar, text is None, place, text or other, embedding))
        self.names, self.entries = np.array(names, np.bytes_), np.array(entries, ENTRY)
        self.left_out = data.left_out(path, bare, +kinds)
        if not names:
            raise UserError(f"{path}: no such folder, or no captioned images found; expected KEY.jpg, .png or .webp "
                            f"with KEY.txt or .json, and no other dot in their names. {self.left_out}".strip())

    def __len__(self):
        return len(self.entries)

    def key(self, i):
        """KEY of image `i`; it includes folders in the tar or below `path`."""
        return _parts(self.names[i].decode(errors="surrogateescape"))[0]

    def name(self, i, suffix=""):
        """Path of image `i`, or of the file with another `suffix` beside it; in a tar: tar and member."""
        member = self.key(i) + suffix if suffix else self.names[i].decode(errors="surrogateescape")
        return f"{self.tars[self.entries[i]['tar']]}: {member}" if self.tars else f"{self.path}/{member}"

    def read(self, i, part, suffix=""):
        """The bytes of "image", "caption" or "embedding" of image `i`, in the file with this `suffix`."""
        offset, size = self.entries[i][part].tolist()
        with open(self.tars[self.entries[i]["tar"]] if self.tars else self.name(i, suffix), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def caption(self, i):
        in_json = self.entries[i]["in_json"]
        text = self.read(i, "caption", ".json" if in_json else ".txt").decode("utf-8", errors="replace").strip()
        try:
            return str(json.loads(text)["caption"] or "") if in_json else text
        except (ValueError, KeyError, TypeError) as error:
            raise Unusable(f"{self.name(i, '.json')}: no entry 'caption' in it") from error

    def __getitem__(self, i):
        return decode_image(self.read(i, "image"), self.name(i)), self.caption(i), self.key(i)


def _members(tar):
    """{name: (offset, size)} of the files in a tar. Raises UserError for a damaged one."""
    try:
        with tarfile.open(tar, "r:") as archive:
            members, size = {}, os.path.getsize(tar)
            for member in archive:
                if not 0 <= member.size <= size:  # below 0 the next member would be an earlier one, without end
                    raise tarfile.ReadError(f"{member.name} of {member.size} bytes")
                if member.isfile():
                    members[member.name] = member.offset_data, member.size
            archive.fileobj.seek(archive.offset)
            if archive.fileobj.read(512) != bytes(512):  # tarfile stops silently at a damaged member
                raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(f"{tar}: corrupt or truncated tar ({error}); fetch or write it again") from error
    return members


def _parts(name):
    """(folders and KEY, extension) of a file's name."""
    folders, slash, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return folders + slash + key, extension.lower()


def _number(tar):
    digits = re.search(r"(\d+)\.tar$", tar.name)
    if not digits:
        raise UserError(f"{tar}: no shard number at the end of its name; expected one such as 00012.tar")
    return int(digits[1])


def _chosen(tars, shards):
    """The `tars` whose numbers are in `shards`, a list of numbers and ranges such as "0-99,120"."""
    try:
        ranges = [[int(end) for end in piece.split("-")] for piece in shards.split(",")]
    except ValueError:
        raise UserError(f"--shards {shards}: expected numbers and ranges of numbers such as 0-99,120") from None
    chosen = [tar for tar in tars if any(ends[0] <= _number(tar) <= ends[-1] for ends in ranges)]
    if not chosen:
        raise UserError(f"--shards {shards}: none of the {len(tars)} tars in --data has such a number")
    return chosen


class Pictures(CaptionedImages):
    """Captioned images as square pictures with their embeddings, which are of the whole image, however it is cropped.

    The embeddings are in the folder `embeddings` (img_emb_NNNNN.npy for NNNNN.tar; a key is the number of its tar and
    `index_width` digits for the row, as img2dataset writes it), else inside the tars or beside loose images (KEY.npy),
    else beside the tars. Without any, `width` is None.

    fetch(rows, draws) -> ({"image": uint8 (n, size, size, 3), "image_embed": float32 (n, D), "clip_image": uint8
    (n, C, C, 3) if C = `clip_size` is not 0, "caption": list}, good (n,)). An image is the central square or, with
    draws, a random square of `crop_scale` to 1 of its area, half of them mirrored if `flip`. A row is not good if its
    embedding is missing, all zero or not finite, or its image damaged or smaller than `size`; `fault` says which.
    """

    def __init__(self, path, size, embeddings="", index_width=4, shards="", clip_size=0, crop_scale=1.0, flip=False,
                 resize="bicubic"):
        super().__init__(path, shards)
        self.size, self.clip_size, self.crop_scale, self.flip, self.resize = size, clip_size, crop_scale, flip, resize
        self.index_width, self.table, self.width = index_width, None, None
        inside = np.flatnonzero(self.entries["embedding"][:, 0] >= 0)
        if embeddings and not self.tars:
            raise UserError(f"--embeddings {embeddings}: only for tars; put KEY.npy beside each image in {path}")
        if not embeddings and not len(inside) and self.tars and any(self.tars[0].parent.glob("img_emb_*.npy")):
            embeddings = self.tars[0].parent
        if embeddings:
            self.table = data.Shards(Path(embeddings), "img_emb")
            self.width = self.table.shape[0]
            if missing := {_number(tar) for tar in self.tars} - self.table.arrays.keys():
                raise UserError(f"{embeddings}: no img_emb_{min(missing):05d}.npy for the tar of this number")
        elif len(inside):
            self.width = len(self._embedding(inside[0]))

    def _embedding(self, row):
        """The embedding (D,) of a row in float32; raises Unusable."""
        if self.table:
            number, key = _number(self.tars[self.entries[row]["tar"]]), self.key(row).rpartition("/")[2]
            index = int(key) - number * 10 ** self.index_width if key.isdecimal() else -1
            what = f"{self.name(row)}: its embedding, row {index} of img_emb_{number}.npy, is"
            array = self.table.arrays[number]
            values = array[np.array([index] if 0 <= index < len(array) else [], int)]
        else:
            what = f"{self.name(row, '.npy')}: this embedding is"
            try:
                file = io.BytesIO(self.read(row, "embedding", ".npy"))
                values = np.load(file, allow_pickle=False).astype(np.float32)
            except Exception as error:  # numpy raises a dozen types for a damaged file
                raise Unusable(f"{what} missing or not a readable .npy file ({error})") from error
        if values.size != (self.width or values.size) or not np.isfinite(values).all() or not values.any():
            raise Unusable(f"{what} {values.size} numbers, expected {self.width}, or all zero or not finite")
        return values.ravel()

    def split(self, part, validation, test, seed=0):
        """The rows (int64, ascending) of "train", "validation" or "test", by a hash of their keys."""
        parts = [data.part_of(self.key(row), validation, test, seed) for row in range(len(self))]
        return np.flatnonzero(np.array(parts) == part)

    def fetch(self, rows, draws=None):
        """Read `rows` (n,) in any order, augmented by `draws` (n,), if given."""
        uniform = [None] * len(rows) if draws is None else data.uniform(draws, 4)
        samples = [self._sample(row, numbers) for row, numbers in zip(rows, uniform)]
        good = np.array([isinstance(sample, dict) for sample in samples])
        batch = {name: [sample[name] for sample in samples] for name in (samples[0] if good.all() else ())}
        return {name: values if name == "caption" else torch.stack(values) for name, values in batch.items()}, good

    def _sample(self, row, uniform=None):
        """The entries of `fetch` for a row, cropped by four numbers in [0, 1) or None; or the Unusable that it is."""
        try:
            sample = {"image_embed": torch.from_numpy(self._embedding(row))} if self.width else {}
            image, sample["caption"], _ = self[row]
        except Unusable as error:
            return error
        height, width, _ = image.shape
        if (side := min(height, width)) < self.size:
            return Unusable(f"{self.name(row)}: {width}x{height} pixels, smaller than the {self.size} asked for; lower "
                            "--image_size or remove it")
        top, left = (height - side) // 2, (width - side) // 2
        if uniform is not None and self.crop_scale < 1:
            area, down, right, _ = uniform
            side = max(self.size, round(side * (self.crop_scale + (1 - self.crop_scale) * area) ** 0.5))
            top, left = int(down * (height - side + 1)), int(right * (width - side + 1))
        crop = torch.tensor(image[top:top + side, left:left + side])[None]
        if uniform is not None and self.flip and uniform[3] < 0.5:
            crop = crop.flip(2)
        sample["image"] = media.resize_bytes(crop, self.size, self.resize)[0]
        if self.clip_size:
            sample["clip_image"] = media.resize_bytes(crop, self.clip_size)[0]  # bicubic, as CLIP was trained
        return sample

    def fault(self, row):
        """What is wrong with a row, after its name; "" if it can be used."""
        sample = self._sample(row)
        return "" if isinstance(sample, dict) else str(sample)

    def check(self, most=256):
        """(unusable, checked, first faults) of `most` evenly spaced rows; UserError if most of them are unusable."""
        rows = data.spread(len(self), most)
        faults = [fault for row in rows if (fault := self.fault(row))]
        if len(faults) > len(rows) / 2:
            raise UserError(f"{self.path}: {len(faults)} of {len(rows)} pictures cannot be used: {faults[0]}")
        return len(faults), len(rows), faults[:5]

    def fingerprint(self):
        """Facts that change when the data does: rows, width, and a digest of names, sizes and a few contents."""
        files = self.tars or [self.name(i) for i in data.spread(len(self), 100)]  # the sizes of all are in `entries`
        files += [array.path for array in self.table.arrays.values()] if self.table else []
        digest = hashlib.sha256(self.names.tobytes() + self.entries.tobytes())
        digest.update(data.digest_of(files).encode())
        return {"rows": len(self), "width": self.width, "digest": digest.hexdigest()[:16]}


class Shapes(data.Embeddings):
    """The built-in captioned shapes, with their embeddings in `folder`, as clip.builtin_data writes them.

    fetch(rows) -> ({"image": uint8 (n, size, size, 3), "image_embed" (n, D), "text_embed" (n, D), "caption"}, good).
    Below 32 pixels they are averages of the 32-pixel ones. No crops and flips, because captions name places.
    records(rows) -> their "caption", all "attributes", and which of these the caption "named".
    """

    left_out = ""

    def __init__(self, folder, size):
        super().__init__(folder, captions=True)
        self.size, self.records = size, self.captions.records

    def fetch(self, rows, draws=None):
        batch, good = super().fetch(rows)
        pictures = torch.from_numpy(synthetic.shapes(rows, size=max(self.size, 32))[0])
        return {"image": media.resize_bytes(pictures, self.size, "box"), **batch}, good
