"""LangServe's pages: everything they load is there, and comes from this server; what they read about the routes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest
from langserve.lzstring import LZString
from starlette.testclient import TestClient

from langchain_card import CARDChatModel
from langchain_card.serve import create_app
from tests.support.played import make_pair
from tests.support.served import served

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIXES = ("/card", "/card/chat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("a-folder"))).load() as model:
        yield model


@pytest.fixture(scope="module")
def http(model: CARDChatModel) -> Iterator[httpx.Client]:
    with served(model) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


@pytest.mark.parametrize("prefix", PREFIXES)
def test_playgrounds(http: httpx.Client, prefix: str) -> None:
    link = LZString.compressToEncodedURIComponent('{"configurable":{"max_tokens":3}}')
    for path in (f"{prefix}/playground/", f"{prefix}/playground", f"{prefix}/c/{link}/playground"):
        response = http.get(path, follow_redirects=True)
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
        named = re.findall(r'(?:src|href)="([^"]*)"', response.text)
        assert len(named) == 3 and all(name.startswith(f"{prefix}/playground/") for name in named)
        files = [http.get(name) for name in named] if path.endswith("playground/") else []
        for file in files:
            assert file.status_code == 200 and len(file.content) > 1000
            assert "'self'" in file.headers["content-security-policy"]
        kinds = {file.headers["content-type"].partition(";")[0] for file in files}
        assert kinds == ({"application/javascript", "text/css", "image/vnd.microsoft.icon"} if files else set())
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
        assert re.fullmatch(r"'self' 'unsafe-eval' 'sha256-[\w+/]{43}='", policy["script-src"])
        assert not re.search(r"https?:|\*", response.headers["content-security-policy"])
        assert "____" not in response.text and "a-folder" not in response.text
    for path in ("../../api_handler.py", "%2e%2e/%2e%2e/api_handler.py", "..%2f..%2fplayground.py", "assets", "assets/",
                 "%00", "/etc/passwd", "x" * 5000):  # fmt: skip
        assert http.get(f"{prefix}/playground/{path}").status_code == 404, path


@pytest.mark.parametrize("prefix", PREFIXES)
def test_schemas(http: httpx.Client, prefix: str) -> None:
    for path in (prefix, f"{prefix}/c/anything"):
        config = http.get(f"{path}/config_schema").json()["$defs"]["Configurable"]["properties"]
        assert {name: of["type"] for name, of in config.items()} == {
            "stop": "array", "seed": "integer", "temperature": "number", "max_tokens": "integer",
        }  # fmt: skip
        assert all(of["description"] and "default" not in of for of in config.values())  # the page breaks at null
        asked, answer = (http.get(f"{path}/{name}_schema").json() for name in ("input", "output"))
        assert answer["$defs"]["AIMessage"]["properties"]["type"]["enum"] == ["ai"]  # the chat page looks for it
        if prefix == "/card/chat":
            assert list(asked["properties"]) == ["messages"] and asked["properties"]["messages"]["type"] == "array"
        else:
            assert {"type": "string"} in asked["anyOf"]


def test_a_prefix_of_a_proxy(model: CARDChatModel) -> None:
    with TestClient(create_app(model), root_path="/behind") as http:
        assert 'src="/behind/card/playground/assets/' in http.get("/behind/card/playground/").text


def test_links_are_not_unpacked(http: httpx.Client) -> None:
    """A few kilobytes of a link would be very many."""
    link = LZString.compressToEncodedURIComponent("a" * 200_000)
    assert len(link) < 2000
    start = time.monotonic()
    assert http.get(f"/card/c/{link}/config_schema").status_code == 200 and time.monotonic() - start < 1
