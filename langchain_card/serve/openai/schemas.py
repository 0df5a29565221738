"""Schemas of OpenAI's requests.

Unknown fields are ignored, because clients send fields of other servers. Known fields that are not supported are
refused by name, and so are names that look like misspelt ones, or that other libraries have for a field which the
request leaves out. Bounds of sampling parameters are checked by `SamplingParams.check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, model_validator
from typing_extensions import Self

from langchain_card.chat.sampling_options import OTHER_NAMES
from langchain_card.config import Schedule
from langchain_card.errors import InvalidInputError, check_range
from langchain_card.serve.error_bodies import ErrorBody
from langchain_card.serve.parsing import Number, Whole
from langchain_card.serve.settings import MAX_MESSAGES

Name = Annotated[str, Field(min_length=1, max_length=256)]
Object = dict[str, Any]

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request cannot be answered as it is."},
    401: {"model": ErrorBody, "description": "No key of this server."},
    403: {"model": ErrorBody, "description": "`Host` names another server."},
    404: {"model": ErrorBody, "description": "No such model is served."},
    408: {"model": ErrorBody, "description": "The body came too slowly."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "Never sent: what does not fit is a 400."},
    429: {"model": ErrorBody, "description": "Too many requests wait; `Retry-After` tells when to come again."},
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The server is closing, or cannot answer in time."},
    504: {"model": ErrorBody, "description": "The answer took longer than it was allowed to."},
}
"""Error responses of all routes, for the OpenAPI document."""
STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"description": "The answer; with `stream`, its pieces.", "content": {"text/event-stream": {}}},
}
"""Responses of routes that can stream, for the OpenAPI document."""
_ABSENT: dict[str, tuple[Any, ...]] = {
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logprobs": (False,),
    "seed": (-1,),
    "stop": ("", []),
    "suffix": ("",),
    "top_k": (-1,),
}
"""Values, by field, that clients send in place of leaving the field out."""
MAX_TEMPERATURE = 2.0
"""Highest temperature of a request, as with OpenAI: a higher one is a mistake."""
MISSPELT = 0.85
"""Similarity to a field's name from which an unknown name is refused."""
_TEXT_ONLY = "the model reads and writes text only"
_NO_FUNCTIONS = "use tools and tool_choice"


def _is_absent(name: str, value: Any) -> bool:
    return any(value == absent and type(value) is type(absent) for absent in _ABSENT.get(name, ()))


class Part(BaseModel):
    """A part of a message's content."""

    type: Name
    text: str | None = None
    refusal: str | None = None


class CalledFunction(BaseModel):
    """The function of a call: its name and its arguments as JSON text."""

    name: Name
    arguments: str


class Call(BaseModel):
    """A tool call in a message of the assistant."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=1024)] | None = None
    name: Annotated[Name | None, BeforeValidator(lambda name: None if name == "" else name)] = None
    tool_calls: Annotated[list[Call], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: StrictBool = False


class Decoding(BaseModel):
    """Fields that both endpoints share; an omitted field takes the served model's value."""

    model: Name
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    schedule: Schedule | None = None
    prompt_cache_key: Any = Field(
        default=None, description="name of the conversation; where there are replicas, one of them answers all of it"
    )
    user: Any = Field(default=None, description="in place of prompt_cache_key")
    card: StrictBool = Field(
        default=False, description="add to each event the drafter that proposed each of its tokens"
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in body.keys() - cls.model_fields:
            other = OTHER_NAMES.get(name)
            near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=MISSPELT)
            if other in cls.model_fields and other not in body:
                near = [other]
            if near:
                raise InvalidInputError(name, body[name], "is not a field of a request", f"did you mean {near[0]}")
        return {name: value for name, value in body.items() if not _is_absent(name, value)}

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.temperature is not None:
            check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if self.n not in (None, 1):
            raise InvalidInputError("n", self.n, "must be 1", "send the request again, with another seed")
        if self.stream_options is not None and self.stream is None:
            raise InvalidInputError("stream_options", "{...}", "is for streams only", "set stream to true")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a call of the chat model."""
        return self._given(*(name for name in Decoding.model_fields if name not in _NO_OPTIONS))

    @property
    def session(self) -> str:
        """Return the name of the conversation, or ""."""
        return str(self.prompt_cache_key or self.user or "")

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _refuse(self, hints: Mapping[str, str]) -> None:
        for name, hint in hints.items():
            if (value := getattr(self, name)) not in (None, False):
                raise InvalidInputError(name, value, "is not supported", hint)


_NO_OPTIONS = ("model", "stream", "stream_options", "n", "card", "stop", "prompt_cache_key", "user")


class ChatRequest(Decoding):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Whole | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Whole | None = None
    tools: Annotated[list[Object], Field(max_length=128)] | None = None
    tool_choice: Name | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: Object | None = None
    modalities: Annotated[list[Name], Field(max_length=8)] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check_support(self) -> Self:
        if self.modalities not in (None, ["text"]):
            raise InvalidInputError("modalities", self.modalities, 'must be ["text"]', _TEXT_ONLY)
        hints = {"functions": _NO_FUNCTIONS, "function_call": _NO_FUNCTIONS, "audio": _TEXT_ONLY}
        self._refuse({**hints, "web_search_options": "nothing is searched here"})
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a call of the chat model."""
        names = ("max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls")
        given = self._given(*names, "tools", "response_format")
        if not self.logprobs and not self.top_logprobs:
            given.pop("top_logprobs", None)
        return {**super().options, **given}


class CompletionRequest(Decoding):
    """The body of `/v1/completions`."""

    prompt: str | list[Any] = Field(description="a text, its token ids, or a list of one of these")
    logprobs: Whole | None = Field(default=None, description="so many of the likeliest tokens beside each")
    best_of: Whole | None = None
    echo: StrictBool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_support(self) -> Self:
        if self.best_of not in (None, 1):
            raise InvalidInputError("best_of", self.best_of, "must be 1", "send the request again, with another seed")
        self._refuse({"echo": "the prompt is known already", "suffix": "put it into the prompt, as the model knows it"})
        prompt = self.one_prompt
        if not isinstance(prompt, str) and {*map(type, prompt)} != {int}:
            raise InvalidInputError("prompt", self.prompt, "must be one text, or the token ids of one")
        return self

    @property
    def one_prompt(self) -> str | list[int]:
        """Return the prompt, unpacked if it is a list of one."""
        if isinstance(self.prompt, list) and len(self.prompt) == 1 and isinstance(self.prompt[0], (str, list)):
            return self.prompt[0]
        return self.prompt
