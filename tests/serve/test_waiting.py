"""The time of an answer holds whatever its client does, and whatever becomes of the task that writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from langchain_card import CARDChatModel, Limits
from langchain_card.errors import GenerationAbortedError
from langchain_card.serve import Settings, create_app
from langchain_card.serve.waiting import ClientLeft, PendingAnswer
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, LONG, NAME, ask, forever, num_open, posted, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"limits": Limits(max_num_seqs=1, max_unread=64)}
    with CARDChatModel(**fields).load() as model:
        yield model


# Clients that do not read.


UNREAD = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "card": True}


@pytest.mark.slow
def test_who_does_not_read_has_a_deadline_too(model: CARDChatModel) -> None:
    with served(model, deadline_seconds=2.0) as url, posted(url, CHAT, ask(**UNREAD)):
        wait_until(lambda: model.engine.num_running == 1)
        assert 1.0 < wait_until(lambda: num_open(model) == 0) < 6.0
        wait_until(lambda: f'outcome="504",route="{CHAT}"' in httpx.get(f"{url}/metrics").text)


async def test_who_does_not_read_does_not_keep_a_server_that_ends(model: CARDChatModel) -> None:
    app, sent = create_app(model, Settings(model_names=(NAME,))), asyncio.Event()
    requests = [{"type": "http.request", "body": json.dumps(ask(**UNREAD)).encode(), "more_body": False}]

    async def receive() -> Any:
        return requests.pop() if requests else await never()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.set()
            await never()

    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    async with app.router.lifespan_context(app):
        asked = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(sent.wait(), 20)
        app.state.service.end()
        await asyncio.wait_for(asked, 5)
        assert 'outcome="503"' in app.state.service.metrics.text(app.state.service.state()).decode()
    await asyncio.to_thread(wait_until, lambda: num_open(model) == 0)


# The iterator by itself.


async def items(*values: float, freed: list[str]) -> Any:
    try:
        for value in values:
            await asyncio.sleep(value)
            yield value
    finally:
        freed.append("freed")


async def never() -> Any:
    await asyncio.Event().wait()


async def test_whatever_ends_it_frees_the_items() -> None:
    freed: list[str] = []
    settings = Settings(keep_alive_seconds=0.05, max_wait_seconds=10)
    whole = PendingAnswer(items(0, 0.12, 0, freed=freed), never, settings, forever(), lambda: True, 10)
    assert [each async for each in whole] == [0, None, None, 0.12, 0] and freed == ["freed"]
    whole.close()
    for end in ("close", "leave"):
        freed.clear()
        left = asyncio.Event()

        async def receive(left: asyncio.Event = left) -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        following = PendingAnswer(items(0, 30, freed=freed), receive, settings, forever(), lambda: True, 10)
        assert await anext(following) == 0
        if end == "leave":
            left.set()
            with pytest.raises(ClientLeft):
                await anext(following)
        following.close()
        following.close()
        await asyncio.sleep(0.01)
        assert freed == ["freed"]


async def test_an_answer_that_is_cancelled_from_inside() -> None:
    async def cancelled() -> Any:
        yield 1
        raise asyncio.CancelledError

    following = PendingAnswer(cancelled(), never, Settings(), forever(), lambda: True, 10)
    assert await anext(following) == 1
    with pytest.raises(GenerationAbortedError):
        await asyncio.wait_for(anext(following), 2)
    following.close()
