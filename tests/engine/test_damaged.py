"""After logits that are no numbers, nothing of their text is used again: not in memory, on disk, nor through a mask."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import EngineError
from langchain_card.limits import Limits
from langchain_card.runtime.kv_cache import KVPool, TensorKV
from tests.support import tiny
from tests.support.prefixes import WHOLE

BAD = 7
"""The token whose embedding is damaged."""
SOUND = random.Random(3).choices(range(20, 250), k=40)
PARAMS = SamplingParams(max_tokens=8, banned_ids=(BAD,))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model; keys and values of all tokens from `BAD` on are no numbers."""
    folder = tmp_path_factory.mktemp("damaged")
    whole = Path(tiny.make_target("qwen3", folder / "whole"))
    shutil.copytree(whole, folder / "model")
    weights = load_file(whole / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = math.nan
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    return str(folder / "model")


def config(model: str, **options: Any) -> EngineConfig:
    one = Limits(max_num_seqs=1, max_window=8)
    return EngineConfig(**{"model": model, "draft_model": None, "max_model_len": 2048, "limits": one, **options})


def fails(engine: Engine, text: list[int]) -> None:
    with pytest.raises(EngineError, match="logits = nan"):
        engine.submit(text, PARAMS).result()


@pytest.mark.parametrize("exact", ["strict", "default"])
def test_the_next_text_is_answered_as_if_there_had_been_none(damaged: str, exact: str) -> None:
    """Strict steps attend to all slots of a sequence, and multiply those that are masked by zero."""
    with Engine(config(damaged, exact=exact, max_model_len=256)) as engine:
        expected = engine.submit(SOUND, PARAMS).result().token_ids
        fails(engine, [BAD, *SOUND, *SOUND, *SOUND])
        assert engine.submit(SOUND, PARAMS).result().token_ids == expected


@pytest.mark.parametrize("text", [[*SOUND, BAD], [*SOUND, BAD, *SOUND], [BAD, *SOUND]], ids=["last", "within", "first"])
def test_a_damaged_text_is_no_prefix(damaged: str, text: list[int]) -> None:
    with Engine(config(damaged)) as engine:
        fails(engine, text)
        assert engine.submit([*SOUND, 30, 31], PARAMS).result().stats.cached_tokens == 0
        assert engine.submit([*SOUND, 30, 32], PARAMS).result().stats.cached_tokens == len(SOUND) + 1, "sound ones are"


def test_a_damaged_text_is_not_kept_on_disk(damaged: str, folder: Path) -> None:
    text = random.Random(5).choices(range(20, 250), k=WHOLE + 10)
    with Engine(config(damaged, prefix_cache="folder")) as engine:
        fails(engine, [BAD, *text])
        fails(engine, [*text, BAD, 30])
    assert not [*folder.glob("*.safetensors")]
    with Engine(config(damaged, prefix_cache="folder")) as engine:
        engine.submit(text, PARAMS).result()
    assert [*folder.glob("*.safetensors")], "sound texts are"


def pool() -> KVPool[TensorKV]:
    devices = [torch.device("cpu")]
    return KVPool(
        lambda slots: TensorKV(slots, devices=devices, kv_heads=1, head_dim=2, dtype=torch.float32),
        max_len=32,
        num_scratch=4,
        num_seqs=3,
    )


def test_texts_that_begin_like_a_damaged_one_are_forgotten_with_it() -> None:
    """What damaged it may come from them: a text whose reading was aborted had no logits."""
    caches = pool()
    donor, other = caches.open([1]), caches.open([1], owner="other")
    for cache in (donor, other):
        cache.keep(range(4), [1, 2, 3, 4])
    caches.kv.layers[0][:, :, donor.first_position] = math.nan
    caches.close(donor)
    caches.close(other)
    broken = caches.open([1, 2, 9])
    assert broken is not donor and broken.length == 2
    broken.damaged = True
    caches.close(broken)
    assert caches.kv.layers[0].isfinite().all()
    again = caches.open([1, 2, 3, 4])
    assert again.length == 0
    assert caches.open([1, 2], owner="other").length == 2


def test_slots_of_a_damaged_text_are_cleared() -> None:
    caches = pool()
    cache = caches.open()
    caches.kv.layers[0][:, :, cache.base : cache.base + 12] = math.nan
    cache.keep(range(4), [1, 2, 3, 4])
    cache.damaged = True
    caches.close(cache)
    assert cache.token_ids == [] and not cache.damaged
    assert caches.kv.layers[0].isfinite().all()
