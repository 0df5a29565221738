"""A drafter that is called by hand, as an engine calls it, and what it says, checked against what it may say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from langchain_card.core.drafter_state import MAX_NUMBER, MAX_SECONDS, is_valid
from langchain_card.core.messages import Proposal
from langchain_card.ports import Budget, Drafter
from langchain_card.testing.prompts import Text

Prefix = tuple[int, ...]


class Heard:
    """What one drafter has said for one request.

    Args:
        name: of the drafter.
        request_id: of the request.
        vocab_size: token ids are below it.
        output_ids: tokens of the answer that it was begun with.

    Attributes:
        answer: tokens of the answer that the drafter was told.
        children: by tokens of the answer, told or guessed: what it proposed to follow them, in order, with scores.
        count: candidates.
        forwarded: candidates that its steps expanded.
    """

    def __init__(self, name: str, request_id: int, vocab_size: int, output_ids: Sequence[int] = ()) -> None:
        self.name, self.request_id, self.vocab_size = name, request_id, vocab_size
        self.answer = list(output_ids)
        self.children: dict[Prefix, dict[int, float]] = {}
        self.count = self.forwarded = 0
        self._epoch = -1
        self._nodes: list[Prefix | None] = []

    def below(self, prefix: Prefix) -> dict[Prefix, list[tuple[int, float]]]:
        """The same from a prefix on: by what follows it."""
        cut = len(prefix)
        return {text[cut:]: [*said.items()] for text, said in self.children.items() if text[:cut] == prefix}

    def hear(self, p: Proposal) -> None:
        """Takes a proposal in.

        Raises:
            AssertionError: the engine would refuse it, or take it for something else than was meant.
        """
        self._check_fields(p)
        assert p.epoch >= self._epoch, f"epoch {p.epoch} after {self._epoch}: it must not go back"
        if p.epoch > self._epoch:
            self._epoch, self._nodes = p.epoch, [None] * p.first
        known = len(self._nodes)
        assert p.first == known, (
            f"first = {p.first}: {known} nodes of epoch {p.epoch} have numbers, so that {known} is next; or raise epoch"
        )
        self._check_root(p)
        for i, (parent, token, score) in enumerate(zip(p.parents, p.token_ids, p.scores, strict=True), p.first):
            assert 0 <= parent < i, f"the parent of node {i} is {parent}: it must be a node before it"
            above = self._nodes[parent]
            assert above is not None, f"the parent of node {i} is {parent}, which no proposal of this epoch had"
            self.children.setdefault(above, {}).setdefault(token, score)
            self._nodes.append((*above, token))
        wrong = [number for number in p.expanded if not 0 <= number < len(self._nodes)]
        assert not wrong, f"expanded has {wrong}, which are no nodes"
        assert is_valid(p), f"the engine would refuse {p}"
        self.count += len(p.token_ids)
        self.forwarded += p.forwarded

    def _check_root(self, p: Proposal) -> None:
        assert 0 <= p.root < p.first, f"root = {p.root}: it must be a node before first = {p.first}"
        assert 0 <= p.applied_len <= len(self.answer), (
            f"applied_len = {p.applied_len}: it was told {len(self.answer)} tokens of the answer"
        )
        root, meant = tuple(self.answer[: p.applied_len]), self._nodes[p.root]
        assert meant is None or meant == root, (
            f"root = {p.root} stands for the answer {root}, but it was proposed as {meant}: raise epoch when a "
            "correction leaves the tree"
        )
        self._nodes[p.root] = root

    def _check_fields(self, p: Proposal) -> None:
        assert isinstance(p, Proposal), f"step returned {p!r}: it must return a list of Proposal"
        for field in ("parents", "token_ids", "scores", "expanded"):
            many = getattr(p, field)
            assert type(many) is tuple, f"{field} is a {type(many).__name__}: it must be a tuple, which nobody changes"
        assert p.source == self.name, f"source = {p.source!r}: it must be the drafter's name, {self.name!r}"
        assert p.request_id == self.request_id, f"request_id = {p.request_id}: asked for was {self.request_id}"
        assert len(p.parents) == len(p.token_ids) == len(p.scores), "parents, token_ids, scores must be of one length"
        whole = (p.epoch, p.root, p.first, p.applied_len, p.forwarded, p.together, p.layers)
        for number in (*whole, *p.parents, *p.token_ids, *p.expanded):
            assert type(number) is int, f"{number!r} is a {type(number).__name__}: all but scores and times must be int"
        assert p.first + len(p.token_ids) <= MAX_NUMBER, f"an epoch may number {MAX_NUMBER:,} nodes: raise epoch"
        outside = [token for token in p.token_ids if not 0 <= token < self.vocab_size]
        assert not outside, f"token_ids has {outside[:3]}: ids are from 0 to {self.vocab_size - 1} (Setting.vocab_size)"
        for score in p.scores:
            assert type(score) in (int, float) and score <= 0 and not math.isnan(score), (
                f"scores has {score!r}: each is the logarithm of a chance, a float of at most 0"
            )
        assert 0 <= p.forwarded <= p.together, f"forwarded = {p.forwarded}, together = {p.together}: 0 <= one <= other"
        for seconds in (p.elapsed, p.reading):
            assert type(seconds) in (int, float), f"elapsed or reading is a {type(seconds).__name__}, not a float"
            assert 0 <= seconds <= MAX_SECONDS, f"elapsed or reading = {seconds} seconds"
        assert 1 <= p.layers <= MAX_NUMBER, f"layers = {p.layers}: a step that brings nothing looked at one, too"


class Life:
    """One request of a drafter that is called by hand.

    Args:
        drafter: it is begun here.
        text: the request and the whole answer.
        vocab_size: of the target.
        known: tokens of the answer that it is begun with.

    Attributes:
        heard: what it said.
        proposals: all of them.
    """

    def __init__(self, drafter: Drafter, text: Text, vocab_size: int, known: int = 0) -> None:
        self.drafter, self.text = drafter, text
        self.request_id = text.request.request_id
        self.heard = Heard(drafter.name, self.request_id, vocab_size, text.answer[:known])
        self.proposals: list[Proposal] = []
        drafter.begin(text.request, text.answer[:known])
        drafter.correct(self.request_id, known, ())  # as an engine does

    @property
    def known(self) -> int:
        """Tokens of the answer that the drafter was told."""
        return len(self.heard.answer)

    @property
    def applied(self) -> int:
        """Of those, what an engine knows to have arrived."""
        return max((p.applied_len for p in self.proposals), default=0)

    def step(self, width: int = 4) -> Proposal:
        """One step for this request alone."""
        found = self.drafter.step([Budget(self.request_id, width)])
        assert isinstance(found, list), f"step returned {found!r}: it must return a list of Proposal"
        assert len(found) == 1, (
            f"step returned {len(found)} proposals for one request: one each, with no nodes if need be"
        )
        self.heard.hear(found[0])
        assert not (self.drafter.paced and found[0].token_ids) or (found[0].forwarded and found[0].elapsed > 0), (
            "its steps cost device time (paced), but forwarded or elapsed is 0: the engine weighs what a step costs"
        )
        self.proposals.append(found[0])
        return found[0]

    def tell(self, known: int, start: int | None = None) -> None:
        """The answer is `known` tokens long now; those from `start` on are said, by default from the first new one."""
        start = self.known if start is None else start
        self.heard.answer = list(self.text.answer[: max(known, self.known)])
        self.drafter.correct(self.request_id, start, self.text.answer[start:known])

    def go(self, until: int, rng: random.Random) -> None:
        """Steps and corrections of several sizes, up to `until` tokens of the answer."""
        while self.known < until:
            for _ in range(rng.randint(0, 3)):
                self.step(rng.choice((1, 2, 4)))
            self.tell(min(until, self.known + rng.randint(1, 4)))

    def say_all(self, steps: int = 6) -> dict[Prefix, list[tuple[int, float]]]:
        """What it has to say now, in so many steps: by the text guessed, what follows. It must know the answer."""
        for _ in range(steps):
            proposal = self.step()
            assert proposal.applied_len == self.known, (
                f"applied_len = {proposal.applied_len}: it was told {self.known} tokens of the answer, all in order"
            )
            if not proposal.token_ids:
                break
        return self.heard.below(tuple(self.heard.answer))

    def end(self) -> None:
        """The request ends."""
        self.drafter.end(self.request_id)


def drawing(seed: int | str) -> random.Random:
    """Choices that are the same in every run."""
    return random.Random(seed)  # noqa: S311


def live(drafter: Drafter, texts: Sequence[Text], vocab_size: int, seed: int = 0) -> list[Proposal]:
    """Whole lives of requests, one after the other; all that it said."""
    rng, said = drawing(seed), list[list[Proposal]]()
    for text in texts:
        life = Life(drafter, text, vocab_size)
        life.go(len(text.answer), rng)
        life.end()
        said.append(life.proposals)
    return [*itertools.chain(*said)]
