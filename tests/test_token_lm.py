"""Token transformers and generation, compared with other ways to compute them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import awake
from torch.testing import assert_close

from common.config import UserError
from common.models import token_lm
from common.models.token_lm import SamplingParams, Stream, build_sequence, targets

WORDS = Stream("semantic", 1, 7)
COARSE = Stream("coarse", 2, 5)
FINE = Stream("fine", 3, 5)
VOCABULARY = ("a", "b", "c")
TEXTS = ["a b c", "", "c a"]
GREEDY = SamplingParams(0.0)
NEVER = -torch.inf
UNIFORM = SamplingParams(1e4)  # almost uniform, so EOS comes soon


def transformer(*streams, vocabulary=()):
    cfg = SimpleNamespace(width=16, depth=2, heads=2, dropout=0.0, max_text_len=4)
    lengths = {"max_frames": 8, "max_context": 4, "frame_rate": 50.0}
    model = token_lm.TokenTransformer(cfg, streams, **lengths, vocabulary=vocabulary)
    model.classifiers.data *= 5  # so that rounding does not change the most probable code
    return awake(model, std=0.5).eval()


def random_tokens(streams, *lengths):
    """Random codes (T, Q) for each sample and stream. lengths: per stream, T of each sample."""
    columns = []
    for stream, column in zip(streams, lengths):
        K = stream.codebook_size
        columns.append([torch.randint(K, (n, stream.num_quantizers)) for n in column])
    return [*zip(*columns)]


def test_the_layout_is_the_one_that_its_docstring_draws():
    words = torch.tensor([[4], [0], [6]])
    codes = torch.tensor([[4, 1], [0, 4]])
    inputs, start = build_sequence([WORDS, COARSE], [words, codes])
    # Row 1 is <s>, row 9 <c>; the second quantizer's rows begin at 15.
    assert inputs.tolist() == [1, 2 + 4, 2 + 0, 2 + 6, 9, 10 + 4, 15 + 1, 10 + 0, 15 + 4]
    assert start == 4
    assert targets(COARSE, codes, True).flatten().tolist() == [4, 1, 0, 4, 5, -100]  # 5 is EOS
    assert targets(COARSE, codes, False).flatten().tolist() == [4, 1, 0, 4, -100, -100]


@torch.no_grad()
def test_a_padded_sample_loses_what_it_does_alone():
    streams = [WORDS, COARSE]
    model = transformer(*streams, vocabulary=VOCABULARY)
    drop = torch.tensor([False, True, False])
    ended = [True, False, True]
    samples = random_tokens(streams, [5, 1, 3], [2, 6, 1])
    batch = {**token_lm.lay_out(streams, [*zip(samples, ended)]), "text": TEXTS}
    losses, accuracies = model(batch, drop)
    condition = model.condition(TEXTS, drop)
    for b, codes in enumerate(samples):
        rows, start = build_sequence(streams, codes)
        outputs, _ = model.forward_cached(rows[None], condition[b : b + 1])
        classes = codes[1].flatten().tolist() + [5] * ended[b]  # 5 is EOS
        logits = [model.classifiers[i % 2] @ outputs[0, start + i] for i in range(len(classes))]
        logits = torch.stack(logits)
        classes = torch.tensor(classes)
        assert_close(losses[b], F.cross_entropy(logits, classes), rtol=1e-4, atol=1e-4)
        assert_close(accuracies[b], (logits.argmax(1) == classes).float().mean())


@pytest.mark.parametrize(
    "sampling, exponents",
    [
        (SamplingParams(0.7), [0, 2 / 0.7, 1 / 0.7, -1 / 0.7]),
        (SamplingParams(1.0, 2), [NEVER, 2, 1, NEVER]),
        (GREEDY, [NEVER, 2, NEVER, NEVER]),
    ],
)
def test_codes_are_sampled_from_the_softmax_of_the_most_probable(sampling, exponents):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, NEVER])
    uniform = torch.linspace(0, 1 - 2**-24, 20_000)
    codes = token_lm.sample_token(logits.expand(20_000, 5), uniform, sampling)
    expected = torch.tensor([*exponents, NEVER]).softmax(0)
    assert_close(torch.bincount(codes, minlength=5) / 20_000, expected, atol=1e-4, rtol=0)


# Generation


def naive(model, sample, frames, texts, scale):
    """Append up to `frames` frames greedily, with a pass over the whole sequence for each code."""
    context, prompt = sample
    Q = model.streams[-1].num_quantizers
    codes = prompt.flatten().tolist()
    for i in range(len(codes), len(codes) + frames * Q):
        padded = torch.tensor(codes + [0] * (-i % Q), dtype=torch.long).view(-1, Q)
        rows, start = build_sequence(model.streams, [context, padded])
        x = 0
        for drop, weight in ((False, scale), (True, 1 - scale)):
            condition = model.condition(texts, torch.tensor([drop]))
            outputs, _ = model.forward_cached(rows[None, : start + 1 + i], condition)
            x = x + weight * outputs[0, -1]
        logits = model.classifiers[i % Q] @ x
        if i % Q or not i:  # EOS can only begin a frame; no recording is empty
            logits[5] = NEVER
        code = logits.argmax().item()
        if code == 5:
            break
        codes.append(code)
    return codes


@pytest.mark.parametrize("vocabulary, scale", [((), 1.0), (VOCABULARY, 2.5)])
@pytest.mark.parametrize("streams", [[WORDS, COARSE], [COARSE, FINE]])
@torch.no_grad()
def test_cached_generation_in_an_uneven_batch_is_a_naive_loop_over_each_sample(
    streams, vocabulary, scale
):
    model = transformer(*streams, vocabulary=vocabulary)
    samples = random_tokens(streams, [5, 2, 4], [3, 0, 1])
    sampling = SamplingParams(0.0, 0, scale)
    limits = [6, 5, 7]
    generated = token_lm.generate(
        model, samples, [0, 1, 0], limits, [0, 1, 2], sampling, TEXTS
    )
    for b, (context, prompt) in enumerate(samples):
        expected = naive(model, (context, prompt), limits[b], TEXTS[b : b + 1], scale)
        assert [*prompt.flatten().tolist(), *generated[b].flatten().tolist()] == expected


@torch.no_grad()
def test_each_sample_ends_by_itself_at_the_start_of_a_frame_and_every_code_can_be_produced():
    model = transformer(COARSE, FINE)
    samples = random_tokens([COARSE, FINE], [2] * 90, [0] * 60 + [1] * 30)
    fewest = [1] * 60 + [0] * 20 + [12] * 10
    generated = token_lm.generate(model, samples, fewest, [12] * 90, range(90), UNIFORM)
    added = torch.tensor([*map(len, generated)])
    assert len(added.unique()) > 8
    assert added[:60].min() == 1  # no recording is empty
    assert added[60:80].min() == 0
    assert added[80:].min() == 12
    for q in range(3):
        assert torch.cat(generated)[:, q].unique().tolist() == [0, 1, 2, 3, 4]


@torch.no_grad()
def test_a_long_sound_is_the_same_in_any_batch():
    model = transformer(WORDS, COARSE, vocabulary=VOCABULARY)  # 8 frames, 4 of context
    samples = random_tokens([WORDS, COARSE], [4, 5, 6], [3, 0, 11])
    limits = [30, 21, 25]

    def generated(*indices):
        return token_lm.generate_long(
            model,
            lambda i, codes, start: [samples[indices[i]][0][start // 4 :]],
            [samples[b][1] for b in indices],
            [limits[b] for b in indices],
            [False] * len(indices),  # may_end
            indices,  # seeds
            SamplingParams(1.0, 6, 1.5),
            [TEXTS[b] for b in indices],
        )

    sounds = generated(0, 1, 2)
    assert [*map(len, sounds)] == limits
    for b in range(3):
        assert torch.equal(*generated(b), sounds[b])


@torch.no_grad()
def test_a_semantic_token_never_follows_itself_and_a_code_may():
    samples = random_tokens([WORDS], [0] * 10 + [3] * 10)
    generated = token_lm.generate(
        transformer(WORDS), samples, [8] * 20, [8] * 20, range(20), UNIFORM
    )
    for (prompt,), new in zip(samples, generated):
        codes = torch.cat([prompt[-1:], new])
        assert len(codes.unique_consecutive(dim=0)) == len(codes)
    samples = random_tokens([WORDS, COARSE], [2] * 20, [0] * 20)
    generated = token_lm.generate(
        transformer(WORDS, COARSE), samples, [8] * 20, [8] * 20, range(20), UNIFORM
    )
    codes = torch.cat(generated)[:, 0]
    assert (codes[1:] == codes[:-1]).any()


@torch.no_grad()
def test_sounds_that_may_not_end_are_as_long_as_asked_beside_those_that_may():
    model = transformer(COARSE, FINE)
    prompts = [torch.zeros(0, 3).long()] * 40
    context = torch.zeros(4, 2).long()
    may_end = [b % 2 == 0 for b in range(40)]
    sounds = token_lm.generate_long(
        model, lambda b, codes, start: [context], prompts, [12] * 40, may_end, range(40), UNIFORM
    )
    lengths = [*map(len, sounds)]
    assert lengths[1::2] == [12] * 20
    assert min(lengths[::2]) < 8


def test_a_text_is_cut_at_spaces_into_parts_that_are_not_longer_than_those_of_training():
    model = transformer(WORDS, vocabulary=VOCABULARY)
    model.longest_text = 3
    assert model.split_text("") == [""]
    assert model.split_text("a  b c") == ["a  b c"]
    assert model.split_text("a b c a b c b") == ["a b c", "a b c", "b"]
    with pytest.raises(UserError, match="'wxyz': 5 tokens without a space, but the longest"):
        model.split_text("a wxyz")
    assert transformer(WORDS).split_text("") == [""]
