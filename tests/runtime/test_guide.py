"""`Guide` over a scripted grammar: masks along the tree, the walk's tokens, budgets, and grammars that fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from typing_extensions import Self

from langchain_card.runtime.guide import Guide

OPEN, CLOSE, WORD, EOS = 0, 1, 2, 3
WIDTH = 6  # the two last are of a head that is padded


@dataclass
class Brackets:
    """Balanced brackets with words in them; behind `fails_behind` tokens an end is known and nothing may come."""

    fails_behind: int = 1000
    said: tuple[int, ...] = ()
    ended: bool = False

    @property
    def depth(self) -> int:
        return self.said.count(OPEN) - self.said.count(CLOSE)

    @property
    def failed(self) -> bool:
        return len(self.said) >= self.fails_behind

    def fork(self) -> Self:
        return type(self)(self.fails_behind, self.said, self.ended)

    def accept(self, token_id: int) -> bool:
        if not self.may(token_id):
            return False
        self.said, self.ended = (*self.said, token_id), token_id == EOS
        return True

    def may(self, token_id: int) -> bool:
        begun = OPEN in self.said
        if self.failed or self.ended:
            return False
        if self.depth == 0:
            return token_id == (EOS if begun else OPEN)
        return token_id in (OPEN, CLOSE, WORD)

    def allowed(self) -> bytes:
        return bytes([sum(self.may(token) << token for token in range(8))])

    def forced(self) -> list[int]:
        return []

    def closing(self, most: int) -> tuple[int, ...] | None:
        return (CLOSE,) * self.depth if self.said else (OPEN, CLOSE)


def guide(max_tokens: int | None = 100, fails_behind: int = 1000) -> Guide:
    return Guide(Brackets(fails_behind), [EOS], max_tokens)


def allowed(guide: Guide, *ways: tuple[int, ...]) -> list[list[int]]:
    return [torch.nonzero(~row).flatten().tolist() for row in guide.forbidden(ways, WIDTH)]


def plain(guide: Guide, choose: Sequence[int], max_tokens: int) -> tuple[list[int], bool]:
    """One token at a time: what the model chooses where it may, else the first that it may; the end of the loop."""
    answer: list[int] = []
    closed = False
    while len(answer) < max_tokens and EOS not in answer:
        may, wish = allowed(guide, ())[0], choose[len(answer)]
        (token,), replaced = guide.settle([wish if wish in may else may[0]], [()])
        guide.commit([token])
        answer.append(token)
        closed |= replaced
    return answer, closed


def balanced(answer: Sequence[int]) -> bool:
    state, said = Brackets(), [token for token in answer if token != EOS]
    return all(map(state.accept, said)) and state.depth == 0 and EOS not in answer[:-1]


def test_every_row_has_a_mask_of_its_own() -> None:
    ways = [(), (OPEN,), (OPEN, CLOSE), (OPEN, OPEN), (OPEN, OPEN, CLOSE), (OPEN, CLOSE, EOS), (WORD,), (WORD, OPEN)]
    inside, any_ = [OPEN, CLOSE, WORD], [*range(WIDTH)]
    got = allowed(guide(), *ways)
    assert got == [[OPEN], inside, [EOS], inside, inside, any_, any_, any_], "the walk never comes to the last three"
    assert allowed(guide(), *ways[::-1]) == got[::-1], "in any order"


def test_candidates_that_were_refused_say_nothing() -> None:
    """Masks of dead branches are made, and the grammar goes on as if they had not been."""
    asked, fresh = guide(), guide()
    asked.forbidden([(OPEN,), (OPEN, OPEN), (OPEN, CLOSE)], WIDTH)
    asked.settle([OPEN, CLOSE, WORD, EOS], [(), (OPEN,), (OPEN, OPEN), (OPEN, CLOSE)])
    for token in (OPEN, WORD, CLOSE, EOS):
        assert allowed(asked, ()) == allowed(fresh, ())
        asked.commit([token])
        fresh.commit([token])


def test_the_walk_is_settled_and_nothing_beside_it() -> None:
    """Three tokens: the third bracket leaves no room, and what hangs below it is not looked at."""
    ways = [(), (OPEN,), (OPEN, OPEN), (OPEN, CLOSE), (OPEN, WORD)]
    settled, replaced = guide(3).settle([OPEN, OPEN, OPEN, EOS, OPEN], ways)
    assert settled == (OPEN, CLOSE, OPEN, EOS, OPEN) and replaced
    settled, replaced = guide(4).settle([OPEN, OPEN, CLOSE, EOS, OPEN], ways)
    assert settled == (OPEN, OPEN, CLOSE, EOS, OPEN) and not replaced


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5, 9])
def test_any_choice_ends_within_the_budget(max_tokens: int) -> None:
    """Every wish of a model, and the same answer from windows of any shape."""
    for seed in range(200):
        rng = random.Random(seed)
        wishes = rng.choices([OPEN, CLOSE, WORD, EOS, 5], [4, 2, 2, 1, 1], k=max_tokens)
        fails_behind = rng.choice([1000, rng.randrange(max_tokens)])
        wanted, closed = plain(guide(max_tokens, fails_behind), wishes, max_tokens)
        assert balanced(wanted), (wishes, wanted)
        assert len(wanted) <= max_tokens and (wanted[-1] == EOS or len(wanted) == max_tokens)
        assert in_windows(rng, wishes, max_tokens, fails_behind) == (wanted, closed)


def in_windows(rng: random.Random, wishes: Sequence[int], max_tokens: int, fails_behind: int) -> tuple[list[int], bool]:
    """The same by random trees of candidates; now and then what was said is replayed to a new guide."""
    own, answer, closed = guide(max_tokens, fails_behind), list[int](), False
    ways: list[tuple[int, ...]]
    while len(answer) < max_tokens and EOS not in answer:
        if rng.random() < 0.2:
            own = guide(max_tokens, fails_behind)
            own.commit(answer)
        ways = [()]
        for way in ways:  # grows meanwhile
            if len(way) < min(3, max_tokens - len(answer) - 1):
                ways += [(*way, token) for token in range(4) if rng.random() < 0.6]
        may = allowed(own, *ways)
        chosen = [
            wish if (wish := wishes[len(answer) + len(way)]) in row else row[0]
            for row, way in zip(may, ways, strict=True)
        ]
        settled, replaced = own.settle(chosen, ways)
        tokens, by_way = list[int](), dict(zip(ways, settled, strict=True))
        while (token := by_way.get(tuple(tokens))) is not None and EOS not in tokens:
            tokens.append(token)
        own.commit(tokens)
        answer += tokens
        closed |= replaced
    return answer, closed


@pytest.mark.parametrize("chosen", [EOS, OPEN, 5])
def test_a_grammar_that_fails_midway_ends_as_was_known(chosen: int) -> None:
    """Whatever the model wants where all is allowed, be it the end of text."""
    own = guide(fails_behind=2)
    own.commit([OPEN])
    own.commit([OPEN])
    assert allowed(own, ()) == [[*range(WIDTH)]]
    answer = []
    for _ in range(3):
        (token,), replaced = own.settle([chosen], [()])
        own.commit([token])
        answer.append(token)
        assert replaced
    assert answer == [CLOSE, CLOSE, EOS]


def test_masks_alone_have_no_budget() -> None:
    own = guide(None)
    own.commit([OPEN] * 50)
    assert allowed(own, (), (CLOSE,), (WORD, EOS)) == [[OPEN, CLOSE, WORD]] * 2 + [[*range(WIDTH)]]
    own.commit([EOS])
    assert allowed(own, (), (OPEN,)) == [[*range(WIDTH)]] * 2, "it was left"
