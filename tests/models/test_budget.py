"""What target, draft and KV take is known before any weights are read, and the error says what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.engine.drafter_hosts import SCRATCH as DRAFT_SCRATCH
from langchain_card.engine.engine import Engine
from langchain_card.errors import DeviceError
from langchain_card.limits import Limits
from langchain_card.models import loader
from langchain_card.models.budget import FIXED_RESERVE, ModelNeeds, check_budget, free_bytes, weight_bytes
from langchain_card.models.loader import Pair, acquire_model, load_model, release_model, resolve
from langchain_card.runtime.cpu.quantized_layers import LinearPart, QuantizedLinear
from langchain_card.runtime.grid_attention import MAX_GRAPH_ROWS
from langchain_card.runtime.kv_cache import TensorKV
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

SCRATCH = 16
MIB = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("budget")
    target = tiny.make_target("qwen2", folder / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.05)
    return resolve(EngineConfig(model=target, draft_model=draft, dtype="float64", max_model_len=1024))


def of(free: int) -> Callable[[torch.device], int]:
    return lambda device: free


def need(pair: Pair, num_seqs: int = 1, positions: int | None = None) -> int:
    """Bytes of both models with the KV of so many sequences, working memory apart."""
    assert pair.draft is not None
    parts = ModelNeeds("target", pair.target, SCRATCH), ModelNeeds("draft", pair.draft, DRAFT_SCRATCH)
    return sum(part.weights + num_seqs * part.kv(positions or pair.max_len) for part in parts)


def working(pair: Pair, positions: int | None = None) -> int:
    assert pair.draft is not None
    parts = ModelNeeds("target", pair.target, SCRATCH), ModelNeeds("draft", pair.draft, DRAFT_SCRATCH)
    return FIXED_RESERVE + sum(part.working(positions or pair.max_len) for part in parts)


def refusal(pair: Pair, num_seqs: int, free: int) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        check_budget(pair, num_seqs, SCRATCH, DRAFT_SCRATCH, free=of(free))
    return caught.value


def stored(model: torch.nn.Module) -> int:
    """Bytes of a loaded model's parameters and blocks; a table of embeddings in blocks stays in the file."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    wholes = {id(part.whole): part.whole for part in model.modules() if isinstance(part, LinearPart)}
    wholes |= {id(layer): layer for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    stored = {id(layer.weights.stored): layer.weights.stored for layer in wholes.values()}
    return total + sum(part.nbytes for part in stored.values())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_estimate_is_what_a_tiny_model_takes(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tiny.save_random(tiny.FAMILIES[family](), tmp_path)
    compare(EngineConfig(model=folder, draft_model=None, dtype="float64", max_model_len=500))


def test_estimate_is_what_the_real_small_model_takes() -> None:
    compare(EngineConfig(model="smollm2-135m", draft_model=None))


def compare(config: EngineConfig) -> None:
    pair = resolve(config)
    needs = ModelNeeds("target", pair.target, DRAFT_SCRATCH)
    model = load_model(pair.target)
    integers = pair.target.integer_kv
    kv = ModelRunner(model, max_len=pair.max_len, num_scratch=DRAFT_SCRATCH, integer_kv=integers).pool.kv
    assert needs.weights == pytest.approx(stored(model), rel=0.05)
    parts = kv.layers if isinstance(kv, TensorKV) else kv.blocks
    assert needs.kv(pair.max_len) == pytest.approx(sum(part.nbytes for part in parts), rel=0.01)


def test_all_fits_in_just_enough(pair: Pair) -> None:
    enough = need(pair, num_seqs=3) + working(pair)
    check_budget(pair, 3, SCRATCH, DRAFT_SCRATCH, free=of(enough))
    refusal(pair, 3, enough - 1)


def test_error_adds_the_parts_up(pair: Pair) -> None:
    error = refusal(pair, 1000, need(pair, num_seqs=7) + working(pair))
    words = r"device = 'cpu': 1,000 sequences of 1,024 positions need ([\d.]+) GiB \((.*)\), ([\d.]+) GiB are free"
    found = re.match(words, str(error))
    assert found is not None, str(error)
    parts = dict(part.rsplit(" ", 1) for part in found[2].split(", "))
    assert list(parts) == ["target weights", "draft weights", "target KV", "draft KV", "working memory"]
    assert sum(map(float, parts.values())) == pytest.approx(float(found[1]), abs=0.03)


def test_hint_is_the_most_sequences_that_fit(pair: Pair) -> None:
    error = refusal(pair, 1000, need(pair, num_seqs=7) + working(pair) + MIB // 2)
    assert error.hint == "limits.max_num_seqs = 7 fits at this max_model_len"


def test_hint_is_the_longest_sequence_that_fits(pair: Pair) -> None:
    error = refusal(pair, 4, need(pair, positions=384) + working(pair, 384))
    assert error.hint == "max_model_len = 384 fits for one sequence"
    assert error.limit.startswith("4 sequences of 1,024 positions")


def test_hint_says_that_the_weights_alone_are_too_large(pair: Pair) -> None:
    error = refusal(pair, 1, weight_bytes(pair.target))
    assert error.hint.startswith("the weights alone do not fit")
    assert error.limit.startswith("1 sequence of 1,024")


def test_weights_that_the_process_holds_cost_nothing(pair: Pair) -> None:
    room = need(pair) + working(pair) - weight_bytes(pair.target)
    refusal(pair, 1, room)
    acquire_model(pair.target)
    try:
        check_budget(pair, 1, SCRATCH, DRAFT_SCRATCH, free=of(room))
    finally:
        release_model(pair.target)


def test_captured_steps_take_memory_on_cuda(pair: Pair) -> None:
    """The logits of the largest one, and what it computes on the way; all others use the same memory."""
    vocab_size, hidden = tiny.SHAPE["vocab_size"], tiny.SHAPE["hidden_size"]
    here, there = (
        ModelNeeds("target", replace(pair.target, device=torch.device(name)), SCRATCH).working(1024)
        for name in ("cpu", "cuda:0")
    )
    assert there - here >= 8 * MAX_GRAPH_ROWS * (vocab_size + 4 * hidden)


def test_each_device_is_asked_for_its_own(pair: Pair) -> None:
    """The draft on a device that is full; the target's has room."""
    assert pair.draft is not None
    draft = replace(pair.draft, device=torch.device("meta"))
    apart = replace(pair, draft=draft)
    with pytest.raises(DeviceError, match=r"device = 'meta': .*draft KV") as caught:
        check_budget(apart, 1, SCRATCH, DRAFT_SCRATCH, free=lambda device: 0 if device.type == "meta" else 1 << 40)
    assert "target" not in caught.value.limit


def test_engine_asks_before_it_reads_weights(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tiny_config: dict[str, Any]
) -> None:
    def refuse(spec: object) -> None:
        raise AssertionError(f"weights were read: {spec}")

    monkeypatch.setattr(loader, "load_model", refuse)
    count = 2 * free_bytes(torch.device("cpu")) // need(pair) + 1
    many = Limits(max_num_seqs=count, max_step_rows=count)
    with pytest.raises(DeviceError, match=r"sequences of 1,024 positions need .*limits\.max_num_seqs = \d+ fits"):
        Engine(EngineConfig(**tiny_config, limits=many))


@pytest.fixture
def tiny_config(pair: Pair) -> dict[str, Any]:
    assert pair.draft is not None
    return {"model": pair.target.name, "draft_model": pair.draft.name, "dtype": "float64", "max_model_len": 1024}


def test_as_many_sequences_as_half_of_the_free_memory_holds(pair: Pair) -> None:
    room = 2 * (need(pair, num_seqs=5) + working(pair))
    assert check_budget(pair, None, SCRATCH, DRAFT_SCRATCH, free=of(room)) == 5
    assert check_budget(pair, None, SCRATCH, DRAFT_SCRATCH, free=of(room - 1)) == 4
    assert check_budget(pair, None, SCRATCH, DRAFT_SCRATCH, free=of(1 << 40)) == 16
    alone = need(pair, num_seqs=1) + working(pair)
    assert check_budget(pair, None, SCRATCH, DRAFT_SCRATCH, free=of(alone)) == 1, "one may take all of it"
    with pytest.raises(DeviceError):
        check_budget(pair, None, SCRATCH, DRAFT_SCRATCH, free=of(alone - 1))


@pytest.mark.slow
def test_the_engine_says_how_many_sequences_it_holds(tiny_config: dict[str, Any]) -> None:
    for limits, strict, count in ((Limits(), False, 16), (Limits(), True, 1), (Limits(max_step_rows=4), False, 4)):
        exact = "strict" if strict else "default"
        with Engine(EngineConfig(**tiny_config, limits=limits, exact=exact)) as engine:
            assert engine.config.limits.max_num_seqs == count
