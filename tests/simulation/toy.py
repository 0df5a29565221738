"""Toy models: a target and drafters whose choices are scripted, so that every answer is known in advance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from langchain_card.config import Schedule
from langchain_card.core.candidates import Frontier
from langchain_card.core.costs import Mean
from langchain_card.core.messages import Begin, Proposal, Verdict, Window
from langchain_card.core.policy import DraftGrant, Load, TextStats
from langchain_card.core.request import Request
from langchain_card.drafters.draft_step import DraftStep, add_guesses
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.drafters.tree import DraftTree
from langchain_card.ports import Budget

StepTime: TypeAlias = Callable[[int], float]
_MODULUS = 2**31 - 1


class Script(Protocol):
    """Scripts the choices of a target and its drafters after every prefix."""

    def target_token(self, prefix: tuple[int, ...]) -> int:
        """Return the target's token."""

    def candidates(self, prefix: tuple[int, ...], source: int = 1) -> tuple[tuple[int, float], ...]:
        """Return the tokens that drafter number `source` proposes, likeliest first, with log chances."""


class ToyModel:
    """A script: the target's token depends on the whole prefix, and drafters propose it with a given chance.

    Args:
        vocab_size: tokens 0 .. vocab_size - 1.
        top: chance that a drafter's first candidate is the target's token.
        second: chance that the second candidate is, if the first is not.
        seed: changes all texts.
        stated: chance that a drafter states for its first candidate; half of the rest for the second.
    """

    def __init__(
        self, vocab_size: int = 5, top: float = 0.6, second: float = 0.5, seed: int = 0, stated: float = 0.6
    ) -> None:
        self.vocab_size = vocab_size
        self._top, self._second_chance, self._seed = top, second, seed
        self._first_logp, self._second_logp = math.log(stated), math.log((1 - stated) / 2)
        self.target_token = functools.lru_cache(maxsize=1 << 16)(self._target_token)
        self.candidates = functools.lru_cache(maxsize=1 << 16)(self._candidates)

    def _target_token(self, prefix: tuple[int, ...]) -> int:
        """Return the target's token after `prefix`."""
        return self._draw(prefix, 0) % self.vocab_size

    def _candidates(self, prefix: tuple[int, ...], source: int = 1) -> tuple[tuple[int, float], ...]:
        """Return the tokens that drafter number `source` proposes after `prefix`, likeliest first, with log chances."""
        right, draw = self.target_token(prefix), self._draw(prefix, source)
        wrong = (right + 1 + draw % (self.vocab_size - 1)) % self.vocab_size
        chance = draw / _MODULUS
        if chance < self._top:
            return ((right, self._first_logp), (wrong, self._second_logp))
        if chance < self._top + (1 - self._top) * self._second_chance:
            return ((wrong, self._first_logp), (right, self._second_logp))
        return ((wrong, self._first_logp),)

    def answer(self, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the target's own answer."""
        prefix = tuple(prompt_ids)
        for _ in range(count):
            prefix += (self.target_token(prefix),)
        return prefix[len(prompt_ids) :]

    def _draw(self, prefix: tuple[int, ...], stream: int) -> int:
        return hash((self._seed, stream, prefix)) % _MODULUS  # hashes of integers are the same in every process


class ToyTarget:
    """A target without a model: tokens stand for KV entries.

    Args:
        script: determines its tokens.
        step_time: seconds of a pass by its number of rows; reported, not spent.
    """

    def __init__(self, script: Script, step_time: StepTime = lambda rows: 0.0) -> None:
        self.script = script
        self.step_time = step_time
        self._begun: dict[int, Begin] = {}
        self._kv: dict[int, tuple[int, ...]] = {}
        self._last: dict[int, Window] = {}

    def copy(self) -> ToyTarget:
        """Return an independent copy."""
        copied = ToyTarget(self.script, self.step_time)
        copied._begun, copied._kv, copied._last = self._begun.copy(), self._kv.copy(), self._last.copy()
        return copied

    @property
    def kv_lengths(self) -> dict[int, int]:
        """Lengths of the KV by request."""
        return {request_id: len(kv) for request_id, kv in self._kv.items()}

    def begin(self, begin: Begin) -> None:
        """Open a sequence, and read all but its last token."""
        request_id = begin.request.request_id
        self._begun[request_id] = begin
        self._kv[request_id] = (*begin.request.prompt_ids, *begin.output_ids)[:-1]
        self._last.pop(request_id, None)

    def end(self, request_id: int) -> None:
        """Free a sequence."""
        for by_request in (self._begun, self._kv, self._last):
            by_request.pop(request_id, None)

    def verify(self, windows: Sequence[Window]) -> list[Verdict]:
        """Return the scripted token after every row; check that each window continues its KV."""
        rows = sum(len(window.token_ids) for window in windows)
        per_row = self.step_time(rows) / rows if rows else 0.0
        return [self._verify(window, per_row * len(window.token_ids)) for window in windows]

    def _verify(self, window: Window, elapsed: float) -> Verdict:
        request_id = window.request_id
        last = self._last.get(request_id)
        if last is not None and len(self._kv[request_id]) < window.start_position:
            self._kv[request_id] += tuple(last.token_ids[row] for row in window.kept_rows)
        self._last[request_id] = window
        kv = self._kv[request_id]
        assert len(kv) == window.start_position, "the window does not start where the KV ends"
        prefixes: list[tuple[int, ...]] = []
        for token, parent in zip(window.token_ids, window.parents):  # noqa: B905
            prefixes.append((*(kv if parent < 0 else prefixes[parent]), token))
        return Verdict(request_id, window.step_id, tuple(map(self.script.target_token, prefixes)), elapsed)


class ToyDrafter:
    """A drafter without a model: its tree is a real `DraftTree`, with scripted children.

    Args:
        script: determines its candidates.
        name: of the drafter.
        number: of the drafter in the script, from 1.
        paced: see `ports.Drafter`; sets `from_model`, too.
        num_slots: KV slots of a request.
        step_time: seconds of a step by the number of rows that it forwards; reported, not spent.
        lower: a lower level that guesses for it.
    """

    def __init__(
        self,
        script: Script,
        name: str = "toy",
        number: int = 1,
        *,
        paced: bool = True,
        text: int = 0,
        num_slots: int = 64,
        step_time: StepTime = lambda rows: 0.0,
        lower: LowerLevel | None = None,
    ) -> None:
        self.name, self.paced, self.from_model, self._lower = name, paced, paced, lower
        self._script, self._number, self._num_slots, self.step_time = script, number, num_slots, step_time
        self._text = text  # tokens that it reads before it drafts
        self.trees: dict[int, DraftTree] = {}
        self.unread: dict[int, int] = {}
        self.out_of_memory = False

    def copy(self) -> ToyDrafter:
        """Return an independent copy."""
        copied = ToyDrafter(self._script, self.name, self._number, paced=self.paced, num_slots=self._num_slots)
        copied.step_time, copied._text, copied.unread = self.step_time, self._text, self.unread.copy()
        copied.trees = {request_id: tree.copy() for request_id, tree in self.trees.items()}
        return copied

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Open a sequence."""
        self.trees[request.request_id] = DraftTree(request.prompt_ids, output_ids, self._num_slots)
        self.unread[request.request_id] = self._text
        if self._lower is not None:
            self._lower.begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Apply new tokens."""
        if (tree := self.trees.get(request_id)) is not None:
            tree.apply(start, token_ids)
        if self._lower is not None:
            self._lower.correct(request_id, start, token_ids)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Expand the likeliest open nodes.

        Raises:
            MemoryError: `out_of_memory` was set.
        """
        if self.out_of_memory:
            raise MemoryError
        known, read = [each for each in budgets if each.request_id in self.trees], dict[int, int]()
        steps = list[DraftStep]()
        for budget in known:
            tree, unread = self.trees[budget.request_id], self.unread[budget.request_id]
            read[budget.request_id] = unread if budget.max_read is None else min(unread, budget.max_read)
            self.unread[budget.request_id] = unread = unread - read[budget.request_id]
            planned = DraftStep.plan(tree, budget, (tree.tokens[tree.root],), _in_vocabulary)
            steps.append(DraftStep(tree, budget) if unread else planned)
        elapsed, _ = add_guesses(steps, self._lower, _in_vocabulary)
        if rows := sum(step.num_rows for step in steps):
            elapsed += self.step_time(rows)
        for step in steps:
            step.place(tuple)
            step.settle([self._children(step.tree, path) for path in step.token_paths])
        together = sum(step.expanded for step in steps)
        published = zip(known, (step.publish(self.name, together, elapsed) for step in steps), strict=True)
        return [
            replace(proposal, read=read[budget.request_id], unread=self.unread[budget.request_id])
            for budget, proposal in published
        ]

    def end(self, request_id: int) -> None:
        """Free a sequence."""
        self.trees.pop(request_id, None)
        self.unread.pop(request_id, None)
        if self._lower is not None:
            self._lower.end(request_id)

    def close(self) -> None:
        """Free everything."""
        self.trees.clear()
        if self._lower is not None:
            self._lower.close()

    def _children(self, tree: DraftTree, path: Sequence[int]) -> tuple[list[int], list[float]]:
        candidates = self._script.candidates((*tree.prompt_ids, *tree.output_ids, *path), self._number)
        return [token for token, _ in candidates], [score for _, score in candidates]


def _in_vocabulary(token_id: int) -> bool:
    """Return True: toys have one vocabulary."""
    return True


class FixedPolicy:
    """A policy without state: always draft, verify all candidates, wait a little.

    Args:
        widths: nodes of each draft step that is granted with a correction, under `parallel`.
        patience: seconds that a round waits for its draft.
        read: tokens of a text that a drafter reads at a time.
        late: whether it reads from the first token of the answer on, as on a device that it shares.
        turns: whether a request that runs alone changes its schedule after each pass.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (1, 1),
        patience: float = 1.0,
        read: int = 64,
        *,
        late: bool = False,
        turns: bool = False,
    ) -> None:
        self._widths, self._patience, self._read, self._late = widths, patience, read, late
        self._turns = turns

    def new_text(self) -> TextStats:
        """Return statistics whose `pace` counts the passes."""
        return TextStats(Mean(), Mean(decay=1.0))

    def auto(self, texts: Sequence[TextStats], current: Schedule | None, positions: int = 0) -> Schedule:
        """Return `parallel` for one request, unless it is its turn to change; `sequential` for several."""
        turned = self._turns and int(texts[0].pace.weight) % 2 == 1
        return "parallel" if len(texts) == 1 and not turned else "sequential"

    def grant(self, load: Load, *, hit: bool) -> DraftGrant:
        """Grant the fixed steps; a single one unless the schedule is `parallel`."""
        return DraftGrant(self._widths if load.schedule == "parallel" else (1,))

    def read_budget(self, load: Load, text: TextStats, unread: int, written: int, left: int) -> int:
        """Read the fixed number of tokens at a time."""
        return self._read if written or not self._late else 0

    def max_readers(self, load: Load) -> int:
        """Let all requests read at once."""
        return load.num_seqs

    def may_wait(self, load: Load, lead: int) -> bool:
        """Return True: `draft_pays` decides."""
        return True

    def draft_pays(self, load: Load, texts: Sequence[TextStats], frontiers: Sequence[Frontier]) -> list[bool]:
        """Take every step, except that under `parallel` a round waits only for a first candidate."""
        return [load.schedule != "parallel" or not at.lead for at in frontiers]

    def windows(self, load: Load, texts: Sequence[TextStats], chances: Sequence[Sequence[float]]) -> list[int]:
        """Verify all candidates."""
        return [*map(len, chances)]

    def patience(self, load: Load) -> float:
        """Return the fixed patience."""
        return self._patience

    def observe_pass(
        self,
        load: Load,
        texts: Sequence[TextStats],
        rows: int,
        tokens: int,
        elapsed: float,
        since_last: float | None,
    ) -> None:
        """Ignore the measurement."""

    def observe_draft_step(
        self, load: Load, text: TextStats, nodes: int, together: int, elapsed: float, layers: int
    ) -> None:
        """Ignore the measurement."""

    def observe_reading(self, load: Load, tokens: int, elapsed: float) -> None:
        """Ignore the measurement."""

    def observe_answer(self, tokens: int) -> None:
        """Ignore the measurement."""

    def trust(self, source: str, stated_logp: float) -> tuple[float, float]:
        """Return the chance as stated."""
        return stated_logp, stated_logp

    def observe_candidate(self, source: str, stated_logp: float, *, taken: bool, unlisted: bool) -> None:
        """Ignore the measurement."""

    def observe_token(self, text: TextStats, *, hit: bool, first: bool) -> None:
        """Ignore the measurement."""
