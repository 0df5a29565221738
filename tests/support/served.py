"""A real server on a real loopback socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from langchain_card import CARDChatModel
from langchain_card.serve import Settings, create_app
from tests.support.played import played

NAME = "tiny"


@contextmanager
def served(model: CARDChatModel, **settings: Any) -> Iterator[str]:
    """The address of a server that answers with a model called `tiny`."""
    app = create_app(model, Settings(**{"model_names": (NAME, "alias"), **settings}))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # slow readers are felt early
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="test-server")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 20.0) -> float:
    """Seconds until something holds."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, "it did not come true"
        time.sleep(0.005)
    return time.monotonic() - start


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
