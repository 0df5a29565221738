"""What is wrong with a request is said in OpenAI's shape, whatever the request is; nothing of it is a 500."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from langchain_card import CARDChatModel
from langchain_card import errors as own
from langchain_card.engine.engine import Engine
from langchain_card.serve import Settings
from langchain_card.serve.service import Service
from tests.support.played import make_pair
from tests.support.scripted import Joke
from tests.support.served import NAME, ask, error_of, said, served
from tests.support.tool_calls import TOOL_DICTS

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 8, "max_model_len": 512}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def http(model: CARDChatModel) -> Iterator[httpx.Client]:
    with served(model, max_messages=20) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


def part(**fields: Any) -> dict[str, Any]:
    return said([{"type": "text", "text": "a"}, fields])


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", **fields}]}


FUNCTION = {"type": "function", "function": {"name": "f"}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    # (what is sent, the field that is named, words of the message)
    ({"model": None}, "model", "valid string"),
    ({"messages": None}, "messages", "valid list"),
    ({"messages": []}, "messages", "at least 1"),
    (said(*"Q" * 21), "messages", "20 at most"),
    ({"messages": ["Q"]}, "messages[0]", "valid dictionary"),
    ({"messages": [{"content": "Q"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "function", "content": "Q"}]}, "messages[0].role", "'system', 'developer'"),
    (said(None), "messages[0].content", "must be a string"),
    (said("a", 7), "messages[1].content", "valid"),
    (said({"text": "Q"}), "messages[0].content", "valid"),
    (said([{"text": "Q"}]), "messages[0].content[0].type", "is required"),
    (part(type="image_url", image_url={"url": "data:"}), "messages[0].content[1].type", "image_url.*must be text"),
    (part(type="input_audio", input_audio={}), "messages[0].content[1].type", "input_audio.*must be text"),
    (part(type="file", file={}), "messages[0].content[1].type", "file.*must be text"),
    (part(type="text"), "messages[0].content[1].text", "must be a string"),
    (said("Q", name="a" * 300), "messages[0].name", "at most 256"),
    ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id", "is required"),
    (assistant(tool_calls=[{"id": "c", **FUNCTION}]), "messages[1].tool_calls[0].function.arguments", "is required"),
    (assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {}}]), "messages[1].tool_calls[0].type", "function"),
    (assistant(tool_calls=[{}] * 200), "messages[1].tool_calls", "at most 128"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "for streams only"),
    ({"stream": True, "stream_options": []}, "stream_options", "valid dictionary"),
    ({"n": 2}, "n", "must be 1"),
    ({"n": True}, "n", "valid integer"),
    ({"max_tokens": 0}, "max_tokens", "between 1 and 32,768"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "between 1"),
    ({"max_tokens": "8"}, "max_tokens", "valid integer"),
    ({"max_completion_tokens": 10**30}, "max_tokens", "between 1 and 32,768"),
    ({"temperature": -1}, "temperature", "between 0"),
    ({"temperature": 5}, "temperature", "between 0.0 and 2.0"),
    ({"temprature": 0.5}, "temprature", "did you mean temperature"),
    ({"max_token": 5}, "max_token", "did you mean max_tokens"),
    ({"num_predict": 3}, "num_predict", "did you mean max_tokens"),
    ({"temperature": 10**400}, "temperature", "valid number|finite"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 1.1}, "top_p", "between 0"),
    ({"top_k": -2}, "top_k", "between 0"),
    ({"min_p": 2}, "min_p", "between 0"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "between -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between 0"),
    ({"seed": -2}, "seed", "between 0"),
    ({"seed": 2**63}, "seed", "between 0"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"seed": float("1e300")}, "seed", "between 0"),
    ({"stop": ["a", ""]}, "stop", "1 to 256 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop[0]", "valid string"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "whole number"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "between 0"),
    ({"logit_bias": {"65": 101}}, "logit_bias[65]", "between -100"),
    ({"logit_bias": {"65": "1"}}, "logit_bias.65", "valid number"),
    ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
    ({"schedule": "fast"}, "schedule", "'auto', 'plain'"),
    ({"card": "x"}, "card", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "x"}}, "audio", "is not supported.*text only"),
    ({"functions": [{}]}, "functions", "is not supported.*tools"),
    ({"function_call": {"name": "f"}}, "function_call", "is not supported.*tool_choice"),
    ({"web_search_options": {}}, "web_search_options", "is not supported"),
    ({"tools": [{}]}, "tools[0]", "cannot be read|must"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]", "cannot be read|must be a function"),
    ({"tools": ["f"]}, "tools[0]", "valid dictionary"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1]", "earlier tool"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "must have a name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools[0]", "JSON schema|cannot"),
    ({"tools": [FUNCTION] * 129}, "tools", "at most 128"),
    ({"tool_choice": "required"}, "tool_choice", "there are none"),
    ({"tools": TOOL_DICTS, "tool_choice": "nope"}, "tool_choice", "must be one of add"),
    ({"tools": TOOL_DICTS, "tool_choice": {"type": "function"}}, "tool_choice", "must be one of add"),
    ({"tools": TOOL_DICTS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "one of add"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"response_format": "json"}, "response_format", "valid dictionary"),
    ({"response_format": {"type": "yaml"}}, "response_format", "must be one of text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must hold a schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}}, "response_format", "."),
    ({"response_format": {"type": "json_object"}, "max_tokens": 1}, "max_tokens", "shortest"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_the_field_at_fault_is_named(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = http.post(CHAT, json=ask(**fields))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == param and re.search(words, error["message"]), error
    assert len(error["message"]) < 700 and "target" not in error["message"].replace("target tokenizer", ""), error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "valid"),
        ({"prompt": []}, "prompt", "must be one text"),
        ({"prompt": [[]]}, "prompt", "must be one text"),
        ({"prompt": [True]}, "prompt", "must be one text"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": ["a", "b"]}, "prompt", "must be one text"),
        ({"prompt": [1.5]}, "prompt", "must be one text"),
        ({"prompt": [-1]}, "prompt", "between 0"),
        ({"prompt": [10**9]}, "prompt", "between 0"),
        ({"prompt": [10**30]}, "prompt", "between 0"),
        ({"echo": True}, "echo", "is not supported"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"best_of": 2}, "best_of", "must be 1"),
        ({"n": 0}, "n", "must be 1"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"max_tokens": -1}, "max_tokens", "between 1"),
    ],
    ids=str,
)
def test_likewise_of_continuations(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = http.post(TEXT, json={"model": NAME, "prompt": "abc", **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"], error


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_too_long(http: httpx.Client, path: str, stream: bool) -> None:
    body = ask(**said("x" * 600)) if path == CHAT else {"model": NAME, "prompt": "x" * 600}
    response = http.post(path, json={**body, "stream": stream})
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert re.search(r"6\d\d tokens.*512 tokens", error["message"])
    assert error["param"] == ("messages" if path == CHAT else "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_knows_prompts_that_are_too_long(http: httpx.Client, stream: bool) -> None:
    chat = ChatOpenAI(base_url=f"{http.base_url}/v1", model=NAME, api_key=SecretStr("x"), max_retries=0)
    with pytest.raises(ContextOverflowError, match="prompt is too long"):
        [*chat.stream("x" * 600)] if stream else chat.invoke("x" * 600)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_texts_that_cannot_fit_are_not_read(
    http: httpx.Client, model: CARDChatModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Reading one of a million characters would take seconds, and tell the same."""
    text = "x" * 1_000_000
    for name in ("apply_chat_template", "encode"):
        monkeypatch.setattr(model.engine.tokenizer, name, unread(getattr(model.engine.tokenizer, name)))
    response = http.post(path, json=ask(**said(text)) if path == CHAT else {"model": NAME, "prompt": text})
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert re.search(r"1,000,0\d\d characters.*512 tokens", error["message"])


def unread(read: Any) -> Any:
    def reads(*args: Any, **options: Any) -> Any:
        assert options.get("tokenize") is False, "it is read"
        return read(*args, **options)

    return reads


def test_models_that_are_not_served(http: httpx.Client, model: CARDChatModel) -> None:
    for response in (
        http.post(CHAT, json=ask() | {"model": "gpt-4"}),
        http.post(CHAT, json=ask() | {"model": model.model}),
        http.post(TEXT, json={"model": "x" * 256, "prompt": "a"}),
        http.get("/v1/models/gpt-4"),
        http.get("/v1/models/..%2f..%2fetc/passwd"),
        http.get("/v1/models/%ff%fe"),
    ):
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert f"there is {NAME}, alias" in error["message"] and len(error["message"]) < 300


def test_routes_that_are_not_there(http: httpx.Client) -> None:
    for method, path, status in (("POST", "/", 405), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405),
                                 ("GET", "/docs", 404), ("DELETE", "/v1/models", 405)):  # fmt: skip
        response = http.request(method, path)
        assert response.status_code == status and error_of(response)["type"] == "invalid_request_error"
    words = error_of(http.post("/v1/responses"))["message"]
    assert words.startswith("/v1/responses: is not a path of this server") and CHAT in words and "openapi.json" in words


# What the engine raises.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("raised", "status", "kind", "code", "client"),
    [
        (own.EngineBusyError("max_queue", 1, "full"), 429, "rate_limit_error", "rate_limit_exceeded",
         openai.RateLimitError),
        (own.EngineClosedError("engine", "/secret/path", "the engine was closed"), 503, "server_error",
         "shutting_down", openai.InternalServerError),
        (own.EngineError("request", 1, "/secret/path"), 503, "server_error", "engine_error",
         openai.InternalServerError),
        (own.GenerationTimeoutError("timeout", 1, "too long"), 504, "timeout_error", "timeout",
         openai.InternalServerError),
        (own.DeviceError("device", "cuda", "/secret/path"), 500, "server_error", "internal_error",
         openai.InternalServerError),
        (RuntimeError("/secret/path"), 500, "server_error", "internal_error", openai.InternalServerError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_what_the_engine_raises(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, raised: Exception, status: int, kind: str, code: str,
    client: type[Exception], path: str, stream: bool,
) -> None:  # fmt: skip
    def submit(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(Engine, "submit", submit)
    body = ask() if path == CHAT else {"model": NAME, "prompt": "a"}
    response = http.post(path, json={**body, "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert "secret" not in response.text and response.headers["x-content-type-options"] == "nosniff"
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert response.headers.get("x-should-retry") == ("false" if status == 504 else None)
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as real, pytest.raises(client):
        real.chat.completions.create(**ask(stream=stream))


def test_paths_of_models_are_not_told(http: httpx.Client, model: CARDChatModel) -> None:
    names = Service(model, Settings())._shown
    assert names[model.model] == "target" and names[str(model.draft_model)] == "draft"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.engine.tokenizer, "chat_template", "{{ raise_exception('no') }}")
        error = error_of(http.post(CHAT, json=ask()))
    assert "the chat template of tiny refuses them: no" in error["message"] and model.model not in error["message"]


def test_joke_is_whole(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "joke", "schema": Joke.model_json_schema()}}
    answer = http.post(CHAT, json=ask(response_format=form, max_tokens=100)).json()
    assert Joke(**json.loads(answer["choices"][0]["message"]["content"]))
