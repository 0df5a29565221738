"""Kinds of engines: equal where one may go on with another's answers, and measured without a trace.

Ten seconds, and 30 of slow tests.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from langchain_card import plugins
from langchain_card.config import EngineConfig, Limits, Pins
from langchain_card.core.messages import Draining
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.errors import EngineClosedError, EngineError
from langchain_card.runtime import threads
from langchain_card.runtime.kind import Kind
from langchain_card.runtime.runner import ModelRunner
from tests.simulation import FixedPolicy
from tests.support import tiny
from tests.support.adapters import make

Pairs = dict[str, tuple[str, str]]
FLOAT64: dict[str, Any] = {"dtype": "float64"}
INT8: dict[str, Any] = {"quantization": "int8"}
STRICT: dict[str, Any] = {"dtype": "bfloat16", "exact": "strict", "limits": Limits(max_num_seqs=1)}
SLOW = [pytest.param(options, marks=pytest.mark.slow) for options in (INT8, STRICT)]
ALLOWED: Any = {"banned_ids": tuple(range(256, tiny.VOCAB))}  # not all ids are the tokenizer's
PROMPT = [(5 * i + i * i) % 250 for i in range(90)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    for name, by in (("none", 0.0), ("some", 1.0)):
        plugins.register("steering", name, lambda setting, by=by: lambda logits, texts: logits + by)
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(2,) * 4))


@pytest.fixture
def folder(tiny_pairs: Pairs, tmp_path: Path) -> Path:
    """A copy of a model that a test may change."""
    return Path(shutil.copytree(tiny_pairs["qwen2"][0], tmp_path / "copy"))


def config(model: Any, draft: str | None = None, **options: Any) -> EngineConfig:
    return EngineConfig(str(model), draft, max_model_len=256, **{**FLOAT64, **options})


def kind(model: Any, draft: str | None = None, **options: Any) -> Kind:
    with Engine(config(model, draft, **options)) as engine:
        return engine.kind


def change_weight(folder: Path) -> None:
    """Changes the last bit of one number."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int64)[3, 5] ^= 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "the last bit of a weight": change_weight,
    "the tokenizer": replace_text("tokenizer.json", '"special": true', '"special": false'),
    "the template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
    "the end of text": lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [257, 3]}'),
}


@pytest.mark.parametrize("options", [FLOAT64, *SLOW], ids=["float64", "int8", "strict"])
def test_equal_wherever_the_model_lies_and_whatever_drafts(
    tiny_pairs: Pairs, folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny_pairs["qwen2"]
    options = {"dtype": "auto", **options}
    first = kind(target, **options)
    assert first == kind(folder, draft, **options) == kind(target, "ngram", **options, pins=Pins(window=4))
    limits = Limits(max_num_seqs=2, max_window=12)
    other = kind(target, draft, **{**options, "limits": limits}, prefix_cache="folder")
    assert first.answer == other.answer and other.continues(first)
    strict = options.get("exact") == "strict"
    assert (first == other) is not strict, "the shape of strict steps decides how they round"
    if options.get("quantization") == "int8":
        monkeypatch.setattr(threads, "num_cores", lambda: 3)
        assert kind(target, **options) == first, "kernels for blocks do not depend on the number of threads"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_files_are_another_answer(folder: Path, change: Callable[[Path], None]) -> None:
    before = kind(folder)
    change(folder)
    after = kind(folder)
    assert before.answer != after.answer and not after.continues(before) and not before.continues(after)


@pytest.mark.slow
def test_every_setting_that_decides_an_answer_is_a_part_of_it(tiny_pairs: Pairs, tmp_path: Path) -> None:
    target, draft = tiny_pairs["qwen2"]
    one, other = (make(target, tmp_path / str(seed), seed).adapter for seed in range(2))
    settings: list[dict[str, Any]] = [
        {}, {"dtype": "float32"}, INT8 | {"dtype": "auto"}, INT8 | {"dtype": "auto", "kv_dtype": "float"},
        {"quantization": "int4", "dtype": "auto"}, {"exact": "strict"}, {"steering": "none"}, {"steering": "some"},
        {"adapters": (("a", one),)}, {"adapters": (("a", other),)}, {"adapters": (("b", one),)},
    ]  # fmt: skip
    kinds = [kind(target, **setting) for setting in settings]
    loose = "loose?threshold=0.3"
    kinds += [kind(target, draft, acceptance=rule) for rule in ("loose", loose)]
    kinds += [kind(target, None, acceptance=loose), kind(target, target, acceptance=loose)]
    kinds.append(kind(target, draft, acceptance=loose, drafters=()))
    assert len({each.answer for each in kinds}) == len(kinds)
    assert kinds[0].machine == kinds[6].machine != kinds[1].machine, "steering is no arithmetic of the target"


def test_a_bit_of_a_logit_is_another_machine(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever pass rounds differently: the text, a token, or the window, in its first row or its last."""
    target, step = tiny_pairs["qwen2"][0], ModelRunner.step
    first = kind(target)
    for passes, row in ((0, 0), (4, 0), (9, 0), (9, 7)):
        count = iter(range(99))

        def plant(self: ModelRunner, batch: Any, passes: int = passes, row: int = row, count: Any = count) -> Tensor:
            logits = step(self, batch).clone()
            if next(count) == passes:
                logits.view(torch.int64)[row, 11] ^= 1
            return logits

        monkeypatch.setattr(ModelRunner, "step", plant)
        planted = kind(target)
        assert planted.answer == first.answer and planted.machine != first.machine, (passes, row)
        assert planted.continues(first) and planted != first
        assert next(count) == 10


def contents(runner: ModelRunner) -> list[Any]:
    pool = runner.pool
    held = [(cache.token_ids, cache.owner, cache.damaged, cache.adapter) for cache in pool._caches]
    slots = range(0, pool.trash, pool.num_slots)
    parts = [part for first in slots for part in pool.kv.read(first, first + pool.num_slots).values()]
    return [held, [cache.index for cache in pool._free], [part.view(torch.uint8).numpy().tobytes() for part in parts]]


@pytest.mark.parametrize("options", [FLOAT64, *SLOW], ids=["float64", "int8", "strict"])
def test_nothing_remains_of_the_probe_while_all_places_are_taken(
    tiny_pairs: Pairs, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in the middle of an answer that holds the only place, whose candidates are in scratch slots."""
    kinds, passes, askers = list[str](), list[int](), list[threading.Thread]()
    before, after = list[Any](), list[Any]()
    settings = {"dtype": "auto", **options, "limits": Limits(max_num_seqs=1)}

    class Asking(FixedPolicy):
        def observe_pass(self, *seen: Any) -> None:
            passes.append(len(kinds))
            if len(passes) == 4:  # on the target's thread, which makes the call after this pass
                askers.extend(threading.Thread(target=lambda: engine.kind) for _ in range(3))
                for asker in askers:
                    asker.start()
                while not engine.backend._calls:  # type: ignore[attr-defined]
                    pass

    def longer(engine: Engine, answer: tuple[int, ...]) -> Any:
        return engine.submit([*PROMPT, *answer, 7], SamplingParams(max_tokens=20, **ALLOWED)).result()

    with Engine(config(*tiny_pairs["qwen2"], **settings)) as engine:
        wanted = engine.submit(PROMPT, SamplingParams(max_tokens=40, **ALLOWED)).result().token_ids
        wanted_next = longer(engine, wanted).token_ids
    monkeypatch.setattr(build, "Controller", lambda **_: Asking(widths=(2,) * 4))
    with Engine(config(*tiny_pairs["qwen2"], **settings)) as engine:
        runner = engine.backend._target._runner  # type: ignore[attr-defined]
        finder = engine.backend._finder  # type: ignore[attr-defined]
        measure = finder._measure

        def watched() -> str:
            before.extend(contents(runner))
            kinds.append(measure())
            after.extend(contents(runner))
            return kinds[-1]

        finder._measure, random = watched, torch.get_rng_state()
        assert engine.submit(PROMPT, SamplingParams(max_tokens=40, **ALLOWED)).result().token_ids == wanted
        for asker in askers:
            asker.join()
        assert engine.kind.machine == kinds[0] and len(kinds) == 1, "it is measured once"
        assert before == after and {*passes} == {0, 1}, "it ran between two passes"
        assert torch.equal(random, torch.get_rng_state())
        following = longer(engine, wanted)
        assert following.token_ids == wanted_next and following.stats.cached_tokens > len(PROMPT)
        text = engine.submit([7, 246, 3, 7], SamplingParams(max_tokens=2)).result()
        assert text.stats.cached_tokens == 0, "the probe's text is known to nobody"


def test_its_time_is_not_that_of_a_pass(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy learns how long it takes from one pass to the next; the pass after the probe says nothing of that.

    It is wanted while a pass runs: what has arrived is handled before that pass ends, and the probe runs after it.
    """
    gaps, passes, askers = list[float | None](), itertools.count(), list[threading.Thread]()

    class Noting(FixedPolicy):
        def observe_pass(self, load: Any, texts: Any, rows: int, tokens: int, elapsed: float, gap: Any) -> None:
            gaps.append(gap)

    monkeypatch.setattr(build, "Controller", lambda **_: Noting())
    with Engine(config(tiny_pairs["qwen2"][0])) as engine:
        target: Any = engine.backend._target  # type: ignore[attr-defined]
        verify = target.verify

        def verify_and_ask(windows: Any) -> Any:
            if next(passes) == 5:
                askers.append(threading.Thread(target=lambda: engine.kind))
                askers[0].start()
                while not engine.backend._calls:  # type: ignore[attr-defined]
                    pass
            return verify(windows)

        target.verify = verify_and_ask
        engine.submit(PROMPT, SamplingParams(max_tokens=12, schedule="plain")).result()
        askers[0].join()
    assert len(gaps) == 11, "all but the pass that reads the prompt"
    assert [n for n, gap in enumerate(gaps) if gap is None] == [4, 5], gaps


def test_files_that_changed_after_they_were_loaded_say_nothing_of_the_engine(folder: Path) -> None:
    with Engine(config(folder)) as engine:
        change_weight(folder)
        with pytest.raises(EngineError, match=r"model = .*copy.*is not what was loaded.*make the engine anew"):
            _ = engine.kind


def test_a_closed_engine_has_no_kind_and_lets_nobody_wait(tiny_pairs: Pairs) -> None:
    release, errors = threading.Event(), list[Any]()
    with Engine(config(tiny_pairs["qwen2"][0])) as engine:
        driver: Any = engine.backend

        def ask() -> None:
            try:
                _ = engine.kind
            except EngineError as error:
                errors.append(error)

        driver.post(lambda now: release.wait() and Draining(now))  # holds the loop, which then meets its end
        driver.close()
        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()
        while not driver._calls:
            pass
        release.set()
        waiting.join(10)
        assert [type(error) for error in errors] == [EngineClosedError]
        with pytest.raises(EngineClosedError):
            _ = engine.kind
    with pytest.raises(EngineClosedError):
        _ = engine.kind


def test_an_error_of_the_probe_is_raised_here_and_ends_nothing(tiny_pairs: Pairs) -> None:
    with Engine(config(tiny_pairs["qwen2"][0])) as engine:
        finder: Any = engine.backend._finder  # type: ignore[attr-defined]
        measure, finder._measure = finder._measure, lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            _ = engine.kind
        finder._measure = measure
        assert engine.kind == engine.kind
        assert engine.submit(PROMPT, SamplingParams(max_tokens=3)).result().token_ids


@pytest.mark.slow
def test_replicas_measure_their_kind(tiny_pairs: Pairs) -> None:
    """Three processes, fifteen seconds."""
    target = tiny_pairs["qwen2"][0]
    with Engine(config(target, replicas=2)) as engine:
        assert engine.kind == kind(target)
    with Engine(config(target, isolate=True)) as engine, pytest.raises(EngineError, match="processes do with replicas"):
        _ = engine.kind


@pytest.mark.parametrize("exact", ["default", "strict"])
@pytest.mark.parametrize("window", [1, 16])
def test_a_short_context_has_a_probe_that_fits(tiny_pairs: Pairs, exact: str, window: int) -> None:
    """Nothing is written beyond the places that are lent: those of the next sequence, and the last slot."""
    limits = Limits(max_window=window, max_num_seqs=2)
    with Engine(EngineConfig(tiny_pairs["qwen2"][0], None, max_model_len=16, exact=exact, limits=limits)) as engine:
        runner = engine.backend._target._runner  # type: ignore[attr-defined]
        before = contents(runner)
        assert len(engine.kind.machine) == 64
        assert contents(runner) == before
