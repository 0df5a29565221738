"""`SchemaParts`: the schemas within a JSON schema, and the targets of its references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords that hold schemas by name; those below hold one, or a list of them."""
_HOLDING = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_DEFINING = ("$defs", "definitions")


class SchemaParts:
    """The parts of a schema, and the targets of its references.

    Args:
        root: the schema. Its dicts are distinguished by identity: a dict that occurs in two places is one part.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._base = root, _text(root.get("$id"))
        self._places: dict[str, Mapping[str, Any]] = {"": root, self._base: root}
        self._anchors: dict[str, Mapping[str, Any]] = {}
        for part in _spread([root], lambda part: _held(part, True)):  # references may point at definitions
            if _text(part.get("$id")):
                self._places.setdefault(_joined(self._base, part["$id"]), part)
            for key in ("$anchor", "$dynamicAnchor"):
                self._anchors.setdefault(_text(part.get(key)), part)
        self._parts = {id(part): part for part in self.within([root], definitions=True)}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._parts

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._parts.values())

    def target(self, reference: Any) -> Any:
        """Return the target of a `$ref`, a schema or a bool; None if it is not within the schema."""
        if not isinstance(reference, str):
            return None
        try:
            url, fragment = urldefrag(reference if reference.startswith("#") else urljoin(self._base, reference))
        except ValueError:  # no URL
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment)
        holders = [*self._places.values()] if reference.startswith("#") else [self._places.get(url)]
        targets = (_pointed(holder, fragment) for holder in holders)
        return next((target for target in targets if isinstance(target, Mapping | bool)), None)

    def within(self, parts: Iterable[Mapping[str, Any]], *, definitions: bool = False) -> list[Mapping[str, Any]]:
        """Return parts and all that they contain or refer to, each once.

        Args:
            parts: the first parts.
            definitions: whether to include `$defs` without references.
        """
        return _spread(parts, lambda part: [*_held(part, definitions), self.target(part.get("$ref"))])

    def is_recursive(self) -> bool:
        """Return whether a part refers to a part that contains it."""
        further = {
            id(part): [id(held) for held in (*_held(part, False), self.target(part.get("$ref"))) if held in self]
            for part in self
        }
        holders = Counter(held for all_held in further.values() for held in all_held)
        left = [part for part in further if not holders[part]]
        for part in left:  # it grows by parts all of whose holders came before
            for held in further[part]:
                holders[held] -= 1
                left += [] if holders[held] else [held]
        return len(left) < len(further)

    def rewritten(self, change: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Return the schema with each part changed.

        Args:
            change: returns the new part for a part and its copy, in which contained parts are already changed.
        """

        def written(value: Any) -> Any:
            if isinstance(value, list):
                return [*map(written, value)]
            if not isinstance(value, Mapping):
                return value
            copy = {key: written(item) for key, item in value.items()}
            return change(value, copy) if value in self else copy

        schema: dict[str, Any] = written(self._root)
        return schema


def _spread(
    first: Iterable[Mapping[str, Any]], further: Callable[[Mapping[str, Any]], Iterable[Any]]
) -> list[Mapping[str, Any]]:
    """Return parts and all that are reachable from them, each once."""
    reached: dict[int, Mapping[str, Any]] = {}
    left: list[Any] = [*first]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in reached:
            reached[id(part)] = part
            left += further(part)
    return [*reached.values()]


def _held(part: Mapping[str, Any], definitions: bool) -> Iterator[Any]:
    """Yield the values directly within a part, in the places of schemas."""
    for key in _BY_NAME:
        if isinstance(named := part.get(key), Mapping) and (definitions or key not in _DEFINING):
            yield from named.values()
    for key in _HOLDING:
        yield from value if isinstance(value := part.get(key), list) else [value]


def _pointed(holder: Any, fragment: str) -> Any:
    """Return the value at a JSON pointer; None if there is none."""
    for step in unquote(fragment).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(holder, Mapping):
            holder = holder.get(name)
        elif isinstance(holder, list) and name.isdecimal() and len(name) < 9 and int(name) < len(holder):
            holder = holder[int(name)]
        else:
            return None
    return holder


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError:  # no URL
        return url
