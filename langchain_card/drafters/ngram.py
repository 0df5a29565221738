"""Prompt lookup: what followed the last time these tokens stood here?

The longest suffix of prompt and answer that occurred before is looked up, and what followed it is proposed as a chain.
The chance that it holds is learnt per length of the match. (Prompt lookup decoding; Cacheback, arXiv 2511.21699, will
replace the table.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from langchain_card.core.controller import Mean
from langchain_card.core.messages import Proposal
from langchain_card.ports import Budget

MIN_MATCH = 2
MAX_MATCH = 8
MAX_CHAIN = 12


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
        self._chance = {n: Mean(prior=min(0.95, 0.4 + 0.08 * n)) for n in range(MIN_MATCH, MAX_MATCH + 1)}

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        """Indexes the prompt."""
        self._requests[request_id] = _History(prompt_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Appends what is new, and learns how good the last guess was."""
        history = self._requests.get(request_id)
        if history is None:
            return
        known = len(history.token_ids) - history.num_prompt
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
        score = math.log(self._chance[length].value) if length else 0.0
        return Proposal(
            source=self.name,
            request_id=request_id,
            epoch=history.epoch,
            root=0,
            applied_len=output_len,
            first=1,
            parents=tuple(range(len(chain))),
            token_ids=chain,
            scores=(score,) * len(chain),
        )

    def _learn(self, history: _History) -> None:
        if history.guess is None:
            return
        place, length, chain = history.guess
        history.guess = None
        for guessed, actual in zip(chain, history.token_ids[place:]):  # noqa: B905
            self._chance[length].add(0.99 if guessed == actual else 0.01)
            if guessed != actual:
                break
