"""`langchain-card models recommend`: estimates without weights, and which pairs they lead to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from langchain_card import CARDChatModel
from langchain_card.cli import main
from langchain_card.cli.recommend import PAIRS, Fit, describe, expected_needs, measure, recommended
from langchain_card.config import EngineConfig
from langchain_card.models.budget import ModelNeeds
from langchain_card.models.download import BUILTINS
from langchain_card.models.loader import resolve
from langchain_card.runtime.families import empty_model
from tests.support import SMALL

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """An empty store, unless a test compares with models that are here."""
    if "stored" not in request.fixturenames:
        monkeypatch.setenv("LANGCHAIN_CARD_HOME", str(tmp_path / "not" / "there"))


@pytest.fixture
def stored() -> None:
    """The user's own store."""


@pytest.mark.parametrize("name", BUILTINS)
def test_the_shape_of_a_builtin_is_that_of_its_file(name: str) -> None:
    """Bits of the file for each number of the model: a format's, with the tensors that have another one.

    The rows of the 0.5B models are no multiple of Q4_K's 256 numbers, and most have 5 or 8 bits.
    """
    builtin = BUILTINS[name]
    fields = dict(builtin.shape)
    numbers = sum(p.numel() for p in empty_model(AutoConfig.for_model(fields.pop("model_type"), **fields)).parameters())
    usual = {"0.5b": 6.2, "q4_k_m": 5.0, "q8_0": 8.5, "q4_1": 5.7}
    bits = next(bits for kind, bits in usual.items() if kind in builtin.hub_file.lower())
    assert 8 * builtin.size / numbers == pytest.approx(bits, rel=0.04)


def compare(role: str, needs: ModelNeeds, expected: ModelNeeds) -> None:
    assert expected.weights == pytest.approx(needs.weights, rel=0.03), role
    assert (expected.kv(4096), expected.working(4096)) == (needs.kv(4096), needs.working(4096))


def test_what_is_expected_of_a_model_is_what_its_files_say(stored: None) -> None:
    pair = resolve(EngineConfig(model=SMALL, draft_model=None))
    compare("target", ModelNeeds("target", pair.target, 16), expected_needs("target", SMALL, CPU, 16))


@pytest.mark.pair
def test_what_is_expected_of_the_built_in_pair_is_what_its_files_say(stored: None) -> None:
    pair = resolve(EngineConfig())
    for role, spec in (("target", pair.target), ("draft", pair.draft)):
        assert spec is not None
        compare(role, ModelNeeds(role, spec, 16), expected_needs(role, spec.name, CPU, 16))


def chosen(gib: float, gigabytes_a_second: float) -> list[str]:
    return [fit.model for fit in recommended(measure(CPU, int(gib * GIB), gigabytes_a_second * 1e9))]


@pytest.mark.parametrize(
    ("gib", "speed", "models"),
    [
        (64, 100, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b", "qwen3-8b"]),
        (64, 25, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b", "qwen3-4b"]),  # the larger one is too slow to read along
        (64, 12, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b"]),
        (64, 1, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b"]),
        (7, 100, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b", "qwen3-4b"]),  # the larger one does not fit
        (4, 100, ["qwen2.5-coder-1.5b", "qwen2.5-1.5b"]),
        (1, 100, []),
    ],
)
def test_the_best_pair_that_fits_and_is_readable(gib: float, speed: float, models: list[str]) -> None:
    assert chosen(gib, speed) == models


def test_a_pair_fits_if_the_engine_would_load_it() -> None:
    one = measure(CPU, 64 * GIB, None)[0]
    assert measure(CPU, one.alone, None)[0].num_seqs == 1
    assert measure(CPU, one.alone - 1, None)[0].num_seqs == 0
    many = measure(CPU, 2 * one.full, None)[0]
    assert many.num_seqs == 16 and many.full == one.full > one.alone


@pytest.mark.parametrize("fit", measure(CPU, 64 * GIB, None), ids=lambda fit: fit.model)
def test_the_line_of_code_makes_the_pair(fit: Fit) -> None:
    model = eval(fit.code, {"CARDChatModel": CARDChatModel})
    assert (model.model, model.draft_model) == (fit.model, fit.draft_model)
    assert model.profile["max_input_tokens"] > 4096


def test_the_report_says_what_there_is_to_know() -> None:
    fits = measure(CPU, 64 * GIB, 25e9)
    lines = [*describe(fits, CPU, 64 * GIB, 25e9)]
    assert lines[0].startswith("64.0 GiB of cpu are free, read at 25.0 GB/s; no GPU")
    rows = [line for line in lines if line.startswith(tuple(use for use, *_ in PAIRS)) and "GiB" in line]
    assert ["1.6 GB" in row for row in rows] == [True, True, False, False], "nothing is here, so all is downloaded"
    assert "For code: CARDChatModel()" in lines
    assert 'For chat: CARDChatModel(model="qwen2.5-1.5b", draft_model="qwen2.5-0.5b")' in lines
    assert 'For chat; thinks first: CARDChatModel(model="qwen3-4b", draft_model="qwen3-0.6b")' in lines
    assert "--model qwen3-4b --draft-model qwen3-0.6b" in "\n".join(lines)
    assert "None fits" in "\n".join(describe(measure(CPU, GIB, 25e9), CPU, GIB, 25e9))


def test_what_is_here_is_not_downloaded(stored: None) -> None:
    sizes = [fit.download for fit in measure(CPU, GIB, None)]
    assert sizes[-1] in (0, BUILTINS["qwen3-8b"].size, BUILTINS["qwen3-8b"].size + BUILTINS["qwen3-0.6b"].size)


def test_on_a_gpu_the_weights_are_floats() -> None:
    gpu = torch.device("cuda", 0)
    on_gpu, on_cpu = (expected_needs("target", "qwen3-4b", device, 16) for device in (gpu, CPU))
    assert on_gpu.weights == pytest.approx(2 * 4.02e9, rel=0.01)  # two bytes for each of its 4.0 billion numbers
    assert on_gpu.weights > 3 * on_cpu.weights


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A few seconds: the memory's speed is measured."""
    assert main(["models", "recommend"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-8b" in out and "GB/s" in out
