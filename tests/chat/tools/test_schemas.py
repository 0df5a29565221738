"""Tools, choices of them and schemas in OpenAI's forms, and what is wrong with them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import Tool
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_card.chat.schemas import response_format_dict, tool_choice_form, tool_dict, tool_dicts
from langchain_card.errors import InvalidInputError
from tests.support.scripted import FUNCTION, JOKE, PARAMETERS, SCHEMAS, add, scripted, weather


@pytest.mark.parametrize(
    "given",
    [
        {"name": "f"},
        {"name": "f", "parameters": None},
        {"name": "f", "parameters": {}},
        {"title": "f", "type": "object"},
    ],
)
def test_a_tool_without_parameters(given: Any) -> None:
    nothing = {"type": "object", "properties": {}}
    assert tool_dict(given) == {"type": "function", "function": {"name": "f", "parameters": nothing}}
    closed = {**nothing, "additionalProperties": False}
    assert tool_dict(given, strict=True)["function"] == {"name": "f", "strict": True, "parameters": closed}


def test_strict_is_the_tools_own_where_it_says_it() -> None:
    loose: Any = {"type": "function", "function": {**FUNCTION, "name": "Loose", "strict": False}}
    before = json.dumps([loose, FUNCTION])
    assert tool_dicts([loose, FUNCTION], strict=True)[0] == loose
    assert tool_dicts([loose, FUNCTION], strict=True)[1]["function"]["strict"] is True
    assert json.dumps([loose, FUNCTION]) == before
    strict = tool_dicts([add], strict=True)
    assert (
        strict == [convert_to_openai_tool(add, strict=True)] == tool_dicts(strict) == tool_dicts(strict, strict=False)
    )


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([lambda x: x], "name = '<lambda>': must have a name of 1 to 64"),
        ([{"name": "x" * 65}], "1 to 64"),
        ([{"name": "f", "parameters": {"type": "array"}}], "parameters = .*a JSON schema of an object"),
        ([{"name": "f", "parameters": [1]}], r"parameters = \[1\].*a JSON schema of an object"),
        ([add, {"type": "web_search"}], r"tools\[1\] = .*must be a function"),
        ([{"type": "bash_20250124", "name": "bash"}], "must be a function"),
        ([Tool("t", str, "t", metadata={"type": "custom_tool"})], "must be a function"),
        ([5], r"tools\[0\] = 5: cannot be read as a tool \(Unsupported function\)"),
        ([{"type": "object", "properties": {}}], "cannot be read as a tool.*`title`"),
        ([{"type": "function", "function": {}}], "cannot be read as a tool"),
        (add, "must be a list of tools.*put a single one into a list"),
        ("add", "must be a list"),
    ],
)
def test_tools_that_are_none(tools: Any, words: str) -> None:
    model = scripted("hi")
    with pytest.raises(InvalidInputError, match=words):
        model.bind_tools(tools)
    with pytest.raises(InvalidInputError, match=words):
        model.get_num_tokens_from_messages([AIMessage("hi")], tools=tools)


def test_two_tools_of_one_name() -> None:
    """LangChain's tests bind a class beside its own schema; they must be distinct when they are called."""
    model = scripted("hi")
    model.bind_tools([add, weather, add])
    with pytest.raises(InvalidInputError, match=r"tools\[2\] = 'add': is the name of an earlier tool"):
        model.get_num_tokens_from_messages([AIMessage("hi")], tools=[add, weather, add])


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        *((given, "auto") for given in (None, "auto")),
        *((given, "none") for given in ("none", False)),
        *((given, "required") for given in ("any", "required", True)),
        *((given, "add") for given in ("add", {"type": "function", "function": {"name": "add"}})),
    ],
)
def test_choices_of_a_tool(choice: Any, form: str) -> None:
    whole: Any = {"type": "function", "function": {"name": "add"}} if form == "add" else form
    tools = tool_dicts([add, weather])
    assert tool_choice_form(choice, tools) == tool_choice_form(whole, tools) == whole
    if form in ("auto", "none"):
        assert tool_choice_form(choice, []) == whole
        return
    with pytest.raises(InvalidInputError, match=r"tool_choice = .*needs tools"):
        scripted("hi").bind_tools([], tool_choice=choice)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "wether"}, "tool_choice = 'wether': must be one of add, weather.*did you mean weather"),
        ({"tool_choice": "reqired"}, "did you mean required"),
        ({"tool_choice": {"type": "function", "function": {"name": "ad"}}}, "'ad': must be one of add.*mean add"),
        ({"tool_choice": {"type": "function", "function": {"name": "any"}}}, "'any': must be one of add, weather"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice = None: must be one of"),
        ({"tool_choice": ["add"]}, "tool_choice = "),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls = 'no': must be True, False or None"),
        ({"tol_choice": "any"}, "did you mean tool_choice"),
        ({"response_format": {"type": "json_objct"}}, "response_format type = 'json_objct'.*mean json_object"),
    ],
)
def test_bad_options_of_tools(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        scripted("hi").bind_tools([add, weather], **options)


# Schemas.


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "schema": PARAMETERS},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "description": "d"}},
    ],
)
def test_forms_of_openais_stay(form: Any) -> None:
    assert response_format_dict(form) == form


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schemas_become_forms(kind: str) -> None:
    form = response_format_dict(SCHEMAS[kind])
    named = form["json_schema"]
    assert set(named["schema"]["properties"]) == set(JOKE)
    assert named["description"] == "A joke." and named["name"] == named["schema"]["title"]
    assert response_format_dict(form) == form
    assert response_format_dict({"type": "json_object", "schema": SCHEMAS[kind]})["schema"] == named["schema"]
    assert response_format_dict({"type": "number"})["json_schema"] == {"name": "response", "schema": {"type": "number"}}


def test_without_the_package_for_grammars_tools_are_refused_when_they_are_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    words = r"tools = '...': needs the package llguidance.*pip install 'llguidance"
    with pytest.raises(InvalidInputError, match=words):
        scripted("hi").bind_tools([add])
    with pytest.raises(InvalidInputError, match=words.replace("tools", "schema")):
        scripted("hi").with_structured_output(JOKE)
