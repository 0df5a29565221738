"""The door: keys, sizes, hosts, headers, draining; and the numbers that are counted there."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from langchain_card import CARDChatModel
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.serve import Settings, create_app
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import LONG, NAME, ask, error_of, num_open, numbers, posted, says, served

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair"))).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model, api_keys=KEYS, max_body_bytes=2000, max_body_seconds=1.0) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[1]}"}, timeout=20) as http:
        yield http


# Keys.


@pytest.mark.parametrize(
    "said",
    [None, "", "Bearer", "Bearer first-ke", "Bearer first-keyx", "Bearer FIRST-KEY", "Basic first-key",
     "first-key", "Bearer first-key second-key", "Bearer \xff", "Bearer ''"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/metrics", "/openapi.json", "/none"])
def test_without_a_key_every_route_is_closed(url: str, path: str, said: str | None) -> None:
    headers = {} if said is None else {"authorization": said.encode("latin-1")}
    response = httpx.request("POST" if path == CHAT else "GET", url + path, headers=headers)
    error = error_of(response)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert error["code"] == "invalid_api_key" and not any(key in response.text for key in KEYS)


def test_every_key_is_a_tenant(url: str, model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever route it asks; the engine is told no key."""
    submit, tenants = Engine.submit, list[str]()

    def recorded(self: Engine, prompt_ids: Any, params: SamplingParams) -> Any:
        tenants.append(params.tenant)
        return submit(self, prompt_ids, params)

    monkeypatch.setattr(Engine, "submit", recorded)
    completion = {"model": NAME, "prompt": "a", "max_tokens": 1}
    bodies = [
        *((CHAT, ask(max_tokens=1, stream=stream)) for stream in (False, True)),
        *(("/v1/completions", {**completion, "stream": stream}) for stream in (False, True)),
        *((f"/card/{route}", {"input": "a"}) for route in ("invoke", "stream", "stream_log", "stream_events")),
        ("/card/batch", {"inputs": ["a"]}),
    ]
    for path, body in bodies:
        tenants.clear()
        for key in (*KEYS, KEYS[0]):
            assert httpx.post(url + path, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200
        first, second, again = tenants
        assert first == again != second and not any(key in tenant for key in KEYS for tenant in tenants)
    with served(model, api_keys=KEYS) as other_url:
        httpx.post(other_url + CHAT, json=ask(max_tokens=1), headers={"authorization": f"Bearer {KEYS[0]}"})
    assert tenants[-1] == again, "another server finds what is kept for the key"
    with served(model) as open_url:
        httpx.post(open_url + CHAT, json=ask(max_tokens=1))
    assert tenants[-1] == "" == model.tenant


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_opens_every_route(url: str, key: str, scheme: str) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert httpx.get(url + path, headers={"authorization": f"{scheme} {key}"}).status_code == 200
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert client.chat.completions.create(**ask(max_tokens=1)).choices
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**ask(max_tokens=1))


def test_the_version_is_open(url: str) -> None:
    assert set(httpx.get(f"{url}/version").json()) == {"version"}


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch, model: CARDChatModel) -> None:
    import hmac

    from langchain_card.serve.guard import Guard
    from langchain_card.serve.service import Service

    seen: list[bytes] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda given, key: seen.append(key) or compare(given, key))
    guard = Guard(create_app(model), Service(model, Settings(api_keys=KEYS)))
    for given, opens in (("first-key", True), ("second-key", True), ("x", False)):
        seen.clear()
        assert guard._is_valid(f"Bearer {given}") is opens and seen == [key.encode() for key in KEYS]


def test_keys_are_not_shown() -> None:
    assert "first-key" not in repr(Settings(api_keys=KEYS))


@pytest.mark.parametrize(
    "fields",
    [{"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("ä",)}, {"api_keys": (7,)}, {"model_names": ()},
     {"model_names": ("",)}, {"max_body_bytes": 1}, {"max_messages": 5000}, {"deadline_seconds": 0.0},
     {"max_wait_seconds": -1.0}, {"keep_alive_seconds": float("nan")}, {"max_requests": 0}],
    ids=str,
)  # fmt: skip
def test_settings_have_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))) as raised:
        Settings(**fields)
    assert "a b" not in str(raised.value)


# Sizes.


def padded(size: int) -> bytes:
    body = json.dumps(ask(max_tokens=1)).encode()
    return body + b" " * (size - len(body))


def test_bodies_have_a_size(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for size, status in ((2000, 200), (2001, 413), (100_000, 413)):
        chunks = [padded(size)[at : at + 700] for at in range(0, size, 700)]
        for content in (padded(size), iter(chunks)):  # with a length, and in chunks
            response = http.post(CHAT, content=content, headers=headers)
            assert response.status_code == status, size
            if status == 413:
                assert error_of(response)["code"] == "request_too_large" and "2,000 bytes" in response.text
                assert "Settings(max_body_bytes=...)" in response.text
    assert http.post(CHAT, content=padded(500), headers=headers).status_code == 200


def test_a_length_that_is_wrong(url: str) -> None:
    """What is announced counts, before a byte of it has come."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: {10**15}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: 1000\r\n\r\nab"
        connection.sendall(head.encode())
        start = time.monotonic()
        assert connection.recv(1000).startswith(b"HTTP/1.1 408") and time.monotonic() - start < 5


def test_as_many_as_the_house_holds(model: CARDChatModel) -> None:
    with served(model, max_requests=2) as url:
        held = [posted(url, CHAT, ask(**LONG)) for _ in range(2)]
        wait_until(lambda: num_open(model) == 2)
        response = httpx.post(url + CHAT, json=ask())
        assert response.status_code == 429 and error_of(response)["code"] == "rate_limit_exceeded"
        assert "Settings(max_requests=...)" in response.text
        assert response.headers["retry-after"] == "1" and httpx.get(f"{url}/version").status_code == 200
        for connection in held:
            connection.close()
        wait_until(lambda: num_open(model) == 0)
        wait_until(lambda: httpx.post(url + CHAT, json=ask(max_tokens=1)).status_code == 200)


def test_who_has_no_key_keeps_nobody_out(model: CARDChatModel) -> None:
    """However slowly a body comes to an open path, or with a wrong key, it is not waited for."""
    with served(model, max_requests=2, api_keys=KEYS) as url:
        host, port = url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(4)]
        for connection, path in zip(held, ("/version", "/health", CHAT, "/"), strict=True):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\nab".encode())
        for connection, status in zip(held, (200, 200, 401, 200), strict=True):
            connection.settimeout(5)
            assert connection.recv(100).startswith(f"HTTP/1.1 {status}".encode())
        key = {"authorization": f"Bearer {KEYS[0]}"}
        assert httpx.post(url + CHAT, json=ask(max_tokens=1), headers=key).status_code == 200
        for connection in held:
            connection.close()


# Browsers.


def test_what_pages_of_other_sites_post(http: httpx.Client) -> None:
    response = http.post(CHAT, json=ask(max_tokens=1), headers={"sec-fetch-site": "cross-site"})
    assert response.status_code == 403 and error_of(response)["code"] == "cross_site"
    assert http.post(CHAT, json=ask(max_tokens=1), headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert http.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link leads here


def test_what_browsers_are_told(http: httpx.Client) -> None:
    origin = {"origin": "https://evil.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for response in (
        http.post(CHAT, json=ask(max_tokens=1), headers=origin),
        http.post(CHAT, json=ask(max_tokens=1, stream=True), headers=origin),
        http.post(CHAT, json={}, headers=origin),
        http.get("/none", headers=origin),
        http.options(CHAT, headers=asked),
        httpx.get(f"{http.base_url}/v1/models", headers=origin),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert response.headers["cache-control"] == "no-store" and response.headers["referrer-policy"] == "no-referrer"


def test_hosts(model: CARDChatModel) -> None:
    with served(model, hosts=("127.0.0.1", "localhost", "[::1]")) as url:
        for host, status in (("127.0.0.1:8000", 200), ("LOCALHOST", 200), ("[::1]:80", 200), ("evil.example", 403),
                             ("localhost.evil.example:80", 403)):  # fmt: skip
            response = httpx.get(f"{url}/version", headers={"host": host})
            assert response.status_code == status, host
        response = httpx.post(url + CHAT, json=ask(), headers={"host": "evil.example"})
        assert response.status_code == 403 and error_of(response)["code"] == "unknown_host"


def test_no_websockets(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "GET /version HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        connection.sendall(
            f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert b" 101 " not in connection.recv(1000)


# The end.


async def test_draining_refuses_new_requests(model: CARDChatModel) -> None:
    app = create_app(model, Settings(model_names=(NAME,)))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.post(CHAT, json=ask(max_tokens=1))).status_code == 200
        app.state.service.draining = True
        response = await http.post(CHAT, json=ask(max_tokens=1))
        assert response.status_code == 503 and error_of(response)["code"] == "shutting_down"
        assert response.headers["retry-after"] and (await http.get("/version")).status_code == 200
    assert model.invoke("Q", max_tokens=1)


@pytest.mark.slow
def test_answers_that_run_when_the_server_ends(model: CARDChatModel) -> None:
    with ThreadPoolExecutor(1) as reader:
        with served(model, end_seconds=60) as url:
            connection = posted(url, CHAT, ask(**LONG | {"max_tokens": 600}, stream=True))
            answer = reader.submit(lambda: b"".join(iter(lambda: connection.recv(1 << 16), b"")))
            wait_until(lambda: model.engine.num_running == 1)
        assert not model.engine.num_running
        assert b"data: [DONE]" in answer.result(20)
    connection.close()
    assert num_open(model) == 0


# Numbers.


@pytest.mark.slow
def test_what_is_counted(model: CARDChatModel) -> None:
    with served(model, max_wait_seconds=0.5) as url, httpx.Client(base_url=url, timeout=20) as http:
        with says(model, "the secret word"):
            for stream in (False, True):
                http.post(CHAT, json=ask(stream=stream))
                http.post("/v1/completions", json={"model": NAME, "prompt": "secret", "stream": stream})
        http.post(CHAT, json={})
        http.get("/a/secret/path")
        http.post(CHAT, json=ask(**LONG, stream=True), headers={"x-request-timeout": "0.3"})
        for stream in (False, True):
            with posted(url, CHAT, ask(**LONG, stream=stream)):
                wait_until(lambda: model.engine.num_running == 1)
            wait_until(lambda: num_open(model) == 0)
        wait_until(lambda: numbers(http).get(("requests_total", CHAT, "499"), 0) == 2)
        found, text = numbers(http), http.get("/metrics").text
    counted = {key[1:]: value for key, value in found.items() if key[0] == "requests_total" and "/metrics" not in key}
    assert counted == {
        (CHAT, "200"): 2, ("/v1/completions", "200"): 2, (CHAT, "400"): 1, ("other", "404"): 1, (CHAT, "504"): 1,
        (CHAT, "499"): 2,
    }  # fmt: skip
    assert found["prompt_tokens_total",] >= 2 * 12 + 2 * 6 and found["output_tokens_total",] >= 4 * 16
    for name in ("time_to_first_token_seconds_count", "hit_rate_count", "tokens_per_second_count"):
        assert found[name,] >= 4
    assert found["cached_tokens_total",] >= 10 and "secret" not in text and "tiny" not in text
    with says(model, "ab" * 30), served(model) as url, httpx.Client(base_url=url) as http:
        card = http.post(CHAT, json=ask()).json()["card"]
        for name, counted in {"verified": "verified_candidates_total", "accepted": "accepted_tokens_total"}.items():
            found = {key[1]: value for key, value in numbers(http).items() if key[0] == counted}
            assert found == card[f"{name}_by_source"] != {}
