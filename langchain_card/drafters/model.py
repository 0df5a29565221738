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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.tree import MIN_CHANCE, NUM_CHILDREN, DraftTree
from langchain_card.ports import Budget
from langchain_card.runtime.kv_cache import KVCache
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
    tree: DraftTree
    cache: KVCache | None  # opened with the first step
    sampler: Sampler
    ranks: RankChances | None  # None when greedy

    def unread(self) -> list[int]:
        """Committed tokens that have no KV yet, in order."""
        num_prompt, length = len(self.tree.prompt_ids), self.cache.length if self.cache is not None else 0
        return [*self.tree.prompt_ids[length:], *self.tree.output_ids[max(0, length - num_prompt) :]]


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: of the draft model.
        vocab_size: ids at and above it are never proposed (heads padded beyond the target's).
        num_children: children published per expanded node.
    """

    name = "model"
    paced = True

    def __init__(self, runner: ModelRunner, *, vocab_size: int, num_children: int = NUM_CHILDREN) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_children = num_children
        self._sequences: dict[int, _Sequence] = {}
        self._ranks: dict[float, RankChances] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Opens a sequence; its text is read, and memory taken, with the first step."""
        tree = DraftTree(request.prompt_ids, output_ids, self._runner.num_scratch)
        sampler = Sampler(request.params, request.prompt_ids)
        sampler.commit(output_ids)
        self._sequences[request.request_id] = _Sequence(tree, None, sampler, self._ranks_at(request.params.temperature))

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Applies what is new of the answer's tokens."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        applied = sequence.tree.apply(start, token_ids)
        if sequence.cache is not None:
            sequence.cache.keep(applied.slots)
        sequence.sampler.commit(applied.token_ids)
        if sequence.ranks is not None:
            for rank in applied.ranks:
                sequence.ranks.learn(rank)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One forward pass per request; a proposal without nodes when its tree cannot grow."""
        return [
            self._step(budget, self._sequences[budget.request_id])
            for budget in budgets
            if budget.request_id in self._sequences
        ]

    def end(self, request_id: int) -> None:
        """Frees the sequence."""
        self._sequences.pop(request_id, None)

    def close(self) -> None:
        """Frees every sequence."""
        self._sequences.clear()

    def _step(self, budget: Budget, sequence: _Sequence) -> Proposal:
        tree, request_id = sequence.tree, budget.request_id
        if len(tree.prompt_ids) + len(tree.output_ids) + self._runner.num_scratch > self._runner.max_len:
            return tree.publish(self.name, request_id)  # the text is longer than the draft's context
        cache = sequence.cache = sequence.cache or self._runner.open()
        nodes = tree.choose(budget.width, budget.min_chance)
        unread = sequence.unread()
        reading = 0.0
        if len(unread) > CATCH_UP_ROWS:
            begun = time.perf_counter()
            self._runner.prefill(cache, unread[:-1])
            unread, reading = unread[-1:], time.perf_counter() - begun
        started = time.perf_counter()
        if nodes == [tree.root]:
            self._expand(sequence, nodes, self._read(tree, cache, unread))
        elif nodes:
            paths = [tree.place(node) for node in nodes]
            self._expand(sequence, nodes, self._runner.step(cache, [tree.tokens[node] for node in nodes], paths))
        elapsed = time.perf_counter() - started
        return tree.publish(self.name, request_id, forwarded=len(nodes), elapsed=elapsed, reading=reading)

    def _read(self, tree: DraftTree, cache: KVCache, unread: list[int]) -> Tensor:
        """Forwards the last committed tokens as a chain; logits [1, vocabulary] of the last."""
        slots = tree.free_slots[: len(unread)]
        paths = [tuple(slots[: i + 1]) for i in range(len(unread))]
        logits = self._runner.step(cache, unread, paths)
        cache.keep(slots)
        return logits[-1:]

    def _ranks_at(self, temperature: float) -> RankChances | None:
        if temperature == 0:
            return None
        return self._ranks.setdefault(round(temperature, 1), RankChances(self._num_children))

    @torch.inference_mode()
    def _expand(self, sequence: _Sequence, nodes: list[int], logits: Tensor) -> None:
        """Publishes the likeliest children: by log q when greedy, by the perturbed score when sampling."""
        tree = sequence.tree
        paths = [[tree.tokens[n] for n in tree.path(node)] for node in nodes]
        scores = sequence.sampler.scores(logits[:, : self._vocab_size].float(), paths)
        top = scores.topk(self._num_children, dim=-1)
        if sequence.ranks is not None:
            learnt = torch.tensor(sequence.ranks.log_chances(), dtype=top.values.dtype, device=top.values.device)
            chances = learnt.where(top.values > -math.inf, -math.inf)
        else:
            chances = top.values - scores.logsumexp(dim=-1, keepdim=True)
        floor = math.log(MIN_CHANCE)
        for node, token_ids, logs in zip(nodes, top.indices.tolist(), chances.tolist(), strict=True):
            keep = sum(log >= floor for log in logs) or 1
            tree.expand(node, token_ids[:keep], logs[:keep])
