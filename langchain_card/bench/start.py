"""Time and memory of a start in a process of its own: `python -m langchain_card.bench.start FIELDS`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError

_FIELDS = ("model", "draft_model", "device", "draft_device", "dtype", "kv_dtype", "quantization", "max_model_len")
_PROMPT = "Write a Python function that adds two numbers."


@dataclass(frozen=True, slots=True)
class Start:
    """A start.

    Attributes:
        imports: seconds from the start of the process until this package is imported.
        load: seconds until an engine is open, after that.
        first: seconds until the first token of a short prompt, after that.
        peak: most bytes that the process held.
    """

    imports: float
    load: float
    first: float
    peak: int


def measure_start(config: EngineConfig) -> Start:
    """Start an engine in a new process and write one token.

    Raises:
        EngineError: the process failed.
    """
    fields = json.dumps({name: getattr(config, name) for name in _FIELDS})
    command = [sys.executable, "-W", "ignore", "-m", "langchain_card.bench.start", fields]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        last = ["it printed nothing", *filter(None, map(str.strip, done.stderr.splitlines()))][-1]
        raise EngineError("start", f"exit code {done.returncode}", f"a new process ended ({last})")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure this process, and print a `Start`."""
    import psutil

    begun = psutil.Process().create_time()
    from langchain_card.bench.method import PeakMemory
    from langchain_card.bench.prompts import user_prompt
    from langchain_card.core.request import SamplingParams
    from langchain_card.engine.engine import Engine

    fields: dict[str, Any] = json.loads(sys.argv[1])
    imported = time.time()
    with Engine(EngineConfig(**fields)) as engine:
        opened = time.time()
        engine.submit(user_prompt(engine, _PROMPT), SamplingParams(max_tokens=1)).result()
        written = time.time()
        peak = PeakMemory(cuda="cuda" in str(engine.devices)).read()
    times = {"imports": imported - begun, "load": opened - imported, "first": written - opened}
    sys.stdout.write(json.dumps({**times, "peak": peak}) + "\n")


if __name__ == "__main__":
    main()
