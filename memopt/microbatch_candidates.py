"""Which microbatches are worth considering, and the settings of the search among them.

A rank has B rows a step, cut into n microbatches whose sizes differ by at most one row; the largest has
m = ceil(B / n) rows, which is what memory has to hold. Of all n with the same m the smallest does least work, so the
candidates are the distinct values of ceil(B / n): at most 2 sqrt(B) of them. With several activation checkpointing
policies a candidate is a pair of policy and rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """``rows`` of the largest microbatch, ``accumulation`` microbatches a step, activation checkpointing ``policy``."""

    rows: int
    accumulation: int
    policy: str = "none"

    def sizes(self, rank_batch: int) -> tuple[int, ...]:
        """Rows of each microbatch, as ``Tensor.tensor_split`` cuts ``rank_batch`` rows."""
        small, larger = divmod(rank_batch, self.accumulation)
        return (small + 1,) * larger + (small,) * (self.accumulation - larger)

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.accumulation} ({self.policy})"


def candidates(
    rank_batch: int,
    lowest: int = 1,
    highest: int | None = None,
    divisors_only: bool = False,
    policies: Sequence[str] = ("none",),
) -> tuple[Candidate, ...]:
    """The candidates of a rank with ``rank_batch`` rows a step, rows ascending within each policy.

    Args:
        rank_batch: rows of a rank a step.
        lowest, highest: least and most rows of a microbatch.
        divisors_only: only microbatches of equal size, for a model compiled for static shapes.
        policies: from the one that holds least memory to the one that holds most, which is the fastest at equal rows.

    Raises:
        ValueError: no candidate is left between ``lowest`` and ``highest``, or the bounds contradict each other.
    """
    highest = rank_batch if highest is None else highest
    if not 1 <= lowest <= highest:
        raise ValueError(
            f"microbatch bounds of {lowest} to {highest} rows hold no size. "
            "Set the lowest to at least 1 and at most the highest."
        )
    if not policies or len(set(policies)) != len(policies):
        raise ValueError(f"activation checkpointing policies {tuple(policies)} must be different ones, at least one.")
    cuts = [(rows, n) for rows, n in _cuts(rank_batch) if not divisors_only or rows * n == rank_batch]
    kept = [(rows, n) for rows, n in cuts if lowest <= rows <= highest]
    if not kept:
        below = max((rows for rows, _ in cuts if rows < lowest), default=None)
        above = min((rows for rows, _ in cuts if rows > highest), default=None)
        nearest = " and ".join(str(rows) for rows in (below, above) if rows is not None)
        raise ValueError(
            f"no microbatch from {lowest} to {highest} rows cuts the {rank_batch} rows of a rank"
            f"{' evenly' if divisors_only else ''} without waste. The nearest are {nearest}."
        )
    return tuple(Candidate(rows, n, policy) for policy in policies for rows, n in kept)


@dataclass(frozen=True)
class Settings:
    """What the search may do; equal on all ranks.

    Raises:
        ValueError: a value outside its range.
    """

    tokens_per_step: int
    """Tokens of a global batch, for tokens/s."""
    total_steps: int | None = None
    """Steps of the run. 5 % of them, at least 25, may be spent on sizes slower than the one that is kept."""
    margin: float = 0.05
    """Share of the budget that is left free."""
    headroom_bytes: int = 0
    """Bytes left free besides, for what the meter does not see (communication buffers, libraries)."""
    tie: float = 0.01
    """Step times closer than this share count as equal; the smaller memory wins."""
    free_meter: bool = False
    """Whether measuring costs nothing (CUDA allocator): then every step is measured. Otherwise a measured step is not
    timed, and few are measured."""
    interval: int = 200
    """Steps between two looks at memory and retries once settled."""
    max_sizes: int | None = None
    """How many different candidates may ever run, where each costs a compiled graph. None: any number."""
    max_changes: int = 24
    """Changes of the microbatch within one regime; after them it only shrinks."""
    entry_ratio: float | None = None
    """With several policies: at most how many times the activations of a policy are those of a leaner one at equal
    rows (number of layers for full checkpointing). Bounds a policy that has not run."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"the margin {self.margin} must be at least 0 and below 1.")
        if self.entry_ratio is not None and self.entry_ratio < 1.0:
            raise ValueError(f"entry_ratio={self.entry_ratio} must be at least 1.")
        for name in ("tokens_per_step", "interval", "max_changes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    def exploration_steps(self) -> int:
        """Steps that may be spent on sizes slower than the one that is kept."""
        return max(LEAST_EXPLORATION, int(EXPLORATION_SHARE * (self.total_steps or 0)))


EXPLORATION_SHARE = 0.05
LEAST_EXPLORATION = 25


def _cuts(rank_batch: int) -> list[tuple[int, int]]:
    """(rows, microbatches), rows ascending."""
    found = []
    n = 1
    while True:
        rows = math.ceil(rank_batch / n)
        found.append((rows, n))
        if rows == 1:
            return found[::-1]
        # the least n whose microbatches are smaller
        n = math.ceil(rank_batch / (rows - 1))
