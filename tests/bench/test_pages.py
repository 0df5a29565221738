"""Parts of pages that targets of the Makefile write: they say what the files of figures say."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import bench_page, race_page
from benchmarks.contest import tables
from benchmarks.pages import DOCS, ROOT, marks, replace_part


def test_only_the_part_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page, (begin, end) = tmp_path / "page.md", marks("race")
    page.write_text(f"before\n{begin}\nEARLIER\n{end}\nafter\n")
    for _ in range(2):
        replace_part(page, "race", "NOW")
    assert page.read_text() == f"before\n{begin}\n\nNOW\n\n{end}\nafter\n"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (bench_page, ("long-texts",)),
        (bench_page, ("load",)),
        (race_page, (DOCS / "race.json",)),
        (tables, ()),
    ],
    ids=["long-texts", "load", "race", "contest"],
)
def test_the_pages_say_what_was_measured(
    module: ModuleType, arguments: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for file in (*DOCS.glob("*.json"), DOCS / "performance.md"):
        shutil.copy(file, docs)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(module, "DOCS", docs)
    if module is race_page:
        monkeypatch.setattr(module, "ROOT", tmp_path)
    module.main(*arguments)
    for page in ("README.md", "docs/performance.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()
