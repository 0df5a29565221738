"""What texts may end with: the shortest that regular expressions and formats of a grammar ask for, from every part on.

Within a text a grammar does not tell what it waits for: behind `^.+, [A-Z]{2}$` any character may come for ever.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
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
"""What other libraries take, too: there is no year 0, and no address without a scheme."""

_MOST_CHARS = 1000
"""Of a regular expression that is read, and of a text made of it."""
_MOST_OF_ONE = 48
"""Texts of one regular expression."""
_MOST_ROUNDS = 8
"""Of a repetition, within which a text may stand."""
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
    """What may be waited for.

    Attributes:
        text: to be said.
        quoted: whether a quote follows; else it leads to something else than what may come before it.
    """

    text: bytes
    quoted: bool


_Parts: TypeAlias = Sequence[tuple[Any, Any]]
"""Of a regular expression, as `re` parses it."""


def hints_of(grammar: str) -> list[Hint]:
    """What the texts of a grammar may end with.

    Args:
        grammar: in llguidance's Lark, JSON schemas in it.
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
    """Patterns of the JSON schemas in a grammar, as JSON writes them."""
    return [f'"{pattern}"' for pattern, _ in dict.fromkeys(_REGEXES.findall(grammar)) if pattern]


def _unquoted(pattern: str) -> str:
    try:
        return str(json.loads(f'"{pattern}"'))
    except ValueError:
        return ""  # it only looked like one


def _endings(regex: str) -> Iterator[str]:
    """Nothing of what `re` reads otherwise than llguidance."""
    if len(regex) > _MOST_CHARS:
        return
    try:
        yield from _suffixes(parser.parse(regex).data, "")
    except (re.error, ValueError, OverflowError, RecursionError, KeyError):
        return


def _suffixes(parts: _Parts, rest: str) -> Iterator[str]:
    """The shortest texts from each part on, then from within it; of literals in a row from the first on."""
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
    """The shortest text."""
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
    """Whether a character is one that a part of a regular expression stands for."""
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
