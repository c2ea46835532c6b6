"""Captioned images, in tars or folders, with or without embeddings, and the built-in shapes.

`Pictures` and `Shapes` are datasets (see order.py): `fetch` returns pixels, embeddings, captions.
"""

import collections
import contextlib
import csv
import functools
import glob
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from pathlib import Path

import numpy as np
import torch

from common import config
from common.config import UserError
from common.data import embeddings, files, media, order, synthetic
from common.data.files import Unusable

IMAGES = ("jpg", "jpeg", "png", "webp")
CAPTIONS = ("txt", "json")
METADATA = ("metadata.jsonl", "metadata.csv")
FILE = [("extension", "S5"), ("offset", np.int64), ("size", np.int64)]
ENTRY = np.dtype([("tar", np.int32), ("image", FILE), ("caption", FILE), ("embedding", FILE)])
BUILTIN_ROWS = 25_000  # of the captioned shapes


def decode_image(content, name):
    """Decode the image file `content` (bytes): uint8 RGB (H, W, 3). Unusable if it is damaged.

    It is turned upright as its EXIF says, and brought to sRGB from its ICC profile. What is
    transparent is white. 16 bits become 8.
    """
    Image = config.need("PIL.Image", f"{name}: reading {Path(name).suffix} images", "pillow")
    from PIL import ImageCms, ImageOps

    with config.explained(f"{name}: not a readable image", Unusable):
        # Other formats are refused, because Pillow runs programs for some.
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))
        image.load()
        profile = image.info.get("icc_profile")
        with contextlib.suppress(Exception):  # a damaged EXIF has no orientation
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # gray of 16 bits, which `convert` would cut off at 255
            values = np.asarray(image).astype(np.int64)
            opaque = values != image.info.get("transparency", -1)
            gray = np.where(opaque, (values + 128) // 257, 255)
            image = Image.fromarray(gray.astype(np.uint8))
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        if image.mode == "P":  # which has RGB's profile
            image = image.convert("RGB")
        with contextlib.suppress(Exception):  # no profile, a damaged one, or one of other channels
            transform = to_srgb(profile, image.mode)
            if transform:
                image = ImageCms.applyTransform(image, transform)
        return np.asarray(image.convert("RGB"))


@functools.lru_cache(maxsize=64)  # building it takes longer than decoding a small image
def to_srgb(profile, mode):
    """Pillow's transform to sRGB of images of a mode with an ICC profile (bytes).

    It is None if colors stay as they are, so that most images need none. The profile's name does
    not tell: those of a linear sRGB have "sRGB" in it, too.
    """
    from PIL import Image, ImageCms

    profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")
    colors = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    converted = ImageCms.applyTransform(Image.fromarray(colors).convert(mode), transform)
    errors = np.subtract(converted, colors, dtype=int)
    return transform if np.abs(errors).max() > 2 else None


class CaptionedImages:
    """Images with captions: item (int) -> (image uint8 (H, W, 3), caption, key).

    path: tars, see `find_tars`, or a folder of images. They have KEY.jpg|png|webp with KEY.txt or
    KEY.json; a folder may have metadata.jsonl or metadata.csv instead. KEY is the name up to the
    first dot, as in webdataset: KEY.image.png is no image, unless a table has a row of this file.
    Tars are indexed once, then read at random. A note counts what is left out.

    Images without a caption are left out. But if none has one, and not `needs_captions`, all are
    taken, and their captions are "".
    """

    def __init__(self, path, needs_captions=True):
        self.path = Path(path)
        self.tars = find_tars(path)
        self.metadata = []  # files
        table = {}  # rows whose file was not found yet
        self.captions = bytearray()  # those of tables, as JSON
        ends = [0]  # of the caption of each image in it, which is empty without a table
        unused = collections.Counter()
        if self.tars:
            listings = map(list_tar, self.tars)
        else:
            loose = []
            for file in files.files_below(path):
                if file.name.lower() in METADATA:
                    self.metadata.append(file)
                else:
                    loose.append((file.relative_to(path).as_posix(), 0, file.stat().st_size))
            table = read_metadata(self.path, self.metadata, unused)
            listings = [loose]

        captioned = []  # (key, entry) of each image
        bare = []
        for tar, members in enumerate(listings):
            for key, samples in group(members, table).items():
                whole = [each for each in samples if pick(each, IMAGES) and pick(each, CAPTIONS)]
                sample = (whole or samples)[-1]  # the last of a name counts, as for tar itself
                unused["of a name that comes again"] += len(samples) - 1
                unused.update(sample.keys() - {*IMAGES, *CAPTIONS, "npy"})
                captions = pick(sample, CAPTIONS)[:1]
                for image in pick(sample, IMAGES):
                    file = files.nfc(f"{key}.{image[0]}")
                    if file in table:
                        self.captions += json.dumps(table.pop(file)).encode()
                        captions.append(("", 0, 0))
                    caption = "", 0, 0
                    found = bare
                    if captions:
                        ends.append(len(self.captions))
                        caption = captions.pop()
                        found = captioned
                    embedding = sample.get("npy", ("npy", 0, 0))
                    found.append((os.fsencode(key), (tar, image, caption, embedding)))
        if table:
            unused[f"rows of tables, which name no image here, such as {min(table)}"] = len(table)
        samples = captioned
        if captioned or needs_captions:
            unused["without a caption"] = len(bare)
        else:
            samples = bare
        # Arrays, and bytes: millions of objects would be copied to every worker.
        self.ends = np.array(ends)
        self.keys = np.array([key for key, _ in samples], np.bytes_)
        self.entries = np.array([entry for _, entry in samples], ENTRY)
        self.captioned = bool(captioned)
        counts = [f"{number} {kind}" for kind, number in sorted(unused.items()) if number]
        if counts:
            config.note(f"{path}: left out are {', '.join(counts)}")
        if not samples:
            raise UserError(
                f"{path}: no such folder, or no captioned images found; expected "
                "KEY.jpg, .png or .webp with KEY.txt, KEY.json or metadata.jsonl"
            )
        if not needs_captions:  # a KEY.json may have none
            self.captioned = any(self.texts(files.evenly_spaced(len(self), 16)))

    def __len__(self):
        return len(self.entries)

    def key(self, index):
        """KEY of an image; it includes folders in the tar or below `path`."""
        return os.fsdecode(self.keys[index])

    def name(self, index, kind="image"):
        """Path of the "image", "caption" or "embedding" of a sample; in a tar: tar and member."""
        entry = self.entries[index]
        member = f"{self.key(index)}.{entry[kind]['extension'].decode()}"
        return f"{self.tars[entry['tar']]}: {member}" if self.tars else f"{self.path}/{member}"

    def read(self, index, kind):
        """The bytes of the "image", "caption" or "embedding" of a sample."""
        entry = self.entries[index]
        path = self.tars[entry["tar"]] if self.tars else self.name(index, kind)
        with open(path, "rb") as file:
            file.seek(entry[kind]["offset"])
            return file.read(entry[kind]["size"])

    def caption(self, index):
        """The caption of an image, see files.clean_caption; raises Unusable."""
        if not self.captioned:
            return ""
        in_table = self.captions[self.ends[index] : self.ends[index + 1]]
        if in_table:
            return json.loads(in_table)
        name = self.name(index, "caption")
        with config.explained(f"{name}: no caption in it", Unusable):
            caption = files.decode_text(self.read(index, "caption"), name)
            if name.lower().endswith(".json"):
                caption = files.caption_in(json.loads(caption))
            return files.clean_caption(caption)

    def texts(self, indices):
        """A caption of each of the samples that have one. Their images are not read."""
        texts = []
        for index in indices:
            with contextlib.suppress(Unusable):
                texts.append(files.choose_caption(self.caption(index)))
        return texts

    def __getitem__(self, index):
        image = decode_image(self.read(index, "image"), self.name(index))
        return image, self.caption(index), self.key(index)


def find_tars(path):
    """The tars that `path` names, sorted.

    path: a tar, FOLDER of *.tar, or a pattern, such as "FOLDER/{00000..00219}.tar" or "FOLDER/0*".
    """
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", str(path))
    if braces:
        first, last = braces.groups()
        numbers = range(int(first), int(last) + 1)
        tars = [str(path).replace(braces[0], f"{number:0{len(first)}}") for number in numbers]
    elif Path(path).is_dir():
        tars = Path(path).glob("[!.]*.[tT][aA][rR]")
    else:
        tars = glob.glob(str(path))
    tars = sorted(map(Path, tars))
    for tar in tars:
        if tar.suffix.lower() != ".tar" or not tar.is_file():
            raise UserError(
                f"{tar}: no such file, or not a .tar; expected tars, or a folder of images, with "
                "their metadata.csv or .jsonl in it; unpack compressed tars, as by gunzip"
            )
    return tars


def read_metadata(folder, paths, unused):
    """{file: caption} of the metadata.jsonl and metadata.csv at `paths` below a folder.

    Each row has a file_name relative to its table, and see files.caption_in. In the dict, files are
    relative to `folder`, in NFC. `unused` counts other rows; UserError if a table has no others.
    """
    table = {}
    for path in paths:
        text = files.decode_text(path.read_bytes(), path)
        found = {}
        faults = []
        with config.explained(f"{path}: expected file_name and caption or text in its rows"):
            # In a row that is too long or too short, file_name or caption is no text.
            rows = csv.DictReader(io.StringIO(text), restkey="file_name", restval=False)
            if path.suffix.lower() == ".jsonl":
                rows = filter(str.strip, text.split("\n"))
            for row in rows:
                try:
                    record = json.loads(row) if isinstance(row, str) else row
                    name = os.path.relpath(path.parent / record["file_name"], folder)
                    found[files.nfc(name)] = files.clean_caption(files.caption_in(record))
                except Exception:  # of a dozen types
                    faults.append(f"{row!s:.100}")
            if faults:
                kind = f"rows of {path} without a file_name or caption, such as {faults[0]}"
                unused[kind] = len(faults)
                if not found:
                    raise ValueError(faults[0])
        table |= found
    return table


def list_tar(tar):
    """(name, offset, size) of the files in a tar. UserError if it is damaged."""
    members = []
    damaged = config.explained(f"{tar}: corrupt or truncated tar; write it again")
    with open(tar, "rb") as file, damaged, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.size < 0:  # the next member would be an earlier one, without end
                raise tarfile.ReadError(f"{member.name} of {member.size} bytes")
            if member.isfile():
                members.append((member.name, member.offset_data, member.size))
        file.seek(archive.offset)
        if file.read(512) != bytes(512):  # tarfile stops silently at damage
            raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")
    return members


def group(members, table):
    """{folders and KEY: [{extension in lower case: (extension, offset, size)}]} of files.

    members: (name, offset, size) of each. Hidden ones are left out. table: see `key_of`.

    Consecutive files of a KEY, of which none comes again, are of one place. The places of a KEY are
    one sample, as where images and captions lie apart. Only a place with a name or an image that
    the sample has already, as in joined tars, begins another sample: image and caption are of the
    same tar, if none of the first tar lacks its other half.
    """
    groups = collections.defaultdict(lambda: [{}])
    last_key = ""
    place = {}
    for name, offset, size in [*members, ("", 0, 0)]:  # its empty key ends the last place
        key = key_of(name, table)
        extension = name[len(key) + 1 :]
        kind = extension.lower() or "without an extension"
        if key != last_key or kind in place:
            if posixpath.basename(last_key):
                samples = groups[last_key]
                images = pick(place, IMAGES) and pick(samples[-1], IMAGES)
                if not table and (images or pick(place, samples[-1])):  # a folder has a name once
                    samples.append({})
                samples[-1].update(place)
            last_key = key
            place = {}
        place[kind] = extension, offset, size
    return groups


def pick(sample, kinds):
    """Those of the files of a sample that are of `kinds`."""
    return [sample[kind] for kind in kinds if kind in sample]


def key_of(name, table):
    """The folders of a file's name, and the name up to its first dot; its last if in the table."""
    if files.nfc(name) in table:
        return posixpath.splitext(name)[0]
    folder, file = posixpath.split(name)
    return posixpath.join(folder, file.partition(".")[0])


class Pictures(CaptionedImages):
    """Captioned images as square pictures, with embeddings of the whole image.

    The embeddings are inside the tars or beside loose images (KEY.npy), else beside the tars: in
    img_emb_NNNNN.npy for NNNNN.tar, where a key is the digits of its tar, then those of the row,
    as img2dataset writes it. Without any, `width` is None.

    `fetch` returns the usable ones of the samples as {"image": uint8 (n, size, size, 3),
    "image_embed": float32 (n, D), "clip_image": uint8 (n, C, C, 3) if C = `clip_size` is not 0,
    "caption": list}. An image is the central square or, with random words, a random square of
    `crop_scale` to 1 of its area, half of them mirrored if `flip`. So "clip_image", from which a
    CLIP makes the embeddings if none are stored, is of the crop, unlike stored embeddings. A sample
    is not usable if its embedding is missing, all zero or not finite, or its image damaged or
    smaller than `size`.
    """

    def __init__(
        self,
        path,
        size,
        clip_size=0,
        crop_scale=1.0,
        flip=False,
        resize="bicubic",
        needs_captions=True,
    ):
        super().__init__(path, needs_captions)
        self.size = size
        self.clip_size = clip_size
        self.crop_scale = crop_scale
        self.flip = flip
        self.resize = resize
        self.arrays = {}  # NpyFile by number of the tar
        self.width = None

        inside = np.flatnonzero(self.entries["embedding"]["size"])
        if len(inside):
            self.width = len(self._embedding(inside[0]))
        elif self.tars and any(self.tars[0].parent.glob("img_emb_*.npy")):
            table = embeddings.Shards(self.tars[0].parent, "img_emb")
            self.arrays = table.arrays
            self.width = table.shape[0]

    def _embedding(self, index):
        """The embedding (D,) of an image in float32; raises Unusable."""
        name = self.name(index, "image" if self.arrays else "embedding")
        with config.explained(f"{name}: no usable embedding", Unusable):
            if self.arrays:
                tar = self.tars[self.entries[index]["tar"]].stem
                row = posixpath.basename(self.key(index)).removeprefix(tar)
                # Unsigned, so that -1 is no row.
                values = self.arrays[int(tar)][np.array(int(row), np.uint64)]
            else:
                values = np.load(io.BytesIO(self.read(index, "embedding"))).astype(np.float32)
            usable = np.isfinite(values).all() and values.any()
            if not usable or values.size != (self.width or values.size):
                raise ValueError(
                    f"{values.size} numbers, expected {self.width}, or all zero or not finite"
                )
            return values.ravel()

    def split(self, name, validation, test, seed=0):
        """Indices (int64, ascending) of "train", "validation" or "test", by a hash of the keys."""
        return order.split_keys(map(self.key, range(len(self))), name, validation, test, seed)

    def fetch(self, indices, random_words=None):
        """Read samples in any order, augmented if there are random words."""
        uniform = [None] * len(indices)
        if random_words is not None:
            uniform = order.uniform(random_words, 5)
        samples = []
        usable = np.zeros(len(indices), bool)
        for i, index in enumerate(indices):
            with contextlib.suppress(Unusable):  # ChunkDataset takes another, and asks `fault`
                samples.append(self._sample(index, uniform[i]))
                usable[i] = True
        batch = torch.utils.data.default_collate(samples) if samples else {}
        return batch, usable

    def _sample(self, index, uniform=None):
        """The entries of `fetch` for an image; five numbers in [0, 1) choose what is random."""
        sample = {}
        if self.width:
            sample["image_embed"] = torch.from_numpy(self._embedding(index))
        image, caption, _ = self[index]
        sample["caption"] = files.choose_caption(caption, 0 if uniform is None else uniform[4])
        height, width, _ = image.shape
        side = min(height, width)
        if side < self.size:
            raise Unusable(
                f"{self.name(index)}: {width}x{height} pixels, smaller than "
                f"{self.size}; lower --image_size or remove it"
            )

        top = (height - side) // 2
        left = (width - side) // 2
        if uniform is not None and self.crop_scale < 1:
            area = self.crop_scale + (1 - self.crop_scale) * uniform[0]
            side = max(self.size, round(side * area**0.5))
            top = int(uniform[1] * (height - side + 1))
            left = int(uniform[2] * (width - side + 1))
        crop = torch.tensor(image[top : top + side, left : left + side])[None]  # (1, side, side, 3)
        if uniform is not None and self.flip and uniform[3] < 0.5:
            crop = crop.flip(2)

        sample["image"] = media.resize_uint8(crop, self.size, self.resize)[0]
        if self.clip_size:
            sample["clip_image"] = media.resize_uint8(crop, self.clip_size)[0]  # bicubic: CLIP's
        return sample

    def fault(self, index):
        """What is wrong with an image, after its name; "" if it can be used."""
        try:
            self._sample(index)
        except Unusable as error:
            return str(error)
        return ""

    def check(self):
        """See files.check_samples. UserError if most of the images are unusable."""
        return files.check_samples(self, min(len(self), 256) / 2)

    def fingerprint(self):
        """Values that change when the data does: rows, width, digest of names, sizes and tars."""
        paths = [*self.tars, *self.metadata, *(array.path for array in self.arrays.values())]
        digest = hashlib.sha256(self.keys.tobytes() + self.entries.tobytes())
        digest.update(files.digest_of(paths).encode())
        return {"rows": len(self), "width": self.width, "digest": digest.hexdigest()[:16]}


class Shapes(embeddings.Embeddings):
    """The built-in captioned shapes, with the embeddings that embed.builtin_data writes.

    `fetch` returns {"image": uint8 (n, size, size, 3), "image_embed" (n, D), "text_embed" (n, D),
    "caption": list}. Below 32 pixels they are averages of the 32-pixel ones. There are no crops and
    flips, because captions name places. `records` has their "caption", all "attributes", and which
    of these the caption "named".
    """

    def __init__(self, folder, size):
        super().__init__(folder, captions=True)
        self.size = size

    def fetch(self, indices, random_words=None):
        batch, usable = super().fetch(indices)
        drawn, _ = synthetic.shapes(indices, size=max(self.size, 32))
        images = media.resize_uint8(torch.from_numpy(drawn), self.size, "box")
        return {"image": images, **batch}, usable
