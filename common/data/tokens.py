"""Recordings as tokens: a run's semantic tokenizer, cached tokens, crops, and vocabulary."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from pathlib import Path

import numpy as np
import torch

from common import accumulate, checkpoint, config, dist, loader, order, tracker
from common.config import UserError
from common.data.files import Unusable
from common.models import clip, semantic

KMEANS_FILE = "kmeans.pt"  # in the folder of the semantic run
LENGTHS_OF = 20_000  # maximum number of recordings used to measure lengths and texts
MAX_FRAMES = 30 * 60 * semantic.FRAME_RATE  # for fitting k-means: half an hour

# Tokenizers


def load_kmeans(folder, sample_rate, device, make_features):
    """Load the semantic tokenizer of a run folder: a semantic.KMeans with its file's `checksum`.

    make_features: maps the setting --tokenizer to a function that computes features of a wave.
    UserError if the tokenizer was fitted at another sample rate.
    """
    path = Path(folder) / KMEANS_FILE
    contents = checkpoint.load(path, "settings")
    settings = contents["settings"]
    settings["features"] = make_features(settings["features"])
    kmeans = semantic.KMeans(**settings).to(device)
    checkpoint.load_weights(kmeans, contents["model"], path)
    if kmeans.sample_rate != sample_rate:
        raise UserError(
            f"--sample_rate {sample_rate}: {path} has {kmeans.sample_rate}; train the semantic "
            "stage at the same rate"
        )
    kmeans.checksum = checkpoint.checksum(path)[:16]
    return kmeans


def fit(kmeans, dataset, indices, seed):
    """Fit a semantic.KMeans to at most half an hour of the recordings `indices`.

    dataset.wave(index, length, fraction): see Recordings.wave. Unusable recordings are skipped.
    UserError if there are fewer frames than clusters.
    """
    key = accumulate.derive_seed("kmeans", seed)
    shuffled = np.random.default_rng(key).permutation(indices).tolist()
    found = [torch.zeros(0, len(kmeans.mean))]
    frames = 0
    for index in tracker.progress(shuffled, desc="k-means: features", delay=3, leave=False):
        with contextlib.suppress(Unusable):
            # Use only 10 s of each recording, so that the half hour covers many.
            x = kmeans.features(dataset.wave(index, 10 * dataset.rate, 0.5))
            found.append(x.cpu())
            frames += len(x)
        if frames >= MAX_FRAMES:
            break
    x = torch.cat(found)[:MAX_FRAMES]
    if len(x) < kmeans.clusters:
        raise UserError(
            f"--clusters {kmeans.clusters}: there are only {len(x)} frames of 20 ms to fit them to"
        )
    kmeans.fit(x, accumulate.derive_seed("centers", seed))


def fit_kmeans(run, dataset, indices, cfg, device, make_features):
    """Fit the semantic tokenizer of the RunFolder `run`, and load it with `load_kmeans`.

    A resumed run keeps its tokenizer. A file left by an aborted start is replaced, because its
    settings may differ. Uses `clusters`, `seed` and `tokenizer` of `cfg`. Collective.
    """
    path = run.folder / KMEANS_FILE

    def make():
        if run.resume_from and path.exists():
            return
        features = make_features(cfg.tokenizer)
        kmeans = semantic.KMeans(cfg.clusters, features, dataset.rate).to(device)
        fit(kmeans, dataset, indices, cfg.seed)
        settings = {
            "clusters": cfg.clusters,
            "features": cfg.tokenizer,
            "sample_rate": dataset.rate,
        }
        checkpoint.save({"settings": settings, "model": kmeans.state_dict()}, path)

    dist.on_main(make)
    return load_kmeans(run.folder, dataset.rate, device, make_features)


def code_entropies(codes, Q, size):
    """Return (entropy (Q,) in nats, count (Q,)) of each quantizer's codes on all ranks. Collective.

    codes: list of int64 (N, Q), possibly empty. Codes are below `size`; -100 is ignored.
    """
    uses = []
    for column in torch.cat([torch.zeros(0, Q, dtype=torch.int64), *codes]).T:
        counts = torch.bincount(column[column >= 0], minlength=size)
        # Sum over ranks before taking the entropy, which is not additive.
        uses.append(dist.all_sum(counts.tolist()))
    uses = torch.tensor(uses)  # (Q, size)
    totals = uses.sum(1)
    return torch.special.entr(uses / totals[:, None]).sum(1), totals


# Caches


class Tokens:
    """The tokens of all recordings, in a memory-mapped file whose pages all processes share.

    The file begins with the offset of each recording in frames, and the total: int64 (N + 1,). Then
    come the tokens, uint16 (Q, total). They are ordered by quantizer, so that a stage reads only
    the quantizers that it needs.

    frames (N,): number of frames of each recording, 0 if it is unusable. Iterating yields the
    tokens (Q, T) of each recording.
    """

    def __init__(self, path, count, num_quantizers):
        """ValueError if the file does not have the expected size. Its tokens are not checked."""
        self.arguments = path, count, num_quantizers
        content = np.asarray(np.memmap(path, np.uint16, "r"))  # slicing a memmap is slower
        size = 4 * (count + 1)  # of the offsets, in 16-bit units
        self.offsets = content[:size].view(np.int64).reshape(count + 1)
        self.tokens = content[size:].reshape(num_quantizers, self.offsets[-1])
        self.frames = np.diff(self.offsets)

    def __reduce__(self):
        return Tokens, self.arguments  # spawned workers map the file again

    def __iter__(self):
        for start, stop in itertools.pairwise(self.offsets):
            yield self.tokens[:, start:stop]

    def window(self, index, start, stop, quantizers=slice(None)):
        """Tokens, int64 (T, n), of the frames `start` to `stop` (or the end) of a recording."""
        first, end = self.offsets[index : index + 2]
        tokens = self.tokens[quantizers, first + start : min(first + stop, end)]
        return torch.from_numpy(tokens.T.astype(np.int64))  # nn.Embedding does not take uint16


def write_tokens(path, frames, encoded):
    """Write a file for `Tokens`.

    frames (N,): number of frames of each recording. encoded: pairs (index of a recording, its
    tokens (Q, T)), in any order; of several pairs for a recording, the last one counts.
    """
    offsets = np.append(0, frames.cumsum())
    with checkpoint.atomic_write(path) as file:
        file.write(offsets.tobytes())
        for index, tokens in encoded:
            for quantizer, row in enumerate(tokens):
                frame = quantizer * offsets[-1] + offsets[index]
                file.seek(offsets.nbytes + frame * row.itemsize)
                file.write(row.tobytes())


# While recordings are being encoded, each rank saves its new tokens at this interval, each time in
# a new file, called a piece.
PIECE_SECONDS = 20


def read_pieces(place):
    """Yield (index of a recording, tokens (Q, T)) from the pieces in a folder.

    Damaged pieces are skipped. They are detected by the checksums of the zip format.
    """
    for path in place.glob("*.npz"):
        # numpy and zipfile raise a dozen types of errors for damaged files.
        with contextlib.suppress(Exception), np.load(path) as file:
            ends = file["frames"].cumsum()
            yield from zip(file["indices"], np.split(file["tokens"].T, ends[:-1], axis=1))


def encode_missing(place, missing, cfg, dataset, tokenizer):
    """Encode the recordings `missing`, and write their tokens to pieces in `place`. Collective.

    Each rank encodes a share. Ranks synchronize after each piece, so that signals are handled and
    no rank waits for long. Recordings are encoded one by one: in a batch, the padding, and thus the
    tokens, would depend on which other recordings are missing.
    """
    share = missing[dist.rank() :: dist.world_size()].tolist()
    timeout = 60 * cfg.timeout_minutes
    waves = loader.read_ahead(dataset, share, cfg.workers, timeout=timeout)
    bar = tracker.progress(share, desc="tokens", delay=1, disable=not dist.is_main())
    recordings = zip(bar, waves)

    def make_piece():
        """Encode and write a piece; True if there may be more.

        After an error, the piece has the recordings encoded before it.
        """
        due = time.monotonic() + PIECE_SECONDS
        encoded = {}  # {recording: tokens (T, Q)}
        try:
            for index, wave in recordings:
                if wave is not None:
                    codes = np.asarray(tokenizer.encode(wave), np.uint16)
                    encoded[index] = codes.reshape(-1, tokenizer.num_quantizers)
                if time.monotonic() >= due:
                    return True
        finally:
            if encoded:
                with checkpoint.atomic_write(place / f"{min(encoded)}.npz") as file:
                    np.savez(
                        file,
                        indices=list(encoded),
                        frames=list(map(len, encoded.values())),
                        tokens=np.concatenate(list(encoded.values())),
                    )

    with dist.listening():
        while any(dist.all_gather(dist.on_all(make_piece))):
            dist.stop_together()


def token_cache(cfg, dataset, tokenizer):
    """The Tokens of a dataset's recordings, cached in a file below RUN/tokens. Collective.

    Recordings that are missing from the file are encoded first. The file does not depend on the
    number of ranks, nor on how often they were killed. Unusable recordings have no tokens; each
    start tries them again.

    tokenizer: `encode` maps a wave (T,) to integers below 65536, (frames,) or (frames,
    num_quantizers). `checksum` changes when the tokens do.
    """
    fingerprint = dataset.fingerprint()
    digest = order.hash_of(repr((fingerprint, tokenizer.checksum)).encode())
    place = Path(cfg.run_dir, "tokens", f"{digest:016x}")
    path = place / "tokens"
    arguments = path, len(dataset), tokenizer.num_quantizers

    def known():
        """Yield (index, tokens (Q, T)) from the file, then from the pieces, which are newer."""
        saved = ()
        with contextlib.suppress(FileNotFoundError, ValueError):  # missing or damaged
            saved = Tokens(*arguments)
        yield from enumerate(saved)
        yield from read_pieces(place)

    def known_frames():
        frames = np.zeros(len(dataset), np.int64)
        with contextlib.suppress(FileNotFoundError, ValueError):  # missing or damaged
            frames += Tokens(*arguments).frames
        for index, tokens in read_pieces(place):
            frames[index] = tokens.shape[1]
        return frames

    def join():
        pieces = list(place.glob("*.npz*"))  # also incomplete ones, .npz.tmp
        if pieces or not path.exists():
            write_tokens(path, known_frames(), known())
        for piece in pieces:
            piece.unlink()

    def lock():
        with contextlib.suppress(BlockingIOError, PermissionError):
            checkpoint.lock(file)
            return True

    dist.on_all(lambda: place.mkdir(parents=True, exist_ok=True))
    with open(place / ".lock", "w") as file:
        while not dist.on_main(lock):  # another run, maybe of another stage, is encoding
            time.sleep(1)
        missing = dist.on_main(lambda: np.flatnonzero(known_frames() == 0))
        if len(missing):
            encode_missing(place, missing, cfg, dataset, tokenizer)
        dist.on_main(join)
    return Tokens(*arguments)


# Crops


def align(content, heard):
    """The position in `content` (N,) of each of the tokens `heard` (T,): int64 (T,).

    Positions begin at 0, and advance by 0 or 1 from token to token. `heard` may end before
    `content`. Of all such alignments, this one has the lowest cost: the number of tokens that
    differ from the content at their positions.
    """
    cost = np.full(len(content), np.inf)
    cost[0] = 0  # start at the first token
    moved = np.zeros((len(heard), len(content)), bool)  # true if the previous position is one less
    for t, token in enumerate(heard):
        if t:
            cost_back = np.append(np.inf, cost[:-1])
            moved[t] = cost_back < cost
            cost = np.minimum(cost, cost_back)
        cost = cost + (content != token)
    places = np.zeros(len(heard), np.int64)
    place = cost.argmin()
    for t in reversed(range(len(heard))):
        places[t] = place
        place -= moved[t, place]
    return places


@dataclasses.dataclass(eq=False)
class TokenCrops:
    """A training dataset: crops of recordings as token streams that cover the same time.

    A crop is `seconds` long, rounded to frames of the codes or, without codes, of the semantic
    tokens.
    """

    dataset: object
    seconds: float
    # Each stream has a name and num_quantizers. "semantic" has the semantic tokens. The others
    # split the codes' quantizers among themselves, in order.
    streams: list
    lay_out: object  # function (streams, samples) -> batch: see token_lm.lay_out
    semantic_tokens: Tokens | None
    codes: Tokens | None
    frame_rate: float  # frames per second

    def __post_init__(self):
        timing = self.codes or self.semantic_tokens  # crops are measured in frames of these
        self.frames = timing.frames  # of each recording
        self.crop_frames = max(1, round(self.seconds * self.frame_rate))
        # See `join_within`.
        self.join = 0.0
        self.others = collections.defaultdict(list)  # {voice: recordings}

    def fault(self, index):
        """Why a recording cannot be read now, naming it; "" if it can."""
        return self.dataset.fault(index)

    def readable(self, indices):
        """The `indices` whose recordings have tokens."""
        return indices[self.frames[indices] > 0]

    def crop(self, index, offset=0.0):
        """Read (tokens of each stream, int64 (T, Q); True if the recording ends with the crop).

        offset: position of the crop, from 0 (the first possible one) to below 1 (the last).
        """
        frames = int(self.frames[index])
        # Every start at which a whole crop fits has the same probability.
        start = int(offset * (max(0, frames - self.crop_frames) + 1))
        stop = min(frames, start + self.crop_frames)
        return self.window(index, start, stop), stop == frames

    def window(self, index, start, stop):
        """The tokens of each stream, int64 (T, Q), of the frames `start` to `stop`."""
        found = []
        quantizer = 0  # the first quantizer of the next stream of codes
        for stream in self.streams:
            if stream.name == "semantic":
                # The semantic tokens of the same time, at their own frame rate; at least one.
                ratio = semantic.FRAME_RATE / self.frame_rate
                last = self.semantic_tokens.frames[index]
                start_heard = min(round(start * ratio), last - 1)
                stop_heard = max(round(stop * ratio), start_heard + 1)
                if stop == self.frames[index]:  # rounding must not lose the last token
                    stop_heard = last
                heard = self.semantic_tokens.window(index, start_heard, stop_heard)  # (T, 1)
                # Drop repetitions, so that the coarse stage models durations (AudioLM §III-C).
                codes = heard[:, 0].unique_consecutive()[:, None]  # (N, 1)
            else:
                quantizers = slice(quantizer, quantizer + stream.num_quantizers)
                codes = self.codes.window(index, start, stop, quantizers)  # (T, n)
                quantizer = quantizers.stop
            found.append(codes)
        return found

    def join_within(self, indices, probability):
        """In training, append other recordings of the same speaker to short recordings.

        With `probability`, a recording is appended if the two fit in a crop together. This teaches
        the model what follows a short recording, such as a single word. Appended recordings are
        from `indices`. If the speaker is unknown, a recording is appended to itself.
        """
        self.join = probability
        for index in self.readable(indices):
            if self.is_whole(index):
                self.others[self.voice_of(index)].append(index)

    def voice_of(self, index):
        """The speaker of a recording or, if unknown, its name. Shifted copies share it."""
        speaker = self.dataset.speaker_of[index]
        return self.dataset.names[index] if speaker == "" else speaker

    def sample(self, index, offset=0.0, draw=1.0, which=0.0):
        """A training sample: (tokens of each stream, True if the recording ends with them, text).

        The text belongs to a whole recording, so for a part of a recording it is "".
        offset: see `crop`. If `draw` in [0, 1) is below `join`, another recording, chosen by
        `which` in [0, 1), is appended if both fit in a crop.
        """
        streams, ended = self.crop(index, offset)
        if not self.is_whole(index):
            return streams, ended, ""
        text = self.dataset.texts[index]
        if draw < self.join:
            others = self.others[self.voice_of(index)]
            other = others[int(which * len(others))]
            if self.frames[[index, other]].sum() <= self.crop_frames:
                following, ended = self.crop(other)
                streams = [torch.cat(pair) for pair in zip(streams, following)]
                if self.streams[0].name == "semantic":  # also drop a repetition where they meet
                    streams[0] = streams[0].unique_consecutive(dim=0)
                texts = [text, self.dataset.texts[other]]
                text = " ".join(texts) if all(texts) else ""
        return streams, ended, text

    def is_whole(self, index):
        """True if a recording fits in a crop."""
        return self.frames[index] <= self.crop_frames

    def fetch(self, indices, random_bits=None):
        """Return (batch, usable (B,)).

        The batch is from `lay_out`, with "text": [B]. It is {} unless all recordings are usable.
        """
        # Recordings that could not be read have no tokens.
        usable = self.frames[indices] > 0
        if not usable.all():
            return {}, usable
        # In evaluation, crops start at the beginning of recordings, and nothing is appended.
        draws = order.uniform(random_bits, len(indices), [0.0, 1.0, 0.0])
        samples = list(map(self.sample, indices.tolist(), *draws.T))
        batch = self.lay_out(self.streams, [(streams, ended) for streams, ended, _ in samples])
        batch["text"] = [text for _, _, text in samples]
        return batch, usable

    def lengths(self, indices):
        """{"max_frames", "max_context", "frame_rate"}, measured on many crops drawn as in training.

        max_frames: maximum length of the last stream. max_context: maximum length of the stream
        before it, or 0. frame_rate: of the last stream, in frames per second.

        Semantic tokens without repetitions have no fixed rate, so for a semantic stage, frame_rate
        is the 95th percentile. Its max_frames is the 95th percentile, too, unless there are texts:
        then it is the maximum, because generation from a text has only one window.
        """
        indices = self.readable(order.some_of(indices, LENGTHS_OF))
        draws = np.random.default_rng(0).random((3, len(indices)))
        samples = list(map(self.sample, indices, *draws))
        lengths = np.array([list(map(len, streams)) for streams, _, _ in samples])  # (N, streams)
        if self.codes is not None:
            context, frames = lengths.max(0).tolist()
            return {
                "max_frames": frames,
                "max_context": context,
                "frame_rate": self.frame_rate,
            }
        alone = [len(streams[0]) for streams, _ in map(self.crop, indices, draws[0])]
        seconds = np.minimum(self.frames[indices], self.crop_frames) / self.frame_rate
        frame_rate = float(np.quantile(np.array(alone) / seconds, 0.95))
        has_texts = any(self.dataset.texts[index] for index in indices)
        frames = int(np.quantile(lengths, 1.0 if has_texts else 0.95))
        return {"max_frames": frames, "max_context": 0, "frame_rate": frame_rate}


def tokenize_splits(cfg, splits, streams, lay_out, kmeans, codec):
    """Convert `splits` of recordings to splits of TokenCrops, with `streams` and `lay_out`.

    All recordings are tokenized once, to files below RUN/tokens. kmeans, codec: None if the streams
    do not need their tokens. Collective.
    """
    frame_rate = codec.frame_rate if codec else semantic.FRAME_RATE

    @functools.cache  # the splits share one or two datasets
    def crops_of(dataset):
        semantic_tokens = token_cache(cfg, dataset, kmeans) if kmeans else None
        codes = token_cache(cfg, dataset, codec) if codec else None
        return TokenCrops(
            dataset,
            cfg.seconds,
            streams,
            lay_out,
            semantic_tokens,
            codes,
            frame_rate,
        )

    return {name: (crops_of(dataset), indices) for name, (dataset, indices) in splits.items()}


# Texts


def learn_vocabulary(crops, indices, size, max_tokens):
    """Return ([the `size` most frequent words of training texts], length of the longest text).

    ([], 0) if there are no texts. The length is in tokens, at most `max_tokens`. crops:
    TokenCrops. Notes tell how many texts are empty or longer than `max_tokens`, and how many
    recordings are longer than a crop, and so trained on without text. UserError if all are longer.
    """
    dataset = crops.dataset
    texts = [dataset.texts[index] for index in order.some_of(indices, LENGTHS_OF)]
    if not any(texts):
        return [], 0
    readable = crops.readable(indices)
    longer = readable[crops.frames[readable] > crops.crop_frames]
    if len(longer):
        longest = longer[crops.frames[longer].argmax()]
        seconds = crops.frames[longest] / crops.frame_rate
        about = f"longer than a crop, up to {seconds:.2f} s ({dataset.names[longest]})"
        if len(longer) == len(readable):
            dist.fail(
                f"--seconds: all recordings are {about}, so no crop matches its text; give "
                f"--seconds {seconds:.2f}, or --max_text_len 0"
            )
        config.note(
            f"--seconds: {len(longer)} of {len(readable)} recordings are {about}, so their texts "
            "are not used"
        )
    tokenizer = clip.Tokenizer.learn(texts, size)
    clip.note_texts(texts, tokenizer.encode, max_tokens)
    # Measure the texts used in training: those of whole recordings, or of two joined recordings.
    some = crops.readable(order.some_of(indices, LENGTHS_OF))
    draws = np.random.default_rng(0).random((3, len(some)))
    trained_on = {text for _, _, text in map(crops.sample, some, *draws)}
    longest = max(len(tokenizer.encode(text)) for text in trained_on)
    return tokenizer.vocabulary, min(longest, max_tokens)
