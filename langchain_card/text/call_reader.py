"""`CallReader`: tells calls from text while an answer comes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from langchain_card.text.tool_form import BLANKS, FENCED, TAGGED

_MARKS = {form.opening.strip(): form.closing.strip() for form in (FENCED, TAGGED)}
"""What stands around a call; bare ones stand alone."""
_SPACE = re.compile(r"\s+")
_MAY_BEGIN = re.compile(rf"(?<![{BLANKS}])[{BLANKS}]*(?:[`<{{]|\Z)")
"""A call, or the end of what came so far; from the first of the blanks on, or it would be looked for behind each."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call, as it comes.

    Attributes:
        number: of the call in the answer, from 0.
        arguments: the next piece of their JSON.
        name, call_id: said with the first piece; "" after it.
    """

    number: int
    arguments: str
    name: str = ""
    call_id: str = ""


Part: TypeAlias = str | CallPart
"""Text, or a piece of a call."""


class CallReader:
    """Reads one answer.

    A call is `{"name": ..., "arguments": {...}}` with the name of a tool, between tags, in a fenced block, or bare at
    the start of the answer. White space before a call is left out, and what stands around the arguments.

    Args:
        names: of the tools.
        bare: whether a bare one is a call; where the answer may be a document it is that.
    """

    def __init__(self, names: Collection[str], *, bare: bool = True) -> None:
        name, marks = "|".join(map(re.escape, names)), "|".join(map(re.escape, _MARKS))
        s = f"[{BLANKS}]"
        document = rf'\{{{s}*"name"{s}*:{s}*"(?P<name>{name})"{s}*,{s}*"arguments"{s}*:{s}*(?=\{{)'
        self._marked = re.compile(rf"(?P<mark>{marks}){s}*{document}")
        self._bare = re.compile(rf"{s}*(?P<mark>){document}")
        self._heads = [f'{mark}{{"name":"{name}","arguments":{{' for name in names for mark in ("", *_MARKS)]
        self._kept = ""  # may become the start of a call
        self._at_start = bare
        self._number = -1
        self._arguments: _Document | None = None  # those that are being read
        self._around: list[str] = []  # what is to come behind them

    def push(self, text: str) -> list[Part]:
        """Takes a piece of the answer."""
        self._kept += text
        return [*self._parts()]

    @property
    def within_call(self) -> bool:
        """Whether the last call's arguments are not complete."""
        return self._arguments is not None

    def finish(self) -> list[Part]:
        """What was kept back, at the end of the answer."""
        rest, self._kept = self._kept, ""
        in_call = self._arguments is not None or self._around
        return [] if not rest or in_call or (self._number >= 0 and not rest.strip()) else [rest]

    def _parts(self) -> Iterator[Part]:
        while self._kept:
            if self._arguments is not None:
                yield CallPart(self._number, self._take_arguments(self._arguments))
            elif self._around:
                if not self._leave_out(self._around):
                    return
            elif found := self._find_call():
                if text := self._kept[: found.start()].rstrip(BLANKS):
                    yield text
                self._kept = self._kept[found.end() :]
                self._number, self._arguments, self._at_start = self._number + 1, _Document(), False
                self._around = ["}", *([_MARKS[found["mark"]]] if found["mark"] else [])]
                yield CallPart(self._number, "", found["name"], f"call_{secrets.token_hex(12)}")
            else:
                text, self._kept = self._until_call(self._kept)
                if text:
                    self._at_start = False
                    yield text
                return

    def _find_call(self) -> re.Match[str] | None:
        return (self._at_start and self._bare.match(self._kept)) or self._marked.search(self._kept)

    def _until_call(self, text: str) -> tuple[str, str]:
        """What is text for certain, and the rest, with which a call may begin."""
        for found in _MAY_BEGIN.finditer(text):
            if found[0].endswith("{") and not self._at_start:
                continue
            squeezed = _SPACE.sub("", text[found.start() :])
            if any(head.startswith(squeezed) for head in self._heads):
                return text[: found.start()], text[found.start() :]
        return text, ""

    def _take_arguments(self, document: _Document) -> str:
        end = document.read(self._kept)
        if document.complete:
            self._arguments = None
        taken, self._kept = self._kept[:end], self._kept[end:]
        return taken

    def _leave_out(self, around: list[str]) -> bool:
        """Takes what is expected behind the arguments away; False while it may still come."""
        rest = self._kept.lstrip()
        if rest.startswith(around[0]):
            self._kept = rest[len(around.pop(0)) :]
        elif around[0].startswith(rest):
            return False
        else:
            around.clear()
        return True


class _Document:
    """Where a JSON object ends."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int:
        """How much of the text belongs to it."""
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    self.complete = True
                    return place + 1
        return len(text)
