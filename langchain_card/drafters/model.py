"""`ModelDrafter`: a small model grows a tree of candidates.

Every step forwards the open nodes with the largest cumulative chance and publishes their likeliest children: the
leaves of the frontier, too, are candidates although they have no KV yet.

Under sampling the draft is coupled to the target: it ranks children by its own processed scores plus the very noise
that the target will add at that position. Where both models agree roughly, they then pick the same token, however
random it is. (Drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.tree import MIN_CHANCE, NUM_CHILDREN, DraftTree
from langchain_card.ports import Budget, Constraint
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler

CATCH_UP_ROWS = 16
"""Committed tokens up to this many are read together with the next step; more are read as a prompt is."""


RANK_PRIOR = (0.85, 0.06, 0.03, 0.02)
"""Chance that the target picks the child of each rank, before anything was learnt (docs/LOG.md)."""

RANK_PRIOR_WEIGHT = 20
RANK_DECAY = 0.99


class RankChances:
    """How often the target picks the child of each rank, where children are ranked by the perturbed score.

    Learnt from every expanded node that was committed. Under sampling q itself says little: the noise that decides is
    known and already in the ranking, and what remains open is how far the two models' scores differ, which is a
    property of the pair and the temperature. So the rank is the estimate, the same for all nodes.

    Args:
        num_ranks: children of a node.
    """

    def __init__(self, num_ranks: int) -> None:
        last = len(RANK_PRIOR) - 1
        self._picked = [RANK_PRIOR_WEIGHT * RANK_PRIOR[min(rank, last)] for rank in range(num_ranks)]
        self._seen = float(RANK_PRIOR_WEIGHT)

    def learn(self, rank: int | None) -> None:
        """The target picked the child of this rank, or none of the children."""
        self._seen = self._seen * RANK_DECAY + 1
        self._picked = [n * RANK_DECAY + (i == rank) for i, n in enumerate(self._picked)]

    def log_chances(self) -> list[float]:
        """[num_ranks], none below `MIN_CHANCE`: a rank that is not published is never seen to be right."""
        return [math.log(max(n / self._seen, MIN_CHANCE)) for n in self._picked]


@dataclass(slots=True)
class _Sequence:
    request_id: int
    tree: DraftTree
    cache: KVCache | None  # opened with the first step
    sampler: Sampler
    ranks: RankChances | None  # None when greedy

    def text(self) -> list[int]:
        """Committed tokens of prompt and answer."""
        return [*self.tree.prompt_ids, *self.tree.output_ids]

    def unread(self) -> list[int]:
        """Committed tokens that have no KV yet, in order."""
        num_prompt, length = len(self.tree.prompt_ids), self.cache.length if self.cache is not None else 0
        return [*self.tree.prompt_ids[length:], *self.tree.output_ids[max(0, length - num_prompt) :]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A request's share of a step: the nodes to expand, and the rows whose last logits are theirs."""

    sequence: _Sequence
    nodes: list[int]
    rows: Rows | None  # None when nothing can be expanded
    reading: float


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: of the draft model.
        vocab_size: ids at and above it are never proposed (heads padded beyond the target's).
        num_children: children published per expanded node.
        constrain: what a grammar allows, before the answer; without it, candidates may break it.
    """

    name = "model"
    paced = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        num_children: int = NUM_CHILDREN,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self._runner, self._constrain = runner, constrain
        self._vocab_size = vocab_size
        self._num_children = num_children
        self._sequences: dict[int, _Sequence] = {}
        self._ranks: dict[float, RankChances] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Opens a sequence; its text is read, and memory taken, with the first step."""
        self.end(request.request_id)
        tree = DraftTree(request.prompt_ids, output_ids, self._runner.num_scratch)
        guide, grammar = None, request.params.grammar
        if grammar and self._constrain is not None:
            guide = Guide(self._constrain(grammar), request.eos_ids)
        sampler = Sampler(request.params, request.prompt_ids, guide)
        sampler.commit(output_ids)
        ranks = self._ranks_at(request.params.temperature)
        self._sequences[request.request_id] = _Sequence(request.request_id, tree, None, sampler, ranks)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Applies what is new of the answer's tokens."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        applied = sequence.tree.apply(start, token_ids)
        if sequence.cache is not None:
            length = sequence.cache.length - len(sequence.tree.prompt_ids)
            sequence.cache.keep(applied.slots, sequence.tree.output_ids[length : length + len(applied.slots)])
        sequence.sampler.commit(applied.token_ids)
        if sequence.ranks is not None:
            for rank in applied.ranks:
                sequence.ranks.learn(rank)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One forward pass for all requests; a proposal without nodes for one whose tree cannot grow."""
        known = [budget for budget in budgets if budget.request_id in self._sequences]
        parts = [self._plan(budget, self._sequences[budget.request_id]) for budget in known]
        batch = [part.rows for part in parts if part.rows is not None]
        started = time.perf_counter()
        if batch:
            self._expand([part for part in parts if part.nodes], self._runner.step(batch))
        elapsed, together = time.perf_counter() - started, sum(len(part.nodes) for part in parts)
        return [
            part.sequence.tree.publish(
                self.name,
                part.sequence.request_id,
                forwarded=len(part.nodes),
                together=together,
                elapsed=elapsed * len(part.nodes) / max(1, together),
                reading=part.reading,
            )
            for part in parts
        ]

    def end(self, request_id: int) -> None:
        """Frees the sequence."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None and sequence.cache is not None:
            self._runner.close(sequence.cache)

    def close(self) -> None:
        """Frees every sequence."""
        for request_id in list(self._sequences):
            self.end(request_id)

    def _plan(self, budget: Budget, sequence: _Sequence) -> _Part:
        """What to forward for a request; a text that is much longer than a step is read at once."""
        tree, reading = sequence.tree, 0.0
        if len(tree.prompt_ids) + len(tree.output_ids) + self._runner.num_scratch > self._runner.max_len:
            return _Part(sequence, [], None, reading)  # the text is longer than the draft's context
        if sequence.cache is None:
            sequence.cache = self._runner.open(sequence.text()[:-1])
        cache, unread = sequence.cache, sequence.unread()
        if len(unread) > CATCH_UP_ROWS:
            begun = time.perf_counter()
            self._runner.prefill(cache, unread[:-1])
            unread, reading = unread[-1:], time.perf_counter() - begun
        nodes = tree.choose(budget.width, budget.min_chance)
        if nodes == [tree.root]:
            rows = Rows(cache, unread, cache.length, None, ask=True)
        elif nodes:
            paths = [tree.place(node) for node in nodes]
            rows = Rows(cache, [tree.tokens[node] for node in nodes], cache.length, paths)
        return _Part(sequence, nodes, rows if nodes else None, reading)

    def _ranks_at(self, temperature: float) -> RankChances | None:
        if temperature == 0:
            return None
        return self._ranks.setdefault(round(temperature, 1), RankChances(self._num_children))

    @torch.inference_mode()
    def _expand(self, parts: Sequence[_Part], logits: Tensor) -> None:
        """Publishes the likeliest children of the parts' nodes, to which the rows of `logits` belong in order."""
        best: list[Tensor] = []
        sizes = [len(part.nodes) for part in parts]
        for part, own in zip(parts, torch.split(logits[:, : self._vocab_size], sizes), strict=True):
            best += self._best_children(part.sequence, part.nodes, own.float())
        chances, token_ids = torch.cat(best[::2]).tolist(), torch.cat(best[1::2]).tolist()
        floor = math.log(MIN_CHANCE)
        nodes = [(part.sequence.tree, node) for part in parts for node in part.nodes]
        for (tree, node), ids, logs in zip(nodes, token_ids, chances, strict=True):
            keep = sum(log >= floor for log in logs) or 1
            tree.expand(node, ids[:keep], logs[:keep])

    def _best_children(self, sequence: _Sequence, nodes: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chances and tokens [nodes, children], by log q when greedy, by the perturbed score when sampling."""
        tree = sequence.tree
        paths = [[tree.tokens[n] for n in tree.path(node)] for node in nodes]
        if not sequence.sampler.idle:  # penalties, bias and bans may name a token that a cut head leaves out
            logits = F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-math.inf)
        scores = sequence.sampler.scores(logits, paths)
        top = scores.topk(self._num_children, dim=-1)
        if sequence.ranks is None:
            return top.values - scores.logsumexp(dim=-1, keepdim=True), top.indices
        learnt = torch.tensor(sequence.ranks.log_chances(), dtype=top.values.dtype, device=top.values.device)
        return learnt.where(top.values > -math.inf, -math.inf), top.indices
