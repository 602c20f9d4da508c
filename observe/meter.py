"""Where the time of a step goes, and what throughput that makes.

Throughput is global real tokens over the wall time between two ``step`` calls, evaluation and saving (``pause``)
excluded. Wall time is the host's. The split follows the host's clock on a CPU; on CUDA it follows events on the
current stream, which are only read once they have passed: nothing here makes the host wait, except ``pause``. What
the device has not finished when ``step`` is called (usually the optimizer) is therefore charged to the next step, whose
wall time it also falls into. Communication that hides in backward counts as backward; ``reduce`` is what the caller
puts there: the rest of the reduction, the norm, the vote.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from observe import mfu

PHASES = ("data", "forward", "backward", "reduce", "optimizer")


class StepMeter:
    """Counts tokens and seconds of each optimizer step.

    ``tokens_per_step`` are the real tokens of a step over all ranks; ``flops_per_token`` the training FLOPs of one
    (see ``observe.mfu.CONVENTION``), ``None`` if unknown; ``tokens`` what the run had seen before (a resume).
    """

    def __init__(
        self,
        tokens_per_step: int,
        world_size: int,
        flops_per_token: float | None,
        device: torch.device,
        *,
        tokens: int = 0,
        device_name: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens = tokens
        self.tokens_per_step = tokens_per_step
        self.world_size = world_size
        self.flops_per_token = flops_per_token
        if device_name is None and device.type == "cuda":
            device_name = torch.cuda.get_device_name(device)
        self.peak = mfu.device_peak(device_name)
        self.beside: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
        """What else is told of phases: it is entered with the name of each."""
        self._device = device
        self._clock = clock
        self._timer: _Timer = _EventTimer() if device.type == "cuda" else _HostTimer(clock)
        self._name: str | None = None
        self._started: float | None = None
        self._paused = 0.0
        self._is_paused = False
        self._steps = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to ``name``, one of ``PHASES``; of nested phases only the inner one is charged."""
        assert name in PHASES, name
        if self._is_paused:
            # evaluation runs the same code as training
            yield
            return
        self._start()
        outer = self._switch(name)
        try:
            with contextlib.nullcontext() if self.beside is None else self.beside(name):
                yield
        finally:
            self._switch(outer)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside out of every figure: evaluation, saving. Waits for the device before and after."""
        assert not self._is_paused, "pause() within pause()"
        self._start()
        self._wait()
        began, outer = self._clock(), self._switch(None)
        self._is_paused = True
        try:
            yield
        finally:
            self._wait()
            self._is_paused = False
            self._paused += self._clock() - began
            self._switch(outer)

    def step(self, tokens: int | None = None) -> dict[str, Any]:
        """Close a step of ``tokens`` global real tokens (default ``tokens_per_step``) and return its figures.

        Keys: ``tokens`` (cumulative over the whole run), ``tokens_per_second``, ``tokens_per_second_per_device``,
        ``mfu`` (``None`` if unknown), ``step_seconds``, ``step_split`` (seconds by phase and ``other``, the rest of
        ``step_seconds``), ``paused_seconds`` (left out of the above), ``steady`` (False for the first step of a
        process, which compiles and warms up: the median in ``summary.json`` leaves it out).
        """
        assert self._started is not None, "step() without any phase before it"
        now, step_tokens = self._clock(), self.tokens_per_step if tokens is None else tokens
        self._switch(self._name)
        seconds, paused = max(now - self._started - self._paused, 1e-9), self._paused
        split = {name: self._timer.take(name) for name in PHASES}
        self._timer.take(None)
        split["other"] = max(seconds - sum(split.values()), 0.0)
        self._started, self._paused = now, 0.0
        self._steps += 1
        self.tokens += step_tokens
        rate = step_tokens / seconds
        return {
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.world_size,
            "mfu": mfu.utilisation(rate / self.world_size, self.flops_per_token, self.peak),
            "step_seconds": seconds,
            "step_split": split,
            "paused_seconds": paused,
            "steady": self._steps > 1,
        }

    def _start(self) -> None:
        """The first interval begins with the first phase, not when the meter is built."""
        if self._started is None:
            self._started = self._clock()
            self._switch(None)

    def _switch(self, name: str | None) -> str | None:
        self._timer.mark(name)
        outer, self._name = self._name, name
        return outer

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Timer(Protocol):
    def mark(self, name: str | None) -> None:
        """From here on time belongs to ``name``."""

    def take(self, name: str | None) -> float:
        """Seconds that have been charged to ``name`` since it was last taken."""


class _HostTimer:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str | None, float] = {}
        self._name: str | None = None
        self._since: float | None = None

    def mark(self, name: str | None) -> None:
        now = self._clock()
        if self._since is not None:
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def take(self, name: str | None) -> float:
        return self._seconds.pop(name, 0.0)


class _EventTimer:
    """Marks are events on the current stream; a segment counts once the event that ends it has passed."""

    def __init__(self, build_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        self._build_event = build_event
        self._seconds: dict[str | None, float] = {}
        self._marks: list[tuple[str | None, Any]] = []
        self._spare: list[Any] = []

    def mark(self, name: str | None) -> None:
        event = self._spare.pop() if self._spare else self._build_event()
        event.record()
        self._marks.append((name, event))

    def take(self, name: str | None) -> float:
        self._settle()
        return self._seconds.pop(name, 0.0)

    def _settle(self) -> None:
        passed = 0
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if not end.query():
                break
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
            passed += 1
        self._spare += [event for _, event in self._marks[:passed]]
        del self._marks[:passed]
