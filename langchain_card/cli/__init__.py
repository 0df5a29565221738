"""The command line: `langchain-card COMMAND`. Each command is a module with `register(subparsers)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from langchain_card import __version__
from langchain_card.errors import CARDError

COMMANDS = ("chat", "serve", "batch", "models", "bench", "ngrams", "train", "plan", "trace", "doctor")
"""Modules of the commands, in the order of `--help`; they import heavy packages inside `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        The exit code: that of the command, 2 for a `CARDError`, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(prog="langchain-card", description="Local chat models with a draft and a target.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").register(subparsers)
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given, argparse.Namespace(given=given))
    try:
        return int(args.run(args))
    except CARDError as error:
        print(f"langchain-card: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("langchain-card: interrupted", file=sys.stderr)
        return 130
