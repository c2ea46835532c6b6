"""Helpers shared by the tests: run scripts as users do, and compare runs bit for bit."""
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import sys
import wave as wavfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FORKS, environment, free_port

from common import checkpoint, config, dist, order
from common.data import images, media, sounds, synthetic
from common.models import soundstream


@dataclasses.dataclass(frozen=True)
class Settings(config.TrainingRun):
    """The part of a script's Config that helpers need."""

    run_dir: str = "runs/x"
    data: str = ""
    steps: int = 1000
    batch_size: int = 64
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup_steps: int = 50
    cosine: bool = True
    cosine_steps: int = 0
    eval_samples: int = config.field(192, affects_val_loss=True)


@dataclasses.dataclass
class Words:
    """A dataset whose samples are their row numbers and the random bits passed to `fetch`."""

    size: int
    damaged: tuple = ()

    def __len__(self):
        return self.size

    def split(self, name, validation, test, seed=0):
        return order.split_indices(self.size, name, validation, test, seed)

    def fetch(self, indices, random_bits=None):
        if random_bits is not None:
            random_bits = random_bits.astype(np.int64)
        return {"row": indices.copy(), "words": random_bits}, ~np.isin(indices, self.damaged)

    def fault(self, index):
        return f"row {index}"


CPU = torch.device("cpu")
# A prior that trains in seconds.
SMALL = dict(
    steps=24,
    width=32,
    depth=2,
    heads=2,
    batch_size=48,
    chunk_size=10,
    log_every=4,
    eval_every=12,
    save_every=8,
    eval_timesteps="4",
    eval_samples=100,
    device="cpu",
    warmup_steps=5,
    lr=2e-3,
)
BRIEF = dict(log_every=2, eval_every=4, save_every=2, warmup_steps=2, device="cpu")
UNET = dict(width=8, channel_mult=(1, 2))
# Settings of the audio stages: those that all stages share, then those of each stage.
AUDIO = dict(BRIEF, steps=6, batch_size=4, chunk_size=2, eval_samples=4)
CODEC = dict(
    AUDIO,
    stage="soundstream",
    channels=2,
    strides=(4, 5, 8),
    latent_dim=16,
    num_quantizers=4,
    codebook_size=16,
    quantizer_start=2,
    adversarial_weight=0.1,
    feature_weight=0.1,
    r1_weight=10.0,
    seconds=0.4,
)
TOKENS = dict(AUDIO, width=16, depth=2, heads=2, seconds=0.4)
STAGES = {
    "soundstream": CODEC,
    "semantic": dict(TOKENS, stage="semantic", clusters=8, seconds=1.2),  # whole recordings
    "coarse": dict(TOKENS, stage="coarse"),
    "fine": dict(TOKENS, stage="fine"),
}
CODECS = {
    "encodec": dict(
        target_bandwidths=[0.4, 0.8],
        num_filters=2,
        hidden_size=8,
        upsampling_ratios=[5, 4, 4, 2],
    ),
    "dac": dict(
        encoder_hidden_size=2,
        decoder_hidden_size=16,
        n_codebooks=4,
        codebook_dim=4,
        downsampling_ratios=[2, 5, 3],
    ),
    "mimi": dict(
        num_filters=2,
        hidden_size=16,
        num_quantizers=4,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        upsampling_ratios=[5, 4, 4],
        upsample_groups=16,
        num_hidden_layers=1,
    ),
}


def write_voices(folder, rows=range(40)):
    for row, text, speaker in zip(rows, *synthetic.syllables(rows)):
        path = folder / f"voice_{speaker % 4}/{row:03d}.wav"
        wave = torch.from_numpy(synthetic.speak(text, speaker))
        sounds.write_sound(wave, synthetic.RATE, path)
        path.with_suffix(".txt").write_text(text)
    return folder


def wav(wave, rate=16000):
    """The bytes of a 16-bit WAV file with the wave (C, T)."""
    stream = io.BytesIO()
    with wavfile.open(stream, "wb") as file:
        file.setparams((len(wave), 2, rate, 0, "NONE", ""))
        file.writeframes((wave.T * 32768).astype(np.int16).tobytes())
    return stream.getvalue()


def write_captioned(folder, count, size=32):
    """Write captioned shapes 00000.png, 00000.txt, ... to `folder`: (pictures, records)."""
    pictures, records = synthetic.shapes(range(count), size=size)
    folder.mkdir()
    for i, record in enumerate(records):
        (folder / f"{i:05d}.png").write_bytes(media.png(pictures[i]))
        (folder / f"{i:05d}.txt").write_text(record["caption"])
    return pictures, records


def write_files(folder, files):
    """Write files {name: bytes} to `folder`; returns `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def awake(module, std=0.1):
    """Fill all-zero parameters with random numbers, because zeros would hide mistakes."""
    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=std)
    return module


def read_picture(path):
    """The pixels of an image file: uint8 (H, W, 3)."""
    return images.decode_image(Path(path).read_bytes(), str(path))


# Scripts

def flags(**settings):
    """`settings` as command-line arguments; a tuple becomes values separated by commas."""
    words = []
    for name, value in settings.items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        words += [f"--{name}", str(value)]
    return words


def run(name, *words, ranks=0, expect=0, **settings):
    """Run NAME.py or `python -m NAME`; returns its output. Its exit status must be `expect`.

    It runs in this process, or in `ranks` forked processes. settings: more flags, after `words`.
    """
    words = [*words, *flags(**settings)]
    if ranks:
        return Forked(name, *words, ranks=ranks).finish(expect)
    status = 0
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.argv", [f"{name}.py", *map(str, words)])
        try:
            importlib.import_module(name).main()
        except SystemExit as end:
            status = end.code
    assert status == expect, out.getvalue()
    return out.getvalue()


def mistake(name, *words, status=1, **settings):
    """Run a command that must end with one error line, after any notes; returns the line."""
    *notes, error = run(name, *words, expect=status, **settings).splitlines()
    assert all(note.startswith("note: ") for note in notes)
    assert error.startswith(f"{name}.py: error: ")
    return error


def follow(out, *words):
    """Run the next command that a script suggests in `out`, plus `words`; returns its output."""
    (name, arguments), = re.findall(r"^Next: python (\w+)\.py (.*)$", out, re.MULTILINE)
    return run(name, *shlex.split(arguments), *words)


class Forked:
    """SCRIPT.py in `ranks` forked processes, which start in a tenth of the time torchrun takes.

    `out` is a file with the output of all ranks, which can be read line by line while they run.
    folders: the working folder of each rank.
    """

    def __init__(self, script, *words, ranks=1, folders=None):
        port = free_port()
        reader, writer = FORKS.Pipe(duplex=False)
        self.processes = []
        for rank in range(ranks):
            folder = folders[rank] if folders else "."
            # The forkserver has only the environment variables from when it was started.
            variables = {**os.environ, **environment(rank, ranks, port)}
            arguments = (folder, writer, variables, script, [*map(str, words)])
            self.processes.append(FORKS.Process(target=_forked, args=arguments))
        for process in self.processes:
            process.start()
        writer.close()
        self.out = open(os.dup(reader.fileno()), errors="replace")  # noqa: SIM115 (closed later)

    def kill(self):
        """Kill all ranks (SIGKILL); returns True if all were still running."""
        running = all(process.is_alive() for process in self.processes)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return running

    def finish(self, expect=0):
        """Wait for all ranks, which must exit with status `expect`; returns their output."""
        out = self.out.read()
        self.out.close()
        for process in self.processes:
            process.join()
            assert process.exitcode == expect, out
        return out


def _forked(folder, writer, variables, script, words):
    os.chdir(folder)
    os.environ.update(variables, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="2")
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = [f"{script}.py", *words]
    try:
        importlib.import_module(script).main()
    finally:
        dist.teardown()  # forked processes do not run exit handlers


# Runs

def metrics(folder):
    """The lines of metrics.jsonl, without times and the names of sample files."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        for name in ("samples_per_s", "evaluation_s", "samples"):
            line.pop(name, None)
        lines.append(line)
    return lines


def saved(folder):
    """The checkpoints of a run, {"file", "step", "sha256"} each, newest first."""
    return config.read_json(Path(folder, "auto_resume.json"))["checkpoints"]


def same(left, right):
    """True if nested dicts and lists of tensors and plain values are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        left = [*left.items()]
        right = [*right.items()]
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def differences(first, second):
    """The metrics and files that differ between two runs."""
    found = []
    if metrics(first) != metrics(second):
        found.append("metrics")
    for name in ("model.pt", "best.pt", saved(first)[0]["file"]):
        contents = [checkpoint.load(Path(folder, name)) for folder in (first, second)]
        for each in contents:
            del each["config"]
        if not same(*contents):
            found.append(name)
    return found


def make_codec(**settings):
    """A small SoundStream with random weights and initialized codebooks."""
    usual = dict(sample_rate=8000, pre_emphasis=0.0, codebook_decay=0.95)
    cfg = SimpleNamespace(**{**STAGES["soundstream"], **usual, **settings})
    codec = awake(soundstream.SoundStream(cfg), std=0.2).eval()
    with torch.no_grad():
        frames = codec.encode_latents(torch.randn(20, 20 * codec.hop_length))
    codec.quantizer.initialize(frames.flatten(0, 1), 0, 100)
    return codec


# Published models

def write_pipeline(folder):
    """Write a pipeline like Karlo's, but small and random, to `folder`; returns {part: model}.

    Embeddings and text encodings have width 64; texts have 24 tokens. The files have diffusers'
    format.
    """
    import diffusers

    pipeline = sys.modules[diffusers.UnCLIPPipeline.__module__]  # its name varies by version
    upsampler = dict(
        sample_size=32,
        layers_per_block=1,
        down_block_types=("ResnetDownsampleBlock2D",) * 2,
        up_block_types=("ResnetUpsampleBlock2D",) * 2,
        block_out_channels=(128, 256),
        in_channels=6,
        out_channels=3,
        add_attention=False,
    )
    models = {
        "prior": diffusers.PriorTransformer(
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=3,
            embedding_dim=64,
            num_embeddings=24,
        ),
        "decoder": diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(128, 256),
            in_channels=3,
            out_channels=6,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            cross_attention_dim=48,
            class_embed_type="identity",
            attention_head_dim=64,
            resnet_time_scale_shift="scale_shift",
        ),
        "text_proj": pipeline.UnCLIPTextProjModel(
            clip_extra_context_tokens=4,
            clip_embeddings_dim=64,
            time_embed_dim=512,
            cross_attention_dim=48,
        ),
        "super_res_first": diffusers.UNet2DModel(**upsampler),
        "super_res_last": diffusers.UNet2DModel(**upsampler),
    }
    generator = torch.Generator().manual_seed(0)
    for name, model in models.items():
        for parameter in model.eval().parameters():  # initial zeros and ones would hide mistakes
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        if name == "prior":
            model.clip_mean.data.normal_(generator=generator)
            model.clip_std.data.uniform_(0.5, 1.5, generator=generator)
        model.save_pretrained(Path(folder, name))
    # Karlo's clip_sample_range is 5.
    scheduler = diffusers.UnCLIPScheduler(clip_sample_range=0.5)
    scheduler.save_pretrained(Path(folder, "prior_scheduler"))
    return models


def published_codec(folder, kind, **settings):
    """Save a tiny codec of this `kind` to `folder`, and load it. Codes vary with the audio."""
    transformers = pytest.importorskip("transformers")
    settings = {**CODECS[kind], "sampling_rate": 8000, "codebook_size": 16, **settings}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **settings))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("embed", "embed_sum")):  # codebooks
            torch.nn.init.normal_(tensor)
        elif tensor.requires_grad and kind == "encodec":  # else biases would outweigh the audio
            tensor.data += 0.4 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder).eval()
