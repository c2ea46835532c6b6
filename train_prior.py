"""Train a diffusion prior: CLIP text embedding -> CLIP image embedding (DALL-E 2, §2.2).

    torchrun --nproc_per_node=2 train_prior.py       # on captioned shapes that it makes itself
    torchrun --nproc_per_node=8 train_prior.py --data emb --run_dir runs/l14 --preset dalle2
    python train_prior.py --init_from runs/prior/model.pt --lora_rank 8 --run_dir runs/lora
    python train_prior.py evaluate --run_dir runs/prior
    python train_prior.py sample --text "a small red star" --num_samples 4 --out embeddings.npy

The same command again resumes. `python train_prior.py [train|evaluate|sample] --help` lists the
settings. DALL-E 2: Ramesh et al. 2022.

What differs from the paper:
- There is no autoregressive prior, the paper's other one.
- Text is encoded by a frozen CLIP, as in Karlo, in 77 tokens. DALL-E 2 trains a text transformer
  with its prior, for 256.
- The defaults are for minutes on two cores: a small model on the text embedding alone, embeddings
  of unit length, a cosine decay, 12 sampling steps. `--preset dalle2` has the sizes, the optimizer
  and the 64 steps of Table 3.
- Sampling takes evenly spaced steps of DDPM, or without noise of DPM-Solver++(2M); Table 3 has the
  analytic variance of Bao et al. 2022.
- "No text" is the CLIP's encoding of "". Without a loaded CLIP (none is known, or an open_clip
  model while captions are not used) it is zeros.
- Estimates of x0 are bounded in sampling, by 10 for raw embeddings as in Karlo's own code; an
  imported model has the bound of its scheduler (5 in diffusers' conversion of Karlo).
- Warm-up of 10,000 steps in the preset: the paper names none. Gradients are clipped, and the
  average of the weights has a warm-up, too (ema.py).
- The best of several candidates has the highest cosine with its text, not the highest dot product.
- Off by default, not in the paper: --noise_draws, --loss_weight, other objectives, LoRA.
"""

import os

# Set before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import contextlib
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from common import (
    accumulate,
    adapters,
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
from common.data import clips, embeddings, files
from common.ema import EMA
from common.models import diffusion
from common.models.nn import (
    NullText,
    TimeEmbedding,
    Transformer,
    compile_blocks,
    learned_tokens,
)

# Config


@dataclass(frozen=True)
class Config(config.TrainingRun):
    """Data, model and training of the prior"""

    # Run and data
    preset: str = field(
        "",
        "settings by name: pictures-cpu, pictures-gpu, dalle2, karlo; --config and flags win",
    )
    run_dir: str = field("runs/prior", "folder of this run; the same command again resumes it")
    data: str = field("shapes", 'folder with img_emb/ and text_emb/, or "shapes": built in')
    clip: str = field(
        "auto", "CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: DATA's"
    )
    # Model: a transformer over text and noised image embedding
    width: PositiveInt = model_field(192, "width of the transformer")
    # A few million parameters; the paper has a billion (--preset dalle2).
    depth: PositiveInt = model_field(4, "number of blocks")
    heads: PositiveInt = model_field(3, "number of attention heads")
    dropout: Fraction = field(0.0, "dropout in attention and feed-forward")
    text_encodings: bool = model_field(
        False, "condition on the encodings of the text's tokens, besides its embedding"
    )
    text_source: Literal["shards", "clip"] = field(
        "shards", "where text embeddings and encodings come from: DATA, or captions by the CLIP"
    )
    max_text_len: PositiveInt = model_field(77, "longest text in tokens; longer is cut")
    raw_embeddings: bool = model_field(
        False, "embeddings as the CLIP gives them (Karlo), not of unit length"
    )
    x0_bound: PositiveFloat = model_field(
        10.0, "bound of |x0| in sampling of raw embeddings (10: Karlo's code)"
    )
    checkpointing: bool = field(False, "recompute blocks in the backward pass to save memory")
    lora_rank: NonNegativeInt = field(
        0, "rank of adapters trained on the frozen --init_from, 0: train all weights", fixed=True
    )
    # Diffusion: DALL-E 2 predicts x0 under the cosine schedule
    objective: Literal["x0", "v", "epsilon", "flow"] = model_field(
        "x0", "what the network predicts"
    )
    noise_schedule: Literal["cosine", "linear"] = model_field(
        "cosine", "noise schedule; flow has its own"
    )
    # Uniform is DDPM's; the others are of SD3.
    timestep_density: Literal["uniform", "logit_normal", "mode"] = field(
        "uniform", "distribution of the timesteps in training (SD3 §3.1)", affects_val_loss=True
    )
    loss_weight: Literal["none", "min_snr", "sigma_sqrt", "cosmap"] = field(
        "none", "weight of the loss by noise level; sigma_sqrt and cosmap: flow only"
    )
    # More draws cost little where the text is long, as they share its pass.
    noise_draws: PositiveInt = field(
        1,
        "number of (timestep, noise) draws per sample, which share one pass over its text",
        affects_val_loss=True,
    )
    # "10% of the time" (DALL-E 2 §2.2)
    text_drop: Fraction = field(
        0.1, "probability of dropping the text, for guidance", affects_val_loss=True
    )
    # Optimization: minutes on two cores. The paper has no decay of the learning rate.
    steps: PositiveInt = field(1150, "optimizer steps")
    batch_size: PositiveInt = field(256, "samples a step, over all ranks", fixed=True)
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: for matrices, with AdamW for the others", fixed=True
    )
    lr: PositiveFloat = field(3e-3, "peak learning rate")
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay along half a cosine after the warm-up; off: constant")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
    # Decay is for what multiplies activations, not for biases, norms and learned tokens.
    weight_decay: NonNegativeFloat = field(0.01, "decoupled weight decay of matrices and kernels")
    betas: tuple[Beta, Beta] = field(
        (0.9, 0.99), "Adam's decays of the mean of gradients, and of the mean of their squares"
    )
    eps: PositiveFloat = field(1e-8, "Adam's epsilon")
    max_grad_norm: NonNegativeFloat = field(1.0, "clip gradients to this norm, 0: no clipping")
    # What is sampled from and tested is this average. Its decay rises to the highest (ema.py).
    ema_decay: Fraction = field(0.9999, "highest decay of the averaged weights, 0: no averaging")
    ema_update_after: NonNegativeInt = field(0, "first steps, in which the average is a copy")
    ema_update_every: PositiveInt = field(1, "steps between updates of the average")
    # Evaluation
    eval_every: Interval = field("575", "steps between evaluations, or as 10min; 0: only the last")
    eval_samples: NonNegativeInt = field(
        512, "held-out samples to evaluate on, 0: all", affects_val_loss=True
    )
    # On the built-in data 64 steps are no better.
    eval_timesteps: tuple[PositiveInt, ...] = field(
        (6, 12), "numbers of sampling steps to evaluate with"
    )
    guidance_scale: NonNegativeFloat = field(1.0, "guidance in evaluation, 1: none")

    timesteps: ClassVar[int] = 1000  # number of noise levels T (DALL-E 2, Table 3)

    def __post_init__(self):
        super().__post_init__()
        # Attention splits the width into heads; the timestep embedding has sines and cosines.
        if self.width % self.heads or self.width % 2:
            raise UserError(
                f"--width {self.width}: expected an even multiple of --heads {self.heads}"
            )
        diffusion.check_settings(self)
        self.check_sampling(self.guidance_scale, max(self.eval_timesteps, default=0))
        tracker.check(self)

    def check_sampling(self, guidance_scale, steps):
        """UserError for what the model cannot sample.

        A model that was trained without dropping its text has no guidance, and needs texts.
        """
        if not 1 <= steps <= self.timesteps:
            raise UserError(f"{steps} sampling steps: expected 1 to {self.timesteps}")
        if self.text_drop == 0 and guidance_scale != 1:
            raise UserError(
                f"{self.run_dir} is trained with --text_drop 0, so it needs a text, and a guidance "
                "scale of 1"
            )


MAX_CHUNK = 256  # samples in one forward pass, at most, where --chunk_size is 0


# Model


class Prior(nn.Module):
    """Causal transformer: text encodings, text embedding | time, noised image embedding, query.

    The output at the learned query is the prediction (DALL-E 2 §2.2). This is the form of Karlo and
    Kandinsky, whose weights load (common/interop/pretrained.py).

    The text prefix, before the bar, does not depend on the noise. So it is computed once: for all
    `noise_draws` of a sample in training, in one pass, and for all steps in sampling.

    B batch, D width of embeddings, W width of the transformer, L text length, K noise draws, P
    tokens of the prefix.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        """embed_width: of image and text embeddings. encoding_width: of text encodings, or 0."""
        super().__init__()
        self.cfg = cfg
        self.embed_width = embed_width
        width = cfg.width
        text_len = 0
        # Each kind of token has its own projection to the width of the transformer.
        if encoding_width:
            text_len = cfg.max_text_len
            self.encoding_in = nn.Linear(encoding_width, width)
        self.text_in = nn.Linear(embed_width, width)
        self.time_in = TimeEmbedding(width, width)
        self.image_in = nn.Linear(embed_width, width)
        self.query = learned_tokens(1, width)  # the output here is the prediction
        self.positions = learned_tokens(text_len + 4, width)  # text, embedding, time, image, query
        self.null_text = NullText(embed_width, encoding_width, text_len)  # the encoding of ""
        self.transformer = Transformer(
            width,
            cfg.depth,
            cfg.heads,
            rotary=False,
            dropout=cfg.dropout,
            checkpointing=cfg.checkpointing,
        )
        self.out = nn.Linear(width, embed_width)

        # Scale of image embeddings. Unit-length embeddings: mean 0, std 1/√D, so x0 has norm √D.
        # Raw embeddings: measured on the data, by `measure_embeddings`.
        self.register_buffer("clip_mean", torch.zeros(embed_width))
        self.register_buffer("clip_std", torch.full((embed_width,), embed_width**-0.5))

        diffusion.add_levels(self, cfg)  # noise levels α_t and σ_t

    def measure_embeddings(self, image_embed):
        """Take mean and standard deviation from raw image embeddings (N, D) of training data."""
        self.clip_mean.copy_(image_embed.mean(0))  # (D,)
        # A dimension that is constant must not divide by zero.
        self.clip_std.copy_(image_embed.std(0).clamp(min=1e-6))

    def normalized(self, embed):
        """Embeddings (…, D), of unit length unless the model is one of raw embeddings."""
        if self.cfg.raw_embeddings:
            return embed
        return F.normalize(embed, dim=-1)

    def standardize(self, embed):
        """Image embeddings (…, D) of a CLIP -> x0 of mean 0 and variance 1, as the noise has."""
        # Without this, embeddings of unit length would drown in noise of length √D.
        return (self.normalized(embed) - self.clip_mean) / self.clip_std

    def destandardize(self, x0):
        """The inverse of `standardize`."""
        return self.normalized(x0 * self.clip_std + self.clip_mean)

    def text_tokens(self, condition, drop, draws):
        """The text prefix (B, P, W), and the `mask` for it followed by `draws` noise draws.

        Where `drop` (B,) is true, the text is replaced by "no text".
        """
        condition = self.null_text(condition, drop)  # only the text is dropped, never x_t
        text_embed = condition["text_embed"]
        if not self.cfg.raw_embeddings:  # to length √D, as the noised image embedding has
            text_embed = self.standardize(text_embed)
        tokens = self.text_in(text_embed)[:, None]  # (B, 1, W)
        is_text = torch.ones_like(drop)[:, None]  # (B, 1)
        if self.cfg.text_encodings:
            encodings = self.encoding_in(condition["text_enc"])  # (B, L, W)
            tokens = torch.cat([encodings, tokens], dim=1)  # (B, P, W)
            is_text = torch.cat([condition["text_mask"], is_text], dim=1)
        positions = self.positions.weight[:-3]
        return tokens + positions.to(tokens.dtype), self.mask(is_text, draws)

    def mask(self, is_text, draws):
        """Which tokens (rows) see which, (B, 1, P + 3K, P + 3K), with K noise draws.

        is_text (B, P): which tokens of the prefix are no padding. A token sees the text before it
        and, of its own draw, itself and the tokens before it. Tokens are ordered by kind, then by
        draw. A text with padding, and two draws:
          1 0 0 | 0 0 | 0 0 | 0 0     text encodings
          1 1 0 | 0 0 | 0 0 | 0 0     padding
          1 0 1 | 0 0 | 0 0 | 0 0     text embedding
          1 0 1 | 1 0 | 0 0 | 0 0     time, of draw 0 and of draw 1
          1 0 1 | 0 1 | 0 0 | 0 0
          1 0 1 | 1 0 | 1 0 | 0 0     noised image embedding
          1 0 1 | 0 1 | 0 1 | 0 0
          1 0 1 | 1 0 | 1 0 | 1 0     query
          1 0 1 | 0 1 | 0 1 | 0 1
        """
        prefix_len = is_text.shape[1]
        # A draw is a group of tokens. A token of text is one by itself: where all before it is
        # padding, it has one to see, as a row of the softmax must not be empty.
        group = torch.arange(prefix_len + draws, device=is_text.device)
        group = torch.cat([group, group[prefix_len:], group[prefix_len:]])
        same_group = group[:, None] == group
        is_text = F.pad(is_text, (0, 3 * draws))[:, None, None]
        return (same_group | is_text).tril()

    def forward(self, x_t, timestep, condition, drop):
        """Predictions (B, K, D) for K noise draws a sample, with its text in one pass."""
        return self.predict(x_t, timestep, *self.text_tokens(condition, drop, x_t.shape[1]))

    def text_cache(self, condition, drop):
        """The text for all steps of sampling, as `predict` takes it: cached, not as tokens."""
        tokens, mask = self.text_tokens(condition, drop, 1)
        of_text = mask[..., :-3, :-3]  # (B, 1, P, P)
        # Nothing is predicted from the text: no more of the output is computed.
        _, cache = self.transformer(tokens, of_text, num_last=1, return_cache=True)
        return tokens[:, :0], mask, cache  # (B, 0, W): the cache stands for these tokens

    def predict(self, x_t, timestep, text, mask, cache=None):
        """Predictions (B, K, D) for x_t (B, K, D) at `timestep` (B, K).

        text, mask: of `text_tokens`; or these and the cache, of `text_cache`.
        """
        noised = self.image_in(x_t)  # (B, K, W)
        query = self.query.weight.to(noised.dtype).expand_as(noised)
        noised = torch.stack([self.time_in(timestep), noised, query], dim=1)  # (B, 3, K, W)
        positions = self.positions.weight[-3:, None]
        noised = noised + positions.to(noised.dtype)
        tokens = torch.cat([text, noised.flatten(1, 2)], dim=1)  # (B, P + 3K or 3K, W)
        # As queries there are only these tokens; as keys, also those in the cache.
        mask = mask[..., -tokens.shape[1] :, :]
        # The last K tokens are the queries.
        return self.out(self.transformer(tokens, mask, cache=cache, num_last=x_t.shape[1]))


def conditioning(batch, cfg, clip_model):
    """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)}: the model's conditions.

    Captions in the batch, or their tokens, are encoded by the CLIP `clip_model`; otherwise the
    batch has embeddings. An empty caption means unconditional.
    """
    if "caption" in batch:
        texts = batch.get("tokens", batch["caption"])
        return clip_model.text_condition(texts, cfg.max_text_len)
    condition = {"text_embed": batch["text_embed"]}  # (B, D)
    if "text_enc" in batch:
        encodings = batch["text_enc"]  # (B, L', E), of any length
        missing = cfg.max_text_len - encodings.shape[1]  # negative: longer texts are cut
        encodings = F.pad(encodings, (0, 0, 0, missing))
        condition["text_enc"] = encodings
        condition["text_mask"] = encodings.any(-1)  # rows of zeros are padding
    return condition


# Loss


def diffusion_loss(prior, batch, condition):
    """Mean loss over a chunk.

    In eval mode it is without loss weights. Text drop, draws and density are those of training.
    """
    cfg = prior.cfg
    x0 = prior.standardize(batch["image_embed"])  # (B, D)
    x0 = x0[:, None].expand(-1, cfg.noise_draws, -1)  # (B, K, D)
    timestep = diffusion.sample_timesteps(
        cfg.timestep_density,
        x0.shape[:2],
        cfg.timesteps,
        x0.device,
    )
    noise = torch.randn_like(x0)  # ε
    # Classifier-free guidance needs a model that also knows "no text". Only the text is dropped.
    drop = torch.rand(len(x0), device=x0.device) < cfg.text_drop

    # Forward process: x_t = α·x0 + σ·ε (DDPM Eq. 4).
    alpha, sigma = diffusion.levels(prior, timestep, x0)  # (B, K, 1)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)

    # The loss is in fp32, whatever the precision of the model.
    prediction = prior(x_t, timestep, condition, drop)  # (B, K, D)
    loss = (prediction.float() - target) ** 2
    if prior.training:  # the weight of a noise level
        loss = loss * diffusion.loss_weight(cfg.loss_weight, cfg.objective, alpha, sigma)
    return loss.mean()


# Sampling


@torch.no_grad()
def sample_embeddings(
    prior,
    condition,
    sampling_steps,
    guidance_scale=1.0,
    eta=1.0,
    noise_fn=torch.randn_like,
    negative=None,
    candidates=1,
):
    """Image embeddings (B · candidates, D), text by text, for the `conditioning` of B texts.

    They are of unit length, or raw, as those that the model was trained on. noise_fn(x): noise of
    the shape of x. negative: the `conditioning` of a text that guidance leads away from.
    """
    cfg = prior.cfg
    texts = len(condition["text_embed"])
    size = texts * candidates
    device = prior.alpha.device

    # Guidance runs every text a second time as "no text". The noised input is the same for both.
    # At scale 1 the text alone counts, at 0 "no text" alone: there is one copy.
    copies = 1 if guidance_scale in (0, 1) else 2
    first = texts if guidance_scale else 0  # of "no text"
    condition = {name: torch.cat([value] * copies) for name, value in condition.items()}
    drop = torch.arange(copies * texts, device=device) >= first
    if negative:  # in place of "no text"
        for name, value in negative.items():
            condition[name][first:] = value
        drop = torch.zeros_like(drop)
    text = prior.text_cache(condition, drop)  # once for all candidates and steps
    text = tree_map(lambda x: x.repeat_interleave(candidates, 0), text)

    # Bound of |x0|. An embedding of unit length has an x0 of length √D: no component is greater.
    bound = cfg.x0_bound if cfg.raw_embeddings else prior.embed_width**0.5

    def denoise(x_t, timestep):
        x_in = x_t.repeat(copies, 1)[:, None]  # (copies·B, 1, D), one draw a text
        t_in = timestep.repeat(copies)[:, None]
        prediction = prior.predict(x_in, t_in, *text)[:, 0].float()
        prediction = diffusion.classifier_free_guidance(
            prediction[:size], prediction[-size:], guidance_scale
        )
        alpha, sigma = diffusion.levels(prior, timestep, x_t)
        x0 = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma)
        return x0.clamp(-bound, bound), 0.0  # no learned variance

    x_T = noise_fn(torch.empty(size, prior.embed_width, device=device))
    x0 = diffusion.sample(denoise, x_T, prior.alpha, prior.sigma, sampling_steps, eta, noise_fn)
    return prior.destandardize(x0)


def best_embeddings(
    prior,
    condition,
    keys,
    num_samples,
    sampling_steps,
    guidance_scale,
    eta,
    best_of,
    seed,
    negative=None,
):
    """Image embeddings (texts · num_samples, D), text by text.

    Each is the best of `best_of` candidates: the most similar to its text (DALL-E 2 §2.2).
    condition: `conditioning` of the texts. keys: one a text; a candidate's noise is seeded by
    (seed, key, number), so it is the same in any batch. negative: see `sample_embeddings`.
    """
    candidates = num_samples * best_of  # of each text
    seeds = []
    for key in keys:
        seeds += [accumulate.derive_seed(seed, key, k) for k in range(candidates)]
    device = prior.alpha.device
    noise_fn = diffusion.noise_generator(seeds, device, sampling_steps)
    with amp.autocast(device, prior.cfg.precision):
        embeds = sample_embeddings(
            prior,
            condition,
            sampling_steps,
            guidance_scale,
            eta,
            noise_fn,
            negative,
            candidates,
        )
    text = condition["text_embed"].repeat_interleave(candidates, 0)
    similarity = F.cosine_similarity(embeds, text)  # (texts · candidates,)

    # Keep the candidate that is the most similar to its text.
    shape = (-1, best_of)
    best = similarity.unflatten(0, shape).argmax(1)[:, None, None]  # an index, (…, 1, 1)
    return embeds.unflatten(0, shape).take_along_dim(best, 1).squeeze(1)


# Evaluation


def mean_loss(prior, split, clip_model):
    """Mean diffusion loss over a split (dataset, indices), without loss weights. Collective."""

    def loss_of(batch):
        condition = conditioning(batch, prior.cfg, clip_model)
        return diffusion_loss(prior, batch, condition)

    return loop.mean_loss(prior, loss_of, *split)


def sample_metrics(prior, splits, split, clip_model):
    """{metric: value} of sampled embeddings for a split. Collective.

    Mean cosine similarities at each number of eval_timesteps, the same on any number of ranks, and
    `builtin_scores`.
    """
    cfg = prior.cfg
    device = prior.alpha.device
    dataset, indices = splits[split]
    mode = prior.training
    prior.eval()  # no dropout
    with amp.autocast(device, cfg.precision):
        indices = order.some_of(indices, cfg.eval_samples)
        # Unrelated texts are those half the split away.
        others = loader.ChunkDataset(dataset, np.roll(indices, len(indices) // 2))
        cosines = collections.defaultdict(list)  # of this rank; ranks take turns with the chunks
        for number, batch in loader.eval_batches(dataset, indices, 0, cfg.chunk_size):
            start = number * cfg.chunk_size
            other = loader.to_device(others[start, start + len(batch["index"])], device)
            batch = loader.to_device(batch, device)
            condition = conditioning(batch, cfg, clip_model)
            unrelated_text = conditioning(other, cfg, clip_model)["text_embed"]  # (B, D)
            text = condition["text_embed"]
            image = batch["image_embed"]
            baseline = F.cosine_similarity(text, image)  # (B,)
            cosines["baseline_similarity"] += baseline.tolist()
            for steps in cfg.eval_timesteps:
                # The same noise at every evaluation, so that metrics compare.
                accumulate.seed_all(cfg.seed, "similarities", number, steps)
                sampled = sample_embeddings(prior, condition, steps, cfg.guidance_scale)
                with_text = F.cosine_similarity(sampled, text)
                found = {
                    "similarity_with_text": with_text,
                    "similarity_with_image": F.cosine_similarity(sampled, image),
                    "similarity_with_unrelated_text": F.cosine_similarity(sampled, unrelated_text),
                    "difference_from_baseline": with_text - baseline,
                }
                for name, values in found.items():
                    cosines[f"{name}@{steps}"] += values.tolist()
        metrics = loop.means(cosines)
        metrics |= builtin_scores(prior, splits, split, clip_model)
    prior.train(mode)  # as it was
    return metrics


def builtin_scores(prior, splits, split, clip_model):
    """caption_match and coverage at the most eval_timesteps, and their ceilings. Collective.

    See `synthetic.embedding_scores`. Only the built-in data have them.
    """
    from common.data import synthetic

    cfg = prior.cfg
    device = prior.alpha.device
    steps = max(cfg.eval_timesteps)

    def sample_fn(batch, seeds):
        condition = conditioning(loader.to_device(batch, device), cfg, clip_model)
        noise_fn = diffusion.noise_generator(seeds, device, steps)
        return sample_embeddings(prior, condition, steps, cfg.guidance_scale, noise_fn=noise_fn)

    scores = synthetic.embedding_scores(splits, split, sample_fn, cfg.seed)
    # Ceilings are of real embeddings: they have no number of steps.
    return {
        name if name.endswith("ceiling") else f"{name}@{steps}": value
        for name, value in scores.items()
    }


# Training


def open_data(cfg, source, device, widths=None):
    """({split: (dataset, indices)}, CLIP or None, {name: plain value} of both for model files).

    The CLIP encodes captions with --text_source clip, and "no text" always. source: model file that
    says which CLIP it is, if neither cfg nor the data do; or None. widths: those of image and text
    embeddings, and of text encodings (0: none), of the model, if there is one.
    """
    with_captions = cfg.text_source == "clip"
    with_encodings = cfg.text_encodings and not with_captions  # from the shards
    # Which CLIP made the embeddings: the flag says it, else the data, else the model's file.
    spec, fingerprint = clips.clip_of(cfg, source)
    clip_model = None
    # open_clip's may be large, or have to be downloaded: it is loaded only if captions need it.
    if with_captions or (spec and not spec.startswith("open_clip:")):
        clip_model = clips.load(spec, device, fingerprint, text_only=True)
        fingerprint = clip_model.fingerprint()

    datasets = []
    for path in filter(None, (cfg.data, cfg.val_data)):
        dataset = embeddings.Embeddings(path, with_encodings, with_captions)
        encoding_width = dataset.encoding_width
        if clip_model:  # one of other widths cannot have made these embeddings
            clip_model.check_widths(f"--clip {spec} for {path}", dataset.width, encoding_width)
        clips.check_source(cfg, dataset, path, clip_model)
        if with_captions:  # said now, as nobody sees in a sample that half of its text was cut
            if cfg.text_encodings:
                encoding_width = clip_model.encoding_width
            texts = []
            for index in order.evenly_spaced(len(dataset), 256):
                with contextlib.suppress(UserError):  # a damaged caption costs its sample alone
                    texts += dataset.texts([index])
            if not texts:
                dataset.texts([0])  # which says what is wrong
            clip_model.note_cut(texts, cfg.max_text_len)
        found = [dataset.width, encoding_width]
        widths = widths or found  # else an error of shapes at the first step or evaluation
        if found != widths:
            raise UserError(
                f"{path}: widths of embeddings and text encodings (0: none) are {found}; those of "
                f"the model are {widths}"
            )
        datasets.append(dataset)

    # Stored with the model: what it takes to build it and to sample from texts.
    info = {
        "kind": "prior",
        "widths": widths,
        "clip": spec,
        "clip_fingerprint": fingerprint,
        # Of text embeddings, which `sample --text_embeds` must have.
        "text_norm": datasets[0].text_embeds.median_norm,
    }
    return order.splits(datasets[0], cfg, *datasets[1:]), clip_model, info


def train(cfg):
    # Join the ranks. Rank 0 takes the run folder, then all open the data.
    device = dist.setup(cfg.device, cfg.timeout_minutes, cfg.deterministic)
    if cfg.data == "shapes":
        from common.data import embed

        cfg = embed.with_builtin_data(cfg, device)
    run, cfg = resume.open_run(cfg, cfg.run_dir, MAX_CHUNK)
    splits, clip_model, info = dist.on_all(lambda: open_data(cfg, run.source, device))
    dataset, indices = splits["train"]
    identity = resume.identify(run, cfg, splits, clip=info["clip_fingerprint"])
    if run.results:  # it is finished
        return loop.announce(run, cfg)

    # Build model, optimizer and EMA. Restore them if resuming.
    accumulate.seed_all(cfg.seed, "weights")  # the same start on all ranks
    prior = Prior(cfg, *info["widths"]).to(device)
    if clip_model:
        prior.null_text.fill(clip_model.text_condition([""], cfg.max_text_len))
    if cfg.raw_embeddings:  # weights that are loaded below bring their own statistics
        batch, usable = dataset.fetch(order.some_of(indices, 10_000))
        prior.measure_embeddings(batch["image_embed"][usable])
    trainable = prior  # with LoRA, the adapters alone
    if cfg.lora_rank:
        trainable, info["lora"] = adapters.start(prior, cfg, identity["base"])
    optimizers = optim.make(
        trainable, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps
    )
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(trainable, cfg.ema_update_every, cfg.ema_decay, cfg.ema_update_after)
    state = resume.State(cfg, trainable, ema, optimizers, scaler, identity, info)
    resume.restore(run, state)
    if cfg.compile:
        compile_blocks(prior.transformer.blocks)

    # The order of samples follows from seed and step. Workers turn captions into tokens.
    tokenizer = clip_model.tokenizer if cfg.text_source == "clip" else None
    plan, batches = loader.train_batches(cfg, dataset, indices, state.step, device, tokenizer)
    about = f"{len(dataset):,} embeddings of width {dataset.width}"
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    # Open the logger and write config.json.
    with loop.begin(run, state, about, device) as progress:
        prior.train()
        while True:
            # Evaluate: the averaged weights are those that are kept and sampled from.
            if eval_due():
                with progress.paused():
                    validation = splits["validation"]
                    metrics = {"val_loss_online": mean_loss(prior, validation, clip_model)}
                    with ema.applied(trainable):
                        metrics["val_loss"] = mean_loss(prior, validation, clip_model)
                        if state.step < cfg.steps:  # else the test is next
                            metrics |= sample_metrics(prior, splits, "validation", clip_model)
                progress.log_evaluation(metrics)  # and save the best
            if state.step >= cfg.steps:
                break

            # Take one optimizer step. The learning rate is a function of the step alone.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            step_batches = [next(batches) for _ in plan]
            stepped = False
            while not stepped:  # a step that overflows fp16 is tried again, at a lower scale
                chunk_losses = []  # summed over the samples of a chunk
                with amp.casts_kept(device):
                    for chunk, batch in zip(plan, step_batches):
                        # All that is random follows from (seed, step, chunk), on any rank.
                        accumulate.seed_all(cfg.seed, state.step, chunk.index)
                        batch = loader.to_device(batch, device)
                        condition = conditioning(batch, cfg, clip_model)  # the CLIP is in fp32
                        with amp.autocast(device, cfg.precision):
                            loss = diffusion_loss(prior, batch, condition)
                        # Weights add up to 1 over a batch: the gradient is that of its mean loss.
                        with dist.sum_gradients(trainable, chunk is plan[-1]):  # over all ranks
                            scaler.scale(loss * chunk.weight).backward()
                        chunk_losses.append(loss.detach() * chunk.size)
                grad_norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
                scaler.update()
                prior.zero_grad()
                progress.count_overflow(stepped)
            state.step += 1
            ema.update(state.step)
            progress.add(chunk_losses, grad_norm, step_batches)

            # Log and save. After a signal to any rank `loop.begin` saves and ends the process.
            if state.step % cfg.log_every == 0 or state.step == cfg.steps:
                progress.log_line()  # waits for the ranks and the device
            if save_due():
                progress.save()
            dist.stop_together()

        # Test the averaged weights, and save them last of all.
        with ema.applied(trainable):
            metrics = {"loss": mean_loss(prior, splits["test"], clip_model)}
            metrics |= sample_metrics(prior, splits, "test", clip_model)
        progress.finish(metrics)


# Commands


@dataclass(frozen=True)
class PriorConfig(config.Inference):
    """The prior"""

    run_dir: str = field("runs/prior", "run folder of the prior")
    lora_scale: float = field(1.0, "scale of its adapters, 0: the model without them")
    guidance_scale: float = field(-1.0, "guidance, 1: none, below 0: as in its training")


def load_prior(path, device, weights="ema", lora_scale=1.0):
    """(prior in eval mode, contents of the file) of a model.pt or checkpoint, adapters merged."""
    cfg, contents = checkpoint.read_model({"prior": Config}, path, weights)
    contents = adapters.merged(contents, path, lora_scale)
    prior = Prior(cfg, *contents["widths"])
    checkpoint.load_weights(prior, contents["model"], path)
    return prior.to(device).eval(), contents


def guidance_of(args, cfg):
    """The guidance scale of a command, or that of the training."""
    return args.guidance_scale if args.guidance_scale >= 0 else cfg.guidance_scale


@dataclass(frozen=True)
class EvaluateConfig(PriorConfig):
    """What to evaluate on"""

    data: str = field("", "embeddings, by default those of the training")
    eval_samples: NonNegativeInt = field(0, "samples of the test split to take at most, 0: all")
    eval_timesteps: tuple[PositiveInt, ...] = field((), "sampling steps, by default as in training")


def open_evaluation(args, device):
    """(prior with the settings of its evaluation, splits, CLIP or None), checked."""
    path = checkpoint.model_file(args.run_dir, args.model, args.weights)
    prior, contents = load_prior(path, device, args.weights, args.lora_scale)
    cfg = loop.evaluation_settings(prior.cfg, args, MAX_CHUNK)
    prior.cfg = dataclasses.replace(
        cfg,
        eval_timesteps=args.eval_timesteps or cfg.eval_timesteps,
        guidance_scale=guidance_of(args, cfg),
    )
    splits, clip_model, _ = open_data(prior.cfg, path, device, contents["widths"])
    return prior, splits, clip_model


def evaluate(args):
    device = dist.setup(args.device)
    prior, splits, clip_model = dist.on_all(lambda: open_evaluation(args, device))
    metrics = {"loss": mean_loss(prior, splits["test"], clip_model)}
    metrics |= sample_metrics(prior, splits, "test", clip_model)
    tracker.print_results(f"{args.run_dir}, test split:", metrics)


@dataclass(frozen=True)
class SampleConfig(PriorConfig):
    """What to sample"""

    text: str = field("", "a text; without any text the samples are unconditional")
    texts: str = field("", "file with one text a line")
    text_embeds: str = field("", ".npy file of text embeddings (N, D), which need no CLIP")
    negative_text: str = field("", "a text that guidance leads away from")
    num_samples: PositiveInt = field(4, "embeddings for each text")
    eta: Fraction = field(1.0, "noise of sampling, 1: DDPM, 0: none, by DPM-Solver++(2M)")
    best_of: PositiveInt = field(
        2, "candidates for each embedding; the most similar to the text is kept"
    )
    steps: NonNegativeInt = field(0, "sampling steps, 0: the most of the prior's eval_timesteps")
    max_batch: PositiveInt = field(256, "embeddings computed at once; at least those of a text")
    clip: str = field("", "CLIP for the text, by default that of the training")
    out: str = field("embeddings.npy", ".npy file for embeddings (texts · num_samples, D)")

    def __post_init__(self):
        super().__post_init__()
        if self.text:
            config.check_unused(self, "beside --text", "texts", "text_embeds")
        elif self.texts:
            config.check_unused(self, "beside --texts", "text_embeds")
        else:
            config.check_unused(self, "without a text", "clip", "negative_text")
            if not self.text_embeds:
                config.check_unused(self, "without a text", "guidance_scale", "best_of")


def read_text_embeddings(path, prior, median_norm):
    """Text embeddings (N, D) of a .npy file; UserError if they do not fit the prior.

    median_norm: of those that it was trained on, or None if it is not known.
    """
    if prior.cfg.text_encodings:
        raise UserError(
            "--text_embeds: this prior also needs text encodings; give --text or --texts"
        )
    embeds = torch.from_numpy(embeddings.open_npy(path).astype(np.float32))
    rows, width = embeds.shape
    if not rows or width != prior.embed_width or not embeds.isfinite().all():
        raise UserError(
            f"{path}: {rows} rows {width} wide; expected {prior.embed_width}, and finite numbers"
        )
    # A raw embedding goes in as it is. Of another length it is another text.
    length = embeds.norm(dim=1).median()
    if prior.cfg.raw_embeddings and median_norm and not 0.5 < length / median_norm < 2:
        raise UserError(
            f"{path}: its embeddings are of length {length:.3g}, but those of the training of "
            f"{median_norm:.3g}; write them as those, by python -m common.data.embed embed --raw"
        )
    return embeds


def sample(args):
    device = dist.setup(args.device)
    if not dist.is_main():  # a single process samples
        return

    # Load the prior. Read texts, or text embeddings, or take "no text".
    path = checkpoint.model_file(args.run_dir, args.model, args.weights)
    prior, contents = load_prior(path, device, args.weights, args.lora_scale)
    cfg = prior.cfg
    texts = files.texts_of(args.text, args.texts)
    steps = args.steps or max(cfg.eval_timesteps)
    guidance_scale = guidance_of(args, cfg)
    best_of = args.best_of
    clip_model = negative = None
    if texts:
        spec = args.clip or contents["clip"]
        # Texts of another CLIP would be drawn without an error, as if they said something else.
        clip_model = clips.load(spec, device, contents["clip_fingerprint"], text_only=True)
        clip_model.check_widths(f"--clip {spec}", *contents["widths"])
        clip_model.note_cut(texts, cfg.max_text_len)
        inputs = {"caption": texts}
        if args.negative_text:
            if guidance_scale == 1:
                raise UserError("--negative_text: it needs guidance, by a --guidance_scale above 1")
            negative = conditioning({"caption": [args.negative_text]}, cfg, clip_model)
    elif args.text_embeds:
        embeds = read_text_embeddings(args.text_embeds, prior, contents.get("text_norm"))
        inputs = {"text_embed": embeds.to(device)}
    else:
        inputs = dict(prior.null_text.named_buffers())
        guidance_scale = 0.0  # the prediction for "no text" alone
        best_of = 1  # without a text there is no best one
    cfg.check_sampling(guidance_scale, steps)

    # Sample some texts at a time: their conditions are repeated for each candidate.
    samples = []
    count = args.max_batch // (args.num_samples * best_of) or 1
    for number, batch in enumerate(accumulate.split(inputs, count)):
        condition = conditioning(batch, cfg, clip_model)
        first = number * count
        embeds = best_embeddings(
            prior,
            condition,
            range(first, first + len(condition["text_embed"])),
            args.num_samples,
            steps,
            guidance_scale,
            args.eta,
            best_of,
            args.seed,
            negative,
        )
        samples.append(embeds.cpu())
    samples = torch.cat(samples).numpy()
    with checkpoint.atomic_write(args.out) as file:
        np.save(file, samples)
    print(f"wrote {args.out}: float32 {samples.shape}")


COMMANDS = {
    "train": (train, Config),
    "evaluate": (evaluate, EvaluateConfig),
    "sample": (sample, SampleConfig),
}

# fmt: off
PICTURES = dict(
    dropout=0.1, validation=0.03, test=0.03, guidance_scale=2.0, eval_timesteps=(8, 64)
)
PRESETS = {
    # Thousands of captioned pictures. Both were run to their end on 6,000 emoji: the first on two
    # cores, the second on one H200 (79 s).
    "pictures-cpu": dict(PICTURES, steps=1000, eval_every="125"),
    "pictures-gpu": dict(
        PICTURES,
        text_encodings=True, text_source="clip",
        width=512, depth=6, heads=8,  # 20 M weights
        batch_size=512, steps=500, lr=1e-3, eval_every="125", precision="bf16",
    ),
    # DALL-E 2's Table 3 for the diffusion prior, over the CLIP at hand.
    "dalle2": dict(
        clip="open_clip:ViT-L-14/openai",
        text_encodings=True, text_source="clip",  # of all tokens, besides the text embedding
        # Model
        width=2048, depth=24, heads=32,  # 1B parameters
        eval_timesteps=(8, 64),
        # Optimization: AdamW, EMA of 0.9999
        batch_size=4096, steps=600_000, lr=1.1e-4,
        cosine=False, betas=(0.9, 0.96), eps=1e-6, weight_decay=0.06,
        # Not in the paper: how to run it
        warmup_steps=10_000, chunk_size=64, precision="bf16", workers=4,
        validation=0.01, test=0.01,
        log_every=100, eval_every="10000", save_every="2000",
    ),
}
# The sizes of the published configs. How these were trained is not public: the rest is DALL-E 2's.
PRESETS["karlo"] = dict(
    PRESETS["dalle2"], depth=20, raw_embeddings=True, guidance_scale=4.0, eval_timesteps=(25,)
)
# fmt: on


def main():
    config.run(COMMANDS, __doc__, default="train", presets=PRESETS)


if __name__ == "__main__":
    main()
