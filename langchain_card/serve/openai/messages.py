"""OpenAI's messages as LangChain's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from pydantic_core import from_json

from langchain_card.errors import InvalidInputError, UnsupportedContentError
from langchain_card.serve.openai.schemas import Call, Message


def to_messages(messages: Sequence[Message]) -> list[BaseMessage]:
    """Messages for a chat model; a developer's is a system message.

    Raises:
        InvalidInputError: one lacks what its role needs.
        UnsupportedContentError: a part is not text.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Message, field: str) -> BaseMessage:
    text = _text(message, field)
    named: dict[str, Any] = {"name": message.name} if message.name else {}
    if message.role == "assistant":
        thought = {"reasoning_content": message.reasoning_content} if message.reasoning_content else {}
        answer = AIMessage(text, additional_kwargs=thought, **named)
        for call in message.tool_calls or ():
            _add(call, answer)
        return answer
    if message.role == "tool":
        if message.tool_call_id is None:
            limit = "is required: it names the call whose result this is"
            raise InvalidInputError(f"{field}.tool_call_id", None, limit)
        return ToolMessage(text, tool_call_id=message.tool_call_id, **named)
    return (HumanMessage if message.role == "user" else SystemMessage)(text, **named)


def _text(message: Message, field: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None and message.role != "assistant":
        raise InvalidInputError(f"{field}.content", None, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(message.content or ()):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            hint = "what it shows can be written out"
            raise UnsupportedContentError(f"{field}.content[{number}].type", part.type, "must be text", hint)
        if text is None:
            raise InvalidInputError(f"{field}.content[{number}].{part.type}", None, "must be a string")
        texts.append(text)
    return "".join(texts)


def _add(call: Call, answer: AIMessage) -> None:
    """Makes a call one of the message's; one whose arguments are no JSON object is told of as text."""
    name, written = call.function.name, call.function.arguments
    try:
        arguments = from_json(written or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        answer.tool_calls.append(tool_call(name=name, args=arguments, id=call.id))
    else:
        answer.invalid_tool_calls.append(
            invalid_tool_call(name=name, args=written, id=call.id, error="its arguments are no JSON object")
        )
