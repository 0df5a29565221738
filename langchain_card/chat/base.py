"""What LangChain asks of a chat model besides answers: fields, names for traces and caches, profile, token counts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import BaseMessage
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator
from typing_extensions import Self, override

from langchain_card.chat.engine_options import EngineOptions
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.field_docs import JsonFields, fields_section
from langchain_card.chat.profile import profile_of
from langchain_card.chat.sampling_options import SamplingOptions, check_options, unknown_name
from langchain_card.chat.schemas import response_format_dict, tool_dicts
from langchain_card.text.prompt import encode, to_conversation

if TYPE_CHECKING:
    from langchain_core.language_models.chat_models import _ChatModelBinding


class ChatContract(SamplingOptions, EngineOptions, BaseChatModel):
    """A chat model but for its answers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    timeout: float | None = Field(default=None, gt=0)
    """Seconds, queueing included and loading not, after which an answer is aborted with `GenerationTimeoutError`."""
    streaming: bool | None = None
    """True makes `invoke` report each token to the callbacks, too; False makes `stream` give the answer in one piece;
    None does neither."""
    max_retries: int | None = None
    """Accepted so that models can be interchanged; without effect."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Accepted so that models can be interchanged; without effect."""
    _shown_name: str | None = PrivateAttr(default=None)
    """What answers and traces call the model, where its own name is not for everybody; None for `model`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{fields_section(cls)}\n"

    @classmethod
    @override
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **{"schema_generator": JsonFields, **options})

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        aliases = (alias for info in cls.model_fields.values() for alias in (info.alias, info.validation_alias))
        known = [*cls.model_fields, "model_name", *(alias for alias in aliases if isinstance(alias, str))]
        for name in values if cls.model_config.get("extra") == "forbid" else ():
            if name not in known:
                raise unknown_name(name, values[name], f"is not a field of {cls.__name__}", known)
        return values

    @override
    def bind(self, **kwargs: Any) -> _ChatModelBinding:
        """The model with options for each call; see `SamplingOptions`.

        Raises:
            InvalidInputError: there is no such option.
        """
        with langchain_errors():
            check_options(kwargs, type(self).model_fields)
        return super().bind(**kwargs)

    # Configurations.

    def to_config(self) -> dict[str, Any]:
        """All fields that make the model what it is, defaults too, in types of JSON; `from_config` reads them.

        Left out are secrets (`api_key`) and what belongs to a process or its traces: `cache`, `callbacks`,
        `rate_limiter`, `custom_get_token_ids`, `profile`, `verbose`, `tags` and `metadata`.
        """
        return self.model_dump(mode="json")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A model with the fields of `to_config`, or some of them.

        Raises:
            pydantic.ValidationError: a field is misspelt or breaks a limit.
        """
        return cls(**config)

    # Profile and token counts: from files, without weights.

    @override
    def _resolve_model_profile(self) -> ModelProfile:
        return profile_of(self._engine_config())

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the target's tokenizer, special tokens not added. Loads no weights."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with langchain_errors():
            return list(self._tokenizer().encode(text, add_special_tokens=False, verbose=False))

    @override
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that messages and tools become, chat template included. Loads no weights.

        Args:
            messages: as for `invoke`, whose `usage_metadata["input_tokens"]` is the same number.
            tools: as for `bind_tools`.

        Raises:
            InvalidInputError: the chat template refuses the messages, or a tool is none.
        """
        with langchain_errors():
            read = self._convert_input(messages).to_messages()
            conversation, tokenizer = to_conversation(read, self.model), self._tokenizer()
            given: dict[str, Any] = {"tools": tool_dicts(tools)} if tools else {}
            return len(encode(conversation, tokenizer, self.model, **given))

    def _tokenizer(self) -> Any:
        from langchain_card.models.tokenizer import load_tokenizer

        return load_tokenizer(self.model)

    # Names for traces and caches.

    @property
    def _llm_type(self) -> str:
        return "card-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What the answer depends on; drafts, devices, schedule and bounds change its speed only."""
        names = ["model", "dtype", "quantization", "exact", "max_model_len", "output_version", "acceptance", "steering"]
        if self._engine_config().lossy:  # but then drafts write, too
            names += ["draft_model", "drafters", "stack", "pins", "limits"]
        sampling = (name for name in SamplingOptions.model_fields if name not in self._speed_only)
        return {name: getattr(self, name) for name in (*names, *sampling)}

    @property
    def _speed_only(self) -> tuple[str, ...]:
        """Options of a call that change nothing but its speed; none but `stream` where drafts write, too."""
        return ("stream",) if self._engine_config().lossy else ("schedule", "draft_model", "stream", "tenant")

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop=self._stop_strings(stop), **kwargs)

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The model's part of a cache's key. An option that is None is the field's value, but for `draft_model`."""
        named = {name: value for name, value in kwargs.items() if value is not None or name == "draft_model"}
        given = {name: value for name, value in named.items() if name not in self._speed_only}
        with langchain_errors():  # classes and functions of one name may differ
            if "tools" in given:
                given["tools"] = tool_dicts(given["tools"], distinct=False)
            if "response_format" in given:
                given["response_format"] = response_format_dict(given["response_format"])
        return super()._get_llm_string(stop=stop, **given)

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self._stop_strings(stop), **kwargs)
        params["ls_provider"] = "card"
        if self._shown_name is not None:
            params["ls_model_name"] = self._shown_name
        return params

    def _stop_strings(self, stop: str | list[str] | None) -> list[str] | None:
        """The stop strings of a call that says `stop`."""
        stop = self.stop if stop is None else stop
        return [stop] if isinstance(stop, str) else stop
