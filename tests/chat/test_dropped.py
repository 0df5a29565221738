"""Answers without a reader end: those of failed or abandoned batches, and calls that ctrl-c interrupts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from langchain_card import CARDChatModel
from langchain_card.core.request import FinishReason
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Generation
from langchain_card.errors import GenerationAbortedError, InvalidInputError

LONG = 900
"""Tokens that take seconds; no test waits for them."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta", "ignore:.*are in beta")


@pytest.fixture
def model(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy).load() as model:
        yield model


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Every request that an engine gets during the test."""
    submit, generations = Engine.submit, list[Generation]()

    def recorded(self: Engine, *args: Any) -> Generation:
        generations.append(submit(self, *args))
        return generations[-1]

    monkeypatch.setattr(Engine, "submit", recorded)
    return generations


def wait_for_ends(model: CARDChatModel, submitted: list[Generation], count: int | None = 1) -> None:
    end = time.monotonic() + 10
    while not all(generation.finished for generation in submitted) or model._engine().num_running:
        assert time.monotonic() < end, "an answer goes on that nobody reads"
        time.sleep(0.005)
    assert [generation._reason for generation in submitted] == [FinishReason.ABORT] * (
        len(submitted) if count is None else count
    )


# Batches.


def test_a_failed_item_ends_the_rest_of_its_batch(model: CARDChatModel, submitted: list[Generation]) -> None:
    with pytest.raises(InvalidInputError, match="at least one message"):
        model.batch(["hi", "ho", []], max_tokens=LONG)
    wait_for_ends(model, submitted, None)
    with pytest.raises(InvalidInputError):
        asyncio.run(model.abatch(["hi", "ho", []], max_tokens=LONG))
    wait_for_ends(model, submitted, None)


def test_leaving_batch_as_completed_ends_the_rest(model: CARDChatModel, submitted: list[Generation]) -> None:
    batch = model.with_config({"max_concurrency": 3}).batch_as_completed(
        [[], "hi", "ho"], max_tokens=LONG, return_exceptions=True
    )
    assert isinstance(next(batch)[1], InvalidInputError)
    while len(submitted) < 2:
        time.sleep(0.01)
    batch.close()  # type: ignore[attr-defined]
    wait_for_ends(model, submitted, 2)


async def test_leaving_abatch_as_completed_ends_the_rest(model: CARDChatModel, submitted: list[Generation]) -> None:
    batch = model.abatch_as_completed([[], "hi", "ho"], max_tokens=LONG, return_exceptions=True)
    async for _, answer in batch:
        assert isinstance(answer, InvalidInputError)
        break
    await batch.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(wait_for_ends, model, submitted, None)
    assert len(asyncio.all_tasks()) == 1


def test_the_callbacks_of_a_batch_that_was_left_say_why(model: CARDChatModel) -> None:
    class Errors(BaseCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[BaseException] = []

        def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
            self.seen.append(error)

    errors = Errors()
    with pytest.raises(InvalidInputError):
        model.batch(["hi", []], {"callbacks": [errors]}, max_tokens=LONG)
    end = time.monotonic() + 10
    while len(errors.seen) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(isinstance(error, (InvalidInputError, GenerationAbortedError)) for error in errors.seen)


# ctrl-c.

CALLS = (
    "model.invoke('hi', max_tokens=900)",
    "[piece for piece in model.stream('hi', max_tokens=900)]",
    "model.batch(['hi'] * 8, max_tokens=900)",
    "(RunnableLambda(lambda text: text) | model.bind(max_tokens=900)).batch(['hi'] * 8)",
    "model.generate([[HumanMessage('hi')]] * 4, max_tokens=900)",
    "model.stream_events('hi', version='v3', max_tokens=900).output",
    "asyncio.run(model.ainvoke('hi', max_tokens=900))",
    "asyncio.run(model.abatch(['hi'] * 8, max_tokens=900))",
)


@pytest.mark.slow
def test_ctrl_c_ends_the_answers_and_the_model_goes_on(toy: dict[str, Any]) -> None:
    code = """if True:
        import asyncio, os, signal, sys, threading, time
        from langchain_core.messages import HumanMessage
        from langchain_core.runnables import RunnableLambda
        from langchain_card import CARDChatModel
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from langchain_card.engine.engine import Engine
        model = CARDChatModel(model=sys.argv[1], draft_model=None).load()
        engine, submit, submitted = model._engine(), Engine.submit, []
        Engine.submit = lambda *args: submitted.append(submit(*args)) or submitted[-1]
        def interrupt():
            while not engine.num_running:
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        for call in sys.argv[2:]:
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                eval(compile(call, "call", "eval"))  # of a string it would count as unhandled
                print("never interrupted:", call)
            except KeyboardInterrupt:
                left = time.monotonic()
                while engine.num_running or engine.num_open:
                    time.sleep(0.001)
                reasons = {generation._reason.value for generation in submitted}
                again = model.invoke("hi", max_tokens=1).usage_metadata["output_tokens"]
                print(*reasons, time.monotonic() - left, again)
                submitted.clear()
    """
    command = [sys.executable, "-W", "ignore", "-c", code, toy["model"], *CALLS]
    run = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [(word, tokens) for word, _, tokens in lines] == [("abort", "1")] * len(CALLS), run.stdout
    assert max(float(seconds) for _, seconds, _ in lines) < 1.0
