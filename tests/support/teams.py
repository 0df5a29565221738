"""Compiled code that a team shares, with a sum for each thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from langchain_card.runtime.cpu.compiled import Array, Numbers, Slots, compiled
from langchain_card.runtime.cpu.team import Team, cores, together
from langchain_card.runtime.cpu.vectors import I64, intrinsic
from langchain_card.runtime.threads import use_threads

ROUNDS = 300


@compiled()
def _mark(out: Numbers, first: float, row: Array, thread: int, threads: int) -> None:
    out[thread] += first + row.sum() + threads


_marks = together(_mark)


@compiled()
def mark_often(out: Numbers, row: Array, rounds: int, team: Team) -> None:
    for i in range(rounds):
        _marks(team, (out, i, row))


@compiled()
def _fail(failing: int, thread: int, threads: int) -> None:
    if thread == failing:
        raise ValueError("planted")


_fails = together(_fail)


@compiled()
def _fail_once(failing: int, team: Team) -> None:
    _fails(team, (failing,))


class _Pair(NamedTuple):
    left: Array
    right: Array


@intrinsic
def _counter(context: Any, array: Any) -> Any:
    """The address of the counter of an array's users; 0 if they are not counted."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        own = context.make_array(signature.args[0])(context, b, args[0])
        return b.ptrtoint(own.meminfo, I64)

    return types.int64(array), generate


@compiled()
def _slice(pair: _Pair, out: Numbers, counted: Slots, thread: int, threads: int) -> None:
    counted[thread] = _counter(pair.left) | _counter(pair.right[thread:])
    out[thread] = pair.left[thread:].sum() + pair.right[: thread + 1].sum()


_slices = together(_slice)


@compiled()
def slice_often(rounds: int, out: Numbers, counted: Slots, team: Team) -> None:
    for i in range(rounds):  # arrays that live for one call
        _slices(team, (_Pair(np.full(4, np.float32(i)), np.full(4, np.float32(2 * i))), out, counted))


def fail(threads: int, failing: int) -> None:
    """Share a function that raises an error in one thread."""
    use_threads(threads)
    with cores() as team:
        _fail_once(failing, team)


def results(threads: int, rounds: int = ROUNDS) -> Any:
    use_threads(threads)
    out = np.zeros(threads)
    with cores() as team:
        mark_often(out, np.ones(3, np.float32), rounds, team)
    return out


def expected(threads: int, rounds: int = ROUNDS) -> Any:
    return np.full(threads, rounds * (3 + threads) + rounds * (rounds - 1) / 2)
