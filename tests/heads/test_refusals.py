"""What a head cannot do is refused by name before an answer begins; what it takes is a part of the budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from langchain_card.config import EngineConfig
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.heads.folder import DESCRIPTION, WEIGHTS
from langchain_card.models.budget import needs_of
from langchain_card.models.loader import resolve
from langchain_card.runtime.heads import NUM_SCRATCH
from langchain_card.testing import prompts
from tests.support.heads import write_head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_head("eagle", "random", prompts.folder("llama"), tmp_path_factory.mktemp("head") / "head"))


def refusal(draft: str, target: str = "llama", **options: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        Engine(EngineConfig(prompts.folder(target), draft, max_model_len=128, **options))
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_transport": "process"}, "draft_transport = 'process'.*reads the target's states"),
        ({"execution": "compiled"}, "execution = 'compiled'.*states"),
        ({"stack": ("head?file=other",)}, "head"),
    ],
)
def test_places_where_there_are_no_states(head: Path, options: Any, words: str) -> None:
    assert re.search(words, refusal(f"head?file={head}", **options))


def test_a_head_has_one_target(head: Path) -> None:
    assert len(re.findall("sha256 [0-9a-f]{64}", refusal(f"head?file={head}", "qwen2"))) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "medusa"}, "must be one of eagle, specformer"),
        ({"intermediate_size": 32}, "other weights"),
        ({"target": {}}, "no folder of a head"),
    ],
)
def test_descriptions_that_do_not_fit(head: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / WEIGHTS).write_bytes((head / WEIGHTS).read_bytes())
    described = json.loads((head / DESCRIPTION).read_text())
    (tmp_path / DESCRIPTION).write_text(json.dumps(described | change))
    assert words in refusal(f"head?file={tmp_path}")


def test_files_that_are_none(head: Path, tmp_path: Path) -> None:
    assert "no folder of a head" in refusal(f"head?file={tmp_path / 'none'}")
    (tmp_path / DESCRIPTION).write_text((head / DESCRIPTION).read_text())
    (tmp_path / WEIGHTS).write_bytes((head / WEIGHTS).read_bytes()[:-100])
    assert "no folder of a head" in refusal(f"head?file={tmp_path}")


def test_a_head_is_a_part_of_the_budget(head: Path) -> None:
    config = EngineConfig(prompts.folder("llama"), None, dtype="float64", max_model_len=256)
    fields = {"dtype": "float64", "max_model_len": 256}
    (plain,), (own,) = (
        needs_of(resolve(each), 8, 8) for each in (config, EngineConfig(config.model, f"head?file={head}", **fields))
    )
    assert 0.9 < own.observers.weights * 2 / (head / WEIGHTS).stat().st_size <= 1.0, "in float32; the file has float64"
    assert own.kv(256) * 2 * (256 + 8) == plain.kv(256) * 3 * (256 + 8 + NUM_SCRATCH), "a third layer, and its slots"
