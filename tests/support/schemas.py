"""Random JSON schemas: small, satisfiable, and the same for the same seed."""

from __future__ import annotations

import json
import random
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

NAMES = ["a", "b", "id", "name", "käse", "日本", "two words", 'q"uote', "back\\slash", "🙂", "", "$ref", "new\nline"]
WORDS = ["", "x", "red", "green", "naïve", 'say "hi"', "C:\\dir", "tab\there", "日本語", "🙂🙃", "null", "</s>", "{}"]
PATTERNS = ["^[a-z]{2,4}$", "^\\d{3}-\\d{2}$", "^(red|green)$", "^(ab)*c$", "[A-Z]", "^x+$", "^.{1,3}$"]
FORMATS = ["email", "hostname", "ipv4", "ipv6", "uuid"]
NOTES = {"title": "T", "description": 'says "no"', "default": None, "examples": [1, "x"]}  # these change nothing


def satisfies(text: str, schema: Schema) -> bool:
    """Whether a text is a document of a schema; no object in it may have a name twice."""

    def unique(pairs: list[tuple[str, Any]]) -> Schema:
        assert len(dict(pairs)) == len(pairs), f"a name came twice: {text}"
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError:
        return False
    return bool(Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(document))


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema that some document satisfies; one in five is recursive."""
    return _recursive(rng) if rng.random() < 0.2 else _any(rng, depth)


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = [_string, _string, _number, _integer, _plain, _fixed, _fixed]
    nodes = [_object, _object, _object, _array, _tuple, _any_of, _one_of, _all_of]
    leaf = depth == 0 or rng.random() < 0.25
    schema = rng.choice(leaves)(rng) if leaf else rng.choice(nodes)(rng, depth - 1)
    return schema | {key: value for key, value in NOTES.items() if rng.random() < 0.05}


def _plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


def _string(rng: random.Random) -> Schema:
    low = rng.randrange(4)
    lengths: list[Schema] = [{}, {"minLength": low}, {"maxLength": low}, {"minLength": low, "maxLength": low + 3}]
    kinds = [*lengths, {"pattern": rng.choice(PATTERNS)}, {"format": rng.choice(FORMATS)}]
    return {"type": "string"} | rng.choice(kinds)


def _integer(rng: random.Random) -> Schema:
    low, width = rng.randint(-120, 120), rng.randrange(12, 3000)
    kinds: list[Schema] = [{}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": low + width}]
    step: Schema = {"multipleOf": rng.choice([2, 3, 5, 7])} if rng.random() < 0.3 else {}
    return {"type": "integer"} | rng.choice(kinds) | step


def _number(rng: random.Random) -> Schema:
    low, width = rng.randint(-999, 999) / rng.choice([1, 2, 4, 100]), rng.randrange(1, 500) / 4
    kinds: list[Schema] = [{}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + width}]
    return {"type": "number"} | rng.choice(kinds)


def _value(rng: random.Random, depth: int = 2) -> Any:
    """For `enum` and `const`."""
    if depth and rng.random() < 0.1:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if depth and rng.random() < 0.1:
        return {name: _value(rng, depth - 1) for name in rng.sample(NAMES, rng.randrange(3))}
    return rng.choice([None, True, False, rng.randint(-50, 5000), rng.randint(-50, 50) / 4, *rng.sample(WORDS, 3)])


def _fixed(rng: random.Random) -> Schema:
    mixed = [rng.randrange(9), *(_value(rng) for _ in range(rng.randrange(4)))]
    words = {"type": "string", "enum": rng.sample(WORDS, rng.randint(1, 5))}
    return rng.choice([words, {"enum": mixed}, {"const": _value(rng)}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.choice([0, 1, 2, 2, 3, 4]))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    others = rng.choice([{}, False, False, False, True, _any(rng, 0)])
    return schema if others == {} else schema | {"additionalProperties": others}


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    limits: list[Schema] = [{}, {"minItems": low}, {"minItems": low, "maxItems": low + 1}, {"maxItems": low}]
    return {"type": "array", "items": _any(rng, depth)} | rng.choice(limits)


def _tuple(rng: random.Random, depth: int) -> Schema:
    first = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, {"type": "integer"}])
    return {"type": "array", "prefixItems": first, "items": rest, "minItems": rng.randrange(len(first) + 1)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    """Options told apart by a constant, as pydantic writes a discriminated union."""
    options = [_object(rng, depth) for _ in range(rng.randint(1, 3))]
    for kind, option in zip("xyz", options, strict=False):
        option["properties"] = {"kind": {"const": kind}, **option["properties"]}
        option["required"] = ["kind", *option["required"]]
    return {"oneOf": options}


def _all_of(rng: random.Random, depth: int) -> Schema:
    """Two open objects without a name in common."""
    parts = [_object(rng, depth), _object(rng, depth)]
    parts[1]["properties"] = {f"{name}2": value for name, value in parts[1]["properties"].items()}
    parts[1]["required"] = [f"{name}2" for name in parts[1]["required"]]
    return {"allOf": [{key: part[key] for key in ("type", "properties", "required")} for part in parts]}


def _recursive(rng: random.Random) -> Schema:
    leaf, link = _any(rng, 0), {"$ref": "#/$defs/node"}
    children: Schema = {"type": "array", "items": link, "maxItems": 3}
    shapes: list[Schema] = [
        {"type": "object", "properties": {"value": leaf, "children": children}, "required": ["value", "children"]},
        {"type": "object", "properties": {"value": leaf, "next": {"anyOf": [link, {"type": "null"}]}}},
        {"type": "object", "properties": {"value": leaf, "next": link}, "required": ["value"]},
        {"anyOf": [{"$ref": "#/$defs/branch"}, leaf]},
        {"anyOf": [{"type": "array", "items": link}, {"type": "null"}]},  # the lowest byte, `[`, never ends
    ]
    branch = {"type": "object", "properties": {"left": link, "right": link}, "required": ["left", "right"]}
    places: list[Schema] = [link, {"type": "array", "items": link}, {"type": "object", "properties": {"root": link}}]
    return {"$defs": {"branch": branch, "node": rng.choice(shapes)}} | rng.choice(places)
