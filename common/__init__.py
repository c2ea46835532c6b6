"""Helpers of the training scripts, one responsibility per file:

    config        settings: a flat frozen dataclass <-> command line <-> JSON
    dist          process group, sums and broadcasts, gradients over ranks, stop signals
    accumulate    splits a batch into chunks, assigns them to ranks, and seeds them
    amp           mixed precision: autocast, gradient scaler; unscale, clip, step
    schedule      the learning rate as a function of the step
    optim         parameter groups, choice of optimizer, optimizer state
    muon          the Muon optimizer
    ema           exponential moving average of the weights
    order         the order of samples: splits and the permutation of an epoch
    loader        chunks of samples, prefetched by workers
    checkpoint    atomic writing, safe loading, models for inference
    resume        the run folder, and the checkpoint that a run resumes from
    adapters      training LoRA adapters, and merging them into their base
    loop          around the training loop: when to evaluate, log lines, checks for NaN
    tracker       metrics.jsonl, console, the logger

    models/       tensors in, tensors out: layers, diffusion, tokenizers, codec, small CLIP
    data/         datasets
    interop/      third-party formats and services: published weights, loggers, uploads; a fork may
                  delete it
"""
