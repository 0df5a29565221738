"""The conformance suite finds what is wrong: a broken drafter, or a planted bug, fails the tests that are for it."""

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

MAKE_SENSE = "test_its_proposals_make_sense"
ONE_EACH = "test_one_proposal_for_each_request"
THE_SAME = "test_the_same_calls_get_the_same_proposals"
NO_TRACE = "test_what_was_refused_leaves_no_trace"
LATE = "test_corrections_come_late_twice_or_never"
UNKNOWN = "test_requests_that_nobody_knows"
AGAIN = "test_a_number_used_again_is_another_request"
NOTHING = "test_an_ended_request_holds_nothing"
AHEAD = "test_it_looks_ahead"
TENANTS = "test_tenants_are_kept_apart"
TESTS = [name for name in vars(DrafterContract) if name.startswith("test_")]


class Deaf(Echo):
    """Ignores corrections."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        pass


class Stale(Echo):
    """Goes on proposing what it found first, as if it followed the answer so far."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.__dict__.setdefault("found", {}).pop(request.request_id, None)

    def propose(self, request_id: int) -> Proposal:
        now = super().propose(request_id)
        first = self.found.setdefault(request_id, now)
        return replace(now, token_ids=first.token_ids, parents=first.parents, scores=first.scores)

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.found.pop(request_id, None)


class Leaking(Echo):
    """Keeps a note of every request for ever."""

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.__dict__.setdefault("seen", []).append(request_id)


class Gathering(Echo):
    """Keeps a note of every request for ever, and for all of its kind."""

    seen: ClassVar[list[int]] = []

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.seen.append(request_id)


class Heedless(Echo):
    """Says that it looks ahead, and does not."""

    looks_ahead = True


class Gossiping(Echo):
    """What one tenant wrote it says to others."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
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
    """Forgets nothing."""

    def end(self, request_id: int) -> None:
        pass


class Fragile(Echo):
    """Dies of requests that it does not know."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return [self.propose(budget.request_id) for budget in budgets]


class Learning(Echo):
    """Takes its own guesses for the truth."""

    def propose(self, request_id: int) -> Proposal:
        said = super().propose(request_id)
        known = self.__dict__.setdefault("known", {})
        if said.token_ids:
            token = known.setdefault(self.texts[request_id][-1], said.token_ids[0])
            said = replace(said, token_ids=(token, *said.token_ids[1:]))
        return said


class Repeating(Echo):
    """Takes what is said twice for new."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self.texts:
            self.texts[request_id] += token_ids


class Strict(Echo):
    """Wants each token once."""

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self.texts and start != len(self.texts[request_id]) - self.prompts[request_id]:
            raise ValueError(start)
        super().correct(request_id, start, token_ids)


class Timed(Echo):
    """Its scores depend on the hour."""

    def propose(self, request_id: int) -> Proposal:
        said = super().propose(request_id)
        return replace(said, scores=(-(time.perf_counter() % 1.0) - 0.1,) * len(said.scores))


class Hopeful(Echo):
    """States chances above one."""

    def propose(self, request_id: int) -> Proposal:
        said = super().propose(request_id)
        return replace(said, scores=(0.4,) * len(said.scores))


class Numbered(Echo):
    """Never begins a new epoch."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), epoch=0)


class Lazy(Echo):
    """Serves one request a step."""

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        return super().step(budgets[:1])


class Loyal(Echo):
    """A request that begins again is the one that it knows."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        if request.request_id not in self.texts:
            super().begin(request, output_ids)


class Layered(Echo):
    """Says that its steps look at nothing."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), layers=0)


class Listing(Echo):
    """What it expanded comes as a list."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), expanded=[])


class Measuring(Echo):
    """Takes its times from numpy."""

    def propose(self, request_id: int) -> Proposal:
        return replace(super().propose(request_id), elapsed=np.float64(1e-4))


class Packing(Echo):
    """All that it ever read, side by side."""

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        super().begin(request, output_ids)
        self.__dict__.setdefault("log", array("i")).extend(request.prompt_ids)


LEFT = "something of what was refused, or of another request, is left"
BROKEN: dict[Any, dict[str, str]] = {
    Deaf: {NO_TRACE: "it was told 3 tokens", LATE: "it was told"},
    Stale: {NO_TRACE: LEFT, LATE: LEFT},
    Leaking: {NOTHING: "what it keeps for a request must go with end"},
    Gathering: {NOTHING: "what it keeps for a request must go with end"},
    Packing: {NOTHING: "what it keeps for a request must go with end"},
    Layered: {MAKE_SENSE: "layers = 0"},
    Listing: {MAKE_SENSE: "expanded is a list"},
    Measuring: {MAKE_SENSE: "elapsed or reading is a float64"},
    Gossiping: {TENANTS: "only another tenant's texts can have told"},
    Heedless: {AHEAD: "tokens told and .* assumed: it says"},
    Keeping: {UNKNOWN: "a request that has ended has no proposal", NOTHING: "must go with end"},
    Fragile: {UNKNOWN: "9999", ONE_EACH: "9999"},
    Learning: {NO_TRACE: LEFT},
    Repeating: {LATE: "applied_len"},
    Strict: {LATE: ""},
    Timed: {THE_SAME: "differs between two runs of the same calls"},
    Hopeful: {MAKE_SENSE: "each is the logarithm of a chance"},
    Numbered: {MAKE_SENSE: "nodes of epoch 0 have numbers, so that .* is next; or raise epoch"},
    Lazy: {ONE_EACH: "proposed for"},
    Loyal: {UNKNOWN: "applied_len"},
}


def failing(broken: Any) -> dict[str, str]:
    """What the tests that fail say."""
    suite, said = type("Suite", (DrafterContract,), {"factory": broken})(), dict[str, str]()
    for name in TESTS:
        try:
            getattr(suite, name)()
        except Exception as error:  # noqa: PERF203
            said[name] = str(error)
    return said


def test_the_sound_one_passes() -> None:
    assert len(TESTS) == 10 and not failing(Echo)


QUICK = (Deaf, Gossiping, Repeating)
"""Those that `make test` tries."""


@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, id=each.__name__, marks=() if each in QUICK else pytest.mark.slow) for each in BROKEN],
)
def test_a_broken_drafter_fails(broken: Any) -> None:
    said = failing(broken)
    for name, wanted in BROKEN[broken].items():
        assert re.search(wanted, said[name])


class Suite(DrafterConformance):
    factory = Echo


def test_a_lax_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidate of each window is committed, whatever the target chose."""

    def lax(rule: ExactRule, window: Any, verdict: Any, request: Any) -> tuple[list[int], list[int], bool]:
        if len(window.token_ids) == 1:
            return walk.committed(rule, window, verdict, request)
        return [0, 1], [window.token_ids[1], verdict.target_ids[1]], False

    monkeypatch.setattr(coordinator, "committed", lax)
    with pytest.raises(AssertionError, match="the target's own is"):
        Suite().test_every_answer_is_the_targets_own(prompts.ARCHS[0])
    with pytest.raises(AssertionError, match="chi-square"):
        Suite().test_the_distribution_is_the_targets_own()


def test_wrong_sums_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    add_round = RequestStats.add_round

    def twice(stats: RequestStats, *told: Any) -> None:
        add_round(stats, *told)
        accepted = told[3]
        stats.accepted_by_source = dict(Counter(stats.accepted_by_source) + Counter(accepted))

    monkeypatch.setattr(RequestStats, "add_round", twice)
    with pytest.raises(AssertionError, match="the books say"):
        Suite().test_the_accounts_add_up()


def test_open_fences_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a drafter says enters the cache."""
    monkeypatch.setattr(DrafterState, "_passes_fences", lambda *_: True)
    with pytest.raises(EngineError):
        Suite().test_lies_change_nothing("out of the vocabulary")


def test_nothing_accepted_is_told() -> None:
    class Silent(Echo):
        def propose(self, request_id: int) -> Proposal:
            return replace(super().propose(request_id), parents=(), token_ids=(), scores=())

    suite = type("Suite", (DrafterConformance,), {"factory": Silent})()
    with pytest.raises(AssertionError, match="must_accept = False"):
        suite.test_the_accounts_add_up()
