"""Errors of `CARDChatModel`: this package's own classes and langchain-core's at once, in every way to call."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware, SummarizationMiddleware
from langchain_core import exceptions as core
from langchain_core.messages import AIMessage, HumanMessage

from langchain_card import CARDChatModel, errors
from langchain_card.chat.error_mapping import langchain_errors, langchain_kind
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import CARDError, EngineBusyError
from langchain_card.limits import Limits
from langchain_card.models.store import ModelStore

TOO_LONG = "word " * 500
KINDS: dict[type[CARDError], tuple[type[core.ModelError], bool]] = {
    errors.CARDError: (core.ModelError, False),
    errors.InvalidInputError: (core.ModelInvalidRequestError, False),
    errors.ContextOverflowError: (core.ContextOverflowError, False),
    errors.UnknownModelError: (core.ModelNotFoundError, False),
    errors.UnsupportedModelError: (core.ModelInvalidRequestError, False),
    errors.VocabularyMismatchError: (core.ModelInvalidRequestError, False),
    errors.DeviceError: (core.ModelError, False),
    errors.ModelStoreError: (core.ModelError, False),
    errors.UnsafeModelError: (core.ModelError, False),
    errors.CorruptModelError: (core.ModelError, False),
    errors.DiskSpaceError: (core.ModelError, False),
    errors.DownloadError: (core.ModelConnectionError, True),
    errors.EngineError: (core.ModelAPIError, True),
    errors.EngineBusyError: (core.ModelRateLimitError, True),
    errors.EngineWaitError: (core.ModelTimeoutError, True),
    errors.EngineClosedError: (core.ModelError, False),
    errors.DeviceLostError: (core.ModelError, False),
    errors.GenerationTimeoutError: (core.ModelTimeoutError, True),
    errors.GenerationAbortedError: (core.ModelError, False),
}


@pytest.fixture(scope="module")
def model(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy, max_model_len=512) as model:
        yield model


def all_kinds(kind: type[CARDError] = CARDError) -> Iterator[type[CARDError]]:
    yield kind
    for narrower in kind.__subclasses__():
        if not issubclass(narrower, core.ModelError):
            yield from all_kinds(narrower)


def raised_by(call: Callable[[], Any]) -> Any:
    with pytest.raises(CARDError) as caught:
        call()
    return caught.value


# Classes


@pytest.mark.parametrize("kind", list(all_kinds()), ids=lambda kind: kind.__name__)
def test_every_error_is_also_of_langchains_kind(kind: type[CARDError]) -> None:
    wanted, retryable = KINDS.get(kind) or KINDS[kind.__bases__[0]]
    error = kind("field", [1, 2], "must be right", "try this")

    def call() -> None:
        with langchain_errors():
            raise error

    raised = raised_by(call)
    assert isinstance(raised, kind) and isinstance(raised, wanted)
    assert raised.is_retryable is retryable
    assert (raised.field, raised.value, raised.limit, raised.hint) == ("field", [1, 2], "must be right", "try this")
    assert str(raised) == str(error) == "field = [1, 2]: must be right. Hint: try this."
    assert type(raised) is langchain_kind(kind) is langchain_kind(type(raised))
    assert type(raised).__name__ == kind.__name__


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [errors.ContextOverflowError, langchain_kind(errors.ContextOverflowError)])
def test_errors_survive_pickling_and_copying(kind: type[CARDError], copied: Callable[[Any], Any]) -> None:
    error = kind("prompt", "9 tokens", "too long", "shorten it")
    again = copied(error)
    assert type(again) is type(error)
    assert (again.field, again.value, again.limit, again.hint) == ("prompt", "9 tokens", "too long", "shorten it")
    assert str(again) == str(error)


def test_other_exceptions_pass_as_they_are() -> None:
    error = KeyError("planted")
    with pytest.raises(KeyError) as caught, langchain_errors():
        raise error
    assert caught.value is error


# Every way to call


async def collected(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def test_calls_streams_and_batches(model: CARDChatModel) -> None:
    for call in (
        lambda: model.invoke(TOO_LONG),
        lambda: list(model.stream(TOO_LONG)),
        lambda: model.batch([TOO_LONG]),
        lambda: model.generate([[HumanMessage(TOO_LONG)]]),
        lambda: (model | (lambda message: message)).invoke(TOO_LONG),
    ):
        error = raised_by(call)
        assert isinstance(error, core.ContextOverflowError)
        assert isinstance(error, errors.ContextOverflowError) and isinstance(error, ValueError)
    answer, error = model.batch(["hi", TOO_LONG], return_exceptions=True)
    assert isinstance(answer, AIMessage) and isinstance(error, core.ContextOverflowError)


@pytest.mark.filterwarnings("ignore:.*is in beta")
async def test_async_calls_streams_and_batches(model: CARDChatModel) -> None:
    for call in (
        model.ainvoke(TOO_LONG),
        collected(model.astream(TOO_LONG)),
        model.abatch([TOO_LONG]),
        collected(model.astream_events(TOO_LONG, version="v2")),
        collected(await model.astream_events(TOO_LONG, version="v3")),
    ):
        with pytest.raises(core.ContextOverflowError) as caught:
            await call
        assert isinstance(caught.value, errors.ContextOverflowError)
    answer, error = await model.abatch(["hi", TOO_LONG], return_exceptions=True)
    assert isinstance(answer, AIMessage) and isinstance(error, core.ContextOverflowError)


async def test_closing_an_async_stream_ends_the_request_at_once(
    model: CARDChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, aborted = Generation.abort, list[Generation]()
    monkeypatch.setattr(Generation, "abort", lambda self: aborted.append(self) or abort(self))
    chunks = model._astream([HumanMessage("hi")], max_tokens=200)
    await anext(chunks)
    assert not aborted
    await chunks.aclose()
    assert aborted, "not when the event loop gets to it"


def test_the_traceback_is_one_and_leads_to_the_cause(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised_by(lambda: model.invoke(TOO_LONG))
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "_fit" and frames[-1].filename.endswith("engine.py")
    told = "".join(traceback.format_exception(error))
    assert "During handling" not in told and "direct cause" not in told
    assert "langchain_card.errors.ContextOverflowError: prompt = " in told

    def failing(*_: Any) -> Any:
        raise CARDError("field", 1, "planted") from OSError("the cause")

    monkeypatch.setattr(Engine, "submit", failing)
    assert str(raised_by(lambda: model.invoke("hi")).__cause__) == "the cause"


# What happens


def test_a_bad_request(model: CARDChatModel) -> None:
    for options in ({"temperature": -1}, {"temprature": 1}, {"draft_model": "no such draft"}):
        error = raised_by(lambda options=options: model.invoke("hi", **options))
        assert isinstance(error, (core.ModelInvalidRequestError, core.ModelNotFoundError))
        assert error.field == next(iter(options))
    assert isinstance(raised_by(lambda: model.bind(temprature=1)), core.ModelInvalidRequestError)
    assert isinstance(raised_by(lambda: model.get_num_tokens_from_messages([])), core.ModelInvalidRequestError)


def test_a_full_queue(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy, limits=Limits(max_queue=0, max_num_seqs=1)) as model:
        stream = model.stream("hi", max_tokens=900)
        next(stream)
        error = raised_by(lambda: model.invoke("hi"))
        assert isinstance(error, core.ModelRateLimitError) and error.is_retryable
        stream.close()


def test_a_time_out(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy, timeout=0.1).load() as model:
        for call in (model.invoke, lambda text, **options: list(model.stream(text, **options))):
            error = raised_by(lambda call=call: call("hi", max_tokens=900))
            assert isinstance(error, core.ModelTimeoutError) and error.is_retryable


def test_a_target_that_died(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(TargetWorker, "verify", broken)
        error = raised_by(lambda: model.invoke("hi"))
    assert isinstance(error, core.ModelAPIError) and error.is_retryable
    assert model.invoke("hi").content


def test_a_closed_model(toy: dict[str, Any]) -> None:
    model = CARDChatModel(**toy)
    model.close()
    for call in (lambda: model.invoke("hi"), model.load):
        error = raised_by(call)
        assert isinstance(error, errors.EngineClosedError) and isinstance(error, core.ModelError)
        assert not error.is_retryable


def test_a_download_that_failed(toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any) -> Any:
        raise errors.DownloadError("model", "someone/model", "the model hub did not give it")

    monkeypatch.setattr(ModelStore, "pull", offline)
    model = CARDChatModel(model="someone/model", draft_model=None)
    for call in (lambda: model.invoke("hi"), model.load, lambda: model.get_num_tokens("hi")):
        error = raised_by(call)
        assert isinstance(error, core.ModelConnectionError) and error.is_retryable


# What LangChain makes of them


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines are busy so many times as the list holds numbers."""
    submit, times = Engine.submit, list[int]()

    def perhaps(self: Engine, *args: Any) -> Any:
        if times:
            times.pop()
            raise EngineBusyError("max_queue", 1, "planted")
        return submit(self, *args)

    monkeypatch.setattr(Engine, "submit", perhaps)
    return times


async def test_retries(model: CARDChatModel, busy: list[int]) -> None:
    patient = model.with_retry(
        retry_if_exception_type=(core.ModelRateLimitError,), wait_exponential_jitter=False, stop_after_attempt=3
    )
    busy += [1, 2]
    assert patient.invoke("hi").content and not busy
    busy += [1, 2]
    assert (await patient.ainvoke("hi")).content and not busy
    busy += [1, 2, 3, 4]
    with pytest.raises(EngineBusyError):
        patient.invoke("hi")
    assert busy == [1]


async def test_fallbacks(model: CARDChatModel, toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as larger:
        safe = model.with_fallbacks([larger], exceptions_to_handle=(core.ContextOverflowError,))
        text = larger.invoke(TOO_LONG[:1200]).content
        assert safe.invoke(TOO_LONG[:1200]).content == text
        assert (await safe.ainvoke(TOO_LONG[:1200])).content == text
        assert "".join(chunk.text for chunk in safe.stream(TOO_LONG[:1200])) == text
        with pytest.raises(core.ModelInvalidRequestError):
            safe.invoke("hi", temperature=-1)


def test_agents_retry_what_may_pass_and_nothing_else(model: CARDChatModel, busy: list[int]) -> None:
    middleware = ModelRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False, on_failure="error")
    agent = create_agent(model, tools=[], middleware=[middleware])
    busy += [1, 2]
    assert agent.invoke({"messages": [HumanMessage("hi")]})["messages"][-1].content
    calls, prepare = list[Any](), CARDChatModel._prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CARDChatModel, "_prepare", lambda *args: calls.append(args) or prepare(*args))
        with pytest.raises(core.ContextOverflowError):
            agent.invoke({"messages": [HumanMessage(TOO_LONG)]})
    assert len(calls) == 1, "a prompt that is too long stays too long"


def test_summaries_that_are_too_long_are_cut_and_tried_again(toy: dict[str, Any]) -> None:
    with CARDChatModel(**toy) as model:
        history = [HumanMessage(f"{number} " + "word " * 60) for number in range(10)]
        middleware = SummarizationMiddleware(
            model,
            trigger=("fraction", 0.1),
            keep=("messages", 1),
            summary_prompt="{messages}",
            trim_tokens_to_summarize=None,
        )
        with pytest.raises(core.ContextOverflowError):
            model.invoke(history)
        agent = create_agent(model, tools=[], middleware=[middleware])
        messages = agent.invoke({"messages": history})["messages"]
    assert [message.type for message in messages] == ["human", "human", "ai"], "summary, last message, answer"
