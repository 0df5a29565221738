"""Prompt lookup: what followed the last time these tokens stood here?

The longest suffix of prompt and answer that occurred before is looked up, and what followed it is proposed as a chain.
The chance that a token holds is learnt per length of the match before it, which grows along the chain: once the first
token came true, the next is much likelier. (Prompt lookup decoding; Cacheback, arXiv 2511.21699, will
replace the table.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from langchain_card.core.costs import Mean
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Budget

MIN_MATCH = 2
MAX_MATCH = 8
MAX_CHAIN = 12

PRIOR = {2: 0.5, 3: 0.6, 4: 0.65, 5: 0.7, 6: 0.7, 7: 0.8, 8: 0.85}
"""Chance of the next token by length of the match, before anything was learnt (docs/LOG.md)."""


class _History:
    """Tokens of one request and where each pair of them last began to be followed."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self.num_prompt = len(prompt_ids)
        self.epoch = -1
        self.guess: tuple[int, int, tuple[int, ...]] | None = None  # place, length of the match, tokens
        self._after: dict[tuple[int, ...], list[int]] = {}
        self.extend(prompt_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if len(self.token_ids) >= MIN_MATCH:
                self._after.setdefault(tuple(self.token_ids[-MIN_MATCH:]), []).append(len(self.token_ids))
            self.token_ids.append(token)

    def longest_match(self) -> tuple[int, int]:
        """Where the tokens after the longest match begin, and its length; (0, 0) when there is none."""
        best, length = 0, 0
        for place in reversed(self._after.get(tuple(self.token_ids[-MIN_MATCH:]), ())[-32:]):
            n = MIN_MATCH
            while n < MAX_MATCH and n < place and self.token_ids[place - n - 1] == self.token_ids[-n - 1]:
                n += 1
            if n > length:
                best, length = place, n
            if n == MAX_MATCH:
                break
        return best, length


class NgramDrafter:
    """Drafts from the text so far; costs microseconds, so it is asked in every round."""

    name = "ngram"
    paced = False

    def __init__(self) -> None:
        self._requests: dict[int, _History] = {}
        self._chance = {n: Mean(prior=PRIOR[n], weight=10) for n in range(MIN_MATCH, MAX_MATCH + 1)}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Indexes the text so far."""
        history = self._requests[request.request_id] = _History(request.prompt_ids)
        history.extend(output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Appends what is new, and learns how good the last guess was."""
        history = self._requests.get(request_id)
        known = len(history.token_ids) - history.num_prompt if history is not None else 0
        if history is None or known < start:
            return  # unknown, or an earlier correction was lost: the next one repeats it
        history.extend(token_ids[known - start :])
        self._learn(history)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """A chain of up to `MAX_CHAIN` tokens for each request whose last tokens occurred before."""
        proposals = (self._propose(budget.request_id) for budget in budgets)
        return [proposal for proposal in proposals if proposal is not None]

    def end(self, request_id: int) -> None:
        """Forgets the request's text."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """Forgets everything."""
        self._requests.clear()

    def _propose(self, request_id: int) -> Proposal | None:
        history = self._requests.get(request_id)
        if history is None:
            return None
        place, length = history.longest_match()
        chain = tuple(history.token_ids[place : place + MAX_CHAIN]) if length else ()
        history.epoch += 1
        history.guess = (len(history.token_ids), length, chain)
        output_len = len(history.token_ids) - history.num_prompt
        return Proposal(
            source=self.name,
            request_id=request_id,
            epoch=history.epoch,
            root=0,
            applied_len=output_len,
            first=1,
            parents=tuple(range(len(chain))),
            token_ids=chain,
            scores=tuple(math.log(self._chance_after(length + i).value) for i in range(len(chain))),
        )

    def _learn(self, history: _History) -> None:
        if history.guess is None:
            return
        place, length, chain = history.guess
        history.guess = None
        for i, (guessed, actual) in enumerate(zip(chain, history.token_ids[place:])):  # noqa: B905
            self._chance_after(length + i).add(0.99 if guessed == actual else 0.01)
            if guessed != actual:
                break

    def _chance_after(self, length: int) -> Mean:
        return self._chance[min(length, MAX_MATCH)]
