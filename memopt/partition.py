"""How many consecutive entries of a row share a second moment: the period of a matrix.

Four rules: ``row`` (the whole row), ``fixed`` (a given block), and two that look at the first gradient. ``paper`` is
Algorithm 2 of Gefen (Benedek, Koren, Fried; arXiv 2606.13894) and ``peaks`` the rule of its later releases (1.2.3).
Both are published for a flattened tensor; here blocks never cross a row, so that a shard of rows holds whole blocks,
and where they find nothing the period is the row, not 1. State costs 1 + 8/p bytes per parameter for a period of p.

A learned rule reads the *global* gradient, of which a rank holds some rows. It is therefore split in two, both free of
communication: ``statistics`` of this rank's rows, which add up over ranks, and ``choose`` from the sums. Sums in
another order differ in the last digits; what lies within ``TIE`` counts as equal, so that every sharding chooses alike.

Legend: R rows of this rank, C entries a row, p entries a block, B = C / p blocks a row.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

RULES = ("row", "fixed", "paper", "peaks")
LEARNED = ("paper", "peaks")

# no shorter block is taken (paper, Algorithm 2; the releases take none of 8 either)
SMALLEST_PERIOD = 8
# least drop, and least height of a peak, that means something (paper, Algorithm 2)
LEAST_CHANGE = 1e-12
# values of a curve that differ by less than this share of its largest are equal: sums over ranks are rounded in another
# order on another number of ranks
TIE = 1e-9
# of ``peaks``, from release 1.2.3: added to g^2 before the logarithm; fewest blocks of a candidate; a longer peak is
# cut to its smallest divisor above this
LOG_FLOOR = 1e-12
FEWEST_BLOCKS = 4
LONG = 1024

CHUNK_ENTRIES = 2**20
"""Entries of a gradient that ``statistics`` widens to fp64 at a time, or one row if that is longer."""


def check_block(block: int | None, columns: int, name: str) -> None:
    """Raise ``ValueError`` unless ``block`` entries divide a row of parameter ``name``, which has ``columns``.

    Also where a row is shorter than ``block``: a block is as long as it was set, or refused.
    """
    if block is None or block < 1:
        example = max(p for p in _divisors(columns) if p <= LONG)
        raise ValueError(
            f"block={block}: partition=fixed needs the entries of a block, at least 1. "
            f"Set it to a divisor of the row length, for {name} for example {example}."
        )
    if columns % block:
        below = max(p for p in _divisors(columns) if p < block)
        above = [p for p in _divisors(columns) if p > block][:1]
        raise ValueError(
            f"block={block} does not divide the rows of {name}, which have {columns} entries. "
            f"Set it to {' or '.join(map(str, [below, *above]))}."
        )


def known_period(rule: str, columns: int, block: int | None = None) -> int | None:
    """The period of a row of ``columns`` entries where no gradient can change it, else None.

    Also learned rules are known where there is nothing to choose from: too few divisors, or, for ``paper``, divisors
    that all divide the next one (a power of two): the variance within blocks never falls when blocks are joined.
    """
    assert rule in RULES and columns > 0
    if rule == "row":
        return columns
    if rule == "fixed":
        assert block is not None
        return block
    candidates = _candidates(rule, columns)
    if rule == "paper":
        open_choice = any(later % earlier for earlier, later in zip(candidates, candidates[1:], strict=False))
    else:
        open_choice = any(p > SMALLEST_PERIOD for p in candidates[1:-1])
    return None if open_choice else columns


@torch.no_grad()
def statistics(rule: str, grad_RC: Tensor) -> Tensor:
    """What ``choose`` needs to know about the gradient of these rows: sums, to be added up over ranks.

    Widens ``CHUNK_ENTRIES`` entries at a time; holds ``transient_bytes`` meanwhile. Does not wait for the device.

    Args:
        rule: one of ``LEARNED``.
        grad_RC: (R, C) of any floating type, R may be 0.

    Returns:
        (n,) fp64 on the device of ``grad_RC``; n depends on ``rule`` and C alone, and is 0 where ``known_period`` has
        the answer.
    """
    assert rule in LEARNED
    rows, columns = grad_RC.shape
    if known_period(rule, columns) is not None:
        return grad_RC.new_zeros(0, dtype=torch.float64)
    candidates = _candidates(rule, columns)
    measure = _spreads if rule == "paper" else _distances
    total = grad_RC.new_zeros(1 + len(candidates), dtype=torch.float64)
    step = max(1, CHUNK_ENTRIES // columns)
    for start in range(0, rows, step):
        squares = grad_RC[start : start + step].to(torch.float64, copy=True).square_()
        total += torch.stack([squares.sum(), *measure(squares, candidates)])
    return total


def transient_bytes(columns: int) -> int:
    """Most bytes that ``statistics`` holds beside the gradient, for rows of ``columns`` entries."""
    # fp64: the means of every block length, those of length 1 being the values, and two arrays of distances
    means = sum(1.0 / p for p in _divisors(columns))
    return math.ceil(8.0 * (means + 2.0)) * max(CHUNK_ENTRIES, columns)


def choose(rule: str, columns: int, rows: int, summed: Tensor) -> int | None:
    """The period that a learned rule chooses: a divisor of ``columns``. Waits for ``summed``.

    ``paper``: with s = g^2 over its mean and E(p) = sqrt(mean over blocks of the variance of s within the block), for
    the divisors p >= 8 of C, ascending: the p after the largest drop of E from one to the next.
    ``peaks``: the highest strict local maximum of the mean distance between neighbouring blocks' mean log g^2, among
    divisors with at least four blocks a row; it depends on the scale of g where g^2 is not far above 1e-12.
    Of equals the larger p; where nothing is found, C.

    Args:
        rule: one of ``LEARNED``.
        columns: C.
        rows: rows of the whole matrix.
        summed: (n,) fp64: ``statistics`` summed over all ranks.

    Returns:
        None if the gradient is all zero or not finite, which decides nothing.
    """
    assert rule in LEARNED
    if known_period(rule, columns) is not None:
        return columns
    squares, *sums = summed.tolist()
    if not squares > 0.0 or not all(map(math.isfinite, (squares, *sums))):
        return None
    if rule == "paper":
        return _after_largest_drop(columns, rows, squares, sums)
    return _highest_peak(columns, rows, sums)


def _after_largest_drop(columns: int, rows: int, squares: float, spreads: Sequence[float]) -> int:
    entries = rows * columns
    # E is linear in s: dividing here spares a sum over ranks before this one, and fp64 holds every g^4 of fp32
    curve = [math.sqrt(spread / entries) * (entries / squares) for spread in spreads]
    candidates, tolerance = _candidates("paper", columns), _tolerance(curve)
    drops = zip(candidates[1:], (before - after for before, after in zip(curve, curve[1:], strict=False)), strict=True)
    return _largest({p: drop for p, drop in drops if drop > tolerance}, tolerance) or columns


def _highest_peak(columns: int, rows: int, distances: Sequence[float]) -> int:
    candidates = _candidates("peaks", columns)
    scores = [total / (rows * (columns // p - 1)) for p, total in zip(candidates, distances, strict=True)]
    tolerance = _tolerance(scores)
    peaks = {
        p: score
        for p, before, score, after in zip(candidates[1:], scores, scores[1:], scores[2:], strict=False)
        if p > SMALLEST_PERIOD and score - max(before, after) > tolerance
    }
    peak = _largest(peaks, tolerance)
    if peak is None:
        return columns
    return peak if peak <= LONG else min(p for p in _divisors(peak) if p > LONG)


def _tolerance(curve: Sequence[float]) -> float:
    return max(LEAST_CHANGE, TIE * max(curve))


def _largest(sizes: dict[int, float], tolerance: float) -> int | None:
    """The largest key of those whose value is equal to the largest value."""
    return max((p for p, size in sizes.items() if size >= max(sizes.values()) - tolerance), default=None)


def _spreads(squares: Tensor, candidates: Sequence[int]) -> list[Tensor]:
    """For each p the sum over blocks of the sum of squared distances of ``squares`` (R, C) fp64 to their block's mean.

    A block's sum is that of the longest candidate blocks within it, plus the distances of their means: nothing is
    subtracted, so that the sum cannot fall from a p to a multiple of it. Distances are from the block's first entry
    before they are from its mean, so that equal entries give exactly 0.
    """
    means = {1: squares}
    sums = {1: squares.new_zeros(())}
    for p in candidates:
        part = max(q for q in means if p % q == 0)
        parts = means[part].reshape(len(squares), -1, p // part)
        distance = parts - parts[..., :1]
        mean = distance.mean(-1, keepdim=True)
        means[p] = (parts[..., :1] + mean)[..., 0]
        sums[p] = sums[part] + part * distance.sub_(mean).square_().sum()
    return [sums[p] for p in candidates]


def _distances(squares: Tensor, candidates: Sequence[int]) -> list[Tensor]:
    """For each p the sum of distances between the mean logarithms of neighbouring blocks of ``squares`` (R, C) fp64.

    Overwrites ``squares``.
    """
    means = {1: squares.add_(LOG_FLOOR).log_()}
    for p in candidates[1:]:
        part = max(q for q in means if p % q == 0)
        means[p] = means[part].reshape(len(squares), -1, p // part).mean(-1)
    return [means[p].diff(dim=1).abs_().sum() for p in candidates]


@cache
def _candidates(rule: str, columns: int) -> tuple[int, ...]:
    """The divisors of ``columns`` that a learned rule compares, ascending."""
    divisors = _divisors(columns)
    if rule == "paper":
        return tuple(p for p in divisors if p >= SMALLEST_PERIOD)
    return tuple(p for p in divisors if columns // p >= FEWEST_BLOCKS)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [p for p in range(1, math.isqrt(number) + 1) if number % p == 0]
    return tuple(sorted({*small, *(number // p for p in small)}))
