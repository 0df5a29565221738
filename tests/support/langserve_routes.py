"""LangServe's routes: their names, the bodies of requests, and what a response contains."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

ROUTES = ("invoke", "batch", "stream", "stream_log", "stream_events")
STREAMS = ROUTES[2:]
PREFIXES = ("/card", "/card/chat")


def body(route: str, asked: Any = "Q", **more: Any) -> dict[str, Any]:
    return {"inputs": [asked], **more} if route == "batch" else {"input": asked, **more}


def last_event(text: str) -> tuple[str, Any]:
    name, _, data = text.split("\n\n")[-2].partition("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: ") or "null")


def contents(response: httpx.Response) -> list[str]:
    """Return the contents of the messages in a response of any route."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        output = response.json()["output"]
        return [message["content"] for message in (output if isinstance(output, list) else [output])]
    assert last_event(response.text)[0] == "end"
    return re.findall(r'"content":"((?:[^"\\]|\\.)*)"', response.text)
