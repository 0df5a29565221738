"""Wherever figures of an answer are shown it is said that the rule is lossy, and how much it kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from langchain_card import CARDChatModel
from langchain_card.cli.render import status
from langchain_card.core.request import RequestStats
from langchain_card.engine import build
from tests.simulation import FixedPolicy
from tests.support.served import ask, served

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"


@pytest.fixture
def model(tiny_pairs: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[CARDChatModel]:
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy(widths=(2,) * 8))
    target, draft = tiny_pairs["llama"]
    rule = "loose?threshold=0&window=1"
    fields: dict[str, Any] = {"dtype": "float64", "temperature": 0.8, "seed": 5, "max_tokens": 50}
    with CARDChatModel(model=target, draft_model=draft, schedule="sequential", acceptance=rule, **fields) as model:
        yield model


def test_metadata_of_a_chat_model(model: CARDChatModel, toy: dict[str, Any]) -> None:
    card = model.invoke("hi").response_metadata["card"]
    assert card["lossy"] is True and card["rescued"] > 0
    *_, last = model.stream("hi")
    streamed = last.response_metadata["card"]
    assert streamed["lossy"] is True and streamed["rescued"] > 0  # as many or not: drafts have learnt meanwhile
    with CARDChatModel(**toy) as exact:
        card = exact.invoke("hi").response_metadata["card"]
        assert card["lossy"] is False and "rescued" not in card


def test_answers_streams_and_metrics_of_a_server(model: CARDChatModel) -> None:
    with served(model) as url, httpx.Client(base_url=url, timeout=60) as http:
        card = http.post(CHAT, json=ask()).json()["card"]
        assert card["lossy"] is True and card["rescued"] > 0
        body = http.post(CHAT, json=ask(stream=True, card=True)).text
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        stats = [chunk["card"]["stats"] for chunk in chunks if "stats" in chunk.get("card", {})]
        assert all(each["lossy"] is True for each in stats) and stats[-1]["rescued"] == card["rescued"]
        counted = dict(
            line.split() for line in http.get("/metrics").text.splitlines() if line.startswith("langchain_card_resc")
        )
        assert float(counted["langchain_card_rescued_tokens_total"]) == 2 * card["rescued"]


@pytest.mark.parametrize("rule", ["exact", "loose"])
@pytest.mark.slow
def test_the_command_line_says_it_at_the_start(rule: str) -> None:
    code = "import sys; from langchain_card.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "chat",
        "--model",
        "smollm2-135m",
        "--draft-model",
        "ngram",
        "--max-tokens",
        "4",
    ]
    done = subprocess.run([*command, "--acceptance", rule], input="Hi.\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("lossy: ")]
    assert len(said) == (rule != "exact")


def test_the_line_under_an_answer() -> None:
    counts: dict[str, Any] = {
        "schedule": "sequential",
        "rounds": 3,
        "output_tokens": 9,
        "ended": 2.0,
        "first_token": 1.0,
    }
    assert "lossy: 2 kept" in status(RequestStats(lossy=True, rescued=2, **counts))
    assert "lossy" not in status(RequestStats(**counts))
