"""Prompts to train on: a file's, or those that the target writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from langchain_core.messages import convert_to_messages

from langchain_card.engine.generation import Completion
from langchain_card.errors import InvalidInputError
from langchain_card.text.prompt import to_conversation
from langchain_card.text.tool_form import Turn

Conversation: TypeAlias = list[Turn]
"""Turns of a chat, of which the target writes the next one."""

MARK = "\u2756"
"""A character that no chat template has."""

LEAST_CHARS = 12
"""Characters of a question; shorter ones are fragments."""


def question(text: str) -> Conversation:
    """Return the conversation that a question begins."""
    return [{"role": "user", "content": text}]


def beginning_of_question(tokenizer: Any) -> tuple[int, ...]:
    """Return what a chat template writes before the first question.

    Raises:
        InvalidInputError: there is no chat template, or it has no such place.
    """
    text = tokenizer.apply_chat_template(question(MARK), tokenize=False) if tokenizer.chat_template else ""
    before, mark, _ = text.partition(MARK)
    if not mark or not before:
        limit = "has the target write questions, and its chat template has no beginning before the first one"
        raise InvalidInputError("--data", "self", limit, "give prompts: --data FILE")
    return (*tokenizer(before, add_special_tokens=False).input_ids,)


def question_in(done: Completion) -> Conversation | None:
    """Return a question that the target wrote; None for a fragment, or one that does not end."""
    text = done.text.strip()
    return question(text) if done.finish_reason == "stop" and len(text) >= LEAST_CHARS else None


def read_prompts(path: Path) -> list[Conversation]:
    """Return the prompts of a file of JSON lines: `prompt`, a text, or `messages`, as OpenAI's API has them.

    Raises:
        InvalidInputError: the file cannot be read, is empty, or a line has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("--data", str(path), f"cannot be read ({error})") from error
    found = [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InvalidInputError("--data", str(path), "has no prompts", 'a line is {"prompt": "..."}')
    return found


def _read(path: Path, number: int, line: str) -> Conversation:
    try:
        value = json.loads(line)
        if value.get("messages"):
            return to_conversation(convert_to_messages(value["messages"]), "the target")
        if not isinstance(value["prompt"], str):
            raise TypeError(f"{value['prompt']!r} is no text")
        return question(value["prompt"])
    except Exception as error:
        limit = f"line {number} has no prompt ({type(error).__name__}: {error})"
        raise InvalidInputError("--data", str(path), limit, 'a line is {"prompt": "..."}') from error
