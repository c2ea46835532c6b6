"""The optimizer step in mixed precision. Overflows are tested with the scripts."""
import contextlib

import pytest
import torch
from helpers import CPU, same
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from common import amp, optim


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    return model, optim.make(model, "muon", 0.1, 0.01)


def backward(model, step, scaler):
    model.zero_grad()
    torch.manual_seed(step)
    scaler.scale(model(torch.randn(6, 4)).float().square().mean()).backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("limit, tolerance", [(0.0, 0.0), (1000.0, 0.0), (0.01, 1e-6)])
def test_a_step_is_the_plain_one_with_all_gradients_of_the_model_clipped_together(
        precision, limit, tolerance):
    model, optimizers = make()
    plain, plain_optimizers = make()
    scaler = amp.scaler(CPU, precision)
    for step in range(4):
        backward(model, step, scaler)
        norm, stepped = amp.step(scaler, optimizers, limit)
        scaler.update()
        backward(plain, step, amp.scaler(CPU, "fp32"))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), limit or torch.inf)
        for optimizer in plain_optimizers:
            optimizer.step()
        assert stepped and norm > 0.01
        assert_close(norm, expected)
    # Equal bit for bit, unless gradients were clipped.
    assert_close(model.state_dict(), plain.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_autocast_runs_products_in_the_precision_and_says_nothing(precision):
    with amp.autocast(CPU, precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == amp.DTYPES[precision]


class CountCasts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def casts_of_two_steps(context):
    """Take two steps of three chunks each: (number of casts in forward passes, all gradients)."""
    model, _ = make()
    count = 0
    gradients = []
    for _ in range(2):
        with context(CPU):
            for chunk in range(3):
                torch.manual_seed(chunk)
                x = torch.randn(6, 4, dtype=torch.bfloat16)
                with CountCasts() as casts, amp.autocast(CPU, "bf16"):
                    loss = model(x).square().mean()
                count += casts.count
                loss.backward()
        for parameter in model.parameters():
            gradients.append(parameter.grad.clone())
            parameter.data *= 2  # earlier casts are now outdated
    return count, gradients


def test_weights_are_cast_once_for_all_chunks_of_a_step_and_gradients_stay_the_same():
    count, gradients = casts_of_two_steps(amp.shared_cast_cache)
    plain_count, plain_gradients = casts_of_two_steps(lambda device: contextlib.nullcontext())
    assert plain_count == 3 * count and count >= 8  # four parameters in two steps
    assert same(gradients, plain_gradients)


def test_outside_the_autocast_of_a_chunk_a_step_is_in_full_precision():
    with amp.shared_cast_cache(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        with amp.autocast(CPU, "bf16"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
