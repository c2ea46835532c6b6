"""Time the audio stages, one JSON line a case: python tests/benchmarks/bench_audio.py [--device cuda] [CASE ...]

Cases: soundstream, semantic, coarse, fine (a training step), tokenize, generate-semantic, generate-coarse,
generate-fine, all by default. Sizes are those at which audiolm_pytorch is timed; --preset takes one of train_audio's
instead: soundstream-24khz for the codec, audiolm for the transformers, whose coarse stage --depth 18 makes one of 300M.
Peak memory is that of the process, so give one case a call when it is to be compared.
"""
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_prior import emit, flags, timed

import train_audio
from common import accumulate, amp, checkpoint, ema, optim

STAGES = ("soundstream", "semantic", "coarse", "fine")
CASES = (*STAGES, "tokenize", *(f"generate-{stage}" for stage in STAGES[1:]))
CODEC = dict(channels=16, residual_units=3, codec_width=512, codebook_size=1024, grouped_quantizers=0,
             quantizer_dropout=1.0, least_quantizers=1, wave_channels=16, stft_channels=32, seconds=1.0, lr=1e-4)
TOKENS = dict(width=512, depth=6, heads=8, ff_mult=8 / 3, clusters=500, coarse_quantizers=3,
              given_weight=1.0, mask_past=0.15, lr=3e-4)
FRAMES = {"semantic": 256, "coarse": 128, "fine": 128}  # of the last stream; the semantic tokens of coarse are as many


def settings(args, stage):
    """The config of a stage at the benchmark's size, or a preset's."""
    sizes = dict(train_audio.PRESETS[args.preset]) if args.preset else CODEC if stage == "soundstream" else TOKENS
    sizes |= dict(stage=stage, precision=args.precision, batch_size=args.batch, chunk_size=args.batch)
    if stage == "soundstream":
        sizes |= dict(quantize_after=0, discriminate_after=0.0, discriminator_warmup_steps=0, warmup_steps=0)
    else:
        sizes |= dict(layout=args.layout, text="none", warmup_steps=0, **({"depth": args.depth} if args.depth else {}))
        if args.layout == "aligned":
            sizes |= dict(unique=False, given_weight=0.0)
    return train_audio.Config(**sizes)


def bench_soundstream(args):
    """A whole training step with discriminators, every fourth of them with gradient penalties."""
    cfg = settings(args, "soundstream")
    task = train_audio.CodecTask(cfg, args.device)
    codec = task.model
    codec.quantizer.initialize(torch.randn(2 * cfg.codebook_size, cfg.codec_width, device=args.device), 0, rounds=1)
    if args.compile:
        codec.compile()
    task.wrap()
    losses, wave = [], 0.3 * torch.randn(args.batch, round(cfg.seconds * cfg.sample_rate))
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, 0, 1)
    times = timed(lambda: losses.append(task.update(plan, [{"wave": wave}])[0]), args.device, 4 * args.repeats, 4)
    mean = statistics.mean(times)  # steps differ: one in four has penalties
    emit("soundstream", args, times, batch=args.batch, ms_mean=round(mean, 1),
         audio_s_per_s=round(args.batch * cfg.seconds / mean * 1e3, 3),
         parameters=sum(p.numel() for p in codec.parameters()),
         discriminators=sum(p.numel() for p in task.discriminators.parameters()), first_loss=round(losses[0].item(), 4))


def bench_tokenize(args):
    """Waves to codes, and codes to waves."""
    cfg = settings(args, "soundstream")
    torch.manual_seed(0)
    codec = train_audio.SoundStream(cfg).to(args.device).eval().requires_grad_(False)
    codec.quantizer.initialize(torch.randn(2 * cfg.codebook_size, cfg.codec_width, device=args.device), 0, rounds=1)
    wave = 0.3 * torch.randn(args.batch, round(cfg.seconds * cfg.sample_rate), device=args.device)
    codes = codec.encode(wave)
    with amp.autocast(args.device, args.precision):
        for name, work in ("tokenize", lambda: codec.encode(wave)), ("decode", lambda: codec.decode(codes)):
            times = timed(work, args.device, 4 * args.repeats)
            emit(name, args, times, batch=args.batch,
                 audio_s_per_s=round(args.batch * cfg.seconds / statistics.median(times) * 1e3, 2))


def make(args, stage):
    """(config, transformer, codes (B, T, Q) of each of its streams)."""
    cfg = settings(args, stage)
    streams = train_audio.streams_of(cfg, {"semantic": cfg.clusters, "codes": 1024}, {"semantic": 50, "codes": 50},
                                     range(1, 9), CODEC["codec_width"])
    torch.manual_seed(0)
    model = train_audio.TokenTransformer(cfg, streams).to(args.device)
    codes = [torch.randint(s.size, (args.batch, FRAMES[stage], s.codes)) for s in streams]
    return cfg, model, codes


def bench_step(args, stage):
    """A whole training step of a transformer; all its streams are predicted, or the last if they are aligned."""
    cfg, model, codes = make(args, stage)
    lengths, ended = [torch.full((args.batch,), FRAMES[stage])] * len(codes), torch.ones(args.batch, dtype=torch.bool)
    inputs, predicted, _ = train_audio.lay_out(model.streams, codes, lengths, ended, cfg.layout)
    batch = {"inputs": inputs}
    for i, (target, step) in enumerate(predicted):
        batch |= {f"target{i}": target, f"step{i}": step}
    if args.compile:
        model.compile()
    optimizers = optim.make(model, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    average = ema.EMA(model, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    state = checkpoint.State(cfg, {"model": model}, average, optimizers, amp.scaler(args.device, cfg.precision), {}, {})
    task = SimpleNamespace(cfg=cfg, device=args.device, state=state, model=model, wrapped=model,
                           optimizers=optimizers)  # a TokenTask, but for its data
    plan, losses = accumulate.plan(cfg.batch_size, cfg.chunk_size, 0, 1), []
    times = timed(lambda: losses.append(train_audio.TokenTask.update(task, plan, [batch])[0]), args.device,
                  4 * args.repeats, 3)
    emit(stage, args, times, batch=args.batch, layout=args.layout, steps=inputs.shape[1],
         tokens_per_s=round(sum(one.numel() for one in codes) / statistics.median(times) * 1e3, 1),
         parameters=sum(p.numel() for p in model.parameters()), first_loss=round(losses[0].item() / args.batch, 4))


def bench_generate(args, stage):
    """About --tokens codes of the last stream, after the streams before it, which are as long for fine."""
    _, model, codes = make(args, stage)
    model.eval().requires_grad_(False)
    frames = -(-args.tokens // model.streams[-1].codes)
    if stage == "fine":
        codes[0] = codes[0][:, :frames]
    codes[-1] = codes[-1][:, :0]
    lengths, seeds = [torch.full((args.batch,), one.shape[1]) for one in codes], list(range(args.batch))
    if args.compile:
        model.transformer.step = torch.compile(model.transformer.step)

    def work():
        with amp.autocast(args.device, args.precision):
            train_audio.generate(model, codes, lengths, frames, seeds, top_k=0.1, ends=False)
    times = timed(work, args.device, args.repeats, 1)
    count = args.batch * frames * model.streams[-1].codes
    emit(f"generate-{stage}", args, times, batch=args.batch, layout=args.layout, frames=frames,
         tokens_per_s=round(count / statistics.median(times) * 1e3, 2),
         parameters=sum(p.numel() for p in model.parameters()))


def main():
    parser = flags(__doc__, CASES, train_audio.PRESETS, batch=4, repeats=3)
    parser.add_argument("--layout", default="flattened", choices=["flattened", "delay", "aligned"])
    parser.add_argument("--tokens", type=int, default=256, help="to generate, a sample")
    parser.add_argument("--depth", type=int, default=0, help="blocks of the transformer, if not the usual")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    torch.set_num_threads(args.threads)
    for case in args.cases or CASES:
        if case.startswith("generate-"):
            bench_generate(args, case.removeprefix("generate-"))
        elif case in FRAMES:
            bench_step(args, case)
        else:
            (bench_tokenize if case == "tokenize" else bench_soundstream)(args)


if __name__ == "__main__":
    main()
