"""The small CLIP and its tokenizer: what tokens tell apart, padding, repeatability, and the commands."""
import dataclasses
import io
import json
import runpy
import sys
import tarfile
import types
import typing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import flags
from torch import nn

from common import checkpoint, clip, config, data, images, media, synthetic
from common.config import UserError

CPU = torch.device("cpu")
TINY = dict(image_size=16, text_width=32, embed_width=16, batch_size=64, steps=150)
STRANGE = ["", " ", "a small red star", "two  spaces\tand\nlines\r\n", "naïve façade — “quoted”", "日本語の文章",
           "עברית", "👩‍🚀 and 🏳️‍🌈🇫🇷",
           "e\u0301 ≠ é", "\x00\x7f\u2028", "snake_case CamelCase 12,345.67!?...", "\U0010ffff"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "BUILTIN_ROWS", 320)
        return clip.train(clip.Config(run_dir=str(tmp_path_factory.mktemp("clip")), **TINY), CPU)


@pytest.fixture(scope="module")
def shapes():
    return synthetic.shapes(range(40), size=16)


# Tokenizer

def words_of(text):
    """Runs of letters, digits and underscores, and every other character but spaces, of the text in lower case."""
    words, last = [], False
    for char in text.lower():
        inside = char.isalnum() or char == "_"
        if inside and last:
            words[-1] += char
        elif not char.isspace():
            words.append(char)
        last = inside
    return words


def spelled(tokenizer, tokens):
    """The words that the tokens stand for."""
    words = b""
    for token in tokens:
        known = token - clip.BYTES - 256
        words += b" " + tokenizer.vocabulary[known].encode() if known >= 0 else bytes([token - clip.BYTES])
    return words.decode().split(" ")[1:]


def test_tokens_spell_the_words_of_any_text_in_any_language():
    tokenizer = clip.Tokenizer.learn(["a small red star", "two lines, and more"], 100)
    rng, texts = np.random.default_rng(0), list(STRANGE)
    for _ in range(200):  # any code points but halves of surrogate pairs, which are not text
        points = rng.integers(0, [0x80, 0x800, 0x10000, 0x110000][rng.integers(4)], 12)
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    for text in texts:
        tokens = tokenizer.encode(text)
        assert spelled(tokenizer, tokens) == words_of(text)
        assert all(clip.BYTES <= token < len(tokenizer) for token in tokens)
    assert tokenizer.encode("half \ud83d") == tokenizer.encode("half ?")
    assert tokenizer.encode("A\n Star") == tokenizer.encode("a star") != tokenizer.encode("astar")


def test_the_vocabulary_is_the_most_frequent_words_and_signs():
    texts = ["Low, low lower", "new new lower zero, a, be"]
    for size, words in ((0, []), (1, [","]), (3, [",", "low", "lower"]), (99, [",", "low", "lower", "new", "a", "be",
                                                                              "zero"])):
        tokenizer = clip.Tokenizer.learn(texts, size)
        assert tokenizer.vocabulary == words and len(tokenizer) == clip.BYTES + 256 + len(words)
        assert tokenizer.encode("LOW zoo") == clip.Tokenizer(words).encode("low zoo")
    assert clip.Tokenizer(["low"]).encode("low zo") == [259, 3 + ord(" "), 3 + ord("z"), 3 + ord("o")]


def test_long_texts_are_cut_and_keep_their_end(model):
    tokens = model.tokenize(["a star", "a star " * 50, "", "🦊" * 40])  # (4, L)
    assert tokens.shape == (4, 24)
    assert (tokens[:, 0] == clip.START).all()
    assert (tokens == clip.END).int().argmax(1).tolist() == [3, 23, 1, 23]
    assert tokens[0, :5].tolist() == [clip.START, *model.tokenizer.encode("a star"), clip.END, clip.PAD]
    assert tokens[1, 1:23].tolist() == model.tokenizer.encode("a star " * 11)


# Model

def test_padding_and_company_do_not_change_an_embedding(model):
    tokens = model.tokenize(["a star", "a large green triangle at the top left on a gray background"])
    embedding, encodings, mask = model.embed_text(tokens)
    assert torch.equal(mask, tokens != clip.PAD)
    for i in range(2):
        n = int(mask[i].sum())
        alone, encoded, seen = model.embed_text(tokens[i:i + 1, :n])
        torch.testing.assert_close(embedding[i], alone[0])
        torch.testing.assert_close(encodings[i, :n], encoded[0])
        assert seen.all() and not encodings[i, n:].any()


def test_embeddings_have_the_widths_promised_of_bytes_and_of_floats(model, shapes):
    images = torch.from_numpy(shapes[0][:5])
    image, (text, encodings, mask) = model.embed_image(images), model.embed_text(model.tokenize(["a", "b"]))
    assert image.shape == (5, model.embed_width) and text.shape == (2, model.embed_width)
    assert encodings.shape == (2, model.context, model.encoding_width) and mask.shape == (2, model.context)
    torch.testing.assert_close(model.embed_image(images.permute(0, 3, 1, 2).float() / 255), image)


def test_embeddings_are_the_projected_features_and_of_unit_length_only_where_they_are_written(
        model, shapes):
    images, records = shapes
    image = model.embed_image(torch.from_numpy(images))
    tokens = model.tokenize([record["caption"] for record in records])
    text, encodings, mask = model.embed_text(tokens)
    last = encodings[range(40), mask.sum(1) - 1]  # at END
    torch.testing.assert_close(text, last @ model.text_projection.weight.T)
    for raw in (False, True):
        found, _ = clip.embed(model, [shapes], raw=raw)
        for array, embedding in zip(found, (image, text), strict=True):
            lengths = embedding.norm(dim=-1, keepdim=True)
            assert (lengths - 1).abs().max() > 0.1  # so that it makes a difference
            np.testing.assert_allclose(array, embedding if raw else embedding / lengths, atol=1e-5)


@pytest.mark.parametrize("length", [5, 24, 30])
def test_the_condition_of_texts_is_what_they_are_embedded_to_cut_or_padded_and_always_fp32(
        model, length):
    texts = ["a star", "", "a large green triangle at the top left on a gray background"]
    embedding, encodings, mask = model.embed_text(model.tokenize(texts))
    assert mask.sum(1).min() < 5 < mask.sum(1).max()  # some are shorter, some longer
    condition = model.text_condition(texts, length)
    with torch.autocast("cpu", torch.bfloat16):
        again = model.text_condition(texts, length)
    assert condition.keys() == again.keys() == {"text_embed", "text_enc", "text_mask"}
    assert all(torch.equal(value, again[name]) for name, value in condition.items())
    assert torch.equal(condition["text_embed"], embedding)
    assert condition["text_enc"].shape == (3, length, 32)
    assert condition["text_mask"].shape == (3, length)
    kept = min(length, 24)
    assert torch.equal(condition["text_enc"][:, :kept], encodings[:, :kept])
    assert torch.equal(condition["text_mask"][:, :kept], mask[:, :kept])
    assert not condition["text_enc"][:, 24:].any() and not condition["text_mask"][:, 24:].any()


def test_the_image_encoder_takes_pixels_from_minus_one_to_one(model):
    taken = []
    with model.image_encoder.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0])):
        model.embed_image(torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 16, 16, 3))
    assert taken[0][0].unique().tolist() == [-1] and taken[0][1].unique().tolist() == [1]


def test_larger_images_are_brought_to_size(model, shapes):
    large = torch.from_numpy(shapes[0][:4]).repeat_interleave(4, 1).repeat_interleave(4, 2)  # (4, 64, 64, 3)
    same = model.embed_image(torch.from_numpy(shapes[0][:4]))
    assert nn.functional.cosine_similarity(model.embed_image(large), same).min() > 0.97
    edges = torch.full((4, 64, 9, 3), 99, dtype=torch.uint8)
    wide = torch.cat([edges, large, edges], 2)
    assert torch.equal(clip.squares(wide, 64), clip.squares(large, 64))  # the central square
    assert torch.equal(clip.squares(wide.transpose(1, 2), 64), clip.squares(large.transpose(1, 2), 64))
    assert clip.squares(large, 16).min() >= 0 and clip.squares(large, 16).max() <= 1  # bicubic overshoots
    odd = clip.CLIP(clip.Config(image_size=17), [])  # need not halve evenly
    assert odd.embed_image(large).shape == (4, 64)


def test_a_fingerprint_is_of_weights_and_vocabulary_and_of_nothing_else(model):
    cfg = clip.Config(run_dir="elsewhere", seed=7, **TINY)
    twin = clip.CLIP(cfg, model.tokenizer.vocabulary)
    assert twin.fingerprint() != model.fingerprint()
    twin.load_state_dict(model.state_dict())
    assert twin.fingerprint() == model.fingerprint()
    twin.tokenizer.vocabulary.reverse()
    assert twin.fingerprint() != model.fingerprint()


def test_training_learns_and_repeats_bit_for_bit_and_prints_what_held_out_captions_retrieve(
        model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clip, "BUILTIN_ROWS", 320)
    torch.manual_seed(123)  # what was drawn before does not matter
    again = clip.train(clip.Config(run_dir=str(tmp_path / "clip"), **TINY), CPU)
    printed = capsys.readouterr().out
    other = clip.train(clip.Config(run_dir=str(tmp_path / "clip"), seed=1, **TINY), CPU)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(model.log_scale, other.log_scale)
    assert not model.training and not any(p.requires_grad for p in model.parameters())

    images, records = synthetic.shapes(range(320), size=16)  # those of the scripts, none of which it was trained on
    with torch.no_grad():
        image = model.embed_image(torch.from_numpy(images))
        text, _, _ = model.embed_text(model.tokenize([record["caption"] for record in records]))
    cosines = nn.functional.cosine_similarity(text[:, None], image, dim=-1)
    found = [records[i] for i in cosines.argmax(1).tolist()]
    same = np.mean([near["caption"] == record["caption"] for near, record in zip(found, records)])
    fits = np.mean([all(near["attributes"][name] == record["attributes"][name] for name in record["named"])
                    for near, record in zip(found, records)])
    assert printed == f"320 held-out captions: text_to_image {same:.3f}\n"
    assert same > 0.04 and fits > 0.12  # of an untrained one 0.003 and 0.02


def test_embeddings_do_not_depend_on_the_batch_size(model, shapes):
    images, records = shapes
    whole, _ = clip.embed(model, [shapes], encodings=True)
    parts, again = clip.embed(model, [(images[:33], records[:33]), (images[33:], records[33:])], encodings=True)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [a.shape for a in whole] == [(40, 16), (40, 16), (40, 24, 32)] and again == records


# The commands, as a user runs them

@pytest.fixture
def run(monkeypatch, capsys):
    """run(*words) -> (status, output, errors) of `python -m common.clip WORDS`, in this process."""
    def command(*words):
        monkeypatch.setattr(sys, "argv", ["clip.py", *map(str, words)])
        status = 0
        try:
            runpy.run_path(clip.__file__, run_name="__main__")
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()
    return command


def test_train_and_embed_captioned_images(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    images, records = synthetic.shapes(range(80), size=24)
    captions = [record["caption"] for record in records]
    Path("images").mkdir()
    for i, (image, caption) in enumerate(zip(images, captions)):
        media.write_png(f"images/{i:09d}.png", image)
        Path(f"images/{i:09d}.txt").write_text(caption)
    settings = {**TINY, "data": "images", "run_dir": "runs/clip", "steps": 3, "batch_size": 32}
    status, out, error = run("train", *flags(**settings))
    assert status == 0, error
    held_out = [row for row in range(80) if data.part_of(f"{row:09d}", 0.1, 0.1) != "train"]
    assert f"{len(held_out)} held-out captions: text_to_image" in out
    model = clip.load(tmp_path / "runs/clip", "cpu")
    words = {word for row in set(range(80)) - set(held_out) for word in captions[row].split()}
    assert set(model.tokenizer.vocabulary) == words

    status, _, error = run("embed", "--data", "images", "--run_dir", "runs/clip", "--out", "emb", "--encodings")
    assert status == 0, error
    assert json.loads((tmp_path / "emb/clip.json").read_text()) == {
        "clip": str(tmp_path / "runs/clip"), "fingerprint": model.fingerprint(), "place": str(tmp_path / "emb")}
    small = media.resize_bytes(torch.from_numpy(images), 16).numpy()
    (image, text, encodings), _ = clip.embed(model, [(small, records)], encodings=True)
    source = data.Embeddings(tmp_path / "emb", True, True)  # as train_prior.py reads them
    batch, _ = source.fetch(np.arange(80))
    for name, expected in (("image_embed", image), ("text_embed", text), ("text_enc", encodings)):
        np.testing.assert_allclose(batch[name], expected, atol=1e-2)
    assert batch["caption"] == captions
    assert source.captions.records([3]) == [{"caption": captions[3], "key": "000000003"}]
    np.testing.assert_allclose(np.linalg.norm(batch["image_embed"], axis=1), 1, atol=1e-2)

    words = flags(data="images", run_dir="runs/clip", out="raw")
    status, _, error = run("embed", *words, "--raw")
    assert status == 0, error
    (image, text), _ = clip.embed(model, [(small, records)], raw=True)
    batch, _ = data.Embeddings(tmp_path / "raw").fetch(np.arange(80))
    for name, expected in (("image_embed", image), ("text_embed", text)):
        np.testing.assert_allclose(batch[name], expected, rtol=1e-2, atol=1e-2)
        assert np.abs(np.linalg.norm(batch[name], axis=1) - 1).max() > 0.1


def test_damaged_images_are_left_out_by_name_and_tars_get_embeddings_for_the_decoder(tmp_path, monkeypatch, run, model):
    monkeypatch.chdir(tmp_path)
    pictures, records = synthetic.shapes(range(40), size=24)
    for shard in (0, 7):
        Path("tars").mkdir(exist_ok=True)
        with tarfile.open(f"tars/{shard:05d}.tar", "w") as tar:
            for i in range(0, 40, 2):  # as some downloads fail, img2dataset leaves numbers out
                media.write_png("a.png", pictures[i])
                content = b"damaged" if i == 6 else Path("a.png").read_bytes()
                for suffix, data_of in (("png", content), ("txt", records[i]["caption"].encode()), ("gif", b"")):
                    member = tarfile.TarInfo(f"{shard:05d}{i:04d}.{suffix}")
                    member.size = len(data_of)
                    tar.addfile(member, io.BytesIO(data_of))
    settings = {**TINY, "data": "tars", "run_dir": "clip", "steps": 2, "batch_size": 8}
    status, out, error = run("train", *flags(**settings))
    assert status == 0 and "Next: python -m common.clip embed --data tars --run_dir clip --out emb" in out, error
    assert out.count("left out are files of kinds that are not read (40 gif)") == 1
    assert "images cannot be used and are left out: tars/0000" in out
    status, out, error = run("embed", "--data", "tars", "--run_dir", "clip", "--out", "emb")
    assert status == 0 and "2 of 40 images cannot be used and are left out: tars/00000.tar: 000000006.png" in out, error
    assert "train_prior.py --data emb " in out and "train_decoder.py --data tars --clip clip " in out
    assert "--embeddings emb --index_width 4" in out
    source = images.Pictures("tars", 16, "emb")  # as train_decoder.py reads them
    prior = data.Embeddings("emb", captions=True)
    found = {record["key"]: prior.fetch(np.array([row]))[0]["image_embed"][0]
             for row, record in enumerate(prior.captions.records(range(38)))}
    batch, good = source.fetch(np.flatnonzero([source.key(row) in found for row in range(40)]))
    assert good.all() and len(found) == 38
    assert torch.equal(batch["image_embed"], torch.stack([*found.values()]))
    assert "all zero" in source.fault([source.key(row) for row in range(40)].index("000000006"))


def test_builtin_data_is_made_once_and_anew_for_other_settings_or_another_clip(tmp_path, monkeypatch):
    def with_defaults(**settings):
        fields = [(name, typing.get_type_hints(clip.Config)[name], value) for name, value in settings.items()]
        monkeypatch.setattr(clip, "Config", dataclasses.make_dataclass("C", fields, bases=(clip.Config,), frozen=True))

    monkeypatch.setattr(clip, "BUILTIN_ROWS", 300)
    monkeypatch.setattr(clip.config, "from_dict", lambda cls, values, source: values)  # which reads a class's source
    with_defaults(**{**TINY, "steps": 3})
    torch.set_num_threads(9)
    folder = Path(clip.builtin_data(tmp_path, CPU))
    assert folder == tmp_path / "shapes" and config.read_json(folder / "clip.json")["clip"] == str(tmp_path / "clip")
    assert torch.get_num_threads() == 9
    torch.set_num_threads(1)
    source = data.Embeddings(folder, False, True)
    assert len(source) == 300 and source.captions.records([7])[0] == synthetic.shapes([7])[1][0]

    made = [tmp_path / "clip/model.pt", folder / "img_emb/img_emb_0.npy", folder / "clip.json"]
    for change, anew in (
            (lambda: None, False), (lambda: made[2].unlink(), True),
            (lambda: clip.train(clip.Config(run_dir=str(tmp_path / "clip"), seed=3), CPU), True),
            (lambda: clip.embed_all(clip.EmbedConfig(run_dir=str(tmp_path / "clip"), out=str(folder)), CPU), True),
            (lambda: made[0].unlink(), True), (lambda: with_defaults(seed=5), True), (lambda: None, False)):
        change()
        stamps = [path.stat().st_mtime_ns if path.exists() else 0 for path in made]
        assert clip.builtin_data(tmp_path, CPU) == str(folder)
        assert [path.stat().st_mtime_ns > stamp for path, stamp in zip(made, stamps)] == [anew] * 3


# Mistakes of the user

@pytest.mark.parametrize("setting, message", [
    (dict(text_width=48), "--text_width: 48 is not a multiple of 32"),
    (dict(context=2), "--context: 2 is not 3 or more"),
    (dict(batch_size=1), "--batch_size: 1 is not 2 or more"),
])
def test_settings_out_of_bounds_are_named(setting, message):
    with pytest.raises(UserError, match=message):
        clip.Config(**setting)


def test_what_is_no_clip_is_named(tmp_path, model):
    with pytest.raises(UserError, match=r"nowhere: there is no CLIP here; train one.*common\.clip train"):
        clip.load(tmp_path / "nowhere", "cpu")
    checkpoint.save({"model": {}, "config": {}}, tmp_path / "prior.pt")
    with pytest.raises(UserError, match=r"prior\.pt: there is no CLIP here"):
        clip.load(tmp_path / "prior.pt", "cpu")
    state = {"model": model.state_dict(), "config": {**TINY, "embed_width": 32}, "vocabulary": []}
    checkpoint.save(state, tmp_path / "odd.pt")
    with pytest.raises(UserError, match=r"odd\.pt: weights of another model"):
        clip.load(tmp_path / "odd.pt", "cpu")


@pytest.mark.parametrize("words, status, message", [
    ("train --data missing", 1, "missing"),
    ("train --data empty", 1, "no captioned images found"),
    ("train --data few --batch_size 4", 1, "few: 1 training images, fewer than a batch of 4"),
    ("train --data broken", 1, "broken: 0 training images, fewer than a batch"),
    ("embed --data broken --run_dir clip", 1, "broken: none of its images can be used"),
    ("embed --run_dir missing", 1, "missing: there is no CLIP here"),
    ("convert", 2, "convert: expected one of train, embed"),
])
def test_bad_commands_end_in_one_line(tmp_path, monkeypatch, run, model, words, status, message):
    monkeypatch.chdir(tmp_path)
    checkpoint.save({"model": model.state_dict(), "vocabulary": model.tokenizer.vocabulary,
                     "config": config.as_json(clip.Config(**TINY))}, "clip/model.pt")
    for folder in ("empty", "broken", "few"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "star.txt").write_text("a star")
    (tmp_path / "broken/star.png").write_bytes(b"not a picture")
    media.write_png(tmp_path / "few/star.png", np.zeros((8, 8, 3), np.uint8))
    ended, _, error = run(*words.split())
    assert ended == status and message in error.splitlines()[-1], error


# open_clip

def test_a_missing_open_clip_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)  # makes its import fail
    with pytest.raises(UserError, match="pip install open_clip_torch"):
        clip.load("open_clip:ViT-B-32/openai", "cpu")


class StandIn(nn.Module):
    """What the package gives of a model, as small as can be."""

    def __init__(self, name):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.visual, self.context_length = nn.Module(), 6
        self.visual.image_mean, self.visual.image_std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
        self.visual.image_size = (8, 8) if name == "tower" else 8
        self.table = nn.Parameter(torch.randn(128, 5, generator=generator))
        self.pixels = nn.Parameter(torch.randn(192, 5, generator=generator))
        self.norm = nn.LayerNorm(5)
        text = self
        if name == "tower":
            self.text = text = nn.Module()
        text.ln_final, text.cls_emb = self.norm, self.table if name == "coca" else None

    def encode_text(self, tokens):
        return self.norm(self.table[tokens])[torch.arange(len(tokens)), tokens.argmax(1)]

    def encode_image(self, images):
        return images.flatten(1) @ self.pixels


class SimpleTokenizer:
    """Texts are lower-case letters, of which "~" is the end."""

    def __call__(self, texts, context_length=6):
        rows = [[ord(char) for char in text[:context_length - 1]] + [ord("~")] for text in texts]
        return torch.tensor([row + [0] * (context_length - len(row)) for row in rows])


@pytest.fixture
def open_clip(monkeypatch):
    """A package open_clip with a plain CLIP, one with a text tower, and two of which the text encoder is another."""
    def create_model(name, pretrained="", require_pretrained=False, force_quick_gelu=False):
        if name not in ("plain", "tower", "coca", "foreign"):
            raise RuntimeError(f"Model config for {name} not found.")
        model = StandIn(name)
        if pretrained.endswith(".pt"):
            model.load_state_dict(torch.load(pretrained, weights_only=True))
        elif require_pretrained and pretrained != "tag":
            raise RuntimeError(f"Pretrained weights ({pretrained}) not found")
        return model

    package = types.ModuleType("open_clip")
    package.create_model, package.SimpleTokenizer = create_model, SimpleTokenizer
    package.get_pretrained_cfg = lambda name, tag: {}
    package.get_tokenizer = lambda name: (lambda texts, **_: None) if name == "foreign" else SimpleTokenizer()
    monkeypatch.setitem(sys.modules, "open_clip", package)
    return package


def check(open_clip, name, path):
    """The adapter of an open_clip model gives what that gives by itself."""
    theirs, tokenizer = open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)
    torch.save(theirs.state_dict(), path)
    ours = clip.load(f"open_clip:{name}/{path}", "cpu")
    assert ours.fingerprint() == f"open_clip:{name}/{path}" and not ours.training
    texts = ["a small red star", "cat", "a cat " * 200]
    tokens = ours.tokenize(texts)
    assert torch.equal(tokens, tokenizer(texts))
    images = torch.rand(2, 3, ours.image_size, ours.image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedding, encodings, mask = ours.embed_text(tokens)
        torch.testing.assert_close(embedding, theirs.encode_text(tokens))
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (theirs.visual.image_mean, theirs.visual.image_std))
        expected = theirs.encode_image((images - mean) / std)
        torch.testing.assert_close(ours.embed_image(images), expected)
    assert encodings.shape == (3, ours.context, ours.encoding_width) and embedding.shape[1] == ours.embed_width
    assert torch.equal(mask, tokens != 0) and not encodings[~mask].any()  # only padding is 0 in these texts
    return encodings, tokens


@pytest.mark.parametrize("name", ["plain", "tower"])
def test_open_clip_gives_what_it_gives_itself(open_clip, tmp_path, name):
    encodings, tokens = check(open_clip, name, tmp_path / "weights.pt")
    expected = nn.functional.layer_norm(StandIn(name).table[tokens], (5,)) * (tokens != 0)[..., None]
    torch.testing.assert_close(encodings, expected)


@pytest.mark.parametrize("name", ["ViT-B-32", "EVA02-B-16"])  # a CLIP and a CustomTextCLIP
def test_the_real_open_clip_gives_what_it_gives_itself(tmp_path, name):
    assert check(pytest.importorskip("open_clip"), name, tmp_path / "weights.pt")[0].isfinite().all()


@pytest.mark.parametrize("weights, quick", [
    ("ViT-L-14/openai", True), ("ViT-B-16/dfn2b", True), ("ViT-bigG-14/laion2b_s39b_b160k", False),
    ("ViT-L-14/weights.pt", False)])
def test_weights_whose_config_says_so_are_asked_for_with_quick_gelu(weights, quick, monkeypatch):
    asked = []

    def offline(name, **settings):
        asked.append((name, settings))
        raise OSError("no download here")

    package = pytest.importorskip("open_clip")
    monkeypatch.setattr(package, "create_model", offline)
    with pytest.raises(UserError, match="no download here"):
        clip.load(f"open_clip:{weights}", "cpu")
    [(name, settings)] = asked
    assert [name, settings["pretrained"]] == weights.split("/")
    assert settings["force_quick_gelu"] is quick and settings["require_pretrained"]


def small_clip(activation):
    """transformers' CLIPModel, small, of random weights, and its config for open_clip."""
    transformers = pytest.importorskip("transformers")
    depth = dict(num_hidden_layers=2, hidden_act=activation)
    text = dict(hidden_size=32, intermediate_size=128, num_attention_heads=2, **depth)
    vision = dict(hidden_size=48, intermediate_size=192, num_attention_heads=3, **depth,
                  image_size=16, patch_size=8)
    model = transformers.CLIPModel(transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=24)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model, {
        "embed_dim": 24,
        "text_cfg": dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=2),
        "vision_cfg": dict(image_size=16, patch_size=8, width=48, head_width=16, layers=2)}


def open_clip_weights(model):
    """The weights of transformers' CLIPModel by their names in open_clip."""
    text, vision = model.text_model, model.vision_model
    weights = {
        "token_embedding.weight": text.embeddings.token_embedding.weight,
        "positional_embedding": text.embeddings.position_embedding.weight,
        "text_projection": model.text_projection.weight.T,
        "visual.class_embedding": vision.embeddings.class_embedding,
        "visual.conv1.weight": vision.embeddings.patch_embedding.weight,
        "visual.positional_embedding": vision.embeddings.position_embedding.weight,
        "visual.proj": model.visual_projection.weight.T,
        "logit_scale": model.logit_scale}
    modules = {"ln_final": text.final_layer_norm, "visual.ln_pre": vision.pre_layrnorm,
               "visual.ln_post": vision.post_layernorm}
    for place, tower in ("transformer", text), ("visual.transformer", vision):
        for i, layer in enumerate(tower.encoder.layers):
            block = f"{place}.resblocks.{i}"
            attention = layer.self_attn
            modules |= {f"{block}.ln_1": layer.layer_norm1,
                        f"{block}.attn.out_proj": attention.out_proj,
                        f"{block}.ln_2": layer.layer_norm2,
                        f"{block}.mlp.c_fc": layer.mlp.fc1,
                        f"{block}.mlp.c_proj": layer.mlp.fc2}
            parts = attention.q_proj, attention.k_proj, attention.v_proj  # one matrix there
            weights[f"{block}.attn.in_proj_weight"] = torch.cat([part.weight for part in parts])
            weights[f"{block}.attn.in_proj_bias"] = torch.cat([part.bias for part in parts])
    for name, module in modules.items():
        weights |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return {name: value.detach().contiguous() for name, value in weights.items()}


@pytest.mark.parametrize("tag, activation", [
    ("openai", "quick_gelu"), ("laion400m_e32", "gelu"), ("", "quick_gelu"), ("", "gelu")])
@torch.no_grad()
def test_our_embeddings_of_texts_and_images_equal_transformers_of_the_same_weights(
        tag, activation, tmp_path, monkeypatch):
    package = pytest.importorskip("open_clip")
    model, settings = small_clip(activation)
    path = tmp_path / "weights.pt"
    torch.save(open_clip_weights(model), path)
    # A small model by the name and tags of a real one. A file has no tag: the config decides.
    if not tag:
        settings["quick_gelu"] = activation == "quick_gelu"
    for registry in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):
        monkeypatch.setattr(package.factory, registry, getattr(package.factory, registry).copy())
    (tmp_path / "ViT-L-14.json").write_text(json.dumps(settings))
    package.add_model_config(tmp_path / "ViT-L-14.json")
    monkeypatch.setattr(package.factory, "download_pretrained", lambda *_, **__: str(path))
    ours = clip.load(f"open_clip:ViT-L-14/{tag or path}", "cpu")
    assert (ours.embed_width, ours.encoding_width) == (24, 32)
    assert (ours.image_size, ours.context) == (16, 77)

    texts = ["a small red star", "", "cat", "a very long caption " * 40]
    tokens = ours.tokenize(texts)
    embedding, encodings, mask = ours.embed_text(tokens)
    theirs = model.text_model(tokens)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(embedding, model.text_projection(theirs.pooler_output))
    close(encodings[mask], theirs.last_hidden_state[mask])
    assert mask.sum(1).tolist() == [6, 2, 3, 77] and not encodings[~mask].any()

    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    mean = torch.tensor(package.OPENAI_DATASET_MEAN).view(3, 1, 1)
    std = torch.tensor(package.OPENAI_DATASET_STD).view(3, 1, 1)
    theirs = model.vision_model((pixels - mean) / std)
    close(ours.embed_image(pixels), model.visual_projection(theirs.pooler_output))


def test_open_clip_mistakes_are_named_in_one_line(open_clip, monkeypatch):
    assert clip.load("open_clip:plain/tag", "cpu").image_size == 8
    for spec, message in (("other/tag", "Model config for other not found."), ("plain", r"Pretrained weights \(\) not"),
                          ("plain/other", r"Pretrained weights \(other\) not found")):
        with pytest.raises(UserError, match=f"open_clip:{spec}: {message}.*; expected open_clip:MODEL/WEIGHTS"):
            clip.load(f"open_clip:{spec}", "cpu")
    for name in ("coca", "foreign"):
        with pytest.raises(UserError, match=f"open_clip:{name}/tag: its text encoder is not that of the original CLIP"):
            clip.load(f"open_clip:{name}/tag", "cpu")

    def offline(name, **settings):
        raise OSError("We couldn't connect to the hub\nand much more")
    monkeypatch.setattr(open_clip, "create_model", offline)
    with pytest.raises(UserError, match="open_clip:plain/tag: We couldn't connect to the hub; expected"):
        clip.load("open_clip:plain/tag", "cpu")
