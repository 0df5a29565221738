"""An idle driver waits for the requests that were announced, and no longer than it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from langchain_card.core.messages import Draining, Event
from langchain_card.engine import inbox
from langchain_card.engine.inbox import Inbox

SECONDS = 1.0


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    monkeypatch.setattr(inbox, "GATHER_SECONDS", SECONDS)
    yield Inbox(time.perf_counter)


def come(box: Inbox) -> None:
    box.post(Draining)
    box.count_request()


def taken(box: Inbox, *, is_idle: bool = True) -> tuple[list[Event], float]:
    """Without sleeping for anything else, and in how many seconds."""
    begun = time.perf_counter()
    return box.take(0.0, lambda: is_idle), time.perf_counter() - begun


def test_all_that_were_announced_come_together(box: Inbox) -> None:
    box.announce(3)
    for _ in range(2):
        come(box)
    late = threading.Timer(0.2, come, [box])
    late.start()
    events, seconds = taken(box)
    late.join()
    assert len(events) == 3 and 0.1 < seconds < 0.9 * SECONDS
    assert taken(box)[1] < 0.1, "nobody else was announced"


def test_who_never_comes_is_not_waited_for(box: Inbox) -> None:
    box.announce(2)
    come(box)
    events, seconds = taken(box)
    assert len(events) == 1 and 0.9 * SECONDS < seconds < 2 * SECONDS
    assert taken(box)[1] < 0.1


def test_a_driver_with_work_waits_for_nobody(box: Inbox) -> None:
    box.announce(2)
    come(box)
    events, seconds = taken(box, is_idle=False)
    assert len(events) == 1 and seconds < 0.1


def test_nothing_is_taken_behind_the_end(box: Inbox) -> None:
    come(box)
    box.close()
    come(box)
    assert len(taken(box)[0]) == 1 and box.closed
