"""CLIP (Radford et al. 2021): a small model, and the interface shared by all CLIPs.

The interface is `tokenizer`, `embed_text`, `embed_image` and `text_condition`. data/embed.py trains
the small CLIP in minutes. data/clips.py loads it, or a model from the open_clip package, by name.
"""

import collections
import hashlib
import math
import re
import unicodedata

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common.config import UserError, note
from common.models import nn as layers
from common.models.pixels import central_square, resize, to_floats

PAD = 0
START = 1
END = 2
BYTES = 3  # token BYTES + b is the byte b
WORDS = BYTES + 256  # token WORDS + i is word i of the vocabulary
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or a punctuation mark
GALLERY = 100  # number of references that `retrieval` compares with each query


def words_of(text):
    """Words and punctuation marks of a text, in lower case."""
    # Compose accents first: a combining accent is not \w and would become its own token.
    text = unicodedata.normalize("NFC", text)
    return WORD.findall(text.lower())


class Tokenizer:
    """Maps each word of `vocabulary` to one token, and spells other words as UTF-8 bytes.

    The bytes of a spelled word are preceded by a space.

    context: number of tokens per text that `__call__` returns.
    """

    def __init__(self, vocabulary, context=0):
        self.vocabulary = list(vocabulary)
        self.context = context
        self.token_of = {word: token for token, word in enumerate(self.vocabulary, WORDS)}

    @classmethod
    def learn(cls, texts, size):
        """A tokenizer for the `size` most frequent words of `texts`.

        Ties are broken alphabetically.
        """
        words = sorted(words_of("\n".join(texts)))
        return cls(word for word, _ in collections.Counter(words).most_common(size))

    def encode(self, text):
        """Tokens of `text`, without START and END. Ignores case and the amount of whitespace."""
        tokens = []
        for word in words_of(text):
            if word in self.token_of:
                tokens.append(self.token_of[word])
            else:  # a lone surrogate has no bytes, so it becomes "?"
                spelled = f" {word}".encode(errors="replace")
                tokens += [BYTES + byte for byte in spelled]
        return tokens

    def __call__(self, texts):
        """Tokens int64 (B, L), L = context: START, at most L - 2 tokens, END, and PAD."""
        rows = []
        for text in texts:
            tokens = [START, *self.encode(text)[: self.context - 2], END]
            rows.append(tokens + [PAD] * (self.context - len(tokens)))
        return torch.tensor(rows)

    def __len__(self):
        return WORDS + len(self.vocabulary)


def note_texts(texts, encode, max_tokens):
    """Print a note if some of the texts are empty, or longer than `max_tokens` tokens.

    encode: a function from text to tokens.
    """
    empty = sum(not text for text in texts)
    longer = sum(len(encode(text)) > max_tokens for text in texts)
    if empty + longer:
        note(
            f"of {len(texts)} texts checked, {empty} are empty, and {longer} are longer than "
            f"{max_tokens} tokens and will be cut"
        )


class Encoder(nn.Module):
    """Base class of all CLIPs."""

    def note_cut(self, texts, length):
        """Call `note_texts` for a model that takes `length` tokens per text."""
        max_tokens = min(self.context, length) - 2  # START and END
        note_texts(texts, self.tokenizer.encode, max_tokens)

    @torch.no_grad()
    def text_condition(self, texts, length):
        """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)} of texts, L = `length`.

        texts: B texts, or their tokens from `tokenizer`. Longer texts are cut, shorter ones padded.
        Everything is fp32, even within autocast.
        """
        tokens = texts if torch.is_tensor(texts) else self.tokenizer(texts)
        device = next(self.parameters()).device
        with torch.autocast(device.type, enabled=False):
            embedding, encodings, mask = self.embed_text(tokens.to(device))
        padding = length - encodings.shape[1]  # a negative number cuts
        return {
            "text_embed": embedding,
            "text_enc": F.pad(encodings.float(), (0, 0, 0, padding)),
            "text_mask": F.pad(mask, (0, padding)),
        }

    def check_fingerprint(self, where, fingerprint):
        """Raise a UserError that starts with `where`, unless the CLIP has this `fingerprint`.

        A `fingerprint` of None is not checked, nor are those of open_clip models.
        """
        found = self.fingerprint()
        if fingerprint and found != fingerprint and "open_clip:" not in found + fingerprint:
            raise UserError(
                f"{where}: not the CLIP that made the embeddings, or it was retrained since: "
                f"fingerprint {found}, expected {fingerprint}; embed the data again, or name the "
                "right one with --clip"
            )

    def check_widths(self, where, embed_width, encoding_width=0):
        """Raise a UserError that starts with `where`, unless the CLIP has these widths (0: any)."""
        found = [self.embed_width, self.encoding_width]
        expected = [embed_width or found[0], encoding_width or found[1]]
        if found != expected:
            raise UserError(
                f"{where}: the widths of the CLIP's embeddings and text encodings are {found}; "
                f"expected {expected}"
            )


class CLIP(Encoder):
    """A small convolutional image encoder and a one-block text transformer.

    They share an embedding space.

    vocabulary: see Tokenizer. image_size: images are resized and cropped to this height and width.
    context: maximum text length in tokens. embed_width: width of embeddings. text_width: width of
    text encodings, a multiple of 32.
    """

    def __init__(self, vocabulary, image_size, context, embed_width, text_width):
        super().__init__()
        self.tokenizer = Tokenizer(vocabulary, context)
        self.image_size = image_size
        self.context = context
        self.embed_width = embed_width
        self.encoding_width = text_width
        self.token_embedding = nn.Embedding(len(self.tokenizer), text_width)
        self.transformer = layers.Transformer(text_width, 1, text_width // 32)
        self.text_projection = nn.Linear(text_width, embed_width, bias=False)
        # Each of three or more convolutions halves the sides, until they are at most 4.
        encoder = []
        width_in = 3
        width = 24
        size = image_size
        while size > 4 or len(encoder) < 6:
            kernel = 3 if encoder else 5
            encoder += [nn.Conv2d(width_in, width, kernel, 2, kernel // 2), nn.ReLU()]
            width_in = width
            width *= 2
            size = math.ceil(size / 2)
        # Flatten instead of averaging, because captions mention positions.
        features = width_in * size**2
        self.image_encoder = nn.Sequential(
            *encoder,
            nn.Flatten(),
            nn.LayerNorm(features),
            nn.Linear(features, embed_width, bias=False),
        )
        for convolution in encoder[::2]:
            # He et al. 2015, for ReLU. torch's default weights are smaller by a factor of √6.
            nn.init.kaiming_normal_(convolution.weight)
        self.image_encoder.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        # Logarithm of the inverse temperature (Radford et al. 2021, §2.3).
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def fingerprint(self):
        """A digest of weights and vocabulary. It does not depend on the path of the CLIP's file."""
        digest = hashlib.sha256(repr(self.tokenizer.vocabulary).encode())
        for value in self.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def embed_text(self, tokens):
        """tokens (B, L) -> (embedding (B, D), encodings (B, L, W), mask (B, L)).

        Encodings are zero at padding.
        """
        mask = tokens != PAD
        end = mask.sum(1) - 1
        x = self.transformer(self.token_embedding(tokens))  # (B, L, W); causal: padding is ignored
        embedding = self.text_projection(x[torch.arange(len(x), device=x.device), end])
        return embedding.float(), x * mask[..., None], mask

    def embed_image(self, images):
        """uint8 (B, H, W, 3) -> (B, D)."""
        pixels = center_crop(images, self.image_size) * 2 - 1
        return self.image_encoder(pixels.contiguous(memory_format=torch.channels_last)).float()


def center_crop(images, size):
    """Resize the shorter side of images to `size` and crop the central square, as CLIP does.

    images: uint8 (B, H, W, 3). Returns float (B, 3, size, size) in [0, 1].
    """
    images = to_floats(images) / 255
    images = central_square(images, ratio=16)  # otherwise, very long images take gigabytes
    return central_square(resize(images, size)).clamp(0, 1)


def contrastive_loss(logits, group):
    """Symmetric cross-entropy of logits (B, B) (Radford et al. 2021, Figure 3).

    Row i belongs to image i, column i to its caption. group (B,): ints, equal for equal captions.
    Different images with equal captions are not negatives, because the caption fits both.
    """
    own = torch.arange(len(logits), device=logits.device)
    is_same = group[:, None] == group  # (B, B)
    is_same[own, own] = False
    logits = logits.masked_fill(is_same, -math.inf)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def retrieval(queries, references, captions):
    """The fraction of queries (N, D) whose nearest reference in their group has the same caption.

    Queries and references (N, D) are numpy embeddings of images or texts, of unit length. Row i of
    both belongs to caption i. Groups are 100 consecutive rows, or all if there are fewer. The rows
    after the last whole group are ignored. With captions as references, this is AttnGAN's
    R-precision (Xu et al. 2018, §4).
    """
    captions = np.array(captions, object)  # otherwise numpy pads every caption to the longest
    gallery = min(GALLERY, len(captions))
    hits = []
    for start in range(0, len(captions) - gallery + 1, gallery):
        rows = slice(start, start + gallery)
        nearest = (queries[rows] @ references[rows].T).argmax(1)
        hits.append(captions[rows][nearest] == captions[rows])
    return float(np.mean(hits))
