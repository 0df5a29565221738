"""Docstrings in the package begin with a verb or a noun phrase that stands alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support import ROOT

FIRST_WORDS = re.compile(r"(Of|As|By|Likewise|It is|The same)\b")


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each bare string: of a module, class or function, or under a constant."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_stand_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.partition(chr(10))[0]}"
        for path in sorted((ROOT / "langchain_card").rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if FIRST_WORDS.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_kind_of_docstring_is_read() -> None:
    code = '"""Of a module."""\nX = 1\n"""Of X."""\nclass A:\n    """Of A."""\n    def f():\n        """Of f."""\n'
    assert [text for _, text in docstrings(code)] == ["Of a module.", "Of X.", "Of A.", "Of f."]
