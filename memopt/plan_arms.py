"""A plan: what each optimizer needs, the largest microbatch that fits with it, and how fast that would be.

Decided here: the optimizers of a plan are the run's own and those it is compared with, which take its other settings
and those keys of its optimizer that they have. Optimizers that train the same layers share traces. Needs at the
planned number of ranks are traced; the microbatch at other numbers of ranks, of which only the estimate of speed
speaks, is told from those by what shards.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from conf import compose
from conf.checks import ConfigError
from conf.optimizers import RSOConfig
from conf.schema import Config
from memopt import layout, plan_estimate, subspace
from memopt.microbatch_candidates import Candidate, candidates
from memopt.microbatch_run import POLICIES
from memopt.plan_peaks import GIB, Need, Peaks, usable_bytes
from memopt.plan_settings import Device, PlanSettings, nodes_of
from memopt.plan_state import OptimizerBytes, optimizer_bytes
from memopt.plan_trace import Shape, Tracer, build_mesh, compute_type, fake_world, largest, meta_model, total
from models.names import named_parameters

KEPT_APART = ("optimizer.inner", "optimizer.dense", "optimizer.name")
"""Keys that make an optimizer what it is: others do not take them over."""
MOST_NODES = 8
"""Up to so many nodes each number is estimated, beyond them powers of two."""


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate fits: bytes where it was traced, else bounds."""

    candidate: Candidate
    traced: int | None
    lower: int
    upper: int | None
    verdict: str
    """"fits", "does not fit", or "unknown" where the bounds do not say."""


@dataclass(frozen=True)
class Speed:
    """The estimate for one number of nodes."""

    nodes: int
    world: int
    candidate: Candidate | None
    """The largest microbatch; None: none fits, or the batch is no multiple of the ranks (``why``)."""
    pace: plan_estimate.Pace | None
    why: str | None = None


@dataclass
class Arm:
    """One optimizer of a plan."""

    name: str
    config: Config
    state: OptimizerBytes
    peaks: Peaks
    work: plan_estimate.Work
    sharded: dict[str, int]
    """Bytes that this rank holds of parameters, gradients and state: those that more ranks would share."""
    smallest: Need
    """Of the candidate that needs least."""
    by_policy: dict[str, Candidate | None] = field(default_factory=dict)
    """Activation checkpointing -> the largest microbatch that fits with it."""
    best: Need | None = None
    """Of those the fastest by the estimate."""
    reference: Need | None = None
    """At the microbatch at which all optimizers are compared."""
    verdicts: list[Verdict] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Of parameters, gradients and state together."""
        return sum(self.sharded.values())


@dataclass
class Plan:
    """All of it; ``arms[0]`` is the optimizer of the run."""

    config: Config
    device: Device
    world: int
    nodes: int
    usable: int
    """Bytes that a rank may use: the budget less margin and headroom."""
    arms: list[Arm]
    check: tuple[int, int] | None = None
    """Bytes of the highest moment of one candidate, extended from few blocks and traced whole."""

    @property
    def rank_batch(self) -> int:
        """Sequences of a rank in a step."""
        return self.config.train.global_batch // self.world

    @property
    def sharding_suffices(self) -> bool | None:
        """Whether AdamW's whole batch fits at once, so that nothing is left to save; None where it is not planned."""
        adamw = next((arm for arm in self.arms if arm.name == "adamw"), None)
        if adamw is None:
            return None
        leanest = [candidate for candidate in adamw.by_policy.values() if candidate is not None]
        return any(candidate.accumulation == 1 for candidate in leanest)


def build_plan(overrides: Sequence[str], config: Config, settings: PlanSettings, device: Device) -> Plan:
    """The plan of a run.

    Args:
        overrides: of the command line, without those of the plan.
        config: what they say.
        settings: of the plan.
        device: of every rank.

    Raises:
        ConfigError: a setting that an optimizer cannot take, no memory that is known, no candidate within the bounds.
    """
    nodes = nodes_of(settings.world, device)
    memory = None if device.memory_gib is None else device.memory_gib * GIB
    try:
        usable = int(usable_bytes(config.memory, memory))
    except ValueError as error:
        raise ConfigError(f"plan.device={device.name}: {error}") from None
    if usable <= 0:
        raise ConfigError(
            f"memory.margin={config.memory.margin} and memory.headroom_gib={config.memory.headroom_gib} leave nothing "
            "of the memory. Set memory.headroom_gib to less."
        )
    plan = Plan(config, device, settings.world, nodes, usable, [])
    with fake_world(settings.world):
        mesh = build_mesh(config, settings.world)
        tracers: dict[Any, Tracer] = {}
        for name, own in _configs(overrides, config, settings).items():
            key = _conversion(own)
            if key not in tracers:
                tracers[key] = Tracer(own, mesh, device.device_type)
            plan.arms.append(_build_arm(name, own, plan, mesh, tracers[key]))
        _compare(plan)
        if settings.check:
            plan.check = _check(plan.arms[0])
    return plan


def candidates_of(config: Config, world: int, policies: Sequence[str]) -> tuple[Candidate, ...]:
    """The candidates that the run would have.

    Raises:
        ConfigError: there is none.
    """
    batch, memory = config.train.global_batch // world, config.memory
    try:
        return candidates(
            batch,
            min(memory.min_microbatch, batch),
            memory.max_microbatch,
            divisors_only=config.train.compile,
            policies=policies,
        )
    except ValueError as error:
        raise ConfigError(f"memory: {error}") from None


def policies_of(config: Config) -> tuple[str, ...]:
    """Activation checkpointing that the run may use, from what keeps least."""
    chosen = config.activation_checkpoint
    return POLICIES if chosen == "auto" else (chosen,)


def _configs(overrides: Sequence[str], config: Config, settings: PlanSettings) -> dict[str, Config]:
    """Optimizer -> the run with it; that of the run first."""
    named = [text.partition("=")[2] for text in overrides if text.startswith("optimizer=")]
    own = named[-1] if named else config.optimizer.name
    found = {own: config}
    rest = [text for text in overrides if not text.startswith(("optimizer=", "optimizer."))]
    keys = [text for text in overrides if text.startswith("optimizer.")]
    for name in settings.optimizers:
        if name in found:
            continue
        bare = compose.load_config([*rest, f"optimizer={name}"], settings.world)
        has = {f"optimizer.{item.name}" for item in dataclasses.fields(bare.optimizer)} - set(KEPT_APART)
        kept = [text for text in keys if text.partition("=")[0] in has]
        found[name] = compose.load_config([*rest, f"optimizer={name}", *kept], settings.world)
    return found


def _conversion(config: Config) -> Any:
    """What a trace depends on of the optimizer: equal ones share a tracer."""
    optimizer = config.optimizer
    if not isinstance(optimizer, RSOConfig):
        return None
    return optimizer.rank, optimizer.projection, tuple(optimizer.layers)


def _build_arm(name: str, config: Config, plan: Plan, mesh: Any, tracer: Tracer) -> Arm:
    dtype = compute_type(config, plan.device.device_type)
    try:
        model = meta_model(config, mesh, "none", dtype)
        state = optimizer_bytes(config.optimizer, model, named_parameters(model), plan.device.device_type)
    except ConfigError as error:
        raise ConfigError(f"plan.optimizers={name}: {error}") from None
    peaks = Peaks(tracer, state, config, plan.rank_batch)
    every = candidates_of(config, plan.world, policies_of(config))
    smallest = peaks.need(every[0])
    arm = Arm(name, config, state, peaks, plan_estimate.work_of(config, model, dtype), _sharded(model, state), smallest)
    for policy in policies_of(config):
        own = [candidate for candidate in every if candidate.policy == policy]
        arm.by_policy[policy] = peaks.largest(own, plan.usable)
    fitting = [candidate for candidate in arm.by_policy.values() if candidate is not None]
    if fitting:
        # of equal or unknown speed the last, which recomputes least
        best = max(reversed(fitting), key=lambda candidate: _speed(arm, plan, plan.world, candidate))
        arm.best = peaks.need(best) if peaks.can_trace(best) else None
    for candidate in every:
        lower, upper = peaks.bounds(candidate)
        traced = lower if candidate in peaks.known else None
        fits = upper is not None and upper <= plan.usable
        verdict = "fits" if fits else "does not fit" if lower > plan.usable else "unknown"
        arm.verdicts.append(Verdict(candidate, traced, lower, upper, verdict))
    arm.speeds = [_estimate(arm, plan, count) for count in _node_counts(plan.nodes)]
    return arm


def _sharded(model: nn.Module, state: OptimizerBytes) -> dict[str, int]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = [p for name, p in model.named_parameters() if not subspace.is_subspace(name)]
    return {
        "parameters": sum(_local_bytes(parameter) for parameter in whole),
        "gradients": sum(_local_bytes(parameter) for parameter in trained),
        "optimizer_state": state.beside_model,
    }


def _local_bytes(parameter: torch.Tensor) -> int:
    rows = layout.local_rows(parameter.detach())
    return rows.numel() * rows.element_size()


def _speed(arm: Arm, plan: Plan, world: int, candidate: Candidate) -> float:
    found = plan_estimate.pace(
        arm.work, arm.config, plan.device, world, candidate.rows, candidate.policy, arm.held_bytes
    )
    return 0.0 if found is None else found.tokens_per_second_per_device


def _node_counts(nodes: int) -> list[int]:
    if nodes <= MOST_NODES:
        return list(range(1, nodes + 1))
    powers = [2**k for k in range(nodes.bit_length()) if 2**k < nodes]
    return [*powers, nodes]


def _estimate(arm: Arm, plan: Plan, nodes: int) -> Speed:
    """The speed on ``nodes`` nodes, at the global batch of the run."""
    world = plan.world if nodes == plan.nodes else nodes * plan.device.devices_per_node
    config = arm.config
    if config.train.global_batch % world:
        return Speed(nodes, world, None, None, f"train.global_batch is no multiple of {world}")
    shard = config.parallel.shard
    if config.parallel.mode == "hsdp" and (shard is None or world % shard):
        return Speed(nodes, world, None, None, f"parallel.shard does not divide {world}")
    found: list[tuple[float, Candidate]] = []
    for policy in policies_of(config):
        if world == plan.world:
            candidate = arm.by_policy[policy]
        else:
            candidate = _largest_at(arm, plan, world, policy)
        if candidate is not None:
            found.append((_speed(arm, plan, world, candidate), candidate))
    if not found:
        return Speed(nodes, world, None, None, "no microbatch fits")
    best = max(reversed(found), key=lambda pair: pair[0])[1]
    held = _held_at(arm, plan, world)
    return Speed(
        nodes, world, best, plan_estimate.pace(arm.work, config, plan.device, world, best.rows, best.policy, held)
    )


def _held_at(arm: Arm, plan: Plan, world: int) -> int:
    """Bytes of parameters, gradients and state of a rank of ``world``."""
    fewer = plan.world / world
    mode = arm.config.parallel.mode
    # state is sharded over all ranks in every mode, parameters over those of a shard
    model = arm.sharded["parameters"] + arm.sharded["gradients"]
    return math.ceil(model * (fewer if mode == "fsdp" else 1.0) + arm.sharded["optimizer_state"] * fewer)


def _largest_at(arm: Arm, plan: Plan, world: int, policy: str) -> Candidate | None:
    """The largest microbatch at another number of ranks, by bounds that are shifted by what is sharded."""
    shift = _held_at(arm, plan, world) - arm.held_bytes
    best = None
    for candidate in candidates_of(arm.config, world, (policy,)):
        # several microbatches, also where it is one here: the bound for them is the higher one
        _, upper = arm.peaks.bounds(dataclasses.replace(candidate, accumulation=max(2, candidate.accumulation)))
        if upper is not None and upper + shift <= plan.usable:
            best = candidate
    return best


def _compare(plan: Plan) -> None:
    """Give every optimizer its need at one microbatch: the one that is set, else AdamW's largest, else the smallest."""
    config = plan.config
    policy = policies_of(config)[0]
    rows = config.microbatch if isinstance(config.microbatch, int) else None
    adamw = next((arm for arm in plan.arms if arm.name == "adamw"), plan.arms[0])
    if adamw.best is not None:
        policy = adamw.best.candidate.policy
        rows = rows or adamw.best.candidate.rows
    every = candidates_of(config, plan.world, (policy,))
    chosen = max((one for one in every if one.rows <= (rows or 0)), default=every[0], key=lambda one: one.rows)
    if not plan.arms[0].peaks.can_trace(chosen):
        chosen = every[0]
    for arm in plan.arms:
        arm.reference = arm.peaks.need(chosen)


def _check(arm: Arm) -> tuple[int, int]:
    """Highest bytes of the smallest candidate without the optimizer, extended from few blocks and traced whole."""
    candidate = arm.smallest.candidate
    shape = Shape(candidate.rows, arm.peaks.batch)
    extended = arm.peaks.tracer.places(candidate.policy, shape)
    whole = arm.peaks.tracer.whole(candidate.policy, shape)
    return total(largest(extended)[1]), total(largest(whole)[1])
