"""How a chat model decodes, as LangChain names it: fields of the model, and options of a call."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from langchain_card.config import Limits, Schedule
from langchain_card.core.request import SamplingParams
from langchain_card.errors import InvalidInputError

_CORE_OPTIONS = ("stream", "ls_structured_output_format", "structured_output_format")
"""LangChain's own switches; some of its paths hand them on."""
_FORM_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
"""What form an answer takes; `chat/schemas.py` reads them."""
_CALL_OPTIONS = ("max_completion_tokens", "model", "draft_model", *_FORM_OPTIONS)
"""What a call may say besides the fields of `SamplingOptions`."""


class SamplingOptions(BaseModel):
    """Fields that say how an answer is decoded; each may also be given to a call."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    schedule: Schedule = "auto"
    """`"plain"` (target alone), `"sequential"` (draft, then verify), `"parallel"` (both at once) or `"auto"`."""
    max_tokens: int = 512
    """Tokens of the answer at most. A call may say `max_completion_tokens`."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, up to 10, tokens are drawn."""
    seed: int | None = None
    """Of the draw; None draws a seed per call. `response_metadata["card"]["seed"]` tells which one was used."""
    stop: str | list[str] | None = None
    """Strings that end the answer; they are not part of it. A call's `stop` takes their place."""
    top_k: int = 0
    """Draws from so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draws from the likeliest tokens that together reach this chance; 1 for all."""
    min_p: float = 0.0
    """Draws from tokens at least so likely, as a share of the likeliest one's chance; 0 for all."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens in prompt or answer (negative ones are multiplied); 1 for none."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens in the answer, -2 to 2."""
    frequency_penalty: float = 0.0
    """The same for each time that the token occurs."""
    logit_bias: dict[int, float] | None = None
    """By token id, -100 to 100: added to its score."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` holds the target's log-probability of each token, in OpenAI's shape."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each; needs `logprobs`."""
    tenant: str = ""
    """Whose texts an answer may be drafted from, and go on from without reading them again: another tenant's text never
    is. What others do may change its speed: memory and measured rates are shared. A name and no secret."""

    def sampling_params(self, stop: str | Sequence[str] | None, options: Mapping[str, Any]) -> SamplingParams:
        """How one call decodes: its own options before the fields. An option that is None leaves the field's value.

        Raises:
            InvalidInputError: an option is unknown or breaks its bound.
        """
        check_options(options, type(self).model_fields)
        given = {name: value for name, value in options.items() if value is not None}
        names = [name for name in SamplingOptions.model_fields if name != "stop"]
        said = {name: given.get(name, getattr(self, name)) for name in names}
        logprobs, top_logprobs, seed = said.pop("logprobs"), said.pop("top_logprobs"), said.pop("seed")
        if top_logprobs is not None and not logprobs:
            raise InvalidInputError("top_logprobs", top_logprobs, "is of no use without logprobs", "set logprobs=True")
        stop = self.stop if stop is None else stop
        said |= {
            "max_tokens": given.get("max_completion_tokens", said["max_tokens"]),
            "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
            "logit_bias": tuple((_token_id(key), bias) for key, bias in (said["logit_bias"] or {}).items()),
        }
        params = SamplingParams(**said, seed=seed or 0, logprobs=(top_logprobs or 0) if logprobs else None)
        params.check(Limits())
        return replace(params, seed=secrets.randbits(32)) if seed is None and params.temperature > 0 else params


def check_options(options: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """Raises `InvalidInputError`, with the nearest name, unless these are options of a call.

    Args:
        options: by name.
        fields: of the model, which some may be taken for.
    """
    known = ("stop", *(name for name in SamplingOptions.model_fields if name != "stop"), *_CALL_OPTIONS)
    for name, value in options.items():
        if name not in (*known, *_CORE_OPTIONS):
            limit = f"is not an option of a call; there are {', '.join(known)}"
            if name in fields:
                raise InvalidInputError(name, value, limit, "it is a field: say it where the model is made")
            raise unknown_name(name, value, limit, known)


def _token_id(key: Any) -> Any:
    """JSON has texts for keys."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def unknown_name(name: str, value: Any, limit: str, known: Sequence[str]) -> InvalidInputError:
    """The error for a name that does not exist, with the one that was probably meant."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return InvalidInputError(name, value, limit, f"did you mean {near[0]}" if near else "")
