"""The engine around the core: devices, messages, deaths, errors before weights."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.candidates import CandidateTree
from langchain_card.core.request import FinishReason, SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import (
    ContextOverflowError,
    DeviceError,
    EngineBusyError,
    EngineClosedError,
    InvalidInputError,
    VocabularyMismatchError,
)
from langchain_card.limits import Pins
from langchain_card.models import loader
from langchain_card.runtime import draft_form
from tests.simulation import FixedPolicy
from tests.support import tiny, vocabularies

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.make_target("qwen2", folder / "target")
    return target, tiny.make_draft(target, folder / "draft", noise=0.05)


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": pair[0], "draft_model": pair[1], "dtype": "float64", **options})


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: object) -> None:
        raise AssertionError(f"weights were read: {spec}")

    monkeypatch.setattr(loader, "load_model", refuse)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "cuda:7"}, DeviceError, ["device = 'cuda:7'", "CUDA devices", "Hint"]),
        ({"draft_device": "cuda:7"}, DeviceError, ["draft_device = 'cuda:7'", "CUDA devices", "Hint"]),
        ({"device": "toaster"}, DeviceError, ["device = 'toaster'", "is not a device", "Hint"]),
        ({"device": "meta"}, DeviceError, ["device = 'meta'", "only CPU and CUDA"]),
        ({"quantization": "int8"}, InvalidInputError, ["quantization = 'int8'", "float32", "Hint"]),
        ({"max_model_len": 5000}, InvalidInputError, ["max_model_len = 5000", "2,048 positions"]),
    ],
)
def test_errors_before_any_weights(
    pair: tuple[str, str], options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        Engine(config(pair, **options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_tokenizers_with_nothing_in_common_are_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    other = tiny.make_target("qwen2", tmp_path / "other")
    vocabularies.words().save_pretrained(other)
    with pytest.raises(VocabularyMismatchError, match=r"its tokenizer shares \d tokens with .*Hint"):
        Engine(config(pair, draft_model=other))


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], {}, InvalidInputError, "prompt_ids = .*at least one token"),
        ([99_999], {}, InvalidInputError, "prompt_ids = 99999.*between 0 and"),
        (PROMPT, {"max_tokens": 0}, InvalidInputError, "max_tokens = 0.*between 1 and"),
        (PROMPT, {"max_tokens": -5}, InvalidInputError, "max_tokens = -5"),
        (PROMPT, {"temperature": -1.0}, InvalidInputError, "temperature = -1.0"),
        (PROMPT, {"schedule": "paralel"}, InvalidInputError, "schedule = 'paralel'.*did you mean parallel"),
        (PROMPT, {"stop": ("",)}, InvalidInputError, "stop = ''.*1 to 256"),
        (PROMPT, {"stop": ("a\ud800",)}, InvalidInputError, "stop = .*half a character"),
        (PROMPT * 40, {}, ContextOverflowError, "prompt = '800 tokens'.*the context holds 512.*Hint"),
    ],
)
def test_bad_requests_end_alone(
    pair: tuple[str, str], prompt: list[int], params: dict[str, Any], error: type[Exception], words: str
) -> None:
    with Engine(config(pair, max_model_len=512)) as engine:
        with pytest.raises(error, match=words):
            engine.submit(prompt, SamplingParams(**params))
        assert len(engine.submit(PROMPT, SamplingParams(max_tokens=5)).result().token_ids) == 5


def test_models_lie_where_they_were_told(pair: tuple[str, str]) -> None:
    with Engine(config(pair, device="cpu", draft_device="cpu")) as engine:
        assert engine.devices == {"target": "cpu", "draft": "cpu"}
    if torch.cuda.is_available():
        with Engine(config(pair, device="cuda", draft_device="cpu")) as engine:
            assert engine.devices == {"target": "cuda:0", "draft": "cpu"}
            assert len(engine.submit(PROMPT, SamplingParams(max_tokens=8)).result().token_ids) == 8


def plain(value: Any) -> bool:
    """Whether a message consists of host numbers, strings and containers of them."""
    if dataclasses.is_dataclass(value):
        return all(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return all(map(plain, value))
    return value is None or type(value) in (int, float, str, bool) or isinstance(value, FinishReason)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_messages_hold_host_numbers_only(pair: tuple[str, str], schedule: str) -> None:
    seen: set[str] = set()
    with Engine(config(pair)) as engine:
        handle = engine.backend.coordinator.handle
        transports = engine.backend.transports

        def spying(event: Any) -> Any:
            for attribute in ("proposal", "verdict"):
                if (message := getattr(event, attribute, None)) is not None:
                    assert plain(message), message
                    seen.add(type(message).__name__)
            return handle(event)

        engine.backend.coordinator.handle = spying  # type: ignore[method-assign]
        for transport in transports.values():
            send = transport.send

            def spying_send(command: Any, send: Any = send) -> None:
                assert plain(command), command
                seen.add(type(command).__name__)
                send(command)

            transport.send = spying_send  # type: ignore[method-assign]
        engine.submit(PROMPT, SamplingParams(max_tokens=12, schedule=schedule)).result()  # type: ignore[arg-type]
    assert seen >= {"Proposal", "Verdict", "Begin", "Correct", "Grow", "End"}


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_a_draft_that_dies_costs_speed_only(
    pair: tuple[str, str], schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(config(pair, pins=Pins(lead=2))) as engine, caplog.at_level(logging.CRITICAL):
        params = SamplingParams(max_tokens=40, schedule=schedule)  # type: ignore[arg-type]
        wanted = engine.submit(PROMPT, params).result().token_ids
        drafter = engine.backend.transports["model"]._worker.drafter  # type: ignore[attr-defined]
        step, calls = drafter.step, []

        def failing(budgets: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("the draft's device is gone")
            return step(budgets)

        drafter.step = failing
        again = dataclasses.replace(params, tenant="again")  # nobody has written this answer yet
        assert engine.submit(PROMPT, again).result().token_ids == wanted
        assert len(calls) == 4
        assert engine.submit(PROMPT, params).result().token_ids == wanted, "and so does the next request"


@pytest.mark.parametrize("schedule", ["plain", "sequential", "parallel"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_that_fails_in_the_middle_goes_on_exactly(
    pair: tuple[str, str], schedule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew and reads its own answer again; the words stay what they were."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, schedule=schedule)  # type: ignore[arg-type]
    with Engine(config(pair)) as engine:
        wanted = engine.submit(PROMPT, params).result().token_ids
        verify, calls = TargetWorker.verify, []

        def failing(self: TargetWorker, windows: Any) -> Any:
            calls.append(windows)
            if len(calls) in (5, 9):
                raise torch.OutOfMemoryError("planted") if len(calls) == 9 else RuntimeError("planted")
            return verify(self, windows)

        monkeypatch.setattr(TargetWorker, "verify", failing)
        again = dataclasses.replace(params, tenant="again")  # nobody has written this answer yet
        assert engine.submit(PROMPT, again).result().token_ids == wanted
        assert len(calls) > 9


def test_draining_finishes_what_was_taken_and_takes_no_more(pair: tuple[str, str]) -> None:
    with Engine(config(pair)) as engine:
        held = [engine.submit(PROMPT, SamplingParams(max_tokens=30)) for _ in range(3)]
        assert engine.drain(0.0) is False
        with pytest.raises(EngineClosedError, match="draining"):
            engine.submit(PROMPT)
        assert engine.drain() is True
        assert [len(generation.result().token_ids) for generation in held] == [30, 30, 30]


def test_the_queue_is_bounded(pair: tuple[str, str]) -> None:
    from langchain_card.limits import Limits

    with Engine(config(pair, limits=Limits(max_queue=2))) as engine:
        held = [engine.submit(PROMPT, SamplingParams(max_tokens=500))]
        with pytest.raises(EngineBusyError, match=r"max_queue = 2: as many requests wait already"):
            held.extend(engine.submit(PROMPT, SamplingParams(max_tokens=500)) for _ in range(50))
        for generation in held:
            generation.abort()
        assert {generation.result().finish_reason for generation in held} == {FinishReason.ABORT}
        assert engine.num_running == 0


@pytest.mark.slow
def test_the_engine_imports_with_torch_and_transformers_alone() -> None:
    """One process with its own threads needs neither LangChain nor pydantic, msgspec, rich, gguf or numba."""
    code = (
        "import sys\n"
        "for name in ('langchain_core', 'pydantic', 'msgspec', 'rich', 'gguf', 'numba'): sys.modules[name] = None\n"
        "from langchain_card.engine.engine import Engine, EngineConfig\n"
        "import langchain_card; langchain_card.SamplingParams(), langchain_card.EngineConfig()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, langchain_card; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"quantization": "int8"}], ids=["float64", "int8"])
@pytest.mark.slow
def test_a_draft_with_a_cut_head_proposes_frequent_tokens_only(
    options: dict[str, str], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of plain decoding, also where penalties, bias and bans name tokens that are left out."""
    monkeypatch.setattr(draft_form, "HEAD", 150)
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    model, draft = pair
    seen: set[int] = set()
    with Engine(EngineConfig(model, draft, drafters=(), **options)) as opened:  # type: ignore[arg-type]
        insert = CandidateTree.insert

        def noting(self: CandidateTree, parent: int, token: int, *rest: Any, **named: Any) -> int:
            seen.add(token)
            return insert(self, parent, token, *rest, **named)

        monkeypatch.setattr(CandidateTree, "insert", noting)
        for odd in ({}, {"logit_bias": ((300, 2.0), (7, 1.0)), "banned_ids": (310, 9), "repetition_penalty": 1.2}):
            for temperature in (0.0, 0.9):
                params = SamplingParams(max_tokens=60, temperature=temperature, **odd)  # type: ignore[arg-type]
                wanted = opened.submit(range(40), dataclasses.replace(params, schedule="plain")).result().token_ids
                got = opened.submit(range(40), dataclasses.replace(params, schedule="sequential")).result()
                assert got.token_ids == wanted
                assert got.stats.verified > 0
    assert seen and max(seen) < 150 < max(wanted)


def test_execution_is_a_matter_of_cuda() -> None:
    """A CPU's steps keep to what is exact there."""
    for execution in ("eager", "graphs", "compiled"):
        config = EngineConfig(execution=execution)
        assert (config.execution_on("cpu"), config.execution_on("cuda")) == (None, execution)
    assert EngineConfig().execution_on("cuda") is None
