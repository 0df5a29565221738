"""State that all routes share: `Service`, and `Exchange`, which sends a request's answer."""

from __future__ import annotations

import asyncio
import hashlib
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
from langchain_card.serve.events import KEEP_ALIVE, OPENAI, EventFormat, EventStream
from langchain_card.serve.metrics import CLIENT_LEFT, EngineState, Metrics
from langchain_card.serve.settings import Settings
from langchain_card.serve.waiting import ClientLeft, PendingAnswer

T = TypeVar("T")

DEADLINE_HEADER = "x-request-timeout"
SESSION_HEADER = "x-session-id"
_FINAL_EVENT_SECONDS = 1.0
"""Seconds that a client has to read the event with the reason why its answer ends early."""
log = logging.getLogger(__name__)


class Service:
    """The model, settings, metrics and state of one application.

    Args:
        model: the chat model. The service uses a copy, so that the caller's stays open.
        settings: keys and limits.

    Attributes:
        model: the copy.
        settings: the settings.
        metrics: the application's metrics.
        draining: True refuses new requests, while running ones continue.
        ending: done when running requests must end, too; exists once `open` was called.
        names: names under which the model is served without an adapter.
        parsing: held while a large body is parsed: they are parsed one at a time.
    """

    ending: asyncio.Future[None]

    def __init__(self, model: CARDChatModel, settings: Settings) -> None:
        self.model = model.model_copy(update={"output_version": "v0", "streaming": None})
        self.settings, self.metrics, self.draining = settings, Metrics(), False
        self.parsing = asyncio.Lock()
        self.names: tuple[str, ...] = settings.model_names or _default_names(model.model)
        for name in {*self.names} & {*model.adapters}:
            raise InvalidInputError("adapters", name, "is a name of the model, too", "give the adapter another name")
        models = [name for name in (model.model, model.draft_model) if name is not None]
        self.model._shown_name = self.names[0]
        self._shown = {name: os.path.basename(name) for name in models if os.sep in name} | {model.model: self.names[0]}

    async def open(self) -> None:
        """Load the model."""
        self.ending = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self.model.load)

    def end(self) -> None:
        """End all running answers with an error. Call it on the event loop; a second call does nothing."""
        self.draining = True
        if not self.ending.done():
            self.ending.set_result(None)

    async def close(self) -> None:
        """Release the model; if nothing else uses its engine, the engine is closed and its answers end."""
        await asyncio.to_thread(self.model.close)

    @property
    def all_names(self) -> tuple[str, ...]:
        """What requests may name: the model and its adapters."""
        return (*self.names, *self.model.adapters)

    def reader(
        self, request: Request, consumer: AnswerConsumer, name: str | None = None, session: str = ""
    ) -> CARDChatModel:
        """Return the model for one request. With keys, it drafts only from texts of requests with the same key.

        Args:
            request: the request.
            consumer: receives its generations.
            name: what the request names, the model or an adapter; None where it names nothing.
            session: name of the conversation, unless the request has the header `x-session-id`.

        Raises:
            Refused: there is nothing of this name.
        """
        reader = self.model.for_consumer(consumer)
        if name is not None:
            self.check_name(name)
            reader.adapter = name if name in self.model.adapters else ""
        reader.tenant = getattr(request.state, "tenant", reader.tenant)
        if name_of := request.headers.get(SESSION_HEADER) or session:  # any text: it is never refused
            reader.session = hashlib.sha256(name_of.encode(errors="replace")).hexdigest()
        return reader

    def state(self) -> EngineState:
        """Return the state of the engine; a closed engine has lost its target."""
        try:
            engine = self.model.engine
            return EngineState(engine.num_open, engine.num_running, engine.health())
        except EngineClosedError:
            return EngineState(0, 0, {TARGET: Health("given up")})

    def check_name(self, name: str) -> None:
        """Raise `Refused` if neither the model nor an adapter has this name."""
        if name not in self.all_names:
            message = f"model = {name[:100]!r}: is not served here; there is {', '.join(self.all_names)}."
            raise Refused(Problem(404, message, param="model", code="model_not_found"))

    def check_messages(self, count: int) -> None:
        """Raise `InvalidInputError` if a conversation has too many messages."""
        if count > self.settings.max_messages:
            limit = f"must be {self.settings.max_messages:,} at most"
            raise InvalidInputError("messages", f"{count:,} messages", limit, "leave out old ones")

    def problem(self, error: BaseException, prompt: str) -> Problem:
        """Translate an error for a client; log it if it is unknown."""
        problem = problem_of(error, prompt, self._shown)
        if problem is INTERNAL:
            log.error("an answer failed", exc_info=error)
        return problem

    def deadline(self, headers: Mapping[str, str]) -> float:
        """Return the seconds that an answer may take: those of the request's header, `deadline_seconds` at most.

        Raises:
            InvalidInputError: the header is not a number of seconds.
        """
        text = headers.get(DEADLINE_HEADER)
        if text is None:
            return self.settings.deadline_seconds
        try:
            seconds = float(text)
        except ValueError:
            hint = "leave the header out for the server's own limit"
            raise InvalidInputError(DEADLINE_HEADER, text, "must be a number of seconds", hint) from None
        check_range(DEADLINE_HEADER, seconds, 0.001, 1e9)
        return min(seconds, self.settings.deadline_seconds)


class Exchange(Generic[T]):
    """A request and its answer, which begins at once.

    Args:
        service: the application's service.
        request: the request; its body has been read.
        items: the answer; closing the generator frees what it holds.
        consumer: the consumer that was given to the model for this answer.
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
        self._answer = PendingAnswer(items, request.receive, service.settings, service.ending, self._begun, deadline)

    def _begun(self) -> bool:
        generations = self._consumer.generations
        return any(generation.stats is not None or generation.finished for generation in generations)

    def add(self, item: T) -> None:
        """Add an item beside those of the answer."""
        self._answer.add(item)

    async def whole(self) -> T:
        """Return the only item of an answer that is not streamed."""
        try:
            async for item in self._answer:
                if item is not None:
                    return item
            raise RuntimeError("the answer held nothing")
        finally:
            self._close()

    async def stream(self, pieces: Callable[[T], Iterable[Any]], encoding: EventFormat = OPENAI) -> EventStream:
        """Return the items as events, once the first item or the answer's start has come; raise errors before that.

        Args:
            pieces: splits an item into pieces, one for each event.
            encoding: encoding of the events.
        """
        try:
            first = await anext(self._answer)
            while first is None and not self._begun():
                first = await anext(self._answer)
        except BaseException:
            self._close()
            raise
        self._request.state.outcome = CLIENT_LEFT  # unless it ends otherwise
        return EventStream(self._events(first, pieces, encoding), self._given_up, self._close)

    async def _events(
        self, item: T | None, pieces: Callable[[T], Iterable[Any]], encoding: EventFormat
    ) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if item is None:
                    yield KEEP_ALIVE
                else:
                    for piece in pieces(item):
                        yield encoding.piece(piece)
                item = await anext(self._answer)
        except StopAsyncIteration:
            self._request.state.outcome = 200
            yield encoding.end
        except ClientLeft:
            return
        except Exception as error:
            problem = self._service.problem(error, self._prompt)
            self._request.state.outcome = problem.status
            yield encoding.error(problem)

    async def _given_up(self) -> None:
        """Return when the answer is late and the client has not read the event that reports it."""
        error = await self._answer.late()
        await asyncio.sleep(_FINAL_EVENT_SECONDS)
        self._request.state.outcome = self._service.problem(error, self._prompt).status

    def _close(self) -> None:
        self._answer.close()
        self._consumer.leave()
        for generation in self._consumer.generations:
            self._service.metrics.count_answer(generation)


def _default_names(model: str) -> tuple[str, ...]:
    """Return the last part of a model's name, and the whole name unless it is a path."""
    last = os.path.basename(os.path.normpath(model))
    return (last,) if os.path.exists(os.path.expanduser(model)) else tuple(dict.fromkeys([last, model]))


async def once(answer: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    """Wrap an answer that is not streamed as the only item of an `Exchange`."""
    yield await answer()
