"""The levels of an 8-bit momentum: learned from a histogram, exactly, and made into the table that the kernels read.

Algorithm 3 of Gefen (arXiv 2606.13894): first-step momenta, each divided by the largest of its block, are counted in
cells of [-1, 1]; the levels are the weighted k-means of the cell centres in one dimension, the first fixed at -1 and
the last at +1 so that the largest entry of a block is kept exactly. Counting, and what a cell is, are in
``kernels.gefen``; when to learn, and the sum over ranks, are the optimizer's.

In one dimension clusters are intervals, so dynamic programming finds the best ones. With D_c[j] the least cost of the
first j cells in c clusters, D_c[j] = min over i of D_(c-1)[i] + cost(i, j), which costs O(n^2 k) as it stands. The cost
is Monge (a fixed end is a cluster with infinite mass at that end, so the ends are no exception): the leftmost best i
does not fall as j grows, nor as c grows. Divide and conquer between both bounds is O(k n log n) at worst and much less
where k is large. ``bench/codebook.py`` measures it.

Legend: n cells, k levels, m occupied cells strictly inside the ends, K = k - 2 clusters between the ends.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook

MAX_LEVELS = 256
"""A code is one byte."""


def check_levels(levels: int) -> None:
    """Raise ``ValueError`` unless ``levels`` is a power of two from 2 to 256.

    With 2 levels there is nothing between -1 and +1: momentum is then its sign times the largest of its block.
    """
    if not isinstance(levels, int):
        raise ValueError(f"levels={levels!r} must be a whole number. Set 256.")
    if 2 <= levels <= MAX_LEVELS and levels & (levels - 1) == 0:
        return
    below = 1 << (min(max(levels, 2), MAX_LEVELS).bit_length() - 1)
    fix = f"{below} or {2 * below}" if 2 < levels < MAX_LEVELS else f"{below}"
    raise ValueError(
        f"levels={levels} is not a power of two from 2 to {MAX_LEVELS} (a code is one byte). Set it to {fix}."
    )


def optimal_levels(counts: Tensor, levels: int, zero: bool) -> Tensor:
    """The levels of least squared error over the cells of a histogram, with -1 and +1 among them.

    Minimises the sum over cells of count times squared distance from the cell's centre to its level. Every rank that
    is given the same counts computes the same bits. Levels that are left over when fewer cells are occupied than there
    are levels cost nothing wherever they are: each goes to the middle of the widest gap that is left, so that values
    which the first step did not show find a level too.

    Args:
        counts: (cells,) int64, not all 0; an odd number of cells, ``levels`` at least. Cell i has its centre at
            (i - half) / half with half = (cells - 1) / 2. The sum of the counts is at most (2^63 - 1) / half^2, which
            is 2.2e12 entries for 4095 cells and 1.4e11 for 16383.
        levels: how many, 2 to 256.
        zero: move the level nearest to 0, the lower one of two, to exactly 0. As a rule none is at 0 by itself: a
            momentum of 0 in a block that is not all 0 is then read back as a small one, every time of the same sign,
            and weights without a gradient drift. The paper does not move it. With 2 levels nothing is moved.

    Returns:
        (levels,) fp32 on the device of ``counts``, strictly ascending from -1 to +1.
    """
    cells = counts.numel()
    half = (cells - 1) // 2
    assert cells % 2 == 1 and 2 <= levels <= min(cells, MAX_LEVELS)
    occupied = counts.cpu().numpy()
    total = sum(occupied.tolist())
    assert 0 < total <= (2**63 - 1) // half**2 and occupied.min() >= 0
    # cells at -1 and +1 cost nothing, since those levels are fixed, and belong to no other cluster
    inside = np.flatnonzero(occupied[1:-1]) + 1
    position = inside - half
    clusters = levels - 2
    if 0 < clusters < len(inside):
        means = _cluster_means(position, occupied[inside], clusters, half).tolist()
    else:
        means = position[:clusters].tolist()
    found = _fill_gaps([-half, *means, half], levels)
    if zero and clusters:
        # never an end: every level between the ends is nearer
        found[min(range(levels), key=lambda index: (abs(found[index]), index))] = 0.0
    return (torch.tensor(found, dtype=torch.float64, device="cpu") / half).to(counts.device, torch.float32)


def build_codebook(levels: Tensor) -> Codebook:
    """The codebook of ``levels`` (k,) fp32 ascending, k <= 256, with its table; tensors on the device of ``levels``.

    The code of a cell is the level nearest to the cell's centre, the lower one of two equally near. Levels that are
    all 0 are not learned yet, and so are their codes.
    """
    assert levels.dtype == torch.float32 and levels.numel() <= MAX_LEVELS
    codes = torch.zeros(CELLS, dtype=torch.uint8, device=levels.device)
    exact = levels.double().cpu()
    if exact.any():
        # twice the middle between two levels, in cells: no rounding where a middle falls on a centre
        borders = (exact[:-1] + exact[1:]) * HALF_CELLS
        centres = 2.0 * (torch.arange(CELLS, dtype=torch.float64, device="cpu") - HALF_CELLS)
        codes.copy_(torch.searchsorted(borders, centres))
    return Codebook(levels=levels, codes=codes)


def prepare() -> None:
    """Compile what ``optimal_levels`` runs, which takes a few seconds."""
    optimal_levels(torch.ones(7, dtype=torch.int64, device="cpu"), 4, zero=False)


def _fill_gaps(found: list[float], levels: int) -> list[float]:
    # on whole cells, which do not run out, and so that every level is the nearest of some cell
    found = list(found)
    while len(found) < levels:
        widths = [found[index + 1] - found[index] for index in range(len(found) - 1)]
        lower = widths.index(max(widths))
        found.insert(lower + 1, math.floor((found[lower] + found[lower + 1]) / 2))
    return found


def _cluster_means(
    position: NDArray[np.int64], counts: NDArray[np.int64], clusters: int, half: int
) -> NDArray[np.float64]:
    """Means, in cells, of the best ``clusters`` (K) between fixed ends at -half and +half.

    position: (m,) ascending, inside the ends; counts: (m,) positive; m > K > 0. Moments are sums of whole numbers of
    cells and exact in int64.
    """
    zeroth, first, second = (_prefix_sums(counts * position**power) for power in range(3))
    weight = counts.astype(np.float64)
    from_low = _prefix_sums(weight * (position + half) ** 2)
    from_high = _prefix_sums((weight * (half - position) ** 2)[::-1])[::-1].copy()
    starts = _cluster_starts(zeroth, first, second, from_low, from_high, clusters)
    mass = zeroth[starts[1:]] - zeroth[starts[:-1]]
    means: NDArray[np.float64] = (first[starts[1:]] - first[starts[:-1]]) / mass
    return means


def _prefix_sums(values: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values, dtype=values.dtype)])


@numba.njit(nogil=True)
def _cluster_starts(
    zeroth: NDArray[np.int64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    from_low: NDArray[np.float64],
    from_high: NDArray[np.float64],
    clusters: int,
) -> NDArray[np.int64]:
    """Where the best clusters begin: (K + 1,), the last entry the end of the last cluster.

    zeroth, first, second: (m + 1,) prefix sums of count, count x, count x^2, with x in cells; from_low: (m + 1,) cost
    of the first j cells at the lower end; from_high: (m + 1,) cost of all but the first j cells at the upper end.
    Clusters are never empty, since one more always lowers the cost.
    """
    # of j cells in c clusters, j - c are spare; arrays are indexed by spare cells, 0 to m - K
    columns = len(zeroth) - clusters
    best = from_low[:columns].copy()
    before = np.empty_like(best)
    choice = np.empty((clusters, columns), np.int32)
    top = 1
    while top * 2 <= columns:
        top *= 2
    for c in range(clusters):
        before, best = best, before
        step = top
        while step:
            # counted from 1: columns step, 3 step, 5 step, ..., between columns that are done
            for column in range(step - 1, columns, 2 * step):
                low = choice[c, column - step] if column >= step else 0
                if c:
                    # the same number of cells in one cluster less has one more to spare
                    low = max(low, choice[c - 1, min(column + 1, columns - 1)] - 1)
                high = choice[c, column + step] if column + step < columns else column
                high = min(high, column)
                # rounding can turn two equally good ones round
                low = min(low, high)
                least = np.inf
                chosen = low
                for i in range(low, high + 1):
                    cost = before[i] + _spread(zeroth, first, second, i + c, column + c + 1)
                    if cost < least:
                        least = cost
                        chosen = i
                best[column] = least
                choice[c, column] = chosen
            step //= 2

    starts = np.empty(clusters + 1, np.int64)
    column = int(np.argmin(best + from_high[clusters:]))
    starts[clusters] = column + clusters
    for c in range(clusters - 1, -1, -1):
        column = choice[c, column]
        starts[c] = column + c
    return starts


@numba.njit(nogil=True)
def _spread(
    zeroth: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64], start: int, stop: int
) -> float:
    """Sum of count (x - mean)^2 over cells ``start`` to ``stop``.

    Moments about the whole number nearest to the mean, exact in int64: what is subtracted at the end is then at most a
    quarter of the mass, so that a narrow cluster far from 0 loses no digits.
    """
    mass = zeroth[stop] - zeroth[start]
    moment = first[stop] - first[start]
    inverse = 1.0 / mass
    about = np.int64(np.rint(moment * inverse))
    rest = moment - about * mass
    # in this order nothing is larger than half^2 times the mass
    square = second[stop] - second[start] - about * moment - about * rest
    spread: float = square - np.float64(rest) * rest * inverse
    return spread
