"""Decoding options under LangChain's names: fields of the model, and options of a call."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from langchain_card.config import Schedule
from langchain_card.core.request import SamplingParams
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits

_CORE_OPTIONS = ("stream", "ls_structured_output_format", "structured_output_format")
"""LangChain's own options, which some of its paths pass on."""
_FORM_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
"""Options for the form of an answer; `chat/answer_shape.py` reads them."""
_CALL_OPTIONS = ("max_completion_tokens", "model", "draft_model", *_FORM_OPTIONS)
"""Options of a call besides the fields of `SamplingOptions`."""
OTHER_NAMES = {
    "context_window": "max_model_len",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "model_id": "model",
    "model_path": "model",
    "n_ctx": "max_model_len",
    "n_predict": "max_tokens",
    "num_ctx": "max_model_len",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
"""Names that other chat models have for fields of this one."""


class SamplingOptions(BaseModel):
    """Fields for the decoding of answers; each may also be given to a call."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    schedule: Schedule = "auto"
    """`"plain"` (target alone), `"sequential"` (draft, then verify), `"parallel"` (both at once) or `"auto"`."""
    max_tokens: int = Field(default=512, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    """Most tokens of an answer. `max_completion_tokens` is another name of it."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0, up to 10, tokens are drawn."""
    seed: int | None = None
    """Seed of the draws; None draws a seed per call. `response_metadata["card"]["seed"]` holds the seed in use."""
    stop: str | list[str] | None = None
    """Strings that end the answer; they are not part of it. A call's `stop` takes their place."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 for all."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest ones that together reach this probability; 1 for all."""
    min_p: float = 0.0
    """Least probability of a token that is drawn, as a share of the likeliest token's; 0 for all."""
    repetition_penalty: float = 1.0
    """Divisor of the scores of tokens in prompt or answer (negative scores are multiplied by it); 1 for none."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens in the answer, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the scores of tokens for each time that they occur in the answer, -2 to 2."""
    logit_bias: dict[int, float] | None = None
    """Values from -100 to 100, by token id, that are added to the tokens' scores."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` holds the target's log-probability of each token, in OpenAI's shape."""
    top_logprobs: int | None = None
    """Number of likeliest tokens to report beside each token; needs `logprobs`."""
    tenant: str = ""
    """Name (no secret) of the user or group whose earlier texts may be reused, in drafts and for beginnings of prompts;
    texts of other tenants never are. Memory and measured rates are shared, so others may change the speed."""
    session: str = ""
    """Name of the conversation: of several `replicas`, one answers all of it, because it has read the beginning. "" for
    a name that is made of the system message and the first human one."""
    adapter: str = ""
    """Name of the adapter, one of `adapters`, with which the target answers; "" for none."""

    def sampling_params(self, stop: str | Sequence[str] | None, options: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of one call. Its options override the fields; None leaves the field's value.

        Raises:
            InvalidInputError: an option is unknown or breaks its bound.
        """
        check_options(options, type(self).model_fields)
        given = {name: value for name, value in options.items() if value is not None}
        names = [name for name in SamplingOptions.model_fields if name != "stop"]
        values = {name: given.get(name, getattr(self, name)) for name in names}
        logprobs, top_logprobs, seed = values.pop("logprobs"), values.pop("top_logprobs"), values.pop("seed")
        if top_logprobs is not None and not logprobs:
            raise InvalidInputError("top_logprobs", top_logprobs, "is of no use without logprobs", "set logprobs=True")
        stop = self.stop if stop is None else stop
        values |= {
            "max_tokens": given.get("max_completion_tokens", values["max_tokens"]),
            "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
            "logit_bias": tuple((_token_id(key), bias) for key, bias in (values["logit_bias"] or {}).items()),
        }
        params = SamplingParams(**values, seed=seed or 0, logprobs=(top_logprobs or 0) if logprobs else None)
        params.check(Limits())
        return replace(params, seed=secrets.randbits(32)) if seed is None and not params.greedy else params


def check_options(options: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """Raise `InvalidInputError`, with the nearest name as a hint, if an option of a call does not exist.

    Args:
        options: values by name.
        fields: names of the model's fields, which are no options of a call.
    """
    known = ("stop", *(name for name in SamplingOptions.model_fields if name != "stop"), *_CALL_OPTIONS)
    for name, value in options.items():
        if name not in (*known, *_CORE_OPTIONS):
            limit = f"is not an option of a call; there are {', '.join(known)}"
            if name in fields:
                raise InvalidInputError(name, value, limit, "it is a field: say it where the model is made")
            raise unknown_name(name, value, limit, (*known, *fields))


def _token_id(key: Any) -> Any:
    """Convert a key from JSON, where keys are strings."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def unknown_name(name: str, value: Any, limit: str, known: Sequence[str], hint: str = "") -> InvalidInputError:
    """Return the error for a name that does not exist, with the nearest known name as a hint, or else `hint`."""
    other = OTHER_NAMES.get(name)
    near = [other] if other in known else difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return InvalidInputError(name, value, limit, f"did you mean {near[0]}" if near else hint)
