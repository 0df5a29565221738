"""Tools and schemas through the whole model: what a random pair says is a call or an object, whatever way it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage

from langchain_card import CARDChatModel
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from tests.support.played import make_pair, played
from tests.support.scripted import JOKE, PARAMETERS, SCHEMAS, Joke, add, weather
from tests.support.tool_calls import ADD, ARGUMENTS, CALLED, JSON, RAIN, TOOLS, D, F, G, T, calls, merged

pytestmark = [pytest.mark.filterwarnings("ignore:.*(is|are) in beta"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**fields).load() as model:
        yield model


def says(model: CARDChatModel, text: str) -> Any:
    return played(lambda _: text, model._engine().tokenizer)


# The ways in which a model is called.

Way = Callable[..., Awaitable[AIMessage]]


async def invoke(model: CARDChatModel, **options: Any) -> AIMessage:
    return model.invoke("Q", **options)


async def ainvoke(model: CARDChatModel, **options: Any) -> AIMessage:
    return await model.ainvoke("Q", **options)


async def stream(model: CARDChatModel, **options: Any) -> AIMessage:
    return merged([*model.stream("Q", **options)])


async def astream(model: CARDChatModel, **options: Any) -> AIMessage:
    return merged([chunk async for chunk in model.astream("Q", **options)])


async def batch(model: CARDChatModel, **options: Any) -> AIMessage:
    one, other = model.batch(["Q", "Q"], **options)
    assert calls(one) == calls(other)
    return one


async def events_v2(model: CARDChatModel, **options: Any) -> AIMessage:
    events = [event async for event in model.astream_events("Q", version="v2", **options)]
    return merged([event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"])


async def events_v3(model: CARDChatModel, **options: Any) -> AIMessage:
    return await (await model.astream_events("Q", version="v3", **options))


WAYS: list[Way] = [invoke, ainvoke, stream, astream, batch, events_v2, events_v3]


@pytest.fixture(params=[None, "v1"])
def versioned(model: CARDChatModel, request: pytest.FixtureRequest) -> CARDChatModel:
    return model.model_copy(update={"output_version": request.param})


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_choices_are_enforced(versioned: CARDChatModel, way: Way) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("any", {*ARGUMENTS}), ("weather", {"weather"}), (named, {"weather"}), ("none", set())):
        message = await way(versioned, tools=TOOLS, tool_choice=choice, max_tokens=100)
        found = calls(message)
        assert {name for name, _ in found} <= names and len(found) == (choice != "none")
        assert bool(message.text) == (choice == "none")
        reason, card = message.response_metadata["finish_reason"], message.response_metadata["card"]
        assert (reason, card["closed"]) in ((("length", False),) if choice == "none" else (
            ("tool_calls", False), ("tool_calls", True), ("length", True)))  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_text_and_calls_come_the_same_every_way(versioned: CARDChatModel, way: Way) -> None:
    answers = {"So.": ("So.", []), F: ("", CALLED[:1]), ADD: ("", CALLED[:1]), f"So.\n{F}\n{G}": ("So.", CALLED)}
    for answer, (text, made) in answers.items():
        with says(versioned, answer):
            message = await way(versioned, tools=TOOLS, parallel_tool_calls=True)
        assert (message.text, calls(message)) == (text, made)
        kinds = ["text"] * bool(text) + ["tool_call"] * len(made)
        assert [block["type"] for block in message.content_blocks] == kinds
        assert message.response_metadata["finish_reason"] == ("tool_calls" if made else "stop")
        assert message.response_metadata["card"]["closed"] is False
        assert (
            message.usage_metadata is not None and message.usage_metadata["output_tokens"] == len(answer.encode()) + 1
        )


async def test_chunks_of_calls_come_early(model: CARDChatModel) -> None:
    with says(model, f"So.\n{G}\n{F}"):
        chunks: Any = model.stream("Q", tools=TOOLS, parallel_tool_calls=True)
        parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert [part["name"] for part in parts if part["name"]] == ["weather", "add"]
    assert all(bool(part["name"]) == bool(part["id"]) and not (part["name"] and part["args"]) for part in parts)
    assert sorted({part["index"] for part in parts}) == [1, 2] and len(parts) > 30


@pytest.mark.parametrize("first", [F, T, ADD], ids=["fenced", "tagged", "bare"])
async def test_a_call_is_complete_when_its_json_ends(model: CARDChatModel, first: str) -> None:
    """The chunk of the arguments' last token completes the call: a reader may start its tool during the next call."""
    end = first.index("-2}") + len("-2}")  # tokens are bytes
    with says(model, f"{first}\n{G}"):
        chunks: Any = [chunk async for chunk in model.astream("Q", tools=TOOLS, parallel_tool_calls=True)]
    assert sum(chunks[1 : end - 1], start=chunks[0]).tool_call_chunks[0]["args"] == '{"a": 1, "b": -2'
    (call,) = sum(chunks[1:end], start=chunks[0]).tool_call_chunks
    assert (call["name"], json.loads(call["args"])) == CALLED[0]
    assert calls(merged(chunks)) == CALLED


# Options of a call.


@pytest.mark.parametrize(("name", "wanted"), [("weather", F), ("add", G)])
def test_a_named_tool_is_called_whatever_is_wanted(model: CARDChatModel, name: str, wanted: str) -> None:
    with says(model, wanted):
        assert [called for called, _ in calls(model.invoke("Q", tools=TOOLS, tool_choice=name))] == [name]


def test_parallel_calls(model: CARDChatModel) -> None:
    with says(model, f"{F}\n{G}"):
        for choice, parallel, count in (
            (None, None, 1), (None, True, 2), (None, False, 1), ("any", None, 1), ("any", True, 2), ("any", False, 1),
            ("add", None, 1),
        ):  # fmt: skip
            bound = model.bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
            assert calls(bound.invoke("Q")) == CALLED[:count], (choice, parallel)


def test_what_cannot_be_called_is_not(model: CARDChatModel) -> None:
    for answer in ('{"name": "add", "arguments": {"a": "x"}}', '<tool_call>{"name": "add", "arguments": {"z": 1}}'):
        with says(model, answer):
            ((name, arguments),) = calls(model.invoke("Q", tools=TOOLS))
        assert name == "add" and set(arguments) == {"a", "b"}
    with says(model, T):
        assert model.invoke("Q").text == T == model.invoke("Q", tools=TOOLS, tool_choice="none").text
        assert calls(model.invoke("Q", tools=[weather])) == []


def test_functions_as_they_are(model: CARDChatModel) -> None:
    assert calls(model.invoke("Q", tools=[weather], tool_choice="any"))[0][0] == "weather"
    strict = model.bind_tools([weather], strict=True, tool_choice="any").invoke("Q")
    assert set(strict.tool_calls[0]["args"]) == {"place", "days"}


def test_schemas_that_cannot_be_enforced(model: CARDChatModel) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    tool: Any = {"name": "f", "description": "", "parameters": parameters}
    assert model.invoke("Q", tools=[tool], tool_choice="any").tool_calls[0]["name"] == "f"
    with pytest.raises(ModelInvalidRequestError, match="uniqueItems"):
        model.bind_tools([tool], strict=True).invoke("Q")


def test_max_tokens_has_room_for_a_call(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "submit", lambda *_: pytest.fail("it was decoded"))
        for options in ({"tools": TOOLS, "tool_choice": "any"}, {"response_format": Joke}):
            with pytest.raises(InvalidInputError, match=r"max_tokens = 9.*shortest") as raised:
                model.invoke("Q", max_tokens=9, **options)
            assert isinstance(raised.value, ModelInvalidRequestError)
    least = int(str(raised.value).split("form takes ")[1].split()[0])
    message = model.invoke("Q", max_tokens=least, response_format=Joke)
    assert Joke(**json.loads(message.text)) and message.response_metadata["card"]["closed"] is True
    assert model.invoke("Q", max_tokens=1, tools=TOOLS).usage_metadata["output_tokens"] == 1  # type: ignore[index]


def test_what_cannot_be_compiled_is_named_as_the_user_knows_it(model: CARDChatModel) -> None:
    none: Any = {"name": "none", "parameters": {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "integer", "minimum": 5, "maximum": 3}}}}  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"^tools = \['add', 'none'\]: .*[Uu]nsatisfiable"):
        model.invoke("Q", tools=[add, none], tool_choice="any")
    with pytest.raises(InvalidInputError, match=r"^response_format = .*: .*[Uu]nsatisfiable"):
        model.invoke("Q", response_format=none["parameters"])
    with pytest.raises(InvalidInputError, match=r"takes .* tokens\. Hint: leave room for more"):
        model.invoke("Q", response_format=Joke, max_tokens=3)


def test_calls_that_max_tokens_ends_are_not_made(model: CARDChatModel, caplog: pytest.LogCaptureFixture) -> None:
    """They would be whole, with an amount of 125 in place of 1250."""
    long = RAIN.replace("Ō", "Ō" * 500)
    with says(model, f"```json\n{ADD}\n```\n```json\n{long}\n```"):
        options: Any = {"tools": TOOLS, "max_tokens": 220, "parallel_tool_calls": True}
        message, streamed = model.invoke("Q", **options), merged([*model.stream("Q", **options)])
    for answer in (message, streamed):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == CALLED[:1]
        assert [bad["name"] for bad in answer.invalid_tool_calls] == ["weather"]
        assert answer.response_metadata["finish_reason"] == "length"
        assert answer.response_metadata["card"]["closed"] is True
    (bad,) = message.invalid_tool_calls
    assert bad["error"] == "max_tokens = 220 ended it early"
    assert json.loads(str(bad["args"]))["place"].startswith("ŌŌŌŌŌ")
    told = "max_tokens = 220 ended an answer early: it obeys its schema, but says less than it should"
    assert caplog.messages == [told] * 2


def test_a_call_that_is_demanded_is_whole(model: CARDChatModel) -> None:
    long = RAIN.replace("Ō", "Ō" * 500)
    for choice in ("any", "weather"):
        with says(model, f"```json\n{long}\n```"):
            message = model.invoke("Q", tools=TOOLS, tool_choice=choice, max_tokens=120)
        ((name, arguments),) = calls(message)
        assert name == "weather" and arguments["place"].startswith("ŌŌŌŌŌ")
        assert message.response_metadata["finish_reason"] == "length"


def test_no_text_is_replaced_while_there_is_room(model: CARDChatModel) -> None:
    ship = {"name": "ship", "parameters": {"type": "object", "required": ["to"], "properties": {
        "to": {"type": "string", "pattern": r"^.+, [A-Z]{2} \d{5}$"}}}}  # fmt: skip
    for choice in ("any", "auto"):
        with says(model, '```json\n{"name": "ship", "arguments": {"to": "12 Main St, Ames, IA 50010"}}\n```'):
            message = model.invoke("Q", tools=[add, ship], tool_choice=choice, max_tokens=300)
        assert [call["args"] for call in message.tool_calls] == [{"to": "12 Main St, Ames, IA 50010"}]
        assert message.response_metadata["card"]["closed"] is False


@pytest.fixture
def few_digits() -> Iterator[None]:
    """Of whole numbers that Python reads: as few as it takes."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("few_digits")
def test_arguments_that_python_does_not_read_are_shown(model: CARDChatModel) -> None:
    with says(model, ADD.replace("1", "9" * 650)):
        options: Any = {"tools": TOOLS, "max_tokens": 1000}
        message, streamed = model.invoke("Q", **options), merged([*model.stream("Q", **options)])
    for answer in (message, streamed):
        assert answer.tool_calls == []
        assert [bad["name"] for bad in answer.invalid_tool_calls] == ["add"]
        assert answer.response_metadata["finish_reason"] == "stop"
    assert message.invalid_tool_calls[0]["error"]


def test_stop_strings_end_text_and_make_no_half_calls(model: CARDChatModel) -> None:
    with says(model, f"So. {F}"):
        assert model.invoke("Q", tools=TOOLS, stop=["."]).text == "So"
        cut = model.invoke("Q", tools=TOOLS, stop=['"b"'])
    assert cut.tool_calls == [] and cut.text == "So."
    assert [(bad["name"], bad["args"]) for bad in cut.invalid_tool_calls] == [("add", '{"a": 1, ')]
    assert cut.response_metadata["finish_reason"] == "stop"
    for stop in ('"b"', 'a"', " 1", "-2"):  # LangChain would complete what a stream leaves open
        with says(model, f"So. {F}"):
            whole = merged([*model.stream("Q", tools=TOOLS, stop=[stop])])
        assert whole.tool_calls == [] and [bad["name"] for bad in whole.invalid_tool_calls] == ["add"], stop
    with says(model, F):
        assert calls(model.invoke("Q", tools=TOOLS, tool_choice="any", stop=["\n", '"b"', "}"])) == CALLED[:1]
    with says(model, JSON):
        assert json.loads(model.invoke("Q", response_format=Joke, stop=["}", '"']).text) == JOKE


# Documents.


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("kind", ["pydantic", "pydantic_v1", "typeddict", "json_schema"])
def test_answers_are_objects(model: CARDChatModel, kind: str, method: str) -> None:
    schema = SCHEMAS[kind]
    found: Any = model.with_structured_output(schema, method=method).invoke("Q", seed=1)
    raw: Any = model.with_structured_output(schema, method=method, include_raw=True).invoke("Q", seed=1)
    assert raw["parsed"] == found and raw["parsing_error"] is None and isinstance(raw["raw"], AIMessage)
    assert isinstance(found, schema) if kind.startswith("pydantic") else isinstance(found["setup"], str)
    assert list(model.with_structured_output(schema, method=method).stream("Q"))[-1] == found


def test_json_objects(model: CARDChatModel) -> None:
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": PARAMETERS}):
        assert isinstance(json.loads(model.invoke("Q", response_format=form).text), dict)
    assert isinstance(model.with_structured_output(method="json_mode").invoke("Q"), dict)
    with says(model, F):
        assert model.invoke("Q", response_format={"type": "text"}).text == F


async def test_tools_beside_a_document(model: CARDChatModel) -> None:
    """The model calls a function with the document; its arguments are the answer's text."""
    bound = model.bind_tools(TOOLS, response_format=Joke, parallel_tool_calls=True)
    for answer, text, made in ((F, "", CALLED[:1]), (D, JSON, []), (f"{F}\n{G}", "", CALLED)):
        with says(model, answer):
            for message in (bound.invoke("Q"), merged([chunk async for chunk in bound.astream("Q")])):
                assert (message.text, calls(message)) == (text, made)
                assert message.response_metadata["finish_reason"] == ("tool_calls" if made else "stop")
    with says(model, f"Hm. {F}"):
        message = bound.invoke("Q")
    assert calls(message) or Joke(**json.loads(message.text))
    assert len(list(bound.stream("Q", tool_choice="add"))) > 0
    with pytest.raises(InvalidInputError, match="response_format type = 'array': must be object where there are tools"):
        model.bind_tools(TOOLS, response_format={"type": "array"}).invoke("Q")


def test_a_document_of_a_tools_name(model: CARDChatModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "add", "schema": PARAMETERS}}
    with says(model, D.replace("Joke", "add_")):
        message = model.bind_tools(TOOLS, response_format=form).invoke("Q")
    assert (message.text, message.tool_calls) == (JSON, [])
