"""What README and docs/ say is so: their code runs as written, their commands, options, targets and links exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from langchain_card import cli
from tests.support.documents import PAGES, ROOT, RUN, Block, blocks_of, run_page

SILENT = ("", "text", "toml", "json", "yaml")
"""Languages of blocks that nobody runs."""
HISTORY = "docs/LOG.md"
"""Keeps commands of earlier days."""
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
PAGE_SECONDS = 280


BLOCKS = [block for page, text in TEXTS.items() for block in blocks_of(page, text)]
CODE = [block for block in BLOCKS if block.language in RUN]


def problems(block: Block) -> Iterator[str]:
    """Why a block would neither run nor say why not."""
    looks_like_code = re.search(
        r"^(\$ |>>> |from \w[\w.]* import |import \w+$|pip |curl |make |langchain-card |python )",
        block.text,
        re.MULTILINE,
    )
    if block.language not in (*RUN, *SILENT) or (block.language in ("", "text") and looks_like_code):
        yield f"its language is {block.language!r}: say python or console"
    if block.language == "console" and not block.commands:
        yield "holds no line that begins with '$ '"
    if block.elsewhere and not block.elsewhere.startswith(("not in CI, ", "by tests/")):
        yield f"{block.elsewhere!r} is no reason"
    if (named := re.match(r"by (tests/\w+\.py)", block.elsewhere)) and not (ROOT / named[1]).exists():
        yield f"{named[1]} does not exist"


def test_every_python_block_compiles() -> None:
    """Check the pages that run and those that do not, and CONTRIBUTING.md."""
    pages = {**TEXTS, "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")}
    blocks = [block for page, text in pages.items() for block in blocks_of(page, text) if block.language == "python"]
    assert len(blocks) == sum(text.count("```python\n") for text in pages.values()) > 40
    for block in blocks:
        compile(block.text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in CODE if not block.elsewhere))
@pytest.mark.slow
def test_its_code_runs(page: str, tmp_path: Path) -> None:
    due = [block for block in CODE if block.page == page and not block.elsewhere]
    if any("curl " in block.text for block in due) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = run_page(due, tmp_path, PAGE_SECONDS)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^== (\S+) ran in", done.stdout, re.MULTILINE) == [block.place for block in due]


@pytest.mark.parametrize("block", [block for block in CODE if block.elsewhere], ids=lambda block: block.place)
def test_what_does_not_run_here_says_why(block: Block) -> None:
    assert not [*problems(block)]
    pytest.skip(f"{block.place}: {block.elsewhere}")


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_forgotten(page: str) -> None:
    of_page = [block for block in BLOCKS if block.page == page]
    assert len(of_page) == len(re.findall(r"^ *```", TEXTS[page], re.MULTILINE)) / 2, "a fence is not closed"
    assert not {block.place: [*problems(block)] for block in of_page if [*problems(block)]}


def spans(page: str) -> list[str]:
    """What stands in backticks or in a fenced block, a line each; lines that go on are one."""
    fences = [block.text.replace("\\\n", " ") for block in BLOCKS if block.page == page]
    prose = re.sub(r"^ *```.*?^ *```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [*inline, *(line for text in fences for line in text.splitlines())]


def parsers() -> Mapping[str, argparse.ArgumentParser]:
    subparsers = argparse.ArgumentParser(prog="langchain-card").add_subparsers()
    for name in cli.COMMANDS:
        importlib.import_module(f"{cli.__name__}.{name}").register(subparsers)
    found: dict[str, argparse.ArgumentParser] = {**subparsers.choices}
    return found


PARSERS = parsers()
OPTIONS = {option for parser in PARSERS.values() for option in parser._option_string_actions}
SCRIPTS = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_commands_and_options_exist(page: str) -> None:
    wrong = []
    for span in spans(page):
        for command, rest in re.findall(r"(?:^|[ /])langchain-card (?!COMMAND)([a-z][\w-]*)((?: [^|;&#]+)?)", span):
            if command not in PARSERS:
                wrong.append(f"langchain-card {command}")
                continue
            known = PARSERS[command]._option_string_actions
            wrong += [f"{command} {name}" for name in re.findall(r"(?<=\s)--[a-z-]+", rest) if name not in known]
        if alone := re.match(r"(--[a-z][a-z-]+)", span):
            wrong += [alone[1]] * (alone[1] not in OPTIONS and f'"{alone[1]}"' not in SCRIPTS)
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for span in spans(page) for name in re.findall(r"^\$? ?make ([a-z-]+)", span)} <= targets


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY])
def test_files_that_are_named_exist(page: str) -> None:
    """Of the repository: scripts of benchmarks/, notebooks, tests, modules."""
    named = {
        name for span in spans(page) for name in re.findall(r"(?:^|(?<= ))(\w[\w./]*/\w+\.(?:py|ipynb|md))\b", span)
    }
    assert not {name for name in named if not any((at / name).exists() for at in (ROOT, ROOT / "langchain_card"))}


def headings(text: str) -> set[str]:
    """Anchors of a page, as GitHub makes them and as the site does where it needs others."""
    lines = re.findall(
        r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    prose = re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(\s*([^)\s]+)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in headings(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """What is not in the navigation, links and anchors that lead nowhere, and tables without words end it.

    With `--quiet` warnings would not be counted.
    """
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    reference = tmp_path / "reference"
    assert "generated:" not in "".join(page.read_text() for page in reference.rglob("index.html"))
    for name in cli.COMMANDS:
        assert f"langchain-card {name}" in (reference / "cli/index.html").read_text()
