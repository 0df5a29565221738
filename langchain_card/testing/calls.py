"""`DrafterContract`: tests that call a drafter directly, without an engine."""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from langchain_card import plugins
from langchain_card.core.messages import Proposal
from langchain_card.drafters.lower_level import Guess, GuessRequest, LowerLevel
from langchain_card.ports import Budget, Drafter, Setting
from langchain_card.runtime import threads
from langchain_card.testing import prompts
from langchain_card.testing.prompts import Text
from langchain_card.testing.proposal_checks import Candidates, RequestRun, run_requests, seeded
from langchain_card.testing.tiny import VOCAB

UNKNOWN = 9_999
"""A request id that no drafter gets."""

SLICE = 7
"""Tokens of a text that a step may read, in a test."""

ROUND = 24
"""Requests between two measurements of memory."""


class DrafterContract:
    """Tests valid proposals, corrections that are lost, late or repeated, unknown requests, and memory.

    Attributes:
        drafter: a spec of `plugins`: `"echo"`, `"echo?depth=4"`.
        factory: a class, or another callable that takes a setting; used if `drafter` is empty.
        grammar: the grammar of all requests (`SamplingParams.grammar`).
        learns: True if scores change with what came true; then tokens are compared in any order, and scores are not.
        remembers: requests that the drafter learns from before its memory is full.
        must_accept: True if some candidates for texts like those of `texts` must be accepted.
    """

    drafter: str = ""
    factory: Callable[..., Drafter] | None = None
    grammar: str = ""
    learns: bool = False
    remembers: int = 0
    must_accept: bool = True

    def make(self, setting: Setting) -> Drafter:
        """Make the drafter; override this if neither `drafter` nor `factory` can express how."""
        if self.drafter:
            made: Drafter = plugins.find("drafters", self.drafter).make(setting)
            return made
        factory = type(self).factory
        assert factory is not None, "no drafter to test: set drafter = 'its-name?option=1', or factory = ItsClass"
        return factory(setting)

    @pytest.fixture(autouse=True)
    def _one_thread(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Use one thread: tiny models gain nothing from more."""
        monkeypatch.setattr(threads, "num_cores", lambda: 1)
        with threads.single_threaded():
            yield

    def texts(self) -> list[Text]:
        """Return the requests of all tests, engines included: at least five, with answers of at least 15 tokens."""
        return prompts.texts(self.grammar)

    def fresh(self) -> Drafter:
        """Make a drafter with an empty memory, as an engine over the first tiny model would."""
        return self.make(prompts.setting())

    # Proposals.

    def test_proposals_are_valid(self) -> None:
        """The engine drops invalid proposals."""
        drafter = self.fresh()
        run_requests(drafter, self.texts(), VOCAB)
        drafter.close()

    def test_one_proposal_for_each_request(self) -> None:
        """A step for several requests returns one proposal for each, and none for unknown requests."""
        drafter, texts = self.fresh(), self.texts()[:3]
        runs = [RequestRun(drafter, text, VOCAB, known=n) for n, text in enumerate(texts)]
        for _ in range(4):
            ids = [run.request_id for run in runs]
            proposals = drafter.step([Budget(request_id, 2) for request_id in (*ids, UNKNOWN)])
            proposed = sorted(p.request_id for p in proposals)
            assert proposed == ids, (
                f"a step for requests {ids} and {UNKNOWN}, which never began, returned proposals for {proposed}: "
                "it must return one for each known request, and no others"
            )
            for run in runs:
                run.log.receive(next(p for p in proposals if p.request_id == run.request_id))
                run.correct(run.known + 2)
        drafter.close()

    def test_the_same_calls_get_the_same_proposals(self) -> None:
        """Proposals depend on no clock and no randomness; otherwise no run can be repeated."""
        first, second = ([_timeless(p) for p in run_requests(self.fresh(), self.texts(), VOCAB)] for _ in range(2))
        for n, (one, other) in enumerate(zip(first, second, strict=True)):
            assert one == other, f"proposal {n} differs between two runs of the same calls: {one} and {other}"

    def test_it_reads_no_more_than_it_may(self) -> None:
        """A text that is read in slices (`Budget.max_read`) gives the candidates of one that is read at once."""
        for text, _ in self._each_text():
            drafter, fresh = self.fresh(), self.fresh()
            if drafter.paced:  # others read no text in their steps
                run = RequestRun(drafter, text, VOCAB)
                proposal, left = run.step(max_read=0), list[int]()
                while proposal.unread:
                    left.append(proposal.unread)
                    proposal = run.step(max_read=SLICE)
                    assert proposal.unread in (0, left[-1] - proposal.read) and proposal.unread < left[-1], (
                        f"unread = {proposal.unread} after {left[-1]}, with read = {proposal.read}: each step must "
                        "read, and unread must fall by what it reads, or to 0 if the rest is read while drafting"
                    )
                wanted = RequestRun(fresh, text, VOCAB).all_candidates()
                self._compare(run.all_candidates(), wanted, f"after slices with {left} tokens unread")
            drafter.close()
            fresh.close()

    # Corrections.

    def test_rejected_candidates_leave_no_trace(self) -> None:
        """After corrections, proposals are those of a fresh drafter that began with the same answer."""
        for text, others in self._each_text():
            for known in (3, len(text.answer) // 2, len(text.answer) - 1):
                used, fresh = self.fresh(), self.fresh()
                run_requests(used, others, VOCAB)
                run_requests(fresh, others, VOCAB)
                run = RequestRun(used, text, VOCAB)
                run.run(known, seeded(known))
                wanted = RequestRun(fresh, text, VOCAB, known).all_candidates()
                self._compare(run.all_candidates(), wanted, f"after {known} tokens of the answer")
                used.close()
                fresh.close()

    def test_corrections_may_be_lost_late_or_repeated(self) -> None:
        """A correction repeats all tokens that the drafter is not known to have, so none is needed."""
        for text, _ in self._each_text():
            drafter, rng = self.fresh(), seeded(1)
            run, until = RequestRun(drafter, text, VOCAB), len(text.answer) - 2
            while run.known < until:
                for _ in range(rng.randint(0, 2)):
                    run.step()
                was, start = run.known, run.applied
                known = min(until, was + rng.randint(1, 4))
                if rng.random() < 0.7 or known == until:  # otherwise it is lost
                    run.correct(known, start)
                    run.correct(known, start)
                    run.correct(was, start)  # late
                    run.correct(was, was)
            fresh = self.fresh()
            wanted = RequestRun(fresh, text, VOCAB, until).all_candidates()
            self._compare(run.all_candidates(), wanted, "after corrections that were lost, late or repeated")
            drafter.close()
            fresh.close()

    def test_unknown_requests_are_ignored(self) -> None:
        """Ends without a beginning, a second beginning, and steps after the end raise nothing and propose nothing."""
        drafter, text = self.fresh(), self.texts()[1]
        drafter.end(UNKNOWN)
        drafter.correct(UNKNOWN, 0, (1, 2))
        assert drafter.step([Budget(UNKNOWN)]) == [], "a request that never began has a proposal: it must have none"
        RequestRun(drafter, text, VOCAB).run(5, seeded(2))
        run = RequestRun(drafter, text, VOCAB, known=3)  # begins again, without an end
        run.run(9, seeded(3))
        fresh = self.fresh()
        before = RequestRun(fresh, text, VOCAB)
        before.run(5, seeded(2))
        before.end()
        wanted = RequestRun(fresh, text, VOCAB, 9).all_candidates()
        self._compare(run.all_candidates(), wanted, "after a second begin without an end")
        run.end()
        run.end()
        drafter.correct(run.request_id, 9, (1, 2))
        assert drafter.step([Budget(run.request_id)]) == [], "an ended request has a proposal: it must have none"
        drafter.close()
        fresh.close()

    # Memory.

    def test_tenants_are_kept_apart(self) -> None:
        """Texts of one tenant are never proposed to another (`request.params.tenant`)."""
        for text, others in self._each_text():
            drafter, fresh = self.fresh(), self.fresh()
            run_requests(drafter, [_of_tenant("first", other) for other in (*others, text)], VOCAB)
            proposed, wanted = (
                RequestRun(each, _of_tenant("second", text), VOCAB, 3).all_candidates() for each in (drafter, fresh)
            )
            prefixes = proposed.keys() & {(), *wanted} if self.learns else proposed.keys()
            leaked = {each: {*dict(proposed[each])} - {*dict(wanted.get(each, ()))} for each in prefixes}
            leaked = {each: tokens for each, tokens in leaked.items() if tokens}
            assert not leaked, (
                f"tokens that only another tenant's texts can explain, by the guess before them: {leaked}; "
                "keep what is learnt by request.params.tenant"
            )
            drafter.close()
            fresh.close()

    def test_an_id_used_again_is_another_request(self) -> None:
        """Nothing of a request that has ended is proposed for the next one with its id."""
        texts = self.texts()
        for earlier, later in itertools.pairwise(texts):
            drafter, fresh = self.fresh(), self.fresh()
            again = Text(replace(later.request, request_id=earlier.request.request_id), later.answer)
            run_requests(drafter, [earlier], VOCAB)
            run_requests(fresh, [Text(replace(earlier.request, request_id=77), earlier.answer)], VOCAB)
            proposed, wanted = (RequestRun(each, again, VOCAB, 3).all_candidates() for each in (drafter, fresh))
            self._compare(proposed, wanted, "with an id that an earlier request had")
            drafter.close()
            fresh.close()

    def test_ended_requests_are_freed(self) -> None:
        """Memory that the drafter keeps alive does not grow when the same requests come again under new ids."""
        drafter, texts, ids = self.fresh(), self.texts()[1:3], itertools.count(10_000)

        def size_after(count: int) -> int:
            for text in itertools.islice(itertools.cycle(texts), count):
                run = RequestRun(drafter, Text(replace(text.request, request_id=next(ids)), text.answer), VOCAB)
                run.step()
                run.correct(3)
                run.step()
                run.end()
            return count_reachable(drafter)

        size_after(self.remembers)
        sizes = [size_after(ROUND) for _ in range(4)]
        grown = min(after - before for before, after in itertools.pairwise(sizes))
        assert grown < ROUND // 2, (
            f"every {ROUND} requests that begin and end leave {grown} more objects or entries in memory: end must free "
            "what is kept for a request; if the drafter learns from so many requests, set remembers to their number"
        )
        drafter.close()

    def test_it_looks_ahead(self) -> None:
        """With `looks_ahead`, assumed tokens give the guesses that committed ones give, at every repeated step."""
        drafter = self.fresh()
        drafter.close()
        if not getattr(drafter, "looks_ahead", False):
            return  # it may not work below another drafter
        some_guessed = some_changed = False
        for text, others in self._each_text():
            for known, ahead in ((0, 1), (3, 2), (9, 5)):
                assumed = self._guess_twice(text, others, known, ahead)
                committed = self._guess_twice(text, others, known + ahead, 0)
                some_guessed |= bool(assumed)
                some_changed |= assumed != self._guess_twice(text, others, known, 0)
                assert assumed == committed or self.learns, (
                    f"with {known} tokens committed and {ahead} assumed (Budget.ahead) it guesses {assumed}, but "
                    f"{committed} with all {known + ahead} committed: both must be equal"
                )
        assert some_guessed or not self.must_accept, (
            "no guesses at all: override texts() with texts that suit the drafter, or set must_accept = False"
        )
        assert some_changed or not some_guessed, "the guesses never depend on the assumed tokens: apply Budget.ahead"

    def _guess_twice(self, text: Text, others: Sequence[Text], known: int, ahead: int) -> list[Guess]:
        """Return the guesses of a drafter that has seen other texts; check that they are there a second time."""
        drafter = self.fresh()
        run_requests(drafter, others, VOCAB)
        drafter.begin(text.request, text.answer[:known])
        wanted = GuessRequest(text.request.request_id, known, text.answer[known : known + ahead], 4)
        first, second = (LowerLevel(drafter, 4, VOCAB).guess([wanted])[0].rows(0, 1, lambda _: True) for _ in range(2))
        assert bool(first) == bool(second), (
            f"with {known} tokens committed and {ahead} assumed, two steps in a row guess {first} and {second}: "
            "with Budget.whole, each proposal must be complete"
        )
        drafter.close()
        return sorted(first)

    def _each_text(self) -> Iterator[tuple[Text, Sequence[Text]]]:
        """Yield texts, each with others that come before it."""
        texts = self.texts()
        short = [len(text.answer) for text in texts if len(text.answer) < 15]
        assert len(texts) >= 5 and not short, (
            f"texts() has {len(texts)} texts, {len(short)} of them with fewer than 15 tokens of answer: "
            "it must have at least 5, none of them so short"
        )
        for n in (1, 2, 4):
            yield texts[n], texts[:n]

    def _compare(self, used: Candidates, fresh: Candidates, when: str) -> None:
        """Raise AssertionError if two drafters with the same answer differ, as far as both go."""
        for prefix in used.keys() & fresh.keys():
            tokens, wanted = ([token for token, _ in candidates[prefix]] for candidates in (used, fresh))
            fewer, more = sorted((tokens, wanted), key=len)
            assert fewer == more[: len(fewer)] or (self.learns and {*fewer} <= {*more}), (
                f"{when}, after the guess {prefix}, it proposes {tokens}, but a fresh drafter with the same answer "
                f"proposes {wanted}: rejected candidates, or another request, left something behind"
            )
            scores = [(one, other) for (_, one), (_, other) in zip(used[prefix], fresh[prefix])]  # noqa: B905
            assert self.learns or all(abs(one - other) < 1e-6 for one, other in scores), (
                f"{when}, after the guess {prefix}, its scores are {used[prefix]}, but {fresh[prefix]} in a fresh "
                "drafter with the same answer; if it learns from what came true, set learns = True"
            )
        if not self.learns:
            assert used.get(()) or not fresh.get(()), (
                f"{when}, it proposes nothing after the answer, but a fresh drafter with the same answer does"
            )


def _of_tenant(tenant: str, text: Text) -> Text:
    request = text.request
    return Text(replace(request, params=replace(request.params, tenant=tenant)), text.answer)


def _timeless(p: Proposal) -> Proposal:
    """Return a proposal without the times that it took."""
    return replace(p, elapsed=0.0, reading=0.0)


_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytes, bytearray, str)
_SHARED = (types.ModuleType, type, types.CodeType, types.FrameType)


def count_reachable(drafter: Any) -> int:
    """Count the objects, entries of containers, numbers in tensors and bytes of arrays that a drafter can reach.

    Its classes and the globals of its module are included. The same calls give the same count, whatever the allocator
    does, which is not true of bytes.
    """
    classes = [vars(each) for each in type(drafter).__mro__ if each is not object]
    seen, count, todo = set[int](), 0, [drafter, *classes, vars(sys.modules[type(drafter).__module__])]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _SHARED):
            continue
        seen.add(id(value))
        count += 1
        if isinstance(value, torch.Tensor):
            count += value.numel()
        elif isinstance(value, _CONTAINERS):
            count += len(value)
        else:
            count += _num_bytes(value)
        if isinstance(value, types.FunctionType):
            todo += value.__closure__ or ()
        else:
            todo += gc.get_referents(value)
    return count


def _num_bytes(value: Any) -> int:
    """Return the bytes of an object with a buffer, such as an array; 0 for others."""
    try:
        with memoryview(value) as view:
            return view.nbytes
    except (TypeError, BufferError, ValueError):
        return 0
