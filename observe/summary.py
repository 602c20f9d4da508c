"""``summary.json``: one object that says how a run ended and what it reached. What is not known is null, never 0."""

import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from observe import mfu
from observe.sinks import Record
from observe.sinks.jsonl import encode

_ROOT = Path(__file__).resolve().parents[1]

# every key that is always there, in the order of the file; other keys that a run adds come after them
KEYS = (
    "status", "steps", "first_step", "last_step", "loss", "val_loss", "tokens",
    "tokens_per_second", "tokens_per_second_per_device", "mfu", "mfu_convention", "throughput_steps",
    "parameters", "optimizer_state_bytes", "optimizer_state_bytes_per_param", "memory", "peak_memory",
    "microbatch", "accumulation", "world_size", "config_hash", "versions",
)  # fmt: skip


class Totals:
    """What the records of a run add up to.

    Throughput is the median over the steady steps of this process (its first step and profiled steps left out); where
    it has none, over those that ``earlier`` holds, the records of the steps before this process started.
    """

    def __init__(self, earlier: Iterable[Record] = (), profiled: range = range(0)) -> None:
        self._profiled = profiled
        self._earlier: list[Record] = []
        self._steady: list[Record] = []
        self._first_step: int | None = None
        self._last: Record = {}
        self._last_evaluation: Record = {}
        self._peak: dict[str, int] = {}
        for record in earlier:
            self.add(record)
        self._earlier, self._steady, self._peak = self._steady, [], {}

    def add(self, record: Record) -> None:
        """Count a step, with what its record holds."""
        if "step_seconds" in record:
            if self._first_step is None:
                self._first_step = record["step"]
            self._last = record
            if record.get("steady") and record["step"] not in self._profiled:
                self._steady.append({key: record.get(key) for key in _RATES})
        for owner, size in (record.get("memory") or {}).items():
            if size is not None:
                self._peak[owner] = max(size, self._peak.get(owner, 0))
        if "val_loss" in record:
            self._last_evaluation = record

    def add_evaluation(self, step: int, record: Record) -> None:
        """Count an evaluation that came on its own."""
        self._last_evaluation = {"step": step, **record}

    def figures(self) -> Record:
        """The part of ``summary.json`` that follows from the records."""
        steady = self._steady or self._earlier
        figures: Record = {key: _median(record[key] for record in steady) for key in _RATES}
        figures |= {
            "steps": self._last.get("step"),
            "first_step": self._first_step,
            "last_step": self._last.get("step"),
            "loss": self._last.get("loss"),
            "val_loss": self._last_evaluation.get("val_loss"),
            "tokens": self._last.get("tokens"),
            "throughput_steps": len(steady),
            "peak_memory": dict(self._peak) or None,
        }
        return figures


_RATES = ("tokens_per_second", "tokens_per_second_per_device", "mfu")


def build_summary(totals: Totals, known: Record) -> Record:
    """The whole object: every key of ``KEYS``, ``known`` last, which wins over what the records say."""
    summary: Record = dict.fromkeys(KEYS)
    summary |= totals.figures()
    summary |= {"mfu_convention": mfu.CONVENTION, "versions": versions(), **known}
    state, parameters = summary["optimizer_state_bytes"], summary["parameters"]
    if state is not None and parameters and summary["optimizer_state_bytes_per_param"] is None:
        summary["optimizer_state_bytes_per_param"] = state / parameters
    return summary


def write_summary(path: Path, summary: Record) -> None:
    """Replace the file in one step: a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(json.loads(encode(summary)), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_outcome(folder: Path) -> str | None:
    """The ``status`` that the ``summary.json`` of a run folder states; None without a readable one."""
    try:
        return json.loads((folder / "summary.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return None


@functools.cache
def versions() -> dict[str, Any]:
    """Versions of what computes; git revision of this code and whether it was changed since. None where unknown."""
    revision, dirty = _git_state()
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {package: _version(package) for package in ("torch", "torchtitan", "triton", "wandb")}
    return found | {"git_revision": revision, "git_dirty": dirty}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    # a copy without .git inside another repository must not take that one's revision
    if not (_ROOT / ".git").exists():
        return None, None
    revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return revision, None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
