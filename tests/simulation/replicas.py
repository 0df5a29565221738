"""Replicas of an engine on a virtual clock. They compute nothing: a hash of all tokens before it is the next token."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from langchain_card.core.request import FinishReason, Request, RequestStats
from langchain_card.engine.relay.messages import Began, Committed, Ended, Reply, Submit
from langchain_card.runtime.kind import Kind

VOCAB, EOS, MEAN_LENGTH = 1 << 16, 0, 64
"""Token ids are below it; the end of an answer; mean length of an answer without `max_tokens`."""

READ_SECONDS, END_SECONDS = 0.002, 0.05
"""Seconds in which a replica reads a token that it does not remember; from an answer's last token to its end."""

MOST_COMMITTED = 15
"""Tokens that are committed at once: from one to so many."""


class Timeline:
    """A virtual clock, and what will happen on it."""

    def __init__(self) -> None:
        self.now = 1.0  # a request that starts at 0 would seem not to have started
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, act: Callable[..., object], *arguments: Any) -> None:
        """Let something happen; what happens at the same time keeps its order."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act, arguments))

    def step(self) -> bool:
        """Go on to what happens next, and do it; return False if nothing will happen."""
        if not self._events:
            return False
        self.now, _, act, arguments = heapq.heappop(self._events)
        act(*arguments)
        return True


class Text:
    """The tokens that weights choose after a text: each depends on the seed, its position and all tokens before it."""

    __slots__ = ("_key", "_position", "digest")

    def __init__(self, kind: Kind, request: Request, output_ids: tuple[int, ...] = ()) -> None:
        self._key = hash((int(kind.answer), request.params.seed))
        self._position, self.digest = len(request.prompt_ids), hash(request.prompt_ids)
        for token in output_ids:
            self._append(token)

    def _append(self, token: int) -> None:
        self._position += 1
        self.digest = hash((self.digest, token))

    def write(self) -> int:
        """Return the next token, which is a part of the text from now on."""
        value = hash((self._key, self._position, self.digest))
        token = 1 + value // MEAN_LENGTH % (VOCAB - 1) if value % MEAN_LENGTH else EOS
        self._append(token)
        return token


def answer(kind: Kind, request: Request) -> Iterator[int]:
    """Yield the answer of a single replica."""
    text = Text(kind, request)
    for _ in range(request.params.max_tokens):
        yield (token := text.write())
        if token == EOS:
            return


@dataclass(slots=True)
class Sequence:
    """What a replica holds of a request.

    Attributes:
        submit: the request, with the answer of the replicas before this one.
        send: sends a message to the pool.
        text: prompt and answer.
        stats: of this replica's part of the answer.
    """

    submit: Submit
    send: Callable[[Reply], None]
    text: Text
    stats: RequestStats

    @property
    def num_written(self) -> int:
        """Number of tokens of the answer."""
        return len(self.submit.output_ids) + self.stats.output_tokens

    @property
    def next_count(self) -> int:
        """Number of tokens that are committed next; one alone after the text was read."""
        return 1 + self.text.digest % MOST_COMMITTED if self.stats.rounds else 1


class Replica:
    """One engine. While it hangs, what it gets and what it would do wait.

    Args:
        kind: what its answers depend on.
        rate: tokens that it writes in a second, for each of its requests.
        max_remembered: sessions whose text it remembers, apart from those that it works on.
        timeline: its clock.
    """

    def __init__(self, kind: Kind, rate: float, max_remembered: int, timeline: Timeline) -> None:
        self.kind, self._rate, self._max_remembered, self._timeline = kind, rate, max_remembered, timeline
        self.on_begin: Callable[[Request], None] = lambda request: None
        self._is_alive = True
        self._held: list[Callable[[], None]] | None = None
        self._sequences: dict[int, Sequence] = {}
        self._remembered: OrderedDict[str, int] = OrderedDict()

    # Messages from the pool.

    def begin(self, number: int, submit: Submit, send: Callable[[Reply], None]) -> None:
        """Start a request, or go on with it."""
        self._do(self._begin, number, submit, send)

    def stop(self, number: int, num_tokens: int | None) -> None:
        """End a request."""
        self._do(self._stop, number, num_tokens)

    def discard(self, number: int) -> None:
        """End a request without a reply."""
        self._do(self._end, number)

    # Faults.

    def die(self) -> None:
        """Lose everything; messages that were sent arrive."""
        self._is_alive = False

    def hang(self) -> None:
        """Stand still."""
        self._held = self._held or []

    def wake(self) -> None:
        """Catch up after a hang."""
        held, self._held = self._held or [], None
        for act in held:
            act()

    @property
    def hangs(self) -> bool:
        """Whether it stands still."""
        return self._held is not None

    # The work.

    def _do(self, act: Callable[..., object], *arguments: Any) -> None:
        if self._held is not None:
            self._held.append(functools.partial(self._do, act, *arguments))
        elif self._is_alive:
            act(*arguments)

    def _begin(self, number: int, submit: Submit, send: Callable[[Reply], None]) -> None:
        request = submit.request
        length = len(request.prompt_ids) + len(submit.output_ids)
        known = min(self._remembered.pop(request.params.session, 0), length)
        stats = RequestStats(cached_tokens=min(known, len(request.prompt_ids)))
        sequence = Sequence(submit, send, Text(self.kind, request, submit.output_ids), stats)
        self._sequences[number] = sequence
        send(Began(number))
        self.on_begin(request)
        self._write_later(number, sequence, (length - known) * READ_SECONDS)

    def _write_later(self, number: int, sequence: Sequence, seconds: float = 0.0) -> None:
        self._timeline.after(seconds + sequence.next_count / self._rate, self._do, self._write, number)

    def _write(self, number: int) -> None:
        if (sequence := self._sequences.get(number)) is None:
            return
        stats, most = sequence.stats, sequence.submit.request.params.max_tokens
        tokens = list[int]()
        for _ in range(min(sequence.next_count, most - sequence.num_written)):
            tokens.append(sequence.text.write())
            if tokens[-1] == EOS:
                break
        sequence.stats = stats = RequestStats(
            rounds=stats.rounds + 1, output_tokens=stats.output_tokens + len(tokens), cached_tokens=stats.cached_tokens
        )
        sequence.send(Committed(number, tuple(tokens), ("",) * len(tokens), (), stats))
        if tokens[-1] == EOS or sequence.num_written >= most:
            reason = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
            self._timeline.after(END_SECONDS, self._do, self._end, number, reason)
        else:
            self._write_later(number, sequence)

    def _stop(self, number: int, num_tokens: int | None) -> None:
        self._end(number, FinishReason.ABORT if num_tokens is None else FinishReason.STOP)

    def _end(self, number: int, reason: FinishReason | None = None) -> None:
        """Keep the text in memory, and no more of the request."""
        if (sequence := self._sequences.pop(number, None)) is None:
            return
        request = sequence.submit.request
        self._remembered[request.params.session] = len(request.prompt_ids) + sequence.num_written
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)
        if reason is not None:
            sequence.send(Ended(number, reason, sequence.stats))
