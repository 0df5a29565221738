"""Progress of downloads and conversions on the console."""

from __future__ import annotations

import sys
import time
from typing import Any

from typing_extensions import Self

PLAIN_INTERVAL = 5.0
"""Seconds between two lines of progress without a terminal."""


class ConsoleProgress:
    """Progress on standard error: a rich bar on a terminal, else a line every `PLAIN_INTERVAL` seconds.

    Use as a context manager; implements `models.files.Progress`.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        is_drawn = console.is_terminal and sys.stderr.isatty()  # notebooks set FORCE_COLOR, which makes no terminal
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=console, transient=True) if is_drawn else None
        self._stage, self._task, self._printed = "", None, float("-inf")

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Show a step; `done` and `total` in bytes, total 0 when unknown."""
        if self._bars:
            self._show_bar(self._bars, stage, done, total)
        elif stage != self._stage or time.monotonic() - self._printed > PLAIN_INTERVAL:
            self._printed = time.monotonic()
            print(f"{stage}: {megabytes(done)} of {megabytes(total)}" if total else stage, file=sys.stderr, flush=True)
        self._stage = stage

    def _show_bar(self, bars: Any, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            if self._task is not None:
                bars.remove_task(self._task)
            self._task = bars.add_task(stage, total=total or None)
        bars.update(self._task, completed=done)


def megabytes(size: int) -> str:
    """Format a size in bytes, such as "98.4 MB"."""
    return f"{size / 1e6:,.1f} MB"
