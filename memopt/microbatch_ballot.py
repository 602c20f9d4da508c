"""What the ranks tell each other when a microbatch is decided: one vector, reduced by MAX.

Minima are the maxima of negated entries. What must be equal on all ranks is entered both ways, so that a difference
shows in the maxima and can be told. What is wanted of the tightest rank has a place for each rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 5
"""Step times that make a median."""
SLOTS = 8
"""Step times that are sent: some are excluded because something disturbed them on some rank."""
REFUSED = 1e6
"""Utilisation of a candidate for which a rank could not reserve memory."""
UNKNOWN = 1e9
"""Utilisation of a candidate of which nothing is known."""


class DivergenceError(RuntimeError):
    """The ranks' controllers do not agree on what is shared; the message says on what."""


@dataclass
class Use:
    """Bytes of one rank: what the present candidate needs, what may be planned with, the budget, the floor."""

    need: float
    usable: float
    budget: float
    floor: float

    @property
    def utilisation(self) -> float:
        """Of what may be planned with; ``UNKNOWN`` where that is nothing."""
        return self.need / self.usable if self.usable > 0 else UNKNOWN


@dataclass
class Ballot:
    """One rank's, before the reduction; that of all ranks, after it."""

    guards: Mapping[str, float]
    """What must be equal on all ranks."""
    retrying: bool
    """The allocator had to free and retry again and again."""
    moved: bool
    """Memory use differs from what was known, with nobody having said so."""
    unmeasured: bool
    """There is no steady peak of the present candidate."""
    times: Sequence[float]
    """Seconds of the last timed steps at the present candidate, oldest first; infinite where one was disturbed."""
    upper: Sequence[float]
    """Utilisation of each candidate at most: bytes over what may be planned with; ``REFUSED``, ``UNKNOWN``."""
    lower: Sequence[float]
    """Utilisation of each candidate at least."""
    uses: Mapping[int, Use]
    """Of this rank; of every rank, after the reduction."""

    def tightest(self) -> int:
        """The rank that uses most of what it may."""
        return max(self.uses, key=lambda rank: self.uses[rank].utilisation)


def encode(ballot: Ballot, world_size: int) -> list[float]:
    """The vector (float64) of one rank: its length depends on the candidates and the world only."""
    guards = [signed for value in ballot.guards.values() for signed in (value, -value)]
    flags = [float(ballot.retrying), float(ballot.moved), float(ballot.unmeasured)]
    times = [*ballot.times, *[-math.inf] * (SLOTS - len(ballot.times))]
    uses = [-math.inf] * (4 * world_size)
    for rank, use in ballot.uses.items():
        uses[4 * rank : 4 * rank + 4] = [use.need, use.usable, use.budget, use.floor]
    return [*guards, *flags, *times, *ballot.upper, *ballot.lower, *uses]


def decode(vector: Sequence[float], names: Sequence[str], candidates: int, world_size: int) -> Ballot:
    """The ballot of all ranks from the reduced vector; ``names`` are those of the guards.

    Raises:
        DivergenceError: the ranks differ in a guard.
    """
    expected = 2 * len(names) + 3 + SLOTS + 2 * candidates + 4 * world_size
    assert len(vector) == expected, f"{len(vector)} entries instead of {expected}"
    highest, negated = vector[: 2 * len(names) : 2], vector[1 : 2 * len(names) : 2]
    differences = [
        f"{name} is {-low:.12g} on some and {high:.12g} on others"
        for name, high, low in zip(names, highest, negated, strict=True)
        if high != -low
    ]
    if differences:
        raise DivergenceError(f"the microbatch controllers of the ranks differ: {'; '.join(differences)}.")
    rest = list(vector[2 * len(names) :])
    flags, rest = rest[:3], rest[3:]
    times, rest = rest[:SLOTS], rest[SLOTS:]
    upper, lower, rest = rest[:candidates], rest[candidates : 2 * candidates], rest[2 * candidates :]
    uses = {rank: Use(*rest[4 * rank : 4 * rank + 4]) for rank in range(world_size)}
    times = [seconds for seconds in times if seconds > -math.inf]
    retrying, moved, unmeasured = (bool(flag) for flag in flags)
    return Ballot({}, retrying, moved, unmeasured, times, upper, lower, uses)
