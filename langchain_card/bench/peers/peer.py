"""A peer in a Python process of its own, and the opening of any peer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_card.bench.machine import version
from langchain_card.bench.method import Run, Served
from langchain_card.bench.method_table import PEER_OPTIONS, PEERS, PeerOptions, find_program
from langchain_card.bench.peers.llama_server import LlamaServer, server_version
from langchain_card.bench.peers.weights import check_room, peer_weights
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError

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
        options: of the method; None for those of `PEER_OPTIONS`.

    Raises:
        InvalidInputError: the package cannot run this pair.
        DeviceError: there is not enough memory for another copy of the weights.
        EngineError: the process did not start, or died.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        temperature: float = 0.0,
        *,
        ignore_end: bool = False,
        options: PeerOptions | None = None,
    ) -> None:
        self.name, (self.weights, needed) = name, peer_weights(name, config)
        check_room(name, needed, config)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        command = [sys.executable, "-W", "ignore", "-m", "langchain_card.bench.peers.process"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)  # noqa: S603
        setup: dict[str, Any] = {"name": name, "config": {name: getattr(config, name) for name in _FIELDS}}
        setup |= {"temperature": temperature, "ignore_end": ignore_end}
        setup |= {"options": dict(PEER_OPTIONS.get(name, {}) if options is None else options)}
        try:
            self._request(setup)
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        """Answer a batch of prompts. Nothing is reused between answers."""
        response = self._request({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        return Run(**response | {"token_ids": tuple(map(tuple, response["token_ids"]))})

    def serve(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], requests: int, tenant: str
    ) -> list[Served]:
        """Answer prompts, so many at once. Nothing is reused between answers."""
        message = {"prompts": [*map(list, prompts)], "max_tokens": [*max_tokens], "requests": requests}
        answers = self._request(message)["answers"]
        return [Served(**answer | {"token_ids": tuple(answer["token_ids"])}) for answer in answers]

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


def open_peer(
    name: str,
    config: EngineConfig,
    temperature: float = 0.0,
    *,
    ignore_end: bool = False,
    options: PeerOptions | None = None,
) -> Peer | LlamaServer:
    """Start a peer; the arguments and errors are those of `Peer` and `LlamaServer`."""
    kind = LlamaServer if PEERS[name].program == "llama-server" else Peer
    return kind(name, config, temperature, ignore_end=ignore_end, options=options)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages and programs that methods need, by package or program."""
    found = dict[str, str]()
    for name, kind in ((name, PEERS[name]) for name in names if name in PEERS):
        if kind.package:
            found[kind.package] = version(kind.package)
        if kind.program and kind.program not in found:
            found[kind.program] = server_version(find_program(name, kind.program))
    return found
