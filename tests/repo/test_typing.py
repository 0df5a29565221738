"""Users' code under `mypy --strict`: what is right passes, what is wrong is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import langchain_card
from tests.support import ROOT

FILES = Path(__file__).parent / "users"


def mypy(file: Path) -> str:
    """What mypy says, its own summary left out. The cache makes a second run quick."""
    options = [f"--config-file={FILES / 'mypy.ini'}", "--no-error-summary"]
    cache = ROOT / ".mypy_cache" / "users"
    # The package under test, wherever it is installed.
    environment = {**os.environ, "MYPYPATH": str(Path(langchain_card.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", str(file)],
        cwd=FILES, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not run.stderr and run.returncode in (0, 1), run.stderr + run.stdout
    return run.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(langchain_card).joinpath("py.typed").is_file()


@pytest.mark.slow
def test_users_code_passes() -> None:
    assert not mypy(FILES / "user_code.py")


def test_users_mistakes_are_found() -> None:
    lines = (FILES / "wrong_code.py").read_text().splitlines()
    planted = {(number, line.split("  # ")[1]) for number, line in enumerate(lines, start=1) if "  # " in line}
    found = re.findall(r"wrong_code\.py:(\d+): error: .*\[([a-z-]+)\]", mypy(FILES / "wrong_code.py"))
    assert {(int(number), code) for number, code in found} == planted
