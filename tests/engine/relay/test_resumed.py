"""An answer with which another engine went on says so, in its metadata and in the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from langchain_card.chat.answer import statistics
from langchain_card.core.messages import Emit
from langchain_card.core.request import Request, RequestStats, SamplingParams
from langchain_card.engine.relay.open_requests import OpenRequest
from langchain_card.runtime.kind import Kind
from langchain_card.serve.metrics import EngineState, Metrics

HERE, ELSEWHERE, UNMEASURED = (Kind("model", machine) for machine in ("here", "elsewhere", ""))


class Reader:
    """A consumer that only holds what it gets."""

    request = Request(0, (1, 2), SamplingParams(max_tokens=8))
    stats = RequestStats()

    def watch(self, stats: RequestStats) -> None:
        self.stats = stats

    def push(self, emit: Emit) -> None:
        """Nothing ends the answer early."""


def write(entry: OpenRequest, kind: Kind | None, token: int) -> None:
    entry.attempt = SimpleNamespace(kind=kind)  # type: ignore[assignment]
    entry.begin()
    entry.push(Emit(0, (token,), ("",)), RequestStats(rounds=1))


@pytest.mark.parametrize(
    ("kinds", "resumed"),
    [
        ([HERE], {}),
        ([HERE, HERE, HERE], {"died": 2}),
        ([HERE, ELSEWHERE, HERE], {"died": 2, "other machine": 1}),
        ([None, None], {"died": 1}),
        ([HERE, UNMEASURED, HERE], {"died": 2}),
        ([UNMEASURED, HERE], {"died": 1}),
    ],
)
def test_resumptions_are_counted(kinds: list[Kind | None], resumed: dict[str, int]) -> None:
    reader: Any = Reader()
    entry = OpenRequest(reader, lambda: 1.0)
    for token, kind in enumerate(kinds):
        write(entry, kind, token)
        entry.left(died=True)
    assert reader.stats.resumed == resumed and reader.stats.rounds == len(kinds)
    card = statistics(reader.stats, SamplingParams(), called=0.0)
    assert card.get("resumed", {}) == resumed and ("resumed" in card) == bool(resumed)


def test_a_request_that_only_waited_was_not_resumed() -> None:
    reader: Any = Reader()
    entry = OpenRequest(reader, lambda: 1.0)
    entry.left(died=True)
    write(entry, HERE, 5)
    entry.left()
    write(entry, HERE, 6)
    assert reader.stats.resumed == {"left": 1}


def test_the_metric() -> None:
    metrics = Metrics()
    for _ in range(2):
        stats = RequestStats(rounds=1, resumed={"died": 2, "other machine": 1})
        metrics.count_answer(SimpleNamespace(stats=stats, request=Reader.request, finished=False))  # type: ignore[arg-type]
    text = metrics.text(EngineState(0, 0, {})).decode()
    found = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "langchain_card_resumed_total"
    }
    assert found == {"died": 4, "other machine": 2}
