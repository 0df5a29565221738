"""What LangChain's converters cut short: schemas that refer to themselves, TypedDicts, and MCP's tools."""

from __future__ import annotations

import json
import time
import typing
import warnings
from typing import Annotated, Any, Literal

import pytest
import typing_extensions
from langchain.agents.structured_output import OutputToolBinding, ToolStrategy
from langchain.tools import InjectedState, ToolRuntime
from langchain_core.tools import InjectedToolArg, InjectedToolCallId, StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field
from pydantic import v1 as pydantic_v1
from typing_extensions import NotRequired, Required

from langchain_card.chat.schemas import json_schema, tool_dict
from langchain_card.constraints.schema_parts import SchemaParts
from langchain_card.errors import InvalidInputError
from tests.support.grammars import allows
from tests.support.schemas import satisfies
from tests.support.scripted import PARAMETERS, JokeDict, Node, weather


class Tree(BaseModel):
    """A tree of numbers."""

    value: int = Field(description="of the knot", title="Of the knot")
    children: list[Tree] = []


class OldTree(pydantic_v1.BaseModel):
    """A tree of numbers."""

    value: int = pydantic_v1.Field(description="of the knot")
    children: list[OldTree] = []


OldTree.update_forward_refs()
TREE_SCHEMA = {**Tree.model_json_schema(), "title": "Tree", "description": "A tree of numbers."}


class TreeDict(typing.TypedDict):
    """A tree of numbers.

    Args:
        value: of the knot
    """

    value: int
    children: NotRequired[list[TreeDict]]


@tool
def save(
    tree: Tree,
    state: Annotated[dict[str, Any], InjectedState],
    runtime: ToolRuntime,
    key: Annotated[str, InjectedToolArg],
    call: Annotated[str, InjectedToolCallId],
    name: str = "x",
) -> str:
    """Saves a tree."""
    return name


def keep(tree: Tree, key: Annotated[str, InjectedToolArg], name: str = "x") -> str:
    """Saves a tree.

    Args:
        tree: that is kept
        name: of it
    """
    return name


keep.__annotations__["key"] = Annotated[str, InjectedToolArg]  # the converter does not see it in a text
GOOD = '{"value": 1, "children": [{"value": 2, "children": []}]}'
WRONG = ('{"value": 1, "children": ["x', '{"value": 1, "children": [{"v":', '{"value": 1, "children": [{"value": "')
BOUND: dict[str, Any] = {
    "pydantic": Tree,
    "pydantic_v1": OldTree,
    "typeddict": TreeDict,
    "tool of a dict": StructuredTool(name="Tree", description="A tree of numbers.", args_schema=TREE_SCHEMA),
    "json schema": TREE_SCHEMA,
    "function": {"name": "Tree", "description": "A tree of numbers.", "parameters": Tree.model_json_schema()},
    "ToolStrategy": OutputToolBinding.from_schema_spec(ToolStrategy(Tree).schema_specs[0]).tool,
}


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("kind", BOUND)
def test_schemas_that_refer_to_themselves_are_enforced(kind: str, strict: bool | None) -> None:
    function = tool_dict(BOUND[kind], strict)["function"]
    parameters = function["parameters"]
    assert function["name"] == BOUND[kind].__name__ if isinstance(BOUND[kind], type) else "Tree"
    assert function["description"] == "A tree of numbers."
    if kind not in ("json schema", "function"):  # these are told as they are
        assert parameters["properties"]["value"] == {"type": "integer", "description": "of the knot"}
        assert "title" not in json.dumps(parameters) and parameters["required"][0] == "value"
    assert satisfies(GOOD, parameters) and allows(parameters, GOOD)
    assert not any(allows(parameters, wrong) for wrong in WRONG)
    assert tool_dict({"type": "function", "function": function}, strict)["function"] == function
    if strict and kind not in ("json schema", "function"):
        assert parameters["required"] == ["value", "children"] and parameters["additionalProperties"] is False


@pytest.mark.parametrize("given", [save, keep])
def test_arguments_that_refer_to_themselves(given: Any) -> None:
    function = tool_dict(given)["function"]
    parameters = function["parameters"]
    assert function["description"] == "Saves a tree." and set(parameters["properties"]) == {"tree", "name"}
    assert parameters["required"] == ["tree"] and "injected" not in json.dumps(parameters).lower()
    assert given is save or parameters["properties"]["tree"]["description"] == "that is kept"
    assert allows(parameters, f'{{"tree": {GOOD}}}')
    assert not any(allows(parameters, f'{{"tree": {wrong}') for wrong in WRONG)


def test_what_does_not_refer_to_itself_is_the_converters() -> None:
    class Two(BaseModel):
        """Two jokes."""

        one: typing.Optional[JokeDict] = None  # noqa: UP045
        other: JokeDict

    def bare(x: int, *, y: JokeDict | None = None) -> None: ...

    async def long(x: int) -> None:
        """Does this.

        And
        that, too.

        Args:
            x: for it
        """

    for given in (Two, weather, tool(weather), bare, long, Two.model_validate_json):
        assert tool_dict(given) == convert_to_openai_tool(given)


def test_large_schemas_are_read_in_time() -> None:
    chain: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(3000)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain | {"d3000": {}}}
    begun = time.monotonic()
    assert SchemaParts(schema).is_recursive() is False
    chain["d2999"] = {"items": {"$ref": "#/$defs/d7"}}
    assert SchemaParts({**schema, "$defs": chain}).is_recursive() is True
    assert time.monotonic() - begun < 2


# TypedDicts.


class Place(typing.TypedDict):
    town: Annotated[str | None, Field(max_length=20)]
    near: list[Place]


class Trip(typing_extensions.TypedDict):
    """A trip.

    It takes days.

    Args:
        to: where
            it goes
        days (int): how long

    Returns:
        nothing
    """

    to: Place
    days: int | None
    how: Annotated[Literal["bus", "train"], "bus", "by what"]
    who: Annotated[list[str], ..., "its people"]
    json: NotRequired[Annotated[str, ..., "a name that pydantic has, too"]]
    class_: Annotated[NotRequired[int], ..., "of the train"]


class LongTrip(Trip, total=False):
    rest: Required[dict[str, Place | None]]
    nights: int


def test_typed_dicts() -> None:
    function = tool_dict(Trip)["function"]
    parameters = function["parameters"]
    assert (function["name"], function["description"]) == ("Trip", "A trip. It takes days.")
    assert parameters["required"] == ["to", "days", "who"]
    said = parameters["properties"]
    assert said["days"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "how long"}
    assert said["how"] == {"type": "string", "enum": ["bus", "train"], "default": "bus", "description": "by what"}
    assert said["who"] == {"type": "array", "items": {"type": "string"}, "description": "its people"}
    assert said["json"]["description"].startswith("a name") and said["class_"]["description"] == "of the train"
    assert said["to"]["description"] == "where it goes"
    assert allows(parameters, '{"to": {"town": null, "near": []}, "days": null, "who": []}')
    assert not allows(parameters, '{"to": {"town": 5') and not allows(parameters, '{"to": {"town": null, "near": [1')
    assert tool_dict(LongTrip)["function"]["parameters"]["required"] == [*parameters["required"], "rest"]
    assert "description" not in tool_dict(LongTrip)["function"]
    assert json_schema(Trip) == {"title": "Trip", "description": "A trip. It takes days.", **parameters}


def test_typed_dicts_that_do_not_refer_to_themselves_are_written_out() -> None:
    class Pair(typing.TypedDict):
        """A pair."""

        left: JokeDict
        right: list[JokeDict]

    parameters = tool_dict(Pair)["function"]["parameters"]
    assert "$" not in json.dumps(parameters)
    assert parameters["properties"]["right"]["items"] == parameters["properties"]["left"]
    assert parameters["properties"]["left"] == {
        "type": "object",
        "description": "A joke.",
        **tool_dict(JokeDict)["function"]["parameters"],
    }


class Closed(typing_extensions.TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    a: int


class OfOld(typing.TypedDict):
    joke: OldTree


def test_typed_dicts_of_pydantics_own() -> None:
    assert tool_dict(Closed)["function"]["parameters"]["additionalProperties"] is False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tool_dict(OfOld)["function"]["parameters"]["required"] == ["joke"]


def test_typed_dicts_that_cannot_be_read() -> None:
    class Local(typing.TypedDict):
        a: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidInputError, match=r"cannot be read as a tool \(name 'Nowhere' is not defined"):
        tool_dict(Local)


# Dicts.


def test_a_tool_of_mcp() -> None:
    given = {"name": "joke", "description": "Jokes.", "inputSchema": PARAMETERS, "annotations": {"readOnlyHint": True}}
    function = {"name": "joke", "description": "Jokes.", "parameters": PARAMETERS}
    assert tool_dict(given) == {"type": "function", "function": function}
    assert tool_dict({"name": "f", "inputSchema": {"type": "object"}, "description": None})["function"]["name"] == "f"
    assert json_schema(given)["properties"] == PARAMETERS["properties"]
    with pytest.raises(InvalidInputError, match=r"parameters = .*must be a JSON schema of an object"):
        tool_dict({**given, "inputSchema": {"type": "array"}})


def test_a_schema_without_properties() -> None:
    schema = {"title": "Knot", "$ref": "#/$defs/Node", "$defs": Node.model_json_schema()["$defs"]}
    del (expected := {**schema, "type": "object"})["title"]
    assert tool_dict(schema)["function"]["parameters"] == expected
    with pytest.raises(InvalidInputError, match=r"parameters = .*must be a JSON schema of an object"):
        tool_dict({"title": "Numbers", "type": "array", "items": {"type": "integer"}})
