"""Clients that leave, answers that take too long or wait too long, full queues: each frees what it held."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from langchain_card import CARDChatModel, Limits
from langchain_card.engine.engine import Engine
from langchain_card.serve.openai.completions import Continuation
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import CHAT, LONG, TEXT, ask, body, error_of, num_open, posted, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    """One answer at a time, two may wait."""
    limits = Limits(max_num_seqs=1, max_queue=2, max_unread=64)
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"limits": limits}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_engine(model: CARDChatModel, url: str, path: str, stream: bool) -> None:
    connection = posted(url, path, body(path, **LONG, stream=stream))
    wait_until(lambda: model.engine.num_running == 1)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    assert wait_until(lambda: num_open(model) == 0) < 2.0
    assert model.engine.num_running == 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_forgotten(model: CARDChatModel, url: str, path: str, stream: bool) -> None:
    with posted(url, CHAT, body(CHAT, **LONG)):
        wait_until(lambda: model.engine.num_running == 1)
        waiting = posted(url, path, body(path, **LONG, stream=stream))
        wait_until(lambda: num_open(model) == 2)
        waiting.close()
        wait_until(lambda: num_open(model) == 1)
        assert model.engine.num_running == 1
    wait_until(lambda: num_open(model) == 0)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, CARDChatModel), (TEXT, Continuation)])
def test_who_leaves_while_the_prompt_is_read(
    model: CARDChatModel, url: str, monkeypatch: pytest.MonkeyPatch, path: str, kind: Any
) -> None:
    """The answer is not begun then."""
    entered, go, submitted = threading.Event(), threading.Event(), []
    prepare, submit = kind._prepare, Engine.submit

    def slow(*args: Any) -> Any:
        entered.set()
        assert go.wait(20)
        return prepare(*args)

    monkeypatch.setattr(kind, "_prepare", slow)
    monkeypatch.setattr(Engine, "submit", lambda *args: submitted.append(args) or submit(*args))
    connection = posted(url, path, body(path, **LONG))
    assert entered.wait(20)
    assert httpx.get(f"{url}/version", timeout=5).status_code == 200  # the loop is free meanwhile
    connection.close()
    time.sleep(0.3)
    go.set()
    time.sleep(0.3)
    assert not submitted and num_open(model) == 0


async def test_clients_that_are_cancelled(model: CARDChatModel, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        task = asyncio.create_task(client.chat.completions.create(**ask(**LONG)))
        while model.engine.num_running == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: num_open(model) == 0)
        stream = await client.chat.completions.create(**ask(**LONG, stream=True))
        async for _ in stream:
            break
        await stream.close()
        await asyncio.to_thread(wait_until, lambda: num_open(model) == 0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_deadlines(model: CARDChatModel, url: str, path: str) -> None:
    start = time.monotonic()
    response = httpx.post(url + path, json=body(path, **LONG), headers={"x-request-timeout": "0.4"}, timeout=20)
    assert response.status_code == 504 and 0.3 < time.monotonic() - start < 5
    error = error_of(response)
    assert (error["type"], error["code"]) == ("timeout_error", "timeout") and "0.4" in error["message"]
    wait_until(lambda: num_open(model) == 0)
    options = body(path, **LONG, stream=True)
    response = httpx.post(url + path, json=options, headers={"x-request-timeout": "0.5"}, timeout=20)
    assert response.status_code == 200
    *events, last, end = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and end == "" and len(events) > 2
    assert "[DONE]" not in response.text
    wait_until(lambda: num_open(model) == 0)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client, pytest.raises(openai.APIError):
        for _ in client.chat.completions.create(**ask(**LONG, stream=True), extra_headers={"x-request-timeout": "0.5"}):
            pass


@pytest.mark.parametrize("said", ["", "soon", "0", "-1", "nan", "inf", "1e999"])
def test_deadlines_that_are_none(url: str, said: str) -> None:
    response = httpx.post(url + CHAT, json=ask(max_tokens=1), headers={"x-request-timeout": said})
    assert response.status_code == 400 and error_of(response)["param"] == "x-request-timeout"


@pytest.mark.slow
def test_the_servers_own_limits(model: CARDChatModel) -> None:
    with served(model, deadline_seconds=0.5, max_wait_seconds=0.3) as url:
        response = httpx.post(url + CHAT, json=ask(**LONG), headers={"x-request-timeout": "1e6"}, timeout=20)
        assert response.status_code == 504 and "0.5" in error_of(response)["message"]
    with served(model, max_wait_seconds=0.3) as url, posted(url, CHAT, body(CHAT, **LONG)):
        wait_until(lambda: model.engine.num_running == 1)
        for path in (CHAT, TEXT):
            for stream in (False, True):
                response = httpx.post(url + path, json=body(path, stream=stream), timeout=20)
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
                error = error_of(response)
                assert error["code"] == "not_begun_in_time" and "max_wait_seconds = 0.3" in error["message"]
                wait_until(lambda: num_open(model) == 1)
        assert model.engine.num_running == 1  # who has begun may go on
    wait_until(lambda: num_open(model) == 0)


def test_full_queues(model: CARDChatModel, url: str) -> None:
    held = [posted(url, CHAT, body(CHAT, **LONG)) for _ in range(3)]
    wait_until(lambda: num_open(model) == 3)
    for path in (CHAT, TEXT):
        for stream in (False, True):
            response = httpx.post(url + path, json=body(path, stream=stream), timeout=20)
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
            assert error_of(response)["code"] == "rate_limit_exceeded" and "max_queue = 2" in response.text
    for connection in held:
        connection.close()
    wait_until(lambda: num_open(model) == 0)
    assert httpx.post(url + CHAT, json=ask(max_tokens=1)).status_code == 200


def test_silence_is_kept_alive(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer that has begun; one that waits has no status yet, because it may still be refused."""
    driver: Any = model.engine.backend
    verify, released = driver._target.verify, threading.Event()

    def slowly(windows: Any) -> Any:
        if num_open(model) == 1:
            released.wait(20)
        return verify(windows)

    with served(model, keep_alive_seconds=0.1) as url, posted(url, CHAT, body(CHAT, **LONG)) as first:
        wait_until(lambda: model.engine.num_running == 1)
        waiting = posted(url, CHAT, body(CHAT, stream=True, max_tokens=2))
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(4096)
        waiting.settimeout(20)
        monkeypatch.setattr(driver._target, "verify", slowly)
        first.close()
        seen = b""
        while seen.count(b": still there\n\n") < 2:
            seen += waiting.recv(4096)
        assert b"200 OK" in seen and b"data:" not in seen
        released.set()
        while b"[DONE]" not in seen:
            seen += waiting.recv(4096)
        waiting.close()


def test_a_queued_stream_that_never_begins(model: CARDChatModel) -> None:
    """It waits longer than a stream may be silent, and is refused with a status all the same."""
    settings = {"keep_alive_seconds": 0.1, "max_wait_seconds": 0.5}
    with served(model, **settings) as url, posted(url, CHAT, body(CHAT, **LONG)):
        wait_until(lambda: model.engine.num_running == 1)
        response = httpx.post(url + CHAT, json=body(CHAT, stream=True), timeout=20)
        assert (response.status_code, error_of(response)["code"]) == (503, "not_begun_in_time")
    wait_until(lambda: num_open(model) == 0)


def test_slow_readers_pause_their_answer(model: CARDChatModel, url: str) -> None:
    """They hold no more than what sockets and bounds hold."""
    connection = posted(url, CHAT, body(CHAT, **LONG, stream=True, logprobs=True, top_logprobs=20))
    wait_until(lambda: model.engine.num_running == 1)
    state = next(iter(model.engine.backend.coordinator.scheduler.running.values()))
    wait_until(lambda: state.paused, 60)
    assert httpx.post(url + CHAT, json=ask(max_tokens=3), timeout=20).status_code == 200, "it pauses itself only"
    connection.close()
    assert wait_until(lambda: num_open(model) == 0) < 2.0


def test_failures_in_the_middle(model: CARDChatModel, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_card.engine.generation import Generation
    from langchain_card.errors import EngineError

    found: list[Generation] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *args: found.append(submit(*args)) or found[-1])
    for path in (CHAT, TEXT):
        for error, code in (
            (EngineError("step", 1, "/secret"), "engine_error"),
            (RuntimeError("/secret"), "internal_error"),
        ):
            with httpx.stream("POST", url + path, json=body(path, **LONG, stream=True), timeout=20) as response:
                lines = response.iter_lines()
                next(lines)
                found[-1].abort(error)
                rest = [line for line in lines if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == code and "secret" not in "".join(
                rest
            )
    wait_until(lambda: num_open(model) == 0)


def test_many_at_once(model: CARDChatModel, url: str) -> None:
    """Some leave, some stay; all that stay are answered alike."""
    answers: list[str] = []

    def stay() -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=50) as client:
            answers.append(client.chat.completions.create(**ask(max_tokens=20)).choices[0].message.content or "")

    def leave() -> None:
        connection = posted(url, CHAT, body(CHAT, **LONG, stream=True))
        time.sleep(0.2)
        connection.close()

    threads = [threading.Thread(target=each) for each in (stay, leave) * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [model.invoke("Q", max_tokens=20).text] * 6
    wait_until(lambda: num_open(model) == 0)
