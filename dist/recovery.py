"""Making a step again after memory has run out in it, in a single process.

Several ranks cannot: the others are within a collective (``dist.out_of_memory``). What the failed attempt has left must
not reach the gradients of the next one, and FSDP2 keeps them in private places: ``is_exact`` tries whether
``drop_gradients`` still finds them all.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

TRIAL_WIDTH = 8


class _TrialError(Exception):
    """Stands for a lack of memory."""


def drop_gradients(model: nn.Module) -> None:
    """Forget what a forward or backward that failed has left, so that the step can be made again.

    FSDP2 has gradients in three places, of which ``zero_grad`` reaches the one that is registered at the moment:
    another one would be added to the next backward.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for shard in group.fsdp_params:
                    shard.sharded_param.grad = None
                    shard.unsharded_accumulated_grad = None
                    if hasattr(shard, "_unsharded_param"):
                        shard._unsharded_param.grad = None


def is_exact(model: nn.Module, device: torch.device) -> bool:
    """Whether ``drop_gradients`` leaves nothing in a model such as ``model``: tried on a small one, by one process.

    A step of two microbatches fails in the second one's backward, with gradients reduced each time or at the end, and
    is made again; its gradients must be those of a step that did not fail.
    """
    if not isinstance(model, FSDPModule):
        return True
    try:
        return all(_recovers(every, device) for every in (True, False))
    except (AttributeError, RuntimeError, TypeError):
        # a torch whose private fields have other names
        return False


def _recovers(every: bool, device: torch.device) -> bool:
    clean, failed = _trial_model(device), _trial_model(device)
    _trial_step(clean, every, device)
    outputs: list[torch.Tensor] = []

    def break_second(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        outputs.append(output)
        if len(outputs) == 2:
            output.register_hook(_fail)  # type: ignore[no-untyped-call]

    hook = failed[1].register_forward_hook(break_second)
    try:
        _trial_step(failed, every, device)
        return False
    except _TrialError:
        hook.remove()
    drop_gradients(failed)
    _trial_step(failed, every, device)
    pairs = zip(clean.parameters(), failed.parameters(), strict=True)
    return all(_same(one.grad, other.grad) for one, other in pairs)


def _trial_model(device: torch.device) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(TRIAL_WIDTH, TRIAL_WIDTH) for _ in range(3)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (1 + number))
    model.to(device)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _trial_step(model: nn.Module, every: bool, device: torch.device) -> None:
    assert isinstance(model, FSDPModule)
    x = torch.linspace(-1, 1, 2 * TRIAL_WIDTH, device=device).view(2, TRIAL_WIDTH)
    for last in (False, True):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or every)
        model(x).square().sum().backward()


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    sharded = isinstance(one, DTensor) and isinstance(other, DTensor)
    return sharded and torch.equal(one.to_local(), other.to_local())  # type: ignore[union-attr]


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise _TrialError
