"""Documents beside tools: those that may be objects are a tool's arguments, others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import RootModel

from langchain_card.chat.answer_shape import answer_shape
from langchain_card.errors import InvalidInputError
from langchain_card.text.tool_form import FENCED
from langchain_card.text.tool_grammar import answer_grammar
from tests.support.grammars import allows, grammars
from tests.support.scripted import Joke, Node, add


def arguments(schema: Any) -> Any:
    """Of the tool that a model calls with the document."""
    tools, shape = answer_shape({"tools": [add], "response_format": schema}, FENCED)
    assert shape.answer == tools[-1]
    return tools[-1]["function"]["parameters"]


OBJECT = '{"value": 1, "children": []}'
DEFS = {"$defs": {"o": {"type": "object"}, "n": {"type": "integer"}, "on": {"anyOf": [{"$ref": "#/$defs/n"}, {}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        RootModel[Node | list[Node]],
        Node,
        {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/on"}], **DEFS},
        {"type": ["object", "null"]},
        {"enum": ["x", {"value": 1, "children": []}]},
        {"const": {"value": 1, "children": []}},
        {"allOf": [{"$ref": "#/$defs/o"}, {"type": ["object", "array"]}], **DEFS},
        {"oneOf": [{"type": "null"}, {"type": "object"}]},
        {"$ref": "#"},
        {"$ref": "https://example.com/a.json"},
    ],
)
def test_only_objects_come_of_what_may_be_one(schema: Any) -> None:
    parameters = arguments(schema)
    assert parameters["type"] == "object"
    if schema != {"$ref": "#"}:
        assert allows(parameters, OBJECT)
        assert not any(allows(parameters, other) for other in ("[", '"', "1", "n", "t"))


@pytest.mark.parametrize(
    "schema",
    [
        RootModel[list[Node]],
        RootModel[list[Node] | int],
        {"$ref": "#/$defs/n", **DEFS},
        {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/n"}], **DEFS},
        {"enum": ["red", 5]},
        {"const": "red"},
        {"allOf": [{"$ref": "#/$defs/on"}, {"$ref": "#/$defs/n"}], **DEFS},
        {"anyOf": [{"oneOf": [{"type": "null"}, False]}, {"allOf": [{"const": 1}]}]},
        {"type": ["string", "null"]},
    ],
)
def test_what_is_no_object_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"(must be object where there are tools.*property|[Uu]nsatisfiable)"):
        _, shape = answer_shape({"tools": [add], "response_format": schema}, FENCED)
        grammars().check(answer_grammar(shape, FENCED, ()), 10**6)
    assert answer_shape({"response_format": schema}, FENCED)[1].schema is not None
    assert answer_shape({"tools": [add], "tool_choice": "add", "response_format": schema}, FENCED)[1].answer is None


def test_an_object_stays_as_it_is() -> None:
    assert arguments(Joke) == Joke.model_json_schema()
