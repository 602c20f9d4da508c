"""A signal that asks to stop, at any moment, to any rank: all stop after the same step, with one complete checkpoint.

Background: a flag that is looked at between steps only is missed in an evaluation or a save, and a rank that stops by
itself leaves the others in a collective.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from dist import agree, env
from tests.spawn import run_ranks
from tests.tiny import ROOT, TINY, Ended, fork_train, read_lines

STEP = 3


def signal_at(moment: str, numbers: list[int], ranks: list[int]) -> None:
    """In each of ``ranks``, let the process get ``numbers`` at ``moment``."""
    if env.rank() not in ranks:
        return

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    name = {
        "data": "open_run_data",
        "start": "resume",
        "step": "train_step",
        "evaluation": "evaluate",
        "saving": "save",
    }
    act = getattr(train, name[moment])
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if moment in ("data", "start") or len(calls) == (1 if moment in ("evaluation", "saving") else STEP):
            send()
        return act(*arguments)

    setattr(train, name[moment], interrupted)


def stop(moment: str, numbers: list[int], ranks: list[int], settings: list[str], processes: int = 2) -> Ended:
    return fork_train(processes, settings, lambda: signal_at(moment, numbers, ranks))


def complete_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "moment, numbers, ranks, stopped_at, async_save",
    [
        ("data", [signal.SIGTERM], [1], 0, "true"),
        ("start", [signal.SIGUSR1], [0], 0, "true"),
        ("step", [signal.SIGTERM], [1], 3, "true"),
        ("step", [signal.SIGINT, signal.SIGINT], [0, 1], 3, "false"),
        ("evaluation", [signal.SIGUSR1], [1], 2, "false"),
        ("saving", [signal.SIGTERM, signal.SIGTERM], [1], 4, "true"),
        ("saving", [signal.SIGUSR1], [0], 4, "false"),
    ],
)
def test_all_ranks_stop_after_one_step(moment, numbers, ranks, stopped_at, async_save, tokens: Path, tmp_path: Path):
    settings = [
        "data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=8", "checkpoint.interval=4",
        "train.eval_interval=2", f"checkpoint.async_save={async_save}",
    ]  # fmt: skip
    ended = stop(moment, numbers, ranks, settings)
    assert ended.statuses == [75, 75] and not ended.messages(), ended.errors
    assert ended.seconds < 10
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["step"]) == ("preempted", stopped_at)
    assert complete_steps(tmp_path) == ([stopped_at] if stopped_at else [])
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    if (moment, async_save) == ("step", "true"):
        assert fork_train(2, settings).statuses == [0, 0]
        assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_the_last_evaluation_is_made_and_a_finished_run_is_done(tokens: Path, tmp_path: Path):
    settings = [
        "data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=2", "checkpoint.interval=4",
    ]  # fmt: skip
    assert stop("evaluation", [signal.SIGTERM], [1], settings).statuses == [0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and summary["val_loss"] is not None
    assert fork_train(2, settings).statuses == [0, 0]


def test_a_flag_of_one_rank_is_seen_by_all():
    assert run_ranks(3, lambda rank, world_size: agree.any_rank(rank == 1)) == [True] * 3
    assert run_ranks(2, lambda rank, world_size: agree.any_rank(False)) == [False] * 2


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher(number: int, tokens: Path, tmp_path: Path):
    """torchrun hands on what ``--signals-to-handle`` names, and ends with 1 whatever the outcome."""
    settings = [
        "data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=100000", "checkpoint.interval=1000",
    ]  # fmt: skip
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", "train.py", *TINY, *settings],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        metrics = tmp_path / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3) and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher.send_signal(number)
        began = time.monotonic()
        assert launcher.wait(30) != 0
        assert time.monotonic() - began < 20
    finally:
        launcher.kill()
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["outcome"] == "preempted"
    assert complete_steps(tmp_path) == [status["step"]] == [read_lines(metrics)[-1]["step"]]
