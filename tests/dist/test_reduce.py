"""Sums over ranks, against the same sums on whole tensors.

Background: a norm that is taken of one rank's shard is low by the square root of the number of shards and differs by
rank, so that each rank clips by a factor of its own; a norm summed over replicas is too high.
"""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dist.reduce import check_presence, clip_, global_sums, global_token_count, local, squared_norm_share
from tests.spawn import run_ranks

SHAPES = [(7, 3), (1, 5), (12, 2), (3,)]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def norm_and_clip(rank: int, world_size: int, mesh_shape: tuple[int, ...]):
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Shard(0)] if len(mesh_shape) == 1 else [Replicate(), Shard(0)]
    sharded = [distribute_tensor(gradient, mesh, placements) for gradient in gradients()]
    # a plain tensor is the same on every rank
    everything = [*sharded, torch.full((4,), 2.0)]
    (squared,) = global_sums(squared_norm_share(everything))
    clip_(everything, math.sqrt(squared), 0.5)
    (clipped,) = global_sums(squared_norm_share(everything))
    untouched = [local(tensor).clone() for tensor in everything]
    clip_(everything, math.sqrt(clipped), 0.0)
    clip_(everything, math.sqrt(clipped), 1e9)
    assert all(torch.equal(local(tensor), before) for tensor, before in zip(everything, untouched, strict=True))
    return squared, clipped


@pytest.mark.parametrize("world_size, mesh_shape", [(1, (1,)), (2, (2,)), (3, (3, 1)), (4, (2, 2)), (4, (4,))])
def test_norm_of_the_whole_gradient_on_every_rank(world_size: int, mesh_shape: tuple[int, ...]):
    expected = sum(gradient.double().square().sum().item() for gradient in gradients()) + 16
    results = run_ranks(world_size, norm_and_clip, mesh_shape)
    assert results == [results[0]] * world_size, "ranks that differ by one bit clip differently"
    assert results[0][0] == pytest.approx(expected, rel=1e-6)
    assert results[0][1] == pytest.approx(0.25, rel=1e-5)


def count_and_sum(rank: int, world_size: int):
    labels = [torch.tensor([[1, -100, 3]]), torch.full((rank, 3), 7)]
    return int(global_token_count(labels)), global_sums(torch.tensor(0.1 * rank), torch.tensor(rank))


def test_counts_and_sums_of_different_ranks():
    for count, (total, ranks) in run_ranks(3, count_and_sum):
        assert count == 3 * 2 + 3 * (0 + 1 + 2)
        assert total == pytest.approx(0.3) and ranks == 3.0


def count_gradients(rank: int, world_size: int, here: list[int]):
    (everywhere,) = global_sums(torch.tensor(float(here[rank])))
    try:
        check_presence(here[rank], everywhere)
    except ValueError as error:
        return str(error)


def test_ranks_with_gradients_of_different_parameters_are_told():
    assert run_ranks(2, count_gradients, [3, 3]) == [None, None]
    first, second = run_ranks(2, count_gradients, [3, 2])
    assert "rank 0 has gradients of 3 parameters, all 2 ranks together have 5 instead of 6" in first
    assert "rank 1 has gradients of 2 parameters" in second
