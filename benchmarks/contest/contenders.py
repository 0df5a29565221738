"""Other ways to use a draft model, each simulated on its own virtual clock.

A draft step makes one layer of candidates. A target call over a window of some depth commits the accepted candidates
and one token of its own. Exchanges cost nothing. If a step and a call end at the same time, the step counts first, so
that its layer can hold the last token of the call.

The schemes are those of Leviathan et al. (arXiv 2211.17192), AMUSD (2410.17375), PEARL (2408.11850), CARD (2508.04462)
and Saguaro (2603.03251). For independent tokens the speed-ups are within 3 % of an earlier simulation
(`tests/benchmarks/test_contenders.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.contest.paths import DEEP, Kind, Linear, Path


@dataclass(frozen=True)
class Costs:
    """Step times in any unit: `draft(width)` of a layer, `target(rows)` of a call, rows >= 1."""

    draft: Callable[[int], float]
    target: Callable[[int], float]

    @classmethod
    def constant(cls, c: float) -> Costs:
        """Return flat curves. A target call lasts `c` draft steps."""
        return cls(draft=lambda width: 1.0, target=lambda rows: float(c))


@dataclass(frozen=True)
class Shape:
    """Sizes of draft steps and windows. With constant costs, only `branch > 1` matters."""

    width: int = 64  # rows of a draft step
    branch: int = 1  # verified rows a layer: 1 = a chain of first choices, more = a tree with NEAR siblings


CHAIN, NARROW, TREE = Shape(), Shape(width=1), Shape(branch=4)

OUTCOMES = 4
"""Tokens after each candidate that an outcome cache prepares for."""


@dataclass(frozen=True)
class Run:
    """The result of a contender. Runs can be added."""

    time: float = 0.0
    tokens: int = 0
    calls: int = 0

    def __add__(self, other: Run) -> Run:
        return Run(self.time + other.time, self.tokens + other.tokens, self.calls + other.calls)

    def speedup(self, costs: Costs) -> float:
        """Return the speed-up over autoregressive decoding, one call of one row per token."""
        return self.tokens * costs.target(1) / self.time


def window_at(path: Path, start: int, lead: int) -> int:
    """Return the depth of a window: the whole lead, up to the end of the text."""
    return min(lead, len(path) - start - 1)


def accepted(path: Path, start: int, depth: int, shape: Shape) -> int:
    """Return the number of candidates that the target accepts in a window of `depth` layers.

    A chain window follows TOP tokens; a tree window also NEAR siblings, as deep as their subtrees survive.
    """
    n = 0
    while n < depth:
        kind, reach = path[start + n]
        if kind is not Kind.TOP and not (kind is Kind.NEAR and shape.branch > 1):
            break
        n += 1
        depth = min(depth, n + reach)
    return n


def descend(path: Path, start: int, count: int, layers: int) -> int | None:
    """Look up `count` committed tokens in a tree of `layers` layers below the old root.

    Returns the number of further layers that their branch survives, which may exceed those that exist, or None for a
    miss: a token is not cached, lies below the last layer, or is in a branch that did not survive.
    """
    if count > layers:
        return None
    life = DEEP
    for position in range(start, start + count):
        kind, reach = path[position]
        if kind is Kind.MISS or life == 0:
            return None
        life = min(life - 1, reach)
    return life


def sequential(path: Path, costs: Costs, shape: Shape, depth: int) -> Run:
    """Simulate rounds of `depth` draft steps and then one target call. The next round starts a new tree."""
    at, time, calls = 0, 0.0, 0
    while at < len(path):
        window = window_at(path, at, depth)
        time += depth * costs.draft(shape.width) + costs.target(1 + window * shape.branch)
        at += accepted(path, at, window, shape) + 1
        calls += 1
    return Run(time, at, calls)


def synchronous(path: Path, costs: Costs, shape: Shape, ratio: int) -> Run:
    """Simulate lockstep: `ratio` (R) draft steps beside one target call, then an exchange.

    A round lasts as long as the slower side. It adds R layers to the lead, or R - 1 after a miss, because one step
    reads the new token. The call verifies the lead at the start of the round. Its tokens are looked up in the tree with
    the new layers: a hit keeps the layers that survive below them, and a miss leaves lead 0.
    """
    at, time, calls, lead, missed = 0, 0.0, 0, 0, False
    while at < len(path):
        window = window_at(path, at, lead)
        time += max(ratio * costs.draft(shape.width), costs.target(1 + window * shape.branch))
        count = accepted(path, at, window, shape) + 1
        layers = lead + ratio - missed
        life = descend(path, at, count, layers)
        missed = life is None
        lead = 0 if life is None else min(layers - count, life)
        at, calls = at + count, calls + 1
    return Run(time, at, calls)


@dataclass
class DraftClock:
    """A draft that never stops: one layer every `step`, corrections applied between steps."""

    step: float
    lead: int = 0  # finished layers below the root
    ready: float = field(init=False)  # when the step in flight will have made the next layer

    def __post_init__(self) -> None:
        self.ready = self.step

    def run_to(self, now: float) -> None:
        """Finish every step that ends by `now`, with a tolerance for float errors."""
        if (done := math.floor((now - self.ready) / self.step + 1e-9) + 1) > 0:
            self.lead += done
            self.ready += done * self.step

    def time_of(self, lead: int) -> float:
        """Return the time when the tree will be `lead` layers deep."""
        return self.ready + (lead - self.lead - 1) * self.step

    def correct(self, now: float, count: int, life: int | None) -> None:
        """Apply `count` committed tokens with the result `life` of `descend`.

        If the branch survives below the last layer, the step in flight counts. Otherwise that step is lost, and the
        next layer comes one step after it.
        """
        if life is not None and life > self.lead - count:
            self.lead -= count
            return
        idle = self.ready - self.step >= now - 1e-9 * self.step  # a step ended just now; none is in flight
        self.lead = 0 if life is None else life
        self.ready = (now if idle else self.ready) + self.step


def asynchronous(path: Path, costs: Costs, shape: Shape, wait: int) -> Run:
    """Simulate a draft that makes a layer every step, and a target that verifies the lead there is.

    Before a call, the target waits for a lead of `wait` layers (0: never). A miss loses the tree: the first new layer
    comes one draft step later, or two if a step was in flight. The next call starts at once, with an empty window
    unless it waits.
    """
    draft = DraftClock(costs.draft(shape.width))
    at, now, calls = 0, 0.0, 0
    while at < len(path):
        if draft.lead < wait:
            now = max(now, draft.time_of(wait))
            draft.run_to(now)
        window = window_at(path, at, draft.lead)
        now += costs.target(1 + window * shape.branch)
        draft.run_to(now)
        count = accepted(path, at, window, shape) + 1
        life = descend(path, at, count, draft.lead)
        draft.correct(now, count, life)
        at, calls = at + count, calls + 1
    return Run(now, at, calls)


def chain_sd(path: Path, costs: Costs, depth: int) -> Run:
    """Simulate speculative decoding: `depth` steps of a one-row draft, then one call over the chain."""
    return sequential(path, costs, NARROW, depth)


def linear_async(path: Path, costs: Costs, _: int) -> Run:
    """Simulate AMUSD and PEARL: the draft grows one chain beside the target; a rejected candidate is always a miss."""
    return asynchronous(Linear(path), costs, NARROW, wait=0)


def card_sync(path: Path, costs: Costs, ratio: int) -> Run:
    """Simulate CARD as published: lockstep rounds of `ratio` draft steps, chain windows, cached siblings."""
    return synchronous(path, costs, CHAIN, ratio)


def card_async(path: Path, costs: Costs, _: int) -> Run:
    """Simulate CARD with a free-running draft, chain windows, and a target that never waits."""
    return asynchronous(path, costs, CHAIN, wait=0)


def card_async_wait(path: Path, costs: Costs, wait: int) -> Run:
    """Simulate `card_async` with a target that waits for a lead of `wait` layers."""
    return asynchronous(path, costs, CHAIN, wait)


def tree_sd(path: Path, costs: Costs, depth: int) -> Run:
    """Simulate speculative decoding with a tree of `depth` layers, whose NEAR siblings can be accepted."""
    return sequential(path, costs, TREE, depth)


def tree_async_wait(path: Path, costs: Costs, wait: int) -> Run:
    """Simulate `card_async_wait` with tree windows over the whole lead. A FAR sibling ends the call but is a hit."""
    return asynchronous(path, costs, TREE, wait)


def outcome_cache(path: Path, costs: Costs, depth: int) -> Run:
    """Simulate Saguaro: while the target works, the draft prepares a chain of `depth` for each likely outcome.

    An outcome is the number of accepted candidates and the token after them; it is prepared if that token is cached. A
    round lasts as long as the slower side: the draft reads each outcome and its chain, in steps with one row per
    outcome. After an outcome that was not prepared, the chain is drafted before the next call.
    """
    at, time, calls, ready = 0, 0.0, 0, False
    while at < len(path):
        window = window_at(path, at, depth)
        if not ready:
            time += window * costs.draft(1)
        time += max((depth + 1) * costs.draft(OUTCOMES * (depth + 1)), costs.target(1 + window))
        count = accepted(path, at, window, CHAIN) + 1
        ready = path[at + count - 1].kind is not Kind.MISS
        at, calls = at + count, calls + 1
    return Run(time, at, calls)


def plain(path: Path, costs: Costs, _: int) -> Run:
    """Simulate the target alone."""
    return Run(len(path) * costs.target(1), len(path), len(path))


Contender = Callable[[Path, Costs, int], Run]

GRID = (*range(11), 12, 14, 16, 18, 20, 24, 28, 32, 40, 50, 64)
CONTENDERS: dict[str, tuple[Contender, Sequence[int]]] = {
    "plain": (plain, (0,)),
    "chain": (chain_sd, GRID),
    "tree": (tree_sd, GRID),
    "card-synchronous": (card_sync, GRID[1:]),
    "linear-asynchronous": (linear_async, (0,)),
    "outcome-cache": (outcome_cache, GRID[1:]),
    "asynchronous": (card_async, (0,)),
    "asynchronous-wait": (card_async_wait, GRID[:16]),
    "asynchronous-tree-wait": (tree_async_wait, GRID[:16]),
}
"""Schemes by name, and the settings (draft length, ratio or wait) that are tried in each cell."""


def total(contender: Contender, paths: Iterable[Path], costs: Costs, setting: int) -> Run:
    """Return the sum of the runs over several texts."""
    return sum((contender(path, costs, setting) for path in paths), Run())


def tune(contender: Contender, paths: Sequence[Path], costs: Costs, settings: Sequence[int]) -> int:
    """Return the setting with the best speed-up over `paths`."""
    if len(settings) == 1:
        return settings[0]
    return max(settings, key=lambda setting: total(contender, paths, costs, setting).speedup(costs))
