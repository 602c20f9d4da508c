"""Weights & Biases, without ever waiting for it.

Decided here: the library runs in a process of its own (``wandb_writer.py``), fed through a pipe that is never written
to when it is full, so that a missing network, key or package, a dead proxy or a full disk cost the training loop
nothing. An online run that is not open after ``log.wandb.timeout_seconds`` becomes an offline run of the same id, with
all its records; at the end the writer gets that time once more and is then killed. One run per run folder: the id
stands in ``wandb_run.json``; a resume keeps it, a start from step 0 or a copied folder gets a new one. The axis of
every curve is ``step``, the optimizer step, for training, evaluation and events alike. After a crash, steps that are
run again appear twice at the same place.

Offline, each session of a run has its own folder ``wandb/offline-run-<time>-<id>``; none is ever rewritten. Send them
oldest first, each whole; ``sh <run folder>/wandb/sync.sh``, written at every start, does that.
"""

import json
import logging
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from conf.schema import WandbConfig
from observe.sinks import Record, curves
from observe.sinks.jsonl import encode

# records wait in memory while the writer starts or is stuck; beyond this the oldest are dropped, with a warning
MAX_WAITING = 200_000
logger = logging.getLogger(__name__)


class WandbSink:
    """One W&B run, written by another process. ``settings`` is the run's configuration, shown beside the curves."""

    name = "W&B"
    every_step = False

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        run_name: str,
        start_step: int,
        settings: Record,
        run_id: str | None = None,
    ) -> None:
        self.run_id = run_id or _stored_id(folder, start_step) or secrets.token_hex(4)
        self.session: str | None = None
        """The folder of this session's files, known once the run is open."""
        self._timeout = config.timeout_seconds
        self._folder = folder / "wandb"
        self._run = {"id": self.run_id, "name": run_name, "dir": str(folder), "config": settings}
        self._run |= {"project": config.project, "entity": config.entity, "group": config.group}
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._step = start_step
        self._finished = False
        self._folder.mkdir(exist_ok=True)
        _store_id(folder, self.run_id)
        _write_sync_script(self._folder)
        self._open(config.mode)

    def step(self, record: Record) -> None:
        self._step = record["step"]
        self._send({"log": {"step": record["step"], **curves(record)}})

    def evaluation(self, step: int, record: Record) -> None:
        self._send({"log": {"step": step, **curves(record)}})

    def event(self, record: Record) -> None:
        kind, step = record["kind"], record.get("step")
        fields = {f"{kind}/{key}": value for key, value in record.items() if key not in ("time", "kind", "step")}
        step = self._step if step is None else step
        self._send({"log": {"step": step, f"{kind}/step": step, **fields}})

    def finish(self, summary: Record) -> None:
        self._send({"summary": {"final": summary}})
        self._end(0 if summary.get("status") in ("done", "preempted") else 1)

    def close(self) -> None:
        self._end(1)

    def _open(self, mode: str) -> None:
        self._mode = mode
        self._opened = time.monotonic()
        self._reports = b""
        self._writer = _start_writer(self._folder)
        assert self._writer.stdin is not None and self._writer.stdout is not None
        self._pipe, self._report_pipe = self._writer.stdin.fileno(), self._writer.stdout.fileno()
        os.set_blocking(self._pipe, False)
        os.set_blocking(self._report_pipe, False)
        init = {"mode": mode, "timeout": self._timeout, "trainer": os.getpid(), "run": self._run}
        # what comes after it waits here until the run is open: another writer may have to take over
        self._write(encode({"init": init}).encode() + b"\n")

    def _send(self, message: Record) -> None:
        """Put a message in line and hand over as many as the pipe takes right now."""
        if self._finished:
            return
        self._waiting.append(encode(message).encode() + b"\n")
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._advance(self._timeout)

    def _advance(self, patience: float) -> None:
        """Read reports, write records; an online run that is not open after ``patience`` seconds goes offline."""
        self._listen()
        if not self._finished and self.session is None and time.monotonic() - self._opened > patience:
            self._fail(f"no answer within {patience:g} s")
        while self._waiting and self.session is not None and not self._finished:
            line = self._waiting.popleft()
            written = self._write(line)
            if written < len(line):
                self._waiting.appendleft(line[written:])
                return

    def _write(self, line: bytes) -> int:
        try:
            return os.write(self._pipe, line)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self._fail("the writer has ended")
            return 0

    def _listen(self) -> None:
        try:
            while chunk := os.read(self._report_pipe, 65536):
                self._reports += chunk
            ended = True
        except BlockingIOError:
            ended = False
        *whole, self._reports = self._reports.split(b"\n")
        for report in map(json.loads, whole):
            if report["kind"] == "failed":
                return self._fail(report["reason"])
            self.session = report["folder"]
        if ended:
            self._fail("the writer has ended")

    def _fail(self, reason: str) -> None:
        """Say so; an online run that never opened goes on offline, anything else ends here."""
        self._stop()
        if self._mode == "online" and self.session is None:
            logger.warning(
                "W&B: online run not opened (%s). It is recorded offline; send it with wandb/sync.sh.", reason
            )
            self._open("offline")
        else:
            logger.warning("W&B: given up (%s; see wandb/writer.log). Training continues without it.", reason)
            self._finished = True

    def _end(self, exit_code: int) -> None:
        """Hand over the rest and wait for the writer, in all at most the time-out; then kill what is left of it."""
        if self._finished:
            return
        deadline = time.monotonic() + self._timeout
        self._send({"finish": exit_code})
        # half of the time is kept for the offline run that an unopened online run becomes
        while not self._finished and (self._waiting or self.session is None) and time.monotonic() < deadline:
            writable = [self._pipe] if self.session is not None else []
            select.select([self._report_pipe], writable, [], 0.05)
            patience = self._timeout / 2 if self._mode == "online" else 2 * self._timeout
            self._advance(patience)
        if self._finished:
            return
        self._finished = True
        assert self._writer.stdin is not None
        try:
            self._writer.stdin.close()
            self._writer.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            logger.warning(
                "W&B: not finished within log.wandb.timeout_seconds=%g. metrics.jsonl has every record; what W&B "
                "has is sent with wandb/sync.sh.",
                self._timeout,
            )
        self._stop()
        if self._dropped:
            logger.warning("W&B: %d records were dropped while it did not answer.", self._dropped)

    def _stop(self) -> None:
        """No process and no pipe of the writer is left."""
        assert self._writer.stdin is not None and self._writer.stdout is not None
        try:
            os.killpg(self._writer.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._writer.wait()
        self._writer.stdout.close()
        self._writer.stdin.close()


def _write_sync_script(folder: Path) -> None:
    (folder / "sync.sh").write_text(
        "# sends every session of this run, oldest first: a later session continues the earlier ones\n"
        f'for session in {shlex.quote(str(folder))}/*run-[0-9]*; do wandb sync "$session" || exit; done\n'
    )


def _start_writer(folder: Path) -> subprocess.Popen[bytes]:
    # -P: this file's folder must not come first on the writer's path. A session of its own: a signal to the job's group
    # must not end the writer before the trainer has said its last word
    with (folder / "writer.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("wandb_writer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,
        )


def _stored_id(folder: Path, start_step: int) -> str | None:
    """The id of the run that is resumed; ``None`` for a start from scratch and for a copy of a folder that exists."""
    try:
        stored: dict[str, Any] = json.loads((folder / "wandb_run.json").read_text())
    except (OSError, ValueError):
        return None
    copied = stored["folder"] != str(folder.resolve()) and (Path(stored["folder"]) / "wandb_run.json").exists()
    return None if start_step == 0 or copied else stored["id"]


def _store_id(folder: Path, run_id: str) -> None:
    temporary = folder / ".wandb_run.json.tmp"
    temporary.write_text(json.dumps({"id": run_id, "folder": str(folder.resolve())}) + "\n")
    temporary.replace(folder / "wandb_run.json")
