"""Token transformers (AudioLM, Borsos et al. 2022): streams of tokens, model, generation.

What differs from the paper stands in train_audio.py.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from common import accumulate
from common.config import UserError
from common.models import clip, diffusion
from common.models.nn import KVCache, Transformer, learned_tokens

TEXT_DEPTH = 2  # blocks of the text encoder

# Streams of tokens (AudioLM §III-C)


class Stream(NamedTuple):
    """A kind of tokens: frames of Q codes below K."""

    name: str
    num_quantizers: int  # Q
    codebook_size: int  # K

    @property
    def repeats(self):
        """Whether a token may follow itself. Semantic tokens may not (AudioLM §III-C)."""
        return self.name != "semantic"


def stream_offsets(streams):
    """The first embedding row of each stream, and the number of rows.

    Row 0 is padding. A stream has a row for its start token, and Q · K for its codes.
    """
    offsets = [1]  # after padding
    for stream in streams:
        rows = 1 + stream.num_quantizers * stream.codebook_size  # the start token, the codes
        offsets.append(offsets[-1] + rows)
    return offsets


def build_sequence(streams, codes):
    """(embedding rows (N,) of the streams of a recording, position of the last stream's start).

    codes: for each stream (T, Q) int64. The coarse stage, with two frames of two quantizers after
    three semantic tokens; C01 is the code of frame 0 and quantizer 1, <s> and <c> are start tokens:

        position   0    1    2    3    4    5    6    7    8
        input     <s>  S0   S1   S2   <c>  C00  C01  C10  C11
        target                        C00  C01  C10  C11  EOS

    Code (t, q) is predicted at position start + t·Q + q, from all before it. EOS is class K of the
    first quantizer's head. It is the target after the last frame, only if the recording truly ends
    there (see `targets`). The row of a code is offset + 1 + q·K + code, so no two kinds of tokens
    share a row.
    """
    sequence = []
    for stream, offset, stream_codes in zip(streams, stream_offsets(streams), codes):
        start = sum(map(len, sequence))
        quantizer_offsets = torch.arange(stream.num_quantizers) * stream.codebook_size
        rows = offset + 1 + quantizer_offsets + stream_codes  # (T, Q)
        sequence += [torch.tensor([offset]), rows.flatten()]
    return torch.cat(sequence), start


def targets(stream, codes, ended):
    """Targets (T + 1, Q) from the start token on, for codes (T, Q); -100 is no target.

    The frame after the last one is EOS in its first quantizer if the recording `ended`.
    """
    target = F.pad(codes, (0, 0, 0, 1), value=-100)  # (T + 1, Q)
    if ended:
        target[-1, 0] = stream.codebook_size
    return target


def lay_out(streams, samples):
    """A batch for TokenTransformer: {"inputs", "start", "target"}, padded.

    samples: [(codes of each stream (T, Q), whether the recording ends there)].
    """
    sequences, starts = zip(*[build_sequence(streams, codes) for codes, _ in samples])
    # EOS is a target only where the recording ends, not where a crop does.
    target = [targets(streams[-1], codes[-1], ended) for codes, ended in samples]
    return {
        "inputs": pad_sequence(sequences, batch_first=True),
        "start": torch.tensor(starts),
        "target": pad_sequence(target, batch_first=True, padding_value=-100),
    }


# Model


class TokenTransformer(nn.Module):
    """A causal transformer over streams of tokens that predicts the last one.

    Each quantizer has its own embeddings, and its own output head over K codes and EOS. Only the
    first head predicts EOS. Text is not in AudioLM. It is a prefix, as in SPEAR-TTS (Kharitonov et
    al. 2023), and is dropped at times for guidance. Without a vocabulary the model takes no text.
    """

    def __init__(
        self,
        cfg,
        streams,
        max_frames,
        max_context,
        frame_rate,
        vocabulary=(),
        longest_text=0,
    ):
        super().__init__()
        self.cfg = cfg
        self.streams = [Stream(*stream) for stream in streams]
        # What it is trained on: frames of the last stream and of the one before it, at most,
        # frames of the last one a second, and tokens of a text, at most. Generation goes no
        # further.
        self.max_frames = max_frames
        self.max_context = max_context
        self.frame_rate = frame_rate
        self.longest_text = longest_text
        self.has_text = bool(vocabulary)
        self.offsets = stream_offsets(self.streams)  # of their embedding rows
        width = cfg.width
        self.embed = nn.Embedding(self.offsets[-1], width, padding_idx=0)  # of all streams
        nn.init.normal_(self.embed.weight[1:], std=width**-0.5)
        last = self.streams[-1]
        # EOS is class K.
        classifiers = torch.randn(last.num_quantizers, last.codebook_size + 1, width)
        self.classifiers = nn.Parameter(classifiers * 0.5 * width**-0.5)
        self.transformer = Transformer(width, cfg.depth, cfg.heads, dropout=cfg.dropout)
        if self.has_text:
            self.tokenizer = clip.Tokenizer(vocabulary)
            self.text_embed = nn.Embedding(len(self.tokenizer), width)
            self.text_encoder = Transformer(width, TEXT_DEPTH, cfg.heads, causal=False)
            self.null_text = learned_tokens(cfg.max_text_len, width)  # in place of a dropped text

    def split_text(self, text):
        """[parts] of `text`, cut at spaces: each is no longer than the longest text of training.

        UserError for a word that is longer than that.
        """

        def fits(part):
            return len(self.tokenizer.encode(part)) <= self.longest_text

        if not text or fits(text):
            return [text]
        parts = []
        for word in text.split():
            if not fits(word):
                raise UserError(
                    f"{word!r}: {len(self.tokenizer.encode(word))} tokens without a space, and "
                    f"the longest text of training has {self.longest_text}"
                )
            if parts and fits(f"{parts[-1]} {word}"):
                parts[-1] += f" {word}"
            else:
                parts.append(word)
        return parts

    def condition(self, texts, drop=False):
        """Embeddings (B, L, D) of B texts, of "no text" where `drop` (B,) is true, and for "".

        None for a model without text.
        """
        if not self.has_text:
            return None
        null_text = self.null_text.weight
        device = null_text.device
        length = self.cfg.max_text_len
        drop = drop | torch.tensor([not text for text in texts], device=device)
        # Cut, or padded. Padding is attended to as well: it says where the text has ended.
        rows = [(self.tokenizer.encode(text) + [0] * length)[:length] for text in texts]
        x = self.text_encoder(self.text_embed(torch.tensor(rows, device=device)))
        return torch.where(drop[:, None, None], null_text.to(x.dtype), x)  # (B, L, D)

    def forward_cached(self, inputs, condition):
        """(outputs (B, N, D), KV cache) at inputs (B, N) after a text prefix."""
        x = self.embed(inputs)  # (B, N, D)
        if condition is not None:
            x = torch.cat([condition.to(x.dtype), x], dim=1)  # (B, L + N, D)
        x, cache = self.transformer(x, return_cache=True)
        return x[:, -inputs.shape[1] :], cache

    def forward(self, batch, drop=False):
        """(cross-entropy, accuracy) of each sample, (B,), means over its tokens.

        batch: "inputs" (B, N), "start" (B,), "target" (B, T + 1, Q), as of `build_sequence` and
        `targets`, padded; "text" [B]. drop: samples that go without their text, (B,), or False.
        """
        target = batch["target"]
        # Padding stands at the end, so the causal mask hides it.
        x, _ = self.forward_cached(batch["inputs"], self.condition(batch["text"], drop))
        # Outputs at the positions start to start + (T + 1) · Q - 1 predict the flattened target.
        positions = batch["start"][:, None] + torch.arange(target[0].numel(), device=x.device)
        positions = positions.clamp(max=x.shape[1] - 1)  # those beyond have no target
        samples = torch.arange(len(x), device=x.device)[:, None]
        x = x[samples, positions]  # (B, (T + 1) · Q, D)
        x = x.unflatten(1, target.shape[1:])  # (B, T + 1, Q, D)
        # Each quantizer has its own head; (B, T + 1, Q, K + 1).
        logits = torch.einsum("btqd,qkd->btqk", x, self.classifiers.to(x.dtype)).float()
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
        loss = loss.view(target.shape).sum((1, 2))
        correct = (logits.argmax(-1) == target).sum((1, 2))
        count = (target >= 0).sum((1, 2))
        return loss / count, correct / count


# Generation (AudioLM §III-D)


class SamplingParams(NamedTuple):
    temperature: float = -1.0  # 0: the most probable code, below 0: as trained
    top_k: int = 0  # 0: all codes
    guidance_scale: float = 1.0  # 1: none


AS_TRAINED = SamplingParams()


def sample_token(logits, uniform, sampling):
    """Codes (B,) sampled from logits (B, K) by random numbers `uniform` (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(1)
    K = logits.shape[1]
    top_logits, codes = logits.topk(min(sampling.top_k or K, K))  # (B, k), most probable first
    # Inverse transform sampling. In whole numbers, as GPUs have no deterministic cumsum of floats:
    # probabilities in 2^-32, and random numbers in 2^-24, of which torch.rand draws multiples.
    probabilities = (top_logits / sampling.temperature).softmax(1)
    cumulative = (probabilities * 2**32).long().cumsum(1)  # (B, k)
    threshold = (uniform * 2**24).long()[:, None] * cumulative[:, -1:]
    # The first code whose cumulative probability reaches the random number.
    index = (cumulative * 2**24 < threshold).sum(1, keepdim=True)
    return codes.gather(1, index)[:, 0]


@torch.no_grad()
def generate(model, samples, min_frames, max_frames, seeds, sampling, texts=()):
    """The frames, B of (T, Q), that continue the last stream of B samples, each up to EOS.

    samples: for each, its streams' codes (T, Q); those of the last stream may be empty. min_frames,
    max_frames: the fewest and the most frames to add to each. seeds: of each; the random numbers of
    a sample come from its own alone. texts: B, of which "" is none.
    """
    stream = model.streams[-1]
    eos = stream.codebook_size  # class K of each head
    Q = stream.num_quantizers
    device = model.embed.weight.device
    # Sequences end with what there is of the last stream, so the next code is predicted there.
    sequences = [build_sequence(model.streams, codes)[0] for codes in samples]
    guided = model.has_text and sampling.guidance_scale != 1
    if guided:  # a second half of the batch goes without the text
        sequences = sequences * 2
        texts = texts + [""] * len(samples)

    # One pass over the prompts fills the KV cache. x: the output at each sample's last input.
    lengths = torch.tensor(list(map(len, sequences)), device=device)
    inputs = pad_sequence(sequences, batch_first=True).to(device)  # (B or 2B, N)
    outputs, cache = model.forward_cached(inputs, model.condition(texts))
    x = outputs[torch.arange(len(outputs), device=device), lengths - 1]  # (B or 2B, D)
    size = cache[0][0].shape[2]  # padded length, with the text prefix
    num_frames = max(max_frames)
    kv_cache = KVCache(cache, size - inputs.shape[1] + lengths, size + num_frames * Q)

    # Random numbers are drawn for each sample alone, so they do not depend on the batch.
    uniform = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        uniform.append(torch.rand(num_frames, Q, generator=generator))
    uniform = torch.stack(uniform).to(device)  # (B, frames, Q)

    first_end = torch.tensor(min_frames, device=device)  # the first frame where EOS may stand
    ends = torch.tensor(max_frames, device=device)  # one past the last frame of each
    generated = torch.zeros_like(uniform, dtype=torch.long)
    # What no token may repeat. Before the first one that is EOS, as no recording is empty.
    last = [codes[-1][-1, 0] if len(codes[-1]) else eos for codes in samples]
    last = torch.tensor(last, device=device)
    for i in range(num_frames * Q):
        t, q = divmod(i, Q)
        logits = F.linear(x, model.classifiers[q].to(x.dtype)).float()  # (B or 2B, K + 1)
        if guided:  # classifier-free guidance (Ho & Salimans 2022, Eq. 6)
            logits = diffusion.classifier_free_guidance(*logits.chunk(2), sampling.guidance_scale)
        # EOS stands only where a frame would begin.
        logits[:, eos].masked_fill_((t < first_end) | (q > 0), -torch.inf)
        if not stream.repeats:
            logits.scatter_(1, last[:, None], -torch.inf)
        code = sample_token(logits, uniform[:, t, q], sampling)
        ends = torch.where(code == eos, ends.clamp(max=t), ends)
        # Once a frame the host waits for the device, to see whether all have ended.
        if q == 0 and (ends <= t).all():
            break
        code = code.clamp(max=eos - 1)  # samples that have ended go on, and are cut below
        generated[:, t, q] = code
        last = code
        # The new code is the next input, as in `build_sequence`.
        rows = model.offsets[-2] + 1 + q * stream.codebook_size + code
        if guided:
            rows = rows.repeat(2)  # the same code with and without the text
        x = model.transformer.step(model.embed(rows), kv_cache)  # (B or 2B, D)
    return [codes[:end] for codes, end in zip(generated.cpu(), ends.tolist())]


def generate_long(model, context_of, prompts, limits, may_end, seeds, sampling, texts=()):
    """`generate` past the training length, in windows that overlap by half.

    prompts: B of (T_b, Q). limits: the most frames of each sound, with its prompt. may_end: B; one
    that may not end has as many. context_of(b, codes, start): the earlier streams of sample b for a
    window that begins with the frame `start` of the codes (T, Q) so far. A window has at most the
    max_frames and the max_context of training. If it does not see all of the context, it may not
    end. Returns B of (T_b, Q), with the prompts.
    """
    if sampling.temperature < 0:
        sampling = sampling._replace(temperature=model.cfg.temperature)
    done = list(prompts)  # codes so far
    limits = list(limits)
    for number in itertools.count():
        active = [b for b, codes in enumerate(done) if len(codes) < limits[b]]
        if not active:
            return done

        samples = []
        fewest = []
        most = []
        for b in active:
            codes = done[b]
            start = 0
            if len(codes) >= model.max_frames:
                # The window is full: keep its later half.
                start = len(codes) - model.max_frames // 2
            window = codes[start:]
            context = context_of(b, codes, start)  # of the time of the window
            samples.append([*(each[: model.max_context] for each in context), window])
            most.append(min(model.max_frames - len(window), limits[b] - len(codes)))
            least = int(not len(codes))  # no recording is empty
            # If the context is cut, EOS is forbidden: the remaining context is for later windows.
            if not may_end[b] or any(len(each) > model.max_context for each in context):
                least = most[-1]
            fewest.append(least)

        new = generate(
            model,
            samples,
            fewest,
            most,
            [accumulate.derive_seed(seeds[b], number) for b in active],
            sampling,
            texts and [texts[b] for b in active],
        )
        for b, added, room in zip(active, new, most):
            done[b] = torch.cat([done[b], added])
            if len(added) < room:  # it came to EOS
                limits[b] = len(done[b])
