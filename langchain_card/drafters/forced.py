"""`ForcedDrafter`: text that the grammar forces is a candidate for free.

After `{`, a schema with one required field fixes the text up to the field's value. The target still chooses every token
(the same text can be spelt in other tokens), but it verifies the whole run in one pass. Where no more tokens are left
than the shortest known end takes, that end is forced, too (`runtime.guide`): the brackets that close a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Budget, Constraint, Setting

CHANCE = 0.95
"""Chance, per token, that the target spells forced text as the tokenizer does (docs/LOG.md, 2026-11-22)."""

ENDING_TOKENS = 64
"""Tokens left to an answer from which on its end is looked for, which takes half a millisecond of a CPU each time."""


class _Answer:
    """The answer so far, and its state in the grammar; None after a token that the grammar does not allow."""

    def __init__(self, constraint: Constraint, max_tokens: int) -> None:
        self.constraint: Constraint | None = constraint
        self.max_tokens = max_tokens
        self.length = 0
        self.epoch = -1

    def append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self.constraint is not None and not self.constraint.accept(token):
                self.constraint = None
            self.length += 1

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, as far as is known."""
        if self.constraint is None:
            return ()
        left = self.max_tokens - self.length
        if left <= ENDING_TOKENS and (ending := self.constraint.closing(left)) is not None and len(ending) >= left:
            return ending
        return tuple(self.constraint.forced())


class ForcedDrafter:
    """Drafts from the grammars of requests.

    Args:
        setting: the engine that it works in.
    """

    name = "forced"
    paced = False
    trusted = True
    of_grammars = True

    def __init__(self, setting: Setting) -> None:
        self._constrain = setting.constrain
        self._answers: dict[int, _Answer] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a request and follow its answer so far."""
        answer = self._answers[request.request_id] = _Answer(
            self._constrain(request.params.grammar), request.params.max_tokens
        )
        answer.append(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Follow the new tokens."""
        answer = self._answers.get(request_id)
        if answer is not None and answer.length >= start:  # else an earlier correction was lost: the next repeats it
            answer.append(token_ids[answer.length - start :])

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Propose, for each request, the text that must come next, as a chain."""
        known = [budget.request_id for budget in budgets if budget.request_id in self._answers]
        return [self._propose(request_id, self._answers[request_id]) for request_id in known]

    def end(self, request_id: int) -> None:
        """Forget the request."""
        self._answers.pop(request_id, None)

    def close(self) -> None:
        """Forget everything."""
        self._answers.clear()

    def _propose(self, request_id: int, answer: _Answer) -> Proposal:
        chain = answer.forced()
        answer.epoch += 1
        return Proposal(
            source=self.name,
            request_id=request_id,
            epoch=answer.epoch,
            root=0,
            applied_len=answer.length,
            first=1,
            parents=tuple(range(len(chain))),
            token_ids=chain,
            scores=(math.log(CHANCE),) * len(chain),
        )
