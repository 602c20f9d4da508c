"""Runs of the microbatch controller without a model: fake meters and clocks on several fake ranks.

A meter is ``f(candidate, step, rank) -> bytes``, a clock ``f(candidate, step, rank) -> seconds``. The vectors of the
ranks are reduced in Python. What ran, what it used and what was voted is kept for the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memopt.microbatch import Candidate, Controller, Decision, Limits, Sample, Settings, candidates

TOKENS = 1000


def affine(fixed: float, per_row: float) -> Callable[..., float]:
    """Peak bytes fixed + per_row * rows."""
    return lambda candidate, step=0, rank=0: fixed + per_row * candidate.rows


def rewarding(candidate: Candidate, step: int = 0, rank: int = 0) -> float:
    """Seconds of a step where larger is always faster: 1 s of work and 0.1 s a microbatch."""
    return 1.0 + 0.1 * candidate.accumulation


def reduce_max(vectors: list[list[float]]) -> list[float]:
    """What all_reduce MAX gives."""
    assert len({len(vector) for vector in vectors}) == 1
    return [max(entries) for entries in zip(*vectors, strict=True)]


@dataclass
class FakeRun:
    """One run on ``len(budgets)`` ranks."""

    rank_batch: int
    budgets: list[float]
    peak: Callable[[Candidate, int, int], float]
    seconds: Callable[[Candidate, int, int], float] = rewarding
    floor: Callable[[int], float] = lambda step: 0
    settings: Settings = Settings(TOKENS, total_steps=500, margin=0.0)
    policies: tuple[str, ...] = ("none",)
    options: dict = field(default_factory=dict)
    added: float = 0
    optimizer: float = 0
    gradients: tuple[float, float] = (0, 0)
    reserve: Callable[[int, int], bool] | None = None
    reserved: Callable[[float], float] | None = None
    retries: Callable[[Candidate, int, int], int] = lambda candidate, step, rank: 0
    disturbed: Callable[[int, int], bool] = lambda step, rank: False
    steady: Callable[[int], bool] = lambda step: True
    bounds: dict = field(default_factory=dict)

    def __post_init__(self):
        self.candidates = candidates(self.rank_batch, policies=self.policies, **self.bounds)
        self.controllers = [self.build(rank) for rank in range(len(self.budgets))]
        self.trace: list[Candidate] = []
        self.plans = []
        self.overshoots: list[tuple[int, Candidate]] = []
        self.decisions: list[Decision] = []
        self.votes: list[int] = []
        self.reserved_bytes: list[int] = []

    def build(self, rank: int) -> Controller:
        return Controller(self.candidates, self.settings, rank, len(self.budgets), **self.options)

    @property
    def controller(self) -> Controller:
        return self.controllers[0]

    @property
    def rows(self) -> list[int]:
        return [candidate.rows for candidate in self.trace]

    def limits(self, rank: int) -> Limits:
        def reserve(extra: int) -> bool:
            self.reserved_bytes.append(extra)
            return self.reserve is None or self.reserve(extra, rank)

        floor = self.floor(len(self.trace))
        return Limits(self.budgets[rank], floor, self.added, self.optimizer, self.gradients, reserve)

    def decide(self):
        while self.controller.due():
            self.votes.append(len(self.trace))
            vectors = [controller.vote(self.limits(rank)) for rank, controller in enumerate(self.controllers)]
            reduced = reduce_max(vectors)
            decisions = [controller.decide(reduced, {"parameters": 7, "codes": 9}) for controller in self.controllers]
            assert all(decision == decisions[0] for decision in decisions)
            self.decisions.append(decisions[0])

    def step(self):
        self.decide()
        plans = [controller.plan() for controller in self.controllers]
        assert all(plan == plans[0] for plan in plans)
        step, plan = len(self.trace), plans[0]
        self.trace.append(plan.candidate)
        self.plans.append(plan)
        for rank, controller in enumerate(self.controllers):
            peak = self.peak(plan.candidate, step, rank)
            if peak > self.budgets[rank]:
                self.overshoots.append((step, plan.candidate))
            reserved = None if self.reserved is None else self.reserved(peak)
            measured = peak if plan.measure else None
            controller.record(
                Sample(
                    self.seconds(plan.candidate, step, rank),
                    measured,
                    reserved,
                    self.retries(plan.candidate, step, rank),
                    self.disturbed(step, rank),
                    self.steady(step),
                )
            )

    def run(self, steps: int) -> "FakeRun":
        for _ in range(steps):
            self.step()
        return self

    def changed(self, reason: str = "test", **options):
        for controller in self.controllers:
            controller.memory_changed(reason, **options)

    def settled_at(self) -> Candidate:
        assert self.controller.settled, self.controller.phase
        return self.controller.candidate

    def probes(self) -> int:
        """Different sizes that ran before the first settling, up to the largest."""
        rows = self.rows[: self.settled_step()]
        return len(set(rows[: rows.index(max(rows)) + 1]))

    def settled_step(self) -> int:
        return next(decision.step for decision in self.decisions if decision.phase in ("settled", "locked"))

    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.trace, self.trace[1:], strict=False))

    def exploration(self) -> int:
        """Steps at a candidate slower than the one that is kept."""
        kept = self.seconds(self.settled_at(), len(self.trace), 0)
        return sum(self.seconds(candidate, step, 0) > kept for step, candidate in enumerate(self.trace))


def with_settings(**changes) -> Settings:
    """The settings of the tests, changed."""
    return replace(Settings(TOKENS, total_steps=500, margin=0.0), **changes)
