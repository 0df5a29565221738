"""Hints: the shortest texts that complete the regular expressions and formats of a grammar, from each part on.

Within free text a grammar does not show what would end it: in `^.+, [A-Z]{2}$` any character may follow for ever.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

if sys.version_info >= (3, 11):
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as sre
    import sre_parse as parser

_REGEXES = re.compile(r'"pattern": "((?:[^"\\]|\\.)+)"|: /((?:[^/\\]|\\.)+)/')
_FORMATS = re.compile(r'"format": "([a-z-]+)"')
_OF_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@a.aa",
    "hostname": "a.aa",
    "ipv4": "1.1.1.1",
    "ipv6": "::1",
    "uri": "https://a.aa/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
"""Short examples that other libraries accept, too: years start at 1, and addresses need a scheme."""

_MOST_CHARS = 1000
"""Most characters of a regular expression that is read, and of a text made from it."""
_MOST_OF_ONE = 48
"""Most texts made from one regular expression."""
_MOST_ROUNDS = 8
"""Most rounds of a repetition from which hints are made."""
_CHARACTERS = "0aA" + "".join(map(chr, range(32, 127))) + "\n\té"
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    sre.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    sre.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class Hint(NamedTuple):
    """A text that may complete a part of a grammar.

    Attributes:
        text: the text.
        quoted: whether a quote follows it; otherwise it leads to another state of the grammar.
    """

    text: bytes
    quoted: bool


_Parts: TypeAlias = Sequence[tuple[Any, Any]]
"""Parts of a regular expression, parsed by `re`."""


def hints_of(grammar: str) -> list[Hint]:
    """Return the hints of a grammar.

    Args:
        grammar: a grammar in llguidance's Lark form, with JSON schemas in it.
    """
    found: dict[Hint, None] = {}
    for name in dict.fromkeys(_FORMATS.findall(grammar)):
        text = _OF_FORMATS.get(name, "")
        found.update((Hint(text[i:].encode(), quoted=True), None) for i in range(len(text)))
    for pattern, regex in dict.fromkeys(_REGEXES.findall(grammar)):
        for text in itertools.islice(_endings(_unquoted(pattern) if pattern else regex), _MOST_OF_ONE):
            written = json.dumps(text, ensure_ascii=False)[1:-1] if pattern else text
            found[Hint(written.encode(), quoted=bool(pattern))] = None
    return [hint for hint in found if hint.text]


def patterns_of(grammar: str) -> list[str]:
    """Return the patterns of the JSON schemas in a grammar, as JSON strings."""
    return [f'"{pattern}"' for pattern, _ in dict.fromkeys(_REGEXES.findall(grammar)) if pattern]


def _unquoted(pattern: str) -> str:
    try:
        return str(json.loads(f'"{pattern}"'))
    except ValueError:
        return ""  # no JSON string


def _endings(regex: str) -> Iterator[str]:
    """Yield the ends of a regular expression; none if `re` cannot read it."""
    if len(regex) > _MOST_CHARS:
        return
    try:
        yield from _suffixes(parser.parse(regex).data, "")
    except (re.error, ValueError, OverflowError, RecursionError, KeyError):
        return


def _suffixes(parts: _Parts, rest: str) -> Iterator[str]:
    """Yield the shortest texts from each part on, then from within it; a run of literals counts as one part."""
    for i, (kind, value) in enumerate(parts):
        if not (i and kind is sre.LITERAL and parts[i - 1][0] is sre.LITERAL):
            yield _bounded(_sample(parts[i:]) + rest)
        behind = _bounded(_sample(parts[i + 1 :]) + rest)
        if kind is sre.SUBPATTERN:
            yield from _suffixes(list(value[-1]), behind)
        elif kind is sre.BRANCH:
            for branch in value[1]:
                yield from _suffixes(list(branch), behind)
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, _, inner = value
            for left in range(min(max(low, 1), _MOST_ROUNDS)):
                yield from _suffixes(list(inner), _bounded(_sample(list(inner)) * left + behind))


def _sample(parts: _Parts) -> str:
    """Return the shortest text of parts of a regular expression."""
    return _bounded("".join(itertools.starmap(_sample_of, parts)))


def _sample_of(kind: Any, value: Any) -> str:
    if kind is sre.AT:
        return ""
    if kind is sre.SUBPATTERN:
        return _sample(list(value[-1]))
    if kind is sre.BRANCH:
        return min((_sample(list(branch)) for branch in value[1]), key=len)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, _, inner = value
        text = _sample(list(inner)) if low else ""
        if low * len(text) > _MOST_CHARS:
            raise ValueError("too long")
        return text * int(low)
    return next(char for char in _CHARACTERS if _is_of(char, kind, value)) if kind is not sre.LITERAL else chr(value)


def _is_of(char: str, kind: Any, value: Any) -> bool:
    """Return whether a part of a regular expression matches a character."""
    if kind is sre.IN:
        negated = value[0][0] is sre.NEGATE
        return negated != any(_is_of(char, *item) for item in value[negated:])
    if kind is sre.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    if kind is sre.CATEGORY:
        return _CATEGORIES[value](char)
    if kind in (sre.LITERAL, sre.NOT_LITERAL):
        return (ord(char) == value) is (kind is sre.LITERAL)
    if kind is sre.ANY:
        return char != "\n"
    raise ValueError(f"{kind} stands for no character")


def _bounded(text: str) -> str:
    if len(text) > _MOST_CHARS:
        raise ValueError("too long")
    return text
