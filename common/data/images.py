"""Captioned images in tars or folders, with or without embeddings, and the built-in shapes.

`Pictures` and `Shapes` are datasets (see loader.py). `fetch` returns images, embeddings and
captions.
"""

import collections
import contextlib
import dataclasses
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

from common import config, order
from common.config import UserError
from common.data import embeddings, files, flat, synthetic
from common.data.files import Unusable
from common.models import pixels

IMAGES = ("jpg", "jpeg", "png", "webp")
CAPTIONS = ("txt", "json")
USED = {*IMAGES, *CAPTIONS, "npy"}
# Patterns of file names, with two groups: KEY with its folders, and the extension. Hidden files do
# not match. In a tar, KEY ends at the first dot, as in webdataset; in a folder, at the last dot.
TAR_NAME = r"(?s)((?:.*/)?[^/.]+)\.?([^/]*)"
FILE_NAME = r"(?s)((?:.*/)?[^/.][^/]*?)(?:\.|\Z)([^/.]*)"
FILE = [("extension", "S5"), ("offset", np.int64), ("size", np.int64)]
ENTRY = np.dtype([("tar", np.int32), ("image", FILE), ("caption", FILE), ("embedding", FILE)])
BUILTIN_ROWS = 25_000  # number of captioned shapes
# int(MIDDLE * n) is the middle one of n possible positions of a square. If n is even, it is the
# first of the middle two; 1/2 would give the second.
MIDDLE = 0.4999999
# In place of random numbers (area, down, right, mirror): the largest central square, not mirrored.
CENTRAL = (1, MIDDLE, MIDDLE, 1)


def decode_image(content, name):
    """Decode the image file `content` (bytes) to uint8 RGB (H, W, 3). Unusable if it is damaged.

    The image is rotated as its EXIF says. Transparent images get a white background. 16-bit gray
    becomes 8-bit gray.
    """
    Image = config.need("PIL.Image", f"{name}: reading {Path(name).suffix} images", "pillow")
    from PIL import ImageOps, PngImagePlugin

    if not hasattr(Image.Image, "has_transparency_data"):
        raise UserError("images need pillow 10.1: pip install 'pillow>=10.1'")
    # Some tools store workflows in PNG text chunks, beyond Pillow's default limit.
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
    with config.explained(f"{name}: not a readable image", Unusable):
        # Allow only formats that Pillow decodes itself; for some others, it runs external programs.
        image = Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))
        image.load()
        with contextlib.suppress(Exception):  # ignore damaged EXIF data
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16-bit gray, which `convert` would clip at 255
            gray = np.asarray(image) / 257 + 0.5
            image = Image.fromarray(gray.astype(np.uint8))
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return np.asarray(image.convert("RGB"))


# Finding images and captions


class CaptionedImages:
    """Captioned images in tars or in a folder, numbered from 0.

    path: tars, see `find_tars`, or a folder of images. An image is KEY.jpg, .jpeg, .png or .webp,
    and its caption is KEY.txt or KEY.json. Files are indexed once, see flat.open_index, and then
    read in any order. A note tells how many files are skipped.

    needs_captions: skip images without a caption. Otherwise, they are used, and a missing or
    damaged caption is "".
    """

    def __init__(self, path, needs_captions=True, index_dir=None):
        self.path = Path(path)
        self.needs_captions = needs_captions
        self.tars = find_tars(self.path)
        self.renamed = {}  # {name in NFC: name on disk} below `path`, where they differ
        sources = self.tars
        if not self.tars:
            sources = files.files_below(path)
            for file in sources:
                name = file.relative_to(path).as_posix()
                if name != files.nfc(name):
                    self.renamed[files.nfc(name)] = name
        stamps = files.stamps(sources)
        self.index = flat.open_index(
            index_dir,
            [needs_captions, stamps],
            len(self.tars) or 1,
            lambda number: self._columns(number, stamps),
        )
        unused = collections.Counter()
        for counts in self.index.texts("unused", np.arange(len(self.index["unused.ends"]))):
            unused.update(json.loads(counts))
        counts = [f"{number} {kind}" for kind, number in sorted(unused.items()) if number]
        if counts:
            config.note(f"{path}: skipped {', '.join(counts)}")
        if not len(self):
            raise UserError(
                f"{path}: no such folder, or no captioned images found; expected "
                "KEY.jpg, .png or .webp with KEY.txt or KEY.json"
            )

    def _columns(self, number, stamps):
        """The index columns of tar `number`, or of the folder.

        "keys": the KEY of each image. "entries": where its files are. "unused": counts of skipped
        files, for the note, as JSON. stamps: see files.stamps.
        """
        unused = collections.Counter()  # {kind: number of files}
        pattern = TAR_NAME
        if self.tars:
            members = list_tar(self.tars[number], unused)
        else:
            pattern = FILE_NAME
            members = []
            for file, size, _ in stamps:
                members.append((Path(file).relative_to(self.path).as_posix(), 0, size))
        keys = []
        entries = []
        for key, sample in group(members, pattern, unused):
            captions = pick(sample, CAPTIONS)[:1]
            for image in pick(sample, IMAGES):
                caption = "", 0, 0
                if captions:
                    caption = captions.pop()
                elif self.needs_captions:
                    unused["without a caption"] += 1
                    continue
                keys.append(os.fsencode(key))
                entries.append((number, image, caption, sample.get("npy", ("npy", 0, 0))))
        return {
            "keys": np.array(keys, np.bytes_),
            "entries": np.array(entries, ENTRY),
            "unused": [json.dumps(unused).encode()],
        }

    def __len__(self):
        return len(self.index["entries"])

    def key(self, index):
        """The KEY of an image, in NFC, including its folders in the tar or below `path`."""
        return os.fsdecode(self.index["keys"][index])

    def split(self, name, validation, test, seed=0):
        """Indices of the split "train", "validation" or "test", see order.split_hashes."""
        index = flat.open_index(
            self.index.place.parent,
            [self.index.place.name, seed],
            1,
            lambda _: {"hashes": order.hash_keys(map(self.key, range(len(self))), seed)},
        )
        return order.split_hashes(index["hashes"], name, validation, test)

    def name(self, index, kind="image"):
        """Path, or "TAR: MEMBER", of the "image", "caption" or "embedding" of a sample."""
        entry = self.index["entries"][index]
        member = f"{self.key(index)}.{entry[kind]['extension'].decode()}"
        if self.tars:
            return f"{self.tars[entry['tar']]}: {member}"
        return f"{self.path}/{self.renamed.get(member, member)}"

    def read(self, index, kind):
        """The bytes of a sample's "image", "caption" or "embedding"; Unusable if unreadable."""
        entry = self.index["entries"][index]
        name = self.name(index, kind)
        path = self.tars[entry["tar"]] if self.tars else name
        with config.explained(f"{name}: cannot be read", Unusable), open(path, "rb") as file:
            file.seek(entry[kind]["offset"])
            return file.read(entry[kind]["size"])

    def image(self, index):
        """An image, uint8 (H, W, 3), from `decode_image`; Unusable if it is damaged."""
        return decode_image(self.read(index, "image"), self.name(index))

    def caption(self, index):
        """The caption of an image, or ""; Unusable if it is needed but damaged."""
        if not self.index["entries"][index]["caption"]["extension"]:
            return ""
        name = self.name(index, "caption")
        unreadable = contextlib.suppress(Exception)
        if self.needs_captions:
            unreadable = config.explained(f"{name}: no caption in it", Unusable)
        with unreadable:
            caption = files.decode_text(self.read(index, "caption"), name)
            if name.lower().endswith(".json"):
                caption = files.caption_in(json.loads(caption))
            return files.clean_caption(caption)
        return ""

    def texts(self, indices):
        """The captions of samples, without unusable ones. Images are not read."""
        texts = []
        for index in indices:
            with contextlib.suppress(Unusable):
                texts.append(self.caption(index))
        return texts


def find_tars(path):
    """List the tars at `path`: a tar, a folder (maybe without tars), or "A/{00000..00219}.tar"."""
    if path.is_dir():
        return sorted(path.glob("[!.]*.[tT][aA][rR]"))
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", str(path))
    if not braces:
        return [path]
    before, first, last, after = braces.groups()
    numbers = range(int(first), int(last) + 1)
    return [Path(f"{before}{number:0{len(first)}}{after}") for number in numbers]


def list_tar(tar, unused):
    """List [(name, offset, size)] of the files in a tar. UserError if it is damaged or not a tar.

    A link gets the offset and size of its target. Unresolved links and devices are only counted in
    `unused`.
    """
    members = []  # (name, place): place is (offset, size), or the target of a symbolic link
    places = {}  # {path: its last place}
    damaged = config.explained(
        f"{tar}: corrupt or truncated, or not a tar; expected uncompressed tars, or a folder of "
        "images"
    )
    with open(tar, "rb") as file, damaged, tarfile.open(fileobj=file, mode="r:") as archive:
        for each in archive:
            path = posixpath.normpath(each.name)
            place = None
            if each.isfile():
                place = each.offset_data, each.size
            elif each.islnk():  # a hard link, whose target comes before it
                place = places.get(posixpath.normpath(each.linkname))
            elif each.issym():
                target = posixpath.join(posixpath.dirname(path), each.linkname)
                place = posixpath.normpath(target)
            if not each.isdir():
                places[path] = place
                members.append((each.name, place))
        file.seek(archive.offset)
        if file.read(512) != bytes(512):  # tarfile stops at damage without an error
            raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")
    listing = []
    for name, place in members:
        place = places.get(place, place)  # resolve symbolic links
        if isinstance(place, tuple):
            listing.append((name, *place))
    unused["unresolved links or devices"] += len(members) - len(listing)
    return listing


def group(members, pattern, unused):
    """Yield samples (KEY, {lowercase extension: (extension, offset, size)}).

    KEY includes folders. members: (name, offset, size) of files. Names that do not match `pattern`,
    such as those of hidden files, are ignored. unused: a Counter of the files that are not used.

    Neighboring files with the same KEY and different extensions form a place. The places of a KEY
    are joined to one sample, because captions may be stored apart from images. But a place with an
    extension that the sample already has, or with a second image, begins a new sample, as in
    concatenated tars. As in tar, the last sample of a KEY counts: the last with image and caption,
    or else the last with an image.
    """
    places_of = collections.defaultdict(list)  # {KEY: its places}
    last = None  # KEY of the previous file
    for name, offset, size in members:
        match = re.fullmatch(pattern, files.nfc(name))
        if not match:
            continue
        key, extension = match.groups()
        kind = extension.lower() or "without an extension"
        places = places_of[key]
        if key != last or kind in places[-1]:
            places.append({})
        places[-1][kind] = extension, offset, size
        last = key

    for key, places in places_of.items():
        samples = [{}]
        for place in places:
            images = pick(place, IMAGES) and pick(samples[-1], IMAGES)
            if images or pick(place, samples[-1]):
                samples.append({})
            samples[-1].update(place)
        with_image = [each for each in samples if pick(each, IMAGES)]
        whole = [each for each in with_image if pick(each, CAPTIONS)]
        sample = (whole or with_image or samples)[-1]
        unused["duplicate names"] += len(samples) - 1
        unused.update(sample.keys() - USED)
        yield key, sample


def pick(sample, kinds):
    """The files of a sample with an extension in `kinds`, in the order of `kinds`."""
    return [sample[kind] for kind in kinds if kind in sample]


# Datasets of images


@dataclasses.dataclass(eq=False)
class Pictures(CaptionedImages):
    """A dataset of captioned images, cropped to squares, with embeddings of the whole images.

    Embeddings are KEY.npy, in the tars or beside the images, or img_emb_NNNNN.npy beside NNNNN.tar.
    For the latter, KEY must be NNNNN followed by the number of the row, as img2dataset writes it.
    `width` is D, or None without embeddings.

    `fetch` returns the usable samples as {"image": uint8 (n, size, size, 3), "image_embed": float32
    (n, D), "clip_image": uint8 (n, C, C, 3) if C = `clip_size` is not 0, "caption": list}. An image
    is cropped to the largest central square. With random bits, it is cropped to a random square of
    `crop_scale` to 1 times the area of that one, and mirrored with probability 0.5 if `flip`.
    "clip_image" is the same crop: a CLIP computes embeddings from it if none are stored.

    A sample is unusable if its embedding is missing, all zero or not finite, if its image is
    damaged or smaller than `size`, or if its caption is needed and cannot be read.
    """

    path: Path
    size: int
    clip_size: int = 0
    crop_scale: float = 1.0
    flip: bool = False
    needs_captions: bool = True
    index_dir: object = None

    def __post_init__(self):
        super().__init__(self.path, self.needs_captions, self.index_dir)
        self.beside = {}  # {NNNNN of a tar: path of its img_emb_NNNNN.npy}
        self.width = None
        sizes = self.index.scan("entries")["embedding"]["size"]
        inside = np.flatnonzero(sizes)[:100]
        for index in inside:  # the first embeddings may be damaged
            with contextlib.suppress(Unusable):
                self.width = len(self._embedding(index))
                break
        if len(inside) and not self.width:
            self._embedding(inside[0])  # raises Unusable with the reason
        if self.tars and not len(inside):
            self.beside = embeddings.shard_files(self.tars[0].parent, "img_emb", ".npy")
        for path in self.beside.values():
            self.width = embeddings.open_npy(path).shape[1]

    def _embedding(self, index):
        """The embedding of an image, float32 (D,); Unusable if it is missing or damaged."""
        name = self.name(index, "image" if self.beside else "embedding")
        row = 0
        with config.explained(f"{name}: no usable embedding", Unusable):
            if self.beside:
                tar = self.tars[self.index["entries"][index]["tar"]].stem
                # uint64, because a row of -1 would silently be the last row.
                row = np.uint64(posixpath.basename(self.key(index)).removeprefix(tar))
                table = embeddings.open_npy(self.beside[int(tar)])
            else:
                table = [np.load(io.BytesIO(self.read(index, "embedding")))]
        if row >= len(table):  # not Unusable: other rows may be wrong as well
            raise UserError(
                f"{name}: needs row {row} (from 0) of the {len(table)} embeddings beside its tar; "
                "expected a row for each number, also for missing images"
            )
        with config.explained(f"{name}: no usable embedding", Unusable):
            values = table[row].astype(np.float32)
            length = np.linalg.norm(values)
            if values.size != (self.width or values.size) or not 0 < length < np.inf:
                raise ValueError(
                    f"{values.size} numbers; expected {self.width}, finite and not all zero"
                )
            return values.ravel()

    def fetch(self, indices, random_bits=None):
        """Read samples in any order. They are augmented if there are random bits."""
        uniform = order.uniform(random_bits, len(indices), CENTRAL)
        samples = []
        usable = np.zeros(len(indices), bool)
        for i, index in enumerate(indices):
            with contextlib.suppress(Unusable):  # ChunkDataset replaces the sample
                samples.append(self._sample(index, uniform[i]))
                usable[i] = True
        batch = torch.utils.data.default_collate(samples) if samples else {}
        return batch, usable

    def _sample(self, index, uniform=CENTRAL):
        """Read a sample for `fetch`, or raise Unusable. uniform: four random numbers in [0, 1)."""
        image = self.image(index)
        area, down, right, mirror = uniform
        height, width, _ = image.shape
        side = min(height, width)
        if side < self.size:
            raise Unusable(
                f"{self.name(index)}: {width}x{height} pixels, smaller than "
                f"{self.size}; lower --image_size or remove it"
            )

        if self.crop_scale == 1:
            down = right = MIDDLE
        area = self.crop_scale + (1 - self.crop_scale) * area
        side = max(self.size, round(side * area**0.5))
        top = int(down * (height - side + 1))
        left = int(right * (width - side + 1))
        crop = torch.tensor(image[top : top + side, left : left + side])[None]  # (1, side, side, 3)
        if self.flip and mirror < 0.5:
            crop = crop.flip(2)
        sample = {
            "image": pixels.resize_uint8(crop, self.size, "box")[0],
            "caption": self.caption(index),
        }
        if self.width:
            sample["image_embed"] = torch.from_numpy(self._embedding(index))
        if self.clip_size:
            sample["clip_image"] = pixels.resize_uint8(crop, self.clip_size)[0]  # bicubic, for CLIP
        return sample

    def fault(self, index):
        """Why a sample is unusable, naming its file; "" if it is usable."""
        try:
            self._sample(index)
        except Unusable as error:
            return str(error)
        return ""

    def content_hash(self, index):
        return hash(self.read(index, "image"))

    def check(self):
        """See files.check_samples."""
        return files.check_samples(self)

    def fingerprint(self):
        """Values that change when the data change: rows, width, digest of names, sizes and tars."""
        paths = [*self.tars, *self.beside.values()]
        digest = hashlib.sha256(self.index.scan("keys"))
        digest.update(self.index.scan("entries"))
        digest.update(files.digest_of(paths).encode())
        return {"rows": len(self), "width": self.width, "digest": digest.hexdigest()[:16]}


class Shapes(embeddings.Embeddings):
    """The built-in captioned shapes, with the embeddings that embed.builtin_data writes.

    `fetch` returns {"image": uint8 (n, size, size, 3), "image_embed" (n, D), "text_embed" (n, D),
    "caption": list}. Images smaller than 32 pixels are drawn at 32 pixels, and averaged down. No
    image is cropped or flipped, because captions mention places. A record has "caption",
    "attributes", and "named", the names of the attributes that the caption mentions.
    """

    def __init__(self, folder, size, index_dir=None):
        super().__init__(folder, captions=True, index_dir=index_dir)
        self.size = size

    def fetch(self, indices, random_bits=None):
        batch, usable = super().fetch(indices)
        drawn, _ = synthetic.shapes(indices, size=max(self.size, 32))
        images = pixels.resize_uint8(torch.from_numpy(drawn), self.size, "box")
        return {"image": images, **batch}, usable


def caption_accuracy(dataset, indices, fake, real):
    """Return {metric: [True if an image shows everything that its caption mentions]}.

    fake, real: generated and real images, uint8 (B, H, H, 3), of the samples `indices`. Returns
    {} unless `dataset` is the built-in one and H is a multiple of 16.
    """
    # The classifier averages images to 16x16 pixels.
    if not isinstance(dataset, Shapes) or real.shape[1] % 16:
        return {}
    records = dataset.records(indices)
    return {
        "caption_accuracy": synthetic.is_correct(fake.cpu().numpy(), records).tolist(),
        "caption_accuracy_ceiling": synthetic.is_correct(real.cpu().numpy(), records).tolist(),
    }
