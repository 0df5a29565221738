"""`Explorer`: drives a `World` through many orders of events, or through all of them.

Four choosers: every order (`exhaust`), and for one run at a time a random one, one by priorities that change a few
times (PCT: finds bugs that need few, rare preemptions; Burckhardt et al., ASPLOS 2010), and a recorded one. A failure
names the scope, the seed and the actions, and `replay` repeats it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.simulation.fingerprint import fingerprint
from tests.simulation.scope import Scope
from tests.simulation.world import Action, World

Chooser: TypeAlias = Callable[[World, list[Action]], Action]


class Violation(AssertionError):
    """An invariant does not hold.

    Attributes:
        scope: of the world.
        actions: that lead there; `replay(scope, actions)` does it again.
    """

    def __init__(self, scope: Scope, actions: Sequence[Action], reason: str, seed: int | None = None) -> None:
        self.scope, self.actions = scope, tuple(actions)
        self._told = scope, self.actions, reason, seed
        how = "exhaustive" if seed is None else f"seed {seed}"
        super().__init__(f"{reason} (scope {scope.name!r}, {how}); replay with actions = {list(actions)!r}")

    def __reduce__(self) -> tuple[type[Violation], tuple[object, ...]]:
        """It comes whole out of a process that explores."""
        return Violation, self._told


@dataclass(frozen=True)
class Coverage:
    """What an exhaustive exploration saw.

    Attributes:
        states: distinct ones.
        transitions: actions tried.
        ends: states in which every request had ended and nothing was under way.
        complete: whether all reachable states were seen.
    """

    states: int
    transitions: int
    ends: int
    complete: bool


class RandomChooser:
    """Takes any action; faults strike with a chance.

    Args:
        seed: of the choices.
        fault_chance: per action.
    """

    def __init__(self, seed: int, fault_chance: float = 0.05) -> None:
        self._random, self._fault_chance = random.Random(seed), fault_chance

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """One action of `actions`."""
        faulty = self._random.random() < self._fault_chance
        wanted = [action for action in actions if (action[0] in world.faults) == faulty]
        return self._random.choice(wanted or actions)


class PriorityChooser:
    """Gives every action a priority and takes the highest; `changes` times the one taken drops to the end.

    Args:
        seed: of the priorities.
        changes: how often, within `length` actions.
        length: expected actions of a run.
    """

    def __init__(self, seed: int, changes: int = 3, length: int = 200) -> None:
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(length) for _ in range(changes)}
        self._priorities: dict[Action, float] = {}
        self._count = 0

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """One action of `actions`."""
        for action in actions:
            self._priorities.setdefault(action, self._random.random())
        best = max(actions, key=self._priorities.__getitem__)
        if self._count in self._changes:
            self._priorities[best] = -1.0 - self._count
        self._count += 1
        return best


class RecordedChooser:
    """Takes the actions of a list, one after the other."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = iter(actions)

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """The next recorded action."""
        return next(self._actions)


def run(scope: Scope, chooser: Chooser, *, max_actions: int = 100_000, seed: int | None = None) -> World:
    """Lets one world run until it has ended.

    Raises:
        Violation: an invariant broke, nothing could happen before the end, or the end did not come.
    """
    world, done = World(scope), list[Action]()
    for _ in range(max_actions):
        if len(world.finished) == scope.requests and world.ended:
            return world
        actions = world.actions()
        if not actions:
            raise Violation(scope, done, "nothing can happen, and requests have not ended", seed)
        try:
            done.append(chooser(world, actions))
            world.do(done[-1])
        except Exception as error:
            raise Violation(scope, done, _reason(error), seed) from error
    raise Violation(scope, done[-50:], f"no end after {max_actions} actions", seed)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else repr(error)


def replay(scope: Scope, actions: Sequence[Action]) -> World:
    """Repeats recorded actions; raises what they raised."""
    world = World(scope)
    for action in actions:
        world.do(tuple(action))
    return world


def exhaust(scope: Scope, *, max_states: int = 10_000_000) -> Coverage:
    """Tries every order of everything that can happen; checks that an end can be reached from every state.

    Raises:
        Violation: an invariant broke, or from some state no end can be reached.
    """
    first = World(scope)
    seen = {fingerprint(first): 0}
    came_from, came_by = array("q", [-1]), [("start",)]
    edges_from, edges_to, ends = array("l"), array("l"), []
    stack: list[tuple[int, World]] = [(0, first)]

    def trace(number: int) -> list[Action]:
        actions: list[Action] = []
        while number > 0:
            actions.append(came_by[number])
            number = came_from[number]
        return actions[::-1]

    while stack:
        number, world = stack.pop()
        actions = world.actions()
        if world.ended:
            ends.append(number)
        for i, action in enumerate(actions):
            after = world if i == len(actions) - 1 else world.copy()
            try:
                after.do(action)
            except Exception as error:
                raise Violation(scope, [*trace(number), action], _reason(error)) from error
            mark = fingerprint(after)
            known = seen.get(mark)
            if known is None and len(seen) < max_states:
                known = seen[mark] = len(seen)
                came_from.append(number)
                came_by.append(action)
                stack.append((known, after))
            if known is not None:
                edges_from.append(number)
                edges_to.append(known)
    complete = len(seen) < max_states
    if complete:
        _check_ends(scope, len(seen), edges_from, edges_to, ends, trace)
    return Coverage(len(seen), len(edges_from), len(ends), complete)


def _check_ends(
    scope: Scope,
    num_states: int,
    edges_from: Sequence[int],
    edges_to: Sequence[int],
    ends: list[int],
    trace: Callable[[int], list[Action]],
) -> None:
    """From every state an end can be reached: walks the edges backwards from the ends."""
    before: list[list[int]] = [[] for _ in range(num_states)]
    for start, end in zip(edges_from, edges_to):  # noqa: B905
        before[end].append(start)
    reaches, todo = set(ends), list(ends)
    while todo:
        for state in before[todo.pop()]:
            if state not in reaches:
                reaches.add(state)
                todo.append(state)
    lost = next((state for state in range(num_states) if state not in reaches), None)
    if lost is not None:
        raise Violation(scope, trace(lost), "no end can be reached from here")
