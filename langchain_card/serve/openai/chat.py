"""`/v1/chat/completions`: the chat model itself, in OpenAI's words."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from langchain_core.messages import AIMessageChunk

from langchain_card.chat.answer import AnswerConsumer
from langchain_card.serve.openai.messages import to_messages
from langchain_card.serve.openai.objects import ChatChunks, chat_completion
from langchain_card.serve.openai.requests import STREAMED
from langchain_card.serve.openai.schemas import ChatRequest
from langchain_card.serve.parsing import StrictRoute
from langchain_card.serve.service import Exchange, Service, once


def chat_routes(service: Service) -> APIRouter:
    """The route, for one application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=STREAMED, summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.check_name(body.model)
        service.check_messages(len(body.messages))
        messages, options, shown = to_messages(body.messages), body.options, body.model
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        model = service.reader(request, consumer := AnswerConsumer())
        if not body.stream:
            items = once(lambda: model.ainvoke(messages, stop=stop, **options))
            answer = await Exchange(service, request, items, consumer, "messages").whole()
            return JSONResponse(chat_completion(answer, shown))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        objects = ChatChunks(shown, include_usage, consumer if body.card else None)
        chunks = cast("AsyncGenerator[AIMessageChunk, None]", model.astream(messages, stop=stop, **options))
        return await Exchange(service, request, chunks, consumer, "messages").stream(objects)

    return router
