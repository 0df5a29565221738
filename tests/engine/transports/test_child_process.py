"""A process of our own: all that it says arrives, then its death, once and with the reason."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from langchain_card.core.messages import End
from langchain_card.engine.transports.child_process import ChildProcess
from langchain_card.engine.transports.frames import DOWN, UP, Exhausted, Start
from langchain_card.engine.transports.thread import MessageQueue
from langchain_card.errors import DeviceError, EngineError
from tests.support import children
from tests.support.processes import wait_until


def start(how: str, heard: list[Any]) -> ChildProcess:
    """A process that says much and dies; it is heard slowly."""

    def hear(message: Any) -> None:
        time.sleep(0.005)
        heard.append(message)

    return ChildProcess(
        "langchain_card.engine.transports.worker_main",
        "test process",
        thread_name="card-test",
        sends=DOWN,
        takes=UP,
        first=Start("tests.support.children:saying", {"how": how}),
        outbox=MessageQueue(),
        on_message=hear,
        on_death=heard.append,
    )


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("device", DeviceError, "draft_device = 'cuda:7': has no room for it"),
        ("raises", EngineError, "test process = 'KeyError': 'planted'"),
        ("exits", EngineError, r"test process = \d+: ended with exit code 4"),
    ],
)
def test_a_death_comes_once_and_last(how: str, kind: type[Exception], reason: str) -> None:
    """Though the thread that writes knows of it long before the one that reads."""
    heard: list[Any] = []
    child = start(how, heard)
    writer = child._threads[0]
    while writer.is_alive():
        child.send(End("toy", 0))
        time.sleep(0.001)
    assert len(heard) < children.SAID, "it is gone, and the reader has still much to hear"
    wait_until(lambda: len(heard) > children.SAID)
    child.close()
    *said, death = heard
    assert said == [Exhausted((i,)) for i in range(children.SAID)]
    with pytest.raises(kind, match=reason):
        raise death


def test_who_closes_it_is_told_of_no_death() -> None:
    heard: list[Any] = []
    child = start("exits", heard)
    wait_until(lambda: bool(heard))
    for _ in range(2):
        child.close()
    child.send(End("toy", 0))
    assert not [message for message in heard if isinstance(message, BaseException)]
    assert child._process.returncode is not None


def test_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineError, match="test process = '/nowhere/python': could not be started"):
        start("exits", [])
