"""`ModelDrafter`: a small language model grows a tree of candidates.

Every step forwards the open nodes with the largest cumulative chance and publishes their likeliest children. The
children are candidates although they have no KV yet. With a lower level, a step forwards its guesses as well
(`draft_step.py`).

Under sampling the draft is coupled to the target: it ranks children by its own processed scores plus the same noise
that the target will add at that position. Where the two models roughly agree, they then pick the same token, however
random it is. (Drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.draft_step import DraftStep, add_guesses
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.tree import MIN_CHANCE, NUM_CHILDREN, DraftTree
from langchain_card.models.vocabulary import VocabularyMap
from langchain_card.ports import Budget, Constraint
from langchain_card.runtime.guide import Guide
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler, likeliest

CATCH_UP_ROWS = 16
"""Committed tokens up to this many are read together with the next step; more are read like a prompt."""

FIRST_TOKENS = 4
"""Tokens that stay at the head of a text of which only the end is read."""

RANK_PRIOR = (0.85, 0.06, 0.03, 0.02)
"""Chance that the target picks the child of each rank, before anything was learned (docs/LOG.md, 2026-11-21)."""

RANK_PRIOR_WEIGHT = 20
RANK_DECAY = 0.99


class RankChances:
    """Chances that the target picks the child of each rank, for children that are ranked by their perturbed scores.

    Learned from every expanded node that was committed. Under sampling the draft's own probability says little: the
    noise that decides is already in the ranking. What remains unknown is how far the scores of the two models differ,
    which depends on the pair and the temperature. So the rank alone is the estimate, the same for all nodes.

    Args:
        num_ranks: children of a node.
    """

    def __init__(self, num_ranks: int) -> None:
        last = len(RANK_PRIOR) - 1
        self._picked = [RANK_PRIOR_WEIGHT * RANK_PRIOR[min(rank, last)] for rank in range(num_ranks)]
        self._seen = float(RANK_PRIOR_WEIGHT)

    def learn(self, rank: int | None) -> None:
        """Learn that the target picked the child of this rank, or, with None, no child."""
        self._seen = self._seen * RANK_DECAY + 1
        self._picked = [n * RANK_DECAY + (i == rank) for i, n in enumerate(self._picked)]

    def log_chances(self) -> list[float]:
        """Return [num_ranks] log chances, none below `MIN_CHANCE`: an unpublished rank could never prove right."""
        return [math.log(max(n / self._seen, MIN_CHANCE)) for n in self._picked]


@dataclass(slots=True)
class DraftSequence:
    """A request's text, tree and sampler."""

    request_id: int
    tenant: str
    tree: DraftTree
    text: list[int]  # committed tokens of prompt and answer, in the draft's ids
    cache: KVCache | None  # opened with the first step
    sampler: Sampler
    ranks: RankChances | None  # None when greedy


@dataclass(slots=True)
class StepPart:
    """A request's part of a step, and the reading before it: its seconds, tokens read, and tokens left."""

    sequence: DraftSequence
    step: DraftStep
    reading: float = 0.0
    read: int = 0
    unread: int = 0


class ModelDrafter:
    """Drafts with a model.

    Args:
        runner: the draft model's.
        vocab_size: ids at and above it are never proposed (heads may be padded beyond the target's).
        context: tokens at the end of a text that are read, at least, besides its first; None for all.
        num_children: children published per expanded node.
        constrain: opens a grammar at the start of an answer; without it, candidates may break the grammar.
        vocabulary: maps the vocabulary of a draft that does not share the target's. Only the model reads ids of the
            draft; all else is in the target's ids, and a node is a token that both have.
        lower: a lower level that guesses for it.
    """

    name = "model"
    paced = True
    from_model = True
    trusted = True
    looks_ahead = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        context: int | None = None,
        num_children: int = NUM_CHILDREN,
        constrain: Callable[[str], Constraint] | None = None,
        vocabulary: VocabularyMap | None = None,
        lower: LowerLevel | None = None,
    ) -> None:
        self._runner, self._constrain, self._lower = runner, constrain, lower
        self._vocab_size, self._vocabulary, self._context = vocab_size, vocabulary, context
        self._num_children = num_children
        self._sequences: dict[int, DraftSequence] = {}
        self._ranks: dict[float, RankChances] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a sequence; its text is read, and memory taken, with the first step."""
        self.end(request.request_id)
        tree = DraftTree(request.prompt_ids, output_ids, self._runner.num_scratch)
        guide, grammar = None, request.params.grammar
        if grammar and self._constrain is not None:
            guide = Guide(self._constrain(grammar), request.eos_ids)
        sampler = Sampler(request.params, request.prompt_ids, guide)
        sampler.commit(output_ids)
        ranks = None if request.params.greedy else self._ranks_at(request.params.temperature)
        text = self._shorten([*request.prompt_ids, *output_ids])
        opened = DraftSequence(request.request_id, request.params.tenant, tree, text, None, sampler, ranks)
        self._sequences[request.request_id] = opened
        if self._lower is not None:
            self._lower.begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Apply the new ones of the answer's tokens."""
        if self._lower is not None:
            self._lower.correct(request_id, start, token_ids)
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        applied = sequence.tree.apply(start, token_ids)
        read = self._read(applied.token_ids)
        sequence.text += read
        if sequence.cache is not None:
            with self._runner.on_stream():
                sequence.cache.keep(applied.slots, read[: len(applied.slots)])
        sequence.sampler.commit(applied.token_ids)
        if sequence.ranks is not None:
            for rank in applied.ranks:
                sequence.ranks.learn(rank)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Run one forward pass for all requests; a request whose tree cannot grow gets a proposal without nodes."""
        with self._runner.on_stream():
            return self._step(budgets)

    def _step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        known = [budget for budget in budgets if budget.request_id in self._sequences]
        parts = [self._plan(budget, self._sequences[budget.request_id]) for budget in known]
        started = time.perf_counter()
        _, reading = add_guesses([part.step for part in parts], self._lower, self._in_vocabulary)
        reading = min(reading, time.perf_counter() - started)
        working = [part for part in parts if part.step.heads]
        if working:
            self._expand(working, self._forward(working))
        elapsed, together = time.perf_counter() - started - reading, sum(part.step.expanded for part in parts)
        proposals = []
        for part in parts:
            seconds = part.reading + reading / len(parts)
            proposal = part.step.publish(self.name, together, max(0.0, elapsed), seconds)
            proposals.append(replace(proposal, read=part.read, unread=part.unread))
        return proposals

    def end(self, request_id: int) -> None:
        """Free the sequence."""
        if self._lower is not None:
            self._lower.end(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None and sequence.cache is not None:
            self._runner.close(sequence.cache)

    def close(self) -> None:
        """Free every sequence."""
        for request_id in list(self._sequences):
            self.end(request_id)
        if self._lower is not None:
            self._lower.close()

    def _plan(self, budget: Budget, sequence: DraftSequence) -> StepPart:
        """Plan a request's part of a step; of a text that is much longer than a step, read what the budget allows."""
        tree = sequence.tree
        if len(sequence.text) + self._runner.num_scratch > self._runner.max_len:
            return StepPart(sequence, DraftStep(tree, budget))  # the text is longer than the draft's context
        if sequence.cache is None:
            sequence.cache = self._runner.open(sequence.text[:-1], sequence.tenant)
        cache, unread = sequence.cache, sequence.text[sequence.cache.length :]
        reading, read = 0.0, 0
        if len(unread) > CATCH_UP_ROWS:
            begun, read = time.perf_counter(), len(unread) - 1
            read = read if budget.max_read is None else min(read, budget.max_read)
            self._runner.prefill(cache, unread[:read])
            self._runner.synchronize()  # else the next step would wait for it, and seem to take as long
            unread, reading = unread[read:], time.perf_counter() - begun
            if len(unread) > CATCH_UP_ROWS:
                return StepPart(sequence, DraftStep(tree, budget), reading, read, len(unread))
        return StepPart(sequence, DraftStep.plan(tree, budget, unread, self._in_vocabulary), reading, read)

    def _forward(self, parts: Sequence[StepPart]) -> Tensor:
        """Run one pass over the rows of all parts; return their logits, in order."""
        batch, num_rows = list[Rows](), list[int]()
        for part in parts:
            cache, (token_ids, paths) = part.sequence.cache, part.step.place(self._read)
            assert cache is not None
            batch.append(Rows(cache, token_ids, cache.length, paths, ask=paths is None))
            num_rows.append(len(batch[-1].wanted))
        logits = torch.split(self._runner.step(batch), num_rows)
        for part, rows in zip(parts, batch, strict=True):
            rows.cache.keep(part.step.text_slots, part.step.text[: len(part.step.text_slots)])
        sizes = [part.step.num_rows for part in parts]
        return torch.cat([rows[-size:] for rows, size in zip(logits, sizes, strict=True)])

    def _shorten(self, token_ids: Sequence[int]) -> list[int]:
        """Return what the model reads of a text: its first tokens and its end.

        Texts that begin alike are cut at the same place. Many models predict badly without a text's first tokens
        (arXiv 2309.17453).
        """
        if self._context is None:
            return self._read(token_ids)
        step = max(FIRST_TOKENS, self._context // 2)
        cut = max(0, len(token_ids) - self._context) // step * step
        return self._read([*token_ids[: min(cut, FIRST_TOKENS)], *token_ids[cut:]])

    def _read(self, token_ids: Sequence[int]) -> list[int]:
        """Translate tokens of the target into those that the draft reads."""
        if self._vocabulary is not None:
            return self._vocabulary.read(token_ids)
        return [min(token, self._vocab_size - 1) for token in token_ids]  # padding of the target's head

    def _in_vocabulary(self, token_id: int) -> bool:
        """Return whether a token of the target is in the draft's vocabulary."""
        return self._vocabulary is None or self._vocabulary.shares(token_id)

    def _ranks_at(self, temperature: float) -> RankChances:
        return self._ranks.setdefault(round(temperature, 1), RankChances(self._num_children))

    @torch.inference_mode()
    def _expand(self, parts: Sequence[StepPart], logits: Tensor) -> None:
        """Find the likeliest children after the rows of all parts; `logits` has the same rows in order."""
        best: list[Tensor] = []
        sizes = [part.step.num_rows for part in parts]
        for part, rows in zip(parts, torch.split(logits, sizes), strict=True):
            best += self._best_children(part.sequence, part.step.token_paths, rows.float())
        chances, token_ids = torch.cat(best[::2]).tolist(), torch.cat(best[1::2]).tolist()
        floor = math.log(MIN_CHANCE)
        keep = [sum(log >= floor for log in logs) or int(logs[0] > -math.inf) for logs in chances]
        children = iter([(ids[:n], logs[:n]) for ids, logs, n in zip(token_ids, chances, keep, strict=True)])
        for part, size in zip(parts, sizes, strict=True):
            part.step.settle([*itertools.islice(children, size)])

    def _best_children(
        self, sequence: DraftSequence, token_paths: Sequence[tuple[int, ...]], logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return chances and tokens [rows, children], by log q when greedy, by the perturbed score when sampling."""
        own_logits = logits
        if self._vocabulary is not None:
            logits = self._vocabulary.to_target(own_logits)
        logits = logits[:, : self._vocab_size]
        if not sequence.sampler.idle:  # penalties, bias and bans may name a token that a cut head leaves out
            logits = F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-math.inf)
        scores = sequence.sampler.scores(logits, token_paths)
        values, token_ids = likeliest(scores, self._num_children)
        if sequence.ranks is None:
            chances = values - scores.logsumexp(dim=-1, keepdim=True)
            if self._vocabulary is not None:  # the chance of tokens that only the draft has belongs to no child
                chances = chances + self._vocabulary.share(own_logits)
        else:
            chances = torch.tensor(sequence.ranks.log_chances(), dtype=values.dtype, device=values.device)
        return chances.where(values > -math.inf, -math.inf), token_ids
