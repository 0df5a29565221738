"""Tools and schemas beside all else: thoughts, templates with tags, caches, batches, and models that a call names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from pydantic import BaseModel

from langchain_card import CARDChatModel
from langchain_card.engine.target_worker import TargetWorker
from tests.support import vocabularies
from tests.support.played import make_pair, played
from tests.support.scripted import JOKE, Joke, add, weather
from tests.support.tool_calls import CALLED, JSON, MARKS, TOOLS, F, T, U, calls, merged

pytestmark = [pytest.mark.filterwarnings("ignore:.*(is|are) in beta"), pytest.mark.usefixtures("one_thread")]

FIRST = vocabularies.CHATML + "{# <think> #}"
BEGUN = vocabularies.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**fields).load() as model:
        yield model


def says(model: CARDChatModel, text: str) -> Any:
    return played(lambda _: text, model._engine().tokenizer)


# Thoughts, and templates that know tools.


@pytest.fixture(
    scope="module", params=["first", "first, tokens", "begun", "begun, tokens", "first, special", "begun, special"]
)
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    kind, tokens = request.param.partition(",")[::2]
    folder = tmp_path_factory.mktemp("thinking")
    marks = ("<think>", "</think>") if tokens == " special" else MARKS if tokens else ()
    pair = make_pair(folder, FIRST if kind == "first" else BEGUN, marks, special=tokens == " special")
    with CARDChatModel(**pair).load() as model:
        yield model, "<think>" if kind == "first" else ""


@pytest.mark.slow
def test_thoughts_before_calls_and_documents(thinking: tuple[CARDChatModel, str]) -> None:
    model, begin = thinking
    thought = f"I may call {F} or <b>."
    for behind, options, made, text in (
        (f"\n\n{T}\n{U}", {"tools": TOOLS}, CALLED, ""),
        (f"\n\nSo: {T}", {"tools": TOOLS}, CALLED[:1], "So: "),
        (T, {"tools": TOOLS, "tool_choice": "add"}, CALLED[:1], ""),
        (f"\n{JSON}", {"response_format": Joke}, [], JSON),
        (T, {"tools": TOOLS, "response_format": Joke}, CALLED[:1], ""),
    ):
        with says(model, f"{begin}{thought}</think>{behind}"):
            answers: Any = [model.invoke("Q", max_tokens=300, **options)]
            for version in (None, "v1"):
                streamed = model.model_copy(update={"output_version": version})
                answers.append(merged([*streamed.stream("Q", max_tokens=300, **options)]))
        for message in answers:
            kinds = ["reasoning", *["text"] * bool(text), *["tool_call"] * len(made)]
            assert [block["type"] for block in message.content_blocks] == kinds
            assert message.content_blocks[0]["reasoning"] == thought
            assert (message.text.strip(), calls(message)) == (text.strip(), made)


def test_thoughts_leave_room_for_calls_and_documents(thinking: tuple[CARDChatModel, str]) -> None:
    model, begin = thinking
    with says(model, begin + "hm < " * 100):
        for options in ({"tools": TOOLS, "tool_choice": "any"}, {"response_format": Joke}):
            message = model.invoke("Q", max_tokens=180, **options)
            assert message.response_metadata["card"]["closed"] is True
            assert message.additional_kwargs["reasoning_content"].startswith("hm < hm")
            assert calls(message) if "tools" in options else Joke(**json.loads(message.text))


@pytest.mark.parametrize("tool_choice", ["auto", "any", "none"])
@pytest.mark.slow
def test_a_random_thinker(thinking: tuple[CARDChatModel, str], tool_choice: str) -> None:
    message = thinking[0].invoke("Q", tools=TOOLS, tool_choice=tool_choice, temperature=1.0, seed=3, max_tokens=180)
    assert len(calls(message)) == 1 if tool_choice == "any" else not message.tool_calls


# Caches.


def fresh(kind: str) -> Any:
    class Found(BaseModel):
        pass

    return type("Found", (BaseModel,), {"__annotations__": {kind: str}, "__module__": Found.__module__})


def test_caches_tell_tools_and_schemas_apart(fields: dict[str, Any]) -> None:
    other: Any = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    with CARDChatModel(**fields, cache=InMemoryCache()) as model:
        options: list[dict[str, Any]] = [
            {}, {"tools": TOOLS}, {"tools": [add]}, {"tools": [other]}, {"tools": TOOLS, "tool_choice": "any"},
            {"tools": TOOLS, "tool_choice": "weather"}, {"tools": TOOLS, "parallel_tool_calls": False},
            {"response_format": Joke}, {"response_format": {"type": "json_object"}},
            {"tools": TOOLS, "response_format": Joke},
        ]  # fmt: skip
        keys = [model._get_llm_string(**given) for given in options]
        assert len({*keys}) == len(keys)
        assert keys[1] == model._get_llm_string(tools=[weather, add][::-1], tool_choice=None)
        assert model._get_llm_string(response_format=fresh("a")) != model._get_llm_string(response_format=fresh("b"))
        assert model._get_llm_string(tools=[fresh("a")]) == model._get_llm_string(tools=[fresh("a")])
        with says(model, F):
            first = model.invoke("Q", tools=TOOLS)
        assert model.invoke("Q", tools=TOOLS).tool_calls == first.tool_calls != []
        with says(model, "Hi."):
            assert model.invoke("Q", tools=[add]).text == "Hi."


# Batches, and other models.


async def test_bound_models_share_passes(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, together = TargetWorker._verify, list[int]()

    def counted(self: TargetWorker) -> Any:
        verdicts = verify(self)
        together.append(len(verdicts))
        return verdicts

    monkeypatch.setattr(TargetWorker, "_verify", counted)
    bound = model.bind(tools=TOOLS, tool_choice="any", max_tokens=100)
    prompts = [f"question {i}" for i in range(4)]
    alone = [calls(bound.invoke(prompt)) for prompt in prompts]
    assert max(together) == 1
    for answers in (bound.batch(prompts), await bound.abatch(prompts)):
        assert [calls(answer) for answer in answers] == alone
        assert all(answer.response_metadata["card"]["mean_batch_size"] > 2 for answer in answers)
    assert all(isinstance(joke, Joke) for joke in model.with_structured_output(Joke).batch(prompts))


@pytest.mark.slow
def test_a_call_that_names_a_model_has_its_form(model: CARDChatModel, tmp_path: Any) -> None:
    other = make_pair(tmp_path, vocabularies.CHATML, MARKS)["model"]
    options: Any = {"model": other, "draft_model": None, "max_tokens": 100}
    with CARDChatModel(**{**model.to_config(), "model": other, "draft_model": None}).load() as direct:
        for tools in ({"tools": TOOLS, "tool_choice": "any"}, {"tools": TOOLS, "response_format": Joke}):
            answers = model.invoke("Q", **tools, **options), direct.invoke("Q", **tools, max_tokens=100)
            one, same = (
                [(call["name"], call["args"]) for call in (*message.tool_calls, *message.invalid_tool_calls)]
                for message in answers
            )
            assert one == same != []
        with says(direct, f"So. {T}"):
            message = model.invoke("Q", tools=TOOLS, **options)
            assert calls(message) == CALLED[:1] and message.response_metadata["model_name"] == other
            assert message.usage_metadata["input_tokens"] == direct.get_num_tokens_from_messages("Q", TOOLS)  # type: ignore
    with says(model, json.dumps(JOKE, ensure_ascii=False)):
        assert model.with_structured_output(Joke).invoke("Q") == Joke(**JOKE)
