"""What watching and saving take from training, a JSON line a case: python tests/benchmarks/bench_tracker.py [CASE ...]

log: what figures, progress bar and page take of a step of --step_ms. save: how much longer such steps take, all
together, while a state of --megabytes is written, beside the time that the write takes by itself.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import train_prior
from common import checkpoint, config, dist, tracker


def steps_of(milliseconds):
    """A function that computes for about so long, on one thread."""
    torch.set_num_threads(1)
    matrix, count, start = torch.randn(256, 256), 0, time.perf_counter()
    while time.perf_counter() - start < 0.5:
        matrix @ matrix
        count += 1
    products = round(count * milliseconds / 500)

    def step():
        for _ in range(products):
            matrix @ matrix
    return step


def bench_log(args, step):
    """A log line every 25 steps and a page every 500, as often as in the defaults, without the steps themselves."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = train_prior.Config(run=folder, steps=10 ** 6, batch_size=32)
        checkpoint.write_json(config.as_json(cfg), Path(folder) / "config.json")
        state = SimpleNamespace(step=0, cfg=cfg, optimizers=[SimpleNamespace(param_groups=[{"lr": 1e-3}])],
                                average=SimpleNamespace(decay_at=lambda step: 0.99),
                                scaler=SimpleNamespace(is_enabled=lambda: False))
        log = tracker.Tracker(SimpleNamespace(folder=Path(folder), record={"checkpoints": []}), state)
        loss = torch.tensor(1.0)
        meter, bar = tracker.Meter(log, state), tracker.progress(total=10 ** 6, desc="bench", unit="step")

        times = []
        for _ in range(20 * args.rounds):
            start = time.perf_counter()
            for _ in range(500):
                state.step += 1
                bar.update()
                meter.add(loss, [{"unusable": []}])
                if state.step % 25 == 0:
                    found, rate = meter.line(loss)
                    bar.set_postfix_str(f"loss {found:.4f}, {rate:.0f} samples/s", refresh=False)
                    meter.restart()
            log.log(state.step, val_loss=0.5, val_loss_online=0.5)
            log.report()
            times.append((time.perf_counter() - start) / 500)
        bar.close()
    found = statistics.median(times)
    print(json.dumps({"case": "log", "microseconds_a_step": round(found * 1e6, 2), "step_ms": args.step_ms,
                      "share": round(found * 1e3 / args.step_ms, 5)}))


def bench_save(args, step):
    state = {"model": {str(i): torch.randn(250_000) for i in range(args.megabytes)}}
    dist.touch_memory(args.megabytes * 10 ** 6)  # as a State does
    for _ in range(200):  # until there is a checkpoint to write
        step()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = checkpoint.Run(folder)
        run.open("auto")
        for number in range(args.rounds):
            start = time.perf_counter()
            run.commit(3 * number + 1, state, 1)
            alone = time.perf_counter() - start
            start, steps = time.perf_counter(), 0
            while time.perf_counter() - start < max(3.0, 2 * alone):
                step()
                steps += 1
            quiet = time.perf_counter() - start
            start = time.perf_counter()
            run.begin(3 * number + 2, state, 1)
            copy = time.perf_counter() - start
            for _ in range(steps):
                step()
            beside = time.perf_counter() - start
            run.wait()
            print(json.dumps({"case": "save", "megabytes": args.megabytes, "write_s": round(alone, 3),
                              "copy_s": round(copy, 3), "lost_s": round(beside - quiet, 3),
                              "share": round((beside - quiet) / alone, 3)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of: log save")
    parser.add_argument("--step_ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", help="where to save, by default the system's folder of temporary files")
    args = parser.parse_args()
    dist.keep_memory()  # as the scripts do
    for case in args.cases or ("log", "save"):
        {"log": bench_log, "save": bench_save}[case](args, steps_of(args.step_ms))


if __name__ == "__main__":
    main()
