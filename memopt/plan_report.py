"""A plan as tables, as plain values for JSON, and as a plot."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memopt.microbatch_candidates import Candidate
from memopt.plan_arms import Arm, Plan, Speed, policies_of
from memopt.plan_peaks import Need
from memopt.tracker_record import OWNERS
from models.counts import count_parameters
from observe import mfu

GIB = 2**30
ESTIMATE = (
    "estimate, not a measurement: roofline of data-sheet figures and ring collectives, no host, loader or stragglers; "
    "microbatches at other numbers of nodes are told from the traced ones"
)
EXACT = (
    "bytes are traced on fake tensors as the run's own tracker counts them, on rank 0; kernels and libraries of a GPU "
    "take memory of their own (memory.headroom_gib)"
)
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")


def content(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes are of one rank, unknown is None."""
    config, device = plan.config, plan.device
    return {
        "model": config.model.name,
        "parameters": count_parameters(config.model),
        "world": plan.world,
        "nodes": plan.nodes,
        "device": vars(device) | {"peak_flops": mfu.device_peak(device.driver_name)},
        "parallel": config.parallel.mode,
        "seq_len": config.train.seq_len,
        "global_batch": config.train.global_batch,
        "rank_batch": plan.rank_batch,
        "activation_checkpoint": config.activation_checkpoint,
        "usable_bytes": plan.usable,
        "optimizer": plan.arms[0].name,
        "sharding_suffices": plan.sharding_suffices,
        "optimizers": {arm.name: _arm_content(arm, plan) for arm in plan.arms},
        "check": plan.check
        and {
            "extended_bytes": plan.check[0],
            "whole_bytes": plan.check[1],
            "difference": plan.check[0] / plan.check[1] - 1,
        },
        "exact": EXACT,
        "estimate": ESTIMATE,
    }


def write(plan: Plan, folder: Path) -> None:
    """``plan.json`` and ``plan.png`` in ``folder``, which exists."""
    (folder / "plan.json").write_text(json.dumps(content(plan), indent=2) + "\n", encoding="utf-8")
    draw(plan, folder / "plan.png")


def show(plan: Plan, console: Console) -> None:
    """Print all tables."""
    config = plan.config
    console.print(
        f"{config.model.name}, {count_parameters(config.model):,} parameters, on {plan.world} x {plan.device.name} "
        f"({plan.nodes} node{'s' if plan.nodes > 1 else ''}), parallel={config.parallel.mode}; "
        f"{plan.rank_batch} sequences of {config.train.seq_len} tokens a rank and step; "
        f"{_gib(plan.usable)} GiB usable of {_budget(plan)}"
    )
    reference = plan.arms[0].reference
    assert reference is not None
    console.print(_ledger_table(plan, reference.candidate))
    console.print(_microbatch_table(plan))
    console.print(_candidate_table(plan.arms[0], plan))
    if any(speed.pace is not None for arm in plan.arms for speed in arm.speeds):
        console.print(_speed_table(plan))
        console.print(f"tokens/s a device is an {ESTIMATE}.")
    else:
        console.print(f"tokens/s: n/a (no figures of speed for {plan.device.name} at this precision).")
    console.print(suffices(plan))
    if plan.check is not None:
        extended, whole = plan.check
        console.print(
            f"check: extended from few blocks {extended:,} bytes, traced whole {whole:,} bytes "
            f"({extended / whole - 1:+.3%})."
        )
    console.print(f"{EXACT[0].upper()}{EXACT[1:]}.")


def suffices(plan: Plan) -> str:
    """One sentence on whether sharding alone is enough."""
    adamw = next((arm for arm in plan.arms if arm.name == "adamw"), None)
    if adamw is None:
        return "AdamW is not among plan.optimizers: whether sharding alone suffices was not looked at."
    batch = plan.rank_batch
    if plan.sharding_suffices:
        return (
            f"Sharding alone suffices: AdamW's whole batch of a rank ({batch} sequences) fits at once; a smaller "
            "optimizer state cannot make the microbatch larger."
        )
    if adamw.best is None:
        return "Sharding alone does not suffice: AdamW fits at no microbatch."
    rows = adamw.best.candidate.rows
    return f"Sharding alone does not suffice for the whole batch: AdamW fits {rows} of {batch} sequences at once."


def misfit(arm: Arm, plan: Plan) -> str | None:
    """Why the optimizer of the run fits nowhere, by how much, and what would help; None where it fits."""
    if any(arm.by_policy.values()):
        return None
    need = arm.smallest
    helps = []
    if "full" not in policies_of(arm.config):
        helps.append("activation_checkpoint=full (keeps less for backward)")
    others = [other.name for other in plan.arms if any(other.by_policy.values())]
    if others:
        helps.append(f"optimizer={' or '.join(others)} (fits)")
    rest = need.bytes - arm.held_bytes
    if arm.config.parallel.mode != "fsdp":
        helps.append("parallel=fsdp (shards parameters and gradients over all ranks)")
    elif rest < plan.usable:
        ranks = -(-arm.held_bytes * plan.world // (plan.usable - rest))
        helps.append(f"about {ranks} ranks instead of {plan.world}")
    else:
        helps.append("a shorter train.seq_len or a device with more memory")
    return (
        f"{plan.config.model.name} with optimizer={arm.name} fits on {plan.device.name} at no microbatch: "
        f"{need.candidate} needs {need.bytes:,} bytes ({_gib(need.bytes)} GiB), {need.bytes - plan.usable:,} more than "
        f"the {plan.usable:,} usable. What would help: {'; '.join(helps)}."
    )


def draw(plan: Plan, path: Path) -> None:
    """Ledgers of all optimizers at one microbatch beside each other, and the estimate of speed by nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [arm.name for arm in plan.arms]
    bottom = [0.0] * len(names)
    for owner, colour in zip(OWNERS, COLOURS, strict=True):
        heights = [arm.reference.peak[owner] / GIB for arm in plan.arms if arm.reference is not None]
        left.bar(names, heights, bottom=bottom, label=owner.replace("_", " "), color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left.axhline(plan.usable / GIB, color="black", linestyle="--", linewidth=1, label="usable")
    reference = plan.arms[0].reference
    assert reference is not None
    left.set_title(f"peak of a rank at {reference.candidate}")
    left.set_ylabel("GiB")
    left.legend(fontsize="small")
    for arm in plan.arms:
        points = [(speed.nodes, speed.pace) for speed in arm.speeds if speed.pace is not None]
        right.plot(
            [nodes for nodes, _ in points],
            [pace.tokens_per_second_per_device for _, pace in points],
            marker="o",
            label=arm.name,
        )
    right.set_title("tokens/s a device, each at its largest microbatch: an estimate")
    right.set_xlabel(f"nodes of {plan.device.devices_per_node} x {plan.device.name}")
    right.set_ylim(bottom=0)
    right.legend(fontsize="small")
    figure.suptitle(f"{plan.config.model.name} on {plan.world} x {plan.device.name}")
    figure.savefig(path, dpi=120)


def _arm_content(arm: Arm, plan: Plan) -> dict[str, Any]:
    return {
        "state_bytes": arm.state.state,
        "state_bytes_per_param": arm.state.state / (count_parameters(arm.config.model) / _owners(plan)),
        "state_is_exact": arm.state.is_final,
        "ledger": None if arm.reference is None else _need_content(arm.reference),
        "largest": None if arm.best is None else _need_content(arm.best),
        "largest_by_policy": {
            policy: None if found is None else _candidate_content(found) for policy, found in arm.by_policy.items()
        },
        "smallest": _need_content(arm.smallest),
        "missing_bytes": max(0, arm.smallest.bytes - plan.usable) if arm.best is None else 0,
        "candidates": [
            _candidate_content(one.candidate)
            | {
                "measured_bytes": None,
                "traced_bytes": one.traced,
                "lower_bytes": one.lower,
                "upper_bytes": one.upper,
                "verdict": one.verdict,
            }
            for one in arm.verdicts
        ],
        "estimated_speed": [_speed_content(speed) for speed in arm.speeds],
    }


def _owners(plan: Plan) -> int:
    """Ranks that the optimizer's state is sharded over."""
    return plan.world


def _need_content(need: Need) -> dict[str, Any]:
    ledger = {owner: {"persistent": need.persistent[owner], "peak": need.peak[owner]} for owner in OWNERS}
    ledger["total"] = {"persistent": sum(need.persistent.values()), "peak": need.bytes}
    return {**_candidate_content(need.candidate), "place": need.place, "bytes": ledger}


def _candidate_content(candidate: Candidate) -> dict[str, Any]:
    return {
        "microbatch": candidate.rows,
        "accumulation": candidate.accumulation,
        "activation_checkpoint": candidate.policy,
    }


def _speed_content(speed: Speed) -> dict[str, Any]:
    pace = speed.pace
    return {
        "nodes": speed.nodes,
        "world": speed.world,
        **({} if speed.candidate is None else _candidate_content(speed.candidate)),
        "tokens_per_second_per_device": pace and pace.tokens_per_second_per_device,
        "tokens_per_second": pace and pace.tokens_per_second_per_device * speed.world,
        "mfu": pace and pace.mfu,
        "step_seconds": pace and pace.step_seconds,
        "limit": pace and pace.limit,
        "why_not": speed.why,
    }


def _ledger_table(plan: Plan, candidate: Candidate) -> Table:
    table = Table("GiB of a rank", title=f"ledger at {candidate}: persistent, peak")
    for arm in plan.arms:
        table.add_column(arm.name, justify="right")
    for owner in OWNERS:
        cells = [
            f"{_gib(arm.reference.persistent[owner])}  {_gib(arm.reference.peak[owner])}"
            for arm in plan.arms
            if arm.reference is not None
        ]
        table.add_row(owner.replace("_", " "), *cells)
    needs = [arm.reference for arm in plan.arms if arm.reference is not None]
    table.add_row(
        "total", *(f"{_gib(sum(need.persistent.values()))}  {_gib(need.bytes)}" for need in needs), style="bold"
    )
    table.add_row("highest in", *(need.place for need in needs))
    return table


def _microbatch_table(plan: Plan) -> Table:
    table = Table("optimizer", "state bytes", "largest microbatch", "accumulation", "recomputed", "peak GiB", title="")
    table.title = f"largest microbatch of {plan.rank_batch} sequences"
    for arm in plan.arms:
        state = f"{arm.state.state:,}" + ("" if arm.state.is_final else " at most")
        for policy, found in arm.by_policy.items():
            if found is None:
                lacking = arm.smallest.bytes - plan.usable
                table.add_row(
                    arm.name, state, "none fits", "", policy, f"{_gib(lacking)} too much" if lacking > 0 else ""
                )
                continue
            lower, upper = arm.peaks.bounds(found)
            peak = _gib(lower) if lower == upper else f"{_gib(lower)} to {_gib(upper)}"
            table.add_row(arm.name, state, str(found.rows), str(found.accumulation), policy, peak)
    return table


def _candidate_table(arm: Arm, plan: Plan) -> Table:
    table = Table(
        "candidate", "measured", "traced", "lower", "upper", "verdict", title=f"candidates with {arm.name}, GiB"
    )
    for one in arm.verdicts:
        table.add_row(str(one.candidate), "-", _gib(one.traced), _gib(one.lower), _gib(one.upper), one.verdict)
    return table


def _speed_table(plan: Plan) -> Table:
    table = Table("nodes", "ranks", title="estimate: tokens/s a device (microbatch, MFU, limit)")
    for arm in plan.arms:
        table.add_column(arm.name, justify="right")
    for index, speed in enumerate(plan.arms[0].speeds):
        table.add_row(str(speed.nodes), str(speed.world), *(_speed_cell(arm.speeds[index]) for arm in plan.arms))
    return table


def _speed_cell(speed: Speed) -> str:
    if speed.pace is None or speed.candidate is None:
        return f"n/a ({speed.why})"
    pace = speed.pace
    return f"{pace.tokens_per_second_per_device:,.0f} ({speed.candidate.rows}, {pace.mfu:.0%}, {pace.limit})"


def _budget(plan: Plan) -> str:
    known = {"memory.budget_gib": plan.config.memory.budget_gib, "the device": plan.device.memory_gib}
    return " and ".join(f"{size:g} GiB of {name}" for name, size in known.items() if size is not None)


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}" if size >= 2**27 or not size else f"{size / GIB:.4f}"
