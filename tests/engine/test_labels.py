"""Labels: their probabilities are the model's own, found in one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.core.request import FinishReason, SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.engine.labels import LabelWeighing, groups
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from tests.support.isolated import process_of
from tests.support.labels import direct

PROMPT = list(range(40, 60))
LABELS = [(70,), (70, 71), (70, 71, 72), (80, 81), (90,)]
"""Some begin alike, and one is the beginning of another but for its end."""


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": pair[0], "draft_model": pair[1], "dtype": "float64", **options})


def weighed(engine: Engine, labels: Sequence[Sequence[int]] = LABELS, prompt: Sequence[int] = PROMPT) -> LabelWeighing:
    weighing = LabelWeighing(engine, prompt, labels, SamplingParams())
    weighing.result()
    return weighing


def expected(engine: Engine, labels: Sequence[Sequence[int]] = LABELS, prompt: Sequence[int] = PROMPT) -> list[float]:
    return [direct(engine.config.model, prompt, label, engine.eos_ids) for label in labels]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_probabilities_are_those_of_the_weights(tiny_pairs: dict[str, tuple[str, str]], arch: str) -> None:
    with Engine(config(tiny_pairs[arch])) as engine:
        weighing = weighed(engine)
        (stats,) = weighing.stats
        assert (stats.rounds, stats.schedule, stats.verified) == (1, "plain", 0), "one pass"
        wanted = expected(engine)
        assert weighing.logprobs == pytest.approx(wanted, abs=1e-9)
        done = engine.submit(PROMPT, SamplingParams(), LABELS).result()
        assert (done.text, done.token_ids, done.finish_reason) == ("", (), FinishReason.STOP)
        alone = [weighed(engine, [label]).logprobs[0] for label in LABELS]
        assert alone == pytest.approx(wanted, abs=1e-9)
        with pytest.raises(InvalidInputError, match=r"labels = 1000000: must be"):
            engine.submit(PROMPT, SamplingParams(), [(10**6,)])


@pytest.mark.parametrize("options", [{"limits": Limits(max_window=4)}, {"exact": "strict"}], ids=["short", "strict"])
def test_labels_that_do_not_fit_take_further_passes(
    tiny_pairs: dict[str, tuple[str, str]], options: dict[str, Any]
) -> None:
    pair, prompt = tiny_pairs["llama"], PROMPT * 5
    with Engine(config(pair, **options)) as engine:
        weighing = weighed(engine, prompt=prompt)
        count = len(groups(LABELS, engine.config))
        assert count > 1 and [stats.rounds for stats in weighing.stats] == [1] * count
        assert all(stats.cached_tokens > 50 for stats in weighing.stats[1:]), "the prompt was read once"
        assert weighing.logprobs == pytest.approx(expected(engine, prompt=prompt), abs=1e-9)
        with pytest.raises(InvalidInputError, match=r"tokens of a label = 17: must be at most \d+"):
            LabelWeighing(engine, prompt, [range(70, 87)], SamplingParams())
        with pytest.raises(InvalidInputError, match="labels = 5: the tokens of all, as a tree"):
            engine.submit(PROMPT, SamplingParams(), LABELS)


def test_labels_beside_answers(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    pair = tiny_pairs["llama"]
    with Engine(config(pair, drafters=())) as engine:
        params = SamplingParams(max_tokens=40, schedule="sequential")
        alone, alone_labels = engine.submit(PROMPT[3:], params).result().token_ids, weighed(engine).logprobs
        answer = engine.submit(PROMPT[3:], params)
        weighings = [LabelWeighing(engine, PROMPT[i:], LABELS, params) for i in range(3)]
        for weighing in weighings:
            weighing.start()
        assert weighings[0].result() == pytest.approx(alone_labels, abs=1e-9)
        for i, weighing in enumerate(weighings[1:], 1):
            assert weighing.result() == pytest.approx(expected(engine, prompt=PROMPT[i:]), abs=1e-9)
        assert answer.result().token_ids == alone


async def test_a_weighing_that_is_aborted_ends(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    with Engine(config(tiny_pairs["llama"], draft_model=None)) as engine:
        weighing = LabelWeighing(engine, PROMPT * 20, LABELS, SamplingParams())
        weighing.start()
        weighing.abort(TimeoutError("late"))
        with pytest.raises(TimeoutError, match="late"):
            await weighing.aresult()
        deadline = asyncio.get_running_loop().time() + 10
        while engine.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        assert not engine.num_open
        again = await LabelWeighing(engine, PROMPT, LABELS, SamplingParams()).aresult()
        assert again == pytest.approx(expected(engine), abs=1e-9)


def test_groups_share_beginnings() -> None:
    def at_most(candidates: int, **options: Any) -> EngineConfig:
        return EngineConfig(limits=Limits(max_window=candidates + 1), **options)

    assert groups(LABELS, at_most(5)) == [[0, 1, 2, 3], [4]], "the six tokens of the first three labels are three nodes"
    assert groups(LABELS, at_most(6)) == [[0, 1, 2, 3, 4]]
    assert groups(LABELS, at_most(6, exact="strict")) == [[0], [1], [2], [3], [4]]


@pytest.mark.slow
def test_another_process_weighs_the_same_and_a_killed_one_weighs_again(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    with Engine(config(tiny_pairs["llama"], isolate=True)) as engine:
        wanted = expected(engine)
        assert weighed(engine).logprobs == pytest.approx(wanted, abs=1e-9)
        weighing = LabelWeighing(engine, PROMPT, LABELS, SamplingParams())
        weighing.start()
        process_of(engine).kill()
        assert weighing.result() == pytest.approx(wanted, abs=1e-9)
