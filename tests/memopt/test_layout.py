"""Which rows a rank owns, under every placement that state can have, and what is refused."""

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memopt import layout
from tests.spawn import run_ranks

PLACEMENTS = {
    "fsdp": ((4,), [Shard(0)]),
    "ddp": ((4, 1), [Replicate(), Shard(0)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "turned": ((2, 2), [Shard(0), Replicate()]),
    "replicated": ((4,), [Replicate()]),
}
ROWS = (7, 1, 4, 2)


def own(rank: int, world_size: int, kind: str):
    shape, placements = PLACEMENTS[kind]
    mesh = init_device_mesh("cpu", shape)
    found = []
    for rows in ROWS:
        whole = torch.arange(3.0 * rows).view(rows, 3)
        parameter = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
        owned = layout.owned_rows(parameter)
        assert torch.equal(owned, layout.owned_part(whole, parameter))
        state = layout.as_state(owned.clone(), parameter)
        assert isinstance(state, DTensor) and torch.equal(state.full_tensor(), whole)
        found.append([int(row[0]) // 3 for row in owned])
        # the owners' rows reach everyone
        owned.mul_(2)
        layout.gather_updates([parameter])
        assert torch.equal(parameter.full_tensor(), 2 * whole)
        assert layout.sum_over_owners(torch.tensor([len(owned)]), parameter.device_mesh).item() == rows
    return found


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_each_row_has_one_owner(kind: str):
    results = run_ranks(4, own, kind)
    for index, rows in enumerate(ROWS):
        assert sorted(sum((found[index] for found in results), [])) == list(range(rows))


def share_plain(rank: int, world_size: int):
    group = torch.distributed.new_group(list(range(world_size)))
    mesh = DeviceMesh.from_group(group, "cpu")
    weight = torch.zeros(5, 2)
    placed = layout.as_replicated(weight, mesh)
    layout.owned_rows(placed).fill_(rank + 1)
    layout.gather_updates([placed])
    assert layout.gather_bytes([placed]) == (1 + world_size) * -(-5 // world_size) * 8
    return weight[:, 0].tolist()


def test_copies_of_a_plain_tensor_share_its_rows():
    assert run_ranks(2, share_plain) == [[1, 1, 1, 2, 2]] * 2
    assert run_ranks(3, share_plain) == [[1, 1, 2, 2, 3]] * 3


def refuse(rank: int, world_size: int):
    mesh = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (1, world_size))
    columns = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    both = distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(0)])
    fine = [distribute_tensor(torch.zeros(4, 4), mesh, [kind]) for kind in (Shard(0), Replicate())]
    return [layout.placement_problem(tensor) for tensor in (columns, both, *fine, torch.zeros(2))]


def test_rows_that_are_cut_are_refused():
    columns, both, *fine = run_ranks(2, refuse)[0]
    assert "Shard(dim=1)" in columns and "dimension 0 only" in columns and "on a mesh of (1, 2)" in both
    assert fine == [None] * 3


def gather_types(rank: int, world_size: int):
    """Parameters of two types cannot share a buffer."""
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = [
        distribute_tensor(torch.full((3, 2), float(rank)).to(dtype), mesh, [Replicate()], src_data_rank=None)
        for dtype in (torch.float32, torch.bfloat16, torch.float32)
    ]
    layout.gather_updates(parameters)
    return [parameter.to_local()[:, 0].float().tolist() for parameter in parameters]


def test_types_are_gathered_apart():
    assert run_ranks(2, gather_types) == [[[0, 0, 1]] * 3] * 2
