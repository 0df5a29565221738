"""The slots for keys and values of all sequences of one model, reserved at once, without paging.

What a slot holds is up to the pool's storage: tensors (`TensorKV`), or integers (`cpu.integer_kv`).

Every sequence has a range of slots: scratch slots for unverified rows, then one slot per position:

```
slot   0 .. num_scratch-1 | num_scratch .. num_scratch+length-1 | ..
       rows not yet kept  | committed positions 0 .. length-1   | room for more
```

A row is written once, into its scratch slot, and stays there until it is kept or freed. Its path (the unverified rows
from the last committed position down to it) is a list of slots. Keeping rows copies them into committed positions;
rejecting them costs nothing.

A closed sequence leaves its text behind, from which other threads may read. The next one takes over the longest prefix
that it shares with any text of the same owner: the tenant, and the adapter that keys and values depend on. Texts of
other tenants are never shared: response times would reveal them. A text whose logits were not finite is not shared,
and its slots are cleared.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from langchain_card.runtime.adapters import NONE
from langchain_card.runtime.transfer import to_device

STEP = 4
"""Factor from one size of a step over grids to the next: rows that are empty cost less than further graphs."""


class KVStorage(Protocol):
    """Keys and values of all layers, by slots."""

    def copy(self, sources: Sequence[int], start: int) -> None:
        """Copy slots to those from `start` on, in order."""

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return a copy of slots from `start` to `stop`, both multiples of the pool's `align`, on the CPU."""
        ...

    def write(self, start: int, parts: Mapping[str, Tensor]) -> None:
        """Write what `read` returned to slots from `start` on."""


class TensorKV:
    """Keys and values as tensors of floats.

    Args:
        num_slots: number of slots.
        devices: [layers] device of each layer.
        kv_heads, head_dim: shape of each layer's keys and values.
        dtype: type of keys and values.

    Attributes:
        layers: [layers] keys and values [2, kv_heads, num_slots, head_dim]; keys first.
    """

    def __init__(
        self, num_slots: int, *, devices: Sequence[torch.device], kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._allocate((2, kv_heads, num_slots, head_dim), devices, dtype)

    def _allocate(self, shape: tuple[int, ...], devices: Sequence[torch.device], dtype: torch.dtype) -> None:
        """Allocate one block for all layers of each device; `shape` is a layer's."""
        self._blocks = {
            device: zeros((devices.count(device), *shape), dtype, device) for device in dict.fromkeys(devices)
        }
        rows = {device: iter(block) for device, block in self._blocks.items()}
        self.layers: list[Tensor] = [next(rows[device]) for device in devices]

    @property
    def block(self) -> Tensor:
        """Keys and values of all layers, [layers, 2, kv_heads, num_slots, head_dim], if they lie on one device."""
        (block,) = self._blocks.values()
        return block

    def copy(self, sources: Sequence[int], start: int) -> None:
        """Copy slots as `KVStorage` demands."""
        for device, block in self._blocks.items():
            index = to_device(torch.tensor(sources), device)
            block[:, :, :, start : start + len(sources)] = block.index_select(3, index)

    def _part(self, block: Tensor, start: int, stop: int) -> Tensor:
        """Return a view of one sequence's slots, [layers, 2, kv_heads, slots, head_dim]."""
        return block[:, :, :, start:stop]

    def clear(self, start: int, stop: int) -> None:
        """Write zeros to slots from `start` to `stop`: zero times NaN is NaN, and a grid's mask multiplies by zero."""
        for block in self._blocks.values():
            self._part(block, start, stop).zero_()

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return a copy of slots, for each device [its layers, 2, kv_heads, slots, head_dim]."""
        return {
            str(n): self._part(block, start, stop).clone(memory_format=torch.contiguous_format).cpu()
            for n, block in enumerate(self._blocks.values())
        }

    def write(self, start: int, parts: Mapping[str, Tensor]) -> None:
        """Write slots as `KVStorage` demands."""
        for n, block in enumerate(self._blocks.values()):
            part = parts[str(n)]
            self._part(block, start, start + part.shape[3]).copy_(part)


class GridKV(TensorKV):
    """Keys and values for steps over grids, sequence by sequence: products of all sequences read them where they are.

    Where the heads lay outside, each product of several sequences would first copy all keys and values.

    Args:
        num_slots: number of slots: as many for each sequence, and one more.
        num_seqs: number of sequences.
        devices, kv_heads, head_dim, dtype: as in `TensorKV`.

    Attributes:
        layers: [layers] keys and values [2, num_seqs * kv_heads * slots of a sequence + 1, head_dim]; keys first.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        num_seqs: int,
        devices: Sequence[torch.device],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._shape = num_seqs, kv_heads, (num_slots - 1) // num_seqs
        self._allocate((2, math.prod(self._shape) + 1, head_dim), devices, dtype)

    def by_sequence(self, layer: int) -> Tensor:
        """Return a view of a layer, [2, num_seqs, kv_heads, slots of a sequence, head_dim]."""
        return self.layers[layer][:, :-1].view(2, *self._shape, -1)

    def places(self, slots: Tensor) -> Tensor:
        """Return the places of slots [rows] in a layer, [rows, kv_heads]; the last slot has one place for all heads."""
        num_seqs, kv_heads, num_slots = self._shape
        heads = torch.arange(kv_heads, device=slots.device)
        places = ((slots // num_slots)[:, None] * kv_heads + heads) * num_slots + (slots % num_slots)[:, None]
        return places.clamp(max=num_seqs * kv_heads * num_slots)

    def copy(self, sources: Sequence[int], start: int) -> None:
        """Copy slots as `KVStorage` demands."""
        places = self.places(torch.tensor([*sources, *range(start, start + len(sources))])).view(2, -1)
        for device, block in self._blocks.items():
            old, new = to_device(places, device)
            block.index_copy_(2, new, block.index_select(2, old))

    def _part(self, block: Tensor, start: int, stop: int) -> Tensor:
        index, first = divmod(start, self._shape[-1])
        by_sequence = block[:, :, :-1].view(*block.shape[:2], *self._shape, -1)
        return by_sequence[:, :, index, :, first : first + stop - start]


Storage = TypeVar("Storage", bound=KVStorage)


class KVPool(Generic[Storage]):
    """Slots for `num_seqs` sequences of one model.

    Args:
        store: makes the storage for a number of slots.
        max_len: positions per sequence.
        num_scratch: unverified rows per sequence.
        num_seqs: sequences open at once.
        compact: open low indices first, because a step costs as much as its highest index (`grid_attention.Bucket`);
            texts that lie there are moved to sequences that were unused longer.
        align: slots in a block of the storage; the ranges above are rounded up to whole blocks.

    Attributes:
        kv: the storage.
        num_slots: slots of one sequence.
        step_sizes: numbers of sequences that a step over grids computes.
        lock: held while a sequence takes over another text, and by other threads that read a sequence.
        trash: the last slot, which belongs to no sequence.
    """

    def __init__(
        self,
        store: Callable[[int], Storage],
        *,
        max_len: int,
        num_scratch: int,
        num_seqs: int = 1,
        compact: bool = False,
        align: int = 1,
    ) -> None:
        num_scratch, max_len = (-(-count // align) * align for count in (num_scratch, max_len))
        self.num_scratch, self.max_len, self.num_seqs = num_scratch, max_len, num_seqs
        self._compact, self._align, self.step_sizes = compact, align, sizes(1, num_seqs)
        self.lock = threading.RLock()
        self.num_slots, self.trash = num_scratch + max_len, num_seqs * (num_scratch + max_len)
        self.kv = store(self.trash + 1)
        self._caches = [KVCache(self, index) for index in range(num_seqs)]
        self._free = [*self._caches]  # longest unused first

    @property
    def num_free(self) -> int:
        """Number of sequences that can still be opened."""
        return len(self._free)

    def open(self, token_ids: Sequence[int] = (), owner: str = "") -> KVCache:
        """Open a sequence for an owner's text; a prefix known from other texts of the owner is committed already.

        A free sequence that consists of the prefix alone is continued in place. From other sequences, whose texts may
        be wanted again, the prefix is copied to the sequence that was unused longest.
        """
        assert self._free, "more sequences are open than there is room for"
        known = [
            common_prefix(old.token_ids, token_ids) * (old.owner == owner and not old.damaged) for old in self._caches
        ]
        shared = max(known)
        donor = self._caches[known.index(shared)]
        free = self._low() if self._compact else self._free
        cache = donor if donor in free and shared == donor.length else free[0]
        if self._compact and cache.length > (shared if cache is donor else 0):
            donor = self._move(cache, donor)
        self._free.remove(cache)
        with self.lock:
            if cache is not donor and shared:
                self.kv.copy(range(donor.first_position, donor.first_position + shared), cache.first_position)
                if shared == donor.length and donor in self._free:  # its place is wanted first
                    self._free.remove(donor)
                    self._free.insert(0, donor)
            cache.token_ids, cache.owner = list(token_ids[:shared]), owner
        return cache

    def _low(self) -> list[KVCache]:
        """Return the free sequences of the smallest step that holds one more."""
        size = next(size for size in self.step_sizes if size > self.num_seqs - len(self._free))
        return [cache for cache in self._free if cache.index < size]

    def _move(self, cache: KVCache, donor: KVCache) -> KVCache:
        """Move the text of a free sequence that is about to be opened to the one that was unused longest.

        The text stays where it is if no other sequence was unused for longer.

        Args:
            cache: the sequence.
            donor: a sequence whose text is still to be read.

        Returns:
            The sequence with the donor's text.
        """
        place = self._free.index(cache)
        other = next((old for old in self._free[:place] if old is not donor), None)
        if other is None:
            return donor
        with self.lock:
            self.kv.copy(range(cache.first_position, cache.first_position + cache.length), other.first_position)
            other.token_ids, other.owner = cache.token_ids, cache.owner
            cache.token_ids = []
        self._free.remove(other)
        self._free.insert(place, other)
        return other if cache is donor else donor

    def close(self, cache: KVCache) -> None:
        """Close a sequence; its committed positions may serve a later text, unless it is damaged.

        Closed texts of the owner that begin like a damaged one are forgotten as well: it may have taken over from them
        what damaged it.
        """
        self._free.append(cache)
        if cache.damaged:
            damaged = cache.token_ids[:1]
            for other in [old for old in self._free if old.owner == cache.owner and old.token_ids[:1] == damaged]:
                self._clear(other)

    def _clear(self, cache: KVCache) -> None:
        """Forget the text of a closed sequence, and clear the slots that it may have written."""
        with self.lock:
            used = min(self.num_slots, 2 * self.num_scratch + cache.length)
            if isinstance(self.kv, TensorKV):  # of integers, no row reads what is not its own
                self.kv.clear(cache.base, cache.base + used)
            cache.token_ids, cache.damaged = [], False

    def read(self, start: int, token_ids: list[int], owner: str) -> dict[str, Tensor] | None:
        """Return a copy of a text's keys and values from a position on, from any thread.

        Args:
            start: first position, in whole blocks of the storage.
            token_ids: of all positions up to the last one that is returned.
            owner: of the text.

        Returns:
            What the storage's `read` returns; None if no sequence holds the text any longer.
        """
        with self.lock:
            for cache in self._caches:
                if cache.owner == owner and cache.token_ids[: len(token_ids)] == token_ids:
                    return self.kv.read(cache.first_position + start, cache.first_position + len(token_ids))
        return None

    @contextlib.contextmanager
    def lent(self, length: int) -> Iterator[KVCache]:
        """Lend the first sequence's slots, those of `length` positions, between two steps.

        Whoever they belong to finds them unchanged, and no later sequence takes over what was in them meanwhile.
        """
        stop = self.num_scratch + -(-length // self._align) * self._align
        with self.lock:
            held = self.kv.read(0, stop)
            try:
                yield KVCache(self, 0)
            finally:
                self.kv.write(0, held)

    def forget(self) -> None:
        """Close all sequences and forget their texts."""
        with self.lock:
            for cache in self._caches:
                cache.token_ids, cache.damaged = [], False
        self._free = [*self._caches]


class KVCache:
    """The slots of one sequence.

    Attributes:
        pool: the pool with these slots.
        index: index of the sequence in the pool.
        base: first slot of the sequence in the pool.
        token_ids: tokens of the committed positions.
        owner: of the text.
        adapter: number of the adapter with which it is read (`adapters.NONE` for none).
        damaged: whether logits after the text were not finite numbers; set by whoever sees them.
    """

    def __init__(self, pool: KVPool[Any], index: int) -> None:
        self.pool, self.index, self.base = pool, index, index * pool.num_slots
        self.token_ids: list[int] = []
        self.owner, self.adapter = "", NONE
        self.damaged = False

    @property
    def length(self) -> int:
        """Number of committed positions."""
        return len(self.token_ids)

    @property
    def first_position(self) -> int:
        """The pool's slot of position 0."""
        return self.base + self.pool.num_scratch

    def keep(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Commit the rows in these slots, with their tokens, as the next positions, in the given order."""
        here = self.pool.num_scratch + self.length
        if any(slot != here + i for i, slot in enumerate(slots)):  # else they are in place
            self.pool.kv.copy([self.base + slot for slot in slots], self.base + here)
        self.token_ids += token_ids

    def write(self, start: int, token_ids: Sequence[int], parts: Mapping[str, Tensor]) -> None:
        """Commit positions from `start` on, which is at most the length, with what `read` returned for them."""
        self.pool.kv.write(self.first_position + start, parts)
        self.token_ids[start:] = token_ids


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: masked slots are multiplied by zero, and zero times a stray NaN is NaN.

    On a CPU the pages are the system's zero pages, which take memory when first written to. NumPy would request huge
    pages, with which a sequence takes 380 MB and half a second at its first token (SmolLM2; docs/LOG.md, 2026-11-22).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def sizes(first: int, last: int) -> list[int]:
    """Return the sizes of steps from `first` on, each `STEP` times the one before; `last` is the largest."""
    found = [min(first, last)]
    while found[-1] < last:
        found.append(min(found[-1] * STEP, last))
    return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905
        if x != y:
            return i
    return min(len(a), len(b))
