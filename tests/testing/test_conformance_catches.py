"""The conformance suite finds bugs: each broken drafter, and each planted bug, fails the test that is for it."""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_card.core import coordinator, walk
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, RequestStats
from langchain_card.core.walk import ExactRule
from langchain_card.errors import EngineError
from langchain_card.ports import Budget
from langchain_card.testing import DrafterConformance, prompts
from langchain_card.testing.calls import DrafterContract
from tests.support.documents import PLUGIN_FILES

pytestmark = pytest.mark.usefixtures("one_thread")

_page: dict[str, Any] = {}
exec(PLUGIN_FILES["echoing.py"], _page)
Echo: Any = _page["EchoDrafter"]
Echo.__module__ = __name__

VALID = "test_proposals_are_valid"
ONE_EACH = "test_one_proposal_for_each_request"
THE_SAME = "test_the_same_calls_get_the_same_proposals"
NO_TRACE = "test_rejected_candidates_leave_no_trace"
LATE = "test_corrections_may_be_lost_late_or_repeated"
SLICES = "test_it_reads_no_more_than_it_may"
UNKNOWN = "test_unknown_requests_are_ignored"
FREED = "test_ended_requests_are_freed"
AHEAD = "test_it_looks_ahead"
TENANTS = "test_tenants_are_kept_apart"
TESTS = [name for name in vars(DrafterContract) if name.startswith("test_")]


class Uncorrected(Echo):
    """Ignores corrections."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        pass


class Stale(Echo):
    """Repeats its first proposal for a request, as if it followed the present answer."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.__dict__.setdefault("proposed", {}).pop(request.request_id, None)

    def propose(self, request_id: int) -> Proposal:
        now = super().propose(request_id)
        first = self.proposed.setdefault(request_id, now)
        return replace(now, token_ids=first.token_ids, parents=first.parents, scores=first.scores)

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.proposed.pop(request_id, None)


class Leaking(Echo):
    """Keeps every request id in an attribute."""

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.__dict__.setdefault("seen", []).append(request_id)


class Gathering(Echo):
    """Keeps every request id in its class."""

    seen: ClassVar[list[int]] = []

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.seen.append(request_id)


class Heedless(Echo):
    """Claims to look ahead, but ignores the assumed tokens."""

    looks_ahead = True


class Mixing(Echo):
    """Proposes the text of one tenant to others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.latest = list[int]()

    def end(self, request_id: int) -> None:
        self.latest = self.texts.get(request_id, self.latest)[-64:]
        super().end(request_id)

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.texts[request.request_id], self.places[request.request_id] = [], {}
        self.prompts[request.request_id] += len(self.latest)
        self.extend(request.request_id, [*self.latest, *request.prompt_ids, *output_ids])


class Keeping(Echo):
    """Frees no request."""

    def end(self, request_id: int) -> None:
        pass


class Fragile(Echo):
    """Raises for unknown requests."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [self.propose(budget.request_id) for budget in budgets]


class Learning(Echo):
    """Treats its own guesses as the answer."""

    def propose(self, request_id: int) -> Proposal:
        proposal = super().propose(request_id)
        known = self.__dict__.setdefault("known", {})
        if proposal.token_ids:
            token = known.setdefault(self.texts[request_id][-1], proposal.token_ids[0])
            proposal = replace(proposal, token_ids=(token, *proposal.token_ids[1:]))
        return proposal


class Repeating(Echo):
    """Appends tokens that it has already."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self.texts:
            self.texts[request_id] += token_ids


class Strict(Echo):
    """Raises for tokens that it has already."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self.texts and start != len(self.texts[request_id]) - self.prompts[request_id]:
            raise ValueError(start)
        super().correct(request_id, start, token_ids)


class Timed(Echo):
    """Derives its scores from the time."""

    def propose(self, request_id: int) -> Proposal:
        proposal = super().propose(request_id)
        return replace(proposal, scores=(-(time.perf_counter() % 1.0) - 0.1,) * len(proposal.scores))


class Hopeful(Echo):
    """States chances above 1."""

    def propose(self, request_id: int) -> Proposal:
        proposal = super().propose(request_id)
        return replace(proposal, scores=(0.4,) * len(proposal.scores))


class Numbered(Echo):
    """Never begins a new epoch."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), epoch=0)


class Lazy(Echo):
    """Serves one request in a step."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return super().step(budgets[:1])


class Clinging(Echo):
    """Keeps the old state of a request that begins again."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        if request.request_id not in self.texts:
            super().begin(request, output_ids)


class Layered(Echo):
    """Reports 0 layers."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), layers=0)


class Listing(Echo):
    """Reports the expanded nodes as a list."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), expanded=[])


class Measuring(Echo):
    """Reports a time of numpy's type."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), elapsed=np.float64(1e-4))


class Packing(Echo):
    """Keeps all prompts in an array."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.__dict__.setdefault("log", array("i")).extend(request.prompt_ids)


class Slicing(Echo):
    """Takes time to read a text, and reads it in slices. Sound; those below are not."""

    paced = True

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.__dict__.setdefault("unread", {})[request.request_id] = len(request.prompt_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        bounds = {budget.request_id: budget.max_read for budget in budgets}
        return [self.sliced(proposal, bounds[proposal.request_id]) for proposal in super().step(budgets)]

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        unread = self.unread[proposal.request_id]
        read = unread if bound is None else min(unread, bound)
        self.unread[proposal.request_id] = unread - read
        proposal = replace(proposal, forwarded=1, together=1, elapsed=1e-3, read=read, unread=unread - read)
        return replace(proposal, parents=(), token_ids=(), scores=()) if unread > read else proposal

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.__dict__.setdefault("unread", {}).pop(request_id, None)


class Gulping(Slicing):
    """Reads the whole text, whatever it may."""

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        return super().sliced(proposal, None)


class Hasty(Slicing):
    """Proposes before it has read the text."""

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        now = super().sliced(proposal, bound)
        return replace(proposal, forwarded=1, together=1, elapsed=1e-3, read=now.read, unread=now.unread)


class Stuck(Slicing):
    """Reports what it reads, and begins anew each time."""

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        before = self.unread[proposal.request_id]
        now = super().sliced(proposal, bound)
        if now.unread:
            self.unread[proposal.request_id] = before
        return replace(now, unread=before) if now.unread else now


class Miscounting(Slicing):
    """Reports half of what it reads."""

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        now = super().sliced(proposal, bound)
        return replace(now, read=now.read // 2)


class Skipping(Slicing):
    """Forgets what it knew with each slice."""

    def sliced(self, proposal: Proposal, bound: int | None) -> Proposal:
        now = super().sliced(proposal, bound)
        if now.unread:
            self.places[proposal.request_id].clear()
        return now


LEFT = "rejected candidates, or another request, left something behind"
BROKEN: dict[Any, dict[str, str]] = {
    Uncorrected: {NO_TRACE: "applied_len = 0: it must be 3", LATE: "applied_len = 0"},
    Stale: {NO_TRACE: LEFT, LATE: LEFT},
    Leaking: {FREED: "end must free what is kept for a request"},
    Gathering: {FREED: "end must free what is kept for a request"},
    Packing: {FREED: "end must free what is kept for a request"},
    Layered: {VALID: "layers = 0: it must be at least 1"},
    Listing: {VALID: "expanded is a list"},
    Measuring: {VALID: "elapsed is a float64: it must be a float"},
    Mixing: {TENANTS: "only another tenant's texts can explain"},
    Heedless: {AHEAD: r"tokens committed and .* assumed \(Budget.ahead\) it guesses"},
    Keeping: {UNKNOWN: "an ended request has a proposal", FREED: "end must free"},
    Fragile: {UNKNOWN: "9999", ONE_EACH: "9999"},
    Learning: {NO_TRACE: LEFT},
    Repeating: {LATE: "applied_len"},
    Strict: {LATE: ""},
    Timed: {THE_SAME: "differs between two runs of the same calls"},
    Hopeful: {VALID: "a score is the logarithm of a chance"},
    Numbered: {VALID: "epoch 0 has .* nodes, so the next number is .*; or raise epoch"},
    Lazy: {ONE_EACH: "it must return one for each known request"},
    Clinging: {UNKNOWN: "applied_len"},
    Gulping: {SLICES: "it must be at most 0, the `max_read` of the budget"},
    Hasty: {SLICES: "nothing may be proposed before all of the text is read"},
    Stuck: {SLICES: "each step must read, and unread must fall by what it reads"},
    Miscounting: {SLICES: "each step must read, and unread must fall by what it reads"},
    Skipping: {SLICES: "after slices with .* tokens unread, it proposes nothing after the answer"},
}


def failing(broken: Any) -> dict[str, str]:
    """Return the messages of the tests that fail, by test."""
    suite, messages = type("Suite", (DrafterContract,), {"factory": broken})(), dict[str, str]()
    for name in TESTS:
        try:
            getattr(suite, name)()
        except Exception as error:  # noqa: PERF203
            messages[name] = str(error)
    return messages


def test_the_sound_one_passes() -> None:
    assert len(TESTS) == 11 and not failing(Echo) and not failing(Slicing)


QUICK = (Uncorrected, Mixing, Repeating, Gulping)
"""Broken drafters that `make test` tries."""


@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, id=each.__name__, marks=() if each in QUICK else pytest.mark.slow) for each in BROKEN],
)
def test_a_broken_drafter_fails(broken: Any) -> None:
    messages = failing(broken)
    for name, wanted in BROKEN[broken].items():
        assert re.search(wanted, messages[name])


class Suite(DrafterConformance):
    factory = Echo


def test_a_lax_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that commits the first candidate of each window, whatever the target chose, is found."""

    def lax(rule: ExactRule, window: Any, verdict: Any, request: Any) -> tuple[list[int], list[int], bool]:
        if len(window.token_ids) == 1:
            return walk.committed(rule, window, verdict, request)
        return [0, 1], [window.token_ids[1], verdict.target_ids[1]], False

    monkeypatch.setattr(coordinator, "committed", lax)
    with pytest.raises(AssertionError, match="but the target's own is"):
        Suite().test_every_answer_is_the_targets_own(prompts.ARCHS[0])
    with pytest.raises(AssertionError, match="chi-square"):
        Suite().test_the_distribution_is_the_targets_own()


def test_wrong_sums_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    add_round = RequestStats.add_round

    def twice(stats: RequestStats, *args: Any) -> None:
        add_round(stats, *args)
        accepted = args[3]
        stats.accepted_by_source = dict(Counter(stats.accepted_by_source) + Counter(accepted))

    monkeypatch.setattr(RequestStats, "add_round", twice)
    with pytest.raises(AssertionError, match="but the ledger counted"):
        Suite().test_the_statistics_add_up()


def test_missing_checks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that admits every proposal is found."""
    monkeypatch.setattr(DrafterState, "_passes_fences", lambda *_: True)
    with pytest.raises(EngineError):
        Suite().test_corrupted_proposals_change_no_answer("out of the vocabulary")


def test_nothing_accepted_fails() -> None:
    class Silent(Echo):
        def propose(self, request_id: int) -> Proposal:
            return replace(super().propose(request_id), parents=(), token_ids=(), scores=())

    suite = type("Suite", (DrafterConformance,), {"factory": Silent})()
    with pytest.raises(AssertionError, match="must_accept = False"):
        suite.test_the_statistics_add_up()
