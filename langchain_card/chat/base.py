"""`ChatContract`: LangChain's requirements besides answers: fields, cache keys, profile, token counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import BaseMessage
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator
from typing_extensions import Self, override

from langchain_card.chat.engine_holder import EngineHolder, names_of
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.field_docs import JsonFields
from langchain_card.chat.reasoning import OPEN
from langchain_card.chat.sampling_options import SamplingOptions, check_options
from langchain_card.chat.schemas import response_format_dict, tool_dicts
from langchain_card.config import EngineConfig
from langchain_card.models.headers import DEFAULT_MAX_LEN, chat_template, context_length
from langchain_card.text.prompt import encode, to_conversation

if TYPE_CHECKING:
    from langchain_core.language_models.chat_models import _ChatModelBinding


class ChatContract(SamplingOptions, EngineHolder, BaseChatModel):
    """A chat model without answers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    timeout: float | None = Field(default=None, gt=0)
    """Seconds, queueing included but not loading, after which an answer is aborted with `GenerationTimeoutError`."""
    streaming: bool | None = None
    """True makes `invoke` report each token to the callbacks, too; False makes `stream` give the answer in one piece;
    None does neither."""
    max_retries: int | None = None
    """Accepted so that models can be interchanged; without effect."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Accepted so that models can be interchanged; without effect."""
    _shown_name: str | None = PrivateAttr(default=None)
    """Name of the model in answers and traces, if its own is not public; None for `model`."""

    @classmethod
    @override
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **{"schema_generator": JsonFields, **options})

    @model_validator(mode="before")
    @classmethod
    def _leave_out_none(cls, values: Any) -> Any:
        """Leave out decoding options that are None, as in a call."""
        options = set().union(*(names_of(name, info) for name, info in SamplingOptions.model_fields.items()))
        return {name: value for name, value in values.items() if value is not None or name not in options}

    @override
    def bind(self, **kwargs: Any) -> _ChatModelBinding:
        """Return the model with options for each call; see `SamplingOptions`.

        Raises:
            InvalidInputError: an option does not exist.
        """
        with langchain_errors():
            check_options(kwargs, type(self).model_fields)
        return super().bind(**kwargs)

    # Configurations.

    def to_config(self) -> dict[str, Any]:
        """Return all fields that define the model, defaults included, in types of JSON; `from_config` reads them.

        Secrets (`api_key`) are left out, and so are fields of a process or its traces: `cache`, `callbacks`,
        `rate_limiter`, `custom_get_token_ids`, `profile`, `verbose`, `tags` and `metadata`.
        """
        return self.model_dump(mode="json")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a model with the fields of `to_config`, or some of them.

        Raises:
            pydantic.ValidationError: a field is misspelt or breaks a limit.
        """
        return cls(**config)

    # Profile and token counts: from files, without weights.

    @override
    def _resolve_model_profile(self) -> ModelProfile:
        return profile_of(self.engine_config())

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """Return the target's token ids of a text, without added special tokens. No weights are loaded."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with langchain_errors():
            return list(self._tokenizer().encode(text, add_special_tokens=False, verbose=False))

    @override
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Count the tokens of the prompt made from messages and tools, chat template included. No weights are loaded.

        Args:
            messages: as for `invoke`, whose `usage_metadata["input_tokens"]` is the same number.
            tools: as for `bind_tools` without a `tool_choice`.

        Raises:
            InvalidInputError: the chat template refuses the messages, or a tool cannot be read.
        """
        with langchain_errors():
            conversation = to_conversation(self._convert_input(messages).to_messages(), self.model)
            return len(encode(conversation, self._tokenizer(), self.model, tools=tool_dicts(tools or ())))

    def _tokenizer(self) -> Any:
        from langchain_card.models.tokenizer import load_tokenizer

        return load_tokenizer(self.model)

    # Names for traces and caches.

    @property
    def _llm_type(self) -> str:
        return "card-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Fields that an answer depends on. Drafts, devices, schedule and bounds change only its speed."""
        names = ["model", "dtype", "kv_dtype", "quantization", "exact", "max_model_len", "output_version"]
        names += ["acceptance", "steering", "adapters"]
        if self.engine_config().lossy:  # drafts then change the answer
            names += ["draft_model", "draft_context", "drafters", "stack", "pins", "limits"]
        sampling = (name for name in SamplingOptions.model_fields if name not in self._speed_only)
        return {name: getattr(self, name) for name in (*names, *sampling)}

    @property
    def _speed_only(self) -> tuple[str, ...]:
        """Options of a call that change only its speed; with a lossy rule, none but `stream`."""
        return ("stream",) if self.engine_config().lossy else ("schedule", "draft_model", "stream", "tenant", "session")

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop=self._stop_strings(stop), **kwargs)

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Return the model's part of a cache key. None means the field's value, except for `draft_model`."""
        options = {
            name: value
            for name, value in kwargs.items()
            if (value is not None or name == "draft_model") and name not in self._speed_only
        }
        with langchain_errors():  # as dicts: classes and functions of equal names may differ
            if "tools" in options:
                options["tools"] = tool_dicts(options["tools"], distinct=False)
            if "response_format" in options:
                options["response_format"] = response_format_dict(options["response_format"])
        return super()._get_llm_string(stop=stop, **options)

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self._stop_strings(stop), **kwargs)
        params["ls_provider"] = "card"
        if self._shown_name is not None:
            params["ls_model_name"] = self._shown_name
        return params

    def _stop_strings(self, stop: str | list[str] | None) -> list[str] | None:
        """Return the stop strings of a call with the option `stop`."""
        stop = self.stop if stop is None else stop
        return [stop] if isinstance(stop, str) else stop


def profile_of(config: EngineConfig) -> ModelProfile:
    """Return the profile of the model that an engine of this configuration runs.

    `max_input_tokens` is the longest prompt that the engine accepts, `max_output_tokens` the longest answer; both are
    left out if the model's files do not state the length of its context.
    """
    profile = ModelProfile(
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=OPEN in chat_template(config.model),
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
        temperature=True,
    )
    trained = context_length(config.model)
    length = config.max_model_len or (trained and DEFAULT_MAX_LEN)
    if length is not None:
        room = min(length, trained or length) - config.limits.max_window - 1  # and a token for answer or prompt
        profile["max_input_tokens"] = max(room, 0)
        profile["max_output_tokens"] = max(min(room, config.limits.max_output_tokens), 0)
    return profile
