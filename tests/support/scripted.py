"""A chat model that says what it is told to, and tools and schemas of all kinds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from pydantic import BaseModel, Field, PrivateAttr
from pydantic import v1 as pydantic_v1
from typing_extensions import TypedDict

from langchain_card import CARDChatModel
from tests.support import SMALL

JOKE = {"setup": "Why do cats sit?", "punchline": "They stand \u4e0d."}


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="how it begins")
    punchline: str | None = Field(default=None, description="how it ends")


class OldJoke(pydantic_v1.BaseModel):
    """A joke."""

    setup: str = pydantic_v1.Field(description="how it begins")
    punchline: str


class JokeDict(TypedDict):
    """A joke."""

    setup: Annotated[str, ..., "how it begins"]
    punchline: Annotated[str | None, None, "how it ends"]


class PartialJoke(TypedDict, total=False):
    """A joke.

    Args:
        setup: how it begins
    """

    setup: str
    punchline: Annotated[str | None, None, "how it ends"]


class Node(BaseModel):
    """A tree."""

    value: int
    children: list[Node] = []


PARAMETERS = Joke.model_json_schema()
FUNCTION = {"name": "Joke", "description": "A joke.", "parameters": PARAMETERS}
SCHEMAS: dict[str, Any] = {
    "pydantic": Joke,
    "pydantic_v1": OldJoke,
    "typeddict": JokeDict,
    "partial": PartialJoke,
    "json_schema": PARAMETERS,
    "function": FUNCTION,
    "tool": {"type": "function", "function": FUNCTION},
    "anthropic": {"type": "custom", "name": "Joke", "description": "A joke.", "input_schema": PARAMETERS},
}


class Scripted(CARDChatModel):
    """Says what it is told to, and keeps the options of each call."""

    _answer: AIMessage = PrivateAttr()
    _seen: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self._seen.append(kwargs)
        return ChatResult(generations=[ChatGeneration(message=self._answer)])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return self._generate(*args, **kwargs)

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        self._seen.append(kwargs)
        for character in self._answer.text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=character))
        for call in self._answer.tool_calls:
            first: Any = {"name": call["name"], "id": call["id"], "args": "", "index": 0}
            rest: Any = ({"name": None, "id": None, "args": c, "index": 0} for c in json.dumps(call["args"]))
            for part in (first, *rest):
                yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[part]))
        yield ChatGenerationChunk(message=AIMessageChunk(content="", chunk_position="last"))

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream(*args, **kwargs):
            yield chunk


def scripted(answer: Any, name: str | None = None) -> Scripted:
    """A model that says a text or JSON, or calls a tool with it."""
    model = Scripted(model=SMALL, draft_model=None)
    text = answer if isinstance(answer, str) else json.dumps(answer)
    model._answer = AIMessage(text) if name is None else AIMessage("", tool_calls=[call(name, answer)])
    return model


def call(name: str, args: Any) -> Any:
    return {"name": name, "args": args, "id": "call_1"}


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def weather(place: str, days: int = 1) -> str:
    """The weather.

    Args:
        place: where
    """
    return place
