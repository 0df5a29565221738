"""What a drafter owes to the engine that calls it, tried by hand, without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from langchain_card import plugins
from langchain_card.core.messages import Proposal
from langchain_card.drafters.lower_level import GuessRequest, LowerLevel
from langchain_card.ports import Budget, Drafter, Setting
from langchain_card.runtime import threads
from langchain_card.testing import prompts
from langchain_card.testing.memory import held
from langchain_card.testing.prompts import Text
from langchain_card.testing.proposal_checks import Life, Prefix, drawing, live
from langchain_card.testing.tiny import VOCAB

UNKNOWN = 9_999
ROUND = 24
"""Requests between two looks at the memory."""

Said = dict[Prefix, list[tuple[int, float]]]


class DrafterContract:
    """Commands that are lost, late, repeated and unknown; corrections and what they leave behind.

    Attributes:
        drafter: a spec of `plugins`: `"echo"`, `"echo?depth=4"`.
        factory: in its place a class, or what stands for one.
        grammar: that all requests obey (`SamplingParams.grammar`).
        learns: whether its scores change with what came true; then only tokens are compared, in any order.
        remembers: requests that it learns from before its memory is full.
        must_accept: it has something to say about texts like those of `texts`, and some of it comes true.
    """

    drafter: str = ""
    factory: Callable[..., Drafter] | None = None
    grammar: str = ""
    learns: bool = False
    remembers: int = 0
    must_accept: bool = True

    def make(self, setting: Setting) -> Drafter:
        """A fresh one; to be overridden where neither `drafter` nor `factory` can say it."""
        if self.drafter:
            made: Drafter = plugins.find("drafters", self.drafter).make(setting)
            return made
        factory = type(self).factory
        assert factory is not None, "say what is tested: drafter = 'its-name?option=1', or factory = ItsClass"
        return factory(setting)

    @pytest.fixture(autouse=True)
    def _one_thread(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Tiny models gain nothing from more."""
        monkeypatch.setattr(threads, "num_cores", lambda: 1)
        with threads.single_threaded():
            yield

    def texts(self) -> list[Text]:
        """What is asked, here and in engines, and the answers: five at least, of fifteen tokens or more."""
        return prompts.texts(self.grammar)

    def fresh(self) -> Drafter:
        """One with nothing in its memory, as an engine over the first tiny model makes it."""
        return self.make(prompts.setting())

    # What it says.

    def test_its_proposals_make_sense(self) -> None:
        """The engine refuses what makes none, and one that is refused is work for nothing."""
        drafter = self.fresh()
        live(drafter, self.texts(), VOCAB)
        drafter.close()

    def test_one_proposal_for_each_request(self) -> None:
        """Of a step for several requests; requests that nobody knows have none."""
        drafter, texts = self.fresh(), self.texts()[:3]
        lives = [Life(drafter, text, VOCAB, known=n) for n, text in enumerate(texts)]
        for _ in range(4):
            ids = [life.request_id for life in lives]
            said = drafter.step([Budget(request_id, 2) for request_id in (*ids, UNKNOWN)])
            told = sorted(p.request_id for p in said)
            assert told == ids, f"a step for requests {ids} and {UNKNOWN}, which was never begun, proposed for {told}"
            for life in lives:
                life.heard.hear(next(p for p in said if p.request_id == life.request_id))
                life.tell(life.known + 2)
        drafter.close()

    def test_the_same_calls_get_the_same_proposals(self) -> None:
        """No clock, no randomness of its own: else nobody could repeat a run."""
        first, second = ([_timeless(p) for p in live(self.fresh(), self.texts(), VOCAB)] for _ in range(2))
        for n, (one, other) in enumerate(zip(first, second, strict=True)):
            assert one == other, f"proposal {n} differs between two runs of the same calls: {one} and {other}"

    # What it is told.

    def test_what_was_refused_leaves_no_trace(self) -> None:
        """Behind corrections it proposes what a fresh one does that was begun with the answer so far."""
        for text, others in self._each_text():
            for known in (3, len(text.answer) // 2, len(text.answer) - 1):
                lived, fresh = self.fresh(), self.fresh()
                live(lived, others, VOCAB)
                live(fresh, others, VOCAB)
                life = Life(lived, text, VOCAB)
                life.go(known, drawing(known))
                self._compare(life.say_all(), Life(fresh, text, VOCAB, known).say_all(), f"{known} tokens told")
                lived.close()
                fresh.close()

    def test_corrections_come_late_twice_or_never(self) -> None:
        """Each names its first token, and says all since the last that the drafter is known to have: none is needed."""
        for text, _ in self._each_text():
            drafter, rng = self.fresh(), drawing(1)
            life, until = Life(drafter, text, VOCAB), len(text.answer) - 2
            while life.known < until:
                for _ in range(rng.randint(0, 2)):
                    life.step()
                was, start = life.known, life.applied
                known = min(until, was + rng.randint(1, 4))
                if rng.random() < 0.7 or known == until:  # else it is lost
                    life.tell(known, start)
                    life.tell(known, start)
                    life.tell(was, start)  # late
                    life.tell(was, was)
            fresh = self.fresh()
            self._compare(life.say_all(), Life(fresh, text, VOCAB, until).say_all(), "some lost, late, repeated")
            drafter.close()
            fresh.close()

    def test_requests_that_nobody_knows(self) -> None:
        """Ends without a beginning, two beginnings, steps after the end: no exception, and nothing is proposed."""
        drafter, text = self.fresh(), self.texts()[1]
        drafter.end(UNKNOWN)
        drafter.correct(UNKNOWN, 0, (1, 2))
        assert drafter.step([Budget(UNKNOWN)]) == [], "a request that was never begun has no proposal"
        Life(drafter, text, VOCAB).go(5, drawing(2))
        life = Life(drafter, text, VOCAB, known=3)  # begun again, without an end
        life.go(9, drawing(3))
        fresh = self.fresh()
        before = Life(fresh, text, VOCAB)
        before.go(5, drawing(2))
        before.end()
        self._compare(life.say_all(), Life(fresh, text, VOCAB, 9).say_all(), "begun twice")
        life.end()
        life.end()
        drafter.correct(life.request_id, 9, (1, 2))
        assert drafter.step([Budget(life.request_id)]) == [], "a request that has ended has no proposal"
        drafter.close()
        fresh.close()

    # What it keeps.

    def test_tenants_are_kept_apart(self) -> None:
        """Of what it remembers: nothing of one tenant's texts is said to another's (`request.params.tenant`)."""
        for text, others in self._each_text():
            drafter, fresh = self.fresh(), self.fresh()
            live(drafter, [_of("somebody", other) for other in (*others, text)], VOCAB)
            said, wanted = (Life(each, _of("another", text), VOCAB, 3).say_all() for each in (drafter, fresh))
            prefixes = said.keys() & {(), *wanted} if self.learns else said.keys()
            told = {each: {*dict(said[each])} - {*dict(wanted.get(each, ()))} for each in prefixes}
            told = {each: tokens for each, tokens in told.items() if tokens}
            assert not told, f"guesses and tokens after them that only another tenant's texts can have told it: {told}"
            drafter.close()
            fresh.close()

    def test_a_number_used_again_is_another_request(self) -> None:
        """What was said of a request that has ended is not said of the next one with its number."""
        texts = self.texts()
        for one, other in itertools.pairwise(texts):
            drafter, fresh = self.fresh(), self.fresh()
            again = Text(replace(other.request, request_id=one.request.request_id), other.answer)
            live(drafter, [one], VOCAB)
            live(fresh, [Text(replace(one.request, request_id=77), one.answer)], VOCAB)
            said, wanted = (Life(each, again, VOCAB, 3).say_all() for each in (drafter, fresh))
            self._compare(said, wanted, "its number was used before")
            drafter.close()
            fresh.close()

    def test_an_ended_request_holds_nothing(self) -> None:
        """The same requests again and again, under new numbers: what can be reached from it does not grow."""
        drafter, texts, numbers = self.fresh(), self.texts()[1:3], itertools.count(10_000)

        def ask(count: int) -> int:
            for text in itertools.islice(itertools.cycle(texts), count):
                life = Life(drafter, Text(replace(text.request, request_id=next(numbers)), text.answer), VOCAB)
                life.step()
                life.tell(3)
                life.step()
                life.end()
            return held(drafter)

        ask(self.remembers)
        sizes = [ask(ROUND) for _ in range(4)]
        grown = min(after - before for before, after in itertools.pairwise(sizes))
        assert grown < ROUND // 2, (
            f"{ROUND} requests began and ended, and it holds {grown} objects or entries more, each time again: "
            "what it keeps for a request must go with end; if it learns from so many, say how many: remembers = ..."
        )
        drafter.close()

    def test_it_looks_ahead(self) -> None:
        """One that says so says of tokens that are assumed what it says once they are told, as often as it is asked."""
        spoken = heeded = 0
        for text, others in self._each_text():
            for known, ahead in ((0, 1), (3, 2), (9, 5)):
                said = list[list[tuple[int, int]]]()
                for begun, assumed in ((known, ahead), (known + ahead, 0), (known, 0)):
                    drafter = self.fresh()
                    if not getattr(drafter, "looks_ahead", False):
                        return  # it may not work below another one
                    live(drafter, others, VOCAB)
                    drafter.begin(text.request, text.answer[:begun])
                    question = GuessRequest(text.request.request_id, begun, text.answer[begun : begun + assumed], 4)
                    once, again = (LowerLevel(drafter, 4, VOCAB).guess([question])[0] for _ in range(2))
                    said.append(sorted(once.rows(0, 1, lambda _: True)))
                    assert bool(said[-1]) == bool(again.rows(0, 1, lambda _: True)), (
                        f"{begun} tokens told and {assumed} assumed: asked twice, it speaks once (Budget.whole)"
                    )
                    drafter.close()
                spoken, heeded = spoken + len(said[0]), heeded + (said[0] != said[2])
                assert said[0] == said[1] or self.learns, (
                    f"{known} tokens told and {ahead} assumed: it says {said[0]}, but {said[1]} where all are told"
                )
        assert spoken or not self.must_accept, "it said nothing at all: override texts(), or say must_accept = False"
        assert heeded or not spoken, "it says the same whatever tokens are assumed (Budget.ahead)"

    def _each_text(self) -> Iterator[tuple[Text, Sequence[Text]]]:
        """Texts, each with others that come before it."""
        texts = self.texts()
        short = [len(text.answer) for text in texts if len(text.answer) < 15]
        assert len(texts) >= 5 and not short, (
            f"texts() has {len(texts)} texts, {len(short)} with answers of fewer than 15 tokens: give five, and no such"
        )
        for n in (1, 2, 4):
            yield texts[n], texts[:n]

    def _compare(self, lived: Said, fresh: Said, what: str) -> None:
        """Raises AssertionError where two drafters that know the same text differ, as far as both go."""
        for prefix in lived.keys() & fresh.keys():
            tokens, wanted = ([token for token, _ in said[prefix]] for said in (lived, fresh))
            fewer, more = sorted((tokens, wanted), key=len)
            assert fewer == more[: len(fewer)] or (self.learns and {*fewer} <= {*more}), (
                f"{what}: after the guess {prefix} it proposes {tokens}, but one that was begun with the same answer "
                f"{wanted}: something of what was refused, or of another request, is left"
            )
            scores = [(one, other) for (_, one), (_, other) in zip(lived[prefix], fresh[prefix])]  # noqa: B905
            assert self.learns or all(abs(one - other) < 1e-6 for one, other in scores), (
                f"{what}: after the guess {prefix} its scores are {lived[prefix]}, but {fresh[prefix]} for one that "
                "was begun with the same answer; if it learns what comes true, say learns = True"
            )
        if not self.learns:
            assert lived.get(()) or not fresh.get(()), (
                f"{what}: nothing is proposed after the answer so far, unlike by one that was begun with it"
            )


def _of(tenant: str, text: Text) -> Text:
    request = text.request
    return Text(replace(request, params=replace(request.params, tenant=tenant)), text.answer)


def _timeless(p: Proposal) -> Any:
    """Without what it took."""
    return replace(p, elapsed=0.0, reading=0.0)
