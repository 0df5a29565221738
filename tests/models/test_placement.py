"""Layers over several devices: which goes where, what each device must hold, and a model loaded by such a map."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.utils import check_device_map

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import DeviceError
from langchain_card.models import loader
from langchain_card.models.budget import ModelNeeds, check_budget
from langchain_card.models.loader import Pair, resolve
from langchain_card.models.placement import place, shares
from langchain_card.runtime.families import decoder_layers, empty_model
from tests.support import naive, tiny

GPUS = [torch.device("cuda", index) for index in range(3)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_has_a_device_and_layers_keep_their_order(family: str) -> None:
    config = tiny.FAMILIES[family]()
    config.num_hidden_layers = 8
    config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types * 4
    model = empty_model(config)
    placed = place(model, GPUS, [1, 1, 1])
    check_device_map(model, placed)  # accelerate's own: each parameter once
    names = {module: name for name, module in model.named_modules()}
    layers = [placed[names[layer]] for layer in decoder_layers(model)]
    assert len(layers) == 8
    assert layers == sorted(layers, key=GPUS.index)
    assert {device for name, device in placed.items() if name not in map(names.get, decoder_layers(model))} == {GPUS[0]}
    found = shares(model, placed)
    assert sum(weights for weights, _ in found.values()) == pytest.approx(1)
    assert sum(kv for _, kv in found.values()) == pytest.approx(1)


def test_devices_hold_weights_in_proportion_to_their_size() -> None:
    config = tiny.FAMILIES["llama"]()
    config.num_hidden_layers = 64
    model = empty_model(config)
    found = shares(model, place(model, GPUS, [1, 2, 5]))
    assert [found[device][0] for device in GPUS] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.02)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    folder = tiny.make_target("llama", tmp_path)
    return resolve(EngineConfig(model=folder, draft_model=None, dtype="float64", max_model_len=256))


def test_budget_asks_every_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "capacity", lambda device: 1)
    spread = replace(pair, target=replace(pair.target, device=GPUS[0], others=(GPUS[1],)))
    needs = ModelNeeds("target", spread.target, 16)
    weights = {device: needs.weights * part for device, (part, _) in needs.shares.items()}
    assert sum(weights.values()) == pytest.approx(ModelNeeds("target", pair.target, 16).weights)
    assert [kv for _, kv in needs.shares.values()] == [0.5, 0.5]
    check_budget(spread, 1, 16, 64, free=lambda device: 1 << 40)
    with pytest.raises(DeviceError, match=r"device = 'cuda:1'.*2 sequences.*max_num_seqs = 1 fits"):
        one = weights[GPUS[1]] + 0.5 * needs.kv(256) + needs.working(256) + (256 << 20) + 10
        check_budget(spread, 2, 16, 64, free=lambda device: int(one) if device == GPUS[1] else 1 << 40)


def test_model_loaded_by_a_map_answers_as_one_that_is_not(pair: Pair) -> None:
    """Both parts on the CPU: the map's way through loading, without a second device."""
    spread = replace(pair, target=replace(pair.target, others=(CPU,)))
    assert len(loader.device_map(spread.target)) > 4
    prompt, params = list(range(40, 60)), SamplingParams(max_tokens=24)
    config = EngineConfig(model=pair.target.name, draft_model="ngram", dtype="float64", max_model_len=256)
    with Engine(config, pair=spread) as engine:
        assert engine.devices == {"target": "cpu,cpu"}
        wanted = naive.generate(
            naive.reading(naive.load(pair.target.name, torch.float64)), prompt, params, engine.eos_ids
        )
        assert list(engine.submit(prompt, params).result().token_ids) == wanted.token_ids


@pytest.mark.parametrize("device", ["cpu,cpu", "cpu,cuda:0", "cuda:0,cuda:0", "cuda:0,"])
def test_devices_that_cannot_share_a_model(device: str, pair: Pair) -> None:
    with pytest.raises(DeviceError, match="device = '"):
        resolve(EngineConfig(model=pair.target.name, draft_model=None, device=device))
