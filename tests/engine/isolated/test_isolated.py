"""An engine in a process of its own: whatever becomes of it, every request ends once, with the exact answer."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from langchain_core.messages import AIMessageChunk

from langchain_card import CARDChatModel
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Emit
from langchain_card.core.request import FinishReason, Request, RequestStats, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.isolated.main import _ForwardingConsumer
from langchain_card.engine.isolated.messages import FROM_ENGINE, TO_ENGINE, Began
from langchain_card.engine.transports.frames import Wire
from langchain_card.errors import EngineClosedError, EngineError, ModelStoreError, UnsupportedModelError
from langchain_card.limits import Limits
from tests.support import tiny
from tests.support.isolated import Waiting, pool_of, process_of
from tests.support.processes import gone, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = tiny.byte_tokenizer()
MAX_TOKENS = 60
ASKED: list[tuple[list[int], SamplingParams]] = [
    (
        TOKENIZER(f"def number_{i}(a, b):\n    return ").input_ids,
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=float(i % 2),
            seed=i,
            schedule=("parallel", "plain", "sequential")[i % 3],  # type: ignore[arg-type]
            logprobs=2 if i % 4 == 0 else None,
            grammar="%llguidance {}\nstart: /[ -z]{30,50}/" if i % 4 == 1 else "",
        ),
    )
    for i in range(8)
]
LIMITS = Limits(max_num_seqs=4, restart_seconds=0.01, max_deaths=100)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("llama", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    return EngineConfig(target, draft, dtype="float64", max_model_len=512, limits=LIMITS)


def isolated(config: EngineConfig, **limits: Any) -> EngineConfig:
    bounds = {name: getattr(config.limits, name) for name in Limits.__slots__} | limits
    return EngineConfig(
        config.model, config.draft_model, dtype="float64", max_model_len=512, isolate=True, limits=Limits(**bounds)
    )


@pytest.fixture(scope="module")
def wanted(pair: EngineConfig) -> list[tuple[int, ...]]:
    with Engine(pair) as engine:
        return [engine.submit(*asked).result().token_ids for asked in ASKED]


@pytest.fixture(scope="module")
def engine(pair: EngineConfig) -> Iterator[Engine]:
    with Engine(isolated(pair)) as engine:
        yield engine


def test_the_same_answers(engine: Engine, wanted: list[tuple[int, ...]]) -> None:
    done = [generation.result() for generation in [engine.submit(*asked) for asked in ASKED]]
    assert [completion.token_ids for completion in done] == wanted
    assert all(completion.logprobs for completion in done[::4])
    assert sum(completion.stats.accepted for completion in done) > 0
    assert engine.num_open == engine.num_running == 0
    assert engine.config.limits.max_num_seqs == 4


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_kills_under_load(engine: Engine, wanted: list[tuple[int, ...]], kills: int) -> None:
    """Requests go on where they were; none ends twice, none is lost."""
    rng, pids = random.Random(0), set()
    for _ in range(kills):
        process = process_of(engine)
        generations = [engine.submit(*asked) for asked in ASKED]
        pieces = iter(generations[0])
        for _ in range(rng.randrange(1, 30)):
            next(pieces)
        process.send_signal(signal.SIGKILL)
        pids.add(process.pid)
        first = list(pieces)
        assert first and generations[0].finished
        assert [generation.result().token_ids for generation in generations] == wanted
    assert len(pids) == kills and all(map(gone, pids))


def test_what_cannot_be_sent_fails_alone(engine: Engine, wanted: list[tuple[int, ...]]) -> None:
    process = process_of(engine)
    generation = engine.submit(*ASKED[0])
    pieces = iter(generation)
    next(pieces)
    bad = Waiting(10**6)
    bad.request = Request(10**6, (1, 2), SamplingParams(stop=("\ud800",)))
    engine.backend.submit(bad)
    assert generation.result().token_ids == wanted[0]
    (error,) = bad.ends
    assert isinstance(error, EngineError) and isinstance(error.__cause__, UnicodeEncodeError)
    assert "request = 1000000: it cannot be sent to an engine" in str(error)
    assert process_of(engine).pid == process.pid and not engine.num_open


@pytest.mark.slow
def test_statistics_are_those_of_all_lives(engine: Engine) -> None:
    prompt, params = ASKED[0]
    generation = engine.submit(prompt, params)
    pieces = iter(generation)
    taken = [next(pieces) for _ in range(20)]
    before = generation.stats
    assert before is not None
    rounds, accepted = before.rounds, before.accepted
    process_of(engine).kill()
    taken += pieces
    stats = generation.result().stats
    assert stats.output_tokens == len(generation.result().token_ids) == len(taken)
    assert stats.rounds > rounds and stats.accepted >= accepted
    assert stats.resumed == {"died": 1}
    assert stats.ended - stats.first_token > 0.5, "the time until the next life counts"


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(pair: EngineConfig, wanted: list[tuple[int, ...]]) -> None:
    with Engine(isolated(pair, silence_seconds=8.0)) as engine:
        generation = engine.submit(*ASKED[0])
        pieces = iter(generation)  # one that is dropped gives its request up
        next(pieces)
        process = process_of(engine)
        process.send_signal(signal.SIGSTOP)
        assert generation.result().token_ids == wanted[0]
        assert gone(process.pid)


@pytest.mark.slow
def test_one_that_always_dies_is_given_up(pair: EngineConfig) -> None:
    with Engine(isolated(pair, max_deaths=1)) as engine:
        (process,) = pool_of(engine).processes
        for _ in range(2):
            process_of(engine).kill()
            wait_until(lambda: process.pid is None, 30)
            if process.error is None:
                wait_until(lambda: process.is_up, 60)
        with pytest.raises(EngineError, match=r"engine process = .*ended by signal 9"):
            engine.submit(*ASKED[0]).result()


@pytest.mark.slow
def test_what_loading_raises_is_raised_here(tmp_path: Any, pair: EngineConfig) -> None:
    with pytest.raises((ModelStoreError, UnsupportedModelError)):
        Engine(EngineConfig(str(tmp_path), None, isolate=True))


def test_stop_strings_aborts_and_slow_readers(engine: Engine, wanted: list[tuple[int, ...]]) -> None:
    text = TOKENIZER.decode(wanted[0])
    stop = text[10:13]
    stopped = engine.submit(ASKED[0][0], SamplingParams(max_tokens=MAX_TOKENS, stop=(stop,))).result()
    assert stopped.finish_reason is FinishReason.STOP and stopped.text == text[: text.index(stop)]
    for piece in engine.submit(*ASKED[3]):
        assert piece.token_id == wanted[3][0]
        break
    wait_until(lambda: not engine.num_open)


@pytest.mark.slow
def test_closing_leaves_nothing(pair: EngineConfig) -> None:
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    engine = Engine(isolated(pair))
    pid = process_of(engine).pid
    generation = engine.submit(*ASKED[0])
    assert [signal.getsignal(each) for each in signal.valid_signals()] == handlers, "signals are the program's"
    engine.close()
    with pytest.raises(EngineClosedError):
        generation.result()
    assert not psutil.pid_exists(pid)


def test_a_closed_connection_is_no_failure() -> None:
    """Tokens and failures on their way to a parent that is gone do not raise in the thread of the target."""
    ours, theirs = socket.socketpair()
    wire = Wire(theirs, sends=FROM_ENGINE, takes=TO_ENGINE)
    ours.close()
    with pytest.raises(OSError, match="Broken pipe"):
        wire.send(Began(0))
    consumer = _ForwardingConsumer(Request(0, (1,), SamplingParams(), ()), wire)
    consumer.watch(RequestStats())
    consumer.push(Emit(0, (1,)))
    consumer.fail(EngineClosedError("engine", "closed", "the engine was closed"))
    wire.close()


@pytest.mark.slow
def test_draining_ends_what_is_open(pair: EngineConfig, wanted: list[tuple[int, ...]]) -> None:
    with Engine(isolated(pair)) as engine:
        generations = [engine.submit(*asked) for asked in ASKED]
        next(iter(generations[0]))
        process_of(engine).kill()
        assert engine.drain(60)
        assert [generation.result().token_ids for generation in generations[1:]] == wanted[1:]
        with pytest.raises(EngineClosedError):
            engine.submit(*ASKED[0])


@pytest.mark.slow
async def test_a_chat_model(pair: EngineConfig) -> None:
    fields = {"model": pair.model, "draft_model": pair.draft_model, "dtype": "float64", "max_tokens": 50}
    with CARDChatModel(**fields) as near, CARDChatModel(**fields, isolate=True) as far:
        whole = near.invoke("Hi.").content
        engine = far._engine()
        chunks = []
        async for chunk in far.astream("Hi."):
            chunks.append(chunk)
            if len(chunks) == 5:
                process_of(engine).kill()
        assert sum(chunks[1:], start=chunks[0]).content == whole
        assert isinstance(chunks[0], AIMessageChunk)
        assert far.bind_tools([], tool_choice="none").invoke("Hi.").content == whole
        task = asyncio.ensure_future(far.ainvoke("Hi."))
        await asyncio.to_thread(wait_until, lambda: engine.num_open == 1)
        task.cancel()
        await asyncio.to_thread(wait_until, lambda: engine.num_open == 0)


_PARENT = """
import sys, time
from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
if __name__ == "__main__":
    engine = Engine(EngineConfig(sys.argv[1], "ngram", dtype="float64", max_model_len=512, isolate=True))
    print(engine.backend.pool.processes[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_it_does_not_outlive_its_parent(pair: EngineConfig) -> None:
    command = [sys.executable, "-c", _PARENT, pair.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    wait_until(lambda: gone(pid), 10)
