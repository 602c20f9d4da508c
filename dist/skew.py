"""Which rank is slow: ranks wait for each other within a step, so that its time is the same on all and tells nothing.

What can be compared is what no collective is part of: a piece of work of fixed size, and the wait for data.
"""

import itertools
import statistics
import time
from typing import Any

import torch

from dist import agree

TRIES = 3
# of a rank's device, in well under a millisecond on a GPU and about a millisecond on a CPU
CUDA_WIDTH = 2048
CPU_LOOPS = 50_000


def measure_skew(device: torch.device, data_wait_seconds: float) -> dict[str, Any]:
    """Compare the ranks; collective.

    Keys: ``slowest_rank`` and ``slowdown``, its time for the piece of work over the median of all ranks;
    ``data_rank`` and ``data_wait_seconds``, the longest wait for the last batch.
    """
    ranks = agree.gather((fixed_work_seconds(device), data_wait_seconds))
    work, waits = zip(*ranks, strict=True)
    slowest, waiting = work.index(max(work)), waits.index(max(waits))
    return {
        "slowest_rank": slowest,
        "slowdown": work[slowest] / statistics.median(work),
        "data_rank": waiting,
        "data_wait_seconds": waits[waiting],
    }


def fixed_work_seconds(device: torch.device) -> float:
    """Seconds for the same work everywhere, the best of a few: a product of two bf16 matrices on a GPU, a loop of the
    interpreter on a CPU."""
    if device.type != "cuda":
        return min(_timed_loop() for _ in range(TRIES))
    matrix = torch.ones(CUDA_WIDTH, CUDA_WIDTH, dtype=torch.bfloat16, device=device)
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(TRIES + 1)]  # type: ignore[no-untyped-call]
    for event in events:
        # what is before the first one is warm-up
        matrix.mm(matrix)
        event.record()
    events[-1].synchronize()
    milliseconds: float = min(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return milliseconds / 1000


def _timed_loop() -> float:
    began = time.perf_counter()
    for _ in range(CPU_LOOPS):
        pass
    return time.perf_counter() - began
