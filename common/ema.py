"""An exponential moving average of a model's parameters, in fp32, kept beside the model."""
import contextlib

import torch


def decay_at(step, decay=0.9999, warmup="power", inv_gamma=1.0, power=2 / 3, min_decay=0.0, update_after=0):
    """Decay used after optimizer step number `step` (1 is the first); 0 copies the parameters.

    warmup "power": 1 - (1 + s/inv_gamma)^-power; "ratio": (1 + s) / (10 + s); "none": `decay` at once, with
    s = step - update_after - 1; kept within [min_decay, decay]. Up to and including s = 0 the parameters are copied.
    """
    s = step - update_after - 1
    if s <= 0:
        return 0.0
    value = {"power": 1 - (1 + s / inv_gamma) ** -power, "ratio": (1 + s) / (10 + s), "none": decay}[warmup]
    return max(min_decay, min(decay, value))


class EMA:
    """Shadow of everything in `model.state_dict()`: trainable parameters averaged in fp32, all else copied.

    The average is a pure function of the steps' parameters: nothing but the tensors is saved.
    """

    def __init__(self, model, update_every=1, **decay):
        """`decay`: the arguments of `decay_at` but the step."""
        self.update_every, self.decay = update_every, decay
        self.live = model.state_dict(keep_vars=True)
        self.averaged = {n for n, t in self.live.items() if t.requires_grad and t.is_floating_point()}
        self.shadow = {n: t.detach().to(torch.float32 if n in self.averaged else t.dtype, copy=True)
                       for n, t in self.live.items()}
        self._pair()

    def _pair(self):
        """The lists for torch._foreach_*, made once: walking 300 names costs as much as the arithmetic."""
        def lists(names):
            return [self.shadow[n] for n in names], [self.live[n].detach() for n in names]
        self.lerped = lists([n for n in self.live if n in self.averaged])
        self.copied = lists([n for n in self.live if n not in self.averaged])
        self.alike = all(s.dtype == p.dtype and s.device == p.device for s, p in zip(*self.lerped))

    def decay_at(self, step):
        return decay_at(step, **self.decay)

    @torch.no_grad()
    def update(self, step):
        """Take in the parameters after optimizer step number `step`, if it is one of every `update_every`."""
        if step % self.update_every:
            return
        shadow, live = self.lerped
        if not self.alike:
            live = [p.to(s.device, s.dtype) for s, p in zip(shadow, live)]
        torch._foreach_lerp_(shadow, live, 1 - self.decay_at(step))
        if self.copied[0]:
            torch._foreach_copy_(*self.copied)

    @torch.no_grad()
    def copy_to(self, model):
        """Write the averages into `model`, which has the same names."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(self.shadow[name])

    @contextlib.contextmanager
    def applied(self, model):
        """Context in which `model` holds the averages; on leaving it, its own weights return bit for bit."""
        stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.copy_to(model)
        try:
            yield model
        finally:
            with torch.no_grad():
                for name, tensor in model.state_dict(keep_vars=True).items():
                    tensor.copy_(stored[name])

    def to(self, device=None, pin_memory=False):
        """Move the shadow, e.g. to pinned host memory when the GPU is full; returns self."""
        self.shadow = {n: t.to(device) for n, t in self.shadow.items()}
        if pin_memory and torch.cuda.is_available():
            self.shadow = {n: t.pin_memory() for n, t in self.shadow.items()}
        self._pair()
        return self

    def state_dict(self):
        """{name: tensor}, the tensors themselves: names and dtypes of the model, but fp32 where averaged."""
        return dict(self.shadow)

    @torch.no_grad()
    def load_state_dict(self, state):
        """Copy `state` in; ValueError names what is missing, unexpected or of another shape."""
        wrong = [f"{n} missing" for n in self.shadow if n not in state]
        wrong += [f"{n} unexpected" for n in state if n not in self.shadow]
        wrong += [f"{n} is {tuple(state[n].shape)}, expected {tuple(t.shape)}"
                  for n, t in self.shadow.items() if n in state and state[n].shape != t.shape]
        if wrong:
            raise ValueError("EMA state of another model: " + "; ".join(wrong[:5])
                             + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""))
        for name, tensor in self.shadow.items():
            tensor.copy_(state[name])
