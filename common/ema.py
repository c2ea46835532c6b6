"""An exponential moving average of a model's parameters, in fp32, kept beside the model."""
import contextlib

import torch


def decay_at(step, decay=0.9999, warmup="power", inv_gamma=1.0, power=0.75, min_decay=0.0, update_after=0):
    """Decay used after optimizer step number `step` (1 is the first); 0 copies the parameters.

    warmup "power": 1 - (1 + s/inv_gamma)^-power; "ratio": (1 + s) / (10 + s), with s = step -
    update_after - 1; kept within [min_decay, decay], so with a `min_decay` of `decay` there is none.
    Up to and including s = 0 the parameters are copied.
    """
    s = step - update_after - 1
    if s <= 0:
        return 0.0
    value = {"power": 1 - (1 + s / inv_gamma) ** -power, "ratio": (1 + s) / (10 + s)}[warmup]
    return max(min_decay, min(decay, value))


class EMA:
    """Shadow of everything in `model.state_dict()`: trainable parameters averaged in fp32, all else copied.

    The average is a pure function of the steps' parameters: nothing but the tensors is saved. With decay 0 averaging is
    off: the shadow is the model's own tensors. `decay`: arguments of `decay_at`. The model is not moved afterwards.
    """

    def __init__(self, model, update_every=1, **decay):
        self.update_every, self.decay, self.off = update_every, decay, decay.get("decay") == 0
        live = model.state_dict(keep_vars=True)
        self.averaged = {n for n, t in live.items() if t.requires_grad and t.is_floating_point()}
        self.live = {n: t.detach() for n, t in live.items()}
        self.shadow = self.live if self.off else {
            n: t.to(torch.float32 if n in self.averaged else t.dtype, copy=True) for n, t in self.live.items()}
        self.stored = None

    def update(self, step):
        """Take in the parameters after optimizer step number `step`, if it is one of every `update_every`."""
        if self.off or step % self.update_every:
            return
        shadow = [self.shadow[n] for n in self.averaged]
        live = [self.live[n].to(s.device, s.dtype) for n, s in zip(self.averaged, shadow)]
        torch._foreach_lerp_(shadow, live, 1 - decay_at(step, **self.decay))
        for name in self.live.keys() - self.averaged:
            self.shadow[name].copy_(self.live[name])

    def copy_to(self, model):
        """Write the averages into `model`, which has the same names."""
        for name, tensor in model.state_dict().items():
            tensor.copy_(self.shadow[name])

    def store(self, model):
        """Keep a copy of the weights of `model` until `restore`."""
        assert self.stored is None, "the weights stored before have not been restored"
        self.stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def restore(self, model):
        """Give `model` the weights that `store` kept, bit for bit."""
        for name, tensor in model.state_dict().items():
            tensor.copy_(self.stored[name])
        self.stored = None

    @contextlib.contextmanager
    def applied(self, model):
        """Context in which `model` holds the averages; on leaving it, its own weights return bit for bit."""
        if not self.off:
            self.store(model)
        try:
            self.copy_to(model)
            yield model
        finally:
            if not self.off:
                self.restore(model)

    def to(self, device=None, dtype=None, pin_memory=False):
        """Move the shadow, e.g. to pinned host memory when the GPU is full, and cast what is averaged; returns self."""
        if not self.off:
            pin = pin_memory and torch.cuda.is_available()
            moved = {n: t.to(device, dtype if n in self.averaged else None) for n, t in self.shadow.items()}
            self.shadow = {n: t.pin_memory() if pin else t for n, t in moved.items()}
        return self

    def state_dict(self):
        """{name: tensor}, the tensors themselves, with the model's names."""
        return dict(self.shadow)

    def load_state_dict(self, state):
        """Copy `state` in, if averaging is on; ValueError names what is missing, unexpected or of another shape."""
        wrong = [f"{n} missing" for n in self.shadow if n not in state]
        wrong += [f"{n} unexpected" for n in state if n not in self.shadow]
        wrong += [f"{n} is {tuple(state[n].shape)}, expected {tuple(t.shape)}"
                  for n, t in self.shadow.items() if n in state and state[n].shape != t.shape]
        if wrong:
            raise ValueError(f"EMA state of another model: {'; '.join(wrong[:5] + ['…'] * (len(wrong) > 5))}")
        for name, tensor in self.shadow.items() if not self.off else ():
            tensor.copy_(state[name])
