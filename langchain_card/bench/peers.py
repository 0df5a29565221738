"""Decoding loops of other packages, each in its own process: two pools of CPU threads in one would slow both down.

Peers run the weights of this engine in the same number format, in transformers' layers, and drafts with the whole head.
Only `hf-float32`, `llama-cpp` and `openvino` run the published weights. Requests and responses are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from langchain_card.bench.machine import number_format
from langchain_card.bench.method import Run
from langchain_card.bench.method_table import PEERS
from langchain_card.bench.peer_process import gguf_file
from langchain_card.config import EngineConfig
from langchain_card.errors import DeviceError, EngineError, InvalidInputError
from langchain_card.models.budget import free_bytes, weight_bytes
from langchain_card.models.gguf import form_of, open_gguf
from langchain_card.models.loader import resolve

SECONDS = 1800.0
"""Time limit of loading and of each run."""

_FIELDS = ("model", "draft_model", "device", "draft_device", "dtype", "quantization", "max_model_len")


class Peer:
    """A `Method` that runs another package's loop in a process.

    Args:
        name: one of `PEERS`.
        config: names the weights.
        temperature: of all answers.
        ignore_end: True continues answers after the end of text.

    Raises:
        InvalidInputError: the package cannot run this pair.
        DeviceError: there is not enough memory for another copy of the weights.
        EngineError: the process did not start, or died.
    """

    def __init__(self, name: str, config: EngineConfig, temperature: float = 0.0, *, ignore_end: bool = False) -> None:
        self.name, (self.weights, needed) = name, _weights(name, config)
        _check_room(name, needed, resolve(config).target.device)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        command = [sys.executable, "-W", "ignore", "-m", "langchain_card.bench.peer_process"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)  # noqa: S603
        fields = {name: getattr(config, name) for name in _FIELDS}
        try:
            self._request({"name": name, "config": fields, "temperature": temperature, "ignore_end": ignore_end})
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        """Answer a batch of prompts. Nothing is reused between answers."""
        response = self._request({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        return Run(**response | {"token_ids": tuple(map(tuple, response["token_ids"]))})

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        deadline = threading.Timer(SECONDS, self._process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            line = self._process.stdout.readline()
            late = deadline.finished.is_set()
        finally:
            deadline.cancel()
        if late:
            raise EngineError(self.name, "no answer", f"it was ended after {SECONDS:.0f} s", "ask for fewer tokens")
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = ["it printed nothing", *filter(None, map(str.strip, self._errors))][-1]
            raise EngineError(self.name, f"exit code {self._process.returncode}", f"its process ended ({last})")
        response: dict[str, Any] = json.loads(line)
        if "error" in response:
            raise EngineError(self.name, "failed", response["error"])
        return response

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _weights(name: str, config: EngineConfig) -> tuple[str, int]:
    """Return a peer's number formats, in words, and the bytes of its weights."""
    kind = PEERS[name]
    if kind.weights == "gguf":
        file = gguf_file(name, config.model)
        return f"{form_of(open_gguf(file))} of the file", file.stat().st_size
    pair = resolve(replace(config, quantization=None, dtype="float32") if kind.weights == "float32" else config)
    if kind.drafts and pair.vocabulary is not None:
        limit = f"is measured with drafts of the target's own vocabulary, not {config.draft_model}"
        raise InvalidInputError("--methods", name, limit, "leave it out")
    words, needed = number_format(pair.target), weight_bytes(pair.target)
    if kind.drafts and pair.draft is not None:
        words, needed = f"{words}, draft {number_format(pair.draft)}", needed + weight_bytes(pair.draft)
    return words, needed


def _check_room(name: str, weights: int, device: torch.device) -> None:
    needed, free = PEERS[name].room * weights, free_bytes(device)
    if needed > free:
        limit = f"needs {needed / 2**30:.1f} GiB for weights of its own, {free / 2**30:.1f} GiB are free"
        raise DeviceError("--methods", name, limit, "compare fewer at once")
