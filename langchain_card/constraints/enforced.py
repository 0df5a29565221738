"""What of a JSON schema a grammar can enforce."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from langchain_card.constraints.schema_parts import SchemaParts
from langchain_card.errors import InvalidInputError

_ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "$comment"),
    *("deprecated", "readOnly", "writeOnly"),
}
"""They say nothing of what a document may be: the prompt tells them, the grammar goes without."""

_COMBINING = {
    *("anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies"),
    *("patternProperties", "minProperties", "unevaluatedProperties"),
}

_MOST_CHARS = 16_384
"""Of a schema's patterns that are tried here, half a second at worst; a child process bounds all others."""


def enforced(schema: Mapping[str, Any], *, strict: bool, field: str) -> dict[str, Any]:
    """A schema for the compiler: without annotations, without what it cannot read, and closed.

    Left out are patterns with look-around, back-references or word boundaries, and references that point out of the
    schema or nowhere; patterns are all kept where llguidance is not installed. Objects that name properties and say
    nothing of others allow no others, which models would invent. Where parts are combined, each may name what another
    does not: such a part, what is within it and what it refers to stay open. A single part in `allOf`, as pydantic 1
    writes, is combined with nothing.

    Args:
        schema: of JSON alone; none of its dicts may stand in two places.
        strict: refuse what would be left out.
        field: its name in errors.

    Raises:
        InvalidInputError: `strict`, and something cannot be enforced.
    """
    parts = SchemaParts(schema)
    open_ = {id(part) for part in parts.within(filter(_combines, parts))}
    left = _MOST_CHARS

    def readable(pattern: Any) -> bool:
        nonlocal left
        if not isinstance(pattern, str) or (left := left - len(pattern)) < 0:
            return True  # for the compiler to judge
        if strict and (problem := _problem(pattern)):
            hint = "write it without look-around, back-references and word boundaries, or leave strict out"
            raise InvalidInputError(f"{field} pattern", pattern, f"cannot be enforced ({problem})", hint)
        return not _problem(pattern)

    def change(part: Mapping[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
        made = {key: value for key, value in copy.items() if key not in _ANNOTATIONS}
        if not readable(made.get("pattern")):
            del made["pattern"]
        if isinstance(named := made.get("patternProperties"), Mapping):
            made["patternProperties"] = {pattern: held for pattern, held in named.items() if readable(pattern)}
            if len(made["patternProperties"]) < len(named):
                made.pop("additionalProperties", None)  # it is for the names that no pattern has
        if isinstance(reference := made.get("$ref"), str):
            if parts.target(reference) is not None:
                made["$ref"] = quote(reference, safe="%/#:?&=~!$'()*+,;@")
            elif strict:
                hint = "put what it refers to into $defs, or leave strict out"
                raise InvalidInputError(f"{field} $ref", reference, "points at nothing within the schema", hint)
            else:
                del made["$ref"]
        if id(part) not in open_ and _names_all(part):
            made.setdefault("additionalProperties", False)
        return made

    return parts.rewritten(change)


def _combines(part: Mapping[str, Any]) -> bool:
    if isinstance(all_of := part.get("allOf"), list) and (
        len(all_of) != 1 or "properties" in part or _COMBINING & part.keys()
    ):
        return True
    return "properties" in part and bool(_COMBINING & part.keys())


def _names_all(part: Mapping[str, Any]) -> bool:
    """Whether it names properties, those that it requires among them."""
    named, required = part.get("properties"), part.get("required", [])
    return isinstance(named, Mapping) and isinstance(required, list) and all(name in named for name in required)


@lru_cache(maxsize=1024)
def _problem(pattern: str) -> str:
    """What the compiler says against a pattern; "" for nothing, or where it is not installed.

    Its time is in proportion to the pattern's length: its counts are not written out (docs/LOG.md).
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    alone = json.dumps({"type": "string", "pattern": pattern})
    said: str = LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: %json {alone}\n", None)
    lines = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    return lines[0] if lines else said.partition("\n")[0].rpartition(": ")[2][:200]
