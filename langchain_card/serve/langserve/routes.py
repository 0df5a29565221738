"""`/card/invoke`, `/batch`, `/stream`, `/stream_log`, `/stream_events`: the chat model itself, in LangServe's words."""

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
from langchain_card.serve.events import Wire
from langchain_card.serve.langserve.playground import CHAT, ROOT, playground_routes
from langchain_card.serve.langserve.requests import BatchRequest, InvokeRequest, LogRequest, num_messages
from langchain_card.serve.parsing import StrictRoute
from langchain_card.serve.service import Exchange, Service, once


def remote_routes(service: Service) -> APIRouter:
    """The routes, for one application."""
    warnings.filterwarnings("ignore", "astream_log is deprecated", DeprecationWarning)  # it would be said each time
    router = APIRouter(route_class=StrictRoute, include_in_schema=False)
    model = service.model

    async def invoke(body: InvokeRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader, run_id = service.reader(request, consumer := AnswerConsumer()), uuid4()
        items = once(lambda: reader.ainvoke(body.input, {"run_id": run_id}, **body.options))
        answer = await Exchange(service, request, items, consumer, "input").whole()
        return JSONResponse({"output": _plain(answer), "metadata": _about(run_id)})

    async def batch(body: BatchRequest, request: Request) -> Response:
        _check_batch(service, body)
        options, run_ids = body.options, [uuid4() for _ in body.inputs]
        reader = service.reader(request, consumer := AnswerConsumer())
        configs = [{"config": {"run_id": run_id}, **each} for run_id, each in zip(run_ids, options, strict=True)]
        items = once(lambda: reader.abatch_with(body.inputs, configs))
        answers = await Exchange(service, request, items, consumer, "inputs").whole()
        about = {"run_ids": [str(run_id) for run_id in run_ids], "responses": [*map(_about, run_ids)]}
        return JSONResponse({"output": _plain(answers), "metadata": about})

    async def stream(body: InvokeRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader, run_id = service.reader(request, consumer := AnswerConsumer()), uuid4()
        chunks = reader.astream(body.input, {"run_id": run_id}, **body.options)
        items = _named(chunks, ("metadata", {"run_id": str(run_id)}))
        return await Exchange(service, request, items, consumer, "input").stream(list, WIRE)

    async def stream_log(body: LogRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader = service.reader(request, consumer := AnswerConsumer())
        options: dict[str, Any] = {**body.filters, **body.options}
        patches = reader.astream_log(body.input, diff=True, **options)
        items = _named(patches, hold=1)
        return await Exchange(service, request, items, consumer, "input").stream(list, WIRE)

    async def stream_events(body: LogRequest, request: Request) -> Response:
        service.check_messages(num_messages(body.input))
        reader = service.reader(request, consumer := AnswerConsumer())
        options: dict[str, Any] = {**body.filters, **body.options}
        events = reader.astream_events(body.input, version="v2", **options)
        items = _named(events, hold=1)
        return await Exchange(service, request, items, consumer, "input").stream(list, WIRE)

    for prefix in (ROOT, CHAT):
        for endpoint in (invoke, batch, stream, stream_log, stream_events):
            router.add_api_route(f"{prefix}/{endpoint.__name__}", endpoint, methods=["POST"])
    router.include_router(playground_routes(model))
    return router


def _plain(value: Any) -> Any:
    """Messages, and what holds them, in types of JSON; patches of a log are all that pydantic does not know."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda patch: {"ops": patch.ops})


def _event(name: str, data: Any) -> bytes:
    """One event; all of its characters are ASCII, because LangServe's client takes U+2028 for the end of a line."""
    return f"event: {name}\ndata: {json.dumps(_plain(data), separators=(',', ':'))}\n\n".encode()


def _failed(problem: Problem) -> bytes:
    return _event("error", {"status_code": problem.status, **problem.body["error"]})


WIRE = Wire(lambda piece: _event(*piece), b"event: end\n\n", _failed)


async def _named(
    items: AsyncIterator[Any], *before: tuple[str, Any], hold: int = 0
) -> AsyncGenerator[list[tuple[str, Any]], None]:
    """Events of a stream: those of `before` and the first items, then one after the other.

    What a log says first, that a run starts, is said before the engine was asked for anything. Held back, it does not
    hide that the request cannot be answered: until the first event is sent an error has a status of its own.

    Args:
        items: the stream.
        before: events that come first.
        hold: items that are held back until the next one comes.
    """
    ready = [*before]
    least = len(before) + hold
    async with aclosing(cast("AsyncGenerator[Any, None]", items)) as each:
        async for item in each:
            ready.append(("data", item))
            if len(ready) > least:
                yield ready
                ready, least = [], 0
    yield ready


def _about(run_id: UUID) -> dict[str, Any]:
    return {"run_id": str(run_id), "feedback_tokens": []}


def _check_batch(service: Service, body: BatchRequest) -> None:
    limits, count = service.model.engine.config.limits, len(body.inputs)
    most = limits.max_queue + limits.num_seqs
    if count > most:
        limit = f"must be {most:,} at most: {limits.num_seqs:,} at once, and max_queue = {limits.max_queue:,} that wait"
        raise InvalidInputError("inputs", f"{count:,} inputs", limit, "send several batches")
    for each in body.inputs:
        service.check_messages(num_messages(each))
