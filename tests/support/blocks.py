"""Random blocks of every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.blocks.formats import FORMATS, Q4_0, Q4_K, Q8_0, Format, dequantize
from langchain_card.runtime.cpu.blocks.matmul import Weights
from langchain_card.runtime.cpu.blocks.packing import MatrixPart, StoredRows, pack
from langchain_card.runtime.cpu.blocks.rounding import quantize
from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.threads import use_threads


def features_of(form: Format) -> int:
    """Blocks of 256 features and, where the format allows it, a part of one."""
    return 768 if form.features == 256 else 928


def blocks(form: Format, outputs: int, seed: int = 0, *, features: int = 0, size: float = 0.01) -> Any:
    """Random blocks [outputs, bytes] with factors up to a size."""
    rng, count = np.random.default_rng(seed), (features or features_of(form)) // form.features
    rows = rng.integers(0, 256, (outputs, count, form.size), dtype=np.uint8)
    factors = rng.uniform(-size, size, (2, outputs, count)).astype(np.float16)
    at = 208 if form.name == "Q6_K" else 0
    rows[..., at : at + 2] = factors[0][..., None].view(np.uint8)
    if form.has_min:
        rows[..., 2:4] = factors[1][..., None].view(np.uint8)
    return rows.reshape(outputs, -1)


def matrix(*parts: tuple[int, Any]) -> Weights:
    """A matrix of parts: number of a format, and blocks."""
    return pack([MatrixPart(number, [StoredRows(number, rows)]) for number, rows in parts])


def product(x: Any, weights: Weights, threads: int = 1) -> Any:
    use_threads(threads)
    with cores() as team:
        return row_layers.linear(x, weights, np.empty(0, np.float32), team)


def digest() -> str:
    """A digest of the bits of weights, of rounded weights and of products in every format."""
    import hashlib

    found = hashlib.sha256()
    for form in FORMATS:
        rows = blocks(form, 40)
        weights, numbers = matrix((form.number, rows)), dequantize(form.number, rows)
        found.update(numbers.tobytes())
        x = np.random.default_rng(5).standard_normal((11, features_of(form))).astype(np.float32)
        found.update(product(x, weights).tobytes())
        for number in (Q8_0, Q4_0, Q4_K) if form.features == 256 else (Q8_0, Q4_0):
            found.update(quantize(number, numbers).tobytes())
    return found.hexdigest()
