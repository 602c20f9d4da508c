"""What the chunked loss saves and costs: peak memory and time of head and loss, forward and backward.

    OMP_NUM_THREADS=1 python -m bench.loss_memory
    python -m bench.loss_memory --tokens 8192 --repeats 5 --shapes 4096x128256 --dtype bfloat16

Compared are a linear layer followed by ``cross_entropy`` (the baseline, whole logits), the loss of ``models.loss``,
and torch's own chunked ``linear_cross_entropy`` where this torch has it. Times are medians of interleaved repeats,
stated as ratios to the baseline of the same run. Peak memory is what exists at once beyond inputs and weight, gradients
included: by the allocator on CUDA; on CPU by the resident memory of a process that does nothing else (Linux, glibc),
since torch's memory tracker does not see inside its own chunked operator.
"""

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.machine import write_result
from models.loss import summed_cross_entropy

SHAPES = ("256x4096", "512x32000", "768x50257")
MEBIBYTE = 2**20


def build_contestants(chunk: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Name -> sum of cross entropies of hidden (N, D), weight (V, D), labels (N,)."""
    contestants: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "linear + cross_entropy": lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y, reduction="sum"),
        f"models.loss, {chunk} tokens": lambda h, w, y: summed_cross_entropy(h, w, y, chunk),
        f"models.loss, {chunk // 4} tokens": lambda h, w, y: summed_cross_entropy(h, w, y, chunk // 4),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
        contestants[f"torch, {chunk} tokens"] = lambda h, w, y: F.linear_cross_entropy(
            h, w, y, reduction="sum", options=options
        )
    return contestants


def measure_peak(run: Callable[[], None], clear: Callable[[], None], device: torch.device) -> int:
    """Most bytes that ``run`` holds at once beyond what is left after ``clear``."""
    clear()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_resident_peak, args=(run, clear, sender))
    child.start()
    peak: int = receiver.recv()
    child.join()
    return peak


def _send_resident_peak(run: Callable[[], None], clear: Callable[[], None], sender: Connection) -> None:
    # the first run is not measured: it brings in code and scratch memory. what it freed goes back to the system
    run()
    clear()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # 5 sets the high-water mark back to the present size
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    run()
    sender.send(_status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure_times(runs: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each run; repeats are interleaved, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            # the first round warms up
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare(
    shape: str, tokens: int, chunk: int, repeats: int, dtype: torch.dtype, device: torch.device
) -> tuple[Table, dict[str, dict[str, float]]]:
    """Every contestant at one shape ``<dim>x<vocabulary>``: the table, and peak bytes and seconds by name."""
    dim, vocab = (int(part) for part in shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=generator) * dim**-0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)

    def clear() -> None:
        hidden.grad = weight.grad = None

    def forward_backward(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        clear()
        (loss(hidden, weight, labels) / tokens).backward()

    runs = {
        name: lambda loss=loss: forward_backward(loss)  # type: ignore[misc]
        for name, loss in build_contestants(chunk).items()
    }
    seconds = measure_times(runs, repeats, device)
    peaks = {name: measure_peak(run, clear, device) for name, run in runs.items()}
    title = f"{tokens} tokens, width {dim}, vocabulary {vocab}, {str(dtype).removeprefix('torch.')}, {device.type}"
    table = Table(title=title, title_justify="left")
    for column in ("", "peak MiB", "saved MiB", "peak ratio", "seconds", "time ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    baseline = next(iter(runs))
    for name in runs:
        table.add_row(
            name,
            f"{peaks[name] / MEBIBYTE:.0f}",
            f"{(peaks[baseline] - peaks[name]) / MEBIBYTE:.0f}",
            f"{peaks[name] / peaks[baseline]:.2f}",
            f"{seconds[name]:.3f}",
            f"{seconds[name] / seconds[baseline]:.2f}",
        )
    return table, {name: {"peak_bytes": peaks[name], "seconds": seconds[name]} for name in runs}


def main() -> None:
    """Print one table per shape, write ``bench/results/loss_memory.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a microbatch")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits are held (train.loss_chunk)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each contestant")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="<dim>x<vocabulary> ...")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    console = Console(width=100)
    dtype = getattr(torch, arguments.dtype)
    results = {}
    for shape in arguments.shapes:
        table, results[shape] = compare(shape, arguments.tokens, arguments.chunk, arguments.repeats, dtype, device)
        console.print(table)
    setting = {"tokens": arguments.tokens, "dtype": arguments.dtype, "device": device.type, "threads": 1}
    write_result("loss_memory", {**setting, "shapes": results})


if __name__ == "__main__":
    main()
