"""`/v1/chat/completions`: the chat model behind OpenAI's chat interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.runnables import RunnableConfig
from pydantic_core import from_json
from typing_extensions import override

from langchain_card.chat.answer import AnswerConsumer
from langchain_card.chat.readings import EVENT
from langchain_card.errors import InvalidInputError, UnsupportedContentError
from langchain_card.serve.openai.objects import ChatChunks, chat_completion
from langchain_card.serve.openai.schemas import STREAMED, Call, ChatRequest, Message
from langchain_card.serve.parsing import StrictRoute
from langchain_card.serve.service import Exchange, Service, once

Chunks: TypeAlias = AsyncGenerator["AIMessageChunk | Mapping[str, int]", None]


def chat_routes(service: Service) -> APIRouter:
    """Create the route for one application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=STREAMED, summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        model = service.reader(request, consumer := AnswerConsumer(), body.model, body.session)
        service.check_messages(len(body.messages))
        messages, options, name = to_messages(body.messages), body.options, body.model
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        if not body.stream:
            items = once(lambda: model.ainvoke(messages, stop=stop, **options))
            answer = await Exchange(service, request, items, consumer, "messages").whole()
            return JSONResponse(chat_completion(answer, name))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        objects = ChatChunks(name, include_usage, consumer if body.card else None)
        readings = _Readings()
        config: RunnableConfig = {"callbacks": [readings] if body.card else []}
        chunks = cast("Chunks", model.astream(messages, config, stop=stop, **options))
        exchange = Exchange[AIMessageChunk | Mapping[str, int]](service, request, chunks, consumer, "messages")
        readings.take = exchange.add
        return await exchange.stream(objects)

    return router


class _Readings(AsyncCallbackHandler):
    """A handler that passes on how much of a long prompt was read.

    Attributes:
        take: called with the counts.
    """

    take: Callable[[Mapping[str, int]], None]

    @override
    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        if name == EVENT:
            self.take(data)


def to_messages(messages: Sequence[Message]) -> list[BaseMessage]:
    """Convert OpenAI's messages into LangChain's; a developer message becomes a system message.

    Raises:
        InvalidInputError: a message lacks a field that its role needs.
        UnsupportedContentError: a part of a message is not text.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Message, field: str) -> BaseMessage:
    text = _text(message, field)
    named: dict[str, Any] = {"name": message.name} if message.name else {}
    if message.role == "assistant":
        thought = {"reasoning_content": message.reasoning_content} if message.reasoning_content else {}
        answer = AIMessage(text, additional_kwargs=thought, **named)
        for call in message.tool_calls or ():
            _add_call(call, answer)
        return answer
    if message.role == "tool":
        if message.tool_call_id is None:
            limit = "is required: it names the call whose result this is"
            raise InvalidInputError(f"{field}.tool_call_id", None, limit)
        return ToolMessage(text, tool_call_id=message.tool_call_id, **named)
    return (HumanMessage if message.role == "user" else SystemMessage)(text, **named)


def _text(message: Message, field: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None and message.role != "assistant":
        raise InvalidInputError(f"{field}.content", None, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(message.content or ()):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            hint = "what it shows can be written out"
            raise UnsupportedContentError(f"{field}.content[{number}].type", part.type, "must be text", hint)
        if text is None:
            raise InvalidInputError(f"{field}.content[{number}].{part.type}", None, "must be a string")
        texts.append(text)
    return "".join(texts)


def _add_call(call: Call, answer: AIMessage) -> None:
    """Add a call to a message, as an invalid one if its arguments are not a JSON object."""
    name, text = call.function.name, call.function.arguments
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        answer.tool_calls.append(tool_call(name=name, args=arguments, id=call.id))
    else:
        answer.invalid_tool_calls.append(
            invalid_tool_call(name=name, args=text, id=call.id, error="its arguments are no JSON object")
        )
