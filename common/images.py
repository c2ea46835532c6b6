"""Captioned images: of the user, in tars or folders, with embeddings beside, and the built-in shapes.

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
ENTRY = np.dtype([("file", np.int32), ("suffix", np.uint8), ("in_json", bool), ("image", np.int64, 2),
                  ("caption", np.int64, 2), ("embedding", np.int64, 2)])  # the last three: offset and size, -1 if none
PARTS = ("train", "validation", "test")
BUILTIN_ROWS = 25_000  # of the captioned shapes
CACHED = 2 ** 27  # bytes of drawn shapes that are kept


class Unusable(UserError):
    """A sample that cannot be used, with the reason; training goes on with the next one."""


def decode_image(content, name):
    """The image file `content` (bytes) as uint8 RGB (H, W, 3). PNG needs nothing; the rest Pillow."""
    try:
        if name.lower().endswith(".png"):
            try:
                image = media.read_png(io.BytesIO(content))
                image = image.reshape(*image.shape[:2], -1)  # gray, gray and alpha, RGB or RGBA
                return np.ascontiguousarray(image[..., :3] if image.shape[2] > 2 else image[..., :1].repeat(3, -1))
            except ValueError:
                if importlib.util.find_spec("PIL") is None:
                    raise  # else Pillow may know: palettes, 16 bits, interlacing
        Image = need("PIL.Image", f"{name}: reading {Path(name).suffix} images", "pillow")
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # Pillow meets a damaged file with any of a dozen types
        reason = str(error).partition(" <")[0]  # without the address of an object
        raise Unusable(f"{name}: not a readable image ({reason})") from error


# Where everything lies

class CaptionedImages:
    """Images with captions: a tar, a folder of tars (KEY.jpg|png|webp + KEY.txt or KEY.json), or a folder of images.

    Tars are indexed once and then read at random. [i] -> (image uint8 (H, W, 3), caption, key); images without a
    caption are left out and counted in `uncaptioned`. `shards` ("0-99,120") takes only the tars of these numbers.
    Files are opened anew for each read and a row of the index is 54 bytes and its key, so that a million images fit
    into any memory and the index into any worker.
    """

    def __init__(self, path, shards=""):
        self.path = Path(path)
        if not self.path.exists():
            raise UserError(f"{path}: no such file or folder; expected .tar files or images in it")
        self.tars = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        if shards:
            self.tars = _chosen(self.path, self.tars, shards)
        self.uncaptioned, self.suffixes = 0, []
        if self.tars:
            parts = [self._index(file, _members(tar)) for file, tar in enumerate(self.tars)]
        else:
            kinds = (*IMAGES, ".txt", ".json", ".npy")
            files = (p for p in sorted(self.path.rglob("*")) if p.suffix.lower() in kinds and p.is_file())
            parts = [self._index(-1, {str(p.relative_to(self.path)): (0, p.stat().st_size) for p in files})]
        self.keys, self.entries = (np.concatenate(arrays) for arrays in zip(*parts))
        if not len(self):
            raise UserError(f"{path}: no captioned images found ({self.uncaptioned} without a caption); expected "
                            "KEY.jpg, .png or .webp with KEY.txt beside it, in .tar files or loose")

    def _index(self, file, members):
        """Keys (n,) and entries (n,) of {name: (offset, size)}, the members of the tar number `file`."""
        stems = {name.rpartition(".")[0]: name for name in members
                 if Path(name).suffix.lower() in IMAGES and not Path(name).name.startswith(".")}
        entries, keys = np.empty(len(stems), ENTRY), []
        for stem, name in stems.items():
            text, description = members.get(stem + ".txt"), members.get(stem + ".json")
            if text is None and description is None:
                self.uncaptioned += 1
                continue
            if (suffix := name[len(stem):]) not in self.suffixes:
                self.suffixes.append(suffix)
            entries[len(keys)] = (file, self.suffixes.index(suffix), text is None, members[name], text or description,
                                  members.get(stem + ".npy", (-1, -1)))
            keys.append(stem.encode(errors="surrogateescape"))  # as Python reads names that are no UTF-8
        return np.array(keys, np.bytes_), entries[:len(keys)]

    def __len__(self):
        return len(self.entries)

    def key(self, i):
        """The name without suffix of image `i`, with folders within the tar or below `path`."""
        return self.keys[i].decode(errors="surrogateescape")

    def name(self, i, suffix=None):
        """Tar and member, or file, of image `i` (or of what lies beside it, with `suffix`), for messages."""
        name = self.key(i) + (suffix or self.suffixes[self.entries[i]["suffix"]])
        return f"{self.tars[self.entries[i]['file']]}: {name}" if self.tars else str(self.path / name)

    def read(self, i, part):
        """The bytes of one part of image `i`: "image", "caption" (.txt or .json) or "embedding" (.npy)."""
        entry = self.entries[i]
        if self.tars:
            path = self.tars[entry["file"]]
        else:
            suffix = {"image": self.suffixes[entry["suffix"]], "embedding": ".npy",
                      "caption": ".json" if entry["in_json"] else ".txt"}[part]
            path = self.path / (self.key(i) + suffix)
        return _read(path, *map(int, entry[part]))

    def caption(self, i):
        text = self.read(i, "caption").decode("utf-8", errors="replace").strip()
        if self.entries[i]["in_json"]:
            try:
                text = str(json.loads(text)["caption"] or "")
            except (ValueError, KeyError, TypeError) as error:
                raise Unusable(f"{self.name(i, '.json')}: no entry 'caption' in it") from error
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
    digits = re.search(r"(\d+)$", tar.name.removesuffix(".tar"))
    if not digits:
        raise UserError(f"{tar}: no shard number at the end of its name; expected one such as 00012.tar")
    return int(digits[1])


def _chosen(path, tars, shards):
    """Those of the `tars` whose numbers are in `shards`: numbers and ranges, such as "0-99,120"."""
    ranges = []
    for piece in shards.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"--shards {shards}: {piece.strip()!r} is no number and no range of numbers; expected "
                            "such as 0-99,120")
        ranges.append((int(found[1]), int(found[2] or found[1])))
    if not tars:
        raise UserError(f"--shards {shards}: there are no tars in {path} to choose from; leave it out")
    numbers = [_number(tar) for tar in tars]
    chosen = [tar for tar, n in zip(tars, numbers) if any(first <= n <= last for first, last in ranges)]
    if not chosen:
        raise UserError(f"--shards {shards}: none of the {len(tars)} tars in {path}, which are numbered "
                        f"{min(numbers)} to {max(numbers)}, is among them")
    return chosen


def _read(path, offset, size):
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(size)
    except OSError as error:  # not the fault of a sample, as it was there when it was indexed
        raise UserError(f"{path}: was there at the start and cannot be read now ({error.strerror})") from error
    if len(content) != size:
        raise UserError(f"{path}: shorter than it was at the start; leave data as they are while a run reads them")
    return content


# The user's

class Pictures:
    """Captioned images as square pictures, with the embeddings that lie with them.

    Embeddings are looked for in the folder `embeddings` (img_emb_NNNNN.npy for NNNNN.tar; the row is the last
    `index_width` digits of a key), else inside the tars or beside loose images (KEY.npy), else beside the tars
    (img_emb_NNNNN.npy); where there are none, `width` is None. They are of the whole picture, however it is cropped.

    fetch(rows, draws) -> ({"image": uint8 (n, size, size, 3), "image_embed": float32 (n, D), "clip_image": uint8
    (n, C, C, 3) if C = `clip_size` is given, "caption": list}, good (n,)). Without draws it is the central square.
    With draws, a number a sample that all that is random is made from, it is a square of a share of that area
    between `crop_scale` and 1 at a random place (`crop_scale` 1: the central square), half of them mirrored if
    `flip`. A row is not good if its embedding is missing, all zero or not finite, or its image damaged or smaller
    than `size`; `fault` says which.
    """

    def __init__(self, path, size, embeddings="", index_width=4, shards="", clip_size=0, crop_scale=1.0, flip=False,
                 resize="bicubic"):
        if not 0 < crop_scale <= 1:
            raise UserError(f"--crop_scale {crop_scale}: expected a share of the area above 0 and at most 1")
        if resize not in media.RESIZE_MODES:
            raise UserError(f"--resize {resize}: expected one of {', '.join(media.RESIZE_MODES)}")
        self.images, self.size, self.clip_size = CaptionedImages(path, shards), size, clip_size
        self.crop_scale, self.flip, self.resize, self.augments = crop_scale, flip, resize, crop_scale < 1 or flip
        self.tables, self.width, self.parts = None, None, {}
        inside = np.flatnonzero(self.images.entries["embedding"][:, 1] >= 0)
        tars = self.images.tars
        if embeddings and not tars:
            raise UserError(f"--embeddings {embeddings}: matched by the numbers of tars, but {path} holds loose "
                            "images; put KEY.npy beside each image instead")
        if not embeddings and not len(inside) and tars and any(tars[0].parent.glob("img_emb_*.npy")):
            embeddings = tars[0].parent
        if embeddings:
            self.tables = _tables(self.images, Path(embeddings))
            self.width = self.tables[0][3]
            self.places = self._places(index_width)
        elif len(inside):
            self.width = self._width(inside[:100])

    def _places(self, index_width):
        """The row (n,) of each image's embedding in the file of its tar."""
        if not 1 <= index_width <= 9:
            raise UserError(f"--index_width {index_width}: expected 1 to 9, how many last digits of a key are the row")
        places, digits = np.empty(len(self), np.int64), re.compile(rf"\d{{{index_width}}}$")
        for row in range(len(self)):
            if not (found := digits.search(self.images.key(row))):
                raise UserError(f"{self.name(row)}: its key does not end in {index_width} digits, the row of its "
                                "embedding; set --index_width to the digits that count within a tar")
            places[row] = int(found[0])
        tables = self.images.entries["file"] * np.int64(10 ** index_width) + places
        order = np.argsort(tables, kind="stable")
        if len(twice := np.flatnonzero(np.diff(tables[order]) == 0)):
            first, second = sorted(order[twice[0]:twice[0] + 2])
            raise UserError(f"{self.name(first)} and {self.images.key(second)}: the same row {places[first]} of "
                            f"{self.tables[self.images.entries[first]['file']][0]}; --index_width {index_width} is "
                            "not how many digits count within a tar")
        return places

    def _width(self, rows):
        """How wide the first usable one of the embeddings within the tars or beside the images is."""
        faults = []
        for row in map(int, rows):
            try:
                return len(self._embedding(row))
            except Unusable as error:
                faults.append(error)
        raise UserError(f"{self.images.path}: none of the first {len(faults)} embeddings is usable: {faults[0]}")

    def _embedding(self, row):
        """The embedding (D,) of one row in float32."""
        if self.tables:
            path, dtype, start, width, rows = self.tables[self.images.entries[row]["file"]]
            place = int(self.places[row])
            what = f"{self.name(row)}: row {place} of {path}, its embedding,"
            if place >= rows:
                raise Unusable(f"{what} is not among the {rows} there; are --index_width digits its row in it?")
            values = np.frombuffer(_read(path, start + place * width * dtype.itemsize, width * dtype.itemsize), dtype)
        else:
            what = f"{self.images.name(row, '.npy')}: this embedding"
            if self.images.entries[row]["embedding"][1] < 0:
                raise Unusable(f"{what} is missing")
            try:
                values = np.load(io.BytesIO(self.images.read(row, "embedding")), allow_pickle=False)
                values = values[0] if values.ndim == 2 and len(values) == 1 else values
                shape, kind = values.shape, values.dtype
            except Exception as error:  # numpy meets a damaged file with any of a dozen types
                raise Unusable(f"{what} is not a readable .npy file ({error})") from error
            if kind not in (np.float16, np.float32) or len(shape) != 1 or shape != (self.width or len(values),):
                raise Unusable(f"{what} is {kind} of shape {shape}; expected float16 or float32 of shape "
                               f"({self.width or 'width'},)")
        with np.errstate(over="ignore", invalid="ignore"):
            energy = np.square(values := values.astype(np.float32)).sum()
        if not np.isfinite(energy) or energy == 0:
            raise Unusable(f"{what} is {'all zero' if energy == 0 else 'not finite'}")
        return values

    def __len__(self):
        return len(self.images)

    def name(self, row):
        """Tar and member, or file, of a row, for messages."""
        return self.images.name(row)

    def split(self, part, validation, test):
        """The rows (int64, ascending) of "train", "validation" or "test", by a hash of their keys, taken once."""
        if (validation, test) not in self.parts:
            parts = (data.part_of(self.images.key(row), validation, test) for row in range(len(self)))
            self.parts[validation, test] = np.fromiter(map(PARTS.index, parts), np.uint8, len(self))
        return np.flatnonzero(self.parts[validation, test] == PARTS.index(part))

    def fetch(self, rows, draws=None):
        """Read `rows` (n,) in any order, augmented by `draws` (n,), if given."""
        shapes = {"image": (self.size, self.size, 3), "clip_image": (self.clip_size, self.clip_size, 3)}
        batch = {name: torch.zeros(len(rows), *shape, dtype=torch.uint8) for name, shape in shapes.items() if shape[0]}
        if self.width:
            batch["image_embed"] = torch.zeros(len(rows), self.width)
        batch["caption"], good = [""] * len(rows), np.ones(len(rows), bool)
        uniform = [None] * len(rows) if draws is None else data.uniform(draws, 4)
        for i, row in enumerate(map(int, rows)):
            try:
                for name, value in self._sample(row, uniform[i]).items():
                    batch[name][i] = value
            except Unusable:
                good[i] = False
        return batch, good

    def _sample(self, row, uniform=None):
        """What `fetch` gives of one row, from four numbers in [0, 1) or None; raises Unusable."""
        sample = {"image_embed": torch.from_numpy(self._embedding(row))} if self.width else {}
        image, sample["caption"], _ = self.images[row]
        height, width, _ = image.shape
        if (side := min(height, width)) < self.size:
            raise Unusable(f"{self.name(row)}: {width}x{height} pixels, smaller than the {self.size} asked for; lower "
                           "--image_size or remove it")
        top, left = (height - side) // 2, (width - side) // 2
        if uniform is not None and self.crop_scale < 1:
            side = max(self.size, round(side * (self.crop_scale + (1 - self.crop_scale) * uniform[0]) ** 0.5))
            top, left = int(uniform[1] * (height - side + 1)), int(uniform[2] * (width - side + 1))
        crop = image[top:top + side, left:left + side]
        if uniform is not None and self.flip and uniform[3] < 0.5:
            crop = crop[:, ::-1]
        crop = torch.from_numpy(crop.copy())
        sample["image"] = media.resize_bytes(crop[None], self.size, self.resize)[0]
        if self.clip_size:
            sample["clip_image"] = media.resize_bytes(crop[None], self.clip_size)[0]  # bicubic, as CLIP was trained
        return sample

    def fault(self, row):
        """What is wrong with an unusable row, after its name; just its name if nothing is."""
        try:
            self._sample(int(row))
        except Unusable as error:
            return str(error)
        return self.name(row)

    def check(self, embeddings=10_000, images=256):
        """(unusable, looked at, what is wrong with the first): looks at evenly spaced rows before training.

        UserError if more than 1 in 100 embeddings are unusable, most images are, or there is no Pillow for them.
        """
        bad, looked = {}, set()
        looks = (("embedding", self._embedding, embeddings * bool(self.width), data.BAD_SHARE),
                 ("image", self._sample, images, 0.5))
        for kind, look, most, share in looks:
            rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64)).tolist()
            faults = {}
            for row in rows:
                try:
                    look(row)
                except Unusable as error:
                    faults[row] = str(error)
            if len(faults) > share * len(rows):
                raise UserError(f"{self.images.path}: {len(faults)} of {len(rows)} rows have no usable {kind}, more "
                                f"than {'1 in 100' if kind == 'embedding' else 'half'}: {next(iter(faults.values()))}")
            bad, looked = bad | faults, looked | set(rows)
        return len(bad), len(looked), list(bad.values())[:5]

    def fingerprint(self):
        """Plain facts that change when the data does: rows, width, and a digest of keys and of all places and sizes."""
        digest = hashlib.sha256(b"\n".join(self.images.keys.tolist()))
        for part in ("image", "caption", "embedding"):
            digest.update(self.images.entries[part].tobytes())
        for path, dtype, _, _, rows in self.tables or ():
            digest.update(f"{path.name} {dtype} {rows}\n".encode())
        return {"rows": len(self), "width": self.width, "digest": digest.hexdigest()[:16]}


def _tables(images, folder):
    """For each tar (path, dtype, offset of the first row, width, rows) of the embeddings in `folder`, by number."""
    files, tables, numbers = data.shard_files(folder, ".npy", prefix="img_emb_"), [], {}
    for tar in images.tars:
        if (number := _number(tar)) not in files:
            raise UserError(f"{tar}: no embeddings for it; expected img_emb_{number:05d}.npy in {folder}")
        if number in numbers:
            raise UserError(f"{tar}: the same shard number as {numbers[number].name}; remove one of them")
        numbers[number] = tar
        array = data.open_array(files[number], 2)
        if not array.flags.c_contiguous:
            raise UserError(f"{files[number]}: stored column by column (Fortran order); expected row by row; save "
                            "np.ascontiguousarray of it")
        if tables and array.shape[1] != tables[0][3]:
            raise UserError(f"{files[number]}: {array.shape[1]} wide, but {tables[0][0].name} is {tables[0][3]}; all "
                            "must come from one CLIP")
        tables.append((files[number], array.dtype, array.offset, array.shape[1], len(array)))
    return tables


# The built-in ones

class Shapes:
    """The built-in captioned shapes, with their embeddings in `folder`, as clip.builtin_data writes them.

    fetch(rows) -> ({"image": uint8 (n, size, size, 3), "image_embed" (n, D), "text_embed" (n, D), "caption"}, good).
    Those below 32 pixels are the 32-pixel ones averaged over boxes; from there on they are drawn at `size`.
    """

    augments = False  # no crops and no mirror images, as captions name places

    def __init__(self, folder, size):
        self.embeddings, self.size, self.drawn = data.Embeddings(folder, captions=True), size, None
        self.folder, self.width = folder, self.embeddings.width

    def __reduce__(self):
        """Opens and draws anew in a worker that is not forked, rather than be sent all pictures."""
        return Shapes, (self.folder, self.size)

    def __len__(self):
        return len(self.embeddings)

    def split(self, part, validation, test):
        """The rows of "train", "validation" or "test"."""
        return data.Split(len(self), part, validation, test)

    def _draw(self, rows):
        pixels = torch.from_numpy(synthetic.shapes(rows, size=max(self.size, 32))[0])
        return media.resize_bytes(pixels, self.size, "area").numpy()

    def pictures(self, rows):
        """uint8 (n, size, size, 3); small ones are kept once they are drawn, which takes 40 us each."""
        if len(self) * self.size ** 2 * 3 > CACHED:
            return self._draw(rows)
        if self.drawn is None:
            self.drawn, self.cache = np.zeros(len(self), bool), np.empty((len(self), self.size, self.size, 3), np.uint8)
        if len(new := np.unique(rows[~self.drawn[rows]])):
            self.cache[new], self.drawn[new] = self._draw(new), True
        return self.cache[rows]

    def fetch(self, rows, draws=None):
        """Read `rows` (n,) in any order."""
        batch, good = self.embeddings.fetch(rows)
        return {"image": torch.from_numpy(self.pictures(np.asarray(rows))), **batch}, good

    def records(self, rows):
        """A record for each of `rows` (n,): its "caption", all "attributes", and those that the caption "named"."""
        return self.embeddings.captions.records(rows)

    def name(self, row):
        return self.embeddings.name(row)

    def check(self):
        """(unusable, looked at, names of the first); UserError if there are many."""
        return self.embeddings.check_rows()

    def fingerprint(self):
        """Plain facts that change when the data does."""
        return self.embeddings.fingerprint()


class Recolored:
    """The built-in shapes all in one of synthetic.NEW_COLORS, for a CLIP that takes `clip_size` pixels to embed."""

    augments, width = False, None

    def __init__(self, color, size, clip_size):
        if color not in synthetic.NEW_COLORS:
            raise UserError(f"--data shapes:{color}: no such new color; expected one of "
                            f"{', '.join(synthetic.NEW_COLORS)}")
        self.color, self.size, self.clip_size = color, size, clip_size

    def __len__(self):
        return BUILTIN_ROWS

    def split(self, part, validation, test):
        """The rows of "train", "validation" or "test"."""
        return data.Split(len(self), part, validation, test)

    def fetch(self, rows, draws=None):
        """({"image": uint8 (n, size, size, 3), "clip_image": uint8 (n, C, C, 3), "caption"}, good (n,))."""
        pictures, records = synthetic.shapes(rows, size=max(self.size, self.clip_size, 32), color=self.color)
        image, clip_image = (media.resize_bytes(torch.from_numpy(pictures), size, "area")
                             for size in (self.size, self.clip_size))
        captions = [record["caption"] for record in records]
        return {"image": image, "clip_image": clip_image, "caption": captions}, np.ones(len(rows), bool)

    def records(self, rows):
        return synthetic.shapes(rows, color=self.color)[1]

    def name(self, row):
        return f"{self.color} shape {row}"

    def check(self):
        return 0, 0, []

    def fingerprint(self):
        return {"rows": len(self), "color": self.color}
