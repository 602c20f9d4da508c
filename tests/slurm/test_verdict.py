"""What becomes of a job, for every way that its processes can end, without Slurm."""

import json
import socket
from pathlib import Path

import pytest

from conf.checks import ConfigError
from conf.compose import load_config
from dist import out_of_memory, run_folder
from slurm import verdict
from slurm.verdict import Before, judge

OLD, SAVED = Before("1", ("step-00000005",), 0), Before("2", ("step-00000005", "step-00000010"), 0)
IDLE, REPORTED = Before("2", ("step-00000005",), 0), Before("2", ("step-00000005",), 1)
PREEMPTED, OOM = {"outcome": "preempted", "step": 10}, {"outcome": "oom", "error": "out of memory"}
LOST = {"outcome": "failed", "error": "connection closed", "secondary": True}
FAILED = {"outcome": "failed", "error": "the loss is nan", "secondary": False}
# status, what the folder held, what it holds, Slurm's state of the job, restarts left, verdict, words of the reason
CASES = {
    "done": ({"outcome": "done"}, OLD, SAVED, "RUNNING", 3, "done", "last step"),
    "done while it is cancelled": ({"outcome": "done"}, OLD, SAVED, "COMPLETING", 3, "done", "last step"),
    "saved": (PREEMPTED, OLD, SAVED, "RUNNING", 3, "requeue", "stopped at step 10"),
    "saved, Slurm has decided": (PREEMPTED, OLD, SAVED, "COMPLETING", 3, "left", "Slurm ends this job"),
    "too short to save": (PREEMPTED, OLD, IDLE, "RUNNING", 3, "failed", "longer --time"),
    "status of an earlier start": (PREEMPTED, SAVED, SAVED, "RUNNING", 3, "failed", "before training began"),
    "done of an earlier start": ({"outcome": "done"}, SAVED, SAVED, "RUNNING", 3, "failed", "before training began"),
    "its own error": (FAILED, OLD, SAVED, "RUNNING", 3, "failed", "the loss is nan"),
    "a rank is gone": (LOST, OLD, SAVED, "RUNNING", 3, "restart", "2 further restarts"),
    "killed without a word": ({"outcome": "running"}, OLD, IDLE, "RUNNING", 1, "restart", "0 further restarts"),
    "killed too often": ({"outcome": "running"}, OLD, IDLE, "RUNNING", 0, "failed", "RESTARTS is used up"),
    "memory, with a new cap": (OOM, OLD, REPORTED, "RUNNING", 0, "restart", "below what was tried"),
    "memory, nothing to change": (OOM, REPORTED, Before("3", (), 1), "RUNNING", 3, "failed", "smaller microbatch"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_judge(case):
    status, before, now, state, restarts, expected, words = case
    found, reason = judge(load_config([]), status, before, now, state, restarts)
    assert found == expected and found in verdict.VERDICTS
    assert words in reason


def test_a_run_that_was_told_where_to_stop_is_not_requeued():
    config = load_config(["train.stop_after=10"])
    assert judge(config, PREEMPTED, OLD, SAVED, "RUNNING", 3)[0] == "failed"
    assert judge(config, {**PREEMPTED, "step": 9}, OLD, SAVED, "RUNNING", 3)[0] == "requeue"


def test_names_are_those_that_the_run_writes(tmp_path: Path):
    assert verdict.STATUS_NAME == run_folder.STATUS_NAME
    assert verdict.REPORTS_NAME == out_of_memory.FILE_NAME
    run_folder.write_status(tmp_path, "running", step=0)
    out_of_memory.add_report(tmp_path, {"rank": 0})
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000010.tmp").mkdir()
    found = verdict.look(tmp_path)
    assert found.time is not None and found.checkpoints == ("step-00000005",) and found.reports == 1


def test_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "20017")
    config = load_config([f"run.dir={tmp_path}", "train.steps=10"])
    port, name, before = verdict.begin(config).split(" ", 2)
    assert (port, name, json.loads(before)["time"]) == ("10017", "20017.0", None)
    run_folder.write_status(tmp_path, "done", step=10)
    assert verdict.begin(config) == "done"
    # more steps than it has done: it goes on
    assert verdict.begin(load_config([f"run.dir={tmp_path}", "train.steps=11"])) != "done"


def test_a_port_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(verdict, "rendezvous_port", lambda job: taken.getsockname()[1])
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        with pytest.raises(ConfigError, match=f"port {taken.getsockname()[1]} of .* Submit again"):
            verdict.begin(load_config([f"run.dir={tmp_path}"]))
