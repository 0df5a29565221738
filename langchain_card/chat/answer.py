"""An answer in LangChain's form: chunks, usage, metadata, time-outs and cancellation."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCallChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_card.chat.reasoning import Thoughts, hidden_marks, thinking_of
from langchain_card.core.messages import TokenLogprob
from langchain_card.core.request import FinishReason, RequestStats, SamplingParams
from langchain_card.engine.generation import Completion, Generation
from langchain_card.errors import GenerationAbortedError, GenerationTimeoutError
from langchain_card.models.tokenizer import token_bytes
from langchain_card.text.call_reader import CallPart, CallReader, Part
from langchain_card.text.detokenizer import Piece
from langchain_card.text.prompt import BEYOND_REPAIR
from langchain_card.text.tool_grammar import AnswerShape

log = logging.getLogger(__name__)


class Abortable(Protocol):
    """Work of the engine that ends when nothing waits for it."""

    def abort(self, error: BaseException | None = None) -> None:
        """End the work; `error` is raised to whoever waits for it."""


SHORTEN = "lower max_tokens"


@contextmanager
def consuming(generation: Abortable, timeout: float | None, shorten: str = SHORTEN) -> Iterator[None]:
    """Abort the request if the block is left before the answer's end, or after `timeout` seconds.

    `shorten` is the error's hint on what would take less time.
    """
    timer = threading.Timer(timeout, _expire, (generation, timeout, shorten)) if timeout is not None else None
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
def consuming_in_task(generation: Abortable, timeout: float | None, shorten: str = SHORTEN) -> Iterator[None]:
    """Abort the request as `consuming` does, on an event loop and without a thread.

    It also aborts when the task that entered the block is cancelled: LangChain's event stream may drop the generator
    of a cancelled task without closing it, so that only a garbage collection would run the `finally` here.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout, _expire, generation, timeout, shorten) if timeout is not None else None
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


def _expire(generation: Abortable, timeout: float, shorten: str) -> None:
    limit = "the answer was not complete after so many seconds"
    generation.abort(GenerationTimeoutError("timeout", timeout, limit, f"raise timeout or {shorten}"))


class AnswerConsumer:
    """A consumer of one or several answers; when it leaves, all of them are aborted.

    Attributes:
        generations: the answers that the engine has accepted.
    """

    def __init__(self) -> None:
        self._left = False
        self.generations: list[Generation] = []

    def reads(self, generation: Generation) -> None:
        """Add an answer; it is aborted at once if the consumer has left."""
        self.generations.append(generation)
        if self._left:
            self.leave()

    def leave(self) -> None:
        """Abort all answers. Callable on any thread."""
        self._left = True
        for generation in [*self.generations]:
            generation.abort(GenerationAbortedError("request", generation.request.request_id, "its reader has left"))


class Answer:
    """Messages and chunks made from a generation.

    Args:
        generation: the source of the answer's text.
        model: name of the target, for metadata.
        shape: the form that the answer has.
        called: time of the call, by `time.perf_counter`, which is also the engine's clock.
        load_time: seconds that the call waited for weights.
    """

    def __init__(
        self, generation: Generation, model: str, shape: AnswerShape, called: float, load_time: float = 0.0
    ) -> None:
        self.generation, self.model = generation, model
        self._called, self._load_time = called, load_time
        self._tokenizer = generation.tokenizer
        self._thoughts: Thoughts | None = None
        self._marks: dict[int, str] = {}  # marks of thoughts that are control tokens
        self._must_call = shape.must_call
        self._reader = CallReader(shape.names, bare=shape.is_free) if shape.tools else None
        self._document = shape.answer["function"]["name"] if shape.answer is not None else None
        self._in_document = False  # the call being read is the document: its arguments are the answer's text
        self._thought, self._content = "", ""
        self._calls: list[ToolCallChunk] = []
        if (thinking := thinking_of(self._tokenizer, generation.request.prompt_ids)) != "never":
            self._thoughts, self._marks = Thoughts(begun=thinking == "begun"), hidden_marks(self._tokenizer)

    def chunk(self, piece: Piece) -> ChatGenerationChunk:
        """Return the chunk for one token of a stream; it may be empty."""
        message = self._take(piece)
        if piece.logprob is not None:
            message.response_metadata = _logprobs([piece.token_id], [piece.logprob], self._tokenizer)
        return ChatGenerationChunk(message=message)

    def last_chunk(self) -> ChatGenerationChunk:
        """Return the last chunk of a stream, with usage and metadata: LangChain adds up those of all chunks."""
        message, completion = self._rest(), self.generation.completion()
        if self._incomplete(completion):
            rest = tool_call_chunk(args=BEYOND_REPAIR, index=self._calls[-1]["index"])
            message += AIMessageChunk(content="", tool_call_chunks=[rest])
        message.chunk_position = "last"
        message.usage_metadata, message.response_metadata = self._usage(completion), self._metadata(completion)
        return ChatGenerationChunk(message=message)

    def result(self) -> ChatResult:
        """Return the whole answer of a generation that has ended."""
        completion = self.generation.completion()
        for piece in completion.pieces:
            self._take(piece)
        self._rest()
        metadata = self._metadata(completion)
        if completion.logprobs:
            metadata |= _logprobs(completion.token_ids, completion.logprobs, self._tokenizer)
        calls = self._parsed_calls(completion)
        message = AIMessage(
            content=self._content,
            additional_kwargs=_reasoning(self._thought),
            tool_calls=calls.tool_calls,
            invalid_tool_calls=[_invalid(call, self._incomplete(completion)) for call in calls.invalid_tool_calls],
            usage_metadata=self._usage(completion),
            response_metadata=metadata,
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _take(self, piece: Piece) -> AIMessageChunk:
        """Split a piece of the answer into thought, text and calls."""
        text = piece.text + self._marks.get(piece.token_id, "")
        thought, content = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return self._message(thought, [content] if self._reader is None else self._reader.push(content))

    def _rest(self) -> AIMessageChunk:
        """Return what was held back until the end."""
        thought, content = ("", "") if self._thoughts is None else self._thoughts.finish()
        parts = [content] if self._reader is None else [*self._reader.push(content), *self._reader.finish()]
        return self._message(thought, parts)

    def _message(self, thought: str, parts: Sequence[Part]) -> AIMessageChunk:
        parts = [self._as_text(part) for part in parts]
        content = "".join(part for part in parts if isinstance(part, str))
        self._thought, self._content = self._thought + thought, self._content + content
        calls = [self._call(part) for part in parts if isinstance(part, CallPart)]
        return AIMessageChunk(content=content, additional_kwargs=_reasoning(thought), tool_call_chunks=calls)

    def _as_text(self, part: Part) -> Part:
        """Return the arguments of the call that holds the answer's document as text; leave other parts as they are."""
        if isinstance(part, CallPart) and part.name:
            self._in_document = part.name == self._document
        return part.arguments if isinstance(part, CallPart) and self._in_document else part

    def _call(self, part: CallPart) -> ToolCallChunk:
        """Return a chunk of a call, with the index of its block: LangChain merges blocks of equal index."""
        name, call_id = part.name or None, part.call_id or None
        if name is not None:
            index = part.number + bool(self._thought) + bool(self._content)
            self._calls.append(tool_call_chunk(name=name, args="", id=call_id, index=index))
        call = self._calls[part.number]
        call["args"] = (call["args"] or "") + part.arguments
        return tool_call_chunk(name=name, args=part.arguments, id=call_id, index=call["index"])

    def _incomplete(self, completion: Completion) -> str:
        """Return why the last call must not be executed, if it was cut off and no call was required, else ""."""
        if self._reader is None or not self._calls or self._in_document:
            return ""
        if self._reader.within_call:
            return "a stop string cut it off"
        early = completion.stats.closed and not self._must_call
        return f"max_tokens = {self.generation.request.params.max_tokens} ended it early" if early else ""

    def _parsed_calls(self, completion: Completion) -> AIMessageChunk:
        """Return the calls as LangChain parses them from a stream."""
        calls = [call.copy() for call in self._calls]
        if self._incomplete(completion):
            calls[-1]["args"] = (calls[-1]["args"] or "") + BEYOND_REPAIR
        return AIMessageChunk(content="", tool_call_chunks=calls)

    def _metadata(self, completion: Completion) -> dict[str, Any]:
        called = bool(self._parsed_calls(completion).tool_calls) and completion.finish_reason is FinishReason.STOP
        if completion.stats.closed:
            most = self.generation.request.params.max_tokens
            log.warning(
                "max_tokens = %d ended an answer early: it obeys its schema, but says less than it should", most
            )
        return {
            "model_name": self.model,
            "model_provider": "card",
            "finish_reason": "tool_calls" if called else completion.finish_reason.value,
            "card": statistics(completion.stats, self.generation.request.params, self._called, self._load_time),
        }

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


def _invalid(call: InvalidToolCall, reason: str) -> InvalidToolCall:
    """Return an invalid call with the arguments as the model wrote them, and the reason."""
    args = (call["args"] or "").removesuffix(BEYOND_REPAIR)
    return invalid_tool_call(name=call["name"], args=args, id=call["id"], error=reason or "its arguments are too long")


def _reasoning(thought: str) -> dict[str, Any]:
    """Return the `additional_kwargs` from which LangChain makes `reasoning` blocks."""
    return {"reasoning_content": thought} if thought else {}


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], tokenizer: Any) -> dict[str, Any]:
    """Return `response_metadata["logprobs"]`, in the shape that LangChain's OpenAI model gives it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token_id)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}

    content = [
        {**entry(token_id, logprob.logprob), "top_logprobs": [entry(*pair) for pair in logprob.top]}
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return {"logprobs": {"content": content}}


def statistics(stats: RequestStats, params: SamplingParams, called: float, load_time: float = 0.0) -> dict[str, Any]:
    """Return `response_metadata["card"]`, in the terms of CONTRIBUTING.md; times in seconds.

    Args:
        stats: of the request.
        params: of the request.
        called: time of the call, by the engine's clock.
        load_time: seconds that the call waited for weights.
    """
    seconds = stats.decode_seconds
    return {
        "schedule": stats.schedule,
        **({"adapter": params.adapter} if params.adapter else {}),
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "mean_accepted_length": round(stats.mean_accepted_length, 4),
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "hit_rate": round(stats.hit_rate, 4),
        "rounds": stats.rounds,
        "mean_window": round(stats.mean_window, 4),
        "mean_draft_width": round(stats.mean_draft_width, 4),
        "closed": stats.closed,
        "lossy": stats.lossy,
        **({"rescued": stats.rescued} if stats.lossy else {}),
        **({"resumed": dict(stats.resumed)} if stats.resumed else {}),
        "mean_batch_size": round(stats.mean_batch_size, 4),
        "waited": round(stats.waited / seconds, 4) if seconds else 0.0,
        "verified_by_source": dict(stats.verified_by_source),
        "accepted_by_source": dict(stats.accepted_by_source),
        "speculative_decoding": stats.speculative_decoding,
        "draft_busy": round(stats.draft_busy / seconds, 4) if seconds else 0.0,
        "target_busy": round(stats.target_busy / seconds, 4) if seconds else 0.0,
        "time_to_first_token": round(stats.first_token - called - load_time, 4),
        "load_time": round(load_time, 4),
        "seed": params.seed,
    }
