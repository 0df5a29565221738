"""The scripts of benchmarks/: each can be imported and says how it is called; the one for GPUs runs on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())


def run(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_is_imported_and_says_how_it_is_called() -> None:
    """In one process: torch and transformers are imported once. 8 seconds."""
    code = "import importlib, sys; [print(importlib.import_module(f'benchmarks.{n}').__doc__) for n in sys.argv[1:]]"
    said = run("-c", code, *(script.stem for script in SCRIPTS))
    calls = [(f"python benchmarks/{script.name}", f"python -m benchmarks.{script.stem}") for script in SCRIPTS]
    assert all(any(call in said for call in either) for either in calls), said


@pytest.mark.slow
def test_the_script_for_gpus_runs_on_tiny_models(tmp_path: Path) -> None:
    run(ROOT / "benchmarks" / "gpu.py", "--tiny", "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "failed" not in figures
    assert figures["7B strict: tokens equal to its own plain decoding"] == "200 of 200"
