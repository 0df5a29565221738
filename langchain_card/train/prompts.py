"""Prompts to train on: a file's, or those that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_card.engine.generation import Completion
from langchain_card.errors import InvalidInputError

MARK = "\u2756"
"""A character that no chat template has."""

LEAST_CHARS = 12
"""Characters of a question; shorter ones are fragments."""


def beginning_of_question(tokenizer: Any) -> tuple[int, ...]:
    """Return what a chat template writes before the first question.

    Raises:
        InvalidInputError: the template has no such place.
    """
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, mark, _ = text.partition(MARK)
    if not mark or not before:
        limit = "has no chat template with a beginning before the question"
        raise InvalidInputError("--data", "self", limit, "give prompts: --data FILE")
    return (*tokenizer(before, add_special_tokens=False).input_ids,)


def question_in(done: Completion) -> str | None:
    """Return a question that the target wrote; None for a fragment, or one that does not end."""
    text = done.text.strip()
    return text if done.finish_reason == "stop" and len(text) >= LEAST_CHARS else None


def questions_in(path: Path) -> Iterator[str | list[dict[str, Any]]]:
    """Yield the prompts of a file of JSON lines: `prompt`, a text, or `messages`, as OpenAI's API has them.

    Raises:
        InvalidInputError: the file cannot be read, or a line has no prompt.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("--data", str(path), f"cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt = value.get("messages") or value["prompt"]
            if not isinstance(prompt, str | list):
                raise TypeError(f"{prompt!r} is no text")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            limit = f"line {number} has no prompt ({type(error).__name__}: {error})"
            raise InvalidInputError("--data", str(path), limit, 'a line is {"prompt": "..."}') from error
        yield prompt
