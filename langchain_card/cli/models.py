"""`langchain-card models list | pull NAME | path NAME | rm NAME`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

    from langchain_card.runtime.store import ModelStore

PLAIN_INTERVAL = 5.0  # seconds between lines of progress without a terminal


class ConsoleProgress:
    """Progress on standard error: a rich bar on a terminal, else a plain line now and then.

    Use as a context manager; satisfies `runtime.store.Progress`.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=console, transient=True) if console.is_terminal else None
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
    """A size in bytes, in words: "98.4 MB"."""
    return f"{size / 1e6:,.1f} MB"


def register(subparsers: Any) -> None:
    """Add `models` and its sub-commands."""
    parser = subparsers.add_parser("models", help="list, download, locate or remove models")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    helps = {"pull": "download a model", "path": "print where a model lies", "rm": "remove a model from the cache"}
    actions.add_parser("list", help="show the models of the cache").set_defaults(run=run, action="list")
    for action, text in helps.items():
        command = actions.add_parser(action, help=text)
        command.add_argument("name", help="built-in name, folder, .gguf file or hub id (owner/name)")
        command.set_defaults(run=run, action=action)


def run(args: argparse.Namespace) -> int:
    """Carry out one action; errors of the package rise to `main`."""
    from langchain_card.runtime.store import ModelStore

    store = ModelStore()
    if args.action == "list":
        _print_list(store)
    elif args.action == "pull":
        with ConsoleProgress() as progress:
            path = store.pull(args.name, progress)
        print(path)
    elif args.action == "path":
        print(store.path(args.name))
    else:
        store.remove(args.name)
    return 0


def _print_list(store: ModelStore) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = [(m.name, m.state, megabytes(m.size) if m.size else "-", " ".join(m.forms) or "-") for m in store.list()]
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    table = Table("model", "state", "on disk", "forms", title=f"models in {store.cache}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
