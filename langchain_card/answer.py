"""A running answer as LangChain sees it: chunks, usage, metadata, time-outs and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_card.core.messages import TokenLogprob
from langchain_card.detokenizer import Piece, token_bytes
from langchain_card.engine.generation import Completion, Generation
from langchain_card.errors import GenerationTimeoutError


@contextmanager
def consuming(generation: Generation, timeout: float | None) -> Iterator[None]:
    """Aborts the request when the block is left before its end, or after `timeout` seconds."""
    timer = threading.Timer(timeout, _expire, (generation, timeout)) if timeout is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        generation.abort()


@contextmanager
def consuming_in_task(generation: Generation, timeout: float | None) -> Iterator[None]:
    """The same on an event loop, without a thread.

    It also aborts when the task that entered the block is cancelled: LangChain's event stream may drop the generator
    of a cancelled task without closing it, and only a garbage collection would run the `finally` here.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout, _expire, generation, timeout) if timeout is not None else None
    task = asyncio.current_task()

    def abort_if_cancelled(done: asyncio.Task[Any]) -> None:
        if done.cancelled():
            generation.abort()

    if task is not None:
        task.add_done_callback(abort_if_cancelled)
    try:
        yield
    finally:
        if task is not None:
            task.remove_done_callback(abort_if_cancelled)
        if timer is not None:
            timer.cancel()
        generation.abort()


def _expire(generation: Generation, timeout: float) -> None:
    hint = "raise timeout or lower max_tokens"
    limit = "the answer was not complete after so many seconds"
    generation.abort(GenerationTimeoutError("timeout", timeout, limit, hint))


def chunk_of(piece: Piece, generation: Generation) -> ChatGenerationChunk:
    """One token of a stream; its text may be empty."""
    metadata = {} if piece.logprob is None else _logprobs([piece.token_id], [piece.logprob], generation.tokenizer)
    return ChatGenerationChunk(message=AIMessageChunk(content=piece.text, response_metadata=metadata))


def last_chunk(generation: Generation, model: str) -> ChatGenerationChunk:
    """The end of a stream: no text; usage and metadata once, because LangChain adds those of all chunks up."""
    completion = generation.completion()
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        usage_metadata=_usage(generation, completion),
        response_metadata=_metadata(generation, completion, model),
    )
    return ChatGenerationChunk(message=message)


def chat_result(generation: Generation, model: str) -> ChatResult:
    """The whole answer."""
    completion = generation.completion()
    metadata = _metadata(generation, completion, model)
    if completion.logprobs:
        metadata |= _logprobs(completion.token_ids, completion.logprobs, generation.tokenizer)
    usage = _usage(generation, completion)
    message = AIMessage(content=completion.text, usage_metadata=usage, response_metadata=metadata)
    return ChatResult(generations=[ChatGeneration(message=message)])


def _usage(generation: Generation, completion: Completion) -> UsageMetadata:
    num_prompt, num_output = len(generation.request.prompt_ids), completion.stats.output_tokens
    return UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=num_output,
        total_tokens=num_prompt + num_output,
        input_token_details={"cache_read": completion.stats.cached_tokens},
    )


def _metadata(generation: Generation, completion: Completion, model: str) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_provider": "card",
        "finish_reason": completion.finish_reason.value,
        "card": _statistics(completion, generation.request.params.seed),
    }


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], tokenizer: Any) -> dict[str, Any]:
    """What `response_metadata["logprobs"]` holds, in the shape that LangChain's OpenAI model gives it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token_id)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}

    content = [
        {**entry(token_id, of.logprob), "top_logprobs": [entry(*pair) for pair in of.top]}
        for token_id, of in zip(token_ids, logprobs, strict=True)
    ]
    return {"logprobs": {"content": content}}


def _statistics(completion: Completion, seed: int) -> dict[str, Any]:
    """What `response_metadata["card"]` holds; words as in CONTRIBUTING.md, times in seconds."""
    stats, seconds = completion.stats, completion.stats.decode_seconds
    return {
        "schedule": stats.schedule,
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "mean_accepted_length": round(stats.mean_accepted_length, 4),
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "hit_rate": round(stats.hit_rate, 4),
        "rounds": stats.rounds,
        "mean_window": round(stats.mean_window, 4),
        "mean_draft_width": round(stats.mean_draft_width, 4),
        "mean_batch_size": round(stats.mean_batch_size, 4),
        "waited": round(stats.waited / seconds, 4) if seconds else 0.0,
        "accepted_by_source": dict(stats.accepted_by_source),
        "draft_busy": round(stats.draft_busy / seconds, 4) if seconds else 0.0,
        "target_busy": round(stats.target_busy / seconds, 4) if seconds else 0.0,
        "time_to_first_token": round(stats.first_token - stats.submitted, 4),
        "seed": seed,
    }
