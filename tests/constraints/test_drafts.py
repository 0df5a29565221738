"""Drafts of every kind, wherever they run, propose nothing that the grammar forbids; if they cannot, nobody notices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.constraints.draft_grammars import DraftGrammars
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build, drafter_hosts
from langchain_card.engine.engine import Engine
from langchain_card.ports import Constraint
from tests.simulation import FixedPolicy
from tests.support.constrained import SCHEMAS, Asked, decode, encode, outcome
from tests.support.packages import installed
from tests.support.random_trees import FreeTree, Watch

Pairs = dict[str, tuple[str, str]]
SPEECH = '{"name": 7, "kind": "customer"} {"name": "bob", "kind": 3} '
"""A prompt that repeats itself, and whose documents are none of the schema's: n-grams propose them."""

SCHEDULES = ("sequential", "parallel")


@pytest.fixture(autouse=True)
def policy(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate that fits into a window is verified."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(3,) * 4))


@pytest.fixture(autouse=True)
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random trees on a thread or in a process are an installed package; the free ones are registered."""
    monkeypatch.setitem(plugins._registered, ("drafters", "free"), FreeTree)
    with installed(tmp_path, "random_trees", trees="tests.support.random_trees:RandomTree"):
        yield


def asked() -> list[Asked]:
    greedy: dict[str, Any] = {"max_tokens": 40, "schedule": "auto"}
    every = [greedy, {**greedy, "temperature": 0.8, "seed": 3}]
    schemas = [json_grammar(SCHEMAS[name]) for name in ("person", "text")]
    return [(encode(SPEECH * 3), SamplingParams(grammar=grammar, **how)) for grammar in schemas for how in every]


@functools.cache
def plain(target: str) -> list[Any]:
    with Engine(EngineConfig(target, None, dtype="float64", max_model_len=512)) as engine:
        return [*map(outcome, decode(engine, asked()))]


def watched(pair: tuple[str, str], **options: Any) -> Watch:
    """Answer with drafters, compare with the target's own answers, and return what was verified."""
    watch, wanted = Watch(), plain(pair[0])
    config = EngineConfig(**{"model": pair[0], "dtype": "float64", "max_model_len": 512, **options})
    with Engine(config, observe=watch) as engine:
        for schedule in SCHEDULES:
            assert [*map(outcome, decode(engine, asked(), schedule))] == wanted, schedule
    return watch


HOSTS: dict[str, dict[str, Any]] = {
    "inline": {"draft_model": "free", "drafters": ()},
    "thread": {"draft_model": "trees", "drafters": ()},
    "process": {"draft_model": "trees", "drafters": (), "draft_transport": "process"},
}


@pytest.mark.parametrize(
    "host", [pytest.param(host, marks=() if host == "thread" else pytest.mark.slow) for host in HOSTS]
)
def test_a_plugin_has_nothing_verified_that_the_grammar_forbids(tiny_pairs: Pairs, host: str) -> None:
    """15 seconds each: two engines."""
    watch = watched(tiny_pairs["llama"], **HOSTS[host])
    assert not watch.forbidden, watch.forbidden[0]
    assert watch.verified["trees"] > 30 < watch.dropped["trees"], "some are allowed, and some are not"


@pytest.mark.slow
def test_ngrams_have_nothing_verified_that_the_grammar_forbids(tiny_pairs: Pairs) -> None:
    watch = watched(tiny_pairs["llama"], draft_model="ngram")
    assert not watch.forbidden, watch.forbidden[0]
    assert watch.verified["ngram"] > 10 < watch.dropped["ngram"], watch.dropped


@pytest.mark.parametrize("transport", ["thread", "process"])
@pytest.mark.slow
def test_a_model_looks_for_other_tokens_where_the_grammar_forbids_some(tiny_pairs: Pairs, transport: Any) -> None:
    """Its own scores are masked: it has likely candidates at every place, and none is dropped later."""
    model, draft = tiny_pairs["llama"]
    watch = watched((model, draft), draft_model=draft, drafters=(), draft_transport=transport)
    assert not watch.forbidden, watch.forbidden[0]
    assert watch.verified["model"] > 100 and not watch.dropped["model"]


# Grammars that fail.


class Failing:
    """A constraint of which a method raises."""

    def __init__(self, constraint: Constraint, method: str) -> None:
        self._constraint, self._method = constraint, method

    def fork(self) -> Failing:
        return Failing(self._constraint.fork(), self._method)

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise KeyError("planted")
        return getattr(self._constraint, name)


def failing(constrain: Callable[[str], Constraint], method: str) -> Callable[[str], Any]:
    def start(grammar: str) -> Any:
        if method == "start":
            raise KeyError("planted")
        return Failing(constrain(grammar), method)

    return start


@pytest.mark.parametrize(
    "method", ["start", *(pytest.param(each, marks=pytest.mark.slow) for each in ("accept", "allowed", "fitting"))]
)
def test_a_grammar_that_fails_in_a_draft_costs_speed_alone(
    tiny_pairs: Pairs, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and all drafters go on. Masks are the model's alone: without them, the check of tokens holds."""
    monkeypatch.setattr(build, "DraftGrammars", lambda constrain: DraftGrammars(failing(constrain, method)))
    model, draft = tiny_pairs["llama"]
    watch = watched((model, draft), draft_model=draft, drafters=("free",))
    assert bool(watch.forbidden) is (method != "allowed")
    assert watch.verified["model"] > 50 and watch.verified["trees"] > 30
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("a draft cannot follow the grammar of a request") and "KeyError: 'planted'" in said


@pytest.mark.slow
def test_a_process_without_the_tokenizer_drafts_unmasked(
    tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = drafter_hosts._setting_arguments
    monkeypatch.setattr(
        drafter_hosts, "_setting_arguments", lambda *given: {**before(*given), "target_folder": "/nowhere"}
    )
    model, draft = tiny_pairs["llama"]
    watch = watched((model, draft), draft_model=draft, drafters=(), draft_transport="process")
    assert watch.forbidden and watch.verified["model"] > 20
    assert ["cannot follow the grammar" in record.getMessage() for record in caplog.records] == [True]
