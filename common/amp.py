"""Mixed precision: autocast, the gradient scaler; unscale, clip, step, update, in that order."""

import torch

from common import dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, precision):
    """Context in which matrix products run in `precision`; with fp32 it does nothing."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def scaler(device, precision):
    """A GradScaler that is enabled for fp16 only, so that the training loop needs no branch."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(scaler, groups):
    """Unscale, clip, step and update, once an iteration; returns (norms, whether it stepped).

    groups: [(optimizers, max_grad_norm)], a pair for each model. The gradients of a model are
    clipped together; 0 is no clipping. norms: (models,), before clipping. After an overflow no
    optimizer steps and the scale is lowered: for the caller the step has not happened. All ranks
    decide alike, because their gradients are summed before.
    """
    norms = []
    for optimizers, max_grad_norm in groups:
        parameters = []
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            for param_group in optimizer.param_groups:
                parameters += param_group["params"]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or torch.inf)
        norms.append(norm)
    norms = torch.stack(norms)

    # Only fp16 waits for the device here.
    stepped = not scaler.is_enabled() or bool(norms.isfinite().all())
    if stepped:
        for optimizers, _ in groups:
            for optimizer in optimizers:
                scaler.step(optimizer)
    scaler.update()
    if not stepped and scaler.get_scale() < 2**-20:
        dist.fail("gradients overflow fp16 at any scale; use --precision bf16 or a lower --lr")
    return norms, stepped


def load_scaler(scaler, state):
    """Restore `state`, {} without fp16; a note for the user if the precision changed, or None."""
    if scaler.is_enabled() and not state:
        return "gradient scale started anew"
    if state and not scaler.is_enabled():
        return "gradient scale of the fp16 run dropped"
    scaler.load_state_dict(state)
