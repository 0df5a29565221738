"""`CallReader`: separates calls from text while an answer is generated."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from langchain_card.text.tool_form import BLANKS, FENCED, TAGGED

_MARKS = {form.opening.strip(): form.closing.strip() for form in (FENCED, TAGGED)}
"""Closing mark of each opening mark of a call; a bare call has none."""
_SPACE = re.compile(r"\s+")
_MAY_BEGIN = re.compile(rf"(?<![{BLANKS}])[{BLANKS}]*(?:[`<{{]|\Z)")
"""The start of a call or the end of the text, with all blanks before it: a search from each blank would be slow."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call.

    Attributes:
        number: index of the call in the answer, from 0.
        arguments: the next piece of the arguments' JSON.
        name: name of the tool in the first piece, "" in later ones.
        call_id: id of the call in the first piece, "" in later ones.
    """

    number: int
    arguments: str
    name: str = ""
    call_id: str = ""


Part: TypeAlias = str | CallPart
"""A piece of text or of a call."""


class CallReader:
    """A reader of one answer.

    A call is `{"name": ..., "arguments": {...}}` with the name of a tool, between tags, in a fenced block, or bare at
    the start of the answer. White space before a call and the text around its arguments are left out.

    Args:
        names: names of the tools.
        bare: whether bare JSON is a call; if the answer may be a document, it is the document.
    """

    def __init__(self, names: Collection[str], *, bare: bool = True) -> None:
        name, marks = "|".join(map(re.escape, names)), "|".join(map(re.escape, _MARKS))
        s = f"[{BLANKS}]"
        head = rf'\{{{s}*"name"{s}*:{s}*"(?P<name>{name})"{s}*,{s}*"arguments"{s}*:{s}*(?=\{{)'
        self._marked = re.compile(rf"(?P<mark>{marks}){s}*{head}")
        self._bare = re.compile(rf"{s}*(?P<mark>){head}")
        self._heads = [f'{mark}{{"name":"{name}","arguments":{{' for name in names for mark in ("", *_MARKS)]
        self._pending = ""  # may become the start of a call
        self._at_start = bare
        self._number = -1
        self._arguments: _JsonObject | None = None  # of the call that is being read
        self._closings: list[str] = []  # expected after the arguments

    def push(self, text: str) -> list[Part]:
        """Add a piece of the answer; return the parts that are certain now."""
        self._pending += text
        return [*self._parts()]

    @property
    def within_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._arguments is not None

    def finish(self) -> list[Part]:
        """Return the text that was held back until the end of the answer."""
        rest, self._pending = self._pending, ""
        in_call = self._arguments is not None or self._closings
        return [] if not rest or in_call or (self._number >= 0 and not rest.strip()) else [rest]

    def _parts(self) -> Iterator[Part]:
        while self._pending:
            if self._arguments is not None:
                yield CallPart(self._number, self._take_arguments(self._arguments))
            elif self._closings:
                if not self._skip_closing(self._closings):
                    return
            elif call := self._find_call():
                if text := self._pending[: call.start()].rstrip(BLANKS):
                    yield text
                self._pending = self._pending[call.end() :]
                self._number, self._arguments, self._at_start = self._number + 1, _JsonObject(), False
                self._closings = ["}", *([_MARKS[call["mark"]]] if call["mark"] else [])]
                yield CallPart(self._number, "", call["name"], f"call_{secrets.token_hex(12)}")
            else:
                text, self._pending = self._until_call(self._pending)
                if text:
                    self._at_start = False
                    yield text
                return

    def _find_call(self) -> re.Match[str] | None:
        return (self._at_start and self._bare.match(self._pending)) or self._marked.search(self._pending)

    def _until_call(self, text: str) -> tuple[str, str]:
        """Split off the end that may become the start of a call."""
        for start in _MAY_BEGIN.finditer(text):
            if start[0].endswith("{") and not self._at_start:
                continue
            squeezed = _SPACE.sub("", text[start.start() :])
            if any(head.startswith(squeezed) for head in self._heads):
                return text[: start.start()], text[start.start() :]
        return text, ""

    def _take_arguments(self, arguments: _JsonObject) -> str:
        end = arguments.read(self._pending)
        if arguments.complete:
            self._arguments = None
        taken, self._pending = self._pending[:end], self._pending[end:]
        return taken

    def _skip_closing(self, closings: list[str]) -> bool:
        """Remove the next closing from the pending text; return False if more text is needed to decide."""
        rest = self._pending.lstrip()
        if rest.startswith(closings[0]):
            self._pending = rest[len(closings.pop(0)) :]
        elif closings[0].startswith(rest):
            return False
        else:
            closings.clear()
        return True


class _JsonObject:
    """A scanner for the end of a JSON object."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int:
        """Return the number of characters of the text that belong to the object."""
        for position, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    self.complete = True
                    return position + 1
        return len(text)
