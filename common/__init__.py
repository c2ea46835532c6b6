"""Helpers of the training scripts. What each file owns:

    config        settings: a flat frozen dataclass <-> command line <-> JSON
    dist          process group, sums and broadcasts, gradients over ranks, stop signals
    accumulate    the plan that cuts a batch into chunks, gives them to ranks, and seeds them
    amp           autocast, gradient scaler; unscale, clip, step
    schedule      the learning rate as a function of the step
    optim         parameter groups, the choice of optimizer, its state
    muon          the optimizer Muon
    ema           the average of the weights
    order         which samples come when: splits and the order of an epoch
    loader        chunks of samples, read ahead by workers
    checkpoint    atomic files; a model for use
    resume        the run folder, and what a run resumes from
    adapters      runs of LoRA adapters, and their files merged for use
    loop          what stands in or around the loop: when to evaluate, log lines, what is not finite
    tracker       metrics.jsonl, console, the logger

    models/       tensors in, tensors out: layers, mathematics, tokenizers, codec, small CLIP
    data/         sources of samples
    interop/      third-party formats and services: published weights, loggers, copies; a fork may
                  delete it
"""
