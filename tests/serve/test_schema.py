"""Requests made from the application's own description: whatever comes, the answer is one that it describes."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode, checks

from langchain_card import CARDChatModel
from tests.support.isolated import process_of
from tests.support.played import make_pair
from tests.support.processes import wait_until
from tests.support.served import NAME, served

EXAMPLES = 1500 if os.environ.get("CARD_EXPLORE") else 300
CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
ROUTES = {
    "/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/models": "GET", "/v1/models/{name}": "GET",
    "/version": "GET", "/metrics": "GET", "/health": "GET",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description; in the end the engine's process is still the first one, and well, and nothing runs."""
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 4, "max_model_len": 512, "isolate": True}
    with CARDChatModel(**fields).load() as model, served(model) as url:
        process = process_of(model.engine)
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
        wait_until(lambda: model.engine.num_open == 0)
        assert process_of(model.engine) == process
        assert all(health.ok for health in model.engine.health().values())


def test_all_routes_are_described(described: Any) -> None:
    found = {operation.path: operation.method.upper() for operation in operations(described)}
    assert found == ROUTES


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, mode) for path in ROUTES for mode in GenerationMode if ROUTES[path] == "POST" or mode.value == "positive"],
)
@pytest.mark.slow
def test_explored_from_the_description(described: Any, path: str, mode: GenerationMode) -> None:
    (operation,) = (each for each in operations(described) if each.path == path)
    statuses: collections.Counter[int] = collections.Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(case=operation.as_strategy(generation_mode=mode), few=strategies.booleans())
    def explore(case: Any, few: bool) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body["model"] = NAME
            case.body |= {name: case.body[name] % 6 for name in ("max_tokens", "n") if case.body.get(name)}
            if few:  # most of what is drawn for the others is refused
                names = ("model", "stream", "card", "user", "schedule", "top_k", "logprobs", "parallel_tool_calls")
                prompt = {"prompt": "Q"} if "prompt" in case.body else {"messages": [{"role": "user", "content": "Q"}]}
                case.body = {name: case.body[name] for name in names if name in case.body} | prompt
        response = case.call(timeout=20)
        case.validate_response(response, checks=CHECKED)
        statuses[response.status_code] += 1

    explore()
    print(path, dict(statuses))
    assert statuses.total() >= EXAMPLES or ROUTES[path] == "GET"
    assert 200 in statuses or mode is GenerationMode.NEGATIVE or "{" in path


def operations(described: Any) -> list[Any]:
    return [result.ok() for result in described.get_all_operations()]
