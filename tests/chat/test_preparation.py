"""Prompts that are too long are refused before the template sees them, and make no other request wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage

from langchain_card import CARDChatModel
from langchain_card.text import prompt
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, TEXT, ask, body, error_of, said, served

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = "x" * (prompt.PIECE_CHARS + 9)
HUGE = "x" * 8_000_000
TOOL = {"type": "function", "function": {"name": "f", "description": HUGE, "parameters": {"type": "object"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "description": HUGE}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 8, "max_model_len": 2048}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (HUGE, {}),
        ([HumanMessage("Q")] * 100_000, {}),
        ([HumanMessage([{"type": "text", "text": "x" * 80}] * 100_000)], {}),
        ("Q", {"tools": [TOOL]}),
        ("Q", {"response_format": FORM}),
    ],
    ids=["a text", "messages", "blocks", "a tool", "a schema"],
)
def test_neither_template_nor_tokenizer_sees_what_is_too_large(
    model: CARDChatModel, monkeypatch: pytest.MonkeyPatch, text: Any, options: dict[str, Any]
) -> None:
    calls = list[str]()
    for name in ("apply_chat_template", "encode", "_encode_plus"):
        monkeypatch.setattr(model.engine.tokenizer, name, lambda *_, name=name, **__: calls.append(name))
    with pytest.raises(ContextOverflowError, match=r"context holds 2,048 tokens.*Hint: "):
        model.invoke(text, **options)
    assert not calls


@pytest.mark.parametrize(("path", "long"), [(CHAT, ask(**said(LONG))), (TEXT, body(TEXT, prompt=LONG))])
def test_long_prompts_are_read_one_at_a_time_and_short_ones_do_not_wait(
    model: CARDChatModel, monkeypatch: pytest.MonkeyPatch, path: str, long: dict[str, Any]
) -> None:
    check, released, running, most = prompt.check_length, threading.Event(), list[str](), list[int]()

    def held(text: str, *rest: Any) -> None:
        if len(text) > prompt.PIECE_CHARS:
            running.append(text)
            most.append(len(running))
            assert released.wait(60)
            running.pop()
        check(text, *rest)

    monkeypatch.setattr("langchain_card.text.prompt.check_length", held)
    monkeypatch.setattr("langchain_card.serve.openai.completions.check_length", held)
    with served(model) as url, httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(6) as clients:
        pending = [clients.submit(http.post, path, json=long) for _ in range(6)]
        try:
            wait_until(lambda: bool(running))
            assert [http.post(CHAT, json=ask(max_tokens=1)).status_code for _ in range(3)] == [200] * 3
            assert not any(answer.done() for answer in pending)
        finally:
            released.set()
        assert {error_of(answer.result())["code"] for answer in pending} == {"context_length_exceeded"}
    assert most == [1] * 6
