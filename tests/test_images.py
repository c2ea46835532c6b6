"""Captioned images in tars and folders, their embeddings wherever they lie, and the built-in shapes as pictures."""
import io
import json
import pickle
import random
import re
import sys
import tarfile

import numpy as np
import pytest
import torch

from common import data, images, media, synthetic
from common.config import UserError


def png(image):
    stream = io.BytesIO()
    media.write_png(stream, image)
    return stream.getvalue()


def picture(number, size=8):
    return np.random.default_rng(number).integers(0, 256, (size, size + number % 3, 3)).astype(np.uint8)


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


def write_folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def test_images_and_captions_read_back_from_one_tar_and_a_caption_may_be_in_json_but_not_missing(tmp_path):
    files = members(range(5))
    for name in ("000000001.txt", "000000001.json", "000000002.txt"):
        del files[name]
    write_tar(tmp_path / "a.tar", files)
    source = images.CaptionedImages(tmp_path / "a.tar")
    assert len(source) == 4
    captions = {0: "caption 0 ü", 2: "of the json", 3: "caption 3 ü", 4: "caption 4 ü"}
    for i, (number, caption) in enumerate(captions.items()):
        np.testing.assert_array_equal(source[i][0], picture(number))
        assert source[i][1:] == (caption, f"{number:09d}")
    write_tar(tmp_path / "a.tar", {"x.png": png(picture(0)), "x.json": b'{"caption": null}',
                                   "y.png": png(picture(0)), "y.json": b'{"text": "a"}'})
    source = images.CaptionedImages(tmp_path)
    assert source[0][1] == ""
    with pytest.raises(UserError, match=r"a\.tar: y\.json: no entry 'caption'"):
        source[1]
    for path in (tmp_path / "nowhere", tmp_path / "a.tar"):
        write_tar(tmp_path / "a.tar", {"a.png": png(picture(0)), "b.txt": b"alone", ".c.png": b"", ".c.txt": b""})
        with pytest.raises(UserError, match=f"{path}: no such folder, or no captioned images found; expected KEY.jpg"):
            images.CaptionedImages(path)


def test_jpegs_and_gray_or_transparent_images_come_as_rgb(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    smooth = Image.fromarray(np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8))
    modes = {"a.png": "L", "b.PNG": "RGBA", "c.png": "LA", "d.png": "RGB", "e.jpg": "RGB", "f.webp": "RGB",
             "g.jpeg": "L"}
    for name, mode in modes.items():
        smooth.convert(mode).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(mode)
    gray, smooth = (np.asarray(image).astype(int) for image in (smooth.convert("L").convert("RGB"), smooth))
    source = images.CaptionedImages(tmp_path)
    for i, (image, mode, key) in enumerate(source[i] for i in range(7)):
        assert image.shape == (16, 16, 3) and image.dtype == np.uint8 and key == "abcdefg"[i]
        assert np.abs(image - (gray if "L" in mode else smooth)).mean() < (10 if i > 3 else 1e-9)


def test_files_that_are_not_used_are_named_and_an_extension_begins_at_the_first_dot(tmp_path):
    files = {"a.PNG": png(picture(0)), "a.txt": b"a", "b.png": png(picture(1)), "c.image.png": b"", "c.txt": b"c",
             "d.gif": b"", "e/f.gif": b"", "e/.hidden.bmp": b"", "a.npy": b"", "g.caption.txt": b"g"}
    write_folder(tmp_path / "folder", files)
    write_tar(tmp_path / "0.tar", files)
    for path in (tmp_path / "folder", tmp_path / "0.tar"):
        source = images.CaptionedImages(path)
        assert [source.key(i) for i in range(len(source))] == ["a"]
        assert source.left_out == (f"{path}: left out are 1 images without a caption (b.png) and files of kinds that "
                                   "are not read (1 caption.txt, 2 gif, 1 image.png)")
    write_folder(tmp_path / "only", {"a.tiff": b"", "a.txt": b""})
    with pytest.raises(UserError, match=r"no captioned images found.*not read \(1 tiff\)"):
        images.CaptionedImages(tmp_path / "only")


@pytest.mark.parametrize("damage", ["cut in a member", "cut between members", "flipped in a header", "empty"])
def test_a_damaged_tar_is_refused_by_name_and_none_of_it_is_lost_in_silence(damage, tmp_path):
    path = tmp_path / "00000.tar"
    write_tar(path, members(range(6)))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        middle = archive.getmembers()[9]
    path.write_bytes({
        "cut in a member": whole[:middle.offset_data + 10], "cut between members": whole[:middle.offset], "empty": b"",
        "flipped in a header": whole[:middle.offset + 3] + b"\xff" + whole[middle.offset + 4:],
    }[damage])
    with pytest.raises(UserError, match=r"00000\.tar: corrupt or truncated tar"):
        images.CaptionedImages(tmp_path)


# With embeddings

SHARDS = {3: 6, 12: 5}  # shard number: images
WIDTH = 4


def npy(values, dtype=np.float16):
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, dtype))
    return stream.getvalue()


def code(number):
    """The embedding of image `number`, exact in float16."""
    return np.arange(1, WIDTH + 1) + number // 10_000 * 8 + number % 10_000 / 8


def numbers():
    return [shard * 10_000 + i for shard, count in SHARDS.items() for i in range(count)]


def write_pictures(path, arrangement="none", dtype=np.float16):
    """Tars 00003 and 00012, or loose images, with embeddings inside, beside, in another folder, or without.

    Keys end in four digits, or six with embeddings elsewhere; then the first tar is listed last, too. Files of
    embeddings have a row too many, and one is of no tar.
    """
    path.mkdir(exist_ok=True)
    for shard, count in SHARDS.items():
        files = {}
        for i in range(count):
            number, key = shard * 10_000 + i, f"{shard:05d}{i:0{6 if arrangement == 'elsewhere' else 4}d}"
            files |= {f"{key}.png": png(picture(number)), f"{key}.txt": f"picture {number}".encode()}
            if arrangement in ("inside", "loose with"):
                files[f"{key}.npy"] = npy(code(number)[None] if i == 1 else code(number), dtype)
        if arrangement.startswith("loose"):
            write_folder(path / f"part{shard}", files)
        else:
            write_tar(path / ("z3.tar" if arrangement == "elsewhere" and shard == 3 else f"{shard:05d}.tar"), files)
    if arrangement in ("beside", "elsewhere"):
        folder = path if arrangement == "beside" else path.parent / "codes"
        folder.mkdir(exist_ok=True)
        for shard, count in {**SHARDS, 7: 3}.items():
            table = np.array([code(shard * 10_000 + i) for i in range(count + 1)], dtype)
            np.save(folder / f"img_emb_{shard:03d}.npy", table)
    return {"embeddings": str(path.parent / "codes"), "index_width": 6} if arrangement == "elsewhere" else {}


@pytest.mark.parametrize("arrangement", ["inside", "beside", "elsewhere", "loose with", "loose", "none"])
def test_each_picture_comes_with_its_own_embedding_and_caption_wherever_they_lie(arrangement, tmp_path):
    dtype = np.float32 if arrangement == "inside" else np.float16
    source = images.Pictures(tmp_path / "set", 8, **write_pictures(tmp_path / "set", arrangement, dtype))
    rows = np.array(random.Random(0).sample(range(11), 11))
    for copy in (source, pickle.loads(pickle.dumps(source))):
        batch, good = copy.fetch(rows)
        assert good.all() and len(copy) == 11
        assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (11, 8, 8, 3)
        found = [int(caption.split()[1]) for caption in batch["caption"]]
        assert sorted(found) == numbers()
        for number, image, row in zip(found, batch["image"], rows):
            left = (number % 3) // 2  # of the central square
            np.testing.assert_array_equal(image, picture(number)[:, left:left + 8])
            assert copy.name(row).endswith(f"{number % 10_000}.png") and f"{number // 10_000:05d}" in copy.name(row)
        if arrangement in ("loose", "none"):
            assert copy.width is None and "image_embed" not in batch
        else:
            assert copy.width == WIDTH and batch["image_embed"].dtype == torch.float32
            np.testing.assert_array_equal(batch["image_embed"], [code(number) for number in found])
        assert copy.check() == (0, 11, [])


@pytest.mark.parametrize("shards, taken", [("3", [3]), (" 4 - 12 ,99", [12]), ("12,3", [3, 12])])
def test_only_the_tars_asked_for_are_read(shards, taken, tmp_path):
    write_pictures(tmp_path / "set", "beside")
    if len(taken) == 1:  # what is not taken need not be sound
        (tmp_path / "set" / f"{15 - taken[0]:05d}.tar").write_bytes(b"hello")
    source = images.Pictures(tmp_path / "set", 8, shards=shards)
    captions = source.fetch(np.arange(len(source)))[0]["caption"]
    assert [int(caption.split()[1]) for caption in captions] == [i for i in numbers() if i // 10_000 in taken]


@pytest.mark.parametrize("arrangement", ["beside", "loose with"])
def test_a_few_embeddings_that_are_missing_or_unusable_are_skipped_and_named(arrangement, tmp_path):
    path, faults = tmp_path / "set", {1: np.zeros(WIDTH), 4: np.full(WIDTH, np.nan)}
    write_pictures(path, arrangement)
    if arrangement == "beside":
        table = np.load(path / "img_emb_003.npy")[:5]
        table[list(faults)] = list(faults.values())
        np.save(path / "img_emb_003.npy", table)
    else:
        (path / "part3" / "000030005.npy").unlink()
        write_folder(path / "part3", {f"00003000{i}.npy": npy(value) for i, value in faults.items()})
    source = images.Pictures(path, 8)
    bad = [row for row in range(11) if any(source.name(row).endswith(f"00003000{i}.png") for i in (1, 4, 5))]
    assert np.flatnonzero(~source.fetch(np.arange(11))[1]).tolist() == bad
    beside = arrangement == "beside"
    for row, i, words in zip(bad, (1, 4, 5), ("4 numbers, expected 4, or all zero or not finite",) * 2 + (
            "0 numbers, expected 4" if beside else "missing or not a",)):
        assert f"00003000{i}.{'png: its' if beside else 'npy: this'} embedding" in source.fault(row)
        assert f" is {words}" in source.fault(row)
    assert source.check() == (3, 11, [source.fault(row) for row in bad])
    if beside:
        assert "row 5 of img_emb_3.npy" in source.fault(bad[2])
        for width in (3, 5):  # of another width than the keys have: rows that are not there
            assert not images.Pictures(path, 8, index_width=width).fetch(np.arange(11))[1].any()
    batch = data.Chunks(source, np.arange(11))[(0, 11)]
    assert not set(batch["rows"].tolist()) & set(bad)
    assert sorted(set(batch["unusable"])) == sorted(source.fault(row) for row in bad)
    for caption, embedding in zip(batch["caption"], batch["image_embed"]):
        np.testing.assert_array_equal(embedding, code(int(caption.split()[1])))


@pytest.mark.parametrize("content, message", [
    (npy(np.ones(5)), "5 numbers, expected 4"), (npy(np.ones((2, 4))), "8 numbers, expected 4"),
    (npy(np.ones(4))[:-3], "missing or not a readable .npy file"), (b"hello", "missing or not a readable .npy file"),
    (None, "missing or not a readable .npy file"),
])
def test_an_embedding_inside_that_is_not_like_the_others_is_named(content, message, tmp_path):
    files = members(range(3)) | {f"{i:09d}.npy": npy(code(i)) for i in range(3)}
    files["000000001.npy"] = content
    write_tar(tmp_path / "0.tar", {name: content for name, content in files.items() if content})
    source = images.Pictures(tmp_path, 8)
    assert source.fetch(np.arange(3))[1].tolist() == [True, False, True]
    assert source.fault(1).startswith(f"{tmp_path}/0.tar: 000000001.npy: this embedding is {message}")


# Pictures that are made of them

def ramp(height, width):
    """An image whose pixels say where they are."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, np.full_like(y, 7)], -1).astype(np.uint8)


def write_images(path, pictures):
    path.mkdir(exist_ok=True)
    for i, pixels in enumerate(pictures):
        (path / f"{i:04d}.png").write_bytes(png(pixels))
        (path / f"{i:04d}.txt").write_text(f"picture {i}")


@pytest.mark.parametrize("shape, top, left", [((8, 8), 0, 0), ((8, 12), 0, 2), ((11, 8), 1, 0)])
def test_without_draws_the_central_square_is_cut_out_exactly_and_resized(shape, top, left, tmp_path):
    write_images(tmp_path, [ramp(*shape)])
    square = ramp(*shape)[top:top + 8, left:left + 8]
    for augmented in (False, True):
        source = images.Pictures(tmp_path, 8, crop_scale=0.3 if augmented else 1.0, flip=augmented)
        np.testing.assert_array_equal(source.fetch(np.array([0]))[0]["image"][0], square)
    batch, _ = images.Pictures(tmp_path, 4, clip_size=2, resize="box").fetch(np.array([0]))
    means = square.reshape(4, 2, 4, 2, 3).mean((1, 3))
    assert np.abs(batch["image"][0].numpy() - means).max() <= 0.5
    small = media.resize_bytes(torch.from_numpy(square)[None], 2, "bicubic")[0]  # CLIP's, whatever the other is
    np.testing.assert_array_equal(batch["clip_image"][0], small)


def test_a_draw_gives_a_square_of_the_shares_and_places_asked_for_and_half_are_mirrored(tmp_path):
    write_images(tmp_path, [ramp(40, 60)])
    source = images.Pictures(tmp_path, 8, crop_scale=0.25, flip=True, clip_size=8, resize="nearest_exact")
    draws = data.draws(np.arange(2000), 5)
    batch, good = source.fetch(np.zeros(2000, int), draws)
    pixels = batch["image"].numpy().astype(int)
    assert good.all() and (pixels[..., 2] == 7).all()
    mirrored = pixels[:, 0, 0, 1] > pixels[:, 0, -1, 1]
    assert abs(mirrored.mean() - 0.5) < 0.05
    upright = np.where(mirrored[:, None, None, None], pixels[:, :, ::-1], pixels)
    height = upright[:, -1, 0, 0] - upright[:, 0, 0, 0]
    width = upright[:, 0, -1, 1] - upright[:, 0, 0, 1]
    assert np.abs(height - width).max() <= 1  # squares: seven eighths of the side apart
    side = height / 7 * 8
    assert 20 - 2 <= side.min() < 21.5 and 38.5 < side.max() <= 40 + 2
    assert abs((side ** 2).mean() / 40 ** 2 - 0.625) < 0.03  # the area is uniform in [1/4, 1]
    assert upright[:, 0, 0, 0].max() > 15 and upright[:, 0, 0, 1].max() > 30 and upright[..., 1].max() == 58
    # CLIP is given the same crop, the same way round
    clip = batch["clip_image"].numpy().astype(int)
    assert ((clip[:, 0, 0, 1] > clip[:, 0, -1, 1]) == mirrored).all() and np.abs(clip - pixels).max() <= 5
    again = source.fetch(np.zeros(3, int), draws[[5, 2, 1700]])[0]  # nothing but the draw decides
    assert all(torch.equal(again[name], batch[name][[5, 2, 1700]]) for name in ("image", "clip_image"))
    source = images.Pictures(tmp_path, 20, crop_scale=0.25, flip=True)
    for down, right, expected in ((0, 1 - 1e-9, ramp(40, 60)[:20, 40:]), (1 - 1e-9, 0, ramp(40, 60)[20:, :20])):
        np.testing.assert_array_equal(source._sample(0, (0, down, right, 0.5))["image"], expected)
    only = images.Pictures(tmp_path, 40, flip=True).fetch(np.zeros(50, int), draws[:50])[0]
    square = ramp(40, 60)[:, 10:50]  # without crop_scale: the central one, mirrored or not
    assert {x.tobytes() for x in only["image"].numpy()} == {square.tobytes(), square[:, ::-1].tobytes()}


def test_parts_are_chosen_by_key_and_seed_alone(tmp_path):
    write_tar(tmp_path / "0.tar", members(range(300)))
    source = images.Pictures(tmp_path, 8)
    for seed in (0, 1):
        for part in ("train", "validation", "test"):
            expected = [row for row in range(300) if data.part_of(f"{row:09d}", 0.2, 0.1, seed) == part]
            assert source.split(part, 0.2, 0.1, seed).tolist() == expected and len(expected) > 10
    assert source.split("train", 0.0, 0.0).tolist() == list(range(300)) and source.check() == (0, 256, [])


def test_the_fingerprint_of_pictures_changes_with_the_data_and_only_then(tmp_path):
    path, seen = tmp_path / "set", []
    for arrangement in ("none", "beside"):
        write_pictures(path, arrangement)
        seen.append(images.Pictures(path, 8).fingerprint())
        assert json.loads(json.dumps(seen[-1])) == images.Pictures(path, 8).fingerprint() and seen[-1]["rows"] == 11
    np.save(path / "img_emb_003.npy", np.ones((9, WIDTH), np.float16))
    seen += [images.Pictures(path, 8).fingerprint(), images.Pictures(path, 8, shards="3").fingerprint()]
    for caption in (b"a", b"ab"):
        write_tar(path / "00003.tar", {"000030000.png": png(picture(1)), "000030000.txt": caption})
        seen.append(images.Pictures(path, 8).fingerprint())
    assert len({json.dumps(found) for found in seen}) == 6


# What users get wrong

@pytest.mark.parametrize("name, content, reason", [
    ("000000001.png", b"hello", "not a readable image"), ("000000001.png", png(picture(1))[:99], "not a readable"),
    ("000000001.png", png(ramp(5, 20)), "20x5 pixels, smaller than the 8 asked for; lower --image_size or remove it"),
    ("000000001.txt", None, "no entry 'caption' in it"),
])
def test_one_bad_picture_is_skipped_and_named_and_mostly_bad_ones_are_refused(name, content, reason, tmp_path):
    files = members(range(4)) | {"000000001.json": b'{"key": 1}', name: content}
    write_tar(tmp_path / "0.tar", {name: content for name, content in files.items() if content})
    source = images.Pictures(tmp_path, 8)
    assert source.fetch(np.arange(4))[1].tolist() == [True, False, True, True] and not source.fault(0)
    assert source.check() == (1, 4, [source.fault(1)])
    batch = data.Chunks(source, np.arange(4))[(0, 4)]
    assert batch["unusable"] == [source.fault(1)] and batch["rows"].tolist() == [0, 2, 2, 3]
    assert re.fullmatch(rf".*0\.tar: 000000001\..*{reason}.*", source.fault(1))
    bad = {name: content for name, content in files.items() if content and "000000001" in name}
    write_tar(tmp_path / "0.tar", bad)
    with pytest.raises(UserError, match=rf"1 of 1 pictures cannot be used: .*000000001.*{reason}"):
        images.Pictures(tmp_path, 8).check()


def test_without_pillow_pictures_end_in_the_line_that_installs_it(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", members(range(4)))
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    for read in (images.Pictures.check, lambda source: source.fetch(np.arange(2))):
        with pytest.raises(UserError, match=r"0\.tar: 000000000\.png: .*pip install pillow"):
            read(images.Pictures(tmp_path, 8))


@pytest.mark.parametrize("damage, settings, message", [
    (lambda path: (path / "00012.tar").write_bytes(b"hello" * 300), {}, r"00012\.tar: corrupt or truncated tar"),
    (None, {"shards": "5,x"}, r"--shards 5,x: expected numbers and ranges of numbers such as 0-99,120"),
    (None, {"shards": "3,"}, r"--shards 3,: expected numbers"),
    (None, {"shards": "0-2,13"}, "--shards 0-2,13: none of the 2 tars in --data has such a number"),
    (lambda path: (path / "00003.tar").rename(path / "x.tar"), {"shards": "3"}, r"x\.tar: no shard number"),
    (lambda path: [tar.unlink() for tar in path.glob("*.tar")] + [write_pictures(path, "loose")], {"embeddings": "x"},
     r"--embeddings x: only for tars; put KEY\.npy beside each image"),
    (lambda path: (path / "img_emb_012.npy").unlink(), {}, r"set: no img_emb_00012\.npy for the tar of this number"),
])
def test_a_mistake_in_a_set_of_pictures_is_found_at_the_start_and_named(damage, settings, message, tmp_path):
    write_pictures(tmp_path / "set", "beside")
    if damage:
        damage(tmp_path / "set")
    with pytest.raises(UserError, match=message) as caught:
        images.Pictures(tmp_path / "set", 8, **settings)
    assert "\n" not in str(caught.value)


# The built-in shapes

def test_small_shapes_are_the_averages_of_those_of_32_pixels_and_large_ones_are_drawn(tmp_path):
    rows, codes = np.array([7, 290, 7, 0, 41]), np.random.default_rng(0).normal(size=(2, 300, WIDTH))
    data.write_shards(tmp_path, *codes, synthetic.shapes(range(300))[1])
    drawn, records = synthetic.shapes(rows)
    for size in (8, 16):
        small = images.Shapes(tmp_path, size).fetch(rows)[0]["image"].numpy()
        box = 32 // size
        means = drawn.reshape(5, size, box, size, box, 3).astype(float).mean((2, 4))
        assert small.dtype == np.uint8 and np.abs(small - means).max() <= 0.501
    for size in (32, 48):
        source = pickle.loads(pickle.dumps(images.Shapes(tmp_path, size)))  # as a worker gets it
        batch, good = source.fetch(rows, data.draws(rows, 0))
        np.testing.assert_array_equal(batch["image"], synthetic.shapes(rows, size=size)[0])
        assert good.all() and batch["caption"] == [record["caption"] for record in records]
    assert source.records(rows) == json.loads(json.dumps(records)) and len(source) == 300
    expected = data.Embeddings(tmp_path).fetch(rows)[0]
    assert source.width == WIDTH and all(torch.equal(batch[name], expected[name]) for name in expected)
    assert source.check() == (0, 300, []) and source.name(7) == "img_emb_0.npy row 7"
