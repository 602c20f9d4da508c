"""Notices that a step does not end: a rank that is stuck or silent leaves all others in a collective.

A thread looks at the time since the step began. Beyond ``health.hang_factor`` times the median of the last steps, and
beyond ``health.hang_seconds``, each rank writes the stacks of all its threads once into the run folder; then the run
ends as after any failure, told once (``dist.ending``). Evaluation, saving and the first steps, which compile, are not
timed: there the timeout of the collectives holds.
"""

import faulthandler
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.schema import HealthConfig
from dist import env

MIN_STEPS = 5
STEPS_KEPT = 64
LOOKS_PER_SECOND = 2.0


class HangError(RuntimeError):
    """A step has taken too long."""


class HangWatch:
    """Times what is within ``step()``; ``on_hang(error)`` is called in the watch's thread and ends the run."""

    def __init__(self, config: HealthConfig, folder: Path, on_hang: Callable[[HangError], None]) -> None:
        self._config = config
        self._folder = folder
        self._on_hang = on_hang
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)
        # the step and when it began, in one assignment
        self._current: tuple[int, float, float] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        if config.hang_factor > 0:
            self._thread.start()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Training step ``step`` belongs inside; after an error no limit holds."""
        began = time.monotonic()
        enough = len(self._seconds) >= MIN_STEPS
        typical = statistics.median(self._seconds) if enough else float("inf")
        self._current = (step, began, typical)
        try:
            yield
        finally:
            self._current = None
        self._seconds.append(time.monotonic() - began)

    def close(self) -> None:
        """End the watch."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._done.wait(1 / LOOKS_PER_SECOND):
            if (current := self._current) is None:
                continue
            step, began, typical = current
            seconds = time.monotonic() - began
            if seconds > max(self._config.hang_seconds, self._config.hang_factor * typical):
                name = f"stacks-rank{env.rank()}.txt"
                with (self._folder / name).open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                self._on_hang(
                    HangError(
                        f"step {step} has not ended after {seconds:.1f} s; the last ones took {typical:.3g} s, and "
                        f"health.hang_factor={self._config.hang_factor:g}, health.hang_seconds="
                        f"{self._config.hang_seconds:g}. stacks-rank*.txt in {self._folder} show where each rank is; "
                        "a rank without one is silent. Start again, or raise these keys for steps that vary so much."
                    )
                )
                return
