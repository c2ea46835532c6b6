"""Train a SoundStream codec, then semantic, coarse and fine token transformers (AudioLM).

    torchrun --nproc_per_node=2 train_audio.py         # all four, on the built-in syllables
    torchrun --nproc_per_node=2 train_audio.py --stage soundstream --data speech --run_dir runs/mine
    python train_audio.py evaluate
    python train_audio.py sample --text "a i u o" --out out.wav
    python train_audio.py sample --prompt voice.wav --seconds 2 --out out.wav   # in the same voice
    python train_audio.py sample --reconstruct in.wav --num_quantizers 2 --out out.wav

Run the same command again to resume. Each stage is a run of its own: RUN/soundstream, RUN/semantic,
RUN/coarse and RUN/fine. Later stages read the folders of earlier ones. A published codec can
replace the first stage: --stage semantic --sample_rate 24000, then --stage coarse --soundstream
hf:kyutai/mimi, and the same for fine.
`python train_audio.py [train|evaluate|sample] --help` lists the settings. For train, these are the
settings that all stages share; `--stage NAME --help` lists the settings of one stage.

    wave (T,) -> SoundStream -> codes (frames, Q): the first quantizers are coarse, the others fine
    wave (T,) -> k-means on MFCC or HuBERT -> semantic tokens (N,): content, not speaker
    text -> [semantic] -> [semantic | coarse] -> [coarse | fine] -> SoundStream's decoder -> wave

SoundStream: Zeghidour et al. 2021. AudioLM: Borsos et al. 2022. The models are in
common/models/soundstream.py and common/models/token_lm.py.

What differs from the papers, in the presets as well:
SoundStream
- By default an L1 loss on waves replaces the discriminators (--adversarial_weight adds them).
- There is no FiLM, so no denoising (§III-F). Residual units start as the identity.
- Recordings are normalized to the same loudness; in the codec their RMS is 1. With --pre_emphasis
  the codec models x[t] - a x[t-1], and losses and discriminators see this signal as well.
- Weights and codebooks are averaged (EMA).
- k-means++ initializes codebooks from frames of many batches; the paper uses only the first batch.
  A code is dead if its share of frames is low. Dead codes are replaced by evenly spaced frames of
  the first chunk; the paper takes random ones.
- Discriminators have leaky ReLUs of slope 0.1, zero padding, and no weight norm. The wave
  at a quarter of the rate comes from one pooling by 4, not from two by 2.
- Losses are means, not sums. Spectra are compared only as log-mel spectra. Feature distances are
  relative to the features' size (`soundstream.py`). Mel filters are wide enough for the shortest
  window (`audio.mel_filters`).
- By default the first 300 steps have no quantizer. The preset audiolm-16khz has it from the start.
AudioLM
- There are 50 semantic tokens per second. By default they are clusters of MFCC.
- Positions are rotary. AudioLM's relative positions (T5) add a bias to all scores, which rules out
  fast attention. Blocks are pre-norm with GELU; the paper specifies neither. Each quantizer has its
  own embeddings and its own output head.
- Text is added: frequent words are tokens, other words are spelled in bytes. An EOS token, which
  ends audio made from text, is added as well. Crops that are not a whole recording have no text.
  The preset audiolm-16khz has no text at all.
- The loss is a mean over samples of each sample's mean over tokens.
- The preset speech-small, for small data sets, makes eight copies of each recording, shifted by
  eighths of a frame (--shifts). With probability 0.5 it appends another recording of the same
  speaker (--join). It has no fine stage.
- Long audio is generated in windows that overlap by half. For later windows of the coarse stage,
  semantic tokens are computed from the audio so far, and aligned with the requested tokens.
- By default Muon trains the coarse stage and the codec.
"""

import os

# Set before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import dataclasses
import math
import shlex
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch

from common import (
    accumulate,
    amp,
    checkpoint,
    config,
    dist,
    loader,
    loop,
    optim,
    order,
    resume,
    schedule,
    tracker,
)
from common.config import (
    Beta,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
    field,
    model_field,
)
from common.data import files, recordings, sounds, syllables, tokens
from common.ema import EMA
from common.models import audio, semantic, soundstream, token_lm
from common.models.nn import compile_blocks

MAX_CHUNK = 64  # maximum recordings per forward pass if --chunk_size is 0
BUILTIN_ROWS = 6_000  # recordings of the built-in syllables
NUM_SOUNDS = 2  # recordings that an evaluation writes as audio

Optimizer = Literal["adamw", "muon"]
# Tokens are stored in 16 bits.
CodebookSize = Annotated[int, ("a number from 1 to 65536", lambda value: 0 < value <= 2**16)]

# Settings and data of all stages


@dataclass(frozen=True)
class SharedConfig(config.TrainingRun):
    """Run, data and optimization (all stages)"""

    stage: str = field(
        "all", "stage to train; all: in turn; takes only the shared settings", fixed=True
    )
    preset: str = field("", "named settings: speech-small, audiolm-16khz; --config and flags win")
    run_dir: str = field("runs/audio", "folder of the runs; each stage has RUN_DIR/STAGE")
    data: str = field(
        "syllables", 'folder of recordings (wav, flac, ogg, opus, mp3, aiff), or "syllables"'
    )
    sample_rate: PositiveInt = field(
        8_000, "samples per second; recordings with other rates are resampled", fixed=True
    )
    speaker_pattern: str = field(
        "", 'regex for paths below --data; group 1 is the speaker; "": the subfolder'
    )
    # Optimization
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay to 0 along half a cosine after the warm-up; off: constant")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
    eps: PositiveFloat = field(1e-8, "Adam's epsilon")
    ema_update_after: NonNegativeInt = field(0, "steps before averaging starts")
    ema_update_every: PositiveInt = field(1, "steps between updates of the average")
    # Evaluation
    eval_every: Interval = field("500", "steps or time (10min) between evaluations; 0: at the end")

    def __post_init__(self):
        super().__post_init__()
        tracker.check(self)


def open_recordings(cfg, hop_length, crop=0, shifts=1):
    """Open the data; returns {split: (recordings, indices)}.

    hop_length: samples per frame; shorter recordings are unusable. crop: samples per training crop.
    shifts: see `Recordings.repeat`.
    """

    def open_folder(path):
        if path == "syllables":
            found = recordings.Syllables(BUILTIN_ROWS, crop, hop_length, cfg.sample_rate)
        else:
            found = recordings.Recordings(
                path, cfg.sample_rate, crop, hop_length, cfg.speaker_pattern
            )
        found.repeat(shifts)
        return found

    val_dataset = open_folder(cfg.val_data) if cfg.val_data else None
    return order.splits(open_folder(cfg.data), cfg, val_dataset)


# Part 1: SoundStream

# Config


@dataclass(frozen=True)
class CodecConfig(SharedConfig):
    """Codec: model, losses and optimization"""

    seconds: PositiveFloat = field(0.32, "length of a training crop", fixed=True)
    # Model
    channels: PositiveInt = model_field(8, "channels of the first layer; each stride doubles them")
    strides: tuple[PositiveInt, ...] = model_field(
        (2, 4, 5, 8), "strides; their product is the hop length"
    )
    latent_dim: PositiveInt = model_field(128, "width of a frame")
    pre_emphasis: Fraction = model_field(
        0.0, "a: encode x[t] - a x[t-1], because speech is weak at high frequencies"
    )
    num_quantizers: PositiveInt = model_field(
        4, "residual quantizers; decoding only the first n gives a lower bitrate"
    )
    codebook_size: CodebookSize = model_field(256, "codes per quantizer")
    codebook_decay: Fraction = field(0.95, "EMA decay of the codebooks")
    # With k-means on an untrained encoder, the mel distance is 0.54 instead of 0.43 (speech).
    quantizer_start: NonNegativeInt = field(
        300, "steps without quantizer, before k-means (paper: 0)", fixed=True
    )
    # Losses. All are means, so the weights do not depend on the crop length.
    mel_weight: NonNegativeFloat = field(
        1.0, "weight of the log-mel distance", affects_val_loss=True
    )
    mel_seconds: PositiveFloat = field(
        0.085, "longest of six mel windows; each is twice the previous one", affects_val_loss=True
    )
    # The mel loss alone leaves the phase unconstrained.
    wave_weight: NonNegativeFloat = field(
        10.0, "weight of the L1 distance of waves, EnCodec Eq. 1 (paper: 0)", affects_val_loss=True
    )
    commitment_weight: NonNegativeFloat = field(
        0.25, "weight of the distance from frames to their codes"
    )
    # Either of the next two weights adds discriminators, and a step on two cores then takes four
    # times as long.
    adversarial_weight: NonNegativeFloat = field(0.0, "weight of the hinge loss", fixed=True)
    feature_weight: NonNegativeFloat = field(
        0.0, "weight of the feature matching loss", fixed=True
    )
    r1_weight: NonNegativeFloat = field(
        0.0, "weight of the R1 gradient penalty (Mescheder et al. 2018), for small batches"
    )
    discriminator_lr: PositiveFloat = field(
        3e-4, "learning rate of the discriminators, constant after the warm-up"
    )
    discriminator_warmup_steps: NonNegativeInt = field(20, "steps of linear warm-up")
    # Optimization
    augment: bool = field(False, "random loudness, and mixes of two recordings (EnCodec §4.1)")
    steps: PositiveInt = field(1050, "optimizer steps")
    batch_size: PositiveInt = field(16, "samples per step, over all ranks", fixed=True)
    # In the same training time, Muon reaches an SI-SDR of 15 dB on syllables, and Adam 11 dB.
    optimizer: Optimizer = field("muon", "muon: Muon for matrices, AdamW for the rest")
    lr: PositiveFloat = field(3e-3, "peak learning rate")
    weight_decay: NonNegativeFloat = field(0.0, "decoupled weight decay of the codec's kernels")
    betas: tuple[Beta, Beta] = field(
        (0.8, 0.99), "Adam's decay rates of the first and second moments"
    )
    max_grad_norm: NonNegativeFloat = field(
        5.0, "clip gradients of the codec, and of the discriminators, to this norm, 0: no clipping"
    )
    # The decay warms up to this value (ema.py).
    ema_decay: Fraction = field(0.99, "maximum decay of the weight average, 0: no averaging")
    eval_samples: NonNegativeInt = field(
        96, "held-out samples to evaluate on, 0: all", affects_val_loss=True
    )

    def __post_init__(self):
        super().__post_init__()
        # The STFT discriminator halves the number of frames three times, so it needs eight.
        if self.is_adversarial and self.crop < 1.75 * self.stft_window:
            raise UserError(
                f"--seconds: {self.crop} samples are too short for the STFT discriminator; "
                f"expected {1.75 * self.stft_window:.0f} or more"
            )
        # Otherwise the run would end before it has codebooks.
        if self.steps <= self.quantizer_start and not self.init_from:
            raise UserError(
                f"--steps {self.steps}: there are no codebooks before --quantizer_start "
                f"{self.quantizer_start}"
            )

    @property
    def is_adversarial(self):
        """True if there are discriminators."""
        return bool(self.adversarial_weight or self.feature_weight)

    @property
    def crop(self):
        """Samples per training crop."""
        return round(self.seconds * self.sample_rate)

    @property
    def stft_window(self):
        """Samples per window W of the STFT discriminator: 512 at 8 kHz, 1024 at 16 and 24 kHz."""
        return max(128, 2 ** round(math.log2(self.sample_rate / 20)))


# Steps between R1 penalties. Unlike in StyleGAN2, the weight is not multiplied by this number.
R1_EVERY = 4
CODEBOOK = "quantizer.codebook"  # buffer that the EMA averages along with the weights


# Evaluation


@torch.no_grad()
def evaluate_codec(codec, cfg, split, device):
    """{metric: mean over a split}: reconstruction loss, audio quality, use of the codebooks.

    split: (recordings, indices). Collective.
    """
    codec.eval()  # no quantizer dropout
    Q = cfg.num_quantizers

    # A fixed spectrum, so that codecs with different loss windows can be compared.
    def log_mel(wave):
        return audio.log_mel(wave, cfg.sample_rate, window=1024, hop=256, bins=64)

    found = collections.defaultdict(list)  # {metric: values}
    codes_seen = []
    for _, batch in loader.eval_batches(*split, cfg.eval_samples, cfg.chunk_size):
        waves = batch["wave"].to(device)  # (B, T), short recordings padded with silence
        # Spectra are computed in fp32; only the networks run in the training precision.
        with amp.autocast(device, cfg.precision):
            fakes, codes, _ = codec(codec.emphasize(waves))  # (B, T), (B, frames, Q)
        for length, real, fake in zip(batch["length"].tolist(), waves, fakes):
            real = real[None, :length]  # (1, T')
            fake = fake[None, :length]
            loss = soundstream.reconstruction_loss(fake, codec.emphasize(real), cfg)
            found["loss"].append(loss.item())
            # As in training, the loss compares emphasized signals. Quality is measured on audio.
            fake = codec.deemphasize(fake.float())
            distance = (log_mel(fake) - log_mel(real)).abs().mean()
            found[f"mel_distance@{Q}"].append(distance.item())
            found[f"si_sdr_db@{Q}"].append(audio.si_sdr(fake, real).item())
        # Leave out the codes of the padding.
        frames = -(-batch["length"][:, None] // codec.hop_length)  # rounded up
        codes_seen.append(codes.cpu()[torch.arange(codes.shape[1]) < frames])

    metrics = loop.means(found)
    entropies, _ = tokens.code_entropies(codes_seen, Q, cfg.codebook_size)
    for q, perplexity in enumerate(entropies.exp().tolist(), 1):
        metrics[f"codebook_perplexity@{q}"] = perplexity
    return metrics


def reconstructions(codec, split):
    """Yield the first recordings of a split and their reconstructions, for `write_sounds`."""
    dataset, indices = split
    usable = dataset.load_usable(indices[:NUM_SOUNDS])
    for number, (index, wave) in enumerate(usable.items()):
        # Decoded audio consists of whole frames, so cut it to the length of the recording.
        yield f"{number}_real", wave, dataset.names[index]
        yield number, codec.decode(codec.encode(wave))[: len(wave)], dataset.names[index]


# Training


def augment(waves):
    """Change the loudness of waves (B, T) by -10 to 6 dB; mix about half of them with another wave.

    This follows EnCodec (§4.1), and reduces overfitting on small data sets.
    """
    size = len(waves), 1
    device = waves.device
    # How much of another wave of the batch to mix into each wave; 0 for about half of the waves.
    share = torch.rand(size, device=device) * (torch.rand(size, device=device) < 0.5)
    decibels = torch.rand(size, device=device) * 16 - 10
    return (waves + share * waves.roll(1, 0)) * 10 ** (decibels / 20)


@torch.no_grad()
def initialize_codebooks(codec, cfg, dataset, indices, device):
    """Initialize the codebooks by k-means on frames of training crops, without augmentation.

    The result does not depend on the number of ranks. Collective.
    """
    if codec.quantizer.ready:  # --init_from supplied the codebooks
        return
    chunks = loader.ChunkDataset(dataset, indices, accumulate.derive_seed(cfg.seed, "codebooks"))
    per_crop = math.ceil(cfg.crop / codec.hop_length)  # frames
    crops = math.ceil(32 * cfg.codebook_size / per_crop)  # 32 frames per code
    # Encoding one chunk at a time needs no more memory than a training step.
    frames = []
    for start in range(0, crops, cfg.chunk_size):
        wave = codec.emphasize(chunks[start, start + cfg.chunk_size]["wave"].to(device))
        frames.append(codec.encode_latents(wave).flatten(0, 1).float())  # (B · frames, D)
    # The last chunk may have more crops than needed.
    seed = accumulate.derive_seed(cfg.seed, "kmeans")
    frames = torch.cat(frames)[: crops * per_crop]
    codec.quantizer.initialize(frames, seed, cfg.batch_size * per_crop)


def train_soundstream(cfg, device):
    # Rank 0 locks the run folder, then all ranks open the data.
    run, cfg = resume.open_run(cfg, f"{cfg.run_dir}/{cfg.stage}", MAX_CHUNK)
    hop_length = math.prod(cfg.strides)
    splits = dist.on_all(lambda: open_recordings(cfg, hop_length, cfg.crop))
    dataset, indices = splits["train"]
    identity = resume.identify(run, cfg, splits)
    if run.results:  # the run is finished
        return loop.announce(run, cfg)

    # Build the codec, the discriminators, their optimizers and the EMA. Restore them on resume.
    accumulate.seed_all(cfg.seed, "weights")  # all ranks start with the same weights
    codec = soundstream.SoundStream(cfg).to(device)  # encoder, quantizer, decoder
    optimizers = optim.make(codec, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    others = {}  # modules besides the codec, for the checkpoint
    discriminator_optimizers = []
    if cfg.is_adversarial:
        discriminators = soundstream.make_discriminators(cfg.channels, cfg.stft_window).to(device)
        others["discriminators"] = discriminators
        discriminator_optimizers = optim.make(
            discriminators, "adamw", cfg.discriminator_lr, 0.0, cfg.betas, cfg.eps
        )
    scaler = amp.scaler(device, cfg.precision)  # shared by codec and discriminators
    # Average the codebooks, too, because they change together with the weights.
    ema = EMA(
        codec,
        cfg.ema_update_every,
        cfg.ema_decay,
        cfg.ema_update_after,
        buffers=(CODEBOOK,),
    )
    state = resume.State(
        cfg,
        codec,
        ema,
        [*optimizers, *discriminator_optimizers],
        scaler,
        identity,
        {"kind": "soundstream"},
        others=others,
    )
    resume.restore(run, state)  # or load the weights of --init_from
    if cfg.compile:
        codec.compile()

    # The order of samples is a function of seed and step.
    plan, batches = loader.train_batches(cfg, dataset, indices, state.step, device)
    about = f"{len(dataset):,} recordings"
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    def evaluate(split, name):
        """Evaluate the averaged weights; returns (metrics, {audio file: caption})."""
        with ema.applied(codec):
            metrics = evaluate_codec(codec, cfg, split, device)
            written = reconstructions(codec, split)
            samples = sounds.write_sounds(written, cfg.sample_rate, run.folder, name)
        return metrics, samples

    # Open the logger and write config.json.
    with loop.begin(run, state, about, device) as progress:
        while True:
            # Evaluate the averaged weights. Before k-means there are no codes to evaluate. val_loss
            # excludes the commitment and adversarial losses.
            if eval_due() and codec.quantizer.ready:
                with progress.paused():
                    metrics, samples = evaluate(splits["validation"], f"step_{state.step:08d}")
                metrics["val_loss"] = metrics.pop("loss")
                progress.log_evaluation(metrics, samples)  # also saves the best model
            if state.step >= cfg.steps:
                break

            # Set the learning rates. Initialize the codebooks once the encoder is partly trained.
            codec.train()
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if state.step == cfg.quantizer_start:
                initialize_codebooks(codec, cfg, dataset, indices, device)
                ema.restart(CODEBOOK)
            discriminator_lr = schedule.learning_rate(
                state.step,
                cfg.discriminator_lr,
                cfg.discriminator_warmup_steps,
                cfg.steps,
                cosine=False,
            )
            schedule.set_learning_rate(discriminator_optimizers, discriminator_lr)
            r1_weight = cfg.r1_weight if state.step % R1_EVERY == 0 else 0.0

            # Take one optimizer step of the codec, and one of the discriminators on the same fakes.
            step_batches = [next(batches) for _ in plan]
            stepped = False
            while not stepped:  # an fp16 overflow repeats the step with a smaller loss scale
                chunk_losses = []  # each summed over its samples
                discriminator_sum = torch.zeros((), device=device)  # summed over samples, too
                for chunk, batch in zip(plan, step_batches):
                    # Randomness depends only on (seed, step, chunk), not on the rank.
                    accumulate.seed_all(cfg.seed, state.step, chunk.index)
                    real = batch["wave"].to(device, non_blocking=True)
                    if cfg.augment:
                        real = augment(real)
                    real = codec.emphasize(real)
                    with amp.autocast(device, cfg.precision):
                        fake, _, commitment = codec(real)
                        loss = cfg.commitment_weight * commitment
                        loss = loss + soundstream.reconstruction_loss(fake, real, cfg)
                        if cfg.is_adversarial:
                            hinge, features = soundstream.adversarial_loss(
                                discriminators, fake, real
                            )
                            loss = loss + cfg.adversarial_weight * hinge
                            loss = loss + cfg.feature_weight * features
                    # Chunk weights sum to 1, so the gradients add up to the gradient of the mean
                    # loss.
                    with dist.sum_gradients(codec, chunk is plan[-1]):  # over all ranks
                        scaler.scale(loss * chunk.weight).backward()
                    chunk_losses.append(loss.detach() * chunk.size)
                    # The discriminators train on the same fakes, before the codec is updated.
                    if cfg.is_adversarial:
                        with amp.autocast(device, cfg.precision):
                            loss = soundstream.discriminator_loss(
                                discriminators, fake, real, r1_weight
                            )
                        with dist.sum_gradients(discriminators, chunk is plan[-1]):
                            scaler.scale(loss * chunk.weight).backward()
                        discriminator_sum += loss.detach() * chunk.size
                grad_norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
                # If only the discriminators overflow, they skip the step that the codec has taken.
                if stepped and cfg.is_adversarial:
                    norm, taken = amp.step(scaler, discriminator_optimizers, cfg.max_grad_norm)
                    if taken:  # 0 · nan is nan, so a non-finite norm of either model ends the run
                        grad_norm = grad_norm + 0 * norm
                scaler.update()
                codec.zero_grad()
                for module in others.values():
                    module.zero_grad()
                if not stepped:
                    codec.quantizer.discard()  # drop the statistics of the failed attempt
                progress.count_overflow(stepped)
            # Update the codebooks with the statistics of all ranks, and replace dead codes.
            codec.quantizer.update(accumulate.derive_seed(cfg.seed, "codes", state.step))
            state.step += 1
            ema.update(state.step)
            progress.add(
                chunk_losses, grad_norm, step_batches, discriminator_loss=discriminator_sum
            )

            # Log and save. After a signal to any rank, all ranks stop, and `loop.begin` saves.
            if state.step % cfg.log_every == 0 or state.step == cfg.steps:
                progress.log_line()  # synchronizes ranks and device
            if save_due():
                progress.save()
            dist.stop_together()

        # Test the averaged weights, then write model.pt.
        metrics, samples = evaluate(splits["test"], "test")
        progress.finish(metrics, samples)


def load_codec(folder, device, name="", weights="ema"):
    """Load the codec of a run folder, or a published codec (hf:MODEL), in eval mode and frozen.

    name: file name, see `checkpoint.model_file`. The default is the last codec, not the best,
    because the validation loss leaves out the discriminators.
    """
    if folder.startswith("hf:"):
        from common.interop.codecs import PublishedCodec

        return PublishedCodec(folder, device)
    if weights == "ema":  # do not default to best.pt
        name = name or "model.pt"
    file = checkpoint.model_file(folder, name, weights)
    cfg, contents = checkpoint.read_model({"soundstream": CodecConfig}, file, weights)
    codec = soundstream.SoundStream(cfg)
    codec.checksum = checkpoint.checksum(file)[:16]  # identifies cached tokens
    checkpoint.load_weights(codec, contents["model"], file)
    return codec.to(device).eval().requires_grad_(False)


# Part 2: AudioLM

# AudioLM needs a codec, a SoundStream or a published one (`interop.codecs`), on any device. Its
# methods are encode(wave (T,)) -> codes (frames, Q) and decode(codes (frames, n)) -> wave, with
# tensors on the CPU. Its attributes are sample_rate, hop_length, frame_rate, num_quantizers,
# codebook_size and checksum (of its file).

# Config


@dataclass(frozen=True)
class TransformerConfig(SharedConfig):
    """Token transformer: model and optimization"""

    seconds: PositiveFloat = field(1.2, "length of a training crop", fixed=True)
    shifts: PositiveInt = field(
        1, "copies of a recording, shifted by parts of a frame; helps small data sets", fixed=True
    )
    join: Fraction = field(
        0.0,
        "probability of appending another recording of the same speaker, so that short recordings "
        "also teach what follows a word",
        fixed=True,
    )
    # Model
    width: PositiveInt = model_field(128, "width of the transformer")
    depth: PositiveInt = model_field(4, "number of blocks")
    heads: PositiveInt = model_field(4, "number of attention heads")
    dropout: Fraction = field(0.1, "dropout in attention and feed-forward")  # §IV-A
    # Optimization
    steps: PositiveInt = field(300, "optimizer steps")
    batch_size: PositiveInt = field(64, "samples per step, over all ranks", fixed=True)
    optimizer: Optimizer = field("adamw", "muon: Muon for matrices, AdamW for the rest")
    lr: PositiveFloat = field(3e-3, "peak learning rate")
    weight_decay: NonNegativeFloat = field(0.01, "decoupled weight decay of matrices")
    betas: tuple[Beta, Beta] = field(
        (0.9, 0.99), "Adam's decay rates of the first and second moments"
    )
    max_grad_norm: NonNegativeFloat = field(1.0, "clip gradients to this norm, 0: no clipping")
    # The decay warms up to this value (ema.py).
    ema_decay: Fraction = field(0.98, "maximum decay of the weight average, 0: no averaging")
    # Evaluation
    temperature: NonNegativeFloat = field(0.7, "sampling temperature, 0: the most probable code")
    eval_samples: NonNegativeInt = field(
        192, "held-out samples to evaluate on, 0: all", affects_val_loss=True
    )

    def __post_init__(self):
        super().__post_init__()
        # Rotary positions rotate pairs of a head's channels.
        if self.width % (2 * self.heads):
            raise UserError(
                f"--width {self.width}: expected an even multiple of --heads {self.heads}"
            )


@dataclass(frozen=True)
class SemanticConfig(TransformerConfig):
    """Semantic stage"""

    tokenizer: str = field(
        "mfcc",
        "semantic tokens: k-means on mfcc, or on hf:MODEL:LAYER (HuBERT, WavLM, w2v-BERT 2.0)",
        fixed=True,
    )
    clusters: CodebookSize = model_field(36, "size of the semantic vocabulary; AudioLM has 1,024")
    max_text_len: NonNegativeInt = model_field(
        24, "longest transcript in tokens; longer ones are cut; 0: no text"
    )


@dataclass(frozen=True)
class CodesConfig(TransformerConfig):
    """Codec of the coarse and fine stages"""

    sample_rate: NonNegativeInt = field(0, "samples per second; 0: the codec's", fixed=True)
    soundstream: str = field("", 'codec: run folder or hf:MODEL; "": RUN/soundstream')
    coarse_quantizers: PositiveInt = model_field(
        2, "quantizers predicted by coarse; fine predicts the rest, if any"
    )
    codec_quantizers: NonNegativeInt = model_field(
        0, "use only the first quantizers of the codec, 0: all"
    )


@dataclass(frozen=True)
class CoarseConfig(CodesConfig):
    """Coarse stage"""

    # In the same training time, Muon reaches a higher text_heard than AdamW.
    steps: PositiveInt = field(620, "optimizer steps")
    optimizer: Optimizer = field("muon", "muon: Muon for matrices, AdamW for the rest")
    lr: PositiveFloat = field(6e-3, "peak learning rate")


@dataclass(frozen=True)
class FineConfig(CodesConfig):
    """Fine stage"""

    seconds: PositiveFloat = field(0.4, "length of a training crop", fixed=True)
    steps: PositiveInt = field(150, "optimizer steps")


STAGES = {
    "soundstream": CodecConfig,
    "semantic": SemanticConfig,
    "coarse": CoarseConfig,
    "fine": FineConfig,
}

PROMPT_SECONDS = 0.4  # length of the prompts in evaluation
TEXT_WORDS = 320  # frequent words that get a token each; other words are spelled in bytes
TEXT_DROP = 0.1  # probability of dropping the text, for guidance

# Data: recordings as tokens


def make_features(tokenizer):
    """The audio features that --tokenizer names; semantic tokens are their clusters."""
    if tokenizer == "mfcc":
        return semantic.MFCC()
    from common.interop.speech import SpeechLayer

    return SpeechLayer(tokenizer)


def load_tokenizers(cfg, device):
    """Load (codec, k-means, made_with) for a coarse or fine stage.

    made_with: {name: plain value}, which identifies the tokens. A fine stage has no k-means.
    UserError if the codec does not fit `cfg`.
    """
    folder = cfg.soundstream or f"{cfg.run_dir}/soundstream"
    codec = load_codec(folder, device)
    if codec.sample_rate != (cfg.sample_rate or codec.sample_rate):
        raise UserError(
            f"--sample_rate {cfg.sample_rate}: expected the codec's rate, {codec.sample_rate}"
        )
    used = cfg.codec_quantizers or codec.num_quantizers
    fewest = cfg.coarse_quantizers
    if cfg.stage == "fine":
        fewest += 1
    if not fewest <= used <= codec.num_quantizers:
        raise UserError(
            f"--coarse_quantizers {cfg.coarse_quantizers}, --codec_quantizers {used}: the codec "
            f"has {codec.num_quantizers} quantizers, and {cfg.stage} needs {fewest} of them"
        )
    kmeans = None
    made_with = {"codec": codec.checksum, "coarse_quantizers": cfg.coarse_quantizers}
    if cfg.stage == "coarse":
        kmeans = tokens.load_kmeans(
            f"{cfg.run_dir}/semantic", codec.sample_rate, device, make_features
        )
        made_with["kmeans"] = kmeans.checksum
    return codec, kmeans, made_with


def make_streams(cfg, kmeans, codec):
    """The token streams of a stage. Its transformer predicts the last stream from the one before.

    kmeans, codec: None if the stage does not use their tokens.
    """
    streams = []
    if kmeans:
        streams.append(token_lm.Stream("semantic", 1, kmeans.clusters))
    if codec:
        streams.append(token_lm.Stream("coarse", cfg.coarse_quantizers, codec.codebook_size))
    if cfg.stage == "fine":
        used = cfg.codec_quantizers or codec.num_quantizers
        streams.append(token_lm.Stream("fine", used - cfg.coarse_quantizers, codec.codebook_size))
    return streams


# Evaluation


@torch.no_grad()
def evaluate_transformer(model, cfg, split, device):
    """{metric: value}: loss and accuracy (means over samples of means over tokens), as in training.

    unigram_entropy approximates the loss of a model that ignores context. split: (TokenCrops,
    indices). Collective.
    """
    model.eval()  # no dropout
    stream = model.streams[-1]
    found = collections.defaultdict(list)  # {metric: values}
    tokens_seen = []
    for _, batch in loader.eval_batches(*split, cfg.eval_samples, cfg.chunk_size):
        tokens_seen.append(batch["target"].flatten(0, 1))
        with amp.autocast(device, cfg.precision):
            loss, accuracy = model(loader.to_device(batch, device))
        found["loss"] += loss.tolist()
        found["accuracy"] += accuracy.tolist()
    metrics = loop.means(found)
    size = stream.codebook_size + 1  # with EOS
    entropies, counts = tokens.code_entropies(tokens_seen, stream.num_quantizers, size)
    metrics["unigram_entropy"] = (entropies @ counts / counts.sum()).item()
    return metrics


def continuations(model, cfg, split, codec):
    """Yield samples of the coarse or fine stage, conditioned on real tokens, for `write_sounds`.

    The coarse stage continues prompts, given real semantic tokens. The fine stage gets real coarse
    codes.
    """
    if not codec:  # the semantic stage makes no audio
        return
    crops, indices = split
    prompt_frames = 0  # the fine stage has no prompt, only coarse codes
    if cfg.stage == "coarse":
        prompt_frames = round(PROMPT_SECONDS * codec.frame_rate)

    def continuation(index):
        (context, real), _ = crops.crop(index)
        (codes,) = token_lm.generate_long(
            model,
            lambda b, codes, start: crops.window(index, start, len(real))[:1],
            [real[:prompt_frames]],
            [len(real)],
            [False],
            # The index seeds the sampling, so audio from different steps can be compared.
            [accumulate.derive_seed(cfg.seed, "sound", int(index))],
            token_lm.AS_TRAINED,
        )
        if cfg.stage == "fine":
            codes = torch.cat([context, codes], dim=1)
        return codes

    for number, index in enumerate(crops.readable(indices[:: cfg.shifts])[:NUM_SOUNDS]):
        yield number, codec.decode(continuation(index)), crops.dataset.names[index]


# Training


def check_init_from(path, made_with, vocabulary):
    """UserError if the transformer in the file `path` was trained on other tokens or words."""
    contents = checkpoint.load(path, "arguments", "made_with", mmap=True)
    words = contents["arguments"]["vocabulary"]
    if contents["made_with"] != made_with or words != vocabulary:
        raise UserError(
            f"--init_from {path}: trained on other tokens or words, so its embeddings do not fit"
        )


def train_transformer(cfg, device):
    # Rank 0 locks the run folder, then all ranks open the earlier stages and the data.
    run, cfg = resume.open_run(cfg, f"{cfg.run_dir}/{cfg.stage}", MAX_CHUNK)
    codec = None
    kmeans = None
    made_with = {}  # see `load_tokenizers`
    hop_length = 1  # the semantic stage takes recordings of any length
    if cfg.stage != "semantic":
        codec, kmeans, made_with = dist.on_all(lambda: load_tokenizers(cfg, device))
        # Replace the default, 0, before the data are opened.
        cfg = dataclasses.replace(cfg, sample_rate=codec.sample_rate)
        hop_length = codec.hop_length
    splits = dist.on_all(lambda: open_recordings(cfg, hop_length, shifts=cfg.shifts))
    dataset, indices = splits["train"]
    # A resumed run must keep its codec and k-means: others would make different tokens.
    identity = resume.identify(run, cfg, splits, **made_with)
    if run.results:  # the run is finished
        return loop.announce(run, cfg)

    # Tokenize all recordings that are not tokenized yet. The semantic stage fits its k-means first.
    if cfg.stage == "semantic":
        kmeans = tokens.fit_kmeans(run, dataset, indices, cfg, device, make_features)
        made_with = {"kmeans": kmeans.checksum}
    streams = make_streams(cfg, kmeans, codec)
    splits = tokens.tokenize_splits(cfg, splits, streams, token_lm.lay_out, kmeans, codec)
    crops, indices = splits["train"]
    if cfg.join:
        crops.join_within(indices, cfg.join)

    # Build model, optimizer and EMA. Restore them on resume.
    vocabulary = []
    longest_text = 0
    # Only the semantic stage sees the text. Semantic tokens carry the content to the other stages.
    if cfg.stage == "semantic" and cfg.max_text_len:
        vocabulary, longest_text = tokens.learn_vocabulary(
            crops, indices, TEXT_WORDS, cfg.max_text_len
        )
    accumulate.seed_all(cfg.seed, "weights")  # all ranks start with the same weights
    # Plain values for model files. They include the lengths that limit generation.
    arguments = {
        "streams": list(map(list, streams)),
        "vocabulary": vocabulary,
        "longest_text": longest_text,
        **crops.lengths(indices),
    }
    model = token_lm.TokenTransformer(cfg, **arguments).to(device)
    optimizers = optim.make(model, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(model, cfg.ema_update_every, cfg.ema_decay, cfg.ema_update_after)
    info = {"kind": cfg.stage, "arguments": arguments, "made_with": made_with}
    if cfg.init_from and not run.resume_from:
        dist.on_main(lambda: check_init_from(cfg.init_from, made_with, vocabulary))
    state = resume.State(cfg, model, ema, optimizers, scaler, identity, info)
    resume.restore(run, state)  # or load the weights of --init_from
    if cfg.compile:
        compile_blocks(model.transformer.blocks)

    # The order of samples is a function of seed and step.
    plan, batches = loader.train_batches(cfg, crops, indices, state.step, device)
    about = f"{len(dataset):,} recordings"
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    def evaluate(split, name):
        """Evaluate the averaged weights; returns (metrics, {audio file: caption})."""
        with ema.applied(model):
            metrics = evaluate_transformer(model, cfg, split, device)
            written = continuations(model, cfg, split, codec)
            samples = sounds.write_sounds(written, cfg.sample_rate, run.folder, name)
        return metrics, samples

    # Open the logger and write config.json.
    with loop.begin(run, state, about, device) as progress:
        while True:
            # Evaluate. Sampling uses the averaged weights, so val_loss and best.pt use them, too.
            if eval_due():
                with progress.paused():
                    metrics, samples = evaluate(splits["validation"], f"step_{state.step:08d}")
                metrics["val_loss"] = metrics.pop("loss")
                metrics["val_accuracy"] = metrics.pop("accuracy")
                progress.log_evaluation(metrics, samples)  # also saves the best model
            if state.step >= cfg.steps:
                break

            # Take one optimizer step. The learning rate depends only on the step.
            model.train()
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            step_batches = [next(batches) for _ in plan]
            stepped = False
            while not stepped:  # an fp16 overflow repeats the step with a smaller loss scale
                chunk_losses = []  # each summed over its samples
                with amp.shared_cast_cache(device):
                    for chunk, batch in zip(plan, step_batches):
                        # Randomness depends only on (seed, step, chunk), not on the rank.
                        accumulate.seed_all(cfg.seed, state.step, chunk.index)
                        batch = loader.to_device(batch, device)
                        drop = torch.rand(len(batch["inputs"]), device=device) < TEXT_DROP
                        with amp.autocast(device, cfg.precision):
                            losses, _ = model(batch, drop)
                            loss = losses.mean()  # long and short samples count the same
                        with dist.sum_gradients(model, chunk is plan[-1]):  # over all ranks
                            scaler.scale(loss * chunk.weight).backward()
                        chunk_losses.append(loss.detach() * chunk.size)
                grad_norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
                scaler.update()
                model.zero_grad()
                progress.count_overflow(stepped)
            state.step += 1
            ema.update(state.step)
            progress.add(chunk_losses, grad_norm, step_batches)

            # Log and save. After a signal to any rank, all ranks stop, and `loop.begin` saves.
            if state.step % cfg.log_every == 0 or state.step == cfg.steps:
                progress.log_line()  # synchronizes ranks and device
            if save_due():
                progress.save()
            dist.stop_together()

        # Test the averaged weights, then write model.pt.
        metrics, samples = evaluate(splits["test"], "test")
        progress.finish(metrics, samples)


# Part 3: pipeline and commands

# The pipeline: text -> semantic -> coarse -> fine -> wave (AudioLM, Fig. 2)


class Prompt(NamedTuple):
    """Audio to continue, as semantic tokens and as codes."""

    semantic: torch.Tensor  # (N, 1)
    codes: torch.Tensor  # (T, Q)


def load_transformer(stage, folder, device, name="", weights="ema"):
    """Load the model in a stage's run folder, in eval mode and frozen.

    name: file name, see `checkpoint.model_file`.
    """
    file = checkpoint.model_file(folder, name, weights)
    cfg, contents = checkpoint.read_model({stage: STAGES[stage]}, file, weights)
    model = token_lm.TokenTransformer(cfg, **contents["arguments"])
    model.made_with = contents["made_with"]
    checkpoint.load_weights(model, contents["model"], file)
    return model.to(device).eval().requires_grad_(False)


class Pipeline:
    """The transformers in a folder of runs, with their codec and semantic tokenizer.

    UserError if they were trained on different tokens.
    """

    def __init__(self, args, device):
        """args: an EvaluateConfig or SampleConfig. args.fine: whether to load the fine stage."""

        def load(stage):
            folder = f"{args.run_dir}/{stage}"
            return load_transformer(stage, folder, device, args.model, args.weights)

        self.semantic = load("semantic")
        self.coarse = load("coarse")
        # Load the coarse stage's codec and k-means, from args.run_dir even if the folder was moved.
        cfg = dataclasses.replace(self.coarse.cfg, run_dir=args.run_dir)
        self.codec, self.kmeans, expected = load_tokenizers(cfg, device)
        self.models = [self.semantic, self.coarse]
        self.fine = None
        used = cfg.codec_quantizers or self.codec.num_quantizers
        if args.fine and cfg.coarse_quantizers < used:  # coarse may predict all codes
            self.fine = load("fine")
            self.models.append(self.fine)
        for model in self.models:
            # The semantic stage depends only on the k-means.
            if not model.made_with.items() <= expected.items():
                raise UserError(
                    f"{args.run_dir}/{model.cfg.stage}: trained on other tokens, "
                    f"{model.made_with}; coarse and its files have {expected}"
                )

    def prompt(self, wave):
        """The Prompt for a wave (T,), which is cut to whole frames. Audio continues at its end."""
        wave = wave[len(wave) % self.codec.hop_length :]  # cut the start, not the end
        frames = len(wave) * semantic.FRAME_RATE // self.codec.sample_rate
        # Leave out an incomplete last frame, which would be mostly silence.
        tokens_of_wave = self.kmeans.encode(wave)[: max(1, frames)]
        content = tokens_of_wave.unique_consecutive()[:, None]
        return Prompt(content, self.codec.encode(wave))

    def empty_prompt(self):
        codes = torch.zeros(0, self.codec.num_quantizers).long()
        return Prompt(codes[:, :1], codes)  # semantic tokens have a single quantizer

    def generate(self, prompts, seconds, seeds, texts=(), sampling=token_lm.AS_TRAINED):
        """Codes (T, Q) for each of B prompts: the prompt's codes, and up to `seconds` more.

        texts: one per prompt, or none. With a text, audio ends with EOS; a long text is spoken in
        parts, all in the same voice. Without a text, audio lasts the full `seconds` (§III-D).
        """
        texts = texts or [""] * len(prompts)

        def generate_stage(model, context_of, prompts, limits, seeds, texts, may_end):
            stage_seeds = [accumulate.derive_seed(seed, model.cfg.stage) for seed in seeds]
            return token_lm.generate_long(
                model, context_of, prompts, limits, may_end, stage_seeds, sampling, texts
            )

        # Content: semantic tokens, from the text or the prompt (§III-C1). As the first stream,
        # they have no context.
        more = math.ceil(seconds * self.semantic.frame_rate)
        parts = []  # (sample, text, prompt tokens, maximum tokens, seed)
        for b, (prompt, text) in enumerate(zip(prompts, texts)):
            known = prompt.semantic  # (N, 1)
            for number, part in enumerate(self.semantic.split_text(text)):
                # In training, a text goes with a whole recording, so a part must fit in one window.
                limit = self.semantic.max_frames if part else len(known) + more
                seed = accumulate.derive_seed(seeds[b], number) if number else seeds[b]
                parts.append((b, part, known, limit, seed))
                known = known[:0]  # only the first part continues the prompt
        # The parts are independent of each other, so generate them as one batch.
        owners, part_texts, known, limits, part_seeds = map(list, zip(*parts))
        spoken = generate_stage(
            self.semantic,
            lambda i, codes, start: [],
            known,
            limits,
            part_seeds,
            part_texts,
            list(map(bool, part_texts)),
        )
        content = []  # B of (N, 1)
        for b in range(len(prompts)):
            of_sample = [part for owner, part in zip(owners, spoken) if owner == b]
            # A part may begin with the last token of the previous part.
            content.append(torch.cat(of_sample).unique_consecutive(dim=0))
        windows = [(0, 0)] * len(prompts)  # start of the latest window: (code frame, token)

        def content_from(b, codes, start):
            """The semantic tokens of sample b for a window that starts at frame `start` of `codes`.

            Semantic tokens have no repetitions and thus no timing, so they are aligned with the
            audio so far.
            """
            if start:
                ratio = semantic.FRAME_RATE / self.codec.frame_rate
                before, token = windows[b]
                spoken_tokens = self.kmeans.encode(self.codec.decode(codes))
                spoken_tokens = spoken_tokens[round(before * ratio) :]  # since that window's start
                places = tokens.align(content[b][token:, 0].numpy(), spoken_tokens.numpy())
                # A window may begin where the audio so far ends: then take the last frame.
                frame = min(round(start * ratio) - round(before * ratio), len(places) - 1)
                token += places[frame]
                windows[b] = start, token
            _, token = windows[b]
            return [content[b][token:]]

        # Voice and sound: coarse codes, from the semantic tokens (§III-C2), up to EOS.
        num_coarse = self.coarse.streams[-1].num_quantizers  # Q'
        known = [prompt.codes[:, :num_coarse] for prompt in prompts]  # B of (T, Q')
        more = max(1, round(seconds * self.codec.frame_rate))
        limits = [len(prompt) + more for prompt in known]
        may_end = list(map(bool, texts))
        coarse = generate_stage(self.coarse, content_from, known, limits, seeds, texts, may_end)
        if not self.fine:
            return coarse

        # Detail: fine codes, from the coarse codes (§III-C3).
        stop = num_coarse + self.fine.streams[-1].num_quantizers
        details = generate_stage(
            self.fine,
            lambda b, codes, start: [coarse[b][start:]],
            [prompt.codes[:, num_coarse:stop] for prompt in prompts],
            [len(codes) for codes in coarse],
            seeds,
            texts,
            [False] * len(prompts),
        )
        return [torch.cat(pair, dim=1) for pair in zip(coarse, details)]


# Commands

CONTINUE_SECONDS = 1.0  # length of continuations in evaluation
EVAL_BATCH = 48  # recordings per batch


@dataclass(frozen=True)
class EvaluateConfig(config.Inference):
    """What to evaluate"""

    run_dir: str = field("runs/audio", "folder of the runs, one per stage")
    eval_samples: NonNegativeInt = field(192, "maximum test recordings to continue, 0: all")
    out: str = field("", 'folder for scores.json and sounds/; "": the folder of the runs')

    fine: ClassVar[bool] = True  # evaluate all stages


def evaluate_pipeline(args, device=None):
    """Continue recordings of the test split, and print metrics. Collective.

    Metrics also go to scores.json, audio to sounds/. The built-in recordings have more metrics
    (`syllables.SyllableScores`).
    """
    device = device or dist.setup(args.device)
    out = args.out or args.run_dir
    pipeline = dist.on_all(lambda: Pipeline(args, device))
    hop_length = pipeline.codec.hop_length
    rate = pipeline.codec.sample_rate
    # Nothing is trained, so the training split may be smaller than a batch.
    cfg = dataclasses.replace(pipeline.coarse.cfg, batch_size=1)
    splits = dist.on_all(lambda: open_recordings(cfg, hop_length))
    dataset, indices = splits["test"]
    indices = order.some_of(indices, args.eval_samples)
    found = collections.defaultdict(list)  # {metric: values}
    scores = None
    if cfg.data == "syllables":
        _, training = splits["train"]
        scores = syllables.SyllableScores(pipeline, dataset, training[:200], found)

    files.mark_output(f"{out}/sounds")
    for number in dist.my_share(math.ceil(len(indices) / EVAL_BATCH)):
        first = number * EVAL_BATCH
        usable = dataset.load_usable(indices[first : first + EVAL_BATCH])
        prompts = []
        for wave in usable.values():  # prompts are whole frames, at most half a recording
            frames = min(round(PROMPT_SECONDS * rate), len(wave) // 2) // hop_length
            prompts.append(pipeline.prompt(wave[: max(1, frames) * hop_length]))
        seeds = [accumulate.derive_seed(args.seed, "goes on", index) for index in usable]
        generated = pipeline.generate(prompts, CONTINUE_SECONDS, seeds)
        for i, (index, wave) in enumerate(usable.items()):
            start = len(prompts[i].codes) * hop_length  # where the continuation starts
            sound = pipeline.codec.decode(generated[i])
            found["seconds_added"].append((len(sound) - start) / rate)
            if scores:
                scores.add_continuation(index, wave, sound, start)
            if first + i < NUM_SOUNDS:
                path = f"{out}/sounds/{i}"
                sounds.write_sound(wave, rate, f"{path}_real.wav")
                sounds.write_sound(sound, rate, f"{path}_continued.wav")
        if scores and pipeline.semantic.has_text:
            scores.add_texts(usable, seeds)
    metrics = loop.means(found)
    tracker.print_results(f"All stages together ({out}/sounds):", metrics)
    if dist.is_main():
        checkpoint.write_json(metrics, f"{out}/scores.json")
        print(f"\nNext: python train_audio.py sample --run_dir {shlex.quote(args.run_dir)}")


@dataclass(frozen=True)
class SampleConfig(config.Inference):
    """What to sample"""

    run_dir: str = field("runs/audio", "folder of the runs, one per stage")
    text: str = field(
        "", "text to speak, including that of --prompt; with neither, generation is unconditional"
    )
    prompt: str = field("", "recording to continue, in its voice")
    prompt_seconds: NonNegativeFloat = field(
        0.0, "seconds to use from the end of the prompt, 0: as much as coarse was trained on"
    )
    seconds: PositiveFloat = field(2.0, "maximum seconds after the prompt")
    temperature: float = field(
        -1.0, "sampling temperature, 0: most probable codes, below 0: as in training"
    )
    top_k: NonNegativeInt = field(0, "sample from the k most probable codes, 0: all")
    guidance_scale: NonNegativeFloat = field(1.0, "guidance scale for the text, 1: none")
    fine: bool = field(True, "run the fine stage; off: decode only the coarse codes")
    reconstruct: str = field("", "recording to encode and decode with the codec")
    soundstream: str = field("", 'codec for --reconstruct: run folder or hf:MODEL; "": RUN\'s')
    num_quantizers: NonNegativeInt = field(0, "quantizers to decode in --reconstruct, 0: all")
    out: str = field("out.wav", "WAV file to write")

    def __post_init__(self):
        super().__post_init__()
        if not self.out.endswith(".wav"):
            raise UserError(f"--out {self.out}: expected a name that ends in .wav")
        if self.text and not self.text.strip():
            raise UserError("--text: no text in it; leave it out")
        if self.reconstruct:
            sampling = token_lm.SamplingParams._fields
            names = ["text", "prompt", "prompt_seconds", "seconds", "fine"]
            config.check_unused(self, "with --reconstruct", *sampling, *names)
        else:
            config.check_unused(self, "without --reconstruct", "soundstream", "num_quantizers")
        if not self.prompt:
            config.check_unused(self, "without --prompt", "prompt_seconds")
        if not self.text:
            config.check_unused(self, "without --text", "guidance_scale")


def read_wave(path, codec, length=0):
    """Read the last `length` (0: all) samples of a recording; returns (wave (T,), its gain).

    The wave has the codec's sample rate. The gain brings the whole recording to LOUDNESS, as in
    training. UserError if the wave is shorter than a frame.
    """
    channels, rate, _ = recordings.read(path)
    wave = torch.from_numpy(recordings.mix_down(channels, path))
    mean, gain = audio.level(lambda start, stop: wave[start:stop], len(wave), rate)
    wave = audio.resample((wave - mean) * gain, rate, codec.sample_rate)[-length:]
    if len(wave) < codec.hop_length:
        raise UserError(f"{path}: {len(wave)} samples, shorter than a frame of {codec.hop_length}")
    return wave, gain


def continue_sound(args, device):
    """Generate audio from a text, a prompt, both, or neither; returns (codec, wave (T,))."""
    pipeline = Pipeline(args, device)
    if args.text and not pipeline.semantic.has_text:
        raise UserError(f"--text: {args.run_dir} was trained without texts; give --prompt")
    codec = pipeline.codec
    prompt = pipeline.empty_prompt()
    gain = 1.0
    if args.prompt:  # leave room for one new frame in a window of the coarse stage
        most = codec.hop_length * (pipeline.coarse.max_frames - 1)
        length = round(args.prompt_seconds * codec.sample_rate) or most
        wave, gain = read_wave(args.prompt, codec, min(length, most))
        prompt = pipeline.prompt(wave)
    # Different texts get different seeds.
    seed = accumulate.derive_seed(args.seed, args.text, 0)
    parts = pipeline.semantic.split_text(args.text)
    if len(parts) > 1:
        config.note(
            f"--text: longer than all training texts, so it is spoken in {len(parts)} parts: "
            f"{' | '.join(parts)}"
        )
    sampling = token_lm.SamplingParams(args.temperature, args.top_k, args.guidance_scale)
    (codes,) = pipeline.generate([prompt], args.seconds, [seed], [args.text], sampling)
    added = (len(codes) - len(prompt.codes)) / codec.frame_rate
    if args.text and added >= args.seconds:
        config.note(f"--seconds {args.seconds}: reached, so the audio may end before the text does")
    return codec, codec.decode(codes) / gain  # as loud as the prompt


def reconstruct(args, device):
    """Encode and decode a recording; returns (codec, wave (T,))."""
    folder = args.soundstream or f"{args.run_dir}/soundstream"
    codec = load_codec(folder, device, args.model, args.weights)
    count = args.num_quantizers or codec.num_quantizers
    if count > codec.num_quantizers:
        raise UserError(f"--num_quantizers {count}: the codec has {codec.num_quantizers}")
    wave, gain = read_wave(args.reconstruct, codec)
    # A code with K values has log2(K) bits.
    bitrate = count * math.log2(codec.codebook_size) * codec.frame_rate
    print(f"{count} codes per frame, {bitrate:.0f} bits per second")
    return codec, codec.decode(codec.encode(wave)[:, :count])[: len(wave)] / gain


def sample(args):
    """Write a WAV file of generated audio, or of a codec's reconstruction."""
    device = dist.choose_device(args.device)
    if not dist.is_main():  # a single process samples
        return
    make_sound = reconstruct if args.reconstruct else continue_sound
    codec, sound = make_sound(args, device)
    sounds.write_sound(sound, codec.sample_rate, args.out)
    print(f"wrote {args.out}")


TRAIN = {
    "soundstream": train_soundstream,
    "semantic": train_transformer,
    "coarse": train_transformer,
    "fine": train_transformer,
}


def train(cfg):
    """Train one stage, or train all in turn and then evaluate them together."""
    device = dist.setup(cfg.device, cfg.timeout_minutes, cfg.deterministic)
    configs = [cfg]
    if cfg.stage == "all":
        # Each stage is its own run, so the command resumes in the stage where it stopped.
        preset = PRESETS.get(cfg.preset, {})
        configs = [
            cls(**{**preset.get(stage, {}), **dataclasses.asdict(cfg), "stage": stage})
            for stage, cls in STAGES.items()
        ]
        codec, _, coarse, _ = configs
        used = coarse.codec_quantizers or codec.num_quantizers
        if coarse.coarse_quantizers == used:  # fine has no codes to predict
            configs.pop()
    for each in configs:  # a finished stage only prints its results
        TRAIN[each.stage](each, device)
    if cfg.stage == "all":
        evaluate_pipeline(EvaluateConfig(run_dir=cfg.run_dir, seed=cfg.seed), device)


# Presets

# Shared by the paper-sized models
LARGE = dict(
    lr=1e-4,
    steps=1_000_000,
    warmup_steps=1_000,
    cosine=False,  # the papers mention no learning rate decay
    ema_decay=0.9999,  # the papers have no EMA
    validation=0.01,
    test=0.01,
    log_every=100,
    eval_every=10_000,
    save_every=2_000,
    workers=4,
)
# SoundStream §III. Batch, crop, learning rates and commitment weight are not in the paper.
SOUNDSTREAM = dict(
    LARGE,
    sample_rate=16_000,  # AudioLM §IV-A; SoundStream: 24 kHz with 8 quantizers, which is 6 kbit/s
    channels=32,  # C_enc and C_dec (§III-A)
    latent_dim=512,  # D
    num_quantizers=12,  # 10 bits each, at 50 frames per second
    codebook_size=1024,  # K
    codebook_decay=0.99,  # §III-C
    quantizer_start=0,  # k-means before the first step (§III-C)
    wave_weight=0.0,  # not in the paper
    commitment_weight=1.0,
    # In the paper λ_rec, λ_adv and λ_feat are 1, 1 and 100, for losses that are sums. With the
    # weights below and trained discriminators, the gradients of the three losses at the wave are in
    # the ratio 1 : 0.6 : 1.4.
    mel_weight=1.0,
    adversarial_weight=0.3,
    feature_weight=3.0,
    discriminator_lr=1e-4,
    discriminator_warmup_steps=1_000,
    seconds=1.0,
    batch_size=64,
    chunk_size=16,
    optimizer="adamw",
    betas=(0.5, 0.9),  # the first is low, as in many GANs
)
# AudioLM §IV-A: 12 layers, 16 heads, width 1024; crops of 30, 10 and 3 s; 1M steps, batch 256.
# §IV-B: temperatures. The other settings are not in the paper. Its semantic tokens, 25 per second,
# are from layer 7 of w2v-BERT XL, which is not published. Here they are from w2v-BERT 2.0, 50 per
# second.
AUDIOLM = dict(
    LARGE,
    sample_rate=16_000,
    width=1024,  # §IV-A
    depth=12,
    heads=16,
    batch_size=256,
    chunk_size=8,  # a crop of 30 s has 1,500 tokens
    optimizer="adamw",
    lr=3e-4,
    warmup_steps=4_000,
    precision="bf16",
)
AUDIOLM_16KHZ = {
    "soundstream": SOUNDSTREAM,
    "semantic": dict(
        AUDIOLM,
        seconds=30.0,
        temperature=0.6,
        tokenizer="hf:facebook/w2v-bert-2.0:7",  # layer 7, as in the paper
        clusters=1024,
        max_text_len=0,  # the paper has no text
    ),
    "coarse": dict(AUDIOLM, seconds=10.0, temperature=0.8, coarse_quantizers=4),  # Q' = 4 of Q = 12
    "fine": dict(AUDIOLM, seconds=3.0, temperature=0.6, coarse_quantizers=4),
}
# For recordings of speech, on two cores. Tried on spoken digits: 600 recordings of four speakers.
# With --stage all, shared settings come from "all".
SPEECH = dict(log_every=50, eval_every="100", save_every="500")
SPEECH_TOKENS = dict(
    SPEECH,
    dropout=0.3,
    weight_decay=0.1,
    shifts=8,  # validation loss of coarse, 400 recordings: 0.16 lower than with 4
    steps=600,
    batch_size=32,
    lr=1e-3,
)
SPEECH_SMALL = {
    "all": SPEECH,
    "soundstream": dict(
        SPEECH,
        strides=(2, 4, 5, 4),  # 50 frames per second
        latent_dim=32,
        # 8 bits each: 1.6 kbit/s. A fifth quantizer makes no audible difference. With a larger
        # wave_weight, audio is cleaner (PESQ), but fewer words and voices are recognized.
        num_quantizers=4,
        wave_weight=1.0,
        mel_seconds=0.256,  # PESQ is 0.2 higher than with the paper's windows
        pre_emphasis=0.9,
        codebook_decay=0.99,
        quantizer_start=500,
        augment=True,
        steps=8_000,
    ),
    # Only recordings that fit in a crop have a text, so crops are long.
    "semantic": dict(
        SPEECH_TOKENS,
        seconds=10.0,
        join=0.5,
        clusters=64,
        max_text_len=64,
        dropout=0.2,
        steps=400,
        temperature=0.6,  # as in AudioLM §IV-B, like coarse's 0.8 below
    ),
    "coarse": dict(
        SPEECH_TOKENS,
        seconds=3.0,
        join=0.5,
        # The first two quantizers carry words and voices. From 400 recordings, a fine stage cannot
        # learn to predict the others.
        codec_quantizers=2,
        optimizer="adamw",
        temperature=0.8,
    ),
}
PRESETS = {
    "speech-small": SPEECH_SMALL,
    "audiolm-16khz": AUDIOLM_16KHZ,
}

COMMANDS = {
    "train": (train, {"all": SharedConfig, **STAGES}),
    "evaluate": (evaluate_pipeline, EvaluateConfig),
    "sample": (sample, SampleConfig),
}


def main():
    config.run(COMMANDS, __doc__, default="train", presets=PRESETS)


if __name__ == "__main__":
    main()
