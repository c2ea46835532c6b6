"""Recordings as tokens: the semantic tokenizer of a run, caches of tokens, crops of them."""

import collections
import contextlib
import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch

from common import accumulate, checkpoint, config, dist, order, tracker
from common.config import UserError
from common.data.files import Unusable
from common.models import clip, semantic

KMEANS_FILE = "kmeans.pt"  # in the folder of the semantic run
LENGTHS_OF = 20_000  # recordings of which lengths and texts are looked at
MAX_FRAMES = 30 * 60 * semantic.FRAME_RATE  # to fit k-means to: half an hour

# Tokenizers


def load_kmeans(folder, sample_rate, device, make_features):
    """The semantic tokenizer of a run folder, a semantic.KMeans, with its file's `checksum`.

    make_features: function of the setting --tokenizer that gives the features of a wave.
    UserError if it was fitted to recordings of another rate.
    """
    path = Path(folder) / KMEANS_FILE
    contents = checkpoint.load(path, "settings")
    settings = contents["settings"]
    settings["features"] = make_features(settings["features"])
    kmeans = semantic.KMeans(**settings).to(device)
    checkpoint.load_weights(kmeans, contents["model"], path)
    if kmeans.sample_rate != sample_rate:
        raise UserError(
            f"--sample_rate: {sample_rate}, but that of {path} is {kmeans.sample_rate}; train the "
            "semantic stage at this rate, too"
        )
    kmeans.checksum = checkpoint.checksum(path)[:16]
    return kmeans


def fit(kmeans, dataset, indices, seed):
    """Fit a semantic.KMeans to at most half an hour of the recordings `indices`.

    dataset.wave(index, length, fraction) is as that of Recordings, at dataset.rate; recordings that
    raise Unusable are skipped. UserError if there are fewer frames than clusters.
    """
    key = accumulate.derive_seed("kmeans", seed)
    shuffled = np.random.default_rng(key).permutation(indices).tolist()
    found = [torch.zeros(0, len(kmeans.mean))]
    frames = 0
    for index in tracker.progress(shuffled, desc="k-means: features", delay=3, leave=False):
        with contextlib.suppress(Unusable):
            # Of long recordings a part, so that the half hour is of many.
            x = kmeans.features(dataset.wave(index, 10 * dataset.rate, 0.5))
            found.append(x.cpu())
            frames += len(x)
        if frames >= MAX_FRAMES:
            break
    x = torch.cat(found)[:MAX_FRAMES]
    if len(x) < kmeans.clusters:
        raise UserError(
            f"--clusters {kmeans.clusters}: only {len(x)} frames of 20 ms to fit them to"
        )
    kmeans.fit(x, accumulate.derive_seed("centers", seed))


def fit_kmeans(run, dataset, indices, cfg, device, make_features):
    """As `load_kmeans` of the RunFolder `run`, whose file is made first.

    A resumed run already has one. A file left by an aborted start is fitted again: its settings may
    differ. cfg: with clusters, seed, and tokenizer. Collective.
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
    """(entropy (Q,) in nats, count (Q,)) of each quantizer's codes, over all ranks. Collective.

    codes: list of (N, Q), empty on a rank without any; each code below `size`, or -100 for none.
    """
    uses = []
    for column in torch.cat([torch.zeros(0, Q, dtype=torch.int64), *codes]).T:
        counts = torch.bincount(column[column >= 0], minlength=size)
        # Summed over ranks before taking the entropy, which is not additive.
        uses.append(dist.all_sum(counts.tolist()))
    uses = torch.tensor(uses)  # (Q, size)
    totals = uses.sum(1)
    return torch.special.entr(uses / totals[:, None]).sum(1), totals


# Caches


def token_cache(folder, dataset, tokenizer):
    """The tokens of a dataset's recordings: a list of uint16 numpy, (T,) or (T, Q).

    All ranks call it, and encode their share of what is missing.

    tokenizer: its `encode` of a wave gives integers below 65536, and its `checksum` changes with
    them. Recordings that are unusable have no tokens. The tokens are kept in up to 64 files below
    `folder`: a rank that is killed repeats one of them.
    """
    fingerprint = dataset.fingerprint()
    digest = order.hash_of(repr((fingerprint, tokenizer.checksum)).encode())
    place = Path(folder, f"{digest:016x}")
    count = len(dataset)
    indices = np.array_split(range(count), min(count, 64))
    parts = [(place / f"{number:02d}.npz", part) for number, part in enumerate(indices)]

    def encode(index):
        codes = []
        with contextlib.suppress(Unusable):
            codes = tokenizer.encode(dataset.wave(index))
        return torch.as_tensor(codes, dtype=torch.int64)

    def encode_missing():
        place.mkdir(parents=True, exist_ok=True)
        share = parts[dist.rank() :: dist.world_size()]
        progress = tracker.progress(share, desc="tokens", delay=1, disable=not dist.is_main())
        for path, part in progress:
            with open(path.with_suffix(".lock"), "w") as lock:
                checkpoint.lock(lock, wait=True)  # coarse and fine may be trained at once
                found = _load_tokens(path)
                # What was unusable may have been mended since.
                missing = [
                    index
                    for index, row in zip(part, found or [])
                    if not len(row)
                ]
                is_mended = any(len(encode(index)) for index in missing)
                if found and not is_mended:
                    continue
                encoded = list(map(encode, part.tolist()))
                # In a row: an array for each of 100,000 recordings takes 8 s to read, these 0.3 s.
                row = torch.cat(encoded).numpy().astype(np.uint16)
                with checkpoint.atomic_write(path) as file:
                    np.savez(file, tokens=row, lengths=list(map(len, encoded)))

    dist.on_all(encode_missing)
    # An hour of 4 quantizers at 50 Hz takes 1.4 MB.
    tokens = []
    for path, _ in parts:
        tokens += _load_tokens(path)
    return tokens


def _load_tokens(path):
    """The tokens of each recording of a file, or None: missing or damaged.

    Zip files have checksums.
    """
    try:
        with np.load(path) as file:
            return np.split(file["tokens"], file["lengths"].cumsum()[:-1])
    except Exception:  # numpy and zipfile raise a dozen types for a damaged file
        return None


# Crops


def align(content, heard):
    """For each token of `heard` (T,) its place in `content` (N,), int64 (T,), which never falls.

    By edit distance, numpy arrays: a place may sound for any number of tokens, also of wrong ones,
    each of which costs 1. `heard` may end before `content` does.
    """
    cost = np.full(len(content), np.inf)
    cost[0] = 0  # the first token sounds first
    moved = np.zeros((len(heard), len(content)), bool)  # whether the token before was a place back
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
    """A dataset to train on: crops of recordings as streams of tokens, of one and the same time.

    A crop is `seconds` long, in frames of the codes or, without these, of the semantic tokens.
    """

    dataset: object
    seconds: float
    # Each has a name and num_quantizers: "semantic" is of the semantic tokens, each other one of
    # the next quantizers' codes.
    streams: list
    # Function (streams, samples) -> a batch of [(codes of each stream (T, Q), whether it ends
    # there)].
    lay_out: object
    # Of all recordings, as of `token_cache`, or None: (T,) and (T, Q).
    semantic_tokens: list | None
    codes: list | None
    frame_rate: float  # codes a second

    def __post_init__(self):
        self.frames_of = self.codes or self.semantic_tokens  # crops are cut in frames of these
        self.crop_frames = max(1, round(self.seconds * self.frame_rate))
        # See `join_within`.
        self.join = 0.0
        self.others = collections.defaultdict(list)  # {voice: recordings}

    def fault(self, index):
        """Why a recording has no tokens; "" if it can be read now."""
        return self.dataset.fault(index)

    def readable(self, indices):
        """Those of `indices` whose recordings have tokens."""
        return [index for index in indices.tolist() if len(self.frames_of[index])]

    def crop(self, index, offset=0.0):
        """(tokens of each stream, int64 (T, Q), and whether the recording ends there).

        offset: within [0, 1), from the first to the last possible crop.
        """
        frames = len(self.frames_of[index])
        # Every frame at which a whole crop fits is equally probable.
        start = int(offset * (max(0, frames - self.crop_frames) + 1))
        stop = min(frames, start + self.crop_frames)
        return self.window(index, start, stop), stop == frames

    def window(self, index, start, stop):
        """The tokens of each stream, int64 (T, Q), of the frames `start` to `stop`."""
        found = []
        first = 0  # quantizer of the codes that come next
        for stream in self.streams:
            if stream.name == "semantic":
                # The same time, at another frame rate: what sounds in it, and one token at least.
                heard = self.semantic_tokens[index]  # (T,)
                ratio = semantic.FRAME_RATE / self.frame_rate
                start_heard = min(round(start * ratio), len(heard) - 1)
                stop_heard = max(round(stop * ratio), start_heard + 1)
                if stop == len(self.frames_of[index]):  # rounding must not lose the last token
                    stop_heard = len(heard)
                heard = torch.from_numpy(heard[start_heard:stop_heard].astype(np.int64))
                # Without repetitions, so coarse must model durations (AudioLM §III-C).
                codes = heard.unique_consecutive()[:, None]  # (N, 1)
            else:
                first_of_next = first + stream.num_quantizers
                codes = self.codes[index][start:stop, first:first_of_next]  # (T, n)
                codes = torch.from_numpy(codes.astype(np.int64))
                first = first_of_next
            found.append(codes)  # caches hold 16 bits, embeddings take 64
        return found

    def join_within(self, indices, probability):
        """In training, let a whole recording be followed by another one of its speaker.

        So few short recordings teach what comes after a word. The others are those of `indices`.
        A recording whose speaker is not known is followed by itself.
        """
        self.join = probability
        for index in self.readable(indices):
            if self.is_whole(index):
                self.others[self.voice_of(index)].append(index)

    def voice_of(self, index):
        """A speaker, or a recording whose speaker is not known; its `shifts` have one name."""
        return self.dataset.speaker_of[index] or self.dataset.names[index]

    def sample(self, index, offset=0.0, draw=1.0, which=0.0):
        """(tokens of each stream, whether the recording ends there, its text).

        A text says all of a recording, so a crop that is a part of one has none: "".
        offset: of `crop`. Below `join`, `draw` in [0, 1) lets another recording follow: that which
        `which` in [0, 1) chooses, if both fit a crop.
        """
        streams, ended = self.crop(index, offset)
        if not self.is_whole(index):
            return streams, ended, ""
        text = self.dataset.texts[index]
        if draw < self.join:
            others = self.others[self.voice_of(index)]
            other = others[int(which * len(others))]
            if len(self.frames_of[index]) + len(self.frames_of[other]) <= self.crop_frames:
                following, ended = self.crop(other)
                streams = [torch.cat(pair) for pair in zip(streams, following)]
                if self.streams[0].name == "semantic":  # without repetitions, here too
                    streams[0] = streams[0].unique_consecutive(dim=0)
                texts = [text, self.dataset.texts[other]]
                text = " ".join(texts) if all(texts) else ""
        return streams, ended, text

    def is_whole(self, index):
        """Whether every crop of a recording is all of it."""
        return len(self.frames_of[index]) <= self.crop_frames

    def fetch(self, indices, random_bits=None):
        """(the batch of `lay_out` with "text": [B], or {} unless all are usable; usable (B,))."""
        # Recordings that could not be read have no tokens.
        usable = np.isin(indices, self.readable(indices))
        if not usable.all():
            return {}, usable
        # In evaluation every crop is the beginning of its recording, and none follows it.
        draws = order.uniform(random_bits, len(indices), [0.0, 1.0, 0.0])
        samples = list(map(self.sample, indices.tolist(), *draws.T))
        batch = self.lay_out(self.streams, [(streams, ended) for streams, ended, _ in samples])
        batch["text"] = [text for _, _, text in samples]
        return batch, usable

    def lengths(self, indices):
        """{"max_frames": of the last stream, "max_context": of the one before it, "frame_rate"}.

        frame_rate is of the last one. They are of many crops, at places as in training: the
        longest. Semantic tokens alone have no fixed rate, so theirs is the 95th percentile, and so
        is their length without texts. With texts it is the longest: a window that does not begin
        with its recording has none.
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
        frames = [len(self.frames_of[index]) for index in indices]
        seconds = np.minimum(frames, self.crop_frames) / self.frame_rate
        frame_rate = float(np.quantile(np.array(alone) / seconds, 0.95))
        has_texts = any(self.dataset.texts[index] for index in indices)
        frames = int(np.quantile(lengths, 1.0 if has_texts else 0.95))
        return {"max_frames": frames, "max_context": 0, "frame_rate": frame_rate}


def tokenize_splits(cfg, splits, streams, lay_out, kmeans, codec):
    """`splits` of recordings as splits of their TokenCrops, which say what the others are.

    All recordings are made tokens once, in files below RUN/tokens. kmeans, codec: None if the crops
    have none of their tokens. Collective.
    """
    folder = Path(cfg.run_dir, "tokens")
    frame_rate = codec.frame_rate if codec else semantic.FRAME_RATE

    @functools.cache  # for --data and, if given, for --val_data
    def crops_of(dataset):
        semantic_tokens = token_cache(folder, dataset, kmeans) if kmeans else None
        codes = token_cache(folder, dataset, codec) if codec else None
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
    """(the `size` most frequent words of training transcripts, tokens of the longest, at most).

    ([], 0) if there are no transcripts.
    crops: TokenCrops. A note says how many texts are empty, or longer than `max_tokens`, and how
    many recordings are longer than a crop: these are trained on without text. UserError if all are.
    """
    dataset = crops.dataset
    texts = [dataset.texts[index] for index in order.some_of(indices, LENGTHS_OF)]
    if not any(texts):
        return [], 0
    readable = crops.readable(indices)
    longer = [index for index in readable if not crops.is_whole(index)]
    if longer:
        longest = max(longer, key=lambda index: len(crops.frames_of[index]))
        seconds = len(crops.frames_of[longest]) / crops.frame_rate
        about = f"longer than a crop, up to {seconds:.2f} s ({dataset.names[longest]})"
        if len(longer) == len(readable):
            dist.fail(
                f"--seconds: all recordings are {about}; no crop is what a text says: give "
                f"--seconds {seconds:.2f}, or --max_text_len 0"
            )
        config.note(
            f"--seconds: {len(longer)} of {len(readable)} recordings are {about}, and have no text"
        )
    tokenizer = clip.Tokenizer.learn(texts, size)
    clip.note_texts(texts, tokenizer.encode, max_tokens)
    # As in training: of whole recordings, maybe of two that are joined.
    some = crops.readable(order.some_of(indices, LENGTHS_OF))
    draws = np.random.default_rng(0).random((3, len(some)))
    trained_on = {text for _, _, text in map(crops.sample, some, *draws)}
    longest = max(len(tokenizer.encode(text)) for text in trained_on)
    return tokenizer.vocabulary, min(longest, max_tokens)
