"""Adapters of the target: requests with two of them and with none, in one batch, get the answers of merged models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import CorruptModelError, InvalidInputError
from langchain_card.models.adapter import CONFIG, WEIGHTS, read_adapter
from langchain_card.models.loader import acquire_model, load_model, release_model, resolve
from langchain_card.runtime.adapters import Adapters
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny
from tests.support.adapters import Made, make

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[(7 * i + j * j) % 250 for j in range(20 + i)] for i in range(6)]
NAMES = ["one", "other", "", "one", "other", ""]
ALL: dict[str, Any] = {"r": 8, "target_modules": "all-linear", "use_rslora": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Made]]:
    """By family: adapters of a tiny model by name; "" has the model itself."""
    found = {}
    for family in ("llama", "qwen2", "gemma2", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        base = tiny.save_random(tiny.FAMILIES[family](), folder / "base")
        patterns = {"target_modules": ["q_proj", "k_proj", "o_proj"], "alpha_pattern": {"k_proj": 2.0}}
        one = make(base, folder / "one", seed=1, **patterns)
        other = make(base, folder / "other", seed=2, **({} if family == "qwen3_moe" else ALL))
        found[family] = {"": Made("", base), "one": one, "other": other}
    return found


def config(made: dict[str, Made], **settings: Any) -> EngineConfig:
    adapters = tuple((name, folder) for name, (folder, _) in made.items() if name)
    return EngineConfig(model=made[""].merged, adapters=adapters, max_model_len=256, **settings)


def answers(engine: Engine, names: list[str], **options: Any) -> list[tuple[int, ...]]:
    """The answers to all prompts at once."""
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=12, adapter=name, **options))
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    return [request.result().token_ids for request in requests]


SETTINGS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "strict": {"dtype": "float64", "exact": "strict"},
    "in a process": {"dtype": "float64", "isolate": True},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", "float64"),
        ("llama", "strict"),
        ("qwen2", "float64"),
        pytest.param("gemma2", "float64", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float64", marks=pytest.mark.slow),
        pytest.param("qwen2", "in a process", marks=pytest.mark.slow),
    ],
)
def test_one_batch_has_the_answers_of_the_merged_models(
    made: dict[str, dict[str, Made]], family: str, settings: str, tmp_path: Path
) -> None:
    base = made[family][""].merged
    draft = tiny.make_draft(base, tmp_path, noise=0.02)
    with Engine(config(made[family], draft_model=draft, **SETTINGS[settings])) as engine:
        got = answers(engine, NAMES, schedule="sequential")
    assert got != [answer for answer, _ in zip(got, NAMES, strict=True) if answer == got[2]]
    for name, (_, merged) in made[family].items():
        with Engine(EngineConfig(model=merged, draft_model=None, max_model_len=256, dtype="float64")) as engine:
            wanted = answers(engine, [""] * len(PROMPTS), schedule="plain")
        own = [i for i, other in enumerate(NAMES) if other == name]
        assert [got[i] for i in own] == [wanted[i] for i in own], name


def logits(runner: ModelRunner, name: str) -> torch.Tensor:
    cache = runner.open((), "", name)
    got = torch.cat([*runner.follow(cache, [(3 * i * i) % 250 for i in range(40)])])
    runner.close(cache)
    runner.pool.forget()
    return got


@pytest.mark.parametrize("fused", [True, False])
def test_in_blocks_an_adapter_costs_what_rounding_the_merged_model_costs(
    made: dict[str, dict[str, Made]], fused: bool
) -> None:
    """Relative differences of logits to the merged model in floats: some 5 % either way, 90 % without the adapter."""

    def run(folder: str, name: str, *names: str, **settings: Any) -> torch.Tensor:
        spec = resolve(EngineConfig(model=folder, draft_model=None, **settings)).target
        model = load_model(spec, fused=fused)
        read = [read_adapter(each, Path(made["qwen2"][each].adapter)) for each in names]
        adapters = Adapters(model, read) if names else None
        runner = ModelRunner(model, max_len=64, num_scratch=16, integer_kv=spec.integer_kv, adapters=adapters)
        return logits(runner, name).double()

    base = made["qwen2"][""].merged
    for name in ("one", "other"):
        merged = made["qwen2"][name].merged
        wanted = run(merged, "", dtype="float64", quantization=None)
        costs = [
            ((got - wanted).norm() / wanted.norm()).item()
            for got in (
                run(base, name, "one", "other", quantization="int8"),
                run(merged, "", quantization="int8"),
                run(base, "", quantization="int8"),
            )
        ]
        assert costs[0] < min(1.3 * costs[1], 0.1) and costs[2] > 0.5, costs


def test_the_bits_of_a_row_depend_neither_on_adapters_beside_it_nor_on_how_it_is_read(
    made: dict[str, dict[str, Made]],
) -> None:
    spec = resolve(EngineConfig(model=made["llama"][""].merged, draft_model=None, quantization="int8")).target
    model = load_model(spec)
    adapters = Adapters(model, [read_adapter(name, Path(made["llama"][name].adapter)) for name in ("one", "other")])
    runner = ModelRunner(model, max_len=64, num_scratch=16, num_seqs=6, integer_kv=True, adapters=adapters)
    texts = [(name, prompt[:20]) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    together = [runner.open((), str(n), name) for n, (name, _) in enumerate(texts)]
    got = runner.step([Rows(cache, text, 0, ask=True) for cache, (_, text) in zip(together, texts, strict=True)])
    for cache in together:
        runner.close(cache)
    for n, (name, text) in enumerate(texts):
        cache = runner.open((), "alone", name)
        *_, last = runner.follow(cache, text)
        assert torch.equal(last[-1], got[n]), (n, name)
        runner.close(cache)
        runner.pool.forget()


def test_keys_and_values_are_shared_by_requests_with_the_same_adapter_alone(made: dict[str, dict[str, Made]]) -> None:
    with Engine(config(made["llama"], draft_model=None, dtype="float64")) as engine:
        cached = [
            engine.submit(PROMPTS[5], SamplingParams(max_tokens=2, adapter=name)).result().stats.cached_tokens > 0
            for name in ("one", "", "other", "one", "")
        ]
    assert cached == [False, False, False, True, True]


def test_engines_that_share_the_weights_do_not_see_each_others_adapters(made: dict[str, dict[str, Made]]) -> None:
    spec = resolve(EngineConfig(model=made["llama"][""].merged, draft_model=None, dtype="float64")).target
    model, runners = acquire_model(spec), list[ModelRunner]()
    try:
        plain = logits(ModelRunner(model, max_len=64, num_scratch=16), "")
        for name in ("one", "other"):
            adapters = Adapters(model, [read_adapter("it", Path(made["llama"][name].adapter))])
            runners.append(ModelRunner(model, max_len=64, num_scratch=16, adapters=adapters))
        own = [logits(runner, "it") for runner in runners]
        assert not own[0].allclose(own[1]) and not own[0].allclose(plain)
        assert [logits(runner, "").equal(plain) for runner in runners] == [True, True]
        alone = ModelRunner(model, max_len=64, num_scratch=16)
        for runner in runners:
            assert runner._adapters is not None
            runner._adapters.remove()
        assert logits(alone, "").equal(plain)
        assert not any(module._forward_hooks for module in model.modules())
    finally:
        release_model(spec)


def test_unknown_adapters_are_refused_before_they_are_queued(made: dict[str, dict[str, Made]]) -> None:
    with Engine(config(made["llama"], draft_model=None)) as engine:
        with pytest.raises(InvalidInputError, match=r"adapter = 'third'.*there is one, other"):
            engine.submit(PROMPTS[0], SamplingParams(adapter="third"))
        assert len(engine.submit(PROMPTS[0], SamplingParams(max_tokens=3, adapter="one")).result().token_ids) == 3


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "no LoRA": ("is no LoRA adapter", {"peft_type": "IA3"}),
    "DoRA": ("has use_dora", {"use_dora": True}),
    "slow pattern": ("repeats something", {"alpha_pattern": {"(a+)+b": 1.0}}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_adapters_of_other_kinds_are_refused_before_weights_are_loaded(
    made: dict[str, dict[str, Made]], name: str, tmp_path: Path
) -> None:
    words, changes = BROKEN[name]
    shutil.copytree(made["llama"]["one"].adapter, tmp_path, dirs_exist_ok=True)
    (tmp_path / CONFIG).write_text(json.dumps(json.loads((tmp_path / CONFIG).read_text()) | changes))
    with pytest.raises(InvalidInputError, match=words):
        resolve(EngineConfig(made["llama"][""].merged, None, adapters=(("it", str(tmp_path)),)))


def test_damaged_adapters_are_refused(made: dict[str, dict[str, Made]], tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"adapters\['it'\].*has no adapter_config.json"):
        read_adapter("it", tmp_path)
    shutil.copytree(made["llama"]["one"].adapter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WEIGHTS)
    first = next(iter(tensors))
    for words, changed in (
        ("not finite", {first: tensors[first] * float("nan")}),
        ("one rank", {first: tensors[first][:1]}),
        ("no part of a linear layer", {"base_model.model.lm_head.weight": tensors[first].clone()}),
    ):
        save_file({**tensors, **changed}, tmp_path / WEIGHTS)
        with pytest.raises((InvalidInputError, CorruptModelError), match=words):
            read_adapter("it", tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(CorruptModelError, match="not a whole safetensors file"):
        read_adapter("it", tmp_path)


def test_adapters_of_other_models_are_refused(made: dict[str, dict[str, Made]], tmp_path: Path) -> None:
    wide = tiny.save_random(tiny.t.LlamaConfig(**{**tiny.SHAPE, "hidden_size": 32}), tmp_path / "wide")
    layers = tiny.save_random(tiny.t.LlamaConfig(**{**tiny.SHAPE, "num_hidden_layers": 1}), tmp_path / "layers")
    adapter = read_adapter("it", Path(made["llama"]["one"].adapter))
    for folder, words in ((wide, "is of .* features in and out"), (layers, "is no such layer of this model")):
        for settings in ({"dtype": "float64", "quantization": None}, {"quantization": "int8"}):
            model = load_model(resolve(EngineConfig(folder, None, **settings)).target)
            with pytest.raises(InvalidInputError, match=words):
                Adapters(model, [adapter])
