"""The learning rate as a pure function of the step, so there is no state to save."""

import math


def learning_rate(step, lr, warmup_steps, steps, cosine):
    """The learning rate after `step` completed steps.

    It rises linearly to `lr` during the warm-up. Then it is constant or, with `cosine`, falls along
    half a cosine to 0 at `steps` (SGDR, Loshchilov & Hutter 2017, Eq. 5). The cosine begins where
    the warm-up ends, as in torch's SequentialLR of LinearLR and CosineAnnealingLR; the package
    pytorch_warmup multiplies the two instead.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not cosine:
        return lr
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def of_config(step, cfg):
    """`learning_rate` at a step, with the settings of a config."""
    return learning_rate(
        step,
        cfg.lr,
        cfg.warmup_steps,
        cfg.cosine_steps or cfg.steps,
        cfg.cosine,
    )


def set_learning_rate(optimizers, lr):
    """Set the learning rate of every parameter group of the `optimizers`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
