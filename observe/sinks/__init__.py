"""Where records go. A sink is one destination; ``observe.observer`` calls all of them and survives each of them."""

import math
from typing import Any, Protocol

Record = dict[str, Any]


class Sink(Protocol):
    """One destination. Any method may raise ``Exception``: the observer then warns once about this sink."""

    name: str
    every_step: bool
    """True: gets each step. False: gets every ``log.interval``-th, with the means of the interval."""

    def step(self, record: Record) -> None:
        """A training step; ``record["step"]`` counts from 1."""

    def evaluation(self, step: int, record: Record) -> None:
        """Figures of an evaluation after ``step`` (keys begin with ``val_``)."""

    def event(self, record: Record) -> None:
        """A decision: ``time``, ``kind``, ``step`` and its own fields."""

    def finish(self, summary: Record) -> None:
        """The run is over; ``summary`` is what ``summary.json`` holds."""

    def close(self) -> None:
        """Release what is held, also after a failure; called once."""


def flatten(record: Record, prefix: str = "") -> dict[str, float]:
    """Dotted key -> finite number, for the destinations that only draw curves; anything else is left out."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            numbers |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            numbers[f"{prefix}{key}"] = value
    return numbers


def curves(record: Record) -> dict[str, float]:
    """Names of the curves of a record: ``train/loss``, ``eval/val_loss``; without the step, which is the axis."""
    numbers = flatten(record)
    numbers.pop("step", None)
    return {f"{'eval' if key.startswith('val_') else 'train'}/{key}": value for key, value in numbers.items()}
