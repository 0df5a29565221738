"""Exploration of a `World`: every order of events (`exhaust`), or one order (`run`) that a chooser selects.

There are three choosers: a random one, one with priorities that change a few times (PCT, which finds bugs that need a
few rare preemptions; Burckhardt et al., ASPLOS 2010), and one that repeats a recording. A failure names the scope, the
seed and the actions, and `replay` repeats it.
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
    """Raised if an invariant does not hold.

    Attributes:
        scope: of the world.
        actions: actions that lead to the violation; `replay(scope, actions)` repeats them.
    """

    def __init__(self, scope: Scope, actions: Sequence[Action], reason: str, seed: int | None = None) -> None:
        self.scope, self.actions = scope, tuple(actions)
        self._args = scope, self.actions, reason, seed
        how = "exhaustive" if seed is None else f"seed {seed}"
        super().__init__(f"{reason} (scope {scope.name!r}, {how}); replay with actions = {list(actions)!r}")

    def __reduce__(self) -> tuple[type[Violation], tuple[object, ...]]:
        """Pickle all arguments, so that a violation can leave the process that explores."""
        return Violation, self._args


@dataclass(frozen=True)
class Coverage:
    """Counts of an exhaustive exploration.

    Attributes:
        states: distinct states.
        transitions: actions tried.
        ends: states in which every request has ended and nothing is under way.
        complete: True if all reachable states were visited.
    """

    states: int
    transitions: int
    ends: int
    complete: bool


class RandomChooser:
    """Chooses actions at random, and faults with a given chance.

    Args:
        seed: of the choices.
        fault_chance: chance that an action is a fault.
    """

    def __init__(self, seed: int, fault_chance: float = 0.05) -> None:
        self._random, self._fault_chance = random.Random(seed), fault_chance

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """Choose one of `actions`."""
        faulty = self._random.random() < self._fault_chance
        wanted = [action for action in actions if (action[0] in world.faults) == faulty]
        return self._random.choice(wanted or actions)


class PriorityChooser:
    """Chooses the action with the highest priority; `changes` times, the chosen action then gets the lowest one.

    Args:
        seed: of the priorities.
        changes: changes of priority within `length` actions.
        length: expected actions of a run.
    """

    def __init__(self, seed: int, changes: int = 3, length: int = 200) -> None:
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(length) for _ in range(changes)}
        self._priorities: dict[Action, float] = {}
        self._count = 0

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """Choose one of `actions`."""
        for action in actions:
            self._priorities.setdefault(action, self._random.random())
        best = max(actions, key=self._priorities.__getitem__)
        if self._count in self._changes:
            self._priorities[best] = -1.0 - self._count
        self._count += 1
        return best


class RecordedChooser:
    """Chooses the actions of a recording, in order."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = iter(actions)

    def __call__(self, world: World, actions: list[Action]) -> Action:
        """Return the next recorded action."""
        return next(self._actions)


def run(scope: Scope, chooser: Chooser, *, max_actions: int = 100_000, seed: int | None = None) -> World:
    """Run one world until all requests have ended.

    Raises:
        Violation: an invariant does not hold, no action is possible before the end, or there are too many actions.
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
    """Repeat recorded actions, with the exceptions that they raised."""
    world = World(scope)
    for action in actions:
        world.do(tuple(action))
    return world


def exhaust(scope: Scope, *, max_states: int = 10_000_000) -> Coverage:
    """Try every order of all possible actions, and check that an end can be reached from every state.

    Raises:
        Violation: an invariant does not hold, or from some state no end can be reached.
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
    """Raise `Violation` if an end cannot be reached from some state: follow the edges backwards from the ends."""
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
