"""`ModelDrafter`: a small model grows a tree of candidates, likeliest node first.

Every step expands the open nodes with the largest cumulative chance and publishes their likeliest children. A
correction that lies in the tree re-roots it and keeps every surviving node's KV; one that does not drops the tree and
starts a new epoch at the last committed token.

Under sampling the draft is coupled to the target: it ranks children by its own processed scores plus the very noise
that the target will add at that position. Where both models agree roughly, they then pick the same token, however
random it is. (Drafter-invariant coupling, arXiv 2408.07978.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.ports import Budget
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.sampling import Sampler

MAX_NODES = 4096
"""Nodes of one epoch; a tree that grew for so long is dropped and begun anew."""

CATCH_UP_ROWS = 16
"""Committed tokens up to this many are read together with the next step; more are read as a prompt is."""

MIN_CHANCE = 0.004
"""Children below this chance are not published."""

LOG_MIN_CHANCE = math.log(MIN_CHANCE)


NO_SLOT = -1


class DraftTree:
    """One request as the draft sees it.

    Attributes:
        sampler: the request's own processors and noise.
        output_ids: answer tokens applied.
        epoch: see `core.messages.Proposal`.
        tokens, parents, scores, slots: [nodes]; scores are cumulative from node 0, slots `NO_SLOT` until forwarded.
        root: node of the last applied token.
    """

    def __init__(self, request: Request, cache: KVCache) -> None:
        self.params = request.params
        self.sampler = Sampler(request.params, request.prompt_ids)
        self.prompt_ids = list(request.prompt_ids)
        self.output_ids: list[int] = []
        self.cache = cache
        self.epoch = -1
        self.start_epoch()

    def start_epoch(self) -> None:
        """Drops the tree; node 0 is the last token known."""
        self.epoch += 1
        self.tokens = [self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]]
        self.parents, self.scores, self.root = [-1], [0.0], 0
        self.slots = [NO_SLOT]
        self.children: list[dict[int, int]] = [{}]
        self.open: set[int] = {0}
        self.free_slots = list(range(self.cache.num_scratch))

    def unread(self) -> list[int]:
        """Committed tokens that have no KV yet, in order."""
        length, num_prompt = self.cache.length, len(self.prompt_ids)
        return self.prompt_ids[length:] + self.output_ids[max(0, length - num_prompt) :]

    def path(self, node: int) -> list[int]:
        """Nodes from the first one below the root down to `node`."""
        nodes: list[int] = []
        while node != self.root:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def add_children(self, parent: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Appends nodes below `parent`; `scores` are conditional."""
        for token, score in zip(token_ids, scores):  # noqa: B905
            self.children[parent][token] = len(self.tokens)
            self.open.add(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(self.scores[parent] + score)
            self.slots.append(NO_SLOT)
            self.children.append({})

    def apply(self, token_ids: Sequence[int]) -> None:
        """Commits tokens: a hit re-roots the tree, a miss drops it."""
        kept: list[int] = []
        node: int | None = self.root
        for token in token_ids:
            node = self.children[node].get(token) if node is not None else None
            if node is not None and self.slots[node] != NO_SLOT:
                kept.append(self.slots[node])
        self.output_ids += token_ids
        self.sampler.commit(token_ids)
        self.cache.keep(kept)
        if node is None or len(self.tokens) > MAX_NODES:
            self.start_epoch()
        else:
            self._re_root(node)

    def _re_root(self, root: int) -> None:
        self.root = root
        alive = {root}
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in alive:
                alive.add(node)
        used = {self.slots[node] for node in alive if node != root}
        self.free_slots = [slot for slot in range(self.cache.num_scratch) if slot not in used]
        self.open &= alive


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
        self._trees: dict[int, DraftTree] = {}

    def begin(self, request: Request) -> None:
        """Opens a sequence; the prompt is read with the first step."""
        self._trees[request.request_id] = DraftTree(request, self._runner.open())

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Applies what is new of the answer's tokens."""
        tree = self._trees.get(request_id)
        if tree is not None and start <= len(tree.output_ids) < start + len(token_ids):
            tree.apply(token_ids[len(tree.output_ids) - start :])

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """One forward pass per request; a proposal without nodes when its tree cannot grow."""
        return [
            self._step(budget.request_id, self._trees[budget.request_id], budget.width)
            for budget in budgets
            if budget.request_id in self._trees
        ]

    def end(self, request_id: int) -> None:
        """Frees the sequence."""
        self._trees.pop(request_id, None)

    def close(self) -> None:
        """Frees every sequence."""
        self._trees.clear()

    def _step(self, request_id: int, tree: DraftTree, width: int) -> Proposal:
        first, nodes = len(tree.tokens), self._choose(tree, width)
        unread = tree.unread()
        if len(unread) > CATCH_UP_ROWS:
            self._runner.prefill(tree.cache, unread[:-1])
            unread = unread[-1:]
        started = time.perf_counter()
        if nodes == [tree.root]:
            self._expand(tree, nodes, self._read(tree, unread))
        elif nodes:
            self._expand(tree, nodes, self._forward(tree, nodes))
        return Proposal(
            source=self.name,
            request_id=request_id,
            epoch=tree.epoch,
            root=tree.root,
            applied_len=len(tree.output_ids),
            first=first,
            parents=tuple(tree.parents[first:]),
            token_ids=tuple(tree.tokens[first:]),
            scores=tuple(tree.scores[n] - tree.scores[tree.parents[n]] for n in range(first, len(tree.tokens))),
            expanded=tuple(nodes),
            elapsed=time.perf_counter() - started if nodes else 0.0,
        )

    def _choose(self, tree: DraftTree, width: int) -> list[int]:
        """The likeliest open nodes; the root alone while it has no KV."""
        position = len(tree.prompt_ids) + len(tree.output_ids)
        if position + self._runner.num_scratch > self._runner.max_len:
            return []
        if tree.root in tree.open:
            return [tree.root]
        return sorted(tree.open, key=lambda node: (-tree.scores[node], node))[: min(width, len(tree.free_slots))]

    def _read(self, tree: DraftTree, unread: list[int]) -> Tensor:
        """Forwards the last committed tokens as a chain; logits [1, vocabulary] of the last."""
        slots = tree.free_slots[: len(unread)]
        paths = [tuple(slots[: i + 1]) for i in range(len(unread))]
        logits = self._runner.step(tree.cache, unread, paths)
        tree.cache.keep(slots)
        return logits[-1:]

    def _forward(self, tree: DraftTree, nodes: list[int]) -> Tensor:
        for node in nodes:
            tree.slots[node] = tree.free_slots.pop()
        paths = [tuple(tree.slots[n] for n in tree.path(node)) for node in nodes]
        return self._runner.step(tree.cache, [tree.tokens[node] for node in nodes], paths)

    @torch.inference_mode()
    def _expand(self, tree: DraftTree, nodes: list[int], logits: Tensor) -> None:
        """Publishes the children that the target would choose were it the draft, noise included; best first.

        Their chances are a static estimate: log q when greedy; when sampling, log-softmax of the perturbed score times
        T. The target's scores differ from these by the difference of the two models' logits over T; were that Gumbel
        noise of scale 1 / T, its choice would be a draw from exactly this distribution. So a child that leads by much
        is nearly sure and one that leads by little is doubtful, which one chance per rank cannot say.
        """
        paths = [[tree.tokens[n] for n in tree.path(node)] for node in nodes]
        scores = tree.sampler.scores(logits[:, : self._vocab_size].float(), paths)
        if tree.params.temperature > 0:
            scores = scores * tree.params.temperature
        top = scores.topk(self._num_children, dim=-1)
        chances = top.values - scores.logsumexp(dim=-1, keepdim=True)
        for node, token_ids, logs in zip(nodes, top.indices.tolist(), chances.tolist(), strict=True):
            tree.open.discard(node)
            keep = sum(log >= LOG_MIN_CHANCE for log in logs) or 1
            tree.add_children(node, token_ids[:keep], logs[:keep])
