"""The table a person watches: live where stdout is a terminal, otherwise one plain line per record.

Unknown figures read "n/a". The live table keeps the last few steps and is redrawn at most ten times a second; what
other code writes to stdout or stderr meanwhile appears above it.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from observe import memory
from observe.sinks import Record

ROWS = 8
REDRAW_SECONDS = 0.1

# heading of the column and label in a line, text of the record; together they fit into 80 characters
_COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("step", lambda r: str(r["step"])),
    ("loss", lambda r: number(r.get("loss"), ".4f")),
    ("val", lambda r: number(r["val_loss"], ".4f") if "val_loss" in r else ""),
    ("lr", lambda r: number(r.get("lr"), ".2e")),
    ("norm", lambda r: number(r.get("grad_norm"), ".3f")),
    ("tok/s", lambda r: number(r.get("tokens_per_second"), ",.0f")),
    ("tok/s/dev", lambda r: number(r.get("tokens_per_second_per_device"), ",.0f")),
    ("mfu", lambda r: number(r.get("mfu"), ".1%")),
    ("memory", lambda r: size(memory.headline(r["memory"]) if r.get("memory") else None)),
    ("sec", lambda r: number(r.get("step_seconds"), ".3f")),
)


class _SurvivingConsole(Console):
    """Falls silent when the reader of a pipe has gone (``| head``), where rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # what is flushed at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError("nobody reads standard output any more")


class ConsoleSink:
    """Writes to stdout, or to ``console`` where a test gives one."""

    name = "console"
    every_step = False

    def __init__(self, header: Record, console: Console | None = None) -> None:
        self._console = console or _SurvivingConsole()
        self._header = header
        self._rows: deque[Record] = deque(maxlen=ROWS)
        self._memory: str | None = None
        self._drawn = 0.0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
            # a run that is killed cannot give a hidden cursor back
            self._console.show_cursor(True)
        else:
            self._line(header_line(header))

    def step(self, record: Record) -> None:
        self._rows.append(record)
        if self._live is None:
            self._line(plain_line(record))
        else:
            self._draw()

    def evaluation(self, step: int, record: Record) -> None:
        if self._live is None:
            self._line(f"step {step} " + " ".join(f"{key} {number(value, '.4f')}" for key, value in record.items()))
        elif self._rows and self._rows[-1]["step"] == step:
            self._rows[-1] = self._rows[-1] | record
            self._draw()
        else:
            self._rows.append({"step": step, **record})
            self._draw()

    def event(self, record: Record) -> None:
        if record["kind"] == "memory" and self._live is not None:
            # it stays in view
            self._memory = event_line(record)
            self._draw()
        else:
            self._line(event_line(record))

    def finish(self, summary: Record) -> None:
        """The last rows stay, and below them how the run ended."""
        self._stop()
        for line in ending(summary):
            self._line(line)

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.update(self._picture(), refresh=True)
            live.stop()

    def _draw(self) -> None:
        assert self._live is not None
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS:
            self._live.update(self._picture(), refresh=True)
            self._drawn = now

    def _picture(self) -> Group:
        gap = 1 if self._console.width < 100 else 3
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for heading, _ in _COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for record in self._rows:
            table.add_row(*(text(record) for _, text in _COLUMNS))
        lines = [Text(header_line(self._header), style="dim"), table]
        if self._rows and "step_split" in self._rows[-1]:
            lines.append(Text(f"time {split(self._rows[-1])}", style="dim"))
        if self._memory is not None:
            lines.append(Text(self._memory, style="dim"))
        return Group(*lines)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def ending(summary: Record) -> list[str]:
    """How a run ended, what it reached, its text sample and where everything is."""
    figures = (
        f"{summary.get('status')} after step {summary.get('steps')}",
        f"loss {number(summary.get('loss'), '.4f')}",
        f"held-out loss {number(summary.get('val_loss'), '.4f')}",
        f"{number(summary.get('tokens_per_second'), ',.0f')} tokens/s (median)",
    )
    lines = ["", " · ".join(figures)]
    if "first_microbatch" in summary:
        before, after = (summary.get(f"{name}microbatch_tokens_per_second") for name in ("first_", ""))
        settled = "" if summary.get("microbatch_settled") else " (still searching)"
        lines.append(
            f"microbatch {summary['first_microbatch']} -> {summary['microbatch']} rows{settled}, "
            f"{number(before, ',.0f')} -> {number(after, ',.0f')} tokens/s"
        )
    if summary.get("sample"):
        lines += ["text sample, after a held-out prompt:", *(f"    {line}" for line in summary["sample"].splitlines())]
    if "folder" in summary:
        lines.append(f"run folder {summary['folder']} (loss.png, summary.json, metrics.jsonl, checkpoints)")
    return lines


def header_line(header: Record) -> str:
    """``llama3_debug · parameters 4.7 M · world size 2 · ...``: the entries in their order; the folder below them."""
    parts = [_entry(key, value) for key, value in header.items() if key != "folder"]
    return " · ".join(parts) + (f"\nrun folder {header['folder']}" if "folder" in header else "")


def _entry(key: str, value: Any) -> str:
    if key == "model":
        return str(value)
    if isinstance(value, int) and value >= 100_000:
        value = f"{value / 1e6:,.1f} M"
    return f"{key.replace('_', ' ')} {'n/a' if value is None else value}"


def event_line(record: Record) -> str:
    """A decision in words: step, kind, and what there is to say of it; unknown figures are left out."""
    place = f"step {record['step']} " if record.get("step") is not None else ""
    if record["kind"] == "microbatch" and "rows" in record:
        return place + _microbatch(record)
    if record["kind"] == "memory":
        return place + _memory(record)
    told = {key: value for key, value in record.items() if key not in ("time", "kind", "step") and value is not None}
    return f"{place}{record['kind']}: " + ", ".join(map(_told, told, told.values()))


def _microbatch(record: Record) -> str:
    old, new = (
        f"{record['rows_before']} x {record['accumulation_before']}",
        f"{record['rows']} x {record['accumulation']}",
    )
    if record["policy_before"] != record["policy"]:
        old, new = f"{old} ({record['policy_before']})", f"{new} ({record['policy']})"
    known = [record[f"tokens_per_second_{when}"] for when in ("before", "after")]
    speed = " -> ".join("n/a" if rate is None else f"{rate:,.0f}" for rate in known) + " tokens/s"
    parts = [
        f"microbatch {new}" if old == new else f"microbatch {old} -> {new}",
        f"{record['phase']}: {record['reason']}",
        f"{size_of(record['use_bytes'])} of {size_of(record['budget_bytes'])} on rank {record['tightest_rank']}",
        *([speed] if any(rate is not None for rate in known) else []),
    ]
    return " · ".join(parts)


def _memory(record: Record) -> str:
    held = {key.removesuffix("_bytes"): value for key, value in record.items() if key.endswith("_bytes")}
    total = held.pop("total")
    parts = " + ".join(f"{owner.replace('_', ' ')} {size_of(value)}" for owner, value in held.items() if value)
    budget = "" if record.get("budget_gib") is None else f" of {size_of(int(record['budget_gib'] * 2**30))}"
    return f"memory at its peak, in the {record['phase']}: {size_of(total)}{budget} = {parts}"


def _told(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} {size_of(value)}"
    return f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"


def plain_line(record: Record) -> str:
    """All columns as ``label value`` on one line; empty ones left out."""
    shown = ((label, text(record)) for label, text in _COLUMNS)
    line = " ".join(f"{label} {text}" for label, text in shown if text)
    return f"{line} | {split(record)}" if "step_split" in record else line


def number(value: Any, form: str) -> str:
    """A number in a format; "n/a" where there is none."""
    return "n/a" if value is None else format(value, form)


def size(num_bytes: int | None) -> str:
    """Bytes as GiB with two digits."""
    return "n/a" if num_bytes is None else f"{num_bytes / 2**30:.2f}G"


def size_of(num_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def split(record: Record) -> str:
    """Where the time of a step went, in whole per cent: ``data 5% forward 30% ...``."""
    parts, seconds = record.get("step_split"), record.get("step_seconds")
    if not parts or not seconds:
        return "n/a"
    return " ".join(f"{name} {part / seconds:.0%}" for name, part in parts.items())
