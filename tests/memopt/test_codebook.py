"""Background: in one dimension the best clusters are intervals, so every partition of a few cells can be tried, and the
plain O(n^2 k) recurrence is a second reference for more. Costs are compared exactly: the levels found are taken for the
partition they stand for (each cell to its nearest level), and its cost is computed in fractions."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook
from kernels.reference import code_histogram
from memopt.codebook import build_codebook, check_levels, optimal_levels, prepare

LIMIT_9 = (2**63 - 1) // 4**2
"""Largest sum of counts of a histogram of 9 cells."""


def cluster_cost(counts: Sequence[int], start: int, stop: int, at: Fraction | None) -> Fraction:
    """Sum of count times squared distance, in cells, to ``at`` or, for None, to the mean."""
    mass = sum(counts[start:stop])
    if mass == 0:
        return Fraction(0)
    if at is None:
        at = Fraction(sum(counts[i] * i for i in range(start, stop)), mass)
    return sum(((i - at) ** 2 * counts[i] for i in range(start, stop)), Fraction(0))


def partition_cost(counts: Sequence[int], borders: Sequence[int]) -> Fraction:
    """Cost of the clusters between ``borders``; the first is about the first cell and the last about the last."""
    edges = [0, *borders, len(counts)]
    fixed = {0: Fraction(0), len(edges) - 2: Fraction(len(counts) - 1)}
    return sum(cluster_cost(counts, edges[c], edges[c + 1], fixed.get(c)) for c in range(len(edges) - 1))


def tried_cost(counts: Sequence[int], levels: int) -> Fraction:
    """Least cost over every partition."""
    places = range(len(counts) + 1)
    return min(partition_cost(counts, b) for b in itertools.combinations_with_replacement(places, levels - 1))


def recurrence_cost(counts: Sequence[int], levels: int) -> float:
    """Least cost by D_c[j] = min over i of D_(c-1)[i] + cost(i, j), in fp64."""
    n = len(counts)
    x, w = np.arange(n, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    between = np.full((n + 1, n + 1), np.inf)
    for start in range(n + 1):
        mass, mean, square = 0.0, 0.0, 0.0
        between[start, start] = 0.0
        for stop in range(start, n):
            # Welford's update: an independent way to the variance
            if w[stop]:
                mass += w[stop]
                change = x[stop] - mean
                mean += change * w[stop] / mass
                square += w[stop] * change * (x[stop] - mean)
            between[start, stop + 1] = square
    best = np.concatenate([[0.0], np.cumsum(w * x**2)])
    for _ in range(levels - 2):
        best = (best[:, None] + between).min(0)
    return float((best + np.concatenate([np.cumsum((w * (n - 1 - x) ** 2)[::-1])[::-1], [0.0]])).min())


def found_cost(counts: Sequence[int], levels: Tensor) -> Fraction:
    """Cost of the partition that ``levels`` stand for. At an optimum no occupied cell is between two levels."""
    half = (len(counts) - 1) // 2
    cells = [Fraction(level) * half + half for level in levels.tolist()]
    nearest = [min(range(len(cells)), key=lambda c: abs(cells[c] - i)) for i in range(len(counts))]
    return partition_cost(counts, [sum(c < border for c in nearest) for border in range(1, len(cells))])


def check_form(levels: Tensor, number: int) -> None:
    assert levels.dtype == torch.float32 and levels.shape == (number,)
    assert levels[0] == -1 and levels[-1] == 1 and bool((levels.diff() > 0).all())


def normal_histogram(cells: int, entries: int = 2**18, seed: int = 0) -> Tensor:
    """Counts of normal values over the largest of 512."""
    half = (cells - 1) // 2
    x = torch.randn(entries // 512, 512, generator=torch.Generator().manual_seed(seed))
    x = x / x.abs().amax(1, keepdim=True)
    return torch.bincount((x * half + half + 0.5).long().flatten(), minlength=cells)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.sampled_from([3, 5, 7, 9]).flatmap(lambda n: st.lists(st.integers(0, 30), min_size=n, max_size=n)), st.data())
def test_no_partition_is_better(counts, data):
    if not any(counts):
        counts[data.draw(st.integers(0, len(counts) - 1))] = 1
    levels = data.draw(st.integers(2, min(5, len(counts))))
    found = optimal_levels(torch.tensor(counts), levels, zero=False)
    check_form(found, levels)
    assert found_cost(counts, found) == tried_cost(counts, levels)


sparse = st.lists(st.one_of(st.just(0), st.integers(1, 1000)), min_size=41, max_size=41)
symmetric = st.lists(st.integers(0, 9), min_size=21, max_size=21).map(lambda side: side[:0:-1] + side)
equal = st.integers(1, 10**6).map(lambda count: [count] * 41)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.one_of(sparse, symmetric, equal).filter(any), st.integers(2, 16))
def test_the_recurrence_is_not_better(counts, levels):
    found = optimal_levels(torch.tensor(counts), levels, zero=False)
    check_form(found, levels)
    assert float(found_cost(counts, found)) == pytest.approx(recurrence_cost(counts, levels), rel=1e-13, abs=1e-9)


@pytest.mark.parametrize("cells, levels", [(255, 16), (511, 64)])
def test_many_cells(cells, levels):
    for seed in range(3):
        counts = normal_histogram(cells, seed=seed)
        found = optimal_levels(counts, levels, zero=False)
        check_form(found, levels)
        assert float(found_cost(counts.tolist(), found)) == pytest.approx(
            recurrence_cost(counts.tolist(), levels), rel=1e-12
        )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, LIMIT_9 // 9), min_size=9, max_size=9).filter(any), st.integers(3, 4))
def test_counts_up_to_the_limit(counts, levels):
    """Second moments fill int64. fp32 levels may not tell which of two clusters the cells between them are in."""
    found = optimal_levels(torch.tensor(counts), levels, zero=False)
    check_form(found, levels)
    assert found_cost(counts, found) <= tried_cost(counts, levels) * (1 + Fraction(1, 10**6))


def test_narrow_clusters_lose_no_digits():
    """Two cells near the upper end, 1e12 entries in all: a variance from plain fp64 moments would be noise."""
    counts = torch.zeros(CELLS, dtype=torch.int64)
    counts[4000] = 10**12
    counts[4001:4010] = torch.tensor([3, 1, 1, 1, 1, 1, 1, 1, 2])
    found = optimal_levels(counts, 8, zero=False)
    assert (found[1:-1] * HALF_CELLS + HALF_CELLS).tolist() == pytest.approx(
        [4000, 4001, 4002.5, 4004.5, 4006.5, 4008.667]
    )
    with pytest.raises(AssertionError):
        optimal_levels(counts * 3, 8, zero=False)


@pytest.mark.parametrize("cells", [CELLS, 16383])
def test_full_size(cells):
    """Levels are the means of their cells (Lloyd's condition), and much better than evenly spaced ones."""
    counts = normal_histogram(cells)
    found = optimal_levels(counts, 256, zero=False)
    check_form(found, 256)
    half = (cells - 1) // 2
    position, weight = np.arange(cells) - half, counts.numpy().astype(np.float64)
    place = found.double().numpy() * half
    nearest = np.abs(position[:, None] - place).argmin(1)
    mass = np.bincount(nearest, weight, 256)
    means = np.bincount(nearest, weight * position, 256) / mass
    np.testing.assert_allclose(means[1:-1], place[1:-1], atol=1e-3)

    def cost(level: np.ndarray) -> float:
        return float((weight * (position - level) ** 2).sum())

    uniform = np.linspace(-half, half, 256)
    nearest_uniform = np.abs(position[:, None] - uniform).argmin(1)
    assert cost(place[nearest]) < 0.8 * cost(uniform[nearest_uniform])
    assert torch.equal(found, optimal_levels(counts, 256, zero=False))


def test_spare_levels_fill_the_widest_gaps():
    counts = torch.zeros(CELLS, dtype=torch.int64)
    counts[HALF_CELLS + 1000] = 7
    counts[0] = counts[-1] = 5
    found = optimal_levels(counts, 8, zero=False)
    # after -2047, 1000, 2047 the middles -524, 238, -1286, 1523, -905, rounded down to whole cells
    assert (found * HALF_CELLS).round().tolist() == [-2047, -1286, -905, -524, 238, 1000, 1523, 2047]
    check_form(optimal_levels(counts, 256, zero=False), 256)


@pytest.mark.parametrize("occupied", [[0], [8], [3, 4], [0, 8], list(range(9))])
@pytest.mark.parametrize("levels", [2, 4, 8, 9])
def test_as_many_levels_as_cells(occupied, levels):
    counts = torch.zeros(9, dtype=torch.int64)
    counts[occupied] = 1
    found = optimal_levels(counts, levels, zero=False)
    check_form(found, levels)
    if levels == 9:
        assert (found * 4).tolist() == list(range(-4, 5))


def test_zero_is_a_level():
    counts = normal_histogram(CELLS)
    paper, moved = optimal_levels(counts, 16, zero=False), optimal_levels(counts, 16, zero=True)
    assert 0 not in paper.tolist()
    check_form(moved, 16)
    changed = (paper != moved).nonzero().flatten().tolist()
    assert changed == [int(paper.abs().argmin())] and moved[changed[0]] == 0
    code = int(build_codebook(moved).codes[HALF_CELLS])
    assert moved[code] == 0
    # one level on either side of 0, equally near: the lower one
    even = torch.ones(9, dtype=torch.int64)
    even[4] = 0
    pair = optimal_levels(even, 4, zero=False)
    assert pair[1] == -pair[2] and optimal_levels(even, 4, zero=True).tolist() == [-1, 0, pair[2], 1]


def test_two_levels_stay_at_the_ends():
    for zero in (False, True):
        assert optimal_levels(normal_histogram(CELLS), 2, zero=zero).tolist() == [-1, 1]


def test_learned_levels_are_the_mean_of_their_values():
    """From gradients to codes with the kernels' histogram: the error beats evenly spaced levels."""

    class Block:
        grad = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
        v = torch.zeros(64, 1)
        inverse = None

    counts = code_histogram([Block()])  # type: ignore[list-item]
    book = build_codebook(optimal_levels(counts, 16, zero=False))
    value = Block.grad / Block.grad.abs().amax(1, keepdim=True)

    def error(book: Codebook) -> float:
        cell = (value * HALF_CELLS + (HALF_CELLS + 0.5)).long()
        return float((book.levels[book.codes[cell].int()] - value).square().mean())

    assert error(book) < 0.75 * error(build_codebook(torch.linspace(-1, 1, 16)))


@pytest.mark.parametrize(
    "levels",
    [
        [-1.0, 1.0],
        # middles on the centres of cells 0 and 2047 of the lower half and of 0
        [-1.0, -0.25, 0.25, 1.0],
        [-1.0, -1024 / 2047, -1022 / 2047, 1e-30, 2e-30, 0.125, 0.5, 1.0],
        None,
    ],
)
def test_a_code_is_the_nearest_level(levels):
    if levels is None:
        levels = optimal_levels(normal_histogram(CELLS), 16, zero=True).tolist()
    book = build_codebook(torch.tensor(levels))
    assert book.codes.dtype == torch.uint8 and book.codes.shape == (CELLS,)
    exact = [Fraction(level) for level in torch.tensor(levels).tolist()]
    for cell, code in enumerate(book.codes.tolist()):
        centre = Fraction(cell - HALF_CELLS, HALF_CELLS)
        # the first of equals, which is the lower one
        assert code == min(range(len(exact)), key=lambda c: abs(exact[c] - centre)), cell


def test_a_codebook_that_is_not_learned_has_no_codes():
    book = build_codebook(torch.zeros(256))
    assert not book.codes.any() and book.codes.shape == (CELLS,)


def test_an_empty_histogram_is_never_passed():
    with pytest.raises(AssertionError):
        optimal_levels(torch.zeros(9, dtype=torch.int64), 4, zero=False)


@pytest.mark.parametrize(
    "levels, fix", [(0, "2"), (1, "2"), (3, "2 or 4"), (100, "64 or 128"), (255, "128 or 256"), (512, "256")]
)
def test_levels_are_a_power_of_two(levels, fix):
    with pytest.raises(ValueError, match=rf"levels={levels} is not a power of two from 2 to 256 .* Set it to {fix}\.$"):
        check_levels(levels)


def test_powers_of_two_are_allowed():
    for exponent in range(1, 9):
        check_levels(2**exponent)
    prepare()
