"""Heads beside what else an engine does: prefixes in a folder, adapters, steering, lossy rules, a second engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import prefix_folder
from langchain_card.engine.engine import Engine
from langchain_card.heads.folder import KINDS
from langchain_card.limits import Limits, Pins
from langchain_card.testing import prompts
from tests.support.adapters import make
from tests.support.heads import write_head
from tests.support.prefixes import PROMPT

pytestmark = pytest.mark.usefixtures("one_thread")

ARCH = "llama"
PROMPTS = [[(7 * i + j * j) % 250 for j in range(150)] for i in range(3)]
GREEDY, SEEDED = {}, {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of a head with random weights."""
    folder = write_head(request.param, "random", prompts.folder(ARCH), tmp_path_factory.mktemp(request.param))
    return f"head?file={folder}"


@pytest.fixture
def more_of_some_tokens() -> Iterator[None]:
    """Steering under the name `more`."""

    def make_steering(setting: Any) -> Any:
        def apply(logits: Any, texts: Any) -> Any:
            found = logits.clone()
            for row, text in zip(found, texts, strict=True):
                row[sum(text) % 251] += 4.0
            return found

        return apply

    plugins.register("steering", "more", make_steering)
    yield
    plugins._registered.pop(("steering", "more"), None)


def config(draft: str | None, **options: Any) -> EngineConfig:
    pins = Pins() if draft is None else Pins(draft_width=4, window=8, lead=4)
    usual: dict[str, Any] = {"dtype": "float64", "drafters": (), "max_model_len": 256, "pins": pins}
    return EngineConfig(prompts.folder(ARCH), draft, **{**usual, **options})


def answers(engine: Engine, **options: Any) -> list[Any]:
    """The completions of all prompts at once, greedy and seeded."""
    submitted = [
        engine.submit(prompt, SamplingParams(max_tokens=20, **how, **options))
        for prompt in PROMPTS
        for how in (GREEDY, SEEDED)
    ]
    return [generation.result() for generation in submitted]


def tokens(completions: list[Any]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in completions]


def answers_of(draft: str | None, requests: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    with Engine(config(draft, **options)) as engine:
        return answers(engine, **(requests or {}))


def test_prefixes_in_a_folder(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine loads keys and values that the first one wrote, the head's among them. Three seconds."""
    monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path))
    monkeypatch.setattr(prefix_folder, "CLOSE_SECONDS", 60.0)
    options: dict[str, Any] = {"max_model_len": None, "limits": Limits(max_num_seqs=1)}
    params = SamplingParams(max_tokens=20)
    found = []
    for draft, where in ((None, "memory"), (head, "folder"), (head, "folder")):
        with Engine(config(draft, prefix_cache=where, **options)) as engine:
            found.append(engine.submit(PROMPT, params).result())
    plain, first, second = found
    assert first.token_ids == second.token_ids == plain.token_ids
    assert second.stats.cached_tokens > first.stats.cached_tokens == 0
    assert second.stats.verified > 0


def test_adapters(head: str, tmp_path: Path) -> None:
    """The head reads the states of the adapted target. Two seconds, most of them PEFT's import."""
    made = make(prompts.folder(ARCH), tmp_path, seed=1)
    options: dict[str, Any] = {"adapters": (("one", made.adapter),)}
    plain, done = (answers_of(draft, {"adapter": "one"}, **options) for draft in (None, head))
    assert tokens(done) == tokens(plain) != tokens(answers_of(None))
    assert sum(each.stats.verified for each in done) > 0


@pytest.mark.usefixtures("more_of_some_tokens")
def test_steering(head: str) -> None:
    """Candidates come from the head, choices from the steered target. A second."""
    plain, done = (answers_of(draft, steering="more") for draft in (None, head))
    assert tokens(done) == tokens(plain) != tokens(answers_of(None))
    assert sum(each.stats.verified for each in done) > 0


def test_a_lossy_rule(head: str) -> None:
    """Tokens that the rule takes from the head in place of the target's are read as such. A second."""
    done = answers_of(head, acceptance="loose")
    assert all(len(each.token_ids) == 20 for each in done)
    assert sum(each.stats.verified for each in done) > 0


def test_two_engines_at_once(head: str) -> None:
    """Engines over one model have heads, taps and KV of their own. A second."""
    plain = tokens(answers_of(None))
    with Engine(config(head)) as first, Engine(config(head)) as second:
        submitted = [
            engine.submit(prompt, SamplingParams(max_tokens=20, **how))
            for prompt in PROMPTS
            for how in (GREEDY, SEEDED)
            for engine in (first, second)
        ]
        done = [generation.result() for generation in submitted]
    assert tokens(done[::2]) == tokens(done[1::2]) == plain
    assert all(each.stats.verified > 0 for each in done)
