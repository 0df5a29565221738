"""Random blocks of every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from langchain_card.runtime.cpu import row_layers
from langchain_card.runtime.cpu.blocks.formats import FORMATS, Format
from langchain_card.runtime.cpu.blocks.matmul import Weights
from langchain_card.runtime.cpu.blocks.packing import MatrixPart, StoredRows, pack
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
    """A digest of the bits of products in every format."""
    import hashlib

    found = hashlib.sha256()
    for form in FORMATS:
        weights = matrix((form.number, blocks(form, 40)))
        x = np.random.default_rng(5).standard_normal((11, features_of(form))).astype(np.float32)
        found.update(product(x, weights).tobytes())
    return found.hexdigest()
