"""Real servers on loopback sockets, in a thread or a process, and requests to them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from langchain_card import CARDChatModel
from langchain_card.serve import Settings, create_app
from tests.support.played import played
from tests.support.processes import wait_until

NAME = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 7000, "logit_bias": {"256": -100}}
"""Options of a request that does not end by itself for many seconds."""
CARD = {"schedule", "tokens_per_second", "mean_accepted_length", "hit_rate", "accepted_by_source", "seed", "lossy"}
"""Keys of the object `card` in a response."""
CLI = "import sys; from langchain_card.cli import main; sys.exit(main())"


@contextmanager
def served(model: CARDChatModel, end_seconds: int = 5, **settings: Any) -> Iterator[str]:
    """The address of a server that answers with a model called `tiny`, and has `end_seconds` to finish its answers."""
    app = create_app(model, Settings(**{"model_names": (NAME, "alias"), **settings}))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # slow readers are felt early
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=end_seconds)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="test-server")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(end_seconds + 15)
        listening.close()
        assert not thread.is_alive()


def says(model: CARDChatModel, text: str, prompts: list[str] | None = None) -> Any:
    """Makes the model say a text; what it was asked is added to `prompts`."""

    def say(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        return text

    return played(say, model.engine.tokenizer)


def ask(**options: Any) -> dict[str, Any]:
    """A body of `/v1/chat/completions`."""
    return {"model": NAME, "messages": [{"role": "user", "content": "Q"}], **options}


def said(*contents: Any, **more: Any) -> dict[str, Any]:
    """The user's messages of a body."""
    return {"messages": [{"role": "user", "content": content, **more} for content in contents]}


def rounded(value: Any) -> Any:
    """The same without the last bits of its numbers: rows beside a row may change them."""
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    return [*map(rounded, value)] if isinstance(value, list) else round(value, 9) if isinstance(value, float) else value


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape and no other."""
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"], body
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


def body(path: str, **options: Any) -> dict[str, Any]:
    return ask(**options) if path == CHAT else {"model": NAME, "prompt": "Q", **options}


def num_open(model: CARDChatModel) -> int:
    return model.engine.num_open


def posted(url: str, path: str, fields: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection."""
    data = json.dumps(fields).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


def numbers(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Return the values of `/metrics` by name and labels."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (
            sample.name.removeprefix("langchain_card_"),
            *(of for _, of in sorted(sample.labels.items(), reverse=True)),
        ): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def forever() -> asyncio.Future[None]:
    """Return a future that never ends."""
    return asyncio.get_running_loop().create_future()


class ServerProcess:
    """A `langchain-card serve` in a process, on a free port; `said` holds its standard error."""

    def __init__(self, *args: str, until: str = "running on", seconds: float = 120) -> None:
        self._until = until
        command = [sys.executable, "-c", CLI, "serve", "--port", "0", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = ""
        self.started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.started.wait(seconds), self.said
        found = re.search(r"running on http://([^ ]*):(\d+)", self.said)
        self.url = f"http://127.0.0.1:{found[2]}" if found else ""

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.said += line
            if self._until in line:
                self.started.set()
        self.started.set()

    def end(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        code = self.process.wait(60)
        self._reader.join(10)
        (self.process.stderr or sys.stderr).close()
        return code
