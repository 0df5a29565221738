"""`langchain-card models`: recommend, list, download, locate or remove models."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from langchain_card.chat.progress import ConsoleProgress, megabytes

if TYPE_CHECKING:
    from langchain_card.models.store import ModelStore

_NAME = "built-in name, folder, .gguf file or hub id (owner/name)"


def register(subparsers: Any) -> None:
    """Add `models` and its sub-commands."""
    parser = subparsers.add_parser("models", help="recommend, list, download, locate or remove models")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    helps = {
        "pull": "download a model",
        "path": "print where a model lies",
        "rm": "remove a model, or the prefixes, from the cache",
    }
    actions.add_parser("list", help="show the models of the cache").set_defaults(run=run, action="list")
    text = "show which built-in pair fits this machine, and its line of code"
    actions.add_parser("recommend", help=text).set_defaults(run=run, action="recommend")
    for action, text in helps.items():
        command = actions.add_parser(action, help=text)
        command.add_argument("name", help=_NAME + (" or prefixes" if action == "rm" else ""))
        command.set_defaults(run=run, action=action)


def run(args: argparse.Namespace) -> int:
    """Carry out one action."""
    if args.action == "recommend":
        from langchain_card.cli import recommend

        return recommend.run()
    from langchain_card.models.store import ModelStore

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

    from langchain_card.models.store import PREFIXES

    rows = [_row(m.name, m.state, m.size, *m.forms) for m in store.list()]
    if size := store.prefix_bytes():
        rows.append(_row(PREFIXES, "texts", size))
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    table = Table("model", "state", "on disk", "forms", title=f"models in {store.cache}")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _row(name: str, state: str, size: int, *forms: str) -> tuple[str, ...]:
    return name, state, megabytes(size) if size else "-", " ".join(forms) or "-"
