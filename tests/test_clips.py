"""The CLIP of a run, found by name or from the data; embeddings equal to those of open_clip."""

import contextlib
import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import same
from torch.testing import assert_close

from common import checkpoint, order
from common.config import UserError
from common.data import clips, embeddings, images, media, synthetic
from common.models import clip

TEXT = "a large green triangle at the top left on a gray background"
SIZES = dict(image_size=16, context=24, embed_width=16, text_width=32)

# Files


def test_a_clip_survives_its_file_and_what_is_none_or_another_is_named(tmp_path):
    torch.manual_seed(0)
    vocabulary = clip.Tokenizer.learn([TEXT, "a small red star"], 100).vocabulary
    model = clip.CLIP(vocabulary, **SIZES).eval()
    model.requires_grad_(False)
    settings = {"vocabulary": vocabulary, **SIZES}
    contents = {"kind": "clip", "model": model.state_dict(), "settings": settings}
    checkpoint.save(contents, tmp_path / "model.pt")
    checkpoint.save({**contents, "kind": "prior"}, tmp_path / "prior.pt")
    checkpoint.save({**contents, "settings": {**settings, "embed_width": 8}}, tmp_path / "odd.pt")
    loaded = clips.load(tmp_path, "cpu", model.fingerprint())
    texts = [TEXT, "a new word"]
    assert same(loaded.text_condition(texts, 9), model.text_condition(texts, 9))
    for name, message in (
        ("nowhere", "there is no CLIP here; train one"),
        ("prior.pt", "there is no CLIP here"),
        ("odd.pt", "text_projection"),
    ):
        with pytest.raises(UserError, match=f"{name}.*: .*{message}"):
            clips.load(tmp_path / name, "cpu")
    loaded.tokenizer.vocabulary.reverse()
    assert loaded.fingerprint() != model.fingerprint()
    with pytest.raises(UserError, match="not the CLIP that made the embeddings"):
        clips.load(tmp_path, "cpu", loaded.fingerprint())


# open_clip


@pytest.fixture
def open_clip(monkeypatch, tmp_path):
    """The open_clip package, offline, where ViT-L-14 is a small model."""
    package = pytest.importorskip("open_clip")
    for registry in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):
        monkeypatch.setattr(package.factory, registry, getattr(package.factory, registry).copy())
    text = dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=2)
    vision = dict(image_size=16, patch_size=8, width=48, head_width=16, layers=2)
    settings = {"embed_dim": 24, "text_cfg": text, "vision_cfg": vision}
    (tmp_path / "ViT-L-14.json").write_text(json.dumps(settings))
    package.add_model_config(tmp_path / "ViT-L-14.json")
    torch.save(package.create_model("ViT-L-14").state_dict(), tmp_path / "weights.pt")

    def download(cfg, **_):
        if cfg and (cfg["hf_hub"] or cfg["url"]):
            return str(tmp_path / "weights.pt")
        raise OSError("no download here\nand much more")

    for module in (package, package.factory):
        monkeypatch.setattr(module, "download_pretrained", download)
    return package


@pytest.mark.parametrize("weights", ["openai", "laion400m_e32"])
@torch.no_grad()
def test_embeddings_are_those_of_open_clip_with_the_activation_of_the_weights(open_clip, weights):
    ours = clips.load(f"open_clip:ViT-L-14/{weights}", "cpu")
    theirs = ours.model
    assert not ours.training
    assert (ours.embed_width, ours.encoding_width, ours.image_size) == (24, 32, 16)
    kinds = {type(module) for module in theirs.modules()}
    assert (open_clip.transformer.QuickGELU in kinds) == (weights == "openai")

    tokens = ours.tokenizer(["a small red star", "", "cat", "a very long caption " * 40])
    embedding, encodings, mask = ours.embed_text(tokens)
    assert mask.sum(1).tolist() == [6, 2, 3, 77]
    assert not encodings[~mask].any()
    assert_close(embedding, theirs.encode_text(tokens))
    end = encodings[range(4), mask.sum(1) - 1]
    assert_close(end @ theirs.text_projection, embedding)

    text_only = clips.load(ours.spec, "cpu", text_only=True)
    assert text_only.model.visual is None
    assert same(text_only.embed_text(tokens), (embedding, encodings, mask))

    # Compare on square and non-square photos, with open_clip's own preprocessing.
    Image = pytest.importorskip("PIL.Image")
    mean, std = theirs.visual.image_mean, theirs.visual.image_std
    preprocess = open_clip.image_transform(16, is_train=False, mean=mean, std=std)
    for size in ((16, 16), (61, 40), (27, 38)):
        photo = Image.radial_gradient("L").rotate(20).resize(size).convert("RGB")
        expected = theirs.encode_image(preprocess(photo)[None])
        embedding = ours.embed_image(torch.tensor(np.asarray(photo))[None])
        assert_close(embedding, expected, rtol=0.01, atol=0.01)


def test_what_open_clip_lacks_and_other_text_encoders_are_refused_in_a_line(open_clip, monkeypatch):
    for spec in ("other/tag", "ViT-L-14", "ViT-L-14/other"):
        for text_only in (False, True):
            message = f"^open_clip:{spec}: expected open_clip:MODEL/WEIGHTS"
            with pytest.raises(UserError, match=message):
                clips.load(f"open_clip:{spec}", "cpu", text_only=text_only)
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: lambda texts, **_: None)
    with pytest.raises(UserError, match="its text encoder differs from the original CLIP's"):
        clips.load("open_clip:ViT-L-14/openai", "cpu")


# The CLIP of a run


def test_a_folder_names_its_clip_and_whether_it_is_built_in(tmp_path, capsys):
    cfg = SimpleNamespace(data=tmp_path, clip="auto")
    assert clips.clip_of(cfg) == (None, None)
    checkpoint.save({"model": {}, "clip": "y", "clip_fingerprint": "g"}, "model.pt")
    assert clips.clip_of(cfg, "model.pt") == ("y", "g")
    note = {"clip": "x", "fingerprint": "f"}
    for more in ({}, {"made_from": "y"}):
        (tmp_path / "clip.json").write_text(json.dumps(note | more))
        assert clips.clip_of(cfg) == ("x", "f")
        assert synthetic.is_built_in(tmp_path) == bool(more)
    cfg.clip = "z"
    assert capsys.readouterr().err == ""
    assert clips.clip_of(cfg, "model.pt") == ("z", "f")
    assert "trained with a CLIP other than the one in" in capsys.readouterr().err


class Encoder:
    """A CLIP whose embeddings depend only on an image's first pixel or a text's hash."""

    def embed_image(self, images):
        return torch.cat([images[:, 0, 0].float(), torch.full((len(images), 1), 200.0)], 1)

    def text_condition(self, texts, length):
        numbers = [[order.hash_of(text.encode()) >> 56 << 1, 200] for text in texts]
        return {"text_embed": torch.tensor(numbers).float()}

    def parameters(self):
        yield torch.zeros(1)


@pytest.mark.parametrize("change, refused", [
    (lambda rows: rows, False),
    (lambda rows: rows + np.random.default_rng(1).normal(0, 5, rows.shape), False),
    (lambda rows: rows[np.random.default_rng(0).permutation(len(rows))], True),
    (lambda rows: np.roll(rows, 1, 0), True),
    (lambda rows: np.concatenate([rows[:9], rows[12:], rows[:3]]), True),  # rows 9 to 11 missing
])
def test_embeddings_in_another_order_than_the_pictures_are_refused_if_a_clip_is_at_hand(
        change, refused, tmp_path, capsys):
    colors = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3)).astype(np.uint8)
    colors[:] = colors[:, :1, :1]
    colors[1:5] = colors[:1]  # equal pictures
    files = {}
    for i, image in enumerate(colors):
        files |= {f"000000{i:03d}.png": media.png(image), f"000000{i:03d}.txt": b"a"}
    with tarfile.open(tmp_path / "000000.tar", "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    rows = Encoder().embed_image(torch.from_numpy(colors)).numpy()
    np.save(tmp_path / "img_emb_0.npy", change(rows).astype(np.float32))
    dataset = images.Pictures(tmp_path, 8)
    cfg = SimpleNamespace(raw_embeddings=False)
    clips.check_source(cfg, dataset, tmp_path)
    assert "cannot check whether embeddings are in the order" in capsys.readouterr().err
    refusal = pytest.raises(UserError, match=r"not in the same order as their samples: sample \d")
    with refusal if refused else contextlib.nullcontext():
        clips.check_source(cfg, dataset, tmp_path, Encoder())


@pytest.mark.parametrize("shift", [0, 1])
def test_text_embeddings_in_another_order_than_the_captions_are_refused_by_a_prior(shift, tmp_path):
    captions = [f"caption {i // 2}" for i in range(60)]  # each caption occurs twice
    rows = Encoder().text_condition(captions, 1)["text_embed"].numpy()
    records = [{"caption": caption} for caption in captions]
    embeddings.write_shards(tmp_path, rows, np.roll(rows, 2 * shift, 0), records)
    dataset = embeddings.Embeddings(tmp_path, captions=True)
    cfg = SimpleNamespace(raw_embeddings=False)
    refusal = pytest.raises(UserError, match=f"{tmp_path}: embeddings are not in the same order")
    with refusal if shift else contextlib.nullcontext():
        clips.check_source(cfg, dataset, tmp_path, Encoder())


def test_embeddings_of_unit_length_are_refused_by_a_model_of_raw_ones(tmp_path):
    rows = np.random.default_rng(0).standard_normal((150, 6))
    raw = SimpleNamespace(raw_embeddings=True)
    embeddings.write_shards(tmp_path, rows, rows, [])
    clips.check_source(raw, embeddings.Embeddings(tmp_path), tmp_path)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    embeddings.write_shards(tmp_path, unit, rows, [])
    dataset = embeddings.Embeddings(tmp_path)
    clips.check_source(SimpleNamespace(raw_embeddings=False), dataset, tmp_path)
    with pytest.raises(UserError, match=r"have unit length, .* embed --raw"):
        clips.check_source(raw, dataset, tmp_path)
