"""W&B: one run over all sessions and ranks, one axis, nothing lost offline, and never in the way of training.

Background: a new run at every restart, a run per rank, evaluations dropped for a smaller step, a rank 0 that waits for
a network while the others time out, and offline sessions that overwrite each other when they are sent. There is no
service here: online runs meet no key, a proxy that refuses, a proxy that never answers, and a library that is missing
or hangs.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.schema import WandbConfig
from observe.sinks import wandb_sink
from observe.sinks.wandb_sink import WandbSink
from tests.observe import wandb_file

KEY = "a" * 40
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No account of the machine is used, and an id in the environment must not win over the run folder's."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "fromenvironment")
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def build_sink(folder, start_step=0, mode="offline", timeout=20.0, run_id=None):
    return WandbSink(WandbConfig(mode=mode, timeout_seconds=timeout), folder, "name", start_step, {"lr": 0.1}, run_id)


def log_steps(sink, first, last):
    for step in range(first, last + 1):
        sink.step({"step": step, "loss": 1 / step, "split": {"data": 0.5}, "skipped": False})


def wait_until_open(sink):
    deadline = time.monotonic() + 20
    while sink.session is None and time.monotonic() < deadline:
        sink._advance(20)
        time.sleep(0.05)
    assert sink.session is not None


def sessions(folder):
    return sorted(folder.glob("wandb/*run-*-*"))


def steps_logged(session, key="train/loss"):
    return [row["step"] for row in wandb_file.history(session) if key in row]


def put_library(monkeypatch, tmp_path, source):
    """Let the writer find another library of the name wandb."""
    place = tmp_path / "library"
    place.mkdir()
    (place / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(place))


def test_train_evaluation_and_events_share_the_optimizer_step(folder):
    sink = build_sink(folder)
    log_steps(sink, 1, 4)
    wait_until_open(sink)
    # the job is told to save and stop: the writer must live until the trainer has said its last word
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(sink._writer.pid, number)
    sink.event({"time": "t", "kind": "checkpoint", "step": 3, "seconds": 2.5})
    sink.evaluation(2, {"val_loss": 7.0})
    log_steps(sink, 5, 6)
    sink.event({"time": "t", "kind": "note", "step": None})
    sink.finish({"status": "done", "loss": 0.1})
    (session,) = sessions(folder)
    assert steps_logged(session) == [1, 2, 3, 4, 5, 6]
    rows = wandb_file.history(session)
    # neither is lost though both come after later steps
    assert {"step": 2, "eval/val_loss": 7.0} in rows
    assert {"step": 3, "checkpoint/step": 3, "checkpoint/seconds": 2.5} in rows
    assert {"step": 6, "note/step": 6} in rows
    assert rows[0] == {"step": 1, "train/loss": 1.0, "train/split.data": 0.5}
    assert wandb_file.axes(session)["*"] == "step"
    assert wandb_file.run_id(session) == sink.run_id


def test_three_sessions_are_one_run_and_all_are_kept(folder, tmp_path):
    ids, before = [], {}
    for number in range(3):
        sink = build_sink(folder, start_step=5 * number)
        log_steps(sink, 5 * number + 1, 5 * number + 5)
        sink.finish({"status": "preempted"})
        ids.append(sink.run_id)
        for session, content in before.items():
            assert next(session.glob("*.wandb")).read_bytes() == content
        before = {session: next(session.glob("*.wandb")).read_bytes() for session in sessions(folder)}
    assert len(set(ids)) == 1
    assert [steps_logged(session) for session in sessions(folder)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12, 13, 14, 15],
    ]
    assert {wandb_file.run_id(session) for session in sessions(folder)} == set(ids)

    # what is documented for sending them, with a stand-in for the command
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "wandb").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "wandb").chmod(0o755)
    script = ["sh", str(folder / "wandb" / "sync.sh")]
    done = subprocess.run(script, env={"PATH": f"{tools}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"sync {session}" for session in sessions(folder)]


def test_a_start_from_scratch_and_a_copy_are_new_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(WandbSink, "_open", lambda self, mode: setattr(self, "_finished", True))
    first = build_sink(folder).run_id
    assert build_sink(folder, start_step=5).run_id == first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert build_sink(copy, start_step=5).run_id != first
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert build_sink(moved, start_step=5).run_id == first
    assert build_sink(moved, start_step=0).run_id != first
    assert build_sink(moved, start_step=5, run_id="fromcheckpoint").run_id == "fromcheckpoint"


def test_no_key_goes_on_offline(folder, caplog):
    sink = build_sink(folder, mode="online")
    log_steps(sink, 1, 3)
    sink.finish({"status": "done"})
    assert "online run not opened" in caplog.text and "API key" in caplog.text
    assert steps_logged(sessions(folder)[-1]) == [1, 2, 3]
    assert wandb_file.run_id(sessions(folder)[-1]) == sink.run_id


@pytest.fixture
def silent_proxy():
    """A port that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("proxy", ["refusing", "silent"])
def test_a_dead_proxy_costs_a_bounded_wait(folder, caplog, monkeypatch, silent_proxy, proxy):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    # port 9 is the discard service, which nothing runs
    monkeypatch.setenv("HTTPS_PROXY", silent_proxy if proxy == "silent" else "http://127.0.0.1:9")
    sink = build_sink(folder, mode="online", timeout=8)
    began = time.monotonic()
    log_steps(sink, 1, 50)
    assert time.monotonic() - began < 1
    sink.finish({"status": "done"})
    assert time.monotonic() - began < 8 + 3
    assert "online run not opened" in caplog.text
    assert "not finished" not in caplog.text
    (session,) = folder.glob("wandb/offline-run-*")
    assert steps_logged(session) == list(range(1, 51))


def test_a_missing_library_is_one_warning(folder, caplog, monkeypatch, tmp_path):
    put_library(monkeypatch, tmp_path, "raise ModuleNotFoundError('no wandb here')")
    sink = build_sink(folder)
    log_steps(sink, 1, 3)
    sink.finish({"status": "done"})
    log_steps(sink, 4, 5)
    sink.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no wandb here" in caplog.text and "Training continues" in caplog.text


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_library_that_hangs_at_the_start_is_killed(folder, caplog, monkeypatch, tmp_path, mode):
    put_library(
        monkeypatch,
        tmp_path,
        "import time\nSettings = lambda **options: None\ninit = lambda **options: time.sleep(600)\n",
    )
    sink = build_sink(folder, mode=mode, timeout=2)
    began = time.monotonic()
    log_steps(sink, 1, 3)
    sink.finish({"status": "done"})
    assert time.monotonic() - began < 3
    assert caplog.text.count("WARNING") == (2 if mode == "online" else 1)
    assert sink._writer.poll() is not None


def test_a_library_that_hangs_later_does_not_hold_a_step_up(folder, caplog, monkeypatch, tmp_path):
    put_library(
        monkeypatch,
        tmp_path,
        "import time, types\n"
        "Settings = lambda **options: None\n"
        "def init(**options):\n"
        "    wait = lambda *a, **o: time.sleep(600)\n"
        "    return types.SimpleNamespace(log=wait, finish=wait, define_metric=lambda *a, **o: None,\n"
        "        settings=types.SimpleNamespace(sync_dir='x', mode='online'))\n",
    )
    monkeypatch.setattr(wandb_sink, "MAX_WAITING", 2000)
    sink = build_sink(folder, timeout=2)
    wait_until_open(sink)
    began = time.monotonic()
    log_steps(sink, 1, 5000)
    assert time.monotonic() - began < 2
    sink.finish({"status": "done"})
    assert time.monotonic() - began < 5
    assert "not finished within" in caplog.text and "records were dropped" in caplog.text
    assert sink._writer.poll() is not None


def test_a_trainer_that_dies_leaves_its_records(folder):
    source = (
        "import os, sys\nfrom pathlib import Path\nfrom tests.observe.sinks.test_wandb_sink import build_sink, "
        "log_steps, wait_until_open\nsink = build_sink(Path(sys.argv[1]))\nlog_steps(sink, 1, 3)\n"
        "wait_until_open(sink)\nos._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", source, str(folder)], cwd=ROOT, timeout=60)
    deadline = time.monotonic() + 20
    kinds: list[str] = []
    while "exit" not in kinds and time.monotonic() < deadline:
        time.sleep(0.2)
        kinds = [record.WhichOneof("record_type") for record in wandb_file.records(sessions(folder)[0])]
    assert "exit" in kinds, "the writer did not end the run"
    assert steps_logged(sessions(folder)[0]) == [1, 2, 3]
    ends = [record.exit.exit_code for record in wandb_file.records(sessions(folder)[0]) if record.HasField("exit")]
    assert ends == [1]
