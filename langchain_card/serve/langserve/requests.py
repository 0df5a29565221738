"""Schemas of LangServe's requests. Only the four fields of `Configurable` are read from their configuration."""

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
from langchain_card.serve.settings import MAX_MESSAGES

MAX_BATCH_MESSAGES = 16 * MAX_MESSAGES
Names = Annotated[list[str], Field(max_length=256)]


def num_messages(value: Any) -> int:
    """Return the number of messages in an input, before or after its validation."""
    if isinstance(value, ChatPromptValueConcrete):
        return len(value.messages)
    messages = value.get("messages") if isinstance(value, Mapping) else value
    return len(messages) if isinstance(messages, list) else 1


def _validate(value: Any, validator: Callable[[Any], Any]) -> Any:
    """Validate an input within a limit: LangChain's validators are slow and fail on unexpected types."""
    if num_messages(value) > MAX_MESSAGES:
        raise ValueError(f"must have {MAX_MESSAGES:,} messages at most")
    try:
        return validator(value)
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
    WrapValidator(_validate),
]
"""Every form of input that a chat model accepts."""


def _without_null(schema: dict[str, Any]) -> None:
    """Remove null and the default from the schema of an optional field: LangServe's page cannot show them."""
    del schema["default"]
    schema.update(schema.pop("anyOf")[0])


class Configurable(BaseModel):
    """Sampling parameters of a request; an omitted or null field takes the served model's value."""

    stop: list[str] | str | None = Field(
        default=None, description="Texts that end the answer; they are not part of it.", json_schema_extra=_without_null
    )
    seed: Whole | None = Field(
        default=None,
        description="Seed of the draw: the same seed gives the same answer.",
        json_schema_extra=_without_null,
    )
    temperature: Number | None = Field(
        default=None,
        description="0 takes the likeliest token; above, up to 10, tokens are drawn.",
        json_schema_extra=_without_null,
    )
    max_tokens: Whole | None = Field(
        default=None, description="Tokens of the answer at most.", json_schema_extra=_without_null
    )

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a call of the chat model."""
        options = self.model_dump(exclude_none=True)
        if isinstance(self.stop, str):
            options["stop"] = [self.stop]
        return options


class Config(BaseModel):
    """The part of LangChain's `RunnableConfig` that is read; clients send all of it."""

    configurable: Configurable = Configurable()


class BaseRequest(BaseModel):
    """Fields that all requests share."""

    kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_kwargs(self) -> Self:
        if self.kwargs:
            hint = f'say config={{"configurable": {{...}}}}, with {", ".join(Configurable.model_fields)}'
            raise InvalidInputError("kwargs", [*self.kwargs], "are not taken", hint)
        return self


class InvokeRequest(BaseRequest):
    """The body of `/invoke` and `/stream`."""

    input: Input
    config: Config = Config()

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of a call of the chat model."""
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
        """Return LangChain's arguments that select events."""
        return {name: getattr(self, name) for name in LogRequest.model_fields if "clude_" in name}


def _check_sum(inputs: Any) -> Any:
    """Limit the messages of all inputs together: validating a million takes seconds."""
    if isinstance(inputs, list) and sum(map(num_messages, inputs)) > MAX_BATCH_MESSAGES:
        raise ValueError(f"must have {MAX_BATCH_MESSAGES:,} messages at most, all inputs together")
    return inputs


class BatchRequest(BaseRequest):
    """The body of `/batch`."""

    inputs: Annotated[list[Input], Field(max_length=MAX_MESSAGES), BeforeValidator(_check_sum)]
    config: Config | list[Config] = Config()

    @property
    def options(self) -> list[dict[str, Any]]:
        """Return the options of the call for each input.

        Raises:
            InvalidInputError: the number of configurations differs from the number of inputs.
        """
        count = len(self.inputs)
        if not isinstance(self.config, list):
            return [self.config.configurable.options] * count
        if len(self.config) != count:
            limit = f"must be one for all inputs, or one for each of the {count:,}"
            raise InvalidInputError("config", f"a list of {len(self.config):,}", limit)
        return [config.configurable.options for config in self.config]
