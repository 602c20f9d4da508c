"""What a step of Gefen costs beside fused AdamW and beside the package of its authors: ``python -m bench.gefen_step``.

The parameters of llama3_60m, real size, the same gradients for all; everything that ``step`` does counts (the pass for
the column sums, vectors, counters). The first step, which learns the codebook and touches fresh memory, is shown apart;
compiling is part of ``init_state`` before it. Contestants run in turn, one after the other, and a ratio is the median
over rounds of two times of one round. Each number of threads has a process of its own, bound to as many cores. The
package (``gefen`` on PyPI) has no fused path on the CPU; it is called through its public interface, in fewer rounds.

Bytes moved count every tensor once for each time it is read or written. Bandwidth is measured by what AdamW reaches in
the same rounds, and by a copy; a copy's target is read as well before it is written, which its count leaves out.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.machine import write_result
from conf.compose import load_config
from memopt.gefen import Gefen
from models.build import build_model
from models.names import named_parameters

WARM_UP = 3
NUMBERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ADAMW, BLOCK, FACTORED, PACKAGE = "AdamW, fused", "Gefen, block", "Gefen, factored", "package gefen"
# wanted: time over that of fused AdamW, and over that of the package
TARGETS = {BLOCK: 1.0, FACTORED: 1.25}
PACKAGE_TARGET = 1 / 20
# read and written for each entry of a matrix: parameter, gradient, codes; the gradient twice with column sums
BYTES = {ADAMW: 28, BLOCK: 14, FACTORED: 18}


def draw_parameters(model: str) -> dict[str, Tensor]:
    """Name -> values of the model's parameters, fp32."""
    parameters = named_parameters(build_model(load_config([f"model={model}"]).model, 256, "cpu"))
    generator = torch.Generator().manual_seed(0)
    return {name: 0.02 * torch.randn(value.shape, generator=generator) for name, value in parameters.items()}


def build_contestants(model: str, package: bool) -> dict[str, Callable[[], Any]]:
    """Name -> one step on parameters of its own, with gradients that all share."""
    values = draw_parameters(model)
    generator = torch.Generator().manual_seed(1)
    grads = {name: 1e-3 * torch.randn(value.shape, generator=generator) for name, value in values.items()}

    def copies() -> list[tuple[str, torch.nn.Parameter]]:
        named = [(name, torch.nn.Parameter(value.clone())) for name, value in values.items()]
        for name, parameter in named:
            parameter.grad = grads[name]
        return named

    contestants: dict[str, Callable[[], Any]] = {
        ADAMW: torch.optim.AdamW([parameter for _, parameter in copies()], fused=True, **NUMBERS).step
    }
    for name, second_moment in ((BLOCK, "block"), (FACTORED, "factored")):
        optimizer = Gefen(copies(), second_moment=second_moment, drift_interval=0, **NUMBERS)
        optimizer.init_state()
        contestants[name] = optimizer.step
    flat = torch.cat([value.flatten() for value in values.values()])
    target = torch.empty_like(flat)
    contestants["copy"] = lambda: target.copy_(flat)
    if package:
        import gefen

        # it prints what it does
        with contextlib.redirect_stdout(io.StringIO()):
            contestants[PACKAGE] = gefen.Gefen(copies(), fused=False, **NUMBERS).step
    return contestants


def time_rounds(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of each contestant, in turn; the first ``WARM_UP`` are not part of a comparison."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(WARM_UP + rounds):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(threads: int, model: str, rounds: int, package_rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, ratios and bandwidths of each contestant on so many threads and cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    entries = sum(value.numel() for value in draw_parameters(model).values())
    contestants = build_contestants(model, package_rounds > 0)
    slow = {PACKAGE: contestants.pop(PACKAGE)} if package_rounds else {}
    every = time_rounds(contestants, rounds)
    seconds = {name: times[WARM_UP:] for name, times in every.items()}
    results: dict[str, dict[str, float]] = {}
    for name, times in seconds.items():
        results[name] = {"seconds": statistics.median(times), "fastest": min(times)}
        results[name]["first"] = every[name][0]
        results[name]["gigabytes_per_second"] = BYTES.get(name, 8) * entries / statistics.median(times) / 1e9
        results[name]["over_adamw"] = statistics.median(a / b for a, b in zip(times, seconds[ADAMW], strict=True))
    for name, step in slow.items():
        both = time_rounds({name: step, FACTORED: contestants[FACTORED]}, package_rounds)
        both = {each: times[WARM_UP:] for each, times in both.items()}
        results[name] = {"seconds": statistics.median(both[name]), "fastest": min(both[name])}
        results[name]["over_adamw"] = results[name]["seconds"] / results[ADAMW]["seconds"]
        for ours in (BLOCK, FACTORED):
            results[ours]["over_package"] = results[ours]["seconds"] / results[name]["seconds"]
    fastest = max(results[name]["gigabytes_per_second"] for name in (ADAMW, "copy"))
    for name in seconds:
        results[name]["share_of_bandwidth"] = results[name]["gigabytes_per_second"] / fastest
    return results


def tabulate(threads: int, results: dict[str, dict[str, float]]) -> Table:
    columns = {
        "ms": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "fastest": lambda row: f"{row['fastest'] * 1e3:.1f}",
        "first": lambda row: f"{row['first'] * 1e3:.1f}" if "first" in row else "",
        "over AdamW": lambda row: f"{row['over_adamw']:.2f}",
        "over package": lambda row: f"{row['over_package']:.4f}" if "over_package" in row else "",
        "GB/s": lambda row: f"{row['gigabytes_per_second']:.1f}" if "gigabytes_per_second" in row else "",
        "of bandwidth": lambda row: f"{row['share_of_bandwidth']:.2f}" if "share_of_bandwidth" in row else "",
    }
    table = Table("", "bytes/param", *columns, title=f"{threads} thread{'s' * (threads > 1)}", title_justify="left")
    for name, row in results.items():
        table.add_row(name, str(BYTES.get(name, "")), *[write(row) for write in columns.values()])
    return table


def main() -> None:
    """Print a table for each number of threads, write ``bench/results/gefen_step.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="llama3_60m")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds of all but the package")
    parser.add_argument("--package-rounds", type=int, default=3, help="timed rounds of the package; 0 leaves it out")
    arguments = parser.parse_args()
    console = Console(width=110)
    found = {}
    for threads in arguments.threads:
        # a pool starts its threads once, and they keep the cores that they are bound to
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            setting = (threads, arguments.model, arguments.rounds, arguments.package_rounds)
            found[str(threads)] = pool.apply(measure, setting)
        console.print(tabulate(threads, found[str(threads)]))
    targets = {"over_adamw": TARGETS, "over_package": PACKAGE_TARGET}
    content = {"model": arguments.model, "bytes_per_parameter": BYTES, "threads": found, "targets": targets}
    console.print(f"written to {write_result('gefen_step', content)}")


if __name__ == "__main__":
    main()
