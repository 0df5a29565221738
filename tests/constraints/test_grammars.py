"""A constrained answer is the target's own within its grammar: the same under every schedule, drafter and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core.request import FinishReason, SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.engine.generation import Completion
from langchain_card.errors import ContextOverflowError, InvalidInputError
from langchain_card.limits import Limits
from langchain_card.runtime.runner import ModelRunner
from tests.simulation import FixedPolicy
from tests.support import naive
from tests.support.constrained import EOS, SCHEMAS, Asked, decode, encode, outcome, reference, shortest
from tests.support.schemas import satisfies

Pairs = dict[str, tuple[str, str]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "0.8": {"temperature": 0.8, "seed": 3},
    "1.2, cut": {"temperature": 1.2, "seed": 4, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
}
PROMPTS = ["a person: ", "def add(a, b):\n    return a + b\n", "x" * 40]


@pytest.fixture(autouse=True)
def policy(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models draft at a loss: one that measures would hardly look deep."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(4,) * 4))


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    fields = {"model": pair[0], "draft_model": pair[1], "dtype": "float64", "max_model_len": 768}
    return EngineConfig(**{**fields, **options})


def questions(engine: Engine) -> list[Asked]:
    """Every schema in every setting, with a budget from the least up."""
    asked = []
    for i, schema in enumerate(SCHEMAS.values()):
        grammar = json_grammar(schema)
        least = shortest(engine, grammar)
        for j, options in enumerate(SETTINGS.values()):
            budget = least + (0, 1, 4, 15, 60)[(i + j) % 5]
            params = SamplingParams(max_tokens=max(1, budget), grammar=grammar, schedule="auto", **options)
            asked.append((encode(PROMPTS[(i + j) % 3]), params))
    return asked


def accepted(answers: Sequence[Completion]) -> Counter[str]:
    found = Counter[str]()
    for done in answers:
        found.update(done.stats.accepted_by_source)
    return found


# Equal to a loop that has nothing of ours.


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_equal_to_the_naive_loop(tiny_pairs: Pairs, dtype: str) -> None:
    """Where the budget is large: nothing is closed early."""
    model, compared = naive.load(tiny_pairs["llama"][0], getattr(torch, dtype)), 0
    with Engine(config(tiny_pairs["llama"], dtype=dtype)) as engine:
        for name in ("person", "people", "tree", "pattern"):
            for options in SETTINGS.values():
                params = SamplingParams(max_tokens=400, grammar=json_grammar(SCHEMAS[name]), **options)
                wanted = reference(model, encode(PROMPTS[0]), replace(params, max_tokens=60))
                for done in (decode(engine, [(encode(PROMPTS[0]), params)], s)[0] for s in ("plain", "parallel")):
                    assert [*done.token_ids[: len(wanted)]] == wanted
                    assert len(done.token_ids) == len(wanted) or wanted[-1] != EOS
                compared += len(wanted)
    assert compared > 400


# Equal under all that may change.

ENGINES: dict[str, dict[str, Any]] = {
    "both": {},
    "model": {"drafters": ()},
    "ngram": {"draft_model": "ngram"},
    "float32": {"dtype": "float32"},
    "process": {"draft_transport": "process"},
    "strict": {"exact": "strict"},
}


@pytest.fixture(scope="module")
def plain(tiny_pairs: Pairs) -> dict[str, Any]:
    """Questions, and their answers by the target alone."""
    with Engine(config(tiny_pairs["llama"], draft_model=None)) as engine:
        asked = questions(engine)
        return {"asked": asked, "done": decode(engine, asked)}


@pytest.mark.slow
def test_plain_answers_obey(plain: dict[str, Any]) -> None:
    schemas = [schema for schema in SCHEMAS.values() for _ in SETTINGS]
    reasons = Counter[str]()
    for schema, (_, params), done in zip(schemas, plain["asked"], plain["done"], strict=True):
        assert satisfies(done.text, schema), done.text
        assert len(done.token_ids) <= params.max_tokens
        cut = done.stats.closed or (len(done.token_ids) == params.max_tokens and done.token_ids[-1] != EOS)
        assert done.finish_reason is (FinishReason.LENGTH if cut else FinishReason.STOP)
        reasons[f"{done.finish_reason.value}, closed {done.stats.closed}"] += 1
    assert len(reasons) >= 2, reasons


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ngram" else pytest.mark.slow) for name in ENGINES]
)
def test_equal_under_every_schedule(
    tiny_pairs: Pairs, plain: dict[str, Any], name: str, say: Callable[[str], None]
) -> None:
    asked, wanted = plain["asked"], [*map(outcome, plain["done"])]
    by = Counter[str]()
    with Engine(config(tiny_pairs["llama"], **ENGINES[name])) as engine:
        if name == "float32":
            wanted = [*map(outcome, decode(engine, asked))]
        for schedule in ("plain", "sequential", "parallel"):
            done = decode(engine, asked, schedule)
            assert [*map(outcome, done)] == wanted, schedule
            by += accepted(done)
    say(f"{name}: accepted {dict(by)}")
    assert by["forced"] > 50
    assert by["model"] > 50 or name in ("ngram", "process"), "a draft in a process may come late"


@pytest.mark.slow
def test_equal_in_batches_with_others(tiny_pairs: Pairs, plain: dict[str, Any]) -> None:
    """Sixteen at once, one in three without a grammar."""
    free = [(encode(PROMPTS[i % 3]), SamplingParams(max_tokens=30, seed=i, temperature=i % 2)) for i in range(10)]
    asked = [one for i, own in enumerate(plain["asked"]) for one in ([own, free[i // 2]] if i % 2 == 0 else [own])]
    with Engine(config(tiny_pairs["llama"], limits=Limits(max_num_seqs=16))) as engine:
        unconstrained = dict(zip(range(10), map(outcome, decode(engine, free)), strict=True))
        own = iter(map(outcome, plain["done"]))
        wanted = [next(own) if params.grammar else unconstrained[params.seed] for _, params in asked]
        for schedule in ("plain", "sequential", "parallel", "auto"):
            done = decode(engine, asked, schedule, at_once=True)
            assert [*map(outcome, done)] == wanted, schedule
            assert max(one.stats.mean_batch_size for one in done) > 8
            assert schedule == "plain" or accepted(done)["model"] > 20


# Failures.


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("schedule", ["plain", "sequential", "parallel"])
@pytest.mark.slow
def test_what_was_said_is_not_forgotten(
    tiny_pairs: Pairs, plain: dict[str, Any], schedule: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target dies again and again, or has no memory, so that requests are put back amid their answers."""
    step, calls, raised = ModelRunner.step, [0], [0]

    def failing(self: ModelRunner, batch: Any) -> Any:
        if self.num_scratch == 16:
            calls[0] += 1
            if calls[0] % 4 == 0:
                raised[0] += 1
                raise error("planted")
        return step(self, batch)

    limits = Limits(max_num_seqs=4, restart_seconds=0.0, max_deaths=1000, max_failures=100)
    with Engine(config(tiny_pairs["llama"], limits=limits)) as engine, monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "step", failing)
        done = decode(engine, plain["asked"], schedule, at_once=True)
    assert [*map(outcome, done)] == [*map(outcome, plain["done"])]
    assert raised[0] > 3


# Other options do not let it leave the grammar.

OPTIONS: dict[str, dict[str, Any]] = {
    "what is forced is unwanted": {"logit_bias": tuple((token, -100.0) for token in encode('{"name: kdcusto,}'))},
    "an end is wanted": {"logit_bias": ((EOS, 100.0),)},
    "an end is banned": {"banned_ids": (EOS,)},
    "what is forced is banned": {"banned_ids": tuple({*encode('{"name": cust}')})},
    "forbidden tokens are wanted": {"logit_bias": tuple((token, 100.0) for token in encode("xyzXYZ#"))},
    "penalties": {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.7},
    "the likeliest": {"temperature": 1.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0},
    "hot": {"temperature": 10.0, "top_p": 0.99},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_no_option_leaves_the_grammar(tiny_pairs: Pairs, name: str) -> None:
    grammar = json_grammar(SCHEMAS["person"])
    with Engine(config(tiny_pairs["llama"])) as engine:
        for extra in (0, 3, 60):
            budget = shortest(engine, grammar) + extra
            asked = [(encode(PROMPTS[0]), SamplingParams(max_tokens=budget, grammar=grammar, **OPTIONS[name]))]
            done = [decode(engine, asked, schedule)[0] for schedule in ("plain", "sequential", "parallel")]
            assert satisfies(done[0].text, SCHEMAS["person"]), done[0].text
            assert len({outcome(one) for one in done}) == 1
            assert len(done[0].logprobs) == (len(done[0].token_ids) if name == "logprobs" else 0)


def test_a_stop_string_ends_before_the_grammar_does(tiny_pairs: Pairs) -> None:
    grammar = json_grammar(SCHEMAS["person"])
    with Engine(config(tiny_pairs["llama"])) as engine:
        for schedule in ("plain", "sequential", "parallel"):
            params = SamplingParams(max_tokens=100, grammar=grammar, stop=('", "kind',))
            (done,) = decode(engine, [(encode(PROMPTS[0]), params)], schedule)
            assert done.finish_reason is FinishReason.STOP
            assert done.text.startswith('{"name": "') and "kind" not in done.text


def test_too_few_tokens_are_refused_at_once(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = json_grammar(SCHEMAS["person"])
    with Engine(config(tiny_pairs["llama"])) as engine:
        least = shortest(engine, grammar)
        with pytest.raises(InvalidInputError, match=f"max_tokens = {least - 1}: .*takes {least} tokens"):
            engine.submit(encode("x"), SamplingParams(max_tokens=least - 1, grammar=grammar))
        with pytest.raises(ContextOverflowError, match="prompt = '744 tokens': leaves room for 8, fewer"):
            engine.submit(encode("x" * 744), SamplingParams(max_tokens=100, grammar=grammar))
        assert engine.num_running == 0
        done = engine.submit(encode("x"), SamplingParams(max_tokens=least, grammar=grammar)).result()
    assert satisfies(done.text, SCHEMAS["person"]) and done.finish_reason is FinishReason.LENGTH
