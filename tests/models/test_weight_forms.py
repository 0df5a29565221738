"""Forms of weights: 16 bits on any device, and what transformers quantizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from langchain_card import CARDChatModel
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.models import loader
from langchain_card.models.budget import weight_bytes
from langchain_card.models.loader import load_model, resolve
from tests.support import naive, tiny

PROMPT = list(range(40, 60))
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao)"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("forms")
    target = tiny.make_target("llama", folder / "target")
    return target, tiny.make_draft(target, folder / "draft", noise=0.02)


def agreement(config: EngineConfig, model: torch.nn.Module) -> float:
    """The share of an answer's tokens up to the first that differs from transformers' own, near-ties aside."""
    params = SamplingParams(max_tokens=24, schedule="sequential")
    with Engine(config) as engine:
        wanted = naive.generate(naive.reading(model), PROMPT, params, engine.eos_ids)
        got = engine.submit(PROMPT, params).result().token_ids
    for place, (ours, theirs) in enumerate(zip(got, wanted.token_ids)):  # noqa: B905
        if ours != theirs and not naive.is_near_tie(wanted, place, ours, 0.02):  # 16 bits: more than rounding
            return place / len(got)
        if ours != theirs:
            break
    return 1.0


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_sixteen_bits_on_a_cpu(family: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = tiny.save_random(tiny.FAMILIES[family](), tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    config = EngineConfig(model=target, draft_model=draft, dtype=dtype, max_model_len=256)
    spec = resolve(config).target
    model = load_model(spec)
    assert {parameter.dtype for parameter in model.parameters()} == {spec.dtype}
    assert weight_bytes(spec) == sum(parameter.nbytes for parameter in model.parameters())
    assert agreement(config, naive.load(target, spec.dtype)) == 1.0


@needs_torchao
@pytest.mark.filterwarnings("default")
def test_torchao_quantizes_while_loading(pair: tuple[str, str]) -> None:
    config = EngineConfig(
        model=pair[0], draft_model=pair[1], dtype="float32", quantization=json.dumps(TORCHAO), max_model_len=256
    )
    spec = resolve(config).target
    model = load_model(spec)
    kinds = {type(layer.weight).__name__ for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    assert "Int8Tensor" in kinds, kinds
    assert weight_bytes(spec) < 0.6 * weight_bytes(resolve(EngineConfig(model=pair[0], draft_model=None)).target)
    model.set_attn_implementation("sdpa")
    assert agreement(config, model) == 1.0


@needs_torchao
@pytest.mark.filterwarnings("default")
def test_folder_that_is_quantized_already_just_loads(pair: tuple[str, str], tmp_path: Path) -> None:
    spec = resolve(EngineConfig(model=pair[0], draft_model=None, quantization=json.dumps(TORCHAO))).target
    folder = tiny.save(load_model(spec), tmp_path)
    config = EngineConfig(model=folder, draft_model=pair[1], dtype="float32", max_model_len=256)
    stored = resolve(config).target
    assert stored.quantization is None
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    assert weight_bytes(stored) == pytest.approx(weight_bytes(spec), rel=0.1)
    model = load_model(stored)
    model.set_attn_implementation("sdpa")
    assert agreement(config, model) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"not installed.*Hint: pip install bitsandbytes"),
        ({"quant_method": "hqq"}, "pip install hqq"),
        ({"quant_method": "nonsense"}, "nonsense does not run on cpu.*Unknown quantization type"),
    ],
)
def test_missing_packages_and_wrong_settings_are_found_before_weights(
    pair: tuple[str, str], settings: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = str(settings["quant_method"])
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")

    def refuse(spec: object) -> None:
        raise AssertionError(f"weights were read: {spec}")

    monkeypatch.setattr(loader, "load_model", refuse)
    with pytest.raises(InvalidInputError, match=words) as caught:
        Engine(EngineConfig(model=pair[0], draft_model=None, quantization=json.dumps(settings)))
    assert caught.value.field == "quantization"


def test_package_that_a_folder_needs(pair: tuple[str, str], tmp_path: Path) -> None:
    if importlib.util.find_spec("gptqmodel") is not None:
        pytest.skip("gptqmodel is installed")
    folder = tiny.make_target("llama", tmp_path)
    file = tmp_path / "config.json"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": gptq}))
    with pytest.raises(InvalidInputError, match=r"quantization_config = 'gptq': .*pip install gptqmodel"):
        resolve(EngineConfig(model=folder, draft_model=None))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int3", "must be one of auto, file, int8, int4"),
        ("{", "must be a JSON object"),
        ('{"bits": 4}', "must name its quant_method"),
    ],
)
def test_quantization_is_checked_at_once(value: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        EngineConfig(quantization=value)


def test_configuration_with_settings_is_hashable_and_serializable(pair: tuple[str, str]) -> None:
    settings = json.dumps(TORCHAO)
    assert len({EngineConfig(quantization=settings), EngineConfig(quantization=settings)}) == 1
    model = CARDChatModel(model=pair[0], draft_model=None, quantization=settings)
    assert CARDChatModel(**model.model_dump(exclude={"rate_limiter", "metadata"})).quantization == settings


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"exact": "strict"}, 'kv_dtype = \'int8\': must be "float" or "auto" with exact="strict"'),
        ({"dtype": "bfloat16"}, "kv_dtype = 'int8': int8 runs on a CPU in float32, not on cpu in bfloat16"),
    ],
)
def test_integer_keys_and_values_are_refused_where_they_do_not_run(
    pair: tuple[str, str], fields: dict[str, str], error: str
) -> None:
    with pytest.raises(InvalidInputError, match=error):
        resolve(EngineConfig(*pair, kv_dtype="int8", **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_draft_on_another_device_keeps_floats(
    pair: tuple[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any device that is no CPU stands for a GPU: no weights are read."""
    monkeypatch.setattr(loader, "draft_device", lambda *_: torch.device(device))
    found = resolve(EngineConfig(*pair, kv_dtype="int8"))
    assert found.target.integer_kv and found.draft is not None
    assert found.draft.integer_kv == (device == "cpu")


def test_compiled_layers_promise_no_bits(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidInputError, match='must be "graphs" or "eager" with exact="strict"'):
        EngineConfig(*pair, exact="strict", execution="compiled")
