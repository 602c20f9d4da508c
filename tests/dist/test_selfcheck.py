"""The start-up check passes on healthy ranks of any number and layout, and finds collectives that lie."""

import pytest
import torch
import torch.distributed

from conf.schema import ParallelConfig
from dist.parallel import build_mesh
from dist.selfcheck import check_collectives
from tests.spawn import run_ranks


def check(rank: int, world_size: int, mode: str, shard: int | None, fault: str | None) -> None:
    mesh = build_mesh(ParallelConfig(mode=mode, shard=shard), world_size, "cpu")
    if fault is not None:
        act = getattr(torch.distributed, fault)

        def broken(tensor, *arguments, **options):
            act(tensor, *arguments, **options)
            tensor += rank == world_size - 1

        setattr(torch.distributed, fault, broken)
    check_collectives(torch.device("cpu"), mesh)


@pytest.mark.parametrize(
    "world_size, mode, shard", [(1, "fsdp", None), (3, "fsdp", None), (2, "ddp", None), (4, "hsdp", 2)]
)
def test_healthy_ranks_pass(world_size: int, mode: str, shard: int | None):
    run_ranks(world_size, check, mode, shard, None)


@pytest.mark.parametrize(
    "fault, words",
    [("all_reduce", "all_reduce"), ("all_gather_into_tensor", "all_gather|gradient"), ("broadcast", "broadcast")],
)
def test_a_collective_that_lies_is_named(fault: str, words: str):
    with pytest.raises(Exception, match=f"start-up check found ({words})"):
        run_ranks(2, check, "fsdp", None, fault)
