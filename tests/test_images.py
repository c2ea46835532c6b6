"""Captioned images in tars and folders, their embeddings, and the built-in shapes."""
import io
import json
import os
import pickle
import re
import sys
import tarfile

import numpy as np
import pytest
import torch
from helpers import write_files
from numpy.testing import assert_array_equal

from common import order
from common.config import UserError
from common.data import images, media, synthetic
from common.data.embeddings import write_shards
from common.data.files import Unusable
from common.models import pixels


def picture(number):
    shape = (8, 8 + number % 3, 3)
    return np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)


def ramp(height, width):
    """An image whose pixels encode their positions."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, np.full_like(y, 7)], -1).astype(np.uint8)


def members(numbers):
    """Files as img2dataset names them: {name: bytes}."""
    files = {}
    for i in numbers:
        files[f"{i:09d}.png"] = media.png(picture(i))
        files[f"{i:09d}.txt"] = f" caption {i} ü\n".encode()
        files[f"{i:09d}.json"] = json.dumps({"caption": "of the json", "key": i}).encode()
    return files


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


# Images and captions

@pytest.mark.parametrize("extra", [{}, {"a.json": b'{"url": "x"}', "b.json": b'{"caption": null}'}])
def test_without_a_caption_all_images_are_taken_where_none_is_needed(extra, tmp_path):
    image = media.png(ramp(8, 8))
    write_tar(tmp_path / "0.tar", {"a.png": image, "b.png": image, **extra})
    dataset = images.Pictures(tmp_path, 8, needs_captions=False)
    batch, usable = dataset.fetch(range(2))
    assert usable.all()
    assert batch["caption"] == dataset.texts(range(2)) == ["", ""]


def test_a_place_without_captioned_images_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar", {"a.tiff": b"", "b.txt": b"alone", ".c.png": b"", ".c.txt": b""})
    with pytest.raises(UserError, match=r"a\.tar: no such folder, or no captioned images"):
        images.CaptionedImages(tmp_path / "a.tar")


def encoded(image, kind="png", **settings):
    """Encode a Pillow or numpy image in the file format `kind` (bytes)."""
    Image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(stream, kind, **settings)
    return stream.getvalue()


@pytest.mark.parametrize("kind, mode, loss", [
    ("png", "RGBA", 0),
    ("jpeg", "RGB", 10),
    ("webp", "RGB", 10),
])
def test_an_image_of_any_kind_comes_as_rgb(kind, mode, loss):
    Image = pytest.importorskip("PIL.Image")
    smooth = Image.radial_gradient("L").resize((16, 16)).convert(mode)
    image = images.decode_image(encoded(smooth, kind), "a")
    difference = np.subtract(image, smooth.convert("RGB"), dtype=int)
    assert np.abs(difference).max() <= loss


def test_an_image_is_turned_upright_as_its_exif_says():
    exif = pytest.importorskip("PIL.Image").Exif()
    exif[0x0112] = 6  # the first row of pixels must appear on the right
    pixels = ramp(8, 12)
    image = images.decode_image(encoded(pixels, exif=exif), "a.png")
    assert_array_equal(image, np.rot90(pixels, -1))


WHITE = [255, 255, 255]


def decoded(pixels, dtype=np.uint8, **settings):
    """The decoded pixels of a PNG file with one row."""
    content = encoded(np.array([pixels], dtype), **settings)
    return images.decode_image(content, "a.png")[0].tolist()


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "iCCP"])
def test_a_png_with_a_long_text_or_profile_is_read(kind):
    """Image tools store their workflows in such texts."""
    PngImagePlugin = pytest.importorskip("PIL.PngImagePlugin")
    info = PngImagePlugin.PngInfo()
    text = "workflow " * 200_000
    settings = {"pnginfo": info}
    if kind == "iCCP":
        settings = {"icc_profile": text.encode()}
    elif kind == "iTXt":
        info.add_itxt("prompt", text, zip=True)
    else:
        info.add_text("prompt", text, zip=True)
    content = encoded(ramp(8, 8), **settings)
    assert kind.encode() in content
    assert_array_equal(images.decode_image(content, "a.png"), ramp(8, 8))


def test_16_bits_become_8():
    assert decoded([0, 1000, 32896, 65535], np.uint16) == [[0] * 3, [4] * 3, [128] * 3, WHITE]


def test_what_is_transparent_is_white_whatever_color_hides_there():
    colors = [[255, 0, 0, 255], [255, 0, 0, 0], [255, 0, 0, 128]]
    assert decoded(colors) == [[255, 0, 0], WHITE, [255, 127, 127]]
    assert decoded([[7, 255], [7, 0]]) == [[7] * 3, WHITE]
    # One color, gray or RGB, marks transparent pixels.
    assert decoded([7, 8], transparency=7) == [WHITE, [8] * 3]
    assert decoded([[1, 2, 3], [4, 5, 6]], transparency=(1, 2, 3)) == [WHITE, [4, 5, 6]]


# Captions of every kind

@pytest.mark.parametrize("name, text, caption", [
    ("x.txt", " größer als 三角形\n", "größer als 三角形"),
    ("x.JSON", '{"caption": "größer als 三角形"}', "größer als 三角形"),
    ("x.json", '{"text": "a"}', "a"),
])
def test_a_caption_is_a_text_or_in_a_json(name, text, caption, tmp_path):
    write_files(tmp_path, {"x.png": media.png(picture(0)), name: text.encode("utf-8-sig")})
    assert images.CaptionedImages(tmp_path).caption(0) == caption


@pytest.mark.parametrize("content", [
    b"{", b"[]", b"{}", b'{"caption": [1]}', b"[" * 100_000, b'{"url": "no caption in it"}',
])
def test_a_json_without_a_caption_is_unusable_by_name(content, tmp_path):
    write_files(tmp_path, {"x.png": media.png(picture(0)), "x.json": content})
    found = ".*but url" if b"url" in content else ""
    with pytest.raises(Unusable, match=rf"x\.json: no caption in it{found}"):
        images.CaptionedImages(tmp_path).caption(0)


# Layouts

@pytest.mark.parametrize("pattern", ["{00000..00002}.tar", ""])
def test_tars_may_be_a_range_or_a_folder(pattern, tmp_path):
    extension = "tar" if pattern else "TAR"
    for number in range(3):
        write_tar(tmp_path / f"{number:05d}.{extension}", members([number]))
    dataset = images.CaptionedImages(tmp_path / pattern)
    assert [dataset.key(i) for i in range(len(dataset))] == [f"{i:09d}" for i in range(3)]


def test_a_link_in_a_tar_is_the_file_that_it_names_and_others_are_counted(tmp_path, capsys):
    """Tars store a file's second name as a link. Symbolic links may precede their targets."""
    write_files(tmp_path / "set", {"b.png": b"picture b", "b.txt": b"text", "x/y.txt": b"deep"})
    for name, target in {"a.png": "b.png", "c.png": "./b.png", "d.png": "x/../b.png",
                         "x/e.png": "../b.png", "x/e.txt": "y.txt", "f.png": "/etc/passwd",
                         "g.png": "gone.png", "h.png": "h.png"}.items():
        (tmp_path / "set" / name).symlink_to(target)
    for name in ("a", "c", "d", "z"):
        (tmp_path / f"set/{name}.txt").hardlink_to(tmp_path / "set/b.txt")
    (tmp_path / "set/z.png").hardlink_to(tmp_path / "set/b.png")
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        archive.add(tmp_path / "set", ".")
    dataset = images.CaptionedImages(tmp_path)
    found = {dataset.key(i): (dataset.read(i, "image"), dataset.caption(i))
             for i in range(len(dataset))}
    expected = {f"./{name}": (b"picture b", "text") for name in "abcdz"}
    assert found == expected | {"./x/e": (b"picture b", "deep")}
    assert "skipped 3 unresolved links or devices" in capsys.readouterr().err


@pytest.mark.parametrize("name, message", [
    ("{00000..00001}.tar", r"00001\.tar"),
    ("0.tar.gz", r"0\.tar\.gz: corrupt .* or not a tar; expected uncompressed tars"),
    ("metadata.csv", r"metadata\.csv: corrupt .* or not a tar; expected uncompressed tars"),
])
def test_what_is_no_tar_is_named(name, message, tmp_path):
    write_tar(tmp_path / "00000.tar", members([0]))
    write_files(tmp_path, {"0.tar.gz": b"", "metadata.csv": b""})
    with pytest.raises((UserError, OSError), match=message):
        images.CaptionedImages(tmp_path / name)


@pytest.mark.parametrize("write, path", [(write_files, "folder"), (write_tar, "0.tar")])
def test_names_with_accents_in_either_form_of_unicode_are_one_key(write, path, tmp_path):
    image = media.png(picture(0))
    names = ["u\u0308/a\u0308.png", "u\u0308/\xe4.txt", "\xf6.png", "o\u0308.txt"]
    write(tmp_path / path, dict(zip(names, [image, b"one", image, b"two"])))
    dataset = images.Pictures(tmp_path / path, 8)
    batch, usable = dataset.fetch(range(2))
    assert usable.all()
    captions = {dataset.key(i): caption for i, caption in enumerate(batch["caption"])}
    assert captions == {"\xfc/\xe4": "one", "\xf6": "two"}


@pytest.mark.parametrize("write, path, keys, unused", [
    (write_files, "folder", ["a", "c.d"], "2 gif, 1 without a caption"),
    (write_tar, "0.tar", ["a"], "1 d.png, 1 d.txt, 2 gif, 1 without a caption"),
])
def test_files_that_are_not_used_are_counted_and_a_key_ends_at_the_last_dot_in_tars_at_the_first(
        write, path, keys, unused, tmp_path, capsys):
    image = media.png(picture(0))
    files = {"a.PNG": image, "a.txt": b"a", "a.npy": b"", "b.png": image, "c.d.png": image,
             "c.d.txt": b"c", "d.gif": b"", "e/f.gif": b"", "e/.hidden.bmp": b""}
    write(tmp_path / path, files)
    dataset = images.CaptionedImages(tmp_path / path)
    assert [dataset.key(i) for i in range(len(dataset))] == keys
    assert capsys.readouterr().err == f"note: {tmp_path / path}: skipped {unused}\n"


JOINED = "a.jpg a.txt b.txt b.jpg "


@pytest.mark.parametrize("names, pairs", {  # positions of each image and its caption
    JOINED + "a.jpg a.txt": "32 45",
    JOINED + "a.json a.png a.txt": "32 56",
    "a.jpg b.jpg a.webp a.txt b.txt": "14 23",  # a.jpg lacks its caption
    JOINED + "a.txt": "01 32",
    JOINED + "a.webp b.txt": "01 32",
    JOINED + "a.jpg c.jpg a.txt c.txt": "32 46 57",
    JOINED + "b.jpg a.jpg b.txt a.txt": "46 57",  # b.jpg ends one part and begins the next
    JOINED + "d.jpg a.jpg d.txt e.txt": "01 32 46",
    "a.txt b.jpg b.txt c.jpg c.txt a.jpg a.txt": "12 34 56",
    "a.jpg b.jpg LICENSE c.jpg LICENSE a.txt b.txt c.txt": "05 16 37",
    "a.jpg a.jpg a.txt b.txt b.jpg b.jpg c.jpg c.txt": "12 43 67",
}.items())
def test_of_a_name_that_comes_again_in_a_tar_the_last_picture_counts_with_the_caption_of_its_place(
        names, pairs, tmp_path, capsys):
    for place, name in enumerate(names.split()):
        write_tar(tmp_path / "0.tar", {name: f"{place}".encode()}, "a")
    dataset = images.CaptionedImages(tmp_path)
    found = [dataset.read(i, "image").decode() + dataset.caption(i) for i in range(len(dataset))]
    assert " ".join(sorted(found)) == pairs
    note = capsys.readouterr().err
    assert " duplicate names" in note
    assert (", 1 without an extension" in note) == ("LICENSE" in names)


def test_of_a_name_that_comes_again_without_a_caption_the_last_picture_counts(tmp_path):
    names = "a.jpg a.npy b.jpg a.npy"
    for place, name in enumerate(names.split()):
        write_tar(tmp_path / "0.tar", {name: f"{place}".encode()}, "a")
    dataset = images.CaptionedImages(tmp_path, needs_captions=False)
    assert [dataset.read(i, "image") for i in range(len(dataset))] == [b"0", b"2"]


def test_a_tar_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, *words):
        if str(path).endswith(".tar"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *words)

    read = open
    write_tar(tmp_path / "0.tar", {})
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError, match=r"0\.tar"):
        images.CaptionedImages(tmp_path)


@pytest.mark.parametrize("size", [4000, 5120])  # cut within a file, and between two files
@pytest.mark.parametrize("rest", [b"", b"?" * 5120])
def test_a_damaged_tar_is_refused_by_name(size, rest, tmp_path):
    path = tmp_path / "00000.tar"
    write_tar(path, {f"{i}.png": bytes(512) for i in range(9)})
    path.write_bytes(path.read_bytes()[:size] + rest)
    with pytest.raises(UserError, match=r"00000\.tar: corrupt or truncated, or not a tar"):
        images.CaptionedImages(tmp_path)


# The index

def opened(path, index_dir=None, **settings):
    """What an index determines: names, captions, contents and splits."""
    dataset = images.CaptionedImages(path, index_dir=index_dir, **settings)
    rows = range(len(dataset))
    splits = []
    for name in order.SPLITS:
        indices = dataset.split(name, 0.2, 0.1, seed=3)
        splits.append(indices[np.arange(len(indices))].tolist())
    return [
        [(dataset.key(i), dataset.name(i), dataset.caption(i)) for i in rows],
        [dataset.read(i, "image") for i in rows],
        splits,
    ]


def write_any(write, path):
    """Write images, some with accents in their names, and files to skip."""
    files = {"u\u0308.png": b"1", "u\u0308.txt": b"text", "o.png": b"2", "o.gif": b"3"}
    write(path, members(range(5)) | files)


@pytest.mark.parametrize("write, name", [(write_files, "set"), (write_tar, "0.tar")])
def test_a_second_start_reads_the_index_alone_and_finds_and_notes_the_same(
        write, name, tmp_path, monkeypatch, capsys):
    write_any(write, tmp_path / name)
    fresh = opened(tmp_path / name)
    note = capsys.readouterr().err
    assert "skipped 1 gif, 1 without a caption" in note
    assert opened(tmp_path / name, tmp_path / "index") == fresh
    capsys.readouterr()
    monkeypatch.setattr(images, "group", None)  # indexing again would fail
    monkeypatch.setattr(order, "hash_keys", None)
    assert opened(tmp_path / name, tmp_path / "index") == fresh
    assert capsys.readouterr().err == note


@pytest.mark.parametrize("write, name", [(write_files, "set"), (write_tar, "0.tar")])
def test_changed_pictures_are_indexed_anew(write, name, tmp_path):
    write_any(write, tmp_path / name)
    before = opened(tmp_path / name, tmp_path / "index")
    write(tmp_path / name, {"new.png": b"new", "new.txt": b"a caption"})
    after = opened(tmp_path / name, tmp_path / "index")
    assert after == opened(tmp_path / name)
    assert "new" in {key for key, _, _ in after[0]} - {key for key, _, _ in before[0]}


def test_a_tar_of_the_same_size_that_was_written_later_is_indexed_anew(tmp_path):
    for key in "ab":
        write_tar(tmp_path / "0.tar", {f"{key}.png": b"", f"{key}.txt": b"a"})
        os.utime(tmp_path / "0.tar", (1, ord(key)))
        [[(found, _, _)], _, _] = opened(tmp_path, tmp_path / "index")
        assert found == key


def test_pictures_that_need_captions_and_those_that_need_none_have_an_index_each(tmp_path):
    write_tar(tmp_path / "0.tar", members([0]) | {"o.png": b"1"})
    for needs_captions in (True, False, True):
        found, _, _ = opened(tmp_path, tmp_path / "index", needs_captions=needs_captions)
        assert len(found) == 2 - needs_captions


def opened_by_rank(path, index_dir):
    return opened(path, index_dir)


def test_ranks_index_tars_together_as_one_process_does(on_ranks, tmp_path):
    for number in range(5):
        write_tar(tmp_path / f"{number}.tar", members(range(number, 9)))
    for found in on_ranks(2, opened_by_rank, tmp_path, tmp_path / "index"):
        assert found == opened(tmp_path)


# With embeddings

SHARDS = {3: 6, 12: 5}  # {shard: number of images}
WIDTH = 4


def npy(values):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, np.float16))
    return stream.getvalue()


def code(number):
    """The embedding of image `number`, exact in float16."""
    return np.arange(1, WIDTH + 1) + number // 10_000 * 8 + number % 10_000 / 8


def write_pictures(path, arrangement="beside"):
    """Write tars 00003 and 00012, or loose images. Embeddings are inside, beside, or absent."""
    path.mkdir(exist_ok=True)
    for shard, count in SHARDS.items():
        files = {}
        for i in range(count):
            number = shard * 10_000 + i
            key = f"{shard:05d}{i:04d}"
            files[f"{key}.png"] = media.png(picture(number))
            files[f"{key}.txt"] = f"picture {number}".encode()
            if arrangement in ("inside", "loose with"):
                files[f"{key}.npy"] = npy(code(number)[None] if i == 1 else code(number))
        if arrangement.startswith("loose"):
            write_files(path / f"part{shard}", files)
        else:
            write_tar(path / f"{shard:05d}.tar", files)
        if arrangement == "beside":  # with one row too many
            table = [code(shard * 10_000 + i) for i in range(count + 1)]
            (path / f"img_emb_{shard:03d}.npy").write_bytes(npy(table))


@pytest.mark.parametrize("arrangement", ["inside", "beside", "loose with", "loose", "none"])
def test_each_picture_comes_with_its_embedding_and_caption_wherever_they_lie(
        arrangement, tmp_path):
    write_pictures(tmp_path / "set", arrangement)
    dataset = images.Pictures(tmp_path / "set", 8, crop_scale=0.3, flip=True)
    dataset = pickle.loads(pickle.dumps(dataset))  # as a worker gets it
    rows = np.random.default_rng(0).permutation(11)
    batch, usable = dataset.fetch(rows)
    assert usable.all()
    assert dataset.check() == (0, 11, [])
    numbers = [int(caption.split()[1]) for caption in batch["caption"]]
    assert sorted(numbers) == [*range(30_000, 30_006), *range(120_000, 120_005)]
    for number, image in zip(numbers, batch["image"]):
        left = (number % 3) // 2  # left edge of the central square
        assert_array_equal(image, picture(number)[:, left:left + 8])
    if arrangement in ("loose", "none"):
        assert dataset.width is None
        assert "image_embed" not in batch
    else:
        assert dataset.width == WIDTH
        assert batch["image_embed"].dtype == torch.float32
        assert_array_equal(batch["image_embed"], list(map(code, numbers)))


def test_embeddings_beside_that_are_not_usable_are_skipped_and_named(tmp_path):
    write_pictures(tmp_path)
    table = np.load(tmp_path / "img_emb_003.npy")
    table[1] = 0
    table[4, 2] = np.nan
    np.save(tmp_path / "img_emb_003.npy", table)
    dataset = images.Pictures(tmp_path, 8)
    count, _, faults = dataset.check()
    assert count == len(faults) == 2
    for row, fault in zip((1, 4), faults):
        assert f"00003.tar: 00003000{row}.png: no usable embedding" in fault
    _, usable = dataset.fetch(np.arange(7))
    assert usable.tolist() == [True, False, True, True, False, True, True]


def test_fewer_rows_of_embeddings_than_pictures_are_refused_before_training(tmp_path):
    write_pictures(tmp_path)
    table = np.load(tmp_path / "img_emb_003.npy")
    np.save(tmp_path / "img_emb_003.npy", table[:5])
    with pytest.raises(UserError, match=r"000030005\.png: .* row 5 \(from 0\) of the 5 embeddings"):
        images.Pictures(tmp_path, 8).check()


@pytest.mark.parametrize("number, content", [
    (0, npy(np.zeros(4))), (2, npy(np.ones(5))), (0, npy(np.ones(4))[:-3]), (2, b"")])
def test_an_embedding_inside_that_is_not_like_the_others_is_named(number, content, tmp_path):
    write_pictures(tmp_path, "inside")
    key = f"00003{number:04d}"
    files = {f"{key}.png": media.png(picture(2)), f"{key}.txt": b"a", f"{key}.npy": content}
    write_tar(tmp_path / "00003.tar", files, "a")
    dataset = images.Pictures(tmp_path, 8)
    _, usable = dataset.fetch(np.arange(3))
    assert np.flatnonzero(~usable).tolist() == [number]
    assert f"/00003.tar: {key}.npy: no usable embedding (" in dataset.fault(number)
    (tmp_path / "00003.tar").unlink()  # as if the disk were gone
    assert f"/00003.tar: {key}.png: cannot be read (FileNotFoundError" in dataset.fault(number)


# Crops

def write_image(path, image):
    write_files(path, {"a.png": media.png(image), "a.txt": b"picture 0"})


def test_a_square_is_resized_by_its_mode_and_for_clip_by_bicubic(tmp_path):
    write_image(tmp_path, ramp(8, 8))
    batch, _ = images.Pictures(tmp_path, 4, clip_size=2).fetch([0])
    for name, size, mode in (("image", 4, "box"), ("clip_image", 2, "bicubic")):
        expected = pixels.resize_uint8(torch.from_numpy(ramp(8, 8))[None], size, mode)
        assert torch.equal(batch[name], expected)


@pytest.mark.parametrize("numbers, size, top, left", [
    ((0, 0, 1), 20, 0, 40),
    ((0.5, 0.5, 0.5), 32, 4, 14),  # halfway between a quarter of the area and all of it
    ((1, 1, 1), 40, 0, 20),
])
def test_random_numbers_choose_area_and_place_of_a_square_and_whether_it_is_mirrored(
        numbers, size, top, left, tmp_path, monkeypatch):
    write_image(tmp_path, ramp(40, 60))
    uniform = np.array([[*numbers, 0.4], [*numbers, 0.6]]) * (1 - 1e-9)
    monkeypatch.setattr(order, "uniform", lambda *_: uniform)
    dataset = images.Pictures(tmp_path, size, crop_scale=0.25, flip=True, clip_size=size)
    batch, _ = dataset.fetch([0, 0], [0, 0])
    square = ramp(40, 60)[top:top + size, left:left + size]
    for name in ("image", "clip_image"):
        assert_array_equal(batch[name], [square[:, ::-1], square])


# Splits and fingerprints

def test_the_fingerprint_changes_with_the_data_and_only_then(tmp_path):
    def fingerprint():
        return json.dumps(images.Pictures(tmp_path, 8).fingerprint())

    seen = set()
    for arrangement in ("none", "beside"):
        write_pictures(tmp_path, arrangement)
        seen.add(fingerprint())
    np.save(tmp_path / "img_emb_003.npy", np.ones((9, WIDTH), np.float16))
    seen |= {fingerprint(), fingerprint()}
    for caption in (b"a", b"ab"):
        files = {"000030000.png": media.png(picture(1)), "000030000.txt": caption}
        write_tar(tmp_path / "00003.tar", files)
        seen.add(fingerprint())
    assert len(seen) == 5


# What users get wrong

@pytest.mark.parametrize("name, content, reason", [
    ("000000001.png", b"hello", "not a readable image"),
    ("000000001.png", media.png(picture(1))[:99], "not a readable image"),
    ("000000001.png", media.png(ramp(5, 20)), "20x5 pixels, smaller than 8; lower --image_size"),
    ("000000001.txt", "größe".encode("cp1252"), "not UTF-8 text"),
])
def test_one_bad_picture_is_skipped_and_named_and_mostly_bad_ones_are_refused(
        name, content, reason, tmp_path):
    write_tar(tmp_path / "0.tar", members(range(4)) | {name: content})
    dataset = images.Pictures(tmp_path, 8)
    fault = dataset.fault(1)
    assert re.search(rf"0\.tar: 000000001\..*{reason}", fault)
    assert dataset.check() == (1, 4, [fault])  # the same message at each read

    write_tar(tmp_path / "0.tar", members([1]) | {name: content})
    with pytest.raises(UserError, match=rf"1 of 1 samples cannot be used: .*{reason}"):
        images.Pictures(tmp_path, 8).check()


def test_equal_files_are_counted(tmp_path, capsys):
    write_tar(tmp_path / "0.tar", members([0, 1]) | {"a.png": media.png(picture(1)), "a.txt": b"a"})
    images.Pictures(tmp_path, 8).check()
    message = f"note: {tmp_path}: 1 of 3 checked files are duplicates, so training"
    assert message in capsys.readouterr().err


def test_without_pillow_reading_ends_in_the_line_that_installs_it(tmp_path, monkeypatch):
    write_image(tmp_path, picture(0))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)  # makes its import fail
    with pytest.raises(UserError, match=r"/a\.png: .*pip install pillow"):
        images.Pictures(tmp_path, 8).fetch([0])


def test_an_old_pillow_is_told_and_no_file_is_blamed(tmp_path, monkeypatch):
    Image = pytest.importorskip("PIL.Image")
    write_image(tmp_path, picture(0))
    monkeypatch.delattr(Image.Image, "has_transparency_data")
    with pytest.raises(UserError, match=r"^images need pillow 10.1: pip install 'pillow>=10.1'$"):
        images.Pictures(tmp_path, 8).check()


# The built-in shapes

@pytest.mark.parametrize("size, box", [(8, 4), (48, 1)])
def test_shapes_are_drawn_or_averaged_from_32_pixels_with_captions_and_embeddings(
        size, box, tmp_path):
    embeddings = np.ones((300, WIDTH))
    write_shards(tmp_path, embeddings, embeddings, synthetic.shapes(range(300))[1])
    rows = np.array([7, 290, 7, 0, 41])
    batch, _ = images.Shapes(tmp_path, size).fetch(rows, order.random_bits(rows, 0))
    drawn, records = synthetic.shapes(rows, size=size * box)
    means = drawn.reshape(5, size, box, size, box, 3).mean((2, 4))
    assert np.abs(batch["image"].numpy() - means).max() <= 0.501
    assert batch["caption"] == [record["caption"] for record in records]
    assert batch["image_embed"].shape == (5, WIDTH)
