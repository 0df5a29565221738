"""Rounded to blocks of 8 bits, a model of any family computes nearly what it does in floats (half a second each)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

TEXT = [(7 * i * i + 3 * i) % 250 for i in range(1, 60)]


def logits(**settings: Any) -> torch.Tensor:
    """After each token of the text."""
    spec = resolve(EngineConfig(draft_model=None, **settings)).target
    runner = ModelRunner(load_model(spec), max_len=128, num_scratch=16, integer_kv=spec.integer_kv)
    return torch.cat([*runner.follow(runner.open(), TEXT)]).float()


REFUSED = ("gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe")  # by the conversion, which names what it lacks


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in REFUSED])
def test_blocks_compute_nearly_what_floats_do(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tiny.save_random(tiny.FAMILIES[family](), tmp_path)
    floats, blocks = logits(model=folder, quantization=None), logits(model=folder, quantization="int8")
    assert (blocks - floats).norm() < 0.15 * floats.norm()
