"""`Generation`: the consumer of a request, which the caller reads."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.core.messages import Emit, Reading, TokenLogprob
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.text.detokenizer import Detokenizer, Piece

_WAKE_SECONDS = 0.1
"""Seconds after which a blocked reader wakes to handle signals such as Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    Attributes:
        text: without special tokens and stop strings.
        token_ids: tokens of the answer, end of text included.
        finish_reason: why it ended.
        stats: counts and times.
        logprobs: log-probabilities of the tokens; empty unless requested.
        pieces: the tokens one by one, each with the text that it completed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] = ()
    pieces: tuple[Piece, ...] = ()


class Generation:
    """An answer that is being written. Iterate over it, with `for` or `async for`, from any thread or event loop.

    Args:
        request: the request.
        detokenizer: of this answer.
        abort: called when the reader gives up.
        pause: called with True when `max_unread` pieces wait for the reader, with False when it has caught up.
        max_unread: see `pause`.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        abort: Callable[[], None],
        pause: Callable[[bool], None] = lambda _: None,
        max_unread: int = 1024,
    ) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._abort = abort
        self._pause = pause
        self._max_unread = max_unread
        self._paused = False
        self._ready = threading.Condition()
        self._ended = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self._end_wakers: list[Callable[[], None]] = []
        self._pieces: deque[Piece] = deque()
        self._taken: list[Piece] = []
        self._reason: FinishReason | None = None
        self._stats: RequestStats | None = None
        self._reading: Reading | None = None
        self._error: BaseException | None = None
        self._abort_error: BaseException | None = None

    # The engine's side.

    def watch(self, stats: RequestStats) -> None:
        """Note the start of the request; the engine goes on writing to `stats`."""
        self._stats = stats

    def read(self, reading: Reading) -> None:
        """Note how much of a long text was read."""
        with self._ready:
            self._reading = reading
            self._wake()

    def push(self, emit: Emit) -> int | None:
        """Take committed tokens; return the number of tokens that count if a stop string was met, else None."""
        pieces = self._detokenizer.push(emit.token_ids, emit.sources, emit.logprobs)
        with self._ready:
            self._pieces += pieces
            self._taken += pieces
            self._check_pace()
            self._wake()
        return self._detokenizer.num_tokens if self._detokenizer.stopped else None

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """End the answer. The last call for a request that ended."""
        rest = self._detokenizer.finish()
        with self._ready:
            if rest and self._pieces:
                last = self._pieces.pop()
                self._pieces.append(replace(last, text=last.text + rest))
                self._taken[-1] = self._pieces[-1]
            elif rest:
                self._pieces.append(Piece(-1, rest))
                self._taken.append(self._pieces[-1])
            self._reason = FinishReason.STOP if self._detokenizer.stopped else reason
            if self._reason is FinishReason.ABORT:
                self._error = self._abort_error
            stats.output_tokens = self._detokenizer.num_tokens
            self._stats = stats
            self._end()

    def fail(self, error: BaseException) -> None:
        """Fail with `error`. The last call for a request that the engine could not serve."""
        with self._ready:
            self._error, self._reason = error, FinishReason.ERROR
            self._end()

    def _end(self) -> None:
        self._ended.set()
        self._wakers += self._end_wakers
        self._wake()

    def _take(self) -> Piece:
        piece = self._pieces.popleft()
        self._check_pace()
        return piece

    def _check_pace(self) -> None:
        behind = len(self._pieces) >= (self._max_unread // 2 if self._paused else self._max_unread)
        if behind != self._paused and self._reason is None:
            self._paused = behind
            self._pause(behind)

    def _wake(self) -> None:
        self._ready.notify_all()
        for wake in self._wakers:
            wake()
        self._wakers.clear()

    # The reader's side.

    def readings(self) -> Iterator[Reading]:
        """Yield how much of a long text was read, as it is read, until the answer begins or ends; skips old readings.

        A text that one pass reads yields nothing. Leaving the loop early does not abort the request.
        """
        seen = None
        while True:
            with self._ready:
                while self._reading is seen and not self._pieces and self._reason is None:
                    self._ready.wait(_WAKE_SECONDS)
                if self._pieces or self._reason is not None:
                    return
                seen = self._reading
            assert seen is not None
            yield seen

    async def areadings(self) -> AsyncIterator[Reading]:
        """Yield as `readings` does, without blocking the event loop."""
        seen = None
        while (arrived := self._next_wake(self._wakers)) is not None:
            if self._reading is seen:
                await arrived
            elif (seen := self._reading) is not None:
                yield seen

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces as they are committed; leaving the loop early aborts the request."""
        try:
            while True:
                with self._ready:
                    while not self._pieces and self._reason is None:
                        self._ready.wait(_WAKE_SECONDS)
                    if not self._pieces:
                        break
                    piece = self._take()
                yield piece
            self._raise()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield pieces without blocking the event loop; uses no thread."""
        try:
            while True:
                arrived = self._next_wake(self._wakers)
                if arrived is not None:
                    await arrived
                    continue
                if not self._pieces:
                    break
                with self._ready:
                    piece = self._take()
                yield piece
            self._raise()
        finally:
            self.abort()

    def abort(self, error: BaseException | None = None) -> None:
        """End the request if it still runs; its tokens so far remain.

        Args:
            error: raised to the reader, if given.
        """
        if self._reason is None:
            self._abort_error = self._abort_error or error
            self._abort()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the answer's token ids."""
        return self._detokenizer.tokenizer

    @property
    def stats(self) -> RequestStats | None:
        """Counts and times so far, written by the engine's thread; None before the request starts."""
        return self._stats

    @property
    def reading(self) -> Reading | None:
        """How much of a long text was read; None if one pass reads the text, or before the first has ended."""
        return self._reading

    @property
    def pieces(self) -> Sequence[Piece]:
        """The answer's tokens so far, read or not; the engine's thread appends to them."""
        return self._taken

    @property
    def finished(self) -> bool:
        """State of the request: True after its end."""
        return self._reason is not None

    def result(self) -> Completion:
        """Wait for the end and return the whole answer."""
        self._unbound()
        while not self._ended.wait(_WAKE_SECONDS):
            pass
        return self.completion()

    async def aresult(self) -> Completion:
        """Wait for the end without blocking the event loop, and return the whole answer."""
        self._unbound()
        while (ended := self._next_wake(self._end_wakers)) is not None:
            await ended
        return self.completion()

    def _unbound(self) -> None:
        """Lift the limit on unread pieces."""
        with self._ready:
            self._max_unread = sys.maxsize
            self._check_pace()

    def completion(self) -> Completion:
        """Return the whole answer of a request that has ended."""
        self._raise()
        assert self._reason is not None and self._stats is not None, "the request is still running"
        token_ids = tuple(piece.token_id for piece in self._taken if piece.token_id >= 0)
        logprobs = tuple(piece.logprob for piece in self._taken if piece.logprob is not None)
        text = "".join(piece.text for piece in self._taken)
        pieces = tuple(self._taken)
        return Completion(text, token_ids, self._reason, self._stats, logprobs, pieces)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _next_wake(self, wakers: list[Callable[[], None]]) -> asyncio.Future[None] | None:
        """Return a future that completes when `wakers` are called; None if there is nothing to wait for."""
        with self._ready:
            if self._reason is not None or (wakers is self._wakers and self._pieces):
                return None
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def complete() -> None:
                if not future.done():
                    future.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(complete)

            wakers.append(wake)
            return future
