"""What an installed wheel does with nothing but itself and what it depends on.

Run `python -I tests/repo/smoke.py [--bare]` outside of the checkout. Packages of extras are hidden where they are
installed; with `--bare` they must not be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXTRAS = ("fastapi", "langserve", "llguidance", "matplotlib", "prometheus_client", "pytest", "starlette", "uvicorn")
"""What the extras bring, as far as the package imports it."""
NEED_EXTRAS = ("bench.plots", "chat.deep_agents", "cluster.", "serve.", "testing.conformance", "testing.calls")
"""The only modules that do not come without, or are deepagents' own: their names begin so."""
FILES = (
    "py.typed",
    "serve/page/index.html",
    "serve/page/page.js",
    "bench/data/prompts.jsonl",
)


def imports() -> None:
    """Every module comes, or needs an extra and is said to; files that are no code are there."""
    import langchain_card

    place = Path(langchain_card.__file__)
    assert place.is_relative_to(sys.prefix), f"{place} is not what was installed"
    for name in langchain_card.__all__:
        assert getattr(langchain_card, name) is not None
    failed = [
        module.name for module in pkgutil.walk_packages(langchain_card.__path__, "langchain_card.") if _lacks(module)
    ]
    assert failed, "extras are not hidden"
    missing = [name for name in FILES if not place.parent.joinpath(name).is_file()]
    assert not missing, missing


def _lacks(module: pkgutil.ModuleInfo) -> bool:
    """Whether it cannot be imported for want of an extra; other modules must come."""
    from langchain_card import CARDError

    try:
        importlib.import_module(module.name)
    except (ModuleNotFoundError, CARDError) as error:
        assert module.name.removeprefix("langchain_card.").startswith(NEED_EXTRAS), f"{module.name}: {error}"
        return True
    return False


def command_line() -> None:
    """The program says its version, which is the package's and the metadata's, and its commands."""
    import langchain_card

    program = Path(sys.executable).with_name("langchain-card")
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=120).stdout
    version = importlib.metadata.version("langchain-card")
    assert said == f"langchain-card {version}\n", said
    assert langchain_card.__version__ == version
    said = subprocess.run([program, "--help"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert all(f"    {command} " in said for command in ("chat", "serve", "models", "bench")), said


def pair() -> dict[str, Any]:
    """Fields of a chat model over a tiny random target, and a draft that is often right."""
    from transformers.utils import logging

    from langchain_card.testing.tiny import make_draft, make_target

    logging.disable_progress_bar()
    target = make_target("llama", Path("target"))
    return {"model": target, "draft_model": make_draft(target, Path("draft"), noise=0.02), "max_tokens": 24}


def answers(dtype: str) -> None:
    """Calls, streams and chains say what the target says alone, at the same precision."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    from langchain_card import CARDChatModel

    with CARDChatModel(**pair(), dtype=dtype) as model:
        message = model.invoke("Hi.")
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == 24
        assert message.response_metadata["card"]["acceptance_rate"] > 0
        assert message.content == model.invoke("Hi.", schedule="plain").content
        assert "".join(str(chunk.content) for chunk in model.stream("Hi.")) == message.content
        chain = ChatPromptTemplate.from_messages([("human", "{what}")]) | model | StrOutputParser()
        assert chain.invoke({"what": "Hi."}) == message.content


def exact_answers() -> None:
    """In float64."""
    answers("float64")


def compiled_answers() -> None:
    """In int8, as CPUs have it by default."""
    answers("auto")


def missing_extras() -> None:
    """Who needs an extra and has it not is told what installs its packages."""
    import langchain_card.serve
    import langchain_card.testing
    from langchain_card import CARDChatModel, CARDError

    fields = pair()
    serve = _complaint("serve", "--model", fields["model"], "--draft-model", "none")
    assert "pip install fastapi" in serve, serve
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi."}}
    Path("requests").write_text(json.dumps(line))
    batch = _complaint("batch", "requests", "answers", "--model", fields["model"], "--draft-model", "none")
    assert "pip install fastapi" in batch, batch
    plot = _complaint("bench", "--plot", "rows.png")
    assert "pip install matplotlib" in plot, plot
    app = _error(ModuleNotFoundError, lambda: langchain_card.serve.create_app)
    assert "pip install fastapi" in app, app
    suite = _error(ModuleNotFoundError, lambda: langchain_card.testing.DrafterConformance)
    assert "pip install pytest" in suite, suite
    with CARDChatModel(**fields, dtype="float64") as model:
        city = {"title": "City", "description": "A city.", "type": "object", "properties": {"name": {"type": "string"}}}
        structured = _error(CARDError, lambda: model.with_structured_output(city).invoke("Oslo?"))
    assert "pip install 'llguidance" in structured, structured


def _complaint(*args: str) -> str:
    """What a command says on standard error as it gives up."""
    from langchain_card.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(args) == 2, said.getvalue()
    return said.getvalue()


def _error(kind: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    """Everything, with what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true", help="no extra is installed")
    bare = parser.parse_args().bare
    for name in EXTRAS:
        if importlib.util.find_spec(name) is not None:
            assert not bare, f"{name} is installed"
            sys.modules[name] = None  # type: ignore[assignment]
    checks: list[Callable[[], None]] = [imports, command_line, exact_answers, compiled_answers, missing_extras]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.update(HF_HUB_OFFLINE="1", LANGCHAIN_CARD_HOME=folder)
        for check in checks:
            print(f"{check.__name__} ... ", end="", flush=True)
            began = time.monotonic()
            check()
            print(f"{time.monotonic() - began:.1f} s", flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
