"""Held-out loss of Gefen against AdamW, each at its best learning rate: ``python -m bench.quality``.

Runs ``train.py`` for every (model, arm, learning rate, seed) of the plan, one thread each, into ``outputs/quality``;
what is there already is not run again, so that the table can be made in several sittings (``--jobs 2`` takes two
cores, ``--only llama.*gefen`` some of the runs, ``--table`` none). The plan: every arm over one bracket of learning
rates with seed 0, then the two main arms with more seeds at their best rate. Results: ``bench/results/quality.json``.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import write_result

FOLDER = Path("outputs/quality")
STEPS = 400
# the same for every arm, wide enough that the best is inside
BRACKETS = {"llama": ("1e-3", "2e-3", "4e-3"), "gpt2": ("1e-3", "2e-3", "4e-3", "8e-3")}
SEEDS = (0, 1, 2)
# held-out loss that the default may be worse than AdamW, each at its best
MARGIN = 0.02
MODELS = {
    "llama": ["experiment=quality"],
    "gpt2": [
        "model=gpt2_debug", f"train.steps={STEPS}", "train.seq_len=256", "train.global_batch=16",
        "train.eval_interval=100", "train.eval_tokens=65536", "schedule.warmup=50",
    ],
}  # fmt: skip
ARMS = {
    "adamw": ["optimizer=adamw"],
    "gefen": ["optimizer=gefen"],
    "gefen-paper": ["optimizer=gefen_paper"],
    "gefen-block": ["optimizer=gefen", "optimizer.second_moment=block"],
    "gefen-fp32": ["optimizer=gefen", "optimizer.momentum=fp32"],
}
MAIN_ARMS = ("adamw", "gefen")
# arms that show what one choice costs, at one learning rate each
ABLATIONS = {"llama": "2e-3"}
COMMON = [
    "log.wandb.mode=disabled", "checkpoint.interval=0", "run.sample_tokens=0", "microbatch=8", "run.device=cpu",
]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One run of the table."""

    model: str
    arm: str
    lr: str
    seed: int

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return FOLDER / f"{self.model}-{self.arm}-{self.lr}-seed{self.seed}"

    def losses(self) -> dict[int, float] | None:
        """Step -> held-out loss; None if the run is not done."""
        try:
            if json.loads((self.folder / "summary.json").read_text())["status"] != "done":
                return None
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return None
        records = map(json.loads, lines)
        return {record["step"]: record["val_loss"] for record in records if record.get("val_loss") is not None}

    def run(self) -> None:
        """Run it, with one thread."""
        own = [f"optimizer.lr={self.lr}", f"train.seed={self.seed}", f"run.dir={self.folder}"]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.folder.name}.log").open("w") as log:
            command = [sys.executable, "train.py", *MODELS[self.model], *COMMON, *ARMS[self.arm], *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


def bracket_trials() -> list[Trial]:
    """The runs of seed 0."""
    brackets = [Trial(model, arm, lr, 0) for model in MODELS for arm in MAIN_ARMS for lr in BRACKETS[model]]
    others = [Trial(model, arm, lr, 0) for model, lr in ABLATIONS.items() for arm in ARMS if arm not in MAIN_ARMS]
    return brackets + others


def seed_trials() -> list[Trial]:
    """The runs of the other seeds, at the rate that was best with seed 0; those that are known by now."""
    best = [(model, arm, best_lr(model, arm)) for model in MODELS for arm in MAIN_ARMS]
    return [Trial(model, arm, lr, seed) for model, arm, lr in best if lr for seed in SEEDS if seed]


def best_lr(model: str, arm: str) -> str | None:
    """The rate of the bracket with the lowest last held-out loss; None while one is missing.

    Raises ``SystemExit`` if it is at an end of the bracket, which must then be widened.
    """
    bracket = BRACKETS[model]
    found = {lr: Trial(model, arm, lr, 0).losses() for lr in bracket}
    if any(losses is None for losses in found.values()):
        return None
    best = min(found, key=lambda lr: found[lr][STEPS])  # type: ignore[index]
    if best in (bracket[0], bracket[-1]):
        raise SystemExit(f"the best rate of {arm} on {model} is {best}, an end of the bracket {bracket}: widen it")
    return best


def summarise() -> dict[str, Any]:
    """Losses of all finished runs, and mean and spread over seeds of the main arms."""
    runs = []
    for trial in dict.fromkeys(bracket_trials() + seed_trials()):
        if losses := trial.losses():
            runs.append({"model": trial.model, "arm": trial.arm, "lr": trial.lr, "seed": trial.seed, "val": losses})
    verdicts = {}
    for model in MODELS:
        means = {}
        for arm in MAIN_ARMS:
            lr = best_lr(model, arm)
            last = [run["val"][STEPS] for run in runs if (run["model"], run["arm"], run["lr"]) == (model, arm, lr)]
            if len(last) == len(SEEDS):
                means[arm] = {"lr": lr, "mean": statistics.mean(last), "stdev": statistics.stdev(last), "seeds": last}
        difference = means["gefen"]["mean"] - means["adamw"]["mean"] if len(means) == len(MAIN_ARMS) else None
        verdicts[model] = {**means, "difference": difference, "margin": MARGIN}
    return {"runs": runs, "verdicts": verdicts}


def main() -> None:
    """Run what is missing, print the table, write ``bench/results/quality.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", default="", help="regular expression on the run's folder name")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    for plan in (bracket_trials, seed_trials):
        if not arguments.table:
            open_trials = [trial for trial in plan() if trial.losses() is None]
            chosen = [trial for trial in open_trials if re.search(arguments.only, trial.folder.name)]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                list(pool.map(Trial.run, chosen))
    result = summarise()
    table = Table("model", "arm", "lr", "seed", *[f"step {step}" for step in range(100, STEPS + 1, 100)])
    for run in result["runs"]:
        last = [f"{run['val'][step]:.3f}" for step in range(100, STEPS + 1, 100)]
        table.add_row(run["model"], run["arm"], run["lr"], str(run["seed"]), *last)
    console = Console()
    console.print(table)
    for model, verdict in result["verdicts"].items():
        console.print(model, verdict)
    console.print(f"written to {write_result('quality', result)}")


if __name__ == "__main__":
    main()
