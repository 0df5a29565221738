"""What requests of LangServe's clients say. Of their configuration the four fields of `Configurable` count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from langchain_core.messages import AnyMessage
from langchain_core.prompt_values import ChatPromptValueConcrete, StringPromptValue
from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)
from typing_extensions import Self

from langchain_card.errors import InvalidInputError
from langchain_card.serve.parsing import Number, Whole
from langchain_card.serve.settings import MOST_MESSAGES

MOST_BATCHED = 16 * MOST_MESSAGES
Names = Annotated[list[str], Field(max_length=256)]


def _num_said(value: Any) -> int:
    messages = value.get("messages") if isinstance(value, Mapping) else value
    return len(messages) if isinstance(messages, list) else 1


def _read(value: Any, read: Callable[[Any], Any]) -> Any:
    """LangChain's messages, whose validators trust what they are given, and take their time."""
    if _num_said(value) > MOST_MESSAGES:
        raise ValueError(f"must have {MOST_MESSAGES:,} messages at most")
    try:
        return read(value)
    except ValidationError:
        raise
    except Exception as error:
        raise ValueError(f"holds no message of LangChain ({type(error).__name__})") from error


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "prompt" if "messages" in value else "text prompt"
    return "messages" if isinstance(value, list) else "text"


Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[AnyMessage], Tag("messages")]
    | Annotated[StringPromptValue, Tag("text prompt")]
    | Annotated[ChatPromptValueConcrete, Tag("prompt")],
    Discriminator(_kind),
    WrapValidator(_read),
]
"""What a chat model may be asked."""


def _shown(schema: dict[str, Any]) -> None:
    """The schema of a field that may be left out, without its null: LangServe's page does not show that."""
    del schema["default"]
    schema.update(schema.pop("anyOf")[0])


class Configurable(BaseModel):
    """How an answer is decoded; what is left out or null is as the served model has it."""

    stop: list[str] | str | None = Field(
        default=None, description="Texts that end the answer, and are no part of it.", json_schema_extra=_shown
    )
    seed: Whole | None = Field(
        default=None, description="Of the draw: with the same one comes the same answer.", json_schema_extra=_shown
    )
    temperature: Number | None = Field(
        default=None,
        description="0 takes the likeliest token; above, up to 10, tokens are drawn.",
        json_schema_extra=_shown,
    )
    max_tokens: Whole | None = Field(
        default=None, description="Tokens of the answer at most.", json_schema_extra=_shown
    )

    @property
    def options(self) -> dict[str, Any]:
        """Those of a call of the chat model."""
        given = self.model_dump(exclude_none=True)
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        return given


class Config(BaseModel):
    """Of LangChain's `RunnableConfig` what counts here; clients send all of theirs."""

    configurable: Configurable = Configurable()


class Asked(BaseModel):
    """What all requests have."""

    kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_kwargs(self) -> Self:
        if self.kwargs:
            hint = f'say config={{"configurable": {{...}}}}, with {", ".join(Configurable.model_fields)}'
            raise InvalidInputError("kwargs", [*self.kwargs], "are not taken", hint)
        return self


class InvokeRequest(Asked):
    """The body of `/invoke` and `/stream`."""

    input: Input
    config: Config = Config()

    @property
    def options(self) -> dict[str, Any]:
        """Those of a call of the chat model."""
        return self.config.configurable.options


class LogRequest(InvokeRequest):
    """The body of `/stream_log` and `/stream_events`."""

    include_names: Names | None = None
    include_types: Names | None = None
    include_tags: Names | None = None
    exclude_names: Names | None = None
    exclude_types: Names | None = None
    exclude_tags: Names | None = None

    @property
    def filters(self) -> dict[str, Sequence[str] | None]:
        """Which events are asked for, in LangChain's words."""
        return {name: getattr(self, name) for name in LogRequest.model_fields if "clude_" in name}


def _check_sum(inputs: Any) -> Any:
    """Messages of all inputs; to find out what each of a million is takes seconds."""
    if isinstance(inputs, list) and sum(map(_num_said, inputs)) > MOST_BATCHED:
        raise ValueError(f"must have {MOST_BATCHED:,} messages at most, all inputs together")
    return inputs


class BatchRequest(Asked):
    """The body of `/batch`."""

    inputs: Annotated[list[Input], Field(max_length=MOST_MESSAGES), BeforeValidator(_check_sum)]
    config: Config | list[Config] = Config()

    @property
    def options(self) -> list[dict[str, Any]]:
        """Those of the call for each input.

        Raises:
            InvalidInputError: there are not as many configurations as inputs.
        """
        count = len(self.inputs)
        if not isinstance(self.config, list):
            return [self.config.configurable.options] * count
        if len(self.config) != count:
            limit = f"must be one for all inputs, or one for each of the {count:,}"
            raise InvalidInputError("config", f"a list of {len(self.config):,}", limit)
        return [config.configurable.options for config in self.config]


def num_messages(asked: Any) -> int:
    """Of an input."""
    if isinstance(asked, ChatPromptValueConcrete):
        return len(asked.messages)
    return len(asked) if isinstance(asked, list) else 1
