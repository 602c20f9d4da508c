"""How much memory a candidate needs on this rank, bounded from what was measured at others.

Assumed: the peak of a step is the largest of several lines a_t + b_t m in the rows m, each with b_t >= 0 and
a_t >= S, where S is the floor: bytes that are resident during the whole forward and backward. Where a step has several
microbatches, all but the first find gradients resident, at least g and at most G bytes, and their peak is that of the
step: its floor is S + g, and it is at most G above that of a step of one microbatch. Then, measured P(m),

* k m rows need at most U = S + k (P(m) - S) for k >= 1, and at most P(m) for k <= 1;
* between two measured sizes the peak is at most their chord (it is convex), beyond them at least;
* a policy needs at most as much as a hungrier one, whose activations are at most ``entry_ratio`` times its own.

Not covered by this, but by the margin: kernels that switch algorithm with size, and fragmentation, for which the
measured ratio of reserved to allocated bytes stands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memopt.microbatch_candidates import Candidate, Settings

DRIFT = 0.03
"""A peak that differs from the one known by more than this share has moved."""
PREDICTION_FACTOR = 1.25
"""A predicted peak counts this many times: it only chooses where to start."""


@dataclass(frozen=True)
class Limits:
    """What this rank may use at this moment, in bytes."""

    budget_bytes: int
    """All that the run may use on this rank's device."""
    floor_bytes: int
    """S: resident during the whole forward and backward. If it is uncertain, a smaller one is safe."""
    added_bytes: int = 0
    """Declared but perhaps not yet seen, and possible at the peak: added to every need."""
    optimizer_bytes: int = 0
    """Declared periodic peak of the optimizer above the floor, while no activation is alive."""
    gradients: tuple[int, int] = (0, 0)
    """Of the gradients that all microbatches of a step but the first find: at least, and at most."""
    reserve: Callable[[int], bool] | None = None
    """Tries to allocate and free that many bytes now; False if it could not. None: not asked."""


class Curve:
    """Peaks of the candidates on this rank, measured or foretold.

    ``fresh`` holds peaks measured in the present state of memory, ``stale`` those from before it changed, shifted by
    what is known of the change. Growth trusts the fresh ones only.
    """

    def __init__(self, candidates: Sequence[Candidate], settings: Settings) -> None:
        self._candidates, self._settings = candidates, settings
        order = list(dict.fromkeys(candidate.policy for candidate in candidates))
        self._hunger = [order.index(candidate.policy) for candidate in candidates]
        self.fresh: dict[int, float] = {}
        self.stale: dict[int, float] = {}
        self.floor: float | None = None
        self._gradients: tuple[float, float] = (0.0, 0.0)
        self.fragmentation = 1.0
        """Reserved over allocated bytes at the largest peak so far."""
        self._largest_peak = 0.0

    def predict(self, peaks: Mapping[int, float]) -> None:
        """Take ``peaks`` (candidate index -> bytes) from a plan, until something is measured."""
        self.stale.update({index: PREDICTION_FACTOR * peak for index, peak in peaks.items()})

    def measure(self, index: int, peak: float, reserved: float | None) -> bool:
        """Take the peak of a steady step of candidate ``index``; returns whether it moved from what was known."""
        if peak >= self._largest_peak and peak > 0:
            # what the allocator keeps from a larger size says nothing about a smaller one
            self._largest_peak = peak
            self.fragmentation = max(1.0, (reserved or peak) / peak)
        known = self.fresh.get(index)
        moved = known is not None and abs(peak - known) > DRIFT * known
        if moved:
            assert known is not None
            self.shift(peak - known)
        elif known is not None:
            peak = max(peak, known)
        elif index in self.stale:
            self._move_stale(peak - self.stale[index])
        self.fresh[index] = peak
        return moved

    def settle_floor(self, limits: Limits) -> None:
        """Take the floor of now; stale peaks move with what became resident or was freed since the last one."""
        if self.floor is not None:
            self._move_stale(limits.floor_bytes - self.floor)
        self.floor, self._gradients = limits.floor_bytes, limits.gradients

    def outdate(self, scale: float = 1.0) -> None:
        """Memory has changed: nothing is fresh. Activations are ``scale`` times what they were."""
        known, floor = self.stale | self.fresh, self.floor or 0.0
        self.stale = {index: floor + scale * (peak - floor) for index, peak in known.items()}
        self.fresh, self._largest_peak = {}, 0.0

    def shift(self, change: float) -> None:
        """Every peak has moved by ``change`` bytes, as one of them did."""
        self.stale |= self.fresh
        self.fresh = {}
        self._move_stale(change)

    def upper(self, index: int) -> float | None:
        """Bytes that candidate ``index`` needs at most; None where nothing is known."""
        if index in self.fresh:
            return self.fresh[index]
        bounds = self._bounds(index, self.fresh)
        rows = self._candidates[index].rows
        own = [self._candidates[other].rows for other in self.fresh if self._hunger[other] == self._hunger[index]]
        if not bounds or rows < min(own, default=0):
            # a stale peak serves to step down, never to grow
            bounds += [self.stale[index]] if index in self.stale else self._bounds(index, self.stale)
        return max(min(bounds), self.lower(index)) if bounds else None

    def lower(self, index: int) -> float:
        """Bytes that candidate ``index`` needs at least: the chord through the two largest measured sizes below it."""
        known = self.fresh or self.stale
        repeats, rows = self._repeats(index), self._candidates[index].rows
        floor = self._floor(known, repeats)
        least = {i: self._least(i, peak, repeats) for i, peak in known.items()}
        own = self._points(least, self._hunger[index])
        below, above = [point for point in own if point[0] <= rows], [point for point in own if point[0] > rows]
        bounds = [floor] + [floor + rows / m * (peak - floor) for m, peak in above]
        if below:
            bounds.append(below[-1][1])
        if len(below) > 1:
            (m1, p1), (m2, p2) = below[-2:]
            bounds.append(p2 + (p2 - p1) * (rows - m2) / (m2 - m1))
        return max(bounds)

    def need(self, peak: float, limits: Limits) -> float:
        """``peak`` with the declared peaks that a step may not have shown."""
        return max(peak + limits.added_bytes, limits.floor_bytes + limits.optimizer_bytes)

    def usable(self, limits: Limits) -> float:
        """Bytes that may be planned with."""
        settings = self._settings
        return limits.budget_bytes * (1.0 - settings.margin) / self.fragmentation - settings.headroom_bytes

    def _repeats(self, index: int) -> bool:
        """Whether a step of this candidate has microbatches that find gradients resident."""
        return self._candidates[index].accumulation > 1

    def _most(self, index: int, peak: float, repeats: bool) -> float:
        """What a step of these rows needs at most, with or without gradients resident, if candidate ``index`` needs
        ``peak``."""
        return peak + self._gradients[1] * (repeats and not self._repeats(index))

    def _least(self, index: int, peak: float, repeats: bool) -> float:
        """The same, at least."""
        return peak - self._gradients[1] * (self._repeats(index) and not repeats)

    def _floor(self, known: Mapping[int, float], repeats: bool) -> float:
        # a floor above a peak cannot be one, nor one above where the line through two peaks starts: some line then
        # starts lower, and the bounds must allow for it
        known = {index: peak for index, peak in known.items() if self._repeats(index) == repeats}
        floor = min([(self.floor or 0.0) + self._gradients[0] * repeats, *known.values()])
        for policy in set(self._hunger):
            own = self._points(known, policy)
            for (m1, p1), (m2, p2) in pairwise(own):
                floor = min(floor, p1 - m1 * (p2 - p1) / (m2 - m1))
        return floor

    def _points(self, known: Mapping[int, float], hunger: int) -> list[tuple[int, float]]:
        """(rows, bytes) of one policy, rows ascending."""
        return sorted((self._candidates[i].rows, peak) for i, peak in known.items() if self._hunger[i] == hunger)

    def _bounds(self, index: int, known: Mapping[int, float]) -> list[float]:
        rows, hunger, repeats = self._candidates[index].rows, self._hunger[index], self._repeats(index)
        bounds, own = [], []
        for other, peak in known.items():
            k = max(1.0, rows / self._candidates[other].rows)
            if hunger > self._hunger[other]:
                if self._settings.entry_ratio is None:
                    continue
                k *= self._settings.entry_ratio
            elif hunger == self._hunger[other]:
                own.append((self._candidates[other].rows, self._most(other, peak, repeats)))
            floor = self._floor(known, self._repeats(other))
            bounds.append(self._most(other, floor + k * (peak - floor), repeats))
        below = max((point for point in own if point[0] < rows), default=None)
        above = min((point for point in own if point[0] > rows), default=None)
        if below and above:
            share = (rows - below[0]) / (above[0] - below[0])
            bounds.append(below[1] + share * (above[1] - below[1]))
        return bounds

    def _move_stale(self, change: float) -> None:
        self.stale = {index: peak + change for index, peak in self.stale.items()}
