"""Captioned images in tars and folders, their embeddings, and the built-in shapes as pictures."""
import io
import json
import pickle
import random
import re
import struct
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import write_files

from common import data, images, media, order, synthetic
from common.config import UserError


def png(image):
    stream = io.BytesIO()
    media.write_png(stream, image)
    return stream.getvalue()


def picture(number, size=8):
    shape = (size, size + number % 3, 3)
    return np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)


def members(numbers):
    """Files as img2dataset names them: {name: bytes}."""
    files = {}
    for i in numbers:
        files[f"{i:09d}.png"] = png(picture(i))
        files[f"{i:09d}.txt"] = f" caption {i} ü\n".encode()
        files[f"{i:09d}.json"] = json.dumps({"caption": "of the json", "key": i}).encode()
    return files


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


# Images and captions

def test_images_come_with_their_captions_from_txt_or_else_json(tmp_path):
    files = members(range(4))
    for name in ("000000001.txt", "000000001.json", "000000002.txt"):
        del files[name]
    write_tar(tmp_path / "a.tar", files)
    dataset = images.CaptionedImages(tmp_path / "a.tar")
    captions = {0: "caption 0 ü", 2: "of the json", 3: "caption 3 ü"}
    assert len(dataset) == len(captions)
    for i, (number, caption) in enumerate(captions.items()):
        image, *words = dataset[i]
        np.testing.assert_array_equal(image, picture(number))
        assert words == [caption, f"{number:09d}"]


@pytest.mark.parametrize("name, counts", [("nowhere", ""), ("a.tar", ".*not read .1 tiff")])
def test_a_place_without_captioned_images_is_refused(name, counts, tmp_path):
    write_tar(tmp_path / "a.tar", {"a.tiff": b"", "b.txt": b"alone", ".c.png": b"", ".c.txt": b""})
    expected = f"{name}: no such folder, or no captioned images found; expected KEY.jpg{counts}"
    with pytest.raises(UserError, match=expected):
        images.CaptionedImages(tmp_path / name)


@pytest.mark.parametrize("name, mode, loss", [
    ("a.PNG", "RGBA", 0),
    ("b.png", "LA", 0),
    ("c.jpg", "RGB", 10),
    ("d.webp", "RGB", 10),
    ("e.jpeg", "L", 10),
])
def test_an_image_of_any_kind_and_mode_comes_as_rgb(name, mode, loss, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    smooth = Image.radial_gradient("L").resize((16, 16)).convert(mode)
    smooth.save(tmp_path / name)
    write_files(tmp_path, {f"{name[0]}.txt": b"a"})
    image, _, key = images.CaptionedImages(tmp_path)[0]
    assert key == name[0]
    assert image.dtype == np.uint8
    difference = np.subtract(image, smooth.convert("RGB"), dtype=int)
    assert np.abs(difference).max() <= loss


CORNERS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])  # top left, top right, bottom left
# Where EXIF's orientation says that the first row and the first column of pixels are to be seen.
SEEN = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],  # top, right
    3: lambda image: image[::-1, ::-1],  # bottom, right
    4: lambda image: image[::-1],  # bottom, left
    5: lambda image: image.swapaxes(0, 1),  # left, top
    6: lambda image: image.swapaxes(0, 1)[:, ::-1],  # right, top
    7: lambda image: image.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
    8: lambda image: image.swapaxes(0, 1)[::-1],  # left, bottom
}


@pytest.mark.parametrize("orientation", SEEN)
@pytest.mark.parametrize("suffix", ["jpeg", "png", "webp"])
def test_an_image_is_turned_upright_as_its_exif_says(suffix, orientation):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.full((40, 60, 3), 128, np.uint8)
    pixels[:16, :16] = CORNERS[0]
    pixels[:16, -16:] = CORNERS[1]
    pixels[-16:, :16] = CORNERS[2]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, suffix, exif=exif, quality=95)
    image = images.decode_image(stream.getvalue(), f"a.{suffix}")
    expected = SEEN[orientation](pixels)
    assert image.shape == expected.shape
    assert np.abs(image - expected.astype(int)).mean() < 5


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0\x2b", b"MM\0\x2a\0\0\0\x08\0\x05", b"?"])
def test_a_damaged_exif_has_no_orientation(exif):
    Image = pytest.importorskip("PIL.Image")
    pixels = picture(0)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png", exif=exif)
    np.testing.assert_array_equal(images.decode_image(stream.getvalue(), "a.png"), pixels)


def png_of(bits, color, pixels, **chunks):
    """A PNG file of one row. color: 0 gray, 2 RGB, 3 palette, 4 gray and alpha, 6 RGBA."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    values = np.array(pixels)
    row = np.packbits(values.astype(np.uint8)).tobytes() if bits == 1 else values.astype(
        f">u{bits // 8}").tobytes()
    header = struct.pack(">IIBBBBB", values.size // channels, 1, bits, color, 0, 0, 0)
    chunks = {"IHDR": header, **chunks, "IDAT": zlib.compress(b"\0" + row), "IEND": b""}
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in chunks.items():
        tagged = name.encode() + content
        file += struct.pack(">I", len(content)) + tagged + struct.pack(">I", zlib.crc32(tagged))
    return file


RED, WHITE = [255, 0, 0], [255, 255, 255]


@pytest.mark.parametrize("file, pixels", [
    # 16 bits become 8.
    (png_of(16, 0, [0, 1000, 32896, 65535]), [[0] * 3, [4] * 3, [128] * 3, WHITE]),
    (png_of(16, 2, [65535, 0, 0]), [RED]),
    # What is transparent is white, whatever color hides there.
    (png_of(8, 6, [255, 0, 0, 255, 255, 0, 0, 0, 255, 0, 0, 128]), [RED, WHITE, [255, 127, 127]]),
    (png_of(16, 6, [65535, 0, 0, 65535, 0, 0, 0, 0]), [RED, WHITE]),
    (png_of(8, 4, [7, 255, 7, 0]), [[7] * 3, WHITE]),
    (png_of(8, 3, [0, 1], PLTE=bytes([0, 0, 0, *RED]), tRNS=bytes([0, 255])), [WHITE, RED]),
    # One color, gray or RGB, stands for what is transparent.
    (png_of(8, 0, [7, 8], tRNS=b"\0\x07"), [WHITE, [8] * 3]),
    (png_of(16, 0, [1000, 2570], tRNS=struct.pack(">H", 1000)), [WHITE, [10] * 3]),
    (png_of(8, 2, [1, 2, 3, 4, 5, 6], tRNS=bytes([0, 1, 0, 2, 0, 3])), [WHITE, [4, 5, 6]]),
    (png_of(1, 0, [1, 0, 0, 0, 0, 0, 0, 0]), [WHITE]),
])
def test_transparency_is_white_and_16_bits_are_scaled(file, pixels):
    pytest.importorskip("PIL.Image")
    image = images.decode_image(file, "a.png")
    np.testing.assert_array_equal(image[0][:len(pixels)], pixels)


# Captions of every kind

@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", [".txt", ".JSON", ".TXT"])
def test_captions_are_read_in_every_marked_encoding_and_case_of_extension(
        suffix, encoding, tmp_path):
    caption = "ein rotes Dreieck, größer als 三角形"
    text = caption if suffix.lower() == ".txt" else json.dumps({"caption": caption})
    write_files(tmp_path, {"x.png": png(picture(0)), f"x{suffix}": text.encode(encoding)})
    assert images.CaptionedImages(tmp_path).caption(0) == caption


def caption_of(content, **settings):
    """The caption of an image whose JSON is `content`, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), {"x.png": png(picture(0)), "x.json": content})
        return images.CaptionedImages(folder, **settings).caption(0)


def test_a_caption_in_json_may_be_null_a_list_or_under_another_key():
    assert caption_of(b'{"caption": null}') == ""
    assert caption_of(b'{"caption": []}') == ""
    assert caption_of(b'{"caption": [" a "]}') == "a"
    assert caption_of(b'{"caption": ["a", "b"]}') == ["a", "b"]
    assert caption_of(b'{"caption": "a", "TEXT": "b"}', caption_key="TEXT") == "b"


@pytest.mark.parametrize("content", [
    b"{", b"[]", b"{}", b'{"caption": {"a": 1}}', b'{"caption": [1]}', b"[" * 100_000,
])
def test_a_json_without_a_caption_is_unusable_by_name(content):
    with pytest.raises(images.Unusable, match=r"x\.json: no caption in it"):
        caption_of(content)


def test_a_key_for_captions_prefers_json_and_lines_are_those_of_the_text(tmp_path):
    files = {"x.png": png(picture(0)), "x.txt": b"a\nb\n", "x.json": b'{"TEXT": "c"}'}
    write_files(tmp_path, files)
    for key, caption in {"": "a\nb", "lines": ["a", "b"], "TEXT": "c"}.items():
        assert images.CaptionedImages(tmp_path, caption_key=key).caption(0) == caption


def test_one_of_several_captions_is_drawn_for_each_sample_and_epoch_and_the_first_without_words(
        tmp_path):
    texts = ["a", "b", "c", "d"]
    files = {"x.png": png(picture(0)), "x.json": json.dumps({"caption": texts}).encode()}
    write_files(tmp_path, files)
    dataset = images.Pictures(tmp_path, 8)
    assert dataset.texts([0]) == ["a"]
    drawn = data.ChunkDataset(dataset, np.zeros(1, np.int64), seed=0)[0, 400]["caption"]
    assert [dataset.fetch([0])[0]["caption"]] == [["a"]]
    for text in texts:
        assert 60 < drawn.count(text) < 140
    again = data.ChunkDataset(dataset, np.zeros(1, np.int64), seed=0)[100, 200]["caption"]
    assert again == drawn[100:200]


# Layouts

@pytest.mark.parametrize("name, content", [
    ("metadata.jsonl", '{"file_name": "x.png", "text": "a, b"}\n\n'
                       '{"file_name": "in/y.png", "text": ["c", "d"]}\n'),
    ("METADATA.CSV", 'file_name,text,n\nx.png,"a, b",1\nin/y.png,c,2\n'),
])
def test_a_folder_of_images_may_have_its_captions_in_a_table(name, content, tmp_path):
    files = {
        "x.png": png(picture(0)),
        "in/y.png": png(picture(1)),
        "z.png": png(picture(2)),
        name: content.encode("utf-8-sig"),
    }
    write_files(tmp_path, files)
    dataset = images.CaptionedImages(tmp_path)
    captions = {dataset.key(i): dataset.caption(i) for i in range(len(dataset))}
    assert captions == {"x": "a, b", "in/y": ["c", "d"] if "jsonl" in name else "c"}
    assert dataset.left_out.endswith("(1 png without a caption)")
    before = images.Pictures(tmp_path, 8).fingerprint()
    write_files(tmp_path, {name: content.replace("a, b", "A, b").encode()})
    assert images.Pictures(tmp_path, 8).fingerprint() != before


@pytest.mark.parametrize("content", ['{"file_name": "x.png"}', '{"text": "a"}', "{", "[1]"])
def test_a_fault_of_a_table_of_captions_is_named(content, tmp_path):
    write_files(tmp_path, {"x.png": png(picture(0)), "metadata.jsonl": content.encode()})
    with pytest.raises(UserError, match=r"metadata\.jsonl: expected file_name and caption or text"):
        images.CaptionedImages(tmp_path)


@pytest.mark.parametrize("pattern", ["{00000..00002}.tar", "0000[0-2].tar", ""])
def test_tars_may_be_a_range_a_pattern_or_a_folder(pattern, tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"{number:05d}.tar", members([number]))
    dataset = images.CaptionedImages(tmp_path / pattern)
    assert [dataset.key(i) for i in range(len(dataset))] == [f"{i:09d}" for i in range(3)]
    one = images.CaptionedImages(tmp_path / pattern, shards="1")
    assert one.key(0) == "000000001"


@pytest.mark.parametrize("name", ["{00000..00001}.tar", "0.tar.gz"])
def test_a_tar_that_is_missing_or_compressed_is_named(name, tmp_path):
    write_tar(tmp_path / "00000.tar", members([0]))
    (tmp_path / "0.tar.gz").touch()
    message = r"(00001\.tar|0\.tar\.gz): no such file, or not a \.tar; compressed .* gunzip"
    with pytest.raises(UserError, match=message):
        images.CaptionedImages(tmp_path / name)


@pytest.mark.parametrize("write, path", [(write_files, "folder"), (write_tar, "0.tar")])
def test_files_that_are_not_used_are_counted_and_an_extension_begins_at_the_first_dot(
        write, path, tmp_path):
    image = png(picture(0))
    files = {"a.PNG": image, "a.txt": b"a", "a.npy": b"", "b.png": image, "c.image.png": b"",
             "c.txt": b"c", "d.gif": b"", "e/f.gif": b"", "e/.hidden.bmp": b""}
    write(tmp_path / path, files)
    dataset = images.CaptionedImages(tmp_path / path)
    assert [dataset.key(i) for i in range(len(dataset))] == ["a"]
    assert dataset.left_out.startswith(f"{tmp_path / path}: left out ")
    assert dataset.left_out.endswith("(2 gif, 1 image.png, 1 png without a caption)")


@pytest.mark.parametrize("damage", [
    lambda content, member: content[:member.offset_data + 10],
    lambda content, member: content[:member.offset],
    lambda content, member: content.replace(member.name.encode(), b"?", 1),
    lambda content, member: b"",
])
def test_a_damaged_tar_is_refused_by_name(damage, tmp_path):
    path = tmp_path / "00000.tar"
    write_tar(path, members(range(6)))
    with tarfile.open(path) as archive:
        member = archive.getmembers()[9]
    path.write_bytes(damage(path.read_bytes(), member))
    with pytest.raises(UserError, match=r"00000\.tar: corrupt or truncated tar"):
        images.CaptionedImages(tmp_path)


# With embeddings

SHARDS = {3: 6, 12: 5}  # shard number: images
NUMBERS = [shard * 10_000 + i for shard, count in SHARDS.items() for i in range(count)]
WIDTH = 4


def npy(values, dtype=np.float16):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, dtype))
    return stream.getvalue()


def code(number):
    """The embedding of image `number`, exact in float16."""
    return np.arange(1, WIDTH + 1) + number // 10_000 * 8 + number % 10_000 / 8


def number_of(caption):
    return int(caption.split()[1])


def write_embeddings(folder):
    """Tables of a row too many, and one of no tar."""
    folder.mkdir(exist_ok=True)
    for shard, count in {**SHARDS, 7: 3}.items():
        table = [code(shard * 10_000 + i) for i in range(count + 1)]
        (folder / f"img_emb_{shard:03d}.npy").write_bytes(npy(table))


def write_pictures(path, arrangement="beside"):
    """Tars 00003 and 00012, or loose images, with embeddings inside, beside, elsewhere, or without.

    Keys end in four digits, or six with embeddings elsewhere; then the first tar is listed last.
    Returns settings of `Pictures`.
    """
    elsewhere = arrangement == "elsewhere"
    digits = 6 if elsewhere else 4
    path.mkdir(exist_ok=True)
    for shard, count in SHARDS.items():
        files = {}
        for i in range(count):
            number = shard * 10_000 + i
            key = f"{shard:05d}{i:0{digits}d}"
            files[f"{key}.png"] = png(picture(number))
            files[f"{key}.txt"] = f"picture {number}".encode()
            if arrangement in ("inside", "loose with"):
                values = code(number)[None] if i == 1 else code(number)
                files[f"{key}.npy"] = npy(values, np.float32)
        if arrangement.startswith("loose"):
            write_files(path / f"part{shard}", files)
        elif elsewhere and shard == 3:
            write_tar(path / "z00003.tar", files)
        else:
            write_tar(path / f"{shard:05d}.tar", files)
    if arrangement == "beside":
        write_embeddings(path)
    if not elsewhere:
        return {}
    write_embeddings(path.parent / "codes")
    return {"embeddings": str(path.parent / "codes")}


@pytest.mark.parametrize("arrangement", [
    "inside",
    "beside",
    "elsewhere",
    "loose with",
    "loose",
    "none",
])
def test_each_picture_comes_with_its_embedding_and_caption_wherever_they_lie(
        arrangement, tmp_path):
    settings = write_pictures(tmp_path / "set", arrangement)
    dataset = images.Pictures(tmp_path / "set", 8, **settings)
    dataset = pickle.loads(pickle.dumps(dataset))  # as a worker gets it
    rows = np.array(random.Random(0).sample(range(11), 11))
    batch, usable = dataset.fetch(rows)
    assert usable.all()
    assert dataset.check() == (0, 11, [])
    numbers = [number_of(caption) for caption in batch["caption"]]
    assert sorted(numbers) == NUMBERS
    for number, image, row in zip(numbers, batch["image"], rows):
        left = (number % 3) // 2  # of the central square
        np.testing.assert_array_equal(image, picture(number)[:, left:left + 8])
        assert re.search(rf"{number // 10_000:05d}.*{number % 10_000}\.png$", dataset.name(row))
    if arrangement in ("loose", "none"):
        assert dataset.width is None
        assert "image_embed" not in batch
    else:
        assert dataset.width == WIDTH
        assert batch["image_embed"].dtype == torch.float32
        np.testing.assert_array_equal(batch["image_embed"], list(map(code, numbers)))


@pytest.mark.parametrize("shards, wanted", [("3", [3]), (" 4 - 12 ,99", [12]), ("12,3", [3, 12])])
def test_only_the_tars_asked_for_are_read(shards, wanted, tmp_path):
    write_pictures(tmp_path / "set")
    for shard in SHARDS.keys() - wanted:  # which may be damaged
        (tmp_path / f"set/{shard:05d}.tar").write_bytes(b"hello")
    dataset = images.Pictures(tmp_path / "set", 8, shards=shards)
    numbers = [number_of(dataset.caption(row)) for row in range(len(dataset))]
    assert numbers == [number for number in NUMBERS if number // 10_000 in wanted]


def test_rows_of_a_table_without_usable_embeddings_are_skipped_and_named(tmp_path):
    path = tmp_path / "set"
    write_pictures(path)
    table = np.load(path / "img_emb_003.npy")[:5]  # the sixth row is missing
    table[1] = 0
    table[4, 2] = np.nan
    np.save(path / "img_emb_003.npy", table)
    dataset = images.Pictures(path, 8)
    faults = [dataset.fault(row) for row in (1, 4, 5)]
    for row, fault in zip((1, 4, 5), faults):
        assert f"00003000{row}.png: row {row} of img_emb_3.npy: no usable embedding" in fault
    assert dataset.check() == (3, 11, faults)
    batch = data.ChunkDataset(dataset, np.arange(11))[0, 11]
    assert batch["index"].tolist() == [0, 2, 2, 3, 6, 6, 6, 7, 8, 9, 10]
    assert set(batch["unusable"]) == set(faults)


@pytest.mark.parametrize("content, message", [
    (npy(np.zeros(4)), "4 numbers, expected 4, or all zero or not finite"),
    (npy(np.ones(5)), "5 numbers, expected 4"),
    (npy(np.ones(4))[:-3], "EOF: reading array data"),
    (None, "EOFError"),
])
def test_an_embedding_inside_that_is_not_like_the_others_is_named(content, message, tmp_path):
    files = members(range(3)) | {f"{i:09d}.npy": npy(code(i)) for i in range(3)}
    del files["000000001.npy"]
    if content:
        files["000000001.npy"] = content
    write_tar(tmp_path / "0.tar", files)
    dataset = images.Pictures(tmp_path, 8)
    _, usable = dataset.fetch(np.arange(3))
    assert usable.tolist() == [True, False, True]
    expected = rf"/0\.tar: 000000001\.npy: no usable embedding .*{message}"
    assert re.search(expected, dataset.fault(1))


# Crops

def ramp(height, width):
    """An image whose pixels say where they are."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, np.full_like(y, 7)], -1).astype(np.uint8)


def write_image(path, image):
    write_files(path, {"a.png": png(image), "a.txt": b"picture 0"})


@pytest.mark.parametrize("shape, top, left", [((8, 8), 0, 0), ((8, 12), 0, 2), ((11, 8), 1, 0)])
def test_without_random_words_the_central_square_is_cut_out(shape, top, left, tmp_path):
    write_image(tmp_path, ramp(*shape))
    batch, _ = images.Pictures(tmp_path, 8, crop_scale=0.3, flip=True).fetch([0])
    square = ramp(*shape)[top:top + 8, left:left + 8]
    np.testing.assert_array_equal(batch["image"][0], square)


def test_a_square_is_resized_by_its_mode_and_for_clip_by_bicubic(tmp_path):
    write_image(tmp_path, ramp(8, 8))
    batch, _ = images.Pictures(tmp_path, 4, clip_size=2, resize="box").fetch([0])
    means = ramp(8, 8).reshape(4, 2, 4, 2, 3).mean((1, 3))
    assert np.abs(batch["image"][0].numpy() - means).max() <= 0.5
    expected = media.resize_uint8(torch.from_numpy(ramp(8, 8))[None], 2, "bicubic")
    assert torch.equal(batch["clip_image"], expected)


@pytest.mark.parametrize("numbers, size, top, left", [
    ((0, 0, 1), 20, 0, 40),
    ((0, 1, 0), 20, 20, 0),
    ((0.5, 0.5, 0.5), 32, 4, 14),  # half way from a quarter of the area to all of it
    ((1, 1, 1), 40, 0, 20),
])
def test_random_numbers_choose_area_and_place_of_a_square_and_whether_it_is_mirrored(
        numbers, size, top, left, tmp_path, monkeypatch):
    write_image(tmp_path, ramp(40, 60))
    uniform = np.array([[*numbers, 0.4, 0], [*numbers, 0.6, 0]]) * (1 - 1e-9)
    monkeypatch.setattr(order, "uniform", lambda words, count: uniform)
    dataset = images.Pictures(tmp_path, size, crop_scale=0.25, flip=True, clip_size=size)
    batch, _ = dataset.fetch([0, 0], [0, 0])
    square = ramp(40, 60)[top:top + size, left:left + size]
    for name in ("image", "clip_image"):
        np.testing.assert_array_equal(batch[name], [square[:, ::-1], square])


def test_without_crop_scale_the_central_square_is_mirrored_or_not(tmp_path):
    write_image(tmp_path, ramp(40, 60))
    words = order.random_words(np.arange(50), 5)
    batch, _ = images.Pictures(tmp_path, 40, flip=True).fetch(np.zeros(50, int), words)
    square = ramp(40, 60)[:, 10:50]
    found = {image.tobytes() for image in batch["image"].numpy()}
    assert found == {square.tobytes(), square[:, ::-1].tobytes()}


# Splits and fingerprints

@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_splits_are_chosen_by_key_and_seed_alone(name, tmp_path):
    write_tar(tmp_path / "0.tar", members(range(100)))
    found = images.Pictures(tmp_path, 8).split(name, 0.2, 0.1, seed=1)
    keys = [f"{row:09d}" for row in range(100)]
    assert found.tolist() == order.split_keys(keys, name, 0.2, 0.1, seed=1).tolist()


def test_the_fingerprint_changes_with_the_data_and_only_then(tmp_path):
    path = tmp_path / "set"
    seen = []

    def note(**settings):
        fingerprint = images.Pictures(path, 8, **settings).fingerprint()
        assert images.Pictures(path, 8, **settings).fingerprint() == fingerprint
        seen.append(json.dumps(fingerprint))

    for arrangement in ("none", "beside"):
        write_pictures(path, arrangement)
        note()
    np.save(path / "img_emb_003.npy", np.ones((9, WIDTH), np.float16))
    note()
    note(shards="3")
    for caption in (b"a", b"ab"):
        write_tar(path / "00003.tar", {"000030000.png": png(picture(1)), "000030000.txt": caption})
        note()
    assert len(set(seen)) == 6


# What users get wrong

@pytest.mark.parametrize("name, content, reason", [
    ("000000001.png", b"hello", "not a readable image"),
    ("000000001.png", png(picture(1))[:99], "not a readable image"),
    ("000000001.png", png(ramp(5, 20)), "20x5 pixels, smaller than 8; lower --image_size"),
    ("000000001.txt", None, r"no caption in it \(KeyError"),
    ("000000001.txt", "größe".encode("cp1252"), "not text in UTF-8"),
])
def test_one_bad_picture_is_skipped_and_named_and_mostly_bad_ones_are_refused(
        name, content, reason, tmp_path):
    files = members(range(4)) | {"000000001.json": b'{"key": 1}'}
    del files[name]
    if content:
        files[name] = content
    write_tar(tmp_path / "0.tar", files)
    dataset = images.Pictures(tmp_path, 8)
    assert dataset.fault(0) == ""
    fault = dataset.fault(1)
    again = [dataset.fault(1) for _ in range(5)]
    assert set(again) == {fault}  # no address in memory: it is named once
    assert re.search(rf"0\.tar: 000000001\..*{reason}", fault)
    assert dataset.check() == (1, 4, [fault])

    alone = {name: content for name, content in files.items() if "000000001" in name}
    write_tar(tmp_path / "0.tar", alone)
    with pytest.raises(UserError, match=rf"1 of 1 samples cannot be used: .*{reason}"):
        images.Pictures(tmp_path, 8).check()


@pytest.mark.parametrize("read", [images.Pictures.check, lambda dataset: dataset.fetch([0])])
def test_without_pillow_reading_ends_in_the_line_that_installs_it(read, tmp_path, monkeypatch):
    write_image(tmp_path, picture(0))
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    with pytest.raises(UserError, match=r"/a\.png: .*pip install pillow"):
        read(images.Pictures(tmp_path, 8))


@pytest.mark.parametrize("arrangement, settings, message", [
    ("none", {"shards": "5,x"}, "--shards 5,x: expected numbers and ranges, as in 0-99,120"),
    ("none", {"shards": "3,"}, "--shards 3,: expected numbers"),
    ("none", {"shards": "0-2,13"}, "--shards 0-2,13: none of the 2 tars has such a number"),
    ("loose", {"embeddings": "x"}, r"--embeddings x: only for tars; put KEY\.npy beside"),
])
def test_a_mistake_in_a_set_of_pictures_is_found_at_the_start(
        arrangement, settings, message, tmp_path):
    write_pictures(tmp_path, arrangement)
    with pytest.raises(UserError, match=message):
        images.Pictures(tmp_path, 8, **settings)


def test_a_tar_without_a_number_is_named_where_tars_are_chosen_by_number(tmp_path):
    write_tar(tmp_path / "x.tar", {})
    with pytest.raises(UserError, match=r"x\.tar: no shard number at the end of its name"):
        images.CaptionedImages(tmp_path, shards="3")


# The built-in shapes

@pytest.mark.parametrize("size, box", [(8, 4), (16, 2), (32, 1), (48, 1)])
def test_shapes_are_drawn_or_averaged_from_32_pixels_with_captions_and_embeddings(
        size, box, tmp_path):
    embeddings = np.random.default_rng(0).normal(size=(2, 300, WIDTH))
    data.write_shards(tmp_path, *embeddings, synthetic.shapes(range(300))[1])
    dataset = pickle.loads(pickle.dumps(images.Shapes(tmp_path, size)))  # as a worker gets it
    rows = np.array([7, 290, 7, 0, 41])
    batch, _ = dataset.fetch(rows, order.random_words(rows, 0))
    drawn, records = synthetic.shapes(rows, size=size * box)
    means = drawn.reshape(5, size, box, size, box, 3).mean((2, 4))
    assert batch["image"].dtype == torch.uint8
    assert np.abs(batch["image"].numpy() - means).max() <= 0.501
    assert batch["caption"] == [record["caption"] for record in records]
    assert dataset.records(rows) == json.loads(json.dumps(records))
    np.testing.assert_allclose(batch["image_embed"], embeddings[0, rows], rtol=1e-3)
