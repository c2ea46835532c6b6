"""Train a cascade of pixel-diffusion U-Nets: CLIP image embedding -> picture (DALL-E 2, Ramesh et al. 2022, §2.1).

    torchrun --nproc_per_node=2 train_decoder.py                           # both stages, on shapes that it draws itself
    torchrun --nproc_per_node=2 train_decoder.py --stage upsample --data tars --run_dir runs/mine   # one, on yours
    python train_decoder.py evaluate --prior runs/prior
    python train_decoder.py sample --text "a large green triangle at the top left" --num_samples 8 --out grid.png
    python train_decoder.py sample --image a.png [--to b.png | --mask hole.png --text TEXT] --out grid.png

The same command again resumes. Each stage is a run of its own, RUN/base and RUN/upsample, and a cascade is a list of
such folders. `python train_decoder.py [train|evaluate|sample] --help` lists the settings.

What differs from the papers:
- Text enters by a frozen CLIP, as in Karlo. GLIDE trains a text transformer with its U-Net.
- The base learns by rectified flow, SD3's density of timesteps and Muon; the upsampler predicts x0.
  The presets have the papers' epsilon, AdamW, and learned variance. Sizes are for two cores.
- An upsampler's input is blurred or noised. For 256 -> 1024, DALL-E 2 degrades it by BSR.
- A norm of a narrow layer has fewer than 32 groups, so that each has four channels or more.
- Sampling takes evenly spaced steps, which DALL-E 2 has tuned, and clips estimates of x0.
- Off by default, not in the papers: --dream, --loss_weight, --low_res_noise, LoRA.
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: a thread that waits soon leaves its core to others

import dataclasses
import itertools
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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
    ema,
    images,
    lora,
    media,
    optim,
    schedule,
    synthetic,
    tracker,
)
from common.config import Count, Natural, NonNegative, Positive, Share, UserError
from common.nn import Attention, NullText, TimeEmbedding, zeroed

Fours = Annotated[int, ("a multiple of 4, for the group norms", lambda width: width > 0 and width % 4 == 0)]

# Config

@dataclass(frozen=True)
class Config(diffusion.Training):
    """The defaults are rectified flow as of SD3 (Esser et al. 2024): DALL-E 2's epsilon takes far more steps."""
    # Run and data
    stage: Literal["all", "base", "upsample"] = "all"  # which stage to train; all: each in turn
    run_dir: str = "runs/decoder"  # folder of the runs: the stage's own is RUN/STAGE; started again, it resumes
    data: str = "shapes"  # img2dataset tars, a folder of images with .txt beside them, or "shapes": built in
    embeddings: str = ""  # folder of img_emb_N.npy, by default those in or beside the tars, else by CLIP on the fly
    index_width: Count = 4  # digits at the end of a key that number its row in img_emb_N.npy
    shards: str = ""  # numbers of the tars to use, such as 0-99,120; by default all
    clip: str = "auto"  # CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: DATA/clip.json's
    resize: Literal[media.RESIZE_MODES] = "box"  # how pictures are made smaller
    crop_scale: Annotated[Share, ("above 0", bool)] = 1.0  # random square crops of at least this share of the area
    flip: bool = False  # mirror half of the pictures; not for captions that tell left from right
    # Model
    image_size: Count = 16  # width and height of the pictures of this stage
    low_res_size: Natural = 0  # of the pictures it starts from, those of the stage before; 0 for none
    width: Fours = 32  # channels of the first level
    mults: tuple[Count, ...] = (1, 2, 4)  # channels of each level, in widths; between two levels the size is halved
    blocks: Count = 1  # residual blocks a level on the way down, one more on the way up
    attention_levels: tuple[Natural, ...] = (1, 2)  # levels with attention, 0 the finest; and between down and up
    head_width: Count = 32  # width of a head of attention
    cond_width: Count = 64  # width of the conditioning tokens
    scale_shift: bool = True  # time scales and shifts a norm; off: it is added (Karlo's upsampler)
    dropout: Share = 0.0  # before the second convolution of a block
    image_condition: bool = True  # condition on the image embedding
    text_encodings: Literal["none", "clip"] = "none"  # condition on the tokens of the caption, by CLIP
    max_text_len: Count = 77  # text encodings: longer texts are cut, shorter ones padded
    # Diffusion
    objective: Literal["x0", "v", "epsilon", "flow"] = "flow"  # what it predicts
    timestep_density: Literal["uniform", "logit_normal", "mode"] = "logit_normal"  # in training
    learned_variance: bool = False  # also learn the variance of DDPM's steps (Nichol & Dhariwal 2021)
    image_drop: Share = 0.1  # probability of training a sample without its image embedding, for guidance
    text_drop: Share = 0.5  # probability of training a sample without its text
    low_res_noise: Share = 0.0  # most noise added to the low-resolution picture, in shares of the timesteps (Imagen)
    low_res_blur: Share = 0.5  # probability of blurring it
    random_crop: Natural = 0  # train on random crops of this size, 0 for whole pictures
    # Optimization
    steps: Count = 900  # optimizer steps
    lr: Positive = 2e-3  # peak learning rate
    # Evaluation and saving; both happen at the first log line at or after they are due
    eval_steps: Count = 25  # sampling steps of its pictures

    def __post_init__(self):
        super().__post_init__()
        levels, divisor = len(self.mults), 2 ** max(0, len(self.mults) - 1)
        for holds, message in (
                (levels, "--mults: expected at least one level"),
                (all(level < levels for level in self.attention_levels),
                 f"--attention_levels: {self.attention_levels} are not all below {levels}, the number of levels"),
                (self.image_size % divisor == 0 == self.random_crop % divisor,
                 f"--image_size, --random_crop: expected multiples of {divisor}, as {levels} levels need"),
                (self.low_res_size < self.image_size >= self.random_crop,
                 f"--image_size {self.image_size}: --low_res_size must be smaller, and --random_crop no larger")):
            if not holds:
                raise UserError(message)
        config.refuse_unused(self, (
            *((name, self.low_res_size, "a --low_res_size, as upsamplers have")
              for name in ("low_res_noise", "low_res_blur", "random_crop")),
            *((name, self.text_encodings != "none", "--text_encodings clip") for name in ("text_drop", "max_text_len")),
            ("raw_embeddings", self.image_condition or self.text_encodings != "none",
             "--image_condition or --text_encodings clip, whose embeddings it is about"),
            ("text_encodings", self.attention_levels, "--attention_levels, as blocks there attend to the text"),
            ("learned_variance", self.timestep_density == "uniform" and self.objective != "flow",
             "--timestep_density uniform, as the bound is a sum over all timesteps, and another objective than flow")))
        diffusion.check_sampling(self, self.guidance_scale, self.eval_steps)
        tracker.check(self)


# What is different by default for a stage, and named settings for all of it.
STAGES = {
    "base": dict(optimizer="muon"),  # in equal time a fifth less loss than with the papers' Adam
    # An upsampler has no attention, and no condition but its low resolution (DALL-E 2 §2.1).
    "upsample": dict(image_size=32, low_res_size=16, mults=(1, 2), attention_levels=(),
                     image_condition=False, random_crop=16,
                     objective="x0", timestep_density="uniform",  # flow leaves grain
                     steps=800, eval_every=400, eval_steps=10),
}
# What DALL-E 2's Table 3 has in common for its decoder and upsamplers.
DALLE2 = dict(objective="epsilon", timestep_density="uniform", optimizer="adamw",
              betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=10_000, cosine=False,
              precision="bf16", validation=0.005, test=0.005, log_every=100, eval_every=10_000,
              save_every=2_000, eval_samples=2048, workers=8)
DALLE2_64 = dict(DALLE2, stage="base", clip="open_clip:ViT-L-14/openai", text_encodings="clip",
                 image_size=64, mults=(1, 2, 3, 4), blocks=3, head_width=64,
                 attention_levels=(1, 2, 3), dropout=0.1, learned_variance=True, eta=1.0,
                 crop_scale=0.75,
                 batch_size=2048, chunk_size=64, lr=1.2e-4, steps=800_000, eval_steps=250,
                 guidance_scale=2.0)
DALLE2_256 = dict(DALLE2, stage="upsample", image_size=256, low_res_size=64, width=320,
                  mults=(1, 2, 3, 4), blocks=3, attention_levels=(), image_condition=False,
                  dropout=0.1, random_crop=64, batch_size=1024,
                  chunk_size=64, lr=1.2e-4, steps=1_000_000, eval_steps=27)
PRESETS = {
    "dalle2-64": dict(DALLE2_64, width=512, cond_width=2048),
    "dalle2-256": DALLE2_256,
    "dalle2-1024": dict(DALLE2_256, image_size=1024, low_res_size=256, width=192,
                        mults=(1, 1, 2, 2, 4, 4), blocks=2, dropout=0.0, noise_schedule="linear",
                        random_crop=256, batch_size=512, lr=1e-4, eval_steps=15),
    # The sizes of Karlo's published config. How it was trained is not public: the rest is DALL-E 2's.
    "karlo-64": dict(DALLE2_64, raw_embeddings=True, width=320, cond_width=1536, eval_steps=25,
                     guidance_scale=8.0),
    "karlo-256": dict(DALLE2_256, scale_shift=False, eta=1.0, eval_steps=7),
}

# What makes a model: --init_from takes it from the file. What is TAKEN comes from there as well,
# unless it is given.
TAKEN = ("lr", "optimizer", "timestep_density", "random_crop", "guidance_scale", "eta",
         "eval_steps")
MODEL = ("stage", "image_size", "low_res_size", "width", "mults", "blocks", "attention_levels",
         "head_width", "cond_width", "scale_shift", "image_condition", "text_encodings",
         "max_text_len", "raw_embeddings", "objective", "noise_schedule", "timesteps",
         "learned_variance", "low_res_noise")
# What must not change when a run goes on; all else may.
FIXED = (*config.FIXED, *MODEL, "random_crop", "crop_scale", "flip", "resize", "lora_rank")
LAST_STEP = "last_step.pt"  # in a run folder: the model of sampling's last step, if it is another
IMAGE_TOKENS = 4  # "four extra tokens of context" (DALL-E 2 §2.1)
VLB_WEIGHT = 1e-3  # of the variational bound in the loss, λ of Nichol & Dhariwal 2021, §3.1
MOST_CHUNK = 64  # samples in one forward pass, at most, where --chunk_size is 0
BLUR_SIGMA = (0.4, 0.8)  # range of the blur's sigma in pixels of the low resolution


# Model

def group_norm(width):
    """ADM's norm of 32 groups; of fewer in narrow layers, so that each has four channels or more."""
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if width % g == 0 and width >= 4 * g)
    return nn.GroupNorm(groups, width)


class Block(nn.Module):
    """ADM's residual block, and attention if wanted (Dhariwal & Nichol 2021, §3 and §4.1).

    Norm, SiLU, convolution, twice. `resample` halves or doubles the picture before the first
    convolution, on both paths (BigGAN, Brock et al. 2018). The embedding of timestep and condition
    scales and shifts the second norm. The pixels attend to each other and, before them, to the
    conditioning tokens (GLIDE, Nichol et al. 2021, §2.3).
    """

    def __init__(self, cfg, width_in, width, token_width, attends=False, resample=None):
        super().__init__()
        self.checkpointing = cfg.checkpointing
        self.scale_shift = cfg.scale_shift
        self.resample = resample or nn.Identity()
        self.norm1 = group_norm(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.modulation = nn.Linear(4 * cfg.width, 2 * width if cfg.scale_shift else width)
        self.norm2 = group_norm(width)
        self.dropout = nn.Dropout(cfg.dropout)
        self.conv2 = zeroed(nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()
        self.attends = attends
        if attends:
            most = max(1, width // cfg.head_width)
            heads = max(heads for heads in range(1, most + 1) if width % heads == 0)
            self.attention_norm = group_norm(width)
            self.attention = Attention(width, heads)
            zeroed(self.attention.out)
            if token_width:
                self.token_key_value = nn.Linear(token_width, 2 * width)

    def forward(self, *inputs):
        if self.checkpointing and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.compute, *inputs, use_reentrant=False)
        return self.compute(*inputs)

    def compute(self, x, hidden, tokens, is_key):
        """x (B, W_in, H, H), hidden (B, 4W), tokens (B, J, E) or None, is_key (B, J) or None: all.

        Returns (B, W, H, H), or half or twice of H.
        """
        h = self.resample(F.silu(self.norm1(x)))
        h = self.conv1(h)  # (B, W, H, H)
        modulation = self.modulation(F.silu(hidden))[:, :, None, None]
        if self.scale_shift:
            scale, shift = modulation.chunk(2, dim=1)  # (B, W, 1, 1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + modulation)
        h = self.conv2(self.dropout(F.silu(h)))
        x = self.skip(self.resample(x)) + h
        return x + self.attend(x, tokens, is_key) if self.attends else x

    def attend(self, x, tokens, is_key):
        """What the pixels of x (B, W, H, H) get by attention, of its shape."""
        h = self.attention_norm(x).flatten(2).transpose(1, 2)  # (B, H², W)
        keys, values = self.attention.keys_values(h)  # (B, heads, H², d)
        mask = None
        if tokens is not None:
            extra = self.token_key_value(tokens).unflatten(-1, (2 * self.attention.heads, -1))
            extra_keys, extra_values = extra.transpose(1, 2).chunk(2, dim=1)  # (B, heads, J, d)
            keys = torch.cat([extra_keys, keys], dim=2)
            values = torch.cat([extra_values, values], dim=2)
        if is_key is not None:
            mask = F.pad(is_key, (0, h.shape[1]), value=True)[:, None, None]  # (B, 1, 1, J + H²)
        h = self.attention(h, keys, values, mask)
        return h.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """The denoiser of one stage: DALL-E 2's decoder (§2.1), in ADM's and GLIDE's form.

    B batch, W width, H image size, D width of the CLIP's embeddings, E of the conditioning tokens,
    J their number. The image embedding is added to the timestep's, and becomes four tokens. The
    text's embedding is added to the timestep's as well, and its encodings are more tokens.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        super().__init__()
        self.cfg = cfg
        self.widths = [embed_width, encoding_width]
        self.last_step_unet = None  # another one for the last step of sampling, as Karlo's upsampler has
        hidden = 4 * cfg.width
        conditioned = cfg.attention_levels and (cfg.image_condition or encoding_width)
        token_width = cfg.cond_width if conditioned else 0
        self.time_in = TimeEmbedding(cfg.width, hidden, cfg.timesteps)
        if cfg.low_res_size and cfg.low_res_noise:
            self.low_res_level_in = TimeEmbedding(cfg.width, hidden, cfg.timesteps)
        if cfg.image_condition:
            self.null_image = nn.Parameter(torch.randn(embed_width))
            self.image_in = nn.Linear(embed_width, hidden)
            if token_width:
                self.image_tokens_in = nn.Linear(embed_width, IMAGE_TOKENS * token_width)
        if encoding_width:
            self.null_text = NullText(embed_width, encoding_width, cfg.max_text_len)
            self.text_in = nn.Linear(embed_width, hidden)
            self.encoding_in = nn.Linear(encoding_width, cfg.cond_width)
            self.encoding_norm = nn.LayerNorm(cfg.cond_width)

        level_widths = [cfg.width * mult for mult in cfg.mults]  # the finest first
        last = len(level_widths) - 1
        width = cfg.width
        skips = [width]
        self.stem = nn.Conv2d(6 if cfg.low_res_size else 3, width, 3, padding=1)
        self.downs = nn.ModuleList()
        for level, width_out in enumerate(level_widths):
            for _ in range(cfg.blocks):
                attends = level in cfg.attention_levels
                self.downs.append(Block(cfg, width, width_out, token_width, attends))
                width = width_out
                skips.append(width)
            if level < last:
                half = nn.AvgPool2d(2)
                self.downs.append(Block(cfg, width, width, token_width, resample=half))
                skips.append(width)
        self.middle = nn.ModuleList([
            Block(cfg, width, width, token_width, bool(cfg.attention_levels)),
            Block(cfg, width, width, token_width)])
        self.ups = nn.ModuleList()
        for level in reversed(range(last + 1)):
            for _ in range(cfg.blocks + 1):
                width_in = width + skips.pop()
                width = level_widths[level]
                attends = level in cfg.attention_levels
                self.ups.append(Block(cfg, width_in, width, token_width, attends))
            if level:
                double = nn.Upsample(scale_factor=2)
                self.ups.append(Block(cfg, width, width, token_width, resample=double))
        channels = 6 if cfg.learned_variance else 3
        self.out = nn.Sequential(
            group_norm(width), nn.SiLU(), zeroed(nn.Conv2d(width, channels, 3, padding=1)))
        schedule_name = "flow" if cfg.objective == "flow" else cfg.noise_schedule
        alpha, sigma = diffusion.levels(schedule_name, cfg.timesteps)
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("sigma", sigma, persistent=False)
        self.to(memory_format=torch.channels_last)

    def scaled(self, embed):
        """Embeddings (B, D) as a CLIP gives them -> of length √D, unless the model is of raw ones."""
        if self.cfg.raw_embeddings:
            return embed
        return F.normalize(embed.float(), dim=-1) * embed.shape[-1] ** 0.5

    def condition(self, condition, drop_image, drop_text):
        """(embedding (B, 4W) to add to the timestep's, tokens (B, J, E), which of them are keys (B, J)).

        None for no tokens, and if all are keys. Without the image and the text where drops (B,) are
        true; an image embedding of zeros is "no image", too.
        """
        embedding = 0.0
        tokens = []
        is_key = None
        if self.cfg.image_condition:
            embed = condition["image_embed"]  # (B, D)
            drop_image = drop_image | ~embed.any(-1)
            embed = torch.where(drop_image[:, None], self.null_image, self.scaled(embed))
            embedding = self.image_in(embed)
            if self.cfg.attention_levels:
                image_tokens = self.image_tokens_in(embed).unflatten(-1, (IMAGE_TOKENS, -1))
                tokens.append(image_tokens)  # (B, 4, E)
        if self.cfg.text_encodings != "none":
            condition = self.null_text(condition, drop_text)
            embedding = embedding + self.text_in(self.scaled(condition["text_embed"]))
            encodings = self.encoding_in(condition["text_enc"])
            is_key = condition["text_mask"]
            if tokens:
                is_key = F.pad(is_key, (IMAGE_TOKENS, 0), value=True)
            tokens.append(self.encoding_norm(encodings))  # (B, L, E)
        return embedding, torch.cat(tokens, dim=1) if tokens else None, is_key

    def forward(self, x_t, timestep, condition, drop_image, drop_text, low_res=None, low_res_level=None):
        """The prediction (B, 3 or 6, H, H) for x_t (B, 3, H, H) at `timestep` (B,).

        condition: as of `conditioning`; low_res: the low-resolution picture, brought to H, with the level (B,) of the
        noise added to it.
        """
        embedding, tokens, is_key = self.condition(condition, drop_image, drop_text)
        hidden = self.time_in(timestep) + embedding  # (B, 4W)
        if low_res_level is not None:
            hidden = hidden + self.low_res_level_in(low_res_level)
        x = x_t if low_res is None else torch.cat([x_t, low_res], dim=1)  # (B, 3 or 6, H, H)
        x = self.stem(x.contiguous(memory_format=torch.channels_last))  # (B, W, H, H)
        skips = [x]
        for block in self.downs:
            x = block(x, hidden, tokens, is_key)  # (B, mult·W, H, H); half of H after each level
            skips.append(x)
        for block in self.middle:
            x = block(x, hidden, tokens, is_key)
        for block in self.ups:
            if not isinstance(block.resample, nn.Upsample):
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, hidden, tokens, is_key)  # (B, mult·W, H, H); twice H after each level
        return self.out(x)  # (B, 3 or 6, H, H)


@torch.no_grad()
def conditioning(batch, cfg, encoder):
    """{"image_embed" (B, D), "text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)}.

    The image embeddings are the batch's, or the CLIP `encoder`'s of its "clip_image". Those of the
    text are the `encoder`'s.
    """
    condition = {}
    if cfg.image_condition:
        condition["image_embed"] = batch.get("image_embed")
        if "clip_image" in batch:
            with amp.autocast(batch["clip_image"].device, "fp32"):
                condition["image_embed"] = encoder.embed_image(batch["clip_image"])
    if cfg.text_encodings == "clip":
        condition |= encoder.text_condition(batch["caption"], cfg.max_text_len)
    return condition


# Loss

def diffusion_loss(unet, batch, condition, plain=False):
    """Mean loss over a chunk: one pass of the model.

    plain: without loss weights and DREAM, as in evaluation, so that it compares across settings.
    """
    cfg = unet.cfg
    x0 = media.pixels(batch["image"])
    size = len(x0)
    device = x0.device
    low_res = low_res_level = None
    if cfg.low_res_size:
        # What the stage before draws is not perfect: blur and noise of a known level (DALL-E 2 §2.1, Imagen §2.4).
        low_res = media.resize(x0, cfg.low_res_size, cfg.resize)
        blur_sigma = torch.empty(size, device=device).uniform_(*BLUR_SIGMA)
        is_blurred = torch.rand(size, device=device) < cfg.low_res_blur
        blurred = media.blurred(low_res, blur_sigma)
        low_res = torch.where(is_blurred[:, None, None, None], blurred, low_res)
        low_res = media.resize(low_res, cfg.image_size, "bicubic")
        if cfg.random_crop:
            corners = torch.randint(cfg.image_size - cfg.random_crop + 1, (size, 2), device=device)
            x0 = media.cropped(x0, cfg.random_crop, corners)
            low_res = media.cropped(low_res, cfg.random_crop, corners)
        noise_level = torch.rand(size, device=device) * cfg.low_res_noise
        low_res_draw = torch.randn_like(low_res)
        low_res, low_res_level = noised_low_res(unet, low_res, noise_level, low_res_draw)
    timestep = diffusion.draw_timesteps(cfg.timestep_density, (size,), cfg.timesteps, device,
                                        cfg.density_mean, cfg.density_std)
    noise = torch.randn_like(x0)
    drop_image = torch.rand(size, device=device) < cfg.image_drop
    drop_text = torch.rand(size, device=device) < cfg.text_drop
    inputs = timestep, condition, drop_image, drop_text, low_res, low_res_level
    alpha = diffusion.at(unet.alpha, timestep, x0)
    sigma = diffusion.at(unet.sigma, timestep, x0)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)
    if cfg.dream and not plain:
        with torch.no_grad():
            predicted = unet(x_t, *inputs)[:, :3].float()
        # torch keeps weights that were cast without gradients for the pass that needs them
        torch.clear_autocast_cache()
        x_t, target = diffusion.dream(x_t, noise, predicted, sigma)
    out = unet(x_t, *inputs).float()
    prediction = out[:, :3]
    loss = F.mse_loss(prediction, target, reduction="none")
    if not plain:
        loss = loss * diffusion.loss_weight(
            cfg.loss_weight, cfg.objective, alpha, sigma, cfg.loss_gamma)
    if not cfg.learned_variance:
        return loss.mean()
    fraction = (out[:, 3:] + 1) / 2
    estimate = diffusion.to_x0(cfg.objective, prediction.detach(), x_t, alpha, sigma).clamp(-1, 1)
    bound = diffusion.variational_bound(x0, timestep, estimate, fraction, unet.alpha, unet.sigma)
    return loss.mean() + VLB_WEIGHT * cfg.timesteps * bound.mean()  # the bound is a sum over the timesteps


def noised_low_res(unet, low_res, noise_level, noise):
    """(low_res with noise added, its timestep (B,)); `noise_level` (B,) in shares of the timesteps."""
    if not unet.cfg.low_res_noise:
        return low_res, None
    level = (noise_level * (unet.cfg.timesteps - 1)).round().long()
    alpha = diffusion.at(unet.alpha, level, low_res)
    sigma = diffusion.at(unet.sigma, level, low_res)
    return alpha * low_res + sigma * noise, level


# Sampling

@torch.no_grad()
def sample_pictures(unet, condition, size, steps, guidance_scale=1.0, eta=0.0, noise=torch.randn_like, low_res=None,
                    low_res_noise=0.0, known=None, mask=None, resample=1):
    """`size` pictures (B, 3, H, H) in [-1, 1] for a `conditioning` of as many.

    low_res: pictures (B, 3, h, h) of the stage before. low_res_noise: the level of the noise that is
    added to them, in shares of the timesteps. known, mask: pictures of which the pixels where mask
    (B or 1, 1, H, H) is 1 are kept (RePaint, with `resample` rounds a step). Guidance runs every
    sample a second time, without image and text; the noised input is the same for both.
    """
    cfg = unet.cfg
    device = unet.alpha.device
    copies = 2 if guidance_scale != 1 and condition else 1
    level = None
    if low_res is not None:
        low_res = media.resize(low_res, cfg.image_size, "bicubic")
        noise_level = torch.full((size,), low_res_noise, device=device)
        low_res, level = noised_low_res(unet, low_res, noise_level, noise(low_res))
        low_res = low_res.repeat(copies, 1, 1, 1)
        level = None if level is None else level.repeat(copies)
    condition = {name: torch.cat([value] * copies) for name, value in condition.items()}
    drop = torch.arange(copies * size, device=device) >= size

    def denoise(x_t, timestep):
        is_last = timestep[0] == 0 and unet.last_step_unet is not None
        model = unet.last_step_unet if is_last else unet
        x_in = x_t.repeat(copies, 1, 1, 1)
        out = model(x_in, timestep.repeat(copies), condition, drop, drop, low_res, level).float()
        prediction = out[:size, :3]
        if copies == 2:
            prediction = diffusion.guide(prediction, out[size:, :3], guidance_scale)
        alpha = diffusion.at(unet.alpha, timestep, x_t)
        sigma = diffusion.at(unet.sigma, timestep, x_t)
        x0 = diffusion.to_x0(cfg.objective, prediction, x_t, alpha, sigma).clamp(-1, 1)
        return (x0, (out[:size, 3:] + 1) / 2) if cfg.learned_variance else x0

    x_t = noise(torch.empty(size, 3, cfg.image_size, cfg.image_size, device=device))
    return diffusion.sample(denoise, x_t, unet.alpha, unet.sigma, steps, eta, noise, known, mask, resample).clamp(-1, 1)


@torch.no_grad()
def draw_cascade(unets, batch, encoder, noise, low_res=None, known=None, mask=None, resample=1,
                 low_res_noise=0.0):
    """Pictures (B, 3, H, H) of the last of `unets` for the `batch`'s embeddings and captions, sampled as each cfg says.

    low_res: what the first starts from, if it is no base, (B or 1, 3, h, h). known, mask: (1, 3, H, H) and (1, 1, H, H)
    at the last stage's size, which are brought to each stage's. low_res_noise: of every upsampler, as
    in `sample_pictures`.
    """
    size = len(batch["caption"])
    low_res = low_res if low_res is None else low_res.expand(size, -1, -1, -1)
    for unet in unets:
        cfg, keep, hole = unet.cfg, known, mask
        if known is not None:
            keep = media.resize(known, cfg.image_size, "box").expand(size, -1, -1, -1)
            hole = (media.resize(mask, cfg.image_size, "box") > 0.999).float()  # known: all of it is known
        with amp.autocast(unet.alpha.device, cfg.precision):
            low_res = sample_pictures(unet, conditioning(batch, cfg, encoder), size, cfg.eval_steps, cfg.guidance_scale,
                                      cfg.eta, noise, low_res, low_res_noise, keep, hole, resample)
    return low_res


# Evaluation

def frechet_distance(features, others):
    """Fréchet distance of Gaussians that fit features (N, D) and (M, D): |m₁-m₂|² + tr(C₁ + C₂ - 2(C₁C₂)^½).

    Heusel et al. 2017, Eq. 6, here in the space of a CLIP.
    """
    mean1, mean2 = features.mean(0), others.mean(0)
    cov1, cov2 = ((x - x.mean(0)).T @ (x - x.mean(0)) / max(1, len(x) - 1) for x in (features, others))
    values, vectors = np.linalg.eigh(cov1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T  # (C₁C₂)^½ has the trace of (C₁^½ C₂ C₁^½)^½
    values = np.linalg.eigvalsh(root @ cov2 @ root)
    return float(((mean1 - mean2) ** 2).sum() + np.trace(cov1) + np.trace(cov2) - 2 * np.sqrt(values.clip(0)).sum())


class Evaluator:
    """What is measured on held-out pictures, of `parts` as of `data.parts`: the same, to rounding, on any ranks."""

    def __init__(self, cfg, parts, encoder, device):
        self.cfg, self.parts, self.encoder, self.device = cfg, parts, encoder, device

    def loss(self, unet, part):
        """Mean diffusion loss over a part, without loss weights."""
        def loss_of(batch):
            condition = conditioning(batch, self.cfg, self.encoder)
            return diffusion_loss(unet, batch, condition, plain=True)
        return diffusion.mean_loss(unet, loss_of, *self.parts[part], self.cfg, self.device)

    @torch.no_grad()
    def scores(self, unets, part, file="", imagine=None):
        """(scores, captions) of what the cascade `unets` draws for the part's rows, beside the real pictures.

        A cascade without its base starts from real low-resolution pictures. imagine: as of `load_prior`, if the image
        embeddings are not the real ones. file: PNG for rank 0's first eight, real above drawn, with these captions.
        """
        cfg, (source, rows), grid = self.cfg, self.parts[part], None
        modes = [unet.training for unet in unets]
        for unet in unets:
            unet.eval()
        built_in = isinstance(source, images.Shapes) and cfg.image_size % 16 == 0
        low_res_size = unets[0].cfg.low_res_size
        names = [*synthetic.ATTRIBUTES]
        # rows, CLIP scores, rows with all that is named; by attribute: how often it is right, and named
        totals = {kind: np.zeros(3 + 2 * len(names)) for kind in ("drawn", "real")}
        embeds = {kind: [] for kind in totals}
        for _, batch in data.batches(source, rows, cfg.eval_samples, cfg.chunk_size):
            batch, keys = data.to_device(batch, self.device), batch["rows"].tolist()
            noise = diffusion.noise_source([accumulate.number(cfg.seed, "picture", key) for key in keys], self.device)
            low_res = media.resize(media.pixels(batch["image"]), low_res_size, cfg.resize) if low_res_size else None
            with amp.autocast(self.device, cfg.precision):
                if imagine:
                    batch["image_embed"] = imagine(batch["caption"], 1, keys)[:, 0]
                    batch.pop("clip_image", None)
                drawn = media.as_bytes(draw_cascade(unets, batch, self.encoder, noise, low_res).float())
            pictures = {"drawn": drawn, "real": media.resize_bytes(batch["image"], drawn.shape[1], cfg.resize)}
            grid = grid or (*(pictures[kind][:8].cpu().numpy() for kind in ("real", "drawn")), batch["caption"][:8])
            for kind, total in totals.items():
                total[0] += len(drawn)
                if self.encoder:
                    embed = self.encoder.embed_image(pictures[kind])  # (B, D)
                    text, _, _ = self.encoder.embed_text(self.encoder.tokenize(batch["caption"]).to(self.device))
                    total[1] += 100 * F.cosine_similarity(embed, text).clamp(min=0).sum().item()
                    embeds[kind].append(F.normalize(embed, dim=-1).double().cpu().numpy())
                if built_in:
                    features, records = synthetic.picture_features(pictures[kind].cpu().numpy()), source.records(keys)
                    right = synthetic.picture_judge().attributes(features) == synthetic.values(records)
                    named = synthetic.named(records)  # (B, attributes)
                    total[2:] += [(right | ~named).all(1).sum(), *(right & named).sum(0), *named.sum(0)]
        (count, score, right, *by_name), (_, real_score, real_right, *_) = (dist.total(total.tolist())
                                                                            for total in totals.values())
        for unet, mode in zip(unets, modes):
            unet.train(mode)
        result = {}
        if self.encoder:
            features = ([x for rank in dist.gather(found) for x in rank] for found in embeds.values())
            result |= {"clip_score": score / count, "clip_score_real": real_score / count,
                       "frechet_distance": frechet_distance(*map(np.concatenate, features))}
        if built_in:
            result |= {"caption_accuracy": right / count, "caption_accuracy_ceiling": real_right / count}
            result |= {f"accuracy_{name}": good / max(1, all_named)
                       for name, good, all_named in zip(names, by_name, by_name[len(names):])}
        if not (file and dist.is_main()):
            return result, ""
        real, drawn, captions = grid
        sheet = media.captioned_grid(np.concatenate([real, drawn]), [*captions, *[""] * len(drawn)], len(real))
        with checkpoint.replacing(file) as picture:
            media.write_png(picture, sheet)
        return result, " | ".join(captions)


# Training

def open_data(cfg, device):
    """({part: (source, rows)} as of `data.parts`, CLIP or None, facts about both for the files of models).

    The CLIP is needed for evaluation, and to embed images or text that have no embeddings yet.
    """
    spec, fingerprint = data.clip_of(cfg.embeddings or cfg.data, cfg.init_from)
    spec = spec if cfg.clip == "auto" else cfg.clip
    encoder = clip.load(spec, device, fingerprint) if spec or cfg.text_encodings == "clip" else None
    sources = []
    for path in filter(None, (cfg.data, cfg.val_data)):
        note = Path(path, "clip.json")
        if note.is_file() and "made_from" in config.read_json(note):  # as clip.builtin_data writes it
            config.refuse_unused(cfg, [(name, False, "pictures of your own, not built-in shapes")
                                       for name in ("flip", "crop_scale", "shards", "embeddings")])
            source = images.Shapes(path, cfg.image_size)
        else:  # where the embeddings of --data lie does not hold for --val_data
            embeddings, shards = (cfg.embeddings, cfg.shards) if path == cfg.data else ("", "")
            source = images.Pictures(path, cfg.image_size, embeddings, cfg.index_width, shards,
                                     crop_scale=cfg.crop_scale, flip=cfg.flip, resize=cfg.resize)
            if source.width is None and encoder is None and cfg.image_condition:
                raise UserError(f"{path}: no embeddings in or beside it, so a CLIP must make them; name it with --clip")
            source.clip_size = encoder.image_size if source.width is None and cfg.image_condition else 0
        if encoder:
            clip.check_widths(encoder, f"--clip {spec} for {path}", source.width)
        if cfg.image_condition:
            data.check_lengths(cfg, source, path)
        sources.append(source)
    # The widths of the embeddings and text encodings that condition the model, 0 for none.
    embed_width = encoding_width = 0
    if cfg.image_condition:
        embed_width = sources[0].width or encoder.embed_width
    if cfg.text_encodings == "clip":
        embed_width = encoder.embed_width
        encoding_width = encoder.encoding_width
    facts = {"widths": [embed_width, encoding_width], "clip": spec,
             "clip_fingerprint": encoder and encoder.fingerprint()}
    return data.parts(sources[0], cfg, sources[1] if cfg.val_data else None), encoder, facts


def prepare(cfg, run, device):
    """What rank 0 does before anyone trains: make the built-in data, check everything, hold the run folder.

    Returns (config with `data` as a path, checkpoint to resume from or None, results of a run that is finished or
    None, messages).
    """
    cfg = checkpoint.with_chunk_size(tracker.prepare(cfg), MOST_CHUNK)
    if cfg.data == "shapes":
        cfg = dataclasses.replace(cfg, data=clip.builtin_data(run.folder.parent.parent, device))
    parts, encoder, _ = open_data(cfg, device)
    source, _ = parts["train"]
    bad, read, names = source.check()
    notes = run.open(cfg.resume)  # which may move an earlier run aside, so all is checked before
    notes += dict.fromkeys(opened.left_out for opened, _ in parts.values())
    if bad:
        notes.append(f"{bad} of {read} pictures looked at cannot be used; others take their place: {', '.join(names)}")
    resume_from, finished, more = run.resume_point(cfg, checkpoint.identity(cfg, FIXED, source, encoder))
    return cfg, resume_from, finished, notes + more


def check_cascade(cfgs):
    """UserError unless each stage starts from pictures of the size that the one before it makes."""
    for below, above in itertools.pairwise(cfgs):
        if below.image_size != above.low_res_size:
            raise UserError(f"stage {above.stage} starts from pictures of {above.low_res_size} pixels (0: none), but "
                            f"{below.stage} before it makes {below.image_size}; order --run_dir, or train each --stage")


def train(cfgs):
    first, device = cfgs[0], dist.setup(cfgs[0].device, cfgs[0].timeout_minutes)
    dist.on_main(lambda: (check_cascade(cfgs), tracker.check_stages(cfgs)))
    for cfg in cfgs:
        train_stage(cfg, device)
    if len(cfgs) > 1:  # the stages together, from real image embeddings to pictures
        args = EvaluateConfig(run_dir=(first.run_dir,), seed=first.seed, device=first.device,
                              eval_samples=2 * first.eval_samples, grid=f"{first.run_dir}/cascade.png",
                              out=f"{first.run_dir}/cascade.json")
        tracker.announce(f"The stages together, on {args.part} pictures ({args.grid}):", evaluate_cascade(args, device))
    if dist.is_main():
        run, prior = f"{first.run_dir}/{first.stage}", Path(SampleConfig.prior, "model.pt")
        spec = not first.low_res_size and checkpoint.load(f"{run}/model.pt")["clip"]
        command = f"evaluate --run_dir {shlex.quote(first.run_dir if len(cfgs) > 1 else run)} --grid grid.png"
        if spec and prior.is_file() and checkpoint.load(prior).get("clip") == spec:
            command += f" --prior {SampleConfig.prior}"  # from captions
        print(f"\nNext: python train_decoder.py {command}", flush=True)


def train_stage(cfg, device):
    # Let rank 0 hold the run folder, make data and check all there is to check.
    started, given = time.monotonic(), cfg
    cfg = dataclasses.replace(cfg, run_dir=str(Path(cfg.run_dir) / cfg.stage))
    run = checkpoint.Run(cfg.run_dir)
    cfg, resume_from, finished, notes = dist.on_main(lambda: prepare(cfg, run, device))
    if finished:
        tracker.resend(cfg, run)
        headline = f"{cfg.run_dir} is finished, at step {finished['step']}; to train on, give more --steps."
        tracker.announce(headline, finished)
        return

    # Make the model and what trains it, or take them up where they were.
    parts, encoder, facts = open_data(cfg, device)
    source, rows = parts["train"]
    identity = checkpoint.identity(cfg, FIXED, source, encoder)
    accumulate.seed(cfg.seed, "weights")
    facts = {"kind": "decoder", **facts, "metadata": tracker.metadata(cfg)}
    unet = trained = UNet(cfg, *facts["widths"]).to(device)
    if cfg.text_encodings == "clip":
        unet.null_text.fill(encoder.text_condition([""], cfg.max_text_len))
    if cfg.lora_rank:
        trained, facts["lora"] = lora.start(unet, cfg)
    optimizers = optim.make(trained, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    average = ema.EMA(trained, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    state = checkpoint.State(cfg, {"model": trained}, average, optimizers, scaler, identity, facts)
    if resume_from:
        notes += state.restore(resume_from)
    elif cfg.init_from and not cfg.lora_rank:
        state.start_from(cfg.init_from, cfg.init_strict)
    dist.check_in_step({**state.modules, "unet": unet}, state.step)
    if cfg.compile:
        unet.compile()

    # Ask for the data in the order that seed and step give.
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, state.step)
    batches = data.loader(data.Chunks(source, rows, cfg.seed), spans, cfg.workers, device.type == "cuda")
    evaluator = Evaluator(cfg, parts, encoder, device)

    # Say what is to come, and where the figures go.
    if dist.is_main():
        settings = {**config.as_json(given), "chunk_size": cfg.chunk_size}
        checkpoint.write_json({**settings, "versions": state.versions}, run.folder / "config.json")
    log = tracker.Tracker(run, state, len(rows))
    size = f"{sum(p.numel() for p in trained.parameters()):,} parameters{' of adapters' * bool(cfg.lora_rank)}"
    size = f"{cfg.stage}: {size}, {len(source):,} pictures of {cfg.image_size}x{cfg.image_size}"
    size += f", {accumulate.described(cfg)}, {dist.world_size()} rank(s) on {device.type}"
    for note in filter(None, [size, *notes]):
        log.say(note)

    # After a signal the meter saves and ends the run. The log hears how it ended.
    with log, dist.stop_signals, tracker.Meter(log, state, cfg.stage) as meter:
        unet.train()
        stepped = True
        while True:
            dist.stop_signals.check()

            # Log; evaluate and save when they are due. Here ranks and GPUs are waited for.
            if meter.line_due():
                loss = meter.line()
                eval_due, save_due = meter.due()
                if eval_due:
                    begun = time.monotonic()
                    figures = {}
                    samples = {}
                    losses = {"val_loss_online": evaluator.loss(unet, "validation")}
                    with average.applied(trained):
                        losses["val_loss"] = evaluator.loss(unet, "validation")
                        if state.step < cfg.steps:  # else the test is next
                            file = f"samples/step_{state.step:08d}.png"
                            figures, captions = evaluator.scores(
                                [unet], "validation", run.folder / file)
                            samples = {file: captions}
                    seconds = time.monotonic() - begun
                    log.log(state.step, samples, **losses, **figures, evaluation_s=seconds)
                    log.evaluated(state.step, {"loss": loss, **losses}, figures)
                    meter.check_finite(losses.values(), state.step + 1)
                    best = run.save_best(state, losses["val_loss"], log)
                    save_due = save_due or (best and log.copies_best_checkpoint)
                    log.report()
                if save_due:
                    run.commit(state, log)
                meter.restart()
            if state.step >= cfg.steps:
                break

            # Take one optimizer step.
            schedule.set_learning_rate(optimizers, schedule.of_config(state.step, cfg))
            if stepped:  # else fp16 overflowed: try the same samples again, at a lower scale
                chunks = [next(batches) for _ in plan]
            step_loss = torch.zeros((), device=device)
            for chunk, batch in zip(plan, chunks):
                accumulate.seed(cfg.seed, state.step, chunk.index)
                batch = data.to_device(batch, device)
                condition = conditioning(batch, cfg, encoder)
                with amp.autocast(device, cfg.precision):
                    loss = diffusion_loss(unet, batch, condition)
                scaler.scale(loss * chunk.weight).backward()
                step_loss += loss.detach() * (chunk.stop - chunk.start)
            dist.sum_gradients(trained)
            norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
            unet.zero_grad(set_to_none=True)
            if not stepped:
                meter.overflows += 1
                continue
            state.step += 1
            average.update(state.step)
            meter.add(step_loss, norm, chunks)
        meter.bar.close()

        # Test the averaged weights, and save them last of all.
        with average.applied(trained):
            figures, captions = evaluator.scores([unet], "test", run.folder / "samples/test.png")
            figures = {"loss": evaluator.loss(unet, "test"), **figures}
        results = {f"test_{name}": value for name, value in figures.items()}
        log.log(state.step, {"samples/test.png": captions}, **results)
        results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
        if dist.is_main():
            run.finish(state, results)
        log.report()
    dist.gather(None)  # rank 0 has written model.pt, which the next stage or the evaluation of both reads
    tracker.announce(f"Trained {cfg.run_dir}; this start took {time.monotonic() - started:.0f} s. Pictures: "
                     f"{cfg.run_dir}/samples", results)


# Commands

@dataclass(frozen=True)
class CascadeConfig(diffusion.Inference):
    # The model
    run_dir: tuple[str, ...] = ("runs/decoder",)  # folder of the runs, or the run folders of the stages, in order
    # Of each stage; the last value counts for all that follow, none: that of its training
    steps: tuple[Count, ...] = ()  # sampling steps
    guidance_scale: tuple[NonNegative, ...] = ()  # 1 for none
    eta: tuple[Share, ...] = ()  # 1 as DDPM, 0 for DDIM
    # Of all stages
    low_res_noise: Share = 0.0  # noise on what an upsampler starts from, in shares of the timesteps
    clip: str = ""  # CLIP of texts and images, by default that of the training
    prior_guidance: float = -1.0  # guidance scale of the prior; below 0: that of its training

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise UserError("--run_dir: expected at least one folder")


def load_unet(path, device, weights="ema", lora_scale=1.0):
    """(U-Net in eval mode, the file's contents) of a model.pt or checkpoint, LoRA adapters merged in."""
    cfg, state = lora.read_model("decoder", Config, path, weights, lora_scale)
    with checkpoint.reading(path):
        return checkpoint.build(lambda: UNet(cfg, *state["widths"]), state, path, device), state


def load_cascade(args, device):
    """([U-Net in eval mode], spec of the CLIP or None, its fingerprint) of the stages of --run_dir, which fit."""
    runs, unets, states = [], [], []
    for run in args.run_dir:  # a run, or RUN with RUN/base and so on
        runs += [Path(run, stage) for stage in STAGES if Path(run, stage).is_dir()] or [Path(run)]
    for i, run in enumerate(runs):
        unet, state = load_unet(run / args.model, device, args.weights, args.lora_scale)
        if (run / LAST_STEP).is_file():
            unet.last_step_unet, _ = load_unet(run / LAST_STEP, device)
        settings = {"eval_steps": args.steps, "eta": args.eta,
                    "guidance_scale": args.guidance_scale}
        given = {name: values[:i + 1][-1] for name, values in settings.items() if values}
        unet.cfg = dataclasses.replace(unet.cfg, **given)
        if unet.cfg.low_res_size and args.low_res_noise > unet.cfg.low_res_noise:
            raise UserError(f"--low_res_noise {args.low_res_noise}: {run} is trained with at most "
                            f"{unet.cfg.low_res_noise}")
        unets.append(unet)
        states.append(state)
    check_cascade([unet.cfg for unet in unets])
    if args.low_res_noise and not any(unet.cfg.low_res_size for unet in unets):
        raise UserError(f"--low_res_noise {args.low_res_noise}: no stage here is an upsampler")
    return unets, args.clip or states[0]["clip"], states[0]["clip_fingerprint"]


def load_prior(args, encoder, raw_embeddings, device):
    """The function (texts, num, keys) -> image embeddings (texts, num, D) by args.prior; `keys` make the seeds."""
    import train_prior  # the one place where a script needs another
    file = Path(args.prior) / "model.pt" if Path(args.prior).is_dir() else Path(args.prior)
    if not file.is_file():
        raise UserError(f"--prior {args.prior}: there is no prior's model.pt; train one (torchrun --nproc_per_node=2 "
                        "train_prior.py), or name its run folder")
    prior, state = train_prior.load_prior(file, device)
    clip.check_widths(encoder, f"--prior {file}", *state["widths"])
    if raw_embeddings and not prior.cfg.raw_embeddings:
        raise UserError(
            f"--prior {file}: makes embeddings of unit length, but the decoder is one of "
            "--raw_embeddings; take a prior of raw ones")
    guidance_scale = prior.cfg.guidance_scale if args.prior_guidance < 0 else args.prior_guidance
    diffusion.check_sampling(prior.cfg, guidance_scale)
    steps = max(prior.cfg.eval_timesteps)

    def embeddings_of(texts, num, keys):
        condition = train_prior.conditioning({"caption": texts}, prior.cfg, encoder)
        embeddings, _ = train_prior.best_embeddings(
            prior, condition, keys, num, steps, guidance_scale, prior.cfg.eta, best_of=2,
            seed=args.seed)
        return embeddings
    return embeddings_of


@dataclass(frozen=True)
class EvaluateConfig(CascadeConfig):
    # What to evaluate
    prior: str = ""  # prior that makes the embeddings from captions: run folder or model.pt; by default they are real
    data: str = ""  # pictures to evaluate on, by default those that the last stage was trained on
    part: Literal["train", "validation", "test"] = "test"  # which of them
    eval_samples: Natural = 512  # most pictures to take, 0 for all
    grid: str = ""  # PNG file for the first eight, real above drawn
    out: str = ""  # JSON file to write the figures to

    def __post_init__(self):
        super().__post_init__()
        config.refuse_unused(self, [("prior_guidance", self.prior, "--prior")])


def plan_evaluation(args, device):
    """(U-Nets, Evaluator, function of the prior or None) for `args`, all of it checked."""
    unets, spec, fingerprint = load_cascade(args, device)
    cfg = dataclasses.replace(unets[-1].cfg, eval_samples=args.eval_samples, seed=args.seed, crop_scale=1.0, flip=False,
                              clip=spec or "auto", batch_size=1,
                              image_condition=any(unet.cfg.image_condition for unet in unets))
    if cfg.data == "shapes" and not args.data:  # which training replaces by a path
        raise UserError(f"{args.run_dir[-1]}: its data are not known; name some with --data")
    if args.data:  # where the embeddings of the training data lie does not hold for these
        cfg = dataclasses.replace(cfg, data=args.data, val_data="", embeddings="", shards="")
    parts, encoder, facts = open_data(cfg, device)
    for unet in unets:
        if unet.widths[0] and unet.widths[0] != facts["widths"][0]:
            raise UserError(f"{cfg.data}: embeddings {facts['widths'][0]} wide, the decoder's are {unet.widths[0]}")
    imagine = None
    if args.prior:
        encoder = encoder or clip.load(spec, device, fingerprint)
        imagine = load_prior(args, encoder, is_raw(unets), device)
    return unets, Evaluator(cfg, parts, encoder, device), imagine


def is_raw(unets):
    """Whether one of the cascade takes image embeddings as a CLIP gives them, not of unit length."""
    return any(unet.cfg.raw_embeddings and unet.cfg.image_condition for unet in unets)


def evaluate_cascade(args, device):
    """Scores of the pictures that a cascade makes for held-out rows; rank 0 writes them and a grid, if wanted."""
    unets, evaluator, imagine = dist.on_each(lambda: plan_evaluation(args, device))
    scores, _ = evaluator.scores(unets, args.part, args.grid, imagine)
    if dist.is_main() and args.out:
        checkpoint.write_json(scores, args.out)
    return scores


def evaluate(args):
    scores = evaluate_cascade(args, dist.setup(args.device))
    if dist.is_main():
        lines = tracker.table(scores) or ["no scores: they need a CLIP, which --clip names"]
        print("\n".join([*lines, *(f"wrote {path}" for path in (args.grid, args.out) if path)]))


@dataclass(frozen=True)
class SampleConfig(CascadeConfig):
    # What to draw
    text: str = ""  # a caption; without a text and an image: nothing in particular
    texts: str = ""  # or a file with one caption a line
    image: str = ""  # or an image: draw variations of it (or of --text within it, with --mask)
    to: str = ""  # a second image: draw what lies between the two (DALL-E 2 §3.2)
    mask: str = ""  # an image of the shape of --image, black where it is to be kept, white where to be drawn anew
    low_res: str = ""  # an image to enlarge, for a --run_dir that begins with an upsampler
    num_samples: Count = 8  # pictures a caption or image, or on the way from one image to the other
    prior: str = "runs/prior"  # the prior, which makes image embeddings of texts: run folder or model.pt
    resample: Count = 5  # with --mask: rounds a step, so that what is drawn fits what is kept (RePaint)
    max_batch: Count = 64  # most pictures computed at once
    out: str = "grid.png"  # PNG with all pictures and their captions
    pictures: str = ""  # folder for a PNG of each, TEXT_NUMBER.png

    def __post_init__(self):
        super().__post_init__()
        config.check_suffixes(self, out=".png")
        varied = not (self.text or self.texts)
        config.refuse_unused(self, (
            ("prior_guidance", not varied, "a text, of which the prior makes embeddings"),
            ("texts", not self.text, "no --text beside it"), ("to", self.image, "--image"),
            ("mask", self.image, "--image"),
            ("image", varied or self.mask, "--mask, which says where to draw the text, or no text")))


def open_image(path, size=0):
    """float (1, 3, H, W) in [-1, 1] of an image file, if `size` is given its central square brought to that."""
    image = media.pixels(torch.tensor(images.decode_image(Path(path).read_bytes(), str(path)))[None])
    side = min(image.shape[2:])
    if size > side:
        raise UserError(f"{path}: {image.shape[3]}x{image.shape[2]} pixels, smaller than the {size} needed; enlarge it")
    top, left = ((length - side) // 2 for length in image.shape[2:])
    return media.resize(image[:, :, top:top + side, left:left + side], size, "box") if size else image


def slerp(start, end, share):
    """From `start` to `end` (…, D) along a great circle at share (N, 1): spherical interpolation (Shoemake 1985)."""
    angle = torch.acos(F.cosine_similarity(start, end, dim=-1).clamp(-1, 1)).clamp(min=1e-4)[..., None]
    return (torch.sin((1 - share) * angle) * start + torch.sin(share * angle) * end) / torch.sin(angle)


def plan_pictures(args, device):
    """(U-Nets, CLIP, texts, embeddings (texts or 1, num, D), (low_res, known, mask)) for `args`, all of it checked."""
    (unets, spec, fingerprint), encoder = load_cascade(args, device), None
    if any(sum(unet.widths) for unet in unets):  # an upsampler alone needs no CLIP
        encoder = clip.load(spec, device, fingerprint)
        for unet in unets:
            clip.check_widths(encoder, f"--clip {spec}", *unet.widths)
    texts = config.lines_of(args.texts) if args.texts else list(filter(None, [args.text.strip()]))
    if bool(args.low_res) != bool(unets[0].cfg.low_res_size):
        raise UserError(f"--low_res: an upsampler, and no other stage, starts from an image; {args.run_dir[0]} begins "
                        f"with stage {unets[0].cfg.stage}")
    low_res = open_image(args.low_res, unets[0].cfg.low_res_size).to(device) if args.low_res else None
    known = mask = None
    if args.mask:
        known, mask = (open_image(path, unets[-1].cfg.image_size).to(device) for path in (args.image, args.mask))
        mask = (mask[:, :1] < 0).float()  # black is kept
    image = args.image or args.low_res
    if not (texts or image):
        for unet in unets:
            diffusion.check_sampling(unet.cfg, guidance_scale=0)
    by_image = any(unet.cfg.image_condition for unet in unets)
    embeddings = torch.zeros(1, args.num_samples, encoder.embed_width if encoder else 1, device=device)  # "no image"
    embeddings = embeddings.expand(max(1, len(texts)), -1, -1)
    if by_image and texts:
        embeddings_of = load_prior(args, encoder, is_raw(unets), device)
        embeddings = embeddings_of(texts, args.num_samples, texts)
    elif by_image and image:
        with torch.no_grad():
            ends = [encoder.embed_image(((open_image(path) + 1) / 2).to(device)).float()
                    for path in filter(None, (image, args.to))]
        share = torch.linspace(0, 1, args.num_samples, device=device)[:, None]  # of the way from --image to --to
        embeddings = (slerp(*ends, share) if args.to else ends[0].expand(args.num_samples, -1))[None]
    return unets, encoder, texts or [""], embeddings, (low_res, known, mask)


def sample(args):
    device = dist.setup(args.device)
    unets, encoder, texts, embeddings, inputs = dist.on_each(lambda: plan_pictures(args, device))
    rows = [(text, k) for text in texts for k in range(args.num_samples)]  # dealt to the ranks
    # Each has its own noise, so it is the same in any batch and on any rank; between two images all share it.
    fields = {"image_embed": embeddings.flatten(0, 1), "caption": [text for text, _ in rows],
              "seeds": [accumulate.number(args.seed, "picture", text, 0 if args.to else k) for text, k in rows]}
    mine, drawn = {name: values[dist.rank()::dist.world_size()] for name, values in fields.items()}, []
    for batch in accumulate.split(mine, args.max_batch):
        noise = diffusion.noise_source(batch["seeds"], device)
        out = draw_cascade(unets, batch, encoder, noise, *inputs, args.resample, args.low_res_noise)
        drawn += [*media.as_bytes(out.float()).cpu().numpy()]
    parts = dist.gather(drawn)
    if dist.is_main():
        drawn = [parts[row % len(parts)][row // len(parts)] for row in range(len(rows))]
        captions = [f"{k / max(1, args.num_samples - 1):.2f}" if args.to else text for text, k in rows]
        columns = args.num_samples if len(texts) > 1 else min(args.num_samples, 8)
        grid = media.captioned_grid(np.stack(drawn), captions, columns)
        files = {args.out: grid}
        if args.pictures:
            files |= {f"{args.pictures}/{row // args.num_samples:04d}_{row % args.num_samples:04d}.png": picture
                      for row, picture in enumerate(drawn)}
        for path, picture in files.items():
            with checkpoint.replacing(path) as file:
                media.write_png(file, picture)
        print(f"wrote {args.out}: {len(rows)} pictures of {drawn[0].shape[1]}x{drawn[0].shape[0]}"
              + f", and each to {args.pictures}/TEXT_NUMBER.png" * bool(args.pictures))


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.run(COMMANDS, __doc__, "train", PRESETS, STAGES,
               model=lambda path: checkpoint.settings_in(path, MODEL, TAKEN))


if __name__ == "__main__":
    main()
