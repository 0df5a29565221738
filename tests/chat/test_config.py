"""A `CARDChatModel` in words: configurations, defaults from the environment, `help`, schemas."""

from __future__ import annotations

import json
import pickle
import pydoc
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.rate_limiters import InMemoryRateLimiter
from pydantic import Field, ValidationError

from langchain_card import CARDChatModel
from langchain_card.chat.field_docs import INHERITED, described
from langchain_card.limits import Limits, Pins

OTHER: dict[str, Any] = {
    "draft_model": "ngram",
    "device": "cpu",
    "dtype": "float64",
    "quantization": '{"quant_method": "torchao"}',
    "exact": "strict",
    "max_model_len": 100,
    "pins": Pins(window=2),
    "limits": Limits(max_num_seqs=3, deaths_seconds=5.0),
    "timeout": 30.0,
    "streaming": True,
    "schedule": "plain",
    "max_tokens": 5,
    "temperature": 0.5,
    "seed": 3,
    "stop": ["x", "\n"],
    "logit_bias": {40: 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "output_version": "v1",
    "name": "mine",
    "disable_streaming": "tool_calling",
}
PROCESS: dict[str, Any] = {
    "api_key": "very secret",
    "cache": InMemoryCache(),
    "rate_limiter": InMemoryRateLimiter(),
    "custom_get_token_ids": len,
    "metadata": {"user": object()},
    "tags": ["a"],
}


def fields_of(model: CARDChatModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in CARDChatModel.model_fields if name not in ("metadata", *PROCESS)}


# Configurations


@pytest.mark.parametrize("fields", [{}, OTHER, {"draft_model": None, "quantization": None}])
def test_configurations_make_equal_models(toy: dict[str, Any], fields: dict[str, Any]) -> None:
    model = CARDChatModel(**{**toy, **fields}, **PROCESS)
    written = json.dumps(model.to_config(), allow_nan=False)
    again = CARDChatModel.from_config(json.loads(written))
    assert fields_of(again) == fields_of(model)
    assert again.engine_config() == model.engine_config()
    assert again._get_llm_string() == model._get_llm_string()
    assert again.to_config() == model.to_config()
    assert "secret" not in written and again.api_key is None


def test_a_configuration_says_all_that_a_model_is(toy: dict[str, Any]) -> None:
    left_out = {"api_key", "cache", "callbacks", "custom_get_token_ids", "metadata", "profile", "rate_limiter", "tags"}
    assert set(CARDChatModel(**toy).to_config()) == set(CARDChatModel.model_fields) - left_out - {"verbose"}


def test_a_configuration_holds_the_defaults_of_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CARDChatModel().to_config()
    monkeypatch.setenv("LANGCHAIN_CARD_MODEL", "smollm2-135m")
    assert CARDChatModel.from_config(config).model == "qwen2.5-coder-1.5b"


def test_configurations_are_checked(toy: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="did you mean max_tokens"):
        CARDChatModel.from_config({**toy, "max_token": None})
    with pytest.raises(ValidationError, match="max_tokens = -1"):
        CARDChatModel.from_config({**toy, "max_tokens": -1})
    assert CARDChatModel.from_config(toy).max_tokens == 8, "some of the fields are enough"


def test_configurations_make_subclasses(toy: dict[str, Any]) -> None:
    class Mine(CARDChatModel):
        """A user's own."""

        mood: str = "good"
        """Of the model."""

    model = Mine.from_config({**toy, "mood": "bad"})
    assert type(model) is Mine and model.to_config()["mood"] == "bad"
    assert "mood (str, default 'good'):\n        Of the model." in str(Mine.__doc__)


def test_langchains_own_serialisation_stays_off(toy: dict[str, Any]) -> None:
    assert not CARDChatModel.is_lc_serializable()
    model = CARDChatModel(**toy, api_key="very secret")
    assert pickle.loads(pickle.dumps(model)).api_key == model.api_key
    assert "very secret" not in repr(model) + str(model.to_json())


# The environment


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")),
        ({"LANGCHAIN_CARD_MODEL": "smollm2-135m"}, ("smollm2-135m", "qwen2.5-coder-0.5b")),
        ({"LANGCHAIN_CARD_DRAFT_MODEL": "ngram"}, ("qwen2.5-coder-1.5b", "ngram")),
        ({"LANGCHAIN_CARD_MODEL": "smollm2-135m", "LANGCHAIN_CARD_DRAFT_MODEL": "none"}, ("smollm2-135m", None)),
        ({"LANGCHAIN_CARD_MODEL": "", "LANGCHAIN_CARD_DRAFT_MODEL": ""}, ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")),
    ],
)
def test_variables_are_defaults(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[str, str | None]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = CARDChatModel()
    assert (model.model, model.draft_model) == expected
    given = CARDChatModel(model_name="someone/model", draft_model=None)
    assert (given.model, given.draft_model) == ("someone/model", None), "what is given comes first"


def test_variables_are_checked_as_arguments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGCHAIN_CARD_MODEL", "smollm")
    with pytest.raises(ValidationError, match=r"model = 'smollm': .*did you mean smollm2-135m"):
        CARDChatModel()


# Help and schemas


def entries() -> Iterator[tuple[str, str]]:
    """Each field's name and its lines in `help`."""
    text = pydoc.plain(pydoc.render_doc(CARDChatModel))
    section = text[text.index("Fields:") :]
    for name in CARDChatModel.model_fields:
        start = section.index(f"\n |      {name} (")
        yield name, section[start : section.index(":\n", start) + 200]


@pytest.mark.parametrize("name", CARDChatModel.model_fields)
def test_every_field_is_described(name: str) -> None:
    assert len(described(name, CARDChatModel.model_fields[name])) > 20


def test_help_shows_every_field_with_its_default_and_meaning() -> None:
    shown = dict(entries())
    assert list(shown) == list(CARDChatModel.model_fields)
    assert all(", default " in entry.split(":\n")[0] for entry in shown.values())
    assert "timeout (float | None, default None):" in shown["timeout"] and "Seconds, queueing" in shown["timeout"]
    assert "model (str, default 'qwen2.5-coder-1.5b'):" in shown["model"]
    assert "limits (Limits, default Limits()):" in shown["limits"]
    assert "cache (BaseCache | bool | None, default None):" in shown["cache"]
    assert "0 takes the likeliest token" in shown["temperature"]


def test_langchains_fields_are_described_and_no_others() -> None:
    assert set(INHERITED) == set(BaseChatModel.model_fields)


def test_schemas() -> None:
    schema = CARDChatModel.model_json_schema()
    fields = schema["properties"]
    assert {"temperature", "max_tokens", "draft_model", "tags"} <= set(fields)
    assert fields["temperature"]["description"].startswith("0 takes the likeliest token")
    json.dumps(schema)
    model = CARDChatModel()
    for runnable in (model.get_input_schema(), model.get_output_schema(), model.config_schema()):
        assert json.dumps(runnable.model_json_schema())


def test_subclasses_may_have_factories_and_aliases_of_their_own() -> None:
    called = []

    class Mine(CARDChatModel):
        mood: str = Field(default_factory=lambda: called.append(1) or "good", alias="my_mood")  # type: ignore[func-returns-value]
        """How it feels."""

    assert not called, "a factory is not called to describe a field"
    assert "mood (str, default computed)" in (Mine.__doc__ or "")
    assert Mine(my_mood="bad").mood == "bad"
    with pytest.raises(ValueError, match="did you mean my_mood"):
        Mine(my_mod="bad")
