"""Mixed precision: autocast, the gradient scaler, and the one order of steps that is right."""
import torch

from common.config import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, precision):
    """Context in which matrix products run in `precision`; with fp32 it does nothing."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def scaler(device, precision):
    """A GradScaler that is live for fp16 only, so that the training loop needs no branch."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(scaler, optimizers, max_grad_norm):
    """Unscale, clip, step and update, once an iteration; returns (gradient norm before clipping, whether it stepped).

    The gradients of one model's `optimizers` are clipped together to the norm `max_grad_norm` (0: not at all). For n
    models, lists of optimizers and n limits, the norms (n,) are separate. After an overflow nothing steps and the scale
    is lowered: to the caller the step has not happened. The ranks agree, as gradients are summed.
    """
    several = isinstance(max_grad_norm, list)
    models, limits, norms = (optimizers, max_grad_norm, []) if several else ([optimizers], [max_grad_norm], [])
    for model, limit in zip(models, limits, strict=True):
        for optimizer in model:
            scaler.unscale_(optimizer)
        parameters = [p for o in model for group in o.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        if limit:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norms[-1])
    norms = torch.stack(norms)
    # Only fp16 waits for the device here.
    stepped = not scaler.is_enabled() or bool(norms.isfinite().all())
    for optimizer in [o for model in models for o in model if stepped]:
        scaler.step(optimizer)
    scaler.update()
    if not stepped and scaler.get_scale() < 2 ** -20:
        raise UserError("gradients overflow fp16 at any scale; use --precision bf16 or a lower --lr")
    return norms if several else norms[0], stepped


def load_scaler(scaler, state):
    """Restore `state` ({} without fp16); returns a note for the user if the precision was changed, else None."""
    if bool(state) != scaler.is_enabled():
        return "gradient scale started anew" if scaler.is_enabled() else "gradient scale of the fp16 run dropped"
    return scaler.load_state_dict(state)
