"""What the tests of the scripts share: scripts run as a user runs them, and their runs compared bit for bit."""
import contextlib
import importlib
import io
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FORKS, ROOT

from common import checkpoint, dist, images, recordings, synthetic

# Of a prior that trains in seconds.
SMALL = dict(steps=24, width=32, depth=2, heads=2, batch_size=48, chunk_size=10, log_every=4, eval_every=12,
             save_every=8, eval_timesteps="4", eval_samples=100, device="cpu", warmup_steps=5,
             optimizer="adamw", lr=2e-3)
# Of all stages of audio.
AUDIO = dict(channels=2, strides=(4, 5, 8), codec_width=16, quantizers=4, codebook_size=16, discriminator_channels=1,
            stft_window=256, quantize_after=2, discriminator_after=3, penalty_every=2, width=16, depth=2, heads=2,
            clusters=8, seconds=0.4, steps=6, batch_size=4, chunk_size=2, eval_samples=4, log_every=2, eval_every=4,
            save_every=2, warmup_steps=2, device="cpu")
KILLS = int(os.environ.get("KILLS", 2))
TIMINGS = ("samples_per_s", "evaluation_s")


def write_voices(folder, rows=range(40), rate=8000):
    for row, wave, record in zip(rows, *synthetic.syllables(rows)):
        path = folder / f"voice_{record['speaker'] % 4}/{row:03d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        recordings.write_wav(path, recordings.resample(torch.from_numpy(wave), synthetic.RATE, rate), rate)
        path.with_suffix(".txt").write_text(record["text"])
    return folder


def read_picture(path):
    """uint8 (H, W, 3) of an image file."""
    return images.decode_image(Path(path).read_bytes(), str(path))


def flags(**settings):
    """Words of a command line; a tuple becomes values separated by commas."""
    return [word for name, value in settings.items() for word in
            (f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value))]


def start(script, *words, ranks=0):
    """The process of SCRIPT.py: by plain python, or by torchrun on `ranks` processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.Popen([sys.executable, *torchrun, str(ROOT / f"{script}.py"), *map(str, words)],
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def run(script, *words, ranks=0, expect=0):
    """Output of SCRIPT.py on forked `ranks` or in this process, which must end with the status `expect`."""
    if ranks:
        return Forked(script, *words, ranks=ranks).finish(expect)
    status, argv, out = 0, sys.argv, io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            _main(script, words)
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv, out = argv, out.getvalue()
    assert status == expect, out
    return out


def follow(out, *words):
    """Output of the command that the output `out` of a script ends with, with more `words`; it works as it stands."""
    python, file, *given = shlex.split(re.search(r"^Next: (.*)$", out, re.MULTILINE)[1])
    assert python == "python" and out.count("Next: ") == 1
    return run(Path(file).stem, *given, *words)


def run_module(name, *words, expect=0):
    """Output of `python -m NAME`, in this process, which must end with the status `expect`."""
    status, argv, out, sys.argv = 0, sys.argv, io.StringIO(), [name, *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            importlib.import_module(name).main()
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = argv
    assert status == expect, out.getvalue()
    return out.getvalue()


def _main(script, words):
    sys.argv = [f"{script}.py", *map(str, words)]
    importlib.import_module(script).main()


class Forked:
    """SCRIPT.py on `ranks` processes that are forked, in a tenth of the time that torchrun takes to start them.

    `out` is a file to read what all of them print, line by line as it comes. folders: where each rank works.
    """

    def __init__(self, script, *words, ranks=1, folders=None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        reader, writer = FORKS.Pipe(duplex=False)
        given = (port, writer, script, [*map(str, words)], dict(os.environ))  # the server's may be an older one
        self.processes = [FORKS.Process(target=_forked, args=(r, ranks, folders and folders[r], *given))
                          for r in range(ranks)]
        for process in self.processes:
            process.start()
        writer.close()
        self.out = open(os.dup(reader.fileno()), errors="replace")  # noqa: SIM115 (read as long as they run)

    def kill(self):
        """kill -9; returns whether they were all still running."""
        running = all(process.is_alive() for process in self.processes)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return running

    def finish(self, expect=0):
        """Output; every process must end with the status `expect`."""
        out = self.out.read()
        for process in self.processes:
            process.join()
        self.out.close()
        assert [process.exitcode for process in self.processes] == [expect] * len(self.processes), out
        return out


def kill_often(script, words, ranks, seed):
    """Start a script KILLS times, and kill it each time at a random moment; returns how often all ranks still ran."""
    rng, running = random.Random(seed), 0
    for _ in range(KILLS):
        process = Forked(script, *words, ranks=ranks)
        for _ in range(rng.randint(1, 5)):  # wait for so many lines of its output, then a little work more
            process.out.readline()
        sum(i * i for i in range(rng.randint(0, 1_000_000)))
        running += process.kill()
    return running


def _forked(rank, ranks, folder, port, writer, script, words, environment):
    os.chdir(folder or ".")
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), PYTHONUNBUFFERED="1", OMP_NUM_THREADS="2")
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        _main(script, words)
    finally:
        dist.teardown()  # a forked process ends without what is registered for its exit


def wait_for(word, process):
    """Read the output of `process` up to the line that has `word` in it."""
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(f"ended without a word of {word!r}: {process.stderr.read()}")


def kill_all(word):
    """kill -9 every process that has `word` on its command line: torchrun's workers too, which have their own group."""
    found = True
    while found:  # torchrun may be starting one right now
        found = False
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if word in (process / "cmdline").read_text() and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
            except (OSError, UnicodeDecodeError):
                continue  # it has ended by itself


def metrics(folder):
    """The lines of metrics.jsonl without what a clock has measured and the names of samples."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in (*TIMINGS, "samples")} for line in lines]


def tensors(value):
    """All tensors and plain values in nested dicts and lists, in order."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in tensors(value[key])]
    return [leaf for item in value for leaf in tensors(item)] if isinstance(value, (list, tuple)) else [value]


def differences(one, other):
    """What is not the same bit for bit in two runs' metrics, weights, average, optimizer, scaler and step."""
    found = [] if metrics(one) == metrics(other) else ["metrics"]
    newest = json.loads((Path(one) / "auto_resume.json").read_text())["checkpoints"][0]["file"]
    for name in ("model.pt", "best.pt", newest):
        a, b = (checkpoint.load(Path(folder) / name) for folder in (one, other))
        a, b = (tensors({**state, "config": 0, "metadata": 0, "cwd": 0}) for state in (a, b))
        for left, right in zip(a, b, strict=True):
            if not (torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right):
                found.append(name)
    return found


def check_loading(script, words, folder, stage, server, new):
    """The checkpoints of a finished run in `folder` load from a file and from a URL, whole and weights alone.

    words: the command line that trained it, but for --run_dir; stage: the folder's name in a run of stages, or "";
    new: a folder for the runs that go on from it.
    """
    record = json.loads((folder / "auto_resume.json").read_text())
    whole, end = record["checkpoints"][1], record["checkpoints"][0]["step"]
    server.files = {"/whole.pt": (folder / whole["file"]).read_bytes(), "/model.pt": (folder / "model.pt").read_bytes()}
    expected = [line for line in metrics(folder) if line["step"] > whole["step"]]
    for name, address in (("file", folder / whole["file"]), ("url", f"{server.url}/whole.pt#sha256={whole['sha256']}")):
        out = run(script, *words, "--run_dir", new / name, "--load", address)
        assert f"at step {whole['step']} of {end}" in out and metrics(new / name / stage) == expected, out
    out = run(script, *words, "--run_dir", new / "rate", "--load", f"{server.url}/whole.pt", "--lr=1e-5", "--no_cosine")
    assert "lr changed from" in out and {line["lr"] for line in metrics(new / "rate" / stage) if "lr" in line} == {1e-5}
    weights = checkpoint.load(folder / "model.pt")
    checkpoint.save({**weights, "model": dict(list(weights["model"].items())[1:])}, new / "part.pt")
    for name, address in (("model_file", folder / "model.pt"), ("model_url", f"{server.url}/model.pt")):
        run(script, *words, "--run_dir", new / name, "--init_from", address)
    assert not differences(new / "model_file" / stage, new / "model_url" / stage)
    assert metrics(new / "model_url" / stage)[0]["step"] == metrics(folder)[0]["step"]
    assert metrics(new / "model_url" / stage)[0]["loss"] != metrics(folder)[0]["loss"]
    out = run(script, *words, "--run_dir", new / "strict", "--init_from", new / "part.pt", expect=1)
    assert f"part.pt: weights of another model: 1 entries differ: {next(iter(weights['model']))}" in out
    run(script, *words, "--run_dir", new / "loose", "--init_from", new / "part.pt", "--no_init_strict")
    out = run(script, *words, "--run_dir", new / "none", "--load", f"{server.url}/model.pt", expect=1)
    assert "weights without the state of a run; start from them with --init_from" in out and "Traceback" not in out
    out = run(script, *words, "--run_dir", new / "none", "--load", f"{server.url}/other.pt", expect=1)
    assert f"{server.url}/other.pt: HTTP Error 404" in out and len(out.strip().splitlines()) == 1


def write_pipeline(folder, width, length):
    """{part: model} of a pipeline in Karlo's form, of small sizes and random weights; saved in `folder` by diffusers.

    width: of embeddings and text encodings. length: of texts.
    """
    import diffusers
    projection = sys.modules[diffusers.UnCLIPPipeline.__module__].UnCLIPTextProjModel  # wherever this version has it
    plain = dict(sample_size=32, layers_per_block=1, down_block_types=("ResnetDownsampleBlock2D",) * 2,
                 up_block_types=("ResnetUpsampleBlock2D",) * 2, block_out_channels=(128, 256), in_channels=6,
                 out_channels=3, add_attention=False)
    parts = {
        "prior": diffusers.PriorTransformer(num_attention_heads=4, attention_head_dim=16, num_layers=3,
                                            embedding_dim=width, num_embeddings=length),
        "decoder": diffusers.UNet2DConditionModel(
            sample_size=8, layers_per_block=1, block_out_channels=(128, 256), in_channels=3, out_channels=6,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn", cross_attention_dim=48, class_embed_type="identity",
            attention_head_dim=64, resnet_time_scale_shift="scale_shift"),
        "text_proj": projection(clip_extra_context_tokens=4, clip_embeddings_dim=width, time_embed_dim=512,
                                cross_attention_dim=48),
        "super_res_first": diffusers.UNet2DModel(**plain),
        "super_res_last": diffusers.UNet2DModel(**plain)}
    generator = torch.Generator().manual_seed(0)
    for part, model in parts.items():
        for parameter in model.eval().parameters():  # not as it began: no zero, no one
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        if part == "prior":
            model.clip_mean.data.normal_(generator=generator)
            model.clip_std.data.uniform_(0.5, 1.5, generator=generator)
        model.save_pretrained(Path(folder, part))
    return parts
