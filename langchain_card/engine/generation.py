"""`Generation`: the consumer's end of a request."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.core.messages import Emit, TokenLogprob
from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.text.detokenizer import Detokenizer, Piece

_WAKE_SECONDS = 0.1
"""How long a blocked consumer sleeps before it looks for signals such as ctrl-c."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    Attributes:
        text: without special tokens and stop strings.
        token_ids: tokens of the answer, end of text included.
        finish_reason: why it ended.
        stats: counts and times.
        logprobs: of the tokens; empty when the request wants none.
        pieces: the tokens one by one, each with the text that became certain with it.
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
        request: what was asked.
        detokenizer: of this answer.
        abort: called once when the consumer gives up.
        pause: told True when `max_unread` pieces wait for the consumer, and False when it has caught up.
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
        self._error: BaseException | None = None
        self._abort_error: BaseException | None = None

    # The engine's side.

    def watch(self, stats: RequestStats) -> None:
        """The first call for a request that starts; the coordinator goes on writing `stats`."""
        self._stats = stats

    def push(self, emit: Emit) -> int | None:
        """Takes committed tokens; the number of tokens that count when a stop string was met, else None."""
        pieces = self._detokenizer.push(emit.token_ids, emit.sources, emit.logprobs)
        with self._ready:
            self._pieces += pieces
            self._taken += pieces
            self._check_pace()
            self._wake()
        return self._detokenizer.num_tokens if self._detokenizer.stopped else None

    def finish(self, reason: FinishReason, stats: RequestStats) -> None:
        """The last call for a request that ended."""
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
        """The last call for a request that the engine could not serve."""
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

    # The consumer's side.

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they are committed; leaving early aborts the request."""
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
        """The same without blocking the event loop; no thread is held."""
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
        """Ends the request if it still runs; its tokens so far remain.

        Args:
            error: raised to whoever still reads; None where nobody does.
        """
        if self._reason is None:
            self._abort_error = self._abort_error or error
            self._abort()

    @property
    def tokenizer(self) -> Any:
        """What the answer's tokens are ids of."""
        return self._detokenizer.tokenizer

    @property
    def stats(self) -> RequestStats | None:
        """Counts and times so far, written by the engine's thread; None before the request starts."""
        return self._stats

    @property
    def pieces(self) -> Sequence[Piece]:
        """The answer's tokens so far, those not read yet among them; the engine's thread adds to them."""
        return self._taken

    @property
    def finished(self) -> bool:
        """Whether the request ended."""
        return self._reason is not None

    def result(self) -> Completion:
        """Waits for the end and returns the whole answer."""
        self._read_at_once()
        while not self._ended.wait(_WAKE_SECONDS):
            pass
        return self.completion()

    async def aresult(self) -> Completion:
        """The same without blocking the event loop."""
        self._read_at_once()
        while (ended := self._next_wake(self._end_wakers)) is not None:
            await ended
        return self.completion()

    def _read_at_once(self) -> None:
        with self._ready:
            self._max_unread = sys.maxsize
            self._check_pace()

    def completion(self) -> Completion:
        """The whole answer of a request that ended."""
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
        """A future of the running loop that completes when these are woken; None when what they wait for is there."""
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
