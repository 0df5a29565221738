"""A drafter whose candidates know nothing of grammars, and an observer that holds all that is verified against them."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from langchain_card.core import messages as m
from langchain_card.core.request import Request
from langchain_card.drafters.tree import DraftTree
from langchain_card.ports import Budget, Setting
from tests.support.constrained import EOS, encode, mask, matcher

TOKENS = [*encode('abc01 "{}[]:,'), EOS]


class RandomTree:
    """Grows a tree of random tokens, which lives on as long as the answer follows it: its numbers go on, too.

    What follows a text is always the same, and half of the nodes have a child that the tests' documents may have there.
    """

    name, paced = "trees", True

    def __init__(self, setting: Setting) -> None:
        self._trees: dict[int, DraftTree] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        self._trees[request.request_id] = DraftTree(request.prompt_ids, output_ids, 64)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self._trees:
            self._trees[request_id].apply(start, token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[m.Proposal]:
        return [self._propose(budget) for budget in budgets if budget.request_id in self._trees]

    def end(self, request_id: int) -> None:
        self._trees.pop(request_id, None)

    def close(self) -> None:
        self._trees.clear()

    def _propose(self, budget: Budget) -> m.Proposal:
        tree = self._trees[budget.request_id]
        chosen = tree.choose(budget.width)
        for node in chosen:
            path = [*tree.token_path(node)]
            rng = random.Random(repr((tree.output_ids, path)))
            tree.expand(node, rng.sample(TOKENS, 6), [math.log(0.3 / rank) for rank in range(1, 7)])
        return tree.publish(self.name, budget.request_id, forwarded=len(chosen), elapsed=1e-4)


class FreeTree(RandomTree):
    """The same at no cost: on the target's thread."""

    paced = False


class Watch:
    """An observer of an engine: what of each drafter is verified, and whether the grammar allows it there.

    Attributes:
        verified: candidates that the target verified, by drafter.
        forbidden: those that the grammar does not allow.
        dropped: candidates that came without a chance, by drafter.
        proposed: candidates, by drafter.
    """

    def __init__(self) -> None:
        self.verified, self.dropped, self.proposed = Counter[str](), Counter[str](), Counter[str]()
        self.forbidden: list[tuple[str, tuple[int, ...] | None, int]] = []
        self._grammars: dict[int, str] = {}
        self._answers = defaultdict[int, list[int]](list)

    def __call__(self, event: m.Event, effects: Sequence[m.Effect]) -> None:
        if isinstance(event, m.Proposed):
            self.proposed[event.proposal.source] += len(event.proposal.token_ids)
            self.dropped[event.proposal.source] += event.proposal.scores.count(-math.inf)
        for effect in effects:
            match effect:
                case m.Begin(m.TARGET, request):
                    self._grammars[request.request_id] = request.params.grammar
                    self._answers[request.request_id] = [*effect.output_ids]
                case m.Verify(windows):
                    for window in windows:
                        self._check(window)
                case m.Emit(request_id, token_ids):
                    self._answers[request_id] += token_ids

    def _check(self, window: m.Window) -> None:
        texts: list[tuple[int, ...] | None] = [tuple(self._answers[window.request_id])]
        for parent, token, source in zip(window.parents[1:], window.token_ids[1:], window.sources, strict=True):
            self.verified[source] += 1
            before = texts[parent]
            may = before is not None and bool(mask(matcher(self._grammars[window.request_id], before))[token])
            if not may:
                self.forbidden.append((source, before, token))
            texts.append((*before, token) if before is not None and may and token != EOS else None)
