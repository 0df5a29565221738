"""`CARDChatModel` as LangChain calls it."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_card import CARDChatModel, chat_model
from langchain_card.errors import ContextOverflowError, InvalidInputError
from langchain_card.limits import Pins
from tests.support import SMALL, tiny

REPEAT = "Repeat this exactly: one two three four five six seven"
ANSWER = "One two three four five six seven"
CHINESE = "Translate 'hello world' into Chinese characters: "


@pytest.fixture(scope="module")
def model() -> Iterator[CARDChatModel]:
    with CARDChatModel(model=SMALL, draft_model="ngram", max_tokens=24) as model:
        yield model


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of a tiny random model: quick to load, and it never ends by itself."""
    folder = tiny.make_target("llama", tmp_path_factory.mktemp("toy"))
    return {"model": folder, "draft_model": "ngram", "max_tokens": 8}


class Recorder(BaseCallbackHandler):
    def __init__(self, running: Callable[[], int]) -> None:
        self.running, self.tokens, self.states = running, list[str](), list[int]()

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        assert kwargs["chunk"].text == token
        self.tokens.append(token)
        self.states.append(self.running())


class AsyncRecorder(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.tokens.append(token)


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


# The same words everywhere.


async def test_every_way_to_call_gives_the_same_text(model: CARDChatModel) -> None:
    whole = joined(list(model.stream(REPEAT)))
    awhole = joined([chunk async for chunk in model.astream(REPEAT)])
    texts = [model.invoke(REPEAT).content, (await model.ainvoke(REPEAT)).content, whole.content, awhole.content]
    assert texts == [ANSWER] * 4
    for message in (whole, awhole):
        assert message.response_metadata["finish_reason"] == "stop"
    usage = model.invoke(REPEAT).usage_metadata
    assert usage is not None and usage["input_token_details"] == {"cache_read": usage["input_tokens"] - 1}
    assert awhole.usage_metadata == usage


async def test_batches_answer_each_prompt_as_if_it_were_alone(model: CARDChatModel) -> None:
    prompts = [REPEAT, "Say hi.", REPEAT]
    alone = model.invoke("Say hi.", max_tokens=6).content
    for answers in (model.batch(prompts, max_tokens=6), await model.abatch(prompts, max_tokens=6)):
        assert [answer.content for answer in answers] == [ANSWER[:-6], alone, ANSWER[:-6]]


def test_a_chain(model: CARDChatModel) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "Repeat this exactly: {text}")])
    chain = prompt | model | StrOutputParser()
    assert chain.invoke({"text": "one two three four five six seven"}) == ANSWER
    assert "".join(chain.stream({"text": "one two three four five six seven"})) == ANSWER


# Streams and callbacks.


def test_callbacks_hear_every_token_while_the_answer_is_written(model: CARDChatModel) -> None:
    recorder = Recorder(lambda: model._engine().num_running)
    chunks = list(model.stream(REPEAT, config={"callbacks": [recorder]}))
    final = joined(chunks)
    rounds, count = final.response_metadata["card"]["rounds"], final.usage_metadata["output_tokens"]
    assert 1 < rounds < count == 8, "some rounds commit several tokens"
    assert len(chunks) == len(recorder.tokens) == count + 1, "one per token, and the end"
    assert "".join(recorder.tokens) == ANSWER
    assert recorder.states[0] == 1, "the first call comes before the end"


async def test_async_callbacks(model: CARDChatModel) -> None:
    recorder = AsyncRecorder()
    chunks = [chunk async for chunk in model.astream(REPEAT, config={"callbacks": [recorder]})]
    assert "".join(recorder.tokens) == ANSWER
    assert len(recorder.tokens) == len(chunks) == 9


def test_invoke_streams_to_callbacks_when_asked(toy: dict[str, Any]) -> None:
    recorder = Recorder(lambda: 0)
    with CARDChatModel(**toy, streaming=True) as model:
        answer = model.invoke("hi", config={"callbacks": [recorder]})
    assert len(recorder.tokens) == 9
    assert "".join(recorder.tokens) == answer.content


def test_the_last_chunk_carries_the_totals_once(model: CARDChatModel) -> None:
    *others, last = model.stream(REPEAT)
    assert last.chunk_position == "last"
    usage = {"input_tokens": 41, "output_tokens": 8, "total_tokens": 49}
    assert {name: last.usage_metadata[name] for name in usage} == usage
    assert all(chunk.usage_metadata is None and chunk.chunk_position is None for chunk in others)
    assert not any("card" in chunk.response_metadata for chunk in others)


def test_response_metadata(model: CARDChatModel) -> None:
    metadata = model.invoke(REPEAT, schedule="sequential").response_metadata
    card = metadata.pop("card")
    assert metadata == {"model_name": SMALL, "model_provider": "card", "finish_reason": "stop"}
    assert card["schedule"] == "sequential"
    assert card["mean_accepted_length"] == pytest.approx(8 / card["rounds"], abs=1e-4)
    assert 8 - card["rounds"] <= card["accepted_by_source"]["ngram"] < 8
    assert 0 < card["acceptance_rate"] <= 1
    assert 0 <= card["hit_rate"] <= 1
    assert 0 < card["target_busy"] <= 1
    assert card["draft_busy"] >= 0 and card["waited"] >= 0
    assert card["mean_window"] > 1 and card["mean_draft_width"] == 0, "prompt lookup has no steps that cost time"
    assert card["tokens_per_second"] > 0
    assert card["time_to_first_token"] > 0
    assert card["seed"] == 0
    assert card["closed"] is False
    assert {type(value) for value in card.values()} == {str, int, float, dict, bool}


def test_the_time_to_the_first_token_is_what_the_caller_waits_for(
    toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading is apart, here half a second; the template, the tokenizer and the reading of the prompt are within."""
    with CARDChatModel(**toy, max_model_len=1024).load() as model:
        for slow in (0.5, 0.0):
            with monkeypatch.context() as patch:
                patch.setattr(CARDChatModel, "_engine", slowed(CARDChatModel._engine, slow))
                called, arrived, last = time.perf_counter(), 0.0, None
                for last in model.stream(CHINESE * 6):  # noqa: B007
                    arrived = arrived or time.perf_counter() - called
            assert last is not None
            card = last.response_metadata["card"]
            assert slow <= card["load_time"] < slow + 0.3
            assert arrived - 1.0 < card["time_to_first_token"] + card["load_time"] <= arrived
            assert 0 < card["time_to_first_token"] <= arrived - slow


def test_a_slow_tokenizer_counts_for_the_first_token(toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with CARDChatModel(**toy).load() as model:
        monkeypatch.setattr(chat_model, "encode", slowed(chat_model.encode, 0.3))
        whole = model.invoke(REPEAT).response_metadata["card"]["time_to_first_token"]
        streamed = [*model.stream(REPEAT)][-1].response_metadata["card"]["time_to_first_token"]
        awaited = asyncio.run(model.ainvoke(REPEAT)).response_metadata["card"]["time_to_first_token"]
    assert all(0.3 <= seconds < 3 for seconds in (whole, streamed, awaited))


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return call


def test_no_half_characters(model: CARDChatModel) -> None:
    chunks = list(model.stream(CHINESE, max_tokens=13))
    text = "".join(chunk.content for chunk in chunks)
    assert any("\u4e00" <= char <= "\u9fff" for char in text), "the prompt should bring Chinese characters"
    assert "" in [chunk.content for chunk in chunks[:-1]], "some token should end within a character"
    assert "\ufffd" not in text
    assert text == model.invoke(CHINESE, max_tokens=13).content


async def test_langchains_event_stream(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        chain = model | StrOutputParser()
        events = [event async for event in chain.astream_events("hi", version="v2")]
        text = "".join(event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream")
        assert text == model.invoke("hi").content


# Options of a call.


@pytest.mark.parametrize("count", [1, 3, 5])
def test_max_tokens_is_exact(model: CARDChatModel, count: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = model.invoke(REPEAT, **{name: count})
        assert answer.usage_metadata["output_tokens"] == count
        assert answer.content == " ".join(ANSWER.split()[:count])
        assert answer.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [" four", "our f", "ee four five"])
def test_a_stop_string_cuts_within_a_round(model: CARDChatModel, stop: str) -> None:
    chunks = list(model.stream(REPEAT, stop=[stop]))
    final = joined(chunks)
    assert "".join(chunk.content for chunk in chunks) == ANSWER[: ANSWER.index(stop)]
    words = len(ANSWER[: ANSWER.index(stop) + len(stop)].split())
    assert final.usage_metadata["output_tokens"] == words, "the token that completes the stop string is the last"
    assert len(chunks) == words + 1
    assert final.response_metadata["finish_reason"] == "stop"
    assert model.invoke(REPEAT, stop=stop).content == final.content


def test_a_calls_stop_takes_the_place_of_the_fields(model: CARDChatModel) -> None:
    other = CARDChatModel(model=SMALL, draft_model="ngram", max_tokens=24, stop=" three")
    assert other.invoke(REPEAT).content == "One two"
    assert other.bind(stop=[" five"]).invoke(REPEAT).content == "One two three four"


def test_seeds(model: CARDChatModel) -> None:
    hot = {"temperature": 1.5, "max_tokens": 8}
    free = model.invoke("Tell me a story.", **hot)
    seed = free.response_metadata["card"]["seed"]
    for schedule in ("plain", "sequential", "parallel"):
        assert model.invoke("Tell me a story.", seed=seed, schedule=schedule, **hot).content == free.content
    assert model.invoke("Tell me a story.", seed=seed + 1, **hot).content != free.content


def test_langchains_own_switches_are_no_error(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        assert model.invoke("hi", stream=True).content == model.invoke("hi", stream=False).content
        assert model.invoke("hi", ls_structured_output_format=None, temperature=None).content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"beams": 2}, "beams = 2: is not an option of a call; there are stop, schedule, max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5: must be a whole number"),
        ({"max_tokens": "many"}, "max_tokens = 'many'"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"schedule": "paralel"}, "did you mean parallel"),
        ({"seed": -1}, "seed = -1"),
        ({"stop": [7]}, "stop = 7"),
        ({"stop": [""]}, "stop = ''"),
    ],
)
async def test_bad_options_of_a_call(model: CARDChatModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model.invoke("hi", **options)
    with pytest.raises(InvalidInputError, match=message):
        await model.ainvoke("hi", **options)


def test_bad_prompts(toy: dict[str, Any]) -> None:
    model = CARDChatModel(**toy, max_model_len=64)
    with pytest.raises(InvalidInputError, match="at least one message"):
        model.invoke([])
    with pytest.raises(InvalidInputError, match="content block = 'image'"):
        model.invoke([HumanMessage([{"type": "image", "base64": "", "mime_type": "image/png"}])])
    with pytest.raises(ContextOverflowError):
        model.invoke("word " * 30)
    assert model.invoke("hi").usage_metadata["output_tokens"] == 8, "the engine goes on"
    assert model.invoke("hi", max_tokens=100).usage_metadata["total_tokens"] == 64 - 16, "as much as there is room"


def test_counting_tokens(model: CARDChatModel) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage(REPEAT)]
    assert model.get_num_tokens("one two three") == 3
    assert model.get_num_tokens_from_messages(messages) == model.invoke(messages).usage_metadata["input_tokens"]
    assert CARDChatModel(custom_get_token_ids=lambda text: [1] * 5).get_num_tokens("x") == 5


def test_what_is_pinned_is_kept_and_shown(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy, pins={"lead": 2, "draft_width": 3}) as model:
        assert model.pins == Pins(draft_width=3, lead=2)
        assert pickle.loads(pickle.dumps(model)).pins == model.pins
    with pytest.raises(ValueError, match="lead"):
        CARDChatModel(**toy, pins={"lead": -1})
