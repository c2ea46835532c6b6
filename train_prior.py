"""Train a diffusion prior: CLIP text embedding -> CLIP image embedding (DALL-E 2, Ramesh et al. 2022, §2.2).

    torchrun --nproc_per_node=2 train_prior.py                              # on captioned shapes that it makes itself
    torchrun --nproc_per_node=8 train_prior.py --data emb --run_dir runs/l14 --preset dalle2
    python train_prior.py --init_from runs/prior/model.pt --lora_rank 8 --run_dir runs/lora   # adapters alone
    python train_prior.py evaluate --run_dir runs/prior
    python train_prior.py sample --text "a small red star" --num_samples 4 --out embeddings.npy

The same command again resumes. `python train_prior.py [train|evaluate|sample] --help` lists the settings.

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

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: a thread that waits soon leaves its core to others

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

from common import accumulate, amp, checkpoint, config, data, diffusion, dist, ema, optim, schedule, tracker
from common.config import Count, Natural, Positive, Share, UserError
from common.nn import NullText, TimeEmbedding, Transformer, causal_mask, learned_tokens

# Config

@dataclass(frozen=True)
class Config(diffusion.Training):
    # Run and data
    run_dir: str = "runs/prior"  # folder of this run: config, checkpoints, metrics; started again, it resumes
    data: str = "shapes"  # folder with img_emb/ and text_emb/ (and captions), or "shapes": the built-in data
    clip: str = "auto"  # CLIP of the embeddings: folder, model.pt, open_clip:MODEL/WEIGHTS; auto: see DATA/clip.json
    # Model
    width: Count = 192  # width of the transformer
    depth: Count = 4  # blocks
    heads: Count = 3  # attention heads
    dropout: Share = 0.0  # in attention and feed-forward
    text_encodings: Literal["none", "shards", "clip"] = "none"  # condition on tokens: of DATA/text_enc, or by CLIP
    max_text_len: Count = 77  # text encodings: longer texts are cut, shorter ones padded
    # Diffusion
    objective: Literal["x0", "v", "epsilon", "flow"] = "x0"  # what the network predicts; flow has levels of its own
    noise_draws: Count = 1  # (timestep, noise) draws a sample, which share one pass over its text
    # Optimization
    steps: Count = 1150  # optimizer steps
    batch_size: Count = 256  # samples a step, over all ranks
    lr: Positive = 3e-3  # peak learning rate
    # Evaluation and saving; both happen at the first log line at or after they are due
    eval_every: Natural = 575  # steps between evaluations, 0 for none but the last
    eval_samples: Natural = 512  # most rows an evaluation takes, 0 for all
    eval_timesteps: tuple[Count, ...] = (8, 64)  # sampling steps at which the cosine figures are taken
    eta: Share = 1.0  # noise of sampling: 1 as DDPM, 0 for DDIM

    def __post_init__(self):
        super().__post_init__()
        if self.width % self.heads or self.width % 2:
            raise UserError(
                f"--width {self.width}: expected an even multiple of --heads {self.heads}")
        diffusion.check_sampling(self, self.guidance_scale, max(self.eval_timesteps, default=0))
        tracker.check(self)


MOST_CHUNK = 256  # samples in one forward pass, at most, where --chunk_size is 0

# DALL-E 2's Table 3 for the diffusion prior, over the CLIP at hand.
DALLE2 = dict(clip="open_clip:ViT-L-14/openai", width=2048, depth=24, heads=32,
              text_encodings="clip", batch_size=4096, chunk_size=64, optimizer="adamw",
              steps=600_000, warmup_steps=10_000, lr=1.1e-4, betas=(0.9, 0.96), eps=1e-6,
              weight_decay=0.06, precision="bf16", validation=0.01, test=0.01, eval_every=10_000,
              save_every=2_000, log_every=100, workers=4)
# The sizes of the published configs. How these were trained is not public: the rest is DALL-E 2's.
KARLO = dict(DALLE2, depth=20, raw_embeddings=True, guidance_scale=4.0, eval_timesteps=(25,))
PRESETS = {
    "dalle2": DALLE2,
    "karlo": KARLO,
    "kandinsky-2-2": dict(KARLO, clip="open_clip:ViT-bigG-14/laion2b_s39b_b160k"),
}

# What makes a model: --init_from takes it from the file. What is TAKEN comes from there as well,
# unless it is given.
TAKEN = ("lr", "optimizer", "guidance_scale", "eta", "eval_timesteps")
MODEL = ("width", "depth", "heads", "text_encodings", "max_text_len", "raw_embeddings", "objective",
         "noise_schedule", "timesteps")
# What must not change when a run goes on; all else may.
FIXED = (*config.FIXED, *MODEL, "noise_draws", "lora_rank")
X0_BOUND = 10.0  # of an estimate of raw x₀ in sampling, in standard deviations (Karlo, Kandinsky)


# Model

class Prior(nn.Module):
    """A causal transformer over [text encodings, text embedding | time, noised image embedding, query] (§2.2).

    The output at the learned query is the prediction. It is Karlo's and Kandinsky's form, whose
    weights load (common/pretrained.py). What stands before the bar does not depend on the noise: it
    is run once for all `noise_draws` of a sample in training, and once for all steps in sampling.
    D is the width of the embeddings, W of the transformer, L the text length, K the noise draws, P
    the tokens before the bar.
    """

    def __init__(self, cfg, embed_width, encoding_width=0):
        super().__init__()
        self.cfg = cfg
        self.embed_width = embed_width
        width = cfg.width
        length = cfg.max_text_len if encoding_width else 0
        if encoding_width:
            self.encoding_in = nn.Linear(encoding_width, width)
        self.text_in = nn.Linear(embed_width, width)
        self.time_in = TimeEmbedding(width, width, cfg.timesteps)
        self.image_in = nn.Linear(embed_width, width)
        self.query = learned_tokens(1, width)
        self.positions = learned_tokens(length + 4, width)
        self.null_text = NullText(embed_width, encoding_width, length)
        self.transformer = Transformer(width, cfg.depth, cfg.heads, rotary=False,
                                       dropout=cfg.dropout, checkpointing=cfg.checkpointing)
        self.out = nn.Linear(width, embed_width)
        # Mean and standard deviation of image embeddings: here of any of unit length, see `measure`.
        self.register_buffer("clip_mean", torch.zeros(embed_width))
        self.register_buffer("clip_std", torch.full((embed_width,), embed_width ** -0.5))
        schedule_name = "flow" if cfg.objective == "flow" else cfg.noise_schedule
        alpha, sigma = diffusion.levels(schedule_name, cfg.timesteps)
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("sigma", sigma, persistent=False)

    def measure(self, image_embed):
        """Take the mean and standard deviation of embeddings (N, D): raw ones of the training."""
        self.clip_mean.copy_(image_embed.mean(0))
        self.clip_std.copy_(image_embed.std(0).clamp(min=1e-6))

    def standardize(self, image_embed):
        """Image embeddings (…, D) as a CLIP gives them -> of mean 0 and variance 1, as noise is."""
        if not self.cfg.raw_embeddings:
            image_embed = F.normalize(image_embed.float(), dim=-1)
        return (image_embed - self.clip_mean) / self.clip_std

    def destandardize(self, x0):
        """The inverse of `standardize`; of unit length, if the model is not of raw embeddings."""
        image_embed = x0 * self.clip_std + self.clip_mean
        return image_embed if self.cfg.raw_embeddings else F.normalize(image_embed, dim=-1)

    def text_cache(self, condition, drop):
        """(keys and values of the text, which of its tokens are keys (B, P)); for `denoise`.

        Where `drop` (B,) is true, of "no text".
        """
        condition = self.null_text(condition, drop)
        text_embed = condition["text_embed"]
        if not self.cfg.raw_embeddings:
            text_embed = F.normalize(text_embed.float(), dim=-1) * self.embed_width ** 0.5
        tokens = self.text_in(text_embed)[:, None]  # (B, 1, W)
        is_key = torch.ones_like(drop)[:, None]
        if self.cfg.text_encodings != "none":
            encodings = self.encoding_in(condition["text_enc"])  # (B, L, W)
            tokens = torch.cat([encodings, tokens], dim=1)  # (B, P, W)
            is_key = torch.cat([condition["text_mask"], is_key], dim=1)
        length = tokens.shape[1]
        tokens = tokens + self.positions.weight[:length].to(tokens.dtype)
        # Of padding a token sees itself alone, so that no row of the softmax is empty.
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
        may_see = is_key[:, None, None] | itself
        mask = causal_mask(length, length, tokens.device) & may_see  # (B, 1, P, P)
        _, cache = self.transformer(tokens, mask, keep=1, return_cache=True)
        return cache, is_key

    def denoise(self, x_t, timestep, cache, is_key):
        """Predictions (B, K, D) for x_t (B, K, D) at `timestep` (B, K), given the `text_cache`."""
        draws = timestep.shape[1]
        noised = self.image_in(x_t)
        time = self.time_in(timestep.flatten()).unflatten(0, timestep.shape).to(noised.dtype)
        query = self.query.weight.to(noised.dtype).expand_as(noised)
        tokens = torch.stack([time, noised, query], dim=1)  # (B, 3, K, W)
        tokens = tokens + self.positions.weight[-3:, None].to(tokens.dtype)
        # A token sees the text and, of its own draw, itself and what comes before it.
        own = torch.kron(torch.ones(3, 3).tril(), torch.eye(draws)).bool().to(x_t.device)
        own = own.expand(len(x_t), -1, -1)  # (B, 3K, 3K)
        text = is_key[:, None].expand(-1, 3 * draws, -1)  # (B, 3K, P)
        mask = torch.cat([text, own], dim=2)[:, None]
        return self.out(self.transformer(tokens.flatten(1, 2), mask, cache=cache, keep=draws))

    def forward(self, x_t, timestep, condition, drop):
        """Predictions (B, K, D) for K noise draws a sample, from one pass over its text."""
        return self.denoise(x_t, timestep, *self.text_cache(condition, drop))


@torch.no_grad()
def conditioning(batch, cfg, encoder):
    """{"text_embed" (B, D), "text_enc" (B, L, E), "text_mask" (B, L)} as the model takes them.

    They are the CLIP `encoder`'s of the batch's captions, if it has some, or else the batch's own.
    """
    if "caption" in batch:
        return encoder.text_condition(batch["caption"], cfg.max_text_len)
    condition = {"text_embed": batch["text_embed"].float()}
    if "text_enc" in batch:
        encodings = batch["text_enc"].float()
        missing = cfg.max_text_len - encodings.shape[1]  # below 0, longer texts are cut
        condition["text_enc"] = F.pad(encodings, (0, 0, 0, missing))
        condition["text_mask"] = condition["text_enc"].any(-1)  # zero rows are padding
    return condition


# Loss

def diffusion_loss(prior, batch, condition, plain=False):
    """Mean loss over a chunk: one pass of the model.

    plain: without loss weights and DREAM, as in evaluation, so that it compares across settings.
    """
    cfg = prior.cfg
    x0 = prior.standardize(batch["image_embed"])
    x0 = x0[:, None].expand(-1, cfg.noise_draws, -1)  # (B, K, D)
    timestep = diffusion.draw_timesteps(cfg.timestep_density, x0.shape[:2], cfg.timesteps,
                                        x0.device, cfg.density_mean, cfg.density_std)
    noise = torch.randn_like(x0)
    drop = torch.rand(len(x0), device=x0.device) < cfg.text_drop
    alpha = diffusion.at(prior.alpha, timestep, x0)
    sigma = diffusion.at(prior.sigma, timestep, x0)
    x_t = alpha * x0 + sigma * noise
    target = diffusion.target(cfg.objective, x0, noise, alpha, sigma)
    if cfg.dream and not plain:
        with torch.no_grad():
            predicted = prior(x_t, timestep, condition, drop).float()
        # torch keeps weights that were cast without gradients for the pass that needs them
        torch.clear_autocast_cache()
        x_t, target = diffusion.dream(x_t, noise, predicted, sigma)
    prediction = prior(x_t, timestep, condition, drop).float()
    loss = F.mse_loss(prediction, target, reduction="none")
    if not plain:
        loss = loss * diffusion.loss_weight(
            cfg.loss_weight, cfg.objective, alpha, sigma, cfg.loss_gamma)
    return loss.mean()


# Sampling

@torch.no_grad()
def sample_embeddings(prior, condition, steps, guidance_scale=1.0, eta=1.0, noise=torch.randn_like):
    """Image embeddings (B, D) for a `conditioning` of B texts.

    They are of unit length, or raw, as those that the model learned from. Guidance runs every text
    a second time, as "no text"; the noised input is the same for both. `noise(x)` draws.
    """
    cfg = prior.cfg
    size = len(condition["text_embed"])
    device = prior.alpha.device
    copies = 1 if guidance_scale == 1 else 2
    condition = {name: torch.cat([value] * copies) for name, value in condition.items()}
    drop = torch.arange(copies * size, device=device) >= size
    cache = prior.text_cache(condition, drop)

    def denoise(x_t, timestep):
        x_in = x_t.repeat(copies, 1)[:, None]  # one draw a text
        prediction = prior.denoise(x_in, timestep.repeat(copies)[:, None], *cache)[:, 0].float()
        if copies == 2:
            prediction = diffusion.guide(prediction[:size], prediction[size:], guidance_scale)
        alpha = diffusion.at(prior.alpha, timestep, x_t)
        sigma = diffusion.at(prior.sigma, timestep, x_t)
        x0 = diffusion.to_x0(cfg.objective, prediction, x_t, alpha, sigma)
        # No component of a vector of length √D is greater.
        bound = X0_BOUND if cfg.raw_embeddings else prior.embed_width ** 0.5
        return x0.clamp(-bound, bound)

    x_t = noise(torch.empty(size, prior.embed_width, device=device))
    x0 = diffusion.sample(denoise, x_t, prior.alpha, prior.sigma, steps, eta, noise)
    return prior.destandardize(x0)


@torch.no_grad()
def best_embeddings(prior, condition, keys, num, steps, guidance_scale=1.0, eta=1.0, best_of=1, seed=0, max_batch=256):
    """(embeddings (texts, num, D), similarities with their texts (texts, num)), each the best of best_of (§2.2).

    condition: of each text, as of `conditioning`. keys: one a text, from which with `seed` the noise is made; every
    candidate has its own, so it is the same in any batch.
    """
    device, candidates, out = prior.alpha.device, num * best_of, []
    fields = {name: value.repeat_interleave(candidates, 0) for name, value in condition.items()}
    fields["seeds"] = [accumulate.number(seed, key, k) for key in keys for k in range(candidates)]
    for batch in accumulate.split(fields, max_batch):
        noise = diffusion.noise_source(batch.pop("seeds"), device)
        with amp.autocast(device, prior.cfg.precision):
            out.append(sample_embeddings(prior, batch, steps, guidance_scale, eta, noise).float())
    out = torch.cat(out).unflatten(0, (-1, num, best_of))  # (texts, num, best_of, D)
    similarity, best = F.cosine_similarity(out, condition["text_embed"][:, None, None], dim=-1).max(-1)
    return out.gather(2, best[..., None, None].expand(-1, -1, 1, out.shape[-1])).squeeze(2), similarity


# Evaluation

class Evaluator:
    """What is measured on held-out rows, of `parts` as of `data.parts`: the same, to rounding, on any ranks."""

    def __init__(self, cfg, parts, encoder, device):
        self.cfg, self.parts, self.encoder, self.device = cfg, parts, encoder, device

    def loss(self, prior, part):
        """Mean diffusion loss over a part, without loss weights."""
        def loss_of(batch):
            condition = conditioning(batch, self.cfg, self.encoder)
            return diffusion_loss(prior, batch, condition, plain=True)
        return diffusion.mean_loss(prior, loss_of, *self.parts[part], self.cfg, self.device)

    @torch.no_grad()
    def figures(self, prior, part):
        """The cosine figures of embeddings sampled in each of eval_timesteps steps; on the built-in data, scores too.

        The unrelated text of a row is that of the row half a part further on.
        """
        cfg, mode, (source, rows) = self.cfg, prior.training, self.parts[part]
        rows = rows[np.arange(min(len(rows), cfg.eval_samples or len(rows)))]
        others, totals = np.roll(rows, -(len(rows) // 2)), np.zeros(2 + 3 * len(cfg.eval_timesteps))
        unrelated_texts = data.Chunks(source, others)
        prior.eval()
        for number, batch in data.batches(source, rows, 0, cfg.chunk_size):
            first = number * cfg.chunk_size
            other = unrelated_texts[first, first + len(batch["rows"])]
            batch, other = (data.to_device(each, self.device) for each in (batch, other))
            condition, other = (conditioning(each, cfg, self.encoder) for each in (batch, other))
            text, image, unrelated = condition["text_embed"], batch["image_embed"], other["text_embed"]
            values = [torch.ones(len(text)), F.cosine_similarity(text, image)]
            for steps in cfg.eval_timesteps:
                accumulate.seed(cfg.seed, "similarities", number, steps)
                with amp.autocast(self.device, cfg.precision):
                    out = sample_embeddings(prior, condition, steps, cfg.guidance_scale, cfg.eta)
                values += [F.cosine_similarity(out, embed) for embed in (text, image, unrelated)]
            totals += [value.sum().item() for value in values]
        samples, baseline, *rest = dist.total(totals.tolist())
        result = {"baseline_similarity": baseline / samples}
        for steps, (text, image, unrelated) in zip(cfg.eval_timesteps, np.reshape(rest, (-1, 3)) / samples):
            result |= {f"similarity_with_text@{steps}": text, f"similarity_with_image@{steps}": image,
                       f"similarity_with_unrelated_text@{steps}": unrelated,
                       f"difference_from_baseline@{steps}": text - baseline / samples}
        if source.captions and source.captions.built_in() and not cfg.val_data:
            result |= self.built_in_scores(prior, part)
        prior.train(mode)
        return {name: float(value) for name, value in result.items()}

    def built_in_scores(self, prior, part, captions=96, draws=16):
        """caption_match and coverage of samples at the most of eval_timesteps, and their ceilings.

        caption_match: share of the embeddings whose nearest neighbor among held-out images has what the caption names.
        coverage: entropy of the attributes it leaves open, among the neighbors of a caption's draws, over the same
        among all images that fit the caption. The ceiling takes as many embeddings of fitting training images instead.
        """
        from common import synthetic
        cfg, source, steps = self.cfg, self.parts[part][0], max(self.cfg.eval_timesteps)
        records = source.captions.records(range(len(source)))
        with checkpoint.reading(source.folder / "captions"):
            values, named = synthetic.values(records), synthetic.named(records)  # (rows, attributes)
        rows = {name: rows[np.arange(len(rows))] for name, (_, rows) in self.parts.items()}
        held_out = np.concatenate([rows["validation"], rows["test"]])
        judge = synthetic.Judge(F.normalize(source.fetch(held_out)[0]["image_embed"], dim=-1).numpy(), values[held_out])
        totals = np.zeros(6)  # draws, matches, real matches; entropy of draws, of real ones, of all that fits
        held_out_captions = rows[part][:captions]
        for number in dist.deal(len(held_out_captions)):
            row = held_out_captions[number]
            accumulate.seed(cfg.seed, "scores", number)
            names = named[row]
            fitting = np.flatnonzero((values == values[row])[:, names].all(1))
            known = np.intersect1d(fitting, rows["train"])
            if not len(known):
                continue
            batch = data.to_device(source.fetch(np.repeat(row, draws))[0], self.device)
            with amp.autocast(self.device, cfg.precision):
                drawn = sample_embeddings(prior, conditioning(batch, cfg, self.encoder), steps, cfg.guidance_scale,
                                          cfg.eta)
            real = F.normalize(source.fetch(np.random.choice(known, draws))[0]["image_embed"], dim=-1)
            found = [judge.attributes(embed.float().cpu().numpy()) for embed in (drawn, real)]  # (draws, attributes)
            totals += [draws, *((f == values[row])[:, names].all(1).sum() for f in found),
                       *(sum(map(synthetic.entropy, f[:, ~names].T)) for f in (*found, values[fitting]))]
        count, match, real_match, spread, real_spread, whole = dist.total(totals.tolist())
        return {f"caption_match@{steps}": match / count, "caption_match_ceiling": real_match / count,
                f"coverage@{steps}": spread / whole, "coverage_ceiling": real_spread / whole}


# Training

def open_data(cfg, device):
    """({part: (source, rows)} as of `data.parts`, CLIP or None, facts about both for model files).

    The CLIP gives what stands for "no text", and encodes captions for a model of --text_encodings
    clip.
    """
    spec, fingerprint = data.clip_of(cfg.data, cfg.init_from)
    spec = spec if cfg.clip == "auto" else cfg.clip
    shards, captions = cfg.text_encodings == "shards", cfg.text_encodings == "clip"
    source, val_source = (folder and data.Embeddings(folder, shards, captions) for folder in (cfg.data, cfg.val_data))
    if val_source and val_source.width != source.width:
        raise UserError(f"--val_data {cfg.val_data}: {val_source.width} wide, {cfg.data} is {source.width}")
    encoding_width = source.tables["text_enc"].shape[1] if shards else 0
    encoder = None
    if captions or (spec and not spec.startswith("open_clip:")):  # which may be far away, or large
        from common import clip
        encoder = clip.load(spec, device, fingerprint)
        clip.check_widths(encoder, f"--clip {spec} for {cfg.data}", source.width, encoding_width)
        fingerprint = encoder.fingerprint()
    if captions:
        encoding_width = encoder.encoding_width
    for each in filter(None, (source, val_source)):
        data.check_lengths(cfg, each, cfg.data)
    widths = [source.width, encoding_width]
    facts = {"widths": widths, "clip": spec, "clip_fingerprint": fingerprint}
    return data.parts(source, cfg, val_source), encoder, facts


def prepare(cfg, run, device):
    """What rank 0 does before anyone trains: make the built-in data, check everything, hold the run folder.

    Returns (config with `data` as a folder, checkpoint to resume from or None, results of a run that is finished or
    None, messages, the command to give at the end).
    """
    cfg = checkpoint.with_chunk_size(tracker.prepare(cfg), MOST_CHUNK)
    if cfg.data == "shapes":
        from common import clip
        cfg = dataclasses.replace(cfg, data=clip.builtin_data(run.folder.parent, device))
    parts, encoder, facts = open_data(cfg, device)
    source, _ = parts["train"]
    bad, read, names = source.check()
    notes = run.open(cfg.resume)  # which may move an earlier run aside, so all is checked before
    if bad:
        notes.append(f"{bad} of {read} rows looked at cannot be used; others take their place: {', '.join(names)}")
    resume_from, finished, more = run.resume_point(cfg, checkpoint.identity(cfg, FIXED, source, encoder))
    caption = source.captions.records([0])[0]["caption"] if source.captions else ""
    command = f"sample --text {shlex.quote(caption or 'a small red star')}" if facts["clip"] else "evaluate"
    return cfg, resume_from, finished, notes + more, f"train_prior.py {command} --run_dir {shlex.quote(cfg.run_dir)}"


def train(cfg):
    # Join the other ranks; let rank 0 hold the run folder, make data and check all there is to check.
    started, run, given = time.monotonic(), checkpoint.Run(cfg.run_dir), cfg
    device = dist.setup(cfg.device, cfg.timeout_minutes)
    cfg, resume_from, finished, notes, command = dist.on_main(lambda: prepare(cfg, run, device))
    if finished:
        tracker.resend(cfg, run)
        headline = f"{cfg.run_dir} is finished, at step {finished['step']}; to train on, give more --steps."
        return tracker.announce(headline, finished, command)

    # Make the model and what trains it, or take them up where they were.
    parts, encoder, facts = open_data(cfg, device)
    source, rows = parts["train"]
    identity = checkpoint.identity(cfg, FIXED, source, encoder)
    accumulate.seed(cfg.seed, "weights")
    facts = {"kind": "prior", **facts, "metadata": tracker.metadata(cfg)}
    prior = trained = Prior(cfg, *facts["widths"]).to(device)
    if encoder:
        prior.null_text.fill(conditioning({"caption": [""]}, cfg, encoder))
    if cfg.raw_embeddings and not (resume_from or cfg.init_from):  # whose files have them
        some, good = source.fetch(rows[data.spread(len(rows), 10_000)])
        prior.measure(some["image_embed"][good])
    if cfg.lora_rank:
        from common import lora
        trained, facts["lora"] = lora.start(prior, cfg)
    optimizers = optim.make(trained, cfg.optimizer, cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps)
    scaler = amp.scaler(device, cfg.precision)
    average = ema.EMA(trained, cfg.ema_update_every, decay=cfg.ema_decay, update_after=cfg.ema_update_after)
    state = checkpoint.State(cfg, {"model": trained}, average, optimizers, scaler, identity, facts)
    if resume_from:
        notes += state.restore(resume_from)
    elif cfg.init_from and not cfg.lora_rank:
        state.start_from(cfg.init_from, cfg.init_strict)
    dist.check_in_step({**state.modules, "prior": prior}, state.step)
    if cfg.compile:
        prior.compile()

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
    size += f", {len(source):,} rows of width {source.width}"
    size += f", {accumulate.described(cfg)}, {dist.world_size()} rank(s) on {device.type}"
    for note in filter(None, [size, *notes]):
        log.say(note)

    # After a signal the meter saves and ends the run. The log hears how it ended.
    with log, dist.stop_signals, tracker.Meter(log, state, "prior") as meter:
        prior.train()
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
                    losses = {"val_loss_online": evaluator.loss(prior, "validation")}
                    with average.applied(trained):
                        losses["val_loss"] = evaluator.loss(prior, "validation")
                        if state.step < cfg.steps:  # else the test is next
                            figures = evaluator.figures(prior, "validation")
                    seconds = time.monotonic() - begun
                    log.log(state.step, **losses, **figures, evaluation_s=seconds)
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
                    loss = diffusion_loss(prior, batch, condition)
                scaler.scale(loss * chunk.weight).backward()
                step_loss += loss.detach() * (chunk.stop - chunk.start)
            dist.sum_gradients(trained)
            norm, stepped = amp.step(scaler, optimizers, cfg.max_grad_norm)
            prior.zero_grad(set_to_none=True)
            if not stepped:
                meter.overflows += 1
                continue
            state.step += 1
            average.update(state.step)
            meter.add(step_loss, norm, chunks)
        meter.bar.close()

        # Test the averaged weights, and save them last of all.
        with average.applied(trained):
            results = {"loss": evaluator.loss(prior, "test"), **evaluator.figures(prior, "test")}
        results = {f"test_{name}": value for name, value in results.items()}
        log.log(state.step, **results)
        results = {"step": state.step, "best_val_loss": state.best_val_loss, **results}
        if dist.is_main():
            run.finish(state, results)
        log.report()
    tracker.announce(f"Trained {cfg.run_dir}; this start took {time.monotonic() - started:.0f} s.", results, command)


# Commands

@dataclass(frozen=True)
class PriorConfig(diffusion.Inference):
    # The model
    run_dir: str = "runs/prior"  # run folder of the prior
    guidance_scale: float = -1.0  # 1 for none; below 0: that of its training
    eta: float = -1.0  # 1 as DDPM, 0 for DDIM; below 0: that of its training


def load_prior(path, device, weights="ema", lora_scale=1.0):
    """(prior in eval mode, the file's contents) of a model.pt or checkpoint, LoRA adapters merged in."""
    from common import lora
    cfg, state = lora.read_model("prior", Config, path, weights, lora_scale)
    with checkpoint.reading(path):
        return checkpoint.build(lambda: Prior(cfg, *state["widths"]), state, path, device), state


def sampling_config(cfg, args):
    """The prior's `cfg` with the guidance scale and eta of `args`, where these are given."""
    given = {"guidance_scale": args.guidance_scale, "eta": args.eta}
    return dataclasses.replace(cfg, **{name: value for name, value in given.items() if value >= 0})


@dataclass(frozen=True)
class EvaluateConfig(PriorConfig):
    # What to evaluate
    data: str = ""  # embeddings to evaluate on, by default those of the training
    part: Literal["train", "validation", "test"] = "test"  # which rows
    eval_samples: Natural = 0  # most rows to take, 0 for all
    eval_timesteps: tuple[Count, ...] = ()  # sampling steps; none: those of its training
    out: str = ""  # JSON file to write the figures to


def plan_evaluation(args, device):
    """(prior, Evaluator) for what `args` wants, all of it checked."""
    prior, state = load_prior(Path(args.run_dir) / args.model, device, args.weights, args.lora_scale)
    cfg = dataclasses.replace(sampling_config(prior.cfg, args), seed=args.seed, batch_size=1,
                              eval_samples=args.eval_samples, data=args.data or prior.cfg.data)
    if args.eval_timesteps:
        cfg = dataclasses.replace(cfg, eval_timesteps=args.eval_timesteps)
    if cfg.data == "shapes":  # which training replaces by a path
        raise UserError(f"{args.run_dir}: its data are not known; name some with --data")
    parts, encoder, facts = open_data(cfg, device)
    if facts["widths"] != state["widths"]:
        raise UserError(f"{cfg.data}: widths of embeddings and text encodings (0: none) are {facts['widths']}; the "
                        f"prior's are {state['widths']}")
    return prior, Evaluator(cfg, parts, encoder, device)


def evaluate(args):
    device = dist.setup(args.device)
    prior, evaluator = dist.on_each(lambda: plan_evaluation(args, device))
    results = {"loss": evaluator.loss(prior, args.part), **evaluator.figures(prior, args.part)}
    if dist.is_main():
        print("\n".join(tracker.table(results)))
    if dist.is_main() and args.out:
        checkpoint.write_json(results, args.out)


@dataclass(frozen=True)
class SampleConfig(PriorConfig):
    # What to imagine
    text: str = ""  # a text; without text, texts and text_embeds: no text in particular
    texts: str = ""  # or a file with one text a line
    text_embeds: str = ""  # or a .npy file of text embeddings (N, D), of which no CLIP is needed
    num_samples: Count = 4  # embeddings a text
    best_of: Count = 2  # candidates an embedding, of which the most similar to the text is kept (DALL-E 2 §2.2)
    steps: Natural = 0  # sampling steps; 0: the most of its training's eval_timesteps
    max_batch: Count = 256  # most embeddings computed at once
    clip: str = ""  # CLIP for the text, by default that of the training
    out: str = "embeddings.npy"  # .npy file for the (texts x num_samples, D) embeddings

    def __post_init__(self):
        super().__post_init__()
        config.check_suffixes(self, text_embeds=".npy", out=".npy")
        if len(given := [name for name in ("text", "texts", "text_embeds") if getattr(self, name)]) > 1:
            raise UserError(f"--{given[0]}, --{given[1]}: give one of them")


def plan_sample(args, device):
    """(prior, settings, texts if any are given, `conditioning` of these or of embeddings), checked.

    settings: (steps, guidance scale, eta).
    """
    prior, state = load_prior(Path(args.run_dir) / args.model, device, args.weights, args.lora_scale)
    texts = config.lines_of(args.texts) if args.texts else list(filter(None, [args.text.strip()]))
    cfg = sampling_config(prior.cfg, args)
    steps = args.steps or max(cfg.eval_timesteps)
    settings = steps, cfg.guidance_scale, cfg.eta
    diffusion.check_sampling(cfg, cfg.guidance_scale if texts or args.text_embeds else 0, steps)
    if texts:
        from common import clip
        spec = args.clip or state["clip"]
        encoder = clip.load(spec, device, state["clip_fingerprint"])
        clip.check_widths(encoder, f"--clip {spec}", *state["widths"])
        return prior, settings, texts, conditioning({"caption": texts}, prior.cfg, encoder)
    if not args.text_embeds:
        return prior, (steps, 1.0, cfg.eta), [], dict(prior.null_text.named_buffers())
    if prior.cfg.text_encodings != "none":
        raise UserError("--text_embeds: this prior is trained on text encodings, too; give --text or --texts")
    rows = data.Rows(args.text_embeds, 2)
    embeds = torch.from_numpy(rows[np.arange(len(rows))]).to(device)
    if embeds.shape[1] != prior.embed_width or not embeds.isfinite().all():
        raise UserError(f"{args.text_embeds}: {embeds.shape[1]} wide, or not finite; expected "
                        f"{prior.embed_width}")
    return prior, settings, [], conditioning({"text_embed": embeds}, prior.cfg, None)


def sample(args):
    device = dist.setup(args.device)
    if not dist.is_main():
        return
    prior, settings, texts, condition = plan_sample(args, device)
    keys = range(len(condition["text_embed"]))
    out, similarity = best_embeddings(prior, condition, keys, args.num_samples, *settings,
                                      args.best_of, args.seed, args.max_batch)
    for text, cosines in zip(texts[:100], similarity.tolist()):
        print(f"{text!r}: similarity with the text {', '.join(f'{cosine:.3f}' for cosine in cosines)}")
    with checkpoint.replacing(args.out) as file:
        np.save(file, out.flatten(0, 1).cpu().numpy())
    print(f"wrote {args.out}: float32 ({out.shape[0] * out.shape[1]}, {prior.embed_width})")


COMMANDS = {"train": (train, Config), "evaluate": (evaluate, EvaluateConfig), "sample": (sample, SampleConfig)}


def main():
    config.run(COMMANDS, __doc__, "train", PRESETS,
               model=lambda path: checkpoint.settings_in(path, MODEL, TAKEN))


if __name__ == "__main__":
    main()
