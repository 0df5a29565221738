"""Tables built beforehand from a folder's text: what follows a leader, and how often."""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_card.errors import InvalidInputError
from langchain_card.ports import Setting

ORDERS = (3, 2, 1)
"""Tokens of a leader, by table; the longest that is known answers."""

FOLLOWERS = 4
"""Of a leader at most, the most frequent first."""

ENTRY_BYTES = 8 + FOLLOWERS * 5
MAX_BYTES = 1 << 30
"""Of a file that is opened."""

SHARES = 8
"""Classes of how often a follower comes: the eighth part of its leader's occurrences."""

FORMAT = "langchain-card.ngrams.1"
_BITS = 21
_REBUILD = "build it anew: langchain-card ngrams FOLDER --model NAME --out FILE"
_TYPES: dict[str, tuple[str, str]] = {"leaders": ("I64", "q"), "followers": ("I32", "i"), "shares": ("U8", "B")}


def vocabulary_hash(tokenizer: Any) -> str:
    """Of the tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


class FrozenTable:
    """A file of `write`, mapped into memory and only read.

    Args:
        path: of the file.
        setting: whose vocabulary the file must be made for.

    Raises:
        InvalidInputError: it cannot be read, is damaged, or belongs to another tokenizer.
    """

    def __init__(self, path: str, setting: Setting) -> None:
        try:
            with Path(path).expanduser().open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            tables, metadata = _read(memoryview(mapped))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError) as error:
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
        """Tokens that follow the last ones of `path`, most frequent first.

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
    """The most frequent leaders that occur twice or more, and what follows them.

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
    """All leaders of one length: how often their first follower came, and the columns."""
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
    """Each pair once, and how often it came."""
    order = np.lexsort((followers, keys))
    keys, followers = keys[order], followers[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (followers[1:] != followers[:-1])
    starts = np.flatnonzero(new)
    return (keys[starts], followers[starts]), np.diff(starts, append=len(keys))


def write(path: Path, tables: dict[int, Columns], tokenizer: Any, model: str) -> None:
    """Writes a file that `FrozenTable` opens."""
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


def _read(file: memoryview) -> tuple[Tables, dict[str, str]]:
    """The columns of each order, where they lie in a file, and what it says of itself."""
    if len(file) > MAX_BYTES:
        raise ValueError(f"has {len(file):,} bytes, {MAX_BYTES:,} are the most")
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(bytes(file[8 : 8 + length]))
    metadata, data = header["__metadata__"], file[8 + length :]
    if metadata["format"] != FORMAT:
        raise ValueError(f"is of format {str(metadata['format'])[:100]}, not {FORMAT}")
    tables = []
    for order in ORDERS:
        leaders, followers, shares = (_column(data, header[f"{name}.{order}"], name) for name in _TYPES)
        if not len(leaders) * FOLLOWERS == len(followers) == len(shares):
            raise ValueError("its columns differ in length")
        if np.asarray(shares).max(initial=0) >= SHARES:
            raise ValueError(f"a share is not below {SHARES}")
        tables.append((order, (leaders, followers, shares)))
    return tables, metadata


def _column(data: memoryview, entry: Any, name: str) -> memoryview:
    begin, end = entry["data_offsets"]
    dtype, code = _TYPES[name]
    if entry["dtype"] != dtype or not 0 <= begin <= end <= len(data):
        raise ValueError(f"{name} does not fit the file")
    column: memoryview = data[begin:end].cast(code)  # type: ignore[call-overload]
    return column
