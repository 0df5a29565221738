"""Responses as OpenAI's objects: `chat.completion`, its chunks, and their parts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk

from langchain_card import __version__
from langchain_card.chat.answer import AnswerConsumer
from langchain_card.core.request import RequestStats
from langchain_card.text.detokenizer import Piece


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields that all objects of an answer begin with.

    Args:
        kind: the field `object`.
        prefix: prefix of the id.
        model: name of the model as the client knows it.
    """
    ids = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
    return {**ids, "system_fingerprint": f"langchain-card-{__version__}"}


def usage(counts: UsageMetadata | None) -> dict[str, Any] | None:
    """Return the token counts of an answer as OpenAI's `usage`."""
    if counts is None:
        return None
    return {
        "prompt_tokens": counts["input_tokens"],
        "completion_tokens": counts["output_tokens"],
        "total_tokens": counts["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": counts.get("input_token_details", {}).get("cache_read", 0)},
        "completion_tokens_details": {
            "reasoning_tokens": counts.get("output_token_details", {}).get("reasoning", 0),
        },
    }


def chat_completion(answer: AIMessage, model: str) -> dict[str, Any]:
    """Return a complete answer as an object, without a tool call that a stop string has cut off."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    message |= _thought(answer)
    if answer.tool_calls:
        calls = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in answer.tool_calls]
        message |= {"content": message["content"] or None, "tool_calls": [_call(*call) for call in calls]}
    metadata = answer.response_metadata
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(metadata),
        "finish_reason": metadata["finish_reason"],
    }
    whole = {**head("chat.completion", "chatcmpl", model), "choices": [choice], "usage": usage(answer.usage_metadata)}
    return {**whole, **figures(metadata["card"])}


class ChatChunks:
    """A converter from the chunks of an answer to the objects of a stream.

    Args:
        model: name of the model as the client knows it.
        include_usage: add an object with token counts at the end.
        consumer: consumer of the answer, if each object shall describe its tokens.
    """

    def __init__(self, model: str, include_usage: bool, consumer: AnswerConsumer | None = None) -> None:
        self._head = head("chat.completion.chunk", "chatcmpl", model) | ({"usage": None} if include_usage else {})
        self._include_usage, self._consumer = include_usage, consumer
        self._begun = False
        self._calls: list[int] = []
        self._num_pieces = 0

    def __call__(self, chunk: AIMessageChunk | Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """Yield the objects of a chunk, none if it adds nothing; or one with how much of a long prompt was read."""
        if not self._begun:
            self._begun = True
            yield self._object({"role": "assistant", "content": ""}, None, self._card(0))
        if isinstance(chunk, Mapping):
            yield self._object({}, None, {"card": {**self._card(0).get("card", {}), "reading": chunk}})
            return
        last = chunk.chunk_position == "last"
        delta, logprobs, card = self._delta(chunk), _logprobs(chunk.response_metadata), self._card(int(not last))
        if delta or logprobs or (card and not last):
            yield self._object(delta or {"content": ""}, logprobs, {} if last else card)
        if last:
            metadata = chunk.response_metadata
            whole = figures({**card.get("card", {}), **metadata["card"]})
            yield self._object({}, None, whole, metadata["finish_reason"])
            if self._include_usage:
                yield {**self._head, "choices": [], "usage": usage(chunk.usage_metadata)}

    def _object(
        self, delta: Any, logprobs: Any = None, extra: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **(extra or {})}

    def _delta(self, chunk: AIMessageChunk) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for part in chunk.tool_call_chunks:
            self._add(part, calls)
        text = {"content": chunk.text} if chunk.text else {}
        return {**_thought(chunk), **text, **({"tool_calls": calls} if calls else {})}

    def _add(self, part: ToolCallChunk, calls: list[dict[str, Any]]) -> None:
        """Add a piece of a tool call under its number among the calls; LangChain numbers all blocks."""
        index, arguments = int(part["index"] or 0), part["args"] or ""
        if index not in self._calls:
            self._calls.append(index)
        number = self._calls.index(index)
        if part["name"]:
            calls.append({"index": number, **_call(part["id"], part["name"], arguments)})
        elif calls and calls[-1]["index"] == number:
            calls[-1]["function"]["arguments"] += arguments
        else:
            calls.append({"index": number, "function": {"arguments": arguments}})

    def _card(self, num_pieces: int) -> dict[str, Any]:
        """Describe the next `num_pieces` pieces: every chunk holds one, the last chunk none."""
        if self._consumer is None or not self._consumer.generations:
            return {}
        (generation,) = self._consumer.generations
        if generation.stats is None:
            return {}
        pieces = generation.pieces[self._num_pieces : self._num_pieces + num_pieces]
        self._num_pieces += num_pieces
        return {"card": progress(pieces, generation.stats)}


def figures(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of an answer as fields of a response: `card`, and vLLM's `metrics`."""
    own = {name: value for name, value in card.items() if name != "speculative_decoding"}
    return {"card": own, "metrics": {"speculative_decoding": card["speculative_decoding"]}}


def progress(pieces: Sequence[Piece], stats: RequestStats) -> dict[str, Any]:
    """Describe tokens of a stream: the source of each, and counts and seconds since the first token.

    Args:
        pieces: the tokens.
        stats: statistics of the answer so far.
    """
    tokens = [{"text": piece.text, "source": piece.source} for piece in pieces]
    counts = {
        "rounds": stats.rounds,
        "output_tokens": stats.output_tokens,
        "accepted": stats.accepted,
        "mean_accepted_length": round(stats.mean_accepted_length, 4),
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "hit_rate": round(stats.hit_rate, 4),
        "schedule": stats.schedule,
        "lossy": stats.lossy,
        **({"rescued": stats.rescued} if stats.lossy else {}),
        **({"resumed": dict(stats.resumed)} if stats.resumed else {}),
        "seconds": round(stats.seconds(time.perf_counter()), 4),
        "target_busy_seconds": round(stats.target_busy, 4),
        "draft_busy_seconds": round(stats.draft_busy, 4),
    }
    return {"tokens": tokens, "stats": counts}


def _call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(message: AIMessage) -> dict[str, Any]:
    thought = message.additional_kwargs.get("reasoning_content")
    return {"reasoning_content": thought} if thought else {}


def _logprobs(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    return {**metadata["logprobs"], "refusal": None} if "logprobs" in metadata else None
