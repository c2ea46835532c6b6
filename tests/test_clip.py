"""The CLIPs: tokens, padding, repeatability, agreement with other implementations, commands."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import flags, write_captioned

from common import checkpoint, clip, config, data, media, order, synthetic
from common.config import UserError

CPU = torch.device("cpu")
TINY = dict(image_size=16, text_width=32, embed_width=16, batch_size=64, steps=150)
TRIANGLE = "a large green triangle at the top left on a gray background"
run_clip = partial(helpers.run, "common.clip")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "BUILTIN_ROWS", 320)
        return clip.train(clip.Config(run_dir=str(folder), **TINY), CPU)


@pytest.fixture(scope="module")
def shapes():
    return synthetic.shapes(range(40), size=16)


# Tokenizer


def words_of(tokenizer, text):
    """The words that the tokens of a text stand for."""
    spelled = b""
    for token in tokenizer.encode(text):
        if token < clip.WORDS:
            spelled += bytes([token - clip.BYTES])
        else:
            spelled += b" " + tokenizer.vocabulary[token - clip.WORDS].encode()
    return spelled.decode().split(" ")[1:]


def test_tokens_spell_the_words_of_any_text_in_any_language():
    tokenizer = clip.Tokenizer.learn(["a small red star", "two lines, and more"], 100)
    rng = np.random.default_rng(0)
    texts = ["", "two  spaces\tand\nlines\r\n", "日本語の文章", "👩‍🚀 and 🏳️‍🌈🇫🇷", "\U0010ffff"]
    for limit in [0x80, 0x800, 0x10000, 0x110000] * 50:
        points = rng.integers(0, limit, 12)
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))  # surrogates
    for text in texts:
        assert "".join(words_of(tokenizer, text)) == "".join(text.lower().split())
    assert words_of(tokenizer, "A_b  c,Ü3.") == ["a_b", "c", ",", "ü3", "."]
    assert tokenizer.encode("half \ud83d") == tokenizer.encode("half ?")
    assert tokenizer.encode("A\n Star") == tokenizer.encode("a star") != tokenizer.encode("astar")


@pytest.mark.parametrize("size", [0, 3, 99])
def test_the_vocabulary_is_the_most_frequent_words_and_signs(size):
    tokenizer = clip.Tokenizer.learn(["Low, low lower", "new new lower zero, a, be"], size)
    words = [",", "low", "lower", "new", "a", "be", "zero"]
    assert tokenizer.vocabulary == words[:size]
    assert len(tokenizer) == 3 + 256 + min(size, 7)


def test_other_words_are_spelled_by_their_bytes():
    tokens = [259, 3 + ord(" "), 3 + ord("z"), 3 + ord("o")]
    assert clip.Tokenizer(["low"]).encode("low zo") == tokens


def test_long_texts_are_cut_and_keep_their_end(model):
    short, long = model.tokenize(["a star", "a star " * 50])
    words = model.tokenizer.encode("a star")
    assert short.tolist() == [clip.START, *words, clip.END] + [clip.PAD] * 20
    assert long.tolist() == [clip.START, *words * 11, clip.END]


# Model


def test_padding_and_company_do_not_change_an_embedding(model):
    tokens = model.tokenize(["a star", TRIANGLE])
    embedding, encodings, mask = model.embed_text(tokens)
    assert torch.equal(mask, tokens != clip.PAD)
    assert not encodings[~mask].any()
    for i in range(2):
        alone = tokens[i : i + 1, mask[i]]
        embedding_alone, encodings_alone, mask_alone = model.embed_text(alone)
        torch.testing.assert_close(embedding_alone[0], embedding[i])
        torch.testing.assert_close(encodings_alone[0], encodings[i, mask[i]])
        assert mask_alone.all()


@pytest.mark.parametrize("raw", [False, True])
def test_embeddings_are_projected_features_in_any_batch_and_of_unit_length_unless_raw(
    raw, model, shapes
):
    images, records = shapes
    image = model.embed_image(torch.from_numpy(images))
    tokens = model.tokenize([record["caption"] for record in records])
    text, encodings, mask = model.embed_text(tokens)
    last = encodings[range(40), mask.sum(1) - 1]  # at END
    torch.testing.assert_close(text, last @ model.text_projection.weight.T)

    batches = [(images[:33], records[:33]), (images[33:], records[33:])]
    arrays, embedded = clip.embed(model, batches, encodings=True, raw=raw)
    assert embedded == records
    if not raw:
        image = F.normalize(image, dim=-1)
        text = F.normalize(text, dim=-1)
    for array, expected in zip(arrays, (image, text, encodings), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-5)


class Texts(list):
    """As much of a dataset as a note on its captions needs."""

    def texts(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize("length", [5, 77])
def test_captions_that_are_empty_or_cut_are_counted(length, model):
    most = min(length, model.context) - 2
    texts = ["", "star " * most, "star " * (most + 1), "a star"]
    note = model.caption_note(Texts(texts), length)
    assert note.startswith("of 4 texts looked at 1 are empty, and 1 are cut")
    assert note.endswith(f"longer than {most} tokens")
    assert model.caption_note(Texts(["a star"] * 3), length) == ""


@pytest.mark.parametrize("length", [5, 24, 30])
def test_the_condition_of_texts_is_cut_or_padded_and_always_fp32(model, length):
    texts = ["a star", "", TRIANGLE]
    embedding, encodings, mask = model.embed_text(model.tokenize(texts))
    assert mask.sum(1).max() > 5  # some are longer
    with torch.autocast("cpu", torch.bfloat16):
        condition = model.text_condition(texts, length)
    padded = torch.zeros(3, 6, 32)
    expected = {
        "text_embed": embedding,
        "text_enc": torch.cat([encodings, padded], dim=1)[:, :length],
        "text_mask": torch.cat([mask, padded[..., 0].bool()], dim=1)[:, :length],
    }
    torch.testing.assert_close(condition, expected, rtol=0, atol=0)


def test_the_image_encoder_takes_pixels_from_minus_one_to_one(model):
    pixels = []
    hook = model.image_encoder.register_forward_pre_hook(lambda _, inputs: pixels.append(inputs[0]))
    images = torch.tensor([0, 255], dtype=torch.uint8).expand(16, 16, 3, 2).permute(3, 0, 1, 2)
    with hook:
        of_bytes = model.embed_image(images)
        of_floats = model.embed_image(images.permute(0, 3, 1, 2) / 255)
    assert [image.unique().tolist() for image in pixels[0]] == [[-1], [1]]
    torch.testing.assert_close(of_floats, of_bytes)


def test_images_of_any_size_are_cut_to_the_central_square_and_resized(model, shapes):
    small = torch.from_numpy(shapes[0][:4])
    large = small.repeat_interleave(4, 1).repeat_interleave(4, 2)  # (4, 64, 64, 3)
    cosine = F.cosine_similarity(model.embed_image(large), model.embed_image(small))
    assert cosine.min() > 0.97
    shrunk = clip.center_crop(large, 16)
    assert shrunk.min() >= 0 and shrunk.max() <= 1  # bicubic overshoots
    for dim in (1, 2):
        edge = large.narrow(dim, 0, 9)
        cropped = clip.center_crop(torch.cat([edge, large, edge], dim), 16)
        assert torch.equal(cropped, shrunk)
    odd = clip.CLIP(clip.Config(image_size=17), [])  # need not halve evenly
    assert odd.embed_image(large).shape == (4, 64)


def test_a_fingerprint_is_of_weights_and_vocabulary_and_of_nothing_else(model):
    twin = clip.CLIP(clip.Config(run_dir="elsewhere", seed=7, **TINY), model.tokenizer.vocabulary)
    assert twin.fingerprint() != model.fingerprint()
    twin.load_state_dict(model.state_dict())
    assert twin.fingerprint() == model.fingerprint()
    twin.tokenizer.vocabulary.reverse()
    assert twin.fingerprint() != model.fingerprint()


def test_training_repeats_bit_for_bit_and_depends_on_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(clip, "BUILTIN_ROWS", 64)
    settings = {**TINY, "run_dir": str(tmp_path), "steps": 2}
    model = clip.train(clip.Config(**settings), CPU)
    torch.manual_seed(123)  # has no effect
    again = clip.train(clip.Config(**settings), CPU)
    other = clip.train(clip.Config(**settings, seed=1), CPU)
    assert again.fingerprint() == model.fingerprint() != other.fingerprint()
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_training_learns_what_captions_say_of_images(model):
    # It was trained on none of these, the scripts' data.
    images, records = synthetic.shapes(range(320), size=16)
    (image, text), _ = clip.embed(model, [(images, records)])
    nearest = (text @ image.T).argmax(1)
    named = synthetic.named_attributes(records)
    values = synthetic.attribute_values(records)
    fits = (values[nearest] == values) | ~named
    assert fits.all(1).mean() > 0.12  # of an untrained one 0.02


# The commands, as a user runs them


@pytest.fixture
def captioned(tmp_path, monkeypatch):
    """80 captioned shapes in the folder images, among files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    images, records = write_captioned(Path("images"), 80, size=24)
    Path("images/07.gif").touch()
    Path("images/damaged.png").write_bytes(b"damaged")
    Path("images/damaged.txt").touch()
    return images, records


SETTINGS = {**TINY, "data": "images", "run_dir": "clip", "steps": 2, "batch_size": 32}
TRAIN = ["train", *flags(**SETTINGS)]


def test_a_clip_learns_the_words_of_its_training_images(captioned):
    Path("images/00001.txt").write_text("")
    captioned[1][1]["caption"] = ""
    out = run_clip(*TRAIN)
    assert "texts looked at 1 are empty, and 0 are cut" in out
    assert "left out are files of kinds that are not read (1 gif)" in out
    assert "Next: python -m common.clip embed --data images --run_dir clip --out emb" in out
    words = set()
    keys = [f"{i:05d}" for i in range(80)]
    for i in order.split_keys(keys, "train", 0.1, 0.1):
        words |= set(captioned[1][i]["caption"].split())
    assert set(clip.load("clip", CPU).tokenizer.vocabulary) == words


def test_images_that_can_be_used_are_embedded_as_the_prior_reads_them(captioned, tmp_path):
    images, records = captioned
    run_clip(*TRAIN)
    words = flags(data="images", run_dir="clip", out="emb")
    out = run_clip("embed", *words, "--encodings", "--raw")
    assert "1 of 81 images cannot be used and are left out: images/damaged.png" in out
    assert "train_prior.py --data emb " in out
    model = clip.load("clip", CPU)
    assert config.read_json("emb/clip.json") == {
        "clip": str(tmp_path / "clip"),
        "fingerprint": model.fingerprint(),
        "place": str(tmp_path / "emb"),
    }
    small = media.resize_uint8(torch.from_numpy(images), 16).numpy()
    arrays, _ = clip.embed(model, [(small, records)], encodings=True, raw=True)
    dataset = data.Embeddings("emb", True)
    batch, _ = dataset.fetch(np.arange(len(dataset)))
    for name, expected in zip(("image_embed", "text_embed", "text_enc"), arrays, strict=True):
        np.testing.assert_allclose(batch[name], expected, rtol=1e-2, atol=1e-2)
    assert dataset.records([3]) == [{"caption": records[3]["caption"], "key": "00003"}]


def test_built_in_data_are_made_once_and_anew_for_other_settings_or_another_clip(
    tmp_path, monkeypatch
):
    base = clip.Config

    def set_steps(steps):
        field = ("steps", int, config.field(steps, ""))
        hasty = dataclasses.make_dataclass("Config", [field], bases=(base,), frozen=True)
        monkeypatch.setattr(clip, "Config", hasty)

    set_steps(1)
    monkeypatch.setattr(clip, "BUILTIN_ROWS", 256)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    folder = Path(clip.builtin_data(tmp_path, CPU))
    assert threads[-1] == torch.get_num_threads()
    dataset = data.Embeddings(folder, captions=True)
    assert len(dataset) == 256
    assert dataset.records([7]) == synthetic.shapes([7])[1]

    run_dir = tmp_path / "clip"
    files = [run_dir / "model.pt", folder / "img_emb/img_emb_0.npy", folder / "clip.json"]
    for change, anew in (
        (lambda: None, False),
        (lambda: files[2].unlink(), True),
        (lambda: clip.train(clip.Config(run_dir=str(run_dir), seed=3), CPU), True),
        (lambda: files[0].unlink(), True),
        (lambda: set_steps(2), True),
    ):
        change()
        before = [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
        assert clip.builtin_data(tmp_path, CPU) == str(folder)
        after = [path.stat().st_mtime_ns for path in files]
        assert [new > old for new, old in zip(after, before)] == [anew] * 3


# Mistakes of the user


def save_model(model, path, vocabulary=(), **settings):
    cfg = config.as_json(clip.Config(**{**TINY, **settings}))
    state = {"model": model.state_dict(), "config": cfg, "vocabulary": list(vocabulary)}
    checkpoint.save(state, path)


def test_what_is_no_clip_is_named(tmp_path, model):
    checkpoint.save({"model": {}, "config": {}}, tmp_path / "prior.pt")
    save_model(model, tmp_path / "odd.pt", embed_width=32)
    for name, message in (
        ("nowhere", "there is no CLIP here; train one"),
        ("prior.pt", "there is no CLIP here"),
        ("odd.pt", "weights of another model"),
    ):
        with pytest.raises(UserError, match=f"{name}.*: {message}"):
            clip.load(tmp_path / name, CPU)


@pytest.mark.parametrize(
    "words, status, message",
    [
        ("train --data missing", 1, "missing"),
        ("train --data empty", 1, "no captioned images found"),
        ("train --data few --batch_size 4", 1, "few: 1 training images, fewer than a batch of 4"),
        ("embed --data broken --run_dir clip", 1, "broken: none of its images can be used"),
        ("convert", 2, "convert: expected one of train, embed"),
    ],
)
def test_bad_commands_end_in_one_line(model, words, status, message):
    save_model(model, "clip/model.pt", model.tokenizer.vocabulary)
    for folder in ("empty", "broken", "few"):
        Path(folder).mkdir()
        Path(folder, "star.txt").write_text("a star")
    Path("broken/star.png").write_bytes(b"not a picture")
    media.write_png("few/star.png", np.zeros((8, 8, 3), np.uint8))
    out = run_clip(*words.split(), expect=status)
    assert message in out.splitlines()[-1]


# open_clip


def test_a_missing_open_clip_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)  # makes its import fail
    with pytest.raises(UserError, match="pip install open_clip_torch"):
        clip.load("open_clip:ViT-B-32/openai", "cpu")


@pytest.fixture
def open_clip(monkeypatch, tmp_path):
    """The package, offline, and with a small model in the place of its ViT-L-14."""
    package = pytest.importorskip("open_clip")
    for registry in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):
        monkeypatch.setattr(package.factory, registry, getattr(package.factory, registry).copy())

    def download(*args, **settings):
        raise OSError("no download here\nand much more")  # of which one line is shown

    monkeypatch.setattr(package.factory, "download_pretrained", download)
    return package


def add_small_model(package, folder, **settings):
    """Let the name ViT-L-14 stand for a small model."""
    text = dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=2)
    vision = dict(image_size=16, patch_size=8, width=48, head_width=16, layers=2)
    text |= settings.pop("text_cfg", {})
    about = {"embed_dim": 24, "text_cfg": text, "vision_cfg": vision, **settings}
    (folder / "ViT-L-14.json").write_text(json.dumps(about))
    package.add_model_config(folder / "ViT-L-14.json")


def small_clip(activation):
    """transformers' CLIPModel, small, of random weights."""
    transformers = pytest.importorskip("transformers")
    depth = dict(num_hidden_layers=2, hidden_act=activation)
    text = dict(hidden_size=32, intermediate_size=128, num_attention_heads=2, **depth)
    vision = dict(hidden_size=48, intermediate_size=192, num_attention_heads=3, **depth)
    vision |= dict(image_size=16, patch_size=8)
    settings = dict(text_config=text, vision_config=vision, projection_dim=24)
    model = transformers.CLIPModel(transformers.CLIPConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


OPEN_CLIP_NAMES = {
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers": "transformer.resblocks",
    "text_model.final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.encoder.layers": "visual.transformer.resblocks",
    "vision_model.post_layernorm": "visual.ln_post",
    "visual_projection.weight": "visual.proj",
    "layer_norm": "ln_",
    "self_attn": "attn",
    "fc1": "c_fc",
    "fc2": "c_proj",
}


def open_clip_weights(model):
    """The weights of transformers' CLIPModel by their names in open_clip."""
    weights = {}
    for name, value in model.state_dict().items():
        for theirs, ours in OPEN_CLIP_NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = value.T if name.endswith("proj") or name == "text_projection" else value
    # The three projections of attention are one matrix there.
    for name in [name for name in weights if "q_proj" in name]:
        parts = [weights.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        weights[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return {name: value.contiguous() for name, value in weights.items()}


@pytest.mark.parametrize(
    "tag, activation, custom_text",
    [
        ("openai", "quick_gelu", False),
        ("laion400m_e32", "gelu", False),
        ("", "quick_gelu", True),  # with a text tower
    ],
)
@torch.no_grad()
def test_our_embeddings_of_texts_and_images_equal_transformers_of_the_same_weights(
    open_clip, tag, activation, custom_text, tmp_path, monkeypatch
):
    model = small_clip(activation)
    path = tmp_path / "weights.pt"
    torch.save(open_clip_weights(model), path)
    # A file has no tag: the config decides.
    quick_gelu = not tag and activation == "quick_gelu"
    add_small_model(open_clip, tmp_path, quick_gelu=quick_gelu, custom_text=custom_text)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: str(path))
    spec = f"open_clip:ViT-L-14/{tag or path}"
    ours = clip.load(spec, "cpu")
    assert ours.fingerprint() == spec and not ours.training
    assert (ours.embed_width, ours.encoding_width, ours.image_size) == (24, 32, 16)

    tokens = ours.tokenize(["a small red star", "", "cat", "a very long caption " * 40])
    embedding, encodings, mask = ours.embed_text(tokens)
    assert mask.sum(1).tolist() == [6, 2, 3, 77]
    assert not encodings[~mask].any()
    theirs = model.text_model(tokens)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(embedding, model.text_projection(theirs.pooler_output))
    close(encodings[mask], theirs.last_hidden_state[mask])

    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    mean = torch.tensor(open_clip.OPENAI_DATASET_MEAN).view(3, 1, 1)
    std = torch.tensor(open_clip.OPENAI_DATASET_STD).view(3, 1, 1)
    theirs = model.vision_model((pixels - mean) / std)
    close(ours.embed_image(pixels), model.visual_projection(theirs.pooler_output))


def test_other_text_encoders_than_the_original_are_refused(open_clip, tmp_path, monkeypatch):
    path = tmp_path / "weights.pt"
    message = "its text encoder is not that of the original CLIP"
    for embed_cls in (True, False):
        add_small_model(open_clip, tmp_path, custom_text=True, text_cfg={"embed_cls": embed_cls})
        torch.save(open_clip.create_model("ViT-L-14").state_dict(), path)
        if not embed_cls:
            clip.load(f"open_clip:ViT-L-14/{path}", "cpu")
            monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: lambda texts, **_: None)
        with pytest.raises(UserError, match=message):
            clip.load(f"open_clip:ViT-L-14/{path}", "cpu")


@pytest.mark.parametrize("spec", ["other/tag", "ViT-L-14", "ViT-L-14/other", "ViT-L-14/openai"])
def test_open_clip_mistakes_are_named_in_one_line(open_clip, tmp_path, spec):
    add_small_model(open_clip, tmp_path)
    with pytest.raises(UserError, match=f"^open_clip:{spec}: .+; expected open_clip:MODEL/WEIGHTS"):
        clip.load(f"open_clip:{spec}", "cpu")
