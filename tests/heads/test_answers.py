"""Answers of engines with a head are the target's own, whatever the head is like and wherever the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_card.heads.folder import KINDS
from langchain_card.testing import prompts
from tests.support.heads import HOW, write_head

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param({"exact": "strict"}, "random", marks=pytest.mark.slow),
        pytest.param({"isolate": True}, "random", marks=pytest.mark.slow),
        *(({"drafters": ("ngram",)}, how) for how in HOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_targets_own(kind: str, how: str, options: Any, tmp_path: Path) -> None:
    """All schedules, greedy and seeded, several requests at once. Two to six seconds each."""
    arch = "qwen2"
    head = write_head(kind, how, prompts.folder(arch), tmp_path / "head")
    with prompts.running(arch, draft_model=f"head?file={head}", **options) as engine:
        for schedule in ("sequential", "parallel", "auto"):
            cases = prompts.cases(arch)
            for case, done in zip(cases, prompts.answers(engine, cases, schedule), strict=True):
                assert done.token_ids == prompts.answer(arch, case), (schedule, case.params)
