"""`enforced`: the part of a JSON schema that a grammar can enforce."""

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
"""Keywords that do not restrict documents; they are in the prompt, not in the grammar."""

_COMBINING = {
    *("anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies"),
    *("patternProperties", "minProperties", "unevaluatedProperties"),
}

_MOST_CHARS = 16_384
"""Most characters of a schema's patterns that are tried here, at most half a second; a process checks the others."""


def enforced(schema: Mapping[str, Any], *, strict: bool, field: str) -> dict[str, Any]:
    """Return a schema for the compiler: without annotations and unsupported keywords, and closed.

    Patterns with look-around, back-references or word boundaries are left out, and references that point to nothing
    within the schema; without llguidance all patterns are kept. Objects that name properties get
    `additionalProperties: false` by default, because models would invent others. Parts that are combined, parts within
    them and parts that they refer to stay open, because each may name properties that another does not. A single part
    in `allOf`, as pydantic 1 writes it, is not combined.

    Args:
        schema: a schema of JSON types; no dict may occur in two places.
        strict: whether to refuse a schema of which a part would be left out.
        field: name of the schema in errors.

    Raises:
        InvalidInputError: `strict` is True, and a part cannot be enforced.
    """
    parts = SchemaParts(schema)
    open_ = {id(part) for part in parts.within(filter(_combines, parts))}
    left = _MOST_CHARS

    def readable(pattern: Any) -> bool:
        nonlocal left
        if not isinstance(pattern, str) or (left := left - len(pattern)) < 0:
            return True  # the compiler decides
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
                made.pop("additionalProperties", None)  # it applies to names that no pattern matches
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
    """Return whether a part names properties, all required ones included."""
    named, required = part.get("properties"), part.get("required", [])
    return isinstance(named, Mapping) and isinstance(required, list) and all(name in named for name in required)


@lru_cache(maxsize=1024)
def _problem(pattern: str) -> str:
    """Return the compiler's error for a pattern; "" for none, or if llguidance is not installed.

    It takes time in proportion to the pattern's length: counts are not expanded (docs/LOG.md, 2026-11-22).
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    alone = json.dumps({"type": "string", "pattern": pattern})
    message: str = LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: %json {alone}\n", None)
    lines = [line.removeprefix("error: ") for line in message.splitlines() if line.startswith("error: ")]
    return lines[0] if lines else message.partition("\n")[0].rpartition(": ")[2][:200]
