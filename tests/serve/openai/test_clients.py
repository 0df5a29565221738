"""The real clients of OpenAI and LangChain against a real server: every field of their interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from langchain_card import CARDChatModel
from langchain_card.serve import Settings
from langchain_card.serve.service import Service
from tests.support.played import make_pair, played
from tests.support.scripted import JOKE, PARAMETERS, Joke, add, weather
from tests.support.served import CARD, NAME, ask, rounded, says, served
from tests.support.tool_calls import ADD, CALLED, JSON, TOOL_DICTS, F, G
from tests.support.vocabularies import THINKS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*is experimental")]

STATS = {"rounds", "output_tokens", "accepted", "mean_accepted_length", "acceptance_rate", "hit_rate", "schedule"}
STATS |= {"lossy", "seconds", "target_busy_seconds", "draft_busy_seconds"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair"), THINKS)).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def langchain(url: str) -> Callable[..., ChatOpenAI]:
    return lambda **options: ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="none", max_retries=0, **options)  # type: ignore[arg-type]


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    return [*client.chat.completions.create(**ask(stream=True, **options))]


def joined(chunks: list[Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Thought, text, calls and the reason of the end."""
    thought, text, calls, reasons = "", "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    assert call.index == len(calls) and call.id and call.type == "function"
                    calls.append((call.function.name, ""))
                calls[call.index] = calls[call.index][0], calls[call.index][1] + call.function.arguments
    (reason,) = reasons
    return thought, text, calls, reason


def made(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


# Answers.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {"65": 100.0}, "max_tokens": 4},
        {"stop": "A", "logit_bias": {"65": 9}},
        {"stop": ["A", "B"], "logit_bias": {"66": 9}},
        {"extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "schedule": "plain"}, "temperature": 0.8,
         "seed": 1},
    ],
)  # fmt: skip
def test_answers_are_the_models_own(model: CARDChatModel, client: openai.OpenAI, options: dict[str, Any]) -> None:
    beside = {name: value for name, value in options.items() if name != "extra_body"} | options.get("extra_body", {})
    own = model.invoke("Q", **beside)
    answer = client.chat.completions.create(**ask(**options))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (own.text, own.response_metadata["finish_reason"])
    assert choice.message.role == "assistant" and choice.message.tool_calls is None and choice.logprobs is None
    assert own.usage_metadata is not None and answer.usage is not None and answer.object == "chat.completion"
    counts = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": answer.usage.completion_tokens}
    assert counts.items() <= own.usage_metadata.items() and sum(counts.values()) == answer.usage.total_tokens
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens >= 10
    assert answer.model == NAME and answer.id.startswith("chatcmpl-") and set(answer.card) >= CARD  # type: ignore[attr-defined]
    chunks = streamed(client, **options)
    assert joined(chunks) == ("", own.text, [], choice.finish_reason)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.object for chunk in chunks} == {
        "chat.completion.chunk"
    }
    assert [chunk for chunk in chunks if hasattr(chunk, "card")] == [chunks[-1]] and set(chunks[-1].card) >= CARD


async def test_the_async_client(url: str, model: CARDChatModel) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**ask(max_tokens=7))
        pieces = [piece async for piece in await client.chat.completions.create(**ask(max_tokens=7, stream=True))]
        page = [each.id async for each in client.models.list()]
    assert whole.choices[0].message.content == joined(pieces)[1] == model.invoke("Q", max_tokens=7).text
    assert page == [NAME, "alias"]


def test_streams_tell_usage_when_asked(client: openai.OpenAI) -> None:
    *others, last = streamed(client, max_tokens=4, stream_options={"include_usage": True})
    assert last.choices == [] and all(chunk.usage is None and chunk.choices for chunk in others)
    whole = client.chat.completions.create(**ask(max_tokens=4)).usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
    assert all(chunk.usage is None and chunk.choices for chunk in streamed(client, max_tokens=4))


def test_log_probabilities(model: CARDChatModel, client: openai.OpenAI) -> None:
    own = model.invoke("Q", max_tokens=6, logprobs=True, top_logprobs=3).response_metadata["logprobs"]["content"]
    for chunks in (
        [client.chat.completions.create(**ask(max_tokens=6, logprobs=True, top_logprobs=3))],
        streamed(client, max_tokens=6, logprobs=True, top_logprobs=3),
    ):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
        found = [entry.model_dump() for choice in choices for entry in choice.logprobs.content]
        assert rounded(found) == rounded(own) and all(len(entry["top_logprobs"]) == 3 for entry in found)
        assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in found)
    assert client.chat.completions.create(**ask(max_tokens=2, logprobs=False)).choices[0].logprobs is None


def test_conversations_of_all_roles(model: CARDChatModel, client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    history: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm.", "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "tool_calls": [broken], "content": "So"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": ""},
    ]
    prompts: list[str] = []
    with says(model, "Well.", prompts):
        client.chat.completions.create(**ask(messages=history))
    assert prompts == [
        "<system>Be short.\n<user>1+2?\n"
        '<assistant><think>Hm.</think>```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n'
        '<user>Result of add:\n3\n<assistant>So\n{"name": "add", "arguments": {"a": \n<assistant>No.\n<user>\n<ai>'
    ]


def test_thoughts_are_apart(model: CARDChatModel, client: openai.OpenAI) -> None:
    with says(model, "<think>Let me see.</think>It is 4."):
        whole = client.chat.completions.create(**ask())
        thought, text, calls, reason = joined(streamed(client))
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "It is 4.") == (thought, text)  # type: ignore[attr-defined]
    assert (calls, reason) == ([], "stop") and whole.usage.completion_tokens_details.reasoning_tokens > 10


def test_what_changes_nothing_is_ignored(model: CARDChatModel, client: openai.OpenAI) -> None:
    more = {"user": "u", "metadata": {"a": "b"}, "store": True, "n": 1, "modalities": ["text"], "service_tier": "auto"}
    other = {
        "chat_template": "{{ 1/0 }}",
        "draft_model": "/etc/passwd",
        "chat_template_kwargs": {"x": 1},
        "audio": None,
    }
    answer = client.chat.completions.create(**ask(max_tokens=3, extra_body={**more, **other}))
    assert answer.choices[0].message.content == model.invoke("Q", max_tokens=3).text


# Who proposed a token.


@pytest.mark.parametrize("answer", ["abcabcabcabcabc", f"<think>I see.</think>So.\n{F}"])
def test_streams_tell_who_proposed_each_token(model: CARDChatModel, client: openai.OpenAI, answer: str) -> None:
    with says(model, answer):
        chunks = streamed(client, tools=TOOL_DICTS, extra_body={"card": True})
    begin, *others, end = [chunk for chunk in chunks if "reading" not in chunk.card]
    tokens = [token for chunk in others for token in chunk.card["tokens"]]
    assert "".join(token["text"] for token in tokens) == answer and len(tokens) == len(answer) + 1
    assert all(set(token) == {"text", "source"} for token in tokens) and begin.card["tokens"] == []
    assert {token["source"] for token in tokens} <= {"", "model", "ngram", "forced"}
    assert all(set(chunk.card["stats"]) == STATS for chunk in others)
    assert set(end.card) >= CARD and end.card["tokens"] == [] and set(end.card["stats"]) == STATS
    proposed = [token["source"] for token in tokens if token["source"]]
    assert {name: proposed.count(name) for name in set(proposed)} == end.card["accepted_by_source"] and proposed
    counts = [chunk.card["stats"]["output_tokens"] for chunk in others]
    assert counts == sorted(counts) and counts[-1] == len(tokens)
    for name in ("seconds", "target_busy_seconds", "draft_busy_seconds"):
        times = [chunk.card["stats"][name] for chunk in [*others, end]]
        assert times == sorted(times) and times[0] >= 0 and (times[-1] > 0 or name.startswith("draft"))


# Tools.


def test_calls(model: CARDChatModel, client: openai.OpenAI) -> None:
    answers = {"So.": ("So.", []), F: ("", CALLED[:1]), f"So.\n{F}\n{G}": ("So.", CALLED)}
    for answer, (text, wanted) in answers.items():
        with says(model, answer):
            whole = client.chat.completions.create(**ask(tools=TOOL_DICTS, parallel_tool_calls=True)).choices[0]
            _, said, calls, reason = joined(streamed(client, tools=TOOL_DICTS, parallel_tool_calls=True))
        assert (whole.message.content or "", made(whole.message.tool_calls)) == (text, wanted)
        assert (said, [(name, json.loads(arguments)) for name, arguments in calls]) == (text, wanted)
        assert whole.finish_reason == reason == ("tool_calls" if wanted else "stop")
        assert (whole.message.content is None) == (not text)
        assert len({call.id for call in whole.message.tool_calls or ()}) == len(wanted)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", set()),
        ("required", {"add", "weather"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_choices_are_enforced(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    options = ask(tools=TOOL_DICTS, tool_choice=choice, parallel_tool_calls=False, max_tokens=100)
    message = client.chat.completions.create(**options).choices[0].message
    found = {name for name, _ in made(message.tool_calls)}
    assert found <= names and len(found) == bool(names)


def test_a_call_that_a_stop_string_cuts_is_none(model: CARDChatModel, client: openai.OpenAI) -> None:
    with says(model, f"So. {F}"):
        whole = client.chat.completions.create(**ask(tools=TOOL_DICTS, stop='"b"')).choices[0]
        _, _, calls, reason = joined(streamed(client, tools=TOOL_DICTS, stop='"b"'))
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("So.", None, "stop")
    ((name, arguments),) = calls
    assert (name, reason) == ("add", "stop")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


# Documents.


@pytest.mark.parametrize("strict", [None, False, True])
def test_documents(model: CARDChatModel, client: openai.OpenAI, strict: bool | None) -> None:
    said = {} if strict is None else {"strict": strict}
    form = {"type": "json_schema", "json_schema": {"name": "joke", "schema": PARAMETERS, **said}}
    random = client.chat.completions.create(**ask(response_format=form)).choices[0].message.content
    assert isinstance(Joke(**json.loads(random or "")), Joke)
    with says(model, JSON):
        whole = client.chat.completions.create(**ask(response_format=form)).choices[0].message.content
        assert json.loads(whole or "") == JOKE == json.loads(joined(streamed(client, response_format=form))[1])


def test_other_forms(model: CARDChatModel, client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**ask(response_format={"type": "text"})).choices[0].message.content
    assert text == model.invoke("Q").text
    written = client.chat.completions.create(**ask(response_format={"type": "json_object"})).choices[0].message.content
    assert isinstance(json.loads(written or ""), dict)
    with says(model, JSON):
        parsed = client.chat.completions.parse(**ask(response_format=Joke)).choices[0].message.parsed
    assert parsed == Joke(**JOKE)


# LangChain's own client.


@pytest.mark.asyncio(loop_scope="module")  # the client keeps its connections
async def test_langchains_client(model: CARDChatModel, langchain: Callable[..., ChatOpenAI]) -> None:
    own, remote = model.invoke("Q", max_tokens=9), langchain(max_tokens=9, stream_usage=True)
    chunks = [*remote.stream("Q")]
    for answer in (remote.invoke("Q"), await remote.ainvoke("Q"), sum(chunks[1:], start=chunks[0])):
        assert answer.text == own.text and answer.response_metadata["finish_reason"] == "length"
        assert answer.usage_metadata is not None and own.usage_metadata is not None
        assert answer.usage_metadata["total_tokens"] == own.usage_metadata["total_tokens"]
    assert len(chunks) > 5 and [each.text for each in remote.batch(["Q", "Q"])] == [own.text] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent(model: CARDChatModel, langchain: Callable[..., ChatOpenAI]) -> None:
    answers = (f"I look.\n{F}", G, "It is -1.")
    agent = create_agent(langchain(), [add, weather])
    with played(lambda prompt: answers[min(prompt.count("<user>Result of "), 2)], model.engine.tokenizer):
        for found in (
            agent.invoke({"messages": [("human", "Q")]}),
            await agent.ainvoke({"messages": [("human", "Q")]}),
        ):
            _, calls, first, more, second, last = found["messages"]
            assert (calls.text, [call["args"] for call in calls.tool_calls]) == ("I look.", [{"a": 1, "b": -2}])
            assert (first.content, second.content, last.text) == ("-1", "Ō\n", "It is -1.") and more.tool_calls
        parts = [chunk for chunk, _ in agent.stream({"messages": [("human", "Q")]}, stream_mode="messages")]
    assert "".join(part.text for part in parts if part.type == "AIMessageChunk") == "I look.It is -1."


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_objects(langchain: Callable[..., ChatOpenAI], model: CARDChatModel, method: Any) -> None:
    said = F.replace(ADD, json.dumps({"name": "Joke", "arguments": JOKE}, ensure_ascii=False))
    with says(model, said if method == "function_calling" else JSON):
        assert langchain().with_structured_output(Joke, method=method).invoke("Q") == Joke(**JOKE)


# Shapes.


def test_events_on_the_wire(url: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=ask(stream=True, max_tokens=2))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    objects = [json.loads(event[6:]) for event in events[:-2]]
    assert objects[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert objects[-1]["choices"][0]["delta"] == {} and objects[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in each for each in objects)
    for path, body in (
        ("chat/completions", ask(max_tokens=2)),
        ("completions", {"model": NAME, "prompt": "Q", "max_tokens": 2}),
    ):
        options = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = httpx.post(f"{url}/v1/{path}", json=options).text.split("\n\n")[:-2]
        *others, last = [json.loads(event[6:]) for event in events]
        assert {each["usage"] for each in others} == {None} and last["usage"]["completion_tokens"] == 2


SAYS_NOTHING: list[dict[str, Any]] = [
    {"function_call": "none"}, {"function_call": "auto", "functions": []}, {"logprobs": False, "top_logprobs": 0},
    {"stop": ""}, {"stop": []}, {"seed": -1}, {"top_k": -1}, {"stream": False, "stream_options": {}},
    {"messages": [{"role": "user", "name": "", "content": "Q"}]}, {"n": 1.0, "top_k": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("more", SAYS_NOTHING, ids=str)
def test_what_clients_send_who_say_nothing(url: str, more: dict[str, Any]) -> None:
    texts = []
    for options in ({}, more):
        response = httpx.post(f"{url}/v1/chat/completions", json=ask(max_tokens=3.0) | options)
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0])
    assert texts[0] == texts[1]


def test_likewise_of_continuations(url: str) -> None:
    body = {"model": NAME, "prompt": "Q", "max_tokens": 2, "suffix": "", "stop": "", "seed": -1, "top_k": -1}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_models(client: openai.OpenAI, url: str, model: CARDChatModel) -> None:
    assert [each.id for each in client.models.list()] == [NAME, "alias"]
    found = client.models.retrieve("alias")
    assert (found.id, found.object, found.owned_by, found.max_model_len) == ("alias", "model", "langchain-card", 8192)  # type: ignore[attr-defined]
    assert client.chat.completions.create(**ask(max_tokens=2) | {"model": "alias"}).model == "alias"
    assert httpx.get(f"{url}/version").json()["version"]
    assert httpx.get(f"{url}/v1/models/").json() == httpx.get(f"{url}/v1/models").json()
    for path in ("/", "/health"):
        response = httpx.head(url + path)
        assert response.status_code == 200 and response.content == b"", path


def test_names_of_a_model(model: CARDChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(of: str) -> tuple[str, ...]:
        return Service(model.model_copy(update={"model": of}), Settings()).names

    assert names("owner/name") == ("name", "owner/name") and names("smollm2-135m") == ("smollm2-135m",)
    (tmp_path / "a" / "path").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert names(str(tmp_path / "a")) == ("a",) and names("a/path") == names("a/path/") == ("path",)


def test_the_callers_model_stays_open(model: CARDChatModel) -> None:
    with served(model, model_names=None) as url:
        (found,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert found["id"] == "target" and model.model.endswith("/target")
    assert model.invoke("Q", max_tokens=2).text
