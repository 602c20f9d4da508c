"""Adam on vectors: torch's numbers, and the same bits whatever else is in the call."""

import pytest
import torch

from kernels.gefen import Gauges, Rule
from kernels.vectors import adam_step, workspace_bytes

SIZES = [(7,), (), (1,), (0,), (33,)]


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def rule(step: int, **changes) -> Rule:
    return Rule(**{"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": step, **changes})


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(size) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_adamw(dtype: torch.dtype):
    params, first, second = draw(0, dtype), zeros(), zeros()
    theirs = [torch.nn.Parameter(param.double()) for param in params]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    gauges = Gauges.zeros(torch.device("cpu"))
    for step in range(1, 6):
        grads = draw(step, dtype)
        adam_step(params, grads, first, second, rule(step), gauges)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.double()
        optimizer.step()
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    for param, parameter in zip(params, theirs, strict=True):
        assert param.dtype == dtype
        torch.testing.assert_close(param.double(), parameter.detach(), rtol=rtol, atol=rtol)
    assert 0.5 < gauges.max_update.item() < 10


def test_each_vector_as_if_it_were_alone():
    whole = draw(0), draw(1), [m.abs() for m in draw(2)], [v.abs() for v in draw(3)]
    parts = [[tensor.clone() for tensor in tensors] for tensors in whole]
    gauges = Gauges.zeros(torch.device("cpu"))
    adam_step(*whole, rule(3), gauges)
    for param, grad, m, v in zip(*parts, strict=True):
        for piece in zip(*(tensor.view(-1).split(3) for tensor in (param, grad, m, v)), strict=True):
            adam_step(*([tensor] for tensor in piece), rule(3), gauges)
    for tensors, others in zip(whole, parts, strict=True):
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


def test_an_entry_without_finite_gradient_stays():
    params, first, second = draw(0), [m.abs() for m in draw(2)], [v.abs() for v in draw(3)]
    before = [[tensor.clone() for tensor in tensors] for tensors in (params, first, second)]
    grads = draw(1)
    grads[0][2], grads[4][5] = float("nan"), float("-inf")
    adam_step(params, grads, first, second, rule(3), Gauges.zeros(torch.device("cpu")))
    for tensors, old in zip((params, first, second), before, strict=True):
        assert tensors[0][2] == old[0][2] and tensors[4][5] == old[4][5]
        assert (tensors[0] != old[0]).sum() == 6 and (tensors[4] != old[4]).sum() == 32


def test_the_update_is_cut_and_reported():
    params, gauges = [torch.zeros(4)], Gauges.zeros(torch.device("cpu"))
    adam_step(params, [torch.full((4,), 3.0)], [torch.zeros(4)], [torch.zeros(4)], rule(1, max_update=0.25), gauges)
    torch.testing.assert_close(params[0], torch.full((4,), -0.0025))
    assert gauges.max_update.item() == 0.25


def test_nothing_to_do():
    gauges = Gauges.zeros(torch.device("cpu"))
    adam_step([], [], [], [], rule(1), gauges)
    adam_step([torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)], rule(1), gauges)
    assert workspace_bytes([torch.zeros(0)]) == 0 and gauges.max_update.item() == 0
