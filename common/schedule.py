"""The learning rate, as a pure function of the step: nothing to save, nothing to resume."""
import math


def learning_rate(step, lr, warmup_steps, steps, cosine):
    """Rate of the optimizer step number `step` (0 is the first): linear warm-up, then half a cosine or constant.

    The warm-up rises lr/warmup_steps, 2·lr/warmup_steps, …; the cosine (SGDR, Loshchilov & Hutter 2017, Eq. 5) begins
    where it ends and is at 0 from `steps` on. One follows the other, as in torch's SequentialLR of LinearLR and
    CosineAnnealingLR, where the package pytorch_warmup multiplies them.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not cosine:
        return lr
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def of_config(step, cfg):
    """`learning_rate` of the step by the settings of a config."""
    return learning_rate(step, cfg.lr, cfg.warmup_steps, cfg.cosine_steps or cfg.steps, cfg.cosine)


def set_learning_rate(optimizers, lr):
    """Give every parameter group of the `optimizers` the rate `lr`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def due(step, before, every, seconds, minutes):
    """Whether a multiple of `every` steps lies in (before, step], or `minutes` have passed; 0 is never."""
    return (every > 0 and step // every != before // every) or (minutes > 0 and seconds >= minutes * 60)
