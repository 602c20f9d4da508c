"""Sums over the ranks of a step: tokens, loss and the norm of the gradient. One collective each way, one result on all.

Every rank gets the same bits and so takes the same decision (clip, skip, stop) without a further vote.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

from dist import agree


def global_token_count(labels: Sequence[Tensor], ignored: int = -100) -> Tensor:
    """Labels of this step that count, over all ranks: int64 scalar on the device of ``labels``, of any shapes."""
    count = torch.stack([(part != ignored).sum() for part in labels]).sum()
    torch.distributed.all_reduce(count)
    return count


def global_sums(*values: Tensor) -> list[float]:
    """Sum each scalar over all ranks, in fp64, in one collective."""
    total = torch.stack([value.detach().double().reshape(()) for value in values])
    torch.distributed.all_reduce(total)
    return total.tolist()


def global_maxima(table: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Every number of a table with the same keys on all ranks, as its maximum over them."""
    own = torch.tensor([list(row.values()) for row in table.values()], dtype=torch.int64)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group=agree.control_group())
    return {key: dict(zip(table[key], values, strict=True)) for key, values in zip(table, own.tolist(), strict=True)}


def check_presence(here: int, everywhere: float) -> None:
    """Raise ``ValueError`` if the ranks have gradients of different parameters.

    ``here`` counts this rank's gradients, ``everywhere`` is its sum over all ranks. Whatever an update sums over ranks
    would be wrong, or never come back.
    """
    world_size = torch.distributed.get_world_size()
    if everywhere != here * world_size:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} has gradients of {here} parameters, all {world_size} ranks together "
            f"have {everywhere:.0f} instead of {here * world_size}. Every rank must use the same parameters in a step."
        )


def squared_norm_share(gradients: Sequence[Tensor]) -> Tensor:
    """This rank's share of the squared 2-norm of the whole gradient: fp64 scalar; the shares of all ranks add up to it.

    ``gradients`` are DTensors or plain tensors, which are taken as equal on all ranks. What is replicated on n ranks
    counts 1/n on each, so that the sum over the world is right for every layout.
    """
    world_size = torch.distributed.get_world_size()
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient, world_size), []).append(local(gradient))
    shares = [
        torch.stack(torch._foreach_norm(tensors)).double().square().sum() / copies
        for copies, tensors in by_copies.items()
    ]
    return torch.stack(shares).sum()


def clip_(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale ``gradients`` in place so that their global ``norm`` becomes at most ``max_norm``; 0 does not clip."""
    if max_norm > 0 and norm > max_norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / (norm + 1e-6))


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor, world_size: int) -> int:
    if not isinstance(tensor, DTensor):
        return world_size
    mesh = tensor.device_mesh
    assert all(placement.is_replicate() or placement.is_shard() for placement in tensor.placements)
    copies = world_size // mesh.size()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= mesh.size(axis)
    return copies
