"""Mixed precision: autocast, the gradient scaler, and the one order of steps that is right."""
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device, precision):
    """Context in which matrix products run in `precision`; with fp32 it does nothing."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def scaler(device, precision):
    """A GradScaler that is live for fp16 only, so that the training loop needs no branch."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(scaler, optimizers, max_grad_norm):
    """Unscale, clip, step and update, once an iteration; returns (gradient norms (n,), whether the step was taken).

    Each optimizer's gradients are clipped to `max_grad_norm` (0: not at all), a number or one for each, by the norm
    over its own parameters.
    When any gradient overflowed, no optimizer steps and the scale is lowered: the caller must then treat the step
    as not having happened. Only fp16 waits for the device here. The ranks agree because DDP has summed the gradients:
    an inf on one is an inf on all.
    """
    norms, limits = [], max_grad_norm if isinstance(max_grad_norm, list) else [max_grad_norm] * len(optimizers)
    for optimizer, limit in zip(optimizers, limits, strict=True):
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if limit:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        norms.append(norm)
    norms = torch.stack(norms)
    taken = not scaler.is_enabled() or bool(norms.isfinite().all())
    if taken:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    return norms, taken


def load_scaler(scaler, state):
    """Restore `state`; returns a note for the user when the precision was changed since it was saved.

    A disabled scaler's state is {} and an enabled one refuses it, so a run that moves to fp16 starts with a fresh
    scale, and one that leaves fp16 drops the old.
    """
    if bool(state) != scaler.is_enabled():
        return "gradient scale started anew" if scaler.is_enabled() else "gradient scale of the fp16 run dropped"
    scaler.load_state_dict(state)
    return None
