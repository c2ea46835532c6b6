"""Which samples come when: splits, the order of an epoch, chunks, batches.

Orders and splits are pure functions of numbers and a seed. For training, a dataset has these
methods:
    len(dataset)
    fetch(indices, random_words=None) -> (batch, usable)    dict of tensors and lists, bool (n,)
    split(name, validation, test, seed=0) -> indices        name: "train", "validation" or "test"
    fault(index) -> text                                    name of an unusable sample, and why
    check() -> (unusable, checked, faults)                  before training
    fingerprint() -> dict                                   changes when the data does

To open and evaluate it, train_prior.py also takes folder, width, encoding_width, captions, texts
and text_embeds.usual_length; train_decoder.py width, captions and texts; train_audio.py names,
texts, rate, wave and load_usable.

A script reads the training split without end by `loader(ChunkDataset(…), training_spans(…))`,
and the others by `batches`.
"""

import atexit
import collections
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import math
import multiprocessing
import signal

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from common import accumulate, amp, config, dist
from common.config import UserError
from common.data import files

MAX_UNUSABLE = 0.01  # a larger fraction of unusable rows is refused
UNIT = 10**9  # fractions are rounded to billionths, so that all sums are exact in 64-bit integers


def hash_of(content):
    """An integer below 2^64, a hash of `content` (bytes)."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_words(numbers, *key):
    """A hash (uint64) of each of the integers `numbers` (n,) and the key.

    The hash is splitmix64 (Steele, Lea & Flood 2014, Figure 16), started at a hash of the key.
    """
    start = np.full(1, hash_of(repr(key).encode()), np.uint64)
    return splitmix64(start, np.asarray(numbers, np.uint64))


def splitmix64(start, numbers):
    """Words (uint64) of splitmix64, in `numbers` steps (uint64 or 1) from `start` (uint64)."""
    x = start + numbers * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def uniform(words, count, otherwise):
    """Random numbers in [0, 1), (count, n), from the random words (count,) of samples.

    Without words each row is the n numbers `otherwise`.
    """
    if words is None:
        return np.tile(otherwise, (count, 1))
    columns = [random_words(words, i) >> 11 for i in range(len(otherwise))]
    return np.stack(columns, axis=1) * 2.0**-53  # a double holds 53 bits


def permute(index, n, *key):
    """Entries at `index` (int array) of a pseudo-random permutation of range(n) -> int64 array.

    A number is a pair (left, right) of range(a) × range(b) with a·b >= n. Three Feistel rounds
    permute the pairs, with modular addition instead of exclusive-or (Black & Rogaway 2002, §5).
    A result that is not below n is permuted again ("cycle walking", §4). Needs O(1) memory.
    """
    a = math.isqrt(n - 1) + 1
    b = math.ceil(n / a)
    x = np.array(index, np.uint64)
    walking = np.arange(len(x))  # places in x of what is not a result yet
    while len(walking):
        left = x[walking] % a
        right = x[walking] // a
        for i in range(3):
            left = (left + random_words(right, i, *key) % a) % a
            right = (right + random_words(left, i, *key) % b) % b
        x[walking] = left + a * right
        walking = walking[x[walking] >= n]
    return x.astype(np.int64)


def shuffle(positions, n, seed):
    """Indices below n at `positions` (int array) of training without end.

    Every n positions are an epoch, in an order of its own.
    """
    epochs = positions // n
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = permute(positions[inside] % n, n, seed, int(epoch))
    return indices


def stratified(n, count, total, *key):
    """Random numbers below n, ascending: one in each interval of total / count numbers.

    With n = 10 and 1 of 5: one of 0 to 4, and one of 5 to 9. A larger n only appends more of them.
    """
    if not count:
        return np.zeros(0, np.int64)
    interval = np.arange(-(-n * count // total))
    start = interval * total // count
    size = (interval + 1) * total // count - start
    offset = random_words(interval, *key) % size.astype(np.uint64)
    picks = start + offset.astype(np.int64)
    return picks[: np.searchsorted(picks, n)]


class Complement:
    """The numbers below n without `excluded` (ascending): item (int array) -> int64 array.

    It holds only the excluded numbers, so that billions of training rows take no memory.
    """

    def __init__(self, n, excluded):
        self.size = n - len(excluded)
        self.kept_before = excluded - np.arange(len(excluded))  # kept numbers before each excluded

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index + np.searchsorted(self.kept_before, index, side="right")


def split_indices(
    n,
    split,
    validation,
    test,
    seed=0,
):
    """The rows of a split ("train", "validation" or "test") of n numbered rows.

    validation, test: fractions. They are exact to two rows. A row keeps its split when rows are
    appended. The training split is a Complement, the others are int64 arrays.
    """
    validation = round(validation * UNIT)
    both = validation + round(test * UNIT)
    held_out = stratified(n, both, UNIT, "held out", seed)
    if split == "train":
        return Complement(n, held_out)
    chosen = stratified(len(held_out), validation, both, "validation", seed)
    if split == "validation":
        return held_out[chosen]
    return np.delete(held_out, chosen)


SPLITS = ("validation", "test", "train")  # in the order of the fractions of hashes


def split_keys(
    keys,
    split,
    validation,
    test,
    seed=0,
):
    """The samples (int64, ascending) of a split ("train", "validation" or "test").

    A hash of a sample's text key, a file name or a speaker, decides. validation, test: fractions,
    about. If no key would be held out, the one of the smallest hash is.
    """
    hashes = []
    for key in keys:
        text = f"{seed} {key}".encode(errors="surrogateescape")  # a file name may be no UTF-8
        hashes.append(hash_of(text) / 2**64)
    hashes = np.array(hashes)
    splits = np.searchsorted([validation, validation + test], hashes, side="right")
    for number, share in enumerate((validation, test)):
        training = hashes[splits == 2]
        if share and number not in splits and len(set(training)) > 1:
            splits[hashes == training.min()] = number
    return np.flatnonzero(splits == SPLITS.index(split))


# Splits of a dataset


def splits(dataset, cfg, val_dataset=None):
    """{"train", "validation", "test": (dataset, indices)}.

    With a `val_dataset`, validation is all of that.
    """
    validation = 0.0 if val_dataset else cfg.validation
    found = {}
    for name in SPLITS:
        found[name] = dataset, dataset.split(name, validation, cfg.test, cfg.split_seed)
    if val_dataset:
        found["validation"] = val_dataset, val_dataset.split("train", 0.0, 0.0)

    for name, (_, indices) in found.items():
        least = cfg.batch_size if name == "train" else 1
        if len(indices) < least:
            raise UserError(
                f"{cfg.data}: {len(indices)} samples for {name}, expected at least {least}; "
                "change --batch_size, --validation or --test"
            )
    return found


def evaluation_settings(cfg, args, max_chunk):
    """The settings `cfg` of a training, but for what the command `args` of an evaluation says.

    max_chunk: samples in one forward pass, if the training has not chosen that yet.
    """
    if not args.data and cfg.data == "shapes":  # an imported model: training replaces it by a path
        raise UserError(
            f"{config.as_word(args.run_dir)}: its data are not known; name some with --data"
        )
    return dataclasses.replace(
        cfg,
        data=args.data or cfg.data,
        val_data="" if args.data else cfg.val_data,
        eval_samples=args.eval_samples,
        seed=args.seed,
        batch_size=1,  # nothing is trained: the training split may be small
        chunk_size=cfg.chunk_size or max_chunk,
    )


# Chunks and batches


@dataclasses.dataclass(eq=False)
class ChunkDataset(torch.utils.data.Dataset):
    """The chunks of a run's batches: item (first position, one past the last) -> batch.

    With a seed, `indices` are shuffled anew each epoch, and `fetch` gets random words of seed and
    position for what is random in a sample. Without (evaluation), samples come in order and nothing
    is random. An unusable sample is replaced by the next of `indices`, on any rank alike, and
    batch["unusable"] names it.
    """

    dataset: object
    indices: object  # int array, or Complement
    seed: int | None = None

    def __getitem__(self, span):
        positions = np.arange(*span)  # of the run
        words = None
        places = positions  # in `indices`
        if self.seed is not None:
            words = random_words(positions, self.seed)
            places = shuffle(positions, len(self.indices), self.seed)

        unusable = []
        while True:
            indices = self.indices[places]
            batch, usable = self.dataset.fetch(indices, words)
            if usable.all():
                return {**batch, "index": torch.from_numpy(indices), "unusable": unusable}
            for index in indices[~usable]:
                # A second reading may succeed, as over a network.
                unusable.append(self.dataset.fault(index) or f"sample {index}")
            if len(unusable) > 100 + MAX_UNUSABLE * len(self.indices):
                raise UserError(
                    f"{len(unusable)} unusable rows (not finite, all zero or "
                    f"unreadable): {unusable[0]}, …; mend or remove them"
                )
            places[~usable] = (places[~usable] + 1) % len(self.indices)


def loader(chunks, spans, workers=0, pin_memory=False, timeout=0):
    """Items of a ChunkDataset at `spans`, an iterable, in order, read ahead by `workers`.

    timeout: seconds after which a worker that does not answer is an error, 0: none.
    """
    try:
        if workers:
            atexit.register(kill_workers)
            multiprocessing.Lock()  # without /dev/shm an error, to which torch adds a traceback
        loading = torch.utils.data.DataLoader(
            chunks,
            batch_size=None,
            sampler=spans,
            num_workers=workers,
            pin_memory=pin_memory,
            timeout=timeout if workers else 0,
            collate_fn=share if workers else None,
        )
        with signals_blocked():
            batches = iter(loading)  # which starts the workers
        yield from batches
    except (UserError, OSError, EOFError) as error:
        kill_workers()  # their ends are no further errors
        # A worker puts its traceback before the message.
        message = str(error).strip().rpartition("\n")[2].rpartition("UserError: ")[2]
        if isinstance(error, (ConnectionError, EOFError)):  # it ended while it was sending
            message = config.KILLED
        elif workers and getattr(error, "errno", None):  # of this process
            message = f"--workers {workers}: {message}"
            if error.errno in (errno.ENOENT, errno.ENOSPC, errno.ENOSYS):
                message += f"; {config.SHM}"
        raise UserError(message) from None


def share(batch):
    """`batch` as tensors in shared memory.

    A worker does it itself: torch would do it in a thread, of which a rank hears no error.
    """
    batch = torch.utils.data.default_convert(batch)
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, batch)


@contextlib.contextmanager
def signals_blocked():
    """Context in which workers are started: they leave SIGTERM and Ctrl-C to their rank.

    They inherit the mask and keep it. A handler that they set would come too late for some signals.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, dist.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_workers():
    """End the workers of a rank that ends by an error.

    Python would send them SIGTERM, which is blocked there, and wait for them without end.
    """
    if hasattr(signal, "SIGCHLD"):  # which torch handles, and would report a killed worker by
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def training_spans(plan, batch_size, step):
    """The spans (first position, one past the last) of a rank's chunks from `step` on, endless."""
    for start in itertools.count(step * batch_size, batch_size):
        for chunk in plan:
            first = start + chunk.start
            yield first, first + chunk.size


def some_of(indices, limit):
    """At most `limit` (0: all) of the indices of a split, evenly spaced: all sources have some."""
    return indices[files.evenly_spaced(len(indices), limit or len(indices))]


def batches(dataset, indices, limit, chunk_size):
    """This rank's (number, batch) of `some_of` the samples; ranks take turns.

    Collective: all ranks read to the end, and meet before every batch to see whether to stop.
    """
    chunks = ChunkDataset(dataset, some_of(indices, limit))
    count = len(chunks.indices)
    for number in dist.deal(math.ceil(count / chunk_size)):
        start = number * chunk_size
        yield number, chunks[start, min(count, start + chunk_size)]


def to_device(batch, device):
    """`batch` with tensors and numpy arrays moved to `device`, other values unchanged."""
    kinds = (np.ndarray, torch.Tensor)
    return tree_map_only(kinds, lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)


@torch.no_grad()
def mean_loss(model, loss_of, dataset, indices):
    """Mean of `loss_of(batch)` over eval_samples of `indices`, on all ranks.

    The settings are model.cfg. The noise is the same every time. `model` is in eval mode meanwhile,
    and afterwards in the mode that it was in. Collective.
    """
    cfg = model.cfg
    device = next(model.parameters()).device
    mode = model.training
    model.eval()
    loss_sum = 0.0
    count = 0
    for number, batch in batches(dataset, indices, cfg.eval_samples, cfg.chunk_size):
        accumulate.seed_all(cfg.seed, "loss", number)
        size = len(batch["index"])
        with amp.autocast(device, cfg.precision):
            loss_sum += loss_of(to_device(batch, device)).item() * size
        count += size
    model.train(mode)
    loss_sum, count = dist.total([loss_sum, count])
    return loss_sum / count


def means(found):
    """{metric: mean over all ranks} of {metric: values on this rank}. Collective."""
    sums = collections.defaultdict(float)
    counts = collections.defaultdict(int)
    for values_of_rank in dist.gather(found):  # which may lack some metrics
        for name, values in values_of_rank.items():
            sums[name] += sum(values)
            counts[name] += len(values)
    return {name: sums[name] / counts[name] for name in sums}
