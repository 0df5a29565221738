"""`bind_tools` and `with_structured_output`: what reaches decoding, and what comes of scripted answers."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableBinding
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import RootModel

from langchain_card import CARDChatModel
from langchain_card.chat.schemas import json_schema, response_format_dict, tool_dict, tool_dicts
from langchain_card.errors import InvalidInputError
from tests.support.scripted import (
    FUNCTION,
    JOKE,
    PARAMETERS,
    SCHEMAS,
    Joke,
    JokeDict,
    Node,
    OldJoke,
    Scripted,
    add,
    scripted,
    weather,
)

METHODS = ("json_schema", "function_calling", "json_mode")


class Options(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_chat_model_start(self, *args: Any, options: Any = None, **kwargs: Any) -> None:
        self.seen.append(options)


def joking(schema: Any, method: str) -> Scripted:
    return scripted(JOKE, tool_dict(schema)["function"]["name"] if method == "function_calling" else None)


# Structured output.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SCHEMAS)
async def test_every_schema_by_every_method(kind: str, method: str) -> None:
    schema, model, options = SCHEMAS[kind], joking(SCHEMAS[kind], method), Options()
    chain = model.with_structured_output(schema, method=method, temperature=0.5)
    expected = schema(**JOKE) if kind.startswith("pydantic") else JOKE
    config: Any = {"callbacks": [options]}
    assert chain.invoke("a joke", config) == await chain.ainvoke("a joke", config) == expected
    parts = list(chain.stream("a joke", config))
    assert parts[-1] == expected and {type(part) for part in parts} == {type(expected)}
    assert kind.startswith("pydantic") or len(parts) > 20, "dicts grow with the answer"
    assert chain.batch(["a", "b"]) == [expected] * 2
    for seen in options.seen:
        traced = seen["ls_structured_output_format"]
        assert traced["schema"] == convert_to_json_schema(schema)
        assert traced["kwargs"] == {"method": method, "strict": None}
    assert [part async for part in chain.astream("a joke")] == parts
    assert len(options.seen) == 3 and len(model._seen) == 6
    assert all(seen == model._seen[0] for seen in model._seen)
    assert model._seen[0]["temperature"] == 0.5 and "ls_structured_output_format" not in model._seen[0]
    used = decoded(model._seen[0], method)
    assert used["type"] == "object" and set(used["properties"]) == set(JOKE)
    required = {"pydantic_v1": ["setup", "punchline"], "partial": []}.get(kind, ["setup"])
    assert used.get("required", []) == required
    assert used["properties"]["setup"]["description"] == "how it begins"


def decoded(options: dict[str, Any], method: str) -> Any:
    """The schema that reached decoding."""
    assert json.loads(json.dumps(options)) == options
    if method == "function_calling":
        (given,) = options["tools"]
        assert options["tool_choice"] == {"type": "function", "function": {"name": given["function"]["name"]}}
        assert options["parallel_tool_calls"] is False and "response_format" not in options
        return given["function"]["parameters"]
    form = options["response_format"]
    assert "tools" not in options and "tool_choice" not in options
    return form["json_schema"]["schema"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])
async def test_langchains_own_tests(method: str, schema_type: Any) -> None:
    class Suite(ChatModelIntegrationTests):
        chat_model_class = CARDChatModel
        supports_json_mode = True

        @property
        def structured_output_kwargs(self) -> dict[str, Any]:
            return {"method": method}

    name = {"typeddict": "JokeDict"}.get(schema_type, "Joke")
    model = scripted(JOKE, name if method == "function_calling" else None)
    Suite().test_structured_output(model, schema_type)
    await Suite().test_structured_output_async(model, schema_type)
    if name == "Joke":
        Suite().test_structured_output_pydantic_2_v1(model)
        Suite().test_json_mode(scripted(JOKE))
    if method != "function_calling":  # it asks for both names
        Suite().test_structured_output_optional_param(model)


def test_what_json_schema_binds() -> None:
    form = {"name": "Joke", "description": "A joke.", "schema": Joke.model_json_schema()}
    model = scripted(JOKE)
    model.with_structured_output(Joke, seed=3, temperature=None).invoke("hi")
    model.with_structured_output(Joke, strict=True).invoke("hi")
    assert model._seen[0]["response_format"] == {"type": "json_schema", "json_schema": form}
    assert model._seen[0]["seed"] == 3
    assert model._seen[1]["response_format"]["json_schema"] == {**form, "strict": True}
    model.with_structured_output(Joke, method="json_mode", strict=True).invoke("hi")
    assert model._seen[2] == model._seen[1]


@pytest.mark.parametrize("include_raw", [True, False])
async def test_options_of_a_call_reach_the_model(include_raw: bool) -> None:
    model = scripted(JOKE)
    chain = model.with_structured_output(Joke, include_raw=include_raw)
    chain.invoke("hi", max_tokens=7)
    await chain.ainvoke("hi", max_tokens=7)
    [*chain.stream("hi", max_tokens=7)]
    assert [seen["max_tokens"] for seen in model._seen] == [7] * 3


def test_strict_calls_have_every_argument() -> None:
    model = scripted(JOKE, "Joke")
    model.with_structured_output(Joke, method="function_calling", strict=True).invoke("hi")
    function = model._seen[0]["tools"][0]["function"]
    assert function["strict"] is True and function["parameters"]["additionalProperties"] is False
    assert function["parameters"]["required"] == ["setup", "punchline"]


def test_references_stay() -> None:
    tree = {"value": 1, "children": [{"value": 2, "children": []}]}
    model = scripted(tree)
    assert model.with_structured_output(Node).invoke("hi") == Node(**tree)  # type: ignore[arg-type]
    schema = model._seen[0]["response_format"]["json_schema"]["schema"]
    assert schema["$ref"] == "#/$defs/Node" and schema["$defs"]["Node"]["properties"]["children"]["items"] == {
        "$ref": "#/$defs/Node"
    }
    assert json_schema(Node.model_json_schema()) == schema


def test_a_list_at_the_root() -> None:
    numbers = RootModel[list[int]]
    assert scripted("[1, 2]").with_structured_output(numbers).invoke("hi") == numbers([1, 2])
    assert scripted("[1, 2]").with_structured_output({"type": "array"}).invoke("hi") == [1, 2]


def test_any_object() -> None:
    model = scripted(JOKE)
    assert model.with_structured_output(method="json_mode").invoke("hi") == JOKE
    assert model._seen[0] == {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["pydantic", "pydantic_v1", "json_schema"])
def test_the_raw_message_beside_the_object(kind: str, method: str) -> None:
    schema, model = SCHEMAS[kind], joking(SCHEMAS[kind], method)
    chain = model.with_structured_output(schema, method=method, include_raw=True)
    parsed = JOKE if kind == "json_schema" else schema(**JOKE)
    expected = {"raw": model._answer, "parsed": parsed, "parsing_error": None}
    assert chain.invoke("hi") == expected
    last = list(chain.stream("hi"))
    assert [part["parsed"] for part in last if "parsed" in part][-1] == parsed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Joke, OldJoke], ids=["v2", "v1"])
async def test_an_answer_that_does_not_fit(schema: Any, method: str) -> None:
    wrong = {"setup": ["no text"]}
    model = scripted(wrong, schema.__name__ if method == "function_calling" else None)
    found = model.with_structured_output(schema, method=method, include_raw=True).invoke("hi")
    assert found["raw"] == model._answer and found["parsed"] is None
    assert isinstance(found["parsing_error"], ValueError) and set(found) == {"raw", "parsed", "parsing_error"}
    with pytest.raises(ValueError, match="setup"):
        await model.with_structured_output(schema, method=method).ainvoke("hi")


def test_an_answer_that_is_no_json() -> None:
    found = scripted("Sorry.").with_structured_output(PARAMETERS, include_raw=True).invoke("hi")
    assert found["parsed"] is None and isinstance(found["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException, match=r"Sorry\."):
        scripted("Sorry.").with_structured_output(method="json_mode").invoke("hi")


def test_no_call_is_no_object() -> None:
    chain = scripted("Sorry.").with_structured_output(Joke, method="function_calling", include_raw=True)
    assert chain.invoke("hi")["parsed"] is chain.invoke("hi")["parsing_error"] is None


def test_tools_beside_a_schema() -> None:
    model = scripted({"a": 1, "b": 2}, "add")
    found = model.with_structured_output(Joke, tools=[add], include_raw=True, tool_choice="auto").invoke("hi")
    assert found == {"raw": model._answer, "parsed": None, "parsing_error": None}
    assert set(model._seen[0]) == {"tools", "tool_choice", "response_format"}
    model._answer = AIMessage(json.dumps(JOKE))
    assert model.with_structured_output(Joke, tools=[add], include_raw=True).invoke("hi")["parsed"] == Joke(**JOKE)


# Tools.


def test_tools_of_every_kind_reach_decoding() -> None:
    tools: list[Any] = [add, weather, Joke, OldJoke, JokeDict, {**PARAMETERS, "title": "Bare"}]
    model = scripted("hi")
    bound: Any = model.bind_tools(tools, tool_choice="any")
    bound.invoke("hi")
    assert isinstance(bound, RunnableBinding)
    dicts = [convert_to_openai_tool(given) for given in tools]
    punchline = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "how it ends"}
    dicts[4]["function"]["parameters"]["properties"]["punchline"] = punchline  # LangChain's says a text
    assert model._seen == [{"tools": dicts, "tool_choice": "any"}]
    assert tool_dicts(bound.kwargs["tools"]) == tool_dicts(tools) == bound.kwargs["tools"]
    assert json.loads(json.dumps(bound.kwargs)) == bound.kwargs
    others = [FUNCTION, SCHEMAS["tool"], {"type": "function", **FUNCTION}, SCHEMAS["anthropic"]]
    assert all(tool_dict(other) == SCHEMAS["tool"] for other in others)


def test_options_are_forwarded_and_those_that_are_none_left_out() -> None:
    model = scripted("hi")
    model.bind_tools([]).invoke("hi")
    model.bind_tools([], response_format=Joke, ls_structured_output_format=None, max_tokens=5).invoke("hi")
    model.bind_tools([add], parallel_tool_calls=False, tool_choice=False, stop=["x"]).invoke("hi")
    assert model._seen[0] == {"tools": []}
    assert model._seen[1] == {"tools": [], "response_format": response_format_dict(Joke), "max_tokens": 5}
    assert model._seen[2] == {"tools": tool_dicts([add]), "parallel_tool_calls": False, "tool_choice": False}


def test_a_missing_package_is_named_where_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = CARDChatModel()
    assert model.bind_tools([]) is not None
    for field, bind in (
        ("tools", lambda: model.bind_tools([add])),
        ("schema", lambda: model.with_structured_output(Joke)),
    ):
        with pytest.raises(ModelInvalidRequestError, match=rf"{field} = .*llguidance.*pip install 'llguidance"):
            bind()


def test_calls_that_bind_nothing_are_let_through() -> None:
    model = scripted("hi")
    model.bind(tools=[add], tool_choice="add", response_format=Joke).invoke("hi", parallel_tool_calls=True)
    assert model._seen == [{"tools": [add], "tool_choice": "add", "response_format": Joke, "parallel_tool_calls": True}]


@pytest.mark.parametrize(
    ("schema", "options", "words"),
    [
        (Joke, {"method": "json_shema"}, "method = 'json_shema': must be one of.*did you mean json_schema"),
        (None, {}, "schema = None: is needed by json_schema.*json_mode"),
        (None, {"method": "function_calling"}, "is needed by function_calling"),
        (Joke, {"temprature": 1}, "did you mean temperature"),
        (Joke, {"tools": [add]}, "tools = .*include_raw=True"),
        (Joke, {"tools": [add], "include_raw": True, "method": "function_calling"}, "tools = .*leave method"),
        (5, {}, "schema = 5: cannot be read as a tool"),
        (Joke | OldJoke, {}, "schema = .*cannot be read"),
        ({"type": "objct"}, {}, "schema type = 'objct'.*did you mean object"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}, {}, "schema type = 'text': must be one"),
        ({"typ": "object"}, {}, "is no JSON schema.*type"),
        ({"type": "text"}, {"method": "json_mode"}, "holds no schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {}, "must hold a schema"),
        ({"type": "object", "properties": {}}, {"method": "function_calling"}, "cannot be read as a tool.*`title`"),
        (RootModel[list[int]], {"method": "function_calling"}, "name = 'RootModel"),
    ],
)
def test_bad_schemas(schema: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        scripted("hi").with_structured_output(schema, **options)


def test_errors_are_langchains_too() -> None:
    with pytest.raises(ModelInvalidRequestError):
        scripted("hi").bind_tools([5])  # type: ignore[list-item]
    with pytest.raises(ModelInvalidRequestError):
        scripted("hi").with_structured_output(None)
