"""Prompts from a JSON-lines file, whatever the set's habits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_card.checks import check_range
from langchain_card.errors import InvalidInputError

OWN = Path(__file__).parent / "data" / "prompts.jsonl"
"""The project's own prompts."""

COPYING = OWN.with_name("copying.jsonl")
"""Likewise, such whose answers mostly repeat them: edits of code and summaries with quotes (`kind` edit or quote)."""


def load(path: Path, count: int) -> list[str]:
    """The first `count` prompts: `prompt`, `question`, `text` or the first of `turns`, whichever a row has.

    Raises:
        InvalidInputError: the file is not there, or holds something else, or nothing.
    """
    check_range("count", count, 1, 2**31)
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = [_text(row) for row in rows[:count]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        hint = "each line is a JSON object with prompt, question, text or turns"
        raise InvalidInputError("prompts", str(path), f"cannot be read ({error!r})", hint) from error
    if not texts:
        raise InvalidInputError("prompts", str(path), "holds no prompt")
    return texts


def _text(row: dict[str, Any]) -> str:
    for key in ("prompt", "question", "text"):
        if key in row:
            return str(row[key])
    return str(row["turns"][0])
