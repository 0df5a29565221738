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

from langchain_card.chat.reasoning import OPEN, Thoughts, thinks
from langchain_card.core.messages import TokenLogprob
from langchain_card.detokenizer import Piece, token_bytes
from langchain_card.engine.generation import Completion, Generation
from langchain_card.errors import GenerationTimeoutError

_MARK_TOKENS = 8
"""Tokens at the end of a prompt that may be the mark of a thought."""


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


class Answer:
    """An answer that is being written.

    Args:
        generation: which writes it.
        model: name of the target.
    """

    def __init__(self, generation: Generation, model: str) -> None:
        self.generation, self.model = generation, model
        self._tokenizer = generation.tokenizer
        self._thoughts: Thoughts | None = None
        self._thought, self._said = "", ""
        if thinks(self._tokenizer):
            end = self._tokenizer.decode(generation.request.prompt_ids[-_MARK_TOKENS:])
            self._thoughts = Thoughts(begun=end.rstrip().endswith(OPEN))

    def take(self, piece: Piece) -> tuple[str, str]:
        """What is thought and what is said in a piece."""
        thought, said = ("", piece.text) if self._thoughts is None else self._thoughts.push(piece.text)
        self._thought += thought
        self._said += said
        return thought, said

    def chunk(self, piece: Piece) -> ChatGenerationChunk:
        """One token of a stream; its text may be empty."""
        thought, said = self.take(piece)
        metadata = {} if piece.logprob is None else _logprobs([piece.token_id], [piece.logprob], self._tokenizer)
        message = AIMessageChunk(content=said, additional_kwargs=_reasoning(thought), response_metadata=metadata)
        return ChatGenerationChunk(message=message)

    def last_chunk(self) -> ChatGenerationChunk:
        """The end of a stream: usage and metadata once, because LangChain adds those of all chunks up."""
        completion = self.generation.completion()
        thought, said = self._rest()
        message = AIMessageChunk(
            content=said,
            additional_kwargs=_reasoning(thought),
            chunk_position="last",
            usage_metadata=self._usage(completion),
            response_metadata=_metadata(self.generation, completion, self.model),
        )
        return ChatGenerationChunk(message=message)

    def result(self) -> ChatResult:
        """The whole answer of a generation that ended."""
        completion = self.generation.completion()
        for piece in completion.pieces:
            self.take(piece)
        thought, said = self._rest()
        metadata = _metadata(self.generation, completion, self.model)
        if completion.logprobs:
            metadata |= _logprobs(completion.token_ids, completion.logprobs, self._tokenizer)
        message = AIMessage(
            content=self._said + said,
            additional_kwargs=_reasoning(self._thought + thought),
            usage_metadata=self._usage(completion),
            response_metadata=metadata,
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _rest(self) -> tuple[str, str]:
        return ("", "") if self._thoughts is None else self._thoughts.finish()

    def _usage(self, completion: Completion) -> UsageMetadata:
        num_prompt, num_output = len(self.generation.request.prompt_ids), completion.stats.output_tokens
        usage = UsageMetadata(
            input_tokens=num_prompt,
            output_tokens=num_output,
            total_tokens=num_prompt + num_output,
            input_token_details={"cache_read": completion.stats.cached_tokens},
        )
        if self._thoughts is not None:
            usage["output_token_details"] = {"reasoning": self._thoughts.num_tokens}
        return usage


def _reasoning(thought: str) -> dict[str, Any]:
    """Where LangChain looks for thoughts; it makes `reasoning` blocks of them."""
    return {"reasoning_content": thought} if thought else {}


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
