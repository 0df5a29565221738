"""Adapters of a chat model and of a decision model: chosen per call, named in answers and cache keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from pydantic import ValidationError

from langchain_card import CARDChatModel
from langchain_card.errors import InvalidInputError
from tests.support.adapters import Made, make

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(toy["model"], tmp_path_factory.mktemp("adapter"), seed=1, target_modules="all-linear")


@pytest.fixture(scope="module")
def texts(toy: dict[str, Any], made: Made) -> tuple[str, str]:
    """The answers of the model and of the merged one."""
    found = []
    for folder in (toy["model"], made.merged):
        with CARDChatModel(**{**toy, "model": folder}) as model:
            found.append(model.invoke("Hello").text)
    assert found[0] != found[1]
    return found[0], found[1]


def test_a_call_names_the_adapter(toy: dict[str, Any], made: Made, texts: tuple[str, str], other_toy: str) -> None:
    with CARDChatModel(**toy, adapters={"tuned": made.adapter}) as model:
        plain, tuned = model.invoke("Hello"), model.invoke("Hello", adapter="tuned")
        assert (plain.text, tuned.text) == texts
        assert "adapter" not in plain.response_metadata["card"]
        assert tuned.response_metadata["card"]["adapter"] == "tuned"
        assert [answer.text for answer in model.bind(adapter="tuned").batch(["Hello"] * 2)] == [texts[1]] * 2
        assert "".join(chunk.text for chunk in model.stream("Hello", adapter="tuned")) == texts[1]
        with pytest.raises(InvalidInputError, match="there is tuned"):
            model.invoke("Hello", adapter="tunde")
        with pytest.raises(InvalidInputError, match="there are no adapters"):
            model.invoke("Hello", model=other_toy, adapter="tuned")
    with CARDChatModel(**toy, adapters={"tuned": made.adapter}, adapter="tuned") as model:
        assert (model.invoke("Hello", adapter="").text, model.invoke("Hello").text) == texts
        assert CARDChatModel.from_config(model.to_config()).adapters == {"tuned": made.adapter}


def test_cached_answers_are_kept_apart(toy: dict[str, Any], made: Made, texts: tuple[str, str]) -> None:
    with CARDChatModel(**toy, adapters={"tuned": made.adapter}, cache=InMemoryCache()) as model:
        for _ in range(2):
            assert (model.invoke("Hello").text, model.invoke("Hello", adapter="tuned").text) == texts


def test_names_are_checked_where_the_model_is_made(toy: dict[str, Any], made: Made, tmp_path: Path) -> None:
    for adapters in ({"": made.adapter}, {"a\n": made.adapter}, {"a": 1}):
        with pytest.raises(ValidationError):
            CARDChatModel(**toy, adapters=adapters)
    with pytest.raises(ValidationError, match="goes without adapters"):
        CARDChatModel(**toy, adapters={"a": made.adapter}, execution="compiled")
    with pytest.raises(InvalidInputError, match=r"adapters\['a'\].*has no adapter_config.json"):
        CARDChatModel(**toy, adapters={"a": str(tmp_path)}).invoke("Hello")


def test_decisions_are_those_of_the_merged_model(toy: dict[str, Any], made: Made) -> None:
    decisions = pytest.importorskip("langchain_core.decisions", reason="needs langchain-core 1.8")
    from langchain_card.decisions.model import CARDDecisionModel

    fields = {name: value for name, value in toy.items() if name != "max_tokens"}
    asked = {"state": "abc", "questions": {"q": decisions.Choice(instructions="x", criteria={"a": "A", "b": "B"})}}
    with CARDDecisionModel(**fields, adapters={"tuned": made.adapter}, adapter="tuned") as tuned:
        got = tuned.invoke(asked).choices["q"].probabilities
    with CARDDecisionModel(**{**fields, "model": made.merged}) as merged:
        assert got == pytest.approx(merged.invoke(asked).choices["q"].probabilities, abs=1e-6)
    with CARDDecisionModel(**fields) as plain:
        assert got != pytest.approx(plain.invoke(asked).choices["q"].probabilities, abs=1e-3)
