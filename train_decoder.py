"""Train a cascade of pixel-diffusion U-Nets: CLIP image embedding -> image (DALL-E 2, §2.1).

    torchrun --nproc_per_node=2 train_decoder.py     # both stages, on the built-in shapes
    torchrun --nproc_per_node=2 train_decoder.py --stage base --data tars --run_dir runs/mine
    torchrun --nproc_per_node=2 train_decoder.py --stage upsample --data tars --run_dir runs/mine
    python train_decoder.py evaluate --prior runs/prior
    python train_decoder.py sample --text "a large green triangle" --num_samples 8 --out grid.png
    python train_decoder.py sample --image a.png [--to b.png | --mask mask.png --text TEXT]

Run the same command again to resume. Each stage has its own run folder, RUN/base or RUN/upsample,
and its own settings, which need --stage. A cascade is a list of such folders. `python
train_decoder.py [train|evaluate|sample] --help` lists the settings.

DALL-E 2: Ramesh et al. 2022; GLIDE: Nichol et al. 2021; ADM: Dhariwal & Nichol 2021; Imagen:
Saharia et al. 2022; Karlo: kakaobrain/karlo-v1-alpha.

What differs from the papers ("the presets" are those of DALL-E 2 and Karlo):
- A frozen CLIP encodes the text, as in Karlo; GLIDE trains a text transformer instead. Text padding
  is masked; GLIDE learns an embedding for it. Projected text gets a layer norm (Karlo).
- CLIP embeddings are scaled to length √D, also in DALL-E 2's presets. --raw_embeddings turns this
  off.
- By default the base learns rectified flow, with SD3's timestep density and Muon, and the upsampler
  predicts x0. The presets use the papers' epsilon prediction and AdamW, and for the base a learned
  variance.
- The default sizes are small enough for two CPU cores. The default upsampler trains on crops with
  half the image's side; the paper and the presets use a quarter.
- The bound that trains the learned variance clips x0; ADM's code does not.
- All images are shrunk with a box filter. The low-resolution image is enlarged bicubically; ADM
  enlarges it bilinearly.
- Gradients are clipped at 1. The presets warm up the learning rate for 10,000 steps.
- Rectified flow is trained on 1,000 discrete noise levels.
- The input of an upsampler is blurred with probability 0.5. Noise augmentation (Imagen) is off by
  default; with it, sampling adds the least noise, unless `sample --low_res_noise` asks for more.
  DALL-E 2 degrades the input of its second upsampler (256 -> 1024) with BSR.
- A model without attention levels has no attention in the middle either; ADM always has it there.
- A group norm has fewer than 32 groups where these would be uneven or have under 4 channels.
- The EMA decay warms up (ema.py).
- Sampling takes evenly spaced steps (DPM-Solver++(2M) with --eta 0) and clips its estimates of
  x0. DALL-E 2 tunes the spacing.
- In guidance, the encodings of a negative text, and the image embedding that the prior makes from
  it, replace "no text" and "no image" (as in Kandinsky 2).
- Variations of an image start from fresh noise. DALL-E 2 (§3.1) inverts the image with DDIM.
- Inpainting is RePaint with a jump length of 1, in DDPM steps, or DDIM steps with --eta 0; GLIDE
  fine-tunes a model. Without a text, the condition is the embedding of the whole image, so the
  original contents of the hole may reappear.
- There are no text diffs (§3.3).
- Off by default and not in the papers: --loss_weight, --dream, LoRA.
"""

import os

# Set before torch is imported: idle OpenMP threads stop spinning early, so ranks can share cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import collections
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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
from common.data import clips, embed, files, images, media, synthetic
from common.ema import EMA
from common.models import clip, diffusion, pixels
from common.models.nn import (
    Attention,
    GroupNorm,
    LayerNorm,
    NullText,
    TimeEmbedding,
    compile_blocks,
    run_block,
    zero_init,
)

Objective = Literal["x0", "v", "epsilon", "flow"]
Density = Literal["uniform", "logit_normal", "mode"]
TIMESTEPS = 1000  # number of noise levels T (DALL-E 2, Table 3)
SamplingSteps = Annotated[int, (f"1 to {TIMESTEPS}", lambda value: 1 <= value <= TIMESTEPS)]

# Configs: one shared by all stages, one shared by both U-Nets, and one for each U-Net


@dataclass(frozen=True)
class SharedConfig(config.TrainingRun):
    """Stage and data"""

    stage: Literal["all", "base", "upsample"] = field(
        "all", "stage to train; all: in turn; takes only the shared settings"
    )
    preset: str = field(
        "",
        "named settings: pictures-cpu, pictures-gpu, dalle2-64, dalle2-256, dalle2-1024, "
        "karlo-64, karlo-256; --config and flags win",
    )
    run_dir: str = field("runs/decoder", "folder of the runs; each stage has RUN_DIR/STAGE")
    data: str = field(
        "shapes", 'img2dataset tars, a folder of captioned images, or "shapes": built in'
    )
    clip: str = field(
        "auto", "CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: from DATA"
    )
    # CLIP embeddings computed on the fly describe the crop. Embeddings stored with the data
    # describe the whole image.
    crop_scale: Fraction = field(
        1.0, "minimum area of random square crops, as a fraction of the image", fixed=True
    )
    flip: bool = field(
        False, "mirror half of the images; leave off if captions mention left or right", fixed=True
    )
    eval_samples: NonNegativeInt = field(
        192, "held-out samples to evaluate on, 0: all", affects_val_loss=True
    )

    def __post_init__(self):
        super().__post_init__()
        tracker.check(self)


@dataclass(frozen=True)
class UNetConfig(SharedConfig):
    """Model and training of a U-Net"""

    # Model: the U-Net of ADM
    image_size: PositiveInt = model_field(16, "width and height of the images")
    width: PositiveInt = model_field(32, "channels of the finest level")
    channel_mult: tuple[PositiveInt, ...] = model_field(
        (1, 2, 4), "channels of each level, in multiples of width; each level halves the size"
    )
    num_res_blocks: PositiveInt = model_field(
        1, "residual blocks per level on the way down; the way up has one more"
    )
    dropout: Fraction = field(0.0, "dropout before the second convolution of a block")
    checkpointing: bool = field(False, "recompute blocks in the backward pass to save memory")
    # Diffusion: x_t = α_t·x0 + σ_t·ε
    objective: Objective = model_field("flow", "what the network predicts")
    timestep_density: Density = model_field(
        "logit_normal", "distribution of the training timesteps (SD3 §3.1)"
    )
    loss_weight: Literal["none", "min_snr", "sigma_sqrt", "cosmap"] = field(
        "none", "loss weight by noise level; sigma_sqrt and cosmap: flow only"
    )
    dream: bool = field(
        False, "train on the model's own errors (DREAM), one more pass per step; for upsamplers"
    )
    # Optimization. The defaults train in minutes on two cores.
    steps: PositiveInt = field(900, "optimizer steps")
    batch_size: PositiveInt = field(64, "samples per step, over all ranks", fixed=True)
    optimizer: Literal["adamw", "muon"] = field(
        "adamw", "muon: Muon for matrices, AdamW for the rest", fixed=True
    )
    lr: PositiveFloat = field(2e-3, "peak learning rate")
    warmup_steps: NonNegativeInt = field(50, "steps of linear warm-up")
    cosine: bool = field(True, "decay along half a cosine after the warm-up; off: constant")
    cosine_steps: NonNegativeInt = field(0, "step at which the cosine reaches 0; 0: the last")
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
    # Evaluation, and defaults of `sample`
    eval_every: Interval = field("500", "steps or time (10min) between evaluations; 0: at the end")
    # On the built-in data, 25 steps are no better.
    eval_steps: SamplingSteps = field(12, "sampling steps")
    guidance_scale: NonNegativeFloat = field(1.0, "guidance scale in sampling, 1: none")
    eta: Fraction = field(0.0, "sampling noise, 1: DDPM, 0: none (DPM-Solver++(2M))")

    timesteps: ClassVar[int] = TIMESTEPS

    def __post_init__(self):
        super().__post_init__()
        levels = len(self.channel_mult)
        # Group norms need at least four channels per group. Each further level halves the image.
        divisor = 2 ** (levels - 1)
        if self.width % 4 or self.image_size % divisor or self.random_crop % divisor:
            raise UserError(
                f"--width {self.width}: expected a multiple of 4; --image_size and --random_crop: "
                f"multiples of {divisor}, for {levels} levels"
            )
        diffusion.check_settings(self)


@dataclass(frozen=True)
class BaseConfig(UNetConfig):
    """The base: CLIP image embedding (and optional text) -> image"""

    stage: Literal["base"] = model_field("base", "this stage")
    attention_levels: tuple[NonNegativeInt, ...] = model_field(
        (1, 2), "levels with attention; 0 is the finest"
    )
    cond_width: PositiveInt = model_field(64, "width of the context tokens")
    text_encodings: bool = model_field(
        False, "also condition on the captions, encoded by the CLIP (GLIDE §2.3)"
    )
    raw_embeddings: bool = model_field(
        False, "do not normalize the CLIP's embeddings (Karlo)"
    )
    learned_variance: bool = model_field(
        False, "also learn the variance of the DDPM steps (Nichol & Dhariwal 2021)"
    )
    lora_rank: NonNegativeInt = field(
        0, "rank of LoRA adapters for the frozen --init_from; 0: train all weights", fixed=True
    )
    # Guidance makes outlines rounder, and images slightly less varied.
    guidance_scale: NonNegativeFloat = field(1.5, "guidance scale in sampling, 1: none")
    # In the same training time, Muon reaches a loss that is a fifth lower than AdamW's.
    optimizer: Literal["adamw", "muon"] = field(
        "muon", "muon: Muon for matrices, AdamW for the rest", fixed=True
    )

    # Constants of this stage, which UNet reads like settings. ClassVars are not flags.
    image_condition: ClassVar[bool] = True
    max_text_len: ClassVar[int] = 77  # tokens, as in CLIP
    noise_schedule: ClassVar[str] = "cosine"  # for all objectives but flow
    scale_shift: ClassVar[bool] = True
    low_res_size: ClassVar[int] = 0  # none
    low_res_noise: ClassVar[float] = 0.0
    random_crop: ClassVar[int] = 0  # whole images

    def __post_init__(self):
        super().__post_init__()
        # The variational bound is an expectation over uniform timesteps.
        discrete = self.timestep_density == "uniform" and self.objective != "flow"
        if self.learned_variance and not discrete:
            raise UserError(
                "--learned_variance needs --timestep_density uniform and an objective other than "
                "flow, because its bound is a sum over the timesteps of DDPM"
            )
        levels = len(self.channel_mult)
        if max(self.attention_levels, default=levels) >= levels:
            raise UserError(
                f"--attention_levels {self.attention_levels}: expected at least one number, all "
                f"below {levels}, the number of levels; attention is where the conditions enter"
            )


@dataclass(frozen=True)
class UpsampleConfig(UNetConfig):
    """The upsampler: low-resolution image -> image, without conditions or attention"""

    stage: Literal["upsample"] = model_field("upsample", "this stage")
    low_res_size: PositiveInt = model_field(16, "width and height of the input")
    image_size: PositiveInt = model_field(32, "width and height of the images")
    channel_mult: tuple[PositiveInt, ...] = model_field(
        (1, 2), "channels of each level, in multiples of width; each level halves the size"
    )
    scale_shift: bool = model_field(
        True, "the timestep scales and shifts a norm's output; off: it is added before the norm"
    )
    # Training corrupts the input. The model has no attention, so it can train on crops.
    low_res_noise: Fraction = model_field(
        0.0, "maximum noise on the input, as a fraction of the timesteps (Imagen)"
    )
    # Half the image's side. DALL-E 2 (§2.1) and its presets use a quarter.
    random_crop: NonNegativeInt = model_field(
        16, "train on random crops of this size, 0: on whole images"
    )
    # Flow leaves grain in the images; x0 prediction does not.
    objective: Objective = model_field("x0", "what the network predicts")
    timestep_density: Density = model_field(
        "uniform", "distribution of the training timesteps (SD3 §3.1)"
    )
    noise_schedule: Literal["cosine", "linear"] = model_field(
        "cosine", "noise schedule; flow has its own"
    )
    steps: PositiveInt = field(800, "optimizer steps")
    eval_steps: SamplingSteps = field(5, "sampling steps")

    # Constants of this stage, which UNet reads like settings
    image_condition: ClassVar[bool] = False  # only the low-resolution image (DALL-E 2 §2.1)
    text_encodings: ClassVar[bool] = False
    raw_embeddings: ClassVar[bool] = False
    attention_levels: ClassVar[tuple] = ()
    learned_variance: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.low_res_size >= self.image_size or self.random_crop > self.image_size:
            raise UserError(
                f"--image_size {self.image_size}: --low_res_size must be smaller, "
                "and --random_crop no larger"
            )


STAGES = {"base": BaseConfig, "upsample": UpsampleConfig}

IMAGE_TOKENS = 4  # "four extra tokens of context" (DALL-E 2 §2.1)
# For guidance, conditions are dropped in training (Ho & Salimans 2022): the image embedding "10% of
# the time", the text "50% of the time" (DALL-E 2 §2.1).
IMAGE_DROP = 0.1
TEXT_DROP = 0.5
VLB_WEIGHT = 1e-3  # λ of the variational bound (Nichol & Dhariwal 2021, §3.1)
# Range of the blur's sigma, in pixels of the low resolution. DALL-E 2 §2.1 gives no numbers;
# DALLE2-pytorch uses 0.6.
BLUR_SIGMA = (0.4, 0.8)
BLUR_PROBABILITY = 0.5  # as in DALLE2-pytorch
# Low-resolution pixels kept around a crop, for the blur and the bicubic filter at its edges.
MARGIN = 8
GRID_CAPTION = "real images, and samples below"
RESIZE = "box"  # filter for shrinking images: the mean of the pixels
MAX_CHUNK = 64  # maximum samples per forward pass if --chunk_size is 0


# Model


def group_norm(width):
    """ADM's group norm, with 32 groups.

    It has fewer if 32 groups would not divide `width`, or would have less than four channels each.
    """
    groups = 32
    while width % groups or width < 4 * groups:
        groups //= 2
    return GroupNorm(groups, width)


class ResBlock(nn.Module):
    """Residual block of ADM, with optional attention (Dhariwal & Nichol 2021, §3 and §4.1).

    The residual path is norm, SiLU and convolution, twice.
    """

    def __init__(self, cfg, width_in, width, has_attention=False, resample=None, takes_skip=False):
        """resample: module that halves or doubles the image, on both paths, as in BigGAN (Brock et
        al. 2018). takes_skip: the caller concatenates a skip (the output of a block on the way
        down) to the input; `UNet.forward` reads this attribute of every block.
        """
        super().__init__()
        self.cfg = cfg
        self.has_attention = has_attention
        self.takes_skip = takes_skip
        self.resample = resample or nn.Identity()
        self.norm1 = group_norm(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.modulation = nn.Linear(4 * cfg.width, 2 * width if cfg.scale_shift else width)
        self.norm2 = group_norm(width)
        self.dropout = nn.Dropout(cfg.dropout)
        # Zero, so that the residual path adds nothing at first.
        self.conv2 = zero_init(nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()
        if has_attention:
            # Heads of 64 channels (ADM §3.1), or narrower heads in a narrower model.
            num_heads = width // min(64, cfg.width)
            while width % num_heads:  # the number of heads must divide the width
                num_heads -= 1
            self.attention_norm = group_norm(width)
            self.attention = Attention(width, num_heads)  # from pixels to context and pixels
            zero_init(self.attention.out)  # attention adds nothing at first
            self.token_key_value = nn.Linear(cfg.cond_width, 2 * width)

    def forward(self, x, emb, context, context_mask):
        """x (B, W_in, H, H) -> (B, W, H, H), with half or twice H if the block resamples.

        emb: embedding of timestep and conditions (B, 4·width). context, context_mask: see `attend`.
        """
        # First convolution, at the new size.
        h = self.resample(F.silu(self.norm1(x)))
        h = self.conv1(h)  # (B, W, H, H)

        # Timestep and conditions enter here (ADM §3, "adaptive group normalization").
        modulation = self.modulation(F.silu(emb))[:, :, None, None]
        if self.cfg.scale_shift:
            scale, shift = modulation.chunk(2, dim=1)  # (B, W, 1, 1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + modulation)
        # Second convolution, then the residual connection.
        h = self.conv2(self.dropout(F.silu(h)))
        x = self.skip(self.resample(x)) + h
        if self.has_attention:
            x = x + self.attend(x, context, context_mask)
        return x

    def attend(self, x, context, context_mask):
        """Attention of the pixels of x (B, W, H, H) to the context and to each other.

        context: tokens (B, J, E). context_mask (B, 1, 1, J + H² or more): true for context tokens
        and pixels to attend to; None: attend to all.
        """
        h = self.attention_norm(x).flatten(2).transpose(1, 2).contiguous()  # (B, H², W)
        # The keys and values of the context precede those of the pixels (GLIDE §2.3).
        both = [self.token_key_value(context), self.attention.key_value(h)]
        both = torch.cat(both, dim=1)  # (B, J + H², 2W)
        if context_mask is not None:
            context_mask = context_mask[..., : both.shape[1]]  # (B, 1, 1, J + H²)
        keys_values = self.attention.split_heads(both)  # each (B, heads, J + H², d)
        h = self.attention(h, *keys_values, context_mask)  # (B, H², W)
        return h.transpose(1, 2).unflatten(2, x.shape[2:])  # (B, W, H, H)


class UNet(nn.Module):
    """Denoiser of one stage of DALL-E 2's decoder (§2.1), with the architecture of ADM and GLIDE.

    B batch, W width, H image size, D width of CLIP embeddings, L text length, J number of context
    tokens, E their width. An upsampler has no CLIP or text conditions, so its `widths` are [0, 0].
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        super().__init__()
        self.cfg = cfg
        self.widths = [embed_width, encoding_width]
        # Karlo's upsampler has a second U-Net for the last step; see `load_last_step_unet`.
        self.last_step_unet = None
        emb_width = 4 * cfg.width

        # Timestep and conditions.
        self.time_in = TimeEmbedding(cfg.width, emb_width)
        if cfg.low_res_noise:
            self.low_res_time_in = TimeEmbedding(cfg.width, emb_width)
        if cfg.image_condition:
            self.null_image = nn.Parameter(torch.randn(embed_width))  # replaces a dropped image
            self.image_in = nn.Linear(embed_width, emb_width)  # added to the timestep embedding
            self.image_tokens_in = nn.Linear(embed_width, IMAGE_TOKENS * cfg.cond_width)
        if encoding_width:
            self.null_text = NullText(embed_width, encoding_width, cfg.max_text_len)
            self.text_in = nn.Linear(embed_width, emb_width)  # added as well
            self.encoding_in = nn.Linear(encoding_width, cfg.cond_width)  # to context tokens
            self.encoding_norm = LayerNorm(cfg.cond_width)

        # The way down. Every block keeps its output as a skip for the way up.
        level_widths = [cfg.width * mult for mult in cfg.channel_mult]  # the finest level first
        width = cfg.width
        skip_widths = [width]
        self.stem = nn.Conv2d(6 if cfg.low_res_size else 3, width, 3, padding=1)  # x_t, low_res
        self.downs = nn.ModuleList()
        for level, width_out in enumerate(level_widths):
            if level > 0:  # halve the size first
                self.downs.append(ResBlock(cfg, width, width, resample=nn.AvgPool2d(2)))
                skip_widths.append(width)
            for _ in range(cfg.num_res_blocks):
                self.downs.append(ResBlock(cfg, width, width_out, level in cfg.attention_levels))
                width = width_out
                skip_widths.append(width)

        # The middle, at the coarsest level. ADM always has attention here; this U-Net has it only
        # if some level has it.
        first = ResBlock(cfg, width, width, bool(cfg.attention_levels))
        self.middle = nn.ModuleList([first, ResBlock(cfg, width, width)])

        # The way up. Every block takes a skip, except the blocks that double the size.
        self.ups = nn.ModuleList()
        for level, width_out in reversed([*enumerate(level_widths)]):
            for _ in range(cfg.num_res_blocks + 1):
                width_in = width + skip_widths.pop()
                has_attention = level in cfg.attention_levels
                self.ups.append(ResBlock(cfg, width_in, width_out, has_attention, takes_skip=True))
                width = width_out
            if level > 0:  # double the size, by nearest neighbor as in ADM
                self.ups.append(ResBlock(cfg, width, width, resample=nn.Upsample(scale_factor=2)))

        # A learned variance needs three more channels.
        conv_out = nn.Conv2d(width, 6 if cfg.learned_variance else 3, 3, padding=1)
        self.out = nn.Sequential(group_norm(width), nn.SiLU(), zero_init(conv_out))

        diffusion.add_noise_schedule(self, cfg)  # buffers α_t and σ_t

    def scale_embedding(self, embed):
        """Scale CLIP embeddings (B, D) to length √D, like noise; leave raw embeddings unchanged."""
        if self.cfg.raw_embeddings:
            return embed
        return F.normalize(embed.float(), dim=-1) * embed.shape[-1] ** 0.5

    def embed_conditions(self, condition, drop_image, drop_text):
        """Returns (term to add to the time embedding (B, 4W), context (B, J, E), text_mask (B, L)).

        condition: see `conditioning`. drop_image (B,): true where the learned null embedding
        replaces the image embedding. drop_text (B,): true where the encoding of "" replaces the
        text. text_mask: false for padding. The context of an upsampler is None, and so is the
        text_mask of a model without text.
        """
        if not condition:  # an upsampler
            return 0.0, None, None
        # The image embedding is added to the timestep embedding, and becomes four tokens (§2.1).
        embed = condition["image_embed"]  # (B, D)
        drop_image = drop_image | ~embed.any(-1)  # a zero embedding means "no image"
        embed = torch.where(drop_image[:, None], self.null_image, self.scale_embedding(embed))
        added = self.image_in(embed)  # (B, 4W)
        context = self.image_tokens_in(embed).unflatten(-1, (IMAGE_TOKENS, -1))  # (B, 4, E)
        if not self.cfg.text_encodings:
            return added, context, None

        # GLIDE §2.3: the text embedding is added as well, and the text encodings become tokens.
        condition = self.null_text(condition, drop_text)
        added = added + self.text_in(self.scale_embedding(condition["text_embed"]))
        encodings = self.encoding_in(condition["text_enc"])  # (B, L, E)
        context = torch.cat([context, self.encoding_norm(encodings)], dim=1)  # (B, 4 + L, E)
        return added, context, condition["text_mask"]

    def forward(
        self, x_t, timestep, condition, drop_image, drop_text, low_res=None, low_res_timestep=None
    ):
        """Prediction (B, 3, H, H) for x_t (B, 3, H, H) at `timestep` (B,).

        With a learned variance it is (B, 6, H, H). condition, drop_image, drop_text: see
        `embed_conditions`. low_res: the low-resolution image, enlarged to size H. low_res_timestep
        (B,): timestep of the noise on it.
        """
        added, context, mask = self.embed_conditions(condition, drop_image, drop_text)
        if mask is not None:
            # Image tokens and pixels are never masked. Pad the mask once, for the finest level with
            # attention, and let coarser levels slice it: on GPUs, every small kernel costs time.
            pixels = (x_t.shape[-1] >> min(self.cfg.attention_levels)) ** 2
            mask = F.pad(mask[:, None, None], (IMAGE_TOKENS, pixels), value=True)
        emb = self.time_in(timestep) + added  # (B, 4W)
        if low_res_timestep is not None:
            emb = emb + self.low_res_time_in(low_res_timestep)  # Imagen §2.4
        x = x_t
        if low_res is not None:  # an upsampler sees it at every step (DALL-E 2 §2.1)
            x = torch.cat([x_t, low_res], dim=1)  # (B, 6, H, H)
        # Images are channels last. On GPUs this layout is slow, and would spread to all blocks.
        x = x.contiguous(memory_format=layout_on(x.device))
        x = self.stem(x)  # (B, W, H, H)
        skips = [x]  # outputs on the way down
        for block in self.downs:
            # H is halved before each level but the first.
            x = run_block(block, self.cfg.checkpointing, x, emb, context, mask)
            skips.append(x)
        for block in [*self.middle, *self.ups]:
            if block.takes_skip:  # the newest skip has the resolution of this block
                x = torch.cat([x, skips.pop()], dim=1)
            # H is doubled after each level but the last.
            x = run_block(block, self.cfg.checkpointing, x, emb, context, mask)
        return self.out(x)  # (B, 3 or 6, H, H)


def layout_on(device):
    """The fastest memory layout of weights and images on a device.

    On CPUs this is channels last. On GPUs it is not, because torch's group norm would make copies.
    """
    on_cpu = torch.device(device).type == "cpu"
    return torch.channels_last if on_cpu else torch.contiguous_format


def place(unet, device):
    """Move `unet` to `device`, in the layout that is fastest there."""
    return unet.to(device, memory_format=layout_on(device))


@torch.no_grad()
def conditioning(batch, cfg, clip_model):
    """{"image_embed" (B, D), "text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)}.

    Only the entries that the model needs are present. Image embeddings in the batch describe whole
    images. Without them, `clip_model` embeds the crops in "clip_image". `clip_model` also encodes
    the captions, or their tokens.
    """
    condition = {}
    if cfg.image_condition and "image_embed" in batch:
        condition["image_embed"] = batch["image_embed"]
    elif cfg.image_condition:
        with amp.autocast(batch["clip_image"].device, "fp32"):  # even inside another autocast
            condition["image_embed"] = clip_model.embed_image(batch["clip_image"])
    if cfg.text_encodings:
        texts = batch.get("tokens", batch["caption"])
        condition |= clip_model.text_condition(texts, cfg.max_text_len)
    return condition


# Loss


def augment_low_res(unet, low_res, timestep, noise):
    """Add the noise of `timestep` (B,) to low_res (Imagen §2.4); returns (low_res, timestep).

    The model takes this timestep as an input. Without --low_res_noise, nothing is added, and the
    timestep is None.
    """
    if not unet.cfg.low_res_noise:
        return low_res, None
    alpha, sigma = diffusion.alpha_sigma(unet, timestep, low_res)
    return alpha * low_res + sigma * noise, timestep


def low_res_window(corner, cfg):
    """The low-resolution window (start (B, 2), size) for crops at `corner` (B, 2).

    The window covers the pixels that a crop is enlarged from, and MARGIN pixels around them.
    """
    high = cfg.image_size
    low = cfg.low_res_size
    crop = cfg.random_crop or high
    size = min(low, math.ceil(crop * low / high) + 2 * MARGIN)
    return (corner * low // high - MARGIN).clamp(0, low - size), size


def cut_crops(batch, random_bits, cfg):
    """Replace the images in `batch` with crops, to train an upsampler. Workers call this.

    The model is convolutional, so it can train on crops and sample whole images (DALL-E 2 §2.1).
    "image": uint8 (B, C, C, 3), C = --random_crop. "corner" (B, 2): first pixel of each crop.
    "low_res" (B, 3, h, h): the low resolution of each crop's `low_res_window`.
    """
    images = batch["image"].permute(0, 3, 1, 2)  # (B, 3, H, H)
    high = cfg.image_size
    low = cfg.low_res_size
    crop = cfg.random_crop or high
    bits = order.random_bits(random_bits, "crop")  # independent of --crop_scale's crops
    position = order.uniform(bits, len(images), (0, 0)) * (high - crop + 1)
    corner = torch.from_numpy(position.astype(np.int64)).to(images.device)

    # Convert only the pixels of the window to floats.
    start, size = low_res_window(corner, cfg)
    covered = min(high, math.ceil(size * high / low) + 1)
    begin = (start * high // low).clamp(max=high - covered)
    window = pixels.crop(images, covered, begin).permute(0, 2, 3, 1)
    low_res = pixels.resize_windows(
        pixels.from_uint8(window), begin, high, low, start, size, RESIZE
    )
    image = pixels.crop(images, crop, corner).permute(0, 2, 3, 1)
    return {**batch, "image": image, "corner": corner, "low_res": low_res}


def upsampler_inputs(unet, batch):
    """Make (low_res (B, 3, C, C), low_res_timestep) for an upsampler from a batch of `cut_crops`.

    Generated images are less sharp than real ones, so the real low-resolution image is corrupted in
    training (DALL-E 2 §2.1).
    """
    cfg = unet.cfg
    low_res = batch["low_res"]  # (B, 3, h, h)
    size = len(low_res)
    device = low_res.device

    # Blur some of the images with a Gaussian of random width.
    blur_sigma = torch.empty(size, device=device).uniform_(*BLUR_SIGMA)
    is_blurred = torch.rand(size, device=device) < BLUR_PROBABILITY  # (B,)
    blurred = pixels.blur(low_res, blur_sigma)
    low_res = torch.where(is_blurred[:, None, None, None], blurred, low_res)
    start, _ = low_res_window(batch["corner"], cfg)
    low_res = pixels.resize_windows(
        low_res,
        start,
        cfg.low_res_size,
        cfg.image_size,
        batch["corner"],
        batch["image"].shape[1],
    )  # (B, 3, C, C)

    # Add the noise of a random timestep, one of the first --low_res_noise · T.
    fraction = torch.rand(size, device=device) * cfg.low_res_noise
    low_res_timestep = (fraction * (cfg.timesteps - 1)).round().long()  # (B,)
    noise = torch.randn_like(low_res)
    return augment_low_res(unet, low_res, low_res_timestep, noise)


def diffusion_loss(unet, batch, condition):
    """Mean loss over a chunk of uint8 images (B, H, H, 3), or of crops from `cut_crops`.

    Eval mode uses neither loss weights nor DREAM, so that validation losses are comparable.
    """
    cfg = unet.cfg
    x0 = pixels.from_uint8(batch["image"])  # (B, 3, H, H) in [-1, 1]
    size = len(x0)
    device = x0.device
    low_res = low_res_timestep = None
    if cfg.low_res_size:
        low_res, low_res_timestep = upsampler_inputs(unet, batch)
    timestep = diffusion.sample_timesteps(cfg.timestep_density, (size,), cfg.timesteps, device)
    noise = torch.randn_like(x0)  # ε

    # Drop each condition independently, so that the model also learns to predict without it.
    drop_image = torch.rand(size, device=device) < IMAGE_DROP
    drop_text = torch.rand(size, device=device) < TEXT_DROP

    inputs = (timestep, condition, drop_image, drop_text, low_res, low_res_timestep)

    # DDPM, Eq. 4: x_t = α_t·x0 + σ_t·ε
    alpha, sigma = diffusion.alpha_sigma(unet, timestep, x0)  # (B, 1, 1, 1)
    x_t = alpha * x0 + sigma * noise  # (B, 3, H, H)
    if cfg.dream and unet.training:
        # Not under no_grad: autocast would then cache weight casts without gradients.
        prediction = unet(x_t, *inputs)[:, :3].detach().float()
        x0_hat = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma)
        noise = diffusion.dream(noise, (x_t - alpha * x0_hat) / sigma, sigma)
        x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)

    # The loss is computed in fp32, whatever the precision of the model.
    out = unet(x_t, *inputs).float()
    prediction = out[:, :3]
    loss = (prediction - target) ** 2  # (B, 3, H, H)
    if unet.training:  # weight each noise level
        loss = loss * diffusion.loss_weight(cfg.loss_weight, cfg.objective, alpha, sigma)
    loss = loss.mean()
    if cfg.learned_variance:
        # The bound trains only the variance: no gradient flows through its mean.
        interpolation = (out[:, 3:] + 1) / 2  # 0: posterior variance β̃_t, 1: β_t
        x0_hat = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma)
        x0_hat = x0_hat.clamp(-1, 1)  # as in sampling; ADM's code does not clip here
        bound = diffusion.variational_bound(
            x0, timestep, x0_hat, interpolation, unet.alpha, unet.sigma
        )
        # An image's bound is a sum over all timesteps. This is one random term, times T.
        loss = loss + VLB_WEIGHT * cfg.timesteps * bound.mean()
    return loss


# Sampling


@torch.no_grad()
def sample_images(
    unet,
    condition,
    count,
    steps,
    guidance_scale=1.0,
    eta=0.0,
    noise_fn=torch.randn_like,
    low_res=None,
    low_res_noise=0.0,
    kept=None,
    resample=5,
    negative=None,
):
    """Sample `count` images (B, 3, H, H) in [-1, 1] for a `condition` (see `conditioning`).

    eta, resample: see `diffusion.sample`. low_res: for an upsampler, images (B or 1, 3, h, h) from
    the previous stage; larger images are shrunk. low_res_noise: noise to add to these, as a
    fraction of the timesteps. kept: for inpainting, images (B or 1, 3, h, h) and a mask (1, 1, h,
    h), which is 1 where their pixels are kept. negative: condition that guidance moves away from.
    """
    cfg = unet.cfg
    device = unet.alpha.device

    # Guidance needs a second copy of each sample, with the same noisy image and low-resolution
    # image, but without image embedding and text. Scale 1 needs only the first copy, and scale 0
    # only the second.
    copies = 2 if condition and guidance_scale not in (0, 1) else 1
    first_dropped = count if guidance_scale else 0  # the first row without conditions

    def copied(x):
        return torch.cat([x] * copies)

    condition = {name: copied(value) for name, value in condition.items()}  # (2B, …)
    drop = torch.arange(copies * count, device=device) >= first_dropped
    if negative:  # it replaces the dropped conditions
        for name, value in negative.items():
            condition[name][first_dropped:] = value
        drop = torch.zeros_like(drop)
    low_res_timestep = None
    if cfg.low_res_size:
        low_res = pixels.resize(low_res, cfg.low_res_size, RESIZE).expand(count, -1, -1, -1)
        low_res = pixels.resize(low_res, cfg.image_size, "bicubic")
        noise = copied(noise_fn(low_res))
        low_res_timestep = torch.zeros_like(drop, dtype=torch.long)  # the least noise
        low_res_timestep += round(low_res_noise * (cfg.timesteps - 1))
        low_res, low_res_timestep = augment_low_res(unet, copied(low_res), low_res_timestep, noise)
    else:
        low_res = None  # a base ignores it
    if kept:
        # If this stage is coarser than the mask, keep a pixel only if its whole area is kept.
        known, mask = [pixels.resize(x, cfg.image_size, "box") for x in kept]
        kept = known, mask > 0.999

    def denoise(x_t, timestep):
        """Estimate (x0, interpolation of the variance), for `diffusion.sample`."""
        model = unet
        if unet.last_step_unet and timestep[0] == 0:  # the last DDPM step
            model = unet.last_step_unet
        # Both copies in one pass.
        out = model(
            copied(x_t), copied(timestep), condition, drop, drop, low_res, low_res_timestep
        ).float()
        prediction = diffusion.classifier_free_guidance(
            out[:count, :3], out[-count:, :3], guidance_scale
        )
        alpha, sigma = diffusion.alpha_sigma(unet, timestep, x_t)
        x0 = diffusion.predict_x0(cfg.objective, prediction, x_t, alpha, sigma).clamp(-1, 1)
        interpolation = 0.0  # the posterior variance
        if cfg.learned_variance:
            interpolation = (out[:count, 3:] + 1) / 2
        return x0, interpolation

    # Start from pure noise.
    x_T = torch.empty(count, 3, cfg.image_size, cfg.image_size, device=device)
    # Each step overwrites the kept pixels with noised originals (RePaint, Lugmayr et al. 2022).
    return diffusion.sample(
        denoise, noise_fn(x_T), unet.alpha, unet.sigma, steps, eta, noise_fn, kept, resample
    )


@torch.no_grad()
def sample_cascade(
    unets,
    batch,
    clip_model,
    seeds,
    low_res,
    low_res_noise=0.0,
    kept=None,
    resample=5,
    negative_batch=None,
):
    """Sample images, uint8 (B, H, H, 3), for the embeddings and captions in `batch`.

    unets: the stages in order, with their sampling settings in cfg. seeds: one int per image, which
    determines all its noise, in any batch and on any rank. negative_batch: like `batch`; guidance
    moves away from it. For other arguments see `sample_images`.
    """
    device = unets[0].alpha.device
    noise_fn = diffusion.noise_generator(seeds, device)  # one stream per image
    for unet in unets:
        cfg = unet.cfg
        condition = conditioning(batch, cfg, clip_model)
        negative = conditioning(negative_batch, cfg, clip_model) if negative_batch else None
        with amp.autocast(device, cfg.precision):
            # The output of a stage is the low-resolution input of the next.
            low_res = sample_images(
                unet,
                condition,
                len(seeds),
                cfg.eval_steps,
                cfg.guidance_scale,
                cfg.eta,
                noise_fn,
                low_res,
                low_res_noise,
                kept,
                resample,
                negative,
            )
    return pixels.to_uint8(low_res.float())


# Data


def open_data(cfg, image_size, source, device):
    """Open the data; returns ({split: (dataset, indices)}, CLIP or None, info).

    info: {name: plain value}, for model files. The CLIP is used for evaluation, for text, and for
    images without stored embeddings. image_size: of the model, or of the last stage of its cascade.
    source: a model file, or None; it names the CLIP if neither cfg nor the data do.
    """
    spec, fingerprint = clips.clip_of(cfg, source)
    clip_model = None
    if spec or cfg.text_encodings:
        clip_model = clips.load(spec, device, fingerprint)
        fingerprint = clip_model.fingerprint()

    index_dir = Path(cfg.run_dir, "index")

    def open_folder(path):
        """The built-in shapes, drawn on the fly, or the user's images in `path`."""
        if synthetic.is_built_in(path):
            dataset = images.Shapes(path, image_size, index_dir)
        else:
            dataset = images.Pictures(
                path,
                image_size,
                crop_scale=cfg.crop_scale,
                flip=cfg.flip,
                needs_captions=cfg.text_encodings,
                index_dir=index_dir,
            )
            # Without stored embeddings, the CLIP embeds the crops on the fly.
            if dataset.width is None and cfg.image_condition:
                if not clip_model:
                    raise UserError(
                        f"{path}: has no embeddings; name the CLIP that makes them with --clip"
                    )
                dataset.clip_size = clip_model.image_size
        # Another CLIP, or embeddings of another norm, would silently spoil training.
        if clip_model:
            clip_model.check_widths(f"{path}, --clip {cfg.clip}", dataset.width)
        clips.check_source(cfg, dataset, path, clip_model)
        return dataset

    dataset = open_folder(cfg.data)
    val_dataset = open_folder(cfg.val_data) if cfg.val_data else None
    # Widths of embeddings and text encodings; 0 if the model has none.
    widths = [0, 0]
    if cfg.image_condition:
        widths[0] = dataset.width or clip_model.embed_width
        if val_dataset and val_dataset.width not in (None, widths[0]):
            raise UserError(f"{cfg.val_data}: its embeddings differ in width from {cfg.data}'s")
    if cfg.text_encodings:
        widths[1] = clip_model.encoding_width
        some = order.evenly_spaced(len(dataset), 256)
        clip_model.note_cut(dataset.texts(some), cfg.max_text_len)
    # Stored with the model. Needed to build it and to sample from texts.
    info = {
        "kind": cfg.stage,
        "widths": widths,
        "clip": spec,
        "clip_fingerprint": fingerprint,
        "last_step": None,  # path of a second U-Net, see `load_last_step_unet`
    }
    return order.splits(dataset, cfg, val_dataset), clip_model, info


# Evaluation


def root_covariance(features):
    """R (min(N, D), D) such that RᵀR is the covariance of features (N, D); 0 for N = 1."""
    centered = features - features.mean(0)  # (N, D)
    return np.linalg.qr(centered / max(1, len(features) - 1) ** 0.5, mode="r")


def frechet_distance(fake, real):
    """Fréchet distance of Gaussians fitted to features (N, D) and (M, D): CLIP embeddings here.

    |m₁ - m₂|² + tr(C₁ + C₂ - 2(C₁C₂)^½) (Heusel et al. 2017, Eq. 6).
    """
    means = ((fake.mean(0) - real.mean(0)) ** 2).sum()
    root1 = root_covariance(fake)
    root2 = root_covariance(real)
    # The singular values of R₁R₂ᵀ are the square roots of the eigenvalues of C₁C₂.
    cross = np.linalg.norm(root1 @ root2.T, "nuc")
    return means + (root1**2).sum() + (root2**2).sum() - 2 * cross


def write_png(picture, path):
    """Write a uint8 image (H, W, 3) as PNG."""
    with checkpoint.atomic_write(path) as file:
        file.write(media.png(picture))


def mean_loss(unet, split, clip_model):
    """Mean diffusion loss over a split (dataset, indices), without loss weights. Collective."""

    def loss_of(batch):
        if unet.cfg.low_res_size:  # the index seeds the crops, so all evaluations share them
            batch = cut_crops(batch, batch["index"].cpu().numpy(), unet.cfg)
        condition = conditioning(batch, unet.cfg, clip_model)
        return diffusion_loss(unet, batch, condition)

    return loop.mean_loss(unet, loss_of, *split)


@torch.no_grad()
def sample_metrics(
    unets, split, clip_model, grid_file, prior_fn=None, judge=None, samples_dir=""
):
    """{metric: value} of images that a cascade samples for a split (dataset, indices). Collective.

    The metrics are the same on any number of ranks, up to rounding. The number of samples and the
    seed are settings of the first U-Net. prior_fn: makes the image embeddings (see `load_prior`);
    default: embeddings of the real images. grid_file: PNG to write, with eight real images above
    samples for them, or "". judge: CLIP that computes the scores; default: `clip_model`.
    samples_dir: folder for all samples, all real images and their captions, or "".
    """
    judge = judge or clip_model
    if samples_dir:  # `open_evaluation` checked that it is empty
        files.mark_output(samples_dir)
    first_unet = unets[0]
    cfg = first_unet.cfg
    mode = first_unet.training  # during training, there is only one U-Net
    first_unet.eval()
    dataset, indices = split
    correct = collections.defaultdict(list)  # {metric: bool for each image} of this rank
    found = []  # (number, captions, embeddings (3, B, D)) of this rank's batches
    for number, batch in loader.eval_batches(dataset, indices, cfg.eval_samples, cfg.chunk_size):
        batch = loader.to_device(batch, first_unet.alpha.device)
        captions = batch["caption"]
        real = batch["image"]
        # The index seeds the noise, so the noise is the same in all evaluations.
        keys = batch["index"].tolist()
        seeds = [accumulate.derive_seed(cfg.seed, "picture", key) for key in keys]
        if prior_fn:
            batch["image_embed"] = prior_fn(captions, keys)
        # A cascade without a base stage starts from real images.
        fake = sample_cascade(unets, batch, clip_model, seeds, pixels.from_uint8(real))
        if grid_file and number == 0:  # rank 0 has the first batch
            pairs = torch.cat([real[:8], fake[:8]]).cpu().numpy()
            grid = media.captioned_grid(pairs, 2 * captions[:8], len(pairs) // 2)
            write_png(grid, grid_file)

        if samples_dir:  # for scoring by other tools
            for kind, pictures in {"generated": fake, "real": real}.items():
                for key, picture, caption in zip(keys, pictures.cpu().numpy(), captions):
                    path = Path(samples_dir, kind, f"{key:08d}.png")
                    write_png(picture, path)
                    path.with_suffix(".txt").write_text(caption, encoding="utf-8")

        # Compare images with their captions: with a CLIP and, on the built-in data, exactly.
        for name, values in images.caption_accuracy(dataset, keys, fake, real).items():
            correct[name] += values
        if judge:
            # Only the text embeddings are used, so encodings may be cut to one token.
            text = judge.text_condition(captions, 1)["text_embed"]  # (B, D)
            embeds = [judge.embed_image(fake), judge.embed_image(real), text]
            embeds = F.normalize(torch.stack(embeds), dim=-1).cpu().double().numpy()
            found.append((number, captions, embeds))
    first_unet.train(mode)  # restore the mode

    # Gather the results of all ranks, in the order of the samples.
    metrics = loop.means(correct)
    found = sorted(itertools.chain(*dist.all_gather(found)))
    if judge:
        _, captions, embeds = zip(*found)
        fake, real, text = np.concatenate(embeds, axis=1)  # (N, D) each
        metrics["frechet_distance"] = float(frechet_distance(fake, real))
        captions = [*itertools.chain(*captions)]
        if any(captions):
            metrics |= {
                # CLIPScore (Hessel et al. 2021) in percent, without its factor of 2.5
                "clip_score": float(100 * (fake * text).sum(1).clip(0).mean()),
                # How often the right image, or caption, is the nearest of a hundred
                "picture_retrieval": clip.retrieval(fake, real, captions),
                "caption_retrieval": clip.retrieval(fake, text, captions),
                "caption_retrieval_ceiling": clip.retrieval(real, text, captions),
            }
    return metrics


# Commands


@dataclass(frozen=True)
class CascadeConfig(config.Inference):
    """The cascade; lists have one value per stage, and further stages reuse the last one"""

    run_dir: tuple[str, ...] = field(
        ("runs/decoder",), "RUN_DIR used in training, or the run folders of the stages in order"
    )
    steps: tuple[SamplingSteps, ...] = field((), "sampling steps; default: as in training")
    guidance_scale: tuple[NonNegativeFloat, ...] = field(
        (), "guidance scale, 1: none; default: as in training"
    )
    eta: tuple[Fraction, ...] = field(
        (), "sampling noise, 1: DDPM, 0: none; default: as in training"
    )
    lora_scale: tuple[float, ...] = field(
        (), "scale of the LoRA adapters, 1 for a stage without any, as in 0.5,1; default: 1"
    )
    clip: str = field("", "CLIP for texts and images; default: the CLIP used in training")


def load_unet(path, device, weights="ema", lora_scale=1.0):
    """Load (U-Net in eval mode, file contents) from a model file, with adapters merged."""
    cfg, contents = checkpoint.read_model(STAGES, path, weights)
    contents = adapters.merged(contents, path, lora_scale)
    unet = UNet(cfg, *contents["widths"])
    checkpoint.load_weights(unet, contents["model"], path)
    load_last_step_unet(unet, path, device)
    return place(unet, device).eval(), contents


def load_last_step_unet(unet, path, device):
    """Load the second U-Net, for the last sampling step, if the file of `unet` names one (Karlo).

    path: the file of `unet`. Returns the path of the second U-Net, or None.
    """
    name = checkpoint.load(path, mmap=True).get("last_step")
    if not name:
        return None
    path = Path(path).absolute().parent / name
    if path.is_file():
        config.note(f"the last sampling step uses {path}")
        # Not by setattr, which would register a submodule that is trained and saved.
        vars(unet)["last_step_unet"], _ = load_unet(path, device)
    else:
        config.note(
            f"{path} is missing, so the model takes the last sampling step itself, though it was "
            "not trained for that; import the whole pipeline"
        )
    return str(path)


def load_cascade(args, device):
    """Load ([U-Net of each stage, in eval mode], name of their CLIP or None, its fingerprint)."""
    # Each run_dir is the run folder of a stage, or a folder with base/ and upsample/.
    folders = []
    for run_dir in args.run_dir or [""]:
        stages = filter(Path.is_dir, [Path(run_dir, stage) for stage in STAGES])
        folders += list(stages) or [run_dir]
    paths = [checkpoint.model_file(folder, args.model, args.weights) for folder in folders]
    given = {"eval_steps": args.steps, "guidance_scale": args.guidance_scale, "eta": args.eta}
    unets = []
    contents = []
    for number, path in enumerate(paths):

        def of_stage(values, number=number):
            return values[min(number, len(values) - 1)]  # the last value is reused

        lora_scale = of_stage(args.lora_scale or (1.0,))
        unet, contents_of_stage = load_unet(path, device, args.weights, lora_scale)
        settings = {name: of_stage(values) for name, values in given.items() if values}
        unet.cfg = dataclasses.replace(unet.cfg, **settings)
        unets.append(unet)
        contents.append(contents_of_stage)
    # Each stage must take images of the size that the previous stage makes.
    for before, unet, path in zip(unets, unets[1:], paths[1:]):
        if before.cfg.image_size != unet.cfg.low_res_size:
            raise UserError(
                f"{path}: takes images of {unet.cfg.low_res_size} pixels (0: none), but the stage "
                f"before it makes {before.cfg.image_size}; give the stages of --run_dir in order"
            )
    return unets, args.clip or contents[0]["clip"], contents[0]["clip_fingerprint"]


def load_prior(args, decoder, clip_model, texts):
    """Load --prior; returns prior_fn(texts, keys, negative_text="") -> embeddings (texts, D).

    decoder: the U-Net that takes the embeddings. texts: examples, to note whether the prior cuts
    them. keys (of prior_fn): one per text; they seed the noise, together with --seed.
    """
    import train_prior  # the only place where a script imports another

    path = checkpoint.model_file(args.prior)
    # The prior must use the decoder's CLIP, and make raw embeddings if the decoder takes them.
    prior, contents = train_prior.load_prior(path, decoder.alpha.device)
    cfg = prior.cfg
    clip_model.check_widths(f"--prior {path}", *contents["widths"])
    where = f"the decoder's CLIP, for --prior {path}"
    clip_model.check_fingerprint(where, contents.get("clip_fingerprint"))
    clip_model.note_cut(texts, cfg.max_text_len)
    if decoder.cfg.raw_embeddings and not cfg.raw_embeddings:
        raise UserError(
            f"--prior {path}: makes embeddings of unit length, but the decoder takes raw ones; "
            "give a prior trained with --raw_embeddings"
        )

    def prior_fn(texts, keys, negative_text=""):
        condition = train_prior.conditioning({"caption": texts}, cfg, clip_model)
        negative = None
        if negative_text:
            negative = train_prior.conditioning({"caption": [negative_text]}, cfg, clip_model)
        return train_prior.best_embeddings(
            prior,
            condition,
            keys,
            1,
            max(cfg.eval_timesteps),
            cfg.guidance_scale,
            eta=1.0,
            best_of=2,  # DALL-E 2 §2.2
            seed=args.seed,
            negative=negative,
        )

    return prior_fn


@dataclass(frozen=True)
class EvaluateConfig(CascadeConfig):
    """What to evaluate on"""

    prior: str = field(
        "", "prior that makes embeddings from captions; default: embeddings of the real images"
    )
    data: str = field("", "images; default: the training data of the first stage")
    eval_samples: NonNegativeInt = field(512, "maximum number of test images; 0: all")
    judge: str = field(
        "", "CLIP for the scores: folder, model.pt, open_clip:MODEL/WEIGHTS; default: --clip"
    )
    samples: str = field(
        "", "new folder for all images and captions, in generated/ and real/, for other tools"
    )
    grid: str = field("", "PNG file for eight real images and samples for them")
    out: str = field("", "JSON file for the metrics")


def open_evaluation(args, device):
    """The arguments of `sample_metrics` for the evaluate command."""
    unets, spec, fingerprint = load_cascade(args, device)
    first_unet = unets[0]
    cfg = loop.evaluation_settings(first_unet.cfg, args, MAX_CHUNK)
    cfg = dataclasses.replace(cfg, clip=spec or "auto", run_dir=args.run_dir[0])
    splits, clip_model, info = open_data(cfg, unets[-1].cfg.image_size, None, device)
    if info["widths"] != first_unet.widths:
        raise UserError(
            f"{cfg.data}: widths of embeddings and of text encodings (0: none) are "
            f"{info['widths']}; the decoder's are {first_unet.widths}"
        )
    if clip_model and any(first_unet.widths):  # the CLIP makes the conditions
        clip_model.check_fingerprint(f"--clip {spec}", fingerprint)
    dataset, indices = splits["test"]
    prior_fn = None
    if args.prior:
        if not any(first_unet.widths):
            raise UserError(f"--prior: {args.run_dir[0]} is an upsampler, which needs no prior")
        texts = dataset.texts(indices[:256])
        if not any(texts):
            raise UserError(f"{cfg.data}: has no captions, which --prior needs")
        # Stored image embeddings need no CLIP, but the prior's texts do.
        clip_model = clip_model or clips.load(spec, device)
        prior_fn = load_prior(args, first_unet, clip_model, texts)
    first_unet.cfg = cfg
    judge = clips.load(args.judge, device) if args.judge else clip_model
    if args.samples and any(Path(args.samples).glob("*")):
        raise UserError(f"--samples {args.samples}: expected a new folder, or an empty one")
    return unets, splits["test"], clip_model, args.grid, prior_fn, judge, args.samples


def evaluate(args, device=None):
    device = device or dist.setup(args.device)
    metrics = sample_metrics(*dist.on_all(lambda: open_evaluation(args, device)))
    if dist.is_main() and args.out:
        checkpoint.write_json(metrics, args.out)
    metrics = metrics or {"no metrics": "they need a CLIP: give --clip or --judge"}
    judge = args.judge or "the decoder's own CLIP"
    headline = f"{config.as_word(args.run_dir)}, on test images; judge: {judge}"
    tracker.print_results(headline, metrics)


# Training


def train_stage(cfg, device):
    """Train one stage in RUN_DIR/STAGE."""
    # Rank 0 locks the run folder, then all ranks open the data.
    run, cfg = resume.open_run(cfg, Path(cfg.run_dir) / cfg.stage, MAX_CHUNK)
    splits, clip_model, info = dist.on_all(
        lambda: open_data(cfg, cfg.image_size, run.source, device)
    )
    identity = resume.identify(run, cfg, splits, clip=info["clip_fingerprint"])
    if run.results:  # the run is finished
        return loop.announce(run, cfg)

    # Build model, optimizer and EMA. Restore them on resume.
    accumulate.seed_all(cfg.seed, "weights")  # all ranks start with the same weights
    unet = place(UNet(cfg, *info["widths"]), device)
    if cfg.text_encodings:  # "no text" is the encoding of ""
        unet.null_text.fill(clip_model.text_condition([""], cfg.max_text_len))
    if run.source:  # an imported model may come with a second U-Net
        info["last_step"] = load_last_step_unet(unet, run.source, device)
    trainable = unet  # with LoRA: only the adapters
    if cfg.lora_rank:
        trainable, info["lora"] = adapters.start(unet, cfg, identity["base"])
    optimizers = optim.make(
        trainable, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps
    )
    scaler = amp.scaler(device, cfg.precision)
    ema = EMA(trainable, cfg.ema_update_every, cfg.ema_decay, cfg.ema_update_after)
    state = resume.State(cfg, trainable, ema, optimizers, scaler, identity, info)
    resume.restore(run, state)
    if cfg.compile:
        compile_blocks([*unet.downs, *unet.middle, *unet.ups])

    # The order of samples is a function of seed and step. Workers tokenize captions and, for an
    # upsampler, cut crops.
    dataset, indices = splits["train"]
    tokenizer = clip_model.tokenizer if cfg.text_encodings else None
    transform = functools.partial(cut_crops, cfg=cfg) if cfg.low_res_size else None
    plan, batches = loader.train_batches(
        cfg, dataset, indices, state.step, device, tokenizer, transform
    )
    about = f"{cfg.stage}: {len(dataset):,} images of {cfg.image_size}x{cfg.image_size}"
    eval_due = loop.Due(cfg.eval_every, state)
    save_due = loop.Due(cfg.save_every, state)

    # Open the logger and write config.json.
    with loop.begin(run, state, about, device) as progress:
        unet.train()
        while True:
            # Evaluate. Sampling uses the averaged weights, so val_loss and best.pt use them, too.
            if eval_due():
                samples = {}
                with progress.paused():
                    validation = splits["validation"]
                    metrics = {"val_loss_online": mean_loss(unet, validation, clip_model)}
                    with ema.applied(trainable):
                        metrics["val_loss"] = mean_loss(unet, validation, clip_model)
                        if state.step < cfg.steps:  # after the last step, the test follows
                            grid = f"samples/step_{state.step:08d}.png"
                            samples[grid] = GRID_CAPTION
                            metrics |= sample_metrics(
                                [unet], validation, clip_model, run.folder / grid
                            )
                progress.log_evaluation(metrics, samples)  # also saves the best model
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
                        condition = conditioning(batch, cfg, clip_model)
                        with amp.autocast(device, cfg.precision):
                            loss = diffusion_loss(unet, batch, condition)
                        # Chunk weights sum to 1, so the gradients add up to the gradient of the
                        # mean loss.
                        with dist.sum_gradients(trainable, chunk is plan[-1]):  # over all ranks
                            scaler.scale(loss * chunk.weight).backward()
                        chunk_losses.append(loss.detach() * chunk.size)
                grad_norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
                scaler.update()
                unet.zero_grad()
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
        grid = "samples/test.png"
        with ema.applied(trainable):
            metrics = {"loss": mean_loss(unet, splits["test"], clip_model)}
            metrics |= sample_metrics([unet], splits["test"], clip_model, run.folder / grid)
        progress.finish(metrics, {grid: GRID_CAPTION})


def train(cfg):
    # Join the process group, and make the built-in data if needed.
    device = dist.setup(cfg.device, cfg.timeout_minutes, cfg.deterministic)
    if cfg.data == "shapes":
        cfg = embed.with_builtin_data(cfg, device)
    if cfg.stage != "all":
        return train_stage(cfg, device)

    stages = []
    for stage, stage_config in STAGES.items():
        preset = PRESETS.get(cfg.preset, {}).get(stage, {})
        # Shared settings come from cfg, other settings from the preset or the defaults.
        stages.append(stage_config(**{**preset, **dataclasses.asdict(cfg), "stage": stage}))
    last = stages[-1]
    # Check now, not after training a stage, that images are large enough for the last stage.
    dist.on_main(lambda: open_data(last, last.image_size, None, device)[0]["train"][0].check())

    # Train the stages in turn. Then evaluate them together, from embeddings of real images.
    for stage in stages:
        train_stage(stage, device)
    args = EvaluateConfig(
        run_dir=(cfg.run_dir,),
        seed=cfg.seed,
        eval_samples=2 * cfg.eval_samples,  # affordable, because this runs only once
        grid=f"{cfg.run_dir}/cascade.png",
        out=f"{cfg.run_dir}/cascade.json",
    )
    evaluate(args, device)


# Sampling from the command line


@dataclass(frozen=True)
class SampleConfig(CascadeConfig):
    """What to sample"""

    text: str = field("", "text prompt; without text and image, sampling is unconditional")
    texts: str = field("", "file with one caption per line")
    negative_text: str = field("", "negative text: guidance moves away from it")
    image: str = field(
        "", "image to make variations of, to inpaint (with --mask), or to upsample"
    )
    to: str = field("", "second image to interpolate to (DALL-E 2 §3.2)")
    mask: str = field("", "image of the same size as --image: black is kept, white is filled in")
    resample: PositiveInt = field(
        5, "repetitions of each step when inpainting (RePaint); 1 is fast, but blends in poorly"
    )
    low_res_noise: Fraction = field(
        0.0, "noise on the input of upsamplers trained with it, as a fraction of the timesteps"
    )
    num_samples: PositiveInt = field(
        8, "samples per caption or image, or number of images from --image to --to"
    )
    prior: str = field("runs/prior", "prior that makes image embeddings from text")
    max_batch: PositiveInt = field(64, "maximum number of images per batch")
    out: str = field("grid.png", "PNG of all samples with their captions")
    pictures: str = field("", "folder for one PNG per sample, TEXT_NUMBER.png")

    def __post_init__(self):
        super().__post_init__()
        if not self.out.endswith(".png"):
            raise UserError(f"--out {self.out}: expected a name that ends in .png")
        if self.text:
            config.check_unused(self, "with --text", "texts")
        if not self.image:
            config.check_unused(self, "without --image", "to", "mask")
        if not self.mask:
            config.check_unused(self, "without --mask", "resample")
        if not self.text and not self.texts:
            config.check_unused(self, "without a text", "prior", "negative_text")
        elif self.to or (self.image and not self.mask):
            raise UserError("--image: together with a text, it needs --mask, and takes no --to")


def open_image(path, device):
    """The image in the file `path`, uint8 (1, H, W, 3)."""
    content = Path(path).read_bytes()
    return torch.tensor(images.decode_image(content, path)[None], device=device)


def square(image):
    """The central square of uint8 images (B, H, W, 3) as floats (B, 3, S, S) in [-1, 1]."""
    # Training images are cropped to a square, not squeezed.
    return pixels.central_square(pixels.from_uint8(image))


def slerp(start, end, count):
    """Interpolate `count` embeddings (count, D) from `start` to `end` (1, D) (DALL-E 2 §3.2).

    The interpolation is spherical (Shoemake 1985).
    """
    cosine = F.cosine_similarity(start, end).clamp(-1, 1)  # (1,); rounding may exceed 1
    angle = torch.acos(cosine).clamp(min=1e-4)  # avoids 0 / 0 for equal ends
    fraction = torch.linspace(0, 1, count, device=start.device)[:, None]
    weighted = torch.sin((1 - fraction) * angle) * start + torch.sin(fraction * angle) * end
    return weighted / torch.sin(angle)


@torch.no_grad()
def sample(args):
    device = dist.choose_device(args.device)
    if not dist.is_main():  # a single process samples
        return

    # Load the models. Upsamplers need no CLIP, nor does a base without text encodings if it samples
    # unconditionally.
    unets, spec, fingerprint = load_cascade(args, device)
    if not any(unet.cfg.low_res_noise for unet in unets):
        config.check_unused(args, "without a stage that was trained with it", "low_res_noise")
    first_unet = unets[0]
    if args.negative_text and first_unet.cfg.guidance_scale == 1:
        raise UserError("--negative_text needs guidance; give a --guidance_scale above 1")
    size = unets[-1].cfg.image_size
    texts = files.texts_of(args.text, args.texts)
    clip_model = prior_fn = None
    is_base = any(first_unet.widths)
    if is_base and (texts or args.image or first_unet.cfg.text_encodings):
        clip_model = clips.load(spec, device, fingerprint, text_only=not args.image)
        clip_model.check_widths(f"--clip {spec}", *first_unet.widths)
        if texts:
            prior_fn = load_prior(args, first_unet, clip_model, texts)

    # The numbers of the text and the sample seed the noise, so it does not depend on the batch. An
    # interpolation uses the same noise for all samples.
    captions = []
    seeds = []
    for number, text in enumerate(texts or [""]):
        for k in range(args.num_samples):
            captions.append(text)
            seeds.append(accumulate.derive_seed(args.seed, "picture", number, 0 if args.to else k))

    # Read the images.
    embeds = torch.zeros(len(captions), first_unet.widths[0], device=device)  # zero: no image
    low_res = kept = None
    if not is_base and (texts or args.to or not args.image):
        raise UserError(
            f"{args.run_dir[0]}: an upsampler needs an --image to enlarge, and takes no text or "
            "--to"
        )
    if args.image:
        image = open_image(args.image, device)
        if clip_model:  # variations (DALL-E 2 §3.1)
            embeds += clip_model.embed_image(image)
        else:
            low_res = square(image)
    if args.to:
        end = clip_model.embed_image(open_image(args.to, device))
        embeds = slerp(embeds[:1], end, len(captions))
    if args.mask:
        mask = open_image(args.mask, device)
        if mask.shape != image.shape:
            raise UserError(
                f"--mask {args.mask}: its height and width are {[*mask.shape[1:3]]}, those of "
                f"--image are {[*image.shape[1:3]]}; expected the same size"
            )
        is_black = square(mask).mean(1, keepdim=True) < 0
        kept = square(image), is_black.float()

    # Sample.
    samples = {"image_embed": embeds, "caption": captions, "seeds": seeds}
    pictures = []
    for batch in accumulate.batches(samples, args.max_batch):
        negative_batch = {}
        if prior_fn:  # unCLIP: text -> image embedding -> image (DALL-E 2 §2)
            keys = batch["seeds"]
            batch["image_embed"] = prior_fn(batch["caption"], keys, args.negative_text)
            if args.negative_text:
                negatives = [args.negative_text] * len(keys)
                negative_batch = {"caption": negatives, "image_embed": prior_fn(negatives, keys)}
        out = sample_cascade(
            unets,
            batch,
            clip_model,
            batch["seeds"],
            low_res,
            args.low_res_noise,
            kept,
            args.resample,
            negative_batch,
        )
        # Move to the CPU, so that max_batch bounds the device's memory.
        pictures += [*out.cpu().numpy()]  # uint8 (H, H, 3) each

    # Write the grid and, with --pictures, each image.
    grid = media.captioned_grid(np.stack(pictures), captions, min(args.num_samples, 8))
    write_png(grid, args.out)
    print(f"wrote {args.out}: {len(pictures)} images of {size}x{size}")
    if args.pictures:
        files.mark_output(args.pictures)
        for i, picture in enumerate(pictures):
            text, k = divmod(i, args.num_samples)
            write_png(picture, f"{args.pictures}/{text:04d}_{k:04d}.png")
        print(f"wrote {args.pictures}/TEXT_NUMBER.png")


COMMANDS = {
    "train": (train, {"all": SharedConfig, **STAGES}),
    "evaluate": (evaluate, EvaluateConfig),
    "sample": (sample, SampleConfig),
}

# fmt: off
# DALL-E 2, Table 3: settings that the columns "64" and "64 -> 256" share.
DALLE2 = dict(
    channel_mult=(1, 2, 3, 4), num_res_blocks=3,
    dropout=0.1,  # the table has none for "64"; GLIDE and Karlo use 0.1
    objective="epsilon", timestep_density="uniform",
    # Adam, without weight decay.
    optimizer="adamw", betas=(0.9, 0.999), weight_decay=0.0,
    # The learning rate is constant, because the table gives no decay.
    lr=1.2e-4, warmup_steps=10_000, cosine=False,
    precision="bf16",
    # Not in the table: evaluation and saving, for a large data set.
    validation=0.005, test=0.005, eval_samples=2048, workers=8,
    log_every=100, eval_every="10000", save_every="2000",
)
# Table 3, column "64".
DALLE2_64 = dict(
    DALLE2,
    stage="base",
    clip="open_clip:ViT-L-14/openai", text_encodings=True,
    image_size=64,
    attention_levels=(1, 2, 3),  # at 32, 16 and 8 pixels
    crop_scale=0.75,  # as in GLIDE and Karlo
    # A learned variance matters only if sampling adds noise.
    learned_variance=True, eta=1.0,
    batch_size=2048, steps=800_000,
    eval_steps=250, guidance_scale=2.0,
)
# Table 3, column "64 -> 256".
DALLE2_256 = dict(
    DALLE2,
    stage="upsample",
    image_size=256, low_res_size=64, random_crop=64,
    width=320,
    batch_size=1024, steps=1_000_000,
    eval_steps=27,
)
# For thousands of captioned images; both presets were run to completion on 6,000 emoji.
# pictures-cpu is for two CPU cores: a base for 32 pixels, and an upsampler. Small batches let it
# learn more in the same time. pictures-gpu is for one GPU: a base for 64 pixels (383 s on an H200).
PICTURES = dict(eval_samples=100)  # retrieval compares a hundred images
PICTURES_CPU = {
    "all": PICTURES,
    "base": dict(
        PICTURES,
        image_size=32, dropout=0.1,
        batch_size=32, steps=1500,
        guidance_scale=3.0,
    ),
    "upsample": dict(
        PICTURES,
        image_size=64, low_res_size=32, random_crop=32,
        batch_size=32, steps=500,
        eval_steps=10,
    ),
}
PICTURES_GPU = dict(
    stage="base",
    text_encodings=True,
    image_size=64, width=96, channel_mult=(1, 2, 3, 4), num_res_blocks=2,  # 58M parameters
    attention_levels=(2, 3), cond_width=256, dropout=0.1,
    batch_size=256, chunk_size=256, steps=1000, precision="bf16", workers=8,
    guidance_scale=3.0,
)
PRESETS = {
    "pictures-cpu": PICTURES_CPU,
    "pictures-gpu": PICTURES_GPU,
    "dalle2-64": dict(DALLE2_64, width=512, cond_width=2048),
    "dalle2-256": DALLE2_256,
    # Table 3, column "256 -> 1024".
    "dalle2-1024": dict(
        DALLE2_256,
        image_size=1024, low_res_size=256, random_crop=256,
        width=192, channel_mult=(1, 1, 2, 2, 4, 4), num_res_blocks=2, dropout=0.0,
        noise_schedule="linear",
        batch_size=512, lr=1e-4,
        eval_steps=15,
    ),
    # Karlo: sizes and sampling from its public configs. How it was trained is not public, so other
    # settings are DALL-E 2's.
    "karlo-64": dict(
        DALLE2_64,
        raw_embeddings=True,
        width=320, cond_width=1536,
        eval_steps=25, guidance_scale=8.0,
    ),
    "karlo-256": dict(DALLE2_256, scale_shift=False, eta=1.0, eval_steps=7),
}
# fmt: on


def main():
    config.run(COMMANDS, __doc__, default="train", presets=PRESETS)


if __name__ == "__main__":
    main()
