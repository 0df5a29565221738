"""The conformance suite of drafters: a plug-in that passes costs speed at worst, whatever it does.

```
from langchain_card.testing import DrafterConformance


class TestEcho(DrafterConformance):
    drafter = "echo?depth=4"  # as EngineConfig names it; or factory = EchoDrafter
```

pytest collects it with all its tests; it needs no models but tiny random ones, which it makes. docs/plugins.md says
what is expected of a drafter.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from langchain_card import plugins
from langchain_card.config import Schedule
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.ports import Drafter, Setting
from langchain_card.runtime.threads import single_threaded
from langchain_card.testing import hostile, naive, prompts
from langchain_card.testing.accounting import Ledger
from langchain_card.testing.calls import DrafterContract
from langchain_card.testing.prompts import ARCHS, LETTER_IDS, Asked, Factory
from langchain_card.testing.tiny import VOCAB

SCHEDULES: tuple[Schedule, ...] = tuple(each for each in get_args(Schedule) if each != "plain")
DRAWN = 300
"""Answers of three letters each, whose last two are compared with their chances."""

MOST_TOKENS = 32
"""Of an answer that an engine writes."""

FEW = 4
"""Prompts that are asked where something is wrong."""

SIGMAS = 4.0
"""Beyond which the distribution is another one."""


class DrafterConformance(DrafterContract):
    """Everything that a drafter owes, alone (`DrafterContract`) and in engines over tiny random models."""

    def wrapped(
        self, wrap: Callable[[Drafter, Setting], Drafter] = lambda drafter, _: drafter, *, paced: bool | None = None
    ) -> Factory:
        """What an engine makes it with.

        Args:
            wrap: what is put around each that is made.
            paced: on a thread of its own, or inline; as it says itself by default.
        """
        one = self.fresh()
        one.close()
        return Factory(
            lambda setting: wrap(self.make(setting), setting),
            one.name,
            one.paced if paced is None else paced,
            getattr(one, "of_grammars", False),
        )

    # The answer is the target's own.

    @pytest.mark.parametrize("arch", ARCHS)
    def test_every_answer_is_the_targets_own(self, arch: str) -> None:
        """Greedy and with a seed, under every schedule, several requests at once."""
        with prompts.running(arch, self.wrapped()) as engine:
            for schedule in SCHEDULES:
                self._compare_answers(engine, arch, schedule)

    def test_the_distribution_is_the_targets_own(self) -> None:
        """Three of six letters, drawn with many seeds, against their exact chances."""
        every = [self._drawn(seed) for seed in range(DRAWN)]
        with prompts.running(ARCHS[0], self.wrapped()) as engine:
            found = Counter(done.token_ids[1:] for done in prompts.answers(engine, every, "sequential"))
        with single_threaded():
            chances = _chances(every[0])
        strange = found.keys() - chances.keys()
        assert not strange, f"{strange} can never be answered"
        rare = [text for text, chance in chances.items() if chance * DRAWN < 5]
        cells = [([text], chance) for text, chance in chances.items() if text not in rare]
        cells.append((rare, sum(chances[text] for text in rare)))
        square = sum((sum(found[t] for t in texts) - DRAWN * p) ** 2 / (DRAWN * p) for texts, p in cells if p)
        free = len(cells) - 1
        most = free * (1 - 2 / (9 * free) + SIGMAS * (2 / (9 * free)) ** 0.5) ** 3  # Wilson and Hilferty
        assert square < most, (
            f"chi-square of {DRAWN} answers over {len(cells)} texts is {square:.0f}, not below {most:.0f}"
        )

    @pytest.mark.parametrize("lie", hostile.LIES)
    def test_lies_change_nothing(self, lie: str) -> None:
        """What it says is made wrong on its way to the engine."""
        with prompts.running(ARCHS[0], self.wrapped(lambda one, setting: hostile.Lying(one, setting, lie))) as engine:
            for schedule in ("sequential", "parallel"):
                self._compare_answers(engine, ARCHS[0], schedule, FEW)
            assert all(worker.state == "up" for worker in engine.health().values()), "it failed where it was lied for"

    @pytest.mark.parametrize("failure", hostile.FAILURES)
    def test_failures_cost_speed_only(self, failure: str) -> None:
        """It raises, or has no memory; requests go on."""
        with prompts.running(ARCHS[0], self.wrapped(lambda one, _: hostile.Failing(one, failure))) as engine:
            for schedule in ("sequential", "parallel"):
                self._compare_answers(engine, ARCHS[0], schedule, FEW)

    # What is counted, and where it runs.

    def test_the_accounts_add_up(self) -> None:
        """Whatever was verified was proposed under that very text, and all sums are right."""
        ledger, accepted, verified = Ledger(VOCAB), 0, 0
        with prompts.running(ARCHS[0], self.wrapped()) as engine, ledger.watching(engine):
            for schedule in SCHEDULES:
                before = len(ledger.accounts)
                for i, done in enumerate(prompts.answers(engine, self.asked(), schedule), before):
                    ledger.check(i, done.stats)
                    accepted, verified = accepted + done.stats.accepted, verified + done.stats.verified
        candidates = sum(account.candidates for account in ledger.accounts.values())
        assert accepted or not self.must_accept, (
            f"it proposed {candidates} candidates, {verified} were verified, and none was accepted; "
            "say must_accept = False if it has nothing to say about texts like those of texts()"
        )

    @pytest.mark.parametrize("transport", ["inline", "thread", "process"])
    def test_it_answers_the_same_wherever_it_runs(self, transport: str) -> None:
        """On the target's thread, on one of its own, or, if its steps cost device time, in a process of its own."""
        if transport != "process":
            factory = self.wrapped(paced=transport == "thread")
            with prompts.running(ARCHS[0], factory) as engine:
                self._compare_answers(engine, ARCHS[0], "parallel")
            return
        if not self.wrapped().paced:
            pytest.skip("it is not paced: it never gets a process of its own")
        if not self.drafter or ("drafters", plugins.name_of(self.drafter)) in plugins._registered:
            pytest.skip("another process finds plug-ins by their entry points: say drafter = 'its-name'")
        with prompts.running(ARCHS[0], draft_model=self.drafter, draft_transport="process") as engine:
            self._compare_answers(engine, ARCHS[0], "parallel")

    def asked(self) -> tuple[Asked, ...]:
        """What the engines are asked: the requests of `texts`, for answers that are not long."""
        requests = [text.request for text in self.texts()]
        return tuple(
            Asked(each.prompt_ids, replace(each.params, max_tokens=min(MOST_TOKENS, each.params.max_tokens)))
            for each in requests
        )

    def _compare_answers(self, engine: Engine, arch: str, schedule: Schedule, count: int | None = None) -> None:
        every = self.asked()[:count]
        for one, done in zip(every, prompts.answers(engine, every, schedule), strict=True):
            wanted = prompts.answer(arch, one)
            assert done.token_ids == wanted, (
                f"{arch}, {schedule}, {one.params}: the answer is {done.token_ids}, the target's own is {wanted}"
            )

    def _drawn(self, seed: int) -> Asked:
        prompt_ids = self.asked()[1].prompt_ids
        return Asked(
            prompt_ids, SamplingParams(max_tokens=3, temperature=1.0, seed=seed, logit_bias=prompts.ONLY_LETTERS)
        )


@functools.cache
def _chances(one: Asked) -> dict[tuple[int, ...], float]:
    """Of the last two tokens of every answer, by the target's logits after every text."""
    own, texts = prompts.model(ARCHS[0]), dict[tuple[int, ...], float]({(): 1.0})
    for _ in range(one.params.max_tokens):
        after = dict[tuple[int, ...], float]()
        for text, chance in texts.items():
            logits = naive.reading(own)([*one.prompt_ids, *text])
            chances = naive.process(logits, one.prompt_ids, text, one.params).softmax(dim=-1)[torch.tensor(LETTER_IDS)]
            after.update({(*text, token): chance * float(p) for token, p in zip(LETTER_IDS, chances, strict=True)})
        texts = after
    last = dict.fromkeys((text[1:] for text in texts), 0.0)
    for text, chance in texts.items():
        last[text[1:]] += chance
    return last
