"""Time the decoder's parts, and print one JSON line per case.

    python tests/benchmarks/bench_decoder.py [--device cuda] [CASE ...]

Cases: train, sample (base U-Net, 32x32), train_upsample, sample_upsample (second U-Net, 64x64). The
default is all cases or, with --preset, those of its stage. Widths, levels and blocks are those of
DALLE2-pytorch's Unet(dim=64, cond_dim=128, dim_mults=(1, 2, 4)). Peak memory is that of the whole
process: to compare it, run one case at a time.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before importing torch; idle threads yield soon

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_prior import flags, measure

import train_decoder
from common import amp, ema, loader, optim
from common.models import pixels

CASES = ("train", "sample", "train_upsample", "sample_upsample")
MODEL = dict(
    width=64,
    channel_mult=(1, 2, 4),
    num_res_blocks=2,
    objective="epsilon",
    timestep_density="uniform",
)
BASE = dict(image_size=32, cond_width=128, attention_levels=(2,), learned_variance=True)
STEPS = 50  # sampling steps
UPSAMPLE = dict(image_size=64, low_res_size=32, random_crop=0)


def make(args, upsample, batch):
    """(config, U-Net, batch, condition), with the benchmark's sizes or those of a preset."""
    settings = MODEL | (UPSAMPLE if upsample else BASE)
    if args.preset:
        settings = dict(train_decoder.PRESETS[args.preset])
        for name in ("stage", "clip", "batch_size", "chunk_size"):
            settings.pop(name, None)
    settings |= {"precision": args.precision, "checkpointing": args.checkpointing}
    cfg = train_decoder.STAGES["upsample" if upsample else "base"](**settings)
    torch.manual_seed(0)
    has_text = cfg.text_encodings
    unet = train_decoder.UNet(cfg, args.embed, args.embed if has_text else 0)
    train_decoder.place(unet, args.device)
    if args.compile:
        train_decoder.compile_blocks([*unet.downs, *unet.middle, *unet.ups])
    size = cfg.image_size
    fields = {"image": torch.randint(256, (batch, size, size, 3), dtype=torch.uint8)}
    if upsample:
        fields = train_decoder.cut_crops(fields, np.arange(batch), cfg)
    condition = {}  # like the output of a CLIP
    if cfg.image_condition:
        condition["image_embed"] = torch.randn(batch, args.embed)
    if has_text:
        condition["text_embed"] = torch.randn(batch, args.embed)
        condition["text_enc"] = torch.randn(batch, cfg.max_text_len, args.embed)
        condition["text_mask"] = torch.ones(batch, cfg.max_text_len, dtype=torch.bool)
    fields = loader.to_device(fields, args.device)
    return cfg, unet, fields, loader.to_device(condition, args.device)


def bench_train(args, upsample):
    """Time a complete training step: forward, backward, gradient clipping, AdamW, EMA."""
    cfg, unet, batch, condition = make(args, upsample, args.batch)
    optimizers = optim.make(unet, "adamw", 1e-4, cfg.weight_decay)
    average = ema.EMA(unet, decay=0.9999)
    scaler = amp.scaler(args.device, args.precision)
    losses = []

    def step():
        with amp.autocast(args.device, args.precision):
            loss = train_decoder.diffusion_loss(unet, batch, condition)
        scaler.scale(loss).backward()
        amp.step(scaler, optimizers, 0.5)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        average.update(len(losses))

    measure(
        "train_upsample" if upsample else "train",
        args,
        step,
        args.repeats,
        batch=args.batch,
        image_size=cfg.image_size,
        parameters=sum(p.numel() for p in unet.parameters()),
        first_loss=lambda seconds: losses[0].item(),
        samples_per_s=lambda seconds: args.batch / seconds,
    )


def bench_sample(args, upsample):
    """Time STEPS unguided steps of DPM-Solver++."""
    cfg, unet, batch, condition = make(args, upsample, args.sample_batch)
    unet.eval()
    low_res = None
    if upsample:
        low_res = pixels.resize(pixels.from_uint8(batch["image"]), cfg.low_res_size)

    def draw():
        with amp.autocast(args.device, args.precision):
            train_decoder.sample_images(
                unet, condition, args.sample_batch, STEPS, low_res=low_res
            )

    measure(
        "sample_upsample" if upsample else "sample",
        args,
        draw,
        3,
        1,
        batch=args.sample_batch,
        steps=STEPS,
        image_size=cfg.image_size,
        samples_per_s=lambda seconds: args.sample_batch / seconds,
    )


def main():
    parser = flags(__doc__, CASES, train_decoder.PRESETS, batch=16, repeats=5)
    parser.add_argument("--embed", type=int, default=512, help="width of the image embeddings")
    parser.add_argument("--sample_batch", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    known = CASES
    if args.preset:
        is_upsampler = train_decoder.PRESETS[args.preset]["stage"] == "upsample"
        known = CASES[2:] if is_upsampler else CASES[:2]
    cases = args.cases or known
    if unknown := set(cases) - set(known):
        parser.error(f"no such case: {', '.join(unknown)}; expected {' '.join(known)}")
    torch.set_num_threads(args.threads)
    for case in cases:
        bench = bench_train if case.startswith("train") else bench_sample
        bench(args, case.endswith("upsample"))


if __name__ == "__main__":
    main()
