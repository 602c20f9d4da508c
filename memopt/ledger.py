"""The memory of one training step: bytes by owner, those that stay between steps and those at the highest moment.

Two meters measure a step. ``TrackerMeter`` follows every tensor (``memopt.tracker``): exact, on any device, and it
slows the step it watches. ``AllocatorMeter`` reads CUDA's allocator: free, it sees all that is allocated but not for
whom. ``measure`` on CUDA takes both: what the allocator has handed out beyond the tracked tensors is ``other``.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memopt.tracker import MemoryTracker
from memopt.tracker_record import OWNERS, Moment

CUDA_BLOCK = 512
"""Bytes in whose multiples CUDA's caching allocator hands memory out."""


@dataclass(frozen=True)
class Ledger:
    """Bytes of one rank in one step; ``persistent`` and ``peak`` have all of ``OWNERS``."""

    step: int
    persistent: dict[str, int]
    """Held when the step was over."""
    peak: dict[str, int]
    """Held at the moment of most bytes."""
    phase: str | None
    """The phase of that moment."""
    timeline: list[Moment] = field(default_factory=list)
    """The step as it went, for a plot."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of all owners at the highest moment."""
        return sum(self.peak.values())

    def record(self) -> dict[str, dict[str, int]]:
        """Owner -> ``persistent`` and ``peak`` bytes, and their ``total``."""
        owners = {owner: {"persistent": self.persistent[owner], "peak": self.peak[owner]} for owner in OWNERS}
        total = {"persistent": sum(self.persistent.values()), "peak": self.peak_bytes}
        return {**owners, "total": total}


class TrackerMeter:
    """Measures steps of one model and optimizer by following every tensor.

    Args:
        device: where they are.
        parameters: all parameters of the model, and its buffers, as they are at the time of the call.
        state: all tensors that the optimizer holds, likewise: its first step may replace them.
        loss: the module whose forward makes the loss.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Callable[[], Iterable[Tensor]],
        state: Callable[[], Iterable[Tensor]],
        loss: nn.Module,
    ) -> None:
        self._device, self._parameters, self._state, self._loss = device, parameters, state, loss
        self.ledgers: dict[Hashable, Ledger] = {}
        """Of the last measured step of each kind."""

    def of(self, kind: Hashable) -> Ledger | None:
        """The ledger of ``kind``, of the kind that was measured last if there is none, None before any."""
        return self.ledgers.get(kind, next(reversed(self.ledgers.values()), None))

    @contextmanager
    def measure(self, step: int, kind: Hashable) -> Iterator[MemoryTracker]:
        """Watch the step ``step``, which runs within the block; it is the one in ``ledgers`` of its ``kind`` then.

        ``kind`` tells steps of different need apart (the candidate of ``memopt.microbatch``). Yields the tracker,
        whose ``phase`` the step must enter.
        """
        on_cuda = self._device.type == "cuda"
        tracker = MemoryTracker(self._device.type, block=CUDA_BLOCK if on_cuda else 1)
        with tracker:
            tracker.own("parameters", self._parameters())
            tracker.own("optimizer_state", self._state())
            tracker.mark_loss(self._loss)
            tracker.set_step(step)
            tracker.forget_peaks()
            yield tracker
            # what an optimizer has replaced
            tracker.own("optimizer_state", self._state())
            end, peak, line = tracker.current, tracker.peak, tracker.timeline
        persistent, highest = dict(end.owners), dict(peak.owners)
        if on_cuda:
            unseen = torch.cuda.memory_allocated(self._device) - sum(persistent.values())
            persistent["other"] += max(0, unseen)
            highest["other"] += max(0, torch.cuda.max_memory_allocated(self._device) - sum(highest.values()))
        self.ledgers[kind] = Ledger(step, persistent, highest, peak.phase, line)


class AllocatorMeter:
    """CUDA's allocator over one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0

    def begin(self) -> None:
        """A step begins."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)

    def end(self) -> tuple[int, int, int]:
        """Of the step since ``begin``: highest allocated bytes, highest reserved bytes, allocations retried."""
        retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0) - self._retries
        allocated = torch.cuda.max_memory_allocated(self._device)
        return allocated, torch.cuda.max_memory_reserved(self._device), retries


def foreign_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are in use and not by this process's allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def can_reserve(device: torch.device, size: int) -> bool:
    """Whether ``size`` more bytes can be had at this moment; they are given back."""
    try:
        room = torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    del room
    return True
