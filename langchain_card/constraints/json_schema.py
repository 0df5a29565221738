"""JSON schemas as rules of a grammar, for documents on one line with the most usual spacing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_card.constraints.enforced import enforced
from langchain_card.errors import CARDError, InvalidInputError

MAX_DEPTH = 64
"""Most levels of a schema's own JSON; documents may be deeper."""

_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # not \\u, with which a key could be written twice
}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_grammar(schema: Mapping[str, Any], *, strict: bool = False) -> str:
    """Return the grammar of the documents of a JSON schema, for `SamplingParams.grammar`.

    Args:
        schema: a JSON schema of any draft.
        strict: whether to refuse a schema of which a part cannot be enforced; otherwise such parts are left out.

    Raises:
        InvalidInputError: the schema is too deep or not of JSON types.
    """
    return f"%llguidance {{}}\nstart: {json_rule(schema, strict=strict)}\n"


def json_rule(schema: Mapping[str, Any], *, strict: bool = False, field: str = "schema") -> str:
    """Return the right side of a grammar rule for a JSON schema; `field` is the schema's name in errors."""
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise InvalidInputError(field, f"{depth} levels", f"at most {MAX_DEPTH} levels", "use $defs and $ref")
    options = {**_FORM, "lenient": not strict, "coerce_one_of": not strict}
    plain = {key: value for key, value in schema.items() if key != "$schema"}  # of any draft, read as the latest
    try:
        copy = json.loads(json.dumps(plain))  # no dict occurs in two places
        part = {**enforced(copy, strict=strict, field=field), "x-guidance": options}
        return "%json " + json.dumps(part, ensure_ascii=False, allow_nan=False)
    except CARDError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInputError(field, schema, f"must be of JSON ({error})") from error


def _depth(value: Any) -> int:
    """Return the levels of dicts and lists, at most one above `MAX_DEPTH`: cyclic values have no end."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        held = [
            item
            for holder in level
            if isinstance(holder, Mapping | list | tuple)
            for item in (holder.values() if isinstance(holder, Mapping) else holder)
        ]
        level = [*{id(item): item for item in held}.values()]
        depth += 1
    return depth
