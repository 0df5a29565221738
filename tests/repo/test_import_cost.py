"""What it costs to import the package: next to nothing, until a model is loaded."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

CORE = "import langchain_core.language_models"
MODELS = "from langchain_core.language_models import BaseChatModel"
PACKAGE = "import langchain_card"
CLASS = "from langchain_card import CARDChatModel"
MODEL = f"{CLASS}; CARDChatModel()"
COMMAND = (
    "import contextlib\nfrom langchain_card.cli import main\nwith contextlib.suppress(SystemExit): main(['--help'])"
)
HEAVY = ("torch", "transformers", "numba", "llvmlite", "accelerate", "gguf", "ray")


def fresh(code: str) -> tuple[float, str]:
    """Seconds that a process of its own takes for some code, and the heavy modules that it has then."""
    ask = f"import sys\nprint(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{code}\n{ask}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return time.perf_counter() - began, done.stderr.strip()


def extra_seconds(code: str, base: str, rounds: int = 5) -> float:
    """What code costs more than a base: the quickest of several runs each, alternating, as others use the machine."""
    runs = [(fresh(base)[0], fresh(code)[0]) for _ in range(rounds)]
    return min(own for _, own in runs) - min(others for others, _ in runs)


@pytest.mark.parametrize("code", [PACKAGE, CLASS, MODEL, COMMAND])
def test_nothing_heavy_is_imported(code: str) -> None:
    assert not fresh(code)[1]


def test_what_is_heavy_is_seen() -> None:
    assert "numba" in fresh("import langchain_card.runtime.cpu.compiled")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "base", "limit"), [(PACKAGE, CORE, 0.5), (CLASS, MODELS, 1.0)])
def test_imports_are_quick(code: str, base: str, limit: float, say: Callable[[str], None]) -> None:
    fresh(code)  # compiles what is not compiled yet
    extra = extra_seconds(f"{base}\n{code}", base)
    say(f"{code!r} after {base!r}: {extra:+.2f} s")
    assert extra < limit
