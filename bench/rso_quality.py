"""Held-out loss of RSO against AdamW, each at its best learning rate: ``python -m bench.rso_quality``.

Forms of RSO are compared on the small setting of ``bench.trials`` (one seed, each form over a bracket of three rates);
what wins there, and what the paper has, is run at the setting of ``bench.quality``: rank in / 4, one bracket for both
arms with seed 0, then more seeds at each one's best rate, and one long run each. ``--jobs 2`` takes two cores,
``--only small.*haar`` some of the runs, ``--table`` none. Results: ``bench/results/rso_quality.json``.
"""

import argparse
from typing import Any

from rich.console import Console

from bench.machine import write_result
from bench.trials import STEPS, Trial, best_lr, done, over_seeds, recall, run_missing, tabulate

# one learning rate for all of the model, as AdamW has it
WHOLE_RATE = ("optimizer.lr_scale=1.0",)
# forms of RSO: what differs from that with coordinate P, interval 100, reset and one rate for all of the model
FORMS: dict[str, tuple[str, ...]] = {
    "rso": (),
    "rso-haar": ("optimizer.projection=haar",),
    "rso-gaussian": ("optimizer.projection=gaussian",),
    "rso-keep": ("optimizer.reset=false",),
    "rso-50": ("optimizer.interval=50",),
    "rso-200": ("optimizer.interval=200",),
    "rso-warmup": ("optimizer.warmup=10",),
    "rso-half": ("optimizer.lr_scale=0.5",),
    # half the width of the small setting
    "rso-half-rank": ("optimizer.lr_scale=0.5", "optimizer.rank=64"),
    "rso-half-300": ("optimizer.lr_scale=0.5", "optimizer.interval=300"),
    "rso-half-keep": ("optimizer.lr_scale=0.5", "optimizer.reset=false"),
    "rso-double": ("optimizer.lr_scale=2.0",),
    "rso-nodecay": ("optimizer.weight_decay=0.0",),
}


def _rate(settings: tuple[str, ...]) -> tuple[str, ...]:
    return () if any(setting.startswith("optimizer.lr_scale") for setting in settings) else WHOLE_RATE


ARMS = {
    "adamw": ("optimizer=adamw",),
    # what the factor on the rate of the blocks does without RSO
    "adamw-half": ("optimizer=adamw",),
    **{name: ("optimizer=rso", *settings, *_rate(settings)) for name, settings in FORMS.items()},
    "rso_paper": ("optimizer=rso_paper",),
    "rso_gefen": ("optimizer=rso_gefen", *WHOLE_RATE),
    "rso_gefen-half": ("optimizer=rso_gefen", "optimizer.lr_scale=0.5"),
}
# as wide for every arm of a model, and wide enough that the best is inside; some arms have theirs elsewhere
SMALL_BRACKETS = {
    "adamw": ("2e-3", "4e-3", "8e-3"),
    **dict.fromkeys(("rso-half", "rso-half-rank", "rso-half-300", "rso-half-keep"), ("8e-3", "16e-3", "32e-3")),
}
PROGRAMS = {"adamw-half": ("-m", "bench.split_lr", "0.5")}
SMALL_BRACKET = ("4e-3", "8e-3", "16e-3")
BRACKETS = {
    "adamw": ("1e-3", "2e-3", "4e-3"),
    "adamw-half": ("2e-3", "4e-3", "8e-3"),
    "rso": ("2e-3", "4e-3", "8e-3"),
    "rso-half": ("2e-3", "4e-3", "8e-3"),
    "rso_gefen-half": ("2e-3", "4e-3", "8e-3"),
}
SEEDS = (0, 1, 2)


def trial(model: str, arm: str, lr: str, seed: int = 0) -> Trial:
    """One run."""
    return Trial(model, arm, ARMS[arm], lr, seed, PROGRAMS.get(arm, ("train.py",)))


def small(arm: str) -> list[Trial]:
    """One form at the small setting."""
    return [trial("small", arm, lr) for lr in SMALL_BRACKETS.get(arm, SMALL_BRACKET)]


def bracket(arm: str) -> list[Trial]:
    """One arm at the full setting, seed 0."""
    return [trial("llama", arm, lr) for lr in BRACKETS[arm]]


def seeds(arm: str) -> list[Trial]:
    """One arm with all seeds at its best rate; none while that is not known."""
    lr = best_lr(bracket(arm))
    return [trial("llama", arm, lr, seed) for seed in SEEDS] if lr else []


def long(arm: str) -> list[Trial]:
    """One arm for longer, at its best rate."""
    lr = best_lr(bracket(arm))
    return [trial("long", arm, lr)] if lr else []


def plans() -> list[list[Trial]]:
    """What is run first, and what then."""
    return [
        [each for arm in ARMS for each in small(arm)],
        [each for arm in BRACKETS for each in bracket(arm)],
        [each for arm in BRACKETS for each in seeds(arm)],
        [each for arm in BRACKETS for each in long(arm)],
    ]


def choose() -> list[dict[str, Any]]:
    """The small setting: of each form the lowest loss of its bracket and where it is, lowest first."""
    rows = []
    for arm in ARMS:
        found = {each.lr: loss for each in small(arm) if (loss := each.last()) is not None}
        if found:
            best = min(found, key=found.__getitem__)
            rates = [each.lr for each in small(arm)]
            inside = len(found) == len(rates) and best not in (rates[0], rates[-1])
            rows.append({"arm": arm, "lr": best, "loss": found[best], "inside": inside, "all": found})
    return sorted(rows, key=lambda row: row["loss"])


def main() -> None:
    """Run what is missing, print the tables, write ``bench/results/rso_quality.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", default="", help="regular expression on the run's folder name")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--anew", action="store_true", help="run again what the committed results hold")
    arguments = parser.parse_args()
    if not arguments.anew:
        recall("rso_quality")
    for number in range(len(plans())):
        if not arguments.table:
            # a later plan needs the results of those before
            run_missing(plans()[number], arguments.jobs, arguments.only)
    console = Console(width=110)
    runs = done(each for plan in plans() for each in plan)
    console.print(tabulate([run for run in runs if run["model"] != "small"]))
    chosen = choose()
    for row in chosen:
        losses = ", ".join(f"{lr}: {loss:.3f}" for lr, loss in row["all"].items())
        console.print(f"{row['arm']:14} {row['loss']:.3f} at {row['lr']:5} ({losses})")
    verdicts = {arm: over_seeds(seeds(arm)) for arm in BRACKETS}
    for arm, verdict in verdicts.items():
        console.print(arm, verdict)
    result = {"steps": STEPS, "small": chosen, "runs": runs, "verdicts": verdicts}
    console.print(f"written to {write_result('rso_quality', result)}")


if __name__ == "__main__":
    main()
