"""Runs in which memory runs out all the same: mended in place by a single process, left and begun again by several.

Background: gradients that a failed attempt has left are added to the next one, masks are drawn from where the failed
attempt stopped, and the size that failed is chosen again after every restart; all of it trains on.
"""

import functools
import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from dist import recovery
from dist.out_of_memory import RESTART_STATUS, read_reports
from tests.spawn import run_ranks
from tests.test_microbatch_runs import AUTO, rewarding_size, rows_of, with_clock
from tests.test_trajectory import GPT2, assert_same_trajectory
from tests.tiny import fork_train, losses, read_lines, train_here, train_ranks

FAILING = 6
"""Rows of the microbatch for which memory is made to run out: two microbatches a step in a single process."""


class Faults:
    """Lets memory run out in forward or backward of a microbatch of a step, as long as ``when(run)`` says so."""

    def __init__(self, run: Any, where: str, microbatch: int, when: Callable[[Any], bool]) -> None:
        self.run, self.where, self.microbatch, self.when = run, where, microbatch, when
        self.fired: list[int] = []
        self.alive: list[weakref.ref] = []
        self._index = 0
        split = train.Batch.split

        def begin(batch: Any, *arguments: Any) -> Any:
            self._index = 0
            return split(batch, *arguments)

        train.Batch.split = begin
        # within the model, so that what came before has activations and what comes after has not
        layers = list(run.model.layers.values())
        layers[-1].register_forward_hook(self._in_layer)
        run.model.register_forward_hook(self._after)

    def _in_layer(self, module: Any, arguments: Any, output: Tensor) -> None:
        if not torch.is_grad_enabled() or self._index != self.microbatch or not self.when(self.run):
            return
        self.alive = [weakref.ref(tensor) for tensor in (output, *arguments) if isinstance(tensor, Tensor)]
        if self.where == "forward":
            self._fail()
        # the layers above have their gradients by then, those below have none
        arguments[0].register_hook(lambda gradient: self._fail())

    def _after(self, module: Any, arguments: Any, output: Tensor) -> None:
        self._index += torch.is_grad_enabled()

    def _fail(self) -> None:
        self.fired.append(self.run.step + 1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def at_failing_rows(run: Any) -> bool:
    return run.microbatch.candidate.rows == FAILING


def fail_in_place(run: Any, where: str, microbatch: int) -> Faults:
    with_clock(rewarding_size)(run)
    return Faults(run, where, microbatch, at_failing_rows)


def _recover(rank: int, world_size: int, tokens: str, overrides: tuple[str, ...], where: str, microbatch: int) -> Any:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    hook = functools.partial(fail_in_place, where=where, microbatch=microbatch)
    result = train_here(1, tokens, overrides, hook)
    faults = result.pop("noted")
    gc.collect()
    return result | {"fired": faults.fired, "held": [one() is not None for one in faults.alive]}


LAYOUTS = {
    "plain": ["train.precision=fp32"],
    "fsdp": ["parallel=fsdp", "train.precision=bf16"],
    "fsdp, reduced at the end": ["parallel=fsdp", "train.precision=bf16", "parallel.reduce=last"],
    "dropout": [*GPT2, "model.dropout=0.1"],
}


@pytest.mark.parametrize(
    "layout, where, microbatch",
    [
        ("plain", "forward", 0),
        ("plain", "backward", 1),
        ("fsdp", "forward", 1),
        ("fsdp", "backward", 0),
        ("fsdp, reduced at the end", "backward", 1),
        ("dropout", "backward", 1),
    ],
)
def test_a_step_made_again_is_the_step_of_the_smaller_microbatch(
    layout: str, where: str, microbatch: int, tokens: Path, tmp_path: Path
):
    """Bit for bit: the run whose decisions are replayed never fails."""
    settings = [*AUTO, "train.steps=16", *LAYOUTS[layout]]
    arguments = (str(tokens), (*settings, f"run.dir={tmp_path / 'failed'}"), where, microbatch)
    (failed,) = run_ranks(1, _recover, *arguments)
    assert len(failed["fired"]) == 1, "once was enough"
    assert FAILING not in rows_of(failed) and max(rows_of(failed)) == 4
    assert failed["held"] and not any(failed["held"]), "activations of the failed attempt are gone"

    events = tmp_path / "failed" / "events.jsonl"
    (told,) = [event for event in read_lines(events) if event["kind"] == "out of memory"]
    assert told["step"] == failed["fired"][0] - 1 and told["doing"] == "training"
    replayed = train_ranks(1, tokens, *settings, f"memory.replay={events}", f"run.dir={tmp_path / 'replayed'}")[0]
    assert rows_of(replayed) == rows_of(failed)
    assert torch.equal(losses(replayed), losses(failed))
    assert all(torch.equal(tensor, failed["tensors"][name]) for name, tensor in replayed["tensors"].items())


def every_seven_steps(run: Any) -> Faults:
    with_clock(rewarding_size)(run)
    counted = run.optimizer.step
    faults = Faults(run, "backward", 0, lambda run: (run.step + 1) % 7 == 0 and run.step + 1 not in faults.fired)
    faults.updates = 0

    def count() -> None:
        faults.updates += 1
        counted()

    run.optimizer.step = count
    return faults


def _retry(rank: int, world_size: int, tokens: str, overrides: tuple[str, ...]) -> Any:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    result = train_here(1, tokens, overrides, every_seven_steps)
    faults = result.pop("noted")
    return result | {"fired": faults.fired, "updates": faults.updates}


def test_no_sample_and_no_update_is_repeated_or_lost(tokens: Path, tmp_path: Path):
    settings = ["train.global_batch=48", "train.seq_len=16", "train.steps=60"]
    fixed = train_ranks(1, tokens, *settings, "microbatch=48", f"run.dir={tmp_path / 'fixed'}")[0]
    arguments = (str(tokens), (*AUTO, *settings, f"run.dir={tmp_path / 'retried'}"))
    (retried,) = run_ranks(1, _retry, *arguments)
    assert len(retried["fired"]) == 8
    assert retried["ids"] == fixed["ids"]
    assert retried["updates"] == 60
    assert [record["step"] for record in retried["records"]] == list(range(1, 61))
    assert_same_trajectory(retried, fixed)


def documented_only(model: Any) -> None:
    """What the documentation of FSDP2 offers."""
    model.reset_iter_state()
    for parameter in model.parameters():
        parameter.grad = None


def test_a_recovery_that_leaves_gradients_is_found_out(monkeypatch: pytest.MonkeyPatch):
    def tried() -> list[bool]:
        model = recovery._trial_model(torch.device("cpu"))
        exact = [recovery.is_exact(model, torch.device("cpu"))]
        for broken in (documented_only, lambda model: None, lambda model: model.no_such_method()):
            recovery.drop_gradients = broken
            exact.append(recovery.is_exact(model, torch.device("cpu")))
        return exact

    assert run_ranks(1, lambda rank, world_size: tried()) == [[True, False, False, False]]


def test_an_untried_recovery_is_not_used(tokens: Path, tmp_path: Path):
    """The run ends with the status that starts it again."""
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=30", *AUTO]
    arguments += LAYOUTS["fsdp"]

    def change() -> None:
        recovery.drop_gradients = documented_only
        fail_on_rank(0, "backward", at_failing_rows)

    ended = fork_train(1, arguments, change)
    assert ended.statuses == [RESTART_STATUS], ended.errors
    assert read_reports(tmp_path)[0]["rows"] == FAILING


def fail_on_rank(failing: int, where: str, when: Callable[[Any], bool]) -> None:
    """In a process of ``fork_train``: memory runs out on one rank, by a clock that rewards size."""
    build_run = train.build_run

    def build_failing_run(*arguments: Any) -> Any:
        run = build_run(*arguments)
        with_clock(rewarding_size)(run)
        if int(os.environ["RANK"]) != failing:
            return run
        if where in ("forward", "backward"):
            Faults(run, where, 0, when)
            return run
        step = run.optimizer.step

        def fail_in_update() -> None:
            if when(run):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            step()

        run.optimizer.step = fail_in_update
        return run

    train.build_run = build_failing_run


def three_rows(run: Any) -> bool:
    return run.microbatch.candidate.rows >= 3


@pytest.mark.parametrize(
    "processes, layout, failing, where",
    [
        (2, "fsdp", 0, "forward"),
        (2, "ddp", 1, "backward"),
        (3, "fsdp", 1, "update"),
    ],
)
def test_one_rank_out_of_memory_ends_all_and_the_next_start_goes_on_below(
    processes: int, layout: str, failing: int, where: str, tokens: Path, tmp_path: Path
):
    settings = ["data=tokens", f"data.path={tokens}", f"parallel={layout}", "train.steps=30"]
    arguments = [*settings, f"run.dir={tmp_path / 'run'}", *AUTO, "checkpoint.interval=1"]
    ended = fork_train(processes, arguments, lambda: fail_on_rank(failing, where, three_rows))
    assert ended.statuses == [RESTART_STATUS] * processes, ended.errors
    assert ended.seconds < 10
    assert len(ended.messages()) == 1, ended.errors
    (report,) = read_reports(tmp_path / "run")
    assert report["rank"] == failing and report["rows"] >= 3
    assert report["doing"] == ("updating" if where == "update" else "training")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["outcome"] == "oom"

    again = fork_train(processes, arguments, lambda: fail_on_rank(failing, where, three_rows))
    assert again.statuses == [0] * processes, again.errors
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 31))
    assert all(record["microbatch"] < 3 for record in records[report["step"] - 1 :])
    safe = fork_train(processes, [*settings, f"run.dir={tmp_path / 'safe'}", "microbatch=2"])
    assert safe.statuses == [0] * processes, safe.errors
    expected = torch.tensor([record["loss"] for record in read_lines(tmp_path / "safe" / "metrics.jsonl")])
    torch.testing.assert_close(torch.tensor([record["loss"] for record in records]), expected, rtol=1e-5, atol=0)


def test_memory_lost_in_an_evaluation_is_no_fault_of_the_microbatch(tokens: Path, tmp_path: Path):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=9", *AUTO]
    arguments += ["train.eval_interval=3", "checkpoint.interval=2"]

    def change() -> None:
        def evaluate(run: Any) -> None:
            run.doing = "evaluating"
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        train.evaluate = evaluate

    ended = fork_train(1, arguments, change)
    assert ended.statuses == [1], ended.errors
    assert read_reports(tmp_path) == []
    assert fork_train(1, arguments).statuses == [0]
