"""Captioned images in tars and folders."""
import io
import json
import random
import tarfile

import numpy as np
import pytest

from common import data, media
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
    images = data.CaptionedImages(path)
    assert (len(images), images.uncaptioned) == (5, 0)
    for i in random.Random(0).sample(range(5), 5):
        image, caption, key = images[i]
        np.testing.assert_array_equal(image, picture(i))
        assert caption == f"caption {i} ü" and key.endswith(f"{i:09d}")


def test_images_without_a_caption_are_left_out_and_counted_and_json_will_do(tmp_path):
    files = members(range(4))
    for name in ("000000001.txt", "000000001.json", "000000002.txt"):
        del files[name]
    write_tar(tmp_path / "a.tar", files)
    images = data.CaptionedImages(tmp_path)
    assert (len(images), images.uncaptioned) == (3, 1)
    assert [images[i][1:] for i in range(3)] == [("caption 0 ü", "000000000"), ("of the json", "000000002"),
                                                 ("caption 3 ü", "000000003")]
    write_tar(tmp_path / "a.tar", {"x.png": png(picture(0)), "x.json": b'{"caption": null}',
                                   "y.png": png(picture(0)), "y.json": b'{"text": "a"}'})
    images = data.CaptionedImages(tmp_path)
    assert images[0][1] == ""
    with pytest.raises(UserError, match=r"a\.tar: y\.json: no entry 'caption'"):
        images[1]


def test_jpegs_and_gray_or_transparent_images_come_as_rgb(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    smooth = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    modes = {"a.jpg": "RGB", "b.png": "L", "c.png": "RGBA", "d.webp": "RGB", "e.jpeg": "L", "f.png": "LA"}
    for name, mode in modes.items():
        pillow.fromarray(smooth).convert(mode).save(tmp_path / name, **({} if ".png" in name else {"quality": 95}))
        (tmp_path / name).with_suffix(".txt").write_text(name)
    images = data.CaptionedImages(tmp_path)
    gray = np.asarray(pillow.fromarray(smooth).convert("L"))[..., None].repeat(3, -1)
    assert len(images) == 6
    for image, name, _ in (images[i] for i in range(6)):
        expected = gray if name[0] in "bef" else smooth
        assert image.shape == (16, 16, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - expected).mean() < (1e-9 if ".png" in name else 6)


@pytest.mark.parametrize("name, content",
                         [("a.png", b"hello"), ("a.png", png(picture(0))[:-30]), ("a.jpg", b"\xff\xd8hello")])
def test_an_unreadable_image_is_named_with_its_tar(name, content, tmp_path):
    if name.endswith(".jpg"):
        pytest.importorskip("PIL")
    write_tar(tmp_path / "shard.tar", {name: content, "a.txt": b"caption"})
    images = data.CaptionedImages(tmp_path)
    with pytest.raises(UserError, match=rf"shard\.tar: {name}: not a readable image"):
        images[0]


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
        data.CaptionedImages(tmp_path)


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
        data.CaptionedImages(path)
