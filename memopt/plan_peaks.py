"""What each microbatch needs, traced as far as it must be known, and the largest that fits.

Traced sizes are exact. Between and beyond them the peak is bounded, in the rows m, as ``memopt.microbatch_memory`` does
from measurements: with S the bytes that are resident during the whole step, k m rows need at most S + k (P(m) - S), at
least P(m). Where all logits of a microbatch are more than one chunk, the peak is convex in m too: at most the chord of
two traced sizes around it, at least the line through two on one side.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conf.schema import Config, MemoryConfig
from memopt.microbatch_candidates import Candidate
from memopt.plan_state import OptimizerBytes, optimizer_bytes
from memopt.plan_trace import PERSISTENT, Places, Shape, Tracer, build_mesh, compute_type, fake_world, meta_model
from memopt.tracker_record import OWNERS
from models.names import named_parameters

GIB = 2**30
MAX_TOKENS = 2**20
"""Tokens of the largest microbatch that is traced: a trace takes time with every chunk of logits."""


@dataclass(frozen=True)
class Need:
    """What one candidate needs on one rank, in bytes."""

    candidate: Candidate
    persistent: dict[str, int]
    """Owner -> what is held between two steps."""
    peak: dict[str, int]
    """Owner -> what is held at the highest moment."""
    place: str
    """Where in the step that is."""

    @property
    def bytes(self) -> int:
        """At the highest moment, of all owners."""
        return sum(self.peak.values())


class Peaks:
    """Needs of the candidates with one optimizer.

    Args:
        tracer: of the model as that optimizer has it.
        optimizer: its bytes.
        config: of the run.
        batch: sequences of a rank in a step.
    """

    def __init__(self, tracer: Tracer, optimizer: OptimizerBytes, config: Config, batch: int) -> None:
        self.tracer, self.optimizer, self.batch = tracer, optimizer, batch
        self._seq_len, self._chunk = config.train.seq_len, config.train.loss_chunk
        self._known: dict[Candidate, Need] = {}

    @property
    def known(self) -> tuple[Candidate, ...]:
        """The candidates that were traced."""
        return tuple(self._known)

    def can_trace(self, candidate: Candidate) -> bool:
        """Whether a trace of it takes seconds, not minutes."""
        return candidate.rows * self._seq_len <= MAX_TOKENS

    def need(self, candidate: Candidate) -> Need:
        """The need of a candidate, exact, traced where it is not known."""
        if candidate not in self._known:
            places = self.tracer.places(candidate.policy, Shape(candidate.rows, self.batch))
            self._known[candidate] = _with_optimizer(candidate, places, self.optimizer)
        return self._known[candidate]

    def bounds(self, candidate: Candidate) -> tuple[int, int | None]:
        """Least and most bytes that a candidate needs; equal where it was traced. None: nothing smaller was traced."""
        if candidate in self._known:
            need = self._known[candidate].bytes
            return need, need
        same = [need for need in self._known.values() if need.candidate.policy == candidate.policy]
        floors = [sum(need.persistent.values()) for need in same]
        # one microbatch finds no gradients of an earlier one: its peak is not on the curve of the others
        several = [need for need in same if need.candidate.accumulation > 1]
        points = sorted((need.candidate.rows, need.bytes) for need in several)
        upper = [
            floor + math.ceil(max(1.0, candidate.rows / need.candidate.rows) * (need.bytes - floor))
            for need, floor in zip(same, floors, strict=True)
            if need.candidate.accumulation > 1
        ]
        if candidate.accumulation == 1:
            return max(floors, default=0), min(upper, default=None)
        lower = [bytes_ for rows, bytes_ in points if rows <= candidate.rows]
        convex = [point for point in points if point[0] * self._seq_len >= self._chunk]
        below = [point for point in convex if point[0] < candidate.rows]
        above = [point for point in convex if point[0] > candidate.rows]
        if below and above:
            upper.append(math.ceil(_line(below[-1], above[0], candidate.rows)))
        for pair in (below[-2:], above[:2]):
            if len(pair) == 2:
                lower.append(math.floor(_line(pair[0], pair[1], candidate.rows)))
        return max([*floors, *lower], default=0), min(upper, default=None)

    def largest(self, candidates: Sequence[Candidate], usable: float) -> Candidate | None:
        """The candidate of most rows whose need is at most ``usable`` bytes, traced if it can be; None if none is.

        Args:
            candidates: of one policy, rows ascending.
            usable: bytes.
        """
        several = [candidate for candidate in candidates if candidate.accumulation > 1]
        if whole := [candidate for candidate in candidates if candidate.accumulation == 1]:
            # tried first where it may fit: it is the end of the search, and it holds no gradients before its backward
            if several and self.need(several[0]).bytes > usable and several[0].rows < whole[0].rows:
                several = several[:1]
        best = self._search(several, usable)
        if whole and (best is not None or not several) and self._fits(whole[0], usable):
            return whole[0]
        return best

    def _search(self, several: Sequence[Candidate], usable: float) -> Candidate | None:
        fits, fails = -1, len(several)
        guess = 0
        while fails - fits > 1:
            # at most doubled: a trace far above what fits tells little
            guess = min(max(guess, fits + 1), fails - 1)
            if self._fits(several[guess], usable):
                fits = guess
            else:
                fails = guess
            guess = self._guess(several, fits, fails, usable)
        return several[fits] if fits >= 0 else None

    def _guess(self, several: Sequence[Candidate], fits: int, fails: int, usable: float) -> int:
        """The candidate that a line through what is known says is the last that fits; its neighbour if it is known."""
        inside = range(fits + 1, fails)
        points = sorted((self._known[c].candidate.rows, self._known[c].bytes) for c in several if c in self._known)
        if len(points) < 2 or points[-1][1] == points[-2][1]:
            return fits + 1
        around = [p for p in points if p[1] <= usable][-1:] + [p for p in points if p[1] > usable][:1]
        first, second = around if len(around) == 2 else points[-2:]
        under = [index for index in inside if _line(first, second, several[index].rows) <= usable]
        return max(under, default=fits + 1)

    def _fits(self, candidate: Candidate, usable: float) -> bool:
        lower, upper = self.bounds(candidate)
        if lower > usable:
            return False
        if self.can_trace(candidate):
            return self.need(candidate).bytes <= usable
        return upper is not None and upper <= usable


def usable_bytes(memory: MemoryConfig, device_bytes: float | None) -> float:
    """Bytes that may be planned with on a device of ``device_bytes``, as the run itself counts them.

    Raises:
        ValueError: neither a budget nor the size of the device is known.
    """
    known = [device_bytes, None if memory.budget_gib is None else memory.budget_gib * GIB]
    budget = min((size for size in known if size is not None), default=None)
    if budget is None:
        raise ValueError("memory.budget_gib is not set and the memory of the device is unknown. Set memory.budget_gib.")
    return budget * (1.0 - memory.margin) - memory.headroom_gib * GIB


@dataclass(frozen=True)
class Prediction:
    """Foretold peak of one candidate, in bytes."""

    lower: int
    upper: int
    need: Need | None
    """With its owners, where the candidate was traced itself; then both bounds are equal."""


def predict(
    config: Config,
    world_size: int,
    device_type: str,
    candidates: Sequence[Candidate],
    device_bytes: float | None = None,
    sizes: int = 3,
) -> dict[Candidate, Prediction]:
    """Foretold peaks of ``candidates`` for the run of ``config``, for a trainer to begin its search near the answer.

    Of each policy a few sizes are traced, the largest that fits among them if the memory is known; the others are
    bounded by these. A second or so a trace; allocates no model. Call it before the process joins its process group.

    Args:
        config: of the run.
        world_size: its ranks; the figures are those of rank 0, which has the largest shards.
        device_type: "cpu" or "cuda".
        candidates: pairs of rows and policy; rows ascending within each policy.
        device_bytes: memory of the device, where the configuration sets no budget.
        sizes: sizes of each policy that are traced where the memory is not known.

    Raises:
        RuntimeError: there is a process group already.
    """
    batch = config.train.global_batch // world_size
    with fake_world(world_size):
        mesh = build_mesh(config, world_size)
        dtype = compute_type(config, device_type)
        model = meta_model(config, mesh, "none", dtype)
        state = optimizer_bytes(config.optimizer, model, named_parameters(model), device_type)
        peaks = Peaks(Tracer(config, mesh, device_type), state, config, batch)
        for policy in dict.fromkeys(candidate.policy for candidate in candidates):
            own = [candidate for candidate in candidates if candidate.policy == policy]
            if config.memory.budget_gib is not None or device_bytes is not None:
                peaks.largest(own, usable_bytes(config.memory, device_bytes))
            else:
                for candidate in _spread([one for one in own if peaks.can_trace(one)], sizes):
                    peaks.need(candidate)
    found = {}
    for candidate in candidates:
        lower, upper = peaks.bounds(candidate)
        need = peaks.need(candidate) if candidate in peaks.known else None
        if upper is not None:
            found[candidate] = Prediction(lower, upper, need)
    return found


def _with_optimizer(candidate: Candidate, places: Places, optimizer: OptimizerBytes) -> Need:
    state = {"optimizer_state": optimizer.beside_model}
    persistent = _add(places[PERSISTENT], state)
    peaks = {place: _add(owners, state) for place, owners in places.items() if place != PERSISTENT}
    before = peaks.pop("optimizer")
    peaks["optimizer"] = _add(before, {"other": max(optimizer.transient, optimizer.periodic)})
    # of a phase and a part of it with one peak, the part says more
    place = max(peaks, key=lambda name: (sum(peaks[name].values()), len(name)))
    return Need(candidate, persistent, peaks[place], place)


def _add(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {owner: first.get(owner, 0) + second.get(owner, 0) for owner in OWNERS}


def _line(first: tuple[int, int], second: tuple[int, int], rows: int) -> float:
    (m1, p1), (m2, p2) = first, second
    return p1 + (p2 - p1) * (rows - m1) / (m2 - m1)


def _spread(candidates: Sequence[Candidate], count: int) -> Iterable[Candidate]:
    """``count`` of them in equal steps, both ends among them."""
    last = len(candidates) - 1
    return [candidates[index] for index in sorted({round(k * last / max(1, count - 1)) for k in range(count)})]
