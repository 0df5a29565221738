"""Chat messages to prompt token ids, by the model's own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_card.errors import ContextOverflowError, InvalidInputError, UnsupportedContentError
from langchain_card.text.control_tokens import control_tokens, map_texts
from langchain_card.text.tool_form import Turn, describe_document, describe_tools, tool_form

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_REASONING = ("reasoning", "thinking", "redacted_thinking")  # the last one is encrypted: no text
_CALLS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "input_json_delta", "function_call")
_MADE = ("tool_call", "tool_use")
_TEXTS = ("content", "reasoning_content")

MAX_CHARS_PER_TOKEN = 64
"""Characters that the tokens of a context may stand for on average; ordinary text has three to five."""

PIECE_CHARS = 1 << 14
"""Characters of a piece; a longer text is read in pieces until it is clear that it cannot fit."""
_CUT_TOKENS = 256
"""Tokens that a cut between two pieces may add: a token that is cut counts as several."""

BEYOND_REPAIR = ']"]'
"""Suffix for the arguments of a call that must not be executed; in a stream LangChain would complete them."""


def to_conversation(messages: Sequence[BaseMessage], model: str) -> list[Turn]:
    """Convert messages to the turns that chat templates take.

    Text blocks are joined. Thoughts of an AI message become `reasoning_content`, and its blocks that repeat
    `tool_calls` are left out, so that answers stored with `output_version="v1"` can be sent back; invalid calls become
    text. Results of tools in a human message become turns of their own, before it. Templates have no place for a
    result's status, so an error starts with the word "Error".

    Args:
        messages: system, human, AI, tool and chat messages; text only.
        model: name of the model, for errors.

    Raises:
        InvalidInputError: there are no messages, or a message is of another kind.
        UnsupportedContentError: content is not text.
    """
    if not messages:
        raise InvalidInputError("messages", [], "must hold at least one message", "pass a string or a list of messages")
    return [_turn(part, model) for message in messages for part in _parts(message)]


def session_of(conversation: Sequence[Turn]) -> str:
    """Return a name for a conversation, which stays while it grows: a hash of its turns up to the user's first one."""
    code = hashlib.sha256()
    for turn in conversation:
        code.update(f"{turn['role']}\n{turn.get('content')}\n".encode(errors="replace"))
        if turn["role"] == "user":
            break
    return code.hexdigest()


def encode(
    conversation: Sequence[Turn],
    tokenizer: Any,
    model: str,
    tools: Sequence[dict[str, Any]] = (),
    document: Mapping[str, Any] | None = None,
    max_len: int | None = None,
    *,
    planned: bool = True,
) -> list[int]:
    """Return the prompt token ids of a conversation, the header of the answer included.

    Only the template writes control tokens: text that spells one is read as ordinary characters. If the template
    refuses the conversation, adjacent turns of one role are merged; then system turns also become the user's.

    Args:
        conversation: a result of `to_conversation`.
        tokenizer: a tokenizer of transformers, with a chat template.
        model: name of the model, for errors.
        tools: tools that the model may call, in OpenAI's form; `text/tool_form.py` writes them if the template cannot.
        document: schema of the document that the answer must be, if any.
        max_len: tokens of the context; a text that cannot fit is refused before all its tokens are counted.
        planned: whether the answer may be text beside calls, see `tool_form.describe_tools`.

    Raises:
        ContextOverflowError: the text cannot fit, see `check_length`.
        InvalidInputError: there is no chat template, it refuses the conversation, or makes control tokens of a text.
    """
    if not tokenizer.chat_template:
        hint = "use an instruct model; base models only continue text"
        raise InvalidInputError("model", model, "its tokenizer has no chat template", hint)
    refusal: TemplateError | None = None
    map_texts([list(conversation), list(tools)], _check_text)
    described = list(conversation)
    if not tool_form(tokenizer).native:
        described, tools = describe_tools(described, tools, planned=planned), ()
    if document is not None:
        described = describe_document(described, document)
    for turns in _forms(described):
        try:
            return _ids(turns, list(tools), tokenizer, model, max_len)
        except TemplateError as error:  # noqa: PERF203 - three times at most
            refusal = refusal or error
    roles, reason = [turn["role"] for turn in conversation], control_tokens(tokenizer).unmark(str(refusal))
    raise InvalidInputError("messages", roles, f"the chat template of {model} refuses them: {reason}") from refusal


def text_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text without a template; a control token that it spells is read as characters."""
    control = control_tokens(tokenizer)
    marked = control.mark(_check_text(text))
    return control.encode(marked) if marked != text else list(tokenizer.encode(text, add_special_tokens=False))


def check_size(conversation: Sequence[Turn], others: Any, max_len: int) -> None:
    """Raise if a conversation cannot fit, whatever the tokenizer, before the template or the tokenizer sees it.

    Args:
        conversation: a result of `to_conversation`.
        others: tools, schemas and other values whose texts the prompt will hold.
        max_len: tokens of the context.

    Raises:
        ContextOverflowError: there are too many messages, or too many characters (`MAX_CHARS_PER_TOKEN`).
    """
    if len(conversation) > max_len:
        limit = f"the context holds {max_len:,} tokens, and each message takes one at least"
        raise ContextOverflowError("messages", f"{len(conversation):,} messages", limit, "leave out old ones")
    _check_chars(num_chars([*conversation, others]), max_len)


def check_length(text: str, tokenizer: Any, max_len: int) -> None:
    """Raise if the tokens of a text cannot fit, whatever the tokenizer, before most of them are counted.

    A text passes if the context has a token for every `MAX_CHARS_PER_TOKEN` characters and for every token of its
    pieces, except those that the cuts may have added. The caller compares the exact number. So a long text that fits is
    tokenized twice: tokens at the cuts are not those of the whole text.

    Args:
        text: text for the tokenizer.
        tokenizer: a tokenizer of transformers.
        max_len: tokens of the context.

    Raises:
        ContextOverflowError: the text has too many characters or tokens.
    """
    _check_chars(len(text), max_len)
    if len(text) <= PIECE_CHARS:
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        num_tokens += len(tokenizer.encode(piece, add_special_tokens=False, verbose=False))
        if num_tokens > max_len + start // PIECE_CHARS * _CUT_TOKENS:
            limit = f"the first {start + len(piece):,} are {num_tokens:,} tokens, and the context holds {max_len:,}"
            raise ContextOverflowError("prompt", f"{len(text):,} characters", limit, _SHORTEN)


_SHORTEN = "shorten the prompt or raise max_model_len"


def _check_chars(count: int, max_len: int) -> None:
    if count > max_len * MAX_CHARS_PER_TOKEN:
        limit = f"the context holds {max_len:,} tokens, and up to {MAX_CHARS_PER_TOKEN} characters for each"
        raise ContextOverflowError("prompt", f"{count:,} characters", limit, _SHORTEN)


def num_chars(value: Any) -> int:
    """Count the characters of the texts in a value of dicts, lists, tuples and others, and one for each other item."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return 1 + sum(map(num_chars, value)) if isinstance(value, (list, tuple)) else 1


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError("messages", text, f"must be text ({error.reason})", "decode it otherwise") from error
    return text


# Messages to turns.


def _parts(message: BaseMessage) -> list[BaseMessage]:
    """Split a human message with results of tools into these and the rest; return other messages as they are."""
    if not isinstance(message, HumanMessage) or isinstance(message.content, str):
        return [message]
    results, others = list[Any](), list[Any]()
    for block in message.content:
        is_result = isinstance(block, dict) and block.get("type") == "tool_result"
        (results if is_result else others).append(block)
    tools = [
        ToolMessage(
            block.get("content") or "",
            tool_call_id=block.get("tool_use_id", ""),
            status="error" if block.get("is_error") else "success",
        )
        for block in results
    ]
    return [*tools, message.model_copy(update={"content": others})] if others or not results else [*tools]


def _turn(message: BaseMessage, model: str) -> Turn:
    turn: Turn = {"role": _role(message)}
    blocks = [message.content] if isinstance(message.content, str) else message.content
    read = [_read(block, turn["role"], model) for block in blocks]
    turn["content"] = "".join(text for text, _ in read)
    if message.name:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.status == "error" and not turn["content"].lstrip().lower().startswith("error"):
            turn["content"] = f"Error: {turn['content']}" if turn["content"] else "Error"
    if isinstance(message, AIMessage):
        thought = "".join(thought for _, thought in read) or message.additional_kwargs.get("reasoning_content")
        turn |= {"reasoning_content": str(thought)} if thought else {}
        calls = _calls(message)
        turn |= {"tool_calls": calls} if calls else {}
        turn["content"] = "\n".join(filter(None, [turn["content"], *map(_call_text, message.invalid_tool_calls)]))
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise InvalidInputError("messages", message.type, "must be system, human, ai, tool or chat messages")


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}


def _call_text(call: InvalidToolCall) -> str:
    name, arguments = json.dumps(call["name"], ensure_ascii=False), (call["args"] or "").removesuffix(BEYOND_REPAIR)
    return f'{{"name": {name}, "arguments": {arguments}'


def _calls(message: AIMessage) -> list[dict[str, Any]]:
    """Return the calls of a message, then those that only its content blocks hold."""
    known = {call["id"] for call in message.tool_calls}
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") in _MADE]
    others = [
        ToolCall(name=str(block.get("name")), args=block.get("args") or block.get("input") or {}, id=block.get("id"))
        for block in blocks
        if block.get("id") not in known
    ]
    return [_call(call) for call in (*message.tool_calls, *others)]


def _read(block: str | dict[Any, Any], role: str, model: str) -> tuple[str, str]:
    """Return a block's text and thought. A target that reads more than text would be supported here."""
    if isinstance(block, str):
        return block, ""
    kind, by_model = str(block.get("type")), role == "assistant"
    if kind == "text" and isinstance(block.get("text"), str):
        return block["text"], ""
    if by_model and kind in _REASONING:
        return "", str(block.get("reasoning") or block.get("thinking") or "")
    if by_model and (kind in _CALLS or kind.startswith("server_tool_")):
        return "", ""
    hint = "pass text blocks; what they say can be written out"
    raise UnsupportedContentError("content block", block.get("type"), f"{model} reads text only", hint)


# Turns to token ids.


def _ids(turns: list[Turn], tools: list[dict[str, Any]], tokenizer: Any, model: str, max_len: int | None) -> list[int]:
    """Return token ids, after a check that their control tokens are those of the same turns with harmless texts."""
    control = control_tokens(tokenizer)

    def apply(turns: list[Turn], tools: list[dict[str, Any]], tokenize: bool = False) -> Any:
        return tokenizer.apply_chat_template(
            turns, tools=tools or None, add_generation_prompt=True, tokenize=tokenize, return_dict=False
        )

    if max_len is not None:
        check_length(apply(turns, tools), tokenizer, max_len)
    marked = map_texts([turns, tools], control.mark)
    ids = list(apply(turns, tools, tokenize=True)) if marked == [turns, tools] else control.encode(apply(*marked))
    harmless, harmless_tools = map_texts(marked, control.defuse)
    for turn in harmless:
        turn |= {key: control.fence(turn[key]) for key in _TEXTS if isinstance(turn.get(key), str)}
    if control.among(ids) != control.found_in(apply(harmless, harmless_tools)):
        limit = f"the chat template of {model} makes control tokens of their text"
        raise InvalidInputError("messages", [turn["role"] for turn in turns], limit, "leave out what looks like one")
    return ids


def _forms(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Yield equivalent conversations, in the order in which they are tried."""
    yield turns
    yield _merged(turns)
    yield _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])


def _merged(turns: list[Turn]) -> list[Turn]:
    """Merge adjacent turns of one role; results of tools stay apart, because each belongs to a call."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and turn["role"] == merged[-1]["role"] != "tool":
            merged[-1] = _joined(merged[-1], turn)
        else:
            merged.append(turn)
    return merged


def _joined(first: Turn, second: Turn) -> Turn:
    """Join two turns of one role; a name stays if both have it."""
    both = {**first, **second}
    for key in _TEXTS:
        if key in both:
            both[key] = "\n\n".join(turn[key] for turn in (first, second) if turn.get(key))
    if "tool_calls" in both:
        both["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if first.get("name") != second.get("name"):
        del both["name"]
    return both
