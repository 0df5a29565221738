"""How the code is divided: sizes of files and folders, names of classes, imports between tests."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict

from tests.support import ROOT

PACKAGE = ROOT / "langchain_card"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TESTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
MAX_LINES = 400
MAX_FILES = 18
MAX_TOP_FILES, MAX_TOP_FOLDERS = 8, 17


def test_files_are_short() -> None:
    lengths = {path: text.count("\n") for path, text in {**SOURCES, **TESTS}.items()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_folders_hold_few_files() -> None:
    sizes = Counter(path.rpartition("/")[0] for path in SOURCES)
    assert not {folder: size for folder, size in sizes.items() if size > MAX_FILES}
    folders = {path.split("/")[1] for path in SOURCES if path.count("/") > 1}
    assert sizes[PACKAGE.name] <= MAX_TOP_FILES and len(folders) <= MAX_TOP_FOLDERS


def test_a_public_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for path, text in SOURCES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_test_module_imports_another() -> None:
    """What tests share is in tests/support and tests/simulation."""
    imported = re.compile(r"^ *(?:from|import) .*\btest_\w+", re.MULTILINE)
    assert not {path: names for path, text in TESTS.items() if (names := imported.findall(text))}
