"""Looking inside a run: a torch profiler window over a few steps, and a record of CUDA allocations.

Results go to ``profile/`` in the run folder. Decided here: rank 0 is profiled (the ranks do the same work); allocations
are recorded on every rank, since any of them may be the one that runs out. Switched off, a step costs one comparison.
"""

import contextlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.profiler

from conf.checks import ConfigError
from conf.schema import LogConfig

# entries of the allocation record: some hundred steps of a large model, a few hundred MB of host memory at most
MAX_ALLOCATIONS = 200_000
ROWS_OF_TABLE = 40
logger = logging.getLogger(__name__)


class Profiler:
    """Profiles the steps in ``window``; ``snapshot`` is where this rank's allocation record goes, ``None`` for none."""

    def __init__(self, window: range, folder: Path, device: torch.device, snapshot: Path | None, at_end: bool) -> None:
        self._window = window
        self._folder = folder
        self._device = device
        self._snapshot = snapshot
        self._at_end = at_end
        self._first: int | None = None
        self._profile: torch.profiler.profile | None = None
        if snapshot is not None:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, device=device)
            torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Everything of training step ``step`` belongs inside."""
        if step in self._window and self._profile is None:
            self._start(step)
        yield
        if self._profile is not None and step == self._window[-1]:
            self._write(step)

    def close(self) -> None:
        """Write what is under way: a window that the run did not reach the end of, the allocation record."""
        if self._profile is not None and self._first is not None:
            self._write(None)
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            if self._at_end:
                self._dump(snapshot)
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)

    def _start(self, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._first = step
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _write(self, last: int | None) -> None:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"steps-{self._first}-{'unfinished' if last is None else last}"
        by = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        try:
            self._folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json"))
            table = profile.key_averages().table(sort_by=by, row_limit=ROWS_OF_TABLE)
            (self._folder / f"{name}.txt").write_text(table)
        except (OSError, RuntimeError) as error:
            logger.warning("The profile cannot be written (%s). Training continues.", error)

    def _out_of_memory(self, device: int, size: int, total: int, free: int) -> None:
        if self._snapshot is not None:
            self._dump(self._snapshot)
            # what the end of the run would add is the state after the failure
            self._at_end = False

    def _dump(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            content: dict[str, Any] = torch.cuda.memory._snapshot(self._device)
            with path.open("wb") as file:
                pickle.dump(content, file)
        except (OSError, RuntimeError) as error:
            logger.warning("%s cannot be written (%s). Training continues.", path.name, error)


def build_profiler(config: LogConfig, folder: Path, rank: int, device: torch.device) -> Profiler:
    """The profiler of this rank; ``folder`` is the run folder. ``ConfigError``: allocation record without CUDA."""
    if config.memory_snapshot and device.type != "cuda":
        raise ConfigError(
            f"log.memory_snapshot=true records CUDA allocations; the device is {device.type}. "
            "Set log.memory_snapshot=false."
        )
    place = folder / "profile"
    window = profiled_steps(config) if rank == 0 else range(0)
    snapshot = place / f"memory_snapshot_rank{rank}.pickle" if config.memory_snapshot else None
    return Profiler(window, place, device, snapshot, at_end=rank == 0)


def profiled_steps(config: LogConfig) -> range:
    """The steps of the profiler window; empty without one."""
    return (
        range(config.profile_start, config.profile_start + config.profile_steps) if config.profile_start else range(0)
    )
