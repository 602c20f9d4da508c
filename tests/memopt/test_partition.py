"""Background: the published rules look at a flattened tensor on one rank; under sharding that gives every world size
other blocks. Ours sees rows, and decides from sums over ranks."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from memopt import partition
from memopt.partition import LEARNED, check_block, choose, known_period, statistics

COLUMNS = 768
"""Row length with divisors that do not divide each other: 2^8 x 3."""


def planted_gradient(period: int, columns: int = COLUMNS, rows: int = 64, seed: int = 0) -> Tensor:
    """Normal values whose standard deviation is drawn anew every ``period`` entries."""
    generator = torch.Generator().manual_seed(seed)
    deviation = torch.randn(rows, columns // period, 1, generator=generator).exp()
    return (torch.randn(rows, columns // period, period, generator=generator) * deviation).view(rows, columns)


def found_period(rule: str, grad: Tensor) -> int | None:
    return choose(rule, grad.shape[1], len(grad), statistics(rule, grad))


def defined_spread(grad: Tensor, period: int) -> float:
    """E(p), from its definition."""
    s = grad.double().numpy() ** 2
    return float(np.sqrt((s / s.mean()).reshape(-1, period).var(axis=1).mean()))


@pytest.mark.parametrize("period", [32, 64, 96, 128, 256])
def test_a_planted_period_is_found_by_the_paper(period):
    assert found_period("paper", planted_gradient(period)) == period


@pytest.mark.parametrize("period", [12, 32, 48, 96])
def test_a_planted_period_is_found_by_its_peak(period):
    assert found_period("peaks", planted_gradient(period)) == period


@pytest.mark.parametrize("rule", LEARNED)
def test_where_nothing_stands_out_the_period_is_the_row(rule):
    assert found_period(rule, torch.full((4, COLUMNS), 0.1)) == COLUMNS
    # the same in every block of an even number of entries: nothing drops and nothing peaks
    assert found_period(rule, torch.tensor([0.1, 0.3]).repeat(4, COLUMNS // 2)) == COLUMNS


def test_sums_of_the_paper_by_hand():
    """Squares of 1 and 4: blocks of 8 have variance 0, 2.25, 0, blocks of 12 have 0, the row has 2.25."""
    grad = torch.tensor([1.0] * 12 + [2.0] * 12)[None]
    assert statistics("paper", grad).tolist() == [60.0, 18.0, 0.0, 54.0]
    assert found_period("paper", grad) == 12
    assert found_period("paper", grad.flip(1)) == 12


def test_sums_of_the_peaks_by_hand():
    """log g^2 is 1 and -1 in turns of 12 entries: neighbouring blocks of 12 differ by 2."""
    grad = torch.tensor([1.0, -1.0]).repeat_interleave(12).repeat(1, 6).mul(0.5).exp()
    sums = dict(zip([1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 36], statistics("peaks", grad)[1:].tolist(), strict=True))
    # 36: means of 1/3, -1/3, 1/3, -1/3
    for period, distance in {1: 22, 12: 22, 24: 0, 36: 2}.items():
        assert sums[period] == pytest.approx(distance, abs=1e-5)
    assert found_period("peaks", grad) == 12


def test_sums_are_those_of_the_definition():
    grad = planted_gradient(96, rows=7)
    squares, *spreads = statistics("paper", grad).tolist()
    assert squares == pytest.approx(float(grad.double().square().sum()))
    candidates = [p for p in range(8, COLUMNS + 1) if COLUMNS % p == 0]
    for period, spread in zip(candidates, spreads, strict=True):
        assert math.sqrt(spread / grad.numel()) / (squares / grad.numel()) == pytest.approx(
            defined_spread(grad, period), rel=1e-12
        )


@pytest.mark.parametrize("columns, period", [(COLUMNS, 96), (6 * 97, 97), (6 * 997, 997)])
def test_equal_entries_spread_by_nothing(columns, period):
    """Not even by rounding, where the sum of a block is not exact."""
    grad = torch.randn(50, columns // period, generator=torch.Generator().manual_seed(0))
    spreads = statistics("paper", grad.repeat_interleave(period, dim=1))[1:].tolist()
    candidates = [p for p in range(8, columns + 1) if columns % p == 0]
    assert all((spread == 0) == (period % p == 0) for p, spread in zip(candidates, spreads, strict=True))


def test_joining_blocks_never_lowers_the_spread():
    """Why the paper's rule finds nothing in rows of 2^n entries, and needs no gradient to say so."""
    grad = torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(0))
    candidates = [p for p in range(8, COLUMNS + 1) if COLUMNS % p == 0]
    spreads = dict(zip(candidates, statistics("paper", grad)[1:].tolist(), strict=True))
    for part in candidates:
        assert all(spreads[whole] >= spreads[part] for whole in candidates if whole % part == 0)
    for columns in (8, 64, 4096):
        assert known_period("paper", columns) == known_period("row", columns) == columns
        assert statistics("paper", torch.randn(3, columns)).numel() == 0
        assert found_period("paper", planted_gradient(8, columns)) == columns
    assert known_period("peaks", 4096) is None
    assert found_period("peaks", planted_gradient(64, 4096)) == 64


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e12])
def test_the_scale_of_the_loss_does_not_matter(scale):
    grad = planted_gradient(96)
    assert found_period("paper", grad * scale) == 96
    # log(g^2 + 1e-12) sees a scale where it reaches 1e-12
    if scale > 1e-6:
        assert found_period("peaks", grad * scale) == 96


@pytest.mark.parametrize("rule", LEARNED)
@pytest.mark.parametrize("splits", [[10], [5, 5], [1, 9], [4, 4, 2], [10, 0, 0], [3, 3, 3, 1], [0, 7, 0, 3]])
def test_every_sharding_of_the_rows_chooses_alike(rule, splits):
    for seed, grad in enumerate(
        (planted_gradient(96, rows=10), torch.randn(10, COLUMNS), torch.full((10, COLUMNS), 0.1))
    ):
        whole = statistics(rule, grad)
        shards = [statistics(rule, rows) for rows in grad.split(splits)]
        assert all(shard.shape == whole.shape and shard.dtype == torch.float64 for shard in shards)
        summed = torch.stack(shards).sum(0)
        torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-9, msg=str(seed))
        assert choose(rule, COLUMNS, 10, summed) == choose(rule, COLUMNS, 10, whole)


@pytest.mark.parametrize("rule", LEARNED)
def test_rows_are_widened_a_few_at_a_time(rule, monkeypatch):
    grad = planted_gradient(96, rows=9)
    whole = statistics(rule, grad)
    for entries in (1, 4 * COLUMNS):
        monkeypatch.setattr(partition, "CHUNK_ENTRIES", entries)
        torch.testing.assert_close(statistics(rule, grad), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", LEARNED)
@pytest.mark.parametrize("columns", [COLUMNS, 1440, 14336, 720720])
def test_the_transient_memory_is_known(rule, columns, monkeypatch):
    monkeypatch.setattr(partition, "CHUNK_ENTRIES", 2**16)
    grad = torch.randn(max(2, 2**18 // columns), columns)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        statistics(rule, grad)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak = max(itertools.accumulate(changes))
    assert 0.5 * partition.transient_bytes(columns) < peak <= partition.transient_bytes(columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_widened_and_left_alone(dtype):
    grad = planted_gradient(96, rows=4).to(dtype)
    before = grad.clone()
    assert torch.equal(statistics("paper", grad), statistics("paper", grad.double()))
    assert torch.equal(grad, before)


def spread_sums(curve: list[float]) -> Tensor:
    """Statistics of one row of 48 with mean square 1 and E(8), E(12), E(16), E(24), E(48) as given."""
    return torch.tensor([48.0, *(48 * value**2 for value in curve)], dtype=torch.float64)


@pytest.mark.parametrize(
    "curve, period",
    [
        ([5, 4, 4.5, 4, 5], 12),
        # equal drops: the longer period. rounding does not make them unequal, more does
        ([5, 4, 3, 3.5, 5], 16),
        ([5, 4, 3 + 1e-10, 3.5, 5], 16),
        ([5, 4, 3 + 1e-6, 3.5, 5], 12),
        # drops that are rounding
        ([1, 1 - 1e-11, 1, 1, 1], 48),
        ([1, 1, 1, 1 - 1e-11, 1], 48),
        ([1e-14, 0, 0, 0, 1e-14], 48),
        ([1e-10, 0, 0, 0, 0], 12),
        ([0, 0, 1, 2, 1.5], 48),
        ([1, 2, 3, 4, 5], 48),
    ],
)
def test_the_largest_drop(curve, period):
    assert choose("paper", 48, 1, spread_sums(curve)) == period


@pytest.mark.parametrize(
    "scores, period",
    [
        # of divisors 1 2 3 4 6 8 9 12 16 18 24 36; 8 is too short, 36 is the last
        ([0, 0, 0, 0, 0, 9, 1, 2, 1, 1, 1, 9], 12),
        ([0, 0, 0, 0, 0, 0, 3, 0, 3, 0, 0, 0], 16),
        ([0, 0, 0, 0, 0, 0, 3, 0, 3 - 1e-10, 0, 0, 0], 16),
        ([0, 0, 0, 0, 0, 0, 3, 0, 3 - 1e-6, 0, 0, 0], 9),
        # not strict, or only by rounding
        ([0, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0], 144),
        ([3, 3, 3, 3, 3, 3, 3, 3 + 1e-10, 3, 3, 3, 3], 144),
        ([0, 0, 0, 0, 0, 0, 0, 1e-14, 0, 0, 0, 0], 144),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 144),
    ],
)
def test_the_highest_peak(scores, period):
    divisors = [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 36]
    sums = [score * (144 // p - 1) for p, score in zip(divisors, scores, strict=True)]
    assert choose("peaks", 144, 1, torch.tensor([1.0, *sums], dtype=torch.float64)) == period


@pytest.mark.parametrize("period, cut", [(1024, 1024), (1536, 1536), (3072, 1536)])
def test_a_long_peak_is_cut(period, cut):
    grad = torch.tensor([1.0, -1.0]).repeat_interleave(period).repeat(1, 24576 // (2 * period)).exp()
    assert found_period("peaks", grad) == cut


@pytest.mark.parametrize("rule", LEARNED)
@pytest.mark.parametrize("columns", [1, 2, 5, 7, 8, 11, 97, 22])
def test_rows_without_divisors_are_one_block(rule, columns):
    assert known_period(rule, columns) == columns
    assert found_period(rule, torch.randn(3, columns)) == columns


@pytest.mark.parametrize("rule", LEARNED)
def test_a_gradient_that_says_nothing_decides_nothing(rule):
    grad = torch.zeros(3, COLUMNS)
    assert found_period(rule, grad) is None
    for value in (math.nan, math.inf):
        grad[1, 5] = value
        assert found_period(rule, grad) is None
    grad[1, 5] = 1e-20
    assert found_period(rule, grad) is not None


def test_a_block_divides_the_row():
    for columns in (96, 768):
        check_block(96, columns, "wq.weight")
    assert known_period("fixed", 768, 96) == 96 and known_period("fixed", 96, 96) == 96
    with pytest.raises(ValueError, match=r"block=100 does not divide the rows of wq, which have 768 .* 96 or 128\.$"):
        check_block(100, 768, "wq")
    with pytest.raises(ValueError, match=r"block=100 does not divide the rows of wk, which have 64 entries.* to 64\.$"):
        check_block(100, 64, "wk")


@pytest.mark.parametrize("block", [None, 0, -8])
def test_a_block_is_given(block):
    with pytest.raises(
        ValueError, match=rf"block={block}: partition=fixed needs .* at least 1\. .* wq .*example 1000\.$"
    ):
        check_block(block, 3000, "wq")
