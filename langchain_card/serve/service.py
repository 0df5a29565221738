"""What the routes share: the chat model, the settings, and how a request waits for its answer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from fastapi import Request

from langchain_card.chat.answer import AnswerConsumer
from langchain_card.chat_model import CARDChatModel
from langchain_card.core.messages import TARGET
from langchain_card.errors import EngineClosedError, InvalidInputError, check_range
from langchain_card.ports import Health
from langchain_card.serve.error_bodies import INTERNAL, Problem, Refused, problem_of
from langchain_card.serve.events import KEEP_ALIVE, OPENAI, EventStream, Wire
from langchain_card.serve.metrics import CLIENT_LEFT, EngineState, Metrics
from langchain_card.serve.settings import Settings
from langchain_card.serve.waiting import ClientLeft, Following

T = TypeVar("T")

DEADLINE_HEADER = "x-request-timeout"
_LAST_WORDS_SECONDS = 1.0
"""For a client to take the event that says why its answer ends early."""
log = logging.getLogger(__name__)


class Service:
    """One application's.

    Args:
        model: which answers; a copy of it is used, so that the caller's stays open.
        settings: bounds.

    Attributes:
        model: the copy.
        settings: the same.
        metrics: what is counted.
        draining: True refuses new requests, while those that run go on.
        ending: done when nothing goes on any longer; there from `open` on.
    """

    ending: asyncio.Future[None]

    def __init__(self, model: CARDChatModel, settings: Settings) -> None:
        self.model = model.model_copy(update={"output_version": "v0", "streaming": None})
        self.settings, self.metrics, self.draining = settings, Metrics(), False
        self.names: tuple[str, ...] = settings.model_names or _own_names(model.model)
        models = [name for name in (model.model, model.draft_model) if name is not None]
        self.model._shown_name = self.names[0]
        self._shown = {name: os.path.basename(name) for name in models if os.sep in name} | {model.model: self.names[0]}

    async def open(self) -> None:
        """Loads the model."""
        self.ending = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self.model.load)

    def end(self) -> None:
        """Lets answers that are still being written end with an error. Called on the loop; may be called twice."""
        self.draining = True
        if not self.ending.done():
            self.ending.set_result(None)

    async def close(self) -> None:
        """Gives back what `open` has taken; the last user's answers end."""
        await asyncio.to_thread(self.model.close)

    def reader(self, request: Request, consumer: AnswerConsumer) -> CARDChatModel:
        """The model as it answers a request: where there are keys, it drafts from texts of the same key alone."""
        reader = self.model.for_consumer(consumer)
        reader.tenant = getattr(request.state, "tenant", reader.tenant)
        return reader

    def state(self) -> EngineState:
        """What the engine does now; one that was closed has lost its target."""
        try:
            engine = self.model.engine
            return EngineState(engine.num_open, engine.num_running, engine.health())
        except EngineClosedError:
            return EngineState(0, 0, {TARGET: Health("given up")})

    def check_name(self, name: str) -> None:
        """Raises `Refused` unless the model may be called so."""
        if name not in self.names:
            message = f"model = {name[:100]!r}: is not served here; there is {', '.join(self.names)}."
            raise Refused(Problem(404, message, param="model", code="model_not_found"))

    def check_messages(self, count: int) -> None:
        """Raises `InvalidInputError` when a conversation has too many messages."""
        most = self.settings.max_messages
        if count > most:
            raise InvalidInputError(
                "messages", f"{count:,} messages", f"must be {most:,} at most", "leave out old ones"
            )

    def problem(self, error: BaseException, prompt: str) -> Problem:
        """What an error is to a client; one that nobody foresaw is logged."""
        problem = problem_of(error, prompt, self._shown)
        if problem is INTERNAL:
            log.error("an answer failed", exc_info=error)
        return problem

    def deadline(self, headers: Mapping[str, str]) -> float:
        """Seconds that a request gives its answer, `deadline_seconds` at most.

        Raises:
            InvalidInputError: what its header says is no time.
        """
        most, said = self.settings.deadline_seconds, headers.get(DEADLINE_HEADER)
        if said is None:
            return most
        try:
            seconds = float(said)
        except ValueError:
            hint = "leave the header out for the server's own limit"
            raise InvalidInputError(DEADLINE_HEADER, said, "must be a number of seconds", hint) from None
        check_range(DEADLINE_HEADER, seconds, 0.001, 1e9)
        return min(seconds, most)


class Exchange(Generic[T]):
    """A request and its answer, which begins at once.

    Args:
        service: of the application.
        request: whose body was read.
        items: the answer; closing the generator frees what it holds.
        consumer: of the answer, by which the model was told to write it.
        prompt: the field of the request that holds the prompt.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        items: AsyncGenerator[T, None],
        consumer: AnswerConsumer,
        prompt: str,
    ) -> None:
        self._service, self._request, self._consumer, self._prompt = service, request, consumer, prompt
        deadline = service.deadline(request.headers)
        self._following = Following(items, request.receive, service.settings, service.ending, self._begun, deadline)

    def _begun(self) -> bool:
        return any(each.stats is not None or each.finished for each in self._consumer.generations)

    async def whole(self) -> T:
        """The only item of an answer that is not streamed."""
        try:
            async for item in self._following:
                if item is not None:
                    return item
            raise RuntimeError("the answer held nothing")
        finally:
            self._close()

    async def stream(self, pieces: Callable[[T], Iterable[Any]], wire: Wire = OPENAI) -> EventStream:
        """The items as events, when the first one has come or the answer has begun; errors until then are raised.

        Args:
            pieces: that an item becomes, one an event.
            wire: how they are said.
        """
        try:
            first = await anext(self._following)
            while first is None and not self._begun():
                first = await anext(self._following)
        except BaseException:
            self._close()
            raise
        self._request.state.outcome = CLIENT_LEFT  # until it has ended otherwise
        return EventStream(self._events(first, pieces, wire), self._given_up, self._close)

    async def _events(
        self, item: T | None, pieces: Callable[[T], Iterable[Any]], wire: Wire
    ) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if item is None:
                    yield KEEP_ALIVE
                else:
                    for piece in pieces(item):
                        yield wire.piece(piece)
                item = await anext(self._following)
        except StopAsyncIteration:
            self._request.state.outcome = 200
            yield wire.end
        except ClientLeft:
            return
        except Exception as error:
            problem = self._service.problem(error, self._prompt)
            self._request.state.outcome = problem.status
            yield wire.error(problem)

    async def _given_up(self) -> None:
        """Returns when the answer is late and its client has not taken the event that says so."""
        error = await self._following.late()
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        self._request.state.outcome = self._service.problem(error, self._prompt).status

    def _close(self) -> None:
        self._following.close()
        self._consumer.leave()
        for generation in self._consumer.generations:
            self._service.metrics.count_answer(generation)


def _own_names(model: str) -> tuple[str, ...]:
    """The last part of a model's name, and a hub id itself, which is no path."""
    last = os.path.basename(os.path.normpath(model))
    return (last,) if os.path.exists(os.path.expanduser(model)) else tuple(dict.fromkeys([last, model]))


async def once(answer: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    """An answer that is not streamed, as the only item of an `Exchange`."""
    yield await answer()
