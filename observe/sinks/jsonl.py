"""``metrics.jsonl`` and ``events.jsonl``: one JSON object per line, valid whatever happens.

Decided here: a line is one write, so that a kill leaves whole lines; a number that JSON does not know becomes null
and its key is listed under ``nonfinite``; a write that fails half-way (full disk) is taken back, so that the next
line starts on a line of its own; a resume from step k first moves the lines of steps after k, and all but the last of
equal steps, to ``metrics.superseded.jsonl``, and drops a torn last line, through a new file and a rename. An evaluation
joins the line of its step: the line is written anew in place, so each step stands once.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from observe.sinks import Record


def encode(record: Record) -> str:
    """One line of valid JSON. Non-finite numbers are null; their keys are listed under ``nonfinite`` (dotted)."""
    found: list[str] = []
    clean = _clean(record, "", found)
    if found:
        clean["nonfinite"] = found
    return json.dumps(clean, separators=(",", ":"), allow_nan=False)


def read_lines(path: Path) -> list[Record]:
    """Every whole line of the file as a dict, in order; torn or foreign lines are left out; [] without a file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class JsonlFile:
    """Appends lines to a file that others may append to as well; each call is one write and raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            # a process was killed inside a line: leave it, but do not join it
            self._write(b"\n", end)

    def append(self, record: Record) -> None:
        """Add one line; where that fails the file stays as it was."""
        self._write(_line(record), os.lseek(self._file, 0, os.SEEK_END))

    def replace_last(self, old: Record, new: Record) -> None:
        """Write ``new`` in place of the last line, which holds ``old``."""
        end = os.lseek(self._file, 0, os.SEEK_END)
        start = end - len(_line(old))
        try:
            self._write(_line(new), start)
        except OSError:
            self._write(_line(old), start)
            raise
        os.ftruncate(self._file, start + len(_line(new)))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes, start: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], start + written)
        except OSError:
            os.ftruncate(self._file, start)
            raise


class MetricsSink:
    """``metrics.jsonl``: one object per step."""

    name = "metrics.jsonl"
    every_step = True

    def __init__(self, path: Path, start_step: int) -> None:
        self._path = path
        self._open(start_step)

    def rewind(self, step: int) -> None:
        """Set aside the records of the steps after ``step``."""
        self._file.close()
        self._open(step)

    def _open(self, start_step: int) -> None:
        self.earlier = _keep_until(self._path, start_step)
        """The records of the steps that were done before, in order."""
        self._last: Record | None = self.earlier[-1] if self.earlier else None
        self._file = JsonlFile(self._path)

    def step(self, record: Record) -> None:
        self._file.append(record)
        self._last = record

    def evaluation(self, step: int, record: Record) -> None:
        if self._last is None or step != self._last["step"]:
            return self.step({"step": step, **record})
        joined = self._last | record
        self._file.replace_last(self._last, joined)
        self._last = joined

    def event(self, record: Record) -> None:
        pass

    def finish(self, summary: Record) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class EventsSink:
    """``events.jsonl``: one object per decision, never shortened: what was decided before a resume stays true."""

    name = "events.jsonl"
    every_step = True

    def __init__(self, path: Path) -> None:
        self._file = JsonlFile(path)

    def step(self, record: Record) -> None:
        pass

    def evaluation(self, step: int, record: Record) -> None:
        pass

    def event(self, record: Record) -> None:
        self._file.append(record)

    def finish(self, summary: Record) -> None:
        pass

    def close(self) -> None:
        self._file.close()


def _keep_until(path: Path, start_step: int) -> list[Record]:
    """Leave the lines of steps up to ``start_step``, each step once, and return them; later ones are set aside."""
    if not path.exists():
        return []
    by_step = {record["step"]: record for record in read_lines(path) if isinstance(record.get("step"), int)}
    kept = [by_step[step] for step in sorted(by_step) if step <= start_step]
    content = b"".join(_line(record) for record in kept)
    if content != path.read_bytes():
        later = [record for record in read_lines(path) if record not in kept]
        aside = JsonlFile(path.with_name(f"{path.stem}.superseded{path.suffix}"))
        for record in later:
            aside.append(record)
        aside.close()
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return kept


def _line(record: Record) -> bytes:
    return encode(record).encode() + b"\n"


def _clean(value: Any, key: str, found: list[str]) -> Any:
    if isinstance(value, dict):
        return {name: _clean(item, f"{key}.{name}" if key else str(name), found) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, f"{key}.{place}", found) for place, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(key)
        return None
    return value
