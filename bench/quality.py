"""Held-out loss of Gefen against AdamW, each at its best learning rate: ``python -m bench.quality``.

The plan: both over one bracket of learning rates with seed 0, then more seeds at each one's best rate, and other forms
of Gefen at one rate. ``--jobs 2`` takes two cores, ``--only llama.*gefen`` some of the runs, ``--table`` none. Results:
``bench/results/quality.json``.
"""

import argparse
from typing import Any

from rich.console import Console

from bench.machine import write_result
from bench.trials import Trial, best_lr, done, over_seeds, recall, run_missing, tabulate

# the same for both arms, wide enough that the best is inside
BRACKETS = {"llama": ("1e-3", "2e-3", "4e-3"), "gpt2": ("1e-3", "2e-3", "4e-3", "8e-3")}
SEEDS = (0, 1, 2)
# held-out loss that the default may be worse than AdamW, each at its best
MARGIN = 0.02
ARMS = {
    "adamw": ("optimizer=adamw",),
    "gefen": ("optimizer=gefen",),
    "gefen-paper": ("optimizer=gefen_paper",),
    "gefen-block": ("optimizer=gefen", "optimizer.second_moment=block"),
    "gefen-fp32": ("optimizer=gefen", "optimizer.momentum=fp32"),
}
MAIN_ARMS = ("adamw", "gefen")
# twice the steps, at the rate that is best for both
DOUBLE_LR = "2e-3"
# arms that show what one choice costs, at one learning rate each
ABLATIONS = {"llama": "2e-3"}


def bracket(model: str, arm: str) -> list[Trial]:
    """The runs of seed 0."""
    return [Trial(model, arm, ARMS[arm], lr, 0) for lr in BRACKETS[model]]


def seeds(model: str, arm: str) -> list[Trial]:
    """The runs of all seeds at the best rate; none while that is not known."""
    lr = best_lr(bracket(model, arm))
    return [Trial(model, arm, ARMS[arm], lr, seed) for seed in SEEDS] if lr else []


def plans() -> list[list[Trial]]:
    """What is run first, and what then."""
    main = [(model, arm) for model in BRACKETS for arm in MAIN_ARMS]
    first = [trial for model, arm in main for trial in bracket(model, arm)]
    for model, lr in ABLATIONS.items():
        first += [Trial(model, arm, ARMS[arm], lr, 0) for arm in ARMS if arm not in MAIN_ARMS]
    double = [Trial("double", arm, ARMS[arm], DOUBLE_LR, 0) for arm in MAIN_ARMS]
    return [first, [trial for model, arm in main for trial in seeds(model, arm)] + double]


def judge(model: str) -> dict[str, Any]:
    """Mean and spread over seeds of both arms, and by how much Gefen is worse; None while runs are missing."""
    found = {arm: over_seeds(seeds(model, arm)) for arm in MAIN_ARMS}
    adamw, gefen = found["adamw"], found["gefen"]
    return {**found, "difference": gefen["mean"] - adamw["mean"] if adamw and gefen else None, "margin": MARGIN}


def main() -> None:
    """Run what is missing, print the table, write ``bench/results/quality.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", default="", help="regular expression on the run's folder name")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--anew", action="store_true", help="run again what the committed results hold")
    arguments = parser.parse_args()
    if not arguments.anew:
        recall("quality")
    for number in range(2):
        if not arguments.table:
            # the second plan needs the results of the first
            run_missing(plans()[number], arguments.jobs, arguments.only)
    runs = done(trial for plan in plans() for trial in plan)
    console = Console()
    console.print(tabulate(runs))
    verdicts = {model: judge(model) for model in BRACKETS}
    for model, verdict in verdicts.items():
        console.print(model, verdict)
    console.print(f"written to {write_result('quality', {'runs': runs, 'verdicts': verdicts})}")


if __name__ == "__main__":
    main()
