"""What of a schema comes into its grammar: patterns and references that can be read, no annotations, closed objects."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from langchain_card.constraints import enforced as module
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.errors import InvalidInputError
from tests.support.grammars import allows
from tests.support.schemas import Schema


def ruled(schema: Schema, strict: bool = False) -> Any:
    """What of a schema stands in its grammar."""
    rule = json.loads(json_grammar(schema, strict=strict).partition("%json ")[2])
    return {key: value for key, value in rule.items() if key != "x-guidance"}


def named(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties]}


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
REFUSED = [
    *(r"(?=a)b", r"(?!a)b", r"(?<=a)b", r"(?<!a)b", r"^(a)\1$", r"(?P<x>a)(?P=x)", r"(?<n>a)\k<n>", r"\bfoo\b"),
    *(r"\Bfoo", r"a$b", r"^a\Z", r"(?m)^a$", r"(?>a)", r"(?(1)a|b)", "(", "[", "*a", r"a{,3}", r"\cA", r"\é", "[[a]"),
    *(r"\p{Foo}", "[z-a]", "(?#c)a", "(" * 300 + ")" * 300, "\ud800", ZOD_EMAIL),
]
READ = [
    *("", "^a+$", r"\d{3}-\w\s", r"(?<y>\d{4})", r"(?P<y>a)", r"\p{L}+", r"[\p{Lu}]", r"(?i)yes", "(?i:yes)", "a++"),
    *(r"\Aa\z", "^a|b$", r"[\w-]", r"\x41\u00e9\u{1F600}", "[[:alpha:]]", r"\/\-\"", "a{100000}", "((a{99}){99}){99}"),
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_patterns_that_cannot_be_read_are_left_out(pattern: str) -> None:
    schema = named(x={"type": "string", "pattern": pattern, "minLength": 2})
    assert ruled(schema)["properties"] == {"x": {"type": "string", "minLength": 2}}
    assert allows(schema, '{"x": "any"}') and not allows(schema, '{"x": "a"}')
    with pytest.raises(
        InvalidInputError, match=r"schema pattern = .*cannot be enforced \(.*leave strict out"
    ) as raised:
        json_grammar(schema, strict=True)
    assert raised.value.value == pattern


@pytest.mark.parametrize("pattern", READ)
def test_patterns_that_can_be_read_stay(pattern: str) -> None:
    schema = named(x={"type": "string", "pattern": pattern})
    assert ruled(schema) == ruled(schema, strict=True)
    assert ruled(schema)["properties"] == schema["properties"]


def test_names_by_patterns_that_cannot_be_read_are_free() -> None:
    one, other = {"^a": {"type": "integer"}}, {"(?!a)b": {"type": "null"}}
    schema = {"type": "object", "patternProperties": {**one, **other}, "additionalProperties": False}
    assert ruled(schema) == {"type": "object", "patternProperties": one}
    assert allows(schema, '{"b": null}') and not allows(schema, '{"a": null}')
    with pytest.raises(InvalidInputError, match=r"schema pattern = .*\(\?!a\)b"):
        json_grammar(schema, strict=True)


@pytest.mark.parametrize("unit", [r"(?i)\p{L}", r"\p{L}{1,999}|", "(.*a)", "(a|.)*", "x{4294967295}", "[^\\W\\d]"])
def test_patterns_are_tried_in_time(unit: str) -> None:
    begun = time.monotonic()
    ruled({"anyOf": [{"type": "string", "pattern": unit * (4000 // len(unit)) + "a" * i} for i in range(60)]})
    assert time.monotonic() - begun < 4


def test_no_pattern_is_left_out_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    module._problem.cache_clear()
    assert ruled({"pattern": REFUSED[0]}) == {"pattern": REFUSED[0]}
    module._problem.cache_clear()


DEFS = {"$defs": {"a": {"type": "integer"}, "b c": {"type": "integer"}, "d/e~": {"type": "integer"},
                  "f": {"$id": "f.json", "type": "integer"}, "g": {"$anchor": "g", "type": "integer"}}}  # fmt: skip


@pytest.mark.parametrize(
    "reference",
    ["https://example.com/a.json", "#/$defs/nope", "#/$defs/a/type", "nope.json", "#nope", "http://[", "#/9"],
)
def test_references_to_nothing_are_left_out(reference: str) -> None:
    schema = {**named(x={"$ref": reference, "type": "integer"}), **DEFS, "$id": "https://e.com/s.json"}
    assert ruled(schema)["properties"] == {"x": {"type": "integer"}}
    assert allows(schema, '{"x": 5}') and not allows(schema, '{"x": "')
    with pytest.raises(InvalidInputError, match=r"schema \$ref = .*points at nothing") as raised:
        json_grammar(schema, strict=True)
    assert raised.value.value == reference


@pytest.mark.parametrize(
    "reference",
    [*("#/$defs/a", "#/$defs/b c", "#/$defs/b%20c", "#/$defs/d~1e~0", "#g", "f.json", "s.json#/$defs/a"),
     *("https://e.com/f.json", "https://e.com/s.json#/$defs/a", "#/properties/y")],
)  # fmt: skip
def test_references_within_the_schema_stay(reference: str) -> None:
    schema = {**named(y={"type": "integer"}, x={"$ref": reference}), **DEFS, "$id": "https://e.com/s.json"}
    assert allows(schema, '{"y": 1, "x": 5}') and not allows(schema, '{"y": 1, "x": "')


NOTES = {"title": "T", "description": "d" * 99, "default": float("nan"), "example": 1, "examples": [float("inf")],
         "$comment": "c", "deprecated": True, "readOnly": True, "writeOnly": False}  # fmt: skip


def test_annotations_stay_out() -> None:
    bare = named(**{name: {"type": "integer"} for name in NOTES})
    schema = {**named(**{name: {"type": "integer", **NOTES} for name in NOTES}), **NOTES}
    assert ruled(schema) == ruled(bare) and [*ruled(schema)["properties"]] == [*NOTES]
    deep = {"items": {"allOf": [NOTES]}, "$defs": {"title": NOTES}, "x": {"y": NOTES}, "anyOf": [{"$ref": "#/x/y"}]}
    assert ruled(deep) == {
        "items": {"allOf": [{}]},
        "$defs": {"title": {}},
        "x": {"y": {}},
        "anyOf": [{"$ref": "#/x/y"}],
    }
    assert ruled({"enum": [{"title": 1}], "const": {"default": 2}}) == {"enum": [{"title": 1}], "const": {"default": 2}}


def test_large_schemas_are_written_in_time() -> None:
    chain = {f"d{i}": {**META, "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(3000)}
    begun = time.monotonic()
    assert len(ruled({"$defs": chain | {"d3000": {}}, "$ref": "#/$defs/d0"})["$defs"]) == 3001
    assert time.monotonic() - begun < 4


def test_what_is_not_of_json() -> None:
    with pytest.raises(InvalidInputError, match="must be of JSON"):
        json_grammar({"const": float("nan")})
    with pytest.raises(InvalidInputError, match="must be of JSON"):
        json_grammar({"const": {1, 2}})


META = {"type": "object", "properties": {"k": {"type": "string"}}, "minProperties": 1}
INNER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        (named(name={"type": "string"}, meta=META), '{"name": "a", "invented"', False),
        (named(name={"type": "string"}, meta=META), '{"name": "a", "meta": {"other": 1}', True),
        (named(a={"$ref": "#/$defs/a"}) | {"$defs": {"a": META, "b": INNER}}, '{"a": {"invented"', True),
        (named(b={"$ref": "#/$defs/b"}, a=META) | {"$defs": {"b": INNER}}, '{"b": {"invented"', False),
        (named(a=META | {"properties": {"b": INNER}}), '{"a": {"b": {"invented"', True),
        ({"allOf": [{"$ref": "#/$defs/b"}, named(a=INNER)], "$defs": {"b": INNER}}, '{"b": 1, "a": {"invented"', True),
        (
            named(a={"allOf": [{"$ref": "#/$defs/b"}, named(c={})]}, d={"$ref": "#/$defs/e"})
            | {"$defs": {"b": INNER, "e": INNER}},
            '{"a": {"c": 1, "b": 2, "e": 1}, "d": {"invented"',
            False,
        ),
        (
            INNER | {"dependentSchemas": {"b": {"required": ["c"], "properties": {"c": {"type": "integer"}}}}},
            '{"b": 1, "c": 2}',
            True,
        ),
        (INNER | {"dependencies": {"b": {"required": ["c"]}}}, '{"b": 1, "c": 2}', True),
    ],
)
def test_only_parts_that_are_combined_stay_open(schema: Schema, text: str, allowed: bool) -> None:
    assert allows(schema, text) is allowed
