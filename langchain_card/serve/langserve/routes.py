"""`/card/invoke`, `/batch`, `/stream`, `/stream_log`, `/stream_events`: the chat model behind LangServe's interface."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast
from uuid import UUID, uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_jsonable_python

from langchain_card.chat.answer import AnswerConsumer
from langchain_card.errors import InvalidInputError
from langchain_card.serve.error_bodies import Problem
from langchain_card.serve.events import EventFormat
from langchain_card.serve.langserve.playground import CHAT, ROOT, playground_routes
from langchain_card.serve.langserve.requests import BatchRequest, InvokeRequest, LogRequest, num_messages
from langchain_card.serve.parsing import StrictRoute
from langchain_card.serve.service import Exchange, Service, once


def langserve_routes(service: Service) -> APIRouter:
    """Create the routes for one application."""
    warnings.filterwarnings("ignore", "astream_log is deprecated", DeprecationWarning)  # else once for each request
    router = APIRouter(route_class=StrictRoute, include_in_schema=False)
    model = service.model

    async def invoke(body: InvokeRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader, run_id = service.reader(request, consumer := AnswerConsumer()), uuid4()
        items = once(lambda: reader.ainvoke(body.input, {"run_id": run_id}, **body.options))
        answer = await Exchange(service, request, items, consumer, "input").whole()
        return JSONResponse({"output": _plain(answer), "metadata": _metadata(run_id)})

    async def batch(body: BatchRequest, request: Request) -> Response:
        _check_batch(service, body)
        options, run_ids = body.options, [uuid4() for _ in body.inputs]
        reader = service.reader(request, consumer := AnswerConsumer())
        configs = [{"config": {"run_id": run_id}, **call} for run_id, call in zip(run_ids, options, strict=True)]
        items = once(lambda: reader.abatch_with(body.inputs, configs))
        answers = await Exchange(service, request, items, consumer, "inputs").whole()
        metadata = {"run_ids": [str(run_id) for run_id in run_ids], "responses": [*map(_metadata, run_ids)]}
        return JSONResponse({"output": _plain(answers), "metadata": metadata})

    async def stream(body: InvokeRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader, run_id = service.reader(request, consumer := AnswerConsumer()), uuid4()
        chunks = reader.astream(body.input, {"run_id": run_id}, **body.options)
        items = _named_events(chunks, ("metadata", {"run_id": str(run_id)}))
        return await Exchange(service, request, items, consumer, "input").stream(list, FORMAT)

    async def stream_log(body: LogRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader = service.reader(request, consumer := AnswerConsumer())
        options: dict[str, Any] = {**body.filters, **body.options}
        patches = reader.astream_log(body.input, diff=True, **options)
        items = _named_events(patches, hold=1)
        return await Exchange(service, request, items, consumer, "input").stream(list, FORMAT)

    async def stream_events(body: LogRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader = service.reader(request, consumer := AnswerConsumer())
        options: dict[str, Any] = {**body.filters, **body.options}
        events = reader.astream_events(body.input, version="v2", **options)
        items = _named_events(events, hold=1)
        return await Exchange(service, request, items, consumer, "input").stream(list, FORMAT)

    for prefix in (ROOT, CHAT):
        for endpoint in (invoke, batch, stream, stream_log, stream_events):
            router.add_api_route(f"{prefix}/{endpoint.__name__}", endpoint, methods=["POST"])
    router.include_router(playground_routes(model))
    return router


def _plain(value: Any) -> Any:
    """Convert messages and what holds them to JSON types; pydantic knows all types but a log's patches."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda patch: {"ops": patch.ops})


def _event(name: str, data: Any) -> bytes:
    """Encode one event in ASCII, because LangServe's client takes U+2028 for the end of a line."""
    return f"event: {name}\ndata: {json.dumps(_plain(data), separators=(',', ':'))}\n\n".encode()


def _error_event(problem: Problem) -> bytes:
    return _event("error", {"status_code": problem.status, **problem.body["error"]})


FORMAT = EventFormat(lambda piece: _event(*piece), b"event: end\n\n", _error_event)


async def _named_events(
    items: AsyncIterator[Any], *before: tuple[str, Any], hold: int = 0
) -> AsyncGenerator[list[tuple[str, Any]], None]:
    """Yield the events of a stream: `before` with the first items, then each item as it comes.

    The first item of a log, the start of the run, comes before the engine has seen the request. It is held back because
    an error has an HTTP status of its own only until the first event is sent.

    Args:
        items: the stream.
        before: events that come first.
        hold: number of items that wait for the next item.
    """
    ready = [*before]
    num_waiting = len(before) + hold
    async with aclosing(cast("AsyncGenerator[Any, None]", items)) as stream:
        async for item in stream:
            ready.append(("data", item))
            if len(ready) > num_waiting:
                yield ready
                ready, num_waiting = [], 0
    yield ready


def _metadata(run_id: UUID) -> dict[str, Any]:
    return {"run_id": str(run_id), "feedback_tokens": []}


def _check_batch(service: Service, body: BatchRequest) -> None:
    engine, count = service.model.engine, len(body.inputs)
    limits, num_seats = engine.config.limits, engine.backend.num_seats
    max_inputs = limits.max_queue + num_seats
    if count > max_inputs:
        parts = f"{num_seats:,} at once, and max_queue = {limits.max_queue:,} that wait"
        limit = f"must be {max_inputs:,} at most: {parts}"
        raise InvalidInputError("inputs", f"{count:,} inputs", limit, "send several batches")
    for value in body.inputs:
        service.check_messages(num_messages(value))
