"""Time the prior's parts, and print one JSON line per case.

    python tests/benchmarks/bench_prior.py [--device cuda] [CASE ...]

Cases: train, sample (with text encodings), train_embedding, sample_embedding (text embedding only),
ema, checkpoint, order; all by default. Model sizes are those of public priors over CLIP embeddings.
Peak memory is that of the whole process: to compare it, run one case at a time.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before importing torch; idle threads yield soon

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))
import train_prior
from common import amp, checkpoint, ema, loader, optim, order

SIDE = 2048  # size of the matrices multiplied to measure peak FLOP/s
STEPS = 64  # sampling steps
SIZES = dict(width=512, depth=6, heads=8)
CASES = ("train", "sample", "train_embedding", "sample_embedding", "ema", "checkpoint", "order")


def timed(function, device, repeats, warmup=2):
    """Milliseconds of each of `repeats` calls, after `warmup` calls."""

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(warmup):
        function()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def flops_of(function):
    """Floating-point operations of the matrix products and convolutions of one call."""
    # The counter needs uncompiled code, and attention computed as plain matrix products.
    counter = FlopCounterMode(display=False)
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        function()
    return counter.get_total_flops()


def peak_flops(args):
    """FLOP per second of a square matrix product in the benchmark's precision, the best of ten."""
    left, right = torch.randn(2, SIDE, SIDE, device=args.device, dtype=amp.DTYPES[args.precision])
    times = timed(lambda: left @ right, args.device, 10)
    return 2 * SIDE**3 / min(times) * 1e3


def peak_memory(args):
    """Peak memory in MB of the process or, on a GPU, of its tensors."""
    if args.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case, args, function, repeats, warmup=2, **facts):
    """Time `function`, and print its line.

    facts: numbers, or functions of the median seconds per call.
    """
    before = peak_flops(args)
    start = time.perf_counter()
    function()
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start  # with --compile this includes compiling
    times = timed(function, args.device, repeats, warmup)
    memory = peak_memory(args)  # before counting FLOPs, which takes more memory
    peak = (before + peak_flops(args)) / 2  # a machine's speed drifts
    flops = flops_of(function)
    seconds = statistics.median(times) / 1e3
    rates = dict(facts)
    for name, fact in facts.items():
        if callable(fact):
            rates[name] = fact(seconds)
    rates |= dict(
        first_call_s=first,
        gflop=flops / 1e9,
        gflop_per_s=flops / seconds / 1e9,
        peak_gflop_per_s=peak / 1e9,
        share_of_peak=flops / seconds / peak,
    )
    for name, rate in rates.items():
        if isinstance(rate, float):
            rates[name] = float(f"{rate:.4g}")
    emit(case, args, times, memory, **rates)


def emit(case, args, times, memory=0.0, **facts):
    """Print a JSON line: median and minimum milliseconds, peak memory, and `facts`."""
    line = dict(
        case=case,
        device=args.device.type,
        threads=torch.get_num_threads(),
        cpu=torch.backends.cpu.get_cpu_capability(),
        precision=args.precision,
        compile=args.compile,
        ms=round(statistics.median(times), 3),
        ms_min=round(min(times), 3),
        peak_mb=round(memory or peak_memory(args), 1),
    )
    print(json.dumps(line | facts), flush=True)


def flags(usage, cases, presets, batch, repeats):
    """A parser for the flags that all benchmarks share."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="one of " + " ".join(cases))
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--precision", default="fp32", choices=amp.DTYPES)
    parser.add_argument("--preset", default="", choices=["", *presets], help="size of the model")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--compile", action="store_true")
    return parser


def make(args, encodings):
    """(config, prior, optimizers, average, batch), with the benchmark's sizes or a preset's."""
    preset = train_prior.PRESETS[args.preset] if args.preset else SIZES
    sizes = {name: preset[name] for name in (*SIZES, "max_text_len") if name in preset}
    cfg = train_prior.Config(
        **sizes,
        noise_draws=args.draws,
        text_encodings=encodings,
        precision=args.precision,
        lr=3e-4,
        checkpointing=args.checkpointing,
    )
    torch.manual_seed(0)
    width = args.embed
    prior = train_prior.Prior(cfg, width, width if encodings else 0).to(args.device)
    if args.compile:
        train_prior.compile_blocks(prior.transformer.blocks)
    optimizers = optim.make(prior, "adamw", cfg.lr, cfg.weight_decay)
    batch = {}
    batch["text_embed"] = torch.randn(args.batch, width)
    batch["image_embed"] = torch.randn(args.batch, width)
    if encodings:
        batch["text_enc"] = torch.randn(args.batch, cfg.max_text_len, width)
    batch = loader.to_device(batch, args.device)
    return cfg, prior, optimizers, ema.EMA(prior, decay=0.9999), batch


def bench_train(args, encodings):
    """Time a complete training step: forward, backward, gradient clipping, AdamW, EMA."""
    cfg, prior, optimizers, average, batch = make(args, encodings)
    scaler = amp.scaler(args.device, args.precision)
    count = 0

    def step():
        nonlocal count
        with amp.autocast(args.device, args.precision):
            condition = train_prior.conditioning(batch, cfg, None)
            loss = train_prior.diffusion_loss(prior, batch, condition)
        scaler.scale(loss).backward()
        amp.step(scaler, optimizers, 0.5)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        count += 1
        average.update(count)

    name = "train" if encodings else "train_embedding"
    measure(
        name,
        args,
        step,
        args.repeats,
        batch=args.batch,
        draws=cfg.noise_draws,
        parameters=sum(p.numel() for p in prior.parameters()),
        samples_per_s=lambda seconds: args.batch / seconds,
    )


def bench_sample(args, encodings):
    """Time STEPS steps of ancestral sampling without guidance."""
    cfg, prior, _, _, batch = make(args, encodings)
    prior.eval()

    def draw():
        with torch.no_grad(), amp.autocast(args.device, args.precision):
            condition = train_prior.conditioning(batch, cfg, None)
            train_prior.sample_embeddings(prior, condition, STEPS)

    name = "sample" if encodings else "sample_embedding"
    measure(
        name,
        args,
        draw,
        max(3, args.repeats // 4),
        1,
        batch=args.batch,
        steps=STEPS,
        samples_per_s=lambda seconds: args.batch / seconds,
    )


def bench_ema(args):
    """Time an EMA update of 29M parameters in 300 tensors, and compare it with _foreach_lerp_."""
    layers = []
    for _ in range(75):
        layers += [torch.nn.Linear(312, 624), torch.nn.Linear(624, 312)]
    model = torch.nn.Sequential(*layers).to(args.device)
    average = ema.EMA(model, decay=0.9999)
    with torch.no_grad():
        source = [p.detach() for p in model.parameters()]
        shadow = [p.clone() for p in source]
    ratios = []
    times = []
    for _ in range(5):  # alternating, because a machine's speed drifts
        bare = timed(lambda: torch._foreach_lerp_(shadow, source, 1e-4), args.device, args.repeats)
        ours = timed(lambda: average.update(1000), args.device, args.repeats)
        ratios.append(statistics.median(ours) / statistics.median(bare))
        times += ours
    emit(
        "ema",
        args,
        times,
        tensors=len(source),
        parameters=sum(p.numel() for p in source),
        times_bare_lerp=round(statistics.median(ratios), 3),
    )


def bench_checkpoint(args):
    """Time saving a checkpoint (checksum, fsync, rename) and loading it."""
    _, prior, optimizers, average, _ = make(args, True)
    for p in prior.parameters():
        p.grad = torch.zeros_like(p)
    optimizers[0].step()
    state = {
        "model": prior.state_dict(),
        "ema": average.state_dict(),
        "optimizers": [optimizers[0].state_dict()],
    }
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        path = os.path.join(folder, "x.pt")
        times = timed(lambda: checkpoint.save(state, path), args.device, 5, 1)
        size = round(os.path.getsize(path) / 1e6, 1)
        emit("checkpoint_save", args, times, mb=size)
        times = timed(lambda: checkpoint.load(path), args.device, 5, 1)
        emit("checkpoint_load", args, times, mb=size)


def bench_order(args):
    """Time looking up rows of a shuffled two-billion-row dataset, 4096 and 1 at a time."""
    split = order.split_indices(2 * 10**9, "train", 0.01, 0.01)
    for size in (4096, 1):
        positions = np.arange(10**9, 10**9 + size)
        times = timed(
            lambda p=positions: split[order.shuffle(p, len(split), 0)], args.device, args.repeats
        )
        per_row = statistics.median(times) / size * 1e3
        emit("order", args, times, rows=2 * 10**9, batch=size, us_per_row=round(per_row, 3))


def main():
    parser = flags(__doc__, CASES, train_prior.PRESETS, batch=64, repeats=12)
    parser.add_argument(
        "--embed", type=int, default=512, help="width of embeddings and text encodings"
    )
    parser.add_argument("--draws", type=int, default=1, help="noise draws per sample")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--folder", default="", help="where to write checkpoints")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    torch.set_num_threads(args.threads)
    for case in args.cases or CASES:
        if case in ("train", "train_embedding"):
            bench_train(args, case == "train")
        elif case in ("sample", "sample_embedding"):
            bench_sample(args, case == "sample")
        else:
            {"ema": bench_ema, "checkpoint": bench_checkpoint, "order": bench_order}[case](args)


if __name__ == "__main__":
    main()
