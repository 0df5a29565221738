"""The answer is the target's own: equal to the naive loop, token for token, whatever the schedule and the drafter.

`make explore` compares five times as many tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core import messages as m
from langchain_card.core.request import SamplingParams
from langchain_card.drafters.model import ModelDrafter
from langchain_card.engine import build, target_worker
from langchain_card.engine.driver import Driver
from langchain_card.runtime import sampling, threads
from tests.simulation import FixedPolicy
from tests.support import tiny
from tests.support.exactness import Figures, Reference, compare

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = dict[str, tuple[str, str]]
SCALE = 5 if os.environ.get("CARD_EXPLORE") else 1
SCHEDULES = ("plain", "sequential", "parallel")
MAX_TOKENS = 36
PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "the quick brown fox; the quick brown", "x" * 130]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": ((40, 1.5), (41, -2.0)),
        "banned_ids": (7, 50),
    },
    "0.7": {"temperature": 0.7},
    "1.0, top-k, top-p": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "0.8, min-p, penalties": {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "1.2, all": {
        "temperature": 1.2,
        "top_k": 100,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.1,
        "logit_bias": ((90, 2.0),),
        "banned_ids": (33,),
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
}
DRAFTERS: dict[str, dict[str, Any]] = {"both": {}, "model": {"drafters": ()}, "ngram": {"draft_model": "ngram"}}


def stay_on_one_thread() -> None:
    """The same for the whole process."""
    threads.num_cores = lambda: 1
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """A process a core."""
    with ProcessPoolExecutor(
        threads.num_cores(), mp_context=get_context("spawn"), initializer=stay_on_one_thread
    ) as workers:
        yield workers


def ask(encode: Any, arch: str, every: int, scale: int) -> dict[str, Any]:
    """Prompt ids and parameters by name; another prompt for each setting and model, and of the settings a share."""
    asked = {}
    for i, (name, options) in list(enumerate(SETTINGS.items()))[[*tiny.CONFIGS].index(arch) % every :: every]:
        for n in range(scale):
            text = PROMPTS[(i + n + len(arch)) % len(PROMPTS)] + "#" * (n // len(PROMPTS))
            seeded = {**options, "seed": 100 * i + n, "max_tokens": MAX_TOKENS}
            asked[name if not n else f"{name} #{n}"] = (encode(text).input_ids, seeded)
    return asked


def compare_all(form: str, every: int, arch: str, pair: tuple[str, str]) -> Figures:
    """All drafters and schedules of one pair, with one of `every` settings."""
    config = EngineConfig(model=pair[0], draft_model=pair[1], max_model_len=512, **FORMS[form])
    asked, figures = ask(tiny.byte_tokenizer(), arch, every, SCALE), Figures()
    reference, eos_ids = Reference(config), (tiny.byte_tokenizer().eos_token_id,)
    wanted = {n: reference.answer(ids, SamplingParams(**options), eos_ids) for n, (ids, options) in asked.items()}
    for name, options in DRAFTERS.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "model":  # tiny models draft at a loss: one that measures would hardly look deep
                patch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(4,) * 8, read=7))
            compare(replace(config, **options), asked, wanted, SCHEDULES, figures)
    return figures


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_equal_to_the_naive_loop(
    tiny_pairs: Pairs, pool: ProcessPoolExecutor, form: str, every: int, say: Callable[[str], None]
) -> None:
    figures = Figures()
    for found in pool.map(compare_all, repeat(form), repeat(every), tiny_pairs, tiny_pairs.values()):
        figures.add(found)
    say(f"{form}: {figures}")
    assert figures.different == 0
    assert figures.compared >= 10_000 * SCALE // every
    assert all(0.03 <= rate <= 0.9 for rate in figures.rates().values()), "drafts must match in part"
    assert all(figures.lengths[n] > 0 for n in range(5)), "rounds must accept nothing, all, and what lies between"
    assert figures.hits_after_misses > 0
    assert sum(count for length, count in figures.re_rooted.items() if length >= 3) > 0


def compare_long(form: str, arch: str, pair: tuple[str, str]) -> Figures:
    """Two texts of 1,950 tokens; the draft reads all of it, or its end in slices beside the answer."""
    config = EngineConfig(model=pair[0], draft_model=pair[1], drafters=(), max_model_len=2048, **FORMS[form])
    encode, figures, reference = tiny.byte_tokenizer(), Figures(), Reference(config)
    texts = [" ".join(str(seed * n * n) for n in range(900))[:1950] for seed in (7, len(arch))]
    asked = {n: (encode(text).input_ids, {"max_tokens": MAX_TOKENS, "seed": 3, **SETTINGS[n]}) for n, text in
             zip(("greedy", "0.8, min-p, penalties"), texts, strict=True)}  # fmt: skip
    eos_ids = (encode.eos_token_id,)
    wanted = {n: reference.answer(ids, SamplingParams(**options), eos_ids) for n, (ids, options) in asked.items()}
    for draft_context, read in ((None, 1950), (300, 90)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "Controller", lambda *, read=read, **_: FixedPolicy(widths=(4,) * 8, read=read))
            compare(replace(config, draft_context=draft_context), asked, wanted, SCHEDULES, figures)
    return figures


@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_long_texts_equal_the_naive_loop(
    tiny_pairs: Pairs, pool: ProcessPoolExecutor, form: str, say: Callable[[str], None]
) -> None:
    figures = Figures()
    for found in pool.map(compare_long, repeat(form), tiny_pairs, tiny_pairs.values()):
        figures.add(found)
    say(f"{form}, long: {figures}")
    assert figures.different == 0 and figures.compared > 300 * len(tiny_pairs)
    assert all(rate > 0.02 for rate in figures.rates().values()), "drafts must match in part"


# Planted bugs: each must be caught by the comparison above.


def differing(pair: tuple[str, str], options: dict[str, Any], schedules: Sequence[str] = ("sequential",)) -> int:
    config = EngineConfig(model=pair[0], draft_model=pair[1], dtype="float64", max_model_len=512)
    prompt_ids = tiny.byte_tokenizer()(PROMPTS[0]).input_ids
    reference, figures = Reference(config), Figures()
    options = {**options, "max_tokens": 60}
    wanted = {"it": reference.answer(prompt_ids, SamplingParams(**options), (tiny.byte_tokenizer().eos_token_id,))}
    with pytest.MonkeyPatch.context() as patch:
        # Tiny models draft at a loss: what a controller that measures would verify depends on the hour.
        patch.setattr(build, "Controller", lambda **_: FixedPolicy())
        compare(config, {"it": (prompt_ids, options)}, wanted, schedules, figures)
    return figures.different


def test_planted_noise_without_position(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    options, noise = {"temperature": 0.8, "seed": 3}, sampling.gumbel_noise
    assert not differing(tiny_pairs["llama"], options)
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, _, *rest: noise(seed, 0, *rest))
    assert differing(tiny_pairs["llama"], options)


def test_planted_history_of_the_wrong_branch(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalties see the rows before a row in the window's order, in place of those on its path."""
    options = {"repetition_penalty": 1.5, "frequency_penalty": 1.0}
    monkeypatch.setattr(ModelDrafter.__init__, "__kwdefaults__", {"num_children": 2})  # deep trees, not broad ones
    assert not differing(tiny_pairs["llama"], options)

    def in_order(token_ids: Sequence[int], paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [tuple(token_ids[row - len(path) + 2 : row + 1]) for row, path in enumerate(paths)]

    monkeypatch.setattr(target_worker, "path_tokens", in_order)
    assert in_order([1, 2, 3], [(0,), (0, 1), (0, 1, 2)]) == [(), (2,), (2, 3)], "right for a chain, wrong for a tree"
    assert differing(tiny_pairs["llama"], options)


def test_planted_bonus_dropped(tiny_pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full match the target's own last token does not reach the consumer."""
    assert not differing(tiny_pairs["llama"], {})
    emit = Driver._emit

    def dropping(driver: Driver, effect: m.Emit) -> bool:
        full = len(effect.sources) > 1 and all(effect.sources[:-1])
        if full:
            effect = replace(effect, token_ids=effect.token_ids[:-1], sources=effect.sources[:-1])
        return emit(driver, effect)

    monkeypatch.setattr(Driver, "_emit", dropping)
    assert differing(tiny_pairs["llama"], {})
