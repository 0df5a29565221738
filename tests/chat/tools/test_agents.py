"""`create_agent` over the real engine: with a model that says what is chosen, and with a random pair."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ModelCallLimitMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    wrap_tool_call,
)
from langchain.agents.middleware.model_call_limit import ModelCallLimitExceededError
from langchain.agents.structured_output import ProviderStrategy, StructuredOutputValidationError, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.errors import GraphRecursionError

from langchain_card import CARDChatModel
from langchain_card.core.request import FinishReason
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import EngineBusyError
from tests.support.played import make_pair, played
from tests.support.scripted import JOKE, Joke, add, weather
from tests.support.tool_calls import ADD, ARGUMENTS, JSON, D, F, G

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is|are) in beta", "ignore:.*is experimental"),
    pytest.mark.usefixtures("one_thread"),
]

ASK: Any = {"messages": [("human", "Q")]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    with CARDChatModel(**make_pair(tmp_path_factory.mktemp("pair"))).load() as model:
        yield model


Says = Callable[..., Any]


@pytest.fixture
def says(model: CARDChatModel) -> Says:
    """Answers by the number of results in the prompt; the last one again and again."""

    def say(*answers: str) -> Any:
        def answer(prompt: str) -> str:
            return answers[min(prompt.count("<user>Result of "), len(answers) - 1)]

        return played(answer, model._engine().tokenizer)

    return say


@tool
def fail(place: str) -> str:
    """Fails."""
    raise RuntimeError("planted")


def agent(model: CARDChatModel, *tools: Any, **options: Any) -> Any:
    return create_agent(model, [add, weather, *tools], **options)


def kinds(messages: list[Any]) -> list[str]:
    return [message.type for message in messages]


# A model that says what is chosen.


@pytest.mark.slow
async def test_a_loop(model: CARDChatModel, says: Says) -> None:
    with says(f"I look.\n{F}", G, "It is -1."):
        for found in (agent(model).invoke(ASK), await agent(model).ainvoke(ASK)):
            human, calls, first, more, second, last = found["messages"]
            assert (calls.text, [call["name"] for call in calls.tool_calls]) == ("I look.", ["add"])
            assert (more.text, [call["name"] for call in more.tool_calls]) == ("", ["weather"])
            assert (first.content, second.content) == ("-1", "Ō\n")
            assert [first.tool_call_id, second.tool_call_id] == [calls.tool_calls[0]["id"], more.tool_calls[0]["id"]]
            assert (human.type, last.text, last.tool_calls) == ("human", "It is -1.", [])
            assert last.response_metadata["finish_reason"] == "stop"


async def test_a_plan_is_followed_to_its_end(model: CARDChatModel, says: Says) -> None:
    """The plan stands in the message with the first call; the prompt has the next call. A few seconds."""
    with says(f"Plan: add, weather\n{F}", G, "It is -1, and it rains."):
        for found in (agent(model).invoke(ASK), await agent(model).ainvoke(ASK)):
            assert kinds(found["messages"]) == ["human", "ai", "tool", "ai", "tool", "ai"]
            _, first, _, second, _, last = found["messages"]
            assert (first.text, second.text, last.text) == ("Plan: add, weather", "", "It is -1, and it rains.")
            assert [call["name"] for said in (first, second) for call in said.tool_calls] == ["add", "weather"]


async def test_every_stream_mode_tells_the_same(model: CARDChatModel, says: Says) -> None:
    running = agent(model)
    with says(f"So.\n{F}", "It is -1."):
        *_, last = running.stream(ASK, stream_mode="values")
        updates = [update async for update in running.astream(ASK, stream_mode="updates")]
        chunks = [chunk for chunk, _ in running.stream(ASK, stream_mode="messages")]
        events = [event async for event in await running.astream_events(ASK, version="v3")]
        texts = [
            event["data"]["chunk"].text
            async for event in running.astream_events(ASK, version="v2")
            if event["event"] == "on_chat_model_stream"
        ]
    assert kinds(last["messages"]) == ["human", "ai", "tool", "ai"]
    assert [*map(next, map(iter, updates))] == ["model", "tools", "model"]
    assert "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk") == "So.It is -1." == "".join(texts)
    parts = [part for chunk in chunks if chunk.type != "tool" for part in chunk.tool_call_chunks]
    assert json.loads("".join(part["args"] or "" for part in parts)) == {"a": 1, "b": -2}
    assert [part["name"] for part in parts if part["name"]] == ["add"] and len(parts) > 10
    assert len([chunk for chunk in chunks if chunk.type == "AIMessageChunk" and chunk.text]) >= 10
    assert len(events) > 10 and "It is -1." in str(events[-1])


def test_objects_by_a_tool(model: CARDChatModel, says: Says) -> None:
    """A call is forced on every turn then."""
    joke = F.replace(ADD, json.dumps({"name": "Joke", "arguments": JOKE}, ensure_ascii=False))
    with says(F, joke):
        found = agent(model, response_format=ToolStrategy(Joke)).invoke(ASK)
    assert found["structured_response"] == Joke(**JOKE)
    assert kinds(found["messages"]) == ["human", "ai", "tool", "ai", "tool"]
    with says("I will not."):
        assert isinstance(
            create_agent(model, [], response_format=ToolStrategy(Joke)).invoke(ASK)["structured_response"], Joke
        )


@pytest.mark.parametrize("response_format", [Joke, ProviderStrategy(Joke)])
def test_objects_as_the_answer(model: CARDChatModel, says: Says, response_format: Any) -> None:
    """The profile says that the model can, so that a schema means this."""
    with says(F, D):
        found = agent(model, response_format=response_format).invoke(ASK)
    assert found["structured_response"] == Joke(**JOKE)
    assert kinds(found["messages"]) == ["human", "ai", "tool", "ai"] and found["messages"][-1].text == JSON
    with says("I will not."):
        found = create_agent(model, [], response_format=response_format).invoke(ASK)
    assert isinstance(found["structured_response"], Joke) and kinds(found["messages"]) == ["human", "ai"]


def test_the_model_sees_that_a_tool_failed(model: CARDChatModel) -> None:
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        results = prompt.count("<user>Result of ")
        return (F.replace(ADD, '{"name": "fail", "arguments": {"place": "x"}}'), F, "Done.")[results]

    @wrap_tool_call  # type: ignore[call-overload]
    def catch(request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except RuntimeError as error:
            return ToolMessage(f"it was {error}", tool_call_id=request.tool_call["id"], status="error")

    with played(answer, model._engine().tokenizer):
        found = agent(model, fail, middleware=[catch]).invoke(ASK)
        with pytest.raises(RuntimeError, match="planted"):
            agent(model, fail).invoke(ASK)
    assert kinds(found["messages"]) == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert "<user>Result of fail:\nError: it was planted\n" in seen[1]
    assert "<user>Result of add:\n-1\n" in seen[2]


def test_loops_end(model: CARDChatModel, says: Says) -> None:
    with says(F):
        with pytest.raises(GraphRecursionError):
            agent(model).invoke(ASK, {"recursion_limit": 6})
        limited = agent(model, middleware=[ModelCallLimitMiddleware(run_limit=2)]).invoke(ASK)
        with pytest.raises(ModelCallLimitExceededError):
            agent(model, middleware=[ModelCallLimitMiddleware(run_limit=1, exit_behavior="error")]).invoke(ASK)
    assert kinds(limited["messages"]) == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert "limit" in limited["messages"][-1].text


def test_turns_read_only_what_is_new(model: CARDChatModel, says: Says) -> None:
    with says(F, G, F, "Done."):
        found = agent(model, system_prompt="Count anew.").invoke({"messages": [("human", "Again, from the start.")]})
    used = [message.usage_metadata for message in found["messages"] if message.type == "ai"]
    cached = [usage["input_token_details"]["cache_read"] for usage in used]
    assert len(cached) == 4 and cached == sorted({*cached}), cached
    for (before, now), reused in zip(itertools.pairwise(used), cached[1:], strict=True):
        assert before["input_tokens"] - len("<ai>") <= reused < now["input_tokens"]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    submit, generations = Engine.submit, list[Generation]()

    def recorded(self: Engine, *args: Any) -> Generation:
        generations.append(submit(self, *args))
        return generations[-1]

    monkeypatch.setattr(Engine, "submit", recorded)
    return generations


async def test_a_loop_that_is_cancelled_leaves_nothing(
    model: CARDChatModel, says: Says, submitted: list[Generation]
) -> None:
    engine, long = model._engine(), model.model_copy(update={"max_tokens": 3000})
    with says(F, "words " * 400):
        task = asyncio.create_task(agent(long).ainvoke(ASK))
        while len(submitted) < 2 or not submitted[1]._taken:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async for chunk, _ in agent(long).astream(ASK, stream_mode="messages"):
            if "words" in chunk.text or len(submitted) == 4:
                break
        end = time.monotonic() + 10
        while engine.num_running or engine.num_open:
            assert time.monotonic() < end, "an answer goes on that nobody reads"
            await asyncio.sleep(0.01)
    assert [generation._reason for generation in submitted] == [FinishReason.STOP, FinishReason.ABORT] * 2


async def test_agents_side_by_side_share_passes(model: CARDChatModel, says: Says) -> None:
    with says(F, G, "It is -1."):
        both = await asyncio.gather(*(agent(model).ainvoke(ASK) for _ in range(2)))
        batch = agent(model).batch([ASK, ASK])
    for found in (*both, *batch):
        assert found["messages"][-1].text == "It is -1."
        sizes = [m.response_metadata["card"]["mean_batch_size"] for m in found["messages"] if m.type == "ai"]
        assert max(sizes) > 1.2, sizes


# Middlewares.


def test_summaries(model: CARDChatModel, says: Says) -> None:
    def answer(prompt: str) -> str:
        return "SUMMARY" if "extraction" in prompt.lower() else "Done."

    history: Any = [message for i in range(20) for message in (HumanMessage(f"{i} " * 40), AIMessage(f"{i}."))]
    small = CARDChatModel.from_config({**model.to_config(), "max_model_len": 2048})
    tokens = model.get_num_tokens_from_messages(history)
    cases: list[tuple[CARDChatModel, Any, bool]] = [
        (model, 0.8, True),
        (model, 1.2, False),
        (small, 0.5, True),  # the summary's prompt is too long: it is cut and tried again
    ]
    for by, share, summed in cases:
        limit = by.profile["max_input_tokens"]  # type: ignore[index]
        assert (tokens > limit) == (by is small)
        middleware: Any = SummarizationMiddleware(
            by, trigger=("fraction", min(share * tokens / limit, 1.0)), keep=("messages", 2),
            trim_tokens_to_summarize=None, summary_prompt="extraction {messages}",
            token_counter=by.get_num_tokens_from_messages,
        )  # fmt: skip
        with played(answer, model._engine().tokenizer):
            found = create_agent(by, [], middleware=[middleware]).invoke({"messages": [*history, HumanMessage("Q")]})
        assert found["messages"][-1].text == "Done."
        assert any("SUMMARY" in message.text for message in found["messages"]) == summed
    small.close()


def test_a_full_queue_is_tried_again(model: CARDChatModel, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, refused = Engine.submit, list[int]()

    def busy(self: Engine, *args: Any) -> Generation:
        if len(refused) < 2:
            refused.append(1)
            raise EngineBusyError("max_queue", 0, "planted", "")
        return submit(self, *args)

    monkeypatch.setattr(Engine, "submit", busy)
    with says(F, "Done."):
        found = agent(model, middleware=[ModelRetryMiddleware(initial_delay=0.01)]).invoke(ASK)
    assert found["messages"][-1].text == "Done." and len(refused) == 2


# A random pair: what it says is well formed.


@pytest.mark.parametrize(
    "response_format", [None, ToolStrategy(Joke), ProviderStrategy(Joke)], ids=["", "tool", "json"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_pair_under_a_limit(model: CARDChatModel, response_format: Any, seed: int) -> None:
    random = model.model_copy(update={"temperature": 1.0, "seed": seed, "max_tokens": 120})
    limit: Any = ModelCallLimitMiddleware(run_limit=3)
    try:
        found = agent(random, middleware=[limit], response_format=response_format).invoke(ASK)
    except StructuredOutputValidationError as error:  # a call that had to be ended is neither made nor a document
        assert isinstance(response_format, ProviderStrategy)
        assert [call["error"] for call in error.ai_message.invalid_tool_calls] == ["max_tokens = 120 ended it early"]
        return
    said = [message for message in found["messages"] if message.type == "ai"]
    assert 1 <= len(said) <= 4
    for call in (call for message in said for call in message.tool_calls):
        jsonschema.validate(call["args"], {**ARGUMENTS, "Joke": Joke.model_json_schema()}[call["name"]])
    if response_format is not None:
        ended = "limit" in said[-1].text
        assert ended or isinstance(found["structured_response"], Joke)
        assert all(message.tool_calls or json.loads(message.text) for message in said[: len(said) - ended])
