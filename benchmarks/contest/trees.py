"""Tree speculative decoding on recorded trees, after SpecInfer (arXiv 2305.09781) and EAGLE-2 (2406.16858).

The draft expands the likeliest nodes of a recorded trace, step by step; the target verifies the likeliest ones; the
next round starts a new tree. `contenders.tree_sd` would overestimate this contender, because it assumes that the
subtree of every sibling is as deep as the best chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.contest.contenders import Costs
from benchmarks.contest.traces import Trace, TraceScript

DEPTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
WIDTHS = (1, 4, 16)
WINDOWS = (16, 64)
"""Settings that are tried: draft steps per round, nodes per step, candidates per window."""


@dataclass(frozen=True)
class TreeRun:
    """Tree speculative decoding with one setting.

    Attributes:
        setting: draft steps per round, nodes per step, candidates per window.
        tokens: of the text.
        steps: [draft steps] rows of each.
        passes: [passes] rows of each.
    """

    setting: tuple[int, int, int]
    tokens: int
    steps: Sequence[int]
    passes: Sequence[int]

    def speedup(self, costs: Costs) -> float:
        """Return the speed-up over plain decoding."""
        seconds = sum(map(costs.draft, self.steps)) + sum(map(costs.target, self.passes))
        return self.tokens * costs.target(1) / seconds


def tree_runs(trace: Trace) -> list[TreeRun]:
    """Run one text with every setting. Acceptance does not depend on step times, so that all costs share these runs."""
    script = TraceScript(trace, [trace])
    return [_run(trace, script, *setting) for setting in product(DEPTHS, WIDTHS, WINDOWS)]


def _run(trace: Trace, script: TraceScript, depth: int, width: int, window: int) -> TreeRun:
    text, at = (*trace.prompt_ids, *trace.token_ids), len(trace.prompt_ids)
    steps: list[int] = []
    passes: list[int] = []
    while at < len(text):
        tree = _Tree(script, text[:at])
        steps += [tree.grow(width) for _ in range(min(depth, len(text) - at - 1))]
        verified = tree.likeliest(window)
        passes.append(1 + len(verified))
        while at < len(text) and text[: at + 1] in verified:
            at += 1
        at += 1
    return TreeRun((depth, width, window), len(trace.token_ids), steps, passes)


class _Tree:
    """The candidates after a root, as prefixes with log-probabilities."""

    def __init__(self, script: TraceScript, root: tuple[int, ...]) -> None:
        self._script = script
        self._open = [(0.0, root)]
        self._scores: dict[tuple[int, ...], float] = {}

    def grow(self, width: int) -> int:
        """Expand up to `width` of the likeliest open nodes. Returns their number."""
        nodes = [heapq.heappop(self._open) for _ in range(min(width, len(self._open)))]
        for negated, prefix in nodes:
            for token, log in self._script.candidates(prefix):
                child = (*prefix, token)
                self._scores[child] = log - negated
                heapq.heappush(self._open, (negated - log, child))
        return len(nodes)

    def likeliest(self, count: int) -> set[tuple[int, ...]]:
        """Return the `count` likeliest nodes. They include their parents, which are likelier."""
        return set(heapq.nlargest(count, self._scores, key=self._scores.__getitem__))
