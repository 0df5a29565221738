"""`ModelDrafter`: a small model grows a tree of candidates.

Every step forwards the open nodes with the largest cumulative chance and publishes their likeliest children: the
leaves of the frontier, too, are candidates although they have no KV yet. With another drafter below, a step forwards
what that one guesses as well (`stacked.py`).

Under sampling the draft is coupled to the target: it ranks children by its own processed scores plus the very noise
that the target will add at that position. Where both models agree roughly, they then pick the same token, however
random it is. (Drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.draft_step import Block, query
from langchain_card.drafters.lower_level import Below
from langchain_card.drafters.tree import MIN_CHANCE, NUM_CHILDREN, DraftTree
from langchain_card.models.vocabulary import VocabularyMap
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
    tenant: str
    tree: DraftTree
    text: list[int]  # committed tokens of prompt and answer, in the draft's ids
    cache: KVCache | None  # opened with the first step
    sampler: Sampler
    ranks: RankChances | None  # None when greedy


@dataclass(slots=True)
class _Part:
    """A request's share of a step: what it forwards, and seconds of reading before it."""

    sequence: _Sequence
    block: Block
    reading: float


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: of the draft model.
        vocab_size: ids at and above it are never proposed (heads padded beyond the target's).
        num_children: children published per expanded node.
        constrain: what a grammar allows, before the answer; without it, candidates may break it.
        vocabulary: of a draft with another vocabulary. All but what its model reads is in the target's ids; a node is
            a token that both have.
        below: a drafter that it queries in turn.
    """

    name = "model"
    paced = True
    trusted = True
    looks_ahead = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        num_children: int = NUM_CHILDREN,
        constrain: Callable[[str], Constraint] | None = None,
        vocabulary: VocabularyMap | None = None,
        below: Below | None = None,
    ) -> None:
        self._runner, self._constrain, self._below = runner, constrain, below
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
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
        text = self._read([*request.prompt_ids, *output_ids])
        opened = _Sequence(request.request_id, request.params.tenant, tree, text, None, sampler, ranks)
        self._sequences[request.request_id] = opened
        if self._below is not None:
            self._below.begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Applies what is new of the answer's tokens."""
        if self._below is not None:
            self._below.correct(request_id, start, token_ids)
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        applied = sequence.tree.apply(start, token_ids)
        read = self._read(applied.token_ids)
        sequence.text += read
        if sequence.cache is not None:
            sequence.cache.keep(applied.slots, read[: len(applied.slots)])
        sequence.sampler.commit(applied.token_ids)
        if sequence.ranks is not None:
            for rank in applied.ranks:
                sequence.ranks.learn(rank)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One forward pass for all requests; a proposal without nodes for one whose tree cannot grow."""
        known = [budget for budget in budgets if budget.request_id in self._sequences]
        parts = [self._plan(budget, self._sequences[budget.request_id]) for budget in known]
        started = time.perf_counter()
        _, reading = query([part.block for part in parts], self._below, self._says)
        reading = min(reading, time.perf_counter() - started)
        working = [part for part in parts if part.block.heads]
        if working:
            self._expand(working, self._forward(working))
        elapsed, together = time.perf_counter() - started - reading, sum(part.block.expanded for part in parts)
        return [
            part.block.publish(self.name, together, max(0.0, elapsed), part.reading + reading / len(parts))
            for part in parts
        ]

    def end(self, request_id: int) -> None:
        """Frees the sequence."""
        if self._below is not None:
            self._below.end(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None and sequence.cache is not None:
            self._runner.close(sequence.cache)

    def close(self) -> None:
        """Frees every sequence."""
        for request_id in list(self._sequences):
            self.end(request_id)
        if self._below is not None:
            self._below.close()

    def _plan(self, budget: Budget, sequence: _Sequence) -> _Part:
        """What to forward for a request; a text that is much longer than a step is read at once."""
        tree, reading = sequence.tree, 0.0
        if len(sequence.text) + self._runner.num_scratch > self._runner.max_len:
            return _Part(sequence, Block(tree, budget), reading)  # the text is longer than the draft's context
        if sequence.cache is None:
            sequence.cache = self._runner.open(sequence.text[:-1], sequence.tenant)
        cache, unread = sequence.cache, sequence.text[sequence.cache.length :]
        if len(unread) > CATCH_UP_ROWS:
            begun = time.perf_counter()
            self._runner.prefill(cache, unread[:-1])
            unread, reading = unread[-1:], time.perf_counter() - begun
        return _Part(sequence, Block.plan(tree, budget, unread, self._says), reading)

    def _forward(self, parts: Sequence[_Part]) -> Tensor:
        """One pass over the rows of all parts; their logits, in order."""
        batch, num_rows = list[Rows](), list[int]()
        for part in parts:
            cache, (token_ids, paths) = part.sequence.cache, part.block.place(self._read)
            assert cache is not None
            batch.append(Rows(cache, token_ids, cache.length, paths, ask=paths is None))
            num_rows.append(len(batch[-1].wanted))
        logits = torch.split(self._runner.step(batch), num_rows)
        for part, rows in zip(parts, batch, strict=True):
            rows.cache.keep(part.block.text_slots, part.block.text[: len(part.block.text_slots)])
        sizes = [len(part.block.ways) for part in parts]
        return torch.cat([own[-size:] for own, size in zip(logits, sizes, strict=True)])

    def _read(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens of the target as the draft reads them."""
        if self._vocabulary is not None:
            return self._vocabulary.read(token_ids)
        return [min(token, self._vocab_size - 1) for token in token_ids]  # what only the target's head is padded with

    def _says(self, token_id: int) -> bool:
        """Whether a token of the target is one of the draft's."""
        return self._vocabulary is None or self._vocabulary.shares(token_id)

    def _ranks_at(self, temperature: float) -> RankChances | None:
        if temperature == 0:
            return None
        return self._ranks.setdefault(round(temperature, 1), RankChances(self._num_children))

    @torch.inference_mode()
    def _expand(self, parts: Sequence[_Part], logits: Tensor) -> None:
        """Finds the likeliest children behind the parts' rows, to which those of `logits` belong in order."""
        best: list[Tensor] = []
        sizes = [len(part.block.ways) for part in parts]
        for part, own in zip(parts, torch.split(logits, sizes), strict=True):
            best += self._best_children(part.sequence, part.block.ways, own.float())
        chances, token_ids = torch.cat(best[::2]).tolist(), torch.cat(best[1::2]).tolist()
        floor = math.log(MIN_CHANCE)
        keep = [sum(log >= floor for log in logs) or int(logs[0] > -math.inf) for logs in chances]
        found = iter([(ids[:n], logs[:n]) for ids, logs, n in zip(token_ids, chances, keep, strict=True)])
        for part, size in zip(parts, sizes, strict=True):
            part.block.settle([*itertools.islice(found, size)])

    def _best_children(
        self, sequence: _Sequence, ways: Sequence[tuple[int, ...]], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Chances and tokens [rows, children], by log q when greedy, by the perturbed score when sampling."""
        own = logits
        if self._vocabulary is not None:
            logits = self._vocabulary.to_target(own)
        logits = logits[:, : self._vocab_size]
        if not sequence.sampler.idle:  # penalties, bias and bans may name a token that a cut head leaves out
            logits = F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-math.inf)
        scores = sequence.sampler.scores(logits, ways)
        top = scores.topk(self._num_children, dim=-1)
        if sequence.ranks is None:
            chances = top.values - scores.logsumexp(dim=-1, keepdim=True)
            if self._vocabulary is not None:  # what it would say in a token of its own is no child's
                chances = chances + self._vocabulary.share(own)
        else:
            chances = torch.tensor(sequence.ranks.log_chances(), dtype=top.values.dtype, device=top.values.device)
        return chances.where(top.values > -math.inf, -math.inf), top.indices
