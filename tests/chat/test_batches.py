"""Many prompts at once: whatever LangChain calls them with, the engine decodes them in common passes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor

from langchain_card import CARDChatModel, Limits
from langchain_card.chat import batches
from langchain_card.engine import inbox
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import ContextOverflowError, InvalidInputError

COUNT = 20
PROMPTS = [f"number {i}" for i in range(COUNT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    """A pair of tiny models that match in part; eight requests at once."""
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    limits = Limits(max_num_seqs=8)
    with CARDChatModel(model=target, draft_model=draft, dtype="float64", max_tokens=8, limits=limits) as model:
        yield model.load()


@pytest.fixture(scope="module")
def alone(model: CARDChatModel) -> list[str]:
    return [str(model.invoke(prompt).content) for prompt in PROMPTS]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests whose windows each pass of the target was given; a machine that stalls makes none begin too early."""
    monkeypatch.setattr(inbox, "GATHER_SECONDS", 1.0)
    verify, counts = TargetWorker._verify, list[int]()

    def counted(self: TargetWorker) -> Any:
        verdicts = verify(self)
        counts.append(len(verdicts))
        return verdicts

    monkeypatch.setattr(TargetWorker, "_verify", counted)
    return counts


def check_common(passes: list[int], count: int = COUNT) -> None:
    """All of eight in the first passes, and hardly any pass for fewer while others wait."""
    assert max(passes) == min(8, count)
    assert next(found for found in passes if found) == min(8, count), "the first pass had to wait for all"
    assert sum(passes) / len(passes) > 0.5 * min(8, count)


@pytest.mark.usefixtures("one_thread")
class TestCommonPasses:
    def test_batch(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        answers = model.batch(PROMPTS)
        assert [answer.content for answer in answers] == alone
        check_common(passes)
        sizes = [answer.response_metadata["card"]["mean_batch_size"] for answer in answers]
        assert 1 < min(sizes) <= max(sizes) <= 8

    async def test_abatch(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        before, most = threading.active_count(), 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, threading.active_count())
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        answers = await model.abatch(PROMPTS)
        watching.cancel()
        assert most - before <= 4, "no thread for each request, only the few that prepare prompts"
        assert [answer.content for answer in answers] == alone
        check_common(passes)

    def test_a_chain(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        chain = ChatPromptTemplate.from_messages([("human", "number {i}")]) | model | StrOutputParser()
        assert chain.batch([{"i": i} for i in range(COUNT)]) == alone
        check_common(passes)

    async def test_an_async_chain(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        chain = ChatPromptTemplate.from_messages([("human", "number {i}")]) | model | StrOutputParser()
        assert await chain.abatch([{"i": i} for i in range(COUNT)]) == alone
        check_common(passes)

    def test_bound(self, model: CARDChatModel, passes: list[int]) -> None:
        answers = model.bind(max_tokens=3).batch(PROMPTS)
        assert {answer.usage_metadata["output_tokens"] for answer in answers} == {3}
        check_common(passes)

    def test_generate(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        result = model.generate([[HumanMessage(prompt)] for prompt in PROMPTS])
        assert [generations[0].text for generations in result.generations] == alone
        assert result.run is not None and len({run.run_id for run in result.run}) == COUNT
        check_common(passes)

    async def test_agenerate(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        result = await model.agenerate([[HumanMessage(prompt)] for prompt in PROMPTS])
        assert [generations[0].text for generations in result.generations] == alone
        check_common(passes)

    async def test_as_completed(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        found = {i: answer.content for i, answer in model.batch_as_completed(PROMPTS)}
        assert [found[i] for i in range(COUNT)] == alone
        check_common(passes)
        found = {i: answer.content async for i, answer in model.abatch_as_completed(PROMPTS)}
        assert [found[i] for i in range(COUNT)] == alone

    def test_branches_of_a_parallel_step(self, model: CARDChatModel, alone: list[str], passes: list[int]) -> None:
        branches = {f"branch{i}": RunnableLambda(lambda _, i=i: f"number {i}") | model for i in range(4)}
        answers = RunnableParallel(branches).invoke("x", {"max_concurrency": 4})
        assert [answers[f"branch{i}"].content for i in range(4)] == alone[:4]
        assert max(passes) > 1


def test_more_prompts_than_the_queue_holds(model: CARDChatModel) -> None:
    limits = Limits(max_num_seqs=2, max_queue=40)
    with model.model_copy(update={"limits": limits, "max_tokens": 1}) as other:
        assert len(other.batch(["hi"] * 100)) == 100
        assert len(asyncio.run(other.abatch(["hi"] * 100))) == 100
        many: list[Any] = [[HumanMessage("hi")]] * 100
        assert len(other.generate(many).generations) == 100
        assert len(asyncio.run(other.agenerate(many)).generations) == 100


def test_max_concurrency_is_kept(model: CARDChatModel, passes: list[int]) -> None:
    model.batch(PROMPTS[:8], {"max_concurrency": 2})
    assert max(passes) == 2
    asyncio.run(model.abatch(PROMPTS[:8], {"max_concurrency": 3}))
    assert max(passes) == 3


def test_small_batches(model: CARDChatModel) -> None:
    assert model.batch([]) == [] == asyncio.run(model.abatch([]))
    assert list(model.batch_as_completed([])) == []
    assert len(model.batch(["hi"])) == 1


async def test_each_item_fails_alone(model: CARDChatModel, alone: list[str]) -> None:
    inputs: list[Any] = [*PROMPTS[:3], [], "x" * 5000, *PROMPTS[3:6]]
    for answers in (
        model.batch(inputs, return_exceptions=True),
        await model.abatch(inputs, return_exceptions=True),
        [answer for _, answer in sorted(model.batch_as_completed(inputs, return_exceptions=True))],
    ):
        assert isinstance(answers[3], InvalidInputError)
        assert isinstance(answers[4], ContextOverflowError)
        assert [answer.content for answer in answers[:3] + answers[5:]] == alone[:6]
    with pytest.raises(InvalidInputError):
        model.batch(inputs)
    with pytest.raises(InvalidInputError):
        await model.abatch(inputs)


async def test_each_item_has_its_own_callbacks(model: CARDChatModel) -> None:
    class Runs(BaseCallbackHandler):
        def __init__(self) -> None:
            self.started, self.ended, self.failed = list[Any](), list[Any](), list[Any]()

        def on_chat_model_start(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
            self.started.append(run_id)

        def on_llm_end(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
            self.ended.append(run_id)

        def on_llm_error(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
            self.failed.append(run_id)

    for call in ("batch", "abatch"):
        handlers = [Runs() for _ in range(5)]
        configs: Any = [{"callbacks": [handler], "tags": [f"item {i}"]} for i, handler in enumerate(handlers)]
        inputs: list[Any] = [*PROMPTS[:4], []]
        answers = getattr(model, call)(inputs, configs, return_exceptions=True)
        answers = await answers if call == "abatch" else answers
        assert [len(handler.started) for handler in handlers] == [1] * 5
        assert [handler.started == handler.ended for handler in handlers] == [True] * 4 + [False]
        assert handlers[4].failed == handlers[4].started


async def test_tokens_reach_the_callbacks_of_their_own_item(model: CARDChatModel) -> None:
    class Tokens(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.text = ""

        async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.text += token

    handlers = [Tokens() for _ in range(6)]
    configs: Any = [{"callbacks": [handler]} for handler in handlers]
    answers = await model.abatch(PROMPTS[:6], configs, stream=True)
    assert [handler.text for handler in handlers] == [answer.content for answer in answers]


def test_a_rate_limiter_meters_each_prompt_of_a_batch(model: CARDChatModel) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001, max_bucket_size=1)
    taken = []
    acquire = limiter.acquire
    limiter.acquire = lambda **kwargs: taken.append(1) or acquire(**kwargs)  # type: ignore[method-assign,func-returns-value]
    model.model_copy(update={"rate_limiter": limiter}).batch(PROMPTS[:5])
    assert len(taken) == 5


def test_what_was_announced_and_never_comes_holds_nobody_up(model: CARDChatModel) -> None:
    engine = model._engine()
    model.invoke("hi")
    for count in (1000, 2, 0):
        started = time.monotonic()
        engine.announce(count)
        assert model.invoke("hi").content
        assert time.monotonic() - started < 1.0


def test_those_that_trickle_in_do_not_hold_the_first_one_up(model: CARDChatModel) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=20, check_every_n_seconds=0.005, max_bucket_size=1)
    slow = model.model_copy(update={"rate_limiter": limiter})
    started = time.monotonic()
    answers = slow.batch_as_completed(PROMPTS[:16])
    next(iter(answers))
    assert time.monotonic() - started < 0.6, "the last one comes after 0.8 s"


def test_a_batch_of_another_model(model: CARDChatModel, passes: list[int], toy: dict[str, Any]) -> None:
    other = {"model": toy["model"], "draft_model": None}
    for _ in range(2):  # not loaded yet, and then loaded
        passes.clear()
        model.batch(PROMPTS, **other)
        assert max(passes) == 8


async def test_a_failed_batch_begins_nothing_more(model: CARDChatModel) -> None:
    class Starts(BaseCallbackHandler):
        def __init__(self) -> None:
            self.count = 0

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.count += 1

    for call in ("batch", "abatch"):
        starts = Starts()
        with pytest.raises(InvalidInputError):
            failed = getattr(model, call)([[], *["hi"] * 200], {"callbacks": [starts]}, max_tokens=400)
            await failed
        await asyncio.sleep(0.3)
        assert starts.count < 80, "more than the calls that were under way"


def test_a_signal_while_a_batch_begins(model: CARDChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, calls = ContextThreadPoolExecutor.submit, list[int]()

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(ContextThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.batch(PROMPTS, max_tokens=400)
    assert batches._group.get() is None
    end = time.monotonic() + 5
    while model._engine().num_open:
        assert time.monotonic() < end
        time.sleep(0.005)
