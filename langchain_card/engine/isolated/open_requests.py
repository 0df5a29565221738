"""`OpenRequest`: what an engine's supervisor knows of a request that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, RequestStats
from langchain_card.errors import EngineError
from langchain_card.ports import Consumer


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        consumer: who wants the answer.
        output_ids: its tokens so far.
        stats: of all lives of the engine; earlier: of those that are over.
        asked: whether the engine in its present life was asked; begun: whether its target works on it.
        paused: whether nobody reads.
        left: whether nobody wants it any more.
        num_tokens: how many of its tokens count, where a stop string ended it.
        deaths: engines in a row that died while they worked on it, without a token of it.
    """

    consumer: Consumer
    output_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    earlier: RequestStats | None = None
    asked: bool = False
    begun: bool = False
    left: bool = False
    paused: bool = False
    num_tokens: int | None = None
    deaths: int = 0

    def write(self, emit: Emit, stats: RequestStats) -> None:
        """Hands tokens to the consumer; whatever that raises."""
        self.output_ids += emit.token_ids
        self.deaths = 0
        self.count(stats)
        self.num_tokens = self.consumer.push(emit)

    def finish(self, reason: FinishReason) -> None:
        """Tells the consumer that the answer is whole."""
        try:
            self.consumer.finish(reason, self.stats)
        except Exception as error:
            self.consumer.fail(self.unwritten(error))

    def unwritten(self, error: Exception) -> EngineError:
        """What the consumer is told that could not take its tokens."""
        return EngineError("request", self.consumer.request.request_id, f"its text could not be made ({error})")

    def count(self, stats: RequestStats) -> None:
        """Takes the statistics of this life."""
        whole = stats if self.earlier is None else stats.after(self.earlier)
        for one in fields(whole):
            setattr(self.stats, one.name, getattr(whole, one.name))

    @property
    def end(self) -> FinishReason | None:
        """Why the answer is whole, where it is: the engine died before it said so."""
        request = self.consumer.request
        if self.left:
            return FinishReason.ABORT
        if self.num_tokens is not None or (self.output_ids and self.output_ids[-1] in request.eos_ids):
            return FinishReason.LENGTH if self.stats.closed else FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_ids) >= request.params.max_tokens else None

    def outlive(self) -> None:
        """The engine died: the next life goes on where this one was."""
        self.deaths += self.begun
        self.asked = self.begun = False
        self.earlier = replace(self.stats)
