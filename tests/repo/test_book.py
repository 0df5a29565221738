"""The table of contents in `core/__init__.py`: every file is there, and all of the core is listed."""

from __future__ import annotations

import re

import langchain_card.core
from tests.support import ROOT

PACKAGE = ROOT / "langchain_card"


def test_the_book_lists_files_that_exist_and_the_whole_core() -> None:
    listed = re.findall(r"\b(?:core/|engine/|drafters/)?\w+\.py", langchain_card.core.__doc__ or "")
    assert not [name for name in listed if not (PACKAGE / name).is_file()]
    core = {f"core/{file.name}" for file in (PACKAGE / "core").glob("*.py") if file.name != "__init__.py"}
    assert core <= set(listed)
    lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in set(listed))
    assert 6_000 <= lines <= 7_000, f"the book has {lines} lines, and says that it has about 6,500"
