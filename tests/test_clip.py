"""The small CLIP: tokens, padding, images, retrieval."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch.testing import assert_close

from common.data import synthetic
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
    spelled = b" \xc3\xbc3 ,"  # a space before each word
    assert tokenizer.encode("LOW\n Ü3,") == [259, *(3 + byte for byte in spelled)]
    # A lone surrogate becomes "?", and accents are composed.
    for text, other in (("half \ud83d", "half ?"), ("U\u03083,", "\xfc3,")):
        assert tokenizer.encode(text) == tokenizer.encode(other)
    assert clip.Tokenizer.learn(["cafe\u0301"], 9).vocabulary == ["caf\xe9"]


# Model


def test_long_texts_are_cut_and_keep_their_end(model):
    short, long = model.tokenizer(["a star", "a star " * 50])
    words = model.tokenizer.encode("a star")
    assert short.tolist() == [clip.START, *words, clip.END] + [clip.PAD] * 20
    assert long.tolist() == [clip.START, *words * 11, clip.END]


def test_padding_and_company_do_not_change_an_embedding(model):
    tokens = model.tokenizer(["a star", TRIANGLE])
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
    embedding, encodings, mask = model.embed_text(model.tokenizer(texts))
    assert mask.sum(1).max() > 5  # some texts are longer than 5 tokens
    with torch.autocast("cpu", torch.bfloat16):
        condition = model.text_condition(texts, length)
        of_tokens = model.text_condition(model.tokenizer(texts), length)
    more = length - 24
    expected = {
        "text_embed": embedding,
        "text_enc": torch.nn.functional.pad(encodings, (0, 0, 0, more)),
        "text_mask": torch.nn.functional.pad(mask, (0, more)),
    }
    assert same(condition, expected)
    assert same(of_tokens, expected)


def test_images_are_cut_to_the_central_square_and_resized_with_pixels_from_minus_one_to_one(model):
    for value, pixel in ((0, -1.0), (255, 1.0)):
        image = torch.full((1, 16, 16, 3), value, dtype=torch.uint8)
        expected = model.image_encoder(torch.full((1, 3, 16, 16), pixel))
        assert_close(model.embed_image(image), expected)

    drawn, _ = synthetic.shapes(range(4), size=64)
    wide = torch.from_numpy(drawn[:, :50])
    # Clamp, because bicubic resizing overshoots.
    shrunk = pixels.resize(wide.permute(0, 3, 1, 2) / 255, 16).clamp(0, 1)  # (4, 3, 16, 20)
    assert_close(clip.center_crop(wide, 16), shrunk[..., 2:18])


# Loss


def test_pairs_with_equal_captions_are_no_negatives_in_either_direction():
    logits = torch.randn(5, 5, requires_grad=True)
    group = torch.tensor([3, 0, 3, 1, 3])
    loss = clip.contrastive_loss(logits, group)
    terms = []
    for i in range(5):
        others = [j for j in range(5) if j == i or group[j] != group[i]]
        for row in (logits[i], logits[:, i]):
            terms.append(torch.logsumexp(row[others], 0) - row[i])
    assert_close(loss, torch.stack(terms).mean())
    loss.backward()
    ignored = (group[:, None] == group) & ~torch.eye(5, dtype=torch.bool)
    assert torch.equal(logits.grad == 0, ignored)


def test_without_equal_captions_the_loss_is_the_published_one():
    logits = torch.randn(6, 6)
    own = torch.arange(6)
    expected = F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)
    assert_close(clip.contrastive_loss(logits, own.flip(0)), expected / 2)
    # If all captions are equal, there is nothing to learn.
    assert clip.contrastive_loss(logits, torch.zeros(6)) == 0


# Retrieval


def test_retrieval_counts_what_is_nearest_by_the_hundred():
    rng = np.random.default_rng(0)
    references = rng.standard_normal((250, 8))
    references /= np.linalg.norm(references, axis=1, keepdims=True)
    captions = [f"caption {i}" for i in range(250)]
    assert clip.retrieval(references, references, captions) == 1
    queries = references.copy()
    queries[:20] = references[20:40]  # 20 of 200 match another caption; the last 50 are ignored
    queries[200:] = 0
    assert clip.retrieval(queries, references, captions) == 0.9
    captions[0] = captions[20]  # an equal caption is correct
    assert clip.retrieval(queries, references, captions) == 0.905
    assert clip.retrieval(references[[1, 1]], references[:2], captions[:2]) == 0.5  # two references
