"""Train a diffusion prior: CLIP text embedding -> CLIP image embedding (DALL-E 2, Ramesh et al. 2022, §2.2).

    torchrun --nproc_per_node=2 train_prior.py                              # on captioned shapes that it makes itself
    torchrun --nproc_per_node=8 -- train_prior.py --data emb --run runs/emb --preset vit-l-14   # on your embeddings
    python train_prior.py --init_from runs/prior/model.pt --lora_rank 8 --run runs/lora   # adapters alone, for --lora
    python train_prior.py evaluate --run runs/prior
    python train_prior.py sample --text "a small red star" --num 4 --out embeddings.npy

The same command again resumes. `python train_prior.py [train|evaluate|sample] --help` lists the settings.
"""
import dataclasses
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import accumulate, amp, checkpoint, clip, config, data, diffusion, dist, lora, schedule, store, tracker
from common.config import UserError
from common.nn import TimeEmbedding, Transformer
from common.state import State, check_start, load_weights, resume_point
from common.store import Settings

# Config

@dataclass(frozen=True)
class Config(Settings):
    # Run and data
    run: str = "runs/prior"  # folder of this run: config, checkpoints, metrics; started again, it resumes
    data: str = "shapes"  # folder with img_emb/ and text_emb/ (and captions), or "shapes": the built-in data
    clip: str = "auto"  # CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: see DATA/clip.json
    validation: float = 0.1  # share of the rows held out for validation, chosen by row number
    test: float = 0.1  # share of the rows held out for the test at the end
    init_from: str = ""  # model.pt or checkpoint to take the weights of, nothing else: a file, URL or wandb:RUN/FILE
    init_strict: bool = True  # refuse weights that do not all fit, else take those that do
    # Model
    width: int = 192  # width of the transformer
    depth: int = 4  # blocks
    heads: int = 3  # attention heads
    kv_heads: int = 0  # heads of keys and values, 0 for as many as heads, 1 for multi-query attention
    ff_mult: float = 2.0  # hidden width of the feed-forward, in widths
    rotary: bool = True  # rotary position embedding
    qk_norm: bool = False  # cosine-similarity attention
    normformer: bool = False  # extra norms after attention and inside the feed-forward
    dropout: float = 0.0  # in attention and feed-forward
    time_embedding: Literal["continuous", "table"] = "continuous"  # how the timestep becomes tokens
    time_tokens: int = 1  # tokens for the timestep
    image_tokens: int = 1  # tokens for the noised image embedding
    text_tokens: int = 1  # tokens for the text embedding
    self_condition: bool = False  # feed the network's last estimate back in (Chen et al. 2022)
    text_encodings: Literal["none", "shards", "clip"] = "none"  # condition on tokens: of DATA/text_enc, or by CLIP
    max_text_len: int = 77  # text encodings: longer texts are cut, shorter ones padded with learned tokens
    # Diffusion
    objective: Literal["x0", "v", "epsilon", "flow"] = "x0"  # what the network predicts; flow has levels of its own
    noise_schedule: Literal["cosine", "linear", "quadratic", "sigmoid", "jsd"] = "cosine"  # levels of noise
    timesteps: int = 1000  # levels of noise
    loss: Literal["l2", "l1", "huber"] = "l2"  # distance between prediction and target
    min_snr_gamma: float = 0.0  # min-SNR loss weight (Hang et al. 2023), 0 for none
    p2_gamma: float = 0.0  # P2 loss weight (k + SNR)^-gamma (Choi et al. 2022), 0 for none
    p2_k: float = 1.0  # its k
    flow_weight: Literal["none", "sigma_sqrt", "cosmap"] = "none"  # loss weight of objective flow (SD3)
    timestep_density: Literal["uniform", "logit_normal", "mode"] = "uniform"  # timesteps in training (SD3 §3.1)
    density_mean: float = 0.0  # of logit_normal; above 0 for more noise
    density_std: float = 1.0  # of logit_normal
    mode_scale: float = 1.29  # of mode, -1 to 1.75; above 0 for more of the middle
    dream: bool = False  # train on the inputs its own error leads to (DREAM, Zhou et al. 2023); objective epsilon
    dream_power: float = 1.0  # of σ, the share of its error that is added
    noise_draws: int = 2  # (timestep, noise) draws a sample and step that share one pass over its text; 4 for encodings
    text_drop: float = 0.1  # probability of training a sample without its text, for guidance
    clamp_training: bool = False  # normalize the predicted embedding before the loss (objective x0)
    clamp_sampling: bool = False  # normalize the estimate at each sampling step (epsilon: always)
    clamp_final: bool = True  # normalize the sampled embedding
    # Low-rank adapters (LoRA), trained and saved alone, on the frozen weights of --init_from
    lora_rank: int = 0  # rank of the adapters, 0 for none: all weights are trained
    lora_alpha: float = 0.0  # the adapters are scaled by lora_alpha / lora_rank, 0 for lora_rank
    lora_targets: Literal["attention", "all"] = "attention"  # layers that get one: those of attention, or all
    lora_base: Literal["fp32", "bf16"] = "fp32"  # precision in which the frozen weights are kept; adapters are fp32
    # Optimization
    steps: int = 1200  # optimizer steps
    batch_size: int = 128  # samples a step, over all ranks
    chunk_size: int = 64  # samples in one forward pass; part of what defines a run
    lr: float = 2e-3  # peak learning rate
    warmup_steps: int = 50  # steps of linear warm-up
    cosine: bool = True  # after the warm-up, decay to 0 at `steps` along half a cosine, else stay constant
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, and AdamW for the rest
    weight_decay: float = 0.01  # decoupled, on matrices only; 0 makes AdamW Adam
    beta1: float = 0.9  # Adam's decay of the mean
    beta2: float = 0.99  # Adam's decay of the square
    eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 1.0  # gradients are clipped to this norm, 0 for not at all
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of matrix products, by autocast
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
    eval_every: int = 600  # steps between evaluations, 0 for none but the last
    eval_minutes: float = 0.0  # minutes between evaluations, besides, 0 for none
    eval_samples: int = 512  # most rows an evaluation takes, 0 for all
    eval_timesteps: tuple[int, ...] = (8, 64)  # sampling steps at which the cosine figures are taken
    eval_captions: int = 96  # captions of the built-in data to score, with 16 samples each
    guidance_scale: float = 1.0  # of the samples in evaluation, 1 for none
    eta: float = 1.0  # noise of sampling: 1 as DDPM, 0 for DDIM
    save_every: int = 200  # steps between checkpoints
    save_minutes: float = 0.0  # minutes between checkpoints, besides, 0 for none
    keep: int = 3  # newest checkpoints that are kept, 0 for all
    resume: Literal["auto", "never"] = "auto"  # never: an earlier run in the folder is moved aside
    # Machine
    seed: int = 0  # of everything random
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute
    compile: bool = False  # torch.compile the model
    workers: int = 0  # processes that read data ahead, a rank
    timeout_minutes: float = 30.0  # how long a rank waits for another before it gives up

    def __post_init__(self):
        positive = ("width", "depth", "heads", "time_tokens", "image_tokens", "text_tokens", "max_text_len",
                    "timesteps", "noise_draws", "steps", "batch_size", "chunk_size", "ema_update_every", "log_every",
                    "ff_mult", "lr", "timeout_minutes", "density_std", "p2_k")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in positive and value <= 0:
                raise UserError(f"--{field.name}: {value} is not above 0")
            signed = field.name in ("seed", "density_mean", "mode_scale")
            if not signed and isinstance(value, (int, float)) and value < 0:
                raise UserError(f"--{field.name}: {value} is below 0")
        if self.width % self.heads or (self.kv_heads and self.heads % self.kv_heads):
            raise UserError(f"--heads: width {self.width} must be a multiple of heads {self.heads}, and heads of "
                            f"kv_heads {self.kv_heads}")
        if self.rotary and self.width // self.heads % 2:
            raise UserError(f"--heads: rotary positions need an even width a head, not {self.width // self.heads}")
        if self.validation + self.test >= 1 or not self.validation or not self.test:
            raise UserError(f"--validation {self.validation} and --test {self.test}: expected two shares above 0 that "
                            "add up to less than 1")
        if wrong := [t for t in self.eval_timesteps or (0,) if not 1 <= t <= self.timesteps]:
            raise UserError(f"--eval_timesteps: {wrong[0]} is not within 1 and {self.timesteps}, the --timesteps")
        for name in ("beta1", "beta2", "dropout", "text_drop", "ema_decay", "ema_min_decay"):
            if getattr(self, name) > 1 or (name.startswith("beta") and getattr(self, name) == 1):
                raise UserError(f"--{name}: {getattr(self, name)} is above what a share may be")
        if self.clamp_training and self.objective != "x0":
            raise UserError("--clamp_training: only an embedding can be normalized; it needs --objective x0")
        lora.check(self)
        diffusion.check(self)
        store.check(self)


PRESETS = {  # DALL-E 2's Table 3 for the optimizer; the size at which priors over ViT-L/14 are trained in public
    "vit-l-14": dict(clip="open_clip:ViT-L-14/openai", width=768, depth=12, heads=12, ff_mult=4.0,
                     text_encodings="clip", max_text_len=77, noise_draws=4, batch_size=4096, chunk_size=256,
                     steps=600_000, warmup_steps=10_000, lr=1.1e-4, beta2=0.96, weight_decay=0.06, precision="bf16",
                     validation=0.01, test=0.01, eval_every=10_000, save_every=2_000, log_every=100, workers=4),
}

# What must not change when a run goes on; all else may.
FIXED = ("width", "depth", "heads", "kv_heads", "ff_mult", "rotary", "qk_norm", "normformer", "time_embedding",
         "time_tokens", "image_tokens", "text_tokens", "self_condition", "text_encodings", "max_text_len", "objective",
         "noise_schedule", "timesteps", "noise_draws", "batch_size", "chunk_size", "seed", "validation", "test",
         "optimizer", "lora_rank", "lora_alpha", "lora_targets", "lora_base")

# Model

class Prior(nn.Module):
    """A causal transformer over [text encodings, text embedding | time, (last estimate,) noised embedding, query].

    The output at the learned query is the prediction. What stands before the bar does not depend on the noise: it is
    run once for all `noise_draws` of a sample in training, and once for all steps in sampling. D is the width of the
    embeddings, W of the transformer, L the text length, K the noise draws, P the tokens before the bar.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        super().__init__()
        self.cfg, self.embed_width = cfg, embed_width
        width = cfg.width
        self.text_in = nn.Linear(embed_width, width * cfg.text_tokens)
        self.image_in = nn.Linear(embed_width, width * cfg.image_tokens)
        self.estimate_in = nn.Linear(embed_width, width * cfg.image_tokens) if cfg.self_condition else None
        self.time_in = TimeEmbedding(width * cfg.time_tokens, cfg.timesteps, cfg.time_embedding)
        self.query_tokens = nn.Parameter(torch.randn(1, width) * 0.02)
        self.null_text_tokens = nn.Parameter(torch.randn(cfg.text_tokens, width) * 0.02)
        if cfg.text_encodings != "none":
            self.encoding_in = nn.Linear(encoding_width, width)
            self.padding_tokens = nn.Parameter(torch.randn(cfg.max_text_len, width) * 0.02)
            self.null_encoding_tokens = nn.Parameter(torch.randn(cfg.max_text_len, width) * 0.02)
        self.transformer = Transformer(width, cfg.depth, cfg.heads, cfg.kv_heads or None, True, cfg.rotary, cfg.qk_norm,
                                       cfg.normformer, cfg.dropout, cfg.ff_mult)
        self.out = nn.Linear(width, embed_width, bias=False)
        alpha, sigma = diffusion.tables(cfg.objective, cfg.noise_schedule, cfg.timesteps)
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("sigma", sigma, persistent=False)

    def text(self, condition, drop):
        """Tokens (B, P, W) of `condition`; those of the samples where `drop` (B,) is true say "no text"."""
        drop = drop[:, None, None]
        tokens = self.text_in(condition["text_embed"]).unflatten(-1, (self.cfg.text_tokens, self.cfg.width))
        tokens = torch.where(drop, self.null_text_tokens.to(tokens.dtype), tokens)
        if self.cfg.text_encodings == "none":
            return tokens
        encodings = self.encoding_in(condition["text_enc"])  # (B, L, W)
        encodings = torch.where(condition["text_mask"][..., None], encodings, self.padding_tokens.to(encodings.dtype))
        encodings = torch.where(drop, self.null_encoding_tokens.to(encodings.dtype), encodings)
        return torch.cat([encodings, tokens], dim=1)

    def noised(self, x_t, timestep, estimate):
        """Tokens (B, K, S, W) of the noised embeddings x_t (B, K, D) at `timestep` (B, K), without the query."""
        parts = [self.time_in(timestep.flatten()).unflatten(0, timestep.shape), self.image_in(x_t)]
        if self.cfg.self_condition:
            parts.insert(1, self.estimate_in(estimate))
        return torch.cat([part.unflatten(-1, (-1, self.cfg.width)) for part in parts], dim=2)

    def forward(self, x_t, timestep, estimate, condition, drop):
        """Predictions (B, K, D) for K noise draws a sample, from one pass over its text."""
        text, noised = self.text(condition, drop), self.noised(x_t, timestep, estimate)
        batch, draws, size, _ = noised.shape
        queries = self.query_tokens.to(text.dtype).expand(batch, draws, -1)
        tokens = torch.cat([text, noised.flatten(1, 2), queries], dim=1)
        if draws == 1:
            return self.out(self.transformer(tokens, keep=1))
        # Every draw sees the text and itself: token i of draw d sees token j if j comes no later and is text or of d.
        prefix, device = text.shape[1], tokens.device
        draw = torch.arange(draws, device=device)
        draw = torch.cat([torch.full((prefix,), -1, device=device), draw.repeat_interleave(size), draw])
        place = torch.cat([torch.arange(prefix, device=device),
                           torch.arange(prefix, prefix + size, device=device).repeat(draws),
                           torch.full((draws,), prefix + size, device=device)])
        mask = ((draw[:, None] == draw) | (draw == -1)) & (place[:, None] >= place)
        return self.out(self.transformer(tokens, mask, place, keep=draws))

    def remember(self, condition, drop):
        """Keys and values of the text, to be given to `denoise` at every step of sampling."""
        return self.transformer(self.text(condition, drop), keep=1, return_cache=True)[1]

    def denoise(self, x_t, timestep, estimate, memory):
        """The prediction (B, D) for x_t (B, D) at `timestep` (B,), given the text's `memory`."""
        tokens = self.noised(x_t[:, None], timestep[:, None], estimate[:, None])[:, 0]
        tokens = torch.cat([tokens, self.query_tokens.to(tokens.dtype).expand(len(tokens), -1, -1)], dim=1)
        return self.out(self.transformer(tokens, cache=memory, keep=1))[:, 0]

    def normalize(self, embedding):
        """Embeddings of length √D: the scale of unit noise."""
        return F.normalize(embedding.float(), dim=-1) * self.embed_width ** 0.5


def conditioning(batch, cfg, text_encoder):
    """{"text_embed" (B, D) of length √D, "text_enc" (B, L, E), "text_mask" (B, L)} as the model takes them.

    Text encodings come from the batch or, where cfg says so, from its captions by `text_encoder`, which then gives the
    text embeddings too. They are cut or padded to max_text_len.
    """
    embed = batch["text_embed"]
    if cfg.text_encodings == "clip":
        with torch.no_grad():
            tokens = text_encoder.tokenize(batch["caption"]).to(embed.device, non_blocking=True)
            embed, encodings, mask = text_encoder.embed_text(tokens)
    elif cfg.text_encodings == "shards":
        encodings = batch["text_enc"]
        mask = encodings.abs().amax(-1) > 0  # zero rows are padding
    condition = {"text_embed": F.normalize(embed.float(), dim=-1) * embed.shape[-1] ** 0.5}
    if cfg.text_encodings != "none":
        missing = cfg.max_text_len - encodings.shape[1]
        condition["text_enc"] = F.pad(encodings.float(), (0, 0, 0, missing))
        condition["text_mask"] = F.pad(mask, (0, missing))
    return condition


def diffusion_loss(model, prior, batch, condition):
    """Mean loss over a chunk: one pass of `model`, which is `prior` or its DDP wrapper."""
    cfg, draws = prior.cfg, prior.cfg.noise_draws
    x0 = prior.normalize(batch["image_embed"])[:, None].expand(-1, draws, -1)  # (B, K, D)
    timestep = diffusion.draw_timesteps(cfg.timestep_density, x0.shape[:2], cfg.timesteps, x0.device, cfg.density_mean,
                                        cfg.density_std, cfg.mode_scale)
    noise, drop = torch.randn_like(x0), torch.rand(len(x0), device=x0.device) < cfg.text_drop
    alpha, sigma = (diffusion.at(table, timestep, x0) for table in (prior.alpha, prior.sigma))
    x_t, estimate = diffusion.add_noise(x0, noise, alpha, sigma), torch.zeros_like(x0)
    if cfg.self_condition and random.random() < 0.5:
        with torch.no_grad():
            estimate = prior(x_t, timestep, estimate, condition, drop).float()
            estimate = diffusion.to_x0(cfg.objective, estimate, x_t, alpha, sigma)
        torch.clear_autocast_cache()  # older torch keeps weights cast without gradients for the pass that needs them
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)
    if cfg.dream:
        with torch.no_grad():
            predicted = prior(x_t, timestep, estimate, condition, drop).float()
        torch.clear_autocast_cache()
        x_t, target = diffusion.dream(x_t, noise, predicted, sigma, cfg.dream_power)
    prediction = model(x_t, timestep, estimate, condition, drop).float()
    if cfg.clamp_training:
        prediction = prior.normalize(prediction)
    loss = diffusion.distance(cfg.loss, prediction, target)
    return (loss * diffusion.loss_weight(cfg, alpha, sigma)).mean()


# Sampling

@torch.no_grad()
def sample_embeddings(prior, condition, steps, guidance_scale=1.0, eta=1.0, noise=torch.randn_like):
    """Image embeddings (B, D), of unit length unless clamp_final is off, for a `conditioning` of B texts.

    Guidance runs every text a second time, as "no text"; the noised input is the same for both. `noise(x)` draws.
    """
    cfg, size = prior.cfg, len(condition["text_embed"])
    if guided := guidance_scale != 1:
        condition = {name: torch.cat([value, value]) for name, value in condition.items()}
    memory = prior.remember(condition, torch.arange(len(condition["text_embed"]), device=prior.alpha.device) >= size)

    def denoise(x, timestep, before):
        if guided:
            both = prior.denoise(x.repeat(2, 1), timestep.repeat(2), before.repeat(2, 1), memory).float()
            prediction = diffusion.guide(both[:size], both[size:], guidance_scale)
        else:
            prediction = prior.denoise(x, timestep, before, memory).float()
        alpha, sigma = (diffusion.at(table, timestep, x) for table in (prior.alpha, prior.sigma))
        x0 = diffusion.to_x0(cfg.objective, prediction, x, alpha, sigma)
        # What noise stands for is divided by a tiny α at first: without bounds, an estimate of it runs away.
        return prior.normalize(x0) if cfg.clamp_sampling or cfg.objective == "epsilon" else x0

    x_t = noise(torch.empty(size, prior.embed_width, device=prior.alpha.device))
    x0 = diffusion.sample(denoise, x_t, prior.alpha, prior.sigma, steps, eta, noise)
    return F.normalize(x0, dim=-1) if cfg.clamp_final else x0 / prior.embed_width ** 0.5


# Evaluation

class Evaluator:
    """Everything that is measured on held-out rows; the same, to rounding, on any number of ranks."""

    def __init__(self, cfg, source, text_encoder, device):
        self.cfg, self.source, self.text_encoder, self.device = cfg, source, text_encoder, device
        self.world = World(source, cfg) if source.captions and source.captions.built_in() else None

    def chunks(self, part, unrelated=False):
        """This rank's (number, batch) of the part; `unrelated` adds the text of the row half a part further on."""
        split = data.Split(len(self.source), part, self.cfg.validation, self.cfg.test)
        rows = min(len(split), self.cfg.eval_samples or len(split))
        plan = range(dist.rank(), -(-rows // self.cfg.chunk_size), dist.world_size())
        reader = data.Chunks(self.source, split)
        for number in plan:
            span = number * self.cfg.chunk_size, min(rows, (number + 1) * self.cfg.chunk_size)
            batch = data.to_device(reader[span], self.device)
            if unrelated:
                other, good = self.source.fetch(split[(np.arange(*span) + rows // 2) % rows])
                other["text_embed"][~good] = 0  # an unusable row is similar to nothing
                batch["unrelated"] = other["text_embed"].to(self.device)
            yield number, batch

    @torch.no_grad()
    def loss(self, prior, part):
        """Mean diffusion loss over a part, with the same noise every time; leaves the model's mode as it was."""
        mode, total = prior.training, [0.0, 0]
        prior.eval()
        for number, batch in self.chunks(part):
            accumulate.seed(self.cfg.seed, "loss", number)
            with amp.autocast(self.device, self.cfg.precision):
                loss = diffusion_loss(prior, prior, batch, conditioning(batch, self.cfg, self.text_encoder))
            total = [total[0] + loss.item() * len(batch["rows"]), total[1] + len(batch["rows"])]
        prior.train(mode)
        loss_sum, count = dist.total(total)
        return loss_sum / count

    @torch.no_grad()
    def similarities(self, prior, part):
        """The cosine figures of embeddings sampled in each of eval_timesteps steps."""
        mode, steps = prior.training, self.cfg.eval_timesteps
        totals = np.zeros(2 + 3 * len(steps))
        prior.eval()
        for number, batch in self.chunks(part, unrelated=True):
            text, image, unrelated = batch["text_embed"], batch["image_embed"], batch["unrelated"]
            figures = [torch.ones(len(text)), F.cosine_similarity(text, image)]
            for t in steps:
                accumulate.seed(self.cfg.seed, "similarities", number, t)
                with amp.autocast(self.device, self.cfg.precision):
                    condition = conditioning(batch, self.cfg, self.text_encoder)
                    out = sample_embeddings(prior, condition, t, self.cfg.guidance_scale, self.cfg.eta)
                figures += [F.cosine_similarity(out, other) for other in (text, image, unrelated)]
            totals += [figure.sum().item() for figure in figures]
        prior.train(mode)
        count, baseline, *rest = dist.total(totals.tolist())
        result = {"baseline_similarity": baseline / count}
        for t, (text, image, unrelated) in zip(steps, np.reshape(rest, (-1, 3)) / count):
            result |= {f"similarity_with_text@{t}": text, f"similarity_with_image@{t}": image,
                       f"similarity_with_unrelated_text@{t}": unrelated,
                       f"difference_from_baseline@{t}": text - baseline / count}
        return {name: float(value) for name, value in result.items()}

    def figures(self, prior, part):
        """All figures that need sampling: similarities and, on the built-in data, whether captions are satisfied."""
        figures = self.similarities(prior, part)
        return figures | (self.world.scores(self, prior, part) if self.world and self.cfg.eval_captions else {})


class World:
    """What is known exactly of the built-in data: the attributes of every image and those its caption names."""

    SAMPLES = 16  # a caption

    def __init__(self, source, cfg):
        records = source.captions.records(range(len(source)))
        names = list(records[0]["attributes"])
        table = np.array([[record["attributes"][name] for name in names] for record in records])
        self.values = np.stack([np.unique(c, return_inverse=True)[1] for c in table.T], 1)  # (rows, attributes)
        self.named = np.array([[name in record["named"] for name in names] for record in records])
        self.rows = {part: (split := data.Split(len(source), part, cfg.validation, cfg.test))[np.arange(len(split))]
                     for part in ("train", "validation", "test")}
        self.trained = np.isin(np.arange(len(source)), self.rows["train"])  # (rows,)
        self.held_out = np.flatnonzero(~self.trained)
        self.neighbors = F.normalize(source.fetch(self.held_out)[0]["image_embed"], dim=-1)  # (held out, D)

    def scores(self, evaluator, prior, part):
        """caption_match and coverage of samples at the most of eval_timesteps, and their ceilings.

        caption_match: share of the embeddings whose nearest neighbor among held-out images has what the caption names.
        coverage: entropy of the attributes it leaves open, among the neighbors of a caption's samples, over the same
        among all images that fit the caption. The ceiling takes as many embeddings of fitting training images instead.
        """
        cfg, source, device = evaluator.cfg, evaluator.source, evaluator.device
        mode, totals = prior.training, np.zeros(6)  # samples, matches, real matches; entropy of samples, real, all
        prior.eval()
        captions, group = self.rows[part][:cfg.eval_captions], 16
        for number in range(dist.rank(), -(-len(captions) // group), dist.world_size()):
            rows = captions[number * group:(number + 1) * group]
            accumulate.seed(cfg.seed, "scores", number)
            fitting = [np.flatnonzero((self.values == self.values[row])[:, self.named[row]].all(1)) for row in rows]
            fitting = {row: fit for row, fit in zip(rows, fitting) if self.trained[fit].any()}
            if not fitting:
                continue
            rows = np.array(list(fitting))
            real = [np.random.choice(fit[self.trained[fit]], self.SAMPLES) for fit in fitting.values()]
            batch = data.to_device(source.fetch(np.repeat(rows, self.SAMPLES))[0], device)
            with amp.autocast(device, cfg.precision):
                condition = conditioning(batch, cfg, evaluator.text_encoder)
                out = sample_embeddings(prior, condition, max(cfg.eval_timesteps), cfg.guidance_scale, cfg.eta)
            for kind, embeddings in (("sampled", out.float().cpu()),
                                     ("real", source.fetch(np.concatenate(real))[0]["image_embed"])):
                nearest = self.values[self.held_out[(embeddings @ self.neighbors.T).argmax(1).numpy()]]
                nearest = nearest.reshape(len(rows), self.SAMPLES, -1)  # (captions, samples, attributes)
                for (row, fit), found in zip(fitting.items(), nearest):
                    named, kind_at = self.named[row], ("sampled", "real").index(kind)
                    totals[1 + kind_at] += (found == self.values[row])[:, named].all(1).sum()
                    totals[3 + kind_at] += sum(map(entropy, found[:, ~named].T))
                    if kind == "real":
                        totals[[0, 5]] += self.SAMPLES, sum(map(entropy, self.values[fit][:, ~named].T))
        prior.train(mode)
        count, match, real_match, spread, real_spread, whole = dist.total(totals.tolist())
        t, count, whole = max(cfg.eval_timesteps), count or 1.0, whole or 1.0
        return {f"caption_match@{t}": match / count, "caption_match_ceiling": real_match / count,
                f"coverage@{t}": spread / whole, "coverage_ceiling": real_spread / whole}


def entropy(values):
    """Entropy in nats of the distribution of the integers `values` (n,)."""
    share = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(share * np.log(share)).sum())


# Training

def open_data(cfg):
    """(source, text encoder or None, spec of the CLIP or None) for a config whose `data` is a folder."""
    spec = cfg.clip
    if spec == "auto":
        spec = config.read_json(noted).get("clip") if (noted := Path(cfg.data) / "clip.json").exists() else None
    source = data.Embeddings(cfg.data, cfg.text_encodings == "shards", captions=cfg.text_encodings == "clip")
    encoder = None
    if cfg.text_encodings == "clip":
        if spec is None:
            raise UserError("--text_encodings clip: which CLIP made the embeddings is not known; name it with --clip")
        encoder = clip.load(spec, "cpu")
        if encoder.embed_width != source.width:
            raise UserError(f"--clip {spec}: its embeddings are {encoder.embed_width} wide, those of {cfg.data} "
                            f"{source.width}")
    return source, encoder, spec


def encoding_width(cfg, source, encoder):
    """Width of the text encodings, 0 where there are none."""
    if cfg.text_encodings == "shards":
        return source.arrays["text_enc"][0].shape[2]
    return encoder.encoding_width if encoder else 0


def prepare(cfg, run, device):
    """What rank 0 does before anyone trains: hold the run folder, make the built-in data, check everything.

    Returns (the config with `data` as a folder, the checkpoint to resume from or None, the results of a run that is
    finished or None, messages).
    """
    cfg = check_start(cfg)
    opened = None if cfg.data == "shapes" else open_data(cfg)  # checked before an earlier run is moved aside
    moved = run.open(cfg.resume)
    notes = [f"the earlier run is now in {moved}"] if moved else []
    if cfg.data == "shapes":
        cfg = dataclasses.replace(cfg, data=clip.builtin_data(Path(cfg.run).parent, device))
    source, encoder, _ = opened or open_data(cfg)
    bad, read, names = source.check_rows()
    if bad:
        notes.append(f"{bad} of {read} rows looked at are not finite or all zero and are left out: {', '.join(names)}")
    train = len(data.Split(len(source), "train", cfg.validation, cfg.test))
    if train < cfg.batch_size:
        raise UserError(f"{cfg.data}: {train} training rows, fewer than --batch_size {cfg.batch_size}; lower it")
    for part in ("validation", "test"):
        if not len(data.Split(len(source), part, cfg.validation, cfg.test)):
            raise UserError(f"{cfg.data}: {len(source)} rows leave none for {part}; raise --{part}")
    resume_from, finished, more = resume_point(cfg, run, identity(cfg, source, encoder))
    return cfg, resume_from, finished, notes + more


def identity(cfg, source, encoder):
    """The facts by which a run is known again: what must not change while it goes on."""
    return {name: getattr(cfg, name) for name in FIXED} | lora.identity(cfg) | {
        f"data {k}": v for k, v in source.fingerprint().items()} | ({"clip": encoder.fingerprint()} if encoder else {})


def make(cfg, source, encoder, spec, device):
    """The State of a new run: of a prior or, with lora_rank, of adapters on the one of init_from."""
    accumulate.seed(cfg.seed, "weights")
    widths = [source.width, encoding_width(cfg, source, encoder)]
    prior, adapters, facts = Prior(cfg, *widths).to(device), None, {"kind": "prior", "widths": widths, "clip": spec}
    if cfg.lora_rank:
        adapters, facts["lora"] = lora.start(prior, cfg)
    return State(cfg, prior, device, identity(cfg, source, encoder), facts, adapters)


def update(state, model, encoder, plan, batch):
    """One optimizer step of `model`, the state's prior or its DDP wrapper, on this rank's chunks `batch`.

    Returns (this rank's loss summed over its samples, gradient norm, whether the step was taken).
    """
    cfg, step_loss = state.cfg, torch.zeros((), device=state.device)
    state.set_rate()
    for chunk, part in zip(plan, batch):
        accumulate.seed(cfg.seed, state.step, chunk.index)
        part = data.to_device(part, state.device)
        with dist.sync_if(model, chunk.last):
            with amp.autocast(state.device, cfg.precision):
                loss = diffusion_loss(model, state.model, part, conditioning(part, cfg, encoder))
            state.scaler.scale(loss * chunk.weight).backward()
        step_loss += loss.detach() * (chunk.stop - chunk.start)
    norms, taken = state.advance()
    return step_loss, norms.square().sum().sqrt(), taken


def train(cfg):
    # Join the other ranks; let rank 0 hold the run folder, make data and check all there is to check.
    started = time.monotonic()
    device = dist.setup(cfg.device, cfg.timeout_minutes)
    run, asked = checkpoint.Run(cfg.run), cfg
    cfg, resume_from, finished, notes = dist.on_main(lambda: prepare(cfg, run, device))
    if finished:
        report(cfg, f"{cfg.run} is finished, at step {finished['step']}; to train on, give more --steps.", finished)
        return
    source, encoder, spec = open_data(cfg)

    # Make the model, or take it up where it was.
    encoder = encoder and encoder.to(device)
    state = make(cfg, source, encoder, spec, device)
    if resume_from:
        notes += state.restore(resume_from)
    elif cfg.init_from and not cfg.lora_rank:
        state.start_from(cfg.init_from, cfg.init_strict)
    prior, average = state.model, state.average
    dist.check_in_step(prior, state.step)
    if dist.is_main():
        checkpoint.write_json({**config.as_json(asked), "versions": state.versions}, run.folder / "config.json")
    split = data.Split(len(source), "train", cfg.validation, cfg.test)
    log = tracker.Tracker(run, state, len(split))
    log.say(f"{sum(p.numel() for p in state.trained.parameters()):,} parameters{' of adapters' * bool(cfg.lora_rank)}, "
            f"{len(source):,} rows of width {source.width}, {dist.world_size()} rank(s) on {device.type}")
    for note in filter(None, notes):
        log.say(note)
    if cfg.compile:
        prior.compile()
    model = dist.wrap(prior, device)

    # Ask for the data in the order that seed and step give.
    plan = accumulate.plan(cfg.batch_size, cfg.chunk_size, dist.rank(), dist.world_size())
    spans = data.training_spans(plan, cfg.batch_size, state.step)
    batches = data.loader(data.Chunks(source, split, cfg.seed), spans, cfg.workers, device.type == "cuda")
    evaluator = Evaluator(cfg, source, encoder, device)

    with log, tracker.signals() as signals:  # the log hears how it ends
        # Train. Signals and clocks are read by rank 0, at log lines, where the ranks meet anyway.
        saved = evaluated = time.monotonic()
        meter, batch, taken = tracker.Meter(log, state), [], True
        bar = tracker.progress(total=cfg.steps, initial=state.step, desc="prior", unit="step",
                               disable=not dist.is_main())
        prior.train()
        while state.step < cfg.steps:
            if taken:  # a step that overflowed did not happen: it is tried again, on the same samples
                batch = [next(batches) for _ in plan]
            step_loss, norm, taken = update(state, model, encoder, plan, batch)
            if not taken:
                meter.overflows += 1
                continue
            bar.update()
            meter.add(step_loss, batch)
            if state.step % cfg.log_every and state.step < cfg.steps:
                continue

            # Log: the one place where the host waits for the device.
            (loss, rate), step, now = meter.line(norm), state.step, time.monotonic()
            bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} samples/s", refresh=False)

            # Evaluate and save, when the steps, rank 0's clock or a signal say so.
            eval_due, save_due, stop = dist.broadcast((
                step == cfg.steps or schedule.due(step, meter.step, cfg.eval_every, now - evaluated, cfg.eval_minutes),
                step == cfg.steps or schedule.due(step, meter.step, cfg.save_every, now - saved, cfg.save_minutes),
                signals[:1]))
            if eval_due:
                losses = {"val_loss_online": evaluator.loss(prior, "validation")}
                with average.applied(state.trained):
                    losses["val_loss"] = evaluator.loss(prior, "validation")
                    figures = evaluator.figures(prior, "validation") if step < cfg.steps else {}
                evaluated = time.monotonic()
                log.log(step, **losses, **figures, evaluation_s=evaluated - now)
                lines = [f"step {step}: " + tracker.show({"loss": loss, **losses}), *tracker.table(figures)]
                log.say("\n    ".join(lines))
                state.keep_best(losses["val_loss"], run, log)
                log.report()
            if save_due or stop:
                state.commit(run, log)
                saved = time.monotonic()
            if stop:
                run.wait()
                log.say(f"stopped by signal {stop[0]} at step {step}, all saved; the same command goes on")
                raise SystemExit(128 + stop[0])
            meter.restart()
        bar.close()

        # Test the averaged weights, and save them last of all.
        with average.applied(state.trained):
            results = {"test_loss": evaluator.loss(prior, "test"), **evaluator.figures(prior, "test")}
        state.export(run, "model.pt", **results)
        log.log(state.step, **results)
        results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
        log.deliver()
        if dist.is_main():
            run.finish(results)
        log.report()
    report(cfg, f"Trained {cfg.run}; this start took {time.monotonic() - started:.0f} s.", results)


def report(cfg, headline, results):
    """The closing table, and what to do next."""
    if dist.is_main():
        print(f"\n{headline}\n")
        print("\n".join(f"  {line}" for line in tracker.table(results)))
        base, use = Path(cfg.init_from), f"--run {cfg.run}"
        if cfg.lora_rank:
            use = f"--run {base.parent} --model {base.name} --lora {cfg.run}/model.pt"
        print(f'\nTo sample: python train_prior.py sample {use} --text "a small red star" --num 4 --out embeddings.npy',
              flush=True)


# Commands

def load_prior(asked, device):
    """(prior in eval mode, its training config, the file's contents) for what a PriorConfig names."""
    path = Path(asked.run) / asked.model
    cfg, state = lora.read_model("prior", Config, path, asked.weights, asked.lora, asked.lora_scale)
    prior = Prior(cfg, *state["widths"]).to(device).eval()
    load_weights(prior, state, path)
    return prior, cfg, state


@dataclass(frozen=True)
class PriorConfig:
    # The prior
    run: str = "runs/prior"  # run folder of the prior
    model: str = "model.pt"  # file in it: model.pt (newest), best.pt (lowest validation loss) or checkpoints/step_N.pt
    weights: Literal["ema", "online"] = "ema"  # of a checkpoint: averaged, or as the optimizer left them
    lora: str = ""  # LoRA adapters for it: a model.pt, best.pt, checkpoint or run folder of a training with --lora_rank
    lora_scale: float = 1.0  # how much they count: 0 not at all, 1 as they were trained
    guidance_scale: float = 1.0  # 1 for none
    eta: float = 1.0  # 1 as DDPM, 0 for DDIM
    seed: int = 0  # of the noise
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to compute


@dataclass(frozen=True)
class EvaluateConfig(PriorConfig):
    # What to evaluate
    data: str = ""  # embeddings to evaluate on, by default those of the training
    part: Literal["train", "validation", "test"] = "test"  # which rows
    eval_samples: int = 0  # most rows to take, 0 for all
    eval_timesteps: tuple[int, ...] = (8, 64)  # sampling steps
    eval_captions: int = 256  # captions of the built-in data to score
    out: str = ""  # JSON file to write the figures to


def plan_evaluation(asked, device):
    """(prior, Evaluator) for what `asked` wants, all of it checked."""
    prior, cfg, state = load_prior(asked, device)
    cfg = dataclasses.replace(cfg, **{k: v for k, v in dataclasses.asdict(asked).items() if k in
                              ("eval_samples", "eval_timesteps", "eval_captions", "guidance_scale", "eta", "seed")},
                              data=asked.data or cfg.data)
    source, encoder, _ = open_data(cfg)
    widths = [source.width, encoding_width(cfg, source, encoder)]
    if widths != state["widths"]:
        raise UserError(f"{cfg.data}: its embeddings and encodings are {widths} wide, the prior's {state['widths']}")
    return prior, Evaluator(cfg, source, encoder and encoder.to(device), device)


def evaluate(asked):
    device = dist.setup(asked.device)
    prior, evaluator = dist.on_each(lambda: plan_evaluation(asked, device))
    results = {"loss": evaluator.loss(prior, asked.part), **evaluator.figures(prior, asked.part)}
    if dist.is_main():
        print("\n".join(tracker.table(results)))
    if dist.is_main() and asked.out:
        checkpoint.write_json(results, asked.out)


@dataclass(frozen=True)
class SampleConfig(PriorConfig):
    # What to imagine
    text: str = ""  # what to imagine
    texts: str = ""  # or a file with one text a line
    num: int = 4  # embeddings a text
    best_of: int = 2  # candidates an embedding, of which the most similar to the text is kept (DALL-E 2 §2.2)
    steps: int = 64  # sampling steps
    max_batch: int = 256  # most embeddings computed at once
    clip: str = ""  # CLIP for the text, by default that of the training
    neighbors: int = 3  # nearest captions of the data to name, 0 for none
    out: str = ""  # .npy file to write the (texts x num, D) embeddings to

    def __post_init__(self):
        for name in ("num", "best_of", "steps", "max_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name}: {getattr(self, name)} is not above 0")
        if bool(self.text.strip()) == bool(self.texts):
            raise UserError("--text: give a text that is not empty, or a file of them with --texts")


def sample(asked):
    device = dist.setup(asked.device)
    if not dist.is_main():
        return
    prior, cfg, state = load_prior(asked, device)
    if asked.steps > cfg.timesteps:
        raise UserError(f"--steps: {asked.steps} is more than the {cfg.timesteps} timesteps of the prior")
    texts = asked.text if asked.text.strip() else Path(asked.texts).read_text(errors="replace")
    texts = [text.strip() for text in texts.splitlines() if text.strip()]
    spec = asked.clip or state["clip"]
    if not texts or spec is None:
        raise UserError(f"{asked.texts}: no text in it" if not texts else
                        f"{asked.run}: which CLIP made its embeddings is not known; name it with --clip")
    encoder = clip.load(spec, device)
    if encoder.embed_width != prior.embed_width:
        raise UserError(f"--clip {spec}: embeddings {encoder.embed_width} wide, the prior's are {prior.embed_width}")

    if cfg.text_encodings != "none" and encoder.encoding_width != state["widths"][1]:
        raise UserError(f"--clip {spec}: encodings {encoder.encoding_width} wide, the prior's {state['widths'][1]}")

    out, similarity = imagine(prior, cfg, encoder, texts, range(len(texts)), asked)
    out = out.cpu()
    if asked.out:
        with checkpoint.replacing(asked.out) as file:
            np.save(file, out.flatten(0, 1).numpy())
        print(f"wrote {asked.out}: float32 ({len(texts) * asked.num}, {prior.embed_width})")
    neighbors = [[]] * len(texts) * asked.num
    try:
        neighbors = nearest_captions(cfg.data, out.flatten(0, 1), asked.neighbors)
    except UserError as error:
        print(f"no neighbors to name: {error}")
    for t, text in enumerate(texts):
        for k, value in enumerate(similarity[t].tolist()):
            print(f"{text!r} {k}: similarity with the text {value:.3f}", *(
                f"    {cosine:.3f}  {caption}" for cosine, caption in neighbors[t * asked.num + k]), sep="\n")


@torch.no_grad()
def imagine(prior, cfg, encoder, texts, keys, asked):
    """(embeddings (texts, num, D), similarities with their texts (texts, num)), each the best of best_of.

    keys: one a text, from which with asked.seed the noise is made; every candidate has its own, so it is the same in
    any batch.
    """
    candidates, device = asked.num * asked.best_of, prior.alpha.device
    text_embed = F.normalize(encoder.embed_text(encoder.tokenize(texts).to(device))[0].float(), dim=-1)
    if cfg.text_encodings != "none":
        cfg = dataclasses.replace(cfg, text_encodings="clip")  # whatever they were in training, here they are made
    fields = {"caption": [text for text in texts for _ in range(candidates)],
              "seeds": [accumulate.number(asked.seed, key, k) for key in keys for k in range(candidates)],
              "text_embed": text_embed.repeat_interleave(candidates, 0)}
    out = []
    for part in accumulate.split(fields, asked.max_batch):
        with amp.autocast(device, cfg.precision):
            noise = diffusion.noise_source(part["seeds"], device)
            out.append(sample_embeddings(prior, conditioning(part, cfg, encoder), asked.steps, asked.guidance_scale,
                                         asked.eta, noise).float())
    out = torch.cat(out).unflatten(0, (len(texts), asked.num, asked.best_of))  # (texts, num, best_of, D)
    similarity, best = F.cosine_similarity(out, text_embed[:, None, None], dim=-1).max(-1)
    return out.gather(2, best[..., None, None].expand(-1, -1, 1, out.shape[-1])).squeeze(2), similarity


def nearest_captions(folder, embeddings, count, most=100_000):
    """For each embedding of (n, D), [(cosine, caption)] of the `count` nearest of the data's first `most` images."""
    source = data.Embeddings(folder)
    if source.captions is None:
        raise UserError(f"{folder}: it has no captions")
    rows = np.arange(min(len(source), most))
    images = torch.cat([source.fetch(part)[0]["image_embed"] for part in np.array_split(rows, -(-len(rows) // 4096))])
    cosines = F.normalize(embeddings, dim=-1) @ F.normalize(images, dim=-1).nan_to_num(-1).T
    top = cosines.topk(min(count, len(rows)))
    return [[(cosine, record["caption"]) for cosine, record in zip(values, source.captions.records(rows[places]))]
            for values, places in zip(top.values.tolist(), top.indices.numpy())]


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.dispatch(COMMANDS, __doc__, "train", PRESETS)


if __name__ == "__main__":
    config.run(main)
