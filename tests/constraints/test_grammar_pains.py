"""How speculation breaks constrained answers elsewhere, each as a test; numbers are those of vLLM's issues.

The drafters here are worse than any model: they know the answer, so that windows are long and end anywhere, and lie
beside it and within it.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.config import EngineConfig
from langchain_card.constraints.compiler import Grammars
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core import messages as m
from langchain_card.core.coordinator import Coordinator
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build, target_worker
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.limits import Limits
from langchain_card.runtime.guide import Guide
from langchain_card.text.tool_form import tool_form
from langchain_card.text.tool_grammar import AnswerShape, Thinking, answer_grammar
from tests.simulation import FixedPolicy
from tests.support.constrained import (
    EOS,
    SCHEMAS,
    TOKENIZER,
    Asked,
    decode,
    encode,
    knowing,
    mask,
    matcher,
    outcome,
    shortest,
)
from tests.support.schemas import random_schema, satisfies

Pairs = dict[str, tuple[str, str]]
pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = encode("Who? ")
LIES = (0.0, 0.3, 0.8)
COUNT = 2000 if os.environ.get("CARD_EXPLORE") else 200


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is verified."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    return EngineConfig(pair[0], "ngram", dtype="float64", max_model_len=768, **options)


def alone(pair: tuple[str, str], asked: Sequence[Asked]) -> list[Completion]:
    with Engine(replace(config(pair), draft_model=None)) as engine:
        return decode(engine, asked)


def speculate(
    pair: tuple[str, str], asked: Sequence[Asked], lies: float, patch: pytest.MonkeyPatch
) -> tuple[list[Completion], list[Completion]]:
    """Answers of the target alone, and with a drafter that knows them."""
    wanted = alone(pair, asked)
    patch.setitem(plugins._registered, ("drafters", "ngram"), knowing(asked, wanted, lies))
    with Engine(config(pair)) as engine:
        return wanted, decode(engine, asked, "sequential")


def asked_of(schemas: Sequence[dict[str, Any]], budgets: Sequence[int] = (60,)) -> list[Asked]:
    return [
        (PROMPT, SamplingParams(max_tokens=budget, grammar=json_grammar(schema), temperature=i % 2, seed=i))
        for i, schema in enumerate(schemas)
        for budget in budgets
    ]


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.slow
def test_9423_guided_output_is_broken_by_speculation(
    tiny_pairs: Pairs, lies: float, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    schemas = [*SCHEMAS.values()] * 3
    wanted, got = speculate(tiny_pairs["llama"], asked_of(schemas), lies, monkeypatch)
    for one, other, schema in zip(wanted, got, schemas, strict=True):
        assert outcome(one) == outcome(other) and satisfies(other.text, schema)
    rounds, tokens = (sum(getattr(one.stats, name) for one in got) for name in ("rounds", "output_tokens"))
    say(f"{lies:.0%} lies: {tokens / rounds:.1f} tokens a pass")
    assert tokens / rounds > (6 if not lies else 1.5), "windows were long"


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.slow
def test_14702_positions_without_a_mask(tiny_pairs: Pairs, lies: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a window that the grammar allows, the last one and those beside the walk among them."""
    asked, rows = asked_of([*SCHEMAS.values()] * 2), [0, 0]
    grammars = [params.grammar for _, params in asked]

    class Watching(Guide):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.said: list[int] = []
            self.grammar = grammars[next(numbers) % len(grammars)]

        def commit(self, token_ids: Sequence[int]) -> None:
            super().commit(token_ids)
            self.said += token_ids

        def settle(self, target_ids: Sequence[int], ways: Sequence[tuple[int, ...]]) -> Any:
            for token, way in zip(target_ids, ways, strict=True):
                own = matcher(self.grammar, self.said)
                if EOS not in way and own.try_consume_tokens([*way]) == len(way) and fits(self, way):
                    assert mask(own)[token], (self.said, way, token)
                    rows[bool(way)] += 1
            return super().settle(target_ids, ways)

    numbers = itertools.count()
    monkeypatch.setattr(target_worker, "Guide", Watching)
    wanted, got = speculate(tiny_pairs["llama"], asked, lies, monkeypatch)
    assert [*map(outcome, wanted)] == [*map(outcome, got)]
    assert min(rows) > 100, rows


def fits(guide: Guide, way: tuple[int, ...]) -> bool:
    """Whether an end of it is known; where none is, the walk never comes."""
    return guide._behind(way) is not None


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("how", ["first", "begun"])
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.slow
def test_34650_36138_44297_a_thought_ends_among_the_candidates(
    tiny_pairs: Pairs, how: Thinking, lies: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the token behind it the document's grammar holds, wherever in a window that is."""
    grammar, asked, places = thinking(how), list[Asked](), set[int]()
    with Engine(config(tiny_pairs["llama"])) as engine:
        least = shortest(engine, grammar)
    for i in range(24):
        params = SamplingParams(max_tokens=least + i, grammar=grammar, temperature=1.0, seed=i)
        asked.append((PROMPT, replace(params, logit_bias=((encode("<")[0], 20.0),) if how == "first" else ())))
    end, commit = encode("</think>"), Coordinator._commit

    def watching(self: Coordinator, verdict: m.Verdict, now: float) -> Any:
        effects = commit(self, verdict, now)
        for effect in effects:
            if isinstance(effect, m.Emit):
                tokens = [*effect.token_ids]
                places.update(i for i in range(1, len(tokens) - 8) if tokens[i : i + 8] == end)
        return effects

    monkeypatch.setattr(Coordinator, "_commit", watching)
    wanted, got = speculate(tiny_pairs["llama"], asked, lies, monkeypatch)
    for one, other in zip(wanted, got, strict=True):
        assert outcome(one) == outcome(other)
        thought, mark, document = other.text.rpartition("</think>")
        assert mark or (how == "first" and "<think>" not in thought)
        assert satisfies(document.strip(), SCHEMAS["person"]), other.text
    assert lies or places, "it ended within windows, and something came behind it"


def thinking(how: Thinking) -> str:
    return answer_grammar(AnswerShape(schema=SCHEMAS["person"]), tool_form(TOKENIZER), (), how)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.slow
def test_54437_stale_candidates_are_taken_unmasked(
    tiny_pairs: Pairs, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates of other answers, and of nothing; a draft model that is of no use beside them."""
    asked = asked_of([*SCHEMAS.values()] * 2)
    wanted = alone(tiny_pairs["llama"], asked)
    stale = knowing(asked, [*wanted[1:], wanted[0]], lies=0.5)
    monkeypatch.setitem(plugins._registered, ("drafters", "ngram"), stale)
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    for draft in (tiny_pairs["llama"][1], tiny_pairs["qwen2"][0]):
        with Engine(replace(config(tiny_pairs["llama"]), draft_model=draft, drafters=("ngram",))) as engine:
            assert [*map(outcome, decode(engine, asked, schedule))] == [*map(outcome, wanted)]


@pytest.mark.usefixtures("deep")
@pytest.mark.slow
def test_52620_only_under_concurrency(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many grammars and none, from many threads; some leave in the middle."""
    free = [(PROMPT, SamplingParams(max_tokens=20, seed=seed, temperature=1.0)) for seed in range(10)]
    asked = [*asked_of([*SCHEMAS.values()] * 6), *free]
    random.Random(0).shuffle(asked)
    wanted = [*map(outcome, done)] if (done := alone(tiny_pairs["llama"], asked)) else []
    monkeypatch.setitem(plugins._registered, ("drafters", "ngram"), knowing(asked, done, lies=0.4))

    def ask(i: int) -> bool:
        ids, params = asked[i]
        generation = engine.submit(ids, replace(params, schedule=("auto", "sequential", "parallel", "plain")[i % 4]))
        if i % 7 == 3:
            next(iter(generation))
            generation.abort()
            return True
        return outcome(generation.result()) == wanted[i]

    with Engine(config(tiny_pairs["llama"], limits=Limits(max_num_seqs=16))) as engine:
        with ThreadPoolExecutor(16) as pool:
            right = [*pool.map(ask, [*range(len(asked))] * 3)]
        assert engine.num_running == 0
    assert all(right)


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_every_answer_obeys(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]) -> None:
    """Random schemas, prompts and budgets at temperature 1, sixteen at once under mixed schedules: all are valid."""
    monkeypatch.setattr(Grammars, "_validate", lambda *_: None)  # a process each; these do no harm
    begun, closed, done = time.monotonic(), 0, 0
    limits = Limits(max_num_seqs=16)
    pair = tiny_pairs["llama"]
    with Engine(EngineConfig(*pair, dtype="float32", max_model_len=768, limits=limits)) as engine:
        for first in range(0, COUNT, 100):
            running = []
            for seed in range(first, min(first + 100, COUNT)):
                rng = random.Random(seed)
                schema = random_schema(rng)
                grammar = json_grammar(schema)
                budget = max(1, shortest(engine, grammar) + rng.choice([0, 0, 1, 3, 10, 30, 100]))
                schedule = rng.choice(["auto", "plain", "sequential", "parallel"])
                prompt = encode("".join(rng.choices("abc {", k=rng.randrange(1, 60))))
                params = SamplingParams(budget, 1.0, seed, schedule=schedule, grammar=grammar)  # type: ignore[arg-type]
                running.append((schema, budget, engine.submit(prompt, params)))
            for schema, budget, generation in running:
                answer = generation.result()
                assert satisfies(answer.text, schema), (schema, budget, answer.text)
                assert len(answer.token_ids) <= budget
                closed, done = closed + answer.stats.closed, done + 1
    say(f"{done} answers obey random schemas, {closed} closed in time, in {time.monotonic() - begun:.0f} seconds")
    assert done == COUNT and 0.2 < closed / done < 0.8
