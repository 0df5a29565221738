"""Row-stable steps on the real SmolLM2: a row's logits have the same bits beside any rows and in any slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.models.loader import acquire_model, release_model, resolve
from langchain_card.runtime.cpu.integer_kv import IntegerKV
from langchain_card.runtime.cpu.plan import plan_step
from langchain_card.runtime.kv_cache import KVCache, KVPool, TensorKV
from langchain_card.runtime.rows import AttentionOptions, Rows
from langchain_card.runtime.runner import ModelRunner

TEXT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n" * 14


@pytest.fixture(scope="module")
def runner() -> Iterator[tuple[ModelRunner, list[int]]]:
    pair = resolve(EngineConfig(model="smollm2-135m", draft_model=None))
    model = acquire_model(pair.target)
    yield ModelRunner(model, max_len=1024, num_scratch=32, integer_kv=True), pair.tokenizer(TEXT).input_ids
    release_model(pair.target)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def prefilled(runner: ModelRunner, token_ids: list[int]) -> KVCache:
    runner.pool.forget()
    cache = runner.open()
    runner.prefill(cache, token_ids)
    return cache


def path_logits(runner: ModelRunner, cache: KVCache, path: list[int]) -> torch.Tensor:
    """Plain decoding over `path`, one row at a time, each kept before the next."""
    length = cache.length
    rows = []
    for token in path:
        rows.append(runner.step([Rows(cache, [token], cache.length, [(0,)])]))
        cache.keep([0], [token])
    del cache.token_ids[length:]
    return torch.cat(rows)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [20, 125, 127, 128, 250])
def test_same_bits_beside_other_rows_and_in_other_slots(
    runner: tuple[ModelRunner, list[int]], length: int, threads: int, set_threads: Callable[[int], None]
) -> None:
    model, token_ids = runner
    set_threads(threads)
    cache = prefilled(model, token_ids[:length])
    path = token_ids[length : length + 4]
    alone = path_logits(model, cache, path)
    trees = {
        "a chain": ([], [0, 1, 2, 3]),
        "three other rows, branching off": ([(0,), (0, 1), (1,)], [4, 5, 6, 7]),
        "fifteen other rows, in other slots": ([(0,)] * 8 + [(0, 1)] * 4 + [(0, 1, 2)] * 3, [31, 17, 25, 30]),
    }
    for name, (others, slots) in trees.items():
        rows = [tuple(slots[: i + 1]) for i in range(4)]
        tokens = list(path)
        free = iter(slot for slot in range(32) if slot not in slots)
        own: list[int] = []
        for n, shape in enumerate(others):
            own.append(next(free))
            rows.insert(n, (*[slots[i] for i in range(len(shape) - 1)], own[-1]))
            tokens.insert(n, 100 + 7 * n)
        logits = model.step([Rows(cache, tokens, length, rows)])[len(others) :]
        assert torch.equal(logits, alone), name


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("shape", [(3, 3, 64), (2, 7, 64), (2, 6, 128), (4, 1, 32), (1, 8, 256), (5, 5, 80)])
def test_attention_of_a_row_has_the_same_bits_beside_other_rows(
    shape: tuple[int, int, int],
    softcap: float | None,
    threads: int,
    integers: bool,
    set_threads: Callable[[int], None],
) -> None:
    """Of many models' shapes (kv heads, query heads for each, head size), since a last bit may hide behind int8."""
    kv_heads, group, head_dim = shape
    set_threads(threads)
    generator = torch.Generator().manual_seed(0)
    store: Any = None
    if integers:
        store = partial(IntegerKV, layers=1, kv_heads=kv_heads, head_dim=head_dim)
    else:
        store = partial(
            TensorKV, devices=[torch.device("cpu")], kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32
        )
    cache = KVPool(store, max_len=512, num_scratch=16, align=64).open()
    text = torch.randn(3, 1, kv_heads, 120, head_dim, generator=generator)
    read = plan_step([Rows(cache, [1] * 120, 0)])
    read.attend(0, text[0].repeat_interleave(group, 1), text[1], text[2], AttentionOptions(None, None, softcap))
    cache.token_ids = [1] * 120
    query = torch.randn(1, kv_heads * group, 16, head_dim, generator=generator)
    new = torch.randn(2, 1, kv_heads, 16, head_dim, generator=generator)
    paths = [tuple(range(row + 1)) for row in range(16)]

    def attend(rows: slice) -> torch.Tensor:
        plan = plan_step([Rows(cache, [1] * len(paths[rows]), 120, paths[rows])])
        q, k, v = query[:, :, rows], new[0][:, :, rows], new[1][:, :, rows]
        with torch.inference_mode():
            return plan.attend(0, q, k, v, AttentionOptions(None, None, softcap))[0]

    whole = attend(slice(0, 16))
    for row in range(16):
        assert torch.equal(attend(slice(row, row + 1))[0], whole[row]), row
    for count in (2, 3, 5, 8):
        assert torch.equal(attend(slice(0, count)), whole[:count]), count


def test_kept_rows_continue_as_if_prefilled(runner: tuple[ModelRunner, list[int]]) -> None:
    model, token_ids = runner
    cache = prefilled(model, token_ids[:40])
    plain = path_logits(model, cache, token_ids[40:46])
    model.step([Rows(cache, [token_ids[40], 5, token_ids[41], 9], 40, [(7,), (7, 1), (7, 3), (7, 1, 2)])])
    cache.keep([7, 3], token_ids[40:42])
    assert cache.length == 42
    rest = model.step([Rows(cache, token_ids[42:46], 42, [tuple(range(10, 11 + i)) for i in range(4)])])
    assert torch.equal(rest, plain[2:])
