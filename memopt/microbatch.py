"""Chooses the microbatch during a run: the largest that fits is found by measuring, the fastest of those is kept.

The controller is driven at the boundaries of optimizer steps, does no collective itself and is equal on all ranks:

    while training:
        if controller.due():
            vector = controller.vote(limits)                           # of this rank, float64
            decision = controller.decide(all_reduce_max(vector))       # on every rank
        plan = controller.plan()                                       # candidate, measure?, timed?
        ... one optimizer step ...
        controller.record(Sample(...))

Out of memory is never the signal: a size runs only if the upper bound of its need fits on every rank
(``microbatch_memory``) and every rank could reserve it. The moves are in ``microbatch_search``, the vector in
``microbatch_ballot``. Settled, nothing is exchanged between two looks ``Settings.interval`` steps apart.
"""

import dataclasses
import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memopt.microbatch_ballot import REFUSED, SLOTS, UNKNOWN, Ballot, DivergenceError, Use, decode, encode
from memopt.microbatch_candidates import Candidate, Settings, candidates
from memopt.microbatch_memory import Curve, Limits
from memopt.microbatch_search import LOCKED, PHASES, SETTLED, DoesNotFitError, Move, Search

__all__ = [
    "Candidate",
    "Controller",
    "Decision",
    "DivergenceError",
    "DoesNotFitError",
    "Limits",
    "Sample",
    "Settings",
    "StepPlan",
    "candidates",
]

FORMAT = 1
RETRY_STEPS, RETRY_LIMIT = 4, 2
"""Allocation retries in two of the last four steps persist."""
BUDGET = "budget"
"""The key of a fingerprint that says what fits, but not what a size needs."""


@dataclass(frozen=True)
class StepPlan:
    """What the next step runs, whether the meter of memory must watch it, and whether its time counts."""

    candidate: Candidate
    measure: bool
    timed: bool


@dataclass(frozen=True)
class Sample:
    """What this rank saw of one step."""

    seconds: float
    """Wall time of the step."""
    peak_bytes: int | None = None
    """Highest allocated bytes of the step; None where it was not measured."""
    reserved_bytes: int | None = None
    """Highest bytes that the allocator held; None where there is no such thing."""
    retries: int = 0
    """Allocations that had to free cached memory and try again."""
    disturbed: bool = False
    """Something else took time: evaluation, saving, compilation, a stall of the loader."""
    steady: bool = True
    """Whether the optimizer state was there from the beginning and no declared periodic peak fell into the step."""


@dataclass(frozen=True)
class Decision:
    """The outcome of one vote, equal on all ranks. ``record`` is its structured event."""

    step: int
    """Optimizer steps done; ``new`` runs from the next one."""
    old: Candidate
    new: Candidate
    phase: str
    reason: str
    notable: bool
    """Whether candidate or phase changed: then it belongs in the log."""
    record: dict[str, Any]


class Controller:
    """The microbatch of every step of a run; see the module.

    Args:
        candidates: of ``candidates()``, equal on all ranks.
        settings: equal on all ranks.
        rank, world_size: of all that take part in the vote, every mesh dimension included.
        fingerprint: plain values of everything that changes the memory curve, equal on all ranks; ``budget`` is one of
            its keys, as it was configured.
        predicted: candidate -> bytes from a plan; chooses where to start and is not trusted further.
        step: optimizer steps done before.
        replay: records of an earlier run; its candidates run at its steps, and nothing is measured or decided.

    Raises:
        ValueError: several policies without ``entry_ratio``; a record of ``replay`` that is no candidate.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        settings: Settings,
        rank: int = 0,
        world_size: int = 1,
        fingerprint: Mapping[str, Any] | None = None,
        *,
        predicted: Mapping[Candidate, float] | None = None,
        step: int = 0,
        replay: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.settings = settings
        self._rank, self._world_size = rank, world_size
        self._fingerprint = dict(fingerprint or {})
        self._search = Search(self.candidates, settings, step=step)
        if len(self._search.policies) > 1 and settings.entry_ratio is None:
            raise ValueError(
                f"several activation checkpointing policies ({', '.join(self._search.policies)}) need entry_ratio: "
                "how many times the activations of one are those of a leaner one. The number of layers is safe."
            )
        self._curve = Curve(self.candidates, settings)
        if predicted:
            self._curve.predict({self.candidates.index(candidate): peak for candidate, peak in predicted.items()})
        self._replay = None if replay is None else self._read_log(replay)
        self._regime = "start"
        self._times: deque[float] = deque(maxlen=SLOTS)
        self._retries: deque[bool] = deque(maxlen=RETRY_STEPS)
        self._peak: float | None = None
        self._reserved: float | None = None
        self._moved = False
        self.use: Use | None = None
        """What the next step needs at most and may use, on the rank that has least left; None before a decision."""

    @property
    def candidate(self) -> Candidate:
        """What the next step runs."""
        return self.candidates[self._search.current]

    @property
    def phase(self) -> str:
        """``start``, ``probe``, ``time``, ``settled`` or ``locked``."""
        return self._search.phase

    @property
    def settled(self) -> bool:
        """Whether the search is over, for now."""
        return self._search.phase in (SETTLED, LOCKED)

    def tokens_per_second(self, candidate: Candidate) -> float | None:
        """Of all ranks, at ``candidate``; of a single step where it was not timed further, None where never."""
        index = self.candidates.index(candidate)
        seconds = self._search.seconds.get(index, self._search.rough.get(index))
        return self.settings.tokens_per_step / seconds if seconds else None

    def due(self) -> bool:
        """Whether ``vote`` and ``decide`` must come before the next step; the same on all ranks."""
        return self._replay is None and self._search.due()

    def plan(self) -> StepPlan:
        """What the next step runs; the same on all ranks."""
        search = self._search
        if self._replay is not None:
            made = [step for step in self._replay if step <= search.step]
            search.current = self._replay[max(made)] if made else search.current
            return StepPlan(self.candidate, measure=False, timed=False)
        assert not search.due(), "a decision is due before the next step"
        return StepPlan(self.candidate, search.measures(), search.times())

    def record(self, sample: Sample) -> None:
        """Take this rank's sample of the step that ``plan`` was for."""
        search = self._search
        if search.times():
            self._times.append(math.inf if sample.disturbed else sample.seconds)
        if sample.peak_bytes is not None and sample.steady and search.measures():
            self._peak = max(self._peak or 0.0, sample.peak_bytes)
            self._reserved = sample.reserved_bytes
        if search.phase == SETTLED:
            self._retries.append(sample.retries > 0)
        search.count_step()

    def memory_changed(self, reason: str, regime: str | None = None, scale: float = 1.0) -> None:
        """Resident memory was freed or needed, or steps will need another amount. Called on all ranks at one step.

        The next vote, due at once, shrinks if need be; the next step is measured and the search reopened.

        Args:
            reason: for the log.
            regime: name of what decides the memory curve and the speed, if that has changed (a sequence length):
                step times and ruled-out sizes of the old one are forgotten, and a locked search starts again.
            scale: activations will be this many times what they were.
        """
        search = self._search
        self._take_peak()
        self._curve.outdate(scale)
        search.refused.clear()
        if regime is not None and regime != self._regime:
            self._regime = regime
            search.seconds.clear()
            search.rough.clear()
            self._times.clear()
            search.caps.clear()
            search.changes = 0
            if self.settled:
                search.phase = SETTLED
        self._moved = False
        if search.phase != "start":
            search.pending = reason

    def rule_out(self, candidate: Candidate) -> None:
        """``candidate`` ran out of memory: it, larger ones and hungrier policies never run in this regime.

        On all ranks at one step, or by a single process; a decision is then due, which steps down.
        """
        search = self._search
        hunger = search.policies.index(candidate.policy)
        search.caps |= {
            index
            for index, other in enumerate(self.candidates)
            if other.rows >= candidate.rows and search.hunger[index] >= hunger
        }
        if search.current in search.caps:
            search.pending = search.pending or "out of memory"

    def vote(self, limits: Limits) -> list[float]:
        """This rank's vector for one all-reduce MAX in float64. May call ``limits.reserve``."""
        self._take_peak()
        self._curve.settle_floor(limits)
        search, usable = self._search, self._curve.usable(limits)
        lowest_need = self._curve.need(limits.floor_bytes, limits)
        needs = [self._need(index, limits) for index in range(len(self.candidates))]
        need = needs[search.current]
        use = Use(lowest_need if need is None else need, usable, limits.budget_bytes, limits.floor_bytes)
        upper = [UNKNOWN if one is None or usable <= 0 else one / usable for one in needs]
        upper[search.current] = use.utilisation
        if search.phase == "probe" and search.current in self._curve.fresh:
            self._reserve(limits, upper, needs, use.need)
        lower = [
            self._curve.need(self._curve.lower(index), limits) / usable if usable > 0 else UNKNOWN
            for index in range(len(self.candidates))
        ]
        retrying = len(self._retries) == RETRY_STEPS and sum(self._retries) >= RETRY_LIMIT
        ballot = Ballot(
            self._guards(),
            retrying,
            self._moved,
            search.current not in self._curve.fresh,
            tuple(self._times),
            upper,
            lower,
            {self._rank: use},
        )
        return encode(ballot, self._world_size)

    def decide(self, reduced: Sequence[float], contributors: Mapping[str, int] | None = None) -> Decision:
        """The decision from the reduced vector; the same on all ranks.

        Args:
            reduced: maxima over all ranks of what ``vote`` returned.
            contributors: owner -> bytes on this rank, for the message if nothing fits.

        Raises:
            DoesNotFitError: not even the smallest candidate fits on some rank; raised on every rank.
            DivergenceError: the ranks' controllers are not in the same state.
        """
        search = self._search
        ballot = decode(reduced, list(self._guards()), len(self.candidates), self._world_size)
        try:
            move = search.next_move(ballot)
        except DoesNotFitError as error:
            raise DoesNotFitError(self._does_not_fit(str(error), ballot, contributors or {})) from None
        old, old_phase = self.candidate, search.phase
        undisturbed = [seconds for seconds in ballot.times if seconds < math.inf]
        if undisturbed:
            search.rough[search.current] = min(undisturbed)
        search.apply(move, known=not ballot.unmeasured)
        self.use = self._expected(ballot)
        if self.candidate != old or search.phase != old_phase:
            self._times.clear()
            self._retries.clear()
        self._moved = False
        record = self._record(old, move, ballot)
        notable = self.candidate != old or search.phase != old_phase
        return Decision(search.step, old, self.candidate, search.phase, move.reason, notable, record)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint. Peaks are those of this rank: save and load one rank's on all."""
        self._take_peak()
        search = self._search
        return {
            "format": FORMAT,
            "fingerprint": self._fingerprint,
            "candidates": [list(asdict(candidate).values()) for candidate in self.candidates],
            "current": search.current,
            "phase": search.phase,
            "seconds": {str(index): seconds for index, seconds in search.seconds.items()},
            "rough": {str(index): seconds for index, seconds in search.rough.items()},
            "visits": {str(index): steps for index, steps in search.visits.items()},
            "peaks": {str(index): peak for index, peak in (self._curve.stale | self._curve.fresh).items()},
            "floor": self._curve.floor,
            "caps": sorted(search.caps),
            "regime": self._regime,
            "changes": search.changes,
            "decisions": search.decisions,
            "step": search.step,
        }

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from ``state`` if it is of the same regime; returns what differs, as text, otherwise.

        Same fingerprint and candidates: the same candidate goes on without a search, once the vote that is due has
        found that it fits. Only the budget differs: likewise, with the search reopened. Otherwise nothing is taken and
        the search starts from the smallest size.

        Raises:
            ValueError: a format that this version does not know.
        """
        if state["format"] != FORMAT:
            raise ValueError(f"microbatch state of format {state['format']}; this version reads {FORMAT}.")
        saved = dict(state["fingerprint"])
        keys = sorted(saved.keys() | self._fingerprint.keys())
        changed = [key for key in keys if saved.get(key) != self._fingerprint.get(key)]
        differences = [f"{key} {saved.get(key)} -> {self._fingerprint.get(key)}" for key in changed]
        if [tuple(entry) for entry in state["candidates"]] != [tuple(asdict(one).values()) for one in self.candidates]:
            differences.append("candidates")
        if differences and changed != [BUDGET] or "candidates" in differences:
            return differences
        search = self._search
        search.current, search.phase, search.step = state["current"], state["phase"], state["step"]
        search.seconds = {int(index): seconds for index, seconds in state["seconds"].items()}
        search.rough = {int(index): seconds for index, seconds in state["rough"].items()}
        search.visits = {int(index): steps for index, steps in state["visits"].items()}
        search.caps |= set(state["caps"])
        search.changes, search.decisions = state["changes"], state["decisions"]
        search.entered = True
        self._regime = state["regime"]
        self._curve.stale = {int(index): peak for index, peak in state["peaks"].items()}
        self._curve.floor = state["floor"]
        search.pending = "another budget" if differences else "resumed"
        return differences

    def _need(self, index: int, limits: Limits) -> float | None:
        peak = self._curve.upper(index)
        return None if peak is None else self._curve.need(peak, limits)

    def _take_peak(self) -> None:
        if self._peak is not None:
            self._moved |= self._curve.measure(self._search.current, self._peak, self._reserved)
        self._peak = self._reserved = None

    def _reserve(self, limits: Limits, upper: list[float], needs: Sequence[float | None], now: float) -> None:
        """Try to allocate what the largest possible growth adds; what cannot be had is marked in ``upper``."""
        if limits.reserve is None:
            return
        wanted = {index: need for index in self._search.growth() if (need := needs[index]) and upper[index] <= 1.0}
        for index in sorted(wanted, key=lambda index: -wanted[index]):
            extra = math.ceil(wanted[index] - now)
            if extra <= 0 or limits.reserve(extra):
                return
            upper[index] = REFUSED

    def _guards(self) -> dict[str, float]:
        search = self._search
        shared = [sorted(search.caps), sorted(search.refused), sorted(search.visits.items()), search.pending]
        rules = [asdict(self.settings), [asdict(one) for one in self.candidates], self._fingerprint, self._regime]
        guards = {
            "step": float(search.step),
            "accumulation": float(self.candidate.accumulation),
            "rows of a microbatch": float(self.candidate.rows),
            "phase": float(PHASES.index(search.phase)),
            "decisions": float(search.decisions),
            "changes": float(search.changes),
            "ruled-out and visited sizes (hash)": _hash(shared),
            "settings, candidates and fingerprint (hash)": _hash(rules),
        }
        return guards | {f"seconds at {one}": search.seconds.get(i, -1.0) for i, one in enumerate(self.candidates)}

    def _expected(self, ballot: Ballot) -> Use:
        now = ballot.uses[ballot.tightest()]
        if ballot.upper[self._search.current] >= REFUSED:
            return now
        return dataclasses.replace(now, need=ballot.upper[self._search.current] * now.usable)

    def _record(self, old: Candidate, move: Move, ballot: Ballot) -> dict[str, Any]:
        rank = ballot.tightest()
        use = ballot.uses[rank]
        return {
            "step": self._search.step,
            "rows_before": old.rows,
            "policy_before": old.policy,
            "accumulation_before": old.accumulation,
            "accumulation": self.candidate.accumulation,
            "rows": self.candidate.rows,
            "policy": self.candidate.policy,
            "phase": move.phase,
            "reason": move.reason,
            "tightest_rank": rank,
            "use_bytes": int(use.need),
            "usable_bytes": int(use.usable),
            "budget_bytes": int(use.budget),
            "tokens_per_second_before": self.tokens_per_second(old),
            "tokens_per_second_after": self.tokens_per_second(self.candidate),
        }

    def _does_not_fit(self, why: str, ballot: Ballot, contributors: Mapping[str, int]) -> str:
        rank = ballot.tightest()
        use = ballot.uses[rank]
        largest = sorted(contributors.items(), key=lambda item: -item[1])[:3]
        owners = ", ".join(f"{owner} {_size(held)}" for owner, held in largest)
        needed = use.budget * max(use.need, 1.0) / use.usable if use.usable > 0 else math.inf
        budget = f"at least {_size(needed)}" if math.isfinite(needed) else "more than the margin and headroom"
        return (
            f"no microbatch fits: {self.candidate} {why}. On rank {rank} it needs {_size(use.need)}; the budget of "
            f"{_size(use.budget)} leaves {_size(use.usable)}, and {_size(use.floor)} are resident before any "
            f"activation{f' (largest on this rank: {owners})' if owners else ''}. Set memory.budget_gib to {budget}, "
            "shorten train.seq_len or recompute more (activation_checkpoint=full), or hold less state: another "
            "optimizer (optimizer=gefen, rso_gefen) or more ranks under parallel=fsdp."
        )

    def _read_log(self, records: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Step -> candidate, of the records of an earlier run."""
        known = {(one.rows, one.accumulation, one.policy): index for index, one in enumerate(self.candidates)}
        log = {}
        for record in records:
            key = (record["rows"], record["accumulation"], record["policy"])
            if key not in known:
                raise ValueError(
                    f"the decision log runs {key[0]} rows x {key[1]} ({key[2]}) after step {record['step']}, which is "
                    "none of the candidates. Replay it with the batch, world size and bounds that it was written with."
                )
            log[record["step"]] = known[key]
        return log


def _hash(value: Any) -> float:
    """48 bits of ``value``, which a float64 holds exactly."""
    digest = hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "big"))


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if abs(number) >= 2**27 else f"{number / 2**20:.2f} MiB"
