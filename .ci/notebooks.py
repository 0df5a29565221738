"""Executes the cookbook: every source becomes a notebook with stored outputs."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

for source in sorted((Path(__file__).parent.parent / "cookbook").glob("*.py")):
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{source.stem}-{number}"
    NotebookClient(notebook, timeout=1800, coalesce_streams=True, record_timing=False).execute()
    nbformat.write(notebook, source.with_suffix(".ipynb"))
