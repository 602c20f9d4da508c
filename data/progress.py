"""Progress of ``data.prepare``: a bar on a terminal, a plain line every few seconds elsewhere."""

import time
from types import TracebackType

import rich.progress
from rich.console import Console

LINE_SECONDS = 10.0


class Progress:
    """Context manager around a job of ``total`` input bytes."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console = console
        self._what = what
        self._total = max(1, total)
        self._done = self._tokens = 0
        self._start = self._shown = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.DownloadColumn(),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.fields[rate]}"),
                console=console,
            )
            self._task = self._bar.add_task(what, total=self._total, rate="")

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif error is None:
            self._line()

    def advance(self, size: int, tokens: int) -> None:
        """Report ``size`` further input bytes that gave ``tokens`` tokens."""
        self._done += size
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate())
        elif time.monotonic() - self._shown > LINE_SECONDS:
            self._line()

    def _line(self) -> None:
        self._shown = time.monotonic()
        share = 100 * self._done / self._total
        self._console.print(f"{self._what}: {share:.0f} % of {self._total / 1e6:.1f} MB, {self._rate()}")

    def _rate(self) -> str:
        return f"{self._tokens / max(1e-9, time.monotonic() - self._start) / 1e6:.2f} M tokens/s"
