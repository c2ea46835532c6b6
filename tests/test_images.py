"""Captioned images in tars and folders, their embeddings wherever they lie, and the built-in shapes as pictures."""
import io
import json
import pickle
import random
import sys
import tarfile

import numpy as np
import pytest
import torch

from common import accumulate, data, images, media, synthetic
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


@pytest.mark.parametrize("layout", ["tar", "tars", "folder", "deep folder"])
def test_images_and_captions_read_back_from_any_layout(layout, tmp_path):
    path = tmp_path / "data"
    if layout == "tar":
        write_tar(path, members(range(5)))
    elif layout == "tars":
        path.mkdir()
        write_tar(path / "00001.tar", members(range(3, 5)))
        write_tar(path / "00000.tar", members(range(3)))
    elif layout == "folder":
        write_folder(path, members(range(5)))
    else:
        write_folder(path / "a", members(range(3)))
        write_folder(path / "b" / "c", members(range(3, 5)))
    source = images.CaptionedImages(path)
    assert (len(source), source.uncaptioned) == (5, 0)
    for i in random.Random(0).sample(range(5), 5):
        image, caption, key = source[i]
        np.testing.assert_array_equal(image, picture(i))
        assert caption == f"caption {i} ü" and key.endswith(f"{i:09d}")


def test_images_without_a_caption_are_left_out_and_counted_and_json_will_do(tmp_path):
    files = members(range(4))
    for name in ("000000001.txt", "000000001.json", "000000002.txt"):
        del files[name]
    write_tar(tmp_path / "a.tar", files)
    source = images.CaptionedImages(tmp_path)
    assert (len(source), source.uncaptioned) == (3, 1)
    assert [source[i][1:] for i in range(3)] == [("caption 0 ü", "000000000"), ("of the json", "000000002"),
                                                 ("caption 3 ü", "000000003")]
    write_tar(tmp_path / "a.tar", {"x.png": png(picture(0)), "x.json": b'{"caption": null}',
                                   "y.png": png(picture(0)), "y.json": b'{"text": "a"}'})
    source = images.CaptionedImages(tmp_path)
    assert source[0][1] == ""
    with pytest.raises(UserError, match=r"a\.tar: y\.json: no entry 'caption'"):
        source[1]


def test_jpegs_and_gray_or_transparent_images_come_as_rgb(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    smooth = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    modes = {"a.jpg": "RGB", "b.png": "L", "c.png": "RGBA", "d.webp": "RGB", "e.jpeg": "L", "f.png": "LA"}
    for name, mode in modes.items():
        pillow.fromarray(smooth).convert(mode).save(tmp_path / name, **({} if ".png" in name else {"quality": 95}))
        (tmp_path / name).with_suffix(".txt").write_text(name)
    source = images.CaptionedImages(tmp_path)
    gray = np.asarray(pillow.fromarray(smooth).convert("L"))[..., None].repeat(3, -1)
    assert len(source) == 6
    for image, name, _ in (source[i] for i in range(6)):
        expected = gray if name[0] in "bef" else smooth
        assert image.shape == (16, 16, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - expected).mean() < (1e-9 if ".png" in name else 6)


@pytest.mark.parametrize("name, content",
                         [("a.png", b"hello"), ("a.png", png(picture(0))[:-30]), ("a.jpg", b"\xff\xd8hello")])
def test_an_unreadable_image_is_named_with_its_tar(name, content, tmp_path):
    if name.endswith(".jpg"):
        pytest.importorskip("PIL")
    write_tar(tmp_path / "shard.tar", {name: content, "a.txt": b"caption"})
    source = images.CaptionedImages(tmp_path)
    with pytest.raises(UserError, match=rf"shard\.tar: {name}: not a readable image"):
        source[0]


@pytest.mark.parametrize("damage", ["cut in a member", "cut between members", "cut in a header", "flipped in a header",
                                    "no tar", "empty"])
def test_a_damaged_tar_is_refused_by_name_and_none_of_it_is_lost_in_silence(damage, tmp_path):
    path = tmp_path / "00000.tar"
    write_tar(path, members(range(6)))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        middle = archive.getmembers()[9]
    path.write_bytes({
        "cut in a member": whole[:middle.offset_data + 10], "cut between members": whole[:middle.offset],
        "cut in a header": whole[:middle.offset + 100], "no tar": b"hello" * 300, "empty": b"",
        "flipped in a header": whole[:middle.offset + 3] + b"\xff" + whole[middle.offset + 4:],
    }[damage])
    with pytest.raises(UserError, match=r"00000\.tar: corrupt or truncated tar"):
        images.CaptionedImages(tmp_path)


@pytest.mark.parametrize("files, message", [
    (None, "data: no such file or folder"),
    ({}, r"data: no captioned images found \(0 without a caption\)"),
    ({"a.png": png(picture(0))}, r"no captioned images found \(1 without a caption\)"),
    ({"a.txt": b"alone"}, "no captioned images found"),
])
def test_a_place_without_captioned_images_is_refused_with_what_was_expected(files, message, tmp_path):
    path = tmp_path / "data"
    if files is not None:
        path.mkdir()
        write_folder(path, files)
    with pytest.raises(UserError, match=message):
        images.CaptionedImages(path)


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


def write_pictures(path, arrangement="none", dtype=np.float16, width=4, side=8):
    """Tars 00003 and 00012, or loose images, with embeddings inside, beside, in another folder, or without.

    Keys are the shard number and `width` digits. Beside lies row k for key k: one row more than there are images, and
    files of other shards, too.
    """
    path.mkdir(exist_ok=True)
    for shard, count in SHARDS.items():
        files = {}
        for i in range(count):
            number, key = shard * 10_000 + i, f"{shard:05d}{i:0{width}d}"
            files |= {f"{key}.png": png(picture(number, side)), f"{key}.txt": f"picture {number}".encode()}
            if arrangement in ("inside", "loose with"):
                files[f"{key}.npy"] = npy(code(number)[None] if i == 1 else code(number), dtype)
        if arrangement.startswith("loose"):
            write_folder(path / f"part{shard}", files)
        else:
            write_tar(path / f"{shard:05d}.tar", files)
    if arrangement in ("beside", "elsewhere"):
        folder = path if arrangement == "beside" else path.parent / "codes"
        folder.mkdir(exist_ok=True)
        for shard, count in {**SHARDS, 7: 3}.items():
            np.save(folder / f"img_emb_{shard:03d}.npy",
                    np.array([code(shard * 10_000 + i) for i in range(count + 1)], dtype))
    return {"embeddings": str(path.parent / "codes")} if arrangement == "elsewhere" else {}


def number_of(source, row):
    return int(source.fetch([row])[0]["caption"][0].split()[1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("arrangement", ["inside", "beside", "elsewhere", "loose with", "loose", "none"])
def test_each_picture_comes_with_its_own_embedding_and_caption_wherever_they_lie(arrangement, dtype, tmp_path):
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
            assert f"{number // 10_000:05d}{number % 10_000:04d}.png" in copy.name(row)
        if arrangement in ("loose", "none"):
            assert copy.width is None and "image_embed" not in batch
        else:
            assert copy.width == WIDTH and batch["image_embed"].dtype == torch.float32
            np.testing.assert_array_equal(batch["image_embed"], [code(number) for number in found])
        assert copy.check() == (0, 11, [])


def test_embeddings_are_matched_by_the_tars_number_and_as_many_digits_as_asked(tmp_path):
    write_pictures(tmp_path / "set", "beside", width=6)
    (tmp_path / "set" / "00012.tar").rename(tmp_path / "set" / "part-0012.tar")  # now listed last of all
    (tmp_path / "set" / "00003.tar").rename(tmp_path / "set" / "z3.tar")
    source = images.Pictures(tmp_path / "set", 8, index_width=6)
    batch, good = source.fetch(np.arange(11))
    assert good.all() and batch["caption"][0] == "picture 120000"
    np.testing.assert_array_equal(batch["image_embed"],
                                  [code(int(caption.split()[1])) for caption in batch["caption"]])


@pytest.mark.parametrize("shards, taken", [("3", [3]), ("12", [12]), ("0-3", [3]), (" 4 - 12 ,99", [12]),
                                           ("3-12", [3, 12]), ("12,3", [3, 12])])
def test_only_the_tars_asked_for_are_read(shards, taken, tmp_path):
    extra = write_pictures(tmp_path / "set", "elsewhere")
    if len(taken) == 1:  # what is not taken need not be sound
        (tmp_path / "set" / f"{15 - taken[0]:05d}.tar").write_bytes(b"hello")
        (tmp_path / "codes" / f"img_emb_{15 - taken[0]:03d}.npy").write_bytes(b"hello")
    source = images.Pictures(tmp_path / "set", 8, shards=shards, **extra)
    assert sorted({number_of(source, row) // 10_000 for row in range(len(source))}) == taken
    assert len(source) == sum(SHARDS[shard] for shard in taken)


@pytest.mark.parametrize("arrangement", ["inside", "beside", "loose with"])
def test_a_few_embeddings_that_are_missing_or_unusable_are_skipped_and_named(arrangement, tmp_path):
    path, spoiled = tmp_path / "set", {1: "all zero", 4: "all zero|not finite", 5: "among the 5|missing"}
    write_pictures(path, arrangement)
    faults = {1: np.zeros(WIDTH), 4: np.full(WIDTH, np.nan)}
    if arrangement == "beside":
        table = np.load(path / "img_emb_003.npy")[:5]
        table[list(faults)] = list(faults.values())
        np.save(path / "img_emb_003.npy", table)
    else:
        files = members([])
        for i in range(6):
            key = f"00003{i:04d}"
            files |= {f"{key}.png": png(picture(30_000 + i)), f"{key}.txt": f"picture {30_000 + i}".encode(),
                      **({f"{key}.npy": npy(faults.get(i, code(30_000 + i)))} if i != 5 else {})}
        if arrangement == "inside":
            write_tar(path / "00003.tar", files)
        else:
            (path / "part3" / "000030005.npy").unlink()
            write_folder(path / "part3", files)
    source = images.Pictures(path, 8)
    bad = [row for row in range(11) if any(source.name(row).endswith(f"00003000{i}.png") for i in spoiled)]
    batch, good = source.fetch(np.arange(11))
    assert np.flatnonzero(~good).tolist() == bad
    for row, words in zip(bad, spoiled.values()):
        assert any(word in source.fault(row) for word in words.split("|")) and "0000300" in source.fault(row)
    with pytest.raises(UserError, match=r"set: 3 of 11 rows have no usable embedding, more than 1 in 100: .*000030001"):
        source.check()
    batch = data.Chunks(source, np.arange(11))[(0, 11)]
    assert not set(batch["rows"].tolist()) & set(bad)
    assert sorted(set(batch["unusable"])) == sorted(source.fault(row) for row in bad)
    for caption, embedding in zip(batch["caption"], batch["image_embed"]):
        np.testing.assert_array_equal(embedding, code(int(caption.split()[1])))


@pytest.mark.parametrize("content, message", [
    (npy(np.ones(5)), r"float16 of shape \(5,\); expected float16 or float32 of shape \(4,\)"),
    (npy(np.ones(4), np.float64), r"float64 of shape \(4,\); expected float16 or float32 of shape \(4,\)"),
    (npy(np.ones((2, 4))), r"of shape \(2, 4\)"), (npy(1.0), r"of shape \(\)"),
    (npy(np.ones(4))[:-3], "not a readable .npy file"), (b"hello", "not a readable .npy file"),
])
def test_an_embedding_inside_that_is_not_like_the_others_is_named(content, message, tmp_path):
    files = members(range(3)) | {f"{i:09d}.npy": npy(code(i)) for i in range(3)}
    write_tar(tmp_path / "0.tar", files | {"000000001.npy": content})
    source = images.Pictures(tmp_path, 8)
    assert source.fetch(np.arange(3))[1].tolist() == [True, False, True]
    with pytest.raises(UserError, match=rf"1 of 3 rows .*0\.tar: 000000001\.npy: this embedding is .*{message}"):
        source.check()
    write_tar(tmp_path / "0.tar", files | {"000000000.npy": npy(np.zeros(4))})
    assert images.Pictures(tmp_path, 8).width == 4  # a missing first one does not stand in the way
    write_tar(tmp_path / "0.tar", files | {f"{i:09d}.npy": content for i in range(3)})
    if "expected" not in message or "float64" in message:
        with pytest.raises(UserError, match=rf"none of the first 3 embeddings is usable: .*{message.split(';')[0]}"):
            images.Pictures(tmp_path, 8)


def test_one_bad_row_in_a_hundred_is_let_pass_and_more_are_not(tmp_path):
    files = members(range(100))
    codes = np.stack([code(i) for i in range(100)])
    write_tar(tmp_path / "0.tar", files)
    for bad, refused in ((1, False), (2, True)):
        codes[50:50 + bad] = 0
        np.save(tmp_path / "img_emb_0.npy", codes.astype(np.float32))
        source = images.Pictures(tmp_path, 8)
        if refused:
            with pytest.raises(UserError, match="2 of 100 rows"):
                source.check()
        else:
            looked = source.check()
            assert looked[:2] == (1, 100) and "000000050.png: row 50 of" in looked[2][0]


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
        assert source.augments == augmented
        np.testing.assert_array_equal(source.fetch(np.array([0]))[0]["image"][0], square)
    batch, _ = images.Pictures(tmp_path, 4, clip_size=2, resize="area").fetch(np.array([0]))
    means = square.reshape(4, 2, 4, 2, 3).mean((1, 3))
    assert np.abs(batch["image"][0].numpy() - means).max() <= 0.5
    wide = torch.from_numpy(square.astype(np.float32)).permute(2, 0, 1)[None]
    small = media.resize(wide, 2)[0].permute(1, 2, 0).round().clamp(0, 255)  # CLIP's is bicubic, whatever the other
    np.testing.assert_array_equal(batch["clip_image"][0], small)


def test_a_draw_gives_a_square_of_the_shares_and_places_asked_for_and_half_are_mirrored(tmp_path):
    write_images(tmp_path, [ramp(40, 60)])
    source = images.Pictures(tmp_path, 8, crop_scale=0.25, flip=True, clip_size=8, resize="nearest-exact")
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
    small = side < 34
    assert abs(np.corrcoef(upright[small, 0, 0, 0] / (40 - side[small]),
                           upright[small, 0, 0, 1] / (60 - side[small]))[0, 1]) < 0.1  # any place, not a diagonal
    # CLIP is given the same crop, the same way round
    clip = batch["clip_image"].numpy().astype(int)
    assert ((clip[:, 0, 0, 1] > clip[:, 0, -1, 1]) == mirrored).all() and np.abs(clip - pixels).max() <= 5
    assert not np.array_equal(source.fetch(np.zeros(2000, int), data.draws(np.arange(2000), 6))[0]["image"], pixels)
    only = images.Pictures(tmp_path, 40, flip=True, resize="nearest-exact").fetch(np.zeros(50, int), draws[:50])[0]
    square = ramp(40, 60)[:, 10:50]  # without crop_scale: the central one, mirrored or not
    assert {x.tobytes() for x in only["image"].numpy()} == {square.tobytes(), square[:, ::-1].tobytes()}


def augmented_stream(source, world_size, chunk_size, workers, first=0, steps=6, batch_size=10):
    """Rows, pixels of both sizes and names of the unusable, over all ranks, position by position."""
    chunks = data.Chunks(source, source.split("train", 0.2, 0.1), seed=3)
    found = {}
    for rank in range(world_size):
        plan = accumulate.plan(batch_size, chunk_size, rank, world_size)
        batches = data.loader(chunks, data.training_spans(plan, batch_size, first), workers)
        for step in range(first, first + steps):
            for chunk in plan:
                batch = next(batches)
                for k, position in enumerate(range(step * batch_size + chunk.start, step * batch_size + chunk.stop)):
                    found[position] = (int(batch["rows"][k]), batch["image"][k].numpy().tobytes(),
                                       batch["clip_image"][k].numpy().tobytes(), batch["caption"][k])
    return [found[position] for position in sorted(found)]


def test_what_is_random_in_a_picture_depends_on_seed_and_position_alone(tmp_path):
    write_images(tmp_path, [picture(i, 16 - 8 * (i in (5, 9))) for i in range(24)])  # two are too small
    source = images.Pictures(tmp_path, 12, crop_scale=0.5, flip=True, clip_size=6)
    whole = augmented_stream(source, 1, 10, workers=0)
    assert not {row for row, *_ in whole} & {5, 9} and len(whole) == 60
    assert len({sample[1] for sample in whole}) > 55  # another crop each time that a picture comes
    for world_size, chunk_size, workers, first in ((1, 10, 2, 0), (1, 3, 0, 0), (2, 3, 0, 2), (3, 4, 2, 4)):
        again = augmented_stream(source, world_size, chunk_size, workers, first, steps=2)
        assert again == whole[first * 10:(first + 2) * 10]
    plain = data.Chunks(source, source.split("train", 0.2, 0.1))[(0, 8)]  # evaluation: nothing is random
    assert torch.equal(plain["image"], source.fetch(plain["rows"].numpy())[0]["image"])


def test_parts_are_chosen_by_key_hold_each_row_once_and_keep_it_when_data_is_added(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", members(range(300)))
    source = images.Pictures(tmp_path, 8)
    parts = {part: source.split(part, 0.2, 0.1) for part in ("train", "validation", "test")}
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(300))
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in parts.values())
    assert 40 <= len(parts["validation"]) <= 80 and 15 <= len(parts["test"]) <= 45
    assert 120 <= len(source.split("test", 0.2, 0.5)) <= 180
    with monkeypatch.context() as patch:
        patch.delattr(data, "part_of")  # the keys are hashed once
        assert all(np.array_equal(source.split(part, 0.2, 0.1), rows) for part, rows in parts.items())
    write_tar(tmp_path / "00.tar", members(range(300, 400)))  # listed first
    more = images.Pictures(tmp_path, 8)
    for part, rows in parts.items():
        kept = {more.images.key(row) for row in more.split(part, 0.2, 0.1)}
        assert {source.images.key(row) for row in rows} <= kept


def test_the_fingerprint_of_pictures_changes_with_the_data_and_only_then(tmp_path):
    extra, path, seen = write_pictures(tmp_path / "set", "elsewhere"), tmp_path / "set", []

    def look(**settings):
        seen.append(json.dumps(images.Pictures(path, 8, **settings).fingerprint()))
        return seen[-1]

    assert look() == look() and json.loads(seen[0])["rows"] == 11 and json.loads(seen[0])["width"] is None
    assert json.loads(look(**extra))["width"] == WIDTH
    np.save(tmp_path / "codes" / "img_emb_003.npy", np.ones((9, WIDTH), np.float16))
    look(**extra)
    look(shards="3")
    files = {"000030000.png": png(picture(1)), "000030000.txt": b"a", "000030000.npy": npy(code(0))}
    write_tar(path / "00003.tar", files)
    look()
    write_tar(path / "00003.tar", files | {"000030000.txt": b"ab"})
    look()
    assert len(set(seen)) == len(seen) - 1


# What users get wrong

@pytest.mark.parametrize("name, content, reason", [
    ("000000001.png", b"hello", "not a readable image"), ("000000001.png", png(picture(1))[:99], "not a readable"),
    ("000000001.png", png(ramp(5, 20)), "20x5 pixels, smaller than the 8 asked for; lower --image_size or remove it"),
    ("000000001.jpg", b"\xff\xd8\xff\xe0hello", "not a readable image"),
    ("000000001.txt", None, "no entry 'caption' in it"),
])
def test_one_bad_picture_is_skipped_and_named_and_nothing_but_bad_ones_is_refused(name, content, reason, tmp_path):
    if name.endswith("jpg"):
        pytest.importorskip("PIL")
    files = members(range(4))
    for i in range(4):
        files[f"{i:09d}.json"] = b'{"key": 1}'
    if name.endswith("jpg"):
        del files["000000001.png"]
    bad = {k: v for k, v in {**files, name: content}.items() if v is not None}
    write_tar(tmp_path / "0.tar", bad)
    source = images.Pictures(tmp_path, 8)
    which = [source.images.key(row) for row in range(4)].index("000000001")
    batch, good = source.fetch(np.arange(4))
    assert np.flatnonzero(~good).tolist() == [which] and not batch["image"][which].any()
    count, looked, faults = source.check()
    assert (count, looked, len(faults)) == (1, 4, 1)
    batch = data.Chunks(source, np.arange(4))[(0, 4)]
    assert batch["unusable"] == faults and "0.tar: 000000001." in faults[0] and reason in faults[0]
    assert "\n" not in faults[0]
    broken = {}
    for i in range(4):
        broken |= {k.replace("000000001", f"{i:09d}"): v for k, v in bad.items() if k.startswith("000000001")}
    write_tar(tmp_path / "0.tar", broken)
    source = images.Pictures(tmp_path, 8)
    with pytest.raises(UserError, match=rf"4 of 4 rows have no usable image, more than half: .*000000000.*{reason}"):
        source.check()
    with pytest.raises(UserError, match=rf"^more than \d+ unusable rows .*{reason}"):
        data.Chunks(source, np.arange(4))[(0, 4)]


def test_jpegs_without_pillow_end_in_the_line_that_installs_it_not_in_skipping_them_all(tmp_path, monkeypatch):
    files = {name.replace("png", "jpg"): content for name, content in members(range(4)).items()}
    write_tar(tmp_path / "0.tar", files)
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    source = images.Pictures(tmp_path, 8)
    for read in (source.check, lambda: source.fetch(np.arange(2))):
        with pytest.raises(UserError, match=r"0\.tar: 000000000\.jpg: .*pip install pillow"):
            read()
    write_tar(tmp_path / "0.tar", members(range(4)))  # our PNGs do without
    assert images.Pictures(tmp_path, 8).check() == (0, 4, [])


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def save(name, array):
    return lambda path: np.save(path / name, array)


@pytest.mark.parametrize("damage, settings, message", [
    (lambda path: cut(path / "00012.tar"), {}, r"00012\.tar: corrupt or truncated tar"),
    (None, {"shards": "5,x"}, r"--shards 5,x: 'x' is no number and no range of numbers; expected such as 0-99,120"),
    (None, {"shards": "9-3"}, r"--shards 9-3: '9-3' is no number"), (None, {"shards": "3,"}, r"--shards 3,: ''"),
    (None, {"shards": "0-2,13"}, "none of the 2 tars in .*set, which are numbered 3 to 12, is among them"),
    (lambda path: (path / "00003.tar").rename(path / "x.tar"), {"shards": "3"}, r"x\.tar: no shard number"),
    (None, {"embeddings": "nowhere"}, "nowhere: no such folder; expected img_emb_N.npy files in it"),
    (lambda path: (path / "img_emb_012.npy").unlink(), {}, r"00012\.tar: no embeddings .*img_emb_00012\.npy in .*set"),
    (save("img_emb_012.npy", np.ones((9, 5), np.float16)), {}, r"img_emb_012\.npy: 5 wide, but img_emb_003\.npy is 4"),
    (save("img_emb_012.npy", np.ones((9, 4))), {}, r"img_emb_012\.npy: float64 of shape \(9, 4\); expected float16"),
    (save("img_emb_012.npy", np.ones((4, 9), np.float32).T), {}, r"img_emb_012\.npy: stored column by column"),
    (save("img_emb_12.npy", np.ones((9, 4), np.float32)), {}, "the same shard number as img_emb_012.npy"),
    (None, {"index_width": 10}, "--index_width 10: expected 1 to 9"),
    (lambda path: write_tar(path / "00012.tar", {f"a{i}.{k}": b"" for i in range(3) for k in ("png", "txt")}), {},
     r"00012\.tar: a0\.png: its key does not end in 4 digits"),
    (lambda path: write_tar(path / "00012.tar", members((7, 17))), {"index_width": 1},
     r"00012\.tar: 000000007\.png and 000000017: the same row 7 of .*img_emb_012\.npy; --index_width 1 is not"),
    (lambda path: write_tar(path / "0012.tar", members([1])), {}, r"0012\.tar: the same shard number as 00012\.tar"),
    (None, {"crop_scale": 0.0}, "--crop_scale 0.0: expected a share of the area above 0 and at most 1"),
    (None, {"resize": "lanczos"}, "--resize lanczos: expected one of nearest, "),
])
def test_a_mistake_in_a_set_of_pictures_is_found_at_the_start_and_named(damage, settings, message, tmp_path):
    write_pictures(tmp_path / "set", "beside")
    if damage:
        damage(tmp_path / "set")
    with pytest.raises(UserError, match=message) as caught:
        images.Pictures(tmp_path / "set", 8, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings, message", [({"shards": "1"}, "there are no tars in"),
                                               ({"embeddings": "x"}, "put KEY.npy beside each image")])
def test_settings_for_tars_are_refused_for_loose_images(settings, message, tmp_path):
    write_pictures(tmp_path / "set", "loose")
    with pytest.raises(UserError, match=message):
        images.Pictures(tmp_path / "set", 8, **settings)


def test_too_wide_an_index_is_told_by_the_rows_that_are_not_there(tmp_path):
    write_pictures(tmp_path / "set", "beside")
    source = images.Pictures(tmp_path / "set", 8, index_width=5)
    with pytest.raises(UserError, match=r"11 of 11 rows .*row 30000 of .*img_emb_003\.npy.* not among the 7 there.*"
                                        "--index_width"):
        source.check()


def test_data_that_change_under_a_run_end_it_with_the_file_named(tmp_path):
    write_pictures(tmp_path / "set")
    source = images.Pictures(tmp_path / "set", 8)
    cut(tmp_path / "set" / "00012.tar")
    with pytest.raises(UserError, match=r"00012\.tar: shorter than it was at the start"):
        source.fetch(np.arange(11))
    (tmp_path / "set" / "00012.tar").unlink()
    with pytest.raises(UserError, match=r"00012\.tar: was there at the start and cannot be read now"):
        source.fetch(np.arange(11))


# The built-in shapes

@pytest.fixture(scope="module")
def shapes_folder(tmp_path_factory):
    folder, records = tmp_path_factory.mktemp("shapes"), synthetic.shapes(range(300))[1]
    codes = np.random.default_rng(0).normal(size=(2, 300, WIDTH))
    data.write_shards(folder, *codes, records)
    return folder


def test_small_shapes_are_the_averages_of_those_of_32_pixels_and_large_ones_are_drawn(shapes_folder):
    rows = np.array([7, 290, 7, 0, 41])
    drawn, records = synthetic.shapes(rows)
    for size in (8, 16):
        small = images.Shapes(shapes_folder, size).fetch(rows)[0]["image"].numpy()
        box = 32 // size
        means = drawn.reshape(5, size, box, size, box, 3).astype(float).mean((2, 4))
        assert small.dtype == np.uint8 and np.abs(small - means).max() <= 0.5
    for size in (32, 48):
        source = images.Shapes(shapes_folder, size)
        for _ in range(2):  # the second time they are remembered
            batch, good = source.fetch(rows)
            np.testing.assert_array_equal(batch["image"], synthetic.shapes(rows, size=size)[0])
        assert good.all() and batch["caption"] == [record["caption"] for record in records]
    assert source.records(rows) == json.loads(json.dumps(records)) and len(source) == 300
    expected = data.Embeddings(shapes_folder).fetch(rows)[0]
    assert source.width == WIDTH and all(torch.equal(batch[name], expected[name]) for name in expected)
    assert source.check() == (0, 300, []) and source.name(7) == "img_emb_0.npy row 7"


def test_shapes_come_through_chunks_with_workers_as_they_are(shapes_folder, monkeypatch):
    for kept in (images.CACHED, 0):
        monkeypatch.setattr(images, "CACHED", kept)
        source = images.Shapes(shapes_folder, 16)
        split = source.split("train", 0.1, 0.1)
        spans = [(start, start + 32) for start in range(0, 480, 32)]  # two passes
        for seed, workers in ((None, 0), (1, 0), (1, 2)):
            chunks = data.Chunks(pickle.loads(pickle.dumps(source)), split, seed)
            for batch in data.loader(chunks, spans[:7 if seed is None else None], workers):
                rows = batch["rows"].numpy()
                pixels = images.Shapes(shapes_folder, 16).fetch(rows)[0]["image"]
                assert torch.equal(batch["image"], pixels) and np.isin(rows, split[np.arange(len(split))]).all()
                assert batch["caption"] == [record["caption"] for record in source.records(rows)]
