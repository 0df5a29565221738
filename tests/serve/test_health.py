"""`/health` judges progress: no web server alone satisfies it, nor old output, nor do long texts upset it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from langchain_card import CARDChatModel, Limits
from langchain_card.engine import liveness
from langchain_card.serve import Settings, create_app
from tests.support.isolated import process_of
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import ask, served

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model, api_keys=("key",), max_body_bytes=1 << 16) as url:
        yield url


def health(url: str) -> tuple[int, dict[str, Any]]:
    response = httpx.get(f"{url}/health", timeout=5)
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    return response.status_code, response.json()


def status(url: str) -> tuple[int, str]:
    code, report = health(url)
    return code, report["status"]


def asked(url: str, **options: Any) -> threading.Thread:
    """A thread that waits for an answer."""

    def wait() -> None:
        response = httpx.post(url + CHAT, json=ask(**options), headers={"authorization": "Bearer key"}, timeout=60)
        assert response.status_code == 200

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_idle_is_healthy_and_needs_no_key(url: str) -> None:
    asked(url, max_tokens=3).join()
    wait_until(lambda: not any(worker["busy_seconds"] for worker in health(url)[1]["workers"].values()))
    code, report = health(url)
    assert (code, report["status"], report["open_requests"]) == (200, "ok", 0)
    assert report["workers"].keys() == {"target", "model", "ngram", "forced"}
    assert report["workers"]["target"] == {"state": "up", "busy_seconds": 0.0, "budget_seconds": None}


async def test_one_that_drains_or_is_closed_says_so(fields: dict[str, Any]) -> None:
    with CARDChatModel(**fields).load() as model:
        app = create_app(model, Settings())
        async with app.router.lifespan_context(app):
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            assert (await client.get("/health")).status_code == 200
            app.state.service.draining = True
            response = await client.get("/health")
            assert (response.status_code, response.json()["status"]) == (503, "draining")
            assert (await client.get("/version")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 503
            app.state.service.draining = False
        assert (await client.get("/health")).json()["status"] == "failing"


def test_numbers_tell_how_the_engine_is_now(model: CARDChatModel, url: str) -> None:
    def told() -> dict[str, float]:
        text = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer key"}).text
        lines = [line.removeprefix("langchain_card_").rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    found = told()
    assert (found["open_requests"], found["running_requests"]) == (0, 0)
    assert [found[f'worker_ok{{worker="{name}"}}'] for name in ("target", "model", "ngram", "forced")] == [1] * 4
    waiting = asked(url, max_tokens=300, logit_bias={"256": -100})
    wait_until(lambda: told()["running_requests"] == 1)
    transport = model.engine.backend.transports["ngram"]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "health", lambda: liveness.Health("up", 2.0, 1.0))
        assert told()['worker_ok{worker="ngram"}'] == 0
    waiting.join(30)
    assert told()["open_requests"] == 0


# The three ways in which such pages are known to lie.


@pytest.mark.slow
def test_a_web_server_without_an_engine_is_not_healthy(fields: dict[str, Any]) -> None:
    limits = Limits(restart_seconds=0.5, silence_seconds=4.0, max_deaths=2)
    with CARDChatModel(**fields, isolate=True, limits=limits).load() as model, served(model) as url:
        assert status(url) == (200, "ok")
        assert health(url)[1]["workers"].keys() == {"engine process", "target", "model", "ngram", "forced"}
        process_of(model.engine).kill()
        wait_until(lambda: status(url) == (503, "failing"), 10)
        assert httpx.get(f"{url}/version").status_code == 200
        wait_until(lambda: status(url) == (200, "ok"), 60)
        process_of(model.engine).send_signal(signal.SIGSTOP)
        wait_until(lambda: status(url) == (503, "failing"), 8)
        wait_until(lambda: status(url) == (200, "ok"), 60)
        process_of(model.engine).kill()
        wait_until(lambda: health(url)[1]["workers"]["engine process"]["state"] == "given up", 10)
        assert status(url) == (503, "failing")
        assert httpx.post(url + CHAT, json=ask()).status_code == 503


@pytest.mark.parametrize("fault", ["a target that hangs", "a core that schedules nothing", "a loop that hangs"])
def test_old_output_is_no_proof(model: CARDChatModel, url: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    asked(url, max_tokens=3).join()
    for name, value in {"MIN_STEP_SECONDS": 0.3, "STEP_DUE_SECONDS": 0.3, "SLOWDOWN": 1.0}.items():
        monkeypatch.setattr(liveness, name, value)
    driver: Any = model.engine.backend
    released = threading.Event()
    with monkeypatch.context() as patch:
        if fault == "a target that hangs":
            verify = driver._target.verify
            patch.setattr(driver._target, "verify", lambda windows: (released.wait(30), verify(windows))[1])
        elif fault == "a loop that hangs":
            handle = driver.coordinator.handle
            patch.setattr(driver.coordinator, "handle", lambda event: released.wait(30) and handle(event))
        else:
            patch.setattr(driver.coordinator, "_query", lambda now: [])
        waiting = asked(url, max_tokens=3)
        seconds = wait_until(lambda: status(url) == (503, "failing"), 5)
        assert seconds < 3
        worker = health(url)[1]["workers"]["target"]
        assert worker["state"] == "up" and worker["busy_seconds"] > worker["budget_seconds"]
        assert httpx.get(f"{url}/version").status_code == 200
    released.set()
    driver.pause(-1, False)  # wakes it
    waiting.join(30)
    assert not waiting.is_alive()
    wait_until(lambda: status(url) == (200, "ok"))


def test_a_long_text_is_no_failure(model: CARDChatModel, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 400 rows may take longer than one of three, and nothing waits behind it to be told so."""
    driver: Any = model.engine.backend
    fresh = liveness.StepWatch(time.perf_counter)
    monkeypatch.setattr(driver, "_watch", fresh)
    monkeypatch.setattr(liveness, "MIN_STEP_SECONDS", 0.05)
    verify, slow = driver._target.verify, 0.0

    def verify_slowly(windows: Any) -> Any:
        time.sleep(slow or 0.02)
        return verify(windows)

    monkeypatch.setattr(driver._target, "verify", verify_slowly)
    asked(url, max_tokens=3).join()
    slow = 0.8
    long = asked(url, max_tokens=1, messages=[{"role": "user", "content": "a longer text " * 30}])
    seen = []
    while long.is_alive():
        start = time.monotonic()
        seen.append((status(url), health(url)[1]["workers"]["target"]["busy_seconds"]))
        assert time.monotonic() - start < 0.5
    assert {each for each, _ in seen} == {(200, "ok")} and max(busy for _, busy in seen) > 0.4


def test_a_drafter_that_is_gone_costs_speed_only(model: CARDChatModel, url: str) -> None:
    transport = model.engine.backend.transports["ngram"]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "health", lambda: liveness.Health("up", 2.0, 1.0))
        assert status(url) == (200, "degraded")
        asked(url, max_tokens=3).join()
    assert status(url) == (200, "ok")
