"""How a `CARDChatModel` begins and ends: construction, shared engines, closing, copies."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField
from pydantic import BaseModel, ValidationError

from langchain_card import CARDChatModel
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.errors import EngineClosedError, EngineError
from tests.support.processes import wait_until
from tests.support.weights import num_loaded_models

LONG = 900
"""Tokens that take seconds; no test waits for them."""


@pytest.fixture
def model(toy: dict[str, Any]) -> Iterator[CARDChatModel]:
    with CARDChatModel(**toy) as model:
        yield model


# Construction


def test_construction_touches_neither_weights_nor_torch() -> None:
    code = """if True:
        import sys
        from langchain_card import CARDChatModel
        CARDChatModel(timeout=60, stop=[], max_retries=2, api_key="secret", temperature=0, max_tokens=100)
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_default_is_the_built_in_pair() -> None:
    model = CARDChatModel()
    assert (model.model, model.draft_model) == ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")
    assert (model.max_tokens, model.temperature, model.schedule, model.seed) == (512, 0.0, "auto", None)
    assert CARDChatModel(model_name="smollm2-135m").model == "smollm2-135m"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 0.5}, "temprature = 0.5: is not a field of CARDChatModel. Hint: did you mean temperature"),
        ({"modle": "x"}, "did you mean model"),
        (
            {"model": "qwen2.5-coder"},
            "model = 'qwen2.5-coder': neither a built-in name.*did you mean qwen2.5-coder-1.5b",
        ),
        (
            {"model": "llama3.2"},
            "model = 'llama3.2': .*built in are .*qwen2.5-coder-1.5b.*Ollama.*give a hub id such as",
        ),
        ({"model": "~/models/none.gguf"}, f"there is no file {Path.home()}/models/none.gguf"),
        ({"mood": 1}, r"is not a field of CARDChatModel. Hint: help\(CARDChatModel\) lists"),
        (
            {"max_tokens": 5, "max_completion_tokens": 7},
            r"max_tokens = \[5, 7\]: is given as max_tokens and as max_completion_tokens, which are one option",
        ),
        ({"draft_model": "smollm"}, "draft_model = 'smollm': neither a built-in name.*smollm2-135m"),
        ({"model": ""}, "model = ''"),
        ({"max_tokens": 0}, "max_tokens = 0: must be a whole number between 1 and"),
        ({"max_tokens": -3}, "max_tokens = -3"),
        ({"max_tokens": 10**9}, "max_tokens = 1000000000"),
        ({"temperature": -0.1}, "temperature = -0.1: must be a number between 0.0 and 10.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"seed": -1}, "seed = -1"),
        ({"schedule": "paralel"}, "'plain', 'sequential' or 'parallel'"),
        ({"dtype": "int3"}, "'float32'"),
        ({"quantization": "int3"}, "quantization = 'int3': must be one of auto, file, int8, int4"),
        ({"max_model_len": 3}, "max_model_len = 3: must be a whole number between 16 and"),
        ({"stop": [""]}, "stop = ''"),
        ({"stop": ["x"] * 17}, "stop = 17: at most 16 stop strings"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_is_wrong_is_found_at_construction(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CARDChatModel(**fields)


def test_parameters_for_tracing_and_caching() -> None:
    model = CARDChatModel(temperature=0.5, seed=3)
    params = model._get_ls_params(stop=["x"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("card", model.model, ["x"])
    assert params["ls_temperature"] == 0.5
    assert model._llm_type == "card-chat"
    assert model._get_llm_string() != CARDChatModel(temperature=0.5, seed=4)._get_llm_string()
    assert "langchain-card" in model.metadata["lc_versions"]


# Engines


def test_instances_share_an_engine_until_the_last_one_closes(toy: dict[str, Any]) -> None:
    before = num_loaded_models()
    first, second = CARDChatModel(**toy).load(), CARDChatModel(**toy, schedule="plain", temperature=1.0)
    assert first.load()._engine() is second._engine()
    assert num_loaded_models() == before + 1
    first.close()
    first.close()
    assert second.invoke("hi").usage_metadata["output_tokens"] > 0  # type: ignore[index]
    with pytest.raises(EngineClosedError, match=r"was closed.*make a new one"):
        first.invoke("hi")
    second.close()
    assert num_loaded_models() == before


def test_threads_load_once(toy: dict[str, Any]) -> None:
    before = num_loaded_models()
    with CARDChatModel(**toy) as model:
        engines: list[Any] = []
        threads = [threading.Thread(target=lambda: engines.append(model._engine())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(engine) for engine in engines}) == 1
        assert num_loaded_models() == before + 1
    assert num_loaded_models() == before


def test_garbage_gives_the_engine_back(toy: dict[str, Any]) -> None:
    before = num_loaded_models()
    model = CARDChatModel(**toy).load()
    cycle = [model]
    cycle.append(cycle)
    del model, cycle
    gc.collect()
    wait_until(lambda: num_loaded_models() == before)


def test_copies_are_lazy_handles(model: CARDChatModel) -> None:
    text = model.invoke("hi").content
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model), model.model_copy()]
    for other in copies:
        assert other._lease is not model._lease
        assert other.model_dump() == model.model_dump()
        assert other.invoke("hi").content == text
        other.close()
    assert model.invoke("hi").content == text, "closing a copy closes nothing else"


def test_changed_fields_change_the_engine(toy: dict[str, Any], model: CARDChatModel) -> None:
    model.load()
    other = model.model_copy(update={"max_model_len": 64})
    assert other._engine().max_model_len == 64
    assert model._engine().max_model_len == 2048
    other.close()


def test_configurable_fields_share_the_engine(model: CARDChatModel) -> None:
    model.load()
    loaded = num_loaded_models()
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    for length in (2, 3):
        answer = configurable.invoke("hi", config={"configurable": {"length": length}})
        assert answer.usage_metadata["output_tokens"] == length
    assert num_loaded_models() == loaded


def test_closing_ends_answers_that_still_run(toy: dict[str, Any]) -> None:
    model = CARDChatModel(**toy, max_model_len=1000)
    stream = model.stream("hi", max_tokens=LONG)
    next(stream)
    model.close()
    with pytest.raises(EngineClosedError, match="while the request ran"):
        list(stream)


async def test_loading_leaves_the_event_loop_free(toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, threads = CARDChatModel._prepare, []

    def recorded(self: CARDChatModel, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(self, *args)

    monkeypatch.setattr(CARDChatModel, "_prepare", recorded)
    with CARDChatModel(**toy) as model:
        await model.ainvoke("hi")
    assert threads
    assert threading.current_thread() not in threads


def test_a_model_works_in_one_event_loop_after_another(model: CARDChatModel) -> None:
    texts = {asyncio.run(model.ainvoke("hi")).content for _ in range(3)}
    assert texts == {model.invoke("hi").content}


def test_a_closed_engine_takes_no_requests(model: CARDChatModel) -> None:
    engine = model.load()._engine()
    model.close()
    with pytest.raises(EngineClosedError, match="the engine was closed"):
        engine.submit([1, 2, 3])


@pytest.mark.slow
def test_a_process_may_end_while_an_answer_is_written(toy: dict[str, Any]) -> None:
    code = """if True:
        import sys
        from langchain_card import CARDChatModel
        stream = CARDChatModel(model=sys.argv[1], draft_model=None).stream("hi", max_tokens=900)
        next(stream)
    """
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, toy["model"]], timeout=60, check=True)


@pytest.mark.parametrize(
    ("error", "words"), [(RuntimeError("planted"), "planted"), (MemoryError("planted"), "out of memory")]
)
def test_a_target_that_always_fails_hangs_nobody_and_recovers(
    model: CARDChatModel, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    wanted = model.invoke("hi").content

    def broken(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TargetWorker, "verify", broken)
        for _ in range(2):
            with pytest.raises(EngineError, match=words):
                model.invoke("hi")
    assert model.invoke("hi").content == wanted


def test_loading_tells_how_far_it_is(toy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    class Heard:
        def __init__(self) -> None:
            self.stages: list[str] = []

        def update(self, stage: str, done: int, total: int) -> None:
            self.stages.append(stage)

    heard = Heard()
    fields = {**toy, "dtype": "auto", "quantization": "int8"}
    with CARDChatModel(**fields).load(heard) as model:
        assert {"convert", f"load {toy['model']}"} <= {*heard.stages}
        assert not capsys.readouterr().err
        converted = model._engine()._pair.target.folder
    shutil.rmtree(converted)
    with CARDChatModel(**fields) as model:
        assert model.invoke("hi").content
        assert heard.stages[0] in capsys.readouterr().err


def test_a_model_in_another_pydantic_object_keeps_its_engine(model: CARDChatModel) -> None:
    class App(BaseModel):
        llm: CARDChatModel

    engine = model.load()._engine()
    assert App(llm=model).llm._engine() is engine
    gc.collect()
    time.sleep(0.2)
    assert model.invoke("hi").content
    model.close()
    with pytest.raises(EngineClosedError):
        App(llm=model).llm.invoke("hi")


async def test_a_model_that_loads_holds_up_no_other(toy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, begun, may_go_on = CARDChatModel._prepare, threading.Event(), threading.Event()

    def slow(self: CARDChatModel, *args: Any) -> Any:
        if self.max_model_len == 64:
            begun.set()
            may_go_on.wait(20)
        return prepare(self, *args)

    monkeypatch.setattr(CARDChatModel, "_prepare", slow)
    with CARDChatModel(**toy).load() as model, CARDChatModel(**toy, max_model_len=64) as cold:
        calls = [asyncio.create_task(cold.ainvoke("hi", max_tokens=1)) for _ in range(8)]
        await asyncio.to_thread(begun.wait)
        assert (await asyncio.wait_for(model.ainvoke("hi"), 10)).content
        may_go_on.set()
        assert len(await asyncio.gather(*calls)) == 8


async def test_context_variables_reach_the_loading_thread(
    model: CARDChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")
    prepare, seen = CARDChatModel._prepare, list[str]()

    def noting(self: CARDChatModel, *args: Any) -> Any:
        seen.append(variable.get())
        return prepare(self, *args)

    monkeypatch.setattr(CARDChatModel, "_prepare", noting)
    variable.set("mine")
    await model.ainvoke("hi")
    assert seen == ["mine"]
