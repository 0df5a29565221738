"""`GrammarFilter` over a real grammar: numbers hold, trees live on, and what cannot be followed is left alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest

from langchain_card.constraints.draft_grammars import DraftGrammars
from langchain_card.core.candidates import DEAD, CandidateTree
from langchain_card.core.drafter_state import DrafterState
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.grammar_filter import GrammarFilter
from langchain_card.drafters.lower_level import GuessRequest, LowerLevel
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.testing import prompts
from tests.support.grammars import eos, grammars

GRAMMAR = '%llguidance {}\nstart: /(ab|ac)+/ "d"\n'
A, B, C, D = (ord(letter) - 33 for letter in "abcd")
EOS = eos("bytes")


def opened(output_ids: Sequence[int] = (), constrain: Any = None) -> GrammarFilter:
    made = GrammarFilter(constrain or DraftGrammars(grammars().start).start)
    made.begin(Request(0, (1,), SamplingParams(grammar=GRAMMAR), (EOS,)), output_ids)
    return made


def proposal(tokens: Sequence[int], parents: Sequence[int] | None = None, **fields: Any) -> Proposal:
    """A chain, unless there are parents."""
    given = {"epoch": 0, "root": 0, "applied_len": 0, "first": 1, **fields}
    parents = range(given["first"] - 1, given["first"] - 1 + len(tokens)) if parents is None else parents
    return Proposal("x", 0, parents=tuple(parents), token_ids=tuple(tokens), scores=(-0.1,) * len(tokens), **given)


def kept(filtered: Proposal) -> list[bool]:
    return [score > -math.inf for score in filtered.scores]


def test_forbidden_nodes_and_what_follows_them_have_no_chance() -> None:
    filtered = opened().filtered(proposal([A, B, D, EOS, D, B, A], [0, 1, 2, 3, 1, 5, 4]))
    assert kept(filtered) == [True, True, True, True, False, False, False], "also after an end of text"
    assert filtered.scores[:4] == (-0.1,) * 4 and filtered.token_ids == (A, B, D, EOS, D, B, A)


def test_the_cache_has_the_others_under_their_own_numbers() -> None:
    """The core's side: a node without a chance is dead, and later nodes find their parents."""
    grammar, tree, drafter = opened(), CandidateTree(1), DrafterState()
    first = grammar.filtered(proposal([A, D, B, D], [0, 1, 1, 3]))
    none = grammar.filtered(proposal([B, B], [4, 2], first=5))
    later = grammar.filtered(proposal([A, B, B], [3, 3, 5], first=7))
    for each in (first, none, later):
        assert drafter.admit(each, tree, 320)
        drafter.enter(each, tree, 64)
    assert kept(first) == [True, False, True, True] and kept(later) == [True, False, False] and not none.token_ids
    alive = [(number, tree.tokens[node]) for number, node in enumerate(drafter.nodes) if node != DEAD]
    assert alive == [(0, 1), (1, A), (3, B), (4, D), (7, A)]


def test_a_tree_lives_on_after_a_correction() -> None:
    grammar = opened()
    assert kept(grammar.filtered(proposal([A, B, C]))) == [True, True, False]
    grammar.correct(0, 0, (A, B))
    assert kept(grammar.filtered(proposal([A, B, D], [2, 4, 2], root=2, applied_len=2, first=4))) == [True, True, True]
    grammar.correct(0, 5, (A,))  # an earlier correction was lost
    grammar.correct(0, 1, (B, A))  # which this one repeats
    assert kept(grammar.filtered(proposal([C, A], [4, 4], root=4, applied_len=3, first=7))) == [True, False]
    assert kept(grammar.filtered(proposal([C, A], [0, 1], root=0, applied_len=3, epoch=1))) == [True, True]


BROKEN: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "another length": ({"applied_len": 1}, []),
    "repeated numbers": ({"first": 2}, []),
    "an old epoch": ({"epoch": -1}, []),
    "below a lost node": ({"first": 9, "parents": [0, 8]}, [True, False]),
    "not below the root": ({"first": 5, "parents": [0, 5], "root": 2}, []),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_placed_has_no_chance(how: str) -> None:
    """The core refuses most of it, too; what it might take would be under another text."""
    grammar, (broken, wanted) = opened(), BROKEN[how]
    grammar.filtered(proposal([A, B, D]))
    assert kept(grammar.filtered(proposal([A, B], **{"parents": [0, 1], **broken}))) == wanted


def test_a_proposal_of_which_nothing_is_left_is_empty() -> None:
    """Else a drafter that is wrong would be granted step after step."""
    filtered = opened().filtered(proposal([B, D], forwarded=2, together=2, elapsed=0.5, expanded=(0, 1)))
    assert (filtered.token_ids, filtered.parents, filtered.scores, filtered.expanded) == ((), (), (), (0,))
    assert (filtered.forwarded, filtered.elapsed) == (2, 0.5), "it cost what it did"


def test_requests_without_a_grammar_are_left_alone() -> None:
    grammar = opened()
    grammar.begin(Request(1, (1,), SamplingParams()), ())
    other = Proposal("x", 1, 0, 0, 0, 1, (0,), (B,), (-0.1,))
    assert grammar.filtered(other) is other
    grammar.end(0)
    assert grammar.filtered(proposal([B])).scores == (-0.1,)


def test_an_answer_that_leaves_the_grammar_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    grammar = opened([A, B, D, EOS])
    assert not caplog.records
    grammar.begin(Request(0, (1,), SamplingParams(grammar=GRAMMAR), (EOS,)), [A, D])
    assert kept(grammar.filtered(proposal([D, D], applied_len=2))) == [True, True]
    assert ["left its grammar" in record.getMessage() for record in caplog.records] == [True]


def test_one_that_cannot_be_opened_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(grammar: str) -> Any:
        raise ValueError("planted")

    with caplog.at_level(logging.WARNING):
        grammar = opened(constrain=DraftGrammars(broken).start)
        grammar.begin(Request(0, (1,), SamplingParams(grammar=GRAMMAR), (EOS,)), ())
    assert kept(grammar.filtered(proposal([D, D]))) == [True, True]
    assert ["ValueError: planted" in record.getMessage() for record in caplog.records] == [True], "once"


def test_guesses_of_a_lower_level_obey() -> None:
    """After tokens that are assumed, too, and every time they are wanted."""
    guesses = dict[bool, list[list[int]]]()
    for masked in (True, False):
        lower = LowerLevel(
            NgramDrafter(prompts.setting()), 8, 320, DraftGrammars(grammars().start).start if masked else None
        )
        lower.begin(Request(0, prompts.encode("abac!" * 4), SamplingParams(grammar=GRAMMAR), (EOS,)), (A, B))
        wanted = [GuessRequest(0, 2, ahead, 4) for ahead in ((), (), (A,))]
        rows = [lower.guess([each])[0].rows(0, 1, lambda _: True) for each in wanted]
        guesses[masked] = [[token for _, token in each] for each in rows]
    assert guesses[True] == [[A, C], [A, C], [C]]
    assert guesses[False] == [[A, C, 0, A], [A, C, 0, A], [C, 0, A, B]], "where ! is 0"
