"""Token transformers (AudioLM, Borsos et al. 2022): streams of tokens, model, generation.

train_audio.py lists the differences from the paper.
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
    """One kind of token, in frames of Q codes, each below K."""

    name: str
    num_quantizers: int  # Q
    codebook_size: int  # K

    @property
    def repeats(self):
        """True if a token may follow itself. Semantic tokens may not (AudioLM §III-C)."""
        return self.name != "semantic"


def stream_offsets(streams):
    """The first embedding row of each stream, then the total number of rows.

    Row 0 is padding. A stream has one row for its start token, and Q · K rows for its codes.
    """
    offsets = [1]  # after padding
    for stream in streams:
        rows = 1 + stream.num_quantizers * stream.codebook_size  # start token and codes
        offsets.append(offsets[-1] + rows)
    return offsets


def build_sequence(streams, codes):
    """(embedding rows (N,) for the streams of a recording, position of the last start token).

    codes: int64 (T, Q) for each stream. This example is from the coarse stage, with three semantic
    tokens and two frames of two quantizers. C01 is the code of quantizer 1 in frame 0; <s> and <c>
    are start tokens:

        position   0    1    2    3    4    5    6    7    8
        input     <s>  S0   S1   S2   <c>  C00  C01  C10  C11
        target                        C00  C01  C10  C11  EOS

    Code (t, q) is predicted at position start + t·Q + q, from everything before it. EOS is class K
    of the first quantizer's head. It is the target after the last frame, but only if the recording
    ends there (see `targets`). The row of a code is offset + 1 + q·K + code, so different kinds of
    tokens never share a row.
    """
    sequence = []
    for stream, offset, stream_codes in zip(streams, stream_offsets(streams), codes):
        start = sum(map(len, sequence))
        quantizer_offsets = torch.arange(stream.num_quantizers) * stream.codebook_size
        rows = offset + 1 + quantizer_offsets + stream_codes  # (T, Q)
        sequence += [torch.tensor([offset]), rows.flatten()]
    return torch.cat(sequence), start


def targets(stream, codes, ended):
    """Targets (T + 1, Q) for codes (T, Q), beginning at the start token; -100 means no target.

    If the recording `ended`, the last frame is followed by EOS in the first quantizer.
    """
    target = F.pad(codes, (0, 0, 0, 1), value=-100)  # (T + 1, Q)
    if ended:
        target[-1, 0] = stream.codebook_size
    return target


def lay_out(streams, samples):
    """A padded batch for TokenTransformer: {"inputs", "start", "target"}.

    samples: [(codes (T, Q) of each stream, True if the recording ends there)].
    """
    sequences = []
    starts = []
    target = []
    for codes, ended in samples:
        sequence, start = build_sequence(streams, codes)
        sequences.append(sequence)
        starts.append(start)
        # EOS is a target only where the recording ends, not where a crop ends.
        target.append(targets(streams[-1], codes[-1], ended))
    return {
        "inputs": pad_sequence(sequences, batch_first=True),
        "start": torch.tensor(starts),
        "target": pad_sequence(target, batch_first=True, padding_value=-100),
    }


# Model


class TokenTransformer(nn.Module):
    """A causal transformer over token streams, which predicts the last stream.

    Each quantizer has its own embeddings, and its own output head over K codes and EOS; only the
    first head predicts EOS. AudioLM has no text. Here, text is a prefix, as in SPEAR-TTS
    (Kharitonov et al. 2023). Training sometimes drops it, for classifier-free guidance. A model
    without a vocabulary takes no text.
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
        # Limits of generation, measured on training data: frames of the last stream, frames of
        # the stream before it, and text tokens.
        self.max_frames = max_frames
        self.max_context = max_context
        self.longest_text = longest_text
        self.frame_rate = frame_rate  # frames of the last stream per second
        self.has_text = bool(vocabulary)
        self.offsets = stream_offsets(self.streams)  # first embedding row of each stream
        width = cfg.width
        self.embed = nn.Embedding(self.offsets[-1], width, padding_idx=0)  # for all streams
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
            self.null_text = learned_tokens(cfg.max_text_len, width)  # replaces dropped text

    def split_text(self, text):
        """Split `text` at spaces into parts that are no longer than the longest training text.

        UserError if a single word is longer.
        """

        def fits(part):
            return len(self.tokenizer.encode(part)) <= self.longest_text

        if not text or fits(text):
            return [text]
        parts = []
        for word in text.split():
            if not fits(word):
                raise UserError(
                    f"{word!r}: {len(self.tokenizer.encode(word))} tokens without a space, but "
                    f"the longest training text has {self.longest_text}"
                )
            if parts and fits(f"{parts[-1]} {word}"):
                parts[-1] += f" {word}"
            else:
                parts.append(word)
        return parts

    def condition(self, texts, drop=False):
        """Embeddings (B, L, D) of B texts; "no text" where `drop` (B,) is true or the text is "".

        None for a model without text.
        """
        if not self.has_text:
            return None
        null_text = self.null_text.weight
        device = null_text.device
        length = self.cfg.max_text_len
        is_empty = [not text for text in texts]
        drop = drop | torch.tensor(is_empty, device=device)
        # Cut or pad. Padding is not masked: it tells the model where the text ends.
        rows = []
        for text in texts:
            tokens = self.tokenizer.encode(text) + [0] * length
            rows.append(tokens[:length])
        rows = torch.tensor(rows, device=device)
        x = self.text_encoder(self.text_embed(rows))
        drop = drop[:, None, None]
        return torch.where(drop, null_text.to(x.dtype), x)  # (B, L, D)

    def forward_cached(self, inputs, condition):
        """(outputs (B, N, D), KV cache) for inputs (B, N), after the text prefix."""
        x = self.embed(inputs)  # (B, N, D)
        if condition is not None:
            x = torch.cat([condition.to(x.dtype), x], dim=1)  # (B, L + N, D)
        x, cache = self.transformer(x, return_cache=True)
        return x[:, -inputs.shape[1] :], cache

    def forward(self, batch, drop=False):
        """(cross-entropy, accuracy) of each sample (B,): means over its tokens.

        batch: "inputs" (B, N), "start" (B,) and "target" (B, T + 1, Q) from `lay_out`, and "text"
        [B]. drop (B,): true for samples whose text is dropped; or False.
        """
        target = batch["target"]
        # Padding is at the end, so the causal mask hides it.
        condition = self.condition(batch["text"], drop)
        x, _ = self.forward_cached(batch["inputs"], condition)
        # Outputs at the positions start to start + (T + 1) · Q - 1 predict the flattened target.
        offsets = torch.arange(target[0].numel(), device=x.device)
        positions = batch["start"][:, None] + offsets
        positions = positions.clamp(max=x.shape[1] - 1)  # positions beyond the end have no target
        samples = torch.arange(len(x), device=x.device)[:, None]
        x = x[samples, positions]  # (B, (T + 1) · Q, D)
        x = x.unflatten(1, target.shape[1:])  # (B, T + 1, Q, D)
        # Each quantizer has its own head.
        classifiers = self.classifiers.to(x.dtype)
        logits = torch.einsum("btqd,qkd->btqk", x, classifiers)  # (B, T + 1, Q, K + 1)
        logits = logits.float()
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
        loss = loss.view(target.shape).sum((1, 2))
        correct = (logits.argmax(-1) == target).sum((1, 2))
        count = (target >= 0).sum((1, 2))
        return loss / count, correct / count


# Generation (AudioLM §III-D)


class SamplingParams(NamedTuple):
    temperature: float = -1.0  # 0: the most probable code, below 0: cfg.temperature
    top_k: int = 0  # 0: all codes
    guidance_scale: float = 1.0  # 1: none


AS_TRAINED = SamplingParams()


def sample_token(logits, uniform, sampling):
    """Sample codes (B,) from logits (B, K), given random numbers `uniform` (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(1)
    K = logits.shape[1]
    top_logits, codes = logits.topk(min(sampling.top_k or K, K))  # (B, k), most probable first
    # Inverse transform sampling, in integers, because cumsum of floats is not deterministic on
    # GPUs. Probabilities are in units of 2^-32, and random numbers in units of 2^-24, the
    # resolution of torch.rand.
    probabilities = (top_logits / sampling.temperature).softmax(1)
    cumulative = (probabilities * 2**32).long().cumsum(1)  # (B, k)
    threshold = (uniform * 2**24).long()[:, None] * cumulative[:, -1:]
    # Take the first code whose cumulative probability reaches the random number.
    index = (cumulative * 2**24 < threshold).sum(1, keepdim=True)
    return codes.gather(1, index)[:, 0]


@torch.no_grad()
def generate(model, samples, min_frames, max_frames, seeds, sampling, texts=()):
    """Continue the last stream of each of B samples up to EOS. Returns a list of new codes (T, Q).

    samples: for each sample, the codes (T, Q) of every stream; those of the last may be empty.
    min_frames, max_frames: for each sample, the minimum and maximum number of frames to add. seeds:
    one per sample; its random numbers depend on nothing else. texts: one per sample, or empty; ""
    is no text.
    """
    stream = model.streams[-1]
    eos = stream.codebook_size  # class K of each head
    Q = stream.num_quantizers
    device = model.embed.weight.device
    # The last stream ends each sequence, so the next code is predicted at the last position.
    sequences = [build_sequence(model.streams, codes)[0] for codes in samples]
    guided = model.has_text and sampling.guidance_scale != 1
    if guided:  # the second half of the batch has no text
        sequences = sequences * 2
        texts = texts + [""] * len(samples)

    # One pass over the prompts fills the KV cache.
    lengths = torch.tensor(list(map(len, sequences)), device=device)
    inputs = pad_sequence(sequences, batch_first=True).to(device)  # (B or 2B, N)
    outputs, cache = model.forward_cached(inputs, model.condition(texts))
    rows = torch.arange(len(outputs), device=device)
    x = outputs[rows, lengths - 1]  # (B or 2B, D), at the last input of each sample
    size = cache[0][0].shape[2]  # padded length, with the text prefix
    num_frames = max(max_frames)
    text_length = size - inputs.shape[1]
    kv_cache = KVCache(cache, text_length + lengths, size + num_frames * Q)

    # Draw random numbers for each sample separately, so that they do not depend on the batch.
    uniform = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        uniform.append(torch.rand(num_frames, Q, generator=generator))
    uniform = torch.stack(uniform).to(device)  # (B, frames, Q)

    first_end = torch.tensor(min_frames, device=device)  # EOS is forbidden before this frame
    ends = torch.tensor(max_frames, device=device)  # number of new frames of each sample
    generated = torch.zeros_like(uniform, dtype=torch.long)
    # A stream without repeats must not repeat its last code. Without a prompt, `last` is EOS, so
    # that the recording is not empty.
    last = [codes[-1][-1, 0] if len(codes[-1]) else eos for codes in samples]
    last = torch.tensor(last, device=device)
    for i in range(num_frames * Q):
        t, q = divmod(i, Q)
        classifier = model.classifiers[q].to(x.dtype)
        logits = F.linear(x, classifier).float()  # (B or 2B, K + 1)
        if guided:  # classifier-free guidance (Ho & Salimans 2022, Eq. 6)
            logits = diffusion.classifier_free_guidance(*logits.chunk(2), sampling.guidance_scale)
        # EOS is only possible at the beginning of a frame.
        no_eos = (t < first_end) | (q > 0)
        logits[:, eos].masked_fill_(no_eos, -torch.inf)
        if not stream.repeats:
            logits.scatter_(1, last[:, None], -torch.inf)
        code = sample_token(logits, uniform[:, t, q], sampling)
        ends = torch.where(code == eos, ends.clamp(max=t), ends)
        # Once per frame, synchronize with the device to see whether all samples have ended.
        if q == 0 and (ends <= t).all():
            break
        code = code.clamp(max=eos - 1)  # samples that have ended continue, and are cut below
        generated[:, t, q] = code
        last = code
        # The new code is the next input, as in `build_sequence`.
        rows = model.offsets[-2] + 1 + q * stream.codebook_size + code
        if guided:
            rows = rows.repeat(2)  # the same code with and without text
        x = model.transformer.step(model.embed(rows), kv_cache)  # (B or 2B, D)
    return [codes[:end] for codes, end in zip(generated.cpu(), ends.tolist())]


def generate_long(model, context_of, prompts, limits, may_end, seeds, sampling, texts=()):
    """`generate` beyond the training length, in windows that overlap by half.

    prompts: the codes (T_b, Q) that each of B samples begins with. limits: for each sample, the
    maximum number of frames, including the prompt. may_end: for each sample, whether EOS is
    allowed; without EOS, the sample gets the maximum. context_of(b, codes, start): returns the
    earlier streams of sample b for a window that begins at frame `start` of its codes so far,
    `codes` (T, Q). A window has at most the max_frames and the max_context of training, and cannot
    end if its context was cut. Returns the codes (T_b, Q) of each sample, including the prompt.
    """
    if sampling.temperature < 0:
        sampling = sampling._replace(temperature=model.cfg.temperature)
    done = list(prompts)  # the codes so far
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
            context = context_of(b, codes, start)  # covers the time of the window
            samples.append([*(each[: model.max_context] for each in context), window])
            room = model.max_frames - len(window)
            most.append(min(room, limits[b] - len(codes)))
            least = int(not len(codes))  # no recording is empty
            # If the context is cut, later windows need the rest of it, so this one must not end.
            is_cut = any(len(each) > model.max_context for each in context)
            if is_cut or not may_end[b]:
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
            if len(added) < room:  # it ended with EOS
                limits[b] = len(done[b])
