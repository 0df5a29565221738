"""Options that several commands share become the fields of `EngineConfig` that they name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from langchain_card.cli.fields import add_engine_fields, engine_fields
from langchain_card.config import EngineConfig
from langchain_card.errors import InvalidInputError


def config(*args: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_fields(parser)
    return EngineConfig(**engine_fields(parser.parse_args(args)))


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ((), {}),
        (("--kv-dtype", "float"), {"kv_dtype": "float"}),
        (("--draft-context", "300"), {"draft_context": 300}),
        (("--draft-context", "all"), {"draft_context": None}),
        (("--max-model-len", "512"), {"max_model_len": 512}),
    ],
)
def test_options_become_fields(args: tuple[str, ...], fields: dict[str, Any]) -> None:
    assert config(*args) == EngineConfig(**fields)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kv-dtype", "int4"), "invalid choice: 'int4'"),
        (("--draft-context", "most"), "'most' must be a number of tokens, or all"),
    ],
)
def test_other_values_are_refused(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        config(*args)
    assert said in capsys.readouterr().err


def test_a_draft_reads_some_tokens() -> None:
    with pytest.raises(InvalidInputError, match=r"draft_context = 15.*None for all"):
        config("--draft-context", "15")
