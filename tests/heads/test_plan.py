"""What `plan` and `doctor` know of a head: the chains that it would draft, and whose it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_card import cli
from langchain_card.bench import teacher_forced
from langchain_card.bench.teacher_forced import predict_with_head
from langchain_card.config import EngineConfig
from langchain_card.heads.folder import DESCRIPTION
from langchain_card.models.loader import resolve
from langchain_card.testing import prompts
from tests.support.heads import Reference, write_head

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["eagle", "specformer"])
def head(request: Any, tmp_path: Path) -> Path:
    return Path(write_head(request.param, "random", prompts.folder("llama"), tmp_path / "head"))


def test_chains_are_those_that_the_head_drafts(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of an answer over several windows, against one pass over the whole text."""
    monkeypatch.setattr(teacher_forced, "WINDOW", 5)
    monkeypatch.setattr(teacher_forced, "num_cores", lambda: 1)
    target = prompts.folder("llama")
    pair = resolve(EngineConfig(target, None, dtype="float64", max_model_len=256))
    prompt, answer = prompts.encode("def f(x):"), prompts.encode(" return")
    ((*chains,),), *seconds = predict_with_head(str(head), pair, [(prompt, answer)], 3)
    assert len(chains) == len(answer) and all(each > 0 for each in seconds)
    reference = Reference(target, str(head))
    for place, chain in enumerate(chains):
        text, path = [*prompt, *answer[:place]], list[int]()
        while len(path) < 3:
            path.append(int(reference.logits(text, path).argmax()))
        assert chain == path


def test_plan_and_doctor_take_a_head(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = json.loads((head / DESCRIPTION).read_text())
    (head / DESCRIPTION).write_text(json.dumps(described | {"answers": 1000, "accepted_length": 1.5}))
    fields = ["--model", prompts.folder("llama"), "--draft-model", f"head?file={head}"]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(2)))
    assert cli.main(["plan", *fields, "--prompts", str(questions), "--max-tokens", "16", "--no-measure"]) == 0
    assert f"takes from head?file={head}" in capsys.readouterr().out
    assert cli.main(["doctor", *fields, "--no-measure"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{described['weights']:,} weights" in shown and "1,000 tokens" in shown and "1.50 tokens" in shown
