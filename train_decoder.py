"""Train a cascade of pixel-diffusion U-Nets: CLIP image embedding -> picture (DALL-E 2, Ramesh et al. 2022, §2.1).

    torchrun --nproc_per_node=2 train_decoder.py                           # both stages, on shapes that it draws itself
    torchrun --nproc_per_node=2 -- train_decoder.py --stage upsample --data tars --run runs/mine      # one, on yours
    python train_decoder.py evaluate --prior runs/prior
    python train_decoder.py sample --text "a large green triangle at the top left" --num 8 --out grid.png
    python train_decoder.py sample --image a.png [--to b.png | --mask hole.png] --num 8 --out grid.png

The same command again resumes. Each stage is a run of its own, RUN/base and RUN/upsample, and a cascade is a list of
such folders. `python train_decoder.py [train|evaluate|sample] --help` lists the settings.
"""
import contextlib
import dataclasses
import functools
import itertools
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from common import (
    accumulate,
    amp,
    checkpoint,
    clip,
    config,
    data,
    diffusion,
    dist,
    lora,
    media,
    store,
    synthetic,
    tracker,
)
from common.config import UserError
from common.images import Pictures, Recolored, Shapes, decode_image
from common.media import as_bytes, blurred, cropped, pixels
from common.nn import CrossAttention, LinearAttention, NormSiLU, SelfAttention, TimeEmbedding
from common.schedule import due
from common.state import State, check_start, load_weights, resume_point
from common.store import Settings

# Config

@dataclass(frozen=True)
class Config(Settings):
    # Run and data
    stage: Literal["all", "base", "upsample"] = "all"  # which stage to train; all: one after the other
    run: str = "runs/decoder"  # folder of the runs: the stage's own is RUN/STAGE; started again, it resumes
    data: str = "shapes"  # img2dataset tars, images with .txt beside them, or built-in: "shapes", "shapes:purple"
    embeddings: str = ""  # folder of img_emb_N.npy, by default those in or beside the tars, else by CLIP on the fly
    index_width: int = 4  # digits at the end of a key that number its row in img_emb_N.npy
    shards: str = ""  # numbers of the tars to use, such as 0-99,120; by default all
    clip: str = "auto"  # CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: DATA/clip.json's
    validation: float = 0.1  # share of the pictures held out for validation, chosen by key
    test: float = 0.1  # share of the pictures held out for the test at the end
    resize: Literal["area", "bicubic", "bilinear", "nearest", "nearest-exact"] = "area"  # how pictures are made smaller
    crop_scale: float = 1.0  # random square crops of at least this share of the picture's area, 1 for none
    flip: bool = False  # mirror half of the pictures; not for captions that tell left from right
    init_from: str = ""  # model.pt or checkpoint to take the weights of, nothing else: a file, URL or wandb:RUN/FILE
    init_strict: bool = True  # refuse weights that do not all fit, else take those that do
    lora_rank: int = 0  # train adapters of this rank and nothing else, on the frozen --init_from; 0 for all weights
    lora_alpha: float = 0.0  # their scale is alpha/rank, 0 for 1
    lora_targets: Literal["attention", "all"] = "attention"  # layers with adapters
    lora_base: Literal["fp32", "bf16"] = "fp32"  # precision of the frozen weights under them; bf16 needs --precision
    # Model
    image_size: int = 16  # width and height of the pictures of this stage
    low_res_size: int = 0  # of the pictures it starts from, those of the stage before; 0 for none
    width: int = 32  # channels of the first level
    mults: tuple[int, ...] = (1, 2, 4)  # channels of each level, in widths; between two levels the size is halved
    blocks: int = 1  # residual blocks with cross-attention and skip connection a level, after one without
    groups: int = 8  # of the group norms
    cond_width: int = 64  # width of the conditioning tokens
    heads: int = 4  # heads of the cross-attention
    head_width: int = 32  # width of a head of any attention
    attention_levels: tuple[int, ...] = ()  # levels with self-attention, 0 the finest
    linear_levels: tuple[int, ...] = ()  # levels with linear attention
    middle_attention: bool = True  # self-attention at the smallest size
    cross_embed: bool = True  # first convolution with kernels of 3, 7 and 15, else 7
    pixel_shuffle: bool = True  # upsample by sub-pixel convolution, else by nearest neighbor and convolution
    memory_efficient: bool = True  # halve the size before a level's blocks, not after, once more in all (Imagen §B.1)
    final_block: bool = True  # a last residual block over the output and that of the first convolution
    checkpointing: bool = False  # recompute blocks in the backward pass: less memory, a third more time
    self_condition: bool = False  # feed the network's last estimate back in (Chen et al. 2022)
    image_condition: bool = True  # condition on the image embedding
    image_tokens: int = 4  # tokens that it becomes, beside being added to the timestep's
    image_map: bool = True  # and as a map at the smallest size, from which shapes are learned in far fewer steps
    text_encodings: Literal["none", "clip"] = "none"  # condition on the tokens of the caption, by CLIP
    max_text_len: int = 24  # text encodings: longer texts are cut, shorter ones padded with learned tokens
    # Diffusion
    objective: Literal["x0", "v", "epsilon", "flow"] = "v"  # what the network predicts
    noise_schedule: Literal["cosine", "linear", "quadratic", "sigmoid", "jsd"] = "cosine"  # levels (flow: its own)
    timesteps: int = 1000  # levels of noise
    timestep_density: Literal["uniform", "logit_normal", "mode"] = "logit_normal"  # of training (SD3 §3.1)
    density_mean: float = 1.0  # of logit_normal; above 0 for more noise, where it is decided what is drawn
    density_std: float = 1.0  # of logit_normal
    mode_scale: float = 1.29  # of mode
    loss: Literal["l2", "l1", "huber"] = "l2"  # distance between prediction and target
    min_snr_gamma: float = 0.0  # min-SNR loss weight (Hang et al. 2023), 0 for none
    p2_gamma: float = 0.0  # p2 loss weight (Choi et al. 2022), 0 for none
    p2_k: float = 1.0  # of the p2 loss weight
    flow_weight: Literal["none", "sigma_sqrt", "cosmap"] = "none"  # loss weight of flow (SD3)
    learned_variance: bool = False  # also learn the variance of DDPM's steps (Nichol & Dhariwal 2021)
    vlb_weight: float = 1e-3  # of the variational bound in the loss, for learned_variance (there: lambda)
    dream: bool = False  # DREAM (Zhou et al. 2023): a pass without gradients first, for epsilon
    dream_power: float = 1.0  # its detail preservation
    image_drop: float = 0.1  # probability of training a sample without its image embedding, for guidance
    text_drop: float = 0.5  # probability of training a sample without its text
    threshold: float = 0.0  # dynamic thresholding at this quantile (Imagen §2.3: 0.95), 0 for clipping to [-1, 1]
    low_res_noise: float = 0.3  # most noise added to the low-resolution picture, in shares of the timesteps
    low_res_blur: float = 0.5  # probability of blurring it
    blur_sigma: tuple[float, ...] = (0.4, 0.8)  # range of the blur's sigma, in pixels of the low resolution
    random_crop: int = 0  # train on random crops of this size, 0 for whole pictures
    # Optimization
    steps: int = 1700  # optimizer steps
    batch_size: int = 64  # samples a step, over all ranks
    chunk_size: int = 32  # samples in one forward pass; part of what defines a run
    lr: float = 2e-3  # peak learning rate
    warmup_steps: int = 50  # steps of linear warm-up
    cosine: bool = True  # after the warm-up, decay to 0 at `steps` along half a cosine, else stay constant
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, and AdamW for the rest
    weight_decay: float = 0.01  # decoupled, on matrices and kernels only; 0 makes AdamW Adam
    beta1: float = 0.9  # Adam's decay of the mean
    beta2: float = 0.99  # Adam's decay of the square
    eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 1.0  # gradients are clipped to this norm, 0 for not at all
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of products and convolutions, by autocast
    ema_decay: float = 0.9999  # decay of the averaged weights
    ema_warmup: Literal["power", "ratio", "none"] = "power"  # 1-(1+s/inv_gamma)^-power, (1+s)/(10+s), or at once
    ema_inv_gamma: float = 1.0  # of the power warm-up
    ema_power: float = 0.75  # of the power warm-up
    ema_min_decay: float = 0.0  # least decay
    ema_update_after: int = 0  # steps at first in which the average is a copy
    ema_update_every: int = 1  # steps between updates of the average
    ema_on_host: bool = False  # keep the average in host memory, for a GPU that is too small; waits for it every step
    # Evaluation and saving; both happen at the first log line at or after they are due
    log_every: int = 25  # steps between log lines
    eval_every: int = 500  # steps between evaluations, 0 for none but the last
    eval_minutes: float = 0.0  # minutes between evaluations, besides, 0 for none
    eval_samples: int = 192  # most held-out pictures an evaluation takes, 0 for all
    eval_steps: int = 25  # sampling steps of its pictures
    eval_weights: Literal["ema", "online", "both"] = "ema"  # whose pictures; the loss is taken of both
    guidance_scale: float = 1.0  # of those pictures, 1 for none
    eta: float = 0.0  # noise of sampling: 1 as DDPM, 0 for DDIM
    save_every: int = 250  # steps between checkpoints
    save_minutes: float = 0.0  # minutes between checkpoints, besides, 0 for none
    keep: int = 3  # newest checkpoints that are kept, 0 for all
    resume: Literal["auto", "never"] = "auto"  # never: an earlier run in the folder is moved aside
    # Machine
    seed: int = 0  # of everything random
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute
    compile: bool = False  # torch.compile the training step
    workers: int = 0  # processes that read data ahead, a rank
    timeout_minutes: float = 30.0  # how long a rank waits for another before it gives up

    def __post_init__(self):
        may_be_negative = ("seed", "density_mean", "mode_scale")
        positive = ("image_size", "width", "blocks", "groups", "cond_width", "heads", "head_width", "image_tokens",
                    "max_text_len", "timesteps", "steps", "batch_size", "chunk_size", "ema_update_every", "log_every",
                    "lr", "timeout_minutes", "eval_steps", "index_width", "density_std", "crop_scale", "p2_k")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in positive and value <= 0:
                raise UserError(f"--{field.name}: {value} is not above 0")
            if field.name not in may_be_negative and isinstance(value, (int, float)) and value < 0:
                raise UserError(f"--{field.name}: {value} is below 0")
        for name in ("beta1", "beta2", "image_drop", "text_drop", "ema_decay", "ema_min_decay", "crop_scale",
                     "threshold", "low_res_noise", "low_res_blur", "eta"):
            if getattr(self, name) > 1 or (name.startswith("beta") and getattr(self, name) == 1):
                raise UserError(f"--{name}: {getattr(self, name)} is above what a share may be")
        if self.validation + self.test >= 1 or not self.validation or not self.test:
            raise UserError(f"--validation {self.validation} and --test {self.test}: expected two shares above 0 that "
                            "add up to less than 1")
        if not self.mults or min(self.mults) < 1 or any(self.width * m % self.groups for m in (1, *self.mults)):
            raise UserError(f"--mults {self.mults}: width {self.width} times each must be a multiple of groups "
                            f"{self.groups}")
        if wrong := [v for v in (*self.attention_levels, *self.linear_levels) if not 0 <= v < len(self.mults)]:
            raise UserError(f"--attention_levels, --linear_levels: {wrong[0]} is no level; there are "
                            f"{len(self.mults)}, 0 the finest")
        shrink = 2 ** (len(self.mults) - (not self.memory_efficient))
        for name in ("image_size", "random_crop"):
            if getattr(self, name) % shrink:
                raise UserError(f"--{name}: {getattr(self, name)} is not a multiple of {shrink}, as {len(self.mults)} "
                                "levels need")
        if max(self.random_crop, self.low_res_size + 1 if self.low_res_size else 0) > self.image_size:
            raise UserError(f"--low_res_size {self.low_res_size} and --random_crop {self.random_crop}: the first must "
                            f"be below image_size {self.image_size}, the second no higher")
        if self.random_crop and self.image_map and self.image_condition:
            raise UserError("--image_map: a map of the whole picture does not fit --random_crop; give --no_image_map")
        if not 1 <= self.eval_steps <= self.timesteps:
            raise UserError(f"--eval_steps: {self.eval_steps} is more than the {self.timesteps} timesteps")
        if len(self.blur_sigma) != 2 or not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise UserError(f"--blur_sigma: expected two values above 0 in order, not {self.blur_sigma}")
        diffusion.check(self)
        config.refuse_unused(self, (
            *((name, self.low_res_size, "a --low_res_size, as upsamplers have")
              for name in ("low_res_noise", "low_res_blur", "blur_sigma", "random_crop")),
            *((name, self.text_encodings != "none", "--text_encodings clip") for name in ("text_drop", "max_text_len")),
            ("vlb_weight", self.learned_variance, "--learned_variance"),
            ("learned_variance", self.timestep_density == "uniform",
             "--timestep_density uniform: the bound is a sum over all timesteps")))
        if both := set(self.attention_levels) & set(self.linear_levels):
            raise UserError(f"--attention_levels, --linear_levels: level {min(both)} is in both; choose one")
        if self.learned_variance and self.objective == "flow":
            raise UserError("--learned_variance: the steps of flow have no variance to learn; take another --objective")
        lora.check(self)
        store.check(self)


# What is different by default for a stage, and named settings for all of it.
STAGES = {
    "base": {},
    "upsample": dict(image_size=32, low_res_size=16, mults=(1, 2), memory_efficient=False, middle_attention=False,
                     image_condition=False, image_map=False, random_crop=16, timestep_density="uniform", steps=500,
                     eval_every=250, eval_steps=10),
}
PRESETS = {  # the base U-Net of DALLE2-pytorch's published config, over ViT-L/14
    "dalle2-64": dict(stage="base", clip="open_clip:ViT-L-14/openai", image_size=64, width=128, mults=(1, 2, 4, 8),
                      blocks=2, cond_width=512, heads=8, head_width=64, attention_levels=(1, 2, 3), image_map=False,
                      memory_efficient=False, timestep_density="uniform", batch_size=2048, chunk_size=64, lr=1.2e-4,
                      beta2=0.999, ema_decay=0.9999, steps=800_000, warmup_steps=10_000, cosine=False,
                      precision="bf16", validation=0.005, test=0.005, crop_scale=0.75, log_every=100,
                      eval_every=10_000, save_every=2_000, eval_samples=2048, eval_steps=50, guidance_scale=2.0,
                      workers=8),
}

# What must not change when a run goes on; all else may.
FIXED = ("stage", "image_size", "low_res_size", "width", "mults", "blocks", "groups", "cond_width", "heads",
         "head_width", "attention_levels", "linear_levels", "middle_attention", "cross_embed", "pixel_shuffle",
         "memory_efficient", "final_block", "self_condition", "image_condition", "image_tokens", "image_map",
         "text_encodings", "max_text_len", "objective", "noise_schedule", "timesteps", "learned_variance",
         "low_res_noise", "random_crop", "crop_scale", "flip", "resize", "batch_size", "chunk_size", "seed",
         "validation", "test", "optimizer", "lora_rank", "lora_alpha", "lora_targets", "lora_base")


# Model

class ResBlock(nn.Module):
    """Two convolutions, each with norm, modulation and SiLU, cross-attention between them, and a way around."""

    def __init__(self, width_in, width, groups, attention=None):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = NormSiLU(width, groups), NormSiLU(width, groups)
        self.attention = attention
        self.around = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x, modulation, memory):
        """x (B, W_in, H, H) -> (B, W, H, H), with modulation (B, 2W) and keys and values for the attention."""
        h = self.norm1(self.conv1(x), modulation)
        if self.attention is not None:
            h = self.attention(h, *memory)
        return self.norm2(self.conv2(h)) + self.around(x)


class Stem(nn.Module):
    """The first convolution: several kernel sizes side by side, the larger the fewer channels (cross-embed)."""

    def __init__(self, width_in, width, kernels):
        super().__init__()
        widths = [width // 2 ** (i + 1) for i in range(len(kernels) - 1)]
        widths.append(width - sum(widths))
        self.convs = nn.ModuleList(nn.Conv2d(width_in, w, k, padding=k // 2) for w, k in zip(widths, kernels))

    def forward(self, x):
        return torch.cat([conv(x) for conv in self.convs], dim=1)


class Upsample(nn.Module):
    """Twice the height and width: by sub-pixel convolution (Shi et al. 2016) or nearest neighbor and convolution."""

    def __init__(self, width_in, width, shuffle):
        super().__init__()
        self.shuffle = shuffle
        self.conv = nn.Conv2d(width_in, 4 * width, 1) if shuffle else nn.Conv2d(width_in, width, 3, padding=1)
        if shuffle:  # the four pixels start alike: no checkerboard (Aitken et al. 2017)
            first = self.conv.weight.detach()[::4]
            self.conv.weight.data.copy_(first.repeat_interleave(4, 0))
            nn.init.zeros_(self.conv.bias)

    def forward(self, x):
        if self.shuffle:
            return F.pixel_shuffle(F.silu(self.conv(x)), 2)
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """The denoiser of one stage, on the plan of DALL-E 2's decoder (§2.1, after GLIDE and ADM).

    B batch, W width, H image size, D width of the image embedding, E of the conditioning tokens, J their number. The
    image embedding is added to the timestep's and becomes tokens beside those of the text; what attention makes of the
    tokens does not depend on the noise and is remembered for all steps of sampling.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        super().__init__()
        self.cfg, self.embed_width, hidden = cfg, embed_width, 4 * cfg.width
        widths = [cfg.width, *(cfg.width * mult for mult in cfg.mults)]
        levels = list(itertools.pairwise(widths))  # (width in, width out), the finest first
        self.low_res = cfg.low_res_size > 0
        channels = 3 * (1 + self.low_res + cfg.self_condition)

        # Conditioning
        self.time_in = TimeEmbedding(hidden, cfg.timesteps)
        self.low_res_level_in = TimeEmbedding(hidden, cfg.timesteps) if self.low_res and cfg.low_res_noise else None
        if cfg.image_condition:
            self.image_in = nn.Sequential(nn.Linear(embed_width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            self.null_hidden_tokens = nn.Parameter(torch.randn(hidden) * 0.02)
            self.image_tokens_in = nn.Linear(embed_width, cfg.cond_width * cfg.image_tokens)
            self.null_image_tokens = nn.Parameter(torch.randn(cfg.image_tokens, cfg.cond_width) * 0.02)
            if cfg.image_map:
                shape = widths[-1], *[cfg.image_size // 2 ** (len(levels) - (not cfg.memory_efficient))] * 2
                self.image_map_in = nn.Sequential(nn.Linear(embed_width, math.prod(shape)), nn.Unflatten(1, shape))
                self.null_map_tokens = nn.Parameter(torch.randn(shape) * 0.02)
        if encoding_width:
            self.encoding_in = nn.Linear(encoding_width, cfg.cond_width)
            self.padding_tokens = nn.Parameter(torch.randn(cfg.max_text_len, cfg.cond_width) * 0.02)
            self.null_encoding_tokens = nn.Parameter(torch.randn(cfg.max_text_len, cfg.cond_width) * 0.02)
        attends = cfg.image_condition or encoding_width > 0
        if attends:
            self.nothing_tokens = nn.Parameter(torch.randn(1, cfg.cond_width) * 0.02)  # for when nothing else fits
            self.condition_norm = nn.LayerNorm(cfg.cond_width, bias=False)

        # Blocks
        self.blocks = []  # all of them, in the order in which they run

        def block(width_in, width, attend):
            attend = attend and attends
            attention = CrossAttention(width, cfg.cond_width, cfg.heads, cfg.head_width) if attend else None
            self.blocks.append(ResBlock(width_in, width, cfg.groups, attention))
            return self.blocks[-1]

        def attention(level, width):
            if level in cfg.attention_levels:
                return SelfAttention(width, cfg.head_width)
            return LinearAttention(width, cfg.head_width) if level in cfg.linear_levels else nn.Identity()

        self.stem = Stem(channels, cfg.width, (3, 7, 15) if cfg.cross_embed else (7,))
        self.first = block(cfg.width, cfg.width, False) if cfg.memory_efficient else None
        self.downs, self.ups, skips = nn.ModuleList(), nn.ModuleList(), []
        for level, (width_in, width_out) in enumerate(levels):
            deepest = level == len(levels) - 1
            shrink = nn.Conv2d(width_in, width_out, 2, 2) if cfg.memory_efficient or not deepest else \
                nn.Conv2d(width_in, width_out, 1)
            width = width_out if cfg.memory_efficient else width_in
            blocks = [block(width, width, level > 0 and i > 0) for i in range(1 + cfg.blocks)]
            skips.append(width)
            self.downs.append(nn.ModuleDict({"blocks": nn.ModuleList(blocks), "attention": attention(level, width),
                                             "shrink": shrink}))
        self.middle1 = block(widths[-1], widths[-1], True)
        self.middle_attention = SelfAttention(widths[-1], cfg.head_width) if cfg.middle_attention else nn.Identity()
        self.middle2 = block(widths[-1], widths[-1], True)
        for level, (width_in, width_out) in reversed(list(enumerate(levels))):
            blocks = [block(width_out + skips[level], width_out, level > 0 and i > 0) for i in range(1 + cfg.blocks)]
            grow = Upsample(width_out, width_in, cfg.pixel_shuffle) if level or cfg.memory_efficient else \
                nn.Conv2d(width_out, width_in, 1) if width_in != width_out else nn.Identity()
            self.ups.append(nn.ModuleDict({"blocks": nn.ModuleList(blocks), "attention": attention(level, width_out),
                                           "grow": grow}))
        self.last = block(2 * cfg.width, cfg.width, False) if cfg.final_block else None
        out = cfg.width * (1 if cfg.final_block else 2) + 3 * self.low_res
        self.out = nn.Conv2d(out, 6 if cfg.learned_variance else 3, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        # One product gives all blocks their scales and shifts.
        self.modulation = nn.Linear(hidden, sum(2 * block.conv1.out_channels for block in self.blocks))
        alpha, sigma = diffusion.tables(cfg.objective, cfg.noise_schedule, cfg.timesteps)
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("sigma", sigma, persistent=False)
        self.to(memory_format=torch.channels_last)

    def remember(self, condition, drop_image, drop_text):
        """What `denoise` needs to know of `condition` or, where drop (B,) is true, of nothing.

        (hidden (B, 4W), map (B, W, H, H) at the smallest size, keys and values of each cross-attention).
        """
        hidden, image_map, parts = 0.0, 0.0, []
        if self.cfg.image_condition:
            embed = condition["image_embed"]
            hidden = self.image_in(embed)
            hidden = torch.where(drop_image[:, None], self.null_hidden_tokens.to(hidden.dtype), hidden)
            tokens = self.image_tokens_in(embed).unflatten(-1, (self.cfg.image_tokens, self.cfg.cond_width))
            null = self.null_image_tokens.to(tokens.dtype)
            parts.append(torch.where(drop_image[:, None, None], null, tokens))
            if self.cfg.image_map:
                image_map = self.image_map_in(embed)
                null = self.null_map_tokens.to(image_map.dtype)
                image_map = torch.where(drop_image[:, None, None, None], null, image_map)
                image_map = image_map.contiguous(memory_format=torch.channels_last)
        if "text_enc" in condition:
            tokens = self.encoding_in(condition["text_enc"])  # (B, L, E)
            padding, null = (t.to(tokens.dtype) for t in (self.padding_tokens, self.null_encoding_tokens))
            tokens = torch.where(condition["text_mask"][..., None], tokens, padding)
            parts.append(torch.where((drop_text | condition["no_text"])[:, None, None], null, tokens))
        if not parts:
            return hidden, image_map, [None] * len(self.blocks)
        nothing = self.nothing_tokens.to(parts[0].dtype).expand(len(parts[0]), -1, -1)
        context = self.condition_norm(torch.cat([nothing, *parts], dim=1))  # (B, J, E)
        return hidden, image_map, [block.attention and block.attention.keys_values(context) for block in self.blocks]

    def denoise(self, x_t, timestep, memory, estimate=None, low_res=None, low_res_level=None):
        """The prediction (B, 3 or 6, H, H) for x_t (B, 3, H, H) at `timestep` (B,), given what `remember` returned.

        estimate: the last x₀, for self-conditioning; low_res: the low-resolution image, brought to H, with the level
        (B,) of the noise added to it.
        """
        hidden, image_map, memories = memory
        hidden = hidden + self.time_in(timestep)
        if self.low_res_level_in is not None:
            hidden = hidden + self.low_res_level_in(low_res_level)
        modulations = self.modulation(F.silu(hidden)).split([2 * block.conv1.out_channels for block in self.blocks], 1)
        each = zip(modulations, memories)

        def through(block, x):
            modulation, memory = next(each)
            if self.cfg.checkpointing and torch.is_grad_enabled():
                return torch.utils.checkpoint.checkpoint(block, x, modulation, memory, use_reentrant=False)
            return block(x, modulation, memory)

        x = torch.cat([part for part in (x_t, estimate, low_res) if part is not None], dim=1)
        x = stem = self.stem(x.contiguous(memory_format=torch.channels_last))
        if self.first is not None:
            x = through(self.first, x)
        skips = []
        for level in self.downs:
            if self.cfg.memory_efficient:
                x = level["shrink"](x)
            for i, block in enumerate(level["blocks"]):
                x = through(block, x)
                if i:
                    skips.append(x)
            x = level["attention"](x)
            skips.append(x)
            if not self.cfg.memory_efficient:
                x = level["shrink"](x)
        x = through(self.middle2, self.middle_attention(through(self.middle1, x + image_map)))
        for level in self.ups:
            for block in level["blocks"]:
                x = through(block, torch.cat([x, skips.pop()], dim=1))
            x = level["grow"](level["attention"](x))
        x = torch.cat([x, stem], dim=1)
        if self.last is not None:
            x = through(self.last, x)
        return self.out(x if low_res is None else torch.cat([x, low_res], dim=1))

    def forward(self, x_t, timestep, condition, drop_image, drop_text, estimate=None, low_res=None, low_res_level=None):
        return self.denoise(x_t, timestep, self.remember(condition, drop_image, drop_text), estimate, low_res,
                            low_res_level)


# Loss

def conditioning(batch, cfg, encoder):
    """{"image_embed" (B, D) of length √D, "text_enc" (B, L, E), "text_mask" (B, L), "no_text" (B,)} for the model.

    The image embeddings are the batch's, or `encoder`'s of its "clip_image"; text encodings are `encoder`'s.
    """
    with torch.no_grad():
        if "clip_image" in batch and not cfg.image_condition:
            embed = torch.zeros(len(batch["caption"]), 1, device=batch["clip_image"].device)  # nobody looks at it
        else:
            embed = encoder.embed_image(batch["clip_image"]) if "clip_image" in batch else batch["image_embed"]
        condition = {"image_embed": F.normalize(embed.float(), dim=-1) * embed.shape[-1] ** 0.5}
        if cfg.text_encodings == "clip":
            _, encodings, mask = encoder.embed_text(encoder.tokenize(batch["caption"]).to(embed.device))
            encodings, mask = encodings[:, :cfg.max_text_len].float(), mask[:, :cfg.max_text_len]
            missing = cfg.max_text_len - encodings.shape[1]
            condition |= {"text_enc": F.pad(encodings, (0, 0, 0, missing)), "text_mask": F.pad(mask, (0, missing)),
                          "no_text": torch.tensor([not text.strip() for text in batch["caption"]], device=embed.device)}
    return condition


def diffusion_loss(model, unet, batch, condition):
    """Mean loss over a chunk: one pass of `model`, which is `unet` or its DDP wrapper."""
    cfg, x0 = unet.cfg, pixels(batch["image"])
    size, device, low_res, low_res_level = len(x0), x0.device, None, None
    if cfg.low_res_size:
        # What the stage before gives is not perfect: blur and noise of a known level (Imagen, DALL-E 2 §2.1).
        low_res = media.resize(x0, cfg.low_res_size, cfg.resize)
        if cfg.low_res_blur:
            sigma, radius = torch.empty(size, device=device).uniform_(*cfg.blur_sigma), math.ceil(3 * cfg.blur_sigma[1])
            chosen = torch.rand(size, device=device) < cfg.low_res_blur
            low_res = torch.where(chosen[:, None, None, None], blurred(low_res, sigma, radius), low_res)
        low_res = media.resize(low_res, cfg.image_size, "bicubic")
        if cfg.random_crop:
            corners = torch.randint(cfg.image_size - cfg.random_crop + 1, (size, 2), device=device)
            x0, low_res = (cropped(t, cfg.random_crop, corners) for t in (x0, low_res))
        share = torch.rand(size, device=device)
        low_res, low_res_level = noised_low_res(unet, low_res, share, torch.randn_like(low_res))
    timestep = diffusion.draw_timesteps(cfg.timestep_density, (size,), cfg.timesteps, device, cfg.density_mean,
                                        cfg.density_std, cfg.mode_scale)
    noise = torch.randn_like(x0)
    drop = [torch.rand(size, device=device) < share for share in (cfg.image_drop, cfg.text_drop)]
    alpha, sigma = (diffusion.at(table, timestep, x0) for table in (unet.alpha, unet.sigma))
    x_t = diffusion.add_noise(x0, noise, alpha, sigma)
    estimate = torch.zeros_like(x0) if cfg.self_condition else None
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)

    def guess(x_t):
        with torch.no_grad():
            out = unet(x_t, timestep, condition, *drop, estimate, low_res, low_res_level).float()[:, :3]
        torch.clear_autocast_cache()  # older torch keeps weights cast without gradients for the pass that needs them
        return out

    if cfg.self_condition and random.random() < 0.5:
        estimate = diffusion.to_x0(cfg.objective, guess(x_t), x_t, alpha, sigma).clamp(-1, 1)
    if cfg.dream:
        x_t, target = diffusion.dream(x_t, noise, guess(x_t), sigma, cfg.dream_power)
    prediction, spread = model(x_t, timestep, condition, *drop, estimate, low_res, low_res_level).float().split(
        [3, 3 * cfg.learned_variance], 1)
    loss = diffusion.distance(cfg.loss, prediction, target)
    loss = (loss * diffusion.loss_weight(cfg, alpha, sigma)).mean()
    if cfg.learned_variance:
        estimated = diffusion.to_x0(cfg.objective, prediction.detach(), x_t, alpha, sigma).clamp(-1, 1)
        bound = diffusion.variational_bound(x0, timestep, estimated, (spread + 1) / 2, unet.alpha, unet.sigma)
        loss = loss + cfg.vlb_weight * cfg.timesteps * bound.mean()  # the bound is a sum over the timesteps
    return loss


def noised_low_res(unet, low_res, share, noise):
    """(low_res with noise added, its level (B,)): `share` (B,) of the most that this stage trains with."""
    if unet.low_res_level_in is None:
        return low_res, None
    level = (share * unet.cfg.low_res_noise * (unet.cfg.timesteps - 1)).round().long()
    alpha, sigma = (diffusion.at(table, level, low_res) for table in (unet.alpha, unet.sigma))
    return diffusion.add_noise(low_res, noise, alpha, sigma), level


# Sampling

@torch.no_grad()
def sample_pictures(unet, condition, steps, guidance_scale=1.0, eta=0.0, noise=torch.randn_like, low_res=None,
                    low_res_share=0.0, known=None, mask=None, resample=1, x_t=None):
    """Pictures (B, 3, H, H) in [-1, 1] for a `conditioning` of B.

    low_res: pictures (B, 3, h, h) of the stage before, to which `low_res_share` of this stage's noise is added.
    known, mask: pictures of which the pixels where mask (B or 1, 1, H, H) is 1 are kept (RePaint, with `resample`
    rounds a step). x_t: what to start from instead of `noise`. Guidance runs every sample a second time, without
    image and text; the noised input is the same for both.
    """
    cfg, size, device = unet.cfg, len(condition["image_embed"]), unet.alpha.device
    denoise = denoiser(unet, condition, guidance_scale, low_res, low_res_share, noise)
    if x_t is None:
        x_t = noise(torch.empty(size, 3, cfg.image_size, cfg.image_size, device=device))
    return diffusion.sample(denoise, x_t, unet.alpha, unet.sigma, steps, eta, noise, known, mask, resample).clamp(-1, 1)


def denoiser(unet, condition, guidance_scale=1.0, low_res=None, low_res_share=0.0, noise=torch.randn_like):
    """The function (x_t, timestep, estimate before) -> x₀ that the samplers take; conditioning is projected here."""
    cfg, size = unet.cfg, len(condition["image_embed"])
    level = None
    if cfg.low_res_size:
        low_res = media.resize(low_res, cfg.image_size, "bicubic")
        share = torch.full((size,), low_res_share, device=low_res.device)
        low_res, level = noised_low_res(unet, low_res, share, noise(low_res))
    guided = guidance_scale != 1 and (cfg.image_condition or cfg.text_encodings != "none")
    if guided:
        condition = {name: torch.cat([value, value]) for name, value in condition.items()}
        low_res, level = (t if t is None else torch.cat([t, t]) for t in (low_res, level))
    drop = torch.arange(len(condition["image_embed"]), device=unet.alpha.device) >= size
    memory = unet.remember(condition, drop, drop)

    def denoise(x, timestep, before):
        alpha, sigma = (diffusion.at(table, timestep, x) for table in (unet.alpha, unet.sigma))
        twice = (2,) + (1,) * (x.ndim - 1) if guided else (1,) * x.ndim
        out = unet.denoise(x.repeat(twice), timestep.repeat(twice[0]), memory,
                           before.repeat(twice) if cfg.self_condition else None, low_res, level).float()
        if guided:
            prediction = diffusion.guide(out[:size, :3], out[size:, :3], guidance_scale)
        else:
            prediction = out[:, :3]
        x0 = diffusion.to_x0(cfg.objective, prediction, x, alpha, sigma)
        x0 = diffusion.threshold(x0, cfg.threshold) if cfg.threshold else x0.clamp(-1, 1)
        return (x0, (out[:size, 3:] + 1) / 2) if cfg.learned_variance else x0
    return denoise


# Evaluation

class Moments:
    """Sums by which means and covariances of features are exact over any number of batches and ranks."""

    def __init__(self, width):
        self.count, self.sum, self.outer = 0, np.zeros(width), np.zeros((width, width))

    def add(self, features):
        """Take in features (B, D)."""
        x = features.cpu().double().numpy()
        self.count, self.sum, self.outer = self.count + len(x), self.sum + x.sum(0), self.outer + x.T @ x

    def reduce(self):
        """(mean (D,), covariance (D, D)) over all ranks; all call it."""
        width = len(self.sum)
        count, *rest = dist.total([self.count, *self.sum, *self.outer.ravel()])
        mean = np.array(rest[:width]) / count
        scatter = np.reshape(rest[width:], (width, width)) - count * np.outer(mean, mean)
        return mean, scatter / max(1, count - 1)


def frechet_distance(one, other):
    """Fréchet distance of two Gaussians (mean, covariance): |m₁-m₂|² + tr(C₁ + C₂ - 2(C₁C₂)^½) (Heusel et al. 2017)."""
    (mean1, cov1), (mean2, cov2) = one, other
    values, vectors = np.linalg.eigh(cov1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T  # (C₁C₂)^½ has the trace of (C₁^½ C₂ C₁^½)^½
    values = np.linalg.eigvalsh(root @ cov2 @ root)
    return float(((mean1 - mean2) ** 2).sum() + np.trace(cov1) + np.trace(cov2) - 2 * np.sqrt(values.clip(0)).sum())


judge = functools.cache(synthetic.Judge)  # by new color; it takes seconds to make


class Evaluator:
    """Everything that is measured on held-out pictures; the same, to rounding, on any number of ranks."""

    def __init__(self, cfg, source, encoder, device):
        self.cfg, self.source, self.encoder, self.device = cfg, source, encoder, device
        self.judge, known = None, isinstance(source, (Shapes, Recolored))
        if known and cfg.image_size % synthetic.Judge.SIZE == 0:
            self.judge = judge(getattr(source, "color", ""))

    def chunks(self, part):
        """This rank's (number, batch) of the part."""
        split = self.source.split(part, self.cfg.validation, self.cfg.test)
        rows = min(len(split), self.cfg.eval_samples or len(split))
        reader = data.Chunks(self.source, split)
        for number in range(dist.rank(), -(-rows // self.cfg.chunk_size), dist.world_size()):
            span = number * self.cfg.chunk_size, min(rows, (number + 1) * self.cfg.chunk_size)
            yield number, data.to_device(reader[span], self.device)

    @torch.no_grad()
    def loss(self, unet, part):
        """Mean diffusion loss over a part, with the same noise every time; leaves the model's mode as it was."""
        mode, total = unet.training, [0.0, 0]
        unet.eval()
        for number, batch in self.chunks(part):
            accumulate.seed(self.cfg.seed, "loss", number)
            with amp.autocast(self.device, self.cfg.precision):
                loss = diffusion_loss(unet, unet, batch, conditioning(batch, self.cfg, self.encoder))
            total = [total[0] + loss.item() * len(batch["rows"]), total[1] + len(batch["rows"])]
        unet.train(mode)
        loss_sum, count = dist.total(total)
        return loss_sum / count

    @torch.no_grad()
    def figures(self, unet, part):
        """(scores, (pictures, captions) of rank 0 for the grid) of one stage, given real low-resolution pictures."""
        cfg, mode = self.cfg, unet.training
        unet.eval()

        def draw(batch, noise):
            condition = conditioning(batch, cfg, self.encoder)
            low_res = media.resize(pixels(batch["image"]), cfg.low_res_size, cfg.resize) if cfg.low_res_size else None
            with amp.autocast(self.device, cfg.precision):
                return sample_pictures(unet, condition, cfg.eval_steps, cfg.guidance_scale, cfg.eta, noise, low_res)
        result = self.scores(draw, part)
        unet.train(mode)
        return result

    def scores(self, draw, part, extra=()):
        """(scores, grid) of the pictures that `draw(batch, noise)` makes for the part's rows, beside the real ones.

        extra: torchmetrics that are fed with both. The grid is rank 0's first pictures, real above drawn.
        """
        names = list(synthetic.ATTRIBUTES)
        right, totals, grid = {kind: np.zeros((2, 1 + len(names))) for kind in ("drawn", "real")}, np.zeros(3), None
        moments = {kind: Moments(self.encoder.embed_width) for kind in right} if self.encoder else {}
        for _, batch in self.chunks(part):
            seeds = [accumulate.number(self.cfg.seed, "picture", row) for row in batch["rows"].tolist()]
            drawn = as_bytes(draw(batch, diffusion.noise_source(seeds, self.device)).float())
            real = media.resize_bytes(batch["image"], drawn.shape[1], self.cfg.resize)
            grid = grid or (real[:8].cpu().numpy(), drawn[:8].cpu().numpy(), batch["caption"][:8])
            if self.encoder:
                text, _, _ = self.encoder.embed_text(self.encoder.tokenize(batch["caption"]).to(self.device))
                for kind, pictures in (("drawn", drawn), ("real", real)):
                    embed = self.encoder.embed_image(pictures)
                    moments[kind].add(embed)
                    score = 100 * F.cosine_similarity(embed, text).clamp(min=0).sum().item()
                    totals[("drawn", "real").index(kind)] += score
            totals[2] += len(drawn)
            for metric in extra:
                metric.add(real, drawn)
            if self.judge:
                records = self.source.records(batch["rows"].cpu().numpy())
                for kind, pictures in (("drawn", drawn), ("real", real)):
                    good, named = self.judge.right(pictures.cpu().numpy(), records)
                    right[kind] += [[(good | ~named).all(1).sum(), *(good & named).sum(0)],
                                    [len(named), *named.sum(0)]]
        drawn_score, real_score, count = dist.total(totals.tolist())
        result = {}
        if self.encoder:
            result |= {"clip_score": drawn_score / count, "clip_score_real": real_score / count, "frechet_distance":
                       frechet_distance(moments["drawn"].reduce(), moments["real"].reduce())}
        if self.judge:
            (good, of), (real_good, _) = (np.reshape(dist.total(right[kind].ravel().tolist()), (2, -1))
                                          for kind in ("drawn", "real"))
            shares = good / of.clip(1)
            result |= {"caption_accuracy": shares[0], "caption_accuracy_ceiling": real_good[0] / max(1, of[0]),
                       **{f"accuracy_{name}": share for name, share in zip(names, shares[1:])}}
        for metric in extra:
            result |= metric.result()
        return {name: float(value) for name, value in result.items()}, grid


def write_grid(path, grid):
    """Real pictures, each with its caption, and below them what was drawn for it. Returns the captions in one line."""
    real, drawn, captions = grid
    rows = media.captioned_grid(np.concatenate([real, drawn]), [*captions, *[""] * len(drawn)], len(real))
    with checkpoint.replacing(path) as file:
        media.write_png(file, rows)
    return " | ".join(captions)


# Training

def open_data(cfg):
    """(source, CLIP or None, spec of the CLIP or None) for a config whose `data` is a path, or a folder of shapes.

    The CLIP is needed for evaluation, and to embed images or text that have no embeddings yet. A folder of the
    built-in shapes may be followed by a colon and a new color.
    """
    folder, _, color = cfg.data.partition(":")
    if not (built_in := Path(folder, "made.json").is_file()):
        folder, color = cfg.data, ""  # a colon is part of the path
    spec = cfg.clip
    if spec == "auto":
        spec = config.read_json(noted).get("clip") if (noted := Path(folder) / "clip.json").is_file() else None
    encoder = clip.load(spec, "cpu") if spec else None
    if built_in:
        config.refuse_unused(cfg, [(name, False, "pictures of your own, not built-in shapes")
                                   for name in ("flip", "crop_scale", "shards", "embeddings")])
    if color:
        source = Recolored(color, cfg.image_size, encoder.image_size)
    elif built_in:
        source = Shapes(folder, cfg.image_size)
    else:
        source = Pictures(cfg.data, cfg.image_size, cfg.embeddings, cfg.index_width, cfg.shards,
                          crop_scale=cfg.crop_scale, flip=cfg.flip, resize=cfg.resize)
        if source.width is None and encoder is None:
            raise UserError(f"{cfg.data}: no embeddings in or beside it, so a CLIP must make them; name it with --clip")
        source.clip_size = encoder.image_size if source.width is None else 0
    if encoder and source.width and encoder.embed_width != source.width:
        raise UserError(f"--clip {spec}: its embeddings are {encoder.embed_width} wide, those of {cfg.data} "
                        f"{source.width}")
    if cfg.text_encodings == "clip" and encoder is None:
        raise UserError("--text_encodings clip: name the CLIP with --clip")
    return source, encoder, spec


def prepare(cfg, run, device):
    """What rank 0 does before anyone trains: hold the run folder, make the built-in data, check everything.

    Returns (the config with `data` as a path, the checkpoint to resume from or None, the results of a run that is
    finished or None, messages).
    """
    cfg = check_start(cfg)
    own, _, color = cfg.data.partition(":")  # "shapes", or "shapes:COLOR"
    opened = None if own == "shapes" else open_data(cfg)  # checked before an earlier run is moved aside
    moved = run.open(cfg.resume)
    notes = [f"the earlier run is now in {moved}"] if moved else []
    if own == "shapes":
        made = clip.builtin_data(run.folder.parent.parent, device)
        cfg = dataclasses.replace(cfg, data=f"{made}:{color}" if color else made)
    source, encoder, _ = opened or open_data(cfg)
    bad, read, names = source.check()
    if bad:
        notes.append(f"{bad} of {read} pictures looked at cannot be used and are left out: {', '.join(names)}")
    for part in ("train", "validation", "test"):
        rows = len(source.split(part, cfg.validation, cfg.test))
        if rows < (cfg.batch_size if part == "train" else 1):
            raise UserError(f"{cfg.data}: {rows} {part} pictures, fewer than --batch_size {cfg.batch_size}; lower it"
                            if part == "train" else f"{cfg.data}: none of its {len(source)} pictures is left for "
                            f"{part}; raise --{part}")
    resume_from, finished, more = resume_point(cfg, run, identity(cfg, source, encoder))
    return cfg, resume_from, finished, notes + more


def identity(cfg, source, encoder):
    """The facts by which a run is known again: what must not change while it goes on."""
    used = source.width is None or cfg.text_encodings == "clip"
    return {name: getattr(cfg, name) for name in FIXED} | lora.identity(cfg) | {
        f"data {k}": v for k, v in source.fingerprint().items()} | ({"clip": encoder.fingerprint()} if used else {})


def make(cfg, source, encoder, spec, device):
    """The State of a new run: the U-Net as its model, its adapters if those are trained, and what is saved with it."""
    accumulate.seed(cfg.seed, "weights")
    widths = [source.width or encoder.embed_width, encoder.encoding_width if cfg.text_encodings == "clip" else 0]
    facts = {"kind": "decoder", "widths": widths, "clip": spec}
    unet, trained = UNet(cfg, *widths).to(device), None
    if cfg.lora_rank:
        trained, facts["lora"] = lora.start(unet, cfg)
    return State(cfg, unet, device, identity(cfg, source, encoder), facts, trained)


def update(run, model, encoder, plan, batch):
    """One optimizer step of `model`, the U-Net of the State `run` or its DDP wrapper, on this rank's chunks `batch`.

    Returns (this rank's loss summed over its samples, gradient norm, whether the step was taken).
    """
    cfg, step_loss = run.cfg, torch.zeros((), device=run.device)
    run.set_rate()
    for chunk, part in zip(plan, batch):
        accumulate.seed(cfg.seed, run.step, chunk.index)
        part = data.to_device(part, run.device)
        with dist.sync_if(model, chunk.last):
            with amp.autocast(run.device, cfg.precision):
                loss = diffusion_loss(model, run.model, part, conditioning(part, cfg, encoder))
            run.scaler.scale(loss * chunk.weight).backward()
        step_loss += loss.detach() * (chunk.stop - chunk.start)
    norms, taken = run.advance()
    return step_loss, norms.square().sum().sqrt(), taken


def train(cfgs):
    device = dist.setup(cfgs[0].device, cfgs[0].timeout_minutes)
    for one, two in itertools.pairwise(cfgs):
        if one.image_size != two.low_res_size:
            raise UserError(f"--stage all: {one.stage} makes pictures of {one.image_size} pixels, {two.stage} starts "
                            f"from {two.low_res_size}; flags hold for both, so train them one by one: --stage base …")
    store.check_stages(cfgs)
    before = [train_stage(cfg, device) for cfg in cfgs]
    if len(cfgs) > 1:  # the stages together, from real image embeddings to pictures
        run = Path(cfgs[0].run)
        asked = EvaluateConfig(runs=tuple(str(run / cfg.stage) for cfg in cfgs), steps=tuple(
            cfg.eval_steps for cfg in cfgs), eval_samples=2 * cfgs[0].eval_samples, grid=str(run / "cascade.png"),
            out=str(run / "cascade.json"), seed=cfgs[0].seed, device=cfgs[0].device, eta=tuple(cfg.eta for cfg in cfgs),
            guidance_scale=tuple(cfg.guidance_scale for cfg in cfgs))
        if all(before) and (run / "cascade.json").is_file():
            scores = config.read_json(run / "cascade.json")
        else:
            scores = evaluate_cascade(asked, device)
        report(f"The stages together, on {asked.part} pictures ({asked.grid}):", scores)
    if dist.is_main():
        folders, last = ",".join(str(Path(cfg.run) / cfg.stage) for cfg in cfgs), cfgs[-1]
        if last.lora_rank:
            base = Path(checkpoint.load(Path(last.run) / last.stage / "model.pt")["lora"]["base"])
            folders = f"{base.parent} --model {base.name} --lora {folders}/model.pt"
        start = " --start 2 --low_res small.png" if cfgs[0].low_res_size else ""
        folders = f"RUN_BEFORE,{folders}" if start else folders
        print(f'\nTo draw: python train_decoder.py sample --runs {folders}{start} --text "a large green triangle at '
              'the top left" --num 8 --out grid.png', flush=True)


def train_stage(cfg, device):
    """Train one stage; returns whether it was finished before."""
    # Let rank 0 hold the run folder, make data and check all there is to check.
    started, asked = time.monotonic(), cfg
    cfg = dataclasses.replace(cfg, run=str(Path(cfg.run) / cfg.stage))
    folder = checkpoint.Run(cfg.run)
    cfg, resume_from, finished, notes = dist.on_main(lambda: prepare(cfg, folder, device))
    if finished:
        report(f"{cfg.run} is finished, at step {finished['step']}; to train on, give more --steps.", finished)
        return True
    source, encoder, spec = open_data(cfg)

    # Make the model, or take it up where it was.
    encoder = encoder and encoder.to(device)
    run = make(cfg, source, encoder, spec, device)
    if resume_from:
        notes += run.restore(resume_from)
    elif cfg.init_from and not cfg.lora_rank:
        run.start_from(cfg.init_from, cfg.init_strict)
    unet, average = run.model, run.average
    dist.check_in_step(unet, run.step)
    if dist.is_main():
        checkpoint.write_json({**config.as_json(asked), "versions": run.versions}, folder.folder / "config.json")
    split = source.split("train", cfg.validation, cfg.test)
    log = tracker.Tracker(folder, run, len(split))
    log.say(f"{cfg.stage}: {sum(p.numel() for p in run.trained.parameters()):,} "
            f"{'parameters' if not cfg.lora_rank else 'in LoRA'}, {len(source):,} pictures of {cfg.image_size}x"
            f"{cfg.image_size}, {dist.world_size()} rank(s) on {device.type}")
    for note in filter(None, notes):
        log.say(note)
    if cfg.compile:
        unet.compile()
    model = dist.wrap(unet, device)

    # Ask for the data in the order that seed and step give.
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, run.step)
    batches = data.loader(data.Chunks(source, split, cfg.seed), spans, cfg.workers, device.type == "cuda")
    evaluator = Evaluator(cfg, source, encoder, device)

    with log, tracker.signals() as signals:  # the log hears how it ends
        # Train. Signals and clocks are read by rank 0, at log lines, where the ranks meet anyway.
        saved = evaluated = time.monotonic()
        meter, batch, taken = tracker.Meter(log, run), [], True
        bar = tracker.progress(total=cfg.steps, initial=run.step, desc=cfg.stage, unit="step",
                               disable=not dist.is_main())
        unet.train()
        while run.step < cfg.steps:
            if taken:  # a step that overflowed did not happen: it is tried again, on the same samples
                batch = [next(batches) for _ in plan]
            step_loss, norm, taken = update(run, model, encoder, plan, batch)
            if not taken:
                meter.overflows += 1
                continue
            bar.update()
            meter.add(step_loss, batch)
            if run.step % cfg.log_every and run.step < cfg.steps:
                continue

            # Log: the one place where the host waits for the device.
            (loss, rate), step, now = meter.line(norm), run.step, time.monotonic()
            bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)

            # Evaluate and save, when the steps, rank 0's clock or a signal say so.
            eval_due, save_due, stop = dist.broadcast((
                step == cfg.steps or due(step, meter.step, cfg.eval_every, now - evaluated, cfg.eval_minutes),
                step == cfg.steps or due(step, meter.step, cfg.save_every, now - saved, cfg.save_minutes),
                signals[:1]))
            if eval_due:
                figures, samples = evaluate_stage(evaluator, run, step)
                evaluated = time.monotonic()
                log.log(step, samples, **figures, evaluation_s=evaluated - now)
                losses = {name: figures.pop(name) for name in ("val_loss", "val_loss_online")}
                lines = [f"step {step}: " + tracker.show({"loss": loss, **losses}), *tracker.table(figures)]
                log.say("\n    ".join(lines))
                run.keep_best(losses["val_loss"], folder, log)
                log.report()
            if save_due or stop:
                run.commit(folder, log)
                saved = time.monotonic()
            if stop:
                folder.wait()
                log.say(f"stopped by signal {stop[0]} at step {step}, all saved; the same command goes on")
                raise SystemExit(128 + stop[0])
            meter.restart()
        bar.close()

        # Test the averaged weights, and save them last of all.
        with average.applied(run.trained):
            scores, grid = evaluator.figures(unet, "test")
            results = {"test_loss": evaluator.loss(unet, "test"), **scores}
        run.export(folder, "model.pt", **results)
        if dist.is_main():
            log.log(run.step, {"samples/test.png": write_grid(Path(cfg.run) / "samples" / "test.png", grid)}, **results)
        results = {"step": run.step, "best_val_loss": run.best_val_loss, **results}
        log.deliver()
        if dist.is_main():
            folder.finish(results)
        log.report()
    report(f"Trained {cfg.run}; this start took {time.monotonic() - started:.0f} s. Pictures: {cfg.run}/samples",
           results)
    return False


def evaluate_stage(evaluator, run, step):
    """(figures, {file: caption} of grids): losses of both kinds of weights, scores of those that eval_weights names."""
    cfg, unet, losses, figures, samples = run.cfg, run.model, {}, {}, {}
    for kind in ("online", "ema"):
        with run.average.applied(run.trained) if kind == "ema" else contextlib.nullcontext():
            suffix = "" if kind == "ema" else "_online"
            losses[f"val_loss{suffix}"] = evaluator.loss(unet, "validation")
            if cfg.eval_weights not in (kind, "both") or step == cfg.steps:  # the test is next
                continue
            scores, grid = evaluator.figures(unet, "validation")
            figures |= {name + suffix: value for name, value in scores.items()}
            if dist.is_main():
                file = f"samples/step_{step:08d}{suffix}.png"
                samples[file] = write_grid(Path(cfg.run) / file, grid)
    return {**losses, **figures}, samples


def report(headline, results):
    """A headline, and the results as a table."""
    if dist.is_main():
        print("\n".join([f"\n{headline}\n", *(f"  {line}" for line in tracker.table(results))]), flush=True)


# Commands

class Stage(NamedTuple):
    unet: UNet  # in eval mode
    cfg: Config
    clip: str | None  # spec of the CLIP whose embeddings it was trained on
    path: Path


def load_stage(path, weights, device, adapters="", scale=1.0):
    """The stage in `path`, a model.pt or a checkpoint, with the `adapters` of another run merged in at `scale`."""
    cfg, found = lora.read_model("decoder", Config, path, weights, adapters, scale)
    unet = UNet(cfg, *found["widths"]).to(device).eval()
    load_weights(unet, found, path)
    return Stage(unet, cfg, found["clip"], Path(path))


def load_cascade(asked, device):
    """The stages that `asked` names, from --start to --stop, checked to fit each other."""
    if len(asked.lora) > len(asked.runs):
        raise UserError(f"--lora: {len(asked.lora)} files for {len(asked.runs)} --runs; give one a run, or none")
    adapters = ["" if file == "none" else file for file in asked.lora] + [""] * (len(asked.runs) - len(asked.lora))
    stages = [load_stage(Path(run) / asked.model, asked.weights, device, file, asked.lora_scale)
              for run, file in zip(asked.runs, adapters)]
    for i, (one, two) in enumerate(itertools.pairwise(stages), 2):
        if one.cfg.image_size != two.cfg.low_res_size:
            raise UserError(f"--runs: stage {i}, {two.path}, starts from pictures of {two.cfg.low_res_size} pixels (0: "
                            f"none), but {one.path} makes {one.cfg.image_size}; give the runs in order, each the "
                            "low_res_size of which is the image_size of the one before")
        if one.unet.embed_width != two.unet.embed_width:
            raise UserError(f"--runs: {one.path} takes image embeddings {one.unet.embed_width} wide, {two.path} "
                            f"{two.unet.embed_width}; train them on the same CLIP")
    stop = asked.stop or len(stages)
    if not 1 <= asked.start <= stop <= len(stages):
        raise UserError(f"--start {asked.start} --stop {asked.stop}: expected 1 <= start <= stop <= {len(stages)}, the "
                        "number of --runs")
    first = stages[asked.start - 1]
    if first.cfg.low_res_size and asked.start == 1:
        raise UserError(f"--runs: the first, {first.path}, starts from pictures of {first.cfg.low_res_size} pixels; "
                        "give the run that makes them before it")
    for stage, steps in zip(stages, per_stage(asked.steps, len(stages))):
        if steps > stage.cfg.timesteps:
            raise UserError(f"--steps: {steps} is more than the {stage.cfg.timesteps} timesteps of {stage.path}")
    return stages[asked.start - 1:stop]


def per_stage(values, count):
    """`values` for `count` stages; the last counts for all that follow."""
    return [values[min(i, len(values) - 1)] for i in range(count)]


def draw_cascade(stages, batch, encoder, asked, noise, low_res=None, known=None, mask=None, resample=1, x_t=None):
    """Pictures (B, 3, H, H) of the last of `stages` for the `batch`'s embeddings and captions.

    low_res: what the first starts from, if it is no base; known, mask: (B, 3, H, H) and (1, 1, H, H) at the last
    stage's size, which are brought to each stage's; x_t: what the first starts from instead of noise.
    """
    first = asked.start - 1
    steps, scales, etas = (per_stage(values, first + len(stages))[first:]
                           for values in (asked.steps, asked.guidance_scale, asked.eta))
    for i, (unet, cfg, _, _) in enumerate(stages):
        keep, hole = known, mask
        if known is not None and known.shape[-1] != cfg.image_size:
            keep = media.resize(known, cfg.image_size, "area")
            hole = (media.resize(mask, cfg.image_size, "area") > 0.999).float()  # known: all of it is known
        with amp.autocast(unet.alpha.device, cfg.precision):
            low_res = sample_pictures(unet, conditioning(batch, cfg, encoder), steps[i], scales[i], etas[i], noise,
                                      low_res, asked.low_res_share, keep, hole, resample, x_t if not i else None)
    return low_res


@dataclass(frozen=True)
class CascadeConfig:
    # The cascade
    runs: tuple[str, ...] = ("runs/decoder/base", "runs/decoder/upsample")  # run folders of the stages, in order
    model: str = "model.pt"  # file in each: model.pt (newest), best.pt (lowest validation loss), checkpoints/step_N.pt
    weights: Literal["ema", "online"] = "ema"  # of a checkpoint: averaged, or as the optimizer left them
    lora: tuple[str, ...] = ()  # LoRA adapters for each run, none for those that have none
    lora_scale: float = 1.0  # how much they count
    start: int = 1  # first stage to run; beyond 1, from low-resolution pictures: real ones, or --low_res
    stop: int = 0  # last stage to run, 0 for the last there is
    steps: tuple[int, ...] = (25, 10)  # sampling steps of each stage; the last counts for all that follow
    guidance_scale: tuple[float, ...] = (1.0,)  # of each stage, 1 for none
    eta: tuple[float, ...] = (0.0,)  # of each stage: 1 as DDPM, 0 for DDIM
    low_res_share: float = 0.0  # noise added between stages, as a share of the most in training
    clip: str = ""  # CLIP of texts and images, by default that of the training
    prior_lora: str = ""  # LoRA adapters for the prior
    prior_steps: int = 64  # sampling steps of the prior
    prior_guidance: float = 1.0  # its guidance scale
    best_of: int = 2  # embeddings of which the prior takes the most similar to the text
    seed: int = 0  # of the noise
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute

    def __post_init__(self):
        for name in ("runs", "steps", "guidance_scale", "eta"):
            if not getattr(self, name):
                raise UserError(f"--{name}: expected at least one value")
        for name in ("steps", "prior_steps", "best_of"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,)) < 1:
                raise UserError(f"--{name}: {value} is not above 0")
        for name in ("low_res_share", "eta"):
            value = getattr(self, name)
            if any(not 0 <= v <= 1 for v in (value if isinstance(value, tuple) else (value,))):
                raise UserError(f"--{name}: {value} is not within 0 and 1")


@dataclass(frozen=True)
class EvaluateConfig(CascadeConfig):
    # What to evaluate
    prior: str = ""  # prior that makes the embeddings from captions: run folder or model.pt; by default they are real
    data: str = ""  # pictures to evaluate on, by default those that the last stage was trained on
    part: Literal["train", "validation", "test"] = "test"  # which of them
    eval_samples: int = 512  # most pictures to take, 0 for all
    torchmetrics: tuple[str, ...] = ()  # fid, kid, is, lpips: also these, by the package of that name
    grid: str = ""  # PNG file for the first eight, real above drawn
    out: str = ""  # JSON file to write the figures to

    def __post_init__(self):
        super().__post_init__()
        if self.eval_samples < 0:
            raise UserError(f"--eval_samples: {self.eval_samples} is below 0")
        if wrong := set(self.torchmetrics) - set(TorchMetric.NAMES):
            raise UserError(f"--torchmetrics: {min(wrong)!r} is none of {', '.join(TorchMetric.NAMES)}")


def evaluate(asked):
    device = dist.setup(asked.device)
    scores = evaluate_cascade(asked, device)
    if dist.is_main():
        print("\n".join(tracker.table(scores)))


def plan_evaluation(asked, device):
    """(stages, Evaluator, function of the prior or None, torchmetrics) for what `asked` wants, all of it checked."""
    stages = load_cascade(asked, device)
    last = stages[-1]
    cfg = dataclasses.replace(last.cfg, eval_samples=asked.eval_samples, seed=asked.seed, crop_scale=1.0, flip=False,
                              clip=asked.clip or last.clip or "auto")
    if asked.data:  # what was said of where the training's lay is not true of these
        cfg = dataclasses.replace(cfg, data=asked.data, embeddings="", shards="")
    source, encoder, _ = open_data(cfg)
    encoder = encoder and encoder.to(device)
    width = source.width or encoder.embed_width
    if width != last.unet.embed_width:
        raise UserError(f"{cfg.data}: image embeddings {width} wide, the decoder's are {last.unet.embed_width}")
    if not len(source.split(asked.part, cfg.validation, cfg.test)):
        raise UserError(f"{cfg.data}: none of its {len(source)} pictures is in the part {asked.part}; give another "
                        "--part")
    return (stages, Evaluator(cfg, source, encoder, device),
            load_imagination(asked, encoder, device) if asked.prior else None,
            [TorchMetric(name, device) for name in asked.torchmetrics])


def evaluate_cascade(asked, device):
    """Scores of the pictures that a cascade makes for held-out rows; rank 0 writes them and a grid, if asked."""
    stages, evaluator, imagine, extra = dist.on_each(lambda: plan_evaluation(asked, device))
    cfg, encoder = evaluator.cfg, evaluator.encoder

    def draw(batch, noise):
        low_res = None
        if size := stages[0].cfg.low_res_size:
            low_res = media.resize(pixels(batch["image"]), size, cfg.resize)
        if imagine:
            batch = {**batch, "image_embed": imagine(batch["caption"], 1, batch["rows"].tolist())[:, 0]}
            batch.pop("clip_image", None)
        return draw_cascade(stages, batch, encoder, asked, noise, low_res)

    with torch.no_grad():
        scores, grid = evaluator.scores(draw, asked.part, extra)
    if dist.is_main():
        if asked.grid:
            write_grid(asked.grid, grid)
        if asked.out:
            checkpoint.write_json(scores, asked.out)
    return scores


class TorchMetric:
    """One of torchmetrics' measures of images; it gathers over the ranks itself."""

    NAMES = ("fid", "kid", "is", "lpips")

    def __init__(self, name, device):
        try:
            from torchmetrics.image.fid import FrechetInceptionDistance
            from torchmetrics.image.inception import InceptionScore
            from torchmetrics.image.kid import KernelInceptionDistance
            from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity
            make = {"fid": FrechetInceptionDistance, "kid": lambda: KernelInceptionDistance(subset_size=50),
                    "is": InceptionScore, "lpips": lambda: LearnedPerceptualImagePatchSimilarity(normalize=True)}
            self.name, self.metric = name, make[name]().to(device)
        except ImportError as error:  # the package itself, or one that the metric needs
            raise UserError(f"--torchmetrics {name}: needs torchmetrics and what it asks for: pip install "
                            f"'torchmetrics[image]' ({str(error).splitlines()[0]})") from None

    def add(self, real, drawn):
        """Take in uint8 pictures (B, H, H, 3)."""
        real, drawn = (pictures.permute(0, 3, 1, 2) for pictures in (real, drawn))
        if self.name == "is":
            self.metric.update(drawn)
        elif self.name == "lpips":
            self.metric.update(drawn / 255, real / 255)
        else:
            self.metric.update(real, real=True)
            self.metric.update(drawn, real=False)

    def result(self):
        try:
            value = self.metric.compute()
        except ValueError as error:  # too few pictures, for one
            raise UserError(f"--torchmetrics {self.name}: {error}") from error
        return {self.name: (value[0] if isinstance(value, tuple) else value).item()}


def load_imagination(asked, encoder, device):
    """The function (texts, n, keys) -> image embeddings (texts, n, D) by the prior; `keys` make the seeds.

    asked.prior "none": the text's own embedding is taken for an image's, as GLIDE-like models in DALL-E 2 §5.1 do.
    """
    import train_prior  # the one place where a script needs another
    if encoder is None:
        raise UserError("--prior: which CLIP the decoder was trained on is not known; name it with --clip")

    def embedded(texts, count, keys):
        with torch.no_grad():
            embed, _, _ = encoder.embed_text(encoder.tokenize(texts).to(device))
        return F.normalize(embed.float(), dim=-1)[:, None].expand(-1, count, -1)

    if asked.prior == "none":
        return embedded
    path = Path(asked.prior) / "model.pt" if Path(asked.prior).is_dir() else Path(asked.prior)
    if not path.is_file():
        raise UserError(f"--prior {asked.prior}: there is no prior's model.pt; train one (torchrun --nproc_per_node=2 "
                        "train_prior.py), or name its run folder, or none to decode the text's own embedding")
    wish = train_prior.SampleConfig(run=str(path.parent), model=path.name, text="-", best_of=asked.best_of,
                                    steps=asked.prior_steps, guidance_scale=asked.prior_guidance, seed=asked.seed,
                                    lora=asked.prior_lora)
    prior, cfg, found = train_prior.load_prior(wish, device)
    if cfg.text_encodings != "none" and encoder.encoding_width != found["widths"][1]:
        raise UserError(f"--prior {path}: text encodings {found['widths'][1]} wide, the decoder's CLIP has "
                        f"{encoder.encoding_width}; train both on the same CLIP")
    if asked.prior_steps > cfg.timesteps:
        raise UserError(f"--prior_steps: {asked.prior_steps} is more than the {cfg.timesteps} timesteps of the prior")
    if prior.embed_width != encoder.embed_width:
        raise UserError(f"--prior {path}: embeddings {prior.embed_width} wide, the decoder's CLIP has "
                        f"{encoder.embed_width}; train both on the same CLIP")

    def imagined(texts, count, keys):
        return train_prior.imagine(prior, cfg, encoder, texts, keys, dataclasses.replace(wish, num=count))[0]
    return imagined


@dataclass(frozen=True)
class SampleConfig(CascadeConfig):
    # What to draw
    text: str = ""  # a caption
    texts: str = ""  # or a file with one caption a line
    image: str = ""  # or an image: draw variations of it (or of --text within it, with --mask)
    to: str = ""  # a second image: draw what lies between the two (DALL-E 2 §3.2)
    mask: str = ""  # an image as large as --image, black where it is to be kept, white where to be drawn anew
    low_res: str = ""  # an image to enlarge, for --start 2 and beyond
    invert: bool = False  # start from the noise that --image (and --to) come from, by DDIM backwards
    num: int = 8  # pictures a caption or image, or on the way from one image to the other
    prior: str = "runs/prior"  # the prior: run folder or model.pt; none: take the text's embedding for an image's
    resample: int = 5  # with --mask: rounds a step, so that what is drawn fits what is kept (RePaint)
    max_batch: int = 64  # most pictures computed at once
    out: str = "grid.png"  # PNG with all pictures and their captions
    pictures: str = ""  # folder for a PNG of each, TEXT_NUMBER.png

    def __post_init__(self):
        super().__post_init__()
        for name in ("num", "max_batch", "resample"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name}: {getattr(self, name)} is not above 0")
        if self.text and self.texts:
            raise UserError("--text and --texts: give one of them")
        if not (self.text.strip() or self.texts or self.image or self.low_res):
            raise UserError("--text: give a text that is not empty, a file of them with --texts, or an --image")
        for name, needed in (("to", "image"), ("mask", "image"), ("invert", "image")):
            if getattr(self, name) and not getattr(self, needed):
                raise UserError(f"--{name}: needs --{needed}")
        if (self.start > 1) != bool(self.low_res):
            raise UserError("--low_res: an image to enlarge goes with --start 2 or beyond, and these need one")
        if self.image and (self.text.strip() or self.texts) and not (self.mask or self.to or self.invert):
            raise UserError("--text with --image: it needs --mask, which says where to draw; an image alone is varied")
        if self.to and (self.mask or self.text or self.texts):
            raise UserError("--to: the way between two images takes no --text, --texts or --mask")
        if self.invert and (self.mask or self.text or self.texts or self.start > 1 or any(self.eta)):
            raise UserError("--invert: goes with --image alone or --image and --to, and with --eta 0")


def open_image(path, size=0):
    """uint8 tensor (1, H, W, 3) of an image file, if `size` is given its central square brought to that."""
    image = torch.tensor(decode_image(Path(path).read_bytes(), str(path)))[None]
    if not size:
        return image
    square = clip.resized(clip.as_float(image), min(image.shape[1:3]))  # (1, 3, S, S) in [0, 1]
    if square.shape[2] < size:
        raise UserError(f"{path}: {image.shape[2]}x{image.shape[1]} pixels, smaller than the {size} needed; enlarge it")
    return as_bytes(media.resize(square * 2 - 1, size, "area"))


def slerp(one, other, share):
    """From `one` to `other` along a great circle: spherical interpolation (Shoemake 1985) of (…, D) at share (N, 1)."""
    angle = torch.acos(F.cosine_similarity(one, other, dim=-1).clamp(-1, 1))[..., None]
    if (angle.abs() < 1e-4).all():
        return one + share * (other - one)
    return (torch.sin((1 - share) * angle) * one + torch.sin(share * angle) * other) / torch.sin(angle)


def plan_pictures(asked, device):
    """(stages, CLIP, texts, function of the prior, pictures (1, 3, H, H) in [-1, 1] by name), all of it checked.

    Pictures: "image" and "to" as the CLIP takes them, "low_res", "known" and "mask", "start" and "end" for --invert.
    """
    stages = load_cascade(asked, device)
    first, last = stages[0], stages[-1]
    if not (spec := asked.clip or first.clip):
        raise UserError(f"{first.path}: which CLIP it was trained on is not known; name it with --clip")
    encoder = clip.load(spec, device)
    if encoder.embed_width != first.unet.embed_width:
        raise UserError(f"--clip {spec}: embeddings {encoder.embed_width} wide, the decoder's are "
                        f"{first.unet.embed_width}")
    for stage in stages:
        if stage.cfg.text_encodings == "clip" and encoder.encoding_width != stage.unet.encoding_in.in_features:
            raise UserError(f"--clip {spec}: text encodings {encoder.encoding_width} wide, those of {stage.path} "
                            f"{stage.unet.encoding_in.in_features}")
    texts = asked.text if asked.text.strip() else Path(asked.texts).read_text(errors="replace") if asked.texts else ""
    texts = [text.strip() for text in texts.splitlines() if text.strip()]
    if asked.texts and not texts:
        raise UserError(f"{asked.texts}: no text in it")
    found = {name: pixels(open_image(path)) for name, path in (("image", asked.image or asked.low_res),
                                                               ("to", asked.to)) if path}
    if asked.low_res:
        found["low_res"] = pixels(open_image(asked.low_res, first.cfg.low_res_size))
    if asked.mask:
        image, mask = open_image(asked.image), open_image(asked.mask)
        if image.shape != mask.shape:
            raise UserError(f"--mask {asked.mask}: {mask.shape[2]}x{mask.shape[1]} pixels, but --image has "
                            f"{image.shape[2]}x{image.shape[1]}; make them equal")
        found["known"] = pixels(open_image(asked.image, last.cfg.image_size))
        found["mask"] = (pixels(open_image(asked.mask, last.cfg.image_size))[:, :1] < 0).float()  # black is kept
    if asked.invert:
        found |= {name: pixels(open_image(path, first.cfg.image_size))
                  for name, path in (("start", asked.image), ("end", asked.to)) if path}
    imagine = load_imagination(asked, encoder, device) if texts else None
    return stages, encoder, texts, imagine, {name: value.to(device) for name, value in found.items()}


@torch.no_grad()
def sample(asked):
    device = dist.setup(asked.device)
    stages, encoder, texts, imagine, found = dist.on_each(lambda: plan_pictures(asked, device))

    # Embeddings, for texts by the prior, for images by the CLIP. Rows (text, number) are dealt to the ranks.
    rows = [(t, k) for t in range(len(texts) or 1) for k in range(asked.num)]
    mine = range(dist.rank(), len(rows), dist.world_size())
    share = torch.linspace(0, 1, asked.num, device=device)[:, None]  # of the way from --image to --to
    if texts:
        needed = sorted({rows[row][0] for row in mine})
        wanted = [texts[t] for t in needed]
        embeddings = dict(zip(needed, imagine(wanted, asked.num, wanted) if needed else []))
    else:
        ends = [encoder.embed_image((found[name] + 1) / 2).float() for name in ("image", "to") if name in found]
        embeddings = {0: slerp(*ends, share) if asked.to else ends[0].expand(asked.num, -1)}
    if asked.invert:  # the noise of each picture, or on the way between two
        noises = []
        for name, embed in zip(("start", "end"), ends if asked.to else ends[:1]):
            condition = conditioning({"image_embed": embed, "caption": [""]}, stages[0].cfg, encoder)
            noises.append(diffusion.invert(denoiser(stages[0].unet, condition), found[name], stages[0].unet.alpha,
                                           stages[0].unet.sigma, asked.steps[0]).flatten(1))
        size = stages[0].cfg.image_size
        starts = (slerp(*noises, share) if asked.to else noises[0].expand(asked.num, -1)).unflatten(1, (3, size, size))

    # Pictures. Each has its own noise, so it is the same in any batch and on any rank; between two images all share it.
    drawn = {}
    for at in range(0, len(mine), asked.max_batch):
        part = mine[at:at + asked.max_batch]
        pairs = [rows[row] for row in part]
        batch = {"image_embed": torch.stack([embeddings[t][k] for t, k in pairs]),
                 "caption": [texts[t] if texts else "" for t, _ in pairs]}
        seeds = [accumulate.number(asked.seed, "picture", texts[t] if texts else "", 0 if asked.to else k)
                 for t, k in pairs]
        low_res, known = (found[name].expand(len(part), -1, -1, -1) if name in found else None
                          for name in ("low_res", "known"))
        x_t = torch.stack([starts[k] for _, k in pairs]) if asked.invert else None
        out = draw_cascade(stages, batch, encoder, asked, diffusion.noise_source(seeds, device), low_res, known,
                           found.get("mask"), asked.resample, x_t)
        drawn |= dict(zip(part, as_bytes(out.float()).cpu().numpy()))
    together = {row: picture for part in dist.gather(drawn) for row, picture in part.items()}
    if dist.is_main():
        write_pictures(asked, [together[row] for row in range(len(rows))],
                       [texts[t] if texts else f"{k / max(1, asked.num - 1):.2f}" if asked.to else ""
                        for t, k in rows])


def write_pictures(asked, pictures, captions):
    """The grid, a row for each text or, of one alone, rows of eight, and, if asked for, each picture on its own."""
    columns = asked.num if len(pictures) > asked.num else min(asked.num, 8)
    with checkpoint.replacing(asked.out) as file:
        media.write_png(file, media.captioned_grid(np.stack(pictures), captions, columns))
    print(f"wrote {asked.out}: {len(pictures)} pictures of {pictures[0].shape[1]}x{pictures[0].shape[0]}")
    if asked.pictures:
        for i, picture in enumerate(pictures):
            with checkpoint.replacing(Path(asked.pictures) / f"{i // asked.num:04d}_{i % asked.num:04d}.png") as file:
                media.write_png(file, picture)
        print(f"wrote {asked.pictures}/TEXT_NUMBER.png, one each")


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.dispatch(COMMANDS, __doc__, "train", PRESETS, STAGES)


if __name__ == "__main__":
    config.run(main)
