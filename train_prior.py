"""Train a diffusion prior: CLIP text embedding -> CLIP image embedding (DALL-E 2, §2.2).

    torchrun --nproc_per_node=2 train_prior.py       # on captioned shapes that it makes itself
    torchrun --nproc_per_node=8 train_prior.py --data emb --run_dir runs/l14 --preset dalle2
    python train_prior.py --init_from runs/prior/model.pt --lora_rank 8 --run_dir runs/lora
    python train_prior.py evaluate --run_dir runs/prior
    python train_prior.py sample --text "a small red star" --num_samples 4 --out embeddings.npy

The same command again resumes. `python train_prior.py [train|evaluate|sample] --help` lists the
settings. DALL-E 2: Ramesh et al. 2022.

What differs from the paper:
- Text is encoded by a frozen CLIP, as in Karlo. DALL-E 2 trains a text transformer with its prior.
- The defaults are for minutes on two cores: a small model on the text embedding alone, embeddings
  of unit length, a cosine decay. `--preset dalle2` has the sizes and the optimizer of Table 3.
- Sampling takes evenly spaced steps of DDPM; Table 3 has the analytic variance of Bao et al. 2022.
  Estimates of x0 are bounded, as in Karlo.
- "No text" is the CLIP's encoding of "". It is zeros where no CLIP is loaded: if none is known, or
  for open_clip's without captions.
- Off by default, not in the paper: --noise_draws, --loss_weight, --dream, other objectives, LoRA.
"""

import os

# Set before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import dataclasses
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import (
    accumulate,
    amp,
    checkpoint,
    config,
    data,
    diffusion,
    dist,
    loop,
    optim,
    schedule,
    store,
    tracker,
)
from common.config import (
    Decay,
    Folder,
    Fraction,
    Layers,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    SizeOrZero,
    Timesteps,
    UserError,
    field,
)
from common.ema import EMA
from common.nn import NullText, TimeEmbedding, Transformer, causal_mask, learned_tokens

# Config


@dataclass(frozen=True)
class Config(config.TrainingRun):
    """Data, model and training of the prior"""

    # Run and data
    run_dir: Folder = field("runs/prior", "folder of this run; the same command again resumes it")
    data: str = field("shapes", 'folder with img_emb/ and text_emb/, or "shapes": built in')
    caption_key: str = field("", 'key of the captions in jsonl or parquet, "": caption')
    clip: str = field(
        "auto", "CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: DATA's"
    )
    # Model: a transformer over text and noised image embedding
    width: Size = field(192, "width of the transformer", model=True)
    # A few million parameters; the paper has a billion (--preset dalle2).
    depth: Layers = field(4, "number of blocks", model=True)
    heads: Size = field(3, "number of attention heads", model=True)
    dropout: Fraction = field(0.0, "dropout in attention and feed-forward")
    text_encodings: Literal["none", "shards", "clip"] = field(
        "none", "also condition on token encodings: from DATA/text_enc, or by the CLIP", model=True
    )
    max_text_len: Size = field(77, "longest text in tokens; longer is cut", model=True)
    raw_embeddings: bool = field(
        False, "embeddings as the CLIP gives them (Karlo), not of unit length", model=True
    )
    checkpointing: bool = field(False, "recompute blocks in the backward pass to save memory")
    lora_rank: SizeOrZero = field(
        0,
        "rank of adapters trained on the frozen --init_from, 0: train all weights",
        needs="init_from",
        fixed=True,
    )
    # Diffusion: DALL-E 2 predicts x0 under the cosine schedule
    objective: Literal["x0", "v", "epsilon", "flow"] = field(
        "x0", "what the network predicts", model=True
    )
    noise_schedule: Literal["cosine", "linear"] = field(
        "cosine", "noise schedule; flow has its own", model=True
    )
    timesteps: Timesteps = field(1000, "number of noise levels", model=True)
    # Uniform is DDPM's; the others are of SD3.
    timestep_density: Literal["uniform", "logit_normal", "mode"] = field(
        "uniform", "distribution of the timesteps in training (SD3 §3.1)"
    )
    density_mean: float = field(
        0.0, "mean of logit_normal; above 0: more noise", needs="timestep_density=logit_normal"
    )
    density_std: PositiveFloat = field(
        1.0, "standard deviation of logit_normal", needs="timestep_density=logit_normal"
    )
    loss_weight: Literal["none", "min_snr", "sigma_sqrt", "cosmap"] = field(
        "none", "weight of the loss by noise level; sigma_sqrt and cosmap: flow only"
    )
    loss_gamma: PositiveFloat = field(
        5.0, "gamma of min_snr (Hang et al. 2023)", needs="loss_weight=min_snr"
    )
    dream: bool = field(
        False,
        "perturb inputs by the model's own error (DREAM, Zhou et al. 2023)",
        needs="objective=epsilon",
    )
    # More draws cost little where the text is long, as they share its pass.
    noise_draws: Size = field(
        1, "(timestep, noise) draws a sample, which share one pass over its text", fixed=True
    )
    # "10% of the time" (DALL-E 2 §2.2)
    text_drop: Fraction = field(0.1, "probability of dropping the text, for guidance")
    # Optimization: minutes on two cores. The paper has no decay of the learning rate.
    steps: PositiveInt = field(1150, "optimizer steps")
    batch_size: PositiveInt = field(256, "samples a step, over all ranks", fixed=True)
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: for matrices, with AdamW for the others", fixed=True, inherit=True
    )
    lr: PositiveFloat = field(3e-3, "peak learning rate", inherit=True)
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay along half a cosine after the warm-up; off: constant")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
    # Decay is for what multiplies activations, not for biases, norms and learned tokens.
    weight_decay: NonNegativeFloat = field(0.01, "decoupled weight decay of matrices and kernels")
    beta1: Decay = field(0.9, "Adam's decay of the mean of gradients")
    beta2: Decay = field(0.99, "Adam's decay of the mean of their squares")
    eps: PositiveFloat = field(1e-8, "Adam's epsilon")
    max_grad_norm: NonNegativeFloat = field(1.0, "clip gradients to this norm, 0: no clipping")
    # What is sampled from and tested is this average.
    ema_decay: Fraction = field(0.9999, "decay of the averaged weights, 0: no averaging")
    ema_update_after: NonNegativeInt = field(0, "first steps, in which the average is a copy")
    ema_update_every: PositiveInt = field(1, "steps between updates of the average")
    # Evaluation, at the first log line after it is due
    eval_every: NonNegativeInt = field(575, "steps between evaluations, 0: only the last")
    eval_samples: NonNegativeInt = field(512, "samples an evaluation takes at most, 0: all")
    eval_timesteps: tuple[PositiveInt, ...] = field(
        (8, 64), "numbers of sampling steps to evaluate with", inherit=True
    )
    guidance_scale: NonNegativeFloat = field(1.0, "guidance in evaluation, 1: none", inherit=True)
    eta: Fraction = field(1.0, "noise of sampling: 1 as DDPM, 0 as DDIM", inherit=True)

    def __post_init__(self):
        super().__post_init__()
        # Attention splits the width into heads; the timestep embedding has sines and cosines.
        if self.width % self.heads or self.width % 2:
            raise UserError(
                f"--width {self.width}: expected an even multiple of --heads {self.heads}"
            )
        loop.check_diffusion(self)
        loop.check_sampling(self, self.guidance_scale, max(self.eval_timesteps, default=0))
        tracker.check(self)


MAX_CHUNK = 256  # samples in one forward pass, at most, where --chunk_size is 0

# fmt: off
# DALL-E 2's Table 3 for the diffusion prior, over the CLIP at hand.
DALLE2 = dict(
    clip="open_clip:ViT-L-14/openai",
    text_encodings="clip",  # of all tokens, besides the text embedding
    # Model
    width=2048, depth=24, heads=32,  # 1B parameters
    # Optimization: AdamW, linear warm-up, EMA of 0.9999
    optimizer="adamw", batch_size=4096, steps=600_000, lr=1.1e-4, warmup_steps=10_000,
    cosine=False, beta1=0.9, beta2=0.96, eps=1e-6, weight_decay=0.06,
    # Not in the paper: how to run it
    chunk_size=64, precision="bf16", workers=4,
    validation=0.01, test=0.01,
    log_every=100, eval_every=10_000, save_every=2_000,
)
# The sizes of the published configs. How these were trained is not public: the rest is DALL-E 2's.
KARLO = dict(DALLE2, depth=20, raw_embeddings=True, guidance_scale=4.0, eval_timesteps=(25,))
PRESETS = {
    "dalle2": DALLE2,
    "karlo": KARLO,
    "kandinsky-2-2": dict(KARLO, clip="open_clip:ViT-bigG-14/laion2b_s39b_b160k"),
}
# fmt: on

X0_BOUND = 10.0  # bound of |x0| in sampling, for raw embeddings (Karlo, Kandinsky)


# Model


class Prior(nn.Module):
    """Causal transformer: text encodings, text embedding | time, noised image embedding, query.

    The output at the learned query is the prediction (DALL-E 2 §2.2). This is the form of Karlo and
    Kandinsky, whose weights load (common/pretrained.py).

    The text prefix, before the bar, does not depend on the noise. So it is computed once: for all
    `noise_draws` of a sample in training, and for all steps in sampling.

    B batch, D width of embeddings, W width of the transformer, L text length, K noise draws, P
    tokens of the prefix.
    """

    def __init__(self, cfg, embed_width, encoding_width=0, text_width=0):
        """encoding_width: of the text encodings, 0 without them.

        text_width: of the text embeddings, 0 if it is that of the image embeddings.
        """
        super().__init__()
        self.cfg = cfg
        self.embed_width = embed_width
        self.text_width = text_width or embed_width
        width = cfg.width
        text_len = cfg.max_text_len if encoding_width else 0
        # Each kind of token has its own projection to the width of the transformer.
        if encoding_width:
            self.encoding_in = nn.Linear(encoding_width, width)
        self.text_in = nn.Linear(self.text_width, width)
        self.time_in = TimeEmbedding(width, width, cfg.timesteps)
        self.image_in = nn.Linear(embed_width, width)
        self.query = learned_tokens(1, width)  # the output here is the prediction
        self.positions = learned_tokens(text_len + 4, width)  # text, embedding, time, image, query
        self.null_text = NullText(self.text_width, encoding_width, text_len)  # the encoding of ""
        self.transformer = Transformer(
            width,
            cfg.depth,
            cfg.heads,
            rotary=False,
            dropout=cfg.dropout,
            checkpointing=cfg.checkpointing,
        )
        self.out = nn.Linear(width, embed_width)

        # Mean and standard deviation of image embeddings. Mean 0 and deviation 1/√D are used as
        # they are for embeddings of unit length; `measure_embeddings` replaces them for raw ones.
        self.register_buffer("clip_mean", torch.zeros(embed_width))
        self.register_buffer("clip_std", torch.full((embed_width,), embed_width**-0.5))

        # Noise levels (T,). They follow from the config, so they are not saved.
        schedule_name = "flow" if cfg.objective == "flow" else cfg.noise_schedule
        alpha, sigma = diffusion.alphas_sigmas(schedule_name, cfg.timesteps)
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("sigma", sigma, persistent=False)

    def measure_embeddings(self, image_embed):
        """Take mean and standard deviation from raw image embeddings (N, D) of training data."""
        self.clip_mean.copy_(image_embed.mean(0))  # (D,)
        # A dimension that is constant must not divide by zero.
        self.clip_std.copy_(image_embed.std(0).clamp(min=1e-6))

    def standardize(self, image_embed):
        """Image embeddings (…, D) of a CLIP -> x0 of mean 0 and variance 1, as the noise has."""
        if not self.cfg.raw_embeddings:
            image_embed = F.normalize(image_embed.float(), dim=-1)
        # Without this, embeddings of unit length would drown in noise of length √D.
        return (image_embed - self.clip_mean) / self.clip_std

    def destandardize(self, x0):
        """The inverse of `standardize`; of unit length unless the model is of raw embeddings."""
        image_embed = x0 * self.clip_std + self.clip_mean
        if not self.cfg.raw_embeddings:
            image_embed = F.normalize(image_embed, dim=-1)
        return image_embed

    def text_cache(self, condition, drop):
        """Run the text prefix; returns (its keys and values, which of its tokens are keys (B, P)).

        Where `drop` (B,) is true, the text is replaced by "no text".
        """
        condition = self.null_text(condition, drop)  # only the text is dropped, never x_t
        text_embed = condition["text_embed"]
        if not self.cfg.raw_embeddings:  # to length √D, as the noised image embedding has
            text_embed = F.normalize(text_embed.float(), dim=-1) * self.text_width**0.5
        tokens = self.text_in(text_embed)[:, None]  # (B, 1, W)
        key_mask = torch.ones_like(drop)[:, None]  # (B, 1), true; padding will be false
        if self.cfg.text_encodings != "none":
            encodings = self.encoding_in(condition["text_enc"])  # (B, L, W)
            tokens = torch.cat([encodings, tokens], dim=1)  # (B, P, W)
            key_mask = torch.cat([condition["text_mask"], key_mask], dim=1)  # (B, P)
        prefix_len = tokens.shape[1]
        tokens = tokens + self.positions.weight[:prefix_len].to(tokens.dtype)

        # A padding token sees itself alone: a row of the softmax must not be empty.
        itself = torch.eye(prefix_len, dtype=torch.bool, device=tokens.device)
        visible = key_mask[:, None, None] | itself
        mask = causal_mask(prefix_len, prefix_len, tokens.device) & visible  # (B, 1, P, P)
        # Nothing is predicted from the prefix: its keys and values are all that is used.
        _, cache = self.transformer(tokens, mask, keep=1, return_cache=True)
        return cache, key_mask

    def denoise(self, x_t, timestep, cache, key_mask):
        """Predictions (B, K, D) for x_t (B, K, D) at `timestep` (B, K), given the `text_cache`."""
        draws = timestep.shape[1]
        # Three tokens for each draw: timestep, noised image embedding, query.
        noised = self.image_in(x_t)  # (B, K, W)
        time = self.time_in(timestep.flatten()).unflatten(0, timestep.shape).to(noised.dtype)
        query = self.query.weight.to(noised.dtype).expand_as(noised)
        tokens = torch.stack([time, noised, query], dim=1)  # (B, 3, K, W)
        tokens = tokens + self.positions.weight[-3:, None].to(tokens.dtype)  # the last three

        # A token sees the whole text and, of its own draw, itself and the tokens before it. Tokens
        # are ordered by kind, then by draw: token (i, k) sees (j, k) for j <= i. With two draws:
        #   1 0 | 0 0 | 0 0     time, of draw 0 and of draw 1
        #   0 1 | 0 0 | 0 0
        #   1 0 | 1 0 | 0 0     noised image embedding
        #   0 1 | 0 1 | 0 0
        #   1 0 | 1 0 | 1 0     query
        #   0 1 | 0 1 | 0 1
        same_draw = torch.kron(torch.ones(3, 3).tril(), torch.eye(draws)).bool().to(x_t.device)
        same_draw = same_draw.expand(len(x_t), -1, -1)  # (B, 3K, 3K)
        text = key_mask[:, None].expand(-1, 3 * draws, -1)  # (B, 3K, P)
        mask = torch.cat([text, same_draw], dim=2)[:, None]  # (B, 1, 3K, P + 3K)
        # The last K tokens are the queries.
        return self.out(self.transformer(tokens.flatten(1, 2), mask, cache=cache, keep=draws))

    def forward(self, x_t, timestep, condition, drop):
        """Predictions (B, K, D) for K noise draws a sample, from one pass over its text."""
        cache, key_mask = self.text_cache(condition, drop)
        return self.denoise(x_t, timestep, cache, key_mask)


@torch.no_grad()
def conditioning(batch, cfg, clip_model):
    """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)}: the model's conditions.

    Captions in the batch are encoded by the CLIP `clip_model`; otherwise the batch has embeddings.
    An empty caption means unconditional.
    """
    if "caption" in batch:
        return clip_model.text_condition(batch["caption"], cfg.max_text_len)
    # Embeddings that were written beforehand, in float16 or float32
    condition = {"text_embed": batch["text_embed"].float()}  # (B, D)
    if "text_enc" in batch:
        encodings = batch["text_enc"].float()  # (B, L', E), of any length
        missing = cfg.max_text_len - encodings.shape[1]  # negative: longer texts are cut
        condition["text_enc"] = F.pad(encodings, (0, 0, 0, missing))
        condition["text_mask"] = condition["text_enc"].any(-1)  # rows of zeros are padding
    return condition


# Loss


def diffusion_loss(prior, batch, condition, plain=False):
    """Mean loss over a chunk.

    plain: without loss weights and DREAM, as in evaluation. The text is dropped all the same.
    """
    cfg = prior.cfg
    x0 = prior.standardize(batch["image_embed"])  # (B, D)
    x0 = x0[:, None].expand(-1, cfg.noise_draws, -1)  # (B, K, D)
    timestep = diffusion.sample_timesteps(
        cfg.timestep_density,
        x0.shape[:2],
        cfg.timesteps,
        x0.device,
        cfg.density_mean,
        cfg.density_std,
    )
    noise = torch.randn_like(x0)  # ε
    # Classifier-free guidance needs a model that also knows "no text". Only the text is dropped.
    drop = torch.rand(len(x0), device=x0.device) < cfg.text_drop

    # Forward process: x_t = α·x0 + σ·ε (DDPM Eq. 4).
    alpha = diffusion.extract(prior.alpha, timestep, x0)  # (B, K, 1)
    sigma = diffusion.extract(prior.sigma, timestep, x0)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)
    if cfg.dream and not plain:
        with torch.no_grad():
            prediction = prior(x_t, timestep, condition, drop).float()
        # autocast has cached the weights as they were cast under no_grad. With these the next pass
        # would have no gradients.
        torch.clear_autocast_cache()
        x_t, target = diffusion.dream(x_t, noise, prediction, sigma)

    # The loss is in fp32, whatever the precision of the model.
    prediction = prior(x_t, timestep, condition, drop)  # (B, K, D)
    loss = (prediction.float() - target) ** 2
    if not plain:  # the weight of a noise level
        weight = diffusion.loss_weight(cfg.loss_weight, cfg.objective, alpha, sigma, cfg.loss_gamma)
        loss = loss * weight
    return loss.mean()


# Sampling


@torch.no_grad()
def sample_embeddings(
    prior, condition, sampling_steps, guidance_scale=1.0, eta=1.0, noise_fn=torch.randn_like
):
    """Image embeddings (B, D) for the `conditioning` of B texts.

    They are of unit length, or raw, as those that the model was trained on. noise_fn(x): noise of
    the shape of x.
    """
    cfg = prior.cfg
    size = len(condition["text_embed"])
    device = prior.alpha.device

    # Guidance runs every text a second time as "no text". The noised input is the same for both.
    guided = guidance_scale != 1
    copies = 2 if guided else 1
    condition = {name: torch.cat([value] * copies) for name, value in condition.items()}
    drop = torch.arange(copies * size, device=device) >= size
    cache, key_mask = prior.text_cache(condition, drop)  # the text prefix, once for all steps

    # Bound of |x0|. An embedding of unit length has an x0 of length √D: no component is greater.
    bound = X0_BOUND if cfg.raw_embeddings else prior.embed_width**0.5

    def denoise(x_t, timestep):
        x_in = x_t.repeat(copies, 1)[:, None]  # (copies·B, 1, D), one draw a text
        t_in = timestep.repeat(copies)[:, None]
        prediction = prior.denoise(x_in, t_in, cache, key_mask)[:, 0].float()
        if guided:
            conditional, unconditional = prediction.chunk(2)
            prediction = diffusion.classifier_free_guidance(
                conditional, unconditional, guidance_scale
            )
        alpha = diffusion.extract(prior.alpha, timestep, x_t)
        sigma = diffusion.extract(prior.sigma, timestep, x_t)
        x0 = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma)
        return x0.clamp(-bound, bound)

    x_T = noise_fn(torch.empty(size, prior.embed_width, device=device))
    x0 = diffusion.sample(denoise, x_T, prior.alpha, prior.sigma, sampling_steps, eta, noise_fn)
    return prior.destandardize(x0)


@torch.no_grad()
def best_embeddings(
    prior,
    condition,
    keys,
    num_samples,
    sampling_steps,
    guidance_scale=1.0,
    eta=1.0,
    best_of=1,
    seed=0,
    max_batch=256,
):
    """(embeddings (texts, num_samples, D), cosine similarities with the texts).

    Each is the best of `best_of` candidates: the most similar to its text (DALL-E 2 §2.2). Texts of
    another width than D cannot be compared: each is the first candidate, of similarity nan.
    condition: `conditioning` of the texts. keys: one a text; a candidate's noise is seeded by
    (seed, key, number), so it is the same in any batch.
    """
    device = prior.alpha.device
    candidates = num_samples * best_of  # of each text
    inputs = {name: value.repeat_interleave(candidates, 0) for name, value in condition.items()}
    inputs["seeds"] = []
    for key in keys:
        inputs["seeds"] += [accumulate.derive_seed(seed, key, k) for k in range(candidates)]

    # Sample in batches that fit the memory.
    embeds = []
    for batch in accumulate.split(inputs, max_batch):
        noise_fn = diffusion.noise_generator(batch.pop("seeds"), device)
        with amp.autocast(device, prior.cfg.precision):
            out = sample_embeddings(prior, batch, sampling_steps, guidance_scale, eta, noise_fn)
        embeds.append(out.float())
    embeds = torch.cat(embeds).unflatten(0, (-1, num_samples, best_of))

    if prior.text_width != prior.embed_width:
        return embeds[:, :, 0], torch.full(embeds.shape[:2], torch.nan)
    # Keep the candidate that is the most similar to its text.
    text_embed = condition["text_embed"][:, None, None]  # (texts, 1, 1, D)
    similarity, best = F.cosine_similarity(embeds, text_embed, dim=-1).max(-1)
    # (texts, num_samples), as an index into the axis of candidates
    best = best[..., None, None].expand(-1, -1, 1, embeds.shape[-1])
    return embeds.gather(2, best).squeeze(2), similarity


# Evaluation


@dataclass
class Evaluator:
    """Metrics on held-out data; independent of the number of ranks, up to rounding. Collective."""

    cfg: Config
    splits: dict  # {split: (dataset, indices)}
    clip_model: nn.Module | None
    device: torch.device

    def loss(self, prior, split):
        """Mean diffusion loss over a split, without loss weights."""

        def loss_of(batch):
            condition = conditioning(batch, self.cfg, self.clip_model)
            return diffusion_loss(prior, batch, condition, plain=True)

        dataset, indices = self.splits[split]
        return loop.mean_loss(prior, loss_of, dataset, indices, self.cfg, self.device)

    def sample(self, prior, condition, sampling_steps):
        with amp.autocast(self.device, self.cfg.precision):
            return sample_embeddings(
                prior, condition, sampling_steps, self.cfg.guidance_scale, self.cfg.eta
            )

    @torch.no_grad()
    def metrics(self, prior, split):
        """Cosine similarities of embeddings sampled in each number of eval_timesteps.

        On the built-in data also caption_match and coverage.
        """
        mode = prior.training
        prior.eval()  # no dropout
        result = self.similarities(prior, split)
        dataset, _ = self.splits[split]
        if data.is_built_in(dataset.folder) and not self.cfg.val_data:
            result |= self.built_in_metrics(prior, split)
        prior.train(mode)  # as it was
        return result

    def similarities(self, prior, split):
        """{metric: mean cosine similarity} of sampled embeddings."""
        cfg = self.cfg
        dataset, indices = self.splits[split]
        size = min(len(indices), cfg.eval_samples or len(indices))
        indices = indices[np.arange(size)]
        # The unrelated text of a sample is that of the sample half the split away.
        unrelated = data.ChunkDataset(dataset, np.roll(indices, -(size // 2)))

        # Ranks take turns with the chunks. Sums are exact means in the end.
        sums = collections.defaultdict(float)
        for number, batch in data.batches(dataset, indices, 0, cfg.chunk_size):
            start = number * cfg.chunk_size
            other = unrelated[start, start + len(batch["index"])]
            batch = data.to_device(batch, self.device)
            other = data.to_device(other, self.device)
            condition = conditioning(batch, cfg, self.clip_model)
            references = {"image": batch["image_embed"]}
            sums["samples"] += len(batch["index"])
            if prior.text_width == prior.embed_width:  # else they cannot be compared
                references["text"] = condition["text_embed"]
                unrelated_condition = conditioning(other, cfg, self.clip_model)
                references["unrelated_text"] = unrelated_condition["text_embed"]
                baseline = F.cosine_similarity(references["text"], references["image"])
                sums["baseline_similarity"] += baseline.sum().item()
            for steps in cfg.eval_timesteps:
                # The same noise at every evaluation, so that metrics compare.
                accumulate.seed_all(cfg.seed, "similarities", number, steps)
                sampled = self.sample(prior, condition, steps)
                for name, reference in references.items():
                    similarity = F.cosine_similarity(sampled, reference).sum().item()
                    sums[f"similarity_with_{name}@{steps}"] += similarity

        # Means over all ranks.
        sums = dist.total_by_name(sums)
        samples = sums.pop("samples")
        means = {name: value / samples for name, value in sums.items()}
        if "baseline_similarity" in means:
            for steps in cfg.eval_timesteps:
                difference = means[f"similarity_with_text@{steps}"] - means["baseline_similarity"]
                means[f"difference_from_baseline@{steps}"] = difference
        return means

    def built_in_metrics(self, prior, split):
        """caption_match and coverage at the most sampling steps, and their ceilings.

        See `synthetic.embedding_scores`.
        """
        from common import synthetic

        steps = max(self.cfg.eval_timesteps)

        def sample_fn(batch):
            condition = conditioning(data.to_device(batch, self.device), self.cfg, self.clip_model)
            return self.sample(prior, condition, steps)

        scores = synthetic.embedding_scores(self.splits, split, sample_fn, self.cfg.seed)
        # Ceilings are of real embeddings: they have no number of steps.
        return {
            name if name.endswith("ceiling") else f"{name}@{steps}": value
            for name, value in scores.items()
        }


# Training


def open_data(cfg, device):
    """({split: (dataset, indices)}, CLIP or None, {name: plain value} of both for model files).

    The CLIP encodes captions for a model of --text_encodings clip, and "no text" for any.
    """
    spec, fingerprint = data.clip_of(cfg.data, cfg.init_from)
    if cfg.clip != "auto":
        spec = cfg.clip
    with_shards = cfg.text_encodings == "shards"
    with_captions = cfg.text_encodings == "clip"

    dataset = data.Embeddings(cfg.data, with_shards, with_captions, cfg.caption_key)
    data.check_lengths(cfg, dataset, cfg.data)
    val_dataset = None
    if cfg.val_data:
        val_dataset = data.Embeddings(cfg.val_data, with_shards, with_captions, cfg.caption_key)
        data.check_lengths(cfg, val_dataset, cfg.val_data)
        expected = (dataset.width, dataset.text_width)
        found = (val_dataset.width, val_dataset.text_width)
        if found != expected:
            raise UserError(
                f"--val_data {cfg.val_data}: image and text embeddings {found} wide, but those of "
                f"{cfg.data} are {expected}"
            )

    encoding_width = dataset.tables["text_enc"].shape[1] if with_shards else 0
    clip_model = None
    # open_clip's may be large, or have to be downloaded: it is loaded only if captions need it.
    if with_captions or (spec and not spec.startswith("open_clip:")):
        from common import clip

        clip_model = clip.load(spec, device, fingerprint)
        # A CLIP of other widths cannot have made these embeddings.
        clip.check_widths(
            clip_model, f"--clip {spec} for {cfg.data}", dataset.text_width, encoding_width
        )
        fingerprint = clip_model.fingerprint()
        if with_captions:
            encoding_width = clip_model.encoding_width
    widths = [dataset.width, encoding_width]
    if dataset.text_width != dataset.width:  # image and text embeddings of two encoders
        widths.append(dataset.text_width)
    # Stored with the model: what it takes to build it and to sample from texts.
    model_info = {
        "kind": "prior",
        "widths": widths,
        "clip": spec,
        "clip_fingerprint": fingerprint,
    }
    return data.splits(dataset, cfg, val_dataset), clip_model, model_info


def next_command(cfg, dataset, model_info):
    """The command to give after training."""
    command = "evaluate"  # without a CLIP there is no text to sample from
    if model_info["clip"]:
        text = "a small red star"
        if dataset.captions:
            text = data.choose_caption(dataset.records([0])[0]["caption"]) or text
        command = f"sample --text {shlex.quote(text)}"
    return f"train_prior.py {command} --run_dir {shlex.quote(cfg.run_dir)}"


def train(cfg):
    started = time.monotonic()
    given = cfg  # config.json has the settings as the user gave them

    # Join the ranks. Open the data, on rank 0 first; then rank 0 takes the run folder.
    device = dist.setup(cfg.device, cfg.timeout_minutes)
    loop.check_shared(cfg.run_dir)
    folder = Path(cfg.run_dir).parent  # of the built-in data
    cfg = dist.on_main(lambda: loop.prepare_config(given, MAX_CHUNK, folder, device))
    splits, clip_model, model_info = dist.main_first(lambda: open_data(cfg, device))
    dataset, indices = splits["train"]
    run = loop.open_run(cfg, dataset, clip_model)
    command = next_command(cfg, dataset, model_info)
    if run.finished:
        return loop.announce_finished(cfg, run, command)

    # Build model, optimizer and EMA. Restore them if resuming.
    accumulate.seed_all(cfg.seed, "weights")  # the same start on all ranks
    prior = Prior(cfg, *model_info["widths"]).to(device)
    if clip_model:
        prior.null_text.fill(conditioning({"caption": [""]}, cfg, clip_model))
    # Resumed or initialized weights bring the statistics of raw embeddings.
    if cfg.raw_embeddings and not (run.resume_from or cfg.init_from):
        batch, usable = dataset.fetch(indices[data.evenly_spaced(len(indices), 10_000)])
        prior.measure_embeddings(batch["image_embed"][usable])
    trainable = prior  # with LoRA, the adapters alone
    if cfg.lora_rank:
        from common import lora

        trainable, model_info["lora"] = lora.start(prior, cfg)
    optimizers = optim.make(
        trainable, cfg.optimizer, cfg.lr, cfg.weight_decay, (cfg.beta1, cfg.beta2), cfg.eps
    )
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(
        trainable, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after
    )
    model_info["metadata"] = store.metadata(cfg)
    state = checkpoint.State(
        cfg, {"model": trainable}, ema, optimizers, scaler, run.identity, model_info
    )
    loop.resume(run, state, prior=prior)
    if cfg.compile:
        prior.compile()

    # The order of samples follows from seed and step. Write config.json and open the logger.
    plan, batches = loop.batches(cfg, dataset, indices, state.step, device)
    evaluator = Evaluator(cfg, splits, clip_model, device)
    about = f"{len(dataset):,} embeddings of width {dataset.width}"
    if dataset.text_width != dataset.width:
        about += f", text of width {dataset.text_width}, which similarities cannot compare"
    log = loop.begin(run, state, given, about, device)

    # A signal to any rank ends the loop: `progress` saves first.
    progress = loop.Progress(run, state, log, "prior", dataset)
    with log, dist.stop_signals, progress:
        prior.train()
        stepped = True
        while True:
            dist.stop_signals.check()

            # Log; evaluate and save when they are due.
            if progress.log_due():
                progress.log_line()  # synchronizes ranks and GPU
                if progress.eval_due:
                    metrics = {"val_loss_online": evaluator.loss(prior, "validation")}
                    with ema.applied(trainable):
                        # The averaged weights are those that are kept and sampled from.
                        metrics["val_loss"] = evaluator.loss(prior, "validation")
                        if state.step < cfg.steps:  # else the test is next
                            metrics |= evaluator.metrics(prior, "validation")
                    progress.log_evaluation(metrics)
                if progress.save_due:  # on the disk before auto_resume.json names it
                    run.save(state, log)
                progress.restart()
            if state.step >= cfg.steps:
                break

            # Take one optimizer step. The learning rate is a function of the step alone.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if stepped:  # an fp16 step that overflowed is tried again, on the same samples
                step_batches = [next(batches) for _ in plan]
            chunk_losses = []  # summed over the samples of a chunk
            for chunk, batch in zip(plan, step_batches):
                # All that is random in a chunk follows from (seed, step, chunk), on any rank.
                accumulate.seed_all(cfg.seed, state.step, chunk.index)
                batch = data.to_device(batch, device)
                condition = conditioning(batch, cfg, clip_model)
                with amp.autocast(device, cfg.precision):
                    loss = diffusion_loss(prior, batch, condition)
                # Weights add up to 1 over a batch: the gradient is that of its mean loss.
                scaler.scale(loss * chunk.weight).backward()
                chunk_losses.append(loss.detach() * (chunk.stop - chunk.start))
            dist.sum_gradients(trainable)  # once a step; ranks also agree whether to stop
            # One model: a list of one norm.
            [grad_norm], stepped = amp.step(scaler, [(optimizers, cfg.max_grad_norm)])
            prior.zero_grad(set_to_none=True)
            if not stepped:  # a step that overflowed did not happen
                progress.overflows += 1
                continue
            state.step += 1
            ema.update(state.step)
            progress.add(chunk_losses, grad_norm, step_batches)

        # Test the averaged weights, and save them last of all.
        with ema.applied(trainable):
            metrics = {"loss": evaluator.loss(prior, "test")}
            metrics |= evaluator.metrics(prior, "test")
        results = loop.finish(run, state, log, metrics)
    loop.announce_trained(cfg, results, started, command)


# Commands


@dataclass(frozen=True)
class PriorConfig(config.Inference):
    """The prior"""

    run_dir: Folder = field("runs/prior", "run folder of the prior")
    guidance_scale: float = field(-1.0, "guidance, 1: none, below 0: as in its training")
    eta: float = field(-1.0, "noise of sampling: 1 as DDPM, 0 as DDIM, below 0: as in its training")
    lora_scale: float = field(1.0, "weight of LoRA adapters, if the run trained some")


def load_prior(path, device, weights="ema", lora_scale=1.0):
    """(prior in eval mode, contents of the file) of a model.pt or checkpoint, adapters merged."""
    cfg, state = checkpoint.read_model("prior", Config, path, weights, lora_scale)
    with checkpoint.damage_is_named(path):
        prior = checkpoint.build(lambda: Prior(cfg, *state["widths"]), state, path, device)
    return prior, state


def load_with_settings(args, device):
    """`load_prior` for a command, with its guidance scale and eta where they are given."""
    path = Path(args.run_dir) / args.model
    prior, state = load_prior(path, device, args.weights, args.lora_scale)
    settings = {"guidance_scale": args.guidance_scale, "eta": args.eta}
    settings = {name: value for name, value in settings.items() if value >= 0}  # else as trained
    prior.cfg = dataclasses.replace(prior.cfg, **settings)
    return prior, state


@dataclass(frozen=True)
class EvaluateConfig(PriorConfig):
    """What to evaluate on"""

    data: str = field("", "embeddings, by default those of the training")
    split: Literal["train", "validation", "test"] = field("test", "which of them")
    eval_samples: NonNegativeInt = field(0, "samples to take at most, 0: all")
    eval_timesteps: tuple[PositiveInt, ...] = field((), "sampling steps, by default as in training")
    out: str = field("", "JSON file to write the metrics to")


def open_evaluator(args, device):
    """(prior, Evaluator) of the evaluate command, checked."""
    prior, state = load_with_settings(args, device)
    # The settings of the training, but for what the command says.
    cfg = dataclasses.replace(
        prior.cfg,
        data=args.data or prior.cfg.data,
        val_data="" if args.data else prior.cfg.val_data,
        eval_samples=args.eval_samples,
        eval_timesteps=args.eval_timesteps or prior.cfg.eval_timesteps,
        seed=args.seed,
        batch_size=1,  # nothing is trained: the training split may be small
    )
    if cfg.data == "shapes":  # an imported model: training replaces it by a path
        raise UserError(f"{args.run_dir}: its data are not known; name some with --data")
    splits, clip_model, model_info = open_data(cfg, device)
    if model_info["widths"] != state["widths"]:
        raise UserError(
            f"{cfg.data}: widths of embeddings, text encodings (0: none) and, if others, text "
            f"embeddings are {model_info['widths']}; the prior's are {state['widths']}"
        )
    return prior, Evaluator(cfg, splits, clip_model, device)


def evaluate(args):
    device = dist.setup(args.device)
    prior, evaluator = dist.main_first(lambda: open_evaluator(args, device))
    metrics = {"loss": evaluator.loss(prior, args.split)}
    metrics |= evaluator.metrics(prior, args.split)
    if dist.is_main():
        print("\n".join(tracker.format_table(metrics)))
        if args.out:
            checkpoint.write_json(metrics, args.out)


@dataclass(frozen=True)
class SampleConfig(PriorConfig):
    """What to sample"""

    text: str = field("", "a text; without any text the samples are unconditional")
    texts: str = field("", "file with one text a line")
    text_embeds: str = field("", ".npy file of text embeddings (N, D), which need no CLIP")
    num_samples: PositiveInt = field(4, "embeddings for each text")
    best_of: PositiveInt = field(2, "candidates an embedding; the most similar to the text is kept")
    steps: NonNegativeInt = field(0, "sampling steps, 0: the most of the prior's eval_timesteps")
    max_batch: PositiveInt = field(256, "embeddings computed at once, at most")
    clip: str = field("", "CLIP for the text, by default that of the training")
    out: str = field("embeddings.npy", ".npy file for embeddings (texts · num_samples, D)")

    def __post_init__(self):
        super().__post_init__()
        config.check_suffix("text_embeds", self.text_embeds, ".npy")
        config.check_suffix("out", self.out, ".npy")
        config.check_one(self, "text", "texts", "text_embeds")


def read_text_embeddings(path, prior):
    """Text embeddings (N, D) of a .npy file; UserError if they do not fit the prior."""
    if prior.cfg.text_encodings != "none":
        raise UserError(
            "--text_embeds: this prior also needs text encodings; give --text or --texts"
        )
    rows = data.NpyFile(path, 2)
    embeds = torch.from_numpy(rows[np.arange(len(rows))])
    if embeds.shape[1] != prior.text_width or not embeds.isfinite().all():
        raise UserError(
            f"{path}: {embeds.shape[1]} wide, or not finite; expected {prior.text_width}"
        )
    return embeds


def load_condition(args, prior, state, texts):
    """`conditioning` of the sample command's texts, of its --text_embeds, or of no text."""
    device = prior.alpha.device
    # Texts, by the CLIP of the training
    if texts:
        from common import clip

        spec = args.clip or state["clip"]
        clip_model = clip.load(spec, device, state["clip_fingerprint"])
        clip.check_widths(clip_model, f"--clip {spec}", prior.text_width, state["widths"][1])
        return conditioning({"caption": texts}, prior.cfg, clip_model)
    # Text embeddings, without a CLIP
    if args.text_embeds:
        embeds = read_text_embeddings(args.text_embeds, prior).to(device)
        return conditioning({"text_embed": embeds}, prior.cfg, None)
    # Unconditional: "no text"
    return dict(prior.null_text.named_buffers())


def sample(args):
    device = dist.setup(args.device)
    if not dist.is_main():  # a single process samples
        return

    # Load the prior, and encode the texts.
    prior, state = load_with_settings(args, device)
    texts = config.texts_of(args.text, args.texts)
    steps = args.steps or max(prior.cfg.eval_timesteps)
    conditional = bool(texts or args.text_embeds)
    guidance_scale = prior.cfg.guidance_scale if conditional else 1.0
    loop.check_sampling(prior.cfg, guidance_scale, steps, conditional)
    condition = load_condition(args, prior, state, texts)
    embeds, similarity = best_embeddings(
        prior,
        condition,
        range(len(condition["text_embed"])),
        args.num_samples,
        steps,
        guidance_scale,
        prior.cfg.eta,
        args.best_of if conditional else 1,  # without a text there is no best one
        args.seed,
        args.max_batch,
    )
    # Print the similarities, and write the embeddings.
    for text, cosines in zip(texts[:100], similarity.tolist()):
        cosines = ", ".join(f"{cosine:.3f}" for cosine in cosines)
        print(f"{text!r}: similarity with the text {cosines}")
    embeds = embeds.flatten(0, 1).cpu().numpy()
    with checkpoint.atomic_write(args.out) as file:
        np.save(file, embeds)
    print(f"wrote {args.out}: float32 {embeds.shape}")


COMMANDS = {
    "train": (train, Config),
    "evaluate": (evaluate, EvaluateConfig),
    "sample": (sample, SampleConfig),
}


def main():
    config.run(
        COMMANDS,
        __doc__,
        default="train",
        presets=PRESETS,
        model_settings=checkpoint.model_settings,
    )


if __name__ == "__main__":
    main()
