"""Exponential moving average of a model's parameters, in fp32."""

import contextlib
import copy
import dataclasses

import torch


@dataclasses.dataclass(eq=False)
class EMA:
    """Averages, in fp32, of the parameters of `model` that are trainable when the EMA is created.

    The named `buffers` are averaged as well. Everything else (other buffers, frozen weights) is
    read from the model on demand. The averages stay on the device where the model was at creation.
    The decay warms up as in diffusers' EMAModel.
    """

    model: torch.nn.Module
    update_every: int = 1  # steps between updates of the averages
    decay: float = 0.9999  # maximum decay; 0: no averaging, use the model's own weights
    update_after: int = 0  # steps 1 to update_after + 1 copy the parameters
    inv_gamma: float = 1.0  # warm-up, see `decay_at`
    power: float = 0.75  # warm-up, see `decay_at`
    min_decay: float = 0.0  # minimum decay; equal to `decay`: no warm-up
    buffers: tuple = ()  # names of buffers to average

    def __post_init__(self):
        self.averages = {}  # {name of parameter or buffer: average}
        self.stored = None
        if self.decay:
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    self.averages[name] = parameter.detach().clone().float()
            for name in self.buffers:
                self.averages[name] = self.model.get_buffer(name).clone().float()
        # (layer, attribute) behind each average. Making a state_dict at every step would take
        # longer than the averaging. Parameters may be replaced later, but not their layers.
        self.sources = []
        for path in self.averages:
            layer, _, name = path.rpartition(".")
            self.sources.append((self.model.get_submodule(layer), name))

    def decay_at(self, step):
        """The decay after optimizer step `step` (counted from 1); a decay of 0 copies parameters.

        It is 1 - (1 + s/inv_gamma)^-power, clamped to [min_decay, decay], where s = step -
        update_after - 1 is the number of steps already averaged.
        """
        s = step - self.update_after - 1
        if s <= 0 or step <= self.update_every:  # so that the average excludes the initial weights
            return 0.0
        value = 1 - (1 + s / self.inv_gamma) ** -self.power
        return max(self.min_decay, min(self.decay, value))

    @torch.no_grad()
    def update(self, step):
        """Update the averages after optimizer step `step`, if `update_every` divides it."""
        if step % self.update_every or not self.averages:
            return
        live = []
        for (layer, name), average in zip(self.sources, self.averages.values()):
            live.append(getattr(layer, name).to(average))
        torch._foreach_lerp_([*self.averages.values()], live, 1 - self.decay_at(step))

    def restart(self, name):
        """Restart the average of a buffer that was reinitialized."""
        if name in self.averages:
            self.averages[name].copy_(self.model.get_buffer(name))

    def copy_to(self, model):
        """Copy the averaged weights to `model`; torch's error names what differs."""
        model.load_state_dict(self.state_dict())

    def store(self, model):
        """Keep a copy of the weights of `model` for `restore`."""
        assert self.stored is None, "the weights stored before have not been restored"
        self.stored = copy.deepcopy(model.state_dict())

    def restore(self, model):
        """Copy the weights that `store` kept to `model`, bit for bit."""
        model.load_state_dict(self.stored)
        self.stored = None

    @contextlib.contextmanager
    def applied(self, model):
        """Context in which `model` has the averaged weights; its own are restored bit for bit."""
        self.store(model)
        try:
            self.copy_to(model)
            yield
        finally:
            self.restore(model)

    def state_dict(self):
        """{name: tensor} with the names of the model's state_dict; no copies."""
        return {**self.model.state_dict(), **self.averages}

    def load_state_dict(self, state):
        """Copy the averages from `state`; a ValueError names what differs.

        All other entries must fit, too, but are not copied: they are loaded with the model.
        """
        different = sorted(shapes(state) ^ shapes(self.state_dict()))
        if different:
            raise ValueError(f"EMA state of another model, which differs in {different[:5]}")
        for name, average in self.averages.items():
            average.copy_(state[name])


def shapes(state):
    """{(name, shape)} of the tensors in `state`."""
    return {(name, tuple(tensor.shape)) for name, tensor in state.items()}
