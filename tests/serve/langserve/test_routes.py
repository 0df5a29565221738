"""LangServe's own client against a real server: every method answers as the model itself does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langserve import RemoteRunnable
from langserve.serialization import WellKnownLCSerializer

from langchain_card import CARDChatModel
from langchain_card.serve.langserve.routes import _plain
from tests.support.played import make_pair
from tests.support.served import says, served
from tests.support.tool_calls import ADD, RAIN, TOOL_DICTS

pytestmark = pytest.mark.usefixtures("one_thread")

CALL = {"name": "add", "args": {"a": 1, "b": 2}, "id": "call-1"}
INPUTS: dict[str, Any] = {
    "a text": "Q",
    "messages": [SystemMessage("S"), HumanMessage("Q", name="me"), AIMessage("A"), HumanMessage("R")],
    "calls": [HumanMessage("Q"), AIMessage("", tool_calls=[CALL]), ToolMessage("3", tool_call_id="call-1")],
    "blocks": [HumanMessage([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "a prompt": ChatPromptTemplate.from_messages([("system", "S"), ("human", "{q}")]).invoke({"q": "Q"}),
    "a prompt of text": StringPromptValue(text="Q"),
}
PROMPT = ChatPromptTemplate.from_messages([("human", "{q}")])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 12, "schedule": "sequential"}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def url(model: CARDChatModel) -> Iterator[str]:
    with served(model) as url:
        yield f"{url}/card"


@pytest.fixture(params=["", "/chat"])
def remote(request: pytest.FixtureRequest, url: str) -> RemoteRunnable[Any, Any]:
    return client(url + request.param)


def client(url: str) -> RemoteRunnable[Any, Any]:
    """It keeps no connection, which would belong to the event loop of one test."""
    return RemoteRunnable(url, timeout=60, client_kwargs={"limits": httpx.Limits(max_keepalive_connections=0)})


def facts(message: Any) -> dict[str, Any]:
    """What two answers to the same question have in common."""
    usage, metadata = dict(message.usage_metadata), message.response_metadata
    del usage["input_token_details"]  # what was read before
    assert metadata["model_provider"] == "card" and metadata["card"]["rounds"] > 0
    names = ("content", "additional_kwargs", "tool_calls", "invalid_tool_calls")
    return {
        **{name: getattr(message, name) for name in names},
        "usage": usage,
        "finish_reason": metadata["finish_reason"],
        "metadata": set(metadata["card"]),
    }


def whole(chunks: list[Any]) -> AIMessageChunk:
    assert len(chunks) > 2 and all(type(chunk) is AIMessageChunk for chunk in chunks)
    assert [chunk.chunk_position for chunk in chunks].index("last") == len(chunks) - 1
    found: AIMessageChunk = sum(chunks[1:], start=chunks[0])
    return found


# Every method.


@pytest.mark.parametrize("kind", INPUTS)
async def test_calls(model: CARDChatModel, remote: RemoteRunnable[Any, Any], kind: str) -> None:
    asked, expected = INPUTS[kind], facts(model.invoke(INPUTS[kind]))
    for answer in (await asyncio.to_thread(remote.invoke, asked), await remote.ainvoke(asked)):
        assert type(answer) is AIMessage and facts(answer) == expected
        assert answer.response_metadata["model_name"] == "tiny" and answer.id
    chunks = await asyncio.to_thread(lambda: [*remote.stream(asked)])
    assert facts(whole(chunks)) == facts(whole([chunk async for chunk in remote.astream(asked)])) == expected
    assert len(chunks) == len([*model.stream(asked)])


async def test_batches(model: CARDChatModel, remote: RemoteRunnable[Any, Any]) -> None:
    asked = [*INPUTS.values()]
    expected = [facts(model.invoke(each)) for each in asked]
    for answers in (await asyncio.to_thread(remote.batch, asked), await remote.abatch(asked)):
        assert [facts(answer) for answer in answers] == expected
    found = await asyncio.to_thread(lambda: dict(remote.batch_as_completed(asked)))
    assert [facts(found[i]) for i in range(len(asked))] == expected
    assert remote.batch([]) == [] and len(remote.batch(["Q"])) == 1


async def test_logs(model: CARDChatModel, remote: RemoteRunnable[Any, Any]) -> None:
    patches = [patch async for patch in remote.astream_log("Q")]
    log = sum(patches[1:], start=patches[0])
    assert facts(log.state["final_output"]) == facts(model.invoke("Q"))
    assert facts(whole(log.state["streamed_output"])) == facts(model.invoke("Q"))
    local = [[(op["op"], op["path"]) for op in patch.ops] async for patch in model.astream_log("Q")]
    assert [[(op["op"], op["path"]) for op in patch.ops] for patch in patches] == local


@pytest.mark.parametrize("version", ["v1", "v2", None])
async def test_events(model: CARDChatModel, remote: RemoteRunnable[Any, Any], version: Any) -> None:
    """The client sends no version: events are those of `v2`, whatever it asks for."""
    asked = INPUTS["messages"]
    events = [event async for event in remote.astream_events(asked, version=version)]
    local = [event async for event in model.astream_events(asked, version="v2")]
    assert [event["event"] for event in events] == [event["event"] for event in local]
    assert len({event["run_id"] for event in events}) == 1 and events[0]["data"]["input"] == asked
    assert [event["data"]["chunk"].text for event in events[1:-1]] == [
        event["data"]["chunk"].text for event in local[1:-1]
    ]
    assert facts(events[-1]["data"]["output"]) == facts(model.invoke(asked))
    names = {"include_names": ["nobody"]}, {"exclude_types": ["chat_model"]}
    for chosen in names:
        assert not [event async for event in remote.astream_events(asked, version=version, **chosen)]


async def test_in_a_chain(model: CARDChatModel, remote: RemoteRunnable[Any, Any]) -> None:
    chain, local = PROMPT | remote | StrOutputParser(), PROMPT | model | StrOutputParser()
    asked = [{"q": each} for each in ("a", "b", "c")]
    expected = local.batch(asked)
    assert await asyncio.to_thread(chain.batch, asked) == await chain.abatch(asked) == expected
    assert await asyncio.to_thread(chain.invoke, asked[0]) == await chain.ainvoke(asked[0]) == expected[0]
    assert "".join(await asyncio.to_thread(lambda: [*chain.stream(asked[0])])) == expected[0]
    assert "".join([piece async for piece in chain.astream(asked[0])]) == expected[0]
    found = [event async for event in chain.astream_events(asked[0], version="v2")]
    assert found[-1]["data"]["output"] == expected[0]


# Configurable fields.


CONFIGURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # (what is configured, the same as options of a call)
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"stop": "b"}, {"stop": ["b"]}),
    ({"stop": ["zz", "d"]}, {"stop": ["zz", "d"]}),
    ({"temperature": 1, "seed": 5}, {"temperature": 1, "seed": 5}),
    ({"temperature": 0.7, "seed": 2**32 - 1}, {"temperature": 0.7, "seed": 2**32 - 1}),
    ({"temperature": None, "seed": None, "stop": None, "max_tokens": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("configured", "options"), CONFIGURED, ids=str)
async def test_configurable_fields(
    model: CARDChatModel, remote: RemoteRunnable[Any, Any], configured: Any, options: Any
) -> None:
    config = {"configurable": configured}
    with says(model, "abcdef") if "stop" in options else nullcontext():
        expected = facts(model.invoke("Q", **options))
        assert expected != facts(model.invoke("Q")) or not options
        answers = [
            await remote.ainvoke("Q", config),
            await remote.with_config(config).ainvoke("Q"),
            *await remote.abatch(["Q", "Q"], config),
            whole([chunk async for chunk in remote.astream("Q", config)]),
            [event async for event in remote.astream_events("Q", config, version="v2")][-1]["data"]["output"],
        ]
        patches = [patch async for patch in remote.astream_log("Q", config)]
        answers.append(sum(patches[1:], start=patches[0]).state["final_output"])
        for answer in answers:
            assert facts(answer) == expected


async def test_each_of_a_batch_has_its_own(model: CARDChatModel, remote: RemoteRunnable[Any, Any]) -> None:
    options: list[dict[str, Any]] = [{"max_tokens": n} for n in (1, 7, 3)] + [{}, {"temperature": 1.0, "seed": 9}]
    configs: Any = [{"configurable": each} for each in options]
    expected = [facts(model.invoke("Q", **each)) for each in options]
    assert [facts(each) for each in await remote.abatch(["Q"] * 5, configs)] == expected
    assert [facts(each) for each in await asyncio.to_thread(remote.batch, ["Q"] * 5, configs)] == expected


# On the wire.


class Tooled(CARDChatModel):
    """It has tools, whoever asks."""

    def _for_call(self, options: Any) -> Any:
        return super()._for_call({"tools": [*TOOL_DICTS], "parallel_tool_calls": True, **options})


async def test_calls_of_tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    text = f"Well.\n```json\n{ADD}\n```\n```json\n{RAIN}\n```"
    fields = make_pair(tmp_path_factory.mktemp("pair"))
    with Tooled(**fields).load() as model, served(model) as url, says(model, text):
        remote = client(f"{url}/card")
        expected = model.invoke("Q")
        assert [call["name"] for call in expected.tool_calls] == ["add", "weather"]
        answers = [await remote.ainvoke("Q"), (await remote.abatch(["Q"]))[0]]
        answers.append(whole([chunk async for chunk in remote.astream("Q")]))
        answers.append([event async for event in remote.astream_events("Q")][-1]["data"]["output"])
        for answer in answers:
            assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
                (call["name"], call["args"]) for call in expected.tool_calls
            ]
            assert answer.response_metadata["finish_reason"] == "tool_calls" and answer.text == expected.text
        history = [
            HumanMessage("Q"),
            answers[0],
            *(ToolMessage("3", tool_call_id=c["id"]) for c in answers[0].tool_calls),
        ]
        assert facts(await remote.ainvoke(history))["content"] == facts(model.invoke(history))["content"]


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd", 'quo"te \\ <b> 🦜\n\nLf', "data: x\r\nevent: error"])
async def test_texts_that_break_lines(model: CARDChatModel, remote: RemoteRunnable[Any, Any], text: str) -> None:
    config: Any = {"configurable": {"max_tokens": 100}}
    with says(model, text):
        assert whole([chunk async for chunk in remote.astream("Q", config)]).content == text
        assert (await remote.ainvoke("Q", config)).content == text
        assert [event async for event in remote.astream_events("Q", config)][-1]["data"]["output"].content == text


def test_the_words_are_langserves(model: CARDChatModel) -> None:
    for value in (model.invoke("Q"), [*model.stream("Q")], {"a": [*INPUTS.values()]}):
        assert _plain(value) == WellKnownLCSerializer().dumpd(value)


def test_the_first_token_comes_early(model: CARDChatModel, remote: RemoteRunnable[Any, Any]) -> None:
    config: Any = {"configurable": {"max_tokens": 500}}
    with says(model, "seven. " * 60):
        [*remote.stream("Q", config)]
        start = time.monotonic()
        times = [time.monotonic() - start for chunk in remote.stream("Q", config) if chunk.text]
        total = time.monotonic() - start
    assert len(times) > 100 and times[0] / total < 0.3


def test_many_at_once(model: CARDChatModel, url: str) -> None:
    expected, found = model.invoke("Q").text, []

    def ask(number: int) -> None:
        remote = client(url)
        if number % 3 == 0:
            found.append(remote.invoke("Q").text)
        elif number % 3 == 1:
            found.append(whole([*remote.stream("Q")]).text)
        else:
            found.extend(answer.text for answer in remote.batch(["Q"] * 3))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 30 and model.engine.num_open == 0
