"""The small CLIP and its tokenizer: round trips, a reference loss, padding, repeatability, and the commands."""
import dataclasses
import io
import json
import subprocess
import sys
import tarfile
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from common import checkpoint, clip, config, data, media, synthetic
from common.config import UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(image_size=16, text_width=32, text_depth=1, embed_width=16, channels=(8, 8, 16), batch_size=32, steps=12,
            warmup_steps=4)
STRANGE = ["", " ", "a small red star", "two  spaces\tand\nlines\r\n", "naïve façade — “quoted”", "日本語の文章",
           "עברית",
           "👩‍🚀 and 🏳️‍🌈🇫🇷", "e\u0301 ≠ é", "\x00\x7f\u2028", "snake_case CamelCase 12,345.67!?...", "\U0010ffff"]


@pytest.fixture(scope="module")
def tokenizer():
    return clip.Tokenizer.learn([clip.plain(r["caption"]) for r in synthetic.shapes(range(500), size=1)[1]], 1024)


@pytest.fixture(scope="module")
def shapes():
    images, records = synthetic.shapes(range(320), size=16)
    return images, records


@pytest.fixture(scope="module")
def model(shapes):
    return clip.train(shapes[0], [r["caption"] for r in shapes[1]], clip.Config(**TINY), "cpu")


# Tokenizer

def test_any_text_survives_the_round_trip(tokenizer):
    generator, texts = np.random.default_rng(0), list(STRANGE)
    for _ in range(200):  # any code points but halves of surrogate pairs, which are not text
        points = generator.integers(0, [0x80, 0x800, 0x10000, 0x110000][generator.integers(4)], 12)
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert all(clip.BYTES <= token < len(tokenizer) for token in tokens)
    assert tokenizer.decode(tokenizer.encode("half \ud83d pair")) == "half ? pair"


def test_known_words_are_one_token_and_unseen_ones_fall_back(tokenizer):
    for values in synthetic.ATTRIBUTES.values():
        for word in " ".join(values).split():
            assert len(tokenizer.encode(f" {word}")) == 1, word
    assert 1 < len(tokenizer.encode(" zeppelin")) <= len(b" zeppelin")


def test_merges_are_learned_as_the_definition_says():
    """The slow way: recount everything after each merge, most frequent first, ties to the smaller pair."""
    texts = [" low low low low low lower lower newest newest newest newest newest newest widest widest widest 日日本"]
    words = [tuple(clip.BYTES + b for b in piece.encode()) for piece in clip.PIECES.findall(texts[0])]
    expected = []
    while True:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):  # noqa: RUF007 (a reference is to be plain)
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], -pair[0], -pair[1]), default=None)
        if best is None or counts[best] < 2:
            break
        token, again = clip.BYTES + 256 + len(expected), []
        expected.append(best)
        for word in words:
            i, new = 0, []
            while i < len(word):
                pair = word[i:i + 2] == best
                new.append(token if pair else word[i])
                i += 2 if pair else 1
            again.append(tuple(new))
        words = again
    learned = clip.Tokenizer.learn(texts, 10_000)
    assert learned.merges == expected
    assert clip.Tokenizer.learn(texts, 259 + 5).merges == expected[:5]
    assert tuple(learned.encode(texts[0])) == sum(words, ())


def test_long_texts_are_cut_and_keep_their_end(model):
    tokens = model.tokenize(["a star", "a star " * 50, "", "🦊" * 40])
    assert tokens.dtype == torch.int64 and tokens.shape == (4, model.context)
    assert (tokens[:, 0] == clip.START).all() and ((tokens == clip.END).sum(1) == 1).all()
    assert tokens[1, -1] == clip.END and tokens[3, -1] == clip.END and tokens[2, 1] == clip.END
    real = tokens[0][tokens[0] != clip.PAD]
    assert model.tokenizer.decode(real.tolist()) == " a star"
    assert torch.equal(model.tokenize(["  A Star\n"]), model.tokenize(["a star"]))


# Model

def test_padding_and_company_do_not_change_an_embedding(model):
    texts = ["a star", "a large green triangle at the top left on a gray background"]
    tokens = model.tokenize(texts)
    embedding, encodings, mask = model.embed_text(tokens)
    assert torch.equal(mask, tokens != clip.PAD)
    for i in range(2):
        n = int(mask[i].sum())
        alone, encoded, seen = model.embed_text(tokens[i:i + 1, :n])
        torch.testing.assert_close(embedding[i], alone[0])
        torch.testing.assert_close(encodings[i, :n], encoded[0])
        assert seen.all() and not encodings[i, n:].any()


def test_embeddings_have_unit_norm_and_the_widths_promised(model, shapes):
    images = torch.from_numpy(shapes[0][:5])
    image, (text, encodings, mask) = model.embed_image(images), model.embed_text(model.tokenize(["a", "b"]))
    assert image.shape == (5, model.embed_width) and text.shape == (2, model.embed_width)
    assert encodings.shape == (2, model.context, model.encoding_width) and mask.shape == (2, model.context)
    torch.testing.assert_close(torch.cat([image, text]).norm(dim=-1), torch.ones(7))
    torch.testing.assert_close(model.embed_image(images.permute(0, 3, 1, 2).float() / 255), image)


def test_larger_images_are_brought_to_size(model, shapes):
    large = torch.from_numpy(shapes[0][:4]).repeat_interleave(4, 1).repeat_interleave(4, 2)  # (4, 64, 64, 3)
    wide = torch.cat([torch.zeros(4, 64, 9, 3), large, torch.zeros(4, 64, 9, 3)], 2).to(torch.uint8)
    same = model.embed_image(torch.from_numpy(shapes[0][:4]))
    assert (model.embed_image(large) * same).sum(1).min() > 0.97
    torch.testing.assert_close(model.embed_image(wide), model.embed_image(large))  # the central square


def test_a_fingerprint_is_of_weights_and_tokenizer_and_of_nothing_else(model):
    twin = clip.CLIP(dataclasses.replace(model.cfg, run="elsewhere", steps=7), model.tokenizer.merges)
    assert twin.fingerprint() != model.fingerprint()
    twin.load_state_dict(model.state_dict())
    assert twin.fingerprint() == model.fingerprint()
    twin.tokenizer.merges.reverse()
    assert twin.fingerprint() != model.fingerprint()


def test_the_image_encoder_knows_where_a_thing_is(model):
    plain = {"shape": "circle", "color": "red", "size": "small", "background": "white"}
    images = synthetic.draw([{**plain, "place": p} for p in synthetic.ATTRIBUTES["place"]], size=16)
    similarity = (e := model.embed_image(torch.from_numpy(images))) @ e.T
    assert similarity.fill_diagonal_(0).max() < 0.999


@pytest.mark.parametrize("count", [1, 7])
def test_loss_equals_a_slow_reference(count):
    generator = torch.Generator().manual_seed(count)
    image, text = (torch.randn(count, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = 0.0
    for a, b in ((image, text), (text, image)):
        for i in range(count):
            scores = [float(np.exp(3.0 * float(a[i] @ b[j]))) for j in range(count)]
            expected -= np.log(scores[i] / sum(scores)) / count / 2
    found = clip.contrastive_loss(image, text, torch.tensor(3.0))
    assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_training_learns_and_repeats_bit_for_bit(model, shapes):
    captions = [record["caption"] for record in shapes[1]]

    def loss(m):
        image, text, _ = clip.embed(m, shapes[0], captions)
        return clip.contrastive_loss(torch.from_numpy(image), torch.from_numpy(text), torch.tensor(10.0)).item()

    torch.manual_seed(123)  # what was drawn before does not matter
    again = clip.train(shapes[0], captions, clip.Config(**TINY), "cpu")
    other = clip.train(shapes[0], captions, clip.Config(**TINY, seed=1), "cpu")
    start = clip.train(shapes[0], captions, clip.Config(**{**TINY, "lr": 0.0}), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(model.log_scale, other.log_scale)
    assert loss(model) < loss(start) - 0.5
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_embed_does_not_depend_on_the_batch_size(model, shapes):
    captions = [record["caption"] for record in shapes[1]]
    whole, parts = (clip.embed(model, shapes[0], captions, n, encodings=True) for n in (320, 33))
    for a, b in zip(whole, parts):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert whole[2].shape == (320, model.context, model.encoding_width)


def test_figures_of_known_embeddings(shapes):
    records = shapes[1]
    codes = np.array([[synthetic.ATTRIBUTES[k].index(v) for k, v in r["attributes"].items()] for r in records])
    known = np.concatenate([np.eye(8)[codes[:, i]] for i in range(5)], 1).astype(np.float32) / 5 ** 0.5
    asked = np.concatenate([np.eye(8)[codes[:, i]] * [[name in r["named"]] for r in records]
                            for i, name in enumerate(synthetic.ATTRIBUTES)], 1).astype(np.float32)
    figures = clip.matches(known, asked, records)
    assert figures["caption_match"] == 1.0  # one that says exactly what is named finds an image that fits
    assert clip.matches(np.roll(known, 1, 0), asked, records)["caption_match"] < 0.2
    captions = ["x", "y", "x"]
    figures = clip.retrieval(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[[2, 0, 0]], captions)
    assert figures["text_to_image"] == pytest.approx(2 / 3) and figures["chance"] == pytest.approx(5 / 9)


# The commands, as a user runs them

def run(*words, cwd):
    return subprocess.run([sys.executable, "-m", "common.clip", *map(str, words)], cwd=cwd, capture_output=True,
                          text=True, timeout=100, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})


def write_tar(path, images, captions):
    with tarfile.open(path, "w") as archive:
        for i, (image, caption) in enumerate(zip(images, captions)):
            media.write_png(buffer := io.BytesIO(), image)
            for name, contents in ((f"{i:09d}.png", buffer.getvalue()), (f"{i:09d}.txt", caption.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))


def flags(**settings):
    return [word for name, value in settings.items()
            for word in (f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value))]


def test_train_and_embed_from_tars(tmp_path):
    images, records = synthetic.shapes(range(80), size=24)
    captions = [record["caption"] for record in records]
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "00000.tar", images, captions)
    trained = run("train", "--data", "tars", "--run", "runs/clip", *flags(**TINY), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "held-out pairs" in trained.stdout and "text_to_image" in trained.stdout
    settings = json.loads((tmp_path / "runs/clip/config.json").read_text())
    assert settings["steps"] == TINY["steps"] and "torch" in settings["versions"]
    model = clip.load(tmp_path / "runs/clip", "cpu")
    assert config.parse(clip.Config, ["--config", str(tmp_path / "runs/clip/config.json")], "") == model.cfg

    embedded = run("embed", "--data", "tars", "--run", "runs/clip", "--out", "emb", "--encodings", cwd=tmp_path)
    assert embedded.returncode == 0, embedded.stderr
    assert json.loads((tmp_path / "emb/clip.json").read_text()) == {"clip": str(tmp_path / "runs/clip")}
    _, text, encodings = clip.embed(model, images[:, :16, :16], captions, encodings=True)
    np.testing.assert_allclose(np.load(tmp_path / "emb/text_emb/text_emb_0.npy"), text, atol=2e-3)
    np.testing.assert_allclose(np.load(tmp_path / "emb/text_enc/text_enc_0.npy"), encodings, atol=1e-2)
    source = data.Embeddings(tmp_path / "emb", True, True)  # as train_prior.py reads them
    assert len(source) == 80
    assert [record["caption"] for record in source.captions.records(range(80))] == captions


def test_builtin_data_is_made_once_and_remade_when_settings_change(tmp_path, monkeypatch):
    def with_defaults(**settings):
        fields = [(name, typing.get_type_hints(clip.Config)[name], value) for name, value in settings.items()]
        monkeypatch.setattr(clip, "Config", dataclasses.make_dataclass("C", fields, bases=(clip.Config,), frozen=True))

    monkeypatch.setattr(clip, "BUILTIN_ROWS", 300)
    with_defaults(**TINY)
    folder = Path(clip.builtin_data(tmp_path, torch.device("cpu")))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock")
    stamps = [path.stat().st_mtime_ns for path in files]
    source = data.Embeddings(folder, False, True)
    assert len(source) == 300 and source.captions.records([7])[0] == synthetic.shapes([7])[1][0]
    assert clip.builtin_data(tmp_path, torch.device("cpu")) == str(folder)
    assert [path.stat().st_mtime_ns for path in files] == stamps
    (folder / "clip.json").unlink()
    clip.builtin_data(tmp_path, torch.device("cpu"))  # only the embeddings are made again
    assert [path.stat().st_mtime_ns > stamp for path, stamp in zip(files, stamps)] == [folder in path.parents
                                                                                       for path in files]
    with_defaults(seed=5)
    stamps = [path.stat().st_mtime_ns for path in files]
    clip.builtin_data(tmp_path, torch.device("cpu"))
    assert all(path.stat().st_mtime_ns > stamp for path, stamp in zip(files, stamps))


def test_held_out_samples_are_those_of_the_prior(shapes):
    _, records = shapes
    out = clip.held_out(records, 0.2)
    parts = [data.Split(320, part, 0.1, 0.1) for part in ("validation", "test")]
    assert np.flatnonzero(out).tolist() == sorted(row for p in parts for row in p[np.arange(len(p))].tolist())
    keyed = [{"caption": "", "key": f"{i:09d}"} for i in range(3000)]
    assert 0.17 < clip.held_out(keyed, 0.2).mean() < 0.23
    assert (clip.held_out(keyed[:100], 0.2) == clip.held_out(keyed, 0.2)[:100]).all()


# Mistakes of the user

def test_mistakes_are_named(tmp_path, model, shapes):
    captions = [record["caption"] for record in shapes[1]]
    with pytest.raises(UserError, match=r"320 training images.*batch of 512.*--batch_size"):
        clip.train(shapes[0], captions, clip.Config(**{**TINY, "batch_size": 512}), "cpu")
    with pytest.raises(UserError, match="image_size must be a multiple of 8, not 20"):
        clip.Config(image_size=20)
    with pytest.raises(UserError, match=r"nowhere.*no CLIP here.*common\.clip train"):
        clip.load(tmp_path / "nowhere", "cpu")
    checkpoint.save({"model": {}, "config": {}}, tmp_path / "prior.pt")
    with pytest.raises(UserError, match=r"prior\.pt: not a CLIP"):
        clip.load(tmp_path / "prior.pt", "cpu")
    state = {"model": model.state_dict(), "config": dataclasses.asdict(model.cfg), "merges": model.tokenizer.merges}
    checkpoint.save({**state, "config": {**state["config"], "embed_width": 32}}, tmp_path / "odd.pt")
    with pytest.raises(UserError, match=r"odd\.pt: a CLIP of another version"):
        clip.load(tmp_path / "odd.pt", "cpu")
    with pytest.raises(ValueError, match=r"\(2, 16, 16\)"):
        model.embed_image(torch.zeros(2, 16, 16))


@pytest.mark.parametrize("words, status, message", [
    ("train --data missing", 1, "missing: no such file or folder"),
    ("train --data empty", 1, "no captioned images found"),
    ("train --data broken", 1, "star.png: not a readable image"),
    ("train --batch_sise 4", 2, "did you mean --batch_size?"),
    ("embed --run missing", 1, "missing: there is no CLIP here"),
    ("convert", 2, "'convert': expected one of train, embed"),
])
def test_bad_commands_end_in_one_line(tmp_path, monkeypatch, capsys, words, status, message):
    for folder in ("empty", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken/star.png").write_bytes(b"not a picture")
    (tmp_path / "broken/star.txt").write_text("a star")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["clip.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        config.run(clip.main)
    assert ended.value.code == status
    assert message in capsys.readouterr().err.splitlines()[-1]


# open_clip

def test_a_missing_open_clip_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)  # makes its import fail
    with pytest.raises(UserError, match="pip install open_clip_torch"):
        clip.load("open_clip:ViT-B-32/openai", "cpu")


@pytest.mark.parametrize("name", ["ViT-B-32", "EVA02-B-16"])  # a CLIP and a CustomTextCLIP
def test_open_clip_gives_what_it_gives_itself(tmp_path, name):
    open_clip = pytest.importorskip("open_clip")
    theirs, tokenizer = open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    ours = clip.load(f"open_clip:{name}/{tmp_path / 'weights.pt'}", "cpu")
    assert ours.fingerprint() == f"open_clip:{name}/{tmp_path / 'weights.pt'}"
    texts = ["a small red star", "a cat " * 200]
    tokens = ours.tokenize(texts)
    assert torch.equal(tokens, tokenizer(texts))
    images = torch.rand(2, 3, ours.image_size, ours.image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedding, encodings, mask = ours.embed_text(tokens)
        torch.testing.assert_close(embedding, theirs.encode_text(tokens, normalize=True))
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (theirs.visual.image_mean, theirs.visual.image_std))
        torch.testing.assert_close(ours.embed_image(images), theirs.encode_image((images - mean) / std, normalize=True))
    assert encodings.shape == (2, ours.context, ours.encoding_width) and embedding.shape[1] == ours.embed_width
    assert mask[:, 0].all() and mask[1].all() and not encodings[~mask].any()
    assert 4 <= mask[0].sum() <= 10


def test_open_clip_mistakes_are_named(tmp_path):
    open_clip = pytest.importorskip("open_clip")
    with pytest.raises(UserError, match="no model 'ViT-Z'"):
        clip.load("open_clip:ViT-Z/openai", "cpu")
    with pytest.raises(UserError, match=r"no weights 'nowhere'; expected a file or one of .*openai"):
        clip.load("open_clip:ViT-B-32/nowhere", "cpu")
    torch.save(open_clip.create_model("coca_ViT-B-32").state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UserError, match="gives no encodings"):
        clip.load(f"open_clip:coca_ViT-B-32/{tmp_path / 'weights.pt'}", "cpu")
