"""Which rows of a parameter a rank keeps optimizer state for, and how that state looks from outside.

One layout for every mode: state is sharded on dimension 0 over *all* data-parallel ranks. Under FSDP these are the rows
that the rank holds anyway; under DDP and HSDP they are a slice of them (ZeRO-1; Rajbhandari et al., arXiv 1910.02054),
so that a step is local and ends in one all-gather of the updated rows over "dp_replicate". A row is never cut.
Outside, state is a DTensor of the parameter's global shape, so that a checkpoint of one layout loads into any other.
"""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

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
    start, stop = _owned_range(len(rows), tensor.device_mesh)  # type: ignore[attr-defined]
    return rows[start:stop]


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
    mesh = state_mesh(parameter.device_mesh)
    return DTensor.from_local(owned, mesh, placements, run_check=False, shape=shape, stride=stride)


def state_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the state: the parameter's, with the axes in the order ("fsdp", "dp_replicate")."""
    if mesh.ndim == 1:
        return mesh
    assert mesh.mesh_dim_names == ("dp_replicate", "fsdp")
    key = id(mesh)
    if key not in _STATE_MESHES:
        groups = [mesh.get_group("fsdp"), mesh.get_group("dp_replicate")]
        turned = DeviceMesh.from_group(
            groups, mesh.device_type, mesh=mesh.mesh.t(), mesh_dim_names=("fsdp", "dp_replicate")
        )
        # the mesh is kept beside its turned twin so that its id cannot be reused
        _STATE_MESHES[key] = (mesh, turned)
    return _STATE_MESHES[key][1]


_STATE_MESHES: dict[int, tuple[DeviceMesh, DeviceMesh]] = {}


@torch.no_grad()
def gather_updates(parameters: Sequence[Tensor]) -> None:
    """Give every replica the rows that their owners have updated. Collective over "dp_replicate"; in place.

    Parameters that are not replicated are left alone.
    """
    replicated = [parameter for parameter in parameters if _is_replicated(parameter)]
    bucket: list[Tensor] = []
    size = 0
    for parameter in replicated:
        bucket.append(parameter)
        size += local_rows(parameter).nbytes
        if size >= GATHER_BUFFER_BYTES:
            _gather_bucket(bucket)
            bucket, size = [], 0
    if bucket:
        _gather_bucket(bucket)


def _gather_bucket(parameters: Sequence[Tensor]) -> None:
    mesh = parameters[0].device_mesh  # type: ignore[attr-defined]
    copies, group = mesh.size(0), mesh.get_group("dp_replicate")
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
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return False
    assert tensor.placements == (Replicate(), Shard(0)), tensor.placements
    return tensor.device_mesh.size(0) > 1


def _owned_range(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    chunk = _rows_per_owner(rows, mesh.size(0))
    start = min(rows, mesh.get_local_rank("dp_replicate") * chunk)
    return start, min(rows, start + chunk)


def _rows_per_owner(rows: int, owners: int) -> int:
    # the split of torch.chunk, which DTensor's Shard uses
    return -(-rows // owners)
