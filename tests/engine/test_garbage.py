"""Garbage collections are rarer while engines are built, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from langchain_card.engine.garbage import _RareCollections

USUAL, RARE = (700, 10, 10), (100_000, 10, 10)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_the_last_of_two_contexts_restores_the_threshold() -> None:
    rare = _RareCollections()
    for _ in range(2):
        rare.__enter__()
        assert gc.get_threshold() == RARE
    rare.__exit__()
    assert gc.get_threshold() == RARE
    rare.__exit__()
    assert gc.get_threshold() == USUAL


def test_what_the_program_sets_meanwhile_stays() -> None:
    with _RareCollections():
        gc.set_threshold(5000, 20, 20)
    assert gc.get_threshold() == (5000, 20, 20)


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 5, 5)])
def test_collections_that_are_off_or_rarer_stay_so(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with _RareCollections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
