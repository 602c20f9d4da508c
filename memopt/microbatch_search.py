"""The search for the fastest candidate that fits: what all ranks know of it, and the next move.

Everything here is equal on all ranks, and every move is a function of this state and the reduced ballot.

The order: one step at the smallest size is measured; from there the size grows, at most twofold, while the upper bound
of the next fits (PROBE); the largest is timed, then halves of it while they are not slower, then a size beside the best
(TIME); the fastest stays, or of equal ones that with the least memory (SETTLED). Of several policies the hungriest that
is known to fit comes first; a leaner one follows where it would have more rows. LOCKED is settled and only shrinks.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt.microbatch_ballot import REFUSED, WINDOW, Ballot
from memopt.microbatch_candidates import Candidate, Settings

START, PROBE, TIME, SETTLED, LOCKED = "start", "probe", "time", "settled", "locked"
PHASES = (START, PROBE, TIME, SETTLED, LOCKED)

QUICK = 2
"""Timed steps after which a candidate that is clearly slower or faster is left for the next."""
CLEARLY = 0.10
"""Share by which both are beyond the best so far; the outlier of one step does not fake two."""
PATIENCE = 4 * WINDOW
"""Timed steps after which a candidate is judged by however few undisturbed ones there were."""
EXTRA_GROWTH = 2
"""Growths of one search beyond those that doubling takes: memory keeps the last ones short."""
FEW_MOVES = 8
"""A search that has made so many changes only goes on where it gains."""
REFINEMENTS = 2
"""Candidates beside the best that one search times."""


class DoesNotFitError(ValueError):
    """Not even the smallest microbatch fits the budget."""


@dataclass(frozen=True)
class Move:
    """The candidate (index) to run next, the phase, and why."""

    target: int
    phase: str
    reason: str


@dataclass
class Search:
    """The shared state."""

    candidates: Sequence[Candidate]
    settings: Settings
    current: int = 0
    phase: str = START
    step: int = 0
    """Optimizer steps done."""
    since_change: int = 0
    """Steps done at the present candidate since it was chosen."""
    since_decision: int = 0
    known: bool = False
    """Whether every rank has measured the present candidate in the present state of memory."""
    timed: int = 0
    """Steps timed at the present candidate, in this phase."""
    has_settled: bool = False
    """Whether a search has ended before."""
    pending: str | None = None
    """Why memory must be looked at before the next step."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Candidate -> seconds of a step: the median of the maxima over ranks."""
    rough: dict[int, float] = field(default_factory=dict)
    """Candidate -> seconds of its fastest single step seen at a decision; tells, but decides nothing."""
    caps: set[int] = field(default_factory=set)
    """Candidates that ran out of memory in this regime."""
    refused: set[int] = field(default_factory=set)
    """Candidates for which memory could not be reserved, until it changes."""
    visits: dict[int, int] = field(default_factory=dict)
    """Candidate -> steps of searches spent there."""
    changes: int = 0
    moves: int = 0
    """Changes of this search."""
    decisions: int = 0
    grew: bool = True
    """Whether this search has reached a size that had not been settled on."""
    growths: int = 0
    refinements: int = 0
    entered: bool = False
    """Whether hungrier policies have been considered."""
    thrashing: int | None = None
    """The candidate that was left because its allocations had to be retried."""
    policies: tuple[str, ...] = ()
    hunger: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policies = tuple(dict.fromkeys(candidate.policy for candidate in self.candidates))
        self.hunger = [self.policies.index(candidate.policy) for candidate in self.candidates]

    def next_move(self, ballot: Ballot) -> Move:
        """The decision.

        Raises:
            DoesNotFitError: on every rank, without its numbers; the controller adds them.
        """
        self.refused |= {index for index, use in enumerate(ballot.upper) if REFUSED <= use < 2 * REFUSED}
        if self.current in self.caps:
            return self._shrink(ballot, "ran out of memory before")
        if ballot.upper[self.current] > 1.0:
            return self._shrink(ballot, "needs more than the budget leaves")
        if self.phase == START:
            return self._start(ballot)
        if self.pending is not None:
            stays = self.phase == LOCKED or (self.pending == "resumed" and self.phase == SETTLED)
            return Move(self.current, self.phase if stays else PROBE, self.pending)
        if self.phase == PROBE:
            return self._probe(ballot)
        if self.phase == TIME:
            return self._time(ballot)
        times = [seconds for seconds in ballot.times if seconds < float("inf")]
        if len(times) >= WINDOW and not ballot.retrying:
            self.seconds[self.current] = statistics.median(times)
        if ballot.moved and self.phase == SETTLED:
            return Move(self.current, PROBE, "memory use moved by itself")
        if ballot.retrying and self.phase == SETTLED:
            return self._relieve(ballot)
        return Move(self.current, self.phase, "still settled")

    def due(self) -> bool:
        """Whether a decision is due before the next step."""
        if self.phase == START or self.pending is not None:
            return True
        if self.phase == PROBE:
            return self.since_decision > 0
        if self.phase == TIME:
            return self.since_decision > 0 and (self.timed >= WINDOW or (self.timed == QUICK and bool(self.seconds)))
        return self.since_decision >= self.settings.interval

    def measures(self) -> bool:
        """Whether the next step must be measured."""
        if self.settings.free_meter or self.phase == PROBE:
            return self.settings.free_meter or not self.known
        return self.phase in (SETTLED, LOCKED) and self.since_decision == self.settings.interval - 1

    def times(self) -> bool:
        """Whether the next step is timed: not the first at a size, nor one that measuring slows down."""
        return self.since_change > 0 and (self.settings.free_meter or not self.measures())

    def count_step(self) -> None:
        """A step was done."""
        times = self.times()
        searching = self.phase in (PROBE, TIME)
        self.visits[self.current] = self.visits.get(self.current, 0) + searching
        self.timed += times
        self.step, self.since_change, self.since_decision = (
            self.step + 1,
            self.since_change + 1,
            self.since_decision + 1,
        )

    def apply(self, move: Move, known: bool) -> None:
        """Take ``move`` as decided; ``known``: whether the candidate so far had been measured on every rank."""
        self.known = known and move.target == self.current
        if move.target != self.current:
            self.changes += 1
            self.moves += 1
            self.since_change = 0
        if move.target != self.current or move.phase != self.phase:
            self.timed = 0
        if self.phase in (SETTLED, LOCKED) and move.phase == PROBE:
            self.grew, self.entered, self.growths, self.refinements, self.moves = False, False, 0, 0, 0
        self.current, self.phase, self.pending = move.target, move.phase, None
        self.decisions += 1
        self.since_decision = 0
        self.has_settled |= move.phase in (SETTLED, LOCKED)

    def growth(self) -> list[int]:
        """Candidates to which the next move may be a growth, if they fit."""
        here = self.candidates[self.current]
        found = [
            index
            for index in self._of_policy(self.hunger[self.current])
            if here.rows < self.candidates[index].rows <= 2 * here.rows and not self._barred(index)
        ]
        if not self.entered:
            tried = {self.hunger[index] for index in self.seconds}
            found += [
                index
                for index, candidate in enumerate(self.candidates)
                if self.hunger[index] > self.hunger[self.current]
                and self.hunger[index] not in tried
                and candidate.rows <= here.rows
            ]
        return [index for index in found if index not in self.caps | self.refused]

    def has_room(self, target: int) -> bool:
        """Whether the limits on changes and on different candidates admit ``target``."""
        settings = self.settings
        new = target not in self.visits and settings.max_sizes is not None and len(self.visits) >= settings.max_sizes
        return target == self.current or (self.changes < settings.max_changes and not new)

    def fastest(self, upper: Sequence[float]) -> int:
        """The fastest of the timed candidates that fit; of equal ones that with the least memory."""
        fit = {index: seconds for index, seconds in self.seconds.items() if self._fits(index, upper)}
        if not fit:
            return self.current
        equal = [i for i, seconds in fit.items() if seconds <= min(fit.values()) * (1.0 + self.settings.tie)]
        return min(equal, key=lambda index: (upper[index], self.candidates[index].rows, self.hunger[index]))

    def _start(self, ballot: Ballot) -> Move:
        # the hungriest policy that is predicted to fit, at its largest predicted size
        known = [index for index in range(len(self.candidates)) if self._fits(index, ballot.upper)]
        target = max(known, key=lambda index: (self.hunger[index], self.candidates[index].rows), default=self.current)
        if target == self.current:
            return Move(target, PROBE, "starts with the smallest")
        self.entered = True
        return Move(target, PROBE, "starts where it is predicted to fit")

    def _probe(self, ballot: Ballot) -> Move:
        if ballot.unmeasured:
            return Move(self.current, PROBE, "not measured on every rank yet")
        if self.timed == 0 and self.visits.get(self.current) == self.step:
            return Move(self.current, PROBE, "the first size is timed once, for comparison")
        possible = self.growth()
        fitting = [index for index in possible if self._fits(index, ballot.upper)]
        here = self.hunger[self.current]
        hungrier = [index for index in fitting if self.hunger[index] > here]
        self.entered = True
        if hungrier:
            target = max(hungrier, key=lambda index: (self.hunger[index], self.candidates[index].rows))
            return self._within_limits(Move(target, PROBE, "a policy that recomputes less fits"), ballot)
        if fitting and self.growths < math.log2(max(one.rows for one in self.candidates)) + EXTRA_GROWTH:
            target = max(fitting, key=lambda index: self.candidates[index].rows)
            self.growths += 1
            self.grew = True
            return self._within_limits(Move(target, PROBE, "a larger one fits"), ballot)
        if self._is_dominated(self.current) or (self.current in self.seconds and not self.grew):
            return self._settle(ballot)
        if self.current in self.seconds:
            return self._after_timing(ballot)
        return Move(self.current, TIME, self._why_no_larger(possible, ballot))

    def _time(self, ballot: Ballot) -> Move:
        times = [seconds for seconds in ballot.times if seconds < float("inf")]
        others = [seconds for index, seconds in self.seconds.items() if index != self.current]
        if len(times) < WINDOW and self.timed < PATIENCE:
            best = min(others, default=0.0)
            enough = best > 0.0 and len(times) >= QUICK
            clear = enough and (min(times) > best * (1.0 + CLEARLY) or max(times) < best / (1.0 + CLEARLY))
            too_dear = enough and self._spent() + WINDOW - self.timed > self.settings.exploration_steps()
            if not clear and not too_dear:
                return Move(self.current, TIME, "being timed")
        if times:
            self.seconds[self.current] = statistics.median(times)
        return self._after_timing(ballot)

    def _after_timing(self, ballot: Ballot) -> Move:
        if self.thrashing is None:
            trial = self._smaller_trial(ballot)
            if trial is None:
                trial = self._trial_beside_best(ballot)
            if trial is not None:
                return self._within_limits(Move(trial, TIME, "is it faster?"), ballot)
            leaner = self._leaner(ballot)
            if leaner is not None:
                return self._within_limits(Move(leaner, PROBE, "recomputing more leaves room for rows"), ballot)
        return self._settle(ballot)

    def _settle(self, ballot: Ballot, locked: str | None = None) -> Move:
        target = self.fastest(ballot.upper)
        thrashed, self.thrashing = self.thrashing, None
        if thrashed is not None and target == thrashed:
            locked = "faster in spite of its retries"
        if locked is not None:
            return Move(target, LOCKED, locked)
        return Move(target, SETTLED, "fastest that fits" if target in self.seconds else "largest that fits")

    def _within_limits(self, move: Move, ballot: Ballot) -> Move:
        if self.has_room(move.target):
            return move
        sizes = self.settings.max_sizes is not None and len(self.visits) >= self.settings.max_sizes
        return self._settle(
            ballot,
            f"max_sizes={self.settings.max_sizes} compiled sizes are used up"
            if sizes
            else f"max_changes={self.settings.max_changes} changes are used up",
        )

    def _shrink(self, ballot: Ballot, why: str) -> Move:
        """To the largest size that is known to fit; else to half, if it may fit; else to the smallest of all."""
        here, rows = self.hunger[self.current], self.candidates[self.current].rows
        smaller = [
            index
            for index, candidate in enumerate(self.candidates)
            if index not in self.caps and self.hunger[index] <= here and (candidate.rows < rows)
        ]
        fitting = [index for index in smaller if self._fits(index, ballot.upper)]
        halves = [i for i in smaller if self.candidates[i].rows <= rows // 2 and ballot.lower[i] <= 1.0]
        lowest = [index for index in self._of_policy(0) if index not in self.caps][:1]
        choice = fitting or halves or [index for index in lowest if index != self.current]
        if not choice:
            if self.has_settled and self._keeps_budget(ballot) and self.current not in self.caps:
                return Move(self.current, SETTLED, "the smallest, without the margin")
            raise DoesNotFitError(why)
        target = max(choice, key=lambda index: (self.hunger[index], self.candidates[index].rows))
        self.thrashing = None
        return Move(target, LOCKED if self.phase == LOCKED else PROBE, why)

    def _relieve(self, ballot: Ballot) -> Move:
        """One candidate less, because allocations have to be retried; it is then timed against this one."""
        rows = self.candidates[self.current].rows
        smaller = [i for i in self._of_policy(self.hunger[self.current]) if self.candidates[i].rows < rows]
        times = [seconds for seconds in ballot.times if seconds < float("inf")]
        if not smaller or not times:
            return Move(self.current, SETTLED, "still settled")
        self.seconds[self.current] = statistics.median(times)
        self.thrashing = self.current
        self.seconds.pop(smaller[-1], None)
        return Move(smaller[-1], TIME, "allocations are being retried")

    def _smaller_trial(self, ballot: Ballot) -> int | None:
        """About half of the smallest timed size, if that one was not slower than the best."""
        policy = self._of_policy(self.hunger[self.current])
        timed = [index for index in policy if index in self.seconds]
        if not timed or not self._affordable():
            return None
        if len(timed) > 1:
            slowness = self.seconds[timed[0]] / min(self.seconds[index] for index in timed[1:]) - 1.0
            limit = CLEARLY if len(timed) < 3 else self.settings.tie
            if slowness > (limit if self._may_wander() else -CLEARLY / 2):
                return None
        half = self.candidates[timed[0]].rows // 2
        found = [i for i in policy if self.candidates[i].rows <= half and self._fits(i, ballot.upper)]
        return found[-1] if found and not self._is_dominated(found[-1]) else None

    def _trial_beside_best(self, ballot: Ballot) -> int | None:
        """The middle between the best size and the better of its timed neighbours, if that is close."""
        policy = self._of_policy(self.hunger[self.current])
        timed = [index for index in policy if index in self.seconds]
        if len(timed) < 2 or self.refinements >= REFINEMENTS or not self._may_wander() or not self._affordable():
            return None
        best = min(timed, key=lambda index: self.seconds[index])
        place = timed.index(best)
        neighbours = timed[max(0, place - 1) : place] + timed[place + 1 : place + 2]
        for neighbour in sorted(neighbours, key=lambda index: self.seconds[index]):
            between = [i for i in range(min(best, neighbour) + 1, max(best, neighbour)) if self._fits(i, ballot.upper)]
            if between and self.seconds[neighbour] <= self.seconds[best] * (1.0 + 2 * CLEARLY):
                self.refinements += 1
                return between[len(between) // 2]
        return None

    def _leaner(self, ballot: Ballot) -> int | None:
        """The next leaner policy at the rows that this one reached, where it may have more of them."""
        here = self.hunger[self.current]
        timed = [index for index in self._of_policy(here) if index in self.seconds]
        if here == 0 or not timed or not self._affordable():
            return None
        best = min(self.seconds[index] for index in timed)
        hungrier = [seconds for index, seconds in self.seconds.items() if self.hunger[index] > here]
        if hungrier and min(hungrier) < best:
            return None
        rows = self.candidates[timed[-1]].rows
        leaner = self._of_policy(here - 1)
        if rows == self.candidates[leaner[-1]].rows or any(index in self.seconds for index in leaner):
            return None
        found = [i for i in leaner if rows <= self.candidates[i].rows <= 2 * rows and self._fits(i, ballot.upper)]
        return found[-1] if found else None

    def _may_wander(self) -> bool:
        """Whether changes are left for a trial, and the way back, that need not gain."""
        return self.moves + 2 <= FEW_MOVES

    def _affordable(self) -> bool:
        """Whether one more candidate may be timed."""
        return self._spent() + 1 + QUICK <= self.settings.exploration_steps()

    def _spent(self) -> int:
        """Steps of searches at others than the fastest known."""
        best = min(self.seconds, key=lambda index: self.seconds[index])
        return sum(steps for index, steps in self.visits.items() if index != best)

    def _is_dominated(self, index: int) -> bool:
        """Whether a hungrier policy, which is faster at equal rows, was timed with as many rows."""
        rows, hunger = self.candidates[index].rows, self.hunger[index]
        return any(self.hunger[i] > hunger and self.candidates[i].rows >= rows for i in self.seconds)

    def _barred(self, index: int) -> bool:
        """Whether a larger size of this policy was slower than the present one: none beyond is tried."""
        mine = self.seconds.get(self.current)
        if mine is None:
            return False
        rows = self.candidates[self.current].rows
        slower = mine * (1.0 + self.settings.tie)
        policy = self._of_policy(self.hunger[index])
        return any(self.candidates[i].rows > rows and self.seconds[i] > slower for i in policy if i in self.seconds)

    def _fits(self, index: int, upper: Sequence[float]) -> bool:
        return upper[index] <= 1.0 and index not in self.caps and index not in self.refused

    def _keeps_budget(self, ballot: Ballot) -> bool:
        return all(use.need <= use.budget for use in ballot.uses.values())

    def _of_policy(self, hunger: int) -> list[int]:
        """Indices of a policy's candidates, rows ascending."""
        return [index for index, mine in enumerate(self.hunger) if mine == hunger]

    def _why_no_larger(self, possible: Sequence[int], ballot: Ballot) -> str:
        if self.refused & set(self._of_policy(self.hunger[self.current])):
            return "memory for a larger one could not be reserved"
        if not possible:
            return "no larger one is left"
        over = all(ballot.lower[index] > 1.0 for index in possible)
        return "no larger one fits" if over else "no larger one is sure to fit"
