"""LangChain's caches: which models and calls count as equal."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache

from langchain_card import CARDChatModel, plugins
from langchain_card.chat.sampling_options import SamplingOptions
from langchain_card.engine.engine import Engine
from langchain_card.limits import Limits, Pins

SAME: list[dict[str, Any]] = [
    {"schedule": "plain"},
    {"draft_model": "ngram"},
    {"drafters": ()},
    {"stack": ("ngram",), "draft_model": "smollm2-135m"},
    {"tenant": "somebody"},
    {"session": "a chat"},
    {"device": "cpu"},
    {"draft_device": "cpu"},
    {"draft_transport": "thread"},
    {"draft_context": 99},
    {"prefix_cache": "folder"},
    {"execution": "eager"},
    {"isolate": True},
    {"replicas": 2},
    {"cluster": "card"},
    {"pins": Pins(window=2)},
    {"limits": Limits(max_num_seqs=3)},
    {"timeout": 30.0},
    {"streaming": True},
    {"max_retries": 3},
    {"api_key": "secret"},
    {"tags": ["x"]},
    {"name": "other"},
]
DIFFERENT: list[dict[str, Any]] = [
    {"model": "smollm2-135m"},
    {"dtype": "float32"},
    {"quantization": None},
    {"exact": "strict"},
    {"kv_dtype": "int8"},
    {"acceptance": "loose"},
    {"steering": "forward"},
    {"max_model_len": 500},
    {"max_tokens": 9},
    {"temperature": 0.5},
    {"seed": 1},
    {"adapters": {"style": "/models/style"}},
    {"adapter": "style"},
    {"stop": ["x"]},
    {"top_k": 2},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"logit_bias": {40: 1.0}},
    {"logprobs": True},
    {"output_version": "v1"},
]


@pytest.fixture(autouse=True)
def _steering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    plugins.register("steering", "forward", lambda setting: lambda logits, texts: logits)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines were asked during the test."""
    submit, asked = Engine.submit, list[Any]()

    def recorded(self: Engine, prompt_ids: Any, params: Any) -> Any:
        asked.append(params)
        return submit(self, prompt_ids, params)

    monkeypatch.setattr(Engine, "submit", recorded)
    monkeypatch.setattr(Engine, "warm_up", lambda *_: None)  # it submits where kernels were compiled
    return asked


def test_every_field_either_changes_the_answer_or_does_not() -> None:
    told = {name for fields in SAME + DIFFERENT for name in fields} | {"top_logprobs"}  # needs logprobs
    untold = {"cache", "callbacks", "custom_get_token_ids", "disable_streaming", "metadata", "profile", "rate_limiter"}
    assert told | untold | {"verbose"} == set(CARDChatModel.model_fields)


@pytest.mark.parametrize("fields", SAME, ids=lambda fields: next(iter(fields)))
def test_what_changes_the_speed_alone_is_no_part_of_the_caches_key(toy: dict[str, Any], fields: dict[str, Any]) -> None:
    model = CARDChatModel(**{**toy, **fields})
    assert model._get_llm_string() == CARDChatModel(**toy)._get_llm_string()
    assert "secret" not in model._get_llm_string()


@pytest.mark.parametrize("fields", DIFFERENT, ids=lambda fields: next(iter(fields)))
def test_what_changes_the_answer_is_part_of_the_caches_key(toy: dict[str, Any], fields: dict[str, Any]) -> None:
    model, changed = CARDChatModel(**toy), CARDChatModel(**{**toy, **fields})
    assert changed._get_llm_string() != model._get_llm_string()
    options = {name: value for name, value in fields.items() if name in ("model", *SamplingOptions.model_fields)}
    if options:
        assert model._get_llm_string(**options) == changed._get_llm_string()
        assert changed._get_llm_string(**dict.fromkeys(options)) == changed._get_llm_string(), "None is the field's"


def test_under_a_lossy_rule_drafts_and_schedules_change_the_answer_too(toy: dict[str, Any]) -> None:
    fields: dict[str, Any] = {**toy, "draft_model": "smollm2-135m", "acceptance": "loose"}
    key, changes = CARDChatModel(**fields)._get_llm_string, ("draft_model", "schedule", "tenant")
    for name, value in (
        ("draft_model", "ngram"),
        ("draft_model", None),
        ("schedule", "plain"),
        ("tenant", "somebody"),
        ("drafters", ()),
        ("stack", ("ngram",)),
        ("pins", Pins(window=2)),
        ("limits", Limits(max_window=7)),
    ):
        changed = CARDChatModel(**{**fields, name: value})._get_llm_string()
        assert changed != key()
        assert name not in changes or key(**{name: value}) == changed


async def test_caches(toy: dict[str, Any], other_toy: str, submitted: list[Any]) -> None:
    cache = InMemoryCache()
    with CARDChatModel(**toy, cache=cache) as model, CARDChatModel(**toy, cache=cache, schedule="plain") as same:
        first = model.invoke("hi")
        for again in (
            model.invoke("hi"),
            await model.ainvoke("hi"),
            same.invoke("hi"),
            model.bind(temperature=0.0, model=model.model).invoke("hi"),
            model.invoke("hi", temperature=None, schedule="plain", draft_model="ngram"),
        ):
            assert again.content == first.content
        assert len(submitted) == 1
        misses: list[dict[str, Any]] = [{"temperature": 0.5}, {"stop": ["x"]}, {"max_tokens": 2}, {"model": other_toy}]
        for count, options in enumerate(misses, start=2):
            model.invoke("hi", **options)
            assert len(submitted) == count
            await model.ainvoke("hi", **options)
            assert len(submitted) == count, "now it is there"
        assert model.invoke("hi", model=other_toy).response_metadata["model_name"] == other_toy
        before = len(submitted)
        list(model.stream("hi"))
        assert len([chunk async for chunk in model.astream("hi")]) > 1
        assert len(submitted) == before + 2, "streams are not kept"


def test_a_models_own_stop_strings_are_part_of_the_question(toy: dict[str, Any], submitted: list[Any]) -> None:
    cache = InMemoryCache()
    with CARDChatModel(**toy, cache=cache) as model:
        text = str(model.invoke("hi").content)
        with CARDChatModel(**toy, cache=cache, stop=text[2]) as stopping:
            assert stopping.invoke("hi").content == text[:2]
