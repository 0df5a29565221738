"""Compiled code that a team shares, with a sum for each thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu.compiled import Array, Numbers, compiled
from langchain_card.runtime.cpu.team import Team, cores, together
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
