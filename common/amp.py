"""Mixed precision: autocast and the gradient scaler. The order is unscale, clip, step, update."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, precision):
    """Context in which matrix products run in `precision`; does nothing for fp32."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def shared_cast_cache(device):
    """Context around all chunks of a step, in which autocast casts each weight only once.

    Torch clears its cache of cast weights when the outermost autocast exits. So this opens a
    disabled autocast around the whole step.
    """
    return torch.autocast(device.type, enabled=False)


def scaler(device, precision):
    """A GradScaler that is enabled only for fp16, so that the training loop needs no branch."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(scaler, optimizers, max_grad_norm):
    """Unscale and clip the gradients of a model, and step its `optimizers`.

    max_grad_norm: 0 for no clipping. Returns (gradient norm before clipping, as a scalar tensor;
    whether the optimizers stepped). On an fp16 overflow, no optimizer steps, and the caller repeats
    the step. All ranks make the same decision, because gradients are already summed. After the
    steps of all models, the caller calls `scaler.update()` once.
    """
    parameters = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            parameters += group["params"]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or torch.inf)
    # bool() waits for the device, but only with fp16.
    stepped = not scaler.is_enabled() or bool(norm.isfinite())
    if stepped:
        for optimizer in optimizers:
            scaler.step(optimizer)
    return norm, stepped
