"""Helpers of the training scripts. What each file owns:

    config        settings: a flat frozen dataclass <-> command line <-> JSON
    dist          process group, sums and broadcasts, gradients over ranks, stop signals
    accumulate    the plan that cuts a batch into chunks, gives them to ranks, and seeds them
    amp           autocast, gradient scaler; unscale, clip, step
    schedule      the learning rate as a function of the step
    optim         parameter groups, the choice of optimizer, its state
    ema           the average of the weights
    checkpoint    atomic files, what a checkpoint holds, the run folder
    loop          start and end of a run, log lines, what is not finite
    tracker       metrics.jsonl, console, the logger

    models/       layers, mathematics, tokenizers, and the small CLIP
    data/         sources of samples, and their order
    interop/      what is other people's: published weights, loggers, copies; a fork may delete it
"""
