"""What users of local chat models suffer elsewhere, each as a test; numbers are those of the projects' issues.

Tools and structured output (langchain#29033, #30453, #29569, langchain-community#256, ollama#17921, #14440): what they
are bound as is in test_structured.py; other servers' names for them must not be accepted and ignored.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_card import CARDChatModel
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import InvalidInputError
from tests.support import SMALL
from tests.support.weights import num_loaded_models

REPEAT = "Repeat this exactly: one two three four five six seven"
ANSWER = "One two three four five six seven"
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def model() -> Iterator[CARDChatModel]:
    with CARDChatModel(model=SMALL, draft_model="ngram", max_tokens=24) as model:
        yield model.load()


# langchain-huggingface over a local pipeline, as measured.


def test_the_answer_holds_the_prompt_and_its_marks(model: CARDChatModel) -> None:
    """Also langchain#20926: batch returns strings with the prompt inside."""
    for answer in (model.invoke(REPEAT), *model.batch([REPEAT, REPEAT])):
        assert answer.content == ANSWER
        assert not any(mark in answer.text for mark in MARKS)


def test_stop_strings_are_ignored(model: CARDChatModel) -> None:
    """Also langchain#22601, #27267."""
    assert model.invoke(REPEAT, stop=["three"]).content == "One two "
    assert "".join(chunk.text for chunk in model.stream(REPEAT, stop=["ree fo"])) == "One two th"
    assert model.bind(stop=["three"]).invoke(REPEAT).content == "One two "


async def test_usage_is_missing(model: CARDChatModel) -> None:
    whole: Any = sum([chunk async for chunk in model.astream(REPEAT)], start=AIMessageChunk(""))
    for message in (model.invoke(REPEAT), await model.ainvoke(REPEAT), whole):
        usage = message.usage_metadata
        assert usage["input_tokens"] == 41 and usage["output_tokens"] == 8 and usage["total_tokens"] == 49


async def test_async_calls_are_not_implemented(model: CARDChatModel) -> None:
    """Also langchain#34134, #3869."""
    assert (await model.ainvoke(REPEAT)).content == ANSWER
    assert "".join([chunk.text async for chunk in model.astream(REPEAT)]) == ANSWER


def test_a_history_that_ends_with_a_tools_result_is_refused(model: CARDChatModel) -> None:
    """Also langchain#19933: "Last message must be a HumanMessage"."""
    call: Any = {"name": "add", "args": {"a": 1, "b": 2}, "id": "1"}
    history = [HumanMessage("1 + 2?"), AIMessage("", tool_calls=[call]), ToolMessage("3", tool_call_id="1")]
    assert model.invoke(history).content


def test_options_of_a_call_are_silently_ignored(model: CARDChatModel) -> None:
    assert model.invoke(REPEAT, max_tokens=2).content == "One two"
    hot = {model.invoke("Tell me a story.", temperature=2.0, seed=seed, max_tokens=4).text for seed in range(4)}
    assert len(hot) > 1


@pytest.mark.parametrize("option", ["functions", "function_call", "guided_json", "grammar"])
def test_tools_and_schemas_are_accepted_and_ignored(model: CARDChatModel, option: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{option} = .* is not an option of a call"):
        model.invoke("hi", **{option: []})
    with pytest.raises(InvalidInputError):
        model.bind(**{option: []})
    with pytest.raises(InvalidInputError):
        model.bind_tools([], **{option: []})
    with pytest.raises(InvalidInputError):
        model.with_structured_output(method="json_mode", **{option: []})


def test_a_stream_that_was_left_goes_on(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        for _ in model.stream("hi", max_tokens=900):
            break
        end = time.monotonic() + 5
        while model._engine().num_running:
            assert time.monotonic() < end
            time.sleep(0.005)


# Templates.


def test_the_chat_template_is_not_used(model: CARDChatModel) -> None:
    """langchain#15232: prompts in the form of another model, or none."""
    messages = [SystemMessage("Be brief."), HumanMessage("hi")]
    tokenizer = model._engine().tokenizer
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert model.invoke(messages, max_tokens=1).usage_metadata["input_tokens"] == len(ids)  # type: ignore[index]


@pytest.mark.parametrize(
    "history",
    [
        [HumanMessage("a"), HumanMessage("b")],
        [SystemMessage("a"), SystemMessage("b"), HumanMessage("c")],
        [HumanMessage("a"), AIMessage("b"), AIMessage("c"), HumanMessage("d")],
        [AIMessage("a"), HumanMessage("b")],
        [HumanMessage("a", name="ann"), AIMessage([]), HumanMessage("b")],
    ],
)
def test_roles_that_do_not_alternate_are_refused(model: CARDChatModel, history: list[Any]) -> None:
    """langchain#16992; also where the template itself insists, as Mistral's and Gemma's do (test_prompt_forms.py)."""
    assert model.invoke(history, max_tokens=4).content


def test_the_answer_never_ends(model: CARDChatModel) -> None:
    """langchain#19770: the end-of-turn token of the template is not the tokenizer's."""
    prompt = ChatPromptTemplate.from_messages([("human", "{text}")])
    answer = (prompt | model).invoke({"text": REPEAT})
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 8


# Streams and batches.


def test_tokens_are_not_streamed(model: CARDChatModel) -> None:
    """langchain#18782, #2309."""
    chunks = [chunk.text for chunk in model.stream(REPEAT) if chunk.text]
    assert len(chunks) > 5 and "".join(chunks) == ANSWER


def test_options_switch_streaming_off(model: CARDChatModel) -> None:
    """langchain#29129: what is bound turns a stream into one piece."""
    assert len(list(model.bind(stop=["zz"], temperature=0.0).stream(REPEAT))) > 5


def test_a_batch_is_a_row_of_single_calls(toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """langchain#31533, #10795."""
    verify, sizes = TargetWorker._verify, list[int]()

    def counted(self: TargetWorker) -> Any:
        verdicts = verify(self)
        sizes.append(len(verdicts))
        return verdicts

    monkeypatch.setattr(TargetWorker, "_verify", counted)
    with CARDChatModel(**toy, max_model_len=256).load() as model:
        model.batch([f"number {i}" for i in range(8)])
    assert max(sizes) == 8


def test_calls_from_many_threads_freeze_or_crash(model: CARDChatModel) -> None:
    """llama-cpp-python#1995, #471, #1529."""
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda _: model.invoke(REPEAT).content, range(16))]
    assert answers == [ANSWER] * 16

    async def many() -> list[str]:
        return [answer.text for answer in await asyncio.gather(*(model.ainvoke(REPEAT) for _ in range(16)))]

    both = [threading.Thread(target=lambda: answers.append(asyncio.run(many()))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert answers[16:] == [[ANSWER] * 16] * 2


# Resources.


@pytest.mark.slow
def test_a_hub_is_asked_though_everything_is_local(toy: dict[str, Any]) -> None:
    """langchain#30333, #23872."""
    code = """if True:
        import socket, sys
        def refuse(*args, **kwargs):
            raise AssertionError("a connection is made")
        socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
        from langchain_card import CARDChatModel
        with CARDChatModel(model=sys.argv[1], draft_model="ngram", max_tokens=4) as model:
            print(model.get_num_tokens("hello"), bool(model.invoke("hi").content), model.profile["max_input_tokens"])
    """
    command = [sys.executable, "-W", "ignore", "-c", code, toy["model"]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split()[:2] == ["5", "True"]


def test_memory_is_not_given_back(toy: dict[str, Any]) -> None:
    """langchain#17678, #25456."""
    before = num_loaded_models()
    model = CARDChatModel(**toy).load()
    runner = model._engine().backend._target._runner  # type: ignore[attr-defined]
    held = [weakref.ref(runner.model), weakref.ref(runner.pool)]
    assert model.invoke("hi").content
    del runner
    model.close()
    gc.collect()
    assert num_loaded_models() == before
    assert [reference() for reference in held] == [None, None]
