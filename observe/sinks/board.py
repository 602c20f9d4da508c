"""TensorBoard event files under ``tensorboard/`` in the run folder: curves over the optimizer step.

Records are written here and now: the usual writer has a thread, which dies on a full disk and takes the next flush
with it. The library is only used for the format, and imported only where it is wanted.
"""

import os
import time
from pathlib import Path
from typing import Any

from observe.sinks import Record, curves


class TensorBoardSink:
    """One file per session. A resume hides what was written after the step that it resumes from."""

    name = "TensorBoard"
    every_step = False

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        # the reader goes through the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._session = event_pb2.SessionLog
        if start_step:
            self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Hide what was written after ``step``."""
        self._write(step=step + 1, session_log=self._session(status=self._session.START))

    def step(self, record: Record) -> None:
        self._add(record["step"], record)

    def evaluation(self, step: int, record: Record) -> None:
        self._add(step, record)

    def event(self, record: Record) -> None:
        """Events are no curves; ``events.jsonl`` has them."""

    def finish(self, summary: Record) -> None:
        pass

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, record: Record) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in curves(record).items()]
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
