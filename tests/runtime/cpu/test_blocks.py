"""Products of rows with blocks of GGUF files: weights, sums, rows and instruction sets."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from langchain_card.runtime.cpu import vectors
from langchain_card.runtime.cpu.blocks import formats
from langchain_card.runtime.cpu.blocks.formats import FORMATS, Format
from langchain_card.runtime.cpu.blocks.packing import MatrixPart, Packer, StoredRows
from langchain_card.runtime.cpu.blocks.rounding import quantize
from tests.support.blocks import blocks, features_of, matrix, product

each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def dequantized(form: Format, rows: Any) -> Any:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[form.name])


def rounded_rows(x: Any) -> Any:
    """The rows that are really multiplied."""
    out = np.empty(x.shape, np.float64)
    for begin in range(0, x.shape[1], 256):
        part = x[:, begin : begin + 256]
        top = np.abs(part).max(axis=1, keepdims=True)
        out[:, begin : begin + 256] = np.rint(part * (np.float32(127) / top)) * (top / np.float32(127)).astype(float)
    return out


@each_format
def test_weights_are_those_of_the_file(form: Format) -> None:
    rows = blocks(form, 40)
    assert np.array_equal(formats.dequantize(form.number, rows), dequantized(form, rows))


@each_format
def test_products_are_those_of_the_dequantized_weights(form: Format) -> None:
    rows, x = blocks(form, 40), np.random.default_rng(1).standard_normal((5, features_of(form))).astype(np.float32)
    expected = rounded_rows(x) @ dequantized(form, rows).T.astype(np.float64)
    found = product(x, matrix((form.number, rows)))
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()


@each_format
def test_a_row_has_the_same_bits_beside_others_and_on_more_threads(form: Format) -> None:
    weights = matrix((form.number, blocks(form, 90)))
    x = np.random.default_rng(2).standard_normal((16, features_of(form))).astype(np.float32)
    alone = np.concatenate([product(x[n : n + 1], weights) for n in range(16)])
    for count in (2, 4, 7, 16):
        for threads in (1, 2):
            assert np.array_equal(product(x[:count], weights, threads), alone[:count])


def test_a_matrix_may_have_parts_of_several_formats() -> None:
    forms = [form for form in FORMATS if form.features == 256]
    parts = [(form.number, blocks(form, 32)) for form in forms]
    x = np.random.default_rng(3).standard_normal((3, 768)).astype(np.float32)
    expected = [product(x, matrix(part)) for part in parts]
    assert np.array_equal(product(x, matrix(*parts), 2), np.concatenate(expected, axis=1))


@each_format
@pytest.mark.parametrize("mapped", [False, True])
def test_blocks_may_be_rounded_ordered_and_mapped_and_share_tiles(form: Format, mapped: bool, tmp_path: Path) -> None:
    """More rows than a thread takes at a time, by two threads, from two tensors whose outputs meet within a tile."""
    first, second = blocks(form, 300), blocks(form, 40, seed=1)
    order = tuple(np.random.default_rng(4).permutation(300).tolist())
    (tmp_path / "file").write_bytes(first.tobytes())
    held = np.asarray(np.memmap(tmp_path / "file", np.uint8, "c", 0, first.shape)) if mapped else first
    given = [StoredRows(form.number, held, order, mapped=mapped), StoredRows(form.number, second)]
    rows, x = np.concatenate([first[list(order)], second]), np.ones((1, features_of(form)), np.float32)
    for number in (form.number, formats.Q4_0):
        packer = Packer([[MatrixPart(number, given)]])
        with ThreadPoolExecutor(2) as pool:
            [thread.result() for thread in [pool.submit(packer.run) for _ in range(2)]]
        rounded = rows if number == form.number else quantize(number, formats.dequantize(form.number, rows))
        assert np.array_equal(product(x, packer.weights()[0]), product(x, matrix((number, rounded))))
    assert np.array_equal(held, first), "memory that is no file's must stay"


@each_format
def test_the_largest_sums_are_right(form: Format) -> None:
    """All codes and levels at one end: sums of pairs that 16 bits do not hold, and of groups at their largest."""
    for filled in (0x00, 0xFF):
        rows = np.full((16, features_of(form) // form.features, form.size), filled, np.uint8)
        one = np.array([1.0], np.float16).view(np.uint8)
        at = 208 if form.name == "Q6_K" else 0
        rows[..., at : at + 2] = one
        if form.has_min:
            rows[..., 2:4] = 0
        rows = rows.reshape(16, -1)
        for sign, count in itertools.product((-1, 1), (1, 4)):
            x = np.full((count, features_of(form)), sign, np.float32)
            expected = rounded_rows(x) @ dequantized(form, rows).T.astype(np.float64)
            found = product(x, matrix((form.number, rows)))
            assert np.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("number", "bound"), [(formats.Q8_0, 0.5 / 127), (formats.Q4_0, 1.0 / 8)])
def test_rounding_to_blocks_is_as_near_as_their_levels_allow(number: int, bound: float) -> None:
    weights = np.random.default_rng(4).standard_normal((9, 96)).astype(np.float32)
    weights[3, :32] = 0.0
    back = formats.dequantize(number, quantize(number, weights))
    top = np.abs(weights.reshape(9, 3, 32)).max(axis=2, keepdims=True)
    errors = np.abs(back - weights).reshape(9, 3, 32)
    assert (errors <= (bound + 1e-3) * top).all() and errors.max() > 0.5 * bound * top.min()


def simply_rounded(number: int, weights: Any) -> Any:
    """Weights after rounding to `Q8_0` or `Q4_0`, by numpy."""
    groups = weights.reshape(-1, 32)
    largest = np.where(groups.max(1) > -groups.min(1), groups.max(1), groups.min(1))
    factor = np.abs(largest) / np.float32(127) if number == formats.Q8_0 else largest / np.float32(-8)
    factor = factor.astype(np.float16).astype(np.float32)[:, None]
    low, high = (-128, 127) if number == formats.Q8_0 else (-8, 7)
    codes = np.rint(groups * np.divide(1, factor, out=np.zeros_like(factor), where=factor != 0)).clip(low, high)
    return (codes * factor).reshape(weights.shape)


@pytest.mark.parametrize("number", [formats.Q8_0, formats.Q4_0])
def test_rounding_is_that_of_numpy_also_at_its_ends(number: int) -> None:
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((40, 96)).astype(np.float32)
    weights[0] = np.tile(np.arange(-16, 16) / 2, 3)  # halves lie between two codes
    weights[1, :32], weights[1, 32:64], weights[1, 64:] = 0.0, -0.0, 1e-30
    weights[2, 5], weights[2, 9], weights[3, 9], weights[3, 5] = 4.0, -4.0, 4.0, -4.0  # two of one magnitude
    weights[4] = rng.uniform(1, 1.49, 96) * 127 * 2.0**-24  # the factor is the smallest that there is
    weights[5] = rng.uniform(-1.49, 1.49, 96) * 8 * 2.0**-24
    weights[6] *= 1e4
    expected = simply_rounded(number, weights)
    assert np.array_equal(formats.dequantize(number, quantize(number, weights)), expected)
    turned = np.asfortranarray(weights)
    assert np.array_equal(formats.dequantize(number, np.asfortranarray(quantize(number, turned))), expected)


def test_k_blocks_lose_less_than_the_simple_ones_and_the_packages_reader_agrees() -> None:
    rng = np.random.default_rng(6)
    weights = (rng.standard_normal((64, 512)) * rng.uniform(0.1, 3, (64, 1)) + 0.3).astype(np.float32)
    weights[3, :256], weights[4, 256:], weights[5, :32] = 0.0, 1e-6, 2.0
    rows = quantize(formats.Q4_K, weights)
    back = formats.dequantize(formats.Q4_K, rows)
    assert np.array_equal(back, dequantized(FORMATS[formats.Q4_K], rows))
    simple = formats.dequantize(formats.Q4_0, quantize(formats.Q4_0, weights))
    assert np.square(back - weights).sum() < 0.9 * np.square(simple - weights).sum()
    step = (weights.max(axis=1) - np.minimum(weights.min(axis=1), 0))[:, None] / 15
    assert (np.abs(back - weights) <= 1.2 * step).all()


OLDER = {  # what is said first, and what numba is to take this CPU for
    "avx2": ("", {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx,+sse4.2,+bmi,+bmi2"}),
    "avxvnni": ("from langchain_card.runtime.cpu import vectors as v; v.instructions = lambda: 'avxvnni'", {}),
    "portable": ("", {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}),
}
DIGEST = """
from langchain_card.runtime.cpu import vectors
from tests.support.blocks import digest

print(vectors.instructions(), digest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
def test_other_instructions_give_the_same_bits(older: str, tmp_path: Path) -> None:
    """Each in a process of its own, which compiles for it (10 s)."""
    if older == "avxvnni" and vectors.instructions() != "avx512vnni":
        pytest.skip("this CPU has not the instruction")

    def run(before: str, env: dict[str, str]) -> list[str]:
        code = [sys.executable, "-c", before + DIGEST]
        done = subprocess.run(code, env=os.environ | env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    before, env = OLDER[older]
    kind, digest = run(before, env | {"NUMBA_CACHE_DIR": str(tmp_path)})
    assert kind == older and digest == run("", {})[1]
