"""An exponential moving average of a model's parameters, in fp32, kept beside the model."""

import contextlib
import copy
import dataclasses

import torch


@dataclasses.dataclass(eq=False)
class EMA:
    """The averages, in fp32, of the parameters of `model` that are trainable when it is made.

    So are the `buffers` that are named. Everything else (other buffers, frozen weights) is read
    from the model on demand. The average follows from the weights of the steps alone, so only its
    tensors are saved. Made when the model is on
    its device, it is there, too. The warm-up is that of diffusers' EMAModel.
    """

    model: torch.nn.Module
    update_every: int = 1  # steps between updates of the averages
    decay: float = 0.9999  # the highest; 0: nothing is averaged, all is the model's own
    update_after: int = 0  # steps 1 to update_after + 1 copy the parameters
    inv_gamma: float = 1.0  # of the warm-up
    power: float = 0.75  # of the warm-up
    min_decay: float = 0.0  # the lowest; as high as `decay`: no warm-up
    buffers: tuple = ()  # names of those that are averaged, too

    def __post_init__(self):
        self.averages = {}  # by the name of the parameter or buffer
        self.stored = None
        if self.decay:
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    self.averages[name] = parameter.detach().clone().float()
            for name in self.buffers:
                self.averages[name] = self.model.get_buffer(name).clone().float()
        # Where each is: to make a state_dict at every step takes longer than the average itself.
        # Parameters may be replaced later, but not the layers that have them.
        self.sources = []
        for path in self.averages:
            layer, _, name = path.rpartition(".")
            self.sources.append((self.model.get_submodule(layer), name))

    def decay_at(self, step):
        """Decay after optimizer step number `step` (1 is the first); 0 copies the parameters.

        1 - (1 + s/inv_gamma)^-power within [min_decay, decay], for s = step - update_after - 1, the
        number of steps averaged before.
        """
        s = step - self.update_after - 1
        if s <= 0 or step <= self.update_every:  # the first update copies: no random weights
            return 0.0
        value = 1 - (1 + s / self.inv_gamma) ** -self.power
        return max(self.min_decay, min(self.decay, value))

    @torch.no_grad()
    def update(self, step):
        """Average in the weights after optimizer step `step`, if `update_every` divides it."""
        if step % self.update_every or not self.averages:
            return
        live = []
        for (layer, name), average in zip(self.sources, self.averages.values()):
            live.append(getattr(layer, name).to(average))
        torch._foreach_lerp_([*self.averages.values()], live, 1 - self.decay_at(step))

    def begin_anew(self, name):
        """Forget the past of the average of a buffer, which has been made anew."""
        if name in self.averages:
            self.averages[name].copy_(self.model.get_buffer(name))

    def copy_to(self, model):
        """Write the averaged weights into `model`; torch's error names what does not fit."""
        model.load_state_dict(self.state_dict())

    def store(self, model):
        """Keep a copy of the weights of `model` until `restore`."""
        assert self.stored is None, "the weights stored before have not been restored"
        self.stored = copy.deepcopy(model.state_dict())

    def restore(self, model):
        """Give `model` the weights that `store` kept, bit for bit."""
        model.load_state_dict(self.stored)
        self.stored = None

    @contextlib.contextmanager
    def applied(self, model):
        """Context in which `model` has the averaged weights; it ends with its own, bit for bit."""
        self.store(model)
        try:
            self.copy_to(model)
            yield
        finally:
            self.restore(model)

    def state_dict(self):
        """{name: tensor}, the tensors themselves, with the model's names."""
        return {**self.model.state_dict(), **self.averages}

    def load_state_dict(self, state):
        """Copy the averages of `state` in; ValueError names what does not fit.

        What is not averaged has been loaded with the model.
        """
        different = sorted(shapes(state) ^ shapes(self.state_dict()))
        if different:
            raise ValueError(f"EMA state of another model, which differs in {different[:5]}")
        for name, average in self.averages.items():
            average.copy_(state[name])


def shapes(state):
    """{(name, shape)} of the tensors."""
    return {(name, tuple(tensor.shape)) for name, tensor in state.items()}
