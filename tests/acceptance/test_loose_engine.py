"""The loose rule in an engine: at its strictest it is exact; else what is not the target's own is counted."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from langchain_card import plugins
from langchain_card.acceptance.loose import LooseRule
from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.request import RequestStats, SamplingParams
from langchain_card.core.walk import mismatches
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.engine.target_worker import row_paths
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Setting
from langchain_card.runtime.sampling import gumbel_noise
from tests.simulation import FixedPolicy, ToyDrafter
from tests.support import naive, tiny
from tests.support.exactness import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = dict[str, tuple[str, str]]
PROMPT = "def add(a, b):\n    return a + b\n\ndef add("
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": ((40, 1.5),), "banned_ids": (7,)},
}
DOUBT = 0.37
STRICTEST = (
    "loose?threshold=Infinity&window=1",
    "loose?quantile=1&window=1",
    "loose?reading=paper&threshold=1&window=1",
)


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models draft at a loss: a policy that measures would hardly look deep."""
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(2,) * 8))


def config_of(pair: tuple[str, str], acceptance: str, **options: Any) -> EngineConfig:
    fields = {"dtype": "float64", "max_model_len": 512, **options}
    return EngineConfig(model=pair[0], draft_model=pair[1], acceptance=acceptance, **fields)


@pytest.mark.usefixtures("deep")
@pytest.mark.slow
def test_at_its_strictest_it_is_the_exact_rule(tiny_pairs: Pairs) -> None:
    """Entropy never reaches the logarithm of the vocabulary's size with these models: 1 is strictest, too."""
    encode, pair = tiny.byte_tokenizer(), tiny_pairs["llama"]
    asked = {
        name: SamplingParams(max_tokens=32, **options)  # type: ignore[arg-type]
        for name, options in SETTINGS.items()
    }
    reference, eos_ids, ids = Reference(config_of(pair, "exact")), (encode.eos_token_id,), encode(PROMPT)
    wanted = {name: tuple(reference.answer(ids.input_ids, params, eos_ids).token_ids) for name, params in asked.items()}
    for acceptance in STRICTEST:
        accepted = 0
        with Engine(config_of(pair, acceptance)) as engine:
            for name, params in asked.items():
                for schedule in ("plain", "sequential", "parallel"):
                    done = engine.submit(ids.input_ids, replace(params, schedule=schedule)).result()  # type: ignore[arg-type]
                    assert done.token_ids == wanted[name], (acceptance, name, schedule)
                    assert done.stats.lossy and not done.stats.rescued
                    accepted += done.stats.accepted
        assert accepted > 40


@torch.inference_mode()
def own_choices(
    model: Any, prompt_ids: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[float]]:
    """What the target would have said at each place of an answer, and how much in doubt it was."""
    logits = model(torch.tensor([[*prompt_ids, *answer]])).logits[0]
    found = []
    for number in range(len(answer)):
        place = len(prompt_ids) + number
        scores = naive.process(logits[place - 1], prompt_ids, answer[:number], params)
        if params.temperature > 0:
            scores = scores + gumbel_noise(params.seed, place, len(scores), scores.device)
        found.append(int(scores.argmax()))
    return found, LooseRule(Setting()).measure(logits[len(prompt_ids) - 1 : -1])


@pytest.mark.usefixtures("deep")
@pytest.mark.slow
def test_every_token_that_is_not_the_targets_own_is_counted(tiny_pairs: Pairs) -> None:
    """The keys and values of a rescued token are its own: what follows is what the target says after it."""
    encode, pair, rescued, certain = tiny.byte_tokenizer(), tiny_pairs["llama"], 0, 0
    model = naive.load(pair[0], torch.float64)
    prompts = [encode(text).input_ids for text in (PROMPT, "the quick brown fox; the quick", "x" * 60)]
    with Engine(config_of(pair, f"loose?threshold={DOUBT}&window=1", limits=Limits(max_num_seqs=3))) as engine:
        for options, schedule in itertools.product(SETTINGS.values(), ("sequential", "parallel")):
            params = SamplingParams(max_tokens=40, schedule=schedule, **options)  # type: ignore[arg-type]
            for ids, answer in [(ids, engine.submit(ids, params)) for ids in prompts]:
                done = answer.result()
                own, doubts = own_choices(model, ids, done.token_ids, params)
                places = [i for i, (a, b) in enumerate(zip(own, done.token_ids, strict=True)) if a != b]
                assert len(places) == done.stats.rescued and done.stats.lossy
                assert all(doubts[place] >= DOUBT - 1e-9 for place in places), "each row is measured by itself"
                certain += sum(doubt < DOUBT for doubt in doubts)
                assert all(done.pieces[place].source for place in places), "its drafter is its source"
                assert not params.banned_ids or not set(params.banned_ids) & set(done.token_ids)
                rescued += len(places)
    assert rescued >= 5 and certain >= 100


@pytest.mark.usefixtures("deep")
def test_what_is_measured_is_the_rows_own(tiny_pairs: Pairs) -> None:
    """With several windows in a pass, at the rows where the exact walk would end, and nowhere else."""
    encode, pair, rule = tiny.byte_tokenizer(), tiny_pairs["llama"], LooseRule(Setting())
    seen: list[tuple[m.Verdict, m.Window, list[int]]] = []
    with Engine(config_of(pair, "loose", limits=Limits(max_num_seqs=3))) as engine:
        target = engine.backend._target  # type: ignore[attr-defined]
        verify = target.verify

        def watched(windows: Sequence[m.Window]) -> list[m.Verdict]:
            verdicts: list[m.Verdict] = verify(windows)
            own = {window.request_id: window for window in windows}
            caches = {each.request_id: target._sequences[each.request_id].cache for each in verdicts}
            seen.extend((each, own[each.request_id], [*caches[each.request_id].token_ids]) for each in verdicts)
            return verdicts

        target.verify = watched
        params = SamplingParams(max_tokens=60, schedule="sequential", temperature=0.8, seed=5)
        for generation in [engine.submit(encode(text).input_ids, params) for text in (PROMPT, "the quick", "x" * 60)]:
            generation.result()
    model = naive.load(pair[0], torch.float64)
    together = 0
    for verdict, window, text in seen:
        asked = mismatches(window, verdict.target_ids)
        assert len(verdict.measured) == len(verdict.target_ids)
        assert not any(value for row, value in enumerate(verdict.measured) if row not in asked)
        for row, path in enumerate(row_paths(window.parents)):
            if row in asked:
                ids = torch.tensor([[*text, *(window.token_ids[above] for above in path)]])
                with torch.inference_mode():
                    (doubt,) = rule.measure(model(ids, logits_to_keep=1).logits[:, -1])
                assert verdict.measured[row] == pytest.approx(doubt, abs=1e-9)
                together += verdict.together > 1
    assert together >= 4


@pytest.mark.usefixtures("deep")
def test_requests_for_logprobs_or_with_a_stop_are_answered_exactly(
    tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, asked = LooseRule.measure, list[int]()

    def counted(self: LooseRule, logits: torch.Tensor) -> list[float]:
        asked.append(len(logits))
        return measure(self, logits)

    monkeypatch.setattr(LooseRule, "measure", counted)
    ids = tiny.byte_tokenizer()(PROMPT).input_ids
    params = SamplingParams(max_tokens=50, schedule="sequential", temperature=0.8, seed=5)
    with Engine(config_of(tiny_pairs["llama"], "loose?threshold=0&window=1")) as engine:
        done = engine.submit(ids, params).result()
        assert asked
        asked.clear()
        logged = engine.submit(ids, replace(params, logprobs=0)).result()
        stopped = engine.submit(ids, replace(params, stop=("\0nowhere",))).result()
        assert not asked, "nor is anything measured for them"
        plain = engine.submit(ids, replace(params, schedule="plain")).result()
    assert done.stats.rescued and done.token_ids != plain.token_ids
    assert logged.token_ids == plain.token_ids and not logged.stats.rescued and len(logged.logprobs) == 50
    assert stopped.token_ids == plain.token_ids and not stopped.stats.rescued
    assert done.stats.lossy and not logged.stats.lossy and not stopped.stats.lossy


@pytest.mark.usefixtures("deep")
@pytest.mark.slow
def test_it_is_said_when_an_engine_is_made_and_by_the_figures(
    tiny_pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    ids, pair = tiny.byte_tokenizer()(PROMPT).input_ids, tiny_pairs["llama"]
    for acceptance, lossy in (("exact", False), ("loose", True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), Engine(config_of(pair, acceptance)) as engine:
            stats = engine.submit(ids, SamplingParams(max_tokens=4)).result().stats
        said = [record.message for record in caplog.records if record.message.startswith("lossy: ")]
        assert len(said) == lossy == stats.lossy
    whole = RequestStats(rescued=1).after(RequestStats(rescued=2, lossy=True))
    assert whole.lossy and whole.rescued == 3


@pytest.mark.slow
def test_a_process_of_its_own_says_it_too(tiny_pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_pairs["llama"], "loose?threshold=0", isolate=True)
    with caplog.at_level(logging.WARNING), Engine(config) as engine:
        done = engine.submit([1, 2, 3], SamplingParams(max_tokens=4)).result()
    assert done.stats.lossy
    assert [record.message for record in caplog.records if "lossy: " in record.message]


# What does not go with it.


class Stranger(ToyDrafter):
    """Says nothing of trust."""

    name, paced = "stranger", False


def test_only_trusted_drafters_write_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    plugins.register("drafters", "stranger", Stranger)
    assert not EngineConfig(drafters=("ngram", "stranger")).lossy
    asked: dict[str, Any] = {
        "drafters": ("ngram", "stranger"),
        "draft_model": "stranger",
        "stack": ("stranger?block=3",),
    }
    for field, value in asked.items():
        with pytest.raises(InvalidInputError, match=rf"^{field} = 'stranger': is not trusted.*acceptance=\"exact\""):
            EngineConfig(acceptance="loose", **{field: value})
    monkeypatch.setattr(Stranger, "trusted", True, raising=False)
    assert all(EngineConfig(acceptance="loose", **{field: value}).lossy for field, value in asked.items())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"acceptance": "lose"}, "acceptance = 'lose'.*did you mean loose"),
        ({"acceptance": "loose?tresholds=1"}, "option of acceptance loose = 'tresholds'.*did you mean threshold"),
        ({"acceptance": "exact?threshold=1"}, "option of acceptance exact = 'threshold'"),
        ({"acceptance": "loose", "exact": "strict"}, "exact = 'strict': the rule \"loose\" is lossy"),
        ({"acceptance": "loose", "steering": "any"}, "steering = 'any': the rule \"loose\" is lossy"),
    ],
)
def test_what_a_configuration_refuses(fields: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {("steering", "any"): lambda setting: lambda logits, texts: logits})
    with pytest.raises(InvalidInputError, match=said):
        EngineConfig(**fields)


def test_a_bad_value_is_named_before_weights_are_read(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "acquire_model", lambda spec: pytest.fail("weights are read"))
    with pytest.raises(InvalidInputError, match="window = 0"):
        Engine(config_of(tiny_pairs["llama"], "loose?window=0"))
