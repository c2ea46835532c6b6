"""Time the audio stages, and print one JSON line per case.

    python tests/benchmarks/bench_audio.py [--device cuda] [CASE ...]

Cases: soundstream, semantic, coarse, fine (one training step each), tokenize, generate-semantic,
generate-coarse, generate-fine; all by default. The default sizes match those at which
audiolm_pytorch is timed. With --preset, each stage has the sizes of that preset in train_audio.py.
Peak memory is that of the whole process: to compare it, run one case at a time.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before importing torch; idle threads yield soon

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_prior import flags, measure

import train_audio
from common import amp, ema, optim
from common.models import soundstream, token_lm
from common.models.nn import compile_blocks

STAGES = ("soundstream", "semantic", "coarse", "fine")
CASES = (*STAGES, "tokenize", *(f"generate-{stage}" for stage in STAGES[1:]))
CODEC = dict(
    sample_rate=16_000,
    channels=16,
    strides=(2, 4, 5, 8),
    latent_dim=512,
    num_quantizers=8,
    codebook_size=1024,
    seconds=1.0,
    optimizer="adamw",
    lr=1e-4,
)
TOKENS = dict(width=512, depth=6, heads=8, dropout=0.0, optimizer="adamw", lr=3e-4)
CLUSTERS = 500
COARSE_QUANTIZERS = 3
# {stage: frames in each of its streams}.
FRAMES = {"semantic": 256, "coarse": 128, "fine": 128}


def settings(args, stage):
    """The config of a stage, with the benchmark's sizes or those of a preset."""
    if args.preset:
        sizes = train_audio.PRESETS[args.preset][stage]
    elif stage == "soundstream":
        sizes = dict(CODEC, quantizer_start=0, adversarial_weight=1.0, feature_weight=1.0)
    else:
        sizes = TOKENS
    machine = dict(precision=args.precision, batch_size=args.batch, chunk_size=args.batch)
    return train_audio.STAGES[stage](**{**sizes, **machine, "stage": stage})


def codec_of(cfg, device):
    """A codec whose codebooks are initialized with random vectors."""
    torch.manual_seed(0)
    codec = soundstream.SoundStream(cfg).to(device)
    vectors = torch.randn(2 * cfg.codebook_size, cfg.latent_dim, device=device)
    codec.quantizer.initialize(vectors, 0, len(vectors))
    return codec


def training(model, cfg):
    """(optimizers, EMA) of a model."""
    optimizers = optim.make(model, "adamw", cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    return optimizers, ema.EMA(model, cfg.ema_update_every, decay=cfg.ema_decay)


def bench_soundstream(args):
    """Time a complete training step with discriminators."""
    cfg = settings(args, "soundstream")
    device = args.device
    codec = codec_of(cfg, device)
    discriminators = soundstream.make_discriminators(cfg.channels, cfg.stft_window).to(device)
    optimizers, average = training(codec, cfg)
    theirs = optim.make(discriminators, "adamw", cfg.discriminator_lr, 0.0, cfg.betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    losses = []
    wave = 0.3 * torch.randn(args.batch, round(cfg.seconds * cfg.sample_rate), device=device)
    if args.compile:
        codec.compile()

    def step():
        with amp.autocast(device, cfg.precision):
            fake, _, commitment = codec(wave)
            loss = cfg.commitment_weight * commitment
            loss = loss + soundstream.reconstruction_loss(fake, wave, cfg)
            hinge, features = soundstream.adversarial_loss(discriminators, fake, wave)
            loss = loss + cfg.adversarial_weight * hinge + cfg.feature_weight * features
        scaler.scale(loss).backward()
        with amp.autocast(device, cfg.precision):
            their_loss = soundstream.discriminator_loss(
                discriminators, fake, wave, cfg.r1_weight
            )
        scaler.scale(their_loss).backward()
        amp.step(scaler, optimizers, cfg.max_grad_norm)
        amp.step(scaler, theirs, cfg.max_grad_norm)
        scaler.update()
        for module in codec, discriminators:
            module.zero_grad(set_to_none=True)
        codec.quantizer.update(len(losses))
        average.update(len(losses))
        losses.append(loss.detach())

    measure(
        "soundstream",
        args,
        step,
        args.repeats,
        batch=args.batch,
        audio_s_per_s=lambda seconds: args.batch * cfg.seconds / seconds,
        parameters=sum(p.numel() for p in codec.parameters()),
        discriminators=sum(p.numel() for p in discriminators.parameters()),
        first_loss=lambda seconds: losses[0].item(),
    )


def bench_tokenize(args):
    """Time encoding and decoding of a wave as long as a batch."""
    cfg = settings(args, "soundstream")
    codec = codec_of(cfg, args.device).eval().requires_grad_(False)
    wave = 0.3 * torch.randn(args.batch * round(cfg.seconds * cfg.sample_rate))
    codes = codec.encode(wave)
    with amp.autocast(args.device, args.precision):
        works = {"tokenize": lambda: codec.encode(wave), "decode": lambda: codec.decode(codes)}
        for name, work in works.items():
            measure(
                name,
                args,
                work,
                4 * args.repeats,
                batch=args.batch,
                audio_s_per_s=lambda seconds: args.batch * cfg.seconds / seconds,
            )


def make(args, stage):
    """(config, transformer, [codes (T, Q) of each stream] for each sample)."""
    cfg = settings(args, stage)
    quantizers = 12 if args.preset else 8
    semantic = token_lm.Stream("semantic", 1, CLUSTERS)
    coarse = token_lm.Stream("coarse", COARSE_QUANTIZERS, 1024)
    fine = token_lm.Stream("fine", quantizers - COARSE_QUANTIZERS, 1024)
    streams = {"semantic": [semantic], "coarse": [semantic, coarse], "fine": [coarse, fine]}[stage]
    torch.manual_seed(0)
    model = token_lm.TokenTransformer(cfg, streams, 1, 1, 50.0).to(args.device)
    samples = []
    for _ in range(args.batch):
        samples.append(
            [torch.randint(s.codebook_size, (FRAMES[stage], s.num_quantizers)) for s in streams]
        )
    return cfg, model, samples


def bench_step(args, stage):
    """Time a complete training step of a transformer, which predicts the last stream."""
    cfg, model, samples = make(args, stage)
    sequences = [token_lm.build_sequence(model.streams, codes) for codes in samples]
    last = model.streams[-1]
    target = [token_lm.targets(last, codes[-1], True) for codes in samples]
    batch = {
        "inputs": torch.stack([sequence for sequence, _ in sequences]).to(args.device),
        "start": torch.tensor([start for _, start in sequences], device=args.device),
        "target": torch.stack(target).to(args.device),
        "text": [""] * len(samples),
    }
    if args.compile:
        compile_blocks(model.transformer.blocks)
    optimizers, average = training(model, cfg)
    scaler = amp.scaler(args.device, cfg.precision)
    losses = []

    def step():
        with amp.autocast(args.device, cfg.precision):
            losses_of_samples, _ = model(batch)
            loss = losses_of_samples.mean()
        scaler.scale(loss).backward()
        amp.step(scaler, optimizers, cfg.max_grad_norm)
        scaler.update()
        model.zero_grad(set_to_none=True)
        average.update(len(losses))
        losses.append(loss.detach())

    tokens = args.batch * sum(codes.numel() for codes in samples[0])
    measure(
        stage,
        args,
        step,
        4 * args.repeats,
        3,
        batch=args.batch,
        steps=batch["inputs"].shape[1],
        parameters=sum(p.numel() for p in model.parameters()),
        first_loss=lambda seconds: losses[0].item(),
        tokens_per_s=lambda seconds: tokens / seconds,
    )


def bench_generate(args, stage):
    """Time the generation of about --tokens codes per sample, given the earlier streams.

    For the stage "fine", the earlier stream is cut to the number of frames generated.
    """
    _, model, samples = make(args, stage)
    model.eval().requires_grad_(False)
    frames = math.ceil(args.tokens / model.streams[-1].num_quantizers)
    if stage == "fine":
        samples = [[codes[:frames] for codes in streams] for streams in samples]
    samples = [[*earlier, last[:0]] for *earlier, last in samples]
    sampling = token_lm.SamplingParams(1.0, 100)
    limits = [frames] * args.batch
    if args.compile:
        model.transformer.step = torch.compile(model.transformer.step)

    def work():
        with amp.autocast(args.device, args.precision):
            token_lm.generate(model, samples, limits, limits, range(args.batch), sampling)

    count = args.batch * frames * model.streams[-1].num_quantizers
    measure(
        f"generate-{stage}",
        args,
        work,
        args.repeats,
        1,
        batch=args.batch,
        frames=frames,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_s=lambda seconds: count / seconds,
    )


def main():
    parser = flags(__doc__, CASES, train_audio.PRESETS, batch=4, repeats=3)
    parser.add_argument("--tokens", type=int, default=256, help="to generate per sample")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    torch.set_num_threads(args.threads)
    for case in args.cases or CASES:
        if case.startswith("generate-"):
            bench_generate(args, case.removeprefix("generate-"))
        elif case in FRAMES:
            bench_step(args, case)
        elif case == "tokenize":
            bench_tokenize(args)
        else:
            bench_soundstream(args)


if __name__ == "__main__":
    main()
