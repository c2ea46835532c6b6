"""Helpers of the training scripts. What each file owns:

    accumulate    the plan that cuts a batch into chunks, gives them to ranks, and seeds them
    amp           autocast, gradient scaler; unscale, clip, step, update
    checkpoint    atomic files, the state of a run, the run folder, loading a model for use
    clip          the small CLIP, and the adapter of open_clip
    config        settings: dataclass <-> command line <-> JSON
    data          datasets of embeddings, splits, chunks for training and evaluation
    diffusion     noise schedules, prediction targets, loss weights, samplers, RePaint
    dist          process group, sums over ranks, stop signals
    ema           averaged weights
    images        datasets of captioned images: tars, folders, built-in shapes
    loop          start of a run, log lines, what is due when, what is not finite, the end
    lora          low-rank adapters of any module with attention
    media         pixels, resizing, blur, PNG, grids
    nn            attention, transformer, KV cache, timestep embedding
    optim         AdamW and Muon, and which parameters get weight decay
    order         order of samples, and splits, as functions of seed and index
    pretrained    published weights, both ways
    quantize      residual vector quantizer: k-means start, averages, dead codes
    recordings    datasets of recordings, WAV, spectra, caches of tokens
    report        report.html
    schedule      learning rate
    semantic      semantic tokens: k-means of MFCC or of a published model
    store         downloads, uploaded copies
    synthetic     built-in images and sounds, and how samples of them are scored
    tracker       metrics.jsonl, loggers, progress bar
"""
