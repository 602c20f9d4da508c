"""The one thing the trainer reports to. Decided here: who gets what when, and that no destination can end a run.

``metrics.jsonl`` has every step and ``events.jsonl`` every decision; console, TensorBoard and W&B get every
``log.interval``-th step, with throughput and step time as means over the interval. A destination that fails is a
warning, once; the others and the training go on. Ranks other than 0 record nothing.
"""

import dataclasses
import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.compose import config_hash
from conf.schema import Config
from observe.plot import plot_loss
from observe.plot_memory import plot_memory
from observe.profiler import profiled_steps
from observe.sinks import Record, Sink
from observe.sinks.board import TensorBoardSink
from observe.sinks.console import ConsoleSink
from observe.sinks.jsonl import EventsSink, MetricsSink
from observe.sinks.wandb_sink import WandbSink
from observe.summary import Totals, build_summary, write_summary

logger = logging.getLogger(__name__)


class Observer:
    """Hands records to its sinks and keeps the totals for ``summary.json``. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, sinks: list[Sink], totals: Totals, interval: int, known: Record) -> None:
        self._folder = folder
        self._sinks = sinks
        self._totals = totals
        self._interval = _Interval(interval)
        self._known = known
        self._warned: set[str] = set()
        self._drawn: Any = None

    def step(self, record: Record) -> None:
        """Record a training step: ``step`` (from 1), and at will ``loss``, ``lr``, ``grad_norm``, ``memory``, the keys
        of ``StepMeter.step`` and, where an evaluation has followed the step already, its ``val_...`` keys."""
        self._totals.add(record)
        due = self._interval.add(record)
        for sink in self._sinks:
            if sink.every_step:
                self._guarded(sink.name, sink.step, record)
            elif due is not None:
                self._guarded(sink.name, sink.step, due)

    def evaluation(self, step: int, record: Record) -> None:
        """Record an evaluation (keys ``val_...``) of the weights after ``step``, whose record has been given before."""
        self._totals.add_evaluation(step, record)
        for sink in self._sinks:
            self._guarded(sink.name, sink.evaluation, step, record)

    def memory(self, ledger: Any, budget_gib: float | None) -> None:
        """Record a step's memory by owner (``memopt.ledger.Ledger``) as an event, and draw ``memory.png``; nothing
        where it is None, not measured, or the one that is drawn there already."""
        if self._folder is None or ledger is self._drawn or ledger is None:
            return
        self._drawn = ledger
        peaks = {f"{owner}_bytes": part["peak"] for owner, part in ledger.record().items()}
        self.event("memory", ledger.step, phase=ledger.phase, budget_gib=budget_gib, **peaks)
        budget = None if budget_gib is None else budget_gib * 2**30
        title = f"memory of step {ledger.step}, rank 0"
        self._guarded("memory.png", plot_memory, self._folder / "memory.png", ledger.timeline, title, budget)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Record a decision in ``events.jsonl``, with the time in UTC."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        for sink in self._sinks:
            self._guarded(sink.name, sink.event, {"time": now, "kind": kind, "step": step, **fields})

    def rewind(self, step: int) -> None:
        """Set aside what was recorded of the steps after ``step``: they are made again. Events stay, as do the curves
        of W&B, where these steps appear twice."""
        self._interval = _Interval(self._interval.length)
        for sink in self._sinks:
            if isinstance(sink, MetricsSink | TensorBoardSink):
                self._guarded(sink.name, sink.rewind, step)

    def finish(self, summary: Record) -> Record:
        """Write ``summary.json`` and ``loss.png``; ``summary`` adds to and overrules what the records say.

        Returns the whole summary, on other ranks an empty one.
        """
        if self._folder is None:
            return {}
        whole = build_summary(self._totals, self._known | summary)
        self._guarded("summary.json", write_summary, self._folder / "summary.json", whole)
        self._guarded("loss.png", plot_loss, self._folder)
        for sink in self._sinks:
            self._guarded(sink.name, sink.finish, whole)
        return whole

    def close(self) -> None:
        """Release everything; also after a failure, and more than once."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._guarded(sink.name, sink.close)

    @property
    def state(self) -> dict[str, str]:
        """What a checkpoint may keep so that a resume elsewhere continues the same W&B run."""
        return next(({"wandb_id": sink.run_id} for sink in self._sinks if isinstance(sink, WandbSink)), {})

    def _guarded(self, name: str, act: Callable[..., Any], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s cannot be written (%s: %s). Training continues.", name, type(error).__name__, error)


class _Interval:
    """Every ``length``-th record, its rates and times replaced by the means since the last one."""

    RATES = ("tokens_per_second", "tokens_per_second_per_device", "mfu")

    def __init__(self, length: int) -> None:
        self.length = length
        self._records: list[Record] = []

    def add(self, record: Record) -> Record | None:
        self._records.append(record)
        if record["step"] % self.length:
            return None
        records, self._records = self._records, []
        return self._mean(records) if len(records) > 1 else record

    def _mean(self, records: list[Record]) -> Record:
        last = dict(records[-1])
        timed = [record for record in records if record.get("step_seconds")]
        seconds = sum(record["step_seconds"] for record in timed)
        if not timed:
            return last
        for key in self.RATES:
            if all(record.get(key) is not None for record in timed):
                last[key] = sum(record[key] * record["step_seconds"] for record in timed) / seconds
        last["step_seconds"] = seconds / len(timed)
        if all("step_split" in record for record in timed):
            parts = timed[-1]["step_split"]
            last["step_split"] = {
                name: sum(record["step_split"][name] for record in timed) / len(timed) for name in parts
            }
        return last


def build_observer(
    config: Config, folder: Path, is_main: bool, start_step: int, header: Record, state: dict[str, str] | None = None
) -> Observer:
    """The observer of this process; on other ranks than the main one it does nothing.

    ``folder`` is the run folder, which exists; ``start_step`` the step resumed from, 0 for a new run; ``header`` what
    the console shows above the table (model, parameters, world_size, microbatch, accumulation, ...), also kept in
    ``summary.json``; ``state`` what ``Observer.state`` gave to the checkpoint that is resumed.
    """
    if not is_main:
        return Observer(None, [], Totals(), config.log.interval, {})
    known = {"config_hash": config_hash(config), **header}
    profiled = profiled_steps(config.log)
    observer = Observer(folder, [], Totals(profiled=profiled), config.log.interval, known)
    settings = {**dataclasses.asdict(config), "header": header}

    def add(name: str, build: Callable[[], Sink]) -> None:
        observer._guarded(name, lambda: observer._sinks.append(build()))

    def metrics() -> Sink:
        sink = MetricsSink(folder / "metrics.jsonl", start_step)
        observer._totals = Totals(sink.earlier, profiled)
        return sink

    add("metrics.jsonl", metrics)
    add("events.jsonl", lambda: EventsSink(folder / "events.jsonl"))
    if config.log.wandb.mode != "disabled":
        run_id = (state or {}).get("wandb_id")
        add("W&B", lambda: WandbSink(config.log.wandb, folder, config.run.name, start_step, settings, run_id))
    if config.log.tensorboard:
        add("TensorBoard", lambda: TensorBoardSink(folder / "tensorboard", start_step))
    if config.log.console:
        add("console", lambda: ConsoleSink(header))
    return observer
