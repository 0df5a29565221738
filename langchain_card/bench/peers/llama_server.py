"""llama.cpp's server as a peer: started on the loopback interface with a free port, asked over HTTP, and ended.

The answers of a server come as events, one a token. A token that ends within a character has no event: its id is asked
for again, without time.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_card.bench.load import keep_busy
from langchain_card.bench.method import PeakMemory, Run, Served
from langchain_card.bench.method_table import PEER_OPTIONS, PEERS, PeerOptions, find_program
from langchain_card.bench.peers.weights import check_room, gguf_files, peer_weights
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError
from langchain_card.models.loader import Pair, resolve
from langchain_card.runtime.threads import num_cores

SECONDS = 1800.0
"""Time limit of loading, and of each wait for the server."""

UNKNOWN = -1
"""The place of a token whose id the server did not send."""

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_END_SECONDS, _SOON = 10.0, 1.0
_QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)

_LAUNCH = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == parent:
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""The start of the server in its process: the kernel ends it with the thread that started it (PR_SET_PDEATHSIG)."""


@dataclass(frozen=True)
class ServerAnswer:
    """The events of one answer.

    Attributes:
        token_ids: `UNKNOWN` where the server sent none.
        times: of each token.
        timings: the server's own figures.
    """

    token_ids: list[int]
    times: list[float]
    timings: Mapping[str, Any]

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of a `Run`. A pass of the target yields one token more than it accepts."""
        drafted, accepted = self.timings.get("draft_n", 0), self.timings.get("draft_n_accepted", 0)
        if not drafted:
            return {"accepted_length": 1.0}
        passes = max(1, len(self.token_ids) - accepted)
        return {"acceptance": accepted / drafted, "accepted_length": len(self.token_ids) / passes}


def read_events(name: str, lines: Iterable[tuple[float, bytes]]) -> ServerAnswer:
    """Return the answer in the lines of a stream of events, with the time at which each line came.

    Raises:
        EngineError: the server reported an error, or the stream has no last event.
    """
    found, total, timings, now = dict[int, tuple[int, float]](), -1, {}, 0.0
    for now, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise EngineError(name, "failed", str(event["error"].get("message", event["error"])))
        if event["stop"]:
            total, timings = event["tokens_predicted"], event["timings"]
        elif event["tokens"]:
            found[event["tokens_predicted"] - 1] = event["tokens"][0], now
    if total < 1:
        raise EngineError(name, f"{len(found)} tokens", "the answer has no end", "look for llama-server's log")
    token_ids = [found[at][0] if at in found else UNKNOWN for at in range(total)]
    times, later = [now] * total, now
    for at in reversed(range(total)):  # a token without an event came with the next one
        times[at] = later = found[at][1] if at in found else later
    return ServerAnswer(token_ids, times, timings)


class LlamaServer:
    """A `Method` that runs llama-server.

    Its tables of n-grams learn from each answer. A new `repeat` starts a new server, so that no answer is known before.
    The server ends with `close`, and with the thread that started it.

    Args:
        name: one of `PEERS`.
        config: names the models, whose GGUF files the server reads.
        temperature: of all answers.
        ignore_end: True continues answers: tokens that end one are never chosen.
        options: of the command line; None for those of `PEER_OPTIONS`.

    Raises:
        InvalidInputError: there is no llama-server, or a model has no GGUF file.
        DeviceError: there is not enough memory for another copy of the weights.
        EngineError: the server did not start, or died.
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
        program = find_program(name, PEERS[name].program)
        self.name, (self.weights, needed) = name, peer_weights(name, config)
        check_room(name, needed, config)
        options = PEER_OPTIONS[name] if options is None else options
        self._learns = "ngram" in str(options.get("spec-type"))
        self._repeat: int | None = None
        pair = resolve(config)
        self._ends = () if ignore_end else pair.eos_ids
        self._max_len, self._slots = pair.max_len, 1
        self._arguments = [program, *_arguments(gguf_files(name, config), pair, options)]
        self._sampling = _sampling(temperature, ignore_end=ignore_end)
        self._start()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        """Answer a prompt. Nothing is reused between answers but the tables of n-grams of one `repeat`."""
        if self._learns and self._repeat not in (None, repeat):
            self.close()
            self._start()
            self._ask({"prompt": [*prompts[0][:1]], "n_predict": 1, **self._sampling})  # its first request is slower
        self._repeat = repeat
        body = {"prompt": [*prompts[0]], "n_predict": max_tokens, **self._sampling}
        peak = PeakMemory(cuda=False, pid=self._process.pid)
        peak.reset()
        begun = time.perf_counter()
        lines = self._ask(body | {"stream": True})
        try:
            answer = read_events(self.name, lines)
        except EngineError as error:  # http.client takes a stream that breaks off for a whole one
            raise self._death(error) from None
        token_ids, highest = answer.token_ids, peak.read()
        if UNKNOWN in token_ids:
            token_ids = self._filled(token_ids, body)
        kept = self._length(token_ids)
        steps = Run.of_steps((tuple(token_ids[:kept]),), begun, answer.times[:kept], 1, answer.figures)
        return replace(steps, peak=highest)

    def serve(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], requests: int, tenant: str
    ) -> list[Served]:
        """Answer prompts, so many at once, with as many slots of a new server."""
        self.close()
        self._slots = requests
        self._start()
        self._ask({"prompt": [*prompts[0][:1]], "n_predict": 1, **self._sampling})  # its first request is slower

        def answer(prompt: Sequence[int], limit: int) -> Served:
            body = {"prompt": [*prompt], "n_predict": limit, "stream": True, **self._sampling}
            sent = time.perf_counter()
            events = read_events(self.name, self._ask(body))
            kept = self._length(events.token_ids)
            return Served(tuple(events.token_ids[:kept]), sent, events.times[0], events.times[kept - 1])

        return keep_busy(answer, requests, prompts, max_tokens)

    def _length(self, token_ids: Sequence[int]) -> int:
        """Return the tokens up to the end of text, or before one that stayed unknown."""
        for at, token in enumerate(token_ids):
            if token in self._ends:
                return at + 1
            if token == UNKNOWN and at:
                return at
        return len(token_ids)

    def _filled(self, token_ids: list[int], body: Mapping[str, Any]) -> list[int]:
        """Return an answer with the ids that it lacks, from the same answer that is sent as a whole."""
        whole = json.loads(b"".join(line for _, line in self._ask(body)))["tokens"]
        alike = all(token in (UNKNOWN, other) for token, other in zip(token_ids, whole, strict=False))
        return whole if alike and len(whole) == len(token_ids) else token_ids

    def _start(self) -> None:
        """Start the server and wait until it has loaded its models."""
        self._port, self._log = _free_port(), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *self._arguments]
        slots = ["--parallel", str(self._slots), "--ctx-size", str(self._slots * self._max_len)]
        command = [*launch, *slots, "--host", _HOST, "--port", str(self._port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
        pipe = subprocess.DEVNULL
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=pipe, stdout=self._log, stderr=self._log, env=environment
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not self._is_ready():
            if self._process.poll() is not None:
                raise self._death()
            if time.monotonic() > deadline:
                raise EngineError(self.name, "not ready", f"it was ended after {SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_END_SECONDS)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        return False

    def _ask(self, body: Mapping[str, Any]) -> list[tuple[float, bytes]]:
        """Send a request and return the lines of the response, each with the time at which it came."""
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=SECONDS)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            stream, lines = connection.sock, list[tuple[float, bytes]]()
            _acknowledge(stream)
            response = connection.getresponse()
            for line in response:
                lines.append((time.perf_counter(), line))
                _acknowledge(stream)
        except TimeoutError:
            limit = f"it was ended after {SECONDS:.0f} s"
            self._process.kill()
            raise EngineError(self.name, "no answer", limit, "ask for fewer tokens") from None
        except (OSError, http.client.HTTPException):
            raise self._death() from None
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise EngineError(self.name, f"status {response.status}", b"".join(line for _, line in lines).decode())
        return lines

    def _death(self, otherwise: EngineError | None = None) -> EngineError:
        """Return the error of a server that has ended, with the last line of its log; `otherwise` if it still runs."""
        try:
            self._process.wait(_END_SECONDS if otherwise is None else _SOON)
        except subprocess.TimeoutExpired:
            if otherwise is not None:
                return otherwise
        self._log.seek(0)
        last = ["it printed nothing", *filter(None, map(str.strip, self._log))][-1]
        return EngineError(self.name, f"exit code {self._process.returncode}", f"its process ended ({last})")

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@functools.cache
def server_version(program: str) -> str:
    """Return what the binary says of its version."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version:")]
    return lines[0].removeprefix("version:").strip() if lines else "unknown"


def _arguments(files: Sequence[object], pair: Pair, options: PeerOptions) -> list[str]:
    """Return the server's command line without its program, host and port."""
    fields: dict[str, object] = {"model": files[0], "cache-ram": 0}
    fields |= {"threads": num_cores(), "threads-batch": num_cores(), "fit": "off"}
    fields["n-gpu-layers"] = 0 if pair.target.device.type == "cpu" else "all"
    if len(files) > 1:
        fields |= {"spec-draft-model": files[1], "spec-draft-ngl": fields["n-gpu-layers"]}
    given = [part for name, value in (fields | dict(options)).items() for part in _option(name, value)]
    return [*given, "--offline", "--no-webui"]


def _option(name: str, value: object) -> tuple[str, ...]:
    """Return an option of the command line; one that is switched on or off has no value."""
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)


def _sampling(temperature: float, *, ignore_end: bool) -> dict[str, Any]:
    """Return the fields of a request that decide how tokens are chosen; at temperature 0 only the likeliest is kept."""
    greedy: dict[str, Any] = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k", "temperature"]}
    drawn: dict[str, Any] = {"temperature": temperature, "samplers": ["temperature"], "seed": 0}
    fields = {**(drawn if temperature else greedy), "return_tokens": True, "cache_prompt": False}
    return fields | ({"ignore_eos": True} if ignore_end else {})


def _acknowledge(stream: socket.socket) -> None:
    """Acknowledge what has come at once: the server sends no small packet before the last one is acknowledged."""
    if _QUICK_ACK is not None:
        with contextlib.suppress(OSError):  # it is closed behind the last line
            stream.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
