"""How long learning a codebook takes: ``python -m bench.codebook``.

One thread, compiled, 256 levels, at the number of cells in use and at four times as many. The counts are of normal
values over the largest of their block. Beside it, on the same counts at the smaller size, runs the plain recurrence of
Algorithm 3 (arXiv 2606.13894), O(n^2 k), compiled in the same way and with the same cost of a cluster; both must find
the same cost. The table shows medians of interleaved repeats.
"""

import argparse
import statistics
import time

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.machine import write_result
from kernels.gefen import CELLS
from memopt.codebook import _spread, optimal_levels, prepare

LEVELS = 256
# cells -> wanted seconds
TARGETS = {CELLS: 0.1, 16383: 0.5}
BLOCK = 768
ENTRIES = 1 << 24


def draw_counts(cells: int) -> Tensor:
    """(cells,) int64: ``ENTRIES`` normal values, each over the largest of its block of ``BLOCK``."""
    half = (cells - 1) // 2
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ENTRIES // BLOCK, BLOCK, generator=generator)
    values /= values.abs().amax(1, keepdim=True)
    return torch.bincount((values * half + (half + 0.5)).long().flatten(), minlength=cells)


def levels_cost(counts: Tensor, levels: Tensor) -> float:
    """Sum of count times squared distance to the nearest level, in squared cells."""
    half = (len(counts) - 1) // 2
    distance = torch.cdist(torch.arange(-half, half + 1.0)[:, None].double(), levels.double()[:, None] * half)
    return float((counts * distance.amin(1).square()).sum())


@numba.njit(nogil=True)
def recurrence_cost(counts: NDArray[np.int64], levels: int) -> float:
    """Least cost, in squared cells, of ``counts`` (n,), all positive; every start of every cluster is tried."""
    n = len(counts)
    half = (n - 1) // 2
    zeroth, first, second = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    best, ends = np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        x = i - half
        zeroth[i + 1] = zeroth[i] + counts[i]
        first[i + 1] = first[i] + counts[i] * x
        second[i + 1] = second[i] + counts[i] * x * x
        best[i + 1] = best[i] + counts[i] * float(x + half) ** 2
    for i in range(n - 1, -1, -1):
        ends[i] = ends[i + 1] + counts[i] * float(half - i + half) ** 2
    for _ in range(levels - 2):
        before = best.copy()
        for j in range(1, n + 1):
            for i in range(j):
                best[j] = min(best[j], before[i] + _spread(zeroth, first, second, i, j))
    return float((best + ends).min())


def main() -> None:
    """Time every case, print the table, write ``bench/results/codebook.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--repeats", type=int, default=20, help="timed repeats of each size")
    parser.add_argument("--recurrence-repeats", type=int, default=3, help="timed repeats of the plain recurrence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    prepare()
    compile_seconds = time.perf_counter() - start
    recurrence_cost(np.ones(7, np.int64), 4)

    # no cell is empty: the most work
    counts = {cells: draw_counts(cells).clamp(min=1) for cells in TARGETS}
    seconds: dict[str, list[float]] = {str(cells): [] for cells in TARGETS} | {"recurrence": []}
    for repeat in range(arguments.repeats):
        for cells in TARGETS:
            start = time.perf_counter()
            optimal_levels(counts[cells], LEVELS, zero=False)
            seconds[str(cells)].append(time.perf_counter() - start)
        if repeat < arguments.recurrence_repeats:
            start = time.perf_counter()
            least = recurrence_cost(counts[CELLS].numpy(), LEVELS)
            seconds["recurrence"].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items() if values}

    table = Table("cells", "levels", "method", "seconds", "wanted")
    for cells, target in TARGETS.items():
        table.add_row(f"{cells}", f"{LEVELS}", "memopt.codebook", f"{medians[str(cells)]:.3f}", f"<= {target}")
    excess = None
    if arguments.recurrence_repeats:
        table.add_row(f"{CELLS}", f"{LEVELS}", "plain recurrence", f"{medians['recurrence']:.3f}", "-")
        # the levels found are rounded to fp32, which moves their cost by far less than 1e-9
        excess = levels_cost(counts[CELLS], optimal_levels(counts[CELLS], LEVELS, zero=False)) / least - 1
        assert abs(excess) < 1e-9, f"cost {excess:+.1e} relative to the recurrence"
    console = Console()
    console.print(table)
    content = {
        "levels": LEVELS,
        "threads": 1,
        "repeats": arguments.repeats,
        "median_seconds": medians,
        "compile_seconds": compile_seconds,
        "wanted_seconds": {str(cells): target for cells, target in TARGETS.items()},
        "relative_excess_cost": excess,
    }
    console.print(f"written to {write_result('codebook', content)}")


if __name__ == "__main__":
    main()
