"""Frozen tables, built from a folder's text: the followers of each leader, and how often they came."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from langchain_card.errors import InvalidInputError
from langchain_card.ports import Setting

ORDERS = (3, 2, 1)
"""Tokens of a leader, by table; the longest known leader is used."""

FOLLOWERS = 4
"""Followers of a leader at most, the most frequent first."""

ENTRY_BYTES = 8 + FOLLOWERS * 5
MAX_BYTES = 1 << 30
"""Size of the largest file that is opened."""

SHARES = 8
"""Classes of a follower's share of its leader's occurrences, an eighth each."""

FORMAT = "langchain-card.ngrams.1"
_BITS = 21
_REBUILD = "build it anew: langchain-card ngrams FOLDER --model NAME --out FILE"
_TYPES = {"leaders": "int64", "followers": "int32", "shares": "uint8"}


def vocabulary_hash(tokenizer: Any) -> str:
    """Return a hash of the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


class FrozenTable:
    """A file of `write`, opened to be read.

    Args:
        path: path of the file.
        setting: the engine, whose vocabulary the file must be made for.

    Raises:
        InvalidInputError: it cannot be read, is damaged, or belongs to another tokenizer.
    """

    def __init__(self, path: str, setting: Setting) -> None:
        try:
            tables, metadata = _read(Path(path).expanduser())
        except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise InvalidInputError("table", path, f"cannot be read ({error})", _REBUILD) from error
        tokenizer = setting.tokenizer
        if tokenizer is not None and metadata.get("vocabulary") != vocabulary_hash(tokenizer):
            limit = f"was made for another tokenizer, that of {str(metadata.get('model'))[:100]}"
            raise InvalidInputError("table", path, limit, _REBUILD)
        if max((int(np.asarray(table[1]).max(initial=-1)) for _, table in tables), default=-1) >= setting.vocab_size:
            limit = f"names tokens that are not below {setting.vocab_size:,}"
            raise InvalidInputError("table", path, limit, _REBUILD)
        self._tables = tables

    def followers(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Return the tokens that follow the last ones of `path`, most frequent first.

        With each comes its share, and `SHARES` more where the leader is longer than a token.
        """
        for order, (leaders, followers, shares) in self._tables:
            if len(path) < order:
                continue
            key = 0
            for token in path[-order:]:
                key = key << _BITS | token
            i = bisect.bisect_left(leaders, key)
            if i < len(leaders) and leaders[i] == key:
                found = slice(i * FOLLOWERS, (i + 1) * FOLLOWERS)
                longer = SHARES * (order > 1)
                return [(t, longer + s) for t, s in zip(followers[found], shares[found], strict=True) if t >= 0]
        return []


Column = NDArray[Any]
Columns = tuple[Column, Column, Column]


def count(token_ids: Column, max_bytes: int) -> dict[int, Columns]:
    """Count the most frequent leaders that occur at least twice, and their followers.

    Args:
        token_ids: [tokens] of all text, a negative number after each file.
        max_bytes: of all tables.

    Returns:
        By order: leaders [n], ascending, packed 21 bits a token; followers [n, FOLLOWERS], padded with -1; the eighth
        part, 0 to 7, of the leader's occurrences that each is [n, FOLLOWERS].
    """
    counted = {order: _followers(token_ids, order) for order in ORDERS}
    gains = np.concatenate([gain for gain, _ in counted.values()])
    room = max_bytes // ENTRY_BYTES
    least = max(2, int(np.partition(gains, -room)[-room]) + 1) if len(gains) > room else 2
    return {
        order: (columns[0][gain >= least], columns[1][gain >= least], columns[2][gain >= least])
        for order, (gain, columns) in counted.items()
    }


def _followers(token_ids: Column, order: int) -> tuple[Column, Columns]:
    """Return all leaders of one length: how often their first follower came, and the columns."""
    ids = token_ids.astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, order + 1) if len(ids) > order else ids[:0].reshape(0, 2)
    windows = windows[(windows >= 0).all(axis=1)]
    keys = np.zeros(len(windows), np.int64)
    for i in range(windows.shape[1] - 1):
        keys = keys << _BITS | windows[:, i]
    pairs, times = _counted(keys, windows[:, -1])
    by_count = np.lexsort((pairs[1], -times, pairs[0]))
    leaders, first, sizes = np.unique(pairs[0][by_count], return_index=True, return_counts=True)
    followers = np.full((len(leaders), FOLLOWERS), -1, np.int32)
    shares = np.zeros((len(leaders), FOLLOWERS), np.uint8)
    seen = np.add.reduceat(times[by_count], first) if len(first) else times
    for rank in range(FOLLOWERS):
        has = np.flatnonzero(sizes > rank)
        at = by_count[first[has] + rank]
        followers[has, rank] = pairs[1][at]
        shares[has, rank] = SHARES * times[at] // (seen[has] + 1)
    return times[by_count[first]], (leaders, followers, shares)


def _counted(keys: Column, followers: Column) -> tuple[tuple[Column, Column], Column]:
    """Return each pair once, and how often it came."""
    order = np.lexsort((followers, keys))
    keys, followers = keys[order], followers[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (followers[1:] != followers[:-1])
    starts = np.flatnonzero(new)
    return (keys[starts], followers[starts]), np.diff(starts, append=len(keys))


def write(path: Path, tables: dict[int, Columns], tokenizer: Any, model: str) -> None:
    """Write a file that `FrozenTable` opens."""
    from safetensors.numpy import save_file

    named = {
        f"{name}.{order}": np.ascontiguousarray(column)
        for order, columns in tables.items()
        for name, column in zip(_TYPES, columns, strict=True)
    }
    metadata = {"format": FORMAT, "vocabulary": vocabulary_hash(tokenizer), "model": model}
    unfinished = path.with_name(f".{path.name}.unfinished")
    save_file(named, unfinished, metadata)
    unfinished.replace(path)


Tables = list[tuple[int, tuple[memoryview, memoryview, memoryview]]]


def _read(path: Path) -> tuple[Tables, dict[str, str]]:
    """Return the columns of each order and the metadata of a file."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"has {size:,} bytes, {MAX_BYTES:,} are the most")
    with safe_open(path, "numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"is of format {str(metadata.get('format'))[:100]}, not {FORMAT}")
        return [(order, _columns(file, order)) for order in ORDERS], metadata


def _columns(file: Any, order: int) -> tuple[memoryview, memoryview, memoryview]:
    arrays = {name: file.get_tensor(f"{name}.{order}").ravel() for name in _TYPES}
    if any(array.dtype != _TYPES[name] for name, array in arrays.items()):
        raise ValueError("its columns have other types")
    leaders, followers, shares = arrays.values()
    if not len(leaders) * FOLLOWERS == len(followers) == len(shares):
        raise ValueError("its columns differ in length")
    if shares.max(initial=0) >= SHARES:
        raise ValueError(f"a share is not below {SHARES}")
    return memoryview(leaders), memoryview(followers), memoryview(shares)
