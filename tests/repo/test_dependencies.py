"""What pyproject.toml says that the package needs: what is imported, nothing else; and the page that tells people."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "langchain_card"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MODULES_OF_EXTRAS = {
    "bench": ("bench/plots.py",),
    "langserve": ("serve/langserve/",),
    "openvino": ("bench/peers/process.py",),
    "ray": ("cluster/",),
    "server": ("serve/", "cli/serve.py", "cli/batch.py"),
    "structured": ("constraints/",),
    "testing": ("testing/conformance.py", "testing/calls.py"),
}
"""Where an extra's packages may be imported, by how paths begin."""
OTHERS = {
    "bench/peers/process.py": {"flashspec"},
    "chat/deep_agents.py": {"deepagents", "langchain", "langgraph"},
}
"""Packages of no extra: a method of `bench` is refused without its own; only deepagents imports the other module."""


def normal(name: str) -> str:
    """A distribution's name as its module is called: all that are needed here are called alike."""
    return name.lower().replace("-", "_")


def required(requirements: list[str]) -> set[str]:
    """Modules of a list of requirements; extras of our own count for what they bring."""
    found = set()
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?[^\[]*", requirement)
        assert match, requirement
        name, extras = match.groups()
        if name == PROJECT["name"]:
            found |= set().union(*(required(EXTRAS[extra]) for extra in extras.split(",")))
        else:
            found.add(normal(name))
    return found


def imported(code: str) -> set[str]:
    """Packages that a module imports anywhere, those of Python and this one left out."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"langchain_card"}


def modules() -> Iterator[tuple[str, set[str]]]:
    """Path below the package, and what is imported there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), imported(path.read_text())


def allowed(path: str) -> set[str]:
    """What a module may import."""
    extras = [extra for extra, places in MODULES_OF_EXTRAS.items() if path.startswith(places)]
    return required(PROJECT["dependencies"]).union(OTHERS.get(path, ()), *(required(EXTRAS[extra]) for extra in extras))


def test_what_is_imported_is_declared() -> None:
    undeclared = {path: sorted(names - allowed(path)) for path, names in modules() if names - allowed(path)}
    assert not undeclared


@pytest.mark.parametrize("extra", ["", *MODULES_OF_EXTRAS])
def test_what_is_declared_is_imported(extra: str) -> None:
    places = MODULES_OF_EXTRAS[extra] if extra else ("",)
    used = set().union(*(names for path, names in modules() if path.startswith(places)))
    requirements = EXTRAS[extra] if extra else PROJECT["dependencies"]
    declared = required([line for line in requirements if not line.startswith(f"{PROJECT['name']}[")])
    assert not declared - used


def test_lazy_and_dotted_imports_are_seen() -> None:
    code = (
        "def f():\n  import torch.nn as nn, json\n  from rich.text import Text\nfrom . import x\nimport langchain_card"
    )
    assert imported(code) == {"torch", "rich"}


def test_all_extras_but_those_of_developers_are_known_here() -> None:
    assert set(EXTRAS) - {"dev", "docs"} == set(MODULES_OF_EXTRAS)


def test_the_page_on_installing_names_every_extra() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(EXTRAS)


def test_the_page_on_installing_names_the_python_that_is_needed() -> None:
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {lowest}" in (ROOT / "docs" / "install.md").read_text()
