"""Parts of README.md and of the documentation that a target of the Makefile writes, between two marks that name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def marks(target: str) -> tuple[str, str]:
    """Return the lines around the part that a target writes."""
    return f"<!-- begin: make {target} -->", f"<!-- end: make {target} -->"


def replace_part(page: Path, target: str, text: str) -> None:
    """Replace the part of a page that a target writes."""
    begin, end = marks(target)
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def command_and_machine(found: Mapping[str, Any], why: str) -> str:
    """Return how figures were measured.

    Args:
        found: the fields of a file that `bench --json` or `race.py` wrote.
        why: the reason why the command does not run in CI.
    """
    machine, packages = found["machine"], {"torch": found["machine"]["torch"], **found["packages"]}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    return "\n\n".join(
        (
            f"<!-- runs: not in CI, {why} -->\n```console\n$ {found['command']}\n```",
            f"Measured on {machine['processor']}, {machine['cores']} cores, {machine['memory']} ({versions}).",
        )
    )


def weights(formats: Mapping[str, str]) -> str:
    """Return a sentence on the number formats of the methods."""
    return "Weights: " + "; ".join(f"`{name}`: {words}" for name, words in formats.items()) + "."


def listed(lines: list[str]) -> str:
    """Return lines as a list."""
    return "\n".join(f"- {line}" for line in lines)
