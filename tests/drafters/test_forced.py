"""`ForcedDrafter`: what a grammar and the budget leave no choice about is proposed, up to the last token."""

from __future__ import annotations

import math

import pytest

from langchain_card.config import EngineConfig
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.forced import ForcedDrafter
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.ports import Budget
from langchain_card.testing import prompts
from tests.simulation import FixedPolicy
from tests.support.constrained import EOS, PERSON, SCHEMAS, decode, encode, outcome, shortest

DOCUMENT = '{"name": "a", "kind": "customer"}'
WINDOW = 16


def proposed(said: str, max_tokens: int) -> str:
    drafter, grammar = ForcedDrafter(prompts.setting()), json_grammar(SCHEMAS["person"])
    drafter.begin(Request(0, (1,), SamplingParams(max_tokens, grammar=grammar), (EOS,)), ())
    drafter.correct(0, 0, encode(said))
    (proposal,) = drafter.step([Budget(0)])
    text = prompts.setting().tokenizer.decode(proposal.token_ids)
    assert proposal.applied_len == len(said) and len(proposal.scores) == len(proposal.token_ids)
    return str(text)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("", '{"name": "'),
        ('{"name": "a', ""),
        ('{"name": "a"', ', "kind": "'),
        ('{"name": "a", "kind": "c', 'ustomer"'),
        (DOCUMENT[:-1], ""),
        (DOCUMENT, "<|end|>"),
        (DOCUMENT[:-1] + ', "age": 5}', "<|end|>"),
    ],
)
def test_what_the_grammar_forces(said: str, wanted: str) -> None:
    assert proposed(said, 400) == wanted


def test_what_the_budget_forces() -> None:
    """With one token more there is a choice: one more character of the name."""
    said, end = '{"name": "a', '", "kind": "customer"}'
    assert proposed(said, len(said) + len(end)) == end
    assert proposed(said, len(said) + len(end) + 1) == ""


@pytest.mark.parametrize("room", [0, 7])
def test_brackets_at_the_end_of_the_budget_cost_one_pass(
    tiny_pairs: dict[str, tuple[str, str]], room: int, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that never ends its strings: all that it does not choose comes a window at a time."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())
    config = EngineConfig(tiny_pairs["llama"][0], "forced", dtype="float64", max_model_len=512)
    bias = ((encode('"')[0], -100.0), (encode("c")[0], 100.0))
    with Engine(config) as engine:
        grammar = json_grammar(PERSON)
        least = shortest(engine, grammar)
        params = SamplingParams(least + room, grammar=grammar, logit_bias=bias)
        alone, drafted = (decode(engine, [(encode("x"), params)], how)[0] for how in ("plain", "sequential"))
    assert outcome(alone) == outcome(drafted) and len(drafted.token_ids) == least + room
    assert drafted.stats.rounds <= room + math.ceil(least / WINDOW) + 1
