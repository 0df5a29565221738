"""Levels of a stack with vocabularies of their own: what a level cannot say it is not asked to forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.core.policy import Policy
from langchain_card.drafters.draft_step import DraftStep
from langchain_card.engine import build
from langchain_card.models.vocabulary import VocabularyMap
from tests.simulation import FixedPolicy
from tests.support import tiny
from tests.support.exactness import Figures, compare
from tests.support.vocabulary_pair import PAIR, SETTINGS, ask, make_pair, wanted_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a draft of its vocabulary, and one of another."""
    target, other = make_pair(tmp_path_factory.mktemp("pair"), noise=0.005)
    alike = tiny.make_draft(target, tmp_path_factory.mktemp("alike"), noise=0.02)
    AutoTokenizer.from_pretrained(target).save_pretrained(alike)
    return {"target": target, "alike": alike, "other": other}


@pytest.mark.parametrize("order", [("alike", "other"), ("other", "alike")])
@pytest.mark.slow
def test_answers_are_the_targets_own(
    models: dict[str, str], order: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost, plan = list[bool](), DraftStep.plan.__func__  # type: ignore[attr-defined]

    def noting(cls: type[DraftStep], *told: Any) -> DraftStep:
        lost.append((block := plan(cls, *told)).lost)
        return block

    def policy(**_: Any) -> Policy:
        return FixedPolicy(widths=(4,) * 4)

    monkeypatch.setattr(DraftStep, "plan", classmethod(noting))
    monkeypatch.setattr(build, "Controller", policy)
    draft, lower = (models[name] for name in order)
    config = EngineConfig(models["target"], draft, stack=(f"{lower}?block=3", "ngram?block=4"), **PAIR)
    asked, figures = ask(AutoTokenizer.from_pretrained(models["target"])), Figures()
    compare(config, asked, wanted_of(replace(config, stack=()), asked), ("sequential", "parallel"), figures)
    assert figures.different == 0 and all(figures.accepted[f"{name} sequential"] > 0 for name in SETTINGS)
    assert any(lost) == (order[1] == "other"), "it is asked for what follows tokens that it does not know"
    assert not [record for record in caplog.records if "died" in record.message]


def test_what_compares_tokens_refuses_such_a_draft(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", models["target"], "--draft-model", models["other"]]) == 2
    error = capsys.readouterr().err
    assert models["other"] in error and "another vocabulary" in error and "Hint" in error


def test_what_is_shared_stays_so() -> None:
    """Also when a head is seen that was cut."""
    import torch

    from tests.support import vocabularies

    target, draft = (
        vocabularies.byte_pairs("the other " * 9, 300, "<|end|>"),
        vocabularies.byte_pairs("a b" * 9, 262, "</s>"),
    )
    found = VocabularyMap(target, draft, (len(target), len(draft)))
    before = [found.shares(token) for token in range(len(target))]
    found.to_target(torch.zeros(1, 8))
    found.share(torch.zeros(1, 8))
    assert [found.shares(token) for token in range(len(target))] == before and not all(before)
