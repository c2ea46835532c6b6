"""Train a diffusion prior: CLIP text embedding -> CLIP image embedding (DALL-E 2, §2.2).

    torchrun --nproc_per_node=2 train_prior.py       # on the built-in captioned shapes
    torchrun --nproc_per_node=8 train_prior.py --data emb --run_dir runs/l14 --preset dalle2
    python train_prior.py --init_from runs/prior/model.pt --lora_rank 8 --run_dir runs/lora
    python train_prior.py evaluate --run_dir runs/prior
    python train_prior.py sample --text "a small red star" --num_samples 4 --out embeddings.npy

Run the same command again to resume. `python train_prior.py [train|evaluate|sample] --help` lists
the settings. DALL-E 2: Ramesh et al. 2022.

What differs from the paper:
- There is no autoregressive prior.
- A frozen CLIP encodes the text, in 77 tokens, as in Karlo. DALL-E 2 trains a text transformer
  together with its prior, on 256 tokens.
- The defaults train in minutes on two cores. The model is small, sees only the text embedding, and
  takes embeddings of unit length. The learning rate decays along a cosine, and sampling takes 12
  steps. `--preset dalle2` has the sizes, the optimizer and the 64 sampling steps of Table 3.
- Sampling takes evenly spaced DDPM steps, or DPM-Solver++(2M) steps with --eta 0. The paper uses
  the analytic variance of Bao et al. 2022 (Table 3).
- "No text" is the CLIP's encoding of "", or zeros if no CLIP is loaded. An open_clip model is
  loaded only to encode captions.
- Sampling clamps its estimates of x0. For raw embeddings the bound is 10, as in Karlo's code. An
  imported model has its scheduler's bound (5 in diffusers' conversion of Karlo).
- Gradients are clipped. `--preset dalle2` warms up the learning rate for 10,000 steps; the paper
  mentions no warm-up. The EMA decay warms up as well (ema.py).
- Of several candidates, sampling keeps the one with the highest cosine similarity to its text; the
  paper compares dot products.
- Off by default and not in the paper: --noise_draws, --loss_weight, other objectives, LoRA.
"""

import os

# Set before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
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
        "named settings: pictures-cpu, pictures-gpu, dalle2, karlo; --config and flags win",
    )
    run_dir: str = field("runs/prior", "folder of this run; run the same command again to resume")
    data: str = field("shapes", 'folder with img_emb/ and text_emb/, or "shapes": built in')
    clip: str = field(
        "auto", "CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: from DATA"
    )
    # Model: a transformer over the text and the noised image embedding
    width: PositiveInt = model_field(192, "width of the transformer")
    # By default a few million parameters; the paper's prior has a billion (--preset dalle2).
    depth: PositiveInt = model_field(4, "number of blocks")
    heads: PositiveInt = model_field(3, "number of attention heads")
    dropout: Fraction = field(0.0, "dropout in attention and feed-forward")
    text_encodings: bool = model_field(
        False, "also condition on the encodings of the text tokens, not only on the text embedding"
    )
    text_source: Literal["shards", "clip"] = field(
        "shards", "read text embeddings and encodings from DATA, or let the CLIP encode captions"
    )
    max_text_len: PositiveInt = model_field(77, "longest text in tokens; longer ones are cut")
    raw_embeddings: bool = model_field(
        False, "do not normalize the CLIP's embeddings to unit length (Karlo)"
    )
    x0_bound: PositiveFloat = model_field(
        10.0, "bound on |x0| when sampling raw embeddings (10: Karlo's code)"
    )
    checkpointing: bool = field(False, "recompute blocks in the backward pass to save memory")
    lora_rank: NonNegativeInt = field(
        0, "rank of LoRA adapters for the frozen --init_from; 0: train all weights", fixed=True
    )
    # Diffusion: DALL-E 2 predicts x0 with the cosine schedule
    objective: Literal["x0", "v", "epsilon", "flow"] = model_field(
        "x0", "what the network predicts"
    )
    noise_schedule: Literal["cosine", "linear"] = model_field(
        "cosine", "noise schedule; flow has its own"
    )
    # Uniform is DDPM's choice; the others come from SD3.
    timestep_density: Literal["uniform", "logit_normal", "mode"] = field(
        "uniform", "distribution of the training timesteps (SD3 §3.1)", affects_val_loss=True
    )
    loss_weight: Literal["none", "min_snr", "sigma_sqrt", "cosmap"] = field(
        "none", "loss weight by noise level; sigma_sqrt and cosmap: flow only"
    )
    # More draws are cheap if the text is long, because they share one pass over it.
    noise_draws: PositiveInt = field(
        1,
        "(timestep, noise) draws per sample, which share one pass over its text",
        affects_val_loss=True,
    )
    # "10% of the time" (DALL-E 2 §2.2)
    text_drop: Fraction = field(
        0.1, "probability of dropping the text, for guidance", affects_val_loss=True
    )
    # Optimization. The defaults train in minutes on two cores. The paper's learning rate is
    # constant.
    steps: PositiveInt = field(1150, "optimizer steps")
    batch_size: PositiveInt = field(256, "samples per step, over all ranks", fixed=True)
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: Muon for matrices, AdamW for the rest", fixed=True
    )
    lr: PositiveFloat = field(3e-3, "peak learning rate")
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay along half a cosine after the warm-up; off: constant")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
    # Biases, norms and learned tokens are not decayed.
    weight_decay: NonNegativeFloat = field(0.01, "decoupled weight decay of matrices and kernels")
    betas: tuple[Beta, Beta] = field(
        (0.9, 0.99), "Adam's decay rates of the first and second moments"
    )
    eps: PositiveFloat = field(1e-8, "Adam's epsilon")
    max_grad_norm: NonNegativeFloat = field(1.0, "clip gradients to this norm, 0: no clipping")
    # Sampling and testing use the averaged weights. The decay warms up to this value (ema.py).
    ema_decay: Fraction = field(0.9999, "maximum decay of the weight average, 0: no averaging")
    ema_update_after: NonNegativeInt = field(0, "steps before averaging starts")
    ema_update_every: PositiveInt = field(1, "steps between updates of the average")
    # Evaluation
    eval_every: Interval = field("575", "steps or time (10min) between evaluations; 0: at the end")
    eval_samples: NonNegativeInt = field(
        512, "held-out samples to evaluate on, 0: all", affects_val_loss=True
    )
    # On the built-in data, 64 steps are no better than 12.
    eval_timesteps: tuple[PositiveInt, ...] = field(
        (6, 12), "numbers of sampling steps to evaluate with"
    )
    guidance_scale: NonNegativeFloat = field(1.0, "guidance scale in evaluation, 1: none")

    timesteps: ClassVar[int] = 1000  # number of noise levels T (DALL-E 2, Table 3)

    def __post_init__(self):
        super().__post_init__()
        # The width is split into heads and, in the timestep embedding, into sines and cosines.
        if self.width % self.heads or self.width % 2:
            raise UserError(
                f"--width {self.width}: expected a multiple of 2 and --heads {self.heads}"
            )
        diffusion.check_settings(self)
        self.check_sampling(self.guidance_scale, max(self.eval_timesteps, default=0))
        tracker.check(self)

    def check_sampling(self, guidance_scale, steps):
        """UserError if the model cannot sample with these settings.

        A model trained with --text_drop 0 has not learned "no text", so it always needs a text, and
        cannot be guided.
        """
        if not 1 <= steps <= self.timesteps:
            raise UserError(f"{steps} sampling steps: expected 1 to {self.timesteps}")
        if self.text_drop == 0 and guidance_scale != 1:
            raise UserError(
                f"{self.run_dir} is trained with --text_drop 0, so it needs a text and a guidance "
                "scale of 1"
            )


MAX_CHUNK = 256  # maximum samples per forward pass if --chunk_size is 0


# Model


class Prior(nn.Module):
    """Causal transformer: text encodings, text embedding | time, noised image embedding, query.

    The output at the learned query is the prediction (DALL-E 2 §2.2). The architecture is that of
    Karlo and Kandinsky, whose weights can be loaded (common/interop/pretrained.py).

    The text prefix (left of the bar) does not depend on the noise, so it is computed only once: in
    training for all `noise_draws` of a sample, in sampling for all steps.

    B batch, D width of embeddings, W width of the transformer, L text length, K noise draws, P
    tokens in the prefix.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        """embed_width: D of image and text embeddings. encoding_width: of text encodings, or 0."""
        super().__init__()
        self.cfg = cfg
        self.embed_width = embed_width
        width = cfg.width
        text_len = 0
        # Each kind of token has its own projection to the transformer's width.
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

        # Mean and std of image embeddings, for `standardize`. For embeddings of unit length, 0 and
        # 1/√D give x0 a norm of √D. For raw ones, `measure_embeddings` takes both from the data.
        self.register_buffer("clip_mean", torch.zeros(embed_width))
        self.register_buffer("clip_std", torch.full((embed_width,), embed_width**-0.5))

        diffusion.add_noise_schedule(self, cfg)  # buffers α_t and σ_t

    def measure_embeddings(self, image_embed):
        """Set clip_mean and clip_std from raw image embeddings (N, D) of the training data."""
        self.clip_mean.copy_(image_embed.mean(0))  # (D,)
        # Avoid a division by zero in a constant dimension.
        self.clip_std.copy_(image_embed.std(0).clamp(min=1e-6))

    def normalized(self, embed):
        """Embeddings (…, D) at unit length, or unchanged if the model takes raw embeddings."""
        if self.cfg.raw_embeddings:
            return embed
        return F.normalize(embed, dim=-1)

    def standardize(self, embed):
        """CLIP image embeddings (…, D) -> x0 at the scale of the noise, with a norm of about √D."""
        # Without this, embeddings of length 1 would drown in noise of length √D.
        return (self.normalized(embed) - self.clip_mean) / self.clip_std

    def destandardize(self, x0):
        """The inverse of `standardize`."""
        return self.normalized(x0 * self.clip_std + self.clip_mean)

    def text_tokens(self, condition, drop, draws):
        """The text prefix (B, P, W), and the `mask` for the prefix and `draws` noise draws.

        Where `drop` (B,) is true, "no text" replaces the text.
        """
        condition = self.null_text(condition, drop)  # only the text is dropped, never x_t
        text_embed = condition["text_embed"]
        if not self.cfg.raw_embeddings:  # scale to length √D, like the noised image embedding
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
        """Attention mask (B, 1, P + 3K, P + 3K) for K noise draws: True = the row sees the column.

        is_text (B, P): false for padding in the prefix. A token sees the text before it, itself,
        and the earlier tokens of its own draw. Tokens are ordered by kind, then by draw. An example
        with padding and two draws:
          1 0 0 | 0 0 | 0 0 | 0 0     text encodings
          1 1 0 | 0 0 | 0 0 | 0 0     padding
          1 0 1 | 0 0 | 0 0 | 0 0     text embedding
          1 0 1 | 1 0 | 0 0 | 0 0     time, for draw 0 and draw 1
          1 0 1 | 0 1 | 0 0 | 0 0
          1 0 1 | 1 0 | 1 0 | 0 0     noised image embedding
          1 0 1 | 0 1 | 0 1 | 0 0
          1 0 1 | 1 0 | 1 0 | 1 0     query
          1 0 1 | 0 1 | 0 1 | 0 1
        """
        prefix_len = is_text.shape[1]
        # Each draw is a group. So is each prefix token, so that it sees at least itself: a row of
        # the softmax must not be empty.
        group = torch.arange(prefix_len + draws, device=is_text.device)
        group = torch.cat([group, group[prefix_len:], group[prefix_len:]])
        same_group = group[:, None] == group
        is_text = F.pad(is_text, (0, 3 * draws))[:, None, None]
        return (same_group | is_text).tril()

    def forward(self, x_t, timestep, condition, drop):
        """Predictions (B, K, D) for K noise draws per sample, in one pass with the text."""
        return self.predict(x_t, timestep, *self.text_tokens(condition, drop, x_t.shape[1]))

    def text_cache(self, condition, drop):
        """Arguments of `predict` for all sampling steps, with the text as a KV cache."""
        tokens, mask = self.text_tokens(condition, drop, 1)
        of_text = mask[..., :-3, :-3]  # (B, 1, P, P)
        # Only the cache is needed, so let the last block compute a single token.
        _, cache = self.transformer(tokens, of_text, num_last=1, return_cache=True)
        return tokens[:, :0], mask, cache  # (B, 0, W): the cache replaces these tokens

    def predict(self, x_t, timestep, text, mask, cache=None):
        """Predictions (B, K, D) for x_t (B, K, D) at `timestep` (B, K).

        In training, `text_tokens` makes text and mask. In sampling, `text_cache` makes text, mask
        and cache.
        """
        noised = self.image_in(x_t)  # (B, K, W)
        query = self.query.weight.to(noised.dtype).expand_as(noised)
        noised = torch.stack([self.time_in(timestep), noised, query], dim=1)  # (B, 3, K, W)
        positions = self.positions.weight[-3:, None]
        noised = noised + positions.to(noised.dtype)
        tokens = torch.cat([text, noised.flatten(1, 2)], dim=1)  # (B, P + 3K or 3K, W)
        # Keep the mask's rows for these tokens. Its columns cover the cache as well.
        mask = mask[..., -tokens.shape[1] :, :]
        # The last K tokens are the learned queries.
        return self.out(self.transformer(tokens, mask, cache=cache, num_last=x_t.shape[1]))


def conditioning(batch, cfg, clip_model):
    """The model's conditions: {"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)}.

    If the batch has captions, `clip_model` encodes them (or their tokens). Otherwise the batch has
    embeddings. An empty caption means unconditional.
    """
    if "caption" in batch:
        texts = batch.get("tokens", batch["caption"])
        return clip_model.text_condition(texts, cfg.max_text_len)
    condition = {"text_embed": batch["text_embed"]}  # (B, D)
    if "text_enc" in batch:
        encodings = batch["text_enc"]  # (B, L', E), of any length
        missing = cfg.max_text_len - encodings.shape[1]  # negative: the text is cut
        encodings = F.pad(encodings, (0, 0, 0, missing))
        condition["text_enc"] = encodings
        condition["text_mask"] = encodings.any(-1)  # rows of zeros are padding
    return condition


# Loss


def diffusion_loss(prior, batch, condition):
    """Mean loss over a chunk.

    Eval mode ignores the loss weights. Text drop, noise draws and timestep density are as in
    training.
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
    # Classifier-free guidance needs a model that was also trained on "no text".
    drop = torch.rand(len(x0), device=x0.device) < cfg.text_drop

    # Forward process: x_t = α·x0 + σ·ε (DDPM Eq. 4).
    alpha, sigma = diffusion.alpha_sigma(prior, timestep, x0)  # (B, K, 1)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)

    # The loss is computed in fp32, whatever the precision of the model.
    prediction = prior(x_t, timestep, condition, drop)  # (B, K, D)
    loss = (prediction.float() - target) ** 2
    if prior.training:  # weight each noise level
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
    """Sample image embeddings (B · candidates, D), ordered by text, for the conditions of B texts.

    They are raw or of unit length, like the embeddings that the model was trained on. noise_fn(x):
    noise with the shape of x. negative: the `conditioning` of a negative text, for guidance.
    """
    cfg = prior.cfg
    texts = len(condition["text_embed"])
    size = texts * candidates
    device = prior.alpha.device

    # Guidance needs a second copy of each sample, with the same noised input and "no text". Scale 1
    # needs only the first copy, and scale 0 only the second.
    copies = 1 if guidance_scale in (0, 1) else 2
    first_dropped = texts if guidance_scale else 0  # the first row with "no text"
    condition = {name: torch.cat([value] * copies) for name, value in condition.items()}
    drop = torch.arange(copies * texts, device=device) >= first_dropped
    if negative:  # it replaces "no text"
        for name, value in negative.items():
            condition[name][first_dropped:] = value
        drop = torch.zeros_like(drop)
    text = prior.text_cache(condition, drop)  # once for all candidates and steps
    text = tree_map(lambda x: x.repeat_interleave(candidates, 0), text)

    # Bound on each component of x0. If embeddings are not raw, x0 has a norm of √D, which no
    # component can exceed.
    bound = cfg.x0_bound if cfg.raw_embeddings else prior.embed_width**0.5

    def denoise(x_t, timestep):
        x_in = x_t.repeat(copies, 1)[:, None]  # (copies · size, 1, D), one draw per row
        t_in = timestep.repeat(copies)[:, None]
        prediction = prior.predict(x_in, t_in, *text)[:, 0].float()
        prediction = diffusion.classifier_free_guidance(
            prediction[:size], prediction[-size:], guidance_scale
        )
        alpha, sigma = diffusion.alpha_sigma(prior, timestep, x_t)
        x0 = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma)
        return x0.clamp(-bound, bound), 0.0  # no learned variance

    # Start from pure noise, and return embeddings at the CLIP's scale.
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
    """Sample image embeddings (texts · num_samples, D), ordered by text.

    Each is the best of `best_of` candidates: the most similar to its text (DALL-E 2 §2.2).
    condition: `conditioning` of the texts. keys: one per text. (seed, key, candidate
    number) seeds the noise, so it does not depend on the batch. negative: see
    `sample_embeddings`.
    """
    candidates = num_samples * best_of  # per text
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
    # Compare each candidate with its own text.
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
    """{metric: value} of embeddings sampled for a split. Collective.

    The metrics are mean cosine similarities, for each number of steps in eval_timesteps, and
    `builtin_scores`. They do not depend on the number of ranks.
    """
    cfg = prior.cfg
    device = prior.alpha.device
    dataset, indices = splits[split]
    mode = prior.training
    prior.eval()  # no dropout
    with amp.autocast(device, cfg.precision):
        indices = order.some_of(indices, cfg.eval_samples)
        # For each sample, the unrelated text is the one half a split away.
        others = loader.ChunkDataset(dataset, np.roll(indices, len(indices) // 2))
        cosines = collections.defaultdict(list)  # {metric: values on this rank}
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
                # The noise is the same in every evaluation, so that metrics are comparable.
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
    prior.train(mode)  # restore the mode
    return metrics


def builtin_scores(prior, splits, split, clip_model):
    """caption_match and coverage at the largest of eval_timesteps, and their ceilings. Collective.

    Only the built-in data has them (see `synthetic.embedding_scores`); otherwise the result is {}.
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
    # Ceilings come from real embeddings, so they have no number of sampling steps.
    return {
        name if name.endswith("ceiling") else f"{name}@{steps}": value
        for name, value in scores.items()
    }


# Training


def open_data(cfg, source, device, widths=None):
    """Open the data; returns ({split: (dataset, indices)}, CLIP or None, info).

    info: {name: plain value}, for model files. The CLIP encodes "no text" and, with --text_source
    clip, the captions. source: a model file, or None; it names the CLIP if neither cfg nor the data
    do. widths: [embeddings, text encodings or 0] of an existing model, or None.
    """
    with_captions = cfg.text_source == "clip"
    with_encodings = cfg.text_encodings and not with_captions  # from the shards
    # The CLIP of the embeddings is named by the flag, else by the data, else by the model file.
    spec, fingerprint = clips.clip_of(cfg, source)
    clip_model = None
    # An open_clip model may be large, or need a download. Load it only to encode captions.
    if with_captions or (spec and not spec.startswith("open_clip:")):
        clip_model = clips.load(spec, device, fingerprint, text_only=True)
        fingerprint = clip_model.fingerprint()

    datasets = []
    for path in filter(None, (cfg.data, cfg.val_data)):
        index_dir = Path(cfg.run_dir, "index")
        dataset = embeddings.Embeddings(path, with_encodings, with_captions, index_dir)
        encoding_width = dataset.encoding_width
        if clip_model:  # a CLIP with other widths cannot have made these embeddings
            clip_model.check_widths(f"--clip {spec} for {path}", dataset.width, encoding_width)
        clips.check_source(cfg, dataset, path, clip_model)
        if with_captions:  # say now if texts are cut, because samples do not show it
            if cfg.text_encodings:
                encoding_width = clip_model.encoding_width
            texts = []
            for index in order.evenly_spaced(len(dataset), 256):
                with contextlib.suppress(UserError):  # a damaged caption affects only its sample
                    texts += dataset.texts([index])
            if not texts:
                dataset.texts([0])  # raises the suppressed error
            clip_model.note_cut(texts, cfg.max_text_len)
        found = [dataset.width, encoding_width]
        widths = widths or found  # all data must agree, or the run would fail later
        if found != widths:
            raise UserError(
                f"{path}: widths of embeddings and text encodings (0: none) are {found}; those of "
                f"the model are {widths}"
            )
        datasets.append(dataset)

    # Stored with the model. Needed to build it and to sample from texts.
    info = {
        "kind": "prior",
        "widths": widths,
        "clip": spec,
        "clip_fingerprint": fingerprint,
        # `sample --text_embeds` compares the norm of its embeddings to this.
        "text_norm": datasets[0].text_embeds.median_norm,
    }
    return order.splits(datasets[0], cfg, *datasets[1:]), clip_model, info


def train(cfg):
    # Join the process group, and make the built-in data if needed. Rank 0 locks the run folder,
    # then all ranks open the data.
    device = dist.setup(cfg.device, cfg.timeout_minutes, cfg.deterministic)
    if cfg.data == "shapes":
        from common.data import embed

        cfg = embed.with_builtin_data(cfg, device)
    run, cfg = resume.open_run(cfg, cfg.run_dir, MAX_CHUNK)
    # The model file that the run starts from may name the CLIP.
    splits, clip_model, info = dist.on_all(lambda: open_data(cfg, run.source, device))
    dataset, indices = splits["train"]
    identity = resume.identify(run, cfg, splits, clip=info["clip_fingerprint"])
    if run.results:  # the run is finished
        return loop.announce(run, cfg)

    # Build model, optimizer and EMA. Restore them on resume.
    accumulate.seed_all(cfg.seed, "weights")  # all ranks start with the same weights
    prior = Prior(cfg, *info["widths"]).to(device)
    if clip_model:
        prior.null_text.fill(clip_model.text_condition([""], cfg.max_text_len))
    if cfg.raw_embeddings:  # a model loaded below has its own statistics
        batch, usable = dataset.fetch(order.some_of(indices, 10_000))
        prior.measure_embeddings(batch["image_embed"][usable])
    trainable = prior  # with LoRA: only the adapters
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

    # The order of samples is a function of seed and step. Workers tokenize captions.
    tokenizer = clip_model.tokenizer if cfg.text_source == "clip" else None
    plan, batches = loader.train_batches(cfg, dataset, indices, state.step, device, tokenizer)
    about = f"{len(dataset):,} embeddings of width {dataset.width}"
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    # Open the logger and write config.json.
    with loop.begin(run, state, about, device) as progress:
        prior.train()
        while True:
            # Evaluate. Sampling uses the averaged weights, so val_loss and best.pt use them, too.
            if eval_due():
                with progress.paused():
                    validation = splits["validation"]
                    metrics = {"val_loss_online": mean_loss(prior, validation, clip_model)}
                    with ema.applied(trainable):
                        metrics["val_loss"] = mean_loss(prior, validation, clip_model)
                        if state.step < cfg.steps:  # after the last step, the test follows
                            metrics |= sample_metrics(prior, splits, "validation", clip_model)
                progress.log_evaluation(metrics)  # also saves the best model
            if state.step >= cfg.steps:
                break

            # Take one optimizer step. The learning rate depends only on the step.
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
                        condition = conditioning(batch, cfg, clip_model)  # the CLIP is in fp32
                        with amp.autocast(device, cfg.precision):
                            loss = diffusion_loss(prior, batch, condition)
                        # Chunk weights sum to 1, so the gradients add up to the gradient of the
                        # mean loss.
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

            # Log and save. After a signal to any rank, all ranks stop, and `loop.begin` saves.
            if state.step % cfg.log_every == 0 or state.step == cfg.steps:
                progress.log_line()  # synchronizes ranks and device
            if save_due():
                progress.save()
            dist.stop_together()

        # Test the averaged weights, then write model.pt.
        with ema.applied(trainable):
            metrics = {"loss": mean_loss(prior, splits["test"], clip_model)}
            metrics |= sample_metrics(prior, splits, "test", clip_model)
        progress.finish(metrics)


# Commands


@dataclass(frozen=True)
class PriorConfig(config.Inference):
    """The prior"""

    run_dir: str = field("runs/prior", "run folder of the prior")
    lora_scale: float = field(1.0, "scale of its LoRA adapters, 0: without adapters")
    guidance_scale: float = field(-1.0, "guidance scale, 1: none, below 0: as in training")


def load_prior(path, device, weights="ema", lora_scale=1.0):
    """Load (prior in eval mode, file contents) from a model file, with adapters merged."""
    cfg, contents = checkpoint.read_model({"prior": Config}, path, weights)
    contents = adapters.merged(contents, path, lora_scale)
    prior = Prior(cfg, *contents["widths"])
    checkpoint.load_weights(prior, contents["model"], path)
    return prior.to(device).eval(), contents


def guidance_of(args, cfg):
    """The guidance scale given to the command, or else the scale used in training."""
    return args.guidance_scale if args.guidance_scale >= 0 else cfg.guidance_scale


@dataclass(frozen=True)
class EvaluateConfig(PriorConfig):
    """What to evaluate on"""

    data: str = field("", "embeddings; default: the training data")
    eval_samples: NonNegativeInt = field(0, "maximum number of test samples, 0: all")
    eval_timesteps: tuple[PositiveInt, ...] = field((), "sampling steps; default: as in training")


def open_evaluation(args, device):
    """Load (prior with the settings of this evaluation, splits, CLIP or None)."""
    path = checkpoint.model_file(args.run_dir, args.model, args.weights)
    prior, contents = load_prior(path, device, args.weights, args.lora_scale)
    cfg = loop.evaluation_settings(prior.cfg, args, MAX_CHUNK)
    prior.cfg = dataclasses.replace(
        cfg,
        run_dir=args.run_dir,
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

    text: str = field("", "text prompt; without any text, sampling is unconditional")
    texts: str = field("", "file with one text per line")
    text_embeds: str = field("", ".npy file of text embeddings (N, D), which needs no CLIP")
    negative_text: str = field("", "negative text: guidance moves away from it")
    num_samples: PositiveInt = field(4, "embeddings per text")
    eta: Fraction = field(1.0, "sampling noise, 1: DDPM, 0: none (DPM-Solver++(2M))")
    best_of: PositiveInt = field(
        2, "candidates per embedding; the one most similar to the text is kept"
    )
    steps: NonNegativeInt = field(0, "sampling steps, 0: the largest of eval_timesteps")
    max_batch: PositiveInt = field(256, "candidates per batch; those of one text share a batch")
    clip: str = field("", "CLIP for the text; default: the CLIP used in training")
    out: str = field("embeddings.npy", ".npy file for the embeddings (texts · num_samples, D)")

    def __post_init__(self):
        super().__post_init__()
        if self.text:
            config.check_unused(self, "with --text", "texts", "text_embeds")
        elif self.texts:
            config.check_unused(self, "with --texts", "text_embeds")
        else:
            config.check_unused(self, "without a text", "clip", "negative_text")
            if not self.text_embeds:
                config.check_unused(self, "without a text", "guidance_scale", "best_of")


def read_text_embeddings(path, prior, median_norm):
    """Text embeddings (N, D) of a .npy file; UserError if they do not fit the prior.

    median_norm: median norm of the text embeddings in training, or None if unknown.
    """
    if prior.cfg.text_encodings:
        raise UserError(
            "--text_embeds: this prior also needs text encodings; give --text or --texts"
        )
    embeds = torch.from_numpy(embeddings.open_npy(path).astype(np.float32))
    rows, width = embeds.shape
    if not rows or width != prior.embed_width or not embeds.isfinite().all():
        raise UserError(
            f"{path}: {rows} rows of width {width}; expected at least one of width "
            f"{prior.embed_width}, with finite numbers"
        )
    # The model does not normalize raw embeddings, so those of another length would mislead it.
    length = embeds.norm(dim=1).median()
    if prior.cfg.raw_embeddings and median_norm and not 0.5 < length / median_norm < 2:
        raise UserError(
            f"{path}: its embeddings have length {length:.3g}, but those in training have length "
            f"{median_norm:.3g}; write them with python -m common.data.embed embed --raw"
        )
    return embeds


def sample(args):
    device = dist.choose_device(args.device)
    if not dist.is_main():  # a single process samples
        return

    # Load the prior, and the texts or text embeddings.
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
        # Check the fingerprint: another CLIP would silently embed texts differently.
        clip_model = clips.load(spec, device, contents["clip_fingerprint"], text_only=True)
        clip_model.check_widths(f"--clip {spec}", *contents["widths"])
        clip_model.note_cut(texts, cfg.max_text_len)
        inputs = {"caption": texts}
        if args.negative_text:
            if guidance_scale == 1:
                raise UserError("--negative_text needs guidance; give a --guidance_scale above 1")
            negative = conditioning({"caption": [args.negative_text]}, cfg, clip_model)
    elif args.text_embeds:
        embeds = read_text_embeddings(args.text_embeds, prior, contents.get("text_norm"))
        inputs = {"text_embed": embeds.to(device)}
    else:
        inputs = dict(prior.null_text.named_buffers())
        guidance_scale = 0.0  # only the prediction for "no text"
        best_of = 1  # there is no text to compare candidates with
    cfg.check_sampling(guidance_scale, steps)

    # Sample a few texts at a time, because each condition is repeated for every candidate.
    samples = []
    count = args.max_batch // (args.num_samples * best_of) or 1
    for number, batch in enumerate(accumulate.batches(inputs, count)):
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
    # Write atomically, so that an interrupted command leaves no broken file.
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
    # For thousands of captioned images; both were run to completion on 6,000 emoji: pictures-cpu on
    # two cores, and pictures-gpu on one H200 (79 s).
    "pictures-cpu": dict(PICTURES, steps=1000, eval_every="125"),
    "pictures-gpu": dict(
        PICTURES,
        text_encodings=True, text_source="clip",
        width=512, depth=6, heads=8,  # 20M parameters
        batch_size=512, steps=500, lr=1e-3, eval_every="125", precision="bf16",
    ),
    # The diffusion prior of DALL-E 2's Table 3, but with a public CLIP.
    "dalle2": dict(
        clip="open_clip:ViT-L-14/openai",
        text_encodings=True, text_source="clip",
        # Model
        width=2048, depth=24, heads=32,  # 1B parameters
        eval_timesteps=(8, 64),
        # Optimization: AdamW, EMA decay of 0.9999
        batch_size=4096, steps=600_000, lr=1.1e-4,
        cosine=False, betas=(0.9, 0.96), eps=1e-6, weight_decay=0.06,
        # Not in the paper
        warmup_steps=10_000, chunk_size=64, precision="bf16", workers=4,
        validation=0.01, test=0.01,
        log_every=100, eval_every="10000", save_every="2000",
    ),
}
# Karlo: model and sampling settings from its published configs. How it was trained is not public,
# so the training settings are DALL-E 2's.
PRESETS["karlo"] = dict(
    PRESETS["dalle2"], depth=20, raw_embeddings=True, guidance_scale=4.0, eval_timesteps=(25,)
)
# fmt: on


def main():
    config.run(COMMANDS, __doc__, default="train", presets=PRESETS)


if __name__ == "__main__":
    main()
