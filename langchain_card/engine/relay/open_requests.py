"""`OpenRequest`: a relay's record of a request that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from langchain_card.core.messages import Emit
from langchain_card.core.request import TIMES, FinishReason, RequestStats
from langchain_card.engine.relay.messages import Submit
from langchain_card.engine.relay.pool import Attempt
from langchain_card.errors import EngineError
from langchain_card.ports import Clock, Consumer
from langchain_card.runtime.kind import Kind

DIED, LEFT, OTHER_MACHINE = "died", "left", "other machine"
"""Reasons in `RequestStats.resumed`: the engine died or was lost while it worked on the answer; it left on purpose, or
the reader paused; the engine that goes on rounds as another machine than the one that began the answer does."""

_SHARED = tuple(item.name for item in fields(RequestStats) if item.name not in TIMES)


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended. It may outlive several engines.

    Attributes:
        consumer: takes the answer.
        clock: source of its times.
        output_ids: the answer's tokens so far.
        stats: statistics over all engines; earlier: over those before the present one.
        attempt: the present engine's work on it; None while none works on it.
        number: number of attempts that were left; their replies are ignored.
        begun: whether the present engine's target works on it.
        paused: whether the consumer does not read.
        aborted: whether the consumer gave up.
        num_tokens: number of tokens that count, where a stop string ended the answer.
        kind: of the engine that wrote the first token.
        deaths: consecutive engines that died while they worked on the request, before they wrote a token of it.
        all_deaths: all engines that died while they worked on it.
        has_written: whether the present engine has written a token of it.
        parting: why the last engine that worked on it does so no longer, until another one goes on; "" if none has.
    """

    consumer: Consumer
    clock: Clock
    output_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    earlier: RequestStats | None = None
    attempt: Attempt | None = None
    number: int = 0
    begun: bool = False
    aborted: bool = False
    paused: bool = False
    num_tokens: int | None = None
    kind: Kind | None = None
    deaths: int = 0
    all_deaths: int = 0
    has_written: bool = False
    parting: str = ""

    def __post_init__(self) -> None:
        self.stats.submitted = self.clock()

    @property
    def rest(self) -> Submit:
        """The message to the next engine."""
        return Submit(self.consumer.request, tuple(self.output_ids), self.kind)

    def push(self, emit: Emit, stats: RequestStats) -> None:
        """Append tokens to the answer and hand them to the consumer; raises what the consumer raises."""
        self.output_ids += emit.token_ids
        self.deaths, self.has_written = 0, True
        if self.kind is None and self.attempt is not None:
            self.kind = self.attempt.kind
        self.update_stats(stats)
        self.num_tokens = self.consumer.push(emit)

    def finish(self, reason: FinishReason) -> None:
        """End the consumer's answer."""
        self.stats.ended = self.clock()
        try:
            self.consumer.finish(reason, self.stats)
        except Exception as error:
            self.consumer.fail(self.consumer_error(error))

    def consumer_error(self, error: Exception) -> EngineError:
        """Return the error for a consumer that could not take its tokens."""
        return EngineError("request", self.consumer.request.request_id, f"its text could not be made ({error})")

    def begin(self) -> None:
        """Note that an engine works on it; count that if an earlier one did."""
        self.begun = True
        if self.earlier is not None and self.parting:
            reasons = [self.parting, OTHER_MACHINE] if self._is_elsewhere else [self.parting]
            for stats in (self.earlier, self.stats):
                stats.add_resumption(reasons)
            self.parting = ""
        self.stats.started = self.stats.started or self.clock()
        self.consumer.watch(self.stats)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the present engine is known to round otherwise than the one that wrote the first token."""
        present = None if self.attempt is None else self.attempt.kind
        return len({kind.machine for kind in (self.kind, present) if kind is not None and kind.machine}) > 1

    def update_stats(self, stats: RequestStats) -> None:
        """Add the present engine's statistics to those of the engines before it.

        Times are those of this record's clock: engines may be on other machines, whose clocks count from elsewhere.
        """
        total = stats if self.earlier is None else stats.after(self.earlier)
        for name in _SHARED:
            setattr(self.stats, name, getattr(total, name))
        if self.stats.rounds:
            self.stats.first_token = self.stats.first_token or self.clock()

    @property
    def end(self) -> FinishReason | None:
        """Finish reason of an answer that is complete without its engine's word; None if it goes on."""
        request = self.consumer.request
        if self.aborted:
            return FinishReason.ABORT
        if self.num_tokens is not None or (self.output_ids and self.output_ids[-1] in request.eos_ids):
            return FinishReason.LENGTH if self.stats.closed else FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_ids) >= request.params.max_tokens else None

    def stop(self, num_tokens: int | None = None) -> bool:
        """Let the present engine end it after so many tokens; None discards it. Return False if there is none."""
        if self.attempt is not None:
            self.attempt.stop(num_tokens)
        return self.attempt is not None

    def left(self, *, died: bool = False) -> None:
        """Note that the present engine works on it no longer; the next one goes on from here."""
        self.all_deaths += died and self.begun
        self.deaths += died and self.begun and not self.has_written
        if self.begun:
            self.parting = DIED if died else LEFT
        self.attempt, self.begun, self.has_written = None, False, False
        self.number += 1
        self.earlier = replace(self.stats)
