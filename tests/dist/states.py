"""Sharded state to save and load in tests: uneven rows, one row, no rows, and every kind of dtype."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

# the first DTensor imports this, which takes over a second: here once, and not in every forked rank
import torch._dynamo
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

# name -> rows, dtype. On 2, 3 and 4 ranks: uneven shards (7), empty shards (1), shards without a rest (12), no row
TENSORS = {
    "layers.0.weight": (7, torch.float32),
    "layers.0.codes": (7, torch.uint8),
    "norm.weight": (1, torch.bfloat16),
    "head.weight": (12, torch.float64),
    "counts": (5, torch.int64),
    "nothing": (0, torch.float32),
}
LAYOUTS = ("fsdp", "ddp", "hsdp", "state")


@functools.cache
def layout(name: str) -> tuple[DeviceMesh, list[Placement]]:
    """Mesh and placements of a layout; ``hsdp`` and ``state`` are 2 x 2. Made once a process."""
    world_size = torch.distributed.get_world_size()
    match name:
        case "fsdp":
            return init_device_mesh("cpu", (world_size,)), [Shard(0)]
        case "ddp":
            return init_device_mesh("cpu", (world_size, 1)), [Replicate(), Shard(0)]
        case "hsdp":
            return init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
        case "state":
            return init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)]
    raise KeyError(name)


def whole(name: str) -> torch.Tensor:
    """The values of one tensor, the same on every rank and in every test."""
    rows, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(len(name))
    if dtype.is_floating_point:
        return torch.randn(rows, 3, generator=generator).to(dtype)
    return torch.randint(0, 256, (rows, 3), generator=generator).to(dtype)


def build(layout_name: str, fill: float | None = None) -> dict[str, torch.Tensor]:
    """All tensors in a layout, and a plain counter; with ``fill`` everything has this one value."""
    mesh, placements = layout(layout_name)
    state: dict[str, torch.Tensor] = {}
    for name in TENSORS:
        values = whole(name) if fill is None else torch.full_like(whole(name), fill)
        state[name] = distribute_tensor(values, mesh, placements, src_data_rank=None)
    state["step"] = torch.tensor(42 if fill is None else int(fill))
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differing(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose dtype or local bits differ on this rank."""
    return [
        name
        for name in expected
        if state[name].dtype != expected[name].dtype or not torch.equal(local(state[name]), local(expected[name]))
    ]


def attempt(action: Callable[[], Any]) -> Any:
    """The result of ``action``, or its error as ``(class, message)``, which travels to the test's process."""
    try:
        return action()
    except (ValueError, RuntimeError, OSError) as error:
        return type(error).__name__, str(error)


class Warnings(logging.Handler):
    """Collects the messages of ``dist``'s loggers in a rank's process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("dist").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
