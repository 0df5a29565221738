"""Every notebook in the cookbook runs in a fresh kernel, and is what its source says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from tests.support import ROOT, SMALL

SOURCES = sorted((ROOT / "cookbook").glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_its_source_executed(source: Path) -> None:
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == expected
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_says_what_it_brings_and_takes(source: Path) -> None:
    introduction = " ".join(jupytext.read(source).cells[0].source.split())
    assert "At the end of this page" in introduction
    assert re.search(r"It takes (about )?(a|two|three|four|five) minutes?", introduction)


def test_every_code_cell_is_python() -> None:
    """Check what is stored in the notebooks, with IPython's magics and shell lines made Python."""
    to_python = TransformerManager().transform_cell
    notebooks = sorted((ROOT / "cookbook").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == [path.stem for path in SOURCES]
    for path in notebooks:
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
                compile(to_python(cell.source), f"{path.name}, cell {number}", "exec", flags, dont_inherit=True)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_notebook_runs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if source.stem == "deep_agent":
        pytest.importorskip("deepagents", reason="`make test-oldest` has it")
    monkeypatch.setenv("LANGCHAIN_CARD_MODEL", SMALL)
    monkeypatch.setenv("LANGCHAIN_CARD_DRAFT_MODEL", "ngram")
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    warned = [line for output in shown if output.get("name") == "stderr" for line in output.text.splitlines()]
    assert not [line for line in warned if "ended an answer early" not in line], "no warnings but the one that is shown"
    assert not [output.text for output in shown if "same text: False" in output.get("text", "")]
