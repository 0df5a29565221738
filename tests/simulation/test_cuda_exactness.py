"""Answers on simulated devices are a CPU's, token for token, wherever the models lie.

`CARD_EXPLORE=1 pytest tests/simulation/test_cuda_exactness.py` compares 20,000 tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from tests.simulation.cuda import simulated_cuda
from tests.support.placed import APART, GRAMMAR, GREEDY, PLACEMENTS, SAMPLED, SCHEDULES, completions

pytestmark = pytest.mark.usefixtures("one_thread", "always_drafts")

MAX_TOKENS = 150 if os.environ.get("CARD_EXPLORE") else 16
ALL = PLACEMENTS | {"two processes": APART}
OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED, "grammar": GRAMMAR}


@pytest.fixture(scope="module")
def total() -> Counter[str]:
    """Tokens of all tests that were compared, and answers that differ."""
    return Counter()


@pytest.mark.slow  # 5 to 15 seconds each
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("execution", ["eager", "graphs"])
@pytest.mark.parametrize("placement", ALL)
def test_answers_are_those_of_a_cpu(
    pair: EngineConfig, plain: Callable[[int, dict[str, Any]], list[tuple[int, ...]]], placement: str, execution: str,
    options: str, total: Counter[str], say: Callable[[str], None],
) -> None:  # fmt: skip
    wanted = plain(MAX_TOKENS, OPTIONS[options])
    with simulated_cuda():
        found = completions(
            replace(pair, **ALL[placement], execution=execution), SCHEDULES, MAX_TOKENS, OPTIONS[options]
        )
    pairs = [(done.token_ids, ids) for each in found for done, ids in zip(each, wanted, strict=True)]
    here = Counter(tokens=sum(len(ids) for _, ids in pairs), different=sum(got != ids for got, ids in pairs))
    total.update(here)
    counts = f"{here['tokens']} tokens compared, {here['different']} answers different"
    say(f"{placement}, {execution}, {options}: {counts}; so far {total['tokens']} and {total['different']}")
    assert not here["different"] and here["tokens"] > 3 * MAX_TOKENS
    assert sum(done.stats.accepted for each in found[1:] for done in each) > 0
