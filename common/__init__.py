"""Helpers for the training scripts, one responsibility per file:

    config        settings: a flat frozen dataclass <-> command line <-> JSON
    dist          process group, sums and broadcasts, gradient all-reduce, stop signals
    accumulate    splits a batch into chunks, assigns them to ranks, and seeds them
    amp           mixed precision: autocast, gradient scaler; unscale, clip, step
    schedule      the learning rate as a function of the step
    optim         parameter groups, choice of optimizer, optimizer state
    muon          the Muon optimizer
    ema           exponential moving average of the weights
    order         the order of samples: splits, and a permutation for each epoch
    loader        chunks of samples, prefetched by workers
    checkpoint    atomic writing, safe loading, models for inference
    resume        the run folder, and the checkpoint that a run resumes from
    adapters      trains LoRA adapters, and merges them into their base model
    loop          parts of the training loops: when to evaluate, log lines, checks for NaN
    tracker       writes metrics to metrics.jsonl, the console and a logger

    models/       tensors in, tensors out: layers, diffusion, tokenizers, codec, small CLIP
    data/         datasets
    interop/      third-party formats and services: published weights, loggers, uploads; a fork may
                  delete it
"""
