"""All ranks decide together: one rank's error is every rank's error, and it is printed once."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from conf.checks import ConfigError
from dist import agree
from tests.dist.processes import run_to_exit
from tests.spawn import run_ranks


def fail_on(rank: int, failing: dict[int, Exception]) -> str:
    if rank in failing:
        raise failing[rank]
    return f"result of {rank}"


def catch(action):
    """The error of ``action``, as plain values that travel to the test's process."""
    try:
        return action()
    except agree.AgreedError as error:
        return type(error).__name__, error.rank, error.kind, error.user, error.errno, str(error), error.trace


def everyone(rank: int, world_size: int, failing: dict[int, Exception]):
    return catch(lambda: agree.together(lambda: fail_on(rank, failing), "opening the box"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_has_its_own_result_when_none_fails(world_size: int):
    assert run_ranks(world_size, everyone, {}) == [f"result of {rank}" for rank in range(world_size)]


# failing ranks and errors -> class, rank, kind, whether the user's, errno, message; the same on all ranks
CASES = {
    "config": ({1: ConfigError("x=1 is wrong")}, ("AgreedConfigError", 1, "ConfigError", True, None, "x=1 is wrong")),
    "value": ({1: ValueError("bad value")}, ("AgreedError", 1, "ValueError", True, None, "bad value")),
    "disk": (
        {0: OSError(28, "No space left on device", "/a/b")},
        ("AgreedError", 0, "OSError", True, 28, "opening the box: No space left on device (/a/b)"),
    ),
    "lowest rank wins": (
        {2: ValueError("two"), 1: ValueError("one")},
        ("AgreedError", 1, "ValueError", True, None, "one"),
    ),
    "our fault": (
        {2: KeyError("lost")},
        ("AgreedError", 2, "KeyError", False, None, "opening the box failed on rank 2: KeyError: 'lost'"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_on_some_ranks_is_raised_on_all(name: str):
    failing, expected = CASES[name]
    outcomes = run_ranks(3, everyone, failing)
    assert [outcome[:6] for outcome in outcomes] == [expected] * 3
    assert all("fail_on" in outcome[6] for outcome in outcomes), "the failing rank's traceback travels along"


def first_only(rank: int, world_size: int, failing: dict[int, Exception]):
    calls = []

    def action():
        calls.append(rank)
        return fail_on(rank, failing)

    return catch(lambda: agree.on_first(action, "choosing")), calls


def test_on_first_runs_once_and_shares_result_and_error():
    good = run_ranks(3, first_only, {1: ValueError("never run")})
    assert good == [("result of 0", [0]), ("result of 0", []), ("result of 0", [])]
    bad = run_ranks(3, first_only, {0: ConfigError("no")})
    assert {outcome[:2] for outcome, _ in bad} == {("AgreedConfigError", 0)}


def exchange(rank: int, world_size: int):
    assert agree.broadcast(f"value {rank}") == "value 0"
    assert agree.gather(rank * 10) == [rank * 10 for rank in range(world_size)]
    assert agree.control_group() is torch.distributed.group.WORLD, "gloo needs no second group"


def test_values_reach_every_rank():
    run_ranks(3, exchange)


def train_until_rank_one_fails(rank: int, world_size: int, folder: str, how: str) -> None:
    """A loop of collectives as an entry point runs it: rank 1 fails in its third step."""
    try:
        for step in range(1000):
            if rank == 1 and step == 3:
                if how == "raise":
                    raise ValueError("the first cause")
                os._exit(9)
            if rank == 2 and step == 3 and how == "raise":
                # a rank that notices only much later
                time.sleep(0.5)
            torch.distributed.all_reduce(torch.ones(2))
    except Exception as error:
        if agree.report_failure(error, grace_seconds=1.0):
            Path(folder, f"printed{rank}").write_text(str(error))
        sys.exit(1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_in_the_middle_of_a_step_is_printed_once_with_its_cause(world_size: int, tmp_path: Path):
    statuses, seconds = run_to_exit(world_size, train_until_rank_one_fails, str(tmp_path), "raise")
    assert statuses == [1] * world_size and seconds < 15
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"printed1": "the first cause"}


def test_a_rank_that_dies_without_a_word_is_reported_by_one_peer(tmp_path: Path):
    statuses, seconds = run_to_exit(3, train_until_rank_one_fails, str(tmp_path), "vanish")
    assert statuses == [1, 9, 1] and seconds < 15
    printed = list(tmp_path.iterdir())
    assert len(printed) == 1 and agree.is_secondary(RuntimeError(printed[0].read_text()))


def report_late(rank: int, world_size: int) -> bool:
    """The peer's lost connection is noticed before the rank that caused it has come to its report."""
    if rank == 0:
        return agree.report_failure(RuntimeError("[tcp/pair.cc] Connection closed by peer [127.0.0.1]:4242"))
    time.sleep(0.4)
    return agree.report_failure(ValueError("the first cause"))


def test_a_secondary_error_waits_for_the_first_cause():
    assert run_ranks(2, report_late) == [False, True]


def test_without_a_process_group_the_caller_prints():
    assert agree.report_failure(ValueError("no group yet"))


def get_stuck(rank: int, world_size: int) -> None:
    """Rank 0 sits where no exception reaches it, as in an NCCL collective; rank 1 reports a failure."""
    agree.FailureWatch(interval_seconds=0.1, patience_seconds=0.3)
    torch.distributed.barrier()
    if rank == 1:
        assert agree.report_failure(ValueError("cause"))
        sys.exit(3)
    time.sleep(50)


def test_the_watch_ends_a_stuck_rank_once_another_has_failed():
    statuses, seconds = run_to_exit(2, get_stuck)
    assert statuses == [1, 3] and seconds < 10


def watch_quietly(rank: int, world_size: int) -> str:
    watch = agree.FailureWatch(interval_seconds=0.05, patience_seconds=0.0)
    time.sleep(0.4)
    watch.stop()
    return "alive"


def test_the_watch_leaves_a_healthy_run_alone():
    assert run_ranks(2, watch_quietly) == ["alive", "alive"]
