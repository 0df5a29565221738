"""A client that asks for it learns how much of a long prompt was read, before the answer's first token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from langchain_card import CARDChatModel, Limits
from tests.support.held import held
from tests.support.played import make_pair
from tests.support.served import CHAT, ask, said, served

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"limits": Limits(max_num_seqs=1, max_step_rows=CHUNK)}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture
def permits(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    return held(model.engine, monkeypatch)


def question(first: str) -> dict[str, Any]:
    return ask(max_tokens=5, **said(first + "a long text, " * 60), stream=True)


def test_counts_come_while_the_prompt_is_read(url: str, permits: threading.Semaphore) -> None:
    permits.release()
    seen: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}{CHAT}", json=question("A") | {"card": True}, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            seen.append(event)
            reading = event["card"].get("reading")
            if reading and reading["read"] + CHUNK < reading["total"]:
                permits.release()  # no count is missed, because nothing is read before it has arrived
            else:
                permits.release(99)
    counts = [event["card"]["reading"] for event in seen if "reading" in event["card"]]
    assert [count["read"] for count in counts] == [CHUNK, 2 * CHUNK, 3 * CHUNK] and counts[0]["total"] > 3 * CHUNK
    assert len({count["total"] for count in counts}) == 1
    deltas = [event["choices"][0]["delta"] for event in seen]
    assert deltas[0]["role"] == "assistant" and deltas[1:4] == [{}] * 3, "clients that know nothing of it skip it"
    assert all(event["card"]["tokens"] == [] and "reading" in event["card"] for event in seen[1:4])
    assert len({event["id"] for event in seen}) == 1 and seen[-1]["choices"][0]["finish_reason"] == "length"


def test_other_clients_get_what_they_got_before(url: str, permits: threading.Semaphore) -> None:
    permits.release(99)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = [*client.chat.completions.create(**question("B"))]
    assert all(chunk.choices for chunk in chunks) and chunks[0].choices[0].delta.role == "assistant"
    chunks = [*client.chat.completions.create(**question("C"), extra_body={"card": True})]
    assert chunks[-1].choices[0].finish_reason == "length"
