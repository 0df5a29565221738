"""Drafters in levels: each one queries the one below it, and corrects it with its next question.

A drafter with another one below does not expand one node a step. It asks what follows the node that it would expand,
and forwards that node and the candidates in one pass. Those that are among its own children become expanded nodes of
its tree, one below the other; the others are dropped. The lower drafter hears what was taken with the next question,
as `Budget.ahead`, and what was committed as ever. So nothing is rolled back, and any `Drafter` may be below.

(Hierarchical speculative decoding, arXiv 2510.19705, with trees in the place of blocks.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from langchain_card.core.candidates import CandidateTree
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.core.sources import SourceState
from langchain_card.drafters.tree import HELD_BACK, MAX_NODES, DraftTree
from langchain_card.ports import Budget, Drafter

MAX_HEARD = 512
"""Candidates of a lower drafter that one question takes in."""

MAX_SAID = 64
"""Candidates that an answer to one holds."""

Guess: TypeAlias = tuple[int, int]
"""The row of its parent in a `Block`, and a token."""


Says: TypeAlias = Callable[[int], bool]
"""Whether a level has a token of the target's in its own vocabulary."""

Read: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Tokens of the target's as a level reads them."""


class Question(NamedTuple):
    """What follows?

    Attributes:
        request_id: whose answer.
        applied_len: its length.
        ahead: tokens assumed to follow it.
        room: candidates at most.
    """

    request_id: int
    applied_len: int
    ahead: tuple[int, ...]
    room: int


@dataclass(slots=True)
class Heard:
    """What a lower drafter says to one question, checked as the core checks what drafters say.

    Attributes:
        question: the question.
        elapsed, reading: seconds that it took, as the drafter says.
    """

    question: Question
    elapsed: float = 0.0
    reading: float = 0.0
    _tree: CandidateTree = field(default_factory=lambda: CandidateTree(0))  # its root: the last token ahead
    _source: SourceState = field(default_factory=SourceState)

    def hear(self, proposals: Sequence[Proposal], vocab_size: int) -> bool:
        """Takes in what is for this question; whether to ask on: it brought something, and there is room for more."""
        before = len(self._tree)
        for proposal in proposals:
            if (proposal.request_id, proposal.applied_len) != self.question[:2]:
                continue
            proposal = replace(proposal, applied_len=0)
            if self._source.admit(proposal, self._tree, vocab_size):
                self._source.enter(proposal, self._tree, MAX_HEARD)
                self.elapsed += proposal.elapsed
                self.reading += proposal.reading
        return before < len(self._tree) and len(self._tree.best_chain(self.question.room)[0]) < self.question.room

    def guesses(self, last: int, first: int, says: Says) -> list[Guess]:
        """The likeliest candidates, parents first, to follow row `last`, in rows from `first` on.

        Those that the drafter above cannot say are left out, with what follows them.
        """
        rows, found = {self._tree.root: last}, list[Guess]()
        for node in self._tree.best_subtree(self.question.room)[0]:
            parent, token = self._tree.parents[node], self._tree.tokens[node]
            if parent in rows and says(token):
                rows[node] = first + len(found)
                found.append((rows[parent], token))
        return found


class Below:
    """The level below a drafter.

    Args:
        drafter: any.
        block: candidates that it is asked for at a time; it takes as many steps at most.
        vocab_size: token ids at and above it are refused.
    """

    def __init__(self, drafter: Drafter, block: int, vocab_size: int = 2**31) -> None:
        self.drafter, self.block, self._vocab_size = drafter, block, vocab_size
        self._of_grammars = getattr(drafter, "of_grammars", False)

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """As to the drafter above."""
        if request.params.grammar or not self._of_grammars:
            self.drafter.begin(request, output_ids)

    def ask(self, questions: Sequence[Question]) -> list[Heard]:
        """What the drafter says to each of them; it takes its steps for all requests together."""
        heard = [Heard(question) for question in questions]
        open_ones = [one for one in heard if one.question.room > 0]
        for _ in range(self.block):
            if not open_ones:
                break
            asked = [one.question for one in open_ones]
            proposals = self.drafter.step([Budget(q.request_id, ahead=q.ahead, whole=True) for q in asked])
            open_ones = [one for one in open_ones if one.hear(proposals, self._vocab_size)]
        return heard


@dataclass(slots=True)
class Block:
    """What one step forwards for one request: open nodes of its tree, and guesses below the first of them.

    Rows are the nodes, then the guesses.

    Attributes:
        tree: of the request.
        budget: of the step.
        heads: nodes to be expanded; the root alone while it is open; none where nothing can be.
        guesses: what may follow the first of them; a parent comes before its children.
        num_assumed: guesses that the budget says are `ahead`: they hold, whatever the model says.
        text: committed tokens, as the model reads them, that have no KV yet; they come first when the root is open.
        text_slots: of them, where they are read as rows.
        expanded: nodes that became expanded.
        layers: of them that hang below each other, at most.
        lost: whether the level cannot say what is assumed: it has nothing to tell.
    """

    tree: DraftTree
    budget: Budget
    heads: list[int] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    num_assumed: int = 0
    text: Sequence[int] = ()
    text_slots: list[int] = field(default_factory=list)
    expanded: int = 0
    layers: int = 1
    lost: bool = False
    _slots: list[int] = field(default_factory=list)

    @classmethod
    def plan(cls, tree: DraftTree, budget: Budget, text: Sequence[int], says: Says) -> Block:
        """What a step expands: where it is assumed that the answer goes on, or else the likeliest open nodes."""
        if not all(map(says, budget.ahead)):
            return cls(tree, budget, lost=True)
        node, assumed = tree.follow(budget.ahead)
        if node not in tree.children:
            heads = [node]
        elif node != tree.root:
            heads = [each for each in likeliest(tree, node) if each not in tree.children][: budget.width]
        else:
            heads = tree.choose(budget.width, budget.min_chance)
        block = cls(tree, budget, heads, [*enumerate(assumed)], len(assumed), text)
        fits = block.room >= 0 or (heads == [tree.root] and not assumed)
        return block if fits else cls(tree, budget)

    @property
    def room(self) -> int:
        """Guesses that may be added."""
        own = len(self.text) if self.heads == [self.tree.root] else len(self.heads)
        return len(self.tree.free_slots) - own - len(self.guesses)

    @property
    def ways(self) -> list[tuple[int, ...]]:
        """[rows] tokens from below the root down to each."""
        ways = [tuple(self.tree.tokens[node] for node in self.tree.path(head)) for head in self.heads]
        for parent, token in self.guesses:
            ways.append((*ways[parent], token))
        return ways

    def question(self, block: int) -> Question:
        """What follows the first node, and the guesses that hold?"""
        ahead, room = (self.ways[self.num_assumed], min(block, self.room)) if self.heads else ((), 0)
        return Question(self.budget.request_id, len(self.tree.output_ids), ahead, room)

    def guess(self, heard: Heard, says: Says) -> None:
        """Adds what the level below says, so far as this one can say it."""
        self.guesses += heard.guesses(self.num_assumed, len(self.heads) + len(self.guesses), says)

    def place(self, read: Read) -> tuple[Sequence[int], list[tuple[int, ...]] | None]:
        """Gives every row a slot.

        Args:
            read: tokens as the level's model reads them.

        Returns:
            Such tokens, and for each the slots on its path; None for the text alone, which goes to its positions.
        """
        tree, offset = self.tree, 0
        tokens = [*read([tree.tokens[head] for head in self.heads])]
        if self.heads != [tree.root]:
            paths = [tree.place(head) for head in self.heads]
        elif not self.guesses:
            return self.text, None
        else:
            tokens, offset = [*self.text], len(self.text) - 1
            self.text_slots = [tree.free_slots.pop() for _ in self.text]
            paths = [tuple(self.text_slots[: i + 1]) for i in range(len(self.text))]
        for parent, token in self.guesses:
            self._slots.append(tree.free_slots.pop())
            tokens += read([token])
            paths.append((*paths[offset + parent], self._slots[-1]))
        return tokens, paths

    def settle(self, found: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Expands the nodes, and those guesses that are children of expanded nodes.

        Args:
            found: [rows] the children of each: tokens, likeliest first, and log chances.
        """
        tree, nodes = self.tree, list[int | None](self.heads)
        tree.free_slots += self.text_slots
        for head, children in zip(self.heads, found):  # noqa: B905
            tree.expand(head, *children)
        for i, ((parent, token), children) in enumerate(zip(self.guesses, found[len(self.heads) :], strict=True)):
            above, node = nodes[parent], None
            if above is not None:
                node = tree.adopt(above, token) if i < self.num_assumed else tree.known(above, token)
            nodes.append(node)
            if node is None:
                tree.free_slots.append(self._slots[i])
            else:
                tree.slots[node] = self._slots[i]
                tree.expand(node, *children)
        self.expanded = sum(node is not None for node in nodes)
        depths = [1] * len(self.heads)
        for (parent, _), node in zip(self.guesses, nodes[len(self.heads) :], strict=True):
            depths.append(depths[parent] + 1 if node is not None else 0)
        self.layers = max(depths, default=1)

    def publish(self, source: str, together: int, elapsed: float, reading: float = 0.0) -> Proposal:
        """What the step brought; `elapsed` is that of all requests, which expanded `together` nodes."""
        tree, share = self.tree, elapsed * self.expanded / max(1, together)
        if not self.budget.whole:
            return tree.publish(
                source,
                self.budget.request_id,
                forwarded=self.expanded,
                together=together,
                layers=self.layers,
                elapsed=share,
                reading=reading,
            )
        node, unknown = tree.follow(() if self.lost else self.budget.ahead)
        nodes = [] if self.lost or unknown else [each for each, _ in zip(likeliest(tree, node), range(MAX_SAID))]  # noqa: B905
        number = {node: 0} | {each: i for i, each in enumerate(nodes, 1)}
        return Proposal(
            source=source,
            request_id=self.budget.request_id,
            epoch=2 * MAX_NODES * tree.epoch + len(tree.tokens),  # grows with the tree
            root=0,
            applied_len=len(tree.output_ids),
            first=1,
            parents=tuple(number[tree.parents[each]] for each in nodes),
            token_ids=tuple(tree.tokens[each] for each in nodes),
            scores=tuple(tree.scores[each] for each in nodes),
            forwarded=self.expanded,
            together=together,
            layers=self.layers,
            elapsed=share,
            reading=reading,
        )


def likeliest(tree: DraftTree, node: int) -> Iterator[int]:
    """Nodes below one, likeliest first."""
    heap = [(0.0, node)]
    while heap:
        _, parent = heapq.heappop(heap)
        if parent != node:
            yield parent
        for child in tree.children.get(parent, {}).values():
            if child != HELD_BACK:
                heapq.heappush(heap, (-tree.reached[child], child))


def query(blocks: Sequence[Block], below: Below | None, says: Says) -> tuple[float, float]:
    """Has the level below guess for all blocks; seconds that it took, and that it read, as it says."""
    if below is None:
        return 0.0, 0.0
    heard = below.ask([block.question(below.block) for block in blocks])
    for block, one in zip(blocks, heard, strict=True):
        block.guess(one, says)
    return sum(one.elapsed for one in heard), sum(one.reading for one in heard)
