"""Drives a drafter without an engine, as an engine would, and checks its proposals."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import TypeAlias

from langchain_card.core.drafter_state import MAX_NUMBER, MAX_SECONDS, is_valid
from langchain_card.core.messages import Proposal
from langchain_card.ports import Budget, Drafter
from langchain_card.testing.prompts import Text

Prefix: TypeAlias = tuple[int, ...]

Candidates: TypeAlias = dict[Prefix, list[tuple[int, float]]]
"""Candidates that follow a text, by the text: tokens and scores, in the order of the proposals."""


class ProposalLog:
    """The proposals of one drafter for one request.

    Args:
        name: of the drafter.
        request_id: the request.
        vocab_size: token ids are below it.
        output_ids: tokens of the answer that `begin` got.

    Attributes:
        answer: tokens of the answer that the drafter has been given.
        children: proposed tokens and their scores, by the tokens of answer and guesses that they follow.
        count: candidates.
        forwarded: candidates that the drafter's steps expanded.
    """

    def __init__(self, name: str, request_id: int, vocab_size: int, output_ids: Sequence[int] = ()) -> None:
        self.name, self.request_id, self.vocab_size = name, request_id, vocab_size
        self.answer = list(output_ids)
        self.children: dict[Prefix, dict[int, float]] = {}
        self.count = self.forwarded = 0
        self._epoch = -1
        self._nodes: list[Prefix | None] = []

    def below(self, prefix: Prefix) -> Candidates:
        """Return the candidates after a prefix, by what follows the prefix."""
        cut = len(prefix)
        return {text[cut:]: [*scores.items()] for text, scores in self.children.items() if text[:cut] == prefix}

    def receive(self, p: Proposal) -> None:
        """Check a proposal and add it.

        Raises:
            AssertionError: the engine would drop it, or misread it.
        """
        self._check_fields(p)
        assert p.epoch >= self._epoch, f"epoch = {p.epoch} after epoch {self._epoch}: it must not go back"
        if p.epoch > self._epoch:
            self._epoch, self._nodes = p.epoch, [None] * p.first
        known = len(self._nodes)
        assert p.first == known, (
            f"first = {p.first}: epoch {p.epoch} has {known} nodes, so the next number is {known}; or raise epoch"
        )
        self._check_root(p)
        for i, (parent, token, score) in enumerate(zip(p.parents, p.token_ids, p.scores, strict=True), p.first):
            assert 0 <= parent < i, f"the parent of node {i} is {parent}: it must be a node before it"
            above = self._nodes[parent]
            assert above is not None, f"the parent of node {i} is {parent}, which is in no proposal of this epoch"
            if score > -math.inf:  # else it never enters the cache
                self.children.setdefault(above, {}).setdefault(token, score)
            self._nodes.append((*above, token))
        unknown = [number for number in p.expanded if not 0 <= number < len(self._nodes)]
        assert not unknown, f"expanded has {unknown}: nodes are numbered from 0 to {len(self._nodes) - 1}"
        assert is_valid(p), f"the engine would drop {p}"
        self.count += len(p.token_ids)
        self.forwarded += p.forwarded

    def _check_root(self, p: Proposal) -> None:
        assert 0 <= p.root < p.first, f"root = {p.root}: it must be a node before first = {p.first}"
        assert 0 <= p.applied_len <= len(self.answer), (
            f"applied_len = {p.applied_len}: it must be from 0 to {len(self.answer)}, the length of the answer so far"
        )
        root, proposed = tuple(self.answer[: p.applied_len]), self._nodes[p.root]
        assert proposed is None or proposed == root, (
            f"root = {p.root} should stand for the answer {root}, but was proposed as {proposed}: raise epoch when a "
            "correction leaves the tree"
        )
        self._nodes[p.root] = root

    def _check_fields(self, p: Proposal) -> None:
        assert isinstance(p, Proposal), f"step returned {p!r}: it must return a list of Proposal"
        for field in ("parents", "token_ids", "scores", "expanded"):
            value = getattr(p, field)
            assert type(value) is tuple, f"{field} is a {type(value).__name__}: it must be a tuple"
        assert p.source == self.name, f"source = {p.source!r}: it must be the drafter's name, {self.name!r}"
        assert p.request_id == self.request_id, f"request_id = {p.request_id}: the step was for {self.request_id}"
        lengths = len(p.parents), len(p.token_ids), len(p.scores)
        assert len({*lengths}) == 1, f"parents, token_ids and scores have lengths {lengths}: they must be equal"
        integers = (p.epoch, p.root, p.first, p.applied_len, p.forwarded, p.together, p.layers)
        for number in (*integers, *p.parents, *p.token_ids, *p.expanded):
            assert type(number) is int, f"{number!r} is a {type(number).__name__}: all but scores and times must be int"
        assert p.first + len(p.token_ids) <= MAX_NUMBER, (
            f"the last node would be {p.first + len(p.token_ids) - 1:,}: numbers must be below {MAX_NUMBER:,}; "
            "raise epoch"
        )
        outside = [token for token in p.token_ids if not 0 <= token < self.vocab_size]
        assert not outside, (
            f"token_ids has {outside[:3]}: ids must be from 0 to {self.vocab_size - 1} (Setting.vocab_size)"
        )
        for score in p.scores:
            assert type(score) in (int, float) and score <= 0 and not math.isnan(score), (
                f"scores has {score!r}: a score is the logarithm of a chance, a float of at most 0"
            )
        assert 0 <= p.forwarded <= p.together, (
            f"forwarded = {p.forwarded}, together = {p.together}: forwarded must be from 0 to together"
        )
        for name in ("elapsed", "reading"):
            seconds = getattr(p, name)
            assert type(seconds) in (int, float), f"{name} is a {type(seconds).__name__}: it must be a float"
            assert 0 <= seconds <= MAX_SECONDS, f"{name} = {seconds} seconds: it must be from 0 to {MAX_SECONDS:g}"
        assert not (p.unread and p.token_ids), (
            f"unread = {p.unread}, token_ids = {p.token_ids}: nothing may be proposed before all of the text is read"
        )
        assert 1 <= p.layers <= MAX_NUMBER, f"layers = {p.layers}: it must be at least 1, even without nodes"


class RequestRun:
    """One request that a drafter works on, without an engine.

    Args:
        drafter: gets the request at once.
        text: the request and its whole answer.
        vocab_size: of the target.
        known: tokens of the answer that `begin` gets.

    Attributes:
        log: the drafter's proposals, checked.
        proposals: the same, as they came.
    """

    def __init__(self, drafter: Drafter, text: Text, vocab_size: int, known: int = 0) -> None:
        self.drafter, self.text = drafter, text
        self.request_id = text.request.request_id
        self.log = ProposalLog(drafter.name, self.request_id, vocab_size, text.answer[:known])
        self.proposals: list[Proposal] = []
        drafter.begin(text.request, text.answer[:known])
        drafter.correct(self.request_id, known, ())  # as an engine does

    @property
    def known(self) -> int:
        """Tokens of the answer committed so far."""
        return len(self.log.answer)

    @property
    def applied(self) -> int:
        """Tokens of the answer that the drafter is known to have applied."""
        return max((p.applied_len for p in self.proposals), default=0)

    def step(self, width: int = 4, max_read: int | None = None) -> Proposal:
        """Take one step for this request alone, which reads so many tokens of the text at most."""
        proposals = self.drafter.step([Budget(self.request_id, width, max_read=max_read)])
        assert isinstance(proposals, list), f"step returned {proposals!r}: it must return a list of Proposal"
        assert len(proposals) == 1, (
            f"step returned {len(proposals)} proposals for one request: it must return one, perhaps without nodes"
        )
        (proposal,) = proposals
        self.log.receive(proposal)
        assert not (self.drafter.paced and proposal.token_ids) or (proposal.forwarded and proposal.elapsed > 0), (
            f"forwarded = {proposal.forwarded}, elapsed = {proposal.elapsed}: both must be above 0 in a proposal of a "
            "paced drafter, because the engine weighs what a step costs"
        )
        assert max_read is None or proposal.read <= max_read, (
            f"read = {proposal.read}: it must be at most {max_read}, the `max_read` of the budget"
        )
        self.proposals.append(proposal)
        return proposal

    def correct(self, known: int, start: int | None = None) -> None:
        """Commit the answer up to `known` tokens, and send those from `start` on: by default the new ones."""
        start = self.known if start is None else start
        self.log.answer = list(self.text.answer[: max(known, self.known)])
        self.drafter.correct(self.request_id, start, self.text.answer[start:known])

    def run(self, until: int, rng: random.Random) -> None:
        """Take steps and send corrections of random sizes, up to `until` tokens of the answer."""
        while self.known < until:
            for _ in range(rng.randint(0, 3)):
                self.step(rng.choice((1, 2, 4)))
            self.correct(min(until, self.known + rng.randint(1, 4)))

    def all_candidates(self, steps: int = 6) -> Candidates:
        """Take steps until nothing is added; return the candidates after the answer so far, which must be applied."""
        for _ in range(steps):
            proposal = self.step()
            assert proposal.applied_len == self.known, (
                f"applied_len = {proposal.applied_len}: it must be {self.known}, because begin and correct gave all "
                f"{self.known} tokens of the answer, in order"
            )
            if not proposal.token_ids:
                break
        return self.log.below(tuple(self.log.answer))

    def end(self) -> None:
        """End the request."""
        self.drafter.end(self.request_id)


def seeded(seed: int | str) -> random.Random:
    """Return a source of random choices that are the same in every run."""
    return random.Random(seed)  # noqa: S311


def run_requests(drafter: Drafter, texts: Sequence[Text], vocab_size: int, seed: int = 0) -> list[Proposal]:
    """Run requests from beginning to end, one after the other; return all proposals."""
    rng, proposals = seeded(seed), list[list[Proposal]]()
    for text in texts:
        run = RequestRun(drafter, text, vocab_size)
        run.run(len(text.answer), rng)
        run.end()
        proposals.append(run.proposals)
    return [*itertools.chain(*proposals)]
