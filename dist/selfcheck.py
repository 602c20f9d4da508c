"""Whether the ranks can compute together, tried on a few numbers before the model is built.

A network or a library that drops, doubles or mixes up data shows in a loss curve only. Checked: sum, maximum, gather
and scatter of the run's own group, and the gradient of a tiny layer that is sharded as the model will be.
"""

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dist.reduce import local


def check_collectives(device: torch.device, mesh: DeviceMesh) -> None:
    """Run them all; collective.

    Raises:
        RuntimeError: on a rank that has received something else than was sent; the message names the collective.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    numbers = torch.arange(1, world_size + 1, dtype=torch.float32, device=device)
    mine = numbers[rank : rank + 1].clone()
    summed, largest, gathered = mine.clone(), mine.clone(), torch.empty_like(numbers)
    torch.distributed.all_reduce(summed)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_gather_into_tensor(gathered, mine)
    first = mine.clone()
    torch.distributed.broadcast(first, 0)
    total = float(numbers.sum())
    _compare("all_reduce(SUM)", summed, torch.full_like(mine, total))
    _compare("all_reduce(MAX)", largest, numbers[-1:])
    _compare("all_gather", gathered, numbers)
    _compare("broadcast", first, numbers[:1])
    _compare("the sum of gradients", sharded_gradient(device, mesh, float(mine)), torch.full((1, 2), total))


def sharded_gradient(device: torch.device, mesh: DeviceMesh, value: float) -> torch.Tensor:
    """Gradient of a layer's weights (rows, 2) where this rank's input is ``value``: its rows here, cut to one.

    Gradients are summed over the ranks (``dist.parallel``): the sum of all ranks' values. One process is not sharded.
    """
    layer = nn.Linear(2, mesh.size(), bias=False, device=device)
    nn.init.ones_(layer.weight)
    if mesh.size() > 1:
        fully_shard(layer, mesh=mesh)
        assert isinstance(layer, FSDPModule)
        # as the model: the loss is normalised already, and gloo cannot multiply before it sums
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    layer(torch.full((1, 2), value, device=device)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    return local(gradient)[:1].cpu()


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    # a rank without rows has nothing to compare
    if found.numel() and not torch.equal(found.cpu(), expected.cpu()):
        rank = torch.distributed.get_rank()
        raise RuntimeError(
            f"the start-up check found {what} wrong on rank {rank}: {found.tolist()} instead of {expected.tolist()}. "
            "Look at the network and at the collective library's version; "
            "health.self_check=false starts all the same."
        )
