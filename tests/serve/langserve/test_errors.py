"""What may be said to LangServe's routes, and what is said of it where it is wrong."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from langserve import RemoteRunnable
from langserve.lzstring import LZString

from langchain_card import CARDChatModel, Limits
from tests.support.langserve_routes import PREFIXES, ROUTES, body, contents
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import ask, error_of, num_open, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {
        "max_tokens": 4,
        "limits": Limits(max_num_seqs=1, max_queue=2),
    }
    with CARDChatModel(**fields, logit_bias={256: -100}).load() as model:
        yield model


@pytest.fixture(scope="module")
def http(model: CARDChatModel) -> Iterator[httpx.Client]:
    with served(model, max_messages=20) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "config",
    [{"configurable": {"model": "/etc", "draft_model": "/etc", "device": "cuda:9", "chat_template": "x"}},
     {"configurable": {"model_kwargs": {"a": 1}, "thread_id": "7", "tools": [], "top_k": 1, "schedule": "no"}},
     {"callbacks": [1], "run_name": "x" * 100, "tags": 7, "metadata": {"a": []}, "run_id": "no", "timeout": 0},
     {"max_concurrency": 10**9, "recursion_limit": -1, "max_tokens": 1, "stop": ["a"], "model": "/etc"}],
    ids=["models", "options", "tracing", "bounds"],
)  # fmt: skip
def test_nothing_else_reaches_the_model(http: httpx.Client, route: str, config: dict[str, Any]) -> None:
    expected = contents(http.post(f"/card/{route}", json=body(route)))
    assert contents(http.post(f"/card/{route}", json=body(route, config=config, model="/etc", stop="x"))) == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    # (what is said besides, or instead of, the input; the field that is named; words of the message)
    ({"input": 5}, "input", "valid string"),
    ({"input": None}, "input", "valid string"),
    ({"input": {"text": 5}}, "input.text", "valid string"),
    ({"input": {"messages": 5}}, "input.messages", "Sequence"),
    ({"input": {"a": 1}}, "input.text", "required"),
    ({"input": []}, "input", "message"),
    ({"input": ["Q"]}, "input", "no message"),
    ({"input": [{"type": "human"}]}, "input[0]", "valid string"),
    ({"input": [{"type": "nobody", "content": ""}]}, "input[0]", "nobody"),
    ({"input": [{"type": "ai", "content": "", "tool_calls": 5}]}, "input", "no message"),
    ({"input": [{"type": "human", "content": "Q"}] * 21}, "input", "20 at most"),
    ({"input": {"messages": [{"type": "human", "content": "Q"}] * 21}}, "input", "20 at most"),
    ({"input": [{"type": "human", "content": [{"type": "image_url", "image_url": "x"}]}]}, "input", "reads text only"),
    ({"input": "Q" * 9000}, "input", "8,192 tokens"),
    ({"kwargs": {"stop": ["a"]}}, "kwargs", "config="),
    ({"kwargs": []}, "kwargs", "valid dictionary"),
    ({"config": 5}, "config", "dictionary"),
    ({"config": {"configurable": []}}, "config.configurable", "dictionary"),
    *(({"config": {"configurable": {name: value}}}, f"config.configurable.{name}", words) for name, value, words in [
        ("temperature", "hot", "valid number"), ("max_tokens", 2.5, "valid integer"), ("max_tokens", "3", "integer"),
        ("seed", True, "valid integer"), ("stop", 7, "valid"),
    ]),
    *(({"config": {"configurable": {name: value}}}, name, words) for name, value, words in [
        ("temperature", -1, "between 0.0 and 10.0"), ("temperature", 11, "between 0.0 and 10.0"),
        ("max_tokens", 0, "between 1 and"), ("max_tokens", 10**9, "between 1 and"), ("max_tokens", 10**30, "between"),
        ("seed", -1, "between 0"), ("seed", 2**64, "between"), ("stop", [""], "1 to 256"),
        ("stop", ["a"] * 17, "16"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "param", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(http: httpx.Client, model: CARDChatModel, said: Any, param: str, words: str) -> None:
    for route in ROUTES:
        sent = body(route, said.get("input", "Q"), **{name: of for name, of in said.items() if name != "input"})
        response = http.post(f"/card/{route}", json=sent)
        error = error_of(response)
        assert response.status_code == 400 and words in error["message"], (route, error)
        found = str(error["param"]).replace("inputs[0]", "input").replace("inputs", "input")
        assert (found if route == "batch" else error["param"]) == param, (route, error)
    assert num_open(model) == 0


def test_batches_of_very_many_messages(http: httpx.Client) -> None:
    """They are counted before they are looked at."""
    response = http.post("/card/batch", json={"inputs": [[{}] * 200] * 400})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == "inputs" and "65,536 messages" in error["message"]


def test_a_batch_fits_into_the_queue(http: httpx.Client, model: CARDChatModel) -> None:
    assert len(contents(http.post("/card/batch", json={"inputs": ["Q"] * 3}))) == 3  # one runs
    assert contents(http.post("/card/batch", json={"inputs": []})) == []
    error = error_of(response := http.post("/card/batch", json={"inputs": ["Q"] * 4}))
    assert response.status_code == 400 and error["param"] == "inputs" and "max_queue = 2" in error["message"]
    error = error_of(response := http.post("/card/batch", json={"inputs": ["Q"], "config": [{}, {}]}))
    assert response.status_code == 400 and error["param"] == "config" and "each of the 1" in error["message"]
    error = error_of(response := http.post("/card/batch", json={"inputs": ["Q", "Q" * 9000]}))
    assert response.status_code == 400 and error["param"] == "inputs"
    wait_until(lambda: num_open(model) == 0)
    for sent in ({"inputs": ["Q"] * 5000}, {"inputs": [[{"type": "human", "content": ""}] * 5000]}):
        assert "at most" in error_of(http.post("/card/batch", json=sent))["message"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_is_not_there(http: httpx.Client, prefix: str) -> None:
    """No answers by links, and nothing that LangServe sends to others."""
    link = LZString.compressToEncodedURIComponent('{"configurable":{"model":"/etc"}}')
    paths = [f"c/{link}/{route}" for route in ROUTES]
    for path in [*paths, "feedback", "token_feedback", "public_trace_link", "docs"]:
        for method in ("GET", "POST", "PUT", "HEAD", "DELETE"):
            assert http.request(method, f"{prefix}/{path}", json={}).status_code in (404, 405), path
    for route in ROUTES:
        assert http.get(f"{prefix}/{route}").status_code == 405


def test_the_door_is_the_same(model: CARDChatModel) -> None:
    with served(model, api_keys=("a-key",), max_body_bytes=2000) as url:
        for path in (*ROUTES, "playground/", "config_schema"):
            for prefix in PREFIXES:
                response = httpx.request("POST" if path in ROUTES else "GET", f"{url}{prefix}/{path}")
                assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer a-key"}
        remote: Any = RemoteRunnable(f"{url}/card", headers=headers)
        assert remote.invoke("Q").content
        with pytest.raises(httpx.HTTPStatusError, match="413"):
            remote.invoke("Q" * 2000)
        text = {**headers, "content-type": "text/plain"}  # what a page of another origin can send
        assert httpx.post(f"{url}/card/invoke", content=b'{"input": "Q"}', headers=text).status_code == 400


def test_without_langserve_there_are_no_such_routes(monkeypatch: pytest.MonkeyPatch, model: CARDChatModel) -> None:
    monkeypatch.setitem(sys.modules, "langserve", None)
    with served(model) as url:
        assert httpx.post(f"{url}/card/invoke", json=body("")).status_code == 404
        assert httpx.get(f"{url}/card/playground/").status_code == 404
        assert httpx.post(f"{url}/v1/chat/completions", json=ask(max_tokens=1)).status_code == 200


ANY = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers()
    | strategies.floats(allow_nan=False, allow_infinity=False) | strategies.text(max_size=8),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=8), inner),
    max_leaves=6,
)  # fmt: skip
KINDS = strategies.sampled_from(["human", "ai", "system", "tool", "function", "chat", "AIMessageChunk", "x"])
NAMES = ["additional_kwargs", "tool_calls", "invalid_tool_calls", "name", "id", "tool_call_id", "role", "status",
         "usage_metadata", "tool_call_chunks", "response_metadata", "artifact", "chunk_position"]  # fmt: skip
MESSAGE = strategies.builds(
    lambda kind, content, more: {**more, "type": kind, "content": content},
    KINDS,
    strategies.text(max_size=8) | ANY,
    strategies.dictionaries(strategies.sampled_from(NAMES), ANY, max_size=3),
)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.slow
def test_messages_of_all_kinds(http: httpx.Client, route: str) -> None:
    statuses: set[int] = set()

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(asked=strategies.lists(MESSAGE, min_size=1, max_size=2) | ANY)
    def explore(asked: Any) -> None:
        response = http.post(f"/card/{route}", json=body(route, asked))
        assert response.status_code in (200, 400), response.text
        assert "event: error" not in response.text
        statuses.add(response.status_code)

    explore()
    assert statuses == {200, 400}


def test_the_log_is_not_filled(model: CARDChatModel) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with served(model) as url:
            for route in ROUTES * 2:
                httpx.post(f"{url}/card/{route}", json=body(route))
    assert not found
