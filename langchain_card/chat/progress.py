"""Progress of downloads, conversions, loading and long prompts: on a terminal, in a notebook, or as lines."""

from __future__ import annotations

import html
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from typing_extensions import Self

PLAIN_INTERVAL = 5.0
"""Seconds between two lines of progress where no bar can be drawn."""

UPDATE_INTERVAL = 0.2
"""Seconds between two states of a bar in a notebook."""

_drawing = threading.Lock()
"""Held by the bar that is drawn: a terminal shows one at a time."""


def megabytes(size: int) -> str:
    """Format a size in bytes, such as "98.4 MB"."""
    return f"{size / 1e6:,.1f} MB"


def tokens(count: int) -> str:
    """Format a number of tokens, such as "1,024 tokens"."""
    return f"{count:,} tokens"


class ConsoleProgress:
    """Progress for a user: a bar on a terminal or in a notebook, else a line every `PLAIN_INTERVAL` seconds.

    Use as a context manager; implements `models.files.Progress`. A bar disappears at the end.

    Args:
        lines: False shows nothing where no bar can be drawn.
        delay: seconds before anything is shown.
    """

    def __init__(self, *, lines: bool = True, delay: float = 0.0) -> None:
        self._lines, self._begins = lines, time.monotonic() + delay
        self._view: _View | None = None

    def __enter__(self) -> Self:
        if _in_notebook():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "IProgress not found": no bar here needs ipywidgets
                import_module("tqdm.auto")  # transformers imports it, too
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.close()
        self._view = None

    def update(self, stage: str, done: int, total: int, unit: Callable[[int], str] = megabytes, more: str = "") -> None:
        """Show a step.

        Args:
            stage: a text for the user.
            done: the amount that is done.
            total: the whole amount; 0 when unknown.
            unit: formats an amount.
            more: text behind the amounts.
        """
        if self._view is None and time.monotonic() >= self._begins:
            self._view = _view(lines=self._lines)
        if self._view is not None:
            self._view.show(stage, done, total, f"{unit(done)} of {unit(total)}{more}" if total else more)


class _View(Protocol):
    """A place that shows one step at a time."""

    def show(self, stage: str, done: int, total: int, amount: str) -> None:
        """Show a step and how much of it is done."""

    def close(self) -> None:
        """Remove what is shown."""


def _in_notebook() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _view(*, lines: bool) -> _View:
    if _in_notebook():
        return _NotebookBar()
    if sys.stderr.isatty() and _drawing.acquire(blocking=False):
        return _TerminalBar()
    return _Lines() if lines else _Nothing()


class _TerminalBar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._stage, self._task = "", self._bars.add_task("", amount="")
        self._bars.start()

    def show(self, stage: str, done: int, total: int, amount: str) -> None:
        if stage != self._stage:
            self._bars.reset(self._task, description=stage)
            self._stage = stage
        self._bars.update(self._task, total=total or None, completed=done, amount=amount)

    def close(self) -> None:
        self._bars.stop()
        _drawing.release()


class _NotebookBar:
    def __init__(self) -> None:
        ipython: Any = import_module("IPython.display")  # it is there: a notebook runs this
        self._html, self._shown = ipython.HTML, ("", float("-inf"))
        self._handle = ipython.display(ipython.HTML(""), display_id=True)

    def show(self, stage: str, done: int, total: int, amount: str) -> None:
        before, at = self._shown
        if stage == before and time.monotonic() - at < UPDATE_INTERVAL:
            return
        self._shown = stage, time.monotonic()
        state = f' value="{done}" max="{total}"' if total else ""
        self._handle.update(self._html(f"<progress{state}></progress> {html.escape(f'{stage} {amount}'.strip())}"))

    def close(self) -> None:
        self._handle.update(self._html(""))


class _Lines:
    def __init__(self) -> None:
        self._stage, self._printed = "", float("-inf")

    def show(self, stage: str, done: int, total: int, amount: str) -> None:
        if stage != self._stage or time.monotonic() - self._printed > PLAIN_INTERVAL:
            self._printed = time.monotonic()
            print(f"{stage}: {amount}" if amount else stage, file=sys.stderr, flush=True)
        self._stage = stage

    def close(self) -> None:
        pass


class _Nothing:
    def show(self, stage: str, done: int, total: int, amount: str) -> None:
        pass

    def close(self) -> None:
        pass
