"""Chunks of samples: read them, replace unusable samples, move batches to the device.

A dataset needs these methods for training:
    len(dataset)
    fetch(indices, random_bits=None) -> (batch, usable)     dict of tensors and lists, bool (n,)
    split(name, validation, test, seed=0) -> indices        name: "train", "validation" or "test"
    fault(index) -> text                                    why a sample is unusable, with its name
    check() -> (unusable, checked, faults)                  called before training
    fingerprint() -> dict                                   changes when the data change

To open and evaluate a dataset, the scripts also use these members:
    train_prior.py      folder, width, encoding_width, captions, texts, text_embeds.median_norm
    train_decoder.py    width, captions, texts
    train_audio.py      names, texts, rate, wave, load_usable
"""

import atexit
import dataclasses
import math
import multiprocessing
import signal

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from common import accumulate, dist, order
from common.config import UserError

MAX_UNUSABLE = 0.01  # a run ends if a larger fraction of the samples is unusable


@dataclasses.dataclass(eq=False)
class ChunkDataset(torch.utils.data.Dataset):
    """Maps a span of positions (first, one past the last) to a batch of samples.

    Positions count samples across epochs. With a seed, `indices` are shuffled anew in each epoch,
    and `fetch` gets random bits for augmentation, which depend on the seed and the position.
    Without a seed, for evaluation, samples are in order and nothing is random. An unusable sample
    is listed in batch["unusable"] and replaced by the next usable one in `indices`, which does not
    depend on the number of ranks.

    Workers also run `tokenizer`, which makes batch["tokens"] from batch["caption"], and then
    `transform(batch, random_bits)`, which returns the final batch.
    """

    dataset: object
    indices: object  # int array, or Complement
    seed: int | None = None
    tokenizer: object = None
    transform: object = None

    def __getitem__(self, span):
        positions = np.arange(*span)  # counted across epochs
        bits = None
        places = positions  # indexes into `indices`
        if self.seed is not None:
            bits = order.random_bits(positions, self.seed)
            places = order.shuffle(positions, len(self.indices), self.seed)

        unusable = []
        while True:
            indices = self.indices[places]
            batch, usable = self.dataset.fetch(indices, bits)
            if usable.all():
                break
            for index in indices[~usable]:
                # `fault` is "" if a second read succeeds, for example on a network disk.
                unusable.append(self.dataset.fault(index) or f"sample {index}")
            if len(unusable) > 100 + MAX_UNUSABLE * len(self.indices):
                raise UserError(
                    f"{len(unusable)} unusable samples: {unusable[0]}, …; fix or remove them"
                )
            places[~usable] = (places[~usable] + 1) % len(self.indices)

        batch = {**batch, "index": torch.from_numpy(indices), "unusable": unusable}
        if self.tokenizer:
            batch["tokens"] = self.tokenizer(batch["caption"])
        if self.transform:
            batch = self.transform(batch, bits)
        return batch


class ErrorsAsItems(torch.utils.data.Dataset):
    """Returns the errors of a ChunkDataset: torch would add a traceback if a worker raised them."""

    def __init__(self, chunks):
        self.chunks = chunks

    def __getitem__(self, span):
        try:
            return self.chunks[span]
        except (UserError, OSError) as error:
            return error


def read_ahead(chunks, spans, workers=0, pin_memory=False, timeout=0):
    """Yield the items of a ChunkDataset at `spans` in order, prefetched by `workers`.

    timeout: seconds to wait for a worker before an error is raised; 0: no limit.
    """
    if workers:
        atexit.register(kill_workers)
    loading = torch.utils.data.DataLoader(
        ErrorsAsItems(chunks),
        batch_size=None,
        sampler=spans,
        num_workers=workers,
        pin_memory=pin_memory,
        timeout=timeout if workers else 0,
        worker_init_fn=ignore_signals,
    )
    for batch in loading:
        if isinstance(batch, (UserError, OSError)):
            raise batch
        yield batch


def ignore_signals(worker):
    """Ignore stop signals in a worker: the rank handles them, and still needs its workers."""
    for number in dist.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers():
    """Kill the workers at exit. Python would send SIGTERM, which they ignore, and wait forever."""
    for process in multiprocessing.active_children():
        process.kill()


def train_batches(cfg, dataset, indices, step, device, tokenizer=None, transform=None):
    """Returns (this rank's chunks of a step, endless iterator over their batches from `step` on).

    tokenizer, transform: see ChunkDataset.
    """
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = order.training_spans(plan, cfg.batch_size, step)
    chunks = ChunkDataset(dataset, indices, cfg.seed, tokenizer, transform)
    pin_memory = device.type == "cuda"
    timeout = 60 * cfg.timeout_minutes  # as long as other ranks wait for this one
    return plan, read_ahead(chunks, spans, cfg.workers, pin_memory, timeout)


def eval_batches(dataset, indices, limit, chunk_size):
    """Yield (chunk number, batch) for this rank's share of at most `limit` (0: all) samples.

    Collective: all ranks check for signals before every batch.
    """
    chunks = ChunkDataset(dataset, order.some_of(indices, limit))
    count = len(chunks.indices)
    for number in dist.my_share(math.ceil(count / chunk_size)):
        start = number * chunk_size
        yield number, chunks[start, min(count, start + chunk_size)]


def to_device(batch, device):
    """Move the tensors and numpy arrays in `batch` to `device`; other values stay unchanged."""
    kinds = (np.ndarray, torch.Tensor)
    return tree_map_only(kinds, lambda x: torch.as_tensor(x).to(device, non_blocking=True), batch)
