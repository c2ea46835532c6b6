"""Time the decoder's parts, one JSON line a case: python tests/benchmarks/bench_decoder.py [--device cuda] [CASE ...]

Cases: train, sample (base U-Net, 32x32), train_upsample, sample_upsample (second U-Net, 64x64), all by default. Widths,
levels and blocks are those of DALLE2-pytorch's Unet(dim=64, cond_dim=128, dim_mults=(1, 2, 4)). Peak memory is that of
the process, so give one case a call when it is to be compared.
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: a thread that waits soon leaves its core to others

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_prior import flags, measure

import train_decoder
from common import amp, ema, media, optim

CASES = ("train", "sample", "train_upsample", "sample_upsample")
MODEL = dict(width=64, mults=(1, 2, 4), blocks=2, cond_width=128, head_width=64, attention_levels=(2,),
             objective="epsilon", timestep_density="uniform")
BASE = dict(image_size=32, learned_variance=True)
UPSAMPLE = dict(image_size=64, low_res_size=32, image_condition=False, attention_levels=(), low_res_noise=0.0)


def make(args, upsample, batch):
    """(config, U-Net, batch of that size, condition) at the benchmark's size, or a preset's."""
    settings = {**MODEL, **(UPSAMPLE if upsample else BASE)}
    if args.preset:
        settings = {k: v for k, v in train_decoder.PRESETS[args.preset].items()
                    if k not in ("stage", "clip", "batch_size", "chunk_size")}
    cfg = train_decoder.Config(**{**settings, "precision": args.precision, "checkpointing": args.checkpointing})
    torch.manual_seed(0)
    unet = train_decoder.UNet(cfg, args.embed).to(args.device)
    if args.compile:
        unet.compile()
    size = cfg.image_size
    fields = {"image": torch.randint(256, (batch, size, size, 3), dtype=torch.uint8).to(args.device),
              "image_embed": torch.randn(batch, args.embed, device=args.device)}
    return cfg, unet, fields, train_decoder.conditioning(fields, cfg, None)


def bench_train(args, upsample):
    """A whole training step: forward, backward, clip, AdamW, EMA."""
    cfg, unet, batch, condition = make(args, upsample, args.batch)
    optimizers, average = optim.make(unet, "adamw", 1e-4, cfg.weight_decay), ema.EMA(unet, decay=0.9999)
    scaler, losses = amp.scaler(args.device, args.precision), []

    def step():
        with amp.autocast(args.device, args.precision):
            loss = train_decoder.diffusion_loss(unet, batch, condition)
        scaler.scale(loss).backward()
        amp.step(scaler, optimizers, 0.5)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        average.update(len(losses))
    measure("train_upsample" if upsample else "train", args, step, args.repeats, batch=args.batch,
            image_size=cfg.image_size, parameters=sum(p.numel() for p in unet.parameters()),
            first_loss=lambda seconds: losses[0].item(), samples_per_s=lambda seconds: args.batch / seconds)


def bench_sample(args, upsample):
    """50 DDIM steps without guidance."""
    cfg, unet, batch, condition = make(args, upsample, args.sample_batch)
    unet.eval()
    low_res = media.pixels(batch["image"])[:, :, ::2, ::2] if upsample else None

    def draw():
        with amp.autocast(args.device, args.precision):
            train_decoder.sample_pictures(unet, condition, args.sample_batch, 50, low_res=low_res)
    measure("sample_upsample" if upsample else "sample", args, draw, 3, 1, batch=args.sample_batch, steps=50,
            image_size=cfg.image_size, samples_per_s=lambda seconds: args.sample_batch / seconds)


def main():
    parser = flags(__doc__, CASES, train_decoder.PRESETS, batch=16, repeats=5)
    parser.add_argument("--embed", type=int, default=512, help="width of the image embeddings")
    parser.add_argument("--sample_batch", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    cases = args.cases or (CASES[:2] if args.preset else CASES)
    if unknown := set(cases) - set(CASES[:2] if args.preset else CASES):
        parser.error(f"no such case{' of a preset' * bool(args.preset)}: {', '.join(unknown)}")
    torch.set_num_threads(args.threads)
    for case in cases:
        (bench_train if case.startswith("train") else bench_sample)(args, case.endswith("upsample"))


if __name__ == "__main__":
    main()
