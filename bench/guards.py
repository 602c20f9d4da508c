"""What the guards of a run cost in steady state, as a share of a training step: ``python -m bench.guards``.

Two gloo processes, one thread each. What a guard does in a step is timed alone, many times over, since 1 % of a step
is less than steps differ by; the step is that of ``train.py`` with llama3_debug in the same minute. Counted are: the
hang watch around the step, the judgement of loss and gradient with a full window of losses, the word in the step's sum
that says whether a signal has come, the comparison of the ranks (every ``log.interval`` steps), the vote after a save
(every ``checkpoint.interval``), and the two threads that look at the store and at the clock. Wanted: <= 1 %.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

from bench.machine import write_result
from conf.schema import CheckpointConfig, HealthConfig, LogConfig, TrainConfig
from dist import agree, signals
from dist.bad_steps import WINDOW, BadSteps
from dist.reduce import global_sums
from dist.skew import measure_skew
from dist.watch import LOOKS_PER_SECOND, HangWatch

LIMIT = 0.01
RANKS, TIMES, ROUNDS, STEPS = 2, 200, 9, 30


def seconds_each(act: Callable[[], Any], times: int = TIMES) -> float:
    """Seconds of one call: the median of several rounds of many."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(times):
            act()
        rounds.append((time.perf_counter() - began) / times)
    return statistics.median(rounds)


def time_guards(rank: int, scratch: str) -> None:
    """One rank: seconds of each guard in a step; rank 0 writes them to ``scratch``."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{scratch}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    watch = HangWatch(HealthConfig(), Path(scratch), on_hang=lambda error: None)
    judge = BadSteps(TrainConfig(spike="rollback"), [3.0 + number % 7 / 10 for number in range(WINDOW)])
    value = torch.zeros(())

    def watched() -> None:
        with watch.step(1):
            pass

    def asked() -> torch.Tensor:
        return value.new_tensor(float(signals.requested()))

    looked = torch.distributed.distributed_c10d._get_default_store()
    skew = seconds_each(lambda: measure_skew(torch.device("cpu"), 0.0), 20)
    vote = seconds_each(lambda: agree.any_rank(signals.requested()))
    with_word = seconds_each(lambda: global_sums(value, value, value, asked()))
    without = seconds_each(lambda: global_sums(value, value, value))
    found = {
        "hang watch": seconds_each(watched),
        "judgement": seconds_each(lambda: judge.judge(3.3, 1.0)),
        "signals": max(with_word - without, 0.0),
        "comparison of the ranks": skew / LogConfig().interval,
        "vote after a save": vote / CheckpointConfig().interval,
        # shares of a second, not of a step
        "threads": seconds_each(lambda: looked.check(["nothing"])) + LOOKS_PER_SECOND * seconds_each(time.monotonic),
    }
    watch.close()
    if rank == 0:
        (Path(scratch) / "found.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def step_seconds(folder: str) -> float:
    """Median seconds of a steady step of ``train.py`` with llama3_debug on the same number of processes."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", "train.py",
        f"train.steps={STEPS}", "train.eval_interval=0", "train.eval_tokens=1000", "checkpoint.interval=0",
        "run.sample_tokens=0", "run.device=cpu", "log.wandb.mode=disabled", f"run.dir={folder}/run",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_seconds"] for record in records if record["steady"])


def main() -> int:
    """Print the table and write ``bench/results/guards.json``; 1 where the limit is missed."""
    with tempfile.TemporaryDirectory() as scratch:
        step = step_seconds(scratch)
        torch.multiprocessing.start_processes(time_guards, (scratch,), RANKS, start_method="spawn")
        found = json.loads((Path(scratch) / "found.json").read_text())
    found["threads"] *= step
    total = sum(found.values())
    table = Table("guard", "microseconds a step", "share", title=f"step of llama3_debug: {step:.3f} s")
    for name, seconds in [*found.items(), ("all", total)]:
        table.add_row(name, f"{seconds * 1e6:.1f}", f"{seconds / step:.4%}")
    Console().print(table)
    result = {"step_seconds": step, "seconds": found, "share": total / step, "limit": LIMIT}
    print(f"written to {write_result('guards', result)}")
    return int(total / step > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
