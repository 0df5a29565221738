"""The conformance suite of drafters: a plug-in that passes may cost speed, but never changes an answer.

```
from langchain_card.testing import DrafterConformance


class TestEcho(DrafterConformance):
    drafter = "echo?depth=4"  # as in EngineConfig; or factory = EchoDrafter
```

pytest collects it with all its tests. It needs only tiny random models, which it makes. docs/plugins.md describes what
a drafter must do.
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
from langchain_card.testing.prompts import ARCHS, LETTER_IDS, Factory, PromptCase
from langchain_card.testing.tiny import VOCAB

SCHEDULES: tuple[Schedule, ...] = tuple(each for each in get_args(Schedule) if each != "plain")
NUM_SAMPLES = 300
"""Answers of three letters each that are drawn; the frequencies of the last two letters are compared with chances."""

MAX_TOKENS = 32
"""Tokens of an answer that an engine writes, at most."""

NUM_FAULTY = 4
"""Cases that are tried with each corruption or failure: few, because there are many of them."""

SIGMAS = 4.0
"""Standard deviations of the chi-square statistic beyond which a distribution counts as another one."""


class DrafterConformance(DrafterContract):
    """All tests of a drafter: alone (`DrafterContract`), and in engines over tiny random models."""

    def wrapped(
        self, wrap: Callable[[Drafter, Setting], Drafter] = lambda drafter, _: drafter, *, paced: bool | None = None
    ) -> Factory:
        """Return a factory of the tested drafter, with the attributes of its class.

        Args:
            wrap: wraps each drafter that is made.
            paced: overrides the drafter's own: True for a thread of its own, False for the target's.
        """
        drafter = self.fresh()
        drafter.close()
        return Factory(
            lambda setting: wrap(self.make(setting), setting),
            drafter.name,
            drafter.paced if paced is None else paced,
            getattr(drafter, "of_grammars", False),
            getattr(drafter, "from_model", False),
            getattr(drafter, "reads_target", False),
        )

    # Answers.

    @pytest.mark.parametrize("arch", ARCHS)
    def test_every_answer_is_the_targets_own(self, arch: str) -> None:
        """Greedy and sampled answers equal the plain loop's, under every schedule, with several requests at once."""
        with prompts.running(arch, self.wrapped()) as engine:
            for schedule in SCHEDULES:
                self._compare_answers(engine, arch, schedule)

    def test_the_distribution_is_the_targets_own(self) -> None:
        """The frequencies of three letters out of six, drawn with many seeds, fit their exact chances."""
        cases = [self._sampled(seed) for seed in range(NUM_SAMPLES)]
        with prompts.running(ARCHS[0], self.wrapped()) as engine:
            counts = Counter(done.token_ids[1:] for done in prompts.answers(engine, cases, "sequential"))
        with single_threaded():
            chances = _chances(cases[0])
        impossible = counts.keys() - chances.keys()
        assert not impossible, f"the answers {impossible} have a chance of 0, but were written"
        rare = [text for text, chance in chances.items() if chance * NUM_SAMPLES < 5]
        cells = [([text], chance) for text, chance in chances.items() if text not in rare]
        cells.append((rare, sum(chances[text] for text in rare)))
        expected = [(sum(counts[text] for text in texts), NUM_SAMPLES * chance) for texts, chance in cells]
        square = sum((count - mean) ** 2 / mean for count, mean in expected if mean)
        free = len(cells) - 1
        most = free * (1 - 2 / (9 * free) + SIGMAS * (2 / (9 * free)) ** 0.5) ** 3  # Wilson and Hilferty
        assert square < most, (
            f"chi-square of {NUM_SAMPLES} answers over {len(cells)} texts is {square:.0f}: it must be below {most:.0f}"
        )

    @pytest.mark.parametrize("corruption", hostile.CORRUPTIONS)
    def test_corrupted_proposals_change_no_answer(self, corruption: str) -> None:
        """Proposals that are corrupted on their way to the engine do not change an answer or end the drafter."""
        factory = self.wrapped(lambda drafter, setting: hostile.CorruptingDrafter(drafter, setting, corruption))
        with prompts.running(ARCHS[0], factory) as engine:
            for schedule in ("sequential", "parallel"):
                self._compare_answers(engine, ARCHS[0], schedule, NUM_FAULTY)
            states = {name: health.state for name, health in engine.health().items()}
            assert {*states.values()} == {"up"}, f"the workers are {states}: all must still be up"

    @pytest.mark.parametrize("failure", hostile.FAILURES)
    def test_failures_change_no_answer(self, failure: str) -> None:
        """A drafter that raises, or has no memory, does not change an answer."""
        factory = self.wrapped(lambda drafter, _: hostile.FailingDrafter(drafter, failure))
        with prompts.running(ARCHS[0], factory) as engine:
            for schedule in ("sequential", "parallel"):
                self._compare_answers(engine, ARCHS[0], schedule, NUM_FAULTY)

    # Statistics, and threads and processes.

    def test_the_statistics_add_up(self) -> None:
        """All verified candidates were proposed after the same text, and the engine counts them correctly."""
        ledger, accepted, verified = Ledger(VOCAB), 0, 0
        with prompts.running(ARCHS[0], self.wrapped()) as engine, ledger.watching(engine):
            for schedule in SCHEDULES:
                before = len(ledger.accounts)
                for i, done in enumerate(prompts.answers(engine, self.cases(), schedule), before):
                    ledger.check(i, done.stats)
                    accepted, verified = accepted + done.stats.accepted, verified + done.stats.verified
        candidates = sum(account.candidates for account in ledger.accounts.values())
        assert accepted or not self.must_accept, (
            f"it proposed {candidates} candidates, {verified} were verified, and none was accepted: override texts() "
            "with texts that suit the drafter, or set must_accept = False"
        )

    @pytest.mark.parametrize("transport", ["inline", "thread", "process"])
    def test_it_answers_the_same_wherever_it_runs(self, transport: str) -> None:
        """Answers are the same on the target's thread, on another thread, and, if paced, in a process of its own."""
        if transport != "process":
            factory = self.wrapped(paced=transport == "thread")
            with prompts.running(ARCHS[0], factory) as engine:
                self._compare_answers(engine, ARCHS[0], "parallel")
            return
        if not self.wrapped().paced:
            pytest.skip("a drafter that is not paced never gets a process of its own")
        if not self.drafter or ("drafters", plugins.name_of(self.drafter)) in plugins._registered:
            pytest.skip("another process finds plug-ins only by their entry points: set drafter = 'its-name'")
        with prompts.running(ARCHS[0], draft_model=self.drafter, draft_transport="process") as engine:
            self._compare_answers(engine, ARCHS[0], "parallel")

    def cases(self) -> tuple[PromptCase, ...]:
        """Return the prompts that engines answer: those of `texts`, with shorter answers."""
        requests = [text.request for text in self.texts()]
        return tuple(
            PromptCase(each.prompt_ids, replace(each.params, max_tokens=min(MAX_TOKENS, each.params.max_tokens)))
            for each in requests
        )

    def _compare_answers(self, engine: Engine, arch: str, schedule: Schedule, count: int | None = None) -> None:
        cases = self.cases()[:count]
        for case, done in zip(cases, prompts.answers(engine, cases, schedule), strict=True):
            wanted = prompts.answer(arch, case)
            assert done.token_ids == wanted, (
                f"{arch}, {schedule}, {case.params}: the answer is {done.token_ids}, but the target's own is {wanted}"
            )

    def _sampled(self, seed: int) -> PromptCase:
        params = SamplingParams(max_tokens=3, temperature=1.0, seed=seed, logit_bias=prompts.ONLY_LETTERS)
        return PromptCase(self.cases()[1].prompt_ids, params)


@functools.cache
def _chances(case: PromptCase) -> dict[tuple[int, ...], float]:
    """Return the chance of each pair of last tokens, computed from the target's logits after every text."""
    model, texts = prompts.model(ARCHS[0]), dict[tuple[int, ...], float]({(): 1.0})
    for _ in range(case.params.max_tokens):
        after = dict[tuple[int, ...], float]()
        for text, chance in texts.items():
            logits = naive.reading(model)([*case.prompt_ids, *text])
            scores = naive.process(logits, case.prompt_ids, text, case.params)
            chances = scores.softmax(dim=-1)[torch.tensor(LETTER_IDS)]
            after.update({(*text, token): chance * float(p) for token, p in zip(LETTER_IDS, chances, strict=True)})
        texts = after
    last = dict.fromkeys((text[1:] for text in texts), 0.0)
    for text, chance in texts.items():
        last[text[1:]] += chance
    return last
