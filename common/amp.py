"""Mixed precision: autocast, the gradient scaler; unscale, clip, step, update, in that order."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, precision):
    """Context in which matrix products run in `precision`; with fp32 it does nothing."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def shared_cast_cache(device):
    """Context of all chunks of a step: autocast casts each weight only once.

    Torch clears its cache of cast weights when the outermost autocast exits. This is an outer,
    disabled one that spans the step.
    """
    return torch.autocast(device.type, enabled=False)


def scaler(device, precision):
    """A GradScaler that is enabled for fp16 only, so that the training loop needs no branch."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(scaler, optimizers, max_grad_norm):
    """Unscale the gradients of a model, clip them together, and step.

    optimizers: of the model. max_grad_norm: 0 is no clipping. Returns (the norm before clipping, a
    scalar tensor; whether it stepped). After an overflow of fp16 no optimizer steps, and the caller
    repeats the step. All ranks decide alike, because their gradients are summed before. After all
    models the caller adapts the scale, once, by `scaler.update()`.
    """
    parameters = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            parameters += group["params"]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or torch.inf)
    # Only fp16 waits for the device here.
    stepped = not scaler.is_enabled() or bool(norm.isfinite())
    if stepped:
        for optimizer in optimizers:
            scaler.step(optimizer)
    return norm, stepped
