"""Steps over fixed grids, on a CPU without graphs: the same tokens; and one width gives one arithmetic."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from langchain_card.config import EngineConfig
from langchain_card.models.loader import load_model, resolve
from langchain_card.runtime.grid_attention import Ladder
from langchain_card.runtime.kv_cache import KVCache, KVPool
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = dict[str, tuple[str, str]]


def runner(folder: str, dtype: str, width: int | None, num_seqs: int = 3, execution: str | None = None) -> ModelRunner:
    model = load_model(resolve(EngineConfig(folder, None, dtype=dtype, max_model_len=512)).target)
    return ModelRunner(model, max_len=512, num_scratch=16, num_seqs=num_seqs, width=width, execution=execution)


def in_grids(folder: str, width: int | None) -> ModelRunner:
    model = load_model(resolve(EngineConfig(folder, None, max_model_len=512)).target)
    return ModelRunner(model, max_len=512, num_scratch=16, num_seqs=2, width=width, execution="eager")


def tree(rng: random.Random, count: int, slots: list[int]) -> list[tuple[int, ...]]:
    """Paths of a random tree under one first row."""
    paths: list[tuple[int, ...]] = [(slots[0],)]
    for slot in slots[1:count]:
        paths.append((*rng.choice(paths), slot))
    return paths


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_grids_compute_what_free_rows_do(tiny_pairs: Pairs, arch: str) -> None:
    """Texts of different lengths, trees in any slots, sequences that are not there; in float64, up to rounding."""
    free, grid = (runner(tiny_pairs[arch][0], "float64", width) for width in (None, 16))
    rng = random.Random(3)
    texts = [[rng.randrange(256) for _ in range(length)] for length in (70, 5, 33)]
    caches: list[list[KVCache]] = [[model.open() for _ in texts] for model in (free, grid)]
    for model, own in zip((free, grid), caches, strict=True):
        model.step([Rows(cache, text, 0) for cache, text in zip(own, texts, strict=True)])
    for _ in range(4):
        asked = [(i, rng.randint(1, 12), rng.sample(range(16), 12)) for i in rng.sample(range(3), rng.randint(1, 3))]
        shapes = [(i, [rng.randrange(256) for _ in range(n)], tree(rng, n, slots)) for i, n, slots in asked]
        results = [
            model.step([Rows(own[i], ids, own[i].length, paths) for i, ids, paths in shapes])
            for model, own in zip((free, grid), caches, strict=True)
        ]
        tolerance = 1e-5 if arch == "gemma2" else 1e-9  # its softmax is in float32, as transformers has it
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        i, ids, paths = shapes[0]
        longest = max(paths, key=len)
        for own in caches:
            own[i].keep(longest, [ids[[path[-1] for path in paths].index(slot)] for slot in longest])


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_width_is_one_arithmetic(tiny_pairs: Pairs, arch: str, dtype: str) -> None:
    """Read or decoded, alone or beside others, one row at a time or a chain of many: logits have the same bits."""
    model = runner(tiny_pairs[arch][0], dtype, width=8, num_seqs=2)
    rng = random.Random(5)
    text = [rng.randrange(256) for _ in range(90)]

    def logits(sizes: list[int], *, beside: bool = False) -> torch.Tensor:
        model.pool.forget()
        cache, other = model.open(), model.open()
        model.step([Rows(cache, text[:40], 0)])
        found = []
        for size in sizes:
            own, first = text[cache.length : cache.length + size], 16 + cache.length
            batch = [Rows(cache, own, cache.length, [tuple(range(first, first + i + 1)) for i in range(len(own))])]
            if beside:
                batch.append(Rows(other, [3, 5], other.length, [(2,), (2, 7)]))
            found.append(model.step(batch)[: len(own)].clone())
            cache.keep(range(first, first + len(own)), own)
        return torch.cat(found)

    plain = logits([1] * 48)
    assert torch.equal(logits([8] * 6), plain)
    assert torch.equal(logits([3, 8, 1, 5, 7, 8, 2, 6, 8]), plain)
    assert torch.equal(logits([4] * 12, beside=True), plain)
    # And where steps have the width of their rows they differ, else this test would prove nothing.
    if dtype == "bfloat16":
        free = runner(tiny_pairs[arch][0], dtype, width=None)
        cache = free.open()
        free.step([Rows(cache, text[:40], 0)])
        assert not torch.equal(next(free.follow(cache, text[40:56])), plain[:16])


def test_a_full_grid_answers_in_the_order_of_the_batch(tiny_pairs: Pairs) -> None:
    model = runner(tiny_pairs["llama"][0], "float64", width=8, num_seqs=2)
    caches = model.open(), model.open()
    windows = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]
    batch = [
        Rows(cache, ids, 0, [tuple(range(i + 1)) for i in range(8)]) for cache, ids in zip(caches, windows, strict=True)
    ]
    first, second = model.step(batch).clone().split(8)
    assert not torch.equal(first, second)
    assert torch.equal(model.step(batch[::-1]), torch.cat([second, first]))


@pytest.mark.parametrize("max_len", [512, 8192, 10_000, 131_072])
@pytest.mark.parametrize(
    ("num_scratch", "num_seqs", "rows"),
    [(16, 1, 16), (64, 1, 64), (16, 16, 16), (64, 3, 64), (64, 16, 16), (64, 12, 16), (16, 32, 4), (64, 64, 4)],
)
def test_every_window_has_a_captured_step(max_len: int, num_scratch: int, num_seqs: int, rows: int) -> None:
    """Up to so many rows of all sequences; and there are few of them, because each takes time at the start."""
    pool: KVPool[Any] = KVPool(lambda count: None, max_len=max_len, num_scratch=num_scratch, num_seqs=num_seqs)
    ladder, rng = Ladder(pool), random.Random(2)
    assert len({*ladder.captured}) == len(ladder.captured) <= 16
    assert all(bucket.keys % 8 == 0 for bucket in ladder.captured)
    caches = [pool.open() for _ in range(num_seqs)]
    for _ in range(100):
        batch = [
            Rows(cache, [1] * count, start, [tuple(range(i + 1)) for i in range(count)])
            for cache in rng.sample(caches, rng.randint(1, num_seqs))
            for count, start in [(rng.randint(1, rows), rng.randint(0, max_len - rows))]
        ]
        bucket = ladder.bucket(batch)
        assert bucket in ladder.captured and bucket.width >= max(len(rows.token_ids) for rows in batch)
        assert bucket.keys > max(max(rows.positions) for rows in batch)
        assert bucket.seqs > max(rows.cache.index for rows in batch)


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_texts_read_few_positions_more_than_they_have(num_seqs: int) -> None:
    """Steps without a graph are as small as they may be."""
    pool: KVPool[Any] = KVPool(lambda count: None, max_len=131_072, num_scratch=64, num_seqs=num_seqs)
    ladder, cache = Ladder(pool), pool.open()
    for length in (100, 500, 3000, 40_000):
        keys = ladder.alone(Rows(cache, [1] * 200, length - 200 if length > 200 else 0)).keys
        assert keys < max(513, 4 * length)


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_products_read_keys_and_values_where_they_are(tiny_pairs: Pairs, num_seqs: int) -> None:
    """Copies of a layer's keys would be most of the memory that a step of several sequences moves."""
    model = in_grids(tiny_pairs["llama"][0], None)
    caches = [model.open() for _ in range(num_seqs)]
    batch = [Rows(cache, [3, 1, 4], 0, [(0,), (0, 1), (0, 1, 2)]) for cache in caches]
    model.step(batch)
    with torch.profiler.profile(record_shapes=True) as profile:
        model.step(batch)
    copied = [event.input_shapes[0] for event in profile.events() if event.name in ("aten::clone", "aten::copy_")]
    assert copied and max(map(math.prod, copied)) < num_seqs * 512 * tiny.SHAPE["num_key_value_heads"] * 16


@pytest.mark.parametrize("lengths", [(500,), (500, 3), (40, 40)], ids=str)
def test_texts_are_read_without_the_sequences_beside_them(tiny_pairs: Pairs, lengths: tuple[int, ...]) -> None:
    """Texts in the last of 16 sequences, beside windows in the others: as alone, and hardly more rows."""
    folder, texts = tiny_pairs["llama"][0], [[*range(length % 200)] * 9 for length in lengths]
    texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    model, rows = runner(folder, "float64", None, num_seqs=16, execution="eager"), list[int]()
    model.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: rows.append(ids[0].numel()))
    caches = [model.open() for _ in range(16)]
    last = [Rows(cache, text, 0, ask=True) for cache, text in zip(caches[::-1], texts, strict=False)]
    beside = [Rows(cache, [7], 0, [(0,)]) for cache in caches[: 16 - len(texts)]]
    logits = model.step([*last, *beside])[: len(texts)]
    assert sum(rows) <= 1.25 * sum(lengths) + 100
    for text, found in zip(texts, logits, strict=True):
        model.pool.forget()
        torch.testing.assert_close(model.step([Rows(model.open(), text, 0, ask=True)])[0], found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("width", "most"), [(None, 1), (8, 16)], ids=["any shape", "one shape"])
def test_the_head_runs_for_the_last_row_of_a_text(tiny_pairs: Pairs, width: int | None, most: int) -> None:
    """Logits of a whole text would be most of the memory of a step; one shape has them for one whole grid."""
    model, sizes = in_grids(tiny_pairs["llama"][0], width), list[int]()
    model.model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[1]))
    cache = model.open()
    for start in range(0, 300, 100):
        model.step([Rows(cache, [7] * 100, start, ask=start == 200)])
    assert sizes == [most]
