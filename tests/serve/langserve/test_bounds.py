"""LangServe's routes under full queues, deadlines, failures and clients that leave."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langserve import RemoteRunnable

from langchain_card import CARDChatModel, Limits
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import EngineError
from langchain_card.serve import Settings
from langchain_card.serve.waiting import PendingAnswer
from tests.support.langserve_routes import PREFIXES, ROUTES, STREAMS, body, contents, last_event
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import ask, error_of, forever, num_open, posted, served

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = {"configurable": {"max_tokens": 7000}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    """One answer at a time, two may wait; answers do not end by themselves."""
    limits = Limits(max_num_seqs=1, max_queue=2, max_unread=64)
    bias = {"logit_bias": {256: -100}}
    fields = make_pair(tmp_path_factory.mktemp("a-folder")) | bias | {"limits": limits, "max_tokens": 4}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model, max_messages=20, max_body_bytes=1_000_000) as url:
        yield url


# Queues, deadlines, clients that leave.


@pytest.mark.parametrize("route", ROUTES)
def test_full_queues(model: CARDChatModel, url: str, route: str) -> None:
    held = [posted(url, "/card/invoke", body("", config=LONG)) for _ in range(3)]
    wait_until(lambda: num_open(model) == 3)
    response = httpx.post(f"{url}/card/{route}", json=body(route), timeout=20)
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert error_of(response)["code"] == "rate_limit_exceeded" and "max_queue = 2" in response.text
    with pytest.raises(httpx.HTTPStatusError, match="max_queue = 2"):
        RemoteRunnable[Any, Any](f"{url}/card").invoke("Q")
    with pytest.raises(httpx.HTTPStatusError, match="429"):
        next(RemoteRunnable[Any, Any](f"{url}/card").stream("Q"))
    for connection in held:
        connection.close()
    wait_until(lambda: num_open(model) == 0)


@pytest.mark.slow
def test_waits_and_deadlines(model: CARDChatModel) -> None:
    with served(model, max_wait_seconds=0.3) as url:
        with posted(url, "/v1/chat/completions", ask(max_tokens=7000)):
            wait_until(lambda: model.engine.num_running == 1)
            for route in ROUTES:
                response = httpx.post(f"{url}/card/{route}", json=body(route), timeout=20)
                assert response.status_code == 503 and response.headers["retry-after"] == "1", route
                assert error_of(response)["code"] == "not_begun_in_time"
                wait_until(lambda: num_open(model) == 1)
        wait_until(lambda: num_open(model) == 0)
        for route in ROUTES:
            headers = {"x-request-timeout": "0.5"}
            response = httpx.post(f"{url}/card/{route}", json=body(route, config=LONG), headers=headers, timeout=20)
            if route in STREAMS:
                name, data = last_event(response.text)
                assert (response.status_code, name, data["status_code"], data["code"]) == (200, "error", 504, "timeout")
                assert "0.5" in data["message"]
            else:
                assert response.status_code == 504 and error_of(response)["code"] == "timeout"
            wait_until(lambda: num_open(model) == 0)
            response = httpx.post(f"{url}/card/{route}", json=body(route), headers={"x-request-timeout": "soon"})
            assert response.status_code == 400 and error_of(response)["param"] == "x-request-timeout"
        remote: Any = RemoteRunnable(f"{url}/card", headers={"x-request-timeout": "0.5"})
        with pytest.raises(httpx.HTTPStatusError, match=r"deadline = 0\.5") as raised:
            [*remote.stream("Q", LONG)]
        assert raised.value.response.status_code == 504


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("route", ROUTES)
def test_who_leaves_frees_the_engine(model: CARDChatModel, url: str, route: str, prefix: str) -> None:
    connection = posted(url, f"{prefix}/{route}", body(route, config=LONG))
    wait_until(lambda: model.engine.num_running == 1)
    if route in STREAMS:
        seen = b""
        while b"chunk_position" not in seen:
            seen += connection.recv(4096)
        assert seen.startswith(b"HTTP/1.1 200")
    connection.close()
    assert wait_until(lambda: num_open(model) == 0) < 2.0
    assert model.engine.num_running == 0


@pytest.mark.parametrize("route", ROUTES)
def test_who_leaves_the_queue_is_forgotten(model: CARDChatModel, url: str, route: str) -> None:
    with posted(url, "/card/invoke", body("", config=LONG)):
        wait_until(lambda: model.engine.num_running == 1)
        waiting = posted(url, f"/card/{route}", body(route, config=LONG))
        wait_until(lambda: num_open(model) == 2)
        waiting.close()
        assert wait_until(lambda: num_open(model) == 1) < 2.0
    wait_until(lambda: num_open(model) == 0)


def test_who_leaves_a_batch_frees_all_of_it(model: CARDChatModel, url: str) -> None:
    connection = posted(url, "/card/batch", {"inputs": ["Q", "R"], "config": LONG})
    wait_until(lambda: num_open(model) == 2)
    connection.close()
    assert wait_until(lambda: num_open(model) == 0) < 2.0


@pytest.mark.parametrize("route", STREAMS)
def test_slow_readers_leave_nothing(model: CARDChatModel, url: str, route: str) -> None:
    """Nothing of an answer that nobody reads goes on, however much of it waits."""
    with posted(url, f"/card/{route}", body(route, config=LONG)) as connection:
        wait_until(lambda: model.engine.num_running == 1)
        assert connection.recv(20)
        time.sleep(0.5)
    assert wait_until(lambda: num_open(model) == 0) < 2.0


async def test_an_answer_that_fails_as_it_is_given_up() -> None:
    """As LangChain's logs do; what nobody has read yet does not keep it."""

    begun = asyncio.Event()

    async def items() -> Any:
        try:
            while True:
                begun.set()
                yield 1
        finally:
            raise RuntimeError

    following = PendingAnswer(items(), asyncio.Event().wait, Settings(), forever(), lambda: True, 10)
    await begun.wait()
    following.close()
    await asyncio.wait_for(asyncio.gather(following._task, return_exceptions=True), 5)


@pytest.mark.parametrize("route", STREAMS)
def test_failures_in_the_middle(model: CARDChatModel, url: str, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    found: list[Generation] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *args: found.append(submit(*args)) or found[-1])
    for error, code, status in (
        (EngineError("step", 1, "/secret"), "engine_error", 503),
        (RuntimeError("/secret"), "internal_error", 500),
    ):
        with httpx.stream("POST", f"{url}/card/{route}", json=body(route, config=LONG), timeout=20) as response:
            pieces = response.iter_text()
            text = next(pieces)
            found[-1].abort(error)
            text += "".join(pieces)
        name, data = last_event(text)
        assert (name, data["status_code"], data["code"]) == ("error", status, code) and "secret" not in text
    wait_until(lambda: num_open(model) == 0)


# What is not told.


def test_no_paths_and_no_words_are_told(model: CARDChatModel) -> None:
    with served(model) as url:
        for route in ROUTES:
            text = httpx.post(f"{url}/card/{route}", json=body(route, "secret")).text
            assert "a-folder" not in text and '"tiny"' in text, route
        with posted(url, "/card/stream", body("", config=LONG)):
            wait_until(lambda: model.engine.num_running == 1)
        wait_until(lambda: "499" in httpx.get(f"{url}/metrics").text)
        httpx.post(f"{url}/card/invoke", json={})
        httpx.get(f"{url}/card/playground/a-secret-page")
        text = httpx.get(f"{url}/metrics").text
    counted = set(re.findall(r'requests_total{outcome="(\d+)",route="(/card[^"]*)"} 1.0', text))
    assert counted == {
        *(("200", f"/card/{route}") for route in ROUTES), ("400", "/card/invoke"), ("499", "/card/stream"),
        ("404", "/card/playground/{file_path:path}"),
    }  # fmt: skip
    assert "secret" not in text and float(re.findall(r"prompt_tokens_total (\d+)", text)[0]) > 5 * 12


def test_half_a_request(url: str, model: CARDChatModel) -> None:
    """The last of all tests here: whoever came and went, the server answers the next one."""
    host, port = url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /card/stream HTTP/1.1\r\n")
    assert contents(httpx.post(f"{url}/card/invoke", json=body("")))
    assert num_open(model) == 0
