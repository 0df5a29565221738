"""The state of a decision as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from langchain_card.errors import UnsupportedContentError
from langchain_card.text.prompt import to_conversation

MEDIA, SOURCES = ("image", "audio", "video", "file"), ("base64", "url", "file_id")
"""Types of LangChain's media blocks, and the keys of which each has one."""


def state_text(state: Any, model: str) -> str:
    """Return a state, or a part of a question, as text.

    A string stays as it is. Messages become a transcript, and everything else JSON.

    Args:
        state: a `langchain_core.decisions.State`.
        model: name of the model, for errors.

    Raises:
        UnsupportedContentError: it holds media.
        InvalidInputError: a message is of an unknown kind.
    """
    if isinstance(state, str):
        return state
    if isinstance(state, BaseMessage):
        return _said(state, model)
    if isinstance(state, Sequence) and state and all(isinstance(item, BaseMessage) for item in state):
        return "\n\n".join(_said(message, model) for message in state)
    return json.dumps(_plain(state, model), ensure_ascii=False, indent=1)


def _said(message: BaseMessage, model: str) -> str:
    return "\n\n".join(f"{turn['role']}: {_content(turn)}" for turn in to_conversation([message], model))


def _content(turn: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    lines = [turn["content"], *(f"calls {call['name']}({json.dumps(call['arguments'])})" for call in calls)]
    return "\n".join(filter(None, lines))


def _plain(value: Any, model: str) -> Any:
    """Return a value of JSON, with messages as texts of their roles."""
    if isinstance(value, BaseMessage):
        return _said(value, model)
    if isinstance(value, Mapping) and value.get("type") in MEDIA and not value.keys().isdisjoint(SOURCES):
        raise UnsupportedContentError("state", value["type"], f"{model} reads text only", "say in words what it shows")
    if isinstance(value, Mapping):
        return {name: _plain(item, model) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item, model) for item in value]
    return value
