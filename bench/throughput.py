"""What the trainer costs over a bare loop, and how soon it starts: ``python -m bench.throughput``.

The same 20 M parameter model, batch and fused AdamW, steps alternating in one process: ours is ``train.train_step`` and
the observer's records; the bare loop is forward, backward, clip and step on a batch that is already there, once with
the model's own chunked loss and once with whole logits and torch's cross entropy. Medians; threads pinned.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import train
from bench.machine import write_result
from conf import compose
from dist.group import process_group
from dist.run_folder import agree_run_folder

STEPS = 25
WARM_UP = 3
TARGET = 0.97
SETTINGS = [
    "model=llama3_20m", "train.seq_len=256", "train.global_batch=8", "microbatch=8", "train.steps=1000",
    "train.eval_interval=0", "checkpoint.interval=0", "run.device=cpu", "log.interval=10",
]  # fmt: skip


class BareLoop:
    """Forward, backward, clip, step. ``chunked`` takes the model's own loss, otherwise whole logits."""

    def __init__(self, config, batch, chunked: bool) -> None:
        self.model = train.build_sharded_model(config, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.tokens, self.labels = batch
        self.chunked = chunked

    def step(self) -> None:
        if self.chunked:
            loss = self.model(self.tokens, self.labels) / self.labels.numel()
        else:
            loss = F.cross_entropy(self.model(self.tokens).flatten(0, 1), self.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()


def measure(folder: str) -> dict[str, float]:
    """Median seconds per step of each arm."""
    config = compose.load_config([*SETTINGS, f"run.dir={folder}"])
    with process_group(torch.device("cpu"), 60):
        run_folder = agree_run_folder(config, compose.to_yaml(config))
        run = train.build_run(config, train.open_run_data(config), run_folder, torch.device("cpu"))
        batch = next(run.loader)
        bare, whole = (BareLoop(config, (batch.tokens, batch.labels), chunked) for chunked in (True, False))
        arms = {
            "train.py": lambda: run.observer.step(train.train_step(run)),
            "bare loop": bare.step,
            "bare loop, whole logits": whole.step,
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(WARM_UP + STEPS):
            for name, step in arms.items():
                start = time.perf_counter()
                step()
                if number >= WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
        run.loader.close()
        run.observer.close()
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_command(arguments: list[str], until: str | None = None) -> float:
    """Seconds until the command ends or, with ``until``, prints a line that begins with it."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if until is not None and line.startswith(until):
            break
    else:
        assert until is None, f"{arguments} never printed {until!r}"
    seconds = time.perf_counter() - start
    process.terminate()
    process.wait()
    return seconds


def main() -> None:
    """Print the table, write ``bench/results/throughput.json``."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(f"{folder}/run")
        quick = ["train.steps=2", "train.eval_tokens=1000", "run.sample_tokens=0", "run.device=cpu"]
        starts = {
            "first step": [time_command([*quick, f"run.dir={folder}/{n}"], until="step 1 ") for n in range(3)],
            "--help": [time_command(["--help"]) for _ in range(3)],
            "configuration error": [time_command(["train.stepz=1"]) for _ in range(3)],
        }
    table = Table("arm", "seconds per step", "tokens/s of ours over its")
    for name, seconds in steps.items():
        table.add_row(name, f"{seconds:.4f}", f"{seconds / steps['train.py']:.3f}")
    begin = Table("from start to", "seconds (median of 3)", "limit")
    limits = {"first step": 25, "--help": 3, "configuration error": 3}
    for name, values in starts.items():
        begin.add_row(name, f"{statistics.median(values):.2f}", str(limits[name]))
    console = Console()
    console.print(table, begin)
    content = {
        "seconds_per_step": steps,
        "ratio": steps["bare loop"] / steps["train.py"],
        "target": TARGET,
        "threads": torch.get_num_threads(),
        "start_seconds": {name: statistics.median(values) for name, values in starts.items()},
    }
    console.print(f"written to {write_result('throughput', content).relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
