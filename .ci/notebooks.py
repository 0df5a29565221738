"""Executes the cookbook, or the notebooks of it that are named: sources become notebooks with stored outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

for source in sorted((Path(__file__).parent.parent / "cookbook").glob("*.py")):
    if sys.argv[1:] and source.stem not in sys.argv[1:]:
        continue
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{source.stem}-{number}"
    NotebookClient(notebook, timeout=1800, coalesce_streams=True, record_timing=False).execute()
    nbformat.write(notebook, source.with_suffix(".ipynb"))
