"""Training the small CLIP and embedding captioned images, as users do."""

from functools import partial
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from helpers import CPU, write_captioned
from numpy.testing import assert_allclose

from common import config, order
from common.data import clips, embed, embeddings, images, media, synthetic
from common.models import clip, pixels

TINY = dict(image_size=16, text_width=32, embed_width=16, batch_size=64, steps=150)
run_embed = partial(helpers.run, "common.data.embed")


def train(folder, monkeypatch, rows=64, **settings):
    monkeypatch.setattr(embed, "BUILTIN_ROWS", rows)
    embed.train(embed.Config(run_dir=str(folder), **TINY | settings), CPU)
    return clips.load(folder, CPU)


def test_training_repeats_bit_for_bit_and_depends_on_the_seed(tmp_path, monkeypatch):
    model = train(tmp_path, monkeypatch, steps=2)
    torch.manual_seed(123)  # must have no effect
    assert train(tmp_path, monkeypatch, steps=2).fingerprint() == model.fingerprint()
    assert train(tmp_path, monkeypatch, steps=2, seed=1).fingerprint() != model.fingerprint()


def test_a_clip_whose_training_was_interrupted_is_not_there(tmp_path, monkeypatch):
    def interrupted(steps, **settings):
        if settings["unit"] == "step":
            yield from steps[:15]  # enough for several evaluations
            raise KeyboardInterrupt
        yield from steps

    monkeypatch.setattr(embed.tracker, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, monkeypatch, steps=20)
    with pytest.raises(config.UserError, match=r"model\.pt: there is no CLIP here"):
        clips.load(tmp_path, CPU)


@pytest.mark.parametrize("settings", [{}, dict(optimizer="muon", steps=50)])
def test_training_learns_what_captions_say_of_images(settings, tmp_path, monkeypatch):
    model = train(tmp_path, monkeypatch, 320, **settings)
    # Test on the images that the training scripts use: this CLIP was not trained on them.
    pictures, records = synthetic.shapes(range(320), size=16)
    batches = [(pictures[:100], records[:100]), (pictures[100:], records[100:])]
    (image, text), embedded = embed.embed(model, batches)
    assert embedded == records
    raw, texts, encodings = embed.embed(model, batches, encodings=True, raw=True)[0]
    assert_allclose(raw, model.embed_image(torch.from_numpy(pictures)), atol=1e-5)
    for values, unit in ((raw, image), (texts, text)):
        found = torch.nn.functional.normalize(torch.from_numpy(values))
        assert_allclose(found, unit, atol=1e-5)
    assert encodings.shape == (320, 24, 32)

    nearest = (text @ image.T).argmax(1)
    named = synthetic.named_attributes(records)
    values = synthetic.attribute_values(records)
    fits = (values[nearest] == values) | ~named
    assert fits.all(1).mean() > 0.12  # 0.02 for an untrained CLIP


# The commands


@pytest.fixture
def captioned(tmp_path, monkeypatch):
    """80 captioned shapes in the folder images, with unusable files among them, and a CLIP."""
    monkeypatch.chdir(tmp_path)
    pictures, records = write_captioned(Path("images"), 80, size=24)
    Path("images/damaged.png").write_bytes(b"damaged")
    Path("images/damaged.txt").touch()
    Path("images/00001.txt").write_text("")
    records[1]["caption"] = ""
    settings = TINY | dict(data="images", run_dir="clip", steps=2, batch_size=32)
    return pictures, records, run_embed("train", **settings)


def test_a_clip_learns_the_words_of_its_training_images(captioned):
    _, records, out = captioned
    assert "texts checked, 1 are empty, and 0 are longer" in out
    words = set()
    keys = [f"{i:05d}" for i in range(80)]
    for i in order.split_keys(keys, "train", 0.1, 0.1):
        words |= set(records[i]["caption"].split())
    assert set(clips.load("clip", CPU).tokenizer.vocabulary) == words


def test_images_that_can_be_used_are_embedded_as_the_prior_reads_them(captioned, tmp_path):
    pictures, records, _ = captioned
    out = run_embed("embed", "--encodings", "--raw", data="images", run_dir="clip", out="emb")
    assert "1 of 81 images cannot be used and are left out: images/damaged.png" in out
    model = clips.load("clip", CPU)
    assert config.read_json("emb/clip.json") == {
        "clip": str(tmp_path / "clip"),
        "fingerprint": model.fingerprint(),
    }
    small = pixels.resize_uint8(torch.from_numpy(pictures), 16).numpy()
    arrays, _ = embed.embed(model, [(small, records)], encodings=True, raw=True)
    dataset = embeddings.Embeddings("emb", True)
    batch, _ = dataset.fetch(np.arange(len(dataset)))
    for name, expected in zip(("image_embed", "text_embed", "text_enc"), arrays, strict=True):
        assert_allclose(batch[name], expected, rtol=1e-2, atol=1e-2)
    assert dataset.records([3]) == [{"caption": records[3]["caption"], "key": "00003"}]


def test_the_best_weights_on_held_out_images_are_kept_and_said(captioned, monkeypatch):
    settings = TINY | dict(data="images", run_dir="best", steps=20, batch_size=32)
    out = run_embed("train", "--flip", crop_scale=0.5, **settings)
    shares = [float(line.split()[1]) for line in out.splitlines() if line.startswith("  retrieval")]
    assert len(shares) == 10 and f"retrieval {max(shares):.3f}: fraction of captions" in out
    held_out = list(embed.read("images", 16, "validation"))
    (image, text), records = embed.embed(clips.load("best", CPU), held_out)
    share = clip.retrieval(text, image, embed.captions_of(records))
    assert share == pytest.approx(max(shares), abs=1e-4)


def test_random_squares_of_images_are_inside_and_mirrored():
    ramp = torch.arange(0, 256, 8, dtype=torch.uint8)  # from left to right
    images = ramp[None, None, :, None].repeat(400, 32, 1, 3)
    assert torch.equal(embed.augment(images, 1.0, False), images)
    row = embed.augment(images, 0.25, True)[:, 16, :, 0].float()
    extent = row[:, -1] - row[:, 0]
    assert 0.4 < (extent < 0).float().mean() < 0.6
    assert extent.abs().min() > 0.45 * 248 and extent.abs().max() < 248.5


def test_what_is_embedded_for_training_leaves_out_what_the_decoder_is_tested_on(captioned):
    run_embed("embed", data="images", run_dir="clip", out="emb", split="train")
    dataset = embeddings.Embeddings("emb", captions=True)
    keys = {record["key"] for record in dataset.records(range(len(dataset)))}
    decoder = images.Pictures("images", 16)
    held_out = [*decoder.split("validation", 0.1, 0.1), *decoder.split("test", 0.1, 0.1)]
    assert keys == {decoder.key(i) for i in range(len(decoder))} - {
        "damaged", *map(decoder.key, held_out)
    }


def test_built_in_data_are_made_once_and_anew_if_damaged_or_of_other_settings(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(embed, "BUILTIN_ROWS", 256)
    monkeypatch.setattr(embed, "Config", partial(embed.Config, steps=1))
    folder = Path(embed.builtin_data(tmp_path, CPU))
    dataset = embeddings.Embeddings(folder, captions=True)
    assert len(dataset) == 256
    assert dataset.records([7]) == synthetic.shapes([7])[1]

    path = tmp_path / "clip/model.pt"
    for change, is_new in (
        (lambda: None, False),
        (path.unlink, True),
        ((folder / "clip.json").unlink, True),
        (lambda: monkeypatch.setattr(embed, "BUILTIN_ROWS", 300), True),
    ):
        before = path.stat().st_mtime_ns
        change()
        assert embed.builtin_data(tmp_path, CPU) == str(folder)
        assert (path.stat().st_mtime_ns != before) == is_new


@pytest.mark.parametrize("words, message", {
    "train --data missing": "missing",
    "train --data few --batch_size 4": "few: 1 training images, fewer than a batch of 4",
    "embed --data broken --run_dir clip": "broken: none of its images can be used",
    "train --data few --batch_size 1 --steps 2 --lr 1e30": "weights are not finite;",
}.items())
def test_bad_commands_end_in_one_line(words, message, monkeypatch):
    train("clip", monkeypatch, steps=1)
    for folder in ("broken", "few"):
        Path(folder).mkdir()
        Path(folder, "star.txt").write_text("a star")
    Path("broken/star.png").write_bytes(b"not a picture")
    Path("few/star.png").write_bytes(media.png(np.zeros((8, 8, 3), np.uint8)))
    assert message in run_embed(*words.split(), expect=1).splitlines()[-1]
    assert "--context 2, --text_width" in run_embed("train", "--context", "2", expect=2)
