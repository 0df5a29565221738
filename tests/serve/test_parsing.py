"""Large bodies: the number of values is bounded before they are parsed, and nothing of them is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from langchain_card import CARDChatModel
from langchain_card.serve.parsing import _num_values
from tests.support.played import make_pair
from tests.support.served import CHAT, TEXT, ask, body, error_of, said, served

pytestmark = pytest.mark.usefixtures("one_thread")

MANY = 300_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CARDChatModel]:
    fields = make_pair(tmp_path_factory.mktemp("pair")) | {"max_tokens": 8}
    with CARDChatModel(**fields).load() as model:
        yield model


@pytest.fixture(scope="module")
def http(model: CARDChatModel) -> Iterator[httpx.Client]:
    with served(model, max_body_bytes=1 << 23) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def count(value: Any) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return sum(1 + count(item) for item in (value.values() if isinstance(value, dict) else value)) + (not value)


def draw(rng: random.Random, depth: int) -> Any:
    text = "".join(rng.choices('\\",:[]{}é x\n', k=rng.randrange(9)))
    if depth and rng.random() < 0.7:
        items = [draw(rng, depth - 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.5 else {f"{number}{text}": item for number, item in enumerate(items)}
    return rng.choice([text, None, True, 7, -0.5])


def test_values_are_counted_as_the_parser_would() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        value = draw(rng, 4)
        for indent in (None, 1):
            assert _num_values(json.dumps(value, indent=indent).encode()) == count(value), value


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": [1] * MANY}),
        (CHAT, {"messages": [{}] * MANY}),
        (CHAT, {"x": [[]] * MANY}),
        (CHAT, {"x": {str(number): "," for number in range(MANY)}}),
    ],
    ids=["token ids", "messages", "lists", "an object"],
)
def test_too_many_values_are_refused(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    error = error_of(response := http.post(path, json=body(path) | fields))
    assert (response.status_code, error["code"]) == (413, "request_too_large")
    assert error["message"].startswith("body: must hold 262,144 values at most") and "Hint: " in error["message"]
    assert http.post(CHAT, json=ask(max_tokens=1)).status_code == 200


def test_characters_of_texts_are_no_values(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json=ask(**said('[{"a": "\\' * MANY))))
    assert error["code"] == "context_length_exceeded"
    assert http.post(CHAT, json=ask(max_tokens=1) | {"x": ",[{" * MANY}).status_code == 200
