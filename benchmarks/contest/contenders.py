"""Other ways to use a draft model, each on a virtual clock of its own.

A draft step makes one layer of candidates; a target call over a window of some depth commits the accepted candidates
and one token of the target's own. Exchanges cost nothing. Where two things end at the same instant the draft's layer
comes first, so that the call that ended with it can find its last token there.

With independent tokens they give the figures that were simulated for this project before it was written, within 3 %
(`tests/benchmarks/test_contenders.py`), for schemes after Leviathan et al. (arXiv 2211.17192), AMUSD (2410.17375) and
PEARL (2408.11850), CARD (2508.04462), Saguaro (2603.03251).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.contest.paths import DEEP, Kind, Linear, Path


@dataclass(frozen=True)
class Costs:
    """Step times, in any one unit: `draft(width)` for a layer, `target(rows)` for a call, rows >= 1."""

    draft: Callable[[int], float]
    target: Callable[[int], float]

    @classmethod
    def constant(cls, c: float) -> Costs:
        """Flat curves; a target call lasts c draft steps."""
        return cls(draft=lambda width: 1.0, target=lambda rows: float(c))


@dataclass(frozen=True)
class Shape:
    """Sizes that the curves of `Costs` are asked for; with constant costs only `branch > 1` matters."""

    width: int = 64  # rows of a draft step
    branch: int = 1  # verified rows a layer: 1 = a chain of first choices, more = a tree with NEAR siblings


CHAIN, NARROW, TREE = Shape(), Shape(width=1), Shape(branch=4)

OUTCOMES = 4
"""Tokens that an outcome cache foresees after each candidate."""


@dataclass(frozen=True)
class Run:
    """What a contender did; runs add up."""

    time: float = 0.0
    tokens: int = 0
    calls: int = 0

    def __add__(self, other: Run) -> Run:
        return Run(self.time + other.time, self.tokens + other.tokens, self.calls + other.calls)

    def speedup(self, costs: Costs) -> float:
        """Over autoregressive decoding: one call of one row for each token."""
        return self.tokens * costs.target(1) / self.time


def window_at(path: Path, start: int, lead: int) -> int:
    """Depth of a window: all of the lead, but not past the end of the text."""
    return min(lead, len(path) - start - 1)


def accepted(path: Path, start: int, depth: int, shape: Shape) -> int:
    """Candidates of a window of `depth` layers that the target confirms.

    A chain window follows TOP tokens; a tree window also NEAR siblings, as deep as their subtrees live.
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
    """Look the `count` committed tokens up in a tree of `layers` layers below the old root.

    Returns how many further layers their branch survives (it may be more than there are), or None for a
    miss: a token that is not cached, lies below the last layer, or hangs under a branch that died.
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
    """In turn: `depth` draft steps, then one target call; nothing is kept for the next round."""
    at, time, calls = 0, 0.0, 0
    while at < len(path):
        window = window_at(path, at, depth)
        time += depth * costs.draft(shape.width) + costs.target(1 + window * shape.branch)
        at += accepted(path, at, window, shape) + 1
        calls += 1
    return Run(time, at, calls)


def synchronous(path: Path, costs: Costs, shape: Shape, ratio: int) -> Run:
    """In lockstep: `ratio` (R) draft steps beside one target call, then an exchange.

    A round lasts as long as the slower side. It adds R layers to the lead, R - 1 after a miss (one step
    goes to the new token). The call verifies the lead that the round began with; the tokens it commits are
    looked up in the tree with the new layers. A hit keeps what survives under them; a miss leaves lead 0.
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
    """A draft that never stops: one layer every `step`, corrections read at step boundaries."""

    step: float
    lead: int = 0  # finished layers below the root
    ready: float = field(init=False)  # when the step in flight will have made the next layer

    def __post_init__(self) -> None:
        self.ready = self.step

    def run_to(self, now: float) -> None:
        """Finish every step that ends by `now` (a hair of slack absorbs float error in step times)."""
        if (done := math.floor((now - self.ready) / self.step + 1e-9) + 1) > 0:
            self.lead += done
            self.ready += done * self.step

    def time_of(self, lead: int) -> float:
        """When the tree will be `lead` layers deep."""
        return self.ready + (lead - self.lead - 1) * self.step

    def correct(self, now: float, count: int, life: int | None) -> None:
        """Take `count` committed tokens, found with `life` (see `descend`) or missed.

        If the branch outlives the tree, the step in flight counts. If it was cut short, or on a miss, that
        step is lost: the next layer comes one step after the boundary, from the cut or from the new token.
        """
        if life is not None and life > self.lead - count:
            self.lead -= count
            return
        idle = self.ready - self.step >= now - 1e-9 * self.step  # a step ended just now; none is in flight
        self.lead = 0 if life is None else life
        self.ready = (now if idle else self.ready) + self.step


def asynchronous(path: Path, costs: Costs, shape: Shape, wait: int) -> Run:
    """Both run free: the draft makes a layer every step, the target calls on whatever lead there is.

    Before a call, a lead below `wait` is waited for until it equals `wait` (0: never wait). A miss costs
    the tree: the first new layer comes one draft step after it (one more if a step was in flight), and
    the target's next call starts at once, with an empty window unless it waits.
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
    """Speculative decoding: `depth` steps of a one-row draft, one call over the chain, in turn."""
    return sequential(path, costs, NARROW, depth)


def linear_async(path: Path, costs: Costs, _: int) -> Run:
    """AMUSD, PEARL: the draft grows one chain beside the target; a rejected candidate is always a miss."""
    return asynchronous(Linear(path), costs, NARROW, wait=0)


def card_sync(path: Path, costs: Costs, ratio: int) -> Run:
    """CARD as published: lockstep rounds of `ratio` draft steps, chain windows; siblings save the tree."""
    return synchronous(path, costs, CHAIN, ratio)


def card_async(path: Path, costs: Costs, _: int) -> Run:
    """CARD with a free-running draft, chain windows, and a target that never waits."""
    return asynchronous(path, costs, CHAIN, wait=0)


def card_async_wait(path: Path, costs: Costs, wait: int) -> Run:
    """`card_async` whose target waits for a lead of `wait` layers whenever it has less."""
    return asynchronous(path, costs, CHAIN, wait)


def tree_sd(path: Path, costs: Costs, depth: int) -> Run:
    """Speculative decoding with a tree of `depth` layers: NEAR siblings are accepted, as deep as they live."""
    return sequential(path, costs, TREE, depth)


def tree_async_wait(path: Path, costs: Costs, wait: int) -> Run:
    """`card_async_wait` with tree windows over the whole lead; a FAR sibling ends the call but is a hit."""
    return asynchronous(path, costs, TREE, wait)


def outcome_cache(path: Path, costs: Costs, depth: int) -> Run:
    """Saguaro class: while the target works, the draft readies a chain of `depth` for every outcome that it foresees.

    The outcome is how many candidates are accepted and which token follows; it is foreseen when that token is cached.
    A round lasts as long as the slower side: the draft reads each chain and the outcome before it, in steps with a row
    for every outcome. After one that was not foreseen the chain is drafted in turn.
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
    """The target alone."""
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
"""By name: the scheme, and the settings (draft length, ratio or wait) that are tried for each cell."""


def total(contender: Contender, paths: Iterable[Path], costs: Costs, setting: int) -> Run:
    """One run over several texts, each started afresh."""
    return sum((contender(path, costs, setting) for path in paths), Run())


def tune(contender: Contender, paths: Sequence[Path], costs: Costs, settings: Sequence[int]) -> int:
    """The setting with the best speed-up over `paths`."""
    if len(settings) == 1:
        return settings[0]
    return max(settings, key=lambda setting: total(contender, paths, costs, setting).speedup(costs))
