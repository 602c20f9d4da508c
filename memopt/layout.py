"""Which rows of a parameter a rank keeps optimizer state for, and how that state looks from outside.

One layout for every mode: state is sharded on dimension 0 over *all* data-parallel ranks. Under FSDP these are the rows
that the rank holds anyway; under DDP and HSDP they are a slice of them (ZeRO-1; Rajbhandari et al., arXiv 1910.02054),
so that a step is local and ends in one all-gather of the updated rows over the replicas. A row is never cut.
Outside, state is a DTensor of the parameter's global shape, so that a checkpoint of one layout loads into any other.

Parameters are plain tensors or DTensors on a mesh of one or two axes, one of them at most placed Replicate, one at most
Shard(0). ``as_replicated`` makes such a DTensor of a plain tensor that a process group holds copies of.
"""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# rows are gathered in buffers of this size: large enough for bandwidth, small beside the parameters
GATHER_BUFFER_BYTES = 32 * 2**20


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of a parameter or gradient that this rank holds: a view, of its own shape if it is a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned_rows(tensor: Tensor) -> Tensor:
    """The slice of ``local_rows`` that this rank keeps state for: a view, possibly of 0 rows."""
    rows = local_rows(tensor)
    if not _is_replicated(tensor):
        return rows
    mesh, axis = _replicas(tensor)
    return rows[slice(*_owned_range(len(rows), mesh, axis))]


def first_row(tensor: Tensor) -> int:
    """Where ``local_rows`` begin in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    first, rows = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            start, stop = _owned_range(rows, tensor.device_mesh, axis)
            first, rows = first + start, stop - start
    return first


def owned_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """The rows of ``whole``, a tensor of all rows on every rank, that this rank keeps state for: a view."""
    if not isinstance(parameter, DTensor):
        return whole
    rows = whole
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            rows = rows[slice(*_owned_range(len(rows), parameter.device_mesh, axis))]
    if _is_replicated(parameter):
        mesh, axis = _replicas(parameter)
        rows = rows[slice(*_owned_range(len(rows), mesh, axis))]
    return rows


def as_state(owned: Tensor, parameter: Tensor) -> Tensor:
    """Wrap state of this rank's owned rows as a DTensor shaped like the parameter; plain for a plain parameter.

    Args:
        owned: (owned rows, ...) of any dtype; the result shares its storage. Dimensions after the first may differ
            from the parameter's.
        parameter: the parameter the state belongs to.
    """
    if not isinstance(parameter, DTensor):
        return owned
    shape = torch.Size((parameter.shape[0], *owned.shape[1:]))
    placements = [Shard(0)] * parameter.device_mesh.ndim
    stride = torch.empty(shape, device="meta").stride()
    # a mesh of (Shard, Replicate) is in the order of the state already
    turn = parameter.device_mesh.ndim == 2 and parameter.placements[0].is_replicate()
    mesh = state_mesh(parameter.device_mesh) if turn else parameter.device_mesh
    return DTensor.from_local(owned, mesh, placements, run_check=False, shape=shape, stride=stride)


def owned_state(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows of saved state: a DTensor of any layout (collective if it is not ``as_state``'s), or whole."""
    if isinstance(value, DTensor):
        own = as_state(owned_rows(parameter.detach()), parameter)
        if isinstance(own, DTensor) and (value.device_mesh, value.placements) == (own.device_mesh, own.placements):
            return value.to_local()
        value = value.full_tensor()
    return owned_part(value, parameter)


def as_replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor that every rank of a one-axis ``mesh`` holds a copy of, as a DTensor that shares its storage."""
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)


def placement_problem(tensor: Tensor) -> str | None:
    """Why state cannot be laid out for ``tensor``; None if it can."""
    if not isinstance(tensor, DTensor):
        return None
    kinds = [_kind(placement) for placement in tensor.placements]
    if sorted(kinds) in (["replicate"], ["shard"], ["replicate", "shard"]):
        return None
    return (
        f"is placed {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}; state needs Shard(0), "
        "Replicate() or one of each. Shard parameters on dimension 0 only (fully_shard does)"
    )


def state_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the state of a parameter on ``mesh``: of two axes, (Replicate, Shard(0)), in the other order."""
    if mesh.ndim == 1:
        return mesh
    key = id(mesh)
    if key not in _STATE_MESHES:
        names = mesh.mesh_dim_names or ("replicate", "shard")
        turned = DeviceMesh.from_group(
            [mesh.get_group(1), mesh.get_group(0)],
            mesh.device_type,
            mesh=mesh.mesh.t(),
            mesh_dim_names=(names[1], names[0]),
        )
        # the mesh is kept beside its turned twin so that its id cannot be reused
        _STATE_MESHES[key] = (mesh, turned)
    return _STATE_MESHES[key][1]


def sum_over_owners(
    values: Tensor, mesh: DeviceMesh | None, op: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM
) -> Tensor:
    """Add up ``values``, one rank's share each, over all ranks of the parameters' ``mesh``; in place, collective.

    ``mesh`` None: there is one owner of everything, this process.
    """
    if mesh is not None:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                torch.distributed.all_reduce(values, op, group=mesh.get_group(axis))
    return values


_STATE_MESHES: dict[int, tuple[DeviceMesh, DeviceMesh]] = {}


@torch.no_grad()
def gather_updates(parameters: Sequence[Tensor]) -> None:
    """Give every replica the rows that their owners have updated. Collective over the replicas; in place.

    Parameters that are not replicated are left alone.
    """
    for bucket in _buckets(parameters):
        _gather_bucket(bucket)


def gather_bytes(parameters: Sequence[Tensor]) -> int:
    """Bytes that ``gather_updates`` allocates at a time, at most."""
    return max((_send_bytes(bucket) * (1 + _copies(bucket[0])) for bucket in _buckets(parameters)), default=0)


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for parameter in filter(_is_replicated, parameters):
        rows = local_rows(parameter)
        last = buckets[-1][-1] if buckets else None
        if last is None or room <= 0 or last.dtype != parameter.dtype or _replicas(last) != _replicas(parameter):
            buckets.append([])
            room = GATHER_BUFFER_BYTES
        buckets[-1].append(parameter)
        room -= rows.nbytes
    return buckets


def _send_bytes(parameters: Sequence[Tensor]) -> int:
    copies = _copies(parameters[0])
    return sum(_rows_per_owner(len(rows), copies) * rows[:1].nbytes for rows in map(local_rows, parameters))


def _gather_bucket(parameters: Sequence[Tensor]) -> None:
    mesh, axis = _replicas(parameters[0])
    copies, group = mesh.size(axis), mesh.get_group(axis)
    # every owner sends the same number of rows of each parameter; the last owners of uneven ones send padding
    widths = [_rows_per_owner(len(rows), copies) * rows[:1].numel() for rows in map(local_rows, parameters)]
    send = local_rows(parameters[0]).new_zeros(sum(widths))
    for parameter, part in zip(parameters, torch.split(send, widths), strict=True):
        own = owned_rows(parameter)
        part[: own.numel()].copy_(own.reshape(-1))
    received = send.new_empty(copies * send.numel())
    torch.distributed.all_gather_single(received, send, group=group)
    for parameter, part in zip(parameters, torch.split(received.view(copies, -1), widths, dim=1), strict=True):
        rows = local_rows(parameter)
        rows.copy_(part.reshape(-1)[: rows.numel()].view_as(rows))


def _is_replicated(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(
        placement.is_replicate() and tensor.device_mesh.size(axis) > 1
        for axis, placement in enumerate(tensor.placements)
    )


def _replicas(tensor: Tensor) -> tuple[DeviceMesh, int]:
    """The mesh of a replicated parameter and its axis of copies."""
    assert isinstance(tensor, DTensor) and placement_problem(tensor) is None, tensor
    (axis,) = (axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
    return tensor.device_mesh, axis


def _copies(tensor: Tensor) -> int:
    mesh, axis = _replicas(tensor)
    return mesh.size(axis)


def _kind(placement: Placement) -> str:
    if placement.is_replicate():
        return "replicate"
    return "shard" if placement == Shard(0) else "other"


def _owned_range(rows: int, mesh: DeviceMesh, axis: int) -> tuple[int, int]:
    chunk = _rows_per_owner(rows, mesh.size(axis))
    start = min(rows, mesh.get_local_rank(axis) * chunk)
    return start, min(rows, start + chunk)


def _rows_per_owner(rows: int, owners: int) -> int:
    # the split of torch.chunk, which DTensor's Shard uses
    return -(-rows // owners)
