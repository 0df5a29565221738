"""Heads in blocks of 8 and 4 bits: on disk, and beside a target in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.heads.folder import KINDS, WEIGHTS, load_head, save_head
from langchain_card.models.loader import acquire_model, release_model, resolve
from langchain_card.models.store import ModelStore
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose rows are whole blocks of 256."""
    from transformers import Qwen2Config

    torch.manual_seed(0)
    shape = {**tiny.SHAPE, **SIZES}
    return tiny.save_random(Qwen2Config(**shape), tmp_path_factory.mktemp("blocks") / "target")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_blocks(kind: str, bits: int, target: str, tmp_path: Path) -> None:
    """Loaded for a float target, it has the rounded numbers; for a target in blocks, the layers compute with them."""
    fields: dict[str, Any] = {"max_model_len": 128, "device": "cpu"}
    pairs = [resolve(EngineConfig(target, None, quantization=form, **fields)) for form in (None, "int8")]
    name = {"name": target, "sha256": ModelStore().content_hash(Path(target))}
    floats, blocks = (acquire_model(pair.target) for pair in pairs)
    try:
        torch.manual_seed(1)
        head = KINDS[kind](floats, ids=torch.arange(0, 320, 2)).float()
        for weight in head.parameters():
            if weight.requires_grad and weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.05)
        whole, folder = save_head(head, tmp_path / "whole", name), save_head(head, tmp_path / "head", name, bits=bits)
        assert (folder / WEIGHTS).stat().st_size < (whole / WEIGHTS).stat().st_size * (bits + 1.5) / 32
        rounded, packed = load_head(folder, floats), load_head(folder, blocks)
        assert rounded.ids is not None and rounded.ids.tolist() == [*range(0, 320, 2)]
        states = torch.randn(len(head.taps), 5, 256)
        for own, other, tolerance in ((head, rounded, 0.02 if bits == 8 else 0.2), (rounded, packed, 0.02)):
            wanted, found = own.fuse(states), other.fuse(states)
            assert (found - wanted).norm() < tolerance * wanted.norm()
    finally:
        for pair in pairs:
            release_model(pair.target)
    params = SamplingParams(max_tokens=24, schedule="sequential")
    answers = []
    for draft in (None, f"head?file={folder}"):
        with Engine(EngineConfig(target, draft, quantization="int8", drafters=(), **fields)) as engine:
            answers.append(engine.submit([*range(40, 60)], params).result())
    plain, done = answers
    assert done.token_ids == plain.token_ids and done.stats.verified > 0
