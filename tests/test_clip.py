"""The CLIPs: tokens, padding, files, agreement with the package open_clip."""

import json

import numpy as np
import pytest
import torch
from helpers import same
from torch.testing import assert_close

from common import checkpoint
from common.config import UserError
from common.data import clips, synthetic
from common.models import clip, pixels

TRIANGLE = "a large green triangle at the top left on a gray background"
SIZES = dict(image_size=16, context=24, embed_width=16, text_width=32)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    vocabulary = clip.Tokenizer.learn([TRIANGLE, "a small red star"], 100).vocabulary
    return clip.CLIP(vocabulary, **SIZES).eval().requires_grad_(False)


# Tokenizer


def test_the_vocabulary_is_the_most_frequent_words_and_others_are_spelled_by_their_bytes():
    words = [",", "low", "lower", "new", "a", "be", "zero"]
    for size in (0, 3, 99):
        tokenizer = clip.Tokenizer.learn(["Low, low lower", "new new lower zero, a, be"], size)
        assert tokenizer.vocabulary == words[:size]
        assert len(tokenizer) == clip.WORDS + len(tokenizer.vocabulary)
    tokenizer = clip.Tokenizer(["low"])
    spelled = b" \xc3\xbc3 ,"  # each word after a space
    assert tokenizer.encode("LOW\n Ü3,") == [259, *(3 + byte for byte in spelled)]
    for text, other in (("half \ud83d", "half ?"), ("U\u03083,", "\xfc3,")):  # forms of an accent
        assert tokenizer.encode(text) == tokenizer.encode(other)
    assert clip.Tokenizer.learn(["cafe\u0301"], 9).vocabulary == ["caf\xe9"]


# Model


def test_long_texts_are_cut_and_keep_their_end(model):
    short, long = model.tokenize(["a star", "a star " * 50])
    words = model.tokenizer.encode("a star")
    assert short.tolist() == [clip.START, *words, clip.END] + [clip.PAD] * 20
    assert long.tolist() == [clip.START, *words * 11, clip.END]


def test_padding_and_company_do_not_change_an_embedding(model):
    tokens = model.tokenize(["a star", TRIANGLE])
    embedding, encodings, mask = model.embed_text(tokens)
    assert torch.equal(mask, tokens != clip.PAD)
    assert not encodings[~mask].any()
    for i in range(2):
        alone = tokens[i : i + 1, mask[i]]
        embedding_alone, encodings_alone, _ = model.embed_text(alone)
        assert_close(embedding_alone[0], embedding[i])
        assert_close(encodings_alone[0], encodings[i, mask[i]])


@pytest.mark.parametrize("length", [5, 30])
def test_the_condition_of_texts_is_cut_or_padded_and_always_fp32(model, length):
    texts = ["a star", "", TRIANGLE]
    embedding, encodings, mask = model.embed_text(model.tokenize(texts))
    assert mask.sum(1).max() > 5  # some are longer
    with torch.autocast("cpu", torch.bfloat16):
        condition = model.text_condition(texts, length)
    more = length - 24
    expected = {
        "text_embed": embedding,
        "text_enc": torch.nn.functional.pad(encodings, (0, 0, 0, more)),
        "text_mask": torch.nn.functional.pad(mask, (0, more)),
    }
    assert same(condition, expected)


def test_images_are_cut_to_the_central_square_and_resized_with_pixels_from_minus_one_to_one(model):
    for value, pixel in ((0, -1.0), (255, 1.0)):
        image = torch.full((1, 16, 16, 3), value, dtype=torch.uint8)
        expected = model.image_encoder(torch.full((1, 3, 16, 16), pixel))
        assert_close(model.embed_image(image), expected)

    drawn, _ = synthetic.shapes(range(4), size=64)
    wide = torch.from_numpy(drawn[:, :50])  # bicubic overshoots
    shrunk = pixels.resize(wide.permute(0, 3, 1, 2) / 255, 16).clamp(0, 1)  # (4, 3, 16, 20)
    assert_close(clip.center_crop(wide, 16), shrunk[..., 2:18])


# Files


def test_retrieval_counts_what_is_nearest_by_the_hundred():
    rng = np.random.default_rng(0)
    references = rng.standard_normal((250, 8))
    references /= np.linalg.norm(references, axis=1, keepdims=True)
    captions = [f"caption {i}" for i in range(250)]
    assert clip.retrieval(references, references, captions) == 1
    queries = references.copy()
    queries[:20] = references[20:40]  # 20 of the 200 find another; 50 are left over
    queries[200:] = 0
    assert clip.retrieval(queries, references, captions) == 0.9
    captions[0] = captions[20]  # an equal caption is right
    assert clip.retrieval(queries, references, captions) == 0.905
    assert clip.retrieval(references[[1, 1]], references[:2], captions[:2]) == 0.5  # of two


def test_a_clip_survives_its_file_and_what_is_none_or_another_is_named(tmp_path, model):
    settings = {"vocabulary": model.tokenizer.vocabulary, **SIZES}
    contents = {"kind": "clip", "model": model.state_dict(), "settings": settings}
    checkpoint.save(contents, tmp_path / "model.pt")
    checkpoint.save({**contents, "kind": "prior"}, tmp_path / "prior.pt")
    checkpoint.save({**contents, "settings": {**settings, "embed_width": 8}}, tmp_path / "odd.pt")
    loaded = clips.load(tmp_path, "cpu", model.fingerprint())
    texts = [TRIANGLE, "a new word"]
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
    """The package, offline, where the name ViT-L-14 stands for a small model."""
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

    tokens = ours.tokenize(["a small red star", "", "cat", "a very long caption " * 40])
    embedding, encodings, mask = ours.embed_text(tokens)
    assert mask.sum(1).tolist() == [6, 2, 3, 77]
    assert not encodings[~mask].any()
    assert_close(embedding, theirs.encode_text(tokens))
    end = encodings[range(4), mask.sum(1) - 1]
    assert_close(end @ theirs.text_projection, embedding)

    text_only = clips.load(ours.spec, "cpu", text_only=True)
    assert text_only.model.visual is None
    assert same(text_only.embed_text(tokens), (embedding, encodings, mask))

    # Photos that are square or not, by its own preprocessing
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
    with pytest.raises(UserError, match="its text encoder is not that of the original CLIP"):
        clips.load("open_clip:ViT-L-14/openai", "cpu")
