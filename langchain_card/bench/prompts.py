"""Prompts from a JSON-lines file, whatever the set's habits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent / "data" / "prompts.jsonl"
"""The project's own prompts."""


def load(path: Path, count: int) -> list[str]:
    """The first `count` prompts: `prompt`, `question`, `text` or the first of `turns`, whichever a row has."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [_text(row) for row in rows[:count]]


def _text(row: dict[str, Any]) -> str:
    for key in ("prompt", "question", "text"):
        if key in row:
            return str(row[key])
    return str(row["turns"][0])
