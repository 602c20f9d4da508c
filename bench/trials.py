"""Training runs that are compared by their held-out loss: what one is, running those that are missing, tables.

A run is ``train.py`` with one thread; it is kept in ``outputs/quality`` and not run again, so that a table can be made
in several sittings. Runs that the committed results hold count as done where their folder is missing (``recall``).
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.machine import RESULTS

FOLDER = Path("outputs/quality")
STEPS = {"llama": 400, "gpt2": 400, "small": 200, "double": 800, "long": 1400}
MODELS = {
    "llama": ["experiment=quality"],
    "gpt2": [
        "model=gpt2_debug", "train.steps=400", "train.seq_len=256", "train.global_batch=16",
        "train.eval_interval=100", "train.eval_tokens=65536", "schedule.warmup=50",
    ],
    # for choosing among many: half the width, depth and context, and half the steps
    "small": [
        "experiment=quality", "model.dim=128", "model.layers=2", "model.hidden=352", "train.steps=200",
        "train.seq_len=128", "train.eval_interval=50", "train.eval_tokens=32768", "schedule.warmup=25",
    ],
    "double": ["experiment=quality", "train.steps=800", "train.eval_interval=100"],
    "long": ["experiment=quality", "train.steps=1400", "train.eval_interval=100"],
}  # fmt: skip
COMMON = [
    "log.wandb.mode=disabled", "checkpoint.interval=0", "run.sample_tokens=0", "microbatch=8", "run.device=cpu",
]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One run of a table."""

    model: str
    arm: str
    settings: tuple[str, ...]
    """Overrides that make the arm."""
    lr: str
    seed: int
    program: tuple[str, ...] = ("train.py",)
    """What Python is given to run."""

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return FOLDER / f"{self.model}-{self.arm}-{self.lr}-seed{self.seed}"

    def losses(self) -> dict[int, float] | None:
        """Step -> held-out loss; None if the run is not done."""
        return self._read() or _recalled.get((self.model, self.arm, self.lr, self.seed))

    def _read(self) -> dict[int, float] | None:
        try:
            if json.loads((self.folder / "summary.json").read_text())["status"] != "done":
                return None
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return None
        records = map(json.loads, lines)
        return {record["step"]: record["val_loss"] for record in records if record.get("val_loss") is not None}

    def last(self) -> float | None:
        """The held-out loss at the end; None if the run is not done."""
        losses = self.losses()
        return losses[STEPS[self.model]] if losses else None

    def run(self) -> None:
        """Run it, with one thread."""
        own = [f"optimizer.lr={self.lr}", f"train.seed={self.seed}", f"run.dir={self.folder}"]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.folder.name}.log").open("w") as log:
            command = [sys.executable, *self.program, *MODELS[self.model], *COMMON, *self.settings, *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


# losses by model, arm, rate and seed
_recalled: dict[tuple[str, str, str, int], dict[int, float]] = {}


def recall(name: str) -> None:
    """Take the runs of ``bench/results/<name>.json`` as done, unless they are in ``FOLDER`` themselves."""
    path = RESULTS / f"{name}.json"
    for run in json.loads(path.read_text())["runs"] if path.exists() else ():
        losses = {int(step): loss for step, loss in run["val"].items()}
        _recalled[run["model"], run["arm"], run["lr"], run["seed"]] = losses


def run_missing(trials: Iterable[Trial], jobs: int, only: str = "") -> None:
    """Run the trials that are not done and whose name matches ``only``, ``jobs`` at a time."""
    chosen = [t for t in dict.fromkeys(trials) if t.losses() is None and re.search(only, t.folder.name)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(Trial.run, chosen))


def best_lr(trials: Sequence[Trial]) -> str | None:
    """The rate with the lowest last loss, of trials that differ in it alone; None while one is missing.

    Raises ``SystemExit`` if it is at an end of the bracket, which must then be widened.
    """
    found = {trial.lr: trial.last() for trial in trials}
    known = {lr: loss for lr, loss in found.items() if loss is not None}
    if len(known) < len(trials):
        return None
    best = min(known, key=known.__getitem__)
    if len(trials) > 1 and best in (trials[0].lr, trials[-1].lr):
        first = trials[0]
        raise SystemExit(
            f"the best rate of {first.arm} on {first.model} is {best}, an end of the bracket {list(found)}: widen it"
        )
    return best


def over_seeds(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Mean and spread of the last losses of trials that differ in their seed; None while one is missing."""
    last = [loss for trial in trials if (loss := trial.last()) is not None]
    if len(last) < max(2, len(trials)):
        return None
    return {"lr": trials[0].lr, "mean": statistics.mean(last), "stdev": statistics.stdev(last), "seeds": last}


def done(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """The losses of the trials that are done."""
    return [
        {"model": t.model, "arm": t.arm, "lr": t.lr, "seed": t.seed, "val": losses}
        for t in dict.fromkeys(trials)
        if (losses := t.losses())
    ]


def tabulate(runs: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """A row for each run, with its loss at every quarter."""
    table = Table("model", "arm", "lr", "seed", *[f"{k}/4" for k in range(1, 5)], title=title)
    for run in runs:
        steps = STEPS[run["model"]]
        quarters = [f"{run['val'][steps * k // 4]:.3f}" if steps * k // 4 in run["val"] else "" for k in range(1, 5)]
        table.add_row(run["model"], run["arm"], run["lr"], str(run["seed"]), *quarters)
    return table
