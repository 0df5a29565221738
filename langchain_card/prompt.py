"""Chat messages to prompt token ids, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_card.errors import InvalidInputError

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}


def to_conversation(messages: Sequence[BaseMessage], model: str) -> list[dict[str, Any]]:
    """Messages in the form that chat templates take.

    Args:
        messages: system, human, AI, tool and chat messages; text only.
        model: its name, for errors.

    Raises:
        InvalidInputError: no messages, a message of another kind, or content that is not text.
    """
    if not messages:
        raise InvalidInputError("messages", [], "must hold at least one message", "pass a string or a list of messages")
    return [_turn(message, model) for message in messages]


def encode(conversation: list[dict[str, Any]], tokenizer: Any, model: str) -> list[int]:
    """Prompt token ids of a conversation, the header of the answer included.

    Args:
        conversation: of `to_conversation`.
        tokenizer: of transformers, with a chat template.
        model: its name, for errors.

    Raises:
        InvalidInputError: there is no chat template, or it refuses the conversation.
    """
    if not tokenizer.chat_template:
        hint = "use an instruct model; base models only continue text"
        raise InvalidInputError("model", model, "its tokenizer has no chat template", hint)
    try:
        return list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))
    except TemplateError as error:
        roles = [turn["role"] for turn in conversation]
        raise InvalidInputError("messages", roles, f"the chat template of {model} refuses them: {error}") from error


def _turn(message: BaseMessage, model: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": _text(message, model)}
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise InvalidInputError("messages", message.type, "must be system, human, ai, tool or chat messages")


def _text(message: BaseMessage, model: str) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block, model) for block in message.content)


def _block_text(block: str | dict[Any, Any], model: str) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise InvalidInputError("content block", block.get("type"), f"{model} reads text only", "pass text blocks")
