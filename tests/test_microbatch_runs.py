"""Runs whose microbatch changes: the trajectory of the fixed one, within the budget, across stops, and at no cost where
nothing is chosen.

Background: a mean over microbatches instead of tokens, a sample trained twice around a change, a size that a resume
tries again from scratch, or a decision that one rank takes differently all train, and all train something else.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from conf.checks import ConfigError
from memopt.microbatch import Candidate, candidates
from memopt.microbatch_run import read_decisions, refuse_coupled_rows
from tests.test_trajectory import STEPS, assert_same_trajectory, reference
from tests.tiny import UNEVEN, fork_train, losses, read_lines, train_ranks

AUTO = ["microbatch=auto", "memory.budget_gib=1"]


def write_log(path: Path, moves: dict[int, Candidate]) -> str:
    """A decision log with what runs from which step on; the override that replays it."""
    lines = [
        {"kind": "microbatch", "step": step, "rows": one.rows, "accumulation": one.accumulation, "policy": one.policy}
        for step, one in moves.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"memory.replay={path}"


def rows_of(result: dict[str, Any]) -> list[int]:
    return [record["microbatch"] for record in result["records"]]


def with_clock(seconds: Callable[[Candidate], float]) -> Callable[[Any], None]:
    """Steps take the given time as the controller sees it."""

    def hook(run: Any) -> None:
        record = run.microbatch.record
        run.microbatch.record = lambda _, disturbed, peak: record(seconds(run.microbatch.candidate), disturbed, peak)

    return hook


def rewarding_size(one: Candidate) -> float:
    return 1.0 + 0.2 * one.accumulation


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (1, []),
        (1, ["activation_checkpoint=full"]),
        (2, ["parallel=ddp"]),
        (2, ["parallel=fsdp", "parallel.reduce=last"]),
        (3, ["parallel=fsdp"]),
        (4, ["parallel=hsdp", "parallel.shard=2"]),
    ],
    ids=str,
)
def test_every_change_follows_the_fixed_microbatch(world_size: int, overrides: list[str], tokens: Path, tmp_path: Path):
    """All sizes that cut the batch, up and down, one after the other."""
    expected = reference(tokens, f"run.dir={tmp_path.parent / 'reference'}")
    policy = "full" if "activation_checkpoint=full" in overrides else "none"
    sizes = candidates(12 // world_size, policies=(policy,))
    moves = {4 * number: one for number, one in enumerate([*sizes, *sizes[::-1]])}
    settings = [*AUTO, write_log(tmp_path / "log", moves), f"train.steps={STEPS}", *UNEVEN, *overrides]
    results = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'run'}")
    assert_same_trajectory(results[0], expected)
    ids = [sum((result["ids"][step] for result in results), []) for step in range(STEPS)]
    assert ids == expected["ids"]
    assert rows_of(results[0])[: 4 * len(sizes)] == [one.rows for one in sizes for _ in range(4)]
    assert rows_of(results[0])[-1] == 1


@pytest.mark.parametrize("optimizer", ["gefen", "rso", "rso_gefen"])
def test_every_change_follows_the_fixed_microbatch_with_other_optimizers(optimizer: str, tokens: Path, tmp_path: Path):
    """Over 20 steps, with weights of which last bits turn few codes of an 8-bit momentum: one of these few thousand
    codes moves the loss by 1e-5."""
    settings = [f"optimizer={optimizer}", "train.steps=20", "train.seed=2", *UNEVEN]
    expected = train_ranks(2, tokens, *settings, f"run.dir={tmp_path / 'fixed'}")[0]
    sizes = candidates(6)
    moves = {3 * number: one for number, one in enumerate(sizes)}
    log = write_log(tmp_path / "log", moves)
    result = train_ranks(2, tokens, *settings, *AUTO, log, f"run.dir={tmp_path / 'run'}")[0]
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-5, atol=0)
    assert len(set(rows_of(result))) == len(sizes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_chooses_stays_within_its_budget_and_can_be_replayed(world_size: int, tokens: Path, tmp_path: Path):
    budget = 0.0042
    settings = ["microbatch=auto", f"memory.budget_gib={budget}", "train.steps=30"]
    folder = tmp_path / "run"
    results = train_ranks(world_size, tokens, *settings, f"run.dir={folder}", hook=with_clock(rewarding_size))
    assert all(rows_of(other) == rows_of(results[0]) for other in results)
    fixed = train_ranks(1, tokens, "train.steps=30", f"run.dir={tmp_path / 'fixed'}")[0]
    assert_same_trajectory(results[0], fixed)

    for result in results:
        measured = [record["ledger"]["total"]["peak"] for record in result["records"] if "ledger" in record]
        assert measured and max(measured) <= budget * 2**30
        assert all(record["memory_utilisation"] <= 1 for record in result["records"])
    decisions = [event for event in read_lines(folder / "events.jsonl") if event["kind"] == "microbatch"]
    assert decisions[-1]["phase"] == "settled" == results[0]["records"][-1]["microbatch_phase"]
    sizes = candidates(12 // world_size)
    assert 1 < decisions[-1]["rows"] < sizes[-1].rows or world_size > 1, "the budget matters for one rank"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["microbatch"] == decisions[-1]["rows"] == rows_of(results[0])[-1]
    assert summary["first_microbatch"] == 1 and summary["microbatch_settled"]
    assert 0 < summary["first_microbatch_tokens_per_second"] < summary["microbatch_tokens_per_second"]
    assert summary["memory"]["total"]["peak"] == max(
        max(
            r["ledger"]["total"]["peak"]
            for r in result["records"]
            if "ledger" in r and r["microbatch"] == summary["microbatch"]
        )
        for result in results
    )

    log = f"memory.replay={folder / 'events.jsonl'}"
    again = train_ranks(world_size, tokens, *settings, log, f"run.dir={tmp_path / 'again'}")[0]
    assert rows_of(again) == rows_of(results[0])
    assert torch.equal(losses(again), losses(results[0]))
    assert all(torch.equal(tensor, again["tensors"][name]) for name, tensor in results[0]["tensors"].items())


def test_a_stopped_run_goes_on_at_its_microbatch(tokens: Path, tmp_path: Path):
    settings = [*AUTO, "train.steps=40", "checkpoint.interval=25", "memory.ledger_step=0"]
    clock = with_clock(rewarding_size)
    unbroken = train_ranks(2, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}", hook=clock)[0]
    folder = f"run.dir={tmp_path / 'broken'}"
    first = train_ranks(2, tokens, *settings, folder, "train.stop_after=25", hook=clock)[0]
    assert first["records"][-1]["microbatch_phase"] == "settled"
    second = train_ranks(2, tokens, *settings, folder, hook=clock)[0]
    assert rows_of(second) == rows_of(unbroken)[25:] == [6] * 15
    assert {record["microbatch_phase"] for record in second["records"]} == {"settled"}
    assert torch.equal(losses(second), losses(unbroken)[25:])
    assert all(torch.equal(tensor, second["tensors"][name]) for name, tensor in unbroken["tensors"].items())
    # the log of a run that was resumed replays, too
    log = f"memory.replay={tmp_path / 'broken' / 'events.jsonl'}"
    again = train_ranks(2, tokens, *settings, log, f"run.dir={tmp_path / 'again'}")[0]
    assert rows_of(again) == rows_of(unbroken)


def test_a_smaller_budget_is_kept_from_the_first_resumed_step(tokens: Path, tmp_path: Path):
    settings = ["microbatch=auto", "train.steps=40", "checkpoint.interval=25"]
    folder, clock = f"run.dir={tmp_path}", with_clock(rewarding_size)
    first = train_ranks(1, tokens, *settings, folder, "memory.budget_gib=1", "train.stop_after=25", hook=clock)[0]
    assert rows_of(first)[-1] == 12
    second = train_ranks(1, tokens, *settings, folder, "memory.budget_gib=0.0042", hook=clock)[0]
    assert 1 < max(rows_of(second)) < 12
    measured = [record["ledger"]["total"]["peak"] for record in second["records"] if "ledger" in record]
    assert measured and max(measured) <= 0.0042 * 2**30


def test_other_ranks_search_anew_and_train_the_same(tokens: Path, tmp_path: Path):
    settings = [*AUTO, "train.steps=30", "checkpoint.interval=10"]
    folder, clock = f"run.dir={tmp_path / 'run'}", with_clock(rewarding_size)
    fixed = train_ranks(1, tokens, "train.steps=30", f"run.dir={tmp_path / 'fixed'}")[0]
    records, seen = [], []
    for world_size, stop in ((2, ["train.stop_after=10"]), (3, ["train.stop_after=20"]), (1, [])):
        results = train_ranks(world_size, tokens, *settings, *stop, folder, hook=clock)
        records += results[0]["records"]
        seen += [sum((r["ids"][step] for r in results), []) for step in range(len(results[0]["ids"]))]
    torch.testing.assert_close(losses({"records": records}), losses(fixed), rtol=1e-5, atol=0)
    assert seen == fixed["ids"]
    anew = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event.get("reason") == "searched anew"]
    assert [event["step"] for event in anew] == [10, 20]
    assert any("world_size 2 -> 3" in change for change in anew[0]["changed"])


@pytest.mark.parametrize(
    "processes, budget, steps",
    [(1, 0.001, 0), (2, 0.0007, 0), (2, 0.001, 1)],
    ids=["state", "sharded state", "the first step measures what is beyond the state"],
)
def test_what_cannot_fit_ends_the_run(processes: int, budget: float, steps: int, tokens: Path, tmp_path: Path):
    settings = ["microbatch=auto", f"memory.budget_gib={budget}", f"run.dir={tmp_path}"]
    ended = fork_train(processes, ["data=tokens", f"data.path={tokens}", *settings])
    assert None not in ended.statuses and 0 not in ended.statuses and 75 not in ended.statuses
    (message,) = ended.messages()
    assert "no microbatch fits" in message and "optimizer state" in message and "memory.budget_gib" in message
    assert len(read_lines(tmp_path / "metrics.jsonl")) == steps


def count_exchanges(run: Any) -> dict[int, int]:
    """Step -> calls of torch.distributed's collectives from Python, where a decision would show."""
    counts: dict[int, int] = {}
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather_object",
        "broadcast_object_list",
        "all_gather",
        "gather_object",
    ):
        call = getattr(torch.distributed, name)

        def counted(*arguments: Any, _call: Callable[..., Any] = call, **options: Any) -> Any:
            counts[run.step] = counts.get(run.step, 0) + 1
            return _call(*arguments, **options)

        setattr(torch.distributed, name, counted)
    return counts


def count_watchers(run: Any) -> tuple[int, list[str], dict[int, int]]:
    hooks = sum(
        len(getattr(module, kind))
        for module in run.model.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
    threads = sorted(thread.name for thread in threading.enumerate())
    return hooks, threads, count_exchanges(run)


def test_nothing_is_exchanged_but_one_vector_a_decision(tokens: Path, tmp_path: Path):
    def counting(run: Any) -> Any:
        with_clock(rewarding_size)(run)
        return count_watchers(run)

    settings = ["train.steps=30", "memory.ledger_step=0"]
    fixed = train_ranks(2, tokens, *settings, "microbatch=6", f"run.dir={tmp_path / 'fixed'}", hook=count_watchers)[0]
    auto = train_ranks(2, tokens, *settings, *AUTO, f"run.dir={tmp_path / 'auto'}", hook=counting)[0]
    (hooks, threads, exchanges), (auto_hooks, auto_threads, auto_exchanges) = fixed["noted"], auto["noted"]
    assert (hooks, threads) == (auto_hooks, auto_threads)
    (usual,) = {exchanges[step] for step in range(1, 29)}
    settled = next(r["step"] for r in auto["records"] if r["microbatch_phase"] == "settled")
    assert settled < 28
    assert all(auto_exchanges[step] == usual for step in range(settled, 29)), "settled: nothing"
    assert all(usual <= auto_exchanges[step] <= usual + 2 for step in range(1, settled))
    assert sum(auto_exchanges[step] - usual for step in range(1, settled)) > 3, "the counter sees decisions"


def test_a_model_that_mixes_rows_is_refused():
    refuse_coupled_rows(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"1 \(BatchNorm1d\) mixes the rows"):
        refuse_coupled_rows(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Linear(4, 4)
    model.couples_rows = True
    with pytest.raises(ConfigError, match=r"\(Linear\) mixes the rows"):
        refuse_coupled_rows(model)


def test_decisions_that_a_resume_took_back_are_not_replayed(tmp_path: Path):
    def made(step: int, rows: int) -> dict[str, Any]:
        return {"kind": "microbatch", "step": step, "rows": rows, "accumulation": 12 // rows, "policy": "none"}

    path = tmp_path / "events.jsonl"

    def read(*records: dict[str, Any]) -> list[tuple[int, int]]:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return [(decision["step"], decision["rows"]) for decision in read_decisions(path)]

    start, resume = {"kind": "start"}, {"kind": "resume", "step": 5}
    assert read(start, made(0, 1), made(4, 2), made(7, 4), start, resume, made(6, 3)) == [(0, 1), (4, 2), (6, 3)]
    assert read(start, made(0, 1), made(3, 2), start, made(0, 1), made(2, 4)) == [(0, 1), (2, 4)]
    with pytest.raises(ConfigError, match="no decision"):
        read(start)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_decisions(tmp_path / "none")
