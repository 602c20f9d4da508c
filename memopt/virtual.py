"""Virtual parameters, which take no memory: B of a projected layer, which is 0 between steps (``memopt.subspace``).

Such a parameter is a view of a single 0 with strides of 0, so that whoever reads it reads what it is. It exists to
have a gradient, which DDP or FSDP2 reduce like any other. FSDP2 does not gather it: the extension points that a
parameter's local tensor may have (``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``) send nothing and take a buffer
of the gathered shape that nobody reads, alive as long as the unit is gathered.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def release(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Give up the memory of ``parameters``, which are 0. After sharding, before the first forward of ``model``."""
    chosen = {id(parameter) for parameter in parameters}
    for parameter in parameters:
        _set_local(parameter, _zeros_of_no_size(_local(parameter)))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for shard in group.fsdp_params:
                if id(shard.sharded_param) in chosen:
                    # what FSDP2 compares with to see that the parameter is the one it knows
                    shard._sharded_param_data = _local(shard.sharded_param).view(-1)


@contextmanager
def held(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Real zeros in place of ``parameters`` within the block, for an optimizer to write a step into."""
    views = [_local(parameter) for parameter in parameters]
    try:
        for parameter, view in zip(parameters, views, strict=True):
            _set_local(parameter, torch.zeros(view.shape, dtype=view.dtype, device=view.device))
        yield
    finally:
        for parameter, view in zip(parameters, views, strict=True):
            _set_local(parameter, view)


def _zeros_of_no_size(rows: Tensor) -> Tensor:
    view = torch.zeros((), dtype=rows.dtype, device=rows.device).expand(rows.shape)
    view.fsdp_pre_all_gather = _send_nothing  # type: ignore[attr-defined]
    view.fsdp_post_all_gather = partial(_take_buffer, rows.device)  # type: ignore[attr-defined]
    return view


def _send_nothing(
    mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], torch.Size]:
    # a mesh of one rank copies its first input instead of gathering, so that there must be one
    inputs = (torch.empty(0, device=mesh.device_type),) if mesh.size() == 1 else ()
    return inputs, outer_size


def _take_buffer(
    device: torch.device,
    gathered: tuple[Tensor, ...],
    outer_size: torch.Size,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    if out is not None:
        # FSDP2 has given the buffer that it was told of its memory back
        return None
    buffer = torch.empty(outer_size, dtype=dtype, device=device)
    return buffer, (buffer,)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _set_local(parameter: nn.Parameter, values: Tensor) -> None:
    # both ways keep the parameter the object that hooks, buckets and optimizers know
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values
    else:
        parameter.data = values
