"""Bodies that nobody means well: each is answered or refused, and the next request is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from langchain_card import CARDChatModel
from tests.support.played import make_pair
from tests.support.served import ask, error_of, said, served

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 8, "max_model_len": 512}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def http(model: CARDChatModel) -> Iterator[httpx.Client]:
    with served(model, max_messages=20) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


NESTED = b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
SCHEMA = b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'  # noqa: E501
FORM = b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":%s}}}'  # noqa: E501
CONTENT = b'{"model":"tiny","messages":[{"role":"user","content":%s}]}'


def nested(depth: int) -> bytes:
    return b'{"type":"object","properties":{"a":' * depth + b'{"type":"string"}' + b"}}" * depth


HOSTILE: dict[str, tuple[bytes, set[int]]] = {
    # by name: the body, and the statuses that will do
    "nothing": (b"", {400}),
    "no json": (b"{", {400}),
    "a list": (b"[]", {400}),
    "null": (b"null", {400}),
    "a number": (b"7", {400}),
    "NaN": (b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"temperature":NaN}', {400}),
    "infinity": (b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"temperature":1e999}', {400}),
    "minus infinity": (b'{"model":"tiny","messages":[{"role":"user","content":"Q"}],"top_p":-Infinity}', {400}),
    "a huge whole number": (CONTENT[:-1] % b'"Q"' + b',"max_tokens":' + b"9" * 4000 + b"}", {400}),
    "a larger one": (CONTENT[:-1] % b'"Q"' + b',"seed":' + b"9" * 100_000 + b"}", {400}),
    "deep nesting": (NESTED, {400}),
    "deep nesting, left open": (b"[" * 1_000_000, {413}),
    "10,000 messages": (json.dumps(ask(**said(*["Q"] * 10_000))).encode(), {400}),
    "10,000 empty ones": (json.dumps(ask(messages=[{}] * 10_000)).encode(), {400}),
    "half a character": (CONTENT % b'"\\ud800"', {400}),
    "half a character as a key": (CONTENT[:-1] % b'"Q"' + b',"\\udfff":1}', {400}),
    "no UTF-8": (CONTENT % b'"\xff\xfe"', {400}),
    "UTF-16": (json.dumps(ask()).encode("utf-16"), {400}),
    "a mark of byte order": (b"\xef\xbb\xbf" + json.dumps(ask()).encode(), {200, 400}),
    "a NUL": (CONTENT % b'"a\\u0000b"', {200}),
    "all planes": (CONTENT % '"\u202e\U0010ffff\ufffe\u0301\u200d😀"'.encode(), {200}),
    "control tokens": (CONTENT % b'"<|end|><ai><tool_call>"', {200}),
    "a field twice": (CONTENT[:-1] % b'"Q"' + b',"n":1,"n":5}', {400}),
    "a field twice, the last one right": (CONTENT[:-1] % b'"Q"' + b',"n":5,"n":1}', {200}),
    "a long text": (CONTENT % (b'"' + b"x" * 1_000_000 + b'"'), {400}),
    "a long text without an end of a word": (CONTENT % (b'"' + b" " * 1_000_000 + b'"'), {400}),
    "a template": (CONTENT % b'"{{ 1/0 }}{% for i in range(9999999) %}x{% endfor %}"', {200}),
    "a schema that never ends": (FORM % b'{"$ref":"#"}', {400}),
    "a schema that is nowhere": (FORM % b'{"$ref":"http://127.0.0.1:1/x"}', {200}),
    "a schema of a file": (FORM % b'{"$ref":"file:///etc/passwd"}', {200}),
    "a deep schema": (FORM % nested(60), {200, 400}),
    "an expression that explodes": (FORM % b'{"type":"string","pattern":"(a{1,1000}){1,1000}"}', {200, 400}),
    "a schema with infinity": (FORM % b'{"type":"number","minimum":1e999}', {200, 400}),
    "a tool with infinity": (SCHEMA % b'{"type":"object","properties":{"a":{"minimum":1e999}}}', {200, 400}),
    "a wide schema": (FORM % json.dumps({"enum": [f"v{i}" for i in range(50_000)]}).encode(), {200, 400}),
    "a schema with a NUL": (FORM % b'{"type":"object","properties":{"\\u0000":{"const":"\\u0000"}}}', {200, 400}),
    "a null schema": (FORM % b"null", {400}),
    "a tool with odd parameters": (SCHEMA % b'{"type":"object","properties":[]}', {200, 400}),
    "a tool with odd types": (SCHEMA % b'{"type":["object"],"required":7}', {200, 400}),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("stream", [False, True])
def test_hostile_bodies(http: httpx.Client, name: str, stream: bool) -> None:
    body, statuses = HOSTILE[name]
    if stream and body.startswith(b'{"model"'):
        body = body.replace(b'{"model"', b'{"stream":true,"model"', 1)
    response = http.post(CHAT, content=body, headers=JSON_TYPE)
    assert response.status_code in statuses, response.text[:500]
    if response.status_code != 200:
        error = error_of(response)
        assert len(response.content) < 2000 and error["type"] == "invalid_request_error"
    elif stream:
        assert response.text.endswith("data: [DONE]\n\n")
    assert http.post(CHAT, json=ask(max_tokens=1)).status_code == 200


def test_bodies_of_other_types(http: httpx.Client) -> None:
    """A web page may send these anywhere, without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        for content in (json.dumps(ask()).encode(), b"[]", b""):
            headers = {"content-type": kind} if kind else {}
            response = http.post(CHAT, content=content, headers=headers)
            error = error_of(response)
            assert response.status_code == 400 and error["message"] == "content-type: must be application/json.", kind
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        content = json.dumps(ask(max_tokens=1)).encode()
        assert http.post(CHAT, content=content, headers={"content-type": kind}).status_code == 200
