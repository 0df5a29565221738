"""Families of models: each decodes as the naive loop does, in float64, or is refused before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine import build
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError, UnsupportedModelError
from langchain_card.models import loader
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime import families
from langchain_card.runtime.cpu import plan
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from tests.simulation import FixedPolicy
from tests.support import naive, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [(7 * i * i + 3 * i) % 250 for i in range(80)]
EXACT = 1e-5
"""Of the logits' range; norms and rotary angles are computed in float32 inside transformers."""

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    **SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
NO_KV = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
RECURRENT: dict[str, tuple[Any, str]] = {
    "mamba": (lambda: t.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2), "MambaForCausalLM has 2"),
    "mamba2": (
        lambda: t.Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16),
        "Mamba2ForCausalLM has 2 linear_attention layers of 2",
    ),
    "falcon_mamba": (
        lambda: t.FalconMambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2),
        "2 linear_attention layers of 2",
    ),
    "recurrent_gemma": (lambda: t.RecurrentGemmaConfig(**SHAPE), "3 linear_attention layers of 4"),
    "jamba": (lambda: t.JambaConfig(**SHAPE), "linear_attention layers of 4"),
    "bamba": (lambda: t.BambaConfig(**SHAPE, attn_layer_indices=[2]), "3 linear_attention layers of 4"),
    "zamba2": (
        lambda: t.Zamba2Config(**SHAPE, layer_types=["linear_attention", "hybrid"] * 2),
        "2 hybrid, 2 linear_attention layers of 4",
    ),
    "qwen3_next": (lambda: t.Qwen3NextConfig(**SHAPE), "3 linear_attention layers of 4"),
    "qwen3_5": (lambda: t.Qwen3_5TextConfig(**SHAPE), "3 linear_attention layers of 4"),
    "lfm2": (lambda: t.Lfm2Config(**SHAPE, full_attn_idxs=[2]), "3 conv layers of 4"),
    "granitemoehybrid": (lambda: t.GraniteMoeHybridConfig(**SHAPE), "4 linear_attention layers of 4"),
    "falcon_h1": (lambda: t.FalconH1Config(**SHAPE), "4 hybrid layers of 4"),
    "rwkv": (lambda: t.RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2), "RwkvForCausalLM as stateful"),
    "xlstm": (
        lambda: t.xLSTMConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_heads=4),
        "xLSTMForCausalLM as stateful",
    ),
}
UNREACHED: dict[str, tuple[Any, str]] = {
    "gpt_oss": (lambda: t.GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4), "GptOssAttention needs s_aux"),
    "llama4": (
        lambda: t.Llama4TextConfig(**SHAPE, intermediate_size_mlp=96, num_local_experts=4),
        "3 chunked_attention layers",
    ),
    "deepseek_v2": (lambda: t.DeepseekV2Config(**LATENT), "keys of size 16 and values of size 12"),
    "deepseek_v3": (lambda: t.DeepseekV3Config(**LATENT), "keys of size 16 and values of size 12"),
    "gemma4": (lambda: t.Gemma4TextConfig(**SHAPE, head_dim=16), "'head_dim' is a per-layer attribute"),
    "qwen2_moe": (  # a window that only its masks know of
        lambda: t.Qwen2MoeConfig(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        "was told a window of None, where its mask has 8",
    ),
    "dynamic": (  # dynamic NTK
        lambda: t.LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "depends on the longest text of a pass",
    ),
    "diffllama": (lambda: t.DiffLlamaConfig(**SHAPE), r"layers \[0, 0, 1, 1"),
    "doge": (lambda: t.DogeConfig(**SHAPE), "makes a mask of its own"),
    "gptj": (lambda: t.GPTJConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "do not run with"),
    "stablelm": (lambda: t.StableLmConfig(**SHAPE), "options of a pass do not reach its layers"),
    "codegen": (
        lambda: t.CodeGenConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
        "do not use transformers' attention interface",
    ),
    "bloom": (lambda: t.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4), "numbers its positions"),
    "bert": (lambda: t.BertConfig(**NO_KV), "BertSelfAttention is not causal"),
    "t5": (lambda: t.T5Config(vocab_size=128, d_model=64, num_layers=2), "t5 is not a causal language model"),
    "bart": (lambda: t.BartConfig(vocab_size=128, d_model=64), "bart is not a causal language model"),
    "qwen2_vl": (lambda: t.Qwen2VLConfig(), "qwen2_vl is not a causal language model"),
    "whisper": (lambda: t.WhisperConfig(vocab_size=128, d_model=64), "whisper is not a causal language model"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random model of each family, by its name."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("families")
    return {name: tiny.save_random(make(), root / name) for name, make in tiny.FAMILIES.items()}


def config(folder: str, **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": folder, "draft_model": None, "dtype": "float64", "max_model_len": 256, **options})


def error_of(folder: str, execution: str | None = None) -> float:
    """Largest difference between the runner's logits and those of transformers without cache, by their range."""
    spec, reference = resolve(config(folder)).target, naive.load(folder, torch.float64)
    model = ModelRunner(load_model(spec), max_len=256, num_scratch=16, execution=execution)

    @torch.inference_mode()
    def wanted(token_ids: Sequence[int]) -> torch.Tensor:
        return reference(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    cache = model.open()
    model.prefill(cache, TEXT[:66])
    # A tree: slot 7 holds the first row, then two branches; the longest is kept, and a chain goes on from there.
    paths = [(7,), (7, 1), (7, 3), (7, 1, 2), (7, 3, 9), (7, 1, 2, 4)]
    branches = {1: (66, 201), 2: (66, 67), 3: (66, 201, 202), 4: (66, 67, 68), 5: (66, 201, 202, 203)}
    text = dict(enumerate(TEXT)) | {201: 11, 202: 12, 203: 13}
    tokens = [text[branch[-1]] for branch in ((66,), *branches.values())]
    found = model.step([Rows(cache, tokens, cache.length, paths)])
    errors = [found[row] - wanted(TEXT[:66] + [text[i] for i in branch])[-1] for row, branch in branches.items()]
    cache.keep([7, 3, 9], TEXT[66:69])
    chain = model.step([Rows(cache, TEXT[69:76], cache.length, [tuple(range(i + 1)) for i in range(7)])])
    whole = wanted(TEXT)
    errors += list(chain - whole[69:76])
    return float(torch.stack(errors).abs().max() / (whole.max() - whole.min()))


@pytest.mark.parametrize("execution", [None, "eager"])  # over free rows, and over fixed grids as on CUDA
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_on_trees_and_chains_are_those_of_transformers(
    folders: dict[str, str], family: str, execution: str | None
) -> None:
    assert error_of(folders[family], execution) < EXACT


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_answers_are_those_of_the_naive_loop(
    folders: dict[str, str], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Controller", lambda **_: FixedPolicy())  # tiny models draft at a loss
    draft = tiny.make_draft(folders[family], tmp_path / "draft", noise=0.02)
    reference = naive.reading(naive.load(folders[family], torch.float64))
    with Engine(config(folders[family], draft_model=draft)) as running:
        params = SamplingParams(max_tokens=30, banned_ids=running.eos_ids, schedule="sequential")
        wanted = naive.generate(reference, TEXT[:40], params).token_ids
        result = running.submit(TEXT[:40], params).result()
        assert list(result.token_ids) == wanted
        assert result.stats.verified > 0


def test_planted_window_that_is_not_slid(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(folders["mistral"]) < EXACT
    kernel_heads = plan.kernel_heads
    monkeypatch.setattr(plan, "kernel_heads", lambda own, size: kernel_heads(own._replace(window=None), size))
    assert error_of(folders["mistral"]) > 1e-3


@pytest.mark.parametrize("family", [*RECURRENT, *UNREACHED])
@pytest.mark.parametrize("field", ["model", "draft_model"])
def test_refused_before_weights(
    family: str, field: str, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = (RECURRENT | UNREACHED)[family]
    make().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "ModelStore", lambda: Unread(tmp_path))
    names = {"model": folders["llama"], "draft_model": None} | {field: str(tmp_path)}
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        resolve(config(folder=names["model"], draft_model=names["draft_model"]))
    assert caught.value.field == field
    assert ("recurrent state cannot be rolled back" in str(caught.value)) == (family in RECURRENT)


class Unread:
    """The store, for a folder that holds a config and no weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, name: str, form: str, progress: object) -> Path:
        return Path(name)


def test_positions_at_which_longrope_changes_its_frequencies_are_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    shape = {**SHAPE, "vocab_size": tiny.VOCAB}
    long = t.Phi3Config(**shape, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=128)
    folder = tiny.save_random(long, tmp_path / "long")
    assert resolve(config(folder, max_model_len=None)).max_len == 128
    with pytest.raises(InvalidInputError, match=r"max_model_len = 256.*128 positions"):
        resolve(config(folder))
    text, reference = TEXT[:60], naive.load(folder, torch.float64)
    params = SamplingParams(max_tokens=40, banned_ids=(int(reference.config.eos_token_id),))
    wanted = naive.generate(naive.reading(reference), text, params).token_ids
    with Engine(config(folder, max_model_len=128, draft_model="ngram")) as running:
        assert list(running.submit(text, params).result().token_ids) == wanted


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
OTHERS: dict[str, Any] = {
    "family": lambda: t.GemmaConfig(**tiny.SHAPE),
    "activation": lambda: t.LlamaConfig(**tiny.SHAPE, hidden_act="gelu"),
    "rotation": lambda: t.LlamaConfig(**tiny.SHAPE, rope_parameters=LINEAR),
    "part of a rotation": lambda: t.LlamaConfig(
        **tiny.SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "window": lambda: t.MistralConfig(**tiny.SHAPE, sliding_window=8),
    "layers": lambda: tiny.FAMILIES["qwen3"](),
    "bias of attention": lambda: t.LlamaConfig(**tiny.SHAPE, attention_bias=True),
    "bias behind": lambda: t.LlamaConfig(**tiny.SHAPE, mlp_bias=True),
    "odd heads": lambda: t.Qwen2Config(**{**tiny.SHAPE, "hidden_size": 60}),
    "heads and groups": lambda: t.LlamaConfig(**{**tiny.SHAPE, "num_key_value_heads": 3}),
    "direction": lambda: t.LlamaConfig(**tiny.SHAPE, is_causal=False),
    "both directions": lambda: t.LlamaConfig(**tiny.SHAPE, use_bidirectional_attention=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_the_common_kind_differs_in_nothing(name: str) -> None:
    assert families.is_common(t.LlamaConfig(**tiny.SHAPE)) and families.is_common(t.Qwen2Config(**tiny.SHAPE))
    assert not families.is_common(OTHERS[name]())


def test_what_the_probe_does_not_know_is_refused(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    families.check_family("mistral", Path(folders["mistral"]))
    monkeypatch.setattr(families, "_UNDERSTOOD", ("scaling",))
    with pytest.raises(UnsupportedModelError, match=r"needs dropout, .*sliding_window.* not supported"):
        families.check_family("mistral", Path(folders["mistral"]))


def test_experts_run_in_float32(folders: dict[str, str]) -> None:
    """With grouped products, as transformers runs them by default."""
    folder = folders["qwen3_moe"]
    wanted = naive.generate(naive.reading(naive.load(folder, torch.float32)), TEXT[:40], SamplingParams(max_tokens=16))
    with Engine(replace(config(folder), dtype="float32", draft_model="ngram")) as running:
        got = running.submit(TEXT[:40], SamplingParams(max_tokens=16)).result().token_ids
    first = next((i for i, (a, b) in enumerate(zip(got, wanted.token_ids)) if a != b), None)  # noqa: B905
    assert first is None or naive.is_near_tie(wanted, first, got[first], 1e-3)
