"""Other people's loops, each in a process of its own: two pools of CPU threads in one would slow both sides down.

They get the very weights that this engine runs, in the same number format, in layers of transformers; only
`hf-float32` has them as they were published. What a process says and hears is JSON, a line each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_card.bench.machine import words_of
from langchain_card.bench.runs import Run
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.runtime.loader import resolve


@dataclass(frozen=True)
class Kind:
    """What one of them can do.

    Attributes:
        drafts: whether it needs a draft model.
        batches: whether it takes several prompts at once.
        package: that it needs beside transformers.
    """

    drafts: bool = False
    batches: bool = False
    package: str = ""

    def check(self, name: str, config: EngineConfig, batch: int) -> None:
        """Raises `InvalidInputError` where it cannot do what is asked."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise InvalidInputError("--methods", name, "is not installed", f"pip install {self.package}")
        if self.drafts and not config.has_draft:
            raise InvalidInputError("--methods", name, "needs a draft model", "name a --draft-model, or leave it out")
        if batch > 1 and not self.batches:
            limit = f"takes one prompt at a time, not --batch {batch}"
            raise InvalidInputError("--methods", name, limit, "leave it out, or --batch 1")


PEERS: dict[str, Kind] = {
    "hf-float32": Kind(batches=True),
    "hf-generate": Kind(batches=True),
    "hf-assisted": Kind(drafts=True),
    "hf-prompt-lookup": Kind(),
    "flashspec": Kind(drafts=True, package="flashspec"),
}
"""transformers' `generate` in float32; the same on this engine's weights, with its draft, with prompt lookup; and
FlashSpec (the package flashspec), with its own choice of strategy."""


_FIELDS = ("model", "draft_model", "device", "draft_device", "dtype", "quantization", "max_model_len")


class Peer:
    """A `Method` that runs elsewhere.

    Args:
        name: one of `PEERS`.
        config: which weights.
        max_tokens, temperature: of answers.

    Raises:
        InvalidInputError: it cannot run this pair.
        EngineError: it could not start, or died.
    """

    def __init__(self, name: str, config: EngineConfig, max_tokens: int, temperature: float) -> None:
        pair = resolve(config)
        if PEERS[name].drafts and pair.vocabulary is not None:
            limit = f"is measured with drafts of the target's own vocabulary, not {config.draft_model}"
            raise InvalidInputError("--methods", name, limit, "leave it out")
        self.name = name
        self.weights = "float32" if name == "hf-float32" else words_of(pair.target)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        command = [sys.executable, "-W", "ignore", "-m", "langchain_card.bench.peer_process"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)  # noqa: S603
        fields = {name: getattr(config, name) for name in _FIELDS}
        try:
            self._ask({"name": name, "config": fields, "max_tokens": max_tokens, "temperature": temperature})
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], repeat: int) -> Run:
        """It remembers nothing from answer to answer."""
        said = self._ask({"prompts": [list(prompt) for prompt in prompts]})
        return Run(**said | {"token_ids": tuple(map(tuple, said["token_ids"]))})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = ["it said nothing", *filter(None, map(str.strip, self._errors))][-1]
            raise EngineError(self.name, f"exit code {self._process.returncode}", f"its process ended ({last})")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise EngineError(self.name, "failed", said["error"])
        return said

    def close(self) -> None:
        """Ends its process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
