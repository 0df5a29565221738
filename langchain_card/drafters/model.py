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
from langchain_card.drafters.tree import DraftTree
from langchain_card.ports import Budget
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler

CATCH_UP_ROWS = 16
"""Committed tokens up to this many are read together with the next step; more are read as a prompt is."""

MIN_SCORE = math.log(0.004)
"""Children below this chance are not published."""


@dataclass(slots=True)
class _Sequence:
    tree: DraftTree
    cache: KVCache | None  # opened with the first step
    sampler: Sampler
    scale: float  # the temperature; 1 when greedy

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

    def __init__(self, runner: ModelRunner, *, vocab_size: int, num_children: int = 4) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_children = num_children
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Opens a sequence; its text is read, and memory taken, with the first step."""
        tree = DraftTree(request.prompt_ids, output_ids, self._runner.num_scratch)
        sampler = Sampler(request.params, request.prompt_ids)
        sampler.commit(output_ids)
        self._sequences[request.request_id] = _Sequence(tree, None, sampler, request.params.temperature or 1.0)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Applies what is new of the answer's tokens."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        applied = sequence.tree.apply(start, token_ids)
        if sequence.cache is not None:
            sequence.cache.keep(applied.slots)
        sequence.sampler.commit(applied.token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One forward pass per request; a proposal without nodes when its tree cannot grow."""
        return [
            self._step(budget.request_id, self._sequences[budget.request_id], budget.width)
            for budget in budgets
            if budget.request_id in self._sequences
        ]

    def end(self, request_id: int) -> None:
        """Frees the sequence."""
        self._sequences.pop(request_id, None)

    def close(self) -> None:
        """Frees every sequence."""
        self._sequences.clear()

    def _step(self, request_id: int, sequence: _Sequence, width: int) -> Proposal:
        tree = sequence.tree
        if len(tree.prompt_ids) + len(tree.output_ids) + self._runner.num_scratch > self._runner.max_len:
            return tree.publish(self.name, request_id, (), 0.0)  # the text is longer than the draft's context
        cache = sequence.cache = sequence.cache or self._runner.open()
        nodes = tree.choose(width)
        unread = sequence.unread()
        if len(unread) > CATCH_UP_ROWS:
            self._runner.prefill(cache, unread[:-1])
            unread = unread[-1:]
        started = time.perf_counter()
        if nodes == [tree.root]:
            self._expand(sequence, nodes, self._read(tree, cache, unread))
        elif nodes:
            paths = [tree.place(node) for node in nodes]
            self._expand(sequence, nodes, self._runner.step(cache, [tree.tokens[node] for node in nodes], paths))
        return tree.publish(self.name, request_id, nodes, time.perf_counter() - started)

    def _read(self, tree: DraftTree, cache: KVCache, unread: list[int]) -> Tensor:
        """Forwards the last committed tokens as a chain; logits [1, vocabulary] of the last."""
        slots = tree.free_slots[: len(unread)]
        paths = [tuple(slots[: i + 1]) for i in range(len(unread))]
        logits = self._runner.step(cache, unread, paths)
        cache.keep(slots)
        return logits[-1:]

    @torch.inference_mode()
    def _expand(self, sequence: _Sequence, nodes: list[int], logits: Tensor) -> None:
        """Publishes the children that the target would choose were it the draft, noise included; best first.

        Their chances are a static estimate: log q when greedy; when sampling, log-softmax of the perturbed score times
        T. The target's scores differ from these by the difference of the two models' logits over T; were that Gumbel
        noise of scale 1 / T, its choice would be a draw from exactly this distribution. So a child that leads by much
        is nearly sure and one that leads by little is doubtful, which one chance per rank cannot say.
        """
        tree = sequence.tree
        paths = [[tree.tokens[n] for n in tree.path(node)] for node in nodes]
        scores = sequence.sampler.scores(logits[:, : self._vocab_size].float(), paths) * sequence.scale
        top = scores.topk(self._num_children, dim=-1)
        chances = top.values - scores.logsumexp(dim=-1, keepdim=True)
        for node, token_ids, logs in zip(nodes, top.indices.tolist(), chances.tolist(), strict=True):
            keep = sum(log >= MIN_SCORE for log in logs) or 1
            tree.expand(node, token_ids[:keep], logs[:keep])
