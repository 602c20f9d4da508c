"""The rank that is slow is found, on every rank the same."""

import torch

from dist import skew
from dist.skew import fixed_work_seconds, measure_skew
from tests.spawn import run_ranks


def measure_with_a_slow_rank(rank: int, world_size: int) -> dict:
    seconds = iter([9.0, 3.0 if rank == 1 else 1.0, 9.0])
    skew._timed_loop = lambda: next(seconds)
    return measure_skew(torch.device("cpu"), data_wait_seconds=0.5 if rank == 2 else 0.1)


def test_the_slow_rank_is_found():
    results = run_ranks(3, measure_with_a_slow_rank)
    assert results[0] == results[1] == results[2]
    assert results[0] == {"slowest_rank": 1, "slowdown": 3.0, "data_rank": 2, "data_wait_seconds": 0.5}


def test_the_work_takes_time():
    assert fixed_work_seconds(torch.device("cpu")) > 0
