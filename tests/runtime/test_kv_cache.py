"""Texts that closed sequences leave behind: which of them are found again, and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from langchain_card.runtime.kv_cache import GridKV, KVCache, KVPool, TensorKV

SHAPE: dict[str, Any] = {"devices": [torch.device("cpu")], "kv_heads": 1, "head_dim": 2, "dtype": torch.float32}


def pool(num_seqs: int, *, compact: bool = False) -> KVPool[Any]:
    """A pool with room for eight positions of each sequence."""
    make: Any = (lambda slots: GridKV(slots, num_seqs=num_seqs, **SHAPE)) if compact else (
        lambda slots: TensorKV(slots, **SHAPE)
    )  # fmt: skip
    return KVPool(make, max_len=8, num_scratch=1, num_seqs=num_seqs, compact=compact)


def write(pool: KVPool[Any], text: list[int], owner: str = "one") -> KVCache:
    """Open a sequence, write the tokens' numbers as its keys and values, and close it."""
    cache = pool.open(text, owner)
    for position in range(cache.length, len(text)):
        slot, number = cache.first_position + position, torch.full((1, 2, 1, 1, 2), float(text[position]))
        pool.kv.write(slot, {"0": number})
    cache.token_ids = [*text]
    pool.close(cache)
    return cache


def read(pool: KVPool[Any], start: int, text: list[int], owner: str = "one") -> list[float] | None:
    found = pool.read(start, text, owner)
    return None if found is None else found["0"][0, 0, 0, :, 0].tolist()


def test_a_text_that_was_overwritten_is_not_read() -> None:
    made = pool(1)
    cache = write(made, [1, 2, 3, 4])
    assert read(made, 1, [1, 2, 3]) == [2.0, 3.0]
    assert made.open([1, 2, 3, 4, 5], "one") is cache and read(made, 1, [1, 2, 3]) == [2.0, 3.0], "continued"
    made.close(cache)
    assert made.open([1, 2, 9], "one") is cache and read(made, 1, [1, 2, 3]) is None
    made.close(cache)
    made.open([1, 2, 3], "other")
    assert read(made, 1, [1, 2], "other") is None


@pytest.mark.parametrize("compact", [False, True])
def test_texts_that_take_turns_are_all_found_again(compact: bool) -> None:
    """Also where each opens the first sequence, as for steps over grids: its text is moved, not overwritten."""
    made, texts = pool(4, compact=compact), [[n, n + 1, n + 2] for n in (10, 20, 30)]
    for text in texts:
        cache = write(made, text)
        assert cache.index == 0 or not compact
    for _ in range(2):
        for text in texts:
            assert read(made, 0, text) == text
            cache = made.open([*text, 7], "one")
            assert (cache.token_ids, cache.index) == (text, 0) or not compact
            assert made.kv.read(cache.first_position, cache.first_position + 3)["0"][0, 1, 0, :, 1].tolist() == text
            made.close(cache)
    for n in (40, 50):
        write(made, [n, n + 1])
    assert [read(made, 0, text) for text in texts] == [None, texts[1], texts[2]], "the one that was unused longest"


def test_texts_with_a_common_beginning_keep_their_ends() -> None:
    made, texts = pool(3, compact=True), [[1, 2, 3, 4], [1, 2, 5, 6]]
    for text in texts:
        write(made, text)
    for text in texts * 2:
        cache = made.open([*text, 9], "one")
        assert (cache.index, cache.token_ids) == (0, text)
        assert made.kv.read(cache.first_position, cache.first_position + 4)["0"][0, 0, 0, :, 0].tolist() == text
        made.close(cache)


def test_the_prefix_of_a_text_is_copied_before_its_place_is_taken() -> None:
    """The longest unused text is the one that the new one begins with."""
    made = pool(2, compact=True)
    write(made, [1, 2, 3])
    write(made, [5, 6, 7])
    cache = made.open([1, 2, 9], "one")
    assert (cache.index, cache.token_ids) == (0, [1, 2])
    assert made.kv.read(cache.first_position, cache.first_position + 2)["0"][0, 0, 0, :, 0].tolist() == [1.0, 2.0]
